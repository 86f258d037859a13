"""Gaussian processes beside scikit-learn's, a long NUTS run, and each other's bounds."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import gp
from bayesrule.models.kernels import RBF, Matern52
from bayesrule.models.sparse_gp import sparse

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def files():
    return dict(np.load(DATA / "gp.npz"))


@pytest.mark.extended
def test_regression_is_scikit_learns(files):
    """The motorcycle data: mean, deviation and log marginal likelihood; then the hyper-parameters that maximise it."""
    x, y = files["mcycle"][:, :1], files["mcycle"][:, 1] / 50
    new = np.linspace(0, 60, 23)[:, None]
    theirs = GaussianProcessRegressor(4.0 * SklearnRBF(5.0), alpha=0.2, optimizer=None).fit(x, y)
    kernel = RBF(4.0, 5.0)
    result = blr.fit(blr.conjugate(), gp.regression(kernel, x, 0.2), None, {"y": y}, steps=1)
    assert_allclose(result.bound, theirs.log_marginal_likelihood_value_, rtol=1e-10)
    mean, variance = gp.predict(result.q, kernel, x, new)
    expected, deviation = theirs.predict(new, return_std=True)
    assert_allclose(mean, expected, atol=1e-9)
    assert_allclose(np.sqrt(variance), deviation, atol=1e-9)
    _, covariance = gp.predict(result.q, kernel, x, new, full=True)
    assert_allclose(covariance, theirs.predict(new, return_cov=True)[1], atol=1e-9)

    theirs = GaussianProcessRegressor(ConstantKernel(4.0) * SklearnRBF(5.0) + WhiteKernel(0.2), alpha=0.0).fit(x, y)
    build = lambda h: gp.regression(RBF(h["variance"], h["scale"]), x, h["noise"])
    start = {"noise": 0.2, "scale": 5.0, "variance": 4.0}
    best = blr.empirical_bayes(blr.conjugate(), build, start, None, {"y": y}, steps=2)
    assert_allclose(best.result.bound, theirs.log_marginal_likelihood_value_, rtol=1e-7)
    actual = [best.hyper["variance"], best.hyper["scale"], best.hyper["noise"]]
    assert_allclose(np.log(actual), theirs.kernel_.theta, atol=2e-3)  # their search stops there


def test_classification_by_laplace_is_scikit_learns():
    """REFERENCE: iris, classes 1 and 2, 1·RBF(1); and their predictions from our mode."""
    x, label = load_iris(return_X_y=True)
    x, y = x[label > 0], label[label > 0] - 1.0
    theirs = GaussianProcessClassifier(1.0 * SklearnRBF(1.0), optimizer=None).fit(x, y)
    likelihood = factors.bernoulli_logit("y", {"f": None}, points=blr.Delta())
    model = gp.process(RBF(), x, likelihood)
    result = blr.fit(blr.cvi(1.0), model, None, {"y": y}, steps=30, tolerance=1e-14)
    assert result.reason == "converged"
    assert_allclose(result.bound, -35.8627337, atol=1e-7)
    assert_allclose(result.bound, theirs.log_marginal_likelihood_value_, rtol=1e-10)
    assert_allclose(result.q["f"].mean[:3], [-1.048146, -1.578256, -0.427636], atol=1e-6)
    mean, variance = theirs.base_estimator_.latent_mean_and_variance(x[::7] + 0.1)
    actual = gp.predict(result.q, RBF(), x, x[::7] + 0.1)
    assert_allclose(actual[0], mean, atol=1e-6)
    assert_allclose(actual[1], variance, atol=1e-6)


@pytest.mark.extended
def test_classification_has_one_bound_in_every_form(files):
    """The banana data: sites, the process itself, and a sparse one with all points (a dense Gaussian, whitened)."""
    x, y = files["banana"][:120, :2], files["banana"][:120, 2]
    likelihood, kernel = factors.bernoulli_logit("y", {"f": None}), RBF(4.0, 0.8)
    fitted = lambda rule, model, data: blr.fit(rule, model, None, data, steps=60, tolerance=1e-10)
    model = gp.process(kernel, x, likelihood)
    dense = fitted(blr.cvi(1.0), model, {"y": y})
    sites = fitted(blr.cvi(1.0, sites=True), model, {"y": y})
    whole = fitted(blr.cvi(1.0), sparse(kernel, x, likelihood), {"x": x, "y": y})
    assert [result.reason for result in (dense, sites, whole)] == ["converged"] * 3
    assert_allclose(sites.bound, dense.bound, rtol=1e-12)
    assert_allclose(whole.bound, dense.bound, rtol=1e-8)
    assert np.mean((dense.q["f"].mean > 0) == y) > 0.88


@pytest.mark.extended
def test_a_point_process_agrees_with_nuts(files):
    """Coal-mining disasters, by CVI: a Gaussian q is within a twentieth of a deviation of the posterior's moments."""
    times, counts = files["coal"].T
    nuts = {name: np.asarray(value) for name, value in json.loads((DATA / "nuts_coal.json").read_text()).items()}
    likelihood = factors.poisson_exp("y", {"f": None})
    model = gp.process(Matern52(1.0, 20.0), times, likelihood, mean=np.log(counts.mean()))
    result = blr.fit(blr.cvi(1.0), model, None, {"y": counts}, steps=50, tolerance=1e-10)
    assert result.reason == "converged"
    assert nuts["worst_rhat"] < 1.01
    q, places = result.q["f"], nuts["places"]
    assert np.all(np.abs(q.mean[places] - nuts["mean"]) < 0.05 * nuts["sd"] + 4 * nuts["mean_error"])
    assert np.all(np.abs(jnp.sqrt(q.variance[places]) - nuts["sd"]) < 0.05 * nuts["sd"] + 4 * nuts["sd_error"])
