"""Series in and out of sequence models: one or many, of any lengths, filled up with missing steps to buckets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.validation import validate_data

from ..numerics.checks import positive_int
from .base_iterative import Iterated, padded_rows


class Series(NamedTuple):
    """Steps (N, T, D) of which each series has the first `lengths`, NaN beyond; `alone` if one was given by itself."""

    steps: np.ndarray
    lengths: np.ndarray
    alone: bool

    def each(self, function: Callable[[int, int], np.ndarray]) -> Any:
        """What `function(which, length)` says of the series: of the one, or a list of all."""
        found = [function(which, int(length)) for which, length in enumerate(self.lengths)]
        return found[0] if self.alone else found

    def cut(self, arrays: Any) -> Any:
        """Arrays (N, T, …) as the series that they are of."""
        arrays = np.asarray(arrays)
        return self.each(lambda which, length: arrays[which, :length])


class SequenceModel(Iterated):
    """What models of sequences share: how series are read.

    `Y` is one series, (T, D) or (T,), many of one length, (N, T, D), or a list of series of any lengths; NaN is a
    missing value.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @abstractmethod
    def smooth_observations(self, Y: Any) -> tuple[Any, Any]:
        """The mean and standard deviation of a new observation at every step, given all steps of Y.

        Returns:
            Two arrays (T, D), or two lists of them if Y has several series. A report draws them beside the data.
        """

    def _series(self, Y: Any, *, reset: bool = False, ahead: int = 0) -> Series:
        """The series as steps, with room for at least `ahead` more."""
        several = isinstance(Y, list | tuple) and any(np.ndim(part) > 0 for part in Y)
        several = several or getattr(Y, "ndim", 0) == 3
        if several and len(Y) == 0:
            raise ValueError("Y is an empty list: give at least one series.")
        parts = []
        for part in Y if several else [Y]:
            column: Any = np.asarray(part)[:, None] if np.ndim(part) == 1 and not hasattr(part, "toarray") else part
            how: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            first = reset and not parts
            parts.append(validate_data(self, column, reset=first, ensure_min_samples=2 if first else 1, **how))
        lengths = np.array([len(part) for part in parts])
        steps = np.full((len(parts), padded_rows(int(lengths.max()) + ahead), parts[0].shape[1]), np.nan)
        for row, part in zip(steps, parts, strict=True):
            row[: len(part)] = part
        if reset and np.isnan(steps).all((0, 1)).any():
            empty = np.flatnonzero(np.isnan(steps).all((0, 1))).tolist()
            raise ValueError(f"The columns {empty} have no values at all: leave them out.")
        return Series(steps, lengths, not several)


def horizon(steps: Any) -> int:
    """How far to look ahead, or an error."""
    return positive_int("steps", steps, meaning="how far to look ahead")
