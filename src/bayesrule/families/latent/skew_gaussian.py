"""The multivariate skew-Gaussian: a Gaussian whose location is pushed one way, for posteriors with a longer tail."""

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
from jaxtyping import Array, Float, PyTree

from ...numerics.random import Key
from ...numerics.trees import ravel, same_shape, unravel
from ...steps.needs import Need
from ...steps.step import Step
from ..gaussian.full import Gaussian
from .base import ConditionalFamily, one_gaussian, tensor

_PUSH = math.sqrt(2 / math.pi)  # c = E u
_REST = 1 - 2 / math.pi  # 1 − c² = Var u
_LOG_2PI = math.log(2 * math.pi)


class SkewGaussian(ConditionalFamily):
    r"""$θ|u ∼ N(m + uα, S^{-1})$ with u = |w|, $w ∼ N(0, 1)$: the tail is longer where the skew α points.

    $q(θ) = 2N(θ | m, S^{-1} + αα^⊤)Φ(s)$ with $s = α^⊤S(θ−m)/\sqrt p$ and $p = 1 + α^⊤Sα$. $T = (θ, uθ, θθ^⊤)$, and
    with $c = E u = \sqrt{2/π}$, $g = E[∇f]$, $g_u = E[u∇f]$, $f = \barℓ − τ\log q(u|θ)$ the step is

    $$S ← (1−ρτ)S + ρE[∇^2f], \quad m ← m − ρS^{-1}\frac{g − cg_u}{1−c^2}, \quad α ← α − ρS^{-1}\frac{g_u − cg}{1−c^2}$$

    (section 3.2; Lin, Khan and Schmidt, 2019). At a point θ, u is $E[u|θ] = (s + φ(s)/Φ(s))/\sqrt p$.

    `location` m is any pytree, `precision` S a number or a matrix over the ravelled location, `skew` α a number or a
    pytree like the location. Start from a skew that is not zero and leans to the longer tail: where α = 0, u says
    nothing of θ and α stays 0; and from the wrong side α goes to 0 and no further. Where the tail is not known, fit
    from both sides and keep the larger bound.

    >>> import jax.numpy as jnp
    >>> q = SkewGaussian(jnp.zeros(1), 1.0, 2.0)
    >>> round(float(q.mean[0]), 4), round(float(q.variance()[0]), 4), round(float(q.log_prob(jnp.ones(1))), 4)
    (1.5958, 2.4535, -1.3357)
    """

    core: Gaussian
    skew: PyTree
    label: ClassVar[str] = "Skew-Gaussian"
    meaning: ClassVar[str] = "q(θ) = ∫ N(θ | m + uα, S⁻¹) q(u) du, u = |N(0, 1)|, moved as q(θ, u)"
    update: ClassVar[str] = (
        "S ← (1 − ρτ)S + ρ E[∇²f],  (m, α) ← (m, α) − ρ S⁻¹ [1 c; c 1]⁻¹ (E[∇f], E[u∇f]),  f = ℓ̄ − τ log q(u | θ)"
    )
    asked: ClassVar[str] = "skew"
    needs: ClassVar[tuple[Need, ...]] = (
        *ConditionalFamily.needs,
        (
            lambda p: _may_have_skew(p.member),
            "A SkewGaussian without skew stays without: the natural gradient of α is 0 at α = 0. Start from a skew "
            "that leans to the longer tail, or use a Gaussian.",
        ),
    )

    def __init__(self, location: PyTree, precision: Any, skew: PyTree):
        self.core = one_gaussian("SkewGaussian", location, precision)
        self.skew = same_shape(skew, self.core.mean, "skew")

    @property
    def location(self) -> PyTree:
        """m."""
        return self.core.mean

    @property
    def mean(self) -> PyTree:
        """E θ = m + cα."""
        return jax.tree.map(lambda m, a: m + (_PUSH * a).astype(m.dtype), self.location, self.skew)

    @property
    def gaussian(self) -> Gaussian:
        """N(m + cα, S⁻¹ + (1−c²)αα^⊤), which has q's mean and covariance."""
        pushed, size = self._pushed()
        precision = self.precision - _REST / (1 + _REST * (size - 1)) * jnp.outer(pushed, pushed)
        return eqx.tree_at(lambda q: (q.mean, q.precision), self.core, (self.mean, precision))

    # The distribution.

    def _pushed(self) -> tuple[Float[Array, " P"], Float[Array, ""]]:
        """Sα and p."""
        skew = ravel(self.skew).astype(self.precision.dtype)
        pushed = self.precision @ skew
        return pushed, 1 + skew @ pushed

    def _side(self, theta: PyTree) -> tuple[Float[Array, " P"], Float[Array, "..."]]:
        """κ = Sα/√p and s = κᵀ(θ − m)."""
        pushed, size = self._pushed()
        slope = pushed / jnp.sqrt(size)
        return slope, self.deviation(theta) @ slope

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        _, size = self._pushed()
        _, side = self._side(theta)
        # N(θ | m, S⁻¹ + ααᵀ) has the precision S − κκᵀ and p times the determinant of S⁻¹.
        return self.core.log_prob(theta) + 0.5 * (side**2 - jnp.log(size)) + math.log(2) + log_ndtr(side)

    def score(self, theta: PyTree) -> PyTree:
        slope, side = self._side(theta)
        return unravel((side + _ratio(side)) * slope - self.precision @ self.deviation(theta), self.location)

    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        slope, side = self._side(theta)
        ratio = _ratio(side)
        return (1 - ratio * (ratio + side)) * jnp.outer(slope, slope) - self.precision

    def entropy(self) -> Float[Array, ""]:
        """H(N(m, S⁻¹ + αα^⊤)) − log 2 − E log Φ(s): an integral over s, whose density is 2N(s | 0, p − 1)Φ(s).

        N(s)·Φ(s)log Φ(s) falls off like exp(−½x²), x = s√p/√(p−1): the trapezoid rule is exact to rounding.
        """
        _, size = self._pushed()
        x = jnp.asarray(np.linspace(-10, 10, 161), size.dtype)
        log_side = log_ndtr(jnp.sqrt(1 - 1 / size) * x)
        density = 2 / jnp.sqrt(2 * math.pi * size) * jnp.exp(-0.5 * x**2 / size)
        expected = (x[1] - x[0]) * jnp.sum(density * jnp.exp(log_side) * log_side)
        return self.core.entropy() + 0.5 * jnp.log(size) - math.log(2) - expected

    def joint_entropy(self) -> Float[Array, ""]:
        """H(q(u)) + H(q(θ | u)), which is the same for every u."""
        return 0.5 * (1 + math.log(math.pi / 2)) + self.core.entropy()

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        noise = jax.random.normal(key, (*shape, self.noise_size + 1), self.precision.dtype)
        return self._placed(noise)

    @property
    def grid_axes(self) -> int:
        return self.noise_size + 1

    def grid(self, order: int) -> tuple[PyTree, Float[Array, " S"]]:
        """Every u with the Gauss–Hermite grid of θ given u."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(order)
        noise, weights = tensor(half_normal_rule(order), *[(nodes, weights / weights.sum())] * self.noise_size)
        return self._placed(jnp.asarray(noise, self.precision.dtype)), jnp.asarray(weights)

    def _placed(self, noise: Float[Array, "... 1+P"]) -> PyTree:
        """m + |w|α + S^{-1/2}ε, from w and ε."""
        push = jnp.abs(noise[..., 0])

        def leaf(t: Array, a: Array) -> Array:
            return t + (push.reshape(push.shape + (1,) * a.ndim) * a).astype(t.dtype)

        return jax.tree.map(leaf, self.core.transformed(noise[..., 1:]), self.skew)

    # What the rule asks.

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        _, side = self._side(theta)
        push = (side + _ratio(side)) / jnp.sqrt(self._pushed()[1])  # E[u | θ]
        return {"location": gradient, "skew": jax.tree.map(lambda g: push.astype(g.dtype) * g, gradient)}, curvature

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        """At the mean: E[u∇R] = c∇R + ∇²R Cov(θ, u), and that covariance is (1−c²)α."""
        if gradient is None:
            return None, curvature
        along = unravel(_REST * curvature @ ravel(self.skew), gradient)
        return {"location": gradient, "skew": jax.tree.map(lambda g, a: _PUSH * g + a, gradient, along)}, curvature

    def _apart(self, gradient: PyTree) -> tuple[PyTree, PyTree]:
        """(g − cg_u)/(1−c²) and (g_u − cg)/(1−c²)."""
        apart = lambda one, other: jax.tree.map(lambda x, y: (x - _PUSH * y) / _REST, one, other)
        return apart(gradient["location"], gradient["skew"]), apart(gradient["skew"], gradient["location"])

    def moved(self, step: Step) -> Self:
        location, skew = self._apart(step.gradient)
        moved = self.core.moved(dataclasses.replace(step, gradient=location))
        push = lambda a, d: a - jnp.asarray(step.rate, a.dtype) * d.astype(a.dtype)
        return eqx.tree_at(lambda q: (q.core, q.skew), self, (moved, jax.tree.map(push, self.skew, moved.solve(skew))))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """A Gaussian's for g, and ½(1−c²) d^⊤S⁻¹d for d = (g_u − cg)/(1−c²), in the Fisher information of q(θ, u)."""
        gradient, (_, skew) = step.gradient["location"], self._apart(step.gradient)
        along = jnp.sum(ravel(skew) * ravel(self.core.solve(skew)))
        return self.core.decrement(dataclasses.replace(step, gradient=gradient)) + 0.5 * _REST * along


