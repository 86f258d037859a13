"""A file to predict is read as the file of the training was; where it is written otherwise, an error says where."""

import gzip
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.runs import store
from bayesrule.runs.predict import read_like_training
from bayesrule.runs.train import train
from bayesrule.tables.options import ReadingOptions
from bayesrule.tables.reading import read
from bayesrule.tables.tables import InputError

HEADER = "amount;weight;day;zip;paid;rate"
ROWS = [
    f"{place % 5 + 1}.{place:03d},50;{place % 7},5 kg;{place % 28 + 1:02d}/03/2024;0{place % 3 + 1};"
    f"{'ja' if place % 2 else 'nein'};{place % 4},25 %;{place * 37 % 11},5"
    for place in range(40)
]
TRAINING = "\n".join([f"{HEADER};y", *ROWS, ""])
ROW = "1.234;2 kg;03/04/2024;01;ja;5 %"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    (folder / "train.csv").write_text(TRAINING)
    config = {"target": "y", "missing": ["lost"]}
    trained = train(read(folder / "train.csv", ReadingOptions.from_config(config)), config)
    store.save(trained, folder / "run")
    return blr.load(folder / "run")


def rows(run, folder, text, **options):
    path = folder / "new.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_like_training(run, path, ReadingOptions.from_config(options))


@pytest.mark.extended
def test_what_is_open_in_the_new_file_is_as_in_training(run, tmp_path):
    """By themselves 1.234 and 03/04/2024 have two readings, 01 is a number, and `lost` is a word."""
    table = rows(run, tmp_path, f"{HEADER}\n{ROW}\nlost;?;04/03/2024;02;nein;lost\n")
    np.testing.assert_equal(table.columns["amount"].numbers, [1234, np.nan])
    np.testing.assert_equal(table.columns["weight"].numbers, [2, np.nan])
    april, march = (float(np.datetime64(day).astype(int)) for day in ("2024-04-03", "2024-03-04"))
    np.testing.assert_equal(table.columns["day"].numbers, [april, march])
    assert table.columns["zip"].levels == ("01", "02")
    predictions = run.predict(table)
    assert np.all(np.isfinite(predictions["prediction"]))


def test_other_orders_columns_files_and_spellings(run, tmp_path):
    names, cells = HEADER.split(";"), ROW.split(";")
    usual = run.predict(rows(run, tmp_path, f"{HEADER}\n{ROW}\n"))
    reordered = ";".join(reversed(names)) + ";extra\n" + ";".join(reversed(cells)) + ";1.234\n"
    utf16 = f"{HEADER}\n{ROW}\n".encode("utf-16")
    for text in (
        reordered,
        utf16,
        gzip.compress(reordered.encode()),
        f"{HEADER}\n{ROW.replace('ja', 'TRUE').replace(' kg', '')}\n",
        f"{HEADER}\n{ROW.replace('1.234', '1.234,00').replace(' %', '%')}\n".replace(";", "\t"),
    ):
        assert run.predict(rows(run, tmp_path, text)) == usual
    frame = {"amount": [1234.0], "weight": [2], "day": ["03/04/2024"], "zip": ["01"], "paid": [True], "rate": ["5 %"]}
    assert run.predict(frame) == usual


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.234", "1234.50", r"'1234\.50' in line 2, and in training its decimal mark was a comma: say --decimal \."),
        ("1.234", "many", "'many' in line 2, which is not a number as in training.*--missing many"),
        ("2 kg", "2 g", "'2 g' in line 2, and in training its numbers were in kg"),
        ("03/04/2024", "2024-04-03", "'2024-04-03' in line 2, which is not a date .day before month.*--date-format"),
        ("03/04/2024", "03/31/2024", "'03/31/2024' in line 2, which is not a date"),
        ("1.234", "€5", "'€5' in line 2, and in training its numbers were without a unit"),
        ("weight", "Weight", "has no column 'weight'.*Is it 'Weight'?"),
        ("weight;day", "a;b", "has no columns 'weight', 'day'"),
        ("5 %", "5 %;;7", r"line 2 \(1.234;.* has 8 columns where the header, line 1, has 6"),
    ],
)
def test_what_is_written_otherwise_is_refused(run, tmp_path, old, new, message):
    with pytest.raises(InputError, match=message):
        rows(run, tmp_path, f"{HEADER}\n{ROW}\n".replace(old, new, 1))


