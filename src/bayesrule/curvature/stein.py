"""Stein's identity: the expected Hessian from gradients alone."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.gaussian.base import GaussianFamily
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..steps.needs import Need
from .base import Pointwise
from .gradient import value_and_gradient
from .linear_outputs import OutputPoints
from .measurement import Measurement


class Stein(Pointwise[GaussianFamily]):
    """E_q∇²ℓ from gradients alone: S(θ − m)∇ℓᵀ, symmetrised (Stein's identity).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] * w) ** 2, size=2)
    >>> q, data = blr.DiagonalGaussian(jnp.array(1.0), jnp.array(1.0)), (jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0]))
    >>> float(blr.Stein().measure(objective, q, blr.Quadrature(3), data, None, None).curvature)        # the Hessian
    5.0
    """

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full"})
    approximation: ClassVar[str] = "Stein's identity for the Hessian"
    meaning: ClassVar[str] = "E_q∇²ℓ̄ = E_q[S(θ − m)∇ℓ̄ᵀ] (Stein's identity)"
    slack: ClassVar[float] = 0.0
    gaussian_identity: ClassVar[bool] = True
    from_gradients: ClassVar[bool] = True
    reads_output_covariance: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: not p.points.at_mean,
            "Delta() evaluates only at the mean, where S(θ − m)∇ℓᵀ is zero: Stein() would silently give a curvature of "
            "0. Use MonteCarlo() or Quadrature() points, or Hessian() at the mean.",
        ),
    )

    @property
    def integrates_outputs(self) -> bool:
        return True

    def at(
        self,
        objective: AbstractObjective,
        q: GaussianFamily,
        theta: PyTree,
        batch: PyTree,
        aux: PyTree,
        key: Key | None,
    ) -> Measurement:
        measured = value_and_gradient(objective, theta, batch, aux, key)
        curvature = self.of_gradient(q, theta, measured.gradient, objective.size)
        return dataclasses.replace(measured, curvature=curvature)

    def of_gradient(self, q: GaussianFamily, theta: PyTree, gradient: PyTree, size: Any) -> Any:
        return q.structure.outer(q.times(jax.tree.map(jnp.subtract, theta, q.mean)), gradient)

    def output_hessian(
        self, q: GaussianFamily, points: OutputPoints, center: Float[Array, "B K"]
    ) -> Float[Array, "B K K"]:
        """Cov(f)⁻¹ E[(f − E f)∇_f ℓᵀ], symmetrised; the Hessian itself for an example whose outputs do not vary.

        The identity divides by the outputs' covariance, which is zero for an example with x = 0 and singular where
        outputs depend on each other: the first takes the Hessian at the center, the second a small ridge.
        """
        covariance = q.output_covariance(points.jacobian) if points.covariance is None else points.covariance
        size = center.shape[1]
        if covariance.ndim == 2:  # variances of independent outputs
            covariance = covariance[:, :, None] * jnp.eye(size, dtype=covariance.dtype)
        cross = points.expected((points.outputs - center)[..., :, None] * points.losses_and_slopes[1][..., None, :])
        epsilon, total_variance = jnp.finfo(center.dtype).eps, jnp.trace(covariance, axis1=1, axis2=2)
        is_constant = (total_variance <= epsilon * jnp.max(total_variance))[:, None, None]
        identity = jnp.eye(size, dtype=center.dtype)
        ridge = 0.0 if size == 1 else 8 * size * epsilon * total_variance[:, None, None] * identity
        divisor = jnp.asarray(jnp.where(is_constant, identity, covariance + ridge))
        estimate = cross / divisor if size == 1 else jnp.linalg.solve(divisor, cross)
        at_center = jax.vmap(jax.hessian(points.loss))(center, points.examples[1])
        return jnp.asarray(jnp.where(is_constant, at_center, 0.5 * (estimate + jnp.swapaxes(estimate, 1, 2))))
