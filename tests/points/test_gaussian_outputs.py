"""Points of Gaussian outputs: their moments are the outputs', and constants stay constant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

import bayesrule as blr
from bayesrule.points.gaussian_outputs import output_points

MEAN = jnp.array([[0.3, -1.0], [0.5, 2.0], [0.0, 0.1]])
ROOT = jnp.array([[[1.0, 0.0], [0.4, 0.7]], [[0.2, 0.0], [-0.9, 0.3]], [[2.0, 0.0], [0.5, 1.0]]])
COVARIANCE = ROOT @ jnp.swapaxes(ROOT, 1, 2)


@pytest.mark.parametrize("points", [blr.Quadrature(4), blr.QuasiMonteCarlo(256)], ids=repr)
def test_the_points_have_the_outputs_moments(points):
    noise, weights = points.output_noise(MEAN, None)
    exact = 1e-12 if isinstance(points, blr.Quadrature) else 0.05  # Sobol's points are only nearly uncorrelated
    for covariance in (COVARIANCE, jnp.diagonal(COVARIANCE, axis1=1, axis2=2)):
        outputs = output_points(MEAN, covariance, noise)
        np.testing.assert_allclose(jnp.tensordot(weights, outputs, axes=1), MEAN, atol=1e-12)
        second = jnp.einsum("s,sbk,sbl->bkl", weights, outputs - MEAN, outputs - MEAN)
        dense = covariance if covariance.ndim == 3 else covariance[..., None] * jnp.eye(2)
        np.testing.assert_allclose(second, dense, atol=exact * 5)


def test_one_output_has_the_same_points_in_every_shape():
    """As (B,) with variances, and as (B, 1) with variances or matrices."""
    mean, variance = MEAN[:, 0], jnp.array([0.5, 2.0, 0.0])
    points = blr.Quadrature(5)
    flat = output_points(mean, variance, points.output_noise(mean, None)[0])
    noise = points.output_noise(mean[:, None], None)[0]
    for covariance in (variance[:, None], variance[:, None, None]):
        np.testing.assert_array_equal(output_points(mean[:, None], covariance, noise)[..., 0], flat)


def test_every_row_may_have_its_own_noise():
    noise, weights = blr.MonteCarlo(6, antithetic=True).output_noise(MEAN, jax.random.key(0))
    assert noise.shape == (6, 3, 2)
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(noise[:3], -noise[3:])
    expected = MEAN + jnp.einsum("bkl,sbl->sbk", ROOT, noise)
    np.testing.assert_allclose(output_points(MEAN, COVARIANCE, noise), expected, rtol=1e-12)


def test_an_output_that_does_not_vary_has_a_derivative_of_zero():
    nodes = blr.Quadrature(3).output_noise(jnp.zeros(2), None)[0]
    total = lambda variance: jnp.sum(output_points(jnp.zeros(2), variance, nodes) ** 2)
    np.testing.assert_allclose(jax.grad(total)(jnp.array([0.0, 4.0])), [0.0, 6.0], atol=1e-12)  # Σ_s ε_s² = 6


def test_singular_covariances_have_points():
    """Two outputs that are the same, and two that do not vary."""
    covariance = jnp.array([[[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    outputs = output_points(MEAN, covariance, blr.Quadrature(3).output_noise(MEAN, None)[0])
    deviation = outputs - MEAN
    np.testing.assert_allclose(deviation[:, 0, 0], deviation[:, 0, 1], atol=1e-6)
    np.testing.assert_allclose(deviation[:, 1], 0.0, atol=1e-6)


def test_points_of_theta_alone_have_no_output_noise():
    with pytest.raises(ValueError, match="points of θ"):
        blr.Relaxed().output_noise(MEAN, None)


@pytest.mark.parametrize("deviation", [0.3, 1.49, 1.51, 5.0, 30.0, 300.0])
def test_nodes_around_a_bend_integrate_a_logistic_loss_at_any_width(deviation):
    """Loss, slope and curvature against SciPy's adaptive quadrature, split at the bend."""
    offsets = np.array([0.0, 0.4, -1.0, 2.5, -5.9, 6.1, 9.0])
    mean = offsets * deviation
    points, weights = blr.Quadrature(24, bend=1.0).output_grid(jnp.asarray(mean), jnp.full(7, deviation**2), None)
    assert weights.shape == points.shape == (24, 7)
    functions = (lambda f: np.logaddexp(0, f), expit, lambda f: expit(f) * expit(-f))
    errors = (2e-5 * (1 + deviation), 2e-5, 1e-2 * min(1.0, 1 / deviation) if deviation > 50 else 1e-4 / deviation)
    for function, error in zip(functions, errors, strict=True):
        found = np.sum(np.asarray(weights) * function(np.asarray(points)), axis=0)
        for row, m in enumerate(mean):
            breaks = sorted({float(np.clip(b, m - 9 * deviation, m + 9 * deviation)) for b in (-30, -4, 0, 4, 30)})
            ends = m - 9 * deviation, m + 9 * deviation
            integrand = lambda f, m=m, g=function: g(f) * norm.pdf(f, m, deviation)
            expected = quad(integrand, *ends, points=breaks, limit=400, epsabs=1e-13, epsrel=1e-11)[0]
            assert abs(found[row] - expected) < error
    plain = blr.Quadrature(24).output_grid(jnp.asarray(mean), jnp.full(7, deviation**2), None)[0]
    np.testing.assert_allclose(points[:, -1], plain[:, -1])  # Far from the bend they are Gauss–Hermite nodes.
