"""Generalised linear models with a posterior over their weights: logistic and Poisson regression."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from functools import cache
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import validate_data

from ..families.base import Family
from ..families.gaussian.block_diagonal import BlockDiagonalGaussian
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.fixed import FixedGaussian
from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..fitting.empirical_bayes import Evidence, empirical_bayes
from ..fitting.result import Result
from ..models import regression, row_space
from ..numerics.padding import coarse_bucket, column_bucket, pad
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..objectives.regularizers import as_regularizer
from ..points.base import Delta
from ..recipes import laplace
from ..rule.rule import Rule
from ..steps.guards import Backtracking
from ..steps.steps import Steps
from .base import (
    Classifier,
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
from .named_recipes import CONCENTRATED, MANY_STEPS, has_many_weights, linear_rule
from .preprocessing import (
    Labels,
    Moments,
    check_classes,
    check_total_weight,
    class_weights,
    example_weights,
    labels_of,
    merge_labels,
    merge_moments,
    moments_of,
)
from .ridge import RidgeRegression
from .training_rows import Examples, RowsInMemory, TrainingRows, as_data, dask_examples, in_memory, is_dask

_ROUGH_TOLERANCE = 1e-2  # Nats, for fits by Laplace's method that only provide the start of another fit.
_BY_CLASS_TOLERANCE = 0.5  # The same for the thousands of weights of a posterior by class,
_BY_CLASS_STEPS, _BY_CLASS_ROUNDS = 4, 5  # whose α is chosen in so many rounds of so many steps.
_SUBSET_ROWS = 20_000  # Of very many rows, a subset of this size determines the prior's precision.


class _LinearModel(ExportsNumpy, Estimator):
    """Logistic and Poisson regression: a posterior over the weights, and the prior's precision by the evidence."""

    _kind: ClassVar[str]
    """The likelihood: "logistic", "softmax" or "poisson", as in `models.regression`."""
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
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.recipe = recipe
        self.prior_precision = prior_precision
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.verbose = verbose
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _training_rows(self, X: Any, y: Any, sample_weight: Any, *, numeric: bool, **options: Any) -> TrainingRows:
        """Training rows with targets and weights, validated; sparse ones are made dense. All dtypes are remembered."""
        self._input_dtype = input_dtype(X)
        if is_dask(X):
            if self.batch_size is not None:
                raise ValueError(
                    "On Dask every step takes one pass over all partitions, and batch_size= asks for rows drawn at "
                    "random from all of them: leave it out, or fit a stream of batches with blr.fit."
                )
            return dask_examples(self, X, y, sample_weight, numeric=numeric, reset=options.get("reset", True))
        options = {**options, "y_numeric": numeric}
        X, y = validate_data(self, X, y, accept_sparse=["csr", "csc"], dtype=np.float64, **options)
        X, y = as_dense(X), np.asarray(y, float) if numeric else np.asarray(y)
        return RowsInMemory(Examples(X, y, example_weights(X, sample_weight)))

    def _rule(self, outputs: int | None, rows: int) -> Rule:
        bend, shape = regression.BEND if self._kind == "logistic" else None, (rows, self.n_features_in_)
        return linear_rule(self.recipe, 1 if outputs is None else outputs, self._steps(rows), self, shape, bend)

    def _steps(self, rows: int) -> int:
        return self.max_iter if self.batch_size is None else self.max_iter * -(-rows // self.batch_size)

    def _fit_from(self, start: Any, rows: TrainingRows, moments: Moments) -> Self:
        """Fit the posterior from these parameters, with the given precision of the prior or the one of the evidence.

        Args:
            start: where the weights start.
            rows: the `Examples`.
            moments: those of their inputs.
        """
        outputs = start["w"].shape[1] if start["w"].ndim == 2 else None
        rule = self._rule(self._rule_outputs(outputs), moments.rows)
        precision, result = self._given_precision(), None
        is_full_gaussian = rule.family.kind is Gaussian
        # Laplace's method with the same precision provides the start.
        rough_rule = _by_class_at_mean(rule) if rule.family.kind is BlockDiagonalGaussian else _laplace()
        is_dense = is_full_gaussian or rule.family.kind is BlockDiagonalGaussian
        # A flat prior determines nothing outside of the space of the rows.
        wide = is_full_gaussian and self.batch_size is None and precision != 0
        wide = wide and row_space.is_wide(moments.rows, self.n_features_in_)
        rows = self._standardize(rows, moments, rule.family.kind, learnt=precision is None, wide=wide)
        features = self.n_features_in_
        if wide:  # So few rows are smaller than the precision of their weights, wherever they are.
            examples = in_memory(rows).part
            coordinates, self._fit_basis = row_space.span(examples.x)
            rows, self._fit_precision = RowsInMemory(examples._replace(x=coordinates)), precision
            features = coordinates.shape[1]
            start = {**start, "w": np.zeros((features, *start["w"].shape[1:]))}
        # Columns of zeros change nothing, because their weights stay at the prior, and let data of about the same width
        # share compiled programs. A flat prior is no distribution, at which they could stay.
        is_padded = isinstance(self.recipe, str) and precision != 0
        padded_features = column_bucket(features) if is_padded else features
        start = {**start, "w": pad(start["w"], padded_features)}
        objective = regression.regression(self._kind, moments.size, intercept=self.fit_intercept)
        prior = regression.weight_precision if self.fit_intercept else regression.weight_precision_only
        data = _as_data(rows, moments, padded_features)
        if is_full_gaussian and self._kind == "poisson" and not rule.points.delta:
            # Under a wide q the expectation of e^f overflows: start as narrow as a curvature of 1 per example makes q.
            squares = rows.reduce(_sum_squares, np.add) + moments.size / moments.rows
            squares = pad(squares, padded_features, fill=1.0)
            start = Gaussian.around(start, {name: moments.size if name == "b" else squares for name in start})
        if precision is None:
            evidence, is_final = self._maximize_evidence(rule, rough_rule, objective, prior, start, data, rows, moments)
            precision = float(evidence.hyper["w"])
            result = evidence.result if is_final else None
            start = evidence.result.q if is_dense else start
            regularized = _with_prior(objective, prior({"w": precision}))
        else:
            regularized = _with_prior(objective, prior({"w": precision}))
            if is_dense and not rule.points.delta and outputs is not None:
                # Steps over several outputs are expensive, so that Laplace's method provides the start.
                tolerance = _ROUGH_TOLERANCE if is_full_gaussian else _BY_CLASS_TOLERANCE
                start = self._run(rough_rule, regularized, start, data, steps=50, tolerance=tolerance).q
        if result is None:
            result = self._fit_posterior(rule, regularized, start, data, moments.rows)
        self.prior_precision_ = self._fit_precision = precision
        self._set_attributes(result)
        self._fit_basis = None
        self.bound_, self.bound_error_ = result.bound, result.bound_error
        self.bound_normalized_ = bool(result.normalized)
        return self

    def _maximize_evidence(
        self,
        rule: Rule,
        rough_rule: Rule,
        objective: Objective,
        prior: Any,
        start: Any,
        data: Any,
        rows: TrainingRows,
        moments: Moments,
    ) -> tuple[Evidence, bool]:
        """Choose the prior's precision α by the evidence.

        The evidence is that of the rule's own posterior if its bound is exact and its steps are cheap. With many
        weights of several outputs (expensive steps), random points or mini-batches (no exact bound), or very many rows
        (of which a subset is enough), α is chosen by the evidence of Laplace's method, and the rule is run afterwards.
        Where classes are nearly separable, Laplace's method takes the skewed posterior for a narrow one, and its α is
        several times too large. By class, the rule's own evidence corrects it, in rounds of a few steps.

        Returns:
            α with the fit at it, and whether that fit is the final one.
        """
        count, some = moments.rows, rows.take(_subset(moments.rows))
        is_huge = count > max(CONCENTRATED * some.x.shape[1], 10 * _SUBSET_ROWS) and bool(some.weights.sum() > 0)
        is_dense = rule.family.kind in (Gaussian, BlockDiagonalGaussian)
        is_exact = is_dense and not rule.points.random and self.batch_size is None and not is_huge
        several = self._kind in ("softmax", "categorical")
        use_rule = is_exact and (rule.points.delta or not self._has_many_weights())
        hyper: Any = {"w": 1.0, "unit": _weight_unit(some.x, some.weights)}
        options: Any = {
            "method": "conjugate",
            "prior": prior,
            "run": self._run,
            "belief": regression.weak_prior,
            "held": ("unit",),
        }
        final: Any = {"steps": self.max_iter, "tolerance": self.tol}
        if use_rule and (rule.points.delta or not several):
            return empirical_bayes(rule, objective, hyper, start, data, **options, **final), True
        laplace_data = data
        if is_huge:
            heavier = some._replace(weights=some.weights * (moments.size / some.weights.sum()))
            laplace_data = _as_data(RowsInMemory(heavier), moments, np.shape(_weights_of(start))[0])
        by_class = rule.family.kind is BlockDiagonalGaussian
        rough: Any = {"tolerance": _BY_CLASS_TOLERANCE if by_class else _ROUGH_TOLERANCE}
        evidence = empirical_bayes(rough_rule, objective, hyper, start, laplace_data, **options, **rough)
        if by_class and is_exact and not rule.points.delta:
            # With few rows for a class, Laplace's α is twice too large. A few steps at a time are enough to correct it.
            few: Any = {"steps": _BY_CLASS_STEPS, "rounds": _BY_CLASS_ROUNDS, "tolerance": _BY_CLASS_TOLERANCE}
            start = evidence.result.q
            return empirical_bayes(rule, objective, evidence.hyper, start, data, **options, **few), False
        if not use_rule:
            return evidence, False
        # Steps over several outputs are expensive, so that Laplace's method provides the start.
        start = evidence.result.q
        return empirical_bayes(rule, objective, evidence.hyper, start, data, **options, **final), True

    def _given_precision(self) -> float | None:
        """`prior_precision` as a number; None for "auto"."""
        if isinstance(self.prior_precision, str) and self.prior_precision == "auto":
            return None
        precision = float(self.prior_precision)
        if not 0 <= precision < float("inf"):
            raise ValueError(f'prior_precision is "auto" or a number that is not negative, got {precision}.')
        return precision

    def _rule_outputs(self, outputs: int | None) -> int | None:
        """The number of outputs by which a rule is chosen."""
        return outputs

    def _has_many_weights(self) -> bool:
        """Whether there are several outputs with so many weights that steps that average over q are expensive."""
        return False

    def _fit_posterior(self, rule: Rule, objective: Objective, start: Any, data: Any, rows: int) -> Result:
        """Run the rule, on mini-batches if `batch_size` is below the number of rows."""
        if self.batch_size is None or self.batch_size >= rows:
            # What is left after a few expensive steps is below the resolution of their points.
            few = isinstance(self.recipe, str) and not rule.points.delta and self._has_many_weights()
            few = few and rule.family.kind in (Gaussian, BlockDiagonalGaussian)
            return self._run(
                rule,
                objective,
                start,
                data,
                steps=min(self.max_iter, MANY_STEPS) if few else self.max_iter,
                tolerance=None if few or rule.points.random else self.tol,
                key=make_key(self.random_state),
            )
        # Mini-batches need no padding.
        data = jax.tree.map(lambda x: x[:rows], dataclasses.replace(data, count=None))
        data = dataclasses.replace(data, count=data.weights.sum())
        key, batch = make_key(self.random_state), self.batch_size
        return self._run(rule, objective, start, data, steps=self._steps(rows), batch_size=batch, key=key)

    def _standardize(
        self, rows: TrainingRows, moments: Moments, family: Any, *, learnt: bool, wide: bool
    ) -> TrainingRows:
        """Choose the columns' origin and units for a fit, and return the rows in them.

        A learnt precision of the prior is the same for all columns in units of their standard deviations, so that
        predictions do not depend on the units of columns; a given one is in the user's units. With a flat prior on the
        intercept the origin does not matter to a full Gaussian, but rounding errors are smaller around the mean. For a
        family whose intercept is independent of the weights it matters, and a learnt precision goes with the mean. A
        posterior of low rank (`wide`) stays one around the mean.
        """
        mean, scale = moments.center, moments.scale
        is_full, zero = family is Gaussian, np.zeros(self.n_features_in_)
        is_known = is_full or family in (BlockDiagonalGaussian, DiagonalGaussian, FixedGaussian)
        # The intercept of a block is not independent of its weights.
        is_free = is_full or family is BlockDiagonalGaussian
        center = mean if self.fit_intercept and (is_free or (learnt and is_known)) else zero
        self.x_scale_ = self._fit_scale = scale if learnt and is_known else zero + 1
        self.x_mean_, self._fit_center = (zero, center) if is_full and not wide else (center, zero)
        self._fit_basis = None
        return rows.map(_in_units, center, self.x_scale_)

    def _in_users_units(self, q: Any) -> Any:
        """The posterior for columns as they are (less `x_mean_`), from q for the columns of the current fit."""
        basis = self._fit_basis
        q = regression.without_padding(q, self.n_features_in_ if basis is None else len(basis))
        if basis is not None:
            q = row_space.lift(q, basis, self._fit_precision)
        if np.any(self._fit_scale != 1):
            q = regression.in_units_of_columns(q, self._fit_scale)
        return to_numpy(regression.with_origin_at_zero(q, self._fit_center) if np.any(self._fit_center) else q)

    def _inputs(self, X: Any) -> np.ndarray:
        """New rows as the posterior takes them."""
        return self._validate(X) - getattr(self, "x_mean_", 0.0)

    def _set_attributes(self, result: Result) -> None:
        if result.reason in ("not finite", "left the domain"):
            raise ValueError(
                f"The fit ended early ({result.reason}): are the features on very different scales? Put a "
                "StandardScaler before the model."
            )
        name = type(self).__name__
        if result.reason == "steps" and result.watch is not None:  # Without a tolerance, taking all steps is success.
            advice = result.explanation or "raise max_iter, or tol if it is close enough."
            message = f"{name} did not converge in {self.max_iter} iterations: {advice}"
            warnings.warn(message, ConvergenceWarning, stacklevel=5)
        elif result.reason in ("stalled", "precision lost", "points too coarse"):
            advice = result.explanation or "put a StandardScaler before the model."
            message = f"{name} ended after {result.steps} iterations ({result.reason}): {advice}"
            warnings.warn(message, ConvergenceWarning, stacklevel=5)
        self.posterior_ = self._in_users_units(result.q)
        self.n_iter_ = result.steps
        coef = np.asarray(self.posterior_.mean["w"], float).T
        intercept = np.asarray(self.posterior_.mean.get("b", np.zeros(coef.shape[:-1])), float)
        intercept = intercept - coef @ getattr(self, "x_mean_", np.zeros(self.n_features_in_))
        self._set_coefficients(coef, intercept)

    def _set_coefficients(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        """Set `coef_` and `intercept_` to the posterior means for columns as they are, in scikit-learn's shapes."""
        self.coef_, self.intercept_ = coef.astype(self._input_dtype), float(intercept)

    def with_posterior(self, q: Family) -> Self:
        """A copy that predicts from another posterior, such as that of a fit which is still running."""
        other = copy.copy(self)
        other.posterior_ = self._in_users_units(q)
        return other

    def _update(self, rows: TrainingRows, moments: Moments) -> Self:
        """Condition on more rows: the posterior so far is the prior for them, in its own units."""
        zero, one = np.zeros(self.n_features_in_), np.ones(self.n_features_in_)
        rows = rows.map(_in_units, getattr(self, "x_mean_", zero), one)
        self._fit_center, self._fit_scale, self._fit_basis = zero, one, None
        prior = jax.tree.map(jnp.asarray, self.posterior_)
        if isinstance(prior, LowRankGaussian):  # More rows may need more directions than it has.
            prior = Gaussian(prior.mean, prior.precision)
        objective = regression.regression(self._kind, moments.size, intercept=self.fit_intercept)
        objective = dataclasses.replace(objective, regularizer=as_regularizer(None, prior))
        weights_shape = np.shape(self.posterior_.mean["w"])
        outputs = self._rule_outputs(weights_shape[1] if len(weights_shape) == 2 else None)
        bound_before, error_before = self.bound_, getattr(self, "bound_error_", None)
        data, rule = _as_data(rows, moments, self.n_features_in_), self._rule(outputs, moments.rows)
        result = self._fit_posterior(rule, objective, prior, data, moments.rows)
        self._set_attributes(result)
        self.bound_ = None if result.bound is None or bound_before is None else bound_before + result.bound
        error = result.bound_error
        self.bound_error_ = None if error is None or error_before is None else math.hypot(error_before, error)
        return self

    def _predictive(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        """The mean and the variance of a new y."""
        return regression.map_rows(regression.predictive, self.posterior_, X, self._kind)


@cache
def _laplace() -> Rule:
    return laplace()


def _by_class_at_mean(rule: Rule) -> Rule:
    """Laplace's method for a posterior that has a precision for each class: its rule, at the mean."""
    return rule.replace(points=Delta(), steps=Steps(1.0), guard=Backtracking(monotone=True), name="laplace by class")


def _with_prior(objective: Objective, regularizer: Any) -> Objective:
    return dataclasses.replace(objective, regularizer=as_regularizer(regularizer, None))


def _subset(rows: int) -> Any:
    """The indices of at most `_SUBSET_ROWS` rows, chosen at random."""
    if rows <= _SUBSET_ROWS:
        return slice(None)
    return np.sort(np.random.default_rng(0).permutation(rows)[:_SUBSET_ROWS])


def _weight_unit(X: np.ndarray, weights: np.ndarray) -> float:
    """The size of a weight that moves the output by 1 when a feature moves by its standard deviation.

    It is one number for all features, by the mean of their variances.
    """
    mean = np.average(X, axis=0, weights=weights)
    deviation = float(np.sqrt(np.mean(np.average((X - mean) ** 2, axis=0, weights=weights))))
    return 1 / deviation if deviation > 0 else 1.0


def _as_data(rows: TrainingRows, moments: Moments, features: int) -> Any:
    """Examples as the data of a fit, with columns of zeros up to so many features."""
    return as_data(rows.map(_weighted_examples, features), coarse_bucket, moments.rows, moments.size)


def _weighted_examples(part: Examples, features: int) -> Weighted:
    x, y, weights = part
    return Weighted((pad(x, len(x), features), y), weights, weights.sum())


def _in_units(part: Examples, center: np.ndarray, scale: np.ndarray) -> Examples:
    return part._replace(x=(part.x - center) / scale)


def _input_moments(part: Examples) -> Moments:
    return moments_of(part.x, part.weights)


def _sum_squares(part: Examples) -> np.ndarray:
    return part.weights @ part.x**2


def _weights_of(start: Any) -> Any:
    """The weights at which a start begins, a member of a family or bare parameters."""
    mean: Any = getattr(start, "mean", start)
    return mean["w"]


class LogisticRegression(Classifier, _LinearModel):
    r"""Logistic regression with a Gaussian posterior over its weights; probabilities are averaged over it.

    $p(y = 1 \mid x) = σ(w^⊤x + b)$ with $w ∼ N(0, 1/α)$ and a flat prior on b. For K classes it is the softmax of K
    scores that sum to zero: contrasts of K − 1 outputs.

    Parameters
    ----------
    recipe : str or Rule, default="auto"
        The algorithm. "auto" is variational inference ("von"), with quadrature for two classes and quasi-Monte Carlo
        for more. Beyond 1000 rows per feature it is "laplace", which then gives the same posterior. With over 300
        weights of several classes it is "by_class", variational inference with a covariance of each class's weights and
        none between classes: its memory grows with the number of classes and not with its square, and its steps are so
        cheap that α is chosen by its own bound. ("von" then takes twelve steps from Laplace's posterior, with α by
        Laplace's evidence, which is too large where classes are nearly separable.) "mean_field" is variational
        inference with independent weights, for so many features that their covariance does not fit in memory; "auto"
        takes it where "by_class" would keep more than 8 million numbers. Other names are "newton", "ogn", "vogn",
        "ivon", "adam", "rmsprop" and "sgd"; any rule can be passed, such as `blr.vogn(1e-2)`.
    prior_precision : float or "auto", default="auto"
        α, in the units of X. "auto" maximises the bound on the log evidence, where α is the precision for columns
        divided by their standard deviations, so that the units of columns do not matter; with a weak hyper-prior
        against huge weights, which classes that can be separated would otherwise have. For more than two classes
        (except "by_class"), and for algorithms without an exact bound, it is the evidence of Laplace's method; beyond
        200,000 rows that of 20,000 of them.
    fit_intercept : bool, default=True
        Whether the model has b.
    class_weight : None, "balanced" or dict, default=None
        Weights of the classes, as in scikit-learn.
    max_iter : int, default=100
        The maximal number of steps; with a `batch_size`, of passes over the data.
    tol : float, default=1e-6
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats.
    batch_size : int or None, default=None
        Rows of a mini-batch; None uses all rows at every step.
    verbose : bool, default=False
        Whether to print the progress of the fit.
    random_state : int, RandomState or None, default=None
        The seed of algorithms that draw.

    Attributes
    ----------
    classes_ : the classes, sorted.
    modelled_classes_ : the indices of those that have rows of positive weight; the others have the probability 0.
    posterior_ : a Gaussian over {"b", "w"}, or {"w"} without an intercept, for X less `x_mean_`. With at least 100
        columns, and twice as many as rows, it is a `LowRankGaussian`; by class a `BlockDiagonalGaussian`.
    x_mean_ : zeros, or the columns' means where b and w are independent under the posterior ("mean_field", "vogn"), and
        where it is a `LowRankGaussian` or a `BlockDiagonalGaussian`.
    coef_, intercept_ : the posterior means of w and b, (1, D) and (1,); for K > 2 classes those of their scores, (K, D)
        and (K,), which sum to zero over the classes unless `outputs_` is "classes". A class without weight has the
        intercept −∞. They are copies: predictions average over `posterior_`.
    outputs_ : "contrasts", or "classes" where every class has a score of its own ("by_class").
    prior_precision_ : α. The prior precision of a weight of column j is `prior_precision_ * x_scale_[j]**2`.
    x_scale_ : the standard deviations of the columns; ones for a `prior_precision` that was given.
    bound_ : the lower bound on the log evidence; None where the algorithm has none.
    bound_normalized_ : whether the prior is a density. The intercept's is flat, and counts as a density of 1, as does
        that of the weights for prior_precision=0: compare bounds of models with the same flat priors only.
    bound_error_ : its standard error or integration error in nats; None where there is no bound, and where it is only
        an expansion at the mean (Laplace's method).
    n_iter_ : the number of steps.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = LogisticRegression().fit(X, y)
    >>> model.predict_proba(X[[70]]).round(2), round(model.prior_precision_, 3)
    (array([[0.  , 0.46, 0.53]]), 0.033)
    """

    model = "linear"
    tasks = ("binary", "classes")
    title = "Bayesian logistic regression"
    coef_: np.ndarray
    intercept_: np.ndarray
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
        verbose: Any = False,
        random_state: Any = None,
    ):
        super().__init__(
            recipe=recipe,
            prior_precision=prior_precision,
            fit_intercept=fit_intercept,
            max_iter=max_iter,
            tol=tol,
            batch_size=batch_size,
            verbose=verbose,
            random_state=random_state,
        )
        self.class_weight = class_weight

    @property
    def _kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # It depends on the number of classes.
        if len(self._modelled()) == 2:
            return "logistic"
        return "categorical" if getattr(self, "outputs_", "contrasts") == "classes" else "softmax"

    def _modelled(self) -> np.ndarray:
        """The indices of the classes that the posterior is about."""
        return getattr(self, "modelled_classes_", np.arange(len(self.classes_)))

    def _rule_outputs(self, outputs: int | None) -> int | None:
        return outputs - 1 if outputs and self._kind == "categorical" else outputs

    def _has_many_weights(self) -> bool:
        return has_many_weights(self.n_features_in_, len(self._modelled()) - 1)

    @double_precision
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior of the weights."""
        rows = self._training_rows(X, y, sample_weight, numeric=False, ensure_min_samples=2)
        labels = rows.reduce(_labels_of_examples, merge_labels)
        self.classes_ = check_classes(labels.classes)
        rows, totals = self._weigh_classes(rows, labels)
        # A class all of whose rows have the weight 0 is as good as absent: its intercept would have no posterior.
        self.modelled_classes_ = np.flatnonzero(totals > 0)
        if len(self.modelled_classes_) < 2:
            only = self.classes_[self.modelled_classes_].tolist()
            raise ValueError(f"Only one class has rows of a weight above 0, {only}: a classifier needs two.")
        return self._fit_labels(rows, first=True)

    @double_precision
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Condition on more data: the posterior so far is the prior for it.

        `classes` lists all classes at the first call, if y lacks some of them.
        """
        first = not hasattr(self, "posterior_")
        rows = self._training_rows(X, y, sample_weight, numeric=False, reset=first)
        labels = rows.reduce(_labels_of_examples, merge_labels)
        self.classes_ = check_classes(labels.classes, classes if first else self.classes_)
        rows, totals = self._weigh_classes(rows, labels)
        if first:
            self.modelled_classes_ = np.arange(len(self.classes_))
        unknown = np.setdiff1d(np.flatnonzero(totals > 0), self._modelled())
        if len(unknown):
            raise ValueError(
                f"The classes {self.classes_[unknown].tolist()} had no weight in fit, and the posterior does not have "
                "them: call fit with all rows."
            )
        return self._fit_labels(rows, first=first)

    def _weigh_classes(self, rows: TrainingRows, labels: Labels) -> tuple[TrainingRows, np.ndarray]:
        """The rows with the index of their class as y and their class's weight in their own, and all classes' sums."""
        totals, by_class = np.zeros(len(self.classes_)), np.ones(len(self.classes_))
        totals[np.searchsorted(self.classes_, labels.classes)] = labels.totals
        if self.class_weight is not None:
            by_class = class_weights(self.class_weight, self.classes_, totals)
        check_total_weight(totals @ by_class)
        return rows.map(_encoded, self.classes_, by_class), totals * by_class

    def _fit_labels(self, rows: TrainingRows, *, first: bool) -> Self:
        """Fit to labels that are places among all classes, or condition the posterior so far on them."""
        modelled = self._modelled()
        count = len(modelled)
        outputs = count - 1 if count > 2 else None
        # A row of weight 0 may have a class that is not modelled, and counts as one of the last.
        places = np.full(len(self.classes_), count - 1)
        places[modelled] = np.arange(count)
        rows = rows.map(_with_labels, places if outputs else places.astype(float))
        moments = rows.reduce(_input_moments, merge_moments)
        if not first:
            return self._update(rows, moments)
        self.outputs_ = "contrasts"
        if outputs and self._rule(outputs, moments.rows).family.kind is BlockDiagonalGaussian:
            # Contrasts that are independent of each other would depend on the order of the classes.
            self.outputs_, outputs = "classes", count
        start = regression.zeros(self.n_features_in_, outputs, intercept=self.fit_intercept)
        return self._fit_from(start, rows, moments)

    def _set_coefficients(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        modelled = self._modelled()
        if self._kind == "softmax":  # From contrasts to scores.
            coef, intercept = (regression.contrasts(len(modelled)) @ part for part in (coef, intercept))
        elif self._kind == "logistic" and len(self.classes_) == 2:
            coef, intercept = coef[None], intercept[None]
        elif self._kind == "logistic":  # Two of more classes have weight: scores whose difference is f.
            coef, intercept = (np.stack([-0.5 * part, 0.5 * part]) for part in (coef, intercept))
        if len(modelled) < len(self.classes_):
            every = np.zeros((len(self.classes_), coef.shape[1])), np.full(len(self.classes_), -np.inf)
            every[0][modelled], every[1][modelled] = coef, intercept
            coef, intercept = every
        self.coef_, self.intercept_ = coef.astype(self._input_dtype), intercept.astype(self._input_dtype)

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, averaged over the posterior."""
        mean, _ = self._predictive(self._inputs(X))
        return self._for_every_class(np.column_stack([1 - mean, mean]) if mean.ndim == 1 else mean, 0.0)

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def decision_function(self, X: Any) -> np.ndarray:
        """The log odds of the second of two classes, (rows,), or the log probability of each of more, (rows, K).

        They are those of `predict_proba`, which the logistic or softmax function of them gives: averaged over the
        posterior. The score at the posterior mean is `X @ coef_.T + intercept_`.
        """
        mean, variance = self._predictive(self._inputs(X))
        least = np.finfo(float).tiny
        if mean.ndim == 2:
            return self._for_every_class(np.log(np.maximum(mean, least)), -np.inf)
        # The variance is the product of both probabilities, each of which is accurate where it is small.
        other = np.maximum(variance, least) / np.maximum(mean, least)
        logs = np.column_stack([np.log(np.minimum(other, 1.0)), np.log(np.maximum(mean, least))])
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else self._for_every_class(logs, -np.inf)

    def _for_every_class(self, values: np.ndarray, absent: float) -> np.ndarray:
        """Columns for all classes, from those of the classes that have weight; the others have the value `absent`."""
        if values.shape[1] == len(self.classes_):
            return values
        every = np.full((len(values), len(self.classes_)), absent)
        every[:, self._modelled()] = values
        return every

    @double_precision
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the classes, (n_samples, rows); within a draw all rows have the same weights."""
        weight_key, label_key = jax.random.split(make_key(random_state))
        X = self._inputs(X)
        f = regression.draw_scores(self.posterior_, X, n_samples, weight_key)
        scores = (
            jnp.stack([jnp.zeros(f.shape), f], axis=-1) if self._kind == "logistic" else _class_scores(self._kind, f)
        )
        return self.classes_[self._modelled()][np.asarray(jax.random.categorical(label_key, scores))]


def _labels_of_examples(part: Examples) -> Labels:
    return labels_of(part.y, part.weights)


def _encoded(part: Examples, classes: np.ndarray, by_class: np.ndarray) -> Examples:
    index = np.searchsorted(classes, part.y)
    return part._replace(y=index, weights=part.weights * by_class[index])


def _with_labels(part: Examples, labels: np.ndarray) -> Examples:
    return part._replace(y=labels[part.y])


def _class_scores(kind: str, f: Any) -> Any:
    return f if kind == "categorical" else regression.classes(f)


class PoissonRegression(RegressorMixin, _LinearModel):
    r"""Poisson regression: $y ∼ \mathrm{Poisson}(e^{w^⊤x + b})$ with $w ∼ N(0, 1/α)$ and a flat prior on b.

    Parameters
    ----------
    recipe, prior_precision, fit_intercept, max_iter, tol, batch_size, verbose, random_state
        As for `LogisticRegression`.

    Attributes
    ----------
    coef_, intercept_ : the posterior means of w, (D,), and b, a number.
    posterior_, prior_precision_, bound_, bound_normalized_, bound_error_, n_iter_ : as for
        `LogisticRegression`.

    Examples
    --------
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

    @double_precision
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior of the weights."""
        return self._fit_counts(*self._counted_rows(X, y, sample_weight, reset=True))

    def _fit_counts(self, rows: TrainingRows, counts: Moments) -> Self:
        start = regression.zeros(self.n_features_in_, intercept=self.fit_intercept)
        if self.fit_intercept:  # Start at the mean count: from b = 0 the first e^f can be far off.
            start["b"] = jnp.log(max(float(counts.center), 1e-3))
        return self._fit_from(start, rows, rows.reduce(_input_moments, merge_moments))

    def _counted_rows(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[TrainingRows, Moments]:
        """The rows, and the moments of their counts, which are checked."""
        rows = self._training_rows(X, y, sample_weight, numeric=True, reset=reset)
        least, most, counts = rows.reduce(_range_of_counts, _merge_ranges)
        if not (least or most):
            raise ValueError("Every count in y is 0, so that the logarithm of the rate would be −∞: give some above 0.")
        if least < 0:
            raise ValueError(f"y has {least:.6g}, and counts are not negative: for other numbers use RidgeRegression.")
        check_total_weight(counts.size)
        return rows, counts

    @double_precision
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Condition on more data: the posterior so far is the prior for it."""
        first = not hasattr(self, "posterior_")
        rows, counts = self._counted_rows(X, y, sample_weight, reset=first)
        if first:
            return self._fit_counts(rows, counts)
        return self._update(rows, rows.reduce(_input_moments, merge_moments))

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The expected count, and with `return_std` the standard deviation of a count."""
        mean, variance = self._predictive(self._inputs(X))
        return (mean, np.sqrt(variance)) if return_std else mean

    @double_precision
    def log_predictive(self, X: Any, y: Any) -> np.ndarray:
        """log p(y | x) of every row, the density averaged over the posterior."""
        X = self._inputs(X)
        return np.asarray(regression.log_predictive(self.posterior_, X, np.asarray(y, float), "poisson"))

    @double_precision
    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the counts, (n_samples, rows); within a draw all rows have the same weights."""
        weight_key, count_key = jax.random.split(make_key(random_state))
        X = self._inputs(X)
        f = regression.draw_scores(self.posterior_, X, n_samples, weight_key)
        return np.asarray(jax.random.poisson(count_key, jnp.exp(f)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


def _range_of_counts(part: Examples) -> tuple[float, float, Moments]:
    return float(part.y.min()), float(part.y.max()), moments_of(part.y, part.weights)


def _merge_ranges(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[float, float, Moments]:
    return min(one[0], other[0]), max(one[1], other[1]), merge_moments(one[2], other[2])


__all__ = ["LogisticRegression", "PoissonRegression", "RidgeRegression"]
