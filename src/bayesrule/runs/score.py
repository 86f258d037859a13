"""Metrics of predictions on held-out rows, and of a baseline that knows only the training targets."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from scipy.special import gammaln, pdtrik
from scipy.stats import rankdata

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
    """NLL (nats), accuracy, Brier score and ECE of class probabilities; for two classes the AUROC, too."""
    with jax.enable_x64(True):
        values = _class_metrics(np.asarray(probabilities, float), np.asarray(labels))
    scores = {name: float(value) for name, value in values.items()}
    if probabilities.shape[1] == 2 and len(np.unique(labels)) == 2:
        scores["auroc"] = auroc(probabilities[:, 1], labels == 1)
    return scores


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive row has a higher score than a negative one, ties counted half.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    count, others = int(positive.sum()), int((~positive).sum())
    return float((rankdata(score)[positive].sum() - count * (count + 1) / 2) / (count * others))


def class_losses(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """−log p of every row's class."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return -np.log(np.maximum(chosen, np.finfo(float).tiny))


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
    low, high = metrics.interval(mean, std, degrees_of_freedom=degrees_of_freedom)
    return score_numbers(y, mean, low, high, float(np.mean(gaussian_losses(y, mean, std, degrees_of_freedom))))


def gaussian_losses(y: np.ndarray, mean: Any, std: Any, degrees_of_freedom: float = math.inf) -> np.ndarray:
    """−log density of every value, normal or Student-t with this location and scale."""
    mean, std = np.broadcast_to(mean, y.shape), np.broadcast_to(std, y.shape)
    squares = ((y - mean) / std) ** 2
    if degrees_of_freedom == math.inf:
        losses = 0.5 * squares + 0.5 * math.log(2 * math.pi)
    else:
        half = degrees_of_freedom / 2
        constant = math.lgamma(half) - math.lgamma(half + 0.5) + 0.5 * math.log(2 * half * math.pi)
        losses = (half + 0.5) * np.log1p(squares / (2 * half)) + constant
    return losses + np.log(std)


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
    rates = np.full(len(y), rate)
    return score_numbers(y, rates, *poisson_interval(rates), float(np.mean(poisson_losses(y, rates))))


def poisson_interval(rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 90 % interval of a Poisson distribution: the least counts that reach 5 and 95 %."""
    low, high = (np.ceil(pdtrik(level, rate)).clip(0) for level in (0.05, 0.95))
    return low, high


def poisson_losses(y: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """−log p of every count under its Poisson distribution."""
    return rate - y * np.log(rate) + gammaln(y + 1)