def test_options_are_for_the_new_file(run, tmp_path):
    row = "1,234.50;2 kg;04/03/2024;01;ja;5 %"
    table = rows(run, tmp_path, f"{HEADER}\n{row}\n", decimal=".", date_format="%m/%d/%Y", missing=["gone"])
    assert table.columns["amount"].numbers.tolist() == [1234.5]
    assert table.columns["day"].numbers.tolist() == [float(np.datetime64("2024-04-03").astype(int))]
    new = tmp_path / "new.csv"
    arguments = ["predict", str(tmp_path / "run"), str(new)]
    store.save(run, tmp_path / "run")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "--decimal ." in refused.stderr
    told = CliRunner().invoke(app, [*arguments, "--decimal", ".", "--date-format", "%m/%d/%Y", "--missing", "gone"])
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("prediction,std,low,high")


def test_whole_numbers_of_the_training_follow_its_other_columns(tmp_path):
    """A column without any mark in training has points between thousands in a file of decimal commas."""
    formats = {"a": {"kind": "number"}, "b": {"kind": "number", "decimal": ","}}
    (tmp_path / "new.csv").write_text("a;b\n1.234;7\n")
    assert read(tmp_path / "new.csv", None, formats).columns["a"].numbers == [1234]
    with pytest.raises(InputError, match=r"'1\.234' in line 2 .*--decimal"):
        read(tmp_path / "new.csv", None, {"a": {"kind": "number"}}, only=["a"])


def test_a_level_that_was_not_there_is_counted(run, tmp_path):
    assert run.unseen(rows(run, tmp_path, f"{HEADER}\n{ROW}\n".replace("01;", "77;"))) == {"zip": 1}


def test_runs_of_earlier_versions_say_what_columns_are_only(run, tmp_path):
    formats = run.summary.pop("formats")
    try:
        text = f"{HEADER}\n{ROW}\n7,5;3 kg;31/03/2024;02;nein;5 %\n"
        table = rows(run, tmp_path, text.replace(" kg", "").replace(" %", ""))  # Units were text to them.
    finally:
        run.summary["formats"] = formats
    assert table.columns["amount"].numbers.tolist() == [1234, 7.5]
    assert table.columns["zip"].levels == ("01", "02")


@pytest.mark.extended
def test_what_was_guessed_is_printed_and_in_the_report(tmp_path):
    (tmp_path / "train.csv").write_text(TRAINING)
    arguments = ["fit", str(tmp_path / "train.csv"), "--out", str(tmp_path / "run"), "--column", "paid=skip"]
    result = CliRunner().invoke(app, [*arguments, "--missing", "lost"])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "run" / "report.html").read_text()
    for guess in (
        "with decimal commas, with points between thousands",
        "in kg",
        "day before month",
        "category of codes",
    ):
        assert guess in result.stdout
        assert guess in page
    for name in HEADER.split(";"):
        assert re.search(rf"^  .*\b{name}\b", result.stdout, re.MULTILINE)
    assert "missing: [lost]" in page
    assert blr.load(tmp_path / "run").config["columns"] == {"paid": "skip"}


def test_the_sheet_of_the_training_is_read_where_it_is_there(run, tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    row = [1234.0, 2.0, "03/04/2024", "01", "ja", 5.0]
    book = openpyxl.Workbook()
    book.worksheets[0].append(["made", "today"])
    for title, cells in {"old": [0.0, *row[1:]], "new": row}.items():
        sheet = book.create_sheet(title)
        sheet.append(HEADER.split(";"))
        sheet.append(cells)
    book.save(tmp_path / "new.xlsx")
    read_amount = lambda **said: (
        read_like_training(run, tmp_path / "new.xlsx", ReadingOptions.from_config(said)).columns["amount"].numbers
    )
    with pytest.raises(InputError, match=r"no rows.*the sheet 'Sheet' is read, of .* \(--sheet chooses another"):
        read_amount()
    assert read_amount(sheet="new") == [1234]
    run.config["sheet"] = "old"
    try:
        assert read_amount() == [0]
        assert read_amount(sheet="3") == [1234]
    finally:
        del run.config["sheet"]
