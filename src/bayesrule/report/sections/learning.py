"""How it was learnt: the bound or the loss step by step, the held-out rows on the way, and where it ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runs.run import Run
from .. import charts
from ..format_numbers import count, number, several
from ..markup import Markup, joined, named, tag
from .layout import beside, figure, key

NATS = 10.0  # a picture of less than so many would show differences that do not matter
FACTS = {
    "bound": "Bound on the log evidence, nats",
    "log_evidence": "Log evidence, nats",
    "prior_precision": "Prior precision",
    "noise": "Noise, variance",
    "steps": "Steps",
    "reason": "Ended because",
}


def learning(run: Run) -> Markup | None:
    """Curves where there are steps to draw, and the numbers at the end."""
    figures = [each for each in (_bound(run), _heldout(run)) if each is not None]
    facts = [_fact(name, value) for name, value in run.facts.items() if value is not None]
    if not figures and not facts:
        return None
    known = tag("dl", facts, class_="facts") if facts else None
    # One figure alone has room for the facts beside it.
    return beside(*figures, known) if len(figures) == 1 else joined(known, beside(*figures) if figures else None)


def _bound(run: Run) -> Markup | None:
    """The bound rises, or the objective falls."""
    for name in ("bound", "objective"):
        values = np.asarray(run.trace.get(name, ()), float).ravel()
        steps = np.flatnonzero(np.isfinite(values))
        if steps.size >= 2:
            break
    else:
        return None
    marks = [float(at) for at in run.fits if 0 < at < values.size]
    title = "The bound, step by step" if name == "bound" else "The objective, step by step"
    named_y = "bound on the log evidence, nats" if name == "bound" else "objective"
    drawn = charts.curve(steps.astype(float), values[steps], named_y, title, marks, NATS)
    words = joined(
        key("orange mark", _mark(run)) if marks else None,
        f" Higher is a better posterior; {'between two marks' if marks else 'from step to step'} it should rise"
        f"{_fallen(values[steps], np.isin(steps, run.fits))}."
        if name == "bound"
        else " The objective at each step's points, lower is better; it is noisy where batches and samples are.",
        _outside(drawn),
    )
    return figure(drawn.chart, words)


def _mark(run: Run) -> str:
    """Why there are several fits: the same one with another prior, or one for each class."""
    return "the prior's strength was set anew" if "prior_precision" in run.facts else "a new fit began"


def _fallen(values: np.ndarray, starts: np.ndarray) -> str:
    """How often it fell after all, not counting where a fit began."""
    fell = int(np.sum((np.diff(values) < -1e-6 * (1 + np.abs(values[1:]))) & ~starts[1:]))
    return f", but for samples that are drawn; it fell at {count(fell)} of {count(values.size)} steps" if fell else ""


def _heldout(run: Run) -> Markup | None:
    values = np.asarray(run.trace.get("heldout_nll", ()), float).ravel()
    steps = np.asarray(run.trace.get("heldout_step", np.arange(values.size)), float).ravel()
    keep = np.isfinite(values) & np.isfinite(steps) if values.size == steps.size else np.zeros(0, bool)
    if keep.sum() < 3:
        return None
    title = "Held-out NLL, step by step"
    words = "The surprise at held-out rows on the way, in nats per row; lower is better. Nothing was chosen by it."
    drawn = charts.curve(steps[keep], values[keep], "held-out NLL, nats", title, least=0.2)
    return figure(drawn.chart, words + _outside(drawn))


def _outside(drawn: charts.Curve) -> str:
    return f" {several(drawn.hidden, 'value lies', 'values lie')} outside the picture." if drawn.hidden else ""


def _fact(name: str, value: Any) -> Markup:
    return tag("div", tag("dt", named(FACTS.get(name, name), 60)), tag("dd", _said(name, value)), class_="fact")


def _said(name: str, value: Any) -> Markup | str:
    if name == "reason" and value == "steps":
        return "its steps were used up"
    if isinstance(value, bool | str):
        return named(value, 120)
    array = np.asarray(value)
    if array.size == 1 and np.issubdtype(array.dtype, np.number):
        x = float(array.item())
        if not np.isfinite(x):
            return number(x)
        # Nats are compared with other nats: there the first decimal matters, however many digits come before it.
        exact = len(str(abs(int(x)))) + 1 if name in ("bound", "log_evidence") and abs(x) >= 10 else 3
        return count(x) if np.issubdtype(array.dtype, np.integer) else number(x, exact)
    if array.ndim and np.issubdtype(array.dtype, np.number):
        low, high = np.nanmin(array), np.nanmax(array)
        return f"{number(low)} to {number(high)} ({count(array.size)} values)"
    return named(value, 120)
