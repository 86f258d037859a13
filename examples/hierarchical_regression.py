"""A hierarchical regression: a line for each of twelve groups, with intercepts and slopes drawn from a population.

Run: python examples/hierarchical_regression.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

GROUPS, ROWS = 12, 6
TRUTH = {"population": [1.0, -0.7], "spread": [0.6, 0.3], "noise": 0.5}


def simulate(seed: int = 0):
    rng = np.random.default_rng(seed)
    lines = rng.normal(TRUTH["population"], TRUTH["spread"], size=(GROUPS, 2))
    group = np.repeat(np.arange(GROUPS), ROWS)
    x = rng.uniform(-2.0, 2.0, size=GROUPS * ROWS)
    y = lines[group, 0] + lines[group, 1] * x + rng.normal(0.0, TRUTH["noise"], size=GROUPS * ROWS)
    return jnp.asarray(group), jnp.asarray(x), jnp.asarray(y)


def model(group, x, y=None):
    population = numpyro.sample("population", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("groups", GROUPS):
        lines = numpyro.sample("lines", dist.Normal(population, spread).to_event(1))
    numpyro.sample("y", dist.Normal(lines[group, 0] + lines[group, 1] * x, noise), obs=y)


def main():
    group, x, y = simulate()
    posterior = bridge.fit(model, (group, x, y), key=jax.random.key(0), reparam="auto")
    print(posterior, "\n")
    print(f"decentred: {', '.join(posterior.decentred) or 'nothing'}\n")
    draws = posterior.samples(jax.random.key(1), 2000)
    for name, truth in TRUTH.items():
        values = np.reshape(draws[name], (2000, -1))
        shown = ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(values.mean(axis=0), values.std(axis=0), strict=True))
        print(f"{name:10}  {shown}   (truth {truth})")
    new = posterior.predictive(jax.random.key(2), (jnp.array([0, 0]), jnp.array([0.0, 2.0])), count=2000)["y"]
    print(f"group 0 at x = 0 and 2: {new.mean(axis=0)} ± {new.std(axis=0)}")


if __name__ == "__main__":
    main()
