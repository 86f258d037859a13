"""A fit on data in parts: every step is one pass over the parts, and one update of the rule with their sum.

The update itself is the rule's own `advance`, which is given what was measured. Where a guard asks for the loss at the
q that a step leads to, that is another pass, whose measurement is the next step's; so that a Newton step whose full
length is good costs one pass. The halving of the step is here and not in the guard, because a compiled guard cannot
wait for a pass over the data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..curvature.base import Pointwise
from ..curvature.gradient import Gradient
from ..curvature.measurement import Measurement
from ..factor_graph.model import Model
from ..factor_graph.sites import Sites, message, summed_over_rows
from ..families.gaussian.precision import Factored
from ..families.product import Product
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.batched import Batched
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..points.quadrature import Enumeration
from ..rule.by_block import measure_shared, step_shared
from ..rule.rule import Rule
from ..rule.state import Info, State
from ..rule.update import guard_of, loss_of, measure
from ..steps.guards import NoGuard, Shortened
from ..steps.sweep import Sweep
from .bound import Bound, judging_points_of
from .coarse_points import AtFinerPoints, finer_pieces
from .driver import Driver
from .loader import Loader
from .loop import Carry, has_point_mass, iterate, judging_window, with_shared_jacobians
from .parts import Parts
from .progress import CHUNK_SECONDS
from .reason import Reason
from .result import Result

_HALVINGS = 30
_BOUND_KEYS = 16  # Under so many keys the bound at random points is measured, each a pass over the data.
_OWN_KEY = 0x70617274  # Folded into the key of a fit for the points of its bound.


def check_parts(rule: Rule, objective: AbstractObjective) -> None:
    """Raise where an algorithm does not work on data in parts."""
    if not isinstance(objective, Objective | Model):
        what = "a loss of a whole batch" if isinstance(objective, Batched) else "no examples"
        raise ValueError(
            f"Data in parts are measured part by part, and this objective has {what}: build it as "
            "Objective(loss, size=N), or give batch_size= for steps on mini-batches."
        )
    if rule.curvature.squares_gradient:
        raise ValueError(
            f"{rule.name} squares the gradient of a batch, which does not add up over the parts of all data: give "
            "batch_size= for steps on mini-batches, or use ogn, vogn or newton."
        )
    if isinstance(objective, Model) and objective.random:
        raise ValueError(
            "A factor of this model is evaluated at random points, which differ from row to row: give it Quadrature "
            "or QuasiMonteCarlo points for data in parts."
        )
    if rule.search is not None or rule.steps.acceleration is not None:
        raise ValueError(
            f"{rule.name} looks at all data between its steps, which data in parts do not allow: use a rule without "
            "a search for many minima and without acceleration."
        )


def without_local(objective: Any) -> Any:
    """A model as its shared blocks see it: without local ones, which every pass computes anew. Others as they are."""
    if not isinstance(objective, Model):
        return objective
    return objective._with(local={}, order=tuple(name for name in objective.order if name not in objective.local))


class PartsDriver(Driver):
    """Takes the steps of a fit on data in parts, and judges its end.

    Args:
        rule, objective, key, tolerance, state, steps, watch, resumed: as for `Driver`.
        loader: has the parts, and the first rows as its data.
    """

    def __init__(
        self,
        rule: Rule,
        objective: AbstractObjective,
        loader: Loader,
        key: Key,
        tolerance: float | None,
        state: State,
        **options: Any,
    ):
        check_parts(rule, objective)
        # On all rows the steps of sites are those of the global form, and the sites stay with their parts.
        self._keeps_sites = isinstance(rule.curvature, Sites)
        rule = rule.replace(curvature=Gradient(), name=rule.name) if self._keeps_sites else rule
        super().__init__(rule, objective, loader, key, tolerance, state, **options)
        assert loader.parts is not None  # only for the type checker: `load` has put them there
        self.parts: Parts = loader.parts
        self._kept: Any = None  # a handle on the sites of every part, before the last step
        self._rate: Any = np.zeros(())  # how far that step has moved λ
        self.start, self.confirmable = None, False
        self._measured: tuple[int, Measurement] | None = None  # at the q after so many steps

    @cached_property
    def faster(self) -> None:
        """There are no accelerated steps on parts."""

    @cached_property
    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of shared blocks that take their steps in turn; none for an objective that is not a model."""
        model = self.objective
        if not isinstance(model, Model):
            return ()
        sweep = Sweep("parallel") if self.rule.steps.sweep is None else self.rule.steps.sweep
        groups = (tuple(name for name in group if name not in model.local) for group in sweep.groups(model.order))
        return tuple(group for group in groups if group)

    def chunk(self, carry: Carry, until: int) -> Carry:
        """Take steps until a count, or until something ends them, or for as long as nobody need hear of them."""
        began = time.perf_counter()
        while int(carry.state.count) < until and Reason.of(int(carry.code)) is Reason.STEPS:
            carry = self._step(carry)
            if time.perf_counter() - began > CHUNK_SECONDS:
                break
        return carry

    def _step(self, carry: Carry) -> Carry:
        state, key = carry.state, step_key(self.key, carry.state.count)
        if isinstance(self.objective, Model):
            state, info = self._step_blocks(state, key)
        else:
            state, info = self._step_plain(state, key)
        settings = {"window": judging_window(self.rule, self.objective), "gain": has_point_mass(carry.state.q)}
        return _record(carry, state, info, self.key, self.tolerance, self.first, **settings)

    # What is measured.

    def measured(self, rule: Rule, q: Any, key: Key) -> Measurement:
        """What a rule measures of an objective on all parts at q."""
        return self.parts.total(measure_part, rule, self.objective, q, key, np.asarray(self.parts.count))

    def _of_blocks(
        self, names: tuple[str, ...], before: Product, q: Product, key: Key, rate: Any = 0.0
    ) -> tuple[Measurement, Any]:
        """What all parts say to blocks, and a handle on their sites after the step of this rate that has led to q."""
        arguments = self.rule, self.objective, before, q, key, np.asarray(self.parts.count)
        if not self._keeps_sites:
            return self.parts.total(partial(measure_part_of_blocks, names=names), *arguments), None
        function = partial(measure_part_with_sites, names=names)
        return self.parts.carry(function, self._kept, *arguments, np.asarray(rate, float))

    def sites(self, q: Any) -> Callable[[], Any] | None:
        if not self._keeps_sites or self._kept is None:
            return None
        kept = self._kept
        return lambda: self.parts.carry(sum_sites, kept, self.objective, q)[0]

    # One step.

    def _step_plain(self, state: State, key: Key) -> tuple[State, Info]:
        known = self._measured
        here = known[1] if known is not None and known[0] == int(state.count) else None
        here = self.measured(self.rule, state.q, key) if here is None else here
        stand_in = self._stand_in
        attempt = lambda rule: _attempt(rule, self.objective, state, here, key, stand_in)
        look = lambda candidate, info: (self.measured(self.rule, candidate.q, key), None)
        loss = lambda candidate, there, temperature: _loss(self.rule, self.objective, candidate.q, there, temperature)
        new, info, there, _ = self._guarded(attempt, look, loss)
        keeps = there is not None and not (self.rule.points.random or self.rule.curvature.remembers)
        scheduled = self.rule.steps.temperature_schedule is not None and not self.rule.points.delta
        self._measured = (int(new.count), there) if keeps and there is not None and not scheduled else None
        return new, info

    def _step_blocks(self, state: State, key: Key) -> tuple[State, Info]:
        """One step for each group of shared blocks in turn, each of which takes a pass of its own."""
        before, infos, first = state.q, [], None
        for names in self._groups:
            state, info, here = self._step_group(names, before, state, key)
            first = here if first is None else first
            infos.append(info)
        state = dataclasses.replace(state, count=state.count + 1)
        return state, _combined(without_local(self.objective), before, first, infos)

    def _step_group(
        self, names: tuple[str, ...], before: Product, state: State, key: Key
    ) -> tuple[State, Info, Measurement]:
        known = self._measured if len(self._groups) == 1 else None
        if known is not None and known[0] == int(state.count):
            here = known[1]
        else:
            here, self._kept = self._of_blocks(names, before, state.q, key, self._rate)
        model = without_local(self.objective)
        attempt = lambda rule: _attempt_blocks(rule, model, state, here, key, names=names)
        look = lambda candidate, info: self._of_blocks(names, before, candidate.q, key, info.rate)

        def loss(candidate: State, there: Measurement, temperature: Any) -> Array:
            part = Product({name: candidate.q.blocks[name] for name in names})
            return _loss(self.rule, self.objective, part, there, temperature)

        new, info, there, kept = self._guarded(attempt, look, loss)
        # The sites move with the next pass; the one that a guard has asked for was it already.
        self._kept, self._rate = (self._kept, info.rate) if there is None else (kept, 0.0)
        self._measured = None if there is None else (int(state.count) + 1, there)
        return new, info, here

    def _guarded(
        self, attempt: Callable[[Rule], Any], look: Callable[..., tuple[Any, Any]], loss: Callable[..., Any]
    ) -> tuple[State, Info, Measurement | None, Any]:
        """The state after as much of a step as the rule's guard allows, and what was measured there if it asks for it.

        Args:
            attempt: the state, the info and the guard's note after a step under another guard.
            look: measures at a candidate, and returns a handle on what the parts keep.
            loss: the loss at a candidate, from what was measured there, at a temperature.
        """
        if not guard_of(self.rule, self.objective, None).evaluates:
            new, info, _ = attempt(self.rule)
            return new, info, None, None
        fraction, acted = 1.0, False
        for _ in range(_HALVINGS):
            new, info, (limit, temperature) = attempt(self._shortened(fraction))
            if not bool(info.finite):
                return new, info, None, None
            acted = acted or (fraction == 1.0 and bool(info.guard))
            if bool(info.inside):
                there, kept = look(new, info)
                if float(loss(new, there, temperature)) <= float(limit):
                    return new, eqx.tree_at(lambda i: i.guard, info, jnp.asarray(acted)), there, kept
            fraction /= 2
        new, info, _ = attempt(self._shortened(0.0))
        return new, info, None, None

    def _shortened(self, fraction: float) -> Rule:
        in_numpy: Any = np.asarray(fraction, jnp.result_type(float))
        guard = Shortened(in_numpy)
        return _with_guard(self.rule, guard)

    @cached_property
    def _stand_in(self) -> Weighted:
        """A row that stands for all of the data, for what a step asks of its batch besides the measurement."""
        examples = self.data.examples if isinstance(self.data, Weighted) else self.data
        first: Any = jax.tree.map(lambda x: np.asarray(x)[:1], examples)
        return Weighted(first, np.ones(1), np.asarray(self.objective.size, float))

    # The verdict.

    linearizes = False

    def measure_at_finer_points(self, result: Result) -> AtFinerPoints | None:
        head = self.data
        finer = finer_pieces(self.rule, self.objective, result.state, head)
        if finer is None or isinstance(self.objective, Model):
            return None
        rule, key = finer[0], step_key(self.key, result.state.count)
        at = lambda rule: _diagnosed(
            rule, self.objective, result.state, self.measured(rule, result.q, key), key, self._stand_in
        )
        there, here = at(rule), at(self.rule)
        fine = float(there.bound)
        return AtFinerPoints(*finer, float(there.decrement), Bound(fine, abs(fine - float(here.bound))))

    def bound(self, state: State) -> Bound:
        judged, there = self._at_finer_points or (None, None)
        if judged is state and there is not None and there.bound is not None:
            return there.bound
        points = self.rule.points
        key = jax.random.fold_in(self.key, _OWN_KEY)
        if isinstance(self.objective, Model):
            names = tuple(name for group in self._groups for name in group)
            here = self.parts.total(
                partial(measure_part_of_blocks, names=names),
                self.rule,
                self.objective,
                state.q,
                state.q,
                key,
                np.asarray(self.parts.count),
            )
            return Bound(float(_combined(without_local(self.objective), state.q, here, []).bound), 0.0)
        finer = None if points.delta else finer_pieces(self.rule, self.objective, state, self.data)
        if finer is not None:
            fine, own = (self._bound_at(rule, state, key) for rule in (finer[0], self.rule))
            return Bound(fine, abs(fine - own))
        rule = self.rule
        if not (points.random or points.delta or points.exact or isinstance(points, Enumeration)):
            # Fixed points, at which the fit has made the bound large, say nothing about their own error.
            judges = judging_points_of(points, self.objective, state.q, self.data)
            rule = rule.replace(points=judges.fine)
            if judges.coarse is not None:
                fine = self._bound_at(rule, state, key)
                return Bound(fine, abs(fine - self._bound_at(rule.replace(points=judges.coarse), state, key)))
        if not rule.points.random:
            return Bound(self._bound_at(rule, state, key), None if points.delta else 0.0)
        values = np.array([self._bound_at(rule, state, one) for one in jax.random.split(key, _BOUND_KEYS)])
        return Bound(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(_BOUND_KEYS)))

    def _bound_at(self, rule: Rule, state: State, key: Key) -> float:
        measured = self.measured(rule, state.q, key)
        return float(_diagnosed(rule, self.objective, state, measured, key, self._stand_in).bound)

    def improper(self, result: Result) -> str | None:
        """Nothing is said: it would take the loss far away from q, and many passes over the data."""
        return None


