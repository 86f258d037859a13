"""What people who know scikit-learn expect of an estimator, beside scikit-learn's own estimators."""

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse
import sklearn
from sklearn import gaussian_process, mixture
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import kernels
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesrule.estimators import (
    PPCA,
    FactorAnalysis,
    GaussianMixture,
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    LatentDirichletAllocation,
    LogisticRegression,
    MLPClassifier,
    PoissonRegression,
    RidgeRegression,
)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 4)) * [1.0, 2.0, 1.0, 0.5]
X[RANDOM.uniform(size=X.shape) < 0.3] = 0.0
SCORE = X @ [1.0, -0.5, 0.0, 1.0] + 0.5 * RANDOM.normal(size=60)
LABELS, CLASSES, COUNTS = SCORE > 0, np.digitize(SCORE, [-0.7, 0.7]), RANDOM.poisson(np.exp(0.3 * SCORE))
NETWORK = {"hidden_layer_sizes": (3,), "max_iter": 2, "samples": 2, "prior_precision": 1.0, "random_state": 0}
LAPLACE = {"recipe": "laplace", "prior_precision": 1.0}
BLOBS = np.concatenate([RANDOM.normal(m, s, (50, 2)) for m, s in ((0.0, 1.0), (6.0, 2.0), ((9.0, -4.0), 0.5))])


@pytest.fixture(scope="module")
def fitted():
    """One linear model of each kind."""
    return {
        "ridge": RidgeRegression().fit(X, SCORE),
        "binary": LogisticRegression(**LAPLACE).fit(X, LABELS),
        "classes": LogisticRegression(**LAPLACE).fit(X, CLASSES),
        "counts": PoissonRegression(**LAPLACE).fit(X, COUNTS),
    }


@pytest.mark.extended
def test_coefficients_have_scikit_learns_shapes_and_are_writable(fitted):
    shapes = {name: (model.coef_.shape, np.shape(model.intercept_)) for name, model in fitted.items()}
    assert shapes == {"ridge": ((4,), ()), "binary": ((1, 4), (1,)), "classes": ((3, 4), (3,)), "counts": ((4,), ())}
    before = fitted["binary"].predict_proba(X)
    changed = pickle.loads(pickle.dumps(fitted["binary"]))
    changed.coef_[:], changed.intercept_[:] = 0.0, 0.0
    np.testing.assert_array_equal(changed.predict_proba(X), before)  # They are copies: the posterior predicts.


@pytest.mark.extended
def test_scores_at_the_coefficients_are_those_of_the_posterior_mean(fitted):
    model = fitted["classes"]
    np.testing.assert_allclose(model.coef_.sum(0), 0.0, atol=1e-12)
    narrow = pickle.loads(pickle.dumps(model))
    narrow.posterior_ = model.posterior_.with_scaled_precision(1e12)  # All of the mass is at the mean.
    scores = X @ model.coef_.T + model.intercept_
    softmax = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(narrow.predict_proba(X), softmax, rtol=1e-5)


def test_a_class_without_weight_has_a_row_of_its_own():
    model = LogisticRegression(**LAPLACE, class_weight={0: 1.0, 1: 0.0, 2: 1.0}).fit(X, CLASSES)
    assert model.coef_.shape == (3, 4)
    assert model.intercept_[1] == -np.inf
    assert np.all(np.isneginf(model.decision_function(X)[:, 1]))
    kept = CLASSES != 1
    two = LogisticRegression(**LAPLACE).fit(X[kept], CLASSES[kept])
    np.testing.assert_allclose(model.coef_[2] - model.coef_[0], two.coef_[0], rtol=1e-6)


def test_decision_function_and_log_probabilities_agree_with_the_probabilities(fitted):
    binary, classes = fitted["binary"], fitted["classes"]
    p = binary.predict_proba(X)
    np.testing.assert_allclose(binary.decision_function(X), np.log(p[:, 1] / p[:, 0]), rtol=1e-9)
    np.testing.assert_allclose(binary.predict_log_proba(X), np.log(p), rtol=1e-12)
    np.testing.assert_allclose(classes.decision_function(X), np.log(classes.predict_proba(X)), rtol=1e-12)
    # Far from the data one of the probabilities is lost in 1 − p, and the log odds are not.
    far = binary.decision_function(60.0 * X[:2] / np.linalg.norm(X[:2], axis=1, keepdims=True))
    assert np.all(np.isfinite(far))


