"""Deterministic points: Gauss–Hermite grids, and every value of a discrete θ."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..families.latent.base import ConditionalFamily
from ..numerics.checks import positive_int
from ..numerics.trees import ravel, unravel
from .base import Points, PointSet
from .gaussian_outputs import _check_linear, _factor

_GRID_LIMIT = 100_000


class Quadrature(Points):
    """Gauss–Hermite points of an order: a tensor grid over θ, exact to degree 2·order − 1.

    Where the objective says `linear=True` the grid is over each example's outputs instead: one
    dimension for each output, however many parameters there are. A `StudentT` and a `SkewGaussian` have grids of their
    own.
    """

    order: int = eqx.field(static=True)
    approximation: ClassVar[str] = "Gauss-Hermite quadrature"
    meaning: ClassVar[str] = "E_q f(θ) by Gauss–Hermite quadrature"

    def __init__(self, order: int = 5):
        self.order = positive_int("order", order)

    def fits(self, size: int) -> bool:
        """Whether a grid in so many dimensions is small enough."""
        return self.order**size <= _GRID_LIMIT

    def at(self, q: Any, key: Any) -> PointSet:
        size = sum(leaf.size for leaf in jax.tree.leaves(q.mean))
        if isinstance(q, ConditionalFamily):
            _check_size(self.order, q.grid_axes)
            return PointSet(*q.grid(self.order))
        noise, weights = grid(self.order, size)
        if q.noise_size == size:
            return PointSet(q.transformed(noise), weights)
        spread = noise @ jnp.linalg.cholesky(q.covariance()).T
        return PointSet(unravel(ravel(q.mean) + spread, q.mean), weights)

    def outputs(self, q: Any, center: Array, jacobian: PyTree, key: Any) -> tuple[Array, Array]:
        _check_linear(q)
        covariance = q.output_covariance(jacobian)
        noise, weights = grid(self.order, center.shape[1])
        noise = noise.astype(center.dtype)
        if center.shape[1] == 1:
            # An output that does not vary (x = 0) has no derivative of its spread, rather than an infinite one.
            varies = covariance[:, 0] > 0
            spread = jnp.where(varies, jnp.sqrt(jnp.asarray(jnp.where(varies, covariance[:, 0], 1.0))), 0.0)
            return center + spread * noise[:, None, :], weights
        factor = _factor(covariance)
        return center + jnp.einsum("bkl,sl->sbk", factor, noise), weights

    def __repr__(self) -> str:
        return f"Quadrature({self.order})"


def _check_size(order: int, size: int, more: str = "") -> None:
    if order**size > _GRID_LIMIT:
        raise ValueError(
            f"A grid of order {order} in {size} dimensions has {order}^{size} points. Use MonteCarlo{more}."
        )


def grid(order: int, size: int) -> tuple[Float[Array, "S D"], Float[Array, " S"]]:
    linear = (
        ", or, where the model is linear in its parameters, Objective(loss, output=apply, linear=True): then each "
        "example is integrated over its own outputs"
    )
    _check_size(order, size, linear)
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    weights = weights / weights.sum()
    points = np.array(list(itertools.product(nodes, repeat=size))).reshape(-1, size)
    return jnp.asarray(points), jnp.asarray([np.prod(w) for w in itertools.product(weights, repeat=size)])


class Enumeration(Points):
    """Every value of a small discrete θ, weighted by q: the expectation itself."""

    meaning: ClassVar[str] = "E_q f(θ) as the sum over every θ"

    def at(self, q: Any, key: Any) -> PointSet:
        theta = q.support()
        weights = jnp.exp(q.log_prob(theta))
        if weights.ndim != 1:
            raise ValueError(
                f"Enumeration() lists one distribution's values, and this {type(q).__name__} is a batch: vmap."
            )
        return PointSet(theta, weights)
