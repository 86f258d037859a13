"""Linear-Gaussian state-space models: filter and smoother of 10,000 steps, compared with statsmodels and dynamax.

    python benchmarks/bench_kalman.py [--repeats 10] [--steps 10000]

Four states, one output, float64: a local linear trend and a damped cycle. All compute the mean and covariance of every
state, and the filters also the log-likelihood. dynamax runs inside `jax.jit`, if it is installed; statsmodels' filter
and smoother are written in Cython. "First" is the first call, compilation included.
"""

from __future__ import annotations

import argparse
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from timing import fastest, seconds_of

import bayesrule as blr
from bayesrule.models import kalman

F = np.array([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0.9, 0.1], [0, 0, -0.1, 0.9]])
Q, H, R, P = np.diag([0.1, 0.01, 0.2, 0.2]), np.array([1.0, 0, 1, 0]), 1.0, 10 * np.eye(4)


def observations(steps):
    """A random walk."""
    return 0.1 * np.random.default_rng(0).normal(size=steps).cumsum()


def statsmodels_runs(y):
    import statsmodels.api as sm
    from statsmodels.tsa.statespace.kalman_smoother import SMOOTHER_STATE, SMOOTHER_STATE_COV

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
    settings = {"initial_mean": jnp.zeros(4), "initial_covariance": jnp.asarray(P), "dynamics_weights": jnp.asarray(F)}
    settings |= {"dynamics_covariance": jnp.asarray(Q), "emission_weights": jnp.asarray(H[None])}
    params, _ = model.initialize(jax.random.key(0), **settings, emission_covariance=jnp.array([[R]]))
    rows = jnp.asarray(y)[:, None]
    run_filter, run_smoother = jax.jit(lgssm_filter), jax.jit(lgssm_smoother)
    return {
        "dynamax filter": lambda: run_filter(params, rows),
        "dynamax smoother": lambda: run_smoother(params, rows),
    }


def our_runs(y):
    system, rows = blr.StateSpace(F, Q, H, None, P), jnp.asarray(y)
    runs = {"ours filter": lambda: kalman.filter(system, rows, R)}
    for name, parallel in (("", None), (", sequential", False)):
        runs[f"ours smoother{name}"] = lambda parallel=parallel: kalman.smooth(system, rows, R, parallel=parallel)
    return runs


def main(data=None, repeats=10, steps=10_000) -> None:
    jax.config.update("jax_enable_x64", True)
    y = observations(steps)
    runs = our_runs(y) | statsmodels_runs(y)
    if importlib.util.find_spec("dynamax") is not None:
        runs |= dynamax_runs(y)
    for name, run in runs.items():
        print(f"{name:40} first {seconds_of(run):6.2f} s")
    best = fastest(runs, repeats)
    for name, seconds in best.items():
        kind = "filter" if "filter" in name else "smoother"
        peers = {peer: best[other] for other in best if other.endswith(kind) and (peer := other.split()[0]) != "ours"}
        ratios = ", ".join(f"{seconds / t:.3f} of {peer}'s" for peer, t in peers.items() if name.startswith("ours"))
        print(f"{name:40} {1e3 * seconds:8.2f} ms  {ratios}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    main(None, arguments.repeats, arguments.steps)
