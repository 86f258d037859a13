"""Points for outputs that are linear in θ and therefore Gaussian under q."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.latent.base import ConditionalFamily


def _check_linear(q: Any) -> None:
    if isinstance(q, ConditionalFamily):
        raise ValueError(
            f"Objective(…, linear=True) integrates over outputs that are Gaussian, and under a {type(q).__name__} they "
            "are not: leave linear=True out, so that the points are values of θ."
        )


def _factor(covariance: Float[Array, "B K K"]) -> Float[Array, "B K K"]:
    """chol(C), and a little more than C where outputs depend on each other and C is singular."""
    plain = jnp.linalg.cholesky(covariance)
    fine = jnp.all(jnp.isfinite(plain), axis=(1, 2), keepdims=True)
    size, limits = covariance.shape[-1], jnp.finfo(covariance.dtype)
    more = 8 * size * limits.eps * jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] + limits.tiny
    safe = covariance + jnp.where(fine, 0.0, more) * jnp.eye(size, dtype=covariance.dtype)
    return jnp.linalg.cholesky(safe)
