"""What the report computes and draws: calibration against SciPy and `bayesrule.metrics`, axes, curves, parsing."""

import math
import re

import numpy as np
import pytest
import scipy.stats

from bayesrule import metrics
from bayesrule.report import calibration_math as calibration
from bayesrule.report import charts
from bayesrule.report.held_out_rows import ClassPredictions, NumericPredictions, class_predictions, numeric_predictions
from bayesrule.report.sections.data_and_reproduction import _yaml
from bayesrule.report.sections.derivation import parse_derivation
from bayesrule.report.svg import Plot, axis_limits, round_ticks, svg_drawing
from report import runs


@pytest.mark.extended
def test_reliability_is_that_of_the_metrics():
    rows = class_predictions(runs.binary())
    assert rows is not None
    theirs = metrics.reliability(rows.probabilities, rows.y, 10)
    ours = calibration.bin_predictions(rows.confidence, rows.correct)
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    np.testing.assert_allclose(ours.observed, theirs.accuracy, atol=1e-12)
    np.testing.assert_allclose(ours.predicted, theirs.confidence, atol=1e-12)
    np.testing.assert_allclose(
        calibration.calibration_error(rows), metrics.ece(rows.probabilities, rows.y, 10), atol=1e-12
    )


@pytest.mark.extended
def test_chance_error_is_what_perfect_probabilities_show():
    rng = np.random.default_rng(0)
    p = rng.dirichlet([1, 1, 1], 300)
    errors = [
        calibration.calibration_error(
            ClassPredictions(np.arange(300), np.array([rng.choice(3, p=each) for each in p]), p)
        )
        for _ in range(100)
    ]
    rows = ClassPredictions(np.arange(300), p.argmax(1), p)
    # 100 simulated sets and 400 draws, each of relative deviation about a third.
    assert abs(calibration.chance_error(rows) - np.mean(errors)) < 4 * np.std(errors) * math.sqrt(1 / 100 + 1 / 400)


def test_coverage_of_numbers_and_of_counts_beside_scipy():
    levels = np.array([0.1, 0.5, 0.9])
    rows = numeric_predictions(runs.regression())
    assert rows is not None
    lower, upper = calibration.predictive_cdf(rows, counts=False)
    inside = [
        np.mean(np.abs(rows.y - rows.mean) <= scipy.stats.norm.ppf((1 + level) / 2) * rows.std) for level in levels
    ]
    np.testing.assert_allclose(calibration.central_coverage(lower, upper, levels), inside, atol=1e-12)
    counts = numeric_predictions(runs.counts())
    assert counts is not None
    lower, upper = calibration.predictive_cdf(counts, counts=True)
    variance, mean = counts.std**2, counts.mean
    q = scipy.stats.nbinom(mean**2 / (variance - mean), mean / variance)
    np.testing.assert_allclose(upper, q.cdf(counts.y), atol=1e-9)
    np.testing.assert_allclose(lower, q.cdf(counts.y - 1), atol=1e-9)
    narrow = NumericPredictions(
        *(np.full(3, x) for x in (0, 2.0, 2.0, 1.0, 0, 9, 0))
    )  # a variance below the mean: Poisson
    np.testing.assert_allclose(
        calibration.predictive_cdf(narrow, counts=True)[1], scipy.stats.poisson.cdf(2, 2.0), atol=1e-9
    )


def test_perfect_counts_are_covered_as_claimed():
    rng = np.random.default_rng(0)
    mean = rng.gamma(2.0, 2.0, 40_000)
    y = rng.poisson(mean).astype(float)
    rows = NumericPredictions(np.arange(40_000), y, mean, np.sqrt(mean), y, y, y)
    levels = np.linspace(0.1, 0.9, 9)
    covered = calibration.central_coverage(*calibration.predictive_cdf(rows, counts=True), levels)
    assert np.max(np.abs(covered - levels)) < 4 * 0.5 / math.sqrt(40_000)


def drawn(svg, css_class):
    """The points of a drawing's path, in the coordinates of its dashed line from (0, 0) to (1, 1)."""
    points = lambda name: np.array(re.findall(r"[-.\d]+", re.search(rf'd="([^"]*)" class="{name}"', svg)[1]), float)
    zero, one = points("line pale dashed").reshape(2, 2)
    path = points(css_class)
    if css_class.startswith("line"):  # Vertical strokes: x, and both of their ends.
        x, low, high = path.reshape(-1, 3).T
        path = np.stack([x, low, x, high], axis=1)
    return (path.reshape(-1, 2) - zero) / (one - zero)


