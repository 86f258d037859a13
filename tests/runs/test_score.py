"""Numbers that a run reports, against SciPy's and scikit-learn's: metrics, baselines, influence and coefficients."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from numpy.testing import assert_allclose
from sklearn.metrics import r2_score

import bayesrule as blr
from bayesrule.estimators import LogisticRegression, PoissonRegression, RidgeRegression
from bayesrule.models import regression
from bayesrule.runs import explain, score
from bayesrule.runs.influence import leave_rows_out
from bayesrule.runs.preprocess import Inputs, Preprocessing, TrainingRows
from bayesrule.runs.train_sequence import _score_random_walk
from bayesrule.tables.encoding import Encoding

RANDOM = np.random.default_rng(0)
Y, MEAN, STD = RANDOM.normal(size=40), 0.5 * RANDOM.normal(size=40), RANDOM.uniform(0.5, 2, 40)


def test_metrics_of_gaussian_predictions():
    found = score.score_gaussian(Y, MEAN, STD)
    low, high = st.norm(MEAN, STD).interval(0.9)
    expected = {
        "nll": -st.norm(MEAN, STD).logpdf(Y).mean(),
        "rmse": np.sqrt(np.mean((Y - MEAN) ** 2)),
        "r2": r2_score(Y, MEAN),
        "coverage90": np.mean((low <= Y) & (high >= Y)),
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_metrics_of_student_t_predictions():
    found = score.score_gaussian(Y, MEAN, STD, 4.5)
    low, high = st.t(4.5, MEAN, STD).interval(0.9)
    assert found["nll"] == pytest.approx(-st.t(4.5, MEAN, STD).logpdf(Y).mean(), rel=1e-12)
    assert found["coverage90"] == np.mean((low <= Y) & (high >= Y))


def test_the_baseline_of_classes_has_one_more_row_of_each():
    labels = np.array([0, 0, 0, 1])
    assert_allclose(score.class_frequencies(labels, 3, 2), [[4 / 7, 2 / 7, 1 / 7]] * 2)


def test_the_baseline_of_counts_is_scipys_poisson():
    y = RANDOM.poisson(7.3, size=60).astype(float)
    found = score.score_poisson_baseline(y, 7.3)
    low, high = st.poisson(7.3).ppf([0.05, 0.95])
    assert found["nll"] == pytest.approx(-st.poisson(7.3).logpmf(y).mean())
    assert found["coverage90"] == pytest.approx(np.mean((low <= y) & (y <= high)))
    grid = np.arange(30.0)  # every count once, so that a wrong end of the interval shows
    assert score.score_poisson_baseline(grid, 7.3)["coverage90"] == pytest.approx((high - low + 1) / 30, rel=1e-6)


def test_intervals_of_predictions_hold_ninety_per_cent():
    mean, std = np.array([1.0, 5.0]), np.array([1.0, 2.0])
    draws = np.tile(np.arange(100.0)[:, None], (5, 2))
    regressor = SimpleNamespace(
        predict=lambda x, return_std: (mean, std), sample_predictive=lambda x, n, random_state: draws
    )
    numbers = score.predict_numbers(regressor, np.zeros((2, 1)), "regression")
    assert_allclose(np.stack([numbers["low"], numbers["high"]]), st.norm(mean, std).interval(0.9), rtol=1e-5)
    counts = score.predict_numbers(regressor, np.zeros((2, 1)), "counts")
    assert_allclose(np.stack([counts["low"], counts["high"]]), [[4.0, 4.0], [94.0, 94.0]])


def test_the_random_walk_widens_with_the_square_root_of_the_steps():
    train, test = np.array([0.0, 1.0, np.nan, -1.0, 2.0]), np.array([2.5, np.nan, 0.0])
    observed = ~np.isnan(test)
    std = np.std(np.diff([0.0, 1.0, -1.0, 2.0])) * np.sqrt([1, 2, 3])
    expected = -st.norm(2.0, std[observed]).logpdf(test[observed]).mean()
    assert _score_random_walk(train, test, observed)["nll"] == pytest.approx(expected)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_coefficients_of_classes_have_the_variances_of_draws(family):
    """The weights of three classes are contrasts of two outputs; intercepts come before them in the covariance."""
    mean = {"b": jnp.array([0.3, -0.2]), "w": jnp.array([[1.0, 0.5], [-1.0, 2.0]])}
    if family == "full":
        root = RANDOM.normal(size=(6, 6))
        q = blr.Gaussian(mean, jnp.asarray(root @ root.T + np.diag([1.0, 50.0, 2.0, 3.0, 4.0, 5.0])))
        covariance = np.linalg.inv(np.asarray(q.precision))[2:, 2:]
    else:
        precision = {"b": jnp.array([9.0, 8.0]), "w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
        q = blr.DiagonalGaussian(mean, precision)
        covariance = np.diag(1 / np.asarray(precision["w"]).ravel())
    found = explain._coefficients(q, ["u", "v"], ["a", "b", "c"])
    to_classes = np.kron(np.eye(2), regression.contrasts(3))  # (feature, class) from (feature, output)
    assert found["name"][:3] == ["u → a", "u → b", "u → c"]
    assert_allclose(found["mean"], to_classes @ np.asarray(mean["w"]).ravel())
    assert_allclose(found["std"] ** 2, np.diag(to_classes @ covariance @ to_classes.T))


def test_influence_is_the_divergence_of_a_fit_without_the_row():
    """Ridge with known noise: the posterior with and without a row, and the left-out density, by linear algebra."""
    x, y, noise = RANDOM.normal(size=(7, 2)), RANDOM.normal(size=7), 0.3
    inputs = np.column_stack([np.ones(7), x])

    def posterior(rows):
        precision = np.eye(3) + inputs[rows].T @ inputs[rows] / noise
        return np.linalg.solve(precision, inputs[rows].T @ y[rows] / noise), precision

    mean, precision = posterior(slice(None))
    q = blr.Gaussian({"b": jnp.asarray(mean[0]), "w": jnp.asarray(mean[1:])}, jnp.asarray(precision))
    influence, log_density, prediction = leave_rows_out("normal", q, x, y, noise)
    rest = np.arange(7) != 2
    without, other = posterior(rest)
    divergence = 0.5 * (
        np.trace(np.linalg.solve(precision, other))
        - 3
        + (mean - without) @ other @ (mean - without)
        + np.linalg.slogdet(precision)[1]
        - np.linalg.slogdet(other)[1]
    )
    spread = np.sqrt(noise + inputs[2] @ np.linalg.solve(other, inputs[2]))
    assert influence[2] == pytest.approx(divergence)
    assert log_density[2] == pytest.approx(st.norm(inputs[2] @ without, spread).logpdf(y[2]))
    assert prediction[2] == pytest.approx(inputs[2] @ without)


@pytest.mark.extended
@pytest.mark.parametrize("likelihood", ["logistic", "poisson"])
def test_predictions_without_a_row_are_those_of_a_fit_without_it(likelihood):
    """Of a row among many, which the other rows' messages hardly miss; with the row predictions are further away."""
    x = RANDOM.normal(size=(200, 1))
    rate = np.exp(0.5 * x[:, 0])
    y = (
        RANDOM.poisson(rate).astype(float)
        if likelihood == "poisson"
        else 1.0 * (RANDOM.random(200) < rate / (1 + rate))
    )
    kind = {"logistic": LogisticRegression, "poisson": PoissonRegression}[likelihood]
    settings = {"prior_precision": 1.0, "recipe": "von"}
    predict = lambda model, x: model.predict_proba(x)[:, 1] if likelihood == "logistic" else model.predict(x)
    whole = kind(**settings).fit(x, y)
    place = int(np.argmax(np.abs(x[:, 0])))
    with jax.enable_x64(True):
        mean = leave_rows_out(likelihood, whole.posterior_, x, y)[2]
    rest = np.arange(200) != place
    refitted = float(predict(kind(**settings).fit(x[rest], y[rest]), x[[place]])[0])
    with_row = float(predict(whole, x[[place]])[0])
    assert abs(mean[place] - refitted) < 0.1 * abs(with_row - refitted)


@pytest.mark.extended
def test_the_deviation_of_a_row_left_out_is_that_of_a_fit_without_it():
    x, y = RANDOM.normal(size=(12, 3)), RANDOM.normal(size=12)
    model = RidgeRegression(prior_precision=0.7, noise=0.4)
    inputs = Inputs(x, Preprocessing(Encoding([]), None))
    training = TrainingRows(x, np.arange(12))
    found = explain._influence(model.fit(x, y), "normal", training, inputs, y, np.arange(12))
    for row in (0, 7):
        rest = np.arange(12) != row
        mean, std = RidgeRegression(prior_precision=0.7, noise=0.4).fit(x[rest], y[rest]).predict(x[[row]], True)
        assert_allclose([found["mean"][row], found["std"][row]], [mean[0], std[0]], rtol=1e-8)
