"""The Gaussian nearest to a density: numbers of Infer.NET, the library's own quadrature, and few points in many
dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.inference.density import Density, average
from bayesrule.inference.gaussian import fit_gaussian, natural_errors, place, start_of
from bayesrule.inference.modes import climb, tell_apart

# x ~ N(0, 1) and one Bernoulli-logit observation y = 1: the Gaussian of the largest bound, as in Infer.NET's
# NonconjugateVMPTests.cs.
INFER_NET_MEAN, INFER_NET_VARIANCE = 0.413126805979683, 0.828868291887001


def logistic(x):
    """Every coordinate has a standard normal prior and one observation y = 1."""
    return jnp.sum(jax.nn.log_sigmoid(x) - 0.5 * x**2)


def skewed(x):
    return x[0] - jnp.exp(0.7 * x[0]) - 0.1 * x[0] ** 2


def correlated(x, center):
    return -0.5 * (x - center) @ jnp.array([[2.0, 0.9], [0.9, 1.0]]) @ (x - center)


def density_of(function, size, *arguments):
    return Density(function, arguments, jnp.zeros(size), lambda theta, *arguments: theta)


def fitted(density, *, samples=64, tolerance=1e-10, products=10**9, steps=100, seed=0):
    (mode,) = tell_apart(climb(density, np.zeros((1, density.size))))
    start = start_of(density, mode)
    how = {"samples": samples, "tolerance": tolerance, "steps": steps, "products": products}
    return fit_gaussian(density, start, np.random.default_rng(seed), **how)


@pytest.mark.extended
def test_infer_net():
    found = fitted(density_of(logistic, 1), samples=4096)
    assert (found.samples, found.converged) == (4096, True)
    at = place(found.q)
    assert_allclose(at.mean, INFER_NET_MEAN, atol=3e-5)
    assert_allclose(at.root**2, INFER_NET_VARIANCE, atol=5e-5)
    # The fit knows how good its points are.
    assert found.mean_error < 1e-4
    assert found.width_error < 1e-4


@pytest.mark.extended
def test_a_fit_with_quadrature_has_the_same_optimum():
    """The same rule over a grid of 40 nodes, to what 4096 points allow; the bounds are those of one density."""
    found = fitted(density_of(skewed, 1), samples=4096)
    rule = blr.newton(rate=0.5).replace(points=blr.Quadrature(40))
    reference = blr.fit(rule, lambda x: -skewed(x), jnp.zeros(1), steps=200, tolerance=1e-10)
    assert reference.reason == "converged"
    assert_allclose(found.q.mean, reference.q.mean, atol=1e-3)
    assert_allclose(found.q.precision, reference.q.precision, rtol=5e-4)
    assert_allclose(found.bound, reference.bound, atol=1e-3)


@pytest.mark.extended
def test_a_gaussian_density_is_exact_in_one_step():
    """With any number of points, from any mean, and with the Hessian that a search for modes gives as the precision."""
    density, precision = density_of(correlated, 2, jnp.array([3.0, -1.0])), jnp.array([[2.0, 0.9], [0.9, 1.0]])
    how = {"samples": 64, "steps": 10, "products": 10**6}
    start = blr.Gaussian(jnp.array([0.0, 1.0]), precision)
    found = fit_gaussian(density, start, np.random.default_rng(0), tolerance=1e-9, **how)
    assert (found.steps, found.converged, found.samples) == (1, True, 64)
    assert_allclose(found.q.mean, [3.0, -1.0], atol=1e-9)
    assert_allclose(found.q.precision, precision, atol=1e-9)
    assert_allclose(found.bound, np.log(2 * np.pi) - 0.5 * np.log(2.0 - 0.81), atol=1e-9)
    # From a wrong precision it takes a few more, because a step must leave the precision positive.
    narrow = blr.Gaussian(jnp.array([0.0, 1.0]), 4.0 * jnp.eye(2))
    again = fit_gaussian(density, narrow, np.random.default_rng(0), tolerance=1e-12, **how)
    assert again.converged
    assert_allclose(again.q.precision, precision, atol=1e-5)
    assert_allclose(again.bound, found.bound, atol=1e-10)


@pytest.fixture(scope="module")
def sixty():
    """Sixty dimensions, and no budget for more than 64 points."""
    return fitted(density_of(logistic, 60), products=60_000, tolerance=1e-4)


@pytest.mark.extended
def test_few_points_in_many_dimensions_are_not_too_wide(sixty):
    """By Stein's identity standard deviations came out six times too wide; the Hessians at the points hold them."""
    assert (sixty.samples, sixty.converged) == (64, True)
    at = place(sixty.q)
    deviations = np.sqrt(np.sum(at.root**2, axis=0))
    assert_allclose(deviations, np.sqrt(INFER_NET_VARIANCE), rtol=0.02)
    assert_allclose(at.mean, INFER_NET_MEAN, atol=0.05 * np.sqrt(INFER_NET_VARIANCE))


@pytest.mark.extended
def test_the_error_of_the_points_is_about_the_error(sixty):
    """The natural gradient at fresh points says by how much means and widths are off, within a factor of three."""
    at = place(sixty.q)
    deviation = np.sqrt(INFER_NET_VARIANCE)
    mean_error = np.max(np.abs(at.mean - INFER_NET_MEAN)) / deviation
    assert mean_error / 3 < sixty.mean_error < 3 * mean_error


@pytest.mark.extended
def test_natural_errors_are_the_way_to_the_optimum():
    """A Gaussian density seen from q with twice its precision: half of the way in the mean, a quarter of the width."""
    center, precision = np.array([3.0, -1.0]), np.array([[2.0, 0.9], [0.9, 1.0]])
    at = place(blr.Gaussian(jnp.asarray(center) + jnp.array([0.2, -0.1]), jnp.asarray(2.0 * precision)))
    noise = np.random.default_rng(0).normal(size=(8, 2))
    there = average(density_of(correlated, 2, jnp.asarray(center)), at.points(np.concatenate([noise, -noise])))
    deviations = np.sqrt(np.diagonal(np.linalg.inv(2.0 * precision)))
    assert_allclose(natural_errors(at, there), [np.max(0.5 * np.array([0.2, 0.1]) / deviations), 0.25], rtol=1e-10)


@pytest.mark.extended
def test_the_same_key_gives_the_same_answer():
    """The fixed points are no matter of chance, and the key is that of the points that judge them."""
    density = density_of(logistic, 1)
    one, two, other = (fitted(density, samples=64, products=1, seed=seed) for seed in (0, 0, 1))
    assert one.mean_error == two.mean_error
    assert_allclose(place(one.q).root, place(two.q).root, rtol=0, atol=0)
    assert one.mean_error != other.mean_error
    assert_allclose(place(one.q).mean, place(other.q).mean, rtol=0, atol=0)


def test_more_points_are_taken_where_the_error_asks_for_them():
    """A budget of nothing stays at 8 points; with one, the errors are within what is promised."""
    density = density_of(skewed, 1)
    poor, rich = fitted(density, samples=8, products=1), fitted(density, samples=8)
    assert poor.samples == 8
    assert min(poor.mean_error, poor.width_error) > 0.015
    assert rich.samples > 8
    assert max(rich.mean_error, rich.width_error) <= 0.015


@pytest.mark.extended
def test_single_precision_says_converged_at_its_own_rounding():
    with jax.enable_x64(False):
        density = density_of(logistic, 1)
        found = fitted(density, samples=64, products=1)
    assert found.converged
    assert found.q.mean.dtype == jnp.float32
    assert_allclose(found.q.mean, INFER_NET_MEAN, atol=2e-3)
