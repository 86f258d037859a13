"""Counts over time whose log rate is a Gaussian process: fifty latent values and two hyper-parameters at once.

Run: python examples/poisson_series.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

STEPS = 50


def simulate(seed: int = 0):
    time = np.linspace(0.0, 1.0, STEPS)
    rate = np.exp(1.0 + 1.2 * np.sin(2 * np.pi * time))
    return jnp.asarray(time), jnp.asarray(np.random.default_rng(seed).poisson(rate)), rate


def model(time, counts=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    length = numpyro.sample("length", dist.LogNormal(-1.5, 0.5))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    distance = (time[:, None] - time[None, :]) / length
    covariance = jnp.exp(-0.5 * distance**2) + 1e-4 * jnp.eye(len(time))
    # The process in standardised numbers: its values and its hyper-parameters are then nearly independent.
    noise = numpyro.sample("noise", dist.Normal(0.0, 1.0).expand([len(time)]).to_event(1))
    rate = numpyro.deterministic("rate", jnp.exp(level + scale * jnp.linalg.cholesky(covariance) @ noise))
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
