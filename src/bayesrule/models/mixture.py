"""Mixtures of Gaussians, full or diagonal: by EM, variational messages or mini-batches of them."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import expected_logs, factors
from ..families.dirichlet import Dirichlet
from ..model import Model
from .clusters import Priors, clustered, gaussian_components, with_priors


def gaussian_mixture(
    y: Any,
    components: int,
    *,
    covariance: Literal["full", "diag"] = "full",
    priors: Priors = "flat",
    key: Any = None,
) -> Model:
    r"""$p(y_n) = \sum_kπ_kN(y_n \mid m_k, Λ_k^{-1})$ with full or diagonal precisions, the choices summed out.

    `y` is (N, D). Fit with `data={"y": y}`: flat priors are maximum likelihood, for `em(order="parallel")`; the default
    ones, for `vmp(order="parallel")` and `svi(rate)`, are Dirichlet(1) and those of `gaussian_hmm`; a dict gives other
    members for the blocks "weights" and "components". The start is a k-means clustering (`key` seeds it). A row that is
    NaN is missing; one that is missing in part is an error.

    >>> import bayesrule as blr, jax
    >>> y = jax.random.normal(jax.random.key(0), (200, 2)).at[100:].add(5.0)
    >>> result = blr.fit(blr.em(order="parallel"), gaussian_mixture(y, 2), None, {"y": y}, steps=20)
    >>> sorted(round(float(m[0])) for m in result.q["components"].mean["mean"])
    [0, 5]
    """
    rows = jnp.asarray(y, float)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"y has rows of numbers, (N, D), got {rows.shape}: one column is y[:, None].")
    if bool(jnp.any(jnp.isinf(rows))):
        raise ValueError("y has infinite entries: a missing row is NaN.")
    rows = rows[None]
    found = clustered(rows, components, covariance, key)
    factor, flat, usual = gaussian_components(rows, found, covariance, "components")
    counts = found.chosen.sum((0, 1)) + 1 / components
    blocks = {"weights": Dirichlet(1 + jnp.asarray(counts, float)), "components": flat}
    known = {"weights": Dirichlet(jnp.ones(components)), "components": usual}
    blocks, terms = with_priors(blocks, known, priors)
    return Model(blocks, {**terms, "y": factors.mixture("weights", factor)})


def responsibilities(model: Model, q: Any, y: Any) -> Float[Array, "N K"]:
    """Each row's share of each component, softmax of E log π_k + E log N(y_n | component k); a missing row's of π."""
    factor = model.factors["y"]
    seen = model.seen(q)
    views = [seen[name] for name in factor.blocks]
    rows = jnp.asarray(y, float)
    present = ~jnp.any(jnp.isnan(rows), axis=1, keepdims=True)
    rows = jnp.where(present, rows, 0.0)
    rows = factor.features(rows) if factor.features is not None else rows
    components: Any = factor.function.args[0]
    found = expected_logs.per_component(components, tuple(views[1:]), (rows,))
    return jax.nn.softmax(views[0].expectation + jnp.where(present, found, 0.0), axis=-1)
