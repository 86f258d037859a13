"""What every Gaussian family offers, whatever structure its precision has."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ...numerics.random import Key, normal
from ..base import Family
from .precision import Structure


class GaussianFamily(Family):
    """A Gaussian over any pytree, whatever is kept of its precision S.

    The rule asks for $E_q∇\\barℓ$ in the shape of θ and $E_q∇^2\\barℓ$ in the family's `structure`.
    """

    mean: eqx.AbstractVar[PyTree]
    structure: ClassVar[Structure]
    symmetric: ClassVar[bool] = True
    separate_rates: ClassVar[bool] = True

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        make: Any = cls  # its own fields are a subclass's matter
        return make(params, precision, **choices)

    @abstractmethod
    def transformed(self, noise: Float[Array, "... Q"]) -> PyTree:
        """m + S^{-1/2} ε for standard normal noise of `noise_size` numbers."""

    @abstractmethod
    def times(self, theta: PyTree) -> PyTree:
        """S θ."""

    @abstractmethod
    def solve(self, theta: PyTree) -> PyTree:
        """S⁻¹ θ."""

    @abstractmethod
    def trace(self, curvature: Any) -> Float[Array, ""]:
        """tr(S⁻¹ H), for a curvature in the family's structure."""

    @abstractmethod
    def variance(self) -> PyTree:
        """The diagonal of S⁻¹, in the shape of θ."""

    @abstractmethod
    def covariance(self) -> Float[Array, "... P P"]:
        """S⁻¹ over the ravelled θ."""

    @abstractmethod
    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        """J_b S⁻¹ J_bᵀ for every b: the covariance of outputs that are linear in θ."""

    @abstractmethod
    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        """S itself, as much of it as another family's structure can hold."""

    @abstractmethod
    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        """tr(S C) with the covariance C of another Gaussian."""

    def added(self, first: Any, second: Any) -> Any:
        return self.structure.add(first, second)

    def gradient_like(self) -> PyTree:
        return self.mean

    @property
    def noise_size(self) -> int:
        """How many standard normal numbers make one draw."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.mean)) // max(1, math.prod(self.batch_shape))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return ()

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if jax.tree.leaves(self.mean) else float
        return self.transformed(jax.random.normal(key, (*shape, *self.batch_shape, self.noise_size), dtype))

    def drawn(self, key: Key, shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        """Draws like `sample`'s, by default with noise from the counter-based stream."""
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
