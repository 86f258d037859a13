"""What was predicted from what and with which model, and in one sentence how well."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...estimators import registry
from ...runs.run import Run
from ..calibration_math import CHANCE, chance_error
from ..format_numbers import number, percent, several
from ..markup import Markup, joined, named, tag
from ..measures import measure, winner
from ..test_rows import classified, task

FIRST = {"binary": "accuracy", "classes": "accuracy", "regression": "rmse", "counts": "rmse", "sequence": "rmse"}


def target_name(run: Run) -> str:
    """The column that was predicted."""
    return str(run.config.get("target") or (run.summary.get("target") or {}).get("name") or "the target")


def source_name(run: Run) -> str:
    """The data's name, without the folders that they are in."""
    return re.split(r"[/\\]", str(run.summary.get("source") or run.config.get("data") or "the data"))[-1]


def model_name(run: Run) -> str:
    """The model in words, or its class's name."""
    made = str(run.config.get("estimator") or run.config.get("model") or "a model")
    return registry.title(made)


def plain_title(run: Run) -> str:
    """The page's title, as plain text."""
    verb = "Forecasting" if task(run) == "sequence" else "Predicting"
    return f"{verb} {target_name(run)} from {source_name(run)}"


def headline(run: Run) -> Markup:
    """The top of the page."""
    return tag(
        "header",
        tag("p", "Bayesian learning rule · report of a fit", class_="eyebrow"),
        tag("h1", _title(run)),
        tag("p", result(run), class_="result") if result(run) else None,
        tag("p", _how(run), class_="how"),
    )


def result(run: Run) -> Markup | None:
    """How well it does on the held-out rows, beside the baseline, and whether its uncertainty can be believed."""
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    parts = [_score(key, model, baseline) for key in (FIRST.get(task(run), "accuracy"), "nll")]
    parts.append(_calibrated(run, model))
    said = [part for part in parts if part]
    if not said:
        return None
    rows = _test_rows(run)
    on = f"On {several(rows, 'held-out row')}: " if rows else "On held-out rows: "
    if task(run) == "sequence" and rows:
        on = f"On the last {several(rows, 'value')}, held out: "
    return joined(on, ", ".join(said), ".", _verdict(model, baseline))


def _score(key: str, model: dict[str, Any], baseline: dict[str, Any]) -> str:
    """One measure beside its baseline."""
    if model.get(key) is None:
        return ""
    known = measure(key)
    name = known.name if known.name.isupper() else known.name.lower()
    beside = f" (baseline {known.shown(baseline[key])})" if baseline.get(key) is not None else ""
    return f"{name} {known.shown(model[key])}{' nats' if key == 'nll' else ''}{beside}"


def _calibrated(run: Run, model: dict[str, Any]) -> str:
    """The last part of the sentence: does a claimed 90 % mean 90 %?"""
    ece, covered = model.get("ece"), model.get("coverage90")
    if ece is not None and np.isfinite(ece):
        return f"{_belief(run, float(ece))} (ECE {number(ece)})"
    if covered is not None and np.isfinite(covered):
        return f"90 % intervals hold {percent(covered)} of the truths"
    return ""


def _belief(run: Run, error: float) -> str:
    """In words: calibrated, or not to be told from it with so few rows, or off, and to which side."""
    rows, points = classified(run), f"{max(1, np.ceil(100 * error - 1e-9)):.0f} %"
    if error <= 0.05:
        return f"calibrated within {points}"
    if rows is None:
        return f"confidence off by {points}"
    if error <= CHANCE * chance_error(rows):
        return "calibrated as far as so few rows can tell"
    return f"{'overconfident' if rows.confidence.mean() > rows.right.mean() else 'underconfident'} by {points}"


def _verdict(model: dict[str, Any], baseline: dict[str, Any]) -> Markup | None:
    """A plain word where the baseline has the better likelihood: nobody should have to find that in a table."""
    if winner("nll", model.get("nll"), baseline.get("nll")) != "baseline":
        return None
    return tag("span", " By its likelihood it is worse than the baseline.", class_="warn")


def _title(run: Run) -> Markup:
    target, source = named(target_name(run)), named(source_name(run))
    if task(run) == "sequence":
        return joined("Forecasting ", target, " from its past in ", source)
    used = [each for each in run.summary.get("columns") or () if each.get("used", True)]
    columns = len(used) or len(run.summary.get("features") or ())
    return joined("Predicting ", target, f" from {several(columns, 'column')} of " if columns else " from ", source)


def _how(run: Run) -> Markup:
    steps, seconds = run.facts.get("steps"), run.seconds.get("fit")
    recipe = run.config.get("recipe") or (run.derivation.split() or [""])[0].strip(",:")
    trained = run.summary.get("train_rows")
    parts = [model_name(run)[:1].upper() + model_name(run)[1:]]
    parts += [f"trained on {several(trained, 'row')}"] if trained else []
    parts += [joined("by ", tag("code", recipe))] if recipe else []
    parts += [f"in {several(steps, 'step')}"] if steps else []
    parts += [f"and {number(seconds)} s" if steps else f"in {number(seconds)} s"] if seconds else []
    return joined([joined(" " if place else "", part) for place, part in enumerate(parts)], ".")


def _test_rows(run: Run) -> int:
    return int(run.summary.get("test_rows") or np.size(run.test.get("y", ())))
