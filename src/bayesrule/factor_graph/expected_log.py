"""What ready-made factors compute: E log f, an entry for each row, of the blocks as they are seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from jaxtyping import Array

from ..families.gaussian.shared import SharedGaussian
from .block_view import BlockView
from .factor import Factor

_LOG_2PI = math.log(2 * math.pi)


class Bound(eqx.Module):
    """A function that knows which of its arguments are blocks (by their roles), and the values of the others."""

    function: Callable[..., Any] = eqx.field(static=True)
    roles: tuple[str, ...] = eqx.field(static=True)
    known: dict[str, Array]

    def __call__(self, *args: Any) -> Array:
        views = dict(zip(self.roles, args, strict=False))
        return self.function(views, self.known, *args[len(self.roles) :])


def moments(role: str, views: dict[str, BlockView], known: dict[str, Array]) -> tuple[Array, Array]:
    """Entry by entry, the mean and the variance of a Gaussian block, or of a known number."""
    if role not in views:
        return known[role], jnp.zeros(())
    return views[role].mean, views[role].variance


def scales(role: str, views: dict[str, BlockView], known: dict[str, Array]) -> tuple[Array, Array]:
    """E log t and E t of a precision."""
    if role not in views:
        return jnp.log(known[role]), known[role]
    log, linear = views[role].expectation
    return log, linear


def normal(views: dict[str, BlockView], known: dict[str, Array], *observed: Array) -> Array:
    value, doubt = (observed[0], 0.0) if observed else moments("value", views, known)
    mean, variance = moments("mean", views, known)
    log, scale = scales("precision", views, known)
    return 0.5 * (log - _LOG_2PI - scale * ((value - mean) ** 2 + variance + doubt))


def normal_joint(mu: tuple[Array, ...], y: Array) -> Array:
    log, linear, cross, square = mu
    return 0.5 * (log - _LOG_2PI - linear * y**2 + 2 * cross * y - square)


def rows(y: Array) -> Array:
    """Rows of vectors, whether or not they were made ready for plates."""
    return y[:, 0] if y.ndim == 3 else y


def multivariate(views: dict[str, BlockView], known: dict[str, Array], y: Array) -> Array:
    seen: BlockView = views["mean"]
    mean, spread = seen.mean, seen.covariance
    spread = spread if spread.ndim > mean.ndim else spread[..., None] * jnp.eye(spread.shape[-1], dtype=spread.dtype)
    if "precision" in views:
        log, matrix = views["precision"].expectation
    else:
        matrix = known["precision"]
        log = jnp.linalg.slogdet(matrix)[1]
    deviation = rows(y)[:, None, :] - mean if mean.ndim == 2 else rows(y) - mean
    letters = "nkd,kde,nke->nk" if mean.ndim == 2 else "nd,de,ne->n"
    square = jnp.einsum(letters, deviation, jnp.broadcast_to(matrix, (*mean.shape, mean.shape[-1])), deviation)
    doubt = jnp.sum(matrix * spread, axis=(-2, -1))
    return 0.5 * (log - mean.shape[-1] * _LOG_2PI - square - doubt)


def products(y: Array) -> Array:
    """1, the entries of each row, and their products, each pair once."""
    upper = np.triu_indices(y.shape[-1])
    return jnp.concatenate([jnp.ones((*y.shape[:-1], 1), y.dtype), y, y[..., upper[0]] * y[..., upper[1]]], axis=-1)


def multivariate_joint(mu: tuple[Array, ...], products: Array) -> Array:
    """Linear in μ = (log|Λ|, Λ, Λx, xᵀΛx): one matrix product with what the rows are made into."""
    log, linear, cross, square = mu
    size = cross.shape[-1]
    upper = np.triu_indices(size)
    halves = jnp.where(upper[0] == upper[1], 0.5, 1.0).astype(linear.dtype) * linear[..., upper[0], upper[1]]
    weights = jnp.concatenate([0.5 * (log - square - size * _LOG_2PI)[..., None], cross, -halves], axis=-1)
    found = rows(products) @ weights.reshape(-1, weights.shape[-1]).T
    return found.reshape((-1, *log.shape))


def linear(known: Any, mean: Array, variance: Array, y: Array, *others: Any) -> Array:
    log, scale = known or others[0]
    return 0.5 * (log - _LOG_2PI - scale * ((y - mean) ** 2 + variance))


def linear_row(known: Any, f: Array, y: Array, *others: Any) -> Array:
    return linear(known, f, jnp.zeros(()), y, *others)


def bilinear(views: dict[str, BlockView], known: dict[str, Array], y: Array) -> Array:
    left, right = views["left"], views["right"]
    x, vx, w, vw = left.mean, left.covariance, right.mean, right.covariance
    if y.shape != (*x.shape[:-1], len(w)):  # one row of y beside all of x would broadcast, and count N times
        rows = x.shape[0] if x.ndim == 2 else x.shape[:-1]
        raise ValueError(f"{rows} rows of the left block and {len(w)} of the right one do not make up {y.shape}.")
    if vx.ndim == x.ndim:
        vx = vx[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    if vw.ndim == w.ndim:
        vw = vw[..., None] * jnp.eye(w.shape[-1], dtype=w.dtype)
    log, scale = scales("precision", views, known)
    if isinstance(getattr(left.q, "of", left.q), SharedGaussian) and scale.ndim < 2:
        return bilinear_whole(x, left.expectation[1], vx[0], w, vw, y, log, scale)
    size = x.shape[-1] ** 2
    outer = lambda m: (m[..., :, None] * m[..., None, :]).reshape(-1, size)
    vx, vw = vx.reshape(-1, size), vw.reshape(-1, size)
    doubt = (outer(x) @ vw.T + vx @ (vw + outer(w)).T).reshape(y.shape)
    return 0.5 * (log - _LOG_2PI - scale * ((y - x @ w.T) ** 2 + doubt))


def bilinear_whole(
    x: Array, square: Array, vx: Array, w: Array, vw: Array, y: Array, log: Array, scale: Array
) -> Array:
    """The sum for rows that share a covariance, as they do where all of y is observed; `square` is E xᵀx."""
    log, scale = (jnp.broadcast_to(z, w.shape[:1]) for z in (log, scale))
    spread = jnp.tensordot(scale, jnp.broadcast_to(vw, (*w.shape, w.shape[-1])), axes=1)
    doubt = jnp.sum(square * spread) + len(x) * jnp.sum(vx * ((scale[:, None] * w).T @ w))
    misses = jnp.sum((y - x @ w.T) ** 2 @ scale)
    return 0.5 * (len(x) * jnp.sum(log - _LOG_2PI) - misses - doubt)


def category(mu: Array, y: Array) -> Array:
    if mu.ndim > 1:  # a row beside all plates
        return mu.T.at[label(y[:, 0], mu.shape[-1])].get(mode="fill", fill_value=jnp.nan)
    return mu.at[label(y, mu.shape[-1])].get(mode="fill", fill_value=jnp.nan)


def label(y: Array, count: int) -> Array:
    """Labels as indices; one that is none of them is past the end, where there is nothing (−1 would be the last)."""
    return jnp.where((y < 0) | (y != jnp.floor(y)), count, y).astype(int)


def counts(mu: tuple[Array, Array], y: Array) -> Array:
    logs = jnp.where(y == 0, 0.0, y * mu[0])  # 0 log 0 is 0, for a rate that EM puts there
    return logs - mu[1] - gammaln(y + 1.0)


def tosses(mu: tuple[Array, Array], y: Array) -> Array:
    return y * mu[0] + (1 - y) * mu[1]


def categorical(z: BlockView, weights: BlockView) -> Array:
    return jnp.sum(z.probabilities * weights.expectation, axis=-1)


def per_component(components: Factor, views: tuple, data: tuple) -> Array:
    """E log f of every row under every component: (N, K)."""
    seen = dict(zip(components.blocks, views, strict=True))
    arrays = dict(zip(components.data, data, strict=True))
    arrays[components.data[-1]] = arrays[components.data[-1]][:, None]  # a row beside all plates
    found = components.value(seen, arrays)
    return found if found.ndim == 2 else jnp.sum(found, axis=tuple(range(2, found.ndim)))


def choice(components: Factor, selector: BlockView, *args: Any) -> Array:
    count = len(components.blocks)
    return jnp.sum(selector.probabilities * per_component(components, args[:count], args[count:]), axis=-1)


def mixture(components: Factor, weights: BlockView, *args: Any) -> Array:
    count = len(components.blocks)
    logits = weights.expectation + per_component(components, args[:count], args[count:])
    return jax.nn.logsumexp(logits, axis=-1)


def words(document: Array, topics: Array, words: Array, counts: Array) -> Array:
    # Exponentials of each, and their products by matrix products: exp of every pair would cost far more.
    table = topics.T[words]  # (N, L, K)
    axis, letters = -1, "nlk,nk->nl"
    if (
        words.shape[0] <= 32
    ):  # a few documents, which a loop comes back to: turned once, their products take half as long
        table, axis, letters = jnp.swapaxes(table, 1, 2), 1, "nkl,nk->nl"
    high = jax.lax.stop_gradient(jnp.max(table, axis=axis, keepdims=True))
    low = jax.lax.stop_gradient(jnp.max(document, axis=-1, keepdims=True))
    chances = jnp.einsum(letters, jnp.exp(table - high), jnp.exp(document - low))
    logs = jnp.log(chances + jnp.finfo(table.dtype).tiny) + jnp.squeeze(high, axis) + low
    return jnp.sum(counts * logs, axis=-1)


def logit(f: Array, y: Array) -> Array:
    return jax.nn.log_sigmoid((2.0 * y - 1) * f)


def probit(f: Array, y: Array) -> Array:
    return norm.logcdf((2.0 * y - 1) * f)


def poisson(f: Array, y: Array) -> Array:
    return y * f - jnp.exp(f) - gammaln(y + 1.0)


def poisson_expected(mean: Array, variance: Array, y: Array) -> Array:
    return y * mean - jnp.exp(mean + 0.5 * variance) - gammaln(y + 1.0)


def volatility(f: Array, y: Array) -> Array:
    return -0.5 * (_LOG_2PI + f + y**2 * jnp.exp(-f))


def volatility_expected(mean: Array, variance: Array, y: Array) -> Array:
    return -0.5 * (_LOG_2PI + mean + y**2 * jnp.exp(-mean + 0.5 * variance))


def softmax(f: Array, y: Array) -> Array:
    return f.at[label(y, f.shape[-1])].get(mode="fill", fill_value=jnp.nan) - jax.nn.logsumexp(f)


def student(dof: Array, scale: Array, f: Array, y: Array) -> Array:
    ratio = ((y - f) / scale) ** 2 / dof
    norm = gammaln(0.5 * (dof + 1)) - gammaln(0.5 * dof) - 0.5 * jnp.log(dof * math.pi) - jnp.log(scale)
    return norm - 0.5 * (dof + 1) * jnp.log1p(ratio)


def boltzmann(couplings: Array, fields: Array, mean: Array) -> Array:
    return 0.5 * mean @ couplings @ mean + fields @ mean


def dynamics(views: dict[str, BlockView], known: dict[str, Array], lengths: Array | None = None) -> Array:
    r"""Σ_t E log N(x_{t+1} | Ax_t, diag 1/λ), a term for each chain and state, from sums of μ over the steps."""
    _, square, crossed = views["states"].expectation
    steps, filling = crossed.shape[-3], jnp.zeros(())
    ahead, before = jnp.diagonal(square[..., 1:, :, :], axis1=-2, axis2=-1), square[..., :-1, :, :]
    if lengths is not None:
        led = (jnp.arange(1, steps + 1) < lengths[:, None])[..., None].astype(ahead.dtype)
        filling = -0.5 * jnp.sum((1 - led) * (_LOG_2PI + ahead), axis=-2)
        ahead, before, crossed = led * ahead, led[..., None] * before, led[..., None] * crossed
        steps = jnp.sum(led, axis=-2)
    ahead, total, both = jnp.sum(ahead, axis=-2), jnp.sum(before, axis=-3), jnp.sum(crossed, axis=-3)
    rows, spread = _transition(views, known, square.shape[-1])
    log, scale = scales("precision", views, known)
    second = spread + rows[:, :, None] * rows[:, None, :]
    misses = ahead - 2 * jnp.sum(both * rows, axis=-1) + jnp.einsum("ijk,...jk->...i", second, total)
    return 0.5 * (steps * (log - _LOG_2PI) - scale * misses) + filling


def _transition(views: dict[str, BlockView], known: dict[str, Array], size: int) -> tuple[Array, Array]:
    """The rows of A, and each row's covariance."""
    rows = views["transition"].mean if "transition" in views else known["transition"]
    if rows.shape != (size, size):
        raise ValueError(f"{size} states take a transition ({size}, {size}), or a Gaussian block of {size} such rows.")
    if "transition" not in views:
        return rows, jnp.zeros((size, size, size))
    spread = views["transition"].covariance
    if spread.ndim == rows.ndim:
        spread = spread[..., None] * jnp.eye(size, dtype=spread.dtype)
    return rows, spread


def beginning(mean: Array, precision: Array, states: BlockView) -> Array:
    """E log N(x_0 | m₀, P₀⁻¹)."""
    first, square = states.expectation[0][..., 0, :], states.expectation[1][..., 0, :, :]
    if precision.shape != square.shape[-2:] or mean.shape != first.shape[-1:]:
        raise ValueError(f"{first.shape[-1]} states begin with a mean {first.shape[-1:]} and a precision as a matrix.")
    far = jnp.sum(precision * square, axis=(-2, -1)) - 2 * first @ (precision @ mean) + mean @ precision @ mean
    return 0.5 * (jnp.linalg.slogdet(precision)[1] - len(mean) * _LOG_2PI - far)
