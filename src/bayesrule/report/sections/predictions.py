"""The predictions themselves beside the truth: intervals, a forecast's fan, or who was taken for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...runs.run import Run
from .. import charts
from ..charts import Series
from ..format_numbers import count, percent, several
from ..markup import Markup, joined, named, shortened, tag
from ..svg import Tick
from ..test_rows import Classified, Measured, classified, column, measured, task, thinned
from .headline import target_name
from .layout import figure, key, table

DRAWN, PAST, CLASSES = 200, 300, 12


def predictions(run: Run) -> Markup | None:
    """For a sequence the forecast, for numbers the intervals, for classes a table of confusions."""
    rows = measured(run)
    if rows is not None:
        return _forecast(run, rows) if task(run) == "sequence" else _intervals(run, rows)
    classes = classified(run)
    return None if classes is None else _confusion(run, classes)


def _intervals(run: Run, rows: Measured) -> Markup:
    thin = f" Of the rows at most {DRAWN} are drawn, evenly spread." if len(rows.y) > DRAWN else ""
    missed = len(rows.y) - int(rows.covered.sum())
    words = joined(
        key("blue", "prediction and 90 % interval"),
        key("ink dot", "observed"),
        key("orange dot", "observed outside"),
        f" {count(missed)} of {several(len(rows.y), 'row')} ({percent(missed / len(rows.y))}) are outside; ",
        f"about 10 % should be.{thin}",
    )
    return figure(charts.sorted_intervals(rows, shortened(target_name(run), 40), DRAWN), words, wide=True)


def _forecast(run: Run, rows: Measured) -> Markup:
    history, ahead = run.history, rows
    past = column(history.get("y", ()))[-PAST:] if np.size(history.get("y", ())) else np.zeros(0)
    then = np.asarray(history.get("time", np.arange(-len(past), 0)))[-PAST:]
    when, labels = _times(np.concatenate([then, ahead.time]) if len(past) else ahead.time)
    split = len(past)
    shown = None
    if split:
        mean = column(history.get("mean", np.full(split, np.nan)))[-PAST:]
        std = column(history.get("std", np.full(split, np.nan)))[-PAST:]
        shown = Series(when[:split], past, mean, std)
    fan = Series(when[split:], ahead.y, ahead.mean, ahead.std)
    whole = np.size(history.get("y", ()))
    cut = f" The last {PAST} of {count(whole)} values of the history are drawn." if whole > PAST else ""
    words = joined(
        key("blue", "fitted mean, then forecast"),
        key("blue soft", "90 % (and 50 %) bands"),
        key("ink dot", "observed"),
        key("orange dot", "outside its 90 %"),
        f" The {several(len(rows.y), 'value')} after the dashed line were not seen in training.{cut}",
    )
    return figure(charts.forecast(shown, fan, shortened(target_name(run), 40), labels), words, wide=True)


def _times(values: np.ndarray) -> tuple[np.ndarray, Sequence[Tick] | None]:
    """Times as numbers to draw at, and labels where these are not the numbers themselves (none for years)."""
    if np.issubdtype(values.dtype, np.number):
        numbers = values.astype(float)
        years = bool(np.all(numbers == np.round(numbers)) and numbers.min() >= 1000 and numbers.max() < 3000)
        return numbers, [] if years else None
    order = np.arange(len(values), dtype=float)
    days = values.astype("datetime64[s]") if np.issubdtype(values.dtype, np.datetime64) else None
    if days is not None and not np.isnat(days).any():
        order = days.astype(float)
    label = np.datetime_as_string(days, unit="D") if days is not None else values.astype(str)
    places = thinned(len(values), 60)
    return order, [(float(order[place]), shortened(label[place], 12)) for place in places]


def _confusion(run: Run, rows: Classified) -> Markup | None:
    size = rows.p.shape[1]
    names = [*run.classes[:size], *(f"class {place}" for place in range(len(run.classes), size))]
    found = np.zeros((size, size), int)
    np.add.at(found, (rows.y, rows.predicted), 1)
    if size > CLASSES:
        return _worst(found, names)
    heads = [tag("th", named(name, 14), scope="col", class_="number") for name in names]
    top = tag(
        "tr",
        tag("th", "true ↓", tag("br"), "predicted →", scope="col"),
        heads,
        tag("th", "found", scope="col", class_="number"),
    )
    body = [_line(names[true], line, true) for true, line in enumerate(found)]
    whole = tag("table", tag("thead", top), tag("tbody", body), class_="confusion")
    words = (
        "Rows by their true and predicted class; right ones on the diagonal. “Found” is the share of a class's rows "
        "that were recognised."
    )
    return joined(
        tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label="confusion table"),
        tag("p", words, class_="caption"),
    )


def _line(name: str, line: np.ndarray, true: int) -> Markup:
    total = int(line.sum())
    cells = [_cell(int(value), total, right=place == true) for place, value in enumerate(line)]
    share = percent(line[true] / total) if total else "–"
    return tag("tr", tag("th", named(name, 24), scope="row"), cells, tag("td", share, class_="number"))


def _cell(value: int, total: int, *, right: bool) -> Markup:
    shade = f"--share:{100 * value / total:.0f}%" if total and value else None
    look = "number " + ("right" if right else "wrong" if value else "zero")
    return tag("td", count(value), class_=look, style=shade)


def _worst(found: np.ndarray, names: Sequence[Any]) -> Markup | None:
    """Of many classes, the pairs that are mixed up most."""
    wrong = found - np.diag(np.diag(found))
    order = [place for place in np.argsort(-wrong, axis=None, kind="stable")[:10] if wrong.flat[place]]
    if not order:
        return None
    pairs = [np.unravel_index(place, wrong.shape) for place in order]
    lines = [
        [
            named(names[int(true)], 40),
            named(names[int(taken)], 40),
            count(wrong[true, taken]),
            percent(wrong[true, taken] / found[true].sum()),
        ]
        for true, taken in pairs
    ]
    heads = ["True class", "Taken for", "Rows", "Share of the class"]
    words = f"Of {several(len(names), 'class', 'classes')}, the pairs that were mixed up most often."
    return joined(table(heads, lines, numbers=(2, 3)), tag("p", words, class_="caption"))
