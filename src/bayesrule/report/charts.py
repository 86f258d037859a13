"""The report's charts, each a function of arrays: calibration, predictions with intervals, forecasts, curves.

Colours have one meaning on the whole page: "blue" is the model's prediction, "orange" an error or a value outside its
interval, "ink" an observation, "pale" a reference line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..metrics import interval
from .calibration_math import ReliabilityBins
from .format_numbers import count, counted, number, percent, trimmed
from .held_out_rows import NumericPredictions, evenly_spaced
from .markup import Markup
from .ranking_math import RankingCurves
from .svg import Plot, Tick, axis_limits, narrow_and_wide, round_ticks, svg_drawing

PERCENT_TICKS = [(tenth / 10, f"{10 * tenth}") for tenth in range(0, 11, 2)]


def reliability(bins: ReliabilityBins, name_x: str, name_y: str) -> Markup:
    """A reliability diagram: observed frequency against predicted probability, with a histogram of the rows below."""
    plot = Plot((0, 1), (0, 1), "", name_y, height=270, ticks_x=PERCENT_TICKS, ticks_y=PERCENT_TICKS, left=46)
    plot.line([0, 1], [0, 1], "pale dashed").whiskers(bins.predicted, bins.low, bins.high, "blue thin")
    sizes = 5 + 5 * np.sqrt(bins.counts / max(bins.counts.max(), 1))
    for rows, predicted, observed, size in zip(bins.counts, bins.predicted, bins.observed, sizes, strict=True):
        tooltip = f"{counted(rows, 'row')}: predicted {percent(predicted)}, observed {percent(observed)}"
        plot.marker(predicted, observed, "blue", tooltip, size)
    largest = max(int(bins.counts.max()), 1)
    scale = [(0.0, "0"), (float(largest), count(largest))]
    histogram = Plot((0, 1), (0, largest), name_x, "rows", height=118, ticks_x=PERCENT_TICKS, ticks_y=scale, left=46)
    return svg_drawing(
        f"Reliability diagram: {name_y} against {name_x}", plot, histogram.bars(bins.edges, bins.counts, "blue soft")
    )


def coverage_curve(levels: np.ndarray, covered: np.ndarray, size: int) -> Markup:
    """The share of observations inside central intervals, against the intervals' nominal level."""
    name_y = "observed coverage, %"
    plot = Plot((0, 1), (0, 1), "nominal coverage, %", name_y, height=340, ticks_x=PERCENT_TICKS, ticks_y=PERCENT_TICKS)
    by_chance = interval(levels, np.sqrt(levels * (1 - levels) / max(size, 1)))
    plot.band(levels, *by_chance, "pale").line([0, 1], [0, 1], "pale dashed")
    plot.line(levels, covered, "blue")
    for level in (0.5, 0.9):
        observed = float(np.interp(level, levels, covered))
        plot.marker(level, observed, "blue", f"{percent(level)} intervals contain {percent(observed)}")
    return svg_drawing("Calibration curve: share of held-out values inside central intervals", plot)


def residuals(rows: NumericPredictions) -> Markup:
    """A histogram of the standardised residuals (y − mean)/std, with the standard normal density."""
    z = (rows.y - rows.mean) / np.where(rows.std > 0, rows.std, np.nan)
    edges = np.linspace(-4, 4, 33)
    heights, _ = np.histogram(np.clip(z[np.isfinite(z)], -4, 4), edges)
    share = heights / max(heights.sum(), 1)
    grid = np.linspace(-4, 4, 81)
    bell = np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi) * (edges[1] - edges[0])
    top = 1.08 * max(share.max(), bell.max())
    integer_ticks = [(float(value), number(value)) for value in range(-4, 5)]
    plot = Plot(
        (-4, 4),
        (0, top),
        "(observed − predicted)/standard deviation",
        "share of rows, %",
        height=340,
        ticks_x=integer_ticks,
        ticks_y=_percents(0, top),
    )
    plot.bars(edges, share, "blue soft").line(grid, bell, "ink dashed")
    return svg_drawing("Histogram of standardised residuals, with the standard normal curve", plot)


