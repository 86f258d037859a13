"""What each measure of a prediction is called, what it means in plain words, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .format_numbers import number, percent


class Measure(NamedTuple):
    """`better` is "lower", "higher", or the number to be near; None where neither is."""

    name: str
    meaning: str
    better: str | float | None
    shown: Callable[[Any], str] = number

    @property
    def direction(self) -> str:
        if self.better is None:
            return ""
        if isinstance(self.better, float):
            return f"closest to {self.shown(self.better)} is best"
        return f"{self.better} is better"

    def badness(self, value: Any) -> float:
        """How bad a value is, to compare two of them; NaN where nobody can say."""
        x = float(value) if isinstance(value, int | float) or hasattr(value, "__float__") else math.nan
        if self.better is None:
            return math.nan
        return abs(x - self.better) if isinstance(self.better, float) else x if self.better == "lower" else -x


MEASURES = {
    "accuracy": Measure("Accuracy", "the share of rows whose most probable class is the right one", "higher", percent),
    "rmse": Measure(
        "RMSE", "the typical size of an error, in the target's own units; large errors weigh more", "lower"
    ),
    "mae": Measure("MAE", "the mean size of an error, in the target's own units", "lower"),
    "r2": Measure("R²", "the share of the target's variance that is explained; 0 is no better than the mean", "higher"),
    "nll": Measure("NLL", "the surprise at the truth, in nats per row; being sure and wrong costs most", "lower"),
    "brier": Measure("Brier score", "the squared distance from the probabilities to the truth, from 0 to 2", "lower"),
    "ece": Measure("ECE", "the mean gap between claimed confidence and how often it was right", "lower"),
    "auroc": Measure("AUROC", "the chance that a row of the class is ranked above a row of the other", "higher"),
    "coverage90": Measure("Coverage", "the share of rows inside their 90 % interval", 0.9, percent),
    "width90": Measure("Interval width", "the mean width of the 90 % intervals; narrow is sharp", "lower"),
    "crps": Measure("CRPS", "the distance from the whole predicted distribution to the truth", "lower"),
    "deviance": Measure("Deviance", "twice the log-likelihood lost against a perfect fit, per row", "lower"),
    "mase": Measure("MASE", "the mean error relative to repeating the last value", "lower"),
}


def measure(key: str) -> Measure:
    """The measure by its key in a run; one that is not known here keeps its key as name, and takes no side."""
    return MEASURES.get(key, Measure(key, "", None))


def winner(key: str, model: Any, baseline: Any) -> str | None:
    """ "model" or "baseline", whichever is better; None where they are equal or one is missing.

    >>> winner("accuracy", 0.9, 0.6), winner("coverage90", 0.7, 0.89), winner("nll", 1.0, None)
    ('model', 'baseline', None)
    """
    ours, theirs = (math.nan if each is None else measure(key).badness(each) for each in (model, baseline))
    if math.isnan(ours) or math.isnan(theirs) or math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12):
        return None
    return "model" if ours < theirs else "baseline"
