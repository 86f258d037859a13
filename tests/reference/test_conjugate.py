"""Bayes' rule in one step with ρ = 1: the textbook posteriors (Bernardo & Smith, appendix A)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

LOG_2PI = math.log(2 * math.pi)


def one_step(loss, prior, start, data):
    objective = blr.Objective(loss, size=len(data), prior=prior)
    return blr.fit(blr.conjugate(), objective, start, jnp.asarray(data), steps=1)


def close(q, **expected):
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(q, name), value, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_beta_bernoulli(rng):
    y = (rng.random(20) < 0.3).astype(float)
    result = one_step(lambda mu, y: -(y * mu[0] + (1 - y) * mu[1]), blr.Beta(2.0, 3.0), blr.Beta(0.7, 9.0), y)
    close(result.q, a=2 + y.sum(), b=3 + (1 - y).sum())
    betaln = jax.scipy.special.betaln
    evidence = betaln(result.q.a, result.q.b) - betaln(2.0, 3.0)
    np.testing.assert_allclose(result.bound, evidence, rtol=1e-10)


def test_gamma_poisson(rng):
    y = rng.poisson(4.0, 15).astype(float)
    gammaln = jax.scipy.special.gammaln

    def loss(mu, y):
        return mu[1] - y * mu[0] + gammaln(y + 1)

    result = one_step(loss, blr.Gamma(2.0, 0.5), blr.Gamma(9.0, 7.0), y)
    close(result.q, shape=2 + y.sum(), rate=0.5 + len(y))
    a, b = result.q.shape, result.q.rate
    evidence = gammaln(a) - a * jnp.log(b) - gammaln(2.0) + 2 * jnp.log(0.5) - gammaln(y + 1).sum()
    np.testing.assert_allclose(result.bound, evidence, rtol=1e-10)


def test_dirichlet_categorical(rng):
    y = rng.integers(0, 4, 30)
    prior = jnp.array([0.5, 1.0, 2.0, 3.0])
    result = one_step(lambda mu, y: -mu[y], blr.Dirichlet(prior), blr.Dirichlet(jnp.ones(4) * 5), y)
    close(result.q, concentration=prior + np.bincount(y, minlength=4))


def test_gaussian_with_known_noise(rng):
    y = rng.normal(3.0, 2.0, (12, 2))
    precision = np.array([[1.0, 0.3], [0.3, 0.5]])

    def loss(mu, y):
        second = jnp.sum(precision * (mu[1] - 2 * jnp.outer(mu[0], y) + jnp.outer(y, y)))
        return 0.5 * second - 0.5 * jnp.log(jnp.linalg.det(precision)) + LOG_2PI

    prior = blr.Gaussian(jnp.array([1.0, -1.0]), jnp.array([[0.2, 0.05], [0.05, 0.1]]))
    result = one_step(loss, prior, blr.Gaussian(jnp.zeros(2), 7.0), y)
    posterior = np.asarray(prior.precision) + len(y) * precision
    mean = np.linalg.solve(posterior, np.asarray(prior.precision) @ prior.mean + precision @ y.sum(0))
    close(result.q, precision=posterior, mean=mean)


def test_normal_gamma(rng):
    """Unknown mean and precision: count, mean, shape and rate add up as in any textbook."""
    y = rng.normal(5.0, 2.0, 25)
    m0, k0, a0, b0 = 1.0, 0.5, 2.0, 3.0
    # T = (log t, t, t x, t x²)

    def loss(mu, y):
        return 0.5 * (LOG_2PI - mu[0] + y**2 * mu[1] - 2 * y * mu[2] + mu[3])

    result = one_step(loss, blr.NormalGamma(m0, k0, a0, b0), blr.NormalGamma(0.0, 1.0, 1.0, 1.0), y)
    n, mean = len(y), y.mean()
    k = k0 + n
    rate = b0 + 0.5 * np.sum((y - mean) ** 2) + 0.5 * k0 * n * (mean - m0) ** 2 / k
    close(result.q, mean=(k0 * m0 + n * mean) / k, count=k, shape=a0 + n / 2, rate=rate)


def test_normal_wishart(rng):
    y = rng.normal(size=(20, 3)) @ np.diag([1.0, 2.0, 0.5]) + 1
    m0, k0, df0, scale0 = np.zeros(3), 0.7, 5.0, np.diag([0.5, 1.0, 2.0])
    # T = (log|Λ|, Λ, Λx, xᵀΛx)

    def loss(mu, y):
        return 0.5 * (3 * LOG_2PI - mu[0] + y @ mu[1] @ y - 2 * y @ mu[2] + mu[3])

    start = blr.NormalWishart(jnp.ones(3), 1.0, 4.0, jnp.eye(3))
    result = one_step(loss, blr.NormalWishart(jnp.asarray(m0), k0, df0, jnp.asarray(scale0)), start, y)
    n, mean = len(y), y.mean(0)
    k = k0 + n
    scatter = (y - mean).T @ (y - mean)
    inverse = np.linalg.inv(scale0) + scatter + k0 * n / k * np.outer(mean - m0, mean - m0)
    close(result.q, mean=(k0 * m0 + n * mean) / k, count=k, df=df0 + n, scale=np.linalg.inv(inverse))
