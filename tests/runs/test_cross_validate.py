"""Cross-validation and comparison: against scikit-learn's, with known standard errors, and by the command line."""

import numpy as np
import pytest
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.runs import references
from bayesrule.runs.cross_validate import compare, difference, predict_out_of_fold, standard_errors, summarize
from bayesrule.runs.folds import assign_folds
from bayesrule.runs.train import encode_target, resolve_config
from bayesrule.tables.datasets import DATASETS
from bayesrule.tables.tables import Column, InputError, Table

DIABETES = DATASETS["diabetes"]


def test_folds_divide_every_class():
    labels = np.repeat([0, 1, 2], [50, 23, 7])
    fold = assign_folds(80, 5, 0, labels)
    assert np.bincount(fold).tolist() == [16] * 5
    for label in range(3):
        assert np.ptp(np.bincount(fold[labels == label], minlength=5)) <= 1
    assert not np.array_equal(fold, assign_folds(80, 5, 1, labels))
    with pytest.raises(InputError, match="--cv 9 is not possible with 10 rows"):
        assign_folds(10, 9, 0)


@pytest.mark.extended
def test_rows_are_predicted_by_fits_that_did_not_see_them():
    """The predictions are those of scikit-learn's ridge regression by evidence, on the same folds."""
    table, target, config, _ = resolve_config(DIABETES.load(), {"target": DIABETES.target})
    _, y = encode_target(target, "regression")
    fold = assign_folds(len(y), 5, 0)
    ours = predict_out_of_fold(table, y, fold, config, [])
    x = np.stack([np.asarray(table.columns[name].numbers) for name in table.columns if name != DIABETES.target], axis=1)
    model = make_pipeline(StandardScaler(), BayesianRidge(max_iter=1000, tol=1e-8))
    theirs = cross_val_predict(model, x, y, cv=PredefinedSplit(fold))
    # The two put different weak priors on the precisions.
    np.testing.assert_allclose(ours.values["mean"], theirs, atol=0.01 * y.std())


def test_standard_errors_are_those_of_a_bootstrap():
    rng = np.random.default_rng(0)
    y, mean = rng.normal(size=300), rng.normal(size=300) * 0.3
    values = {"mean": mean, "std": np.ones(300), "low": mean - 1.645, "high": mean + 1.645}
    predicted = references.Scored(values, 0.5 * (y - mean) ** 2)
    draws = rng.integers(0, 300, (2000, 300))
    rmse = np.sqrt(np.mean((y - mean)[draws] ** 2, axis=1))
    errors = standard_errors(y, predicted)
    assert errors["rmse"] == pytest.approx(np.std(rmse), rel=0.1)
    assert errors["nll"] == pytest.approx(np.std(predicted.losses[draws].mean(axis=1)), rel=0.1)
    # A difference of two models that find the same rows hard is known better than either score.
    other = predicted.losses + 0.1 + 0.01 * rng.normal(size=300)
    gap, error = difference(other, predicted.losses)
    assert gap == pytest.approx(0.1, abs=4 * error)
    assert error < 0.02 * errors["nll"]


def test_a_fit_with_folds(tmp_path):
    result = CliRunner().invoke(app, ["fit", "diabetes", "--cv", "3", "-o", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "3 folds, 442 rows" in result.output
    assert "boosted trees" in result.output
    run = blr.load(tmp_path / "run")
    cv = run.metrics["cv"]
    assert cv["model"]["rmse"] == pytest.approx(55, abs=2)  # what is known for these data
    assert cv["difference"][0] < -5 * cv["difference"][1]
    assert len(cv["fold_nll"]) == 3
    [trees] = run.metrics["references"]
    mean, error = trees["difference"]
    expected = run.metrics["model"]["nll"] - trees["metrics"]["nll"]
    assert mean == pytest.approx(expected, abs=1e-9)
    assert 0 < error < 0.2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Cross-validated in 3 folds" in page
    for arguments, message in (
        (["nile", "--cv", "3"], "--cv is for tables of independent rows"),
        (["diabetes", "--cv", "1"], "2 or more"),
        (["diabetes", "--cv", "300"], "not possible with 442 rows"),
    ):
        wrong = CliRunner().invoke(app, ["fit", *arguments, "-o", str(tmp_path / "run")])
        assert wrong.exit_code == 2
        assert message in wrong.stderr


def test_a_comparison(tmp_path):
    page = tmp_path / "compare.html"
    arguments = ["compare", "diabetes", "--model", "linear", "--cv", "3", "-o", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [line.split()[0] for line in result.output.splitlines() if line.startswith("  ") and line.strip()]
    assert lines[1:] == ["linear", "boosted", "baseline"]
    assert "3 models of" in page.read_text()
    cv = summarize(DIABETES.load(), {"target": DIABETES.target}, 3)
    compared = compare(DIABETES.load(), {"target": DIABETES.target, "seed": 0}, ["linear"], 3)
    best, _, worst = compared.candidates
    assert best.metrics == cv["model"]
    assert worst.metrics == cv["baseline"]
    assert difference(best.losses, worst.losses) == pytest.approx(cv["difference"])
    for arguments, message in (
        (["diabetes", "--model", "forest"], "no model 'forest'"),
        (["diabetes", "--model", "hmm"], "cannot do regression"),
        (["nile"], "independent rows"),
        (["diabetes", "--seed", "-1"], "not negative"),
        (["diabetes", "-o", str(tmp_path)], "is a directory"),
    ):
        wrong = CliRunner().invoke(app, ["compare", *arguments])
        assert wrong.exit_code == 2, wrong.output
        assert message in wrong.stderr


def test_a_model_that_fails_does_not_end_the_comparison(monkeypatch):
    rng = np.random.default_rng(0)
    columns = {"x": Column("x", numbers=rng.normal(size=60)), "y": Column("y", numbers=rng.normal(size=60))}
    from bayesrule.runs import cross_validate

    fit_rows = cross_validate.fit_rows

    def fails(prepared, config):
        if config["model"] == "mlp":
            raise ValueError("no luck")
        fit_rows(prepared, config)

    monkeypatch.setattr(cross_validate, "fit_rows", fails)
    found = compare(Table(columns, "made up"), {"target": "y", "seed": 0}, ["mlp", "linear"], 3)
    assert found.candidates[-1].failure == "no luck"
    assert [bool(each.failure) for each in found.candidates] == [False, False, False, True]


def test_trees_are_scikit_learns():
    from sklearn.datasets import load_breast_cancer
    from sklearn.ensemble import HistGradientBoostingClassifier

    x, y = load_breast_cancer(return_X_y=True)
    x, y = x[:200, :5], y[:200]
    scored = references.predict_trees(x[:150], y[:150], x[150:], y[150:], "binary", 2, 0)
    with threadpool_limits(1):  # Threads of a busy machine wait for one another.
        expected = HistGradientBoostingClassifier(random_state=0).fit(x[:150], y[:150]).predict_proba(x[150:])
    np.testing.assert_allclose(scored.values["probabilities"], expected)
    assert not references.are_trees_quick(np.zeros((20_000, 100)), 0)
