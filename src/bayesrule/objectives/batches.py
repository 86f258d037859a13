"""Batches of examples: weighted, measured in parts, or with their outputs linearised."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..families.gaussian.precision import SharedFeatures
from ..numerics.trees import ravel


class Weighted(eqx.Module):
    """Examples with a weight each: `data=Weighted((x, y), w)`, or a batch of them.

    A weight multiplies its example's loss, so 2 counts an example twice and 0 leaves it out. `count`
    is the number M of examples that the batch stands for in N/M; by default the number of its rows.
    """

    examples: PyTree
    weights: Float[Array, " B"]
    count: Any = None


class Microbatches(eqx.Module):
    """A batch that is measured in `count` equal parts, one after another: gradient accumulation.

    The step is the same as on the whole batch at once (but for batch statistics, which see a part at a time), with
    the memory of one part.
    """

    batch: PyTree
    count: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(_bare(self.batch))}
        if self.count < 1 or any(n % self.count for n in rows):
            raise ValueError(f"A batch of {max(rows)} examples does not divide into {self.count} equal parts.")

    def parts(self) -> PyTree:
        """The parts, along a new leading axis."""
        split = lambda x: jnp.reshape(x, (self.count, -1, *jnp.shape(x)[1:]))
        if not isinstance(self.batch, Weighted):
            return jax.tree.map(split, self.batch)
        examples, weights = jax.tree.map(split, (self.batch.examples, self.batch.weights))
        count = self.batch.weights.shape[0] if self.batch.count is None else self.batch.count
        return Weighted(examples, weights, jnp.full(self.count, count / self.count))


def _bare(batch: PyTree) -> PyTree:
    return batch.examples if isinstance(batch, Weighted) else batch


class Linearized(eqx.Module):
    """A batch whose outputs are linear in θ, with their Jacobian taken once: f = offset + Jθ."""

    batch: PyTree
    jacobian: PyTree
    offset: Float[Array, "B K"]

    def outputs(self, theta: PyTree) -> Float[Array, "B K"]:
        if isinstance(self.jacobian, SharedFeatures):
            return self.offset + self.jacobian.outputs(ravel(theta))
        parts = jax.tree.map(lambda j, t: jnp.tensordot(j, t, axes=t.ndim), self.jacobian, theta)
        return self.offset + sum(jax.tree.leaves(parts))


def _rows(batch: PyTree) -> int:
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise ValueError("This objective has examples, so a step needs a batch: arrays with one row per example.")
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        shapes = [jnp.shape(leaf) for leaf in leaves]
        raise ValueError(f"The arrays of a batch need the same number of rows, got shapes {shapes}.")
    (rows,) = sizes.pop()
    if rows == 0:
        raise ValueError("The batch is empty: N/M has no meaning with M = 0. Leave empty batches out.")
    return rows
