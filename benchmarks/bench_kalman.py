"""Linear-Gaussian state spaces: filter and smoother of 10,000 steps; statsmodels, dynamax.

    python benchmarks/bench_kalman.py [--repeats 10] [--steps 10000]

Four states, one output, float64: a local linear trend and a damped cycle. All give every state's mean and covariance
(and the log-likelihood, where they filter). dynamax runs inside `jax.jit`, where it is installed; statsmodels' filter
and smoother are Cython. "First" is the first call, compiling included.
"""

from __future__ import annotations

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
import numpy as np
import statsmodels.api as sm
from statsmodels.tsa.statespace.kalman_smoother import SMOOTHER_STATE, SMOOTHER_STATE_COV
from timing import fastest

import bayesrule as blr
from bayesrule.models import kalman

F = np.array([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0.9, 0.1], [0, 0, -0.1, 0.9]])
Q, H, R, P = np.diag([0.1, 0.01, 0.2, 0.2]), np.array([1.0, 0, 1, 0]), 1.0, 10 * np.eye(4)


def statsmodels_runs(y):
    space = sm.tsa.statespace.MLEModel(y, k_states=4, k_posdef=4).ssm
    space["design"], space["obs_cov"], space["transition"] = H[None], np.array([[R]]), F
    space["selection"], space["state_cov"] = np.eye(4), Q
    space.initialize_known(np.zeros(4), P)
    states = SMOOTHER_STATE | SMOOTHER_STATE_COV
    return {
        "statsmodels filter": space.filter,
        "statsmodels smoother": lambda: space.smooth(smoother_output=states),
    }


def dynamax_runs(y):
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM, lgssm_filter, lgssm_smoother

    model = LinearGaussianSSM(4, 1)
    given = {"initial_mean": jnp.zeros(4), "initial_covariance": jnp.asarray(P), "dynamics_weights": jnp.asarray(F)}
    given |= {"dynamics_covariance": jnp.asarray(Q), "emission_weights": jnp.asarray(H[None])}
    params, _ = model.initialize(jax.random.key(0), **given, emission_covariance=jnp.array([[R]]))
    rows = jnp.asarray(y)[:, None]
    filtered, smoothed = jax.jit(lgssm_filter), jax.jit(lgssm_smoother)
    return {
        "dynamax filter": lambda: filtered(params, rows),
        "dynamax smoother": lambda: smoothed(params, rows),
    }


def our_runs(y):
    system, rows = blr.StateSpace(F, Q, H, None, P), jnp.asarray(y)
    runs = {"ours filter": lambda: kalman.filter(system, rows, R)}
    for name, parallel in (("", None), (", one after the other", False)):
        runs[f"ours smoother{name}"] = lambda parallel=parallel: kalman.smooth(system, rows, R, parallel=parallel)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    y = 0.1 * np.random.default_rng(0).normal(size=options.steps).cumsum()
    runs = our_runs(y) | statsmodels_runs(y)
    if importlib.util.find_spec("dynamax") is not None:
        runs |= dynamax_runs(y)
    for name, run in runs.items():
        began = time.perf_counter()
        jax.block_until_ready(run())
        print(f"{name:40} first {time.perf_counter() - began:6.2f} s")
    best = fastest(runs, options.repeats)
    for name, seconds in best.items():
        kind = "filter" if "filter" in name else "smoother"
        peers = {peer: best[other] for other in best if other.endswith(kind) and (peer := other.split()[0]) != "ours"}
        ratios = ", ".join(f"{seconds / t:.3f} of {peer}'s" for peer, t in peers.items() if name.startswith("ours"))
        print(f"{name:40} {1e3 * seconds:8.2f} ms  {ratios}")


if __name__ == "__main__":
    main()
