"""E over one block of a function of its values: at points that move with the block's μ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from ..families.discrete import Bernoulli, Categorical
from ..families.gaussian.base import GaussianFamily
from ..families.point_mass import Peak
from ..points.base import Delta, Points
from ..points.quadrature import Enumeration, Quadrature
from ..points.sampling import MonteCarlo
from .block_view import BlockView, batch_shape


def expected(function: Callable[[PyTree], Array], seen: BlockView, points: Points, key: Any, local: bool) -> Array:
    """E function(θ) over a block, entry by entry, as a function of its displacement.

    Plates (and a local block's rows) are the first axes of the function's value: every plate has points of its own.
    """
    owner = seen.q.of if isinstance(seen.q, Peak) else seen.q
    if points.delta and isinstance(owner, GaussianFamily):
        return _at_mean(function, seen, owner, local)
    if isinstance(seen.q, Peak):
        if seen.moving:
            raise ValueError(
                f"a {type(owner).__name__} that is read at its peak has no message from values of it: give the factor "
                "as E log f in μ, or a Gaussian block and Delta() points (Newton's steps)."
            )
        return function(seen.q.mode())
    member = seen.member
    plates = _plates(member, local)
    if points.delta:
        return function(member.mean)
    if isinstance(points, Enumeration):
        theta, weights = member.support(), _chances(seen, member)
    elif isinstance(points, Quadrature):
        theta, weights = _grid(points, member, len(plates))
    else:
        if not member.reparameterized:
            raise ValueError(
                f"The samples of a {type(member).__name__} do not move with μ: use Enumeration() where its values can "
                "be listed, or give the factor as E log f in μ."
            )
        theta, weights, _ = points.at(member, key)
    values = jax.vmap(function)(theta)
    if not isinstance(points, MonteCarlo) and values.shape[1 : len(plates) + 1] != plates:
        raise ValueError(_COUPLED.format(points, plates, values.shape[1:]))
    weights = weights.astype(values.dtype).reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.sum(weights * values, axis=0)


_COUPLED = (
    "{!r} look at every plate of a block {} by itself, so the factor returns an entry for each plate first, and it "
    "returns {}: where plates meet, use MonteCarlo() points, or one block without plates."
)


def _chances(seen: BlockView, member: Any) -> Array:
    """The probabilities of all values of a discrete block, linear in μ where that is known: exact however sure q is."""
    if isinstance(seen.q, Categorical):
        return jnp.moveaxis(seen.probabilities, -1, 0)
    if isinstance(seen.q, Bernoulli):
        signs, means = jax.tree.leaves(member.support()), jax.tree.leaves(seen.expectation)
        chances = [jnp.prod(0.5 * (1 + s * m), axis=tuple(range(1, s.ndim))) for s, m in zip(signs, means, strict=True)]
        return math.prod(chances[1:], start=chances[0])
    return jnp.exp(member.log_prob(member.support()))


def _plates(member: Any, local: bool) -> tuple[int, ...]:
    return batch_shape(member) or ((jax.tree.leaves(member)[0].shape[0],) if local else ())


def _grid(points: Quadrature, member: Any, plates: int) -> tuple[PyTree, Array]:
    """A grid for each plate, its nodes along the first axis."""
    one = lambda q: points.at(type(q)(q.mean, q.precision) if getattr(q, "batch_ndim", 0) else q, None)
    at = lambda q: one(q).theta
    for _ in range(plates):
        at = jax.vmap(at, out_axes=1)
    first = member
    for _ in range(plates):
        first = jax.tree.map(lambda x: x[0], first)
    return at(member), one(first).weights


def _at_mean(function: Callable[[PyTree], Array], seen: BlockView, owner: Any, local: bool) -> Array:
    """f(m) + ½⟨∇²f(m), V⟩, whose derivatives are ∇f(m) and ∇²f(m): Newton's message, or a Laplace approximation's.

    At a peak V is 0, so that the value is f(θ_*) alone.
    """
    mean, spread = seen.mean, seen.covariance
    plates = len(_plates(owner, local))
    dense = jax.tree.leaves(spread)[0].ndim > jax.tree.leaves(mean)[0].ndim
    if dense:
        tree, vector, matrix = owner._tree, mean, spread
    else:
        lead = jax.tree.leaves(mean)[0].shape[:plates]
        flat = lambda x: jnp.concatenate([leaf.reshape((*lead, -1)) for leaf in jax.tree.leaves(x)], axis=-1)
        tree = lambda v: _like(v, mean, plates)
        vector, matrix = flat(mean), flat(spread)
    at = lambda v: jnp.asarray(function(tree(v)))
    basis = jnp.eye(vector.shape[-1], dtype=vector.dtype)
    along = lambda e: jnp.broadcast_to(e, vector.shape)
    here = jax.lax.stop_gradient(vector)
    shapes = jax.eval_shape(at, vector).shape, vector.shape[:plates]
    if shapes[0][:plates] != shapes[1]:
        raise ValueError(_COUPLED.format(Delta(), shapes[1], shapes[0]))

    def second(e: Array, d: Array) -> Array:
        slope = lambda v: jax.jvp(at, (v,), (along(e),))[1]
        return jax.jvp(slope, (here,), (along(d),))[1]

    if dense:
        curved = jax.vmap(lambda e: jax.vmap(lambda d: second(e, d))(basis))(basis)
        spreads = jnp.moveaxis(matrix, (-2, -1), (0, 1))
    else:
        curved = jax.vmap(lambda e: second(e, e))(basis)
        spreads = jnp.moveaxis(matrix, -1, 0)
    curved = jax.lax.stop_gradient(curved)
    axes = tuple(range(2 if dense else 1))
    spreads = spreads.reshape(spreads.shape + (1,) * (curved.ndim - spreads.ndim))
    return at(vector) + 0.5 * jnp.sum(curved * spreads, axis=axes)


def _like(vector: Array, tree: PyTree, plates: int) -> PyTree:
    """A vector after the plates' axes as a pytree after them."""
    if plates == 0:
        return ravel_pytree(tree)[1](vector)
    leaves, treedef = jax.tree.flatten(tree)
    sizes = [leaf[(0,) * plates].size for leaf in leaves]
    cuts = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    parts = jnp.split(vector, cuts, axis=-1)
    return jax.tree.unflatten(treedef, [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])
