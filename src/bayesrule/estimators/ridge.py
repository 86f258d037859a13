"""Ridge regression with a posterior over its weights, the prior's strength and the noise by the evidence."""

from __future__ import annotations

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from ..fitting.conjugate_evidence import conjugate_evidence, likelihood_message
from ..models import regression, ridge
from ..numerics.checks import positive_number
from ..numerics.padding import bucket, column_bucket, pad
from ..objectives.batches import Weighted
from ..objectives.regularizers import as_regularizer
from ..recipes import newton
from ..rule.rule import Rule
from .base import Estimator, Explain, double, kept, key_of
from .named_recipes import linear_rule
from .preprocessing import weights

_EXACT = ("auto", "conjugate", "newton", "laplace", "von")  # one Newton step is the posterior


class RidgeRegression(RegressorMixin, Estimator):
    r"""Bayesian ridge regression: $y ∼ N(w^⊤x + b, σ^2)$ with $w ∼ N(0, 1/α)$ and a flat prior on b.

    α and σ² maximise the evidence, which is exact here, unless `prior_precision` and `noise` (σ²) give them. The
    posterior is one Newton step, on R of a QR decomposition of the data: `partial_fit` adds rows to R, and its answer
    is that of `fit` on all of them. `posterior_` is over w and b around the means `x_mean_` and `y_mean_`, where they
    are independent; `coef_` and `intercept_` are not. Another `recipe` (a name, or a rule such as `blr.vogn(1e-2)`)
    takes `max_iter` steps on the rows themselves.

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
        """Learn the weights' posterior."""
        if hasattr(self, "triangle_"):
            del self.triangle_
        return self.partial_fit(X, y, sample_weight)

    @double
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows and all that came before."""
        first = not hasattr(self, "triangle_")
        exact = isinstance(self.recipe, str) and self.recipe in _EXACT
        rule = None if exact else linear_rule(self.recipe, 1, self.max_iter, self)
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=first)
        y, counts = np.asarray(y, float), weights(X, sample_weight)
        before = (
            None if first else ridge.Rows(self.n_samples_seen_, np.append(self.x_mean_, self.y_mean_), self.triangle_)
        )
        rows = ridge.rows_of(X, y, counts, before, centered=bool(self.fit_intercept))
        self.n_samples_seen_, self.triangle_ = rows.size, rows.triangle
        self.x_mean_, self.y_mean_ = rows.mean[:-1], float(rows.mean[-1])
        self._solve()
        if rule is not None:
            self._step(rule, X, y, counts)
        self.coef_ = np.asarray(self.posterior_.mean["w"])
        self.intercept_ = float(self.posterior_.mean.get("b", 0.0)) + self.y_mean_ - float(self.x_mean_ @ self.coef_)
        return self

    @property
    def _prior(self) -> Any:
        return regression.strength if self.fit_intercept else regression.strength_alone

    def _scale(self) -> float:
        """The deviation of y: the unit that the numbers are searched in."""
        y = self.triangle_[:, -1]
        spread = math.sqrt(float(y @ y) / self.n_samples_seen_)
        return spread if spread > 1e-10 * abs(self.y_mean_) else max(abs(self.y_mean_), 1.0)

    def _solve(self) -> None:
        """α and β = 1/σ² by the evidence, from the message of unit noise, and the posterior: one Newton step."""
        scale, features = self._scale(), self.n_features_in_
        triangle = np.column_stack([np.zeros(len(self.triangle_)), self.triangle_])  # (c, x, y)
        triangle[:, -1] /= scale
        if self.fit_intercept:  # around the means it has nothing to do with the weights
            triangle = np.vstack([np.eye(1, features + 2) * math.sqrt(self.n_samples_seen_), triangle])
        rows, wide = bucket(len(triangle)), column_bucket(features)
        examples = pad(triangle[:, :-1], rows, wide + 1), pad(triangle[:, -1], rows)
        strength, noise = _number(self.prior_precision, "prior_precision"), _number(self.noise, "noise")
        hyper = {
            "w": 1.0 if strength is None else strength * scale**2,
            "noise": 1.0 if noise is None else scale**2 / noise,
        }
        held = ("w",) * (strength is not None) + ("noise",) * (noise is not None)
        start = regression.zeros(wide, intercept=self.fit_intercept)
        regularizer = as_regularizer(self._prior(hyper), None)
        result = self._run(newton(), ridge.ridge(rows, regularizer), start, Weighted(examples, jnp.ones(rows)), steps=1)
        if len(held) < 2:
            said = likelihood_message(regularizer, result.q), self.n_samples_seen_, triangle[:, -1] @ triangle[:, -1]
            hyper, _ = conjugate_evidence(self._prior, hyper, result.q, said, ridge.noisy, held=held)
        precision = float(hyper["noise"])
        objective = ridge.ridge(rows, self._prior(hyper))
        data = Weighted(examples, jnp.full(rows, precision))
        result = self._run(newton(), objective, result.q, data, steps=1)
        self.prior_precision_, self.noise_ = float(hyper["w"]) / scale**2, scale**2 / precision
        self._keep(result.q, scale)
        constant = self.n_samples_seen_ * (0.5 * math.log(precision / (2 * math.pi)) - math.log(scale))
        self.log_evidence_ = float(result.bound or 0.0) + constant
        self.n_iter_ = 1

    def _step(self, rule: Rule, X: np.ndarray, y: np.ndarray, counts: np.ndarray) -> None:
        """Another algorithm, on the rows as they are."""
        scale = self._scale()
        hyper = {"w": self.prior_precision_ * scale**2}
        ones = np.full(len(X), float(self.fit_intercept))
        rows = pad(np.column_stack([ones, X - self.x_mean_]), bucket(len(X)))
        each = jnp.asarray(pad(counts * scale**2 / self.noise_, len(rows)))
        data = Weighted((rows, pad((y - self.y_mean_) / scale, len(rows))), each)
        start = regression.zeros(X.shape[1], intercept=self.fit_intercept)
        objective = ridge.ridge(len(rows), self._prior(hyper))
        result = self._run(rule, objective, start, data, steps=self.max_iter, key=key_of(self.random_state))
        self.n_iter_ = result.steps
        self._keep(result.q, scale)

    def _keep(self, q: Any, scale: float) -> None:
        self.posterior_ = kept(regression.rescaled(regression.narrowed(q, self.n_features_in_), scale))

    @double
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The expected y, and with `return_std` the standard deviation of a new one, its noise included."""
        X = self._validate(X)
        mean, variance = regression.in_blocks(regression.outputs, self.posterior_, X - self.x_mean_)
        mean = mean + self.y_mean_
        return (mean, np.sqrt(variance + self.noise_)) if return_std else mean

    @double
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y, (n_samples, rows); within a draw all rows have the same weights."""
        first, second = jax.random.split(key_of(random_state))
        X = self._validate(X)
        f = self.y_mean_ + regression.drawn(self.posterior_, X - self.x_mean_, n_samples, first)
        return np.asarray(f + math.sqrt(self.noise_) * jax.random.normal(second, f.shape))


def _number(value: Any, name: str) -> float | None:
    if isinstance(value, str) and value == "auto":
        return None
    return positive_number(name, value, alternatives='"auto"')
