"""Work ahead on a thread: the next item is made while the last one is used."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_PATIENCE = 10.0  # seconds


class Prefetched(Iterator[T], Generic[T]):
    """An iterator whose items are made on a thread of its own, at most `ahead` of them before they are asked for.

    The one that is being made counts, so that with `ahead=1` there are two at a time, in use and ahead.

    An exception of the thread is raised, as it is and with its traceback, where its item is asked for. The thread ends
    with the last item, with an exception, with `close` (or at the end of a `with` block), and when nobody refers to the
    iterator any more.

    Args:
        items: what to iterate over. Where it is a generator, it is closed on the thread.
        ahead: how many items are made before they are asked for.

    >>> with Prefetched(range(3)) as items:
    ...     list(items)
    [0, 1, 2]
    """

    def __init__(self, items: Iterable[T], ahead: int = 1):
        self._channel = _Channel(ahead)
        # The thread refers to the channel alone, so that an iterator that is forgotten can end it.
        self._end = weakref.finalize(self, self._channel.stop)
        self._thread = threading.Thread(
            target=_produce, args=(self._channel, items), name="bayesrule reads ahead", daemon=True
        )
        self._thread.start()

    def __next__(self) -> T:
        kind, value = self._channel.take()
        if kind == _ITEM:
            return value
        if kind == _ERROR:
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread, and wait for it, unless its source does not answer: a dead disk must not hold the process."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ITEM, _ERROR, _END = "item", "error", "end"


class _Channel:
    """A queue of bounded length between two threads, which either of them can end."""

    def __init__(self, capacity: int):
        self.capacity, self.stopped = max(1, capacity), False
        self.waiting: deque[tuple[str, Any]] = deque()
        self.changed = threading.Condition()

    def put_next(self, iterator: Iterator[Any]) -> bool:
        """Add the next item, and wait until there is room for another. Returns whether there may be more."""
        entry = [(_ITEM, item) for item in islice(iterator, 1)]
        with self.changed:
            if self.stopped or not entry:
                return False
            self.waiting.append(entry.pop())  # An item that is taken must not stay in memory here.
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.stopped or len(self.waiting) < self.capacity)
            return not self.stopped

    def put(self, kind: str, value: Any = None) -> None:
        """Add the last entry."""
        with self.changed:
            if not self.stopped:
                self.waiting.append((kind, value))
            self.changed.notify_all()

    def take(self) -> tuple[str, Any]:
        """The next entry. The end and an error stay, and are what every later call returns."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.waiting)
            if not self.waiting:
                return _END, None
            if self.waiting[0][0] != _ITEM:
                return self.waiting[0]
            self.changed.notify_all()
            return self.waiting.popleft()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.waiting.clear()
            self.changed.notify_all()


def _produce(channel: _Channel, items: Iterable[Any]) -> None:
    try:
        iterator = iter(items)
        while channel.put_next(iterator):
            pass
    except BaseException as error:  # The thread that waits for the item has to know, whatever it is.
        channel.put(_ERROR, error)
    else:
        channel.put(_END)
    finally:
        close: Callable[[], None] | None = getattr(items, "close", None)
        if close is not None:
            close()
