"""A stream of Parquet files, by row group: columns of numbers as the matrix of features, the target and weights."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted
from .base import Part, SeekableStream, default_buffer

_PART_BYTES = 2**23
"""The bytes of rows that are decoded at once: enough for all threads, and a small part of a usual buffer."""
_FILL_ROWS = 2048  # Rows of a matrix that are filled column by column while they are in the processor's cache.


class _Group(NamedTuple):
    """A row group: its file, its number there, and the columns that the file's folder stands for."""

    path: str
    number: int
    metadata: Any
    constants: Mapping[str, Any]


class ParquetStream(SeekableStream):
    """The rows of Parquet files.

    Args:
        source: a file, a folder (with its partitions `name=value`), a pattern like `table/*.parquet`, or several files.
        columns: the columns that a row consists of: a name is a vector, a list of names a matrix with a column for
            each, and a tuple or a dict has several of these. None for all columns but target and weights, as a matrix.
        target: a column y; then the rows are pairs (columns, y).
        weights: a column with the weight of each row; then the rows are `Weighted`.
        dtype: the type of matrices and of vectors of fractional numbers; JAX's own by default. Vectors of integers and
            booleans keep theirs.
        buffer: how many rows are shuffled together; None for as many as 64 MB hold.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        columns: PyTree = None,
        target: str | None = None,
        weights: str | None = None,
        dtype: Any = None,
        buffer: int | None = None,
    ):
        from pyarrow import dataset

        files = _files(source)
        data = dataset.dataset(files, format="parquet", partitioning="hive")
        self.source, self.filesystem = source, data.filesystem
        layout = _layout(columns, target, weights, data.schema.names)
        leaves, self._structure = jax.tree.flatten(layout, is_leaf=lambda x: isinstance(x, list))
        self._layout = [[leaf] if isinstance(leaf, str) else leaf for leaf in leaves]
        self._is_vector = [isinstance(leaf, str) for leaf in leaves]
        self.names = list(dict.fromkeys(name for names in self._layout for name in names))
        _check_names(self.names, data.schema.names, source)
        types = {name: data.schema.field(name).type for name in self.names}
        for name, kind in types.items():
            _check_type(name, kind, source)
        dtype = np.dtype(jnp.result_type(float) if dtype is None else dtype)
        kinds = []
        for names, is_vector in zip(self._layout, self._is_vector, strict=True):
            shape = () if is_vector else (len(names),)
            kinds.append(jax.ShapeDtypeStruct(shape, _vector_type(types[names[0]], dtype) if is_vector else dtype))
        self.row = jax.tree.unflatten(self._structure, kinds)
        self._groups, rows = [], []
        for fragment in data.get_fragments():
            constants = dataset.get_partition_keys(fragment.partition_expression)
            for group in fragment.row_groups:
                self._groups.append(_Group(fragment.path, group.id, fragment.metadata, constants))
                rows.append(group.num_rows)
        self.pieces = np.asarray(rows, int)
        self.rows = int(self.pieces.sum())
        if not self.rows:
            raise ValueError(f"{source} has no rows: there is nothing to fit.")
        self.buffer = default_buffer(buffer, self.row_bytes)
        self._part_rows = int(np.clip(_PART_BYTES // self.row_bytes, 1024, 2**17))

    def read(self, piece: int, first: int) -> Iterator[Part]:
        from pyarrow import parquet

        group = self._groups[piece]
        stored = [name for name in self.names if name not in group.constants]
        # Decoding is threaded by columns. Reading ahead within a row group would hold all of it in memory.
        with parquet.ParquetFile(
            group.path, metadata=group.metadata, filesystem=self.filesystem, pre_buffer=False
        ) as file:
            _check_names(stored, file.schema_arrow.names, group.path)
            for batch in file.iter_batches(self._part_rows, [group.number], stored, use_threads=True):
                if first >= batch.num_rows:
                    first -= batch.num_rows
                    continue
                yield self._part(batch.slice(first) if first else batch, group)
                first = 0

    def _part(self, batch: Any, group: _Group) -> Part:
        arrays = {name: _to_numpy(name, batch.column(name), group.path) for name in batch.schema.names}
        for name, value in group.constants.items():
            if name in self.names:
                arrays[name] = np.broadcast_to(np.asarray(value), (batch.num_rows,))
        columns = [[arrays[name] for name in names] for names in self._layout]
        return _Columns(columns, batch.num_rows)


class _Columns(Part):
    """Columns of a table, those of each leaf in a list."""

    def __init__(self, columns: list[list[np.ndarray]], rows: int):
        self.columns, self.rows = columns, rows

    def write(self, leaves: list[np.ndarray], at: int, first: int, count: int) -> None:
        for target, columns in zip(leaves, self.columns, strict=True):
            if target.ndim == 1:
                target[at : at + count] = columns[0][first : first + count]
                continue
            for begin in range(0, count, _FILL_ROWS):
                end = min(begin + _FILL_ROWS, count)
                rows = target[at + begin : at + end]
                for number, column in enumerate(columns):
                    rows[:, number] = column[first + begin : first + end]


def _files(source: str | Path | Sequence[str | Path]) -> Any:
    """What pyarrow takes for a source: a path, or the files that match a pattern."""
    if not isinstance(source, str | Path):
        return [str(path) for path in source]
    text = str(source)
    if glob.has_magic(text) and not Path(text).exists():
        files = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # a pattern may be absolute
        if not files:
            raise ValueError(f"No file matches {text!r}.")
        return files
    if "://" not in text and not Path(text).exists():
        raise FileNotFoundError(f"There is no {text}: pass a Parquet file, a folder of them, or a pattern.")
    return text


def _layout(columns: PyTree, target: str | None, weights: str | None, names: list[str]) -> PyTree:
    """The rows as a pytree of names and lists of names."""
    if columns is None:
        columns = [name for name in names if name not in (target, weights)]
    columns = _without_strings_in_lists(columns)
    rows = columns if target is None else (columns, target)
    return rows if weights is None else Weighted(rows, weights)  # pyright: ignore[reportArgumentType]  # a name for now


def _without_strings_in_lists(columns: PyTree) -> PyTree:
    if isinstance(columns, str):
        return columns
    if isinstance(columns, Mapping):
        return {name: _without_strings_in_lists(each) for name, each in columns.items()}
    if isinstance(columns, tuple):
        return tuple(_without_strings_in_lists(each) for each in columns)
    listed = list(columns)
    if not listed or not all(isinstance(name, str) for name in listed):
        raise ValueError(
            f"columns= is a name (a vector), a list of names (a matrix), or a tuple or dict of these, got {columns!r}."
        )
    return listed


def _check_names(wanted: list[str], names: list[str], source: Any) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"{source} has no column {missing[0]!r}; its columns are {', '.join(map(repr, names))}.")


def _check_type(name: str, kind: Any, source: Any) -> None:
    """Raise unless a column has numbers or booleans."""
    from pyarrow import types

    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)):
        raise ValueError(
            f"Column {name!r} of {source} has the type {kind}, and a stream reads numbers and booleans: leave it out "
            "by columns=, or encode it as numbers when the table is written (the estimators encode text and dates by "
            "themselves, in tables that fit into memory)."
        )


def _vector_type(kind: Any, dtype: np.dtype) -> np.dtype:
    """The type of a single column: integers and booleans keep theirs."""
    from pyarrow import types

    exact = types.is_integer(kind) or types.is_boolean(kind)
    return np.dtype(kind.to_pandas_dtype()) if exact else dtype


def _to_numpy(name: str, column: Any, path: str) -> np.ndarray:
    """A column of a record batch, without a copy where it has plain numbers."""
    from pyarrow import types

    if column.null_count:
        raise ValueError(
            f"Column {name!r} of {path} has missing values, and a stream has no way to fill them in: drop those rows, "
            "or write the table with a number in their places (and a column that says where they were)."
        )
    _check_type(name, column.type, path)
    column = column.cast("double") if types.is_decimal(column.type) else column
    return column.to_numpy(zero_copy_only=False)
