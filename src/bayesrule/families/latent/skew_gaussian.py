"""The multivariate skew-Gaussian: a Gaussian shifted along a direction, for posteriors with one longer tail."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import log_ndtr
from jaxtyping import Array, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import ravel, same_shape, unravel
from ...steps.needs import Need
from ...steps.step import Step
from ..gaussian.full import Gaussian
from .base import ConditionalFamily, product_rule, unbatched_gaussian

_MEAN_U = math.sqrt(2 / math.pi)  # c = E u
_VARIANCE_U = 1 - 2 / math.pi  # 1 − c² = Var u
_LOG_2PI = math.log(2 * math.pi)


class SkewGaussian(ConditionalFamily):
    r"""$θ|u ∼ N(m + uα, S^{-1})$ with u = |w|, $w ∼ N(0, 1)$: the tail is longer where the skew α points.

    $q(θ) = 2N(θ | m, S^{-1} + αα^⊤)Φ(s)$ with $s = α^⊤S(θ−m)/\sqrt p$ and $p = 1 + α^⊤Sα$. $T = (θ, uθ, θθ^⊤)$, and
    with $c = E u = \sqrt{2/π}$, $g = E[∇f]$, $g_u = E[u∇f]$, $f = \barℓ − τ\log q(u|θ)$ the step is

    $$S ← (1−ρτ)S + ρE[∇^2f], \quad m ← m − ρS^{-1}\frac{g − cg_u}{1−c^2}, \quad α ← α − ρS^{-1}\frac{g_u − cg}{1−c^2}$$

    (section 3.2; Lin, Khan and Schmidt, 2019). At a point θ, u is $E[u|θ] = (s + φ(s)/Φ(s))/\sqrt p$.

    Start from a skew that is not zero and points to the longer tail. Where α = 0, θ does not depend on u and α stays 0;
    and from the wrong side α goes to 0 and no further. If the direction of the tail is not known, fit from both sides
    and keep the fit with the larger bound.

    >>> import jax.numpy as jnp
    >>> q = SkewGaussian(jnp.zeros(1), 1.0, 2.0)
    >>> round(float(q.mean[0]), 4), round(float(q.variance()[0]), 4), round(float(q.log_prob(jnp.ones(1))), 4)
    (1.5958, 2.4535, -1.3357)

    Args:
        location: m, any pytree.
        precision: S, a number or a matrix over the ravelled location.
        skew: α, a number or a pytree like the location.
    """

    core: Gaussian
    skew: PyTree
    label: ClassVar[str] = "Skew-Gaussian"
    meaning: ClassVar[str] = "q(θ) = ∫ N(θ | m + uα, S⁻¹) q(u) du, u = |N(0, 1)|, moved as q(θ, u)"
    update: ClassVar[str] = (
        "S ← (1 − ρτ)S + ρ E[∇²f],  (m, α) ← (m, α) − ρ S⁻¹ [1 c; c 1]⁻¹ (E[∇f], E[u∇f]),  f = ℓ̄ − τ log q(u | θ)"
    )
    required_choice: ClassVar[str] = "skew"
    needs: ClassVar[tuple[Need, ...]] = (
        *ConditionalFamily.needs,
        (
            lambda p: _may_have_skew(p.member),
            "A SkewGaussian without skew stays without: the natural gradient of α is 0 at α = 0. Start from a skew "
            "that leans to the longer tail, or use a Gaussian.",
        ),
    )

    def __init__(self, location: PyTree, precision: Any, skew: PyTree):
        self.core = unbatched_gaussian("SkewGaussian", location, precision)
        self.skew = same_shape(skew, self.core.mean, "skew")

    @property
    def location(self) -> PyTree:
        """m."""
        return self.core.mean

    @property
    def mean(self) -> PyTree:
        """E θ = m + cα."""
        return jax.tree.map(lambda m, a: m + (_MEAN_U * a).astype(m.dtype), self.location, self.skew)

    @property
    def gaussian(self) -> Gaussian:
        """N(m + cα, S⁻¹ + (1−c²)αα^⊤), which has q's mean and covariance."""
        skew_slope, factor = self._precision_skew()
        precision = self.precision - _VARIANCE_U / (1 + _VARIANCE_U * (factor - 1)) * jnp.outer(skew_slope, skew_slope)
        return eqx.tree_at(lambda q: (q.mean, q.precision), self.core, (self.mean, precision))

    # The distribution.

    def _precision_skew(self) -> tuple[Float[Array, " P"], Float[Array, ""]]:
        """Sα and p."""
        skew = ravel(self.skew).astype(self.precision.dtype)
        slope = self.precision @ skew
        return slope, 1 + skew @ slope

    def _side(self, theta: PyTree) -> tuple[Float[Array, " P"], Float[Array, "..."]]:
        """κ = Sα/√p and s = κᵀ(θ − m)."""
        skew_slope, factor = self._precision_skew()
        slope = skew_slope / jnp.sqrt(factor)
        return slope, self.deviation(theta) @ slope

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        _, factor = self._precision_skew()
        _, side = self._side(theta)
        # N(θ | m, S⁻¹ + ααᵀ) has the precision S − κκᵀ and p times the determinant of S⁻¹.
        return self.core.log_prob(theta) + 0.5 * (side**2 - jnp.log(factor)) + math.log(2) + log_ndtr(side)

    def score(self, theta: PyTree) -> PyTree:
        slope, side = self._side(theta)
        return unravel((side + _ratio(side)) * slope - self.precision @ self.deviation(theta), self.location)

    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        slope, side = self._side(theta)
        ratio = _ratio(side)
        return (1 - ratio * (ratio + side)) * jnp.outer(slope, slope) - self.precision

    def entropy(self) -> Float[Array, ""]:
        """H(N(m, S⁻¹ + αα^⊤)) − log 2 − E log Φ(s), an integral over s, whose density is 2N(s | 0, p − 1)Φ(s).

        The integrand decays like exp(−½x²) in x = s√p/√(p−1), so the trapezoidal rule is exact to rounding.
        """
        _, factor = self._precision_skew()
        x = jnp.asarray(np.linspace(-10, 10, 161), factor.dtype)
        log_side = log_ndtr(jnp.sqrt(1 - 1 / factor) * x)
        density = 2 / jnp.sqrt(2 * math.pi * factor) * jnp.exp(-0.5 * x**2 / factor)
        expected = (x[1] - x[0]) * jnp.sum(density * jnp.exp(log_side) * log_side)
        return self.core.entropy() + 0.5 * jnp.log(factor) - math.log(2) - expected

    def joint_entropy(self) -> Float[Array, ""]:
        """H(q(u)) + H(q(θ | u)), where the second is the same for every u."""
        return 0.5 * (1 + math.log(math.pi / 2)) + self.core.entropy()

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        noise = jax.random.normal(key, (*shape, self.noise_size + 1), self.precision.dtype)
        return self._transformed(noise)

    @property
    def grid_axes(self) -> int:
        return self.noise_size + 1

    def grid(self, order: int) -> tuple[PyTree, Float[Array, " S"]]:
        """The product of a half-normal rule for u and the Gauss–Hermite grid of θ given u."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(order)
        noise, weights = product_rule(half_normal_rule(order), *[(nodes, weights / weights.sum())] * self.noise_size)
        return self._transformed(jnp.asarray(noise, self.precision.dtype)), jnp.asarray(weights)

    def _transformed(self, noise: Float[Array, "... 1+P"]) -> PyTree:
        """m + |w|α + S^{-1/2}ε, from w and ε."""
        u = jnp.abs(noise[..., 0])

        def leaf(t: Array, a: Array) -> Array:
            return t + (u.reshape(u.shape + (1,) * a.ndim) * a).astype(t.dtype)

        return jax.tree.map(leaf, self.core.transformed(noise[..., 1:]), self.skew)

    # The rule.

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        _, side = self._side(theta)
        u = (side + _ratio(side)) / jnp.sqrt(self._precision_skew()[1])  # E[u | θ]
        return {"location": gradient, "skew": jax.tree.map(lambda g: u.astype(g.dtype) * g, gradient)}, curvature

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        """E[u∇R] = c∇R + ∇²R Cov(θ, u) for a quadratic R, with Cov(θ, u) = (1−c²)α."""
        if gradient is None:
            return None, curvature
        covariance_term = unravel(_VARIANCE_U * curvature @ ravel(self.skew), gradient)
        skew = jax.tree.map(lambda g, a: _MEAN_U * g + a, gradient, covariance_term)
        return {"location": gradient, "skew": skew}, curvature

    def _natural_gradients(self, gradient: PyTree) -> tuple[PyTree, PyTree]:
        """(g − cg_u)/(1−c²) and (g_u − cg)/(1−c²), the gradients in the expectation parameters."""
        combine = lambda one, other: jax.tree.map(lambda x, y: (x - _MEAN_U * y) / _VARIANCE_U, one, other)
        return combine(gradient["location"], gradient["skew"]), combine(gradient["skew"], gradient["location"])

    def moved(self, step: Step) -> Self:
        location, skew = self._natural_gradients(step.gradient)
        moved = self.core.moved(dataclasses.replace(step, gradient=location))
        descend = lambda a, d: a - jnp.asarray(step.rate, a.dtype) * d.astype(a.dtype)
        new_skew = jax.tree.map(descend, self.skew, moved.solve(skew))
        return eqx.tree_at(lambda q: (q.core, q.skew), self, (moved, new_skew))

    def precision_matrices(self) -> tuple[Float[Array, "P P"], ...]:
        return self.core.precision_matrices()

    def decrement(self, step: Step) -> Float[Array, ""]:
        """A Gaussian's for g, and ½(1−c²) d^⊤S⁻¹d for d = (g_u − cg)/(1−c²), in the Fisher information of q(θ, u)."""
        gradient, (_, skew) = step.gradient["location"], self._natural_gradients(step.gradient)
        skew_term = jnp.sum(ravel(skew) * ravel(self.core.solve(skew)))
        return self.core.decrement(dataclasses.replace(step, gradient=gradient)) + 0.5 * _VARIANCE_U * skew_term


