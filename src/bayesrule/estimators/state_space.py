"""Linear-Gaussian state spaces as estimators: transitions, loadings and noise learnt by EM or with a posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from ..factor_graph.model import Model
from ..families.sites.state_space import StateSpace
from ..models import kalman
from ..models.linear_gaussian import linear_gaussian, state_space
from ..recipes import em, vmp
from ..rule.rule import Rule
from .base import double
from .base_iterative import check_positive_ints
from .base_sequence import SequenceModel, Series, horizon


class LinearGaussianStateSpace(SequenceModel):
    r"""A state space that is learnt: $x_{t+1} ∼ N(Ax_t, I)$, $y_t ∼ N(m + Cx_t, \mathrm{diag}\,ψ)$, $x_0 ∼ N(0, 10I)$.

    States of unit noise are no loss: any other is a change of their coordinates. `Y` is one series, (T, D) or (T,),
    many of one length, (N, T, D), or a list of series; NaN is a missing value, entry by entry. m is the mean of all
    steps. `score`, `filter`, `smooth` and `predict` are Kalman's, with A, C and ψ at their estimates.

    Parameters
    ----------
    n_states : how many numbers a state has.
    method : "em" (maximum likelihood) or "vmp" (a posterior; states that are not needed fade); or a rule.
    max_iter, tol : a fit ends when a step could gain less than `tol` nats for each step of Y, or after `max_iter`.
    random_state : draws the start of states beyond the principal components.

    Attributes
    ----------
    transition_ (K, K), loadings_ (D, K), noise_variance_ (D,), mean_ : A, C, ψ and m; under a posterior E A, E C and
        1/E[1/ψ].
    posterior_ : families over "transition", "loadings", "noise" (1/ψ) and, for "vmp", "scales" and "rates", of Y in
        units of `scale_` around m; for EM, points.
    bound_ : the evidence lower bound, every constant included; for EM one on the log-likelihood. n_iter_, converged_.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.sin(np.arange(100) / 4) + 0.05 * np.random.default_rng(0).normal(size=100)
    >>> model = LinearGaussianStateSpace(2, tol=1e-2).fit(y)
    >>> mean, std = model.predict(y, steps=3, return_std=True)
    >>> bool(np.all(np.abs(mean[:, 0] - np.sin(np.arange(100, 103) / 4)) < 3 * std[:, 0])), mean.shape
    (True, (3, 1))
    """

    model = "state-space"
    tasks = ("sequence",)
    title = "a linear-Gaussian state space"

    _methods: ClassVar[Mapping[str, Callable[..., Rule]]] = MappingProxyType({"em": em, "vmp": vmp})
    _advice: ClassVar[str] = "take fewer states, or method='vmp', whose priors keep every noise above 0"

    def __init__(
        self,
        n_states: int = 2,
        *,
        method: Any = "em",
        max_iter: int = 500,
        tol: float = 1e-3,
        random_state: Any = None,
    ):
        self.n_states = n_states
        self.method = method
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    @double
    def fit(self, Y: Any, y: Any = None) -> Self:
        """Fit to one series or many; NaN is missing."""
        series = self._series(Y, reset=True)
        check_positive_ints(self, "n_states")
        self.mean_ = np.nanmean(series.steps, axis=(0, 1))
        spread = np.nanstd(series.steps, axis=(0, 1))
        self.scale_ = np.where(spread > 0, spread, 1.0)
        steps = (series.steps - self.mean_) / self.scale_

        def built(priors: Any, key: Any) -> Model:
            return linear_gaussian(steps, self.n_states, priors=priors, lengths=True, key=key)

        data = {"y": steps, "lengths": series.lengths}
        self._keep(self._settle(built, data, int(series.lengths.sum())))
        self.bound_ -= float((~np.isnan(steps)).sum((0, 1)) @ np.log(self.scale_))  # the density of Y, in its own units
        system, noise = state_space(self.posterior_)
        self.transition_ = np.asarray(system.transition)
        self.loadings_ = np.asarray(system.emission) * self.scale_[:, None]
        self.noise_variance_ = np.asarray(noise) * self.scale_**2
        return self

    def _system(self) -> tuple[StateSpace, np.ndarray]:
        """In Y's units."""
        system, _ = state_space(self.posterior_)
        first = np.asarray(system.covariance)
        return StateSpace(self.transition_, np.eye(len(first)), self.loadings_, None, first), self.noise_variance_

    def _each(self, Y: Any, function: Callable[..., Any], ahead: int = 0) -> tuple[Series, list[Any]]:
        """What one of Kalman's functions says of each series, those past their ends missing."""
        check_is_fitted(self)
        series = self._series(Y, ahead=ahead)
        system, noise = self._system()
        return series, [function(system, steps - self.mean_, noise) for steps in series.steps]

    @double
    def score(self, Y: Any, y: Any = None) -> float:
        """The log-likelihood of the series."""
        return float(sum(self._each(Y, kalman.log_likelihood)[1]))

    @double
    def filter(self, Y: Any, *, return_cov: bool = False) -> Any:
        """The mean of each state, given the steps up to it: (T, K), or a list of these; and (T, K, K) covariances."""
        return self._states(*self._each(Y, kalman.filter), return_cov)

    @double
    def smooth(self, Y: Any, *, return_cov: bool = False) -> Any:
        """The mean of each state, given all steps: (T, K), or a list of these; and (T, K, K) covariances."""
        return self._states(*self._each(Y, kalman.smooth), return_cov)

    def _states(self, series: Series, found: list[Any], covariances: bool) -> Any:
        mean = series.cut([one.mean for one in found])
        return (mean, series.cut([one.covariance for one in found])) if covariances else mean

    @double
    def smooth_observations(self, Y: Any) -> tuple[Any, Any]:
        series, smoothed = self._each(Y, kalman.smooth)
        mean = series.each(lambda n, length: self.mean_ + np.asarray(smoothed[n].mean)[:length] @ self.loadings_.T)
        return mean, series.each(lambda n, length: self._observation_std(np.asarray(smoothed[n].covariance)[:length]))

    def _observation_std(self, state_covariance: np.ndarray) -> np.ndarray:
        """The standard deviation of each observation, (T, D), from the covariances of its state, (T, K, K)."""
        variance = np.einsum("md,tde,me->tm", self.loadings_, state_covariance, self.loadings_)
        return np.sqrt(variance + self.noise_variance_)

    @double
    def predict(self, Y: Any, steps: int = 1, *, return_std: bool = False) -> Any:
        """The mean of the next steps, (steps, D), or a list of these; with `return_std` their deviations too."""
        series, found = self._each(Y, kalman.filter, horizon(steps))
        ahead = lambda values, length: np.asarray(values)[length : length + steps]
        mean = series.each(lambda n, length: self.mean_ + ahead(found[n].mean, length) @ self.loadings_.T)
        if not return_std:
            return mean
        return mean, series.each(lambda n, length: self._observation_std(ahead(found[n].covariance, length)))
