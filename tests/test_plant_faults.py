"""The faults that `plant_faults.py` plants: the same from the same seed, each only where it says, none in mere text."""

import random
import re
from collections import Counter

import pytest

from faults import KINDS, Reader, draw, is_real, shares
from plant_faults import Measured, Round, ranked, verdict

SOURCE = '''"""A docstring with 7 + 8."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    KEPT = 7 + 8

__all__ = ["one", "two"][7:8]
LIMIT = 3


class Piece:
    width: "Float[8 + 1]" = 0.25

    def taken(self, x, y: "7 - 8" = 6, *, scale=True) -> "9 + 9":
        """Another with 7 * 8 and ρ."""
        if x < y and not scale:  # Not this 7 + 7.
            raise ValueError(f"{x + 9} is not {y * 9}" + str(x - 9))
        ρ = (x +  # a comment with - and +
             y)
        ρ -= 2
        warnings.warn(f"{x}", stacklevel=90)
        message = "a text" + name + "!"
        return math.fma(x, ρ, offset=1, unit=x % y) * -y if x == y else -x @ y
'''.encode()
FAULTS = Reader("pieces/piece.py", SOURCE).faults


def test_every_kind_appears():
    assert {fault.kind for fault in FAULTS} == set(KINDS)


def test_each_is_one_change_that_parses():
    assert all(is_real(fault, SOURCE) for fault in FAULTS)
    for fault in FAULTS:
        changed = fault.applied(SOURCE)
        assert changed.startswith(SOURCE[: fault.start])
        assert changed.endswith(SOURCE[fault.end :])
        assert fault.line == SOURCE.count(b"\n", 0, fault.start) + 1
        assert fault.shown(SOURCE).count("`") == 4


def test_there_is_none_in_text_or_annotations():
    """In the source above, such places hold a 7, 8 or 9."""
    assert not [fault for fault in FAULTS if re.search(rb"[789]", SOURCE[fault.start : fault.end])]


def test_an_operator_before_a_comment():
    assert any("ρ = (x -  # a comment with - and +".encode() in fault.applied(SOURCE) for fault in FAULTS)


@pytest.mark.parametrize(
    "changed",
    [
        "LIMIT = 4",
        'width: "Float[8 + 1]" = 0.5',
        "if x <= y and not scale: # Not this 7 + 7.",
        "if x < y or not scale: # Not this 7 + 7.",
        "if (not (x < y and not scale)): # Not this 7 + 7.",
        "if (x < y): # Not this 7 + 7.",
        "ρ += 2",
        "return math.fma(ρ, x, offset=1, unit=x % y) * -y if x == y else -x @ y",
        "return math.fma(x, ρ, offset=x % y, unit=1) * -y if x == y else -x @ y",
        "return math.fma(x, ρ, unit=x % y) * -y if x == y else -x @ y",
        "return math.fma(x, ρ, offset=1) * -y if x == y else -x @ y",
        "return math.fma(x, ρ, offset=1, unit=x % y) * y if x == y else -x @ y",
        "return math.fma(x, ρ, offset=1, unit=x % y) if x == y else -x @ y",
        "return math.fma(x, ρ, offset=1, unit=x % y) * -y if x == y else (y @ (-x))",
    ],
)
def test_what_becomes_of_a_line(changed):
    assert changed in [fault.shown(SOURCE).split("` → `")[1][:-1] for fault in FAULTS]


def test_a_fault_knows_what_it_belongs_to():
    def known(line):
        return {(fault.name, fault.runs, fault.around) for fault in FAULTS if fault.line == line}

    assert known(10) == {("LIMIT", False, None)}
    assert known(14) == {("Piece", False, range(13, 26))}
    assert known(16) == {("Piece", False, range(17, 26))}
    assert known(25) == {("Piece", True, range(17, 26))}


def test_the_same_seed_gives_the_same_faults(tmp_path):
    for folder in ("one", "two", "two/deeper"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "piece.py").write_bytes(SOURCE)
    (tmp_path / "empty.py").write_text("x: int\n")
    drawn = draw(tmp_path, 5, 12)
    assert drawn == draw(tmp_path, 5, 12)
    assert drawn != draw(tmp_path, 6, 12)
    assert len(set(drawn)) == 12
    assert Counter(fault.file.split("/")[0] for fault in drawn) == {"one": 4, "two": 8}


def test_every_folder_has_a_share():
    given = shares({"small": 1, "middle": 300, "large": 700}, 13, random.Random(0))
    assert given == {"small": 1, "middle": 4, "large": 8}
    assert shares(dict.fromkeys("abcdef", 10), 3, random.Random(0)).total() == 3


def test_the_most_specific_tests_come_first(tmp_path):
    fault = next(fault for fault in FAULTS if fault.line == 22)
    entered, beside = 1 << 22 | 1 << 20, 1 << 25
    broad = {"pieces/piece.py": entered, "other.py": (1 << 200) - 1}
    tests = [
        Measured("tests/test_all.py::test_broad", False, 1.0, broad),
        Measured("tests/pieces/test_piece.py::test_narrow", False, 1.0, {"pieces/piece.py": entered}),
        Measured("tests/pieces/test_piece.py::test_long", False, 100.0, {"pieces/piece.py": entered}),
        Measured("tests/pieces/test_other.py::test_beside", False, 1.0, {"pieces/piece.py": beside}),
        Measured("tests/test_far.py::test_far", False, 0.1, {"other.py": 1}),
    ]
    names = [test.name.split("::")[1] for test in ranked(fault, tests, tmp_path, 60)]
    assert names == ["test_narrow", "test_beside", "test_broad"]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ({"first": Round("killed")}, "first"),
        ({"first": Round("survived"), "second": Round("killed")}, "second"),
        ({"first": Round("undecided"), "second": Round("killed")}, "second"),
        ({"first": Round("survived"), "second": Round("undecided", why=" no test")}, "survived"),
        ({"first": Round("survived"), "second": Round("undecided", why=" (out of time)")}, "undecided"),
        ({"first": Round("undecided", why=" no test"), "second": Round("undecided", why="no test")}, "undecided"),
    ],
)
def test_verdict(rounds, said):
    assert verdict(rounds) == said
