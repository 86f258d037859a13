"""The low-rank Gaussian against the full one with the same precision, alone and in a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr


@pytest.fixture(params=[(), (3,), (2, 3)], ids=str)
def pair(request):
    """A low-rank member (or a batch of them) over four numbers, and the same distribution with a full precision."""
    keys = jax.random.split(jax.random.key(0), 3)
    mean = jax.random.normal(keys[0], (*request.param, 4))
    diagonal = jnp.exp(jax.random.normal(keys[1], (*request.param, 4)))
    low = blr.LowRankGaussian(mean, diagonal, jax.random.normal(keys[2], (*request.param, 4, 2)))
    return low, blr.Gaussian(mean, low.precision)


def test_density_and_moments(pair):
    low, full = pair
    theta = low.sample(jax.random.key(1), (5,))
    assert theta.shape == (5, *low.batch_shape, 4)
    np.testing.assert_allclose(low.log_prob(theta), full.log_prob(theta), rtol=1e-12)
    np.testing.assert_allclose(low.entropy(), full.entropy(), rtol=1e-12)
    np.testing.assert_allclose(low.covariance(), full.covariance(), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(low.variance(), full.variance(), rtol=1e-10)
    np.testing.assert_allclose(low.kl(full), 0, atol=1e-12)
    np.testing.assert_allclose(full.kl(low), 0, atol=1e-12)
    other = blr.Gaussian(low.mean + 1, 2 * full.precision)
    np.testing.assert_allclose(low.kl(other), full.kl(other), rtol=1e-12)
    np.testing.assert_allclose(low.solve(low.times(low.mean)), low.mean, rtol=1e-10)
    assert jnp.all(low.inside())


def test_samples_have_the_covariance(pair):
    low, _ = pair
    draws = 20_000
    theta = low.sample(jax.random.key(2), (draws,)) - low.mean
    products = theta[..., :, None] * theta[..., None, :]
    error = jnp.std(products, axis=0) / draws**0.5
    assert jnp.all(jnp.abs(jnp.mean(products, axis=0) - low.covariance()) <= 5 * error)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"over 4 numbers has shape \(…, 4, rank\)"):
        blr.LowRankGaussian(jnp.zeros(4), 1.0, jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="is a matrix"):
        blr.LowRankGaussian(jnp.zeros(4), 1.0, jnp.zeros(4))
