"""What a user says about a file where guessing is not enough: missing values, decimal marks, dates, sheets, columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .dates import EXCEL
from .numerals import COMMA, POINT
from .tables import InputError

KINDS = ("number", "category", "date", "skip")


@dataclass(frozen=True)
class ReadingOptions:
    """How a file is read, as far as it is not guessed. Each field is an option of the command line.

    Args:
        missing: texts that stand for a missing value, besides those that always do.
        decimal: the decimal mark of all numbers, "." or ",".
        date_format: the format of dates, as in `datetime.strptime`; or "excel" for Excel's numbers of days.
        sheet: the sheet of a workbook, by name or by number from 1.
        columns: for some columns, what they are: one of `KINDS`, or the format of their dates.
    """

    missing: tuple[str, ...] = ()
    decimal: str | None = None
    date_format: str | None = None
    sheet: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ReadingOptions:
        """The options in the settings of a run, checked.

        >>> ReadingOptions.from_config({"missing": -999, "decimal": ",", "target": "y"})
        ReadingOptions(missing=('-999',), decimal=',', date_format=None, sheet=None, columns={})
        """
        missing = config.get("missing") or ()
        # In a YAML file -999 is a number, and one value is not always put into a list.
        missing = missing if isinstance(missing, Sequence) and not isinstance(missing, str) else [missing]
        decimal, date_format, sheet = (config.get(name) for name in ("decimal", "date_format", "sheet"))
        if decimal not in (None, POINT, COMMA):
            raise InputError(f"--decimal must be . or , (the mark between 1 and 5 in 1.5), got {decimal!r}.")
        if date_format is not None:
            check_date_format(str(date_format), "--date-format")
        columns = config.get("columns") or {}
        if not isinstance(columns, Mapping):
            raise InputError(f"columns must be a list such as `zip: category`, got {columns!r}.")
        for name, kind in columns.items():
            if "%" in str(kind) or kind == EXCEL:
                check_date_format(str(kind), f"--column {name}=")
            elif kind not in KINDS:
                raise InputError(
                    f"--column {name}={kind}: there is no such kind. The kinds are {', '.join(KINDS)}, and formats of "
                    "dates such as %d/%m/%Y."
                )
        return ReadingOptions(
            tuple(str(text).strip() for text in missing),
            decimal,
            None if date_format is None else str(date_format),
            None if sheet is None else str(sheet),
            {str(name): str(kind) for name, kind in columns.items()},
        )


def check_date_format(text: str, option: str) -> None:
    """Raise unless a text is a format of dates."""
    if text == EXCEL:
        return
    try:
        datetime.strptime(datetime(2024, 1, 31).strftime(text), text)
        is_format = "%" in text
    except (ValueError, TypeError):
        is_format = False
    if not is_format:
        raise InputError(
            f"{option} takes a format of Python's strptime such as %d/%m/%Y (day, month, year), or {EXCEL} for Excel's "
            f"numbers of days, got {text!r}."
        )
