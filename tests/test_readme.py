"""The README's examples print what the README says they print."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def rounded(text):
    """The text with every number to five decimals: the last digits of float32 differ between machines."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number.group()):.5f}", text).split()


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
PRINTED = [block for block in BLOCKS if re.search(r"^print\(", block, re.MULTILINE)]


def test_the_examples_with_output_are_found():
    assert BLOCKS[0] in PRINTED
    assert len(PRINTED) == 3


@pytest.mark.parametrize("block", PRINTED, ids=["first example", "difference", "probabilistic program"])
def test_examples_print_what_the_readme_says(block):
    expected = [line[2:] for line in block.splitlines() if line.startswith("# ")]
    settings = os.environ | {"JAX_ENABLE_X64": "0", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, check=True, env=settings, encoding="utf-8"
    )
    assert rounded(ran.stdout) == rounded("\n".join(expected))


PAGES = [
    ("training", None),
    ("faults", None),
    ("deep_learning", None),
    ("loops", None),
    ("modules", "flax"),
    ("probabilistic_programs", "numpyro"),
    ("pytorch", "torch"),
    ("larger_than_memory", "torch"),
]


@pytest.mark.parametrize(("name", "extra"), PAGES)
def test_the_snippets_of_a_page_run(name, extra):
    if extra is not None and importlib.util.find_spec(extra) is None:  # The page runs in a process of its own.
        pytest.skip(f"needs {extra}")
    page = README.parent / "docs" / f"{name}.md"
    code = f"import doctest, sys; sys.exit(doctest.testfile({str(page)!r}, module_relative=False, encoding='utf-8')[0])"
    settings = os.environ | {"JAX_ENABLE_X64": "0", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=settings, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stdout
