"""A table in Dask's partitions: a sample of its rows in memory, and an estimator fitted to all rows where they are.

What columns are, how they are encoded and which rows are held out is decided by a sample of at most 20,000 rows, as for
a small table. The estimator is fitted to all other rows: every partition is read and encoded on its worker, in every
pass anew, so that no worker holds more of the table than the partition it works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tables.options import ReadingOptions
from ..tables.reading import read_arrow
from ..tables.tables import InputError, Table

if TYPE_CHECKING:
    from .train import PreparedRows

SAMPLE_ROWS = 20_000
"""How many rows decide what columns are; the held-out ones are of these."""


@dataclass
class PartitionedTable:
    """A table in partitions.

    Args:
        sample: rows of it, in memory.
        frame: the Dask DataFrame.
        rows: how many rows it has.
        places: the partition of each row of the sample, and its row there, (rows, 2).
        options: what the user says about its columns.
    """

    sample: Table
    frame: Any
    rows: int
    places: np.ndarray
    options: ReadingOptions


def read_partitioned(pattern: str, options: ReadingOptions) -> PartitionedTable:
    """The Parquet files of a pattern such as "table/*.parquet", of which every worker can read all.

    Args:
        pattern: a pattern of paths, or the path of a file or of a directory.
        options: what the user says about the columns.
    """
    import dask.dataframe as dd
    from dask.base import compute
    from dask.delayed import delayed

    path = Path(pattern)
    folder, name = (path, "*.parquet") if path.is_dir() else (path.parent, path.name)
    files = sorted(map(str, folder.glob(name)))
    if not files:
        raise InputError(f"There is no Parquet file {pattern}: with --cluster give files, 'table/*.parquet'.")
    try:
        frame: Any = dd.read_parquet(files)
        sizes = np.asarray(frame.map_partitions(len).compute())
    except Exception as error:  # It raises whatever its readers do, on whichever worker.
        raise InputError(f"{pattern} cannot be read as Parquet by Dask: {str(error).splitlines()[0]}") from error
    count = int(sizes.sum())
    chosen = np.sort(np.random.default_rng(0).permutation(count)[:SAMPLE_ROWS])
    partition = np.searchsorted(np.cumsum(sizes), chosen, side="right")
    places = np.column_stack([partition, chosen - (np.cumsum(sizes) - sizes)[partition]])
    parts = frame.to_delayed()
    taken = [
        delayed(_take, pure=False)(part, places[places[:, 0] == number, 1])
        for number, part in enumerate(parts)
        if np.any(partition == number)
    ]
    import pandas as pd

    rows = pd.concat(compute(*taken), ignore_index=True)
    sample = read_arrow(_as_arrow(rows), path.name, options)
    note = f"what columns are is decided by {len(rows):,} of {count:,} rows, of which the held-out ones are, too"
    return PartitionedTable(Table(sample.columns, sample.source, [*sample.notes, note]), frame, count, places, options)


def fit_partitions(
    prepared: PreparedRows, partitions: PartitionedTable, config: dict[str, Any], classes: list[str], held_out: Any
) -> None:
    """Fit the estimator to all rows of a table but the held-out ones.

    Args:
        prepared: the estimator, and the encoding that its sample has decided.
        partitions: the table.
        config: complete settings.
        classes: the labels of the classes; none where numbers are predicted.
        held_out: the places in the sample of rows that are not fitted.
    """
    import dask.array as da
    from dask.delayed import delayed

    names = [*(c["name"] for c in prepared.preprocessing.encoding.columns if c["used"]), config["target"]]
    columns = partitions.sample.columns
    formats = {name: columns[name].format for name in names if columns[name].format}
    how = delayed(
        (names, formats, partitions.options, prepared.preprocessing, config["target"], classes),
        pure=False,
        traverse=False,
    )
    out = partitions.places[held_out]
    x, y = [], []
    for number, part in enumerate(partitions.frame.to_delayed()):
        pair: Any = delayed(encode_partition, pure=False, nout=2)(part, how, out[out[:, 0] == number, 1])
        x.append(da.from_delayed(pair[0], (np.nan, prepared.matrix.shape[1]), float))
        y.append(da.from_delayed(pair[1], (np.nan,), int if classes else float))
    join = lambda arrays: da.concatenate(arrays, allow_unknown_chunksizes=True)
    prepared.estimator.fit(join(x), join(y))


def encode_partition(frame: Any, how: tuple[Any, ...], left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets of a partition's rows that have a target and are not left out.

    A missing input is replaced by its expectation given the row's others.
    """
    names, formats, options, preprocessing, target_name, classes = how
    frame = frame.drop(index=frame.index) if not len(frame) else frame.reset_index(drop=True).drop(index=left_out)
    if not len(frame):
        return np.zeros((0, len(preprocessing.encoding.features))), np.zeros(0, int if classes else float)
    options = ReadingOptions(options.missing, options.decimal, options.date_format, options.sheet, {})
    table = read_arrow(_as_arrow(frame), "a partition", options, formats, names)
    target = table.column(target_name)
    table, target = table.take(~target.missing), target.take(~target.missing)
    x = preprocessing.inputs(table).filled if table.rows else np.zeros((0, len(preprocessing.encoding.features)))
    if not classes:
        return x, np.asarray(target.numbers, float)
    places = {label: place for place, label in enumerate(classes)}
    labels = target.labels()
    unknown = next((label for label in labels if label not in places), None)
    if unknown is not None:
        raise InputError(
            f"{target_name!r} has the class {unknown!r}, which is so rare that no sampled row has it: merge rare "
            "classes, or leave their rows out."
        )
    return x, np.array([places[label] for label in labels], int)


def _take(frame: Any, rows: np.ndarray) -> Any:
    return frame.iloc[rows]


def _as_arrow(frame: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False)
