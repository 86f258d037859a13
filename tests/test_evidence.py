"""Prior and noise learnt by the bound: scikit-learn's evidence maximum, and the top of a curve."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import BayesianRidge

import bayesrule as blr


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

    found = blr.empirical_bayes(blr.laplace(), build, {"noise": 1e-3, "prior": 1e-3}, jnp.zeros(10), (x, y))
    assert found.converged
    np.testing.assert_allclose(found.hyper["noise"], peer.alpha_, rtol=1e-6)
    np.testing.assert_allclose(found.hyper["prior"], peer.lambda_, rtol=1e-5)
    np.testing.assert_allclose(found.result.bound, peer.scores_[-1], rtol=1e-10)
    np.testing.assert_allclose(found.result.q.mean, peer.coef_, rtol=1e-4)


RULES = {
    "laplace": blr.laplace(),
    "variational": blr.newton(0.7).replace(points=blr.Quadrature(20), curvature=blr.Stein()),
}


@pytest.mark.parametrize("name", RULES)
def test_the_bound_is_highest_where_it_stopped(name):
    x, y = load_breast_cancer(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0), y.astype(float)
    x[7] = 0.0  # a row of zeros has no spread, and does no harm

    def build(prior):
        return blr.Objective(logistic, output=product, linear=True, size=len(y), regularizer=prior)

    found = blr.empirical_bayes(RULES[name], build, 1.0, jnp.zeros(30), (x, y), tolerance=1e-9)
    assert found.converged
    assert np.isfinite(found.hyper)
    bound = {}
    for factor in (0.9, 1.0, 1.1):
        at = blr.fit(RULES[name], build(factor * found.hyper), found.result.q, (x, y), steps=50, tolerance=1e-10)
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
