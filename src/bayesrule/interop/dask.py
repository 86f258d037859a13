r"""Tables on Dask: partitions are measured where they are, what they add up to comes back, and the step is taken here.

What a fit asks of its rows are sums (a loss and its derivatives), merges of summaries (centred moments, triangular
factors, classes) and a few of the rows themselves. `DaskParts` computes them by one task for each partition and a tree
of merges, on whatever scheduler Dask has: the cluster of a `distributed.Client`, threads, or none. A worker needs this
library and nothing else. Where one is lost, Dask computes its partitions again: the tree is the same, and so is the
result, bit for bit.

What crosses the network: in each pass the arguments (q, and the algorithm) go to every worker once, and one result of a
partition, the size of a gradient and a curvature, goes up the tree. Rows stay where they are.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..fitting.parts import Parts, count_part, pad_part
from ..numerics.padding import bucket, bucket_below
from ..numerics.pytree import PyTree

__all__ = ["DaskParts"]

_BLOCK_NUMBERS = 2**19
"""How many numbers of a partition are read and measured at once, 4 MB: a large partition takes no more memory."""
_FAN_IN = 8
"""How many results are merged by one task."""

Merge = Callable[[PyTree, PyTree], PyTree]


def is_dask(value: Any) -> bool:
    """Whether a value is a Dask array, DataFrame or Series. It is asked of every input, and does not import Dask."""
    return type(value).__module__.partition(".")[0] == "dask" and hasattr(value, "__dask_graph__")


class DaskParts(Parts):
    """Aligned Dask collections as the data of a fit: `fit(rule, objective, start, DaskParts((X, y)), steps=…)`.

    Args:
        data: A pytree of Dask arrays, DataFrames or Series with one row per example, of which the partitions belong
            together: as many in each, of the same lengths. Arrays of NumPy are cut at the chunks of the others.
        block_rows: How many rows of a partition are measured at once; by default 2¹⁹ numbers, 4 MB.

    >>> import dask.array as da
    >>> parts = DaskParts({"y": da.arange(10.0, chunks=4)})
    >>> parts.rows, float(parts.reduce(_sum_of_squares, add))
    (10, 285.0)
    """

    def __init__(self, data: PyTree, *, block_rows: int | None = None):
        collections, structure = jax.tree.flatten(data)
        self._partitions, self._known_sizes, self._meta = _align(collections)
        self._structure = structure
        if block_rows is None:
            width = sum(int(np.prod(meta.shape[1:])) for meta in self._meta)
            # A length that needs no padding: all blocks of a partition but the last are then measured as they are.
            block_rows = bucket_below(max(256, _BLOCK_NUMBERS // max(1, width)))
        self.block_rows = block_rows
        self._steps: tuple[tuple[Callable[..., PyTree], tuple[Any, ...]], ...] = ((_numbers_of, ()),)
        self._heads: dict[int, PyTree] = {}

    @staticmethod
    def of_table(frame: Any, target: str, *, block_rows: int | None = None) -> DaskParts:
        """The rows of one DataFrame of numbers as (X, y): every partition is read once in a pass, with all its columns.

        Args:
            frame: the Dask DataFrame.
            target: the name of the column y; the others are X, in their order.
            block_rows: as above.
        """
        names = [name for name in frame.columns if name != target]
        return DaskParts(frame[[*names, target]], block_rows=block_rows).map(_split_last)

    # What `fit` asks for.

    @cached_property
    def rows(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # Counted when it is asked for.
        """How many rows all partitions have together: one pass, where the chunks' sizes are not known."""
        return int(sum(self.sizes))

    @cached_property
    def count(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  # As `rows` is.
        """How many examples they stand for."""
        return float(self.reduce(count_part, add))

    def head(self, count: int) -> PyTree:
        """The first rows, as NumPy arrays, or those of the first partition that has any where it has fewer."""
        if count not in self._heads:
            job = self._sent_job(_as_arrays, None, ())
            heads = (_compute(_delayed(_first_rows)(job, count, *leaves)) for leaves in self._partitions)
            self._heads[count] = next((head for head in heads if head is not None), None)
        if self._heads[count] is None:
            raise ValueError(_NO_ROWS)
        return self._heads[count]

    def total(self, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """Σ function(part, *arguments); every part is padded to one of a few numbers of rows, by rows of weight 0."""
        return self.reduce(_of_padded, add, function, *arguments)

    def carry(self, function: Callable[..., tuple[PyTree, PyTree]], kept: Any, *arguments: PyTree) -> tuple[Any, Any]:
        """Σ of the first values of function(part, what is kept there, *arguments); the second stay at the partitions.

        A handle is a list of Dask's persisted values. If a worker is lost, Dask computes them again from the passes
        that led to them.
        """
        job = self._sent_job(_of_padded_kept, add, (function, *arguments))
        before = [None] * len(self._partitions) if kept is None else kept
        pairs = [
            _delayed(_carry_partition)(job, own, *leaves) for own, leaves in zip(before, self._partitions, strict=True)
        ]
        item = _delayed(operator.getitem)
        total, *keeps = _persist(self._tree(job, [item(pair, 0) for pair in pairs]), *(item(pair, 1) for pair in pairs))
        return _found(_compute(total)), keeps

    # What an estimator asks for.

    def map(self, function: Callable[..., PyTree], *arguments: PyTree) -> DaskParts:
        """The parts with function(part, *arguments) in the place of every part, row for row; lazily.

        Args:
            function: pure, and defined at the top of a module.
            *arguments: the same for every part.
        """
        other = copy.copy(self)
        other._steps, other._heads = (*self._steps, (function, arguments)), {}
        vars(other).pop("count", None)
        return other

    def reduce(self, function: Callable[..., PyTree], merge: Merge, *arguments: PyTree) -> PyTree:
        """function(part, *arguments) of all parts that have rows, merged in pairs, in the order of the rows.

        Args:
            function: returns a pytree of arrays.
            merge: merge(one, other), associative up to rounding.
            *arguments: the same for every part.
        """
        job = self._sent_job(function, merge, arguments)
        results = [_delayed(_reduce_partition)(job, *leaves) for leaves in self._partitions]
        return _found(_compute(self._tree(job, results)))

    def known(self, *, rows: int, count: float | None = None) -> DaskParts:
        """The same parts, of which it is known how many rows they have, so that they are not counted.

        Args:
            rows: the number of rows.
            count: how many examples they stand for; None if that is not known.
        """
        other = copy.copy(self)
        other.rows = rows
        if count is not None:
            other.count = count
        return other

    def take(self, rows: Any) -> PyTree:
        """Rows by their numbers, which rise, or all by slice(None), as NumPy arrays.

        Args:
            rows: the numbers.
        """
        if isinstance(rows, slice):
            return self.reduce(_as_arrays, _concatenate)
        ends = np.cumsum(self.sizes)
        job = self._sent_job(_as_arrays, None, ())
        taken = []
        for leaves, size, end in zip(self._partitions, self.sizes, ends, strict=True):
            wanted = rows[(rows >= end - size) & (rows < end)] - (end - size)
            if len(wanted):
                taken.append(_delayed(_take_rows)(job, wanted, *leaves))
        parts = _compute(*taken)
        return _concatenate(*(parts if len(taken) > 1 else [parts]))

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of every partition."""
        if self._known_sizes is not None:
            return self._known_sizes
        sizes = _compute(*(_delayed(_rows_of)(*leaves) for leaves in self._partitions))
        return [sizes] if isinstance(sizes, int) else list(sizes)

    def _sent_job(self, function: Callable[..., PyTree], merge: Merge | None, arguments: tuple[Any, ...]) -> Any:
        """What to do with every partition, as one value of Dask's graph: it goes to every worker once."""
        double = jnp.result_type(float) == np.float64
        job = _Job(self._structure, self._steps, function, merge, arguments, self.block_rows, double)
        return _delayed(_Message.of(job))

    def _tree(self, job: Any, results: list[Any]) -> Any:
        """Results merged by a tree of tasks, always in the same order."""
        while len(results) > 1:
            groups = [results[first : first + _FAN_IN] for first in range(0, len(results), _FAN_IN)]
            results = [_delayed(_merge_results)(job, *group) for group in groups]
        return results[0]


def map_rows(function: Callable[..., Any], X: Any, *arguments: Any) -> Any:
    """function(block of X, *arguments) for every partition, as lazy Dask arrays with a row for each row of X.

    Args:
        function: of a block, as X has it (an array or a DataFrame); returns an array, or a tuple of arrays.
        X: a Dask array or DataFrame.
        *arguments: the same for every partition; they are sent to a worker once.
    """
    import dask.array as da

    rows = X._meta_nonempty if hasattr(X, "_meta_nonempty") else np.ones((2, *X.shape[1:]), X.dtype)
    like = function(rows, *arguments)
    outputs = like if isinstance(like, tuple) else (like,)
    kinds = [(output.shape[1:], output.dtype) for output in outputs]
    sent = [_delayed(argument) for argument in arguments]
    X = _with_chunks(X, None) if hasattr(X, "rechunk") else X
    chunks = _row_chunks(X)
    blocks = [_delayed(_of_block)(function, kinds, block, *sent) for block in _delayed_partitions(X)]
    lengths = [np.nan] * len(blocks) if chunks is None else chunks
    arrays = []
    for place, (shape, dtype) in enumerate(kinds):
        pieces = [_delayed(operator.getitem)(block, place) for block in blocks]
        parts = [
            da.from_delayed(piece, shape=(length, *shape), dtype=dtype)
            for piece, length in zip(pieces, lengths, strict=True)
        ]
        arrays.append(da.concatenate(parts, allow_unknown_chunksizes=True))
    return tuple(arrays) if isinstance(like, tuple) else arrays[0]


def _of_block(function: Callable[..., Any], kinds: list[Any], block: Any, *arguments: Any) -> tuple[np.ndarray, ...]:
    """function of a block as a tuple of arrays; empty ones for a block without rows."""
    if not np.shape(block)[0]:
        return tuple(np.empty((0, *shape), dtype) for shape, dtype in kinds)
    output = function(block, *arguments)
    return output if isinstance(output, tuple) else (output,)


def add(one: PyTree, other: PyTree) -> PyTree:
    """The sum of two trees of numbers."""
    return jax.tree.map(np.add, one, other)


# Collections to partitions.


class _Meta(NamedTuple):
    shape: tuple[int, ...]


def _align(collections: list[Any]) -> tuple[list[tuple[Any, ...]], list[int] | None, list[_Meta]]:
    """The partitions of all collections beside each other, their lengths where they are known, and shapes of rows."""
    lead = next((each for each in collections if is_dask(each)), None)
    if lead is None:
        raise ValueError("DaskParts takes Dask arrays, DataFrames or Series: pass arrays of NumPy to fit as they are.")
    chunks = _row_chunks(lead)
    aligned = [_with_chunks(each, chunks) for each in collections]
    columns = [_delayed_partitions(each) for each in aligned]
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The Dask collections have {', '.join(map(str, counts))} partitions, and those of one number belong "
            "together: repartition them alike, or take all from one DataFrame."
        )
    known = None if chunks is None else [int(size) for size in chunks]
    return list(zip(*columns, strict=True)), known, [_Meta(_shape_of_rows(each)) for each in aligned]


def _row_chunks(collection: Any) -> tuple[int, ...] | None:
    """The lengths of the partitions; None where they are not known."""
    chunks = getattr(collection, "chunks", None)
    if chunks is None or np.any(np.isnan(chunks[0])):
        return None
    return chunks[0]


def _with_chunks(collection: Any, chunks: tuple[int, ...] | None) -> Any:
    """The collection cut at these chunks of rows, where it can be; and an array with all of its columns in one."""
    if not is_dask(collection):
        if chunks is None:
            raise ValueError(
                "An array of NumPy beside a Dask collection is cut at its chunks, whose sizes are not known here: take "
                "it from the same DataFrame, or call compute_chunk_sizes() on the Dask array first."
            )
        import dask.array as da

        array = np.asarray(collection)
        if len(array) != sum(chunks):
            raise ValueError(f"X has {sum(chunks)} rows, and an array beside it {len(array)}: give as many.")
        cuts: Any = (chunks, *array.shape[1:])
        return da.from_array(array, chunks=cuts)
    if not hasattr(collection, "rechunk"):
        return collection
    own, others = _row_chunks(collection), dict.fromkeys(range(1, collection.ndim), -1)
    if chunks is not None and own is not None and own != chunks:
        if sum(own) != sum(chunks):
            raise ValueError(f"X has {sum(chunks)} rows, and a Dask array beside it {sum(own)}: give as many.")
        return collection.rechunk({0: chunks, **others})
    return collection.rechunk(others) if collection.ndim > 1 else collection


def _delayed_partitions(collection: Any) -> list[Any]:
    if hasattr(collection, "simplify"):
        # Parquet files are read only in the columns that are needed, but small ones are not joined: Dask would join
        # more of them for fewer columns, so that columns of one DataFrame had different partitions.
        return list(collection.simplify().to_delayed(optimize_graph=False))
    partitions = collection.to_delayed()
    return list(np.ravel(partitions)) if isinstance(partitions, np.ndarray) else list(partitions)


def _shape_of_rows(collection: Any) -> tuple[int, ...]:
    shape = collection.shape if hasattr(collection, "rechunk") else collection._meta.shape
    return (0, *map(int, shape[1:]))


# A job, as it travels.


class _Job(NamedTuple):
    """What to do with every partition."""

    structure: Any
    steps: tuple[tuple[Callable[..., PyTree], tuple[Any, ...]], ...]
    function: Callable[..., PyTree]
    merge: Merge | None
    arguments: tuple[Any, ...]
    block_rows: int
    double: bool

    def prepared(self, part: PyTree) -> PyTree:
        """A part after the steps of `map`."""
        for function, arguments in self.steps:
            part = function(part, *arguments)
        return part


@dataclass(frozen=True)
class _Number:
    """The place of a number in a `_Message`."""

    place: int


class _Key(NamedTuple):
    """A typed key of JAX."""

    data: np.ndarray
    kind: str


@dataclass(frozen=True)
class _Message:
    """A tree in two parts: its numbers as NumPy arrays, and all else pickled once, however often the numbers change.

    A worker unpickles what it has not seen before, and otherwise takes what it has: functions in it, such as a rate's
    schedule, stay the same objects, and the programs that were compiled for them are used again.
    """

    pickled: bytes
    digest: bytes
    numbers: tuple[Any, ...]

    @staticmethod
    def of(tree: Any) -> _Message:
        """The message of a tree of arrays, keys and objects that can be pickled."""
        structure, rest = tree.structure, tree._replace(structure=None)
        leaves, shape = jax.tree.flatten(rest)
        is_number = [_is_number(leaf) for leaf in leaves]
        places = iter(range(len(leaves)))
        kept = [_Number(next(places)) if number else leaf for leaf, number in zip(leaves, is_number, strict=True)]
        numbers = tuple(_to_numpy(leaf) for leaf, number in zip(leaves, is_number, strict=True) if number)
        identity = shape, structure, tuple(map(_identity, kept))
        if identity in _sent:
            _sent.move_to_end(identity)
        else:
            skeleton = jax.tree.unflatten(shape, kept), jax.tree.unflatten(structure, range(structure.num_leaves))
            _sent[identity] = _pickle(skeleton)
            while len(_sent) > _KEPT:
                _sent.popitem(last=False)
        pickled = _sent[identity]
        return _Message(pickled, hashlib.sha256(pickled).digest(), numbers)

    def load(self) -> Any:
        """The tree, in another process."""
        if self.digest in _received:
            leaves, shape, structure = _received[self.digest]
        else:
            try:
                skeleton, places = pickle.loads(self.pickled)
            except (ImportError, AttributeError) as error:
                raise RuntimeError(
                    f"A Dask worker cannot load what the fit is made of ({error}). Workers need this library, and a "
                    "module of yours only if a loss or a rule of yours is in it: install that module where the workers "
                    "run (or Client.upload_file), and import the function from there."
                ) from error
            leaves, shape = jax.tree.flatten(skeleton)
            structure = jax.tree.structure(places)
            _received[self.digest] = leaves, shape, structure
            while len(_received) > _KEPT:
                _received.popitem(last=False)
        numbers = iter(self.numbers)
        filled = [_from_numpy(next(numbers)) if isinstance(leaf, _Number) else leaf for leaf in leaves]
        return jax.tree.unflatten(shape, filled)._replace(structure=structure)


_KEPT = 64
_sent: OrderedDict[Any, bytes] = OrderedDict()
_received: OrderedDict[bytes, tuple[Any, ...]] = OrderedDict()


def _identity(leaf: Any) -> Any:
    """What makes two leaves the same: of a partial function, its parts."""
    if isinstance(leaf, partial) and not leaf.args:
        return leaf.func, tuple(sorted(leaf.keywords.items()))
    return leaf


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)


