"""Padding rows and columns to a few sizes, so that a program compiled for one size serves many."""

from __future__ import annotations

from typing import Any

import numpy as np


def bucket(rows: int) -> int:
    """The number of rows that a program is compiled for: at most a quarter more than there are, and at least 32.

    >>> [bucket(n) for n in (1, 33, 41, 100, 1000)]
    [32, 40, 48, 112, 1024]
    """
    if rows <= 32:
        return 32
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def columns(features: int) -> int:
    """The same for columns, in fours where they are few: compiling is dear beside a fit of few columns.

    >>> [columns(n) for n in (1, 20, 31, 33)]
    [4, 20, 32, 40]
    """
    return -(-features // 4) * 4 if features <= 32 else bucket(features)


def padded(array: Any, rows: int, columns: int | None = None, *, fill: float = 0.0) -> np.ndarray:
    """The array with rows of `fill` after its own, up to this number (give them a weight of 0), and columns likewise.

    >>> padded(np.ones((1, 2)), 2).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    array = np.asarray(array)
    shape = (rows, *array.shape[1:]) if columns is None else (rows, columns, *array.shape[2:])
    if shape == array.shape:
        return array
    room = np.full(shape, fill, array.dtype)
    room[tuple(map(slice, array.shape))] = array
    return room
