r"""A narrower start for likelihoods that cannot be integrated over a wide q.

From a wide prior E e^f overflows, or has the value of its far tails, and no step from there can be formed. But the
likelihood can be evaluated at q's mean. `narrowed` replaces every likelihood that is not conjugate by a Gaussian at the
mean m_n of each output, with the likelihood's own curvature there as its precision: $\tildeλ_n = (κ_nm_n, −½κ_n)$ with
$κ_n = |∂^2\log p(y_n \mid m_n)|$, at least 1. The outputs then have variances of at most $1/κ_n$, and a mean between
theirs before and that of the prior. It is one step of the delta method without its slope.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ..families.point_mass import Peak
from ..families.product import Product
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .data import Rows, observed_data
from .linear_factor import LinearFactor
from .model import Model
from .sites import message, summed_over_rows


def narrowable_blocks(model: Model, q: Product) -> frozenset[str]:
    """The Gaussian blocks that are the outputs' predictors in a likelihood which is not conjugate; none if there are
    local blocks, whose rows would each need a start of their own, or blocks that are read at their mode."""
    if model.local or any(isinstance(block, Peak) for block in q.blocks.values()):
        return frozenset()
    return frozenset(
        name
        for factor in model.factors.values()
        if isinstance(factor, LinearFactor) and not factor.conjugate
        for name, _ in factor.predictors
    )


@compiled
def better_start(
    model: Model, q: Product, start: Product, batch: PyTree, key: Key | None
) -> tuple[Product, Bool[Array, ""], Bool[Array, ""]]:
    """The narrowed start; whether its bound is a number and above that of q, which was reached from the start; and
    whether it is far above that of the start itself: by a hundred times its absolute value, and by so many nats that
    their rounding errors, which stay in λ, are larger than a hundredth of one.

    Other arguments as for `narrowed`.
    """
    narrow = narrowed(model, start, batch, key)
    first, reached, other = (model.bound(member, batch, key) for member in (start, q, narrow))
    usable = jnp.isfinite(other) & narrow.inside()
    lowest = jnp.maximum(100 * (1 + jnp.abs(other)), 0.01 / jnp.finfo(other.dtype).eps)
    return narrow, usable & ~(reached >= other), usable & ~(first >= -lowest)


def narrowed(model: Model, q: Product, batch: PyTree, key: Key | None = None) -> Product:
    """q with its `narrowable_blocks` narrowed to the width of the likelihoods at its mean; the others stay.

    Args:
        model: the model.
        q: where to begin.
        batch: all data.
        key: a random key, if a factor has random points.
    """
    names, rows = narrowable_blocks(model, q), model.batch_rows(batch)
    total = {name: jax.tree.map(jnp.zeros_like, q.blocks[name].natural()) for name in names}
    for name, factor in model.factors.items():
        if not names & set(factor.blocks):
            continue
        if isinstance(factor, LinearFactor) and not factor.conjugate:
            site = _gaussian_at_mean(model, factor, q, rows)
        else:
            site = message(model, name, q, rows, model.factor_key(name, key))
        for block, part in summed_over_rows(model, name, q, rows, site).items():
            if block in names:
                total[block] = jax.tree.map(jnp.add, total[block], part)
    moved = {name: q.blocks[name].with_natural(total[name]) for name in names}
    return Product({name: moved.get(name, block) for name, block in q.blocks.items()})


def _gaussian_at_mean(model: Model, factor: LinearFactor, q: Product, rows: Rows) -> PyTree:
    """The sites (κm, κ) of every row's outputs, in the form of `message`; 0 where the row is missing."""
    views = model.views(q)
    data, observed = observed_data(factor, rows)
    mean, covariance = factor.outputs(views, data)
    second = factor.second_derivatives(mean, views, data)
    diagonal = second if mean.ndim == 1 else jnp.diagonal(second, axis1=-2, axis2=-1)
    curvature = jnp.maximum(jnp.where(jnp.isfinite(diagonal), jnp.abs(diagonal), 1.0), 1.0)
    if observed is not None:
        extra = tuple(range(mean.ndim, observed.ndim))
        observed = jnp.all(observed, axis=extra) if extra else observed
        curvature = jnp.where(observed.reshape(observed.shape + (1,) * (mean.ndim - observed.ndim)), curvature, 0.0)
    if rows.weights is not None:
        weights = model.row_scales(rows, len(mean)).astype(curvature.dtype)
        curvature = curvature * weights.reshape((-1,) + (1,) * (mean.ndim - 1))
    linear = curvature * mean
    if covariance.ndim > mean.ndim:
        curvature = curvature[..., None] * jnp.eye(mean.shape[-1], dtype=curvature.dtype)
    others = {
        block: jax.tree.map(lambda x: jnp.zeros((len(mean), *x.shape), x.dtype), q.blocks[block].natural())
        for block in factor.blocks[len(factor.predictors) :]
    }
    return {"outputs": (linear, curvature), "others": others}
