"""Ridge regression, y ∼ N(wᵀx + b, 1/β) with w ∼ N(0, 1/α): the likelihood of all rows is one message.

The message depends on the rows only through their sums of squares, so N rows are replaced by the at most D + 1 rows of
a triangular factor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..numerics.padding import column_bucket, pad
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..objectives.objective import Objective

_CHUNK = 1 << 16  # rows that are reduced at a time


class Rows(NamedTuple):
    """Sufficient statistics of rows (x, y): their weight, their means, and R of a QR decomposition around the means.

    RᵀR is the matrix of sums of squares around the means. R is computed from the rows themselves: it has the rounding
    error of the rows, and not that of their squares, and large means do not cancel.

    Attributes:
        size: the weight.
        mean: the means, less the origin.
        triangle: R.
        origin: one of the rows. Numbers that lie close to each other are subtracted without rounding, so that means
            less an origin of 10⁸ have the digits that 10⁸ would take, and so do the differences of the parts' means.
    """

    size: float
    mean: Float[np.ndarray, " D+1"]
    triangle: Float[np.ndarray, "R D+1"]
    origin: Any = 0.0

    @property
    def center(self) -> Float[np.ndarray, " D+1"]:
        """The means."""
        return self.origin + self.mean


def reduce_rows(
    x: Float[np.ndarray, "N D"],
    y: Float[np.ndarray, " N"],
    weights: Float[np.ndarray, " N"],
    before: Rows | None = None,
    *,
    centered: bool = True,
) -> Rows:
    """Reduce weighted rows, and those of earlier parts of the data, to `Rows`.

    Args:
        x: the features.
        y: the targets.
        weights: how many times each row counts.
        before: the `Rows` of earlier parts, if the data come in parts.
        centered: whether to subtract the means; else they are 0, for a model without an intercept.

    >>> r = reduce_rows(np.array([[1.0], [2.0]]), np.array([1.0, 3.0]), np.ones(2)).triangle
    >>> (r.T @ r).round(6).tolist()
    [[0.5, 1.0], [1.0, 2.0]]
    """
    for first in range(0, len(x), _CHUNK):
        part = slice(first, first + _CHUNK)
        block, weight = np.column_stack([x[part], y[part]]), weights[part]
        size = float(weight.sum())
        if size == 0:
            continue
        origin = block[np.argmax(weight > 0)] if centered else np.zeros(block.shape[1])
        block = block - origin
        mean = weight @ block / size if centered else origin
        rows = Rows(size, mean, np.sqrt(weight)[:, None] * (block - mean), origin)
        before = _triangular(rows) if before is None else merge_rows(before, rows)
    assert before is not None  # at least one row has a weight above 0
    return before


def merge_rows(one: Rows, other: Rows) -> Rows:
    """The `Rows` of two parts of the data.

    Two groups around their own means are one group around the common mean with one more row, the scaled difference of
    the means: sums of squares are never subtracted from each other.
    """
    size = one.size + other.size
    difference = (other.origin - one.origin) + (other.mean - one.mean)
    gap = math.sqrt(one.size * other.size / size) * difference
    triangle = np.vstack([one.triangle, gap[None], other.triangle])
    return _triangular(Rows(size, one.mean + other.size / size * difference, triangle, one.origin))


def _triangular(rows: Rows) -> Rows:
    return rows._replace(triangle=np.asarray(np.linalg.qr(rows.triangle, mode="r")))


def scores(params: PyTree, row: Float[Array, " D+1"]) -> Array:
    """wᵀx + b·c for a row (c, x): c is 1 in an ordinary row, and another number in a row of R."""
    return row[1:] @ params["w"] + row[0] * params.get("b", 0.0)


def squares(f: Array, y: Array) -> Array:
    """½(y − f)² = −log N(y | f, 1) up to a constant."""
    return 0.5 * (y - f) ** 2


def ridge(rows: int, regularizer: Any = None) -> Objective:
    """The objective for rows ((c, x), y) with noise variance 1; a weight of β makes it 1/β."""
    return Objective(squares, output=scores, linear=True, size=rows, regularizer=regularizer)


class Spectrum(NamedTuple):
    """What the evidence of ridge regression depends on.

    Attributes:
        squares: the squared singular values s² of the features, padded with zeros.
        along: the squares of y's components along their left singular vectors.
        rest: the sum of squares of what is left of y.
        size: N, less 1 for an intercept under a flat prior.
    """

    squares: Float[np.ndarray, " K"]
    along: Float[np.ndarray, " K"]
    rest: float
    size: float


class Decomposition(NamedTuple):
    """Features as UsVᵀ, and y along U: s, Uᵀy, Vᵀ, and the sum of squares of what is left of y."""

    values: Float[np.ndarray, " K"]
    along: Float[np.ndarray, " K"]
    right: Float[np.ndarray, "K D"]
    rest: float

    @property
    def is_full_rank(self) -> bool:
        """Whether the features determine every weight, except those of columns of zeros, which have the prior."""
        used = self.right[self.values > 0]
        return len(used) == int(np.sum(np.any(np.abs(used) > 1e-12, axis=0)))

    def spectrum(self, size: float) -> Spectrum:
        """The `Spectrum` for so many rows."""
        count = column_bucket(max(1, len(self.values)))
        return Spectrum(pad(self.values**2, count), pad(self.along**2, count), self.rest, float(size))

    def weights(self, ratio: float) -> Float[np.ndarray, " D"]:
        """The posterior mean of the weights for α/β = ratio, to rounding, however small the ratio is."""
        shrunk = np.divide(
            self.values * self.along, self.values**2 + ratio, out=np.zeros_like(self.values), where=self.values > 0
        )
        return shrunk @ self.right


def decompose(x: Float[np.ndarray, "R D"], y: Float[np.ndarray, " R"]) -> Decomposition:
    """Decompose rows, or the rows of R that they were reduced to. Singular values at the level of rounding are 0.

    >>> parts = decompose(np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]), np.array([3.0, 8.0, 1.0]))
    >>> parts.rest, parts.is_full_rank, parts.weights(0.0).round(6).tolist()
    (1.0, True, [1.0, 2.0])
    """
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values = np.where(values > max(x.shape) * np.finfo(float).eps * values.max(initial=0.0), values, 0.0)
    along = left.T @ y
    rest = y - left @ along
    return Decomposition(values, along, right, float(rest @ rest))


@compiled
def log_evidence(log_hyper: PyTree, rows: Spectrum) -> tuple[Array, PyTree]:
    r"""The log evidence as a function of log α ("w") and log β ("noise"), and its gradient.

    $$-\tfrac12\sum_k\log(1 + βs_k^2/α) + \tfrac N2\log\tfrac{β}{2π}
      - \tfrac β2\Big[\text{rest} + \sum_k\frac{\text{along}_k}{1 + βs_k^2/α}\Big]$$

    All terms of the bracket are positive: nothing cancels, however small the noise is beside the signal.
    """

    def value(log_hyper: PyTree) -> Array:
        ratio = jnp.exp(log_hyper["noise"] - log_hyper["w"]) * rows.squares
        errors = rows.rest + jnp.sum(rows.along / (1 + ratio))
        volume = jnp.sum(jnp.log1p(ratio)) - rows.size * (log_hyper["noise"] - math.log(2 * math.pi))
        return -0.5 * (volume + jnp.exp(log_hyper["noise"]) * errors)

    return jax.value_and_grad(value)(log_hyper)


_LEAST_CURVATURE = 3 / math.pi**2
"""Of the evidence in log α and log β: that of the log odds of a uniformly distributed share of explained variance."""


def degrees_of_freedom(hyper: dict[str, float], rows: Spectrum, held: tuple[str, ...] = ()) -> float:
    r"""The degrees of freedom ν of a new y, whose α and β are known only as well as the rows determine them.

    If log v has the variance 2/ν under the posterior of the hyper-parameters, a normal y with variance v is about a
    Student-t of ν degrees of freedom. Here v is the mean variance of a row that is predicted from the others, which is
    proportional to 1/(β(N − γ)) with the effective number of weights $γ = \sum_k βs_k^2/(α + βs_k^2)$, and the
    posterior of (log α, log β) is normal around the maximum of the evidence. Rows that determine D weights well leave
    N − D degrees of freedom, as for least squares; fewer rows than columns leave about N, because they determine the
    sum of noise and signal, though not how much is noise.

    Args:
        hyper: α ("w") and β ("noise"), where the evidence is largest.
        rows: the rows.
        held: which of them were given, and are known.

    >>> rows = Spectrum(np.full(4, 1e6), np.full(4, 1e6), 20.0, 24.0)
    >>> round(degrees_of_freedom({"w": 1.0, "noise": 1.0}, rows), 1), degrees_of_freedom({}, rows, ("w", "noise"))
    (20.0, inf)
    """
    # In the coordinates t = log(β/α) and log β; the rows of `free` are the derivatives in log α and in log β.
    free = np.array([row for name, row in (("w", (-1.0, 0.0)), ("noise", (1.0, 1.0))) if name not in held])
    if not len(free):
        return math.inf
    noise = hyper["noise"]
    signal = rows.squares > 0
    along, ratio = rows.along[signal], noise / hyper["w"] * rows.squares[signal]
    left = 1 / (1 + ratio)  # of each direction, the share that the prior decides
    known = ratio * left
    errors = rows.rest + float(np.sum(along * left))
    cross = -0.5 * noise * np.sum(along * left * known)
    bend = 0.5 * np.sum(known * left) - 0.5 * noise * np.sum(along * left * known * (left - known))
    precision = free @ np.array([[bend, cross], [cross, 0.5 * noise * errors]]) @ free.T
    values, vectors = np.linalg.eigh(precision)
    unexplained = float(np.sum(left)) + max(rows.size - len(left), 0.0)  # N − γ
    gradient = free @ np.array([np.sum(known * left) / max(unexplained, 1e-300), -1.0])
    # Where rows say nothing about the strength of the prior, or the noise was kept above rounding, the evidence is flat
    # or even bends upwards.
    variance = np.sum((gradient @ vectors) ** 2 / np.maximum(values, _LEAST_CURVATURE))
    return max(1.0, 2 / float(variance)) if variance > 0 else math.inf
