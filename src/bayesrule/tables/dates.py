"""Dates as people write them: year first, day first, month first, or with the month's name; with a time or without.

`03/04/2024` is in March in one country and in April in another. A text is therefore read in every style that allows it,
and `choose_style` decides for a whole column.
"""

from __future__ import annotations

import calendar
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

EXCEL = "excel"
"""In place of a format: numbers are days since the end of 1899, as Excel counts them."""
STYLES = {
    "ymd": "year first",
    "dmy": "day before month",
    "mdy": "month before day",
    "name": "with the month's name",
}
_MONTHS = (
    "january february march april may june july august september october november december",
    "januar februar marz april mai juni juli august september oktober november dezember",
    "janvier fevrier mars avril mai juin juillet aout septembre octobre novembre decembre",
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    "janeiro fevereiro marco abril maio junho julho agosto setembro outubro novembro dezembro",
    "januari februari maart april mei juni juli augustus september oktober november december",
)
_TIME = (
    r"(?:[T,]?\s*(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:[.,]\d+)?))?"
    r"\s*(?P<half>[AaPp]\.?[Mm]\.?)?\s*(?P<zone>Z|UTC|GMT|[-+]\d{2}:?\d{2})?)?"
)
_YEAR_FIRST = re.compile(rf"(\d{{4}})([-/.])(\d{{1,2}})(?:\2(\d{{1,2}}))?{_TIME}")
_YEAR_LAST = re.compile(rf"(\d{{1,2}})([-/. ])(\d{{1,2}})\2\s*(\d{{4}}|\d{{2}}){_TIME}")
_NAME_SECOND = re.compile(
    rf"(?:[^\W\d_]+\.?,?\s+)?(\d{{1,2}})(?:st|nd|rd|th|\.)?[-\s/]*(?:of\s+|de\s+)?([^\W\d_]{{3,}})\.?,?[-\s/]*(?:de\s+)?(\d{{4}}|\d{{2}}){_TIME}"
)
_NAME_FIRST = re.compile(
    rf"(?:[^\W\d_]+\.?,\s+)?([^\W\d_]{{3,}})\.?[-\s/]+(?:(\d{{1,2}})(?:st|nd|rd|th)?,?\s+)?(\d{{4}}){_TIME}"
)
_EPOCH = datetime(1970, 1, 1)
_EXCEL_EPOCH = datetime(1899, 12, 30)


def month_number(name: str) -> int | None:
    """The month of a name, or of the beginning of one, in seven languages.

    >>> month_number("Sept"), month_number("März"), month_number("juil"), month_number("Marble")
    (9, 3, 7, None)
    """
    letters = "".join(c for c in unicodedata.normalize("NFD", name.lower()) if not unicodedata.combining(c))
    found = {
        number
        for language in _MONTHS
        for number, month in enumerate(language.split(), start=1)
        if month.startswith(letters)
    }
    return found.pop() if len(found) == 1 else None  # "jui" is the beginning of two.


def read_date(text: str) -> dict[str, float]:
    """Read a text as a date in every style that allows it. Returns days since 1970 by style, nothing if it is no date.

    >>> read_date("03/04/2024")
    {'dmy': 19816.0, 'mdy': 19786.0}
    >>> read_date("31 January 2024"), read_date("2024-01-31 12:00"), read_date("31/31/2024")
    ({'name': 19753.0}, {'ymd': 19753.5}, {})
    """
    text = " ".join(text.split())
    match = _YEAR_FIRST.fullmatch(text)
    if match:
        return _styles(match, ymd=(match[1], match[3], match[4] or "1"))
    match = _YEAR_LAST.fullmatch(text)
    if match:
        first, mark, second, year = match[1], match[2], match[3], match[4]
        if mark == ".":  # Wherever dates have points, the day comes first.
            return _styles(match, dmy=(year, second, first))
        styles = _styles(match, dmy=(year, second, first), mdy=(year, first, second))
        # 24-01-31 may be a date of 2024; with strokes nobody writes it so.
        return styles | (_styles(match, ymd=(first, second, year)) if mark == "-" and len(year) == 2 else {})
    match = _NAME_SECOND.fullmatch(text)
    if match and month_number(match[2]):
        return _styles(match, name=(match[3], str(month_number(match[2])), match[1]))
    match = _NAME_FIRST.fullmatch(text)
    if match and month_number(match[1]):
        return _styles(match, name=(match[3], str(month_number(match[1])), match[2] or "1"))
    return {}


