"""A setting chosen on held-out training rows: how rows are divided into folds, and the search along a grid."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

FOLDS = 5
"""How many parts the rows are divided into, one of which is held out from a fit."""
_MOST_FOLDS = 3  # of the parts are held out in turn; more cost fits, and hardly change what is chosen.
_CLEAR = 2.0  # Standard errors beyond which a difference needs no further fold.
FEWEST_ROWS = 20
"""With fewer different rows a search would be chance."""
_WORTH = 1.0  # Standard errors by which a setting must be better to be preferred to the one nearer to the start.


class Folds(NamedTuple):
    """Which rows are held out together.

    Args:
        group: a number for each row, equal for equal rows; −1 for rows of weight 0.
        fold: the fold of each group, from 0 to `FOLDS` − 1.
    """

    group: np.ndarray
    fold: np.ndarray

    def holds_out(self, number: int) -> np.ndarray:
        """Whether each row is in the fold of this number."""
        return (self.group >= 0) & (self.fold[self.group] == number)


def divide_rows(X: np.ndarray, labels: np.ndarray, weights: np.ndarray, seed: bytes) -> Folds:
    """Divide rows into `FOLDS` folds.

    Equal rows are in one fold, or what is held out would be fitted too. The fold of a row depends on its numbers and
    not on its place, so that the order of the rows does not matter, and a weight is a number of repetitions.

    Args:
        X: the rows (n, d).
        labels: the class of each row, whose shares are the same in all folds; one number for all if there are none.
        weights: the weight of each row; rows of weight 0 are in no fold.
        seed: other bytes divide the rows differently.

    >>> X, labels = np.array([[1.0], [2.0], [1.0], [4.0], [5.0]]), np.array([0, 0, 0, 1, 1])
    >>> folds = divide_rows(X, labels, np.array([1.0, 1.0, 2.0, 0.0, 1.0]), b"0")
    >>> bool(folds.group[0] == folds.group[2]), int(folds.group[3]), sorted(folds.fold.tolist())
    (True, -1, [0, 1, 2])
    """
    weighted = np.flatnonzero(weights > 0)
    rows = np.ascontiguousarray(X[weighted] + 0.0)  # Adding 0 makes −0 the same bytes as 0.
    digests = [int.from_bytes(blake2b(row.tobytes(), digest_size=8, key=seed).digest()) for row in rows]
    distinct, group_of_weighted = np.unique(np.array(digests, np.uint64), return_inverse=True)
    label = np.full(len(distinct), np.max(labels))
    np.minimum.at(label, group_of_weighted, labels[weighted])
    fold = np.empty(len(distinct), int)
    fold[np.lexsort((distinct, label))] = np.arange(len(distinct)) % FOLDS
    group = np.full(len(X), -1)
    group[weighted] = group_of_weighted
    return Folds(group, fold)


def search_grid(losses: Callable[[int, int], np.ndarray], start: int, first: int, last: int) -> int:
    """The setting on a grid with the lowest held-out loss, by steps from `start` to neighbours that are better.

    Two settings are compared on up to three folds, one after another, until their difference is more than two standard
    errors: comparisons of many rows mostly need one. A step needs a difference of more than one standard error. Less is
    chance, and a start that is good on most data is better than what chance says about few rows.

    Args:
        losses: `losses(setting, fold)` is the loss of each group of the fold's rows, held out from a fit. Called at
            most once for each pair.
        start: the number of the setting to start from, one that is good on most data.
        first: the number of the first setting of the grid.
        last: the number of the last one.

    >>> rows = np.linspace(-0.1, 0.1, 10)
    >>> search_grid(lambda setting, fold: (setting - 3 + rows) ** 2, 1, 0, 5)
    3
    """
    losses = cache(losses)
    for direction in (1, -1):
        here = start
        while first <= here + direction <= last and is_lower(losses, here + direction, here):
            here += direction
        if here != start:
            return here
    return start


def is_lower(losses: Callable[[Any, int], np.ndarray], there: Hashable, here: Hashable) -> bool:
    """Whether `there` has clearly lower losses than `here`. A loss that is not finite is above any other.

    Args:
        losses: `losses(setting, fold)`, as for `search_grid`, for settings of any kind.
        there: the setting that would have to be better.
        here: the setting that is preferred if it is not.
    """
    differences, error = np.zeros(0), 0.0
    for fold in range(_MOST_FOLDS):
        new, old = losses(there, fold), losses(here, fold)
        if not (np.all(np.isfinite(new)) and np.all(np.isfinite(old))):
            return bool(np.all(np.isfinite(new)))
        differences = np.append(differences, new - old)
        error = np.sqrt(np.sum(differences**2))  # of a sum whose expectation is 0
        if np.abs(differences.sum()) > _CLEAR * error:
            break
    return bool(differences.sum() < -_WORTH * error)
