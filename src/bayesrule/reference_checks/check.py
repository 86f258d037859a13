"""What a check is: an algorithm run beside a reference, and how far apart they came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..rule.rule import Rule


@dataclass(frozen=True)
class Check:
    """One row of Table 1 beside a reference: `error(rule)` runs both, in float64, and measures the difference.

    The rule is an argument, so that a changed one can be put in its place: it has to fail.
    """

    name: str
    reference: str
    tolerance: float
    compare: Callable[[Rule], float]

    def error(self, rule: Rule) -> float:
        """How far the rule is from its reference, relative to how far the reference went."""
        with jax.enable_x64(True):
            return float(self.compare(rule))

    def passed(self, error: float) -> bool:
        """Whether an error is within the tolerance; one that is not a number is not."""
        return bool(error <= self.tolerance)


def check(reference: str, tolerance: float) -> Callable[[Callable[[Rule], float]], Check]:
    """Make a function of a rule the check of the recipe that it is named after."""
    return lambda compare: Check(compare.__name__, reference, tolerance, compare)


def apart(found: Any, expected: Any, start: Any = 0.0) -> float:
    """The largest difference, relative to the largest distance that the reference went from its start.

    >>> apart([1.0, 2.2], [1.0, 2.0], start=1.5)
    0.4
    """
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    if found.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected - start)))
