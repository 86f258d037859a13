"""infer(): a posterior for any log density, without tuning, and a verdict on it.

Several starts are taken to their modes; the modes are told apart; a Gaussian is moved by the rule from each of them to
the optimum at fixed quasi-Monte Carlo points; importance weights of fresh draws judge it; and where that is not good
enough, a mixture is fitted to the weighted draws, and judged in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..families.gaussian.full import Gaussian
from ..numerics.checks import positive_int
from ..numerics.random import Key
from .constraints import Constrained, resolve, start_values
from .density import Density, constrained, generator_of, log_densities
from .gaussian import GaussianFit, fit_gaussian, place, start_of, variational_rule
from .importance import Importance, Shift, importance, shift_of
from .mixture import Components, components_of, fit_mixture
from .modes import Mode, climb, draw_starts, tell_apart
from .posterior import Posterior, Record, columns_of, ravelled, theta_names
from .verdict import Judgement, judge, sentence

DRAWS = 4000
"""How many fresh draws judge an approximation."""

PRODUCTS = 2_000_000
"""The budget: how many products of a Hessian with a vector a fit may compute, about."""

MOST_NUMBERS = 2000
"""Above so many numbers a full Gaussian, with its Hessians, is out of reach."""

_MOST_MODES = 6
_BEHIND = 7.0  # A Gaussian whose bound is so many nats behind the best has less than a thousandth of its weight.


def infer(
    log_density: Callable[..., Any],
    start: PyTree,
    *,
    key: Key,
    constraints: Mapping[str, Any] | None = None,
    args: tuple[PyTree, ...] = (),
    starts: int | None = None,
    tolerance: float = 1e-4,
    products: int = PRODUCTS,
    progress: bool | Callable[[str], None] = False,
) -> Posterior:
    r"""A posterior for any log density, without tuning: draws of it, and a verdict on how far to trust them.

    Several starts are taken to their modes by Newton's method; from each mode a Gaussian is moved by the rule over
    fixed quasi-Monte Carlo points, $S ← (1−ρ)S + ρE_q∇^2\barℓ$, $m ← m − ρS^{-1}E_q∇\barℓ$ with $\barℓ = −\log p$, until
    it has converged; importance weights of fresh draws say how good it is. If it is not good enough, a mixture of
    Gaussians is fitted to the weighted draws.

    Args:
        log_density: log p(parameters, *args) up to a constant: a JAX function of a pytree. With constraints it is the
            density of the constrained parameters; the Jacobian is added here.
        start: The parameters to start from, or their shapes (`jax.ShapeDtypeStruct`, or tuples); a `Gaussian` over the
            unconstrained parameters is taken as found, without a search for modes.
        key: A JAX key, for the starts and the fresh draws.
        constraints: NumPyro's constraints, or their names, by the parameter's path: `{"scale": "positive"}`.
        args: Data, given to `log_density` after the parameters. A second call with other data of the same shapes
            compiles nothing.
        starts: How many starts to take to a mode; by default eight, and fewer with many parameters.
        tolerance: The nats that q may be away from the optimum at its points.
        products: A budget: how many products of a Hessian with a vector to compute, about.
        progress: True shows what is being done; a function is called with a line of text.

    Returns:
        The `Posterior`: `trust`, `verdict`, `samples(key, n)`, `summary()`, `q`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jnp.array([1.2, 0.4, 2.1, 0.9, 1.5])
    >>> def log_density(p):
    ...     return jnp.sum(-0.5 * (y - p["mean"]) ** 2) - 0.5 * p["mean"] ** 2
    >>> posterior = blr.infer(log_density, {"mean": jnp.zeros(())}, key=jax.random.key(0))
    >>> posterior.trust, round(float(posterior.q.mean["mean"]), 4)
    ('trust', 1.0167)
    """
    q = start if isinstance(start, Gaussian) else None
    values, has_values = start_values(start.mean if q is not None else start)
    resolved = resolve(constraints, values)
    wrapped = Constrained(log_density, resolved)
    if q is not None:
        theta, given = values, None
    elif has_values:
        theta = jax.tree.map(jnp.asarray, wrapped.unconstrain(values))
        given = ravelled_or_raise(theta, values)
    else:
        theta = _unconstrained_zeros(wrapped, values)
        given = None
    like = jax.tree.map(jnp.zeros_like, theta)
    density = Density(wrapped, tuple(args), like, wrapped.constrain)
    return infer_density(
        density, key, given=given, q=q, starts=starts, tolerance=tolerance, products=products, progress=progress
    )


def ravelled_or_raise(theta: PyTree, values: PyTree) -> np.ndarray:
    """The start as a vector; an error where a value is not inside of its constraint."""
    for (path, leaf), value in zip(
        jax.tree_util.tree_flatten_with_path(theta)[0], jax.tree.leaves(values), strict=True
    ):
        if not np.all(np.isfinite(np.asarray(leaf))):
            from .constraints import path_of

            raise ValueError(f"The start of {path_of(path)!r}, {np.asarray(value)}, is not inside of its constraint.")
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(theta)])


def _unconstrained_zeros(wrapped: Constrained, zeros: PyTree) -> PyTree:
    """Zeros of the unconstrained shapes, from the shapes of the values: a simplex of three has two numbers."""
    bijections = wrapped._bijections()
    from .constraints import path_of

    def leaf(path: Any, value: Any) -> Any:
        transform = bijections.get(path_of(path))
        return value if transform is None else jnp.zeros(transform.inverse_shape(value.shape), value.dtype)

    return jax.tree_util.tree_map_with_path(leaf, zeros)


def infer_density(
    density: Density,
    key: Key,
    *,
    given: np.ndarray | None = None,
    q: Gaussian | None = None,
    starts: int | None = None,
    tolerance: float = 1e-4,
    products: int = PRODUCTS,
    progress: bool | Callable[[str], None] = False,
    kind: Callable[..., Any] = Posterior,
    advice: str | None = None,
    explain: Callable[[], str | None] | None = None,
) -> Any:
    """The posterior of a density: what `infer` does once the density is there.

    Args:
        density: the density.
        key: a JAX key.
        given: a start, ravelled.
        q: a Gaussian to start from, without a search for modes.
        starts, tolerance, products, progress: as for `infer`.
        kind: the class of the posterior.
        advice: what to do where the answer is not good.
        explain: says what is wrong with the density where it is zero at every start, or None.
    """
    size = density.size
    if size > MOST_NUMBERS:
        raise ValueError(
            f"infer moves a full Gaussian, and {size} numbers are too many for its Hessians (at most {MOST_NUMBERS}): "
            "use blr.fit with a diagonal family, such as blr.ivon, or NUTS."
        )
    count = _number_of_starts(size) if starts is None else positive_int("starts", starts, meaning="how many starts")
    say = _speaker(progress)
    start_key, fit_key, draw_key = jax.random.split(key, 3)
    modes: list[Mode] = []
    if q is None:
        say(f"{count} starts")
        positions = draw_starts(density, start_key, count, given)
        if not len(positions):
            reason = None if explain is None else explain()
            raise ValueError(
                "The log density is not a finite number at any start"
                + (f": {reason}" if reason else ". Check the data for NaN, and that the start is inside its support.")
            )
        modes = tell_apart(climb(density, positions))
        if not modes:
            raise ValueError("The derivatives of the log density are not finite numbers at any start.")
        say(f"{len(modes)} mode{'s' * (len(modes) > 1)}")
    beginnings = [q] if q is not None else [start_of(density, mode) for mode in modes[:_MOST_MODES]]
    fits: list[GaussianFit] = []
    for number, (beginning, own) in enumerate(zip(beginnings, jax.random.split(fit_key, len(beginnings)), strict=True)):
        say(f"a Gaussian at mode {number + 1} of {len(beginnings)}")
        fits.append(
            fit_gaussian(
                density,
                beginning,
                own,
                samples=_first_points(size),
                tolerance=tolerance,
                steps=200,
                products=products // len(beginnings),
            )
        )
    fits = _distinct(fits)
    if not fits:
        raise ValueError(
            "No Gaussian has a finite bound: the density is zero, or overflows, close to each of its modes. Reparametrise "
            "the model so that its support is the whole space."
        )
    best, rng, names = fits[0], generator_of(draw_key), _names(density)
    tried, spent = ["Gaussian"], sum(fit.products for fit in fits)
    say("importance weights")
    components = components_of(best.q)
    points = components.draw(rng, DRAWS)
    weighted = importance(log_densities(density, points) - components.log_prob(points))
    judgement = judge(weighted, _shift(density, points, weighted), names)
    if judgement.trust != "trust" or judgement.refined or len(fits) > 1:
        say("a mixture of Gaussians")
        tried.append("Mixture")
        bounds = np.array([fit.bound for fit in fits])
        other = fit_mixture(density, [place(fit.q) for fit in fits], bounds, rng, draws=DRAWS, rounds=20)
        judged = judge(other[2], _shift(density, other[1], other[2]), names)
        if len(fits) > 1 or _rank(judged, other[2]) > _rank(judgement, weighted):
            components, weighted, judgement = other[0], other[2], judged
    agreed = sum(mode.starts for mode in modes if mode.converged) if modes else 1
    family = "Gaussian" if len(components.weights) == 1 else f"mixture of {len(components.weights)} Gaussians"
    verdict = sentence(
        judgement,
        weighted,
        family=family,
        tried=tried,
        agreed=agreed,
        starts=count if q is None else 1,
        modes=len([mode for mode in modes if mode.converged]),
        advice=advice or _ADVICE,
    )
    record = Record(
        weighted,
        judgement,
        verdict,
        tuple(modes),
        count if q is None else 1,
        agreed,
        best.samples,
        best.steps,
        best.converged,
        (best.mean_error, best.width_error),
        spent,
        tuple(tried),
        best.bound,
    )
    return kind(density, components, record, variational_rule(best.samples))


_ADVICE = (
    "Reparametrise (for a hierarchy, the other centring), take more starts, or sample with NUTS from "
    "posterior.nuts_start(key)."
)


def _rank(judgement: Judgement, weighted: Importance) -> tuple[int, float]:
    order = {"trust": 2, "means only": 1, "do not trust": 0}[judgement.trust]
    return 2 * order - int(judgement.refined), weighted.effective


def _number_of_starts(size: int) -> int:
    return 8 if size <= 64 else 4 if size <= 300 else 3


def _first_points(size: int) -> int:
    return 64 if size <= 64 else 32 if size <= 200 else 16


def _distinct(fits: list[GaussianFit]) -> list[GaussianFit]:
    """The Gaussians that have weight beside the best, each once, the best first."""
    ordered = sorted((fit for fit in fits if np.isfinite(fit.bound)), key=lambda fit: -fit.bound)
    kept: list[GaussianFit] = []
    for fit in ordered:
        if fit.bound < ordered[0].bound - _BEHIND:
            continue
        same = False
        for other in kept:
            one, two = place(fit.q), place(other.q)
            distance = np.linalg.solve(two.root.T, one.mean - two.mean)
            same |= float(distance @ distance) < 0.1 * len(distance) ** 0.5 and abs(fit.bound - other.bound) < 0.1
        if not same:
            kept.append(fit)
    return kept


def _names(density: Density) -> list[str]:
    shapes = jax.eval_shape(lambda theta: density.constrain(theta, *density.arguments), density.like)
    values = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), shapes)
    return theta_names(density) + columns_of(values)[1]


def _shift(density: Density, points: np.ndarray, weighted: Importance) -> Shift:
    """The shifts of all numbers, unconstrained and constrained."""
    values = columns_of(constrained(density, points))[0]
    numbers = np.concatenate([points, np.where(np.isfinite(values), values, 0.0)], axis=1)
    return shift_of(numbers, weighted.log_weights)


def _speaker(progress: bool | Callable[[str], None]) -> Callable[[str], None]:
    if callable(progress):
        return progress
    if not progress:
        return lambda text: None
    began = time.monotonic()

    def speak(text: str) -> None:
        from rich.console import Console

        Console(stderr=True).print(f"{time.monotonic() - began:6.1f} s  {text}")

    return speak


__all__ = ["infer", "infer_density", "ravelled"]
