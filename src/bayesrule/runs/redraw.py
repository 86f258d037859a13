"""Missing inputs of training rows, drawn again under the fitted model.

The Gaussian over the columns knows how the target depends on an input only as far as that is linear. A fitted network
or Gaussian process knows more: its likelihood of the row's target chooses among draws that do not know the target. A
fit to the chosen draws, repeated, is a Monte Carlo EM algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .preprocess import Inputs, TrainingRows


def redraw(estimator: Any, training: TrainingRows, inputs: Inputs, y: np.ndarray, seed: int) -> TrainingRows:
    """The training rows with other draws of their missing inputs.

    Args:
        estimator: a regressor or classifier, fitted to `training`.
        training: the rows that it was fitted to.
        inputs: the inputs of the training rows.
        y: their targets; of a classifier the indices of the classes.
        seed: of the choice among the draws.
    """
    rng = np.random.default_rng(seed)
    x = training.x.copy()
    for rows, draws in inputs.draws():
        chosen = np.isin(training.row, rows)
        copies = int(chosen.sum()) // len(rows)
        flat = draws.reshape(-1, draws.shape[2])
        log_density = _log_density(estimator, flat, np.repeat(y[rows], draws.shape[1])).reshape(draws.shape[:2])
        probability = np.exp(log_density - log_density.max(axis=1, keepdims=True))
        cumulative = np.cumsum(probability / probability.sum(axis=1, keepdims=True), axis=1)
        quantiles = (np.arange(copies) + rng.random((len(rows), 1))) / copies
        place = (cumulative[:, None, :] < quantiles[:, :, None]).sum(axis=2)
        place = np.minimum(place, draws.shape[1] - 1)  # By rounding, the last cumulative probability may be below 1.
        x[chosen] = np.take_along_axis(draws, place[:, :, None], axis=1).reshape(-1, draws.shape[2])
    return TrainingRows(x, training.row, training.weight)


def _log_density(estimator: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The log density of targets, up to a constant."""
    if hasattr(estimator, "predict_proba"):
        probability = estimator.predict_proba(x)[np.arange(len(y)), y]
        return np.log(np.maximum(probability, np.finfo(float).tiny))
    mean, std = estimator.predict(x, return_std=True)
    return -0.5 * ((y - mean) / std) ** 2 - np.log(std)
