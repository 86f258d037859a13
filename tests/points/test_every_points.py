"""What every kind of points must satisfy: right expectations, weights that add up, over the list in tests/cases.py."""

import jax
import numpy as np
import pytest

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
