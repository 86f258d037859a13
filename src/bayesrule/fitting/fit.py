"""fit(): run a rule on an objective until it converges or its steps are used up.

`fit` checks its arguments, prepares the state, and puts the parts together: `loader` (which rows a step sees), `loop`
(the compiled steps), `progress` (chunks, Ctrl-C and the bar), `result` (what is returned and saved).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..families.base import Family
from ..numerics.checks import nonnegative_int, positive_int
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..rule.rule import Rule
from ..rule.state import State
from .accelerate import PATIENCE
from .bound import judge_bound
from .convergence import first_watch
from .driver import Driver
from .loader import Loader
from .loop import Carry, copy_for_donation
from .minima import minima
from .progress import ProgressBar, run_in_chunks
from .reason import Reason
from .result import Result
from .starts import SCALES, Lanes, bounds_of, choose, dispersed, fits_in_memory, run_chunk_together


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
    checkpoint: str | Path | None = None,
    microbatches: int = 1,
    check: bool = False,
    starts: int = 1,
) -> Result:
    """Run the rule on an objective for a number of steps, or until q is within `tolerance` of the optimum.

    It is a Python function; inside `jax.jit`, `vmap` or `grad` use `run`, which takes the same steps.

    A fit that was interrupted or saved, and is resumed by passing its `Result` as `start`, takes the same steps as an
    uninterrupted one, bit for bit on the same machine.

    Args:
        rule: The algorithm, such as `blr.newton()`.
        objective: An `Objective`, a `Model`, or a plain function of θ.
        start: A member of the rule's family, bare parameters, or an earlier `Result` to continue from. Where a model's
            likelihood cannot be integrated over it, because it is too wide, `cvi` and `ncvmp` begin from a narrower q
            with its mean, if that has a higher bound than what was reached from the start.
        data: A pytree of arrays with one row per example (or `Weighted`).
        steps: The number of steps to take, at most.
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
        checkpoint: A file that is rewritten while the fit runs. `load` it and pass it as `start` to resume.
        microbatches: Measure each batch in so many parts, one after another, with the memory of one part.
        check: Raise if the bound falls from one step to the next, which it never does with ρ = 1 and conjugate factors.
        starts: Run from so many starts side by side, the given one and others drawn around it (needs a key), and return
            the best by its bound; `result.starts` says how many agree. For posteriors with several modes: differential
            equations, hidden Markov models, mixtures. A Gaussian is moved to points drawn at one, two and four of its
            own standard deviations in turn, so that a wide start looks far; `fitting/starts.py` has the other families.

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
    given = start.state if isinstance(start, Result) else start
    _refuse_traced((rule, objective, given, data, steps, key, tolerance))
    objective = as_objective(objective)
    steps = nonnegative_int("steps", steps, meaning="how many steps to take")
    if microbatches != 1 and not objective.splits_batches:
        raise ValueError("A model measures its batch as a whole: remove microbatches=, and take a smaller batch_size.")
    loader = Loader.of(objective, data, batch_size)
    adapted, data = objective.with_size(loader.rows).for_data(loader.data)
    objective, loader = adapted, loader._replace(data=data)
    if rule.steps.acceleration is not None and (loader.batch_size is not None or objective.random):
        raise ValueError(
            "Anderson acceleration compares the gradients of successive steps, which must be of the same loss: remove "
            "batch_size=, or the acceleration from the rule's steps."
        )
    resumed, given_key = start if isinstance(start, Result) else None, key
    random = rule.points.random or loader.batch_size is not None or objective.random
    key = resolve_key(resumed.key if resumed is not None and key is None else key, random)
    if check and random:
        raise ValueError(
            "check=True needs an exact bound: it does not work with batch_size or random points. Remove check=True, or "
            "use the full batch and deterministic points."
        )
    starts = positive_int("starts", starts, meaning="from how many starts to fit")
    if starts > 1:
        _check_several_starts(rule, resumed, given_key, checkpoint, progress)
    state = rule.init(start, objective, key) if resumed is None else resumed.state
    objective.check_data(state.q, loader.data)
    normalized = objective.regularizer.normalized(state.q.component_prototype.gaussian)
    watch = None
    if tolerance is not None:
        watch = first_watch() if resumed is None or resumed.watch is None else resumed.watch
    driver = Driver(
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
    )

    def chunk(carry: Carry, until: int) -> Carry:
        carry = driver.chunk(carry, until)
        _refuse_traced((carry.code, carry.trace))  # where the objective is a function made inside of the trace
        return carry

    def after_chunk(carry: Carry) -> None:
        done = int(carry.state.count) - driver.first
        bar.update(done, carry.trace)
        if check:
            _check_rising(np.asarray(carry.trace["bound"])[:done])
        if checkpoint is not None or callable(progress):
            so_far = Result.of(carry, Reason.of(int(carry.code)), driver.first, key, normalized)
            so_far = driver.judge(so_far)
            if checkpoint is not None:
                so_far.save(checkpoint)
            if callable(progress):
                progress(so_far)

    with ProgressBar(progress is True, steps) as bar:
        if starts == 1:
            carry = driver.begin(copy_for_donation(state))
            record, (carry, reason) = None, run_in_chunks(chunk, carry, driver.last, after_chunk)
        else:
            ends = _run_starts(driver, state, starts, bar)
            record = choose(_bounds_of_ends(rule, objective, loader, ends, key), [reason for _, reason in ends])
            carry, reason = ends[record.best]
    q, state = carry.state.q, carry.state
    if reason is Reason.NOT_FINITE and int(state.count) == driver.first:
        cause = objective.explain_not_finite(q, loader.data)
        if cause is not None:
            raise ValueError(f"The first step is not finite: {cause}.")
    result = Result.of(
        carry,
        reason,
        driver.first,
        key,
        normalized,
        bound=partial(judge_bound, rule, objective, state, loader.data, key) if loader.batch_size is None else None,
        minima=None if rule.search is None else partial(minima, rule, objective, state, loader.data),
        loo=partial(leave_one_out, objective, q, loader.data) if isinstance(objective, Model) else None,
        starts=record,
    )
    result = driver.judge(result)
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
    states = [state, *(driver.rule.init(q, driver.objective, driver.key) for q in drawn)]
    drivers = [driver.at(each) for each in states]
    carries = [driver.begin(copy_for_donation(each)) for each in states]
    if not fits_in_memory(state, driver.data, starts):
        ends: list[tuple[Carry, Reason]] = []
        for one, carry in zip(drivers, carries, strict=True):
            if not ends or ends[-1][1] is not Reason.INTERRUPTED:
                ends.append(run_in_chunks(one.chunk, carry, one.last, lambda carry: None))
        return ends

    def together(lanes: Lanes, until: int) -> Lanes:
        return run_chunk_together(
            driver.rule, driver.objective, driver.data, driver.key, driver.tolerance, 0, until, lanes, **driver.how
        )

    def after_chunk(lanes: Lanes) -> None:
        carry = lanes.separate(Reason.STEPS)[0][0]
        bar.update(int(lanes.state.count), carry.trace)

    last = driver.last if driver.faster is None else min(driver.last, PATIENCE)
    lanes, reason = run_in_chunks(together, Lanes.of(carries), last, after_chunk)
    return [one.finish(*end) for one, end in zip(drivers, lanes.separate(reason), strict=True)]


_STARTS = 0x57A7  # Folded into the key of a fit for the keys of its further starts.


def _check_several_starts(
    rule: Rule, resumed: Result | None, key: Key | None, checkpoint: Any, progress: bool | Callable
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
    if checkpoint is not None or callable(progress):
        which = "checkpoint=" if checkpoint is not None else "progress= with a function"
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
