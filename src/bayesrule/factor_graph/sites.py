r"""Sites: every factor's message stored by itself, $λ = \sum_i\tildeλ_i$ (`eq:blr_local`).

The rule on λ is a rule on the messages that λ is the sum of: $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ∇_μE_q\log f_i$. Storing
them costs memory for each row, and pays twice: a mini-batch replaces its own messages exactly, so that nothing has to
be scaled by N/M and no noise remains at the fixed point, and a row can be removed from q by subtracting its message.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from ..curvature.base import Curvature
from ..curvature.gradient import Gradient
from ..curvature.measurement import Measurement
from ..families.product import Product
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..points.base import Points
from ..steps.needs import Need
from ..steps.schedule import equals
from ..steps.step import Step
from .block_view import BlockView
from .data import Rows, observed_data, zero_where_missing
from .linear_factor import LinearFactor
from .model import Model


def _moves_as_a_sum(steps: Any) -> bool:
    """Whether every site moves as λ does, which is their sum: by one rate, towards its message."""
    extras = (steps.momentum, steps.average, steps.scaling, steps.sweep, steps.acceleration)
    # A temperature that is traced is that of a rule which was built, and checked, outside of the trace.
    unit_temperature = isinstance(steps.temperature, Tracer) or equals(steps.temperature, 1)
    plain = steps.units == "natural" and unit_temperature and steps.rates.single
    return plain and not (steps.reverse or steps.lazy) and all(extra is None for extra in extras)


class Sites(Curvature[Product]):
    r"""The gradient in μ as a sum of stored messages: $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ∇_μE_q\log f_i$ (`eq:blr_local`).

    There is one site for each factor, and one for each row of a factor that has rows (in the space of its output, if
    that is linear in the blocks). A mini-batch updates its own sites only; the others keep their values, so nothing is
    scaled by N/M and repeated passes converge to the same q as the full data. The natural parameters that q starts from
    are a site too, which decays with every step.

    The gradient is formed from the sites and never from λ, so that a rounding error of λ decays with every step. On all
    rows it is the gradient of the global form. A mini-batch changes a running sum of the rows' sites. Because rounding
    errors would stay in that sum for ever, the sites are summed again from nothing during every pass over the rows,
    each row when it is visited, and the new sum replaces the old one at the end of the pass.

    >>> import bayesrule as blr
    >>> print(blr.cvi(0.5, sites=True).curvature, blr.cvi(0.5).curvature)
    Sites() Gradient()
    """

    meaning: ClassVar[str] = "∇_μ E_q log f of every factor and row, each kept (eq:blr_local)"
    in_mu: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.points.exact,
            "Sites() differentiate a model's factors in μ: use Exact() points, and points of the factors.",
        ),
        (
            lambda p: _moves_as_a_sum(p.steps),
            "Sites() take plain steps of all blocks at once, since λ is to stay their sum: one rate, temperature 1, "
            "no sweep, momentum, averaging, scaling, acceleration, reverse or lazy form.",
        ),
    )

    def initial_aux(self, objective: Any, q: Product) -> PyTree:
        """Zeros for every site and for the sums of the rows' sites, and the natural parameters that q starts from."""
        if not isinstance(objective, Model):
            raise ValueError("Sites() keeps the messages of a model's factors: give a blr.Model, or use Gradient().")
        if objective.local:
            raise ValueError(
                "Sites() are for blocks that all rows share; the q of a local block is its own site: use vmp()."
            )
        if objective.size is None and objective.names:
            raise ValueError(
                "Sites() keep a message for each row of the data, so their number must be known: pass Model(…, size=N)."
            )
        sites = {name: self._empty(objective, name, q) for name in objective.factors}
        sums = {"all": _no_message(q), "renewed": _no_message(q), "seen": jnp.zeros(objective.size or 0, bool)}
        return {"start": q.natural(), "factors": sites, "sums": sums}

    def _empty(self, model: Model, name: str, q: Product) -> PyTree:
        """A factor's sites, all zero."""
        factor = model.factors[name]
        zeros = lambda tree, *lead: jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), tree)
        natural = q.natural()
        if not model.per_row(factor):
            return {block: zeros(natural[block]) for block in factor.blocks}
        if not isinstance(factor, LinearFactor):
            return {block: zeros(natural[block], model.size) for block in factor.blocks}
        inputs = {x: jnp.zeros((1, factor.input_width(q.blocks[b]))) for b, x in factor.predictors if x is not None}
        views = {b: BlockView(q.blocks[b]) for b, _ in factor.predictors}
        mean, covariance = jax.eval_shape(lambda: factor.outputs(views, inputs))
        zero_rows = lambda like: jnp.zeros((model.size, *like.shape[1:]), like.dtype)
        others = {block: zeros(natural[block], model.size) for block in factor.blocks[len(factor.predictors) :]}
        return {"outputs": (zero_rows(mean), zero_rows(covariance)), "others": others}

    def measure(
        self, objective: Any, q: Product, points: Points, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        rows = objective.batch_rows(batch)
        _check_index(objective, rows)
        fresh = {name: message(objective, name, q, rows, objective.factor_key(name, key)) for name in objective.factors}
        without_rows = [fresh[name] for name, factor in objective.factors.items() if not objective.per_row(factor)]
        shared = _added(_no_message(q), *without_rows)
        kept = {name: _without_padding(objective, name, rows, site) for name, site in fresh.items()}
        measured = {"fresh": kept, "rows": rows.index}
        if rows.index is None and not objective.random:
            # All messages are fresh, so that their sum is the gradient of the global form, and it is computed as such.
            whole = Gradient().measure(objective, q, points, batch, None, key)
            natural = q.natural_step(Step(whole.gradient, whole.curvature, 1.0, 1.0, 1.0))
            measured["new"] = jax.tree.map(lambda loss, own: -loss - own, natural, shared)
            return dataclasses.replace(whole, aux=measured)
        new, old = _change_of_sum(objective, q, rows, fresh, aux)
        total = _added(shared, new, *(() if old is None else (aux["sums"]["all"], _minus(old))))
        value, _ = objective.expected(q, None, batch, None, key)
        gradient, curvature = q.derivatives(_minus(total))
        return Measurement(value, gradient, curvature, {**measured, "new": new, "old": old})

    def updated_aux(self, objective: Any, before: PyTree, measured: PyTree, rate: Any) -> PyTree:
        """The sites after a step: those of the batch moved by ρ towards their new messages, as λ has been."""

        def mix(old: Array, new: Array) -> Array:
            # With ρ = 1 nothing of the old value remains, not even its rounding error.
            share = jnp.asarray(rate, old.dtype)
            return jnp.where(share == 1, new, (1 - share) * old + share * new)

        start = jax.tree.map(lambda x: (1 - jnp.asarray(rate, x.dtype)) * x, before["start"])
        factors, index = {}, measured["rows"]
        for name, site in before["factors"].items():
            moved = jax.tree.map(mix, _sites_of_batch(objective, name, site, index), measured["fresh"][name])
            if index is not None and objective.per_row(objective.factors[name]):
                moved = jax.tree.map(lambda full, rows: full.at[index].set(rows, mode="drop"), site, moved)
            factors[name] = moved
        sums = before["sums"]
        if index is None:
            new = jax.tree.map(mix, sums["all"], measured["new"])
            sums = {"all": new, "renewed": _zeros(new), "seen": jnp.zeros_like(sums["seen"])}
        else:
            move = lambda sum, new, old: sum + jnp.asarray(rate, sum.dtype) * (new - old)
            total = jax.tree.map(move, sums["all"], measured["new"], measured["old"])
            renewed = _added(sums["renewed"], jax.tree.map(mix, measured["old"], measured["new"]))
            seen = sums["seen"].at[index].set(True, mode="drop")
            complete = jnp.all(seen)
            choose = lambda yes, no: jax.tree.map(lambda y, n: jnp.where(complete, y, n), yes, no)
            sums = {
                "all": choose(renewed, total),
                "renewed": choose(_zeros(renewed), renewed),
                "seen": seen & ~complete,
            }
        return {"start": start, "factors": factors, "sums": sums}


def _check_index(model: Model, rows: Rows) -> None:
    count = model.row_count(rows)
    if rows.index is None and count not in (None, (model.size or 0) + rows.padding):
        raise ValueError(
            f"Sites() keep a message for each of {model.size} rows, and the batch has {count} without an index, so "
            "that it is not known which messages to replace: pass blr.Rows(batch, index)."
        )


def _without_padding(model: Model, name: str, rows: Rows, site: PyTree) -> PyTree:
    """A factor's fresh messages without those of rows that are no data: there are sites for the others alone."""
    if not rows.padding or not model.per_row(model.factors[name]):
        return site
    return jax.tree.map(lambda x: x[: -rows.padding], site)


def _change_of_sum(
    model: Model, q: Product, rows: Rows, fresh: dict[str, PyTree], aux: PyTree
) -> tuple[PyTree, PyTree | None]:
    """What the fresh messages of a batch's rows add to the sum of the rows' sites, and what they replace.

    On all rows they replace the whole sum, and the second value is None. For a mini-batch both are sums over its rows.
    The site of a row that was seen before in this pass is in the renewed sum already, and is subtracted from its
    fresh message. The sites of the other rows are the second sum.
    """
    with_rows = [name for name, factor in model.factors.items() if model.per_row(factor)]
    summed = lambda sites: _added(
        _no_message(q), *(summed_over_rows(model, name, q, rows, sites[name]) for name in with_rows)
    )
    if rows.index is None:
        return summed(fresh), None
    seen = aux["sums"]["seen"].at[rows.index].get(mode="fill", fill_value=False)
    where = lambda rows, x: jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)
    before = {name: _sites_of_batch(model, name, aux["factors"][name], rows.index) for name in with_rows}
    new = {
        name: jax.tree.map(lambda now, site: now - where(seen, site), fresh[name], before[name]) for name in with_rows
    }
    return summed(new), summed(jax.tree.map(lambda site: where(~seen, site), before))


