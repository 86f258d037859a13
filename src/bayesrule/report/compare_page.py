"""`compare.html`: several models of one table, cross-validated on the same folds, on one page without scripts."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from ..runs.run import Candidate, Comparison
from .format_numbers import count, counted, mean_and_std, number, percent
from .markup import Markup, clean, join, tag, user_text
from .measures import measure
from .page import html_document, style_sheet
from .sections.data_and_reproduction import render_versions
from .sections.layout import command, legend, mark_options, table
from .svg import round_ticks

_CLEAR = 2.0  # A difference of so many standard errors is taken for real.
_MEASURES = {"classes": ("accuracy", "auroc", "brier", "ece"), "numbers": ("rmse", "r2", "coverage90")}


def render_comparison(comparison: Comparison) -> str:
    """The page of a comparison as one HTML file."""
    fitted = [each for each in comparison.candidates if not each.failure]
    target, source = comparison.config.get("target"), comparison.summary.get("source")
    title = f"Models of {clean(target)} in {clean(source)}"
    header = tag(
        "header",
        tag("p", "Bayesian learning rule · comparison of models", class_="eyebrow"),
        tag("h1", counted(len(fitted), "model"), " of ", user_text(target), " in ", user_text(source)),
        tag("p", _result(fitted), class_="result") if fitted else None,
        tag(
            "p",
            f"{counted(comparison.summary.get('rows'), 'row')} in {counted(comparison.config.get('folds'), 'fold')}: "
            "every row is predicted by fits that did not see it, and all models by the same folds (seed "
            f"{count(comparison.config.get('seed'))}).",
            class_="how",
        ),
    )
    sections = [
        ("next", "What to do next", _next(comparison, fitted)),
        ("differences", "Differences", _differences(fitted)),
        ("scores", "Scores", _scores(comparison, fitted)),
        ("folds", "Fold by fold", _folds(fitted)),
        ("failures", "What could not be fitted", _failures(comparison)),
        ("reproduction", "How to reproduce it", _reproduction(comparison)),
    ]
    bodies = [tag("section", tag("h2", name), body, id=anchor) for anchor, name, body in sections if body]
    return html_document(title, tag("main", header, bodies), style_sheet())


def gap(candidate: Candidate, best: Candidate) -> tuple[float, float]:
    """The mean NLL minus the best model's, and its standard error, from the differences row by row."""
    rows = candidate.losses - best.losses
    return float(rows.mean()), float(np.std(rows, ddof=1) / np.sqrt(len(rows)))


def _ties(fitted: list[Candidate]) -> list[Candidate]:
    """The models that chance may have put behind the best one."""
    return [each for each in fitted[1:] if (pair := gap(each, fitted[0]))[0] <= _CLEAR * pair[1]]


def _result(fitted: list[Candidate]) -> Markup:
    best, ties = fitted[0], _ties(fitted)
    said = join(tag("b", user_text(best.name)), f" has the least NLL, {_score(best, 'nll')} nats per row")
    if len(fitted) == 1:
        return join(said, ".")
    if ties:
        return join(said, "; ", _names(ties), f" {'is' if len(ties) == 1 else 'are'} not clearly worse.")
    mean, error = gap(fitted[1], best)
    return join(
        said,
        "; the next, ",
        tag("b", user_text(fitted[1].name)),
        f", is {number(mean, 2)} ± {number(error, 2)} behind.",
    )


def _names(candidates: list[Candidate]) -> Markup:
    parts: list[Any] = []
    for index, each in enumerate(candidates):
        before = "" if not index else " and " if index == len(candidates) - 1 else ", "
        parts.append(join(before, user_text(each.name)))
    return join(parts)


