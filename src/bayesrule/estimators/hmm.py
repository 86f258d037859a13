"""Hidden Markov models with Gaussian, Poisson or categorical emissions, by EM or with a posterior."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..factor_graph.model import Model
from ..families.product import Product
from ..models import hmm
from ..models.component_predictive import build_predictive, draw_categories, mean_and_precision
from ..models.starts.clusters import with_shifted_mean
from ..numerics.checks import positive_int
from ..numerics.random import Key
from .base import double_precision
from .base_iterative import FittedModel, check_positive_ints
from .base_sequence import SequenceModel, Series, check_horizon, check_no_target


class _HMM(SequenceModel):
    """A hidden Markov model; subclasses add the emissions.

    States are inferred with the initial and transition probabilities at their posterior means, and with the predictive
    density of each step, ∫ p(y | θ_k) q(θ_k) dθ_k; for EM that is the density at the estimates.
    """

    _is_scalar: ClassVar[bool] = False
    """Whether an observation is one number and not a row of them."""
    _advice: ClassVar[str] = "take fewer states, or method='vmp', whose priors keep states from collapsing"

    def __init__(
        self,
        n_components: int = 2,
        *,
        method: Any = "em",
        max_iter: int = 1000,
        tol: float = 1e-4,
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
    def _fit_steps(self, steps: np.ndarray, count: int) -> tuple[FittedModel, Product]:
        """Fit the model. Called by `fit`.

        Args:
            steps: the padded series, (N, T, D) or (N, T), NaN where missing.
            count: the number of steps that are not padding.

        Returns:
            The fit, and its posterior in the units of Y.
        """

    @abstractmethod
    def _set_emissions(self) -> None:
        """Set the fitted attributes of the emissions from `posterior_`. Called at the end of `fit`."""

    @double_precision
    def fit(self, Y: Any, y: Any = None, *, lengths: Any = None) -> Self:
        """Fit to one series or many; NaN is a missing value. `lengths` are those of series one after another in Y."""
        check_no_target(Y, y)
        series = self._series(Y, lengths, reset=True)
        check_positive_ints(self, "n_components")
        self._set_attributes(*self._fit_steps(self._observed(series), int(series.lengths.sum())))
        self.startprob_ = np.asarray(self.posterior_["initial"].mean)
        self.transmat_ = np.asarray(self.posterior_["transitions"].mean)
        self._set_emissions()
        return self

    def _observed(self, series: Series) -> np.ndarray:
        """The steps as the emissions take them: rows (N, T, D), or numbers (N, T)."""
        if not self._is_scalar:
            return series.steps
        if series.steps.shape[2] != 1:
            columns = series.steps.shape[2]
            raise ValueError(f"{type(self).__name__} takes one category for each step, got {columns} columns.")
        return series.steps[..., 0]

    def _chain(self, Y: Any, lengths: Any = None, ahead: int = 0) -> tuple[Series, hmm.Hidden]:
        """The chain at its posterior means, and the predictive log density of each step in each state, 0 if missing."""
        check_is_fitted(self)
        series = self._series(Y, lengths, ahead=ahead)
        steps = self._observed(series)
        log_densities = build_predictive(self.posterior_["states"]).log_prob(steps.reshape(-1, *steps.shape[2:]))
        chain: Any = (self.startprob_, self.transmat_, log_densities.reshape(*steps.shape[:2], -1))
        return series, hmm.Hidden(*chain)

    @double_precision
    def score(self, Y: Any, y: Any = None, *, lengths: Any = None) -> float:
        """The log-likelihood of the series."""
        check_no_target(Y, y)
        return float(np.sum(hmm.log_likelihood(*self._chain(Y, lengths)[1])))

    @double_precision
    def filter(self, Y: Any, *, lengths: Any = None) -> Any:
        """The probability of each state at each step, given the steps up to it: (T, K), or a list of these."""
        series, chain = self._chain(Y, lengths)
        return series.cut(hmm.filter(*chain))

    @double_precision
    def smooth(self, Y: Any, *, lengths: Any = None) -> Any:
        """The probability of each state at each step, given all steps: (T, K), or a list of these."""
        series, chain = self._chain(Y, lengths)
        return series.cut(hmm.smooth(*chain))

    @abstractmethod
    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the variance of an observation in each state, at the estimates: (K, D) each."""

    @double_precision
    def smooth_observations(self, Y: Any) -> tuple[Any, Any]:
        means, variances = self._emission_moments()
        series, chain = self._chain(Y)
        mean, variance = _mixed_moments(np.asarray(hmm.smooth(*chain)), means, variances)
        return series.cut(mean), series.cut(np.sqrt(variance))

    @double_precision
    def decode(self, Y: Any, *, lengths: Any = None) -> Any:
        """The most probable path of states, by Viterbi's algorithm: (T,), or a list of these."""
        series, chain = self._chain(Y, lengths)
        return series.cut(hmm.viterbi(*chain, series.lengths)[0])

    @double_precision
    def predict(self, Y: Any, steps: int = 1, *, return_std: bool = False, lengths: Any = None) -> Any:
        """The mean of the next steps, (steps, D), or a list of these; with `return_std` also their deviations."""
        series, chain = self._chain(Y, lengths, check_horizon(steps))
        # The padding beyond the end of a series is missing steps, for which the filter gives forecasts.
        probabilities = np.asarray(hmm.filter(*chain))
        emissions = build_predictive(self.posterior_["states"])
        ahead = lambda index, length: probabilities[index, length : length + steps]
        moments = lambda *at: _mixed_moments(ahead(*at), emissions.mean, emissions.variance)
        mean = series.each(lambda *at: moments(*at)[0])
        return (mean, series.each(lambda *at: np.sqrt(moments(*at)[1]))) if return_std else mean

    @double_precision
    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Draw a series of so many steps from the model; returns it and its states."""
        check_is_fitted(self)
        positive_int("n_samples", n_samples)
        random = check_random_state(self.random_state)
        states = [draw_categories(random, self.startprob_[None])]
        for _ in range(n_samples - 1):
            states.append(draw_categories(random, self.transmat_[states[-1]]))
        path = np.concatenate(states)
        rows = build_predictive(self.posterior_["states"]).sample(random, path)
        return rows.reshape(n_samples, -1), path


def _mixed_moments(
    probabilities: np.ndarray, means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    r"""The mean $m = \sum_kp_km_k$ and the variance $\sum_kp_k[v_k + (m_k − m)^2]$ of mixtures of K states.

    The variance is no difference of second moments, which would cancel where the means are large.

    Args:
        probabilities: p, (…, K).
        means: m_k, (K, D).
        variances: v_k, (K, D).
    """
    mean = probabilities @ means
    variance = np.zeros_like(mean)
    for k in range(len(means)):  # State by state: an array of all steps, states and entries may be large.
        variance += probabilities[..., k, None] * ((means[k] - mean) ** 2 + variances[k])
    return mean, variance


class GaussianHMM(_HMM):
    r"""A hidden Markov model with Gaussian emissions: $z_{t+1} ∼ A_{z_t}$ and $y_t \mid z_t = k ∼ N(m_k, Λ_k^{-1})$.

    `Y` is one series, (T, D) or (T,), many of one length, (N, T, D), or a list of series. NaN is a missing value. Of a
    step that is missing in part the observed entries count, in `fit` as in `score`, `filter` and `smooth`.

    Parameters
    ----------
    n_components : int, default=2
        The number of states.
    covariance_type : {"full", "diag"}, default="full"
        The covariances of the emissions.
    method : {"em", "vmp"} or Rule, default="em"
        Maximum likelihood by EM (the Baum–Welch algorithm), or a posterior by variational message passing.
    max_iter : int, default=1000
        The maximal number of steps of the algorithm.
    tol : float, default=1e-4
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats for each
        step of Y.
    n_init : int, default=1
        The number of starts, of which the best is taken, as for `GaussianMixture`.
    reg_covar : float, default=1e-6
        Keeps EM's variances above 0: T/K times it is added to each state's sum of squares.
    random_state : int, RandomState or None, default=None
        The seed.

    Attributes
    ----------
    startprob_ (K,), transmat_ (K, K) : initial and transition probabilities; with a posterior their means.
    means_, covariances_, precisions_ : estimates; with a posterior E m, (E Λ)⁻¹ and E Λ.
    posterior_ : families over "initial", "transitions" and "states"; for EM, point masses.
    bound_ : the evidence lower bound with all constants; for EM the log-likelihood with its penalty.
    bound_error_ : its error in nats, 0: the bound is in closed form.
    converged_, n_iter_ : whether the fit converged, and its number of steps.

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
        max_iter: int = 1000,
        tol: float = 1e-4,
        n_init: int = 1,
        reg_covar: float = 1e-6,
        random_state: Any = None,
    ):
        super().__init__(
            n_components, method=method, max_iter=max_iter, tol=tol, n_init=n_init, random_state=random_state
        )
        self.covariance_type = covariance_type
        self.reg_covar = reg_covar

    def _fit_steps(self, steps: np.ndarray, count: int) -> tuple[FittedModel, Product]:
        if not self.reg_covar >= 0:
            raise ValueError(f"reg_covar= is a variance, 0 or more, got {self.reg_covar!r}.")
        center = np.nanmean(
            steps, axis=(0, 1)
        )  # Messages are products of entries: of centred steps they lose no digits.
        options: dict[str, Any] = {"covariance": self.covariance_type}

        def build(priors: Any, key: Key, start: int) -> Model:
            floor = self.reg_covar * count / self.n_components if priors == "flat" else 0.0
            how = {"priors": priors, "floor": floor, "key": key, "start": start, **options}
            return hmm.gaussian_hmm(steps - center, self.n_components, **how)

        fitted = self._fit_starts(build, {"y": steps - center}, count)
        q = fitted.result.q
        return fitted, Product({**q.blocks, "states": with_shifted_mean(q["states"], center)})

    def _set_emissions(self) -> None:
        self.means_, self.precisions_ = mean_and_precision(self.posterior_["states"])
        full = self.precisions_.ndim == 3
        self.covariances_ = np.linalg.inv(self.precisions_) if full else 1 / self.precisions_

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        full = self.covariances_.ndim == 3
        return self.means_, np.diagonal(self.covariances_, axis1=1, axis2=2) if full else self.covariances_


