"""What keeps λ inside Ω: nothing, a retraction, or a shorter step.

A guard takes the step: it hands it to `Family.moved`, shortens it or changes its form, and says what it did.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .needs import Need
from .step import Step

if TYPE_CHECKING:
    from ..families.base import Family


class GuardedStep(eqx.Module):
    """What `Guard.take` returns: the new q, and how much of the step it is."""

    q: Family
    """q after the step."""
    fraction: Float[Array, ""]
    """How much of the step was taken: 1 for all of it, 0 if q stayed as it was."""
    acted: Bool[Array, ""]
    """Whether the plain step would have left Ω."""
    inside: Bool[Array, ""]
    """Whether the new q is in Ω."""
    measured: Any = None
    """What `assess` measured at the new q, if the guard called it."""
    evaluations: Any = None
    """How often the guard measured the objective, if it counts."""


Assess = Callable[["Family"], tuple[Float[Array, ""], Any]]
"""Measures the objective at a candidate q: the loss E_q ℓ̄ − τH(q), under the delta method ℓ̄(m), and the measurement."""


class Guard(eqx.Module):
    """Takes a step and keeps λ in Ω, the open set where q is a distribution.

    A subclass defines `take` and `meaning`. What a guard needs of the other pieces it says in `needs`.
    """

    needs: ClassVar[tuple[Need, ...]] = ()
    """What it needs of the other pieces."""
    always_inside: ClassVar[bool] = True
    """Whether a step with finite derivatives never leaves Ω (or its boundary), so that `fit` need not keep the state
    from before the step."""

    @property
    def evaluates(self) -> bool:
        """Whether `take` calls `assess`. Then `fit` uses `GuardedStep.measured` as the next step's measurement."""
        return False

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What it does, in a few words, for the printed derivation."""

    @abstractmethod
    def take(self, q: Family, step: Step, assess: Assess, limit: Float[Array, ""]) -> GuardedStep:
        """Move q by the step, or by as much of it as keeps λ in Ω. Called once in every step, inside a trace.

        Args:
            q: Where the step starts from.
            step: The step; `q.moved(step)` takes all of it, `q.moved(step.shortened(f))` the fraction f.
            assess: Measures the objective at a candidate, on the batch and the points of this step. Costs as much as
                the step's own measurement.
            limit: The loss before the step, with an allowance for rounding: a candidate whose loss is not above it has
                not made things worse.

        Returns:
            A `GuardedStep`. If no part of the step can be taken, it has the old q and the fraction 0.
        """


def _inside(q: Family) -> Bool[Array, ""]:
    return jnp.all(q.inside())


class NoGuard(Guard):
    """The plain step, wherever it leads."""

    always_inside: ClassVar[bool] = False

    @property
    def meaning(self) -> str:
        return "the plain step"

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        new = q.moved(step)
        inside = _inside(new)
        return GuardedStep(new, jnp.ones(()), ~inside, inside)


class Boundary(Guard):
    """The plain step, which may touch the boundary of Ω: a precision of 0 where every gradient so far was 0.

    For algorithms whose scaling is damped, so that their step is defined there too (Adam).
    """

    @property
    def meaning(self) -> str:
        return "the plain step; S may be 0 where every gradient so far was 0"

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        new = q.moved(step)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
        inside = jnp.all(jnp.stack(finite))
        return GuardedStep(new, jnp.ones(()), ~inside, inside)


class Retraction(Guard):
    r"""A Gaussian's step on the manifold of positive-definite S, to second order.

    $S' = S + ρ(H − τS) + ½ρ²(H − τS)S^{-1}(H − τS)$ is positive definite for every symmetric H. It is
    not for one-step exactness: at ρ = 1 it is ½(S + HS⁻¹H).
    """

    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.abstract or p.structure in ("diagonal", "full"),
            lambda p: (
                f"Retraction curves the step of a Gaussian's precision; {p.name} has none to move that way. Use "
                "Backtracking() or NoGuard()."
            ),
        ),
        (
            lambda p: not p.steps.reverse,
            "Retraction is for steps in λ: with reverse=True use Backtracking() or NoGuard().",
        ),
    )

    @property
    def meaning(self) -> str:
        return "a step to second order on the manifold of positive-definite S"

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        new = q.moved(dataclasses.replace(step, retraction=True))
        return GuardedStep(new, jnp.ones(()), ~jnp.all(q.moved(step).proper()), _inside(new))


class Backtracking(Guard):
    """Halves the step until λ is inside Ω, and with `monotone` until the loss does not worsen.

    Args:
        halvings: How often the step is halved at most. If that is not enough, q stays as it was.
        monotone: Also require that the loss E_q ℓ̄ − τH(q) (under the delta method ℓ̄(m)) does not rise.
    """

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

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        def not_assessed(candidate: Family) -> tuple[Array, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(assess, candidate))

        def body(carry: tuple) -> tuple:
            _, fraction, count, _, acted, evaluations, _ = carry
            fraction = fraction / 2
            candidate = q.moved(step.shortened(fraction))
            inside = _inside(candidate)
            good, measured = inside, None
            if self.monotone:  # Outside Ω the loss is not defined, so it is not measured there.
                loss, measured = jax.lax.cond(inside, assess, not_assessed, candidate)
                good, evaluations = inside & (loss <= limit), evaluations + inside
            return candidate, fraction, count + 1, good, acted | ((count == 0) & ~inside), evaluations, measured

        def unfinished(carry: tuple) -> Array:
            return (carry[2] <= self.halvings) & ~carry[3]

        # The full step is the loop's first iteration, so that `assess` is compiled once.
        no, none = jnp.zeros((), bool), jnp.zeros((), int)
        start = (q, 2 * jnp.ones(()), none, no, no, none, not_assessed(q)[1] if self.monotone else None)
        new, fraction, _, good, acted, evaluations, measured = jax.lax.while_loop(unfinished, body, start)
        new = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, q)
        return GuardedStep(new, jnp.where(good, fraction, 0.0), acted, good, measured, evaluations)

    def __repr__(self) -> str:
        return f"Backtracking({'monotone=True' if self.monotone else ''})"
