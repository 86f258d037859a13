"""The compiled loop: steps until their number is reached or something ends them, without Python between two steps.

`run_chunk` is one jitted `while_loop`, to which `fit` gives a few steps at a time (a chunk). `run` is the same loop for
use inside another jitted function. Everything a step changes is in the `Carry`, whose buffers are donated, so that a
chunk updates the posterior in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from ..curvature.measurement import Measurement
from ..families.gaussian.base import GaussianFamily
from ..families.point_mass import Peak
from ..families.product import Product
from ..numerics.programs import compiled
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.batches import Microbatches
from ..rule.rule import Rule
from ..rule.state import State
from ..rule.update import guard_of, measure, rejects_by_zero_rate
from .convergence import Watch, first_watch, judge
from .loader import batches_per_epoch, select_batch
from .reason import Reason


class Carry(NamedTuple):
    """What one step of the loop hands to the next, and one chunk to the next.

    Attributes:
        state: the state, whose `count` is the number of steps taken in all; for `fit` the rule's `State`.
        order: the rows in the order of the current epoch (see `select_batch`); empty for full batches and many rows.
        trace: the recorded history, an array for each quantity of `Info` with a place for each step of this fit.
        code: the `Reason.code` of what ended the loop. It is 0, the code of `Reason.STEPS`, while nothing has; a loop
            that takes all its steps ends with it.
        watch: what the test of convergence remembers of former steps; None where there is none.
    """

    state: Any
    order: Array | np.ndarray
    trace: dict[str, Any]
    code: Array | int = 0
    watch: Watch | None = None


def empty_trace(steps: int, diagnose: bool) -> dict[str, np.ndarray]:
    """The trace before the first of `steps` steps; `diagnose` adds the bound and the decrement."""
    dtype = jnp.result_type(float)
    names = ("objective", "rate", "fraction") + (("bound", "decrement") if diagnose else ())
    return {name: np.full(steps, np.nan, dtype) for name in names} | {"guard": np.zeros(steps, bool)}


def copy_for_donation(tree: PyTree) -> PyTree:
    """Copies of all arrays, for a carry.

    The loop donates its carry, and the caller still owns these arrays. Weak types are dropped, because the loop returns
    strong ones and a second chunk of other types would be compiled again.
    """

    def copy(x: Any) -> Any:
        if isinstance(x, jax.Array):
            # Not `x.copy()`, which compiles a program for every shape, and JAX keeps those without a bound.
            is_weak = getattr(x, "weak_type", False)
            return jnp.array(x, dtype=x.dtype) if is_weak else jax.device_put(x, may_alias=False)
        # A copy on the host, which the call of the loop transfers to the device with all of its arguments.
        return np.array(x) if isinstance(x, np.ndarray | np.generic) else jnp.array(x)

    return jax.tree.map(copy, tree)


def move_for_donation(tree: PyTree, held: PyTree) -> PyTree:
    """The arrays of a new tree, to be donated as they are; copies of those that are also in `held`, the caller's own.

    At the size of a large network, a second copy of the state is what decides whether it fits into memory.
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(held)}

    def move(leaf: Any) -> Any:
        is_new = isinstance(leaf, jax.Array) and id(leaf) not in seen and not getattr(leaf, "weak_type", False)
        seen.add(id(leaf))
        return leaf if is_new else copy_for_donation(leaf)

    return jax.tree.map(move, tree)


Advance = Callable[[Any, PyTree, Key, Any], tuple[Any, Any, Any]]
"""advance(state, batch, key, measured) -> (new state, info, measured): one step, as `iterate` calls it."""


