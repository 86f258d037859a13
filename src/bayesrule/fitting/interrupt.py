"""Ctrl-C and signals such as SIGTERM as requests, which a fit reads between two chunks of steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATED = 143
"""The exit code after a signal that asked to save and to end: that of a process that SIGTERM ends, 128 + 15."""


class Interrupt:
    """Turns Ctrl-C into a request that is read between two chunks, so that none is lost; a second Ctrl-C acts at once.

    Other signals may be requests as well; a second one changes nothing, because the first is being obeyed. The handlers
    of before are restored at the end. Only the main thread can handle signals; in another thread nothing is changed.

    Args:
        signals: signals other than Ctrl-C that are requests, too.

    Attributes:
        requested: whether to stop.
        signal: which of the other signals came; None if it was none of them.
    """

    def __init__(self, signals: Iterable[signal.Signals] = ()) -> None:
        self.requested, self.signal = False, None
        self.signals = tuple(signals)
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, *self.signals):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.signal = signal.Signals(number)
        elif self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None is a handler that was not installed from Python, and cannot be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def signals_named(names: Iterable[str | signal.Signals]) -> tuple[signal.Signals, ...]:
    """The signals with these names, with or without "SIG" in front; raises for those that a process cannot handle.

    >>> signals_named(["SIGTERM", "int"])
    (<Signals.SIGTERM: 15>, <Signals.SIGINT: 2>)
    """
    found = []
    for name in names:
        text = name.name if isinstance(name, signal.Signals) else str(name).upper()
        text = text if text.startswith("SIG") else f"SIG{text}"
        if text in ("SIGKILL", "SIGSTOP") or text not in signal.Signals.__members__:
            raise ValueError(f"{name!r} is not a signal that a program can handle here: give SIGTERM or SIGUSR1.")
        found.append(signal.Signals[text])
    return tuple(found)


@contextmanager
def exit_on(signals: Iterable[signal.Signals]) -> Generator[None]:
    """A context in which these signals raise `SystemExit(143)`, where no `Interrupt` handles them.

    In a thread other than the main one nothing is changed.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
