"""The base of sequence models: one series or many, of any lengths, padded with missing steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.validation import validate_data

from ..numerics.checks import positive_int
from . import base_iterative


class Series(NamedTuple):
    """Series of different lengths in one array.

    Args:
        steps: (N, T, D); NaN where a value is missing and beyond the end of a series.
        lengths: how many steps each series has.
        is_single: whether the user passed one series and not a list, and gets one result and not a list.
    """

    steps: np.ndarray
    lengths: np.ndarray
    is_single: bool

    def each(self, function: Callable[[int, int], np.ndarray]) -> Any:
        """`function(index, length)` for every series: a list, or one value for a single series."""
        values = [function(index, int(length)) for index, length in enumerate(self.lengths)]
        return values[0] if self.is_single else values

    def cut(self, arrays: Any) -> Any:
        """Arrays (N, T, …) without the padding: a list of (length, …), or one for a single series."""
        arrays = np.asarray(arrays)
        return self.each(lambda index, length: arrays[index, :length])


class SequenceModel(base_iterative.IterativeEstimator):
    """A model of sequences.

    `Y` is one series, (T, D) or (T,), many of one length, (N, T, D), or a list of series of any lengths; NaN is a
    missing value. With `lengths`, as in hmmlearn, Y is several series one after another.
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

    def _series(self, Y: Any, lengths: Any = None, *, reset: bool = False, ahead: int = 0) -> Series:
        """Validate Y and pad it with missing steps, at least `ahead` of them; `reset` in `fit`."""
        Y = Y if lengths is None else split_at_lengths(Y, lengths)
        several = _is_list_of_series(Y) or getattr(Y, "ndim", 0) == 3
        if several and len(Y) == 0:
            raise ValueError("Y is an empty list: give at least one series.")
        parts = []
        for part in Y if several else [Y]:
            table: Any = np.asarray(part)[:, None] if np.ndim(part) == 1 and not hasattr(part, "toarray") else part
            options: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
            first = reset and not parts
            parts.append(validate_data(self, table, reset=first, ensure_min_samples=2 if first else 1, **options))
        lengths = np.array([len(part) for part in parts])
        padded_length = base_iterative.padded_rows(int(lengths.max()) + ahead)
        steps = np.full((len(parts), padded_length, parts[0].shape[1]), np.nan)
        for row, part in zip(steps, parts, strict=True):
            row[: len(part)] = part
        unobserved = np.isnan(steps).all((0, 1))
        if reset and unobserved.any():
            raise ValueError(
                f"The columns {np.flatnonzero(unobserved).tolist()} have no values at all: leave them out."
            )
        return Series(steps, lengths, not several)


def split_at_lengths(Y: Any, lengths: Any) -> list[Any]:
    """The series of so many steps each that Y has one after another.

    >>> [part.tolist() for part in split_at_lengths(np.arange(5), [2, 3])]
    [[0, 1], [2, 3, 4]]
    """
    rows = np.asarray(Y) if isinstance(Y, list | tuple) else Y
    counts = np.asarray(lengths)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or not np.all(counts > 0) or np.ndim(rows) not in (1, 2):
        raise ValueError(
            "lengths= is a list of whole numbers above 0, the steps of each series, and Y has these one after another, "
            f"(T, D) or (T,); got lengths of shape {counts.shape} and Y of shape {np.shape(rows)}."
        )
    if counts.sum() != len(rows):
        raise ValueError(f"lengths= has {counts.sum()} steps in all, and Y {len(rows)}: they must be the same.")
    ends = np.cumsum(counts)
    take = getattr(rows, "iloc", rows)
    return [take[end - count : end] for end, count in zip(ends, counts, strict=True)]


def check_no_target(Y: Any, y: Any) -> None:
    """Raise if y, which scikit-learn's meta-estimators pass and sequence models ignore, is not a value for each row."""
    if y is None:
        return
    several = _is_list_of_series(Y) or getattr(Y, "ndim", 0) == 3
    rows = Y.shape[0] if hasattr(Y, "shape") else len(Y)
    if several or np.ndim(y) == 0 or len(y) != rows:
        raise ValueError(
            "A sequence model has no y, and this one is not a value for each row of Y: pass the lengths of several "
            "series by name, lengths=[…], or a list of series."
        )


def _is_list_of_series(Y: Any) -> bool:
    return isinstance(Y, list | tuple) and any(np.ndim(part) > 0 for part in Y)


def check_horizon(steps: Any) -> int:
    """The number of steps to forecast, or an error."""
    return positive_int("steps", steps, meaning="how far to look ahead")
