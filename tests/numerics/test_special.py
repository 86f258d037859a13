"""Special functions against SciPy."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.integrate import quad
from scipy.special import digamma as reference
from scipy.special import expit, log_expit, log_ndtr

from bayesrule.factor_graph.expected_log import probit_expected
from bayesrule.numerics.special import digamma, expected_around_zero, expected_log_sigmoid


def test_digamma_in_both_precisions():
    x = np.geomspace(1e-6, 1e9, 4000)
    assert_allclose(digamma(jnp.array(x)), reference(x), rtol=1e-12, atol=1e-12)
    single = x.astype(np.float32)
    exact = reference(single.astype(float))
    assert digamma(jnp.array(single)).dtype == jnp.float32
    assert np.max(np.abs(digamma(jnp.array(single)) - exact) / np.maximum(1, np.abs(exact))) < 1e-6


def expected(function, mean, variance):
    """E function(f) for f ~ N(m, v) by SciPy, in pieces around the bend at 0 and the centre of the density."""
    deviation = np.sqrt(variance)
    density = lambda f: np.exp(-0.5 * ((f - mean) / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    ends = mean - 12 * deviation, mean + 12 * deviation
    edges = sorted({*ends, *(x for x in (-40.0, -4.0, 0.0, 4.0, 40.0, mean) if ends[0] < x < ends[1])})
    integrand = lambda f: function(f) * density(f)
    return sum(quad(integrand, *edge, epsabs=1e-13, epsrel=1e-11, limit=200)[0] for edge in pairwise(edges))


def test_expected_log_sigmoid_at_any_variance():
    """Value and derivatives, on both sides of the change of form, where Gauss–Hermite nodes would miss the bend."""
    grid = np.meshgrid([-30.0, -2.0, 0.0, 0.7, 9.0], [1e-2, 1.0, 1.69, 1.71, 4.0, 60.0, 1e3])
    means, variances = grid[0].ravel(), grid[1].ravel() ** 2
    functions = log_expit, lambda f: expit(-f), lambda f: -0.5 * expit(f) * expit(-f)  # Price: ∂/∂v is ½E(log σ)″
    exact, slope, curve = (
        np.array([expected(function, m, v) for m, v in zip(means, variances, strict=True)]) for function in functions
    )
    value = jax.jit(expected_log_sigmoid)
    assert_allclose(value(means, variances), exact, rtol=1e-9, atol=3e-9)
    single = value(means.astype(np.float32), variances.astype(np.float32))
    assert single.dtype == jnp.float32
    assert_allclose(single, exact, rtol=2e-6, atol=2e-6)
    derivatives = jax.jit(jax.vmap(jax.grad(expected_log_sigmoid, (0, 1))))(means, variances)
    assert_allclose(derivatives[0], slope, rtol=1e-9, atol=1e-7)
    assert_allclose(derivatives[1], curve, rtol=1e-9, atol=1e-7)
    assert np.all(np.isfinite(jax.grad(expected_log_sigmoid, (0, 1))(0.0, 0.0)))


def test_expectation_of_a_probit_at_any_variance():
    grid = np.meshgrid([-30.0, -2.0, 0.0, 0.7, 9.0], [1e-2, 0.49, 0.51, 1.0, 4.0, 60.0, 1e3])
    means, variances = grid[0].ravel(), grid[1].ravel() ** 2
    hazard = lambda f: np.exp(-0.5 * f**2 - 0.5 * np.log(2 * np.pi) - log_ndtr(f))
    bend = lambda f: hazard(f) * (f + hazard(f)) if f > -50 else 1 - f**-2 + 6 * f**-4  # −(log Φ)″
    functions = log_ndtr, hazard, lambda f: -0.5 * bend(f)
    exact, slope, curve = (
        np.array([expected(function, m, v) for m, v in zip(means, variances, strict=True)]) for function in functions
    )
    value = jax.jit(lambda m, v: probit_expected(m, v, 1.0))
    assert_allclose(value(means, variances), exact, rtol=2e-9, atol=1e-9)
    derivatives = jax.jit(jax.vmap(jax.grad(value, (0, 1))))(means, variances)
    assert_allclose(derivatives[0], slope, rtol=1e-6, atol=1e-8)
    assert_allclose(derivatives[1], curve, rtol=1e-6, atol=1e-8)
    single = value(means.astype(np.float32), variances.astype(np.float32))
    assert single.dtype == jnp.float32
    assert_allclose(single, exact, rtol=5e-6, atol=5e-6)


def test_expectations_around_a_bend_at_any_variance():
    """log(1 + f²/s²), the loss of Student's t, for means and widths from far below s to far above it."""
    scale = 0.3
    grid = np.meshgrid([0.0, 1.0, -4.9, 5.1, 30.0], scale * np.array([1e-2, 0.49, 0.51, 1.0, 5.0, 30.0, 1e3]))
    means, variances = (grid[0] * grid[1]).ravel(), grid[1].ravel() ** 2
    loss = lambda f: np.log1p((f / scale) ** 2)
    second = lambda f: (1 / scale**2 - (f / scale**2) ** 2) / (1 + (f / scale) ** 2) ** 2
    exact, curve = (
        np.array([expected(function, m, v) for m, v in zip(means, variances, strict=True)])
        for function in (loss, second)
    )
    value = lambda m, v: expected_around_zero(lambda f: jnp.log1p((f / scale) ** 2), m, v, scale)
    assert_allclose(jax.jit(value)(means, variances), exact, rtol=1e-9, atol=2e-5)
    moderate = variances <= (31 * scale) ** 2
    assert_allclose(jax.jit(value)(means, variances)[moderate], exact[moderate], rtol=1e-9, atol=4e-7)
    derivative = jax.jit(jax.vmap(jax.grad(value, 1)))(means, variances)
    assert_allclose(derivative * variances, curve * variances, rtol=1e-7, atol=5e-4)
    assert_allclose((derivative * variances)[moderate], (curve * variances)[moderate], rtol=1e-6, atol=1e-5)
    single = jax.jit(value)(means.astype(np.float32), variances.astype(np.float32))
    assert_allclose(single, exact, rtol=5e-6, atol=3e-5)
    assert np.all(np.isfinite(jax.grad(value, (0, 1))(jnp.array(0.0), jnp.array(0.0))))


