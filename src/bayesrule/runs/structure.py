"""What a model without a target finds in rows: their groups, topics or factors, each with its uncertainty.

Groups and topics are numbered from 1 in the order of their size, factors in the order of the variance that they
explain. The order is a function of the fitted estimator, so that a saved run numbers new rows in the same way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..models import factor_analysis_missing as factor_scores
from ..numerics.padding import map_chunks
from ..tables.tables import Column
from . import average
from .preprocess import Inputs, Preprocessing

_SHOWN_WORDS = 12
_MOST_LEVELS = 12  # of a column that groups are compared with


def describe(task: str, estimator: Any, x: np.ndarray, encoding: Preprocessing | None) -> dict[str, Any]:
    """`Run.structure` for a fitted estimator and all rows x of the table, encoded."""
    if task == "clusters":
        assert encoding is not None  # Only text has no encoding.
        return _describe_groups(estimator, x, encoding)
    if task == "topics":
        return _describe_topics(estimator, x)
    return _describe_factors(estimator, x)


def predict_rows(task: str, estimator: Any, inputs: Inputs | np.ndarray) -> dict[str, np.ndarray]:
    """The groups, topics or factors of rows, as columns; see `Run.predict`.

    Args:
        task: "clusters", "topics" or "factors".
        estimator: fitted.
        inputs: the rows; an array of counts for topics.
    """
    if task == "clusters":
        assert isinstance(inputs, Inputs)
        order = group_order(estimator)
        probabilities = average.predict_classes(estimator, inputs)[:, order]
        log_density = np.array(estimator.score_samples(inputs.filled))
        log_density[inputs.incomplete] = np.nan  # That of the values that are there is another one.
        return _most_probable(probabilities, "group", "probability", "p({})") | {"log_density": log_density}
    if task == "topics":
        counts = np.nan_to_num(inputs.encoded) if isinstance(inputs, Inputs) else inputs
        share, std = _topic_shares(estimator, counts)
        return _most_probable(share, "topic", "share", "share({})") | {
            f"std({index + 1})": std[:, index] for index in range(std.shape[1])
        }
    assert isinstance(inputs, Inputs)
    score, std = _factor_scores(estimator, inputs.encoded)
    columns = {}
    for index in range(score.shape[1]):
        columns |= {f"factor {index + 1}": score[:, index], f"std {index + 1}": std[:, index]}
    return columns | {"log_density": np.asarray(estimator.score_samples(inputs.encoded))}


def score(
    task: str, estimator: Any, x_train: np.ndarray, x_test: np.ndarray
) -> tuple[dict[str, float], dict[str, float], str]:
    """How probable held-out rows are: the metrics of the model and of a simpler one, and what that is called."""
    if task == "topics":
        frequency = (x_train.sum(axis=0) + 0.5) / (x_train.sum() + 0.5 * x_train.shape[1])
        words = max(float(x_test.sum()), 1.0)
        baseline = float(np.exp(-float((x_test @ np.log(frequency)).sum()) / words))
        name = "one topic for all, the frequencies of the words in training"
        return {"perplexity": float(estimator.perplexity(x_test))}, {"perplexity": baseline}, name
    model = float(np.mean(estimator.score_samples(x_test)))
    mean, std = np.nanmean(x_train, axis=0), np.nanstd(x_train, axis=0)
    std = np.maximum(std, 1e-6)
    if task == "clusters" and len(x_train) > 2 * x_train.shape[1]:
        from scipy.stats import multivariate_normal

        covariance: Any = np.cov(x_train.T, bias=True).reshape(len(mean), len(mean)) + 1e-9 * np.eye(len(mean))
        gaussian = multivariate_normal(mean, covariance, allow_singular=True)
        return (
            {"log_density": model},
            {"log_density": float(np.mean(gaussian.logpdf(x_test)))},
            "one Gaussian for all rows",
        )
    each = -0.5 * ((x_test - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    baseline = float(np.mean(np.nansum(each, axis=1)))
    return {"log_density": model}, {"log_density": baseline}, "independent columns, a Gaussian for each"


def compare(target: Column, rows: dict[str, np.ndarray]) -> dict[str, Any]:
    """How a column that the model did not see differs between groups or topics, or how factors differ by its levels."""
    present = ~target.missing
    labels = target.take(present).labels()
    levels, code, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if "score" in rows:
        score = np.asarray(rows["score"])[present]
        if target.numbers is not None and len(levels) > _MOST_LEVELS:
            correlation = [np.corrcoef(each, target.numbers[present])[0, 1] for each in score.T]
            return {"name": target.name, "correlation": np.array(correlation)}
        frequent = np.sort(np.argsort(-sizes, kind="stable")[:_MOST_LEVELS])
        mean = np.array([score[code == level].mean(axis=0) for level in frequent])
        return {"name": target.name, "levels": [str(level) for level in levels[frequent]], "score": mean}
    group = np.asarray(rows["group"])[present]
    if target.numbers is not None and len(levels) > _MOST_LEVELS:
        numbers = target.numbers[present]
        by_group = [numbers[group == k] for k in range(int(group.max()) + 1)]
        mean = np.array([part.mean() if len(part) else np.nan for part in by_group])
        std = np.array([part.std() if len(part) else np.nan for part in by_group])
        return {"name": target.name, "mean": mean, "std": std}
    counts = np.zeros((int(group.max()) + 1, len(levels)), int)
    np.add.at(counts, (group, code), 1)
    frequent = np.sort(np.argsort(-counts.sum(axis=0), kind="stable")[:_MOST_LEVELS])
    return {"name": target.name, "levels": [str(level) for level in levels[frequent]], "counts": counts[:, frequent]}


def group_order(estimator: Any) -> np.ndarray:
    """The components of a mixture, the one with the most weight first."""
    return np.argsort(-np.asarray(estimator.weights_), kind="stable")


def _describe_groups(estimator: Any, x: np.ndarray, encoding: Preprocessing) -> dict[str, Any]:
    order = group_order(estimator)
    probabilities = estimator.predict_proba(x)[:, order]
    group = probabilities.argmax(axis=1)
    deviation = np.asarray(estimator.means_)[order]
    covariances = np.asarray(estimator.covariances_)[order]
    std = np.sqrt(covariances if covariances.ndim == 2 else np.diagonal(covariances, axis1=1, axis2=2))
    used = [column for column in encoding.encoding.columns if column["used"]]
    scale, center = (np.array([column[name] for column in used]) for name in ("std", "mean"))
    centred = x - x.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred / len(x))
    first = vectors[:, ::-1][:, :2]
    return {
        "weight": np.asarray(estimator.weights_)[order],
        "mean": center + scale * deviation,
        "std": scale * std,
        "deviation": deviation,
        "plane": centred @ first,
        "variance": values[::-1][:2] / max(values.sum(), 1e-300),
        "rows": {
            "row": np.arange(len(x)),
            "group": group,
            "probability": probabilities.max(axis=1),
            "log_density": np.asarray(estimator.score_samples(x)),
        },
    }


def _describe_topics(estimator: Any, x: np.ndarray) -> dict[str, Any]:
    order = _topic_order(estimator)
    concentration = np.asarray(estimator.components_)[order]
    probability = concentration / concentration.sum(axis=1, keepdims=True)
    words = np.argsort(-probability, axis=1, kind="stable")[:, :_SHOWN_WORDS]
    share, std = _topic_shares(estimator, x)
    group = share.argmax(axis=1)
    best = np.arange(len(x)), group
    return {
        "share": x.sum(axis=1) @ share / max(float(x.sum()), 1.0),
        "words": words,
        "probability": np.take_along_axis(probability, words, axis=1),
        "rows": {"row": np.arange(len(x)), "group": group, "probability": share[best], "std": std[best]},
    }


def _describe_factors(estimator: Any, x: np.ndarray) -> dict[str, Any]:
    order, sign = _factor_order(estimator)
    loading = np.asarray(estimator.components_)[order] * sign[:, None]
    covariance = estimator._loadings_cov()
    std = np.zeros_like(loading)
    if covariance is not None:
        std = np.sqrt(np.maximum(np.diagonal(covariance, axis1=1, axis2=2), 0)).T[order]
    noise = np.broadcast_to(np.asarray(estimator.noise_variance_, float), loading.shape[1:])
    total = float(np.sum(loading**2) + noise.sum())
    score, score_std = _factor_scores(estimator, x)
    return {
        "loading": loading,
        "loading_std": std,
        "noise": noise / (np.sum(loading**2, axis=0) + noise),
        "explained": np.sum(loading**2, axis=1) / total,
        "rows": {
            "row": np.arange(len(x)),
            "score": score,
            "std": score_std,
            "log_density": np.asarray(estimator.score_samples(x)),
        },
    }


def _topic_order(estimator: Any) -> np.ndarray:
    return np.argsort(-np.asarray(estimator.components_).sum(axis=1), kind="stable")


def _topic_shares(estimator: Any, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The expected shares of the topics in every row, and their standard deviations under a Dirichlet distribution."""
    order = _topic_order(estimator)

    def of_rows(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = estimator.document_posterior(part)
        concentration = np.asarray(q.concentration)[:, order]
        total = concentration.sum(axis=1, keepdims=True)
        mean = concentration / total
        return mean, np.sqrt(mean * (1 - mean) / (total + 1))

    share, std = map_chunks(of_rows, np.asarray(counts, float), 4096)
    return share, std


def _factor_order(estimator: Any) -> tuple[np.ndarray, np.ndarray]:
    """The factors, the one that explains most first, and the sign that makes most of its large loadings positive."""
    loading = np.asarray(estimator.components_)
    order = np.argsort(-np.sum(loading**2, axis=1), kind="stable")
    sign = np.sign(np.sum(loading[order] ** 3, axis=1))
    return order, np.where(sign == 0, 1.0, sign)


def _factor_scores(estimator: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order, sign = _factor_order(estimator)
    arguments = x - estimator.mean_, estimator.components_.T, estimator._column_noises(), estimator._loadings_cov()
    return (estimator.transform(x)[:, order] * sign, factor_scores.score_stds(*arguments)[:, order])


def _most_probable(shares: np.ndarray, name: str, measure: str, each: str) -> dict[str, np.ndarray]:
    best = shares.argmax(axis=1)
    columns = {name: best + 1, measure: shares[np.arange(len(best)), best]}
    return columns | {each.format(index + 1): shares[:, index] for index in range(shares.shape[1])}
