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

from ..numerics.loops import computed_after, hoist
from ..numerics.trees import all_finite
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
    proposed: Any = None
    """Whether the new q is the step's proposal; None for a step without one."""


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

    def without_judge(self) -> Guard:
        """The guard to use where the loss is no judge of a step, by default this one.

        Called for a step whose loss is that of a mini-batch or at random points, or whose messages do not lead to a
        minimum of it (the delta method in a factor of a model).
        """
        return self

    def without_report(self) -> Guard:
        """The guard for a caller who does not ask whether the plain step would have left Ω, by default this one."""
        return self

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What it does, in a few words, for the printed derivation."""

    @abstractmethod
    def take(self, q: Family, step: Step, assess: Assess, limit: Float[Array, ""]) -> GuardedStep:
        """Move q by the step, or by as much of it as keeps λ in Ω. Called once in every step, inside a trace.

        Args:
            q: Where the step starts from.
            step: The step; `q.moved(step)` takes all of it, `q.moved(step.shortened(f))` the fraction f. A guard that
                `evaluates` first tries its `proposal`, if it has one.
            assess: Measures the objective at a candidate, on the batch and the points of this step. Costs as much as
                the step's own measurement.
            limit: The loss before the step, with an allowance for rounding: a candidate whose loss is not above it has
                not made things worse.

        Returns:
            A `GuardedStep`. If no part of the step can be taken, it has the old q and the fraction 0.
        """


def _inside(q: Family) -> Bool[Array, ""]:
    return jnp.all(q.inside())


def _proposal_or(plain: Family, step: Step, proposed: Any) -> Family:
    """The step's proposal where it has one and `proposed` is true, else the q that the plain step leads to."""
    if step.proposal is None:
        return plain
    return jax.tree.map(lambda new, old: jnp.where(proposed, new, old), step.proposal.q, plain)


