"""Prior and noise learnt by the bound: scikit-learn's evidence maximum, and the top of a curve."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import multivariate_normal
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import BayesianRidge

import bayesrule as blr
from bayesrule.models import gp
from bayesrule.models.kernels import RBF
from bayesrule.models.regression import regression, zeros
from bayesrule.objectives.regularizers import as_regularizer


def product(w, x):
    return x @ w


def logistic(output, y):
    return jnp.logaddexp(0.0, output) - y * output


def test_ridge_is_scikit_learns_evidence_maximum():
    """BayesianRidge with flat hyper-priors maximises the same evidence by MacKay's fixed point."""
    x, y = load_diabetes(return_X_y=True)
    y = y - y.mean()
    flat = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    peer = BayesianRidge(fit_intercept=False, tol=1e-14, max_iter=10_000, compute_score=True, **flat).fit(x, y)

    def build(hyper):
        def squared(f, t):
            return 0.5 * hyper["noise"] * (f - t) ** 2 - 0.5 * jnp.log(hyper["noise"] / (2 * jnp.pi))

        return blr.Objective(squared, output=product, linear=True, size=len(y), regularizer=hyper["prior"])

    evidence = blr.empirical_bayes(blr.laplace(), build, {"noise": 1e-3, "prior": 1e-3}, jnp.zeros(10), (x, y))
    assert evidence.converged
    np.testing.assert_allclose(evidence.hyper["noise"], peer.alpha_, rtol=1e-6)
    np.testing.assert_allclose(evidence.hyper["prior"], peer.lambda_, rtol=1e-5)
    np.testing.assert_allclose(evidence.result.bound, peer.scores_[-1], rtol=1e-10)
    np.testing.assert_allclose(evidence.result.q.mean, peer.coef_, rtol=1e-4)


RULES = {
    "laplace": blr.laplace(),
    "variational": blr.newton(0.7).replace(points=blr.Quadrature(20), curvature=blr.Stein()),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", RULES)
def test_the_bound_is_highest_where_it_stopped(name):
    x, y = load_breast_cancer(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0), y.astype(float)
    x[7] = 0.0  # the output of a row of zeros has no variance, which does no harm

    def build(prior):
        return blr.Objective(logistic, output=product, linear=True, size=len(y), regularizer=prior)

    evidence = blr.empirical_bayes(RULES[name], build, 1.0, jnp.zeros(30), (x, y), tolerance=1e-9)
    assert evidence.converged
    assert np.isfinite(evidence.hyper)
    bound = {}
    for factor in (0.9, 1.0, 1.1):
        at = blr.fit(RULES[name], build(factor * evidence.hyper), evidence.result.q, (x, y), steps=50, tolerance=1e-10)
        bound[factor] = at.bound
    assert bound[0.9] < bound[1.0] > bound[1.1]
    # The top of the parabola through the three lies within 1 % of where the search stopped.
    slope = (bound[1.1] - bound[0.9]) / 2
    bend = bound[1.1] + bound[0.9] - 2 * bound[1.0]
    assert abs(slope / bend) < 0.1


def test_numbers_must_be_positive_and_random_points_need_a_key():
    with pytest.raises(ValueError, match="positive"):
        blr.empirical_bayes(blr.laplace(), lambda h: lambda x: h * jnp.sum(x**2), 0.0, jnp.zeros(1))
    with pytest.raises(ValueError, match=r"key=jax\.random\.key"):
        blr.empirical_bayes(blr.von(), lambda h: lambda x: h * jnp.sum(x**2), 1.0, jnp.zeros(1))


def tiny_regression():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(12, 2)))
    y = x @ jnp.array([1.0, -0.5]) + 0.3 * jnp.sin(jnp.arange(12.0))

    def loss(f, y):
        return 0.5 * (f - y) ** 2 + 0.919

    build = lambda prior: blr.Objective(loss, output=product, linear=True, size=12, regularizer=prior)
    return build, (x, y)


@pytest.mark.extended
def test_the_three_methods_agree():
    """One maximum by L-BFGS, by MacKay's updates and by a plain optimiser; the old names are aliases."""
    build, data = tiny_regression()
    by_evidence = blr.empirical_bayes(blr.laplace(), build, 1.0, jnp.zeros(2), data)
    prior = lambda hyper: hyper
    how = {"method": "conjugate", "prior": prior, "tolerance": 1e-12}
    conjugate = blr.empirical_bayes(blr.laplace(), build(1.0), 1.0, jnp.zeros(2), data, **how)
    alias = blr.matched(blr.laplace(), build(1.0), prior, 1.0, jnp.zeros(2), data, tolerance=1e-12)
    how = {"optimizer": optax.sgd(0.5), "steps": 120}
    online = blr.empirical_bayes(blr.laplace(), build, 1.0, jnp.zeros(2), data, method="online", **how)
    tuned = blr.tuned(blr.laplace(), build, 1.0, jnp.zeros(2), data, **how)
    assert by_evidence.converged
    assert conjugate.converged
    assert not online.converged
    assert conjugate.hyper == alias.hyper
    assert online.hyper == tuned.hyper
    np.testing.assert_allclose([conjugate.hyper, online.hyper], by_evidence.hyper, rtol=1e-4)
    np.testing.assert_allclose([conjugate.result.bound, online.result.bound], by_evidence.result.bound, rtol=1e-7)
    assert (online.result.reason, online.bounds.shape, online.evaluations) == ("steps", (120,), 120)
    np.testing.assert_allclose(online.bounds[-1], online.result.bound, rtol=1e-6)
    np.testing.assert_array_equal(online.q.mean, online.result.q.mean)


