"""Pictures of the deep-learning algorithms, each from a run of the rule. The docstring of a picture is its caption."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families.gaussian.diagonal import DiagonalGaussian
from ..objectives.objective import Objective
from ..recipes import deep_learning as recipes
from ..rule.rule import Rule
from .style import (
    BAYESIAN,
    INK,
    PLAIN,
    QUIET,
    Picture,
    contours,
    label,
    panels,
    plane,
    posterior,
    rings,
    stacked,
    trail,
)
from .trace import trace_steps


def _batches(data: tuple[np.ndarray, ...], size: int, steps: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """A batch for every step, drawn without replacement within each pass over the data."""
    random, rows = np.random.default_rng(seed), len(data[0])
    passes = -(-steps * size // rows)
    order = np.concatenate([random.permutation(rows) for _ in range(passes)])[: steps * size].reshape(steps, size)
    return tuple(column[order] for column in data)


# Linear regression: intercept and slope.


@cache
def _line_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.uniform(-1.5, 2.5, 60)
    return np.stack([np.ones(60), x], axis=1), 0.5 + 1.2 * x + 0.7 * random.normal(size=60)


def _squared_error(w: Float[Array, "2"], example: tuple[Any, ...]) -> Float[Array, ""]:
    x, y = example
    return 0.5 * (x @ w - y) ** 2


def sgd() -> Picture:
    """A line is fitted to sixty points in 120 steps. With one point per step the path ends in random moves around the
    minimum, as large as the rate; with all points in every step and the same rate it converges smoothly."""
    data, start = _line_data(), np.array([1.4, -0.5])
    rule, objective = recipes.sgd(0.15), Objective(_squared_error, size=60)
    noisy = trace_steps(rule, objective, jnp.asarray(start), steps=120, batches=_batches(data, 1, 120))
    full_batch = trace_steps(rule, objective, jnp.asarray(start), steps=120, data=data)
    figure, (axes,) = panels(1)
    plane(axes, (-0.6, 1.9), (-0.8, 1.9), ("intercept", "slope"))
    mean_loss = lambda w: jnp.mean(jax.vmap(lambda x, y: _squared_error(w, (x, y)))(*map(jnp.asarray, data)))
    contours(axes, mean_loss, 12)
    trail(axes, np.vstack([start, noisy]), PLAIN, "D", size=2, lw=0.8)
    trail(axes, np.vstack([start, full_batch]), BAYESIAN, size=4, lw=1.8)
    label(axes, start[0], start[1] - 0.16, "start", INK, ha="center")
    label(axes, -0.53, -0.5, "one point a step", PLAIN)
    label(axes, -0.53, -0.7, "all points in every step", BAYESIAN)
    return Picture(figure, rule)


def _valley(theta: Float[Array, "2"], _: Any) -> Float[Array, ""]:
    """A quadratic with curvatures 0.1 and 3."""
    return 0.5 * (0.1 * theta[0] ** 2 + 3.0 * theta[1] ** 2)


def adam() -> Picture:
    """Sixty steps in a valley whose curvature is thirty times larger across than along it. SGD's steps shrink with the
    gradient; RMSprop and Adam divide by the root of its averaged square, so both directions advance equally fast."""
    start, objective, data = np.array([-3.0, 1.1]), Objective(_valley, size=1), np.zeros((1, 1))
    rules = {
        "SGD": (recipes.sgd(0.3), QUIET, "s"),
        "RMSprop": (recipes.rmsprop(0.05), PLAIN, "D"),
        "Adam": (recipes.adam(0.15), BAYESIAN, "o"),
    }
    figure, (axes,) = panels(1)
    plane(axes, (-3.5, 1.3), (-1.4, 1.5))
    contours(axes, lambda t: _valley(t, None), 12)
    for index, (name, (rule, color, marker)) in enumerate(rules.items()):
        path = trace_steps(rule, objective, jnp.asarray(start), steps=60, data=data)
        trail(axes, np.vstack([start, path]), color, marker, size=2.5)
        label(axes, 0.35, -0.95 - 0.16 * index, name, color)
    axes.plot(0, 0, "+", color=INK, ms=9, mew=1.5)
    label(axes, start[0], start[1] + 0.12, "start", INK, ha="center")
    return Picture(figure, rules["Adam"][0])


def dropout() -> Picture:
    """Left: which of the forty hidden units were kept in each of the first thirty steps. Right: the trained network
    with fifty new masks, and their mean; the variation between masks is dropout's estimate of its uncertainty."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(-2.5, -0.4, 24), random.uniform(1.2, 2.6, 16)])
    y = np.sin(1.6 * x) + 0.12 * random.normal(size=40)
    start = {"first": random.normal(size=(2, 40)), "last": 0.3 * random.normal(size=(40, 1))}

    def output(w: Any, x: Any) -> Array:
        return jnp.sum(jnp.tanh(jnp.stack([jnp.ones_like(x), x]) @ w["first"]) @ w["last"])

    rule = recipes.dropout(0.05, {"first": 1.0, "last": 0.9})
    objective = Objective(lambda w, e: 0.5 * (output(w, e[0]) - e[1]) ** 2, size=40)
    keys, batches = jax.random.split(jax.random.key(1), 4000), _batches((x, y), 10, 4000)
    state = rule.init(jax.tree.map(jnp.asarray, start), objective)
    run = jax.jit(
        lambda state, inputs: jax.lax.scan(lambda s, x: (rule.step(objective, s, *x)[0], None), state, inputs)[0]
    )
    q = run(state, (jax.tree.map(jnp.asarray, batches), keys)).q
    draw_masks = jax.jit(jax.vmap(lambda key: rule.points.at(state.q, key).factors[0]["last"][0, :, 0]))
    masks = np.asarray(draw_masks(jax.random.clone(keys[:30]))) > 0
    grid = np.linspace(-3.2, 3.4, 160)
    curve_keys = jax.random.split(jax.random.key(2), 50)
    curve = lambda w: jax.vmap(lambda x: output(w, x))(jnp.asarray(grid))
    curves = np.asarray(jax.jit(jax.vmap(lambda key: curve(_first(rule.points.at(q, key).theta))))(curve_keys))
    figure, (left, right) = panels(1, 1.9)
    left.imshow(~masks.T, cmap="Blues_r", vmin=-0.6, vmax=1, aspect="auto", interpolation="none")
    left.set(xlabel="step", ylabel="hidden unit", xticks=[0, 10, 20], yticks=[])
    right.plot(grid, curves.T, color=BAYESIAN, lw=0.6, alpha=0.25)
    right.plot(grid, curves.mean(axis=0), color=BAYESIAN, lw=2)
    right.plot(x, y, "o", color=INK, ms=3.5, mec="white", mew=0.5)
    right.set(xlabel="$x$", xlim=(-3.2, 3.4), ylim=(-2.2, 2.2), yticks=[-2, -1, 0, 1, 2])
    return Picture(figure, rule)


