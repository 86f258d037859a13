"""The low-rank Gaussian against the full one with the same precision, alone and in a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

BATCHES = pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)


def member(batch):
    """A low-rank member (or a batch of them) over four numbers."""
    random = np.random.default_rng(0)
    mean, diagonal = random.normal(size=(*batch, 4)), np.exp(random.normal(size=(*batch, 4)))
    return blr.LowRankGaussian(mean, diagonal, random.normal(size=(*batch, 4, 2)))


@jax.jit
def described(low):
    """What it says of itself, and what the same distribution with a full precision says."""
    full = blr.Gaussian(low.mean, low.precision)
    other = blr.Gaussian(low.mean + 1, 2 * full.precision)
    theta = low.sample(jax.random.key(1), (5,))
    of = lambda q: (q.log_prob(theta), q.entropy(), q.kl(other), q.covariance(), q.variance())
    return theta, of(low), of(full), (low.kl(full), full.kl(low)), low.solve(low.times(low.mean)), low.inside()


@BATCHES
def test_density_and_moments(batch):
    low = member(batch)
    theta, mine, theirs, nothing, back, inside = described(low)
    assert theta.shape == (5, *batch, 4)
    for ours, full, tolerance in zip(mine, theirs, (1e-12, 1e-12, 1e-12, 1e-10, 1e-10), strict=True):
        np.testing.assert_allclose(ours, full, rtol=tolerance, atol=1e-13 if ours.ndim > len(batch) + 1 else 0)
    for divergence in nothing:
        np.testing.assert_allclose(divergence, 0, atol=1e-12)
    np.testing.assert_allclose(back, low.mean, rtol=1e-10)
    assert np.all(inside)


@jax.jit
def deviations(low):
    return low.sample(jax.random.key(2), (20_000,)) - low.mean, low.covariance()


@BATCHES
def test_samples_have_the_covariance(batch):
    theta, covariance = (np.asarray(x) for x in deviations(member(batch)))
    products = theta[..., :, None] * theta[..., None, :]
    error = np.std(products, axis=0) / len(theta) ** 0.5
    assert np.all(np.abs(np.mean(products, axis=0) - covariance) <= 5 * error)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"over 4 numbers has shape \(…, 4, rank\)"):
        blr.LowRankGaussian(jnp.zeros(4), 1.0, jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="is a matrix"):
        blr.LowRankGaussian(jnp.zeros(4), 1.0, jnp.zeros(4))
