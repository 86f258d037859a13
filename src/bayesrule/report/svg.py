"""A small plotting layer: axes with round ticks, and lines, bands, dots, bars and whiskers, as inline SVG.

It is used instead of matplotlib because these drawings take their colours from the page's custom properties: they
follow the reader's light or dark theme, scale to any width, print sharply, and take milliseconds. A mark with many
points is one path, so the page stays small. Values that are not finite are not drawn. A `css_class` names the look of a
mark, as the style sheet defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .format_numbers import trimmed
from .markup import Markup, join, tag

CHARACTER = 6.4  # approximate width of a character of the labels, in pixels
TOP, RIGHT = 26, 14  # margins, in pixels
Tick = tuple[float, str]


@dataclass
class Plot:
    """One pair of axes with limits `x` and `y`, and the marks drawn on them; the drawing methods return the plot.

    `name_x` is written below the axes and `name_y` above them, both horizontally. Ticks are pairs of a value and its
    label; by default they are round numbers. `left` is the margin for the labels of the y axis, in pixels.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    name_x: str = ""
    name_y: str = ""
    width: float = 400
    height: float = 280
    ticks_x: Sequence[Tick] | None = None
    ticks_y: Sequence[Tick] | None = None
    left: float | None = None
    marks: list[Markup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x, self.y = _distinct_limits(*self.x), _distinct_limits(*self.y)
        if self.ticks_y is None:
            self.ticks_y = round_ticks(*self.y, 5)
        if self.left is None:
            self.left = 12 + CHARACTER * max((len(label) for _, label in self.ticks_y), default=0)
        if self.ticks_x is None:
            self.ticks_x = round_ticks(*self.x, max(2, int((self.width - self.left) / 75)))
        self._top = TOP if self.name_y else 10
        self._bottom = self.height - (18 * bool(self.name_x) + (24 if self.ticks_x else 8))

    # Marks.

    def line(self, x: Any, y: Any, css_class: str) -> Plot:
        """A line through the points, broken where one is not finite or outside."""
        x, y = _as_floats(x, y)
        shown = np.isfinite(x) & np.isfinite(y) & self._inside(x, self.x) & self._inside(y, self.y)
        path, pen_down = [], False
        for a, b, visible in zip(self._x_px(x), self._y_px(y), shown, strict=True):
            if visible:
                path.append(f"{'L' if pen_down else 'M'}{_px(a)} {_px(b)}")
            pen_down = bool(visible)
        return self._path(path, f"line {css_class}")

    def band(self, x: Any, low: Any, high: Any, css_class: str) -> Plot:
        """The area between two lines."""
        x, low, high = _as_floats(x, low, high)
        keep = np.isfinite(x) & ~np.isnan(low) & ~np.isnan(high)
        if keep.sum() < 2:
            return self
        a, below, above = self._x_px(x[keep]), self._y_px(low[keep]), self._y_px(high[keep])
        corners = [*zip(a, above, strict=True), *zip(a[::-1], below[::-1], strict=True)]
        path = "M" + "L".join(f"{_px(p)} {_px(q)}" for p, q in corners) + "Z"
        return self._path([path], f"band {css_class}")

    def dots(self, x: Any, y: Any, css_class: str) -> Plot:
        """A dot for each point, all in one path: strokes of length zero with round ends."""
        x, y = _as_floats(x, y)
        keep = np.isfinite(x) & np.isfinite(y)
        points = zip(self._x_px(x[keep]), self._y_px(y[keep]), strict=True)
        return self._path([f"M{_px(a)} {_px(b)}h0" for a, b in points], f"dots {css_class}")

    def whiskers(self, x: Any, low: Any, high: Any, css_class: str) -> Plot:
        """A vertical stroke from `low` to `high` at each x."""
        x, low, high = _as_floats(x, low, high)
        keep = np.isfinite(x) & ~np.isnan(low) & ~np.isnan(high)
        ends = zip(self._x_px(x[keep]), self._y_px(low[keep]), self._y_px(high[keep]), strict=True)
        return self._path([f"M{_px(a)} {_px(b)}V{_px(c)}" for a, b, c in ends], f"line {css_class}")

    def bars(self, edges: Any, heights: Any, css_class: str) -> Plot:
        """A bar from zero for each bin."""
        edges, heights = np.asarray(edges, float), np.nan_to_num(np.asarray(heights, float))
        sides, floor = self._x_px(edges), self._y_px(np.zeros(1))[0]
        path = []
        for a, b, top in zip(sides[:-1], sides[1:], self._y_px(heights), strict=True):
            if abs(top - floor) > 1e-9:
                gap = min(0.5, (b - a) / 8)
                path.append(f"M{_px(a + gap)} {_px(floor)}V{_px(top)}H{_px(b - gap)}V{_px(floor)}Z")
        return self._path(path, f"bar {css_class}")

    def vertical(self, x: float, css_class: str, label: str = "") -> Plot:
        """A vertical line across the plot, with an optional label."""
        if not (math.isfinite(x) and self._inside(np.asarray(x), self.x)):
            return self
        at = _px(self._x_px(np.asarray(x)))
        self._path([f"M{at} {_px(self._top)}V{_px(self._bottom)}"], f"line {css_class}")
        return self.text(x, self.y[1], label, below=True) if label else self

    def text(self, x: float, y: float, label: str, *, below: bool = False) -> Plot:
        """A label to the right of a point, or to the left if it would leave the plot."""
        a, b = float(self._x_px(np.asarray(x))), float(self._y_px(np.asarray(y)))
        to_left = a + CHARACTER * len(label) > self.width - RIGHT
        position = {"x": _px(a + (-4 if to_left else 4)), "y": _px(b + (10 if below else -5))}
        self.marks.append(tag("text", label, text_anchor="end" if to_left else "start", **position))
        return self

    def marker(self, x: float, y: float, css_class: str, title: str, size: float = 7) -> Plot:
        """One dot of a given size, with a tooltip."""
        if math.isfinite(x) and math.isfinite(y):
            at = f"M{_px(self._x_px(np.asarray(x)))} {_px(self._y_px(np.asarray(y)))}h0"
            width = f"stroke-width:{_px(size)}"
            self.marks.append(tag("path", tag("title", title), d=at, class_=f"dots {css_class}", style=width))
        return self

    def badge(self, x: float, y: float, label: str) -> Plot:
        """A short label on a disc in the page's colour, so that it can be read across dots."""
        a, b = _px(self._x_px(np.asarray(x))), float(self._y_px(np.asarray(y)))
        self.marks.append(tag("circle", cx=a, cy=_px(b), r="10", class_="badge"))
        self.marks.append(tag("text", label, x=a, y=_px(b + 4), text_anchor="middle", class_="badge-label"))
        return self

    # The axes.

    def body(self) -> Markup:
        """The axes and the marks, without the `svg` element around them."""
        return join(self._grid(), self.marks, self._names())

    def _grid(self) -> Markup:
        left, right = _px(self.left or 0), _px(self.width - RIGHT)
        rows = [tick for tick in self.ticks_y or () if self._inside(np.asarray(tick[0]), self.y)]
        columns = [tick for tick in self.ticks_x or () if self._inside(np.asarray(tick[0]), self.x)]
        tick_ys = [float(self._y_px(np.asarray(value))) for value, _ in rows]
        tick_xs = [float(self._x_px(np.asarray(value))) for value, _ in columns]
        grid = "".join(f"M{left} {_px(b)}H{right}" for b in tick_ys)
        tick_marks = "".join(f"M{_px(a)} {_px(self._bottom)}v4" for a in tick_xs)
        texts = [
            tag("text", label, x=_px((self.left or 0) - 6), y=_px(b + 4), text_anchor="end")
            for b, (_, label) in zip(tick_ys, rows, strict=True)
        ]
        for a, (_, label) in zip(tick_xs, columns, strict=True):
            half = CHARACTER * len(label) / 2
            a = min(a, self.width - half)  # The last label must not leave the drawing.
            texts.append(tag("text", label, x=_px(a), y=_px(self._bottom + 17), text_anchor="middle"))
        axis = f"M{left} {_px(self._bottom)}H{right}{tick_marks}"
        return join(tag("path", d=grid, class_="grid"), tag("path", d=axis, class_="axis"), texts)

    def _names(self) -> Markup:
        middle = ((self.left or 0) + self.width - RIGHT) / 2
        below = tag("text", self.name_x, class_="name", x=_px(middle), y=_px(self.height - 6), text_anchor="middle")
        above = tag("text", self.name_y, class_="name", x="2", y="12")
        return join(below if self.name_x else None, above if self.name_y else None)

    def _path(self, pieces: Sequence[str], css_class: str) -> Plot:
        if pieces:
            self.marks.append(tag("path", d="".join(pieces), class_=css_class))
        return self

    def _x_px(self, x: np.ndarray) -> np.ndarray:
        low, high = self.x
        left = self.left or 0
        return left + (np.clip(x, low, high) - low) / (high - low) * (self.width - RIGHT - left)

    def _y_px(self, y: np.ndarray) -> np.ndarray:
        low, high = self.y
        return self._bottom - (np.clip(y, low, high) - low) / (high - low) * (self._bottom - self._top)

    @staticmethod
    def _inside(values: np.ndarray, span: tuple[float, float]) -> np.ndarray:
        slack = 1e-6 * (span[1] - span[0])
        return (values >= span[0] - slack) & (values <= span[1] + slack)


def svg_drawing(title: str, *plots: Plot, css_class: str = "") -> Markup:
    """One drawing of several plots, one below another; the title is read out by screen readers."""
    width, height, placed = max(plot.width for plot in plots), 0.0, []
    for plot in plots:
        body = plot.body()
        placed.append(tag("g", body, transform=f"translate(0 {_px(height)})") if height else body)
        height += plot.height
    box = f"0 0 {_px(width)} {_px(height)}"
    attributes = {"role": "img", "aria_label": title, "class_": f"chart {css_class}".strip()}
    return tag("svg", placed, xmlns="http://www.w3.org/2000/svg", viewBox=box, **attributes)


def narrow_and_wide(draw: Callable[[float], Markup], narrow: float = 400, wide: float = 840) -> Markup:
    """A drawing in two widths, for phones and for larger screens; the style sheet shows one of them."""
    return join(tag("div", draw(narrow), class_="narrow"), tag("div", draw(wide), class_="wide"))


def round_ticks(low: float, high: float, most: int = 6) -> list[Tick]:
    """At most about `most` round numbers between low and high, each with its label.

    >>> round_ticks(0.0, 1.0, 5)
    [(0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1')]
    """
    low, high = _distinct_limits(low, high)
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = 1 + max(0, math.floor(math.log10(max(abs(low), abs(high), step) / step)) + 2)
    values = [index * step for index in range(first, last + 1)]
    return [(round(value, 12) if abs(value) < 1e3 else value, trimmed(value, digits)) for value in values]


def axis_limits(*arrays: Any, pad: float = 0.04) -> tuple[float, float]:
    """Limits of an axis for these values, with a margin of `pad`; extreme outliers are left outside.

    >>> axis_limits([0.0, 10.0], pad=0.1)
    (-1.0, 11.0)
    """
    values = np.concatenate([np.asarray(each, float).ravel() for each in arrays])
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    inner, outer = np.quantile(values, [0.01, 0.99])
    reach = 3 * (outer - inner)
    low, high = float(values.min()), float(values.max())
    if reach > 0:
        low, high = max(low, float(inner - reach)), min(high, float(outer + reach))
    return low - pad * (high - low), high + pad * (high - low)


def _distinct_limits(low: float, high: float) -> tuple[float, float]:
    """Finite limits with low < high, widened if the two are equal."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        return float(low), float(high)
    margin = 0.5 * abs(low) or 1.0
    return low - margin, low + margin


def _as_floats(*arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.atleast_1d(np.asarray(each, float)) for each in np.broadcast_arrays(*arrays))


def _px(value: Any) -> str:
    text = f"{float(value):.1f}"
    return text[:-2] if text.endswith(".0") else text
