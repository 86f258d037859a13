"""NUTS that starts where this library has arrived: the fit is its warm-up.

A warm-up finds the posterior's bulk, its covariance and a step size. The first two are known after a fit, so that
fifteen steps for the step size are enough: for NumPyro's NUTS by `posterior.nuts`, for blackjax's by
`posterior.nuts_start`. The weights of a polynomial that is not centred are strongly correlated, so that without the
covariance NUTS takes paths of up to a thousand leaps.

Run: python examples/nuts_warm_start.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from bayesrule.interop import numpyro as bridge

SAMPLES, SHORT = 500, 15


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([5]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(sum(w[k] * x**k for k in range(5)), noise), obs=y)


def data():
    x = np.linspace(0.0, 2.0, 60)
    return jnp.asarray(x), jnp.asarray(np.sin(3 * x) + np.random.default_rng(0).normal(0.0, 0.3, 60))


def smallest_effective(draws):
    """The effective number of draws of the worst number, from one chain."""
    return min(float(np.min(effective_sample_size(np.asarray(leaf)[None]))) for leaf in jax.tree.leaves(draws))


def run_numpyro(kernel, warmup, args, start=None, samples=SAMPLES):
    """The draws of one chain, and the leap-frog steps of warm-up and sampling."""
    sampler = MCMC(kernel, num_warmup=warmup, num_samples=samples, progress_bar=False)
    sampler.warmup(jax.random.key(1), *args, init_params=start, extra_fields=("num_steps",), collect_warmup=True)
    spent = int(np.sum(sampler.get_extra_fields()["num_steps"]))
    sampler.run(sampler.post_warmup_state.rng_key, *args, extra_fields=("num_steps",))
    return sampler.get_samples(), spent, int(np.sum(sampler.get_extra_fields()["num_steps"]))


def run_blackjax(log_density, start, warmup, samples=SAMPLES):
    """blackjax's NUTS from a position and a mass matrix: its draws, and the leap-frog steps of both parts.

    Its step size is found by dual averaging alone: the mass matrix stays what it is.
    """
    import blackjax
    from blackjax.adaptation.step_size import dual_averaging_adaptation

    begin, update, final = dual_averaging_adaptation(target=0.8)
    kernel = blackjax.nuts.build_kernel()
    metric = start["inverse_mass_matrix"]

    def adapt(carry, key):
        state, sizes = carry
        state, info = kernel(key, state, log_density, jnp.exp(sizes.log_step_size), metric)
        return (state, update(sizes, info.acceptance_rate)), info.num_integration_steps

    def sample(state, key, size):
        state, info = kernel(key, state, log_density, size, metric)
        return state, (state.position, info.num_integration_steps)

    @jax.jit
    def run(position, adapt_keys, sample_keys):
        state = blackjax.nuts.init(position, log_density)
        (state, sizes), spent = jax.lax.scan(adapt, (state, begin(0.5)), adapt_keys)
        size = final(sizes)
        _, (draws, steps) = jax.lax.scan(lambda state, key: sample(state, key, size), state, sample_keys)
        return draws, jnp.sum(spent), jnp.sum(steps)

    keys = jax.random.split(jax.random.key(2), warmup + samples)
    draws, spent, steps = run(start["init_params"], keys[:warmup], keys[warmup:])
    return draws, int(spent), int(steps)


def main():
    args = data()
    posterior = bridge.fit(model, args, key=jax.random.key(0))
    print(posterior)
    print(f"\n{'':<44}{'warm-up':>8}{'its leaps':>10}{'leaps':>8}{'effective of ' + str(SAMPLES):>18}")

    def show(name, warmup, draws, spent, steps):
        print(f"{name:<44}{warmup:>8}{spent:>10}{steps:>8}{smallest_effective(draws):>18.0f}")

    for warmup in (SHORT, 100, 500):
        show("NumPyro's NUTS by itself", warmup, *run_numpyro(NUTS(model, dense_mass=True), warmup, args))
    kernel, start = posterior.nuts(jax.random.key(3))
    show("NumPyro's NUTS from here, posterior.nuts", SHORT, *run_numpyro(kernel, SHORT, args, start))
    density = posterior.density
    log_density = lambda theta: density.function(theta, *density.arguments)
    here = posterior.nuts_start(jax.random.key(3))
    nowhere = {
        "init_params": jax.tree.map(jnp.zeros_like, here["init_params"]),
        "inverse_mass_matrix": jnp.ones(density.size),
    }
    show("blackjax's NUTS from zero, a unit matrix", SHORT, *run_blackjax(log_density, nowhere, SHORT))
    show("blackjax's NUTS from here, nuts_start", SHORT, *run_blackjax(log_density, here, SHORT))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