def _first(tree: Any) -> Any:
    """Every leaf at the first, and here the only, point."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


# Binary weights.

SIGNS = np.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])  # The true weights; the last input is irrelevant.


@cache
def _binary_weights_data() -> tuple[np.ndarray, np.ndarray]:
    """Labels from five binary weights; the sixth input is irrelevant."""
    x = np.random.default_rng(5).normal(size=(80, 6))
    return x, np.sign(x @ SIGNS + 0.8 * np.random.default_rng(6).normal(size=80))


def _logistic_loss(w: Float[Array, " P"], example: tuple[Any, ...]) -> Float[Array, ""]:
    x, y = example
    return jnp.logaddexp(0.0, -y * (x @ w))


def straight_through() -> Picture:
    """Six binary weights of a classifier. Above, the latent λ, whose signs are the weights: the gradient at the signs
    is subtracted from λ; a dot is a change of sign. Below, the mean loss at the signs, which changes only there."""
    data, start = _binary_weights_data(), np.array([-0.5, 0.3, -0.8, 0.6, -0.2, 0.35])
    rule, objective = recipes.straight_through(0.04), Objective(_logistic_loss, size=80)
    batches = _batches(data, 8, 130)
    path = trace_steps(rule, objective, jnp.asarray(start), steps=130, batches=batches, read=lambda q: q.natural())
    path = np.vstack([start, path])
    mean_loss = jax.jit(
        jax.vmap(lambda w: jnp.mean(jax.vmap(lambda x, y: _logistic_loss(w, (x, y)))(*map(jnp.asarray, data))))
    )
    values = np.asarray(mean_loss(jnp.asarray(np.where(path >= 0, 1.0, -1.0))))
    figure, (above, below) = stacked(2, 1)
    above.axhline(0, color=INK, lw=0.8)
    for row, sign in zip(path.T, SIGNS, strict=True):
        above.plot(row, color={1.0: BAYESIAN, -1.0: PLAIN, 0.0: QUIET}[sign], lw=1.4)
        flips = np.flatnonzero(np.diff(np.where(row >= 0, 1, -1))) + 1
        above.plot(flips, row[flips], "o", color=INK, ms=4, mec="white", mew=0.6, zorder=5)
    above.set(ylabel="latent λ", xlim=(0, 130), xticklabels=[], ylim=(-0.9, 1.05))
    for index, (name, color) in enumerate([("should be +1", BAYESIAN), ("should be −1", PLAIN), ("irrelevant", QUIET)]):
        above.text(0.02 + 0.27 * index, 0.9, name, color=color, fontsize=10, transform=above.transAxes)
    below.step(np.arange(131), values, color=INK, lw=1.4, where="post")
    below.set(xlabel="step", ylabel="loss", xlim=(0, 130), ylim=(0, None))
    return Picture(figure, rule)


def bayesbinn() -> Picture:
    """The same six weights, with a probability for each sign. The means tanh λ move towards ±1 as far as the data
    determine them; the sixth weight, which is irrelevant, stays near 0 instead of taking a sign."""
    data, start = _binary_weights_data(), np.zeros(6)
    rule, objective = recipes.bayesbinn(0.005), Objective(_logistic_loss, size=80)
    keys = jax.random.split(jax.random.key(0), 500)
    path = trace_steps(
        rule, objective, jnp.asarray(start), steps=500, data=data, keys=keys, read=lambda q: q.expectation()
    )
    figure, (left, right) = panels(2.2, 1)
    colors = [{1.0: BAYESIAN, -1.0: PLAIN, 0.0: QUIET}[sign] for sign in SIGNS]
    left.axhline(0, color=INK, lw=0.8)
    for row, color in zip(np.vstack([start, path]).T, colors, strict=True):
        left.plot(row, color=color, lw=1.2)
    left.set(xlabel="step", ylabel="mean of the sign, tanh λ", xlim=(0, 500), ylim=(-1.05, 1.05))
    probability = (1 + path[-1]) / 2
    right.barh(np.arange(6)[::-1], probability - 0.5, left=0.5, color=colors, height=0.65)
    right.axvline(0.5, color=INK, lw=0.8)
    right.set(xlabel="probability of +1", xlim=(0, 1), xticks=[0, 0.5, 1], yticks=np.arange(6)[::-1])
    right.set_yticklabels([f"$w_{i + 1}$" for i in range(6)])
    return Picture(figure, rule)


# Logistic regression with two weights, whose posterior can be drawn exactly.


@cache
def _classification_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(24, 2)) @ [[1.0, 0.6], [0.0, 0.8]]
    return x, np.where(random.random(24) < 1 / (1 + np.exp(-x @ [1.5, -0.6])), 1.0, -1.0)


LOGISTIC = Objective(_logistic_loss, size=24, regularizer=0.3)


def _energy(w: Float[Array, "2"]) -> Float[Array, ""]:
    """The negative logarithm of the posterior density, up to a constant."""
    x, y = map(jnp.asarray, _classification_data())
    return jnp.sum(jnp.logaddexp(0.0, -y * (x @ w))) + 0.15 * jnp.sum(w**2)


def _posterior_axes() -> tuple[Any, Any]:
    figure, (axes,) = panels(1)
    plane(axes, (-1.3, 4.6), (-3.0, 1.9), ("$w_1$", "$w_2$"))
    posterior(axes, _energy)
    return figure, axes


def _moments(rule: Rule, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The means of q at the start and after every step, and its variances after every step."""
    read: Callable[[Any], Any] = lambda q: (q.mean, 1 / q.precision)
    start = jnp.array([-0.5, 1.2])
    means, variances = trace_steps(rule, LOGISTIC, start, data=_classification_data(), read=read, **options)
    return np.vstack([start, means]), variances


