"""The gradient alone, and the squared mini-batch gradient of RMSprop and Adam."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..objectives.base import AbstractObjective
from ..points.base import Exact, Points
from .average import accumulated, averaged
from .base import Curvature, Pointwise, keys
from .measurement import Measurement


class Gradient(Curvature):
    """The gradient only: in θ for a Gaussian with fixed precision, in μ for `Exact` points."""

    serves: ClassVar[frozenset[str]] = frozenset({"none"})
    meaning: ClassVar[str] = "the gradient only"

    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        if isinstance(points, Exact):
            here = jax.tree.map(jnp.zeros_like, q.expectation())
            at = lambda shift: objective.expected(q, shift, batch, aux, key)
            (value, aux), slope = jax.value_and_grad(at, has_aux=True)(here)
            gradient, curvature = q.derivatives(q._symmetric(slope))
            return Measurement(value, gradient, curvature, aux)
        point_key, loss_key = keys(points, objective, key)
        return averaged(lambda t: sloped(objective, t, batch, aux, loss_key), q, points, point_key)


def sloped(objective: AbstractObjective, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measurement:
    """The data's loss at θ and its gradient."""

    def measure(part: PyTree, aux: PyTree, key: Any) -> Measurement:
        (value, aux), gradient = jax.value_and_grad(objective.data, has_aux=True)(theta, part, aux, key)
        return Measurement(value, gradient, None, aux)

    return accumulated(measure, batch, aux, key)


class SquaredGradient(Pointwise):
    """The mini-batch gradient squared, N·ĝ∘ĝ with ĝ the gradient of the mean loss (RMSprop, Adam)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    approximation: ClassVar[str] = "Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N ĝ∘ĝ, the mini-batch gradient squared (eq:rmsprop_update)"
    additive: ClassVar[bool] = False

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        measured = sloped(objective, theta, batch, aux, key)
        squares = jax.tree.map(lambda g: jnp.asarray(1 / objective.size, g.dtype) * g**2, measured.gradient)
        return dataclasses.replace(measured, curvature=squares)
