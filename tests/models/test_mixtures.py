"""Mixtures, factor analysis and topics built from arrays: where they start, and where em, vmp and svi take them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA, FactorAnalysis
from sklearn.mixture import GaussianMixture

import bayesrule as blr
from bayesrule.models.factor_analysis import factor_analysis, ppca
from bayesrule.models.mixture import gaussian_mixture, responsibilities
from bayesrule.models.topics import documents, latent_dirichlet, shares

ROWS = load_iris().data
CENTRED = ROWS - ROWS.mean(0)


@pytest.mark.sampled("diag")
@pytest.mark.parametrize("covariance", ["full", "diag"])
def test_em_ends_where_scikit_learn_s_does(covariance):
    model = gaussian_mixture(ROWS, 3, covariance=covariance)
    result = blr.fit(blr.em(order="parallel"), model, None, {"y": ROWS}, steps=500, tolerance=1e-12)
    components = result.q["components"].mean
    start = {"means_init": np.asarray(components["mean"]), "precisions_init": np.asarray(components["precision"])}
    start["weights_init"] = np.asarray(result.q["weights"].mean)
    how = {"covariance_type": covariance, "reg_covar": 0, "tol": 1e-12, "max_iter": 2000}
    theirs = GaussianMixture(3, **how, **start)  # which finds nothing better from there
    assert_allclose(result.bound, theirs.fit(ROWS).score(ROWS) * len(ROWS), atol=1e-5)
    ordinary = GaussianMixture(3, **how, random_state=0).fit(ROWS)
    assert result.bound > ordinary.score(ROWS) * len(ROWS) - 1e-5
    chances = responsibilities(model, result.q, ROWS)
    order = np.argsort(np.asarray(result.q["weights"].mean)), np.argsort(theirs.weights_)
    assert_allclose(chances[:, order[0]], theirs.predict_proba(ROWS)[:, order[1]], atol=1e-4)


@pytest.mark.extended
def test_a_bayesian_mixture_by_whole_and_by_batches():
    model, data = gaussian_mixture(ROWS, 6, priors="default"), {"y": ROWS}
    whole = blr.fit(blr.vmp(order="parallel"), model, None, data, steps=60)
    assert np.all(np.diff(whole.trace["bound"]) > -1e-9)
    same = blr.fit(blr.svi(1.0, order="parallel"), model, None, data, steps=60)
    assert_allclose(same.bound, whole.bound, rtol=1e-12)
    rule = blr.svi(lambda t: (t + 2.0) ** -0.7, order="parallel")
    part = blr.fit(rule, model, None, data, steps=200, batch_size=50, key=jax.random.key(0))
    assert model.bound(part.q, data) > whole.trace["bound"][2]


@pytest.mark.extended
def test_a_missing_row_is_of_any_component():
    y = np.concatenate([ROWS, np.full((1, 4), np.nan)])
    model = gaussian_mixture(y, 2)
    result = blr.fit(blr.em(order="parallel"), model, None, {"y": y}, steps=5)
    chances = responsibilities(model, result.q, y)
    assert_allclose(chances[-1], result.q["weights"].mean, rtol=1e-10)


@pytest.mark.extended
def test_rows_that_are_missing_in_part():
    """Responsibilities of the observed entries by SciPy, and EM's fixed point by the entries that it fills in."""
    y = np.where(np.random.default_rng(0).random(ROWS.shape) < 0.15, np.nan, ROWS)
    model = gaussian_mixture(y, 2)
    result = blr.fit(blr.em(order="parallel"), model, None, {"y": y}, steps=300, tolerance=1e-11, check=True)
    assert result.reason == "converged"
    means, weights = (np.asarray(x) for x in (result.q["components"].mean["mean"], result.q["weights"].mean))
    covariances = np.linalg.inv(result.q["components"].mean["precision"])
    joint, filled, spread = np.zeros((150, 2)), np.zeros((2, 150, 4)), np.zeros((2, 150, 4, 4))
    for n, k in np.ndindex(150, 2):
        seen = ~np.isnan(y[n])
        inner = covariances[k][np.ix_(seen, seen)]
        gain = np.linalg.solve(inner, covariances[k][np.ix_(seen, ~seen)]).T
        joint[n, k] = np.log(weights[k]) + multivariate_normal(means[k][seen], inner).logpdf(y[n][seen])
        filled[k, n] = np.where(seen, y[n], 0.0)
        filled[k, n, ~seen] = means[k][~seen] + gain @ (y[n] - means[k])[seen]
        rest = covariances[k][np.ix_(~seen, ~seen)] - gain @ covariances[k][np.ix_(seen, ~seen)]
        spread[k, n][np.ix_(~seen, ~seen)] = rest
    assert_allclose(result.bound, logsumexp(joint, axis=1).sum(), rtol=1e-10)
    chances = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    assert_allclose(responsibilities(model, result.q, y), chances, atol=1e-8)
    for k in range(2):
        share = chances[:, k] / chances[:, k].sum()
        assert_allclose(share @ filled[k], means[k], atol=1e-4)
        deviation = filled[k] - means[k]
        second = np.einsum("n,nde->de", share, deviation[:, :, None] * deviation[:, None] + spread[k])
        assert_allclose(second, covariances[k], atol=1e-4)


