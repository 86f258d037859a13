"""The public names: the lazy table and the stub agree, every name loads and has an example, and importing is cheap."""

import ast
import subprocess
import sys
from functools import cache
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


def test_every_name_loads_and_has_a_docstring():
    values = {name: getattr(bayesrule, name) for name in HOME}
    elsewhere = lambda name: getattr(import_module(f"bayesrule.{HOME[name]}"), name)
    assert [name for name, value in values.items() if value is not elsewhere(name)] == []
    assert [name for name, value in values.items() if not getattr(value, "__doc__", None)] == []


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


# The modules whose names are public, besides the package itself: what each lists in `__all__`.
PUBLIC_MODULES = (
    "estimators",
    "factors",
    "interop.dask",
    "interop.equinox",
    "interop.flax",
    "interop.network",
    "interop.numpyro",
    "interop.optax",
    "interop.torch",
    "metrics",
    "models",
    "models.factor_analysis",
    "models.gp",
    "models.hmm",
    "models.kalman",
    "models.kernels",
    "models.landscapes",
    "models.linear_gaussian",
    "models.mixture",
    "models.sequences",
    "models.sparse_gp",
    "models.topics",
)

# Names that the example of another one shows: mostly what that one returns.
SHOWN_BY = {
    "ChosenPrior": "choose_prior",
    "ChosenWidth": "choose_width",
    "LeaveOneOut": "leave_one_out",
    "Minimum": "multimodal",
    "PointMass": "Peak",
    "Posterior": "infer",
    "interop.network.Network": "interop.equinox.from_equinox",
    "interop.numpyro.NumpyroPosterior": "interop.numpyro.fit",
    "interop.optax.RuleState": "interop.optax.transformation",
    "models.hmm.Hidden": "models.hmm.hidden",
    "models.kalman.Forecast": "models.kalman.forecast",
    "models.linear_gaussian.state_space": "models.linear_gaussian.linear_gaussian",
    "models.mixture.responsibilities": "models.mixture.gaussian_mixture",
    "models.topics.shares": "models.topics.latent_dirichlet",
}
# Names without an example, and why.
NO_EXAMPLE = {
    "Run": "it is what a directory of `bayesrule fit` holds, and to make one takes longer than an example may",
    "join_processes": "it does something only where several processes are started together",
    "keep_programs": "it changes JAX's settings for the whole process, here that of the tests",
    "interop.numpyro.Call": "`fit` makes it of the model by itself",
    "interop.numpyro.LogJoint": "`fit` makes it of the model by itself",
    "interop.numpyro.PriorDraw": "`fit` makes it of the model by itself",
    "interop.numpyro.Traced": "`fit` makes it of the model by itself",
    "interop.numpyro.Values": "`fit` makes it of the model by itself",
    "interop.numpyro.LeaveOneOut": "`posterior.loo()` returns it, after the draws of a whole fit",
    "interop.numpyro.Model": "it is the type of a function, which users write without it",
    "interop.numpyro.load": "it takes a file of a whole fit",
}


def file_of(module):
    """The source of a module of this package."""
    folder = Path(bayesrule.__file__).parent.joinpath(*filter(None, module.split(".")))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(module, name):
    """Where a module's name is defined: the module, and the class, function or assignment in its source.

    Nothing is imported, because PyTorch and others take more memory than the workers of the suite have to spare.
    """
    for node in reversed(parsed(file_of(module)).body):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = module.split(".") if file_of(module).name == "__init__.py" else module.split(".")[:-1]
            home = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(home, alias.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)):
            return module, node
    raise AssertionError(f"{module} does not define {name}")


def listed(module):
    """What a module lists in `__all__`."""
    if module == "estimators":  # Its list is computed.
        return sorted(import_module("bayesrule.estimators").EXPORTS)
    return ast.literal_eval(definition(module, "__all__")[1].value)


def definition_of(public_name):
    """`definition` of a name as users import it: "fit", "models.kernels.RBF"."""
    module, _, name = public_name.rpartition(".")
    if module == "estimators":
        module = f"estimators.{import_module('bayesrule.estimators').EXPORTS[name]}"
    return definition(module or HOME[name], name)


def all_public_names():
    return {*HOME, *(f"{module}.{name}" for module in PUBLIC_MODULES for name in listed(module))}


def public_definitions():
    """The full names of what is public, where it is defined."""
    return sorted({f"{definition_of(name)[0]}.{name.rpartition('.')[2]}" for name in all_public_names()})


def has_example(name):
    """Whether the docstring of a public name, or of a class's constructor, has a doctest."""
    node = definition_of(name)[1]
    if not isinstance(node, ast.ClassDef | ast.FunctionDef):
        return False
    inner = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return any(">>> " in (ast.get_docstring(part) or "") for part in (node, *inner))


@pytest.fixture(scope="module")
def public_names():
    return all_public_names()


def test_every_name_has_an_example(public_names):
    without = {name for name in public_names if not has_example(name)}
    assert without - SHOWN_BY.keys() - NO_EXAMPLE.keys() == set(), "add a doctest, or say above why there is none"
    assert (SHOWN_BY.keys() | NO_EXAMPLE.keys()) - without == set(), "these have an example, or are not public"


def test_examples_elsewhere_exist(public_names):
    assert set(SHOWN_BY.values()) <= public_names
    assert [name for name in SHOWN_BY.values() if not has_example(name)] == []
    assert not SHOWN_BY.keys() & NO_EXAMPLE.keys()
