r"""A Gaussian over the columns of a table: fitted to rows with missing entries, and draws of the entries that miss.

The covariance has the form $WW^⊤ + \mathrm{diag}\,ψ$. Up to 64 columns it is any covariance; wider tables keep their
largest principal components, and what these leave over is independent noise. All is in NumPy, so that nothing is
compiled: the model of a table is fitted whether or not an entry is missing, because one may be missing in new rows.

The covariance has an inverse-Wishart prior around independent columns, whose strength s maximises the evidence. So it
is also defined where there are more columns than rows. What is not known of it after N rows is not left out: the
predictive distribution of a row is Student's t with N + s + 2 degrees of freedom. Missing entries are drawn from the
Gaussian that has its conditional mean and variance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.special import gammaln, ndtri

_FULL_COLUMNS = 64  # Up to these the covariance is a full matrix, and so is the one of a row's missing entries.
_FACTORS = 8, 32  # The least and the most principal components that a wider table keeps: K²D is at most the next one.
_LOADINGS_BUDGET = 1 << 19
_MOST_ROWS = 20_000  # Beyond these, and beyond what the two budgets below allow, a random subset of the rows is fitted.
_ENTRIES_BUDGET = 1 << 21  # Entries of the rows that are fitted.
_SYSTEMS_BUDGET = 1 << 23  # K³ summed over the rows: the work of an iteration where every row misses other entries.
_FEWEST_ROWS = 400, 1000  # Each budget leaves at least so many rows.
_CHUNK_ENTRIES = 1 << 21  # Entries of the largest array that is held at a time.
_ITERATIONS = 50, 10  # of EM at most, for a full matrix and for a wide table.
_TOLERANCE = 1e-3  # In standard deviations of a column: EM ends when no expected entry moves further.
_LEAST_STRENGTH = 1e-8  # of the prior, for each row, so that columns may all but determine one another.


class _Conditional(NamedTuple):
    """What the observed entries of some rows say of their factors; rows with the same entries missing share systems."""

    observed: Bool[ndarray, "P D"]
    """The patterns of observed entries."""
    covariance: Float[ndarray, "P K K"]
    """The covariance of a row's factors given its observed entries, one for each pattern."""
    pattern: ndarray
    """The pattern of every row."""
    filled: Float[ndarray, "N D"]
    """The rows, missing entries replaced by their expectations."""
    distance: Float[ndarray, " N"]
    """The squared Mahalanobis distance of the observed entries from the mean."""