def _with_guard(rule: Rule, guard: Any) -> Rule:
    # Without the constructor, which would check that the pieces fit: a guard of its own changes nothing about that.
    return eqx.tree_at(lambda r: r.guard, rule, guard, is_leaf=lambda x: x is rule.guard)


def step_key(key: Key, count: Any) -> Key:
    """The key of a step of `fit`: the same as that of a fit on arrays in memory."""
    return jax.random.fold_in(jax.random.split(key)[1], count)


# What parts compute. These functions are imported by other processes, and hence public.


def measure_part(part: PyTree, rule: Rule, objective: Any, q: Any, key: Key, total: Any) -> Measurement:
    """A part's share of what is measured on all data."""
    return _measure_part(part, rule, objective, q, key, total)


@compiled
def _measure_part(part: PyTree, rule: Rule, objective: Any, q: Any, key: Key, total: Any) -> Measurement:
    batch, share = _with_count(part, total)
    over_outputs = isinstance(rule.curvature, Pointwise)
    batch = with_shared_jacobians(objective, q, batch) if over_outputs else batch
    measured = measure(rule, objective, q, batch, None, key)
    if isinstance(measured.curvature, Factored):
        raise ValueError(
            "The curvature of a low-rank Gaussian is a list of rows, which does not add up over parts: use a full or "
            "a diagonal Gaussian, or give batch_size=."
        )
    return jax.tree.map(lambda x: share.astype(x.dtype) * x, dataclasses.replace(measured, aux=None))


