"""What surrounds the compiled loop: chunks of steps, requests to stop between them, the progress bar, BLAS threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from .interrupt import Interrupt
from .processes import Together
from .reason import Reason

# A chunk is one call of the compiled loop, during which Python cannot react: it should be short enough for Ctrl-C and
# a progress bar, and long enough that calls cost nothing. It starts small, doubles until it takes this long, and is
# halved where it takes much longer: a batch system leaves a process some thirty seconds to save itself.
_FIRST_CHUNK_STEPS = 16
CHUNK_SECONDS = 0.25
_LONG_CHUNK_SECONDS = 2.0


def run_in_chunks(
    run_chunk: Callable[[Any, int], Any],
    carry: Any,
    last: int,
    after_chunk: Callable[[Any], bool | None],
    interrupt: Interrupt | None = None,
    together: Together | None = None,
) -> tuple[Any, Reason]:
    """Call the compiled loop on a few steps at a time, until all are taken, something ends them, or Ctrl-C.

    Args:
        run_chunk: run_chunk(carry, until) takes steps until the state's count is `until` or a reason ends them.
        carry: where to begin: a `Carry`, or anything else with a `code` and a `state` that has a `count`.
        last: the count at which all steps are taken.
        after_chunk: called with the carry after every chunk, before the next one donates its buffers. Where it returns
            True, no other follows.
        interrupt: what turns Ctrl-C and signals into requests to stop, entered by the caller; by default Ctrl-C alone.
        together: the processes that take these steps, which have to agree on when to stop; None for one.

    Returns:
        The carry after the last chunk that ended, and why no other followed it.
    """
    done = int(carry.state.count)
    chunk_steps = min(last - done, _FIRST_CHUNK_STEPS)
    together = Together() if together is None else together
    with Interrupt() if interrupt is None else nullcontext(interrupt) as interrupt:
        try:
            while done < last:
                began = time.perf_counter()
                with one_blas_thread():
                    carry = run_chunk(carry, min(done + chunk_steps, last))
                    reason = Reason.of(int(carry.code))  # waits for the chunk to end
                done = int(carry.state.count)
                stop = bool(after_chunk(carry))
                # A step needs all processes, so that none may decide for itself by its clock or its signals.
                now = time.perf_counter() - began, stop, interrupt.requested
                seconds, stop, requested = together.largest(*now)
                if reason is not Reason.STEPS:
                    return carry, reason
                if stop:
                    return carry, Reason.STOPPED
                if requested:
                    return carry, Reason.INTERRUPTED
                if seconds < CHUNK_SECONDS:
                    chunk_steps *= 2
                elif seconds > _LONG_CHUNK_SECONDS:
                    chunk_steps = max(1, chunk_steps // 2)
        except KeyboardInterrupt:
            return carry, Reason.INTERRUPTED
    return carry, Reason.STEPS


class ProgressBar:
    """A progress bar: the latest bound (or objective), steps, rows per second, and the time that is left.

    Args:
        shown: whether there is one at all.
        steps: how many steps the fit takes, at most.
        rows: how many rows of data each of them sees; 0 for a function without data.
    """

    def __init__(self, shown: bool, steps: int, rows: int = 0):
        self.bar, self.rows, self.began, self.before = None, rows, None, 0
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("fitting", total=steps, speed="")

    def __enter__(self) -> ProgressBar:
        if self.bar is not None:
            self.bar.start()
        return self

    def update(self, done: int, trace: dict[str, Any], more: str = "") -> None:
        """Show how many steps of this fit are done, and further text, such as validation metrics."""
        if self.bar is not None and done:
            name = "bound" if "bound" in trace else "objective"
            text = f"{name} {float(trace[name][done - 1]):.6g}"
            text = f"{text}, validation {more}" if more else text
            self.bar.update(self.task, completed=done, description=text, speed=self._speed(done))

    def _speed(self, done: int) -> str:
        """The speed since the first chunk, most of which is spent in the compiler."""
        now = time.perf_counter()
        if self.began is None:
            self.began, self.before = now, done
            return ""
        if now == self.began:
            return ""
        speed = (done - self.before) / (now - self.began)
        number, unit = (speed * self.rows, "rows/s") if self.rows else (speed, "steps/s")
        return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.2g} {unit}"

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
