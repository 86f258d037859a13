"""Families whose means share a precision, against SciPy's densities and their own derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bayesrule.families.gamma import NormalGamma
from bayesrule.families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from bayesrule.families.wishart import NormalWishart

SCALE = np.array([[0.5, 0.1], [0.1, 0.3]])
TIED = lambda: TiedNormalWishart(
    jnp.array([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]]), jnp.array([1.0, 2.0, 0.5]), 5.0, SCALE
)
SPHERICAL = lambda: SphericalNormalGamma(jnp.array([[0.0, 1.0, 2.0], [1.0, 1.0, -1.0]]), 2.0 * jnp.ones(3), 3.0, 1.5)
FAMILIES = {"tied": TIED, "spherical": SPHERICAL}


@pytest.mark.sampled("spherical")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_derivative_of_the_log_partition_is_the_expectation(name):
    q = FAMILIES[name]()
    gradient = jax.grad(lambda natural: jnp.sum(q.log_partition(natural)))(q.natural())
    for found, expected in zip(gradient, q.expectation(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    again = q.from_natural(q.natural())
    for found, expected in zip(jax.tree.leaves(again), jax.tree.leaves(q), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_sum_of_the_precisions_messages_matters(name):
    q = FAMILIES[name]()
    log, linear, cross, square = q.natural()
    axis = 0 if name == "tied" else -1
    moved = (jnp.roll(log, 1, axis) + jnp.array([1.0, -1.0, 0.0]), jnp.roll(linear, 1, axis), cross, square)
    np.testing.assert_allclose(q.log_partition(moved), q.log_partition(q.natural()), rtol=1e-12)


def test_densities_are_scipys():
    q, random = TIED(), np.random.default_rng(0)
    precision = stats.wishart(5, SCALE).rvs(random_state=0)
    means = random.normal(size=(3, 2))
    expected = stats.wishart(5, SCALE).logpdf(precision) + sum(
        stats.multivariate_normal(m, np.linalg.inv(k * precision)).logpdf(x)
        for x, m, k in zip(means, np.asarray(q.mean), np.asarray(q.count), strict=True)
    )
    theta = {"mean": jnp.asarray(means), "precision": jnp.broadcast_to(precision, (3, 2, 2))}
    assert float(q.log_prob(theta)) == pytest.approx(expected, rel=1e-12)

    q, t, x = SPHERICAL(), 0.7, random.normal(size=(2, 3))
    expected = stats.gamma(3.0, scale=1 / 1.5).logpdf(t) + stats.norm(q.mean, np.sqrt(1 / (2.0 * t))).logpdf(x).sum(1)
    theta = {"mean": jnp.asarray(x), "precision": jnp.full((2, 3), t)}
    np.testing.assert_allclose(q.log_prob(theta), expected, rtol=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_draws_have_the_expected_statistics(name):
    q, count = FAMILIES[name](), 40_000
    drawn = q.statistics(q.sample(jax.random.key(0), (count,)))
    for found, expected in zip(drawn, q.expectation(), strict=True):
        error = np.asarray(found).std(0) / np.sqrt(count)
        assert np.all(np.abs(np.asarray(found).mean(0) - expected) < 5 * error)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mode_maximizes_the_density_in_lambda(name):
    q = FAMILIES[name]()
    mode, value = q.mode(), lambda theta: q.inner(q.natural(), q.statistics(theta))
    at_mode = value(mode)
    for factor in (0.98, 1.02):
        assert np.all(value({**mode, "precision": factor * mode["precision"]}) < at_mode)
        assert np.all(value({**mode, "mean": mode["mean"] + 0.02 * factor}) < at_mode)


def test_one_mean_is_the_ordinary_family():
    tied = TiedNormalWishart(jnp.array([[1.0, 2.0]]), jnp.array([2.0]), 4.0, SCALE)
    plain = NormalWishart(jnp.array([1.0, 2.0]), 2.0, 4.0, SCALE)
    assert float(tied.entropy()) == pytest.approx(float(plain.entropy()), rel=1e-12)
    spherical = SphericalNormalGamma(jnp.array([1.0]), jnp.array([2.0]), 4.0, 3.0)
    gamma = NormalGamma(1.0, 2.0, 4.0, 3.0)
    assert float(spherical.entropy()) == pytest.approx(float(gamma.entropy()), rel=1e-12)