def measure_part_of_blocks(
    part: PyTree, rule: Rule, model: Any, before: Any, q: Any, key: Key, total: Any, *, names: tuple[str, ...]
) -> Measurement:
    """A part's share of the messages to the blocks `names` of a model (`measure_shared`)."""
    return _measure_part_of_blocks(part, rule, model, before, q, key, total, names=names)


@compiled(static="names")
def _measure_part_of_blocks(
    part: PyTree, rule: Rule, model: Any, before: Any, q: Any, key: Key, total: Any, *, names: tuple[str, ...]
) -> Measurement:
    batch, share = _with_count(part, total)
    measured = measure_shared(rule, model, names, before, q, batch, key)
    return jax.tree.map(lambda x: share.astype(x.dtype) * x, measured)


def measure_part_with_sites(
    part: PyTree,
    kept: PyTree,
    rule: Rule,
    model: Any,
    before: Any,
    q: Any,
    key: Key,
    total: Any,
    rate: Any,
    *,
    names: tuple[str, ...],
) -> tuple[Measurement, PyTree]:
    """A part's share of the messages, and its rows' sites, which stay with it (`eq:blr_local`).

    The sites move by the rate of the step that has led to q, towards the messages at the q before it; these are kept
    beside the sites from the pass that computed them.
    """
    measured = measure_part_of_blocks(part, rule, model, before, q, key, total, names=names)
    return measured, _move_sites(part, kept, model, q, key, total, rate)


