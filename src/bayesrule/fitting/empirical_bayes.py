r"""Empirical Bayes: hyper-parameters (prior precision, noise level, kernel scales) that maximise the evidence.

`empirical_bayes` has three methods. "evidence" fits q anew at every value of the hyper-parameters η and follows the
bound's gradient in them (L-BFGS). "conjugate" alternates between fits of q and the evidence of the conjugate model that
q's messages make (see `conjugate_evidence`). "online" takes a step of an optax optimiser on the bound between steps of
the rule, so that q and η are learned in one run, on mini-batches too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array

from ..families.base import Family
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..objectives.regularizers import as_regularizer
from ..rule.rule import Rule
from ..rule.state import State
from .accelerate import accelerated
from .bound import judge_bound
from .conjugate_evidence import Extrapolation, evidence_step, join, with_new_prior
from .evidence_slope import bound_and_slope, has_plain_steps, with_bases_of
from .fit import fit, resolve_key
from .loader import Loader
from .loop import Carry, copy_for_donation, iterate
from .loop import run as run_to_end
from .maximize import check_positive, maximize
from .parts import on_device
from .progress import run_in_chunks
from .reason import Reason
from .result import Result

_COARSE_TOLERANCE = 1e-2  # nats: a rough q is enough while the hyper-parameters are still far off,
_CLOSE = 0.1  # which they are not if log η moves by less than this.
_NEGLIGIBLE_GAIN = 0.1  # The part of the tolerance that the hyper-parameters may leave to gain,
_NEGLIGIBLE_CHANGE = 1e-4  # or how far log η may still be from its place.

# Which of the arguments that not all methods have belong to which, with their defaults.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "evidence": {"tolerance": 1e-8, "evaluations": 100, "within": None, "settled": 1e-14, "run": fit},
    "conjugate": {
        "prior": None,
        "tolerance": 1e-8,
        "rounds": 30,
        "belief": None,
        "held": (),
        "batch_size": None,
        "run": fit,
    },
    "online": {"optimizer": None, "batch_size": None, "between": 1},
}


@dataclass(frozen=True)
class Evidence:
    """What `empirical_bayes` returns.

    Attributes:
        hyper: the hyper-parameters.
        result: the fit of q at them.
        converged: whether both the hyper-parameters and the fit at them have converged. The "online" method takes a
            fixed number of steps and does not claim it.
        evaluations: how many values of the hyper-parameters were tried.
    """

    hyper: PyTree
    result: Result
    converged: bool
    evaluations: int

    @property
    def q(self) -> Any:
        """The posterior at the hyper-parameters."""
        return self.result.q

    @property
    def bounds(self) -> np.ndarray:
        """The bound at every step of `result`; with mini-batches an estimate."""
        return self.result.trace["bound"]


def empirical_bayes(
    rule: Rule,
    objective: Any,
    hyper: PyTree,
    start: Any,
    data: PyTree = None,
    *,
    method: str = "evidence",
    steps: int | None = None,
    key: Key | None = None,
    tolerance: float | None = None,
    run: Callable[..., Result] | None = None,
    evaluations: int | None = None,
    within: float | None = None,
    settled: float | None = None,
    prior: Callable[[PyTree], Any] | None = None,
    rounds: int | None = None,
    belief: Callable[[PyTree], Any] | None = None,
    held: Sequence[str] | None = None,
    optimizer: Any = None,
    batch_size: int | None = None,
    between: int | None = None,
) -> Evidence:
    r"""Maximise the evidence (its lower bound) over positive hyper-parameters η.

    - `"evidence"`: maximise $\max_q \text{bound}(q, η)$ over log η by scipy's L-BFGS-B. Each evaluation fits q, from
      the last one, and differentiates the bound there. Under the delta method the bound is Laplace's evidence, and for
      Gaussian linear models the exact one; its slope has the third derivatives of the loss, by which the mode and its
      curvature move with η (see `evidence_slope`).
    - `"conjugate"`: for hyper-parameters of the prior alone. Alternate between a fit of q and a Newton step on
      $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$, the evidence of the conjugate model of the prior's $λ_0$ and the
      likelihood's message $\tildeλ = λ − λ_0$, which takes no data; it ends when neither moves. The maximum is the
      same where q maximises the bound. Under the delta method these are MacKay's updates, which leave out how the
      curvature moves with η: they maximise Laplace's evidence if the loss is quadratic, and nearly if data are many.
    - `"online"`: $\log η ← \log η + \text{optimizer}(∇_{\log η}\,\text{bound}(λ, η))$ at fixed λ, after every `between`
      steps of the rule. Under the delta method the slope is that of "evidence", if the steps are on all data and have
      no momentum, averages or scaling. A Gaussian process keeps its sites while its kernel changes, which lets the
      optimiser take longer steps than a fixed q would (Adam et al., 2021).

    An argument that belongs to another method is an error.

    Args:
        rule: The algorithm that fits q.
        objective: A function of the hyper-parameters that builds the objective; for "conjugate" the `Objective` itself,
            whose regularizer is replaced. As a `jax.tree_util.Partial` of a function and its arrays it is compiled once
            for all arrays of the same shapes.
        hyper: Where to start, a pytree of positive numbers.
        start: Where q starts, a member of the rule's family or bare parameters.
        data: As in `fit`.
        method: "evidence", "conjugate" or "online".
        steps: The largest number of steps of each fit, 50 unless given; for "online" the number of optimiser steps,
            which has to be given.
        key: A JAX key, for random points and mini-batches.
        tolerance: For "evidence" and "conjugate": that of each fit, in nats. Default 1e-8.
        run: For "evidence" and "conjugate": a function to call in place of `fit`, for "evidence" for the last fit.
        evaluations: For "evidence": the largest number of fits. Default 100.
        within: For "evidence": keep every hyper-parameter within this factor of its start.
        settled: For "evidence": end when the bound rises by less than this fraction of itself. Default 1e-14.
        prior: For "conjugate": prior(hyper) is what `Objective` takes as `regularizer=`. Define this function once,
            outside of loops, because a program is compiled for each.
        rounds: For "conjugate": the largest number of fits. Default 30.
        belief: For "conjugate": belief(hyper), a log density that is added to the evidence, which may have no maximum
            of its own (classes that can be separated).
        held: For "conjugate": the names of a dict's entries that keep their values.
        optimizer: For "online": an optax optimiser.
        batch_size: For "conjugate" and "online": the number of rows of a mini-batch.
        between: For "online": the number of steps of the rule between two steps of the optimiser. Default 1.

    Returns:
        The hyper-parameters, the result of the fit at them, and whether they have converged.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> y = jnp.array([3.0, -2.0, 2.5, -3.5])                       # y ~ N(θ, 1), one θ each
    >>> normal = lambda f, y: 0.5 * (f - y) ** 2 + 0.919
    >>> model = lambda h: blr.Objective(lambda w, e: normal(w[e[0]], e[1]), size=4, regularizer=h["prior"])
    >>> best = empirical_bayes(blr.laplace(), model, {"prior": 1.0}, jnp.zeros(4), (jnp.arange(4), y))
    >>> round(float(best.hyper["prior"]), 3)                        # 1 / (mean of y² − 1)
    0.145
    """
    if method not in _ARGUMENTS:
        raise ValueError(f"method= is one of {', '.join(map(repr, _ARGUMENTS))}; got {method!r}.")
    own = _own_arguments(
        method,
        tolerance=tolerance,
        run=run,
        evaluations=evaluations,
        within=within,
        settled=settled,
        prior=prior,
        rounds=rounds,
        belief=belief,
        held=held,
        optimizer=optimizer,
        batch_size=batch_size,
        between=between,
    )
    if method == "conjugate":
        if own["prior"] is None:
            raise ValueError(
                'method="conjugate" needs prior=, a function of the hyper-parameters that returns the regularizer. For '
                'hyper-parameters of the likelihood use method="evidence" or "online".'
            )
        return _alternate(rule, objective, hyper, start, data, steps=50 if steps is None else steps, key=key, **own)
    if method == "online":
        if own["optimizer"] is None or steps is None:
            raise ValueError('method="online" needs optimizer=, such as optax.adam(0.1), and steps=.')
        return _run_online(rule, objective, hyper, start, data, steps=steps, key=key, **own)
    return _maximize_bound(rule, objective, hyper, start, data, steps=50 if steps is None else steps, key=key, **own)


def matched(
    rule: Rule,
    objective: AbstractObjective,
    prior: Callable[[PyTree], Any],
    hyper: PyTree,
    start: Any,
    data: PyTree = None,
    *,
    steps: int = 50,
    tolerance: float = 1e-8,
    rounds: int = 30,
    belief: Callable[[PyTree], Any] | None = None,
    held: Sequence[str] = (),
    run: Callable[..., Result] = fit,
    **options: Any,
) -> Evidence:
    """The former name of `empirical_bayes(…, method="conjugate", prior=prior)`; other options go to `fit`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> y = jnp.array([3.0, -2.0, 2.5, -3.5])                       # y ~ N(θ, 1), one θ each
    >>> model = blr.Objective(lambda w, e: 0.5 * (w[e[0]] - e[1]) ** 2 + 0.919, size=4)
    >>> best = matched(blr.laplace(), model, lambda h: h["prior"], {"prior": 1.0}, jnp.zeros(4), (jnp.arange(4), y))
    >>> round(float(best.hyper["prior"]), 3), best.converged        # 1 / (mean of y² − 1)
    (0.145, True)
    """
    return empirical_bayes(
        rule,
        objective,
        hyper,
        start,
        data,
        method="conjugate",
        prior=prior,
        steps=steps,
        tolerance=tolerance,
        rounds=rounds,
        belief=belief,
        held=held,
        run=partial(run, **options) if options else run,
    )


def tuned(
    rule: Rule,
    objective: Callable[[PyTree], Any],
    hyper: PyTree,
    start: Any,
    data: PyTree = None,
    *,
    optimizer: Any,
    steps: int,
    batch_size: int | None = None,
    between: int = 1,
    key: Key | None = None,
) -> Evidence:
    """The former name of `empirical_bayes(…, method="online", optimizer=optimizer)`.

    >>> import bayesrule as blr, jax.numpy as jnp, optax
    >>> from bayesrule.models import gp, kernels
    >>> x = jnp.linspace(0.0, 6.0, 40)
    >>> build = lambda h: gp.regression(kernels.RBF(1.0, h["scale"]), x, h["noise"])
    >>> start = {"scale": 0.2, "noise": 1.0}
    >>> best = tuned(blr.conjugate(), build, start, None, {"y": jnp.sin(2 * x)}, optimizer=optax.adam(0.1), steps=60)
    >>> bool(best.bounds[0] < best.bounds[-1]), bool(best.hyper["noise"] < 0.1)
    (True, True)
    """
    return empirical_bayes(
        rule,
        objective,
        hyper,
        start,
        data,
        method="online",
        optimizer=optimizer,
        steps=steps,
        batch_size=batch_size,
        between=between,
        key=key,
    )


def _own_arguments(method: str, **passed: Any) -> dict[str, Any]:
    """The method's own arguments, with defaults; an error where one was passed that belongs to another method."""
    own = _ARGUMENTS[method]
    for name, value in passed.items():
        if value is not None and name not in own:
            owners = " and ".join(f'"{other}"' for other, names in _ARGUMENTS.items() if name in names)
            raise ValueError(
                f'{name}= belongs to method={owners}, and this is method="{method}", which would ignore it: remove '
                f"{name}=, or choose the other method."
            )
    return {name: default if passed[name] is None else passed[name] for name, default in own.items()}


