r"""Rows of $y = Wx + ε$ with known loadings and noise: x given what is there, log p of it, and what is not there.

Every row may miss entries of its own (NaN): its system $I + \sum_{d\,\text{there}} w_dw_d^⊤/ψ_d$ is solved with those
of others, all at once. In NumPy: nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..numerics.padding import map_chunks

_ENTRIES = 1 << 21  # of the systems that are solved at once


def scores(y: Any, loadings: Any, noise: Any, spread: Any = None) -> Float[ndarray, "N K"]:
    r"""$E[x_n \mid y_n]$ with loadings W (D, K), noise variances ψ (D,) and y (N, D) centred, NaN where missing.

    `spread` (D, K, K) are the rows' covariances where W is known in part, as to variational messages.

    >>> scores(np.array([[1.0, np.nan], [1.0, 1.0]]), np.ones((2, 1)), np.ones(2)).tolist()
    [[0.5], [0.6667]]
    """
    return _map_rows(lambda part: _solved(part, loadings, noise, spread)[0], y, loadings)


def log_likelihoods(y: Any, loadings: Any, noise: Any) -> Float[ndarray, " N"]:
    r"""$\log N(y_n \mid 0, WW^⊤ + \mathrm{diag}\,ψ)$ of the entries that are there."""

    def one(part: ndarray) -> ndarray:
        found, system = _solved(part, loadings, noise, None)
        there = ~np.isnan(part)
        # At its minimum |y − Wx|²/ψ + |x|² is yᵀΣ⁻¹y, without a difference of large numbers.
        gaps = np.where(there, part - found @ np.asarray(loadings).T, 0.0)
        square = (gaps**2 / noise).sum(1) + (found**2).sum(1)
        log = np.linalg.slogdet(system)[1] + there @ np.log(2 * np.pi * np.asarray(noise))
        return -0.5 * (log + square)

    return _map_rows(one, y, loadings)


def filled(y: Any, loadings: Any, noise: Any, spread: Any = None) -> Float[ndarray, "N D"]:
    r"""y with $E[y_{nd} \mid \text{what is there of } y_n]$ in the place of what is missing."""
    y = np.array(y, float)
    some = np.isnan(y).any(1)
    expected = scores(y[some], loadings, noise, spread) @ np.asarray(loadings).T
    y[some] = np.where(np.isnan(y[some]), expected, y[some])
    return y


def _solved(y: ndarray, loadings: Any, noise: Any, spread: Any) -> tuple[ndarray, ndarray]:
    """E x of every row, and the systems: one of each row, or one for all where nothing is missing."""
    loadings, noise = np.asarray(loadings, float), np.asarray(noise, float)
    there, size = ~np.isnan(y), loadings.shape[1]
    second = loadings[:, :, None] * loadings[:, None, :] + (0.0 if spread is None else np.asarray(spread))
    second = second.reshape(-1, size * size) / noise[:, None]
    seen = there[:1].astype(float) if there.all() else there.astype(float)
    system = (seen @ second).reshape(-1, size, size) + np.eye(size)
    right = (np.where(there, y, 0.0) / noise) @ loadings
    if len(system) < len(y):
        return np.linalg.solve(system[0], right.T).T, system
    return np.linalg.solve(system, right[..., None])[..., 0], system


def _map_rows(function: Callable[[ndarray], ndarray], y: Any, loadings: Any) -> ndarray:
    """Apply the function to so many rows at a time that their K×K systems fit into a bounded memory."""
    y, size = np.asarray(y, float), np.shape(loadings)[1]
    step = max(1, _ENTRIES // size**2)
    return map_chunks(lambda part: (function(part),), y, step)[0]
