"""The report's warnings about intervals: found where noise is not constant, tails are heavy or counts overdispersed."""

import numpy as np
import pytest
import scipy.stats

from bayesrule import metrics
from bayesrule.report import interval_checks
from bayesrule.report.held_out_rows import NumericPredictions, left_out_predictions
from bayesrule.report.page import render_report
from report import runs


def predictions(y, mean, std, freedom=np.inf):
    low, high = metrics.interval(mean, std, degrees_of_freedom=freedom)
    index = np.arange(len(y))
    return NumericPredictions(index, y, mean, np.broadcast_to(std, y.shape), low, high, index, freedom)


def poisson_predictions(y, rate):
    low, high = scipy.stats.poisson.ppf([[0.05], [0.95]], rate)
    return NumericPredictions(np.arange(len(y)), y, rate, np.sqrt(rate), low, high, np.arange(len(y)))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["normal", "student", "counts"])
def test_a_right_model_is_told_of_a_problem_in_one_run_of_a_hundred(kind):
    rng, alarms, repeats = np.random.default_rng(0), 0, 1000
    for _ in range(repeats):
        mean = rng.normal(50, 10, 60)
        if kind == "counts":
            rate = np.abs(mean) / 20
            rows = poisson_predictions(rng.poisson(rate) * 1.0, rate)
        else:
            freedom = 8.0 if kind == "student" else np.inf
            noise = rng.standard_t(8, 60) if kind == "student" else rng.standard_normal(60)
            rows = predictions(mean + noise, mean, 1.0, freedom)
        alarms += bool(interval_checks.find_problems(rows, counts=kind == "counts"))
    # At most 1 %: 10 of 1000, with a binomial standard deviation of 3.1.
    assert alarms <= 10 + 4 * np.sqrt(10)


def test_noise_that_grows_with_the_prediction_is_found():
    rng = np.random.default_rng(1)
    mean = rng.uniform(0, 1, 300)
    y = 5 + mean + (0.2 + 1.6 * mean) * rng.standard_normal(300)
    std = np.std(y - 5 - mean)
    (problem,) = [
        each
        for each in interval_checks.find_problems(predictions(y, 5 + mean, std), counts=False)
        if "not constant" in each.finding
    ]
    thirds = np.array_split(np.argsort(mean), 3)
    shares = [np.mean(np.abs(y - 5 - mean)[third] <= 1.6449 * std) for third in thirds]
    assert shares[0] > 0.97 > 0.8 > shares[2]
    assert f"{100 * shares[2]:.0f}" in problem.finding.replace("\u202f", " ")
    assert "logarithm" in problem.advice
    assert "logarithm" not in interval_checks.find_problems(predictions(y - 9, mean - 4, std), counts=False)[0].advice


def test_training_rows_that_were_left_out_show_it_where_few_rows_were_held_out():
    rng = np.random.default_rng(7)
    mean = rng.uniform(0, 1, 200)
    y = mean + (0.2 + 1.6 * mean) * rng.standard_normal(200)
    rows = predictions(y, mean, np.std(y - mean))
    few, others = rows.take(np.arange(10)), rows.take(np.arange(10, 200))
    assert not interval_checks.find_problems(few, counts=False)
    assert "not constant" in interval_checks.find_problems(few, counts=False, left_out=others)[0].finding
    run = runs.regression()
    assert left_out_predictions(run) is None  # a run of an earlier version has no "std" there
    run.influence |= {
        "y": run.influence["log_density"],
        "mean": 0 * run.influence["influence"],
        "std": 1.0 + 0 * run.influence["influence"],
    }
    run.influence["std"][0] = np.nan
    assert len(left_out_predictions(run).y) == len(run.influence["row"]) - 1


def test_noise_that_is_least_in_the_middle_is_found():
    rng = np.random.default_rng(2)
    mean = rng.uniform(-1, 1, 300)
    y = mean + (0.2 + 1.6 * np.abs(mean)) * rng.standard_normal(300)
    found = interval_checks.find_problems(predictions(y, mean, np.std(y - mean)), counts=False)
    assert any("not constant" in problem.finding for problem in found)


def test_heavy_tails_are_found_and_are_right_where_they_are_predicted():
    rng = np.random.default_rng(3)
    mean, noise = rng.normal(0, 5, 300), rng.standard_t(3, 300)
    found = interval_checks.find_problems(predictions(mean + noise, mean, np.sqrt(3)), counts=False)
    assert any("heavier tails" in problem.finding for problem in found)
    assert not interval_checks.find_problems(predictions(mean + noise, mean, 1.0, 3.0), counts=False)


@pytest.mark.parametrize(("factor", "word"), [(0.6, "narrow"), (1.8, "wide")])
def test_a_wrong_width_is_found(factor, word):
    rng = np.random.default_rng(4)
    mean = rng.normal(0, 5, 300)
    y = mean + rng.standard_normal(300)
    (problem,) = interval_checks.find_problems(predictions(y, mean, factor), counts=False)
    assert f"too {word}" in problem.finding


def test_counts_that_vary_more_than_poisson_are_found():
    rng = np.random.default_rng(5)
    rate = np.exp(rng.normal(1, 0.5, 300))
    y = rng.poisson(rate * rng.gamma(1.0, 1.0, 300)) * 1.0
    found = interval_checks.find_problems(poisson_predictions(y, rate), counts=True)
    assert "Poisson" in found[0].finding


def test_few_rows_and_constant_predictions_are_not_judged():
    rng = np.random.default_rng(6)
    y = 100 * rng.standard_normal(19)
    assert not interval_checks.find_problems(predictions(y, np.zeros(19), 1.0), counts=False)
    y = rng.standard_normal(200)
    assert not interval_checks.find_problems(predictions(y, np.zeros(200), 1.0), counts=False)
    assert not interval_checks.find_problems(predictions(y, y, 0.0), counts=False)
    interval_checks.find_problems(predictions(np.ones(30), np.zeros(30), 1.0), counts=False)  # no warning, no error


def test_normal_scores_are_those_of_scipy():
    y = np.array([-30.0, -2.0, 0.0, 0.5, 40.0])
    rows = predictions(y, np.zeros(5), 1.0, 6.0)
    theirs = np.sign(y) * scipy.stats.norm.isf(scipy.stats.t.sf(np.abs(y), 6.0))
    np.testing.assert_allclose(interval_checks.normal_scores(rows), theirs, rtol=1e-10)


def test_the_page_says_so_and_only_then():
    run = runs.regression(400)
    assert "not constant" not in render_report(run)
    mean = run.test["mean"]
    order = np.argsort(np.argsort(mean)) / len(mean)
    run.test["y"] = mean + 2 * order * (run.test["y"] - mean)
    page = render_report(run)
    assert "The noise is not constant" in page
    assert 'class="warn"' in page
