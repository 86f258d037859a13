"""Load mini-batches: the data of a fit, and which rows each step sees.

Which rows a step sees depends on the key and on the step's number alone. So a fit that was interrupted and resumed sees
the same batches as one that was not, and nothing about the batches has to be saved with a checkpoint.

The batches of a stream come in groups (`BatchGroup`), which hold what the next steps see and no other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.shuffle import shuffled
from ..objectives.base import AbstractObjective
from ..objectives.batches import count_padding
from ..streams.base import Stream
from .parts import Parts
from .sharding import check_batches, constrain_rows, on_devices, padded_size, sharding_of_rows

_SORTED_ROWS = 2**13
"""Up to so many rows an epoch begins by sorting random numbers; of more, each batch computes its own rows."""


class Loader(NamedTuple):
    """The data of a fit and how they are divided into batches.

    Attributes:
        data: the data as JAX arrays; None for a plain function of θ.
        batch_size: the number of rows in a batch; None where every step sees all rows.
        rows: the number of rows of the data, without padding; 0 for a plain function of θ.
        sharding: how the rows are divided among devices, and hence those of every batch; None on one device.
        stream: where the rows of mini-batches are read from as they are needed; `data` are then the first of them.
        parts: where full-batch steps are measured, part by part; `data` are then the first rows.
    """

    data: PyTree
    batch_size: int | None
    rows: int
    sharding: NamedSharding | None = None
    stream: Stream | None = None
    parts: Parts | None = None

    @staticmethod
    def of(objective: AbstractObjective, data: PyTree, batch_size: int | None) -> Loader:
        """The loader of what a user passed to `fit`, after checks. One batch of all rows counts as no mini-batches."""
        if not objective.takes_data:
            if data is not None or batch_size is not None:
                raise ValueError("A plain function of θ takes no data: wrap a loss over examples in blr.Objective.")
            return Loader(None, None, 0)
        if isinstance(data, Stream | Parts):
            raise ValueError(
                "This function needs its data in memory, and only fit() reads a stream or data in parts: pass arrays, "
                "such as stream.head(rows) for some of the rows."
            )
        sharding = sharding_of_rows(data)
        data = jax.tree.map(jnp.asarray, data) if sharding is None else on_devices(sharding.mesh, data)
        rows = objective.rows(data) - count_padding(data)
        if batch_size is not None and not 1 <= batch_size <= rows:
            raise ValueError(f"batch_size= must be between 1 and the number of examples, {rows}; got {batch_size}.")
        batch_size = None if batch_size == rows else batch_size
        check_batches(objective, sharding, batch_size, count_padding(data))
        return Loader(data, batch_size, rows, sharding)

    @property
    def in_memory(self) -> bool:
        """Whether `data` are all rows."""
        return self.stream is None and self.parts is None

    def initial_order(self) -> np.ndarray:
        """The order of the rows before the first shuffle: −1 everywhere, which `select_batch` recognises.

        It is empty where there are no mini-batches, or so many rows that no order is kept.
        """
        kept = self.batch_size is not None and self.stream is None and self.rows <= _SORTED_ROWS
        return np.full(self.rows if kept else 0, -1)


class BatchGroup(eqx.Module):
    """Successive mini-batches of a stream on the device: the data of as many steps.

    Attributes:
        rows: the rows of the batches one after another, as many of each as the batch size.
        valid: how many rows of each batch count; 0 for what only fills a last group.
        first: the number of the first batch, counted from the beginning of the fit.
        total: N, the number of rows of the stream.
    """

    rows: PyTree
    valid: Int[Array, " K"]
    first: Any
    total: int = eqx.field(static=True)

    def has(self, count: Int[Array, ""]) -> Array:
        """Whether batch number `count` is one of them, or comes before."""
        return count < self.first + jnp.sum(self.valid > 0)

    def select(self, objective: AbstractObjective, count: Int[Array, ""], batch_size: int) -> PyTree:
        """Batch number `count`."""
        number = count - self.first
        place, valid = jnp.arange(batch_size), self.valid[number]
        index = number * batch_size + jnp.minimum(place, valid - 1)
        return objective.select_rows(self.rows, index, place < valid)


def has_batch(data: PyTree, count: Int[Array, ""]) -> Array | bool:
    """Whether the data that the compiled loop has been given hold batch number `count`."""
    return data.has(count) if isinstance(data, BatchGroup) else True


def total_rows(objective: AbstractObjective, data: PyTree) -> int:
    """N, the number of rows of all data."""
    return data.total if isinstance(data, BatchGroup) else objective.rows(data)


def select_batch(
    objective: AbstractObjective,
    data: PyTree,
    key: Key,
    order: Array | np.ndarray,
    count: Int[Array, ""],
    batch_size: int,
    sharding: NamedSharding | None = None,
) -> tuple[PyTree, Array | np.ndarray]:
    """The batch of step number `count`, for use inside the compiled loop.

    Rows are drawn without replacement in each epoch, in an order that the epoch's own key shuffles.

    Args:
        objective: builds the batch from the chosen rows.
        data: all data, or a group of batches.
        key: the key from which the epochs' keys are folded.
        order: the order of the current epoch, or −1 before the first shuffle; empty where none is kept.
        count: the number of the step.
        batch_size: the number of rows in a batch.
        sharding: how the batch's rows are divided among devices. Where they do not divide evenly, the batch is padded.

    Returns:
        The batch, and the order of the epoch it belongs to.
    """
    if isinstance(data, BatchGroup):
        return data.select(objective, count, batch_size), order
    rows = objective.rows(data) - count_padding(data)
    per_epoch = batches_per_epoch(objective, rows, batch_size)
    epoch, position = count // per_epoch, count % per_epoch
    within = jnp.arange(padded_size(sharding, batch_size))
    epoch_key, offset = jax.random.fold_in(key, epoch), position * batch_size + within
    place, is_row = jnp.minimum(offset, rows - 1), (within < batch_size) & (offset < rows)
    if order.shape[0] == 0:
        chosen = shuffled(epoch_key, place, rows)
        return constrain_rows(sharding, objective.select_rows(data, chosen, is_row)), order
    shuffle = lambda: jax.random.permutation(epoch_key, rows)
    # The first step of an epoch shuffles. A resumed run begins in the middle of one, with no order, and shuffles too.
    order = jax.lax.cond((position == 0) | (order[0] < 0), shuffle, lambda: order)
    return constrain_rows(sharding, objective.select_rows(data, order[place], is_row)), order


def batches_per_epoch(objective: AbstractObjective, rows: int, batch_size: int) -> int:
    """The number of batches in an epoch. The smaller last one counts if the objective allows it, else it is dropped."""
    return -(-rows // batch_size) if objective.keeps_partial_batch else rows // batch_size
