r"""Predictive distributions of a mixture's components in closed form: $p(y \mid k) = ∫ f(y \mid θ_k) q(θ_k) dθ_k$.

`build_predictive(block)` takes the block of a mixture's or a hidden Markov model's components. The predictive of each
component is a Student-t, a negative binomial, or categorical with the mean probabilities; for a `Peak`, such as EM's
blocks, it is f at the peak. All in NumPy, so that nothing is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.special import gammaln, xlogy

from ..families.dirichlet import Dirichlet
from ..families.gamma import Gamma, NormalGamma
from ..families.point_mass import Peak
from ..families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from ..families.wishart import NormalWishart


@dataclass(frozen=True)
class GaussianPredictive:
    """The predictive of Gaussian components: Student-t, or Gaussian if `dof` is None.

    Args:
        location: the centres.
        precision: the inverse of the squared scale, which for a Student-t is not the inverse of its covariance: (K, D,
            D); or (K, D) for independent entries.
        dof: the degrees of freedom, for each component, or for each of its entries.
    """

    location: Float[ndarray, "K D"]
    precision: ndarray
    dof: ndarray | None

    def log_prob(self, y: Float[ndarray, "N D"]) -> Float[ndarray, "N K"]:
        """log p(y_n | k) of the observed entries; 0 for a missing row."""
        full = self.precision.ndim == 3
        observed = ~np.isnan(y)
        if full and not np.array_equal(observed.any(1), observed.all(1)):
            return self._log_prob_of_observed(y, observed)
        if full:
            cholesky = np.linalg.cholesky(self.precision)
            squares = [np.sum(((y - m) @ L) ** 2, axis=1) for m, L in zip(self.location, cholesky, strict=True)]
            square, half_log_det = np.stack(squares, axis=1), np.log(np.diagonal(cholesky, axis1=1, axis2=2)).sum(1)
        else:
            square, half_log_det = (y[:, None] - self.location) ** 2 * self.precision, 0.5 * np.log(self.precision)
        size = y.shape[1] if full else 1
        if self.dof is None:
            log_prob = half_log_det - 0.5 * (size * np.log(2 * np.pi) + square)
        else:
            exponent = 0.5 * (self.dof + size)
            constant = gammaln(exponent) - gammaln(0.5 * self.dof) - 0.5 * size * np.log(np.pi * self.dof)
            log_prob = half_log_det + constant - exponent * np.log1p(square / self.dof)
        missing = np.any(np.isnan(y), axis=1, keepdims=True) if full else np.isnan(y)[:, None]
        log_prob = np.where(missing, 0.0, log_prob)
        return log_prob if full else log_prob.sum(-1)

    def _log_prob_of_observed(self, y: Float[ndarray, "N D"], observed: Bool[ndarray, "N D"]) -> Float[ndarray, "N K"]:
        """The same for full precisions, where rows are missing in part.

        The observed entries of a Gaussian or a Student-t have those of its location and of its squared scale, and its
        degrees of freedom. Rows with the same entries observed are taken together.
        """
        squared_scale = np.linalg.inv(self.precision)
        log_prob = np.zeros((len(y), len(self.location)))
        for pattern in np.unique(observed[observed.any(1)], axis=0):
            rows = np.all(observed == pattern, axis=1)
            precision = np.linalg.inv(squared_scale[:, pattern][:, :, pattern])
            part = GaussianPredictive(self.location[:, pattern], precision, self.dof)
            log_prob[rows] = part.log_prob(y[rows][:, pattern])
        return log_prob

    @property
    def mean(self) -> Float[ndarray, "K D"]:
        return self.location

    @property
    def variance(self) -> Float[ndarray, "K D"]:
        full = self.precision.ndim == 3
        scale = np.diagonal(np.linalg.inv(self.precision), axis1=1, axis2=2) if full else 1 / self.precision
        if self.dof is None:
            return scale
        dof = self.dof[:, None] if full else self.dof
        return scale * np.where(dof > 2, dof / np.where(dof > 2, dof - 2, 1.0), np.inf)

    def sample(self, random: Any, states: Int[ndarray, " S"]) -> Float[ndarray, "S D"]:
        """Draw a row from each of these components; `random` is a NumPy RandomState."""
        noise = random.standard_normal((len(states), self.location.shape[1]))
        if self.precision.ndim == 3:
            inverse_cholesky = np.linalg.inv(np.linalg.cholesky(self.precision))
            noise = np.einsum("sd,sde->se", noise, inverse_cholesky[states])
        else:
            noise = noise / np.sqrt(self.precision[states])
        if self.dof is not None:
            dof = self.dof[states]
            scale = np.sqrt(dof / random.chisquare(dof))
            noise = noise * (scale[:, None] if self.precision.ndim == 3 else scale)
        return self.location[states] + noise


@dataclass(frozen=True)
class PoissonPredictive:
    """The predictive of Poisson components: negative binomial, where the rate has a gamma with this shape and rate.

    If `shape` is None, Poisson with this rate.
    """

    shape: Float[ndarray, "K D"] | None
    rate: Float[ndarray, "K D"]

    def log_prob(self, y: Float[ndarray, "N D"]) -> Float[ndarray, "N K"]:
        y = y[:, None]
        if self.shape is None:
            log_prob = xlogy(y, self.rate) - self.rate - gammaln(y + 1)
        else:
            log_binomial = gammaln(y + self.shape) - gammaln(self.shape) - gammaln(y + 1)
            log_prob = log_binomial - self.shape * np.log1p(1 / self.rate) - y * np.log1p(self.rate)
        return np.where(np.isnan(y), 0.0, log_prob).sum(-1)

    @property
    def mean(self) -> Float[ndarray, "K D"]:
        return self.rate if self.shape is None else self.shape / self.rate

    @property
    def variance(self) -> Float[ndarray, "K D"]:
        return self.mean if self.shape is None else self.mean * (1 + 1 / self.rate)

    def sample(self, random: Any, states: Int[ndarray, " S"]) -> Float[ndarray, "S D"]:
        if self.shape is None:
            return random.poisson(self.rate[states]).astype(float)
        return random.poisson(random.gamma(self.shape[states]) / self.rate[states]).astype(float)


@dataclass(frozen=True)
class CategoricalPredictive:
    """The predictive of categorical components; y has one label for each row.

    Mean and variance are those of the label's one-hot encoding.
    """

    probabilities: Float[ndarray, "K V"]

    def log_prob(self, y: Float[ndarray, " N"]) -> Float[ndarray, "N K"]:
        observed = ~np.isnan(y)
        table = np.log(np.maximum(self.probabilities, np.finfo(float).tiny))
        return np.where(observed[:, None], table.T[np.where(observed, y, 0).astype(int)], 0.0)

    @property
    def mean(self) -> Float[ndarray, "K V"]:
        return self.probabilities

    @property
    def variance(self) -> Float[ndarray, "K V"]:
        return self.probabilities * (1 - self.probabilities)

    def sample(self, random: Any, states: Int[ndarray, " S"]) -> Float[ndarray, " S"]:
        return draw_categories(random, self.probabilities[states]).astype(float)


def draw_categories(random: Any, probabilities: Float[ndarray, "S K"]) -> Int[ndarray, " S"]:
    """Draw a category from each row of probabilities; `random` is a NumPy RandomState."""
    cumulative = np.cumsum(probabilities, axis=1)
    return np.sum(random.uniform(size=(len(cumulative), 1)) * cumulative[:, -1:] >= cumulative, axis=1)


def mean_and_precision(block: Any) -> tuple[Float[ndarray, "K D"], ndarray]:
    """E m and E Λ of Gaussian components, or m and Λ at the peak."""
    if isinstance(block, Peak):
        return np.asarray(block.mean["mean"]), np.asarray(block.mean["precision"])
    return np.asarray(block.mean), np.asarray(block.expectation()[1])


def build_predictive(block: Any) -> GaussianPredictive | PoissonPredictive | CategoricalPredictive:
    """Build the predictive distributions of the components of a normal–Wishart, normal–gamma, gamma or Dirichlet block.

    >>> from bayesrule.families.gamma import Gamma
    >>> negative_binomial = build_predictive(Gamma(shape=np.array([[2.0]]), rate=np.array([[1.0]])))
    >>> np.exp(negative_binomial.log_prob(np.array([[0.0], [1.0]]))).tolist()
    [[0.25], [0.25]]
    """
    is_peak = isinstance(block, Peak)
    family = block.of if is_peak else block
    arrays = lambda *values: [np.asarray(value, float) for value in values]
    if isinstance(family, NormalWishart | NormalGamma | TiedNormalWishart | SphericalNormalGamma) and is_peak:
        location, precision = arrays(block.mean["mean"], block.mean["precision"])
        return GaussianPredictive(location, precision, None)
    if isinstance(family, TiedNormalWishart):
        family = family.marginals()
    if isinstance(family, SphericalNormalGamma):
        # The entries have one t in common, so that together they are a Student-t of D dimensions.
        location, count, shape, rate = arrays(family.mean, family.count, family.shape, family.rate)
        precision = (shape / rate)[:, None] * count / (count + 1)
        return GaussianPredictive(location, precision[:, :, None] * np.eye(location.shape[1]), 2 * shape)
    if isinstance(family, NormalWishart):
        location, count, df, scale = arrays(family.mean, family.count, family.df, family.scale)
        dof = df - location.shape[-1] + 1
        return GaussianPredictive(location, (dof * count / (count + 1))[:, None, None] * scale, dof)
    if isinstance(family, NormalGamma):
        location, count, shape, rate = arrays(family.mean, family.count, family.shape, family.rate)
        return GaussianPredictive(location, shape / rate * count / (count + 1), 2 * shape)
    if isinstance(family, Gamma):
        shape_and_rate = [None, *arrays(block.mean)] if is_peak else arrays(family.shape, family.rate)
        return PoissonPredictive(*shape_and_rate)
    if isinstance(family, Dirichlet):
        return CategoricalPredictive(*arrays(block.mean))
    raise ValueError(
        f"The predictive distribution of a {type(family).__name__} block is not known in closed form: use a "
        "normal–Wishart, normal–gamma, gamma or Dirichlet block."
    )
