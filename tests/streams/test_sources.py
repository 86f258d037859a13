"""Every source yields its rows once, in order or shuffled, in a bounded memory."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import bayesrule as blr
from bayesrule.streams.arrays import ArrayStream
from bayesrule.streams.base import rows_of
from bayesrule.streams.groups import groups
from bayesrule.streams.iterable import IterableStream
from bayesrule.streams.parquet import ParquetStream

ROWS, COLUMNS = 103, 3
X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
Y = np.arange(ROWS)  # The number of each row, so that a test can tell which rows it got.


def write_parquet(path, x=X, y=Y, group_rows=10, **more):
    columns = {f"x{i}": x[:, i] for i in range(x.shape[1])} | {"y": y} | more
    parquet.write_table(pa.table(columns), path, row_group_size=group_rows)
    return path


def with_empty_groups(path):
    """A file with row groups of 0, 40, 0, 63 and 0 rows."""
    table = pa.table({f"x{i}": X[:, i] for i in range(COLUMNS)} | {"y": Y})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for begin, end in ((0, 0), (0, 40), (0, 0), (40, ROWS), (0, 0)):
            writer.write_table(table.slice(begin, end - begin))
    return path


def mapped(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return tmp_path / "x.npy", str(tmp_path / "y.npy")


def zipped(tmp_path):
    np.savez(tmp_path / "both.npz", x=X, y=Y)
    return tmp_path / "both.npz"


def folder(tmp_path):
    (tmp_path / "table").mkdir()
    write_parquet(tmp_path / "table" / "a.parquet", X[:50], Y[:50])
    write_parquet(tmp_path / "table" / "b.parquet", X[50:], Y[50:])
    return tmp_path / "table"


def loader(_):
    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(tensors, batch_size=8)


class Batches:
    """An iterable of batches of different sizes, some without rows."""

    def __iter__(self):
        for begin, end in itertools.pairwise((0, 7, 7, 30, 31, ROWS)):
            yield {"x": X[begin:end], "y": Y[begin:end]}


SOURCES = {
    "arrays": lambda _: blr.stream((X, Y), buffer=16),
    "one piece": lambda _: blr.stream((X, Y)),
    "JAX and torch": lambda _: blr.stream((jnp.asarray(X), torch.tensor(Y)), buffer=16),
    "memory maps": lambda path: blr.stream(mapped(path), buffer=16),
    "NPZ": lambda path: blr.stream(zipped(path), target="y", buffer=16),
    "Parquet": lambda path: blr.stream(write_parquet(path / "a.parquet"), target="y", buffer=16),
    "large row groups": lambda path: blr.stream(write_parquet(path / "a.parquet", group_rows=60), target="y", buffer=7),
    "empty row groups": lambda path: blr.stream(with_empty_groups(path / "a.parquet"), target="y", buffer=16),
    "a folder": lambda path: blr.stream(folder(path), target="y", buffer=16),
    "a pattern": lambda path: blr.stream(f"{folder(path)}/*.parquet", target="y", buffer=16),
    "a DataLoader": lambda path: blr.stream(loader(path), buffer=16),
    "a function": lambda path: blr.stream(lambda epoch: loader(path), rows=ROWS, buffer=16),
}


@pytest.fixture(params=SOURCES)
def stream(request, tmp_path):
    return SOURCES[request.param](tmp_path)


def test_blocks_are_all_rows_in_order_again_and_again(stream):
    assert stream.rows == ROWS
    for size in (1, 10, 50, ROWS, 1000):
        blocks = list(stream.blocks(size))
        assert [rows_of(block) for block in blocks[:-1]] == [min(size, ROWS)] * (len(blocks) - 1)
        x, y = (np.concatenate(leaves) for leaves in zip(*blocks, strict=True))
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
        assert x.dtype == np.float64


def test_head_is_the_first_rows(stream):
    x, y = stream.head(5)
    np.testing.assert_array_equal(x, X[:5])
    np.testing.assert_array_equal(y, Y[:5])


def test_an_epoch_has_every_row_once_and_an_order_of_its_own(stream):
    orders = []
    for epoch in range(3):
        batches = list(stream.batches(10, seed=7, epoch=epoch))
        assert [rows_of(batch) for batch in batches] == [10] * 10 + [3]
        for x, y in batches:
            np.testing.assert_array_equal(x, X[y])
        orders.append(np.concatenate([y for _, y in batches]))
        assert sorted(orders[-1]) == list(Y)
    assert len({tuple(order) for order in [*orders, Y]}) == 4
    again = np.concatenate([y for _, y in stream.batches(10, seed=7, epoch=2)])
    np.testing.assert_array_equal(again, orders[2])
    other = np.concatenate([y for _, y in stream.batches(10, seed=8, epoch=2)])
    assert not np.array_equal(other, orders[2])


def test_an_epoch_can_begin_with_any_batch(stream):
    whole = [y for _, y in stream.batches(10, seed=3, epoch=1)]
    for start in (1, 2, 5, 10):
        late = [y for _, y in stream.batches(10, seed=3, epoch=1, start=start)]
        assert [list(y) for y in late] == [list(y) for y in whole[start:]]


@pytest.mark.parametrize("per_epoch", [11, 10])
@pytest.mark.parametrize("size", [4, 25])
def test_groups_are_the_batches_of_the_epochs(stream, size, per_epoch):
    """With 11 batches an epoch has a last one of 3 rows; with 10 that one is left out."""
    expected = [y for epoch in range(3) for _, y in itertools.islice(stream.batches(10, epoch=epoch), per_epoch)]
    for first in (0, 10, 12):
        made = groups(stream, 10, per_epoch, size, 0, first)
        batches = []
        for group in itertools.islice(made, 1 + 12 // size):
            assert group.first == first + len(batches)
            rows = group.rows[1].reshape(size, 10)
            batches += [list(batch[:valid]) for batch, valid in zip(rows, group.valid, strict=True)]
        made.close()
        wanted = [list(y) for y in expected[first : first + len(batches)]]
        assert batches[: len(wanted)] == wanted
    ended = list(groups(stream, 10, per_epoch, size, 0, 3, 3 + size + 1))
    assert sum(np.count_nonzero(group.valid) for group in ended) >= size + 1
    assert len(ended) <= 2


def test_no_thread_is_left(stream):
    before = threading.active_count()
    blocks = stream.blocks(10)
    next(blocks)
    blocks.close()
    batches = stream.batches(10)
    next(batches)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
    forgotten = stream.blocks(5)
    next(forgotten)
    threads = [thread for thread in threading.enumerate() if thread.name == "bayesrule reads ahead"]
    del forgotten
    for thread in threads:
        thread.join(10)
    assert threading.active_count() == before


def test_a_window_mixes_pieces_of_all_data():
    """Sorted rows: a batch of a stream with a buffer of a tenth has rows of many places, and not of one."""
    rows = 20_000
    stream = blr.stream((np.arange(rows),), buffer=rows // 10)
    spread = [np.ptp(y) for (y,) in stream.batches(100)]
    assert min(spread) > rows / 2
    y = np.concatenate([y for (y,) in stream.batches(100)])
    # The mean distance between a row's place and its number is a third of all rows where the order is random.
    assert abs(np.mean(np.abs(y - np.arange(rows))) / (rows / 3) - 1) < 0.1


def test_memory_is_bounded_by_the_buffer(tmp_path, monkeypatch):
    """No array that reading allocates has more rows than the buffer, or than a block."""
    path = write_parquet(tmp_path / "a.parquet", np.zeros((5000, 3)), np.arange(5000), group_rows=1000)
    sizes, empty = [], np.empty
    monkeypatch.setattr(np, "empty", lambda shape, *rest, **how: sizes.append(shape) or empty(shape, *rest, **how))
    stream = blr.stream(path, target="y", buffer=300)
    assert sum(rows_of(batch) for batch in stream.batches(50)) == 5000
    assert sum(rows_of(block) for block in stream.blocks(200)) == 5000
    rows = [shape[0] if isinstance(shape, tuple) else shape for shape in sizes]
    assert max(rows) == 300


# Parquet.


def test_columns_by_name(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", w=np.arange(ROWS) / ROWS, flag=Y % 2 == 0)
    stream = blr.stream(path, columns={"y": "y", "x": ["x2", "x0"], "flag": "flag"}, weights="w", dtype=np.float32)
    (block,) = stream.blocks(ROWS)
    assert isinstance(block, blr.Weighted)
    np.testing.assert_array_equal(block.examples["x"], X[:, [2, 0]].astype(np.float32))
    np.testing.assert_array_equal(block.examples["y"], Y)
    np.testing.assert_array_equal(block.weights, (np.arange(ROWS) / ROWS).astype(np.float32))
    kinds = jax.tree.map(lambda x: x.dtype.name, block.examples)
    assert kinds == {"x": "float32", "y": "int64", "flag": "bool"}
    everything = blr.stream(path, target="y", weights="w")
    assert everything.head(1).examples[0].shape == (1, COLUMNS + 1)


def test_partitions_of_a_folder_are_columns(tmp_path):
    for year in (1, 2):
        (tmp_path / f"year={year}").mkdir()
        write_parquet(tmp_path / f"year={year}" / "part.parquet")
    (block,) = blr.stream(tmp_path, columns=["x0", "year"], target="y").blocks(1000)
    np.testing.assert_array_equal(block[0][:, 1], np.repeat([1.0, 2.0], ROWS))
    np.testing.assert_array_equal(block[0][:, 0], np.tile(X[:, 0], 2))


def test_other_types_of_numbers(tmp_path):
    table = {
        "small": pa.array([1, 2, 3], pa.int8()),
        "half": pa.array(np.array([1, 2, 3], np.float16), pa.float16()),
        "money": pa.array([1, 2, 3], pa.int32()).cast(pa.decimal128(20, 3)),
        "flag": pa.array([True, False, True]),
    }
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    (block,) = blr.stream(tmp_path / "a.parquet").blocks(3)
    np.testing.assert_array_equal(block, [[1, 1, 1, 1], [2, 2, 2, 0], [3, 3, 3, 1]])


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array(["a"] * ROWS), "Column 'more'.* type string.*columns="),
        (pa.array([None, *range(ROWS - 1)]), "Column 'more'.* missing values.*drop those rows"),
        (pa.array([0] * ROWS, pa.timestamp("s")), "Column 'more'.* type timestamp"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_the_column(tmp_path, column, says):
    path = write_parquet(tmp_path / "a.parquet", more=column)
    with pytest.raises(ValueError, match=says):
        list(blr.stream(path, target="y").blocks(10))
    assert blr.stream(path, columns=["x0"], target="y").rows == ROWS


def test_a_file_with_other_columns_is_named(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", X[:, :2])
    with pytest.raises(ValueError, match=r"b\.parquet has no column 'x2'"):
        list(blr.stream(tmp_path, target="y").blocks(10))
    with pytest.raises(ValueError, match="no column 'z'; its columns are 'x0'"):
        blr.stream(tmp_path / "a.parquet", target="z")
    with pytest.raises(ValueError, match="No file matches"):
        blr.stream(tmp_path / "*.none")
    with pytest.raises(FileNotFoundError, match=r"There is no .*c\.parquet"):
        blr.stream(tmp_path / "c.parquet")


def test_a_table_without_rows(tmp_path):
    write_parquet(tmp_path / "a.parquet", X[:0], Y[:0])
    with pytest.raises(ValueError, match="has no rows"):
        blr.stream(tmp_path / "a.parquet", target="y")


# Arrays.


def test_npz_by_name(tmp_path):
    stream = blr.stream(zipped(tmp_path))
    assert isinstance(stream, ArrayStream)
    assert all(isinstance(leaf, np.memmap) for leaf in stream.leaves)
    assert set(stream.head(2)) == {"x", "y"}
    weighted = blr.stream(zipped(tmp_path), columns=("x",), weights="y").head(2)
    np.testing.assert_array_equal(weighted.weights, [0, 1])
    with pytest.raises(ValueError, match="no array 'z'"):
        blr.stream(zipped(tmp_path), target="z")
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    with pytest.raises(ValueError, match=r"compressed.*np\.savez"):
        blr.stream(tmp_path / "packed.npz")


def test_a_column_major_npz(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(X))
    (block,) = blr.stream(tmp_path / "a.npz").blocks(ROWS)
    np.testing.assert_array_equal(block["x"], X)


def test_changes_in_a_private_map_survive(tmp_path):
    np.save(tmp_path / "x.npy", X)
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[:] = 7.0
    assert all((block == 7.0).all() for _ in range(2) for block in blr.stream(changed).blocks(10))


def test_what_cannot_be_a_stream():
    with pytest.raises(ValueError, match="cannot be made of a int"):
        blr.stream(3)
    with pytest.raises(ValueError, match="same number of rows"):
        blr.stream((X, Y[:5]))
    with pytest.raises(ValueError, match="leave count= out"):
        blr.stream(blr.Weighted(X, np.ones(ROWS), 5))
    with pytest.raises(ValueError, match="rows= is for iterables"):
        blr.stream(X, rows=ROWS)
    with pytest.raises(ValueError, match="name the columns of a table"):
        blr.stream(X, target="y")
    with pytest.raises(ValueError, match="dtype= is for Parquet"):
        blr.stream(X, dtype=np.float32)
    with pytest.raises(ValueError, match="type <U1"):
        blr.stream(np.array(["a", "b"]))


def test_one_row():
    stream = blr.stream((X[:1], Y[:1]))
    assert [rows_of(batch) for batch in stream.batches(1)] == [rows_of(block) for block in stream.blocks(9)] == [1]


# Iterables.


def test_batches_of_any_sizes():
    stream = blr.stream(Batches(), buffer=20)
    assert stream.rows == ROWS
    np.testing.assert_array_equal(np.concatenate([block["y"] for block in stream.blocks(10)]), Y)
    assert sorted(i for batch in stream.batches(10) for i in batch["y"]) == list(Y)


def test_a_generator_is_refused():
    with pytest.raises(ValueError, match=r"can be iterated once.*lambda epoch"):
        blr.stream((batch for batch in Batches()), rows=ROWS)


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1])
def test_a_wrong_number_of_rows_is_an_error(rows):
    stream = blr.stream(Batches(), rows=rows)
    with pytest.raises(ValueError, match=f"said to have rows={rows}"):
        list(stream.batches(10))
    with pytest.raises(ValueError, match=f"said to have rows={rows}"):
        list(stream.blocks(10))


def test_batches_of_other_shapes_are_an_error():
    source = lambda epoch: [X[:5], X[5:9, :2]]
    with pytest.raises(ValueError, match="need the same arrays"):
        blr.stream(source)


def test_the_epoch_is_told():
    class Source:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([np.full(4, self.epoch)])

    stream = blr.stream(Source(), rows=4)
    assert [list(batch) for batch in stream.batches(4, epoch=3)] == [[3] * 4]


def test_an_error_of_the_source_arrives_as_it_is():
    def broken(epoch):
        yield X[:10]
        raise OSError("the disk is gone")

    stream = IterableStream(lambda epoch: broken(epoch), rows=ROWS, buffer=1)
    for read in (stream.blocks, stream.batches):
        before = threading.active_count()
        with pytest.raises(OSError, match="the disk is gone") as caught:
            list(read(10))
        assert any(frame.name == "broken" for frame in caught.traceback)
        assert threading.active_count() == before


def test_row_groups_in_parts(tmp_path):
    """Record batches smaller than a row group, and a start in the middle of one."""
    stream = ParquetStream(write_parquet(tmp_path / "a.parquet", group_rows=60), target="y", buffer=7)
    stream._part_rows = 4
    assert list(np.concatenate([y for _, y in stream.blocks(9)])) == list(Y)
    whole = [list(y) for _, y in stream.batches(10)]
    assert [list(y) for _, y in stream.batches(10, start=7)] == whole[7:]