def ogn() -> Picture:
    """The two weights of a logistic regression with 24 points, and their posterior in grey. OGN's Gaussian has the sum
    of squared per-example gradients as its precision and its mean at the mode; it is diagonal."""
    rule = recipes.ogn(0.1, decay=0.95, relative=True)
    means, variances = _moments(rule, steps=150)
    figure, axes = _posterior_axes()
    trail(axes, means, PLAIN, "D", size=2)
    rings(axes, means[-1], np.diag(variances[-1]), PLAIN, fill=0.08)
    label(axes, means[0, 0], means[0, 1] + 0.15, "start", INK, ha="center")
    label(axes, means[-1, 0] + 0.15, means[-1, 1] - 0.1, "OGN", PLAIN, va="top")
    label(axes, 3.1, -2.6, "posterior", "#777777")
    return Picture(figure, rule)


def vogn() -> Picture:
    """The same posterior, but gradients are evaluated at samples from the Gaussian (dots) instead of at its mean. So it
    moves away from the mode, where OGN stays, towards the mean of the skewed posterior."""
    rule = recipes.vogn(0.1, samples=4, decay=0.95, relative=True)
    keys = jax.random.split(jax.random.key(0), 400)
    means, variances = _moments(rule, steps=400, keys=keys)
    ogn_means, ogn_variances = _moments(recipes.ogn(0.1, decay=0.95, relative=True), steps=150)
    mean, variance = means[-100:].mean(axis=0), variances[-100:].mean(axis=0)
    samples = np.asarray(
        DiagonalGaussian(jnp.asarray(mean), jnp.asarray(1 / variance)).sample(jax.random.key(1), (150,))
    )
    figure, axes = _posterior_axes()
    axes.plot(*samples.T, "o", color=BAYESIAN, ms=2, mew=0, alpha=0.5)
    rings(axes, ogn_means[-1], np.diag(ogn_variances[-1]), PLAIN, lw=0.9)
    axes.plot(*ogn_means[-1], "D", color=PLAIN, ms=6, mec="white", mew=1, zorder=6)
    rings(axes, mean, np.diag(variance), BAYESIAN, fill=0.08)
    axes.plot(*mean, "o", color=BAYESIAN, ms=7, mec="white", mew=1, zorder=6)
    label(axes, -1.1, 1.5, "VOGN", BAYESIAN)
    label(axes, -1.1, 1.1, "OGN", PLAIN)
    label(axes, 3.1, -2.6, "posterior", "#777777")
    return Picture(figure, rule)
