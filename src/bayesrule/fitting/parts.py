r"""Data in parts, of which only sums are known here: a stream read block by block, or partitions on other machines.

What the rule measures on examples is a sum: the loss, its gradient and its curvature, or a model's messages. So a step
on data in parts is a sum of what was measured on each part, and one `moved`. A part p with $M_p$ of all M rows is
measured as a mini-batch is, scaled by $N/M_p$, and counts with $M_p/M$: the average of all parts is the measurement on
all data, in which a model's factors without rows, its priors, come out once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted, count_rows
from ..streams.base import Stream

BLOCK_BYTES = 2**22
"""How much of a stream is measured at once: large enough that a call costs little beside it, small enough for caches.

Blocks of 16 MB take nearly twice as long, most of it for pages that the system hands out again for every block."""


class Parts(ABC):
    """Data in parts. `fit(data=parts)` takes full-batch steps, each of which is one pass over all parts.

    A part is a pytree of arrays with one row per example, or a `Weighted` with `count`, how many examples it stands
    for. A subclass says where the parts are (`total`); the functions it is given are pure, and defined at the top of a
    module, so that another process can import them.
    """

    rows: int
    """How many rows all parts have together."""
    count: float
    """M, how many examples all parts stand for: the sum of the parts' own counts, `rows` without weights."""

    @abstractmethod
    def head(self, count: int) -> PyTree:
        """The first rows as NumPy arrays, as a part is: for shapes, and for checks before anything is compiled.

        Args:
            count: how many rows; fewer where there are fewer.
        """

    @abstractmethod
    def total(self, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Σ function(part, *arguments) over all parts that have rows.

        Args:
            function: returns a pytree of arrays, of the same shapes for every part.
            *arguments: pytrees of arrays, the same for every part.
        """

    @abstractmethod
    def carry(self, function: Callable[..., tuple[PyTree, PyTree]], kept: Any, *arguments: PyTree) -> tuple[Any, Any]:
        """Σ of the first values of function(part, what is kept there, *arguments), and a handle on the second values.

        What a function returns second stays where the part is; only the sum comes here. A handle is not changed by
        later calls, so that a step that turns out to be too long can be taken back.

        Args:
            function: as for `total`; its second argument is None where nothing has been kept.
            kept: the handle that an earlier call returned, or None.
            *arguments: as for `total`.
        """


class StreamParts(Parts):
    """A stream as parts: its blocks, one after another, the last padded to the same number of rows by rows of weight 0.

    Args:
        stream: the stream.
        block_rows: how many rows a block has at most; by default what makes 4 MB.
    """

    def __init__(self, stream: Stream, block_rows: int | None = None):
        self.stream, self.rows = stream, stream.rows
        if block_rows is None:
            block_rows = max(1, BLOCK_BYTES // max(1, stream.row_bytes))
        # Blocks of nearly equal length: the last one would otherwise be padding for the most part.
        blocks = -(-self.rows // block_rows)
        self.block_rows = -(-self.rows // blocks)
        self.count = float(self.rows)

    def head(self, count: int) -> PyTree:
        return self.stream.head(count)

    def total(self, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        return _sum(function(block, *arguments) for block in self._padded_blocks())

    def carry(self, function: Callable[..., tuple[PyTree, PyTree]], kept: Any, *arguments: PyTree) -> tuple[Any, Any]:
        new: list[PyTree] = []

        def measured() -> Iterator[PyTree]:
            for number, block in enumerate(self._padded_blocks()):
                one, keep = function(block, None if kept is None else kept[number], *arguments)
                new.append(jax.tree.map(np.asarray, keep))
                yield one

        return _sum(measured()), new

    def _padded_blocks(self) -> Iterator[PyTree]:
        for block in self.stream.blocks(self.block_rows):
            rows = count_part(block)
            if rows:
                yield block if rows == self.block_rows else pad_part(block, self.block_rows)


def _sum(measured: Iterator[PyTree]) -> PyTree:
    """The sum of what is measured on one block after another, of which two at most are under way at a time.

    JAX returns before a block has been measured, so that the next one is read meanwhile. It would go on to queue dozens
    of blocks, each of them in memory, if nobody waited.
    """
    sums = next(measured)
    for one in measured:
        sums = _add(jax.block_until_ready(sums), one)
    return sums


@compiled
def _add(one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, one, other)


def count_part(part: PyTree) -> float:
    """How many examples a part stands for; 0 for one without rows."""
    if isinstance(part, Weighted) and part.count is not None:
        return float(part.count)
    leaves = jax.tree.leaves(part.examples if isinstance(part, Weighted) else part)
    return float(np.shape(leaves[0])[0]) if leaves else 0.0


def pad_part(part: PyTree, rows: int) -> Weighted:
    """The part with so many rows, those that are added of weight 0, and the count that it had before.

    Parts of one size are measured by one compiled program. What is added repeats the last row, where the loss is
    defined; rows of zeros might lie outside of its domain.
    """
    weighted = part if isinstance(part, Weighted) else None
    examples = part if weighted is None else weighted.examples
    own = count_rows(examples)
    count = own if weighted is None or weighted.count is None else weighted.count
    weights = np.ones(own) if weighted is None else np.asarray(weighted.weights, float)
    extra = rows - own
    if extra:
        repeat = lambda x: np.concatenate([np.asarray(x), np.repeat(np.asarray(x)[-1:], extra, axis=0)])
        examples = jax.tree.map(repeat, examples)
        weights = np.concatenate([weights, np.zeros(extra)])
    # NumPy arrays, which the call of a program transfers with all of its arguments.
    return Weighted(examples, weights, np.asarray(count, float))


def on_device(data: PyTree) -> PyTree:
    """Arrays of data as JAX arrays; data in parts, and streams, as they are."""
    return data if isinstance(data, Parts | Stream) else jax.tree.map(jnp.asarray, data)
