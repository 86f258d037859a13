"""The gradient alone, and the squared mini-batch gradient of RMSprop and Adam."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..families.base import HasStructure
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..points.base import Exact, Points
from .average import average_over_points, measure_in_parts, measure_parts_at_points
from .base import Curvature, Pointwise, split_key
from .measurement import Measurement


class Gradient(Curvature):
    """The gradient only: in θ for a Gaussian with fixed precision, in μ for `Exact` points.

    So q is one of two kinds: a family whose step takes the gradient in θ, or any `ExponentialFamily`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] * w) ** 2, size=2)
    >>> q, data = blr.FixedGaussian(jnp.array(1.0)), (jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0]))
    >>> measured = blr.Gradient().measure(objective, q, blr.Delta(), data, None, None)
    >>> float(measured.value), float(measured.gradient), measured.curvature     # of the sum over the examples
    (2.5, 3.0, None)
    """

    serves: ClassVar[frozenset[str]] = frozenset({"none"})
    in_mu: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    from_gradients: ClassVar[bool] = True
    meaning: ClassVar[str] = "the gradient only"

    def of_gradient(self, q: Any, theta: PyTree, gradient: PyTree, size: Any) -> None:
        return None

    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        if isinstance(points, Exact):
            zero = jax.tree.map(jnp.zeros_like, q.expectation())
            expected = lambda shift: objective.expected(q, shift, batch, aux, key)
            (value, aux), slope = jax.value_and_grad(expected, has_aux=True)(zero)
            gradient, curvature = q.derivatives(q._symmetric(slope))
            return Measurement(value, gradient, curvature, aux)
        point_key, loss_key = split_key(points, objective, key)
        if points.parts_of_batch > 1:
            of_part = lambda theta, part, aux, key: value_and_gradient(objective, theta, part, aux, key)
            return measure_parts_at_points(of_part, q, points, batch, aux, (point_key, loss_key))
        at = lambda theta: value_and_gradient(objective, theta, batch, aux, loss_key)
        return average_over_points(at, q, points, point_key)


def value_and_gradient(
    objective: AbstractObjective, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
) -> Measurement:
    """Measure the data's loss at θ and its gradient there, a part of the batch at a time if it has parts."""

    def measure(part: PyTree, aux: PyTree, key: Key | None) -> Measurement:
        (value, aux), gradient = jax.value_and_grad(objective.data, has_aux=True)(theta, part, aux, key)
        return Measurement(value, gradient, None, aux)

    return measure_in_parts(measure, batch, aux, key)


class SquaredGradient(Pointwise[HasStructure]):
    """The mini-batch gradient squared, N·ĝ∘ĝ with ĝ the gradient of the mean loss (RMSprop, Adam).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] * w) ** 2, size=2)
    >>> q, data = blr.DiagonalGaussian(jnp.array(1.0), jnp.array(1.0)), (jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0]))
    >>> measured = blr.SquaredGradient().measure(objective, q, blr.Delta(), data, None, None)
    >>> float(measured.curvature)                                               # 2 · 1.5², where Gauss–Newton has 17
    4.5
    """

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    approximation: ClassVar[str] = "Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N ĝ∘ĝ, the mini-batch gradient squared (eq:rmsprop_update)"
    additive: ClassVar[bool] = False
    nonnegative: ClassVar[bool] = True
    from_gradients: ClassVar[bool] = True
    squares_gradient: ClassVar[bool] = True

    def of_gradient(self, q: HasStructure, theta: PyTree, gradient: PyTree, size: Any) -> PyTree:
        return jax.tree.map(lambda g: jnp.asarray(1 / size, g.dtype) * g**2, gradient)

    def at(
        self, objective: AbstractObjective, q: HasStructure, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        measured = value_and_gradient(objective, theta, batch, aux, key)
        squares = self.of_gradient(q, theta, measured.gradient, objective.size)
        return dataclasses.replace(measured, curvature=squares)
