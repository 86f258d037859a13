"""Which versions of what a run was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of this library, of Python, and of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("bayesrule", "jax", "jaxlib", "numpy", "scipy", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout
            found[name] = "unknown"
    return found