def test_the_band_of_the_coverage_curve_is_the_binomials():
    """Of 1000 rows a calibrated model covers between the 5 % and the 95 % quantile, to one row and half a pixel."""
    levels = np.linspace(0, 1, 51)
    band = drawn(charts.coverage_curve(levels, levels, 1000), "band pale")
    high, low = band[:51], band[51:][::-1]
    np.testing.assert_allclose(low[:, 0], levels, atol=1e-3)
    inner = (levels > 0.05) & (levels < 0.95)
    for edge, quantile in ((low, 0.05), (high, 0.95)):
        np.testing.assert_allclose(
            edge[inner, 1], scipy.stats.binom.ppf(quantile, 1000, levels[inner]) / 1000, atol=2e-3
        )


def test_the_strokes_of_a_reliability_diagram_are_90_percent_intervals():
    """Beta quantiles by SciPy; a bin without misses reaches 1, one without hits 0, and an empty one has no stroke."""
    counts, hits = np.array([8, 0, 40, 5]), np.array([0, 0, 26, 5])
    p = np.repeat([0.1, 0.3, 0.6, 0.9], counts)
    happened = np.concatenate([np.arange(n) < k for n, k in zip(counts, hits, strict=True)])
    bins = calibration.bin_predictions(p, happened, 4)
    strokes = drawn(charts.reliability(bins, "", ""), "line blue thin")
    low, high = (scipy.stats.beta.ppf(level, hits + 0.5, counts - hits + 0.5)[[0, 2, 3]] for level in (0.05, 0.95))
    expected = np.stack([[0.1, 0.6, 0.9], [0.0, low[1], low[2]], [0.1, 0.6, 0.9], [high[0], high[1], 1.0]], axis=1)
    np.testing.assert_allclose(strokes.reshape(3, 4), expected, atol=1e-3)
    assert (bins.low[0], bins.high[3]) == (0.0, 1.0)


def test_what_chance_allows_of_the_calibration_error():
    """Of 2000 sets of labels drawn from the probabilities themselves, about one in thirty is called miscalibrated."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 1, 300)
    rows = ClassPredictions(np.arange(300), np.zeros(300, int), np.stack([p, 1 - p], axis=1))
    bins = np.ceil(10 * p).astype(int)[:, None] == np.arange(6, 11)
    errors = np.abs(((rng.random((2000, 300)) < p) - p) @ bins).sum(axis=1) / 300
    share = np.mean(errors > calibration.CHANCE_FACTOR * calibration.chance_error(rows))
    assert 0.01 < share < 0.1


def test_derivations_are_read_piece_by_piece():
    head, pieces = parse_derivation(runs.VOGN)
    assert head == "vogn (Khan and Rue, section 4.4)"
    assert [piece[0] for piece in pieces] == ["family", "points", "curvature", "steps", "guard", "update"]
    assert pieces[1] == ("points", "MonteCarlo(1)", "E_q f(θ) ≈ the mean of f over draws from q")
    assert pieces[5][1].startswith("s ← (1 − ρτ)s")
    assert "m ← m − ρ ĝ" in pieces[5][1]


def test_the_configuration_is_yaml():
    yaml = pytest.importorskip("yaml")
    config = {
        "target": "a: b #c",
        "seed": 0,
        "test_size": 0.25,
        "text": ["yes", "1.5", "- x", "", " ", "C:\\n", "é", "a\nb", "null", "~"],
        "params": {"rate": 1e-3, "hidden": (50, 50), "flag": True, "some": np.float64(0.5), "none": {}},
    }
    reproduction = yaml.safe_load("\n".join(_yaml(config)))
    assert reproduction == {**config, "params": {**config["params"], "hidden": [50, 50]}}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e-9, 5e-9), (1e12, 3e12), (99.999, 100.001), (-7, -7), (0, 0)])
def test_ticks_are_round_apart_and_inside(low, high):
    ticks = round_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 11
    assert len({label for _, label in ticks}) == len(ticks)
    if high > low:
        slack = 1e-6 * (high - low)
        assert all(low - slack <= value <= high + slack for value, _ in ticks)


def test_limits_leave_out_what_is_out_of_all_proportion():
    values = np.append(np.linspace(0, 1, 1000), 1e9)
    low, high = axis_limits(values)
    assert -0.2 < low <= 0
    assert 1 < high < 5
    assert axis_limits([math.nan]) == (0.0, 1.0)


def test_lines_break_where_nothing_is():
    plot = Plot((0, 3), (0, 1)).line([0, 1, 2, 3], [0.5, math.nan, 0.5, 0.5], "blue")
    assert re.search(r'd="M[^L]*M[^L]*L[^LM]*" class="line blue"', svg_drawing("a line", plot))


def test_long_curves_keep_their_peaks():
    y = np.zeros(10_000)
    y[1234], y[7000] = 5.0, -5.0
    keep = charts.keep_extremes(y, 100)
    assert len(keep) <= 100
    assert {1234, 7000} <= set(keep.tolist())
