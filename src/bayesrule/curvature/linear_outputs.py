"""Losses through a model's outputs f: slopes and Hessians in f, carried to θ by the Jacobian.

Where the outputs are linear in θ, f = f(m) + J(θ − m), they are Gaussian under q with covariance J S⁻¹Jᵀ, and
E_q∇ℓ = Jᵀ E∇_f ℓ, E_q∇²ℓ = Jᵀ E[∇²_f ℓ] J. The expectations are then over the few outputs of each example, however
many parameters there are (`points.outputs`). With the outputs at one θ and their Jacobian there, the same formulas
are the generalised Gauss–Newton approximation.

A loss may know its averages over points: `loss.averages(outputs, labels, weights, whole)` returns, for every example,
the mean loss, its gradient and its Hessian, all of it (`whole`) or the diagonal. A softmax over many classes then needs
neither the Hessian at every point nor, where the outputs are independent under q, K² numbers for an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.gaussian.precision import SharedFeatures, Structure
from ..numerics.pytree import PyTree
from ..objectives.objective import Objective
from .measurement import Measurement


class OutputPoints(eqx.Module):
    """Weighted points of every example's outputs, and the loss there."""

    examples: PyTree
    scales: Float[Array, " B"]
    outputs: Float[Array, "S B K"]
    weights: Float[Array, "S *B"]
    jacobian: PyTree
    covariance: Float[Array, "B K K"] | None
    loss: Callable[[Array, Any], Array] = eqx.field(static=True)
    averages: Callable[..., Any] | None = eqx.field(static=True, default=None)

    @staticmethod
    def of(
        objective: Objective,
        theta: PyTree,
        examples: PyTree,
        scales: Float[Array, " B"],
        outputs: Float[Array, "S B K"],
        weights: Float[Array, "S *B"],
        jacobian: PyTree,
        covariance: Float[Array, "B K K"] | None = None,
    ) -> OutputPoints:
        """The outputs' points of an objective.

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
        averages = getattr(objective.loss, "averages", None)
        return OutputPoints(examples, scales, outputs, weights, jacobian, covariance, loss, averages)

    @property
    def losses_and_slopes(self) -> tuple[Float[Array, "S B"], Float[Array, "S B K"]]:
        """The loss and its gradient in the outputs at every point."""
        return jax.vmap(jax.vmap(jax.value_and_grad(self.loss)), in_axes=(0, None))(self.outputs, self.examples[1])

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
        if self.averages is not None and output_hessian is None:
            whole = structure.couples_outputs or not isinstance(self.jacobian, SharedFeatures)
            loss, slope, middle = self.averages(self.outputs, self.examples[1], self.weights, whole)
        else:
            loss, slope = map(self.expected, self.losses_and_slopes)
            middle = self.hessians() if output_hessian is None else output_hessian
        loss, slope, middle = self.scaled(loss), self.scaled(slope), self.scaled(middle)
        if isinstance(self.jacobian, SharedFeatures):
            gradient = self.jacobian.transposed_product(slope)
        else:
            gradient = jax.tree.map(lambda j: jnp.tensordot(slope, j, axes=((0, 1), (0, 1))), self.jacobian)
        return Measurement(jnp.sum(loss), gradient, structure.of_sandwich(self.jacobian, middle), aux)


def broadcast_rows(scales: Float[Array, " B"], like: Float[Array, "B *X"]) -> Array:
    """One number for each row, with the dtype of `like` and axes of length one to broadcast against it."""
    return scales.astype(like.dtype).reshape((-1,) + (1,) * (like.ndim - 1))


def sum_over_rows(measure: Callable[..., Measurement], arrays: PyTree, parts: int) -> Measurement:
    """The sum of what is measured on parts of the rows, one part after another, with the memory of one part.

    Args:
        measure: measures some of the rows, given like `arrays`; the second of them has a factor for each row's loss.
        arrays: the arrays of all rows, each with a leading axis of rows.
        parts: into how many parts the rows are divided.
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    if parts <= 1 or rows <= 1:
        return measure(*arrays)
    size = -(-rows // min(parts, rows))
    count = -(-rows // size)
    # The last part is filled up with the last row, at a weight of 0.
    index = jnp.minimum(jnp.arange(count * size), rows - 1).reshape(count, size)
    is_row = (jnp.arange(count * size) < rows).reshape(count, size)

    def of_part(part: tuple[Array, Array]) -> Measurement:
        examples, scales, *others = jax.tree.map(lambda x: x[part[0]], arrays)
        return measure(examples, jnp.where(part[1], scales, 0.0), *others)

    shapes = jax.eval_shape(of_part, (index[0], is_row[0]))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = lambda sums, part: (jax.tree.map(jnp.add, sums, of_part(part)), None)
    return jax.lax.scan(add, zero, (index, is_row))[0]
