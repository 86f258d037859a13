"""Mixtures of Gaussians, by EM or with a posterior over their weights and components."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from scipy.special import logsumexp
from sklearn.base import DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..factor_graph.model import Model
from ..families.point_mass import Peak
from ..families.product import Product
from ..models.component_predictive import build_predictive, mean_and_precision
from ..models.mixture import Covariance, gaussian_mixture, priors_from_moments
from ..models.starts.clusters import with_shifted_mean
from ..numerics.checks import positive_int
from ..numerics.padding import pad
from ..numerics.random import Key
from ..recipes import svi
from ..rule.rule import Rule
from .base import double_precision, in_dtype_of_inputs, input_dtype, row_by_row
from .base_iterative import IterativeEstimator, PowerDecay, check_positive_ints, padded_rows
from .preprocessing import Moments, merge_moments, moments_of
from .training_rows import DaskParts, RowsInMemory, check_full_batches, start_rows, training_rows

_SVI_BATCH = 256


class GaussianMixture(DensityMixin, IterativeEstimator):
    r"""A mixture of Gaussians, $p(y) = \sum_k π_k N(y \mid m_k, Λ_k^{-1})$, by the rule.

    Densities of new rows, and the probabilities of their components, are predictive: for EM at the estimates, otherwise
    averaged over the posterior, $\sum_k E[π_k] ∫ N(y \mid θ_k) q(θ_k)dθ_k$, which are Student t's. The priors are those
    of scikit-learn's BayesianGaussianMixture with a Dirichlet distribution.

    Parameters
    ----------
    n_components : int, default=1
        The number of components.
    method : {"em", "vmp", "svi"} or Rule, default="em"
        Maximum likelihood by EM; a posterior by variational message passing; or the same on mini-batches.
    covariance_type : {"full", "tied", "diag", "spherical"}, default="full"
        The covariances of the components: a matrix for each, one matrix for all, a diagonal matrix for each, or one
        variance for each.
    max_iter : int, default=1000
        The maximal number of steps; for "svi", of passes over the data.
    tol : float, default=1e-4
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats for each
        row.
    n_init : int, default=1
        The number of starts, of which the best is taken: first the best of three k-means clusterings, then rougher
        ones, which differ more from each other.
    reg_covar : float, default=1e-6
        Keeps EM's variances above 0: N/K times it is added to each component's sum of squares.
    batch_size : int or None, default=None
        Rows of a mini-batch. None is all rows, and for "svi" 256.
    learning_decay, learning_offset : float, default=0.7 and 2.0
        "svi" has the rate (t + offset)^−decay at step t.
    weights_init, means_init, precisions_init : array-like or None, default=None
        Where to start, in the shapes of `weights_`, `means_` and `precisions_`; what is None comes from the clusters.
    verbose : bool, default=False
        Whether to print the progress of the fit.
    random_state : int, RandomState or None, default=None
        The seed.

    Attributes
    ----------
    weights_, means_, covariances_, precisions_ : estimates; with a posterior E π, E m, (E Λ)⁻¹ and E Λ. The last two
        are (K, D, D), (D, D), (K, D) or (K,), as `covariance_type` says.
    precisions_cholesky_ : upper triangles U with `precisions_` = U Uᵀ, or the square roots of `precisions_`.
    posterior_ : families over "weights" and "components"; for EM, point masses.
    bound_ : the evidence lower bound with all constants; for EM the log-likelihood.
    bound_error_ : its error in nats, 0: the bound is in closed form.
    lower_bound_ : `bound_` divided by the number of rows.
    lower_bounds_ : the same before each step of the best start, less the penalty of `reg_covar`, and at last
        `lower_bound_`.
    converged_, n_iter_ : whether the fit converged, and its number of steps.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.concatenate([np.random.default_rng(0).normal(m, 1.0, (100, 2)) for m in (0, 5)])
    >>> mixture = GaussianMixture(2, method="vmp", random_state=0).fit(X)
    >>> sorted(mixture.means_[:, 0].round().tolist()), float(mixture.predict_proba(X[:1]).max().round(3))
    ([0.0, 5.0], 1.0)
    """

    model = "mixture"
    tasks = ("clusters",)
    title = "a mixture of Gaussians"
    _computes_likelihood: ClassVar[bool] = True

    def __init__(
        self,
        n_components: int = 1,
        *,
        method: Any = "em",
        covariance_type: Covariance = "full",
        max_iter: int = 1000,
        tol: float = 1e-4,
        n_init: int = 1,
        reg_covar: float = 1e-6,
        batch_size: int | None = None,
        learning_decay: float = 0.7,
        learning_offset: float = 2.0,
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.method = method
        self.covariance_type = covariance_type
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
        self.reg_covar = reg_covar
        self.batch_size = batch_size
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.verbose = verbose
        self.random_state = random_state

    def _rule(self) -> Rule:
        if isinstance(self.method, str) and self.method == "svi":
            return svi(PowerDecay(self.learning_offset, self.learning_decay), order="parallel")
        return super()._rule()

    @double_precision
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to rows X (N, D)."""
        dtype = input_dtype(X)
        rows = training_rows(self, X)
        moments = rows.reduce(_moments, merge_moments)
        count = moments.rows
        check_positive_ints(self, "n_components")
        if count < self.n_components:
            raise ValueError(
                f"Expected n_samples >= n_components but got n_components = {self.n_components}, n_samples = {count}: "
                "some components would have no row. Use fewer."
            )
        if not self.reg_covar >= 0:
            raise ValueError(f"reg_covar= is a variance, 0 or more, got {self.reg_covar!r}.")
        # Messages are products of entries: of centred rows they lose no digits.
        center = moments.center
        start = self._check_start(center)
        centred, batch_size = rows.map(np.subtract, center), self._batch_rows(count)
        check_full_batches(rows, batch_size)
        data: Any = centred.map(_named)
        if isinstance(data, DaskParts):
            data = data.known(rows=count, count=float(count))
        if isinstance(data, RowsInMemory):
            # Missing rows contribute nothing to a full batch.
            data = data.part if batch_size else {"y": pad(centred.take(slice(None)), padded_rows(count), fill=np.nan)}
        priors = {}
        if self._rule().name != "em":
            covariance = centred.reduce(_sum_of_products, np.add) / (count - 1)
            kind: Any = self.covariance_type
            priors = priors_from_moments(np.zeros_like(center), covariance, self.n_components, kind)
        settings = (self.n_components, self.covariance_type, self.reg_covar * count)
        build = partial(_build_model, start_rows(centred, count), priors, start, *settings)
        fitted = self._fit_starts(build, data, count, batch_size)
        q = fitted.result.q
        self._set_attributes(fitted, Product({**q.blocks, "components": with_shifted_mean(q["components"], center)}))
        if isinstance(self.posterior_["components"], Peak):
            self.bound_ = float(rows.reduce(_sum_of_log_densities, np.add, self.posterior_))
        self.lower_bound_ = self.bound_ / count
        bounds = fitted.result.trace.get("bound", ())
        self.lower_bounds_ = np.append(np.asarray(bounds, float) / count, self.lower_bound_)
        self.weights_ = self._weights().astype(dtype)
        means, precisions = mean_and_precision(self.posterior_["components"])
        shared = {"tied": lambda every: every[0], "spherical": lambda every: every[:, 0]}
        precisions = shared.get(self.covariance_type, lambda every: every)(precisions)
        covariances = np.linalg.inv(precisions) if self._has_matrices else 1 / precisions
        self.means_, self.precisions_, self.covariances_ = (
            np.array(part, dtype) for part in (means, precisions, covariances)
        )
        return self

    def _weights(self) -> np.ndarray:
        return np.asarray(self.posterior_["weights"].mean, float)

    @property
    def _has_matrices(self) -> bool:
        """Whether covariances are matrices, and not variances."""
        return self.covariance_type in ("full", "tied")

    @property
    def precisions_cholesky_(self) -> np.ndarray:
        """Upper triangles whose products with their transposes are the precisions, or roots of these."""
        if not self._has_matrices:
            return np.sqrt(self.precisions_)
        # With Σ = LLᵀ the precision is L⁻ᵀL⁻¹.
        return np.swapaxes(np.linalg.inv(np.linalg.cholesky(self.covariances_)), -1, -2)

    def _check_start(self, center: np.ndarray) -> dict[str, np.ndarray]:
        """The parts of a start that were given, checked; means are of centred rows."""
        count, size, kind = self.n_components, len(center), self.covariance_type
        shapes = {"full": (count, size, size), "tied": (size, size), "diag": (count, size), "spherical": (count,)}
        if kind not in shapes:
            raise ValueError(f"covariance_type= is {', '.join(map(repr, shapes))}, got {kind!r}.")
        given = {
            "weights": ("weights", self.weights_init, (count,)),
            "means": ("means", self.means_init, (count, size)),
            "precisions": (f"{kind} precision", self.precisions_init, shapes[kind]),
        }
        start = {}
        for name, (label, value, shape) in given.items():
            if value is None:
                continue
            start[name] = np.asarray(value, float)
            if start[name].shape != shape:
                raise ValueError(
                    f"The parameter '{label}' should have the shape of {shape}, but got {start[name].shape}: give "
                    f"{name}_init= for {count} components and {size} columns."
                )
        if "weights" in start:
            _check_weights(start["weights"])
        if "means" in start:
            start["means"] = start["means"] - center
        if "precisions" in start:
            _check_precisions(start["precisions"], kind)
        return start

    def _batch_rows(self, rows: int) -> int | None:
        """Rows of a mini-batch; None for full batches."""
        if self.batch_size is not None:
            check_positive_ints(self, "batch_size")
        stochastic = isinstance(self.method, str) and self.method == "svi"
        size = _SVI_BATCH if self.batch_size is None and stochastic else self.batch_size
        return None if size is None or size >= rows else size

    def _log_joint(self, X: np.ndarray) -> np.ndarray:
        """log E π_k + log p(y_n | k), (N, K)."""
        return _log_joint(X, self.posterior_)

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability that each row comes from each component."""
        log_joint = self._log_joint(self._validate(X))
        return np.exp(log_joint - logsumexp(log_joint, axis=1, keepdims=True))

    @row_by_row
    @double_precision
    def predict(self, X: Any) -> np.ndarray:
        """The most probable component of each row."""
        return self._log_joint(self._validate(X)).argmax(axis=1)

    def fit_predict(self, X: Any, y: Any = None) -> np.ndarray:
        """Fit, and return the most probable component of each row."""
        return self.fit(X).predict(X)

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def score_samples(self, X: Any) -> np.ndarray:
        """The log density of each row."""
        return np.asarray(logsumexp(self._log_joint(self._validate(X)), axis=1))

    def score(self, X: Any, y: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]  # scikit-learn types it as None.
        """The mean log density of the rows."""
        return float(self.score_samples(X).mean())

    @double_precision
    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows drawn from the fitted density, and the component of each."""
        check_is_fitted(self)
        positive_int("n_samples", n_samples)
        random, weights = check_random_state(self.random_state), self._weights()
        labels = np.repeat(np.arange(len(weights)), random.multinomial(n_samples, weights))
        return build_predictive(self.posterior_["components"]).sample(random, labels), labels

    def _n_parameters(self) -> int:
        """The number of free parameters."""
        count, size = self.means_.shape
        triangle = size * (size + 1) // 2
        covariances = {"full": count * triangle, "tied": triangle, "diag": count * size, "spherical": count}
        return count * size + covariances[self.covariance_type] + count - 1

    def bic(self, X: Any) -> float:
        """The Bayesian information criterion on these rows; lower is better."""
        return -2 * self.score(X) * len(X) + self._n_parameters() * np.log(len(X))

    def aic(self, X: Any) -> float:
        """Akaike's information criterion on these rows; lower is better."""
        return -2 * self.score(X) * len(X) + 2 * self._n_parameters()


