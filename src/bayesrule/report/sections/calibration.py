"""The section on calibration: predicted probabilities and intervals against what was observed."""

from __future__ import annotations

import numpy as np

from ...runs.run import Run
from .. import charts
from ..calibration_math import (
    CHANCE_FACTOR,
    bin_predictions,
    calibration_error,
    central_coverage,
    chance_error,
    predictive_cdf,
)
from ..format_numbers import counted, number, percent
from ..held_out_rows import (
    ClassPredictions,
    NumericPredictions,
    class_predictions,
    left_out_predictions,
    numeric_predictions,
    task,
)
from ..interval_checks import find_problems
from ..markup import Markup, join, tag, user_text
from .layout import figure, legend, side_by_side


def render_calibration(run: Run) -> Markup | None:
    """Render a reliability diagram for classes, or the coverage of central intervals for numbers."""
    classes = class_predictions(run)
    if classes is not None:
        return _render_classes(run, classes)
    numbers = numeric_predictions(run)
    return None if numbers is None else _render_numbers(run, numbers)


def _render_classes(run: Run, rows: ClassPredictions) -> Markup:
    if rows.probabilities.shape[1] == 2:
        name = run.classes[1] if len(run.classes) == 2 else "the second class"
        bins = bin_predictions(rows.probabilities[:, 1], rows.y == 1)
        event = join("that the row is ", tag("b", user_text(name)))
        scope = " The ECE is computed from the probability of the predicted class instead."
        chart = charts.reliability(bins, "predicted probability, %", "observed frequency, %")
    else:
        bins, event = bin_predictions(rows.confidence, rows.correct), "of the most probable class"
        scope = ""
        chart = charts.reliability(bins, "confidence in the predicted class, %", "accuracy, %")
    stored = (run.metrics.get("model") or {}).get("ece")
    error = calibration_error(rows) if stored is None else float(stored)
    chance, confidence, accuracy = chance_error(rows), float(rows.confidence.mean()), float(rows.correct.mean())
    verdict = " A difference of this size can arise by chance with this number of rows."
    if error > CHANCE_FACTOR * chance:
        direction = "overconfident" if confidence > accuracy else "underconfident"
        verdict = f" The model is {direction}: mean confidence {percent(confidence)}, accuracy {percent(accuracy)}."
    diagram = figure(
        chart,
        join(
            "The predicted probability ",
            event,
            ", in bins of 10 %, against its observed frequency; on the dashed line they are equal. Vertical strokes "
            "are 90 % intervals for the frequency, larger dots have more rows.",
            scope,
        ),
    )
    summary = join(
        tag("b", f"Expected calibration error (ECE) {number(error)}."),
        f" Averaged over {counted(len(rows.y), 'row')} in 10 bins, confidence in the predicted class "
        f"and accuracy differ by {percent(error)}. "
        f"Perfectly calibrated probabilities would give about {number(chance, 2)} with as many rows.",
        verdict,
    )
    correct, wrong = int(rows.correct.sum()), int((~rows.correct).sum())
    histogram = figure(
        charts.confidences(rows.confidence, rows.correct, rows.probabilities.shape[1]),
        join(
            legend("blue", f"correct ({correct:,})"),
            legend("orange", f"wrong ({wrong:,})"),
            " How confident the predictions were; each histogram has its own scale. If the wrong predictions are far "
            "from 100 %, a low confidence is a useful warning.",
        ),
    )
    return join(tag("p", summary), side_by_side(diagram, histogram))


def _render_numbers(run: Run, rows: NumericPredictions) -> Markup | None:
    counts = task(run) == "counts"
    lower, upper = predictive_cdf(rows, counts=counts)
    if not lower.size:
        return None
    levels = np.linspace(0, 1, 51)
    covered = central_coverage(lower, upper, levels)
    distribution = "a Poisson or negative binomial distribution" if counts else "a normal distribution"
    if np.isfinite(rows.degrees_of_freedom):
        distribution = f"a Student-t distribution ({number(rows.degrees_of_freedom)} degrees of freedom)"
    curve = figure(
        charts.coverage_curve(levels, covered, len(lower)),
        f"Central intervals of every level, from {distribution} with the row's mean and standard deviation. On the "
        "dashed line their coverage is as stated; below it they are too narrow, above it too wide. With "
        f"{counted(len(lower), 'row')}, a perfectly calibrated model stays inside the grey band at each level with "
        "probability 90 %.",
    )
    histogram = figure(
        charts.residuals(rows),
        join(
            legend("blue", "held-out rows"),
            legend("ink dashed", "standard normal"),
            " Errors divided by their predicted standard deviation. A histogram wider than the curve means "
            "overconfidence.",
        ),
    )
    coverage_of_50 = percent(np.interp(0.5, levels, covered))
    summary = (
        f" of the {counted(len(rows.y), 'held-out value')} lie inside their 90 % intervals, {coverage_of_50} inside "
        "the central 50 % intervals."
    )
    problems = [
        tag("p", tag("b", problem.finding, class_="warn"), " ", problem.advice)
        for problem in find_problems(rows, counts=counts, left_out=left_out_predictions(run))
        if task(run) != "sequence"
    ]
    covered_share = tag("b", percent(float(np.mean(rows.covered))))
    return join(tag("p", covered_share, summary), *problems, side_by_side(curve, histogram))
