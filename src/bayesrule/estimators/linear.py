"""Generalised linear models with a posterior over their weights: logistic and Poisson regression."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import validate_data

from ..families.gaussian.full import Gaussian
from ..fitting.empirical_bayes import Evidence, matched
from ..fitting.result import Result
from ..models import regression
from ..numerics.padding import bucket, column_bucket, pad
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..objectives.regularizers import as_regularizer
from ..recipes import laplace
from ..rule.rule import Rule
from .base import Estimator, Explain, double, kept, key_of
from .named_recipes import NARROW, linear_rule
from .preprocessing import codes, weights
from .ridge import RidgeRegression

_ROUGH = 1e-2  # nats, where Laplace's method only leads the way
_SOME = 20_000  # rows that go ahead where there are many more


class _Linear(Estimator):
    """What logistic and Poisson regression share: a Gaussian posterior, its prior's strength by the bound."""

    _kind: ClassVar[str]
    posterior_: Any
    n_features_in_: int

    def __init__(
        self,
        *,
        recipe: Any = "auto",
        prior_precision: Any = "auto",
        fit_intercept: bool = True,
        max_iter: int = 100,
        tol: float = 1e-6,
        batch_size: int | None = None,
        random_state: Any = None,
    ):
        self.recipe = recipe
        self.prior_precision = prior_precision
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.random_state = random_state

    def _rule(self, outputs: int | None, X: np.ndarray) -> Rule:
        return linear_rule(self.recipe, 1 if outputs is None else outputs, self._steps(len(X)), self, X.shape)

    def _steps(self, rows: int) -> int:
        return self.max_iter if self.batch_size is None else self.max_iter * -(-rows // self.batch_size)

    def _learn(self, X: np.ndarray, y: np.ndarray, counts: np.ndarray, start: Any) -> Self:
        """From the start, with the prior's strength found on the way or given."""
        outputs = start["w"].shape[1] if start["w"].ndim == 2 else None
        rule, features = self._rule(outputs, X), X.shape[1]
        # Empty columns change nothing (their weights stay at the prior), and save compiling for every width.
        wide = column_bucket(features) if isinstance(self.recipe, str) else features
        start = {**start, "w": pad(start["w"], wide)}
        objective = regression.regression(self._kind, counts.sum(), intercept=self.fit_intercept)
        prior = regression.strength if self.fit_intercept else regression.strength_alone
        data = _data(X, y, counts, wide)
        full = rule.family.kind is Gaussian
        precision, result = self._given_precision(), None
        if precision is None:
            found, done = self._strength(rule, objective, prior, start, data, X, y, counts)
            precision, result = float(found.hyper["w"]), found.result if done else None
            start = found.result.q if full else start
        here = dataclasses.replace(objective, regularizer=as_regularizer(prior({"w": precision}), None))
        if result is None and self._given_precision() is not None and full and not rule.points.delta:
            # Averages over q are slow far from their end: Laplace's method leads.
            start = self._run(laplace(), here, start, data, steps=50, tolerance=_ROUGH).q
        if result is None:
            result = self._taken(rule, here, start, data, len(X))
        self.prior_precision_ = precision
        self._keep(result, features)
        self.bound_ = None if result.bound is None else float(result.bound)
        return self

    def _strength(
        self,
        rule: Rule,
        objective: Objective,
        prior: Any,
        start: Any,
        data: Weighted,
        X: np.ndarray,
        y: np.ndarray,
        counts: np.ndarray,
    ) -> tuple[Evidence, bool]:
        """α by the evidence, and whether the fit at it is the rule's own, so that nothing is left to do.

        With several outputs a step is dear, with samples there is no bound, and of very many rows a few settle it: then
        α is that of Laplace's evidence.
        """
        some = _some(len(X))
        many = len(X) > max(NARROW * X.shape[1], 10 * _SOME) and bool(counts[some].sum() > 0)
        own = rule.family.kind is Gaussian and not rule.points.random and self.batch_size is None and not many
        own = own and (rule.points.delta or start["w"].ndim == 1)
        hyper: Any = {"w": 1.0, "unit": _unit(X[some], counts[some])}
        options: Any = {"run": self._run, "belief": regression.wide, "held": ("unit",)}
        last: Any = {"steps": self.max_iter, "tolerance": self.tol}
        if own and rule.points.delta:
            return matched(rule, objective, prior, hyper, start, data, **options, **last), True
        seen = data
        if many:
            each = counts[some] * (counts.sum() / counts[some].sum())
            seen = _data(X[some], y[some], each, start["w"].shape[0])
        led = matched(laplace(), objective, prior, hyper, start, seen, tolerance=_ROUGH, **options)
        if not own:
            return led, False
        return matched(rule, objective, prior, led.hyper, led.result.q, data, **options, **last), True

    def _given_precision(self) -> float | None:
        if isinstance(self.prior_precision, str) and self.prior_precision == "auto":
            return None
        precision = float(self.prior_precision)
        if not 0 <= precision < float("inf"):
            raise ValueError(f'prior_precision is "auto" or a number that is not negative, got {precision}.')
        return precision

    def _taken(self, rule: Rule, objective: Objective, start: Any, data: Weighted, rows: int) -> Result:
        """The fit itself, in mini-batches if there is a batch size below the number of rows."""
        if self.batch_size is None or self.batch_size >= rows:
            deterministic = not rule.points.random
            return self._run(
                rule,
                objective,
                start,
                data,
                steps=self.max_iter,
                tolerance=self.tol if deterministic else None,
                key=key_of(self.random_state),
            )
        data = jax.tree.map(lambda x: x[:rows], dataclasses.replace(data, count=None))
        data = dataclasses.replace(data, count=data.weights.sum())
        key, batch = key_of(self.random_state), self.batch_size
        return self._run(rule, objective, start, data, steps=self._steps(rows), batch_size=batch, key=key)

    def _keep(self, result: Result, features: int) -> None:
        if result.reason in ("not finite", "left the domain"):
            raise ValueError(
                f"The fit ended early ({result.reason}): are the features on very different scales? Put a "
                "StandardScaler before the model."
            )
        self.posterior_ = kept(regression.narrowed(result.q, features))
        self.n_iter_ = result.steps
        self.coef_ = np.asarray(self.posterior_.mean["w"]).T
        self.intercept_ = np.asarray(self.posterior_.mean.get("b", np.zeros(self.coef_.shape[:-1])))

    def with_posterior(self, q: Any) -> Self:
        """A copy that predicts from another posterior: how a fit that goes on would do now."""
        other = copy.copy(self)
        other.posterior_ = kept(regression.narrowed(q, self.n_features_in_))
        return other

    def _stream(self, X: np.ndarray, y: np.ndarray, counts: np.ndarray) -> Self:
        """More data: what was the posterior is the prior now."""
        prior = jax.tree.map(jnp.asarray, self.posterior_)
        objective = regression.regression(self._kind, counts.sum(), intercept=self.fit_intercept)
        objective = dataclasses.replace(objective, regularizer=as_regularizer(None, prior))
        outputs = self.coef_.shape[0] if self.coef_.ndim == 2 else None
        before = self.bound_
        result = self._taken(self._rule(outputs, X), objective, prior, _data(X, y, counts, X.shape[1]), len(X))
        self._keep(result, X.shape[1])
        self.bound_ = None if result.bound is None or before is None else before + float(result.bound)
        return self

    def _predictive(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """The mean and the variance of y."""
        return regression.in_blocks(regression.predictive, self.posterior_, X, self._kind)


def _some(rows: int) -> Any:
    """A few rows, evenly chosen: all of them if there are few."""
    return slice(None) if rows <= _SOME else np.sort(np.random.default_rng(0).permutation(rows)[:_SOME])


def _unit(X: np.ndarray, counts: np.ndarray) -> float:
    """The weight that moves f by 1 where a feature moves by its deviation: one for all features."""
    mean = np.average(X, axis=0, weights=counts)
    spread = float(np.sqrt(np.mean(np.average((X - mean) ** 2, axis=0, weights=counts))))
    return 1 / spread if spread > 0 else 1.0


def _data(X: np.ndarray, y: np.ndarray, counts: np.ndarray, wide: int) -> Weighted:
    """Padded, with no weight for what is not there."""
    rows = bucket(len(X))
    return Weighted((pad(X, rows, wide), pad(y, rows)), jnp.asarray(pad(counts, rows)), counts.sum())


class LogisticRegression(ClassifierMixin, _Linear):
    r"""Classes by a linear model, with a Gaussian posterior over its weights and probabilities averaged over it.

    $p(y = 1 \mid x) = σ(w^⊤x + b)$ with $w ∼ N(0, 1/α)$ and a flat prior on b; for K classes the softmax of K scores
    that sum to zero. α is chosen by the bound on the evidence (and a weak belief that no weight is huge, where classes
    can be separated) unless `prior_precision` gives it.

    `recipe` is "auto" (variational inference, "von": by quadrature for two classes, by quasi-Monte Carlo for more, with
    the α of Laplace's evidence; "laplace" for more than 1000 rows a feature, from 200,000 on with the α of 20,000 of
    them), another name ("newton", "ogn", "vogn", "ivon", "adam", "sgd", …), or any rule: `recipe=blr.vogn(1e-2)`.
    `max_iter` counts steps, or passes where there is a `batch_size`. `class_weight` is as in scikit-learn.
    `partial_fit` takes the posterior as the prior for what comes next.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression().fit(X, y)
    >>> model.predict_proba(X[[70]]).round(2), round(model.prior_precision_, 3)
    (array([[0.  , 0.43, 0.57]]), 0.075)
    """

    model = "linear"
    tasks = ("binary", "classes")
    title = "Bayesian logistic regression"
    explain = Explain("coefficients", influence="logistic")

    def __init__(
        self,
        *,
        recipe: Any = "auto",
        prior_precision: Any = "auto",
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 100,
        tol: float = 1e-6,
        batch_size: int | None = None,
        random_state: Any = None,
    ):
        super().__init__(
            recipe=recipe,
            prior_precision=prior_precision,
            fit_intercept=fit_intercept,
            max_iter=max_iter,
            tol=tol,
            batch_size=batch_size,
            random_state=random_state,
        )
        self.class_weight = class_weight

    @property
    def _kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # it depends on the classes
        return "logistic" if len(self.classes_) == 2 else "softmax"

    @double
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn the weights' posterior."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        self.classes_, labels = codes(y)
        return self._labelled(X, labels, sample_weight, first=True)

    @double
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go on with more data; `classes` lists all of them at the first call, where some may be missing from y."""
        first = not hasattr(self, "posterior_")
        X, y = validate_data(self, X, y, dtype=np.float64, reset=first)
        self.classes_, labels = codes(y, classes if first else self.classes_)
        return self._labelled(X, labels, sample_weight, first=first)

    def _labelled(self, X: np.ndarray, labels: np.ndarray, sample_weight: Any, *, first: bool) -> Self:
        counts = weights(X, sample_weight, self.class_weight, self.classes_, labels)
        several = len(self.classes_) - 1 if len(self.classes_) > 2 else None
        labels = labels if several else labels.astype(float)
        if not first:
            return self._stream(X, labels, counts)
        return self._learn(X, labels, counts, regression.zeros(X.shape[1], several, intercept=self.fit_intercept))

    @double
    def predict_proba(self, X: Any) -> np.ndarray:
        """Every class's probability, averaged over the posterior."""
        mean, _ = self._predictive(self._validate(X))
        return np.column_stack([1 - mean, mean]) if mean.ndim == 1 else mean

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]

    @double
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the classes, (n_samples, rows); within a draw all rows have the same weights."""
        first, second = jax.random.split(key_of(random_state))
        X = self._validate(X)
        f = regression.drawn(self.posterior_, X, n_samples, first)
        scores = jnp.stack([jnp.zeros(f.shape), f], axis=-1) if self._kind == "logistic" else regression.classes(f)
        return self.classes_[np.asarray(jax.random.categorical(second, scores))]


class PoissonRegression(RegressorMixin, _Linear):
    r"""Counts by a log-linear model: $y ∼ \mathrm{Poisson}(e^{w^⊤x + b})$, $w ∼ N(0, 1/α)$, b flat.

    α is chosen by the bound on the evidence unless `prior_precision` gives it. Other parameters are as for
    `LogisticRegression`.

    >>> X, y = [[0.0], [1.0], [2.0], [3.0]], [1, 1, 4, 9]
    >>> mean, std = PoissonRegression(prior_precision=0.1).fit(X, y).predict([[2.0], [4.0]], return_std=True)
    >>> mean.round(1), std.round(1)
    (array([ 3.6, 24.5]), array([ 2.2, 15.1]))
    """

    model = "linear"
    tasks = ("counts",)
    title = "Bayesian Poisson regression"
    explain = Explain("coefficients", influence="poisson")
    _kind = "poisson"

    @double
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn the weights' posterior."""
        X, y = self._counted(X, y, reset=True)
        return self._first(X, y, weights(X, sample_weight))

    def _first(self, X: np.ndarray, y: np.ndarray, counts: np.ndarray) -> Self:
        start = regression.zeros(X.shape[1], intercept=self.fit_intercept)
        if self.fit_intercept:  # or the first step's e^f would be far off
            start["b"] = jnp.log(max(float(np.average(y, weights=counts)), 1e-3))
        return self._learn(X, y, counts, start)

    def _counted(self, X: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=reset)
        y = np.asarray(y, float)
        if not np.any(y):
            raise ValueError("Every count is 0: there is nothing to learn from.")
        if np.any(y < 0):
            raise ValueError(f"Counts are not negative, and y has {y.min():.6g}: RidgeRegression takes any numbers.")
        return X, y

    @double
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Go on with more data: the posterior is the prior for it."""
        first = not hasattr(self, "posterior_")
        X, y = self._counted(X, y, reset=first)
        counts = weights(X, sample_weight)
        return self._first(X, y, counts) if first else self._stream(X, y, counts)

    @double
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The expected count, and with `return_std` the standard deviation of a count."""
        mean, variance = self._predictive(self._validate(X))
        return (mean, np.sqrt(variance)) if return_std else mean

    @double
    def log_predictive(self, X: Any, y: Any) -> np.ndarray:
        """log p(y | x) of every row, averaged over the posterior."""
        X = self._validate(X)
        return np.asarray(regression.log_predictive(self.posterior_, X, np.asarray(y, float), "poisson"))

    @double
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the counts, (n_samples, rows); within a draw all rows have the same weights."""
        first, second = jax.random.split(key_of(random_state))
        X = self._validate(X)
        f = regression.drawn(self.posterior_, X, n_samples, first)
        return np.asarray(jax.random.poisson(second, jnp.exp(f)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


__all__ = ["LogisticRegression", "PoissonRegression", "RidgeRegression"]
