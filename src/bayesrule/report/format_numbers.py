"""Numbers as people read them: three digits that matter, commas between thousands, and no 1e-17."""

from __future__ import annotations

import math
from typing import Any

MINUS, THIN, NONE = "−", "\u202f", "–"
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: Any, digits: int = 3) -> str:
    """A number with so many digits that matter, whole ones without a point; a dash where there is none.

    >>> [number(x) for x in (0.07149, 0.65, 1234567.8, -12.0, 3e-17, 2.5e-5, 6.02e23, float("nan"))]
    ['0.0715', '0.650', '1,234,568', '−12', '0', '2.50 × 10⁻⁵', '6.02 × 10²³', '–']
    """
    x = _float(value)
    if math.isnan(x):
        return NONE
    if math.isinf(x):
        return "∞" if x > 0 else f"{MINUS}∞"
    if abs(x) < 1e-12:
        return "0"
    if not 1e-3 <= abs(x) < 1e9:
        mantissa, _, power = f"{x:.{digits - 1}e}".partition("e")
        return _signed(f"{mantissa} × 10{str(int(power)).translate(_RAISED)}")
    decimals = 0 if x == round(x) else max(digits - 1 - math.floor(math.log10(abs(x))), 0)
    return _signed(f"{x:,.{decimals}f}")


def round_number(value: float, digits: int) -> str:
    """A number that is round already, as ticks are: no zeros at its end.

    >>> round_number(0.30000000000000004, 4), round_number(2000.0, 4)
    ('0.3', '2,000')
    """
    whole, cross, power = number(value, digits).partition(" × ")
    return (whole.rstrip("0").rstrip(".") if "." in whole else whole) + cross + power


def with_spread(mean: float, spread: float) -> tuple[str, str]:
    """A mean and its standard deviation: two digits of the latter, and the former as far as it is worth saying.

    >>> with_spread(-0.98765, 0.5712), with_spread(1234.5, 321.0), with_spread(1.0, 0.0)
    (('−0.99', '0.57'), ('1,234', '321'), ('1', '0'))
    """
    return worth_saying(mean, spread), worth_saying(spread, spread) if spread >= 1e-4 else number(spread, 2)


def worth_saying(value: float, spread: float) -> str:
    """A number to as many decimals as matter where things vary by `spread`.

    >>> worth_saying(3.3921, 57.0), worth_saying(3.3921, 0.57), worth_saying(0.0001, 0.04)
    ('3', '3.39', '0.000')
    """
    if not (math.isfinite(value) and 1e-4 <= spread < 1e9 and abs(value) < 1e9):
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(spread)))
    text = f"{value:,.{decimals}f}"
    return _signed(text if text.strip("-0.") else text.lstrip("-"))


def percent(value: Any) -> str:
    """A share of one in per cent; what is nearly all or nearly nothing says so.

    >>> [percent(x).replace(THIN, " ") for x in (0.979, 0.9, 1.0, 0.99996, 0.00001)]
    ['97.9 %', '90 %', '100 %', '> 99.9 %', '< 0.1 %']
    """
    x = _float(value)
    if not math.isfinite(x):
        return number(x)
    if 0.9995 <= x < 1:
        return f"> 99.9{THIN}%"
    if 0 < x < 0.0005:
        return f"< 0.1{THIN}%"
    decimals = 0 if abs(100 * x - round(100 * x)) < 1e-9 else 1
    return f"{_signed(f'{100 * x:,.{decimals}f}')}{THIN}%"


def count(value: Any) -> str:
    """A whole number, with commas.

    >>> count(12345)
    '12,345'
    """
    x = _float(value)
    return number(x) if not math.isfinite(x) else _signed(f"{round(x):,}")


def several(value: Any, noun: str, nouns: str | None = None) -> str:
    """A count and what is counted.

    >>> several(1, "row"), several(1200, "row"), several(0, "category", "categories")
    ('1 row', '1,200 rows', '0 categories')
    """
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def _float(value: Any) -> float:
    """What is not a number at all is no reason to have no page."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _signed(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text
