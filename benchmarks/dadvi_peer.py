"""posteriordb's models in PyMC, fitted by `pymc_extras.fit_dadvi`: run by `posteriordb.py --speed --pymc PYTHON`.

    PYTHON benchmarks/dadvi_peer.py MODEL data.npz draws.npz REPEATS

PyMC and pymc-extras need no JAX and pin other versions of NumPy and SciPy than we do, so they live in an environment of
their own (`pip install pymc-extras`), and this file imports nothing of ours. `data.npz` has the model's arguments as
arr_0, arr_1, …; the draws are written by site, with the seconds of every call (`total`) and of the optimiser alone
(`optimizer`), since PyMC compiles in every call.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc_extras.inference.dadvi import dadvi  # pyright: ignore[reportMissingImports]  # It has its own environment.


def regression(X: Any, y: Any, *, beta: Any = None, sigma: Any = None) -> None:
    beta = pm.Flat("beta", shape=X.shape[1]) if beta is None else beta(X.shape[1])
    pm.Normal("y", X @ beta, pm.HalfFlat("sigma") if sigma is None else sigma(), observed=y)


def flat_regression(X: Any, y: Any) -> None:
    regression(X, y)


def half_cauchy_regression(X: Any, y: Any) -> None:
    regression(X, y, sigma=lambda: pm.HalfCauchy("sigma", 2.5))


def normal_prior_regression(X: Any, y: Any) -> None:
    normal = lambda size: pm.Normal("beta", 0.0, 10.0, shape=size)
    regression(X, y, beta=normal, sigma=lambda: pm.HalfNormal("sigma", 10.0))


def autoregression(lags: Any, y: Any) -> None:
    alpha = pm.Normal("alpha", 0.0, 10.0)
    beta = pm.Normal("beta", 0.0, 10.0, shape=lags.shape[1])
    pm.Normal("y", alpha + lags @ beta, pm.HalfCauchy("sigma", 2.5), observed=y)


def arma(y: Any) -> None:
    """The innovations e_t = u_t − θe_{t−1} by a triangular system: (I + θL)e = u, where L shifts by one."""
    mu, phi = pm.Normal("mu", 0.0, 10.0), pm.Normal("phi", 0.0, 2.0)
    theta, sigma = pm.Normal("theta", 0.0, 2.0), pm.HalfCauchy("sigma", 2.5)
    before = pt.concatenate([mu[None], y[:-1]])
    shift = np.eye(len(y), k=-1)
    errors = pt.linalg.solve_triangular(np.eye(len(y)) + theta * shift, y - mu - phi * before, lower=True)
    pm.Potential("y", pm.logp(pm.Normal.dist(0.0, sigma), errors).sum())


def dogs(avoided: Any, shocked: Any, y: Any) -> None:
    beta = pm.Normal("beta", 0.0, 100.0, shape=3)
    pm.Bernoulli("y", logit_p=beta[0] + beta[1] * avoided + beta[2] * shocked, observed=y)


def eight_schools_noncentered(sigma: Any, y: Any) -> None:
    mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
    pm.Normal("y", mu + tau * pm.Normal("theta_trans", 0.0, 1.0, shape=len(y)), sigma, observed=y)


def gp_regression(x: Any, y: Any) -> None:
    rho, alpha = pm.Gamma("rho", 25.0, 4.0), pm.HalfNormal("alpha", 2.0)
    sigma = pm.HalfNormal("sigma", 1.0)
    kernel = alpha**2 * pt.exp(-0.5 * (np.subtract.outer(x, x) / rho) ** 2)
    pm.MvNormal("y", np.zeros(len(x)), cov=kernel + sigma * np.eye(len(x)), observed=y)


def hmm(y: Any) -> None:
    theta1, theta2 = pm.Dirichlet("theta1", np.ones(2)), pm.Dirichlet("theta2", np.ones(2))
    first, gap = pm.HalfFlat("first"), pm.HalfFlat("gap")
    mu = pm.Deterministic("mu", pt.stack([first, first + gap]))
    pm.Potential("mu_prior", pm.logp(pm.Normal.dist(np.array([3.0, 10.0]), 1.0), mu).sum())
    emission = pm.logp(pm.Normal.dist(mu, 1.0), y[:, None])
    transition = pt.log(pt.stack([theta1, theta2]))
    forward = emission[0]
    for t in range(1, len(y)):  # pytensor's scan cannot be run on all fixed draws at once
        forward = pt.logsumexp(forward[:, None] + transition, axis=0) + emission[t]
    pm.Potential("y", pt.logsumexp(forward))


def gauss_mix(y: Any) -> None:
    first, gap = pm.Flat("first"), pm.HalfFlat("gap")
    mu = pm.Deterministic("mu", pt.stack([first, first + gap]))
    pm.Potential("mu_prior", pm.logp(pm.Normal.dist(0.0, 2.0), mu).sum())
    sigma, theta = pm.HalfNormal("sigma", 2.0, shape=2), pm.Beta("theta", 5.0, 5.0)
    parts = pm.logp(pm.Normal.dist(mu, sigma), y[:, None]) + pt.log(pt.stack([theta, 1 - theta]))
    pm.Potential("y", pt.logsumexp(parts, axis=1).sum())


def main() -> None:
    name, source, target, repeats = sys.argv[1:]
    arguments = np.load(source)
    data = [arguments[f"arr_{k}"] for k in range(len(arguments.files))]
    spent: list[float] = []
    minimize = dadvi.minimize

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = minimize(*args, **kwargs)
        spent.append(time.perf_counter() - began)
        return result

    dadvi.minimize = timed
    total, draws = [], {}
    for _ in range(int(repeats)):
        began = time.perf_counter()
        with pm.Model():
            globals()[name](*data)
            found = dadvi.fit_dadvi(random_seed=0, n_draws=4000, progressbar=False)
        total.append(time.perf_counter() - began)
        draws = {str(site): np.asarray(values)[0] for site, values in found.posterior.items()}
    np.savez(target, total=total, optimizer=spent, **draws)


if __name__ == "__main__":
    main()
