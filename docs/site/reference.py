"""The reference: a page for each group of public names, from the lists that the library itself exports.

Nothing is listed here by name: the groups are the folders of the lazy table in `bayesrule/__init__.py`, and the public
modules. A folder that no group takes ends the build.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

import bayesrule

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SECTION = "Reference"
# Of each page: its file, its title, a sentence, and the folders of the lazy table that it takes.
GROUPS = (
    ("rule", "The rule", "The update and its parts, taken apart and compared.", ("rule",)),
    ("recipes", "Recipes", "The algorithms of Table 1 and their relatives, each a choice of pieces.", ("recipes",)),
    ("families", "Families", "Which q? The candidate distributions.", ("families",)),
    ("points", "Points", "Where is the loss evaluated, to stand for its expectation under q?", ("points",)),
    ("curvature", "Curvature", "What is measured at the points?", ("curvature",)),
    ("steps", "Steps and guards", "How far, and how does λ stay in Ω?", ("steps",)),
    (
        "objectives",
        "Objectives and data",
        "What is minimised, and where its rows come from.",
        ("objectives", "streams", "numerics"),
    ),
    ("blocks", "Models of several unknowns", "Blocks, factors and their messages.", ("factor_graph",)),
    ("fitting", "Fitting", "The loop, its result, prediction, checkpoints and several devices.", ("fitting", "runs")),
    ("inference", "Inference", "A posterior of any log density, and a verdict on it.", ("inference",)),
)


def _folder(module: str) -> str:
    return module.partition(".")[0]


def names_of_groups() -> dict[str, list[tuple[str, Any]]]:
    """The public names of `bayesrule` for each group, in the order of the lazy table."""
    group_of = {folder: group for group, _, _, folders in GROUPS for folder in folders}
    names: dict[str, list[tuple[str, Any]]] = {group: [] for group, *_ in GROUPS}
    for module, listed in bayesrule._MODULES.items():
        if _folder(module) not in group_of:
            raise ValueError(f"No page of the reference takes bayesrule.{module}: add its folder to GROUPS.")
        names[group_of[_folder(module)]] += [(name, getattr(bayesrule, name)) for name in listed.split()]
    return names


def _exported(module: ModuleType) -> list[tuple[str, Any]]:
    """The public names of a module: `__all__`, or else the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return [(name, getattr(module, name)) for name in module.__all__]
    return [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value) or type(value).__module__.startswith("jax"))
        and getattr(value, "__module__", None) == module.__name__
    ]


def _public_models() -> list[str]:
    """The modules that the docstring of `bayesrule.models` says are public."""
    models = import_module("bayesrule.models")
    listed = re.findall(r"(?m)^\| (`.*?) \|", models.__doc__ or "")
    return [name for row in listed for name in re.findall(r"`(\w+)`", row)]


def _interop() -> list[str]:
    """The bridges to other libraries that are documented under their own names."""
    package = import_module("bayesrule.interop")
    own = {"network", "shared_parameters", "torch_memory"}  # what the bridges share
    return [found.name for found in iter_modules(package.__path__) if found.name not in own]


def _entry(name: str, value: Any, path: str, module: str) -> str:
    """A heading with the documentation of one name; `path` is how users write it, `module` where it was found."""
    own = getattr(value, "__name__", name)
    if own != name and own in bayesrule.__all__:
        return f"[](){{#{path}.{name}}}\n\n### {name}\n\nAnother name of [`{own}`][{path}.{own}].\n"
    home = getattr(value, "__module__", None)
    qualified = f"{home}.{getattr(value, '__qualname__', name)}" if str(home).startswith("bayesrule") else ""
    if not (inspect.isclass(value) or callable(value)) or not qualified:
        qualified = f"{module}.{name}"
    anchor = f"[](){{#{path}.{name}}}\n\n" if f"{path}.{name}" != qualified else ""
    return f"{anchor}::: {qualified}\n    options:\n      heading: {name}\n      toc_label: {name}\n"


def _module_section(name: str, path: str, *, level: int = 2) -> str:
    module = import_module(path)
    title = f"{'#' * level} {path.removeprefix('bayesrule.')}\n\n"
    text = inspect.getdoc(module) or ""
    names = [_entry(each, value, path, path) for each, value in _exported(module)]
    return f"{title}`import {path}`\n\n{text}\n\n" + "\n".join(names)


def pages() -> dict[str, tuple[str, str]]:
    """The title and the Markdown of every page of the reference, by its file's name."""
    made, names = {}, names_of_groups()
    for group, title, sentence, _ in GROUPS:
        listed = "\n".join(_entry(name, value, "bayesrule", "bayesrule") for name, value in names[group])
        made[group] = (title, f"# {title}\n\n{sentence}\n\n{listed}")
    for name, title in (("estimators", "Estimators"), ("factors", "Factors"), ("metrics", "Metrics")):
        module = import_module(f"bayesrule.{name}")
        listed = "\n".join(_entry(each, value, module.__name__, module.__name__) for each, value in _exported(module))
        made[name] = (title, f"# {title}\n\n{inspect.getdoc(module)}\n\n{listed}")
    models = import_module("bayesrule.models")
    own = "\n".join(_entry(each, value, models.__name__, models.__name__) for each, value in _exported(models))
    sections = "\n\n".join(_module_section(name, f"bayesrule.models.{name}") for name in _public_models())
    made["models"] = ("Models", f"# Models\n\n{inspect.getdoc(models)}\n\n## bayesrule.models\n\n{own}\n\n{sections}")
    bridges = "\n\n".join(_module_section(name, f"bayesrule.interop.{name}") for name in _interop())
    made["interop"] = ("Other libraries", f"# Other libraries\n\n{bridges}")
    return made


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages first in the reference's section of the navigation."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and SECTION in entry:
            made = [{title: f"reference/{name}.md"} for name, (title, _) in pages().items()]
            entry[SECTION] = [*made, *entry[SECTION]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    from mkdocs.structure.files import File  # Here, since the tests read the list of pages without mkdocs.

    for name, (_, text) in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files
