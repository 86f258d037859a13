"""State spaces against published numbers, R's KFAS, and statsmodels."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.models import kalman

# Optional: the dev extra installs it.
sm = pytest.importorskip("statsmodels.api")
nile = sm.datasets.nile

DATA = Path(__file__).parent / "data"
VOLUME = nile.load_pandas().data["volume"].to_numpy()
NOISE = 15099.0


def level():
    """The local-level model of the Nile, prior N(0, 1e7)."""
    return blr.StateSpace(jnp.eye(1), 1469.1 * jnp.eye(1), jnp.ones(1), None, 1e7 * jnp.eye(1))


def gaps():
    return np.where(np.isin(np.arange(100), [*range(20, 40), *range(60, 80)]), np.nan, VOLUME)


@pytest.mark.as_users
@pytest.mark.parametrize("parallel", [False, True])
def test_nile(parallel):
    """Durbin and Koopman's example, as statsmodels' tests have it."""
    assert_allclose(kalman.log_likelihood(level(), VOLUME, NOISE, parallel=parallel), -641.58558, atol=5e-6)
    actual = kalman.smooth(level(), VOLUME, NOISE, parallel=parallel)
    assert_allclose(actual.mean[np.array([0, 27, 99]), 0], [1111.22026, 999.58512, 798.37029], atol=5e-6)
    assert_allclose(actual.covariance[-1, 0, 0], 4032.15794, atol=5e-6)


@pytest.mark.as_users
@pytest.mark.parametrize("parallel", [False, True])
def test_nile_with_gaps(parallel):
    assert_allclose(kalman.log_likelihood(level(), gaps(), NOISE, parallel=parallel), -389.62698, atol=5e-6)
    actual = kalman.smooth(level(), gaps(), NOISE, parallel=parallel)
    assert_allclose(actual.mean[29, 0], 903.42000, atol=5e-6)
    assert_allclose(actual.covariance[29, 0, 0], 9715.00589, atol=5e-6)


def test_nile_in_one_step_of_the_rule():
    """Kalman's smoother is conjugate Bayes: one step with ρ = 1, and the bound is the log-likelihood."""
    model = blr.Model(
        {"f": blr.GaussianChain(level(), 100)}, {"y": blr.factors.linear("y", {"f": None}, precision=1 / NOISE)}
    )
    result = blr.fit(blr.conjugate(), model, None, {"y": gaps()}, steps=1)
    states = kalman.smooth(level(), gaps(), NOISE)
    assert_allclose(result.q["f"].states()[0], states.mean, rtol=1e-10)
    assert_allclose(result.q["f"].states()[1], states.covariance, rtol=1e-10)
    assert_allclose(model.bound(result.q, {"y": gaps()}), -389.62698, atol=5e-6)


@pytest.mark.parametrize("name", ["local_level", "local_linear_trend"])
def test_exact_diffuse_start(name):
    """R's KFAS starts exactly diffuse; a prior variance c → ∞ costs ½ log 2πc of the likelihood for each state."""
    case = json.loads((DATA / f"kfas_{name}.json").read_text())
    variances = case["params"]
    if name == "local_level":
        F, Q, H = np.eye(1), variances["sigma2_level"] * np.eye(1), np.ones(1)
    else:
        F, H = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([1.0, 0.0])
        Q = np.diag([variances["sigma2_level"], variances["sigma2_trend"]])
    wide, y = 1e9, np.array(case["y"])
    system = blr.StateSpace(F, Q, H, None, wide * np.eye(len(F)))
    actual = kalman.smooth(system, y, variances["sigma2_eps"])
    assert_allclose(actual.mean, case["smoothed_state"], atol=1e-7)
    assert_allclose(actual.covariance.sum(axis=(1, 2)), case["smoothed_state_cov_sum"], atol=1e-7)
    value = kalman.log_likelihood(system, y, variances["sigma2_eps"])
    assert_allclose(value + 0.5 * len(F) * np.log(2 * np.pi * wide), case["llf"], atol=1e-6)


def unobserved(kind):
    y = VOLUME / 100
    if kind == "trend":
        return sm.tsa.UnobservedComponents(y, "local linear trend"), [1.5, 0.8, 0.05]
    if kind == "seasonal":
        return sm.tsa.UnobservedComponents(y, "local level", seasonal=4), [1.5, 0.8, 0.3]
    return sm.tsa.ARIMA(y - y.mean(), order=(2, 0, 1), trend="n"), [0.5, 0.2, 0.3, 1.5]


