"""Mixtures of Gaussians with full or diagonal covariances, for EM, variational messages or stochastic ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import factors
from ..factor_graph import expected_log
from ..factor_graph.model import Model
from ..families.base import ExponentialFamily
from ..families.dirichlet import Dirichlet
from ..families.gamma import NormalGamma
from ..families.product import Product
from ..families.wishart import NormalWishart
from ..numerics.random import Key
from .starts.clusters import Priors, assign_to_clusters, gaussian_components, variance_floor, with_priors


def gaussian_mixture(
    y: Any,
    components: int,
    *,
    covariance: Literal["full", "diag"] = "full",
    priors: Priors = "flat",
    floor: float = 0.0,
    key: Key | None = None,
) -> Model:
    r"""$p(y_n) = \sum_kπ_kN(y_n \mid m_k, Λ_k^{-1})$ with full or diagonal precisions, the assignments summed out.

    Fit with `data={"y": y}`. Flat priors are maximum likelihood, for `em(order="parallel")`; the default ones, for
    `vmp(order="parallel")` and `svi(rate)`, are Dirichlet(1) and those of `gaussian_hmm`.

    Args:
        y: rows (N, D). A row of NaN is missing; one that is missing in part is an error. The start is a k-means
            clustering of them.
        components: the number of components K.
        covariance: "full" or "diag".
        priors: "flat", "default", or a dict of members for the blocks "weights" and "components".
        floor: is added to the sum of squares of which EM's variances are the mean, so that none becomes 0.
        key: a random key, for k-means.

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
    assignments = assign_to_clusters(rows, components, covariance, key)
    factor, flat, default = gaussian_components(rows, assignments, covariance, "components")
    counts = assignments.one_hot.sum((0, 1)) + 1 / components
    blocks = {"weights": Dirichlet(1 + jnp.asarray(counts, float)), "components": flat}
    defaults = {"weights": Dirichlet(jnp.ones(components)), "components": default}
    blocks, terms = with_priors(blocks, defaults, priors)
    return Model(blocks, {**terms, **variance_floor("components", floor), "y": factors.mixture("weights", factor)})


def usual_priors(y: Any, components: int, covariance: Literal["full", "diag"] = "full") -> dict[str, ExponentialFamily]:
    """scikit-learn's weak default priors, for `gaussian_mixture(priors=…)`.

    With m and S the mean and the covariance of all rows: Dirichlet(1/K) for the weights and, for the components, a
    normal–Wishart of mean m, count 1, D degrees of freedom and scale S⁻¹ (a normal–gamma of shape D/2 and rate S/2).
    """
    rows = np.asarray(y, float)
    rows = rows[~np.isnan(rows).any(1)]
    size, mean = rows.shape[1], jnp.asarray(rows.mean(0))
    cov = np.atleast_2d(np.cov(rows.T))
    cov = cov + 1e-6 * np.diag(np.diag(cov))  # invertible also where one column is a linear function of others
    if covariance == "full":
        shared: Any = NormalWishart(mean, jnp.ones(()), jnp.asarray(float(size)), jnp.asarray(np.linalg.inv(cov)))
    else:
        shared = NormalGamma(mean, jnp.ones(()), jnp.asarray(0.5 * size), jnp.asarray(0.5 * np.diag(cov)))
    return {"weights": Dirichlet(jnp.full(components, 1 / components)), "components": shared}


def responsibilities(model: Model, q: Product, y: Any) -> Float[Array, "N K"]:
    r"""$q(z_n = k) ∝ \exp(E\log π_k + E\log N(y_n \mid k))$, (N, K); for a missing row ∝ exp E log π_k.

    Args:
        model: a `gaussian_mixture`.
        q: its fitted q.
        y: rows (N, D), those of the fit or new ones.
    """
    factor = model.factors["y"]
    by_name = model.views(q)
    views = [by_name[name] for name in factor.blocks]
    rows = jnp.asarray(y, float)
    present = ~jnp.any(jnp.isnan(rows), axis=1, keepdims=True)
    rows = jnp.where(present, rows, 0.0)
    rows = factor.features(rows) if factor.features is not None else rows
    components: Any = factor.function.args[0]
    log_likelihoods = expected_log.per_component(components, tuple(views[1:]), (rows,))
    return jax.nn.softmax(views[0].expectation + jnp.where(present, log_likelihoods, 0.0), axis=-1)