def _check_weights(weights: np.ndarray) -> None:
    if np.any(weights < 0) or np.any(weights > 1):
        raise ValueError(
            "The parameter 'weights' should be in the range [0, 1], but got max value "
            f"{np.max(weights):.5f}, min value {np.min(weights):.5f}: weights_init= are probabilities."
        )
    if abs(1 - weights.sum()) > 1e-6:
        raise ValueError(
            f"The parameter 'weights' should be normalized, but got sum(weights) = {weights.sum():.5f}: divide "
            "weights_init= by its sum."
        )


def _check_precisions(precisions: np.ndarray, kind: str) -> None:
    if kind in ("diag", "spherical"):
        if np.any(precisions <= 0):
            raise ValueError(f"'{kind} precision' should be positive: precisions_init= are inverse variances.")
        return
    symmetric = np.allclose(precisions, np.swapaxes(precisions, -1, -2))
    if not symmetric or np.any(np.linalg.eigvalsh(precisions) <= 0):
        raise ValueError(
            f"'{kind} precision' should be symmetric, positive-definite: precisions_init= are inverse covariances."
        )


def _log_joint(X: np.ndarray, posterior: Any) -> np.ndarray:
    log_weights = np.log(np.maximum(np.asarray(posterior["weights"].mean, float), np.finfo(float).tiny))
    return log_weights + build_predictive(posterior["components"]).log_prob(X)


def _sum_of_log_densities(X: np.ndarray, posterior: Any) -> np.ndarray:
    densities: Any = logsumexp(_log_joint(X, posterior), axis=1)
    return densities.sum()


def _moments(X: np.ndarray) -> Moments:
    return moments_of(X, np.ones(len(X)))


def _sum_of_products(X: np.ndarray) -> np.ndarray:
    return X.T @ X


def _named(X: np.ndarray) -> dict[str, np.ndarray]:
    return {"y": X}


def _build_model(
    rows: np.ndarray,
    usual: dict[str, Any],
    values: dict[str, np.ndarray],
    count: int,
    covariance: Any,
    penalty: float,
    priors: Any,
    key: Key,
    start: int,
) -> Model:
    floor = penalty / count if priors == "flat" else 0.0
    if priors == "default":
        priors = usual
    options: dict[str, Any] = {"priors": priors, "floor": floor, "key": key, "start": start, **values}
    return gaussian_mixture(rows, count, covariance=covariance, **options)
