"""Checkpoints of a state that is divided over devices: each process writes its own part, with Orbax.

`Result.save` makes one file, for which the whole state has to be in the memory of one process. Here no process ever has
more than its part, neither when saving nor when loading, and the mesh may be another one when the fit goes on. What is
not divided (the trace, the key, why the fit ended) is the file of `Result.save`, as an array of bytes beside the parts.

Orbax writes into a folder of its own for every checkpoint and renames it when all processes are done, so that a killed
process leaves the one before. A sum over the bits of every array is saved with it and compared after loading.
"""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from .interrupt import signals_named
from .processes import Together, spans_processes
from .result import Result, load
from .sharding import on_devices, parameter_spec


class ShardedCheckpoint:
    """Where a fit with divided parameters is saved: `fit(checkpoint=ShardedCheckpoint(folder))`.

    All processes must reach the same folder. Needs `pip install bayesrule[orbax]`.

    Args:
        folder: the folder, which is made if there is none.
        keep: how many checkpoints to keep, the newest included. If the newest is damaged, `load` takes the one before.
        every: the seconds between two checkpoints, as for `Checkpoint`.
        signals: at which signals to save and exit, as for `Checkpoint`.

    >>> import bayesrule as blr, tempfile
    >>> checkpoint = ShardedCheckpoint(tempfile.mkdtemp())
    >>> checkpoint.load(jax.make_mesh((1,), ("data",))) is None                             # There is none so far.
    True
    """

    folder: Path
    path: Path
    every: float | None
    keep: int
    signals: tuple[signal.Signals, ...]
    is_divided: ClassVar[bool] = True
    """Whether each process writes its own part."""
    saves_end: ClassVar[bool] = True
    """Whether a fit that ends by itself is saved whatever the interval."""

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        every: float | None = None,
        signals: Iterable[str | signal.Signals] = ("SIGTERM",),
    ):
        self.folder = self.path = Path(folder).absolute()
        self.keep = positive_int("keep", keep, meaning="how many checkpoints to keep")
        self.every, self.signals = every, signals_named(signals)

    def __repr__(self) -> str:
        return f"ShardedCheckpoint({str(self.folder)!r}, keep={self.keep})"

    def save(self, result: Result) -> None:
        """Write a checkpoint; all processes of the fit call this together."""
        orbax = _orbax()
        leaves, structure = jax.tree.flatten((result.state, result.best))
        skeleton = jax.tree.unflatten(structure, list(range(len(leaves))))
        others = result.with_arrays(_on_host)
        others.state, others.best = skeleton
        with tempfile.TemporaryDirectory() as folder:
            others.save(Path(folder) / "result.npz")
            file = np.frombuffer((Path(folder) / "result.npz").read_bytes(), np.uint8)
        tree = {
            "leaves": {str(place): leaf for place, leaf in enumerate(leaves)},
            "sums": np.array([_sum_of_bits(leaf) for leaf in leaves], np.uint32),
            "result": file,
        }
        with self._manager() as manager:
            manager.save(result.steps, args=orbax.args.StandardSave(tree), force=True)
            manager.wait_until_finished()

    def load(self, mesh: Mesh, axis: str = "data", like: PyTree = None) -> Result | None:
        """The newest checkpoint that is not damaged, divided over the devices of a mesh; None if there is none so far.

        Args:
            mesh: the devices, as many as when it was saved or not.
            axis: the mesh's axis to divide over, as in `shard_parameters`.
            like: parameters of the same structure, where they are in containers other than dict, list and tuple.
        """
        together = Together(NamedSharding(mesh, PartitionSpec()))
        with self._manager() as manager:
            steps = sorted(manager.all_steps(), reverse=True)
            damaged: list[str] = []
            for step in steps:
                result, problem = None, ""
                try:
                    result = self._restored(manager, step, mesh, axis, like)
                except Exception as error:  # Orbax has no type of its own for what cannot be read.
                    problem = str(error).splitlines()[0][:200]
                # A process sees its own part alone, and all must go on from the same step.
                if together.largest(result is None)[0] or result is None:
                    damaged.append(f"step {step} ({problem or 'as another process says'})")
                    continue
                if damaged:
                    warnings.warn(
                        f"In {self.folder} the checkpoints of {', '.join(damaged)} are damaged. The fit goes on from "
                        f"that of step {step}.",
                        stacklevel=2,
                    )
                return result
        if damaged:
            raise ValueError(
                f"In {self.folder} all checkpoints are damaged: {', '.join(damaged)}. Remove them, and begin anew."
            )
        return None

    def _restored(self, manager: Any, step: int, mesh: Mesh, axis: str, like: PyTree) -> Result:
        orbax = _orbax()
        mesh = Mesh(mesh.devices, mesh.axis_names)
        known = manager.item_metadata(step)
        known = getattr(known, "tree", known)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in known["leaves"].items()}
        divided = lambda x: NamedSharding(mesh, parameter_spec(x, mesh, axis))
        abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=divided(x)) for name, x in shapes.items()}
        everywhere = NamedSharding(mesh, PartitionSpec())
        replicated = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        whole = {name: replicated(known[name]) for name in ("sums", "result")}
        tree = manager.restore(step, args=orbax.args.StandardRestore({"leaves": abstract, **whole}))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.npz"
            path.write_bytes(np.asarray(tree["result"].addressable_data(0)).tobytes())
            result = load(path, like)
        leaves = tree["leaves"]
        for place, expected in enumerate(np.asarray(tree["sums"].addressable_data(0))):
            if _sum_of_bits(leaves[str(place)]) != expected:
                raise ValueError(f"array {place} is not what was saved")
        fill = lambda skeleton: jax.tree.map(lambda place: leaves[str(place)], skeleton)
        result.state, result.best = fill(result.state), fill(result.best)
        return result

    def _manager(self) -> Any:
        orbax = _orbax()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = orbax.CheckpointManagerOptions(
            max_to_keep=self.keep, enable_async_checkpointing=False, create=False, cleanup_tmp_directories=True
        )
        return orbax.CheckpointManager(self.folder, options=options, item_handlers=orbax.StandardCheckpointHandler())


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(
            "ShardedCheckpoint writes with Orbax, which is not installed: pip install 'bayesrule[orbax]'. A fit whose "
            "state fits into one process's memory can be saved without: checkpoint='run.npz'."
        ) from error
    return orbax


def _on_host(tree: PyTree) -> PyTree:
    """What every process has whole, in its own memory; what is divided becomes None, since it is saved in parts."""
    is_divided = lambda leaf: spans_processes(leaf) and not leaf.is_fully_replicated
    local = lambda leaf: leaf.addressable_data(0) if spans_processes(leaf) else leaf
    return jax.tree.map(lambda leaf: None if is_divided(leaf) else local(leaf), tree)


@jax.jit
def _bit_sum(x: Array) -> Array:
    """A sum of well-mixed words over all entries: whatever the order and the devices, and another if one bit is."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32))
    words = words.astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) * jnp.uint32(0x9E3779B1)
    mixed = (words ^ place) * jnp.uint32(0x21F0AAAD)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x735A2D97)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def _sum_of_bits(leaf: Any) -> int:
    mesh = getattr(leaf.sharding, "mesh", None) if isinstance(leaf, jax.Array) else None
    return int(_bit_sum(leaf if mesh is None else on_devices(mesh, leaf)))
