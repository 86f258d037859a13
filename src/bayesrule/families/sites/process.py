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
from ...numerics.random import Key
from ...numerics.trees import floating
from ...steps.step import Step
from .base import SitedGaussian, Sites, Solved, as_sites

Vector = Float[Array, " N"]
Matrix = Float[Array, "N N"]

_BLOCK, _BLOCKS = 128, 5  # outputs whose sites are taken in together: what is left are products of matrices


class GaussianProcess(SitedGaussian):
    r"""$q(f) ∝ N(f \mid m_0, K)\exp\sum_n(ν_nf_n − ½κ_nf_n^2)$, a Gaussian process seen at N inputs.

    `covariance` is the prior's K, (N, N), `mean` its $m_0$, a number or (N,), and `sites` λ = (ν, −½κ), by default
    none: the prior. K is never inverted and may be singular, as where an input comes twice. Densities and the entropy
    are relative to the prior (see `SitedGaussian`). A change of λ costs about $N^3$ operations, nearly all of them
    in products of matrices.

    >>> import jax.numpy as jnp
    >>> q = GaussianProcess(jnp.array([[1.0, 0.5], [0.5, 1.0]]))
    >>> q = q.with_natural((jnp.array([2.0, 0.0]), jnp.array([-0.5, 0.0])))     # f₀ seen: 2 with precision 1
    >>> q.mean.tolist(), q.spread.tolist(), round(float(q.entropy()), 4)
    ([1.0, 0.5], [0.5, 0.875], -0.5966)
    """

    prior: Matrix
    center: Vector
    meaning: ClassVar[str] = "q(f) ∝ N(f | m₀, K) exp Σ_n(ν_n f_n − ½κ_n f_n²), λ = (ν, −½κ), h the prior"

    def __init__(self, covariance: Matrix, mean: Any = 0.0, sites: Any = None):
        covariance = floating(covariance)
        if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1] or not covariance.size:
            raise ValueError(
                f"A GaussianProcess takes the prior covariance of its N outputs, (N, N), got {covariance.shape}: for a "
                "kernel and inputs, kernel(x, x)."
            )
        mean = jnp.asarray(mean, covariance.dtype)
        if mean.shape not in ((), covariance.shape[:1]):
            raise ValueError(
                f"The prior mean of {len(covariance)} outputs is a number or {len(covariance)}, got {mean.shape}."
            )
        if not isinstance(covariance, Tracer):
            _check(covariance)
        self.prior, self.center = covariance, jnp.broadcast_to(mean, covariance.shape[:1])
        prior = Solved(jnp.zeros((), mean.dtype), self.center, jnp.diagonal(covariance), jnp.zeros_like(covariance))
        self._settle(as_sites(sites, self.center, "GaussianProcess"), prior if sites is None else None)

    @property
    def prior_mean(self) -> Vector:
        return self.center

    def covariance(self) -> Matrix:
        """V, of all outputs."""
        return _covariance(self.prior, -2 * self.sites[1], jax.lax.stop_gradient(self.kept))

    def solved(self, natural: Sites) -> Solved:
        return Solved(*_solved(self.prior, self.center, natural[0], -2 * natural[1]))

    def elsewhere(self, cross: Float[Array, "N M"], own: Array, mean: Any = 0.0) -> tuple[Array, Array]:
        """The mean and (co)variance of M more outputs: `cross` is their prior covariance with these, `own` theirs."""
        mean = jnp.broadcast_to(jnp.asarray(mean, self.center.dtype), cross.shape[1:])
        size, (first, second) = len(self.center), self.sites
        joint, means = jnp.concatenate([self.prior, cross], axis=1), jnp.concatenate([self.center, mean])
        _, found, gains = _taken_in(joint, means, first, -2 * second)
        gains, sign = gains[:, size:], -jnp.sign(second)
        return found[size:], own - (sign @ gains**2 if own.ndim == 1 else gains.T @ (sign[:, None] * gains))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        noise = jax.random.normal(key, (*shape, *self.mean.shape), self.mean.dtype)
        return self.mean + noise @ jnp.linalg.cholesky(with_jitter(self.covariance())).mT

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½[gᵀVg + ½ Σ_{nm} dκ_n V_nm² dκ_m], with g = dν − dκ∘m.

        Of many outputs the second term is bounded by ½(Σ_n |dκ_n| V_nn)², which costs nothing, as long as the first is
        above 0.1 nats: that only puts off the end.
        """
        first, second = self.direction(step)
        sign, slope = -jnp.sign(self.sites[1]), first + 2 * second * self.mean
        explained = jnp.sum(sign * (self.kept @ slope) ** 2)
        near = 0.5 * (slope @ self.prior @ slope - explained)
        squared = lambda: _squared(self.prior, self.kept, sign, second)
        if len(slope) <= _BLOCK:
            return near + squared()
        return near + jax.lax.cond(near > 0.1, lambda: jnp.sum(jnp.abs(second) * self.spread) ** 2, squared)


@jax.custom_jvp
def _solved(prior: Matrix, center: Vector, first: Vector, curve: Vector) -> tuple[Array, Vector, Vector, Matrix]:
    """log|I + Kκ|, the posterior's mean, its variances, and the gains G: V = K − Gᵀ sign(κ) G."""
    log_det, mean, gains = _taken_in(prior, center, first, curve)
    return log_det, mean, jnp.diagonal(prior) - jnp.sign(curve) @ gains**2, gains


