"""Hidden Markov models: an iteration of EM with Gaussian emissions, compared with hmmlearn and dynamax.

    python benchmarks/bench_hmm.py [--repeats 5] [--steps 50000] [--states 8]

One series of 50,000 steps in two dimensions, eight states, from the same start. The time of an iteration is a
difference (see `timing.seconds_per_iteration`). hmmlearn (float64) runs in both of its implementations, "scaling" and
"log", dynamax (float32) inside one `jax.jit`, if it is installed; each with its default threads and with one BLAS
thread, and the fastest counts. Ours is `fit`, which also computes the bound and the decrement of every iteration, and
`rule.step` alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits
from timing import compare, fastest, first_call, seconds_per_iteration

import bayesrule as blr
from bayesrule.models import hmm

MORE = {"ours": 10, "hmmlearn": 3, "dynamax": 5}  # iterations beyond the first
TARGETS = {"hmmlearn": 0.4, "dynamax": 0.5}


def series(steps, states):
    random = np.random.default_rng(0)
    transitions = 0.9 * np.eye(states) + 0.1 / states
    path = np.zeros(steps, int)
    for t in range(1, steps):
        path[t] = random.choice(states, p=transitions[path[t - 1]])
    centers = 3 * random.normal(size=(states, 2))
    y = centers[path] + random.normal(size=(steps, 2))
    return (y - y.mean(0)).astype(np.float32)


def initial_parameters(y, states):
    """The common start: means at random steps, the variances of all steps, transitions that mostly stay."""
    random = np.random.default_rng(1)
    means = y[random.choice(len(y), states, replace=False)]
    covariances = np.broadcast_to(np.diag(y.var(0)), (states, 2, 2))
    return np.full(states, 1 / states), 0.5 * (np.eye(states) + 1 / states), means, covariances


def our_fit(y, covariance, start):
    """A fit of a number of iterations, and one `rule.step`."""
    initial, transitions, means, covariances = start
    k = len(means)
    if covariance == "full":
        block = blr.NormalWishart(means, jnp.ones(k), jnp.full(k, 3.0), np.linalg.inv(covariances).astype(np.float32))
        components = blr.factors.multivariate_normal("y", joint="states")
    else:
        variances = np.diagonal(covariances, axis1=1, axis2=2)
        block = blr.NormalGamma(means, jnp.ones((k, 2)), jnp.full((k, 2), 1.5), variances)
        components = blr.factors.normal("y", joint="states")
    model = hmm.hmm_of(components, {"states": block}, initial=initial, transitions=transitions)
    rule, data = blr.em(order="parallel"), {"y": hmm.sequences(y)}
    step, state = jax.jit(rule.step), rule.init(None, model)
    fit = lambda iterations: blr.fit(rule, model, None, data, steps=iterations).q
    return fit, lambda: step(model, state, data)[0].q


def hmmlearn_fit(y, covariance, start, implementation):
    from hmmlearn.hmm import GaussianHMM

    initial, transitions, means, covariances = start
    doubles = y.astype(np.float64)

    def fit(iterations):
        model = GaussianHMM(len(means), covariance, n_iter=iterations, tol=-np.inf, implementation=implementation)
        model.init_params, model.startprob_, model.transmat_, model.means_ = "", initial, transitions, means
        model.covars_ = covariances if covariance == "full" else np.diagonal(covariances, axis1=1, axis2=2)
        return model.fit(doubles)

    return fit


def dynamax_fit(y, covariance, start):
    from dynamax.hidden_markov_model import DiagonalGaussianHMM, GaussianHMM

    initial, transitions, means, covariances = (jnp.asarray(x, jnp.float32) for x in start)
    settings = {"initial_probs": initial, "transition_matrix": transitions, "emission_means": means}
    if covariance == "full":
        model = GaussianHMM(len(means), 2)
        settings["emission_covariances"] = covariances
    else:
        model = DiagonalGaussianHMM(len(means), 2)
        settings["emission_scale_diags"] = jnp.sqrt(jnp.diagonal(covariances, axis1=1, axis2=2))
    params, props = model.initialize(**settings)
    run = jax.jit(lambda params, y, n: model.fit_em(params, props, y, num_iters=n, verbose=False), static_argnames="n")
    rows = jnp.asarray(y)
    return lambda iterations: run(params, rows, n=iterations)


def with_one_thread(fit, iterations):
    with threadpool_limits(1):
        return fit(iterations)


def measure(y, states, covariance, repeats):
    start = initial_parameters(y, states)
    ours, step = our_fit(y, covariance, start)
    fits = {"ours, fit": ours}
    for implementation in ("scaling", "log"):
        fit = hmmlearn_fit(y, covariance, start, implementation)
        fits |= {
            f"hmmlearn, {implementation}": fit,
            f"hmmlearn, {implementation}, one thread": partial(with_one_thread, fit),
        }
    if importlib.util.find_spec("dynamax"):
        fit = dynamax_fit(y, covariance, start)
        fits |= {"dynamax": fit, "dynamax, one thread": partial(with_one_thread, fit)}
    times = seconds_per_iteration({name: (fit, MORE[name.split(",")[0]]) for name, fit in fits.items()}, repeats)
    times["ours, rule.step"] = fastest({"step": step}, 5 * repeats)["step"]
    print(f"EM, {len(y)} steps, {states} states, {covariance} covariances: an iteration")
    for name, seconds in times.items():
        print(f"  {name:<34}{1e3 * seconds:10.2f} ms")
    for peer, target in TARGETS.items():
        peer_times = [seconds for name, seconds in times.items() if name.startswith(peer)]
        for name in ("ours, fit", "ours, rule.step") if peer_times else ():
            print(compare(name, times[name], peer, min(peer_times), target))
    print(flush=True)
    return ours


def main(data=None, repeats=5, steps=50_000, states=8):
    jax.config.update("jax_enable_compilation_cache", False)
    logging.getLogger("hmmlearn.base").disabled = True  # It warns that a few iterations have not converged.
    if not importlib.util.find_spec("dynamax"):
        print("dynamax is not run: it is not installed.\n")
    y = series(steps, states)
    for covariance in ("full", "diag"):
        print(first_call(covariance, partial(measure(y, states, covariance, repeats), 1)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure hidden Markov models against their peers.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--states", type=int, default=8)
    arguments = parser.parse_args()
    main(None, arguments.repeats, arguments.steps, arguments.states)
