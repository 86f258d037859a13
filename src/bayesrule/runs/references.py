"""What a model is held against: a prediction without inputs, and scikit-learn's boosted trees.

Each predicts the same held-out rows from the same training rows as the model, so that their scores compare row by row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from .. import metrics
from . import score

TREES = "boosted trees"
"""What the report and the command line call scikit-learn's HistGradientBoosting at its default settings."""
MOST_WORK = 1_000_000
"""Rows × inputs × classes beyond which trees beside a single fit would take longer than a few seconds."""


class Scored(NamedTuple):
    """Predictions of some rows: `values` ("probabilities", or "mean", "std", "low", "high") and each row's `losses`."""

    values: dict[str, np.ndarray]
    losses: np.ndarray


def score_predictions(y: np.ndarray, predicted: Scored) -> dict[str, float]:
    """The metrics of `bayesrule.runs.score` for predictions from anywhere."""
    if "probabilities" in predicted.values:
        return score.score_classes(predicted.values["probabilities"], y)
    mean, low, high = (predicted.values[name] for name in ("mean", "low", "high"))
    return score.score_numbers(y, mean, low, high, float(predicted.losses.mean()))


def describe_baseline(task: str) -> str:
    """What the prediction without inputs is called."""
    if task in ("binary", "classes"):
        return "the classes' frequencies in training"
    if task == "counts":
        return "a Poisson distribution with the training mean"
    return "a Gaussian with the training mean and deviation"


def predict_baseline(y_train: np.ndarray, y_test: np.ndarray, task: str, classes: int) -> Scored:
    """Every row gets the distribution of the training targets, whatever its inputs are."""
    if classes:
        probabilities = score.class_frequencies(y_train, classes, len(y_test))
        return Scored({"probabilities": probabilities}, score.class_losses(probabilities, y_test))
    if task == "counts":
        return _as_poisson(np.full(len(y_test), float(y_train.mean())), y_test)
    return _as_gaussian(np.full(len(y_test), y_train.mean()), float(y_train.std()), y_test)


def are_trees_quick(x: np.ndarray, classes: int) -> bool:
    """Whether boosted trees of these inputs take no more than a few seconds."""
    return x.size * max(classes, 1) <= MOST_WORK


def predict_trees(
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, task: str, classes: int, seed: int
) -> Scored:
    """scikit-learn's HistGradientBoosting at its default settings; inputs may be missing (NaN).

    It predicts numbers without uncertainty. Their standard deviation is that of the errors on a fifth of the training
    rows, which trees that were fitted to the others predict; for counts the distribution is Poisson's.
    """
    # On small tables threads wait for one another more than they work, by ten times where other programs run, too.
    with threadpool_limits(1 if are_trees_quick(x_train, classes) else None, user_api="openmp"):
        return _predict_trees(x_train, y_train, x_test, y_test, task, classes, seed)


def _predict_trees(
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, task: str, classes: int, seed: int
) -> Scored:
    if classes:
        from sklearn.ensemble import HistGradientBoostingClassifier

        model: Any = HistGradientBoostingClassifier(random_state=seed).fit(x_train, y_train)
        probabilities = np.zeros((len(x_test), classes))
        probabilities[:, model.classes_] = model.predict_proba(x_test)
        return Scored({"probabilities": probabilities}, score.class_losses(probabilities, y_test))
    from sklearn.ensemble import HistGradientBoostingRegressor

    if task == "counts":
        model = HistGradientBoostingRegressor(loss="poisson", random_state=seed).fit(x_train, y_train)
        return _as_poisson(np.maximum(model.predict(x_test), 1e-9), y_test)
    order = np.random.default_rng(seed).permutation(len(y_train))
    checked, fitted = np.split(order, [max(1, len(order) // 5)])
    trial = HistGradientBoostingRegressor(random_state=seed).fit(x_train[fitted], y_train[fitted])
    error = y_train[checked] - trial.predict(x_train[checked])
    model = HistGradientBoostingRegressor(random_state=seed).fit(x_train, y_train)
    std = max(float(np.sqrt(np.mean(error**2))), 1e-9 * float(y_train.std()), 1e-300)
    return _as_gaussian(np.asarray(model.predict(x_test)), std, y_test)


def _as_poisson(rate: np.ndarray, y: np.ndarray) -> Scored:
    low, high = score.poisson_interval(rate)
    return Scored({"mean": rate, "std": np.sqrt(rate), "low": low, "high": high}, score.poisson_losses(y, rate))


def _as_gaussian(mean: np.ndarray, std: float, y: np.ndarray) -> Scored:
    deviations = np.full(len(mean), std)
    low, high = metrics.interval(mean, deviations)
    losses = score.gaussian_losses(y, mean, deviations)
    return Scored({"mean": mean, "std": deviations, "low": low, "high": high}, losses)