def residuals_by_prediction(rows: NumericPredictions, name: str, most: int) -> Markup:
    """Errors against predictions, with the 90 % interval around zero and the errors' running median."""
    order = np.argsort(rows.mean, kind="stable")
    mean, error = rows.mean[order], (rows.y - rows.mean)[order]
    low, high = (rows.low - rows.mean)[order], (rows.high - rows.mean)[order]
    parts = [part for part in np.array_split(np.arange(len(mean)), min(10, max(len(mean) // 25, 1))) if len(part)]
    middles = [(float(np.median(mean[part])), float(np.median(error[part]))) for part in parts]
    shown = evenly_spaced(len(mean), most)

    def draw(width: float) -> Markup:
        span = axis_limits(mean)
        plot = Plot(
            span, axis_limits(error, low[shown], high[shown]), f"predicted {name}", "observed − predicted", width, 300
        )
        plot.band(mean[shown], low[shown], high[shown], "blue").line(span, [0, 0], "pale dashed")
        inside = rows.covered[order][shown]
        plot.dots(mean[shown][inside], error[shown][inside], "ink small")
        plot.dots(mean[shown][~inside], error[shown][~inside], "orange small")
        if len(middles) >= 3:
            plot.line([x for x, _ in middles], [y for _, y in middles], "blue")
        return svg_drawing("Errors of the predictions against the predictions, with their 90 % intervals", plot)

    return narrow_and_wide(draw)


def roc(curves: RankingCurves, at: int) -> Markup:
    """True positives against false ones, as the threshold falls; a dot at the threshold with the index `at`."""
    names = "false positive rate, %", "true positive rate (recall), %"
    plot = Plot((0, 1), (0, 1), *names, height=340, ticks_x=PERCENT_TICKS, ticks_y=PERCENT_TICKS)
    plot.line([0, 1], [0, 1], "pale dashed")
    # A few hundred points draw the curve of any number of rows.
    keep = _corners(curves.false_positive_rate, curves.recall)
    plot.line(curves.false_positive_rate[keep], curves.recall[keep], "blue")
    plot.marker(float(curves.false_positive_rate[at]), float(curves.recall[at]), "blue", "threshold 50 %")
    return svg_drawing("ROC curve: true positive rate against false positive rate", plot)


def precision_recall(curves: RankingCurves, at: int, share: float) -> Markup:
    """Precision against recall, as the threshold falls; `share` is the precision of guessing."""
    names = "recall, %", "precision, %"
    plot = Plot((0, 1), (0, 1), *names, height=340, ticks_x=PERCENT_TICKS, ticks_y=PERCENT_TICKS)
    plot.line([0, 1], [share, share], "pale dashed")
    keep = _corners(curves.recall, curves.precision)
    plot.line(curves.recall[keep], curves.precision[keep], "blue")
    plot.marker(float(curves.recall[at]), float(curves.precision[at]), "blue", "threshold 50 %")
    return svg_drawing("Precision against recall", plot)


def _corners(x: np.ndarray, y: np.ndarray, most: int = 400) -> np.ndarray:
    """The indices of at most about `most` points of a curve of steps: its corners, and of many only some."""
    bends = np.flatnonzero((np.diff(x[:-1]) != np.diff(x[1:])) | (np.diff(y[:-1]) != np.diff(y[1:]))) + 1
    corners = np.unique(np.concatenate([[0], bends, [len(x) - 1]]))
    return corners[evenly_spaced(len(corners), most)]


def confidences(confidence: np.ndarray, correct: np.ndarray, classes: int) -> Markup:
    """Histograms of confidence: correct predictions above, wrong ones below, each with its own scale."""
    least = max(0.0, np.floor(20 / max(classes, 1)) / 20)
    edges = np.linspace(least, 1, 21)
    percent_ticks = [(value, trimmed(100 * value, 3)) for value, _ in round_ticks(least, 1, 5)]
    plots = []
    for name, mask, color, height in (("correct", correct, "blue", 216), ("wrong", ~correct, "orange", 172)):
        counts, _ = np.histogram(confidence[mask], edges)
        top = max(float(counts.max()), 1.0)
        integer_ticks = [tick for tick in round_ticks(0, top, 4) if tick[0] == round(tick[0])]
        name_x = "confidence in the predicted class, %" if name == "wrong" else ""
        span = (least, 1), (0, 1.05 * top)
        plot = Plot(*span, name_x, f"{name}, rows", 400, height, percent_ticks, integer_ticks, left=46)
        plots.append(plot.bars(edges, counts, f"{color} soft"))
    return svg_drawing("Histograms of confidence, for correct and for wrong predictions", *plots)


def sorted_intervals(rows: NumericPredictions, name: str, most: int) -> Markup:
    """Held-out rows in the order of their predictions: 90 % intervals and observations; fewer rows on phones."""
    order = np.argsort(rows.mean, kind="stable")

    def draw(width: float) -> Markup:
        shown = order[evenly_spaced(len(order), most if width > 600 else most // 2)]
        x, y, mean, low, high = (
            np.arange(len(shown)),
            rows.y[shown],
            rows.mean[shown],
            rows.low[shown],
            rows.high[shown],
        )
        inside = rows.covered[shown]
        name_x = "held-out rows, sorted by their prediction"
        plot = Plot((-1, len(shown)), axis_limits(y, low, high), name_x, name, width, 320, ticks_x=())
        plot.whiskers(x, low, high, "blue whisker")
        plot.line(x, mean, "blue") if len(shown) > 1 else plot.dots(x, mean, "blue")
        plot.dots(x[inside], y[inside], "ink small").dots(x[~inside], y[~inside], "orange")
        return svg_drawing("Predictions with 90 % intervals and observed values, sorted by prediction", plot)

    return narrow_and_wide(draw)


class Series(NamedTuple):
    """A segment of a sequence: at each time the observation, the predicted mean and standard deviation."""

    time: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def forecast(history: Series | None, ahead: Series, name: str, time_ticks: Sequence[Tick] | None) -> Markup:
    """The end of the history with its fitted 90 % band, then the forecast's 50 and 90 % bands with the observations.

    `time_ticks` labels the times: empty if the times are years, None if they are other numbers.
    """

    def draw(width: float) -> Markup:
        # On a phone a long history would leave no space for the forecast.
        past = history
        if history is not None and width <= 600:
            past = Series(*(part[-2 * len(ahead.y) - 24 :] for part in history))
        parts = [part for part in (past, ahead) if part is not None]
        values = [each for s in parts for each in (s.y, s.mean, *interval(s.mean, s.std))]
        start, end = float(parts[0].time[0]), float(ahead.time[-1])
        ticks_x = _fitting_ticks(time_ticks, start, end, width)
        plot = Plot((start, end), axis_limits(*values), "time", name, width, 320, ticks_x)
        dots = "ink small" if sum(len(part.y) for part in parts) > 60 else "ink medium"
        if past is not None:
            plot.band(past.time, *interval(past.mean, past.std), "blue")
            plot.line(past.time, past.mean, "blue thin").dots(past.time, past.y, dots)
            plot.vertical((past.time[-1] + ahead.time[0]) / 2, "pale dashed", "forecast")
        for level in (0.9, 0.5):
            plot.band(ahead.time, *interval(ahead.mean, ahead.std, level), "blue")
        low, high = interval(ahead.mean, ahead.std)
        outside = (ahead.y < low) | (ahead.y > high)
        plot.line(ahead.time, ahead.mean, "blue").dots(ahead.time[~outside], ahead.y[~outside], dots)
        plot.dots(ahead.time[outside], ahead.y[outside], "orange")
        return svg_drawing("History, fitted band and forecast with the held-out observations", plot)

    return narrow_and_wide(draw)


def _fitting_ticks(ticks: Sequence[Tick] | None, start: float, end: float, width: float) -> list[Tick] | None:
    """As many of the ticks as fit into the width; None if the axis shall choose round numbers itself."""
    if ticks is None:
        return None
    if not ticks:  # The times are years, which are written without a comma between thousands.
        return [(year, f"{year:.0f}") for year, _ in round_ticks(start, end, int(width / 75)) if year == round(year)]
    inside = [tick for tick in ticks if start <= tick[0] <= end]
    return [inside[index] for index in evenly_spaced(len(inside), max(2, int(width / 110)))]


class Curve(NamedTuple):
    """A chart of one value per step, and the number of values outside its limits."""

    chart: Markup
    hidden: int


def step_curve(
    x: np.ndarray, y: np.ndarray, name: str, title: str, marks: Sequence[float] = (), least: float = 0.0
) -> Curve:
    """One value per step. If the first steps are far off, the axis is fitted to the values after them.

    `marks` are steps with a vertical line, `least` is the smallest range that the axis zooms in to.
    """
    low, high = limits_after_transient(y, least)
    shown = (y >= low) & (y <= high)
    plot = Plot((float(np.min(x)), float(np.max(x))), (low, high), "step", name, height=260)
    for mark in marks:
        plot.vertical(mark, "orange mark")
    x, y = np.where(shown, x, np.nan), np.where(shown, y, np.nan)
    keep = keep_extremes(y, 500)
    plot.line(x[keep], y[keep], "blue")
    if len(y) <= 60:
        plot.dots(x, y, "blue small")
    return Curve(svg_drawing(title, plot), int(np.sum(~shown)))


def limits_after_transient(y: np.ndarray, least: float = 0.0) -> tuple[float, float]:
    """Axis limits of a curve: all of it, or only the part after a steep start, and at least about `least` wide.

    >>> low, high = limits_after_transient(np.array([-900.0, -60.0, *[-50.0 + k / 100 for k in range(20)]]), least=10.0)
    >>> -62 < low < -59, -50 < high < -49
    (True, True)
    """
    (low, high), (bottom, top) = axis_limits(y, pad=0), axis_limits(y[len(y) // 5 :], pad=0)
    height = max(2 * (top - bottom), least)
    if len(y) >= 10 and high - low > max(8 * (top - bottom), least):
        low, high = max(low, min(bottom, top - height)), min(high, max(top, bottom + height))
    if high - low < least / 10:  # A constant curve must not look as if it changed.
        low, high = (low + high - least / 10) / 2, (low + high + least / 10) / 2
    return axis_limits([low, high])


def keep_extremes(y: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most `most` points of a long curve that keep its local minima and maxima.

    >>> keep_extremes(np.array([0.0, 5.0, 1.0, 0.0, -3.0, 0.0]), 4)
    array([0, 1, 3, 4])
    """
    if len(y) <= most:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), max(most // 2, 1))
    filled = np.where(np.isfinite(y), y, 0.0)
    return np.unique([part[pick(filled[part])] for part in parts for pick in (np.argmin, np.argmax)])


def signal_to_noise(ratios: dict[str, np.ndarray]) -> Markup:
    """Histograms of |mean|/std on a logarithmic axis, one line for each layer of a network."""
    edges = np.linspace(-3, 3, 25)
    middles = (edges[1:] + edges[:-1]) / 2
    line_classes = ("blue", "orange", "ink", "blue dashed", "orange dashed", "ink dashed")
    shares = {}
    for name, ratio in ratios.items():
        inside = np.clip(np.log10(np.maximum(ratio[np.isfinite(ratio)], 1e-9)), -2.999, 2.999)
        shares[name] = np.histogram(inside, edges)[0] / max(inside.size, 1)
    top = 1.08 * max(max((float(share.max()) for share in shares.values()), default=0.0), 0.01)
    power_ticks = [(float(power), trimmed(10.0**power, 3)) for power in range(-3, 4)]
    plot = Plot(
        (-3, 3),
        (0, top),
        "|mean|/standard deviation",
        "share of weights, %",
        height=300,
        ticks_x=power_ticks,
        ticks_y=_percents(0, top),
    )
    plot.vertical(0.0, "pale dashed")
    for css_class, share in zip(line_classes, shares.values(), strict=False):
        plot.line(middles, share, css_class)
    return svg_drawing("Histogram of the weights' signal-to-noise ratios, by layer", plot)


def _percents(low: float, high: float) -> list[Tick]:
    """Ticks of proportions, in per cent and without a sign."""
    return [(value / 100, label.lstrip("−")) for value, label in round_ticks(100 * low, 100 * high, 5)]


def finite(*arrays: Any) -> np.ndarray:
    """A mask of the entries that are finite in all arrays."""
    return np.logical_and.reduce([np.isfinite(np.asarray(each, float)) for each in arrays])


GROUP_COLORS = ("group1", "group2", "group3", "group4", "group5", "group6")


def group_plane(plane: np.ndarray, group: np.ndarray, shares: np.ndarray, most: int) -> Markup:
    """Rows on two principal components, coloured by their group, with the group's number at its median."""
    shown = evenly_spaced(len(plane), most)

    def draw(width: float) -> Markup:
        names = [f"principal component {k + 1} ({percent(share)} of the variance)" for k, share in enumerate(shares)]
        plot = Plot(
            axis_limits(plane[:, 0]), axis_limits(plane[:, 1]), names[0], names[1], width, 420 if width > 600 else 340
        )
        groups = np.unique(group)
        for k in groups:
            part = shown[group[shown] == k]
            color = GROUP_COLORS[int(k) % len(GROUP_COLORS)]
            plot.dots(plane[part, 0], plane[part, 1], f"{color} {'small' if len(shown) > 300 else 'medium'}")
        for k in groups:
            center = np.median(plane[group == k], axis=0)
            plot.badge(float(center[0]), float(center[1]), str(int(k) + 1))
        return svg_drawing("Rows on the first two principal components, coloured by group", plot)

    return narrow_and_wide(draw)


def score_plane(score: np.ndarray, most: int) -> Markup:
    """Rows by their first two factors, or a histogram where there is one."""
    shown = evenly_spaced(len(score), most)
    if score.shape[1] == 1:
        edges = np.linspace(*axis_limits(score[:, 0]), 31)
        counts, _ = np.histogram(score[:, 0], edges)
        plot = Plot((edges[0], edges[-1]), (0, 1.05 * max(counts.max(), 1)), "factor 1", "rows", height=300)
        return svg_drawing("Histogram of the factor's values", plot.bars(edges, counts, "blue soft"))
    plot = Plot(axis_limits(score[:, 0]), axis_limits(score[:, 1]), "factor 1", "factor 2", height=340)
    plot.dots(score[shown, 0], score[shown, 1], "ink small")
    return svg_drawing("Rows by their first two factors", plot)


def size_curve(sizes: np.ndarray, criterion: np.ndarray, name_x: str, name_y: str) -> Markup:
    """The criterion by which a number of groups, topics or factors was chosen."""
    ticks = [(float(size), str(int(size))) for size in sizes]
    plot = Plot(
        (float(sizes.min()) - 0.5, float(sizes.max()) + 0.5),
        axis_limits(criterion),
        name_x,
        name_y,
        height=260,
        ticks_x=ticks,
    )
    best = int(np.argmin(criterion))
    plot.line(sizes, criterion, "blue").dots(sizes, criterion, "blue medium")
    plot.marker(float(sizes[best]), float(criterion[best]), "orange", "chosen", 10)
    return svg_drawing(f"{name_y} against {name_x}", plot)


def membership(probability: np.ndarray, name_x: str) -> Markup:
    """A histogram of the probability of each row's group, or the share of its topic."""
    edges = np.linspace(0, 1, 21)
    counts, _ = np.histogram(probability, edges)
    plot = Plot((0, 1), (0, 1.05 * max(float(counts.max()), 1.0)), name_x, "rows", height=260, ticks_x=PERCENT_TICKS)
    return svg_drawing(f"Histogram of the {name_x}", plot.bars(edges, counts, "blue soft"))
