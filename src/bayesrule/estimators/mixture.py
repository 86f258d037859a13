"""Mixtures of Gaussians as scikit-learn has them: by EM, or with a posterior over their weights and components."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.special import logsumexp
from sklearn.base import DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..families.point_mass import Peak
from ..families.product import Product
from ..models.component_predictive import gaussians, predictive
from ..models.mixture import gaussian_mixture, usual_priors
from ..models.starts.clusters import with_shifted_mean
from ..numerics.checks import positive_int
from ..numerics.padding import pad
from ..recipes import svi
from ..rule.rule import Rule
from .base import double
from .base_iterative import Falling, Iterated, check_positive_ints, padded_rows

_BATCH = 256


class GaussianMixture(DensityMixin, Iterated):
    r"""A mixture of Gaussians, $p(y) = \sum_k π_k N(y \mid m_k, Λ_k^{-1})$, by the rule.

    Densities of new rows, and the probabilities of components, are those under the posterior: at the estimates for
    EM, Student-t's with mean weights, $\sum_k E[π_k] ∫ N(y \mid θ_k) q(θ_k)dθ_k$, for the others. Their priors are
    those of scikit-learn's BayesianGaussianMixture with a Dirichlet distribution.

    Parameters
    ----------
    n_components : how many Gaussians.
    method : "em" (maximum likelihood), "vmp" (a posterior, by messages) or "svi" (by mini-batches of them); or a rule.
    covariance_type : "full" or "diag".
    max_iter : steps at most; for "svi", passes over the data.
    tol : a fit ends when a step could gain less than this many nats for each row.
    n_init : starts (k-means clusterings), of which the best is kept.
    reg_covar : keeps EM's variances from 0: N/K times it is added to each component's sum of squares.
    batch_size : rows of a mini-batch; None is all of them, for "svi" at most 256.
    learning_decay, learning_offset : "svi" has the rates (t + offset)^−decay.
    random_state : a seed, a NumPy RandomState or None.

    Attributes
    ----------
    weights_, means_, covariances_, precisions_ : estimates; under a posterior E π, E m, (E Λ)⁻¹ and E Λ.
    posterior_ : families over "weights" and "components"; for EM, points.
    bound_ : the evidence lower bound, every constant included; for EM the log-likelihood.
    lower_bound_ : the same for each row. converged_, n_iter_ : whether it did, and how many steps it took.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.concatenate([np.random.default_rng(0).normal(m, 1.0, (100, 2)) for m in (0, 5)])
    >>> mixture = GaussianMixture(2, method="vmp", random_state=0).fit(X)
    >>> sorted(mixture.means_[:, 0].round().tolist()), float(mixture.predict_proba(X[:1]).max().round(3))
    ([0.0, 5.0], 1.0)
    """

    title = "a mixture of Gaussians"
    _evident: ClassVar[bool] = True

    def __init__(
        self,
        n_components: int = 1,
        *,
        method: Any = "em",
        covariance_type: Literal["full", "diag"] = "full",
        max_iter: int = 200,
        tol: float = 1e-4,
        n_init: int = 1,
        reg_covar: float = 1e-6,
        batch_size: int | None = None,
        learning_decay: float = 0.7,
        learning_offset: float = 2.0,
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
        self.random_state = random_state

    def _rule(self) -> Rule:
        if isinstance(self.method, str) and self.method == "svi":
            return svi(Falling(self.learning_offset, self.learning_decay), order="parallel")
        return super()._rule()

    @double
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to rows X (N, D)."""
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        check_positive_ints(self, "n_components")
        if not self.reg_covar >= 0:
            raise ValueError(f"reg_covar= is a variance, 0 or more, got {self.reg_covar!r}.")
        # Products of entries are what the messages are made of: centred, they lose no digits.
        center = X.mean(0)
        rows, batch = X - center, self._batch(len(X))
        if batch is None:
            rows = pad(rows, padded_rows(len(X)), fill=np.nan)  # missing rows, which say nothing
        build = partial(_built, rows, self.n_components, self.covariance_type, self.reg_covar * len(X))
        found = self._settle(build, {"y": rows}, len(X), batch)
        q = found.result.q
        self._keep(found, Product({**q.blocks, "components": with_shifted_mean(q["components"], center)}))
        self.weights_ = np.asarray(self.posterior_["weights"].mean)
        self.means_, self.precisions_ = gaussians(self.posterior_["components"])
        self.covariances_ = np.linalg.inv(self.precisions_) if self._full else 1 / self.precisions_
        if isinstance(self.posterior_["components"], Peak):
            self.bound_ = float(logsumexp(self._joint(X), axis=1).sum())
        self.lower_bound_ = self.bound_ / len(X)
        return self

    def _batch(self, rows: int) -> int | None:
        if self.batch_size is not None:
            check_positive_ints(self, "batch_size")
        stochastic = isinstance(self.method, str) and self.method == "svi"
        size = _BATCH if self.batch_size is None and stochastic else self.batch_size
        return None if size is None or size >= rows else size

    @property
    def _full(self) -> bool:
        return self.precisions_.ndim == 3

    def _rows(self, X: Any) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False)

    def _joint(self, X: np.ndarray) -> np.ndarray:
        """log E π_k + log p(y_n | k), (N, K)."""
        weights = np.log(np.maximum(self.weights_, np.finfo(float).tiny))
        return weights + predictive(self.posterior_["components"]).log_prob(X)

    @double
    def predict_proba(self, X: Any) -> np.ndarray:
        """Each row's probability of coming from each component."""
        joint = self._joint(self._rows(X))
        return np.exp(joint - logsumexp(joint, axis=1, keepdims=True))

    @double
    def predict(self, X: Any) -> np.ndarray:
        """Each row's most probable component."""
        return self._joint(self._rows(X)).argmax(axis=1)

    def fit_predict(self, X: Any, y: Any = None) -> np.ndarray:
        """`fit`, and each row's most probable component."""
        return self.fit(X).predict(X)

    @double
    def score_samples(self, X: Any) -> np.ndarray:
        """The log density of each row."""
        return np.asarray(logsumexp(self._joint(self._rows(X)), axis=1))

    def score(self, X: Any, y: Any = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]  # a number, typed None there
        """The mean log density of the rows."""
        return float(self.score_samples(X).mean())

    @double
    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows drawn from the fitted density, and the component of each."""
        check_is_fitted(self)
        positive_int("n_samples", n_samples)
        random = check_random_state(self.random_state)
        labels = np.repeat(np.arange(len(self.weights_)), random.multinomial(n_samples, self.weights_))
        return predictive(self.posterior_["components"]).sample(random, labels), labels

    def _n_parameters(self) -> int:
        count, size = self.means_.shape
        return count * (size + (size * (size + 1) // 2 if self._full else size)) + count - 1

    def bic(self, X: Any) -> float:
        """Schwarz's criterion on these rows: the lower the better."""
        return -2 * self.score(X) * len(X) + self._n_parameters() * np.log(len(X))

    def aic(self, X: Any) -> float:
        """Akaike's criterion on these rows: the lower the better."""
        return -2 * self.score(X) * len(X) + 2 * self._n_parameters()


def _built(rows: np.ndarray, count: int, covariance: Any, penalty: float, priors: Any, key: Any) -> Any:
    floor = penalty / count if priors == "flat" else 0.0
    if priors == "default":
        priors = usual_priors(rows, count, covariance)
    return gaussian_mixture(rows, count, covariance=covariance, priors=priors, floor=floor, key=key)
