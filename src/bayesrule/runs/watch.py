"""Watching the fits of an estimator: they are shown and saved while they run, and resumed if they were interrupted."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..fitting.checkpointing import Checkpoint
from ..fitting.fit import fit
from ..fitting.reason import Reason
from ..fitting.result import Result
from ..rule.rule import Rule

_SAVE_INTERVAL = 1.0  # Seconds; a shorter fit is repeated as quickly as it would be read from a file.


@dataclass(frozen=True)
class Progress:
    """How far a fit is.

    Args:
        fit: the number of the fit, from 0; an estimator may run several.
        step: steps taken.
        steps: steps at most.
        value: the bound, or the objective where there is no bound.
        is_bound: which of the two `value` is.
        heldout: the last held-out NLL; None where it has not been computed.
    """

    fit: int
    step: int
    steps: int
    value: float
    is_bound: bool
    heldout: float | None


class _FitOfRun(Checkpoint):
    """The checkpoint of a fit: it has the trace of the steps before a resumption, too."""

    # A short fit is not saved, because an estimator may run many, and to judge their ends takes programs of their own.
    saves_end = False

    def __init__(self, path: Path, signals: tuple[signal.Signals, ...]):
        super().__init__(path, every=max(0.0, _SAVE_INTERVAL), keep=2, signals=signals)
        self.trace: dict[str, np.ndarray] = {}

    def save(self, result: Result) -> None:
        whole = copy.copy(result)
        whole.trace = _concatenate(self.trace, result.trace)
        super().save(whole)


@dataclass
class Watcher:
    """Called by an estimator in place of `bayesrule.fit` (`Estimator._run`).

    Fits are numbered in the order in which the estimator asks for them, which is the same when a run is resumed. A fit
    that takes longer than a second is saved in `folder` every second, and resumed from there. Ctrl-C raises
    `KeyboardInterrupt`, and the signals raise `SystemExit(143)`, after the fit is saved.

    Args:
        folder: where fits are saved; None saves nothing.
        on_progress: called with the progress of a fit after every chunk of steps.
        heldout: the held-out NLL under a posterior q, computed once a second.
        bound_is_evidence: whether the bounds of the fits bound the log evidence (`Estimator._bound_is_evidence`); if
            not, the objective is shown and recorded instead.
        signals: the signals at which a fit is saved, where there is a folder, and ended.
        traces: the trace of every finished fit.
        rules: the rule of every finished fit.
        last: the result of the last finished fit. Only its `reason` is asked for: to judge a result takes programs of
            their own, and the fits before it are steps of a search.
        heldout_scores: (steps over all fits, held-out NLL), in the order in which they were computed.
    """

    folder: Path | None = None
    on_progress: Callable[[Progress], None] | None = None
    heldout: Callable[[Any], float] | None = None
    bound_is_evidence: bool = True
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    traces: list[dict[str, np.ndarray]] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    last: Result | None = None
    heldout_scores: list[tuple[int, float]] = field(default_factory=list)

    def fit(self, rule: Rule, objective: Any, start: Any, data: Any = None, *, steps: int, **options: Any) -> Result:
        """Run `bayesrule.fit`; the trace of a resumed fit includes the steps before the interruption."""
        number = len(self.traces)
        checkpoint = None if self.folder is None else _FitOfRun(self.folder / f"fit{number}.npz", self.signals)
        saved = None if checkpoint is None else checkpoint.load()
        saved_trace = {} if saved is None else saved.trace
        if checkpoint is not None:
            checkpoint.trace = saved_trace
        # A fit that was saved between two chunks, or when Ctrl-C ended it, has more steps to take.
        unfinished = saved is None or saved.reason in ("steps", "interrupted")
        saved_reason = None if saved is None or unfinished else saved.reason
        steps_before = 0 if saved is None else saved.steps
        offset = sum(len(trace["objective"]) for trace in self.traces)
        last_scored: float | None = None

        def report_progress(result: Result) -> None:
            nonlocal last_scored
            now = time.perf_counter()
            if last_scored is None and _SAVE_INTERVAL > 0:
                last_scored = now  # The interval starts at the first call, so that it does not include compilation.
            trace = _concatenate(saved_trace, result.trace)
            if last_scored is None or now - last_scored > _SAVE_INTERVAL:
                last_scored = now
                if self.heldout is not None:
                    self.heldout_scores.append((offset + result.steps, self.heldout(result.q)))
            if self.on_progress is not None and len(trace["objective"]):
                name = "bound" if self.bound_is_evidence and "bound" in trace else "objective"
                heldout = self.heldout_scores[-1][1] if self.heldout_scores else None
                value = float(trace[name][-1])
                self.on_progress(Progress(number, result.steps, steps, value, name == "bound", heldout))

        remaining = 0 if saved_reason is not None else max(0, steps - steps_before)
        begin = start if saved is None else saved
        saving = {"progress": report_progress, "checkpoint": checkpoint}
        result = fit(rule, objective, begin, data, steps=remaining, **saving, **options)
        result.trace = _concatenate(saved_trace, result.trace)
        if saved is not None and saved_reason is not None:
            # The saved fit had ended, and the fit of no further steps does not know why.
            result.reason, result.explanation = saved_reason, saved.explanation
        if result.loop_reason is Reason.INTERRUPTED:
            raise KeyboardInterrupt
        self.traces.append(result.trace)
        self.rules.append(rule)
        self.last = result
        return result

    def trace(self) -> dict[str, np.ndarray]:
        """The traces of all fits, concatenated, and the held-out scores ("heldout_step", "heldout_nll")."""
        candidates = ("objective", "bound") if self.bound_is_evidence else ("objective",)
        names = [name for name in candidates if all(name in trace for trace in self.traces)]
        joined = {name: np.concatenate([trace[name] for trace in self.traces]) for name in names if self.traces}
        if self.heldout_scores:
            joined["heldout_step"] = np.array([step for step, _ in self.heldout_scores])
            joined["heldout_nll"] = np.array([nll for _, nll in self.heldout_scores])
        return joined

    def first_steps(self) -> list[int]:
        """The place in the concatenated trace where each fit begins."""
        lengths = [len(trace["objective"]) for trace in self.traces]
        return [int(sum(lengths[:index])) for index in range(len(lengths))]


def _concatenate(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([first[name], values]) if name in first else values for name, values in second.items()}
