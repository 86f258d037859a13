"""Watching an estimator's fits: shown as they go, saved as they go, taken up again where they were cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..fitting.fit import fit
from ..fitting.result import Result, load

_SAVED_EVERY = 1.0  # seconds; what takes less is done again as quickly as it is read


@dataclass(frozen=True)
class Look:
    """Where a fit is: steps of how many, the bound (or the loss), and the held-out NLL where it was looked at."""

    fit: int
    step: int
    steps: int
    value: float
    is_bound: bool
    heldout: float | None


@dataclass
class Watcher:
    """Stands in for `fit` inside an estimator.

    Fits are numbered in the order in which they are asked for, which a second run repeats; one that takes longer than
    a second is saved in `folder` as it goes, and taken up from there. `heldout(q)` is looked at every second. Where the
    fits are not `bounded`, what they call a bound is none.
    """

    folder: Path | None = None
    show: Callable[[Look], None] | None = None
    heldout: Callable[[Any], float] | None = None
    bounded: bool = True
    traces: list[dict[str, np.ndarray]] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)

    def fit(self, rule: Any, objective: Any, start: Any, data: Any = None, *, steps: int, **options: Any) -> Result:
        """What `bayesrule.fit` gives, with the trace of all steps also where some were taken before."""
        number = len(self.traces)
        path = None if self.folder is None else self.folder / f"fit{number}.npz"
        before = load(path) if path is not None and path.exists() else None
        earlier = {} if before is None else before.trace
        ended = before is not None and before.reason != "steps"
        taken = 0 if before is None else before.steps
        offset = sum(len(trace["objective"]) for trace in self.traces)
        last: float | None = None  # the first call comes after compiling, which is no reason to save

        def passing(result: Result) -> None:
            nonlocal last
            now = time.perf_counter()
            last = now if last is None and _SAVED_EVERY > 0 else last
            trace = _joined(earlier, result.trace)
            if last is None or now - last > _SAVED_EVERY:
                last = now
                if self.heldout is not None:
                    self.looks.append((offset + result.steps, self.heldout(result.q)))
                if path is not None:
                    _with(result, trace).save(path)
            if self.show is not None and len(trace["objective"]):
                known = "bound" if self.bounded and "bound" in trace else "objective"
                heldout = self.looks[-1][1] if self.looks else None
                value = float(trace[known][-1])
                self.show(Look(number, result.steps, steps, value, known == "bound", heldout))

        remaining = 0 if ended else max(0, steps - taken)
        result = fit(
            rule, objective, start if before is None else before, data, steps=remaining, progress=passing, **options
        )
        result.trace = _joined(earlier, result.trace)
        if before is not None and ended:
            result.reason = before.reason
        if result.reason == "interrupted":
            if path is not None:
                result.save(path)
            raise KeyboardInterrupt
        self.traces.append(result.trace)
        self.rules.append(rule)
        self.reasons.append(result.reason)
        return result

    def trace(self) -> dict[str, np.ndarray]:
        """All fits after one another."""
        kinds = ("objective", "bound") if self.bounded else ("objective",)
        names = [name for name in kinds if all(name in trace for trace in self.traces)]
        joined = {name: np.concatenate([trace[name] for trace in self.traces]) for name in names if self.traces}
        if self.looks:
            joined["heldout_step"] = np.array([step for step, _ in self.looks])
            joined["heldout_nll"] = np.array([value for _, value in self.looks])
        return joined

    def starts(self) -> list[int]:
        """The step at which each fit began."""
        lengths = [len(trace["objective"]) for trace in self.traces]
        return [int(sum(lengths[:place])) for place in range(len(lengths))]


def _joined(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([first[name], values]) if name in first else values for name, values in second.items()}


def _with(result: Result, trace: dict[str, np.ndarray]) -> Result:
    return Result(result.state, result.reason, trace, result.key, result.normalized, None)
