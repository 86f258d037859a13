"""What surrounds the compiled loop: chunks of steps, Ctrl-C between them, the progress bar, and BLAS threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import FrameType
from typing import Any

from .reason import Reason

# A chunk is one call of the compiled loop, during which Python cannot react: it should be short enough for Ctrl-C and
# a progress bar, and long enough that calls cost nothing. It starts small and doubles until it takes this long.
_FIRST_CHUNK_STEPS = 16
_CHUNK_SECONDS = 0.25


def run_in_chunks(
    run_chunk: Callable[[Any, int], Any], carry: Any, last: int, after_chunk: Callable[[Any], bool | None]
) -> tuple[Any, Reason]:
    """Call the compiled loop on a few steps at a time, until all are taken, something ends them, or Ctrl-C.

    Args:
        run_chunk: run_chunk(carry, until) takes steps until the state's count is `until` or a reason ends them.
        carry: where to begin: a `Carry`, or anything else with a `code` and a `state` that has a `count`.
        last: the count at which all steps are taken.
        after_chunk: called with the carry after every chunk, before the next one donates its buffers. Where it returns
            True, no other follows.

    Returns:
        The carry after the last chunk that ended, and why no other followed it.
    """
    done = int(carry.state.count)
    chunk_steps = min(last - done, _FIRST_CHUNK_STEPS)
    with Interrupt() as interrupt:
        try:
            while done < last:
                began = time.perf_counter()
                with one_blas_thread():
                    carry = run_chunk(carry, min(done + chunk_steps, last))
                    reason = Reason.of(int(carry.code))  # waits for the chunk to end
                done = int(carry.state.count)
                stop = after_chunk(carry)
                if reason is not Reason.STEPS:
                    return carry, reason
                if stop:
                    return carry, Reason.STOPPED
                if interrupt.requested:
                    return carry, Reason.INTERRUPTED
                if time.perf_counter() - began < _CHUNK_SECONDS:
                    chunk_steps *= 2
        except KeyboardInterrupt:
            return carry, Reason.INTERRUPTED
    return carry, Reason.STEPS


class Interrupt:
    """Turns Ctrl-C into a request that is read between two chunks, so that none is lost; a second Ctrl-C acts at once.

    Only the main thread can handle signals; in another thread nothing is changed.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self.handles_signals = threading.current_thread() is threading.main_thread()
        if self.handles_signals:
            self.previous_handler = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        if self.handles_signals:
            signal.signal(signal.SIGINT, self.previous_handler)


class ProgressBar:
    """A progress bar with the latest bound (or objective); nothing where it is not `shown`."""

    def __init__(self, shown: bool, steps: int):
        self.bar = None
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("fitting", total=steps)

    def __enter__(self) -> ProgressBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def update(self, done: int, trace: dict[str, Any], more: str = "") -> None:
        """Show how many steps of this fit are done, and further text, such as validation metrics."""
        if self.bar is not None and done:
            name = "bound" if "bound" in trace else "objective"
            text = f"{name} {float(trace[name][done - 1]):.6g}"
            self.bar.update(self.task, completed=done, description=f"{text}, validation {more}" if more else text)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def one_blas_thread() -> AbstractContextManager[Any]:
    """A context in which BLAS uses one thread, as in scikit-learn's own loops.

    On few cores XLA's threads and those of the BLAS behind its Cholesky wait for each other: a 200×200 solve takes 100
    times as long.
    """
    return _threadpools().limit(limits=1, user_api="blas")


@cache
def _threadpools() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
