"""Standard units: columns with weighted mean 0 and variance 1, and the rows that count."""

from __future__ import annotations

from typing import Any

import numpy as np


def standard(values: np.ndarray, counts: np.ndarray) -> tuple[Any, Any]:
    """The weighted mean and standard deviation of every column; a column that does not vary keeps its units.

    >>> standard(np.array([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]), np.array([1.0, 1.0, 0.0]))
    (array([2., 5.]), array([1., 1.]))
    """
    shares = counts / counts.sum()
    mean = shares @ values
    scale = np.sqrt(shares @ (values - mean) ** 2)
    # Rounding leaves a constant column with a deviation that is no deviation.
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)


def counted(counts: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The rows that count for something, and what they count."""
    seen = counts > 0
    return (counts[seen], *(array[seen] for array in arrays))
