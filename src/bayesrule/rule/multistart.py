"""A search for many minima: starts spread over a box, a record of the minima, and restarts for what has converged.

`multimodal` is a mixture whose components take Newton-like steps. Between two steps `Search.restart_converged` records
the components that have converged, merges those that are heading for the same minimum, and restarts them at new points
of the box. All of it runs inside the compiled loop, so its arrays have fixed shapes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float, Int

from ..curvature.average import add_terms
from ..curvature.measurement import Measurement
from ..families.base import Family
from ..families.start import Start
from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel, unravel
from ..objectives.base import AbstractObjective
from .state import Info, State
from .update import initial_accumulators, measure

if TYPE_CHECKING:
    from .rule import Rule

# A component older than `patience` is recorded if Newton's step from it is shorter than this, as a part of the box: a
# longer step says little about where a minimum is.
_CLOSE = 0.05


class SearchRecord(eqx.Module):
    """The minima recorded so far (M slots; those with `hits` > 0 are in use), and the age of each of K components."""

    position: Float[Array, "M P"]
    """Where each recorded minimum is."""
    value: Float[Array, " M"]
    """ℓ̄ there."""
    hits: Float[Array, " M"]
    """How many components have ended in it; 0 for an empty slot."""
    ages: Int[Array, " K"]
    """How many steps each component has taken since its last restart."""
    masses: Float[Array, " K"]
    """How many starts each component stands for: 1, and more once others have merged into it."""
    stuck: Bool[Array, " K"]
    """Whether the last step of a component was not finite, or left Ω."""
    seeds: Int[Array, ""]
    """How many points of the low-discrepancy sequence have been used."""
    measures: Int[Array, ""]
    """How often a component's loss was measured, in all."""
    idle: Int[Array, ""]
    """For how many steps in a row all components have been stuck."""
    loss_scale: Float[Array, ""]
    """The standard deviation of ℓ̄ over the first starts, which is the unit of the temperature; NaN before the first
    step."""
    low: Float[Array, " P"]
    """The lower corner of the box."""
    high: Float[Array, " P"]
    """The upper corner of the box."""
    shift: Float[Array, " P"]
    """The random shift of the low-discrepancy sequence."""


