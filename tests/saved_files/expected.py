"""Where the saved files are, and what the tests expect of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PLACE = Path(__file__).parent / "twelve_fields"
EXPECTED = json.loads((PLACE / "expected.json").read_text(encoding="utf-8"))


def assert_near(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Compare two trees of numbers and words, the second of lists; with no tolerance to the last digit."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if isinstance(value, dict):
            assert_near(value, expected[name], tolerance)
        elif np.asarray(value).dtype.kind in "fiu":
            np.testing.assert_allclose(value, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            assert value == expected[name]
