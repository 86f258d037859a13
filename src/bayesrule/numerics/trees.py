"""Pytrees of arrays as vectors and back: ravel, unravel, broadcasting to a tree's shapes, dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from .pytree import PyTree


def ravel(tree: PyTree, lead: int = 0) -> Float[Array, "... P"]:
    """All leaves as one vector; the first `lead` axes of every leaf are kept."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros((0,))
    return jnp.concatenate([leaf.reshape((*leaf.shape[:lead], -1)) for leaf in leaves], axis=-1)


def broadcast(x: Any, shape: tuple[int, ...]) -> Array:
    """`jnp.broadcast_to`, on the host where `x` is known: there a new shape costs no program, and JAX keeps those of
    single operations without a bound."""
    if isinstance(x, Tracer) or getattr(x, "weak_type", False) or jnp.shape(x) == shape:
        return jnp.broadcast_to(x, shape)
    return jnp.asarray(np.broadcast_to(np.asarray(x), shape))


def zeros_like(x: Any) -> Array:
    """`jnp.zeros_like`, on the host outside of a trace; where `x` is divided over several devices, so are the zeros."""
    if isinstance(x, Tracer) or (isinstance(x, jax.Array) and len(x.sharding.device_set) > 1):
        return jnp.zeros_like(x)
    return jnp.asarray(np.zeros(jnp.shape(x), jnp.result_type(x)))


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
    """∂slope_j/∂θ_j for every j, by P directional derivatives, without the P×P matrix."""

    def one(j: Array) -> Array:
        tangent = jnp.zeros_like(at).at[j].set(1)
        return jax.jvp(slope, (at,), (tangent,))[1][j]

    return jax.lax.map(one, jnp.arange(at.size), batch_size=min(64, max(1, at.size)))


def floating(tree: PyTree) -> PyTree:
    """Every leaf as a floating-point array (what is already one keeps its dtype)."""

    def leaf(x: Any) -> Array:
        array = jnp.asarray(x)
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)

    return jax.tree.map(leaf, tree)


def all_finite(x: Array, axis: int | tuple[int, ...] | None = None) -> Bool[Array, "..."]:
    """Whether all entries along these axes are finite numbers.

    The smallest and the largest entry tell, which are NaN where any is. A sum over `isfinite` would be stored term by
    term in XLA's programs for a CPU, four bytes for each entry.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones((), bool)
    extremes = jnp.min(x, axis=axis, initial=1.0), jnp.max(x, axis=axis, initial=1.0)
    return jnp.isfinite(extremes[0]) & jnp.isfinite(extremes[1])


def wide(dtype: Any) -> Any:
    """The dtype of statistics (precisions, averages) of parameters with this dtype: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Every leaf in the dtype of the corresponding leaf of `like`."""
    return jax.tree.map(lambda x, other: x.astype(other.dtype), tree, like)


def coarsest_eps(tree: PyTree) -> float:
    """The largest eps among the dtypes of the leaves, where statistics of half precision are in float32.

    A loss of float32 arrays has the rounding errors of float32, also where JAX is set to double precision and adds it
    to numbers in float64.
    """
    kinds = {wide(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return max((float(jnp.finfo(kind).eps) for kind in kinds), default=0.0)


def same_shape(tree: PyTree, like: PyTree, name: str) -> PyTree:
    """`tree` broadcast to the leaves of `like`: one number for all of them, or leaf by leaf.

    Args:
        tree: one number, or a pytree like `like`.
        like: a pytree of arrays.
        name: what `tree` is, for the error.
    """
    if jax.tree.structure(tree) == jax.tree.structure(like):
        try:
            return jax.tree.map(lambda x, m: broadcast(x, m.shape).astype(wide(m.dtype)), tree, like)
        except ValueError:
            shapes = [jnp.shape(x) for x in jax.tree.leaves(tree)], [m.shape for m in jax.tree.leaves(like)]
            raise ValueError(
                f"The {name} has shapes {shapes[0]}, the mean {shapes[1]}: give one number, or one for each "
                "entry of the mean."
            ) from None
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)) and jnp.ndim(tree) == 0:
        return jax.tree.map(lambda m: broadcast(jnp.asarray(tree, wide(m.dtype)), m.shape), like)
    raise ValueError(
        f"The {name} has the structure {jax.tree.structure(tree)}, the mean {jax.tree.structure(like)}: "
        "give one number, or the same pytree as the mean."
    )


def average_leaves(stack: PyTree, weights: Float[Array, " S"]) -> PyTree:
    """Σ_s w_s x_s for every leaf, with s its leading axis; of a leaf of integers, which has no average, the first."""

    def leaf(x: Array) -> Array:
        return jnp.tensordot(weights.astype(x.dtype), x, axes=1) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    return jax.tree.map(leaf, stack)
