"""The command line: each command is a function of a file beside this one, and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import EXIT_CODES
from .fit import fit
from .predict import datasets, predict
from .table import gallery, table

app = typer.Typer(
    help="The Bayesian learning rule: one update, and the algorithms that follow from it.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
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


for command in (fit, predict, datasets, table, gallery):
    app.command()(command)

__all__ = ["app"]
