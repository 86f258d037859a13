"""Eight schools: the centred model is not to be trusted, the decentred one is, and `reparam="auto"` finds it.

The effects of coaching in eight schools share a mean and a scale tau. Where tau is close to zero the effects all equal
the mean, and the centred density is infinite there: no approximation of it is good. Written with standardised effects
it is the same model, and an easy one.

Run: python examples/eight_schools.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from bayesrule.interop import numpyro as bridge

EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def model(errors, effects=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(errors)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effects", dist.Normal(theta, errors), obs=effects)


def main():
    centred = bridge.fit(model, (ERRORS, EFFECTS), key=jax.random.key(0))
    print(f"As it is written:\n{centred}\n")
    chosen = bridge.fit(model, (ERRORS, EFFECTS), key=jax.random.key(0), reparam="auto")
    print(f"With {', '.join(chosen.decentred) or 'nothing'} decentred:\n{chosen}\n")
    draws = chosen.samples(jax.random.key(1), 4000)
    print(
        "tau: mean {:.2f}, sd {:.2f} (10,000 draws of NUTS in posteriordb: 3.60, 3.20)".format(*moments(draws["tau"]))
    )
    print("mu:  mean {:.2f}, sd {:.2f} (4.41, 3.31)".format(*moments(draws["mu"])))
    print(f"leave-one-out: {chosen.loo()}")


def moments(draws):
    return float(draws.mean()), float(draws.std())


if __name__ == "__main__":
    main()
