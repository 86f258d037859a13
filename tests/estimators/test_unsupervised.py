"""Mixtures, factor analysis and topics: scikit-learn's checks, its numbers, and missing values."""

import pickle

import jax
import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose, assert_array_equal
from sklearn import datasets
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as TheirFactorAnalysis
from sklearn.decomposition import LatentDirichletAllocation as TheirAllocation
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture
from sklearn.mixture import GaussianMixture as TheirMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import bayesrule as blr
from bayesrule.estimators import PPCA, FactorAnalysis, GaussianMixture, LatentDirichletAllocation
from bayesrule.fitting.loop import run_chunk
from bayesrule.numerics.programs import release_programs

# Optional: the dev extra installs it.
pandas = pytest.importorskip("pandas")

ROWS = load_iris().data
# A program is compiled for a maximal number of steps: use that of other tests, and a loose tolerance for few steps.
CHECKED = [
    GaussianMixture(tol=0.1),
    FactorAnalysis(1, tol=0.1),
    LatentDirichletAllocation(2, max_iter=20, tol=1.0, max_doc_update_iter=10),
    PPCA(1, tol=0.1),
]


@pytest.mark.extended
@pytest.mark.parametrize("count", [3, 5])
def test_several_starts_of_a_mixture_are_as_good_as_scikit_learn_s(count):
    """82 numbers in clusters of very different sizes, where k-means alone ends in poor optima."""
    rng = np.random.default_rng(0)
    sizes, places, widths = [7, 30, 35, 5, 3, 2], [9.7, 19.8, 22.5, 26.0, 33.0, 16.1], [0.4, 1.0, 1.0, 0.6, 0.9, 0.1]
    rows = np.concatenate([rng.normal(*of, n) for n, *of in zip(sizes, places, widths, strict=True)])[:, None]
    settings = {"n_init": 10, "random_state": 0, "max_iter": 2000}
    ours = GaussianMixture(count, **settings).fit(rows)
    theirs = TheirMixture(count, tol=1e-7, **settings).fit(rows)
    assert ours.score(rows) * 82 > theirs.score(rows) * 82 - 0.1
    one = GaussianMixture(count, max_iter=2000, random_state=0).fit(rows)
    assert ours.score(rows) >= one.score(rows) - 1e-6


@pytest.mark.extended
@parametrize_with_checks(CHECKED)
def test_scikit_learn_checks_of_few_components(estimator, check):
    """Default settings are in test_scikit_learn_checks.py."""
    check(estimator)


class Watch:
    """Stands in for `fit`, as the command line does, and remembers the model."""

    def fit(self, rule, objective, start, data=None, **options):
        self.model = objective
        return blr.fit(rule, objective, start, data, **options)


def same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one.posterior_), jax.tree.leaves(other.posterior_), strict=True):
        assert_allclose(a, b, **tolerance)
    assert_allclose(one.bound_, other.bound_, rtol=1e-10)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", ["full", "diag"])
def test_em_takes_scikit_learn_s_steps(kind):
    ours, watch = GaussianMixture(3, covariance_type=kind, reg_covar=0, max_iter=5, tol=0, random_state=0), Watch()
    ours._watcher = watch
    ours.fit(ROWS)
    weights, components = (blr.Peak(watch.model.blocks[name]).mean for name in ("weights", "components"))
    start = {"weights_init": np.asarray(weights), "means_init": np.asarray(components["mean"]) + ROWS.mean(0)}
    start["precisions_init"] = np.asarray(components["precision"])
    theirs = TheirMixture(3, covariance_type=kind, reg_covar=0, max_iter=5, tol=0, **start).fit(ROWS)
    for name in ("weights_", "means_", "covariances_", "precisions_"):
        assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-10)
    assert_allclose(ours.score_samples(ROWS), theirs.score_samples(ROWS), rtol=1e-9)
    assert_allclose(ours.predict_proba(ROWS), theirs.predict_proba(ROWS), atol=1e-10)
    assert_allclose(ours.bound_, theirs.score(ROWS) * 150, rtol=1e-10)
    assert_allclose([ours.bic(ROWS), ours.aic(ROWS)], [theirs.bic(ROWS), theirs.aic(ROWS)], rtol=1e-10)
    assert not hasattr(pickle.loads(pickle.dumps(ours)), "watch")


