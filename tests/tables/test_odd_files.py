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
