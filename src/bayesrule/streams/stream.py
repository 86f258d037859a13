"""blr.stream(): a stream from whatever holds the rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted
from .arrays import ArrayStream, map_npy, map_npz
from .base import Stream
from .iterable import IterableStream
from .parquet import ParquetStream


def stream(
    source: Any,
    *,
    rows: int | None = None,
    columns: PyTree = None,
    target: str | None = None,
    weights: str | None = None,
    dtype: Any = None,
    buffer: int | None = None,
) -> Stream:
    """Rows of data that are read when they are needed, for `fit(data=…)`: the data may be larger than memory.

    Args:
        source: One of

            - a pytree of arrays with one row per example (or `Weighted`), in memory or of `np.memmap`; a path that ends
              in `.npy` stands for the array in that file;
            - a path that ends in `.npz`: its arrays by name, which must not be compressed;
            - any other path: a Parquet file, a folder of them, a pattern like `"table/*.parquet"`, or a list of files;
            - an iterable of batches that can be iterated again for each epoch (PyTorch's `DataLoader`, Grain, …), each
              a pytree of arrays with one row per example; or a function of the epoch's number that returns one.
        rows: N, for an iterable; without it the rows are counted in a pass over all of them.
        columns: For Parquet, the columns that a row consists of: a name is a vector, a list of names a matrix, and a
            tuple or a dict has several of these. By default all but target and weights, as a matrix. For NPZ the names
            of the arrays, in the same way but without lists.
        target: The name of a column or array y; then the rows are pairs (columns, y).
        weights: The name of a column or array with the weight of each row.
        dtype: The type of the numbers from Parquet; by default JAX's own, float32 or float64.
        buffer: How many rows are shuffled together, and about half of those that are in memory at a time. By default as
            many as 64 MB hold. Of an iterable, whole batches until there are so many rows: with 1 the batches are taken
            as they come.

    Returns:
        The stream, which has `rows`, `head(count)`, `blocks(rows)` and `batches(batch_size, seed=…, epoch=…)`.

    >>> import numpy as np
    >>> rows = stream((np.arange(10.0).reshape(5, 2), np.arange(5)), buffer=4)
    >>> rows.rows, [len(y) for x, y in rows.blocks(2)]
    (5, [2, 2, 1])
    >>> sorted(int(i) for x, y in rows.batches(2, seed=0, epoch=3) for i in y)
    [0, 1, 2, 3, 4]
    """
    if isinstance(source, Stream):
        return source
    if not _is_iterable(source) and rows is not None:
        raise ValueError("rows= is for iterables, which cannot say how many rows they have: remove it.")
    kind = _kind(source)
    if kind != "parquet" and dtype is not None:
        raise ValueError("dtype= is for Parquet: other sources have arrays of their own types. Remove it.")
    if kind == "npz":
        return ArrayStream(_named(source, columns, target, weights), buffer)
    if kind == "parquet":
        return ParquetStream(source, columns, target, weights, dtype, buffer)
    if columns is not None or target is not None or weights is not None:
        raise ValueError(
            "columns=, target= and weights= name the columns of a table: pass arrays and batches as they shall be, "
            "(x, y) or blr.Weighted((x, y), w)."
        )
    if kind == "arrays":
        is_path = lambda leaf: isinstance(leaf, str | Path)
        return ArrayStream(jax.tree.map(lambda leaf: map_npy(leaf) if is_path(leaf) else leaf, source), buffer)
    return IterableStream(source, rows, buffer)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_npy(leaf: Any) -> bool:
    return isinstance(leaf, str | Path) and str(leaf).endswith(".npy")


def _kind(source: Any) -> str:
    """What a source is: "npz", "parquet", "arrays" or "iterable"."""
    if isinstance(source, str | Path) and not _is_npy(source):
        return "npz" if str(source).endswith(".npz") else "parquet"
    leaves = jax.tree.leaves((source.examples, source.weights) if isinstance(source, Weighted) else source)
    if leaves and all(isinstance(leaf, str | Path) and not _is_npy(leaf) for leaf in leaves):
        return "parquet"
    if leaves and all(_is_array(leaf) or _is_npy(leaf) for leaf in leaves):
        return "arrays"
    if callable(source) or hasattr(source, "__iter__"):
        return "iterable"
    raise ValueError(
        f"A stream cannot be made of a {type(source).__name__}: pass arrays, a path, or an iterable of batches."
    )


def _is_iterable(source: Any) -> bool:
    return _kind(source) == "iterable"


def _named(path: str | Path, columns: PyTree, target: str | None, weights: str | None) -> PyTree:
    """The arrays of an NPZ file in the form that the names ask for."""
    arrays = map_npz(path)

    def find(name: Any) -> np.ndarray:
        if name not in arrays:
            raise ValueError(f"{path} has no array {name!r}; its arrays are {', '.join(map(repr, arrays))}.")
        return arrays[name]

    def pick(names: Any) -> PyTree:
        if isinstance(names, Mapping):
            return {key: pick(each) for key, each in names.items()}
        if isinstance(names, tuple):
            return tuple(map(pick, names))
        if not isinstance(names, str):
            raise ValueError(f"columns= of an NPZ file is a name, or a tuple or dict of names, got {names!r}.")
        return find(names)

    if columns is None:
        rest = {name: array for name, array in arrays.items() if name not in (target, weights)}
        examples = next(iter(rest.values())) if target is not None and len(rest) == 1 else rest
    else:
        examples = pick(columns)
    examples = examples if target is None else (examples, find(target))
    return examples if weights is None else Weighted(examples, find(weights))
