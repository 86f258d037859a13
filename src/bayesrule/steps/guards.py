"""What keeps λ inside Ω: nothing, a retraction, or a shorter step."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .step import Step


class GuardedStep(eqx.Module):
    """A step that was taken: the new q, how much of the step it is, and what the guard saw."""

    q: Any
    fraction: Array
    acted: Array
    inside: Array
    measured: Any = None
    """What the objective evaluations like at the new q, where the guard had to look."""
    evaluations: Any = None
    """How often the guard measured the objective."""


Assess = Callable[[Any], tuple[Array, Any]]


class Guard(eqx.Module):
    """Takes a step and keeps λ in Ω."""

    always_inside: ClassVar[bool] = True
    """Whether a step whose derivatives are finite never leaves Ω (or its boundary)."""

    @property
    def evaluates(self) -> bool:
        """Whether it measures the objective at the new q."""
        return False

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What it does, for the printed derivation."""

    @abstractmethod
    def take(self, q: Any, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        """q after the step. `assess` gives a candidate's loss, E_q ℓ̄ − τH(q), which should be within `limit`,
        and what was measured there."""


def _inside(q: Any) -> Array:
    return jnp.all(q.inside())


class NoGuard(Guard):
    """The plain step, wherever it leads."""

    always_inside: ClassVar[bool] = False

    @property
    def meaning(self) -> str:
        return "the plain step"

    def take(self, q: Any, step: Step, assess: Any, limit: Any) -> GuardedStep:
        new = q.moved(step)
        inside = _inside(new)
        return GuardedStep(new, jnp.ones(()), ~inside, inside)


class Boundary(Guard):
    """The plain step, which may touch the boundary of Ω: a precision of zero where nothing was ever seen.

    For algorithms whose scaling is damped, so that their step is defined there too (Adam).
    """

    @property
    def meaning(self) -> str:
        return "the plain step; S may be 0 where no gradient was ever seen"

    def take(self, q: Any, step: Step, assess: Any, limit: Any) -> GuardedStep:
        new = q.moved(step)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
        inside = jnp.all(jnp.stack(finite))
        return GuardedStep(new, jnp.ones(()), ~inside, inside)


class Retraction(Guard):
    r"""A Gaussian's step on the manifold of positive-definite S, to second order.

    $S' = S + ρ(H − τS) + ½ρ²(H − τS)S^{-1}(H − τS)$ is positive definite for every symmetric H. It is
    not for one-step exactness: at ρ = 1 it is ½(S + HS⁻¹H).
    """

    @property
    def meaning(self) -> str:
        return "S' = S + ρ(H − S) + ½ρ²(H − S)S⁻¹(H − S), always positive definite"

    def take(self, q: Any, step: Step, assess: Any, limit: Any) -> GuardedStep:
        new = q.moved(dataclasses.replace(step, retraction=True))
        return GuardedStep(new, jnp.ones(()), ~jnp.all(q.moved(step).proper()), _inside(new))


class Backtracking(Guard):
    """Halves the step until λ is inside Ω, and with `monotone` until the loss does not worsen."""

    halvings: int = eqx.field(static=True)
    monotone: bool = eqx.field(static=True)

    def __init__(self, halvings: int = 40, *, monotone: bool = False):
        if halvings < 1:
            raise ValueError(f"Backtracking needs at least one halving, got {halvings}.")
        self.halvings, self.monotone = halvings, monotone

    @property
    def meaning(self) -> str:
        return f"ρ is halved until λ ∈ Ω{' and the loss does not worsen' if self.monotone else ''}"

    @property
    def evaluates(self) -> bool:
        return self.monotone

    def take(self, q: Any, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        def unseen(candidate: Any) -> tuple[Array, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(assess, candidate))

        def body(carry: tuple) -> tuple:
            _, fraction, count, _, acted, evaluations, _ = carry
            fraction = fraction / 2
            candidate = q.moved(step.shortened(fraction))
            inside = _inside(candidate)
            good, measured = inside, None
            if self.monotone:  # outside Ω there is nothing to look at
                loss, measured = jax.lax.cond(inside, assess, unseen, candidate)
                good, evaluations = inside & (loss <= limit), evaluations + inside
            return candidate, fraction, count + 1, good, acted | ((count == 0) & ~inside), evaluations, measured

        def unfinished(carry: tuple) -> Array:
            return (carry[2] <= self.halvings) & ~carry[3]

        # The whole step is the first turn of the loop, so that looking is compiled once.
        never, nothing = jnp.zeros((), bool), jnp.zeros((), int)
        start = (q, 2 * jnp.ones(()), nothing, never, never, nothing, unseen(q)[1] if self.monotone else None)
        new, fraction, _, good, acted, evaluations, measured = jax.lax.while_loop(unfinished, body, start)
        new = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, q)
        return GuardedStep(new, jnp.where(good, fraction, 0.0), acted, good, measured, evaluations)

    def __repr__(self) -> str:
        return f"Backtracking({'monotone=True' if self.monotone else ''})"
