"""A loss of a whole batch, whose examples are not independent or whose value is random."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..numerics.frozen import Frozen, as_frozen, join
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import AbstractLoss, not_separable
from .batches import Weighted, cast_inputs, check_size, count_examples, count_rows, sum_scaled, unpack, widen
from .regularizers import Regularizer, as_regularizer

if TYPE_CHECKING:
    from .objective import Objective


class Batched(AbstractLoss):
    """ℓ̄(θ) from `loss(params, batch, aux, key)`, which returns one loss for each example and the new aux.

    Made by `Objective.from_batch`. The examples may depend on each other (batch normalisation) and the loss may be
    random (dropout, augmentation), so no example's loss is ever taken by itself and no batch is padded.
    """

    loss: Callable[..., Any] = eqx.field(static=True)
    evaluate: Callable[..., Any] | None = eqx.field(static=True)
    compute: Any = eqx.field(static=True)
    size: Any
    regularizer: Regularizer
    aux: PyTree
    frozen: Frozen | None
    has_linear_outputs: ClassVar[bool] = False
    random: ClassVar[bool] = True
    takes_data: ClassVar[bool] = True
    keeps_partial_batch: ClassVar[bool] = False

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        size: int | None = None,
        regularizer: Any = None,
        prior: Any = None,
        aux: PyTree = None,
        compute: Any = None,
        frozen: PyTree = None,
        evaluate: Callable[..., Any] | None = None,
    ):
        self.loss, self.evaluate = loss, evaluate
        self.compute = None if compute is None else jnp.dtype(compute)
        self.size = check_size(loss, size)
        self.regularizer = as_regularizer(regularizer, prior)
        self.aux = aux
        self.frozen = as_frozen(frozen)

    def examples(self, batch: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
        """The examples, and the factor of each one's loss in the sum: its weight times N/M."""
        examples, _, scales = unpack(batch, self.size)
        return examples, scales

    def losses(
        self, theta: PyTree, examples: PyTree, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Float[Array, " B"], PyTree]:
        """Evaluate ℓ(θ, example) for each example of a batch, and the new aux."""
        theta, examples = cast_inputs((join(theta, self.frozen), examples), self.compute)
        # One step evaluates the loss several times with the same key on purpose, which `clone` declares.
        values, aux = self.loss(theta, examples, aux, None if key is None else jax.random.clone(key))
        rows = count_rows(examples)
        if jnp.shape(values) != (rows,):
            raise ValueError(
                f"A from_batch loss returns one number for each example, shape ({rows},), got {jnp.shape(values)}."
            )
        return widen(values, self.compute), aux

    def data(
        self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        examples, scales = self.examples(batch)
        values, aux = self.losses(theta, examples, aux, key)
        return sum_scaled(values, scales), aux

    def rows(self, batch: PyTree) -> int:
        return count_examples(batch)

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> PyTree:
        if not isinstance(data, Weighted):
            return jax.tree.map(lambda x: x[index], data)
        examples = jax.tree.map(lambda x: x[index], data.examples)
        rows = data.weights.shape[0] - data.padding
        count = None if data.count is None else data.count * index.shape[0] / rows
        return Weighted(examples, data.weights[index], count)

    def for_evaluation(self) -> Batched:
        """The loss as it is evaluated on validation data."""
        return self if self.evaluate is None else dataclasses.replace(self, loss=self.evaluate)

    def separable(self, needed_by: str) -> Objective:
        raise not_separable(needed_by)
