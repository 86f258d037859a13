"""What estimators hand out computes in double precision where JAX's 64-bit mode is off, as users have it."""

import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import bayesrule as blr
from bayesrule.estimators import GaussianMixture, LogisticRegression

STAR98 = Path(__file__).parents[1] / "reference" / "data" / "star98_binomial.json"


@pytest.fixture
def x64_off():
    with jax.enable_x64(False):
        yield


def ill_conditioned():
    """A posterior as an estimator hands it out, and its covariance by NumPy."""
    rows = np.random.default_rng(0).normal(size=(50, 3)) * [1.0, 30.0, 0.1]
    precision = rows.T @ rows + np.outer(rows[0], rows[0])
    with jax.enable_x64(True):
        q = jax.tree.map(np.asarray, blr.Gaussian(jnp.arange(3.0), jnp.asarray(precision)))
    return q, np.linalg.inv(precision)


@pytest.mark.extended
@pytest.mark.as_users
def test_star98(x64_off):
    """R's and statsmodels' standard errors of a binomial GLM, to their digits; in float32 they are 5 % off."""
    record = json.loads(STAR98.read_text())
    x, counts = np.array(record["X"]), np.array(record["y"])
    model = LogisticRegression(recipe="laplace", prior_precision=0.0, fit_intercept=False)
    model.fit(np.concatenate([x, x]), np.repeat([1, 0], len(x)), sample_weight=counts.T.ravel())
    covariance = model.posterior_.covariance()
    assert covariance.dtype == np.float64
    np.testing.assert_allclose(model.coef_[0], record["reference"]["params"], rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), record["reference"]["bse"], rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(model.posterior_.variance()["w"]), record["reference"]["bse"], rtol=1e-6)


@pytest.mark.extended
def test_every_method_computes_in_double_precision(x64_off):
    q, covariance = ill_conditioned()
    reference = scipy.stats.multivariate_normal(q.mean, covariance)
    at = np.array([1.0, 1.001, 5.0])
    np.testing.assert_allclose(q.covariance(), covariance, rtol=1e-9)
    np.testing.assert_allclose(q.variance(), np.diag(covariance), rtol=1e-9)
    np.testing.assert_allclose(q.log_prob(at), reference.logpdf(at), rtol=1e-12)
    np.testing.assert_allclose(q.entropy(), reference.entropy(), rtol=1e-12)
    assert isinstance(q.entropy(), float)
    draws = q.sample(jax.random.key(0), (2000,))
    assert isinstance(draws, np.ndarray)
    assert draws.dtype == np.float64
    np.testing.assert_allclose(np.cov(draws.T) / covariance.diagonal().max(), covariance / covariance.diagonal().max(),
                               atol=0.2)  # fmt: skip
    wider = q.with_scaled_precision(0.5)
    assert isinstance(wider, blr.Gaussian)
    assert wider.precision.dtype == np.float64
    ratio = 0.5 * (3 * 0.5 - 3 + 3 * np.log(2.0))
    np.testing.assert_allclose(q.kl(wider), ratio, rtol=1e-9)
    assert float(wider.kl(wider)) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.extended
def test_products_and_properties(x64_off):
    rows = np.random.default_rng(0).normal(size=(60, 2)) + np.repeat([[0.0], [5.0]], 30, axis=0)
    model = GaussianMixture(2, method="vmp", random_state=0).fit(rows)
    weights = model.posterior_["weights"]
    assert weights.mean.dtype == np.float64
    np.testing.assert_allclose(weights.mean, weights.concentration / weights.concentration.sum(), rtol=1e-15)
    beta = scipy.stats.dirichlet(weights.concentration)
    np.testing.assert_allclose(weights.entropy(), beta.entropy(), rtol=1e-12)
    assert isinstance(model.posterior_.entropy(), float)


def test_it_is_still_the_family(x64_off, tmp_path):
    q, covariance = ill_conditioned()
    assert type(q) is blr.Gaussian
    again = pickle.loads(pickle.dumps(q))
    np.testing.assert_allclose(again.covariance(), covariance, rtol=1e-9)
    blr.save(tmp_path / "q.npz", q)
    loaded = blr.load(tmp_path / "q.npz")
    np.testing.assert_array_equal(loaded.precision, q.precision)
    doubled = jax.tree.map(lambda x: 2 * x, q)
    np.testing.assert_allclose(doubled.covariance(), covariance / 2, rtol=1e-9)


@pytest.mark.extended
def test_under_jit_and_vmap_jax_decides(x64_off):
    q, _ = ill_conditioned()
    assert jax.jit(lambda x: q.log_prob(x))(jnp.ones(3)).dtype == jnp.float32
    assert jax.jit(lambda: q.entropy())().dtype == jnp.float32
    assert jax.vmap(q.log_prob)(jnp.ones((2, 3))).shape == (2,)
    assert jax.grad(lambda x: q.log_prob(x))(jnp.ones(3)).dtype == jnp.float32


def test_members_of_jax_arrays_stay_in_jax(x64_off):
    q = blr.Gaussian(jnp.zeros(2), 2 * jnp.eye(2))
    assert isinstance(q.covariance(), jax.Array)
    assert q.covariance().dtype == jnp.float32
    in_single = jax.tree.map(np.asarray, q)  # as networks in float32 hand them out
    assert isinstance(in_single.covariance(), jax.Array)
    with jax.enable_x64(True):
        assert isinstance(ill_conditioned()[0].covariance(), jax.Array)
