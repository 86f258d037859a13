"""Series as rows of data: one or many, of equal lengths or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def sequences(y: Any, *, scalar: bool = False) -> Float[Array, "N T ..."]:
    """One series or many as rows (N, T, D), those that are shorter filled up with NaN.

    An array (T, D) or (T,) is one series, (N, T, D) are many; a list has one series after another, of any lengths. With
    `scalar` a step is one number and not a vector: (T,) is one series, (N, T) are many, and rows are (N, T).

    >>> sequences([[1.0, 2.0, 3.0], [4.0]], scalar=True).tolist()
    [[1.0, 2.0, 3.0], [4.0, nan, nan]]
    """
    if isinstance(y, list | tuple) and not all(np.ndim(one) == 0 for one in y):
        parts = [np.asarray(one, float) for one in y]
        event = {part.shape[1:] for part in parts}
        if len(event) > 1 or any(part.ndim == 0 for part in parts):
            raise ValueError(f"A list of series has arrays (T, …) of one kind of step, got {[p.shape for p in parts]}.")
        filled = np.full((len(parts), max(len(part) for part in parts), *event.pop()), np.nan)
        for row, part in zip(filled, parts, strict=True):
            row[: len(part)] = part
        filled = filled[..., None] if filled.ndim == 2 and not scalar else filled
    else:
        filled = np.asarray(y, float) if not isinstance(y, jax.Array) else y
        if not scalar and filled.ndim == 1:
            filled = filled[:, None]
        filled = filled[None] if filled.ndim == (1 if scalar else 2) else filled
    if filled.ndim != (2 if scalar else 3) or 0 in filled.shape:
        kind = "(T,) or (N, T)" if scalar else "(T,), (T, D) or (N, T, D)"
        raise ValueError(f"Series are {kind} with at least one step, or a list of such, got shape {np.shape(filled)}.")
    return jnp.asarray(filled, float)
