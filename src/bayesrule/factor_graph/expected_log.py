r"""E_q log f of the ready-made factors, written in the blocks' expectation parameters μ or in their moments.

Each function below is one equation. `factors.py` wraps it into a `Factor`; the message of that factor to a block is the
derivative of the equation with respect to the block's μ, which JAX computes. So no message is written anywhere, and a
new factor is finished when its E log f is.

Three kinds of functions:

- E log f in the blocks' μ or moments (`normal` to `boltzmann`, `dynamics`, `first_state`). Blocks are independent under
  q, so the expectation of a product over different blocks is the product of expectations.
- log p(y | f) of one row whose output f is Gaussian under q (`logit`, `probit`, `poisson`, `volatility`, `softmax`,
  `student`, `linear_row`): `LinearFactor` integrates these over f ~ N(m, v).
- the same integrals in closed form (`linear`, `poisson_expected`, `volatility_expected`), or as good as that
  (`logit_expected`, `probit_expected`, `student_expected`).

Throughout, m and v (or V) are the mean and the variance (or covariance) of a Gaussian block under q; a constant in the
place of a block has v = 0. The result has one entry for each row of the data along its first axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from jaxtyping import Array

from ..families.gaussian.shared import SharedGaussian
from ..numerics.special import expected_around_zero, expected_log_sigmoid
from .block_view import BlockView
from .factor import Factor

_LOG_2PI = math.log(2 * math.pi)
_GATHERED = 2**20  # how many numbers `multivariate_joint_of_observed` copies at a time

Views = dict[str, BlockView]
"""The blocks of a factor by role ("mean", "precision", …), each as the factor's view of it."""
Constants = dict[str, Array]
"""The arguments of a factor that are known numbers or arrays instead of blocks, by role."""


