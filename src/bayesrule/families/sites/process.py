"""A Gaussian process at the inputs of its data: a dense prior covariance, and a Gaussian site on every output."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.lax import linalg
from jaxtyping import Array, Float

from ...numerics.linalg import with_jitter
from ...numerics.programs import compiled
from ...numerics.random import Key
from ...numerics.trees import floating
from ...steps.step import Step
from .base import SitedGaussian, Sites, Solution, as_sites

Vector = Float[Array, " N"]
Matrix = Float[Array, "N N"]

# Sites are conditioned on in at most `_BLOCKS` blocks of `_BLOCK` outputs or more: the Cholesky factorisations are then
# small, and nearly all operations are products of matrices.
_BLOCK, _BLOCKS = 128, 5


class GaussianProcess(SitedGaussian):
    r"""$q(f) ∝ N(f \mid m_0, K)\exp\sum_n(ν_nf_n − ½κ_nf_n^2)$, a Gaussian process at N inputs.

    The prior is the base measure: $λ = (ν, −½κ)$, $T = (f, f^2)$, $μ = (m, V_{nn} + m_n^2)$ with $V = (K^{-1} +
    \mathrm{diag}\,κ)^{-1}$ and $m = m_0 + V(ν − κm_0)$. K is never inverted and may be singular, for example where an
    input occurs twice. Densities and the entropy are relative to the prior (see `SitedGaussian`). A change of λ costs
    about $N^3$ operations, nearly all of them in products of matrices.

    >>> import jax.numpy as jnp
    >>> q = GaussianProcess(jnp.array([[1.0, 0.5], [0.5, 1.0]]))
    >>> q = q.with_natural((jnp.array([2.0, 0.0]), jnp.array([-0.5, 0.0])))     # f₀ observed: 2, precision 1
    >>> q.mean.tolist(), q.variance.tolist(), round(float(q.entropy()), 4)
    ([1.0, 0.5], [0.5, 0.875], -0.5966)

    Args:
        covariance: the prior's K, (N, N); for a kernel and inputs, `kernel(x, x)`.
        mean: the prior's $m_0$, a number or (N,).
        sites: λ, two arrays (N,); by default none, which is the prior.
    """

    prior: Matrix
    center: Vector
    meaning: ClassVar[str] = "q(f) ∝ N(f | m₀, K) exp Σ_n(ν_n f_n − ½κ_n f_n²), λ = (ν, −½κ), h the prior"

    def __init__(self, covariance: Matrix, mean: Any = 0.0, sites: Any = None):
        covariance = floating(covariance)
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1] or not covariance.size:
            raise ValueError(
                f"A GaussianProcess takes the prior covariance of its N outputs, (N, N), got {covariance.shape}: for a "
                "kernel and inputs pass kernel(x, x)."
            )
        mean = jnp.asarray(mean, covariance.dtype)
        if mean.shape not in ((), covariance.shape[:1]):
            raise ValueError(
                f"The prior mean of {len(covariance)} outputs is a number or {len(covariance)}, got {mean.shape}."
            )
        if not isinstance(covariance, Tracer):
            _check(covariance)
        self.prior, self.center = covariance, jnp.broadcast_to(mean, covariance.shape[:1])
        prior = Solution(jnp.zeros((), mean.dtype), self.center, jnp.diagonal(covariance), jnp.zeros_like(covariance))
        self._set_sites(as_sites(sites, self.center, "GaussianProcess"), prior if sites is None else None)

    @property
    def prior_mean(self) -> Vector:
        return self.center

    def covariance(self) -> Matrix:
        """V, the covariance of all outputs under q."""
        # The gains are functions of the other arguments, whose derivatives `_covariance` has in closed form.
        return _covariance(self.prior, -2 * self.sites[1], jax.lax.stop_gradient(self._gains))

    @property
    def _gains(self) -> Matrix:
        """G with V = K − Gᵀ sign(κ) G."""
        return self.auxiliary

    def solve_sites(self, natural: Sites) -> Solution:
        return Solution(*_solve(self.prior, self.center, natural[0], -2 * natural[1]))

    def predict(self, cross: Float[Array, "N M"], own: Array, mean: Any = 0.0) -> tuple[Array, Array]:
        """The mean and the (co)variance of M other outputs of the process under q.

        Args:
            cross: their prior covariance with this member's N outputs.
            own: their prior variances, (M,), or covariance, (M, M); the result has the same form.
            mean: their prior mean.
        """
        mean = jnp.broadcast_to(jnp.asarray(mean, self.center.dtype), cross.shape[1:])
        size, (first, second) = len(self.center), self.sites
        joint, means = jnp.concatenate([self.prior, cross], axis=1), jnp.concatenate([self.center, mean])
        _, posterior_mean, gains = _condition(joint, means, first, -2 * second)
        gains, sign = gains[:, size:], -jnp.sign(second)
        explained = sign @ gains**2 if own.ndim == 1 else gains.T @ (sign[:, None] * gains)
        return posterior_mean[size:], own - explained

    elsewhere = predict  # its earlier name

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        noise = jax.random.normal(key, (*shape, *self.mean.shape), self.mean.dtype)
        return self.mean + noise @ jnp.linalg.cholesky(with_jitter(self.covariance())).mT

    def cancellations(self) -> tuple[Vector, ...]:
        """K_nn/V_nn, because the variances are V = K − Gᵀ sign(κ) G."""
        return (jnp.diagonal(self.prior) / self.variance,)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½[gᵀVg + ½ Σ_{nm} dκ_n V_nm² dκ_m], with g = dν − dκ∘m.

        With more than `_BLOCK` outputs the second term is replaced by its upper bound ½(Σ_n |dκ_n| V_nn)², which costs
        nothing, as long as the first term is above 0.1 nats: an upper bound can only delay the end of a fit.
        """
        first, second = self.direction(step)
        sign, slope = -jnp.sign(self.sites[1]), first + 2 * second * self.mean
        explained = jnp.sum(sign * (self._gains @ slope) ** 2)
        mean_term = 0.5 * (slope @ self.prior @ slope - explained)
        variance_term = lambda: _squared_form(self.prior, self._gains, sign, second)
        if len(slope) <= _BLOCK:
            return mean_term + variance_term()
        bound = lambda: jnp.sum(jnp.abs(second) * self.variance) ** 2
        return mean_term + jax.lax.cond(mean_term > 0.1, bound, variance_term)


