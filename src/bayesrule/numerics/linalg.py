"""Linear algebra on many small matrices, and square roots of matrices that may be singular.

The products and factorisations of small matrices are written out as elementwise operations over the batch: a call into
LAPACK for each matrix would cost more than the few operations it makes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_SMALL = 8


def matmul(a: Float[Array, "... I K"], b: Float[Array, "... K J"]) -> Float[Array, "... I J"]:
    """a @ b."""
    size = a.shape[-1]
    if size > _SMALL:
        return a @ b
    parts = [a[..., :, k, None] * b[..., None, k, :] for k in range(size)]
    return sum(parts[1:], start=parts[0])


def matvec(a: Float[Array, "... I K"], x: Float[Array, "... K"]) -> Float[Array, "... I"]:
    """a @ x."""
    return jnp.sum(a * x[..., None, :], axis=-1)


def outer(x: Float[Array, "... I"], y: Float[Array, "... J"]) -> Float[Array, "... I J"]:
    """x yᵀ."""
    return x[..., :, None] * y[..., None, :]


def symmetric(a: Float[Array, "... D D"]) -> Float[Array, "... D D"]:
    """½(A + Aᵀ), which removes the asymmetry that rounding makes."""
    return 0.5 * (a + a.mT)


def _eliminate(rows: Float[Array, "... D E"], least: Float[Array, "... D"]) -> Float[Array, "... D E"]:
    """Transform the rows [M, B] to [U, U⁻ᵀB] with M = UᵀU; a pivot of at most `least` counts as zero."""
    size = least.shape[-1]
    index = jnp.arange(size)

    def eliminate_row(k: Array, rows: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(rows, k, axis=-2, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(row, k, axis=-1)
        good = pivot > jax.lax.dynamic_index_in_dim(least, k, axis=-1)
        scaled = jnp.where(good, row / jnp.sqrt(jnp.where(good, pivot, 1.0)), jnp.zeros((), row.dtype))
        below = jnp.where(index > k, scaled[..., :size], 0.0)
        rows = rows - outer(below, scaled)
        return jnp.where((index == k)[:, None], scaled[..., None, :], rows)

    return jax.lax.fori_loop(0, size, eliminate_row, rows)


def root(matrix: Float[Array, "... D D"]) -> Float[Array, "... D D"]:
    """The upper triangular U with UᵀU = P, for a positive semi-definite P; the row of a zero pivot is zero."""
    sizes = jnp.diagonal(matrix, axis1=-2, axis2=-1)
    return jnp.triu(_eliminate(matrix, 16 * jnp.finfo(matrix.dtype).eps * sizes))


def with_jitter(matrix: Float[Array, "... D D"]) -> Float[Array, "... D D"]:
    """The matrix plus 8·D·eps·(its largest diagonal entry) on the diagonal.

    That is enough for the Cholesky factorisation of a covariance to succeed although rounding has made it slightly
    indefinite.
    """
    size, limits = matrix.shape[-1], jnp.finfo(matrix.dtype)
    largest = jnp.maximum(jnp.max(jnp.diagonal(matrix, axis1=-2, axis2=-1), axis=-1), limits.tiny)
    return matrix + (8 * size * limits.eps * largest)[..., None, None] * jnp.eye(size, dtype=matrix.dtype)


def root_rows(matrix: Float[Array, "... D D"]) -> Float[Array, "... D D"]:
    """Rows c_r with M = Σ_r c_r c_rᵀ, from the eigenvectors of a symmetric M; negative eigenvalues count as 0."""
    if matrix.shape[-1] == 1:
        return jnp.sqrt(jnp.maximum(matrix, 0.0))
    values, vectors = jnp.linalg.eigh(matrix)
    return jnp.sqrt(jnp.maximum(values, 0.0))[..., None] * vectors.mT


def symmetric_root(matrix: Float[Array, "... D D"]) -> Float[Array, "... D D"]:
    """The symmetric R with RR = M for a symmetric M, singular or not; negative eigenvalues count as 0."""
    values, vectors = jnp.linalg.eigh(matrix)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[..., None, :]) @ vectors.mT


def safe_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """√x where x > 0 and 0 elsewhere, with the derivative 0 where x = 0 instead of an infinite one.

    A variance of 0 then gives the gradient of a constant, and not a NaN.
    """
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


@jax.custom_jvp
def posterior(
    covariance: Float[Array, "... D D"], information: Float[Array, "... D D"]
) -> tuple[Float[Array, "... D D"], Float[Array, "..."]]:
    """The posterior covariance K = (P⁻¹ + J)⁻¹ and log|I + PJ|, for a covariance P that may be large or singular.

    With P = UᵀU, I + UJUᵀ = LLᵀ and Y = L⁻¹U it is K = YᵀY, so that a small variance is no difference of two large
    ones. J may have negative eigenvalues; where P⁻¹ + J is not positive definite, the results are NaN.
    """
    factor = root(covariance)
    size = factor.shape[-1]
    eye = jnp.eye(size, dtype=factor.dtype)
    mixed = eye + matmul(matmul(factor, information), factor.mT)
    both = jnp.concatenate([mixed, jnp.broadcast_to(factor, mixed.shape)], axis=-1)
    eliminated = _eliminate(both, jnp.zeros(mixed.shape[:-1], factor.dtype))
    pivots = jnp.diagonal(eliminated[..., :size], axis1=-2, axis2=-1)
    half = eliminated[..., size:]
    proper = jnp.where(jnp.min(pivots, axis=-1) > 0, 0.0, jnp.nan)
    return matmul(half.mT, half) + proper[..., None, None], 2 * jnp.sum(jnp.log(pivots), axis=-1) + proper


@posterior.defjvp
def _posterior_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """dK = (I − KJ)dP(I − JK) − K dJ K,  d log|I + PJ| = tr (J − JKJ)dP + tr K dJ."""
    (_, J), (dP, dJ) = primals, tangents
    K, log_det = posterior(*primals)
    kept = jnp.eye(J.shape[-1], dtype=J.dtype) - matmul(K, J)
    change = matmul(matmul(kept, dP), kept.mT) - matmul(matmul(K, dJ), K)
    slope = jnp.sum(matmul(J, kept) * dP.mT + K * dJ.mT, axis=(-2, -1))
    return (K, log_det), (change, slope)
