"""Commands that look at the algorithms: `table` prints the paper's Table 1 and checks it, `gallery` draws it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import DEBUG, tidy

if TYPE_CHECKING:
    from rich.table import Table

    from ..reference_checks import Outcome


@tidy
def table(
    check: Annotated[bool, typer.Option("--check", help="Run every row against its reference.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Print Table 1 of Khan and Rue (2023): every algorithm, its candidate distribution and approximations.

    With --check every row is run against a reference that is not this library's, and the error is printed.
    """
    if check:
        raise typer.Exit(_checked())
    from rich.console import Console

    # Into a file or a pipe there is no window to fit: each row stays on one line.
    Console(width=None if sys.stdout.isatty() else 120).print(_printed())


def _printed() -> Table:
    from rich import box
    from rich.table import Table

    from ..recipes import table as rows

    shown = Table(title="Learning algorithms as instances of one rule", box=box.SIMPLE_HEAD)
    for heading in ("Learning algorithm", "Recipe", "Posterior approx.", "Natural-gradient approx.", "Sec."):
        shown.add_column(heading, overflow="fold")
    block = None
    for row in rows():
        if row.block != block:
            block = row.block
            shown.add_section()
            shown.add_row(f"[bold]{block}[/bold]")
        name = f"blr.{row.recipe}" if row.available else "not there yet"
        shown.add_row(
            row.name, name, row.posterior, row.approximations, row.section, style=None if row.available else "dim"
        )
    return shown


def _checked() -> int:
    """Show every row's check as it ends; 0 if all passed."""
    _compile_quickly()
    from rich.console import Console

    from ..recipes import table as rows
    from ..reference_checks import outcome

    console, passed, seconds = Console(width=None if sys.stdout.isatty() else 120, highlight=False), [], 0.0
    console.print(_lines(None))
    with console.status("") as status:  # in a terminal only: a file has the rows
        for row in rows():
            status.update(f"{row.recipe} …")
            found = outcome(row)
            console.print(_lines(found))
            passed.append(found.passed)
            seconds += found.seconds
    console.print(f"\n {sum(passed)} of {len(passed)} rows agree with their references, in {seconds:.1f} seconds.")
    return int(not all(passed))


def _lines(found: Outcome | None) -> Table:
    """One row's check, or the heading: tables of one row each with the same columns, so that a row can be printed when
    it is there, however small the window."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, expand=True, padding=(0, 1))
    shown.add_column(width=19, no_wrap=True)
    shown.add_column(ratio=1)
    for _ in range(2):
        shown.add_column(width=9, no_wrap=True, justify="right")
    shown.add_column(width=4, no_wrap=True)
    if found is None:
        shown.add_row("Recipe", "Reference", "Error", "Tolerance", "", style="bold")
        return shown
    verdict = Text("pass", "green") if found.passed else Text("FAIL", "bold red")
    reference = Text("\n".join(filter(None, [found.check.reference, found.said])))
    shown.add_row(found.row.recipe, reference, f"{found.error:.1e}", f"{found.check.tolerance:.0e}", verdict)
    return shown


def _compile_quickly() -> None:
    """XLA without its optimisations: such small runs take milliseconds, and all that one waits for is compilation.

    It reads the flags when JAX is first used; where that has happened, or the user has flags, it stays as it is.
    """
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


@tidy
def gallery(
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("gallery"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Draw the paper's figures and one picture for each algorithm, with a page that shows them."""
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file: --out names a folder.")
    _compile_quickly()
    from rich.console import Console

    from ..gallery.page import entries
    from ..gallery.page import gallery as drawing

    console, count = Console(highlight=False), len(entries())
    with console.status("drawing …") as status:
        try:
            for place, each in enumerate(drawing(out), start=1):
                status.update(f"{place} of {count} drawn, the last one {each.entry.name}")
        except OSError as error:
            raise typer.BadParameter(f"{out} cannot be written to: {error}.") from error
    console.print(f"{count} pictures are in {out}: open {out / 'index.html'}", soft_wrap=True)
