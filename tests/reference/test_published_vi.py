"""Full and mean-field Gaussian variational inference for logistic regression, as published.

Mishkin et al., "SLANG: fast structured covariance approximations", NeurIPS 2018: means and
covariances of the exact optimum on a1a and on ten splits of breast-cancer.

The network algorithms, annealed, see the model as any network: samples of the weights, no knowledge that outputs are
linear in them. `voggn` and `ivon` have the variational optimum as their fixed point. `vogn` does not: squared
gradients stand for the Hessian in its fixed point too, and where the model fits well they are not its expectation.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

DATA = Path(__file__).parent / "data"


def product(w, x):
    return x @ w


def logistic(output, y):
    return jnp.logaddexp(0.0, output) - y * output


def load(name, split):
    file = dict(np.load(DATA / f"published_vi_{name}.npz"))
    x, y = file["X"], file["y"].astype(float)
    if name == "a1a":
        x = np.unpackbits(x, axis=1)[:, :124]
    else:
        rows = file["perm"][split][: len(y) // 2]
        x, y = x[rows], y[rows]
    return jnp.asarray(x, float), jnp.asarray(y), file


def objective(x, file):
    prior = blr.DiagonalGaussian(jnp.zeros(x.shape[1]), jnp.asarray(file["prior_precision"]))
    return blr.Objective(logistic, output=product, linear=True, size=len(x), prior=prior)


CASES = [("a1a", 0)] + [("breast_cancer_scale", split) for split in range(10)]


@pytest.mark.sampled("breast_cancer_scale-0", "breast_cancer_scale-1")
@pytest.mark.parametrize(("name", "split"), CASES)
def test_full(name, split):
    x, y, file = load(name, split)
    rule = blr.newton().replace(points=blr.Quadrature(40), curvature=blr.Stein())
    start = blr.Gaussian(jnp.zeros(x.shape[1]), jnp.diag(jnp.asarray(file["prior_precision"]) + 1))
    result = blr.fit(rule, objective(x, file), start, (x, y), steps=200, tolerance=1e-9)
    assert result.reason == "converged"
    published = blr.Gaussian(
        jnp.asarray(file["pub_exact_mu"][split]), jnp.linalg.inv(jnp.asarray(file["pub_exact_Sigma"][split]))
    )
    # The published solution of split 6 is itself 0.0045 nats short of its optimum: its −ELBO lies that much further
    # above ours than in the other nine, and its KL to the optimum is that much larger.
    assert published.kl(result.q) <= (0.005 if (name, split) == ("breast_cancer_scale", 6) else 0.004)
    # The published −ELBO used a piecewise bound (0.03 to 0.15 nats loose) and left out ½ log λ of the
    # intercept's prior; ours is the integral with every constant.
    theirs = file["pub_exact_nlZ"][split] - 0.5 * np.log(file["prior_precision"][0])
    assert 0 <= theirs + result.bound <= 0.2


@pytest.mark.sampled("breast_cancer_scale-0")
@pytest.mark.parametrize(("name", "split"), [("a1a", 0), ("breast_cancer_scale", 0)])
def test_full_by_messages(name, split):
    """Non-conjugate variational inference with a site for each row: no Hessian, the derivative in μ of each factor."""
    x, y, file = load(name, split)
    prior = blr.Gaussian(jnp.zeros(x.shape[1]), jnp.diag(jnp.asarray(file["prior_precision"])))
    likelihood = blr.factors.bernoulli_logit("y", {"w": "x"}, points=blr.Quadrature(40))
    model = blr.Model({"w": prior}, {"prior": blr.factors.prior("w", prior), "y": likelihood})
    rule = blr.cvi(0.7, sites=True).replace(guard=blr.Backtracking(monotone=True))  # a1a's flat prior is a far start
    result = blr.fit(rule, model, None, {"x": x, "y": y}, steps=50, tolerance=1e-9)
    assert result.reason == "converged"
    covariance = jnp.asarray(file["pub_exact_Sigma"][split])
    published = blr.Gaussian(jnp.asarray(file["pub_exact_mu"][split]), jnp.linalg.inv(covariance))
    assert published.kl(result.q["w"]) <= 0.004


@pytest.mark.sampled("breast_cancer_scale-0", "breast_cancer_scale-1")
@pytest.mark.parametrize(("name", "split"), CASES)
def test_mean_field(name, split):
    x, y, file = load(name, split)
    problem = objective(x, file)
    start = blr.DiagonalGaussian(jnp.zeros(x.shape[1]), jnp.asarray(file["prior_precision"]) + len(x) / 4)
    # A diagonal precision is a poor preconditioner for one-hot columns: acceleration makes up for it.
    rule = blr.newton().replace(
        family=blr.DiagonalGaussian,
        points=blr.Quadrature(20),
        curvature=blr.Stein(),
        steps=blr.Steps(1.0, acceleration=blr.Anderson()),
    )
    result = blr.fit(rule, problem, start, (x, y), steps=400, tolerance=1e-8)
    assert result.reason == "converged"
    published = blr.DiagonalGaussian(
        jnp.asarray(file["pub_mf-exact_mu"][split]), 1 / jnp.asarray(file["pub_mf-exact_Sigma"][split])
    )
    assert published.kl(result.q) <= 0.015


# The network algorithms.

SPLITS = (0, 5)


def annealed(rate, horizon):
    """ρ_t = rate/(1 + t/horizon), for the mean and the precision: Robbins and Monro's."""
    return lambda t: rate / (1 + t / horizon)


def fitted(recipe, split, steps, rate, horizon, **options):
    x, y, file = load("breast_cancer_scale", split)
    prior = blr.DiagonalGaussian(jnp.zeros(x.shape[1]), jnp.asarray(file["prior_precision"]))
    objective = blr.Objective(logistic, output=product, size=len(x), prior=prior)
    schedule = annealed(rate, horizon)
    rule = recipe(
        schedule,
        decay=lambda t: 1 - schedule(t),
        averaging=0,
        relative=False,
        curvature=0.2,
        antithetic=True,
        **options,
    )
    result = blr.fit(rule, objective, jnp.zeros(x.shape[1]), (x, y), steps=steps, key=jax.random.key(split))
    mean, variance = file["pub_mf-exact_mu"][split], file["pub_mf-exact_Sigma"][split]
    shift = np.abs(result.q.mean - mean) / np.sqrt(variance)
    return np.max(shift), np.max(np.abs(1 / result.q.precision / variance - 1))


@pytest.mark.extended
@pytest.mark.parametrize("split", SPLITS)
def test_voggn(split):
    shift, width = fitted(blr.voggn, split, 4000, 0.5, 50.0, samples=8)
    assert shift < 0.05
    assert width < 0.05


@pytest.mark.extended
def test_ivon():
    shift, width = fitted(blr.ivon, 0, 20_000, 0.1, 300.0, samples=32)
    assert shift < 0.05
    assert width < 0.05


@pytest.mark.parametrize("split", SPLITS)
def test_vogn_has_another_fixed_point(split):
    """Over all ten splits the means are off by 0.17 to 0.43 sd at most, and a variance by 54 to 105 %."""
    shift, width = fitted(blr.vogn, split, 3000, 0.5, 50.0, samples=8)
    assert 0.1 < shift < 0.6
    assert 0.4 < width < 1.4
