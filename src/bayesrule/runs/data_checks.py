"""Warnings about the data itself: a column that gives the target away, rows on both sides of the split, odd values,
and columns that change from the training rows to the held-out ones or along the file.

Nothing is changed or left out because of a warning: only who made the table knows whether it is a mistake. Each check
states what it finds, with its numbers, and is built to be silent on ordinary data (`tests/runs/test_data_checks.py`
counts its false alarms).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2_contingency, ks_2samp, rankdata

from ..tables.tables import DATES, Column, Table, number_label

LEVEL = 0.01
"""The probability that a table without drift is told of one, over all of its columns."""
_EXPLAINED = 0.99  # the share of a number's variance that a column must explain alone to give it away
_ERRORS_LEFT = 0.03  # of the errors of always guessing the most frequent class, those that such a column may leave
_FEWEST_ERRORS = 20  # With fewer rows outside the most frequent class, a perfect column can be luck.
_FEWEST_ROWS = 40
_MOST_ROWS = 200_000  # Of longer tables, the first so many rows are compared for copies.
_EFFECT = 0.2  # A rank correlation with the place in the file below this is not worth a warning.


class DataWarning(NamedTuple):
    """What is odd about the data, in a sentence with its numbers, and what to do about it.

    `kind` is "leak", "order", "copies", "outliers" or "drift", `column` the name of the column (empty for copies).
    """

    kind: str
    column: str
    finding: str
    advice: str


def find_warnings(
    table: Table,
    target: str,
    columns: list[dict[str, Any]],
    y: np.ndarray,
    classes: list[str],
    train_rows: np.ndarray,
    test_rows: np.ndarray,
) -> list[dict[str, str]]:
    """What is odd about a table of independent rows, as the fields of `DataWarning`; the gravest come first.

    Args:
        table: all rows that have a target.
        target: the name of the target's column.
        columns: the descriptions of the inputs (`Run.summary["columns"]`).
        y: the targets, numbers or codes of classes.
        classes: the labels of the classes; none where numbers are predicted.
        train_rows: the places of the training rows.
        test_rows: the places of the held-out rows.
    """
    used = [table.columns[each["name"]] for each in columns if each["used"]]
    found = _find_leaks(used, target, y, classes)
    found += _find_copies(used, y, train_rows, test_rows)
    target_column = [] if classes else [Column(target, numbers=np.asarray(y, float))]
    found += [warning for column in [*used, *target_column] for warning in _find_outliers(column)]
    found += _find_drift(used, target, y, classes, train_rows, test_rows)
    return [warning._asdict() for warning in found]


def describe_new_rows(columns: list[dict[str, Any]], table: Table) -> list[str]:
    """Sentences about columns of new rows that lie outside the range of the training rows.

    Args:
        columns: the descriptions of the inputs, with the "min" and "max" of the training rows.
        table: the new rows.
    """
    sentences = []
    for each in columns:
        numbers = table.columns[each["name"]].numbers if each["used"] and each["name"] in table.columns else None
        if numbers is None or each.get("min") is None:
            continue
        margin = 0.1 * (each["max"] - each["min"])
        outside = int(np.sum((numbers < each["min"] - margin) | (numbers > each["max"] + margin)))
        if outside >= max(1, 0.02 * len(numbers)):
            values = "1 value" if outside == 1 else f"{outside:,} values"
            sentences.append(
                f"{values} of {each['name']!r} {'lies' if outside == 1 else 'lie'} outside the range of the training "
                f"rows, {_digits(each['min'])} to {_digits(each['max'])}: the model extrapolates there"
            )
    return sentences


# A column that gives the target away.


def _find_leaks(used: list[Column], target: str, y: np.ndarray, classes: list[str]) -> list[DataWarning]:
    found = []
    if len(y) < _FEWEST_ROWS:
        return found
    for column in used:
        present = ~column.missing & (np.ones(len(y), bool) if column.numbers is None else np.isfinite(column.numbers))
        if present.sum() < max(_FEWEST_ROWS, 0.9 * len(y)):
            continue
        values = column.codes if column.codes is not None else np.asarray(column.numbers)
        alone = _explained_alone(values[present], y[present], bool(classes), column.codes is not None)
        if alone is None:
            continue
        share = f"{100 * alone:.1f} %"
        says = (
            f"alone separates the classes: it leaves {100 * (1 - alone):.1f} % of the errors that guessing the most "
            "frequent class makes"
            if classes
            else f"alone explains {share} of the variance of {target!r}"
        )
        is_counter = column.codes is None and _is_counter(values)
        if alone >= (1 - _ERRORS_LEFT if classes else _EXPLAINED):
            found.append(
                DataWarning(
                    "leak",
                    column.name,
                    f"{column.name!r} {says}.",
                    "If it is computed from the target, or known only after it (a row number of a sorted file is, "
                    "too), remove the column: the scores here would be worthless for new rows.",
                )
            )
        elif is_counter and alone >= 0.5:
            found.append(
                DataWarning(
                    "order",
                    column.name,
                    f"{column.name!r} numbers the rows in the order of the file, and {says}.",
                    "A random split lets the model look up the neighbours of a held-out row. If the rows are in the "
                    "order of time, forecast them with --time; if they are sorted, remove the column.",
                )
            )
    return found


def _explained_alone(values: np.ndarray, y: np.ndarray, is_class: bool, is_category: bool) -> float | None:
    """How much of the target one column explains: 1 − errors/errors of the most frequent class, or R²; None: too few.

    Errors are those of a row that is told by its neighbours in the order of the column, without itself.
    """
    if is_class:
        errors_of_mode = len(y) - int(np.bincount(y).max())
        if errors_of_mode < _FEWEST_ERRORS:
            return None
        return 1 - _count_misplaced(values, y, is_category) / errors_of_mode
    total = float(np.sum((y - y.mean()) ** 2))
    if not total > 0:
        return None
    if is_category:
        left = _leave_one_out_by_level(values, y)
    else:
        line = np.polynomial.Polynomial.fit(values, y, 1)(values) if np.ptp(values) > 0 else np.full(len(y), y.mean())
        left = min(float(np.sum((y - line) ** 2)), _leave_one_out_along(values, y))
    return 1 - left / total


def _count_misplaced(values: np.ndarray, y: np.ndarray, is_category: bool) -> float:
    """Rows whose class is not that of their level, or of their stretch of the column's order.

    A column that tells K classes apart by thresholds has K − 1 changes of class along its order; every misplaced row
    makes two more.
    """
    _, level = np.unique(values, return_inverse=True)
    counts = np.zeros((level.max() + 1, int(y.max()) + 1))
    np.add.at(counts, (level, y), 1)
    mixed = float(len(y) - counts.max(axis=1).sum())
    if is_category or len(counts) <= 2 * counts.shape[1]:
        # A level with one row can be told by nothing but itself.
        return mixed + float((counts.sum(axis=1) == 1).sum())
    modes = counts.argmax(axis=1)
    changes = int(np.sum(modes[1:] != modes[:-1]))
    return mixed + max(0, changes - (len(np.unique(y)) - 1)) / 2


def _leave_one_out_by_level(codes: np.ndarray, y: np.ndarray) -> float:
    """Σ(y − mean of the other rows of its level)²; a level with one row has the mean of all."""
    size, total = np.bincount(codes), np.bincount(codes, weights=y)
    others = size[codes] - 1
    expected = np.where(others > 0, (total[codes] - y) / np.maximum(others, 1), y.mean())
    return float(np.sum((y - expected) ** 2))


def _leave_one_out_along(values: np.ndarray, y: np.ndarray) -> float:
    """Σ(y − a line between the two neighbours in the order of the column)²; equal values have their common mean."""
    points, level = np.unique(values, return_inverse=True)
    if len(points) < 0.5 * len(values):
        return _leave_one_out_by_level(level, y)
    size = np.bincount(level)
    mean = np.bincount(level, weights=y) / size
    inner = np.empty(len(points))
    inner[0], inner[-1] = mean[1], mean[-2]
    share = (points[1:-1] - points[:-2]) / (points[2:] - points[:-2])
    inner[1:-1] = mean[:-2] + share * (mean[2:] - mean[:-2])
    return float(np.sum((y - inner[level]) ** 2))


def _is_counter(values: np.ndarray) -> bool:
    """Whether a column numbers the rows: whole numbers that only rise, or only fall, along the file."""
    steps = np.diff(values)
    return bool(np.all(values == np.round(values)) and (np.all(steps > 0) or np.all(steps < 0)))


# The same row on both sides of the split.


def _find_copies(used: list[Column], y: np.ndarray, train_rows: np.ndarray, test_rows: np.ndarray) -> list[DataWarning]:
    numbers = [np.asarray(each.numbers) for each in used if each.codes is None]
    if not any(len(np.unique(each[:_MOST_ROWS])) > 20 for each in numbers):
        return []  # Rows of a few categories are equal by chance.
    parts = [each.codes if each.codes is not None else each.numbers for each in used]
    table = np.ascontiguousarray(np.column_stack([*(np.nan_to_num(np.asarray(part, float)) for part in parts), y]))
    rows = table[:_MOST_ROWS].view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel()
    test, train = test_rows[test_rows < len(rows)], train_rows[train_rows < len(rows)]
    copies = int(np.isin(rows[test], rows[train]).sum())
    if copies < max(5, 0.02 * len(test)):
        return []
    return [
        DataWarning(
            "copies",
            "",
            f"{copies:,} of {len(test):,} held-out rows are exact copies of training rows.",
            "Remove the copies: a model that remembers rows scores well on them, and on nothing else.",
        )
    ]


# Values far from all others.


def _find_outliers(column: Column) -> list[DataWarning]:
    """A few values that the widest gap of a column separates from all others."""
    if column.numbers is None or column.note == DATES:
        return []
    numbers = column.numbers[np.isfinite(column.numbers)]
    points, counts = np.unique(numbers, return_counts=True)
    if len(numbers) < _FEWEST_ROWS or len(points) < 12:
        return []
    with np.errstate(over="ignore"):
        place = int(np.argmax(np.diff(points))) + 1
    above = counts[place:].sum() < counts[:place].sum()
    odd, bulk, odd_counts = (
        (points[place:], points[:place], counts[place:]) if above else (points[:place], points[place:], counts[:place])
    )
    if len(bulk) < 10 or odd_counts.sum() > 0.1 * len(numbers) or not _is_far(odd, bulk):
        return []
    shown = ", ".join(_digits(value) for value in odd[:3]) + (", …" if len(odd) > 3 else "")
    rows = int(odd_counts.sum())
    return [
        DataWarning(
            "outliers",
            column.name,
            f"{column.name!r} has {'a value' if rows == 1 else f'{rows:,} values'} far from all others: {shown}, where "
            f"the rest lies between {_digits(bulk[0])} and {_digits(bulk[-1])}.",
            "If it stands for a missing value, leave it empty in the file; if it is a mistake, correct it.",
        )
    ]


def _is_far(odd: np.ndarray, bulk: np.ndarray) -> bool:
    """Whether the gap is one and a half times as wide as all of the bulk; and of positive numbers half as wide on a
    logarithmic axis, too, so that a long tail is no reason for a warning."""
    gap = odd[0] - bulk[-1] if odd[0] > bulk[-1] else bulk[0] - odd[-1]
    if not gap > 1.5 * (bulk[-1] - bulk[0]):
        return False
    least, shift = min(odd[0], bulk[0]), 1.0 if np.all(bulk == np.round(bulk)) else 0.0
    if least + shift <= 0:
        return True
    logs = np.log(bulk + shift)
    ends = np.log(odd + shift)
    log_gap = ends[0] - logs[-1] if odd[0] > bulk[-1] else logs[0] - ends[-1]
    return bool(log_gap > 0.5 * (logs[-1] - logs[0]))


# Drift.


def _find_drift(
    used: list[Column], target: str, y: np.ndarray, classes: list[str], train_rows: np.ndarray, test_rows: np.ndarray
) -> list[DataWarning]:
    tested = [*used, Column(target, codes=y) if classes else Column(target, numbers=np.asarray(y, float))]
    level = LEVEL / (2 * len(tested))
    found = []
    for column in tested:
        p = _compare_parts(column, train_rows, test_rows)
        if p is not None and p < level:
            found.append(
                DataWarning(
                    "drift",
                    column.name,
                    f"{column.name!r} is distributed otherwise in the held-out rows than in the training rows "
                    f"({_describe_parts(column, train_rows, test_rows)}).",
                    "The split is random, so that this is rare: try another --seed, and see how much the scores move.",
                )
            )
    return found + _find_drift_along_file(tested, y, classes, level)


def _compare_parts(column: Column, train_rows: np.ndarray, test_rows: np.ndarray) -> float | None:
    """The p-value that both parts come from one distribution: Kolmogorov and Smirnov's, or χ² of the levels."""
    train, test = column.take(train_rows), column.take(test_rows)
    if column.codes is None:
        parts = [np.asarray(part.numbers)[np.isfinite(np.asarray(part.numbers))] for part in (train, test)]
        return None if min(map(len, parts)) < 10 else _p_value(ks_2samp(parts[0], parts[1], method="asymp"))
    counts = np.stack([_count_levels(part, column) for part in (train, test)])
    counts = counts[:, counts.sum(axis=0) >= 10]
    return None if counts.shape[1] < 2 or counts.sum(axis=1).min() < 10 else _p_value(chi2_contingency(counts))


