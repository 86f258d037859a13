"""A search for many minima: starts spread over a box, a record of what was found, and new starts for what is done."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..curvature.average import plus
from ..curvature.measurement import Measurement
from ..families.base import Family
from ..numerics.checks import positive_int
from ..numerics.trees import ravel, unravel
from ..objectives.base import AbstractObjective
from .state import Info, State

_CLOSE = 0.05  # of the box: a landing from further off says little of where a minimum is


class SearchRecord(eqx.Module):
    """The minima found so far (M places, those with hits taken) and where each of the K components is in its life.

    `measures` counts how often a component's loss was measured, `idle` for how many steps all of them have been stuck;
    `loss_scale` is the standard deviation of ℓ̄ over the first starts, the unit of the temperature.
    """

    position: Float[Array, "M P"]
    value: Float[Array, " M"]
    hits: Float[Array, " M"]
    ages: Int[Array, " K"]
    masses: Float[Array, " K"]
    stuck: Bool[Array, " K"]
    seeds: Int[Array, ""]
    measures: Int[Array, ""]
    idle: Int[Array, ""]
    loss_scale: Float[Array, ""]
    low: Float[Array, " P"]
    high: Float[Array, " P"]
    shift: Float[Array, " P"]


class Search(eqx.Module):
    """What `multimodal` does around its steps.

    K starts are spread over the box `bounds` by a low-discrepancy sequence, shifted at random. A component is done
    where Newton's step from it is below `tolerance` (of the box). It merges into a minimum found before, or into
    another component, where that step lands on it: within a tenth of the step, and within `radius`. Whoever is done,
    merged, stuck, out of the box or older than `patience` steps is given the sequence's next point, so K need not be
    the number of minima; what is old, but close to a minimum, is recorded too. `memory` is how many minima are kept,
    the lowest ones. `polish` is the rule that sharpens them in the end.
    """

    bounds: tuple[PyTree, PyTree] | None
    polish: Any
    tolerance: Any
    radius: Any
    components: int = eqx.field(static=True)
    patience: int = eqx.field(static=True)
    memory: int = eqx.field(static=True)

    def __init__(
        self,
        bounds: tuple[PyTree, PyTree] | None,
        polish: Any,
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
        return "what has converged is recorded, merged with its like, and started anew elsewhere"

    def __repr__(self) -> str:
        return f"Search(components={self.components}, patience={self.patience}, memory={self.memory})"

    def check(self, family: Any) -> None:
        """Raise unless Newton's steps can be told from what is measured."""
        if not family.kind.is_mixture or family.structure != "full":
            raise ValueError(
                f"A search takes Newton's steps: it moves a Mixture of Gaussians with a full precision, not a {family}."
            )

    def first(self, params: PyTree, family: Any, key: Any) -> tuple[Family, SearchRecord]:
        """The mixture to start from (K starts along a leading axis, a mixture, or None for a design over the box)."""
        given: Any = params
        if isinstance(params, Family):
            if not params.is_mixture:
                raise ValueError(f"A search moves a mixture, and the start is a {type(params).__name__}.")
            given = given.each(lambda c: c.mean)
        if self.bounds is None and given is None:
            raise ValueError("A search needs a box to spread its starts over, bounds=(low, high), or the starts.")
        given = None if given is None else _starts(given, self.bounds)
        like = jax.tree.map(lambda x: x[0], given) if self.bounds is None else self.bounds[0]
        if self.bounds is None:
            flat = ravel(given, 1)
            low, high = jnp.min(flat, axis=0), jnp.max(flat, axis=0)
            if bool(jnp.any(low >= high)):
                raise ValueError("These starts do not span a box to search: give bounds=(low, high) as well.")
            low, high = low - (high - low) / 2, high + (high - low) / 2
        else:
            low, high = ravel(self.bounds[0]), ravel(self.bounds[1])
        count = self.components if given is None else jax.tree.leaves(given)[0].shape[0]
        shift = jnp.full_like(low, 0.5)
        if key is not None:
            shift = jax.random.uniform(jax.random.fold_in(key, 0x5EED), low.shape, low.dtype)
        found = SearchRecord(
            position=jnp.zeros((self.memory, low.size), low.dtype),
            value=jnp.full(self.memory, jnp.inf, low.dtype),
            hits=jnp.zeros(self.memory, low.dtype),
            ages=jnp.zeros(count, int),
            masses=jnp.ones(count, low.dtype),
            stuck=jnp.zeros(count, bool),
            seeds=jnp.asarray(count if given is None else 0),
            measures=jnp.asarray(count),
            idle=jnp.asarray(0),
            loss_scale=jnp.full((), jnp.nan, low.dtype),  # not measured yet
            low=low,
            high=high,
            shift=shift,
        )
        if isinstance(params, Family):
            return params, found
        starts = ravel(given, 1) if given is not None else self._spread(found, jnp.arange(count))
        return self._around(starts, found, like, family), found

    def _spread(self, found: SearchRecord, index: Int[Array, " K"]) -> Float[Array, "K P"]:
        """Points of the box: an additive recurrence with the generalised golden ratio, whose every stretch is even.

        In the compiled loop, where SciPy's sequences cannot go.
        """
        size = found.low.size
        ratio = 2.0
        for _ in range(50):  # φ with φ^(P+1) = φ + 1
            ratio = (1 + ratio) ** (1 / (size + 1))
        steps = jnp.asarray([ratio ** -(j + 1) for j in range(size)], found.low.dtype)
        place = jnp.mod(found.shift + (index[:, None] + 1) * steps, 1.0)
        return found.low + (found.high - found.low) * place

    def _around(self, starts: Float[Array, "K P"], found: SearchRecord, like: PyTree, family: Any) -> Any:
        """Components that share the box among them, around these starts."""
        width = (found.high - found.low) * starts.shape[0] ** (-1 / found.low.size)
        precision = unravel(1 / width**2, like)
        return family.kind.around(unravel(starts, like), precision, **dict(family.choices))

    # Between two steps.

    def restart_converged(
        self, rule: Any, objective: AbstractObjective, state: State, measured: Measurement, batch: PyTree, key: Any
    ) -> tuple[State, Measurement]:
        """Who is done is recorded and begins anew; what was measured there is measured again."""
        q, found = state.q, state.search
        means = q.each(lambda c: c.mean)
        flat, (value, slope, hessian) = ravel(means, 1), q.each(lambda c, seen: _whole(objective, c, seen), measured)
        span = found.high - found.low
        newton, length, convex = jax.vmap(newton_step, (0, 0, None))(slope, hessian, span)
        place = (flat - found.low) / span
        landing = place - newton
        near = length < self.tolerance
        old = found.ages >= self.patience
        inside = jnp.all((landing >= 0) & (landing <= 1), axis=1)
        lost = found.stuck | old | jnp.any((place < -0.1) | (place > 1.1), axis=1)
        unit, value = _spread(value), value - 0.5 * jnp.sum(slope * span * newton, axis=1)
        done = convex & inside & (near | (old & (length < _CLOSE)))
        reach = jnp.minimum(self.radius, 0.1 * length) + self.tolerance
        masses, collapsed = self._collapsed(place, landing, convex, reach, found)

        def record(carry: tuple, one: tuple) -> tuple:
            position, values, hits = carry
            landing, value, convex, done, mass, reach = one
            alike = (jnp.max(jnp.abs((position - found.low) / span - landing), axis=1) < reach) & (hits > 0)
            merged = convex & jnp.any(alike)
            worth = jnp.asarray(jnp.where(hits > 0, values, jnp.inf))
            worst = jnp.argmax(worth)  # an empty place, while there is one
            new = done & ~merged & (value < worth[worst])
            slot = jnp.where(merged, jnp.argmax(alike), worst)
            position = position.at[slot].set(jnp.where(new, found.low + span * landing, position[slot]))
            values = values.at[slot].set(jnp.where(new, value, values[slot]))
            hits = hits.at[slot].set(jnp.where(merged, hits[slot] + mass, jnp.where(new, mass, hits[slot])))
            return (position, values, hits), merged | done

        ones = landing, value, convex & ~collapsed, done & ~collapsed, masses, reach
        (position, values, hits), ended = jax.lax.scan(record, (found.position, found.value, found.hits), ones)
        free = ended | lost | collapsed
        spread = jnp.asarray(jnp.where(jnp.isnan(found.loss_scale), unit, found.loss_scale), found.loss_scale.dtype)
        found = dataclasses.replace(found, position=position, value=values, hits=hits, masses=masses, loss_scale=spread)
        return self._restarted(rule, objective, dataclasses.replace(state, search=found), measured, free, batch, key)

    def _collapsed(
        self, place: Array, landing: Array, convex: Array, reach: Array, found: SearchRecord
    ) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
        """Who has collapsed onto a component before it in the row, and everybody's mass when those have joined."""
        gap = lambda x: jnp.max(jnp.abs(x[:, None] - x[None, :]), axis=2)
        alike = (gap(place) < self.radius) & (gap(landing) < jnp.minimum(reach[:, None], reach))
        alike = alike & convex[:, None] & convex
        earlier = jnp.tril(alike, -1)
        collapsed = jnp.any(earlier, axis=1)
        host = jnp.argmax(earlier, axis=1)  # the first of them, which has no earlier one itself
        masses = found.masses + jax.ops.segment_sum(jnp.where(collapsed, found.masses, 0.0), host, collapsed.size)
        return masses, collapsed

    def _restarted(
        self,
        rule: Any,
        objective: AbstractObjective,
        state: State,
        measured: Measurement,
        free: Array,
        batch: PyTree,
        key: Any,
    ) -> tuple[State, Measurement]:
        q, found = state.q, state.search
        rank = jnp.cumsum(free) - 1
        like = jax.tree.map(lambda x: x[0], q.each(lambda c: c.mean))
        fresh = self._around(self._spread(found, found.seeds + rank), found, like, rule.family)
        choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(_along(free, o), n, o), new, old)
        q = q.with_parts(choose(fresh.components, q.components), q.choice)
        average, scale = choose(
            q.each(lambda c: rule.initial_accumulators(c, objective)[1:]), (state.average, state.scale)
        )
        found = dataclasses.replace(
            found,
            ages=jnp.where(free, 0, found.ages),
            masses=jnp.where(free, 1.0, found.masses),
            seeds=found.seeds + jnp.sum(free),
            measures=found.measures + jnp.sum(free),
        )
        again = None if key is None else jax.random.clone(key)  # the same points, on purpose
        there = lambda: choose(rule.measure(objective, q, batch, state.aux, again), measured)
        measured = jax.lax.cond(jnp.any(free), there, lambda: measured)
        return dataclasses.replace(state, q=q, average=average, scale=scale, search=found), measured

    def noted(self, found: SearchRecord, seen: Info) -> SearchRecord:
        """What the steps of all components showed."""
        evaluations = jnp.ones_like(found.ages) if seen.evaluations is None else seen.evaluations
        stuck = ~(seen.finite & seen.inside)
        idle = jnp.where(jnp.all(stuck), found.idle + 1, 0)
        measures = found.measures + jnp.sum(evaluations)
        return dataclasses.replace(found, ages=found.ages + 1, stuck=stuck, idle=idle, measures=measures)

    def alive(self, found: SearchRecord) -> Array:
        """Whether any component has taken a step in the last `patience` of them."""
        return found.idle < self.patience


