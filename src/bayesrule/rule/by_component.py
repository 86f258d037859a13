r"""A step of a mixture: an ordinary update of every component, side by side, and then one of the weights.

With the responsibilities $r_k(θ) = q(z = k | θ)$, $\log q = \log q_k + \log π_k − \log r_k$. So the rule on the joint
q(θ, z) is, for each component k, the ordinary rule on the loss $\barℓ − τ\log r_k$ (`eq:exp-von1`, `eq:exp-von2`):
a mixture needs no arithmetic of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.base import Family
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..steps.schedule import at
from ..steps.step import Step
from .state import Info, State
from .update import Request, StepResult, at_temperature, for_each_component, measure, update

if TYPE_CHECKING:
    from ..families.latent.mixture import Mixture
    from .rule import Rule


def step_components(
    rule: Rule, objective: AbstractObjective, state: State, batch: PyTree, key: Key | None, request: Request
) -> StepResult:
    """Move every component on the loss ℓ̄ − τ log r_k, then the weights.

    Each component has its own guard, which judges its step with the others where they were. The weights move last, as
    the categorical distribution that they are, on the energy that every component measured: the Fisher information of
    the joint is block diagonal, with a block for the weights and one for each component.

    In a search, components that have converged are recorded and restarted before the step. Then every component has a
    step count of its own, its age, and the temperature is in units of the loss's standard deviation over the starts.
    """
    search = rule.search
    ages = jnp.full(state.q.count, state.count) if search is None else state.search.ages
    at_age = lambda component, age: at_temperature(rule.steps.temperature_schedule, component, age)
    state = dataclasses.replace(state, q=state.q.with_parts(state.q.each(at_age, ages), state.q.choice))
    measured, temperature_scale = request.measured, None
    if search is not None:
        measured = measure(rule, objective, state.q, batch, state.aux, key) if measured is None else measured
        state, measured = search.restart_converged(rule, objective, state, measured, batch, key)
        ages, temperature_scale = state.search.ages, state.search.loss_scale
    q = state.q

    def one(
        component: Family, key: Key | None, correction: Any, age: Array, accumulators: tuple[Any, ...], measured: Any
    ) -> StepResult:
        average, scale, averaged, unit = accumulators
        alone = State(component, age, None, average, state.aux, scale, averaged=averaged, unit=unit)
        own = request._replace(diagnose=request.diagnose or search is not None, measured=measured)
        return update(rule, objective, alone, batch, key, own, correction, temperature_scale)

    accumulators = state.average, state.scale, state.averaged, state.unit
    after, infos, remeasured = for_each_component(q, one, key, ages, accumulators, measured)
    temperature = at(rule.steps.temperature, state.count) * (1.0 if temperature_scale is None else temperature_scale)
    rate, _ = rule.steps.rates_at(state.count, objective.size, temperature)
    step = Step(infos.loss, None, rate, rate, temperature)
    good = jnp.all(infos.finite)
    choice = jax.tree.map(lambda new, old: jnp.where(good, new, old), q.chosen(step), q.choice)
    record = None if search is None else search.noted(state.search, infos)
    moved, aux = q.with_parts(after.q, choice), q.average(after.aux)
    accumulated = {"averaged": after.averaged, "unit": after.unit}
    new = State(moved, state.count + 1, None, after.average, aux, after.scale, record, **accumulated)
    info = _combined(q, infos, step, request.diagnose)
    if search is not None and record is not None:
        # A component that cannot move is restarted, and does not end the run.
        alive = search.alive(record)
        info = dataclasses.replace(info, finite=alive, inside=alive)
    return new, info, remeasured


def _combined(q: Mixture, infos: Info, step: Step, diagnose: bool) -> Info:
    """The info of a mixture's step from the infos of its components, stacked along a leading axis."""
    bound = q.average(infos.bound) + q.choice.entropy() if diagnose else None
    decrement, moved = None, None
    if diagnose:
        slope = dataclasses.replace(step, gradient=q.choice.enumerated_gradient(step.gradient, None))
        weights = q.choice.decrement(slope) if q.learnt else jnp.zeros(())
        decrement = q.average(infos.decrement) + weights
        moved = q.average(infos.moved) + step.rate**2 * weights
    return Info(
        q.average(infos.objective),
        q.average(infos.rate),
        jnp.any(infos.guard),
        q.average(infos.fraction),
        jnp.all(infos.finite),
        jnp.all(infos.inside),
        bound,
        decrement,
        moved=moved,
    )
