"""What a rule carries from step to step (`State`), and what it reports about one step (`Info`)."""

from __future__ import annotations

from typing import Any, Generic

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from ..families.base import Q
from ..numerics.pytree import PyTree


class State(eqx.Module, Generic[Q]):
    """What a rule carries from step to step: made by `Rule.init`, returned anew by `Rule.step`.

    It is a pytree of arrays, so it can be carried through `jax.lax.scan` and saved with `blr.save`. Fields that an
    algorithm does not need are None.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule, objective = blr.adam(0.1), blr.Objective(lambda w, y: 0.5 * (y - w) ** 2, size=2)
    >>> state = rule.init(jnp.zeros(()), objective)
    >>> state, info = rule.step(objective, state, jnp.array([1.0, 3.0]), None)
    >>> int(state.count), float(state.q.mean), float(state.average)       # u = 0.1 · (−4), the gradient of the sum
    (1, 0.1, -0.4)
    """

    q: Q
    """The current member of the family: the posterior, or the parameters as its mean."""
    count: Int[Array, ""]
    """How many steps have been taken; schedules are functions of it."""
    previous: Any = None
    """For natural momentum, q before the last step; for the lazy form, the first q."""
    average: PyTree = None
    """The average of the gradients (`GradientAverage`); for the lazy form, the sum of the natural gradients."""
    aux: PyTree = None
    """What the objective carries along, such as batch statistics; with `Sites`, every factor's message."""
    scale: PyTree = None
    """The curvature v of the mean loss (`Scaling` with a square root and a prior)."""
    search: Any = None
    """The `SearchRecord` of a search for many minima."""
    history: Any = None
    """The last steps, where the steps are accelerated (`Anderson`)."""
    averaged: Any = None
    """How many measurements the precision is an average of, where it starts from what is measured
    (`Steps(measured=True)`): 0 before the first, infinite if the precision was given."""
    unit: Any = None
    """What the rate is in units of, from the first divisor that was measured (`Scaling(start="measured")` or "adam"); 0
    before that."""

    shaped: Any = None
    """The state of the optax transformation that shapes the gradient (`Shaping`)."""
    horizon: Any = None
    """How many steps are planned in all, where that is known and something depends on it (`WarmUp`, Adam's units)."""

    @property
    def found(self) -> Any:
        """The former name of `search`."""
        return self.search


class Info(eqx.Module):
    """How one step went: returned by `Rule.step`. All fields are arrays, or None where they do not apply.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule, loss = blr.newton(), lambda x: jnp.sum(jnp.cosh(x))
    >>> state, info = rule.step(loss, rule.init(jnp.array([2.0])), None, None)
    >>> float(info.objective), float(info.rate), bool(info.finite), bool(info.inside)
    (3.7622, 1.0, True, True)
    """

    objective: Float[Array, ""]
    """ℓ̄ at the points of this step, before the step. A sweep over blocks without its bound (on mini-batches) has the
    sum of the factors that touch the last block; NaN if that block repeated its step, which measures nothing more."""
    rate: Float[Array, ""]
    """The mean's rate times the part of the step that was taken, in the units of `Steps`. That is `fraction`, and in
    float32 a quarter of it where the guard cannot judge the step because its gain is below the rounding errors."""
    guard: Bool[Array, ""]
    """Whether the plain step would have left Ω."""
    fraction: Float[Array, ""]
    """How much of the step that the guard was given it took: 1, or less if the guard shortened it."""
    finite: Bool[Array, ""]
    """Whether the loss and its derivatives were finite numbers. If not, q stays as it was."""
    inside: Bool[Array, ""]
    """Whether the new λ is in Ω."""
    bound: Any = None
    """The evidence lower bound before the step, if asked for (`Rule.advance(…, diagnose=True)`)."""
    decrement: Any = None
    """½⟨∇, F∇⟩ of the natural gradient ∇, if asked for: the nats still to gain to second order, where the Fisher
    information F is the bound's curvature."""
    loss: Any = None
    """For a component of a mixture: what its step lowers, E_q ℓ̄ − τH(q)."""
    evaluations: Any = None
    """How often the guard measured the objective."""
    moved: Any = None
    """½⟨Δ, FΔ⟩ of the displacement Δ of λ, with the decrement: how far this step moved q, in nats. `fit` estimates the
    distance to the optimum from it. A step that the guard rejected counts in full."""
    blocks: Any = None
    """For a sweep over blocks: the fraction of its step that each block took, by name."""

    @property
    def looks(self) -> Any:
        """The former name of `evaluations`."""
        return self.evaluations
