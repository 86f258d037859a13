"""The measures of predictions: their names, their meaning in plain words, and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .format_numbers import number, percent


class Measure(NamedTuple):
    """A measure; `better` is "lower", "higher", or the best value (a float), and None if no direction is known."""

    name: str
    meaning: str
    better: str | float | None
    format: Callable[[Any], str] = number

    @property
    def direction(self) -> str:
        if self.better is None:
            return ""
        if isinstance(self.better, float):
            return f"closest to {self.format(self.better)} is best"
        return f"{self.better} is better"

    def badness(self, value: Any) -> float:
        """A number that is lower for better values; NaN if they cannot be compared."""
        x = float(value) if isinstance(value, int | float) or hasattr(value, "__float__") else math.nan
        if self.better is None:
            return math.nan
        return abs(x - self.better) if isinstance(self.better, float) else x if self.better == "lower" else -x


MEASURES = {
    "accuracy": Measure("Accuracy", "the share of rows whose most probable class is the right one", "higher", percent),
    "rmse": Measure("RMSE", "the root mean squared error, in the units of the target", "lower"),
    "mae": Measure("MAE", "the mean absolute error, in the units of the target", "lower"),
    "r2": Measure("R²", "the share of the target's variance that is explained; predicting the mean gives 0", "higher"),
    "nll": Measure(
        "NLL",
        "the negative log-probability of the observed value, in nats per row; confident errors cost most",
        "lower",
    ),
    "brier": Measure("Brier score", "the squared distance between probabilities and true class, from 0 to 2", "lower"),
    "ece": Measure("ECE", "the mean gap between confidence and accuracy", "lower"),
    "auroc": Measure("AUROC", "the probability that a row of one class is ranked above a row of the other", "higher"),
    "coverage90": Measure("Coverage", "the share of rows inside their 90 % interval", 0.9, percent),
    "width90": Measure("Interval width", "the mean width of the 90 % intervals", "lower"),
    "crps": Measure("CRPS", "the distance from the predicted distribution to the observed value", "lower"),
    "deviance": Measure("Deviance", "twice the log-likelihood below that of a perfect fit, per row", "lower"),
    "log_density": Measure(
        "Log density", "the log density of a row, in nats; numbers were standardised, so that it has no unit", "higher"
    ),
    "perplexity": Measure(
        "Perplexity", "the model is as uncertain about a word as among so many equally probable ones", "lower"
    ),
    "mase": Measure("MASE", "the mean error relative to a forecast that repeats the last value", "lower"),
}


def measure(key: str) -> Measure:
    """The measure with this key in a run; an unknown one is named by its key and has no better direction."""
    return MEASURES.get(key, Measure(key, "", None))


def winner(key: str, model: Any, baseline: Any) -> str | None:
    """ "model" or "baseline", whichever is better; None if they are equal or one is missing.

    >>> winner("accuracy", 0.9, 0.6), winner("coverage90", 0.7, 0.89), winner("nll", 1.0, None)
    ('model', 'baseline', None)
    """
    model_badness, baseline_badness = (
        math.nan if each is None else measure(key).badness(each) for each in (model, baseline)
    )
    if math.isnan(model_badness) or math.isnan(baseline_badness):
        return None
    if math.isclose(model_badness, baseline_badness, rel_tol=1e-9, abs_tol=1e-12):
        return None
    return "model" if model_badness < baseline_badness else "baseline"