@pytest.mark.sampled("model1")
@pytest.mark.parametrize("model", [MLPClassifier(**NETWORK), GaussianProcessClassifier(optimizer=None)])
def test_every_classifier_has_log_probabilities(model):
    model.fit(X, LABELS)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), model.predict_proba(X), rtol=1e-6)


@pytest.mark.parametrize("form", ["csr_array", "csc_matrix", "coo_array"])
def test_linear_models_take_sparse_rows(form, fitted):
    sparse = getattr(scipy.sparse, form)(X)
    for name, target in (("ridge", SCORE), ("binary", LABELS), ("counts", COUNTS)):
        model = clone(fitted[name]).fit(sparse, target)
        np.testing.assert_allclose(model.coef_, fitted[name].coef_, rtol=1e-12)
        predictions = [np.asarray(part.predict(rows), float) for part, rows in ((model, sparse), (fitted[name], X))]
        np.testing.assert_allclose(*predictions, rtol=1e-9)


@pytest.mark.extended
def test_single_precision_in_and_out(fitted):
    single = X.astype(np.float32)
    for name, target in (("ridge", SCORE), ("binary", LABELS), ("classes", CLASSES), ("counts", COUNTS)):
        model = clone(fitted[name]).fit(single, target)
        assert model.coef_.dtype == np.float32
        np.testing.assert_allclose(model.coef_, fitted[name].coef_, rtol=1e-4, atol=1e-5)
        outputs = model.predict_proba(single) if name in ("binary", "classes") else model.predict(single)
        assert outputs.dtype == np.float32
        assert model.posterior_.mean["w"].dtype == np.float64  # What is computed is not.
    assert all(part.dtype == np.float32 for part in fitted["ridge"].predict(single, return_std=True))
    found = GaussianMixture(1).fit(single)
    parts = (found.means_, found.covariances_, found.weights_, found.predict_proba(single), found.score_samples(single))
    assert {part.dtype for part in parts} == {np.dtype(np.float32)}
    assert PPCA(1).fit(single).transform(single).dtype == np.float32


def test_frames_of_single_precision_are_single(fitted):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.astype(np.float32), columns=list("abcd"))
    model = clone(fitted["ridge"]).fit(frame, SCORE)
    assert model.predict(frame).dtype == np.float32
    assert model.feature_names_in_.tolist() == list("abcd")
    assert clone(fitted["ridge"]).fit(frame.astype(float), SCORE).predict(frame.astype(float)).dtype == np.float64


@pytest.mark.sampled("tied", "spherical")
@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_mixtures_have_scikit_learns_covariances(kind):
    ours = GaussianMixture(3, covariance_type=kind, reg_covar=0.0, tol=1e-9, random_state=0).fit(BLOBS)
    theirs = mixture.GaussianMixture(3, covariance_type=kind, reg_covar=0.0, tol=1e-12, max_iter=1000, random_state=0)
    theirs.fit(BLOBS)
    order, other = np.argsort(ours.means_[:, 0]), np.argsort(theirs.means_[:, 0])
    np.testing.assert_allclose(ours.means_[order], theirs.means_[other], rtol=1e-3, atol=1e-3)
    pick = (..., ...) if kind == "tied" else (order, other)  # Tied components have one covariance.
    np.testing.assert_allclose(ours.covariances_[pick[0]], theirs.covariances_[pick[1]], rtol=2e-3, atol=1e-3)
    assert ours.precisions_cholesky_.shape == theirs.precisions_cholesky_.shape
    assert ours.score(BLOBS) == pytest.approx(theirs.score(BLOBS), rel=1e-6)
    assert ours.bic(BLOBS) == pytest.approx(theirs.bic(BLOBS), rel=1e-6)
    start = {"weights_init": theirs.weights_, "means_init": theirs.means_, "precisions_init": theirs.precisions_}
    again = clone(ours).set_params(**start).fit(BLOBS)
    assert again.n_iter_ <= 4
    np.testing.assert_allclose(again.means_, theirs.means_, rtol=1e-3, atol=1e-3)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["tied", "spherical"])
