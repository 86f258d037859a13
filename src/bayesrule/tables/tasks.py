"""What kind of thing is to be predicted: guessed from the target, and said."""

from __future__ import annotations

import numpy as np

from .tables import Column, InputError

TASKS = ("regression", "binary", "classes", "counts", "sequence")
_FEW = 20  # whole numbers of so few values are classes, unless they thin out as counts do


def guessed(target: Column) -> tuple[str, str]:
    """The task, and the reason as a sentence.

    >>> guessed(Column("y", numbers=np.array([0.0, 1.0, 1.0])))
    ('binary', "'y' has two values, 0 and 1: two classes")
    >>> guessed(Column("y", numbers=np.array([0.5, 1.2, 3.3])))[0]
    'regression'
    """
    name = repr(target.name)
    if target.codes is not None:
        levels = len(np.unique(target.codes[~target.missing]))
        return (
            ("binary", f"{name} has two values: two classes")
            if levels == 2
            else (
                "classes",
                f"{name} is text with {levels:,} values: classes",
            )
        )
    assert target.numbers is not None  # the other kind of column
    values = target.numbers[~target.missing]
    if not np.all(np.mod(values, 1) == 0):
        return "regression", f"{name} is a number: regression"
    found, counts = np.unique(values, return_counts=True)
    if len(found) == 2:
        return "binary", f"{name} has two values, {found[0]:g} and {found[1]:g}: two classes"
    # Counts begin at 0, are crowded at the low end and thin out to the high one; labels do neither.
    thinning = counts[-1] <= 0.2 * counts.max() and np.median(values) <= (found[0] + found[-1]) / 2
    if found[0] == 0 and thinning and found[-1] < 1000 and values.var() < 50 * max(values.mean(), 1e-9):
        return "counts", f"{name} is whole numbers from 0 that thin out: counts"
    if len(found) <= _FEW and counts.min() >= 2:
        return "classes", f"{name} is whole numbers of {len(found)} values: classes"
    return "regression", f"{name} is a number: regression"


def readable(target: Column) -> None:
    """Raise where the target cannot be predicted at all."""
    there = ~target.missing
    name = repr(target.name)
    if not there.any():
        raise InputError(f"The target {name} has no values: choose another column with --target.")
    if target.numbers is not None and not np.all(np.isfinite(target.numbers[there])):
        raise InputError(f"The target {name} has infinite values: mend or remove those rows.")


def checked(task: str, target: Column, *, asked: bool = False) -> None:
    """Raise where the target cannot be predicted as this task."""
    readable(target)
    there = ~target.missing
    name = repr(target.name)
    if target.codes is not None and task in ("regression", "counts", "sequence"):
        shown = ", ".join(map(repr, target.levels[:3]))
        raise InputError(f"The target {name} is text ({shown}, …), and {task} needs numbers: try --task classes.")
    values = target.codes[there] if target.codes is not None else np.asarray(target.numbers)[there]
    found = len(np.unique(values))
    if found == 1:
        raise InputError(f"The target {name} has the same value in every row: there is nothing to predict.")
    if task == "binary" and found != 2:
        raise InputError(f"The target {name} has {found:,} values, and --task binary needs two: try --task classes.")
    if task == "classes" and not asked and found > max(50, len(values) // 10):
        raise InputError(
            f"The target {name} has {found:,} values in {len(values):,} rows, too many for classes: is it the right "
            "column? --task classes, or for numbers --task regression, makes it one."
        )
    if task == "counts" and (np.any(values < 0) or np.any(np.mod(values, 1) != 0)):
        raise InputError(f"The target {name} is not counts (whole numbers from 0): try --task regression.")
