"""The measures on the held-out rows, the baseline's beside them, and what each of them means."""

from __future__ import annotations

from typing import Any

from ...runs.run import Run
from ..markup import Markup, joined, named, tag
from ..measures import MEASURES, measure, winner

BETTER = tag("span", "✓", class_="better", title="the better one", role="img", aria_label="the better one")


def quality(run: Run) -> Markup | None:
    """A table with a row for each measure; the better of model and baseline is marked."""
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    train = run.metrics.get("train") or {}
    keys = [key for key in (*MEASURES, *model) if key in model]
    if not keys:
        return None
    keys = list(dict.fromkeys(keys))
    heads = ["Measure", "Model", *(["Baseline"] if baseline else []), *(["Model, training rows"] if train else [])]
    head = tag(
        "tr", [tag("th", each, scope="col", class_="number" if place else None) for place, each in enumerate(heads)]
    )
    body = [_row(key, model, baseline, train) for key in keys]
    return joined(
        tag(
            "div",
            tag("table", tag("thead", head), tag("tbody", body), class_="measures", style=f"--values:{len(heads) - 1}"),
            class_="scroll",
        ),
        tag("p", BETTER, " marks the better of the two.", _baseline(run), _constant(model, baseline), class_="caption")
        if baseline
        else None,
    )


def _row(key: str, model: dict[str, Any], baseline: dict[str, Any], train: dict[str, Any]) -> Markup:
    known, best = measure(key), winner(key, model.get(key), baseline.get(key))
    direction = tag("span", known.direction, class_="direction") if known.direction else None
    meaning = tag("span", known.meaning, "; " if known.meaning and direction else "", direction, class_="meaning")
    cells = [tag("td", known.shown(model[key]), BETTER if best == "model" else None, class_="number strong")]
    if baseline:
        shown = known.shown(baseline.get(key))
        cells.append(tag("td", shown, BETTER if best == "baseline" else None, class_="number"))
    if train:
        cells.append(tag("td", known.shown(train.get(key)), class_="number"))
    return tag("tr", tag("th", tag("span", named(known.name), class_="label"), meaning, scope="row"), cells)


def _baseline(run: Run) -> Markup | None:
    name = run.metrics.get("baseline_name")
    return joined(" The baseline: ", named(name, 160), ".") if name else None


def _constant(model: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """A word for those who see the baseline win there."""
    if winner("ece", model.get("ece"), baseline.get("ece")) != "baseline":
        return None
    return " One and the same guess for every row is calibrated by its making: a small ECE alone is no merit."
