"""Ready-made factors: priors, Gaussians and their precisions, choices among components, likelihoods of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from jax.tree_util import Partial
from jaxtyping import Array

from .factor import Factor, prior
from .families.seen import Seen
from .families.shared import SharedGaussian
from .linear_factor import LinearFactor
from .points import Points, Quadrature

_LOG_2PI = math.log(2 * math.pi)
Given = str | float | Array
"""A block's name, or a known number or array."""

__all__ = [
    "bernoulli",
    "bernoulli_logit",
    "bernoulli_probit",
    "bilinear",
    "boltzmann",
    "categorical",
    "category",
    "choice",
    "gaussian",
    "likelihood",
    "linear",
    "mixture",
    "multivariate_normal",
    "normal",
    "poisson",
    "poisson_exp",
    "prior",
    "softmax",
    "student_t",
    "words",
]


# Gaussians: elementwise, multivariate, linear.


def normal(observed: str, *, mean: Given = 0.0, precision: Given = 1.0, joint: str | None = None) -> Factor:
    """y ~ N(mean, 1/precision), entry by entry; `joint` is a normal–gamma block of both."""
    if joint is not None:
        return Factor(_normal_joint, joint, data=observed, said="normal")
    names, known = _named(mean=mean, precision=precision)
    return Factor(Bound(_normal, tuple(names), known), *names.values(), data=observed, of="seen", said="normal")


def gaussian(block: str, *, mean: Given = 0.0, precision: Given = 1.0) -> Factor:
    """The entries of a Gaussian block ~ N(mean, 1/precision), which may be blocks themselves: hierarchies, ARD."""
    names, known = _named(value=block, mean=mean, precision=precision)
    return Factor(Bound(_normal, tuple(names), known), *names.values(), of="seen", said="gaussian")


def multivariate_normal(
    observed: str, *, mean: str | None = None, precision: Given | None = None, joint: str | None = None
) -> Factor:
    """A row of y ~ N(mean, Λ⁻¹): `mean` a Gaussian block, `precision` a Wishart one, `joint` a normal–Wishart one."""
    if joint is not None:
        said = "multivariate_normal"
        return Factor(_multivariate_joint, joint, data=observed, features=_products, said=said)
    if mean is None or precision is None:
        raise ValueError("multivariate_normal takes mean= and precision=, or joint= a normal–Wishart block.")
    names, known = _named(mean=mean, precision=precision)
    function = Bound(_multivariate, tuple(names), known)
    return Factor(function, *names.values(), data=observed, of="seen", said="multivariate_normal")


def linear(observed: str, predictors: Mapping[str, str | None], *, precision: Given = 1.0) -> LinearFactor:
    """y_n ~ N(Σ x_n·w, 1/precision): linear regression. `predictors` names each block's inputs, {"w": "x"}."""
    others = (precision,) if isinstance(precision, str) else ()
    known = () if isinstance(precision, str) else (jnp.log(precision), jnp.asarray(precision))
    # The precision comes as a block's μ = (E log t, E t), or is known.
    row, closed = Partial(_linear_row, known), Partial(_linear, known)
    return LinearFactor(
        row,
        predictors,
        *others,
        data=observed,
        points=Quadrature(32),
        closed=closed,
        conjugate=True,
        said="linear",
    )


def bilinear(observed: str, left: str, right: str, *, precision: Given = 1.0) -> Factor:
    """y_nd ~ N(w_d·x_n, 1/precision) with both unknown: `left` has a row for each n, `right` for each d (PCA)."""
    names, known = _named(left=left, right=right, precision=precision)
    return Factor(Bound(_bilinear, tuple(names), known), *names.values(), data=observed, of="seen", said="bilinear")


# Choices.


def categorical(block: str, *, probabilities: str) -> Factor:
    """A categorical block's p(z | π), π a Dirichlet block."""
    return Factor(_categorical, block, probabilities, of="seen", said="categorical")


def category(observed: str, *, probabilities: str) -> Factor:
    """An observed category's p(y | π), π a Dirichlet block."""
    return Factor(_category, probabilities, data=observed, said="category")


def choice(selector: str, components: Factor) -> Factor:
    """A categorical block chooses, row by row, which component (plate) of another factor the row is from."""
    function = Partial(_choice, components)
    return _of_components(function, selector, components, "choice")


