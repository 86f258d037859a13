"""Metrics of predictions on held-out rows, and of a baseline that knows only the training targets."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from scipy.special import gammaln, pdtrik

from .. import metrics
from ..numerics.programs import compiled

COUNT_DRAWS = 500  # Counts that are drawn for an interval.


@compiled
def _class_metrics(probabilities: Any, labels: Any) -> dict[str, Any]:
    return {
        "nll": metrics.nll(probabilities, labels),
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.ece(probabilities, labels, bins=10),
    }


def score_classes(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """NLL (nats), accuracy, Brier score and expected calibration error of class probabilities."""
    with jax.enable_x64(True):
        values = _class_metrics(np.asarray(probabilities, float), np.asarray(labels))
    return {name: float(value) for name, value in values.items()}


def class_frequencies(labels: np.ndarray, classes: int, rows: int) -> np.ndarray:
    """The baseline for classes: every row gets their training frequencies, with one more example of each class.

    Without the additional examples a class could have probability 0, and the NLL would be infinite.
    """
    counts = np.bincount(labels, minlength=classes) + 1.0
    return np.tile(counts / counts.sum(), (rows, 1))


def score_numbers(y: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray, nll: float) -> dict[str, float]:
    """NLL, root-mean-square error, R², and the share of the values that lie in their 90 % intervals."""
    error, deviation = y - mean, y - y.mean()
    return {
        "nll": nll,
        "rmse": float(np.sqrt(np.mean(error**2))),
        "r2": float(1 - np.sum(error**2) / max(np.sum(deviation**2), 1e-300)),
        "coverage90": float(metrics.coverage(y, low, high)),
    }


def score_gaussian(y: np.ndarray, mean: Any, std: Any, degrees_of_freedom: float = math.inf) -> dict[str, float]:
    """The metrics of `score_numbers` for Gaussian predictions, or Student-t ones with this location and scale."""
    mean, std = np.broadcast_to(mean, y.shape), np.broadcast_to(std, y.shape)
    squares = ((y - mean) / std) ** 2
    if degrees_of_freedom == math.inf:
        losses = 0.5 * squares + 0.5 * math.log(2 * math.pi)
    else:
        half = degrees_of_freedom / 2
        constant = math.lgamma(half) - math.lgamma(half + 0.5) + 0.5 * math.log(2 * half * math.pi)
        losses = (half + 0.5) * np.log1p(squares / (2 * half)) + constant
    low, high = metrics.interval(mean, std, degrees_of_freedom=degrees_of_freedom)
    return score_numbers(y, mean, low, high, float(np.mean(losses + np.log(std))))


def predict_numbers(estimator: Any, x: np.ndarray, task: str) -> dict[str, np.ndarray]:
    """What a regressor predicts: "mean" and "std" of a new y, and its 90 % interval, "low" and "high"."""
    mean, std = estimator.predict(x, return_std=True)
    low, high = metrics.interval(mean, std, degrees_of_freedom=degrees_of_freedom(estimator))
    if task == "counts":
        low, high = count_interval(estimator.sample_predictive(x, COUNT_DRAWS, random_state=0))
    return {"mean": mean, "std": std, "low": low, "high": high}


def degrees_of_freedom(estimator: Any) -> float:
    """Those of an estimator's Student-t predictions; infinitely many where predictions are normal."""
    return float(getattr(estimator, "degrees_of_freedom_", math.inf))


def count_interval(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 90 % interval of counts, from draws of them (draws, rows)."""
    low, high = np.quantile(draws, [0.05, 0.95], axis=0, method="inverted_cdf")
    return low, high


def score_poisson_baseline(y: np.ndarray, rate: float) -> dict[str, float]:
    """The baseline for counts: every row gets the Poisson distribution of the training mean."""
    low, high = np.ceil(pdtrik([0.05, 0.95], rate)).clip(0)  # The least counts that reach these probabilities.
    nll = float(np.mean(rate - y * math.log(rate) + gammaln(y + 1)))
    return score_numbers(y, np.full(len(y), rate), np.full(len(y), low), np.full(len(y), high), nll)
