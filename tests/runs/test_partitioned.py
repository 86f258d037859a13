"""Tables of Parquet files in Dask's partitions: a sample decides, all rows are fitted."""

import dask
import numpy as np
import pandas as pd
import pytest

from bayesrule.cli.cluster import connect
from bayesrule.estimators import LogisticRegression
from bayesrule.runs import partitioned
from bayesrule.runs.train import train
from bayesrule.tables.options import ReadingOptions
from bayesrule.tables.tables import InputError

ROWS = 400
# Dask 2026.8 calls pandas 3 in a way that pandas announces to end.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("table"), np.random.default_rng(0)
    frame = pd.DataFrame({name: random.normal(size=ROWS) for name in "ab"})
    frame["kind"] = random.choice(["u", "v"], ROWS)
    score = frame.a - 2 * frame.b + (frame.kind == "u")
    frame["y"] = np.where(random.uniform(size=ROWS) < 1 / (1 + np.exp(-score)), "yes", "no")
    frame.loc[3, "y"] = None  # a row without a target is left out
    for number, first in enumerate(range(0, ROWS, 150)):
        frame[first : first + 150].to_parquet(folder / f"part{number}.parquet", index=False)
    return folder, frame


def test_a_run_is_fitted_to_all_rows_that_are_not_held_out(files, monkeypatch):
    folder, frame = files
    monkeypatch.setattr(partitioned, "SAMPLE_ROWS", 100)
    with dask.config.set(scheduler="synchronous"):
        table = partitioned.read_partitioned(f"{folder}/*.parquet", ReadingOptions())
        assert table.rows == ROWS
        assert table.sample.rows == 100
        config = {"target": "y", "seed": 0, "params": {"prior_precision": 1.0}, "recipe": "laplace"}
        run = train(table.sample, config, partitions=table)
    held_out = np.sort(np.random.default_rng(0).permutation(ROWS)[:100])[run.test["row"]]
    assert run.summary["rows"] == ROWS
    rest = frame.drop(index=held_out).dropna()
    by_name = {column["name"]: column for column in run.summary["columns"]}
    inputs = [(rest[name] - by_name[name]["mean"]) / by_name[name]["std"] for name in "ab"]
    inputs += [rest.kind == level for level in by_name["kind"]["levels"]]
    model = LogisticRegression(prior_precision=1.0, recipe="laplace").fit(np.column_stack(inputs), rest.y == "yes")
    np.testing.assert_allclose(run.estimator.coef_, model.coef_, rtol=1e-9)
    assert run.metrics["model"]["accuracy"] > run.metrics["baseline"]["accuracy"]


def test_mistakes(files, tmp_path):
    with pytest.raises(InputError, match="There is no Parquet file"):
        partitioned.read_partitioned(f"{tmp_path}/*.parquet", ReadingOptions())
    for address in ("local:x", "ftp://somewhere"):
        with pytest.raises(InputError, match="--cluster"), connect(address):
            pass
    with pytest.raises(InputError, match="--tls-ca must name a file"), connect("tls://host:1", tls_ca=tmp_path):
        pass
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="must begin with tls://"), connect("tcp://host:1", file, file, file):
        pass


@pytest.mark.extended
def test_the_command_line(files, tmp_path):
    from typer.testing import CliRunner

    from bayesrule.cli import app

    arguments = [
        "fit",
        f"{files[0]}/*.parquet",
        "--target",
        "y",
        "--cluster",
        "local:1",
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "report.html").is_file()