@compiled
def _move_sites(part: PyTree, kept: PyTree, model: Any, q: Any, key: Key, total: Any, rate: Any) -> PyTree:
    batch, share = _with_count(part, total)
    rows = model.batch_rows(batch)
    with_rows = [name for name, factor in model.factors.items() if model.per_row(factor)]
    # Messages of weighted rows are scaled from the part to all of the data, as every measurement of a part is.
    scale = share if rows.weights is not None else jnp.asarray(model.size / total)
    fresh = {name: message(model, name, q, rows, key) for name in with_rows}
    fresh = jax.tree.map(lambda x: scale.astype(x.dtype) * x, fresh)
    if kept is None:
        return {"sites": jax.tree.map(jnp.zeros_like, fresh), "messages": fresh}
    move = lambda old, new: jnp.where(rate == 1, new, old + jnp.asarray(rate, old.dtype) * (new - old))
    return {"sites": jax.tree.map(move, kept["sites"], kept["messages"]), "messages": fresh}


def sum_sites(part: PyTree, kept: PyTree, model: Any, q: Any) -> tuple[dict[str, PyTree], PyTree]:
    """The sum of a part's sites in the natural parameters of each block, and the sites as they are."""
    return _sum_sites(part, kept, model, q), kept


@compiled
def _sum_sites(part: PyTree, kept: PyTree, model: Any, q: Any) -> dict[str, PyTree]:
    rows = model.batch_rows(part)
    sums = jax.tree.map(jnp.zeros_like, q.natural())
    for name, sites in kept["sites"].items():
        for block, own in summed_over_rows(model, name, q, rows, sites).items():
            sums[block] = jax.tree.map(jnp.add, sums[block], own)
    return sums


