"""A step that takes a model's blocks in turn: each an ordinary step with the others where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..factor_graph.data import Ragged, Rows
from ..factor_graph.model import Model
from ..families.point_mass import Peak
from ..families.product import Product
from ..objectives.batches import Weighted
from ..steps.guards import NoGuard
from ..steps.schedule import at
from ..steps.steps import Steps
from ..steps.sweep import Sweep
from .state import Info, State


def sweeps(rule: Any, objective: Any, batch: PyTree) -> bool:
    """Whether a step takes blocks in turn: it says so, or local blocks stand alone beside rows that are weighted."""
    if not isinstance(objective, Model):
        if rule.steps.sweep is not None:
            raise ValueError(
                f"{rule.name} takes a model's blocks in turn, and this objective does not say which factor touches "
                "which: give a blr.Model, or a rule for all of θ at once, such as conjugate()."
            )
        return False
    if objective.part:
        return False
    picked = isinstance(batch, Rows) and not (batch.index is None and batch.weights is None)
    weighted = picked or isinstance(batch, Weighted)
    return rule.steps.sweep is not None or (weighted and bool(objective.local))


def step_blocks(
    rule: Any, model: Model, state: State, batch: PyTree, key: Any, diagnose: bool, strict: bool
) -> tuple[State, Info, None]:
    """`Rule.advance`, block by block: section 5.2's coordinate-wise steps."""
    rows = model.taken(batch)
    q = _picked(state.q, model, rows.index)
    sweep = Sweep("parallel") if rule.steps.sweep is None else rule.steps.sweep
    groups = sweep.groups(model.order)
    if model.local and rows.index is None and rows.examples and model.rows(rows) != model.size:
        raise ValueError(
            f"Local blocks have {model.size} rows and the batch {model.rows(rows)}: say which they are, "
            "blr.Rows(batch, index)."
        )
    # Where there is one step in all, what it saw is all there is.
    plain = len(groups) == 1 and rows.weights is None and sweep.peaks == 1 and sweep.local in (None, 1)
    found = model.contributions(q, rows, key) if diagnose and not plain else None
    fractions, infos = {}, []
    for place, group in enumerate(groups):
        own = None if key is None else jax.random.fold_in(key, place)
        moved: dict[str, Any] = {}
        for names in _alike(model, group, rows):  # what moves together starts from the same q
            again = None if own is None else jax.random.clone(own)
            part, info = _settled(rule, model, sweep, names, q, state, rows, again, diagnose, strict)
            moved |= part.blocks
            infos.append(info)
            fractions |= dict.fromkeys(names, info.fraction)
        q = Product({**q.blocks, **moved})
    whole = _returned(state.q, q, model, rows.index)
    after = State(whole, state.count + 1, state.previous, state.average, state.aux, state.scale)
    return after, _together(infos, fractions, found), None


def _alike(model: Model, names: tuple[str, ...], rows: Rows) -> list[tuple[str, ...]]:
    """Local blocks apart from the others where rows are weighted: a row's own block does not feel its weight."""
    local = tuple(name for name in names if name in model.local)
    shared = tuple(name for name in names if name not in model.local)
    if rows.weights is None and rows.index is None:
        return [names]
    return [part for part in (local, shared) if part]


def _settled(
    rule: Any,
    model: Model,
    sweep: Sweep,
    names: tuple[str, ...],
    q: Product,
    state: State,
    rows: Rows,
    key: Any,
    diagnose: bool,
    strict: bool,
) -> tuple[Product, Info]:
    """A group of blocks after its step, or after as many as the sweep allows it."""
    given = model.given(names, q)
    whole = sweep.local is not None and all(name in model.local for name in names)
    how = {"temperature": rule.steps.temperature, "units": rule.steps.units, "reverse": rule.steps.reverse}
    plain = rule.replace(steps=Steps(1.0 if whole else rule.steps.rates, **how), name=rule.name)
    first = Product({name: q.blocks[name] for name in names})
    peaked = any(isinstance(block, Peak) for block in first.blocks.values())
    most = (sweep.local or 1) if whole else sweep.peaks if peaked else 1

    def once(part: Product) -> tuple[Product, Info]:
        after, info, _ = plain.advance(given, State(part, state.count), rows, key, diagnose=diagnose, strict=strict)
        return after.q, info

    if most == 1:
        return once(first)
    if whole:
        # Afresh at every visit: from where other topics left it, a document may not find its way to these.
        count = jax.tree.leaves(first)[0].shape[0]
        first = Product({name: model.local_start(name, count) for name in names})

    def again(part: Product, rows: Rows) -> Product:
        own = None if key is None else jax.random.clone(key)  # the same points, on purpose
        if isinstance(plain.guard, NoGuard):
            # Without what a step says of itself, which would double the time of a small one.
            measured = plain.measure(given, part, rows, None, own)
            return part.moved(plain.formed(given, State(part, state.count), measured)[0])
        return plain.advance(given, State(part, state.count), rows, own, strict=strict)[0].q

    settle = lambda part, rows: _repeated(lambda part: again(part, rows), part, most, sweep.tolerance)
    if whole and sweep.together is not None and len(names) == len(model.local):
        part = _in_groups(settle, first, rows, sweep.together)
    else:
        part = settle(first, rows)
    # A fit that is being followed wants to know what is still to gain: one more step says so.
    return once(part) if diagnose else _seen_through(first, part, state.count, plain)