class Search(eqx.Module):
    """Record converged components of a mixture between two steps, and restart them: what `multimodal` does beside them.

    K starts are spread over a box by a low-discrepancy sequence, shifted at random. A component has converged where
    Newton's step from it is shorter than `tolerance` (as a part of the box). It is merged into a recorded minimum, or
    into another component, if that step lands on it: within a tenth of the step, and within `radius`. A component that
    has converged, merged, is stuck, has left the box or is older than `patience` steps is restarted at the next point
    of the sequence, so that K need not be the number of minima; an old one that is close to a minimum is recorded too.

    Args:
        bounds: The box, `(low, high)`; None to take it from the starts.
        polish: The rule that refines the recorded minima in the end.
        components: K, how many components move side by side.
        patience: After how many steps a component is restarted.
        memory: How many minima are kept, the lowest ones.
        tolerance: The length of Newton's step below which a component has converged, as a part of the box.
        radius: The distance within which components may merge, as a part of the box.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> blr.multimodal(0.1, components=12, bounds=(-jnp.ones(2), jnp.ones(2))).search
    Search(components=12, patience=60, memory=256)
    """

    bounds: tuple[PyTree, PyTree] | None
    polish: Rule
    tolerance: Any
    radius: Any
    components: int = eqx.field(static=True)
    patience: int = eqx.field(static=True)
    memory: int = eqx.field(static=True)

    def __init__(
        self,
        bounds: tuple[PyTree, PyTree] | None,
        polish: Rule,
        *,
        components: int,
        patience: int = 60,
        memory: int = 256,
        tolerance: float = 1e-5,
        radius: float = 1e-3,
    ):
        counts = {"components": components, "patience": patience, "memory": memory}
        for name, count in counts.items():
            positive_int(name, count)
        self.bounds = None if bounds is None else _box(bounds)
        self.polish, self.tolerance, self.radius = polish, tolerance, radius
        self.components, self.patience, self.memory = components, patience, memory

    @property
    def meaning(self) -> str:
        """What it does, for the printed derivation."""
        return "converged components are recorded, merged with their like, and restarted elsewhere in the box"

    def __repr__(self) -> str:
        return f"Search(components={self.components}, patience={self.patience}, memory={self.memory})"

    def check(self, family: Start) -> None:
        """Raise unless Newton's steps can be computed from what the rule measures."""
        if not family.kind.is_mixture or family.structure != "full":
            raise ValueError(
                f"A search takes Newton's steps: it moves a Mixture of Gaussians with a full precision, not a {family}."
            )

    def first(self, params: PyTree, family: Start, key: Key | None) -> tuple[Family, SearchRecord]:
        """The mixture to start from, and an empty record.

        Args:
            params: K starts along a leading axis of every leaf, a mixture, or None for K points of the box.
            family: The rule's family.
            key: Shifts the points of the box at random; without a key they are always the same.
        """
        starts: Any = params
        if isinstance(params, Family):
            if not params.is_mixture:
                raise ValueError(f"A search moves a mixture, and the start is a {type(params).__name__}.")
            starts = starts.each(lambda c: c.mean)
        if self.bounds is None and starts is None:
            raise ValueError("A search needs a box to spread its starts over, bounds=(low, high), or the starts.")
        starts = None if starts is None else _starts(starts, self.bounds)
        like = jax.tree.map(lambda x: x[0], starts) if self.bounds is None else self.bounds[0]
        if self.bounds is None:
            flat = ravel(starts, 1)
            low, high = jnp.min(flat, axis=0), jnp.max(flat, axis=0)
            if bool(jnp.any(low >= high)):
                raise ValueError("These starts do not span a box to search: give bounds=(low, high) as well.")
            low, high = low - (high - low) / 2, high + (high - low) / 2
        else:
            low, high = ravel(self.bounds[0]), ravel(self.bounds[1])
        count = self.components if starts is None else jax.tree.leaves(starts)[0].shape[0]
        shift = jnp.full_like(low, 0.5)
        if key is not None:
            shift = jax.random.uniform(jax.random.fold_in(key, 0x5EED), low.shape, low.dtype)
        record = SearchRecord(
            position=jnp.zeros((self.memory, low.size), low.dtype),
            value=jnp.full(self.memory, jnp.inf, low.dtype),
            hits=jnp.zeros(self.memory, low.dtype),
            ages=jnp.zeros(count, int),
            masses=jnp.ones(count, low.dtype),
            stuck=jnp.zeros(count, bool),
            seeds=jnp.asarray(count if starts is None else 0, int),
            measures=jnp.asarray(count, int),
            idle=jnp.asarray(0),
            loss_scale=jnp.full((), jnp.nan, low.dtype),
            low=low,
            high=high,
            shift=shift,
        )
        if isinstance(params, Family):
            return params, record
        flat_starts = ravel(starts, 1) if starts is not None else self._box_points(record, jnp.arange(count))
        return self._mixture_around(flat_starts, record, like, family), record

    def _box_points(self, record: SearchRecord, index: Int[Array, " K"]) -> Float[Array, "K P"]:
        """Points of the box by their index: an additive recurrence with the generalised golden ratio.

        Every stretch of the sequence fills the box evenly, and any point can be computed by itself in the compiled
        loop, which SciPy's sequences do not allow.
        """
        size = record.low.size
        ratio = 2.0
        for _ in range(50):  # The fixed point is φ with φ^(P+1) = φ + 1.
            ratio = (1 + ratio) ** (1 / (size + 1))
        steps = jnp.asarray([ratio ** -(j + 1) for j in range(size)], record.low.dtype)
        place = jnp.mod(record.shift + (index[:, None] + 1) * steps, 1.0)
        return record.low + (record.high - record.low) * place

    def _mixture_around(self, starts: Float[Array, "K P"], record: SearchRecord, like: PyTree, family: Start) -> Any:
        """A mixture with a component around each start, as wide as a K-th part of the box."""
        width = (record.high - record.low) * starts.shape[0] ** (-1 / record.low.size)
        precision = unravel(1 / width**2, like)
        return family.kind.around(unravel(starts, like), precision, **dict(family.choices))

    # Between two steps.

    def restart_converged(
        self,
        rule: Rule,
        objective: AbstractObjective,
        state: State,
        measured: Measurement,
        batch: PyTree,
        key: Key | None,
    ) -> tuple[State, Measurement]:
        """Record converged components, restart them at new points of the box, and measure the loss there.

        Args:
            rule: The rule that moves the mixture.
            objective: The loss.
            state: The state before a step; `state.search` is the record.
            measured: What the loss and its derivatives are at every component.
            batch: The examples of this step.
            key: The key of this step.

        Returns:
            The state with restarted components and the new record, and the measurement of all components in it.
        """
        q, record = state.q, state.search
        means = q.each(lambda c: c.mean)
        total = q.each(lambda c, part: _total_derivatives(objective, c, part), measured)
        flat, (value, slope, hessian) = ravel(means, 1), total
        span = record.high - record.low
        newton, length, convex = jax.vmap(newton_step, (0, 0, None))(slope, hessian, span)
        place = (flat - record.low) / span
        landing = place - newton
        near = length < self.tolerance
        old = record.ages >= self.patience
        inside = jnp.all((landing >= 0) & (landing <= 1), axis=1)
        lost = record.stuck | old | jnp.any((place < -0.1) | (place > 1.1), axis=1)
        std, value = _finite_std(value), value - 0.5 * jnp.sum(slope * span * newton, axis=1)
        done = convex & inside & (near | (old & (length < _CLOSE)))
        reach = jnp.minimum(self.radius, 0.1 * length) + self.tolerance
        masses, collapsed = self._merged(place, landing, convex, reach, record)

        def insert(carry: tuple[Any, ...], one: tuple[Any, ...]) -> tuple[Any, ...]:
            position, values, hits = carry
            landing, value, convex, done, mass, reach = one
            same = (jnp.max(jnp.abs((position - record.low) / span - landing), axis=1) < reach) & (hits > 0)
            known = convex & jnp.any(same)
            worth = jnp.asarray(jnp.where(hits > 0, values, jnp.inf))
            worst = jnp.argmax(worth)  # An empty slot, while there is one.
            new = done & ~known & (value < worth[worst])
            slot = jnp.where(known, jnp.argmax(same), worst)
            position = position.at[slot].set(jnp.where(new, record.low + span * landing, position[slot]))
            values = values.at[slot].set(jnp.where(new, value, values[slot]))
            hits = hits.at[slot].set(jnp.where(known, hits[slot] + mass, jnp.where(new, mass, hits[slot])))
            return (position, values, hits), known | done

        ones = landing, value, convex & ~collapsed, done & ~collapsed, masses, reach
        (position, values, hits), ended = jax.lax.scan(insert, (record.position, record.value, record.hits), ones)
        free = ended | lost | collapsed
        first = jnp.isnan(record.loss_scale)
        scale = jnp.asarray(jnp.where(first, std, record.loss_scale), record.loss_scale.dtype)
        record = dataclasses.replace(
            record, position=position, value=values, hits=hits, masses=masses, loss_scale=scale
        )
        state = dataclasses.replace(state, search=record)
        return self._restart(rule, objective, state, measured, free, batch, key)

    def _merged(
        self, place: Array, landing: Array, convex: Array, reach: Array, record: SearchRecord
    ) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
        """The components' masses after merging, and which components have merged into one of a lower index."""
        gap = lambda x: jnp.max(jnp.abs(x[:, None] - x[None, :]), axis=2)
        same = (gap(place) < self.radius) & (gap(landing) < jnp.minimum(reach[:, None], reach))
        same = same & convex[:, None] & convex
        earlier = jnp.tril(same, -1)
        collapsed = jnp.any(earlier, axis=1)
        host = jnp.argmax(earlier, axis=1)  # The first of them, which has not merged itself.
        masses = record.masses + jax.ops.segment_sum(jnp.where(collapsed, record.masses, 0.0), host, collapsed.size)
        return masses, collapsed

    def _restart(
        self,
        rule: Rule,
        objective: AbstractObjective,
        state: State,
        measured: Measurement,
        free: Bool[Array, " K"],
        batch: PyTree,
        key: Key | None,
    ) -> tuple[State, Measurement]:
        """The state with the `free` components at new points of the box, and what is measured there."""
        q, record = state.q, state.search
        rank = jnp.cumsum(free) - 1
        like = jax.tree.map(lambda x: x[0], q.each(lambda c: c.mean))
        points = self._box_points(record, record.seeds + rank)
        fresh = self._mixture_around(points, record, like, rule.family)
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(_along(free, o), n, o), new, old)
        q = q.with_parts(choose(fresh.components, q.components), q.choice)
        average, scale = choose(
            q.each(lambda c: initial_accumulators(rule, c, objective)[1:]), (state.average, state.scale)
        )
        record = dataclasses.replace(
            record,
            ages=jnp.where(free, 0, record.ages),
            masses=jnp.where(free, 1.0, record.masses),
            seeds=record.seeds + jnp.sum(free),
            measures=record.measures + jnp.sum(free),
        )
        same_key = None if key is None else jax.random.clone(key)  # The components share their points, as before.
        remeasure = lambda: choose(measure(rule, objective, q, batch, state.aux, same_key), measured)
        measured = jax.lax.cond(jnp.any(free), remeasure, lambda: measured)
        return dataclasses.replace(state, q=q, average=average, scale=scale, search=record), measured

    def noted(self, record: SearchRecord, infos: Info) -> SearchRecord:
        """The record after a step, from the infos of all components, stacked along a leading axis."""
        evaluations = jnp.ones_like(record.ages) if infos.evaluations is None else infos.evaluations
        stuck = ~(infos.finite & infos.inside)
        idle = jnp.where(jnp.all(stuck), record.idle + 1, 0)
        measures = record.measures + jnp.sum(evaluations)
        return dataclasses.replace(record, ages=record.ages + 1, stuck=stuck, idle=idle, measures=measures)

    def alive(self, record: SearchRecord) -> Bool[Array, ""]:
        """Whether any component has taken a step in the last `patience` of them."""
        return record.idle < self.patience