class NoGuard(Guard):
    """The plain step, wherever it leads.

    >>> import bayesrule as blr
    >>> blr.sgd(0.1).guard, blr.newton().replace(guard=blr.NoGuard()).guard.meaning
    (NoGuard(), 'the plain step')
    """

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

    >>> import bayesrule as blr
    >>> blr.adam(1e-3).guard, blr.adam(1e-3).guard.meaning
    (Boundary(), 'the plain step; S may be 0 where every gradient so far was 0')
    """

    @property
    def meaning(self) -> str:
        return "the plain step; S may be 0 where every gradient so far was 0"

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        new = q.moved(step)
        inside = jnp.all(jnp.stack([all_finite(leaf) for leaf in jax.tree.leaves(new)]))
        return GuardedStep(new, jnp.ones(()), ~inside, inside)


class Retraction(Guard):
    r"""A Gaussian's step on the manifold of positive-definite S, to second order.

    $S' = S + ρ(H − τS) + ½ρ²(H − τS)S^{-1}(H − τS)$ is positive definite for every symmetric H. It is
    not for one-step exactness: at ρ = 1 it is ½(S + HS⁻¹H).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule = blr.von(0.5).replace(points=blr.Delta(), guard=blr.Retraction())
    >>> loss = lambda x: jnp.sum(jnp.cos(x))                                # ∇²ℓ = −1 at 0: a plain step has S = 0
    >>> state, info = rule.step(loss, rule.init(blr.Gaussian(jnp.zeros(1), jnp.eye(1))), None, None)
    >>> float(state.q.precision[0, 0]), bool(info.guard)                    # 1 + ½(−2) + ½·¼·4
    (0.5, True)
    """

    reports: bool = eqx.field(static=True, default=True, repr=False)
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.abstract or p.structure in ("diagonal", "full", "blocks"),
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

    def without_report(self) -> Guard:
        """To form the plain step's precision only to look at it is a third of IVON's time on a CPU."""
        return Retraction(reports=False)

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        if not self.reports:
            new = q.moved(dataclasses.replace(step, retraction=True))
            return GuardedStep(new, jnp.ones(()), jnp.zeros((), bool), _inside(new))
        acted = ~jnp.all(q.moved(step).proper())
        rate, precision_rate = (computed_after(jnp.asarray(rate), acted) for rate in (step.rate, step.precision_rate))
        new = q.moved(dataclasses.replace(step, rate=rate, precision_rate=precision_rate, retraction=True))
        return GuardedStep(new, jnp.ones(()), acted, _inside(new))


class Shortened(Guard):
    """A given fraction of the step, for a caller who measures the loss elsewhere and halves the fraction himself.

    `GuardedStep.measured` is what that caller compares with: the loss that the candidate must not exceed, and the
    temperature at which it is to be computed. `Backtracking(monotone=True)` has the same limit.
    """

    fraction: Float[Array, ""]

    @property
    def evaluates(self) -> bool:
        return True

    @property
    def meaning(self) -> str:
        return "a given fraction of the step"

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        fraction = jnp.asarray(self.fraction)
        new = q.moved(step.shortened(fraction))
        inside = _inside(new)
        new = jax.tree.map(lambda n, o: jnp.where(inside & (fraction > 0), n, o), new, q)
        noted = limit - required_gain(step) * fraction, step.temperature
        return GuardedStep(new, fraction, ~inside, inside & (fraction > 0), noted, jnp.ones((), int))


_ARMIJO = 0.4  # The part of its first-order gain that a step has to reach, of which at most so many nats count.
_ARMIJO_NATS = 2.0
_HALVINGS = 100  # After so many nothing is left of a step in float32 or float64.


def required_gain(step: Step) -> Float[Array, ""]:
    """Armijo's condition: the nats that a whole step has to gain.

    Without it steps could bounce between two sides of the minimum and gain next to nothing. Far from the minimum the
    first-order gain says little, so that less than it is asked for there.
    """
    if step.gain is None or step.proposal is not None:
        return jnp.zeros(())
    return _ARMIJO * jnp.where(step.gain > 0, jnp.minimum(step.gain, _ARMIJO_NATS), 0.0)


class Backtracking(Guard):
    r"""Halves the step until λ is inside Ω, and with `monotone` until the loss does not worsen.

    The loss of a mini-batch, or at random points, is no judge of a step. With `length` such steps are shortened instead
    until $½⟨Δ, FΔ⟩$ of the displacement Δ of λ, to second order the KL divergence between q before and after, is not
    above it.

    Args:
        halvings: How often the step is halved at most. If that is not enough, q stays as it was.
        monotone: Also require that the loss E_q ℓ̄ − τH(q) (under the delta method ℓ̄(m)) does not rise.
        length: The longest step on a mini-batch of a model's rows or with random points, in nats. There it takes the
            place of `monotone`. By default none: every step is judged by the loss on its own batch and points.

    >>> import bayesrule as blr
    >>> print(blr.newton().guard, "-", blr.newton().guard.meaning)
    Backtracking(monotone=True) - ρ is halved until λ ∈ Ω and the loss does not worsen
    >>> blr.newton().replace(guard=blr.Backtracking(20)).guard.meaning
    'ρ is halved, at most 20 times, until λ ∈ Ω'
    """

    halvings: int = eqx.field(static=True)
    monotone: bool = eqx.field(static=True)
    length: float | None = eqx.field(static=True)

    def __init__(self, halvings: int = _HALVINGS, *, monotone: bool = False, length: float | None = None):
        if halvings < 1:
            raise ValueError(f"Backtracking needs at least one halving, got {halvings}.")
        if length is not None and not length > 0:
            raise ValueError(f"length= is the longest step in nats, above 0, got {length}.")
        self.halvings, self.monotone, self.length = halvings, monotone, length

    @property
    def meaning(self) -> str:
        times = "" if self.halvings == _HALVINGS else f", at most {self.halvings} times,"
        text = f"ρ is halved{times} until λ ∈ Ω{' and the loss does not worsen' if self.monotone else ''}"
        if self.length is None:
            return text
        short = f"½⟨Δ, FΔ⟩ ≤ {self.length:g} nats"
        return f"{text}; on mini-batches or random points until {short}" if self.monotone else f"{text} and {short}"

    @property
    def evaluates(self) -> bool:
        return self.monotone

    def without_judge(self) -> Guard:
        return self if self.length is None else Backtracking(self.halvings, length=self.length)

    def take(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        if self.length is None or self.monotone:
            return self._halved(q, step, assess, limit)
        rate = jnp.maximum(step.rate, step.precision_rate)
        whole = rate**2 * q.decrement(step)
        # A length that is not a positive number says nothing about the step: it is halved as any other.
        fraction = jnp.where(jnp.isfinite(whole) & (whole > self.length), jnp.sqrt(self.length / whole), 1.0)
        guarded = self._halved(q, step.shortened(fraction), assess, limit)
        return dataclasses.replace(guarded, fraction=guarded.fraction * fraction)

    def _halved(self, q: Family, step: Step, assess: Assess, limit: Any) -> GuardedStep:
        consts: list[Any] = []
        measure = assess
        if self.monotone:  # What `assess` closes over has derivatives too, which a custom rule needs as arguments.
            measure, consts = hoist(assess, q)
        return self._search(q, step, limit, consts, measure)

    def _search(self, q: Family, step: Step, limit: Any, consts: list[Any], measure: Callable[..., Any]) -> GuardedStep:
        """The halvings, and their derivative: that of the accepted step, whose fraction is a number.

        JAX has no reverse mode for a loop of unknown length, and the candidates that were not accepted do not matter.
        """

        @jax.custom_jvp
        def search(q: Family, step: Step, limit: Any, consts: list[Any]) -> GuardedStep:
            def not_assessed(candidate: Family) -> tuple[Array, Any]:
                shapes = jax.eval_shape(measure, candidate, *consts)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
                _, fraction, count, _, acted, evaluations, _ = carry
                fraction = fraction / 2
                candidate = _proposal_or(q.moved(step.shortened(fraction)), step, count < 0)
                inside = _inside(candidate)
                good, measured = inside, None
                if self.monotone:  # Outside Ω the loss is not defined, so it is not measured there.
                    loss, measured = jax.lax.cond(inside, lambda c: measure(c, *consts), not_assessed, candidate)
                    good, evaluations = inside & (loss <= limit - required * fraction), evaluations + inside
                return candidate, fraction, count + 1, good, acted | ((count == 0) & ~inside), evaluations, measured

            def unfinished(carry: tuple[Any, ...]) -> Array:
                return (carry[2] <= self.halvings) & ~carry[3]

            required = required_gain(step)
            # The full step is the loop's first iteration, so that `assess` is compiled once.
            no, none = jnp.zeros((), bool), jnp.zeros((), int)
            tries, fraction, proposed = none, 2 * jnp.ones(()), None
            if step.proposal is not None:  # The proposal is tried as number −1, before the full step.
                tries, fraction = none - step.proposal.ready, jnp.where(step.proposal.ready, 4.0, 2.0)
            start: tuple[Any, ...] = (q, fraction, tries, no, no, none, not_assessed(q)[1] if self.monotone else None)
            new, fraction, tries, good, acted, evaluations, measured = jax.lax.while_loop(unfinished, body, start)
            if step.proposal is not None:
                proposed = good & (tries == 0)
                fraction = jnp.asarray(jnp.where(proposed, 1.0, fraction))
            new = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, q)
            return GuardedStep(new, jnp.where(good, fraction, 0.0), acted, good, measured, evaluations, proposed)

        @search.defjvp
        def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[GuardedStep, GuardedStep]:
            guarded = search(*primals)

            def accepted(q: Family, step: Step, limit: Any, consts: list[Any]) -> GuardedStep:
                new = _proposal_or(q.moved(step.shortened(guarded.fraction)), step, guarded.proposed)
                new = jax.tree.map(lambda n, o: jnp.where(guarded.inside, n, o), new, q)
                measured = measure(new, *consts)[1] if self.monotone else None
                return dataclasses.replace(guarded, q=new, measured=measured)

            return guarded, jax.jvp(accepted, primals, tangents)[1]

        return search(q, step, limit, consts)

    def __repr__(self) -> str:
        parts = [] if self.halvings == _HALVINGS else [f"{self.halvings}"]
        parts += ["monotone=True"] if self.monotone else []
        parts += [] if self.length is None else [f"length={self.length:g}"]
        return f"Backtracking({', '.join(parts)})"
