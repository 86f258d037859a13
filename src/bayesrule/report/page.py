"""`report.html`: the sections of a run on one page, in one file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..runs.run import Run
from .held_out_rows import task
from .markup import Markup, join, tag
from .sections.calibration import render_calibration
from .sections.data_and_reproduction import render_data, render_reproduction
from .sections.derivation import render_derivation
from .sections.headline import plain_title, render_headline
from .sections.notable_rows import render_notable_rows
from .sections.predictions import render_predictions
from .sections.quality import render_quality
from .sections.ranking import render_ranking
from .sections.structure import render_factors, render_groups, render_topics
from .sections.training import render_training
from .sections.weights import render_weights
from .sections.what_next import render_what_next

# The sections on what a model without a target found are left out of the others' pages, and the other way round.
Section = Callable[[Run], Markup | None]
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("next", "What to do next", render_what_next),
    ("groups", "The groups", render_groups),
    ("topics", "The topics", render_topics),
    ("factors", "The factors", render_factors),
    ("quality", "Quality of the predictions", render_quality),
    ("calibration", "Calibration", render_calibration),
    ("ranking", "Ranking", render_ranking),
    ("predictions", "Predictions and observations", render_predictions),
    ("weights", "Posterior of the weights", render_weights),
    ("rows", "Rows to look at", render_notable_rows),
    ("training", "Training", render_training),
    ("derivation", "The algorithm", render_derivation),
    ("data", "The data", render_data),
    ("reproduction", "How to reproduce it", render_reproduction),
)


def render_report(run: Run) -> str:
    """The report of a run as one HTML file; a section for which the run has no data is left out."""
    titles = {"quality": "Quality on held-out rows"} if run.structure else {}
    rendered = [(anchor, titles.get(anchor, title), section(run)) for anchor, title, section in SECTIONS]
    present = [(anchor, title, body) for anchor, title, body in rendered if body]
    links = tag(
        "nav",
        tag("ul", [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title, _ in present]),
        aria_label="Sections",
    )
    sections = [tag("section", tag("h2", title), body, id=anchor) for anchor, title, body in present]
    navigation = links if len(present) > 2 else None
    main = tag("main", render_headline(run), navigation, sections, _footer(run), class_=task(run) or None)
    return html_document(plain_title(run), main, style_sheet())


def html_document(title: str, body: Markup, style: str) -> str:
    """A complete HTML document with its style sheet inside, for any screen, light or dark as the reader's system is."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, tag("body", body), lang="en"), "\n")


def style_sheet() -> str:
    """The text of `page.css`, which lies in this folder."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _footer(run: Run) -> Markup:
    version = run.versions.get("bayesrule")
    program = f"Made by bayesrule {version}." if version not in (None, "unknown") else "Made by bayesrule."
    paper = "Khan and Rue, “The Bayesian learning rule”, Journal of Machine Learning Research 24, 2023."
    return tag("footer", tag("p", f"{program} {paper}"))
