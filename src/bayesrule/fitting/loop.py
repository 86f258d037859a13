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
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Array

from ..curvature.measurement import Measurement
from ..families.gaussian.base import GaussianFamily
from ..families.point_mass import Peak
from ..families.product import Product
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.batches import Microbatches
from ..rule.rule import Rule
from ..rule.state import State
from ..rule.update import guard_of, is_mixture, measure, rejects_by_zero_rate, with_factors
from .convergence import Watch, first_watch, judge
from .loader import batches_per_epoch, has_batch, select_batch, total_rows
from .reason import Reason
from .sharding import Placement


class Carry(NamedTuple):
    """What one step of the loop hands to the next, and one chunk to the next.

    Attributes:
        state: the state, whose `count` is the number of steps taken in all; for `fit` the rule's `State`.
        order: the rows in the order of the current epoch (see `select_batch`); empty for full batches and many rows.
        trace: the recorded history, an array for each quantity of `Info` with a place for each step of this fit.
        code: the `Reason.code` of what ended the loop. It is 0, the code of `Reason.STEPS`, while nothing has; a loop
            that takes all its steps ends with it.
        watch: what the test of convergence remembers of former steps; None where there is none.
        skips: how many batches were skipped and how many may be; None where none may be, and none was.
    """

    state: Any
    order: Array | np.ndarray
    trace: dict[str, Any]
    code: Array | int = 0
    watch: Watch | None = None
    skips: Skips | None = None

    @property
    def position(self) -> Any:
        """The number of batches before the next one: of those that were stepped on, and of those that were skipped."""
        return self.state.count if self.skips is None else self.state.count + self.skips.skipped


class Skips(NamedTuple):
    """Batches that are passed over because their loss or its derivatives are not finite.

    A skipped batch leaves the state as it was, its count included: the rate's schedule, averages and momentum are those
    of the steps that were taken, and the batch that follows takes the place of the one that was skipped.

    Attributes:
        skipped: how many were skipped so far.
        allowed: how many may be.
    """

    skipped: Array | np.ndarray
    allowed: Array | np.ndarray

    @staticmethod
    def of(skipped: int, allowed: int) -> Skips | None:
        """So many skipped of so many; None where both are 0."""
        return Skips(np.asarray(skipped, np.int32), np.asarray(allowed, np.int32)) if skipped or allowed else None


def empty_trace(steps: int, diagnose: bool, skips: bool = False) -> dict[str, np.ndarray]:
    """The trace before the first of `steps` steps.

    `diagnose` adds the bound and the decrement, and `skips` the number of batches that were skipped before each step.
    """
    dtype = jnp.result_type(float)
    names = ("objective", "rate", "fraction") + (("bound", "decrement") if diagnose else ())
    trace = {name: np.full(steps, np.nan, dtype) for name in names} | {"guard": np.zeros(steps, bool)}
    return trace | {"skipped": np.zeros(steps, np.int32)} if skips else trace


