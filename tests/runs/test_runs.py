"""Runs: interrupted anywhere they end as if they were not; loaded they predict the same; their files run no code."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.runs import score, store, watch
from bayesrule.runs.run import Run
from bayesrule.runs.train import split, train
from bayesrule.tables.tables import Column, InputError, Table


def table(rows=160):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    city = rng.integers(0, 3, rows)
    score = x @ [1.0, -1.0, 0.0] + (city == 1) + 0.5 * rng.normal(size=rows)
    x[rng.random((rows, 3)) < 0.05] = np.nan
    columns = {name: Column(name, numbers=x[:, place]) for place, name in enumerate("abc")}
    columns["city"] = Column.of_text("city", np.array(["Bern", "Rome", None])[city].tolist())
    columns["score"] = Column("score", numbers=score)
    columns["good"] = Column.of_text("good", np.where(score > 0, "yes", "no").tolist())
    columns["visits"] = Column("visits", numbers=rng.poisson(np.exp(0.3 * np.nan_to_num(score))).astype(float))
    return Table(columns, "synthetic")


def make_request(target, *dropped, **options):
    """A table without the columns `dropped`, and the settings of a run on it."""
    columns = {name: column for name, column in table().columns.items() if name not in dropped}
    return Table(columns, "synthetic"), {"target": target, "test_size": 0.25, "seed": 1, "params": {}, **options}


STOCHASTIC = {"recipe": "vogn", "params": {"batch_size": 20, "max_iter": 40, "prior_precision": 1.0}}


class Killed(BaseException):
    pass


@pytest.mark.extended
def test_an_interrupted_run_ends_as_if_it_were_not(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_SAVE_INTERVAL", -1.0)
    data, config = make_request("good", "score", "visits", **STOCHASTIC)
    uninterrupted = train(data, config)
    reports = []

    def kill(report):
        reports.append(report)
        if len(reports) in (2, 4):
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            train(data, config, folder=tmp_path, on_progress=kill)
    resumed = train(data, config, folder=tmp_path, on_progress=reports.append)
    assert reports[2].step > reports[1].step  # It continued, and did not begin again.
    assert resumed.metrics == uninterrupted.metrics
    np.testing.assert_array_equal(resumed.trace["objective"], uninterrupted.trace["objective"])
    np.testing.assert_array_equal(resumed.test["probabilities"], uninterrupted.test["probabilities"])
    jax.tree.map(np.testing.assert_array_equal, resumed.estimator.posterior_, uninterrupted.estimator.posterior_)


@pytest.mark.sampled("good")
@pytest.mark.sampled("good")
@pytest.mark.parametrize("target", ["good", "score"])
def test_a_network_is_watched(target, monkeypatch):
    """A long fit shows its held-out NLL; a tempered posterior has no bound on the evidence to show."""
    monkeypatch.setattr(watch, "_SAVE_INTERVAL", -1.0)
    params = {"hidden_layer_sizes": [4], "max_iter": 30}
    data, config = make_request(target, *{"good", "score", "visits"} - {target}, model="mlp", params=params)
    reports = []
    run = train(data, config, on_progress=reports.append)
    assert not any(report.is_bound for report in reports)
    assert "bound" not in run.trace
    assert reports[-1].heldout == pytest.approx(run.metrics["model"]["nll"])
    assert run.trace["heldout_nll"][-1] == reports[-1].heldout


@pytest.mark.sampled("visits-leave2-counts")
@pytest.mark.parametrize(
    ("target", "leave", "task"),
    [
        ("score", ("good", "visits"), "regression"),
        ("good", ("score", "visits"), "binary"),
        ("visits", ("good", "score"), "counts"),
    ],
)
def test_a_saved_run_predicts_the_same(tmp_path, target, leave, task):
    data, config = make_request(target, *leave, **({"recipe": "laplace"} if task != "regression" else {}))
    run = train(data, config)
    assert run.config["task"] == task
    assert run.metrics["model"]["nll"] < run.metrics["baseline"]["nll"]
    assert {len(values) for values in run.test.values()} == {40}
    assert len(run.influence["influence"]) == 120
    store.save(run, tmp_path / "run")
    loaded = blr.load(tmp_path / "run")
    before, after = run.predict(data), loaded.predict(data)
    assert list(before) == list(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert loaded.metrics == json.loads(json.dumps(run.metrics))
    check_export(loaded, data, before, tmp_path / "numpy")
    np.testing.assert_array_equal(loaded.test["row"], run.test["row"])
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({name: column.labels() for name, column in data.columns.items() if name != target})
    frame[["a", "b", "c"]] = frame[["a", "b", "c"]].apply(pandas.to_numeric)
    from_frame = loaded.predict(frame)
    assert list(from_frame) == list(before)
    with pytest.raises(InputError, match="has no column 'b'"):
        loaded.predict(frame[["a"]])


def check_export(run, data, predictions, folder):
    """The exported model gives the predictions for rows without missing values; how it does so without JAX is tested
    in tests/estimators/test_export.py."""
    spec = importlib.util.spec_from_file_location("exported", run.export("numpy", folder) / "predict.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [column["name"] for column in run.summary["columns"] if column["used"]]
    numbers = [data.columns[name] for name in names if data.columns[name].numbers is not None]
    complete = ~np.any([column.missing for column in numbers], axis=0)  # A missing city is a level of its own.
    values = lambda column: column.labels() if column.numbers is None else column.numbers
    rows = {name: values(data.columns[name])[complete] for name in names}
    found = module.load(folder / "model.npz").predict_columns(rows)
    assert set(predictions) - set(found) <= ({"low", "high"} if run.config["task"] == "counts" else set())
    for name, column in found.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(column, predictions[name][complete], rtol=1e-12, atol=1e-13)
        else:
            np.testing.assert_array_equal(column, predictions[name][complete])


def test_networks_are_not_exported(tmp_path):
    run = Run({"estimator": "MLPClassifier"}, {}, None, None, {})
    with pytest.raises(ValueError, match="--model linear"):
        run.export("numpy", tmp_path)


@pytest.mark.extended
def test_intervals_hold_nine_tenths():
    """Low and high are the 5 % and the 95 % quantile: by SciPy for numbers and for counts, and for their baseline."""
    data, config = make_request("score", "good", "visits", params={"prior_precision": 1.0})
    run = train(data, config)
    ahead, student = run.predict(data), stats.t(run.facts["degrees_of_freedom"])
    for name, quantile in (("low", 0.05), ("high", 0.95)):
        expected = ahead["prediction"] + student.ppf(quantile) * ahead["std"]
        np.testing.assert_allclose(ahead[name], expected, rtol=1e-9, atol=1e-12)

    class Counts:
        def predict(self, x, return_std):
            return np.full(100, 1000.0), np.full(100, 1000.0**0.5)

        def sample_predictive(self, x, count, random_state):
            return np.random.default_rng(random_state).poisson(1000.0, (count, 100))

    counts = score.predict_numbers(Counts(), np.zeros((100, 1)), "counts")
    for name, quantile in (("low", 0.05), ("high", 0.95)):
        # A quantile of 500 draws has the standard error √(p(1 − p)/500)/density.
        error = 0.0097 / stats.norm.pdf(stats.norm.ppf(quantile)) * 1000.0**0.5 / 10
        assert abs(counts[name].mean() - stats.poisson.ppf(quantile, 1000.0)) < 4 * error
    y = np.arange(900, 1100)
    low, high = stats.poisson.ppf([0.05, 0.95], 1000.0)
    coverage = score.score_poisson_baseline(y, 1000.0)["coverage90"]
    assert coverage == pytest.approx(np.mean((y >= low) & (y <= high)), abs=1e-12)
    coverage = score.score_gaussian(np.linspace(-3, 3, 601), 0.0, 1.0)["coverage90"]
    assert coverage == pytest.approx(1.6449 / 3, abs=0.005)


def test_a_sequence_is_forecast(tmp_path):
    result = CliRunner().invoke(
        app,
        ["fit", "nile", "--model", "state-space", "-p", "n_states=1", "-p", "tol=0.1", "-o", f"{tmp_path / 'run'}"],
    )
    assert result.exit_code == 0, result.output
    run = blr.load(tmp_path / "run")
    assert f"bound (nats)       −{-run.facts['bound']:,.4f}" in result.output  # in closed form, without an error
    ahead = run.predict(steps=5)
    assert ahead["time"].tolist() == [1971, 1972, 1973, 1974, 1975]
    assert np.all(np.diff(ahead["std"]) >= 0)
    assert run.metrics["model"]["coverage90"] >= 0.7
    for name, quantile in (("low", 0.05), ("high", 0.95)):
        np.testing.assert_allclose(ahead[name], stats.norm.ppf(quantile, ahead["prediction"], ahead["std"]), rtol=1e-9)
    shown = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "--steps", "3"])
    assert shown.output.splitlines()[0] == "time,prediction,std,low,high"
    assert len(shown.output.splitlines()) == 4


@pytest.mark.extended
def test_a_fit_from_a_file(tmp_path):
    rows = table()
    names = [name for name in rows.columns if name not in ("good", "visits")]
    lines = zip(*(rows.columns[name].labels() for name in names), strict=True)
    text = ",".join(names) + "\n" + "".join(",".join(line) + "\n" for line in lines)
    (tmp_path / "data.csv").write_text(text)
    (tmp_path / "run.yaml").write_text("target: score\nseed: 3\nparams: {noise: 0.25}\n")
    place = tmp_path / "run"
    arguments = ["fit", f"{tmp_path / 'data.csv'}", "--config", f"{tmp_path / 'run.yaml'}", "-o", str(place), "--quiet"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(place / "report.html")
    assert {path.name for path in tmp_path.iterdir()} == {"data.csv", "run.yaml", "run"}
    files = {
        "report.html",
        "posterior.npz",
        "preprocessing.json",
        "manifest.json",
        "filling.npz",
        "run.json",
        "metrics.json",
        "results.npz",
    }
    assert {path.name for path in place.iterdir()} == files
    run = blr.load(place)
    assert run.estimator.noise_ == pytest.approx(0.25)
    assert run.config["seed"] == 3
    assert run.facts["reason"] == "exact"
    out = tmp_path / "predictions.csv"
    assert CliRunner().invoke(app, ["predict", str(place), f"{tmp_path / 'data.csv'}", "-o", str(out)]).exit_code == 0
    assert len(out.read_text().splitlines()) == 161
    again = CliRunner().invoke(app, ["fit", "--resume", "-o", str(place)])
    assert again.exit_code == 0
    assert "is finished" in again.output


def test_a_run_can_name_estimators_only(tmp_path):
    data, config = make_request("score", "good", "visits")
    store.save(train(data, config), tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    description = json.loads(path.read_text())
    for name in ("os.system", "Estimator", "__getattr__"):
        path.write_text(json.dumps(description | {"config": description["config"] | {"estimator": name}}))
        store.write_manifest(tmp_path / "run")
        with pytest.raises(InputError, match="does not exist"):
            blr.load(tmp_path / "run")
    path.write_text(json.dumps(description))
    from bayesrule.fitting.checkpoint import write

    write(tmp_path / "run" / "posterior.npz", {"__class__": 1.0})
    store.write_manifest(tmp_path / "run")
    with pytest.raises(InputError, match="damaged"):
        blr.load(tmp_path / "run")


def test_a_damaged_run_is_named_as_such(tmp_path):
    """One bit of any file, a file that is missing or cut short: an error that names the file, and no prediction."""
    data, config = make_request("score", "good", "visits")
    folder = tmp_path / "run"
    store.save(train(data, config), folder)
    files = sorted(path for path in folder.iterdir())
    assert {path.name for path in files} >= {"run.json", "metrics.json", "preprocessing.json", "manifest.json"}
    rng = np.random.default_rng(0)
    for path in files:
        whole = path.read_bytes()
        flipped = [bytearray(whole) for _ in range(10)]
        for content in flipped:
            content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        for content in [*flipped, whole[: len(whole) // 2], b"", None]:
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(InputError, match=r"damaged|not a run|has the format"):
                blr.load(folder)
            path.write_bytes(whole)
    assert blr.load(folder).config["target"] == config["target"]


def test_rows_are_held_out_by_class():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    train_rows, test_rows = split(160, {"test_size": 0.2, "seed": 0}, labels)
    assert np.bincount(labels[test_rows]).tolist() == [20, 10, 2]
    assert sorted([*train_rows, *test_rows]) == list(range(160))


def test_the_help_is_quick_and_needs_no_jax():
    program = (
        "import sys; from typer.testing import CliRunner; from bayesrule.cli import app;"
        "CliRunner().invoke(app, ['fit', '--help']);"
        "print([m for m in ('jax', 'numpy', 'pyarrow', 'sklearn', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.extended
@pytest.mark.parametrize("killings", [2, pytest.param(10, marks=pytest.mark.extended)])
def test_a_killed_fit_resumes_to_the_same_run(killings, tmp_path):
    """SIGKILL at random moments of a fit: the resumed run equals one that was not interrupted."""
    options = ["breast_cancer", "--recipe", "vogn", "--quiet"]
    options += ["-p", "batch_size=20", "-p", "max_iter=4000", "-p", "prior_precision=1.0"]
    command = [sys.executable, "-m", "bayesrule", "fit"]
    began = time.perf_counter()
    subprocess.run([*command, *options, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    full = time.perf_counter() - began
    reference = blr.load(tmp_path / "whole")
    rng, kills, cut = np.random.default_rng(int(os.environ.get("KILL_SEED", "0"))), 0, 0
    while kills < killings:
        cut += 1
        place, ended = tmp_path / f"cut{cut}", False
        while not ended:
            resuming = (tmp_path / f"cut{cut}.partial" / "request.json").exists()
            arguments = [*command, *(["--resume", "--quiet"] if resuming else options), "--out", str(place)]
            started = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                ended = started.wait(rng.uniform(0.1, 1.0) * full if kills < killings else None) == 0
                assert ended
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGKILL)
                started.wait()
                kills += 1
        actual = blr.load(place)
        assert actual.metrics == reference.metrics
        jax.tree.map(np.testing.assert_array_equal, actual.estimator.posterior_, reference.estimator.posterior_)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", *(f"cut{number + 1}" for number in range(cut))}


def test_every_class_has_training_rows():
    labels = np.repeat([0, 1, 2], [20, 20, 1])
    train_rows, test_rows = split(41, {"test_size": 0.6, "seed": 0}, labels)
    assert set(labels[train_rows]) == {0, 1, 2}
    assert sorted([*train_rows, *test_rows]) == list(range(41))


def test_rows_are_those_of_the_file():
    data, config = make_request("score", "good", "visits")
    numbers = data.columns["score"].numbers.copy()
    numbers[:30] = np.nan
    data.columns["score"] = Column("score", numbers=numbers)
    run = train(data, config)
    np.testing.assert_array_equal(numbers[run.test["row"]], run.test["y"])
    np.testing.assert_allclose(numbers[run.influence["row"]], run.influence["y"])


def test_new_rows_are_read_as_training_rows_were(tmp_path):
    """A category whose values in the new rows are all digits, or true and false, is still a category."""
    rows = ["01,true", "02,false", "A1,unknown"] * 40
    lines = [f"{row},{(place % 3) * 4 + place % 7 / 70}" for place, row in enumerate(rows)]
    (tmp_path / "data.csv").write_text("zip,flag,y\n" + "\n".join(lines) + "\n")
    (tmp_path / "new.csv").write_text("zip,flag\n01,true\n02,false\n07,true\n")
    place = str(tmp_path / "run")
    assert CliRunner().invoke(app, ["fit", str(tmp_path / "data.csv"), "-o", place]).exit_code == 0
    shown = CliRunner().invoke(app, ["predict", place, str(tmp_path / "new.csv")])
    first, second = (float(line.split(",")[0]) for line in shown.stdout.splitlines()[1:3])
    assert (first, second) == pytest.approx((0.0, 4.0), abs=0.2)
    assert "1 value of 'zip' did not occur in training" in shown.stderr


@pytest.mark.extended
def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "data.csv").write_text("x,y\n" + "".join(f"{i % 7},{i % 5 / 3}\n" for i in range(40)))
    for name in ("run.partial", "run.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("precious")
    fit = lambda *more: CliRunner().invoke(app, ["fit", str(tmp_path / "data.csv"), "-o", str(tmp_path / "run"), *more])
    assert "is in the way" in fit().stderr
    (tmp_path / "run.partial" / "thesis.txt").unlink()
    assert fit().exit_code == 0
    assert (tmp_path / "run.old" / "thesis.txt").read_text() == "precious"


def test_a_mistake_does_not_cost_a_checkpoint(tmp_path):
    (tmp_path / "data.csv").write_text("x,y\n" + "".join(f"{i % 7},{i % 5 / 3}\n" for i in range(40)))
    partial = tmp_path / "run.partial"
    partial.mkdir()
    (partial / "request.json").write_text(json.dumps({"data": str(tmp_path / "moved.csv"), "data_stamp": None}))
    (partial / "fit0.npz").write_bytes(b"hours of work")
    invoke = lambda *a: CliRunner().invoke(app, ["fit", *a, "-o", str(tmp_path / "run")])
    for arguments in ([str(tmp_path / "typo.csv")], [str(tmp_path / "data.csv"), "--target", "z"], ["--resume"], []):
        assert invoke(*arguments).exit_code == 2
        assert (partial / "fit0.npz").exists()
    (partial / "pid").write_text(str(os.getppid()))
    assert "Another fit is writing" in invoke(str(tmp_path / "data.csv")).stderr


def test_an_unfinished_run_of_an_earlier_version_is_resumed(tmp_path):
    """It called its files asked.json and process, and the state of the data file "state"."""
    data = tmp_path / "data.csv"
    data.write_text("x,y\n" + "".join(f"{i % 7},{i % 5 / 3}\n" for i in range(40)))
    partial, status = tmp_path / "run.partial", data.stat()
    partial.mkdir()
    options = {"data": str(data), "target": "y", "test_size": 0.25, "seed": 4, "params": {}}
    stamp = [status.st_size, status.st_mtime_ns]
    (partial / "asked.json").write_text(json.dumps({**options, "state": stamp}))
    resume = lambda: CliRunner().invoke(app, ["fit", "--resume", "-o", str(tmp_path / "run")])
    (partial / "process").write_text(str(os.getppid()))
    assert "Another fit is writing" in resume().stderr
    (partial / "process").write_text(str(2**22 + 1))
    result = resume()
    assert result.exit_code == 0, result.output
    assert blr.load(tmp_path / "run").config["seed"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"data.csv", "run"}
    assert not {"asked.json", "request.json", "process", "pid"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_loading_runs_no_program(tmp_path):
    from bayesrule.fitting.checkpoint import _write_archive, read, write

    write(tmp_path / "a.npz", blr.Gamma(1.0, 1.0))
    with np.load(tmp_path / "a.npz") as file:
        arrays = {name: file[name] for name in file.files}
    header = str(arrays.pop("header"))
    for named in (
        '"class": "os.system"',
        '"class": "app"',
        '"module": ["bayesrule.cli", "app"]',
        '"module": ["os", "system"]',
    ):
        changed = header.replace('"class": "Gamma"', named)
        assert changed != header
        with (tmp_path / "b.npz").open("w+b") as opened:
            _write_archive(opened, {"header": np.array(changed), **arrays})
        with pytest.raises(ValueError, match="not one of the library's own types"):
            read(tmp_path / "b.npz")


def test_a_fit_that_ctrl_c_ended_resumes_to_the_same_result(tmp_path):
    """The interruption is saved as such, and is no reason to take no further steps."""
    loss = lambda x: jax.numpy.sum(jax.numpy.cosh(x - 1.0)) + 0.5 * x @ x
    task = blr.gradient_descent(0.01), loss, jax.numpy.zeros(3)
    whole = blr.fit(*task, steps=400)

    def press(progress):
        if progress.step < 400:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        watch.Watcher(folder=tmp_path, on_progress=press).fit(*task, steps=400)
    assert blr.load(tmp_path / "fit0.npz").reason == "interrupted"
    resumed = watch.Watcher(folder=tmp_path).fit(*task, steps=400)
    assert resumed.reason == "steps"
    assert resumed.steps == 400
    assert np.array_equal(resumed.q.mean, whole.q.mean)
    assert np.array_equal(resumed.trace["objective"], whole.trace["objective"])


def small_request(tmp_path):
    """A table and the options of a fit of 60 steps, which takes several chunks."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2))
    labels = x @ [1.0, -1.0] + 0.3 * rng.normal(size=80) > 0
    lines = [f"{a:.4f},{b:.4f},{int(y)}" for (a, b), y in zip(x, labels, strict=True)]
    (tmp_path / "data.csv").write_text("a,b,y\n" + "\n".join(lines) + "\n")
    params = ["batch_size=20", "max_iter=60", "prior_precision=1.0"]
    options = ["-t", "y", "--recipe", "vogn", *(part for param in params for part in ("-p", param))]
    return ["fit", str(tmp_path / "data.csv"), *options]


