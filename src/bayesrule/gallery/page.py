"""The gallery: one picture for each row of Table 1, the paper's figures, and an HTML page that shows them.

The page is written with the report's markup and style sheet, so both pages escape text in one place and share their
colours, in light and in dark; `page.css` of this folder adds only the grid of pictures.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import matplotlib
from matplotlib.figure import Figure

from ..recipes.table import table
from ..report.markup import Markup, join, tag
from ..report.page import html_document, style_sheet
from ..report.sections.derivation import RULE, format_math
from ..rule.rule import Rule
from . import deep_learning, inference, optimization, paper_figures
from .dark_theme import follow_theme
from .style import Picture

_MODULES = {
    "Optimization": optimization,
    "Deep learning": deep_learning,
    "Bayesian inference": inference,
    "Online learning": inference,
}
_FIGURES: tuple[tuple[str, str, str, Callable[[], Figure]], ...] = (
    ("wall", "A minimum next to a wall", "Figure 1 (a)", paper_figures.wall),
    ("sharp_and_flat", "A sharp minimum and a flat one", "Figure 1 (b)", paper_figures.sharp_and_flat),
    ("two_minima", "Two minima, two Gaussians", "section 3.2", paper_figures.two_minima),
)
_TITLE = "The Bayesian learning rule in pictures"


@dataclass(frozen=True)
class Entry:
    """A picture of the gallery, not drawn yet: its file's name, its title, its place in the paper, its section of the
    page, and the function that draws it."""

    name: str
    title: str
    where: str
    block: str
    draw: Callable[[], Picture | Figure]

    @property
    def caption(self) -> str:
        """The docstring of the function that draws it, without its reference to the paper."""
        text = " ".join((self.draw.__doc__ or "").split())
        text = re.sub(r" \(`fig:\w+`\)", "", text).removeprefix(f"{self.where[:1].upper()}{self.where[1:]}: ")
        return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class DrawnEntry:
    """A picture as SVG, and the rule that ran for it (None for the paper's figures, which compare several)."""

    entry: Entry
    svg: bytes
    rule: Rule | None


def entries() -> list[Entry]:
    """The paper's figures, then the rows of Table 1.

    >>> [entry.name for entry in entries()][:4]
    ['wall', 'sharp_and_flat', 'two_minima', 'gradient_descent']
    """
    from_paper = [Entry(name, title, where, "The paper's figures", draw) for name, title, where, draw in _FIGURES]
    from_table = [
        Entry(row.recipe, row.name, f"section {row.section}", row.block, getattr(_MODULES[row.block], row.recipe))
        for row in table()
        if row.available
    ]
    return from_paper + from_table


def draw_entry(entry: Entry) -> DrawnEntry:
    """Run the algorithm in float64 and draw it; the SVG has the same bytes every time."""
    with jax.enable_x64(True):
        picture = entry.draw()
    figure, rule = (picture, None) if isinstance(picture, Figure) else picture
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "bayesrule"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return DrawnEntry(entry, follow_theme(file.getvalue().decode()).encode(), rule)


def write_gallery(out: Path, chosen: list[Entry] | None = None) -> Iterator[DrawnEntry]:
    """Draw the pictures (all, or the `chosen`), yield each one, and at the end move them and the page to `out`.

    Until then they are in a temporary folder inside `out`, which fails at once if `out` cannot be written to. Other
    files in `out` stay. Each file is replaced atomically, and the page last, when all its pictures are in place.
    """
    drawn = []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".drawing-") as folder:
        for entry in entries() if chosen is None else chosen:
            drawn.append(draw_entry(entry))
            (Path(folder) / f"{entry.name}.svg").write_bytes(drawn[-1].svg)
            yield drawn[-1]
        (Path(folder) / "index.html").write_text(render_gallery(drawn), encoding="utf-8")
        for name in [*(f"{each.entry.name}.svg" for each in drawn), "index.html"]:
            (Path(folder) / name).replace(out / name)


def render_gallery(drawn: list[DrawnEntry]) -> str:
    """The page for pictures in its own folder: a grid of cards in each section, one column on a phone."""
    blocks: dict[str, list[DrawnEntry]] = {}
    for each in drawn:
        blocks.setdefault(each.entry.block, []).append(each)
    header = tag(
        "header",
        tag("h1", _TITLE),
        tag("p", RULE, class_="equation"),
        tag(
            "p",
            "One update, and the algorithms of Table 1 of Khan and Rue (JMLR 2023) that follow from it. Each picture "
            "is a run of the rule with the four pieces below it: a family for q, the points at which the loss is "
            "evaluated, what is measured there, and the steps.",
        ),
    )
    sections = [
        tag("section", tag("h2", block), tag("div", [_card(each) for each in members], class_="cards"))
        for block, members in blocks.items()
    ]
    style = style_sheet() + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return html_document(_TITLE, tag("main", header, sections, class_="gallery"), style)


def _card(drawn: DrawnEntry) -> Markup:
    entry = drawn.entry
    recipe = join(tag("code", f"blr.{entry.name}"), " · ") if drawn.rule is not None else None
    text = [tag("h3", entry.title), tag("p", recipe, entry.where, class_="where"), tag("p", entry.caption)]
    return tag(
        "figure",
        tag("img", src=f"{entry.name}.svg", alt=entry.title, loading="lazy"),
        tag("figcaption", text, _pieces(drawn.rule)),
        id=entry.name,
    )


def _pieces(rule: Rule | None) -> Markup | None:
    """The four pieces as the rule prints them."""
    if rule is None:
        return None
    pieces = [
        ("family", repr(rule.family), rule.family.kind.meaning),
        ("points", repr(rule.points), rule.points.meaning),
        ("curvature", repr(rule.curvature), rule.curvature.meaning),
    ]
    rows = [
        join(tag("dt", name), tag("dd", tag("b", value), " ", format_math(meaning))) for name, value, meaning in pieces
    ]
    return tag("dl", rows, tag("dt", "steps"), tag("dd", str(rule.steps), class_="steps"))
