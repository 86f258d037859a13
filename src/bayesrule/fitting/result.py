"""Result: what a fit returns, and how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, PyTree

from ..factor_graph.leave_one_out import LeaveOneOut
from ..numerics.random import Key
from ..rule.state import State
from .checkpoint import read, write
from .loop import Carry
from .minima import Minimum
from .reason import Reason


class Result:
    """What `fit` returns: the posterior `q`, why the fit ended, and one value per step in `trace`.

    Whatever the reason, `q` is the last one that was finite and inside its family's domain.

    Attributes:
        state: the rule's state, from which the fit can go on.
        reason: why it ended, a `Reason`. It equals one of the strings "converged" (the natural gradient's decrement
            fell below the tolerance), "steps" (all steps were taken), "not finite" (the loss or one of its derivatives
            was not a finite number), "left the domain" (λ left Ω), "stalled" (no fraction of the step was acceptable)
            and "interrupted" (Ctrl-C); `reason.message` says it in words.
        trace: arrays of one value per step: "objective", "rate", "fraction" and "guard" as in `Info`, and with full
            batches or a tolerance "bound" and "decrement".
        key: the key of the fit.
        normalized: whether the prior has all its constants, so that the bound is comparable with a log evidence.
    """

    def __init__(
        self,
        state: State,
        reason: str,
        trace: dict[str, np.ndarray],
        key: Key,
        normalized: bool,
        bound: Callable[[], Array] | float | None,
        minima: Callable[[], list[Minimum]] | list[Minimum] | None = None,
        loo: Callable[..., LeaveOneOut] | None = None,
    ):
        self.state, self.reason, self.trace = state, Reason(reason), trace
        self.key, self.normalized = key, normalized
        # The bound and the minima are functions until they are asked for, because both take time to compute.
        self._bound, self._minima, self._loo = bound, minima, loo

    @staticmethod
    def of(
        carry: Carry,
        reason: Reason,
        first: int,
        key: Key,
        normalized: bool,
        *,
        bound: Callable[[], Array] | None = None,
        minima: Callable[[], list[Minimum]] | None = None,
        loo: Callable[..., LeaveOneOut] | None = None,
    ) -> Result:
        """The result of a loop: its trace is cut to the steps since the count `first`, a rejected one included."""
        recorded = int(carry.state.count) - first + reason.rejected_a_step
        trace = {name: np.asarray(values)[:recorded] for name, values in carry.trace.items()}
        return Result(carry.state, reason, trace, key, normalized, bound, minima, loo)

    @property
    def q(self) -> Any:
        """The posterior, a member of the rule's family."""
        return self.state.q

    @property
    def steps(self) -> int:
        """The number of steps taken, those before a resumption included."""
        return int(self.state.count)

    @property
    def bound(self) -> float | None:
        """The evidence lower bound at q (up to the prior's constant unless `normalized`); None with mini-batches."""
        if callable(self._bound):
            self._bound = float(self._bound())
        return self._bound

    def minima(self) -> list[Minimum]:
        """The distinct minima that `multimodal` found, polished by Newton's method, the lowest first."""
        if callable(self._minima):
            self._minima = self._minima()
        if self._minima is None and self.state.search is not None:
            raise ValueError(
                "This is a checkpoint of a search, which has no list of minima: pass it to fit as the start, and call "
                "minima() on the result."
            )
        if self._minima is None:
            raise ValueError("This algorithm follows one minimum: search for several with blr.multimodal(rate, …).")
        return [Minimum(*minimum) for minimum in self._minima]

    def loo(self, factor: str | None = None) -> LeaveOneOut:
        """Each row's predictive density given all other rows, and the row's influence, without refitting.

        The row's site is removed from the posterior.

        Args:
            factor: the name of the factor whose rows are left out; not needed where there is one.
        """
        if self._loo is None:
            raise ValueError(
                "Leave-one-out needs a blr.Model and its data, and this result has none: fit a model, or call "
                "leave_one_out on model, q and data."
            )
        return self._loo(factor)

    def save(self, path: str | Path) -> None:
        """Write everything to one file (arrays and JSON, no code), atomically."""
        fields = {
            "state": self.state,
            "reason": self.reason.value,
            "trace": self.trace,
            "key": self.key,
            "normalized": self.normalized,
            "bound": self.bound,
            "minima": None if self._minima is None else [tuple(minimum) for minimum in self.minima()],
        }
        write(path, fields)

    def __repr__(self) -> str:
        return f"Result({type(self.q).__name__} after {self.steps} steps, {self.reason})"


def save(path: str | Path, value: PyTree) -> None:
    """Write a rule's state, a family, or any pytree of arrays (a tuple of a state and a key, for example) to a file.

    One file of arrays and JSON, no code, written atomically; `load` returns the same values bit for bit. It serves
    training loops around `rule.step`; `fit` has its `checkpoint=`.

    Args:
        path: the file.
        value: what to write.
    """
    write(path, {"value": value})


def load(path: str | Path, like: PyTree = None) -> Any:
    """Read what `Result.save` or `save` wrote.

    Args:
        path: the file.
        like: any value of the same structure, where parameters are in containers other than dict, list and tuple.
    """
    fields = read(path, like)
    return fields["value"] if set(fields) == {"value"} else Result(**fields)
