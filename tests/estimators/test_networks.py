"""Networks: scikit-learn's checks, recipes by name and by value, partial_fit, and the quality of predictions."""

import pickle
from functools import partial

import jax
import numpy as np
import pytest
from sklearn import datasets, neural_network
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import bayesrule as blr
from bayesrule import metrics
from bayesrule.estimators import BinaryMLPClassifier, MLPClassifier, MLPRegressor
from bayesrule.estimators.named_recipes import NETWORK, network_rule
from bayesrule.fitting.loop import run_chunk
from bayesrule.fitting.predict import _predict
from bayesrule.numerics.programs import release_programs

# Optional: the dev extra installs it.
pd = pytest.importorskip("pandas")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 1.0]
CLASSES = np.where(X[:, 0] + RANDOM.normal(size=60) / 3 > 0, "yes", "no")
Y = 100.0 + 20.0 * np.tanh(X[:, 0]) + RANDOM.normal(size=60)
COINS, NORMALS = RANDOM.integers(0, 2, 60), RANDOM.normal(size=60)


@pytest.mark.extended
@parametrize_with_checks(
    [
        MLPClassifier((4,), recipe="adam", max_iter=30, random_state=0),
        MLPRegressor((4,), recipe="adam", max_iter=100, random_state=0),
    ]
)
def test_scikit_learn_checks_of_an_optimizer(estimator, check):
    """Point estimates by Adam. Default settings, with draws of the weights, are in test_scikit_learn_checks.py."""
    check(estimator)


@pytest.mark.extended
def test_a_weight_is_a_number_of_repetitions():
    """Also with the default recipe's draws, to the last digits: the noise does not depend on the rows."""
    counts = RANDOM.integers(0, 3, len(X))
    settings = {"hidden_layer_sizes": (4,), "max_iter": 60, "samples": 8, "random_state": 0}
    for kind, y in ((MLPClassifier, CLASSES), (BinaryMLPClassifier, CLASSES)):
        weighted = kind(**settings).fit(X, y, sample_weight=counts)
        repeated = kind(**settings).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
        np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), rtol=1e-7, atol=1e-9)


@pytest.fixture(scope="module")
def classifier():
    return MLPClassifier((4,), max_iter=60, samples=8, random_state=0).fit(X, CLASSES)


@pytest.fixture(scope="module")
def regressor():
    return MLPRegressor((4,), max_iter=300, samples=8, random_state=0).fit(X, Y)


@pytest.mark.extended
def test_what_is_fitted(classifier, regressor):
    assert isinstance(classifier.posterior_, blr.DiagonalGaussian)
    assert classifier.n_iter_ == len(classifier.loss_curve_) == 60
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0]
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((classifier.posterior_, classifier.state_)))
    assert classifier.score(X, CLASSES) > 0.8
    assert regressor.score(X, Y) > 0.8
    assert 0.3 < regressor.noise_ < 9.0  # The true value is 1.
    mean, std = regressor.predict(X, return_std=True)
    assert np.all(std > np.sqrt(regressor.noise_))
    assert np.mean(np.abs(mean - Y) < 2 * std) > 0.85


@pytest.mark.extended
def test_a_second_fit_compiles_nothing(classifier):
    """Other rows, other seeds, another prior: the same programs."""
    release_programs()  # Otherwise old programs may be dropped while they are counted.
    clone(classifier).fit(X, CLASSES).predict_proba(X)
    compiled = [run_chunk.count(), _predict.count()]
    again = MLPClassifier((4,), max_iter=60, samples=8, prior_precision=2.0, random_state=1).fit(X[3:], CLASSES[3:])
    again.predict_proba(X[5:])
    assert [run_chunk.count(), _predict.count()] == compiled


@pytest.mark.extended
def test_pickled_cloned_and_in_pipelines(classifier):
    back = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(back.predict_proba(X), classifier.predict_proba(X))
    assert clone(classifier).get_params() == classifier.get_params()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    pipeline = make_pipeline(StandardScaler(), clone(classifier))
    assert cross_val_score(pipeline, frame, CLASSES, cv=2).shape == (2,)
    search = GridSearchCV(clone(classifier), {"prior_precision": [0.5, 2.0]}, cv=2)
    assert search.fit(frame, CLASSES).best_params_["prior_precision"] in (0.5, 2.0)
    assert list(search.best_estimator_.feature_names_in_) == ["a", "b", "c"]


@pytest.mark.extended
def test_draws_are_of_the_target(classifier, regressor):
    labels = classifier.sample_predictive(X[:7], 400, random_state=0)
    assert labels.shape == (400, 7)
    shares = (labels == classifier.classes_[1]).mean(axis=0)
    np.testing.assert_allclose(shares, classifier.predict_proba(X[:7])[:, 1], atol=0.15)
    draws = regressor.sample_predictive(X[:7], 400, random_state=0)
    mean, std = regressor.predict(X[:7], return_std=True)
    assert draws.shape == (400, 7)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=std.max() * 0.5)
    np.testing.assert_allclose(draws.std(axis=0), std, rtol=0.4)
    np.testing.assert_array_equal(draws, regressor.sample_predictive(X[:7], 400, random_state=0))


