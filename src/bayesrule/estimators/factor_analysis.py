"""Factor analysis and probabilistic PCA, with any values missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from ..factor_graph.model import Model
from ..families.point_mass import Peak
from ..models import factor_analysis_missing as factor_scores
from ..models.factor_analysis import condensed_triangle, factor_analysis, mirrored
from ..numerics.padding import pad
from ..numerics.random import Key
from ..recipes import em, svi, vmp
from ..rule.rule import Rule
from .base import double_precision, in_dtype_of_inputs, row_by_row
from .base_iterative import IterativeEstimator, check_positive_ints, padded_rows
from .preprocessing import merge_moments, observed_moments
from .training_rows import START_ROWS, RowsInMemory, start_rows, training_rows


class _FactorModel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, IterativeEstimator):
    """Factor analysis and PPCA, which differ in their noise."""

    _noise: ClassVar[Literal["each", "one"]]
    """Whether each column has its own noise, or all have one."""
    n_features_in_: int
    _computes_likelihood: ClassVar[bool] = True
    _methods: ClassVar[Mapping[str, Callable[..., Rule]]] = MappingProxyType({"em": em, "vmp": vmp})
    _advice: ClassVar[str] = "take fewer components, or method='vmp', whose priors keep every noise above 0"

    def __init__(
        self,
        n_components: int | None = None,
        *,
        method: Any = "em",
        max_iter: int = 5000,
        tol: float = 1e-4,
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.method = method
        self.max_iter = max_iter
        self.tol = tol
        self.verbose = verbose
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        if tags.transformer_tags is not None:
            tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @double_precision
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to rows X (N, D); NaN is a missing value."""
        rows = training_rows(self, X, allow_nan=True)
        moments = rows.reduce(observed_moments, merge_moments)
        count = moments.rows
        if not np.all(moments.size > 0):
            empty = np.flatnonzero(moments.size == 0).tolist()
            raise ValueError(f"The columns {empty} have no values at all: leave them out.")
        center, deviation = moments.center, np.sqrt(moments.squares / moments.size)
        # Starts and priors are meant for standardised columns. PPCA, with one noise, needs one scale for all columns.
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        if self._noise == "one":
            self.scale_ = np.full_like(self.scale_, np.sqrt(np.mean(self.scale_**2)))
        scaled, is_incomplete = rows.map(_in_units, center, self.scale_), not np.all(moments.size == count)
        features = self.n_features_in_
        size, rule = self._n_factors(features), self._rule()
        if is_incomplete:
            data: Any = scaled.map(_named)
            if isinstance(data, RowsInMemory):
                data = {"y": pad(data.part["y"], padded_rows(count), fill=np.nan)}
            else:
                data = data.known(rows=count, count=float(count))
                # The same steps, under the name that says that a row's factors are computed anew at each visit.
                rule = svi(1.0) if rule == vmp() else rule
            first = start_rows(scaled, count)
        else:
            # Complete rows are reduced in one pass: to a triangle, whose rows have the same second moments.
            triangle = scaled.reduce(_triangle, _merge_triangles)
            data = condensed_triangle(triangle, count, min(features, padded_rows(count)))
            few = isinstance(scaled, RowsInMemory) or count <= START_ROWS
            first = start_rows(scaled, count) if few else mirrored(triangle, count)
        build = partial(_build_model, first, size, self._noise, is_incomplete)
        fitted = self._fit_starts(build, data, count, rule=rule)
        self._set_attributes(fitted)
        blocks = self.posterior_.blocks
        loadings = np.asarray(blocks["loadings"].mean).T * self.scale_
        # Of incomplete rows the mean is fitted too, as the loading of a constant factor after the others.
        self.components_, self.mean_ = loadings[:size], center + loadings[size:].sum(0)
        noise = np.asarray(1 / blocks["noise"].mean) * self.scale_**2
        self.noise_variance_: Any = float(noise[0]) if self._noise == "one" else noise
        # From the density of the standardised rows to that of X.
        units = float(moments.size @ np.log(self.scale_))
        if isinstance(blocks["loadings"], Peak):
            fitted_values = self.mean_, self.components_.T, self._column_noises()
            self.bound_ = float(rows.reduce(_sum_of_log_densities, np.add, *fitted_values))
        else:
            self.bound_ -= units
        bounds = fitted.result.trace.get("bound", ())
        self.loglike_ = np.append(np.asarray(bounds, float) - units, self.bound_)
        return self

    def _n_factors(self, features: int) -> int:
        """The number of factors."""
        if self.n_components is None:
            return max(1, min(10, features // 2))
        check_positive_ints(self, "n_components")
        return self.n_components

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _center(self, X: Any) -> np.ndarray:
        """New rows, validated, minus the mean."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False) - self.mean_

    def _column_noises(self) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.noise_variance_, float), self.mean_.shape)

    def _loadings_cov(self) -> np.ndarray | None:
        """The posterior covariance of each column's loadings, (D, K, K), in the units of X; None for EM."""
        loadings = self.posterior_["loadings"]
        if isinstance(loadings, Peak):
            return None
        size = len(self.components_)
        return np.asarray(loadings.covariance())[:, :size, :size] * self.scale_[:, None, None] ** 2

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def transform(self, X: Any) -> np.ndarray:
        """The expected factors of each row, given its observed values."""
        return factor_scores.scores(self._center(X), self.components_.T, self._column_noises(), self._loadings_cov())

    def inverse_transform(self, Z: Any) -> np.ndarray:
        """Rows from their factors."""
        check_is_fitted(self)
        return check_array(Z, dtype="float64") @ self.components_ + self.mean_

    @double_precision
    def fill(self, X: Any) -> np.ndarray:
        """Replace every missing value by its expectation given the observed values of its row."""
        rows = self._center(X)
        return self.mean_ + factor_scores.impute(rows, self.components_.T, self._column_noises(), self._loadings_cov())

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def score_samples(self, X: Any) -> np.ndarray:
        """The log density of the observed values of each row, with loadings and noise at their estimates."""
        return self._log_densities(self._center(X))

    def _log_densities(self, rows: np.ndarray) -> np.ndarray:
        return factor_scores.log_likelihoods(rows, self.components_.T, self._column_noises())

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log density of the rows."""
        return float(self.score_samples(X).mean())

    def get_covariance(self) -> np.ndarray:
        """WWᵀ plus the noise variances, at their estimates."""
        check_is_fitted(self)
        return self.components_.T @ self.components_ + np.diag(self._column_noises())

    def get_precision(self) -> np.ndarray:
        """The inverse of `get_covariance`, by the inverse of a matrix of as many rows as there are factors."""
        check_is_fitted(self)
        weighted = self.components_ / self._column_noises()
        inner = np.eye(len(self.components_)) + weighted @ self.components_.T
        precision = np.diag(1 / self._column_noises()) - weighted.T @ np.linalg.solve(inner, weighted)
        return 0.5 * (precision + precision.T)


class FactorAnalysis(_FactorModel):
    r"""Factor analysis: $y = Wx + m + ε$ with $x ∼ N(0, I)$ and a noise $ε_d ∼ N(0, ψ_d)$ for every column.

    Any value may be missing (NaN), in all methods; `fill(X)` replaces missing values by their expectations. If values
    are missing in `fit`, the mean m is estimated together with W; otherwise it is the mean of the columns, and steps
    work on second moments, so that their cost does not depend on N.

    Parameters
    ----------
    n_components : int or None, default=None
        The number of factors; None is half of the columns, at most 10.
    method : {"em", "vmp"} or Rule, default="em"
        Maximum likelihood by EM, or a posterior by variational message passing, under which factors that are not needed
        shrink to 0.
    max_iter : int, default=5000
        The maximal number of steps.
    tol : float, default=1e-4
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats for each
        row.
    verbose : bool, default=False
        Whether to print the progress of the fit.
    random_state : int, RandomState or None, default=None
        The seed of the start of factors beyond the principal components.

    Attributes
    ----------
    components_ (K, D), mean_, noise_variance_ : Wᵀ, m and ψ; with a posterior E W, E m and 1/E[1/ψ].
    posterior_ : families over "loadings", "noise" (1/ψ) and, for "vmp", "scales", for X minus the means of its columns,
        divided by `scale_`; if values were missing, the last loading is m. For EM, point masses.
    scale_ : the standard deviations of the columns.
    bound_ : the evidence lower bound with all constants; for EM the log-likelihood.
    bound_error_ : its error in nats, 0: the bound is in closed form.
    loglike_ : the bound before each step, and at last `bound_`; for EM the log-likelihoods.
    converged_, n_iter_ : whether the fit converged, and its number of steps.

    Examples
    --------
    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> X = random.normal(size=(200, 1)) * [1.0, 2.0, -1.0] + 0.1 * random.normal(size=(200, 3))
    >>> X[0, 1] = np.nan
    >>> model = FactorAnalysis(1).fit(X)
    >>> model.fill([[0.5, np.nan, -0.5]]).round(1).tolist()
    [[0.5, 1.0, -0.5]]
    """

    model = "factor-analysis"
    tasks = ("factors",)
    title = "factor analysis"
    _noise = "each"


class PPCA(_FactorModel):
    r"""Probabilistic PCA: $y = Wx + m + ε$ with $x ∼ N(0, I)$ and one noise for all columns, $ε ∼ N(0, σ^2I)$.

    With "em", W spans the principal components and σ² is the mean variance of the others (Tipping and Bishop, 1999).

    Parameters
    ----------
    n_components, method, max_iter, tol, verbose, random_state
        As for `FactorAnalysis`.

    Attributes
    ----------
    components_, mean_, posterior_, scale_, bound_, loglike_, converged_, n_iter_ : as for `FactorAnalysis`.
    noise_variance_ : σ².

    Examples
    --------
    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> X = random.normal(size=(500, 1)) * [3.0, 4.0, 0.0] + 0.5 * random.normal(size=(500, 3))
    >>> model = PPCA(1).fit(X)
    >>> round(model.noise_variance_, 1), np.abs(model.components_).round().tolist()
    (0.2, [[3.0, 4.0, 0.0]])
    """

    title = "probabilistic PCA"
    _noise = "one"


def _in_units(X: np.ndarray, center: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (X - center) / scale


def _named(X: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": X}


def _triangle(X: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(X, mode="r"))


def _merge_triangles(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.qr(np.concatenate([one, other]), mode="r"))


def _sum_of_log_densities(X: np.ndarray, mean: np.ndarray, loadings: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return factor_scores.log_likelihoods(X - mean, loadings, noise).sum()


def _build_model(rows: np.ndarray, size: int, noise: Any, mean: bool, priors: Any, key: Key, start: int) -> Model:
    return factor_analysis(rows, size, noise=noise, priors=priors, mean=mean, key=key)
