"""One file for a result: arrays and a JSON description of how they fit together; no code, no pickle."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

_FORMAT = 2
_READABLE = (1, 2)

# A file names classes by their public names, never by the modules they live in, so that moving a module breaks no
# file. These are the names besides those of `bayesrule` itself, and where their classes are today.
_KERNELS = "models.kernels"
_OTHERS = {
    "SearchRecord": ("rule.multistart", "SearchRecord"),
    "KroneckerFactors": ("families.gaussian.kronecker", "KroneckerFactors"),
    "Factored": ("families.gaussian.precision", "Factored"),
    **{
        f"kernels.{name}": (_KERNELS, name)
        for name in ["Sum", "Times", "Constant", "Linear", "RBF", "Periodic", "Matern12", "Matern32", "Matern52"]
    },
}
# Classes, and fields of classes, whose names have changed since a file was written: old name to new name. Entries are
# added here and never removed.
_RENAMED_CLASSES = {"Found": "SearchRecord"}
_RENAMED_FIELDS = {
    "State": {"found": "search"},
    "SearchRecord": {"spread": "loss_scale"},
    "GaussianProcess": {"spread": "variance", "kept": "auxiliary"},
    "GaussianChain": {"spread": "variance", "kept": "auxiliary"},
}


def write(path: str | Path, value: Any) -> None:
    """Write a tree of plain containers, arrays and the library's own modules, atomically."""
    arrays: dict[str, np.ndarray] = {}
    described = _encoded(value, arrays)
    header = json.dumps({"format": _FORMAT, "value": described})
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, header=np.array(header), **arrays)
        Path(temporary).chmod(0o666 & ~_umask())  # a temporary file is its owner's alone
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | Path, like: PyTree = None) -> Any:
    """Read what `write` wrote."""
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        form, value = header["format"], header["value"]
    except FileNotFoundError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path) from error
    if form not in _READABLE:
        raise ValueError(
            f"{path} has format {form}, and this version reads formats up to {_FORMAT}: load it with the version that "
            "wrote it."
        )
    try:
        return _decoded(value, arrays, like)
    except (LookupError, TypeError) as error:
        raise _unreadable(path) from error


def _unreadable(path: str | Path) -> ValueError:
    return ValueError(f"{path} is not a file that Result.save wrote, or it is damaged.")


def _encoded(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _encoded_array(value, arrays)
    if isinstance(value, dict) and type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _encoded(item, arrays)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, arrays) for item in value]}
    if isinstance(value, eqx.Module) and type(value).__module__.startswith("bayesrule."):
        fields = [[f.name, _encoded(getattr(value, f.name), arrays)] for f in dataclasses.fields(value)]
        return {"class": _public_name(type(value)), "fields": fields}
    leaves = jax.tree.leaves(value)
    if jax.tree_util.all_leaves([value]):
        raise ValueError(f"A {type(value).__name__} cannot be saved: parameters must be arrays in containers.")
    # Somebody else's container: its leaves are kept, its structure has to be brought along to `load`.
    return {"foreign": [_encoded(leaf, arrays) for leaf in leaves]}


def _encoded_array(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    name = f"array{len(arrays)}"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        arrays[name] = np.asarray(jax.random.key_data(value))
        return {"key": name, "implementation": str(jax.random.key_impl(value))}
    if isinstance(value, jax.Array) and value.dtype == jnp.bfloat16:  # NumPy's format does not know it
        arrays[name] = np.asarray(value.view(jnp.uint16))
        return {"bfloat16": name}
    arrays[name] = np.asarray(value)
    return {"array": name, "device": isinstance(value, jax.Array)}


def _decoded(described: Any, arrays: dict[str, np.ndarray], like: PyTree) -> Any:
    if "plain" in described:
        return described["plain"]
    if "array" in described:
        array = arrays[described["array"]]
        return jnp.asarray(array) if described["device"] else array
    if "bfloat16" in described:
        return jnp.asarray(arrays[described["bfloat16"]]).view(jnp.bfloat16)
    if "key" in described:
        return jax.random.wrap_key_data(jnp.asarray(arrays[described["key"]]), impl=described["implementation"])
    if "dict" in described:
        return {key: _decoded(item, arrays, like) for key, item in described["dict"]}
    if "list" in described:
        return [_decoded(item, arrays, like) for item in described["list"]]
    if "tuple" in described:
        return tuple(_decoded(item, arrays, like) for item in described["tuple"])
    if "foreign" in described:
        leaves = [_decoded(leaf, arrays, like) for leaf in described["foreign"]]
        if like is None or jax.tree.structure(like).num_leaves != len(leaves):
            raise ValueError(
                "The saved parameters are in a container that is not a dict, list or tuple: pass like=, any value of "
                "the same structure (freshly initialised parameters, say)."
            )
        return jax.tree.unflatten(jax.tree.structure(like), leaves)
    return _module(described, arrays, like)


def _module(described: Any, arrays: dict[str, np.ndarray], like: PyTree) -> eqx.Module:
    name = described["class"] if "class" in described else _name_in_format_1(*described["module"])
    name = _RENAMED_CLASSES.get(name, name)
    kind = _class_named(name)
    if kind is None:
        raise ValueError(f"The file names {name!r}, which is not one of the library's own types.")
    renamed: dict[str, str] = _RENAMED_FIELDS.get(name, {})
    made = object.__new__(kind)
    for field, value in described["fields"]:
        object.__setattr__(made, str(renamed.get(field, field)), _decoded(value, arrays, like))
    return made


def _name_in_format_1(module: str, name: str) -> str:
    """The public name of a class that format 1 named by its module."""
    return f"kernels.{name}" if module == f"bayesrule.{_KERNELS}" else name


def _class_named(name: str) -> type[eqx.Module] | None:
    """The class of this public name, or None: a file can name the library's data types, and nothing else."""
    if name in _OTHERS:
        module, attribute = _OTHERS[name]
        return getattr(importlib.import_module(f"bayesrule.{module}"), attribute)
    public = importlib.import_module("bayesrule")
    kind = getattr(public, name) if name in public.__all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, eqx.Module) else None


def _public_name(kind: type[eqx.Module]) -> str:
    """The name under which a file refers to this class."""
    if _class_named(kind.__name__) is kind:
        return kind.__name__
    for name in _OTHERS:
        if _class_named(name) is kind:
            return name
    raise ValueError(f"A {kind.__name__} has no public name, so that no file can refer to it: save its arrays instead.")