def iterate(
    advance: Advance,
    carry: Carry,
    objective: AbstractObjective,
    data: PyTree,
    keys: tuple[Key, Key],
    first: ArrayLike,
    until: ArrayLike,
    *,
    batch_size: int | None,
    tolerance: ArrayLike | None = None,
    window: int = 1,
    gain: bool = False,
    measured: Any = None,
    restore: bool = True,
    fixed_steps: int | None = None,
    single: bool = False,
) -> Carry:
    """Call `advance` until the state's count is `until`, or a step converges or cannot be taken.

    Args:
        advance: one step. Its info has `finite`, `inside` and `fraction` as in `Info`, every quantity of the trace,
            and `decrement` and `moved` where there is a tolerance.
        carry: where to begin.
        objective: builds the batches.
        data: all data; every step sees them where there is no batch size.
        keys: the key that shuffles, and the key from which each step's is folded.
        first: the count at the beginning of the trace.
        until: the count at which to stop.
        batch_size: the number of rows of a batch, or None.
        tolerance: the estimated distance to the optimum, in nats, below which the loop has converged (see
            `convergence`); None for no such test.
        window: over how many steps that is judged at least, on all data; with mini-batches it is an epoch.
        gain: whether the nats still to gain are judged, and not the distance.
        measured: what the first `advance` gets as `measured`; what each returns goes to the next.
        restore: whether a rejected step's old state has to be put back.
        fixed_steps: the number of steps to `until` where it is known to the compiler. The loop is then a scan, which
            has a reverse mode.
        single: take one step, and no loop; the caller knows that one is due.

    Returns:
        The carry after the last step.
    """
    shuffle_key, step_key = keys
    if batch_size is not None:  # One mini-batch may have a small gradient by chance, so a whole epoch is judged.
        window = max(window, batches_per_epoch(objective, objective.rows(data), batch_size))

    def unfinished(loop: tuple[Carry, Any]) -> Array:
        carry = loop[0]
        return (carry.state.count < until) & (carry.code == Reason.STEPS.code)

    def body(loop: tuple[Carry, Any]) -> tuple[Carry, Any]:
        (state, order, trace, _, watch), measured = loop
        batch = data
        if batch_size is not None:
            batch, order = select_batch(objective, data, shuffle_key, order, state.count, batch_size)
        new, info, measured = advance(state, batch, jax.random.fold_in(step_key, state.count), measured)
        converged, lost = jnp.zeros((), bool), jnp.zeros((), bool)
        if tolerance is not None and watch is not None:
            watch, converged, lost = judge(watch, jax.lax.stop_gradient(info), state.count, tolerance, window, gain)
        code = _reason_code(info, converged, lost)
        place = state.count - first
        recorded = {name: getattr(info, name) for name in trace}
        if "decrement" in recorded:  # It judges a fit and is nothing to optimise, and has no derivative at 0.
            recorded["decrement"] = jax.lax.stop_gradient(recorded["decrement"])
        trace = {name: values.at[place].set(recorded[name]) for name, values in trace.items()}
        accepted = info.finite & info.inside
        if restore:
            new = jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, state)
        new = dataclasses.replace(new, count=jnp.where(accepted, new.count, state.count))
        return Carry(new, order, trace, code, watch), measured

    if single:
        return body((carry, measured))[0]
    if fixed_steps is None:
        return jax.lax.while_loop(unfinished, body, (carry, measured))[0]
    turn = lambda loop, _: (jax.lax.cond(unfinished(loop), body, lambda loop: loop, loop), None)
    return jax.lax.scan(turn, (carry, measured), None, length=fixed_steps)[0][0]


def _reason_code(info: Any, converged: ArrayLike, lost: ArrayLike) -> Array:
    """The code of the reason to end the loop after a step with this info; that of `Reason.STEPS` to go on."""
    # A fraction of 0 means that the guard tried shorter steps and accepted none.
    outside = jnp.where(info.fraction == 0, Reason.STALLED.code, Reason.OUTSIDE.code)
    inside = jnp.where(lost, Reason.PRECISION_LOST.code, Reason.STEPS.code)
    finite = jnp.where(converged, Reason.CONVERGED.code, jnp.where(info.inside, inside, outside))
    return jnp.where(info.finite, finite, Reason.NOT_FINITE.code)


