"""Factor analysis and probabilistic PCA: rows are a few latent variables times loadings, plus noise."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .. import factors
from ..factor_graph.model import Model
from ..families.gamma import Gamma
from ..families.gaussian.full import Gaussian
from ..families.gaussian.shared import SharedGaussian
from ..numerics.random import Key
from ..objectives.batches import Weighted
from .starts.principal import maximum_likelihood, principal_components

__all__ = ["condensed", "factor_analysis", "ppca"]

_CONSTANT_PRECISION = 1e8  # of the latent variable that stands for the constant 1


def factor_analysis(
    y: Any,
    size: int,
    *,
    noise: Literal["each", "one"] = "each",
    priors: Literal["flat", "default"] = "flat",
    shared: bool = False,
    mean: bool = False,
    key: Key | None = None,
) -> Model:
    r"""$y_{nd} ∼ N(w_d^⊤x_n, 1/τ_d)$ with latent $x_n ∼ N(0, I)$, and loadings w and precisions τ unknown.

    Fit with `data={"y": y}`. Flat priors are maximum likelihood, for `em("loadings", "noise")`. The default ones, for
    `vmp()` and `svi()`, give every column of the loadings an unknown precision, so that the loadings of a latent
    variable that is not needed shrink to 0, and all precisions Gamma(10⁻³, 10⁻³).

    Args:
        y: rows (N, D), their columns centred; NaN is missing, entry by entry. The start is their principal components.
        size: the number of latent variables.
        noise: "each" for a precision of every column, "one" for a common one.
        priors: "flat" or "default".
        shared: whether the latent rows have one covariance in common: several times faster, and exact if nothing is
            missing and there are no mini-batches.
        mean: whether the model has an unknown mean, as one more column of the loadings, for a latent variable that is
            held at 1. The means of the observed entries of each column are not its estimate where entries are missing.
        key: a random key, for loadings beyond the number of principal components.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jax.random.normal(jax.random.key(0), (50, 1)) * jnp.array([1.0, 2.0, -1.0])
    >>> y = y - y.mean(0) + 0.1 * jax.random.normal(jax.random.key(1), (50, 3))
    >>> result = blr.fit(blr.em("loadings", "noise"), factor_analysis(y, 1), None, {"y": y}, steps=50)
    >>> bool(jnp.all(1 / result.q["noise"].mean < 0.03))
    True
    """
    rows = np.asarray(y, float)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"y has rows of numbers, (N, D), got {rows.shape}.")
    if noise not in ("each", "one"):
        raise ValueError(f'noise= is "each" (a precision for every column) or "one" for all, got {noise!r}.')
    if priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat" (maximum likelihood) or "default", got {priors!r}.')
    if shared and (mean or np.any(np.isnan(rows))):
        raise ValueError(
            "With missing entries or an unknown mean the rows' covariances differ, and shared=True gives them one: "
            "leave shared=True out."
        )
    start, residual_variance = principal_components(rows, size, key)
    if noise == "each" and priors == "flat" and not np.any(np.isnan(rows)):
        start, residual_variance = maximum_likelihood(rows, start, residual_variance)
    constant = jnp.zeros(size)
    if mean:
        start, size = jnp.pad(start, ((0, 0), (0, 1))), size + 1
        constant = jnp.zeros(size).at[-1].set(1.0)
    precision = jnp.asarray(np.broadcast_to(10 * np.eye(size), (rows.shape[1], size, size)), float)
    per_row = Gaussian(constant, jnp.diag(1.0 + _CONSTANT_PRECISION * constant))
    latent = SharedGaussian(jnp.zeros((len(rows), size))) if shared else per_row
    rate = jnp.asarray(np.mean(np.asarray(residual_variance)) if noise == "one" else residual_variance)
    blocks: dict[str, Any] = {"loadings": Gaussian(start, precision), "noise": Gamma(jnp.asarray(2.0), rate)}
    terms = {
        "latent": factors.prior("latent", latent),
        "y": factors.bilinear("y", "latent", "loadings", precision="noise"),
    }
    if priors == "default":
        vague = Gamma(jnp.asarray(1e-3), jnp.asarray(1e-3))
        blocks["scales"] = Gamma(jnp.ones(size), jnp.ones(size))
        terms |= {f"prior of {name}": factors.prior(name, vague) for name in ("scales", "noise")}
        terms["loadings"] = factors.gaussian("loadings", precision="scales")
    if shared:
        return Model({"latent": latent, **blocks}, terms)
    return Model(blocks, terms, local={"latent": latent})


def ppca(
    y: Any, size: int, *, priors: Literal["flat", "default"] = "flat", shared: bool = False, key: Key | None = None
) -> Model:
    r"""Probabilistic PCA, $y_n ∼ N(Wx_n, σ^2I)$: `factor_analysis` with one noise for all columns. Arguments as there.

    >>> print(ppca([[1.0, 2.0], [-1.0, 0.0], [0.0, -2.0]], 1))
    Model with 3 blocks and 2 factors
      latent    Gaussian[1], one for each row
      loadings  Gaussian[2, 1]
      noise     Gamma[]
      log-joint, the sum of
      latent    E log Gaussian prior(latent)
      y         E log bilinear(latent, loadings, noise; y)
    """
    return factor_analysis(y, size, noise="one", priors=priors, shared=shared, key=key)


def condensed(y: Any, count: int) -> Weighted:
    r"""`count` weighted rows with the same sufficient statistics as y, $\sum_n y_ny_n^⊤$ and N.

    A fit of complete, centred rows depends on them only through these, so that its steps and its bound are the same, at
    the cost of `count` rows.

    Args:
        y: complete, centred rows (N, D).
        count: at least min(N, D), which is enough for any N.

    >>> rows = condensed(np.arange(8.0).reshape(4, 2), 2)
    >>> y, weights = np.asarray(rows.examples["y"]), np.asarray(rows.weights)
    >>> ((y.T * weights) @ y).round(6).tolist(), weights.tolist()
    ([[56.0, 68.0], [68.0, 84.0]], [2.0, 2.0])
    """
    rows = np.asarray(y, float)
    return condensed_triangle(np.asarray(np.linalg.qr(rows, mode="r")), len(rows), count)


def condensed_triangle(triangle: np.ndarray, rows: int, count: int) -> Weighted:
    """`condensed` rows from R of a QR decomposition of all rows, to which rows in parts are reduced in one pass.

    Args:
        triangle: R.
        rows: N, of how many rows.
        count: at least as many as R has rows.
    """
    if len(triangle) > count:
        raise ValueError(
            f"{rows} rows of {triangle.shape[1]} numbers need at least {len(triangle)} in their place, got {count}."
        )
    padding = np.zeros((count - len(triangle), triangle.shape[1]))
    reduced = np.concatenate([triangle, padding]) * np.sqrt(count / rows)
    return Weighted({"y": jnp.asarray(reduced)}, jnp.asarray(np.full(count, rows / count)))


def mirrored(triangle: np.ndarray, rows: int) -> np.ndarray:
    """A few rows of mean 0 with the same second moments as so many rows of which R is the triangle.

    >>> few = mirrored(np.array([[3.0, 1.0], [0.0, 2.0]]), 8)
    >>> few.mean(0).tolist(), (8 * few.T @ few / len(few)).round(6).tolist()
    ([0.0, 0.0], [[9.0, 3.0], [3.0, 5.0]])
    """
    return np.concatenate([triangle, -triangle]) * np.sqrt(len(triangle) / rows)
