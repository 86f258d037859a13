"""Several processes that take the steps of one fit together: they join, decide together, and save once.

Each process runs the same script and calls the same programs in the same order; a program that sums over the devices of
all processes waits for all of them. So whatever depends on a clock, on a signal or on a disk is decided by all
processes together, or by the first, and what is saved is written by the first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..numerics.pytree import PyTree

if TYPE_CHECKING:
    from .result import Result

_CLUSTERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def join_processes(*, heartbeat_seconds: int = 10) -> None:
    """Join the other processes of this run, before anything else uses JAX; in a single process it does nothing.

    It is `jax.distributed.initialize` with what `python -m bayesrule.launch` or SLURM's `srun` say of the run. Other
    clusters know other ways: call `jax.distributed.initialize` itself there.

    Args:
        heartbeat_seconds: After how long without a sign of life a process counts as dead. All processes end then.
    """
    if "JAX_NUM_PROCESSES" in os.environ:
        known: dict[str, Any] = {
            "coordinator_address": os.environ["JAX_COORDINATOR_ADDRESS"],
            "num_processes": int(os.environ["JAX_NUM_PROCESSES"]),
            "process_id": int(os.environ["JAX_PROCESS_ID"]),
            # Else JAX asks what kind of cluster this is, and may find one around the launcher.
            "cluster_detection_method": "deactivate",
        }
    elif any(int(os.environ.get(name, "1")) > 1 for name in _CLUSTERS):
        known = {}
    else:
        return
    jax.distributed.initialize(**known, heartbeat_timeout_seconds=heartbeat_seconds)


class Together:
    """How the processes of one fit decide and save; in a single process everything is as it says.

    Args:
        sharding: how the rows of the fit's data are divided among devices, or None.
    """

    def __init__(self, sharding: NamedSharding | None = None):
        self.several = sharding is not None and not sharding.is_fully_addressable
        self.is_first = not self.several or jax.process_index() == 0

    def largest(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over all processes: of flags, whether any process says so."""
        return _largest(values) if self.several else values

    def of_first(self, *values: float) -> tuple[float, ...]:
        """The values, none of them negative, of the first process."""
        return self.largest(*(value if self.is_first else 0.0 for value in values))

    def save(self, result: Result, checkpoint: Any) -> None:
        """Save a result: the first process writes what all have. All processes call this.

        Args:
            result: The result, of which every process has its part.
            checkpoint: What writes it, a `Checkpoint`; or a `ShardedCheckpoint`, with which each process writes its
                own part.

        Raises:
            OSError: In every process, where the first could not write.
        """
        if checkpoint.is_divided:
            _ = result.reason, result.explanation  # They are computed on all devices.
            checkpoint.save(result)
            return
        if not self.several:
            checkpoint.save(result)
            return
        whole = collected(result)
        error = None
        if self.is_first:
            try:
                checkpoint.save(whole)
            except OSError as raised:
                error = raised
        if self.largest(error is not None)[0]:
            raise OSError("The first process could not save the fit; see what it says.") if error is None else error


def _largest(values: tuple[float, ...]) -> tuple[float, ...]:
    from jax.experimental.multihost_utils import process_allgather

    # As bytes, because in single precision a number may not keep its digits.
    own = np.frombuffer(np.asarray(values, np.float64).tobytes(), np.uint8)
    all_values = np.asarray(process_allgather(own)).reshape(jax.process_count(), -1)
    return tuple(np.max([np.frombuffer(row.tobytes(), np.float64) for row in all_values], axis=0).tolist())


def collected(result: Result) -> Result:
    """The result with all arrays whole in this process's memory. Every process must take part."""
    _ = result.reason, result.explanation, result.bound  # They are computed on all devices.
    return result.with_arrays(lambda tree: jax.tree.map(_whole, tree))


def spans_processes(tree: PyTree) -> bool:
    """Whether some array is on devices of several processes."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(tree))


def _whole(leaf: Any) -> Any:
    """An array on one device of this process; one that is divided is gathered."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if not leaf.is_fully_replicated:
        mesh = leaf.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]  # Ours are all `NamedSharding`s.
        leaf = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, jax.sharding.PartitionSpec()))(leaf)
    return leaf.addressable_data(0)
