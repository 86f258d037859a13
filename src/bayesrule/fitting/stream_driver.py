"""Mini-batches of a stream: the same compiled steps, on groups of batches that a thread puts on the device.

A group holds the batches of the next steps, a few megabytes of them. While the compiled loop takes the steps of one
group, a thread reads, shuffles and transfers the next, so that reading costs no time unless it takes longer than the
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..rule.rule import Rule
from ..streams.base import Stream
from ..streams.groups import groups
from ..streams.prefetch import Prefetched
from .driver import Driver
from .loader import BatchGroup, Loader, batches_per_epoch
from .loop import Carry
from .reason import Reason

_GROUP_BYTES = 2**23
_GROUP_BATCHES = 1024


class StreamDriver(Driver):
    """Takes the steps of one fit on mini-batches of a stream.

    Args:
        rule, objective, loader, key, tolerance, state, options: as for `Driver`; the loader has a stream.
        position: what a former process has saved of where the stream was; None for one that begins, or that can seek.
    """

    def __init__(
        self,
        rule: Rule,
        objective: AbstractObjective,
        loader: Loader,
        key: Key,
        tolerance: float | None,
        state: Any,
        *,
        position: Any = None,
        **options: Any,
    ):
        super().__init__(rule, objective, loader, key, tolerance, state, **options)
        assert loader.stream is not None
        assert loader.batch_size is not None
        self.head = self.data
        self._feed = Feed(objective, loader.stream, loader.batch_size, key, max(1, self.steps), position)

    def __exit__(self, *_: object) -> None:
        self._feed.close()

    @property
    def position(self) -> Any:
        return self._feed.position

    @property
    def seen_data(self) -> PyTree:
        return self.head if self._feed.group is None else self._feed.group.rows

    def decide(self, carry: Carry, until: int) -> Carry:
        self.data = self.head  # What is decided between two chunks looks at some rows, as a batch of all.
        return super().decide(carry, until)

    def _run(self, rule: Rule, carry: Carry, until: int) -> Carry:
        taken = 0
        while True:
            try:
                self.data = self._feed.at(int(carry.position))
            except KeyboardInterrupt:
                if not taken:
                    raise
                # The carry of the caller has been given away to the steps that were taken: it has to get the new one.
                return carry
            carry, taken = self._call(rule, carry, until), taken + 1
            if int(carry.state.count) >= until or Reason.of(int(carry.code)) is not Reason.STEPS:
                return carry


class Feed:
    """The groups of batches of a fit on the device, one after another, made on a thread.

    Args:
        objective: decides how many batches there are in an epoch.
        stream: the rows.
        batch_size: the number of rows in a batch.
        key: the key of the fit, from which the order of the rows follows.
        steps: how many batches are needed at most, about.
        position: what a former process has saved of where the stream was.
    """

    def __init__(
        self, objective: AbstractObjective, stream: Stream, batch_size: int, key: Key, steps: int, position: Any
    ):
        self.stream, self.batch_size, self.position, self.steps = stream, batch_size, position, steps
        self.per_epoch = batches_per_epoch(objective, stream.rows, batch_size)
        self.size = int(min(max(1, _GROUP_BYTES // (batch_size * stream.row_bytes)), steps, _GROUP_BATCHES))
        shuffle_key = jax.random.split(key)[0]
        self.seed = tuple(int(word) for word in np.asarray(jax.random.key_data(shuffle_key)).reshape(-1))
        self.group: BatchGroup | None = None
        self._first = self._end = 0
        self._coming: Prefetched[tuple[int, int, BatchGroup, Any]] | None = None

    def at(self, count: int) -> BatchGroup:
        """The group with batch number `count`; waits until it has been read."""
        if self.group is not None and self._first <= count < self._end:
            return self.group
        if self._coming is None or count != self._end:
            self.close()
            # A fit that begins again from another start begins with the first batch again.
            position = None if self.group is not None and count < self._first else self.position
            self._coming = Prefetched(self._groups(count, position))
        coming = next(self._coming, None)
        if coming is None:  # More batches are needed than there are steps, if some were skipped.
            self.close()
            return self.at(count)
        self._first, self._end, self.group, self.position = coming
        return self.group

    def _groups(self, first: int, position: Any) -> Iterator[tuple[int, int, BatchGroup, Any]]:
        made = groups(
            self.stream, self.batch_size, self.per_epoch, self.size, self.seed, first, first + self.steps, position
        )
        with closing(made):
            for group in made:
                rows, valid, number = jax.device_put((group.rows, group.valid, np.int32(group.first)))
                end = group.first + int(np.count_nonzero(group.valid))
                yield group.first, end, BatchGroup(rows, valid, number, self.stream.rows), group.position

    def close(self) -> None:
        """End the thread."""
        if self._coming is not None:
            self._coming.close()
        self._coming = None
