"""Sites: every factor's message kept by itself, λ = Σ λ̃ᵢ (`eq:blr_local`)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..curvature.base import Curvature
from ..curvature.measurement import Measurement
from ..families.product import Product
from ..points.base import Points
from .block_view import BlockView
from .data import Rows, observed_part
from .linear_factor import LinearFactor
from .model import Model


class Sites(Curvature):
    r"""The gradient in μ, its parts kept: $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ∇_μE_q\log f_i$, $λ = \sum_i\tildeλ_i$.

    One site for each factor, and for each row of one that has rows (in the space of its output, where that is linear in
    the blocks). A mini-batch renews its own sites only; since the others stay as they are, nothing is scaled by N/M and
    repeated passes converge to the same q as the whole data. What q started from is a site too, which fades.
    """

    meaning: ClassVar[str] = "∇_μ E_q log f of every factor and row, each kept (eq:blr_local)"
    remembers: ClassVar[bool] = True

    def initial_aux(self, objective: Any, q: Any) -> PyTree:
        """No site has been looked at yet, and what q starts from is all there is."""
        if not isinstance(objective, Model):
            raise ValueError("Sites() keeps the messages of a model's factors: give a blr.Model, or use Gradient().")
        if objective.local:
            raise ValueError("Sites() are for blocks that all rows share; local blocks are their own sites: use vmp().")
        if objective.size is None and objective.names:
            raise ValueError("Sites() keep something for each row of the data: pass Model(…, size=N).")
        sites = {name: self._empty(objective, name, q) for name in objective.factors}
        return {"start": q.natural(), "factors": sites}

    def _empty(self, model: Model, name: str, q: Product) -> PyTree:
        factor = model.factors[name]
        zeros = lambda tree, *lead: jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)
        natural = q.natural()
        if not model.per_row(factor):
            return {block: zeros(natural[block]) for block in factor.blocks}
        if not isinstance(factor, LinearFactor):
            return {block: zeros(natural[block], model.size) for block in factor.blocks}
        inputs = {x: jnp.zeros((1, factor.width(q.blocks[b]))) for b, x in factor.predictors if x is not None}
        seen = {b: BlockView(q.blocks[b]) for b, _ in factor.predictors}
        mean, spread = jax.eval_shape(lambda: factor.outputs(seen, inputs))
        rows = lambda like: jnp.zeros((model.size, *like.shape[1:]), like.dtype)
        others = {block: zeros(natural[block], model.size) for block in factor.blocks[len(factor.predictors) :]}
        return {"outputs": (rows(mean), rows(spread)), "others": others}

    def measure(self, objective: Any, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measurement:
        rows, fresh = objective.taken(batch), {}
        # λ is the sum of the sites as they are: what changes is those that are looked at, and the start, which goes.
        total = jax.tree.map(jnp.subtract, q.natural(), aux["start"])
        for name in objective.factors:
            fresh[name] = message(objective, name, q, rows, objective.key_of(name, key))
            old = _picked(objective, name, aux["factors"][name], rows.index)
            change = jax.tree.map(jnp.subtract, fresh[name], old)
            for block, part in pulled(objective, name, q, rows, change).items():
                total[block] = jax.tree.map(jnp.add, total[block], part)
        value, _ = objective.expected(q, None, batch, None, key)
        gradient, curvature = q.derivatives(jax.tree.map(jnp.negative, total))
        return Measurement(value, gradient, curvature, {"fresh": fresh, "rows": rows.index})

    def updated_aux(self, objective: Any, before: PyTree, measured: PyTree, rate: Any) -> PyTree:
        """Every site that was looked at, moved as λ has been: by ρ of the way."""
        mixed = lambda old, new: old + jnp.asarray(rate, old.dtype) * (new - old)
        start = jax.tree.map(lambda x: (1 - jnp.asarray(rate, x.dtype)) * x, before["start"])
        factors, index = {}, measured["rows"]
        for name, site in before["factors"].items():
            moved = jax.tree.map(mixed, _picked(objective, name, site, index), measured["fresh"][name])
            if index is not None and objective.per_row(objective.factors[name]):
                moved = jax.tree.map(lambda whole, rows: whole.at[index].set(rows, mode="drop"), site, moved)
            factors[name] = moved
        return {"start": start, "factors": factors}


def message(model: Model, name: str, q: Product, rows: Rows, key: Any = None) -> PyTree:
    """λ̃ᵢ(μ) of one factor: for each block, for each row if it has rows; in the outputs' terms where they are linear."""
    factor = model.factors[name]
    if isinstance(factor, LinearFactor):
        return _output_message(model, factor, q, rows, key)
    zero = {block: BlockView(q.blocks[block]).shift for block in factor.blocks}
    symmetric = lambda block, slope: q.blocks[block]._symmetric(slope)

    def slopes(rows: Rows, key: Any) -> PyTree:
        total = lambda shift: jnp.sum(model.term(name, {b: BlockView(q.blocks[b], shift[b]) for b in zero}, rows, key))
        return {block: symmetric(block, slope) for block, slope in jax.grad(total)(zero).items()}

    if not model.per_row(factor):
        return slopes(rows, key)
    examples = {other: rows.examples[other] for other in factor.data}
    one = lambda example, key: slopes(Rows(jax.tree.map(lambda x: x[None], example), None, None), key)
    if key is None:
        every = jax.vmap(lambda example: one(example, None))(examples)
    else:
        count = jax.tree.leaves(examples)[0].shape[0]
        every = jax.vmap(one)(examples, jax.random.split(key, count))
    return _weighted(every, rows)


