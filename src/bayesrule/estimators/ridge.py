"""Ridge regression with its exact posterior; the prior's precision and the noise maximise the exact evidence."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from ..families.base import Family
from ..fitting.maximize import maximize
from ..models import regression, ridge, row_space
from ..numerics.checks import positive_number
from ..numerics.padding import bucket, column_bucket, pad
from ..objectives.batches import Weighted
from ..recipes import newton
from ..rule.rule import Rule
from .base import (
    Estimator,
    Explain,
    as_dense,
    double_precision,
    in_dtype_of_inputs,
    input_dtype,
    make_key,
    row_by_row,
    to_numpy,
)
from .export import ExportsNumpy
from .named_recipes import linear_rule
from .preprocessing import example_weights
from .training_rows import Examples, RowsInMemory, TrainingRows, as_data, dask_examples, is_dask

_LARGEST_FACTOR = 1e26  # The noise is found down to 10⁻¹³ standard deviations of y, where its arithmetic ends.
_LARGEST_CONDITION = 1e13  # of the posterior's precision, where data leave a combination of weights to the prior
_EXACT = ("auto", "conjugate", "newton", "laplace", "von")  # By all of these, one Newton step gives the posterior.


class RidgeRegression(RegressorMixin, ExportsNumpy, Estimator):
    r"""Bayesian ridge regression: $y ∼ N(w^⊤x + b, σ^2)$ with $w ∼ N(0, 1/α)$ and a flat prior on b.

    The posterior is exact: one Newton step on R of a QR decomposition of the data. `partial_fit` adds rows to R, so
    that its posterior is that of `fit` on all rows.

    Parameters
    ----------
    recipe : str or Rule, default="auto"
        "auto" is the exact posterior. Another name of `LogisticRegression`, or a rule such as `blr.vogn(1e-2)`, takes
        `max_iter` steps on the rows instead, all of which it needs at once: `partial_fit` raises at a second call.
    prior_precision : float or "auto", default="auto"
        α, in the units of X and y; "auto" maximises the exact evidence, where α is the precision for columns divided by
        their standard deviations, so that the units of columns do not matter.
    noise : float or "auto", default="auto"
        σ²; "auto" maximises the exact evidence.
    fit_intercept : bool, default=True
        Whether the model has b.
    max_iter : int, default=100
        The number of steps of another `recipe`.
    random_state : int, RandomState or None, default=None
        The seed of another `recipe`.

    Attributes
    ----------
    posterior_ : a Gaussian over {"b", "w"} for inputs and targets from which `x_mean_` and `y_mean_` are subtracted;
        there b and w are independent. With at least 100 columns and twice as many as rows it is a `LowRankGaussian`.
    coef_, intercept_ : the posterior means of w, (D,), and b, a number, for inputs and targets as they are. They are
        copies: predictions are made from `posterior_`.
    prior_precision_, noise_ : α and σ². The prior precision of `coef_[j]` is `prior_precision_ * x_scale_[j]**2`.
    x_scale_ : the standard deviations of the columns; ones for a `prior_precision` that was given.
    degrees_of_freedom_ : those of a Student-t distribution for a new y, with the mean and the scale that
        `predict(return_std=True)` returns. It is wider than a normal distribution because α and σ² are learnt from few
        rows; infinite where both are given.
    log_evidence_ : the exact log evidence.
    triangle_, n_samples_seen_ : R and the sum of the weights, to which `partial_fit` adds.
    n_iter_ : the number of steps.

    Examples
    --------
    >>> X, y = [[0.0], [1.0], [2.0], [3.0]], [0.1, 0.9, 2.2, 2.8]
    >>> model = RidgeRegression().fit(X, y)
    >>> mean, std = model.predict([[1.5], [6.0]], return_std=True)
    >>> mean.round(2), std.round(2), round(model.log_evidence_, 2)
    (array([1.5 , 5.69]), array([0.23, 0.46]), -2.56)
    """

    model = "linear"
    tasks = ("regression",)
    title = "Bayesian linear regression"
    explain = Explain("coefficients", influence="normal")
    posterior_: Any
    n_features_in_: int

    def __init__(
        self,
        *,
        recipe: Any = "auto",
        prior_precision: Any = "auto",
        noise: Any = "auto",
        fit_intercept: bool = True,
        max_iter: int = 100,
        random_state: Any = None,
    ):
        self.recipe = recipe
        self.prior_precision = prior_precision
        self.noise = noise
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior of the weights."""
        if hasattr(self, "triangle_"):
            del self.triangle_
        return self.partial_fit(X, y, sample_weight)

    @double_precision
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior given these rows and those of all earlier calls."""
        first = not hasattr(self, "triangle_")
        exact = isinstance(self.recipe, str) and self.recipe in _EXACT
        if not (first or exact):
            raise ValueError(
                "partial_fit keeps a summary of the rows of earlier calls (R of a QR decomposition), and steps of "
                f"recipe={self.recipe!r} need the rows themselves, so that it would forget the earlier ones: use "
                'recipe="auto", the exact posterior, or call fit with all rows.'
            )
        rule = None if exact else linear_rule(self.recipe, 1, self.max_iter, self)
        dtype = input_dtype(X)
        rows = self._training_rows(X, y, sample_weight, reset=first)
        reduced = rows.reduce(_reduce_examples, ridge.merge_rows, bool(self.fit_intercept))
        if not first:
            before = ridge.Rows(self.n_samples_seen_, np.append(self.x_mean_, self.y_mean_), self.triangle_)
            reduced = ridge.merge_rows(before, reduced)
        self.n_samples_seen_, self.triangle_ = reduced.size, reduced.triangle
        self.x_mean_, self.y_mean_ = reduced.center[:-1], float(reduced.center[-1])
        self._solve()
        if rule is not None:
            self._fit_by(rule, rows)
        coef = np.asarray(self.posterior_.mean["w"], float)
        self.intercept_ = float(self.posterior_.mean.get("b", 0.0)) + self.y_mean_ - float(self.x_mean_ @ coef)
        self.coef_ = coef.astype(dtype)
        return self

    def _training_rows(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> TrainingRows:
        if is_dask(X):
            return dask_examples(self, X, y, sample_weight, numeric=True, reset=reset)
        X, y = validate_data(self, X, y, accept_sparse=["csr", "csc"], dtype=np.float64, y_numeric=True, reset=reset)
        X = as_dense(X)
        return RowsInMemory(Examples(X, np.asarray(y, float), example_weights(X, sample_weight)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    @property
    def _prior(self) -> Any:
        """The regularizer as a function of the hyper-parameters."""
        return regression.weight_precision if self.fit_intercept else regression.weight_precision_only

    def _target_scale(self) -> float:
        """The standard deviation of y, the unit in which the hyper-parameters are searched."""
        y = self.triangle_[:, -1]
        deviation = math.sqrt(float(y @ y) / self.n_samples_seen_)
        return deviation if deviation > 1e-10 * abs(self.y_mean_) else max(abs(self.y_mean_), 1.0)

    def _column_scales(self) -> np.ndarray:
        """The standard deviation of each column, the unit of learnt strengths; 1 for a column that does not vary."""
        deviation = np.sqrt(np.sum(self.triangle_[:, :-1] ** 2, axis=0) / self.n_samples_seen_)
        return np.where(deviation > 1e-12 * np.abs(self.x_mean_), deviation, 1.0)

    def _solve(self) -> None:
        """Choose α and β = 1/σ² by the evidence, and compute the posterior at them.

        A learnt α is the same for all columns in units of their standard deviations, so that predictions do not depend
        on the units of columns. The evidence is a function of singular values, and needs no further pass over the rows.
        """
        given_precision = _positive_or_auto("prior_precision", self.prior_precision)
        given_noise = _positive_or_auto("noise", self.noise)
        features, scale = self.n_features_in_, self._target_scale()
        self.x_scale_ = self._column_scales() if given_precision is None else np.ones(features)
        units = np.concatenate([[1.0], self.x_scale_, [scale]])
        triangle = np.column_stack([np.zeros(len(self.triangle_)), self.triangle_]) / units  # intercept, x, y
        hyper: Any = {
            "w": 1.0 if given_precision is None else given_precision * scale**2,
            "noise": 1.0 if given_noise is None else scale**2 / given_noise,
        }
        held = ("w",) * (given_precision is not None) + ("noise",) * (given_noise is not None)
        parts = ridge.decompose(triangle[:, 1:-1], triangle[:, -1])
        spectrum = parts.spectrum(self.n_samples_seen_ - bool(self.fit_intercept))
        if len(held) < 2:
            score = lambda log_hyper: ridge.log_evidence(log_hyper, spectrum)
            hyper = maximize(score, hyper, within=_LARGEST_FACTOR, held=held, relative_gain=1e-15).hyper
        largest = float(np.max(parts.values, initial=0.0)) ** 2
        if given_noise is None and not parts.is_full_rank and largest > 0:
            # Where the columns do not determine all weights, they may explain y without any noise, and the evidence
            # rises or stays the same as the noise goes to 0. It stays so large that the prior is not lost in rounding.
            hyper["noise"] = min(float(hyper["noise"]), _LARGEST_CONDITION * float(hyper["w"]) / largest)
        basis = None
        if row_space.is_wide(len(triangle), features) and largest > 0:
            # In the coordinates of the space of the rows there are fewer weights than columns.
            basis = parts.right[parts.values > 0]
            triangle = np.column_stack([triangle[:, :1], triangle[:, 1:-1] @ basis.T, triangle[:, -1:]])
            features = len(basis)
        if self.fit_intercept:  # Around the means the intercept is independent of the weights: a row of its own.
            triangle = np.vstack([np.eye(1, features + 2) * math.sqrt(self.n_samples_seen_), triangle])
        rows, padded_features = bucket(len(triangle)), column_bucket(features)
        examples = pad(triangle[:, :-1], rows, padded_features + 1), pad(triangle[:, -1], rows)
        noise_precision = float(hyper["noise"])
        known = {"w": float(hyper["w"]), "noise": noise_precision}
        self.degrees_of_freedom_ = ridge.degrees_of_freedom(known, spectrum, held)
        # One step from anywhere gives the posterior. From its mean, rounding errors of an ill-conditioned precision do
        # not enter the mean.
        mean = parts.weights(float(hyper["w"]) / noise_precision)
        mean = pad(mean if basis is None else basis @ mean, padded_features)
        start = {**regression.zeros(padded_features, intercept=self.fit_intercept), "w": mean}
        objective = ridge.ridge(rows, self._prior({"w": np.asarray(hyper["w"], float)}))
        data: Any = Weighted(examples, np.full(rows, noise_precision))
        result = self._run(newton(), objective, start, data, steps=1)
        self.prior_precision_, self.noise_ = float(hyper["w"]) / scale**2, scale**2 / noise_precision
        q = regression.without_padding(result.q, features)
        self._set_posterior(q if basis is None else row_space.lift(q, basis, float(hyper["w"])), scale)
        constant = self.n_samples_seen_ * (0.5 * math.log(noise_precision / (2 * math.pi)) - math.log(scale))
        self.log_evidence_ = float(result.bound or 0.0) + constant
        self.n_iter_ = 1

    def _fit_by(self, rule: Rule, rows: TrainingRows) -> None:
        """Fit the posterior by another algorithm, on the rows themselves, at the hyper-parameters of the evidence."""
        scale = self._target_scale()
        hyper = {"w": self.prior_precision_ * scale**2}
        units = {"x_mean": self.x_mean_, "x_scale": self.x_scale_, "y_mean": self.y_mean_, "y_scale": scale}
        scaled = rows.map(_scaled_examples, units, scale**2 / self.noise_, float(self.fit_intercept))
        data = as_data(scaled, bucket, rows.rows, float(rows.rows))
        start = regression.zeros(self.n_features_in_, intercept=self.fit_intercept)
        objective = ridge.ridge(rows.rows, self._prior(hyper))
        result = self._run(rule, objective, start, data, steps=self.max_iter, key=make_key(self.random_state))
        self.n_iter_ = result.steps
        self._set_posterior(regression.without_padding(result.q, self.n_features_in_), scale)

    def _set_posterior(self, q: Family, scale: float) -> None:
        """Set `posterior_`: q in the units of X and y."""
        self.posterior_ = to_numpy(regression.in_units_of_columns(regression.rescaled(q, scale), self.x_scale_))

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of a new y, and with `return_std` its standard deviation, with the noise in it.

        The standard deviation is that for α and σ² as they were learnt. `metrics.interval(mean, std,
        degrees_of_freedom=model.degrees_of_freedom_)` also has their uncertainty in it, which matters for few rows.
        """
        X = self._validate(X)
        mean, variance = regression.map_rows(regression.outputs, self.posterior_, X - self.x_mean_)
        mean = mean + self.y_mean_
        return (mean, np.sqrt(variance + self.noise_)) if return_std else mean

    @double_precision
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y, (n_samples, rows); within a draw all rows have the same weights."""
        weight_key, noise_key = jax.random.split(make_key(random_state))
        X = self._validate(X)
        f = self.y_mean_ + regression.draw_scores(self.posterior_, X - self.x_mean_, n_samples, weight_key)
        return np.asarray(f + math.sqrt(self.noise_) * jax.random.normal(noise_key, f.shape))


def _reduce_examples(part: Examples, centered: bool) -> ridge.Rows | None:
    """The sufficient statistics of a part; None where none of its rows has a weight above 0."""
    return ridge.reduce_rows(*part, centered=centered) if np.any(part.weights > 0) else None


def _scaled_examples(part: Examples, units: dict[str, Any], precision: float, constant: float) -> Weighted:
    """Rows ((c, x), y) around their means and in units of their scales, with their noise's precisions as weights."""
    x, y = (part.x - units["x_mean"]) / units["x_scale"], (part.y - units["y_mean"]) / units["y_scale"]
    inputs = np.column_stack([np.full(len(x), constant), x])
    return Weighted((inputs, y), part.weights * precision, len(x))


def _positive_or_auto(name: str, value: Any) -> float | None:
    """The value of a parameter as a positive number; None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    return positive_number(name, value, alternatives='"auto"')
