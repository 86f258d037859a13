"""The parts of the whole suite, each of which runs alone in at most twenty minutes on two cores.

    python tests/parts.py             # the names of the parts
    python tests/parts.py fitting     # the files and folders of one of them

`make test-all` runs all of them, the tests of `make test` included, and `make test-all PART=fitting` one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A name is a folder or file of src/bayesrule with its doctests, and the tests that mirror it; what has no such name, or
# is a part of its own within such a folder, is written out, beginning with tests/.
PARTS = {
    "rule": """numerics steps families objectives points curvature rule recipes factor_graph factors.py
        tests/test_architecture.py tests/test_errata.py tests/test_jax_canaries.py tests/test_public.py
        tests/test_suite.py tests/test_plant_faults.py""",
    "fitting": "fitting streams metrics.py tests/saved_files tests/test_trust.py",
    "interop": "interop",
    "estimators": "estimators",
    "scikit_learn": "tests/estimators/test_scikit_learn_checks.py",
    "models": "models tests/reference",
    "application": "tables runs report cli gallery reference_checks launch.py __main__.py __init__.py",
    "inference": "inference",
    "docs": "tests/test_docs.py tests/test_readme.py",
}
AS_USERS = "as_users"  # what runs a second time, compiled as XLA does by default


def paths(part: str) -> list[str]:
    """The files and folders of a part, relative to the root of the project."""
    if part == AS_USERS:
        marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.as_users" in path.read_text("utf-8")]
        return [str(path.relative_to(ROOT)) for path in sorted(marked)]
    found = []
    for name in PARTS[part].split():
        stem = name.removesuffix(".py")
        places = (
            [name] if name.startswith("tests/") else [f"src/bayesrule/{name}", f"tests/{stem}", f"tests/test_{stem}.py"]
        )
        found += [place for place in places if (ROOT / place).exists()]
    return [path for place in found for path in _without_other_parts(place, part)]


def _without_other_parts(place: str, part: str) -> list[str]:
    """A folder, or what lies in it where a file of it belongs to another part."""
    others = {name for other, names in PARTS.items() if other != part for name in names.split()}
    if not any(name.startswith(f"{place}/") for name in others):
        return [place]
    files = (str(path.relative_to(ROOT)) for path in sorted((ROOT / place).glob("test_*.py")))
    return [file for file in files if file not in others]


if __name__ == "__main__":
    print(*(paths(sys.argv[1]) if len(sys.argv) > 1 else [*PARTS, AS_USERS]))
