"""Predictive densities of components against SciPy's, their moments against draws, and rows with holes by hand."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from bayesrule.families.dirichlet import Dirichlet
from bayesrule.families.gamma import Gamma, NormalGamma
from bayesrule.families.point_mass import Peak
from bayesrule.families.wishart import NormalWishart, Wishart
from bayesrule.models.component_predictive import build_predictive
from bayesrule.models.factor_analysis_missing import impute, log_likelihoods, scores

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(6, 2))
SCALE = np.array([[1.0, 0.3], [0.3, 0.5]])
FULL = NormalWishart(np.array([[1.0, 2.0]]), np.array([2.0]), np.array([6.0]), SCALE[None])
DIAGONAL = NormalGamma(np.array([[1.0, 2.0]]), np.array([[2.0, 3.0]]), np.array([[2.5, 3.0]]), np.array([[1.0, 4.0]]))
COUNTS = Gamma(np.array([[2.0, 5.0]]), np.array([[1.0, 0.5]]))


def entries(made):
    return sum(made(d).logpdf(ROWS[:, d]) for d in range(2))


def test_gaussian_components_are_student_t():
    actual = build_predictive(FULL).log_prob(ROWS)[:, 0]
    expected = stats.multivariate_t([1.0, 2.0], np.linalg.inv(SCALE) * 1.5 / 5, df=5).logpdf(ROWS)
    assert_allclose(actual, expected, rtol=1e-12)
    a, b, k, m = (np.asarray(getattr(DIAGONAL, name))[0] for name in ("shape", "rate", "count", "mean"))
    by_entry = entries(lambda d: stats.t(2 * a[d], m[d], np.sqrt(b[d] * (k[d] + 1) / (a[d] * k[d]))))
    assert_allclose(build_predictive(DIAGONAL).log_prob(ROWS)[:, 0], by_entry, rtol=1e-12)


def test_rows_that_are_missing_in_part():
    """The observed entries of a Student-t are one with the same degrees of freedom; those of a Gaussian Gaussian."""
    rows = ROWS.copy()
    rows[1, 0] = rows[2, 1] = rows[4, 1] = np.nan
    rows[3] = np.nan
    scale, at = np.linalg.inv(SCALE) * 1.5 / 5, Peak(FULL).mean
    covariance = np.linalg.inv(at["precision"][0])
    student, normal = build_predictive(FULL).log_prob(rows), build_predictive(Peak(FULL)).log_prob(rows)
    for row, s, of_student, of_normal in zip(rows, ~np.isnan(rows), student[:, 0], normal[:, 0], strict=True):
        if not s.any():
            assert of_student == of_normal == 0
            continue
        part, inner = np.ix_(s, s), np.array([1.0, 2.0])[s]
        assert_allclose(of_student, stats.multivariate_t(inner, scale[part], df=5).logpdf(row[s]), rtol=1e-12)
        peak = stats.multivariate_normal(np.asarray(at["mean"][0])[s], covariance[part])
        assert_allclose(of_normal, peak.logpdf(row[s]), rtol=1e-12)


def test_at_a_peak_they_are_gaussian():
    at = Peak(FULL).mean
    expected = stats.multivariate_normal(at["mean"][0], np.linalg.inv(at["precision"][0])).logpdf(ROWS)
    assert_allclose(build_predictive(Peak(FULL)).log_prob(ROWS)[:, 0], expected, rtol=1e-12)
    at = Peak(DIAGONAL).mean
    by_entry = entries(lambda d: stats.norm(at["mean"][0, d], at["precision"][0, d] ** -0.5))
    assert_allclose(build_predictive(Peak(DIAGONAL)).log_prob(ROWS)[:, 0], by_entry, rtol=1e-12)


def test_counts_and_categories():
    rows = RANDOM.poisson(3.0, (6, 2)).astype(float)
    expected = stats.nbinom(2, 0.5).logpmf(rows[:, 0]) + stats.nbinom(5, 1 / 3).logpmf(rows[:, 1])
    assert_allclose(build_predictive(COUNTS).log_prob(rows)[:, 0], expected, rtol=1e-12)
    rates = np.asarray(Peak(COUNTS).mean)[0]
    assert_allclose(build_predictive(Peak(COUNTS)).log_prob(rows)[:, 0], stats.poisson(rates).logpmf(rows).sum(1))
    table = build_predictive(Dirichlet(np.array([[1.0, 3.0], [2.0, 2.0]])))
    assert_allclose(np.exp(table.log_prob(np.array([1.0, np.nan]))), [[0.75, 0.5], [1.0, 1.0]])


@pytest.mark.parametrize("block", [FULL, DIAGONAL, COUNTS, Peak(FULL), Peak(DIAGONAL), Peak(COUNTS)])
def test_moments_are_those_of_draws(block):
    actual, size = build_predictive(block), 100_000
    drawn = actual.sample(np.random.RandomState(0), np.zeros(size, int))
    assert_allclose(drawn.mean(0), actual.mean[0], atol=5 * np.sqrt(actual.variance[0].max() / size))
    assert_allclose(drawn.var(0), actual.variance[0], rtol=0.1)


def test_what_is_missing_counts_for_nothing():
    holes = np.array([[np.nan, 1.0], [np.nan, np.nan]])
    assert_allclose(build_predictive(FULL).log_prob(holes[1:]), 0)
    actual = build_predictive(DIAGONAL).log_prob(holes)[:, 0]
    assert_allclose(actual[0], stats.t(6, 2.0, np.sqrt(4 * 4 / (3 * 3))).logpdf(1.0))
    assert actual[1] == 0
    with pytest.raises(ValueError, match="Wishart block is not known"):
        build_predictive(Wishart(6.0, SCALE))


def test_rows_with_holes():
    loadings, noise = RANDOM.normal(size=(4, 2)), np.array([0.5, 1.0, 2.0, 0.1])
    covariance = loadings @ loadings.T + np.diag(noise)
    rows = np.where(RANDOM.uniform(size=(9, 4)) < 0.3, np.nan, RANDOM.normal(size=(9, 4)))
    rows[0], rows[1] = np.nan, [1.0, 2.0, 3.0, 4.0]
    for n, row in enumerate(rows):
        there = ~np.isnan(row)
        own = covariance[np.ix_(there, there)]
        gain = np.linalg.solve(own, row[there]) if there.any() else np.zeros(0)
        assert_allclose(scores(rows, loadings, noise)[n], loadings[there].T @ gain, atol=1e-12)
        expected = np.where(there, row, covariance[:, there] @ gain)
        assert_allclose(impute(rows, loadings, noise)[n], expected, atol=1e-12)
        density = stats.multivariate_normal(np.zeros(there.sum()), own).logpdf(row[there]) if there.any() else 0.0
        assert_allclose(log_likelihoods(rows, loadings, noise)[n], density, atol=1e-12)
    spread = np.broadcast_to(0.1 * np.eye(2), (4, 2, 2))
    doubtful = np.linalg.norm(scores(rows[1:2], loadings, noise, spread))
    assert doubtful < np.linalg.norm(scores(rows[1:2], loadings, noise))
