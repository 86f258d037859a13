"""The held-out rows of a run as arrays of one length, without those whose truth or prediction is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics import interval
from ..runs.run import Run


@dataclass(frozen=True)
class Classified:
    """Rows with a class each: `y` its place among the classes, `p` (n, K) what was predicted."""

    row: np.ndarray
    y: np.ndarray
    p: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        return self.p.argmax(1)

    @property
    def confidence(self) -> np.ndarray:
        return self.p.max(1)

    @property
    def right(self) -> np.ndarray:
        return self.predicted == self.y

    @property
    def entropy(self) -> np.ndarray:
        """In nats: 0 for certainty, log K for none."""
        return -np.sum(np.where(self.p > 0, self.p * np.log(np.where(self.p > 0, self.p, 1)), 0), axis=1)


@dataclass(frozen=True)
class Measured:
    """Rows with a number each: `mean`, `std` of a new y and a 90 % interval for it."""

    row: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray
    time: np.ndarray

    @property
    def covered(self) -> np.ndarray:
        return (self.y >= self.low) & (self.y <= self.high)


def task(run: Run) -> str:
    """What kind of thing was predicted: "binary", "classes", "regression", "counts" or "sequence"."""
    return str(run.config.get("task", ""))


def classified(run: Run) -> Classified | None:
    """The held-out rows of a classification; None where this is none, or where no row is left."""
    if task(run) not in ("binary", "classes"):
        return None
    given = run.test.get("probabilities", run.test.get("mean"))
    y = run.test.get("y")
    if given is None or y is None or not np.size(y):
        return None
    p = np.asarray(given, float)
    p = np.stack([1 - p, p], axis=1) if p.ndim == 1 else p
    places = np.asarray(y, float).ravel()
    keep = np.isfinite(p).all(1) & np.isfinite(places) & (places >= 0) & (places < p.shape[1])
    if not keep.any():
        return None
    return Classified(_rows(run, len(places))[keep], places[keep].astype(int), p[keep])


def measured(run: Run) -> Measured | None:
    """The held-out rows of a regression, of counts or of a sequence, in the file's order; None where there are none."""
    if task(run) in ("binary", "classes") or not np.size(run.test.get("y", ())) or "mean" not in run.test:
        return None
    y, mean = column(run.test["y"]), column(run.test["mean"])
    std = column(run.test.get("std", np.full(len(y), np.nan)))
    normal_low, normal_high = interval(mean, std)
    low = column(run.test.get("low", normal_low), endless=True)
    high = column(run.test.get("high", normal_high), endless=True)
    time = np.asarray(run.test.get("time", np.arange(len(y))))
    keep = np.isfinite(y) & np.isfinite(mean)
    if not keep.any():
        return None
    return Measured(*(each[keep] for each in (_rows(run, len(y)), y, mean, std, low, high, time)))


def column(values: Any, *, endless: bool = False) -> np.ndarray:
    """Numbers in one row, of several series the first; what is infinite is missing, unless it may be `endless`.

    >>> column([[1, 2], [np.inf, 4]])
    array([ 1., nan])
    """
    array = np.asarray(values, float)
    array = array if array.ndim == 1 else array.reshape(len(array), -1)[:, 0] if array.ndim else array[None]
    return array if endless else np.where(np.isfinite(array), array, np.nan)


def thinned(count: int, most: int) -> np.ndarray:
    """Places of at most so many of a number of things in order, evenly spread, with both ends.

    >>> thinned(5, 3)
    array([0, 2, 4])
    """
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(int))


def _rows(run: Run, size: int) -> np.ndarray:
    return np.asarray(run.test.get("row", np.arange(size)))
