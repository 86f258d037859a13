"""The Legendre transform of A, from μ back to λ: the convex solve ∇A(λ) = μ, by a damped Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .pytree import PyTree

if TYPE_CHECKING:
    from ..families.base import ExponentialFamily


def legendre(q: ExponentialFamily, expectation: PyTree) -> PyTree:
    """λ = ∇A*(μ), the solution of ∇A(λ) = μ, from q's own λ; differentiable to any order in μ."""
    target = q.coordinates(expectation)
    where = jax.lax.stop_gradient(q)

    def residual(x: Array) -> Array:
        return where.coordinates(where._gradient(where.uncoordinates(x))) - target

    def value(x: Array) -> Array:
        return where.log_partition(where.uncoordinates(x)) - jnp.sum(x * target, axis=-1)

    epsilon = jnp.finfo(target.dtype).eps

    def solve(residual: Callable[..., Any], x: Array) -> Array:
        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            x, length, count, _ = carry
            slope = residual(x)
            newton = jnp.linalg.solve(where._fisher(x), slope[..., None])[..., 0]
            trial = x - length[..., None] * newton
            current, proposed = value(x), value(trial)
            decrement = jnp.abs(slope * newton).sum(-1)
            # Near the solution the values differ by less than their rounding errors, so the step is accepted.
            better = (proposed <= current + 8 * epsilon * (1 + jnp.abs(current))) | (decrement <= epsilon**0.5)
            accepted = better & where.inside(where.uncoordinates(trial))
            gap = jnp.max(jnp.where(accepted & (length == 1), decrement, jnp.inf))
            x = jnp.where(accepted[..., None], trial, x)
            length = jnp.where(accepted, jnp.minimum(2 * length, 1.0), length / 2)
            return x, length, count + 1, gap

        def unfinished(carry: tuple[Any, ...]) -> Array:
            # Newton's convergence is quadratic: a gap of ε leaves an error far below ε.
            return (carry[2] < 200) & ~(carry[3] <= epsilon)

        length = jnp.ones(x.shape[:-1], x.dtype)
        return jax.lax.while_loop(unfinished, body, (x, length, 0, jnp.asarray(jnp.inf, x.dtype)))[0]

    def tangent_solve(linear: Callable[..., Any], y: Array) -> Array:
        # `linear` is F·: applied to the basis it gives F itself, for every batch element at once.
        basis = jnp.eye(y.shape[-1], dtype=y.dtype)
        columns = jax.vmap(lambda e: linear(jnp.broadcast_to(e, y.shape)))(basis)
        return jnp.linalg.solve(jnp.moveaxis(columns, 0, -1), y[..., None])[..., 0]

    initial = jax.lax.stop_gradient(q.coordinates(q.natural()))
    initial = jnp.broadcast_to(initial, target.shape).astype(target.dtype)
    return q.uncoordinates(jax.lax.custom_root(residual, initial, solve, tangent_solve))
