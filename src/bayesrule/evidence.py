"""Empirical Bayes: prior precision, noise level and the like, learnt by the bound between fits of q, or steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .fitting import Result, fit
from .model import Model
from .objective import Objective, as_objective
from .rule import Rule
from .running import picked, run


@dataclass(frozen=True)
class Evidence:
    """What `empirical_bayes` found: the numbers that maximise the bound, and the fit at them."""

    hyper: PyTree
    result: Result
    converged: bool
    evaluations: int


def empirical_bayes(
    rule: Rule,
    objective: Callable[[PyTree], Any],
    hyper: PyTree,
    start: Any,
    data: PyTree = None,
    *,
    steps: int = 50,
    tolerance: float = 1e-8,
    evaluations: int = 100,
    key: Any = None,
) -> Evidence:
    """Maximise the evidence (its lower bound) over positive numbers that the objective depends on.

    `objective(hyper)` builds the objective from a pytree of positive numbers; `hyper` is where to start.
    Each evaluation fits q anew, from the last one, and differentiates the bound there. The numbers are
    searched in logarithms, by scipy's L-BFGS-B. Under the delta method the bound is Laplace's evidence,
    and for Gaussian linear models the exact one.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> y = jnp.array([3.0, -2.0, 2.5, -3.5])                       # y ~ N(θ, 1), one θ each
    >>> normal = lambda f, y: 0.5 * (f - y) ** 2 + 0.919
    >>> model = lambda h: blr.Objective(lambda w, e: normal(w[e[0]], e[1]), size=4, regularizer=h["prior"])
    >>> found = empirical_bayes(blr.laplace(), model, {"prior": 1.0}, jnp.zeros(4), (jnp.arange(4), y))
    >>> round(float(found.hyper["prior"]), 3)                       # 1 / (mean of y² − 1)
    0.145
    """
    flat, unflatten = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, float), hyper))
    if flat.size == 0 or not bool(jnp.all(flat > 0)):
        raise ValueError(f"empirical_bayes searches positive numbers in logarithms, and {hyper} has others.")
    if rule.points.random and key is None:
        raise ValueError("This rule samples its points: pass key=jax.random.key(…).")
    key = jax.random.key(0) if key is None else key

    def built(logs: Array) -> Any:
        return as_objective(objective(unflatten(jnp.exp(logs))))

    state = rule.init(start, built(jnp.log(flat)))
    data = jax.tree.map(jnp.asarray, data)

    @jax.jit
    def evaluated(logs: Array, q: Any) -> tuple[Any, Array, Array]:
        """The fit at these numbers, minus its bound, and the gradient of that."""
        here = built(logs)
        fitted = run(rule, here, rule.init(_over(here, q), here), data, key, steps, tolerance)

        def loss(logs: Array) -> Array:
            # One more step, for how q itself depends on the numbers: at the fixed point of Newton's method its
            # derivative is the whole dependence, at a maximum of the bound that does not matter. Forward mode,
            # since the guard is a loop.
            here = built(logs)
            still = jax.lax.stop_gradient(fitted)
            still = dataclasses.replace(still, q=_over(here, still.q))
            moved = rule.advance(here, still, data, key)[0].q
            return -rule.bound(here, moved, data, key, aux=fitted.aux)

        return fitted.q, loss(logs), jax.jacfwd(loss)(logs)

    q = state.q

    def scored(logs: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal q
        new, value, slope = evaluated(jnp.asarray(logs), q)
        if not bool(jnp.isfinite(value) & jnp.all(jnp.isfinite(slope))):
            return np.inf, np.zeros_like(logs)
        q = new
        return float(value), np.asarray(slope, float)

    from scipy.optimize import minimize

    options = {"maxfun": evaluations, "ftol": 1e-14, "gtol": 1e-6}
    found = minimize(scored, np.log(np.asarray(flat, float)), jac=True, method="L-BFGS-B", options=options)
    best = unflatten(jnp.exp(jnp.asarray(found.x)))
    last = as_objective(objective(best))
    result = fit(rule, last, _over(last, q), data, steps=steps, tolerance=tolerance, key=key)
    small = bool(np.max(np.abs(found.jac)) < 1e-3)  # nats for a change of the numbers by a factor e
    converged = (bool(found.success) or small) and result.reason == "converged"
    return Evidence(best, result, converged and bool(np.all(np.isfinite(found.x))), int(found.nfev))


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
    key: Any = None,
) -> Tuned:
    r"""Positive numbers by an optax optimiser, a step on the bound after every `between` steps of the rule.

    $\logη ← \logη + \text{optimiser}(∇_{\logη}\,\text{bound}(λ, η))$ at fixed λ. A Gaussian process keeps its sites
    while its kernel changes, which lets the optimiser take longer steps than a fixed q would (Adam et al., 2021).
    `objective(hyper)` builds the objective from the numbers; `batch_size` takes mini-batches for both. `start` is as in
    `fit`. The fit goes on at the numbers found: `fit(rule, objective(found.hyper), found.q, …)`.

    >>> import bayesrule as blr, jax.numpy as jnp, optax
    >>> from bayesrule.models import gp, kernels
    >>> x = jnp.linspace(0.0, 6.0, 40)
    >>> build = lambda h: gp.regression(kernels.RBF(1.0, h["scale"]), x, h["noise"])
    >>> start = {"scale": 0.2, "noise": 1.0}
    >>> found = tuned(blr.conjugate(), build, start, None, {"y": jnp.sin(2 * x)}, optimizer=optax.adam(0.1), steps=60)
    >>> bool(found.bounds[0] < found.bounds[-1]), bool(found.hyper["noise"] < 0.1)
    (True, True)
    """
    logs = jax.tree.map(lambda x: jnp.log(_positive(x, hyper)), hyper)
    first = as_objective(objective(jax.tree.map(jnp.exp, logs)))
    data = jax.tree.map(jnp.asarray, data)
    rows = first.rows(data) if data is not None else 0
    if batch_size is not None and not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size= is between 1 and the number of examples, {rows}, got {batch_size}.")
    if key is None:
        if rule.points.random or batch_size is not None or first.random:
            raise ValueError("This is random (sampled points or mini-batches): pass key=jax.random.key(…).")
        key = jax.random.key(0)
    built = partial(_built, objective, rows)
    state = rule.init(start, built(logs), key)
    order = jnp.full(rows if batch_size is not None else 0, -1)

    def once(carry: tuple, count: Array) -> tuple:
        logs, moments, state, order = carry
        here, now = built(logs), jax.random.fold_in(key, count)
        state = dataclasses.replace(state, q=_over(here, state.q))
        batch = data
        if batch_size is not None:
            batch, order = picked(here, data, key, order, count, batch_size)
        step = lambda turn, state: rule.step(here, state, batch, jax.random.fold_in(now, turn))[0]
        state = jax.lax.fori_loop(0, between, step, state)
        still = jax.lax.stop_gradient(state.q)

        def loss(logs: PyTree) -> Array:
            here = built(logs)
            return -rule.bound(here, _over(here, still), batch, jax.random.fold_in(now, between), aux=state.aux)

        value, slope = jax.value_and_grad(loss)(logs)
        updates, moments = optimizer.update(slope, moments, logs)
        return (jax.tree.map(jnp.add, logs, updates), moments, state, order), -value

    @jax.jit
    def every(carry: tuple) -> tuple:
        return jax.lax.scan(once, carry, jnp.arange(steps))

    (logs, _, state, _), bounds = every((logs, optimizer.init(logs), state, order))
    hyper = jax.tree.map(jnp.exp, logs)
    return Tuned(hyper, _over(built(logs), state.q), np.asarray(bounds))


@dataclass(frozen=True)
class Tuned:
    """What `tuned` found: the numbers, q beside them, and the bound (a mini-batch's estimate of it) at every step."""

    hyper: PyTree
    q: Any
    bounds: np.ndarray


def _positive(value: Any, hyper: PyTree) -> Array:
    value = jnp.asarray(value, float)
    if not bool(jnp.all(value > 0)):
        raise ValueError(f"Hyper-parameters are positive numbers, searched in logarithms, and {hyper} has others.")
    return value


def _built(objective: Callable[[PyTree], Any], rows: int, logs: PyTree) -> Objective:
    found = as_objective(objective(jax.tree.map(jnp.exp, logs)))
    return found.sized(rows) if rows else found


def _over(objective: Any, q: Any) -> Any:
    """q with its λ over the objective's own base measures: a process keeps its sites while its kernel changes."""
    if not isinstance(objective, Model) or not hasattr(q, "blocks"):
        return q
    own = objective.blocks
    return type(q)({name: block.over(own[name]) if name in own else block for name, block in q.blocks.items()})
