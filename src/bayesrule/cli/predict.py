"""`bayesrule predict` and `bayesrule datasets`: predictions from a run, and the tables at hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import DEBUG as _DEBUG
from .errors import tidy

if TYPE_CHECKING:
    pass


@tidy
def predict(
    run: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    data: Annotated[
        str | None, typer.Argument(help="A file with the columns that the run was trained on.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file; else it is printed.")] = None,
    steps: Annotated[int | None, typer.Option(help="How far ahead to forecast a sequence.  [default: 12]")] = None,
    debug: Annotated[bool, _DEBUG] = False,
) -> None:
    """Predict new rows with uncertainty, as CSV.

    Examples:

      bayesrule predict run/ new.csv --out predictions.csv

      bayesrule predict run/ --steps 24
    """
    from ..runs.predict import rows_of
    from ..runs.store import load_run
    from ..tables.tables import InputError

    loaded = load_run(run)
    rows = None if data is None else rows_of(loaded, data)
    found = loaded.predict(rows, steps=steps)
    for name, count in loaded.unseen(rows).items():
        typer.echo(f"bayesrule: {count:,} values of {name!r} were not there in training, and count as none", err=True)
    if out is None:
        _write_csv(found, sys.stdout)
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            _write_csv(found, file)
        temporary.replace(out)
    except FileNotFoundError:
        raise InputError(f"{out.parent} is not a directory: make it first.") from None
    finally:
        temporary.unlink(missing_ok=True)


@tidy
def datasets() -> None:
    """List the data that can be used by name."""
    from ..tables.datasets import DATASETS

    width = max(map(len, DATASETS))
    for one in DATASETS.values():
        typer.echo(f"{one.name:<{width}}  {one.what} (target: {one.target})")


def _write_csv(columns: dict[str, Any], file: Any) -> None:
    import csv

    writer = csv.writer(file)
    writer.writerow(columns)
    shown = [[_cell(value) for value in values] for values in columns.values()]
    writer.writerows(zip(*shown, strict=True))


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
