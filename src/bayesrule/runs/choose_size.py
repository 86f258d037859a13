"""How many groups, factors or topics a table has, by scikit-learn's estimators, which need no compilation.

Groups and factors are chosen by the Bayesian information criterion, topics by the perplexity of rows that were kept
back. The model of the run is then fitted with the number that was chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

_MOST_ROWS = 5_000  # of which the number is chosen
_MOST_GROUPS, _MOST_FACTORS = 10, 10
_TOPICS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
_PATIENCE = 2  # A search ends after so many numbers that are no better than the best.


class Choice(NamedTuple):
    """The parameters of the best one, the numbers that were tried, and the criterion at each; lower is better."""

    params: dict[str, Any]
    sizes: list[int]
    criterion: list[float]
    name: str


def choose_groups(x: np.ndarray, seed: int, fixed: dict[str, Any]) -> Choice:
    """The number of Gaussians, and whether their covariances are full, by BIC.

    Args:
        x: standardised rows, without missing values.
        seed: of the starts.
        fixed: parameters of the estimator that are given; "covariance_type" among them is not chosen.
    """
    from sklearn.mixture import GaussianMixture

    x = _subset(x, seed)
    kinds = [fixed["covariance_type"]] if "covariance_type" in fixed else ["full", "diag"]

    def criterion(size: int) -> tuple[float, dict[str, Any]]:
        by_kind = {}
        for kind in kinds:
            mixture = GaussianMixture(size, covariance_type=kind, reg_covar=1e-4, n_init=2, random_state=seed).fit(x)
            by_kind[kind] = float(mixture.bic(x))
        best = min(by_kind, key=lambda kind: by_kind[kind])
        return by_kind[best], {"n_components": size, "covariance_type": best}

    return _search(range(1, max(1, min(_MOST_GROUPS, len(x) // 10)) + 1), criterion, "BIC")


def choose_factors(x: np.ndarray, seed: int) -> Choice:
    """The number of factors by BIC; as many as the columns' covariances can tell apart, at most (Ledermann's bound)."""
    from sklearn.decomposition import FactorAnalysis

    x = _subset(x, seed)
    rows, columns = x.shape
    most = max([k for k in range(1, _MOST_FACTORS + 1) if (columns - k) ** 2 >= columns + k and k < columns] or [1])

    def criterion(size: int) -> tuple[float, dict[str, Any]]:
        model = FactorAnalysis(size, svd_method="lapack", random_state=seed).fit(x)
        free = columns * size + 2 * columns - size * (size - 1) / 2
        return -2 * rows * float(model.score(x)) + free * np.log(rows), {"n_components": size}

    return _search(range(1, most + 1), criterion, "BIC")


def choose_topics(counts: np.ndarray, seed: int) -> Choice:
    """The number of topics by the perplexity of a fifth of the documents."""
    from sklearn.decomposition import LatentDirichletAllocation

    counts = _subset(counts, seed)
    order = np.random.default_rng(seed).permutation(len(counts))
    checked, fitted = np.split(counts[order], [max(1, len(counts) // 5)])

    def criterion(size: int) -> tuple[float, dict[str, Any]]:
        model = LatentDirichletAllocation(size, max_iter=20, random_state=seed).fit(fitted)
        return float(model.perplexity(checked)), {"n_components": size}

    return _search([size for size in _TOPICS if size <= max(2, len(counts) // 5)], criterion, "perplexity")


def _search(sizes: Iterable[int], criterion: Callable[[int], tuple[float, dict[str, Any]]], name: str) -> Choice:
    tried: list[int] = []
    values: list[float] = []
    best: dict[str, Any] = {}
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A fit that is not quite converged still tells numbers apart.
            value, params = criterion(size)
        if not values or value < min(values):
            best = params
        tried.append(size)
        values.append(value)
        if len(values) - 1 - int(np.argmin(values)) >= _PATIENCE:
            break
    return Choice(best, tried, values, name)


def _subset(x: np.ndarray, seed: int) -> np.ndarray:
    return x if len(x) <= _MOST_ROWS else x[np.random.default_rng(seed).permutation(len(x))[:_MOST_ROWS]]
