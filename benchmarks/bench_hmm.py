"""Hidden Markov models: an iteration of EM with Gaussian emissions; hmmlearn, dynamax.

    python benchmarks/bench_hmm.py [--repeats 5] [--steps 50000] [--states 8]

One series of 50,000 steps in two dimensions, eight states, from the same start. One iteration is a difference: the
least time of a fit of 1 + n iterations less that of one, over n. hmmlearn (float64) runs in both of its
implementations, "scaling" and "log", dynamax (float32) inside one `jax.jit`, where it is installed; each with the
threads it takes and with one in the BLAS, and the fastest counts. Ours is `fit`, which also has every iteration's bound
and decrement, and the bare `rule.step`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hmmlearn.hmm import GaussianHMM
from threadpoolctl import threadpool_limits
from timing import fastest

import bayesrule as blr
from bayesrule.models import hmm

MORE = {"ours": 10, "hmmlearn": 3, "dynamax": 5}  # iterations beside the first


def series(steps, states):
    random = np.random.default_rng(0)
    chances = 0.9 * np.eye(states) + 0.1 / states
    path = np.zeros(steps, int)
    for t in range(1, steps):
        path[t] = random.choice(states, p=chances[path[t - 1]])
    centers = 3 * random.normal(size=(states, 2))
    y = centers[path] + random.normal(size=(steps, 2))
    return (y - y.mean(0)).astype(np.float32)


def start_of(y, states):
    """Every algorithm's start: means at drawn steps, the covariance of all, transitions that mostly stay."""
    random = np.random.default_rng(1)
    means = y[random.choice(len(y), states, replace=False)]
    covariances = np.broadcast_to(np.diag(y.var(0)), (states, 2, 2))
    return np.full(states, 1 / states), 0.5 * (np.eye(states) + 1 / states), means, covariances


def our_fit(y, covariance, start):
    initial, transitions, means, covariances = start
    k = len(means)
    if covariance == "full":
        block = blr.NormalWishart(means, jnp.ones(k), jnp.full(k, 3.0), np.linalg.inv(covariances).astype(np.float32))
        components = blr.factors.multivariate_normal("y", joint="states")
    else:
        spread = np.diagonal(covariances, axis1=1, axis2=2)
        block = blr.NormalGamma(means, jnp.ones((k, 2)), jnp.full((k, 2), 1.5), spread)
        components = blr.factors.normal("y", joint="states")
    model = hmm.hmm_of(components, {"states": block}, initial=initial, transitions=transitions)
    rule, data = blr.em(order="parallel"), {"y": hmm.sequences(y)}
    step, state = jax.jit(rule.step), rule.init(None, model)
    fit = lambda iterations: blr.fit(rule, model, None, data, steps=iterations).q
    return fit, lambda: step(model, state, data)[0].q


def hmmlearn_fit(y, covariance, start, implementation):
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
    given = {"initial_probs": initial, "transition_matrix": transitions, "emission_means": means}
    if covariance == "full":
        model = GaussianHMM(len(means), 2)
        given["emission_covariances"] = covariances
    else:
        model = DiagonalGaussianHMM(len(means), 2)
        given["emission_scale_diags"] = jnp.sqrt(jnp.diagonal(covariances, axis1=1, axis2=2))
    params, props = model.initialize(**given)
    run = jax.jit(lambda params, y, n: model.fit_em(params, props, y, num_iters=n, verbose=False), static_argnames="n")
    rows = jnp.asarray(y)
    return lambda iterations: run(params, rows, n=iterations)


def alone(fit, iterations):
    with threadpool_limits(1):
        return fit(iterations)


def iterations(fits, repeats):
    """The least seconds of one more iteration."""
    runs = {}
    for name, fit in fits.items():
        more = MORE[name.split(",")[0]]
        runs |= {(name, 0): partial(fit, 1), (name, more): partial(fit, 1 + more)}
    best = fastest(runs, repeats)
    return {name: (best[name, n] - best[name, 0]) / n for name, n in best if n}


def compare(y, states, covariance, repeats):
    start = start_of(y, states)
    ours, step = our_fit(y, covariance, start)
    fits = {"ours, fit": ours}
    for implementation in ("scaling", "log"):
        fit = hmmlearn_fit(y, covariance, start, implementation)
        fits |= {f"hmmlearn, {implementation}": fit, f"hmmlearn, {implementation}, one thread": partial(alone, fit)}
    if importlib.util.find_spec("dynamax"):
        fit = dynamax_fit(y, covariance, start)
        fits |= {"dynamax": fit, "dynamax, one thread": partial(alone, fit)}
    times = iterations(fits, repeats)
    times["ours, rule.step"] = fastest({"step": step}, 5 * repeats)["step"]
    print(f"EM, {len(y)} steps, {states} states, {covariance} covariances: an iteration")
    for name, seconds in times.items():
        print(f"  {name:<34}{1e3 * seconds:10.2f} ms")
    theirs = {"hmmlearn": 0.4, "dynamax": 0.5}
    for peer, target in theirs.items():
        found = [seconds for name, seconds in times.items() if name.startswith(peer)]
        for name in ("ours, fit", "ours, rule.step") if found else ():
            ratio = times[name] / min(found)
            verdict = "ok" if ratio <= target else "MISSED"
            print(f"  {f'{name} / {peer}':<40} ratio {ratio:7.4f}   target ≤ {target}   {verdict}")
    print(flush=True)
    return ours


def first_call(name, fit):
    """Tracing, compiling and one iteration, with nothing compiled before."""
    jax.clear_caches()
    began = time.perf_counter()
    jax.block_until_ready(fit(1))
    seconds = time.perf_counter() - began
    print(f"  first call, {name:<28}{seconds:6.2f} s   target ≤ 5   {'ok' if seconds <= 5 else 'MISSED'}", flush=True)


def main(data=None, repeats=5, steps=50_000, states=8):
    jax.config.update("jax_enable_compilation_cache", False)
    logging.getLogger("hmmlearn.base").disabled = True  # a few iterations are not meant to converge
    if not importlib.util.find_spec("dynamax"):
        print("dynamax is not run: it is not installed.\n")
    y = series(steps, states)
    for covariance in ("full", "diag"):
        first_call(covariance, compare(y, states, covariance, repeats))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure hidden Markov models against their peers.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--states", type=int, default=8)
    arguments = parser.parse_args()
    main(None, arguments.repeats, arguments.steps, arguments.states)
