"""Groups of mini-batches of one shape: what is put on a device at once, for many steps of one compiled loop."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import count as count_from
from typing import Any, NamedTuple

import jax
import numpy as np

from ..numerics.pytree import PyTree
from .base import Seed, Stream, Window
from .prefetch import Prefetched


class Group(NamedTuple):
    """Successive mini-batches of a fit.

    Attributes:
        first: the number of the first batch, counted from the beginning of the fit over all epochs.
        rows: the rows of the batches one after another, `batch_size` of each.
        valid: how many rows of each batch count; those after them are anything. The last group of all may end with
            batches that have none.
        position: where the source was (`Window.position`).
    """

    first: int
    rows: PyTree
    valid: np.ndarray
    position: Any


def groups(
    stream: Stream,
    batch_size: int,
    per_epoch: int,
    size: int,
    seed: Seed,
    first: int,
    last: int | None = None,
    position: Any = None,
) -> Generator[Group]:
    """The mini-batches of a fit from number `first` on, epoch after epoch, in groups.

    The next window is read on a thread while one is cut.

    Args:
        stream: the rows.
        batch_size: the number of rows in a batch.
        per_epoch: the number of batches in an epoch; rows after them are left out.
        size: the number of batches in a group.
        seed: names the order of all epochs.
        first: the number of the first batch.
        last: the number of the batch after the last one that is needed; None for no end.
        position: the position of a group that has that batch, or ends before it, if a former process has made one.
    """
    kinds, structure = jax.tree.flatten(stream.row)
    allocate = lambda: [np.empty((size * batch_size, *kind.shape), kind.dtype) for kind in kinds]
    leaves, valid, filled, origin, start = allocate(), np.zeros(size, np.int32), 0, first, None
    limit = min(per_epoch * batch_size, stream.rows)
    with closing(Prefetched(_windows(stream, batch_size, per_epoch, seed, first, last, position))) as windows:
        for epoch, window in windows:
            place = max(window.first, (first - epoch * per_epoch) * batch_size)
            sources = jax.tree.leaves(window.data)
            while place < min(window.first + len(window.order), limit):
                start = window.position if filled == 0 else start
                # The rows of a batch that the epoch's end has left incomplete are not filled, and so the number of a
                # row in the group does not follow from how many were filled.
                batch = epoch * per_epoch + place // batch_size - origin
                at = batch * batch_size + place % batch_size
                index = window.order[place - window.first :][: min(size * batch_size - at, limit - place)]
                for target, source in zip(leaves, sources, strict=True):
                    np.take(source, index, axis=0, out=target[at : at + len(index)], mode="clip")
                _count_rows(valid, at, len(index), batch_size)
                place, filled = place + len(index), at + len(index)
                if filled == size * batch_size or (place == limit and batch_of(filled, batch_size) == size):
                    yield Group(origin, jax.tree.unflatten(structure, leaves), valid, start)
                    leaves, valid, filled, origin = allocate(), np.zeros(size, np.int32), 0, origin + size
                if last is not None and origin >= last:
                    return
    if filled:
        yield Group(origin, jax.tree.unflatten(structure, leaves), valid, start)


def batch_of(filled: int, batch_size: int) -> int:
    """How many batches so many rows fill, the last perhaps in part."""
    return -(-filled // batch_size)


def _count_rows(valid: np.ndarray, at: int, count: int, batch_size: int) -> None:
    """Add `count` rows from row number `at` of the group on to the numbers of rows of its batches."""
    batches = np.arange(at // batch_size, batch_of(at + count, batch_size))
    begin = np.maximum(at, batches * batch_size)
    valid[batches] += (np.minimum(at + count, (batches + 1) * batch_size) - begin).astype(np.int32)


def _windows(
    stream: Stream, batch_size: int, per_epoch: int, seed: Seed, first: int, last: int | None, position: Any
) -> Iterator[tuple[int, Window]]:
    """The windows of all epochs with the epochs' numbers, from the one with batch number `first` on."""
    epoch, batch = divmod(first, per_epoch)
    end = None if last is None else -(-last // per_epoch)
    for number in count_from(epoch) if end is None else range(epoch, end):
        place = batch * batch_size if number == epoch else 0
        windows = stream.windows(seed, number, place, position if number == epoch else None)
        # A loop would keep a window in memory while the next one is read.
        yield from map(partial(_numbered, number), windows)


def _numbered(epoch: int, window: Window) -> tuple[int, Window]:
    return epoch, window
