"""The folds of a cross-validation."""

from __future__ import annotations

import numpy as np

from ..tables.tables import InputError


def check_folds(count: int, rows: int) -> None:
    """Raise unless so many rows can be divided into so many folds."""
    if not 2 <= count <= rows // 2:
        raise InputError(
            f"--cv {count} is not possible with {rows:,} rows: take at least 2 folds, of at least 2 rows each."
        )


def assign_folds(rows: int, count: int, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """The fold of every row, at random; of every class, each fold has the same number of rows, or one more.

    >>> np.bincount(assign_folds(10, 3, 0)).tolist()
    [4, 3, 3]
    """
    check_folds(count, rows)
    fold = np.empty(rows, int)
    order = np.random.default_rng(seed).permutation(rows)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    fold[order] = np.arange(rows) % count
    return fold
