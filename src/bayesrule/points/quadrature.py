"""Deterministic points: Gauss–Hermite grids, and every value of a discrete θ."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families.base import ExponentialFamily
from ..families.gaussian.base import GaussianFamily
from ..families.latent.base import ConditionalFamily
from ..numerics.checks import positive_int, positive_number
from ..numerics.linalg import safe_sqrt
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel, unravel
from ..steps.needs import Need
from .base import Points, PointSet
from .gaussian_outputs import BentNodes, as_gaussian, bent_points

_GRID_LIMIT = 100_000


class Quadrature(Points[GaussianFamily | ConditionalFamily]):
    """Gauss–Hermite points of an order: a tensor grid over θ, exact for polynomials to degree 2·order − 1.

    Where the objective says `linear=True` the grid is over each example's outputs instead: one dimension for each
    output, however many parameters there are. A `StudentT` and a `SkewGaussian` have grids of their own.

    Gauss–Hermite nodes lie about half a standard deviation apart, and jump over a bend of the loss where an output
    varies much. With `bend=` the nodes of such outputs are close to each other around 0 (see `gaussian_outputs`).

    Args:
        order: The number of points in each dimension.
        bend: The distance from 0 beyond which the loss of a single output is all but straight: 1 for a logistic loss.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> points = blr.Quadrature(3).at(blr.Gaussian(jnp.array([1.0]), 4 * jnp.eye(1)), None)
    >>> [round(float(t), 4) for t in points.theta[:, 0]]                              # m and m ± √3 σ, with σ = ½
    [0.134, 1.0, 1.866]
    >>> float(jnp.sum(points.weights * points.theta[:, 0] ** 2))                      # E θ² = m² + σ²
    1.25
    """

    order: int = eqx.field(static=True)
    bend: float | None = eqx.field(static=True)
    approximation: ClassVar[str] = "Gauss-Hermite quadrature"
    meaning: ClassVar[str] = "E_q f(θ) by Gauss–Hermite quadrature"

    def __init__(self, order: int = 5, *, bend: float | None = None):
        self.order = positive_int("order", order)
        self.bend = None if bend is None else positive_number("bend", bend)

    def fits(self, size: int) -> bool:
        """Whether a grid in `size` dimensions is small enough to evaluate."""
        return self.order**size <= _GRID_LIMIT

    def at(self, q: GaussianFamily | ConditionalFamily, key: Key | None) -> PointSet:
        size = sum(leaf.size for leaf in jax.tree.leaves(q.mean))
        if isinstance(q, ConditionalFamily):
            _check_size(self.order, q.grid_axes)
            return PointSet(*q.grid(self.order))
        noise, weights = grid(self.order, size)
        if q.noise_size == size:
            return PointSet(q.transformed(noise), weights)
        # The family draws with more noise than θ has dimensions, so the grid is placed by the dense covariance.
        deviation = noise @ jnp.linalg.cholesky(q.covariance()).T
        return PointSet(unravel(ravel(q.mean) + deviation, q.mean), weights)

    def outputs(
        self,
        q: GaussianFamily | ConditionalFamily,
        center: Array,
        jacobian: PyTree,
        key: Key | None,
        covariance: Array | None = None,
    ) -> tuple[Array, Array]:
        covariance = as_gaussian(q).output_covariance(jacobian) if covariance is None else covariance
        return self.output_grid(center, covariance, key)

    def output_grid(
        self, mean: Float[Array, "B *K"], covariance: Float[Array, "B *KK"], key: Key | None
    ) -> tuple[Array, Array]:
        if self.bend is None or mean.size != mean.shape[0]:
            return super().output_grid(mean, covariance, key)
        deviation = safe_sqrt(covariance.reshape(mean.shape))
        return jax.vmap(lambda node: bent_points(node, mean, deviation, self.bend))(self.bent_nodes(mean.dtype))

    def bent_nodes(self, dtype: Any) -> BentNodes:
        """The nodes that `bent_points` places."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(self.order)
        parts = nodes, weights / weights.sum(), np.linspace(0, 1, self.order), np.full(self.order, 1 / (self.order - 1))
        return BentNodes(*(jnp.asarray(part, dtype) for part in parts))

    def output_noise(self, mean: Float[Array, "B *K"], key: Key | None) -> tuple[Array, Array]:
        nodes, weights = grid(self.order, 1 if mean.ndim == 1 else mean.shape[-1])
        return nodes.astype(mean.dtype), weights

    def __repr__(self) -> str:
        return f"Quadrature({self.order})" if self.bend is None else f"Quadrature({self.order}, bend={self.bend:g})"


def _check_size(order: int, size: int, advice: str = "") -> None:
    if order**size > _GRID_LIMIT:
        raise ValueError(
            f"A grid of order {order} in {size} dimensions has {order}^{size} points. Use MonteCarlo{advice}."
        )


def grid(order: int, size: int) -> tuple[Float[Array, "S D"], Float[Array, " S"]]:
    """The tensor grid of Gauss–Hermite nodes for N(0, I) in `size` dimensions, and its weights, which sum to 1."""
    advice = (
        ", or, where the model is linear in its parameters, Objective(loss, output=apply, linear=True): then each "
        "example is integrated over its own outputs"
    )
    _check_size(order, size, advice)
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    weights = weights / weights.sum()
    points = np.array(list(itertools.product(nodes, repeat=size))).reshape(-1, size)
    return jnp.asarray(points), jnp.asarray([np.prod(w) for w in itertools.product(weights, repeat=size)])


class Enumerable(Protocol):
    """A q over a small discrete set of values."""

    def support(self) -> PyTree:
        """Every value of θ, along a leading axis."""
        ...

    def log_prob(self, theta: PyTree, /) -> Float[Array, "..."]:
        """See `Family.log_prob`."""
        ...


class Enumeration(Points[Enumerable]):
    """Every value of a small discrete θ, weighted by q: the expectation itself.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> points = blr.Enumeration().at(blr.Categorical(jnp.log(jnp.array([0.2, 0.3, 0.5]))), None)
    >>> points.theta.tolist(), points.weights.tolist()
    ([0, 1, 2], [0.2, 0.3, 0.5])
    """

    meaning: ClassVar[str] = "E_q f(θ) as the sum over every θ"
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: not p.curvature.differentiates,
            "Enumeration() sums over discrete values, where there are no derivatives: use Score().",
        ),
        (
            lambda p: p.abstract or not issubclass(p.kind, ExponentialFamily) or hasattr(p.kind, "support"),
            lambda p: f"The values of a {p.name} cannot be listed: use MonteCarlo() points with Score().",
        ),
    )

    def at(self, q: Enumerable, key: Key | None) -> PointSet:
        theta = q.support()
        weights = jnp.exp(q.log_prob(theta))
        if weights.ndim != 1:
            raise ValueError(
                f"Enumeration() lists the values of one distribution, and this {type(q).__name__} is a batch of them: "
                "jax.vmap the rule over the batch."
            )
        return PointSet(theta, weights)
