"""When a fit is saved, where, how many files are kept, and what happens if one cannot be written or is damaged."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from .checkpoint import Damaged, check_savable, check_writable, kept_file
from .interrupt import TERMINATED, Interrupt, signals_named
from .processes import Together
from .reason import Reason
from .result import Result, read_result
from .sharded_checkpoint import ShardedCheckpoint

_SECONDS = 30.0
_WRITING_SHARE = 0.1  # The share of the time that writing may take where the interval is ours to choose.


class Checkpoint:
    """Where and when `fit` saves itself: a file that is rewritten at an interval, and those before it.

    The newest checkpoint is at `path`, the one before it at the same name with ".1" added, and so on, `keep` files in
    all. Each is complete whenever the process is killed, and has a checksum. `fit` also saves at its end, at Ctrl-C and
    at the `signals`; after a signal it ends the process with the exit code 143 (`SystemExit(143)`), so that a batch
    system sees that the job was ended from outside.

    A checkpoint that cannot be written (a full disk, a folder that is gone) does not end the fit: it goes on, warns
    once, and tries again at the next interval. A path at which no file can be made is an error before the first step.

    Args:
        path: the file. Its folder must exist.
        every: the seconds between the end of one save and the next one; 0 saves after every chunk of steps (about a
            quarter of a second). By default 30 seconds, or longer for a state so large that writing it would take more
            than a tenth of the time.
        keep: how many checkpoints to keep, the newest included. With two or more there is one to go on from if the
            newest is damaged.
        signals: the names of the signals at which to save and exit, in the main thread alone. SLURM sends the signal of
            `sbatch --signal=USR1@120` 120 seconds before it ends a job: `signals=("SIGTERM", "SIGUSR1")`.

    >>> import bayesrule as blr, jax.numpy as jnp, tempfile
    >>> checkpoint = Checkpoint(tempfile.mkdtemp() + "/run.npz", keep=2)
    >>> checkpoint.load() is None                                                            # There is none so far.
    True
    >>> loss = lambda x: jnp.sum(jnp.cosh(x - 1.0))
    >>> half = blr.fit(blr.newton(0.5), loss, checkpoint.load() or jnp.zeros(2), steps=10, checkpoint=checkpoint)
    >>> whole = blr.fit(blr.newton(0.5), loss, checkpoint.load() or jnp.zeros(2), steps=10, checkpoint=checkpoint)
    >>> whole.steps, [path.name for path in checkpoint.files()]
    (20, ['run.npz', 'run.npz.1'])
    """

    path: Path
    every: float | None
    keep: int
    signals: tuple[signal.Signals, ...]
    is_divided: ClassVar[bool] = False
    """Whether each process writes its own part."""
    saves_end: ClassVar[bool] = True
    """Whether a fit that ends by itself is saved whatever the interval."""

    def __init__(
        self,
        path: str | Path,
        every: float | None = None,
        keep: int = 3,
        signals: Iterable[str | signal.Signals] = ("SIGTERM",),
    ):
        if isinstance(every, bool) or not (every is None or (isinstance(every, int | float) and every >= 0)):
            raise ValueError(f"every= is the number of seconds between two checkpoints, 0 or more; got {every!r}.")
        self.path, self.every = Path(path), every
        self.keep = positive_int("keep", keep, meaning="how many checkpoints to keep")
        self.signals = signals_named((signals,) if isinstance(signals, str) else signals)

    def __repr__(self) -> str:
        signals = tuple(number.name for number in self.signals)
        return f"Checkpoint({str(self.path)!r}, every={self.every}, keep={self.keep}, signals={signals})"

    def files(self) -> list[Path]:
        """The checkpoints that exist, the newest first; those that an earlier fit kept count, too."""
        found, place = [], 0
        while place < self.keep or kept_file(self.path, place).exists():
            if kept_file(self.path, place).exists():
                found.append(kept_file(self.path, place))
            place += 1
        return found

    def load(self, like: PyTree = None) -> Result | None:
        """The newest checkpoint that is not damaged, to be passed to `fit` as its start; None if there is none so far.

        If the newest is damaged, a warning names it and the one that is used instead. If all are, that is an error.

        Args:
            like: parameters of the same structure, where they are in containers other than dict, list and tuple.
        """
        damaged: list[str] = []
        for path in self.files():
            try:
                result = read_result(path, like)
            except Damaged as error:
                damaged.append(str(error))
                continue
            if damaged:
                warnings.warn(
                    f"{' '.join(damaged)} The fit goes on from the checkpoint before, {path}, after "
                    f"{result.steps} steps.",
                    stacklevel=2,
                )
            return result
        if damaged:
            raise Damaged(
                f"{' '.join(damaged)} No earlier checkpoint is left: remove what is damaged, and begin the fit anew."
            )
        return None

    def save(self, result: Result) -> None:
        """Write a checkpoint, and keep those before it. What fails before the new file is complete changes no file."""
        result.save(self.path, before_replacing=self._keep_others)

    def _keep_others(self) -> None:
        """Give the newest checkpoint, which the next is about to replace, its place among the earlier ones."""
        newest, first = self.path, kept_file(self.path, 1)
        if self.keep == 1 or not newest.exists() or (first.exists() and first.samefile(newest)):
            return  # The same file under both names: a process was killed before it could replace the newest.
        for place in range(self.keep - 1, 1, -1):
            if kept_file(self.path, place - 1).exists():
                kept_file(self.path, place - 1).replace(kept_file(self.path, place))
        first.unlink(missing_ok=True)
        try:
            os.link(newest, first)  # So that there is a file at the path itself at every moment.
        except OSError:  # A file system without links.
            newest.replace(first)


class Checkpointing:
    """Saves one fit while it runs; without a checkpoint it only turns Ctrl-C into a request to stop.

    It is a context, in which the fit takes its steps and is saved a last time (`end`).

    Args:
        checkpoint: what the user passed to `fit`. A plain path keeps one file.
        together: the processes that take the steps. They decide together when to save and when to end.
    """

    def __init__(
        self, checkpoint: Checkpoint | ShardedCheckpoint | str | Path | None, together: Together | None = None
    ):
        if isinstance(checkpoint, str | Path):
            checkpoint = Checkpoint(checkpoint, keep=1)
        if not isinstance(checkpoint, Checkpoint | ShardedCheckpoint | None):
            raise ValueError(f"checkpoint= is a path, a blr.Checkpoint or a blr.ShardedCheckpoint, got {checkpoint!r}.")
        self.checkpoint, self.together = checkpoint, Together() if together is None else together
        self.interrupt = Interrupt(() if checkpoint is None else checkpoint.signals)
        self._writes = None if checkpoint is None else Writes(checkpoint.path)
        self._last_end: float | None = None
        self._last_duration = 0.0
        self._saved: tuple[int, str] | None = None  # The number of steps and the reason of the last checkpoint.

    def __enter__(self) -> Checkpointing:
        self.interrupt.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.interrupt.__exit__()
        if kind is None and self.interrupt.signal is not None:  # It came while the end of the fit was saved.
            raise SystemExit(TERMINATED)

    def check(self, state: Any) -> None:
        """Raise before the first step if no checkpoint of this state could be written."""
        if self._writes is None or (self.checkpoint is not None and self.checkpoint.is_divided):
            return
        check_savable(state)
        if self.together.is_first:
            self._writes.check()

    def is_due(self) -> bool:
        """Whether it is time to save. (What Ctrl-C or a signal ends is saved by `end`.)"""
        if self.checkpoint is None:
            return False
        every, now = self.checkpoint.every, time.perf_counter()
        if every is None:
            every = max(_SECONDS, self._last_duration * (1 / _WRITING_SHARE - 1))
        if self._last_end is None and every > 0:
            self._last_end = now  # The interval starts after the first chunk, so that it does not include compilation.
        due = self._last_end is None or now - self._last_end >= every
        return bool(self.together.of_first(due)[0])

    def after(self, so_far: Result) -> None:
        """Save the fit as it is after a chunk of steps. What goes wrong with the file is a warning."""
        if self.checkpoint is None or self._writes is None:
            return
        began = time.perf_counter()
        if self._writes.attempt(partial(self.together.save, so_far, self.checkpoint)):
            self._saved = so_far.steps, so_far.loop_reason
        self._last_end = time.perf_counter()
        self._last_duration = self._last_end - began

    def end(self, last: Callable[[], Result]) -> None:
        """Save the end of a fit, if it is not saved; after a signal, leave the process with the exit code 143.

        Args:
            last: makes the result to save.
        """
        if self.checkpoint is None:
            return
        result = last()
        reached = result.steps, result.loop_reason
        requested, signalled = self.together.largest(self.interrupt.requested, self.interrupt.signal is not None)
        is_cut = requested or result.loop_reason is Reason.INTERRUPTED
        if self._saved != reached and (is_cut or self.checkpoint.saves_end):
            self.after(result)
            if self._saved != reached:
                before = "none" if self._saved is None else f"the one after {self._saved[0]} steps"
                warnings.warn(
                    f"The end of the fit, after {result.steps} steps, could not be written to {self.checkpoint.path} "
                    f"(the last that could be is {before}): save what fit returns elsewhere, with result.save(path).",
                    stacklevel=3,
                )
        if signalled:
            raise SystemExit(TERMINATED)


class Writes:
    """The writes of a file that is not worth the end of what is being computed: the first that fails is a warning.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path, self.warned = path, False

    def check(self) -> None:
        """Raise the `OSError` that would keep every write from working."""
        try:
            check_writable(self.path)
        except OSError as error:
            raise type(error)(
                f"The checkpoint {self.path} cannot be written: {_reason(error)}. Give a path in a folder that exists "
                "and can be written to."
            ) from error

    def attempt(self, write: Callable[[], None]) -> bool:
        """Call a function that writes the file. Returns whether it could."""
        try:
            write()
        except OSError as error:
            if not self.warned:
                self.warned = True
                warnings.warn(
                    f"The checkpoint {self.path} cannot be written: {_reason(error)}. The fit goes on and tries again, "
                    "and what was saved before is as it was: make room, or make the folder writable, while it runs.",
                    stacklevel=4,
                )
            return False
        return True


def _reason(error: OSError) -> str:
    """What the system says, without the names of temporary files."""
    return error.strerror or str(error)