def _next(comparison: Comparison, fitted: list[Candidate]) -> Markup | None:
    """Sentences chosen by what the scores say, and the command that fits the model to take."""
    if not fitted:
        return None
    best, ties = fitted[0], _ties(fitted)
    close = [best, *ties]
    ours = [each for each in close if each.command]
    quickest = min(ours, key=lambda each: each.seconds) if ours else None
    steps: list[Any] = []
    baseline = next((each for each in fitted if each.name == "baseline"), None)
    if baseline in close:
        steps.append(
            "No model is clearly better than a prediction that ignores the inputs: these columns say little about the "
            "target, or there are too few rows to learn it from."
        )
    elif quickest is not None and len(ours) > 1:
        steps.append(
            join(
                "Take ",
                user_text(quickest.name),
                f": of the {counted(len(ours), 'model')} here that the folds cannot tell "
                f"apart it is the quickest ({number(quickest.seconds, 2)} s for all folds).",
            )
        )
    elif quickest is not None:
        steps.append(join("Take ", user_text(quickest.name), ": no other model of this library comes close."))
    trees = next((each for each in fitted if each.name == "boosted trees"), None)
    first = next((each for each in fitted if each.command), None)
    if trees is not None and first is not None:
        mean, error = gap(first, trees)
        if mean > _CLEAR * error:
            steps.append(
                f"Boosted trees are ahead of all models here by {number(mean, 2)} ± {number(error, 2)} nats: the "
                "target bends or columns act together in ways that are worth a column of their own."
            )
        elif baseline not in close:
            where = "behind" if mean < 0 else "ahead of"
            steps.append(
                join(
                    f"Boosted trees are {number(abs(mean), 2)} ± {number(error, 2)} nats {where} ",
                    user_text(first.name),
                    ": other columns would help more than other models.",
                )
            )
    steps += _advise_rows(comparison, fitted)
    chosen = quickest if quickest is not None else first
    shown = None
    if chosen is not None:
        data, target = (shlex.quote(clean(comparison.config.get(key) or "")) for key in ("data", "target"))
        line = f"bayesrule fit {data} --target {target} {chosen.command}"
        shown = join(
            tag("p", "A run with a report, and predictions of new rows:", class_="before-code"),
            command(line),
        )
    listed = tag(
        "ol",
        [tag("li", step if isinstance(step, Markup) else mark_options(step)) for step in steps[:3]],
        class_="steps",
    )
    return join(listed if steps else None, shown)


def _advise_rows(comparison: Comparison, fitted: list[Candidate]) -> list[str]:
    """How many rows it would take to tell the best two models apart, or that they are told apart."""
    if len(fitted) < 2:
        return []
    mean, error = gap(fitted[1], fitted[0])
    rows = int(comparison.summary.get("rows") or 0)
    if mean > _CLEAR * error or not mean > 0 or not error > 0:
        spread = float(np.std(fitted[0].fold_nll, ddof=1))
        return [
            f"Expect an NLL between {number(min(fitted[0].fold_nll))} and {number(max(fitted[0].fold_nll))} on as many "
            f"new rows as a fold has: that is what the folds of the best model have (std {number(spread, 2)})."
        ]
    needed = rows * (_CLEAR * error / mean) ** 2
    much = (
        f"about {count(float(f'{needed:.2g}'))} rows like these"
        if needed < 1000 * rows
        else "more rows than anybody has"
    )
    return [
        f"The best two differ by {number(mean, 2)} ± {number(error, 2)} nats: it would take {much} to tell them apart, "
        "so choose by speed, or by what can be explained."
    ]


