"""A step of a model, block by block: each group of blocks takes an ordinary update with the others held fixed.

Variational message passing, EM and SVI are this sweep with different rates. Local blocks (one member per row of the
data) and blocks that are read at their mode may repeat their step until λ stops changing before the sweep goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..curvature.measurement import Measurement
from ..factor_graph.data import Ragged, Rows
from ..factor_graph.model import Model
from ..families.point_mass import Peak
from ..families.product import Product
from ..numerics.loops import bounded_while
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..steps.schedule import at
from ..steps.steps import Steps
from ..steps.sweep import Sweep
from .state import Info, State
from .update import Request, StepResult, step_plain

if TYPE_CHECKING:
    from .rule import Rule


def step_blocks(rule: Rule, model: Model, state: State, batch: PyTree, key: Key | None, request: Request) -> StepResult:
    """Take one step for each group of blocks in turn, with the other blocks fixed (section 5.2)."""
    rows = model.batch_rows(batch)
    q = _batch_part(state.q, model, rows.index)
    sweep = Sweep("parallel") if rule.steps.sweep is None else rule.steps.sweep
    groups = sweep.groups(model.order)
    if model.local and rows.index is None and rows.examples and model.rows(rows) != model.size:
        raise ValueError(
            f"Local blocks have {model.size} rows and the batch {model.rows(rows)} without an index, so that it is not "
            "known which rows of the blocks to update: pass blr.Rows(batch, index)."
        )
    # If the sweep is a single step of a single group, that step's own diagnostics are those of the sweep.
    single = len(groups) == 1 and rows.weights is None and sweep.peaks == 1 and sweep.local in (None, 1)
    contributions = model.contributions(q, rows, key) if request.diagnose and not single else None
    fractions, infos = {}, []
    for place, group in enumerate(groups):
        group_key = None if key is None else jax.random.fold_in(key, place)
        moved: dict[str, Any] = {}
        for names in _split_by_weighting(model, group, rows):  # Blocks of one group all start from the same q.
            part_key = None if group_key is None else jax.random.clone(group_key)
            part, info = _step_group(rule, model, sweep, names, q, state, rows, part_key, request)
            moved |= part.blocks
            infos.append(info)
            fractions |= dict.fromkeys(names, info.fraction)
        q = Product({**q.blocks, **moved})
    full = _with_batch_part(state.q, q, model, rows.index)
    after = State(full, state.count + 1, state.previous, state.average, state.aux, state.scale)
    return after, _combine_infos(infos, fractions, contributions), None


def measure_shared(
    rule: Rule, model: Model, names: tuple[str, ...], before: Product, q: Product, batch: PyTree, key: Key | None
) -> Measurement:
    r"""What some of the rows say to blocks that all rows share, when the local blocks of these rows have converged.

    With local blocks at their optimum the messages to the shared ones are the gradient of the bound as a function of
    these alone. So nothing of the local blocks has to be kept from step to step, and a step on data in parts is a sum
    over the parts.

    Args:
        rule: The algorithm.
        model: The model, with its local blocks.
        names: The shared blocks that take the step.
        before: All shared blocks at the beginning of the sweep: what the local blocks converge to.
        q: All shared blocks now, as earlier groups of the sweep have left them.
        batch: The rows, scaled to all of the data as a mini-batch is.
        key: As for a step.

    Returns:
        The measurement for the blocks `names`. Its value is −E log p of all factors minus the entropy of the local
        blocks, which is also its `aux`.
    """
    rows = model.batch_rows(batch)
    local = _converge_local(rule, model, before, rows, key)
    full = Product({**local, **q.blocks})
    part = Product({name: q.blocks[name] for name in names})
    conditional = model.conditional_on(names, full)
    measured = rule.curvature.measure(conditional, part, rule.points, rows, None, key)
    if not local and len(names) == len(q.blocks):
        return dataclasses.replace(measured, aux=jnp.zeros_like(measured.value))
    terms = model.terms(model.views(full), rows, key)
    entropies = model.entropies(full, rows)
    entropy = sum((entropies[name] for name in local), start=jnp.zeros_like(measured.value))
    return dataclasses.replace(measured, value=-sum(terms.values(), start=entropy), aux=entropy)


def _converge_local(rule: Rule, model: Model, shared: Product, rows: Rows, key: Key | None) -> dict[str, Any]:
    """The local blocks of these rows after the visits of one sweep, from their start, with the shared blocks fixed."""
    if not model.local:
        return {}
    sweep = rule.steps.sweep
    if sweep is None or sweep.local is None:
        raise ValueError(
            f"The local blocks {list(model.local)} are computed anew in every pass over data in parts, and "
            f"{rule.name} does not bring them to their optimum at each visit: use svi(1.0, local_steps=…), or em(…)."
        )
    count = model.row_count(rows)
    assert count is not None  # only for the type checker: parts have rows
    local = {name: model.local_start(name, count) for name in model.local}
    for group in sweep.groups(model.order):
        names = tuple(name for name in group if name in model.local)
        if names:
            q = Product({**local, **shared.blocks})
            state = State(q, jnp.zeros((), int))
            # With diagnostics, as in a fit on arrays in memory, which take one more step after the last.
            moved, _ = _step_group(rule, model, sweep, names, q, state, rows, key, Request(diagnose=True))
            local |= moved.blocks
    return local


def step_shared(
    rule: Rule,
    model: Model,
    names: tuple[str, ...],
    state: State,
    measured: Measurement,
    key: Key | None,
) -> tuple[Product, Info, Any]:
    """A step of shared blocks from what was measured of them on data in parts; and what the guard has measured."""
    sweep = Sweep("parallel") if rule.steps.sweep is None else rule.steps.sweep
    conditional = model.conditional_on(names, state.q)
    part = State(Product({name: state.q.blocks[name] for name in names}), state.count)
    request = Request(diagnose=True, strict=True, measured=dataclasses.replace(measured, aux=None))
    nothing = Rows({}, None, None)
    after, info, noted = step_plain(_plain_rule(rule, sweep, names, model), conditional, part, nothing, key, request)
    return Product({**state.q.blocks, **after.q.blocks}), info, noted


def _split_by_weighting(model: Model, names: tuple[str, ...], rows: Rows) -> list[tuple[str, ...]]:
    """Split a group into its local and its shared blocks, where rows count differently for the two.

    A shared block's messages are multiplied by the rows' weights and, on a mini-batch (rows with an index), by N/M. The
    messages to a row's own block are not, so the two parts need objectives of their own.
    """
    if rows.weights is None and rows.index is None:
        return [names]
    local_names = tuple(name for name in names if name in model.local)
    shared_names = tuple(name for name in names if name not in model.local)
    return [part for part in (local_names, shared_names) if part]


def _step_group(
    rule: Rule,
    model: Model,
    sweep: Sweep,
    names: tuple[str, ...],
    q: Product,
    state: State,
    rows: Rows,
    key: Key | None,
    request: Request,
) -> tuple[Product, Info]:
    """Take one step for a group of blocks, or as many as the sweep allows it, from the group's current members."""
    conditional = model.conditional_on(names, q)
    repeats_local = _repeats_local(sweep, names, model)
    plain = _plain_rule(rule, sweep, names, model)
    first = Product({name: q.blocks[name] for name in names})
    has_point_mass = any(isinstance(block, Peak) for block in first.blocks.values())
    max_repetitions = (sweep.local or 1) if repeats_local else sweep.peaks if has_point_mass else 1

    def step_once(part: Product) -> tuple[Product, Info]:
        after, info, _ = step_plain(plain, conditional, State(part, state.count), rows, key, request)
        return after.q, info

    if max_repetitions == 1:
        return step_once(first)
    if repeats_local:
        # Restart local blocks at every visit: a warm start from the previous global parameters can trap them in a poor
        # optimum.
        count = jax.tree.leaves(first)[0].shape[0]
        first = Product({name: model.local_start(name, count) for name in names})

    unchecked = request._replace(diagnose=False, checked=False)

    def step_again(part: Product, rows: Rows) -> Product:
        same_key = None if key is None else jax.random.clone(key)  # Every repetition uses the same points.
        return step_plain(plain, conditional, State(part, state.count), rows, same_key, unchecked)[0].q

    def converge(part: Product, rows: Rows) -> Product:
        return _repeat_until_converged(lambda part: step_again(part, rows), part, max_repetitions, sweep.tolerance)

    if repeats_local and sweep.together is not None and len(names) == len(model.local):
        part = _converge_in_chunks(converge, first, rows, sweep.together)
    else:
        part = converge(first, rows)
    # For diagnostics one more step is taken, since its decrement says how much is still to gain.
    return step_once(part) if request.diagnose else _keep_if_finite(first, part, state.count, plain)


