"""The shapes that curvature comes in (nothing, a diagonal, a matrix, low-rank factors), and the
Gaussian-like families that take them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from ..noise import normal
from .base import Family


def ravel(tree: PyTree, lead: int = 0) -> Float[Array, "... P"]:
    """All leaves as one vector; the first `lead` axes of every leaf are kept."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros((0,))
    return jnp.concatenate([leaf.reshape((*leaf.shape[:lead], -1)) for leaf in leaves], axis=-1)


def unravel(vector: Float[Array, "... P"], like: PyTree, lead: int = 0) -> PyTree:
    """The inverse of `ravel`, to the shapes and dtypes of `like` less its first `lead` axes."""
    leaves, treedef = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        shape = leaf.shape[lead:]
        size = math.prod(shape)
        part = vector[..., start : start + size]
        parts.append(part.reshape(vector.shape[:-1] + shape).astype(leaf.dtype))
        start += size
    return jax.tree.unflatten(treedef, parts)


def slope_diagonal(slope: Callable[[Array], Array], at: Array) -> Array:
    """∂slope_j/∂θ_j for every j, one at a time: P directional derivatives and no P×P matrix."""

    def one(j: Array) -> Array:
        tangent = jnp.zeros_like(at).at[j].set(1)
        return jax.jvp(slope, (at,), (tangent,))[1][j]

    return jax.lax.map(one, jnp.arange(at.size), batch_size=min(64, max(1, at.size)))


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
        values, vectors = jnp.linalg.eigh(0.5 * (matrix + matrix.T))
        rows = jnp.sqrt(jnp.maximum(values, 0.0))[:, None] * vectors.T
        return Factored(jnp.zeros_like(values), rows)

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Factored:
        flat = ravel(jacobian, 2)
        rows = _times(square_root(middle), flat).reshape((-1, flat.shape[-1]))
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


def square_root(middle: Float[Array, "B K K"]) -> Float[Array, "B K K"]:
    """Rows c_r with M = Σ_r c_r c_rᵀ (of a negative part, nothing)."""
    if middle.shape[-1] == 1:
        return jnp.sqrt(jnp.maximum(middle, 0.0))
    values, vectors = jnp.linalg.eigh(middle)
    return jnp.sqrt(jnp.maximum(values, 0.0))[..., None] * jnp.swapaxes(vectors, -1, -2)


class GaussianFamily(Family):
    """A Gaussian over any pytree, whatever is kept of its precision S.

    The rule asks for $E_q∇\\barℓ$ in the shape of θ and $E_q∇^2\\barℓ$ in the family's `structure`.
    """

    mean: eqx.AbstractVar[PyTree]
    structure: ClassVar[Structure]
    symmetric: ClassVar[bool] = True

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        make: Any = cls  # its own fields are a subclass's matter
        return make(params, precision, **choices)

    @abstractmethod
    def transformed(self, noise: Float[Array, "... Q"]) -> PyTree:
        """m + S^{-1/2} ε for standard normal noise of `noise_size` numbers."""

    @abstractmethod
    def times(self, theta: PyTree) -> PyTree:
        """S θ."""

    @abstractmethod
    def solve(self, theta: PyTree) -> PyTree:
        """S⁻¹ θ."""

    @abstractmethod
    def trace(self, curvature: Any) -> Float[Array, ""]:
        """tr(S⁻¹ H), for a curvature in the family's structure."""

    @abstractmethod
    def variance(self) -> PyTree:
        """The diagonal of S⁻¹, in the shape of θ."""

    @abstractmethod
    def covariance(self) -> Float[Array, "... P P"]:
        """S⁻¹ over the ravelled θ."""

    @abstractmethod
    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        """J_b S⁻¹ J_bᵀ for every b: the covariance of outputs that are linear in θ."""

    @abstractmethod
    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        """S itself, as much of it as another family's structure can hold."""

    @abstractmethod
    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        """tr(S C) with the covariance C of another Gaussian."""

    def added(self, first: Any, second: Any) -> Any:
        return self.structure.add(first, second)

    def gradient_like(self) -> PyTree:
        return self.mean

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers make one draw."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.mean)) // max(1, math.prod(self.batch_shape))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return ()

    def sample(self, key: Key[Array, ""], shape: tuple[int, ...] = ()) -> PyTree:
        dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if jax.tree.leaves(self.mean) else float
        return self.transformed(jax.random.normal(key, (*shape, *self.batch_shape, self.noise_size), dtype))

    def drawn(self, key: Key[Array, ""], shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        """Draws like `sample`'s, by default with noise from the counter-based stream."""
        if standard:
            return self.sample(key, shape)
        dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if jax.tree.leaves(self.mean) else float
        return self.transformed(normal(key, (*shape, *self.batch_shape, self.noise_size), dtype))

    def cross_entropy(self, other: Any) -> Float[Array, "..."]:
        """−E_q log p for another Gaussian p, every constant included."""
        return 0.5 * other.prior_trace(self) - other.log_prob(self.mean)

    def kl(self, other: Any) -> Float[Array, "..."]:
        """KL(q ‖ p) for another Gaussian p, whatever its structure."""
        return self.cross_entropy(other) - self.entropy()


def floating(tree: PyTree) -> PyTree:
    """Every leaf as a floating-point array (what is already one keeps its dtype)."""

    def leaf(x: Any) -> Array:
        array = jnp.asarray(x)
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)

    return jax.tree.map(leaf, tree)


def wide(dtype: Any) -> Any:
    """The dtype that statistics of such parameters have: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def same_shape(tree: PyTree, like: PyTree, name: str) -> PyTree:
    """`tree` spread over the leaves of `like`: a scalar everywhere, else leaf by leaf."""
    if jax.tree.structure(tree) == jax.tree.structure(like):
        try:
            return jax.tree.map(lambda x, m: jnp.broadcast_to(x, m.shape).astype(wide(m.dtype)), tree, like)
        except ValueError:
            shapes = [jnp.shape(x) for x in jax.tree.leaves(tree)], [m.shape for m in jax.tree.leaves(like)]
            raise ValueError(
                f"The {name} has shapes {shapes[0]}, the mean {shapes[1]}: give one number, or one for each "
                "entry of the mean."
            ) from None
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)) and jnp.ndim(tree) == 0:
        return jax.tree.map(lambda m: jnp.full(m.shape, tree, wide(m.dtype)), like)
    raise ValueError(
        f"The {name} has the structure {jax.tree.structure(tree)}, the mean {jax.tree.structure(like)}: "
        "give one number, or the same pytree as the mean."
    )
