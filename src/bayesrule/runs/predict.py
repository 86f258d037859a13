"""Predictions of a run for new rows, as columns: a best guess, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import metrics
from ..tables.reading import read
from ..tables.tables import DATES, Column, InputError, Table
from ..tables.time_order import following, in_order
from . import score as judging

if TYPE_CHECKING:
    from .run import Run


def predicted(run: Run, data: Any = None, *, steps: int | None = None) -> dict[str, np.ndarray]:
    """Columns of predictions: for the rows of a file, a table, a DataFrame or a dict of columns; or the next steps.

    Numbers have "prediction", "std" and a 90 % interval, "low" and "high"; classes have "prediction", its
    "probability", and a column for each class's.
    """
    table = None if data is None else rows_of(run, data)
    if run.config["task"] == "sequence":
        return _forecast(run, table, 12 if steps is None else steps)
    if steps is not None:
        raise InputError("--steps is for sequences: this run predicts rows, so give a file of them.")
    if table is None:
        raise InputError("Say which rows to predict: give a file with the columns that the run was trained on.")
    prepared: Any = run.encoding
    x = prepared.matrix(table)
    if run.classes:
        probabilities = run.estimator.predict_proba(x)
        best = np.argmax(probabilities, axis=1)
        every = {f"p({label})": probabilities[:, place] for place, label in enumerate(run.classes)}
        names = np.array(run.classes)
        return {"prediction": names[best], "probability": probabilities[np.arange(len(best)), best], **every}
    found = judging.numbers(run.estimator, x, run.config["task"])
    return {"prediction": found.pop("mean"), **found}


def _forecast(run: Run, table: Table | None, steps: int) -> dict[str, np.ndarray]:
    """The next steps, after the run's own series or after a new one."""
    if table is None:
        y, times = (np.concatenate([run.history[name], run.test[name]]) for name in ("y", "time"))
    else:
        order, times = in_order(table, run.config.get("time"))
        target = table.column(run.config["target"])
        if target.numbers is None:
            raise InputError(f"Column {target.name!r} was numbers in training, and is text here.")
        y = target.numbers[order]
    mean, std = (part[:, 0] for part in run.estimator.predict(y, steps=steps, return_std=True))
    low, high = metrics.interval(mean, std)
    return {"time": following(times, steps), "prediction": mean, "std": std, "low": low, "high": high}


def rows_of(run: Run, data: Any) -> Table:
    """New rows as a table, read as the training rows were."""
    return as_table(data, [] if run.encoding is None else run.encoding.encoding.categories)


def as_table(data: Any, categories: Sequence[str] = ()) -> Table:
    """A table of whatever holds columns."""
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        return read(data, categories)
    if hasattr(data, "columns") or isinstance(data, dict):
        names = list(getattr(data, "columns", data))
        return Table(
            {str(name): _column(str(name), np.atleast_1d(np.asarray(data[name]))) for name in names}, "the data"
        )
    raise InputError(f"Rows are given as a file, a DataFrame or a dict of columns, not as a {type(data).__name__}.")


def _column(name: str, values: np.ndarray) -> Column:
    if values.dtype.kind == "M":
        return Column(name, numbers=values.astype("datetime64[us]").astype(float) / 8.64e10, note=DATES)
    if values.dtype.kind in "iuf":
        return Column(name, numbers=values.astype(float))
    missing = lambda value: value is None or value != value or str(value) in ("", "nan", "<NA>")
    as_text = lambda value: str(value).lower() if isinstance(value, bool | np.bool_) else str(value)
    return Column.of_text(name, [None if missing(value) else as_text(value) for value in values])
