"""Whether what was claimed came true: probabilities against frequencies, and intervals against what they cover."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from scipy.special import betainc, betaincinv, ndtr, pdtr

from ..metrics import ece
from .test_rows import Classified, Measured

CHANCE = 1.5  # a calibration error of up to so many times what chance alone would show is no evidence of one


class Bins(NamedTuple):
    """For each bin of claimed probability: its limits, how many rows it has, what they claimed and how often it came
    true, with a 90 % interval for that frequency; NaN where a bin is empty."""

    edges: np.ndarray
    counts: np.ndarray
    claimed: np.ndarray
    came: np.ndarray
    low: np.ndarray
    high: np.ndarray


def binned(claims: np.ndarray, came_true: np.ndarray, bins: int = 10) -> Bins:
    """Claims by equal bins (a, b] of probability. The intervals are Jeffreys's: Beta(hits + ½, misses + ½).

    >>> float(binned(np.array([0.9, 0.8]), np.array([True, False]), 2).came[1])
    0.5
    """
    place = np.clip(np.ceil(claims * bins).astype(int) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    hits = np.bincount(place, weights=came_true.astype(float), minlength=bins)
    size = np.where(counts > 0, counts, np.nan)
    low, high = (betaincinv(hits + 0.5, counts - hits + 0.5, level) for level in (0.05, 0.95))
    # As is usual for Jeffreys's intervals, one that saw only hits or only misses reaches to the end.
    low, high = np.where(hits == 0, 0.0, low), np.where(hits == counts, 1.0, high)
    empty = np.where(counts > 0, 0.0, np.nan)
    claimed = np.bincount(place, weights=claims, minlength=bins) / size
    return Bins(np.linspace(0, 1, bins + 1), counts, claimed, hits / size, low + empty, high + empty)


def calibration_error(rows: Classified, bins: int = 10) -> float:
    """The expected calibration error of the most probable class, in double precision."""
    with jax.enable_x64(True):
        return float(ece(rows.p, rows.y, bins))


def chance_error(rows: Classified, bins: int = 10, draws: int = 400) -> float:
    """The calibration error that perfect probabilities would show on as many rows: the mean over simulated truths.

    Few rows in a bin miss their probability by chance alone, so no ECE is near zero with little data.
    """
    found = binned(rows.confidence, rows.right, bins)
    full = found.counts > 0
    counts, claimed = found.counts[full], found.claimed[full]
    hits = np.random.default_rng(0).binomial(counts, np.clip(claimed, 0, 1), (draws, len(counts)))
    return float(np.mean(np.sum(np.abs(hits - counts * claimed), axis=1)) / counts.sum())


def places(rows: Measured, *, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where each truth falls in its predictive distribution: F(y⁻) and F(y), equal for a density.

    Numbers are taken as normal. Whole numbers are taken as Poisson, or as negative binomial with the predicted mean
    and variance where the variance is the larger.
    """
    keep = np.isfinite(rows.std) & (rows.std > 0) & ((rows.mean > 0) | (not whole))
    y, mean, std = rows.y[keep], rows.mean[keep], rows.std[keep]
    if not whole:
        at = ndtr((y - mean) / std)
        return at, at
    wider = np.maximum(std**2, mean * (1 + 1e-9))
    size, success = mean**2 / (wider - mean), mean / wider

    def below(k: np.ndarray) -> np.ndarray:
        safe = np.maximum(k, 0)
        poisson, negative = pdtr(safe, mean), betainc(np.minimum(size, 1e12), safe + 1, success)
        return np.where(k < 0, 0.0, np.where(size > 1e6, poisson, negative))

    return below(np.floor(y) - 1), below(np.floor(y))


def coverage(lower: np.ndarray, upper: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of truths inside the central interval of each level, from their places F(y⁻) and F(y).

    A truth that spans several levels, as a whole number does, counts in part (Czado, Gneiting and Held, 2009).

    >>> coverage(np.array([0.5, 0.99]), np.array([0.5, 0.99]), np.array([0.5, 0.99])).tolist()
    [0.5, 1.0]
    """

    def share(level: np.ndarray) -> np.ndarray:
        width = np.maximum(upper - lower, 1e-12)
        return np.clip((level[:, None] - lower) / width, 0, 1).mean(1)

    return share((1 + levels) / 2) - share((1 - levels) / 2)
