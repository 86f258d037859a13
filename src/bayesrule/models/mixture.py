"""Mixtures of Gaussians with four kinds of covariances, for EM, variational messages or stochastic ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import factors
from ..factor_graph.model import Model
from ..families.base import ExponentialFamily
from ..families.dirichlet import Dirichlet
from ..families.gamma import NormalGamma
from ..families.product import Product
from ..families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from ..families.wishart import NormalWishart
from ..numerics.random import Key
from .starts.clusters import (
    Priors,
    assign_to_clusters,
    gaussian_components,
    variance_floor,
    with_priors,
    with_values,
)

__all__ = ["gaussian_mixture", "responsibilities", "usual_priors"]

Covariance = Literal["full", "tied", "diag", "spherical"]
COVARIANCES: tuple[Covariance, ...] = ("full", "tied", "diag", "spherical")


def gaussian_mixture(
    y: Any,
    components: int,
    *,
    covariance: Covariance = "full",
    priors: Priors = "flat",
    floor: float = 0.0,
    key: Key | None = None,
    start: int = 0,
    weights: Any = None,
    means: Any = None,
    precisions: Any = None,
) -> Model:
    r"""$p(y_n) = \sum_kπ_kN(y_n \mid m_k, Λ_k^{-1})$, the assignments summed out.

    Fit with `data={"y": y}`. Flat priors are maximum likelihood, for `em(order="parallel")`; the default ones, for
    `vmp(order="parallel")` and `svi(rate)`, are Dirichlet(1) and those of `gaussian_hmm`.

    Args:
        y: rows (N, D), NaN where an entry is missing. The start is a k-means clustering of them.
        components: the number of components K.
        covariance: "full"; "tied", one covariance for all components; "diag"; or "spherical", one variance for all
            entries of a component.
        priors: "flat", "default", or a dict of members for the blocks "weights" and "components".
        floor: is added to the sum of squares of which EM's variances are the mean, so that none becomes 0.
        key: a random key, for k-means.
        start: 0 for a start at k-means clusters; 1, 2, … for rougher ones, which differ more from key to key.
        weights: π to start from, (K,), instead of the clusters'.
        means: m to start from, (K, D).
        precisions: Λ to start from, (K, D, D), (D, D) for "tied", (K, D) for "diag" or (K,) for "spherical".

    >>> import bayesrule as blr, jax
    >>> y = jax.random.normal(jax.random.key(0), (200, 2)).at[100:].add(5.0)
    >>> model = gaussian_mixture(y, 2)
    >>> result = blr.fit(blr.em(order="parallel"), model, None, {"y": y}, steps=20)
    >>> sorted(round(float(m[0])) for m in result.q["components"].mean["mean"])
    [0, 5]
    >>> bool(responsibilities(model, result.q, y).max(1).min() > 0.9)             # which one a row belongs to
    True
    """
    rows = np.asarray(y, float)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"y has rows of numbers, (N, D), got {rows.shape}: one column is y[:, None].")
    if np.any(np.isinf(rows)):
        raise ValueError("y has infinite entries: a missing row is NaN.")
    rows = rows[None]
    assignments = assign_to_clusters(rows, components, covariance, key, start, COVARIANCES)
    factor, flat, default = gaussian_components(rows, assignments, covariance, "components")
    flat = with_values(flat, means, precisions)
    counts = assignments.one_hot.sum((0, 1)) + 1 / components
    if weights is not None:
        counts = counts.sum() * np.asarray(weights, float)
    blocks = {"weights": Dirichlet(jnp.asarray(1 + counts, float)), "components": flat}
    defaults = {"weights": Dirichlet(jnp.asarray(np.ones(components))), "components": default}
    blocks, terms = with_priors(blocks, defaults, priors)
    return Model(blocks, {**terms, **variance_floor("components", floor), "y": factors.mixture("weights", factor)})


def usual_priors(y: Any, components: int, covariance: Covariance = "full") -> dict[str, ExponentialFamily]:
    """scikit-learn's weak default priors, for `gaussian_mixture(priors=…)`.

    With m and S the mean and the covariance of all rows: Dirichlet(1/K) for the weights and, for the components, a
    normal–Wishart of mean m, count 1, D degrees of freedom and scale S⁻¹ (a normal–gamma of shape D/2 and rate S/2, for
    spherical covariances with the mean of the variances in S).

    Args:
        y: rows (N, D).
        components: K.
        covariance: the kind of the components' covariances, as for `gaussian_mixture`.

    >>> priors = usual_priors(np.arange(12.0).reshape(6, 2), 4)
    >>> priors["weights"].concentration.tolist(), type(priors["components"]).__name__
    ([0.25, 0.25, 0.25, 0.25], 'NormalWishart')
    """
    rows = np.asarray(y, float)
    complete = rows[~np.isnan(rows).any(1)]
    size, mean = rows.shape[1], jnp.asarray(np.nanmean(rows, axis=0))
    # Covariances need both entries of a row; where few rows have all of them, the variances alone will do.
    enough = len(complete) > size or len(complete) == np.sum(~np.isnan(rows).all(1))
    cov = np.atleast_2d(np.cov(complete.T)) if enough else np.diag(np.nanvar(rows, axis=0, ddof=1))
    return priors_from_moments(np.asarray(mean), cov, components, covariance)


def priors_from_moments(
    center: np.ndarray, cov: np.ndarray, components: int, covariance: Covariance = "full"
) -> dict[str, ExponentialFamily]:
    """`usual_priors` from the mean and the covariance of all rows.

    Args:
        center: m.
        cov: S.
        components: K.
        covariance: the kind of the components' covariances.
    """
    size, mean = len(center), jnp.asarray(center)
    cov = cov + 1e-6 * np.diag(np.diag(cov))  # invertible also where one column is a linear function of others
    if covariance == "full":
        shared: Any = NormalWishart(mean, jnp.ones(()), jnp.asarray(float(size)), jnp.asarray(np.linalg.inv(cov)))
    elif covariance == "tied":
        means, scale = np.broadcast_to(np.asarray(mean), (components, size)), np.linalg.inv(cov)
        shared = TiedNormalWishart(jnp.asarray(means), jnp.ones(components), float(size), jnp.asarray(scale))
    elif covariance == "spherical":
        shared = SphericalNormalGamma(mean, jnp.ones(size), 0.5 * size, 0.5 * float(np.diag(cov).mean()))
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
    model, data = model.for_data({"y": jnp.asarray(y, float)})
    factor: Any = model.factors["y"]
    views = model.views(q)
    arrays, mask = model.observations("y", model.batch_rows(data))
    observed = jnp.asarray(mask)
    arrays[factor.data[-1]] = arrays[factor.data[-1]][:, None]  # (N, 1, D) broadcasts every row against all components
    terms = factor.components.value(views, arrays)
    if terms.ndim == 3:  # independent entries
        log_likelihoods = jnp.sum(terms, axis=-1, where=observed[:, None])
    else:
        log_likelihoods = jnp.where(jnp.any(observed, axis=1, keepdims=True), terms, 0.0)
    return jax.nn.softmax(views[factor.blocks[0]].expectation + log_likelihoods, axis=-1)
