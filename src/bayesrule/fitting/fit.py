"""fit(): run a rule on an objective until it converges or its steps are used up.

`fit` checks its arguments, prepares the state, and puts the parts together: `loader` (which rows a step sees), `loop`
(the compiled steps), `progress` (chunks, Ctrl-C and the bar), `result` (what is returned and saved).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..families.base import Family
from ..families.start import Start
from ..numerics.checks import nonnegative_int, positive_int
from ..numerics.frozen import Frozen, split_off_integers
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.batched import Batched
from ..objectives.objective import Objective, as_objective
from ..rule.rule import Rule
from ..rule.state import State
from ..rule.update import planned
from .accelerate import PATIENCE
from .checkpointing import Checkpoint, Checkpointing
from .convergence import first_watch
from .driver import Driver
from .load import driver_of, load, refuse_outside_memory
from .loader import Loader, batches_per_epoch
from .loop import Carry, Skips, copy_for_donation, move_for_donation
from .minima import minima
from .parts_driver import without_local
from .processes import Together
from .progress import ProgressBar, run_in_chunks
from .reason import Reason
from .result import Result
from .sharded_checkpoint import ShardedCheckpoint
from .sharding import on_devices, rows_on_devices, state_on_devices
from .starts import SCALES, Lanes, bounds_of, choose, dispersed, fits_in_memory, run_chunk_together
from .unused import unused_parameters
from .validation import Metric, Validation


def fit(
    rule: Rule,
    objective: AbstractObjective | Callable[[PyTree], Any],
    start: Family | Result | PyTree,
    data: PyTree = None,
    *,
    steps: int,
    batch_size: int | None = None,
    key: Key | None = None,
    tolerance: float | None = None,
    progress: bool | Callable[[Result], None] = False,
    checkpoint: Checkpoint | ShardedCheckpoint | str | Path | None = None,
    microbatches: int = 1,
    check: bool = False,
    starts: int = 1,
    validation: PyTree = None,
    metrics: Mapping[str, Metric] | None = None,
    patience: int | None = None,
    on_step: Callable[[Result], bool | None] | None = None,
    every: int | None = None,
    skip_nonfinite: int = 0,
) -> Result:
    """Run the rule on an objective for a number of steps, or until q is within `tolerance` of the optimum.

    It is a Python function; inside `jax.jit`, `vmap` or `grad` use `run`, which takes the same steps.

    A fit that was interrupted or saved, and is resumed by passing its `Result` as `start`, takes the same steps as an
    uninterrupted one, bit for bit on the same machine.

    Args:
        rule: The algorithm, such as `blr.newton()`.
        objective: An `Objective`, a `Model`, or a plain function of θ.
        start: A member of the rule's family, bare parameters, or an earlier `Result` to continue from. Arrays of
            integers and booleans among bare parameters are not learned: the loss gets them as they are, q has None in
            their places, and `result.frozen` has them (see `freeze`). Where a model's
            likelihood cannot be integrated over it, because it is too wide, `cvi` and `ncvmp` begin from a narrower q
            with its mean, if that has a higher bound than what was reached from the start.
        data: A pytree of arrays with one row per example (or `Weighted`), or a `stream` of them, whose rows are read as
            they are needed. With `batch_size`, arrays of `np.memmap` are a stream by themselves. Without it every step
            on a stream is a pass over its rows, and so it is on data in parts (`Parts`, Dask's partitions).
        steps: The number of steps to take, at most. On mini-batches, without a tolerance, it is also what a `WarmUp`
            rises over and a constant rate in Adam's units falls over; with those of an earlier result where that is the
            start.
        batch_size: The number of rows in a mini-batch; without it every step sees all data. Rows are drawn without
            replacement and shuffled in each epoch, and the last, smaller batch of an epoch is scaled by its own N/M. A
            `from_batch` objective skips that last batch, because its examples may not be independent.
        key: A JAX key, for mini-batches and random points. A resumed fit has that of its start.
        tolerance: Converge when q is so close to the optimum: the KL divergence ½⟨e, Fe⟩ of the rest e of the way, in
            nats, estimated from the length of the steps and the rate at which they shrink. With mini-batches, random
            points or momentum several steps are judged together. A fit on all data that has not converged in 50 plain
            steps goes on with Anderson acceleration, which has the same fixed points.
        progress: True shows a progress bar. A function is called a few times a second with the result so far, whose
            arrays it may read only until it returns.
        checkpoint: A file that is rewritten while the fit runs, about every 30 seconds, at its end, at Ctrl-C and at
            SIGTERM, which then exits with the code 143. `load` it and pass it as `start` to resume. A `Checkpoint` says
            how often, how many earlier ones are kept, and at which signals; a `ShardedCheckpoint` is for parameters
            that are too large for one process.
        microbatches: Measure each batch in so many parts, one after another, with the memory of one part.
        check: Raise if the bound falls from one step to the next, which it never does with ρ = 1 and conjugate factors.
        starts: Run from so many starts side by side, the given one and others drawn around it (needs a key), and return
            the best by its bound; `result.starts` says how many agree. For posteriors with several modes: differential
            equations, hidden Markov models, mixtures. A Gaussian is moved to points drawn at one, two and four of its
            own standard deviations in turn, so that a wide start looks far; `fitting/starts.py` has the other families.
        validation: Data like `data`, or a stream of them, on which metrics are evaluated along the way;
            `result.validation` has their values, and a progress bar shows the last. "loss" is the mean loss of an
            example at q's mean, without the prior.
        metrics: Further metrics, functions of q and the validation data by name: `{"nll": f}`.
        patience: End the fit when the first metric ("loss", if there are no others) has not become smaller in so many
            evaluations, and return the best state, whatever ends the fit.
        on_step: A function that is called with the result so far after every `every` steps, whose arrays it may read
            only until it returns. The fit ends where it returns True.
        every: After how many steps to evaluate and to call `on_step`; by default an epoch, or with full batches a
            hundredth of all steps.
        skip_nonfinite: Skip up to so many mini-batches whose loss, gradient or curvature is not finite, those before a
            resumption included; one more ends the fit. A skipped batch changes nothing and is no step: the fit goes on
            with the next batch as if this one had not been there, so that averages and schedules are those of the steps
            that were taken, and `steps` of them are. `result.skipped` counts them, and `result.trace["skipped"]` has
            how many were skipped before each step.

    Returns:
        The `Result`: the posterior `q`, the `reason` why the fit ended, and a `trace` with one value per step.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = fit(blr.newton(), lambda x: jnp.sum(jnp.cosh(x - 1.0)), jnp.zeros(2), steps=50, tolerance=1e-8)
    >>> result.reason, [round(float(m), 4) for m in result.q.mean]
    ('converged', [1.0, 1.0])
    >>> two_modes = lambda x: (x**2 - 1) ** 2 - 0.5 * x                                # the lower minimum is near 1
    >>> result = fit(
    ...     blr.newton(), two_modes, jnp.array(-1.0), steps=50, tolerance=1e-8, starts=8, key=jax.random.key(0)
    ... )
    >>> round(float(result.q.mean), 3), result.starts.agree < 8
    (1.057, True)
    """
    frozen = None
    is_bare = not isinstance(start, Result | None) and not Start.is_member(start)
    if is_bare:
        start, frozen = split_off_integers(start)
    given = start.state if isinstance(start, Result) else start
    _refuse_traced((rule, objective, given, data, steps, key, tolerance))
    objective = as_objective(objective)
    if isinstance(start, Result) and getattr(objective, "frozen", None) is None:
        frozen = start.frozen  # What the fit that is resumed has split off.
    if frozen is not None:
        objective = with_frozen(objective, frozen)
    frozen_arrays = getattr(getattr(objective, "frozen", None), "arrays", None)
    steps = nonnegative_int("steps", steps, meaning="how many steps to take")
    if microbatches != 1 and not objective.splits_batches:
        raise ValueError("A model measures its batch as a whole: remove microbatches=, and take a smaller batch_size.")
    loader = load(objective, data, batch_size)
    refuse_outside_memory(loader, rule, starts)
    adapted, data = objective.with_size(loader.rows).for_data(loader.data)
    objective, loader = adapted, loader._replace(data=data)
    if rule.steps.acceleration is not None and (loader.batch_size is not None or objective.random):
        raise ValueError(
            "Anderson acceleration compares the gradients of successive steps, which must be of the same loss: remove "
            "batch_size=, or the acceleration from the rule's steps."
        )
    resumed, given_key = start if isinstance(start, Result) else None, key
    skips = _skips(skip_nonfinite, resumed, loader)
    checkpoints = Checkpointing(checkpoint, Together(loader.sharding))
    random = rule.points.random or loader.batch_size is not None or objective.random
    key = resolve_key(resumed.key if resumed is not None and key is None else key, random)
    if check and random:
        raise ValueError(
            "check=True needs an exact bound: it does not work with batch_size or random points. Remove check=True, or "
            "use the full batch and deterministic points."
        )
    starts = positive_int("starts", starts, meaning="from how many starts to fit")
    if starts > 1:
        follows = "validation=" if validation is not None else "on_step=" if on_step is not None else None
        _check_several_starts(rule, resumed, given_key, checkpoint, progress, follows)
    place = (lambda tree: tree) if loader.sharding is None else partial(on_devices, loader.sharding.mesh)
    rule, objective, key = place((rule, objective, key))
    # A fit on all data, or until it converges, has no number of steps that a warm-up could be a part of.
    horizon = steps if loader.batch_size is not None and tolerance is None else None
    if resumed is None:
        start = place(start)
        # On data in parts the local blocks of a model are no part of q.
        state = rule.init(start, objective if loader.parts is None else without_local(objective), key, horizon=horizon)
    else:
        state = place(resumed.state)
        if horizon is not None and state.horizon is not None and int(state.count) + steps != int(state.horizon):
            state = planned(rule, state, int(state.count) + steps)
    if loader.sharding is not None:
        state = state_on_devices(loader.sharding.mesh, state)
        state = rows_on_devices(loader.sharding, objective, state, loader.rows)
    if loader.parts is None or without_local(objective) is objective:
        objective.check_data(state.q, loader.data)
    if loader.batch_size is not None and is_bare:
        _warn_of_unused(objective, start, loader.data)
    normalized = objective.regularizer.normalized(state.q.component_prototype.gaussian)
    checkpoints.check(state)
    watch = None
    if tolerance is not None:
        watch = first_watch() if resumed is None or resumed.watch is None else resumed.watch
    driver = driver_of(loader, resumed)(
        rule,
        objective,
        loader,
        key,
        tolerance,
        state,
        steps=steps,
        microbatches=microbatches,
        watch=watch,
        resumed=resumed is not None,
        skips=skips,
        interrupt=checkpoints.interrupt,
    )

    looks, every = None, _interval(every, steps, objective, loader, validation is not None or on_step is not None)
    if validation is not None:
        looks = Validation(objective, validation, metrics, patience, loader.batch_size)
        if resumed is not None and resumed.validation is not None:
            looks.resume(resumed.validation, resumed.best, driver.first)
    elif metrics is not None or patience is not None:
        raise ValueError("metrics= and patience= look at validation data: pass validation=, data like the fit's own.")

    def chunk(carry: Carry, until: int) -> Carry:
        if every is not None:
            until = min(until, (int(carry.state.count) // every + 1) * every)
        carry = driver.chunk(carry, until)
        _refuse_traced((carry.code, carry.trace))  # where the objective is a function made inside of the trace
        return carry

    def result_at(carry: Carry, reason: Reason) -> Result:
        """The result so far, for checkpoints and the user's functions."""
        so_far = Result.of(carry, reason, driver.first, key, normalized)
        if reason is not Reason.INTERRUPTED:  # Else nobody has the time for a verdict.
            so_far = driver.judge(so_far)
        so_far.frozen, so_far.position = frozen_arrays, driver.position
        if looks is not None:
            so_far.validation, so_far.best = looks.trace(), looks.best
        return so_far

    def after_chunk(carry: Carry) -> bool:
        count = int(carry.state.count)
        done, stop = count - driver.first, False
        # A chunk may end between two evaluations, and the one after the last step is not left out.
        due = every is not None and done > 0 and (count % every == 0 or count == driver.last)
        if looks is not None and due:
            stop = looks.look(carry.state)
        bar.update(done, carry.trace, "" if looks is None else looks.text())
        if check:
            _check_rising(np.asarray(carry.trace["bound"])[:done])
        calls, saves = on_step is not None and due, checkpoints.is_due()
        if saves or callable(progress) or calls:
            so_far = result_at(carry, Reason.of(int(carry.code)))
            if saves:
                checkpoints.after(so_far)
            if callable(progress):
                progress(so_far)
            if calls and on_step is not None:
                stop = bool(on_step(so_far)) or stop
        return stop

    rows = loader.batch_size or loader.rows
    with ProgressBar(progress is True and driver.together.is_first, steps, rows) as bar, driver:
        if starts == 1:
            if resumed is not None or driver.returns_to_start:
                carry = driver.begin(copy_for_donation(state))
            else:
                carry = driver.begin(move_for_donation(state, (start, objective, rule, loader.data)))
            with checkpoints:
                interrupt = checkpoints.interrupt
                carry, reason = run_in_chunks(chunk, carry, driver.last, after_chunk, interrupt, driver.together)
                checkpoints.end(partial(result_at, carry, reason))
            record = None
        else:
            ends = _run_starts(driver, state, starts, bar)
            record = choose(_bounds_of_ends(rule, objective, loader, ends, key), [reason for _, reason in ends])
            carry, reason = ends[record.best]
    state = carry.state if looks is None or looks.best is None else looks.best
    if reason is Reason.CONVERGED and int(state.count) != int(carry.state.count):
        reason = Reason.STOPPED  # It is the last state that has converged, and not the best one, which is returned.
    q = state.q
    if reason is Reason.NOT_FINITE and int(state.count) == driver.first:
        cause = objective.explain_not_finite(q, driver.seen_data)
        if cause is not None:
            raise ValueError(f"The first step is not finite: {cause}.")
    loo = None
    if isinstance(objective, Model) and loader.in_memory:
        loo = partial(leave_one_out, objective, q, loader.data)
    result = Result.of(
        carry,
        reason,
        driver.first,
        key,
        normalized,
        bound=partial(driver.bound, state) if loader.batch_size is None else None,
        minima=None if rule.search is None else partial(minima, rule, objective, state, loader.data),
        loo=loo,
        starts=record,
    )
    result = driver.judge(result).with_sites(driver.sites(q))
    result.frozen, result.position = frozen_arrays, driver.position
    if looks is not None:
        result.validation = looks.trace()
    if looks is not None and looks.best is not None:
        result.state, result.note = state, driver.note(state, reason, result.skipped)
    if record is not None:
        result.starts = record.with_verdict(result.reason)
    improper = driver.improper(result)
    if improper is not None:
        warnings.warn(improper, stacklevel=2)
    return result


def run_as_fit(
    rule: Rule, objective: AbstractObjective, start: Any, data: PyTree, *, steps: int, tolerance: float
) -> State:
    """The state after the plain steps of a fit on all data, by the program of `fit` and without its verdict.

    For a search that fits the same model many times, of which only the last fit needs `fit`: both then share one
    program.
    """
    loader = Loader.of(objective, data, None)
    objective, key = objective.with_size(loader.rows), resolve_key(None, False)
    state = copy_for_donation(rule.init(start, objective, key))
    driver = Driver(rule, objective, loader, key, tolerance, state, steps=steps, watch=first_watch())
    return driver.plain_steps(driver.begin(state)).state


def _run_starts(driver: Driver, state: State, starts: int, bar: ProgressBar) -> list[tuple[Carry, Reason]]:
    """Where the given start and others around it end, and why, as if each had been fitted alone.

    They take their first steps side by side in one program, if memory allows. Those that have not ended when a single
    fit would be accelerated, or that have to begin again, go on alone.
    """
    keys = jax.random.split(jax.random.fold_in(driver.key, _STARTS), starts - 1)
    drawn = [dispersed(state.q, key, SCALES[i % len(SCALES)]) for i, key in enumerate(keys)]
    # They are drawn around a start that is at the first temperature of the plan already.
    others = (driver.rule.init(q, driver.objective, driver.key) for q in drawn)
    states = [state, *(dataclasses.replace(other, horizon=state.horizon) for other in others)]
    drivers = [driver.at(each) for each in states]
    carries = [driver.begin(copy_for_donation(each)) for each in states]
    if not fits_in_memory(state, driver.data, starts):
        ends: list[tuple[Carry, Reason]] = []
        for one, carry in zip(drivers, carries, strict=True):
            if not ends or ends[-1][1] is not Reason.INTERRUPTED:
                ends.append(run_in_chunks(one.chunk, carry, one.last, lambda carry: None, together=one.together))
        return ends

    def together(lanes: Lanes, until: int) -> Lanes:
        return run_chunk_together(
            driver.rule, driver.objective, driver.data, driver.key, driver.tolerance, 0, until, lanes, **driver.how
        )

    def after_chunk(lanes: Lanes) -> None:
        carry = lanes.separate(Reason.STEPS)[0][0]
        bar.update(int(lanes.state.count), carry.trace)

    last = driver.last if driver.faster is None else min(driver.last, PATIENCE)
    lanes, reason = run_in_chunks(together, Lanes.of(carries), last, after_chunk, together=driver.together)
    return [one.finish(*end) for one, end in zip(drivers, lanes.separate(reason), strict=True)]


def with_frozen(objective: AbstractObjective, frozen: PyTree) -> AbstractObjective:
    """The objective with arrays of integers and booleans that came with the start."""
    if not isinstance(objective, Objective | Batched):
        raise ValueError(
            "Some parameters are arrays of integers or booleans, which have no gradient: leave them out of the start, "
            "and let the function close over them."
        )
    known = objective.frozen
    return dataclasses.replace(objective, frozen=Frozen(frozen if known is None else known.joined(frozen)))


def _warn_of_unused(objective: AbstractObjective, params: PyTree, data: PyTree) -> None:
    """Warn of parameters that the loss does not depend on: they would stay as uncertain as the prior."""
    if not isinstance(objective, Objective | Batched):
        return
    unused = unused_parameters(objective, params, data)
    if unused:
        names = ", ".join(name or "θ" for name in unused[:4]) + (", …" if len(unused) > 4 else "")
        warnings.warn(
            f"The loss does not depend on the parameters {names}, or only behind stop_gradient: no data move them, and "
            "q has their prior. Freeze them, if that is meant: params, frozen = blr.freeze(params, mask), and "
            "Objective(…, frozen=frozen).",
            stacklevel=3,
        )


def _interval(every: int | None, steps: int, objective: AbstractObjective, loader: Loader, used: bool) -> int | None:
    """After how many steps validation and `on_step` are due; None where neither is asked for."""
    if not used:
        if every is not None:
            raise ValueError("every= says when to look at validation= or to call on_step=: pass one of them.")
        return None
    if every is not None:
        return positive_int("every", every, meaning="after how many steps to look")
    if loader.batch_size is not None:
        return batches_per_epoch(objective, loader.rows, loader.batch_size)
    return max(1, steps // 100)


def _skips(skip_nonfinite: int, resumed: Result | None, loader: Loader) -> Skips | None:
    """How many batches may be skipped, and how many were before a resumption; None where both are 0."""
    limit = nonnegative_int("skip_nonfinite", skip_nonfinite, meaning="how many batches may be skipped")
    if limit and loader.batch_size is None:
        raise ValueError(
            "skip_nonfinite= skips mini-batches, and this fit sees all data in every step, which would be as little "
            "finite in the next one: pass batch_size=, or remove the rows that are not finite from the data."
        )
    return None if loader.batch_size is None else Skips.of(0 if resumed is None else resumed.skipped, limit)


_STARTS = 0x57A7  # Folded into the key of a fit for the keys of its further starts.


def _check_several_starts(
    rule: Rule,
    resumed: Result | None,
    key: Key | None,
    checkpoint: Any,
    progress: bool | Callable[..., Any],
    follows: str | None,
) -> None:
    """Raise where several starts cannot be combined with the other arguments."""
    if rule.search is not None:
        raise ValueError(
            "multimodal() restarts its components by itself, over all of its box: remove starts=, and give it more "
            "components or steps."
        )
    if resumed is not None:
        raise ValueError(
            "An earlier result goes on from its one state: remove starts=, or pass result.q as the start, around which "
            "others are drawn."
        )
    if key is None:
        raise ValueError("starts= draws starts around the one that was given: pass key=jax.random.key(…).")
    if checkpoint is not None or callable(progress) or follows is not None:
        which = follows or ("checkpoint=" if checkpoint is not None else "progress= with a function")
        raise ValueError(
            f"{which} follows one fit, and with starts= there are several: remove it, or fit with starts= first for a "
            "moderate number of steps and go on from the result with the other."
        )


def _bounds_of_ends(
    rule: Rule, objective: AbstractObjective, loader: Loader, ends: list[tuple[Carry, Reason]], key: Key
) -> np.ndarray:
    """What the ends of several starts are compared by; NaN where a start has none."""
    if loader.batch_size is None:
        # Those that were accelerated have a history, which the bound does not need.
        plain = [dataclasses.replace(carry.state, history=None) for carry, _ in ends]
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plain)
        return np.asarray(bounds_of(rule, objective, states, loader.data, key), float)
    epoch = -(-loader.rows // loader.batch_size)
    taken = [(np.asarray(carry.trace["objective"]), int(carry.state.count)) for carry, _ in ends]
    return np.array([-np.mean(values[max(0, count - epoch) : count]) if count else np.nan for values, count in taken])


def _refuse_traced(tree: PyTree) -> None:
    """Raise if there is a traced number among these: `fit` has to read how its loop goes, and cannot inside a trace."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "fit() is a Python loop around compiled steps (progress, checkpoints, Ctrl-C), so it does not work inside "
            "jax.jit, vmap, scan or grad: use blr.run(rule, objective, start, data, steps=…), which takes the same "
            "steps as a pure function."
        )


def resolve_key(key: Key | None, random: bool) -> Key:
    """The user's key, or a fixed one where nothing is random and none was passed."""
    if isinstance(key, int):
        raise ValueError("key= is a JAX key: pass jax.random.key(seed).")
    if key is None and random:
        raise ValueError("This fit is random (sampled points or mini-batches): pass key=jax.random.key(…).")
    return _default_key() if key is None else key


@cache
def _default_key() -> Key:
    return jax.random.key(0)


def _check_rising(bounds: np.ndarray) -> None:
    """Raise if the bound fell in a step by more than rounding can explain."""
    fall = np.append(0.0, np.maximum(bounds[:-1] - bounds[1:], 0.0))
    rounding = 1e3 * np.finfo(bounds.dtype).eps * (1 + np.abs(bounds))
    if np.any(fall > rounding):
        step = int(np.argmax(fall > rounding))
        raise ValueError(
            f"The bound fell by {fall[step]:.3g} nats in step {step}. With ρ = 1 that means a factor that is not "
            "conjugate (use ncvmp, or a smaller rate), or an expected log factor that is wrong."
        )
