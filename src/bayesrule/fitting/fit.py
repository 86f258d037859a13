"""fit(): run a rule on an objective until it converges or its steps are used up.

`fit` checks its arguments, prepares the state, and puts the parts together: `loader` (which rows a step sees), `loop`
(the compiled steps), `progress` (chunks, Ctrl-C and the bar), `result` (what is returned and saved).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..families.base import Family
from ..numerics.checks import nonnegative_int
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..rule.rule import Rule
from ..rule.state import State
from .loader import Loader
from .loop import Carry, copy_for_donation, empty_trace, run_chunk
from .minima import minima
from .progress import ProgressBar, run_in_chunks
from .reason import Reason
from .result import Result


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
) -> Result:
    """Run the rule on an objective for a number of steps, or until the decrement is below `tolerance`.

    A fit that was interrupted or saved, and is resumed by passing its `Result` as `start`, takes the same steps as an
    uninterrupted one, bit for bit on the same machine.

    Args:
        rule: The algorithm, such as `blr.newton()`.
        objective: An `Objective`, a `Model`, or a plain function of θ.
        start: A member of the rule's family, bare parameters, or an earlier `Result` to continue from.
        data: A pytree of arrays with one row per example (or `Weighted`).
        steps: The number of steps to take, at most.
        batch_size: The number of rows in a mini-batch; without it every step sees all data. Rows are drawn without
            replacement and shuffled in each epoch, and the last, smaller batch of an epoch is scaled by its own N/M. A
            `from_batch` objective skips that last batch, because its examples may not be independent.
        key: A JAX key, for mini-batches and random points. A resumed fit has that of its start.
        tolerance: Converge when the natural gradient's decrement is below so many nats; with mini-batches when it is
            for each batch of an epoch in a row.
        progress: True shows a progress bar. A function is called a few times a second with the result so far, whose
            arrays it may read only until it returns.
        checkpoint: A file that is rewritten while the fit runs. `load` it and pass it as `start` to resume.
        microbatches: Measure each batch in so many parts, one after another, with the memory of one part.
        check: Raise if the bound falls from one step to the next, which it never does with ρ = 1 and conjugate factors.

    Returns:
        The `Result`: the posterior `q`, the `reason` why the fit ended, and a `trace` with one value per step.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = fit(blr.newton(), lambda x: jnp.sum(jnp.cosh(x - 1.0)), jnp.zeros(2), steps=50, tolerance=1e-8)
    >>> result.reason, [round(float(m), 4) for m in result.q.mean]
    ('converged', [1.0, 1.0])
    """
    objective = as_objective(objective)
    steps = nonnegative_int("steps", steps, meaning="how many steps to take")
    if microbatches != 1 and not objective.splits_batches:
        raise ValueError("A model measures its batch as a whole: remove microbatches=, and take a smaller batch_size.")
    loader = Loader.of(objective, data, batch_size)
    objective = objective.with_size(loader.rows)
    resumed = start if isinstance(start, Result) else None
    random = rule.points.random or loader.batch_size is not None or objective.random
    key = resolve_key(resumed.key if resumed is not None and key is None else key, random)
    if check and random:
        raise ValueError(
            "check=True needs an exact bound: it does not work with batch_size or random points. Remove check=True, or "
            "use the full batch and deterministic points."
        )
    state = copy_for_donation(rule.init(start, objective, key) if resumed is None else resumed.state)
    objective.check_data(state.q, loader.data)
    first = 0 if resumed is None else int(state.count)
    diagnose = tolerance is not None or loader.batch_size is None
    limit = -1.0 if tolerance is None else tolerance
    how = {"batch_size": loader.batch_size, "diagnose": diagnose, "microbatches": microbatches}
    normalized = objective.regularizer.normalized(state.q.component_prototype.gaussian)

    def chunk(carry: Carry, until: int) -> Carry:
        return run_chunk(rule, objective, loader.data, key, limit, first, until, carry, **how)

    def after_chunk(carry: Carry) -> None:
        done = int(carry.state.count) - first
        bar.update(done, carry.trace)
        if check:
            _check_rising(np.asarray(carry.trace["bound"])[:done])
        if checkpoint is not None or callable(progress):
            so_far = Result.of(carry, Reason.of(int(carry.code)), first, key, normalized)
            if checkpoint is not None:
                so_far.save(checkpoint)
            if callable(progress):
                progress(so_far)

    with ProgressBar(progress is True, steps) as bar:
        carry = Carry(state, loader.initial_order(), empty_trace(steps, diagnose))
        carry, reason = run_in_chunks(chunk, carry, first + steps, after_chunk)
    q, state = carry.state.q, carry.state
    if reason is Reason.NOT_FINITE and int(state.count) == first:
        cause = objective.explain_not_finite(q, loader.data)
        if cause is not None:
            raise ValueError(f"The first step is not finite: {cause}.")
    return Result.of(
        carry,
        reason,
        first,
        key,
        normalized,
        bound=partial(evaluate_bound, rule, objective, state, loader.data, key) if loader.batch_size is None else None,
        minima=None if rule.search is None else partial(minima, rule, objective, state, loader.data),
        loo=partial(leave_one_out, objective, q, loader.data) if isinstance(objective, Model) else None,
    )


def resolve_key(key: Key | None, random: bool) -> Key:
    """The user's key, or a fixed one where nothing is random and none was passed."""
    if isinstance(key, int):
        raise ValueError("key= is a JAX key: pass jax.random.key(seed).")
    if key is None and random:
        raise ValueError("This fit is random (sampled points or mini-batches): pass key=jax.random.key(…).")
    return jax.random.key(0) if key is None else key


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


@jax.jit
def evaluate_bound(rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key) -> Array:
    return rule.bound(objective, state.q, data, key, aux=state.aux)
