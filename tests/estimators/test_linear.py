"""Linear models: scikit-learn's conventions, and its answers where it has them."""

import pickle

import jax
import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, PoissonRegressor
from sklearn.linear_model import LogisticRegression as MaximumPosterior
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from statsmodels.api import OLS, add_constant

import bayesrule as blr
from bayesrule import metrics
from bayesrule.estimators import LogisticRegression, PoissonRegression, RidgeRegression
from bayesrule.models import ridge
from bayesrule.models.regression import weak_prior


@pytest.mark.extended
@parametrize_with_checks([PoissonRegression(recipe="laplace")])
def test_scikit_learn_checks_with_laplace_s_method(estimator, check):
    """Default settings, and logistic regression with Laplace's method, are in test_scikit_learn_checks.py."""
    check(estimator)


def standardized(load):
    X, y = load(return_X_y=True)
    return StandardScaler().fit_transform(X), y


@pytest.mark.extended
@pytest.mark.parametrize("estimator", [LogisticRegression(max_iter=1), PoissonRegression(max_iter=1)])
def test_a_fit_that_its_iterations_end_says_so(estimator):
    X, y = standardized(load_iris)
    with pytest.warns(ConvergenceWarning, match="did not converge in 1 iterations: "):
        estimator.fit(X, y)


@pytest.mark.sampled("laplace")
@pytest.mark.parametrize("recipe", ["laplace", "auto"])
def test_a_class_without_weight_is_as_good_as_absent(recipe):
    """Under a flat prior its intercept has no posterior, which would be averaged over all the same."""
    X, y = standardized(load_iris)
    weighted = LogisticRegression(recipe=recipe, class_weight={0: 0, 1: 2, 2: 1}).fit(X, y)
    present = y > 0
    alone = LogisticRegression(recipe=recipe, class_weight={1: 2, 2: 1}).fit(X[present], y[present])
    probabilities = weighted.predict_proba(X)
    np.testing.assert_array_equal(probabilities[:, 0], 0.0)
    np.testing.assert_allclose(probabilities[:, 1:], alone.predict_proba(X), atol=1e-6)
    assert set(weighted.predict(X)) == {1, 2}
    assert set(np.unique(weighted.sample_predictive(X, 3, random_state=0))) == {1, 2}
    assert np.all(np.isneginf(weighted.predict_log_proba(X)[:, 0]))
    with pytest.raises(ValueError, match=r"Only one class has rows of a weight above 0, \[2\]"):
        LogisticRegression(class_weight={0: 0, 1: 0, 2: 1}).fit(X, y)
    with pytest.raises(ValueError, match="had no weight in fit"):
        LogisticRegression(recipe=recipe, class_weight={0: 0, 1: 2, 2: 1}).fit(X, y).set_params(
            class_weight=None
        ).partial_fit(X, y)


@pytest.mark.extended
def test_ridge_is_the_evidence_of_the_marginal_gaussian():
    X, y = standardized(load_diabetes)
    X, y = X[:60, :4], y[:60] - y[:60].mean()
    model = RidgeRegression(fit_intercept=False).fit(X, y)
    np.testing.assert_allclose(model.x_scale_, np.sqrt(np.mean(X**2, axis=0)))
    scaled = X / model.x_scale_

    def evidence(strength, noise):
        return multivariate_normal(np.zeros(60), scaled @ scaled.T / strength + noise * np.eye(60)).logpdf(y)

    best = evidence(model.prior_precision_, model.noise_)
    assert model.log_evidence_ == pytest.approx(best, rel=1e-10)
    for factor in (0.9, 1.1):  # It is a maximum.
        assert evidence(factor * model.prior_precision_, model.noise_) < best
        assert evidence(model.prior_precision_, factor * model.noise_) < best
    system = X.T @ X / model.noise_ + np.diag(model.prior_precision_ * model.x_scale_**2)
    np.testing.assert_allclose(model.coef_, np.linalg.solve(system, X.T @ y / model.noise_), rtol=1e-9)
    np.testing.assert_allclose(model.posterior_.precision, system, rtol=1e-9, atol=1e-12)


STRANGE = 10.0 ** np.array([5, -3, 0, 2, -6]), np.array([3e5, 0.0, 1e4, -20.0, 1e-6])  # scales and origins of columns


