r"""E over one block of a function of its values: at points that move with the block's μ.

Where log f has no expectation in closed form, a factor gives log f of a block's value θ, and points θ_s with weights
w_s stand for E_q: $E_q\log f(θ) ≈ \sum_sw_s\log f(θ_s)$. The message is the derivative in the block's displacement δ
(`block_view`), so points or weights must be differentiable functions of δ: samples by reparameterization, grid nodes
as θ_s = m + V^{1/2}z_s, probabilities of a discrete block directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from ..families.discrete import Bernoulli, Categorical
from ..families.gaussian.base import GaussianFamily
from ..families.point_mass import Peak
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..points.base import Delta, Points
from ..points.quadrature import Enumeration, Quadrature
from ..points.sampling import MonteCarlo
from .block_view import BlockView, batch_shape


def expected(
    function: Callable[[PyTree], Array],
    view: BlockView,
    points: Points,
    key: Key | None,
    local: bool,
    held: Callable[[PyTree], Array] | None = None,
) -> Array:
    """E function(θ) over a block, entry by entry, as a differentiable function of the block's displacement.

    Args:
        function: log f of a value θ of the block. Unless the points are `MonteCarlo`, its result starts with the axes
            of the block's plates, because each plate is integrated over points of its own.
        view: the block.
        points: how the expectation is taken.
        key: a random key, for random points.
        local: whether the block has a member for each row of the data; the rows are then its first plates.
        held: the function without the displacement of other blocks under the delta method, from which `Delta()` points
            take the Hessian; by default the function itself.
    """
    owner = view.q.of if isinstance(view.q, Peak) else view.q
    if points.delta and isinstance(owner, GaussianFamily):
        return _second_order_at_mean(function, function if held is None else held, view, owner, local)
    if isinstance(view.q, Peak):
        if view.displaced:
            raise ValueError(
                f"A {type(owner).__name__} that is read at its peak gets no message from a function of its values, "
                "since the peak is one point for all μ: give the factor as E log f in μ, or use a Gaussian block with "
                "Delta() points (Newton's steps)."
            )
        return function(view.q.mode())
    member = view.member
    plates = _plates(member, local)
    if points.delta:
        return function(member.mean)
    if isinstance(points, Enumeration):
        theta, weights = member.support(), _probabilities(view, member)
    elif isinstance(points, Quadrature):
        theta, weights = _grid(points, member, len(plates))
    else:
        if not member.reparameterized:
            raise ValueError(
                f"Samples of {type(member).__name__} are not differentiable in μ, so they give no message: use "
                "Enumeration() where its values can be listed, or give the factor as E log f in μ. In a family of your "
                "own whose sample() is differentiable in the parameters, say reparameterized = True."
            )
        theta, weights, _ = points.at(member, key)
    values = jax.vmap(function)(theta)
    if not isinstance(points, MonteCarlo) and values.shape[1 : len(plates) + 1] != plates:
        raise ValueError(_coupled_plates(points, plates, values.shape[1:]))
    weights = weights.astype(values.dtype).reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
    return jnp.sum(weights * values, axis=0)


def _coupled_plates(points: Points, plates: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return (
        f"{points!r} integrate each plate separately, so the factor must return an array that starts with the plate "
        f"shape {plates}; it returned {shape}. If the factor couples plates, use MonteCarlo() or one block without "
        "plates."
    )


def _probabilities(view: BlockView, member: Any) -> Array:
    """The probabilities of all values of a discrete block, along the first axis.

    They are written linearly in μ where that is possible, because the derivative of the density's exponential loses its
    digits where a probability is close to 0.
    """
    if isinstance(view.q, Categorical):
        return jnp.moveaxis(view.probabilities, -1, 0)
    if isinstance(view.q, Bernoulli):
        spins, means = jax.tree.leaves(member.support()), jax.tree.leaves(view.expectation)
        per_leaf = [
            jnp.prod(0.5 * (1 + s * m), axis=tuple(range(1, s.ndim))) for s, m in zip(spins, means, strict=True)
        ]
        return math.prod(per_leaf[1:], start=per_leaf[0])
    return jnp.exp(member.log_prob(member.support()))


def _plates(member: Any, local: bool) -> tuple[int, ...]:
    """The shape of the block's plates; those of a local block are its rows, if its family has no plates itself."""
    return batch_shape(member) or ((jax.tree.leaves(member)[0].shape[0],) if local else ())


