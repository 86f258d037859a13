"""The figures' numbers against closed forms and SciPy's quadrature, and that they draw."""

import subprocess
import sys
from io import BytesIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import brentq

from bayesrule.gallery import paper_figures as figures
from bayesrule.gallery.paper_figures import BOWL, FLAT, SHARP, SLOPE, STEEPNESS, WIDTH


@pytest.fixture(scope="module")
def wall():
    return figures.wall_solutions()


@pytest.fixture(scope="module")
def wells():
    return figures.wells_solutions()


def average(function, mean, variance, **options):
    """E f(θ) under N(mean, variance)."""
    sd = np.sqrt(variance)
    density = lambda x: np.exp(-0.5 * (x - mean) ** 2 / variance) / (sd * np.sqrt(2 * np.pi))
    integrand = lambda x: function(x) * density(x)
    return quad(integrand, mean - 12 * sd, mean + 14 * sd, epsabs=1e-11, epsrel=1e-11, limit=500, **options)[0]


# The wall.


@pytest.mark.extended
def test_the_minimum_is_next_to_the_wall(wall):
    assert float(wall.plain.q.mean) == pytest.approx(np.log(SLOPE / STEEPNESS) / STEEPNESS, abs=1e-12)


@pytest.mark.extended
def test_a_fixed_gaussian_keeps_away_from_the_wall(wall):
    offset = float(wall.plain.q.mean - wall.bayesian.q.mean)
    assert offset == pytest.approx(0.5 * STEEPNESS * WIDTH**2, abs=1e-9)


def test_a_fixed_gaussian_is_where_the_average_gradient_is_zero(wall):
    slope = lambda x: STEEPNESS * np.exp(STEEPNESS * x) - SLOPE
    root = brentq(lambda m: average(slope, m, WIDTH**2), -2.0, 0.0, xtol=1e-12)
    assert float(wall.bayesian.q.mean) == pytest.approx(root, abs=1e-8)


def test_a_learned_precision_is_the_average_curvature(wall):
    q = wall.learned.q
    assert float(q.precision[0, 0]) == pytest.approx(STEEPNESS * SLOPE, abs=1e-8)
    assert float(wall.plain.q.mean - q.mean) == pytest.approx(1 / (2 * SLOPE), abs=1e-8)


# A sharp minimum and a flat one.


def smoothed(mean, variance, order=0):
    """E ℓ under N(mean, variance) in closed form, a well stays a Gaussian one; or its derivatives in the mean."""
    total = (0.5 * BOWL * (mean**2 + variance), BOWL * mean, BOWL)[order]
    for center, depth, width in (FLAT, SHARP):
        wide, away = width**2 + variance, mean - center
        well = -depth * width / np.sqrt(wide) * np.exp(-0.5 * away**2 / wide)
        total = total + well * (1.0, -away / wide, (away**2 / wide - 1) / wide)[order]
    return total


@pytest.mark.extended
def test_the_plain_solution_is_the_sharp_minimum(wells):
    grid = np.linspace(-6, 6, 120_001)
    lowest = grid[np.argmin(smoothed(grid, 0.0))]
    actual = float(wells.plain.q.mean)
    assert actual == pytest.approx(lowest, abs=1e-4)
    assert abs(actual - SHARP[0]) < SHARP[2]
    assert smoothed(actual, 0.0, 1) == pytest.approx(0, abs=1e-6)


def test_the_bayesian_solution_is_in_the_flat_well(wells):
    q = wells.bayesian.q
    assert abs(float(q.mean) - FLAT[0]) < FLAT[2]
    assert wells.plain is wells.newton[1]
    assert wells.bayesian is wells.averaged[0]


def test_the_bayesian_solutions_are_stationary(wells):
    """E_q∇ℓ = 0 and E_q∇²ℓ = S in either well."""
    for result in wells.averaged:
        mean, precision = float(result.q.mean), float(result.q.precision[0, 0])
        average_of = lambda order, m=mean, s=precision: average(
            lambda x: smoothed(x, 0.0, order), m, 1 / s, points=(1.2, 1.4, 1.5, 1.6, 1.8)
        )
        assert average_of(1) == pytest.approx(0, abs=1e-8)
        assert average_of(2) == pytest.approx(precision, rel=1e-8)


@pytest.mark.extended
def test_no_gaussian_has_a_higher_bound(wells):
    """The flat one's is the highest of all, over means and widths; the sharp one's is not."""
    mean, log_sd = np.linspace(-4, 4, 801)[:, None], np.linspace(-5, 2, 701)
    bound = 0.5 * np.log(2 * np.pi * np.e) + log_sd - smoothed(mean, np.exp(2 * log_sd))
    flat, sharp = (result.bound for result in wells.averaged)
    assert bound.max() <= flat
    assert bound.max() == pytest.approx(flat, abs=1e-3)
    assert sharp < flat - 1


# Section 3.2.


def test_each_of_two_components_has_its_minimum():
    """Both satisfy `eq:mog_opt`, E_{q_k}[∇ℓ + ∇log q] = 0, on a grid; and each lies by a minimum of its own."""
    q = figures.two_minima_run()[-1]
    line = jnp.linspace(-4, 4, 401)
    plane = jnp.stack(jnp.meshgrid(line, line), axis=-1).reshape(-1, 2)
    slopes = jax.jit(jax.vmap(lambda t: jax.grad(figures.hills_loss)(t) + q.score(t)))(plane)
    for index, start in enumerate([(-1.0, 0.0), (1.0, 0.0)]):
        component = q.component(index)
        average = jnp.exp(component.log_prob(plane)) @ slopes * (line[1] - line[0]) ** 2
        np.testing.assert_allclose(average, 0.0, atol=1e-3)
        minimum = scipy.optimize.minimize(jax.jit(figures.hills_loss), start)
        np.testing.assert_allclose(component.mean, minimum.x, atol=0.1)


# The drawings.


@pytest.mark.parametrize(
    "draw", [figures.wall, figures.sharp_and_flat, figures.two_minima], ids=lambda draw: draw.__name__
)
def test_a_figure_draws(draw):
    figure, file = draw(), BytesIO()
    assert isinstance(figure, Figure)
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


@pytest.mark.extended
def test_importing_the_figures_leaves_pyplot_alone():
    code = "import sys, bayesrule.gallery.paper_figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