@pytest.mark.extended
def test_a_signal_ends_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    """SIGTERM, or the signal that was asked for, in the middle of the fit and after it: 143, and the same run."""
    command, place = small_request(tmp_path), ["-o", str(tmp_path / "cut")]
    assert CliRunner().invoke(app, [*command, "-o", str(tmp_path / "whole")]).exit_code == 0
    fit, sent = watch.fit, []

    def signalled(*arguments, progress, **more):
        def report(result):
            progress(result)
            if not sent and result.steps < 60:
                sent.append(1)
                signal.raise_signal(signal.SIGUSR1)

        result = fit(*arguments, progress=report, **more)
        signal.raise_signal(signal.SIGTERM)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(watch, "fit", signalled)
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        first = CliRunner().invoke(app, [*command, *place, "--save-on", "USR1"])
        assert first.exit_code == 143, first.output
        assert "ended by a signal: continue with `bayesrule fit --resume" in first.stderr
        assert 0 < blr.load(tmp_path / "cut.partial" / "fit0.npz").steps < 60
        second = CliRunner().invoke(app, ["fit", "--resume", *place])  # ended when its fit is complete
        assert second.exit_code == 143, second.output
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert not store.is_claimed(tmp_path / "cut.partial")
    assert CliRunner().invoke(app, ["fit", "--resume", *place]).exit_code == 0
    whole, cut = blr.load(tmp_path / "whole"), blr.load(tmp_path / "cut")
    assert cut.metrics == whole.metrics
    np.testing.assert_array_equal(cut.trace["objective"], whole.trace["objective"])
    jax.tree.map(np.testing.assert_array_equal, cut.estimator.posterior_, whole.estimator.posterior_)
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert "not a signal" in CliRunner().invoke(app, [*command, *place, "--save-on", "KILL"]).stderr


