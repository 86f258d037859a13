"""Ridge regression, y ∼ N(wᵀx + b, 1/β) with w ∼ N(0, 1/α): the whole data is one message, of few rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..objectives.objective import Objective

_BLOCK = 1 << 16  # rows that are reduced at a time


class Rows(NamedTuple):
    """All that the model asks of rows (x, y): their number, their means, and R of a QR decomposition of what is left.

    RᵀR is the sum of squares around the means, without their squared rounding errors, or those of large means.
    """

    size: float
    mean: Float[np.ndarray, " D+1"]
    triangle: Float[np.ndarray, "R D+1"]


def rows_of(
    x: Float[np.ndarray, "N D"],
    y: Float[np.ndarray, " N"],
    weights: Float[np.ndarray, " N"],
    before: Rows | None = None,
    *,
    centered: bool = True,
) -> Rows:
    """The weighted rows, and those `before` them: data may come in parts. Without `centered` the means are 0.

    >>> r = rows_of(np.array([[1.0], [2.0]]), np.array([1.0, 3.0]), np.ones(2)).triangle
    >>> (r.T @ r).round(6).tolist()
    [[0.5, 1.0], [1.0, 2.0]]
    """
    for first in range(0, len(x), _BLOCK):
        part = slice(first, first + _BLOCK)
        block, each = np.column_stack([x[part], y[part]]), weights[part]
        size = float(each.sum())
        if size == 0:
            continue
        mean = each @ block / size if centered else np.zeros(block.shape[1])
        stack = [np.sqrt(each)[:, None] * (block - mean)]
        if before is not None:
            gap = math.sqrt(before.size * size / (before.size + size)) * (mean - before.mean)
            stack = [before.triangle, gap[None], *stack]
            mean = before.mean + size / (before.size + size) * (mean - before.mean)
            size += before.size
        before = Rows(size, mean, np.asarray(np.linalg.qr(np.vstack(stack), mode="r")))
    assert before is not None  # there is at least one row that counts
    return before


def scores(params: PyTree, row: Float[Array, " D+1"]) -> Array:
    """wᵀx + b·c for a row (c, x)."""
    return row[1:] @ params["w"] + row[0] * params.get("b", 0.0)


def squares(f: Array, y: Array) -> Array:
    """½(y − f)²: minus log N(y; f, 1) but for its constant."""
    return 0.5 * (y - f) ** 2


def ridge(rows: int, regularizer: Any = None) -> Objective:
    """The objective of unit noise, for rows ((c, x), y): a weight of β makes the noise 1/β."""
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
