"""What every curvature must satisfy: it estimates the expectation it stands for, over the list in tests/cases.py."""

import jax
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.curvature.base import Curvature
from cases import CURVATURES, public_subclasses, regression

REPETITIONS = 2000
OF_MODELS = {"Sites"}  # tested in tests/factor_graph/test_messages.py


def measure(curvature, q, points, key):
    """The loss, its gradient and the curvature of the data's part."""
    problem = regression()
    actual = curvature.measure(problem.objective, q, points, problem.data, None, key)
    return jax.tree.leaves((actual.value, actual.gradient, actual.curvature))


def test_every_public_curvature_is_listed():
    assert {type(case.curvature).__name__ for case in CURVATURES.values()} == public_subclasses(Curvature) - OF_MODELS


@pytest.mark.parametrize("name", CURVATURES)
def test_it_estimates_its_expectation(name):
    """Averages at four random points, within four standard errors of quadrature; with the Hessian where it is one."""
    case = CURVATURES[name]
    q = case.q()
    expected = jax.jit(lambda: measure(case.reference, q, blr.Quadrature(12), None))()
    estimate = jax.jit(jax.vmap(lambda key: measure(case.curvature, q, blr.MonteCarlo(4), key)))
    actual = estimate(jax.random.split(jax.random.key(0), REPETITIONS))
    for values, value in zip(actual, expected, strict=True):
        error = np.std(values, axis=0) / np.sqrt(REPETITIONS)
        np.testing.assert_array_less(np.abs(np.mean(values, axis=0) - value), 4 * error + 1e-9)


@pytest.mark.parametrize("name", CURVATURES)
def test_it_says_what_it_means(name):
    curvature = CURVATURES[name].curvature
    assert curvature.meaning
    assert repr(curvature).startswith(type(curvature).__name__)