# Method "evidence".


def _maximize_bound(
    rule: Rule,
    objective: Callable[[PyTree], Any],
    hyper: PyTree,
    start: Any,
    data: PyTree,
    *,
    steps: int,
    key: Key | None,
    tolerance: float,
    evaluations: int,
    within: float | None,
    settled: float,
    run: Callable[..., Result],
) -> Evidence:
    if rule.points.random and key is None:
        raise ValueError("This rule samples its points: pass key=jax.random.key(…).")
    key = jax.random.key(0) if key is None else key
    data = jax.tree.map(jnp.asarray, data)
    build = objective if isinstance(objective, Partial) else Partial(objective)
    q = start if isinstance(start, Family) else None

    def score(log_hyper: PyTree) -> tuple[Array, PyTree]:
        nonlocal q
        if q is None:
            q = rule.init(start, _build(build, log_hyper)).q
        fitted, value, gradient = _bound_and_gradient(rule, build, log_hyper, q, data, key, tolerance, steps=steps)
        if bool(jnp.isfinite(value)):
            q = fitted
        return value, gradient

    best = maximize(score, hyper, evaluations=evaluations, within=within, relative_gain=settled)
    final = as_objective(objective(best.hyper))
    last = start if q is None else q
    result = run(rule, final, with_bases_of(final, last), data, steps=steps, tolerance=tolerance, key=key)
    return Evidence(best.hyper, result, best.converged and result.reason == "converged", best.evaluations)


