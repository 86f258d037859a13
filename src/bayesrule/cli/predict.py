"""`bayesrule predict` and `bayesrule datasets`: predictions from a run, and the data sets that have names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import DEBUG, one_line_errors
from .reading import DATE_FORMAT, DECIMAL, MISSING, SHEET


@one_line_errors
def predict(
    run: Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)],
    data: Annotated[
        str | None, typer.Argument(help="A file with the columns that the run was trained on.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file; without it CSV is printed.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps of a sequence to forecast (default: 12).")] = None,
    missing: Annotated[list[str] | None, MISSING] = None,
    decimal: Annotated[str | None, DECIMAL] = None,
    date_format: Annotated[str | None, DATE_FORMAT] = None,
    sheet: Annotated[str | None, SHEET] = None,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Predict new rows with uncertainty, as CSV.

    Examples:

      bayesrule predict run/ new.csv --out predictions.csv

      bayesrule predict run/ --steps 24
    """
    from ..runs.average import describe_draws
    from ..runs.data_checks import describe_new_rows
    from ..runs.predict import read_like_training
    from ..runs.store import load_run
    from ..tables.options import ReadingOptions
    from ..tables.tables import InputError

    loaded = load_run(run)
    said = {"missing": missing, "decimal": decimal, "date_format": date_format, "sheet": sheet}
    options = ReadingOptions.from_config(said)
    rows = None if data is None else read_like_training(loaded, data, options)
    predictions = loaded.predict(rows, steps=steps)
    for name, count in loaded.unseen(rows).items():
        values = "1 value" if count == 1 else f"{count:,} values"
        typer.echo(
            f"warning: {values} of {name!r} did not occur in training; all indicator columns are 0 for "
            f"{'it' if count == 1 else 'them'}, and the intervals do not include that nothing is known of "
            f"{'it' if count == 1 else 'them'}",
            err=True,
        )
    if loaded.encoding is not None and rows is not None:
        for sentence in describe_new_rows(loaded.encoding.encoding.columns, rows):
            typer.echo(f"warning: {sentence}", err=True)
    drawn = loaded.missing(rows)
    if drawn:
        typer.echo(f"note: {describe_draws(drawn)}", err=True)
    if out is None:
        _write_csv(predictions, sys.stdout)
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            _write_csv(predictions, file)
        temporary.replace(out)
    except FileNotFoundError:
        raise InputError(f"{out.parent} is not a directory: make it first.") from None
    finally:
        temporary.unlink(missing_ok=True)


@one_line_errors
def datasets() -> None:
    """List the data sets that can be used by name."""
    from ..tables.datasets import DATASETS

    width = max(map(len, DATASETS))
    for entry in DATASETS.values():
        typer.echo(f"{entry.name:<{width}}  {entry.description} (target: {entry.target})")


def _write_csv(columns: dict[str, Any], file: Any) -> None:
    import csv

    writer = csv.writer(file)
    writer.writerow(columns)
    formatted = [[_format_cell(value) for value in values] for values in columns.values()]
    writer.writerows(zip(*formatted, strict=True))


def _format_cell(value: Any) -> str:
    """A number with the digits that it takes to read the same double again; six would round 10¹⁷ by 10¹¹."""
    return repr(float(value)) if isinstance(value, float) else str(value)
