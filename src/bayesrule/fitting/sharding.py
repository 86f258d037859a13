"""Data and parameters on many devices: rows divided among them, and everything else on each of them or divided too.

What is measured on examples is a sum, so that a step on rows that are divided over the devices of a
`jax.sharding.Mesh` is the same program as on one device: XLA's partitioner adds the sum over devices. All that is
needed is to say where arrays are. `shard` divides the rows of data, `shard_parameters` the entries of parameters, and
`fit` reads from its data's arrays on which devices they are, puts all else there, and keeps it there.

One process has one device or many. Of several processes (`jax.distributed.initialize`) each runs the same script, and
has its own rows; the arrays are then those of all processes together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..numerics.pytree import PyTree
from ..objectives.batches import Weighted, count_rows

if TYPE_CHECKING:
    from ..objectives.base import AbstractObjective

T = TypeVar("T")


def shard(data: PyTree, mesh: Mesh, axis: str = "data") -> PyTree:
    """Divide the rows of data among the devices of a mesh, for `fit`, `run` and `rule.step`.

    Every device gets equally many consecutive rows. Where they do not divide, the last row is repeated with weight 0,
    and the result is a `Weighted` that says how many rows are padding.

    In several processes each passes its own rows, those of `rows_of_process`, and gets the arrays of all processes.

    Args:
        data: A pytree of arrays with one row per example, or `Weighted`.
        mesh: The devices, such as `jax.make_mesh((8,), ("data",))`.
        axis: The mesh's axis to divide the rows over.

    Returns:
        The data as `fit` takes it.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> shard({"y": np.arange(3.0)}, mesh)["y"].sharding.spec == PartitionSpec("data")
    True
    """
    mesh = _with_automatic_axes(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(_known_axis(mesh, axis)))
    weighted = isinstance(data, Weighted)
    examples = jax.tree.map(_on_host, data.examples if weighted else data)
    own_rows = count_rows(examples)
    rows = _check_division(own_rows, sharding)
    padding = padded_size(sharding, rows) - rows
    if weighted:
        weights = np.asarray(data.weights)
    else:
        weights = np.ones(own_rows, jax.dtypes.canonicalize_dtype(float)) if padding else None
    # The rows of this process among those of all, which with padding are the same number in each.
    own_padding = len(range(*_slice_of_process(rows + padding, sharding).indices(rows + padding))) - own_rows
    repeat = lambda x: x if own_padding == 0 else np.concatenate([x, np.repeat(x[-1:], own_padding, axis=0)])
    whole = lambda x: (rows + padding, *x.shape[1:])
    put = lambda x: jax.make_array_from_process_local_data(sharding, x, whole(x))
    examples = jax.tree.map(lambda x: put(repeat(x)), examples)
    if weights is None:
        return examples
    weights = put(np.concatenate([weights, np.zeros(own_padding, weights.dtype)]))
    return Weighted(examples, weights, data.count if weighted else None, padding)


def rows_of_process(rows: int, mesh: Mesh, axis: str = "data") -> slice:
    """Which rows of all data this process is to read and to pass to `shard`.

    Args:
        rows: The number of rows of all data.
        mesh: The devices of all processes.
        axis: The mesh's axis that the rows are divided over.

    >>> rows_of_process(10, jax.make_mesh((1,), ("data",)))                              # in the only process
    slice(0, 10, None)
    """
    sharding = NamedSharding(_with_automatic_axes(mesh), PartitionSpec(_known_axis(mesh, axis)))
    own = _slice_of_process(padded_size(sharding, rows), sharding)
    return slice(min(own.start, rows), min(own.stop, rows))


def shard_parameters(tree: T, mesh: Mesh, axis: str = "data") -> T:
    """Divide every array of parameters, or of a state, along its longest axis that divides evenly among devices.

    A fit that starts from such parameters has its precision, momentum and averages divided in the same way: each device
    stores a part of everything, and XLA gathers what a layer needs when it needs it. Arrays without such an axis are on
    every device.

    Args:
        tree: Parameters, a member of a family, a `State`, or a `Result` to go on from.
        mesh: The devices.
        axis: The mesh's axis to divide over; that of the data, or another one.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> sharded = shard_parameters({"w": np.ones((2, 6)), "b": np.ones(())}, mesh)
    >>> sharded["w"].sharding.spec == PartitionSpec(None, "data")
    True
    """
    mesh = _with_automatic_axes(mesh)
    _known_axis(mesh, axis)
    if hasattr(tree, "state") and hasattr(tree, "trace"):  # a `Result`, which is not a pytree
        result: Any = tree
        return result.with_arrays(lambda part: shard_parameters(part, mesh, axis))
    return jax.tree.map(lambda leaf: _put(leaf, NamedSharding(mesh, parameter_spec(leaf, mesh, axis))), tree)


def parameter_spec(leaf: Any, mesh: Mesh, axis: str) -> PartitionSpec:
    """Along which axis `shard_parameters` divides an array of this shape."""
    shape, count = jnp.shape(leaf), mesh.shape[axis]
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return PartitionSpec()
    dividing = [place for place, length in enumerate(shape) if length and length % count == 0]
    if not dividing:
        return PartitionSpec()
    longest = max(dividing, key=lambda place: shape[place])
    return PartitionSpec(*(None,) * longest, axis)


# What `fit` asks.


class Placement(NamedTuple):
    """Where the arrays of a loop are: hashable, so that it is a part of the compiled program.

    Attributes:
        rows: how the rows of a batch are divided.
        carry: the sharding of every leaf of the carry, which a chunk returns as it was given.
    """

    rows: NamedSharding
    carry: tuple[NamedSharding, ...]

    @staticmethod
    def of(rows: NamedSharding, carry: PyTree) -> Placement:
        """The placement of a carry whose arrays are all on the devices of the mesh."""
        return Placement(rows, tuple(leaf.sharding for leaf in jax.tree.leaves(carry)))

    def constrain(self, carry: T) -> T:
        """The carry with its leaves where they were before, or each chunk would be compiled for another placement."""
        leaves, structure = jax.tree.flatten(carry)
        put = jax.lax.with_sharding_constraint
        return jax.tree.unflatten(structure, [put(*pair) for pair in zip(leaves, self.carry, strict=True)])


def sharding_of_rows(data: PyTree) -> NamedSharding | None:
    """How the rows of data are divided among devices; None where they are on one device, or traced.

    Of arrays that every device has whole, the batches are divided over the mesh's first axis.
    """
    for leaf in jax.tree.leaves(data):
        if isinstance(leaf, Tracer):
            return None
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            sharding = _normal(leaf.sharding)
            rows = sharding.spec[0] if len(sharding.spec) and leaf.ndim else None
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.mesh.axis_names[0] if rows is None else rows))
    return None


def on_devices(mesh: Mesh | AbstractMesh, tree: T, *, numbers: bool = False) -> T:
    """The tree with every array on the devices of a mesh: as it is where it is there already, else on each of them.

    A loop's arguments must all be on the same devices, and where they are is a part of the compiled program.

    Args:
        mesh: The devices, a `Mesh`. (A sharding's own may be abstract for a type checker, and never is here.)
        tree: Any pytree.
        numbers: Whether Python's numbers become arrays too, as in a carry.
    """
    assert isinstance(mesh, Mesh)  # only for the type checker: arrays are on the devices of a concrete one
    devices = set(mesh.devices.flat)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
            return _weak(type(leaf), leaf, NamedSharding(mesh, PartitionSpec()))() if numbers else leaf
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            return leaf
        given = leaf.sharding if isinstance(leaf, jax.Array) else None
        if isinstance(given, NamedSharding) and given.device_set == devices:
            return leaf if given == _normal(given) else jax.device_put(leaf, _normal(given))
        return _put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, tree)


def state_on_devices(mesh: Mesh | AbstractMesh, state: T) -> T:
    """A rule's state on the devices of a mesh, with whatever has the shape of a parameter divided as that one is.

    Precisions, momentum and averages are made from numbers when the state is, so that they are on one device at first.
    """
    state = on_devices(mesh, state)
    divided = {
        (tuple(path), leaf.shape): leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(_parameters(state))
        if not leaf.sharding.is_fully_replicated
    }

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.sharding.is_fully_replicated:
            return leaf
        ends = ((path[start:], leaf.shape) for start in range(len(path) + 1))
        sharding = next((divided[end] for end in ends if end in divided), None)
        return leaf if sharding is None else jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(put, state) if divided else state


def rows_on_devices(sharding: NamedSharding, objective: AbstractObjective, state: T, rows: int) -> T:
    """A state whose arrays of a row for each example, sites and local blocks, are divided as the data are.

    A row's message is then stored where the row is. Where the rows do not divide evenly, every device has all of them.

    Args:
        sharding: How the rows of the data are divided.
        objective: The objective; only a `Model` has such arrays.
        state: The state, on these devices.
        rows: The number of rows of the data.
    """
    local = getattr(objective, "local", None)
    if local is None or rows % _parts(sharding):
        return state

    def put(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        of_rows = names[0] == "aux" or (names[:2] == ["q", "blocks"] and names[2] in local)
        fits = isinstance(leaf, jax.Array) and leaf.ndim and leaf.shape[0] == rows
        return jax.device_put(leaf, sharding) if of_rows and fits else leaf

    return jax.tree_util.tree_map_with_path(put, state)


def _parameters(state: Any) -> PyTree:
    """The bare parameters of a state's q; None where it has none."""
    try:
        return state.q.params
    except ValueError:
        return getattr(state.q, "mean", None)


def padded_size(sharding: NamedSharding | None, rows: int) -> int:
    """The number of rows, rounded up to what divides evenly."""
    if sharding is None:
        return rows
    count = _parts(sharding)
    return -(-rows // count) * count


def constrain_rows(sharding: NamedSharding | None, batch: PyTree) -> PyTree:
    """A batch, inside of a program, with its rows divided among devices."""
    if sharding is None:
        return batch
    count = _parts(sharding)
    constrain = lambda x: jax.lax.with_sharding_constraint(x, sharding) if x.ndim and x.shape[0] % count == 0 else x
    return jax.tree.map(constrain, batch)


def check_batches(
    objective: AbstractObjective, sharding: NamedSharding | None, batch_size: int | None, padding: int
) -> None:
    """Raise where an objective would see padding that it cannot leave out.

    Args:
        objective: The objective.
        sharding: How the rows are divided.
        batch_size: The number of rows of a batch; None where each step sees all rows.
        padding: How many rows of all data are padding.
    """
    if sharding is None:
        return
    count = _parts(sharding)
    uneven = padding if batch_size is None else batch_size % count
    if uneven and not objective.keeps_partial_batch:
        what = "the number of rows" if batch_size is None else "batch_size="
        raise ValueError(
            f"A from_batch loss sees its batch as a whole, so that no row may be padding: make {what} a multiple of "
            f"the {count} devices."
        )
    if padding and batch_size is None and getattr(objective, "local", None):
        raise ValueError(
            f"The model has blocks with a member for each row, and the rows do not divide evenly among {count} "
            f"devices, so that {padding} were added that have no member: leave out some rows, take fewer devices, or "
            "pass batch_size=, whose batches have no such rows."
        )


# Where arrays are.


def _with_automatic_axes(mesh: Mesh) -> Mesh:
    """The mesh with axes that XLA's partitioner divides over by itself: the loop's program names no axis."""
    return Mesh(mesh.devices, mesh.axis_names)


def _normal(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the one way of writing it that the loop's results have too, or it would compile twice."""
    spec = list(sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    mesh: Any = sharding.mesh  # Never an abstract one, since it has arrays.
    return NamedSharding(_with_automatic_axes(mesh), PartitionSpec(*spec))


def _known_axis(mesh: Mesh, axis: str) -> str:
    if axis not in mesh.axis_names:
        raise ValueError(f"The mesh has the axes {mesh.axis_names}, and no {axis!r}: pass axis=, one of them.")
    return axis


def _parts(sharding: NamedSharding) -> int:
    """Into how many parts the first axis is divided."""
    names = sharding.spec[0]
    names = names if isinstance(names, tuple) else (names,)
    return int(np.prod([sharding.mesh.shape[name] for name in names]))


def _slice_of_process(rows: int, sharding: NamedSharding) -> slice:
    """The rows of this process's devices, which must be consecutive."""
    own = sharding.addressable_devices_indices_map((rows,)).values()
    bounds = sorted({(part[0].indices(rows)[:2]) for part in own if part is not None})
    if any(before[1] != after[0] for before, after in pairwise(bounds)):
        raise ValueError(
            "The rows of this process's devices are not consecutive: build the mesh from jax.devices() in their order."
        )
    return slice(bounds[0][0], bounds[-1][1])


def _check_division(own_rows: int, sharding: NamedSharding) -> int:
    """The rows of all processes together; raise where a process has other rows than its devices are to hold."""
    if jax.process_count() == 1:
        return own_rows
    from jax.experimental.multihost_utils import process_allgather

    counts = np.asarray(process_allgather(np.asarray(own_rows))).reshape(-1)
    axes_are_shared = len({s.start for s in _all_slices(sharding)}) == 1
    rows = int(own_rows if axes_are_shared else counts.sum())
    own = _slice_of_process(padded_size(sharding, rows), sharding)
    due = max(0, min(own.stop, rows) - min(own.start, rows))
    wrong = np.asarray(process_allgather(np.asarray(due != own_rows))).reshape(-1)
    if wrong.any():
        raise ValueError(
            f"The processes have {counts.tolist()} rows, which do not divide as their devices do: in every process "
            "pass the rows rows_of_process(N, mesh) of the N rows of all data."
        )
    return rows


def _all_slices(sharding: NamedSharding) -> list[slice]:
    """The rows of every device of the mesh, of as many rows as there are parts."""
    return [part[0] for part in sharding.devices_indices_map((_parts(sharding),)).values() if part is not None]


def _on_host(x: Any) -> np.ndarray:
    """The rows as they are in this process's memory; JAX's types, since 64 bits may be off."""
    x = np.asarray(x)
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _put(leaf: Any, sharding: NamedSharding) -> Any:
    """An array that every process has whole (or that is divided already), placed on the devices of a mesh."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    values = _on_host(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@cache
def _weak(kind: type, value: Any, sharding: NamedSharding) -> Callable[[], jax.Array]:
    """A function that makes an array of a weak type from a Python number, as a program takes and returns it."""
    return jax.jit(lambda: value, out_shardings=sharding)
