"""Mixtures of Gaussians, full or diagonal: by EM, variational messages or mini-batches of them."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import factors
from ..factor_graph import expected_log as expected_logs
from ..factor_graph.model import Model
from ..families.base import ExponentialFamily
from ..families.dirichlet import Dirichlet
from ..families.gamma import NormalGamma
from ..families.wishart import NormalWishart
from .starts.clusters import Priors, clustered, gaussian_components, not_singular, with_priors


def gaussian_mixture(
    y: Any,
    components: int,
    *,
    covariance: Literal["full", "diag"] = "full",
    priors: Priors = "flat",
    floor: float = 0.0,
    key: Any = None,
) -> Model:
    r"""$p(y_n) = \sum_kπ_kN(y_n \mid m_k, Λ_k^{-1})$ with full or diagonal precisions, the choices summed out.

    `y` is (N, D). Fit with `data={"y": y}`: flat priors are maximum likelihood, for `em(order="parallel")`; the default
    ones, for `vmp(order="parallel")` and `svi(rate)`, are Dirichlet(1) and those of `gaussian_hmm`; a dict gives other
    members for the blocks "weights" and "components". `floor` is added to the sum of squares that is each variance of
    EM's, so that none becomes 0. The start is a k-means clustering (`key` seeds it). A row that is NaN is missing; one
    that is missing in part is an error.

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
    return Model(blocks, {**terms, **not_singular("components", floor), "y": factors.mixture("weights", factor)})


def usual_priors(y: Any, components: int, covariance: Literal["full", "diag"] = "full") -> dict[str, ExponentialFamily]:
    """scikit-learn's, which say little: with m and S the mean and covariance of all rows, Dirichlet(1/K) and a
    normal–Wishart of mean m, count 1, D degrees of freedom and scale S⁻¹ (a normal–gamma of shape D/2 and rate S/2)."""
    rows = np.asarray(y, float)
    rows = rows[~np.isnan(rows).any(1)]
    size, mean = rows.shape[1], jnp.asarray(rows.mean(0))
    spread = np.atleast_2d(np.cov(rows.T))
    spread = spread + 1e-6 * np.diag(np.diag(spread))  # columns may be linear in each other
    if covariance == "full":
        shared: Any = NormalWishart(mean, jnp.ones(()), jnp.asarray(float(size)), jnp.asarray(np.linalg.inv(spread)))
    else:
        shared = NormalGamma(mean, jnp.ones(()), jnp.asarray(0.5 * size), jnp.asarray(0.5 * np.diag(spread)))
    return {"weights": Dirichlet(jnp.full(components, 1 / components)), "components": shared}


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
