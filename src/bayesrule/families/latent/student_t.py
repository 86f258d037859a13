"""The multivariate Student-t: a Gaussian whose scale is drawn first, for posteriors with heavy tails."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import unravel
from ...steps.step import Step
from ..gaussian.full import Gaussian
from .base import ConditionalFamily, product_rule, unbatched_gaussian


class StudentT(ConditionalFamily):
    r"""A Student-t with ν degrees of freedom: $θ|w ∼ N(m, wS^{-1})$ with $1/w ∼ \mathrm{Gamma}(ν/2, ν/2)$.

    $T = (θ, θθ^⊤)/w$, so $μ = (m, S^{-1} + mm^⊤)$ and the step is a Gaussian's, on curvature weighted by w:
    $S ← (1−ρτ)S + ρE[w∇^2f]$, $m ← m − ρS^{-1}E[∇f]$ with $f = \barℓ − τ\log q(w|θ)$ (section 3.2; Lin, Khan and
    Schmidt, 2019). At a point θ, w is $E[w|θ] = (ν + Q)/(ν + P − 2)$ with $Q = (θ−m)^⊤S(θ−m)$.

    >>> import jax.numpy as jnp
    >>> q = StudentT(jnp.zeros(2), jnp.eye(2), 4.0)
    >>> [float(v) for v in q.variance()], round(float(q.log_prob(jnp.zeros(2))), 4)
    ([2.0, 2.0], -1.8379)

    Args:
        mean: m, any pytree.
        precision: S, a number or a matrix over the ravelled mean; the covariance is $ν/(ν−2) S^{-1}$.
        dof: ν, a fixed number above 2: up to 2, θ has no covariance, w no expectation, and $E[w∇^2f]$ is infinite even
            for a quadratic f. (The variance of the step over draws is finite if ν > 4 and the curvature is bounded.)
    """

    core: Gaussian
    dof: float = eqx.field(static=True)
    label: ClassVar[str] = "Student-t"
    meaning: ClassVar[str] = "q(θ) = ∫ N(θ | m, wS⁻¹) q(w) dw, 1/w ~ Gamma(ν/2, ν/2), moved as q(θ, w)"
    update: ClassVar[str] = "S ← (1 − ρτ)S + ρ E[w∇²f],  m ← m − ρ S⁻¹ E[∇f],  f = ℓ̄ − τ log q(w | θ)"
    required_choice: ClassVar[str] = "dof"
    symmetric: ClassVar[bool] = True

    def __init__(self, mean: PyTree, precision: Any, dof: float):
        if not (isinstance(dof, float | int) and 2 < dof < math.inf):
            raise ValueError(
                f"dof= is a fixed number above 2, where a Student-t has a covariance and the rule's step is finite "
                f"(for dof = ∞ use Gaussian), got {dof!r}."
            )
        self.core, self.dof = unbatched_gaussian("StudentT", mean, precision), float(dof)

    @property
    def mean(self) -> PyTree:
        """m."""
        return self.core.mean

    @property
    def gaussian(self) -> Gaussian:
        """N(m, ν/(ν−2) S⁻¹), which has q's mean and covariance."""
        return self.core.with_scaled_precision((self.dof - 2) / self.dof)

    # The distribution.

    def _distance(self, theta: PyTree) -> tuple[Float[Array, "... P"], Float[Array, "..."]]:
        """S(θ − m) and Q."""
        deviation = self.deviation(theta)
        slope = deviation @ self.precision
        return slope, jnp.sum(deviation * slope, axis=-1)

    @property
    def _constant(self) -> float:
        """log q(m) + H(N(m, S⁻¹)), in float64 because it is a small difference of large log-gammas."""
        from scipy.special import betaln

        half, size = self.dof / 2, self.noise_size
        gammas = math.lgamma(size / 2) - float(betaln(half, size / 2))  # log Γ(½(ν+P)) − log Γ(½ν)
        return gammas - 0.5 * size * (math.log(half) - 1)

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        _, distance = self._distance(theta)
        tail = 0.5 * (self.dof + self.noise_size) * jnp.log1p(distance / self.dof)
        return self._constant - self.core.entropy() - tail

    def score(self, theta: PyTree) -> PyTree:
        slope, distance = self._distance(theta)
        return unravel(-(self.dof + self.noise_size) / (self.dof + distance) * slope, self.mean)

    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        slope, distance = self._distance(theta)
        total = self.dof + distance
        return (self.dof + self.noise_size) / total * (2 * jnp.outer(slope, slope) / total - self.precision)

    def entropy(self) -> Float[Array, ""]:
        half, size = self.dof / 2, self.noise_size
        tail = _digamma(half + size / 2) - _digamma(half)
        return self.core.entropy() - self._constant + (half + size / 2) * tail

    def joint_entropy(self) -> Float[Array, ""]:
        """H(q(w)) + E_w H(q(θ | w)), where the second is the Gaussian's entropy plus ½P E log w."""
        half = self.dof / 2
        digamma = _digamma(half)
        scale = half + math.log(half) + math.lgamma(half) - (1 + half) * digamma
        return scale + 0.5 * self.noise_size * (math.log(half) - digamma) + self.core.entropy()

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        first, second = jax.random.split(key)
        half, dtype = self.dof / 2, self.precision.dtype
        w = half / jax.random.gamma(first, half, (*shape, 1), dtype)
        return self.core.transformed(jnp.sqrt(w) * jax.random.normal(second, (*shape, self.noise_size), dtype))

    @property
    def grid_axes(self) -> int:
        return self.noise_size

    def grid(self, order: int) -> tuple[PyTree, Float[Array, " S"]]:
        """The product of rules for a t with ν, ν + 1, … degrees of freedom.

        Given the entries before it, each entry of a standard t is a scaled t with one more degree of freedom. From
        order 2 on the grid is exact for quadratic losses, and the latent correction's curvature averages to 0 on it, as
        it does under q.
        """
        points, weights = product_rule(*[_rule(order, self.dof + j) for j in range(self.noise_size)])
        for j in range(1, self.noise_size):
            points[:, j] *= np.sqrt((self.dof + np.sum(points[:, :j] ** 2, axis=1)) / (self.dof + j))
        return self.core.transformed(jnp.asarray(points, self.precision.dtype)), jnp.asarray(weights)

    # The rule.

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        scale = (self.dof + self._distance(theta)[1]) / (self.dof + self.noise_size - 2)  # E[w | θ]
        return gradient, scale.astype(curvature.dtype) * curvature

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        return gradient, None if curvature is None else self.dof / (self.dof - 2) * curvature

    def moved(self, step: Step) -> Self:
        return eqx.tree_at(lambda q: q.core, self, self.core.moved(step))

    def precision_matrices(self) -> tuple[Float[Array, "P P"], ...]:
        return self.core.precision_matrices()

    def decrement(self, step: Step) -> Float[Array, ""]:
        """The Gaussian's, because the Fisher information of q(θ, w) in (m, S) is a Gaussian's."""
        return self.core.decrement(step)


def _digamma(x: float) -> float:
    from scipy.special import digamma  # imported late, so that importing bayesrule does not load SciPy

    return float(digamma(x))


def _rule(order: int, dof: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights for a standard t, exact for 1 + t²/ν times polynomials in x = t/√(ν + t²).

    x has a density proportional to (1 − x²)^(ν/2 − 1), and 1 + t²/ν = 1/(1 − x²). So the rule is Jacobi's for
    (1 − x²)^(ν/2 − 2), with one factor 1 − x² multiplied into the weights.
    """
    from scipy.special import roots_jacobi

    x, weights = roots_jacobi(order, dof / 2 - 2, dof / 2 - 2)
    factor = (1 - x) * (1 + x)
    return x * np.sqrt(dof / factor), factor * weights / np.sum(factor * weights)
