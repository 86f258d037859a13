"""ROC, precision and recall, against scikit-learn's metrics and a bootstrap."""

import numpy as np
import pytest
from sklearn import metrics

from bayesrule.report.ranking_math import area_with_error, average_precision, ranking_curves
from bayesrule.runs.score import auroc, score_classes

CASES = [(200, 0.5, None), (500, 0.05, None), (300, 0.3, 1), (40, 0.9, 2), (7, 0.5, None)]


def scores(rows, share, digits, seed=0):
    """Scores and classes; rounded to `digits`, many scores are equal."""
    rng = np.random.default_rng(seed)
    positive = rng.permutation(np.arange(rows) < max(1, round(share * rows)))
    score = 1 / (1 + np.exp(-rng.normal(size=rows) - 1.5 * positive))
    return (score if digits is None else score.round(digits)), positive


@pytest.mark.parametrize("case", CASES)
def test_areas_are_those_of_scikit_learn(case):
    score, positive = scores(*case)
    curves = ranking_curves(score, positive)
    area = metrics.roc_auc_score(positive, score)
    assert area_with_error(score, positive)[0] == pytest.approx(area, abs=1e-12)
    assert auroc(score, positive) == pytest.approx(area, abs=1e-12)
    assert np.trapezoid(curves.recall, curves.false_positive_rate) == pytest.approx(area, abs=1e-12)
    expected = metrics.average_precision_score(positive, score)
    assert average_precision(curves) == pytest.approx(expected, abs=1e-12)
    both = np.stack([1 - score, score], axis=1)
    assert score_classes(both, positive.astype(int))["auroc"] == pytest.approx(area, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_curves_are_those_of_scikit_learn(case):
    score, positive = scores(*case)
    curves = ranking_curves(score, positive)
    false_rate, true_rate, threshold = metrics.roc_curve(positive, score, drop_intermediate=False)
    np.testing.assert_allclose(curves.false_positive_rate, false_rate, atol=1e-12)
    np.testing.assert_allclose(curves.recall, true_rate, atol=1e-12)
    np.testing.assert_allclose(curves.threshold, threshold, atol=1e-12)
    precision, recall, _ = metrics.precision_recall_curve(positive, score)
    np.testing.assert_allclose(curves.precision, precision[::-1], atol=1e-12)
    np.testing.assert_allclose(curves.recall, recall[::-1], atol=1e-12)


def test_the_error_of_the_area_is_that_of_a_bootstrap():
    score, positive = scores(400, 0.3, None)
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, 400, 400) for _ in range(1000)]
    areas = [area_with_error(score[rows], positive[rows])[0] for rows in draws]
    # The standard deviation of 1,000 draws has itself an error of 2.2 %.
    assert area_with_error(score, positive)[1] == pytest.approx(np.std(areas), rel=0.1)


def test_one_row_of_a_class_has_no_error():
    area, error = area_with_error(np.array([0.2, 0.9, 0.4]), np.array([False, True, False]))
    assert area == 1.0
    assert np.isnan(error)
