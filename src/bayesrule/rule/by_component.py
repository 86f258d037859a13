"""A step of a mixture: an ordinary step of every component, side by side, and one of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..curvature.measurement import Measurement
from ..objectives.base import AbstractObjective
from ..steps.schedule import at
from ..steps.step import Step
from .state import Info, State


def on_each(q: Any, function: Callable[..., Any], key: Any, *trees: PyTree) -> Any:
    """function(component, key, −log r_k, its slice of the trees) for every component, along a leading axis."""
    indices = jnp.arange(q.count)
    if key is None:
        return jax.vmap(lambda c, k, *more: function(c, None, q.repulsion(k), *more))(q.components, indices, *trees)
    own = jnp.reshape(key, (1,)) if q.count == 1 else jax.random.split(key, q.count)  # one component is the plain rule
    return jax.vmap(lambda c, k, key, *more: function(c, key, q.repulsion(k), *more))(
        q.components, indices, own, *trees
    )


def step_components(
    rule: Any,
    objective: AbstractObjective,
    state: State,
    batch: PyTree,
    key: Any,
    diagnose: bool,
    strict: bool,
    measured: Measurement | None,
) -> tuple[State, Info, Measurement | None]:
    """`Rule.advance` for a mixture: component k's step is on the loss ℓ̄ − τ log r_k (`eq:exp-von1`, `eq:exp-von2`).

    Each component has its own guard, which judges its step with the others where they were. The weights move last, as
    the categorical that they are, on what every component measured: the joint's Fisher information has a block for them
    and one for each component.
    """
    search = rule.search
    ages = jnp.full(state.q.count, state.count) if search is None else state.search.ages
    state = dataclasses.replace(state, q=state.q.with_parts(state.q.each(rule.at_temperature, ages), state.q.choice))
    heat = None
    if search is not None:
        measured = rule.measure(objective, state.q, batch, state.aux, key) if measured is None else measured
        state, measured = search.restart_converged(rule, objective, state, measured, batch, key)
        ages, heat = state.search.ages, state.search.loss_scale
    q = state.q

    def one(component: Any, key: Any, repulsion: Any, age: Array, average: Any, scale: Any, measured: Any) -> tuple:
        alone = State(component, age, None, average, state.aux, scale)
        how: dict[str, Any] = {"diagnose": diagnose or search is not None, "strict": strict, "measured": measured}
        return rule.advance(objective, alone, batch, key, latent_correction=repulsion, heat=heat, **how)

    after, seen, there = on_each(q, one, key, ages, state.average, state.scale, measured)
    temperature = at(rule.steps.temperature, state.count) * (1.0 if heat is None else heat)
    rate, _ = rule.steps.rates_at(state.count, objective.size, temperature)
    step = Step(seen.loss, None, rate, rate, temperature)
    good = jnp.all(seen.finite)
    choice = jax.tree.map(lambda new, old: jnp.where(good, new, old), q.chosen(step), q.choice)
    found = None if search is None else search.noted(state.search, seen)
    moved, aux = q.with_parts(after.q, choice), q.average(after.aux)
    new = State(moved, state.count + 1, None, after.average, aux, after.scale, found)
    info = _together(q, seen, step, diagnose)
    if search is not None:  # a component that is stuck is given another start, and does not end the run
        alive = search.alive(found)
        info = dataclasses.replace(info, finite=alive, inside=alive)
    return new, info, there


def _together(q: Any, seen: Info, step: Step, diagnose: bool) -> Info:
    """One step's info from its components'."""
    bound = q.average(seen.bound) + q.choice.entropy() if diagnose else None
    decrement = None
    if diagnose:
        slope = dataclasses.replace(step, gradient=q.choice.enumerated_gradient(step.gradient, None))
        decrement = q.average(seen.decrement) + (q.choice.decrement(slope) if q.learnt else 0.0)
    return Info(
        q.average(seen.objective),
        q.average(seen.rate),
        jnp.any(seen.guard),
        q.average(seen.fraction),
        jnp.all(seen.finite),
        jnp.all(seen.inside),
        bound,
        decrement,
    )