@pytest.mark.sampled("counts")
@pytest.mark.parametrize(
    "estimator",
    [
        RidgeRegression(),
        LogisticRegression(),
        LogisticRegression(recipe="laplace"),
        LogisticRegression(recipe="mean_field"),
        PoissonRegression(),
    ],
    ids=["ridge", "logistic", "laplace", "mean field", "counts"],
)
def test_units_and_origins_of_columns_do_not_matter(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 5))
    f = X @ [1.0, -0.5, 0.3, 0.0, 0.8]
    targets = {
        "ridge": f + rng.normal(size=120),
        "logistic": f > rng.logistic(size=120),
        "counts": rng.poisson(np.exp(f / 2)),
    }
    kind = {RidgeRegression: "ridge", LogisticRegression: "logistic", PoissonRegression: "counts"}[type(estimator)]
    strange = STRANGE[0] * X + STRANGE[1]
    one, other = clone(estimator).fit(X, targets[kind]), clone(estimator).fit(strange, targets[kind])
    predict = lambda model, x: model.predict_proba(x) if kind == "logistic" else model.predict(x, return_std=True)
    for ours, same in zip(predict(one, X), predict(other, strange), strict=True):
        np.testing.assert_allclose(same, ours, rtol=1e-5)
    np.testing.assert_allclose(other.coef_ * STRANGE[0], one.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(other.prior_precision_, one.prior_precision_, rtol=1e-5)
    mean = other.intercept_ + strange @ other.coef_.T
    np.testing.assert_allclose(mean, one.intercept_ + X @ one.coef_.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", [1e-3, 1e-6, 1.0, 1e3])
def test_ridge_finds_any_noise(noise):
    """As scikit-learn's, whose evidence has no intercept here; from a millionth of the signal to all of y."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5)) * [1.0, 1e3, 1e-3, 1.0, 5.0]
    X = X - X.mean(axis=0)
    y = 200 * (X / X.std(axis=0)) @ [1.0, -0.5, 0.2, 0.0, 0.7] + noise * rng.normal(size=200)
    ours = RidgeRegression(fit_intercept=False).fit(X, y)
    with_zeros = RidgeRegression(fit_intercept=False).fit(np.insert(X, 2, 0.0, axis=1), y)
    assert with_zeros.noise_ == pytest.approx(ours.noise_, rel=1e-6)
    flat = dict.fromkeys(["alpha_1", "alpha_2", "lambda_1", "lambda_2"], 0.0)  # no priors on the hyper-parameters
    theirs = make_pipeline(StandardScaler(), BayesianRidge(tol=1e-12, max_iter=10_000, fit_intercept=False, **flat))
    theirs.fit(X, y)
    assert ours.noise_ == pytest.approx(1 / theirs[-1].alpha_, rel=1e-4)
    assert ours.prior_precision_ == pytest.approx(theirs[-1].lambda_, rel=1e-3)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-4, atol=1e-4 * noise)
    assert np.sqrt(ours.noise_) == pytest.approx(noise, rel=0.2)


@pytest.mark.extended
def test_ridge_with_more_columns_than_rows():
    """Columns that explain y without noise: the mean is the interpolation of least norm, and widths are finite."""
    rng = np.random.default_rng(0)
    X, new = rng.normal(size=(15, 40)), rng.normal(size=(5, 40))
    y = X @ rng.normal(size=40)
    model = RidgeRegression(fit_intercept=False).fit(np.repeat(X, 2, axis=0), np.repeat(y, 2))
    scaled, (mean, std) = X / model.x_scale_, model.predict(new, return_std=True)
    np.testing.assert_allclose(mean, new / model.x_scale_ @ np.linalg.lstsq(scaled, y, rcond=None)[0], atol=1e-6)
    prior = 1 / model.prior_precision_
    kept = new / model.x_scale_ @ (np.eye(40) - np.linalg.pinv(scaled) @ scaled)  # what no row says anything about
    np.testing.assert_allclose(std**2, prior * np.sum(kept**2, axis=1), rtol=1e-2)
    assert np.isfinite(model.log_evidence_)


@pytest.mark.extended
def test_ridge_agrees_with_scikit_learns():
    X, y = standardized(load_diabetes)
    ours, theirs = RidgeRegression().fit(X, y), BayesianRidge(tol=1e-10, max_iter=2000).fit(X, y)
    # It centres y first, so that its noise has one degree of freedom less to explain: 1/N of it.
    assert ours.noise_ == pytest.approx(1 / theirs.alpha_, rel=2 / len(y))
    assert ours.prior_precision_ == pytest.approx(theirs.lambda_, rel=1e-2)
    mean, std = ours.predict(X, return_std=True)
    theirs_mean, theirs_std = theirs.predict(X, return_std=True)
    np.testing.assert_allclose(mean, theirs_mean, rtol=1e-3)
    np.testing.assert_allclose(std, theirs_std, rtol=5e-3)


@pytest.mark.extended
def test_the_strength_of_several_classes_maximizes_their_own_bound():
    """Laplace's method would choose a strength twice as large here, and lose 1.6 nats of the bound."""
    X, y = standardized(load_iris)
    chosen = LogisticRegression().fit(X, y)

    def value(factor):
        alpha = factor * chosen.prior_precision_
        return LogisticRegression(prior_precision=alpha).fit(X, y).bound_ + float(weak_prior({"w": alpha, "unit": 1.0}))

    at_chosen = value(1.0)
    assert at_chosen > value(2.0) + 0.1
    assert at_chosen > value(0.5) - 0.05


@pytest.mark.extended
def test_ridge_has_the_intervals_of_least_squares_where_rows_determine_the_weights():
    rng = np.random.default_rng(3)
    X, new = rng.normal(size=(12, 4)), rng.normal(size=(6, 4))
    y = X @ [300.0, -200.0, 100.0, 50.0] + 7 + rng.normal(size=12)
    model = RidgeRegression().fit(X, y)
    assert model.degrees_of_freedom_ == pytest.approx(7, abs=0.01)  # 12 rows, 4 weights and an intercept
    mean, std = model.predict(new, return_std=True)
    ours = metrics.interval(mean, std, degrees_of_freedom=model.degrees_of_freedom_)
    theirs = OLS(y, add_constant(X)).fit().get_prediction(add_constant(new)).conf_int(obs=True, alpha=0.1)
    np.testing.assert_allclose(np.stack(ours, axis=1), theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.extended
def test_degrees_of_freedom_are_the_curvature_of_the_evidence():
    rng = np.random.default_rng(4)
    X = rng.normal(size=(30, 6)) * [3.0, 1.0, 1.0, 0.3, 0.1, 0.1]
    y = X @ rng.normal(size=6) + rng.normal(size=30)
    rows = ridge.decompose(X, y).spectrum(30)
    log_alpha, log_beta = 0.3, -0.2
    unexplained = lambda t: np.sum(1 / (1 + np.exp(t) * rows.squares[:6])) + 24
    log_variance = lambda a, b: -b - np.log(unexplained(b - a))
    with jax.enable_x64(True):
        gradient = lambda a, b: np.array(
            [float(g) for g in map(ridge.log_evidence({"w": a, "noise": b}, rows)[1].get, ("w", "noise"))]
        )
        step = 1e-5
        hessian = np.stack([
            (gradient(log_alpha + step, log_beta) - gradient(log_alpha - step, log_beta)) / (2 * step),
            (gradient(log_alpha, log_beta + step) - gradient(log_alpha, log_beta - step)) / (2 * step),
        ])  # fmt: skip
    slope = np.array([
        (log_variance(log_alpha + step, log_beta) - log_variance(log_alpha - step, log_beta)) / (2 * step),
        (log_variance(log_alpha, log_beta + step) - log_variance(log_alpha, log_beta - step)) / (2 * step),
    ])  # fmt: skip
    covariance = np.linalg.inv(-hessian)
    hyper = {"w": float(np.exp(log_alpha)), "noise": float(np.exp(log_beta))}
    assert ridge.degrees_of_freedom(hyper, rows) == pytest.approx(2 / (slope @ covariance @ slope), rel=1e-5)
    only_noise = -2 * hessian[1, 1] / slope[1] ** 2
    assert ridge.degrees_of_freedom(hyper, rows, ("w",)) == pytest.approx(only_noise, rel=1e-5)
    assert RidgeRegression(prior_precision=1.0, noise=1.0).fit(X, y).degrees_of_freedom_ == np.inf


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (5, 40), (3, 3)])
def test_degrees_of_freedom_of_few_rows_are_finite(rows, columns):
    rng = np.random.default_rng(5)
    X = rng.normal(size=(rows, columns))
    model = RidgeRegression().fit(X, X @ rng.normal(size=columns))
    assert 1 <= model.degrees_of_freedom_ <= 2 * rows


def test_ridge_by_any_name():
    X, y = standardized(load_diabetes)
    X = X[:, [0, 1, 9]]
    exact = [RidgeRegression(recipe=name).fit(X, y).coef_ for name in ("auto", "conjugate", "newton")]
    np.testing.assert_array_equal(exact[0], exact[1])
    np.testing.assert_array_equal(exact[0], exact[2])
    stepped = RidgeRegression(recipe=blr.gradient_descent(1e-3), max_iter=2000).fit(X, y)
    np.testing.assert_allclose(stepped.coef_, exact[0], rtol=1e-6)
    with pytest.raises(ValueError, match="knows the recipes"):
        RidgeRegression(recipe="conjugated").fit(X, y)


@pytest.mark.extended
def test_ridge_does_not_mind_large_means():
    X, y = standardized(load_diabetes)
    plain, moved = RidgeRegression().fit(X, y), RidgeRegression().fit(X + 1e8, y + 1e9)
    np.testing.assert_allclose(moved.coef_, plain.coef_, rtol=1e-4)
    assert moved.noise_ == pytest.approx(plain.noise_, rel=1e-6)
    assert moved.log_evidence_ == pytest.approx(plain.log_evidence_, rel=1e-6)
    mean, std = plain.predict(X, return_std=True)
    theirs, theirs_std = moved.predict(X + 1e8, return_std=True)
    np.testing.assert_allclose(theirs - 1e9, mean, rtol=1e-5)
    np.testing.assert_allclose(theirs_std, std, rtol=1e-6)


def test_ridge_streams():
    X, y = load_diabetes(return_X_y=True)
    full, parts = RidgeRegression().fit(X, y), RidgeRegression()
    for rows in np.array_split(np.arange(len(y)), 4):
        parts.partial_fit(X[rows], y[rows])
    np.testing.assert_allclose(parts.coef_, full.coef_, rtol=1e-5)
    assert parts.log_evidence_ == pytest.approx(full.log_evidence_, rel=1e-10)


def test_ridge_by_steps_does_not_stream():
    """Steps need all rows: a second call says so, instead of forgetting those of the first, and changes nothing."""
    X, y = standardized(load_diabetes)
    model = RidgeRegression(recipe=blr.gradient_descent(1e-3), max_iter=5).partial_fit(X[:200], y[:200])
    before = model.coef_, model.n_samples_seen_
    with pytest.raises(ValueError, match=r'forget the earlier ones: use recipe="auto"'):
        model.partial_fit(X[200:], y[200:])
    np.testing.assert_array_equal(model.coef_, before[0])
    assert model.n_samples_seen_ == before[1]
    assert model.fit(X, y).n_samples_seen_ == len(y)


@pytest.mark.parametrize("given", [{"prior_precision": 2.0}, {"noise": 0.5}, {"prior_precision": 2.0, "noise": 0.5}])
def test_ridge_uses_given_hyperparameters(given):
    X, y = standardized(load_diabetes)
    model = RidgeRegression(**given).fit(X, y / y.std())
    assert {name: pytest.approx(getattr(model, f"{name}_"), rel=1e-9) for name in given} == given


@pytest.mark.extended
def test_logistic_is_the_posterior_mode_of_scikit_learns():
    for load in (load_breast_cancer, load_iris):
        X, y = standardized(load)
        theirs = MaximumPosterior(C=1 / 2.0, tol=1e-10, max_iter=10_000).fit(X, y)
        ours = LogisticRegression(recipe="laplace", prior_precision=2.0).fit(X, y)
        assert ours.coef_.shape == theirs.coef_.shape
        np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-4, atol=1e-4)
        # The scores of three classes sum to zero, ours and (up to its tolerance) theirs.
        center = 0.0 if len(theirs.intercept_) == 1 else theirs.intercept_.mean()
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_ - center, atol=1e-4)


