"""The structures in which a Gaussian keeps its precision: none, diagonal, full, diagonal plus low rank.

A structure is what a family can hold of a symmetric matrix over θ. The rule never forms the whole Hessian and then
drops most of it: a curvature hands the ingredients (a gradient function, two vectors, Jacobians) to the structure of q,
which forms just the entries that q holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...numerics.linalg import root_rows
from ...numerics.pytree import PyTree
from ...numerics.trees import average_leaves, ravel, slope_diagonal, unravel


class SharedFeatures(eqx.Module):
    """The Jacobian of K outputs that are linear in the same D features, f = φᵀΘ with the ravelled θ as Θ (D, K).

    It stands in for a Jacobian with leaves (B, K, *leaf). The matrices of a full Gaussian then have a D×D block for
    each pair of outputs: K times fewer operations than with the K Jacobians written out. Where the outputs are
    independent under q, only their own blocks are needed. `like` is any θ.
    """

    features: Float[Array, "B D"]
    like: PyTree

    def outputs(self, vectors: Float[Array, "... P"]) -> Float[Array, "... B K"]:
        """J_b θ for every example b, for ravelled θ."""
        matrices = vectors.reshape((*vectors.shape[:-1], self.features.shape[1], -1))
        return jnp.einsum("bd,...dk->...bk", self.features, matrices)

    def transposed_product(self, slopes: Float[Array, "B K"]) -> PyTree:
        """Σ_b J_bᵀ g_b for a vector g_b of slopes in every example's outputs."""
        return unravel((self.features.T @ slopes).ravel(), self.like)

    def sandwich(self, middle: Float[Array, "B K K"]) -> Float[Array, "P P"]:
        """Σ_b J_bᵀ M_b J_b, for symmetric M_b."""
        features, size = self.features, middle.shape[-1]
        rows, columns = np.triu_indices(size)
        # One pair of outputs after another, so that no array of B·D·K² numbers is needed.
        blocks = jax.lax.map(lambda weights: (features * weights[:, None]).T @ features, middle[:, rows, columns].T)
        by_pair = jnp.zeros((size, size, *blocks.shape[1:]), blocks.dtype)
        by_pair = by_pair.at[rows, columns].set(blocks).at[columns, rows].set(blocks)
        return jnp.transpose(by_pair, (2, 0, 3, 1)).reshape((features.shape[1] * size, -1))

    def covariance(self, covariance: Float[Array, "P P"]) -> Float[Array, "B K K"]:
        """J_b C J_bᵀ for each example."""
        features = self.features
        size = covariance.shape[0] // features.shape[1]
        rows, columns = np.triu_indices(size)
        blocks = covariance.reshape((features.shape[1], size, features.shape[1], size))
        blocks = jnp.transpose(blocks, (1, 3, 0, 2))[rows, columns]
        entries = jax.lax.map(lambda block: jnp.sum((features @ block) * features, axis=1), blocks)
        by_pair = jnp.zeros((size, size, len(features)), entries.dtype)
        by_pair = by_pair.at[rows, columns].set(entries).at[columns, rows].set(entries)
        return jnp.transpose(by_pair, (2, 0, 1))

    def own_sandwich(self, middle: Float[Array, "B K"]) -> Float[Array, "K D D"]:
        """Σ_b J_bᵀ M_b J_b for diagonal M_b: a block for each output, and none between outputs."""
        return jax.lax.map(lambda weights: (self.features * weights[:, None]).T @ self.features, middle.T)

    def own_variances(self, covariances: Float[Array, "K D D"]) -> Float[Array, "B K"]:
        """The variances of every example's outputs, where the weights of different outputs are independent."""
        variance = lambda block: jnp.sum((self.features @ block) * self.features, axis=1)
        return jax.lax.map(variance, covariances).T


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class GaussNewtonForms(Protocol[T_co]):
    r"""The forms in which a curvature can compute $\sum_b J_b^⊤ M_b J_b$, of which `Structure.gauss_newton` calls one.

    Each returns the result of the measurement, with the matrix as the structure holds it.
    """

    def diagonal(self) -> T_co:
        """Only the diagonal, without a Jacobian for each example."""
        ...

    def kronecker(self, of_factors: Callable[[PyTree, PyTree], Any]) -> T_co:
        """Two factors for each layer, made into what the structure holds by `of_factors(inputs, outputs)`."""
        ...

    def sandwich(self) -> T_co:
        """All entries, from every example's Jacobian by `Structure.of_sandwich`."""
        ...