def mixture(weights: str, components: Factor) -> Factor:
    r"""`choice` with the choices summed out where they are best: $\sum_n \log\sum_k \exp(E\logπ_k + E\log f_{nk})$.

    For any q of the others this is the bound at the best q(z), and its derivatives are the messages with that q(z): a
    sweep that updates z first needs no block for it. `weights` is a Dirichlet block.
    """
    return _of_components(Partial(_mixture, components), weights, components, "mixture")


def _of_components(function: Any, first: str, components: Factor, said: str) -> Factor:
    how = {"data": components.data, "features": components.features, "said": f"{said} of {components.said}"}
    return Factor(function, first, *components.blocks, of="seen", **how)


def words(observed: str, words: str, *, documents: str, topics: str) -> Factor:
    r"""A document's words, each from a topic, which is summed out: $\sum_w n_w \log\sum_k e^{E\logθ_k + E\logβ_{kw}}$.

    `words` names the data's word numbers, one row for each document, and `observed` how often each occurs, 0 where a
    row is filled up. `documents` is a (local) Dirichlet block over topics, `topics` one over words for each topic.
    """
    return Factor(_words, documents, topics, data=(words, observed), said="words")


# Likelihoods of outputs that are linear in Gaussian blocks.


def likelihood(
    function: Callable[..., Any],
    observed: str,
    predictors: Mapping[str, str | None],
    *others: str,
    points: Points | None = None,
    said: str = "",
) -> LinearFactor:
    """Any log p(y | f): `function(f, y)` of one row, f = Σ x_n·w its output (or outputs), by a grid over f."""
    said = said or getattr(function, "__name__", "likelihood").replace("<lambda>", "likelihood")
    return LinearFactor(function, predictors, *others, data=observed, points=points or Quadrature(32), said=said)


def bernoulli_logit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    """y ∈ {0, 1}, p(y = 1) = 1/(1 + e^{−f}): logistic regression."""
    return likelihood(_logit, observed, predictors, points=points, said="bernoulli_logit")


def bernoulli_probit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    """y ∈ {0, 1}, p(y = 1) = Φ(f)."""
    return likelihood(_probit, observed, predictors, points=points, said="bernoulli_probit")


