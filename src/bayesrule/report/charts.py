"""The report's charts, each a function of arrays: calibration, predictions with intervals, forecasts, curves.

Looks are names that the style sheet knows: "blue" is what the model says, "orange" what is wrong or outside, "ink"
what was observed, "pale" what serves for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..metrics import interval
from .calibration_math import Bins
from .format_numbers import count, number, percent, round_number, several
from .markup import Markup
from .svg import Plot, Tick, both, drawing, limits, ticks
from .test_rows import Measured, thinned

TENTHS = [(place / 10, f"{10 * place}") for place in range(0, 11, 2)]


def reliability(bins: Bins, claim: str, truth: str) -> Markup:
    """Claimed probability against how often it came true, and below it how many rows claimed it."""
    plot = Plot((0, 1), (0, 1), "", truth, height=270, ticks_x=TENTHS, ticks_y=TENTHS, left=46)
    plot.line([0, 1], [0, 1], "pale dashed").whiskers(bins.claimed, bins.low, bins.high, "blue thin")
    sizes = 5 + 5 * np.sqrt(bins.counts / max(bins.counts.max(), 1))
    for rows, claimed, came, size in zip(bins.counts, bins.claimed, bins.came, sizes, strict=True):
        said = f"{several(rows, 'row')}: claimed {percent(claimed)}, came true {percent(came)}"
        plot.spot(claimed, came, "blue", said, size)
    most = max(int(bins.counts.max()), 1)
    scale = [(0.0, "0"), (float(most), count(most))]
    below = Plot((0, 1), (0, most), claim, "rows", height=118, ticks_x=TENTHS, ticks_y=scale, left=46)
    return drawing(
        f"Reliability diagram: {truth} against {claim}", plot, below.bars(bins.edges, bins.counts, "blue soft")
    )


def coverage_curve(levels: np.ndarray, covered: np.ndarray, size: int) -> Markup:
    """The share of truths inside central intervals, against the share that these claim to hold."""
    name_y = "observed in the interval, %"
    plot = Plot((0, 1), (0, 1), "claimed by the interval, %", name_y, height=340, ticks_x=TENTHS, ticks_y=TENTHS)
    by_chance = interval(levels, np.sqrt(levels * (1 - levels) / max(size, 1)))
    plot.band(levels, *by_chance, "pale").line([0, 1], [0, 1], "pale dashed")
    plot.line(levels, covered, "blue")
    for level in (0.5, 0.9):
        came = float(np.interp(level, levels, covered))
        plot.spot(level, came, "blue", f"intervals of {percent(level)} hold {percent(came)}")
    return drawing("Calibration curve: share of held-out values inside central intervals", plot)


def residuals(rows: Measured) -> Markup:
    """(y − mean)/std of each row as a histogram, with the standard normal's curve over it."""
    z = (rows.y - rows.mean) / np.where(rows.std > 0, rows.std, np.nan)
    edges = np.linspace(-4, 4, 33)
    heights, _ = np.histogram(np.clip(z[np.isfinite(z)], -4, 4), edges)
    share = heights / max(heights.sum(), 1)
    grid = np.linspace(-4, 4, 81)
    bell = np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi) * (edges[1] - edges[0])
    top = 1.08 * max(share.max(), bell.max())
    places = [(float(at), number(at)) for at in range(-4, 5)]
    plot = Plot(
        (-4, 4),
        (0, top),
        "(observed − predicted)/standard deviation",
        "share of rows, %",
        height=340,
        ticks_x=places,
        ticks_y=_percents(0, top),
    )
    plot.bars(edges, share, "blue soft").line(grid, bell, "ink dashed")
    return drawing("Histogram of standardised residuals, with the standard normal curve", plot)


