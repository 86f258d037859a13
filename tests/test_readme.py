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


BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
BETWEEN = "=== the next block ==="


def test_the_first_screen_has_both_commands_and_every_block_prints():
    first_screen = README.read_text(encoding="utf-8").splitlines()[:30]
    assert [line.split()[1] for line in first_screen if line.startswith("make ")] == ["demo", "test"]
    assert len(BLOCKS) == 5
    assert all(re.search(r"^print\(.*\n# ", block, re.MULTILINE) for block in BLOCKS)


def test_every_block_runs_in_the_order_of_the_page_and_prints_what_the_page_says():
    missing = [name for name in ("numpyro",) if importlib.util.find_spec(name) is None]
    if missing:  # All blocks run in a process of their own, as a reader would type them.
        pytest.skip(f"needs {missing[0]}")
    settings = os.environ | {"JAX_ENABLE_X64": "0", "PYTHONIOENCODING": "utf-8"}
    page = f"print({BETWEEN!r})\n".join(BLOCKS)
    ran = subprocess.run(
        [sys.executable, "-c", page], capture_output=True, text=True, check=False, env=settings, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stderr
    for block, printed in zip(BLOCKS, ran.stdout.split(BETWEEN), strict=True):
        expected = [line[2:] for line in block.splitlines() if line.startswith("# ")]
        assert rounded(printed) == rounded("\n".join(expected))