class PoissonHMM(_HMM):
    r"""A hidden Markov model of counts: $z_{t+1} ∼ A_{z_t}$ and $y_{td} \mid z_t = k ∼ \mathrm{Poisson}(r_{kd})$.

    Parameters
    ----------
    n_components, method, max_iter, tol, n_init, random_state
        As for `GaussianHMM`. Any entry of Y may be missing.

    Attributes
    ----------
    startprob_, transmat_, posterior_, bound_, converged_, n_iter_ : as for `GaussianHMM`.
    rates_ (K, D) : estimates of r; with a posterior their means.

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

    def _fit_steps(self, steps: np.ndarray, count: int) -> tuple[FittedModel, Product]:
        build = lambda priors, key, start: hmm.poisson_hmm(
            steps, self.n_components, priors=priors, key=key, start=start
        )
        fitted = self._fit_starts(build, {"y": steps}, count)
        return fitted, fitted.result.q

    def _set_emissions(self) -> None:
        self.rates_ = np.asarray(self.posterior_["states"].mean)

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rates_, self.rates_


class CategoricalHMM(_HMM):
    r"""A hidden Markov model of categories 0, …, V − 1: $z_{t+1} ∼ A_{z_t}$ and $p(y_t = v \mid z_t = k) = B_{kv}$.

    A series is (T,) or (T, 1). `predict` gives the probabilities of the categories.

    Parameters
    ----------
    n_categories : int or None, default=None
        V; None is the largest category in Y plus 1.
    n_components, method, max_iter, tol, n_init, random_state
        As for `GaussianHMM`.

    Attributes
    ----------
    startprob_, transmat_, posterior_, bound_, converged_, n_iter_ : as for `GaussianHMM`.
    emissionprob_ (K, V) : estimates of B; with a posterior their means.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.random.default_rng(0).choice(3, size=200, p=[0.6, 0.3, 0.1])
    >>> CategoricalHMM(2, method="vmp", random_state=0).fit(y).predict(y, steps=1).round(1).tolist()
    [[0.6, 0.3, 0.1]]
    """

    title = "a hidden Markov model of categories"
    _is_scalar: ClassVar[bool] = True

    def __init__(
        self,
        n_components: int = 2,
        *,
        n_categories: int | None = None,
        method: Any = "em",
        max_iter: int = 1000,
        tol: float = 1e-4,
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
        values = steps[~np.isnan(steps)]
        categories = len(self.emissionprob_[0]) if hasattr(self, "emissionprob_") else np.inf
        if np.any(values < 0) or np.any(values != np.round(values)) or np.any(values >= categories):
            raise ValueError(
                f"Categories are whole numbers from 0 to {categories - 1:g}, NaN where missing, and Y has others: "
                "encode its categories as such numbers."
            )
        return steps

    def _fit_steps(self, steps: np.ndarray, count: int) -> tuple[FittedModel, Product]:
        options: dict[str, Any] = {"categories": self.n_categories}
        build = lambda priors, key, start: hmm.categorical_hmm(
            steps, self.n_components, priors=priors, key=key, **options
        )
        fitted = self._fit_starts(build, {"y": steps}, count)
        return fitted, fitted.result.q

    def _set_emissions(self) -> None:
        self.emissionprob_ = np.asarray(self.posterior_["states"].mean)

    def _emission_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the indicators of the categories."""
        return self.emissionprob_, self.emissionprob_ * (1 - self.emissionprob_)
