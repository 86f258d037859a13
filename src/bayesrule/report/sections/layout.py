"""The layout that sections share: figures with captions, figures side by side, tables that scroll in their own box."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import unescape
from typing import Any

from ..markup import Markup, join, tag


def figure(chart: Markup, caption: Any, *, wide: bool = False) -> Markup:
    """A chart with its caption."""
    return tag("figure", chart, tag("figcaption", caption), class_="full-width" if wide else None)


def side_by_side(*figures: Markup | None) -> Markup:
    """Figures next to each other on a wide screen, one below another on a narrow one."""
    return tag("div", figures, class_="side-by-side")


def legend(css_class: str, meaning: str) -> Markup:
    """An entry of a chart's legend: a colour and its meaning."""
    return tag("span", tag("i", class_=css_class), meaning, class_="legend")


def mark_options(text: str) -> Markup:
    """Text in which options of the command line are set as code and are not broken across lines."""
    parts = re.split(r"((?<![\w-])(?:--[\w-]+(?: \d+)?|-p \w+=(?:\w+|…))|`[^`]+`)", text)
    code = lambda part: tag("code", part.strip("`"), class_="option" if part.startswith("-") else None)
    return join([code(part) if index % 2 else part for index, part in enumerate(parts)])


def command(line: str) -> Markup:
    """A command to copy. On a narrow screen it is broken between words only, not after the hyphens of an option."""
    words = [tag("span", word) if len(word) <= 30 else word for word in line.split(" ")]
    parts = [join(" " if index else "", word) for index, word in enumerate(words)]
    return tag("pre", tag("code", parts), class_="command", aria_label="command")


def _plain(head: Any) -> str:
    """The text of a heading, without its elements, for an attribute."""
    return unescape(re.sub("<[^>]*>", "", head)) if isinstance(head, Markup) else str(head)


def table(
    heads: Sequence[Any], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = (), css_class: str = ""
) -> Markup:
    """A table; the columns whose indices are in `numbers` are aligned to the right.

    On a phone every row of a table with more than four columns becomes a block, in which each value has its own label.
    """
    labels = [_plain(head) for head in heads]

    def cells(element: str, row: Sequence[Any]) -> list[Markup]:
        classes = ["number" if index in numbers else None for index in range(len(row))]
        scope = "col" if element == "th" else None
        named = labels if element == "td" else [None] * len(labels)
        return [
            tag(element, cell, class_=each, scope=scope, data_label=label)
            for cell, each, label in zip(row, classes, named, strict=True)
        ]

    body = [tag("tr", cells("td", row)) for row in rows]
    css_class = f"{css_class} stack".strip() if len(labels) > 4 else css_class
    content = tag("table", tag("thead", tag("tr", cells("th", heads))), tag("tbody", body), class_=css_class or None)
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label="table")
