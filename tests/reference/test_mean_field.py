"""Mean-field Gaussians on correlated posteriors: accelerated fits against the optimum that SciPy finds in float64.

The bound of logistic and Poisson regression is written here in NumPy, over (m, log s), and maximised by L-BFGS and then
by Newton's steps in m with the full Hessian; no line of it is the library's.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, gammaln

import bayesrule as blr

DATA = Path(__file__).parent / "data"
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


class Problem:
    """A regression with a diagonal Gaussian prior N(0, 1/δ) and its negative bound, with gradient and curvature."""

    def __init__(self, kind, X, y, prior):
        self.kind, self.X, self.y = kind, X, y
        self.prior = np.broadcast_to(np.asarray(prior, float), X.shape[1:])

    def terms(self, mean, precision):
        output, variance = self.X @ mean, self.X**2 @ (1 / precision)
        if self.kind == "logit":
            at = output[:, None] + np.sqrt(variance)[:, None] * NODES
            value = np.sum(np.logaddexp(0, at) @ WEIGHTS) - self.y @ output
            slope, second = expit(at) @ WEIGHTS - self.y, (expit(at) * expit(-at)) @ WEIGHTS
        else:
            second = np.exp(output + variance / 2)
            value, slope = second.sum() - self.y @ output + gammaln(self.y + 1).sum(), second - self.y
        value += 0.5 * np.sum(self.prior * (mean**2 + 1 / precision) + np.log(precision / self.prior) - 1)
        return value, self.X.T @ slope + self.prior * mean, (self.X**2).T @ second + self.prior, second

    def optimum(self):
        size = len(self.prior)

        def function(u):
            value, gradient, curvature, _ = self.terms(u[:size], np.exp(u[size:]))
            return value, np.r_[gradient, 0.5 * (1 - curvature / np.exp(u[size:]))]

        u = np.r_[np.zeros(size), np.log(self.terms(np.zeros(size), np.full(size, 1e6))[2])]
        found = minimize(function, u, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "maxcor": 50})
        mean, precision = found.x[:size], np.exp(found.x[size:])
        for _ in range(100):
            _, gradient, precision, second = self.terms(mean, precision)
            mean = mean - np.linalg.solve((self.X.T * second) @ self.X + np.diag(self.prior), gradient)
            if np.max(np.abs(gradient) / np.sqrt(precision)) < 1e-11:
                break
        value = self.terms(mean, precision)[0]
        assert value <= found.fun + 1e-9
        return value, mean, precision

    def objective(self):
        prior = blr.DiagonalGaussian(jnp.zeros(len(self.prior)), jnp.asarray(self.prior, float))
        return blr.Objective(LOSSES[self.kind], output=product, linear=True, size=len(self.y), prior=prior)

    def start(self):
        return blr.DiagonalGaussian(jnp.zeros(len(self.prior)), jnp.asarray(self.prior + len(self.y), float))


def product(w, x):
    return x @ w


LOSSES = {
    "logit": lambda f, y: jnp.logaddexp(0.0, f) - y * f,
    "poisson": lambda f, y: jnp.exp(f) - y * f + jax.scipy.special.gammaln(y + 1),
}


def australian(split, prior):
    file = np.load(DATA / "australian_scale.npz")
    rows = np.random.default_rng(split).permutation(690)[:345]
    X = np.c_[np.ones(345), file["X"][rows].astype(float)]
    return Problem("logit", X, (file["y"][rows] > 0).astype(float), np.r_[0.01, np.full(14, prior)])


def synthetic(kind, rows, size, correlation, prior=1.0, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sqrt(correlation) * rng.normal(size=(rows, 1)) + np.sqrt(1 - correlation) * rng.normal(size=(rows, size))
    output = X @ rng.normal(size=size) * 0.7 / np.sqrt(size)
    y = rng.uniform(size=rows) < expit(output) if kind == "logit" else rng.poisson(np.exp(np.clip(output, -5, 3)))
    return Problem(kind, X, y.astype(float), prior)


# The most steps that each may take: about one and a half times what it takes.
PROBLEMS = {
    "australian 0": (lambda: australian(0, 1.0), 60),
    "australian 1": (lambda: australian(1, 1.0), 60),
    "australian 2, wide prior": (lambda: australian(2, 0.01), 140),
    "australian 3, wide prior": (lambda: australian(3, 0.01), 140),
    "logit, 5 weights, correlation .9": (lambda: synthetic("logit", 200, 5, 0.9), 40),
    "logit, 20 weights, correlation .9999": (lambda: synthetic("logit", 345, 20, 0.9999), 40),
    "logit, 120 weights, correlation .9": (lambda: synthetic("logit", 345, 120, 0.9), 80),
    "poisson, 5 weights, correlation .9": (lambda: synthetic("poisson", 200, 5, 0.9), 60),
    "poisson, 20 weights, correlation .999": (lambda: synthetic("poisson", 345, 20, 0.999), 90),
}


def accelerated(curvature):
    return blr.newton().replace(
        family=blr.DiagonalGaussian,
        points=blr.Quadrature(60),
        curvature=curvature,
        steps=blr.Steps(1.0, acceleration=blr.Anderson()),
    )


# Those that others are like: another split of the data, or more weights.
LONG = {"australian 1", "australian 3, wide prior", "logit, 120 weights, correlation .9"}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended) if name in LONG else name for name in PROBLEMS]
)
def test_accelerated(name):
    make, most = PROBLEMS[name]
    problem = make()
    best, mean, precision = problem.optimum()
    data = jnp.asarray(problem.X, float), jnp.asarray(problem.y, float)
    tolerance = 1e-6
    result = blr.fit(
        accelerated(blr.HessianDiagonal()), problem.objective(), problem.start(), data, steps=500, tolerance=tolerance
    )
    assert result.reason == "converged"
    assert result.steps <= most
    ours = problem.terms(np.asarray(result.q.mean), np.asarray(result.q.precision))[0]
    assert ours - best < tolerance
    optimum = blr.DiagonalGaussian(jnp.asarray(mean), jnp.asarray(precision))
    assert optimum.kl(result.q) < tolerance
    np.testing.assert_allclose(result.bound, -ours, atol=1e-7)