def _repeats_local(sweep: Sweep, names: tuple[str, ...], model: Model) -> bool:
    """Whether these are local blocks which take full steps until they have converged."""
    return sweep.local is not None and all(name in model.local for name in names)


def _plain_rule(rule: Rule, sweep: Sweep, names: tuple[str, ...], model: Model) -> Rule:
    """The rule of one group of blocks: that of the sweep, without the sweep."""
    rates = 1.0 if _repeats_local(sweep, names, model) else rule.steps.rates
    settings = {"temperature": rule.steps.temperature, "units": rule.steps.units, "reverse": rule.steps.reverse}
    # `tree_at` replaces the steps without building a new rule, whose constructor would check that its pieces fit. They
    # were checked with the sweep, and steps without momentum, averages or scaling need no more.
    return eqx.tree_at(lambda r: r.steps, rule, Steps(rates, **settings))


def _keep_if_finite(first: Product, part: Product, count: Array, plain: Rule) -> tuple[Product, Info]:
    """Keep the blocks after their repeated steps if they are finite, else those before; and report it in an `Info`.

    The repeated steps are not checked one by one, since a NaN stays one.
    """
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(part)]))
    part = jax.tree.map(lambda new, old: jnp.where(finite, new, old), part, first)
    inside = jnp.all(part.inside())
    rate = jnp.asarray(at(plain.steps.rates.mean, count), float)
    # The steps returned no Info, so the objective is not known, and nobody asked for a decrement.
    unknown = jnp.full((), jnp.nan, rate.dtype)
    return part, Info(unknown, rate, ~inside, jnp.ones(()), finite, inside)


