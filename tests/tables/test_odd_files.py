"""Of many odd files none is read wrongly without a word, and every refusal says where and what helps."""

import contextlib
import re
from typing import Any

import numpy as np
import pytest

from bayesrule.runs.train import resolve_config
from bayesrule.tables.encoding import Encoding
from bayesrule.tables.options import ReadingOptions
from bayesrule.tables.reading import read
from bayesrule.tables.tables import InputError

from .odd_files import ODD_FILES, OddFile


def write(folder, odd: OddFile):
    content: Any = odd.content() if callable(odd.content) else odd.content
    path = folder / f"data.{odd.suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load(folder, odd: OddFile):
    return read(write(folder, odd), ReadingOptions.from_config(odd.options))


def found_values(column):
    if column.numbers is not None:
        return column.numbers.tolist()
    return [column.levels[code] if code >= 0 else None for code in column.codes]


def remarks(table):
    """Everything that a user is told about the file."""
    about = [f"{part}" for column in table.columns.values() for part in (column.note, column.guess, column.skip)]
    return [*table.notes, *filter(None, about)]


def by_name(odd_files):
    return pytest.mark.parametrize("odd", odd_files, ids=[odd.name for odd in odd_files])


@by_name([odd for odd in ODD_FILES if not odd.error])
def test_understood(tmp_path, odd):
    table = load(tmp_path, odd)
    for name, expected in odd.values.items():
        np.testing.assert_equal(found_values(table.column(name)), expected)
    for pattern in odd.says:
        assert any(re.search(pattern, remark) for remark in remarks(table)), remarks(table)
    assert {name for name, column in table.columns.items() if column.skip} >= set(odd.skips)


@by_name([odd for odd in ODD_FILES if odd.error])
def test_refused(tmp_path, odd):
    with pytest.raises(InputError, match=odd.error) as caught:
        load(tmp_path, odd)
    assert "\n" not in str(caught.value)


@by_name([odd for odd in ODD_FILES if not odd.error])
def test_trained_or_refused(tmp_path, odd):
    """What can be read is then checked and encoded, or refused: few of these files have enough rows."""
    table = load(tmp_path, odd)
    names = [name for name in table.columns if name != list(table.columns)[-1]]
    for attempt in (lambda: resolve_config(table, {}), lambda: Encoding.fit(table, names).matrix(table)):
        with contextlib.suppress(InputError):
            attempt()


def test_there_are_many_of_them():
    assert len({odd.name for odd in ODD_FILES}) == len(ODD_FILES) >= 60


GROUPS_AND_MARKS = {"us": ",.", "de": ".,", "ch": "'.", "fr": "\u202f,", "plain": ("", "."), "comma": ("", ",")}


@pytest.mark.parametrize("country", GROUPS_AND_MARKS)
def test_numbers_of_all_countries_are_read_right_or_refused(tmp_path, country):
    """Numbers of random sizes and decimals, with and without units, in files of random delimiters.

    What is read is right, or its remark names the option that makes it right.
    """
    group, mark = GROUPS_AND_MARKS[country]
    rng = np.random.default_rng(0)
    outcomes = []
    for trial in range(80):
        decimals = rng.choice([0, 1, 2, 3, 3], 6) if trial % 2 else np.full(6, trial // 2 % 4)
        values = [
            round(float(value), int(digits))
            for value, digits in zip(rng.uniform(-1, 1, 6) * 10 ** rng.uniform(0, 7), decimals, strict=True)
        ]
        unit, delimiter = rng.choice(["", "", " kg", " €", " %"]), rng.choice([",", ";", "\t"])
        texts = [f"{value:,.{digits}f}{unit}" for value, digits in zip(values, decimals, strict=True)]
        texts = [text.replace(",", "_").replace(".", mark).replace("_", group) for text in texts]
        lines = [f'"{text}"{delimiter}n{place}' for place, text in enumerate(texts)]
        (tmp_path / "a.csv").write_text("\n".join([f"x{delimiter}name", *lines, ""]))
        try:
            column = read(tmp_path / "a.csv").column("x")
        except InputError as error:
            outcomes.append("refused" if "--decimal" in str(error) else str(error))
            continue
        is_right = column.numbers is not None and np.array_equal(column.numbers, values)
        outcomes.append("right" if is_right else "said" if "say --decimal" in column.note else f"wrong: {texts}")
    assert set(outcomes) <= {"right", "refused", "said"}, outcomes
    assert outcomes.count("right") > 60


@pytest.mark.parametrize("style", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%Y-%m-%d", "%d-%m-%y", "%b %d, %Y", "%d %B %Y"])
def test_dates_of_all_countries_are_read_right_or_refused(tmp_path, style):
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(60):
        days = np.datetime64("2015-01-01") + rng.integers(0, 4000, rng.integers(2, 12))
        texts = [day.item().strftime(style) for day in days]
        (tmp_path / "a.csv").write_text("\n".join(["x;name", *[f"{text};n" for text in texts], ""]))
        try:
            column = read(tmp_path / "a.csv").column("x")
        except InputError as error:
            outcomes.append("refused" if "--date-format" in str(error) else str(error))
            continue
        is_right = column.numbers is not None and np.array_equal(column.numbers, days.astype(int))
        outcomes.append("right" if is_right else f"wrong: {texts}")
    assert set(outcomes) <= {"right", "refused"}, outcomes
    assert outcomes.count("right") > 30 or style == "%d-%m-%y"  # Short years may come first, which few columns exclude.
