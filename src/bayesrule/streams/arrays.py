"""A stream of arrays: in memory, or mapped from NPY and NPZ files, of which only what is read comes into memory."""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted, count_examples
from .base import Part, SeekableStream, default_buffer
from .to_numpy import as_numpy

_PIECE_BYTES = 2**20  # A disk reads so many successive bytes about as quickly as it can.
_RELEASE_BYTES = 2**25


class ArrayStream(SeekableStream):
    """The rows of a pytree of arrays.

    Args:
        data: arrays with one row per example (or `Weighted`); `np.memmap` leaves stay on disk.
        buffer: how many rows are shuffled together; None for as many as 64 MB hold.
    """

    def __init__(self, data: PyTree, buffer: int | None = None):
        if isinstance(data, Weighted) and data.count is not None:
            raise ValueError(
                "Weighted(…, count=M) says what a whole batch stands for, and a stream is cut into batches: leave "
                "count= out, and scale the weights instead."
            )
        leaves, structure = jax.tree.flatten(data)
        self.leaves, self._structure = [as_numpy(leaf) for leaf in leaves], structure
        self.rows = count_examples(jax.tree.unflatten(structure, self.leaves))
        kinds = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in self.leaves]
        self.row = jax.tree.unflatten(structure, kinds)
        self.buffer = default_buffer(buffer, self.row_bytes)
        # Pieces much smaller than the buffer, so that a window mixes rows of many places.
        size = max(1, min(_PIECE_BYTES // max(1, self.row_bytes), -(-min(self.buffer, self.rows) // 16)))
        self.size = size
        self.pieces = np.full(-(-self.rows // size), size)
        self.pieces[-1] = self.rows - size * (len(self.pieces) - 1)
        self._maps = [m for m in map(_shared_map, self.leaves) if m is not None]

    @cached_property
    def all_rows(self) -> PyTree:
        in_memory = not is_mapped(self.leaves)
        return jax.tree.unflatten(self._structure, self.leaves) if in_memory else self.head(self.rows)

    def read(self, piece: int, first: int) -> Iterator[Part]:
        begin = piece * self.size
        yield _Slice(self.leaves, begin + first, int(self.pieces[piece]) - first)

    def _parts(self, order: np.ndarray, first: int) -> Iterator[Part]:
        unreleased = 0
        for part in super()._parts(order, first):
            yield part
            unreleased += part.rows * self.row_bytes
            if unreleased > _RELEASE_BYTES:
                self._release()
                unreleased = 0
        self._release()

    def _release(self) -> None:
        """Give back the pages that reading has mapped: the system counts them as memory of the process.

        They stay in the system's own cache as long as there is room.
        """
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)


class _Slice(Part):
    def __init__(self, leaves: list[np.ndarray], first: int, rows: int):
        self.leaves, self.first, self.rows = leaves, first, rows

    def write(self, leaves: list[np.ndarray], at: int, first: int, count: int) -> None:
        begin = self.first + first
        for target, source in zip(leaves, self.leaves, strict=True):
            target[at : at + count] = source[begin : begin + count]


def _shared_map(leaf: np.ndarray) -> mmap.mmap | None:
    """The memory map behind an array if its pages may be dropped; a copy-on-write map has changes only there."""
    if not isinstance(leaf, np.memmap) or leaf.mode == "c" or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return getattr(leaf, "_mmap", None)


def is_mapped(data: PyTree) -> bool:
    """Whether some of the arrays are mapped from files."""
    return any(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(data))


def map_npy(path: str | Path) -> np.ndarray:
    """The array of an NPY file, on disk until it is read."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim == 0:
        raise ValueError(f"{path} holds a single number, and a stream needs rows: an array with at least one axis.")
    return array


class _Member(NamedTuple):
    name: str
    info: zipfile.ZipInfo


def map_npz(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an uncompressed NPZ file by name, on disk until they are read.

    `np.load(mmap_mode=…)` reads members of an NPZ as a whole. Members that are not compressed are NPY files inside of
    the archive, and can be mapped where they lie.
    """
    with zipfile.ZipFile(path) as archive:
        members = [_Member(info.filename.removesuffix(".npy"), info) for info in archive.infolist()]
        packed = [member.name for member in members if member.info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(
                f"{path} is compressed, so that the array {packed[0]!r} cannot be read in parts: write it with "
                "np.savez instead of np.savez_compressed, or pass the arrays themselves if they fit into memory."
            )
    with Path(path).open("rb") as file:
        return {member.name: _map_member(path, file, member.info) for member in members}


def _map_member(path: str | Path, file: Any, info: zipfile.ZipInfo) -> np.ndarray:
    # The header in front of the member, whose name and extra field may differ from those in the archive's directory.
    file.seek(info.header_offset + 26)
    lengths = np.frombuffer(file.read(4), "<u2")
    file.seek(info.header_offset + 30 + int(lengths.sum()))
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or not shape:
        raise ValueError(
            f"{path} has {info.filename!r}, which is no array of numbers with rows: leave it out of the file."
        )
    if 0 in shape:  # An empty file cannot be mapped.
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape, order="F" if fortran else "C")