@pytest.mark.extended
def test_poisson_is_the_posterior_mode_of_scikit_learns():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3))
    y = rng.poisson(np.exp(0.5 + X @ [0.5, -0.3, 0.0]))
    theirs = PoissonRegressor(alpha=2.0 / len(y), tol=1e-10, max_iter=1000).fit(X, y)
    ours = PoissonRegression(recipe="laplace", prior_precision=2.0).fit(X, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5)
    assert float(ours.intercept_) == pytest.approx(theirs.intercept_, rel=1e-5)
    mean, std = ours.predict(X, return_std=True)
    assert np.all(std > np.sqrt(mean))  # More than the standard deviation of the counts at a known rate.
    draws = ours.sample_predictive(X[:3], 20_000, random_state=1)
    np.testing.assert_allclose(draws.mean(0), mean[:3], rtol=0.03)
    np.testing.assert_allclose(draws.std(0), std[:3], rtol=0.03)
    # A weight is a number of repetitions: their penalty is per row of the repeated ones.
    weights = np.arange(len(y)) % 4
    theirs = PoissonRegressor(alpha=2.0 / weights.sum(), tol=1e-10, max_iter=1000)
    theirs.fit(np.repeat(X, weights, axis=0), np.repeat(y, weights))
    np.testing.assert_allclose(ours.fit(X, y, sample_weight=weights).coef_, theirs.coef_, rtol=1e-5)