class ByRole(eqx.Module):
    """A function of blocks and constants, each under the name of its role.

    A factor such as `normal` may have its mean, its precision or both as blocks, and the others as constants. This
    module gives the function its two dictionaries, so that one equation serves all these cases.

    Args:
        function: `function(views, constants, *data)`, one of the functions of this file.
        roles: the role of each block, in the order in which the factor names its blocks.
        constants: the values of the other roles.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    roles: tuple[str, ...] = eqx.field(static=True)
    constants: Constants

    def __call__(self, *args: Any) -> Array:
        views = dict(zip(self.roles, args, strict=False))
        return self.function(views, self.constants, *args[len(self.roles) :])


def mean_and_variance(role: str, views: Views, constants: Constants) -> tuple[Array, Array]:
    """(E x, Var x), entry by entry, of a Gaussian block; (x, 0) of a constant."""
    if role not in views:
        return constants[role], jnp.zeros(())
    return views[role].mean, views[role].variance


def log_and_precision(role: str, views: Views, constants: Constants) -> tuple[Array, Array]:
    """(E log t, E t), which is μ of a gamma block; (log t, t) of a constant."""
    if role not in views:
        return jnp.log(constants[role]), constants[role]
    expected_log, expected = views[role].expectation
    return expected_log, expected


def as_matrices(covariance: Array, mean: Array) -> Array:
    """Covariance matrices, also where a diagonal family stores variances only."""
    if covariance.ndim > mean.ndim:
        return covariance
    return covariance[..., None] * jnp.eye(covariance.shape[-1], dtype=covariance.dtype)


# Gaussians.


def normal(views: Views, constants: Constants, *observed: Array) -> Array:
    r"""$E\log N(y \mid x, 1/t) = ½\{E\log t − \log 2π − E t\,[(E y − E x)^2 + \mathrm{Var}\,y + \mathrm{Var}\,x]\}$.

    Args:
        views: the blocks among "value" (y, Gaussian), "mean" (x, Gaussian) and "precision" (t, gamma).
        constants: the others of these three.
        observed: y where it is data; then there is no "value", and Var y = 0.
    """
    value, value_variance = (observed[0], 0.0) if observed else mean_and_variance("value", views, constants)
    mean, variance = mean_and_variance("mean", views, constants)
    log_precision, precision = log_and_precision("precision", views, constants)
    return 0.5 * (log_precision - _LOG_2PI - precision * ((value - mean) ** 2 + variance + value_variance))


def normal_joint(mu: tuple[Array, ...], y: Array) -> Array:
    r"""$E\log N(y \mid x, 1/t) = ½\{E\log t − \log 2π − y^2\,E t + 2y\,E[tx] − E[tx^2]\}$, linear in μ.

    Args:
        mu: (E log t, E t, E tx, E tx²), μ of a normal–gamma block over (x, t).
        y: the observations.
    """
    log_precision, precision, cross, square = mu
    return 0.5 * (log_precision - _LOG_2PI - precision * y**2 + 2 * cross * y - square)


def drop_plate_axis(y: Array) -> Array:
    """Rows (N, D) from (N, D) or from (N, 1, D): `per_component` inserts an axis to broadcast rows against plates."""
    return y[:, 0] if y.ndim == 3 else y


def multivariate_normal(views: Views, constants: Constants, y: Array) -> Array:
    r"""$E\log N(y_n \mid x, Λ^{-1}) = ½\{E\log|Λ| − D\log 2π − (y_n−m)^⊤EΛ(y_n−m) − \mathrm{tr}(EΛ\,V)\}$.

    Args:
        views: "mean" (x, a Gaussian block with mean m and covariance V, of one vector or of K plates), and "precision"
            (Λ, a Wishart block, whose μ is (E log|Λ|, E Λ)) unless it is a constant.
        constants: "precision" (Λ itself), where it is known.
        y: rows (N, D).

    Returns:
        (N,), or (N, K) for K plates.
    """
    mean = views["mean"].mean
    covariance = as_matrices(views["mean"].covariance, mean)
    if "precision" in views:
        log_det, precision = views["precision"].expectation
    else:
        precision = constants["precision"]
        log_det = jnp.linalg.slogdet(precision)[1]
    rows = drop_plate_axis(y)
    deviation = rows[:, None, :] - mean if mean.ndim == 2 else rows - mean
    letters = "nkd,kde,nke->nk" if mean.ndim == 2 else "nd,de,ne->n"
    square = jnp.einsum(letters, deviation, jnp.broadcast_to(precision, (*mean.shape, mean.shape[-1])), deviation)
    trace = jnp.sum(precision * covariance, axis=(-2, -1))
    return 0.5 * (log_det - mean.shape[-1] * _LOG_2PI - square - trace)


def row_products(y: Array) -> Array:
    """(1, y_1, …, y_D, y_i y_j for i ≤ j) of each row: the statistics by which a row enters `multivariate_joint`."""
    upper = np.triu_indices(y.shape[-1])
    return jnp.concatenate([jnp.ones((*y.shape[:-1], 1), y.dtype), y, y[..., upper[0]] * y[..., upper[1]]], axis=-1)


def multivariate_joint(mu: tuple[Array, ...], products: Array) -> Array:
    r"""$E\log N(y_n \mid x, Λ^{-1}) = ½\{E\log|Λ| − D\log 2π − y_n^⊤EΛ\,y_n + 2y_n^⊤E[Λx] − E[x^⊤Λx]\}$, linear in μ.

    It is linear in the products of y's entries too, so that all rows and components are one matrix product. In float32
    the difference of the squares loses digits where |E y| is large beside y's standard deviation: centre y first.

    Args:
        mu: (E log|Λ|, E Λ, E Λx, E xᵀΛx), μ of a normal–Wishart block over (x, Λ), possibly with plates.
        products: `row_products(y)`, computed once for all steps (the factor's `features`).
    """
    log_det, precision, cross, square = mu
    weights = _weights_of_products(log_det, precision, cross, square, cross.shape[-1])
    values = drop_plate_axis(products) @ weights.reshape(-1, weights.shape[-1]).T
    return values.reshape((-1, *log_det.shape))


def _weights_of_products(log_det: Array, precision: Array, cross: Array, square: Array, size: Any) -> Array:
    """By what `row_products` are multiplied in `multivariate_joint`, (…, 1 + D + D(D+1)/2); `size` counts entries."""
    upper = np.triu_indices(cross.shape[-1])
    # A pair i < j stands for the two equal terms y_i Λ_ij y_j and y_j Λ_ji y_i, so the factor ½ is absent there.
    halves = jnp.where(upper[0] == upper[1], 0.5, 1.0).astype(precision.dtype) * precision[..., upper[0], upper[1]]
    return jnp.concatenate([0.5 * (log_det - square - size * _LOG_2PI)[..., None], cross, -halves], axis=-1)


def multivariate_joint_of_observed(patterns: Array, mu: tuple[Array, ...], index: Array, products: Array) -> Array:
    r"""$\log ∫ \exp E\log N(y_n \mid x, Λ^{-1})\,dy_n^m$: `multivariate_joint` with the missing entries integrated out.

    $\max_{q(y^m)} E_q[E\log N(y_n \mid x, Λ^{-1}) − \log q(y^m)]$ is that integral, and its derivatives are the
    messages with the best q, which is Gaussian. With o the observed and m the missing entries of a row, and
    $M = EΛ_{mm}$, it is the same function of $y^o$, with $EΛ_{oo} − EΛ_{om}M^{-1}EΛ_{mo}$ in the place of $EΛ$,
    $E[Λx]_o − EΛ_{om}M^{-1}E[Λx]_m$, $E[x^⊤Λx] − E[Λx]_m^⊤M^{-1}E[Λx]_m$ and $E\log|Λ| − \log|M|$. At a point mass of
    (x, Λ) that is the density of the observed entries.

    Args:
        patterns: which entries are observed, (P, D), all combinations that occur.
        mu: as for `multivariate_joint`.
        index: the number of each row's pattern, (N,).
        products: `row_products(y)`, with any finite numbers for the missing entries.
    """
    log_det, precision, cross, square = mu
    size = cross.shape[-1]
    observed = jnp.asarray(patterns).reshape((-1, *(1,) * log_det.ndim, size))  # (P, 1, D) beside plates (K,)
    missing = ~observed
    pairs = lambda left, right: left[..., :, None] & right[..., None, :]
    factored = jnp.linalg.cholesky(jnp.where(pairs(missing, missing), precision, jnp.eye(size, dtype=precision.dtype)))
    rows = jnp.where(pairs(missing, observed), precision, 0.0), jnp.where(missing, cross, 0.0)[..., None]
    rows = solve_triangular(factored, jnp.concatenate(rows, axis=-1), lower=True)
    removed = jnp.swapaxes(rows, -1, -2) @ rows  # [Λ_om, x_m]ᵀ M⁻¹ [Λ_mo, x_m] with x_m = E[Λx]_m
    log_det = log_det - 2 * jnp.sum(jnp.log(jnp.diagonal(factored, axis1=-2, axis2=-1)), axis=-1)
    precision = jnp.where(pairs(observed, observed), precision, 0.0) - removed[..., :size, :size]
    cross = jnp.where(observed, cross, 0.0) - removed[..., :size, size]
    square = square - removed[..., size, size]
    weights = _weights_of_products(log_det, precision, cross, square, jnp.sum(observed, axis=-1))
    rows = drop_plate_axis(products)
    # A copy of the weights for every row may not fit into memory, so that long data are taken in chunks, whose copies
    # the reverse mode makes anew. A chunk has at least P rows, because the derivative in the weights, which is as large
    # as they are, is added up once for each chunk.
    chunk = max(len(weights), _GATHERED // max(1, weights[0].size))
    if len(rows) <= chunk:
        return jnp.einsum("nf,n...f->n...", rows, weights[index])
    # A map over the numbers of the rows copies these in chunks too; a map over the rows would copy them all.
    numbers, of_row = jnp.asarray(index), jax.checkpoint(lambda row: weights[numbers[row]] @ rows[row])
    return jax.lax.map(of_row, jnp.arange(len(rows)), batch_size=chunk)


def linear(constants: Any, mean: Array, variance: Array, y: Array, *others: Any) -> Array:
    r"""$E\log N(y_n \mid f_n, 1/t) = ½\{E\log t − \log 2π − E t\,[(y_n − m_n)^2 + v_n]\}$ for $f_n ∼ N(m_n, v_n)$.

    Args:
        constants: (log t, t), or () where the precision is a block.
        mean: m_n, the means of the outputs.
        variance: v_n, their variances.
        y: the observations.
        others: (E log t, E t), μ of the precision's gamma block, unless it is a constant.
    """
    log_precision, precision = constants or others[0]
    return 0.5 * (log_precision - _LOG_2PI - precision * ((y - mean) ** 2 + variance))


def linear_row(constants: Any, f: Array, y: Array, *others: Any) -> Array:
    """E log N(y_n | f_n, 1/t) given the output f_n: `linear` with v_n = 0. Arguments as there."""
    return linear(constants, f, jnp.zeros(()), y, *others)


def bilinear(views: Views, constants: Constants, y: Array) -> Array:
    r"""$E\log N(y_{nd} \mid w_d·x_n, 1/t_d) = ½\{E\log t_d − \log 2π − E t_d\,E(y_{nd} − w_d·x_n)^2\}$, where

    $E(y_{nd} − w_d·x_n)^2 = (y_{nd} − Ew_d·Ex_n)^2 + Ex_n^⊤V_{w_d}Ex_n + \mathrm{tr}\,V_{x_n}(V_{w_d} + Ew_d\,Ew_d^⊤)$.

    Args:
        views: "left" (x, a Gaussian row for each n), "right" (w, one for each d), and "precision" (t, gamma) unless it
            is a constant.
        constants: "precision", where it is known.
        y: (N, D), or (…, T, D) where the rows of x are the states of chains.

    Returns:
        an entry for each of y's; the sum over all of them where "left" is a `SharedGaussian`.
    """
    left, right = views["left"], views["right"]
    x, x_cov, w, w_cov = left.mean, left.covariance, right.mean, right.covariance
    if y.shape != (*x.shape[:-1], len(w)):
        # Without this check one row of y would be broadcast against all rows of x, and count N times.
        rows = x.shape[0] if x.ndim == 2 else x.shape[:-1]
        raise ValueError(
            f"The left block has {rows} rows and the right one {len(w)}, so the observations need one entry for each "
            f"pair, and their shape is {y.shape}. For mini-batches the left block must be local (Model(local=…))."
        )
    x_cov, w_cov = as_matrices(x_cov, x), as_matrices(w_cov, w)
    log_precision, precision = log_and_precision("precision", views, constants)
    if isinstance(getattr(left.q, "of", left.q), SharedGaussian) and precision.ndim < 2:
        return _bilinear_shared(x, left.expectation[1], x_cov[0], w, w_cov, y, log_precision, precision)
    size = x.shape[-1] ** 2
    outer = lambda m: (m[..., :, None] * m[..., None, :]).reshape(-1, size)
    x_cov, w_cov = x_cov.reshape(-1, size), w_cov.reshape(-1, size)
    variance = (outer(x) @ w_cov.T + x_cov @ (w_cov + outer(w)).T).reshape(y.shape)
    return 0.5 * (log_precision - _LOG_2PI - precision * ((y - x @ w.T) ** 2 + variance))


def _bilinear_shared(
    x: Array, square: Array, x_cov: Array, w: Array, w_cov: Array, y: Array, log_precision: Array, precision: Array
) -> Array:
    r"""Σ_nd of `bilinear` for rows with one covariance $V_x$ in common, in terms that are sums over the rows:

    $\sum_{nd}E t_d\,E(y_{nd} − w_d·x_n)^2 = \sum_{nd}E t_d(y_{nd} − Ew_d·Ex_n)^2$
    $+ \mathrm{tr}\,E[x^⊤x]\sum_dE t_dV_{w_d} + N\,\mathrm{tr}\,V_x\sum_dE t_d\,Ew_d\,Ew_d^⊤$.

    Args:
        square: E xᵀx = Σ_n E x_n x_nᵀ, the second expectation parameter of a `SharedGaussian`.
        x_cov: V_x, the covariance of one row.
    """
    log_precision, precision = (jnp.broadcast_to(z, w.shape[:1]) for z in (log_precision, precision))
    weighted_cov = jnp.tensordot(precision, jnp.broadcast_to(w_cov, (*w.shape, w.shape[-1])), axes=1)
    variance = jnp.sum(square * weighted_cov) + len(x) * jnp.sum(x_cov * ((precision[:, None] * w).T @ w))
    residual = jnp.sum((y - x @ w.T) ** 2 @ precision)
    return 0.5 * (len(x) * jnp.sum(log_precision - _LOG_2PI) - residual - variance)


# Categories, counts, spins.


def category(mu: Array, y: Array) -> Array:
    r"""$E\log π_{y_n}$, with $μ = E\log π$ of a Dirichlet block.

    Args:
        mu: (V,), or (K, V) for K plates, of which every row of y then gets all.
        y: labels (N,), or (N, 1) beside plates. A label that is none of 0, …, V − 1 gives NaN.
    """
    if mu.ndim > 1:
        return mu.T.at[label_index(y[:, 0], mu.shape[-1])].get(mode="fill", fill_value=jnp.nan)
    return mu.at[label_index(y, mu.shape[-1])].get(mode="fill", fill_value=jnp.nan)


def label_index(y: Array, count: int) -> Array:
    """Labels as indices. One that is no label becomes `count`, past the end (−1 would be read as the last one)."""
    return jnp.where((y < 0) | (y != jnp.floor(y)), count, y).astype(int)


def poisson_gamma(mu: tuple[Array, Array], y: Array) -> Array:
    r"""$E\log \mathrm{Poisson}(y \mid r) = y\,E\log r − E r − \log y!$.

    Args:
        mu: (E log r, E r), μ of a gamma block.
        y: counts.
    """
    # EM may put a rate at 0, where E log r is −∞: 0 log 0 is 0.
    log_rates = jnp.where(y == 0, 0.0, y * mu[0])
    return log_rates - mu[1] - gammaln(y + 1.0)


def bernoulli_beta(mu: tuple[Array, Array], y: Array) -> Array:
    r"""$E\log p^y(1 − p)^{1−y} = y\,E\log p + (1 − y)\,E\log(1 − p)$.

    Args:
        mu: (E log p, E log(1 − p)), μ of a beta block.
        y: 0 or 1.
    """
    return y * mu[0] + (1 - y) * mu[1]


def categorical(z: BlockView, weights: BlockView) -> Array:
    r"""$E\log p(z \mid π) = \sum_kq(z = k)\,E\log π_k$.

    Args:
        z: a categorical block.
        weights: a Dirichlet block, whose μ is E log π.
    """
    return jnp.sum(z.probabilities * weights.expectation, axis=-1)


def boltzmann(couplings: Array, fields: Array, mean: Array) -> Array:
    r"""$E[½s^⊤Js + h^⊤s] = ½μ^⊤Jμ + h^⊤μ$ for independent spins $s ∈ \{−1, 1\}$ with $μ = E s$.

    Args:
        couplings: J, symmetric, with zeros on its diagonal.
        fields: h.
        mean: μ of a `Bernoulli` block.
    """
    return 0.5 * mean @ couplings @ mean + fields @ mean


# Choices among components.


def per_component(components: Factor, views: tuple[Any, ...], data: tuple[Any, ...]) -> Array:
    """E log f(y_n | component k), (N, K).

    Args:
        components: a factor whose blocks have K plates.
        views: its blocks, in its order.
        data: its arrays, in its order; the last has a row for each n.
    """
    by_name = dict(zip(components.blocks, views, strict=True))
    arrays = dict(zip(components.data, data, strict=True))
    # (N, 1, …) broadcasts every row against all plates.
    arrays[components.data[-1]] = arrays[components.data[-1]][:, None]
    values = components.value(by_name, arrays)
    return values if values.ndim == 2 else jnp.sum(values, axis=tuple(range(2, values.ndim)))


def choice(components: Factor, selector: BlockView, *args: Any) -> Array:
    r"""$E\log f(y_n \mid z_n) = \sum_kq(z_n = k)\,E\log f(y_n \mid k)$.

    Args:
        components: the factor f, whose blocks have a plate for each k.
        selector: a categorical block z, with a member for each row.
        args: the views of the components' blocks, then their data.
    """
    count = len(components.blocks)
    return jnp.sum(selector.probabilities * per_component(components, args[:count], args[count:]), axis=-1)


def mixture(components: Factor, weights: BlockView, *args: Any) -> Array:
    r"""$\log\sum_k\exp(E\log π_k + E\log f(y_n \mid k))$: `choice` + `categorical` + the entropy, at the best q(z_n).

    $\max_{q(z)} \sum_kq(k)[a_k − \log q(k)] = \log\sum_ke^{a_k}$ with $a_k = E\log π_k + E\log f(y_n \mid k)$, attained
    at $q ∝ e^{a}$; by the envelope theorem its derivatives are the messages with that q(z).

    Args:
        components: the factor f, whose blocks have a plate for each k.
        weights: a Dirichlet block over π.
        args: the views of the components' blocks, then their data.
    """
    count = len(components.blocks)
    logits = weights.expectation + per_component(components, args[:count], args[count:])
    return jax.nn.logsumexp(logits, axis=-1)


def words(document: Array, topics: Array, words: Array, counts: Array) -> Array:
    r"""$\sum_wn_w\log\sum_k\exp(E\log θ_k + E\log β_{kw})$ of each document: every word's topic at its best q.

    Args:
        document: E log θ, (N, K), μ of a Dirichlet block with a member for each document.
        topics: E log β, (K, V), μ of a Dirichlet block with a plate for each topic.
        words: which words occur, (N, L), as numbers 0, …, V − 1; any where a row is padded. A document with another
            number has the value NaN.
        counts: n_w, (N, L), how often each occurs; 0 in the padding.
    """
    # exp(a + b) = exp(a) exp(b): exponentials of each table and one matrix product cost far less than the exponentials
    # of all pairs. Each is divided by its maximum, so that none overflows.
    table = topics.T[words]  # (N, L, K)
    axis, letters = -1, "nlk,nk->nl"
    if words.shape[0] <= 32:
        # A loop comes back to the same few documents: transposed once, their products take half as long.
        table, axis, letters = jnp.swapaxes(table, 1, 2), 1, "nkl,nk->nl"
    topic_max = jax.lax.stop_gradient(jnp.max(table, axis=axis, keepdims=True))
    document_max = jax.lax.stop_gradient(jnp.max(document, axis=-1, keepdims=True))
    sums = jnp.einsum(letters, jnp.exp(table - topic_max), jnp.exp(document - document_max))
    log_sums = jnp.log(sums + jnp.finfo(table.dtype).tiny) + jnp.squeeze(topic_max, axis) + document_max
    # An index outside of the table reads its last row and drops the derivative, without a word.
    unknown = ((words < 0) | (words >= topics.shape[-1])) & (counts != 0)
    return jnp.sum(jnp.where(unknown, jnp.nan, counts) * log_sums, axis=-1)


# Likelihoods of one row given its output f, and their expectations over f ~ N(m, v) where these are known.


def logit(f: Array, y: Array) -> Array:
    r"""$\log p(y \mid f) = −\log(1 + e^{−(2y−1)f})$ for y ∈ {0, 1}."""
    return jax.nn.log_sigmoid((2.0 * y - 1) * f)


def logit_expected(mean: Array, variance: Array, y: Array) -> Array:
    r"""$E\log p(y \mid f) = E\log σ((2y−1)f)$ for f ~ N(m, v), the expectation of `logit`, exact at any variance."""
    return expected_log_sigmoid((2.0 * y - 1) * mean, variance)


def probit(f: Array, y: Array) -> Array:
    r"""$\log p(y \mid f) = \log Φ((2y − 1)f)$ for y ∈ {0, 1}."""
    return norm.logcdf((2.0 * y - 1) * f)


def probit_expected(mean: Array, variance: Array, y: Array) -> Array:
    r"""$E\log p(y \mid f) = E\log Φ((2y−1)f)$ for f ~ N(m, v), the expectation of `probit`, at any variance."""
    return expected_around_zero(norm.logcdf, (2.0 * y - 1) * mean, variance, 1.0)


def poisson(f: Array, y: Array) -> Array:
    r"""$\log p(y \mid f) = yf − e^f − \log y!$."""
    return y * f - jnp.exp(f) - gammaln(y + 1.0)


def poisson_expected(mean: Array, variance: Array, y: Array) -> Array:
    r"""$E\log p(y \mid f) = ym − e^{m + v/2} − \log y!$ for f ~ N(m, v), the expectation of `poisson`."""
    return y * mean - jnp.exp(mean + 0.5 * variance) - gammaln(y + 1.0)


def volatility(f: Array, y: Array) -> Array:
    r"""$\log N(y \mid 0, e^f) = −½\{\log 2π + f + y^2e^{−f}\}$."""
    return -0.5 * (_LOG_2PI + f + y**2 * jnp.exp(-f))


def volatility_expected(mean: Array, variance: Array, y: Array) -> Array:
    r"""$E\log N(y \mid 0, e^f) = −½\{\log 2π + m + y^2e^{−m + v/2}\}$ for f ~ N(m, v), from `volatility`."""
    return -0.5 * (_LOG_2PI + mean + y**2 * jnp.exp(-mean + 0.5 * variance))


def softmax(f: Array, y: Array) -> Array:
    r"""$\log p(y \mid f) = f_y − \log\sum_ke^{f_k}$ for outputs f (K,); NaN where y is none of 0, …, K − 1."""
    return f.at[label_index(y, f.shape[-1])].get(mode="fill", fill_value=jnp.nan) - jax.nn.logsumexp(f)


def student(dof: Array, scale: Array, f: Array, y: Array) -> Array:
    r"""$\log t_ν(y \mid f, s) = \log\frac{Γ((ν+1)/2)}{Γ(ν/2)\sqrt{νπ}\,s} − \frac{ν+1}2\log(1 + (y−f)^2/νs^2)$.

    Args:
        dof: ν, the degrees of freedom.
        scale: s.
        f: the output, the location of y.
        y: the observation.
    """
    return _student_at(dof, scale, y - f)


def student_expected(dof: Array, scale: Array, mean: Array, variance: Array, y: Array) -> Array:
    r"""E log t_ν(y | f, s) for f ~ N(m, v), the expectation of `student`, at any variance. Other arguments as there."""
    bend = jnp.sqrt(dof) * scale  # log(1 + gap²/νs²) is a parabola within it and a logarithm beyond.
    at = lambda gap: _student_at(dof[..., None], scale[..., None], gap)
    return expected_around_zero(at, y - mean, variance, bend)


def _student_at(dof: Array, scale: Array, gap: Array) -> Array:
    ratio = (gap / scale) ** 2 / dof
    constant = gammaln(0.5 * (dof + 1)) - gammaln(0.5 * dof) - 0.5 * jnp.log(dof * math.pi) - jnp.log(scale)
    return constant - 0.5 * (dof + 1) * jnp.log1p(ratio)


# The states of a chain.


def dynamics(views: Views, constants: Constants, lengths: Array | None = None) -> Array:
    r"""$\sum_tE\log N(x_{t+1} \mid Ax_t, \mathrm{diag}\,1/τ)$, a term for each chain and state i,

    $½\{(T − 1)(E\log τ_i − \log 2π)
    − E τ_i\sum_t(E x_{t+1,i}^2 − 2Ea_i·E[x_{t+1,i}x_t] + \mathrm{tr}\,E[a_ia_i^⊤]E[x_tx_t^⊤])\}$

    with $a_i$ the i-th row of A. The sums over t are taken before anything is multiplied, so that A enters once.

    Args:
        views: "states" (a `BandedGaussian`, whose μ is E x_t, E x_t x_tᵀ and E x_{t+1} x_tᵀ), and as blocks or
            constants "transition" (the rows of A, Gaussian) and "precision" (τ, gamma, one for each state).
        constants: the others of these.
        lengths: how many steps each chain has. The steps after these are padding, with log N(x_t | 0, I) as their term:
            it keeps q proper and leaves the chain's posterior as it is.
    """
    _, square, pair = views["states"].expectation
    steps, padding_term = pair.shape[-3], jnp.zeros(())
    next_square, previous = jnp.diagonal(square[..., 1:, :, :], axis1=-2, axis2=-1), square[..., :-1, :, :]
    if lengths is not None:
        inside = (jnp.arange(1, steps + 1) < lengths[:, None])[..., None].astype(next_square.dtype)
        padding_term = -0.5 * jnp.sum((1 - inside) * (_LOG_2PI + next_square), axis=-2)
        next_square, previous, pair = inside * next_square, inside[..., None] * previous, inside[..., None] * pair
        steps = jnp.sum(inside, axis=-2)
    next_sum, previous_sum = jnp.sum(next_square, axis=-2), jnp.sum(previous, axis=-3)
    pair_sum = jnp.sum(pair, axis=-3)
    rows, rows_cov = _transition_rows(views, constants, square.shape[-1])
    log_precision, precision = log_and_precision("precision", views, constants)
    second_moment = rows_cov + rows[:, :, None] * rows[:, None, :]
    residual = next_sum - 2 * jnp.sum(pair_sum * rows, axis=-1)
    residual = residual + jnp.einsum("ijk,...jk->...i", second_moment, previous_sum)
    return 0.5 * (steps * (log_precision - _LOG_2PI) - precision * residual) + padding_term


def _transition_rows(views: Views, constants: Constants, size: int) -> tuple[Array, Array]:
    """E a_i and Cov a_i of the rows of A; a constant A has covariance 0."""
    rows = views["transition"].mean if "transition" in views else constants["transition"]
    if rows.shape != (size, size):
        raise ValueError(
            f"The chain has {size} states, so the transition is a matrix ({size}, {size}) or a Gaussian block of "
            f"{size} rows of that length, got the shape {rows.shape}."
        )
    if "transition" not in views:
        return rows, jnp.zeros((size, size, size))
    return rows, as_matrices(views["transition"].covariance, rows)


def first_state(mean: Array, precision: Array, states: BlockView) -> Array:
    r"""$E\log N(x_0 \mid m, P^{-1}) = ½\{\log|P| − D\log 2π − \mathrm{tr}\,P\,E[x_0x_0^⊤] + 2m^⊤PE x_0 − m^⊤Pm\}$.

    Args:
        mean: m, known.
        precision: P, known, a matrix.
        states: a `BandedGaussian` block, whose μ is E x_t, E x_t x_tᵀ and E x_{t+1} x_tᵀ.
    """
    first, square = states.expectation[0][..., 0, :], states.expectation[1][..., 0, :, :]
    if precision.shape != square.shape[-2:] or mean.shape != first.shape[-1:]:
        size = first.shape[-1]
        raise ValueError(
            f"The chain has {size} states, so its first one needs a mean ({size},) and a precision ({size}, {size}), "
            f"got {mean.shape} and {precision.shape}."
        )
    distance = jnp.sum(precision * square, axis=(-2, -1)) - 2 * first @ (precision @ mean) + mean @ precision @ mean
    return 0.5 * (jnp.linalg.slogdet(precision)[1] - len(mean) * _LOG_2PI - distance)
