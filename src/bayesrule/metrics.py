"""How good predictions are: accuracy, calibration, likelihood, and telling known inputs from unknown ones.

Class probabilities are (N, K), or (N,) with the probability of class 1 of two; labels are the
classes' numbers, 0 to K − 1. Logarithms are natural. All are plain `jax.numpy` and can be jitted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.special import entr, logsumexp
from jaxtyping import Array, Float, Int


def accuracy(probabilities: Any, labels: Any) -> Float[Array, ""]:
    """The share of examples whose most probable class is the right one (of equals, the first).

    >>> float(accuracy([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))
    0.6667
    """
    p, y = _classified(probabilities, labels)
    return jnp.mean(jnp.argmax(p, axis=1) == y, dtype=p.dtype)


def nll(probabilities: Any, labels: Any) -> Float[Array, ""]:
    """The mean negative log-probability of the right class, in nats.

    A probability of 0 counts as the dtype's smallest normal number (1.2e-38 in float32), so one
    certain mistake costs 87 nats there (708 in float64), not infinity.

    >>> float(nll([0.5, 0.25], [1, 0]))
    0.4904
    """
    p, y = _classified(probabilities, labels)
    right = jnp.take_along_axis(p, y[:, None], axis=1)[:, 0]
    return -jnp.mean(jnp.log(jnp.maximum(right, jnp.finfo(p.dtype).tiny)))


def brier(probabilities: Any, labels: Any) -> Float[Array, ""]:
    """The mean over examples of Σ_k (p_k − [y = k])², from 0 to 2.

    Two classes both count: for probabilities (N,) this is twice the mean of (p − y)².

    >>> float(brier([0.5, 0.25], [1, 0]))
    0.3125
    """
    p, y = _classified(probabilities, labels)
    return jnp.mean(jnp.sum((p - jax.nn.one_hot(y, p.shape[1], dtype=p.dtype)) ** 2, axis=1))


class Reliability(NamedTuple):
    """A reliability diagram: for each bin of confidence, what was claimed and what was true.

    `edges` are the bins' B + 1 limits, `counts` the numbers of examples in them; `confidence` and
    `accuracy` are averages over a bin's examples, NaN where it has none.
    """

    edges: Float[Array, " B+1"]
    confidence: Float[Array, " B"]
    accuracy: Float[Array, " B"]
    counts: Int[Array, " B"]


def reliability(probabilities: Any, labels: Any, bins: int = 20) -> Reliability:
    """The confidence in the most probable class against how often it is right.

    The bins (a, b] divide [0, 1] into equal widths; with two classes the confidence is max(p, 1 − p),
    so the lower half stays empty.

    >>> diagram = reliability([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1], bins=2)
    >>> diagram.counts.tolist(), float(diagram.confidence[1]), float(diagram.accuracy[1])
    ([0, 3], 0.7667, 0.6667)
    """
    count, confidence, right = _binned(probabilities, labels, bins)
    size = jnp.where(count > 0, count, 1)
    empty = jnp.where(count > 0, 0.0, jnp.nan)
    edges = jnp.linspace(0.0, 1.0, bins + 1, dtype=confidence.dtype)
    return Reliability(edges, confidence / size + empty, right / size + empty, count)


def ece(probabilities: Any, labels: Any, bins: int = 20) -> Float[Array, ""]:
    """The expected calibration error Σ_b (n_b/N) |accuracy_b − confidence_b|, summed over the bins of `reliability`.

    The confidence is that of the most probable class (Guo et al., 2017).

    >>> float(ece([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))             # (0.1 + 0.4 + 0.8)/3
    0.4333
    """
    count, confidence, right = _binned(probabilities, labels, bins)
    return jnp.sum(jnp.abs(right - confidence)) / jnp.sum(count)


def _binned(probabilities: Any, labels: Any, bins: int) -> tuple[Array, Array, Array]:
    """Each bin's number of examples, sum of confidences and number of right answers."""
    if bins < 1:
        raise ValueError(f"There is at least one bin, got bins={bins}.")
    p, y = _classified(probabilities, labels)
    confidence, right = jnp.max(p, axis=1), (jnp.argmax(p, axis=1) == y).astype(p.dtype)
    place = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    empty = jnp.zeros(bins, p.dtype)
    return jnp.bincount(place, length=bins), empty.at[place].add(confidence), empty.at[place].add(right)


def predictive_entropy(probabilities: Any) -> Float[Array, " N"]:
    """−Σ_k p_k log p_k of each row, in nats: 0 for certainty, log K for none.

    >>> predictive_entropy([0.5, 1.0]).tolist()
    [0.6931, 0.0]
    """
    return jnp.sum(entr(_probabilities(probabilities)), axis=1)


def auroc(scores_in: Any, scores_out: Any) -> Float[Array, ""]:
    """The probability that an unknown input scores higher than a known one, equals counting half.

    The area under the ROC curve for finding out-of-distribution inputs by a score that is higher for
    them, such as `predictive_entropy`.

    >>> float(auroc([0.1, 0.2, 0.3], [0.3, 0.9]))
    0.9167
    """
    known, unknown = _floating(scores_in), _floating(scores_out)
    if known.ndim != 1 or unknown.ndim != 1 or not (known.size and unknown.size):
        raise ValueError(
            "auroc compares two lists of scores, one number for each input and at least one in each list; got shapes "
            f"{known.shape} and {unknown.shape}."
        )
    ordered = jnp.sort(known)
    below = jnp.searchsorted(ordered, unknown, side="left")
    to_equal = jnp.searchsorted(ordered, unknown, side="right")
    area = jnp.mean((below + to_equal).astype(known.dtype)) / (2 * known.size)
    return jnp.where(jnp.any(jnp.isnan(known)) | jnp.any(jnp.isnan(unknown)), jnp.nan, area)


def rmse(prediction: Any, target: Any) -> Float[Array, ""]:
    """The root of the mean squared error, over all entries.

    >>> float(rmse([1.0, 2.0], [1.0, 4.0]))
    1.4142
    """
    prediction, target = _floating(prediction), _floating(target)
    _same(prediction, target, "prediction")
    return jnp.sqrt(jnp.mean((prediction - target) ** 2))


def gaussian_log_likelihood(mean: Any, variance: Any, target: Any, noise: Any = 0.0) -> Float[Array, ""]:
    """The mean over examples of log N(target | mean, variance + noise).

    `noise` is the variance of an observation about the model, which `predict`'s variance leaves out.
    Several outputs (N, K) are taken as independent, and their terms summed.

    >>> float(gaussian_log_likelihood([0.0], [0.5], [1.0], noise=0.5))          # log N(1 | 0, 1)
    -1.4189
    """
    mean, target = _floating(mean), _floating(target)
    _same(mean, target, "mean")
    total = jnp.broadcast_to(_floating(variance) + jnp.asarray(noise), mean.shape)
    terms = -0.5 * (jnp.log(2 * math.pi * total) + (target - mean) ** 2 / total)
    return jnp.mean(_per_example(terms))


def mixture_log_likelihood(outputs: Any, target: Any, noise_precision: Any) -> Float[Array, ""]:
    r"""The mean over examples of $\log \frac1S\sum_s N(y \mid f_s, 1/τ)$, for outputs (S, N) of S draws of θ.

    The test log-likelihood of Monte Carlo dropout (Gal and Ghahramani, 2016), τ the precision of the
    observations' noise. Several outputs (S, N, K) are independent given θ.

    >>> float(mixture_log_likelihood([[0.0], [2.0]], [1.0], 1.0))               # both are N(1 | 1 ± 1, 1)
    -1.4189
    """
    outputs, target = _floating(outputs), _floating(target)
    if outputs.ndim < 2 or outputs.shape[1:] != target.shape:
        raise ValueError(
            "mixture_log_likelihood takes the outputs of S draws for N targets, shapes (S, N) and (N,); got "
            f"{outputs.shape} and {target.shape}."
        )
    precision = jnp.asarray(noise_precision, outputs.dtype)
    terms = 0.5 * (jnp.log(precision / (2 * math.pi)) - precision * (outputs - target) ** 2)
    each = jnp.sum(terms, axis=tuple(range(2, terms.ndim)))
    return jnp.mean(logsumexp(each, axis=0) - math.log(outputs.shape[0]))


# Shapes.


def _floating(values: Any) -> Array:
    """An array of at least single precision: half precision cannot count examples."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(float)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _probabilities(values: Any) -> Float[Array, "N K"]:
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


def _classified(probabilities: Any, labels: Any) -> tuple[Float[Array, "N K"], Int[Array, " N"]]:
    p, y = _probabilities(probabilities), jnp.asarray(labels)
    if y.shape != p.shape[:1]:
        raise ValueError(
            f"There are {p.shape[0]} predictions, and the labels have shape {y.shape}: give each its class number. "
            "(From one-hot labels take labels.argmax(1).)"
        )
    if not isinstance(y, Tracer) and bool(jnp.any((y < 0) | (y >= p.shape[1]) | (y != jnp.floor(y)))):
        raise ValueError(f"Labels are the classes' numbers, 0 to {p.shape[1] - 1}; got values such as {_odd(y, p)}.")
    return p, y.astype(int)


def _odd(labels: Array, p: Array) -> Any:
    wrong = (labels < 0) | (labels >= p.shape[1]) | (labels != jnp.floor(labels))
    return labels[jnp.argmax(wrong)].item()


def _same(first: Array, target: Array, name: str) -> None:
    if first.shape != target.shape or not first.size:
        raise ValueError(
            f"The {name} and the target need the same shape, with at least one row; got {first.shape} and "
            f"{target.shape}. (Subtracting (N, 1) from (N,) would compare every pair.)"
        )


def _per_example(terms: Array) -> Array:
    return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))
