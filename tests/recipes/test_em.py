"""Expectation maximisation against scikit-learn: iterates of mixtures, optima of factor analysis and PPCA."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA, FactorAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import bayesrule as blr
from bayesrule import factors

ROWS = load_iris().data
MEANS, WEIGHTS = ROWS[[10, 60, 120]], np.array([0.3, 0.3, 0.4])
PRECISIONS = np.stack([np.linalg.inv(np.cov(ROWS.T))] * 3)


def mixture():
    """q's λ is where the peak is: weights λ/Σλ, means m and precisions (n − D)V."""
    components = blr.NormalWishart(jnp.array(MEANS), jnp.ones(3), jnp.full(3, 5.0), jnp.array(PRECISIONS))
    likelihood = factors.mixture("weights", factors.multivariate_normal("y", joint="components"))
    return blr.Model({"weights": blr.Dirichlet(1 + WEIGHTS), "components": components}, {"y": likelihood})


def sklearn_mixture(steps):
    start = {"weights_init": WEIGHTS, "means_init": MEANS, "precisions_init": PRECISIONS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(3, reg_covar=0, max_iter=steps, tol=0, **start).fit(ROWS)


@pytest.mark.extended
def test_em_takes_scikit_learn_s_iterates():
    rule, model = blr.em(order="parallel"), mixture()
    state, step = rule.init(None, model), jax.jit(rule.step)
    for count in range(1, 9):
        state, _ = step(model, state, {"y": ROWS})
        theirs, actual = sklearn_mixture(count), state.q["components"].mean
        assert_allclose(state.q["weights"].mean, theirs.weights_, rtol=1e-10)
        assert_allclose(actual["mean"], theirs.means_, rtol=1e-10)
        assert_allclose(np.linalg.inv(actual["precision"]), theirs.covariances_, rtol=1e-8, atol=1e-10)
        assert_allclose(rule.bound(model, state.q, {"y": ROWS}), theirs.score(ROWS) * 150, rtol=1e-10)


@pytest.mark.extended
def test_em_on_iris_reaches_the_known_maximum():
    """REFERENCE: log-likelihood −180.18548, weights .29919, .33333, .36747."""
    result = blr.fit(blr.em(order="parallel"), mixture(), None, {"y": ROWS}, steps=500, tolerance=1e-12, check=True)
    assert result.reason == "converged"
    assert_allclose(result.bound, -180.18548, atol=5e-6)
    assert_allclose(np.sort(result.q["weights"].mean), [0.29919, 0.33333, 0.36747], atol=5e-6)


@pytest.mark.extended
def test_an_explicit_e_step_is_the_same():
    """With the choices as a local block, E and then M, instead of summed out."""
    summed = mixture()
    components = summed.blocks["components"]
    chosen = blr.Model(
        {"weights": summed.blocks["weights"], "components": components},
        {
            "z": factors.categorical("z", probabilities="weights"),
            "y": factors.choice("z", factors.multivariate_normal("y", joint="components")),
        },
        local={"z": blr.Categorical(jnp.zeros(3))},
    )
    rule = blr.em(order=["z", ("weights", "components")])
    first = blr.fit(rule, chosen, None, {"y": ROWS}, steps=4)
    second = blr.fit(blr.em(order="parallel"), summed, None, {"y": ROWS}, steps=4)
    assert_allclose(first.q["weights"].mean, second.q["weights"].mean, rtol=1e-12)
    assert_allclose(first.q["components"].mean["mean"], second.q["components"].mean["mean"], rtol=1e-12)


@pytest.mark.extended
def test_online_em_is_em_on_average():
    """Mini-batches with a falling rate (Cappé and Moulines) come close to the maximum that EM finds."""
    rule = blr.em(order="parallel", rate=lambda t: (t + 2.0) ** -0.7)
    best = blr.fit(blr.em(order="parallel"), mixture(), None, {"y": ROWS}, steps=500, tolerance=1e-12)
    online = blr.fit(rule, mixture(), best.q, {"y": ROWS}, steps=300, batch_size=50, key=jax.random.key(0))
    assert_allclose(np.asarray(online.q["weights"].mean), best.q["weights"].mean, atol=0.05)
    assert rule.bound(mixture(), online.q, {"y": ROWS}) > best.bound - 2


def factor_model(rows, size, noise):
    """y = Wx + ε with x ~ N(0, I): loadings and noise are parameters, x latent. Rows are centred."""
    start = np.random.default_rng(0).normal(size=(rows.shape[1], size))
    loadings = blr.Gaussian(jnp.array(start), jnp.broadcast_to(jnp.eye(size), (rows.shape[1], size, size)))
    latent = blr.Gaussian(jnp.zeros(size), jnp.eye(size))
    return blr.Model(
        {"loadings": loadings, "noise": noise},
        {
            "latent": factors.prior("latent", latent),
            "y": factors.bilinear("y", "latent", "loadings", precision="noise"),
        },
        local={"latent": latent},
    )


def log_likelihood(rows, loadings, variances):
    covariance = loadings @ loadings.T + np.diag(variances)
    sample = rows.T @ rows / len(rows)
    trace = np.trace(np.linalg.solve(covariance, sample))
    return -0.5 * len(rows) * (len(covariance) * np.log(2 * np.pi) + np.linalg.slogdet(covariance)[1] + trace)


@pytest.mark.extended
def test_ppca_reaches_scikit_learn_s_optimum():
    """REFERENCE: PPCA of iris with two factors has σ² = 0.0510222965 and log-likelihood −404.9694766, for the
    covariance with N − 1 in its denominator that scikit-learn's PCA takes: the maximum itself is 149/150 of it."""
    rows = ROWS - ROWS.mean(0)
    rule = blr.em("loadings", "noise", order=["latent", "loadings", "noise"])
    model = factor_model(rows, 2, blr.Gamma(3.0, 1.0))
    result = blr.fit(rule, model, None, {"y": rows}, steps=4000, tolerance=1e-13, check=True)
    loadings, variance = np.asarray(result.q["loadings"].mean), 1 / float(result.q["noise"].mean)
    assert_allclose(result.bound, log_likelihood(rows, loadings, np.full(4, variance)), atol=1e-6)
    wider = 150 / 149
    assert_allclose(wider * variance, 0.0510222965, atol=1e-8)
    assert_allclose(wider * variance, PCA(2).fit(ROWS).noise_variance_, rtol=1e-7)
    wide = log_likelihood(rows, np.sqrt(wider) * loadings, np.full(4, wider * variance))
    assert_allclose(wide, -404.9694766, atol=1e-6)


def test_factor_analysis_reaches_scikit_learn_s_optimum():
    random = np.random.default_rng(4)
    rows = (
        random.normal(size=(150, 2)) @ random.normal(size=(2, 6)) + random.normal(size=(150, 6)) * np.arange(1, 7) / 4
    )
    rows -= rows.mean(0)
    rule = blr.em("loadings", "noise", order=["latent", "loadings", "noise"])
    model = factor_model(rows, 2, blr.Gamma(jnp.full(6, 3.0), 1.0))
    result = blr.fit(rule, model, None, {"y": rows}, steps=4000, tolerance=1e-13, check=True)
    loadings, variances = np.asarray(result.q["loadings"].mean), 1 / np.asarray(result.q["noise"].mean)
    theirs = FactorAnalysis(2, tol=1e-8, max_iter=10000, svd_method="lapack").fit(rows)
    assert_allclose(result.bound, theirs.score(rows) * 150, atol=1e-6)
    assert_allclose(variances, theirs.noise_variance_, rtol=1e-4)
    assert_allclose(loadings @ loadings.T, theirs.components_.T @ theirs.components_, atol=1e-3)


@pytest.mark.extended
def test_newton_s_m_step_where_nothing_is_conjugate():
    """Logistic regression as a model without latent blocks: em is Newton's method at the peak, to the maximum."""
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(1)
    x = random.normal(size=(80, 2))
    y = (random.random(80) < 1 / (1 + np.exp(-x @ [1.0, -2.0]))).astype(float)
    weights = blr.Gaussian(jnp.zeros(2), jnp.eye(2))

    def log_loss(w, x, y):
        return jax.nn.log_sigmoid((2 * y - 1) * (x @ w))

    model = blr.Model({"w": weights}, {"y": blr.Factor(log_loss, "w", data=("x", "y"), points=blr.Delta())})
    result = blr.fit(blr.em(m_steps=10), model, None, {"x": x, "y": y}, steps=3)
    theirs = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(x, y)
    assert_allclose(result.q["w"].mean, theirs.coef_[0], rtol=1e-6)
    slopes = 1 / (1 + np.exp(-x @ theirs.coef_[0]))
    assert_allclose(result.bound, np.sum(np.log(np.where(y == 1, slopes, 1 - slopes))), rtol=1e-10)
    guarded = blr.em(m_steps=10).replace(guard=blr.Backtracking(monotone=True))
    far = {"w": blr.Gaussian(jnp.array([40.0, 40.0]), jnp.eye(2))}
    back = blr.fit(guarded, model, far, {"x": x, "y": y}, steps=20, tolerance=1e-12)
    assert back.reason == "converged"
    assert_allclose(back.q["w"].mean, theirs.coef_[0], rtol=1e-6)
    through = blr.Model({"w": weights}, {"y": factors.bernoulli_logit("y", {"w": "x"}, points=blr.Delta())})
    again = blr.fit(blr.em(m_steps=10), through, None, {"x": x, "y": y}, steps=3)
    assert_allclose(again.q["w"].mean, result.q["w"].mean, rtol=1e-10)


@pytest.mark.extended
def test_a_repeated_m_step_measures_nothing():
    """One block takes a plain step, the other several of Newton's, of which no objective is known."""

    def log_likelihood(w, b, x, y):
        return jax.nn.log_sigmoid((2 * y - 1) * (x @ w + b[0]))

    blocks = {"w": blr.Gaussian(jnp.zeros(2), jnp.eye(2)), "b": blr.Gaussian(jnp.zeros(1), jnp.eye(1))}
    factor = blr.Factor(log_likelihood, "w", "b", data=("x", "y"), points=blr.Delta())
    model, data = blr.Model(blocks, {"y": factor}), {"x": np.eye(2), "y": np.array([0.0, 1.0])}
    rule = blr.em("b", m_steps=4)
    state, info = rule.step(model, rule.init(None, model), data, jax.random.key(0))
    assert np.isnan(info.objective)
    assert info.decrement is None
    assert info.finite
    assert state.count == 1


@pytest.mark.extended
def test_a_peak_is_where_the_inner_product_is_largest():
    members = [
        blr.Gamma(3.0, 4.0),
        blr.Beta(2.0, 5.0),
        blr.Dirichlet(jnp.array([2.0, 3.0, 1.5])),
        blr.NormalGamma(0.5, 2.0, 3.0, 1.5),
        blr.Wishart(6.0, jnp.array([[1.0, 0.3], [0.3, 2.0]])),
        blr.NormalWishart(jnp.array([0.5, 1.0]), 2.0, 6.0, jnp.array([[1.0, 0.3], [0.3, 2.0]])),
        blr.Gaussian(jnp.array([1.0, 2.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]])),
    ]
    for q in members:
        peak, natural = blr.Peak(q), q.natural()
        best = q.inner(natural, peak.expectation())
        assert np.all(np.isfinite(best))
        draws = q.inner(natural, q.statistics(q.sample(jax.random.key(0), (500,))))
        assert np.all(draws <= best + 1e-12), type(q).__name__
        assert float(peak.entropy()) == 0
    with pytest.raises(ValueError, match="has no mode"):
        blr.Peak(blr.Poisson(2.0)).mode()