@jax.jit
def _taken_in(prior: Array, mean: Array, first: Vector, curve: Vector) -> tuple[Array, Array, Array]:
    """The sites taken in: log|I + Kκ|, the mean, and the gains G; `prior` may have columns of outputs without sites.

    Blocks of outputs in turn, as a Kalman filter takes in observations: with D = |κ|^½, by the Cholesky factor of I +
    DVD, and with the rows of V from the gains so far. After all of those the sites with κ < 0, which take information
    away, by that of I − DVD: it fails where q is not proper. An output has a row of G for the sign of its own κ.
    """
    size = prior.shape[0]
    blocks = min(-(-size // _BLOCK), _BLOCKS)
    width = -(-size // blocks)
    place, sign = jnp.arange(size), jnp.sign(curve)

    def turn(
        way: int, begin: Any, fresh: Array, rows: Array, log_det: Array, mean: Array
    ) -> tuple[Array, Array, Array]:
        count = len(fresh)
        cut = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, begin, count, axis)
        kappa, inner = jnp.where(fresh, jnp.maximum(way * cut(curve), 0.0), 0.0), cut(rows, 1)
        root = jnp.sqrt(kappa)
        matrix = jnp.eye(count, dtype=prior.dtype) + way * root[:, None] * inner * root
        factor = linalg.cholesky(matrix, symmetrize_input=False)
        solve = partial(linalg.triangular_solve, factor, left_side=True, lower=True)
        pull = jnp.where(fresh & (way > 0), cut(first), 0.0) - way * kappa * cut(mean)
        # (I + κV)⁻¹ pull: not as a difference where κV is large.
        far = way * kappa * jnp.diagonal(inner) > 1
        near, scaled = jnp.where(far, 0.0, pull), jnp.where(far, pull / jnp.where(far, root, 1.0), 0.0)
        scaled = solve((scaled - way * root * (inner @ near))[:, None])
        push = near + root * solve(scaled, transpose_a=True)[:, 0]
        log_det = log_det + 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
        return log_det, mean + push @ rows, solve(jnp.diag(root)) @ rows

    log_det, gains = jnp.zeros((), prior.dtype), jnp.zeros((0, prior.shape[1]), prior.dtype)
    for begin in range(0, size, width):
        end = min(begin + width, size)
        rows = prior[begin:end] - (sign[:begin, None] * gains[:, begin:end]).T @ gains
        log_det, mean, gain = turn(1, begin, place[begin:end] >= begin, rows, log_det, mean)
        gains = jnp.concatenate([gains, gain])

    def taken_away(block: Array, carry: tuple) -> tuple:
        log_det, mean, gains = carry
        begin = jnp.minimum(block * width, size - width)  # the last block reaches back to outputs that are done
        fresh = begin + jnp.arange(width) >= block * width
        cut = lambda x, axis=0: jax.lax.dynamic_slice_in_dim(x, begin, width, axis)
        rows = cut(prior) - (sign[:, None] * cut(gains, 1)).T @ gains
        log_det, mean, gain = turn(-1, begin, fresh, rows, log_det, mean)
        return log_det, mean, jax.lax.dynamic_update_slice_in_dim(gains, cut(gains) + gain, begin, 0)

    some = jnp.where(jnp.any(curve < 0), blocks, 0)
    return jax.lax.fori_loop(0, some, taken_away, (log_det, mean, gains))


@_solved.defjvp
def _solved_jvp(primals: tuple, tangents: tuple) -> tuple:
    """dm = P(dm₀ + dKα) + V(dν − dκ m), dV = P dK Pᵀ − V dκ V, with α = ν − κm and P = I − Vκ."""
    prior, _, first, curve = primals
    dprior, dcenter, dfirst, dcurve = tangents
    found = _solved(*primals)
    _, mean, variance, gains = found
    spread = _covariance(prior, curve, gains)
    outer = dcenter + dprior @ (first - curve * mean)
    dmean = outer + spread @ (dfirst - dcurve * mean - curve * outer)
    kept = jnp.eye(len(mean), dtype=mean.dtype) - spread * curve  # P
    dvariance = jnp.sum(kept @ dprior * kept, axis=1) - spread**2 @ dcurve
    weight = jnp.diag(curve) - curve[:, None] * spread * curve
    dlog_det = jnp.sum(variance * dcurve) + jnp.sum(weight * dprior)
    return found, (dlog_det, dmean, dvariance, jnp.zeros_like(gains))  # V's own derivatives are `_covariance`'s


@jax.custom_jvp
def _covariance(prior: Matrix, curve: Vector, gains: Matrix) -> Matrix:
    return prior - gains.T @ (jnp.sign(curve)[:, None] * gains)


@_covariance.defjvp
def _covariance_jvp(primals: tuple, tangents: tuple) -> tuple:
    spread = _covariance(*primals)
    kept = jnp.eye(len(spread), dtype=spread.dtype) - spread * primals[1]
    return spread, kept @ tangents[0] @ kept.T - spread @ (tangents[1][:, None] * spread)


def _squared(prior: Matrix, gains: Matrix, sign: Vector, vector: Vector) -> Float[Array, ""]:
    """vᵀ(V∘V)v, from the lower half of V. Of many outputs in single precision: a decrement needs no sixteen digits."""
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
