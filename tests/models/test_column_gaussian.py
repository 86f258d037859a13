"""A Gaussian over columns: conditionals by linear algebra, evidence by predictive densities, coverage of draws."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from bayesrule.models import column_gaussian
from bayesrule.models.column_gaussian import ColumnGaussian, balanced_normals, fit_columns

NAN = np.nan


def correlated_rows(rng, rows, columns, factors):
    loadings = np.random.default_rng(7).normal(size=(columns, factors))
    return 3.0 + rng.normal(size=(rows, factors)) @ loadings.T + 0.3 * rng.normal(size=(rows, columns))


def with_holes(rng, rows, share):
    return np.where(rng.random(rows.shape) < share, NAN, rows)


@pytest.mark.parametrize("degrees", [np.inf, 9.0])
def test_draws_have_the_conditional_moments(degrees):
    """Mean and covariance of the missing entries by linear algebra: of a Gaussian, and of SciPy's multivariate t."""
    rng = np.random.default_rng(0)
    gaussian = ColumnGaussian(rng.normal(size=5), rng.normal(size=(5, 3)), rng.uniform(0.1, 1.0, 5), degrees)
    scale = gaussian.loadings @ gaussian.loadings.T + np.diag(gaussian.noise)
    rows = np.array([[1.0, NAN, 2.0, NAN, 0.5], [NAN, 1.0, 1.0, 1.0, 1.0], [NAN] * 5, [0.0, NAN, 3.0, NAN, -1.0]])
    drawn = gaussian.draw(rows, balanced_normals(16, gaussian.dimensions, 0))
    filled = gaussian.fill(rows)
    for row, draws, expected in zip(rows, drawn, filled, strict=True):
        m, o = np.isnan(row), ~np.isnan(row)
        gain = scale[np.ix_(m, o)] @ np.linalg.inv(scale[np.ix_(o, o)])
        mean = gaussian.mean[m] + gain @ (row[o] - gaussian.mean[o])
        covariance = scale[np.ix_(m, m)] - gain @ scale[np.ix_(o, m)]
        if np.isfinite(degrees):
            away = row[o] - gaussian.mean[o]
            distance = away @ np.linalg.solve(scale[np.ix_(o, o)], away)
            covariance = covariance * (degrees + distance) / (degrees + o.sum() - 2)
        assert_allclose(draws[:, o], np.tile(row[o], (16, 1)))
        assert_allclose(expected[m], mean)
        assert_allclose(draws[:, m].mean(0), mean)
        assert_allclose(np.cov(draws[:, m].T, bias=True).reshape(covariance.shape), covariance)


def test_draws_of_a_wide_table_have_the_conditional_moments(monkeypatch):
    """Beyond the columns of a full matrix entries are drawn through the factors: the same moments, up to chance."""
    rng = np.random.default_rng(0)
    gaussian = ColumnGaussian(np.zeros(4), rng.normal(size=(4, 2)), rng.uniform(0.1, 1.0, 4), 20.0)
    row, count = np.array([[1.0, NAN, NAN, NAN]]), 40_000
    narrow = gaussian.draw(row, balanced_normals(16, 4, 0))[0]
    monkeypatch.setattr(column_gaussian, "_FULL_COLUMNS", 2)
    wide = gaussian.draw(row, rng.normal(size=(count, gaussian.dimensions)))[0]
    variance = narrow.var(0)[1:]
    assert_allclose(wide.mean(0)[1:], narrow.mean(0)[1:], atol=5 * np.sqrt(variance.max() / count))
    # The standard error of a covariance is at most √(2/n) times the product of the deviations.
    difference = np.cov(wide[:, 1:].T) - np.cov(narrow[:, 1:].T, bias=True)
    assert np.all(np.abs(difference) < 5 * np.sqrt(2 / count) * np.sqrt(np.outer(variance, variance)))


