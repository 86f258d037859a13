"""The top of the page: what was predicted from which data with which model, and in one sentence how well."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...estimators import registry
from ...runs.run import Run
from ..calibration_math import CHANCE_FACTOR, chance_error
from ..format_numbers import counted, number, percent
from ..held_out_rows import class_predictions, task
from ..markup import Markup, join, tag, user_text
from ..measures import measure, winner
from .structure import summarize_structure

MAIN_MEASURE = {"binary": "accuracy", "classes": "accuracy", "regression": "rmse", "counts": "rmse", "sequence": "rmse"}


def target_name(run: Run) -> str:
    """The column that was predicted."""
    return str(run.config.get("target") or (run.summary.get("target") or {}).get("name") or "the target")


def source_name(run: Run) -> str:
    """The name of the data's file, without its folders."""
    return re.split(r"[/\\]", str(run.summary.get("source") or run.config.get("data") or "the data"))[-1]


def model_name(run: Run) -> str:
    """The model in words, or its class's name."""
    estimator = str(run.config.get("estimator") or run.config.get("model") or "a model")
    return registry.title(estimator)


def plain_title(run: Run) -> str:
    """The page's title, as plain text."""
    if run.structure:
        return f"{summarize_structure(run)} in {source_name(run)}"
    verb = "Forecasting" if task(run) == "sequence" else "Predicting"
    return f"{verb} {target_name(run)} from {source_name(run)}"


def render_headline(run: Run) -> Markup:
    """The top of the page."""
    return tag(
        "header",
        tag("p", "Bayesian learning rule · report of a fit", class_="eyebrow"),
        tag("h1", _title(run)),
        tag("p", result(run), class_="result") if result(run) else None,
        tag("p", _training_summary(run), class_="how"),
    )


def result(run: Run) -> Markup | None:
    """The scores on the held-out rows next to the baseline's, and whether the uncertainty is calibrated."""
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    keys = (MAIN_MEASURE.get(task(run), "accuracy"), "nll", "log_density", "perplexity")
    parts = [_score(key, model, baseline) for key in keys]
    parts.append(_calibration(run, model))
    present = [part for part in parts if part]
    if not present:
        return None
    rows = _test_rows(run)
    where = f"On {counted(rows, 'held-out row')}: " if rows else "On held-out rows: "
    if task(run) == "sequence" and rows:
        where = f"On the last {counted(rows, 'value')}, held out: "
    return join(where, ", ".join(present), ".", _warning(model, baseline))


def _score(key: str, model: dict[str, Any], baseline: dict[str, Any]) -> str:
    """One measure and its baseline."""
    if model.get(key) is None:
        return ""
    known = measure(key)
    name = known.name if known.name.isupper() else known.name.lower()
    unit = " nats" if key in ("nll", "log_density") else ""
    reference = f" (baseline {known.format(baseline[key])})" if baseline.get(key) is not None else ""
    return f"{name} {known.format(model[key])}{unit}{reference}"


def _calibration(run: Run, model: dict[str, Any]) -> str:
    """The last part of the sentence: the ECE or the coverage of 90 % intervals."""
    ece, covered = model.get("ece"), model.get("coverage90")
    if ece is not None and np.isfinite(ece):
        return f"{_calibration_in_words(run, float(ece))} (ECE {number(ece)})"
    if covered is not None and np.isfinite(covered):
        return f"90 % intervals contain {percent(covered)} of the observed values"
    return ""


def _calibration_in_words(run: Run, error: float) -> str:
    """Calibrated, or not distinguishable from it with so few rows, or over- or underconfident."""
    rows, points = class_predictions(run), f"{max(1, np.ceil(100 * error - 1e-9)):.0f} %"
    if error <= 0.05:
        return f"calibrated within {points}"
    if rows is None:
        return f"confidence off by {points}"
    if error <= CHANCE_FACTOR * chance_error(rows):
        return "calibrated within chance for so few rows"
    return f"{'overconfident' if rows.confidence.mean() > rows.correct.mean() else 'underconfident'} by {points}"


def _warning(model: dict[str, Any], baseline: dict[str, Any]) -> Markup | None:
    """A warning if the baseline has the better likelihood, which is easily missed in a table."""
    if winner("nll", model.get("nll"), baseline.get("nll")) != "baseline":
        return None
    return tag("span", " Its likelihood is worse than the baseline's.", class_="warn")


def _title(run: Run) -> Markup:
    target, source = user_text(target_name(run)), user_text(source_name(run))
    if task(run) == "sequence":
        return join("Forecasting ", target, " from its past in ", source)
    used = [each for each in run.summary.get("columns") or () if each.get("used", True)]
    columns = len(used) or len(run.summary.get("features") or ())
    if run.structure:
        return join(f"{summarize_structure(run)} in {counted(columns, 'column')} of ", source)
    return join("Predicting ", target, f" from {counted(columns, 'column')} of " if columns else " from ", source)


def _training_summary(run: Run) -> Markup:
    steps, seconds = run.facts.get("steps"), run.seconds.get("fit")
    recipe = run.config.get("recipe") or (run.derivation.split() or [""])[0].strip(",:")
    train_rows = run.summary.get("train_rows")
    parts = [model_name(run)[:1].upper() + model_name(run)[1:]]
    parts += [f"trained on {counted(train_rows, 'row')}"] if train_rows else []
    parts += [join("by ", tag("code", recipe))] if recipe else []
    parts += [f"in {counted(steps, 'step')}"] if steps else []
    parts += [f"and {number(seconds)} s" if steps else f"in {number(seconds)} s"] if seconds else []
    return join([join(" " if index else "", part) for index, part in enumerate(parts)], ".")


def _test_rows(run: Run) -> int:
    return int(run.summary.get("test_rows") or np.size(run.test.get("y", ())))
