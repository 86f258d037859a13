"""Gaussian processes: scikit-learn's checks, its numbers at the same kernel, and at least its evidence otherwise."""

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn import datasets
from sklearn.gaussian_process import GaussianProcessClassifier as TheirClassifier
from sklearn.gaussian_process import GaussianProcessRegressor as TheirRegressor
from sklearn.gaussian_process.kernels import RBF as TheirRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayesrule.estimators import GaussianProcessClassifier, GaussianProcessRegressor
from bayesrule.models.kernels import RBF, Matern32
from bayesrule.models.sparse_gp import log_evidence

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-3, 3, (48, 2))
Y = 10 + 5 * np.sin(X[:, 0]) + 0.5 * RANDOM.normal(size=48)
LABELS = np.where(Y > 10, "high", "low")
NEW = RANDOM.uniform(-4, 4, (7, 2))


@pytest.mark.extended
@parametrize_with_checks(
    [GaussianProcessRegressor(optimizer=None), GaussianProcessClassifier(method="laplace", optimizer=None)]
)
def test_scikit_learn_checks_at_one_kernel(estimator, check):
    """Default settings, with the search for the kernel, are in test_scikit_learn_checks.py."""
    check(estimator)


def test_regression_is_scikit_learns_at_the_same_kernel():
    noise = 0.3 * np.var(Y)
    ours = GaussianProcessRegressor(RBF(2.0, 1.5), noise=noise, optimizer=None).fit(X, Y)
    theirs = TheirRegressor(
        ConstantKernel(2.0) * TheirRBF(1.5) + WhiteKernel(0.3), alpha=0.0, optimizer=None, normalize_y=True
    ).fit(X, Y)
    for how in ("return_std", "return_cov"):
        for one, other in zip(ours.predict(NEW, **{how: True}), theirs.predict(NEW, **{how: True}), strict=True):
            assert_allclose(one, other, rtol=1e-8, atol=1e-10)
    # Ours is the evidence of y itself, theirs of y in standard units.
    assert_allclose(ours.log_evidence_, theirs.log_marginal_likelihood_value_ - 48 * np.log(Y.std()), rtol=1e-10)


@pytest.mark.extended
def test_the_evidence_is_at_least_scikit_learns():
    kernel = ConstantKernel(1.0, (1e-4, 1e4)) * TheirRBF(np.sqrt(2), (1e-4, 1e4)) + WhiteKernel(0.1, (1e-5, 1e5))
    theirs = TheirRegressor(kernel, alpha=0.0, normalize_y=True).fit((X - X.mean(0)) / X.std(0), Y)
    ours = GaussianProcessRegressor().fit(X, Y)
    assert ours.log_evidence_ > theirs.log_marginal_likelihood_value_ - 48 * np.log(Y.std()) - 1e-3
    assert 0.1 < ours.noise_ < 0.6  # truly 0.25


@pytest.mark.extended
def test_laplace_is_scikit_learns_at_the_same_kernel():
    ours = GaussianProcessClassifier(RBF(3.0, 1.5), method="laplace", optimizer=None).fit(X, LABELS)
    theirs = TheirClassifier(ConstantKernel(3.0) * TheirRBF(1.5), optimizer=None).fit(X, LABELS)
    assert_allclose(ours.bound_, theirs.log_marginal_likelihood_value_, rtol=1e-9)
    assert ours.bound_error_ is None  # Laplace's evidence is an expansion at the mode
    assert_allclose(ours.posterior_.mean, theirs.base_estimator_.f_cached, atol=1e-5)
    # scikit-learn approximates the logistic function by five error functions.
    assert_allclose(ours.predict_proba(NEW), theirs.predict_proba(NEW), atol=1e-2)


@pytest.mark.extended
def test_laplaces_kernel_is_scikit_learns():
    """43 rows, which are padded to 48 with rows of weight 0."""
    kernel = ConstantKernel(1.0, (1e-4, 1e4)) * TheirRBF(1.0, (1e-4, 1e4))
    theirs = TheirClassifier(kernel).fit(X[:43], LABELS[:43])
    ours = GaussianProcessClassifier(RBF(1.0, 1.0), method="laplace").fit(X[:43], LABELS[:43])
    assert_allclose(ours.bound_, theirs.log_marginal_likelihood_value_, atol=1e-3)


def test_classes_by_sites_raise_the_bound():
    kept = GaussianProcessClassifier(RBF(1.0, 1.0), optimizer=None).fit(X, LABELS)
    chosen = GaussianProcessClassifier(RBF(1.0, 1.0)).fit(X, LABELS)
    assert chosen.bound_ > kept.bound_ + 1
    assert chosen.score(X, LABELS) > 0.9
    draws = chosen.sample_predictive(NEW, 2000, random_state=0)
    assert_allclose((draws == "low").mean(axis=0), chosen.predict_proba(NEW)[:, 1], atol=0.05)


