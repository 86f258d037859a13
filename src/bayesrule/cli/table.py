"""`bayesrule table` prints the paper's Table 1 and checks it; `bayesrule gallery` draws its algorithms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import DEBUG, one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from ..reference_checks import Outcome


@one_line_errors
def table(
    check: Annotated[bool, typer.Option("--check", help="Compare every row with its reference.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Print Table 1 of Khan and Rue (2023): every algorithm, its candidate distribution and approximations.

    With --check every row is compared with a reference that is not part of this library, and the error is printed.
    """
    if check:
        raise typer.Exit(_check_rows())
    from rich.console import Console

    # A file or a pipe has no width that the table must fit, so that each row stays on one line.
    Console(width=None if sys.stdout.isatty() else 120).print(_build_table())


def _build_table() -> Table:
    """Table 1, from the values of the recipes."""
    from rich import box
    from rich.table import Table

    from ..recipes import table as rows

    built = Table(title="Learning algorithms as instances of one rule", box=box.SIMPLE_HEAD)
    for heading in ("Learning algorithm", "Recipe", "Posterior approx.", "Natural-gradient approx.", "Sec."):
        built.add_column(heading, overflow="fold")
    block = None
    for row in rows():
        if row.block != block:
            block = row.block
            built.add_section()
            built.add_row(f"[bold]{block}[/bold]")
        name = f"blr.{row.recipe}" if row.available else "not implemented"
        built.add_row(
            row.name, name, row.posterior, row.approximations, row.section, style=None if row.available else "dim"
        )
    return built


def _check_rows() -> int:
    """Print the check of every row when it ends. Returns the exit code: 0 if all passed, otherwise 1."""
    _compile_quickly()
    from rich.console import Console

    from ..recipes import table as rows
    from ..reference_checks import run_check

    console, passed, seconds = Console(width=None if sys.stdout.isatty() else 120, highlight=False), [], 0.0
    console.print(_format_outcome(None))
    with console.status("") as status:  # Shown in a terminal only.
        for row in rows():
            status.update(f"{row.recipe} …")
            result = run_check(row)
            console.print(_format_outcome(result))
            passed.append(result.passed)
            seconds += result.seconds
    console.print(f"\n {sum(passed)} of {len(passed)} rows agree with their references, in {seconds:.1f} seconds.")
    return int(not all(passed))


def _format_outcome(outcome: Outcome | None) -> Table:
    """One row's check, or (None) the heading.

    Each is a table of one row with fixed columns: so that it can be printed as soon as it is known, in a window of any
    width, and still lines up with the others.
    """
    from rich.table import Table
    from rich.text import Text

    line = Table(box=None, show_header=False, expand=True, padding=(0, 1))
    line.add_column(width=19, no_wrap=True)
    line.add_column(ratio=1)
    for _ in range(2):
        line.add_column(width=9, no_wrap=True, justify="right")
    line.add_column(width=4, no_wrap=True)
    if outcome is None:
        line.add_row("Recipe", "Reference", "Error", "Tolerance", "", style="bold")
        return line
    verdict = Text("pass", "green") if outcome.passed else Text("FAIL", "bold red")
    reference = Text("\n".join(filter(None, [outcome.check.reference, outcome.message])))
    line.add_row(outcome.row.recipe, reference, f"{outcome.error:.1e}", f"{outcome.check.tolerance:.0e}", verdict)
    return line


def _compile_quickly() -> None:
    """Turn XLA's optimisations off: the programs run for milliseconds, and compiling them takes most of the time.

    XLA reads its flags when JAX is first used, so that nothing is done after that, or if the user has set flags.
    """
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


@one_line_errors
def gallery(
    out: Annotated[Path, typer.Option("--out", help="The directory to write to.")] = Path("gallery"),
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Draw the paper's figures and one picture for each algorithm, with a page that shows them."""
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file: --out must be a directory.")
    _compile_quickly()
    from rich.console import Console

    from ..gallery import page

    console, count = Console(highlight=False), len(page.entries())
    with console.status("drawing …") as status:
        try:
            for number, picture in enumerate(page.write_gallery(out), start=1):
                status.update(f"{number} of {count} drawn, the last one {picture.entry.name}")
        except OSError as error:
            raise typer.BadParameter(f"{out} cannot be written to: {error}.") from error
    console.print(f"{count} pictures are in {out}: open {out / 'index.html'}", soft_wrap=True)
