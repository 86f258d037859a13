"""The gallery: one picture for each row of Table 1, the paper's figures, and a page that shows them."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jax
import matplotlib
from matplotlib.figure import Figure

from ..recipes.table import table
from ..rule.rule import Rule
from . import deep_learning as pictures_deep_learning
from . import inference as pictures_inference
from . import optimization as pictures_optimization
from . import paper_figures as figures

_PLACES = {
    "Optimization": pictures_optimization,
    "Deep learning": pictures_deep_learning,
    "Bayesian inference": pictures_inference,
    "Online learning": pictures_inference,
}
_FIGURES: tuple[tuple[str, str, str, Callable[[], Figure]], ...] = (
    ("wall", "A minimum next to a wall", "Figure 1 (a)", figures.wall),
    ("sharp_and_flat", "A sharp minimum and a flat one", "Figure 1 (b)", figures.sharp_and_flat),
    ("two_minima", "Two minima, two Gaussians", "section 3.2", figures.two_minima),
)


@dataclass(frozen=True)
class Entry:
    """A picture still to be drawn: what it is called, where it belongs, and who draws it."""

    name: str
    title: str
    where: str
    block: str
    draw: Callable[[], Any]

    @property
    def caption(self) -> str:
        """What is seen: the words that stand over the function that draws it."""
        text = " ".join((self.draw.__doc__ or "").split())
        text = re.sub(r" \(`fig:\w+`\)", "", text).removeprefix(f"{self.where[:1].upper()}{self.where[1:]}: ")
        return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Drawn:
    """A picture as an SVG, and the algorithm that ran for it (the paper's figures have several)."""

    entry: Entry
    svg: bytes
    rule: Rule | None


def entries() -> list[Entry]:
    """The paper's figures, then the rows of Table 1.

    >>> [entry.name for entry in entries()][:4]
    ['wall', 'sharp_and_flat', 'two_minima', 'gradient_descent']
    """
    first = [Entry(name, title, where, "The paper's figures", draw) for name, title, where, draw in _FIGURES]
    rows = [
        Entry(row.recipe, row.name, f"section {row.section}", row.block, getattr(_PLACES[row.block], row.recipe))
        for row in table()
        if row.available
    ]
    return first + rows


def drawn(entry: Entry) -> Drawn:
    """Run the algorithm and draw it, in float64; the same bytes every time."""
    with jax.enable_x64(True):
        found = entry.draw()
    figure, rule = (found, None) if isinstance(found, Figure) else found
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "bayesrule"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return Drawn(entry, file.getvalue(), rule)


def gallery(out: Path, chosen: list[Entry] | None = None) -> Iterator[Drawn]:
    """Draw everything, yield each picture when it is done, and in the end put all of them and the page into the folder.

    Until then they are in a folder of their own inside of it, so that one that cannot be written to is known at once.
    Other files stay; a file is replaced whole or not at all, and the page last, when all that it shows is there.
    """
    done = []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".drawing-") as beside:
        for entry in entries() if chosen is None else chosen:
            done.append(drawn(entry))
            (Path(beside) / f"{entry.name}.svg").write_bytes(done[-1].svg)
            yield done[-1]
        (Path(beside) / "index.html").write_text(page(done), encoding="utf-8")
        for name in [*(f"{each.entry.name}.svg" for each in done), "index.html"]:
            (Path(beside) / name).replace(out / name)


def page(done: list[Drawn]) -> str:
    """A page for pictures that lie beside it: in one column on a phone, light or dark as the reader's screen is."""
    blocks: dict[str, list[Drawn]] = {}
    for each in done:
        blocks.setdefault(each.entry.block, []).append(each)
    sections = "".join(
        f"<section><h2>{escape(block)}</h2><div class=grid>{''.join(map(_card, members))}</div></section>"
        for block, members in blocks.items()
    )
    return _PAGE.replace("{sections}", sections)


def _card(each: Drawn) -> str:
    entry, name = each.entry, escape(each.entry.name)
    code = f"<code>blr.{name}</code> · " if each.rule is not None else ""
    return (
        f"<figure id={name}><img src={name}.svg alt='{escape(entry.title)}' loading=lazy>"
        f"<figcaption><h3>{escape(entry.title)}</h3><p class=where>{code}{escape(entry.where)}</p>"
        f"<p>{escape(entry.caption)}</p>{_pieces(each.rule)}</figcaption></figure>"
    )


def _pieces(rule: Rule | None) -> str:
    """The four pieces as the rule prints them."""
    if rule is None:
        return ""
    pieces: list[tuple[str, str, str]] = [
        ("family", repr(rule.family), rule.family.kind.meaning),
        ("points", repr(rule.points), rule.points.meaning),
        ("curvature", repr(rule.curvature), rule.curvature.meaning),
    ]
    rows = "".join(
        f"<dt>{piece}</dt><dd><b>{escape(value)}</b> {escape(meaning)}</dd>" for piece, value, meaning in pieces
    )
    return f"<dl>{rows}<dt>steps</dt><dd class=steps>{escape(str(rule.steps))}</dd></dl>"


_PAGE = """<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<title>The Bayesian learning rule in pictures</title>
<style>
:root { color-scheme: light dark; --ground: #f6f5f2; --ink: #222; --soft: #5c5c5c; --card: #fff; --line: #dcdad4;
  --mark: #16508f; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181a; --ink: #e8e6e1; --soft: #a9a7a1; --card: #212326;
  --line: #35373b; --mark: #8fb8e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
header { max-width: 44rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 1rem; }
h3 { font-size: 1.05rem; margin: 0; }
.rule { overflow-x: auto; font-size: 1.05rem; }
.grid { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; overflow: hidden;
  display: flex; flex-direction: column; }
/* The pictures are drawn in dark ink: they keep their light ground on a dark page. */
img { display: block; width: 100%; aspect-ratio: 16 / 10; object-fit: contain; background: #fff; padding: .6rem; }
figcaption { padding: .9rem 1rem 1.1rem; }
figcaption p { margin: .4rem 0 0; }
.where { color: var(--soft); font-size: .85rem; }
code { color: var(--mark); font: .9em ui-monospace, monospace; }
dl { display: grid; grid-template-columns: 5.2rem 1fr; gap: .2rem .6rem; margin: .8rem 0 0; font-size: .82rem;
  color: var(--soft); border-top: 1px solid var(--line); padding-top: .7rem; }
dd { margin: 0; overflow-wrap: anywhere; }
dd b { color: var(--ink); font-weight: 600; }
.steps { color: var(--ink); }
</style>
<header>
<h1>The Bayesian learning rule in pictures</h1>
<p class=rule>λ ← λ − ρ ∇<sub>μ</sub> [ E<sub>q</sub> ℓ̄(θ) − H(q) ]</p>
<p>One update, and the algorithms of Table 1 of Khan and Rue (JMLR 2023) that follow from it. Each picture is a run of
the rule with the four pieces below it: a family for q, points that stand for the expectation, what is measured there,
and steps.</p>
</header>
{sections}
</html>
"""
