"""Checks of the predictive distribution of numbers on rows it was not fitted to: is its width right, also in the tails?

A linear model with constant noise gives all rows intervals of about the same width. Where the noise grows with the
prediction, where a few errors are very large, or where counts vary more than a Poisson distribution allows, these
intervals are wrong however good the fit is. Nothing is widened here: each check only says what it finds, in words.

Each check is a test at level `LEVEL`, so that a model that is right is told of a problem in at most 1 % of all runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import chdtrc, ndtr, ndtri, stdtr
from scipy.stats import binomtest, kurtosistest, rankdata

from .format_numbers import counted, number, percent
from .held_out_rows import NumericPredictions

LEVEL = 0.01 / 3
"""The probability that one check of three finds a problem where there is none."""
FEWEST_ROWS = 20
"""Fewer rows than these are not tested: they would show only the grossest of problems."""


class Problem(NamedTuple):
    """What is wrong with the intervals, in a sentence with its numbers, and what to do about it."""

    finding: str
    advice: str


def find_problems(
    rows: NumericPredictions, *, counts: bool, left_out: NumericPredictions | None = None
) -> list[Problem]:
    """What is wrong with the predictive distribution of these rows; nothing where chance explains it.

    Args:
        rows: the held-out rows.
        counts: whether they are counts, with discrete distributions.
        left_out: training rows, each predicted without itself. There are more of them than held-out rows, and they
            show as well where the noise is not constant or has heavy tails.
    """
    usable = lambda each: each.take(np.isfinite(each.std) & (each.std > 0))
    rows = usable(rows)
    every = rows if left_out is None else rows.joined(usable(left_out))
    checks = [(_check_dispersion, rows)] if counts else [(_check_constant_noise, every), (_check_tails, every)]
    found = [problem for check, part in checks if len(part.y) >= FEWEST_ROWS for problem in [check(part)] if problem]
    # Wrong tails or a wrong spread imply a wrong coverage, which is a finding of its own only without them.
    coverage = _check_coverage(rows, counts) if len(rows.y) >= FEWEST_ROWS and not found else None
    return [coverage] if coverage else found


def normal_scores(rows: NumericPredictions) -> np.ndarray:
    """Errors as standard normal numbers if the predictive distribution is right: Φ⁻¹(F(y)), without loss in the tails.

    >>> one = np.ones(1)
    >>> float(normal_scores(NumericPredictions(one, 3 * one, one, one, one, one, one))[0])
    2.0
    """
    z = (rows.y - rows.mean) / rows.std
    if not np.isfinite(rows.degrees_of_freedom):
        return z
    return -np.sign(z) * ndtri(np.maximum(stdtr(rows.degrees_of_freedom, -np.abs(z)), 1e-300))


def _check_coverage(rows: NumericPredictions, counts: bool) -> Problem | None:
    """The number of values inside their 90 % intervals, against its binomial distribution."""
    inside, size = int(rows.covered.sum()), len(rows.y)
    # The intervals of counts hold at least 90 %, because limits are whole numbers.
    if binomtest(inside, size, 0.9, alternative="less" if counts else "two-sided").pvalue >= LEVEL:
        return None
    narrow = inside < 0.9 * size
    finding = (
        f"The 90 % intervals are too {'narrow' if narrow else 'wide'}: they hold {percent(inside / size)} of "
        f"{counted(size, 'held-out value')}, and chance alone would not do that."
    )
    return Problem(
        finding,
        "Are the held-out rows like the others (one period, one group)? If so, the model misses something: try "
        "another one with --model.",
    )


def _check_constant_noise(rows: NumericPredictions) -> Problem | None:
    """A rank test: do the sizes of the errors follow a straight line or a parabola in the predictions?

    With ranks u of the predictions, the correlations of the errors' ranks with u and with its second Legendre
    polynomial are independent, and the sum of their squares times n − 1 is χ² with 2 degrees of freedom.
    """
    size = np.abs(normal_scores(rows))
    if np.ptp(rows.mean) <= 1e-9 * max(np.max(np.abs(rows.mean)), 1e-300) or np.ptp(size) == 0:
        return None
    u = rankdata(rows.mean) - (len(size) + 1) / 2
    square = u**2 - np.mean(u**2)
    correlations = np.corrcoef(np.stack([rankdata(size), u, square]))[0, 1:]
    if chdtrc(2, (len(size) - 1) * float(correlations @ correlations)) >= LEVEL:
        return None
    thirds = np.array_split(np.argsort(rows.mean, kind="stable"), 3)
    shares = [percent(float(np.mean(rows.covered[third]))) for third in thirds]
    typical = [number(float(np.median(size[third])), 2) for third in thirds]
    positive = bool(np.all(rows.y > 0))
    transform = "predict its logarithm instead, in which the noise may be constant" if positive else "transform it"
    return Problem(
        f"The noise is not constant: the errors are {typical[0]}, {typical[1]} and {typical[2]} predicted standard "
        "deviations (medians; 0.67 is expected) in the lower, middle and upper third of the predictions, where "
        f"{shares[0]}, {shares[1]} and {shares[2]} of the values lie in their 90 % intervals. An interval is too wide "
        "for some rows and too narrow for others.",
        f"If the errors grow with the target, {transform}. If the target bends where the model is straight, add "
        "columns (squares, products) or try another --model.",
    )


def _check_tails(rows: NumericPredictions) -> Problem | None:
    """Anscombe and Glynn's test of the kurtosis."""
    z = normal_scores(rows)
    # A constant error has no kurtosis; the test is defined for at least 20 values, which `find_problems` requires.
    if np.ptp(z) <= 1e-9 * max(np.max(np.abs(z)), 1e-300) or kurtosistest(z, alternative="greater").pvalue >= LEVEL:
        return None
    far, expected = int(np.sum(np.abs(z) > 3)), 2 * ndtr(-3.0) * len(z)
    return Problem(
        f"The errors have heavier tails than a normal distribution: {counted(far, 'value')} of {len(z):,} "
        f"{'lies' if far == 1 else 'lie'} more than 3 predicted standard deviations away (about {number(expected, 2)} "
        f"expected), the farthest {number(float(np.max(np.abs(z))), 2)}. Most intervals are too wide, and the largest "
        "errors are far outside of theirs.",
        "Look at the rows with the largest errors: are they mistakes in the data, or a group of their own? A target "
        "with a long tail is often better predicted as its logarithm.",
    )


def _check_dispersion(rows: NumericPredictions) -> Problem | None:
    """Σ(y − m)² against its expectation Σv, as a normal test with the variance Σ(2v² + v) of a Poisson distribution."""
    variance = rows.std**2
    ratio = float(np.sum((rows.y - rows.mean) ** 2) / np.sum(variance))
    deviation = float(np.sqrt(np.sum(2 * variance**2 + variance)) / np.sum(variance))
    # The statistic has a long right tail where there are few rows, so that the limit is 4 instead of 2.7 deviations.
    if ratio - 1 < 4 * deviation:
        return None
    return Problem(
        f"The counts vary more than a Poisson distribution allows: the squared errors are {number(ratio, 2)} times as "
        "large as predicted, and the intervals are too narrow.",
        "Something that the columns do not have makes rows differ (a Poisson model has no noise of its own): add "
        "columns, or predict the logarithm of the count plus 1 by --task regression.",
    )
