"""The section on training: the bound or the loss at each step, the held-out rows during training, the final values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...fitting.bound import UP_TO_A_CONSTANT, with_error
from ...fitting.reason import Reason
from ...runs.run import Run
from .. import charts
from ..format_numbers import count, counted, number
from ..markup import Markup, join, tag, user_text
from .layout import figure, legend, side_by_side

NATS = 10.0  # Differences of the bound much below this do not matter, so the axis does not zoom in further.
FACTS = {
    "bound": "Bound on the log evidence, nats",
    "log_evidence": "Log evidence, nats",
    "prior_precision": "Prior precision",
    "noise": "Noise variance",
    "degrees_of_freedom": "Degrees of freedom",
    "steps": "Steps",
    "reason": "Stopped because",
}


def render_training(run: Run) -> Markup | None:
    """Curves over the steps, if there are any, and the final values."""
    figures = [each for each in (_bound(run), _held_out_nll(run)) if each is not None]
    error = run.facts.get("bound_error")
    hidden = ("bound_error", "bound_normalized")
    shown = {name: value for name, value in run.facts.items() if value is not None and name not in hidden}
    facts = [_fact(name, value, error if name == "bound" else None) for name, value in shown.items()]
    if "bound" in shown and not run.facts.get("bound_normalized", True):
        # A flat prior, such as the intercept's, counts as a density of 1.
        facts.append(_fact("Meaning of the bound", f"{UP_TO_A_CONSTANT}, which is flat (density 1)"))
    if not figures and not facts:
        return None
    values = tag("dl", facts, class_="facts") if facts else None
    if len(figures) == 1:  # The values fit next to a single figure.
        return side_by_side(*figures, values)
    return join(values, side_by_side(*figures) if figures else None)


def _bound(run: Run) -> Markup | None:
    """The bound at each step, or the objective if there is no bound."""
    for name in ("bound", "objective"):
        values = np.asarray(run.trace.get(name, ()), float).ravel()
        steps = np.flatnonzero(np.isfinite(values))
        if steps.size >= 2:
            break
    else:
        return None
    marks = [float(at) for at in run.fits if 0 < at < values.size]
    title = "The bound at each step" if name == "bound" else "The objective at each step"
    name_y = "bound on the log evidence, nats" if name == "bound" else "objective"
    curve = charts.step_curve(steps.astype(float), values[steps], name_y, title, marks, NATS)
    words = join(
        legend("orange mark", _mark(run)) if marks else None,
        f" Higher is better; {'between two marks' if marks else 'from step to step'} the bound should rise"
        f"{_count_falls(values[steps], np.isin(steps, run.fits))}."
        if name == "bound"
        else " The objective at the points of each step; lower is better. Mini-batches and samples make it noisy.",
        _count_outside(curve),
    )
    return figure(curve.chart, words)


def _mark(run: Run) -> str:
    """Why there are several fits: the prior was updated between them, or there is one for each class."""
    return "the prior's precision was updated" if "prior_precision" in run.facts else "a new fit began"


def _count_falls(values: np.ndarray, starts: np.ndarray) -> str:
    """At how many steps the bound fell, except where a new fit began."""
    fell = int(np.sum((np.diff(values) < -1e-6 * (1 + np.abs(values[1:]))) & ~starts[1:]))
    return f", except for sampling noise; it fell at {count(fell)} of {count(values.size)} steps" if fell else ""


def _held_out_nll(run: Run) -> Markup | None:
    values = np.asarray(run.trace.get("heldout_nll", ()), float).ravel()
    steps = np.asarray(run.trace.get("heldout_step", np.arange(values.size)), float).ravel()
    keep = np.isfinite(values) & np.isfinite(steps) if values.size == steps.size else np.zeros(0, bool)
    if keep.sum() < 3:
        return None
    title = "Held-out NLL during training"
    words = (
        "The NLL of the held-out rows during training, in nats per row; lower is better. It was not used to choose "
        "anything."
    )
    curve = charts.step_curve(steps[keep], values[keep], "held-out NLL, nats", title, least=0.2)
    return figure(curve.chart, words + _count_outside(curve))


def _count_outside(curve: charts.Curve) -> str:
    return f" {counted(curve.hidden, 'value lies', 'values lie')} outside the chart." if curve.hidden else ""


def _fact(name: str, value: Any, error: float | None = None) -> Markup:
    # An error below the digits that are shown is not shown either.
    text = _format_fact(name, value) if error is None or error < 0.005 else with_error(float(value), error)
    return tag("div", tag("dt", user_text(FACTS.get(name, name), 60)), tag("dd", text), class_="fact")


def _format_fact(name: str, value: Any) -> Markup | str:
    if name == "reason" and value == "exact":
        return "one step gives the exact posterior"
    if name == "reason" and value == "steps":
        return "the number of steps was reached"
    if name == "reason" and value in ("precision lost", "points too coarse"):
        return Reason(value).message
    if isinstance(value, bool | str):
        return user_text(value, 120)
    array = np.asarray(value)
    if array.size == 1 and np.issubdtype(array.dtype, np.number):
        x = float(array.item())
        if not np.isfinite(x):
            return number(x)
        # Bounds of several models are compared by their differences, so the first decimal is always shown.
        digits = len(str(abs(int(x)))) + 1 if name in ("bound", "log_evidence") and abs(x) >= 10 else 3
        return count(x) if np.issubdtype(array.dtype, np.integer) else number(x, digits)
    if array.ndim and np.issubdtype(array.dtype, np.number):
        low, high = np.nanmin(array), np.nanmax(array)
        return f"{number(low)} to {number(high)} ({count(array.size)} values)"
    return user_text(value, 120)