@pytest.mark.extended
def test_a_recipe_is_a_name_or_a_value():
    """The same rule by value takes the same steps, and another piece makes another algorithm."""
    settings = {"hidden_layer_sizes": (4,), "max_iter": 60, "samples": 8, "random_state": 0}
    named = MLPClassifier(recipe="vogn", **settings).fit(X, CLASSES)
    rule = network_rule("vogn", 60, 0.03, 2.0)
    valued = MLPClassifier(recipe=rule, **settings).fit(X, CLASSES)
    np.testing.assert_array_equal(named.predict_proba(X), valued.predict_proba(X))
    other = MLPClassifier(recipe=rule.replace(points=blr.Delta()), **settings).fit(X, CLASSES)
    assert (named.prediction_method_, other.prediction_method_) == ("samples", "linearized")
    assert np.any(named.posterior_.mean["layer0"]["w"] != other.posterior_.mean["layer0"]["w"])


@pytest.mark.parametrize("name", ["oggn", "dropout"])
def test_other_recipes_learn(name):
    """One of each kind of prediction; the rest are in the longer comparison."""
    actual = MLPClassifier((4,), recipe=name, max_iter=60, random_state=0).fit(X, CLASSES)
    assert actual.score(X, CLASSES) > 0.8
    assert actual.sample_predictive(X[:2], 3).shape == (3, 2)


@pytest.mark.extended
def test_streams():
    stream = MLPClassifier((4,), samples=8, random_state=0)
    with pytest.raises(ValueError, match="needs classes="):
        stream.partial_fit(X, CLASSES)
    for _ in range(15):
        stream.partial_fit(X[:30], CLASSES[:30], classes=["no", "yes"])
        stream.partial_fit(X[30:], CLASSES[30:])
    assert stream.t_ == 15 * 60
    assert stream.n_iter_ == len(stream.loss_curve_) == 30
    assert stream.score(X, CLASSES) > 0.75
    with pytest.raises(ValueError, match="must be those of the first call"):
        stream.partial_fit(X, CLASSES, classes=["a", "b"])
    numbers = MLPRegressor((4,), recipe="adam", random_state=0).partial_fit(X, Y).partial_fit(X, Y)
    assert np.isfinite(numbers.predict(X)).all()


def test_several_targets_each_with_its_noise():
    both = np.stack([Y, -3 * Y + 30 * RANDOM.normal(size=60)], axis=1)
    actual = MLPRegressor((4,), recipe="adam", max_iter=300, random_state=0).fit(X, both)
    mean, std = actual.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 2)
    assert actual.noise_[1] > 50 * actual.noise_[0]
    assert actual.sample_predictive(X, 3).shape == (3, 60, 2)


@pytest.mark.extended
def test_known_noise():
    known = MLPRegressor((4,), noise=4.0, max_iter=60, samples=8, random_state=0).fit(X, Y)
    assert known.noise_ == pytest.approx(4.0)
    assert "log_noise" not in known.posterior_.mean


@pytest.mark.parametrize(("kind", "epochs", "noise"), [(MLPClassifier, 60, COINS), (MLPRegressor, 300, NORMALS)])
def test_the_prior_is_as_strong_as_held_out_rows_say(kind, epochs, noise):
    """Where a column of X determines y, the prior is weaker than where X says nothing about it."""
    settings = {"hidden_layer_sizes": (4,), "max_iter": epochs, "samples": 8, "random_state": 0}
    clear = X[:, 0] > 0 if kind is MLPClassifier else X[:, 0]
    assert kind(**settings).fit(X, clear).prior_precision_ < kind(**settings).fit(X, noise).prior_precision_


def test_the_prior_of_a_stream_or_of_few_rows_is_not_searched():
    few = MLPClassifier((4,), max_iter=60, samples=8, random_state=0).fit(X[:8], CLASSES[:8])
    stream = MLPClassifier((4,), samples=8, random_state=0).partial_fit(X, CLASSES, classes=["no", "yes"])
    assert few.prior_precision_ == stream.prior_precision_ == pytest.approx(0.1**0.5 / 0.03)


