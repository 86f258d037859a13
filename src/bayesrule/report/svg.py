"""A small drawing layer: axes with round ticks, and lines, bands, dots, bars and whiskers on them, as inline SVG.

Written by hand rather than with matplotlib, because these drawings take their colours from the page's custom
properties: they follow the reader's light or dark theme, scale to any width, print sharply, and cost milliseconds.
Marks with many points are one path each, so a page of them stays small. Whatever is not finite is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .format_numbers import round_number
from .markup import Markup, joined, tag

LETTER = 6.4  # about the width of a character at the labels' size
TOP, RIGHT = 26, 14
Tick = tuple[float, str]


@dataclass
class Plot:
    """One pair of axes with limits `x` and `y`, and what is drawn on them.

    `name_x` stands below, `name_y` above the axis, where it can be read without turning the head. Ticks are pairs of
    a place and its label; left to themselves they are round numbers. `left` is the room for labels at the left.
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
        self.x, self.y = _apart(*self.x), _apart(*self.y)
        if self.ticks_y is None:
            self.ticks_y = ticks(*self.y, 5)
        if self.left is None:
            self.left = 12 + LETTER * max((len(label) for _, label in self.ticks_y), default=0)
        if self.ticks_x is None:
            self.ticks_x = ticks(*self.x, max(2, int((self.width - self.left) / 75)))
        self._top = TOP if self.name_y else 10
        self._bottom = self.height - (18 * bool(self.name_x) + (24 if self.ticks_x else 8))

    # Marks.

    def line(self, x: Any, y: Any, look: str) -> Plot:
        """A line through the points, broken where one is not finite or outside."""
        across, up = _floats(x, y)
        shown = np.isfinite(across) & np.isfinite(up) & self._inside(across, self.x) & self._inside(up, self.y)
        path, down = [], False
        for a, b, there in zip(self._across(across), self._up(up), shown, strict=True):
            if there:
                path.append(f"{'L' if down else 'M'}{_short(a)} {_short(b)}")
            down = bool(there)
        return self._path(path, f"line {look}")

    def band(self, x: Any, low: Any, high: Any, look: str) -> Plot:
        """What lies between two lines."""
        across, low, high = _floats(x, low, high)
        keep = np.isfinite(across) & ~np.isnan(low) & ~np.isnan(high)
        if keep.sum() < 2:
            return self
        a, below, above = self._across(across[keep]), self._up(low[keep]), self._up(high[keep])
        corners = [*zip(a, above, strict=True), *zip(a[::-1], below[::-1], strict=True)]
        path = "M" + "L".join(f"{_short(p)} {_short(q)}" for p, q in corners) + "Z"
        return self._path([path], f"band {look}")

    def dots(self, x: Any, y: Any, look: str) -> Plot:
        """A dot for each point, all in one path: strokes of no length with round ends."""
        across, up = _floats(x, y)
        keep = np.isfinite(across) & np.isfinite(up)
        points = zip(self._across(across[keep]), self._up(up[keep]), strict=True)
        return self._path([f"M{_short(a)} {_short(b)}h0" for a, b in points], f"dots {look}")

    def whiskers(self, x: Any, low: Any, high: Any, look: str) -> Plot:
        """An upright stroke for each x."""
        across, low, high = _floats(x, low, high)
        keep = np.isfinite(across) & ~np.isnan(low) & ~np.isnan(high)
        ends = zip(self._across(across[keep]), self._up(low[keep]), self._up(high[keep]), strict=True)
        return self._path([f"M{_short(a)} {_short(b)}V{_short(c)}" for a, b, c in ends], f"line {look}")

    def bars(self, edges: Any, heights: Any, look: str) -> Plot:
        """A bar from zero for each bin."""
        edges, heights = np.asarray(edges, float), np.nan_to_num(np.asarray(heights, float))
        at, floor = self._across(edges), self._up(np.zeros(1))[0]
        path = []
        for a, b, top in zip(at[:-1], at[1:], self._up(heights), strict=True):
            if abs(top - floor) > 1e-9:
                gap = min(0.5, (b - a) / 8)
                path.append(f"M{_short(a + gap)} {_short(floor)}V{_short(top)}H{_short(b - gap)}V{_short(floor)}Z")
        return self._path(path, f"bar {look}")

    def upright(self, x: float, look: str, label: str = "") -> Plot:
        """A line from the bottom to the top, and a word beside it."""
        if not (math.isfinite(x) and self._inside(np.asarray(x), self.x)):
            return self
        at = _short(self._across(np.asarray(x)))
        self._path([f"M{at} {_short(self._top)}V{_short(self._bottom)}"], f"line {look}")
        return self.text(x, self.y[1], label, below=True) if label else self

    def level(self, y: float, look: str) -> Plot:
        """A line from the left to the right."""
        if not (math.isfinite(y) and self._inside(np.asarray(y), self.y)):
            return self
        at = _short(self._up(np.asarray(y)))
        return self._path([f"M{_short(self.left or 0)} {at}H{_short(self.width - RIGHT)}"], f"line {look}")

    def text(self, x: float, y: float, words: str, *, below: bool = False) -> Plot:
        """Words beside a point, on the side where there is room."""
        a, b = float(self._across(np.asarray(x))), float(self._up(np.asarray(y)))
        late = a + LETTER * len(words) > self.width - RIGHT
        place = {"x": _short(a + (-4 if late else 4)), "y": _short(b + (10 if below else -5))}
        self.marks.append(tag("text", words, class_="said", text_anchor="end" if late else "start", **place))
        return self

    def spot(self, x: float, y: float, look: str, title: str, size: float = 7) -> Plot:
        """One dot of a size of its own, that says what it is when it is pointed at."""
        if math.isfinite(x) and math.isfinite(y):
            at = f"M{_short(self._across(np.asarray(x)))} {_short(self._up(np.asarray(y)))}h0"
            width = f"stroke-width:{_short(size)}"
            self.marks.append(tag("path", tag("title", title), d=at, class_=f"dots {look}", style=width))
        return self

    # The axes.

    def body(self) -> Markup:
        """The axes and the marks, without the drawing around them."""
        return joined(self._grid(), self.marks, self._names())

    def _grid(self) -> Markup:
        left, right = _short(self.left or 0), _short(self.width - RIGHT)
        rows = [tick for tick in self.ticks_y or () if self._inside(np.asarray(tick[0]), self.y)]
        columns = [tick for tick in self.ticks_x or () if self._inside(np.asarray(tick[0]), self.x)]
        ups = [float(self._up(np.asarray(place))) for place, _ in rows]
        acrosses = [float(self._across(np.asarray(place))) for place, _ in columns]
        grid = "".join(f"M{left} {_short(b)}H{right}" for b in ups)
        notches = "".join(f"M{_short(a)} {_short(self._bottom)}v4" for a in acrosses)
        texts = [
            tag("text", label, x=_short((self.left or 0) - 6), y=_short(b + 4), text_anchor="end")
            for b, (_, label) in zip(ups, rows, strict=True)
        ]
        for a, (_, label) in zip(acrosses, columns, strict=True):
            half = LETTER * len(label) / 2
            a = min(a, self.width - half)  # the last label stays on the page
            texts.append(tag("text", label, x=_short(a), y=_short(self._bottom + 17), text_anchor="middle"))
        axis = f"M{left} {_short(self._bottom)}H{right}{notches}"
        return joined(tag("path", d=grid, class_="grid"), tag("path", d=axis, class_="axis"), texts)

    def _names(self) -> Markup:
        middle = ((self.left or 0) + self.width - RIGHT) / 2
        below = tag(
            "text", self.name_x, class_="name", x=_short(middle), y=_short(self.height - 6), text_anchor="middle"
        )
        above = tag("text", self.name_y, class_="name", x="2", y="12")
        return joined(below if self.name_x else None, above if self.name_y else None)

    def _path(self, pieces: Sequence[str], look: str) -> Plot:
        if pieces:
            self.marks.append(tag("path", d="".join(pieces), class_=look))
        return self

    def _across(self, x: np.ndarray) -> np.ndarray:
        low, high = self.x
        left = self.left or 0
        return left + (np.clip(x, low, high) - low) / (high - low) * (self.width - RIGHT - left)

    def _up(self, y: np.ndarray) -> np.ndarray:
        low, high = self.y
        return self._bottom - (np.clip(y, low, high) - low) / (high - low) * (self._bottom - self._top)

    @staticmethod
    def _inside(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
        slack = 1e-6 * (limits[1] - limits[0])
        return (values >= limits[0] - slack) & (values <= limits[1] + slack)


def drawing(title: str, *plots: Plot, look: str = "") -> Markup:
    """Plots one below another as one drawing, with a title for those who do not see it."""
    width, height, placed = max(plot.width for plot in plots), 0.0, []
    for plot in plots:
        body = plot.body()
        placed.append(tag("g", body, transform=f"translate(0 {_short(height)})") if height else body)
        height += plot.height
    box = f"0 0 {_short(width)} {_short(height)}"
    said = {"role": "img", "aria_label": title, "class_": f"chart {look}".strip()}
    return tag("svg", placed, xmlns="http://www.w3.org/2000/svg", viewBox=box, **said)


def both(draw: Callable[[float], Markup], narrow: float = 400, wide: float = 840) -> Markup:
    """A drawing that needs width, once for phones and once for desks: the style sheet shows one of them."""
    return joined(tag("div", draw(narrow), class_="narrow"), tag("div", draw(wide), class_="wide"))


def ticks(low: float, high: float, most: int = 6) -> list[Tick]:
    """About so many round numbers from low to high, and their labels with as many decimals as they need.

    >>> ticks(0.0, 1.0, 5)
    [(0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1')]
    """
    low, high = _apart(low, high)
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = 1 + max(0, math.floor(math.log10(max(abs(low), abs(high), step) / step)) + 2)
    places = [index * step for index in range(first, last + 1)]
    return [(round(place, 12) if abs(place) < 1e3 else place, round_number(place, digits)) for place in places]


def limits(*arrays: Any, pad: float = 0.04) -> tuple[float, float]:
    """From the least to the greatest with a little room; a few values that are out of all proportion are left outside.

    >>> limits([0.0, 10.0], pad=0.1)
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


def _apart(low: float, high: float) -> tuple[float, float]:
    """Limits that are two numbers, the second the greater."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        return float(low), float(high)
    room = 0.5 * abs(low) or 1.0
    return low - room, low + room


def _floats(*arrays: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.atleast_1d(np.asarray(each, float)) for each in np.broadcast_arrays(*arrays))


def _short(value: Any) -> str:
    text = f"{float(value):.1f}"
    return text[:-2] if text.endswith(".0") else text
