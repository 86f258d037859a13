"""Importance weights: PSIS as ArviZ has it, the evidence and the shifts of densities whose moments are known."""

import math

import arviz
import numpy as np
import pytest
from numpy.testing import assert_allclose

from bayesrule.inference.importance import importance, shift_of

# Log ratios with tails of all kinds; tails of 95, 30, 190 and 120 of them.
RATIOS = {
    "heavy": lambda rng: np.abs(rng.standard_t(3, 1000)),
    "short": lambda rng: rng.normal(size=150),
    "wide": lambda rng: 3.0 * rng.normal(size=4000),
    "bounded": lambda rng: rng.uniform(size=1600),
}


@pytest.mark.parametrize("name", RATIOS)
def test_psis_is_that_of_arviz(name):
    ratios = RATIOS[name](np.random.default_rng(0)) - 700.0  # A log density has any constant.
    ours = importance(ratios)
    weights, khat = arviz.psislw(ratios)
    assert_allclose(ours.khat, float(khat), rtol=1e-10)
    assert_allclose(ours.log_weights, weights, atol=1e-10)
    assert_allclose(np.exp(ours.log_weights).sum(), 1.0, rtol=1e-12)


def gaussian_ratio(width, count, seed=0, shift=0.0):
    """Draws of q = N(0, 1), and log p − log q for p = e³ N(shift, width²)."""
    x = np.random.default_rng(seed).normal(size=count)
    return x, 3.0 - 0.5 * ((x - shift) / width) ** 2 - math.log(width) + 0.5 * x**2


def test_the_evidence_is_within_its_error():
    """Forty independent estimates: their errors, in standard errors, are those of standard normal numbers."""
    found = [importance(gaussian_ratio(0.8, 2000, seed)[1]) for seed in range(40)]
    scores = np.array([(one.evidence - 3.0) / one.evidence_error for one in found])
    assert abs(np.mean(scores)) < 4 / math.sqrt(40)
    assert 0.6 < np.std(scores) < 1.5  # The standard error of a standard deviation from 40 numbers is 0.11.
    # E_q log w has a closed form: 3 − log s + ½ − ½/s².
    exact = 3.0 - math.log(0.8) + 0.5 - 0.5 / 0.64
    scores = np.array([(one.bound - exact) / one.bound_error for one in found])
    assert abs(np.mean(scores)) < 4 / math.sqrt(40)
    assert 0.6 < np.std(scores) < 1.5


def test_the_effective_number_is_that_of_the_weights():
    """E w² of N(0, s²) beside N(0, 1) has a closed form: 1 / (s √(2 − s²))."""
    found = importance(gaussian_ratio(0.8, 200_000)[1])
    assert_allclose(found.effective / 200_000, 0.8 * math.sqrt(2 - 0.64), rtol=0.01)


@pytest.mark.parametrize(("width", "is_heavy"), [(0.9, False), (2.0, True)])
def test_khat_tells_a_heavy_tail(width, is_heavy):
    """The weights p/q of N(0, s²) have a tail of shape 1 − 1/s², which is 0.75 for s = 2."""
    khat = importance(gaussian_ratio(width, 4000)[1]).khat
    assert (khat > 0.5) == is_heavy
    assert khat < 0.9


def test_a_density_that_is_zero_at_some_draws():
    """Half of the draws have no weight: the evidence is that of half a Gaussian, and the bound is −∞."""
    x, ratios = gaussian_ratio(0.8, 4000)
    found = importance(np.where(x > 0, ratios, -np.inf))
    assert found.bound == -np.inf
    assert np.all(np.isneginf(found.log_weights[x <= 0]))
    assert abs(found.evidence - (3.0 + math.log(0.5))) < 4 * found.evidence_error
    nowhere = importance(np.full(100, -np.inf))
    assert nowhere.evidence == -np.inf
    assert (nowhere.khat, nowhere.effective) == (np.inf, 0.0)


def test_shifts_are_those_of_the_exact_moments():
    """p = N(0.3, 0.8²) beside q = N(0, 1): the mean is off by 0.3/0.8, the width by 1/0.8 − 1."""
    scores = []
    for seed in range(30):
        x, ratios = gaussian_ratio(0.8, 2000, seed, shift=0.3)
        shift = shift_of(np.stack([x, 5.0 - 2.0 * x, np.ones_like(x)], axis=1), importance(ratios).log_weights)
        # A change of units changes the sign of a shift and nothing else, and a constant has none.
        assert_allclose(shift.mean, [shift.mean[0], -shift.mean[0], 0.0], atol=1e-12)
        assert_allclose(shift.width, [shift.width[0], shift.width[0], 0.0], atol=1e-12)
        scores.append([(shift.mean[0] - 0.375) / shift.mean_error[0], (shift.width[0] - 0.25) / shift.width_error[0]])
    scores = np.array(scores)
    assert np.all(np.abs(np.mean(scores, axis=0)) < 4 / math.sqrt(30) * np.std(scores, axis=0))
    # The errors are first-order ones, of the same draws weighted and not: right within a factor of two.
    assert np.all((np.std(scores, axis=0) > 0.5) & (np.std(scores, axis=0) < 2.0))


def test_equal_weights_show_no_shift():
    x = np.random.default_rng(1).normal(size=(500, 3))
    shift = shift_of(x, np.full(500, -math.log(500)))
    for leaf in shift:
        assert_allclose(leaf, 0.0, atol=1e-12)