def message(model: Model, name: str, q: Product, rows: Rows, key: Key | None = None) -> PyTree:
    """∇_μ E log f of one factor, for each of its blocks and, if it has rows, for each row.

    The message of a `LinearFactor` is in the terms of each row's output instead: {"outputs": (ν, κ), "others": …}, for
    the term ν f − ½ f κ f and for the blocks besides its predictors.
    """
    factor = model.factors[name]
    if isinstance(factor, LinearFactor):
        return _output_message(model, factor, q, rows, key)
    zero = {block: BlockView(q.blocks[block]).shift for block in factor.blocks}
    symmetric = lambda block, slope: q.blocks[block]._symmetric(slope)

    def gradient(rows: Rows, key: Key | None) -> PyTree:
        total = lambda shift: jnp.sum(model.term(name, {b: BlockView(q.blocks[b], shift[b]) for b in zero}, rows, key))
        return {block: symmetric(block, slope) for block, slope in jax.grad(total)(zero).items()}

    if not model.per_row(factor):
        return gradient(rows, key)
    examples = {other: rows.examples[other] for other in factor.data}
    of_row = lambda example, key: gradient(Rows(jax.tree.map(lambda x: x[None], example), None, None), key)
    if key is None:
        messages = jax.vmap(lambda example: of_row(example, None))(examples)
    else:
        count = jax.tree.leaves(examples)[0].shape[0]
        messages = jax.vmap(of_row)(examples, jax.random.split(key, count))
    return _weighted(model, messages, rows)


