"""Commands that look at the algorithms: `table` prints the paper's Table 1, `gallery` draws it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def table(
    check: Annotated[bool, typer.Option("--check", help="Run every row against its reference.")] = False,
) -> None:
    """Print Table 1 of Khan and Rue (2023): every algorithm, its candidate distribution and approximations."""
    if check:
        raise typer.BadParameter("--check is not there yet.")
    from rich import box
    from rich.console import Console
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
    # Into a file or a pipe there is no window to fit: each row stays on one line.
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


def gallery(
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("gallery"),
) -> None:
    """Draw the paper's figures and one picture for each algorithm, with a page that shows them."""
    raise typer.BadParameter(f"gallery is not there yet: nothing was written to {out}.")