def _whole(objective: AbstractObjective, q: Any, measured: Measurement) -> tuple[Array, Array, Array]:
    """ℓ̄ at a component and its derivatives: the data's and the regularizer's."""
    added = q.from_gaussian_terms(*objective.regularizer.derivatives(q.gaussian))
    gradient, hessian = plus(q, (measured.gradient, measured.curvature), added)
    return measured.value + objective.regularizer.at_mean(q.gaussian), ravel(gradient), hessian


def newton_step(
    slope: Float[Array, " P"], hessian: Float[Array, "P P"], span: Float[Array, " P"]
) -> tuple[Float[Array, " P"], Float[Array, ""], Bool[Array, ""]]:
    """Newton's step in units of a box of this span, its length (the largest entry), and whether the Hessian is positive
    definite; where it is not, the step is the gradient and means nothing."""
    factor = jnp.linalg.cholesky(hessian * span[:, None] * span)
    convex = jnp.all(jnp.isfinite(factor))
    factor = jnp.asarray(jnp.where(convex, factor, jnp.eye(span.size, dtype=factor.dtype)))
    step = cho_solve((factor, True), slope * span)
    return step, jnp.max(jnp.abs(step)), convex


def _spread(values: Float[Array, " K"]) -> Float[Array, ""]:
    """The standard deviation of what is finite; 1 where that is nothing, or all the same."""
    good = jnp.isfinite(values)
    spread = jnp.std(jnp.where(good, values, 0.0), where=good)
    return jnp.where(jnp.isfinite(spread) & (spread > 0), spread, 1.0)