class Structure(ABC):
    """How a family holds a symmetric matrix over θ: the type of its curvature, and how to form one.

    A curvature calls one of the forming methods (`hessian`, `outer`, `gauss_newton`, `of_…`) at each point, `average`
    over the points, and the rule `add`s what the regularizer contributes. What they return is a pytree of arrays that
    only the family reads, in `moved` and `trace`. A new structure implements the abstract methods; the others follow
    from `of_matrix`, and are overridden where there is a cheaper way.
    """

    name: ClassVar[str]
    """What a curvature's `serves` lists."""
    shares_features: ClassVar[bool] = False
    """Whether `of_sandwich` takes `SharedFeatures` as the Jacobian."""
    couples_outputs: ClassVar[bool] = True
    """Whether of outputs with `SharedFeatures` it needs all of every example's M_b, (B, K, K). Else the diagonals,
    (B, K), are enough, and the family's `output_covariance` has variances only."""

    @abstractmethod
    def of_diagonal(self, diagonal: PyTree) -> Any:
        """Hold the diagonal matrix with this θ-shaped diagonal (an isotropic prior's Hessian)."""

    @abstractmethod
    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> Any:
        """Hold what it can of a dense matrix.

        Args:
            matrix: A matrix over the ravelled θ; only its symmetric part counts.
            like: Any θ, for the shapes of its leaves.
        """

    @abstractmethod
    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Any:
        r"""Hold $\sum_b J_b^⊤ M_b J_b$ (Gauss–Newton; the Hessian where outputs are linear in θ).

        Args:
            jacobian: ∂f_b/∂θ for every example b: leaves (B, K, *leaf), or `SharedFeatures` if `shares_features`.
            middle: M_b, symmetric, the loss's Hessian in the K outputs. With `SharedFeatures` it may be their diagonals
                alone, (B, K), unless `couples_outputs`.
        """

    def hessian(self, gradient: Callable[[Array], Array], theta: PyTree) -> Any:
        """Hold the Hessian of a function at θ.

        Args:
            gradient: The function's gradient, from the ravelled θ to a vector.
            theta: Where.
        """
        return self.of_matrix(jax.jacfwd(gradient)(ravel(theta)), theta)

    def outer(self, first: PyTree, second: PyTree) -> Any:
        """Hold the symmetric part of a bᵀ, for two trees like θ (Stein's identity)."""
        return self.of_matrix(ravel(first)[:, None] * ravel(second)[None, :], first)

    def outer_sum(self, vectors: PyTree, weights: Float[Array, " J"]) -> Any:
        """Hold Σ_j w_j v_j v_jᵀ, for trees like θ with a leading axis (a mixture's components)."""
        flat = ravel(vectors, 1)
        matrix = jnp.einsum("j,jp,jq->pq", weights.astype(flat.dtype), flat, flat)
        return self.of_matrix(matrix, jax.tree.map(lambda x: x[0], vectors))

    def gauss_newton(self, forms: GaussNewtonForms[T]) -> T:
        """Call the one of the forms that gives what this structure holds with the least work, and return its result."""
        return forms.sandwich()

    def multiply_entries(self, curvature: Any, diagonal: PyTree, matrix: Callable[[], Float[Array, "P P"]]) -> Any:
        """Multiply a held matrix entry by entry with another, given by its θ-shaped diagonal and as a function.

        Raises:
            ValueError: If the structure does not hold single entries.
        """
        raise ValueError(f"The entries of a precision with the structure {self.name!r} cannot be weighted one by one.")

    def add(self, first: Any, second: Any) -> Any:
        """The sum of two held matrices. The second may be what `of_diagonal` or `of_matrix` made of a prior."""
        return jax.tree.map(jnp.add, first, second)

    def average(self, stack: Any, weights: Float[Array, " S"]) -> Any:
        """Σ_s w_s H_s, for held matrices with a leading axis: the expectation over the points."""
        return average_leaves(stack, weights)


