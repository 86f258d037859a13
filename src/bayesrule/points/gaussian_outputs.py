r"""Points of Gaussian outputs: f = m + C^½ε for standard normal noise ε.

An output that is linear in θ is Gaussian under a Gaussian q, so that an expectation of the loss is one over the few
outputs of each example instead of all parameters. Everything that evaluates a function of such outputs places its
points here: `Objective(…, linear=True)`, the linear factors of a model, and the predictions of linear models.

Gauss–Hermite nodes lie about half a standard deviation s apart. A logistic loss bends within a few units of 0, so that
where s is large they jump over the bend: the mean curvature at 24 nodes is off by 6 % at s = 5, by half at s = 10, and
says nothing at s = 30. There `bent_points` takes the trapezoidal rule in u, with $df/du = (1/s + 1/(b\cosh u))^{-1}$:
its nodes are about b apart around 0 and s elsewhere, and it converges exponentially.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
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


class BentNodes(NamedTuple):
    """Nodes for `bent_points`, with a leading axis where there are several.

    Attributes:
        hermite, hermite_weight: A Gauss–Hermite node and its weight.
        place, place_weight: The place of a node between the ends of an interval, 0 to 1, and its share of the interval.
    """

    hermite: Array
    hermite_weight: Array
    place: Array
    place_weight: Array


_NARROW = 1.5  # Up to this many times b, Gauss–Hermite nodes resolve the bend,
_FAR = 6.0  # and also where 0 is so many standard deviations away.
_TAILS = 6.5  # The nodes end so many standard deviations from the mean.


def bent_points(
    node: BentNodes, mean: Float[Array, "B *K"], deviation: Float[Array, "B *K"], bend: Any
) -> tuple[Float[Array, "B *K"], Float[Array, " B"]]:
    """The point of every row at one node, and its weights, which sum to 1 up to rounding over all nodes.

    Args:
        node: The node.
        mean: The means of one output of each row, (B,) or (B, 1).
        deviation: Their standard deviations.
        bend: b, the distance from 0 beyond which the loss is all but straight.
    """
    is_wide = (deviation > _NARROW * bend) & (jnp.abs(mean) < _FAR * deviation)
    hermite = mean + deviation * node.hermite, jnp.broadcast_to(node.hermite_weight, mean.shape)

    def with_bent() -> tuple[Array, Array]:
        s, m = jnp.asarray(jnp.where(is_wide, deviation, 2 * bend)), jnp.asarray(jnp.where(is_wide, mean, 0.0))
        ratio = jnp.sqrt((s - bend) / (s + bend))
        far = s / jnp.sqrt(s**2 - bend**2) * 2 * jnp.arctanh(ratio)  # Far from 0, f = s(u ∓ far).
        low, high = m / s - _TAILS - far, m / s + _TAILS + far
        u = low + (high - low) * node.place
        half = jnp.tanh(0.5 * u)
        # artanh as a logarithm, which takes a quarter of the time and is as exact to within rounding errors of 1.
        inverse = 0.5 * jnp.log((1 + ratio * half) / (1 - ratio * half))
        f = s * (u - far * inverse / jnp.arctanh(ratio))
        slope = bend * s * (1 + half**2) / (s * (1 - half**2) + bend * (1 + half**2))  # with cosh u by tanh ½u
        z = (f - m) / s
        weight = jnp.exp(-0.5 * z**2) / (math.sqrt(2 * math.pi) * s) * slope * (high - low) * node.place_weight
        return jnp.asarray(jnp.where(is_wide, f, hermite[0])), jnp.asarray(jnp.where(is_wide, weight, hermite[1]))

    points, weights = jax.lax.cond(jnp.any(is_wide), with_bent, lambda: hermite)
    return points, weights.reshape(mean.shape[0])


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
