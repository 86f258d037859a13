"""The Hessian and its diagonal."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..numerics.trees import ravel, slope_diagonal, unravel
from ..objectives.base import AbstractObjective
from .base import Pointwise
from .gradient import sloped
from .measurement import Measurement


class Hessian(Pointwise):
    """The exact Hessian ∇²ℓ, for a full precision (`eq:von_1`)."""

    serves: ClassVar[frozenset[str]] = frozenset({"full"})
    meaning: ClassVar[str] = "the Hessian ∇²ℓ̄ (Bonnet and Price, app:bp)"

    @property
    def linear(self) -> bool:
        return True

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        measured = sloped(objective, theta, batch, aux, key)
        matrix = jax.jacfwd(lambda v: _flat_slope(objective, v, theta, batch, aux, key))(ravel(theta))
        return dataclasses.replace(measured, curvature=q.structure.of_matrix(matrix, theta))


def _flat_slope(
    objective: AbstractObjective, vector: Array, like: PyTree, batch: PyTree, aux: PyTree, key: Any
) -> Array:
    theta = unravel(vector, like)
    return ravel(jax.grad(lambda t: objective.data(t, batch, aux, key)[0])(theta))


class HessianDiagonal(Pointwise):
    """The exact diagonal of the Hessian; `absolute=True` sums |∇²_j ℓᵢ| instead (`eq:dhess_update`)."""

    absolute: bool = eqx.field(static=True, default=False)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    meaning: ClassVar[str] = "the Hessian's diagonal"

    @property
    def linear(self) -> bool:
        return not self.absolute

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        measured = sloped(objective, theta, batch, aux, key)
        if not self.absolute or not objective.takes_data:
            diagonal = slope_diagonal(lambda v: _flat_slope(objective, v, theta, batch, aux, key), ravel(theta))
            diagonal = jnp.abs(diagonal) if self.absolute else diagonal
        else:
            separable = objective.separable("HessianDiagonal(absolute=True)")
            examples, scales = separable.examples(batch)

            def of_one(example: PyTree) -> Array:
                slope = jax.grad(lambda v: separable.example_loss(unravel(v, theta), example))
                return jnp.abs(slope_diagonal(slope, ravel(theta)))

            diagonal = scales @ jax.vmap(of_one)(examples)
        return dataclasses.replace(measured, curvature=unravel(diagonal, theta))

    def __repr__(self) -> str:
        return f"HessianDiagonal({'absolute=True' if self.absolute else ''})"