@pytest.mark.extended
def test_more_classes_and_weights():
    x, y = datasets.load_iris(return_X_y=True)
    x, y = x[::4], y[::4]
    actual = GaussianProcessClassifier(RBF(4.0, 2.0), method="laplace", optimizer=None).fit(x, y)
    p = actual.predict_proba(x)
    assert_allclose(p.sum(axis=1), 1.0)
    assert actual.score(x, y) > 0.9
    assert len(actual.posterior_) == len(actual.kernel_) == 3
    heavy = GaussianProcessClassifier(
        RBF(4.0, 2.0), method="laplace", optimizer=None, class_weight={0: 1.0, 1: 1.0, 2: 5.0}
    ).fit(x, y)
    assert heavy.predict_proba(x)[:, 2].mean() > p[:, 2].mean()


@pytest.mark.extended
def test_few_inducing_inputs():
    full = GaussianProcessRegressor(Matern32(1.0, 2.0)).fit(X, Y)
    few = GaussianProcessRegressor(Matern32(1.0, 2.0), n_inducing=30).fit(X, Y)
    assert few.x_places_.shape == (30, 2)
    assert full.log_evidence_ - 10 < few.bound_ < full.log_evidence_ + 1e-6
    assert_allclose(few.predict(NEW), full.predict(NEW), atol=1.0)
    numbers = (few.kernel_, few.x_places_, X, (Y - Y.mean()) / Y.std(), few.noise_ / Y.var())
    assert_allclose(few.bound_, float(log_evidence(*numbers)) - 48 * np.log(Y.std()), rtol=1e-8)
    labels = GaussianProcessClassifier(RBF(2.0, 1.0), n_inducing=20, optimizer=None).fit(X, LABELS)
    dense = GaussianProcessClassifier(RBF(2.0, 1.0), n_inducing=None, optimizer=None).fit(X, LABELS)
    assert dense.bound_ - 5 < labels.bound_ < dense.bound_ + 1e-6


def test_draws_and_copies():
    actual = GaussianProcessRegressor().fit(X, Y)
    mean, covariance = actual.predict(NEW, return_cov=True)
    draws = actual.sample_predictive(NEW, 4000, random_state=0)
    assert_allclose(draws.mean(axis=0), mean, atol=5 * np.sqrt(np.diag(covariance) / 4000).max())
    assert_allclose(np.cov(draws.T), covariance, atol=0.1 * np.diag(covariance).max())
    assert_allclose(pickle.loads(pickle.dumps(actual)).predict(NEW), mean)
    with pytest.raises(ValueError, match="return_std or return_cov"):
        actual.predict(NEW, return_std=True, return_cov=True)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (GaussianProcessRegressor("rbf"), "kernel of bayesrule.models.kernels"),
        (GaussianProcessRegressor(noise=0.0), "a number above 0"),
        (GaussianProcessRegressor(optimizer="adam"), 'optimizer= is "bound" or None'),
        (GaussianProcessRegressor(n_inducing=0), "n_inducing= is a whole number above 0"),
        (GaussianProcessClassifier(method="ep"), '"cvi" or "laplace"'),
    ],
)
def test_bad_settings(estimator, words):
    with pytest.raises(ValueError, match=words):
        estimator.fit(X, LABELS if isinstance(estimator, GaussianProcessClassifier) else Y)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # scikit-learn's, at its bounds
def test_on_diabetes_and_breast_cancer(compiled_as_users):
    x, y = datasets.load_diabetes(return_X_y=True)
    x, new, y, wanted = x[:300], x[300:], y[:300], y[300:]
    unit = x.std(0)
    kernel = ConstantKernel() * TheirRBF(np.sqrt(10)) + WhiteKernel(0.5)
    ours, theirs = (
        GaussianProcessRegressor().fit(x, y),
        TheirRegressor(kernel, alpha=0.0, normalize_y=True).fit(x / unit, y),
    )
    assert ours.log_evidence_ > theirs.log_marginal_likelihood_value_ - 300 * np.log(y.std()) - 1e-3
    assert ours.score(new, wanted) > theirs.score(new / unit, wanted) - 0.01
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    ours, theirs = (
        GaussianProcessClassifier().fit(x[::2], y[::2]),
        TheirClassifier(ConstantKernel() * TheirRBF(np.sqrt(30))).fit(x[::2], y[::2]),
    )
    assert ours.score(x[1::2], y[1::2]) > theirs.score(x[1::2], y[1::2]) - 0.01
    x, y = datasets.load_wine(return_X_y=True)  # Its classes are separated, which needs kernels of large variance.
    assert GaussianProcessClassifier().fit(x[::2], y[::2]).score(x[1::2], y[1::2]) > 0.95