@compiled(static="steps")
def _bound_and_gradient(
    rule: Rule,
    build: Partial,
    log_hyper: PyTree,
    q: Family,
    data: PyTree,
    key: Key,
    tolerance: ArrayLike,
    *,
    steps: int,
) -> tuple[Family, Array, PyTree]:
    """Fit q at these hyper-parameters. Returns it, its bound, and the bound's gradient in log η."""
    objective = _build(build, log_hyper)
    state = rule.init(with_bases_of(objective, q), objective)
    fitted = run_to_end(rule, objective, state, data, key, steps, tolerance)
    return fitted.q, *bound_and_slope(rule, partial(_build, build), log_hyper, fitted, data, key)


def _build(build: Callable[[PyTree], Any], log_hyper: PyTree, rows: int = 0) -> AbstractObjective:
    """The objective at these hyper-parameters, with N set to the number of rows where there are any."""
    objective = as_objective(build(jax.tree.map(jnp.exp, log_hyper)))
    return objective.with_size(rows) if rows else objective


# Method "conjugate".


def _alternate(
    rule: Rule,
    objective: AbstractObjective,
    hyper: PyTree,
    start: Any,
    data: PyTree,
    *,
    steps: int,
    key: Key | None,
    prior: Callable[[PyTree], Any],
    tolerance: float,
    rounds: int,
    belief: Callable[[PyTree], Any] | None,
    held: Sequence[str],
    batch_size: int | None,
    run: Callable[..., Result],
) -> Evidence:
    options: dict[str, Any] = {"key": key, "batch_size": batch_size}
    options = {name: value for name, value in options.items() if value is not None}
    # Arrays of the type that the search returns, or the second fit would be compiled again.
    to_logs = lambda values: jax.tree.map(lambda x: np.log(np.asarray(x, jnp.result_type(float))), values)
    check_positive(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(hyper)]), hyper)
    fixed = to_logs({name: hyper[name] for name in held}) if held else None
    logs = to_logs({name: value for name, value in hyper.items() if name not in held} if held else hyper)
    values_at = lambda logs: jax.tree.map(np.exp, join(logs, fixed))
    data = on_device(data)  # once for all fits
    extrapolation, current_tolerance = Extrapolation(), max(tolerance, _COARSE_TOLERANCE)
    fits, settled, result = 0, False, None
    while result is None or fits < rounds:
        fits += 1
        regularizer: Any = as_regularizer(prior(values_at(logs)), None)
        current = dataclasses.replace(objective, regularizer=regularizer)
        result = run(rule, current, start, data, steps=steps, tolerance=current_tolerance, **options)
        # Another reason, such as points that are too coarse here, need not hold at the next hyper-parameters.
        if result.loop_reason.rejected_a_step or result.loop_reason is Reason.INTERRUPTED:
            break
        step, gain = jax.device_get(evidence_step(result.q, logs, fixed, prior, belief))
        vector, unravel = _ravel(logs)
        residual = _ravel(step)[0]
        if not np.all(np.isfinite(residual)):
            break
        # The nats that the hyper-parameters can still gain, or their relative change, are negligible.
        settled = float(gain) <= _NEGLIGIBLE_GAIN * current_tolerance or bool(
            np.max(np.abs(residual)) < _NEGLIGIBLE_CHANGE
        )
        if settled and current_tolerance == tolerance:
            break
        if settled or np.max(np.abs(residual)) < _CLOSE:  # From here on a rough q would mislead.
            current_tolerance = tolerance
        if result.state.history is not None and rule.steps.acceleration is None:
            # Plain steps were too slow, and would be again at the next hyper-parameters.
            rule = accelerated(rule, current, result.q, data) or rule
        if fits < rounds:
            after = unravel(extrapolation.next(vector, residual))
            start = with_new_prior(result.q, values_at(logs), values_at(after), prior)
            logs = after
    converged = settled and current_tolerance == tolerance and result.reason == "converged"
    return Evidence(jax.tree.map(jnp.asarray, values_at(logs)), result, converged, fits)