@pytest.mark.parametrize(
    ("rule", "expected"), [(blr.ogn(0.1, decay=0.9, curvature=1.0), 0.260216474), (blr.adam(0.05), 0.607345664)]
)
def test_online_on_mini_batches_uses_the_slope_at_fixed_q(rule, expected):
    """A step on a batch has its fixed point far from q, so that the implicit slope there led to any number.

    The expected numbers are those of the version before the implicit slope (commit 02ace4d).
    """
    x = jnp.asarray(np.random.default_rng(2).normal(size=(64, 3)))
    y = (x[:, 0] - 0.5 * x[:, 1] + jnp.sin(jnp.arange(64.0)) > 0).astype(float)
    build = lambda prior: blr.Objective(logistic, output=product, size=64, regularizer=prior)
    how = {"optimizer": optax.adam(0.1), "steps": 80, "batch_size": 8, "key": jax.random.key(0)}
    online = blr.empirical_bayes(rule, build, 5.0, jnp.zeros(3), (x, y), method="online", **how)
    assert online.result.reason == "steps"
    assert np.all(np.isfinite(online.bounds))
    np.testing.assert_allclose(online.hyper, expected, rtol=1e-6)


@pytest.mark.extended
def test_online_steps_take_the_sites_to_the_new_kernel():
    """Two online steps are, at each kernel of its own, a step of the rule from the same sites over that kernel's prior.

    By hand: the prior of the new kernel, given the sites; and the moments of these by NumPy.
    """
    x, y = jnp.linspace(0.0, 2.0, 6), jnp.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    build = lambda h: gp.process(RBF(h["variance"], h["scale"]), x, blr.factors.bernoulli_logit("y", {"f": None}))
    rule, hyper = blr.cvi(0.5), {"variance": 2.0, "scale": 0.7}
    run = lambda steps: blr.empirical_bayes(
        rule, build, hyper, None, {"y": y}, method="online", optimizer=optax.sgd(1.0), steps=steps
    )
    one, two = run(1), run(2)
    assert abs(np.log(one.hyper["variance"] / 2.0)) > 0.02  # the kernel has moved

    first, slopes = rule.init(None, build(hyper)), []
    for evidence, before in ((one, hyper), (two, one.hyper)):
        model = build(before).with_size(6)
        block = model.blocks["f"].with_natural(first.q["f"].natural())
        first = rule.step(model, dataclasses.replace(first, q=blr.Product({"f": block})), {"y": y})[0]
        slopes.append(first.q["f"].natural())
        for mine, theirs in zip(evidence.q["f"].natural(), slopes[-1], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10)
    at = np.asarray(x)
    linear, quadratic = (np.asarray(part) for part in two.q["f"].natural())
    prior = float(two.hyper["variance"]) * np.exp(-0.5 * ((at[:, None] - at) / float(two.hyper["scale"])) ** 2)
    covariance = np.linalg.inv(np.linalg.inv(prior) + np.diag(-2 * quadratic))
    np.testing.assert_allclose(two.q["f"].mean, covariance @ linear, rtol=1e-6)


@pytest.mark.extended
def test_online_ends_with_the_last_finite_hyper_parameters():
    build, data = tiny_regression()
    wild = optax.chain(optax.scale_by_schedule(lambda count: jnp.where(count < 3, 0.1, jnp.nan)))
    ended = blr.empirical_bayes(
        blr.laplace(), build, 1.0, jnp.zeros(2), data, method="online", optimizer=wild, steps=20
    )
    assert (ended.result.reason, ended.evaluations) == ("not finite", 3)
    assert np.isfinite(ended.hyper)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "'evidence', 'conjugate', 'online'; got 'magic'"),
        ({"optimizer": optax.sgd(0.1)}, 'optimizer= belongs to method="online", and this is method="evidence"'),
        ({"prior": jnp.exp}, 'prior= belongs to method="conjugate"'),
        ({"batch_size": 3}, 'batch_size= belongs to method="conjugate" and "online"'),
        ({"method": "conjugate"}, "needs prior="),
        ({"method": "conjugate", "prior": jnp.exp, "within": 10.0}, 'within= belongs to method="evidence"'),
        ({"method": "online", "steps": 3}, "needs optimizer="),
        ({"method": "online", "optimizer": optax.sgd(0.1)}, "and steps="),
        ({"method": "online", "optimizer": optax.sgd(0.1), "steps": 3, "tolerance": 1e-3}, "tolerance= belongs to"),
    ],
)
def test_arguments_of_another_method_are_refused(arguments, message):
    build, data = tiny_regression()
    with pytest.raises(ValueError, match=message):
        blr.empirical_bayes(blr.laplace(), build, 1.0, jnp.zeros(2), data, **arguments)


