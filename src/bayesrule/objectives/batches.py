"""Batches of examples (weighted, measured in parts, or with their outputs linearised) and sums over them."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ..families.gaussian.precision import SharedFeatures
from ..numerics.pytree import PyTree
from ..numerics.trees import ravel, wide


class Weighted(eqx.Module):
    """Examples with a weight each: `data=Weighted((x, y), w)`, or a batch of them.

    Args:
        examples: Arrays with one row per example.
        weights: A factor for each example's loss: 2 counts an example twice, 0 leaves it out.
        count: The number M of examples that the batch stands for in N/M; by default the number of its rows.
        padding: How many rows at the end are no examples, only there so that the rows divide evenly over devices
            (`shard`). Their weights are 0, they do not count in M, and no mini-batch has them.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda m, y: 0.5 * (y - m) ** 2, size=3)
    >>> data = blr.Weighted(jnp.array([1.0, 5.0, 9.0]), jnp.array([2.0, 1.0, 0.0]))               # 1 twice, and no 9
    >>> float(blr.fit(blr.newton(), objective, jnp.zeros(()), data, steps=3).q.mean)
    2.3333
    """

    examples: PyTree
    weights: Float[Array, " B"] | np.ndarray
    count: Any = None
    padding: int = eqx.field(static=True, default=0)


class Microbatches(eqx.Module):
    """A batch that is measured in `count` equal parts, one after another: gradient accumulation.

    The step is the same as on the whole batch at once (except for batch statistics, which are those of a part), with
    the memory of one part.

    Args:
        batch: The batch, of bare arrays or `Weighted`.
        count: How many parts; it divides the number of examples.

    >>> import jax.numpy as jnp
    >>> Microbatches(jnp.arange(6.0), 3).parts().tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """

    batch: PyTree
    count: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(_bare(self.batch))}
        if self.count < 1 or any(n % self.count for n in rows):
            raise ValueError(
                f"A batch of {max(rows)} examples does not divide into {self.count} equal parts: choose microbatches= "
                "so that it divides batch_size."
            )

    def parts(self) -> PyTree:
        """The parts, along a new leading axis; each stands for its share of M."""
        split = lambda x: jnp.reshape(x, (self.count, -1, *jnp.shape(x)[1:]))
        if not isinstance(self.batch, Weighted):
            return jax.tree.map(split, self.batch)
        examples, weights = jax.tree.map(split, (self.batch.examples, self.batch.weights))
        count = count_weight(self.batch)
        return Weighted(examples, weights, jnp.full(self.count, count / self.count))


def _bare(batch: PyTree) -> PyTree:
    """The examples without their weights."""
    return batch.examples if isinstance(batch, Weighted) else batch


class Linearized(eqx.Module):
    """A batch whose outputs are linear in θ, with their Jacobian computed once: f = offset + Jθ.

    `jacobian` has leaves (B, K, *leaf), or is `SharedFeatures`.
    """

    batch: PyTree
    jacobian: PyTree
    offset: Float[Array, "B K"]

    def outputs(self, theta: PyTree) -> Float[Array, "B K"]:
        """Every example's outputs at θ."""
        if isinstance(self.jacobian, SharedFeatures):
            return self.offset + self.jacobian.outputs(ravel(theta))
        parts = jax.tree.map(lambda j, t: jnp.tensordot(j, t, axes=t.ndim), self.jacobian, theta)
        return self.offset + sum(jax.tree.leaves(parts))


def count_rows(batch: PyTree) -> int:
    """Count the rows of a batch of bare arrays, and raise where they disagree or there are none."""
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise ValueError(
            "This objective has a loss for each example, so it needs a batch: pass data= to fit, or a batch to step, "
            "arrays with one row per example."
        )
    sizes = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) > 1 or () in sizes:
        shapes = [jnp.shape(leaf) for leaf in leaves]
        raise ValueError(f"The arrays of a batch need the same number of rows, got shapes {shapes}.")
    (rows,) = sizes.pop()
    if rows == 0:
        raise ValueError("The batch is empty: N/M has no meaning with M = 0. Leave empty batches out.")
    return rows


def count_examples(batch: PyTree) -> int:
    """Count the examples of a batch of any of the types above."""
    if isinstance(batch, Linearized | Microbatches):
        batch = batch.batch
    if not isinstance(batch, Weighted):
        return count_rows(batch)
    rows = count_rows(batch.examples)
    if jnp.shape(batch.weights) != (rows,):
        raise ValueError(f"There are {rows} examples but the weights have shape {jnp.shape(batch.weights)}.")
    return rows


def count_weight(batch: PyTree) -> Any:
    """M, the number of examples that a batch stands for: of its rows, unless a `Weighted` says another."""
    rows = count_examples(batch)
    while isinstance(batch, Linearized | Microbatches):
        batch = batch.batch
    return batch.count if isinstance(batch, Weighted) and batch.count is not None else rows - count_padding(batch)


def count_padding(data: PyTree) -> int:
    """Count the rows at the end of a batch, or of all data, that are no examples."""
    return data.padding if isinstance(data, Weighted) else 0


def unpack(batch: PyTree, size: Any) -> tuple[PyTree, Float[Array, " B"] | np.ndarray | None, Float[Array, " B"]]:
    """The bare examples of a batch, their weights (if any), and the factor of each loss in ℓ̄: its weight times N/M."""
    batch = batch.batch if isinstance(batch, Microbatches) else batch
    rows = count_examples(batch)
    if isinstance(batch, Linearized):
        batch = batch.batch
    weights, count = None, count_weight(batch)
    if isinstance(batch, Weighted):
        batch, weights = batch.examples, batch.weights
    scale = jnp.asarray(size / count, dtype=float)
    return batch, weights, scale * (jnp.ones(rows) if weights is None else weights)


def sum_scaled(values: Float[Array, " B"], scales: Float[Array, " B"]) -> Array:
    """Σ scale·loss over a batch. A zero weight leaves an example out altogether, even if its loss is not a number."""
    values = values.astype(wide(values.dtype))  # A sum in half precision would lose most examples of a large batch.
    return jnp.sum(jnp.where(scales == 0, 0.0, values * scales.astype(values.dtype)))


def check_size(loss: Any, size: Any) -> Any:
    """N as given, once it is known to be a positive number (and the loss to be a function)."""
    if not callable(loss):
        raise ValueError(f"Objective takes a function loss(params, example), got {type(loss).__name__}.")
    if size is None:
        raise ValueError(
            "Objective needs size=N, the number of training examples: without it the posterior's width is "
            "meaningless. For a full-batch loss pass size=len(data)."
        )
    if isinstance(size, Tracer):
        return size
    if isinstance(size, bool) or jnp.ndim(size) != 0 or float(size) <= 0:
        raise ValueError(f"size=N is the number of training examples, a positive number, got {size!r}.")
    return size


def as_scalar(value: Any, name: str) -> Array:
    """The value of a loss as an array without axes."""
    if jnp.shape(value) != ():
        raise ValueError(f"{name} must be a scalar, got shape {jnp.shape(value)}: sum or average it over its axes.")
    return jnp.asarray(value)


def cast_inputs(tree: PyTree, dtype: Any) -> PyTree:
    """Cast the floating arrays that a loss is called with to the precision it computes in (None: as they are)."""
    if dtype is None:
        return tree
    is_floating = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_floating(x) else x, tree)


def widen(values: Array, dtype: Any) -> Array:
    """Cast what was computed in the precision `dtype` back to float32 at least (None: as it is)."""
    return values if dtype is None else values.astype(jnp.promote_types(values.dtype, jnp.float32))
