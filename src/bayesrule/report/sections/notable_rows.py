"""The section on notable rows: the most uncertain predictions, and the rows with the most influence."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runs.run import Run
from ..format_numbers import count, number, percent, rounded_to
from ..held_out_rows import class_predictions, numeric_predictions, task
from ..markup import Markup, join, tag, user_text
from .layout import side_by_side, table

SHOWN = 8


def render_notable_rows(run: Run) -> Markup | None:
    """Two tables side by side, or the only one there is."""
    parts = [part for part in (_uncertain(run), _influential(run)) if part is not None]
    if not parts:
        return None
    numbering = "Rows are numbered as in the file; the first one after the header is row 0."
    return join(side_by_side(*parts), tag("p", numbering, class_="caption"))


def _uncertain(run: Run) -> Markup | None:
    """Held-out rows with the least confident prediction, or the largest predictive standard deviation."""
    classes, lines, heads = class_predictions(run), [], ["Row", "Observed", "Predicted"]
    if classes is not None:
        for i in np.argsort(classes.confidence, kind="stable")[:SHOWN]:
            observed, predicted = _class_name(run, classes.y[i]), _class_name(run, classes.predicted[i])
            shown = predicted if classes.correct[i] else tag("span", predicted, " (wrong)", class_="warn")
            lines.append([str(classes.row[i]), observed, shown, percent(classes.confidence[i])])
        words = "Held-out rows whose most probable class is the least probable: check these by hand."
        return _part("Most uncertain", words, table([*heads, "Confidence"], lines, numbers=(0, 3)))
    numbers = numeric_predictions(run)
    if numbers is None or not np.isfinite(numbers.std).any():
        return None
    title, words, badness = "Most uncertain", "Held-out rows with the widest predictive distribution.", numbers.std
    if task(run) == "sequence":  # The most uncertain forecasts would simply be the last ones.
        title = "Most surprising"
        words = "Held-out values with the largest errors, in units of their predicted standard deviation."
        badness = np.abs(numbers.y - numbers.mean) / np.where(numbers.std > 0, numbers.std, np.nan)
    for i in np.argsort(-np.nan_to_num(badness, nan=-1, posinf=np.inf), kind="stable")[:SHOWN]:
        std, ends = float(numbers.std[i]), (numbers.mean, numbers.low, numbers.high)
        mean, low, high = (rounded_to(float(part[i]), std) for part in ends)
        limits = f"{low} to {high}"
        interval = limits if numbers.covered[i] else tag("span", limits, " (missed)", class_="warn")
        lines.append([str(numbers.row[i]), number(numbers.y[i], 4), mean, interval])
    return _part(title, words, table([*heads, "90 % interval"], lines, numbers=(0, 1, 2, 3)))


def _influential(run: Run) -> Markup | None:
    """Training rows by how far the posterior would move without them."""
    influence = np.asarray(run.influence.get("influence", ()), float).ravel()
    row = np.asarray(run.influence.get("row", np.arange(influence.size))).ravel()
    finite = np.flatnonzero(np.isfinite(influence))
    if not finite.size or row.size != influence.size:
        return None
    order = finite[np.argsort(-influence[finite], kind="stable")[:SHOWN]]
    extras = {"y": "Observed", "mean": "Predicted without it"}
    extra = [
        (head, np.asarray(run.influence[key]))
        for key, head in extras.items()
        if np.size(run.influence.get(key, ())) == influence.size
    ]
    density = np.asarray(run.influence.get("log_density", np.full(influence.size, np.nan)), float).ravel()
    discrete = task(run) in ("binary", "classes", "counts")
    heads = ["Row", *(head for head, _ in extra), "Influence, nats"]
    heads.append("Probability without it" if discrete else "Log density without it")
    fits = {i: percent(np.exp(density[i])) if discrete else number(density[i]) for i in order}
    lines = [
        [str(row[i]), *(_value(run, values[i], head) for head, values in extra), number(influence[i]), fits[i]]
        for i in order
    ]
    words = (
        f"Of {count(influence.size)} training rows, those without which the posterior would move most, and how "
        "probable each is for a model trained without it: a low value may be an error in the data."
    )
    return _part("Most influential", words, table(heads, lines, numbers=tuple(range(len(heads)))))


def _value(run: Run, value: Any, head: str) -> Any:
    if head == "Observed" and task(run) in ("binary", "classes"):
        return _class_name(run, value)
    return number(value, 4)


def _class_name(run: Run, index: Any) -> Markup:
    known = np.isfinite(float(index)) and 0 <= int(index) < len(run.classes)
    return user_text(run.classes[int(index)] if known else index, 24)


def _part(title: str, words: str, body: Markup) -> Markup:
    return tag("div", tag("h3", title), tag("p", words, class_="caption"), body)
