"""One fit on its way: what happens between the compiled chunks of steps, and the verdict at the end.

Between two chunks a fit may begin again from another start (`restart`), be accelerated, or go on because it has not
really converged (`accelerate`). At the end it is judged with the arithmetic, the points and the prior in mind
(`explain_stop`, `coarse_points`, `improper`). All of it is here, so that a single fit, each of several starts, what a
checkpoint saves and what a progress function sees have one verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..rule.rule import Rule
from ..rule.state import State
from .accelerate import accelerate_if_slow, accelerated, confirm, has_linearization, is_accelerated, steps_to_patience
from .bound import Bound, judge_bound
from .coarse_points import AtFinerPoints, explain_coarse_points, measure_at_finer_points
from .convergence import Watch
from .explain_stop import explain_cold, explain_skipped, explain_slow, explain_stop
from .improper import explain_improper, may_be_improper
from .interrupt import Interrupt
from .loader import Loader
from .loop import Carry, Skips, copy_for_donation, empty_trace, is_large, run_chunk
from .processes import Together
from .progress import run_in_chunks
from .reason import Reason
from .restart import may_restart, other_start
from .result import Result
from .sharding import Placement, on_devices


class Driver:
    """Takes the steps of one fit, a chunk at a time, and judges its end.

    Args:
        rule: the rule.
        objective: what it lowers, with its number of examples.
        loader: the data.
        key: the key of the fit.
        tolerance: the fit's, or None.
        state: the state that it starts from, or goes on from.
        steps: how many steps to take, at most.
        microbatches: in how many parts a batch is measured.
        watch: what the test of convergence remembers at the beginning; None for no such test.
        resumed: whether the state is that of an earlier fit, which has its start behind it.
        skips: how many batches may be skipped; None for none.
        interrupt: says whether to stop; asked between two steps of a large state.
    """

    def __init__(
        self,
        rule: Rule,
        objective: AbstractObjective,
        loader: Loader,
        key: Key,
        tolerance: float | None,
        state: State,
        *,
        steps: int,
        microbatches: int = 1,
        watch: Watch | None = None,
        resumed: bool = False,
        skips: Skips | None = None,
        interrupt: Interrupt | None = None,
    ):
        self.skips, self.interrupt = skips, interrupt
        self.rule, self.objective, self.data, self.key, self.tolerance = rule, objective, loader.data, key, tolerance
        self.order, self.steps, self.watch = loader.initial_order(), steps, watch
        self.full_batch = loader.batch_size is None
        self.first = int(state.count) if resumed else 0
        self.diagnose = tolerance is not None or self.full_batch
        self.sharding, self.together = loader.sharding, Together(loader.sharding)
        self.how: Any = {"batch_size": loader.batch_size, "diagnose": self.diagnose, "microbatches": microbatches}
        self.single_steps = is_large(state)
        # The q that the fit began from, until its first chunk has shown that steps can be taken from there.
        self.start = state.q if not resumed and may_restart(rule, objective, state.q) else None
        self.first_q = state.q
        self.confirmable = tolerance is not None and self.full_batch and has_linearization(rule, objective, state.q)
        self._verdict: tuple[Any, tuple[Reason, str | None]] | None = None
        self._at_finer_points: tuple[State, AtFinerPoints | None] | None = None

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end here; a fit on a stream ends its thread."""

    @property
    def position(self) -> Any:
        """What has to be saved with a checkpoint of where the data are, where the number of steps does not tell."""
        return None

    @property
    def seen_data(self) -> PyTree:
        """The data of the last step, or more of them."""
        return self.data

    @property
    def returns_to_start(self) -> bool:
        """Whether the state that the fit starts from may still be read after its first steps."""
        return self.full_batch or self.start is not None

    @cached_property
    def faster(self) -> Rule | None:
        """The rule with accelerated steps, or None where there is none; most fits end before they need it."""
        if self.tolerance is None or not self.full_batch:
            return None
        plain = self.rule.steps.acceleration is None
        return accelerated(self.rule, self.objective, self.first_q, self.data) if plain else self.rule

    def _is_fast(self, state: State) -> bool:
        """Whether a state is on its way with accelerated steps."""
        return state.history is not None and self.faster is not None and is_accelerated(self.faster, state)

    def _active_rule(self, fast: bool) -> Rule:
        # `faster` is asked for only where it is used: most fits end before it has to be built.
        return self.faster if fast and self.faster is not None else self.rule

    @property
    def last(self) -> int:
        """The count at which all steps are taken."""
        return self.first + self.steps

    def begin(self, state: State) -> Carry:
        """The carry before the first step from a state, whose arrays are donated."""
        trace = empty_trace(self.steps, self.diagnose, self.skips is not None)
        watch, skips = copy_for_donation((self.watch, self.skips))
        return Carry(state, self.order, trace, watch=watch, skips=skips)

    def at(self, state: State) -> Driver:
        """The driver of another start of the same fit."""
        other = copy.copy(self)
        other.start = None if self.start is None else state.q
        return other

    def chunk(self, carry: Carry, until: int) -> Carry:
        """Take steps until a count, or until something ends them, and decide how to go on from there."""
        fast, count = self._is_fast(carry.state), int(carry.state.count)
        left = steps_to_patience(carry)
        if not fast and carry.watch is not None and 0 < left < until - count:
            until = count + left  # Then it is decided whether to go on with accelerated steps.
        carry = self._run(self._active_rule(fast), carry, until)
        return self.decide(carry, until)

    def decide(self, carry: Carry, until: int) -> Carry:
        """The carry to go on from after a chunk: begun again, accelerated or not converged after all."""
        fast = self._is_fast(carry.state)
        if self.start is not None:
            start, self.start = self.start, None
            how = {"full_batch": self.full_batch}
            q = other_start(self.rule, self.objective, start, carry, self.data, self.key, **how)
            if q is not None:
                carry = self.begin(copy_for_donation(self.rule.init(q, self.objective, self.key)))
                carry = self._run(self.rule, carry, until)
        if self.confirmable and self.tolerance is not None:
            carry = confirm(self._active_rule(fast), self.objective, carry, self.data, self.key, self.tolerance)
        if fast or steps_to_patience(carry) > 0 or self.faster is None:
            return carry
        return accelerate_if_slow(self.faster, carry)

    def finish(self, carry: Carry, reason: Reason) -> tuple[Carry, Reason]:
        """Go on alone from where steps beside those of other starts have led, if this is not the end."""
        if reason is Reason.INTERRUPTED:
            return carry, reason
        carry = self.decide(carry, int(carry.state.count))
        if Reason.of(int(carry.code)) is not Reason.STEPS:
            return carry, Reason.of(int(carry.code))
        return run_in_chunks(self.chunk, carry, self.last, lambda carry: None, together=self.together)

    def plain_steps(self, carry: Carry) -> Carry:
        """All steps in one chunk, without decisions on the way."""
        return self._run(self.rule, carry, self.last)

    def _run(self, rule: Rule, carry: Carry, until: int) -> Carry:
        carry = self._call(rule, carry, until)
        if self.single_steps:
            while int(carry.state.count) < until and Reason.of(int(carry.code)) is Reason.STEPS:
                if self.interrupt is not None and self.interrupt.requested:
                    break
                carry = self._call(rule, carry, until)
        return carry

    def _call(self, rule: Rule, carry: Carry, until: int) -> Carry:
        how = {**self.how, "single": True} if self.single_steps else self.how
        if self.sharding is not None:
            carry = on_devices(self.sharding.mesh, carry, numbers=True)
            how = {**how, "placement": Placement.of(self.sharding, carry)}
        return run_chunk(rule, self.objective, self.data, self.key, self.tolerance, self.first, until, carry, **how)

    def judge(self, result: Result) -> Result:
        """The result, which has the reason and the explanation that it deserves as soon as one of them is asked for."""
        result.note = self.note(result.state, result.loop_reason, result.skipped)
        if result.loop_reason is not Reason.STEPS or result.steps >= self.last:
            plain = Result(result.state, result.loop_reason, result.trace, result.key, result.normalized, None)
            result.judged_by(partial(self._verdict_on, plain))
        return result

    def note(self, state: State, reason: Reason, skipped: int) -> str | None:
        """What is to be said of a fit whatever ended it."""
        limit = 0 if self.skips is None else int(self.skips.allowed)
        notes = explain_cold(self.rule, state), explain_skipped(reason, skipped, limit)
        return " ".join(filter(None, notes)) or None

    def bound(self, state: State) -> Bound:
        """The evidence lower bound at a state and its error: as the verdict has measured it, if it has."""
        judged, there = self._at_finer_points or (None, None)
        if judged is state and there is not None and there.bound is not None:
            return there.bound
        return judge_bound(self.rule, self.objective, state, self.data, self.key)

    def sites(self, q: Any) -> Callable[[], Any] | None:
        """What sums the sites of all rows, where they are not in the state but with the parts of the data."""
        return None

    linearizes: bool = True
    """Whether the steps can be differentiated on all data, for the distance to their fixed point."""

    def measure_at_finer_points(self, result: Result) -> AtFinerPoints | None:
        """What finer points than those of the fit say of the q of a result; None where there are none."""
        return measure_at_finer_points(self.rule, self.objective, result.state, self.data, self.key)

    def improper(self, result: Result) -> str | None:
        """What to say where the fit has no posterior to converge to; None if it has one, or that is not known."""
        if result.normalized or not self.full_batch or self.rule.search is not None:
            return None
        reason, _ = explain_stop(result.loop_reason, result.q, result.trace, self.tolerance)
        if not may_be_improper(self.objective, result.q, reason, result.trace):
            return None
        return explain_improper(self.objective, result.state, self.data)

    def _verdict_on(self, result: Result) -> tuple[Reason, str | None]:
        """The verdict; the last checkpoint, the last call of a progress function and the fit itself ask the same."""
        asked = (result.loop_reason, result.steps)
        if self._verdict is None or self._verdict[0] != asked:
            self._verdict = asked, self._judged(result)
        return self._verdict[1]

    def _judged(self, result: Result) -> tuple[Reason, str | None]:
        rule, trace = self.rule, result.trace
        if rule.search is not None:  # A search follows many minima, and not one posterior.
            return result.loop_reason, None
        reason, explanation = explain_stop(result.loop_reason, result.q, trace, self.tolerance)
        improper = self.improper(result)
        if improper is not None:
            return reason, improper
        if reason is Reason.STEPS and explanation is None and self.tolerance is not None:
            explanation = explain_slow(rule, trace, self.tolerance, self.full_batch)
            if explanation is not None and not result.normalized:
                explanation += " If they never suffice: without a proper prior the posterior may be improper."
        if reason is Reason.CONVERGED and self.full_batch and self.tolerance:
            there = self.measure_at_finer_points(result)
            self._at_finer_points = result.state, there
            coarse = explain_coarse_points(
                there, result.state, self.data, self.key, self.tolerance, linearize=self.linearizes
            )
            if coarse is not None:
                return Reason.COARSE_POINTS, coarse
        return reason, explanation