def _differences(fitted: list[Candidate]) -> Markup | None:
    """A forest plot of the differences from the best model."""
    if len(fitted) < 2:
        return None
    pairs = [(each, *gap(each, fitted[0])) for each in fitted[1:]]
    # The baseline may be so far off that nothing else could be seen: the axis ends at three times the others.
    ends = sorted(mean + 2 * error for _, mean, error in pairs)
    right = ends[-1] if len(ends) < 2 else min(ends[-1], 3 * ends[-2])
    left = min(0.0, *(mean - 2 * error for _, mean, error in pairs))
    span = (left - 0.03 * (right - left), right + 0.03 * (right - left) + 1e-12)
    place = lambda value: 100 * (min(max(value, span[0]), span[1]) - span[0]) / (span[1] - span[0])
    scale = [tag("span", label, style=f"left:{place(value):.2f}%") for value, label in round_ticks(*span, 3)]
    head = tag(
        "tr",
        tag("th", "Model", scope="col"),
        tag("th", tag("div", scale, class_="scale"), scope="col"),
        tag("th", "difference ± s.e.", scope="col", class_="number"),
    )
    body = []
    for each, mean, error in pairs:
        clear = mean > _CLEAR * error
        css_class = "orange" if clear else "blue"
        marks = [
            tag("path", d=f"M{place(0.0):.2f} 0V20", class_="grid"),
            tag(
                "path", d=f"M{place(mean - 2 * error):.2f} 10H{place(mean + 2 * error):.2f}", class_=f"line {css_class}"
            ),
            tag("path", d=f"M{place(mean):.2f} 10h0", class_=f"dots {css_class}") if mean <= span[1] else None,
        ]
        drawing = tag("svg", marks, viewBox="0 0 100 20", preserveAspectRatio="none", aria_hidden="true")
        value = join(tag("span", number(mean, 2)), tag("span", f" ± {number(error, 2)}", class_="std"))
        cells = [tag("td", drawing, class_="plot"), tag("td", value, class_="number")]
        body.append(tag("tr", tag("th", user_text(each.name, 40), scope="row"), cells))
    words = join(
        legend("orange", "clearly worse"),
        legend("blue", "not clearly worse"),
        " NLL minus that of ",
        tag("b", user_text(fitted[0].name)),
        " in nats per row, with two standard errors on both sides. The errors are those of the differences row by row, "
        "which are smaller than those of the scores, because rows are hard or easy for all models. They do not know "
        "that the fits of different folds share rows, and are a little too small.",
    )
    return join(
        tag("table", tag("thead", head), tag("tbody", body), class_="forest"), tag("p", words, class_="caption")
    )


def _scores(comparison: Comparison, fitted: list[Candidate]) -> Markup | None:
    if not fitted:
        return None
    kind = "classes" if comparison.classes else "numbers"
    keys = [key for key in ("nll", *_MEASURES[kind]) if key in fitted[0].metrics]
    heads = ["Model", *(measure(key).name for key in keys), "Seconds"]
    lines: list[list[Any]] = []
    for each in fitted:
        name = join(tag("b", user_text(each.name, 40)), tag("span", user_text(each.title, 90), class_="what"))
        lines.append([name, *(_score(each, key) for key in keys), f"{each.seconds:.1f}"])
    meanings = [
        join(tag("b", measure(key).name), f": {measure(key).meaning}; {measure(key).direction}. ") for key in keys
    ]
    return join(
        table(heads, lines, numbers=tuple(range(1, len(heads))), css_class="candidates"),
        tag("p", "Over all rows, ± standard errors. ", meanings, class_="caption"),
    )


def _score(each: Candidate, key: str) -> str:
    value, error = each.metrics.get(key), each.errors.get(key)
    if value is None or error is None or measure(key).format is percent:
        shown = measure(key).format(value)
        return shown if error is None else f"{shown} ± {measure(key).format(error)}"
    return " ± ".join(mean_and_std(value, error))


def _folds(fitted: list[Candidate]) -> Markup | None:
    if not fitted:
        return None
    heads = ["NLL", *(f"Fold {index + 1}" for index in range(len(fitted[0].fold_nll)))]
    lines = [[user_text(each.name, 40), *(number(value) for value in each.fold_nll)] for each in fitted]
    return table(heads, lines, numbers=tuple(range(1, len(heads))), css_class="shaded")


def _failures(comparison: Comparison) -> Markup | None:
    failed = [each for each in comparison.candidates if each.failure]
    lines = [tag("li", tag("b", user_text(each.name)), ": ", clean(each.failure)[:400]) for each in failed]
    return tag("ul", lines) if lines else None


def _reproduction(comparison: Comparison) -> Markup | None:
    config = comparison.config
    models = " ".join(f"--model {shlex.quote(clean(each.name))}" for each in comparison.candidates if each.command)
    data, target = (shlex.quote(clean(config.get(key) or "")) for key in ("data", "target"))
    line = f"bayesrule compare {data} --target {target} --task {config['task']} {models}"
    line += f" --cv {config['folds']} --seed {config['seed']}"
    guesses = [tag("li", mark_options(str(each))) for each in comparison.summary.get("guesses") or ()]
    return join(
        command(line),
        join(tag("p", "What was guessed:"), tag("ul", guesses)) if guesses else None,
        render_versions(comparison.versions),
    )
