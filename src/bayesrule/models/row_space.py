r"""Linear models of many columns and few rows, in the coordinates of the space that the rows span.

With the singular value decomposition $X = ZV^⊤$, $Z = Us$, outputs are $Xw = Za$ with $a = V^⊤w$: the data say nothing
about the rest of w. Under the isotropic prior $N(0, 1/α)$ the rest keeps its prior and is independent of a, whose prior
is N(0, 1/α) too. So a fit takes at most as many weights as there are rows, whatever the likelihood, and the posterior
of w has the precision $αI + V(S_a − αI)V^⊤$: a diagonal and a product of low rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian

_FEWEST_COLUMNS = 100  # With fewer, a dense precision is as quick, and simpler.


def is_wide(rows: int, columns: int) -> bool:
    """Whether a table has so many columns that a fit in the space of its rows pays."""
    return columns >= _FEWEST_COLUMNS and columns >= 2 * rows


def span(x: Float[np.ndarray, "N D"]) -> tuple[Float[np.ndarray, "N R"], Float[np.ndarray, "R D"]]:
    """Z and Vᵀ with x = ZVᵀ and orthonormal rows of Vᵀ; directions at the level of rounding are left out."""
    left, values, right = np.linalg.svd(x, full_matrices=False)
    kept = values > max(x.shape) * np.finfo(float).eps * values.max(initial=0.0)
    kept[:1] = True  # at least one, where all columns are zero
    return left[:, kept] * values[kept], right[kept]


def lift(q: Gaussian, basis: Float[np.ndarray, "R D"], prior_precision: float | None) -> LowRankGaussian:
    """The posterior of w from that of a = Vᵀw.

    Args:
        q: the posterior over {"b", "w"} or {"w"} in the coordinates of the rows' space.
        basis: Vᵀ.
        prior_precision: α; None while a fit that learns it is on its way, for the largest that q allows.
    """
    mean = {name: np.asarray(leaf) for name, leaf in q.mean.items()}
    count = mean["b"].size if "b" in mean else 0
    precision = np.asarray(q.precision)
    if prior_precision is None:
        prior_precision = float(np.linalg.eigvalsh(precision[count:, count:])[0])
    prior = np.concatenate([np.zeros(count), np.full(len(precision) - count, prior_precision)])
    likelihood = precision - np.diag(prior)
    diagonal = prior.copy()
    if count:
        # The intercept has a flat prior, and a diagonal must be positive: it gets half of what the data surely give it.
        corner, side, rest = likelihood[:count, :count], likelihood[:count, count:], likelihood[count:, count:]
        given_weights = corner - side @ np.linalg.lstsq(rest, side.T, rcond=None)[0]
        diagonal[:count] = 0.5 * max(np.linalg.eigvalsh(given_weights)[0], np.finfo(float).eps * np.trace(corner))
    values, vectors = np.linalg.eigh(precision - np.diag(diagonal))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    weights = root[count:].reshape(len(basis), -1)  # each weight's outputs and columns of the root beside each other
    lifted = (basis.T @ weights).reshape(-1, root.shape[1])
    factor = np.vstack([root[:count], lifted])
    mean["w"] = np.tensordot(basis.T, mean["w"], axes=1)
    by_name: dict[str, Any] = {name: np.full(leaf.shape, prior_precision) for name, leaf in mean.items()}
    if count:
        by_name["b"] = np.full(mean["b"].shape, diagonal[0])
    return LowRankGaussian(mean, by_name, factor)


def project(q: LowRankGaussian, inputs: Float[np.ndarray, "N P"]) -> tuple[Gaussian, Float[np.ndarray, "N R"]]:
    """The posterior of the coordinates of the space that these inputs span, and the inputs in them.

    Args:
        q: a posterior over {"b", "w"} or {"w"} with one output.
        inputs: rows of (1, x), or of x where there is no "b".
    """
    coordinates, basis = span(inputs)
    vector = np.concatenate([np.ravel(q.mean[name]) for name in sorted(q.mean)])
    diagonal, factor = np.asarray(q.diagonal), np.asarray(q.factor)
    scaled = factor / diagonal[:, None]
    capacitance = np.eye(factor.shape[1]) + factor.T @ scaled
    along = scaled.T @ basis.T
    covariance = (basis / diagonal) @ basis.T - along.T @ np.linalg.solve(capacitance, along)
    return Gaussian(basis @ vector, np.linalg.inv(0.5 * (covariance + covariance.T))), coordinates
