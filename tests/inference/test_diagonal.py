"""Many numbers: q is diagonal where Hessians are out of reach, and moved draws judge and replace it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.inference import infer as infer_module
from bayesrule.inference.density import Density
from bayesrule.inference.diagonal import fit_diagonal, start_around

GROUPS = 80
Y = np.random.default_rng(0).normal(1.0, 1.4, GROUPS)


def groups(p, y):
    """Effects of groups around a common mean, each observed once with noise: a Gaussian with known moments."""
    prior = -0.5 * jnp.sum((p["effects"] - p["mean"]) ** 2) - 0.5 * (p["mean"] / 3.0) ** 2
    return prior - 0.5 * jnp.sum((y - p["effects"]) ** 2)


# The mean, of which y₁ … y_G are observations with variance 2, and the effects, half way between it and y.
PRECISION = 1 / 9 + GROUPS / 2
MEAN = 0.5 * np.sum(Y) / PRECISION
EFFECTS, DEVIATION = 0.5 * (Y + MEAN), np.sqrt(0.5 + 0.25 / PRECISION)
SHAPES = {"mean": (), "effects": (GROUPS,)}


def check_moments(posterior):
    """All means within 0.1 standard deviations and all standard deviations within 10 %, as "trust" promises."""
    draws = posterior.samples(jax.random.key(2), 10_000)
    assert abs(np.mean(draws["mean"]) - MEAN) < 0.1 * PRECISION**-0.5
    assert_allclose(np.std(draws["mean"]), PRECISION**-0.5, rtol=0.1)
    assert np.max(np.abs(np.mean(draws["effects"], axis=0) - EFFECTS)) < 0.1 * DEVIATION
    assert_allclose(np.std(draws["effects"], axis=0), DEVIATION, rtol=0.1)


@pytest.fixture(scope="module")
def posterior():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_module, "MOST_CORRELATED", 60)
        return blr.infer(groups, SHAPES, args=(jnp.asarray(Y),), key=jax.random.key(1))


def test_more_numbers_than_a_covariance_has_room_for(posterior):
    assert isinstance(posterior.q, blr.DiagonalGaussian)
    assert "DiagonalGaussian" in str(posterior.rule)
    assert posterior.trust == "trust"
    assert "Hamiltonian Monte Carlo" in posterior.verdict  # q itself has no correlations
    check_moments(posterior)


def test_an_earlier_q_is_a_start(posterior):
    again = blr.infer(groups, posterior.q, args=(jnp.asarray(Y),), key=jax.random.key(3))
    assert isinstance(again.q, blr.DiagonalGaussian)
    assert again.trust == "trust"
    check_moments(again)


def test_a_small_budget_of_products():
    """Of a Hessian without zeros the budget allows for none, so that q is diagonal."""
    mixing = np.random.default_rng(1).normal(size=(64, 64)) / 64**0.5
    precision = np.eye(64) + mixing @ mixing.T

    def dense(x, precision):
        return -0.5 * x @ precision @ x

    posterior = blr.infer(dense, (64,), args=(jnp.asarray(precision),), key=jax.random.key(0), products=1000)
    assert isinstance(posterior.q, blr.DiagonalGaussian)
    assert posterior.trust == "trust"
    deviations = np.sqrt(np.diagonal(np.linalg.inv(precision)))
    draws = posterior.samples(jax.random.key(1), 10_000)
    assert np.max(np.abs(np.mean(draws, axis=0)) / deviations) < 0.1
    assert_allclose(np.std(draws, axis=0), deviations, rtol=0.1)


def test_the_fixed_points_have_an_optimum():
    """Independent numbers of very different widths: q is the density, to the error of 32 points."""
    scales = np.geomspace(1e-3, 1e3, 40)
    density = Density(lambda x: -0.5 * jnp.sum((x / scales - 1.0) ** 2), (), jnp.zeros(40), lambda x: x)
    start = start_around(density, np.zeros(40))
    fit, interrupted = fit_diagonal(density, start, tolerance=1e-4, follow=lambda q, bound, steps: None)
    assert fit.converged
    assert not interrupted
    assert_allclose(fit.q.mean, scales, rtol=0.05)
    assert_allclose(np.asarray(fit.q.precision) ** -0.5, scales, rtol=0.05)
    exact = np.sum(np.log(scales)) + 20 * np.log(2 * np.pi)
    assert exact - 0.5 < fit.bound <= exact + 0.5
