"""What every kind of points must satisfy: right expectations, weights that add up, over the list in tests/cases.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.points.base import Points
from cases import POINTS, POINTS_WITHOUT_POINTS, public_subclasses

REPETITIONS = 2000


def test_every_public_kind_of_points_is_listed():
    assert {type(case.points).__name__ for case in POINTS.values()} == public_subclasses(Points) - POINTS_WITHOUT_POINTS


@pytest.mark.parametrize("name", POINTS)
def test_an_average_over_the_points_is_the_expectation(name):
    """Exactly, or within four standard errors of the mean of many independent averages."""
    case = POINTS[name]
    q = case.q()

    def average(key):
        points = case.points.at(q, key)
        return points.weights @ jax.vmap(case.function)(points.theta), points.weights.sum()

    expected = case.expected(q)
    if not case.points.random:
        actual, total = jax.jit(average)(None)
        np.testing.assert_allclose(actual, expected, rtol=1e-8)
        np.testing.assert_allclose(total, 1.0, rtol=1e-12)
        return
    actual, total = jax.jit(jax.vmap(average))(jax.random.split(jax.random.key(0), REPETITIONS))
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)
    assert np.std(actual) > 0
    assert abs(np.mean(actual) - expected) < 4 * np.std(actual) / np.sqrt(REPETITIONS)


@pytest.mark.parametrize("name", [name for name, case in POINTS.items() if case.points.random])
def test_random_points_ask_for_a_key(name):
    with pytest.raises(ValueError, match="key"):
        POINTS[name].points.at(POINTS[name].q(), None)


def test_a_grid_over_a_low_rank_gaussian_has_its_covariance():
    """A family that draws with more noise than θ has dimensions gets a grid placed by its dense covariance."""
    q = blr.LowRankGaussian(jnp.array([1.0, -2.0]), jnp.array([1.0, 3.0]), jnp.array([[2.0], [-1.0]]))
    points = blr.Quadrature(3).at(q, None)
    deviation = points.theta - q.mean
    assert_allclose(jnp.einsum("s,si,sj->ij", points.weights, deviation, deviation), q.covariance(), atol=1e-12)


@pytest.mark.parametrize("samples", [16, 100])
def test_quasi_monte_carlo_has_the_first_two_moments(samples):
    """E(θ − m) = 0 and E(θ − m)² = 1/s exactly, whatever the number of points."""
    q = blr.DiagonalGaussian(jnp.array([1.0, -2.0, 0.5]), jnp.array([4.0, 1.0, 0.25]))
    theta, weights, _ = blr.QuasiMonteCarlo(samples).at(q, None)
    deviations = theta - q.mean
    np.testing.assert_allclose(weights @ deviations, 0.0, atol=1e-12)
    np.testing.assert_allclose(weights @ deviations**2, 1 / q.precision, rtol=1e-12)
