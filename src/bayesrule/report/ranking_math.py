"""How well probabilities rank the rows of two classes: the ROC curve, precision and recall, and their areas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata


class RankingCurves(NamedTuple):
    """For every threshold, from the highest probability down: the rows at or above it are called positive.

    `threshold` begins with ∞, at which no row is positive. `false_positive_rate` and `recall` (the true positive rate)
    are the ROC curve; `precision` is the share of positives among the rows that are called positive, 1 where none is.
    """

    threshold: np.ndarray
    false_positive_rate: np.ndarray
    recall: np.ndarray
    precision: np.ndarray


def ranking_curves(score: np.ndarray, positive: np.ndarray) -> RankingCurves:
    """The curves of scores against a class; both classes must have rows.

    >>> curves = ranking_curves(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    >>> curves.recall.tolist(), curves.false_positive_rate.tolist()
    ([0.0, 0.5, 0.5, 1.0, 1.0], [0.0, 0.0, 0.5, 0.5, 1.0])
    """
    order = np.argsort(-score, kind="stable")
    ranked, hits = score[order], positive[order].astype(float)
    # Rows with equal scores are called positive together.
    last = np.flatnonzero(np.append(np.diff(ranked) != 0, True))
    true_positives, called = np.cumsum(hits)[last], last + 1.0
    total = float(hits.sum())
    return RankingCurves(
        np.concatenate([[np.inf], ranked[last]]),
        np.concatenate([[0.0], (called - true_positives) / max(len(hits) - total, 1.0)]),
        np.concatenate([[0.0], true_positives / max(total, 1.0)]),
        np.concatenate([[1.0], true_positives / called]),
    )


def average_precision(curves: RankingCurves) -> float:
    """Σ (recallₙ − recallₙ₋₁) precisionₙ, the area under the steps of precision against recall."""
    return float(np.sum(np.diff(curves.recall) * curves.precision[1:]))


def area_with_error(score: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """The area under the ROC curve and its standard error (DeLong, DeLong and Clarke-Pearson, 1988).

    For every positive row, the share of negative rows below it is counted, and for every negative row the share of
    positive rows above it; the error follows from the variances of these shares. It is NaN with fewer than two rows of
    a class.

    >>> area_with_error(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))[0]
    0.75
    """
    above, below = score[positive], score[~positive]
    ranks = rankdata(np.concatenate([above, below]))
    of_positives = (ranks[: len(above)] - rankdata(above)) / len(below)
    of_negatives = 1 - (ranks[len(above) :] - rankdata(below)) / len(above)
    area = float(of_positives.mean())
    if min(len(above), len(below)) < 2:
        return area, float("nan")
    variance = np.var(of_positives, ddof=1) / len(above) + np.var(of_negatives, ddof=1) / len(below)
    return area, float(np.sqrt(variance))
