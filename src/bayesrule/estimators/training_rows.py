"""The rows that an estimator is fitted to: in memory, or in the partitions of Dask collections, by one interface.

An estimator maps rows (scales columns, encodes classes), reduces them (moments, classes, triangular factors), takes a
few of them, and hands the rest to `fit`. Below validation its code does not know where the rows are. `RowsInMemory` is
all rows as one part; `interop.dask.DaskParts` has the same four methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from sklearn.utils.validation import assert_all_finite, check_array, column_or_1d, validate_data

from ..interop.dask import DaskParts, is_dask
from ..numerics.padding import pad
from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted

if TYPE_CHECKING:
    from .base import Estimator


class Examples(NamedTuple):
    """Rows with a target and a weight each."""

    x: Float[np.ndarray, "N D"]
    y: np.ndarray
    weights: Float[np.ndarray, " N"]


class RowsInMemory:
    """Rows as arrays: one part.

    Args:
        part: a pytree of arrays with one row per example.
    """

    def __init__(self, part: PyTree):
        self.part = part

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(jax.tree.leaves(self.part)[0])

    def map(self, function: Callable[..., PyTree], *arguments: Any) -> RowsInMemory:
        """function(rows, *arguments) in the place of the rows, row for row."""
        return RowsInMemory(function(self.part, *arguments))

    def reduce(self, function: Callable[..., PyTree], merge: Callable[..., PyTree], *arguments: Any) -> PyTree:
        """function(rows, *arguments); there is nothing to merge."""
        return function(self.part, *arguments)

    def take(self, rows: Any) -> PyTree:
        """Rows by their numbers, or all by slice(None)."""
        return jax.tree.map(lambda x: x[rows], self.part)


TrainingRows = RowsInMemory | DaskParts


START_ROWS = 20_000
"""Of rows in parts, how many a start is computed from, at most."""


def start_rows(rows: TrainingRows, count: int) -> PyTree:
    """The rows that a start is computed from: all of those in memory, and of more than 20,000 in parts so many.

    These are drawn at random, the same for the same number of rows.

    Args:
        rows: the rows.
        count: how many they are.
    """
    if isinstance(rows, RowsInMemory) or count <= START_ROWS:
        return rows.take(slice(None))
    return rows.take(np.sort(np.random.default_rng(0).choice(count, START_ROWS, replace=False)))


def check_full_batches(rows: TrainingRows, batch_size: int | None) -> None:
    """Raise where mini-batches are asked for and the rows are in parts."""
    if batch_size is not None and isinstance(rows, DaskParts):
        raise ValueError(
            "On Dask every step takes one pass over all partitions, and a batch_size (or method='svi', which has one) "
            "asks for rows drawn at random from all of them: take method='vmp', or batch_size=None."
        )


def in_memory(rows: TrainingRows) -> RowsInMemory:
    """All rows as arrays."""
    return rows if isinstance(rows, RowsInMemory) else RowsInMemory(rows.take(slice(None)))


def as_data(rows: TrainingRows, bucket: Callable[[int], int], count: int, weight: float) -> PyTree:
    """Rows as `Weighted` parts, as the data of a fit: those in memory padded by rows of weight 0, parts as they are.

    Args:
        rows: of which every part is a `Weighted` with its count.
        bucket: the number of rows to pad to, from the number of rows. (Parts are padded where they are.)
        count: the number of rows.
        weight: how many examples they stand for.
    """
    if isinstance(rows, DaskParts):
        return rows.known(rows=count, count=weight)
    part = rows.part
    padded = lambda x: pad(x, bucket(len(part.weights)))
    examples, weights = jax.tree.map(padded, part.examples), jnp.asarray(padded(part.weights))
    return Weighted(examples, weights, part.count)


def validate_collection(estimator: Estimator, X: Any, *, reset: bool) -> None:
    """Validate the columns of a Dask array or DataFrame as scikit-learn does it: by two rows of its types."""
    if X.ndim != 2:
        raise ValueError(f"Expected 2D array, got {X.ndim}D Dask collection instead: one column is X[:, None].")
    two = X._meta_nonempty if hasattr(X, "_meta_nonempty") else np.ones((2, X.shape[1]), X.dtype)
    columns: Any = two
    validate_data(estimator, columns, dtype=np.float64, reset=reset)


def as_examples(part: tuple[Any, ...], numeric: bool) -> Examples:
    """A block of (X, y, sample_weight) or (X, y), checked."""
    x, y, *given = part
    x = as_rows(x)
    y = column_or_1d(y)
    if numeric:
        y = np.asarray(y, np.float64)
    if y.dtype.kind == "f":
        assert_all_finite(y, input_name="y")
    weights = np.asarray(given[0], np.float64) if given else np.ones(len(x))
    if weights.ndim != 1 or not np.all(np.isfinite(weights)) or np.any(weights < 0):
        raise ValueError("sample_weight is a number for each row, finite and not negative.")
    return Examples(x, y, weights)


def as_rows(x: Any, allow_nan: bool = False) -> Float[np.ndarray, "N D"]:
    """A block of X as numbers, all of which are finite (or missing)."""
    options: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan" if allow_nan else True}
    return check_array(x, ensure_min_samples=0, input_name="X", **options)


def training_rows(estimator: Estimator, X: Any, *, allow_nan: bool = False) -> TrainingRows:
    """The rows of X without targets, validated: in memory, or in the partitions of a Dask collection."""
    if is_dask(X):
        validate_collection(estimator, X, reset=True)
        return DaskParts(X).map(as_rows, allow_nan)
    finite: Any = "allow-nan" if allow_nan else True
    rows = validate_data(estimator, X, dtype=np.float64, ensure_all_finite=finite, ensure_min_samples=2)
    return RowsInMemory(rows)


def dask_examples(
    estimator: Estimator, X: Any, y: Any, sample_weight: Any, *, numeric: bool, reset: bool = True
) -> DaskParts:
    """The rows of Dask collections as `Examples`; every block is checked whenever it is read."""
    validate_collection(estimator, X, reset=reset)
    collections = (X, y) if sample_weight is None else (X, y, sample_weight)
    return DaskParts(collections).map(as_examples, numeric)


__all__ = [
    "START_ROWS",
    "DaskParts",
    "Examples",
    "RowsInMemory",
    "TrainingRows",
    "as_data",
    "as_rows",
    "check_full_batches",
    "dask_examples",
    "in_memory",
    "is_dask",
    "start_rows",
    "training_rows",
    "validate_collection",
]
