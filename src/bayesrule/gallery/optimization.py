"""Pictures of the optimisers, each from a run of the rule. The docstring of a picture is its caption on the page."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families.gaussian.full import Gaussian
from ..fitting.fit import fit
from ..fitting.minima import minima
from ..models.landscapes import himmelblau
from ..objectives.objective import as_objective
from ..recipes import optimization as recipes
from ..rule.rule import Rule
from .style import BAYESIAN, INK, PLAIN, QUIET, Picture, contours, label, panels, plane, posterior, rings, trail
from .trace import trace_steps

START = np.array([-1.9, 0.75])
X, Y = (-2.6, 1.4), (-1.15, 1.15)


def funnel(theta: Float[Array, "2"]) -> Float[Array, ""]:
    """e^{x + 3y − 0.1} + e^{x − 3y − 0.1} + e^{−x − 0.1}: convex and lopsided (Boyd and Vandenberghe)."""
    x, y = theta[0], theta[1]
    return jnp.exp(x + 3 * y - 0.1) + jnp.exp(x - 3 * y - 0.1) + jnp.exp(-x - 0.1)


def _path(rule: Rule, count: int) -> np.ndarray:
    return np.vstack([START, trace_steps(rule, funnel, jnp.asarray(START), steps=count)])


def _minimum() -> np.ndarray:
    return np.asarray(fit(recipes.newton(), funnel, jnp.zeros(2), steps=20).q.mean)


LEVELS = 2.56 + np.geomspace(0.05, 14, 11)


def gradient_descent() -> Picture:
    """Thirty steps on an asymmetric bowl; the cross is its minimum. The covariance of q is fixed, so every step is a
    multiple of the gradient, short where the bowl is flat. Momentum overshoots the minimum and comes back."""
    rule = recipes.gradient_descent(0.03)
    figure, (axes,) = panels(1)
    plane(axes, X, Y)
    contours(axes, funnel, LEVELS)
    trail(axes, _path(recipes.gradient_descent(0.03, momentum=0.7), 30), BAYESIAN, "o")
    trail(axes, _path(rule, 30), PLAIN, "D")
    axes.plot(*_minimum(), "+", color=INK, ms=10, mew=1.5, zorder=9)
    label(axes, -2.5, -0.85, "gradient descent", PLAIN)
    label(axes, -2.5, -1.03, "with momentum γ = 0.7", BAYESIAN)
    label(axes, START[0], START[1] + 0.09, "start", INK, ha="center")
    return Picture(figure, rule)


def newton() -> Picture:
    """Six steps of Newton's method, and thirty of gradient descent, which has not converged. The precision of q becomes
    the Hessian, so its ellipse (one standard deviation) has the shape of the bowl."""
    rule = recipes.newton()
    figure, (axes,) = panels(1)
    plane(axes, X, Y)
    contours(axes, funnel, LEVELS)
    trail(axes, _path(recipes.gradient_descent(0.03), 30), QUIET, "D", size=2.5, lw=0.9)
    path, precisions = trace_steps(rule, funnel, jnp.asarray(START), steps=6, read=lambda q: (q.mean, q.precision))
    rings(axes, path[-1], np.linalg.inv(precisions[-1]), BAYESIAN, widths=(1,), fill=0.15)
    trail(axes, np.vstack([START, path]), BAYESIAN, size=5)
    label(axes, -2.5, -0.85, "Newton's method", BAYESIAN)
    label(axes, -2.5, -1.03, "gradient descent", QUIET)
    label(axes, START[0], START[1] + 0.09, "start", INK, ha="center")
    return Picture(figure, rule)


def von() -> Picture:
    """Newton's method without the delta method: gradients and Hessians are averaged over samples from q. It starts far
    away and ends on the posterior (grey), to the left of the minimum, away from the steep side."""
    rule = recipes.von(0.2, samples=20)
    figure, (axes,) = panels(1)
    plane(axes, (-3.6, 1.6), (-1.45, 1.45))
    posterior(axes, funnel)
    keys = jax.random.split(jax.random.key(0), 60)
    first = Gaussian(jnp.array([-2.6, 0.9]), jnp.diag(jnp.array([30.0, 30.0])))
    means, covariances = trace_steps(rule, funnel, first, steps=60, keys=keys, read=lambda q: (q.mean, q.covariance()))
    means = np.vstack([first.mean, means])
    covariances = np.concatenate([np.asarray(first.covariance())[None], covariances])
    axes.plot(*means.T, color=BAYESIAN, lw=0.8, alpha=0.6)
    for count in (0, 3, 6, 10, 60):
        last = count == 60
        rings(axes, means[count], covariances[count], BAYESIAN, widths=(1, 2) if last else (1,), fill=0.08)
        axes.plot(*means[count], "o", color=BAYESIAN, ms=6 if last else 4, mec="white", mew=0.8)
    minimum = _minimum()
    axes.plot(*minimum, "D", color=PLAIN, ms=6, mec="white", mew=1, zorder=6)
    label(axes, minimum[0] + 0.12, minimum[1] - 0.03, "minimum", PLAIN, va="top")
    label(axes, means[0, 0], means[0, 1] + 0.24, "start", BAYESIAN, ha="center")
    label(axes, -3.5, -1.2, "q after 3, 6, 10 and 60 steps", BAYESIAN)
    return Picture(figure, rule)


def multimodal() -> Picture:
    """Eight components take Newton-like steps on Himmelblau's function and repel each other. A converged component is
    recorded and restarted elsewhere; the numbers are the shares of all starts that led to each of the four minima."""
    low, high = jnp.full(2, -6.0), jnp.full(2, 6.0)
    rule = recipes.multimodal(0.8, components=8, bounds=(low, high))
    state = rule.init(None, himmelblau, jax.random.key(2))

    @jax.jit
    def run(state: object) -> tuple[Any, ...]:
        def body(state: Any, _: None) -> tuple[Any, ...]:
            state = rule.step(himmelblau, state)[0]
            return state, (state.q.components.mean, state.search.ages)

        return jax.lax.scan(body, state, None, length=90)

    last, (means, ages) = run(state)
    figure, (axes,) = panels(1, size=(5.2, 3.8))
    plane(axes, (-6, 6), (-6, 6))
    contours(axes, himmelblau, -200 + np.geomspace(4, 1500, 10))
    means, ages = np.concatenate([state.q.components.mean[None], means]), np.asarray(ages)
    for k in range(means.shape[1]):
        begins = [0, *(np.flatnonzero(ages[1:, k] <= ages[:-1, k]) + 2)]
        for begin, end in zip(begins, [*begins[1:], len(means)], strict=True):
            path = means[begin:end, k]
            axes.plot(*path.T, color=BAYESIAN, lw=0.9, alpha=0.55 if begin == 0 else 0.25)
            axes.plot(*path[0], "o", color=BAYESIAN, ms=4 if begin == 0 else 2.5, mew=0, alpha=1 if begin == 0 else 0.5)
    for minimum in minima(rule, as_objective(himmelblau), last, None):
        x, y = minimum.position
        axes.plot(x, y, "D", color=PLAIN, ms=8, mec="white", mew=1, zorder=6)
        label(axes, x, y + 0.5, f"{minimum.weight:.0%}", PLAIN, ha="center")
    return Picture(figure, rule)