def test_the_noise_is_in_the_units_of_y():
    """A variance: y in thousandths of its unit has 10⁶ times the noise, and the same predictions in that unit."""
    settings = {"hidden_layer_sizes": (4,), "max_iter": 60, "samples": 8, "random_state": 0}
    one = MLPRegressor(noise=25.0, **settings).fit(X, Y)
    other = MLPRegressor(noise=25e6, **settings).fit(X, 1000 * Y)
    mean, std = one.predict(X, return_std=True)
    for ours, scaled in zip((mean, std), other.predict(X, return_std=True), strict=True):
        np.testing.assert_allclose(scaled, 1000 * ours, rtol=1e-6)
    assert np.all((std > 5.0) & (std < 6.0))
    draws = other.sample_predictive(X[:7], 400, random_state=0)
    np.testing.assert_allclose(draws, 1000 * one.sample_predictive(X[:7], 400, random_state=0), rtol=1e-6)


@pytest.mark.extended
def test_single_precision(classifier):
    actual = MLPClassifier((4,), max_iter=60, samples=8, random_state=0).fit(X.astype(np.float32), CLASSES)
    assert actual.posterior_.mean["layer0"]["w"].dtype == np.float32
    assert actual.predict_proba(X).dtype == np.float32
    assert abs(actual.score(X, CLASSES) - classifier.score(X, CLASSES)) < 0.1


@pytest.mark.extended
def test_signs_and_their_probabilities():
    actual = BinaryMLPClassifier((16,), max_iter=100, samples=8, random_state=0).fit(X, CLASSES)
    assert isinstance(actual.posterior_, blr.Bernoulli)
    assert actual.score(X, CLASSES) > 0.75
    weights = actual.posterior_.sample(jax.random.key(0))
    assert all(set(np.unique(leaf)) <= {-1.0, 1.0} for leaf in jax.tree.leaves(weights))


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (MLPClassifier(recipe="adamm"), "knows the recipes 'ivon'"),
        (MLPClassifier(activation="sine"), "'relu' or 'tanh'"),
        (MLPClassifier((0,)), "widths of the hidden layers"),
        (MLPClassifier(max_iter=0), "max_iter= is a whole number above 0"),
        (MLPClassifier(batch_size=1.5), "batch_size= is a whole number above 0"),
        (MLPClassifier(prior_precision=-1.0), "prior_precision= is a positive number"),
        (MLPClassifier(temperature=0.0), "temperature= is a positive number"),
        (MLPRegressor(noise=-1.0), "noise= is a positive number"),
        (BinaryMLPClassifier(recipe="ivon"), "knows the recipes 'bayesbinn'"),
    ],
)
def test_bad_settings(estimator, words):
    with pytest.raises(ValueError, match=words):
        estimator.fit(X, Y if isinstance(estimator, MLPRegressor) else CLASSES)


def compare(x, y, ours, theirs, judge, splits):
    """The scores of both on held-out rows, (splits, 2, scores), with standardised inputs."""
    actual = []
    for seed in range(splits):
        train, test, known, wanted = train_test_split(x, y, random_state=seed, stratify=y)
        scale = StandardScaler().fit(train)
        train, test = scale.transform(train), scale.transform(test)
        actual.append([judge(make(seed).fit(train, known), test, wanted) for make in (ours, theirs)])
    return np.array(actual)


def of_classes(model, x, y):
    p = model.predict_proba(x)
    return [float(score(p, y)) for score in (metrics.accuracy, metrics.nll, metrics.ece)]


def flipped():
    """A fifth of the labels flipped."""
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 5))
    return x, ((x[:, 0] * x[:, 1] + x[:, 2] > 0) != (random.random(400) < 0.2)).astype(int)


TABLES = {
    "digits": partial(datasets.load_digits, return_X_y=True),
    "breast_cancer": partial(datasets.load_breast_cancer, return_X_y=True),
    "wine": partial(datasets.load_wine, return_X_y=True),
    "flipped": flipped,
}


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # scikit-learn's, at its own settings
@pytest.mark.parametrize("load", TABLES.values(), ids=TABLES)
def test_no_worse_than_scikit_learn(load):
    """In accuracy and NLL, the mean difference over eight splits is not two standard errors to our disadvantage."""
    scores = compare(
        *load(),
        lambda seed: MLPClassifier(random_state=seed),
        lambda seed: neural_network.MLPClassifier(random_state=seed),
        of_classes,
        splits=8,
    )
    losses = (scores[:, 0] - scores[:, 1])[:, :2] * [-1, 1]
    mean, error = losses.mean(0), losses.std(0, ddof=1) / np.sqrt(len(losses))
    assert np.all(mean < 2 * error), (mean, error)


@pytest.mark.extended
@pytest.mark.parametrize("name", NETWORK)
def test_every_recipe_on_breast_cancer(name):
    actual = compare(
        *datasets.load_breast_cancer(return_X_y=True),
        lambda seed: MLPClassifier((20,), recipe=name, random_state=seed),
        lambda seed: BinaryMLPClassifier((50,), random_state=seed),
        of_classes,
        splits=1,
    )[0]
    assert np.all(actual[:, 0] > 0.93), actual
    assert np.all(actual[:, 1] < 0.3), actual