class NoStructure(Structure):
    """Nothing is held: the precision is fixed, or the family is not one of Gaussians."""

    name = "none"

    def of_diagonal(self, diagonal: PyTree) -> None:
        return None

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> None:
        return None

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> None:
        return None

    def hessian(self, gradient: Callable[[Array], Array], theta: PyTree) -> None:
        return None

    def outer(self, first: PyTree, second: PyTree) -> None:
        return None

    def outer_sum(self, vectors: PyTree, weights: Float[Array, " J"]) -> None:
        return None

    def multiply_entries(self, curvature: Any, diagonal: PyTree, matrix: Callable[[], Float[Array, "P P"]]) -> Any:
        return curvature


class DiagonalStructure(Structure):
    """A θ-shaped diagonal."""

    name = "diagonal"
    shares_features = True
    couples_outputs = False

    def of_diagonal(self, diagonal: PyTree) -> PyTree:
        return diagonal

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> PyTree:
        return unravel(jnp.diagonal(matrix), like)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K *K"]) -> PyTree:
        if isinstance(jacobian, SharedFeatures):
            own = middle if middle.ndim == 2 else jnp.diagonal(middle, axis1=1, axis2=2)
            return unravel((jacobian.features.T**2 @ own).ravel(), jacobian.like)

        def leaf(j: Array) -> Array:
            flat = j.reshape((*j.shape[:2], -1))
            return jnp.sum(flat * _times(middle, flat), axis=(0, 1)).reshape(j.shape[2:])

        return jax.tree.map(leaf, jacobian)

    def hessian(self, gradient: Callable[[Array], Array], theta: PyTree) -> PyTree:
        return unravel(slope_diagonal(gradient, ravel(theta)), theta)

    def outer(self, first: PyTree, second: PyTree) -> PyTree:
        return jax.tree.map(jnp.multiply, first, second)

    def outer_sum(self, vectors: PyTree, weights: Float[Array, " J"]) -> PyTree:
        return self.average(jax.tree.map(jnp.square, vectors), weights)

    def gauss_newton(self, forms: GaussNewtonForms[T]) -> T:
        return forms.diagonal()

    def multiply_entries(self, curvature: PyTree, diagonal: PyTree, matrix: Callable[[], Any]) -> PyTree:
        return jax.tree.map(lambda h, w: h * w.astype(h.dtype), curvature, diagonal)


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

    def outer_sum(self, vectors: PyTree, weights: Float[Array, " J"]) -> Float[Array, "P P"]:
        flat = ravel(vectors, 1)
        return jnp.einsum("j,jp,jq->pq", weights.astype(flat.dtype), flat, flat)  # symmetric as it is

    def multiply_entries(
        self, curvature: Float[Array, "P P"], diagonal: PyTree, matrix: Callable[[], Float[Array, "P P"]]
    ) -> Float[Array, "P P"]:
        return curvature * matrix().astype(curvature.dtype)


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


NONE, DIAGONAL, FULL, FACTORED = NoStructure(), DiagonalStructure(), FullStructure(), FactoredStructure()


def _times(middle: Float[Array, "B K K"], flat: Float[Array, "B K P"]) -> Float[Array, "B K P"]:
    """M_b J_b for every example; with one output, M_b is a weight and needs no matrix product."""
    if middle.shape[-1] == 1:
        return middle * flat
    return jnp.einsum("bkl,blp->bkp", middle, flat)