@dataclass(frozen=True)
class ColumnGaussian:
    """The distribution of a row.

    Args:
        mean: (D,).
        loadings: W, (D, K).
        noise: ψ, (D,), above 0.
        degrees: the degrees of freedom of the predictive distribution, whose scale matrix WWᵀ + diag ψ is; ∞ for a
            Gaussian with that covariance.
    """

    mean: Float[ndarray, " D"]
    loadings: Float[ndarray, "D K"]
    noise: Float[ndarray, " D"]
    degrees: float = np.inf

    def first_columns(self, count: int) -> ColumnGaussian:
        """The distribution of the first `count` columns, whatever the others are."""
        return ColumnGaussian(self.mean[:count], self.loadings[:count], self.noise[:count], self.degrees)

    @property
    def dimensions(self) -> int:
        """How many normal numbers a draw takes."""
        columns, factors = self.loadings.shape
        return columns if columns <= _FULL_COLUMNS else columns + factors

    def fill(self, rows: ndarray) -> ndarray:
        """The rows (N, D), every missing entry (NaN) replaced by its expectation given the observed ones.

        >>> pair = ColumnGaussian(np.zeros(2), np.ones((2, 1)), np.ones(2))
        >>> pair.fill(np.array([[1.0, np.nan]])).tolist()
        [[1.0, 0.5]]
        """
        filled = np.array(rows, float)
        for part in self._chunks(filled, 1):
            filled[part] = self._condition(filled[part]).filled
        return filled

    def draw(self, rows: ndarray, normals: ndarray) -> Float[ndarray, "N M D"]:
        """M copies of every row, in which missing entries are drawn from their distribution given the observed ones.

        Args:
            rows: (N, D), NaN where missing.
            normals: standard normal numbers, `dimensions` for each draw: (M, ·) for all rows, or (N, M, ·).

        >>> pair = ColumnGaussian(np.zeros(2), np.ones((2, 1)), np.ones(2))       # y₂ | y₁ = 1 is N(½, 1½)
        >>> pair.draw(np.array([[1.0, np.nan]]), np.array([[0.0, 0.0], [2.0, 0.0]]))[0, :, 1].round(3).tolist()
        [0.5, 2.949]
        """
        rows = np.asarray(rows, float)
        drawn = np.empty((len(rows), normals.shape[-2], rows.shape[1]))
        for part in self._chunks(rows, normals.shape[-2]):
            drawn[part] = self._draw(rows[part], normals if normals.ndim == 2 else normals[part])
        return drawn

    def _draw(self, rows: ndarray, normals: ndarray) -> ndarray:
        given = self._condition(rows)
        missing = ~given.observed
        most = int(missing.sum(axis=1).max(initial=0))
        inflation = np.ones(len(rows))
        if np.isfinite(self.degrees):
            # The variance of Student's t: its scale grows with the distance of what was observed.
            count = given.observed.sum(axis=1)[given.pattern]
            inflation = np.sqrt((self.degrees + given.distance) / (self.degrees + count - 2))
        if most <= _FULL_COLUMNS:
            # The missing columns of each pattern come first, so that they take the first of the normal numbers.
            place = np.argsort(given.observed, axis=1, kind="stable")[:, :most]
            is_missing = np.take_along_axis(missing, place, axis=1)
            loadings = self.loadings[place]
            covariance = loadings @ given.covariance @ loadings.swapaxes(1, 2)
            covariance = np.where(is_missing[:, :, None] & is_missing[:, None, :], covariance, 0.0)
            diagonal = np.arange(most)
            covariance[:, diagonal, diagonal] += np.where(is_missing, self.noise[place], 1.0)
            root = np.linalg.cholesky(covariance) * is_missing[:, :, None]
            step = _apply_to_rows(root, normals[..., :most], given.pattern)
            steps = np.zeros((len(rows), normals.shape[-2], rows.shape[1]))
            np.put_along_axis(steps, place[given.pattern][:, None, :], step, axis=2)
        else:
            root = np.linalg.cholesky(given.covariance)
            factors = self.loadings.shape[1]
            steps = _apply_to_rows(root, normals[..., :factors], given.pattern) @ self.loadings.T
            steps += np.sqrt(self.noise) * normals[..., factors : factors + len(self.noise)]
            steps *= missing[given.pattern][:, None, :]
        return given.filled[:, None, :] + inflation[:, None, None] * steps

    def _condition(self, rows: ndarray) -> _Conditional:
        """What the observed entries of these rows, few enough for one chunk, say of the others."""
        rows = rows - self.mean
        is_observed = ~np.isnan(rows)
        packed, first, pattern = np.unique(
            np.packbits(is_observed, axis=1), axis=0, return_index=True, return_inverse=True
        )
        observed, pattern = is_observed[first], pattern.reshape(-1)
        factors = self.loadings.shape[1]
        products = (self.loadings[:, :, None] * self.loadings[:, None, :]).reshape(len(self.loadings), factors**2)
        systems = (observed / self.noise) @ products
        covariance = np.linalg.inv(systems.reshape(len(packed), factors, factors) + np.eye(factors))
        covariance = (covariance + covariance.swapaxes(1, 2)) / 2
        known = np.where(is_observed, rows, 0.0)
        scores = (covariance[pattern] @ ((known / self.noise) @ self.loadings)[:, :, None])[:, :, 0]
        expected = scores @ self.loadings.T
        residuals = np.where(is_observed, known - expected, 0.0)
        distance = (residuals**2 / self.noise).sum(axis=1) + (scores**2).sum(axis=1)
        filled = self.mean + np.where(is_observed, known, expected)
        return _Conditional(observed, covariance, pattern, filled, distance)

    def _chunks(self, rows: ndarray, draws: int) -> Iterator[slice]:
        """Slices of so many rows that the arrays of a chunk are of bounded size."""
        columns, factors = self.loadings.shape
        missing = min(int(np.isnan(rows).sum(axis=1).max(initial=0)), _FULL_COLUMNS)
        step = max(1, _CHUNK_ENTRIES // max(factors**2, missing * (factors + missing), draws * columns, 1))
        for begin in range(0, len(rows), step):
            yield slice(begin, begin + step)


def fit_columns(rows: ndarray, seed: int = 0) -> ColumnGaussian:
    """Fit a Gaussian to rows (N, D), NaN where an entry is missing; by EM where some are, else in closed form.

    Args:
        rows: at least one row; a column without any value counts as standard normal.
        seed: of the choice of rows where there are too many.

    >>> rows = np.random.default_rng(0).normal(size=(1000, 2)) @ [[1.0, 1.0], [0.0, 1.0]]
    >>> fit_columns(rows).fill(np.array([[np.nan, 1.0]])).round(1).tolist()       # half of the second column
    [[0.5, 1.0]]
    """
    rows = np.asarray(rows, float)
    columns = rows.shape[1]
    is_full = columns <= _FULL_COLUMNS
    factors = columns if is_full else int(np.clip(np.sqrt(_LOADINGS_BUDGET / columns), *_FACTORS))
    rows = rows[~np.isnan(rows).all(axis=1)]
    most = min(_MOST_ROWS, max(_ENTRIES_BUDGET // columns, _FEWEST_ROWS[0]))
    if np.isnan(rows).any():
        most = min(most, max(_SYSTEMS_BUDGET // factors**3, _FEWEST_ROWS[1]))
    if len(rows) > most:
        rows = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])]
    observed = ~np.isnan(rows)
    counts = np.maximum(observed.sum(axis=0), 1)
    center = np.where(observed, rows, 0.0).sum(axis=0) / counts
    scale = np.sqrt((np.where(observed, rows - center, 0.0) ** 2).sum(axis=0) / counts)
    scale = np.where(scale > 0, scale, 1.0)
    rows = (rows - center) / scale
    # Entries that are missing say nothing, so that the rows count as fewer than they are.
    size = max(len(rows) * float(observed.mean()) if len(rows) else 0.0, 1.0)
    fitted = ColumnGaussian(np.zeros(columns), np.zeros((columns, 0)), np.ones(columns))
    if not len(rows):
        return fitted
    filled = np.full_like(rows, np.inf)
    for _ in range(_ITERATIONS[0 if is_full else 1]):
        # The E-step: expected entries, and their covariances summed over the rows.
        before, (filled, covariance) = filled, _expected_rows(fitted, rows)
        mean = filled.mean(axis=0)
        fitted = _from_moments(mean, filled - mean, covariance / len(rows), size, factors)
        if observed.all() or np.abs(filled - before).max() < _TOLERANCE:
            break
    loadings = fitted.loadings * scale[:, None]
    return ColumnGaussian(center + scale * fitted.mean, loadings, fitted.noise * scale**2, fitted.degrees)


def _expected_rows(gaussian: ColumnGaussian, rows: ndarray) -> tuple[ndarray, ndarray]:
    """The rows with missing entries at their expectations, and the sum of the covariances of these entries.

    The sum is a matrix (D, D); of a wide table only its diagonal (D,), which counts what is missing together as
    independent.
    """
    columns, factors = gaussian.loadings.shape
    is_full = columns <= _FULL_COLUMNS
    filled = np.empty_like(rows)
    total = np.zeros((columns, columns) if is_full else columns)
    step = max(1, _CHUNK_ENTRIES // max(columns * max(factors, columns if is_full else 1), 1))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        given = gaussian._condition(rows[part])
        filled[part] = given.filled
        count = np.bincount(given.pattern, minlength=len(given.observed)).astype(float)
        missing = (~given.observed).astype(float)
        transformed = gaussian.loadings @ given.covariance
        noise = (count @ missing) * gaussian.noise
        if is_full:
            covariance = (transformed @ gaussian.loadings.T) * (missing[:, :, None] * missing[:, None, :])
            total += np.einsum("p,pij->ij", count, covariance) + np.diag(noise)
        else:
            variance = np.einsum("pdk,dk->pd", transformed, gaussian.loadings)
            total += count @ (missing * variance) + noise
    return filled, total


def _from_moments(mean: ndarray, centered: ndarray, covariance: ndarray, size: float, factors: int) -> ColumnGaussian:
    """The distribution of a new row, from centred rows and what their mean square lacks: a matrix, or its diagonal."""
    count, columns = centered.shape
    if covariance.ndim == 2:
        values, vectors = np.linalg.eigh(centered.T @ centered / count + covariance)
        rest = np.zeros(columns)
    elif count < columns:
        values, scores = np.linalg.eigh(centered @ centered.T / count)
        kept = values > 1e-12 * max(values[-1], 1e-300)
        values, scores = values[kept], scores[:, kept]
        vectors = centered.T @ scores / np.sqrt(count * values)
        rest = covariance
    else:
        values, vectors = np.linalg.eigh(centered.T @ centered / count)
        rest = covariance
    values = np.maximum(values[::-1], 0.0)
    vectors = vectors[:, ::-1]
    strength = _choose_strength(values, columns, size)
    degrees = size + strength + 2
    unit = (1 + 1 / size) / degrees
    rest = rest + vectors[:, factors:] ** 2 @ values[factors:]
    loadings = vectors[:, :factors] * np.sqrt(unit * size * values[:factors])
    return ColumnGaussian(mean, loadings, unit * (strength + size * rest), degrees)


def _choose_strength(values: ndarray, columns: int, size: float) -> float:
    """The strength s of the prior that maximises the evidence, given the eigenvalues of the rows' covariance."""
    grid = size * np.geomspace(_LEAST_STRENGTH, 1e4, 97)
    return float(grid[np.argmax(log_evidence(grid, values, columns, size))])


def log_evidence(strength: ndarray, values: ndarray, columns: int, size: float) -> ndarray:
    r"""The log evidence of centred rows for each strength s of the prior, up to a constant.

    The prior is inverse-Wishart with the scale sI and $D + 1 + s$ degrees of freedom: it has the mean I, the covariance
    of independent standardised columns, and counts about as much as s rows.

    Args:
        strength: values of s.
        values: the eigenvalues of the mean square of the rows; those that are left out are 0.
        columns: D.
        size: the number of rows.
    """
    degrees = columns + 1 + strength
    zeros = columns - len(values)
    log_det = np.log(strength[:, None] + size * values).sum(axis=1) + zeros * np.log(strength)
    halves = (degrees[:, None] - np.arange(columns)) / 2
    gammas = (gammaln(halves + size / 2) - gammaln(halves)).sum(axis=1)
    return degrees / 2 * columns * np.log(strength) - (degrees + size) / 2 * log_det + gammas


def _apply_to_rows(roots: ndarray, normals: ndarray, pattern: ndarray) -> ndarray:
    """For every row, its pattern's root times each of the normal vectors: (N, M, ·)."""
    if normals.ndim == 2:
        return (normals @ roots.swapaxes(1, 2))[pattern]
    return normals @ roots[pattern].swapaxes(1, 2)


def balanced_normals(draws: int, dimensions: int, seed: int) -> Float[ndarray, "M R"]:
    """Normal vectors that stand for a distribution: their mean is 0, and up to M − 1 dimensions their covariance I.

    So M draws of a linear function have its exact mean and variance. Further dimensions are balanced in blocks of
    M − 1. Each begins as M quantiles of the normal distribution in a random order (a Latin hypercube).

    >>> z = balanced_normals(8, 2, seed=0)
    >>> bool(np.allclose(z.mean(0), 0)), bool(np.allclose(z.T @ z / 8, np.eye(2)))
    (True, True)
    """
    rng = np.random.default_rng(seed)
    quantiles = ndtri((np.arange(draws) + 0.5) / draws)
    blocks = []
    for begin in range(0, dimensions, draws - 1):
        width = min(draws - 1, dimensions - begin)
        block = rng.permuted(np.tile(quantiles[:, None], (1, width)), axis=0)
        orthogonal, triangle = np.linalg.qr(block)
        blocks.append(np.sqrt(draws) * orthogonal * np.sign(np.diag(triangle)))
    return np.concatenate(blocks, axis=1)
