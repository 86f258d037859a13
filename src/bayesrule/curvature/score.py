"""∇_μ E_q ℓ for any exponential family: through differentiable samples, or from the loss's values alone."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.gaussian.precision import Structure
from ..objectives.base import AbstractObjective
from ..points.base import Points
from ..points.quadrature import Enumeration
from ..points.sampling import MonteCarlo
from .base import Curvature, keys
from .measurement import Measurement


class Reparameterized(Curvature):
    """∇_μ E_q ℓ through differentiable samples θ(λ), explicit or implicit, and the Fisher solve."""

    approximation: ClassVar[str] = "reparameterised samples"
    meaning: ClassVar[str] = "F(λ)⁻¹∇_λ of the loss at samples θ(λ)"

    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        point_key, loss_key = keys(points, objective, key)

        def expected(natural: PyTree) -> tuple[Array, PyTree]:
            spots = points.at(q.with_natural(natural), point_key)
            values, new = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(spots.theta)
            average = Structure().average((values, new), spots.weights)
            return average[0], average[1]

        (value, aux), slope = jax.value_and_grad(expected, has_aux=True)(q.natural())
        gradient, curvature = q.derivatives(q.to_natural_gradient(q._symmetric(slope)))
        return Measurement(value, gradient, curvature, aux)


class Score(Curvature):
    r"""∇_μ E_q ℓ without derivatives of ℓ: $F^{-1}\mathrm{Cov}_q(T, ℓ)$, as natural evolution strategies.

    With `baseline` each draw is compared with the mean of the *other* draws, which keeps the estimate
    unbiased. With `Enumeration` points it is exact.
    """

    baseline: bool = eqx.field(static=True, default=True)
    meaning: ClassVar[str] = "F⁻¹Cov_q(T, ℓ̄), no derivatives of the loss"

    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        point_key, loss_key = keys(points, objective, key)
        spots = points.at(q, point_key)
        values, new = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(spots.theta)
        weights = spots.weights.astype(values.dtype)
        if isinstance(points, Enumeration):
            gradient, curvature = q.derivatives(q.enumerated_gradient(values, spots.theta))
            return Measurement(jnp.sum(weights * values), gradient, curvature, aux)
        advantage = self._compared(values, weights, points)
        excess = jax.tree.map(lambda t, m: t - m, q.statistics(spots.theta), q.expectation())
        covariance = jax.tree.map(lambda e: jnp.tensordot(weights * advantage, e, axes=1), excess)
        average = Structure().average((values, new), weights)
        gradient, curvature = q.derivatives(q.to_natural_gradient(covariance))
        return Measurement(average[0], gradient, curvature, average[1])

    def _compared(self, values: Array, weights: Array, points: Points) -> Array:
        if not self.baseline:
            return values
        if not isinstance(points, MonteCarlo):
            return values - jnp.sum(weights * values)
        # The mean over the draws that are independent of this one: all others, or all other pairs.
        count = values.size
        own = values + jnp.roll(values, count // 2) if points.antithetic else values
        left = count - (2 if points.antithetic else 1)
        return values - (jnp.sum(values) - own) / left if left else values
