"""Arrays of other libraries as NumPy arrays, without importing those libraries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.pytree import PyTree


def as_numpy(array: Any) -> np.ndarray:
    """An array of NumPy's, of JAX's, of PyTorch's, or anything with a method `numpy()`, as TensorFlow's have it.

    Memory on the host is shared where that is possible. A `np.memmap` stays one.
    """
    if hasattr(array, "detach") and hasattr(array, "cpu"):
        array = array.detach().cpu()
    convert = getattr(array, "numpy", None)
    if callable(convert) and not isinstance(array, jax.Array):
        array = convert()
    array = array if isinstance(array, np.ndarray) else np.asarray(array)
    if array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"A stream has arrays of numbers, and this one has the type {array.dtype}: encode text and categories as "
            "numbers first."
        )
    return array


def batch_as_numpy(batch: PyTree) -> PyTree:
    """A batch as pytree of NumPy arrays. Lists become tuples, as a `DataLoader` of PyTorch makes lists of tuples."""
    batch = tuple(batch) if type(batch) is list else batch
    return jax.tree.map(as_numpy, batch)
