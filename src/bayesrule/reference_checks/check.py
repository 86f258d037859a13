"""A check: run an algorithm and a reference, and measure the relative difference of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..rule.rule import Rule


@dataclass(frozen=True)
class Check:
    """One row of Table 1 and its reference: `error(rule)` runs both in float64 and returns the relative difference.

    The rule is an argument, so that the tests can pass a deliberately wrong variant and see the check fail.

    Attributes:
        name: the recipe's name.
        reference: what the recipe is compared with, as `bayesrule table --check` prints it.
        tolerance: the largest error that passes.
        compare: the function behind `error`, which assumes float64.
    """

    name: str
    reference: str
    tolerance: float
    compare: Callable[[Rule], float]

    def error(self, rule: Rule) -> float:
        """The largest difference between rule and reference, relative to the distance that the reference moved."""
        with jax.enable_x64(True):
            return float(self.compare(rule))

    def passed(self, error: float) -> bool:
        """Whether an error is within the tolerance; NaN is not."""
        return bool(error <= self.tolerance)


def check(reference: str, tolerance: float) -> Callable[[Callable[[Rule], float]], Check]:
    """Decorator: turn a function of a rule into the check of the recipe with the function's name."""
    return lambda compare: Check(compare.__name__, reference, tolerance, compare)


def relative_error(actual: Any, expected: Any, start: Any = 0.0) -> float:
    """The largest absolute difference, divided by the largest distance of the reference from its start.

    Arrays of different shapes have an infinite error.

    >>> relative_error([1.0, 2.2], [1.0, 2.0], start=1.5)
    0.4
    """
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    if actual.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected - start)))
