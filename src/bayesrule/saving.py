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

_FORMAT = 1
_PROGRAMS = ("__main__", "cli", "report", "runs")


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
    if form != _FORMAT:
        raise ValueError(
            f"{path} has format {form}, and this version reads format {_FORMAT}: load it with the version that "
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
        return {"module": [type(value).__module__, type(value).__qualname__], "fields": fields}
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
    module, name = described["module"]
    rooms = module.split(".")
    try:
        # The library's own types, and not its programs: importing one of those would run it.
        ours = rooms[0] == "bayesrule" and len(rooms) > 1 and rooms[1] not in _PROGRAMS
        kind = getattr(importlib.import_module(module), name, None) if ours else None
    except ModuleNotFoundError:
        kind = None
    if not (isinstance(kind, type) and issubclass(kind, eqx.Module)):
        raise ValueError(f"The file names {module}.{name}, which is not one of the library's own types.")
    made = object.__new__(kind)
    for field, value in described["fields"]:
        object.__setattr__(made, field, _decoded(value, arrays, like))
    return made
