"""Ridge regression on diabetes: one step with ρ = 1, from any start."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge

import bayesrule as blr

NOISE, PRIOR = 1 / 3000, 1e-4


def product(w, x):
    return x @ w


@pytest.fixture(scope="module")
def data():
    x, y = load_diabetes(return_X_y=True)
    return jnp.asarray(x), jnp.asarray(y - y.mean())


def squared(output, y):
    return 0.5 * NOISE * (y - output) ** 2 - 0.5 * math.log(NOISE / (2 * math.pi))


def through_outputs(data):
    return blr.Objective(squared, output=product, linear=True, size=len(data[1]), regularizer=PRIOR)


def through_examples(data):
    return blr.Objective(lambda w, e: squared(e[0] @ w, e[1]), size=len(data[1]), regularizer=PRIOR)


def in_expectations(data):
    """−E_q log p(y | θ) as a function of μ = (E θ, E θθᵀ): linear, so Bayes' rule is one step."""

    def loss(expectation, example):
        x, y = example
        square = y**2 - 2 * y * x @ expectation[0] + x @ expectation[1] @ x
        return 0.5 * NOISE * square - 0.5 * math.log(NOISE / (2 * math.pi))

    return blr.Objective(loss, size=len(data[1]), prior=blr.Gaussian(jnp.zeros(10), PRIOR * jnp.eye(10)))


WAYS = {
    "newton": (blr.newton(), through_outputs),
    "newton by examples": (blr.newton(), through_examples),
    "quadrature": (blr.newton().replace(points=blr.Quadrature(3)), through_outputs),
    "conjugate": (blr.conjugate(), in_expectations),
    "laplace": (blr.laplace(), through_outputs),
}


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_one_step_is_the_posterior(data, way, start):
    """REFERENCE: sklearn's Ridge(0.3) for the mean; closed-form evidence −2423.66782."""
    rule, objective = WAYS[way][0], WAYS[way][1](data)
    keys = jax.random.split(jax.random.key(start))
    root = jax.random.normal(keys[0], (10, 10))
    q = blr.Gaussian(100 * jax.random.normal(keys[1], (10,)), NOISE * (root @ root.T + jnp.eye(10)))
    result = blr.fit(rule, objective, q, data, steps=1)
    ridge = Ridge(0.3, fit_intercept=False, tol=1e-14).fit(*map(np.asarray, data))
    np.testing.assert_allclose(result.q.mean, ridge.coef_, rtol=1e-9)
    np.testing.assert_allclose(result.q.mean[:3], [12.78864, -162.74869, 429.15008], atol=1e-5)
    sd = jnp.sqrt(result.q.variance())
    np.testing.assert_allclose(sd[:3], [51.16517, 51.58482, 54.45371], atol=1e-5)
    assert result.normalized
    np.testing.assert_allclose(result.bound, -2423.66782, atol=1e-5)