def _ratio(side: Float[Array, "..."]) -> Float[Array, "..."]:
    """φ(s)/Φ(s)."""
    return jnp.exp(-0.5 * (side**2 + _LOG_2PI) - log_ndtr(side))


@cache
def half_normal_rule(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss's rule for u = |w|, w ~ N(0, 1): nodes, and weights that add up to 1.

    The recurrence of the orthogonal polynomials is computed on a fine grid (Stieltjes's procedure), and the nodes and
    weights from the recurrence (Golub and Welsch).

    >>> nodes, weights = half_normal_rule(3)
    >>> [round(float(weights @ nodes**k), 6) for k in (2, 4)]
    [1.0, 3.0]
    """
    cutoff = 12 + 2 * order**0.5
    x, density = np.polynomial.legendre.leggauss(300)
    u = 0.5 * cutoff * (1 + x)
    density = density * np.exp(-(u**2) / 2)
    density /= density.sum()
    diagonal, off_diagonal = np.zeros(order), np.zeros(order)
    previous, current = np.zeros_like(u), np.ones_like(u)
    for k in range(order):
        diagonal[k] = np.sum(density * u * current**2)
        following = (u - diagonal[k]) * current - off_diagonal[k - 1] * previous  # off_diagonal[−1] is 0 at k = 0
        off_diagonal[k] = np.sqrt(np.sum(density * following**2))
        previous, current = current, following / off_diagonal[k]
    jacobi = np.diag(diagonal) + np.diag(off_diagonal[:-1], 1) + np.diag(off_diagonal[:-1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return nodes, vectors[0] ** 2


def _may_have_skew(member: Any) -> bool:
    """Whether any entry of the skew is not 0; traced numbers may be."""
    leaves = [] if member is None else jax.tree.leaves(member.skew)
    return member is None or any(isinstance(leaf, Tracer) or np.any(np.asarray(leaf)) for leaf in leaves)
