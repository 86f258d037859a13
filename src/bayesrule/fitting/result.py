"""Result: what a fit returns, and how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, PyTree

from ..factor_graph.leave_one_out import LeaveOneOut
from ..rule.state import State
from .checkpoint import read, write
from .minima import Minimum


class Result:
    """What `fit` found: `q`, why it ended (`reason`), and one value per step in `trace`.

    `reason` is "converged" (the natural gradient's decrement fell below the tolerance), "steps" (all
    steps were taken), "not finite" (the loss or its gradient was not a finite number), "left the
    domain" (λ left Ω), "stalled" (no fraction of the step was acceptable) or "interrupted" (Ctrl-C).
    Whatever the reason, `q` is the last good one. `trace` has "objective", "rate" and "guard", and with
    full batches "bound" and "decrement".
    """

    def __init__(
        self,
        state: State,
        reason: str,
        trace: dict[str, np.ndarray],
        key: Any,
        normalized: bool,
        bound: Callable[[], Array] | float | None,
        minima: Callable[[], list[Minimum]] | list[Minimum] | None = None,
        loo: Callable[..., LeaveOneOut] | None = None,
    ):
        self._loo = loo
        self.state, self.reason, self.trace = state, reason, trace
        self.key, self.normalized, self._bound, self._minima = key, normalized, bound, minima

    @property
    def q(self) -> Any:
        """The posterior, a member of the rule's family."""
        return self.state.q

    @property
    def steps(self) -> int:
        """How many steps were taken, in all."""
        return int(self.state.count)

    @property
    def bound(self) -> float | None:
        """The evidence lower bound at q (up to the prior's constant unless `normalized`)."""
        if callable(self._bound):
            self._bound = float(self._bound())
        return self._bound

    def minima(self) -> list[Minimum]:
        """The minima that `multimodal` found, the lowest first: polished by Newton's method, each one once."""
        if callable(self._minima):
            self._minima = self._minima()
        if self._minima is None and self.state.search is not None:
            raise ValueError("This is a checkpoint of a search: pass it to fit as the start, and ask the result.")
        if self._minima is None:
            raise ValueError("This algorithm follows one minimum: search for several with blr.multimodal(rate, …).")
        return [Minimum(*one) for one in self._minima]

    def loo(self, factor: str | None = None) -> LeaveOneOut:
        """Each row's predictive density without it, and its influence: its site is dropped, nothing is refitted."""
        if self._loo is None:
            raise ValueError("Leaving rows out needs a blr.Model and its data: fit one, or call leave_one_out on them.")
        return self._loo(factor)

    def save(self, path: str | Path) -> None:
        """Write everything to one file (arrays and JSON, no code), atomically."""
        fields = {
            "state": self.state,
            "reason": self.reason,
            "trace": self.trace,
            "key": self.key,
            "normalized": self.normalized,
            "bound": self.bound,
            "minima": None if self._minima is None else [tuple(one) for one in self.minima()],
        }
        write(path, fields)

    def __repr__(self) -> str:
        return f"Result({type(self.q).__name__} after {self.steps} steps, {self.reason})"


def save(path: str | Path, value: PyTree) -> None:
    """Write a rule's state (with a key and a place in the data, as a tuple, say), a family, or any pytree of arrays.

    One file of arrays and JSON, no code, written atomically; `load` gives it back bit for bit. For loops of one's own
    around `rule.step`: `fit` has its `checkpoint=`.
    """
    write(path, {"value": value})


def load(path: str | Path, like: PyTree = None) -> Any:
    """Read what `Result.save` (or `save`) wrote. Parameters that are not plain containers need `like`, any value of
    the same structure."""
    fields = read(path, like)
    return fields["value"] if set(fields) == {"value"} else Result(**fields)