def _styles(match: re.Match[str], **parts: tuple[str, str, str]) -> dict[str, float]:
    hours = _hours(match)
    dates = {style: _days(*map(int, part)) for style, part in parts.items()}
    if hours is None:
        return {}
    return {style: days + hours / 24 for style, days in dates.items() if days is not None}


def _days(year: int, month: int, day: int) -> float | None:
    """Days since 1970 of a date; None if there is no such date."""
    if year < 100:
        year += 1900 if year >= 69 else 2000  # As in POSIX.
    if not (1 <= month <= 12 and year >= 1 and 1 <= day <= calendar.monthrange(year, month)[1]):
        return None
    return float((datetime(year, month, day) - _EPOCH).days)


def _hours(match: re.Match[str]) -> float | None:
    """The time of day, in hours of Greenwich where the zone is given; None if there is no such time."""
    if match["hour"] is None:
        return 0.0
    hour, minute, second = int(match["hour"]), int(match["minute"]), float((match["second"] or "0").replace(",", "."))
    if match["half"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match["half"][0] in "Pp" else 0)
    if hour > 24 or minute > 59 or second >= 61 or (hour == 24 and (minute or second)):
        return None
    zone = match["zone"] or "Z"
    east = 0.0
    if zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        east = (int(digits[:2]) + int(digits[2:]) / 60) * (1 if zone[0] == "+" else -1)
    return hour + minute / 60 + second / 3600 - east


@dataclass(frozen=True)
class DateDecision:
    """Which style the dates of a column have.

    Args:
        style: one of `STYLES`; None where several or none fit all dates.
        clash: two places whose dates have no style in common; None where there are no such.
        ambiguous: the place of a date that is another day in each style that fits all, where nothing decides.
    """

    style: str | None = None
    clash: tuple[int, int] | None = None
    ambiguous: int | None = None


def choose_style(dates: Sequence[dict[str, float]], elsewhere: str | None) -> DateDecision:
    """Decide the style of a column by all its dates.

    Args:
        dates: what `read_date` returns for its texts, each of them a date.
        elsewhere: whether day or month come first in the file's other columns ("dmy", "mdy"), where these decide.

    >>> choose_style([read_date("03/04/2024"), read_date("13/04/2024")], None).style
    'dmy'
    >>> choose_style([read_date("03/04/2024"), read_date("05/04/2024")], None).ambiguous
    0
    """
    possible, narrowest = set(STYLES), 0
    for place, styles in enumerate(dates):
        if not possible & styles.keys():
            return DateDecision(clash=(narrowest, place))
        if possible - styles.keys():
            possible, narrowest = possible & styles.keys(), place
    different = [place for place, styles in enumerate(dates) if len({styles[style] for style in possible}) > 1]
    if not different:
        return DateDecision(next(style for style in STYLES if style in possible))
    return DateDecision(elsewhere) if elsewhere in possible else DateDecision(ambiguous=different[0])


def read_with_format(text: str, date_format: str) -> float | None:
    """Days since 1970 of a text in a format of strptime, or in `EXCEL`'s numbers; None if it does not fit.

    >>> read_with_format("31/01/24", "%d/%m/%y"), read_with_format("45322", "excel"), read_with_format("x", "%Y")
    (19753.0, 19753.0, None)
    """
    text = text.strip()
    try:
        if date_format == EXCEL:
            date = _EXCEL_EPOCH + timedelta(days=float(text))
        else:
            date = datetime.strptime(text, date_format)
    except (ValueError, OverflowError):
        return None
    if date.tzinfo is not None:
        date = date.replace(tzinfo=None) - (date.utcoffset() or timedelta())
    return (date - _EPOCH) / timedelta(days=1)
