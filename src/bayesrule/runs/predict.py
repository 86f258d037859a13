"""Predictions of a run for new rows, or for the next steps of a sequence, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import metrics
from ..estimators.registry import TASKS_WITHOUT_TARGET
from ..tables.guess_columns import Context, TextColumn, guess_columns
from ..tables.options import ReadingOptions
from ..tables.reading import read
from ..tables.tables import DATES, Column, InputError, Table
from ..tables.time_order import next_times, order_by_time
from . import average
from .structure import predict_rows
from .word_counts import count_words

if TYPE_CHECKING:
    from .run import Run

_DEFAULT_STEPS = 12


def predict(run: Run, data: Any = None, *, steps: int | None = None) -> dict[str, np.ndarray]:
    """Predict with a run; see `Run.predict`."""
    table = None if data is None else read_like_training(run, data)
    if run.config["task"] == "sequence":
        return _forecast(run, table, _DEFAULT_STEPS if steps is None else steps)
    if steps is not None:
        raise InputError("--steps is for sequences, and this run predicts rows: give a file of rows instead.")
    if table is None:
        raise InputError("There are no rows to predict: give a file with the columns that the run was trained on.")
    if run.config["task"] in TASKS_WITHOUT_TARGET:
        return _find_structure(run, table)
    assert run.encoding is not None  # Only runs of sequences, and topics of texts, have no preprocessing.
    inputs = run.encoding.inputs(table)
    if run.classes:
        probabilities = average.predict_classes(run.estimator, inputs)
        best = np.argmax(probabilities, axis=1)
        by_class = {f"p({label})": probabilities[:, index] for index, label in enumerate(run.classes)}
        labels = np.array(run.classes)
        return {"prediction": labels[best], "probability": probabilities[np.arange(len(best)), best], **by_class}
    predictions = average.predict_numbers(run.estimator, inputs, run.config["task"])
    return {"prediction": predictions.pop("mean"), **predictions}


def _find_structure(run: Run, table: Table) -> dict[str, np.ndarray]:
    """The groups, topics or factors of rows."""
    inputs: Any
    if run.encoding is None:
        text = table.column(run.config["text"])
        if text.codes is None:
            raise InputError(f"Column {text.name!r} has numbers in this file, and had text in training: give text.")
        inputs = count_words(text, list(run.structure["vocabulary"]))
    else:
        inputs = run.encoding.inputs(table)
    return predict_rows(run.config["task"], run.estimator, inputs)


def _forecast(run: Run, table: Table | None, steps: int) -> dict[str, np.ndarray]:
    """The next steps, after the run's own series or after a new one."""
    if table is None:
        y, times = (np.concatenate([run.history[name], run.test[name]]) for name in ("y", "time"))
    else:
        order, times = order_by_time(table, run.config.get("time"))
        target = table.column(run.config["target"])
        if target.numbers is None:
            raise InputError(
                f"Column {target.name!r} has text in this file, and had numbers in training: give a file with numbers."
            )
        y = target.numbers[order]
    mean, std = (part[:, 0] for part in run.estimator.predict(y, steps=steps, return_std=True))
    low, high = metrics.interval(mean, std)
    return {"time": next_times(times, steps), "prediction": mean, "std": std, "low": low, "high": high}


def read_like_training(run: Run, data: Any, options: ReadingOptions | None = None) -> Table:
    """New rows as a table, of which the columns that the run needs are read as in training.

    Args:
        run: the run.
        data: a table, a file, a DataFrame or a dict of columns.
        options: what the user says about the file. What is not said is as in training.
    """
    said = options or ReadingOptions()
    trained = ReadingOptions.from_config(run.config)
    said = replace(said, missing=(*said.missing, *trained.missing))
    return as_table(data, _known_formats(run), said, trained.sheet)


def _known_formats(run: Run) -> dict[str, dict[str, Any]]:
    """The formats of the columns that a run predicts from."""
    if run.encoding is None:
        names = [name for name in (run.config["target"], run.config.get("time")) if name is not None]
        kinds: dict[str, dict[str, Any]] = {name: {} for name in names}
    else:
        # Runs of earlier versions do not say how columns were read, only what they are.
        kind = lambda column: "date" if column.get("note") == DATES else column["kind"]
        used = [column for column in run.encoding.encoding.columns if column["used"]]
        kinds = {column["name"]: {"kind": kind(column)} for column in used}
    formats = run.summary.get("formats", {})
    return {name: formats.get(name, kind) for name, kind in kinds.items()}


def as_table(
    data: Any,
    formats: Mapping[str, Mapping[str, Any]],
    options: ReadingOptions | None = None,
    usual_sheet: str | None = None,
) -> Table:
    """A table from a table, a file, a DataFrame or a dict of columns; of these, the columns with known formats."""
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        return read(data, options, formats, only=list(formats), usual_sheet=usual_sheet)
    if hasattr(data, "columns") or isinstance(data, dict):
        names = [name for name in getattr(data, "columns", data) if str(name) in formats]
        context = Context("the data", options or ReadingOptions(), formats)
        arrays = {str(name): np.atleast_1d(np.asarray(data[name])) for name in names}
        return Table({name: _column(name, values, context) for name, values in arrays.items()}, "the data")
    raise InputError(f"Rows to predict are a file, a DataFrame or a dict of columns, not a {type(data).__name__}.")


def _column(name: str, values: np.ndarray, context: Context) -> Column:
    """A column of a DataFrame or a dict. Numbers and dates are as they are, text is read as in training."""
    kind = context.formats[name].get("kind")
    if values.dtype.kind == "M":
        return Column(name, numbers=values.astype("datetime64[us]").astype(float) / 8.64e10, note=DATES)
    if values.dtype.kind in "iuf" and (values.dtype.kind == "f" or kind not in ("category", "truth")):
        return Column(name, numbers=values.astype(float))
    missing = lambda value: value is None or value != value or str(value) in ("", "nan", "<NA>")
    as_text = lambda value: str(value).lower() if isinstance(value, bool | np.bool_) else str(value)
    texts = [None if missing(value) else as_text(value) for value in values]
    if kind in (None, "category"):
        return Column.of_text(name, texts)
    import pyarrow as pa

    return guess_columns([TextColumn.of(name, pa.array(texts, pa.string()))], context)[name]