def _total_derivatives(objective: AbstractObjective, q: Family, measured: Measurement) -> tuple[Array, Array, Array]:
    """ℓ̄ at a component, its gradient and its Hessian: the data's and the regularizer's."""
    added = q.from_gaussian_terms(*objective.regularizer.derivatives(q.gaussian))
    gradient, hessian = add_terms(q, (measured.gradient, measured.curvature), added)
    return measured.value + objective.regularizer.at_mean(q.gaussian), ravel(gradient), hessian


def newton_step(
    slope: Float[Array, " P"], hessian: Float[Array, "P P"], span: Float[Array, " P"]
) -> tuple[Float[Array, " P"], Float[Array, ""], Bool[Array, ""]]:
    """Newton's step in units of a box of this span, its length, and whether the Hessian is positive definite.

    The length is the largest entry. Where the Hessian is not positive definite, the step is the gradient and must not
    be used.
    """
    factor = jnp.linalg.cholesky(hessian * span[:, None] * span)
    convex = jnp.all(jnp.isfinite(factor))
    factor = jnp.asarray(jnp.where(convex, factor, jnp.eye(span.size, dtype=factor.dtype)))
    step = cho_solve((factor, True), slope * span)
    return step, jnp.max(jnp.abs(step)), convex


def _finite_std(values: Float[Array, " K"]) -> Float[Array, ""]:
    """Standard deviation of the finite values; 1 if there are none or they are all equal."""
    finite = jnp.isfinite(values)
    std = jnp.std(jnp.where(finite, values, 0.0), where=finite)
    return jnp.where(jnp.isfinite(std) & (std > 0), std, 1.0)