def _repeat_until_converged(
    step_once: Callable[[Product], Product], part: Product, max_repetitions: int, tolerance: Any
) -> Product:
    """Repeat a step at most `max_repetitions` times, until λ changes by no more than `tolerance`."""

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        new = step_once(carry[0])
        return new, jax.lax.stop_gradient(_change(new, carry[0]))

    start = (part, jnp.asarray(jnp.inf, _change(part, part).dtype))
    return bounded_while(lambda carry: carry[1] > tolerance, body, start, max_repetitions)[0]


_WIDTH_COUNT = 4  # Ragged rows are padded to one of this many widths, for each of which the step is compiled.


def _converge_in_chunks(converge: Callable[[Product, Rows], Product], part: Product, rows: Rows, size: int) -> Product:
    """Converge `size` rows at a time: rows of local blocks are independent, so each chunk stops when its own are done.

    Ragged rows are sorted by length, and each chunk is padded to the smallest of a few widths that holds it.
    """
    ragged = [x for x in rows.examples.values() if isinstance(x, Ragged)]
    count = jax.tree.leaves(part)[0].shape[0]
    order = jnp.argsort(ragged[0].lengths) if ragged else jnp.arange(count)
    # The last chunk is filled up with repetitions of the last row, whose results are dropped.
    padded_order = order[jnp.minimum(jnp.arange(-(-count // size) * size), count - 1)]
    chunked = lambda tree: jax.tree.map(lambda x: x[padded_order].reshape((-1, size, *x.shape[1:])), tree)
    widest = ragged[0].shape[1] if ragged else 0
    # The widths are ¼, ½, ¾ of the widest, rounded up to multiples of 16, and the widest itself.
    fractions = range(1, _WIDTH_COUNT)
    widths = sorted({min(widest, -(-widest * i // _WIDTH_COUNT // 16) * 16 or 16) for i in fractions} | {widest})

    def cut(examples: dict[str, Any], width: int) -> Rows:
        shortened = lambda x: x.cut(width) if isinstance(x, Ragged) else x
        return Rows({name: shortened(x) for name, x in examples.items()}, None, None)

    def converge_chunk(chunk: tuple[Product, dict[str, Any]]) -> Product:
        part, examples = chunk
        if not ragged:
            return converge(part, Rows(examples, None, None))
        longest = jnp.max(next(x for x in examples.values() if isinstance(x, Ragged)).lengths)
        branches = [lambda p, e, w=w: converge(p, cut(e, w)) for w in widths]
        return jax.lax.switch(jnp.sum(longest > jnp.asarray(widths)), branches, part, examples)

    chunks = jax.lax.map(converge_chunk, (chunked(part), chunked(rows.examples)))
    original_order = jnp.zeros(count, int).at[order].set(jnp.arange(count))
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:]))[original_order], chunks)


def _change(new: Product, old: Product) -> Array:
    """The mean absolute change of λ in each row, maximised over the rows."""
    changes = jax.tree.map(lambda n, o: jnp.abs(n - o), new.natural(), old.natural())
    row_means = [jnp.mean(x, axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(changes)]
    return jnp.max(jnp.stack([jnp.max(row) for row in row_means]))


def _batch_part(q: Product, model: Model, index: Array | None) -> Product:
    """q with those rows of its local blocks that are in the batch."""
    if index is None or not model.local:
        return q
    own = {name: jax.tree.map(lambda x: x.at[index].get(mode="clip"), q.blocks[name]) for name in model.local}
    return Product({**q.blocks, **own})


def _with_batch_part(q: Product, part: Product, model: Model, index: Array | None) -> Product:
    """All of q, with the batch's rows of its local blocks replaced; padding has no valid index and is dropped."""
    if index is None or not model.local:
        return part
    put = lambda full, rows: full.at[index].set(rows, mode="drop")
    own = {name: jax.tree.map(put, q.blocks[name], part.blocks[name]) for name in model.local}
    return Product({**part.blocks, **own})


def _combine_infos(infos: list[Info], fractions: dict[str, Array], contributions: dict[str, Any] | None) -> Info:
    """Combine the infos of a sweep's groups into one; `contributions` are the terms of the bound before the sweep."""
    total = lambda values: sum(values, start=jnp.zeros(()))
    last = infos[-1]
    loss, bound = last.objective, last.bound if len(infos) == 1 else None
    if contributions is not None:
        loss = -total(contributions["factors"].values())
        bound = total(contributions["blocks"].values()) - loss
    return Info(
        loss,
        last.rate,
        jnp.any(jnp.stack([info.guard for info in infos])),
        jnp.min(jnp.stack([info.fraction for info in infos])),
        jnp.all(jnp.stack([info.finite for info in infos])),
        jnp.all(jnp.stack([info.inside for info in infos])),
        bound,
        None if last.decrement is None else total(info.decrement for info in infos),
        moved=None if last.moved is None else total(info.moved for info in infos),
        blocks=fractions,
    )