@jax.custom_jvp
def _solve(prior: Matrix, center: Vector, first: Vector, curve: Vector) -> tuple[Array, Vector, Vector, Matrix]:
    """log|I + Kκ|, the posterior's mean, its variances, and the gains G, for which V = K − Gᵀ sign(κ) G."""
    log_det, mean, gains = _condition(prior, center, first, curve)
    return log_det, mean, jnp.diagonal(prior) - jnp.sign(curve) @ gains**2, gains


@compiled
def _condition(prior: Array, mean: Array, first: Vector, curve: Vector) -> tuple[Array, Array, Array]:
    """Condition the prior on all sites, block by block: returns log|I + Kκ|, the posterior mean, and the gains G.

    The blocks are treated as a Kalman filter treats its observations. The rows of the current covariance V that belong
    to a block follow from the gains so far, and with D = |κ|^½ the block's own gains follow from the Cholesky factor of
    I + DVD. The sites with κ < 0 take information away; they come after all others, with the factor of I − DVD, which
    is NaN where q is not proper. Each output thus has one row of G, with the sign of its κ.

    Args:
        prior: K, (N, N), perhaps with more columns, of outputs without sites.
        mean: the prior mean of all columns.
        first: ν, (N,).
        curve: κ, (N,).
    """
    size = prior.shape[0]
    blocks = min(-(-size // _BLOCK), _BLOCKS)
    width = -(-size // blocks)
    index, sign = jnp.arange(size), jnp.sign(curve)

    def condition_block(
        direction: int, begin: Any, active: Array, rows: Array, log_det: Array, mean: Array
    ) -> tuple[Array, Array, Array]:
        """Condition on the active sites of a block that have this sign; `rows` are the block's rows of V."""
        count = len(active)
        cut = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, begin, count, axis)
        kappa, inner = jnp.where(active, jnp.maximum(direction * cut(curve), 0.0), 0.0), cut(rows, 1)
        root = jnp.sqrt(kappa)
        matrix = jnp.eye(count, dtype=prior.dtype) + direction * root[:, None] * inner * root
        factor = linalg.cholesky(matrix, symmetrize_input=False)
        solve = partial(linalg.triangular_solve, factor, left_side=True, lower=True)
        residual = jnp.where(active & (direction > 0), cut(first), 0.0) - direction * kappa * cut(mean)
        # This is (I + κV)⁻¹ times the residual. Where κV is large it would be a small difference of large numbers, so
        # that entry is divided by √κ first.
        large = direction * kappa * jnp.diagonal(inner) > 1
        plain, scaled = jnp.where(large, 0.0, residual), jnp.where(large, residual / jnp.where(large, root, 1.0), 0.0)
        scaled = solve((scaled - direction * root * (inner @ plain))[:, None])
        weights = plain + root * solve(scaled, transpose_a=True)[:, 0]
        log_det = log_det + 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
        return log_det, mean + weights @ rows, solve(jnp.diag(root)) @ rows

    log_det, gains = jnp.zeros((), prior.dtype), jnp.zeros((0, prior.shape[1]), prior.dtype)
    for begin in range(0, size, width):
        end = min(begin + width, size)
        rows = prior[begin:end] - (sign[:begin, None] * gains[:, begin:end]).T @ gains
        log_det, mean, gain = condition_block(1, begin, index[begin:end] >= begin, rows, log_det, mean)
        gains = jnp.concatenate([gains, gain])

    def condition_on_negative(block: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        log_det, mean, gains = carry
        # All blocks have one width, so the last one overlaps the one before it: those outputs are done already.
        begin = jnp.minimum(block * width, size - width)
        active = begin + jnp.arange(width) >= block * width
        cut = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, begin, width, axis)
        rows = cut(prior) - (sign[:, None] * cut(gains, 1)).T @ gains
        log_det, mean, gain = condition_block(-1, begin, active, rows, log_det, mean)
        return log_det, mean, jax.lax.dynamic_update_slice_in_dim(gains, cut(gains) + gain, begin, 0)

    turns = jnp.where(jnp.any(curve < 0), blocks, 0)
    return jax.lax.fori_loop(0, turns, condition_on_negative, (log_det, mean, gains))


@_solve.defjvp
def _solve_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """dm = P(dm₀ + dKα) + V(dν − dκ m), dV = P dK Pᵀ − V dκ V, with α = ν − κm and P = I − Vκ."""
    prior, _, first, curve = primals
    dprior, dcenter, dfirst, dcurve = tangents
    solution = _solve(*primals)
    _, mean, variance, gains = solution
    covariance = _covariance(prior, curve, gains)
    prior_change = dcenter + dprior @ (first - curve * mean)
    dmean = prior_change + covariance @ (dfirst - dcurve * mean - curve * prior_change)
    projection = jnp.eye(len(mean), dtype=mean.dtype) - covariance * curve  # P
    dvariance = jnp.sum(projection @ dprior * projection, axis=1) - covariance**2 @ dcurve
    weight = jnp.diag(curve) - curve[:, None] * covariance * curve
    dlog_det = jnp.sum(variance * dcurve) + jnp.sum(weight * dprior)
    # The gains are used by `_covariance` alone, which has its own derivatives.
    return solution, (dlog_det, dmean, dvariance, jnp.zeros_like(gains))


@jax.custom_jvp
def _covariance(prior: Matrix, curve: Vector, gains: Matrix) -> Matrix:
    """V = K − Gᵀ sign(κ) G."""
    return prior - gains.T @ (jnp.sign(curve)[:, None] * gains)


@_covariance.defjvp
def _covariance_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """dV = P dK Pᵀ − V dκ V with P = I − Vκ; the gains are no independent argument."""
    covariance = _covariance(*primals)
    projection = jnp.eye(len(covariance), dtype=covariance.dtype) - covariance * primals[1]
    change = projection @ tangents[0] @ projection.T - covariance @ (tangents[1][:, None] * covariance)
    return covariance, change


def _squared_form(prior: Matrix, gains: Matrix, sign: Vector, vector: Vector) -> Float[Array, ""]:
    """vᵀ(V∘V)v, from the lower half of V; with many outputs in single precision, which is enough for a decrement."""
    size, parts = len(vector), 1
    if size > _BLOCK:
        prior, gains, sign, parts = prior.astype(jnp.float32), gains.astype(jnp.float32), sign.astype(jnp.float32), 4
    total, width = jnp.zeros((), vector.dtype), -(-size // parts)
    for begin in range(0, size, width):
        end = min(begin + width, size)
        rows = prior[begin:end, :end] - (sign[:, None] * gains[:, begin:end]).T @ gains[:, :end]
        twice = jnp.where(jnp.arange(end) < begin, 2.0, 1.0) * vector[:end]
        total = total + vector[begin:end] @ (rows**2 @ twice)
    return total


def _check(covariance: Matrix) -> None:
    """Raise unless the matrix is a covariance, up to rounding."""
    if not bool(jnp.all(jnp.isfinite(covariance))):
        raise ValueError("The prior covariance has entries that are not finite: look for NaN in the inputs.")
    gap = jnp.max(jnp.abs(covariance - covariance.T)) / (jnp.max(jnp.abs(covariance)) + 1e-300)
    if float(gap) > 1e3 * jnp.finfo(covariance.dtype).eps:
        raise ValueError(f"The prior covariance is not symmetric: entries differ by {float(gap):.2g} of the largest.")
    if not bool(jnp.all(jnp.isfinite(jnp.linalg.cholesky(with_jitter(covariance))))):
        raise ValueError(
            "The prior covariance is not positive semi-definite, so there is no such Gaussian: a sum or a product of "
            "kernels is, a difference need not be."
        )