def _floats(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.result_type(float), jnp.result_type(x))), tree)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(jnp.shape, tree)


def _starts(starts: PyTree, bounds: tuple[PyTree, PyTree] | None) -> PyTree:
    """K starts along a leading axis of every leaf, checked, as floats."""
    starts = _floats(jnp.asarray(starts) if isinstance(starts, list) else starts)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(starts)}
    consistent = len(counts) == 1 and counts != {()}
    if consistent and bounds is not None:
        consistent = _shapes(starts) == jax.tree.map(lambda x: (*next(iter(counts)), *x.shape), bounds[0])
    if not consistent:
        box = "" if bounds is None else f", for a box of the shape {_shapes(bounds[0])}"
        raise ValueError(
            f"The starts of a search are K parameters along a leading axis of every array{box}; got the shape "
            f"{_shapes(starts)}."
        )
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(starts)):
        raise ValueError("Some of the starts are not finite numbers.")
    return starts


def _box(bounds: Any) -> tuple[PyTree, PyTree]:
    """`bounds` as a pair of float pytrees, checked."""
    try:
        low, high = (_floats(side) for side in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"bounds= is a pair (low, high), two arrays (or pytrees) of the parameters' shape, got {bounds!r}."
        ) from None
    if _shapes(low) != _shapes(high):
        raise ValueError(
            f"bounds=(low, high) are two of the parameters' shape, got {_shapes(low)} and {_shapes(high)}."
        )
    with jax.ensure_compile_time_eval():  # A rule may be made inside a trace, for example under vmap over its rate.
        valid = bool(jnp.all(ravel(high) > ravel(low))) and bool(jnp.all(jnp.isfinite(ravel((low, high)))))
    if not valid:
        raise ValueError("bounds=(low, high) are finite, and every low is below its high.")
    return low, high


def _along(flags: Bool[Array, " K"], leaf: Array) -> Array:
    """The flags with as many axes as the leaf, to broadcast along its first."""
    return flags.reshape((-1,) + (1,) * (leaf.ndim - 1))
