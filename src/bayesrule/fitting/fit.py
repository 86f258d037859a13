"""fit(): run a rule on an objective until it converges or its steps are used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..numerics.checks import nonnegative_int
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..rule.rule import Rule
from ..rule.state import State
from .loop import NOT_FINITE, REASONS, RUNNING, empty_trace, run_chunk
from .minima import minima
from .progress import _Display, _Interrupt, one_blas_thread
from .result import Result

_CHUNK_SECONDS = 0.25  # a chunk of steps is one call: short enough for Ctrl-C and a progress bar


def fit(
    rule: Rule,
    objective: Any,
    start: Any,
    data: PyTree = None,
    *,
    steps: int,
    batch_size: int | None = None,
    key: Any = None,
    tolerance: float | None = None,
    progress: bool | Callable[[Result], None] = False,
    checkpoint: str | Path | None = None,
    microbatches: int = 1,
    check: bool = False,
) -> Result:
    """Run the rule on an objective for a number of steps, or until the decrement is below `tolerance`.

    `start` is a member of the rule's family, bare parameters, or an earlier `Result` to go on from.
    `data` is a pytree of arrays with one row per example (or `Weighted`); without `batch_size` every
    step sees all of it, else mini-batches without replacement, shuffled anew each epoch, with the exact
    N/M for a ragged last one (a `from_batch` objective leaves the ragged rest of each epoch out, since
    its examples may not be independent). `tolerance` is in nats; with mini-batches it has to hold for a whole
    epoch of them in a row. `microbatches` measures each batch in that many parts, one after another, with the
    memory of one. `progress` shows a bar; or it is a function that is called a few times a second with the result so
    far, which is its own only until it returns. `checkpoint` is a file that is rewritten as the fit goes on; `load` it
    and pass it as `start` to resume: the resumed run takes the same steps as an uncut one, bit for bit. `check` raises
    if the bound falls from one step to the next, which with ρ = 1 and conjugate factors it never does.
    """
    objective = as_objective(objective)
    steps = nonnegative_int("steps", steps, meaning="how many steps to take")
    if microbatches != 1 and not objective.splits_batches:
        raise ValueError("A model's batch is measured as one: leave microbatches= out, and take a smaller batch_size.")
    loader = _Loader.of(objective, data, batch_size)
    objective = objective.with_size(loader.rows)
    resumed = isinstance(start, Result)
    if resumed and key is None:
        key = start.key
    if key is None:
        if rule.points.random or loader.batch_size is not None or objective.random:
            raise ValueError("This fit is random (sampled points or mini-batches): pass key=jax.random.key(…).")
        key = jax.random.key(0)
    if check and (loader.batch_size is not None or rule.points.random or objective.random):
        raise ValueError("check=True follows the bound, which mini-batches and random points only estimate.")
    if isinstance(key, int):
        raise ValueError("key= is a JAX key: pass jax.random.key(seed).")
    # A copy, because the loop gives its buffers away and the start belongs to the caller; of one type with what the
    # loop returns, or its second call would compile again.
    copied = lambda x: jnp.array(x, dtype=x.dtype) if isinstance(x, jax.Array) else jnp.array(x)
    state = jax.tree.map(copied, start.state if resumed else rule.init(start, objective, key))
    objective.check_data(state.q, loader.data)
    diagnose = tolerance is not None or loader.batch_size is None
    chunk = partial(run_chunk, batch_size=loader.batch_size, diagnose=diagnose, microbatches=microbatches)
    first = int(state.count) if resumed else 0
    last = first + steps
    carry = (state, loader.first_order(), empty_trace(steps, diagnose), 0, 0)
    limit = -1.0 if tolerance is None else tolerance

    def result(carry: tuple, reason: str, *, passing: bool = False) -> Result:
        state = carry[0]
        taken = int(state.count) - first
        rows = taken + (reason in REASONS[NOT_FINITE:])
        trace = {name: np.asarray(values)[: min(rows, steps)] for name, values in carry[2].items()}
        whole = loader.batch_size is None and not passing
        bound = partial(_bound, rule, objective, state, loader.data, key) if whole else None
        found = (
            partial(minima, rule, objective, state, loader.data) if rule.search is not None and not passing else None
        )
        normalized = objective.regularizer.normalized(state.q.component_prototype.gaussian)
        alone = None
        if isinstance(objective, Model) and not passing:
            alone = partial(leave_one_out, objective, state.q, loader.data)
        return Result(state, reason, trace, key, normalized, bound, found, alone)

    reason, done, size = "steps", first, min(steps, 16)
    with _Display(progress is True, steps) as display, _Interrupt() as interrupt:
        try:
            while done < last:
                began = time.perf_counter()
                with one_blas_thread():
                    carry = chunk(rule, objective, loader.data, key, limit, first, min(done + size, last), carry)
                    code = int(carry[3])
                done = int(carry[0].count)
                display.update(done - first, carry[2])
                if check:
                    _rising(np.asarray(carry[2]["bound"])[: done - first])
                if checkpoint is not None or callable(progress):
                    passing = result(carry, REASONS[code], passing=True)
                    if checkpoint is not None:
                        passing.save(checkpoint)
                    if callable(progress):
                        progress(passing)
                if code != RUNNING:
                    reason = REASONS[code]
                    break
                if interrupt.asked:
                    reason = "interrupted"
                    break
                if time.perf_counter() - began < _CHUNK_SECONDS:
                    size *= 2
        except KeyboardInterrupt:
            reason = "interrupted"
    if reason == REASONS[NOT_FINITE] and done == first:
        cause = objective.explain_not_finite(carry[0].q, loader.data)
        if cause is not None:
            raise ValueError(f"The first step is not finite: {cause}.")
    return result(carry, reason)


def _rising(bounds: np.ndarray) -> None:
    fall = np.append(0.0, np.maximum(bounds[:-1] - bounds[1:], 0.0))
    rounding = 1e3 * np.finfo(bounds.dtype).eps * (1 + np.abs(bounds))
    if np.any(fall > rounding):
        step = int(np.argmax(fall > rounding))
        raise ValueError(
            f"The bound fell by {fall[step]:.3g} nats in step {step}: with ρ = 1 that means a factor that is not "
            "conjugate (use ncvmp, or a smaller rate), or an expected log factor that is wrong."
        )


class _Loader(NamedTuple):
    """The data and how it is cut into batches."""

    data: Any
    batch_size: int | None
    rows: int

    @staticmethod
    def of(objective: AbstractObjective, data: PyTree, batch_size: int | None) -> _Loader:
        if not objective.takes_data:
            if data is not None or batch_size is not None:
                raise ValueError("A plain function of θ takes no data: wrap a loss over examples in blr.Objective.")
            return _Loader(None, None, 0)
        data = jax.tree.map(jnp.asarray, data)
        rows = objective.rows(data)
        if batch_size is not None and not 1 <= batch_size <= rows:
            raise ValueError(f"batch_size= is between 1 and the number of examples, {rows}, got {batch_size}.")
        return _Loader(data, None if batch_size == rows else batch_size, rows)

    def first_order(self) -> np.ndarray:
        return np.full(self.rows if self.batch_size is not None else 0, -1)  # not shuffled yet


@jax.jit
def _bound(rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Any) -> Array:
    return rule.bound(objective, state.q, data, key, aux=state.aux)
