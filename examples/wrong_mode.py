"""A wrong mode: a single start ends many nats below the best mode, and several starts find it.

A spectrum has a tall peak and a small one, and the model has one peak. A start close to the small one ends there, in a
mode that looks like a perfectly good posterior.

Run: python examples/wrong_mode.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

CHANNELS = 100


def simulate(seed: int = 0):
    x = np.arange(CHANNELS, dtype=float)
    peaks = 3.0 * np.exp(-0.5 * ((x - 70.0) / 4.0) ** 2) + 1.5 * np.exp(-0.5 * ((x - 20.0) / 4.0) ** 2)
    return jnp.asarray(x), jnp.asarray(peaks + np.random.default_rng(seed).normal(0.0, 0.3, size=CHANNELS))


def model(x, y=None):
    location = numpyro.sample("location", dist.Uniform(0.0, CHANNELS))
    height = numpyro.sample("height", dist.HalfNormal(5.0))
    width = numpyro.sample("width", dist.LogNormal(jnp.log(4.0), 0.3))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    peak = height * jnp.exp(-0.5 * ((x - location) / width) ** 2)
    numpyro.sample("y", dist.Normal(peak, noise).to_event(1), obs=y)


def main():
    x, y = simulate()
    near = {"location": 22.0, "height": 1.0, "width": 4.0, "noise": 0.5}
    settings = {"one start": {"starts": 1, "start": near}, "the default": {}}
    evidence = {}
    for name, how in settings.items():
        posterior = bridge.fit(model, (x, y), key=jax.random.key(0), **how)
        draws = posterior.samples(jax.random.key(1), 1000)["location"]
        evidence[name] = posterior.log_evidence
        print(f"{name}: the peak is at {draws.mean():.2f} ± {draws.std():.2f}")
        print(f"  log evidence {posterior.log_evidence:.1f} ± {posterior.log_evidence_error:.1f}")
        print(f"  {posterior.verdict}\n")
    gained = evidence["the default"] - evidence["one start"]
    print(
        f"Several starts gained {gained:.1f} nats. Nothing in the first verdict shows what it has missed: it is a word"
    )
    print("on the mode that was found.")


if __name__ == "__main__":
    main()
