"""Every row of Table 1 compared with a reference of other authors: SciPy, scikit-learn, optax, published equations.

A check runs the same `Rule` object that the table prints. References need only the library's own dependencies, and the
comparison is exact up to rounding: a random algorithm and its equations in NumPy get the same random numbers. All
checks run in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..recipes.table import Row, table
from . import deep_learning, inference, optimization
from .check import Check

CHECKS: dict[str, Check] = {
    value.name: value
    for module in (optimization, deep_learning, inference)
    for value in vars(module).values()
    if isinstance(value, Check)
}


@dataclass(frozen=True)
class Outcome:
    """The result of one row's check."""

    row: Row
    check: Check
    error: float
    seconds: float
    message: str = ""
    """The type and text of the exception, if the check raised one."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.check.passed(self.error)


def run_check(row: Row) -> Outcome:
    """Run one row's check; an exception inside it fails this row, and the other rows are still checked."""
    check, began = CHECKS[row.recipe], time.perf_counter()
    if row.rule is None:
        return Outcome(row, check, float("nan"), 0.0, "not implemented")
    try:
        error, message = check.error(row.rule), ""
    except Exception as raised:  # Every row gets an outcome, so nothing is re-raised.
        error, message = float("nan"), f"{type(raised).__name__}: {raised}"
    return Outcome(row, check, error, time.perf_counter() - began, message)


def run_checks() -> Iterator[Outcome]:
    """Run the checks of all rows lazily, in the table's order."""
    return map(run_check, table())