def copy_for_donation(tree: PyTree) -> PyTree:
    """Copies of all arrays, for a carry.

    The loop donates its carry, and the caller still owns these arrays. Weak types are dropped, because the loop returns
    strong ones and a second chunk of other types would be compiled again.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_here = lambda x: isinstance(x, jax.Array) and (isinstance(x, Tracer) or x.is_fully_addressable)
    strong = [i for i, x in enumerate(leaves) if is_here(x) and not getattr(x, "weak_type", False)]
    # Not `x.copy()`, which compiles a program for every shape, and JAX keeps those without a bound. (Only arrays on
    # devices of other processes have no other way.)
    copies = jax.device_put([leaves[i] for i in strong], may_alias=False)
    copied = dict(zip(strong, copies, strict=True))

    def copy(x: Any) -> Any:
        # A copy on the host, which the call of the loop transfers to the device with all of its arguments.
        return np.array(x) if isinstance(x, np.ndarray | np.generic) else jnp.array(x, dtype=getattr(x, "dtype", None))

    return jax.tree.unflatten(structure, [copied[i] if i in copied else copy(x) for i, x in enumerate(leaves)])


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
    sharding: NamedSharding | None = None,
) -> Carry:
    """Call `advance` until the state's count is `until`, or a step converges or cannot be taken.

    Args:
        advance: one step. Its info has `finite`, `inside` and `fraction` as in `Info`, every quantity of the trace,
            and `decrement` and `moved` where there is a tolerance.
        carry: where to begin.
        objective: builds the batches.
        data: all data; every step sees them where there is no batch size. A `BatchGroup` ends the loop with its last
            batch.
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
        sharding: how the rows of a batch are divided among devices.

    Returns:
        The carry after the last step.
    """
    shuffle_key, step_key = keys
    if batch_size is not None:  # One mini-batch may have a small gradient by chance, so a whole epoch is judged.
        window = max(window, batches_per_epoch(objective, total_rows(objective, data), batch_size))

    def unfinished(loop: tuple[Carry, Any]) -> Array:
        carry = loop[0]
        return (carry.state.count < until) & (carry.code == Reason.STEPS.code) & has_batch(data, carry.position)

    def body(loop: tuple[Carry, Any]) -> tuple[Carry, Any]:
        (state, order, trace, _, watch, skips), measured = loop
        batch, position = data, loop[0].position
        if batch_size is not None:
            batch, order = select_batch(objective, data, shuffle_key, order, position, batch_size, sharding)
        new, info, measured = advance(state, batch, jax.random.fold_in(step_key, position), measured)
        converged, lost, watch_before = jnp.zeros((), bool), jnp.zeros((), bool), watch
        if tolerance is not None and watch is not None:
            watch, converged, lost = judge(watch, jax.lax.stop_gradient(info), state.count, tolerance, window, gain)
        code = _reason_code(info, converged, lost)
        place = state.count - first
        recorded = {name: getattr(info, name) for name in trace if name != "skipped"}
        if skips is not None:
            skipped = ~info.finite & (skips.skipped < skips.allowed)
            code = jnp.where(skipped, Reason.STEPS.code, code)
            watch = jax.tree.map(lambda after, before: jnp.where(skipped, before, after), watch, watch_before)
            skips = skips._replace(skipped=skips.skipped + skipped)
            recorded["skipped"] = trace["skipped"][place] + skipped
        if "decrement" in recorded:  # It judges a fit and is nothing to optimise, and has no derivative at 0.
            recorded["decrement"] = jax.lax.stop_gradient(recorded["decrement"])
        trace = {name: values.at[place].set(recorded[name]) for name, values in trace.items()}
        accepted = info.finite & info.inside
        if restore:
            new = jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, state)
        new = dataclasses.replace(new, count=jnp.where(accepted, new.count, state.count))
        return Carry(new, order, trace, code, watch, skips), measured

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
    placement: Placement | None = None,
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
        placement: on which devices the rows of a batch and the arrays of the carry are; None on one device.

    Returns:
        The carry after the last step.
    """
    if batch_size is None and microbatches == 1:
        data = with_shared_jacobians(objective, carry.state.q, data)
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

    measured, q = None, carry.state.q
    if reuses:
        measured = measure(rule, objective, q, split(data), carry.state.aux, None)
        measured = measured if is_mixture(q) else with_factors(q, measured)
    # A rule that rejects a step by rate 0 returns the old state itself; keeping a second copy would double the memory.
    restore = not (rule.guard.always_inside and rejects_by_zero_rate(rule, carry.state.q))
    # It has brought q to the step's temperature, though, which matters where the fit goes on after it.
    restore = restore or (carry.skips is not None and rule.steps.temperature_schedule is not None)
    shuffle_key, step_key = jax.random.split(key)
    last = iterate(
        advance,
        carry,
        objective,
        data,
        (shuffle_key, step_key),
        first,
        until,
        batch_size=batch_size,
        tolerance=tolerance,
        window=judging_window(rule, objective),
        gain=has_point_mass(carry.state.q),
        measured=measured,
        restore=restore,
        fixed_steps=fixed_steps,
        single=single,
        sharding=None if placement is None else placement.rows,
    )
    return last if placement is None else placement.constrain(last)


def with_shared_jacobians(objective: AbstractObjective, q: Any, data: PyTree) -> PyTree:
    """The data with the Jacobians of outputs that are linear in θ: the same at every θ, and so computed once."""
    member = q.component_prototype
    if not (objective.has_linear_outputs and isinstance(member, GaussianFamily)):
        return data
    examples = objective.separable("linear=True")
    return examples.linearized(member.mean, data, shared=member.structure.shares_features)


run_chunk = compiled(
    static=("batch_size", "diagnose", "microbatches", "fixed_steps", "single", "placement"), donate="carry"
)(take_steps)
"""`take_steps`, compiled, with the carry's buffers donated."""

_LARGE = 2**22


def is_large(state: State) -> bool:
    """Whether a state has so many numbers that each step is a program of its own.

    In a loop XLA keeps copies of what the loop carries, and whatever is the same in every turn: about two and a half
    times the memory of the parameters. A step on so many numbers takes so long that the loop saves no time.
    """
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(state)) >= _LARGE


_WINDOW = 10


def judging_window(rule: Rule, objective: AbstractObjective) -> int:
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
