"""The command line. Each command is a function in a module of this folder.

Commands import what they need when they run, so that `--help` needs neither JAX nor NumPy.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .compare import compare
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


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"bayesrule {version('bayesrule')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The Bayesian learning rule: one update, and the algorithms that follow from it."""


for command in (fit, predict, compare, datasets, table, gallery):
    app.command()(command)

__all__ = ["app"]
