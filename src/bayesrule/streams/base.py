"""The interface of a stream: rows of data that are read when they are needed, in their order or shuffled.

A stream hands out pytrees of NumPy arrays with one row per example, as `fit(data=…)` takes them, and never holds more
than a buffer of rows. What a source has to say is how rows are read (`parts`) and in which order an epoch reads them
(`windows`); everything else is here.

Shuffling happens in **windows**: the rows of an epoch are read in an order that mixes large pieces of the data as far
as the source can, cut into windows of `buffer` rows, and shuffled within each window. So the row at a place of the
epoch depends on seed, epoch and buffer alone, and reading can begin at any place for the price of one window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import count as count_from
from typing import Any, NamedTuple

import jax
import numpy as np

from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from .prefetch import Prefetched

BUFFER_BYTES = 2**26
"""How many bytes of rows are shuffled together where the user gives no buffer."""

Seed = int | Sequence[int]


class Part(ABC):
    """Some successive rows as their source holds them, before they are copied to where they are needed.

    Attributes:
        rows: how many.
    """

    rows: int

    @abstractmethod
    def write(self, leaves: list[np.ndarray], at: int, first: int, count: int) -> None:
        """Copy rows into arrays.

        Args:
            leaves: an array for each leaf of the stream's `row`, in the order of the flattened tree.
            at: where in the arrays the first of the rows goes.
            first: the first row of the part to copy.
            count: how many rows to copy.
        """


class Window(NamedTuple):
    """Rows that are shuffled together.

    Attributes:
        first: the place of the window's first row in the epoch.
        data: the rows as they were read.
        order: the rows in the order in which the epoch has them.
        position: what a source that cannot seek needs to begin with this window again; None for one that can.
    """

    first: int
    data: PyTree
    order: np.ndarray
    position: Any = None


class Stream(ABC):
    """Rows of data that are read when they are needed: what `blr.stream` makes, and `fit(data=…)` takes.

    Attributes:
        rows: N, the number of rows.
        row: the shape and type of each array without its axis of rows, a pytree of `jax.ShapeDtypeStruct`.
        buffer: how many rows are shuffled together, and the number that are in memory at least.

    >>> import bayesrule as blr, numpy as np
    >>> rows = blr.stream({"y": np.arange(5.0)})
    >>> rows.rows, rows.head(2)["y"].tolist(), [block["y"].tolist() for block in rows.blocks(3)]
    (5, [0.0, 1.0], [[0.0, 1.0, 2.0], [3.0, 4.0]])
    """

    rows: int
    row: PyTree
    buffer: int

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """All rows once, in the order in which they are stored; a second call starts again."""

    @abstractmethod
    def windows(self, seed: Seed, epoch: int, first: int = 0, position: Any = None) -> Iterator[Window]:
        """The rows of one epoch in windows, each of them shuffled.

        Args:
            seed: names the order of all epochs.
            epoch: the number of the epoch.
            first: the place in the epoch of a row that the first window has; windows before it are left out.
            position: the `position` of the window with that row, where a former process has read it.
        """

    @property
    def seekable(self) -> bool:
        """Whether reading can begin anywhere, so that nothing has to be saved to go on with a stream later."""
        return True

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.row))

    def head(self, count: int) -> PyTree:
        """The first rows (all, if there are fewer), without reading much more than these."""
        with closing(assemble(self.parts(), min(count, self.rows), self.row)) as blocks:
            return next(blocks)

    def blocks(self, rows: int) -> Iterator[PyTree]:
        """All rows once, in the order in which they are stored, in blocks of `rows` rows; the last has what is left.

        The next block is read on a thread while one is used.

        Args:
            rows: the number of rows of a block.

        Returns:
            An iterator over pytrees of NumPy arrays, which nobody else writes to.
        """
        rows = positive_int("rows", rows, meaning="how many rows a block has")
        size = min(rows, self.rows)
        return Prefetched(self._counted(lambda: assemble(Prefetched(self.parts(), 2), size, self.row)))

    def _counted(self, read: Callable[[], Generator[PyTree]]) -> Iterator[PyTree]:
        seen = 0

        def count(block: PyTree) -> PyTree:
            nonlocal seen
            seen += rows_of(block)
            if seen > self.rows:
                raise wrong_count(self.rows, None)
            return block

        with closing(read()) as blocks:
            # A loop would keep a block in memory while the next one is read.
            yield from map(count, blocks)
        if seen != self.rows:
            raise wrong_count(self.rows, seen)

    def batches(self, batch_size: int, *, seed: Seed = 0, epoch: int = 0, start: int = 0) -> Iterator[PyTree]:
        """The mini-batches of one epoch, in shuffled order; the last may be smaller.

        Args:
            batch_size: the number of rows in a batch.
            seed: names the order of all epochs.
            epoch: the number of the epoch; each has an order of its own.
            start: the number of the first batch; those before it are left out.

        Returns:
            An iterator over pytrees of NumPy arrays.
        """
        batch_size = positive_int("batch_size", batch_size, meaning="how many rows a batch has")
        windows = Prefetched(self.windows(seed, epoch, start * batch_size))
        return cut_batches(windows, batch_size, start * batch_size)


def assemble(parts: Any, rows: int, row: PyTree) -> Generator[PyTree]:
    """Blocks of `rows` rows from an iterator over parts of any sizes, which it closes; the last has what is left."""
    kinds, structure = jax.tree.flatten(row)
    allocate = lambda: [np.empty((rows, *kind.shape), kind.dtype) for kind in kinds]
    leaves, filled = allocate(), 0
    with closing(parts):
        for part in parts:
            used = 0
            while used < part.rows:
                count = min(part.rows - used, rows - filled)
                part.write(leaves, filled, used, count)
                used, filled = used + count, filled + count
                if filled == rows:
                    yield jax.tree.unflatten(structure, leaves)
                    leaves, filled = allocate(), 0
    if filled:
        yield jax.tree.unflatten(structure, [leaf[:filled] for leaf in leaves])


def cut_batches(windows: Any, batch_size: int, first: int) -> Generator[PyTree]:
    """Batches of the rows of shuffled windows, from the row at place `first` of the epoch on.

    Args:
        windows: an iterator over windows, which is closed at the end.
        batch_size: the number of rows in a batch.
        first: the place of the first row.
    """
    pieces, count = [], 0
    with closing(windows):
        for window in windows:
            order = window.order[max(0, first - window.first) :]
            used = 0
            while used < len(order):
                index = order[used : used + batch_size - count]
                pieces.append(jax.tree.map(lambda x, index=index: np.take(x, index, axis=0), window.data))
                used, count = used + len(index), count + len(index)
                if count == batch_size:
                    yield joined(pieces)
                    pieces, count = [], 0
    if pieces:
        yield joined(pieces)


def joined(pieces: list[PyTree]) -> PyTree:
    """Pytrees of rows one after another."""
    return pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *pieces)


def rows_of(tree: PyTree) -> int:
    """The number of rows of a pytree of arrays."""
    return len(jax.tree.leaves(tree)[0])


def default_buffer(buffer: int | None, row_bytes: int) -> int:
    """The number of rows to shuffle together: as given, or what `BUFFER_BYTES` hold."""
    if buffer is None:
        return max(1, BUFFER_BYTES // max(1, row_bytes))
    return positive_int("buffer", buffer, meaning="how many rows are shuffled together")


def generator(seed: Seed, *numbers: int) -> np.random.Generator:
    """A generator of random numbers that belongs to a seed and a place."""
    words = [seed] if isinstance(seed, int) else list(seed)
    return np.random.default_rng([*words, *numbers])


def wrong_count(rows: int, seen: int | None) -> ValueError:
    """The error for a source that has more rows than it was said to have (None), or only `seen`."""
    what = "more rows than that" if seen is None else f"{seen} rows"
    return ValueError(
        f"The stream was said to have rows={rows}, and its source yields {what} in a pass: N scales every batch and "
        "sets the posterior's width. Pass the right number, or none, and it is counted."
    )


class SeekableStream(Stream):
    """A stream whose data are pieces that can be read in any order: ranges of arrays, row groups of Parquet.

    Attributes:
        pieces: the number of rows of each piece, in storage order.
    """

    pieces: np.ndarray

    @abstractmethod
    def read(self, piece: int, first: int) -> Iterator[Part]:
        """The rows of a piece from number `first` on, in parts."""

    def parts(self) -> Iterator[Part]:
        return self._parts(np.arange(len(self.pieces)), 0)

    def _parts(self, order: np.ndarray, first: int) -> Iterator[Part]:
        """The rows of the pieces in this order, without the `first` ones."""
        ends = np.cumsum(self.pieces[order])
        begin = int(np.searchsorted(ends, first, side="right"))
        for place in range(begin, len(order)):
            piece = int(order[place])
            count = int(self.pieces[piece])
            if count:
                yield from self.read(piece, max(0, first - (int(ends[place]) - count)))

    @cached_property
    def all_rows(self) -> PyTree:
        """All rows in storage order, where the buffer holds them: they are read once, and not again in each epoch."""
        return self.head(self.rows)

    def windows(self, seed: Seed, epoch: int, first: int = 0, position: Any = None) -> Iterator[Window]:
        if self.rows <= self.buffer:
            yield Window(0, self.all_rows, generator(seed, epoch, 1, 0).permutation(self.rows))
            return
        order = generator(seed, epoch, 0).permutation(len(self.pieces))
        place = first // self.buffer * self.buffer
        places = count_from(place, self.buffer)

        def shuffle(data: PyTree) -> Window:
            place = next(places)
            return Window(place, data, generator(seed, epoch, 1, place).permutation(rows_of(data)))

        with closing(assemble(Prefetched(self._parts(order, place), 2), self.buffer, self.row)) as blocks:
            # A loop would keep a window in memory while the next one is read, long after it has been used.
            yield from map(shuffle, blocks)
