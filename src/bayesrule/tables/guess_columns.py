"""What columns of text are: numbers, dates, truth values or categories, decided by all values of a column and a file.

Nothing is guessed that could as well be otherwise: where a value has two readings and nothing in the file decides, an
error names the place and the option that does. What was guessed is kept as a column's `format`, by which another file,
one to predict, is read alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .dates import EXCEL, STYLES, choose_style, read_date, read_with_format
from .numerals import COMMA, POINT, Numeral, choose_decimal, read_numeral
from .options import ReadingOptions
from .tables import DATES, INVISIBLE, Column, InputError

MISSING = frozenset(
    ["", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NAN", "NaT", "NULL", "null", "?", "#N/A", "#NULL!", "#DIV/0!"]
).union(["#VALUE!", "#REF!", "#NAME?", "#NUM!", "-", "--", "---", "–", "—", ".", "..", "..."])
"""Texts that stand for a missing value in every column."""
_MISSING_WORDS = frozenset(["none", "na", "null", "nil", "missing", "unknown", "nd", "n.a.", "n.d.", "tbd", "*"])
"""Texts, in small letters, that are missing values among numbers and dates, and may be a category among words."""
_TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_MOSTLY = 0.95  # A column with this share of numbers is numeric, and its other values are missing.
_ENOUGH = 20  # Only in a column of more values than these may some be no numbers.
_EXACT = 2.0**53  # Larger whole numbers are not all doubles.
_TRUE = frozenset(["true", "t", "yes", "y", "1", "ja", "oui", "sí", "si", "vrai", "wahr"])
_FALSE = frozenset(["false", "f", "no", "n", "0", "nein", "non", "faux", "falsch"])
_IDENTIFIER = re.compile(r"(?i:(.*[\W_])?(id|ids|key|uuid|guid|rowid|nr))|.*[a-z]I[Dd]")
_ROW_NUMBER = re.compile(r"(?i:index|idx|row|#|no\.?|unnamed: 0|column \d+)")
_DATE_NAME = re.compile(r"date|day|datum|fecha|tag|time|jour", re.IGNORECASE)
_TRIED_LEVELS = 1000
_SHOWN_NAMES = 40  # Of one kind, where there are more than these only half of them are printed.
_SENTINELS = (-9.0, -99.0, -999.0, -9999.0, -99999.0, 999.0, 9999.0, 99999.0, 999999.0)


@dataclass
class TextColumn:
    """A column of text.

    Args:
        name: the column's name.
        levels: its different values, without spaces around them, as an array of pyarrow.
        codes: for each row the index of its value.
    """

    name: str
    levels: Any
    codes: np.ndarray

    @staticmethod
    def of(name: str, values: Any) -> TextColumn:
        """From an array of pyarrow's, in which missing values are null or empty."""
        from pyarrow import compute

        visible = compute.call_function("utf8_trim", [values], compute.TrimOptions(INVISIBLE))
        trimmed = compute.call_function("utf8_trim_whitespace", [visible])
        encoded = compute.call_function("dictionary_encode", [compute.call_function("coalesce", [trimmed, ""])])
        return TextColumn(name, encoded.dictionary, np.asarray(encoded.indices))

    def first_row(self, level: int) -> int:
        return int(np.argmax(self.codes == level))


@dataclass
class Context:
    """What is known about a file while its columns are read.

    Args:
        source: its name, for messages.
        options: what the user said about it.
        formats: for columns that are known already, from training, their format.
        delimiter: what separates its columns; empty where it is no CSV file.
        place: where a row is, for messages.
        decimal: the decimal mark, and `day_order` ("dmy" or "mdy"), that its columns have for certain.
    """

    source: str
    options: ReadingOptions = field(default_factory=ReadingOptions)
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    delimiter: str = ""
    place: Callable[[int], str] = lambda row: f"row {row + 1}"
    decimal: str | None = None
    day_order: str | None = None


def guess_columns(texts: Sequence[TextColumn], context: Context) -> dict[str, Column]:
    """Columns of numbers and categories from columns of text.

    First every column is read by itself. Columns that could be read in two ways are then read as those that could not.
    """
    readers = [_Reader(text, context) for text in texts]
    decimals = {decision for reader in readers if (decision := reader.certain_decimal())}
    orders = {order for reader in readers if (order := reader.certain_day_order())}
    # Where this file has no evidence, columns that are known from training have.
    decimals = decimals or {known["decimal"] for known in context.formats.values() if "decimal" in known}
    orders = orders or {known["style"] for known in context.formats.values() if known.get("style") in ("dmy", "mdy")}
    context.decimal = decimals.pop() if len(decimals) == 1 else None
    context.day_order = orders.pop() if len(orders) == 1 else None
    return {reader.name: reader.column() for reader in readers}


