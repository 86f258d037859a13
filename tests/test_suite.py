"""The suite itself: every test belongs to one part, and a sample of a grid has every value of every parameter."""

import subprocess
import sys
from collections import Counter

import parts

ROOT = parts.ROOT


def files_of(part):
    for path in map(ROOT.joinpath, parts.paths(part)):
        yield from [path] if path.is_file() else path.rglob("*.py")


def test_every_file_belongs_to_one_part():
    homes = Counter(path for part in parts.PARTS for path in files_of(part))
    assert [path for path, count in homes.items() if count > 1] == []
    tests = {*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "src" / "bayesrule").rglob("*.py")}
    assert tests - homes.keys() == set(), "name the folder or file in tests/parts.py"


GRID = """
import pytest


@pytest.mark.sampled
@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", range(5))
def test_grid(letter, number):
    pass


@pytest.mark.sampled("a")
@pytest.mark.parametrize("letter", "abc")
def test_named(letter):
    pass
"""


def run(tmp_path, text, *arguments):
    """Run pytest on a file of tests beside the suite's own conftest.py."""
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  sampled\n  extended\n")
    (tmp_path / "test_grid.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", *arguments, "test_grid.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_sample_has_every_value_once(tmp_path):
    first = run(tmp_path, GRID, "--collect-only", "-m", "not extended").stdout.split()
    cases = [name.split("[")[1].strip("]") for name in first if "test_grid[" in name]
    assert len(cases) == 5
    assert {value for case in cases for value in case.split("-")} == {*"abc", *"01234"}
    assert [name for name in first if "test_named" in name] == ["test_grid.py::test_named[a]"]
    everything = run(tmp_path, GRID, "--collect-only").stdout.split()
    assert len([name for name in everything if "::" in name]) == 18


def test_a_sample_of_a_case_that_is_gone_fails(tmp_path):
    ran = run(tmp_path, GRID.replace('sampled("a")', 'sampled("d")'), "-m", "not extended").stdout
    assert "5 passed, 10 deselected, 3 errors" in ran
    assert "the mark `sampled` of test_named names cases that are not there" in ran


def test_the_workflow_runs_every_part():
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert f"part: [{', '.join([*parts.PARTS, parts.AS_USERS])}]" in workflow


def test_contributors_are_told_every_part_and_its_folders():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for part, names in parts.PARTS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{part}` |"))
        assert [name.strip("`/") for name in row.split("|")[2].replace(",", " ").split()] == names.split()
    assert f"| `{parts.AS_USERS}` |" in page
