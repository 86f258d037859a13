"""Calibration of the held-out predictions: probabilities against frequencies, and the coverage of central intervals.

The scores themselves (ECE, coverage of the 90 % interval) are `bayesrule.metrics`'s. What is here serves the report
only: intervals for the frequencies of a reliability diagram, the ECE to be expected by chance, and coverage as a
function of the interval's level.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np
from scipy.special import betainc, betaincinv, ndtr, pdtr, stdtr

from .. import metrics
from .held_out_rows import ClassPredictions, NumericPredictions

BINS = 10
# An ECE of up to this multiple of `chance_error` is no evidence of miscalibration.
CHANCE_FACTOR = 1.5


class ReliabilityBins(NamedTuple):
    """A reliability diagram with uncertainty: for each bin of predicted probability, its rows and what was observed.

    `edges` are the bins' limits and `counts` their numbers of rows; `predicted` is the mean predicted probability,
    `observed` the frequency of the event, and `low`, `high` a 90 % interval for that frequency. The last four are NaN
    for an empty bin.
    """

    edges: np.ndarray
    counts: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bin_predictions(probabilities: np.ndarray, happened: np.ndarray, bins: int = BINS) -> ReliabilityBins:
    """Group predicted probabilities of an event into equal bins (a, b] and compare them with how often it happened.

    The intervals are Jeffreys's: quantiles of Beta(hits + ½, misses + ½).

    >>> float(bin_predictions(np.array([0.9, 0.8]), np.array([True, False]), 2).observed[1])
    0.5
    """
    bin_index = np.clip(np.ceil(probabilities * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(bin_index, minlength=bins)
    hits = np.bincount(bin_index, weights=happened.astype(float), minlength=bins)
    size = np.where(counts > 0, counts, np.nan)
    low, high = (betaincinv(hits + 0.5, counts - hits + 0.5, level) for level in (0.05, 0.95))
    # The usual modification of Jeffreys's interval: without a hit it starts at 0, without a miss it ends at 1.
    low, high = np.where(hits == 0, 0.0, low), np.where(hits == counts, 1.0, high)
    nan_if_empty = np.where(counts > 0, 0.0, np.nan)
    predicted = np.bincount(bin_index, weights=probabilities, minlength=bins) / size
    edges = np.linspace(0, 1, bins + 1)
    return ReliabilityBins(edges, counts, predicted, hits / size, low + nan_if_empty, high + nan_if_empty)


def calibration_error(rows: ClassPredictions, bins: int = BINS) -> float:
    """The expected calibration error of the most probable class, `bayesrule.metrics.ece` in float64."""
    with jax.enable_x64(True):
        return float(metrics.ece(rows.probabilities, rows.y, bins))


def chance_error(rows: ClassPredictions, bins: int = BINS, draws: int = 400) -> float:
    """The ECE to expect from perfectly calibrated probabilities: its mean over simulated labels.

    Few rows in a bin miss their probability by chance alone, so with little data no ECE is near zero.
    """
    diagram = bin_predictions(rows.confidence, rows.correct, bins)
    filled = diagram.counts > 0
    counts, predicted = diagram.counts[filled], diagram.predicted[filled]
    hits = np.random.default_rng(0).binomial(counts, np.clip(predicted, 0, 1), (draws, len(counts)))
    return float(np.mean(np.sum(np.abs(hits - counts * predicted), axis=1)) / counts.sum())


def predictive_cdf(rows: NumericPredictions, *, counts: bool) -> tuple[np.ndarray, np.ndarray]:
    """F(y⁻) and F(y) for each observed y, with F its predictive distribution function; equal where F is continuous.

    The predictive distribution is normal with the row's mean and standard deviation, or a Student-t. For `counts` it
    is negative binomial with the same mean and variance, or Poisson where the variance is not above the mean.
    """
    keep = np.isfinite(rows.std) & (rows.std > 0) & ((rows.mean > 0) | (not counts))
    y, mean, std = rows.y[keep], rows.mean[keep], rows.std[keep]
    if not counts:
        z = (y - mean) / std
        at_y = ndtr(z) if rows.degrees_of_freedom == math.inf else stdtr(rows.degrees_of_freedom, z)
        return at_y, at_y
    variance = np.maximum(std**2, mean * (1 + 1e-9))
    size, success = mean**2 / (variance - mean), mean / variance

    def cdf(k: np.ndarray) -> np.ndarray:
        nonnegative = np.maximum(k, 0)
        poisson = pdtr(nonnegative, mean)
        negative_binomial = betainc(np.minimum(size, 1e12), nonnegative + 1, success)
        return np.where(k < 0, 0.0, np.where(size > 1e6, poisson, negative_binomial))

    return cdf(np.floor(y) - 1), cdf(np.floor(y))


def central_coverage(lower: np.ndarray, upper: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of observations inside the central interval of each level, from F(y⁻) and F(y).

    An observation of a discrete variable spans the levels between the two, and counts in proportion (Czado, Gneiting
    and Held, 2009).

    >>> central_coverage(np.array([0.5, 0.99]), np.array([0.5, 0.99]), np.array([0.5, 0.99])).tolist()
    [0.5, 1.0]
    """

    def share_below(level: np.ndarray) -> np.ndarray:
        width = np.maximum(upper - lower, 1e-12)
        return np.clip((level[:, None] - lower) / width, 0, 1).mean(1)

    return share_below((1 + levels) / 2) - share_below((1 - levels) / 2)
