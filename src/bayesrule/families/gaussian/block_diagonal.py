"""The Gaussian whose columns are independent, each with a full precision: one block for each output of a model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.trees import floating, ravel
from ...steps.step import Step
from ..base import ExponentialFamily
from .base import GaussianFamily
from .full import Gaussian
from .precision import SharedFeatures, Structure

Blocks = Float[Array, "K D D"]


def to_columns(tree: PyTree, like: PyTree) -> Float[Array, "... K D"]:
    """The columns of θ as rows of a matrix: column k is θ[…, k] of all leaves. Leading axes stay in front.

    Args:
        tree: a pytree like θ, perhaps with leading axes.
        like: a θ, for the number of its axes.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    leads = [leaf.ndim - jnp.ndim(own) for leaf, own in zip(leaves, jax.tree.leaves(like), strict=True)]
    rows = [leaf.reshape((*leaf.shape[:lead], -1, leaf.shape[-1])) for leaf, lead in zip(leaves, leads, strict=True)]
    return jnp.swapaxes(jnp.concatenate(rows, axis=-2), -1, -2)


def from_columns(columns: Float[Array, "... K D"], like: PyTree) -> PyTree:
    """The inverse of `to_columns`, to the shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    rows, parts, start = jnp.swapaxes(columns, -1, -2), [], 0
    for leaf in leaves:
        size = math.prod(leaf.shape[:-1])
        part = rows[..., start : start + size, :]
        parts.append(part.reshape((*rows.shape[:-2], *leaf.shape)).astype(leaf.dtype))
        start += size
    return jax.tree.unflatten(treedef, parts)


class BlocksStructure(Structure):
    """A dense matrix for each column of θ, (K, D, D), and nothing between columns."""

    name = "blocks"
    shares_features = True
    couples_outputs = False

    def of_diagonal(self, diagonal: PyTree) -> Blocks:
        columns = to_columns(diagonal, diagonal)
        return columns[..., None] * jnp.eye(columns.shape[-1], dtype=columns.dtype)

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> Blocks:
        index = to_columns(jax.tree.map(lambda x: x.astype(int), _numbered(like)), like)
        blocks = matrix[index[:, :, None], index[:, None, :]]
        return 0.5 * (blocks + blocks.mT)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K *K"]) -> Blocks:
        if isinstance(jacobian, SharedFeatures):
            return jacobian.own_sandwich(middle if middle.ndim == 2 else jnp.diagonal(middle, axis1=1, axis2=2))
        like = jax.tree.map(lambda j: j[0, 0], jacobian)
        columns = to_columns(jacobian, like)
        return jnp.einsum("bokd,bop,bpke->kde", columns, middle, columns)

    def outer(self, first: PyTree, second: PyTree) -> Blocks:
        a, b = to_columns(first, first), to_columns(second, second)
        product = a[:, :, None] * b[:, None, :]
        return 0.5 * (product + product.mT)


def _numbered(like: PyTree) -> PyTree:
    """Every entry's place in the ravelled θ, in the shape of θ."""
    leaves, treedef = jax.tree.flatten(like)
    starts = [sum(leaf.size for leaf in leaves[:i]) for i in range(len(leaves))]
    numbers = [start + jnp.arange(leaf.size).reshape(leaf.shape) for start, leaf in zip(starts, leaves, strict=True)]
    return jax.tree.unflatten(treedef, numbers)


BLOCKS = BlocksStructure()


