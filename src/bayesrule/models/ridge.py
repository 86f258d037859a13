"""Ridge regression, y ∼ N(wᵀx + b, 1/β) with w ∼ N(0, 1/α): the whole data is one message, kept as a triangle."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..objective import Objective

_BLOCK = 1 << 16  # rows that are reduced at a time


def triangle(
    x: Float[np.ndarray, "N D"],
    y: Float[np.ndarray, " N"],
    weights: Float[np.ndarray, " N"],
    before: Float[np.ndarray, "R D+2"] | None = None,
    *,
    intercept: bool = True,
) -> Float[np.ndarray, "R D+2"]:
    """R of a QR decomposition of the weighted rows (c, x, y): RᵀR, all that the model asks of the data, without its
    squared rounding errors. `before` is the triangle of earlier rows, so that data may come in parts.

    >>> r = triangle(np.array([[1.0], [2.0]]), np.array([1.0, 3.0]), np.ones(2))
    >>> (r.T @ r).round(6).tolist()
    [[2.0, 3.0, 4.0], [3.0, 5.0, 7.0], [4.0, 7.0, 10.0]]
    """
    for first in range(0, len(x), _BLOCK):
        part = slice(first, first + _BLOCK)
        rows = np.column_stack([with_ones(x[part], intercept), y[part]]) * np.sqrt(weights[part])[:, None]
        before = np.asarray(np.linalg.qr(rows if before is None else np.vstack([before, rows]), mode="r"))
    assert before is not None  # there is at least one row
    return before


def with_ones(x: Float[np.ndarray, "N D"], intercept: bool = True) -> Float[np.ndarray, "N D+1"]:
    """Rows (c, x): c is 1, or 0 where there is no intercept."""
    return np.column_stack([np.full(len(x), float(intercept)), x])


def scores(params: PyTree, row: Float[Array, " D+1"]) -> Array:
    """wᵀx + b·c for a row (c, x) of a triangle."""
    return row[1:] @ params["w"] + row[0] * params.get("b", 0.0)


def squares(f: Array, y: Array) -> Array:
    """½(y − f)²: minus log N(y; f, 1) but for its constant."""
    return 0.5 * (y - f) ** 2


def ridge(rows: int, regularizer: Any = None) -> Objective:
    """The objective of unit noise, for the rows ((c, x), y) of a triangle: a weight of β makes the noise 1/β."""
    return Objective(squares, output=scores, linear=True, size=rows, regularizer=regularizer)


def noisy(hyper: PyTree, message: PyTree) -> tuple[PyTree, Array]:
    """The message and the constant of noise 1/β, for `conjugate_evidence`.

    `message` is the one of unit noise with `size` N and `squares` yᵀy, which go into the constant. A scale of the
    message is a scale of the precision: $β\\tildeλ_1$, and $½N\\log(β/2π) − ½βy^⊤y$.
    """
    natural, size, total = message
    precision = hyper["noise"]
    return (
        tuple(precision * part for part in natural),
        0.5 * size * jnp.log(precision / (2 * math.pi)) - 0.5 * precision * total,
    )
