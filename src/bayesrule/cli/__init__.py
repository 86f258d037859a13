"""The command line: `bayesrule table` prints the paper's Table 1 from the algorithms themselves."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(
    help="The Bayesian learning rule: one update, and the algorithms that follow from it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"bayesrule {version('bayesrule')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The Bayesian learning rule: one update, and the algorithms that follow from it."""


@app.command()
def table() -> None:
    """Print Table 1 of Khan and Rue (2023): every algorithm, its candidate distribution and approximations."""
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


__all__ = ["app"]