@pytest.mark.extended
def test_a_posterior_of_mixtures_is_scikit_learn_s_and_mini_batches_come_close():
    random = np.random.default_rng(0).permutation(150)
    train, test = ROWS[random[:120]], ROWS[random[120:]]
    ours = GaussianMixture(2, method="vmp", tol=1e-8, random_state=0).fit(train)
    kind = "dirichlet_distribution"
    theirs = BayesianGaussianMixture(
        n_components=2, weight_concentration_prior_type=kind, reg_covar=0, tol=1e-7, max_iter=400, random_state=0
    ).fit(train)
    order = lambda actual: np.argsort(actual.means_[:, 0])
    for name in ("weights_", "means_", "covariances_"):
        mine, other = (getattr(actual, name)[order(actual)] for actual in (ours, theirs))
        assert_allclose(mine, other, rtol=1e-3, atol=1e-4)
    # Our predictive density is exact, and has heavier tails than scikit-learn's, which uses E log p for log E p.
    assert theirs.score(test) < ours.score(test) < theirs.score(test) + 0.2
    rows, labels = ours.sample(20_000)
    assert_allclose(rows[labels == 0].mean(0), ours.means_[0], atol=0.03)
    assert_allclose(np.bincount(labels) / 20_000, ours.weights_, atol=0.02)
    batches = GaussianMixture(2, method="svi", batch_size=40, max_iter=30, random_state=0).fit(train)
    assert batches.n_iter_ == 90
    assert ours.bound_ - 3 < batches.bound_ <= ours.bound_ + 1e-6
    assert_allclose(batches.score(test), ours.score(test), atol=0.02)


HOLES = np.where(np.random.default_rng(0).uniform(size=(30, 3)) < 0.2, np.nan, ROWS[:60:2, :3])
COUNTS = np.random.default_rng(0).poisson(2.0, (30, 3))
SMALL = {
    "mixture": (CHECKED[0], ROWS[:30, :3], ROWS[:31, :3], "mixture"),
    "factors": (CHECKED[1], HOLES, HOLES[:29], "factor_analysis"),
    "topics": (CHECKED[2], COUNTS, COUNTS[:29], "topics"),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", SMALL)
def test_padding_changes_nothing_and_saves_compilation(name, monkeypatch):
    estimator, rows, others, module = SMALL[name]
    estimator = clone(estimator).set_params(random_state=0)
    release_programs()  # Otherwise old programs may be dropped while they are counted.
    first = clone(estimator).fit(rows)
    programs = run_chunk.count()
    clone(estimator).fit(others)
    assert run_chunk.count() == programs
    monkeypatch.setattr(f"bayesrule.estimators.{module}.padded_rows", lambda rows: rows)
    same(first, clone(estimator).fit(rows), rtol=1e-8, atol=1e-11)


@pytest.mark.extended
def test_maximum_likelihood_is_scikit_learn_s():
    ours, theirs = PPCA(1, tol=1e-13).fit(ROWS), PCA(1).fit(ROWS)
    assert_allclose(ours.noise_variance_ * 150 / 149, theirs.noise_variance_, rtol=1e-6)
    assert_allclose(ours.get_covariance() * 150 / 149, theirs.get_covariance(), rtol=1e-4, atol=1e-5)
    random = np.random.default_rng(4)
    rows = random.normal(size=(150, 1)) * [1.0, 2.0, -3.0, 1.5] + random.normal(size=(150, 4)) * [1.0, 2.0, 2.0, 3.0]
    ours, theirs = FactorAnalysis(1, tol=1e-10).fit(rows), TheirFactorAnalysis(1, tol=1e-10, max_iter=9999)
    theirs.set_params(svd_method="lapack").fit(rows)
    assert_allclose(ours.score(rows), theirs.score(rows), atol=1e-7)
    assert_allclose(ours.score_samples(rows), theirs.score_samples(rows), atol=1e-3)
    assert_allclose(np.abs(ours.transform(rows)), np.abs(theirs.transform(rows)), atol=1e-3)
    assert_allclose(ours.inverse_transform(ours.transform(rows)).mean(0), rows.mean(0))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("name", "sizes"), [("iris", (2,)), ("wine", (1,)), ("diabetes", (3,)), ("noise", (5,))])
