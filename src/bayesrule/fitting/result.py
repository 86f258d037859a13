"""Result: what a fit returns, and how it is saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..factor_graph.leave_one_out import LeaveOneOut
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..rule.state import State
from .bound import Bound, with_error
from .checkpoint import Damaged, kept_file, read, write
from .convergence import Watch
from .loop import Carry
from .minima import Minimum
from .reason import Reason
from .starts import Starts


class Result:
    """What `fit` returns: the posterior `q`, why the fit ended, and one value per step in `trace`.

    Whatever the reason, `q` is the last one that was finite and inside its family's domain.

    Attributes:
        state: the rule's state, from which the fit can go on.
        reason: why it ended, a `Reason`. It equals one of the strings "converged" (the estimated distance to
            the optimum fell below the tolerance), "steps" (all steps were taken), "not finite" (the loss or one of its
            derivatives was not a finite number), "left the domain" (λ left Ω), "stalled" (no fraction of the step was
            acceptable), "interrupted" (Ctrl-C or a signal), "precision lost" (rounding errors are larger than the
            tolerance), "points too coarse" (it converged at a grid of points on which the integrals are not accurate)
            and "stopped early" (by `patience=` or `on_step=`); `reason.message` says it in words.
        trace: arrays of one value per step: "objective", "rate", "fraction" and "guard" as in `Info`, and with full
            batches or a tolerance "bound" and "decrement".
        key: the key of the fit.
        normalized: whether the prior has all its constants, so that the bound is comparable with a log evidence. Under
            a flat prior, which has none, only bounds of the same model can be compared.
        loop_reason: why the loop of steps ended, before it was judged with the arithmetic and the points in mind.
        watch: what the test of convergence remembers of the last steps, for a fit that goes on from here.
        validation: with `validation=`, an array for each metric and the numbers of the steps ("step") after which they
            were evaluated; None without.
        frozen: the parameters that were not learned, with None in the places of the others; None if there are none.
        note: what else is to be said of q, whatever ended the fit; a part of the explanation.
        best: in a checkpoint of a fit with `patience=`, the best state so far.
        starts: where the starts of `fit(starts=k)` ended, and how many agree, a `Starts`; None for a single start.
        skipped: how many batches were skipped because their loss or its derivatives were not finite
            (`fit(skip_nonfinite=k)`), those before a resumption included.
        position: where a source of data says that it is, where the number of steps does not tell; None otherwise.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> loss = lambda x: 0.5 * jnp.sum((x - 1) ** 2)
    >>> result = blr.fit(blr.newton(), loss, jnp.zeros(2), steps=10, tolerance=1e-6)
    >>> result, result.q.mean.tolist(), result.trace["objective"].tolist()
    (Result(Gaussian after 2 steps, converged), [1.0, 1.0], [1.0, 0.0])
    """

    state: State
    trace: dict[str, np.ndarray]
    key: Key
    normalized: bool
    loop_reason: Reason
    watch: Watch | None
    validation: dict[str, np.ndarray] | None
    frozen: PyTree
    note: str | None
    best: State | None
    starts: Starts | None
    skipped: int
    position: PyTree

    def __init__(
        self,
        state: State,
        reason: str,
        trace: dict[str, np.ndarray],
        key: Key,
        normalized: bool,
        bound: Callable[[], Bound] | float | None,
        minima: Callable[[], list[Minimum]] | list[Minimum] | None = None,
        loo: Callable[..., LeaveOneOut] | None = None,
        bound_error: float | None = None,
        watch: Watch | tuple[Any, ...] | None = None,
        starts: Starts | tuple[Any, ...] | None = None,
        explanation: str | None = None,
        validation: dict[str, np.ndarray] | None = None,
        best: State | None = None,
        frozen: PyTree = None,
        skipped: int = 0,
        position: PyTree = None,
    ):
        self.skipped, self.position = skipped, position
        self.validation, self.best, self.frozen = validation, best, frozen
        self.state, self.trace, self.key, self.normalized = state, trace, key, normalized
        self.loop_reason = self._reason = Reason(reason)
        self._explanation: str | None = explanation
        self.note = None
        self._sites: Callable[[], Any] | None = None
        self._verdict: Callable[[], tuple[Reason, str | None]] | None = None
        self.watch = None if watch is None else Watch(*watch)
        self.starts = starts if starts is None or isinstance(starts, Starts) else Starts(*starts)
        # The verdict, the bound and the minima are functions until they are asked for, because they take time to
        # compute, and a fit inside of a search for hyper-parameters needs none of them.
        self._bound, self._bound_error, self._minima, self._loo = bound, bound_error, minima, loo

    @staticmethod
    def of(
        carry: Carry,
        reason: Reason,
        first: int,
        key: Key,
        normalized: bool,
        *,
        bound: Callable[[], Bound] | None = None,
        minima: Callable[[], list[Minimum]] | None = None,
        loo: Callable[..., LeaveOneOut] | None = None,
        starts: Starts | None = None,
    ) -> Result:
        """The result of a loop: its trace is cut to the steps since the count `first`, a rejected one included."""
        recorded = int(carry.state.count) - first + reason.rejected_a_step
        trace = {name: np.asarray(values)[:recorded] for name, values in carry.trace.items()}
        skipped = 0 if carry.skips is None else int(carry.skips.skipped)
        more = {"watch": carry.watch, "starts": starts, "skipped": skipped}
        return Result(carry.state, reason, trace, key, normalized, bound, minima, loo, **more)

    @property
    def reason(self) -> Reason:
        """Why the fit ended, judged once more when it is first asked for."""
        self._judge()
        return self._reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._judge()
        self._reason = Reason(reason)

    @property
    def explanation(self) -> str | None:
        """What lies behind the reason and what to do about it, where that is known; None otherwise."""
        self._judge()
        return " ".join(filter(None, (self._explanation, self.note))) or None

    @explanation.setter
    def explanation(self, explanation: str | None) -> None:
        self._judge()
        self._explanation = explanation

    def judged_by(self, verdict: Callable[[], tuple[Reason, str | None]]) -> None:
        """Set what gives the reason and the explanation when one of them is first asked for."""
        self._verdict = verdict

    def _judge(self) -> None:
        if self._verdict is not None:
            judge, self._verdict = self._verdict, None
            self._reason, self._explanation = judge()

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
        """The evidence lower bound at q (up to the prior's constant unless `normalized`); None with mini-batches.

        It is computed when it is first asked for, at points that no step of the fit has used: the bound at a fit's own
        random points is biased upwards, because the fit has raised it there. The trace has the bounds of the steps as
        they were measured. `bound_error` says how far the estimate may be off.
        """
        return self._judged()[0]

    @property
    def bound_error(self) -> float | None:
        """The error of `bound` in nats.

        The standard error where the expectation under q is taken at random points, and the difference between two grids
        where it is taken by quadrature; 0 where the bound is in closed form, except for rounding. None where there is
        no bound, and for the delta method (`newton`, `laplace`, `adam`): its "bound" expands the loss to second order
        at the mean, and may lie above the log evidence.
        """
        return self._judged()[1]

    def _judged(self) -> tuple[float | None, float | None]:
        if callable(self._bound):
            self._bound, self._bound_error = self._bound()
        return self._bound, self._bound_error

    def bound_text(self) -> str:
        """The bound and its error as a line of text: "−123.4 ± 0.05"; a flat prior's constant is said to be missing."""
        return "none" if self.bound is None else with_error(self.bound, self.bound_error, self.normalized)

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

    def site_total(self) -> Any:
        r"""$\sum_i\tildeλ_i$ over the sites of all rows, by block: what the data have added to the priors' messages.

        For rules with `Sites()`, such as `cvi(sites=True)`. On data in parts the sites stay where the parts are, and
        this is all of them that is ever sent.
        """
        if self._sites is not None:
            return self._sites()
        if not isinstance(self.state.aux, dict) or "sums" not in self.state.aux:
            raise ValueError("This rule keeps no sites: use cvi(sites=True).")
        return self.state.aux["sums"]["all"]

    def with_sites(self, sites: Callable[[], Any] | None) -> Result:
        """This result, with the function that sums the sites of data in parts."""
        self._sites = sites
        return self

    def with_arrays(self, change: Callable[[PyTree], PyTree]) -> Result:
        """A copy whose state, best state, key and memory of convergence are changed by a function of pytrees."""
        other = copy.copy(self)
        other.state, other.best, other.key = change(self.state), change(self.best), change(self.key)
        other.watch, other.frozen = change(self.watch), change(self.frozen)
        return other

    def save(self, path: str | Path, *, before_replacing: Callable[[], None] | None = None) -> None:
        """Write everything to one file (arrays and JSON, no code), atomically and with a checksum.

        Args:
            path: the file.
            before_replacing: called when the new file is complete, before it takes the place of an old one.
        """
        fields = {
            "state": self.state,
            "reason": self.reason.value,
            "trace": self.trace,
            "key": self.key,
            "normalized": self.normalized,
            "bound": self.bound,
            "bound_error": self.bound_error,
            "minima": None if self._minima is None else [tuple(minimum) for minimum in self.minima()],
            "explanation": self.explanation,
            "watch": None if self.watch is None else tuple(self.watch),
            "starts": None if self.starts is None else tuple(self.starts),
            "validation": self.validation,
            "best": self.best,
            "frozen": self.frozen,
            "skipped": self.skipped,
            "position": self.position,
        }
        write(path, fields, before_replacing)

    def __repr__(self) -> str:
        # A bound that has not been asked for yet is not computed for the sake of a line of text.
        bound = "" if callable(self._bound) or self._bound is None else f", bound {self.bound_text()}"
        starts = "" if self.starts is None else f", {self.starts.agree} of {len(self.starts.bounds)} starts agree"
        return f"Result({type(self.q).__name__} after {self.steps} steps, {self.reason}{bound}{starts})"


def save(path: str | Path, value: PyTree) -> None:
    """Write a rule's state, a family, or any pytree of arrays (a tuple of a state and a key, for example) to a file.

    One file of arrays and JSON, no code, written atomically; `load` returns the same values bit for bit. It serves
    training loops around `rule.step`; `fit` has its `checkpoint=`.

    Args:
        path: the file.
        value: what to write.

    >>> import bayesrule as blr, jax.numpy as jnp, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     blr.save(Path(folder) / "q.npz", blr.Gamma(2.0, 3.0))
    ...     q = blr.load(Path(folder) / "q.npz")
    >>> float(q.shape), float(q.rate)
    (2.0, 3.0)
    """
    write(path, {"value": value})


def load(path: str | Path, like: PyTree = None) -> Any:
    """Read what `Result.save` or `save` wrote. A damaged file is an error.

    Args:
        path: the file.
        like: any value of the same structure, where parameters are in containers other than dict, list and tuple.
    """
    try:
        return read_result(path, like)
    except Damaged as error:
        before = kept_file(Path(path), 1)
        if not before.exists():
            raise
        raise Damaged(
            f"{error} The checkpoint before it is {before}: blr.Checkpoint({str(path)!r}).load() goes on from the "
            "newest that is whole."
        ) from error


def read_result(path: str | Path, like: PyTree = None) -> Any:
    """As `load`, without advice where the file is damaged."""
    fields = read(path, like)
    return fields["value"] if set(fields) == {"value"} else Result(**fields)
