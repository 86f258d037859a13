"""Files are read as tables, or fail with one line that says why; tables are encoded as matrices."""

import datetime
import gzip
import sys
import zipfile

import numpy as np
import pytest

from bayesrule.tables.datasets import DATASETS, dataset
from bayesrule.tables.encoding import Encoding
from bayesrule.tables.reading import read
from bayesrule.tables.tables import Column, InputError, Table
from bayesrule.tables.tasks import check_task, guess_task

CSV = "age,city,y\n30,Paris,1\n40,,0\n,Rome,1\n"


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def columns(table):
    return {name: column.labels().tolist() for name, column in table.columns.items()}


EXPECTED = {"age": ["30", "40", ""], "city": ["Paris", "", "Rome"], "y": ["1", "0", "1"]}


@pytest.mark.parametrize(
    "text",
    [CSV, CSV.replace(",", ";"), CSV.replace(",", "\t"), "\ufeff" + CSV, CSV.replace("\n", "\r\n")],
    ids=["comma", "semicolon", "tab", "mark", "windows"],
)
def test_csv(tmp_path, text):
    assert columns(read(written(tmp_path / "a.csv", text))) == EXPECTED


def test_a_workbook(tmp_path):
    """Numbers, text, dates, truth values, columns of several types, cells and columns that are empty."""
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.create_sheet("data")
    sheet = book["data"]  # after an empty first sheet
    day = lambda number: datetime.date(2024, 3, number)
    for row in [
        ("age", "city", "day", "paid", "code", None, "y"),
        (30, "Paris", day(1), True, "a1", None, 1.5),
        (None, " ", day(2), False, 7, None, 2),
        (41.5, "Rome", None, True, "n/a", None, -3),
        (None,) * 7,
    ]:
        sheet.append(row)
    book.save(tmp_path / "a.xlsx")
    table = read(tmp_path / "a.xlsx")
    assert columns(Table({n: table.columns[n] for n in ("age", "city", "paid", "code", "y")}, "")) == {
        "age": ["30", "", "41.5"],
        "city": ["Paris", "", "Rome"],
        "paid": ["true", "false", "true"],
        "code": ["a1", "7", ""],
        "y": ["1.5", "2", "-3"],
    }
    days = table.columns["day"].numbers
    assert days[1] - days[0] == 1
    assert np.isnan(days[2])


def test_a_workbook_without_the_extra(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>")
    with pytest.raises(InputError, match="cannot be read as an Excel workbook"):
        read(tmp_path / "a.xlsx")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(InputError, match=r"pip install 'bayesrule\[excel\]', or save it as CSV"):
        read(tmp_path / "a.xlsx")
    with pytest.raises(InputError, match=r"save it as \.xlsx or CSV"):
        read(written(tmp_path / "a.xls", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 50))


def test_gzip_parquet_and_npz(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    assert columns(read(written(tmp_path / "a.csv.gz", gzip.compress(CSV.encode())))) == EXPECTED
    parquet.write_table(
        pa.table({"age": [30, 40, None], "city": ["Paris", None, "Rome"], "y": [True, False, True]}),
        tmp_path / "a.parquet",
    )
    assert columns(read(tmp_path / "a.parquet")) == EXPECTED | {"y": ["true", "false", "true"]}
    np.savez(tmp_path / "a.npz", X=np.arange(6.0).reshape(3, 2), y=np.array(["a", "b", "a"]))
    assert columns(read(tmp_path / "a.npz")) == {"X0": ["0", "2", "4"], "X1": ["1", "3", "5"], "y": ["a", "b", "a"]}


def test_latin_letters_and_dates(tmp_path):
    table = read(written(tmp_path / "a.csv", "day,name\n2024-01-01,Zürich\n2024-01-03,Genève\n".encode("latin-1")))
    assert table.columns["name"].levels == ("Genève", "Zürich")
    assert np.diff(table.columns["day"].numbers).tolist() == [2.0]


def test_numbers_with_a_few_words_among_them(tmp_path):
    rows = "".join(f"{i},{'oops' if i == 7 else i}\n" for i in range(100))
    column = read(written(tmp_path / "a.csv", "i,x\n" + rows)).columns["x"]
    assert column.kind == "number"
    assert np.flatnonzero(column.missing).tolist() == [7]
    assert "oops" in column.note


@pytest.mark.extended
def test_a_type_that_changes_far_down(tmp_path):
    rows = "".join(f"{i},{i}\n" for i in range(200_000)) + "200000,later\n"
    column = read(written(tmp_path / "a.csv", "i,x\n" + rows)).columns["x"]
    assert column.kind == "number"
    assert int(column.missing.sum()) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "is empty"),
        ("a.csv", "  \n", "is empty"),
        ("a.csv", "x,y\n", "header and no rows"),
        ("a.csv", bytes(range(256)) * 40, "binary file"),
        ("a.csv", "x,x,y\n1,2,3\n", "more than one column named 'x'"),
        ("a.csv", "x,y\n1,2\n1,2,3\n", "line 3 .* has 3 columns where the header, line 1, has 2"),
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:20], "damaged"),
        ("a.parquet", b"PAR1" + b"\1" * 50, "cannot be read as Parquet"),
        ("a.npz", b"PK\x03\x04" + b"\1" * 50, "cannot be read as NPZ"),
    ],
)
def test_what_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message) as caught:
        read(written(tmp_path / name, content))
    assert "\n" not in str(caught.value)


