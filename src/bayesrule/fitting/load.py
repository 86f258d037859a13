"""What `fit` is given as data: arrays in memory, a stream of rows, or data in parts; and who takes steps on each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from ..factor_graph.model import Model
from ..numerics.pytree import PyTree
from ..objectives.base import AbstractObjective
from ..rule.rule import Rule
from ..streams.arrays import ArrayStream, is_mapped
from ..streams.base import Stream
from .driver import Driver
from .loader import Loader
from .parts import Parts, StreamParts
from .parts_driver import PartsDriver
from .result import Result
from .stream_driver import StreamDriver

_HEAD_ROWS = 256  # How many of the first rows the checks before a fit look at.


def load(objective: AbstractObjective, data: PyTree, batch_size: int | None) -> Loader:
    """The loader of what a user passed to `fit`: streams, and arrays on disk, are read as they are needed."""
    if objective.takes_data and batch_size is not None and not isinstance(data, Stream | Parts) and is_mapped(data):
        data = ArrayStream(data)
    if not (objective.takes_data and isinstance(data, Stream | Parts)):
        return Loader.of(objective, data, batch_size)
    if batch_size is None:
        parts = data if isinstance(data, Parts) else StreamParts(data)
        return Loader(_head(objective, parts), None, parts.rows, parts=parts)
    if isinstance(data, Parts):
        raise ValueError("Data in parts are for full-batch steps, each a pass over all of them: remove batch_size=.")
    if not 1 <= batch_size <= data.rows:
        raise ValueError(f"batch_size= must be between 1 and the number of examples, {data.rows}; got {batch_size}.")
    if isinstance(objective, Model) and objective.local:
        raise ValueError(
            f"The local blocks {list(objective.local)} have a member for each row, which would all have to be in "
            "memory, and the rows of a stream are not: pass the data as arrays, leave batch_size= out, or fit a part "
            "of the rows at a time and go on with model.after(q)."
        )
    return Loader(_head(objective, data), batch_size, data.rows, stream=data)


def _head(objective: AbstractObjective, data: Stream | Parts) -> PyTree:
    """The first rows, after checks that they are as the objective takes them."""
    head = jax.tree.map(jnp.asarray, data.head(_HEAD_ROWS))
    objective.rows(head)
    if objective.for_data(head)[0] is not objective:
        raise ValueError(
            "Some rows are missing in part, and integrating their missing entries out takes the patterns of all rows, "
            "which are not known of a stream or of data in parts: drop those rows, or pass the data as arrays."
        )
    return head


def driver_of(loader: Loader, resumed: Result | None) -> Callable[..., Driver]:
    """What makes the driver of a fit on these data."""
    if loader.parts is not None:
        return PartsDriver
    if loader.stream is not None:
        return partial(StreamDriver, position=None if resumed is None else resumed.position)
    return Driver


def refuse_outside_memory(loader: Loader, rule: Rule, starts: int) -> None:
    """Raise for what needs all data in memory, where they are not."""
    if loader.in_memory:
        return
    if starts > 1:
        raise ValueError(
            "starts= runs several fits side by side on data in memory: fit with starts= on a part of the rows, "
            "stream.head(rows), and go on from the best q on all of them."
        )
    if rule.search is not None:
        raise ValueError(
            "multimodal() polishes the minima that it finds on all data, which have to be in memory: pass the data as "
            "arrays, or a part of them, stream.head(rows)."
        )
