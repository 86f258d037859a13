"""What to do next: the sentences follow from what a run found, are always three, and quote its own numbers."""

import numpy as np
import pytest

from bayesrule.report.next_steps import choose_steps
from report import runs


def first(run):
    return choose_steps(run)[0]


@pytest.mark.parametrize("name", [name for name in runs.TASKS if name != "bare"])
def test_every_run_has_three_sentences_with_numbers(name):
    steps = choose_steps(runs.TASKS[name]())
    assert len(steps) == len(set(steps)) == 3
    for step in steps:
        assert step.endswith((".", ".)"))
        assert any(character.isdigit() for character in step) or "“" in step


def test_different_runs_are_told_different_things():
    names = [name for name in runs.TASKS if name != "network"]  # It has the predictions of "regression".
    every = [step for name in names for step in choose_steps(runs.TASKS[name]())]
    assert len(set(every)) == len(every)


def test_an_empty_run_is_told_nothing():
    assert choose_steps(runs.bare()) == []


def test_a_leak_comes_first():
    run = runs.regression()
    run.summary["warnings"] = [
        {"kind": "drift", "column": "bmi", "finding": "It moves.", "advice": "Keep rows apart."},
        {"kind": "leak", "column": "total", "finding": "It tells all.", "advice": "Remove the column."},
    ]
    steps = choose_steps(run)
    assert steps[0] == "“total”: remove the column."
    assert "“bmi”: keep rows apart." in steps


def test_a_fit_that_is_worse_than_guessing_is_not_to_be_used():
    run = runs.binary()
    run.metrics["model"]["nll"] = 0.9
    assert first(run).startswith("Do not use this fit: its NLL of 0.900 nats is worse")


def references(run, name, model, mean, error):
    run.metrics["references"] = [
        {"name": name, "model": model, "metrics": dict(run.metrics["model"]), "difference": [mean, error]}
    ]
    return run


def test_what_to_make_of_a_stronger_baseline():
    better = first(references(runs.regression(), "boosted trees", "", 0.2, 0.02))
    assert "Boosted trees predict the held-out rows better, by 0.20 ± 0.020 nats per row" in better
    assert "--model mlp or --model gp" in better
    linear = "Bayesian linear regression"
    assert "prefer it" in " ".join(choose_steps(references(runs.network(), linear, "linear", 0.01, 0.02)))
    assert "fit it with --model linear" in first(references(runs.network(), linear, "linear", 0.2, 0.02))
    assert "prefer it" not in " ".join(choose_steps(references(runs.network(), linear, "linear", -0.2, 0.02)))
    same = choose_steps(references(runs.counts(), "boosted trees", "", -0.2, 0.02), most=9)
    assert any("look for other columns rather than another model" in step for step in same)


def test_a_class_that_is_missed_is_named():
    run = runs.classes()
    y, p = run.test["y"], run.test["probabilities"]
    p[y == 2] = [0.05, 0.85, 0.1]
    step = next(step for step in choose_steps(run, most=9) if "Look at the class" in step)
    size = int(np.sum(y == 2))
    assert f"“virginica”: only 0 of its {size} held-out rows are recognised" in step
    assert "taken for “versicolor”" in step


def test_wrong_confidence_is_told_of_in_the_right_direction():
    run = runs.binary()
    wrong = np.arange(len(run.test["y"])) % 4 == 0
    run.test["probabilities"][wrong] = run.test["probabilities"][wrong][:, ::-1]
    run.metrics["model"]["ece"] = 0.2
    assert any("overconfident" in step for step in choose_steps(run))


def test_few_rows_ask_for_folds_until_there_are_some():
    run = runs.classes()
    assert any("--cv 5" in step for step in choose_steps(run, most=9))
    run.metrics["cv"] = {"folds": 5}
    assert not any("--cv 5" in step for step in choose_steps(run, most=9))


def test_a_forecast_that_is_always_too_low():
    run = runs.sequence()
    run.test["y"] = run.test["mean"] + 2 * run.test["std"]
    assert "100 % of the held-out values lie above the forecast" in first(run).replace("\u202f", " ")


def test_a_close_call_between_numbers_of_groups():
    run = runs.groups()
    run.structure |= {"sizes": np.array([1, 2, 3]), "criterion": np.array([700.0, 610.0, 614.0])}
    run.summary["criterion"] = "BIC"
    assert any("Look at 3 groups, too (-p n_components=3)" in step for step in choose_steps(run, most=9))
    run.structure["criterion"] = np.array([700.0, 610.0, 640.0])
    assert not any("too (-p" in step for step in choose_steps(run, most=9))
