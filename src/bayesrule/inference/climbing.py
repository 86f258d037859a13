r"""Newton's method for several starts side by side, as a part of the program that evaluates the density.

What a start does between two evaluations: it takes the step that it has tried if the density has risen enough, and
halves it if not. The step is the rule's own (`step_from`) at ρ = 1, from a Gaussian whose precision is the Hessian, or
the Hessian with the absolute values of its eigenvalues. From the host every evaluation would cost a call, which takes
longer than the model of a few numbers itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .advance import step_from

LANES = 8
"""How many starts climb side by side."""

HALVINGS = 30
"""How often a step is halved before a start is given up."""

DECREMENT = 1e-6
"""Nats to gain, to second order, below which a start has arrived."""

LONGEST = 1e3
"""A step is at most so many times as long as the way from zero, where there is hardly any curvature."""

ENOUGH = 2e-4
"""The part of what the slope promises by which the density must rise at least (Armijo's condition)."""


class Climbers(NamedTuple):
    """Starts on their way.

    Attributes:
        position: where each is.
        value: −log p there, infinite before the first evaluation.
        precision: its Hessian there.
        step: the whole step from there.
        decrement: the nats that it promises, to second order.
        halvings: how often it was halved.
        active: which are still on their way.
        arrived: which are at a mode.
    """

    position: Float[Array, "L P"]
    value: Float[Array, " L"]
    precision: Float[Array, "L P P"]
    step: Float[Array, "L P"]
    decrement: Float[Array, " L"]
    halvings: Float[Array, " L"]
    active: Bool[Array, " L"]
    arrived: Bool[Array, " L"]


def begin(starts: Float[Array, "L P"], count: Any) -> Climbers:
    """The first so many of the starts, before anything is evaluated."""
    lanes, size = starts.shape
    zeros = lambda *shape: jnp.zeros((lanes, *shape), starts.dtype)
    active = jnp.arange(lanes) < count
    infinite = jnp.full(lanes, jnp.inf, starts.dtype)
    return Climbers(starts, infinite, zeros(size, size), zeros(size), zeros(), zeros(), active, jnp.zeros(lanes, bool))


def climb_on(
    climbers: Climbers,
    tried: Float[Array, "L P"],
    value: Float[Array, " L"],
    gradient: Float[Array, "L P"],
    hessian: Float[Array, "L P P"],
) -> tuple[Climbers, Float[Array, "L P"]]:
    """What is known after an evaluation where each start has tried to go, and where each tries to go next.

    Args:
        climbers: the starts.
        tried: where −log p was evaluated.
        value: −log p there.
        gradient: its gradient.
        hessian: its Hessian.
    """
    hessian = 0.5 * (hessian + jnp.swapaxes(hessian, 1, 2))
    usable = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient), 1) & jnp.all(jnp.isfinite(hessian), (1, 2))
    first = jnp.isinf(climbers.value)
    promised = ENOUGH * 0.5**climbers.halvings * climbers.decrement
    taken = climbers.active & usable & (first | (value <= climbers.value - promised))
    choose = lambda new, old: jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)
    hessian = choose(hessian, jnp.broadcast_to(jnp.eye(tried.shape[1], dtype=tried.dtype), hessian.shape))
    step, decrement, definite = _newton_steps(tried, gradient, hessian)
    rounding = 32 * jnp.finfo(value.dtype).eps * (1 + jnp.abs(value))
    arrived = taken & definite & (decrement < jnp.maximum(DECREMENT, rounding))
    halvings = jnp.where(taken, 0.0, climbers.halvings + 1)
    lost = ~taken & (first | (halvings > HALVINGS))
    climbers = Climbers(
        choose(tried, climbers.position),
        choose(value, climbers.value),
        choose(hessian, climbers.precision),
        choose(step, climbers.step),
        choose(decrement, climbers.decrement),
        halvings,
        climbers.active & ~arrived & ~lost,
        climbers.arrived | arrived,
    )
    return climbers, climbers.position + (0.5**halvings)[:, None] * climbers.step


def _newton_steps(
    position: Float[Array, "L P"], gradient: Float[Array, "L P"], hessian: Float[Array, "L P P"]
) -> tuple[Array, Array, Array]:
    """Whole steps, the nats that they promise, and whether the Hessians are positive definite."""
    diagonal = lambda x: jnp.diagonal(x, axis1=1, axis2=2)
    # NaN, of a matrix that is not positive definite, is not larger than anything.
    definite = jnp.all(diagonal(jnp.linalg.cholesky(hessian)) ** 2 > 1e-12 * diagonal(hessian), axis=1)
    # Eigenvalues take longer than all the rest, and close to modes nobody needs them.
    positive: Array = jax.lax.cond(jnp.all(definite), lambda x: x, _with_absolute_eigenvalues, hessian)
    precision = jnp.where(definite[:, None, None], hessian, positive)
    ones = jnp.ones(len(position), position.dtype)
    decrement, _, whole, _ = jax.vmap(step_from)(ones, position, precision, 0 * ones, gradient, precision)
    # Along a slope without curvature a whole step overflows, and halving it does not come back in time.
    step = whole - position
    longest = LONGEST * (1 + jnp.max(jnp.abs(position), axis=1))
    length = jnp.max(jnp.abs(step), axis=1)
    capped = jnp.isfinite(length) & (length > longest)
    step = jnp.where(capped[:, None], step * (longest / length)[:, None], step)
    decrement = jnp.where(capped, 0.5 * jnp.abs(jnp.sum(gradient * step, axis=1)), decrement)
    return step, decrement, definite


def _with_absolute_eigenvalues(matrices: Float[Array, "L P P"]) -> Float[Array, "L P P"]:
    values, vectors = jnp.linalg.eigh(matrices)
    sizes = jnp.abs(values)
    sizes = jnp.maximum(sizes, 1e-8 * jnp.max(sizes, axis=1, keepdims=True, initial=1e-20))
    return (vectors * sizes[:, None, :]) @ jnp.swapaxes(vectors, 1, 2)