def _output_message(model: Model, factor: LinearFactor, q: Product, rows: Rows, key: Key | None) -> PyTree:
    """(ν, κ) of every row: E log p(y | f) is ν f − ½ f κ f plus a constant, to first order in q's displacement."""
    views = model.views(q)
    data, observed = observed_data(factor, rows)
    mean, covariance = factor.outputs(views, data)
    others = factor.blocks[len(factor.predictors) :]

    center = mean

    def total(mean: Array, covariance: Array) -> Array:
        values = factor.expected_log_likelihood(mean, covariance, views, data, key, center)
        return jnp.sum(values if observed is None else zero_where_missing(str(factor), observed, values))

    slope, curvature = jax.grad(total, argnums=(0, 1))(mean, covariance)
    dense = covariance.ndim > mean.ndim
    curvature = -(curvature + jnp.swapaxes(curvature, -1, -2)) if dense else -2 * curvature
    linear = slope + (jnp.einsum("nkl,nl->nk", curvature, mean) if dense else curvature * mean)
    other_messages: PyTree = {}
    if others:

        def row_value(m: Array, v: Array, example: PyTree, seen: Array | None, shift: PyTree) -> Array:
            displaced = {**views, **{block: BlockView(q.blocks[block], shift[block]) for block in others}}
            row = jax.tree.map(lambda x: x[None], example)
            values = factor.expected_log_likelihood(m[None], v[None], displaced, row, key, m[None])
            return jnp.sum(values if seen is None else zero_where_missing(str(factor), seen[None], values))

        zero = {block: views[block].shift for block in others}
        per_row = jax.vmap(jax.grad(row_value, argnums=4), in_axes=(0, 0, 0, 0, None))
        other_messages = per_row(mean, covariance, data, observed, zero)
    return _weighted(model, {"outputs": (linear, curvature), "others": other_messages}, rows)


