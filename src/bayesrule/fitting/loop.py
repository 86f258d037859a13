"""Steps until something ends them: one compiled loop, no Python per step."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..families.gaussian.base import GaussianFamily
from ..objectives.base import AbstractObjective
from ..objectives.batches import Microbatches
from ..rule.rule import Rule
from ..rule.state import Info, State
from ..rule.update import measure, rejects_by_zero_rate

REASONS = ("steps", "converged", "not finite", "left the domain", "stalled")
RUNNING, _CONVERGED, NOT_FINITE, _OUTSIDE, _STALLED = range(5)


def picked(
    objective: AbstractObjective, data: PyTree, key: Any, order: Array, count: Array, size: int
) -> tuple[PyTree, Array]:
    """The batch for a step count: without replacement in each epoch, shuffled by the epoch's own key."""
    rows = order.shape[0]
    per_epoch = _per_epoch(objective, rows, size)
    epoch, position = count // per_epoch, count % per_epoch
    shuffle = lambda: jax.random.permutation(jax.random.fold_in(key, epoch), rows)
    # Only an epoch's first step shuffles; a resumed run starts in the middle of one and shuffles too.
    order = jax.lax.cond((position == 0) | (order[0] < 0), shuffle, lambda: order)
    place = position * size + jnp.arange(size)
    index = order[jnp.minimum(place, rows - 1)]
    return objective.select_rows(data, index, place < rows), order


def _per_epoch(objective: AbstractObjective, rows: int, size: int) -> int:
    return -(-rows // size) if objective.keeps_partial_batch else rows // size


def empty_trace(steps: int, diagnose: bool) -> dict[str, Any]:
    dtype = jnp.result_type(float)
    names = ("objective", "rate", "fraction") + (("bound", "decrement") if diagnose else ())
    return {name: np.full(steps, np.nan, dtype) for name in names} | {"guard": np.zeros(steps, bool)}


@partial(jax.jit, static_argnames=("batch_size", "diagnose", "microbatches"), donate_argnames="carry")
def run_chunk(
    rule: Rule,
    objective: AbstractObjective,
    data: PyTree,
    key: Any,
    tolerance: Any,
    first: Any,
    until: Any,
    carry: tuple,
    *,
    batch_size: int | None,
    diagnose: bool,
    microbatches: int = 1,
) -> tuple:
    """Steps until a count is reached or something ends the fit: one compiled loop, no Python per step."""
    shuffle_key, step_key = jax.random.split(key)
    parted = lambda batch: batch if microbatches == 1 else Microbatches(batch, microbatches)
    mover = carry[0].q.component_prototype
    if batch_size is None and microbatches == 1 and objective.has_linear_outputs and isinstance(mover, GaussianFamily):
        examples = objective.separable("linear=True")
        data = examples.linearized(mover.mean, data, shared=mover.structure.shares_features)  # once for all steps
    if batch_size is None:
        data = objective.prepare(data)

    per_epoch = 1 if batch_size is None else _per_epoch(objective, carry[1].shape[0], batch_size)

    def unfinished(carry: tuple) -> Array:
        return (carry[0].count < until) & (carry[3] == RUNNING)

    # The guard's look at the new q is the next step's measurement, if the batch and the points stay the same.
    reuse = rule.guard.evaluates and not rule.points.random and batch_size is None
    reuse = reuse and rule.steps.sweep is None and not (objective.random or rule.curvature.remembers)
    # A new temperature moves the points.
    reuse = reuse and (rule.points.delta or not rule.steps.follows_temperature_schedule)

    def body(carry: tuple) -> tuple:
        state, order, trace, _, streak, measured = carry
        if batch_size is None:
            batch = data
        else:
            batch, order = picked(objective, data, shuffle_key, order, state.count, batch_size)
        now = jax.random.fold_in(step_key, state.count)
        new, info, measured = rule.advance(
            objective, state, parted(batch), now, diagnose=diagnose, strict=True, measured=measured
        )
        # One mini-batch may have little to say: all of an epoch's must be below the tolerance in a row.
        streak = jnp.asarray(jnp.where(info.decrement <= tolerance, streak + 1, 0)) if diagnose else streak
        code = _code(info, streak >= per_epoch)
        place = state.count - first
        trace = {name: values.at[place].set(getattr(info, name)) for name, values in trace.items()}
        if not (
            rule.guard.always_inside and rejects_by_zero_rate(rule, state.q)
        ):  # else the old state needs no keeping, and no room
            good = info.finite & info.inside
            new = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state)
        new = dataclasses.replace(new, count=jnp.where(info.finite & info.inside, new.count, state.count))
        return new, order, trace, code, streak, measured if reuse else None

    measured = measure(rule, objective, carry[0].q, parted(data), carry[0].aux, None) if reuse else None
    return jax.lax.while_loop(unfinished, body, (*carry, measured))[:5]


def run(
    rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Any, steps: int, tolerance: Any
) -> State:
    """Full-batch steps from a state, until converged or at most `steps`: `fit` for use inside a trace."""
    carry = (state, jnp.zeros(0, int), empty_trace(steps, True), 0, 0)
    until = state.count + steps
    return run_chunk(rule, objective, data, key, tolerance, state.count, until, carry, batch_size=None, diagnose=True)[
        0
    ]


def _code(info: Info, done: Any) -> Array:
    left = jnp.where(info.fraction == 0, _STALLED, _OUTSIDE)
    ended = jnp.where(done, _CONVERGED, jnp.where(info.inside, RUNNING, left))
    return jnp.where(info.finite, ended, NOT_FINITE)
