"""Where factor analysis starts: the principal axes of the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...numerics.checks import positive_int
from .. import factor_analysis_missing as factor_scores

_TURNS = 50  # of filling what is missing and of finding the axes


def principal(rows: np.ndarray, size: int, key: Any) -> tuple[Float[Array, "D K"], Float[Array, " D"]]:
    """The first principal axes, as long as their standard deviations, and what they leave of each column's variance."""
    size = positive_int("size", size, meaning="how many latent variables a row has")
    there = ~np.isnan(rows)
    if there.any():  # a row of which nothing is there says nothing
        rows, there = rows[there.any(1)], there[there.any(1)]
    scarce, variance = there.sum(0) < 2, np.var(np.where(there, rows, 0.0), axis=0)
    if np.any(np.isinf(rows)) or np.any(scarce):
        raise ValueError(
            f"The columns {np.flatnonzero(scarce | np.isinf(rows).any(0)).tolist()} are infinite or all but missing: "
            "leave them out."
        )
    if np.any(variance == 0):
        raise ValueError(f"The columns {np.flatnonzero(variance == 0).tolist()} do not vary: leave them out.")
    filled = np.where(there, rows, 0.0)
    found, left = _axes(filled, size, 0.05 * variance)
    if not there.all():
        # EM goes a long way slowly where the noise is small; what is missing is filled by turns with the axes.
        for _ in range(_TURNS):
            before, filled = filled, factor_scores.filled(rows, found, left)
            found, left = _axes(filled, size, 0.05 * variance)
            if np.mean((filled - before) ** 2) < 1e-6 * np.mean(variance):
                break
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))
    more = np.sqrt(0.1 * variance)[:, None] * random.normal(size=(len(variance), max(0, size - found.shape[1])))
    return jnp.asarray(np.concatenate([found, more], axis=1), float), jnp.asarray(left, float)


def _axes(rows: np.ndarray, size: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first principal axes (D, K), as long as their standard deviations, and what they leave of each variance."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    count = min(size, *rows.shape)
    found = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :count]
    return found, np.maximum(np.mean(rows**2, axis=0) - np.sum(found**2, axis=1), least)
