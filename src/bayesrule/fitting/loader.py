"""Load mini-batches: the data of a fit, and which rows each step sees.

Which rows a step sees depends on the key and on the step's number alone. So a fit that was interrupted and resumed sees
the same batches as one that was not, and nothing about the batches has to be saved with a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ..numerics.random import Key
from ..numerics.shuffle import shuffled
from ..objectives.base import AbstractObjective

_SORTED_ROWS = 2**13
"""Up to so many rows an epoch begins by sorting random numbers; of more, each batch computes its own rows."""


class Loader(NamedTuple):
    """The data of a fit and how they are divided into batches.

    Attributes:
        data: the data as JAX arrays; None for a plain function of θ.
        batch_size: the number of rows in a batch; None where every step sees all rows.
        rows: the number of rows of the data; 0 for a plain function of θ.
    """

    data: PyTree
    batch_size: int | None
    rows: int

    @staticmethod
    def of(objective: AbstractObjective, data: PyTree, batch_size: int | None) -> Loader:
        """The loader of what a user passed to `fit`, after checks. One batch of all rows counts as no mini-batches."""
        if not objective.takes_data:
            if data is not None or batch_size is not None:
                raise ValueError("A plain function of θ takes no data: wrap a loss over examples in blr.Objective.")
            return Loader(None, None, 0)
        data = jax.tree.map(jnp.asarray, data)
        rows = objective.rows(data)
        if batch_size is not None and not 1 <= batch_size <= rows:
            raise ValueError(f"batch_size= must be between 1 and the number of examples, {rows}; got {batch_size}.")
        return Loader(data, None if batch_size == rows else batch_size, rows)

    def initial_order(self) -> np.ndarray:
        """The order of the rows before the first shuffle: −1 everywhere, which `select_batch` recognises.

        It is empty where there are no mini-batches, or so many rows that no order is kept.
        """
        return np.full(self.rows if self.batch_size is not None and self.rows <= _SORTED_ROWS else 0, -1)


def select_batch(
    objective: AbstractObjective,
    data: PyTree,
    key: Key,
    order: Array | np.ndarray,
    count: Int[Array, ""],
    batch_size: int,
) -> tuple[PyTree, Array | np.ndarray]:
    """The batch of step number `count`, for use inside the compiled loop.

    Rows are drawn without replacement in each epoch, in an order that the epoch's own key shuffles.

    Args:
        objective: builds the batch from the chosen rows.
        data: all data.
        key: the key from which the epochs' keys are folded.
        order: the order of the current epoch, or −1 before the first shuffle; empty where none is kept.
        count: the number of the step.
        batch_size: the number of rows in a batch.

    Returns:
        The batch, and the order of the epoch it belongs to.
    """
    rows = objective.rows(data)
    per_epoch = batches_per_epoch(objective, rows, batch_size)
    epoch, position = count // per_epoch, count % per_epoch
    epoch_key, offset = jax.random.fold_in(key, epoch), position * batch_size + jnp.arange(batch_size)
    place = jnp.minimum(offset, rows - 1)
    if order.shape[0] == 0:
        return objective.select_rows(data, shuffled(epoch_key, place, rows), offset < rows), order
    shuffle = lambda: jax.random.permutation(epoch_key, rows)
    # The first step of an epoch shuffles. A resumed run begins in the middle of one, with no order, and shuffles too.
    order = jax.lax.cond((position == 0) | (order[0] < 0), shuffle, lambda: order)
    return objective.select_rows(data, order[place], offset < rows), order


def batches_per_epoch(objective: AbstractObjective, rows: int, batch_size: int) -> int:
    """The number of batches in an epoch. The smaller last one counts if the objective allows it, else it is dropped."""
    return -(-rows // batch_size) if objective.keeps_partial_batch else rows // batch_size