def _floats(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(jnp.result_type(float), jnp.result_type(x))), tree)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(jnp.shape, tree)


def _starts(given: PyTree, bounds: tuple[PyTree, PyTree] | None) -> PyTree:
    """K starts along a leading axis of every leaf, as floats."""
    given = _floats(jnp.asarray(given) if isinstance(given, list) else given)
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(given)}
    alike = len(counts) == 1 and counts != {()}
    if alike and bounds is not None:
        alike = _shapes(given) == jax.tree.map(lambda x: (*next(iter(counts)), *x.shape), bounds[0])
    if not alike:
        box = "" if bounds is None else f", for a box of the shape {_shapes(bounds[0])}"
        raise ValueError(
            f"The starts of a search are K parameters along a leading axis of every array{box}; got the shape "
            f"{_shapes(given)}."
        )
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(given)):
        raise ValueError("Some of the starts are not finite numbers.")
    return given


def _box(bounds: Any) -> tuple[PyTree, PyTree]:
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
    if not bool(jnp.all(ravel(high) > ravel(low))) or not bool(jnp.all(jnp.isfinite(ravel((low, high))))):
        raise ValueError("bounds=(low, high) are finite, and every low is below its high.")
    return low, high


def _along(flags: Bool[Array, " K"], leaf: Array) -> Array:
    return flags.reshape((-1,) + (1,) * (leaf.ndim - 1))
