"""The section on quality: the measures on the held-out rows, those of the baseline, and what each means."""

from __future__ import annotations

from typing import Any

from ...runs.run import Run
from ..markup import Markup, join, tag, user_text
from ..measures import MEASURES, measure, winner

BETTER = tag("span", "✓", class_="better", title="better", role="img", aria_label="better")


def render_quality(run: Run) -> Markup | None:
    """A table with a row for each measure; the better of model and baseline is marked."""
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    train = run.metrics.get("train") or {}
    keys = [key for key in (*MEASURES, *model) if key in model]
    if not keys:
        return None
    keys = list(dict.fromkeys(keys))
    heads = ["Measure", "Model", *(["Baseline"] if baseline else []), *(["Model, training rows"] if train else [])]
    head = tag(
        "tr", [tag("th", each, scope="col", class_="number" if index else None) for index, each in enumerate(heads)]
    )
    body = [_row(key, model, baseline, train) for key in keys]
    return join(
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", body), class_="measures", style=f"--values:{len(heads) - 1}"),
            class_="scroll",
        ),
        tag("p", BETTER, " marks the better value.", _baseline(run), _ece_remark(model, baseline), class_="caption")
        if baseline
        else None,
    )


def _row(key: str, model: dict[str, Any], baseline: dict[str, Any], train: dict[str, Any]) -> Markup:
    known, best = measure(key), winner(key, model.get(key), baseline.get(key))
    direction = tag("span", known.direction, class_="direction") if known.direction else None
    meaning = tag("span", known.meaning, "; " if known.meaning and direction else "", direction, class_="meaning")
    cells = [tag("td", known.format(model[key]), BETTER if best == "model" else None, class_="number strong")]
    if baseline:
        shown = known.format(baseline.get(key))
        cells.append(tag("td", shown, BETTER if best == "baseline" else None, class_="number"))
    if train:
        cells.append(tag("td", known.format(train.get(key)), class_="number"))
    return tag("tr", tag("th", tag("span", user_text(known.name), class_="label"), meaning, scope="row"), cells)


def _baseline(run: Run) -> Markup | None:
    name = run.metrics.get("baseline_name")
    return join(" The baseline: ", user_text(name, 160), ".") if name else None


def _ece_remark(model: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """An explanation for the case that the baseline has the smaller ECE."""
    if winner("ece", model.get("ece"), baseline.get("ece")) != "baseline":
        return None
    return " A constant prediction is calibrated by construction, so a small ECE alone does not mean a good model."