def leaves(hyper):
    return {"w": hyper["w"], "b": 0.0}


def test_matched_ends_where_the_bound_is_highest():
    x, y = load_breast_cancer(return_X_y=True)
    x, y = (x - x.mean(0))[:, :5] / x.std(0)[:5], y.astype(float)
    objective = regression("logistic", len(y))
    rule = blr.von(0.7).replace(points=blr.Quadrature(20), guard=blr.Backtracking(monotone=True))
    evidence = blr.matched(rule, objective, leaves, {"w": 1.0}, zeros(5), (x, y), tolerance=1e-10)
    assert evidence.converged
    bounds = [
        blr.fit(
            rule,
            regression("logistic", len(y), leaves({"w": factor * evidence.hyper["w"]})),
            evidence.result.q,
            (x, y),
            steps=50,
            tolerance=1e-10,
        ).bound
        for factor in (0.9, 1.1)
    ]
    assert max(bounds) < evidence.result.bound


def test_the_evidence_of_messages_is_the_marginal_likelihood():
    """y = xw + noise with w ∼ N(0, 1/α): log N(y; 0, xxᵀ/α + 1), from the message of one Newton step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 2))
    y = x @ [1.0, -0.5] + rng.normal(size=8)
    loss = lambda f, y: 0.5 * (f - y) ** 2 + 0.5 * np.log(2 * np.pi)
    objective = blr.Objective(loss, output=lambda w, x: x @ w, size=8, linear=True)
    prior = lambda hyper: hyper["w"]
    evidence = blr.matched(blr.newton(), objective, prior, {"w": 1.0}, jnp.zeros(2), (x, y), tolerance=1e-12)
    log_likelihood = lambda strength: multivariate_normal(np.zeros(8), x @ x.T / strength + np.eye(8)).logpdf(y)
    best = float(evidence.hyper["w"])
    assert evidence.result.bound == pytest.approx(log_likelihood(best), rel=1e-8)
    assert log_likelihood(best) > max(log_likelihood(0.95 * best), log_likelihood(1.05 * best))


@pytest.mark.extended
def test_a_regularizer_for_each_leaf():
    q = blr.Gaussian({"w": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}, 2.0)
    both = as_regularizer({"w": 0.5, "b": 0.25}, None)
    prior = as_regularizer(
        None, blr.DiagonalGaussian({"w": jnp.zeros(2), "b": 0.0}, {"w": jnp.full(2, 0.5), "b": 0.25})
    )
    assert both.normalized(q)
    for part in ("at_mean", "expected"):
        np.testing.assert_allclose(getattr(both, part)(q), getattr(prior, part)(q), rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, both.derivatives(q), prior.derivatives(q))
    alone = as_regularizer({"w": 0.5, "b": 0.0}, None)
    assert not alone.normalized(q)
    np.testing.assert_allclose(alone.at_mean(q), 0.25 * 5 + np.log(2 * np.pi) - np.log(0.5), rtol=1e-6)
    with pytest.raises(ValueError, match="none negative"):
        as_regularizer({"w": -1.0}, None)


@pytest.mark.extended
def test_features_that_outputs_share_are_their_jacobians():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(30, 3))), jnp.asarray(rng.integers(0, 4, 30))
    q = blr.Gaussian(zeros(3, 3), jnp.asarray(np.eye(12) + 0.1))
    shared = regression("softmax", 30, 1.0)
    written = blr.Objective(shared.loss, output=shared.output, linear=True, size=30, regularizer=1.0)
    for points in (blr.Delta(), blr.QuasiMonteCarlo(16), blr.Quadrature(4), blr.MonteCarlo(8)):
        rule = blr.newton(0.5).replace(points=points)
        steps = [
            jax.jit(rule.step)(objective, rule.init(q, objective), (x, y), jax.random.key(0))[0].q
            for objective in (shared, written)
        ]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *steps)


@pytest.mark.extended
def test_evenly_spread_points_average_as_quadrature_does():
    q = blr.Gaussian(jnp.array([0.3, -0.2]), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    mirrored = blr.QuasiMonteCarlo(512).at(q, None)
    quadrature = blr.Quadrature(20).at(q, None)
    f = lambda theta: jnp.tanh(theta[..., 0] + theta[..., 1] ** 2)
    average, exact = (float(points.weights @ f(points.theta)) for points in (mirrored, quadrature))
    assert average == pytest.approx(exact, abs=5e-3)
    np.testing.assert_allclose(mirrored.weights @ mirrored.theta, q.mean, atol=1e-6)
