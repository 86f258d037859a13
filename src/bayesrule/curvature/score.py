"""∇_μ E_q ℓ for any exponential family: through differentiable samples, or from the loss's values alone."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.base import ExponentialFamily
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import average_leaves
from ..objectives.base import AbstractObjective
from ..points.base import Points
from ..points.quadrature import Enumeration
from ..points.sampling import MonteCarlo
from ..steps.needs import Need
from .base import Curvature, split_key
from .measurement import Measurement


class Reparameterized(Curvature[ExponentialFamily]):
    """∇_μ E_q ℓ through differentiable samples θ(λ), explicit or implicit, and the Fisher solve.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> objective = blr.Objective(lambda r, y: r - y * jnp.log(r), size=1)            # −log Poisson(y | r), y = 4
    >>> q, points = blr.Gamma(3.0, 1.0), blr.MonteCarlo(10_000)
    >>> measured = blr.Reparameterized().measure(objective, q, points, jnp.array([4.0]), None, jax.random.key(0))
    >>> [round(float(-slope)) for slope in measured.gradient]                         # of y E log r − E r, in μ
    [4, -1]
    """

    approximation: ClassVar[str] = "reparameterised samples"
    meaning: ClassVar[str] = "F(λ)⁻¹∇_λ of the loss at samples θ(λ)"
    in_lambda: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.member is None or getattr(p.member, "reparameterized", False),
            lambda p: f"The samples of this {p.name} are not all differentiable in λ: use Score() instead.",
        ),
        (
            lambda p: p.points.draws,
            "Reparameterized() differentiates samples: use MonteCarlo(samples) points.",
        ),
        (
            lambda p: p.abstract or getattr(p.kind, "reparameterized", True),
            lambda p: f"The samples of a {p.name} are not differentiable in λ: use Score() instead.",
        ),
    )

    def measure(
        self,
        objective: AbstractObjective,
        q: ExponentialFamily,
        points: Points,
        batch: PyTree,
        aux: PyTree,
        key: Key | None,
    ) -> Measurement:
        point_key, loss_key = split_key(points, objective, key)

        def expected(natural: PyTree) -> tuple[Array, PyTree]:
            point_set = points.at(q.with_natural(natural), point_key)
            values, new_aux = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(point_set.theta)
            value, new_aux = average_leaves((values, new_aux), point_set.weights)
            return value, new_aux

        (value, aux), slope = jax.value_and_grad(expected, has_aux=True)(q.natural())
        gradient, curvature = q.derivatives(q.to_natural_gradient(q._symmetric(slope)))
        return Measurement(value, gradient, curvature, aux)


class Score(Curvature[ExponentialFamily]):
    r"""∇_μ E_q ℓ without derivatives of ℓ: $F^{-1}\mathrm{Cov}_q(T, ℓ)$, as natural evolution strategies.

    With `Enumeration` points it is exact.

    Args:
        baseline: Whether each draw is compared with the mean of the *other* draws, which keeps the estimate unbiased
            and lowers its variance.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda s, h: -jnp.sum(h * s), size=1)               # spins in a field h: −hᵀs
    >>> q, field = blr.Bernoulli(jnp.array([0.3, -0.2])), jnp.array([[0.5, 1.0]])
    >>> measured = blr.Score().measure(objective, q, blr.Enumeration(), field, None, None)
    >>> measured.gradient.tolist()                                                    # −h, from values at all four s
    [-0.5, -1.0]
    """

    baseline: bool = eqx.field(static=True, default=True)
    meaning: ClassVar[str] = "F⁻¹Cov_q(T, ℓ̄), no derivatives of the loss"
    differentiates: ClassVar[bool] = False
    in_lambda: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: not p.points.at_mean,
            "Score() compares the loss across points, and Delta() is one point: use MonteCarlo(samples).",
        ),
    )

    def measure(
        self,
        objective: AbstractObjective,
        q: ExponentialFamily,
        points: Points,
        batch: PyTree,
        aux: PyTree,
        key: Key | None,
    ) -> Measurement:
        point_key, loss_key = split_key(points, objective, key)
        point_set = points.at(q, point_key)
        values, new_aux = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(point_set.theta)
        weights = point_set.weights.astype(values.dtype)
        if isinstance(points, Enumeration):
            gradient, curvature = q.derivatives(q.enumerated_gradient(values, point_set.theta))
            return Measurement(jnp.sum(weights * values), gradient, curvature, aux)
        advantage = self._advantage(values, weights, points)
        excess = jax.tree.map(lambda t, m: t - m, q.statistics(point_set.theta), q.expectation())
        covariance = jax.tree.map(lambda e: jnp.tensordot(weights * advantage, e, axes=1), excess)
        value, new_aux = average_leaves((values, new_aux), weights)
        gradient, curvature = q.derivatives(q.to_natural_gradient(covariance))
        return Measurement(value, gradient, curvature, new_aux)

    def _advantage(self, values: Float[Array, " S"], weights: Float[Array, " S"], points: Points) -> Float[Array, " S"]:
        """Every point's loss less its baseline: the mean over the draws that are independent of it.

        Those are all other draws, or all other pairs where draws are antithetic.
        """
        if not self.baseline:
            return values
        if not isinstance(points, MonteCarlo):
            return values - jnp.sum(weights * values)
        count = values.size
        own = values + jnp.roll(values, count // 2) if points.antithetic else values
        others = count - (2 if points.antithetic else 1)
        return values - (jnp.sum(values) - own) / others if others else values