def _ratio(side: Float[Array, "..."]) -> Float[Array, "..."]:
    """φ(s)/Φ(s)."""
    return jnp.exp(-0.5 * (side**2 + _LOG_2PI) - log_ndtr(side))


@cache
def half_normal_rule(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss's rule for u = |w|, w ~ N(0, 1): nodes, and weights that add up to 1.

    The recurrence of its orthogonal polynomials comes from the density on many points (Stieltjes's procedure), the
    nodes and weights from the recurrence (Golub and Welsch).

    >>> nodes, weights = half_normal_rule(3)
    >>> [round(float(weights @ nodes**k), 6) for k in (2, 4)]
    [1.0, 3.0]
    """
    reach = 12 + 2 * order**0.5
    x, density = np.polynomial.legendre.leggauss(300)
    u = 0.5 * reach * (1 + x)
    density = density * np.exp(-(u**2) / 2)
    density /= density.sum()
    diagonal, beside = np.zeros(order), np.zeros(order)
    before, here = np.zeros_like(u), np.ones_like(u)
    for k in range(order):
        diagonal[k] = np.sum(density * u * here**2)
        after = (u - diagonal[k]) * here - beside[k - 1] * before  # beside[−1] is still 0 at first
        beside[k] = np.sqrt(np.sum(density * after**2))
        before, here = here, after / beside[k]
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    return nodes, vectors[0] ** 2


def _may_have_skew(member: Any) -> bool:
    """Whether any entry of the skew is not 0; traced numbers may be."""
    leaves = [] if member is None else jax.tree.leaves(member.skew)
    return member is None or any(isinstance(leaf, Tracer) or np.any(np.asarray(leaf)) for leaf in leaves)
