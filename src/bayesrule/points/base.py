"""Where the loss is evaluated, to stand for the expectation under q: points and their weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..families.base import Family
from ..families.gaussian.precision import SharedFeatures
from ..numerics.trees import ravel
from .gaussian_outputs import _check_linear


class PointSet(NamedTuple):
    """Values of θ with a leading axis, and their weights: E_q f ≈ Σ_s w_s f(θ_s).

    `factors` says how a point moves with μ, where it does not simply move with the mean: the family's `pulled`
    multiplies the derivatives by it.
    """

    theta: PyTree
    weights: Float[Array, " S"]
    factors: PyTree = None


class Points(eqx.Module):
    """Where the loss is looked at."""

    approximation: ClassVar[str] = ""
    """How Table 1 names what it does to the natural gradient."""
    meaning: ClassVar[str] = ""
    random: ClassVar[bool] = False
    delta: ClassVar[bool] = False
    """Whether a Gaussian's spread is ignored: the delta method."""
    chained: ClassVar[bool] = False
    """Whether the points say how they move with μ, for families whose gradient is not θ's own."""

    @property
    def parts(self) -> int:
        """In how many turns the points are taken, one after another."""
        return 1

    def part(self, q: Family, key: Any) -> PointSet:
        """The points of one turn."""
        return self.at(q, key)

    @abstractmethod
    def at(self, q: Family, key: Any) -> PointSet:
        """The points for this q."""

    def outputs(
        self, q: Any, center: Float[Array, "B K"], jacobian: PyTree, key: Any
    ) -> tuple[Float[Array, "S B K"], Float[Array, " S"]]:
        """Points for outputs that are linear in θ, f = center + J(θ − m), and their weights."""
        _check_linear(q)
        spots = self.at(q, key)
        deviation = ravel(jax.tree.map(jnp.subtract, spots.theta, q.mean), 1)
        if isinstance(jacobian, SharedFeatures):
            return center + jacobian.outputs(deviation), spots.weights
        return center + jnp.einsum("bkp,sp->sbk", ravel(jacobian, 2), deviation), spots.weights


class Delta(Points):
    """One point, the mean: E_q f(θ) ≈ f(m), the delta method (`app:delta`)."""

    approximation: ClassVar[str] = "Delta method"
    meaning: ClassVar[str] = "E_q f(θ) ≈ f(m), the delta method (app:delta)"
    delta: ClassVar[bool] = True

    def at(self, q: Any, key: Any) -> PointSet:
        return PointSet(jax.tree.map(lambda m: m[None], q.mean), jnp.ones(1))

    def outputs(self, q: Any, center: Array, jacobian: PyTree, key: Any) -> tuple[Array, Array]:
        return center[None], jnp.ones(1)


class Exact(Points):
    """No points at all: the objective is already a function of μ, linear or not."""

    meaning: ClassVar[str] = "none needed: the objective is E_q ℓ̄ as a function of μ"

    def at(self, q: Any, key: Any) -> PointSet:
        raise ValueError("Exact has no points: the objective is a function of μ.")