def _output_message(model: Model, factor: LinearFactor, q: Product, rows: Rows, key: Any) -> PyTree:
    """(ν, κ) of every row: its expected log-likelihood is ν f − ½ f κ f plus a constant, to q's first order."""
    seen = model.seen(q)
    data, observed = observed_part(factor, rows)
    mean, spread = factor.outputs(seen, data)
    rest = factor.blocks[len(factor.predictors) :]

    def total(mean: Array, spread: Array) -> Array:
        values = factor.given(mean, spread, seen, data, key)
        return jnp.sum(values if observed is None else jnp.where(observed, values, 0.0))

    slope, curve = jax.grad(total, argnums=(0, 1))(mean, spread)
    wide = spread.ndim > mean.ndim
    curve = -(curve + jnp.swapaxes(curve, -1, -2)) if wide else -2 * curve
    first = slope + (jnp.einsum("nkl,nl->nk", curve, mean) if wide else curve * mean)
    others: PyTree = {}
    if rest:

        def row(m: Array, v: Array, example: PyTree, shift: PyTree) -> Array:
            moved = {**seen, **{block: BlockView(q.blocks[block], shift[block]) for block in rest}}
            return factor.given(m[None], v[None], moved, jax.tree.map(lambda x: x[None], example), key).sum()

        zero = {block: seen[block].shift for block in rest}
        others = jax.vmap(jax.grad(row, argnums=3), in_axes=(0, 0, 0, None))(mean, spread, data, zero)
        if observed is not None:
            keep = lambda x: jnp.where(observed.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0)
            others = jax.tree.map(keep, others)
    return _weighted({"outputs": (first, curve), "others": others}, rows)


def _weighted(tree: PyTree, rows: Rows) -> PyTree:
    weights = rows.weights
    if weights is None:
        return tree
    weight = lambda x: x * weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return jax.tree.map(weight, tree)


def pulled(model: Model, name: str, q: Product, rows: Rows, site: PyTree) -> dict[str, PyTree]:
    """The sum of a factor's sites as each block's λ takes it."""
    factor = model.factors[name]
    if not model.per_row(factor):
        return site
    summed = lambda tree: jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)
    if not isinstance(factor, LinearFactor):
        return {block: summed(part) for block, part in site.items()}
    data, _ = observed_part(factor, rows)
    names = [block for block, _ in factor.predictors]
    zero = {block: BlockView(q.blocks[block]).shift for block in names}

    def outputs(shift: PyTree) -> tuple[Array, Array]:
        return factor.outputs({block: BlockView(q.blocks[block], shift[block]) for block in names}, data)

    (mean, spread), back = jax.vjp(outputs, zero)
    first, curve = site["outputs"]
    push = first - (jnp.einsum("nkl,nl->nk", curve, mean) if spread.ndim > mean.ndim else curve * mean)
    parts = back((push, -0.5 * curve))[0]
    return {b: q.blocks[b]._symmetric(part) for b, part in parts.items()} | summed(site["others"])


def _picked(model: Model, name: str, site: PyTree, index: Array | None) -> PyTree:
    """The sites that a batch is about; a row of no place, which fills a ragged batch, has none."""
    if index is None or not model.per_row(model.factors[name]):
        return site
    return jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0), site)