def _to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Key(np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf)))
    return leaf if isinstance(leaf, float | int) else np.asarray(leaf)


def _from_numpy(number: Any) -> Any:
    if isinstance(number, _Key):
        return jax.random.wrap_key_data(jnp.asarray(number.data), impl=number.kind)
    return number


def _pickle(tree: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(tree)
    except Exception as error:  # Whatever a user's object raises when it is pickled.
        raise ValueError(
            f"What the fit is made of cannot be sent to Dask's workers ({error}): a loss or a rule may not hold open "
            "files, locks or clients. Define its functions at the top of a module that the workers can import."
        ) from error


# What a worker does.


def _reduce_partition(message: _Message, *leaves: Any) -> PyTree:
    """function(part) of all blocks of a partition, merged; None where it has no rows."""
    job, result = message.load(), None
    with jax.enable_x64(job.double):
        for block in _blocks(job, leaves):
            one = jax.device_get(job.function(job.prepared(block), *job.arguments))
            result = one if result is None else _merged(job, result, one)
    return result


def _merge_results(message: _Message, *results: PyTree) -> PyTree:
    job, merged = message.load(), None
    with jax.enable_x64(job.double):
        for result in results:
            merged = _merged(job, merged, result)
    return merged


def _merged(job: _Job, one: PyTree, other: PyTree) -> PyTree:
    """Two results merged; what is None has no rows."""
    if one is None or other is None:
        return other if one is None else one
    assert job.merge is not None  # for the type checker: only `take` has none
    return job.merge(one, other)


def _carry_partition(message: _Message, kept: Any, *leaves: Any) -> tuple[PyTree, list[PyTree]]:
    """The sum over a partition's blocks of what a function returns first, and what it returns second, to be kept."""
    job, result, keeps = message.load(), None, []
    with jax.enable_x64(job.double):
        for number, block in enumerate(_blocks(job, leaves)):
            own = None if kept is None else kept[number]
            one, keep = jax.device_get(job.function(job.prepared(block), own, *job.arguments))
            result = _merged(job, result, one)
            keeps.append(keep)
    return result, keeps


def _first_rows(message: _Message, count: int, *leaves: Any) -> PyTree:
    return _take_rows(message, np.arange(min(count, _rows_of(*leaves))), *leaves) if _rows_of(*leaves) else None


def _take_rows(message: _Message, rows: np.ndarray, *leaves: Any) -> PyTree:
    job = message.load()
    with jax.enable_x64(job.double):
        picked = [leaf.iloc[rows] if hasattr(leaf, "iloc") else leaf[rows] for leaf in leaves]
        return job.function(job.prepared(jax.tree.unflatten(job.structure, picked)))


def _blocks(job: _Job, leaves: tuple[Any, ...]) -> Iterator[PyTree]:
    """A partition in blocks of equal lengths, none longer than `block_rows`."""
    rows = _rows_of(*leaves)
    count = -(-rows // job.block_rows)
    length = -(-rows // max(count, 1))
    for first in range(0, rows, max(length, 1)):
        cut = slice(first, first + length)
        yield jax.tree.unflatten(job.structure, [x.iloc[cut] if hasattr(x, "iloc") else x[cut] for x in leaves])


def _rows_of(*leaves: Any) -> int:
    lengths = {int(np.shape(leaf)[0]) for leaf in leaves}
    if len(lengths) > 1:
        raise ValueError(
            f"Partitions that belong together have {sorted(lengths)} rows: X, y and weights must be cut at the same "
            "rows, as the columns of one DataFrame are."
        )
    return lengths.pop()


def _of_padded(part: PyTree, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """function of a part that is padded by rows of weight 0: parts of about the same length share a program.

    A part whose rows all have the weight 0 counts for nothing, and has no function.
    """
    return None if not count_part(part) else function(_padded(part), *arguments)


def _of_padded_kept(
    part: PyTree, kept: PyTree, function: Callable[..., tuple[Any, ...]], *arguments: PyTree
) -> tuple[Any, ...]:
    return (None, None) if not count_part(part) else function(_padded(part), kept, *arguments)


def _padded(part: PyTree) -> PyTree:
    examples = getattr(part, "examples", part)
    rows = _rows_of(*jax.tree.leaves(examples))
    return part if examples is part and bucket(rows) == rows else pad_part(part, bucket(rows))


def _numbers_of(part: PyTree) -> PyTree:
    """A block with NumPy arrays in the places of pandas objects."""
    return jax.tree.map(lambda x: x.to_numpy() if hasattr(x, "iloc") else x, part)


def _split_last(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return part[:, :-1], part[:, -1]


def _as_arrays(part: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, part)


def _concatenate(*parts: PyTree) -> PyTree:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


# The example of `DaskParts` computes it.
def _sum_of_squares(part: PyTree) -> PyTree:  # pyright: ignore[reportUnusedFunction]
    return sum(np.sum(np.square(x)) for x in jax.tree.leaves(part))


# Dask's own functions. Everything is computed on the scheduler that Dask has.

_NO_ROWS = "The Dask collection has no rows, or none of a weight above 0: there is nothing to fit."


def _found(result: PyTree) -> PyTree:
    if result is None:
        raise ValueError(_NO_ROWS)
    return result


def _delayed(value: Any) -> Any:
    from dask.delayed import delayed

    return delayed(value, pure=False, traverse=False)


def _compute(*collections: Any) -> Any:
    from dask.base import compute

    found = compute(*collections)
    return found[0] if len(collections) == 1 else found


def _persist(*collections: Any) -> Any:
    from dask.base import persist

    return persist(*collections)
