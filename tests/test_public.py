"""The public names: the lazy table and the stub agree, every name loads, and importing costs nothing."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import bayesrule

HOME = bayesrule._HOME


def test_stub_says_what_the_table_says():
    stub = ast.parse(Path(bayesrule.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1, "the stub re-exports from the package's own modules only"
            for alias in node.names:
                assert alias.asname == alias.name, "`import X as X` is what re-exports from a stub"
                homes[alias.name] = node.module
    assert homes == HOME


def test_no_name_is_listed_twice():
    assert len(HOME) == sum(len(names.split()) for names in bayesrule._MODULES.values())


@pytest.mark.parametrize("name", sorted(HOME))
def test_name_loads(name):
    value = getattr(bayesrule, name)
    assert value is getattr(import_module(f"bayesrule.{HOME[name]}"), name)
    assert getattr(value, "__doc__", None), f"{name} has no docstring"


def test_dir_lists_the_public_names_and_nothing_private():
    assert set(HOME) <= set(dir(bayesrule))
    assert not [name for name in dir(bayesrule) if name.startswith("_") and name != "__version__"]


def test_version_is_the_distribution_s():
    assert bayesrule.__version__ == version("bayesrule")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'adma'"):
        _ = bayesrule.adma


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("jax", "jaxlib", "numpy", "scipy", "matplotlib", "equinox", "optax", "sklearn")
    program = f"import sys, bayesrule; dir(bayesrule); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