def test_posteriors_with_shared_precisions_integrate_to_one(kind):
    """The predictive density of a posterior, by a grid, and the bound below the likelihood's maximum."""
    found = GaussianMixture(2, covariance_type=kind, method="vmp", random_state=0).fit(BLOBS[:100])
    ticks = np.linspace(-25.0, 35.0, 301)
    grid = np.stack(np.meshgrid(ticks, ticks), axis=-1).reshape(-1, 2)
    assert np.exp(found.score_samples(grid)).sum() * (ticks[1] - ticks[0]) ** 2 == pytest.approx(1.0, abs=2e-3)
    likelihood = GaussianMixture(2, covariance_type=kind, random_state=0).fit(BLOBS[:100]).bound_
    assert found.bound_ < likelihood
    draws, labels = found.sample(2000)
    assert np.mean(found.predict(draws) == labels) > 0.9


STARTS = {
    "weights": ({"weights_init": [[0.5], [0.5]]}, "'weights' should have the shape of"),
    "range": ({"weights_init": [1.5, -0.5]}, "in the range"),
    "sum": ({"weights_init": [0.5, 0.4]}, "normalized"),
    "means": ({"means_init": np.zeros((3, 2))}, "'means' should have the shape of"),
    "shape": ({"precisions_init": np.ones((2, 2))}, "'full precision' should have the shape of"),
    "definite": ({"precisions_init": -np.ones((2, 2, 2))}, "positive-definite"),
    "kind": ({"covariance_type": "round"}, "covariance_type="),
}


@pytest.mark.parametrize("name", STARTS)
def test_wrong_starts_say_what_is_wrong(name):
    params, message = STARTS[name]
    with pytest.raises(ValueError, match=message):
        GaussianMixture(2, **params).fit(BLOBS)


KERNELS = {
    "constant and RBF": kernels.ConstantKernel(1.0) * kernels.RBF([1.0, 1.0]),
    "Matérn": 2.0 * kernels.Matern(1.0, nu=1.5),
    "rational quadratic": kernels.RationalQuadratic(1.0, 0.7, alpha_bounds="fixed"),
    "line and power": kernels.DotProduct(1.0) + kernels.RBF(1.0) ** 2,
}