def _with_count(part: PyTree, total: Any) -> tuple[PyTree, Array]:
    """The part as a batch, and M_p/M, the share of all examples that it stands for.

    A part without weights stays without: weights of 1 would cost a look at every row for whether it counts.
    """
    examples = part.examples if isinstance(part, Weighted) else part
    rows = jax.tree.leaves(examples)[0].shape[0]
    if not isinstance(part, Weighted):
        return part, jnp.asarray(rows / total)
    count = rows if part.count is None else part.count
    return Weighted(examples, part.weights, count), jnp.asarray(count / total)


# What is computed here, from the sums. None of these programs depends on the data.


@compiled
def _attempt(
    rule: Rule, objective: Any, state: State, measured: Measurement, key: Key, stand_in: Weighted
) -> tuple[State, Info, Any]:
    """A step from what was measured, its info, and the note of a `Shortened` guard."""
    how = {"diagnose": True, "strict": True, "measured": measured}
    return rule.advance(objective, state, stand_in, key, **how)


@compiled(static="names")
def _attempt_blocks(
    rule: Rule, model: Any, state: State, measured: Measurement, key: Key, *, names: tuple[str, ...]
) -> tuple[State, Info, Any]:
    q, info, noted = step_shared(rule, model, names, state, measured, key)
    return dataclasses.replace(state, q=q), info, noted


@compiled
def _loss(rule: Rule, objective: Any, q: Any, measured: Measurement, temperature: Any) -> Array:
    loss = loss_of(rule, objective, q, measured, temperature)
    if not rule.points.exact:
        return loss
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((measured.gradient, measured.curvature))]
    return jnp.where(jnp.all(jnp.stack(finite)), loss, jnp.inf)


@compiled
def _diagnosed(rule: Rule, objective: Any, state: State, measured: Measurement, key: Key, stand_in: Weighted) -> Info:
    """The bound and the decrement of what was measured."""
    plain = _with_guard(rule, NoGuard())
    return plain.advance(objective, state, stand_in, key, diagnose=True, measured=measured)[1]


@compiled
def _combined(model: Any, q: Product, measured: Any, infos: list[Info]) -> Info:
    """The info of a sweep over shared blocks: the bound before it, and the sums over its groups."""
    entropy = sum(model.entropies(q).values(), start=jnp.zeros_like(measured.value))
    bound, objective = entropy - measured.value, measured.value + measured.aux
    none = jnp.zeros(())
    if not infos:
        return Info(objective, none, none, none, none, none, bound)
    last, every = infos[-1], lambda name: jnp.stack([getattr(info, name) for info in infos])
    return Info(
        objective,
        last.rate,
        jnp.any(every("guard")),
        jnp.min(every("fraction")),
        jnp.all(every("finite")),
        jnp.all(every("inside")),
        bound,
        jnp.sum(every("decrement")),
        moved=jnp.sum(every("moved")),
    )


@compiled(static=("window", "gain"))
def _record(
    carry: Carry, state: State, info: Info, key: Key, tolerance: Any, first: Any, *, window: int, gain: bool
) -> Carry:
    """The carry after a step that was taken elsewhere: its trace, the test of convergence, the reason to end."""
    taken = lambda *_: (state, info, None)
    return iterate(
        taken,
        carry,
        None,  # pyright: ignore[reportArgumentType]  # There are no batches to build.
        None,
        (key, key),
        first,
        0,
        batch_size=None,
        tolerance=tolerance,
        window=window,
        gain=gain,
        single=True,
    )
