"""Rows in the order of time, and the times that follow."""

from __future__ import annotations

import numpy as np

from .tables import DATES, InputError, Table


def in_order(table: Table, time: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The rows in the order of time, and their times: numbers, or dates."""
    if time is None:
        return np.arange(table.rows), np.arange(table.rows, dtype=float)
    column = table.column(time)
    if column.numbers is None:
        raise InputError(f"The times in {time!r} are text: give numbers, or dates such as 2024-01-31.")
    if column.missing.any():
        raise InputError(f"{int(column.missing.sum()):,} rows have no time in {time!r}: mend or remove them.")
    order = np.argsort(column.numbers, kind="stable")
    times = column.numbers[order]
    if column.note == DATES:
        times = (times * 86_400).round().astype("datetime64[s]")
    return order, times


def said_of(times: np.ndarray) -> list[str]:
    """What is taken for granted of the times, where it is not so."""
    gaps = np.diff(times).astype(float)
    if not len(gaps) or np.ptp(gaps) <= 0.15 * np.median(gaps):
        return []
    twice = int((gaps == 0).sum())
    notes = [f"{twice:,} times are there twice: their rows are taken one after the other"] if twice else []
    return [*notes, "the times are not evenly spaced, and are taken as if they were: put empty rows into gaps"]


def following(times: np.ndarray, steps: int) -> np.ndarray:
    """The next times, as far apart as those before are in the middle.

    >>> following(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [7.0, 9.0]
    """
    gap = np.median(np.diff(times).astype(float)) if len(times) > 1 else 1.0
    ahead = gap * np.arange(1, steps + 1)
    return times[-1] + (ahead.astype("timedelta64[s]") if times.dtype.kind == "M" else ahead)
