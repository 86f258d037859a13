"""Series as rows of data: one series or many, of equal lengths or padded with NaN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

__all__ = ["sequences"]


def sequences(y: Any, *, scalar: bool = False) -> Float[Array, "N T ..."]:
    """One series or many as rows (N, T, D), the shorter ones padded with NaN.

    Args:
        y: an array (T, D) or (T,), one series; an array (N, T, D), many; or a list of series of any lengths.
        scalar: that a step is one number and not a vector: (T,) is one series, (N, T) are many, and rows are (N, T).

    >>> sequences([[1.0, 2.0, 3.0], [4.0]], scalar=True).tolist()
    [[1.0, 2.0, 3.0], [4.0, nan, nan]]
    """
    if isinstance(y, list | tuple) and not all(np.ndim(one) == 0 for one in y):
        parts = [np.asarray(one, float) for one in y]
        step_shapes = {part.shape[1:] for part in parts}
        if len(step_shapes) > 1 or any(part.ndim == 0 for part in parts):
            raise ValueError(
                f"The series of a list are arrays (T, …) whose steps have one shape, got {[p.shape for p in parts]}."
            )
        padded = np.full((len(parts), max(len(part) for part in parts), *step_shapes.pop()), np.nan)
        for row, part in zip(padded, parts, strict=True):
            row[: len(part)] = part
        padded = padded[..., None] if padded.ndim == 2 and not scalar else padded
    else:
        padded = np.asarray(y, float) if not isinstance(y, jax.Array) else y
        if not scalar and padded.ndim == 1:
            padded = padded[:, None]
        padded = padded[None] if padded.ndim == (1 if scalar else 2) else padded
    if padded.ndim != (2 if scalar else 3) or 0 in padded.shape:
        kind = "(T,) or (N, T)" if scalar else "(T,), (T, D) or (N, T, D)"
        raise ValueError(f"Series are {kind} with at least one step, or a list of such, got shape {np.shape(padded)}.")
    return jnp.asarray(padded, float)
