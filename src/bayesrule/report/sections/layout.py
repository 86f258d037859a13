"""How sections are laid out: figures with captions, figures side by side, tables that scroll in their own box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..markup import Markup, tag


def figure(chart: Markup, caption: Any, *, wide: bool = False) -> Markup:
    """A chart and what it shows."""
    return tag("figure", chart, tag("figcaption", caption), class_="whole" if wide else None)


def beside(*figures: Markup | None) -> Markup:
    """Figures next to each other where there is room, else one below another."""
    return tag("div", figures, class_="beside")


def key(look: str, words: str) -> Markup:
    """A colour and what it stands for."""
    return tag("span", tag("i", class_=look), words, class_="key")


def table(
    heads: Sequence[Any], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = (), look: str = ""
) -> Markup:
    """A table; the columns named in `numbers` are set to the right."""

    def cells(kind: str, row: Sequence[Any]) -> list[Markup]:
        looks = ["number" if place in numbers else None for place in range(len(row))]
        scope = "col" if kind == "th" else None
        return [tag(kind, each, class_=shown, scope=scope) for each, shown in zip(row, looks, strict=True)]

    body = [tag("tr", cells("td", row)) for row in rows]
    whole = tag("table", tag("thead", tag("tr", cells("th", heads))), tag("tbody", body), class_=look or None)
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label="table")
