"""A live line of a fit: where it is, the bound, the held-out NLL, steps per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..runs.watch import Look


@contextmanager
def silent() -> Iterator[None]:
    """Nothing to look at."""
    yield None


@contextmanager
def bar() -> Iterator[Callable[[Look], None]]:
    """A function that shows where a fit is, in the terminal of standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("fitting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task: Any = shown.add_task("", total=None)
        seen: list[Any] = [None, 0, time.perf_counter()]

        def show(look: Look) -> None:
            now = time.perf_counter()
            if look.fit != seen[0]:
                seen[:] = [look.fit, 0, now]
            rate = (look.step - seen[1]) / max(now - seen[2], 1e-3)
            said = f"{'bound' if look.is_bound else 'loss'} {look.value:,.5g}"
            if look.heldout is not None:
                said += f", held-out NLL {look.heldout:.4f}"
            if look.step > 1:
                said += f", {rate:,.0f} steps/s"
            shown.update(task, completed=look.step, total=look.steps, description=said)

        yield show
