"""The held-out rows of a run as arrays of one length, without rows whose observation or prediction is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics import interval
from ..runs.run import Run


@dataclass(frozen=True)
class ClassPredictions:
    """Held-out rows of a classification.

    `row` is the number of the row in the file, `y` the index of its class, `probabilities` (n, K) the prediction.
    """

    row: np.ndarray
    y: np.ndarray
    probabilities: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        return self.probabilities.argmax(1)

    @property
    def confidence(self) -> np.ndarray:
        return self.probabilities.max(1)

    @property
    def correct(self) -> np.ndarray:
        return self.predicted == self.y

    @property
    def entropy(self) -> np.ndarray:
        """In nats: 0 for a certain prediction, log K for equal probabilities."""
        p = self.probabilities
        return -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), axis=1)


@dataclass(frozen=True)
class NumericPredictions:
    """Held-out rows with a number each: the `mean` and `std` of a new y, and the 90 % interval from `low` to `high`.

    The predictive distribution is normal, or a Student-t with `degrees_of_freedom`, the location `mean` and the scale
    `std`.
    """

    row: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray
    time: np.ndarray
    degrees_of_freedom: float = math.inf

    def joined(self, other: NumericPredictions) -> NumericPredictions:
        """These rows and others, for which the same degrees of freedom hold."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("row", "y", "mean", "std", "low", "high"))
        columns = [np.concatenate(pair) for pair in pairs]
        time = np.arange(len(columns[0]))
        return NumericPredictions(*columns, time=time, degrees_of_freedom=self.degrees_of_freedom)

    def take(self, rows: np.ndarray) -> NumericPredictions:
        """Some of the rows: indices or a mask."""
        arrays = (self.row, self.y, self.mean, self.std, self.low, self.high, self.time)
        return NumericPredictions(*(values[rows] for values in arrays), degrees_of_freedom=self.degrees_of_freedom)

    @property
    def covered(self) -> np.ndarray:
        return (self.y >= self.low) & (self.y <= self.high)


def task(run: Run) -> str:
    """What kind of target was predicted: "binary", "classes", "regression", "counts" or "sequence"."""
    return str(run.config.get("task", ""))


def class_predictions(run: Run) -> ClassPredictions | None:
    """The held-out rows of a classification; None for other tasks, or if no row is complete."""
    if task(run) not in ("binary", "classes"):
        return None
    predictions = run.test.get("probabilities", run.test.get("mean"))
    y = run.test.get("y")
    if predictions is None or y is None or not np.size(y):
        return None
    p = np.asarray(predictions, float)
    p = np.stack([1 - p, p], axis=1) if p.ndim == 1 else p
    classes = np.asarray(y, float).ravel()
    keep = np.isfinite(p).all(1) & np.isfinite(classes) & (classes >= 0) & (classes < p.shape[1])
    if not keep.any():
        return None
    return ClassPredictions(_row_numbers(run, len(classes))[keep], classes[keep].astype(int), p[keep])


def numeric_predictions(run: Run) -> NumericPredictions | None:
    """The held-out rows of a regression, of counts or of a sequence, in the file's order; None if there are none."""
    if task(run) in ("binary", "classes") or not np.size(run.test.get("y", ())) or "mean" not in run.test:
        return None
    y, mean = first_column(run.test["y"]), first_column(run.test["mean"])
    std = first_column(run.test.get("std", np.full(len(y), np.nan)))
    normal_low, normal_high = interval(mean, std)
    low = first_column(run.test.get("low", normal_low), allow_infinite=True)
    high = first_column(run.test.get("high", normal_high), allow_infinite=True)
    time = np.asarray(run.test.get("time", np.arange(len(y))))
    keep = np.isfinite(y) & np.isfinite(mean)
    if not keep.any():
        return None
    freedom = float(run.facts.get("degrees_of_freedom") or math.inf)
    rows = _row_numbers(run, len(y))
    return NumericPredictions(rows, y, mean, std, low, high, time, degrees_of_freedom=freedom).take(keep)


def left_out_predictions(run: Run) -> NumericPredictions | None:
    """The training rows of a regression, each predicted by the posterior without it; None where there are none.

    Noise and strength of the prior were learnt with the row, so that such rows show whether the noise is the same
    everywhere, but not whether it is large enough.
    """
    if task(run) != "regression" or "std" not in run.influence or not np.size(run.influence.get("y", ())):
        return None
    y, mean, std = (first_column(run.influence[name]) for name in ("y", "mean", "std"))
    freedom = float(run.facts.get("degrees_of_freedom") or math.inf)
    low, high = interval(mean, std, degrees_of_freedom=freedom)
    rows, keep = np.asarray(run.influence["row"]), np.isfinite(y) & np.isfinite(mean) & np.isfinite(std)
    return NumericPredictions(rows, y, mean, std, low, high, np.arange(len(y)), degrees_of_freedom=freedom).take(keep)


def first_column(values: Any, *, allow_infinite: bool = False) -> np.ndarray:
    """The values as one axis of floats, the first of several series; infinities become NaN unless allowed.

    >>> first_column([[1, 2], [np.inf, 4]])
    array([ 1., nan])
    """
    array = np.asarray(values, float)
    array = array if array.ndim == 1 else array.reshape(len(array), -1)[:, 0] if array.ndim else array[None]
    return array if allow_infinite else np.where(np.isfinite(array), array, np.nan)


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """At most `most` of the indices 0 to `count` − 1, evenly spaced, with both ends.

    >>> evenly_spaced(5, 3)
    array([0, 2, 4])
    """
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).round().astype(int))


def _row_numbers(run: Run, size: int) -> np.ndarray:
    return np.asarray(run.test.get("row", np.arange(size)))
