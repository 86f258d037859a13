"""One file for a result: its arrays, and a JSON description of the tree they belong to; no code, no pickle.

A file is a NumPy archive whose entry "header" holds the description. It names classes by their public names and never
by the modules they are in, so that moving a module breaks no file. Reading builds the library's own data types and
nothing else, and runs no code that a file brings along.

Since format 3 a file ends with the SHA-256 of all its other bytes, in the comment of the archive, so that a file in
which a single bit is wrong, or whose end is missing, is never taken for a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import importlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.pytree import PyTree

_FORMAT = 3
_READABLE = (1, 2, 3)
_FIRST_WITH_DIGEST = 3
_DIGEST_MARK = b"bayesrule sha256 "  # In the comment of the archive, before the digest.
_DIGEST_LENGTH = 64  # The digits of a SHA-256 in hexadecimal notation.
_BLOCK = 2**22  # So many bytes are read at a time.
_UNFINISHED = ".unfinished"  # How the name of a file ends while it is written.

# The names that a file may use besides the public names of `bayesrule`, and where their classes are today.
_KERNELS = "models.kernels"
_OTHERS = {
    "SearchRecord": ("rule.multistart", "SearchRecord"),
    "History": ("steps.acceleration", "History"),
    "KroneckerFactors": ("families.gaussian.kronecker", "KroneckerFactors"),
    "Factored": ("families.gaussian.precision", "Factored"),
    "TiedNormalWishart": ("families.shared_precision", "TiedNormalWishart"),
    "SphericalNormalGamma": ("families.shared_precision", "SphericalNormalGamma"),
    **{
        f"kernels.{name}": (_KERNELS, name)
        for name in ["Sum", "Times", "Constant", "Linear", "RBF", "Periodic", "Matern12", "Matern32", "Matern52"]
    },
}
# Classes and fields that were renamed: old name to new name. Entries are added and never removed, because a file may be
# of any age.
_RENAMED_CLASSES = {"Found": "SearchRecord"}
_RENAMED_FIELDS = {
    "State": {"found": "search"},
    "SearchRecord": {"spread": "loss_scale"},
    "GaussianProcess": {"spread": "variance", "kept": "auxiliary"},
    "GaussianChain": {"spread": "variance", "kept": "auxiliary"},
    "SpikeSlab": {"first": "initial_keep"},
}


class Damaged(ValueError):
    """A file that is not as it was written: cut short, changed, or of another kind."""


def write(path: str | Path, value: Any, before_replacing: Callable[[], None] | None = None) -> None:
    """Write a tree to a file, atomically: whenever the process is killed, the file is the old one or the new one.

    The file and the entry in its folder are on the disk when the function returns, so that this holds for a power cut,
    too.

    Args:
        path: the file.
        value: a tree of dicts, lists, tuples, numbers, strings, arrays and the library's own modules. Of other
            containers only the leaves are kept; their structure has to be passed to `read`.
        before_replacing: called when the new file is complete, under another name, and before it takes the place of the
            old one.
    """
    arrays: dict[str, np.ndarray] = {}
    header = json.dumps({"format": _FORMAT, "value": _encode(value, arrays)})
    path = Path(path)
    with naming_the_file(path):
        _write_and_replace(path, {"header": np.array(header), **arrays}, before_replacing)


@contextlib.contextmanager
def naming_the_file(path: Path) -> Generator[None]:
    """A context in which an `OSError` names this file: the system's own has no name, or that of a temporary file."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _write_and_replace(path: Path, arrays: dict[str, np.ndarray], before_replacing: Callable[[], None] | None) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
    try:
        with os.fdopen(handle, "r+b") as file:
            _write_archive(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        if before_replacing is not None:
            before_replacing()
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def kept_file(path: Path, place: int) -> Path:
    """The file of the checkpoint that is so many places before the newest, which is at the path itself."""
    return path if place == 0 else path.with_name(f"{path.name}.{place}")


def check_writable(path: Path) -> None:
    """Raise the `OSError` that would keep `write` from writing this file; files that a killed `write` left are removed.

    Args:
        path: the file.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is not a directory")
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{_UNFINISHED}"):
        leftover.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_UNFINISHED)
    os.close(handle)
    Path(temporary).unlink()


def check_savable(value: Any) -> None:
    """Raise the `ValueError` that would keep `write` from describing this tree; its numbers are not looked at."""
    _encode(jax.tree.map(lambda leaf: np.zeros(()) if isinstance(leaf, jax.Array) else leaf, value), {})


def sync_folder(folder: Path) -> None:
    """Bring the entries of a folder, such as the new name of a file, to the disk, where the system has a way to."""
    with contextlib.suppress(OSError):  # Windows opens no folders, and some network file systems do not sync them.
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _Digesting:
    """A stream that hands bytes on to a file, and computes the digest of all but the last `_DIGEST_LENGTH` of them.

    It cannot seek, so that `zipfile` writes every byte once, in its order.
    """

    def __init__(self, file: IO[bytes]):
        self.file, self.digest, self.tail = file, hashlib.sha256(), b""

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            self.file.write(view)
            size = len(view)
            if size >= _DIGEST_LENGTH:
                self.digest.update(self.tail)
                self.digest.update(view[: size - _DIGEST_LENGTH])
                self.tail = bytes(view[size - _DIGEST_LENGTH :])
            else:
                joined = self.tail + bytes(view)
                cut = max(0, len(joined) - _DIGEST_LENGTH)
                self.digest.update(joined[:cut])
                self.tail = joined[cut:]
        return size

    def flush(self) -> None:
        self.file.flush()


def _write_archive(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Write a NumPy archive that `np.load` reads, with its own digest at its end."""
    stream = _Digesting(file)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]  # It needs only write and flush.
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
        archive.comment = _DIGEST_MARK + b"0" * _DIGEST_LENGTH
    file.seek(-_DIGEST_LENGTH, os.SEEK_END)
    file.write(stream.digest.hexdigest().encode())


