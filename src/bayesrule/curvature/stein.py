"""Stein's identity: the expected Hessian from gradients alone."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..numerics.trees import ravel
from ..objectives.base import AbstractObjective
from .base import Pointwise
from .gradient import sloped
from .linear_outputs import Outputs
from .measurement import Measurement


class Stein(Pointwise):
    """E_q∇²ℓ from gradients alone: S(θ − m)∇ℓᵀ, symmetrised (Stein's identity)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full"})
    approximation: ClassVar[str] = "Stein's identity for the Hessian"
    meaning: ClassVar[str] = "E_q∇²ℓ̄ = E_q[S(θ − m)∇ℓ̄ᵀ] (Stein's identity)"
    slack: ClassVar[float] = 0.0

    @property
    def linear(self) -> bool:
        return True

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        measured = sloped(objective, theta, batch, aux, key)
        tilted = q.times(jax.tree.map(jnp.subtract, theta, q.mean))
        if q.structure.name == "diagonal":
            curvature = jax.tree.map(jnp.multiply, tilted, measured.gradient)
        else:
            outer = ravel(tilted)[:, None] * ravel(measured.gradient)[None, :]
            curvature = q.structure.of_matrix(outer, theta)
        return dataclasses.replace(measured, curvature=curvature)

    def middle(self, objective: AbstractObjective, q: Any, seen: Outputs, center: Array) -> Array | None:
        """Cov(f)⁻¹ E[(f − E f)∇_f ℓᵀ], symmetrised; the Hessian itself where an output does not vary."""
        covariance = q.output_covariance(seen.jacobian)
        size = center.shape[1]
        cross = seen.expected((seen.outputs - center)[..., :, None] * seen.slopes[..., None, :])
        epsilon, spread = jnp.finfo(center.dtype).eps, jnp.trace(covariance, axis1=1, axis2=2)
        still = spread <= epsilon * jnp.max(spread)
        identity = jnp.eye(size, dtype=center.dtype)
        ridge = 0.0 if size == 1 else 8 * size * epsilon * spread[:, None, None] * identity  # dependent outputs
        safe = jnp.asarray(jnp.where(still[:, None, None], identity, covariance + ridge))
        stein = cross / safe if size == 1 else jnp.linalg.solve(safe, cross)
        fixed = jax.vmap(jax.hessian(seen.loss))(center, seen.examples[1])
        return jnp.asarray(jnp.where(still[:, None, None], fixed, 0.5 * (stein + jnp.swapaxes(stein, 1, 2))))
