"""What was learnt about the weights: a forest plot of coefficients, or how sure a network is of its layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...metrics import interval
from ...runs.run import Run
from .. import charts
from ..format_numbers import count, number, percent, several, with_spread
from ..markup import Markup, joined, named, tag
from ..svg import ticks
from .layout import beside, figure, key, table

SHOWN, LAYERS = 20, 6


def weights(run: Run) -> Markup | None:
    """Coefficients where they have names, layers where they have those."""
    mean, std = (_known(run.weights.get(each, ())) for each in ("mean", "std"))
    if not mean.size or mean.shape != std.shape:
        return None
    if "name" in run.weights:
        return _forest(_names(run, mean), mean.ravel(), std.ravel())
    layers = np.asarray(run.weights.get("layer", np.full(mean.size, "all"))).astype(str).ravel()
    return _network(layers, mean.ravel(), std.ravel()) if layers.size == mean.size else None


def _known(values: Any) -> np.ndarray:
    array = np.asarray(values, float)
    return np.where(np.isfinite(array), array, np.nan)


def _names(run: Run, mean: np.ndarray) -> list[str]:
    """A name for each coefficient; with several classes, which class and which input."""
    given = [str(each) for each in run.weights["name"]]
    if mean.ndim == 2 and len(given) in mean.shape:
        other = mean.size // len(given)
        outer = run.classes if len(run.classes) == other else [str(place) for place in range(other)]
        inside = mean.shape[1] == len(given)
        pairs = [(a, b) for a in outer for b in given] if inside else [(a, b) for b in given for a in outer]
        return [f"{of}: {name}" for of, name in pairs]
    return [*given, *(f"weight {place}" for place in range(len(given), mean.size))]


def _forest(names: list[str], mean: np.ndarray, std: np.ndarray) -> Markup | None:
    sound = np.flatnonzero(charts.finite(mean, std) & (std >= 0))
    if not sound.size:
        return None
    strength = np.abs(mean[sound]) / np.maximum(std[sound], 1e-300)
    best = sound[np.argsort(-strength, kind="stable")[:SHOWN]]
    low, high = interval(mean, std)
    left, right = min(float(low[best].min()), 0.0), max(float(high[best].max()), 0.0)
    room = 0.03 * (right - left) or 1.0
    span = (left - room, right + room)
    scale = [tag("span", label, style=f"left:{_place(at, span):.2f}%") for at, label in ticks(*span, 3)]
    head = tag(
        "tr",
        tag("th", "Coefficient", scope="col"),
        tag("th", tag("div", scale, class_="scale"), scope="col"),
        tag("th", "mean ± std", scope="col", class_="number"),
    )
    body = [_coefficient(names[i], float(mean[i]), float(std[i]), span) for i in best]
    clear = int(np.sum((low[sound] > 0) | (high[sound] < 0)))
    more = f" {several(sound.size - SHOWN, 'more is', 'more are')} not shown." if sound.size > SHOWN else ""
    words = joined(
        key("blue", "90 % interval away from zero"),
        key("pale", "zero is inside"),
        " Posterior means with 90 % intervals, the clearest first (by |mean|/std); numbers were standardised before. "
        f"Of {several(sound.size, 'coefficient')}, {count(clear)} "
        f"{'has its' if clear == 1 else 'have their'} interval away from zero.{more}",
    )
    return joined(
        tag("table", tag("thead", head), tag("tbody", body), class_="forest"), tag("p", words, class_="caption")
    )


def _coefficient(name: str, mean: float, std: float, span: tuple[float, float]) -> Markup:
    low, high = (float(limit) for limit in interval(mean, std))
    ends = [_place(limit, span) for limit in (low, high)]
    look = "blue" if low * high > 0 else "pale"
    # The drawing is stretched to its cell; strokes keep their width, and so the dots stay round.
    zero, middle = _place(0.0, span), _place(mean, span)
    marks = [
        tag("path", d=f"M{zero:.2f} 0V20", class_="grid"),
        tag("path", d=f"M{ends[0]:.2f} 10H{ends[1]:.2f}", class_=f"line {look}"),
        tag("path", d=f"M{middle:.2f} 10h0", class_=f"dots {look}"),
    ]
    drawn = tag("svg", marks, viewBox="0 0 100 20", preserveAspectRatio="none", aria_hidden="true")
    shown, spread = with_spread(mean, std)
    told = joined(tag("span", shown), tag("span", f" ± {spread}", class_="spread"))
    return tag(
        "tr", tag("th", named(name, 60), scope="row"), tag("td", drawn, class_="plot"), tag("td", told, class_="number")
    )


def _place(value: float, span: tuple[float, float]) -> float:
    return 100 * (value - span[0]) / (span[1] - span[0])


def _network(layers: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Markup:
    names = list(dict.fromkeys(layers))
    ratio = np.abs(mean) / np.where(std > 0, std, np.nan)
    lines: list[list[Any]] = []
    for name in names[:40]:
        mine = layers == name
        known = ratio[mine][np.isfinite(ratio[mine])]
        lines.append(
            [
                named(name, 40),
                count(mine.sum()),
                number(_middle(np.abs(mean[mine]))),
                number(_middle(std[mine])),
                percent(np.mean(known > 1)) if known.size else "–",
            ]
        )
    heads = ["Layer", "Looked at", "median |mean|", "median std", "|mean| above std"]
    shown = names[:LAYERS]
    looks = ("blue", "orange", "ink", "blue dashed", "orange dashed", "ink dashed")
    drawn = charts.strengths({name: ratio[layers == name] for name in shown})
    keys = [key(look, name) for look, name in zip(looks, shown, strict=False)]
    caption = joined(
        keys,
        " How many standard deviations each weight's mean is from zero. Left of the dashed line the sign itself is in "
        "doubt: such weights could often be left out.",
    )
    words = (
        f"The posterior has a mean and a standard deviation for each weight; {count(mean.size)} of them are looked at."
    )
    return joined(tag("p", words), beside(figure(drawn, caption), table(heads, lines, numbers=(1, 2, 3, 4))))


def _middle(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")