def confidences(confidence: np.ndarray, right: np.ndarray, classes: int) -> Markup:
    """How confident the predictions were, the right ones above and the wrong ones below, each on a scale of its own."""
    least = max(0.0, np.floor(20 / max(classes, 1)) / 20)
    edges = np.linspace(least, 1, 21)
    places = [(at, round_number(100 * at, 3)) for at, _ in ticks(least, 1, 5)]
    plots = []
    for name, mine, look, height in (("right", right, "blue", 216), ("wrong", ~right, "orange", 172)):
        counts, _ = np.histogram(confidence[mine], edges)
        top = max(float(counts.max()), 1.0)
        whole = [tick for tick in ticks(0, top, 4) if tick[0] == round(tick[0])]
        below = "confidence in the predicted class, %" if name == "wrong" else ""
        plot = Plot((least, 1), (0, 1.05 * top), below, f"{name}, rows", 400, height, places, whole, left=46)
        plots.append(plot.bars(edges, counts, f"{look} soft"))
    return drawing("Histograms of confidence, for right predictions and for wrong ones", *plots)


def sorted_intervals(rows: Measured, name: str, most: int) -> Markup:
    """Held-out rows in order of their predictions: 90 % intervals, and what was observed; half of them on phones."""
    order = np.argsort(rows.mean, kind="stable")

    def draw(width: float) -> Markup:
        some = order[thinned(len(order), most if width > 600 else most // 2)]
        x, y, mean, low, high = np.arange(len(some)), rows.y[some], rows.mean[some], rows.low[some], rows.high[some]
        inside = rows.covered[some]
        below = "held-out rows, sorted by their prediction"
        plot = Plot((-1, len(some)), limits(y, low, high), below, name, width, 320, ticks_x=())
        plot.whiskers(x, low, high, "blue whisker")
        plot.line(x, mean, "blue") if len(some) > 1 else plot.dots(x, mean, "blue")
        plot.dots(x[inside], y[inside], "ink small").dots(x[~inside], y[~inside], "orange")
        return drawing("Predictions with 90 % intervals and observed values, sorted by prediction", plot)

    return both(draw)


class Series(NamedTuple):
    """A stretch of a sequence: places in time, and at each what was seen, the mean and the standard deviation."""

    time: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def forecast(history: Series | None, ahead: Series, name: str, places: Sequence[Tick] | None) -> Markup:
    """The last of the history with its fitted band, and the forecast's fan (50 and 90 %) with what came true.

    `places` are labels of times, empty where these are years, and None where they are any other numbers.
    """

    def draw(width: float) -> Markup:
        # On a phone a long past would leave no room for what is to come.
        past = (
            history if history is None or width > 600 else Series(*(part[-2 * len(ahead.y) - 24 :] for part in history))
        )
        parts = [part for part in (past, ahead) if part is not None]
        reach = [each for s in parts for each in (s.y, s.mean, *interval(s.mean, s.std))]
        start, end = float(parts[0].time[0]), float(ahead.time[-1])
        plot = Plot((start, end), limits(*reach), "time", name, width, 320, ticks_x=_spaced(places, start, end, width))
        small = "ink small" if sum(len(part.y) for part in parts) > 60 else "ink middling"
        if past is not None:
            plot.band(past.time, *interval(past.mean, past.std), "blue")
            plot.line(past.time, past.mean, "blue thin").dots(past.time, past.y, small)
            plot.upright((past.time[-1] + ahead.time[0]) / 2, "pale dashed", "forecast")
        for level in (0.9, 0.5):
            plot.band(ahead.time, *interval(ahead.mean, ahead.std, level), "blue")
        low, high = interval(ahead.mean, ahead.std)
        outside = (ahead.y < low) | (ahead.y > high)
        plot.line(ahead.time, ahead.mean, "blue").dots(ahead.time[~outside], ahead.y[~outside], small)
        plot.dots(ahead.time[outside], ahead.y[outside], "orange")
        return drawing("History, fitted band and forecast with its held-out truth", plot)

    return both(draw)


def _spaced(places: Sequence[Tick] | None, start: float, end: float, width: float) -> list[Tick] | None:
    """As many of the labels as have room; None leaves the choice to the axis."""
    if places is None:
        return None
    if not places:  # years, which are numbers without a comma
        return [(at, f"{at:.0f}") for at, _ in ticks(start, end, int(width / 75)) if at == round(at)]
    inside = [tick for tick in places if start <= tick[0] <= end]
    return [inside[place] for place in thinned(len(inside), max(2, int(width / 110)))]


class Curve(NamedTuple):
    """A chart of a number for each step, and how many of its values are outside of it."""

    chart: Markup
    hidden: int


def curve(
    x: np.ndarray, y: np.ndarray, name: str, title: str, marks: Sequence[float] = (), least: float = 0.0
) -> Curve:
    """A number for each step; where the first steps dwarf all that follows, the axis is fitted to what follows."""
    low, high = settled(y, least)
    shown = (y >= low) & (y <= high)
    plot = Plot((float(np.min(x)), float(np.max(x))), (low, high), "step", name, height=260)
    for mark in marks:
        plot.upright(mark, "orange mark")
    x, y = np.where(shown, x, np.nan), np.where(shown, y, np.nan)
    keep = turning(y, 500)
    plot.line(x[keep], y[keep], "blue")
    if len(y) <= 60:
        plot.dots(x, y, "blue small")
    return Curve(drawing(title, plot), int(np.sum(~shown)))


def settled(y: np.ndarray, least: float = 0.0) -> tuple[float, float]:
    """Limits for a curve that settles: all of it, or what comes after a steep beginning, and `least` from end to end.

    >>> low, high = settled(np.array([-900.0, -60.0, *[-50.0 + k / 100 for k in range(20)]]), least=10.0)
    >>> -62 < low < -59, -50 < high < -49
    (True, True)
    """
    (low, high), (bottom, top) = limits(y, pad=0), limits(y[len(y) // 5 :], pad=0)
    height = max(2 * (top - bottom), least)
    if len(y) >= 10 and high - low > max(8 * (top - bottom), least):
        low, high = max(low, min(bottom, top - height)), min(high, max(top, bottom + height))
    if high - low < least / 10:  # what does not change should not look as if it did
        low, high = (low + high - least / 10) / 2, (low + high + least / 10) / 2
    return limits([low, high])


def turning(y: np.ndarray, most: int) -> np.ndarray:
    """Places of at most so many points that keep a long curve's highs and lows.

    >>> turning(np.array([0.0, 5.0, 1.0, 0.0, -3.0, 0.0]), 4)
    array([0, 1, 3, 4])
    """
    if len(y) <= most:
        return np.arange(len(y))
    parts = np.array_split(np.arange(len(y)), max(most // 2, 1))
    filled = np.where(np.isfinite(y), y, 0.0)
    return np.unique([part[pick(filled[part])] for part in parts for pick in (np.argmin, np.argmax)])


def strengths(ratios: dict[str, np.ndarray]) -> Markup:
    """Histograms of |mean|/std on a logarithmic axis, a line for each layer of a network."""
    edges = np.linspace(-3, 3, 25)
    middles = (edges[1:] + edges[:-1]) / 2
    looks = ("blue", "orange", "ink", "blue dashed", "orange dashed", "ink dashed")
    shares = {}
    for name, ratio in ratios.items():
        inside = np.clip(np.log10(np.maximum(ratio[np.isfinite(ratio)], 1e-9)), -2.999, 2.999)
        shares[name] = np.histogram(inside, edges)[0] / max(inside.size, 1)
    top = 1.08 * max(max((float(share.max()) for share in shares.values()), default=0.0), 0.01)
    places = [(float(power), round_number(10.0**power, 3)) for power in range(-3, 4)]
    plot = Plot(
        (-3, 3),
        (0, top),
        "|mean|/standard deviation",
        "share of weights, %",
        height=300,
        ticks_x=places,
        ticks_y=_percents(0, top),
    )
    plot.upright(0.0, "pale dashed")
    for look, share in zip(looks, shares.values(), strict=False):
        plot.line(middles, share, look)
    return drawing("Histogram of the weights' signal-to-noise ratios, by layer", plot)


def _percents(low: float, high: float) -> list[Tick]:
    """Ticks of shares, in per cent and without a sign."""
    return [(at / 100, label.lstrip("−")) for at, label in ticks(100 * low, 100 * high, 5)]


def finite(*arrays: Any) -> np.ndarray:
    """Where all of these are finite."""
    return np.logical_and.reduce([np.isfinite(np.asarray(each, float)) for each in arrays])