def take_steps(
    rule: Rule,
    objective: AbstractObjective,
    data: PyTree,
    key: Key,
    tolerance: ArrayLike | None,
    first: ArrayLike,
    until: ArrayLike,
    carry: Carry,
    *,
    batch_size: int | None,
    diagnose: bool,
    microbatches: int = 1,
    fixed_steps: int | None = None,
    single: bool = False,
) -> Carry:
    """Steps of a rule until a count is reached or something ends the fit.

    Args:
        rule: the rule.
        objective: what it lowers.
        data: all data.
        key: the key of the fit, the same for each of its chunks.
        tolerance: the estimated distance to the optimum, in nats, below which the fit has converged; None for no
            such test.
        first: the state's count at the beginning of the fit.
        until: the count at which this chunk ends.
        carry: the carry; `run_chunk` donates its buffers.
        batch_size: the number of rows of a batch, or None for full batches.
        diagnose: whether to compute the bound and the decrement at every step, which a tolerance needs.
        microbatches: the number of parts in which a batch is measured.
        fixed_steps: the number of steps to `until`, for a loop with a reverse mode (see `iterate`).
        single: take one step, and no loop (see `is_large`).

    Returns:
        The carry after the last step.
    """
    q = carry.state.q.component_prototype
    if batch_size is None and microbatches == 1 and objective.has_linear_outputs and isinstance(q, GaussianFamily):
        # Linear outputs have the same Jacobians at every θ: compute them once for all steps.
        examples = objective.separable("linear=True")
        data = examples.linearized(q.mean, data, shared=q.structure.shares_features)
    if batch_size is None:
        data = objective.prepare(data)
    split = lambda batch: batch if microbatches == 1 else Microbatches(batch, microbatches)
    reuses = _reuses_measurement(rule, objective, batch_size)

    def advance(state: State, batch: PyTree, key: Key, measured: Measurement | None) -> tuple[Any, Any, Any]:
        # strict: a derivative that is not finite rejects the step; otherwise only a loss that is not finite does.
        new, info, measured = rule.advance(
            objective, state, split(batch), key, diagnose=diagnose, strict=True, measured=measured
        )
        return new, info, measured if reuses else None

    measured = measure(rule, objective, carry.state.q, split(data), carry.state.aux, None) if reuses else None
    # A rule that rejects a step by rate 0 returns the old state itself; keeping a second copy would double the memory.
    restore = not (rule.guard.always_inside and rejects_by_zero_rate(rule, carry.state.q))
    shuffle_key, step_key = jax.random.split(key)
    return iterate(
        advance,
        carry,
        objective,
        data,
        (shuffle_key, step_key),
        first,
        until,
        batch_size=batch_size,
        tolerance=tolerance,
        window=_window(rule, objective),
        gain=has_point_mass(carry.state.q),
        measured=measured,
        restore=restore,
        fixed_steps=fixed_steps,
        single=single,
    )


run_chunk = compiled(static=("batch_size", "diagnose", "microbatches", "fixed_steps", "single"), donate="carry")(
    take_steps
)
"""`take_steps`, compiled, with the carry's buffers donated."""

_LARGE = 2**22


def is_large(state: State) -> bool:
    """Whether a state has so many numbers that each step is a program of its own.

    In a loop XLA keeps copies of what the loop carries, and whatever is the same in every turn: about two and a half
    times the memory of the parameters. A step on so many numbers takes so long that the loop saves no time.
    """
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(state)) >= _LARGE


_WINDOW = 10


def _window(rule: Rule, objective: AbstractObjective) -> int:
    """Over how many steps convergence is judged: one, or several where a single decrement says little.

    The decrement is random where the points are, and under momentum or an average of gradients q swings around the
    optimum and passes it with a small gradient. Accelerated steps are long and short in turn: two of them tell.
    """
    steps = rule.steps
    if steps.acceleration is not None:
        return 2
    steady = steps.momentum is None and steps.average is None and not (rule.points.random or objective.random)
    return 1 if steady else _WINDOW


def has_point_mass(q: Any) -> bool:
    """Whether a block of q is a point: it has no standard deviation in which a distance could be measured."""
    return isinstance(q, Product) and any(isinstance(block, Peak) for block in q.blocks.values())


def _reuses_measurement(rule: Rule, objective: AbstractObjective, batch_size: int | None) -> bool:
    """Whether what the guard measured at the new q is what the next step would measure.

    That is so if the guard evaluates the loss at the new q, and batch, points and loss stay the same from step to step.
    A temperature schedule moves the points, except the single point of `Delta`, and a curvature that remembers former
    steps measures differently at each.
    """
    same_batch = batch_size is None and not objective.random and rule.steps.sweep is None
    same_points = not rule.points.random and (rule.points.delta or rule.steps.temperature_schedule is None)
    return guard_of(rule, objective, None).evaluates and same_batch and same_points and not rule.curvature.remembers


def run(
    rule: Rule,
    objective: AbstractObjective,
    state: State,
    data: PyTree,
    key: Key,
    steps: int,
    tolerance: ArrayLike,
) -> State:
    """At most `steps` full-batch steps from a state, fewer if they converge: `fit` inside another jitted function."""
    carry = Carry(state, jnp.zeros(0, int), empty_trace(steps, True), watch=first_watch())
    until = state.count + steps
    return run_chunk(
        rule, objective, data, key, tolerance, state.count, until, carry, batch_size=None, diagnose=True
    ).state