def test_the_evidence_is_the_product_of_predictive_densities():
    """Under an inverse-Wishart prior each row given the ones before is Student's t, whose density SciPy has."""
    rows = np.random.default_rng(0).normal(size=(12, 3)) @ np.diag([1.0, 2.0, 0.5])
    strengths = np.array([0.3, 4.0])
    expected = []
    for strength in strengths:
        total, scale, degrees = 0.0, strength * np.eye(3), 4 + strength
        for row in rows:
            total += stats.multivariate_t.logpdf(row, np.zeros(3), scale / (degrees - 2), degrees - 2)
            scale, degrees = scale + np.outer(row, row), degrees + 1
        expected.append(total)
    values = np.linalg.eigvalsh(rows.T @ rows / 12)
    found = column_gaussian.log_evidence(strengths, values, 3, 12)
    assert found[1] - found[0] == pytest.approx(expected[1] - expected[0])


def test_complete_rows_give_their_covariance():
    rows = correlated_rows(np.random.default_rng(0), 5000, 4, 2)
    gaussian = fit_columns(rows)
    assert_allclose(gaussian.mean, rows.mean(0))
    covariance = gaussian.loadings @ gaussian.loadings.T + np.diag(gaussian.noise)
    assert_allclose(covariance, np.cov(rows.T), rtol=2e-3, atol=2e-3 * np.sqrt(np.cov(rows.T).max()))


@pytest.mark.sampled("missing", "few rows", "more columns than rows", "one column")
@pytest.mark.parametrize(
    ("rows", "columns", "factors", "share"),
    [(400, 6, 2, 0.3), (60, 12, 3, 0.0), (40, 100, 4, 0.0), (150, 80, 5, 0.1), (30, 1, 1, 0.3)],
    ids=["missing", "few rows", "more columns than rows", "wide and missing", "one column"],
)
def test_draws_cover_what_was_missing(rows, columns, factors, share):
    """Entries of new rows in their central 90 %, within 4 points; three times other training rows."""
    inside = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        gaussian = fit_columns(with_holes(rng, correlated_rows(rng, rows, columns, factors), share))
        new = correlated_rows(rng, 4000 // columns + 100, columns, factors)
        holes = with_holes(rng, new, 0.25)
        drawn = gaussian.draw(holes, balanced_normals(32, gaussian.dimensions, 0))
        missing = np.isnan(holes)
        error = np.abs(new - drawn.mean(1)) / np.where(missing, drawn.std(1), 1.0)
        inside.append(np.mean(error[missing] < stats.norm.ppf(0.95)))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.04)


def test_columns_that_determine_one_another_are_told_exactly():
    x = np.random.default_rng(0).normal(size=(200, 2))
    gaussian = fit_columns(np.column_stack([x, x.sum(1)]))
    drawn = gaussian.draw(np.array([[1.0, NAN, 3.0]]), balanced_normals(8, 3, 0))
    assert_allclose(drawn[0, :, 1], 2.0, atol=1e-3)


def test_degenerate_rows():
    """No value in a column, one row, no row at all: finite draws."""
    for rows in (np.array([[1.0, NAN], [2.0, NAN]]), np.ones((1, 2)), np.full((3, 2), NAN), np.ones((5, 2))):
        gaussian = fit_columns(rows)
        assert np.isfinite(gaussian.draw(np.full((2, 2), NAN), balanced_normals(4, 2, 0))).all()


def test_draws_agree_with_scikit_learns_imputation():
    """Against chained Bayesian regressions: the same mean and deviation of what is missing, up to chance."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401  (It must be imported first.)
    from sklearn.impute import IterativeImputer

    rng = np.random.default_rng(0)
    training = correlated_rows(rng, 400, 3, 1)
    new = correlated_rows(rng, 20, 3, 1)
    new[:10, 0] = new[10:, 2] = NAN
    drawn = fit_columns(training).draw(new, balanced_normals(32, 3, 0))
    imputer = IterativeImputer(sample_posterior=True, max_iter=2, random_state=0).fit(training)
    theirs = np.stack([imputer.transform(new) for _ in range(60)], axis=1)
    missing, deviation = np.isnan(new), np.where(np.isnan(new), drawn.std(1), 1.0)
    assert np.max(np.abs(theirs.mean(1) - drawn.mean(1)) / deviation) < 4.5 / np.sqrt(60)
    ratio = (theirs.std(1, ddof=1) / deviation)[missing]
    assert np.mean(ratio) == pytest.approx(1.0, abs=4 / np.sqrt(2 * 60 * missing.sum()) + 0.02)