@pytest.mark.sampled("Mat\\xe9rn", "rational quadratic", "line and power")
@pytest.mark.parametrize("name", KERNELS)
def test_scikit_learns_kernels_give_its_processes(name):
    x, new = X[:40, :2] + 0.01 * np.arange(40)[:, None], X[40:45, :2]
    y = np.sin(x[:, 0]) + 0.3 * x[:, 1] + 0.1 * RANDOM.normal(size=40)
    kernel = KERNELS[name] + kernels.WhiteKernel(0.1)
    ours = GaussianProcessRegressor(kernel, normalize_y=False).fit(x, y)
    theirs = gaussian_process.GaussianProcessRegressor(kernel, alpha=1e-12).fit(x, y)
    theta = theirs.kernel_.theta
    value, gradient = ours.log_marginal_likelihood(theta, eval_gradient=True)
    expected, slope = theirs.log_marginal_likelihood(theta, eval_gradient=True)
    assert value == pytest.approx(expected, abs=1e-7)
    np.testing.assert_allclose(gradient, slope, atol=1e-4)
    assert ours.log_evidence_ >= theirs.log_marginal_likelihood_value_ - 1e-5
    at_theirs = clone(ours).set_params(kernel=theirs.kernel_, optimizer=None).fit(x, y)
    for found, wanted in zip(
        at_theirs.predict(new, return_std=True), theirs.predict(new, return_std=True), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert at_theirs.kernel_ == theirs.kernel_
    assert ours.sample_y(new, 3).shape == (5, 3)


def test_scikit_learns_kernels_in_a_classifier():
    x, kernel = X[:, :2], 1.0 * kernels.RBF(1.0)
    ours = GaussianProcessClassifier(kernel, method="laplace").fit(x, LABELS)
    theirs = gaussian_process.GaussianProcessClassifier(kernel).fit(x, LABELS)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-3)
    assert ours.bound_ == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-5)
    theta = np.array([0.5, -0.2])
    value, gradient = ours.log_marginal_likelihood(theta, eval_gradient=True)
    expected, slope = theirs.log_marginal_likelihood(theta, eval_gradient=True)
    assert value == pytest.approx(expected, abs=1e-7)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5)
    latent = theirs.latent_mean_and_variance(x)
    for found, wanted in zip(ours.latent_mean_and_variance(x), latent, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


UNCONVERTED = {
    "a class of one's own": (type("Own", (kernels.RBF,), {})(), "no counterpart"),
    "a rough Matérn": (kernels.Matern(nu=0.7), "no closed form"),
    "noise as a factor": (kernels.RBF() * kernels.WhiteKernel(), "term of the kernel's sum"),
    "noise alone": (kernels.WhiteKernel(), "noise alone"),
    "a compound": (kernels.CompoundKernel([kernels.RBF()]), "CompoundKernel"),
}


@pytest.mark.parametrize("name", UNCONVERTED)
def test_kernels_without_a_counterpart_say_so(name):
    kernel, message = UNCONVERTED[name]
    with pytest.raises(ValueError, match=message):
        GaussianProcessRegressor(kernel).fit(X, SCORE)
    with pytest.raises(ValueError, match="given twice"):
        GaussianProcessRegressor(kernels.RBF() + kernels.WhiteKernel(), noise=0.1).fit(X, SCORE)


@pytest.mark.extended
def test_factor_analysis_has_its_likelihoods_and_covariances():
    for model in (FactorAnalysis(2).fit(X), PPCA(2).fit(X)):
        assert model.loglike_[-1] == pytest.approx(model.score_samples(X).sum(), rel=1e-10)
        assert np.all(np.diff(model.loglike_) > -1e-6)
        np.testing.assert_allclose(model.get_covariance() @ model.get_precision(), np.eye(4), atol=1e-10)


@pytest.mark.extended
def test_verbose_prints_the_progress(capsys):
    LogisticRegression(**LAPLACE, verbose=True).fit(X, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        PPCA(2, max_iter=5, verbose=1).fit(X)
    lines = capsys.readouterr().out.splitlines()
    assert any("LogisticRegression: Iteration" in line and "bound" in line for line in lines)
    assert any(line.startswith("PPCA: Iteration") for line in lines)


@pytest.mark.extended
def test_topics_return_counts_of_words_too():
    words = RANDOM.poisson(1.0, size=(30, 6)) + (np.arange(6) == 0)
    topics = LatentDirichletAllocation(2, max_iter=5, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        topics.fit(words)
    counts = topics.transform(words, normalize=False)
    np.testing.assert_allclose(counts.sum(1), words.sum(1) + 1.0, rtol=1e-6)  # α = ½ for each of two topics
    np.testing.assert_allclose(counts / counts.sum(1, keepdims=True), topics.transform(words), rtol=1e-9)


def test_outputs_as_frames_and_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    pipeline = make_pipeline(StandardScaler(), PPCA(2)).set_output(transform="pandas").fit(frame)
    assert pipeline.transform(frame).columns.tolist() == ["ppca0", "ppca1"]
    assert pipeline[-1].get_feature_names_out().tolist() == ["ppca0", "ppca1"]


@pytest.mark.extended
def test_metadata_is_routed():
    weights = np.where(np.arange(60) < 30, 0.0, 1.0)
    with sklearn.config_context(enable_metadata_routing=True):
        model = RidgeRegression(noise=1.0).set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        pipeline.fit(X, SCORE, sample_weight=weights)
        search = GridSearchCV(model, {"prior_precision": [0.1, 1.0]}, cv=2).fit(X, SCORE, sample_weight=weights + 0.1)
    expected = RidgeRegression(noise=1.0).fit(StandardScaler().fit_transform(X), SCORE, sample_weight=weights)
    np.testing.assert_allclose(pipeline[-1].coef_, expected.coef_, rtol=1e-9)
    again = clone(search.best_estimator_).fit(X, SCORE, sample_weight=weights + 0.1)
    np.testing.assert_allclose(search.best_estimator_.coef_, again.coef_, rtol=1e-12)
