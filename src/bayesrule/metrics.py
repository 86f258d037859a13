"""How good predictions are: accuracy, likelihood, calibration, coverage of intervals, out-of-distribution detection.

Class probabilities have shape (N, K), or (N,) for the probability of class 1 of two; labels are class numbers from 0
to K − 1. Logarithms are natural. Everything is plain `jax.numpy` and can be jitted. The module knows nothing of rules
or families, so that estimators, runs and the report can share one definition of each score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.special import entr, logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
from scipy.special import ndtri, stdtrit

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier",
    "coverage",
    "ece",
    "gaussian_log_likelihood",
    "interval",
    "mixture_log_likelihood",
    "nll",
    "predictive_entropy",
    "reliability",
    "rmse",
]

Values: TypeAlias = ArrayLike | Sequence[Any]
"""An array, or nested lists of numbers."""


def accuracy(probabilities: Values, labels: Values) -> Float[Array, ""]:
    """The share of examples whose most probable class is the true one; the first class wins a tie.

    Args:
        probabilities: class probabilities, (N, K) or (N,).
        labels: the true class numbers, (N,).

    >>> float(accuracy([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))
    0.6667
    """
    p, y = _classified(probabilities, labels)
    return jnp.mean(jnp.argmax(p, axis=1) == y, dtype=p.dtype)


def nll(probabilities: Values, labels: Values) -> Float[Array, ""]:
    """The mean negative log-probability of the true class, in nats.

    A probability of 0 counts as the dtype's smallest normal number (1.2e-38 in float32), so that a true class of
    probability 0 costs 87 nats in float32 (708 in float64) instead of infinity.

    Args:
        probabilities: class probabilities, (N, K) or (N,).
        labels: the true class numbers, (N,).

    >>> float(nll([0.5, 0.25], [1, 0]))
    0.4904
    """
    p, y = _classified(probabilities, labels)
    true_class = jnp.take_along_axis(p, y[:, None], axis=1)[:, 0]
    return -jnp.mean(jnp.log(jnp.maximum(true_class, jnp.finfo(p.dtype).tiny)))


def brier(probabilities: Values, labels: Values) -> Float[Array, ""]:
    """The Brier score, the mean over examples of Σ_k (p_k − [y = k])², from 0 to 2.

    The sum runs over both of two classes: for probabilities (N,) this is twice the mean of (p − y)².

    Args:
        probabilities: class probabilities, (N, K) or (N,).
        labels: the true class numbers, (N,).

    >>> float(brier([0.5, 0.25], [1, 0]))
    0.3125
    """
    p, y = _classified(probabilities, labels)
    return jnp.mean(jnp.sum((p - jax.nn.one_hot(y, p.shape[1], dtype=p.dtype)) ** 2, axis=1))


class Reliability(NamedTuple):
    """A reliability diagram: for each bin of confidence, the mean confidence and the accuracy.

    Attributes:
        edges: the B + 1 limits of the B bins.
        confidence: the mean confidence of each bin's examples; NaN for an empty bin.
        accuracy: the share of each bin's examples that are classified correctly; NaN for an empty bin.
        counts: the number of examples in each bin.

    >>> diagram = reliability([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1], bins=2)
    >>> diagram.edges.tolist(), diagram.accuracy.tolist()
    ([0.0, 0.5, 1.0], [nan, 0.6667])
    """

    edges: Float[Array, " B+1"]
    confidence: Float[Array, " B"]
    accuracy: Float[Array, " B"]
    counts: Int[Array, " B"]


def reliability(probabilities: Values, labels: Values, bins: int = 20) -> Reliability:
    """The probability of the most probable class (the confidence) beside how often that class is the true one.

    The bins (a, b] divide [0, 1] into equal widths. With two classes the confidence is max(p, 1 − p), so that the
    lower half of the bins is empty.

    Args:
        probabilities: class probabilities, (N, K) or (N,).
        labels: the true class numbers, (N,).
        bins: the number of bins, B.

    >>> diagram = reliability([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1], bins=2)
    >>> diagram.counts.tolist(), float(diagram.confidence[1]), float(diagram.accuracy[1])
    ([0, 3], 0.7667, 0.6667)
    """
    count, confidence, correct = _bin_by_confidence(probabilities, labels, bins)
    size = jnp.where(count > 0, count, 1)
    nan_if_empty = jnp.where(count > 0, 0.0, jnp.nan)
    edges = jnp.linspace(0.0, 1.0, bins + 1, dtype=confidence.dtype)
    return Reliability(edges, confidence / size + nan_if_empty, correct / size + nan_if_empty, count)


def ece(probabilities: Values, labels: Values, bins: int = 20) -> Float[Array, ""]:
    """The expected calibration error Σ_b (n_b/N) |accuracy_b − confidence_b|, summed over the bins of `reliability`.

    The confidence is the probability of the most probable class (Guo et al., 2017).

    Args:
        probabilities: class probabilities, (N, K) or (N,).
        labels: the true class numbers, (N,).
        bins: the number of bins, B.

    >>> float(ece([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))             # (0.1 + 0.4 + 0.8)/3
    0.4333
    """
    count, confidence, correct = _bin_by_confidence(probabilities, labels, bins)
    return jnp.sum(jnp.abs(correct - confidence)) / jnp.sum(count)


def _bin_by_confidence(probabilities: Values, labels: Values, bins: int) -> tuple[Array, Array, Array]:
    """For each bin: the number of examples, the sum of their confidences, and the number classified correctly."""
    if bins < 1:
        raise ValueError(f"A reliability diagram needs at least one bin, got bins={bins}.")
    p, y = _classified(probabilities, labels)
    confidence, correct = jnp.max(p, axis=1), (jnp.argmax(p, axis=1) == y).astype(p.dtype)
    bin_index = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    zeros = jnp.zeros(bins, p.dtype)
    return jnp.bincount(bin_index, length=bins), zeros.at[bin_index].add(confidence), zeros.at[bin_index].add(correct)


def predictive_entropy(probabilities: Values) -> Float[Array, " N"]:
    """−Σ_k p_k log p_k of each row, in nats: 0 for a certain prediction, log K for a uniform one.

    Args:
        probabilities: class probabilities, (N, K) or (N,).

    >>> predictive_entropy([0.5, 1.0]).tolist()
    [0.6931, 0.0]
    """
    return jnp.sum(entr(_probabilities(probabilities)), axis=1)


def auroc(scores_in: Values, scores_out: Values) -> Float[Array, ""]:
    """The area under the ROC curve for detecting out-of-distribution inputs by a score such as `predictive_entropy`.

    It is the probability that an input from outside the distribution scores higher than one from inside; a tie counts
    half.

    Args:
        scores_in: scores of inputs from the training distribution.
        scores_out: scores of inputs from outside of it, expected to be higher.

    >>> float(auroc([0.1, 0.2, 0.3], [0.3, 0.9]))
    0.9167
    """
    inside, outside = _floating(scores_in), _floating(scores_out)
    if inside.ndim != 1 or outside.ndim != 1 or not (inside.size and outside.size):
        raise ValueError(
            "auroc compares two lists of scores, one number for each input and at least one in each list; got shapes "
            f"{inside.shape} and {outside.shape}."
        )
    ordered = jnp.sort(inside)
    count_below = jnp.searchsorted(ordered, outside, side="left")
    count_up_to = jnp.searchsorted(ordered, outside, side="right")
    area = jnp.mean((count_below + count_up_to).astype(inside.dtype)) / (2 * inside.size)
    return jnp.where(jnp.any(jnp.isnan(inside)) | jnp.any(jnp.isnan(outside)), jnp.nan, area)


def rmse(prediction: Values, target: Values) -> Float[Array, ""]:
    """The root of the mean squared error, over all entries.

    Args:
        prediction: predicted values.
        target: true values, of the same shape.

    >>> float(rmse([1.0, 2.0], [1.0, 4.0]))
    1.4142
    """
    guess, truth = _floating(prediction), _floating(target)
    _check_same_shape(guess, truth, "prediction", "target")
    return jnp.sqrt(jnp.mean((guess - truth) ** 2))


def interval(mean: Values, std: Values, level: float = 0.9, degrees_of_freedom: float = math.inf) -> tuple[Any, Any]:
    """The central interval of N(mean, std²) that holds the share `level` of its probability: its two limits.

    With `degrees_of_freedom` it is that of the Student-t distribution with this location and scale.

    JAX arrays give JAX arrays; anything else gives NumPy arrays, so that files and reports keep all digits.

    Args:
        mean: means of the predictions.
        std: their standard deviations, of a shape that broadcasts.
        level: the probability inside, between 0 and 1.
        degrees_of_freedom: of a Student-t distribution, above 0; infinitely many are a normal one.

    >>> low, high = interval(10.0, 2.0)
    >>> round(float(low), 3), round(float(high), 3)
    (6.71, 13.29)
    """
    if not degrees_of_freedom > 0:
        raise ValueError(f"degrees_of_freedom= of a Student-t distribution is above 0; got {degrees_of_freedom}.")
    if not 0 < level < 1:
        raise ValueError(f"level= is the probability inside the interval, between 0 and 1; got {level}.")
    center, scale = _numeric(mean), _numeric(std)
    upper = (1 + level) / 2
    half_width = float(stdtrit(degrees_of_freedom, upper) if degrees_of_freedom < math.inf else ndtri(upper)) * scale
    return center - half_width, center + half_width


def coverage(target: Values, low: Values, high: Values) -> Any:
    """The share of targets inside their intervals [low, high], limits included.

    For calibrated intervals of level p it is near p. JAX arrays give a JAX number, anything else a NumPy number.

    Args:
        target: true values.
        low: lower limits, of the same shape.
        high: upper limits, of the same shape.

    >>> float(coverage([1.0, 2.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 4.0]))
    0.75
    """
    values, lower, upper = _numeric(target), _numeric(low), _numeric(high)
    _check_same_shape(values, lower, "target", "lower limits")
    _check_same_shape(values, upper, "target", "upper limits")
    return ((values >= lower) & (values <= upper)).mean(dtype=float)


def gaussian_log_likelihood(mean: Values, variance: Values, target: Values, noise: ArrayLike = 0.0) -> Float[Array, ""]:
    """The mean over examples of log N(target | mean, variance + noise).

    Several outputs (N, K) count as independent: their log densities are summed.

    Args:
        mean: predictive means, (N,) or (N, K).
        variance: the model's variance, such as `predict` returns it, without the noise of an observation.
        target: true values, of the mean's shape.
        noise: the variance of an observation about the model's output.

    >>> float(gaussian_log_likelihood([0.0], [0.5], [1.0], noise=0.5))          # log N(1 | 0, 1)
    -1.4189
    """
    center, truth = _floating(mean), _floating(target)
    _check_same_shape(center, truth, "mean", "target")
    total = jnp.broadcast_to(_floating(variance) + jnp.asarray(noise), center.shape)
    terms = -0.5 * (jnp.log(2 * math.pi * total) + (truth - center) ** 2 / total)
    return jnp.mean(jnp.sum(terms, axis=tuple(range(1, terms.ndim))))


def mixture_log_likelihood(outputs: Values, target: Values, noise_precision: ArrayLike) -> Float[Array, ""]:
    r"""The mean over examples of $\log \frac1S\sum_s N(y \mid f_s, 1/τ)$, for the outputs f_s of S draws of θ.

    The test log-likelihood of Monte Carlo dropout (Gal and Ghahramani, 2016).

    Args:
        outputs: outputs of S draws, (S, N), or (S, N, K) for K outputs that are independent given θ.
        target: true values, (N,) or (N, K).
        noise_precision: τ, the precision of the observations' noise.

    >>> float(mixture_log_likelihood([[0.0], [2.0]], [1.0], 1.0))               # both are N(1 | 1 ± 1, 1)
    -1.4189
    """
    draws, truth = _floating(outputs), _floating(target)
    if draws.ndim < 2 or draws.shape[1:] != truth.shape:
        raise ValueError(
            "mixture_log_likelihood takes the outputs of S draws for N targets, shapes (S, N) and (N,); got "
            f"{draws.shape} and {truth.shape}."
        )
    precision = jnp.asarray(noise_precision, draws.dtype)
    terms = 0.5 * (jnp.log(precision / (2 * math.pi)) - precision * (draws - truth) ** 2)
    log_densities = jnp.sum(terms, axis=tuple(range(2, terms.ndim)))
    return jnp.mean(logsumexp(log_densities, axis=0) - math.log(draws.shape[0]))


# Checks of shapes and values.


def _numeric(values: Values) -> Any:
    """A JAX array as it is, anything else as a NumPy array."""
    return values if isinstance(values, jax.Array) else np.asarray(values)


def _floating(values: Values) -> Array:
    """An array of at least single precision, because half precision cannot count a few thousand examples."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(float)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _probabilities(values: Values) -> Float[Array, "N K"]:
    """Class probabilities as (N, K), after a check that they are probabilities."""
    p = _floating(values)
    shape = p.shape
    if p.ndim == 1:
        p = jnp.stack([1 - p, p], axis=1)
    if p.ndim != 2 or p.shape[1] < 2 or p.shape[0] == 0:
        raise ValueError(
            "Probabilities are (N, K) with a column for each of at least two classes, or (N,) with the probability of "
            f"class 1 of two, and N > 0; got shape {shape}."
        )
    if not isinstance(p, Tracer) and bool(jnp.any((p < 0) | (p > 1 + 1e-3))):
        raise ValueError("Probabilities lie between 0 and 1. If these are logits, take jax.nn.softmax of them first.")
    return p


def _classified(probabilities: Values, labels: Values) -> tuple[Float[Array, "N K"], Int[Array, " N"]]:
    """Class probabilities as (N, K) and labels as integers, after checks."""
    p, y = _probabilities(probabilities), jnp.asarray(labels)
    if y.shape != p.shape[:1]:
        raise ValueError(
            f"There are {p.shape[0]} predictions, and the labels have shape {y.shape}: give each its class number. "
            "(From one-hot labels take labels.argmax(1).)"
        )
    if not isinstance(y, Tracer) and bool(jnp.any((y < 0) | (y >= p.shape[1]) | (y != jnp.floor(y)))):
        raise ValueError(
            f"Labels are the classes' numbers, 0 to {p.shape[1] - 1}; got values such as {_first_invalid(y, p)}."
        )
    return p, y.astype(int)


def _first_invalid(labels: Array, p: Array) -> Any:
    invalid = (labels < 0) | (labels >= p.shape[1]) | (labels != jnp.floor(labels))
    return labels[jnp.argmax(invalid)].item()


def _check_same_shape(first: Any, second: Any, first_name: str, second_name: str) -> None:
    if first.shape != second.shape or not first.size:
        raise ValueError(
            f"The {first_name} and the {second_name} need the same shape, with at least one row; got {first.shape} and "
            f"{second.shape}. (Subtracting (N, 1) from (N,) would compare every pair.)"
        )