class _Reader:
    """Reads one column of text."""

    def __init__(self, text: TextColumn, context: Context):
        self.text, self.name, self.context = text, text.name, context
        options = context.options
        forced = options.columns.get(self.name)
        known = dict(context.formats.get(self.name, {}))
        self.forced = None
        self.date_format: str | None = None
        if forced is not None:
            self.forced = "date" if "%" in forced or forced == EXCEL else forced
            self.date_format = forced if self.forced == "date" and forced != "date" else None
            known = {}
        self.known = known
        self.date_format = self.date_format or options.date_format or known.get("date_format")
        self.counts = np.bincount(text.codes, minlength=len(text.levels))
        self.is_verbatim = self.forced == "category" or bool(known.get("verbatim"))
        always = {"", *options.missing, *known.get("missing", ())}
        self.missing_texts = frozenset(always) if self.is_verbatim else MISSING | always
        self._words: list[str] | None = None
        self._numbers: np.ndarray | None = None
        self._numerals: list[Numeral | None] | None = None
        self._dates: list[dict[str, float]] | None = None
        self.is_plain = self._read_plain()

    # What the values are, level by level.

    @property
    def words(self) -> list[str]:
        if self._words is None:
            self._words = [str(level) for level in self.text.levels.to_pylist()]
        return self._words

    def _read_plain(self) -> bool:
        """Read the levels as plain numbers, by pyarrow; False where one of them is none."""
        import pyarrow as pa
        from pyarrow import compute

        null = pa.array(sorted(self.missing_texts), pa.string())
        missing = compute.call_function("is_in", [self.text.levels], compute.SetLookupOptions(null))
        self.missing = np.array(missing)
        given = compute.call_function("if_else", [missing, None, self.text.levels])
        try:
            self._numbers = np.array(given.cast(pa.float64()).to_numpy(zero_copy_only=False), float)
        except pa.ArrowInvalid:
            self.missing |= [
                numeral is not None and bool({*numeral.values.values()} & self._missing_numbers)
                for numeral in (self.numerals if self._missing_numbers else [])
            ] or False
            return False
        self.missing |= np.isin(self._numbers, list(self._missing_numbers))
        self._numbers[self.missing] = np.nan
        return True

    @property
    def _missing_numbers(self) -> set[float]:
        """The numbers that stand for a missing value however they are written: -999 is -999.0."""
        read = [read_numeral(text) for text in self.context.options.missing]
        return {next(iter(numeral.values.values())) for numeral in read if numeral is not None}

    def _matches(self, pattern: str) -> np.ndarray:
        """Which levels match a pattern from their beginning to their end, and are not missing."""
        from pyarrow import compute

        option = compute.MatchSubstringOptions(f"^(?:{pattern})$")
        return np.asarray(compute.call_function("match_substring_regex", [self.text.levels], option)) & ~self.missing

    @property
    def numerals(self) -> list[Numeral | None]:
        if self._numerals is None:
            self._numerals = self._read_levels(read_numeral, None)
        return self._numerals

    @property
    def dates(self) -> list[dict[str, float]]:
        if self._dates is None:
            self._dates = self._read_levels(read_date, {})
        return self._dates

    def _read_levels(self, read: Callable[[str], Any], nothing: Any) -> list[Any]:
        """What a function reads in every level, and nothing in those that are missing.

        A column of long texts would take long: if none of the first is read, none is.
        """
        given = np.flatnonzero(~self.missing)
        found = [nothing] * len(self.words)
        for level in given[:_TRIED_LEVELS]:
            found[level] = read(self.words[level])
        if any(found[level] for level in given[:_TRIED_LEVELS]):
            for level in given[_TRIED_LEVELS:]:
                found[level] = read(self.words[level])
        return found

    def _share(self, fits: Sequence[bool] | np.ndarray) -> tuple[float, np.ndarray]:
        """The share of values that fit, not counting words for missing values; and the levels that do not fit."""
        fit = np.asarray(fits, bool)
        odd = ~fit & ~self.missing
        for level in np.flatnonzero(odd):
            if self.words[level].lower() in _MISSING_WORDS:
                odd[level] = False
        present = self.counts[fit].sum() + self.counts[odd].sum()
        return (self.counts[fit].sum() / present if present else 0.0), odd

    def _is_enough(self, share: float) -> bool:
        present = self.counts[~self.missing].sum()
        return share == 1.0 or (share >= _MOSTLY and present > _ENOUGH)

    # Evidence for other columns of the file.

    def certain_decimal(self) -> str | None:
        if self.forced in ("category", "skip", "date") or self.known.get("kind") not in (None, "number"):
            return None
        if self.is_plain:
            has_point = self._matches(r"[-+]?(\d*\.\d*|\d+\.\d*)([eE][-+]?\d+)?") & ~self._matches(
                r"[-+]?[1-9]\d{0,2}\.\d{3}"
            )
            return POINT if has_point.any() else None
        if not self._is_enough(self._share([numeral is not None for numeral in self.numerals])[0]):
            return None
        decision = choose_decimal(self.numerals, None, self.context.delimiter)
        return decision.decimal if decision.is_certain else None

    def certain_day_order(self) -> str | None:
        if self.is_plain or self.forced in ("category", "skip", "number"):
            return None
        dates = [styles for styles in self.dates if styles]
        if not dates or not self._is_enough(self._share([bool(styles) for styles in self.dates])[0]):
            return None
        style = choose_style(dates, None).style
        return style if style in ("dmy", "mdy") else None

    # The column.

    def column(self) -> Column:
        if self.forced == "skip":
            return self._category(skip="--column says so", guess="not read")
        kind = self.forced or self.known.get("kind")
        if kind == "category":
            return self._category(guess="category")
        if kind == "truth":
            return self._known_truth()
        if kind == "number":
            return self._numeric() if self.forced else self._known_number()
        if kind == "date":
            return self._dated() if self.forced else self._known_date()
        return self._guess()

    def _guess(self) -> Column:
        """A column about which nothing is known."""
        if self.missing.all():
            return Column(self.name, numbers=np.full(len(self.text.codes), np.nan), guess="empty")
        if self.date_format is not None:
            fits = [read_with_format(word, self.date_format) is not None for word in self.words]
            if self._is_enough(self._share(fits)[0]) and not (self.date_format == EXCEL and not self._is_excel_date()):
                return self._dated()
        if self.is_plain:
            return self._plain_column()
        truth = self._truth()
        if truth is not None:
            return truth
        number_share, _ = self._share([numeral is not None for numeral in self.numerals])
        if self._is_enough(number_share):
            return self._numeric()
        date_share, _ = self._share([bool(styles) for styles in self.dates])
        if self._is_enough(date_share):
            return self._dated()
        return self._category(note=self._explain_mixture(number_share, date_share))

    # Numbers.

    def _plain_column(self) -> Column:
        """Plain numbers, unless they are codes: with leading zeros, or with more digits than a double has."""
        assert self._numbers is not None
        padded = self._matches(r"0\d+")
        if padded.any():
            level = int(np.argmax(padded))
            note = (
                f"has leading zeros ({self._quote(level)}), so these are codes and not numbers "
                f"(--column {self._quoted_name()}=number reads numbers)"
            )
            return self._category(note=note, guess="category of codes")
        long = (np.abs(self._numbers) > _EXACT) & self._matches(r"[-+]?\d+")
        if long.any():
            level = int(np.argmax(long))
            note = f"has whole numbers too long for a number ({self._quote(level)}), which are read as text"
            return self._category(note=note, guess="category of long numbers")
        open_points = self._open_points()
        is_open = open_points.any()
        with_point = self._matches(r".*\..*")
        if is_open and (self.context.delimiter == ";" or self.context.decimal == COMMA or self.context.options.decimal):
            return self._numeric()
        if self.context.options.decimal == COMMA and with_point.any():
            return self._numeric()  # Which says that a point does not fit.
        numbers = self._numbers[self.text.codes]
        mark = {"decimal": POINT} if with_point.any() else {}
        is_assumed = is_open and self.context.decimal is None and not self.known
        notes = [self._describe_assumption(int(np.argmax(open_points)), POINT)] if is_assumed else []
        powers = self._matches(r"\d+E\d+")
        if powers.any():  # Also codes of rooms and flats look so.
            level = int(np.argmax(powers))
            option = f"--column {self._quoted_name()}=category"
            notes.append(f"{self._quote(level)} is read as {self._numbers[level]:g}: {option} reads codes")
        return self._number_column(numbers, {"kind": "number", **mark}, "number", "; ".join(notes))

    def _open_points(self) -> np.ndarray:
        """Which levels have a point that may be between thousands; none where another level decides."""
        suspicious = self._matches(r"[-+]?[1-9]\d{0,2}\.\d{3}")
        return suspicious & ~(self._matches(r".*\..*") & ~suspicious).any()

    def _numeric(self) -> Column:
        """Numbers as people write them; values that are none are missing, and the note says so."""
        _, odd = self._share([numeral is not None for numeral in self.numerals])
        found = [place for place, numeral in enumerate(self.numerals) if numeral is not None]
        if not found:
            example = self._quote(int(np.argmax(~self.missing)))
            raise InputError(
                f"Column {self.name!r} of {self.context.source} has no numbers, but {example}: leave out --column "
                f"{self._quoted_name()}=number."
            )
        note = self._describe_units([self.numerals[place] for place in found], found)
        if note and self.forced is None:
            return self._category(note=note)
        decimal, assumption = self.context.options.decimal, ""
        if decimal is None:
            decision = choose_decimal(
                [self.numerals[place] for place in found], self.context.decimal, self._delimiter()
            )
            if decision.first is not None and decision.is_contradictory:
                marks = [
                    f"{self._quote(found[place])} has a decimal {_NAMES[mark]}"
                    for mark, place in decision.first.items()
                ]
                note = f"has two kinds of decimal marks: {' and '.join(marks)}. --decimal says which one it is"
                if self.forced is None:
                    return self._category(note=note)
                raise InputError(f"Column {self.name!r} of {self.context.source} {note}.")
            if decision.ambiguous is not None:
                self._raise_ambiguous_number(found[decision.ambiguous])
            decimal = decision.decimal
            if decision.assumed is not None:
                assumption = self._describe_assumption(found[decision.assumed], str(decimal))
        return self._convert(decimal, odd, assumption)

    def _delimiter(self) -> str:
        return self.context.delimiter or COMMA

    def _describe_assumption(self, level: int, decimal: str) -> str:
        """A note about a decimal mark that is probable and not certain."""
        numeral = read_numeral(self.words[level])
        other = COMMA if decimal == POINT else POINT
        assert numeral is not None  # It has been read as a number.
        is_read = f"{self._quote(level)} is read as {numeral.values[decimal]!r}"
        return f"{is_read}: if it is {numeral.values[other]!r}, say --decimal {other}"

    def _convert(self, decimal: str | None, odd: np.ndarray, note: str) -> Column:
        """Numbers under a convention, which None leaves open because it does not matter."""
        values = np.full(len(self.words), np.nan)
        groups, units = set(), Counter()
        for level, numeral in enumerate(self.numerals):
            if numeral is None:
                continue
            if decimal is not None and decimal not in numeral.values:
                other = COMMA if decimal == POINT else POINT
                raise InputError(
                    f"Column {self.name!r} of {self.context.source} has {self._quote(level)}, which does not fit "
                    f"--decimal {decimal}: is it --decimal {other}? If it is text, say --column "
                    f"{self._quoted_name()}=category."
                )
            mark = decimal or next(iter(numeral.values))
            values[level] = numeral.values[mark]
            groups.add((numeral.groups or {}).get(mark, ""))
            units[numeral.unit] += int(self.counts[level])
        unit = next((unit for unit in units if unit), "")
        guessed = [f"in {unit}"] * bool(unit) + ["with decimal commas"] * (decimal == COMMA)
        marks = "".join(sorted(groups))
        guessed += [f"with {_GROUP_NAMES.get(marks, 'groups of digits')}"] * bool(marks)
        notes = [note] * bool(note)
        if unit and units[""]:
            notes.append(f"{_count(units[''], 'value')} without the unit {unit} {_are(units[''])} read as if in {unit}")
        if odd.any():
            notes.append(self._describe_odd(odd, "numbers"))
        numeral_format = {
            "kind": "number",
            "decimal": decimal,
            "groups": marks,
            "unit": unit,
            "missing": [self.words[level] for level in np.flatnonzero(odd)[:50]],
        }
        guess = " ".join(["number", ", ".join(guessed)]).strip()
        numeral_format = {name: value for name, value in numeral_format.items() if value}
        return self._number_column(values[self.text.codes], numeral_format, guess, "; ".join(notes))

    def _describe_odd(self, odd: np.ndarray, expected: str) -> str:
        """A note about the few values that are not what the others are."""
        count = int(self.counts[odd].sum())
        first = min(map(int, np.flatnonzero(odd)), key=self.text.first_row)
        others = [repr(self.words[level]) for level in np.flatnonzero(odd)[:3] if level != first]
        shown = ", ".join([self._quote(first), *others])
        return (
            f"{_count(count, 'value')} that {_are(count)} not {expected} ({shown}) {_are(count)} treated as missing "
            f"(--column {self._quoted_name()}=category reads all as text)"
        )

    def _describe_units(self, numerals: Sequence[Numeral | None], levels: Sequence[int]) -> str:
        """Why numbers with these units are not comparable; empty where they are."""
        first: dict[str, int] = {}
        for numeral, level in zip(numerals, levels, strict=True):
            assert numeral is not None  # The caller leaves out texts that are no numbers.
            first.setdefault(numeral.unit, level)
        units = [unit for unit in first if unit]
        if len(units) > 1:
            shown = " and ".join(self._quote(first[unit]) for unit in units[:2])
            return f"is read as text, because its numbers have different units: {shown}. Write all of them in one unit"
        if units == ["%"] and "" in first:
            shown = f"{self._quote(first['%'])} and {self._quote(first[''])}"
            return f"is read as text, because some numbers are percentages and some are not: {shown}. Write all alike"
        return ""

    def _raise_ambiguous_number(self, level: int) -> None:
        numeral = self.numerals[level]
        assert numeral is not None  # Only numerals are ambiguous.
        readings = " or ".join(f"{value!r} (--decimal {mark})" for mark, value in numeral.values.items())
        raise InputError(
            f"Column {self.name!r} of {self.context.source} can be read in two ways: {self._quote(level)} is "
            f"{readings}, and nothing else in the file decides. Say which with --decimal."
        )

    def _number_column(self, numbers: np.ndarray, number_format: dict[str, Any], guess: str, note: str) -> Column:
        """A column of numbers, with remarks about values that look like something else."""
        notes = [note] * bool(note)
        infinite = np.isinf(numbers)
        if infinite.any():
            row = int(np.argmax(infinite))
            notes.append(
                f"{_count(int(infinite.sum()), 'infinite value')} ({self.words[self.text.codes[row]]!r} in "
                f"{self.context.place(row)}) {_are(int(infinite.sum()))} treated as missing"
            )
        notes += [remark for remark in (self._suspect_dates(numbers), _suspect_sentinel(numbers)) if remark]
        column = Column(self.name, numbers=numbers, note="; ".join(notes), guess=guess, format=number_format)
        return leave_out_identifiers(column, forced=self.forced is not None or bool(self.known))

    def _suspect_dates(self, numbers: np.ndarray) -> str:
        finite = numbers[np.isfinite(numbers)]
        if not len(finite) or not np.all(np.mod(finite, 1) == 0) or self.forced or self.known:
            return ""
        option = f"--column {self._quoted_name()}="
        if np.all((finite > 19000100) & (finite < 21001232)) and len(finite) > 1:
            texts = [f"{int(value)}" for value in np.unique(finite)[:1000]]
            if all(read_with_format(text, "%Y%m%d") is not None for text in texts):
                return f"looks like dates and is read as numbers: {option}%Y%m%d reads dates"
        if _DATE_NAME.search(self.name) and np.all((finite > 20000) & (finite < 60000)):
            return f"looks like Excel's numbers of days and is read as numbers: {option}{EXCEL} reads dates"
        return ""

    # Dates.

    def _is_excel_date(self) -> bool:
        """Whether numbers can be Excel's days, of 1954 to 2064, in a column that is named after a date."""
        numbers = self._numbers[~self.missing] if self.is_plain and self._numbers is not None else np.array([np.nan])
        return bool(np.all((numbers > 20000) & (numbers < 60000))) and bool(_DATE_NAME.search(self.name))

    def _dated(self) -> Column:
        """Dates; values that are none are missing, and the note says so."""
        if self.date_format is not None:
            values = [
                None if missing else read_with_format(word, self.date_format)
                for word, missing in zip(self.words, self.missing, strict=True)
            ]
            _, odd = self._share([value is not None for value in values])
            if all(value is None for value in values):
                raise InputError(
                    f"Column {self.name!r} of {self.context.source} has no dates in the format {self.date_format}, but "
                    f"{self._quote(int(np.argmax(~self.missing)))}: correct --column or --date-format."
                )
            return self._date_column(values, {"date_format": self.date_format}, f"date, {self.date_format}", odd)
        _, odd = self._share([bool(styles) for styles in self.dates])
        found = [place for place, styles in enumerate(self.dates) if styles]
        if not found:
            raise InputError(
                f"Column {self.name!r} of {self.context.source} has no dates that can be read, but "
                f"{self._quote(int(np.argmax(~self.missing)))}: say how they are written, such as --column "
                f"{self._quoted_name()}=%d/%m/%Y."
            )
        decision = choose_style([self.dates[place] for place in found], self.context.day_order)
        if decision.clash is not None:
            shown = " and ".join(self._quote(found[place]) for place in sorted(decision.clash))
            note = (
                f"is read as text, because its dates are written in two ways: {shown}. Write all alike, or say with "
                f"--column {self._quoted_name()}=%d/%m/%Y which ones are dates"
            )
            return self._category(note=note)
        if decision.ambiguous is not None:
            level = found[decision.ambiguous]
            raise InputError(
                f"Column {self.name!r} of {self.context.source} can be read in two ways: in {self._quote(level)} the "
                "first number can be the day or the month, or the year, and nothing else in the file decides. Say "
                "which with --date-format, such as %d/%m/%Y for the day first and %m/%d/%Y for the month first."
            )
        style = str(decision.style)
        values = [styles.get(style) for styles in self.dates]
        return self._date_column(values, {"style": style}, f"date, {STYLES[style]}", odd)

    def _date_column(
        self, values: Sequence[float | None], date_format: dict[str, Any], guess: str, odd: np.ndarray
    ) -> Column:
        days = np.array([np.nan if value is None else value for value in values])[self.text.codes]
        note = f"{DATES}; {self._describe_odd(odd, 'dates')}" if odd.any() else DATES
        missing = {"missing": [self.words[level] for level in np.flatnonzero(odd)[:50]]} if odd.any() else {}
        return Column(self.name, numbers=days, note=note, guess=guess, format={"kind": "date"} | date_format | missing)

    # Categories.

    def _truth(self) -> Column | None:
        """Truth values, of which one may be written in several ways; None if the column has other values."""
        named = [level for level in np.flatnonzero(~self.missing) if self.words[level].lower() in _MISSING_WORDS]
        levels = [level for level in np.flatnonzero(~self.missing) if level not in named]
        words = {level: self.words[level].lower() for level in levels}
        if not levels or not set(words.values()) <= _TRUE | _FALSE:
            return None
        by_truth = {truth: [level for level in levels if (words[level] in _TRUE) == truth] for truth in (True, False)}
        if not all(by_truth.values()):
            return None
        spelling = {}
        for truth, members in by_truth.items():
            word = self.words[max(members, key=lambda level: self.counts[level])]
            spelling[truth] = word.lower() if word.lower() in ("true", "false") else word
        note = ""
        if len(levels) > 2:
            shown = ", ".join(repr(self.words[level]) for level in levels[:6])
            note = (
                f"has truth values in several spellings ({shown}), read as {spelling[True]!r} and {spelling[False]!r}"
            )
        self.missing[named] = True
        truth_format = {"kind": "truth", "true": spelling[True], "false": spelling[False]}
        return self._truth_column(truth_format, note)

    def _truth_column(self, truth_format: dict[str, Any], note: str = "") -> Column:
        texts = [
            None if missing else truth_format["true" if word.lower() in _TRUE else "false"]
            for word, missing in zip(self.words, self.missing, strict=True)
        ]
        values = np.array([*texts, None], object)[self.text.codes]
        column = Column.of_text(self.name, list(values), note)
        return _replace(column, guess="truth value", format=truth_format)

    def _category(self, *, note: str = "", guess: str = "", skip: str = "") -> Column:
        """A category; the levels are sorted."""
        kept = np.flatnonzero(~self.missing)
        words = np.array([self.words[level] for level in kept], dtype=object)
        order = np.argsort(words.astype(str), kind="stable") if len(kept) else np.array([], int)
        code_of = np.full(len(self.words), -1)
        code_of[kept[order]] = np.arange(len(kept))
        levels = tuple(str(word) for word in words[order])
        variants = Counter(level.casefold() for level in levels)
        alike = [level for level in levels if variants[level.casefold()] > 1]
        notes = [note] * bool(note)
        if alike and not skip:
            notes.append(f"has values that differ in capitals only ({', '.join(map(repr, alike[:3]))})")
        category_format = {"kind": "category"} | ({"verbatim": True} if self.is_verbatim else {})
        return Column(
            self.name,
            codes=code_of[self.text.codes],
            levels=levels,
            note="; ".join(notes),
            guess=guess or "category",
            format=category_format,
            skip=skip,
        )

    def _explain_mixture(self, number_share: float, date_share: float) -> str:
        """Why a column that has many numbers, or dates, is text; empty where it has few."""
        times, _ = self._share([_TIME_OF_DAY.fullmatch(word) is not None for word in self.words])
        if self._is_enough(times):
            return "has times of day, which are read as text: write them as numbers of hours, or with their dates"
        kind, share = max(("number", number_share), ("date", date_share), key=lambda each: each[1])
        if share < 0.5:
            return ""
        fits = self.numerals if kind == "number" else self.dates
        _, odd = self._share([bool(each) for each in fits])
        first = min(map(int, np.flatnonzero(odd)), key=self.text.first_row)
        return (
            f"is read as text, because {self._quote(first)} is no {kind}, while {share:.0%} of the values are. If it "
            f"stands for a missing value, say --missing {_shell(self.words[first])}; --column "
            f"{self._quoted_name()}={kind} reads the {kind}s alone"
        )

    # Columns that are known from training.

    def _known_number(self) -> Column:
        """Numbers that are written as in training, or an error that says where they are not."""
        options, known = self.context.options, self.known
        if self.missing.all():
            return Column(self.name, numbers=np.full(len(self.text.codes), np.nan), format=known)
        decimal = options.decimal or known.get("decimal")
        if self.is_plain and (decimal == POINT or (decimal is None and not self._open_points().any())):
            assert self._numbers is not None
            numbers = self._numbers
        else:
            found = [level for level, numeral in enumerate(self.numerals) if numeral is not None]
            _, odd = self._share([numeral is not None for numeral in self.numerals])
            if odd.any():
                self._raise_unlike(int(np.flatnonzero(odd)[0]), "a number")
            if decimal is None:
                decision = choose_decimal(
                    [self.numerals[level] for level in found], self.context.decimal, self._delimiter()
                )
                if decision.ambiguous is not None:
                    self._raise_ambiguous_number(found[decision.ambiguous])
                decimal = decision.decimal
            numbers = np.full(len(self.words), np.nan)
            for level in found:
                numbers[level] = self._known_value(level, decimal)
        return Column(self.name, numbers=numbers[self.text.codes], format=known)

    def _known_value(self, level: int, decimal: str | None) -> float:
        numeral, known = self.numerals[level], self.known
        assert numeral is not None  # Texts that are no numbers have been refused.
        mark = decimal or next(iter(numeral.values))
        if numeral.unit not in ("", known.get("unit", "")):
            had = f"in {known['unit']}" if known.get("unit") else "without a unit"
            raise InputError(
                f"Column {self.name!r} of {self.context.source} has {self._quote(level)}, and in training its numbers "
                f"were {had}: write them so."
            )
        group = (numeral.groups or {}).get(mark, "")
        # Where training had no mark at all, the whole column has decided.
        is_new = "decimal" in known and group not in known.get("groups", "") and not self.context.options.decimal
        if mark not in numeral.values or (numeral.is_ambiguous and group and is_new):
            other = COMMA if mark == POINT else POINT
            choice = f"--decimal {other}" + (f" or --decimal {mark}" if mark in numeral.values else "")
            raise InputError(
                f"Column {self.name!r} of {self.context.source} has {self._quote(level)}, and in training its decimal "
                f"mark was a {_NAMES[mark]}: say {choice} for this file."
            )
        return numeral.values[mark]

    def _known_date(self) -> Column:
        """Dates that are written as in training, or an error that says where they are not."""
        own = self.context.options.date_format
        if own is None and "style" in self.known:
            values = [styles.get(self.known["style"]) for styles in self.dates]
        elif self.date_format is not None:
            values = [read_with_format(word, self.date_format) for word in self.words]
        else:  # Runs of earlier versions do not say how dates were written.
            return self._dated()
        _, odd = self._share([value is not None for value in values])
        if odd.any():
            how = STYLES.get(self.known.get("style", ""), self.date_format or "")
            self._raise_unlike(int(np.flatnonzero(odd)[0]), f"a date ({how})")
        days = np.array([np.nan if value is None else value for value in values])
        days[self.missing] = np.nan
        return Column(self.name, numbers=days[self.text.codes], note=DATES, format=self.known)

    def _raise_unlike(self, level: int, expected: str) -> None:
        option = " --date-format says how the dates of this file are written." if "date" in expected else ""
        raise InputError(
            f"Column {self.name!r} of {self.context.source} has {self._quote(level)}, which is not {expected} as in "
            f"training: correct it, or say --missing {_shell(self.words[level])} if it stands for a missing value."
            f"{option}"
        )

    def _known_truth(self) -> Column:
        words = {self.words[level].lower() for level in np.flatnonzero(~self.missing)}
        self.missing |= [word.lower() in _MISSING_WORDS for word in self.words]
        words -= _MISSING_WORDS
        return self._truth_column(self.known) if words <= _TRUE | _FALSE else self._category()

    # Words for messages.

    def _quote(self, level: int) -> str:
        """A value and its first place: "'x' in line 7"."""
        word = self.words[level]
        return f"{word if len(word) <= 40 else word[:40] + '…'!r} in {self.context.place(self.text.first_row(level))}"

    def _quoted_name(self) -> str:
        return _shell(self.name)