def poisson_exp(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    """Counts with rate e^f; its expectation y m − e^{m + v/2} − log y! is exact unless `points` are given."""
    closed = _poisson_expected if points is None else None
    return LinearFactor(
        _poisson, predictors, data=observed, points=points or Quadrature(32), closed=closed, said="poisson_exp"
    )


def softmax(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    """y ∈ {0, …, K−1}, p(y = k) ∝ e^{f_k}: the block is (K, P), and f a vector of K outputs."""
    return likelihood(_softmax, observed, predictors, points=points or Quadrature(8), said="softmax")


def student_t(
    observed: str,
    predictors: Mapping[str, str | None],
    *,
    dof: float = 4.0,
    scale: float | Array = 1.0,
    points: Points | None = None,
) -> LinearFactor:
    """y = f + scale·t with Student-t noise: robust regression."""
    function = Partial(_student, jnp.asarray(dof, float), jnp.asarray(scale, float))
    return likelihood(function, observed, predictors, points=points, said="student_t")


# Counts, and spins.


def poisson(observed: str, *, rate: str) -> Factor:
    """Counts ~ Poisson(rate), the rate a gamma block."""
    return Factor(_counts, rate, data=observed, said="poisson")


def bernoulli(observed: str, *, probability: str) -> Factor:
    """y ∈ {0, 1} with the probability of a beta block."""
    return Factor(_tosses, probability, data=observed, said="bernoulli")


def boltzmann(block: str, couplings: Array, fields: Array) -> Factor:
    """½sᵀJs + hᵀs of a `Bernoulli` block of spins s ∈ {−1, 1}: an Ising model. J is symmetric, its diagonal ignored.

    Unnormalised: a bound with it is one on log Z.
    """
    couplings = jnp.asarray(couplings)
    couplings = couplings - jnp.diag(jnp.diag(couplings))
    return Factor(Partial(_boltzmann, couplings, jnp.asarray(fields)), block, said="boltzmann")


# What they compute.


class Bound(eqx.Module):
    """A function that knows which of its arguments are blocks (by their roles), and the values of the others."""

    function: Callable[..., Any] = eqx.field(static=True)
    roles: tuple[str, ...] = eqx.field(static=True)
    known: dict[str, Array]

    def __call__(self, *args: Any) -> Array:
        views = dict(zip(self.roles, args, strict=False))
        return self.function(views, self.known, *args[len(self.roles) :])


def _named(**given: Given) -> tuple[dict[str, str], dict[str, Array]]:
    """Which arguments are blocks, and which are known."""
    names = {role: value for role, value in given.items() if isinstance(value, str)}
    known = {role: jnp.asarray(value, float) for role, value in given.items() if not isinstance(value, str)}
    if not names:
        raise ValueError(f"A factor touches a block: name one of {list(given)}.")
    return names, known


def _moments(role: str, views: dict[str, Seen], known: dict[str, Array]) -> tuple[Array, Array]:
    """Entry by entry, the mean and the variance of a Gaussian block, or of a known number."""
    if role not in views:
        return known[role], jnp.zeros(())
    return views[role].mean, views[role].variance


def _scales(role: str, views: dict[str, Seen], known: dict[str, Array]) -> tuple[Array, Array]:
    """E log t and E t of a precision."""
    if role not in views:
        return jnp.log(known[role]), known[role]
    log, linear = views[role].expectation
    return log, linear


def _normal(views: dict[str, Seen], known: dict[str, Array], *observed: Array) -> Array:
    value, doubt = (observed[0], 0.0) if observed else _moments("value", views, known)
    mean, variance = _moments("mean", views, known)
    log, scale = _scales("precision", views, known)
    return 0.5 * (log - _LOG_2PI - scale * ((value - mean) ** 2 + variance + doubt))


def _normal_joint(mu: tuple[Array, ...], y: Array) -> Array:
    log, linear, cross, square = mu
    return 0.5 * (log - _LOG_2PI - linear * y**2 + 2 * cross * y - square)


def _rows(y: Array) -> Array:
    """Rows of vectors, whether or not they were made ready for plates."""
    return y[:, 0] if y.ndim == 3 else y


def _multivariate(views: dict[str, Seen], known: dict[str, Array], y: Array) -> Array:
    seen: Seen = views["mean"]
    mean, spread = seen.mean, seen.covariance
    spread = spread if spread.ndim > mean.ndim else spread[..., None] * jnp.eye(spread.shape[-1], dtype=spread.dtype)
    if "precision" in views:
        log, matrix = views["precision"].expectation
    else:
        matrix = known["precision"]
        log = jnp.linalg.slogdet(matrix)[1]
    deviation = _rows(y)[:, None, :] - mean if mean.ndim == 2 else _rows(y) - mean
    letters = "nkd,kde,nke->nk" if mean.ndim == 2 else "nd,de,ne->n"
    square = jnp.einsum(letters, deviation, jnp.broadcast_to(matrix, (*mean.shape, mean.shape[-1])), deviation)
    doubt = jnp.sum(matrix * spread, axis=(-2, -1))
    return 0.5 * (log - mean.shape[-1] * _LOG_2PI - square - doubt)


def _products(y: Array) -> Array:
    """1, the entries of each row, and their products, each pair once."""
    upper = np.triu_indices(y.shape[-1])
    return jnp.concatenate([jnp.ones((*y.shape[:-1], 1), y.dtype), y, y[..., upper[0]] * y[..., upper[1]]], axis=-1)


def _multivariate_joint(mu: tuple[Array, ...], products: Array) -> Array:
    """Linear in μ = (log|Λ|, Λ, Λx, xᵀΛx): one matrix product with what the rows are made into."""
    log, linear, cross, square = mu
    size = cross.shape[-1]
    upper = np.triu_indices(size)
    halves = jnp.where(upper[0] == upper[1], 0.5, 1.0).astype(linear.dtype) * linear[..., upper[0], upper[1]]
    weights = jnp.concatenate([0.5 * (log - square - size * _LOG_2PI)[..., None], cross, -halves], axis=-1)
    found = _rows(products) @ weights.reshape(-1, weights.shape[-1]).T
    return found.reshape((-1, *log.shape))


def _linear(known: Any, mean: Array, variance: Array, y: Array, *others: Any) -> Array:
    log, scale = known or others[0]
    return 0.5 * (log - _LOG_2PI - scale * ((y - mean) ** 2 + variance))


def _linear_row(known: Any, f: Array, y: Array, *others: Any) -> Array:
    return _linear(known, f, jnp.zeros(()), y, *others)


def _bilinear(views: dict[str, Seen], known: dict[str, Array], y: Array) -> Array:
    left, right = views["left"], views["right"]
    x, vx, w, vw = left.mean, left.covariance, right.mean, right.covariance
    if vx.ndim == x.ndim:
        vx = vx[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
    if vw.ndim == w.ndim:
        vw = vw[..., None] * jnp.eye(w.shape[-1], dtype=w.dtype)
    log, scale = _scales("precision", views, known)
    if isinstance(getattr(left.q, "of", left.q), SharedGaussian) and scale.ndim < 2:
        return _bilinear_whole(x, left.expectation[1], vx[0], w, vw, y, log, scale)
    size = x.shape[-1] ** 2
    outer = lambda m: (m[..., :, None] * m[..., None, :]).reshape(-1, size)
    vx, vw = vx.reshape(-1, size), vw.reshape(-1, size)
    doubt = outer(x) @ vw.T + vx @ (vw + outer(w)).T
    return 0.5 * (log - _LOG_2PI - scale * ((y - x @ w.T) ** 2 + doubt))


def _bilinear_whole(
    x: Array, square: Array, vx: Array, w: Array, vw: Array, y: Array, log: Array, scale: Array
) -> Array:
    """The sum for rows that share a covariance, as they do where all of y is observed; `square` is E xᵀx."""
    log, scale = (jnp.broadcast_to(z, w.shape[:1]) for z in (log, scale))
    spread = jnp.tensordot(scale, jnp.broadcast_to(vw, (*w.shape, w.shape[-1])), axes=1)
    doubt = jnp.sum(square * spread) + len(x) * jnp.sum(vx * ((scale[:, None] * w).T @ w))
    misses = jnp.sum((y - x @ w.T) ** 2 @ scale)
    return 0.5 * (len(x) * jnp.sum(log - _LOG_2PI) - misses - doubt)


def _category(mu: Array, y: Array) -> Array:
    return mu[y.astype(int)]


def _counts(mu: tuple[Array, Array], y: Array) -> Array:
    return y * mu[0] - mu[1] - gammaln(y + 1.0)


def _tosses(mu: tuple[Array, Array], y: Array) -> Array:
    return y * mu[0] + (1 - y) * mu[1]


def _categorical(z: Seen, weights: Seen) -> Array:
    return jnp.sum(z.probabilities * weights.expectation, axis=-1)


def _per_component(components: Factor, views: tuple, data: tuple) -> Array:
    """E log f of every row under every component: (N, K)."""
    seen = dict(zip(components.blocks, views, strict=True))
    arrays = dict(zip(components.data, data, strict=True))
    arrays[components.data[-1]] = arrays[components.data[-1]][:, None]  # a row beside all plates
    found = components.value(seen, arrays)
    return found if found.ndim == 2 else jnp.sum(found, axis=tuple(range(2, found.ndim)))


def _choice(components: Factor, selector: Seen, *args: Any) -> Array:
    count = len(components.blocks)
    return jnp.sum(selector.probabilities * _per_component(components, args[:count], args[count:]), axis=-1)


def _mixture(components: Factor, weights: Seen, *args: Any) -> Array:
    count = len(components.blocks)
    logits = weights.expectation + _per_component(components, args[:count], args[count:])
    return jax.nn.logsumexp(logits, axis=-1)


def _words(document: Array, topics: Array, words: Array, counts: Array) -> Array:
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


def _logit(f: Array, y: Array) -> Array:
    return jax.nn.log_sigmoid((2.0 * y - 1) * f)


def _probit(f: Array, y: Array) -> Array:
    return norm.logcdf((2.0 * y - 1) * f)


def _poisson(f: Array, y: Array) -> Array:
    return y * f - jnp.exp(f) - gammaln(y + 1.0)


def _poisson_expected(mean: Array, variance: Array, y: Array) -> Array:
    return y * mean - jnp.exp(mean + 0.5 * variance) - gammaln(y + 1.0)


def _softmax(f: Array, y: Array) -> Array:
    return f[y.astype(int)] - jax.nn.logsumexp(f)


def _student(dof: Array, scale: Array, f: Array, y: Array) -> Array:
    ratio = ((y - f) / scale) ** 2 / dof
    norm = gammaln(0.5 * (dof + 1)) - gammaln(0.5 * dof) - 0.5 * jnp.log(dof * math.pi) - jnp.log(scale)
    return norm - 0.5 * (dof + 1) * jnp.log1p(ratio)


def _boltzmann(couplings: Array, fields: Array, mean: Array) -> Array:
    return 0.5 * mean @ couplings @ mean + fields @ mean