@pytest.mark.extended
def test_the_prior_precision_maximizes_the_bound():
    X, y = standardized(load_breast_cancer)
    X = X[:, :6]
    model = LogisticRegression().fit(X, y)
    others = [LogisticRegression(prior_precision=factor * model.prior_precision_).fit(X, y) for factor in (0.8, 1.25)]
    believed = lambda one: one.bound_ + float(weak_prior({"w": one.prior_precision_, "unit": 1.0}))
    assert all(believed(other) < believed(model) for other in others)


@pytest.mark.extended
def test_classes_that_can_be_separated_have_no_huge_weights():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 3))
    model = LogisticRegression().fit(X, X[:, 0] > 0)
    assert model.prior_precision_ > 1e-3
    assert np.abs(model.coef_).max() < 40


@pytest.mark.extended
def test_probabilities_are_averages_over_the_posterior():
    X, y = standardized(load_iris)
    for rows in (y < 2, y < 3):
        model = LogisticRegression(recipe="laplace").fit(X[rows], y[rows])
        draws = model.sample_predictive(X[rows][45:55], 20_000, random_state=0)
        shares = np.stack([(draws == label).mean(0) for label in model.classes_], axis=1)
        np.testing.assert_allclose(model.predict_proba(X[rows][45:55]), shares, atol=0.015)