def compiled_conditionals(function, *arguments):
    """How many branches the compiled program has."""
    return jax.jit(function).lower(*arguments).as_text().count("stablehlo.case")


@pytest.mark.extended
def test_the_wide_form_is_a_branch_under_vmap_too():
    """A `cond` under `vmap` would compute both sides for every row; the predicate covers the mapped axes instead."""
    means, variances = jnp.linspace(-1.0, 1.0, 8), jnp.full(8, 0.01)
    for function in (lambda m, v: probit_expected(m, v, 1.0), expected_log_sigmoid):
        rows = jax.vmap(function)
        gradient = jax.grad(lambda m, v, rows=rows: jnp.sum(rows(m, v)), (0, 1))
        assert compiled_conditionals(rows, means, variances) == 1
        assert compiled_conditionals(gradient, means, variances) == 1
        assert compiled_conditionals(jax.vmap(jax.grad(function, (0, 1))), means, variances) == 1
        assert compiled_conditionals(jax.vmap(rows), means[None], variances[None]) == 1
        # One wide row takes the other branch with all of them, and changes nothing but its own value.
        mixed = rows(means, variances.at[3].set(50.0))
        assert_allclose(np.delete(mixed, 3), np.delete(rows(means, variances), 3), rtol=1e-14)
        assert_allclose(mixed[3], function(means[3], jnp.array(50.0)), rtol=1e-14)


@pytest.mark.extended
def test_derivatives_of_an_expectation_around_a_bend():
    """Up to the second, in both modes, also in what the function closes over; wide and narrow entries side by side."""
    points = jnp.array([[0.3, 0.01, 0.5], [-2.0, 9.0, 0.7], [1.0, 0.4, 1.5]])  # m, v and s of one entry each

    def value(x):
        mean, variance, scale = x
        return expected_around_zero(lambda f: jnp.log1p((f / scale) ** 2), mean, variance, scale)

    def exact(x):  # log(1 + f²/s²) on a grid that is fine enough for all of them
        mean, variance, scale = x
        z = jnp.linspace(-9.0, 9.0, 40_001)
        weights = jnp.exp(-0.5 * z**2)
        return jnp.log1p(((mean + jnp.sqrt(variance) * z) / scale) ** 2) @ weights / jnp.sum(weights)

    for derivative in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        actual, expected = (jax.jit(jax.vmap(derivative(f)))(points) for f in (value, exact))
        assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
