"""Empirical Bayes: prior precision, noise level and the like, learnt by the bound between fits of q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from .fitting import Result, fit
from .objective import as_objective
from .rule import Rule
from .running import run


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
        fitted = run(rule, here, rule.init(q, here), data, key, steps, tolerance)

        def loss(logs: Array) -> Array:
            # One more step, for how q itself depends on the numbers: at the fixed point of Newton's method its
            # derivative is the whole dependence, at a maximum of the bound that does not matter. Forward mode,
            # since the guard is a loop.
            here = built(logs)
            moved = rule.advance(here, jax.lax.stop_gradient(fitted), data, key)[0].q
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
    result = fit(rule, objective(best), q, data, steps=steps, tolerance=tolerance, key=key)
    small = bool(np.max(np.abs(found.jac)) < 1e-3)  # nats for a change of the numbers by a factor e
    converged = (bool(found.success) or small) and result.reason == "converged"
    return Evidence(best, result, converged and bool(np.all(np.isfinite(found.x))), int(found.nfev))
