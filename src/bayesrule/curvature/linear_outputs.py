"""Losses through a model's outputs: slopes and Hessians in f, carried to θ by the Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.gaussian.precision import SharedFeatures, Structure
from ..objectives.objective import Objective
from .measurement import Measurement


class Outputs(eqx.Module):
    """Every example's outputs f at weighted points, (S, B, K), and the loss and its slope there."""

    examples: PyTree
    scales: Array
    outputs: Array
    weights: Array
    jacobian: PyTree
    losses: Array
    slopes: Array
    loss: Callable[[Array, Any], Array] = eqx.field(static=True)

    @staticmethod
    def at(
        objective: Objective,
        theta: PyTree,
        examples: PyTree,
        scales: Array,
        outputs: Array,
        weights: Array,
        jacobian: PyTree,
    ) -> Outputs:
        loss = objective.output_loss(theta, examples)
        every = jax.vmap(jax.vmap(jax.value_and_grad(loss)), in_axes=(0, None))(outputs, examples[1])
        return Outputs(examples, scales, outputs, weights, jacobian, every[0], every[1], loss)

    def expected(self, every: Array) -> Array:
        """The weighted mean over the points of something that every example has at each."""
        return jnp.tensordot(self.weights.astype(every.dtype), every, axes=1)

    def hessians(self) -> Array:
        """E∇²_f ℓ for each example."""
        hessian = jax.vmap(jax.vmap(jax.jacfwd(jax.grad(self.loss))), in_axes=(0, None))
        return self.expected(hessian(self.outputs, self.examples[1]))

    def scaled(self, rows: Array) -> Array:
        """Each example's row times its weight and N/M; a zero weight leaves it out even if it is not finite."""
        scales = broadcast_rows(self.scales, rows)
        return jnp.asarray(jnp.where(scales == 0, 0.0, scales * rows))

    def measured(self, structure: Structure, middle: Array | None, aux: PyTree) -> Measurement:
        """Gradient Jᵀ E∇_f ℓ and curvature Jᵀ M J, with M = E∇²_f ℓ unless given."""
        slope = self.scaled(self.expected(self.slopes))
        middle = self.scaled(self.hessians() if middle is None else middle)
        if isinstance(self.jacobian, SharedFeatures):
            gradient = self.jacobian.pulled(slope)
        else:
            gradient = jax.tree.map(lambda j: jnp.tensordot(slope, j, axes=((0, 1), (0, 1))), self.jacobian)
        value = jnp.sum(self.scaled(self.expected(self.losses)))
        return Measurement(value, gradient, structure.of_sandwich(self.jacobian, middle), aux)


def broadcast_rows(scales: Array, like: Array) -> Array:
    return scales.astype(like.dtype).reshape((-1,) + (1,) * (like.ndim - 1))