def _weighted(model: Model, tree: PyTree, rows: Rows) -> PyTree:
    """The messages times their rows' weights. A weight of 0 gives 0 also where the message is not finite."""
    if rows.weights is None:
        return tree
    weights = rows.weights
    if rows.index is None:
        weights = model.row_scales(rows, len(weights))
    elif rows.count is not None and model.size is not None:
        # A mini-batch replaces its own messages, so that they are not scaled by N/M. What remains is the ratio of its
        # rows to what these stand for, which is that of all rows (`Model.select_rows`); padding is past the last row.
        present = jnp.sum(rows.index < model.size)
        ratio: Array = present / rows.count
        weights = weights * jnp.where(present == 0, 1.0, ratio)

    def weigh(x: Array) -> Array:
        scales = weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(scales == 0, 0, scales * x)

    return jax.tree.map(weigh, tree)


def summed_over_rows(model: Model, name: str, q: Product, rows: Rows, site: PyTree) -> dict[str, PyTree]:
    """The sum of a factor's sites over its rows, in each block's natural coordinates."""
    factor = model.factors[name]
    if not model.per_row(factor):
        return site
    sum_rows = lambda tree: jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)
    if not isinstance(factor, LinearFactor):
        return {block: sum_rows(part) for block, part in site.items()}
    data, _ = observed_data(factor, rows)
    names = [block for block, _ in factor.predictors]
    zero = {block: BlockView(q.blocks[block]).shift for block in names}

    def outputs(shift: PyTree) -> tuple[Array, Array]:
        return factor.outputs({block: BlockView(q.blocks[block], shift[block]) for block in names}, data)

    # The derivative in μ of Σ_n (ν_n f_n − ½ κ_n f_n²), by the chain rule through the outputs' moments: the derivatives
    # in m_n and v_n are ν_n − κ_n m_n and −½ κ_n.
    (mean, covariance), to_blocks = jax.vjp(outputs, zero)
    linear, curvature = site["outputs"]
    dense = covariance.ndim > mean.ndim
    slope = linear - (jnp.einsum("nkl,nl->nk", curvature, mean) if dense else curvature * mean)
    parts = to_blocks((slope, -0.5 * curvature))[0]
    return {b: q.blocks[b]._symmetric(part) for b, part in parts.items()} | sum_rows(site["others"])


def _sites_of_batch(model: Model, name: str, site: PyTree, index: Array | None) -> PyTree:
    """The sites of a batch's rows; 0 for padding, whose index is past the end."""
    if index is None or not model.per_row(model.factors[name]):
        return site
    return jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0), site)


def _no_message(q: Product) -> PyTree:
    """Zeros like λ."""
    return _zeros(q.natural())


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)


def _minus(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.negative, tree)


def _added(total: dict[str, PyTree], *parts: dict[str, PyTree]) -> dict[str, PyTree]:
    """The sum of messages by block, where a part need not have every block of the total."""
    for part in parts:
        total = total | {block: jax.tree.map(jnp.add, total[block], own) for block, own in part.items()}
    return total
