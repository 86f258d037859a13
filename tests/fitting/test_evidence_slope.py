"""Slopes of Laplace's evidence beside scikit-learn's and differences of independent fits: third derivatives are in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial
from numpy.testing import assert_allclose
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel

import bayesrule as blr
from bayesrule import factors
from bayesrule.factor_graph.linear_factor import LinearFactor
from bayesrule.fitting.empirical_bayes import _bound_and_gradient
from bayesrule.models import gp
from bayesrule.models.kernels import RBF, Matern32
from bayesrule.models.sparse_gp import sparse

RANDOM = np.random.default_rng(0)
X = np.sort(RANDOM.uniform(-3, 3, 25))
LABELS = (np.sin(2 * X) + 0.6 * RANDOM.normal(size=25) > 0).astype(float)
COUNTS = RANDOM.poisson(np.exp(1 + np.sin(2 * X))).astype(float)
INPUTS = RANDOM.normal(size=(25, 3))
LABEL = factors.bernoulli_logit("y", {"f": None}, points=blr.Delta())
COUNT = factors.poisson_exp("y", {"f": None}, points=blr.Delta())


def process(hyper):
    return gp.process(RBF(hyper["variance"], hyper["scale"]), X[:, None], LABEL)


@pytest.mark.extended
def test_slopes_and_maximum_of_a_laplace_process_are_scikit_learns():
    theirs = GaussianProcessClassifier(ConstantKernel(1.0) * SklearnRBF(1.0)).fit(X[:, None], LABELS)
    value, slopes = theirs.log_marginal_likelihood(np.log([1.5, 0.7]), eval_gradient=True)
    actual, gradient = evidence_at(blr.cvi(1.0), process, {"variance": 1.5, "scale": 0.7}, None, {"y": LABELS})
    assert_allclose(actual, value, rtol=1e-9)
    assert_allclose([gradient["variance"], gradient["scale"]], slopes, rtol=1e-7)
    start = {"variance": 1.0, "scale": 1.0}
    best = blr.empirical_bayes(blr.cvi(1.0), process, start, None, {"y": jnp.asarray(LABELS)})
    how = {"optimizer": optax.adam(0.2), "steps": 120}
    online = blr.tuned(blr.cvi(1.0), process, start, None, {"y": jnp.asarray(LABELS)}, **how)
    assert best.converged
    assert best.result.bound == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-8)
    assert online.result.bound == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-4)
    assert_allclose(np.log([best.hyper["variance"], best.hyper["scale"]]), theirs.kernel_.theta, atol=1e-3)


@pytest.mark.extended
@pytest.mark.as_users
def test_slopes_in_single_precision():
    theirs = GaussianProcessClassifier(ConstantKernel(1.0) * SklearnRBF(1.0), optimizer=None).fit(X[:, None], LABELS)
    _, slopes = theirs.log_marginal_likelihood(np.log([1.5, 0.7]), eval_gradient=True)
    with jax.enable_x64(False):
        _, gradient = evidence_at(blr.cvi(1.0), process, {"variance": 1.5, "scale": 0.7}, None, {"y": LABELS}, steps=20)
    assert gradient["scale"].dtype == jnp.float32
    assert_allclose([gradient["variance"], gradient["scale"]], slopes, rtol=2e-5)


def evidence_at(rule, build, hyper, start, data, steps=200):
    logs = {name: jnp.log(jnp.asarray(value)) for name, value in hyper.items()}
    q = rule.init(start, build(hyper)).q
    data = jax.tree.map(jnp.asarray, data)
    found = _bound_and_gradient(rule, Partial(build), logs, q, data, jax.random.key(0), 1e-26, steps=steps)
    return found[1:]


def chain(hyper):
    return gp.process(Matern32(hyper["variance"], hyper["scale"]), X, COUNT, through="chain")


def inducing(hyper):
    return sparse(Matern32(hyper["variance"], hyper["scale"]), np.linspace(-3, 3, 6), COUNT, mean=0.5)


def weights(family):
    """Counts with a softened exponential whose scale is a hyper-parameter of the likelihood, besides the prior's."""

    def build(hyper):
        def log_p(f, y):
            rate = jnp.exp(f) * hyper["exposure"]
            return y * jnp.log(rate) - rate - jax.scipy.special.gammaln(y + 1)

        prior = factors.prior("w", family(jnp.zeros(3), hyper["prior"]))
        likelihood = LinearFactor(log_p, {"w": "x"}, data="y", points=blr.Delta())
        return blr.Model({"w": family(jnp.zeros(3))}, {"prior": prior, "y": likelihood}, size=25)

    return build


