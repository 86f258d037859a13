"""The section on the weights: a forest plot of coefficients, or the signal-to-noise ratios of a network's layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...metrics import interval
from ...runs.run import Run
from .. import charts
from ..format_numbers import count, counted, mean_and_std, number, percent
from ..markup import Markup, join, tag, user_text
from ..svg import round_ticks
from .layout import figure, legend, side_by_side, table

SHOWN_COEFFICIENTS, DRAWN_LAYERS, LISTED_LAYERS = 20, 6, 40


def render_weights(run: Run) -> Markup | None:
    """The coefficients if they have names, otherwise the layers."""
    mean, std = (_finite_or_nan(run.weights.get(each, ())) for each in ("mean", "std"))
    if not mean.size or mean.shape != std.shape:
        return None
    if "name" in run.weights:
        return _forest(_names(run, mean), mean.ravel(), std.ravel())
    layers = np.asarray(run.weights.get("layer", np.full(mean.size, "all"))).astype(str).ravel()
    return _network(layers, mean.ravel(), std.ravel()) if layers.size == mean.size else None


def _finite_or_nan(values: Any) -> np.ndarray:
    array = np.asarray(values, float)
    return np.where(np.isfinite(array), array, np.nan)


def _names(run: Run, mean: np.ndarray) -> list[str]:
    """A name for each coefficient; with several classes, the class and the input."""
    names = [str(each) for each in run.weights["name"]]
    if mean.ndim == 2 and len(names) in mean.shape:
        outputs = mean.size // len(names)
        classes = run.classes if len(run.classes) == outputs else [str(index) for index in range(outputs)]
        by_class = mean.shape[1] == len(names)
        pairs = [(a, b) for a in classes for b in names] if by_class else [(a, b) for b in names for a in classes]
        return [f"{output}: {name}" for output, name in pairs]
    return [*names, *(f"weight {index}" for index in range(len(names), mean.size))]


def _forest(names: list[str], mean: np.ndarray, std: np.ndarray) -> Markup | None:
    finite = np.flatnonzero(charts.finite(mean, std) & (std >= 0))
    if not finite.size:
        return None
    ratio = np.abs(mean[finite]) / np.maximum(std[finite], 1e-300)
    shown = finite[np.argsort(-ratio, kind="stable")[:SHOWN_COEFFICIENTS]]
    low, high = interval(mean, std)
    left, right = min(float(low[shown].min()), 0.0), max(float(high[shown].max()), 0.0)
    margin = 0.03 * (right - left) or 1.0
    span = (left - margin, right + margin)
    scale = [tag("span", label, style=f"left:{_position(value, span):.2f}%") for value, label in round_ticks(*span, 3)]
    head = tag(
        "tr",
        tag("th", "Coefficient", scope="col"),
        tag("th", tag("div", scale, class_="scale"), scope="col"),
        tag("th", "mean ± std", scope="col", class_="number"),
    )
    body = [_coefficient(names[i], float(mean[i]), float(std[i]), span) for i in shown]
    clear = int(np.sum((low[finite] > 0) | (high[finite] < 0)))
    rest = finite.size - SHOWN_COEFFICIENTS
    more = f" {counted(rest, 'more is', 'more are')} not shown." if rest > 0 else ""
    words = join(
        legend("blue", "90 % interval excludes zero"),
        legend("pale", "90 % interval includes zero"),
        " Posterior means with 90 % intervals, in the order of |mean|/std; numeric inputs were standardised. "
        f"The intervals of {count(clear)} of {counted(finite.size, 'coefficient')} exclude zero.{more}",
    )
    return join(
        tag("table", tag("thead", head), tag("tbody", body), class_="forest"), tag("p", words, class_="caption")
    )


def _coefficient(name: str, mean: float, std: float, span: tuple[float, float]) -> Markup:
    low, high = (float(limit) for limit in interval(mean, std))
    ends = [_position(limit, span) for limit in (low, high)]
    css_class = "blue" if low * high > 0 else "pale"
    # The drawing is stretched to its cell, but strokes keep their width, so the dots (strokes too) stay round.
    zero, middle = _position(0.0, span), _position(mean, span)
    marks = [
        tag("path", d=f"M{zero:.2f} 0V20", class_="grid"),
        tag("path", d=f"M{ends[0]:.2f} 10H{ends[1]:.2f}", class_=f"line {css_class}"),
        tag("path", d=f"M{middle:.2f} 10h0", class_=f"dots {css_class}"),
    ]
    drawing = tag("svg", marks, viewBox="0 0 100 20", preserveAspectRatio="none", aria_hidden="true")
    mean_text, std_text = mean_and_std(mean, std)
    value = join(tag("span", mean_text), tag("span", f" ± {std_text}", class_="std"))
    return tag(
        "tr",
        tag("th", user_text(name, 60), scope="row"),
        tag("td", drawing, class_="plot"),
        tag("td", value, class_="number"),
    )


def _position(value: float, span: tuple[float, float]) -> float:
    return 100 * (value - span[0]) / (span[1] - span[0])


def _network(layers: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Markup:
    names = list(dict.fromkeys(layers))
    ratio = np.abs(mean) / np.where(std > 0, std, np.nan)
    lines: list[list[Any]] = []
    for name in names[:LISTED_LAYERS]:
        layer = layers == name
        finite = ratio[layer][np.isfinite(ratio[layer])]
        lines.append(
            [
                user_text(name, 40),
                count(layer.sum()),
                number(_median(np.abs(mean[layer]))),
                number(_median(std[layer])),
                percent(np.mean(finite > 1)) if finite.size else "–",
            ]
        )
    heads = ["Layer", "Weights", "median |mean|", "median std", "|mean| above std"]
    shown = names[:DRAWN_LAYERS]
    line_classes = ("blue", "orange", "ink", "blue dashed", "orange dashed", "ink dashed")
    chart = charts.signal_to_noise({name: ratio[layers == name] for name in shown})
    entries = [legend(css_class, name) for css_class, name in zip(line_classes, shown, strict=False)]
    caption = join(
        entries,
        " The distance of each weight's mean from zero, in standard deviations. Left of the dashed line even the sign "
        "is uncertain; such weights can often be pruned.",
    )
    words = f"The posterior has a mean and a standard deviation for each weight; {count(mean.size)} of them are shown."
    return join(tag("p", words), side_by_side(figure(chart, caption), table(heads, lines, numbers=(1, 2, 3, 4))))


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")
