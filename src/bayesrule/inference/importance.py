r"""Importance weights of draws from q, smoothed by a Pareto distribution: what they say of the density and of q.

With $w(θ) = p(θ)/q(θ)$, E_q w is the evidence, and averages with weights w are averages under p. The largest weights
are noisy: they are replaced by quantiles of a generalised Pareto distribution fitted to them, whose shape k̂ says
whether that can work (Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto smoothed importance sampling", JMLR 2024).
Written here and not taken from ArviZ, because the core does not depend on it; a test holds the two together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Importance(NamedTuple):
    """What weights say.

    Attributes:
        log_weights: logarithms of the smoothed weights, which add up to 1.
        khat: the shape of the Pareto tail. Below 0.7 averages with these weights can be relied on.
        bound: the average of log w: the evidence lower bound.
        bound_error: its standard error.
        evidence: the logarithm of the average of w.
        evidence_error: its standard error, to first order.
        effective: how many draws of p the weighted draws are worth.
    """

    log_weights: Float[np.ndarray, " M"]
    khat: float
    bound: float
    bound_error: float
    evidence: float
    evidence_error: float
    effective: float


def importance(log_ratios: Float[np.ndarray, " M"]) -> Importance:
    """Smooth the weights of draws whose log p − log q are given.

    >>> import numpy as np
    >>> same = importance(np.full(1000, -2.5))
    >>> float(same.evidence), same.khat == -np.inf, float(same.effective)
    (-2.5, True, 1000.0)
    """
    count = len(log_ratios)
    finite = np.isfinite(log_ratios)
    if not np.any(finite):
        nothing = np.full(count, -math.log(count))
        return Importance(nothing, math.inf, -math.inf, math.inf, -math.inf, math.inf, 0.0)
    smoothed, khat = _smoothed(np.where(finite, log_ratios, -np.inf))
    peak = np.max(smoothed)
    weights = np.exp(smoothed - peak)
    total = np.sum(weights)
    normalized = weights / total
    evidence = peak + math.log(total / count)
    evidence_error = math.sqrt(float(np.sum((normalized - 1 / count) ** 2)))
    bound = float(np.mean(log_ratios)) if np.all(finite) else -math.inf
    bound_error = float(np.std(log_ratios[finite], ddof=1)) / math.sqrt(count) if np.sum(finite) > 1 else math.inf
    effective = 1 / float(np.sum(normalized**2))
    with np.errstate(divide="ignore"):
        return Importance(np.log(normalized), khat, bound, bound_error, evidence, evidence_error, effective)


def _smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """The log weights with their upper tail replaced by Pareto quantiles, and the shape k̂ of the tail."""
    count = len(log_ratios)
    length = math.ceil(min(count / 5, 3 * math.sqrt(count)))
    shifted = log_ratios - np.max(log_ratios)
    order = np.argsort(shifted)
    tail = order[-length:]
    cutoff = shifted[order[-length - 1]] if count > length else -np.inf
    if length < 5 or shifted[tail[-1]] - shifted[tail[0]] < 1e-10 or not np.isfinite(cutoff):
        spread = np.ptp(shifted[np.isfinite(shifted)])
        return shifted + np.max(log_ratios), -math.inf if spread < 1e-10 else math.inf
    excess = np.exp(shifted[tail]) - math.exp(cutoff)
    khat, sigma = fit_pareto(excess)
    smoothed = shifted.copy()
    if np.isfinite(khat):
        probabilities = (np.arange(length) + 0.5) / length
        quantiles = (
            sigma * np.expm1(-khat * np.log1p(-probabilities)) / khat if khat else -sigma * np.log1p(-probabilities)
        )
        smoothed[tail] = np.minimum(np.log(quantiles + math.exp(cutoff)), 0.0)
    return smoothed + np.max(log_ratios), khat


def fit_pareto(excess: Float[np.ndarray, " L"]) -> tuple[float, float]:
    """The shape and the scale of a generalised Pareto distribution, by the posterior mean of Zhang and Stephens (2009).

    Args:
        excess: the amounts by which the largest values exceed their threshold, in ascending order.

    Returns:
        k̂, with the weak prior of ten observations at 0.5 that PSIS takes, and σ.
    """
    count = len(excess)
    if excess[int(count / 4 + 0.5) - 1] < 1e-12 * excess[-1]:
        # Beside the largest weights a quarter of the tail vanishes: no Pareto distribution is as heavy as that.
        return math.inf, math.inf
    most = 30 + int(math.sqrt(count))
    grid = 1 - np.sqrt(most / (np.arange(1, most + 1) - 0.5))
    grid = grid / (3 * excess[int(count / 4 + 0.5) - 1]) + 1 / excess[-1]
    shapes = np.mean(np.log1p(-grid[:, None] * excess), axis=1)
    likelihoods = count * (np.log(-grid / shapes) - shapes - 1)
    weights = np.exp(likelihoods - np.logaddexp.reduce(likelihoods))
    kept = weights >= 10 * np.finfo(float).eps
    weights = weights[kept] / np.sum(weights[kept])
    theta = float(np.sum(grid[kept] * weights))
    if theta == 0 or not np.isfinite(theta):  # All excesses are equal, up to rounding: there is no tail.
        return -math.inf, 0.0
    shape = float(np.mean(np.log1p(-theta * excess)))
    sigma = -shape / theta
    return (count * shape + 10 * 0.5) / (count + 10), sigma


class Shift(NamedTuple):
    """By how much every number's mean and standard deviation under p differ from those under q, by importance weights.

    Attributes:
        mean: (mean under p − mean under q) in standard deviations under p.
        width: the standard deviation under q as a fraction of that under p, less 1.
        mean_error: the standard error of the first.
        width_error: the standard error of the second.
    """

    mean: Float[np.ndarray, " D"]
    width: Float[np.ndarray, " D"]
    mean_error: Float[np.ndarray, " D"]
    width_error: Float[np.ndarray, " D"]


def shift_of(
    numbers: Float[np.ndarray, "M D"],
    log_weights: Float[np.ndarray, " M"],
    own_log_weights: Float[np.ndarray, " M"] | None = None,
) -> Shift:
    """The shift of every column, from draws and their weights.

    Both moments are those of the same draws, under two kinds of weights, so that most of their noise cancels.

    Args:
        numbers: the draws.
        log_weights: their logarithmic weights for p, which add up to 1.
        own_log_weights: those for q, where the draws are not q's own.
    """
    count = len(numbers)
    weights = np.exp(log_weights)
    own = np.full(count, 1 / count) if own_log_weights is None else np.exp(own_log_weights)
    center = own @ numbers
    deviations = numbers - center
    q_variance = own @ deviations**2
    shift = weights @ deviations
    p_variance = weights @ (deviations - shift) ** 2
    tiny = np.finfo(float).tiny
    p_std = np.sqrt(np.maximum(p_variance, tiny))
    difference = weights - own
    mean_error = np.sqrt(np.sum((difference[:, None] * (deviations - shift)) ** 2, axis=0)) / p_std
    squares = (deviations - shift) ** 2 / np.maximum(p_variance, tiny) - 1
    width_error = 0.5 * np.sqrt(np.sum((difference[:, None] * squares) ** 2, axis=0))
    constant = q_variance <= 1e-24 * (1 + center**2)  # such as a weight on a simplex of one
    zero = lambda x: np.where(constant, 0.0, x)
    width = np.sqrt(q_variance) / p_std - 1
    return Shift(zero(shift / p_std), zero(width), zero(mean_error), zero(width_error))