def test_the_likelihood_is_not_below_scikit_learn_s(name, sizes):
    """At scikit-learn's own convergence: iris and diabetes have a noise at 0, where EM creeps, noise several maxima."""
    noise = np.random.default_rng(0).normal(size=(120, 10))
    rows = StandardScaler().fit_transform(noise if name == "noise" else getattr(datasets, f"load_{name}")().data)
    for size in sizes:
        theirs = TheirFactorAnalysis(size, tol=1e-8, max_iter=9999, svd_method="lapack").fit(rows)
        # Up to max_iter: where a noise is at 0, no method converges to it.
        ours = FactorAnalysis(size, max_iter=50).fit(rows)
        assert ours.score(rows) > theirs.score(rows) - 5e-4


def conditional(row, mean, covariance):
    """E[y | the observed entries], by the formula for Gaussians."""
    there = ~np.isnan(row)
    cross, own = covariance[np.ix_(~there, there)], covariance[np.ix_(there, there)]
    filled = row.copy()
    filled[~there] = mean[~there] + cross @ np.linalg.solve(own, row[there] - mean[there])
    return filled


def test_missing_values():
    random = np.random.default_rng(0)
    whole = random.normal(size=(120, 1)) * [3.0, 3.0, -2.0] + random.normal(size=(120, 3)) * [1.0, 1.5, 1.0] + 50
    holes = np.where(random.uniform(size=whole.shape) < 0.15, np.nan, whole)
    holes[3] = np.nan
    model = FactorAnalysis(1).fit(holes)
    expected = [conditional(row, model.mean_, model.get_covariance()) for row in holes]
    assert_allclose(model.fill(holes), expected, rtol=1e-10)
    assert_array_equal(model.fill(whole), whole)
    gone = np.isnan(holes)
    assert np.std((model.fill(holes) - whole)[gone]) < 0.7 * np.std((whole - model.mean_)[gone])
    assert_allclose(model.transform(holes)[3], 0, atol=1e-12)
    # If whether a value is missing depends on the others, the mean of the observed values is biased; the fitted is not.
    censored = np.where((np.arange(3) == 0) & (whole[:, 1:2] > 50), np.nan, whole)
    actual = FactorAnalysis(1).fit(censored).mean_[0]
    assert abs(actual - whole[:, 0].mean()) < 0.6 < abs(np.nanmean(censored[:, 0]) - whole[:, 0].mean())


@pytest.mark.extended
def test_unneeded_factors_shrink_and_uncertain_loadings_shrink_scores():
    random = np.random.default_rng(1)
    rows = random.normal(size=(200, 1)) @ random.normal(size=(1, 4)) + 0.3 * random.normal(size=(200, 4))
    model = FactorAnalysis(2, method="vmp").fit(rows)
    sizes = np.sort(np.linalg.norm(model.components_, axis=1))
    assert sizes[0] < 0.02 * sizes[1]
    assert model.bound_ / 200 < model.score(rows)
    assert model.transform(rows).shape == (200, 2)


def corpus(documents):
    random = np.random.default_rng(0)
    topics = random.dirichlet(np.full(20, 0.1), 3)
    return np.stack([random.multinomial(50, share @ topics) for share in random.dirichlet(np.full(3, 0.2), documents)])


@pytest.mark.extended
def test_topics_are_as_good_as_scikit_learn_s():
    counts = corpus(160)
    train, test = counts[:100], counts[100:]
    how = {"n_components": 3, "random_state": 0}
    theirs = TheirAllocation(max_iter=60, mean_change_tol=1e-5, **how).fit(train)
    ours = LatentDirichletAllocation(mean_change_tol=1e-5, max_iter=200, **how).fit(scipy.sparse.csr_array(train))
    assert ours.perplexity(train) < 1.005 * theirs.perplexity(train)
    assert ours.perplexity(test) < 1.005 * theirs.perplexity(test)
    assert_allclose(ours.bound_, ours.score(train), rtol=1e-4)
    # At the same topics, our bound and scikit-learn's are the same.
    theirs.components_ = ours.components_
    theirs.exp_dirichlet_component_ = np.exp(np.asarray(blr.Dirichlet(ours.components_).expectation()))
    assert_allclose(ours.score(train), theirs.score(train), rtol=1e-5)
    assert_allclose(ours.transform(test), theirs.transform(test), atol=1e-3)


