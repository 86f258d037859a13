"""Counts over time whose log rate is a Gaussian process: its values, its level and its scale at once.

The process is written in ten sine waves whose weights have the kernel's spectral density as their variances
(Solin and Särkkä, "Hilbert space methods for reduced-rank Gaussian process regression", 2020).

Run: python examples/poisson_series.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

STEPS, WAVES, HALF_WIDTH, LENGTH = 50, 10, 0.9, 0.25


def simulate(seed: int = 0):
    time = np.linspace(0.0, 1.0, STEPS)
    rate = np.exp(1.0 + 1.2 * np.sin(2 * np.pi * time))
    return jnp.asarray(time), jnp.asarray(np.random.default_rng(seed).poisson(rate)), rate


def model(time, counts=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    # The kernel's spectral density at the frequencies of sine waves on an interval that is wider than the data.
    frequency = jnp.pi * jnp.arange(1, WAVES + 1) / (2 * HALF_WIDTH)
    waves = jnp.sin(frequency * (time[:, None] - 0.5 + HALF_WIDTH)) / jnp.sqrt(HALF_WIDTH)
    density = jnp.sqrt(2 * jnp.pi) * LENGTH * jnp.exp(-0.5 * (frequency * LENGTH) ** 2)
    # In standardised numbers the weights and the scale are nearly independent.
    noise = numpyro.sample("noise", dist.Normal(0.0, 1.0).expand([WAVES]).to_event(1))
    rate = numpyro.deterministic("rate", jnp.exp(level + scale * waves @ (jnp.sqrt(density) * noise)))
    numpyro.sample("counts", dist.Poisson(rate).to_event(1), obs=counts)


def main():
    time, counts, rate = simulate()
    posterior = bridge.fit(model, (time, counts), key=jax.random.key(0))
    print(posterior, "\n")
    draws = posterior.samples(jax.random.key(1), 2000)
    low, high = np.quantile(draws["rate"], [0.05, 0.95], axis=0)
    print(" time  count  rate (mean, 90 % interval)   truth")
    for step in range(0, STEPS, 7):
        mean = draws["rate"][:, step].mean()
        interval = f"{low[step]:5.2f} to {high[step]:5.2f}"
        print(f"{time[step]:5.2f}  {counts[step]:5d}  {mean:5.2f}  {interval}       {rate[step]:5.2f}")
    print(f"{np.mean((low < rate) & (rate < high)):.0%} of the true rates are inside of their 90 % intervals.")


if __name__ == "__main__":
    main()
