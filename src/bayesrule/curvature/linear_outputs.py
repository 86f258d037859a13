"""Losses through a model's outputs f: slopes and Hessians in f, carried to θ by the Jacobian.

Where the outputs are linear in θ, f = f(m) + J(θ − m), they are Gaussian under q with covariance J S⁻¹Jᵀ, and
E_q∇ℓ = Jᵀ E∇_f ℓ, E_q∇²ℓ = Jᵀ E[∇²_f ℓ] J. The expectations are then over the few outputs of each example, however
many parameters there are (`points.outputs`). With the outputs at one θ and their Jacobian there, the same formulas
are the generalised Gauss–Newton approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..families.gaussian.precision import SharedFeatures, Structure
from ..objectives.objective import Objective
from .measurement import Measurement


class OutputPoints(eqx.Module):
    """Weighted points of every example's outputs, and the loss and its gradient in the outputs there."""

    examples: PyTree
    scales: Float[Array, " B"]
    outputs: Float[Array, "S B K"]
    weights: Float[Array, "S *B"]
    jacobian: PyTree
    losses: Float[Array, "S B"]
    slopes: Float[Array, "S B K"]
    covariance: Float[Array, "B K K"] | None
    loss: Callable[[Array, Any], Array] = eqx.field(static=True)

    @staticmethod
    def evaluate(
        objective: Objective,
        theta: PyTree,
        examples: PyTree,
        scales: Float[Array, " B"],
        outputs: Float[Array, "S B K"],
        weights: Float[Array, "S *B"],
        jacobian: PyTree,
        covariance: Float[Array, "B K K"] | None = None,
    ) -> OutputPoints:
        """Evaluate the loss and its gradient at the outputs' points.

        Args:
            objective: An objective with `output`; θ gives the shape of one output.
            theta: Any θ.
            examples: The examples (x, y).
            scales: The factor of each example's loss in ℓ̄.
            outputs, weights: The points: E ℓ_b ≈ Σ_s w_s ℓ(f_sb, y_b), with w_sb where weights are those of each row.
            jacobian: ∂f_b/∂θ, leaves (B, K, *leaf) or `SharedFeatures`.
            covariance: The outputs' covariance under q, for a curvature that reads it.
        """
        loss = objective.output_loss(theta, examples)
        losses, slopes = jax.vmap(jax.vmap(jax.value_and_grad(loss)), in_axes=(0, None))(outputs, examples[1])
        return OutputPoints(examples, scales, outputs, weights, jacobian, losses, slopes, covariance, loss)

    def expected(self, values: Float[Array, "S B *X"]) -> Float[Array, "B *X"]:
        """The weighted mean over the points."""
        if self.weights.ndim == 2:
            return jnp.einsum("sb,sb...->b...", self.weights.astype(values.dtype), values)
        return jnp.tensordot(self.weights.astype(values.dtype), values, axes=1)

    def hessians(self) -> Float[Array, "B K K"]:
        """E∇²_f ℓ for each example."""
        hessian = jax.vmap(jax.vmap(jax.jacfwd(jax.grad(self.loss))), in_axes=(0, None))
        return self.expected(hessian(self.outputs, self.examples[1]))

    def scaled(self, rows: Float[Array, "B *X"]) -> Float[Array, "B *X"]:
        """Each example's row times its scale; a zero scale leaves it out even if it is not finite."""
        scales = broadcast_rows(self.scales, rows)
        return jnp.asarray(jnp.where(scales == 0, 0.0, scales * rows))

    def to_measurement(
        self, structure: Structure, output_hessian: Float[Array, "B K K"] | None, aux: PyTree
    ) -> Measurement:
        """The gradient Jᵀ E∇_f ℓ and the curvature Jᵀ M J, with M = E∇²_f ℓ unless `output_hessian` gives another."""
        slope = self.scaled(self.expected(self.slopes))
        middle = self.scaled(self.hessians() if output_hessian is None else output_hessian)
        if isinstance(self.jacobian, SharedFeatures):
            gradient = self.jacobian.transposed_product(slope)
        else:
            gradient = jax.tree.map(lambda j: jnp.tensordot(slope, j, axes=((0, 1), (0, 1))), self.jacobian)
        value = jnp.sum(self.scaled(self.expected(self.losses)))
        return Measurement(value, gradient, structure.of_sandwich(self.jacobian, middle), aux)


def broadcast_rows(scales: Float[Array, " B"], like: Float[Array, "B *X"]) -> Array:
    """One number for each row, with the dtype of `like` and axes of length one to broadcast against it."""
    return scales.astype(like.dtype).reshape((-1,) + (1,) * (like.ndim - 1))
