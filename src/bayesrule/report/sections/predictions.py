"""The section on predictions: intervals, a forecast, or a confusion table, with the observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...runs.run import Run
from .. import charts
from ..charts import Series
from ..format_numbers import count, counted, percent
from ..held_out_rows import (
    ClassPredictions,
    NumericPredictions,
    class_predictions,
    evenly_spaced,
    first_column,
    numeric_predictions,
    task,
)
from ..markup import Markup, join, shorten, tag, user_text
from ..svg import Tick
from .headline import target_name
from .layout import figure, legend, table

SHOWN_ROWS, SHOWN_RESIDUALS, SHOWN_HISTORY, SHOWN_CLASSES = 200, 500, 300, 12


def render_predictions(run: Run) -> Markup | None:
    """The forecast of a sequence, the intervals of numbers, the confusion table of classes."""
    rows = numeric_predictions(run)
    if rows is not None:
        return _forecast(run, rows) if task(run) == "sequence" else _intervals(run, rows)
    classes = class_predictions(run)
    return None if classes is None else _confusion(run, classes)


def _intervals(run: Run, rows: NumericPredictions) -> Markup:
    subset = f" At most {SHOWN_ROWS} rows are drawn, evenly spaced in this order." if len(rows.y) > SHOWN_ROWS else ""
    missed = len(rows.y) - int(rows.covered.sum())
    words = join(
        legend("blue", "prediction and 90 % interval"),
        legend("ink dot", "observed"),
        legend("orange dot", "observed, outside the interval"),
        f" {count(missed)} of {counted(len(rows.y), 'row')} ({percent(missed / len(rows.y))}) are outside their ",
        f"interval; about 10 % should be.{subset}",
    )
    name = shorten(target_name(run), 40)
    return join(
        figure(charts.sorted_intervals(rows, name, SHOWN_ROWS), words, wide=True),
        _residuals(rows, name) if len(rows.y) > 2 else None,
    )


def _residuals(rows: NumericPredictions, name: str) -> Markup:
    words = join(
        legend("ink dot", "error"),
        legend("orange dot", "outside the interval"),
        legend("blue soft", "90 % interval"),
        legend("blue", "median of the errors") if len(rows.y) >= 75 else None,
        " Errors against predictions. They should lie around zero everywhere: a bend of the median means that the "
        "model misses a curve, a funnel that the noise is not the same everywhere.",
    )
    return figure(charts.residuals_by_prediction(rows, name, SHOWN_RESIDUALS), words, wide=True)


def _forecast(run: Run, rows: NumericPredictions) -> Markup:
    history = run.history
    length = np.size(history.get("y", ()))
    past_y = first_column(history["y"])[-SHOWN_HISTORY:] if length else np.zeros(0)
    split = len(past_y)
    past_time = np.asarray(history.get("time", np.arange(-split, 0)))[-SHOWN_HISTORY:]
    time, time_ticks = _times(np.concatenate([past_time, rows.time]) if split else rows.time)
    past = None
    if split:
        mean = first_column(history.get("mean", np.full(split, np.nan)))[-SHOWN_HISTORY:]
        std = first_column(history.get("std", np.full(split, np.nan)))[-SHOWN_HISTORY:]
        past = Series(time[:split], past_y, mean, std)
    ahead = Series(time[split:], rows.y, rows.mean, rows.std)
    cut = ""
    if length > SHOWN_HISTORY:
        cut = f" The last {SHOWN_HISTORY} of {count(length)} values of the history are drawn."
    words = join(
        legend("blue", "fitted mean, then forecast"),
        legend("blue soft", "90 % and 50 % bands"),
        legend("ink dot", "observed"),
        legend("orange dot", "outside the 90 % band"),
        f" The {counted(len(rows.y), 'value')} after the dashed line were not used in training.{cut}",
    )
    return figure(charts.forecast(past, ahead, shorten(target_name(run), 40), time_ticks), words, wide=True)


def _times(values: np.ndarray) -> tuple[np.ndarray, Sequence[Tick] | None]:
    """Times as numbers, and their ticks: None if the times are numbers, an empty list if they are years."""
    if np.issubdtype(values.dtype, np.number):
        numbers = values.astype(float)
        years = bool(np.all(numbers == np.round(numbers)) and numbers.min() >= 1000 and numbers.max() < 3000)
        return numbers, [] if years else None
    numbers = np.arange(len(values), dtype=float)
    days = values.astype("datetime64[s]") if np.issubdtype(values.dtype, np.datetime64) else None
    if days is not None and not np.isnat(days).any():
        numbers = days.astype(float)
    labels = np.datetime_as_string(days, unit="D") if days is not None else values.astype(str)
    indices = evenly_spaced(len(values), 60)
    return numbers, [(float(numbers[i]), shorten(labels[i], 12)) for i in indices]


def _confusion(run: Run, rows: ClassPredictions) -> Markup | None:
    size = rows.probabilities.shape[1]
    names = [*run.classes[:size], *(f"class {index}" for index in range(len(run.classes), size))]
    confusion = np.zeros((size, size), int)
    np.add.at(confusion, (rows.y, rows.predicted), 1)
    if size > SHOWN_CLASSES:
        return _most_confused(confusion, names)
    heads = [tag("th", user_text(name, 14), scope="col", class_="number") for name in names]
    top = tag(
        "tr",
        tag("th", "true ↓", tag("br"), "predicted →", scope="col"),
        heads,
        tag("th", "recall", scope="col", class_="number"),
    )
    body = [_line(names[true], line, true) for true, line in enumerate(confusion)]
    content = tag("table", tag("thead", top), tag("tbody", body), class_="confusion")
    words = (
        "Held-out rows by their true and predicted class, correct predictions on the diagonal. The recall is the share "
        "of a class's rows that are predicted correctly."
    )
    return join(
        tag("div", content, class_="scroll", tabindex="0", role="region", aria_label="confusion table"),
        tag("p", words, class_="caption"),
    )


def _line(name: str, line: np.ndarray, true: int) -> Markup:
    total = int(line.sum())
    cells = [_cell(int(value), total, correct=predicted == true) for predicted, value in enumerate(line)]
    recall = percent(line[true] / total) if total else "–"
    return tag("tr", tag("th", user_text(name, 24), scope="row"), cells, tag("td", recall, class_="number"))


def _cell(value: int, total: int, *, correct: bool) -> Markup:
    shade = f"--share:{100 * value / total:.0f}%" if total and value else None
    css_class = "number " + ("correct" if correct else "wrong" if value else "zero")
    return tag("td", count(value), class_=css_class, style=shade)


def _most_confused(confusion: np.ndarray, names: Sequence[Any]) -> Markup | None:
    """The pairs of classes that are confused most often, if there are too many classes for a table."""
    wrong = confusion - np.diag(np.diag(confusion))
    order = [index for index in np.argsort(-wrong, axis=None, kind="stable")[:10] if wrong.flat[index]]
    if not order:
        return None
    pairs = [np.unravel_index(index, wrong.shape) for index in order]
    lines = [
        [
            user_text(names[int(true)], 40),
            user_text(names[int(predicted)], 40),
            count(wrong[true, predicted]),
            percent(wrong[true, predicted] / confusion[true].sum()),
        ]
        for true, predicted in pairs
    ]
    heads = ["True class", "Predicted class", "Rows", "Share of the class"]
    words = f"Of {counted(len(names), 'class', 'classes')}, the pairs that are confused most often."
    return join(table(heads, lines, numbers=(2, 3)), tag("p", words, class_="caption"))