def test_a_wrong_path(tmp_path):
    with pytest.raises(InputError, match="There is no file"):
        read(tmp_path / "nothing.csv")
    with pytest.raises(InputError, match="is a directory"):
        read(tmp_path)


def numbers(*values):
    return Column("y", numbers=np.array(values, float))


def test_tasks_are_guessed():
    rng = np.random.default_rng(0)
    assert guess_task(numbers(0, 1, 1))[0] == "binary"
    assert guess_task(numbers(1, 2, 2))[0] == "binary"
    assert guess_task(numbers(*rng.normal(size=50)))[0] == "regression"
    assert guess_task(numbers(*rng.integers(0, 10, 200)))[0] == "classes"
    assert guess_task(numbers(*rng.poisson(2.0, 200)))[0] == "counts"
    assert guess_task(numbers(*rng.integers(25, 346, 400)))[0] == "regression"
    assert guess_task(Column.of_text("y", ["a", "b", "a"]))[0] == "binary"
    assert guess_task(Column.of_text("y", ["a", "b", "c"]))[0] == "classes"


@pytest.mark.parametrize(
    ("task", "target", "message"),
    [
        ("regression", numbers(1, 1, 1), "same value in every row"),
        ("regression", numbers(1, np.inf), "infinite"),
        ("regression", numbers(np.nan, np.nan), "no values"),
        ("regression", Column.of_text("y", ["a", "b"]), "needs numbers"),
        ("binary", numbers(1, 2, 3), "needs two"),
        ("counts", numbers(1, -2), "not counts"),
        ("classes", numbers(*range(200)), "too many for classes"),
    ],
)
def test_targets_that_do_not_suit_a_task(task, target, message):
    with pytest.raises(InputError, match=message):
        check_task(task, target)


def test_an_encoding_is_fitted_to_training_rows():
    table = Table(
        {
            "x": Column("x", numbers=np.array([1.0, 3.0, np.nan, np.inf])),
            "c": Column.of_text("c", ["a", "b", None, "a"]),
            "same": Column("same", numbers=np.ones(4)),
        }
    )
    encoding = Encoding.fit(table, ["x", "c", "same"])
    assert encoding.features == ["x", "c=a", "c=b"]
    np.testing.assert_array_equal(encoding.matrix(table), [[-1, 1, 0], [1, 0, 1], [np.nan, 0, 0], [np.nan, 1, 0]])
    new = Table({"x": Column("x", numbers=np.array([5.0])), "c": Column.of_text("c", ["never seen"])})
    np.testing.assert_array_equal(encoding.matrix(new), [[3, 0, 0]])
    with pytest.raises(InputError, match="has no column 'c'"):
        encoding.matrix(Table({"x": new.columns["x"]}, "new.csv"))


def test_text_that_tells_rows_apart_is_left_out():
    table = Table({"id": Column.of_text("id", [f"row {i}" for i in range(10_000)])})
    with pytest.raises(InputError, match="only tell rows apart"):
        Encoding.fit(table, ["id"])
    many = Column.of_text("c", [f"level {i % 300}" for i in range(10_000)])
    assert len(Encoding.fit(Table({"c": many}), ["c"]).features) == 30


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_match_their_descriptions(name):
    entry = dataset(name)
    table = entry.load()
    assert not table.column(entry.target).missing.any()
    rows = entry.description.split()[0].replace(",", "")
    assert not rows.isdigit() or int(rows) == table.rows
