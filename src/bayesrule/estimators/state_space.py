"""Linear-Gaussian state spaces: transitions, loadings and noise by EM or with a posterior."""

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
from ..numerics.random import Key
from ..recipes import em, vmp
from ..rule.rule import Rule
from .base import double_precision
from .base_iterative import check_positive_ints
from .base_sequence import SequenceModel, Series, check_horizon, check_no_target


class LinearGaussianStateSpace(SequenceModel):
    r"""A linear-Gaussian state space: $x_{t+1} ∼ N(Ax_t, I)$, $y_t ∼ N(m + Cx_t, \mathrm{diag}\,ψ)$, $x_0 ∼ N(0, 10I)$.

    Unit noise of the states is no restriction: any other noise is a change of their coordinates. m is the mean of all
    steps. `score`, `filter`, `smooth` and `predict` are those of the Kalman filter with A, C and ψ at their estimates.

    `Y` is one series, (T, D) or (T,), many of one length, (N, T, D), or a list of series; NaN is a missing value.

    Parameters
    ----------
    n_states : int, default=2
        The dimension of a state.
    method : {"em", "vmp"} or Rule, default="em"
        Maximum likelihood by EM, or a posterior by variational message passing, under which states that are not needed
        shrink to 0.
    max_iter : int, default=500
        The maximal number of steps of the algorithm.
    tol : float, default=1e-3
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats for each
        step of Y.
    random_state : int, RandomState or None, default=None
        The seed of the start of states beyond the principal components.

    Attributes
    ----------
    transition_ (K, K), loadings_ (D, K), noise_variance_ (D,), mean_ : A, C, ψ and m; with a posterior E A, E C and
        1/E[1/ψ].
    posterior_ : families over "transition", "loadings", "noise" (1/ψ) and, for "vmp", "scales" and "rates", for
        (Y − m)/`scale_`; for EM, point masses.
    scale_ : the standard deviations of the columns of Y.
    bound_ : the evidence lower bound with all constants; for EM a bound on the log-likelihood.
    bound_error_ : its error in nats, 0: the bound is in closed form.
    converged_, n_iter_ : whether the fit converged, and its number of steps.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.sin(np.arange(100) / 4) + 0.05 * np.random.default_rng(0).normal(size=100)
    >>> model = LinearGaussianStateSpace(2, tol=0.1).fit(y)
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

    @double_precision
    def fit(self, Y: Any, y: Any = None, *, lengths: Any = None) -> Self:
        """Fit to one series or many; NaN is a missing value. `lengths` are those of series one after another in Y."""
        check_no_target(Y, y)
        series = self._series(Y, lengths, reset=True)
        check_positive_ints(self, "n_states")
        self.mean_ = np.nanmean(series.steps, axis=(0, 1))
        deviation = np.nanstd(series.steps, axis=(0, 1))
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        steps = (series.steps - self.mean_) / self.scale_

        def build(priors: Any, key: Key, start: int) -> Model:
            return linear_gaussian(steps, self.n_states, priors=priors, lengths=True, key=key)

        data = {"y": steps, "lengths": series.lengths}
        self._set_attributes(self._fit_starts(build, data, int(series.lengths.sum())))
        # From the density of the standardised series to that of Y.
        self.bound_ -= float((~np.isnan(steps)).sum((0, 1)) @ np.log(self.scale_))
        system, noise = state_space(self.posterior_)
        self.transition_ = np.asarray(system.transition)
        self.loadings_ = np.asarray(system.emission) * self.scale_[:, None]
        self.noise_variance_ = np.asarray(noise) * self.scale_**2
        return self

    def _system(self) -> tuple[StateSpace, np.ndarray]:
        """The state space and the noise at their estimates, in the units of Y."""
        system, _ = state_space(self.posterior_)
        initial_cov = np.asarray(system.covariance)
        identity = np.eye(len(initial_cov))
        return StateSpace(self.transition_, identity, self.loadings_, None, initial_cov), self.noise_variance_

    def _apply(
        self, function: Callable[..., Any], Y: Any, lengths: Any = None, ahead: int = 0
    ) -> tuple[Series, list[Any]]:
        """Apply a function of `models.kalman` to each series, padded with at least `ahead` missing steps."""
        check_is_fitted(self)
        series = self._series(Y, lengths, ahead=ahead)
        system, noise = self._system()
        return series, [function(system, steps - self.mean_, noise) for steps in series.steps]

    @double_precision
    def score(self, Y: Any, y: Any = None, *, lengths: Any = None) -> float:
        """The log-likelihood of the series."""
        check_no_target(Y, y)
        return float(sum(self._apply(kalman.log_likelihood, Y, lengths)[1]))

    @double_precision
    def filter(self, Y: Any, *, return_cov: bool = False, lengths: Any = None) -> Any:
        """The mean of each state given the steps up to it, (T, K), or a list; with `return_cov` also covariances."""
        return self._states(*self._apply(kalman.filter, Y, lengths), return_cov)

    @double_precision
    def smooth(self, Y: Any, *, return_cov: bool = False, lengths: Any = None) -> Any:
        """The mean of each state given all steps, (T, K), or a list; with `return_cov` also covariances."""
        return self._states(*self._apply(kalman.smooth, Y, lengths), return_cov)

    def _states(self, series: Series, marginals: list[Any], return_cov: bool) -> Any:
        mean = series.cut([states.mean for states in marginals])
        return (mean, series.cut([states.covariance for states in marginals])) if return_cov else mean

    @double_precision
    def smooth_observations(self, Y: Any) -> tuple[Any, Any]:
        series, smoothed = self._apply(kalman.smooth, Y)
        mean = series.each(lambda n, length: self.mean_ + np.asarray(smoothed[n].mean)[:length] @ self.loadings_.T)
        return mean, series.each(lambda n, length: self._observation_std(np.asarray(smoothed[n].covariance)[:length]))

    def _observation_std(self, state_covariance: np.ndarray) -> np.ndarray:
        """The standard deviation of each observation, (T, D), from the covariances of its state, (T, K, K)."""
        variance = np.einsum("md,tde,me->tm", self.loadings_, state_covariance, self.loadings_)
        return np.sqrt(variance + self.noise_variance_)

    @double_precision
    def predict(self, Y: Any, steps: int = 1, *, return_std: bool = False, lengths: Any = None) -> Any:
        """The mean of the next steps, (steps, D), or a list of these; with `return_std` also their deviations."""
        # The padding beyond the end of a series is missing steps, for which the filter gives forecasts.
        series, filtered = self._apply(kalman.filter, Y, lengths, check_horizon(steps))
        ahead = lambda values, length: np.asarray(values)[length : length + steps]
        mean = series.each(lambda n, length: self.mean_ + ahead(filtered[n].mean, length) @ self.loadings_.T)
        if not return_std:
            return mean
        return mean, series.each(lambda n, length: self._observation_std(ahead(filtered[n].covariance, length)))
