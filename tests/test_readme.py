"""The README's first example prints what the README says it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def rounded(text):
    """The text with every number to five decimals: the last digits of float32 differ between machines."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number.group()):.5f}", text).split()


def test_first_example():
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    said = [line[2:] for line in block.group(1).splitlines() if line.startswith("# ")]
    settings = os.environ | {"JAX_ENABLE_X64": "0", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", block.group(1)],
        capture_output=True,
        text=True,
        check=True,
        env=settings,
        encoding="utf-8",
    )
    assert rounded(ran.stdout) == rounded("\n".join(said))