def test_a_full_disk_loses_no_run(tmp_path, monkeypatch):
    """Where the run cannot be written when it is complete, the error names the file, and the fit is not repeated."""
    from bayesrule.fitting import checkpoint

    command, place = small_request(tmp_path), ["-o", str(tmp_path / "run")]
    monkeypatch.setattr(watch, "_SAVE_INTERVAL", -1.0)
    save = store.save

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_on_full_disk(run, folder):
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "_write_archive", full)
            save(run, folder)

    with monkeypatch.context() as patched:
        patched.setattr(store, "save", save_on_full_disk)
        failed = CliRunner().invoke(app, [*command, *place])
    assert failed.exit_code == 2
    assert f"No space left on device: '{tmp_path}/run.partial/posterior.npz'" in failed.stderr
    assert "the fits so far are kept: when there is room, continue with" in failed.stderr
    assert not any(path.name.startswith(".") for path in (tmp_path / "run.partial").iterdir())
    saved = (tmp_path / "run.partial" / "fit0.npz").read_bytes()
    # What is damaged is not resumed from silently, but from the checkpoint before it.
    (tmp_path / "run.partial" / "fit0.npz").write_bytes(saved[:-10])
    with pytest.warns(UserWarning, match=r"fit0\.npz .*damaged.* from the checkpoint before, .*fit0\.npz\.1"):
        resumed = CliRunner().invoke(app, ["fit", "--resume", *place])
    assert resumed.exit_code == 0, resumed.output
    assert {path.name for path in tmp_path.iterdir()} == {"data.csv", "run"}
    assert not any(path.name.startswith("fit") for path in (tmp_path / "run").iterdir())


