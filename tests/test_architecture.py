"""Imports point one way: what the layout promises, read off the source with `ast`.

A top folder is a folder or module directly under `bayesrule`. Imports made only for annotations (under
`if TYPE_CHECKING`) do not count; imports inside functions do.
"""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bayesrule

SOURCE = Path(bayesrule.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the lowest up: a folder imports from its own layer or from lower ones.
LAYERS = (
    {"numerics"},
    {"steps"},
    {"families"},
    {"objectives", "points", "streams"},
    {"curvature"},
    {"factor_graph", "factors"},
    {"rule"},
    {"recipes", "fitting", "metrics"},
    {"models", "tables", "inference"},
    {"estimators", "interop"},
    {"runs"},
    {"report"},
    {"gallery"},
    {"reference_checks"},
    {"cli", "__main__", "launch"},
)
LAYER = {folder: height for height, folders in enumerate(LAYERS) for folder in folders}
# What every family must offer, as opposed to any family in particular.
ABSTRACT_FAMILIES = {"families.base", "families.start", "families.gaussian.base", "families.gaussian.precision"}
# Where the rule meets particular families: the recipes, and what is built on them.
MEETING = {folder for folder, height in LAYER.items() if height >= LAYER["recipes"]}


def name_of(path):
    """`families.base` for families/base.py, `families` for families/__init__.py, '' for the root."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def import_nodes(tree):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_type_checking(node):
            for other in node.orelse:
                yield from import_nodes(ast.Module([other], []))
        else:
            yield from import_nodes(node)


def resolved(base, name):
    """The module that `from base import name` reaches: a submodule, a lazily loaded name's home, or base."""
    inner = f"{base}.{name}" if base else name
    if inner in MODULES:
        return inner
    return base or bayesrule._HOME.get(name, "")


def imports(path):
    """The modules of this package that a file imports, relative to `bayesrule` ('' is the package itself)."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    actual = set()
    for node in import_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                if root == "bayesrule":
                    actual.add(rest)
            continue
        if node.level:
            parts = package.split(".") if package else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
        elif (node.module or "").split(".")[0] == "bayesrule":
            base = node.module.partition(".")[2]
        else:
            continue
        actual |= {resolved(base, alias.name) for alias in node.names}
    return actual


@pytest.fixture(scope="module")
def graph():
    """What each module imports; read when a test needs it and not by every worker that collects the tests."""
    return {name: imports(path) for name, path in MODULES.items() if name}


def top_folder(module):
    return module.split(".")[0]


def test_imports_point_down(graph):
    assert {module for module, imported in graph.items() if "" in imported} == set(), "import the module that is needed"
    unknown = {top_folder(name) for module, imported in graph.items() for name in (module, *imported)} - LAYER.keys()
    assert unknown == set(), "give each new folder a layer in this test"
    upwards = {
        f"{module} imports {other}, which is built on it"
        for module, imported in graph.items()
        for other in imported
        if LAYER[top_folder(other)] > LAYER[top_folder(module)]
    }
    assert upwards == set()


def test_no_import_cycles(graph):
    # A package's __init__ re-exports its own files; those import each other by file, not through it.
    others = {m: {o for o in others if o != m} for m, others in graph.items()}
    try:
        TopologicalSorter(others).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


def test_rule_imports_no_particular_family(graph):
    used = {other for other in graph["rule.rule"] if top_folder(other) == "families"}
    assert used <= ABSTRACT_FAMILIES


def test_families_import_only_lower_layers_and_each_other(graph):
    used = {top_folder(other) for module in graph if top_folder(module) == "families" for other in graph[module]}
    assert used <= {"numerics", "steps", "families"}


def test_rule_and_particular_families_meet_in_recipes_only(graph):
    for module, others in graph.items():
        particular = {o for o in others if top_folder(o) == "families"} - ABSTRACT_FAMILIES
        if particular and "rule.rule" in others:
            assert top_folder(module) in MEETING, f"{module} joins the rule to {particular}: that is for a recipe."


def test_nothing_imports_the_command_line(graph):
    users = {
        m
        for m, others in graph.items()
        if top_folder(m) not in ("cli", "__main__") and "cli" in map(top_folder, others)
    }
    assert not users


def test_a_file_is_one_idea():
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert [path for path in FILES if path.stem in vague] == [], "name the file after its idea"
    documented = lambda path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert [path for path in FILES if not documented(path)] == [], "a file says its idea in its first line"


def silenced_checks():
    """Every comment that silences a check (of pyright, mypy or ruff), as its place, itself, and what is beside it."""
    root = SOURCE.parent.parent
    silencer = re.compile(r"#\s*(type:\s*ignore|pyright:\s*\w+|noqa)(\[[^\]]*\]|:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?(.*)$")
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*.py*")):
            if path.suffix not in (".py", ".pyi"):
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                found = silencer.search(line) if "#" in line and "re.compile" not in line else None
                if found:
                    above = lines[number - 2].strip()
                    comment = found[4].strip(" #()-") or (above.lstrip("# ") if above.startswith("#") else "")
                    yield f"{path.relative_to(root)}:{number}", found, comment


def test_a_silenced_check_says_which_and_why():
    """A reason is beside it, or in a comment above."""
    checks = list(silenced_checks())
    assert len(checks) > 20, "the pattern finds nothing"
    assert [place for place, found, _ in checks if not found[2]] == [], "name the rule that is silenced"
    assert [place for place, _, reason in checks if not reason] == [], "say why it is silenced"
