"""The contract of a Gaussian family N(m, S⁻¹), whatever structure its precision S has."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key, normal
from ...numerics.trees import wide
from ...steps.step import Step
from ..base import Family
from .precision import Structure


class GaussianFamily(Family):
    """A Gaussian $N(m, S^{-1})$ over any pytree, whose precision S has a `structure` (full, diagonal, …).

    A step of such a family holds $E_q∇\\barℓ$ in the shape of θ as its gradient, and $E_q∇^2\\barℓ$ in the family's
    structure as its curvature. `moved` changes S first and then m by the new S (`eq:von_1`).
    """

    mean: eqx.AbstractVar[PyTree]
    """m, in the shape of θ, with the batch axes in front."""
    structure: ClassVar[Structure]
    """The form in which this family wants its curvature measured."""
    symmetric: ClassVar[bool] = True
    separate_rates: ClassVar[bool] = True

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        make: Any = cls  # pyright cannot know the constructor of a subclass
        return make(params, precision, **choices)

    @abstractmethod
    def transformed(self, noise: Float[Array, "... Q"]) -> PyTree:
        """m + S^{-1/2}ε, which is a draw from q if ε is standard normal.

        Called by `sample`, and by quadrature and quasi-Monte Carlo with their own ε.

        Args:
            noise: ε, any leading axes, then the batch axes, then `noise_size` numbers.
        """

    @abstractmethod
    def times(self, theta: PyTree) -> PyTree:
        """Sθ, in the shape of θ; called for a prior's gradient S(m − m₀) and the score of a mixture."""

    @abstractmethod
    def solve(self, theta: PyTree) -> PyTree:
        """S⁻¹θ, in the shape of θ; called for preconditioned steps and decrements."""

    @abstractmethod
    def trace(self, curvature: Any) -> Float[Array, ""]:
        """tr(S⁻¹H), summed over the batch; called for the second-order term ½ tr(HS⁻¹) of the delta bound.

        Args:
            curvature: H in the family's structure.
        """

    @abstractmethod
    def variance(self) -> PyTree:
        """The diagonal of S⁻¹, in the shape of θ; the variance of each entry of θ."""

    @abstractmethod
    def covariance(self) -> Float[Array, "... P P"]:
        """S⁻¹ as a matrix over the ravelled θ, P×P: for small θ only."""

    @abstractmethod
    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K *K"]:
        """J_b S⁻¹ J_bᵀ for each example b, the covariance of outputs that are linear in θ.

        Called by predictions, and by points and curvature that integrate over the outputs and not over θ.

        Args:
            jacobian: J, a pytree like θ whose leaves have the axes (B, K) of examples and outputs in front, or
                `SharedFeatures`, for which a family whose structure has no `couples_outputs` returns the outputs'
                variances alone, (B, K).
        """

    @abstractmethod
    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        """S in another family's structure, as much of it as that can hold.

        Called where this Gaussian is the prior: S is then the regularizer's curvature.

        Args:
            structure: the structure of q.
            like: a pytree like θ, for the shapes.
        """

    @abstractmethod
    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        """tr(SC) with the covariance C of another Gaussian over the same θ, for KL and cross-entropy."""

    def distance(self, other: Any) -> Float[Array, ""]:
        """½ ΔmᵀSΔm + ¼ tr[(S⁻¹ΔS)²]: the decrement of a step whose natural gradient is the displacement."""
        push = self.times(jax.tree.map(jnp.subtract, other.mean, self.mean))
        return self.decrement(Step(push, getattr(other, "precision", None), 1.0, 1.0, 1.0))

    def added(self, first: Any, second: Any) -> Any:
        return self.structure.add(first, second)

    def gradient_like(self) -> PyTree:
        return jax.tree.map(lambda m: m.astype(wide(m.dtype)), self.mean)

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers make one draw of one batch element."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.mean)) // max(1, math.prod(self.batch_shape))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the batch axes; none by default."""
        return ()

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if jax.tree.leaves(self.mean) else float
        return self.transformed(jax.random.normal(key, (*shape, *self.batch_shape, self.noise_size), dtype))

    def drawn(self, key: Key, shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        """Draws as from `sample`, by default with noise from the counter-based stream (`numerics.random`).

        Called by Monte Carlo points.

        Args:
            key: consumed.
            shape: leading axes of independent draws.
            standard: whether the noise comes from `jax.random.normal` instead.
        """
        if standard:
            return self.sample(key, shape)
        dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if jax.tree.leaves(self.mean) else float
        return self.transformed(normal(key, (*shape, *self.batch_shape, self.noise_size), dtype))

    def cross_entropy(self, other: Any) -> Float[Array, "..."]:
        """−E_q log p for another Gaussian p, every constant included."""
        return 0.5 * other.prior_trace(self) - other.log_prob(self.mean)

    def kl(self, other: Any) -> Float[Array, "..."]:
        """KL(q ‖ p) for another Gaussian p, whatever its structure."""
        return self.cross_entropy(other) - self.entropy()
