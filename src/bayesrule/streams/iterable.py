"""A stream of batches that somebody else makes: a `DataLoader`, Grain, any iterable that can be iterated again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import jax
import numpy as np

from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted, count_examples
from .base import Part, Seed, Stream, Window, default_buffer, generator, joined, rows_of, wrong_count
from .saved_state import pack, unpack
from .to_numpy import batch_as_numpy


class IterableStream(Stream):
    """The rows of an iterable of batches.

    A window is as many whole batches as it takes for `buffer` rows.

    An iterable cannot begin anywhere. One that can save its state (`state_dict` and `load_state_dict`, which
    torchdata's `StatefulDataLoader` has, or `get_state` and `set_state` of its iterators, which Grain's have) goes on
    from the state before the window. Any other is iterated from the beginning of the epoch again. In both cases a
    checksum of the rows tells whether they are those of the former process.

    Args:
        source: the iterable, or a function of the epoch's number that returns one.
        rows: N; None to count it in a pass over all rows.
        buffer: how many rows are shuffled together; None for as many as 64 MB hold.
    """

    def __init__(self, source: Any, rows: int | None = None, buffer: int | None = None):
        if isinstance(source, Iterator):
            raise ValueError(
                f"A {type(source).__name__} can be iterated once, and a fit goes over its data many times: pass what "
                "makes it, blr.stream(lambda epoch: …), which is called at the beginning of each epoch."
            )
        self.source = source
        iterator = iter(self._open(0))
        first = next(iterator, None)
        if first is None:
            raise ValueError("The iterable yields no batches: there is nothing to fit.")
        self._first = self._converted(first)
        leaves, self._structure = jax.tree.flatten(self._first)
        self.row = jax.tree.unflatten(
            self._structure, [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        )
        self.buffer = default_buffer(buffer, self.row_bytes)
        if rows is None:
            rows = rows_of(self._first) + sum(map(rows_of, self._batches(iterator)))
        self.rows = positive_int("rows", rows, meaning="how many rows there are in all")

    @property
    def seekable(self) -> bool:
        return False

    def head(self, count: int) -> PyTree:
        """The first rows that were read: at most as many as the first batch has."""
        return jax.tree.map(lambda x: x[:count], self._first)

    def parts(self) -> Iterator[Part]:
        for batch in self._batches(iter(self._open(0))):
            yield _Batch(batch)

    def windows(self, seed: Seed, epoch: int, first: int = 0, position: Any = None) -> Iterator[Window]:
        if position is not None:
            # The former process may have gone on to this epoch since the position was saved. What the iterable yields
            # in it may depend on the iterations before.
            for number in range(position["epoch"], epoch):
                for _ in self._windows(seed, number, self.rows, position):
                    pass
                position = None
        return self._windows(seed, epoch, first, position)

    def _windows(self, seed: Seed, epoch: int, first: int, position: Any) -> Iterator[Window]:
        """The windows of an epoch from the one with the row at place `first` on.

        Args:
            seed, epoch: as in `windows`.
            first: the place of the row.
            position: what was saved with a window of this epoch at that place or before it; None for nothing.
        """
        source = self._open(epoch)
        number, place, checksum, state = 0, 0, 0, None
        if position is not None and position["state"] is not None:
            number, place, checksum = position["window"], position["first"], position["checksum before"]
            state = unpack(position["state"])
            iterator = _restored(source, state)
        else:
            # A loader that saves its own state, and not its iterators', may shuffle each epoch by what was before it.
            state = source.state_dict() if epoch and hasattr(source, "state_dict") else None
            iterator = iter(source)
        batches = self._batches(iterator)
        while True:
            pieces, before, begin = [], checksum, place
            while place - begin < self.buffer and (batch := next(batches, None)) is not None:
                pieces.append(batch)
                place += rows_of(batch)
                checksum = _checksum(batch, checksum)
            if not pieces:
                break
            if place > self.rows:
                raise wrong_count(self.rows, None)
            if position is not None and place >= position["rows"]:
                if (place, checksum) != (position["rows"], position["checksum"]):
                    raise cannot_say_where()
                position = None
            if place > first:
                saved = {
                    "epoch": epoch,
                    "window": number,
                    "first": begin,
                    "checksum before": before,
                    "state": None if state is None else pack(state),
                    "rows": place,
                    "checksum": checksum,
                }
                order = generator(seed, epoch, 1, number).permutation(place - begin)
                yield Window(begin, joined(pieces), order, saved)
            number, state = number + 1, _state_of(source, iterator)
        if position is not None:
            raise cannot_say_where()
        if place != self.rows:
            raise wrong_count(self.rows, place)

    def _open(self, epoch: int) -> Any:
        """The iterable of an epoch."""
        if callable(self.source) and not isinstance(self.source, Iterable):
            return self.source(epoch)
        for owner in (self.source, getattr(self.source, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return self.source

    def _batches(self, iterator: Iterator[Any]) -> Iterator[PyTree]:
        """The batches of an iterator as NumPy arrays, checked against the first; those without rows are left out."""
        for batch in iterator:
            converted = self._converted(batch)
            if converted is not None:
                yield converted

    def _converted(self, batch: Any) -> PyTree | None:
        batch = batch_as_numpy(batch)
        leaves, structure = jax.tree.flatten(batch)
        if leaves and all(leaf.ndim and not len(leaf) for leaf in leaves):
            return None
        if isinstance(batch, Weighted) and batch.count is not None:
            raise ValueError("A stream counts the rows of a batch itself: leave count= of Weighted out.")
        count_examples(batch)  # raises where arrays differ in their number of rows
        if hasattr(self, "row"):
            kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
            if structure != self._structure or kinds != [
                (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.row)
            ]:
                shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", batch)
                wanted = jax.tree.map(lambda x: f"{x.dtype}{['…', *x.shape]}", self.row)
                raise ValueError(
                    f"The batches of an iterable need the same arrays, and one has {shapes} where the first had "
                    f"{wanted}: pad them to one shape, and give them one type."
                )
        return batch


class _Batch(Part):
    def __init__(self, batch: PyTree):
        self.leaves, self.rows = jax.tree.leaves(batch), rows_of(batch)

    def write(self, leaves: list[np.ndarray], at: int, first: int, count: int) -> None:
        for target, source in zip(leaves, self.leaves, strict=True):
            target[at : at + count] = source[first : first + count]


def _state_of(source: Any, iterator: Any) -> Any:
    """Where an iterator is, as it or its loader says it; None where neither does."""
    if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
        return source.state_dict()
    return iterator.get_state() if hasattr(iterator, "get_state") and hasattr(iterator, "set_state") else None


def _restored(source: Any, state: Any) -> Iterator[Any]:
    """An iterator that goes on from a state."""
    if hasattr(source, "load_state_dict"):
        source.load_state_dict(state)
        iterator = iter(source)
        first = next(iterator, None)
        # A state at the very end of an epoch may yield nothing, and then the next epoch begins.
        return iter(source) if first is None else chain([first], iterator)
    iterator: Any = iter(source)
    if not hasattr(iterator, "set_state"):
        raise cannot_say_where()
    iterator.set_state(state)
    return iterator


def _checksum(batch: PyTree, before: int) -> int:
    for leaf in jax.tree.leaves(batch):
        before = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data, before)
    return before


def cannot_say_where() -> ValueError:
    """The error for an iterable that yields other rows than it did in the process that saved a checkpoint."""
    return ValueError(
        "This iterable cannot say where it is: iterated again, it yields other rows than those that the interrupted "
        "fit has seen, so that a resumed fit would not be the same. Let its order depend on the epoch's number alone, "
        "blr.stream(lambda epoch: …), give it state_dict() and load_state_dict() (torchdata's StatefulDataLoader has "
        "them), or begin again from result.q."
    )
