"""Laplace's method under a flat prior is maximum likelihood: R's, Stata's and NIST's estimates."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

DATA = Path(__file__).parent / "data"


def product(w, x):
    return x @ w


def load(name):
    record = json.loads((DATA / f"{name}.json").read_text())
    return np.array(record["X"]), np.array(record["y"]), record["reference"]


def logit(output, y):
    return jnp.logaddexp(0.0, output) - y * output


def probit(output, y):
    return -jax.scipy.stats.norm.logcdf((2 * y - 1) * output)


def binomial(output, y):
    """−log likelihood of (successes, failures), with the binomial coefficient."""
    n = y.sum()
    constant = jax.scipy.special.gammaln(n + 1) - jax.scipy.special.gammaln(y + 1).sum()
    return n * jnp.logaddexp(0.0, output) - y[0] * output - constant


def laplace(loss, x, y, steps=60):
    """The fit in orthonormal columns (x = QR), as R does it, and its estimates back in x's own."""
    q, r = np.linalg.qr(x)
    objective = blr.Objective(loss, output=product, linear=True, size=len(x))
    start = blr.Gaussian(jnp.zeros(x.shape[1]), 1.0)
    result = blr.fit(blr.laplace(), objective, start, (jnp.asarray(q), jnp.asarray(y)), steps=steps, tolerance=1e-22)
    back = np.linalg.inv(r)
    return back @ np.asarray(result.q.mean), back @ np.asarray(result.q.covariance()) @ back.T, result


def to_the_digits_given(actual, printed):
    """Within half a unit of each number's last printed decimal (and the next digit's rounding)."""
    for value, reference in zip(actual, printed, strict=True):
        digits, _, exponent = repr(reference).partition("e")
        decimals = len(digits.partition(".")[2]) - int(exponent or 0)
        assert abs(value - reference) <= 0.51 * 10.0**-decimals, (value, reference)


@pytest.mark.as_users
@pytest.mark.parametrize(("name", "loss"), [("spector_logit", logit), ("spector_probit", probit)])
def test_stata(name, loss):
    """Stata's iterations stop about 1e-6 from the optimum, so its later digits are not the optimum's."""
    x, y, reference = load(name)
    mean, covariance, result = laplace(loss, x, y)
    np.testing.assert_allclose(mean, reference["params"], rtol=2e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), reference["bse"], rtol=2e-6)
    np.testing.assert_allclose(covariance, reference["cov_params"], rtol=5e-6)
    np.testing.assert_allclose(-result.trace["objective"][-1], reference["llf"], atol=2e-6)
    assert not result.normalized


@pytest.mark.as_users
def test_star98():
    x, y, reference = load("star98_binomial")
    mean, covariance, result = laplace(binomial, x, y)
    to_the_digits_given(mean, reference["params"])
    to_the_digits_given(np.sqrt(np.diag(covariance)), reference["bse"])
    np.testing.assert_allclose(-result.trace["objective"][-1], reference["llf"], rtol=1e-12)


@pytest.mark.as_users
def test_longley():
    """NIST's ill-conditioned regression, to the nine digits given."""
    x, y, reference = load("longley_ols")

    def squared(variance):
        return lambda f, t: 0.5 * (t - f) ** 2 / variance + 0.5 * math.log(2 * math.pi * variance)

    mean, _, _ = laplace(squared(1.0), x, y, steps=5)
    residual = np.sum((y - x @ mean) ** 2)
    _, covariance, _ = laplace(squared(residual / (len(y) - x.shape[1])), x, y, steps=5)
    to_the_digits_given(mean, reference["params"])
    to_the_digits_given(np.sqrt(np.diag(covariance)), reference["bse"])
    mean, _, result = laplace(squared(residual / len(y)), x, y, steps=5)
    np.testing.assert_allclose(-result.trace["objective"][-1], reference["llf"], rtol=1e-10)
