"""λ as a vector of minimal coordinates: symmetric matrices as their lower triangle, on an orthonormal basis."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def to_vector(leaf: Array, rank: int, ranked: bool) -> Array:
    """The last `rank` axes of a leaf as one; a matrix counts as symmetric if the family has `ranks` (`ranked`)."""
    if rank == 2 and ranked:
        return _to_lower(leaf)
    lead = leaf.shape[: leaf.ndim - rank]
    return leaf.reshape((*lead, -1))


def _scales(size: int) -> tuple[Any, Any, Array]:
    """Rows and columns of the lower triangle, and √2 off the diagonal, with which the map keeps inner products."""
    row, column = jnp.tril_indices(size)
    return row, column, jnp.where(row == column, 1.0, jnp.sqrt(2.0))


def _to_lower(matrix: Float[Array, "... D D"]) -> Float[Array, "... M"]:
    row, column, scale = _scales(matrix.shape[-1])
    return matrix[..., row, column] * scale.astype(matrix.dtype)


def from_lower(vector: Float[Array, "... M"], size: int) -> Float[Array, "... D D"]:
    """The symmetric matrix with this scaled lower triangle."""
    row, column, scale = _scales(size)
    values = vector / scale.astype(vector.dtype)
    matrix = jnp.zeros((*vector.shape[:-1], size, size), vector.dtype)
    return matrix.at[..., row, column].set(values).at[..., column, row].set(values)
