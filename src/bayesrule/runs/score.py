"""How good predictions of rows that were held out are, and how good a guess without features would be."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from scipy.special import gammaln, pdtrik

from .. import metrics


@jax.jit
def _scores(probabilities: Any, labels: Any) -> dict[str, Any]:
    return {
        "nll": metrics.nll(probabilities, labels),
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.ece(probabilities, labels, bins=10),
    }


def classified(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """NLL (nats), accuracy, Brier score and calibration error of class probabilities."""
    with jax.enable_x64(True):
        found = _scores(np.asarray(probabilities, float), np.asarray(labels))
    return {name: float(value) for name, value in found.items()}


def class_baseline(labels: np.ndarray, classes: int, rows: int) -> np.ndarray:
    """Every row gets the classes' frequencies in training (with one more example of each, so that none is 0)."""
    counts = np.bincount(labels, minlength=classes) + 1.0
    return np.tile(counts / counts.sum(), (rows, 1))


def measured(y: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray, nll: float) -> dict[str, float]:
    """NLL, root-mean-square error, R², and how many of the values lie in their 90 % intervals."""
    error, spread = y - mean, y - y.mean()
    return {
        "nll": nll,
        "rmse": float(np.sqrt(np.mean(error**2))),
        "r2": float(1 - np.sum(error**2) / max(np.sum(spread**2), 1e-300)),
        "coverage90": float(metrics.coverage(y, low, high)),
    }


def normal(y: np.ndarray, mean: Any, std: Any) -> dict[str, float]:
    """The same for a Gaussian prediction."""
    mean, std = np.broadcast_to(mean, y.shape), np.broadcast_to(std, y.shape)
    nll = float(np.mean(0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * math.log(2 * math.pi)))
    return measured(y, mean, *metrics.interval(mean, std), nll)


def numbers(estimator: Any, x: np.ndarray, task: str) -> dict[str, np.ndarray]:
    """What an estimator predicts for rows: the mean and the deviation of a new y, and a 90 % interval."""
    mean, std = estimator.predict(x, return_std=True)
    low, high = metrics.interval(mean, std)
    if task == "counts":
        draws = estimator.sample_predictive(x, 500, random_state=0)
        low, high = np.quantile(draws, [0.05, 0.95], axis=0, method="inverted_cdf")
    return {"mean": mean, "std": std, "low": low, "high": high}


def counts_baseline(y: np.ndarray, rate: float) -> dict[str, float]:
    """Every row gets the Poisson distribution of the training mean."""
    low, high = np.ceil(pdtrik([0.05, 0.95], rate)).clip(0)  # the least counts that reach these probabilities
    nll = float(np.mean(rate - y * math.log(rate) + gammaln(y + 1)))
    return measured(y, np.full(len(y), rate), np.full(len(y), low), np.full(len(y), high), nll)
