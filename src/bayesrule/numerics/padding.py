"""Padding rows and columns to a few sizes, and processing rows in chunks.

A compiled program serves one shape only. Data padded to one of a few sizes share their programs, and chunks of bounded
size bound the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def bucket(rows: int, least: int = 32) -> int:
    """The number of rows to pad to: at most a quarter more than there are, and at least `least`.

    >>> [bucket(n) for n in (1, 33, 41, 100, 1000)]
    [32, 40, 48, 112, 1024]
    """
    rows = max(rows, least)
    if rows <= 32:
        return 32
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def bucket_below(rows: int) -> int:
    """The largest number of rows, not above these, that `bucket` leaves as it is.

    >>> [bucket_below(n) for n in (33, 100, 1000, 1024)]
    [32, 96, 896, 1024]
    """
    step = 1 << max(0, rows.bit_length() - 3)
    return rows // step * step


def coarse_bucket(rows: int) -> int:
    """The number of rows to pad to where a row costs little beside compilation: 64, 128 or 256, and `bucket` beyond.

    >>> [coarse_bucket(n) for n in (1, 65, 200, 257)]
    [64, 128, 256, 320]
    """
    return power_of_two(rows, 64) if rows <= 256 else bucket(rows)


def column_bucket(columns: int) -> int:
    """The number of columns to pad to: multiples of 4 up to 32, because a fit of few columns costs little beside its
    compilation, and `bucket` beyond.

    >>> [column_bucket(n) for n in (1, 20, 31, 33)]
    [4, 20, 32, 40]
    """
    return -(-columns // 4) * 4 if columns <= 32 else bucket(columns)


def power_of_two(rows: int, least: int) -> int:
    """The smallest power of two of at least `rows` and of at least `least` (itself a power of two).

    >>> [power_of_two(n, 32) for n in (1, 33, 64)]
    [32, 64, 64]
    """
    return max(least, 1 << (rows - 1).bit_length())


def pad(array: Any, rows: int, columns: int | None = None, *, fill: float = 0.0) -> np.ndarray:
    """Append rows (and columns) of `fill` to the array; give the rows a weight of 0.

    >>> pad(np.ones((1, 2)), 2).tolist()
    [[1.0, 1.0], [0.0, 0.0]]

    Args:
        array: at least as small as the result.
        rows: the number of rows of the result.
        columns: the number of columns of the result; None leaves them.
        fill: the value of the new entries.
    """
    array = np.asarray(array)
    shape = (rows, *array.shape[1:]) if columns is None else (rows, columns, *array.shape[2:])
    if shape == array.shape:
        return array
    padded = np.full(shape, fill, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def map_chunks(
    function: Callable[[np.ndarray], tuple[Any, ...]], array: np.ndarray, rows: int
) -> tuple[np.ndarray, ...]:
    """Apply `function` to at most `rows` rows at a time and concatenate each of the arrays it returns.

    >>> [x.tolist() for x in map_chunks(lambda part: (part + 1, -part), np.arange(3), 2)]
    [[1, 2, 3], [0, -1, -2]]
    """
    starts = range(0, max(len(array), 1), rows)
    results = [function(array[start : start + rows]) for start in starts]
    return tuple(np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*results, strict=True))
