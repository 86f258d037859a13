"""An epidemic: the rates of a differential equation (SIR) from daily counts of the infected, by a fixed-step RK4.

The log density is plain JAX, with the solver inside of it and constraints by name.

Run: python examples/ode.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr

PEOPLE, DAYS, STEPS_A_DAY = 763.0, 14, 4
# Boys confined to bed at an English boarding school in 1978 (British Medical Journal, 4 March 1978).
IN_BED = jnp.array([3.0, 8.0, 26.0, 76.0, 225.0, 298.0, 258.0, 233.0, 189.0, 128.0, 68.0, 29.0, 14.0, 4.0])


def infected(infection, recovery):
    """How many are infected on every day, from one on the day before the first count."""

    def slope(state):
        new, recovered = infection * state[0] * state[1] / PEOPLE, recovery * state[1]
        return jnp.array([-new, new - recovered])

    def step(state, _):
        h = 1.0 / STEPS_A_DAY
        k1 = slope(state)
        k2 = slope(state + 0.5 * h * k1)
        k3 = slope(state + 0.5 * h * k2)
        k4 = slope(state + h * k3)
        return state + h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4), None

    def day(state, _):
        after, _ = jax.lax.scan(step, state, length=STEPS_A_DAY)
        return after, after[1]

    return jax.lax.scan(day, jnp.array([PEOPLE - 1.0, 1.0]), length=DAYS)[1]


def log_density(p, counts):
    """Counts vary more than Poisson's: a negative binomial likelihood, and weak priors."""
    mean = jnp.maximum(infected(p["infection"], p["recovery"]), 1e-3)
    shape = 1.0 / p["dispersion"]
    likelihood = (
        jax.lax.lgamma(counts + shape)
        - jax.lax.lgamma(shape)
        - jax.lax.lgamma(counts + 1.0)
        + shape * jnp.log(shape / (shape + mean))
        + counts * jnp.log(mean / (shape + mean))
    )
    prior = -0.5 * ((p["infection"] - 2.0) ** 2 + ((p["recovery"] - 0.4) / 0.5) ** 2) - 5.0 * p["dispersion"]
    return jnp.sum(likelihood) + prior


def main():
    start = {"infection": 2.0, "recovery": 0.5, "dispersion": 0.1}
    constraints = dict.fromkeys(start, "positive")
    posterior = blr.infer(log_density, start, constraints=constraints, args=(IN_BED,), key=jax.random.key(0))
    print(posterior, "\n")
    print(posterior.summary(), "\n")
    draws = posterior.samples(jax.random.key(1), 2000)
    ratio = draws["infection"] / draws["recovery"]
    print(f"basic reproduction number: {ratio.mean():.2f} ± {ratio.std():.2f}")
    curves = np.asarray(jax.jit(jax.vmap(infected))(draws["infection"], draws["recovery"]))
    for number in (3, 6, 9, 13):
        low, high = np.quantile(curves[:, number], [0.05, 0.95])
        print(f"day {number + 1:2}: {IN_BED[number]:4.0f} in bed, the curve is between {low:.0f} and {high:.0f}")


if __name__ == "__main__":
    main()