class BlockDiagonalGaussian(GaussianFamily, ExponentialFamily):
    r"""Independent columns $θ_k ∼ N(m_k, S_k^{-1})$, k = 1, …, K, each with a full precision.

    The leaves of θ have their last axis of length K in common: the weights (inputs, K) and intercepts (K) of a linear
    model with K outputs, say, whose memory then grows with K and not with K² as that of a `Gaussian` does.
    $λ = (S_k m_k, −½S_k)_k$, and each column moves as a `Gaussian` does: $S_k ← (1−ρτ)S_k + ρE_q∇_k^2\barℓ$,
    $m_k ← m_k − ρS_k^{-1}E_q∇_k\barℓ$.

    >>> import jax.numpy as jnp
    >>> q = BlockDiagonalGaussian({"b": jnp.zeros(3), "w": jnp.ones((2, 3))}, 4.0)
    >>> q.precision.shape, [float(v) for v in q.variance()["b"]]
    ((3, 3, 3), [0.25, 0.25, 0.25])

    Args:
        mean: m, a pytree whose leaves all have the last axis K.
        precision: S_k for each column, (K, D, D) with D the number of entries of a column, in the order of the leaves;
            or one number for a multiple of the identity.
    """

    mean: PyTree
    precision: Blocks
    label: ClassVar[str] = "Gaussian (block-diagonal cov.)"
    meaning: ClassVar[str] = "q(θ) = Π_k N(θ_k | m_k, S_k⁻¹), λ = (S_k m_k, −½S_k)"
    update: ClassVar[str] = "S_k ← (1 − ρτ)S_k + ρ E_q∇²_k ℓ̄,  m_k ← m_k − ρ S_k⁻¹ E_q∇_k ℓ̄"
    structure: ClassVar[Structure] = BLOCKS
    reparameterized: ClassVar[bool] = True
    unbatchable: ClassVar[bool] = True

    def __init__(self, mean: PyTree, precision: Any = 1.0):
        self.mean = floating(mean)
        leaves = jax.tree.leaves(self.mean)
        if len({leaf.shape[-1:] for leaf in leaves}) != 1 or not all(leaf.ndim for leaf in leaves):
            raise ValueError(
                "The columns of a BlockDiagonalGaussian are along the last axis of every leaf, which must be equally "
                f"long in all of them, got shapes {[leaf.shape for leaf in leaves]}."
            )
        columns = leaves[0].shape[-1]
        size = sum(leaf.size for leaf in leaves) // columns
        precision = floating(precision)
        if precision.ndim == 0:
            dtype = jnp.result_type(*leaves, precision)
            precision = jnp.broadcast_to(precision * jnp.eye(size, dtype=dtype), (columns, size, size))
        if precision.shape != (columns, size, size):
            raise ValueError(
                f"{columns} columns of {size} numbers need precisions of shape ({columns}, {size}, {size}), got "
                f"{precision.shape}."
            )
        self.precision = precision

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (precision, params)]
        return cls(params, BLOCKS.of_diagonal(precision) if shapes[0] == shapes[1] else precision)

    @property
    def columns(self) -> Gaussian:
        """The columns as a batch of K Gaussians."""
        return Gaussian(to_columns(self.mean, self.mean), self.precision)

    def _vectors(self, theta: PyTree) -> Float[Array, "... K D"]:
        return to_columns(theta, self.mean)

    def _tree(self, columns: Float[Array, "... K D"]) -> PyTree:
        return from_columns(columns, self.mean)

    def _with(self, columns: Gaussian) -> Self:
        parts = (self._tree(columns.mean), columns.precision)
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, parts)

    def _step(self, step: Step) -> Step:
        """The step of the columns."""
        previous = None if step.momentum is None else step.previous.columns
        return dataclasses.replace(step, gradient=self._vectors(step.gradient), previous=previous)

    # The distribution.

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        return self._tree(self.columns.transformed(noise.reshape((*noise.shape[:-1], *self.precision.shape[:-1]))))

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        return jnp.sum(self.columns.log_prob(self._vectors(theta)), axis=-1)

    def entropy(self) -> Float[Array, ""]:
        return jnp.sum(self.columns.entropy())

    def kl(self, other: Any) -> Float[Array, "..."]:
        return GaussianFamily.kl(self, other)

    def cross_entropy(self, other: Any) -> Float[Array, "..."]:
        return GaussianFamily.cross_entropy(self, other)

    def distance(self, other: Any) -> Float[Array, ""]:
        return GaussianFamily.distance(self, other)

    def inside(self, natural: Any = None) -> Bool[Array, ""]:
        return jnp.all(self.columns.inside(natural))

    def mode(self) -> PyTree:
        return self.mean

    # The precision.

    def times(self, theta: PyTree) -> PyTree:
        return self._tree(jnp.einsum("kde,...ke->...kd", self.precision, self._vectors(theta)))

    def solve(self, theta: PyTree) -> PyTree:
        return self._tree(jnp.einsum("kde,...ke->...kd", self.columns.covariance(), self._vectors(theta)))

    def trace(self, curvature: Blocks) -> Float[Array, ""]:
        return self.columns.trace(curvature)

    def variance(self) -> PyTree:
        return self._tree(self.columns.variance())

    def covariance(self) -> Float[Array, "P P"]:
        """S⁻¹ as a dense matrix over the ravelled θ, for small θ."""
        index = to_columns(_numbered(self.mean), self.mean)
        size = index.size
        matrix = jnp.zeros((size, size), self.precision.dtype)
        return matrix.at[index[:, :, None], index[:, None, :]].set(self.columns.covariance())

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K *K"]:
        """The covariance of every example's outputs; their variances, (B, K), for `SharedFeatures`."""
        covariance = self.columns.covariance()
        if isinstance(jacobian, SharedFeatures):
            return jacobian.own_variances(covariance)
        columns = self._vectors(jacobian)
        return jnp.einsum("bokd,kde,bpke->bop", columns, covariance, columns)

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        if structure.name == self.structure.name:
            return self.precision
        index = to_columns(_numbered(self.mean), self.mean)
        matrix = jnp.zeros((index.size, index.size), self.precision.dtype)
        return structure.of_matrix(matrix.at[index[:, :, None], index[:, None, :]].set(self.precision), like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        if isinstance(other, BlockDiagonalGaussian):
            return jnp.sum(self.precision * other.columns.covariance())
        return jnp.sum(self.precision * BLOCKS.of_matrix(other.covariance(), self.mean))

    def precision_matrices(self) -> tuple[Blocks, ...]:
        return (self.precision,)

    def with_scaled_precision(self, factor: Any) -> Self:
        return self._with(self.columns.with_scaled_precision(factor))

    # λ and μ.

    def natural(self) -> tuple[Array, Array]:
        return self.columns.natural()

    @classmethod
    def from_natural(cls, natural: tuple[Array, Array]) -> Self:
        """The member over an array (D, K) with this λ."""
        columns = Gaussian.from_natural(natural)
        return cls(columns.mean.mT, columns.precision)

    def with_natural(self, natural: tuple[Array, Array]) -> Self:
        return self._with(Gaussian.from_natural(natural))

    def expectation(self) -> tuple[Array, Array]:
        return self.columns.expectation()

    def with_expectation(self, expectation: tuple[Array, Array]) -> Self:
        return self._with(Gaussian.from_expectation(expectation))

    def shifted_in_mu(self, shift: tuple[Array, Array]) -> Self:
        return self._with(self.columns.shifted_in_mu(shift))

    def statistics(self, theta: PyTree) -> tuple[Array, Array]:
        return self.columns.statistics(self._vectors(theta))

    def log_partition(self, natural: tuple[Array, Array]) -> Float[Array, ""]:
        return jnp.sum(self.columns.log_partition(natural))

    def log_base(self, theta: PyTree) -> float:
        return -0.5 * self.noise_size * math.log(2 * math.pi)

    def to_natural_gradient(self, covector: tuple[Array, Array]) -> tuple[Array, Array]:
        return self.columns.to_natural_gradient(covector)

    # The rule.

    def natural_step(self, step: Step) -> tuple[Array, Array]:
        return self.columns.natural_step(self._step(step))

    def derivatives(self, natural_gradient: tuple[Array, Array]) -> tuple[PyTree, Blocks]:
        gradient, curvature = self.columns.derivatives(natural_gradient)
        return self._tree(gradient), curvature

    def moved(self, step: Step) -> Self:
        return super().moved(step) if step.reverse else self._with(self.columns.moved(self._step(step)))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ Σ_k g_kᵀS_k⁻¹g_k + ¼ Σ_k tr[(S_k⁻¹(H_k − τS_k))²]."""
        return self.columns.decrement(self._step(step))

    # Coordinates: those of the columns, one column after another.

    def inner(self, natural: PyTree, statistics: PyTree) -> Float[Array, "..."]:
        return jnp.sum(self.columns.inner(natural, statistics), axis=-1)

    def coordinates(self, natural: tuple[Array, Array]) -> Float[Array, " M"]:
        return ravel(self.columns.coordinates(natural))

    def uncoordinates(self, vector: Float[Array, " M"]) -> tuple[Array, Array]:
        return self.columns.uncoordinates(vector.reshape((self.precision.shape[0], -1)))

    def _symmetric(self, tree: PyTree) -> PyTree:
        return tree[0], 0.5 * (tree[1] + tree[1].mT)