def points_of_a_block(hyper):
    """The same counts, as a factor of the block's values."""

    def log_p(w, x, y):
        f = x @ w + jnp.log(hyper["exposure"])
        return y * f - jnp.exp(f)

    prior = factors.prior("w", blr.Gaussian(jnp.zeros(3), hyper["prior"]))
    likelihood = blr.Factor(log_p, "w", data=("x", "y"), points=blr.Delta())
    return blr.Model({"w": blr.Gaussian(jnp.zeros(3))}, {"prior": prior, "y": likelihood})


def objective(hyper):
    loss = lambda f, y: hyper["exposure"] * jnp.exp(f) - y * (f + jnp.log(hyper["exposure"]))
    return blr.Objective(loss, output=lambda w, x: x @ w, linear=True, size=25, regularizer=hyper["prior"])


KERNEL, PRIOR = {"variance": 0.8, "scale": 0.6}, {"prior": 0.7, "exposure": 1.3}
TABLE = {"x": INPUTS, "y": COUNTS}
DAMPED = blr.laplace().replace(steps=blr.Steps(0.5))
CASES = {
    "chain of counts": (blr.cvi(1.0), chain, KERNEL, None, {"y": COUNTS}),
    "inducing inputs": (blr.cvi(1.0), inducing, KERNEL, None, {"x": X[:, None], "y": COUNTS}),
    "weights, damped": (blr.cvi(0.5), weights(blr.Gaussian), PRIOR, None, TABLE),
    "weights, mean-field": (blr.cvi(0.8), weights(blr.DiagonalGaussian), PRIOR, None, TABLE),
    "weights, sites": (blr.cvi(1.0, sites=True), weights(blr.Gaussian), PRIOR, None, TABLE),
    "values of a block": (blr.cvi(1.0), points_of_a_block, PRIOR, None, TABLE),
    "objective, damped": (DAMPED, objective, PRIOR, jnp.zeros(3), (INPUTS, COUNTS)),
}
# These take 10 to 50 seconds each, most of it to compile.
EXTENDED = ("chain of counts", "inducing inputs", "weights, damped", "weights, sites", "values of a block")


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.extended if n in EXTENDED else ()) for n in CASES])
def test_slopes_are_differences_of_fits(name):
    """The log evidence of two fits that are 2e-4 apart in log η: the difference's own error is of order 1e-8."""
    rule, build, hyper, start, data = CASES[name]
    _, gradient = evidence_at(rule, build, hyper, start, data)
    for name, value in hyper.items():
        high, low = (
            evidence_at(rule, build, hyper | {name: value * np.exp(change)}, start, data)[0] for change in (1e-4, -1e-4)
        )
        assert_allclose(gradient[name], (high - low) / 2e-4, rtol=1e-6, atol=1e-6)
    assert any(abs(float(slope)) > 0.01 for slope in gradient.values())


@pytest.mark.extended
def test_a_quadratic_likelihood_by_the_delta_method_is_exact_in_its_precision_too():
    """The Hessian's term of E log p is part of the message to a precision that the likelihood shares."""
    y = INPUTS @ np.array([1.0, -1.0, 0.5]) + 0.3 * RANDOM.normal(size=25)

    def log_p(f, y, precision):
        return 0.5 * precision[0] - 0.5 * precision[1] * (y - f) ** 2

    blocks = {"w": blr.Gaussian(jnp.zeros(3)), "tau": blr.Gamma(1.0, 1.0)}
    priors = {f"prior of {name}": factors.prior(name, block) for name, block in blocks.items()}
    exact, delta = (
        blr.fit(
            blr.vmp(),
            blr.Model(blocks, priors | {"y": LinearFactor(log_p, {"w": "x"}, "tau", data="y", points=points)}),
            None,
            {"x": jnp.asarray(INPUTS), "y": jnp.asarray(y)},
            steps=100,
            tolerance=1e-13,
        )
        for points in (blr.Quadrature(5), blr.Delta())
    )
    assert delta.bound == pytest.approx(exact.bound, abs=1e-9)
    assert_allclose(delta.q["tau"].rate, exact.q["tau"].rate, rtol=1e-7)
