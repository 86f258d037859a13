"""Flat priors: improper posteriors are said to be so, in both precisions, and proper ones are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.estimators import LogisticRegression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 3))
F = X @ [1.0, -1.0, 0.5]
TARGET, LABELS = F + RANDOM.normal(size=60), (RANDOM.random(60) < 1 / (1 + np.exp(-F))).astype(float)
TWICE = np.column_stack([X, X[:, 1]])

squares = lambda f, y: 0.5 * (y - f) ** 2
logistic = lambda f, y: jnp.logaddexp(0.0, -(2 * y - 1) * f)
poisson = lambda f, y: jnp.exp(f) - y * f


def fitted(rule, loss, x, y, steps=40, **prior):
    objective = blr.Objective(loss, output=lambda w, x: x @ w, linear=True, size=60, **prior)
    return blr.fit(rule, objective, jnp.zeros(x.shape[1]), (x, y), steps=steps, tolerance=1e-6)


def check(rule):
    for loss, y in ((squares, TARGET), (logistic, LABELS)):
        with pytest.warns(UserWarning, match=r"improper: .* combination of θ\[1\], θ\[3\] .*Leave one of them out"):
            assert fitted(rule, loss, TWICE, y).reason != "converged"
    with pytest.warns(UserWarning, match=r"improper: .* loss falls for ever .* a prior \(regularizer="):
        assert fitted(rule, logistic, X, (F > 0).astype(float)).reason != "converged"


@pytest.mark.extended
def test_improper_posteriors_are_said_to_be():
    check(blr.newton())


@pytest.mark.as_users
def test_in_float32():
    with jax.enable_x64(False):
        check(blr.newton())


@pytest.mark.extended
def test_by_other_rules_and_losses():
    rule = blr.von(0.5).replace(points=blr.Quadrature(8))
    with pytest.warns(UserWarning, match="improper"):
        fitted(rule, logistic, X[:, :1], (X[:, 0] > 0).astype(float))
    diagonal = blr.newton().replace(family=blr.DiagonalGaussian, curvature=blr.HessianDiagonal())
    with pytest.warns(UserWarning, match="loss falls for ever"):
        fitted(diagonal, logistic, X, (F > 0).astype(float))
    with pytest.warns(UserWarning, match="improper"):  # no counts: the intercept runs to −∞
        fitted(blr.newton(), poisson, np.ones((60, 1)), np.zeros(60))
    with pytest.warns(UserWarning, match=r"determine a combination of θ\[1\]"):  # a column of zeros
        fitted(blr.newton(1.0).replace(guard=blr.Backtracking()), squares, X * [1.0, 0.0, 1.0], TARGET)


@pytest.mark.extended
@pytest.mark.parametrize("steps", [2, 40])
def test_proper_posteriors_are_not(steps):
    """Warnings are errors here: a fit that has not ended, collinear columns, a weak prior beside equal columns."""
    fitted(blr.newton(), logistic, X, LABELS, steps)
    fitted(blr.von(0.1).replace(points=blr.Quadrature(8)), logistic, X, LABELS, steps)
    fitted(blr.newton(), squares, TWICE + 1e-5 * RANDOM.normal(size=(60, 4)), TARGET, steps)
    fitted(blr.newton(), logistic, TWICE, LABELS, steps, regularizer=1e-6)
    fitted(blr.newton(), logistic, X, (F > 0).astype(float), steps, regularizer=1e-4)


def test_logistic_regression_without_a_prior_is_statsmodels():
    """Columns that pad the data to shared shapes have no prior to stay at: with them the fit never ended."""
    sm = pytest.importorskip("statsmodels.api")
    other = sm.Logit(LABELS, sm.add_constant(X)).fit(disp=0, tol=1e-12)
    model = LogisticRegression(recipe="laplace", prior_precision=0, tol=1e-10).fit(X, LABELS)
    covariance = np.linalg.inv(model.posterior_.precision)
    assert model.n_iter_ < 15
    assert_allclose(np.append(model.intercept_, model.coef_), other.params, rtol=1e-6)
    assert_allclose(np.sqrt(np.diag(covariance)), other.bse, rtol=1e-6)
    laplace = other.llf + 0.5 * np.linalg.slogdet(2 * np.pi * other.cov_params())[1]
    assert_allclose(model.bound_, laplace, rtol=1e-8)
    assert not model.bound_normalized_
    with pytest.warns(UserWarning, match=r"θ\['w'\]\[1\], θ\['w'\]\[3\] .* prior_precision="):
        LogisticRegression(recipe="laplace", prior_precision=0, max_iter=20).fit(TWICE, LABELS)