def test_a_run_stays_where_it_is_if_it_cannot_be_replaced(tmp_path, monkeypatch):
    """The old run is put back, and the new one waits beside it for --resume."""
    partial, out = tmp_path / "run.partial", tmp_path / "run"
    for folder, text in ((partial, "new"), (out, "old")):
        folder.mkdir()
        (folder / "run.json").write_text(text)
    rename = Path.rename

    def refusing(path, target):
        if path == partial:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match=r"Read-only file system: '.*run\.partial'"):
        store.publish(partial, out)
    monkeypatch.undo()
    assert (out / "run.json").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.partial"}
    store.publish(partial, out)
    assert (out / "run.json").read_text() == "new"


def test_predictions_are_written_with_all_their_digits(tmp_path):
    """A target near 10¹⁷, whose interval six digits would hide."""
    from bayesrule.cli.predict import _write_csv

    values = {"prediction": np.array([1e17 + 64, 1 / 3]), "low": np.array([1e17, -np.inf])}
    with (tmp_path / "out.csv").open("w", newline="") as file:
        _write_csv(values, file)
    back = np.genfromtxt(tmp_path / "out.csv", delimiter=",", names=True)
    assert np.array_equal(back["prediction"], values["prediction"])
    assert np.array_equal(back["low"], values["low"])
