"""The task that a target suggests (regression, classes, counts, …), and whether a target suits a task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .tables import Column, InputError

TASKS = ("regression", "binary", "classes", "counts", "sequence")
_FEW_VALUES = 20  # Integers with at most so many different values are classes, unless they look like counts.


def guess_task(target: Column) -> tuple[str, str]:
    """Guess the task from the target. Returns the task and the reason, as a sentence.

    >>> guess_task(Column("y", numbers=np.array([0.0, 1.0, 1.0])))
    ('binary', "'y' has two values, 0 and 1: two classes")
    >>> guess_task(Column("y", numbers=np.array([0.5, 1.2, 3.3])))[0]
    'regression'
    """
    name = repr(target.name)
    if target.codes is not None:
        levels = len(np.unique(target.codes[~target.missing]))
        if levels == 2:
            return "binary", f"{name} has two values: two classes"
        return "classes", f"{name} is text with {levels:,} values: classes"
    assert target.numbers is not None  # A column has either numbers or codes.
    values = target.numbers[~target.missing]
    if not np.all(np.mod(values, 1) == 0):
        return "regression", f"{name} is a number: regression"
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) == 2:
        return "binary", f"{name} has two values, {distinct[0]:g} and {distinct[1]:g}: two classes"
    # Counts begin at 0, small ones are frequent and large ones rare; numbers that stand for labels do neither.
    right_tailed = counts[-1] <= 0.2 * counts.max() and np.median(values) <= (distinct[0] + distinct[-1]) / 2
    if distinct[0] == 0 and right_tailed and distinct[-1] < 1000 and values.var() < 50 * max(values.mean(), 1e-9):
        return "counts", f"{name} has whole numbers from 0, large ones rare: counts"
    if len(distinct) <= _FEW_VALUES and counts.min() >= 2:
        return "classes", f"{name} has {len(distinct)} different whole numbers: classes"
    return "regression", f"{name} is a number: regression"


def check_target(target: Column, place: Callable[[int], str] = lambda row: f"row {row + 1}") -> None:
    """Raise if the target cannot be predicted by any task.

    Args:
        target: the column.
        place: where a row is, for the message.
    """
    present = ~target.missing
    name = repr(target.name)
    if not present.any():
        raise InputError(f"The target {name} has no values: choose another column with --target.")
    if target.numbers is not None and not np.all(np.isfinite(target.numbers[present])):
        first = place(int(np.argmax(np.isinf(target.numbers))))
        raise InputError(f"The target {name} has infinite values, the first in {first}: correct or remove those rows.")


def check_task(task: str, target: Column, *, explicit: bool = False) -> None:
    """Raise if the target does not suit the task; `explicit` if the user chose the task."""
    check_target(target)
    present = ~target.missing
    name = repr(target.name)
    if target.codes is not None and task in ("regression", "counts", "sequence"):
        shown = ", ".join(map(repr, target.levels[:3]))
        why = f" It {target.note}." if target.note else ""
        raise InputError(f"The target {name} is text ({shown}, …), and {task} needs numbers: try --task classes.{why}")
    values = target.codes[present] if target.codes is not None else np.asarray(target.numbers)[present]
    distinct = len(np.unique(values))
    if distinct == 1:
        raise InputError(f"The target {name} has the same value in every row: there is nothing to predict.")
    if task == "binary" and distinct != 2:
        raise InputError(f"The target {name} has {distinct:,} values, and --task binary needs two: try --task classes.")
    if task == "classes" and not explicit and distinct > max(50, len(values) // 10):
        raise InputError(
            f"The target {name} has {distinct:,} values in {len(values):,} rows, too many for classes: is it the right "
            "column? If it is, say --task classes, or for numbers --task regression."
            + (f" It {target.note}." if target.codes is not None and target.note else "")
        )
    if task == "counts" and (np.any(values < 0) or np.any(np.mod(values, 1) != 0)):
        raise InputError(f"The target {name} is not counts (whole numbers from 0 on): try --task regression.")
