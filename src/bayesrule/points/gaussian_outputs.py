"""Points of Gaussian outputs: f = m + C^½ε for standard normal noise ε.

An output that is linear in θ is Gaussian under a Gaussian q, so that an expectation of the loss is one over the few
outputs of each example instead of all parameters. Everything that evaluates a function of such outputs places its
points here: `Objective(…, linear=True)`, the linear factors of a model, and the predictions of linear models.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.gaussian.base import GaussianFamily
from ..families.latent.base import ConditionalFamily
from ..numerics.linalg import safe_sqrt


def as_gaussian(q: Any) -> GaussianFamily:
    """q itself, which must be a Gaussian; raise where outputs that are linear in θ are not Gaussian under it."""
    if isinstance(q, ConditionalFamily):
        raise ValueError(
            f"Objective(…, linear=True) integrates over outputs that are Gaussian, and under a {type(q).__name__} they "
            "are not: leave linear=True out, so that the points are values of θ."
        )
    return q


def output_points(
    mean: Float[Array, "B *K"], covariance: Float[Array, "B *KK"], noise: Float[Array, "S ..."]
) -> Float[Array, "S B *K"]:
    """The points m + C^½ε for every row.

    Args:
        mean: The outputs' means: (B,) for one output, or (B, K).
        covariance: Their variances, in the shape of the mean, where a row's outputs are independent; else (B, K, K).
        noise: Standard normal numbers: (S, K), the same ones for every row, or (S, B, K) (without K for a mean (B,)).

    Returns:
        The points, with a leading axis for the S numbers of noise. A variance of zero has the derivative zero, rather
        than the infinite one of a square root: an output that does not vary (x = 0) is a constant.
    """
    same_for_rows = noise.ndim == mean.ndim
    if covariance.ndim > mean.ndim and mean.shape[-1] > 1:
        letters = "bkl,sl->sbk" if same_for_rows else "bkl,sbl->sbk"
        return mean + jnp.einsum(letters, covariance_root(covariance), noise)
    variance = covariance if covariance.ndim == mean.ndim else covariance[..., 0]
    return mean + safe_sqrt(variance) * (noise[:, None] if same_for_rows and mean.ndim == 2 else noise)


def covariance_root(covariance: Float[Array, "B K K"]) -> Float[Array, "B K K"]:
    """The Cholesky factor of every C.

    Where outputs depend on each other C is singular and may have no factor in floating-point arithmetic; it then gets
    a small multiple of its trace on the diagonal.
    """
    plain = jnp.linalg.cholesky(covariance)
    is_factor = jnp.all(jnp.isfinite(plain), axis=(1, 2), keepdims=True)
    size, limits = covariance.shape[-1], jnp.finfo(covariance.dtype)
    jitter = 8 * size * limits.eps * jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] + limits.tiny
    safe = covariance + jnp.where(is_factor, 0.0, jitter) * jnp.eye(size, dtype=covariance.dtype)
    return jnp.linalg.cholesky(safe)
