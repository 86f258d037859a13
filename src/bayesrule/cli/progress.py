"""The progress bar of a fit: steps, the bound or the loss, the held-out NLL, and steps per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ..runs.watch import Progress


@contextmanager
def no_bar() -> Generator[None]:
    """In place of `bar` where nothing is shown."""
    yield None


@contextmanager
def bar() -> Generator[Callable[[Progress], None]]:
    """A function that shows the progress of a fit in the terminal of standard error."""
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("fitting"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.description}"),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:
        task: Any = display.add_task("", total=None)
        current_fit, fit_began = None, time.perf_counter()

        def show(progress: Progress) -> None:
            nonlocal current_fit, fit_began
            now = time.perf_counter()
            if progress.fit != current_fit:
                current_fit, fit_began = progress.fit, now
            rate = progress.step / max(now - fit_began, 1e-3)
            text = f"{'bound' if progress.is_bound else 'loss'} {progress.value:,.5g}"
            if progress.heldout is not None:
                text += f", held-out NLL {progress.heldout:.4f}"
            if progress.step > 1:
                text += f", {rate:,.0f} steps/s"
            display.update(task, completed=progress.step, total=progress.steps, description=text)

        yield show
