"""A table of columns, each of numbers or of categories, whatever file it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

DATES = "dates, in days since 1970"
INVISIBLE = "\u200b\u200e\u200f\u2060\ufeff"
"""Characters without width, which come with text that was copied from web pages."""


class InputError(ValueError):
    """A mistake in the data or the settings. The message is one line: what is wrong, and what to do about it."""


@dataclass(frozen=True)
class Column:
    """A column of numbers or of categories.

    Args:
        name: the column's name.
        numbers: the values of a numeric column, NaN where missing.
        codes: the values of a categorical column as indices into `levels`, −1 where missing.
        levels: the different values of a categorical column.
        note: a remark for the user about how it was read.
        guess: in a few words, what the values were taken for; empty where nothing had to be guessed.
        format: how its texts were read, as JSON, so that those of another file are read alike: "kind" ("number",
            "category", "truth" or "date"), and what `guess_columns` adds.
        skip: why no model should use it; empty where one may.
    """

    name: str
    numbers: np.ndarray | None = None
    codes: np.ndarray | None = None
    levels: tuple[str, ...] = ()
    note: str = ""
    guess: str = ""
    format: dict[str, Any] = field(default_factory=dict)
    skip: str = ""

    @property
    def is_date(self) -> bool:
        """Whether the numbers are dates, in days since 1970."""
        return self.format.get("kind") == "date" or self.note == DATES

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
        assert self.numbers is not None  # A column has either numbers or codes.
        return np.isnan(self.numbers)

    def take(self, rows: Any) -> Column:
        """The column at these rows: indices or a mask."""
        select = lambda values: None if values is None else values[rows]
        return replace(self, numbers=select(self.numbers), codes=select(self.codes))

    def labels(self) -> np.ndarray:
        """The values as text: integers without a decimal point, missing values as the empty string."""
        if self.codes is not None:
            return np.array([*self.levels, ""])[self.codes]
        assert self.numbers is not None
        return np.array(["" if np.isnan(value) else number_label(value) for value in self.numbers])

    @staticmethod
    def of_text(name: str, values: Sequence[Any], note: str = "") -> Column:
        """A categorical column from text; None is missing.

        >>> Column.of_text("c", ["b", None, "a", "b"]).codes.tolist()
        [1, -1, 0, 1]
        """
        present = np.array([value is not None for value in values], bool)
        levels, indices = np.unique([str(value) for value in values if value is not None], return_inverse=True)
        codes = np.full(len(present), -1)
        codes[present] = indices
        return Column(name, codes=codes, levels=tuple(map(str, levels)), note=note)


def number_label(value: float) -> str:
    """A number as text, an integer without a decimal point.

    >>> number_label(3.0), number_label(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if float(value).is_integer() else repr(float(value))


@dataclass(frozen=True)
class Table:
    """Columns of the same length.

    Args:
        columns: by name.
        source: the name of the file or data set.
        notes: sentences about how the file was read.
        locate: the place in the file of a row, counted from 0: "line 7". None where rows are not those of a file.
    """

    columns: dict[str, Column]
    source: str = ""
    notes: list[str] = field(default_factory=list)
    locate: Callable[[int], str] | None = None

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, rows: Any) -> Table:
        """The table at these rows: indices or a mask."""
        return Table({name: column.take(rows) for name, column in self.columns.items()}, self.source, self.notes)

    def place(self, row: int) -> str:
        """Where a row is, for a message."""
        return f"row {row + 1}" if self.locate is None else self.locate(int(row))

    def column(self, name: str) -> Column:
        """The column of this name; otherwise an error that lists the columns."""
        if name not in self.columns:
            names = list(self.columns)
            folded = {each.casefold(): each for each in names}
            close = [folded[each] for each in get_close_matches(name.casefold(), folded, 1)]
            shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
            meant = f" Is it {close[0]!r}?" if close else ""
            raise InputError(f"{self.source} has no column {name!r}: it has {shown}.{meant}")
        return self.columns[name]