def _ravel(tree: PyTree) -> tuple[np.ndarray, Callable[[np.ndarray], PyTree]]:
    """The numbers of a small tree as one NumPy vector, and the way back; on the host, where it costs no program."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = np.cumsum([0, *(np.size(leaf) for leaf in leaves)])
    vector = np.concatenate([np.ravel(leaf) for leaf in leaves])

    def unravel(vector: np.ndarray) -> PyTree:
        parts = [vector[a:b].reshape(np.shape(leaf)) for a, b, leaf in zip(sizes, sizes[1:], leaves, strict=False)]
        return jax.tree.unflatten(structure, parts)

    return vector, unravel


# Method "online".


class _OnlineState(eqx.Module):
    """The rule's state, log η, the optimiser's state, and the number of optimiser steps taken."""

    state: State
    log_hyper: PyTree
    optimizer_state: PyTree
    count: Array


class _OnlineInfo(NamedTuple):
    """What the loop asks of a step (see `iterate`)."""

    bound: Array
    finite: Array
    inside: bool = True
    fraction: float = 1.0


def _run_online(
    rule: Rule,
    objective: Callable[[PyTree], Any],
    hyper: PyTree,
    start: Any,
    data: PyTree,
    *,
    steps: int,
    key: Key | None,
    optimizer: Any,
    batch_size: int | None,
    between: int,
) -> Evidence:
    hyper = jax.tree.map(lambda x: jnp.asarray(x, float), hyper)
    check_positive(ravel_pytree(hyper)[0], hyper)
    log_hyper = jax.tree.map(jnp.log, hyper)
    build = objective if isinstance(objective, Partial) else Partial(objective)
    first = _build(build, log_hyper)
    loader = Loader.of(first, data, batch_size)
    key = resolve_key(key, rule.points.random or loader.batch_size is not None or first.random)
    state = rule.init(start, _build(build, log_hyper, loader.rows), key)
    online = _OnlineState(state, log_hyper, optimizer.init(log_hyper), jnp.zeros((), int))
    trace = {"bound": np.full(steps, np.nan, jnp.result_type(float))}
    carry = Carry(copy_for_donation(online), loader.initial_order(), trace)
    how = {"rows": loader.rows, "batch_size": loader.batch_size, "between": between, "update": optimizer.update}

    def chunk(carry: Carry, until: int) -> Carry:
        return _run_online_chunk(rule, build, loader.data, key, until, carry, **how)

    carry, reason = run_in_chunks(chunk, carry, steps, lambda carry: None)
    online = carry.state
    final = _build(build, online.log_hyper, loader.rows)
    state = dataclasses.replace(online.state, q=with_bases_of(final, online.state.q))
    bounds = np.asarray(carry.trace["bound"])[: int(online.count) + reason.rejected_a_step]
    normalized = final.regularizer.normalized(state.q.component_prototype.gaussian)
    bound = partial(judge_bound, rule, final, state, loader.data, key) if loader.batch_size is None else None
    result = Result(state, reason, {"bound": bounds}, key, normalized, bound)
    return Evidence(jax.tree.map(jnp.exp, online.log_hyper), result, False, int(online.count))


@compiled(static=("rows", "batch_size", "between", "update"), donate="carry")
def _run_online_chunk(
    rule: Rule,
    build: Partial,
    data: PyTree,
    key: Key,
    until: ArrayLike,
    carry: Carry,
    *,
    rows: int,
    batch_size: int | None,
    between: int,
    update: Callable[..., Any],
) -> Carry:
    """Steps of rule and optimiser in turn, on `fit`'s loop, until a count is reached or the bound is not finite."""

    # A step on a mini-batch has another fixed point than q, far from it: the implicit slope there is no slope at all.
    follows_fixed_point = batch_size is None and has_plain_steps(rule)

    def advance(online: _OnlineState, batch: PyTree, key: Key, _: None) -> tuple[_OnlineState, _OnlineInfo, None]:
        objective = _build(build, online.log_hyper, rows)
        state = dataclasses.replace(online.state, q=with_bases_of(objective, online.state.q))
        step = lambda turn, state: rule.step(objective, state, batch, jax.random.fold_in(key, turn))[0]
        state = jax.lax.fori_loop(0, between, step, state)
        build_all, bound_key = partial(_build, build, rows=rows), jax.random.fold_in(key, between)
        bound, slope = bound_and_slope(
            rule, build_all, online.log_hyper, state, batch, bound_key, fixed_point=follows_fixed_point
        )
        gradient = jax.tree.map(jnp.negative, slope)
        updates, optimizer_state = update(gradient, online.optimizer_state, online.log_hyper)
        log_hyper = jax.tree.map(jnp.add, online.log_hyper, updates)
        finite = jnp.isfinite(bound) & jnp.all(jnp.isfinite(ravel_pytree(log_hyper)[0]))
        return _OnlineState(state, log_hyper, optimizer_state, online.count + 1), _OnlineInfo(bound, finite), None

    objective = _build(build, carry.state.log_hyper, rows)  # for the batches: they do not depend on η
    return iterate(advance, carry, objective, data, (key, key), 0, until, batch_size=batch_size)