@pytest.mark.parametrize("kind", ["trend", "seasonal", "arma"])
def test_statsmodels(kind):
    """Transitions of a seasonal model and of an ARMA(2, 1) have singular noise, and the latter no other."""
    model, parameters = unobserved(kind)
    model.update(np.array(parameters))
    theirs = model.ssm
    size = theirs.k_states
    theirs.loglikelihood_burn = 0
    theirs.initialize_known(np.zeros(size), 10 * np.eye(size))
    Q = theirs["selection"] @ theirs["state_cov"] @ theirs["selection"].T
    system = blr.StateSpace(theirs["transition"], Q, theirs["design"][0], None, 10 * np.eye(size))
    y, noise = model.endog[:, 0], theirs["obs_cov"][0, 0]
    assert_allclose(kalman.log_likelihood(system, y, noise), theirs.loglike(), atol=1e-8)
    actual = theirs.smooth()
    for parallel in (False, True):
        smoothed = kalman.smooth(system, y, noise, parallel=parallel)
        assert_allclose(smoothed.mean, actual.smoothed_state.T, atol=1e-8)
        assert_allclose(smoothed.covariance, np.moveaxis(actual.smoothed_state_cov, 2, 0), atol=1e-8)
        filtered = kalman.filter(system, y, noise, parallel=parallel)
        assert_allclose(filtered.mean, actual.filtered_state.T, atol=1e-8)
        assert_allclose(filtered.covariance, np.moveaxis(actual.filtered_state_cov, 2, 0), atol=1e-8)


@pytest.mark.as_users
def test_several_outputs_time_varying_with_holes():
    """Correlated noise, transitions and controls that change, observations missing in part: statsmodels."""
    rng = np.random.default_rng(0)
    T, D, m = 80, 3, 2
    F, offset = 0.4 * rng.normal(size=(T - 1, D, D)), rng.normal(size=(T - 1, D))
    H, R = rng.normal(size=(m, D)), np.array([[1.0, 0.4], [0.4, 0.7]])
    Q, P = np.diag([0.3, 0.0, 0.1]), np.diag([1.0, 2.0, 0.5])
    y = rng.normal(size=(T, m))
    y[rng.uniform(size=(T, m)) < 0.2] = np.nan
    theirs = sm.tsa.statespace.MLEModel(y, k_states=D, k_posdef=D).ssm
    last = lambda x: np.moveaxis(np.concatenate([x, x[-1:]]), 0, -1)
    theirs["design"], theirs["obs_cov"], theirs["selection"], theirs["state_cov"] = H, R, np.eye(D), Q
    theirs["transition"], theirs["state_intercept"] = last(F), last(offset)
    theirs.initialize_known(np.ones(D), P)
    actual = theirs.smooth()
    system = blr.StateSpace(F, Q, H, np.ones(D), P, offset)
    assert_allclose(kalman.log_likelihood(system, y, R), theirs.loglike(), atol=1e-9)
    ours = kalman.smooth(system, y, R, pairs=True)
    assert_allclose(ours.mean, actual.smoothed_state.T, atol=1e-9)
    assert_allclose(ours.covariance, np.moveaxis(actual.smoothed_state_cov, 2, 0), atol=1e-9)
    assert_allclose(ours.pairs, np.moveaxis(actual.smoothed_state_autocov, 2, 0)[:-1], atol=1e-9)


def test_forecast():
    model, parameters = unobserved("seasonal")
    model.update(np.array(parameters))
    theirs = model.ssm
    theirs.initialize_known(np.zeros(4), 10 * np.eye(4))
    Q = theirs["selection"] @ theirs["state_cov"] @ theirs["selection"].T
    system = blr.StateSpace(theirs["transition"], Q, theirs["design"][0], None, 10 * np.eye(4))
    ours = kalman.forecast(system, model.endog[:, 0], theirs["obs_cov"][0, 0], 5)
    predicted = theirs.filter().predict(start=100, end=105)
    assert_allclose(ours.mean, predicted.forecasts[0], atol=1e-9)
    assert_allclose(ours.variance, predicted.forecasts_error_cov[0, 0], atol=1e-9)


def test_likelihood_has_a_gradient():
    """The score in the variances, against statsmodels' (by complex steps)."""
    model, parameters = unobserved("trend")
    model.ssm.loglikelihood_burn = 0
    model.ssm.initialize_known(np.zeros(2), 10 * np.eye(2))
    F, H = jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.array([1.0, 0.0])

    def value(v):
        system = blr.StateSpace(F, jnp.diag(v[1:]), H, None, 10 * jnp.eye(2))
        return kalman.log_likelihood(system, model.endog[:, 0], v[0])

    score = model.score(np.array(parameters), approx_complex_step=True, transformed=True)
    assert_allclose(jax.grad(value)(jnp.array(parameters)), score, rtol=1e-6)