def _grid(points: Quadrature, member: Any, plates: int) -> tuple[PyTree, Array]:
    """A grid for each plate, its nodes along the first axis, and the nodes' weights, which all plates share."""
    grid_of = lambda q: points.at(type(q)(q.mean, q.precision) if getattr(q, "batch_ndim", 0) else q, None)
    nodes = lambda q: grid_of(q).theta
    for _ in range(plates):
        nodes = jax.vmap(nodes, out_axes=1)
    first = member
    for _ in range(plates):
        first = jax.tree.map(lambda x: x[0], first)
    return nodes(member), grid_of(first).weights


def _second_order_at_mean(
    function: Callable[[PyTree], Array], held: Callable[[PyTree], Array], view: BlockView, owner: Any, local: bool
) -> Array:
    """f(m) + ½⟨∇²f(m), V⟩, whose derivatives in m and V are ∇f(m) and ½∇²f(m): Newton's, or Laplace's, message.

    ∇²f(m) does not move with δ, else the message would have a third-order term. It does depend on q and on
    hyper-parameters, and the slope of the evidence has that term. At a `Peak` V is 0: the value is f(θ_*) alone.
    """
    mean, covariance = view.mean, view.covariance
    plates = len(_plates(owner, local))
    dense = jax.tree.leaves(covariance)[0].ndim > jax.tree.leaves(mean)[0].ndim
    if dense:
        to_tree, vector, matrix, center = owner._tree, mean, covariance, view.held.mean
    else:
        lead = jax.tree.leaves(mean)[0].shape[:plates]
        flat = lambda x: jnp.concatenate([leaf.reshape((*lead, -1)) for leaf in jax.tree.leaves(x)], axis=-1)
        to_tree = lambda v: _unflatten(v, mean, plates)
        vector, matrix, center = flat(mean), flat(covariance), flat(view.held.mean)
    of_vector = lambda v: jnp.asarray(function(to_tree(v)))
    basis = jnp.eye(vector.shape[-1], dtype=vector.dtype)
    in_every_plate = lambda e: jnp.broadcast_to(e, vector.shape)
    held_of_vector = lambda v: jnp.asarray(held(to_tree(v)))
    shape, plate_shape = jax.eval_shape(of_vector, vector).shape, vector.shape[:plates]
    if shape[:plates] != plate_shape:
        raise ValueError(_coupled_plates(Delta(), plate_shape, shape))

    def second_derivative(e: Array, d: Array) -> Array:
        slope = lambda v: jax.jvp(held_of_vector, (v,), (in_every_plate(e),))[1]
        return jax.jvp(slope, (center,), (in_every_plate(d),))[1]

    if dense:
        hessian = jax.vmap(lambda e: jax.vmap(lambda d: second_derivative(e, d))(basis))(basis)
        weights = jnp.moveaxis(matrix, (-2, -1), (0, 1))
    else:
        hessian = jax.vmap(lambda e: second_derivative(e, e))(basis)
        weights = jnp.moveaxis(matrix, -1, 0)
    axes = tuple(range(2 if dense else 1))
    weights = weights.reshape(weights.shape + (1,) * (hessian.ndim - weights.ndim))
    return of_vector(vector) + 0.5 * jnp.sum(hessian * weights, axis=axes)


def _unflatten(vector: Array, tree: PyTree, plates: int) -> PyTree:
    """A vector after the plates' axes as a pytree with leaves of the tree's shapes."""
    if plates == 0:
        return ravel_pytree(tree)[1](vector)
    leaves, treedef = jax.tree.flatten(tree)
    sizes = [leaf[(0,) * plates].size for leaf in leaves]
    cuts = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    parts = jnp.split(vector, cuts, axis=-1)
    return jax.tree.unflatten(treedef, [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)])
