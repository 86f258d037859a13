"""`report.html`: all that a run has to say on one page, in one file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..runs.run import Run
from .markup import Markup, joined, tag
from .sections.calibration import calibration
from .sections.data_and_reproduction import again, data
from .sections.derivation import derivation
from .sections.headline import headline, plain_title
from .sections.learning import learning
from .sections.notable_rows import rows
from .sections.predictions import predictions
from .sections.quality import quality
from .sections.weights import weights
from .test_rows import task

Section = Callable[[Run], Markup | None]
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("quality", "How good it is", quality),
    ("calibration", "Can it be believed?", calibration),
    ("predictions", "Predictions and the truth", predictions),
    ("weights", "What was learnt", weights),
    ("rows", "Rows to look at", rows),
    ("learning", "How it was learnt", learning),
    ("derivation", "The algorithm", derivation),
    ("data", "The data", data),
    ("again", "How to do it again", again),
)


def page(run: Run) -> str:
    """The report of a run as one HTML file; a section for which the run has nothing is left out."""
    made = [(anchor, title, section(run)) for anchor, title, section in SECTIONS]
    there = [(anchor, title, body) for anchor, title, body in made if body]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", plain_title(run)),
        tag("style", Markup(style())),
    )
    links = tag(
        "nav",
        tag("ul", [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title, _ in there]),
        aria_label="Sections",
    )
    body = [tag("section", tag("h2", title), content, id=anchor) for anchor, title, content in there]
    main = tag("main", headline(run), links if len(there) > 2 else None, body, _foot(run), class_=task(run) or None)
    return joined(Markup("<!doctype html>\n"), tag("html", head, tag("body", main), lang="en"), "\n")


def style() -> str:
    """The style sheet, which is a file of its own beside this one."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _foot(run: Run) -> Markup:
    version = run.versions.get("bayesrule")
    made = f"Made by bayesrule {version}." if version not in (None, "unknown") else "Made by bayesrule."
    paper = "Khan and Rue, “The Bayesian learning rule”, Journal of Machine Learning Research 24, 2023."
    return tag("footer", tag("p", f"{made} {paper}"))
