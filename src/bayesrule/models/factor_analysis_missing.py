r"""Factor analysis of rows with missing entries, $y = Wx + ε$ with known loadings W and noise variances ψ.

Every row may miss entries of its own (NaN), and has its own system $I + \sum_{d\,\text{observed}} w_dw_d^⊤/ψ_d$ for the
posterior of x; these are solved many at a time. In NumPy, so that nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..numerics.padding import map_chunks

_ENTRIES = 1 << 21  # entries of the systems that are solved at a time


def scores(y: Any, loadings: Any, noise: Any, covariance: Any = None) -> Float[ndarray, "N K"]:
    r"""$E[x_n \mid y_n]$ of every row.

    Args:
        y: centred rows (N, D), NaN where missing.
        loadings: W, (D, K).
        noise: ψ, (D,).
        covariance: (D, K, K), the covariance of each row of W under q, where W is not known exactly.

    >>> scores(np.array([[1.0, np.nan], [1.0, 1.0]]), np.ones((2, 1)), np.ones(2)).tolist()
    [[0.5], [0.6667]]
    """
    return _map_rows(lambda part: _solve(part, loadings, noise, covariance)[0], y, loadings)


def score_stds(y: Any, loadings: Any, noise: Any, covariance: Any = None) -> Float[ndarray, "N K"]:
    r"""The standard deviations of x given $y_n$, under the posterior of `scores`. Arguments as there.

    >>> score_stds(np.array([[1.0, np.nan], [1.0, 1.0]]), np.ones((2, 1)), np.ones(2)).round(4).tolist()
    [[0.7071], [0.5774]]
    """

    def of_rows(part: ndarray) -> ndarray:
        system = _solve(part, loadings, noise, covariance)[1]
        variances = np.diagonal(np.linalg.inv(system), axis1=1, axis2=2)
        return np.broadcast_to(np.sqrt(variances), (len(part), variances.shape[1]))

    return _map_rows(of_rows, y, loadings)


def log_likelihoods(y: Any, loadings: Any, noise: Any) -> Float[ndarray, " N"]:
    r"""$\log N(y_n \mid 0, WW^⊤ + \mathrm{diag}\,ψ)$ of the entries that were observed."""

    def of_rows(part: ndarray) -> ndarray:
        x, system = _solve(part, loadings, noise, None)
        observed = ~np.isnan(part)
        # yᵀΣ⁻¹y is the minimum of |y − Wx|²/ψ + |x|² over x, which is not a difference of large numbers.
        residuals = np.where(observed, part - x @ np.asarray(loadings).T, 0.0)
        square = (residuals**2 / noise).sum(1) + (x**2).sum(1)
        log_det = np.linalg.slogdet(system)[1] + observed @ np.log(2 * np.pi * np.asarray(noise))
        return -0.5 * (log_det + square)

    return _map_rows(of_rows, y, loadings)


def impute(y: Any, loadings: Any, noise: Any, covariance: Any = None) -> Float[ndarray, "N D"]:
    r"""y with every missing entry replaced by its expectation given the observed ones. Arguments as for `scores`."""
    y = np.array(y, float)
    incomplete = np.isnan(y).any(1)
    expected = scores(y[incomplete], loadings, noise, covariance) @ np.asarray(loadings).T
    y[incomplete] = np.where(np.isnan(y[incomplete]), expected, y[incomplete])
    return y


def _solve(y: ndarray, loadings: Any, noise: Any, covariance: Any) -> tuple[ndarray, ndarray]:
    """E x of every row, and the systems: one for each row, or a single one if nothing is missing."""
    loadings, noise = np.asarray(loadings, float), np.asarray(noise, float)
    observed, size = ~np.isnan(y), loadings.shape[1]
    second_moment = loadings[:, :, None] * loadings[:, None, :] + (
        0.0 if covariance is None else np.asarray(covariance)
    )
    second_moment = second_moment.reshape(-1, size * size) / noise[:, None]
    masks = observed[:1].astype(float) if observed.all() else observed.astype(float)
    system = (masks @ second_moment).reshape(-1, size, size) + np.eye(size)
    right = (np.where(observed, y, 0.0) / noise) @ loadings
    if len(system) < len(y):
        return np.linalg.solve(system[0], right.T).T, system
    return np.linalg.solve(system, right[..., None])[..., 0], system


def _map_rows(function: Callable[[ndarray], ndarray], y: Any, loadings: Any) -> ndarray:
    """Apply the function to so many rows at a time that their K×K systems fit into a bounded memory."""
    y, size = np.asarray(y, float), np.shape(loadings)[1]
    step = max(1, _ENTRIES // size**2)
    return map_chunks(lambda part: (function(part),), y, step)[0]
