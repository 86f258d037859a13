"""Numbers as people write them: with a currency, a unit, groups of digits, a decimal point or a decimal comma.

`1.234` is one and a bit in one country and more than a thousand in another. A text is therefore read under each of the
two conventions, and `choose_decimal` decides for a whole column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

POINT, COMMA = ".", ","
_AMERICAN = "$£¥₹"  # Currencies of countries with decimal points.
_ENOUGH = 5  # Fewer numbers than these may lack tenths by chance.
_SYMBOLS = "$€£¥₹₽₩₺₴₪฿¢"
_CODES = (
    "USD|EUR|GBP|CHF|JPY|CNY|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|INR|BRL|MXN|ZAR|TRY|RUB|KRW|SGD|HKD|ILS|THB|"
    "kr|zł|Fr|Rs"
)
_CURRENCY = rf"[A-Z]{{0,3}}[{_SYMBOLS}]|(?:{_CODES})\.?(?![A-Za-z])"
_UNIT = (
    r"(?:[a-z]{1,3}[²³23]|[^\W\d_]{1,12})(?:[/·*^-][^\W_]{1,6}[²³23]?){0,3}|[%‰]|°[A-Za-z]?|[\"″′]|[µμ][A-Za-z]{1,3}"
)
_NUMERAL = re.compile(
    rf"""(?P<open>\()? \s* (?P<sign>[-+−])? \s* (?P<currency>{_CURRENCY})? \s* (?P<second_sign>[-+−])? \s*
    (?P<body>(?:\d[\d.,'’\ ]*|[.,]\d+)(?:[eE][-+]?\d+)?) \s* (?P<unit>{_CURRENCY}|{_UNIT})? (?P<minus>-)? \s*
    (?P<close>\))?""",
    re.VERBOSE,
)
_LEADING_CURRENCY = re.compile(rf"^({_CURRENCY})\s*\(")
_IS_CURRENCY = re.compile(_CURRENCY).fullmatch
_UNGROUPED = str.maketrans(dict.fromkeys(".,'’ "))
_WHITE = str.maketrans(dict.fromkeys("\u00a0\u202f\u2009\u2007\t", " "))


def _body_pattern(decimal: str, groups: str) -> re.Pattern[str]:
    # Groups have three digits, in India two and three at the end; a number in groups does not begin with 0.
    grouped = rf"[1-9]\d{{0,2}}(?:(?P<group>[{groups}])\d{{3}})(?:(?P=group)\d{{3}})*"
    indian = r"|[1-9]\d?(?:,\d{2})+,\d{3}" if decimal == POINT else ""
    return re.compile(
        rf"(?P<whole>{grouped}{indian}|\d*)(?:{re.escape(decimal)}(?P<fraction>\d*))?(?P<exponent>[eE][-+]?\d+)?"
    )


_BODIES = {POINT: _body_pattern(POINT, ",'’ "), COMMA: _body_pattern(COMMA, ".'’ ")}
_WORDS = {"inf": np.inf, "infinity": np.inf, "∞": np.inf}


@dataclass(frozen=True)
class Numeral:
    """A text that is a number.

    Args:
        values: the number under each convention that allows it: `POINT`, `COMMA`.
        unit: what stands beside the digits, such as "kg", "%" or "$"; empty without any.
        is_currency: whether that is a currency.
        groups: under each convention, what separates groups of digits; empty where nothing does.
    """

    values: dict[str, float]
    unit: str = ""
    is_currency: bool = False
    groups: dict[str, str] | None = None

    @property
    def is_ambiguous(self) -> bool:
        """Whether the two conventions give two different numbers."""
        return len(set(self.values.values())) > 1


def read_numeral(text: str) -> Numeral | None:
    """Read a text as a number, under both conventions; None if it is none.

    >>> read_numeral("$1,200.50").values, read_numeral("12,5").values
    ({'.': 1200.5}, {',': 12.5})
    >>> read_numeral("1,234").values
    {'.': 1234.0, ',': 1.234}
    >>> read_numeral("45 %").unit, read_numeral("(1 200)").values["."], read_numeral("one")
    ('%', -1200.0, None)
    """
    text = (text if text.isascii() else text.translate(_WHITE)).strip()
    word = text.lstrip("+-−").lower()
    if word in _WORDS:
        value = -_WORDS[word] if text[0] in "-−" else _WORDS[word]
        return Numeral({POINT: value, COMMA: value}, groups={POINT: "", COMMA: ""})
    match = _NUMERAL.fullmatch(_LEADING_CURRENCY.sub(r"(\1", text) if text[-1:] == ")" else text)
    if match is None or (match["open"] is None) != (match["close"] is None):
        return None
    signs = [sign for sign in (match["sign"], match["second_sign"], match["minus"]) if sign]
    beside = [part for part in (match["currency"], match["unit"]) if part]
    if len(signs) + (match["open"] is not None) > 1 or len(beside) > 1:
        return None
    negative = match["open"] is not None or (bool(signs) and signs[0] in "-−")
    values, groups = {}, {}
    for decimal, pattern in _BODIES.items():
        body = pattern.fullmatch(match["body"].strip())
        if body is None or not (body["whole"] or body["fraction"]):
            continue
        digits = body["whole"].translate(_UNGROUPED)
        number = float(f"{digits or 0}.{body['fraction'] or 0}{body['exponent'] or ''}")
        values[decimal] = -number if negative else number
        groups[decimal] = body["group"] or ("," if "," in body["whole"] else "")
    if not values:
        return None
    unit = beside[0].strip() if beside else ""
    return Numeral(values, unit, bool(unit) and _IS_CURRENCY(unit) is not None, groups)


@dataclass(frozen=True)
class Decision:
    """What the numerals of a column say about its decimal mark.

    Args:
        decimal: the mark, where it can be told; None where nothing has a mark, or nothing decides.
        is_certain: whether some value can be read in no other way, so that other columns may follow.
        first: for each mark, the first numeral that it alone can read.
        ambiguous: the first numeral that is another number under each mark, where nothing decides.
        assumed: such a numeral, where the mark is probable and not certain.
    """

    decimal: str | None = None
    is_certain: bool = False
    first: dict[str, int] | None = None
    ambiguous: int | None = None
    assumed: int | None = None

    @property
    def is_contradictory(self) -> bool:
        return self.first is not None and len(self.first) == 2


def choose_decimal(numerals: Sequence[Numeral | None], elsewhere: str | None, delimiter: str = COMMA) -> Decision:
    """Decide between decimal point and decimal comma by all numerals of a column.

    Args:
        numerals: the column's; None where a text is no number.
        elsewhere: the mark of the file's other columns, where they have one.
        delimiter: what separates the columns of the file: a semicolon leaves the comma to numbers.

    >>> read = lambda *texts: [read_numeral(text) for text in texts]
    >>> choose_decimal(read("1,234", "12,5"), None).decimal, choose_decimal(read("1,234", "$5"), None).decimal
    (',', '.')
    >>> choose_decimal(read("1,234", "5,678"), None).ambiguous
    0
    """
    given = [(place, numeral) for place, numeral in enumerate(numerals) if numeral is not None]
    first: dict[str, int] = {}
    for place, numeral in given:
        if len(numeral.values) == 1:
            first.setdefault(next(iter(numeral.values)), place)
    if first:
        return Decision(next(iter(first)) if len(first) == 1 else None, len(first) == 1, first)
    ambiguous = [(place, numeral) for place, numeral in given if numeral.is_ambiguous]
    if not ambiguous:
        return Decision()
    place = ambiguous[0][0]
    marks = {(numeral.groups or {}).get(POINT, "") for _, numeral in ambiguous}  # A comma, or nothing for a point.
    if len(marks) > 1:  # 1,234 and 1.234 in one column.
        return Decision(ambiguous=place)
    has_commas = marks == {COMMA}
    if has_commas and any(numeral.unit[-1:] in _AMERICAN for _, numeral in given if numeral.unit):
        # Nobody has thousandths of a dollar; but nobody else in the file may write them as a European.
        is_european = elsewhere == COMMA or delimiter == ";"
        return Decision(ambiguous=place) if is_european else Decision(POINT)
    if elsewhere is not None:
        return Decision(elsewhere)
    if not has_commas:
        # Programs write points; but a semicolon, or an amount, may come from where points are between thousands.
        is_open = delimiter == ";" or any(numeral.is_currency for _, numeral in given)
        return Decision(ambiguous=place) if is_open else Decision(POINT, assumed=place)
    plain = [numeral.values[POINT] for _, numeral in given if not numeral.is_ambiguous]
    if len(given) >= _ENOUGH and plain and max(map(abs, plain)) < 1000:
        # Below a thousand nothing is separated and above it everything, so these are thousands; unless a semicolon
        # speaks for decimal commas.
        return Decision(ambiguous=place) if delimiter == ";" else Decision(POINT, assumed=place)
    return Decision(COMMA, assumed=place) if delimiter == ";" else Decision(ambiguous=place)
