r"""Sites: every factor's message stored by itself, $λ = \sum_i\tildeλ_i$ (`eq:blr_local`).

The rule on λ is a rule on the messages that λ is the sum of: $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ∇_μE_q\log f_i$. Storing
them costs memory for each row, and pays twice: a mini-batch replaces its own messages exactly, so that nothing has to
be scaled by N/M and no noise remains at the fixed point, and a row can be removed from q by subtracting its message.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..curvature.base import Curvature
from ..curvature.measurement import Measurement
from ..families.product import Product
from ..numerics.random import Key
from ..points.base import Points
from ..steps.needs import Need
from ..steps.schedule import equals
from .block_view import BlockView
from .data import Rows, observed_data
from .linear_factor import LinearFactor
from .model import Model


def _moves_as_a_sum(steps: Any) -> bool:
    """Whether every site moves as λ does, which is their sum: by one rate, towards its message."""
    extras = (steps.momentum, steps.average, steps.scaling, steps.sweep)
    plain = steps.units == "natural" and equals(steps.temperature, 1) and steps.rates.single
    return plain and not (steps.reverse or steps.lazy) and all(extra is None for extra in extras)


class Sites(Curvature[Product]):
    r"""The gradient in μ as a sum of stored messages: $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ∇_μE_q\log f_i$ (`eq:blr_local`).

    There is one site for each factor, and one for each row of a factor that has rows (in the space of its output, if
    that is linear in the blocks). A mini-batch updates its own sites only; the others keep their values, so nothing is
    scaled by N/M and repeated passes converge to the same q as the full data. The natural parameters that q starts from
    are a site too, which decays with every step.
    """

    meaning: ClassVar[str] = "∇_μ E_q log f of every factor and row, each kept (eq:blr_local)"
    remembers: ClassVar[bool] = True
    in_mu: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.points.exact,
            "Sites() differentiate a model's factors in μ: use Exact() points, and points of the factors.",
        ),
        (
            lambda p: _moves_as_a_sum(p.steps),
            "Sites() take plain steps of all blocks at once, since λ is to stay their sum: one rate, temperature 1, "
            "no sweep, momentum, averaging, scaling, reverse or lazy form.",
        ),
    )

    def initial_aux(self, objective: Any, q: Product) -> PyTree:
        """Zeros for every site, and the natural parameters that q starts from."""
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
        return {"start": q.natural(), "factors": sites}

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
        rows, fresh = objective.batch_rows(batch), {}
        # ∇_μ E log p = Σ_i new message_i. Since λ = start + Σ_i site_i, that is λ − start + Σ_i (new message_i −
        # site_i), where only the sites of this batch have new messages.
        total = jax.tree.map(jnp.subtract, q.natural(), aux["start"])
        for name in objective.factors:
            fresh[name] = message(objective, name, q, rows, objective.factor_key(name, key))
            old = _sites_of_batch(objective, name, aux["factors"][name], rows.index)
            change = jax.tree.map(jnp.subtract, fresh[name], old)
            for block, part in summed_over_rows(objective, name, q, rows, change).items():
                total[block] = jax.tree.map(jnp.add, total[block], part)
        value, _ = objective.expected(q, None, batch, None, key)
        gradient, curvature = q.derivatives(jax.tree.map(jnp.negative, total))
        return Measurement(value, gradient, curvature, {"fresh": fresh, "rows": rows.index})

    def updated_aux(self, objective: Any, before: PyTree, measured: PyTree, rate: Any) -> PyTree:
        """The sites after a step: those of the batch moved by ρ towards their new messages, as λ has been."""
        mix = lambda old, new: old + jnp.asarray(rate, old.dtype) * (new - old)
        start = jax.tree.map(lambda x: (1 - jnp.asarray(rate, x.dtype)) * x, before["start"])
        factors, index = {}, measured["rows"]
        for name, site in before["factors"].items():
            moved = jax.tree.map(mix, _sites_of_batch(objective, name, site, index), measured["fresh"][name])
            if index is not None and objective.per_row(objective.factors[name]):
                moved = jax.tree.map(lambda full, rows: full.at[index].set(rows, mode="drop"), site, moved)
            factors[name] = moved
        return {"start": start, "factors": factors}


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
    return _weighted(messages, rows)


def _output_message(model: Model, factor: LinearFactor, q: Product, rows: Rows, key: Key | None) -> PyTree:
    """(ν, κ) of every row: E log p(y | f) is ν f − ½ f κ f plus a constant, to first order in q's displacement."""
    views = model.views(q)
    data, observed = observed_data(factor, rows)
    mean, covariance = factor.outputs(views, data)
    others = factor.blocks[len(factor.predictors) :]

    def total(mean: Array, covariance: Array) -> Array:
        values = factor.expected_log_likelihood(mean, covariance, views, data, key)
        return jnp.sum(values if observed is None else jnp.where(observed, values, 0.0))

    slope, curvature = jax.grad(total, argnums=(0, 1))(mean, covariance)
    dense = covariance.ndim > mean.ndim
    curvature = -(curvature + jnp.swapaxes(curvature, -1, -2)) if dense else -2 * curvature
    linear = slope + (jnp.einsum("nkl,nl->nk", curvature, mean) if dense else curvature * mean)
    other_messages: PyTree = {}
    if others:

        def row_value(m: Array, v: Array, example: PyTree, shift: PyTree) -> Array:
            displaced = {**views, **{block: BlockView(q.blocks[block], shift[block]) for block in others}}
            row = jax.tree.map(lambda x: x[None], example)
            return factor.expected_log_likelihood(m[None], v[None], displaced, row, key).sum()

        zero = {block: views[block].shift for block in others}
        per_row = jax.vmap(jax.grad(row_value, argnums=3), in_axes=(0, 0, 0, None))
        other_messages = per_row(mean, covariance, data, zero)
        if observed is not None:
            keep = lambda x: jnp.where(observed.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0)
            other_messages = jax.tree.map(keep, other_messages)
    return _weighted({"outputs": (linear, curvature), "others": other_messages}, rows)


def _weighted(tree: PyTree, rows: Rows) -> PyTree:
    weights = rows.weights
    if weights is None:
        return tree
    weight = lambda x: x * weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return jax.tree.map(weight, tree)


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
