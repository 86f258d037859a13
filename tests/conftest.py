"""Every test runs in float64 on the CPU unless it says otherwise."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_enable_x64", True)

# These make a reference's numbers, and need what made them.
collect_ignore = [
    "reference/make_ivon.py",
    "reference/make_bayespy.py",
    "reference/make_nuts.py",
    "reference/make_dynamax.py",
]


@pytest.fixture(scope="module", autouse=True)
def few_maps():
    """Every compiled program holds memory maps, of which Linux allows 65,530 to a process: let go of them in time."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
