"""Every row of Table 1 beside a reference that is not this library's: SciPy, scikit-learn, optax, published equations.

A check takes the very rule that the table prints. Its reference needs nothing beyond what the library depends on, and
is exact: a random algorithm is given the same random numbers as its equations in NumPy. All of it is in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..recipes.table import Row, table
from . import deep_learning, inference, optimization
from .check import Check

CHECKS: dict[str, Check] = {
    found.name: found
    for module in (optimization, deep_learning, inference)
    for found in vars(module).values()
    if isinstance(found, Check)
}


@dataclass(frozen=True)
class Outcome:
    """What came of one row's check."""

    row: Row
    check: Check
    error: float
    seconds: float
    said: str = ""
    """The exception's words, where there was one."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.check.passed(self.error)


def outcome(row: Row) -> Outcome:
    """Run one row's check. Whatever goes wrong in it is a failure of the row, not of the report."""
    found, began = CHECKS[row.recipe], time.perf_counter()
    if row.rule is None:
        return Outcome(row, found, float("nan"), 0.0, "not there yet")
    try:
        error, said = found.error(row.rule), ""
    except Exception as raised:  # the report goes on to the next row
        error, said = float("nan"), f"{type(raised).__name__}: {raised}"
    return Outcome(row, found, error, time.perf_counter() - began, said)


def outcomes() -> Iterator[Outcome]:
    """The checks of all rows, one after another, in the table's order."""
    return map(outcome, table())
