"""A linear model as a file of arrays that NumPy alone can predict with, for serving without JAX.

`model.npz` has the posterior's mean and covariance and what inputs are centred by; `predict.py` beside it, a copy of
`numpy_predictor.py`, has the formulas. Neither needs this library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular

from .. import metrics
from ..families.gaussian.block_diagonal import BlockDiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..models import regression
from ..points.sampling import even_noise
from . import numpy_predictor


def export_numpy(
    estimator: Any, folder: str | Path, columns: list[dict[str, Any]] | None = None, labels: list[str] | None = None
) -> Path:
    """Write `model.npz` and `predict.py` of a fitted linear model to a folder.

    Args:
        estimator: a fitted `RidgeRegression`, `LogisticRegression` or `PoissonRegression`.
        folder: where; it is made if it does not exist.
        columns: how the columns of a table are encoded, for a run of the command line.
        labels: the names of the classes of such a run, whose estimator has their numbers.

    Returns:
        The folder.
    """
    kind = getattr(estimator, "_kind", "normal")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    mean = estimator.posterior_.mean
    weights = np.asarray(mean["w"], float)
    weights = weights[:, None] if weights.ndim == 1 else weights
    intercept = np.zeros(weights.shape[1]) + np.asarray(mean.get("b", 0.0), float)
    arrays: dict[str, Any] = {
        "x_mean": np.asarray(getattr(estimator, "x_mean_", np.zeros(len(weights))), float),
        "w": np.concatenate([intercept[None], weights]),
        **_covariance_arrays(estimator.posterior_, weights.shape),
    }
    about: dict[str, Any] = {"format": 1, "kind": kind, "estimator": type(estimator).__name__}
    if kind == "normal":
        freedom = estimator.degrees_of_freedom_
        about |= {"y_mean": estimator.y_mean_, "noise": estimator.noise_}
        about["interval"] = float(metrics.interval(0.0, 1.0, degrees_of_freedom=freedom)[1])
    if kind in ("logistic", "softmax", "categorical"):
        arrays["classes"] = _plain_classes(estimator.classes_)
        arrays["modelled_classes"] = np.asarray(estimator._modelled())
    if kind in ("softmax", "categorical"):
        arrays["noise"] = even_noise(regression.DRAWS, weights.shape[1])[0]
    if kind == "softmax":
        arrays["contrasts"] = regression.contrasts(weights.shape[1] + 1)
    if columns is not None:
        keys = ("name", "kind", "mean", "std", "levels", "missing")
        about["columns"] = [{key: column[key] for key in keys if key in column} for column in columns if column["used"]]
    if labels:
        about["labels"] = labels
    np.savez(path / "model.npz", allow_pickle=False, about=np.array(json.dumps(about)), **arrays)
    shutil.copyfile(numpy_predictor.__file__, path / "predict.py")
    return path


def _covariance_arrays(q: Any, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The posterior covariance of the intercepts and weights, in the form that `numpy_predictor` takes.

    Args:
        q: a Gaussian over {"b", "w"} or {"w"}.
        shape: the number of columns and of outputs.
    """
    size, outputs = shape
    has_intercept = "b" in q.mean
    rows = size + 1

    def with_intercept(matrix: np.ndarray, axis: int) -> np.ndarray:
        """Zeros for an intercept that the model does not have, in front of an axis of features."""
        if has_intercept:
            return matrix
        return np.concatenate([np.zeros_like(np.take(matrix, [0], axis)), matrix], axis)

    features = rows if has_intercept else size
    if isinstance(q, Gaussian):
        blocks = np.asarray(q.covariance(), float).reshape(features, outputs, features, outputs)
        return {"covariance": with_intercept(with_intercept(blocks, 0), 2).reshape(rows * outputs, rows * outputs)}
    if isinstance(q, BlockDiagonalGaussian):
        blocks = np.asarray(q.columns.covariance(), float)
        return {"covariances": with_intercept(with_intercept(blocks, 1), 2)}
    if isinstance(q, LowRankGaussian):
        # S⁻¹ = D⁻¹ − WᵀW with W = L⁻¹UᵀD⁻¹ and LLᵀ = I + UᵀD⁻¹U.
        diagonal, factor = np.asarray(q.diagonal, float), np.asarray(q.factor, float)
        scaled = factor / diagonal[:, None]
        capacitance = np.linalg.cholesky(np.eye(factor.shape[1]) + factor.T @ scaled)
        directions = solve_triangular(capacitance, scaled.T, lower=True).reshape(-1, features, outputs)
        variances = (1 / diagonal).reshape(features, outputs)
        return {"variances": with_intercept(variances, 0), "directions": with_intercept(directions, 1)}
    variance = q.variance()
    weights = np.asarray(variance["w"], float).reshape(size, outputs)
    intercept = np.zeros((1, outputs)) + np.asarray(variance.get("b", 0.0), float)
    return {"variances": np.concatenate([intercept, weights])}


def _plain_classes(classes: np.ndarray) -> np.ndarray:
    """The classes as an array that a file without executable code can hold."""
    if classes.dtype.kind != "O":
        return classes
    if all(isinstance(label, str) for label in classes):
        return classes.astype(str)
    raise ValueError(
        "The classes are Python objects that are not text, which a file of arrays cannot hold: fit with numbers or "
        "text as labels."
    )


class ExportsNumpy:
    """A linear model, which can be written to files that NumPy alone can predict with."""

    def export(self, kind: str = "numpy", folder: str | Path = "numpy_model") -> Path:
        """Write the fitted model for predictions without JAX: `model.npz`, and `predict.py` which reads it.

        `from predict import load; load("model.npz").predict(X)` then gives the predictions of this estimator, with
        their standard deviations or probabilities, and needs nothing but NumPy.

        Args:
            kind: "numpy", the only one.
            folder: where; it is made if it does not exist.

        Returns:
            The folder.
        """
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        check_kind(kind)
        return export_numpy(self, folder)


def check_kind(kind: str) -> None:
    """Raise unless this is a kind of export that there is."""
    if kind != "numpy":
        raise ValueError(f'export takes the kind "numpy", got {kind!r}.')
