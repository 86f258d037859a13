"""Warnings about the data: found where the truth is known, and silent on ordinary tables."""

import numpy as np
import pytest

from bayesrule.runs.data_checks import describe_new_rows, find_warnings
from bayesrule.runs.train import encode_target, split
from bayesrule.tables.datasets import DATASETS
from bayesrule.tables.encoding import Encoding
from bayesrule.tables.tables import Column, Table
from bayesrule.tables.tasks import guess_task


def check(table, target, seed=0):
    """The warnings of a table, as (kind, column), with the split that a run has."""
    classes, y = encode_target(table.columns[target], guess_task(table.columns[target])[0])
    train, test = split(table.rows, {"test_size": 0.2, "seed": seed}, y if classes else None)
    names = [name for name in table.columns if name != target]
    columns = Encoding.fit(table.take(train), names).columns
    return [(each["kind"], each["column"]) for each in find_warnings(table, target, columns, y, classes, train, test)]


def table(**columns):
    text = lambda values: np.asarray(values).dtype.kind in "US"
    make = lambda name, values: (
        Column.of_text(name, list(values)) if text(values) else Column(name, numbers=np.asarray(values, float))
    )
    return Table({name: make(name, values) for name, values in columns.items()}, "made up")


def clean(rng, rows=300, **more):
    """Three columns, one of them skewed, a category, and a target that depends on two of them, in random order."""
    a, b, c = rng.normal(size=rows), np.exp(rng.normal(size=rows)), rng.integers(0, 40, rows)
    town = rng.choice(["Bern", "Rome", "Oslo"], rows)
    y = a + np.log(b) + (town == "Rome") + rng.normal(size=rows)
    return {"a": a, "b": b, "c": c, "town": town, **more, "y": y}


# Leaks.


@pytest.mark.parametrize("leak", ["multiple", "square", "rounded", "label"])
def test_a_column_that_gives_a_number_away_is_found(leak):
    columns = clean(np.random.default_rng(0))
    y = columns.pop("y")
    if leak == "label":  # The tariff of a town, and a few cents.
        y = 2 * np.clip(np.round(y / 2), -1, 1) + 0.05 * np.sin(np.arange(300.0))
    values = {
        "multiple": 1.19 * y + 3,
        "square": (y - y.min()) ** 2,
        "rounded": np.round(10 * y),
        "label": np.array([f"tariff {np.round(v)}" for v in y]),
    }[leak]
    assert check(table(**columns, invoice=values, y=y), "y") == [("leak", "invoice")]


def test_a_column_that_gives_a_class_away_is_found():
    rng = np.random.default_rng(1)
    columns = clean(rng)
    kind = np.where(columns.pop("y") > 0, "yes", "no")
    code = np.where(kind == "yes", 2.0, 1.0)
    code[0] = 3.0 - code[0]  # one mistake
    day = np.where(kind == "yes", rng.uniform(5, 9, 300), rng.uniform(0, 5, 300))
    assert check(table(**columns, kind=kind, code=code), "kind") == [("leak", "code")]
    assert check(table(**columns, kind=kind, status=np.where(kind == "yes", "paid", "open")), "kind") == [
        ("leak", "status")
    ]
    assert check(table(**columns, kind=kind, day=day), "kind") == [("leak", "day")]


def test_a_row_number_of_a_sorted_file_is_a_leak():
    iris = DATASETS["iris"].load()
    numbered = Table({"id": Column("id", numbers=np.arange(150.0)), **iris.columns}, "iris")
    assert ("leak", "id") in check(numbered, "species")
    shuffled = np.random.default_rng(0).permutation(150)
    mixed = Table({"id": Column("id", numbers=np.arange(150.0)), **iris.take(shuffled).columns}, "iris")
    assert check(mixed, "species") == []


def test_a_smooth_course_along_a_counter_is_told_of():
    rng = np.random.default_rng(2)
    day = np.arange(300.0)
    y = np.sin(day / 20) + 0.3 * rng.normal(size=300)
    assert ("order", "day") in check(table(day=day, x=rng.normal(size=300), y=y), "y")