@pytest.mark.parametrize(
    ("y", "count", "message"),
    [
        (ROWS[:2], 3, "cannot be told apart"),
        (ROWS[:, 0], 2, r"rows of numbers, \(N, D\)"),
        (np.full((5, 2), np.nan), 2, "All of y is missing"),
        (np.ones((5, 2)), 2, "do not vary"),
        (ROWS, 0, "whole number above 0"),
    ],
)
def test_bad_mixtures(y, count, message):
    with pytest.raises(ValueError, match=message):
        gaussian_mixture(y, count)


@pytest.mark.sampled("True")
@pytest.mark.parametrize("shared", [False, True])
def test_ppca_starts_at_its_maximum(shared):
    """One step of EM from the principal components, and the closed form's noise and loadings (Tipping and Bishop)."""
    model = ppca(CENTRED, 2, shared=shared)
    result = blr.fit(blr.em("loadings", "noise"), model, None, {"y": CENTRED}, steps=300, tolerance=1e-12)
    theirs = PCA(2).fit(ROWS)
    assert_allclose(150 / 149 / result.q["noise"].mean, theirs.noise_variance_, rtol=1e-5)
    loadings = np.asarray(result.q["loadings"].mean)
    scales = 149 / 150 * (theirs.explained_variance_ - theirs.noise_variance_)
    assert_allclose(loadings @ loadings.T, (theirs.components_.T * scales) @ theirs.components_, rtol=1e-4, atol=1e-5)


def test_factor_analysis_with_missing_entries():
    """All entries: scikit-learn's maximum. Some missing: the marginal likelihood of what is there never falls."""
    random = np.random.default_rng(4)
    rows = random.normal(size=(150, 2)) @ random.normal(size=(2, 5)) + 0.5 * random.normal(size=(150, 5))
    rows -= rows.mean(0)
    rule = blr.em("loadings", "noise")
    whole = blr.fit(rule, factor_analysis(rows, 2), None, {"y": rows}, steps=2000, tolerance=1e-10)
    theirs = FactorAnalysis(2, tol=1e-8, max_iter=10000, svd_method="lapack").fit(rows)
    assert_allclose(whole.bound, theirs.score(rows) * 150, atol=1e-3)
    holes = np.where(random.uniform(size=rows.shape) < 0.2, np.nan, rows)
    part = blr.fit(rule, factor_analysis(holes, 2), None, {"y": holes}, steps=100)
    assert np.all(np.diff(part.trace["bound"]) > -1e-9)
    covariance = lambda q: np.asarray(q["loadings"].mean @ q["loadings"].mean.T + jnp.diag(1 / q["noise"].mean))
    total = 0.0
    for row in holes:
        there = ~np.isnan(row)
        own = covariance(part.q)[np.ix_(there, there)]
        distance = row[there] @ np.linalg.solve(own, row[there])
        total -= 0.5 * (distance + np.linalg.slogdet(own)[1] + there.sum() * np.log(2 * np.pi))
    gap = total - part.bound  # the rows' own q is a step older than the parameters
    assert 0 <= gap < 0.05


