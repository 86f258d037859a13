"""What to do next: sentences that follow from what a run found, the most urgent first.

Each rule looks at the run and returns a sentence with the run's own numbers, or None where it does not apply. The rules
are listed in the order of their urgency; the page shows the first three that apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..metrics import interval
from ..runs.run import Run
from .calibration_math import CHANCE_FACTOR, chance_error
from .format_numbers import count, counted, number, percent
from .held_out_rows import class_predictions, left_out_predictions, numeric_predictions, task
from .interval_checks import find_problems
from .markup import shorten
from .measures import winner

SHOWN = 3
_CLEAR = 2.0  # A difference of so many standard errors is taken for real.
_SURE = 0.9


def choose_steps(run: Run, most: int = SHOWN) -> list[str]:
    """The most urgent sentences, at most `most` of them."""
    steps: list[str] = []
    for rule in RULES:
        for sentence in rule(run):
            if len(steps) < most:
                steps.append(sentence)
    return steps


Rule = Callable[[Run], Iterator[str]]


def _warned(*kinds: str) -> Rule:
    """A rule for the warnings about the data of these kinds: what to do about the first; they are listed above."""

    def rule(run: Run) -> Iterator[str]:
        found = [each for each in run.summary.get("warnings") or () if each.get("kind") in kinds]
        for each in found[:1]:
            names = [_name(other["column"]) for other in found[:3] if other.get("column")]
            rest = ", …" if len(found) > 3 else ""
            yield f"{', '.join(names)}{rest}: {_small(each['advice'])}" if names else each["advice"]

    return rule


def _worse_than_baseline(run: Run) -> Iterator[str]:
    model, baseline = run.metrics.get("model") or {}, run.metrics.get("baseline") or {}
    if winner("nll", model.get("nll"), baseline.get("nll")) != "baseline":
        return
    what = "a random walk" if task(run) == "sequence" else "a prediction that ignores the inputs"
    yield (
        f"Do not use this fit: its NLL of {number(model['nll'])} nats is worse than that of {what} "
        f"({number(baseline['nll'])}). Look at the rows with the largest errors below, then try another --model."
    )


def _reference_is_better(run: Run) -> Iterator[str]:
    """A stronger baseline predicts clearly better than the model."""
    better = [each for each in _references(run) if _gap(each) > _CLEAR]
    for each in better[:1]:
        mean, error = each["difference"]
        advice = f"fit it with --model {each['model']}"
        if not each.get("model"):
            models = [name for name in ("mlp", "gp") if name != run.config.get("model") and task(run) != "counts"]
            advice = f"the target bends or columns act together, which --model {' or --model '.join(models)} can follow"
            if not models:
                advice = "the target bends or columns act together: add columns (products, squares) that say so"
        yield (
            f"{_capital(each['name'])} predict{'' if each['name'].endswith('s') else 's'} the held-out rows better, by "
            f"{number(mean, 2)} ± {number(error, 2)} nats per row: {advice}."
        )


def _linear_is_enough(run: Run) -> Iterator[str]:
    """A linear model is not clearly worse than the one that was fitted."""
    for each in _references(run):
        if each.get("model") == "linear" and abs(_gap(each)) <= _CLEAR:
            mean, error = each["difference"]
            yield (
                f"{_capital(each['name'])} does as well on the held-out rows (its NLL differs by "
                f"{number(abs(mean), 2)} ± {number(error, 2)} nats): prefer it, because its coefficients can be read; "
                "`bayesrule compare` tells the two apart with more rows."
            )


def _intervals_are_wrong(run: Run) -> Iterator[str]:
    rows = numeric_predictions(run)
    if rows is None or task(run) == "sequence":
        return
    for problem in find_problems(rows, counts=task(run) == "counts", left_out=left_out_predictions(run))[:1]:
        inside = percent(float(np.mean(rows.covered)))
        yield (
            f"{problem.finding.split(': ')[0]} (see Calibration; {inside} of {counted(len(rows.y), 'held-out value')} "
            f"lie in their 90 % intervals): {_small(problem.advice)}"
        )


def _confidence_is_wrong(run: Run) -> Iterator[str]:
    rows, error = class_predictions(run), (run.metrics.get("model") or {}).get("ece")
    if rows is None or error is None or not np.isfinite(error):
        return
    if error <= max(0.05, CHANCE_FACTOR * chance_error(rows)):
        return
    confidence, accuracy = float(rows.confidence.mean()), float(rows.correct.mean())
    over = confidence > accuracy
    yield (
        f"Do not read the probabilities as frequencies: they are {'over' if over else 'under'}confident, "
        f"{percent(confidence)} on average where {percent(accuracy)} are right. "
        + ("More training rows, or a simpler --model, would help." if over else "A more flexible --model may help.")
    )


def _not_converged(run: Run) -> Iterator[str]:
    if run.facts.get("reason") == "steps" and run.config.get("model") not in ("mlp", "binary-mlp"):
        steps = run.facts.get("steps") or 0
        yield (
            f"The fit ended after {counted(steps, 'step')} before it had converged: raise the number of steps with "
            f"-p max_iter={_rounder(2 * steps)}, and see whether the scores change."
        )


def _class_is_missed(run: Run) -> Iterator[str]:
    """A class that is found much less often than the others."""
    rows = class_predictions(run)
    if rows is None or not run.classes:
        return
    sizes = np.bincount(rows.y, minlength=len(run.classes))
    found = np.bincount(rows.y[rows.correct], minlength=len(run.classes))
    recall = np.where(sizes >= 5, found / np.maximum(sizes, 1), 1.0)
    worst = int(recall.argmin())
    if recall[worst] > min(0.75, float(rows.correct.mean()) - 0.1):
        return
    taken_for = np.bincount(rows.predicted[(rows.y == worst) & ~rows.correct]).argmax()
    yield (
        f"Look at the class {_name(run.classes[worst])}: only {count(found[worst])} of its "
        f"{count(sizes[worst])} held-out rows are recognised, and most others are taken for "
        f"{_name(run.classes[int(taken_for)])}. More rows of it, or a column that tells the two apart, would help most."
    )


def _few_held_out_rows(run: Run) -> Iterator[str]:
    """The scores rest on so few rows that they could be much better or worse."""
    rows, size = class_predictions(run), int(run.summary.get("test_rows") or 0)
    total = int(run.summary.get("rows") or 0)
    if run.metrics.get("cv") or task(run) == "sequence" or not 0 < size < 200:
        return
    if rows is not None:
        # Laplace's rule keeps the error above 0 where all rows are right.
        accuracy = (float(rows.correct.sum()) + 1) / (len(rows.y) + 2)
        error = f"the accuracy is known to ± {percent(math.sqrt(accuracy * (1 - accuracy) / len(rows.y)))} only"
    else:
        numbers = numeric_predictions(run)
        if numbers is None or len(numbers.y) < 3:
            return
        squares = (numbers.y - numbers.mean) ** 2
        rmse = float(np.sqrt(squares.mean()))
        if not rmse > 0:
            return
        spread = float(np.std(squares, ddof=1) / math.sqrt(len(squares)) / (2 * rmse))
        error = f"the RMSE is known to {number(rmse)} ± {number(spread, 2)} only"
    yield (
        f"With {counted(size, 'held-out row')} {error}: fit again with --cv 5, which predicts all "
        f"{count(total)} rows once."
    )


def _row_is_suspicious(run: Run) -> Iterator[str]:
    """A training row that moves the posterior and does not fit the others."""
    influence = np.asarray(run.influence.get("influence", ()), float).ravel()
    density = np.asarray(run.influence.get("log_density", ()), float).ravel()
    if influence.size != density.size or not np.isfinite(influence).any() or not np.isfinite(density).any():
        return
    discrete = task(run) in ("binary", "classes", "counts")
    typical = float(np.nanmedian(density))
    odd = (density < math.log(0.01)) if discrete else (density < typical - 8)
    odd &= np.isfinite(influence) & (influence > 10 * max(float(np.nanmedian(influence)), 1e-12))
    if not odd.any():
        return
    row = np.asarray(run.influence.get("row", np.arange(influence.size))).ravel()
    place = int(np.argmax(np.where(odd, influence, -1)))
    probability = (
        f"the model trained without it gives its value the probability {percent(math.exp(density[place]))}"
        if discrete
        else f"its value is {_times(typical - density[place])} less probable than is usual"
    )
    others = int(odd.sum()) - 1
    more = f" ({counted(others, 'other row is', 'other rows are')} as odd.)" if others else ""
    yield (
        f"Check row {row[place]} of the file (the first after the header is row 0): of the rows that do not fit the "
        f"others it moves the posterior most, and {probability}.{more}"
    )


def _times(nats: float) -> str:
    """A ratio of probabilities in words."""
    return f"{number(math.exp(nats), 2)} times" if nats < math.log(1e6) else "over a million times"


def _sure_predictions(run: Run) -> Iterator[str]:
    """Which predictions can be acted on."""
    rows = class_predictions(run)
    if rows is None:
        return
    sure = rows.confidence >= _SURE
    if not sure.any():
        best = float(rows.confidence.max())
        yield (
            f"No held-out prediction is sure (the highest probability is {percent(best)}): have a person decide, or "
            "add columns that tell the classes apart."
        )
        return
    right, rest = float(rows.correct[sure].mean()), int((~sure).sum())
    sentence = (
        f"Act on predictions with a probability of at least {percent(_SURE)}: they are {percent(sure.mean())} of the "
        f"held-out rows, and {percent(right)} of them are right"
    )
    if rest:
        others = percent(float(rows.correct[~sure].mean()))
        sentence += f". Of the other {count(rest)} {others} are: have a person look at such rows"
    yield f"{sentence}."


def _least_sure_row(run: Run) -> Iterator[str]:
    rows = class_predictions(run)
    if rows is None:
        return
    least = int(rows.confidence.argmin())
    first, second = np.argsort(-rows.probabilities[least])[:2]
    names = [_name(run.classes[int(k)]) if int(k) < len(run.classes) else f"class {k}" for k in (first, second)]
    yield (
        f"Ask what would decide row {rows.row[least]} of the file, the least sure of the held-out ones: "
        f"{percent(float(rows.probabilities[least, first]))} for {names[0]}, "
        f"{percent(float(rows.probabilities[least, second]))} for {names[1]}."
    )


def _farthest_row(run: Run) -> Iterator[str]:
    """The held-out value with the largest error, in its predicted standard deviations."""
    rows = numeric_predictions(run)
    if rows is None:
        return
    scores = np.abs(rows.y - rows.mean) / np.where(rows.std > 0, rows.std, np.nan)
    if not np.isfinite(scores).any():
        return
    worst = int(np.nanargmax(scores))
    where = f"the value at {rows.time[worst]}" if task(run) == "sequence" else f"row {rows.row[worst]} of the file"
    yield (
        f"Look at {where} first: it is {number(float(rows.y[worst]), 4)}, and {number(float(rows.mean[worst]), 4)} ± "
        f"{number(float(rows.std[worst]), 2)} was predicted, the largest error in standard deviations."
    )


def _what_is_left_is_noise(run: Run) -> Iterator[str]:
    """Boosted trees do no better, so that other columns would help more than another model."""
    r2 = (run.metrics.get("model") or {}).get("r2")
    for each in _references(run):
        if not each.get("model") and _gap(each) <= _CLEAR:
            left = f" with {percent(1 - r2)} of the variance unexplained" if r2 is not None and 0 < r2 < 1 else ""
            verb = "do better than this model by" if each["difference"][0] > 0 else "do worse than this model by"
            mean, error = each["difference"]
            yield (
                f"For a better prediction{left}, look for other columns rather than another model: {each['name']} "
                f"{verb} {number(abs(mean), 2)} ± {number(error, 2)} nats per row."
            )


def _interval_width(run: Run) -> Iterator[str]:
    """Whether the intervals are narrow enough to be of use."""
    rows = numeric_predictions(run)
    if rows is None or task(run) == "sequence" or len(rows.y) < 3:
        return
    low, high = np.quantile(rows.y, [0.05, 0.95])
    if not (high > low and np.isfinite(rows.low).all() and np.isfinite(rows.high).all()):
        return
    width = float(np.median(rows.high - rows.low))
    yield (
        f"Decide whether an interval {number(width)} wide is of use: that is what a 90 % interval has in the median, "
        f"and {percent(width / float(high - low))} of the width in which 90 % of all held-out values lie."
    )


def _idle_columns(run: Run) -> Iterator[str]:
    """Columns of a linear model whose coefficients may be zero."""
    if "name" not in run.weights or len(run.classes) > 2:
        return
    names, mean, std = (
        run.weights["name"],
        np.asarray(run.weights["mean"], float),
        np.asarray(run.weights["std"], float),
    )
    if mean.ndim != 1 or not len(names) == mean.size == std.size or not np.isfinite(mean).all():
        return
    low, high = interval(mean, std)
    idle = np.flatnonzero((low <= 0) & (high >= 0))
    if not 0 < len(idle) < mean.size:
        strongest = int(np.argmax(np.abs(mean) / np.maximum(std, 1e-300)))
        yield (
            f"Look first at {_name(names[strongest])}: its coefficient, {number(mean[strongest])} ± "
            f"{number(std[strongest], 2)}, is the farthest from zero in standard deviations."
        )
        return
    least = idle[np.argsort(np.abs(mean[idle]) / np.maximum(std[idle], 1e-300), kind="stable")][:3]
    shown = ", ".join(_name(names[int(index)]) for index in least)
    yield (
        f"If columns are costly to collect, leave out {shown} first and see whether the NLL of "
        f"{number((run.metrics.get('model') or {}).get('nll'))} holds: the coefficients of {count(len(idle))} of "
        f"{count(mean.size)} inputs may be zero, these most of all."
    )


def _missing_values(run: Run) -> Iterator[str]:
    rows = int(run.summary.get("train_rows") or 0)
    columns = [each for each in run.summary.get("columns") or () if each.get("used", True) and each.get("missing")]
    if not columns or not rows:
        return
    worst = max(columns, key=lambda each: each["missing"])
    if worst["missing"] >= 0.2 * rows:
        yield (
            f"Find out why {_name(worst['name'])} is missing in {percent(worst['missing'] / rows)} of the training "
            "rows: if it is missing because of what its value would be, the predictions of such rows are wrong."
        )


# Sequences.


def _forecast_is_one_sided(run: Run) -> Iterator[str]:
    rows = numeric_predictions(run) if task(run) == "sequence" else None
    if rows is None or len(rows.y) < 8:
        return
    above = float(np.mean(rows.y > rows.mean))
    if 0.15 < above < 0.85:
        return
    side, share = ("above", above) if above > 0.5 else ("below", 1 - above)
    yield (
        f"The series left the course of its past: {percent(share)} of the held-out values lie {side} the forecast. If "
        "something changed at that time, fit to the values after it; a model with more states (-p n_states=…) may "
        "follow a trend."
    )


def _walk_is_closer(run: Run) -> Iterator[str]:
    model, baseline = ((run.metrics.get(each) or {}) for each in ("model", "baseline"))
    if task(run) != "sequence" or winner("rmse", model.get("rmse"), baseline.get("rmse")) != "baseline":
        return
    yield (
        f"Use the bands rather than the line: a random walk from the last value comes closer on average (RMSE "
        f"{number(baseline['rmse'])} against {number(model['rmse'])})"
        + (
            f", but is less sure of it (NLL {number(baseline['nll'])} against {number(model['nll'])})."
            if winner("nll", model.get("nll"), baseline.get("nll")) == "model"
            else "."
        )
    )


def _outside_history(run: Run) -> Iterator[str]:
    past = np.asarray(run.history.get("y", ()), float).ravel() if task(run) == "sequence" else np.zeros(0)
    past, ahead = past[np.isfinite(past)], np.asarray(run.test.get("y", ()), float).ravel()
    if past.size < 8 or not ahead.size:
        return
    outside = int(np.sum((ahead < past.min()) | (ahead > past.max())))
    if outside:
        yield (
            f"Mind the drift: {count(outside)} of {counted(ahead.size, 'held-out value')} lie outside the range of the "
            f"training values, {number(past.min())} to {number(past.max())}."
        )


def _coverage_of_forecast(run: Run) -> Iterator[str]:
    rows = numeric_predictions(run) if task(run) == "sequence" else None
    if rows is None or len(rows.y) < 5:
        return
    inside = float(np.mean(rows.covered))
    verdict = (
        "plan with the 90 % band as it is"
        if inside >= 0.75
        else "the bands are too narrow for it, so that a plan should allow for more"
    )
    yield f"{percent(inside)} of the {counted(len(rows.y), 'held-out value')} lie inside their 90 % bands: {verdict}."


def _useful_horizon(run: Run) -> Iterator[str]:
    """The step at which the forecast knows no more than the spread of the past."""
    rows = numeric_predictions(run) if task(run) == "sequence" else None
    past = np.asarray(run.history.get("y", ()), float).ravel()
    past = past[np.isfinite(past)]
    if rows is None or past.size < 8 or not np.isfinite(rows.std).all():
        return
    spread = float(np.std(past))
    wide = np.flatnonzero(rows.std >= spread)
    first, last = float(rows.std[0]), float(rows.std[-1])
    growth = f"the standard deviation grows from {number(first)} to {number(last)} over {counted(len(rows.y), 'step')}"
    if wide.size:
        yield (
            f"Forecast at most {counted(int(wide[0]), 'step')} ahead: from then on the forecast is as uncertain as the "
            f"history is wide (standard deviation {number(spread)}); {growth}."
        )
    else:
        yield f"Forecast as far as you need it known: {growth}, and the history has {number(spread)}."


# Models without a target.


def _structure_is_no_better(run: Run) -> Iterator[str]:
    for key in ("log_density", "perplexity"):
        model, baseline = ((run.metrics.get(each) or {}).get(key) for each in ("model", "baseline"))
        if winner(key, model, baseline) == "baseline":
            name = run.metrics.get("baseline_name") or "a simpler model"
            yield (
                f"Do not read much into these {_nouns(run)}: the held-out rows are no more probable under them "
                f"({number(model)}) than under {name} ({number(baseline)})."
            )


def _size_is_a_close_call(run: Run) -> Iterator[str]:
    sizes, criterion = (np.asarray(run.structure.get(key, ()), float).ravel() for key in ("sizes", "criterion"))
    if sizes.size < 2 or sizes.size != criterion.size or not np.isfinite(criterion).all():
        return
    order = np.argsort(criterion, kind="stable")
    gap, name = float(criterion[order[1]] - criterion[order[0]]), run.summary.get("criterion") or "criterion"
    # A BIC that differs by 10 is a Bayes factor of about 150; of a perplexity 2 % are little.
    close = gap < 10 if name == "BIC" else gap < 0.02 * float(criterion[order[0]])
    best, second = int(sizes[order[0]]), int(sizes[order[1]])
    if close:
        yield (
            f"Look at {second} {_nouns(run)}, too (-p n_components={second}): {best} have the least {name}, but by "
            f"only {number(gap, 2)}."
        )
    elif best == int(sizes.max()) and sizes.size > 2:
        yield (
            f"Try more than {best} {_nouns(run)} (-p n_components={2 * best}): the {name} was still falling at the "
            "largest number that was tried."
        )


def _odd_rows(run: Run) -> Iterator[str]:
    """Rows that the model finds much less probable than all others."""
    rows = run.structure.get("rows") or {}
    density = np.asarray(rows.get("log_density", ()), float).ravel()
    if density.size < 20 or not np.isfinite(density).all():
        return
    middle, upper = np.quantile(density, [0.5, 0.75])
    odd = np.flatnonzero(density < middle - 8 * max(float(upper - middle), 1e-9))
    if odd.size:
        worst = int(density.argmin())
        others = f" {counted(odd.size - 1, 'other row is', 'other rows are')} as odd." if odd.size > 1 else ""
        yield (
            f"Check row {np.asarray(rows['row'])[worst]} of the file, which fits nowhere: its log density is "
            f"{number(density[worst])}, where the median is {number(middle)}.{others}"
        )


def _between_groups(run: Run) -> Iterator[str]:
    rows = run.structure.get("rows") or {}
    probability = np.asarray(rows.get("probability", ()), float).ravel()
    if not probability.size or task(run) not in ("clusters", "topics"):
        return
    if task(run) == "topics":
        pure = float(np.mean(probability >= 0.8))
        yield (
            f"Read a few rows of each topic before you name it: {percent(pure)} of the rows are about one topic (a "
            "share of at least 80 %), and the table below lists the purest."
        )
        return
    unsure = int(np.sum(probability < 0.8))
    if len(np.asarray(run.structure.get("weight", ()))) < 2:
        yield "One group describes all rows: use the means of the columns, there is nothing to sort rows by."
    elif unsure:
        yield (
            f"Treat {count(unsure)} of {counted(probability.size, 'row')} as being between groups: their most probable "
            "group has less than 80 %, so use the probabilities that `predict` writes, not the group alone."
        )
    else:
        yield (
            f"Sort rows by group without losing much: every one of {counted(probability.size, 'row')} belongs to its "
            f"group with at least {percent(float(np.floor(1000 * probability.min()) / 1000))}."
        )


def _small_groups(run: Run) -> Iterator[str]:
    rows = run.structure.get("rows") or {}
    group = np.asarray(rows.get("group", ()), int).ravel()
    if group.size < 20:
        return
    sizes = np.bincount(group)
    small = [index for index, size in enumerate(sizes) if 0 < size < max(3, 0.02 * group.size)]
    for index in small[:1]:
        yield (
            f"Look at {'topic' if task(run) == 'topics' else 'group'} {index + 1} row by row: it has "
            f"{counted(int(sizes[index]), 'row')} of {count(group.size)}, perhaps mistakes and no kind of their own."
        )


def _name_groups(run: Run) -> Iterator[str]:
    """The column that tells two groups apart best."""
    deviation, weight = (np.asarray(run.structure.get(key, ()), float) for key in ("deviation", "weight"))
    features = run.summary.get("features") or ()
    if deviation.ndim != 2 or len(weight) < 2 or deviation.shape[1] != len(features):
        return
    gaps = np.abs(deviation[0] - deviation[1])
    best = int(gaps.argmax())
    yield (
        f"Name the groups by what sets them apart: groups 1 and 2 differ most in {_name(features[best])}, by "
        f"{number(float(gaps[best]), 2)} standard deviations of all rows."
    )


def _weak_columns(run: Run) -> Iterator[str]:
    noise = np.asarray(run.structure.get("noise", ()), float).ravel()
    features = run.summary.get("features") or ()
    if noise.size != len(features) or not noise.size:
        return
    own = [int(index) for index in np.argsort(-noise) if noise[index] > 0.8]
    if own:
        shown = ", ".join(f"{_name(features[index])} ({percent(float(noise[index]))})" for index in own[:3])
        more = f" and {count(len(own) - 3)} more" if len(own) > 3 else ""
        yield f"Do not judge {shown}{more} by the factors: so much of the variance is the column's own."


def _sharp_scores(run: Run) -> Iterator[str]:
    rows = run.structure.get("rows") or {}
    std = np.asarray(rows.get("std", ()), float)
    if task(run) != "factors" or std.ndim != 2 or not std.size:
        return
    typical = np.median(std, axis=0)
    unsure = [index for index in range(len(typical)) if typical[index] > 0.6]
    if unsure:
        yield (
            f"Use the values of factor {unsure[0] + 1} with their standard deviations "
            f"({number(float(typical[unsure[0]]), 2)} in the median, where 1 is knowing nothing): "
            "its columns say little about a single row."
        )
    else:
        yield (
            f"Use the factors in place of the columns: a row's values are known to ± {number(float(typical.max()), 2)} "
            "standard deviations at worst (median), and `predict` writes them."
        )


def _strongest_loading(run: Run) -> Iterator[str]:
    loading = np.asarray(run.structure.get("loading", ()), float)
    features = run.summary.get("features") or ()
    if loading.ndim != 2 or loading.shape[1] != len(features) or not loading.size:
        return
    order = np.argsort(-np.abs(loading[0]))[:3]
    shown = ", ".join(f"{_name(features[int(index)])} ({number(float(loading[0, index]), 2)})" for index in order)
    yield f"Name factor 1 by what it moves: {shown} have its largest loadings."


def _agrees_with_column(run: Run) -> Iterator[str]:
    """How well the groups or topics match a column that the model did not see."""
    found = run.structure.get("compared") or {}
    counts = np.asarray(found.get("counts", ()))
    if counts.ndim != 2 or not counts.size or not counts.sum():
        return
    together = int(counts.max(axis=1).sum())
    noun = "topic" if task(run) == "topics" else "group"
    yield (
        f"See how far {_name(found['name'])} explains the {_nouns(run)}: its most frequent value in each {noun} has "
        f"{count(together)} of {counted(int(counts.sum()), 'row')}, so "
        + ("they are about the same thing." if together > 0.9 * counts.sum() else "the rest is another division.")
    )


def _structure_gain(run: Run) -> Iterator[str]:
    """How much better held-out rows are described than by a simpler model."""
    for key in ("log_density", "perplexity"):
        model, baseline = ((run.metrics.get(each) or {}).get(key) for each in ("model", "baseline"))
        if winner(key, model, baseline) == "model":
            name = run.metrics.get("baseline_name") or "a simpler model"
            yield (
                f"Trust the {_nouns(run)} as far as they describe rows that the fit did not see: their "
                f"{key.replace('_', ' ')} is {number(model)}, against {number(baseline)} for {name}."
            )


def _topic_words(run: Run) -> Iterator[str]:
    share, words = (np.asarray(run.structure.get(key, ())) for key in ("share", "words"))
    features = run.summary.get("features") or ()
    if words.ndim != 2 or not share.size:
        return
    shown = ", ".join(_name(features[int(index)]) for index in words[0, :3])
    yield (
        f"Name the topics by their words: topic 1, {percent(float(share[0]))} of all words, is about {shown}. Words "
        "that say nothing can be removed from the table."
    )


RULES: tuple[Rule, ...] = (
    _warned("leak"),
    _warned("copies"),
    _worse_than_baseline,
    _structure_is_no_better,
    _warned("outliers"),
    _warned("order"),
    _not_converged,
    _reference_is_better,
    _warned("drift"),
    _forecast_is_one_sided,
    _confidence_is_wrong,
    _class_is_missed,
    _intervals_are_wrong,
    _row_is_suspicious,
    _linear_is_enough,
    _missing_values,
    _few_held_out_rows,
    _size_is_a_close_call,
    _odd_rows,
    _small_groups,
    _between_groups,
    _weak_columns,
    _topic_words,
    _name_groups,
    _sharp_scores,
    _strongest_loading,
    _agrees_with_column,
    _structure_gain,
    _outside_history,
    _walk_is_closer,
    _coverage_of_forecast,
    _useful_horizon,
    _sure_predictions,
    _what_is_left_is_noise,
    _interval_width,
    _idle_columns,
    _least_sure_row,
    _farthest_row,
)


def _references(run: Run) -> list[dict[str, Any]]:
    """The stronger baselines whose difference from the model, and its error, are known."""
    known = []
    for each in run.metrics.get("references") or ():
        mean, error = each.get("difference") or (math.nan, None)
        if error is not None and math.isfinite(mean) and math.isfinite(error):
            known.append(each)
    return known


def _gap(reference: dict[str, Any]) -> float:
    """By how many standard errors the model's NLL is above the reference's."""
    mean, error = reference["difference"]
    return mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def _nouns(run: Run) -> str:
    return {"clusters": "groups", "topics": "topics", "factors": "factors"}.get(task(run), "parts")


def _name(text: Any) -> str:
    return f"“{shorten(text, 40)}”"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]


def _rounder(value: int) -> int:
    """A number above this one with one or two digits other than zero.

    >>> _rounder(2468), _rounder(7)
    (2500, 10)
    """
    power = 10 ** max(len(str(max(value, 1))) - 2, 1)
    return -(-value // power) * power