def test_a_strong_column_is_no_leak():
    rng = np.random.default_rng(3)
    x = rng.normal(size=400)
    assert check(table(x=x, z=rng.normal(size=400), y=x + 0.3 * rng.normal(size=400)), "y") == []
    kind = np.where(x + 0.2 * rng.normal(size=400) > 0, "yes", "no")
    assert check(table(x=x, z=rng.normal(size=400), kind=kind), "kind") == []
    rare = np.where(np.arange(400) % 100 == 0, "yes", "no")  # Almost all rows are of one class: no column is perfect.
    assert check(table(x=x, z=rng.normal(size=400), kind=rare), "kind") == []


# Copies, outliers, drift.


def test_copies_on_both_sides_of_the_split_are_found():
    columns = clean(np.random.default_rng(4), 200)
    doubled = {name: np.concatenate([values, values[:60]]) for name, values in columns.items()}
    assert ("copies", "") in check(table(**doubled), "y")
    few = {name: np.concatenate([values, values[:1]]) for name, values in columns.items()}
    assert check(table(**few), "y") == []


@pytest.mark.parametrize(("value", "count"), [(999, 1), (-9999, 12), (650, 2)])
def test_values_that_stand_for_something_else_are_found(value, count):
    rng = np.random.default_rng(5)
    age = rng.integers(18, 90, 300).astype(float)
    age[rng.choice(300, count, replace=False)] = value
    assert check(table(**clean(rng, age=age)), "y") == [("outliers", "age")]


def test_a_column_that_moves_along_the_file_is_found():
    rng = np.random.default_rng(6)
    sensor = rng.normal(size=300) + np.linspace(0, 2, 300)
    assert check(table(**clean(rng, sensor=sensor)), "y") == [("drift", "sensor")]


def test_held_out_rows_that_differ_are_found():
    rng = np.random.default_rng(7)
    columns = table(**clean(rng))
    y = np.asarray(columns.columns["y"].numbers)
    train, test = split(300, {"test_size": 0.2, "seed": 0})
    moved = np.asarray(columns.columns["a"].numbers).copy()
    moved[test] += 1.0
    columns.columns["a"] = Column("a", numbers=moved)
    described = Encoding.fit(columns.take(train), ["a", "b", "c", "town"]).columns
    found = find_warnings(columns, "y", described, y, [], train, test)
    assert [(each["kind"], each["column"]) for each in found] == [("drift", "a")]


def test_a_sorted_file_does_not_drift():
    rng = np.random.default_rng(8)
    columns = clean(rng)
    order = np.argsort(columns["b"])
    assert check(table(**{name: values[order] for name, values in columns.items()}), "y") == []


@pytest.mark.extended
def test_ordinary_tables_are_left_in_peace():
    """Of 120 tables without leak, outlier or drift at most 5 are warned of; drift is tested at 1 %."""
    rng = np.random.default_rng(9)
    alarms = 0
    for number in range(120):
        columns = clean(rng, int(rng.choice([60, 150, 400])))
        if number % 2:
            columns["y"] = np.where(columns["y"] > np.quantile(columns["y"], rng.choice([0.5, 0.85])), "yes", "no")
        alarms += bool(check(table(**columns), "y", number))
    assert alarms <= 5


def test_the_embedded_data_sets():
    """Known truths: the flow of the Nile fell in 1898, disasters in mines became rare about 1890; hue falls within each
    grower's wines (rank correlation −0.37, five standard errors)."""
    found = {name: check(entry.load(), entry.target) for name, entry in DATASETS.items()}
    assert found == {
        "breast_cancer": [],
        "iris": [],
        "wine": [("drift", "hue")],
        "digits": [],
        "diabetes": [],
        "coal": [("drift", "disasters")],
        "nile": [("drift", "flow")],
    }


def test_new_rows_outside_the_training_range_are_told_of():
    columns = [
        {"name": "a", "used": True, "min": 0.0, "max": 10.0},
        {"name": "b", "used": False, "min": 0.0, "max": 1.0},
    ]
    new = table(a=[5.0, 10.5, 40.0], b=[9.0, 9.0, 9.0])
    sentences = describe_new_rows(columns, new)
    assert len(sentences) == 1
    assert sentences[0].startswith("1 value of 'a' lies outside the range of the training rows, 0 to 10")
