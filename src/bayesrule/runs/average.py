"""Predictions averaged over the missing inputs of a row: mixtures over draws of these inputs.

A row without missing inputs has its estimator's prediction, at no further cost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import metrics
from . import score
from .preprocess import Inputs


def predict_classes(estimator: Any, inputs: Inputs) -> np.ndarray:
    """The probability of every class, (rows, classes)."""
    probabilities = np.array(estimator.predict_proba(inputs.filled))
    for rows, draws in inputs.draws():
        by_draw = _by_draw(estimator.predict_proba(_flatten(draws)), draws)
        probabilities[rows] = by_draw.mean(axis=1)
    return probabilities


def predict_numbers(estimator: Any, inputs: Inputs, task: str) -> dict[str, np.ndarray]:
    """The "mean" and "std" of a new y, and its 90 % interval, "low" and "high".

    Where inputs are missing, mean and variance are those of the mixture, E[E y] and E[Var y] + Var[E y]. The interval
    is that of a normal or Student-t distribution with these moments; for counts it is that of the mixture.
    """
    complete = score.predict_numbers(estimator, inputs.filled, task)
    predictions = {name: np.array(values) for name, values in complete.items()}
    for rows, draws in inputs.draws():
        flat = _flatten(draws)
        mean, std = (_by_draw(values, draws) for values in estimator.predict(flat, return_std=True))
        mixture_std = np.sqrt(np.mean(std**2, axis=1) + np.var(mean, axis=1))
        if task == "counts":
            each = -(-score.COUNT_DRAWS // draws.shape[1])
            counts = np.asarray(estimator.sample_predictive(flat, each, random_state=0))
            counts = np.moveaxis(_by_draw(counts.T, draws), 0, -1).reshape(-1, len(rows))
            low, high = score.count_interval(counts)
        else:
            freedom = score.degrees_of_freedom(estimator)
            low, high = metrics.interval(mean.mean(axis=1), mixture_std, degrees_of_freedom=freedom)
        for name, values in (("mean", mean.mean(axis=1)), ("std", mixture_std), ("low", low), ("high", high)):
            predictions[name][rows] = values
    return predictions


def log_predictive(estimator: Any, inputs: Inputs, y: np.ndarray) -> np.ndarray:
    """log p(y | x) of every row, the density averaged over the missing inputs."""
    log_densities = np.array(estimator.log_predictive(inputs.filled, y))
    for rows, draws in inputs.draws():
        repeated = np.repeat(y[rows], draws.shape[1])
        by_draw = _by_draw(estimator.log_predictive(_flatten(draws), repeated), draws)
        log_densities[rows] = log_mean_exp(by_draw)
    return log_densities


def describe_draws(missing: int) -> str:
    """A sentence about what is done with so many missing inputs.

    >>> describe_draws(1)
    '1 missing value is drawn from its distribution given the rest of the row; the uncertainty is in the predictions'
    """
    subject, owner = ("1 missing value is", "its") if missing == 1 else (f"{missing:,} missing values are", "their")
    return f"{subject} drawn from {owner} distribution given the rest of the row; the uncertainty is in the predictions"


def log_mean_exp(values: np.ndarray) -> np.ndarray:
    """log mean exp over the last axis.

    >>> float(log_mean_exp(np.log([[0.25, 0.75]]))[0].round(6)) == float(np.log(0.5).round(6))
    True
    """
    return np.logaddexp.reduce(values, axis=-1) - np.log(values.shape[-1])


def _flatten(draws: np.ndarray) -> np.ndarray:
    return draws.reshape(-1, draws.shape[-1])


def _by_draw(values: Any, draws: np.ndarray) -> np.ndarray:
    """Values of flattened draws as (rows, draws, …)."""
    values = np.asarray(values)
    return values.reshape(*draws.shape[:2], *values.shape[1:])
