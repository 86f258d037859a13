"""Hidden Markov models as estimators: Gaussian, Poisson and categorical emissions, by EM or with a posterior."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..factor_graph.model import Model
from ..families.product import Product
from ..models import hmm
from ..models.component_predictive import drawn, gaussians, predictive
from ..models.starts.clusters import with_shifted_mean
from ..numerics.checks import positive_int
from .base import double
from .base_iterative import Found, check_positive_ints
from .base_sequence import SequenceModel, Series, horizon


class _HMM(SequenceModel):
    """What they share: all but the emissions.

    What is known of the states has the chain at its means, and each step's density under the posterior of the
    emissions, ∫ f(y | θ_k) q(θ_k) dθ_k; for EM that is f at the estimates.
    """

    _scalar: ClassVar[bool] = False
    _advice: ClassVar[str] = "take fewer states, or method='vmp', whose priors keep every one in place"

    def __init__(
        self,
        n_components: int = 2,
        *,
        method: Any = "em",
        max_iter: int = 200,
        tol: float = 1e-5,
        n_init: int = 1,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.method = method
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
        self.random_state = random_state

    @abstractmethod
    def _learn(self, steps: np.ndarray, count: int) -> tuple[Found, Product]:
        """The fit to these steps, of which there are so many, and its q."""

    @abstractmethod
    def _estimates(self) -> None:
        """The emissions' own attributes."""

    @double
    def fit(self, Y: Any, y: Any = None) -> Self:
        """Fit to one series or many; NaN is missing."""
        series = self._series(Y, reset=True)
        check_positive_ints(self, "n_components")
        self._keep(*self._learn(self._observed(series), int(series.lengths.sum())))
        self.startprob_ = np.asarray(self.posterior_["initial"].mean)
        self.transmat_ = np.asarray(self.posterior_["transitions"].mean)
        self._estimates()
        return self

    def _observed(self, series: Series) -> np.ndarray:
        """Steps as the emissions take them: rows (N, T, D), or numbers (N, T)."""
        if not self._scalar:
            return series.steps
        if series.steps.shape[2] != 1:
            raise ValueError(f"{type(self).__name__} takes one category a step, got {series.steps.shape[2]} columns.")
        return series.steps[..., 0]

    def _hidden(self, Y: Any, ahead: int = 0) -> tuple[Series, hmm.Hidden]:
        """The chain at its means, and every step's predictive log density under every state, 0 where missing."""
        check_is_fitted(self)
        series = self._series(Y, ahead=ahead)
        steps = self._observed(series)
        flat = predictive(self.posterior_["states"]).log_prob(steps.reshape(-1, *steps.shape[2:]))
        found: Any = (self.startprob_, self.transmat_, flat.reshape(*steps.shape[:2], -1))
        return series, hmm.Hidden(*found)

    @double
    def score(self, Y: Any, y: Any = None) -> float:
        """The log-likelihood of the series."""
        return float(np.sum(hmm.log_likelihood(*self._hidden(Y)[1])))

    @double
    def filter(self, Y: Any) -> Any:
        """Each state's probability at each step, given the steps up to it: (T, K), or a list of these."""
        series, hidden = self._hidden(Y)
        return series.cut(hmm.filter(*hidden))

    @double
    def smooth(self, Y: Any) -> Any:
        """Each state's probability at each step, given all steps: (T, K), or a list of these."""
        series, hidden = self._hidden(Y)
        return series.cut(hmm.smooth(*hidden))

    @abstractmethod
    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the variance of an observation in each state, at the estimates: (K, D) each."""

    @double
    def smooth_observations(self, Y: Any) -> tuple[Any, Any]:
        means, variances = self._emission_moments()
        series, hidden = self._hidden(Y)
        chances = np.asarray(hmm.smooth(*hidden))
        mean = series.cut(chances @ means)
        return mean, series.cut(np.sqrt(chances @ (variances + means**2) - (chances @ means) ** 2))

    @double
    def decode(self, Y: Any) -> Any:
        """The most probable path of states (Viterbi's): (T,), or a list of these."""
        series, hidden = self._hidden(Y)
        return series.cut(hmm.viterbi(*hidden, series.lengths)[0])

    @double
    def predict(self, Y: Any, steps: int = 1, *, return_std: bool = False) -> Any:
        """The mean of the next steps, (steps, D), or a list of these; with `return_std` their deviations too."""
        series, hidden = self._hidden(Y, horizon(steps))
        chances = np.asarray(hmm.filter(*hidden))  # past its end a series is missing: what is left is a forecast
        emitted = predictive(self.posterior_["states"])
        ahead = lambda which, length: chances[which, length : length + steps]
        mean = series.each(lambda *at: ahead(*at) @ emitted.mean)
        if not return_std:
            return mean
        second = emitted.variance + emitted.mean**2
        spread = lambda *at: ahead(*at) @ second - (ahead(*at) @ emitted.mean) ** 2
        return mean, series.each(lambda *at: np.sqrt(np.maximum(spread(*at), 0.0)))

    @double
    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """A series of so many steps drawn from the model, and its states."""
        check_is_fitted(self)
        positive_int("n_samples", n_samples)
        random = check_random_state(self.random_state)
        states = [drawn(random, self.startprob_[None])]
        for _ in range(n_samples - 1):
            states.append(drawn(random, self.transmat_[states[-1]]))
        path = np.concatenate(states)
        rows = predictive(self.posterior_["states"]).sample(random, path)
        return rows.reshape(n_samples, -1), path


class GaussianHMM(_HMM):
    r"""A hidden Markov model with Gaussian emissions: $z_{t+1} ∼ A_{z_t}$ and $y_t \mid z_t = k ∼ N(m_k, Λ_k^{-1})$.

    `Y` is one series, (T, D) or (T,), many of one length, (N, T, D), or a list of series. NaN is a missing value: of a
    whole step, with "diag" of any entry.

    Parameters
    ----------
    n_components : how many states.
    covariance_type : "full" or "diag".
    method : "em" (Baum and Welch's algorithm) or "vmp" (a posterior); or a rule.
    max_iter, tol : a fit ends when a step could gain less than `tol` nats for each step of Y, or after `max_iter`.
    n_init : starts (k-means clusterings), of which the best is kept.
    reg_covar : keeps EM's variances from 0: T/K times it is added to each state's sum of squares.
    random_state : a seed, a NumPy RandomState or None.

    Attributes
    ----------
    startprob_ (K,), transmat_ (K, K), means_, covariances_, precisions_ : estimates; under a posterior means, (E Λ)⁻¹
        and E Λ.
    posterior_ : families over "initial", "transitions" and "states"; for EM, points.
    bound_ : the evidence lower bound, every constant included; for EM the log-likelihood with its penalty. n_iter_,
        converged_.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.random.default_rng(0).normal(size=(300, 1)) + np.repeat([[0.0], [5.0], [0.0]], 100, axis=0)
    >>> model = GaussianHMM(2, random_state=0).fit(y)
    >>> len(set(model.decode(y)[:100])), model.predict(y, steps=2).round().tolist()
    (1, [[0.0], [0.0]])
    """

    model = "hmm"
    tasks = ("sequence",)
    title = "a hidden Markov model"

    def __init__(
        self,
        n_components: int = 2,
        *,
        covariance_type: Literal["full", "diag"] = "full",
        method: Any = "em",
        max_iter: int = 200,
        tol: float = 1e-5,
        n_init: int = 1,
        reg_covar: float = 1e-6,
        random_state: Any = None,
    ):
        super().__init__(
            n_components, method=method, max_iter=max_iter, tol=tol, n_init=n_init, random_state=random_state
        )
        self.covariance_type = covariance_type
        self.reg_covar = reg_covar

    def _learn(self, steps: np.ndarray, count: int) -> tuple[Found, Product]:
        there = ~np.isnan(steps)
        if self.covariance_type == "full" and np.any(there.any(-1) & ~there.all(-1)):
            raise ValueError('Y has steps that are missing in part, for which take covariance_type="diag".')
        if not self.reg_covar >= 0:
            raise ValueError(f"reg_covar= is a variance, 0 or more, got {self.reg_covar!r}.")
        center = np.nanmean(steps, axis=(0, 1))  # messages are products of entries: centred, they lose no digits
        how: dict[str, Any] = {"covariance": self.covariance_type}

        def built(priors: Any, key: Any) -> Model:
            floor = self.reg_covar * count / self.n_components if priors == "flat" else 0.0
            return hmm.gaussian_hmm(steps - center, self.n_components, priors=priors, floor=floor, key=key, **how)

        found = self._settle(built, {"y": steps - center}, count)
        q = found.result.q
        return found, Product({**q.blocks, "states": with_shifted_mean(q["states"], center)})

    def _estimates(self) -> None:
        self.means_, self.precisions_ = gaussians(self.posterior_["states"])
        full = self.precisions_.ndim == 3
        self.covariances_ = np.linalg.inv(self.precisions_) if full else 1 / self.precisions_

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        full = self.covariances_.ndim == 3
        return self.means_, np.diagonal(self.covariances_, axis1=1, axis2=2) if full else self.covariances_


class PoissonHMM(_HMM):
    r"""A hidden Markov model of counts: $z_{t+1} ∼ A_{z_t}$ and $y_{td} \mid z_t = k ∼ \mathrm{Poisson}(r_{kd})$.

    Series, parameters and attributes are those of `GaussianHMM`, but for the emissions': `rates_` (K, D) are the
    estimates or posterior means of r, and any entry may be missing.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.random.default_rng(0).poisson(np.repeat([1.0, 9.0], 100))
    >>> sorted(PoissonHMM(2, method="vmp", random_state=0).fit(y).rates_[:, 0].round().tolist())
    [1.0, 9.0]
    """

    title = "a hidden Markov model of counts"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags

    def _learn(self, steps: np.ndarray, count: int) -> tuple[Found, Product]:
        built = lambda priors, key: hmm.poisson_hmm(steps, self.n_components, priors=priors, key=key)
        found = self._settle(built, {"y": steps}, count)
        return found, found.result.q

    def _estimates(self) -> None:
        self.rates_ = np.asarray(self.posterior_["states"].mean)

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rates_, self.rates_


class CategoricalHMM(_HMM):
    r"""A hidden Markov model of categories 0, …, V − 1: $z_{t+1} ∼ A_{z_t}$ and $p(y_t = v \mid z_t = k) = B_{kv}$.

    A series is (T,) or (T, 1); parameters and attributes are those of `GaussianHMM`, but for the emissions':
    `n_categories` is V, by default what is seen, `emissionprob_` (K, V) the estimate or posterior mean of B, and
    `predict` gives the probabilities of the categories.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.random.default_rng(0).choice(3, size=200, p=[0.6, 0.3, 0.1])
    >>> CategoricalHMM(2, method="vmp", random_state=0).fit(y).predict(y, steps=1).round(1).tolist()
    [[0.6, 0.3, 0.1]]
    """

    title = "a hidden Markov model of categories"
    _scalar: ClassVar[bool] = True

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_categories: int | None = None,
        method: Any = "em",
        max_iter: int = 200,
        tol: float = 1e-5,
        n_init: int = 1,
        random_state: Any = None,
    ):
        super().__init__(
            n_components, method=method, max_iter=max_iter, tol=tol, n_init=n_init, random_state=random_state
        )
        self.n_categories = n_categories

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.categorical = True
        return tags

    def _observed(self, series: Series) -> np.ndarray:
        steps = super()._observed(series)
        seen = steps[~np.isnan(steps)]
        most = len(self.emissionprob_[0]) if hasattr(self, "emissionprob_") else np.inf
        if np.any(seen < 0) or np.any(seen != np.round(seen)) or np.any(seen >= most):
            raise ValueError(f"Categories are whole numbers from 0 to {most - 1:g}, NaN where missing: Y has others.")
        return steps

    def _learn(self, steps: np.ndarray, count: int) -> tuple[Found, Product]:
        how: dict[str, Any] = {"categories": self.n_categories}
        built = lambda priors, key: hmm.categorical_hmm(steps, self.n_components, priors=priors, key=key, **how)
        found = self._settle(built, {"y": steps}, count)
        return found, found.result.q

    def _estimates(self) -> None:
        self.emissionprob_ = np.asarray(self.posterior_["states"].mean)

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the indicators of the categories."""
        return self.emissionprob_, self.emissionprob_ * (1 - self.emissionprob_)