def test_topics_from_a_stream():
    stream = clone(CHECKED[2]).set_params(random_state=0)
    pieces = clone(stream)
    for part in np.array_split(COUNTS, 3):
        pieces.partial_fit(part)
    assert_allclose(pieces.components_.sum(), COUNTS.sum() + 2 * 3 * 0.5)  # every word is counted once
    assert_allclose(pieces.transform(COUNTS).sum(1), 1)


@pytest.mark.extended
def test_topics_from_mini_batches():
    stream = clone(CHECKED[2]).set_params(random_state=0)
    batches = clone(stream).set_params(method="svi", batch_size=10).fit(COUNTS)
    assert batches.n_iter_ == 60
    assert batches.bound_ > clone(stream).fit(COUNTS).bound_ - 5


@pytest.mark.extended
def test_pickle_pipelines_and_dataframes():
    frame = pandas.DataFrame(ROWS[::2, :3], columns=["a", "b", "c"])
    model = GaussianMixture(tol=0.1, random_state=np.random.RandomState(0)).fit(frame)
    assert model.feature_names_in_.tolist() == ["a", "b", "c"]
    assert_allclose(pickle.loads(pickle.dumps(model)).score(frame), model.score(frame))
    searched = GridSearchCV(make_pipeline(StandardScaler(), PPCA(1)), {"ppca__tol": [0.1, 1e-6]}, cv=2)
    assert searched.fit(frame).best_score_ < 0
    shares = clone(CHECKED[2]).set_output(transform="pandas").fit_transform(pandas.DataFrame(COUNTS))
    assert shares.columns[1] == "latentdirichletallocation1"


def plain(value):
    """Whether a saved run can hold the value."""
    if isinstance(value, dict):
        return all(map(plain, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype != object
    if isinstance(value, blr.Product):
        return all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(value))
    return isinstance(value, bool | int | float | str)


@pytest.mark.parametrize("name", SMALL)
def test_what_is_fitted_is_plain(name, tmp_path):
    model = clone(SMALL[name][0]).fit(SMALL[name][1])
    fitted = {key: value for key, value in vars(model).items() if key.endswith("_")}
    assert [key for key, value in fitted.items() if not plain(value)] == []
    blr.save(tmp_path / "posterior.npz", model.posterior_)
    again = blr.load(tmp_path / "posterior.npz")
    assert jax.tree.structure(again) == jax.tree.structure(model.posterior_)


BAD = {
    "method": (GaussianMixture(method="ems"), ROWS, "knows the methods 'em', 'vmp'"),
    "components": (GaussianMixture(0), ROWS, "n_components= is a whole number above 0"),
    "too many": (GaussianMixture(9), ROWS[:5], "n_samples >= n_components"),
    "covariance": (GaussianMixture(covariance_type="round"), ROWS, "covariance_type= is 'full', 'tied'"),
    "iterations": (GaussianMixture(max_iter=0), ROWS, "max_iter= is a whole number"),
    "tolerance": (GaussianMixture(tol=-1), ROWS, "tol= is 0 or more"),
    "floor": (GaussianMixture(reg_covar=-1), ROWS, "reg_covar= is a variance"),
    "constant": (GaussianMixture(), np.ones((9, 2)), "do not vary"),
    "infinite": (PPCA(1), np.where(ROWS > 7, np.inf, ROWS), "infinity"),
    "empty column": (PPCA(1), np.where(np.arange(4) == 1, np.nan, ROWS), r"The columns \[1\] have no values"),
    "factors": (FactorAnalysis(0), ROWS, "n_components= is a whole number"),
    "no counts": (LatentDirichletAllocation(2), -ROWS, "Negative values"),
    "prior": (LatentDirichletAllocation(2, doc_topic_prior=0), ROWS, "doc_topic_prior= is a number above 0"),
    "batches": (LatentDirichletAllocation(2, batch_size=0), ROWS, "batch_size= is a whole number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    estimator, rows, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        clone(estimator).fit(rows)


@pytest.mark.extended
def test_a_fit_that_did_not_converge_warns():
    with pytest.warns(ConvergenceWarning, match="did not converge in 5 iterations"):
        GaussianMixture(3, max_iter=5, tol=0).fit(ROWS)