def _p_value(result: Any) -> float:
    """The p-value of a test of SciPy's."""
    return float(result.pvalue)


def _count_levels(part: Column, whole: Column) -> np.ndarray:
    codes = np.asarray(part.codes)
    return np.bincount(codes[codes >= 0], minlength=int(np.asarray(whole.codes).max()) + 1)


def _describe_parts(column: Column, train_rows: np.ndarray, test_rows: np.ndarray) -> str:
    if column.codes is not None:
        return "its levels have other frequencies"
    numbers = np.asarray(column.numbers)
    return f"medians {_digits(np.nanmedian(numbers[test_rows]))} and {_digits(np.nanmedian(numbers[train_rows]))}"


def _find_drift_along_file(tested: list[Column], y: np.ndarray, classes: list[str], level: float) -> list[DataWarning]:
    """Columns whose values rise or fall along the file, among rows with the same target.

    A file that is sorted by one of its columns says nothing about the order in which rows came.
    """
    size = len(y)
    numeric = [column for column in tested if column.codes is None]
    if size < _FEWEST_ROWS or any(_sorts_file(column) for column in numeric):
        return []
    strata = y if classes else (10 * (rankdata(y, method="ordinal") - 1) / size).astype(int)
    found = []
    for column in numeric:
        values = np.asarray(column.numbers)
        finite = np.isfinite(values)
        groups = np.zeros(size, int) if column is tested[-1] else strata
        if finite.sum() < _FEWEST_ROWS or _is_counter(values[finite]) or column.note == DATES:
            continue
        correlation = _correlate_with_place(values[finite], np.flatnonzero(finite), groups[finite])
        freedom = int(finite.sum()) - len(np.unique(groups[finite]))
        # √(n − groups) times a rank correlation within groups is about standard normal where there is no drift.
        if abs(correlation) <= max(_EFFECT, -ndtri(level / 2) / np.sqrt(max(freedom, 1))):
            continue
        among = "" if column is tested[-1] else f" among rows with the same {tested[-1].name!r}"
        found.append(
            DataWarning(
                "drift",
                column.name,
                f"{column.name!r} {'rises' if correlation > 0 else 'falls'} along the file{among}: its rank "
                f"correlation with the place in the file is {f'{correlation:.2f}'.replace('-', '−')}.",
                "If the file is in the order of time, new rows will differ from these: keep the latest rows apart, "
                "predict them with `bayesrule predict`, and trust that score.",
            )
        )
    return found


def _sorts_file(column: Column) -> bool:
    """Whether the file is sorted by this column, which is neither a date nor a counter of the rows."""
    values = np.asarray(column.numbers)
    values = values[np.isfinite(values)]
    steps = np.diff(values)
    is_sorted = len(np.unique(values)) > 10 and bool(np.all(steps >= 0) or np.all(steps <= 0))
    return is_sorted and column.note != DATES and not _is_counter(values)


def _correlate_with_place(values: np.ndarray, place: np.ndarray, groups: np.ndarray) -> float:
    """The rank correlation of values with their place in the file, within groups and pooled over them."""
    u, v = np.zeros(len(values)), np.zeros(len(values))
    for group in np.unique(groups):
        rows = groups == group
        count = int(rows.sum())
        u[rows] = (rankdata(values[rows]) - (count + 1) / 2) / count
        v[rows] = (rankdata(place[rows]) - (count + 1) / 2) / count
    scale = float(np.sqrt(np.sum(u**2) * np.sum(v**2)))
    return float(np.sum(u * v) / scale) if scale > 0 else 0.0


def _digits(value: float) -> str:
    """A number for a sentence: whole numbers as they are, others with four digits."""
    return number_label(value) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
