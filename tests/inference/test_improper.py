"""Densities without an integral are errors that name the number; narrow ones far from zero, which overflow, are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import bayesrule as blr

KEY = jax.random.key(0)
X = np.array([-2.0, -1.0, 0.5, 3.0])


def separable(p, x):
    """A logistic regression with a flat prior whose classes a line separates: the likelihood tends to 1 as w → ∞."""
    return -jnp.sum(jax.nn.softplus(-jnp.abs(x) * p["w"])) - 0.5 * p["b"] ** 2


def rising(p, x):
    """exp(exp(u)): the bound of a Gaussian is as large as one likes, and finite until it overflows."""
    return jnp.exp(p["w"]) - 0.5 * p["b"] ** 2 + 0.0 * x[0]


def sum_alone(p, x):
    """Two numbers of which only the sum is known."""
    return -0.5 * jnp.sum((x - p["w"] - p["b"]) ** 2)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("density", "message"),
    [
        (separable, r"improper: the density does not fall, however far one goes along w"),
        (rising, r"improper: the density rises without end along w"),
        (sum_alone, r"improper: the density does not fall, however far one goes along (w|b)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_density_without_an_integral_is_an_error_with_the_name_of_the_number(density, message):
    with pytest.raises(ValueError, match=message):
        blr.infer(density, {"w": 0.0, "b": 0.0}, args=(jnp.asarray(X),), key=KEY)


def gumbel(x, location, scale):
    z = (x - location) / scale
    return -z - jnp.exp(-z)


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_a_narrow_density_that_overflows_around_zero_is_found(scale):
    """Beyond its mode the density is a line without curvature, and before it −log p overflows from 700 widths on."""
    posterior = blr.infer(gumbel, jnp.zeros(()), args=(jnp.asarray(3.0), jnp.asarray(scale)), key=KEY)
    assert posterior.trust == "trust"
    mean, deviation = stats.gumbel_r.stats(3.0, scale)[0], stats.gumbel_r.std(3.0, scale)
    assert abs(float(posterior.mean) - mean) < 0.05 * deviation
    assert_allclose(np.sqrt(posterior.covariance()[0, 0]), deviation, rtol=0.05)
    assert_allclose(posterior.log_evidence, np.log(scale), atol=4 * posterior.log_evidence_error + 1e-3)


def test_where_it_overflows_at_every_start_the_error_asks_for_one():
    with pytest.raises(ValueError, match=r"not a finite number at any start.*give a start at which"):
        blr.infer(gumbel, jnp.zeros(()), args=(jnp.asarray(300.0), jnp.asarray(1e-2)), key=KEY)
    found = blr.infer(gumbel, jnp.asarray(300.5), args=(jnp.asarray(300.0), jnp.asarray(1e-2)), key=KEY)
    assert abs(float(found.mean) - 300.0) < 0.05