def _check_digest(file: IO[bytes]) -> bool:
    """Whether a file has a digest at its end; raises `Damaged` if it is not that of the file."""
    end = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
    if end < len(_DIGEST_MARK):
        return False
    file.seek(end - len(_DIGEST_MARK))
    if file.read(len(_DIGEST_MARK)) != _DIGEST_MARK:
        return False
    expected, digest = file.read(), hashlib.sha256()
    file.seek(0)
    while end > 0:
        block = file.read(min(_BLOCK, end))
        if not block:
            break
        digest.update(block)
        end -= len(block)
    if digest.hexdigest().encode() != expected:
        raise Damaged("its checksum does not match its content")
    file.seek(0)
    return True


def _umask() -> int:
    """The process's mask of file permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read(path: str | Path, like: PyTree = None) -> Any:
    """Read what `write` wrote.

    Args:
        path: the file.
        like: any value of the saved structure, where it has containers other than dicts, lists and tuples.
    """
    try:
        with Path(path).open("rb") as opened:
            has_digest = _check_digest(opened)
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        file_format, description = header["format"], header["value"]
        if file_format in _READABLE and file_format >= _FIRST_WITH_DIGEST and not has_digest:
            raise Damaged("its checksum is missing")
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error
    except (NotImplementedError, RuntimeError) as error:  # Flags that say how an entry is compressed or encrypted.
        raise _unreadable(path, error) from error
    if file_format not in _READABLE:
        raise ValueError(
            f"{path} has format {file_format}, and this version reads formats up to {_FORMAT}: load it with the "
            "version that wrote it."
        )
    try:
        return _decode(description, arrays, like)
    except (LookupError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> Damaged:
    why = f" ({error})" if isinstance(error, Damaged) else ""
    return Damaged(f"{path} is not a file that Result.save wrote, or it is damaged{why}.")


def _encode(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The description of a value as JSON; its arrays are added to `arrays` under the names that it mentions."""
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _encode_array(value, arrays)
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _encode(item, arrays)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, arrays) for item in value]}
    if isinstance(value, eqx.Module) and type(value).__module__.startswith("bayesrule."):
        fields = [[field.name, _encode(getattr(value, field.name), arrays)] for field in dataclasses.fields(value)]
        return {"class": _public_name(type(value)), "fields": fields}
    leaves = jax.tree.leaves(value)
    if jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"A {type(value).__name__} cannot be saved, because a file holds numbers and no code: parameters must be "
            "arrays in containers."
        )
    # A container of another library: the file keeps its leaves, and `read` needs `like` for its structure.
    return {"foreign": [_encode(leaf, arrays) for leaf in leaves]}


