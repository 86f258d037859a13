"""The section on what to do next: warnings about the data, three sentences, and the command that predicts new rows."""

from __future__ import annotations

import shlex
from typing import Any

from ...runs.run import Run
from ..format_numbers import count
from ..held_out_rows import task
from ..markup import Markup, clean, join, tag, user_text
from ..next_steps import choose_steps
from .layout import command, mark_options

_KINDS = {
    "leak": "Leak?",
    "copies": "Copies",
    "outliers": "Outliers",
    "order": "Order",
    "drift": "Drift",
}
_SHOWN_WARNINGS, _SHOWN_COLUMNS = 6, 12


def render_what_next(run: Run) -> Markup | None:
    """Warnings, steps and the command; None for a run that has nothing to say."""
    steps = [tag("li", mark_options(step)) for step in choose_steps(run)]
    parts = [_warnings(run), tag("ol", steps, class_="steps") if steps else None, _command(run)]
    return join(*parts) if any(part is not None for part in parts) else None


def _warnings(run: Run) -> Markup | None:
    found: list[dict[str, Any]] = list(run.summary.get("warnings") or ())
    if not found:
        return None
    lines = [
        tag("li", tag("b", _KINDS.get(each.get("kind", ""), "Warning"), class_="warn"), " ", each.get("finding", ""))
        for each in found[:_SHOWN_WARNINGS]
    ]
    more = len(found) - _SHOWN_WARNINGS
    rest = tag("li", f"{count(more)} more of this kind.") if more > 0 else None
    return tag("ul", lines, rest, class_="warnings")


def _command(run: Run) -> Markup | None:
    """The command that predicts new rows, to copy, and which columns they need."""
    folder = run.config.get("out")
    if not folder:
        return None
    place = shlex.quote(clean(folder)).replace("\n", " ")
    if task(run) == "sequence":
        line, words = f"bayesrule predict {place} --steps 12", "The next twelve steps, as CSV:"
    else:
        line = f"bayesrule predict {place} new.csv --out predictions.csv"
        words = "New rows, as CSV with " + {
            "clusters": "the group of each row and the probability of every group:",
            "topics": "the topic of each row and the share of every topic:",
            "factors": "the factors of each row and their standard deviations:",
            "binary": "the class of each row and the probability of both:",
            "classes": "the class of each row and the probability of every class:",
        }.get(task(run), "the prediction of each row, its standard deviation and its 90 % interval:")
    used = [each for each in run.summary.get("columns") or () if each.get("used", True)]
    names: list[Any] = [join(", " if index else "", user_text(each["name"], 40)) for index, each in enumerate(used)]
    rest = f" and {count(len(names) - _SHOWN_COLUMNS)} more" if len(names) > _SHOWN_COLUMNS else ""
    needs = (
        join(
            f"The file needs the column{'s' if len(names) > 1 else ''} ",
            names[:_SHOWN_COLUMNS],
            rest,
            "; values may be missing. ",
        )
        if names
        else None
    )
    if task(run) == "sequence":
        needs = "With a file, the steps after the series in it. "
    python = join("In Python: ", tag("code", f"bayesrule.load({clean(folder)!r}).predict(…)"), ".")
    return join(
        tag("p", words, class_="before-code"),
        command(line),
        tag("p", needs, python, class_="caption"),
    )
