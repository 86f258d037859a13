"""Runs without a target: groups, topics and factors are found where they are known, and predicted for new rows."""

import numpy as np
import pytest
from sklearn.decomposition import FactorAnalysis
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.runs import store
from bayesrule.runs.choose_size import choose_factors, choose_groups, choose_topics
from bayesrule.runs.train import train
from bayesrule.runs.word_counts import count_words, fit_vocabulary
from bayesrule.tables.tables import Column, InputError, Table


def groups(rows=60):
    """Three round groups of known sizes, a column of text and one that the model is not shown."""
    rng = np.random.default_rng(0)
    label = np.repeat([0, 1, 2], [3 * rows, 2 * rows, rows])
    centers = np.array([[0.0, 0.0, 0.0], [6.0, 6.0, 0.0], [-6.0, 6.0, 3.0]])
    x = centers[label] + rng.normal(size=(len(label), 3))
    columns = {name: Column(name, numbers=10 * x[:, place] + 100) for place, name in enumerate("abc")}
    columns["town"] = Column.of_text("town", rng.choice(["Bern", "Rome"], len(label)).tolist())
    columns["kind"] = Column.of_text("kind", [f"kind {each}" for each in label])
    return Table(columns, "made up"), label


def factors(rows=300):
    """Two factors that move three columns each."""
    rng = np.random.default_rng(1)
    score = rng.normal(size=(rows, 2))
    loading = np.array([[0.9, 0.8, 0.7, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.9, 0.8, 0.7]])
    x = score @ loading + 0.4 * rng.normal(size=(rows, 6))
    return x, score


WORDS = {
    "cooking": ["oven", "bread", "flour", "butter", "recipe", "salt", "bake", "dough"],
    "space": ["rocket", "orbit", "planet", "moon", "launch", "star", "galaxy", "mission"],
}


def texts(rows=80):
    rng = np.random.default_rng(2)
    about = [list(WORDS)[place % 2] for place in range(rows)]
    text = [" ".join(["the", *rng.choice(WORDS[each], 12)]) for each in about]
    return Table({"text": Column.of_text("text", text), "about": Column.of_text("about", about)}, "notes"), about


def save_and_load(run, folder):
    store.save(run, folder)
    return blr.load(folder)


def test_groups_are_found_and_predicted(tmp_path):
    table, label = groups()
    table.columns["a"].numbers[5] = np.nan
    run = train(table, {"model": "mixture", "target": "kind", "seed": 0, "test_size": 0.2, "params": {}})
    assert run.config["task"] == "clusters"
    assert run.config["params"]["n_components"] == 3
    assert run.metrics["model"]["log_density"] > run.metrics["baseline"]["log_density"] + 1
    np.testing.assert_allclose(run.structure["weight"], [1 / 2, 1 / 3, 1 / 6], atol=0.05)
    np.testing.assert_allclose(run.structure["mean"][1], [160, 160, 100], atol=3)
    np.testing.assert_allclose(run.structure["std"][:2], 10, rtol=0.15)  # The prior widens the smallest group.
    assert run.structure["compared"]["counts"].diagonal().sum() >= 358
    loaded = save_and_load(run, tmp_path / "run")
    predicted, again = run.predict(table), loaded.predict(table)
    assert list(predicted) == ["group", "probability", "p(1)", "p(2)", "p(3)", "log_density"]
    for name, values in predicted.items():
        np.testing.assert_array_equal(values, again[name])
    assert np.mean(predicted["group"] - 1 == label) > 0.99
    np.testing.assert_allclose(sum(predicted[f"p({k})"] for k in (1, 2, 3)), 1.0)
    assert np.isnan(predicted["log_density"]).tolist().index(True) == 5
    assert "town" in [each["name"] for each in run.summary["columns"] if not each["used"]]


def test_factors_are_found_with_their_uncertainty(tmp_path):
    x, score = factors()
    x[3, 0] = np.nan
    table = Table({f"x{place}": Column(f"x{place}", numbers=x[:, place]) for place in range(6)}, "made up")
    run = train(table, {"model": "factor-analysis", "seed": 0, "test_size": 0.2, "params": {}})
    assert run.config["params"]["n_components"] == 2
    predicted = save_and_load(run, tmp_path / "run").predict(table)
    assert list(predicted) == ["factor 1", "std 1", "factor 2", "std 2", "log_density"]
    mean = np.stack([predicted["factor 1"], predicted["factor 2"]], axis=1)
    # Factors are known up to a rotation: the true ones are a linear function of the predicted ones.
    rotation, *_ = np.linalg.lstsq(mean, score, rcond=None)
    left = score - mean @ rotation
    std = np.stack([predicted["std 1"], predicted["std 2"]], axis=1)
    # With the true loadings w and noise ψ, the variance of a factor given the row is 1/(1 + Σw²/ψ) = 1/13.125; these
    # 300 rows have 0.084, which is what the errors are compared with.
    assert np.mean(std**2) == pytest.approx(1 / 13.125, rel=0.15)
    assert np.mean(left**2) == pytest.approx(0.084, rel=0.2)
    assert predicted["std 1"][3] >= predicted["std 1"][4]  # A value is missing.
    reference = FactorAnalysis(2).fit(np.delete(x, 3, axis=0))
    assert run.structure["explained"].sum() == pytest.approx(
        np.sum(reference.components_**2) / (np.sum(reference.components_**2) + reference.noise_variance_.sum()),
        abs=0.05,
    )
    assert run.metrics["model"]["log_density"] > run.metrics["baseline"]["log_density"]