def _encode_array(value: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    name = f"array{len(arrays)}"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        arrays[name] = np.asarray(jax.random.key_data(value))
        return {"key": name, "implementation": str(jax.random.key_impl(value))}
    if isinstance(value, jax.Array) and value.dtype == jnp.bfloat16:  # NumPy's file format has no bfloat16
        arrays[name] = np.asarray(value.view(jnp.uint16))
        return {"bfloat16": name}
    arrays[name] = np.asarray(value)
    return {"array": name, "device": isinstance(value, jax.Array)}


def _decode(description: dict[str, Any], arrays: dict[str, np.ndarray], like: PyTree) -> Any:
    """The value that `_encode` described."""
    if "plain" in description:
        return description["plain"]
    if "array" in description:
        array = arrays[description["array"]]
        return jnp.asarray(array) if description["device"] else array
    if "bfloat16" in description:
        return jnp.asarray(arrays[description["bfloat16"]]).view(jnp.bfloat16)
    if "key" in description:
        return jax.random.wrap_key_data(jnp.asarray(arrays[description["key"]]), impl=description["implementation"])
    if "dict" in description:
        return {key: _decode(item, arrays, like) for key, item in description["dict"]}
    if "list" in description:
        return [_decode(item, arrays, like) for item in description["list"]]
    if "tuple" in description:
        return tuple(_decode(item, arrays, like) for item in description["tuple"])
    if "foreign" in description:
        leaves = [_decode(leaf, arrays, like) for leaf in description["foreign"]]
        if like is None or jax.tree.structure(like).num_leaves != len(leaves):
            raise ValueError(
                "The saved parameters are in a container that is not a dict, list or tuple: pass like=, any value of "
                "the same structure (freshly initialised parameters, for example)."
            )
        return jax.tree.unflatten(jax.tree.structure(like), leaves)
    return _decode_module(description, arrays, like)


def _decode_module(description: dict[str, Any], arrays: dict[str, np.ndarray], like: PyTree) -> eqx.Module:
    """A module of the library from its class's name and its fields, without calling its constructor."""
    name = description["class"] if "class" in description else _name_in_format_1(*description["module"])
    name = _RENAMED_CLASSES.get(name, name)
    kind = _class_named(name)
    if kind is None:
        raise ValueError(f"The file names {name!r}, which is not one of the library's own types.")
    renamed: dict[str, str] = _RENAMED_FIELDS.get(name, {})
    module = object.__new__(kind)
    # Fields that are newer than the file have their default: every field must be set for two trees to be equal.
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            object.__setattr__(module, field.name, field.default)
    for field, value in description["fields"]:
        object.__setattr__(module, str(renamed.get(field, field)), _decode(value, arrays, like))
    return module


def _name_in_format_1(module: str, name: str) -> str:
    """The public name of a class that format 1 named by its module."""
    return f"kernels.{name}" if module == f"bayesrule.{_KERNELS}" else name


def _class_named(name: str) -> type[eqx.Module] | None:
    """The class with this public name; None where it is not one of the library's data types."""
    if name in _OTHERS:
        module, attribute = _OTHERS[name]
        return getattr(importlib.import_module(f"bayesrule.{module}"), attribute)
    public = importlib.import_module("bayesrule")
    kind = getattr(public, name) if name in public.__all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, eqx.Module) else None


def _public_name(kind: type[eqx.Module]) -> str:
    """The name under which files refer to this class."""
    for name in (kind.__name__, *_OTHERS):
        if _class_named(name) is kind:
            return name
    raise ValueError(
        f"A {kind.__name__} has no public name, so no file can refer to it: save its arrays, jax.tree.leaves(state), "
        "and put them back by jax.tree.unflatten(jax.tree.structure(a fresh state), blr.load(path))."
    )
