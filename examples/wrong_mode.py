"""A wrong mode: a single start ends many nats below the best mode, and several starts find it.

The frequency of a sine wave in noise has a likelihood with a mode for every few periods. From one start near the wrong
frequency, Newton's method ends in a small mode that looks like a perfectly good posterior.

Run: python examples/wrong_mode.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

FREQUENCY = 2.9


def simulate(seed: int = 0):
    rng = np.random.default_rng(seed)
    time = np.sort(rng.uniform(0.0, 10.0, size=40))
    return jnp.asarray(time), jnp.asarray(np.sin(FREQUENCY * time) + rng.normal(0.0, 0.5, size=40))


def model(time, y=None):
    frequency = numpyro.sample("frequency", dist.Gamma(4.0, 2.0))
    amplitudes = numpyro.sample("amplitudes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    wave = amplitudes[0] * jnp.sin(frequency * time) + amplitudes[1] * jnp.cos(frequency * time)
    numpyro.sample("y", dist.Normal(wave, noise).to_event(1), obs=y)


def main():
    time, y = simulate()
    settings = {"one start": {"starts": 1, "start": {"frequency": 1.5}}, "64 starts": {"starts": 64}}
    bounds = {}
    for name, how in settings.items():
        posterior = bridge.fit(model, (time, y), key=jax.random.key(0), **how)
        draws = posterior.samples(jax.random.key(1), 1000)["frequency"]
        bounds[name] = posterior.log_evidence
        print(f"{name}: frequency {draws.mean():.3f} ± {draws.std():.3f} (truth {FREQUENCY})")
        print(f"  log evidence {posterior.log_evidence:.1f} ± {posterior.log_evidence_error:.1f}")
        print(f"  {posterior.verdict}\n")
    gained = bounds["64 starts"] - bounds["one start"]
    print(f"Several starts gained {gained:.1f} nats. No diagnostic of the first posterior shows what it has missed.")


if __name__ == "__main__":
    main()
