"""The Hessian and its diagonal."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.base import HasStructure
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel, slope_diagonal, unravel
from ..objectives.base import AbstractObjective
from .base import Pointwise
from .gradient import value_and_gradient
from .measurement import Measurement


class Hessian(Pointwise[HasStructure]):
    """The exact Hessian ∇²ℓ, for a full precision or full blocks of it (`eq:von_1`).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=2)
    >>> q, data = blr.Gaussian(jnp.zeros(2), jnp.eye(2)), (jnp.array([[1.0, 1.0], [2.0, 0.0]]), jnp.array([2.0, 0.0]))
    >>> blr.Hessian().measure(objective, q, blr.Delta(), data, None, None).curvature.tolist()                  # Σ xᵢxᵢᵀ
    [[5.0, 1.0], [1.0, 1.0]]
    """

    serves: ClassVar[frozenset[str]] = frozenset({"full", "blocks"})
    meaning: ClassVar[str] = "the Hessian ∇²ℓ̄ (Bonnet and Price, app:bp)"

    @property
    def integrates_outputs(self) -> bool:
        return True

    def at(
        self, objective: AbstractObjective, q: HasStructure, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        measured = value_and_gradient(objective, theta, batch, aux, key)
        gradient = lambda vector: _ravelled_gradient(objective, vector, theta, batch, aux, key)
        return dataclasses.replace(measured, curvature=q.structure.hessian(gradient, theta))


def _ravelled_gradient(
    objective: AbstractObjective, vector: Array, like: PyTree, batch: PyTree, aux: PyTree, key: Key | None
) -> Float[Array, " P"]:
    """The gradient of the data's loss as a vector, at a ravelled θ with the shapes of `like`."""
    theta = unravel(vector, like)
    return ravel(jax.grad(lambda t: objective.data(t, batch, aux, key)[0])(theta))


class HessianDiagonal(Pointwise[HasStructure]):
    """The exact diagonal of the Hessian; `absolute=True` sums |∇²_j ℓᵢ| over the examples instead (`eq:dhess_update`).

    Of a plain function, which has no examples, `absolute=True` takes the absolute value of the diagonal.

    Args:
        absolute: Whether absolute values are summed.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: e * jnp.sum(w**2), size=2)             # one example curves downwards
    >>> q, data = blr.DiagonalGaussian(jnp.zeros(2), jnp.ones(2)), jnp.array([1.0, -0.5])
    >>> of = lambda curvature: curvature.measure(objective, q, blr.Delta(), data, None, None).curvature.tolist()
    >>> of(blr.HessianDiagonal()), of(blr.HessianDiagonal(absolute=True))
    ([1.0, 1.0], [3.0, 3.0])
    """

    absolute: bool = eqx.field(static=True, default=False)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    meaning: ClassVar[str] = "the Hessian's diagonal"

    @property
    def integrates_outputs(self) -> bool:
        return not self.absolute

    def at(
        self, objective: AbstractObjective, q: HasStructure, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        measured = value_and_gradient(objective, theta, batch, aux, key)
        if not self.absolute or not objective.takes_data:
            gradient = lambda vector: _ravelled_gradient(objective, vector, theta, batch, aux, key)
            diagonal = slope_diagonal(gradient, ravel(theta))
            diagonal = jnp.abs(diagonal) if self.absolute else diagonal
        else:
            separable = objective.separable("HessianDiagonal(absolute=True)")
            examples, scales = separable.examples(batch)

            def absolute_diagonal(example: PyTree) -> Array:
                gradient = jax.grad(lambda vector: separable.example_loss(unravel(vector, theta), example))
                return jnp.abs(slope_diagonal(gradient, ravel(theta)))

            diagonal = scales @ jax.vmap(absolute_diagonal)(examples)
        return dataclasses.replace(measured, curvature=unravel(diagonal, theta))

    def __repr__(self) -> str:
        return f"HessianDiagonal({'absolute=True' if self.absolute else ''})"
