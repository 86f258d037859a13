"""Factor analysis and probabilistic PCA as scikit-learn has them, with missing values in any place."""

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
from ..models.factor_analysis import condensed, factor_analysis
from ..numerics.padding import pad
from ..recipes import em, vmp
from ..rule.rule import Rule
from .base import double
from .base_iterative import Iterated, check_positive_ints, padded_rows


class _Factors(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Iterated):
    """What both share: all but how many noises there are."""

    _noise: ClassVar[Literal["each", "one"]]
    _evident: ClassVar[bool] = True
    _methods: ClassVar[Mapping[str, Callable[..., Rule]]] = MappingProxyType({"em": em, "vmp": vmp})
    _advice: ClassVar[str] = "take fewer components, or method='vmp', whose priors keep every noise above 0"

    def __init__(
        self,
        n_components: int | None = None,
        *,
        method: Any = "em",
        max_iter: int = 1000,
        tol: float = 1e-6,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.method = method
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @double
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to rows X (N, D); NaN is missing."""
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2)
        there = ~np.isnan(X)
        if not there.any(0).all():
            empty = np.flatnonzero(~there.any(0)).tolist()
            raise ValueError(f"The columns {empty} have no values at all: leave them out.")
        center, spread = np.nanmean(X, axis=0), np.nanstd(X, axis=0)
        # In units of their spread, which starts and priors are about; PPCA asks for one unit.
        self.scale_ = np.where(spread > 0, spread, 1.0)
        if self._noise == "one":
            self.scale_ = np.full_like(self.scale_, np.sqrt(np.mean(self.scale_**2)))
        rows, holes = (X - center) / self.scale_, not there.all()
        if holes:
            data: Any = {"y": pad(rows, padded_rows(len(X)), fill=np.nan)}
        else:
            data = condensed(rows, min(X.shape[1], padded_rows(len(X))))
        size = self._size(X.shape[1])
        found = self._settle(partial(_built, rows, size, self._noise, holes), data, len(X))
        self._keep(found)
        blocks = self.posterior_.blocks
        loadings = np.asarray(blocks["loadings"].mean).T * self.scale_
        self.components_, self.mean_ = loadings[:size], center + loadings[size:].sum(0)  # the mean's, if there is one
        noise = np.asarray(1 / blocks["noise"].mean) * self.scale_**2
        self.noise_variance_: Any = float(noise[0]) if self._noise == "one" else noise
        if isinstance(blocks["loadings"], Peak):
            self.bound_ = float(self._log_densities(X - self.mean_).sum())
        else:
            self.bound_ -= float(there.sum(0) @ np.log(self.scale_))  # the density of X, whatever its units
        return self

    def _size(self, features: int) -> int:
        if self.n_components is None:
            return max(1, min(10, features // 2))
        check_positive_ints(self, "n_components")
        return self.n_components

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _centred(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False) - self.mean_

    def _noises(self) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.noise_variance_, float), self.mean_.shape)

    def _doubt(self) -> np.ndarray | None:
        """What is not known of the loadings, in X's units; nothing where they are estimates."""
        loadings = self.posterior_["loadings"]
        if isinstance(loadings, Peak):
            return None
        size = len(self.components_)
        return np.asarray(loadings.covariance())[:, :size, :size] * self.scale_[:, None, None] ** 2

    @double
    def transform(self, X: Any) -> np.ndarray:
        """The expected factors of each row, given the values that are there."""
        return factor_scores.scores(self._centred(X), self.components_.T, self._noises(), self._doubt())

    def inverse_transform(self, Z: Any) -> np.ndarray:
        """Rows from their factors."""
        check_is_fitted(self)
        return check_array(Z, dtype="float64") @ self.components_ + self.mean_

    @double
    def fill(self, X: Any) -> np.ndarray:
        """X with every missing value at its expectation, given the values of its row that are there."""
        rows = self._centred(X)
        return self.mean_ + factor_scores.filled(rows, self.components_.T, self._noises(), self._doubt())

    @double
    def score_samples(self, X: Any) -> np.ndarray:
        """The log density of what is there of each row, with loadings and noise at their estimates."""
        return self._log_densities(self._centred(X))

    def _log_densities(self, rows: np.ndarray) -> np.ndarray:
        return factor_scores.log_likelihoods(rows, self.components_.T, self._noises())

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log density of the rows."""
        return float(self.score_samples(X).mean())

    def get_covariance(self) -> np.ndarray:
        """WWᵀ + the noise, at their estimates."""
        check_is_fitted(self)
        return self.components_.T @ self.components_ + np.diag(self._noises())


class FactorAnalysis(_Factors):
    r"""Factor analysis, $y = Wx + m + ε$ with $x ∼ N(0, I)$ and a noise $ε_d ∼ N(0, ψ_d)$ for every column.

    NaN is a missing value, in `fit` and everywhere else; `fill(X)` puts expectations in their place. Where values are
    missing the mean m is estimated with the rest, else it is the columns' own. A fit of complete rows takes its steps
    on their second moments, whatever N.

    Parameters
    ----------
    n_components : how many factors; None is half of the columns, 10 at most.
    method : "em" (maximum likelihood) or "vmp" (a posterior; factors that are not needed fade); or a rule.
    max_iter, tol : a fit ends when a step could gain less than `tol` nats for each row, or after `max_iter` steps.
    random_state : draws the start of factors beyond the principal components.

    Attributes
    ----------
    components_ (K, D), mean_, noise_variance_ : estimates; under a posterior E W, E m and 1/E[1/ψ].
    posterior_ : families over "loadings", "noise" (1/ψ) and, for "vmp", "scales", of X in units of `scale_` around its
        columns' means; where values are missing, the last loading is the displacement of m. For EM, points.
    bound_ : the evidence lower bound, every constant included; for EM the log-likelihood. n_iter_, converged_.

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

    title = "factor analysis"
    _noise = "each"


class PPCA(_Factors):
    r"""Probabilistic PCA, $y = Wx + m + ε$ with $x ∼ N(0, I)$ and one noise for all columns, $ε ∼ N(0, σ^2I)$.

    Parameters and attributes are those of `FactorAnalysis`; `noise_variance_` is a number. With "em" W spans the
    principal components and σ² is the mean of the variances that they leave (Tipping and Bishop, 1999).

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


def _built(rows: np.ndarray, size: int, noise: Any, mean: bool, priors: Any, key: Any) -> Model:
    return factor_analysis(rows, size, noise=noise, priors=priors, mean=mean, key=key)
