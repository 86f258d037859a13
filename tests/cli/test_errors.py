"""A mistake of the user is reported in one line with exit code 2, and leaves no files behind."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from bayesrule.cli import app
from bayesrule.cli.options import NAMES, merge_options

GOOD = "x,y\n" + "".join(f"{i % 7},{(i * 37 % 11) / 3}\n" for i in range(40))


def fit(folder, *arguments):
    return CliRunner().invoke(app, ["fit", *map(str, arguments), "--out", str(folder / "run")])


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, (), "There is no file"),
        (bytes(range(256)) * 9, (), "binary file"),
        ("", (), "is empty"),
        ("x,y\n", (), "header and no rows"),
        ("x,y\n1,2\n", (), "1 row"),
        ("x,y\n" + "1,5\n2,5\n" * 20, (), "same value in every row"),
        ("x,y\n" + "1,inf\n2,5\n" * 20, (), "infinite"),
        ("x,y\n" + "1,\n2,\n" * 20, (), "0 rows"),
        ("x,x\n1,2\n", (), "more than one column named 'x'"),
        (GOOD, ("--target", "z"), "has no column 'z'"),
        (GOOD, ("--task", "ranking"), "no task 'ranking'"),
        (GOOD, ("--model", "forest"), "no model 'forest'"),
        (GOOD, ("--model", "hmm"), "cannot do regression"),
        (GOOD, ("--recipe", "adem"), "knows the recipes"),
        (GOOD, ("--param", "depth=3"), "no parameter 'depth'"),
        (GOOD, ("--param", "depth"), "takes name=value"),
        (GOOD, ("--test-size", "1.5"), "between 0 and 1"),
        (GOOD, ("--seed", "-1"), "not negative"),
        (GOOD, ("--config", "none.yaml"), "There is no file none.yaml"),
        ("name,y\n" + "".join(f"row {i},{i % 2}\n" for i in range(10_000)), (), "No column is left"),
    ],
)
def test_wrong_input(tmp_path, content, arguments, message):
    path = tmp_path / "data.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = set(tmp_path.iterdir())
    result = fit(tmp_path, path, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert "Traceback" not in result.output
    assert set(tmp_path.iterdir()) == before


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "data.csv").write_text(GOOD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    result = fit(tmp_path, tmp_path / "data.csv")
    assert result.exit_code == 2
    assert "is not a run" in result.stderr
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"


def test_debug_shows_where(tmp_path):
    result = fit(tmp_path, tmp_path / "none.csv", "--debug")
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize(
    ("text", "message"), [("targett: y", "'targett'"), ("- 1", "list of options"), ("a: [", "is not YAML")]
)
def test_a_wrong_configuration(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    result = fit(tmp_path, tmp_path / "data.csv", "--config", tmp_path / "run.yaml")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("target: z", (), "has no column 'z'"),
        ("target: z", ("--target", "q"), "has no column 'q'"),
        ("task: ranking", ("--task", "sorting"), "no task 'sorting'"),
        ("model: forest", ("--task", "regression"), "no model 'forest'"),
        ("model: forest", ("--model", "tree"), "no model 'tree'"),
        ("model: forest\nrecipe: sgd", ("--model", "linear", "--recipe", "adem"), "knows the recipes"),
        ("time: z", ("--time", "q"), "no column 'q'"),
        ("seed: -1\ntest_size: 1.5", ("--seed", "3", "--test-size", "0.5", "--target", "q"), "no column 'q'"),
        ("data: none.csv\nout: none/none", ("--target", "q"), "no column 'q'"),
        ("params: {depth: 3, width: 4}", ("--param", "depth=5"), "no parameter 'depth'"),
    ],
)
def test_flags_override_the_configuration(tmp_path, text, flags, message):
    """The mistake of the one that counts is reported, and the other's is not."""
    (tmp_path / "data.csv").write_text(GOOD)
    (tmp_path / "run.yaml").write_text(text)
    result = fit(tmp_path, tmp_path / "data.csv", "--config", tmp_path / "run.yaml", *flags)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_options_come_from_flags_then_the_file_then_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("target: price\nseed: 3\nout: here\nparams: {noise: 0.5, tol: 1}\n")
    flags = dict.fromkeys(NAMES[:-1]) | {"seed": 0, "out": "there"}
    options = merge_options(flags, tmp_path / "run.yaml", ["noise=0.25", "max_iter=7"])
    assert (options["target"], options["seed"], options["out"], options["test_size"]) == ("price", 0, "there", 0.2)
    assert options["params"] == {"noise": 0.25, "tol": 1, "max_iter": 7}
    alone = merge_options(dict.fromkeys(NAMES[:-1]), tmp_path / "run.yaml", [])
    assert (alone["seed"], alone["out"], alone["params"]) == (3, "here", {"noise": 0.5, "tol": 1})


def test_missing_and_foreign_runs(tmp_path):
    invoke = lambda *a: CliRunner().invoke(app, [*map(str, a)])
    assert "is not a run" in invoke("predict", tmp_path / "run", "new.csv").stderr
    assert "no run to resume" in invoke("fit", "--resume", "--out", tmp_path / "run").stderr
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "run.json").write_text(
        json.dumps({"kind": "bayesrule run", "format": 99, "versions": {"bayesrule": "9"}})
    )
    result = invoke("predict", folder, "new.csv")
    assert result.exit_code == 2
    assert "format 99" in result.stderr
    assert "bayesrule 9" in result.stderr
    (folder / "run.json").write_text("{")
    assert "damaged" in invoke("predict", folder, "new.csv").stderr


def test_a_truncated_gzip_file(tmp_path):
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(GOOD.encode())[:-20])
    result = fit(tmp_path, path)
    assert result.exit_code == 2
    assert "damaged" in result.stderr


def test_help_version_and_names():
    invoke = lambda *a: CliRunner().invoke(app, [*a])
    shown = invoke("--help").output
    assert all(command in shown for command in ("fit", "predict", "table", "gallery", "datasets", "Exit codes"))
    assert "Examples" in invoke("fit", "--help").output
    assert invoke("--version").output.startswith("bayesrule ")
    assert "breast_cancer" in invoke("datasets").output
    assert "--install-completion" in shown
