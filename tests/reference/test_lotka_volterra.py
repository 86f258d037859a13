"""The hares and lynxes of the Hudson's Bay Company: two modes, of which a single start finds the wrong one.

Data, priors and posterior means are those of Carpenter, "Predator-Prey Population Dynamics: the Lotka-Volterra model in
Stan" (2018); pelts in thousands, 1900 to 1920, are facts (Howard 2009).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

import bayesrule as blr

HARES = [30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1, 40.3, 57, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6]
HARES += [16.2, 24.7]
LYNXES = [4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4, 8, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7, 10.1, 8.6]
PELTS = np.log(np.stack([HARES, LYNXES], axis=1))
# Means and standard deviations by NUTS: α, β, γ, δ, the first year's populations, and σ.
STAN_MEAN = np.array([0.55, 0.028, 0.80, 0.024, 34.0, 5.95, 0.25, 0.25])
STAN_SD = np.array([0.064, 0.0043, 0.092, 0.0036, 2.9, 0.53, 0.045, 0.045])


def log_prior(u, xp):
    """Of the logarithms u of all eight parameters."""
    rates, first, noise = xp.exp(u[:4]), u[4:6], u[6:8]
    located = (rates - xp.array([1.0, 0.05, 1.0, 0.05])) / xp.array([0.5, 0.05, 0.5, 0.05])
    squares = xp.sum(located**2) + xp.sum((noise + 1) ** 2) + xp.sum((first - np.log(10)) ** 2)
    return xp.sum(u[:4]) - 0.5 * squares


def log_likelihood(u, paths, xp):
    return xp.sum(-0.5 * ((PELTS - paths) / xp.exp(u[6:8])) ** 2 - u[6:8])


def slope(z, rates, xp):
    """Of the populations' logarithms."""
    return xp.array([rates[0] - rates[1] * xp.exp(z[1]), rates[3] * xp.exp(z[0]) - rates[2]])


def loss(u):
    """Runge and Kutta's method of order four with twenty steps a year."""
    rates, h = jnp.exp(u[:4]), 0.05

    def small(z, _):
        a = slope(z, rates, jnp)
        b = slope(z + h / 2 * a, rates, jnp)
        c = slope(z + h / 2 * b, rates, jnp)
        return z + h / 6 * (a + 2 * b + 2 * c + slope(z + h * c, rates, jnp)), None

    year = lambda z, _: (jax.lax.scan(small, z, None, length=20)[0],) * 2
    paths = jnp.concatenate([u[None, 4:6], jax.lax.scan(year, u[4:6], None, length=20)[1]])
    return -log_likelihood(u, paths, jnp) - log_prior(u, jnp)


def reference_loss(u):
    """The same by an adaptive solver."""
    rates = np.exp(u[:4])
    solved = solve_ivp(
        lambda t, z: slope(z, rates, np), (0, 20), u[4:6], t_eval=np.arange(21), method="LSODA", rtol=1e-10, atol=1e-10
    )
    return -log_likelihood(u, solved.y.T, np) - log_prior(u, np)


@pytest.mark.extended
def test_several_starts_find_the_mode_that_a_single_one_misses():
    best = minimize(reference_loss, np.log(STAN_MEAN), method="Powell", options={"xtol": 1e-8, "ftol": 1e-13})
    how = {"steps": 300, "tolerance": 1e-6}
    alone = blr.fit(blr.laplace(), loss, jnp.zeros(8), **how)
    result = blr.fit(blr.laplace(), loss, jnp.zeros(8), starts=8, key=jax.random.key(0), **how)
    assert alone.reason == result.reason == "converged"
    assert result.bound - alone.bound == pytest.approx(33.8, abs=0.1)
    assert not result.starts.agreeing[0]
    assert float(loss(result.q.mean)) == pytest.approx(best.fun, abs=1e-5)
    np.testing.assert_allclose(result.q.mean, best.x, atol=2e-3)
    # A posterior mean and a mode differ by less than a standard deviation here.
    assert np.all(np.abs(np.exp(result.q.mean) - STAN_MEAN) < 0.7 * STAN_SD)
    width = np.exp(result.q.mean) * np.sqrt(np.diag(np.linalg.inv(result.q.precision)))
    np.testing.assert_allclose(width, STAN_SD, rtol=0.25)
