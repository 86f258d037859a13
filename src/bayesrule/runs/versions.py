"""The versions of the software that a run was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """The versions of Python, of this library, and of the libraries that its numbers depend on."""
    by_name = {"python": platform.python_version()}
    for name in ("bayesrule", "jax", "jaxlib", "numpy", "scipy", "scikit-learn"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:  # A source tree that was not installed.
            by_name[name] = "unknown"
    return by_name
