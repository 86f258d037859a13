"""Numbers as text for readers: three significant digits, commas between thousands, and 0 instead of 1e-17."""

from __future__ import annotations

import math
from typing import Any

MINUS, THIN, MISSING = "−", "\u202f", "–"
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: Any, digits: int = 3) -> str:
    """A number with `digits` significant digits, integers without decimals, and a dash for what is not a number.

    >>> [number(x) for x in (0.07149, 0.65, 1234567.8, -12.0, 3e-17, 2.5e-5, 6.02e23, float("nan"))]
    ['0.0715', '0.650', '1,234,568', '−12', '0', '2.50 × 10⁻⁵', '6.02 × 10²³', '–']
    """
    x = _float(value)
    if math.isnan(x):
        return MISSING
    if math.isinf(x):
        return "∞" if x > 0 else f"{MINUS}∞"
    if abs(x) < 1e-12:
        return "0"
    if not 1e-3 <= abs(x) < 1e9:
        mantissa, _, power = f"{x:.{digits - 1}e}".partition("e")
        return _signed(f"{mantissa} × 10{str(int(power)).translate(_SUPERSCRIPTS)}")
    decimals = 0 if x == round(x) else max(digits - 1 - math.floor(math.log10(abs(x))), 0)
    return _signed(f"{x:,.{decimals}f}")


def trimmed(value: float, digits: int) -> str:
    """A round number, such as a tick's, without trailing zeros.

    >>> trimmed(0.30000000000000004, 4), trimmed(2000.0, 4)
    ('0.3', '2,000')
    """
    mantissa, cross, power = number(value, digits).partition(" × ")
    return (mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa) + cross + power


def mean_and_std(mean: float, std: float) -> tuple[str, str]:
    """A mean and its standard deviation: two significant digits of the latter, and as many decimals of the former.

    >>> mean_and_std(-0.98765, 0.5712), mean_and_std(1234.5, 321.0), mean_and_std(1.0, 0.0)
    (('−0.99', '0.57'), ('1,234', '321'), ('1', '0'))
    """
    return rounded_to(mean, std), rounded_to(std, std) if std >= 1e-4 else number(std, 2)


def rounded_to(value: float, std: float) -> str:
    """A number with as many decimals as two significant digits of `std` have.

    >>> rounded_to(3.3921, 57.0), rounded_to(3.3921, 0.57), rounded_to(0.0001, 0.04)
    ('3', '3.39', '0.000')
    """
    if not (math.isfinite(value) and 1e-4 <= std < 1e9 and abs(value) < 1e9):
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(std)))
    text = f"{value:,.{decimals}f}"
    return _signed(text if text.strip("-0.") else text.lstrip("-"))


def percent(value: Any) -> str:
    """A proportion in per cent; close to 0 and 1 it is a bound instead of a rounded value.

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
    """An integer with commas.

    >>> count(12345)
    '12,345'
    """
    x = _float(value)
    return number(x) if not math.isfinite(x) else _signed(f"{round(x):,}")


def counted(value: Any, noun: str, nouns: str | None = None) -> str:
    """A count with its noun, singular or plural.

    >>> counted(1, "row"), counted(1200, "row"), counted(0, "category", "categories")
    ('1 row', '1,200 rows', '0 categories')
    """
    return f"{count(value)} {noun if value == 1 else nouns or noun + 's'}"


def _float(value: Any) -> float:
    """The value as a float, NaN if it is not a number: a broken value must not break the page."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _signed(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text