@pytest.mark.extended
def test_factors_that_are_not_needed_fade():
    random = np.random.default_rng(1)
    rows = random.normal(size=(200, 2)) @ random.normal(size=(2, 6)) + 0.3 * random.normal(size=(200, 6))
    rows -= rows.mean(0)
    model = factor_analysis(rows, 4, priors="default")
    result = blr.fit(blr.vmp(), model, None, {"y": rows}, steps=200)
    sizes = np.sort(np.linalg.norm(result.q["loadings"].mean, axis=0))
    assert np.all(sizes[:2] < 0.05 * sizes[2])


@pytest.mark.parametrize(
    ("y", "size", "how", "message"),
    [
        (ROWS[0], 1, {}, r"\(N, D\)"),
        (ROWS, 0, {}, "whole number above 0"),
        (ROWS, 2, {"noise": "none"}, "noise="),
        (ROWS, 2, {"priors": "none"}, "priors="),
        (np.where(ROWS > 7, np.nan, ROWS), 2, {"shared": True}, "leave shared=True out"),
        (np.zeros((9, 2)), 1, {}, "do not vary"),
    ],
)
def test_bad_factor_analyses(y, size, how, message):
    with pytest.raises(ValueError, match=message):
        factor_analysis(y, size, **how)


def corpus():
    random = np.random.default_rng(0)
    topics = np.stack(
        [np.repeat([0.18, 0.01, 0.01], 5), np.repeat([0.01, 0.18, 0.01], 5), np.repeat([0.01, 0.01, 0.18], 5)]
    )
    mixed = random.dirichlet(np.full(3, 0.2), 60)
    return np.stack([random.multinomial(60, share @ topics) for share in mixed]), mixed, topics


@pytest.mark.extended
def test_topics_are_found_again():
    counts, mixed, topics = corpus()
    model, data = latent_dirichlet(15, 3), documents(scipy.sparse.csr_matrix(counts))
    rule = blr.svi(1.0, local_steps=100, tolerance=1e-6, together=16)
    result = blr.fit(rule, model, None, data, steps=60)
    actual = np.asarray(result.q["topics"].mean)
    order = [int(np.argmin(np.abs(actual - topic).sum(1))) for topic in topics]
    assert sorted(order) == [0, 1, 2]
    assert np.max(np.abs(actual[order] - topics)) < 0.05
    assert np.mean(np.abs(np.asarray(result.q["shares"].mean)[:, order] - mixed)) < 0.06
    again = shares(model, result.q, counts[:5], tolerance=1e-6)
    assert_allclose(again, result.q["shares"].mean[:5], atol=1e-3)
    swept = blr.fit(blr.vmp(), model, result.q, data, steps=5)
    assert np.all(np.diff(swept.trace["bound"]) > -1e-6)


def test_bad_topics():
    with pytest.raises(ValueError, match="0 times or more"):
        documents(np.array([[1.0, -1.0]]))
    with pytest.raises(ValueError, match=r"\(documents, vocabulary\)"):
        documents(np.zeros((0, 3)))
    with pytest.raises(ValueError, match="topics= is a whole number"):
        latent_dirichlet(5, 0)
    model = latent_dirichlet(4, 2)
    q = blr.fit(blr.svi(1.0), model, None, documents(np.eye(4)), steps=1).q
    with pytest.raises(ValueError, match="one vocabulary"):
        shares(model, q, np.eye(5))
