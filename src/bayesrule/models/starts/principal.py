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


def _axes(rows: np.ndarray, size: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first principal axes times their standard deviations, and the residual variances, at least `least`."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    count = min(size, *rows.shape)
    axes = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :count]
    return axes, np.maximum(np.mean(rows**2, axis=0) - np.sum(axes**2, axis=1), least)
