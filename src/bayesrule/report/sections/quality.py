"""The section on quality: the measures on the held-out rows, those of the baseline, and what each means."""

from __future__ import annotations

from typing import Any

from ...runs.run import Run
from ..format_numbers import count, counted, number
from ..markup import Markup, join, tag, user_text
from ..measures import MEASURES, measure, winner
from .layout import table

BETTER = tag("span", "✓", class_="better", title="better", role="img", aria_label="better")


def render_quality(run: Run) -> Markup | None:
    """A table with a row for each measure, and a column for the model and for everything that it is held against."""
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    train = run.metrics.get("train") or {}
    references = [(_capital(each["name"]), each["metrics"]) for each in run.metrics.get("references") or ()]
    keys = [key for key in (*MEASURES, *model) if key in model]
    if not keys:
        return None
    keys = list(dict.fromkeys(keys))
    others = [("Baseline", baseline)] if baseline else []
    others += references
    others += [("Model, training rows", train)] if train else []
    heads = ["Measure", "Model", *(name for name, _ in others)]
    head = tag(
        "tr", [tag("th", each, scope="col", class_="number" if index else None) for index, each in enumerate(heads)]
    )
    compared = [baseline, *(scores for _, scores in references)] if baseline else []
    body = [_row(key, model, compared, [scores for _, scores in others]) for key in keys]
    many = " many" if len(heads) > 3 else ""
    return join(
        tag(
            "div",
            tag(
                "table",
                tag("thead", head),
                tag("tbody", body),
                class_=f"measures{many}",
                style=f"--values:{len(heads) - 1}",
            ),
            class_="scroll",
        ),
        tag("p", BETTER, " marks the best value.", _baseline(run), _ece_remark(model, baseline), class_="caption")
        if baseline
        else None,
        _differences(run),
        _cross_validation(run),
    )


def _row(key: str, model: dict[str, Any], compared: list[dict[str, Any]], others: list[dict[str, Any]]) -> Markup:
    """A measure; of the model and what it is compared with, the best is marked."""
    known, best = measure(key), _best(key, [model, *compared])
    direction = tag("span", known.direction, class_="direction") if known.direction else None
    meaning = tag("span", known.meaning, "; " if known.meaning and direction else "", direction, class_="meaning")
    cells = [tag("td", known.format(model[key]), BETTER if best is model else None, class_="number strong")]
    for scores in others:
        mark = BETTER if best is scores else None
        cells.append(tag("td", known.format(scores.get(key)), mark, class_="number"))
    return tag("tr", tag("th", tag("span", user_text(known.name), class_="label"), meaning, scope="row"), cells)


def _best(key: str, scores: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The scores with the best value of a measure; None if the first two are equal or a value is missing."""
    best = scores[0]
    for other in scores[1:]:
        if other.get(key) is None:
            continue
        won = winner(key, best.get(key), other.get(key))
        if won is None:
            return None
        best = other if won == "baseline" else best
    return best if len(scores) > 1 else None


def _differences(run: Run) -> Markup | None:
    """Whether the stronger baselines differ from the model by more than chance."""
    sentences = []
    for each in run.metrics.get("references") or ():
        mean, error = each.get("difference") or (None, None)
        if mean is None or error is None:
            continue
        verdict = "which chance may explain" if abs(mean) <= 2 * error else "more than chance explains"
        side = "above" if mean > 0 else "below"
        sentences.append(f"{number(abs(mean), 2)} ± {number(error, 2)} nats {side} that of {each['name']}, {verdict}")
    if not sentences:
        return None
    names = (
        "The linear model has its default settings, boosted trees are scikit-learn's HistGradientBoosting at theirs."
    )
    return tag(
        "p",
        "The model's NLL is ",
        "; ".join(sentences),
        f" (standard errors of the differences). {names}",
        class_="caption",
    )


def _cross_validation(run: Run) -> Markup | None:
    """The scores of a cross-validation, each with its standard error."""
    cv = run.metrics.get("cv")
    if not cv:
        return None
    keys = [key for key in MEASURES if key in cv["model"]]

    def shown(key: str) -> str:
        error = cv["errors"].get(key)
        value = measure(key).format(cv["model"][key])
        return value if error is None else f"{value} ± {measure(key).format(error)}"

    lines = [[measure(key).name, shown(key), measure(key).format(cv["baseline"].get(key))] for key in keys]
    mean, error = cv["difference"]
    by_fold = ", ".join(number(value) for value in cv["fold_nll"])
    words = (
        f"All {counted(cv['rows'], 'row')}, each predicted by a fit to the other folds, ± standard errors. The NLL is "
        f"{number(abs(mean))} ± {number(error, 2)} nats {'below' if mean < 0 else 'above'} the baseline's; by fold it "
        f"is {by_fold}."
    )
    return tag(
        "div",
        tag("h3", f"Cross-validated in {count(cv['folds'])} folds"),
        tag("p", words, class_="caption"),
        table(["Measure", "Model", "Baseline"], lines, numbers=(1, 2)),
        class_="part",
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _baseline(run: Run) -> Markup | None:
    name = run.metrics.get("baseline_name")
    return join(" The baseline: ", user_text(name, 160), ".") if name else None


def _ece_remark(model: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """An explanation for the case that the baseline has the smaller ECE."""
    if winner("ece", model.get("ece"), baseline.get("ece")) != "baseline":
        return None
    return " A constant prediction is calibrated by construction, so a small ECE alone does not mean a good model."