def _seen_through(first: Product, part: Product, count: Array, plain: Any) -> tuple[Product, Info]:
    """What is known of steps that were repeated; the blocks as they were if the end is not a number."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(part)]))
    part = jax.tree.map(lambda new, old: jnp.where(finite, new, old), part, first)
    inside, one, zero = jnp.all(part.inside()), jnp.ones(()), jnp.zeros(())
    rate = jnp.asarray(at(plain.steps.rates.mean, count), float)
    return part, Info(zero, rate, ~inside, one, finite, inside, decrement=zero)


def _repeated(once: Callable[[Product], Product], part: Product, most: int, least: Any) -> Product:
    """The same step again, at most so often, until λ changes by less than that."""

    def body(carry: tuple) -> tuple:
        new = once(carry[0])
        return new, _change(new, carry[0]), carry[2] + 1

    def unfinished(carry: tuple) -> Array:
        return (carry[2] < most) & (carry[1] > least)

    start = (part, jnp.asarray(jnp.inf, _change(part, part).dtype), jnp.zeros((), int))
    return jax.lax.while_loop(unfinished, body, start)[0]


_WIDTHS = 4


def _in_groups(settle: Callable[[Product, Rows], Product], part: Product, rows: Rows, size: int) -> Product:
    """Some rows at a time, since rows of local blocks are independent: each group until its own have settled.

    Ragged rows are sorted by their lengths, and a group is cut to the shortest of a few widths that holds it.
    """
    ragged = [x for x in rows.examples.values() if isinstance(x, Ragged)]
    count = jax.tree.leaves(part)[0].shape[0]
    order = jnp.argsort(ragged[0].lengths) if ragged else jnp.arange(count)
    filled = order[jnp.minimum(jnp.arange(-(-count // size) * size), count - 1)]
    grouped = lambda tree: jax.tree.map(lambda x: x[filled].reshape((-1, size, *x.shape[1:])), tree)
    widest = ragged[0].shape[1] if ragged else 0
    widths = sorted({min(widest, -(-widest * i // _WIDTHS // 16) * 16 or 16) for i in range(1, _WIDTHS)} | {widest})

    def cut(examples: dict[str, Any], width: int) -> Rows:
        short = lambda x: x.cut(width) if isinstance(x, Ragged) else x
        return Rows({name: short(x) for name, x in examples.items()}, None, None)

    def one(group: tuple[Product, dict[str, Any]]) -> Product:
        part, examples = group
        if not ragged:
            return settle(part, Rows(examples, None, None))
        longest = jnp.max(next(x for x in examples.values() if isinstance(x, Ragged)).lengths)
        branches = [lambda p, e, w=w: settle(p, cut(e, w)) for w in widths]
        return jax.lax.switch(jnp.sum(longest > jnp.asarray(widths)), branches, part, examples)

    found = jax.lax.map(one, (grouped(part), grouped(rows.examples)))
    back = jnp.zeros(count, int).at[order].set(jnp.arange(count))
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:]))[back], found)


def _change(new: Product, old: Product) -> Array:
    """The mean change of λ in a row, at its largest."""
    changes = jax.tree.map(lambda n, o: jnp.abs(n - o), new.natural(), old.natural())
    rows = [jnp.mean(x, axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(changes)]
    return jnp.max(jnp.stack([jnp.max(row) for row in rows]))


def _picked(q: Product, model: Model, index: Array | None) -> Product:
    """q with the rows of its local blocks that the batch is about."""
    if index is None or not model.local:
        return q
    own = {name: jax.tree.map(lambda x: x.at[index].get(mode="clip"), q.blocks[name]) for name in model.local}
    return Product({**q.blocks, **own})


def _returned(q: Product, part: Product, model: Model, index: Array | None) -> Product:
    """All of q, with the batch's rows put back; a row of no place (a ragged batch's filling) is dropped."""
    if index is None or not model.local:
        return part
    put = lambda whole, rows: whole.at[index].set(rows, mode="drop")
    own = {name: jax.tree.map(put, q.blocks[name], part.blocks[name]) for name in model.local}
    return Product({**part.blocks, **own})


def _together(infos: list[Info], fractions: dict[str, Array], found: dict[str, Any] | None) -> Info:
    total = lambda values: sum(values, start=jnp.zeros(()))
    last = infos[-1]
    loss, bound = last.objective, last.bound if len(infos) == 1 else None
    if found is not None:
        loss = -total(found["factors"].values())
        bound = total(found["blocks"].values()) - loss
    return Info(
        loss,
        last.rate,
        jnp.any(jnp.stack([info.guard for info in infos])),
        jnp.min(jnp.stack([info.fraction for info in infos])),
        jnp.all(jnp.stack([info.finite for info in infos])),
        jnp.all(jnp.stack([info.inside for info in infos])),
        bound,
        None if last.decrement is None else total(info.decrement for info in infos),
        blocks=fractions,
    )
