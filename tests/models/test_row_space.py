"""Wide tables: a fit in the space of the rows has the posterior of a fit in all columns."""

import jax.numpy as jnp
import numpy as np
import pytest

from bayesrule.estimators import LogisticRegression, PoissonRegression, RidgeRegression
from bayesrule.models import row_space
from bayesrule.runs.influence import leave_rows_out

RNG = np.random.default_rng(4)
ROWS, COLUMNS = 12, 30
X = RNG.normal(size=(ROWS, COLUMNS)) * RNG.uniform(0.1, 10, COLUMNS) + 3
SCORES = (X - 3) @ (RNG.normal(size=COLUMNS) / X.std(axis=0)) / 10
NEW = RNG.normal(size=(6, COLUMNS)) * 5 + 3
MODELS = {
    "ridge": (RidgeRegression(), SCORES + 0.3 * RNG.normal(size=ROWS)),
    "ridge through 0": (RidgeRegression(fit_intercept=False, prior_precision=2.0), SCORES),
    "logistic": (LogisticRegression(prior_precision=3.0), np.median(SCORES) < SCORES),
    "logistic through 0": (LogisticRegression(prior_precision=3.0, fit_intercept=False), np.median(SCORES) < SCORES),
    "classes": (LogisticRegression(prior_precision=3.0, recipe="laplace"), np.digitize(SCORES, [-0.3, 0.3])),
    "counts": (PoissonRegression(prior_precision=300.0, tol=1e-10), RNG.poisson(np.exp(SCORES / 2))),
}


@pytest.fixture(autouse=True)
def small_tables_are_wide(monkeypatch):
    """A dense fit of the 100 columns from which a table is wide takes ten times as long."""
    monkeypatch.setattr(row_space, "_FEWEST_COLUMNS", COLUMNS)


def predictions(model):
    if isinstance(model, LogisticRegression):
        return model.predict_proba(NEW)
    return np.stack(model.predict(NEW, return_std=True))


@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_the_posterior_is_that_of_all_columns(name, monkeypatch):
    model, y = MODELS[name]
    wide = model.fit(X, y)
    found = predictions(wide), wide.coef_, wide.intercept_, np.asarray(wide.posterior_.variance()["w"])
    evidence = getattr(wide, "log_evidence_", None) or wide.bound_
    assert type(wide.posterior_).__name__ == "LowRankGaussian"
    monkeypatch.setattr(row_space, "_FEWEST_COLUMNS", 10**9)
    dense = model.fit(X, y)
    assert type(dense.posterior_).__name__ == "Gaussian"
    expected = predictions(dense), dense.coef_, dense.intercept_, np.asarray(dense.posterior_.variance()["w"])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6 * np.max(np.abs(theirs)) + 1e-12)
    assert evidence == pytest.approx(getattr(dense, "log_evidence_", None) or dense.bound_, rel=1e-6)


def test_rows_have_the_same_influence(monkeypatch):
    model, y = RidgeRegression(prior_precision=2.0, noise=0.5), SCORES + 0.3
    wide = model.fit(X, y)
    found = leave_rows_out("normal", wide.posterior_, X - wide.x_mean_, y - wide.y_mean_, 0.5)
    monkeypatch.setattr(row_space, "_FEWEST_COLUMNS", 10**9)
    dense = model.fit(X, y)
    expected = leave_rows_out("normal", dense.posterior_, X - dense.x_mean_, y - dense.y_mean_, 0.5)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def test_more_rows_condition_a_posterior_of_low_rank():
    y = np.median(SCORES) < SCORES
    both = LogisticRegression(prior_precision=3.0, recipe="laplace").fit(X[:8], y[:8])
    before = both.predict_proba(X[8:])[:, 1]
    both.partial_fit(X[8:], y[8:])
    after = both.predict_proba(X[8:])[:, 1]
    assert np.mean(np.abs(after - y[8:])) < np.mean(np.abs(before - y[8:]))


@pytest.mark.extended
def test_columns_of_zeros_and_equal_rows():
    x = np.zeros((5, 120))
    x[:, :3] = np.arange(15).reshape(5, 3) ** 2 / 10
    coordinates, basis = row_space.span(x)
    assert coordinates.shape[1] <= 3
    np.testing.assert_allclose(coordinates @ basis, x, atol=1e-12)
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-12)
    model = RidgeRegression().fit(x, np.arange(5.0))
    assert np.all(np.isfinite(model.predict(x, return_std=True)))
    flat = RidgeRegression().fit(np.ones((4, 200)), np.arange(4.0))
    assert flat.predict(np.ones((1, 200)))[0] == pytest.approx(1.5)
    assert bool(jnp.all(jnp.isfinite(flat.posterior_.variance()["w"])))