_NAMES = {POINT: "point", COMMA: "comma"}
_GROUP_NAMES = {COMMA: "commas between thousands", POINT: "points between thousands", " ": "spaces between thousands"}


def _count(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _shell(text: str) -> str:
    """A text as it is written on a command line."""
    import shlex

    return shlex.quote(text)


def _replace(column: Column, **changes: Any) -> Column:
    from dataclasses import replace

    return replace(column, **changes)


def _suspect_sentinel(numbers: np.ndarray) -> str:
    """A remark about a number such as -999 that is repeated and far from all others; empty where there is none."""
    finite = np.unique(numbers[np.isfinite(numbers)])
    if len(finite) < 4:
        return ""
    for value, rest in ((finite[0], finite[1:]), (finite[-1], finite[:-1])):
        spread = rest[-1] - rest[0]
        gap = np.min(np.abs(rest - value))
        if value in _SENTINELS and gap > spread and int((numbers == value).sum()) > 1:
            return f"has {value:g} far from all other values: if it stands for a missing value, say --missing={value:g}"
    return ""


def leave_out_identifiers(column: Column, *, forced: bool = False) -> Column:
    """The column, marked to be left out if its numbers only tell rows apart.

    These are whole numbers, all different, in a column with a name such as "id", or without a name. Where another one
    counts the rows from 0 or 1, the note says so.

    Args:
        column: numbers.
        forced: whether it is known, by the user or from training, that these are numbers.
    """
    numbers = column.numbers
    if forced or numbers is None or len(numbers) < 3 or not np.all(np.isfinite(numbers)):
        return column
    if not np.all(np.mod(numbers, 1) == 0):
        return column
    if len(np.unique(numbers)) < len(numbers):
        return column
    counts_rows = numbers[0] in (0, 1) and bool(np.all(np.diff(numbers) == 1))
    if _IDENTIFIER.fullmatch(column.name) or (counts_rows and _ROW_NUMBER.fullmatch(column.name)):
        reason = "numbers the rows" if counts_rows else "has another whole number in every row"
        skip = f"is left out as an identifier: it {reason} (--column {_shell(column.name)}=number uses it)"
        return _replace(column, skip=skip, guess="identifier")
    if counts_rows:
        remark = f"counts the rows: --column {_shell(column.name)}=skip leaves it out, if it means nothing else"
        return _replace(column, note="; ".join(filter(None, [column.note, remark])))
    if len(numbers) > _ENOUGH and np.abs(numbers).min() > 1e6:
        remark = f"has another long number in every row: --column {_shell(column.name)}=skip leaves out an identifier"
        return _replace(column, note="; ".join(filter(None, [column.note, remark])))
    return column


def describe_columns(columns: Mapping[str, Column]) -> Iterator[str]:
    """Lines that say what every column was taken for; columns of one kind share a line."""
    by_guess: dict[str, list[str]] = {}
    for column in columns.values():
        if column.guess:
            by_guess.setdefault(column.guess, []).append(column.name)
    if not by_guess:
        return
    width = max(map(len, by_guess))
    yield "columns, as they were read (--column NAME=number, category, date or skip changes one):"
    for guess, names in by_guess.items():
        shown = names if len(names) <= _SHOWN_NAMES else [*names[: _SHOWN_NAMES // 2], "…", names[-1]]
        count = f" ({len(names):,} columns)" if shown is not names else ""
        yield f"  {guess:<{width}}  {', '.join(shown)}{count}"
