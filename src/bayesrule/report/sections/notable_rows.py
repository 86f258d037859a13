"""The rows to look at: those it is least sure of, and those that moved the posterior most."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runs.run import Run
from ..format_numbers import count, number, percent, worth_saying
from ..markup import Markup, joined, named, tag
from ..test_rows import classified, measured, task
from .layout import table

SHOWN = 8


def rows(run: Run) -> Markup | None:
    """Two tables beside each other, or the one that there is."""
    parts = [part for part in (_uncertain(run), _influential(run)) if part is not None]
    if not parts:
        return None
    counted = "Rows are numbered as in the file, the first one after the heading being 0."
    return joined(tag("div", parts, class_="beside"), tag("p", counted, class_="caption"))


def _uncertain(run: Run) -> Markup | None:
    """Held-out rows by the entropy or the standard deviation of what was predicted."""
    found, lines, heads = classified(run), [], ["Row", "Observed", "Predicted"]
    if found is not None:
        for place in np.argsort(-found.entropy, kind="stable")[:SHOWN]:
            true, taken = _class(run, found.y[place]), _class(run, found.predicted[place])
            guess = taken if found.right[place] else tag("span", taken, " (wrong)", class_="warn")
            lines.append([str(found.row[place]), true, guess, percent(found.confidence[place])])
        words = "Held-out rows whose probabilities are closest to even: the ones to check by hand."
        return _part("Most uncertain", words, table([*heads, "Confidence"], lines, numbers=(0, 3)))
    numbers = measured(run)
    if numbers is None or not np.isfinite(numbers.std).any():
        return None
    title, words, badness = "Most uncertain", "Held-out rows with the widest predictive distribution.", numbers.std
    if task(run) == "sequence":  # there the widest are simply the last
        title, words = "Most surprising", "Held-out values that are furthest off, in units of their standard deviation."
        badness = np.abs(numbers.y - numbers.mean) / np.where(numbers.std > 0, numbers.std, np.nan)
    for place in np.argsort(-np.nan_to_num(badness, nan=-1, posinf=np.inf), kind="stable")[:SHOWN]:
        spread, ends = float(numbers.std[place]), (numbers.mean, numbers.low, numbers.high)
        mean, low, high = (worth_saying(float(part[place]), spread) for part in ends)
        within = f"{low} to {high}"
        interval = within if numbers.covered[place] else tag("span", within, " (missed)", class_="warn")
        lines.append([str(numbers.row[place]), number(numbers.y[place], 4), mean, interval])
    return _part(title, words, table([*heads, "90 % interval"], lines, numbers=(0, 1, 2, 3)))


def _influential(run: Run) -> Markup | None:
    """Training rows by how far the posterior moves without them."""
    moved = np.asarray(run.influence.get("influence", ()), float).ravel()
    row = np.asarray(run.influence.get("row", np.arange(moved.size))).ravel()
    sound = np.flatnonzero(np.isfinite(moved))
    if not sound.size or row.size != moved.size:
        return None
    order = sound[np.argsort(-moved[sound], kind="stable")[:SHOWN]]
    extras = {"y": "Observed", "mean": "Predicted without it"}
    extra = [
        (head, np.asarray(run.influence[key]))
        for key, head in extras.items()
        if np.size(run.influence.get(key, ())) == moved.size
    ]
    density = np.asarray(run.influence.get("log_density", np.full(moved.size, np.nan)), float).ravel()
    discrete = task(run) in ("binary", "classes", "counts")
    heads = ["Row", *(head for head, _ in extra), "Influence, nats"]
    heads.append("Probability without it" if discrete else "Log density without it")
    told = {i: percent(np.exp(density[i])) if discrete else number(density[i]) for i in order}
    lines = [
        [str(row[i]), *(_value(run, values[i], head) for head, values in extra), number(moved[i]), told[i]]
        for i in order
    ]
    words = (
        f"Of {count(moved.size)} training rows, those without which the posterior would move furthest, and how "
        "probable each is to a model that never saw it: a low one may be an error in the data."
    )
    return _part("Most influential", words, table(heads, lines, numbers=tuple(range(len(heads)))))


def _value(run: Run, value: Any, head: str) -> Any:
    if head == "Observed" and task(run) in ("binary", "classes"):
        return _class(run, value)
    return number(value, 4)


def _class(run: Run, place: Any) -> Markup:
    known = np.isfinite(float(place)) and 0 <= int(place) < len(run.classes)
    return named(run.classes[int(place)] if known else place, 24)


def _part(title: str, words: str, body: Markup) -> Markup:
    return tag("div", tag("h3", title), tag("p", words, class_="caption"), body)