@pytest.mark.extended
def test_a_recipe_is_a_name_or_a_rule():
    X, y = standardized(load_breast_cancer)
    X = X[:, [1, 4, 8]]  # Nearly uncorrelated columns, for which a diagonal posterior is accurate.
    same = [LogisticRegression(recipe=recipe, prior_precision=1.0).fit(X, y) for recipe in ("laplace", blr.laplace())]
    np.testing.assert_allclose(same[0].coef_, same[1].coef_, rtol=1e-6)
    assert same[0].bound_error_ is None  # Laplace's bound is an expansion at the mean.
    diagonal = LogisticRegression(recipe=blr.vogn(0.3), prior_precision=1.0, max_iter=300, random_state=0).fit(X, y)
    assert isinstance(diagonal.posterior_, blr.DiagonalGaussian)
    np.testing.assert_allclose(diagonal.coef_, same[0].coef_, atol=0.2)
    with pytest.raises(ValueError, match="knows the recipes"):
        LogisticRegression(recipe="adem").fit(X, y)


@pytest.mark.extended
def test_streaming_is_close_to_all_at_once():
    X, y = standardized(load_breast_cancer)
    X = X[:, :4]
    full = LogisticRegression(prior_precision=1.0).fit(X, y)
    parts = LogisticRegression(prior_precision=1.0)
    for rows in np.array_split(np.arange(len(y)), 3):
        parts.partial_fit(X[rows], y[rows], classes=[0, 1])
    assert parts.bound_ == pytest.approx(full.bound_, abs=1.0)
    assert 0 <= full.bound_error_ < 1e-3
    assert 0 <= parts.bound_error_ < 1e-3
    np.testing.assert_allclose(parts.coef_, full.coef_, atol=0.4)


def test_class_weights_are_sample_weights():
    X, y = standardized(load_breast_cancer)
    X = X[:, :4]
    balanced = LogisticRegression(recipe="laplace", class_weight="balanced").fit(X, y)
    counts = len(y) / (2 * np.bincount(y))
    weighted = LogisticRegression(recipe="laplace").fit(X, y, sample_weight=counts[y])
    np.testing.assert_allclose(balanced.coef_, weighted.coef_, rtol=1e-9)


@pytest.mark.extended
def test_pipelines_and_parameter_searches():
    pandas = pytest.importorskip("pandas")
    X, y = load_iris(return_X_y=True)
    frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(recipe="laplace", prior_precision=1.0))
    assert cross_val_score(pipeline, frame, y, cv=3).mean() > 0.9
    search = GridSearchCV(pipeline, {"logisticregression__prior_precision": [0.1, 1.0]}, cv=2).fit(frame, y)
    copied = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(copied.predict_proba(frame), search.predict_proba(frame))
    model = clone(RidgeRegression()).fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c", "d"]
