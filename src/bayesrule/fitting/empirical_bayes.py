"""Empirical Bayes: prior precision, noise level and the like, learnt by the bound between fits of q, or steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from ..factor_graph.model import Model
from ..families.base import Family
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..objectives.regularizers import Regularizer, as_regularizer
from ..rule.rule import Rule
from ..steps.step import Step
from .fit import fit
from .loop import picked
from .loop import run as run_to_end
from .progress import one_blas_thread
from .result import Result

_ROUGH = 1e-2  # nats, while the numbers are still far off
_REACH = 1e6  # how far a number may go in one search, as a factor


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
    within: float | None = None,
    settled: float = 1e-14,
    key: Any = None,
    run: Callable[..., Result] = fit,
) -> Evidence:
    """Maximise the evidence (its lower bound) over positive numbers that the objective depends on.

    `objective(hyper)` builds the objective from a pytree of positive numbers; `hyper` is where to start.
    Each evaluation fits q anew, from the last one, and differentiates the bound there. The numbers are
    searched in logarithms, by scipy's L-BFGS-B. Under the delta method the bound is Laplace's evidence,
    and for Gaussian linear models the exact one. A `jax.tree_util.Partial` of a function and its arrays as
    `objective` is compiled once for all arrays of the same shapes. `within` keeps every number within that factor of
    where it starts, `settled` is how little of itself the bound may still rise by at the end, and `run` takes the
    place of `fit` for the last fit.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> y = jnp.array([3.0, -2.0, 2.5, -3.5])                       # y ~ N(θ, 1), one θ each
    >>> normal = lambda f, y: 0.5 * (f - y) ** 2 + 0.919
    >>> model = lambda h: blr.Objective(lambda w, e: normal(w[e[0]], e[1]), size=4, regularizer=h["prior"])
    >>> found = empirical_bayes(blr.laplace(), model, {"prior": 1.0}, jnp.zeros(4), (jnp.arange(4), y))
    >>> round(float(found.hyper["prior"]), 3)                       # 1 / (mean of y² − 1)
    0.145
    """
    if rule.points.random and key is None:
        raise ValueError("This rule samples its points: pass key=jax.random.key(…).")
    key = jax.random.key(0) if key is None else key
    data = jax.tree.map(jnp.asarray, data)
    q, built = None, objective if isinstance(objective, Partial) else Partial(objective)

    def scored(logs: PyTree) -> tuple[Array, PyTree]:
        nonlocal q
        if q is None:
            q = start if isinstance(start, Family) else rule.init(start, _at(built, logs)).q
        new, value, slope = _evaluated(rule, built, logs, q, data, key, tolerance, steps=steps)
        if bool(jnp.isfinite(value)):
            q = new
        return value, slope

    found = highest(scored, hyper, evaluations=evaluations, within=within, settled=settled)
    last = as_objective(objective(found.hyper))
    result = run(rule, last, _over(last, q), data, steps=steps, tolerance=tolerance, key=key)
    return Evidence(found.hyper, result, found.converged and result.reason == "converged", found.evaluations)


@partial(jax.jit, static_argnames="steps")
def _evaluated(
    rule: Rule, objective: Partial, logs: PyTree, q: Any, data: PyTree, key: Any, tolerance: Any, *, steps: int
) -> tuple[Any, Array, PyTree]:
    """The fit at these numbers, its bound, and the gradient of that."""
    here = _at(objective, logs)
    fitted = run_to_end(rule, here, rule.init(_over(here, q), here), data, key, steps, tolerance)

    def bound(logs: PyTree) -> Array:
        # One more step, for how q itself depends on the numbers: at the fixed point of Newton's method its
        # derivative is the whole dependence, at a maximum of the bound that does not matter. Forward mode,
        # since the guard is a loop.
        here = _at(objective, logs)
        still = jax.lax.stop_gradient(fitted)
        still = dataclasses.replace(still, q=_over(here, still.q))
        moved = rule.advance(here, still, data, key)[0].q
        return rule.bound(here, moved, data, key, aux=fitted.aux)

    return fitted.q, bound(logs), jax.jacfwd(bound)(logs)


def _at(objective: Callable[[PyTree], Any], logs: PyTree) -> Any:
    return as_objective(objective(jax.tree.map(jnp.exp, logs)))


@dataclass(frozen=True)
class Highest:
    """What `highest` found: the numbers, the score there, and how the search ended."""

    hyper: PyTree
    value: float
    converged: bool
    evaluations: int


def highest(
    scored: Callable[[PyTree], tuple[Any, PyTree]],
    hyper: PyTree,
    *,
    evaluations: int = 100,
    within: float | None = None,
    held: Sequence[str] = (),
    settled: float = 1e-14,
) -> Highest:
    """Positive numbers at which a score is highest, searched in logarithms by scipy's L-BFGS-B.

    `scored(logs)` gives the score and its slope in the logarithms. `within` keeps every number within that factor of
    where it starts; those of a dict whose names are `held` stay as they are. The search ends where the score rises by
    less than `settled` of itself.

    >>> import jax, jax.numpy as jnp
    >>> found = highest(jax.value_and_grad(lambda logs: -((logs - 1.0) ** 2)), 1.0)
    >>> round(float(found.hyper), 3)
    2.718
    """
    flat, unflatten = ravel_pytree(jax.tree.map(lambda x: jnp.asarray(x, float), hyper))
    if flat.size == 0 or not bool(jnp.all(flat > 0)):
        raise ValueError(f"Hyper-parameters are positive numbers, searched in logarithms, and {hyper} has others.")

    def lower(logs: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = scored(unflatten(jnp.asarray(logs)))
        slope = np.asarray(ravel_pytree(slope)[0], float)
        if not (np.isfinite(float(value)) and np.all(np.isfinite(slope))):
            return np.inf, np.zeros_like(logs)
        return -float(value), -slope

    from scipy.optimize import minimize

    first = np.log(np.asarray(flat, float))
    reach = np.full(len(first), np.inf if within is None else np.log(within))
    if held:
        reach[np.asarray(ravel_pytree({k: jnp.full(jnp.shape(v), k in held) for k, v in hyper.items()})[0], bool)] = 0.0
    bounds = list(zip(first - reach, first + reach, strict=True))
    options = {"maxfun": evaluations, "ftol": settled, "gtol": 1e-6}
    with one_blas_thread():
        found = minimize(lower, first, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    small = bool(np.max(np.abs(found.jac)) < 1e-3)  # nats for a change of the numbers by a factor e
    converged = (bool(found.success) or small) and bool(np.all(np.isfinite(found.x)))
    best = unflatten(jnp.exp(jnp.asarray(found.x)))
    return Highest(best, -float(found.fun), converged, int(found.nfev))


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
    r"""The prior's positive numbers, by the evidence of the conjugate model that q's own messages make.

    At a fixed point of the rule $λ = λ_0(η) + \tildeλ$, the prior's and the likelihood's. With $\tildeλ$ held, the
    evidence $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$ costs no look at the data: it is maximised over η between
    fits of q, until neither moves. Its slope $−∂_ηE_{q}R_η$ is the bound's, so that both have the same maximum. Under
    the delta method these are MacKay's updates. `prior(hyper)` is what `Objective` takes as `regularizer=` (define it
    once, outside of loops); for numbers that the likelihood depends on there is `empirical_bayes`. `belief(hyper)`, a
    log density, is added to the evidence, which may have no maximum of its own (classes that can be separated); the
    numbers of a dict whose names are `held` stay as they are. Other options go to `fit`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> y = jnp.array([3.0, -2.0, 2.5, -3.5])                       # y ~ N(θ, 1), one θ each
    >>> normal = lambda w, e: 0.5 * (w[e[0]] - e[1]) ** 2 + 0.919
    >>> model = blr.Objective(normal, size=4)
    >>> found = matched(blr.laplace(), model, lambda h: h["prior"], {"prior": 1.0}, jnp.zeros(4), (jnp.arange(4), y))
    >>> round(float(found.hyper["prior"]), 3), found.converged      # 1 / (mean of y² − 1)
    (0.145, True)
    """
    still, wanted = math.sqrt(math.sqrt(jnp.finfo(jnp.result_type(float)).eps)), max(tolerance, _ROUGH)
    look, moved, result = 0, math.inf, None
    while result is None or look < rounds:
        look += 1
        regularizer = as_regularizer(prior(hyper), None)
        here = dataclasses.replace(objective, regularizer=regularizer)
        result = run(rule, here, start, data, steps=steps, tolerance=wanted, **options)
        message = likelihood_message(regularizer, result.q)
        better, _ = conjugate_evidence(prior, hyper, result.q, message, belief=belief, held=held)
        pairs = zip(jax.tree.leaves(better), jax.tree.leaves(hyper), strict=True)
        moved = max(float(np.max(np.abs(np.log(np.asarray(new) / np.asarray(old))))) for new, old in pairs)
        if result.reason not in ("converged", "steps") or (moved < still and wanted == tolerance):
            break
        # A rough q is enough to move the numbers on, and the more so the further they move.
        wanted = tolerance if moved < 0.1 else wanted
        if look < rounds:
            hyper, start = better, result.q
    return Evidence(hyper, result, moved < still and result.reason == "converged", look)


@jax.jit
def likelihood_message(regularizer: Regularizer, q: Any) -> PyTree:
    """The likelihood's share of λ: what is left of it without the prior's."""
    return jax.tree.map(jnp.subtract, q.natural(), _prior_natural(regularizer, q))


def conjugate_evidence(
    prior: Callable[[PyTree], Any],
    hyper: PyTree,
    q: Any,
    message: PyTree,
    likelihood: Callable[[PyTree, PyTree], tuple[PyTree, Array]] | None = None,
    *,
    belief: Callable[[PyTree], Any] | None = None,
    held: Sequence[str] = (),
) -> tuple[PyTree, float]:
    r"""The positive numbers η that maximise $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$, and log Z there.

    Searched in logarithms from `hyper`. `likelihood(hyper, message)` gives the message and the logarithm of the
    likelihood's constant where these depend on the numbers too. q says which family it is; the numbers of a dict whose
    names are `held` stay as they are. `belief(hyper)` is a log density that is added.
    """
    scored = lambda logs: _conjugate_evidence(q, message, logs, prior, likelihood, belief)
    found = highest(scored, hyper, within=_REACH, held=held, settled=1e-15)
    return found.hyper, found.value


def _prior_natural(regularizer: Regularizer, q: Any) -> PyTree:
    """λ₀: what the prior adds to λ, the negative of its part of ∇_μ E_q ℓ̄."""
    gradient, curvature = regularizer.derivatives(q)
    return jax.tree.map(jnp.negative, q.natural_step(Step(gradient, curvature, 1.0, 1.0, 1.0)))


@partial(jax.jit, static_argnames=("prior", "likelihood", "belief"))
def _conjugate_evidence(
    q: Any, message: PyTree, logs: PyTree, prior: Any, likelihood: Any, belief: Any
) -> tuple[Array, PyTree]:
    """log Z(η), and its slope in log η: at the conjugate posterior q's own slope vanishes."""

    def value(logs: PyTree) -> Array:
        hyper = jax.tree.map(jnp.exp, logs)
        regularizer = as_regularizer(prior(hyper), None)
        said, constant = (message, 0.0) if likelihood is None else likelihood(hyper, message)
        constant = constant if belief is None else constant + belief(hyper)
        natural = jax.tree.map(jnp.add, said, _prior_natural(regularizer, q))
        posterior = jax.lax.stop_gradient(q.with_natural(natural))
        products = jax.tree.map(jnp.vdot, said, posterior.expectation())
        return sum(jax.tree.leaves(products)) + constant + posterior.entropy() - regularizer.expected(posterior)

    return jax.value_and_grad(value)(logs)


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


def _built(objective: Callable[[PyTree], Any], rows: int, logs: PyTree) -> AbstractObjective:
    found = as_objective(objective(jax.tree.map(jnp.exp, logs)))
    return found.with_size(rows) if rows else found


def _over(objective: Any, q: Any) -> Any:
    """q with its λ over the objective's own base measures: a process keeps its sites while its kernel changes."""
    if not isinstance(objective, Model) or not hasattr(q, "blocks"):
        return q
    own = objective.blocks
    return type(q)({name: block.with_base_of(own[name]) if name in own else block for name, block in q.blocks.items()})
