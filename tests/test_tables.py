"""benchmarks/tables.py: the criteria, the sets by name, and ridge regression beside BayesianRidge on real tables."""

import numpy as np
import pytest

import tables


def judged(name, task, ours, theirs, peer="peer"):
    """A set of which every split has these (NLL, coverage or ECE)."""
    splits = [
        tables.Split(tables.Scores(*a, 1.0), {peer: tables.Scores(*b, 1.0)}, False, False, 0.0)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return tables.Judged(name, task, "linear", 100, 3, splits)


def test_coverage_is_judged_by_points_or_by_standard_errors():
    near = judged("near", "regression", [(1.0, 0.88), (1.0, 0.87)], [(1.0, 0.9)] * 2)
    assert near.is_covered  # within 3 points
    noisy = judged("noisy", "regression", [(1.0, 0.70), (1.0, 0.95)], [(1.0, 0.9)] * 2)
    assert noisy.calibration == pytest.approx((0.825, 0.125))  # 7.5 points away, and a standard error of 12.5
    assert noisy.is_covered
    off = judged("off", "regression", [(1.0, 0.84), (1.0, 0.85)], [(1.0, 0.9)] * 2)
    assert not off.is_covered
    lines, all_hold = tables.summarize([near, noisy, off])
    assert "2 of 3" in lines[0]
    assert lines[0].endswith("not off.")
    assert not all_hold
    assert tables.summarize([near, noisy, noisy, off])[1]


def test_splits_share_rows():
    """Nadeau and Bengio's standard error, of two splits with a test row for every four training rows."""
    one = judged("one", "regression", [(1.0, 0.84), (1.0, 0.86)], [(1.0, 0.9)] * 2)
    shared = one._replace(splits=[split._replace(ratio=0.25) for split in one.splits])
    assert shared.calibration[1] == pytest.approx(0.02 / 2**0.5 * (1 / 2 + 1 / 4) ** 0.5)
    assert shared._replace(plain=True).calibration == one.calibration


def test_comparisons_are_paired():
    # The splits differ by 1 nat, ours and theirs by 0.01 in each of them.
    worse = judged("worse", "classes", [(1.01, 0.05), (2.01, 0.05)], [(1.0, 0.05), (2.0, 0.05)])
    assert worse.is_worse("peer", "nll")
    assert not worse.is_worse("peer", "calibration")
    tie = judged("tie", "classes", [(1.0005, 0.05), (2.0005, 0.05)], [(1.0, 0.05), (2.0, 0.05)])
    assert not tie.is_worse("peer", "nll")
    noise = judged("noise", "classes", [(1.3, 0.05), (1.9, 0.05)], [(1.0, 0.05), (2.0, 0.05)])
    assert not noise.is_worse("peer", "nll")
    assert judged("nan", "classes", [(np.nan, 0.1)] * 2, [(1.0, 0.1)] * 2).is_worse("peer", "nll")
    assert not tables.summarize([worse, tie])[1]


def test_sets_have_names(tmp_path):
    assert tables.parse("linnerud")[0].target == "Weight"
    assert [source.task for source in tables.parse("sklearn:iris")] == ["classes"]
    path = tmp_path / "own.csv"
    path.write_text("a,b,c\n1,x,2.5\n2,,3.5\n")
    (source,) = tables.parse(f"{path}:a:regression")
    assert list(tables.load(source, None).columns) == ["b", "c", "a"]
    assert tables.parse("r:MASS/cats:Hwt") == [tables.Source("r:MASS/cats", "Hwt")]
    with pytest.raises(tables.Unavailable, match="--data"):
        tables.load(tables.Source("npz:uci_boston"), None)


def test_a_set_is_judged_as_bayesrule_fit_does_it():
    (source,) = tables.parse("linnerud")
    result = tables.judge(source, tables.load(source, None), None, 2)
    assert (result.task, result.rows, result.columns) == ("regression", 20, 3)
    assert result.peers() == ["BayesianRidge"]
    assert len(tables.table_of_numbers([result])) == 3
    assert abs(result.difference("BayesianRidge", "nll")[0]) < 0.5  # nats; the same model with other degrees of freedom


@pytest.mark.parametrize("name", ["diabetes", "linnerud", "longley", "stackloss", "engel", "statecrime", "ccard"])
def test_ridge_is_bayesian_ridge_in_any_units(name):
    """Predictions in standard deviations of y. BayesianRidge's evidence knows the intercept: 1/N makes a difference."""
    (source,) = tables.parse(name)
    table = tables.load(source, None)
    columns = [column for column in table.columns.values() if column.name != source.target]
    x = np.column_stack([column.numbers for column in columns if column.numbers is not None])
    x, y = (x - x.mean(axis=0)) / x.std(axis=0), np.asarray(table.columns[source.target].numbers)
    found = tables.compare_ridge(tables.Encoded(x, y, x[::3], y[::3]), seed=0)
    assert max(found.same_mean, found.same_noise) < 1e-6
    assert found.rescaled < 1e-9
    assert found.mean < 2 / len(y)
    assert found.noise < 8 / len(y)
