"""Rows in the order of time, remarks on irregular times, and the times of a forecast."""

from __future__ import annotations

import numpy as np

from .tables import InputError, Table


def order_by_time(table: Table, time: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the rows in the order of the column `time`, and the ordered times: numbers, or dates.

    Without such a column the rows are in order already, at the times 0, 1, ….
    """
    if time is None:
        return np.arange(table.rows), np.arange(table.rows, dtype=float)
    column = table.column(time)
    if column.numbers is None:
        why = f" ({column.note})" if column.note else ""
        raise InputError(
            f"The times in {time!r} are text, such as {column.levels[0]!r}{why}: give numbers or dates. --date-format "
            "says how dates are written, such as %d/%m/%Y."
        )
    if column.missing.any():
        first = table.place(int(np.argmax(column.missing)))
        raise InputError(
            f"{int(column.missing.sum()):,} rows have no time in {time!r}, the first in {first}: fill in or remove "
            "them."
        )
    order = np.argsort(column.numbers, kind="stable")
    times = column.numbers[order]
    if column.is_date:
        times = (times * 86_400).round().astype("datetime64[s]")
    return order, times


def irregularities(times: np.ndarray) -> list[str]:
    """Warnings, as sentences, if the times are not evenly spaced: sequence models assume that they are."""
    gaps = np.diff(times).astype(float)
    if not len(gaps) or np.ptp(gaps) <= 0.15 * np.median(gaps):
        return []
    repeated = int((gaps == 0).sum())
    notes = [f"{repeated:,} times occur more than once: their rows count as successive steps"] if repeated else []
    return [*notes, "the times are not evenly spaced, and the model assumes that they are: add empty rows in the gaps"]


def next_times(times: np.ndarray, steps: int) -> np.ndarray:
    """The next times, spaced by the median gap of those before.

    >>> next_times(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [7.0, 9.0]
    """
    gap = np.median(np.diff(times).astype(float)) if len(times) > 1 else 1.0
    ahead = gap * np.arange(1, steps + 1)
    return times[-1] + (ahead.astype("timedelta64[s]") if times.dtype.kind == "M" else ahead)
