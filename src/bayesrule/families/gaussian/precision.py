"""The structures in which a Gaussian keeps its precision: none, diagonal, full, diagonal plus low rank."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...numerics.linalg import root_rows
from ...numerics.trees import ravel, unravel


class SharedFeatures(eqx.Module):
    """The Jacobian of K outputs that are linear in the same D features, f = φᵀΘ with the ravelled θ as Θ (D, K): φ.

    For a full Gaussian, whose matrices then have a D×D block for each pair of outputs: K times fewer operations than
    with the K Jacobians written out. `like` is any θ.
    """

    features: Float[Array, "B D"]
    like: PyTree

    def outputs(self, vectors: Float[Array, "... P"]) -> Float[Array, "... B K"]:
        """Jθ for θ as vectors."""
        matrices = vectors.reshape((*vectors.shape[:-1], self.features.shape[1], -1))
        return jnp.einsum("bd,...dk->...bk", self.features, matrices)

    def pulled(self, slopes: Float[Array, "B K"]) -> PyTree:
        """Jᵀ of every example's slopes, summed."""
        return unravel((self.features.T @ slopes).ravel(), self.like)

    def sandwich(self, middle: Float[Array, "B K K"]) -> Float[Array, "P P"]:
        """Σ_b J_bᵀM_bJ_b, for symmetric M."""
        features, size = self.features, middle.shape[-1]
        rows, columns = np.triu_indices(size)
        # One pair of outputs after another, so that nothing of the size B·D·K² is made.
        blocks = jax.lax.map(lambda weights: (features * weights[:, None]).T @ features, middle[:, rows, columns].T)
        whole = jnp.zeros((size, size, *blocks.shape[1:]), blocks.dtype)
        whole = whole.at[rows, columns].set(blocks).at[columns, rows].set(blocks)
        return jnp.transpose(whole, (2, 0, 3, 1)).reshape((features.shape[1] * size, -1))

    def covariance(self, covariance: Float[Array, "P P"]) -> Float[Array, "B K K"]:
        """J_b C J_bᵀ for each example."""
        features = self.features
        size = covariance.shape[0] // features.shape[1]
        rows, columns = np.triu_indices(size)
        blocks = covariance.reshape((features.shape[1], size, features.shape[1], size))
        blocks = jnp.transpose(blocks, (1, 3, 0, 2))[rows, columns]
        found = jax.lax.map(lambda block: jnp.sum((features @ block) * features, axis=1), blocks)
        whole = jnp.zeros((size, size, len(features)), found.dtype)
        whole = whole.at[rows, columns].set(found).at[columns, rows].set(found)
        return jnp.transpose(whole, (2, 0, 1))


class Structure:
    """How a family holds a symmetric matrix over θ. The base class holds nothing at all."""

    name: ClassVar[str] = "none"
    shares_features: ClassVar[bool] = False
    """Whether `of_sandwich` takes `SharedFeatures` as the Jacobian."""

    def of_diagonal(self, diagonal: PyTree) -> Any:
        """The diagonal matrix with this θ-shaped diagonal."""
        return None

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> Any:
        """What can be held of a dense matrix over the ravelled θ."""
        return None

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Any:
        """Σ_b J_bᵀ M_b J_b, for Jacobians whose leaves are (B, K, *leaf)."""
        return None

    def add(self, first: Any, second: Any) -> Any:
        """The sum of two held matrices."""
        return jax.tree.map(jnp.add, first, second)

    def average(self, stack: Any, weights: Float[Array, " S"]) -> Any:
        """Σ_s w_s H_s, for held matrices with a leading axis (of what has no average, such as a count, the first)."""

        def leaf(x: Array) -> Array:
            return jnp.tensordot(weights.astype(x.dtype), x, axes=1) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

        return jax.tree.map(leaf, stack)


class DiagonalStructure(Structure):
    """A θ-shaped diagonal."""

    name = "diagonal"

    def of_diagonal(self, diagonal: PyTree) -> PyTree:
        return diagonal

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> PyTree:
        return unravel(jnp.diagonal(matrix), like)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> PyTree:
        def leaf(j: Array) -> Array:
            flat = j.reshape((*j.shape[:2], -1))
            return jnp.sum(flat * _times(middle, flat), axis=(0, 1)).reshape(j.shape[2:])

        return jax.tree.map(leaf, jacobian)


class FullStructure(Structure):
    """A dense matrix over the ravelled θ."""

    name = "full"
    shares_features = True

    def of_diagonal(self, diagonal: PyTree) -> Float[Array, "P P"]:
        return jnp.diag(ravel(diagonal))

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> Float[Array, "P P"]:
        return 0.5 * (matrix + matrix.T)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Float[Array, "P P"]:
        if isinstance(jacobian, SharedFeatures):
            return jacobian.sandwich(middle)
        flat = ravel(jacobian, 2)
        rows = flat.reshape((-1, flat.shape[-1]))
        return _times(middle, flat).reshape(rows.shape).T @ rows


class Factored(eqx.Module):
    """A diagonal plus the outer products of rows: diag(d) + RᵀR over the ravelled θ."""

    diagonal: Float[Array, " P"]
    rows: Float[Array, "R P"]


class FactoredStructure(Structure):
    """A diagonal and rows of outer products."""

    name = "factored"

    def of_diagonal(self, diagonal: PyTree) -> Factored:
        flat = ravel(diagonal)
        return Factored(flat, jnp.zeros((0, flat.size), flat.dtype))

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> Factored:
        rows = root_rows(0.5 * (matrix + matrix.T))
        return Factored(jnp.zeros_like(rows[0]), rows)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Factored:
        flat = ravel(jacobian, 2)
        rows = _times(root_rows(middle), flat).reshape((-1, flat.shape[-1]))
        return Factored(jnp.zeros_like(flat[0, 0]), rows)

    def add(self, first: Factored, second: Factored) -> Factored:
        rows = jnp.concatenate([first.rows, second.rows])
        return Factored(first.diagonal + second.diagonal, rows)

    def average(self, stack: Factored, weights: Float[Array, " S"]) -> Factored:
        weights = weights.astype(stack.rows.dtype)
        rows = jnp.sqrt(weights)[:, None, None] * stack.rows
        return Factored(weights @ stack.diagonal, rows.reshape((-1, rows.shape[-1])))


NONE, DIAGONAL, FULL, FACTORED = Structure(), DiagonalStructure(), FullStructure(), FactoredStructure()


def _times(middle: Float[Array, "B K K"], flat: Float[Array, "B K P"]) -> Float[Array, "B K P"]:
    if middle.shape[-1] == 1:  # one output: a weight per row, not a matrix product
        return middle * flat
    return jnp.einsum("bkl,blp->bkp", middle, flat)