def test_topics_of_texts_are_found_and_predicted(tmp_path):
    table, about = texts()
    run = train(
        table, {"model": "topics", "target": "about", "seed": 0, "test_size": 0.2, "params": {"n_components": 2}}
    )
    assert run.metrics["model"]["perplexity"] < 0.85 * run.metrics["baseline"]["perplexity"]
    words = [{run.summary["features"][index] for index in line[:8]} for line in run.structure["words"]]
    assert sorted(map(sorted, words)) == sorted(map(sorted, WORDS.values()))
    assert "the" not in run.summary["features"]  # Every text has it.
    predicted = save_and_load(run, tmp_path / "run").predict(table)
    assert list(predicted) == ["topic", "share", "share(1)", "share(2)", "std(1)", "std(2)"]
    by_topic = {topic: {about[i] for i in np.flatnonzero(predicted["topic"] == topic)} for topic in (1, 2)}
    assert sorted(map(len, by_topic.values())) == [1, 1]
    np.testing.assert_allclose(predicted["share(1)"] + predicted["share(2)"], 1.0)
    # The shares of a text of twelve words of one topic: Dirichlet(12 + ½, ½).
    expected = np.sqrt(12.5 * 0.5 / (13**2 * 14))
    assert np.median(predicted["std(1)"]) == pytest.approx(expected, rel=0.1)


def test_the_number_is_chosen_where_it_is_known():
    rng = np.random.default_rng(3)
    table, _ = groups(20)
    x = np.stack([np.asarray(table.columns[name].numbers) for name in "abc"], axis=1)
    assert choose_groups((x - x.mean(0)) / x.std(0), 0, {}).params["n_components"] == 3
    assert choose_groups(rng.normal(size=(200, 3)), 0, {}).params["n_components"] == 1
    x, _ = factors()
    assert choose_factors((x - x.mean(0)) / x.std(0), 0).params["n_components"] == 2
    column = texts()[0].columns["text"]
    assert choose_topics(count_words(column, fit_vocabulary(column)), 0).params["n_components"] == 2


def test_the_command_line(tmp_path):
    table, _ = groups(20)
    names = list(table.columns)
    lines = zip(*(table.columns[name].labels() for name in names), strict=True)
    path = tmp_path / "data.csv"
    path.write_text(",".join(names) + "\n" + "".join(",".join(line) + "\n" for line in lines))
    place = str(tmp_path / "run")
    invoke = lambda *a: CliRunner().invoke(app, [*a])
    result = invoke("fit", str(path), "--model", "mixture", "-p", "n_components=3", "-o", place)
    assert result.exit_code == 0, result.output
    assert "log density" in result.output
    page = (tmp_path / "run" / "report.html").read_text()
    assert "3 groups in 3 columns of <bdi>data.csv</bdi>" in page
    assert "predict</span> <span>run</span> <span>new.csv" in page
    shown = invoke("predict", place, str(path))
    assert shown.output.splitlines()[0] == "group,probability,p(1),p(2),p(3),log_density"
    assert len(shown.output.splitlines()) == 121
    for more, message in (
        (("--time", "a"), "--time is for sequences"),
        (("--cv", "3"), "--cv compares predictions"),
        (("--target", "q"), "has no column 'q'"),
        (("--task", "regression"), "cannot do regression"),
    ):
        wrong = invoke("fit", str(path), "--model", "mixture", *more, "-o", place)
        assert wrong.exit_code == 2
        assert message in wrong.stderr


def test_tables_without_anything_to_model():
    _, label = groups(10)
    text = Table({"kind": Column.of_text("kind", [f"kind {each}" for each in label])}, "made up")
    settings = {"seed": 0, "test_size": 0.2, "params": {}}
    for model in ("mixture", "factor-analysis"):
        with pytest.raises(InputError, match="no column of numbers"):
            train(text, {"model": model, **settings})
    with pytest.raises(InputError, match="nothing to count"):
        train(groups(10)[0], {"model": "topics", **settings})
