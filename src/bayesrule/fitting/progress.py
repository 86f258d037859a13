"""What surrounds a running fit: the progress bar, Ctrl-C, and the number of BLAS threads."""

from __future__ import annotations

import signal
import threading
from functools import cache
from typing import Any

from jaxtyping import Array


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def one_blas_thread() -> Any:
    """XLA's threads and those of the BLAS behind its Cholesky wait for each other on few cores: a 200×200 solve takes
    100 times as long. So the small solves of a fit run on one, as in scikit-learn's own loops."""
    return _blas().limit(limits=1, user_api="blas")


class _Interrupt:
    """Ctrl-C as a request that the loop reads between two chunks, so that none is torn; the second one is at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _Interrupt:
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.before)


class _Display:
    """A progress bar, or nothing."""

    def __init__(self, shown: bool, steps: int):
        self.bar = None
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("fitting", total=steps)

    def __enter__(self) -> _Display:
        if self.bar is not None:
            self.bar.start()
        return self

    def update(self, done: int, trace: dict[str, Array]) -> None:
        if self.bar is not None and done:
            shown = "bound" if "bound" in trace else "objective"
            self.bar.update(self.task, completed=done, description=f"{shown} {float(trace[shown][done - 1]):.6g}")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
