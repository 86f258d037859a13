"""A step that takes a model's blocks in turn: each an ordinary step with the others where they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .families.peak import Peak
from .families.product import Product
from .model import Model
from .objective import Weighted
from .rows import Rows
from .state import Info, State
from .steps import Steps, Sweep


def sweeps(rule: Any, objective: Any, batch: PyTree) -> bool:
    """Whether a step takes blocks in turn: it says so, or local blocks stand alone beside rows that are weighted."""
    if not isinstance(objective, Model) or objective.part:
        return False
    weighted = isinstance(batch, Rows | Weighted)
    return rule.steps.sweep is not None or (weighted and bool(objective.local))


def advance_blocks(
    rule: Any, model: Model, state: State, batch: PyTree, key: Any, diagnose: bool, strict: bool
) -> tuple[State, Info, None]:
    """`Rule.advance`, block by block: section 5.2's coordinate-wise steps."""
    rows = model.taken(batch)
    q = _picked(state.q, model, rows.index)
    sweep = rule.steps.sweep
    if sweep is None:
        sweep = Sweep([tuple(group) for group in _apart(model) if group])
    found = model.contributions(q, rows, key)
    fractions, infos = {}, []
    for place, names in enumerate(sweep.groups(model.order)):
        own = None if key is None else jax.random.fold_in(key, place)
        part, info = _settled(rule, model, sweep, names, q, state, rows, own, diagnose, strict)
        q = Product({**q.blocks, **part.blocks})
        infos.append(info)
        fractions |= dict.fromkeys(names, info.fraction)
    moved = _returned(state.q, q, model, rows.index)
    after = State(moved, state.count + 1, state.previous, state.average, state.aux, state.scale)
    return after, _together(infos, fractions, found), None


def _apart(model: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(model.local), tuple(name for name in model.order if name not in model.local)


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
    local = all(name in model.local for name in names)
    whole = local and sweep.local is not None
    how = {"temperature": rule.steps.temperature, "units": rule.steps.units, "reverse": rule.steps.reverse}
    plain = rule.replace(steps=Steps(1.0 if whole else rule.steps.rates, **how), name=rule.name)

    def once(part: Product, diagnose: bool = diagnose) -> tuple[Product, Info]:
        alone = State(part, state.count)
        again = None if key is None else jax.random.clone(key)
        after, info, _ = plain.advance(given, alone, rows, again, diagnose=diagnose, strict=strict)
        return after.q, info

    first = Product({name: q.blocks[name] for name in names})
    peaked = any(isinstance(block, Peak) for block in first.blocks.values())
    most = sweep.local if whole else sweep.peaks if peaked else 1
    if most == 1:
        return once(first)

    def body(carry: tuple) -> tuple:
        part, _, count, info = carry
        new, info = once(part)
        return new, _change(new, part), count + 1, info

    def unfinished(carry: tuple) -> Array:
        return (carry[2] < most) & (carry[1] > sweep.tolerance)

    part, info = once(first)
    start = (part, _change(part, first), jnp.ones((), int), info)
    part, _, _, info = jax.lax.while_loop(unfinished, body, start)
    return part, info


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


def _together(infos: list[Info], fractions: dict[str, Array], found: dict[str, Any]) -> Info:
    total = lambda values: sum(values, start=jnp.zeros(()))
    last = infos[-1]
    loss = -total(found["factors"].values())
    bound = -loss + total(found["blocks"].values())
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
