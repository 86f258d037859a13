"""Modes: starts are climbed from anywhere, the ends told apart and weighed by Laplace's evidence."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal

from bayesrule.inference.density import Density
from bayesrule.inference.modes import calibrate, climb, draw_starts, positive_definite, tell_apart

PRECISION = np.array([[2.0, 0.9, 0.0], [0.9, 1.0, -0.3], [0.0, -0.3, 5.0]])
CENTER = np.array([1.0, -20.0, 0.3])


def density_of(function, size, *arguments):
    return Density(function, arguments, jnp.zeros(size), lambda theta, *arguments: theta)


def gaussian(x, center):
    return 2.5 - 0.5 * (x - center) @ PRECISION @ (x - center)


def two_wells(x):
    """0.7 N(−4, 1) + 0.3 N(4, 0.5²), and a second coordinate that is standard normal."""
    left = math.log(0.7) - 0.5 * (x[0] + 4.0) ** 2
    right = math.log(0.3) - 2.0 * (x[0] - 4.0) ** 2 + math.log(2.0)
    return jnp.logaddexp(left, right) - 0.5 * x[1] ** 2 - math.log(2 * math.pi)


def saddle(x):
    """Minima at (±1, 0), a saddle point at zero, where the Hessian has eigenvalues −4 and 3."""
    return -((x[0] ** 2 - 1.0) ** 2) - 1.5 * x[1] ** 2


def centred(x):
    """A hierarchy of five values with their mean and log scale: infinite where all are equal and the scale is zero."""
    mean, log_scale, values = x[0], x[1], x[2:]
    observed = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0])
    prior = -0.5 * (mean / 5.0) ** 2 + log_scale - jnp.log1p(jnp.exp(2 * log_scale) / 25.0)
    between = jnp.sum(-0.5 * ((values - mean) / jnp.exp(log_scale)) ** 2 - log_scale)
    return prior + between - 0.5 * jnp.sum(((observed - values) / 12.0) ** 2)


def test_the_evidence_of_a_gaussian_is_exact():
    """One step of Newton's method from any start: all agree, and Laplace's evidence is the evidence."""
    density = density_of(gaussian, 3, jnp.asarray(CENTER))
    starts = draw_starts(density, np.random.default_rng(0), 4, None)
    (mode,) = tell_apart(climb(density, starts))
    assert (mode.starts, mode.converged) == (4, True)
    assert_allclose(mode.position, CENTER, atol=1e-10)
    assert_allclose(mode.precision, PRECISION, atol=1e-10)
    exact = 2.5 - multivariate_normal(CENTER, np.linalg.inv(PRECISION)).logpdf(CENTER)
    assert_allclose(mode.evidence, exact, atol=1e-10)


def test_two_modes_are_told_apart_and_weighed():
    density = density_of(two_wells, 2)
    modes = tell_apart(climb(density, np.array([[-3.0, 1.0], [3.5, -1.0], [-6.0, 0.0], [5.0, 2.0], [-2.0, 2.0]])))
    assert [mode.starts for mode in modes] == [3, 2]
    assert_allclose([mode.position for mode in modes], [[-4.0, 0.0], [4.0, 0.0]], atol=1e-6)
    assert_allclose([mode.evidence for mode in modes], np.log([0.7, 0.3]), atol=1e-6)
    assert all(mode.converged for mode in modes)


def test_a_start_at_an_indefinite_hessian_leaves_the_saddle_point():
    ends = climb(density_of(saddle, 2), np.array([[1e-3, 2.0], [-1e-3, 2.0], [0.05, -1.0]]))
    assert_allclose([end.position for end in ends], [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], atol=5e-4)
    assert all(end.converged for end in ends)
    # A start has arrived where no more than 1e-6 nats are to gain: √(2e-6/8) = 5e-4 from the mode.
    assert_allclose(ends[0].precision, [[8.0, 0.0], [0.0, 3.0]], atol=24 * 5e-4)


def test_absolute_eigenvalues():
    indefinite = np.array([[1.0, 2.0], [2.0, 1.0]])  # eigenvalues 3 and −1
    matrix, definite = positive_definite(indefinite)
    assert not definite
    assert_allclose(matrix, [[2.0, 1.0], [1.0, 2.0]], atol=1e-12)
    assert positive_definite(PRECISION)[1]


@pytest.mark.extended
def test_a_density_without_a_mode_gives_a_place_of_much_mass():
    """Newton's method falls into the infinite density; what is kept is on the way, at a scale above zero."""
    density = density_of(centred, 7)
    ends = climb(density, draw_starts(density, np.random.default_rng(0), 4, None))
    best = tell_apart(ends)[0]
    assert np.isfinite(best.evidence)
    assert np.all(np.linalg.eigvalsh(best.precision) > 0)
    assert -3.0 < best.position[1] < 4.0  # log scale; Newton's method is below −10 when it gives up


def test_widths_are_calibrated_by_the_density_itself():
    """From a precision a thousand times too small, the density at one standard deviation gives the right one."""
    density = density_of(gaussian, 3, jnp.asarray(CENTER))
    (mode,) = tell_apart(climb(density, CENTER[None]))
    wide = calibrate(density, mode._replace(precision=1e-3 * PRECISION))
    ratios = np.linalg.eigvalsh(wide.precision) / np.linalg.eigvalsh(PRECISION)
    assert_allclose(ratios, 1.0, rtol=1e-6)


def test_starts_are_where_the_density_is_finite():
    density = density_of(lambda x: jnp.where(x[0] > 0.3, -x[0], -jnp.inf), 1)
    starts = draw_starts(density, np.random.default_rng(1), 8, np.array([0.5]))
    assert starts[0] == 0.5
    assert len(starts) > 4
    assert np.all(starts > 0.3)
    nowhere = density_of(lambda x: jnp.full((), -jnp.inf), 1)
    assert len(draw_starts(nowhere, np.random.default_rng(1), 8, None)) == 0


@pytest.mark.extended
@pytest.mark.parametrize("behind", [False, True])
def test_modes_of_no_weight_are_left_out(behind):
    """A second mode eight nats behind has less than a thousandth of the weight."""
    weight = -8.0 if behind else -3.0
    double = lambda x, w: jnp.logaddexp(-0.5 * x[0] ** 2, w - 0.5 * (x[0] - 20.0) ** 2)
    modes = tell_apart(climb(density_of(double, 1, jnp.asarray(weight)), np.array([[1.0], [19.0]])))
    assert len(modes) == (1 if behind else 2)
