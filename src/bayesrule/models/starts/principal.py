"""Where factor analysis and linear-Gaussian state spaces start: the principal components of the rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...numerics.checks import positive_int
from ...numerics.random import Key
from ..factor_analysis_missing import impute
from .clusters import numpy_random

_ITERATIONS = 50  # of imputing the missing entries and computing the components, at most
_LIKELIHOOD_ITERATIONS = 3000
_LIKELIHOOD_TOLERANCE = 1e-10  # nats for each row that a step gains, of which hundreds may follow
_LEAST_NOISE = 1e-5  # of a column's variance: where the maximum is at 0 (a Heywood case), EM starts above it.
_MOST_COLUMNS = 100  # beyond which decompositions cost more than the steps of EM that they save


def principal_components(
    rows: np.ndarray, size: int, key: Key | None
) -> tuple[Float[Array, "D K"], Float[Array, " D"]]:
    """The first principal axes times their standard deviations, (D, K), and the residual variance of each column.

    Args:
        rows: centred rows (N, D), NaN where missing.
        size: K. Axes beyond the rank of the rows are random.
        key: a random key, for these.
    """
    size = positive_int("size", size, meaning="how many latent variables a row has")
    observed = ~np.isnan(rows)
    if observed.any():  # rows without any observed entry are left out
        rows, observed = rows[observed.any(1)], observed[observed.any(1)]
    too_few, variance = observed.sum(0) < 2, np.var(np.where(observed, rows, 0.0), axis=0)
    if np.any(np.isinf(rows)) or np.any(too_few):
        raise ValueError(
            f"The columns {np.flatnonzero(too_few | np.isinf(rows).any(0)).tolist()} are infinite or all but missing: "
            "leave them out."
        )
    if np.any(variance == 0):
        raise ValueError(f"The columns {np.flatnonzero(variance == 0).tolist()} do not vary: leave them out.")
    imputed = np.where(observed, rows, 0.0)
    axes, residual = _axes(imputed, size, 0.05 * variance)
    if not observed.all():
        # EM converges slowly where the noise is small, so a start from poorly imputed entries would cost many steps:
        # impute and recompute the axes in turn until the imputed entries no longer change.
        for _ in range(_ITERATIONS):
            before, imputed = imputed, impute(rows, axes, residual)
            axes, residual = _axes(imputed, size, 0.05 * variance)
            if np.mean((imputed - before) ** 2) < 1e-6 * np.mean(variance):
                break
    shape = len(variance), max(0, size - axes.shape[1])
    random_axes = np.sqrt(0.1 * variance)[:, None] * numpy_random(key).normal(size=shape)
    return jnp.asarray(np.concatenate([axes, random_axes], axis=1), float), jnp.asarray(residual, float)


def maximum_likelihood(
    rows: np.ndarray, axes: Float[Array, "D K"], residual: Float[Array, " D"]
) -> tuple[Float[Array, "D K"], Float[Array, " D"]]:
    """Loadings and noise variances of factor analysis near the maximum of the likelihood, for complete rows.

    The likelihood has several maxima. Two noises to start from, the residual variances of the principal components and
    the variances of the columns, often lead to different ones, and the better is returned.

    Args:
        rows: centred rows (N, D).
        axes: the start of the loadings, returned where columns of them are random or the rows have many columns.
        residual: the start of the noise variances.
    """
    columns, size = rows.shape[1], axes.shape[1]
    if size >= min(rows.shape) or columns > _MOST_COLUMNS:
        return axes, residual
    covariance = rows.T @ rows / len(rows)
    starts = np.asarray(residual, float), np.diagonal(covariance)
    _, loadings, noise = max((_climb_likelihood(covariance, size, start) for start in starts), key=lambda end: end[0])
    return jnp.asarray(loadings, float), jnp.asarray(noise, float)


def _climb_likelihood(covariance: np.ndarray, size: int, noise: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    r"""Climb the likelihood of factor analysis from a noise: its end (without constants), loadings and noise.

    With the noise given, the best loadings are the eigenvectors of $ψ^{-1/2}Sψ^{-1/2}$ with eigenvalues above 1, and
    with these $ψ = \mathrm{diag}(S − WW^⊤)$ (Jöreskog, 1967). Such a step is far longer than one of EM where a noise is
    small: there EM stops or creeps before the maximum.
    """
    variance, likelihood = np.diagonal(covariance), -np.inf
    loadings = np.zeros((len(variance), size))
    for _ in range(_LIKELIHOOD_ITERATIONS):
        root = np.sqrt(noise)
        values, vectors = np.linalg.eigh(covariance / np.outer(root, root))
        kept = np.maximum(values[::-1][:size], 1.0)
        before, rest = likelihood, np.sum(values) - np.sum(kept)
        likelihood = -0.5 * float(np.sum(np.log(noise)) + np.sum(np.log(kept)) + rest)
        loadings = root[:, None] * vectors[:, ::-1][:, :size] * np.sqrt(kept - 1.0)
        if likelihood - before < _LIKELIHOOD_TOLERANCE:
            break
        noise = np.maximum(variance - np.sum(loadings**2, axis=1), _LEAST_NOISE * variance)
    return likelihood, loadings, noise


def _axes(rows: np.ndarray, size: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first principal axes times their standard deviations, and the residual variances, at least `least`."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    count = min(size, *rows.shape)
    axes = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :count]
    return axes, np.maximum(np.mean(rows**2, axis=0) - np.sum(axes**2, axis=1), least)
