"""Predictions of an exported linear model with NumPy alone.

`model.npz` holds a model and this file predicts with it; both were written by `export("numpy", …)` of bayesrule, which
need not be installed here:

    from predict import load

    model = load("model.npz")
    model.predict(X)                      # numbers or classes, X an array (rows, columns)
    model.predict(X, return_std=True)     # numbers with the standard deviation of a new y
    model.predict_proba(X)                # classes: their probabilities, averaged over the posterior
    model.predict_columns({"age": [31], "city": ["Oslo"]})  # of a run of the command line: a table's columns

With φ = (1, x − x_mean) a row's scores f = φᵀw are normal with the covariance φᵀΣφ under the posterior N(w, Σ). A
number is y_mean + f with the variance φᵀΣφ + noise, a count has the mean exp(f + φᵀΣφ/2), and the probabilities of
classes are the mean of the logistic or softmax function of f over that normal distribution, by quadrature.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

ROWS = 1 << 13  # that are predicted at a time


def load(path: Any = "model.npz") -> "Model":
    """The model of a file."""
    with np.load(path, allow_pickle=False) as file:
        return Model({name: file[name] for name in file.files})


class Model:
    """A linear model with a Gaussian posterior over its weights."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.about: dict[str, Any] = json.loads(str(arrays["about"]))
        self.kind: str = self.about["kind"]
        self.classes: Any = arrays.get("classes")

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of a new y, with `return_std` also its standard deviation; or the most probable class."""
        if self.classes is not None:
            if return_std:
                raise ValueError("Classes have probabilities, and no standard deviation: use predict_proba.")
            return self.classes[np.argmax(self.predict_proba(X), axis=1)]
        parts = [self._numbers(part) for part in self._chunks(X)]
        mean, std = (np.concatenate(values) for values in zip(*parts, strict=True))
        return (mean, std) if return_std else mean

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, averaged over the posterior."""
        if self.classes is None:
            raise ValueError("This model predicts numbers: use predict(X, return_std=True).")
        return np.concatenate([self._probabilities(part) for part in self._chunks(X)])

    def predict_columns(self, columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Predictions for a table, given as a dict of columns, each a sequence of values.

        Returns a dict of columns: for numbers "prediction", "std", and (except for counts) "low" and "high", a 90 %
        interval; for classes "prediction", its "probability", and "p(label)" for each class.
        """
        X = self.encode(columns)
        if self.classes is None:
            mean, std = self.predict(X, return_std=True)
            half = self.about["interval"] * std if self.about.get("interval") else None
            limits = {} if half is None else {"low": mean - half, "high": mean + half}
            return {"prediction": mean, "std": std, **limits}
        labels, probabilities = np.array(self.about["labels"]), self.predict_proba(X)
        best = np.argmax(probabilities, axis=1)
        by_class = {f"p({label})": probabilities[:, place] for place, label in enumerate(labels)}
        return {"prediction": labels[best], "probability": probabilities[np.arange(len(best)), best], **by_class}

    def encode(self, columns: Mapping[str, Any]) -> np.ndarray:
        """The model's inputs from the columns of a table: numbers are standardised, categories become indicators."""
        if self.about.get("columns") is None:
            raise ValueError("This model was exported from an estimator, which takes arrays: use predict(X).")
        parts = [_encode(column, columns[column["name"]]) for column in self.about["columns"]]
        return np.concatenate(parts, axis=1)

    def _chunks(self, X: Any) -> Iterator[np.ndarray]:
        """The rows, a few at a time, checked and with the constant 1 in front."""
        X = np.asarray(X, float)
        if X.ndim != 2 or X.shape[1] != len(self.arrays["x_mean"]):
            raise ValueError(f"X has rows of {len(self.arrays['x_mean'])} numbers, got the shape {X.shape}.")
        if not np.all(np.isfinite(X)):
            raise ValueError("X has missing or infinite values, which need the library itself: fill them in first.")
        for begin in range(0, max(len(X), 1), ROWS):
            part = X[begin : begin + ROWS] - self.arrays["x_mean"]
            yield np.column_stack([np.ones(len(part)), part])

    def _scores(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of every row's scores, (N, K), and their covariance, (N, K, K), or their variances, (N, K)."""
        arrays = self.arrays
        mean = features @ arrays["w"]
        size = mean.shape[1]
        if "covariance" in arrays:  # of all weights, ravelled row by row of w
            blocks = arrays["covariance"].reshape(features.shape[1], size, features.shape[1], size)
            covariance = np.empty((len(features), size, size))
            for one in range(size):
                for two in range(one, size):
                    entry = np.sum((features @ blocks[:, one, :, two]) * features, axis=1)
                    covariance[:, one, two] = covariance[:, two, one] = entry
            return mean, covariance
        if "covariances" in arrays:  # of each score's weights, (K, D + 1, D + 1)
            return mean, np.stack(
                [np.sum((features @ own) * features, axis=1) for own in arrays["covariances"]], axis=1
            )
        variance = features**2 @ arrays["variances"]  # of every weight
        if "directions" not in arrays:
            return mean, variance
        # The data reduce the variance of the prior along a few directions, (rank, D + 1, K).
        along = np.einsum("nd,rdk->nrk", features, arrays["directions"])
        covariance = -np.einsum("nrk,nrl->nkl", along, along)
        covariance[:, np.arange(size), np.arange(size)] += variance
        return mean, covariance

    def _numbers(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the standard deviation of a new y."""
        mean, variance = (part.reshape(len(features)) for part in self._scores(features))
        if self.kind == "poisson":
            rate = np.exp(mean + 0.5 * variance)
            return rate, np.sqrt(rate + rate**2 * np.expm1(variance))
        return mean + self.about["y_mean"], np.sqrt(np.maximum(variance, 0.0) + self.about["noise"])

    def _probabilities(self, features: np.ndarray) -> np.ndarray:
        mean, covariance = self._scores(features)
        if self.kind == "logistic":
            points, weights = bent_points(mean[:, 0], np.sqrt(np.maximum(covariance.reshape(len(mean)), 0.0)))
            second = np.sum(weights * sigmoid(points), axis=0)
            modelled = np.column_stack([1 - second, second])
        else:
            noise = self.arrays["noise"]
            if covariance.ndim == 2:
                scores = mean + np.sqrt(np.maximum(covariance, 0.0)) * noise[:, None]
            else:
                scores = mean + np.moveaxis(root(covariance) @ noise.T, 2, 0)
            if "contrasts" in self.arrays:
                scores = scores @ self.arrays["contrasts"].T
            powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
            modelled = np.mean(powers / powers.sum(axis=-1, keepdims=True), axis=0)
        every = np.zeros((len(mean), len(self.classes)))
        every[:, self.arrays["modelled_classes"]] = modelled
        return every


def sigmoid(f: np.ndarray) -> np.ndarray:
    """1 / (1 + e⁻ᶠ)."""
    small = np.exp(-np.abs(f))
    return np.where(f >= 0, 1.0, small) / (1 + small)


def root(covariance: np.ndarray) -> np.ndarray:
    """The Cholesky factor of every matrix; a singular one gets a small multiple of its trace on the diagonal."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        if len(covariance) > 1:
            return np.concatenate([root(one[None]) for one in covariance])
    limits, size = np.finfo(float), covariance.shape[-1]
    jitter = 8 * size * limits.eps * np.trace(covariance[0]) + limits.tiny
    return np.linalg.cholesky(covariance + jitter * np.eye(size))


def bent_points(
    mean: np.ndarray, deviation: np.ndarray, order: int = 32, bend: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Points f and weights, (order, N), with which averages over N(mean, deviation²) of a logistic function are exact.

    They are Gauss–Hermite's, or where the deviation is large those of the trapezoidal rule in u, with df/du =
    (1/s + 1/(b cosh u))⁻¹, which are close to each other around the bend of the function at 0.
    """
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(order)
    f = mean + deviation * nodes[:, None]
    weights = np.broadcast_to((node_weights / node_weights.sum())[:, None], f.shape)
    is_wide = (deviation > 1.5 * bend) & (np.abs(mean) < 6.0 * deviation)
    if not np.any(is_wide):
        return f, weights
    s, m = np.where(is_wide, deviation, 2 * bend), np.where(is_wide, mean, 0.0)
    ratio = np.sqrt((s - bend) / (s + bend))
    far = s / np.sqrt(s**2 - bend**2) * 2 * np.arctanh(ratio)
    low, high = m / s - 6.5 - far, m / s + 6.5 + far
    u = low + (high - low) * np.linspace(0, 1, order)[:, None]
    half = np.tanh(0.5 * u)
    bent = s * (u - far * (0.5 * np.log((1 + ratio * half) / (1 - ratio * half))) / np.arctanh(ratio))
    slope = bend * s * (1 + half**2) / (s * (1 - half**2) + bend * (1 + half**2))
    density = np.exp(-0.5 * ((bent - m) / s) ** 2) / (math.sqrt(2 * math.pi) * s)
    bent_weights = density * slope * (high - low) / (order - 1)
    return np.where(is_wide, bent, f), np.where(is_wide, bent_weights, weights)


def _encode(column: Mapping[str, Any], values: Any) -> np.ndarray:
    """One column of a table as inputs: a standardised number, or an indicator for each level of a category."""
    values = np.atleast_1d(np.asarray(values))
    name = column["name"]
    if column["kind"] == "number":
        if values.dtype.kind == "M":  # days since 1970
            values = values.astype("datetime64[us]").astype(float) / 8.64e10
        try:
            numbers = values.astype(float)
        except ValueError:
            raise ValueError(f"Column {name!r} had numbers in training, and has text here.") from None
        if not np.all(np.isfinite(numbers)):
            raise ValueError(f"Column {name!r} has missing values, which need the library itself: fill them in first.")
        return ((numbers - column["mean"]) / column["std"])[:, None]
    labels = [_label(value) for value in values.tolist()]
    if "" in labels and not column["missing"]:
        raise ValueError(f"Column {name!r} has missing values, which need the library itself: fill them in first.")
    return np.array([[float(label == level) for level in column["levels"]] for label in labels])


def _label(value: Any) -> str:
    """A value of a category as text; the empty string for a missing one."""
    if value is None or value != value or str(value) in ("", "nan", "<NA>"):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)
