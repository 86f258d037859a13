"""A table of columns, each of numbers or of categories, whatever file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DATES = "dates, in days since 1970"


class InputError(ValueError):
    """Something that whoever gave the data or the settings can mend: one line that says what, and what to do."""


@dataclass(frozen=True)
class Column:
    """Numbers (NaN is missing), or categories: places among the `levels` (−1 is missing)."""

    name: str
    numbers: np.ndarray | None = None
    codes: np.ndarray | None = None
    levels: tuple[str, ...] = ()
    note: str = ""

    @property
    def kind(self) -> str:
        return "number" if self.codes is None else "category"

    def __len__(self) -> int:
        return len(self.missing)

    @property
    def missing(self) -> np.ndarray:
        """Which rows have no value."""
        if self.codes is not None:
            return self.codes < 0
        assert self.numbers is not None  # a column has one or the other
        return np.isnan(self.numbers)

    def taken(self, rows: Any) -> Column:
        """Some of its rows."""
        pick = lambda values: None if values is None else values[rows]
        return Column(self.name, pick(self.numbers), pick(self.codes), self.levels, self.note)

    def labels(self) -> np.ndarray:
        """Its values as text, whole numbers without a point; missing ones are empty."""
        if self.codes is not None:
            return np.array([*self.levels, ""])[self.codes]
        assert self.numbers is not None
        return np.array(["" if np.isnan(x) else number_label(x) for x in self.numbers])

    @staticmethod
    def of_text(name: str, values: Sequence[Any], note: str = "") -> Column:
        """Categories from text; None is missing.

        >>> Column.of_text("c", ["b", None, "a", "b"]).codes.tolist()
        [1, -1, 0, 1]
        """
        there = np.array([value is not None for value in values], bool)
        levels, places = np.unique([str(value) for value in values if value is not None], return_inverse=True)
        codes = np.full(len(there), -1)
        codes[there] = places
        return Column(name, codes=codes, levels=tuple(map(str, levels)), note=note)


def number_label(value: float) -> str:
    """A number as a label.

    >>> number_label(3.0), number_label(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if float(value).is_integer() else repr(float(value))


@dataclass(frozen=True)
class Table:
    """Columns of the same length, and where they came from."""

    columns: dict[str, Column]
    source: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def taken(self, rows: Any) -> Table:
        """Some of its rows."""
        return Table({name: column.taken(rows) for name, column in self.columns.items()}, self.source, self.notes)

    def column(self, name: str) -> Column:
        """The column of this name, or an error that lists those there are."""
        if name not in self.columns:
            shown = ", ".join(list(self.columns)[:12]) + (", …" if len(self.columns) > 12 else "")
            raise InputError(f"{self.source} has no column {name!r}: it has {shown}.")
        return self.columns[name]
