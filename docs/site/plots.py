"""Plots of tables that a page has: `<!-- plot: name -->` before a table of benchmarks.md becomes a picture of it.

The numbers are read from the page, so that the picture and the table say the same.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from bayesrule.gallery.dark_theme import follow_theme
from bayesrule.gallery.style import BAYESIAN, INK, PLAIN, style_axes

PAGE = "benchmarks.md"
_PLACE = re.compile(r"<!-- plot: (?P<name>\w+) -->\s*(?P<table>(?:\|.*\n)+)")
_NUMBER = re.compile(r"([+-]?\d+\.?\d*) ± (\d+\.?\d*)")


def read_table(text: str) -> dict[str, list[str]]:
    """The columns of a table by their headings.

    >>> read_table("| a | b |\\n|---|---|\\n| x | **1.0 ± 0.5** |\\n")
    {'a': ['x'], 'b': ['1.0 ± 0.5']}
    """
    cells = [[cell.strip().strip("*") for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    return {heading: list(column) for heading, *column in zip(cells[0], *cells[2:], strict=True)}


def _numbers(column: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and what follows their ±."""
    found = np.array([[float(part) for part in _NUMBER.match(cell).groups()] for cell in column])
    return found[:, 0], found[:, 1]


def _draw(table: dict[str, list[str]], columns: dict[str, tuple[str, str]], line: float, title: str) -> str:
    """A row for each set, with a bar of one standard error for each of the columns, and a line to compare with."""
    names = [name.partition(":")[2].rpartition("/")[2] or name for name in table["set"]]
    figure = Figure(figsize=(7.2, 0.19 * len(names) + 1.0), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    axes.axvline(line, color=INK, lw=0.8, ls=":")
    for number, (heading, (text, color)) in enumerate(columns.items()):
        values, errors = _numbers(table[heading])
        places = np.arange(len(names)) + 0.28 * (number - (len(columns) - 1) / 2)
        axes.errorbar(values, places, xerr=errors, fmt="oD"[number], color=color, ms=3.5, lw=1.1, label=text)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlabel=title)
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "bayesrule"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return follow_theme(file.getvalue().decode())


PLOTS = {
    "coverage": (
        {"coverage, %": ("RidgeRegression", BAYESIAN), "theirs, %": ("BayesianRidge of scikit-learn", PLAIN)},
        90.0,
        "held-out rows within their 90 % intervals, %",
    ),
    "classification": (
        {"− C = 1": ("minus LogisticRegression(C=1)", BAYESIAN), "− CV": ("minus LogisticRegressionCV", PLAIN)},
        0.0,
        "held-out NLL, difference: below 0 ours is better",
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Draw the pictures."""
    text = Path(config.docs_dir, PAGE).read_text(encoding="utf-8")
    for match in _PLACE.finditer(text):
        svg = _draw(read_table(match["table"]), *PLOTS[match["name"]])
        files.append(File.generated(config, f"benchmarks/{match['name']}.svg", content=svg))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    """Show them before their tables."""
    show = lambda match: (
        f"![{PLOTS[match['name']][2]}](benchmarks/{match['name']}.svg){{ .figure loading=lazy }}\n\n{match['table']}"
    )
    return _PLACE.sub(show, markdown)
