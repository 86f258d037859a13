"""Draws moved by Hamiltonian Monte Carlo: they become draws of the density, and say whether they have settled."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import digamma, polygamma

import bayesrule as blr
from bayesrule.inference.density import Density
from bayesrule.inference.moves import KEPT, MovedMoments, Whitened, moved_draws, precise

SHAPE = 3.0
MEAN, STD = float(digamma(SHAPE)), math.sqrt(float(polygamma(1, SHAPE)))  # of the logarithm of a gamma variable


def log_gammas(x):
    return jnp.sum(SHAPE * x - jnp.exp(x))


def funnel(x):
    return -0.5 * (x[0] / 3.0) ** 2 + jnp.sum(-0.5 * x[1:] ** 2 * jnp.exp(-x[0]) - 0.5 * x[0])


def moved_from(function, mean, std, kept=KEPT[0]):
    """The moments of draws of a diagonal Gaussian after their moves, and the draws."""
    size = len(mean)
    density = Density(function, (), jnp.zeros(size), lambda x: x)
    chains = moved_draws(density, Whitened(mean, np.diag(std)), np.random.default_rng(0))
    moments = MovedMoments(mean, std)
    draws = []
    for one in itertools.islice(chains, kept):
        moments.add(one.points)
        draws.append(one.points)
    return moments, np.stack(draws)


@pytest.mark.sampled("2")
@pytest.mark.parametrize("size", [2, 40])
def test_moved_draws_are_draws_of_the_density(size):
    """From a Gaussian whose means and widths are wrong to the exact moments, within their stated errors."""
    mean, std = np.full(size, MEAN + 0.4 * STD), np.full(size, 1.3 * STD)
    moments, draws = moved_from(log_gammas, mean, std, kept=KEPT[-1])
    shift, settled = moments.shift()
    assert settled
    assert precise(shift)
    # The largest of 40 or 80 standardised errors is rarely above four.
    assert np.max(np.abs(shift.mean + 0.4) / shift.mean_error) < 4.0
    assert np.max(np.abs(shift.width - 0.3) / (1.3 * shift.width_error)) < 4.0
    # What the sums say is what the draws say.
    flat = draws.reshape(-1, size)
    assert_allclose(shift.mean, (np.mean(flat, axis=0) - mean) / np.std(flat, axis=0), rtol=1e-9)
    assert_allclose(shift.width, std / np.std(flat, axis=0) - 1, rtol=1e-9)
    averages = np.mean((draws - np.mean(flat, axis=0)) / np.std(flat, axis=0), axis=0)
    assert_allclose(shift.mean_error, np.std(averages, axis=0) / math.sqrt(draws.shape[1]), rtol=1e-9)


def test_draws_in_a_funnel_do_not_settle():
    _, settled = moved_from(funnel, np.zeros(10), np.ones(10))[0].shift()
    assert not settled


def test_a_number_that_does_not_change_has_no_shift():
    moments = MovedMoments(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    rng = np.random.default_rng(0)
    for _ in range(20):
        moments.add(np.stack([np.ones(64), rng.standard_normal(64)], axis=1))
    shift, settled = moments.shift()
    assert settled
    assert shift.mean[0] == shift.width[0] == shift.mean_error[0] == 0.0


@pytest.mark.extended
def test_many_skewed_numbers_are_trusted_and_right():
    """Importance weights of 150 skewed numbers say nothing; moved draws do."""
    size, key = 150, jax.random.key(0)
    posterior = blr.infer(log_gammas, jnp.zeros(size), key=key)
    assert posterior.density.products == 8
    assert posterior.trust == "trust"
    assert posterior.record.judgement.by_moves
    draws = posterior.samples(jax.random.key(1), 4000)
    assert draws.shape == (4000, size)
    # What is promised, and four standard errors of 4000 draws.
    assert np.max(np.abs(np.mean(draws, axis=0) - MEAN)) < (0.1 + 4 / math.sqrt(4000)) * STD
    assert_allclose(np.std(draws, axis=0), STD, rtol=0.1 + 4 / math.sqrt(8000))


def test_moved_draws_survive_saving(tmp_path):
    from bayesrule.inference.posterior import load_posterior

    one_skewed = lambda x: 1.5 * x[0] - jnp.exp(x[0]) + jnp.sum(5.0 * x[1:] - jnp.exp(x[1:]))
    posterior = blr.infer(one_skewed, jnp.zeros(70), key=jax.random.key(0))
    assert posterior.record.judgement.source == "moves"
    posterior.save(tmp_path / "posterior.npz")
    loaded = load_posterior(tmp_path / "posterior.npz", posterior.density)
    one, two = (each.samples(jax.random.key(2), 50) for each in (posterior, loaded))
    assert_allclose(one, two, rtol=1e-9, atol=1e-9)
    assert "Hamiltonian" in loaded.verdict
