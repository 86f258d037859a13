"""Whether its uncertainty can be believed: what was claimed beside what came true."""

from __future__ import annotations

import numpy as np

from ...runs.run import Run
from .. import charts
from ..calibration_math import CHANCE, binned, calibration_error, chance_error, coverage, places
from ..format_numbers import number, percent, several
from ..markup import Markup, joined, named, tag
from ..test_rows import Classified, Measured, classified, measured, task
from .layout import beside, figure, key


def calibration(run: Run) -> Markup | None:
    """A reliability diagram for classes, the coverage of central intervals for numbers."""
    rows = classified(run)
    if rows is not None:
        return _classes(run, rows)
    numbers = measured(run)
    return None if numbers is None else _numbers(run, numbers)


def _classes(run: Run, rows: Classified) -> Markup:
    if rows.p.shape[1] == 2:
        name = run.classes[1] if len(run.classes) == 2 else "the second class"
        bins, of = binned(rows.p[:, 1], rows.y == 1), joined("that the row is ", tag("b", named(name)))
        chart = charts.reliability(bins, "claimed probability, %", "how often it was so, %")
    else:
        bins, of = binned(rows.confidence, rows.right), "of the most probable class"
        chart = charts.reliability(bins, "confidence in the predicted class, %", "how often it was right, %")
    given = (run.metrics.get("model") or {}).get("ece")
    error = calibration_error(rows) if given is None else float(given)
    chance, claimed, came = chance_error(rows), float(rows.confidence.mean()), float(rows.right.mean())
    verdict = " The two agree as far as so many rows can tell."
    if error > CHANCE * chance:
        lean = "sure" if claimed > came else "cautious"
        verdict = f" On the whole it is too {lean}: {percent(claimed)} claimed, {percent(came)} right."
    diagram = figure(
        chart,
        joined(
            "The probability ",
            of,
            ", in bins of 10 %, against how often it came true: on the dashed line the two are equal. Upright strokes "
            "are 90 % intervals for a bin's frequency, larger dots have more rows.",
        ),
    )
    words = joined(
        tag("b", f"ECE {number(error)}."),
        f" On average over {several(len(rows.y), 'row')} (in 10 bins) the claimed confidence and the share of right "
        f"answers are {percent(error)} apart. Perfect probabilities would show about {number(chance, 2)} on as many.",
        verdict,
    )
    right, wrong = int(rows.right.sum()), int((~rows.right).sum())
    histogram = figure(
        charts.confidences(rows.confidence, rows.right, rows.p.shape[1]),
        joined(
            key("blue", f"right ({right:,})"),
            key("orange", f"wrong ({wrong:,})"),
            " How confident the predictions were, each on a scale of its own. Where the wrong ones are far from 100 %, "
            "its doubts are worth heeding.",
        ),
    )
    return joined(tag("p", words), beside(diagram, histogram))


def _numbers(run: Run, rows: Measured) -> Markup | None:
    whole = task(run) == "counts"
    lower, upper = places(rows, whole=whole)
    if not lower.size:
        return None
    levels = np.linspace(0, 1, 51)
    covered = coverage(lower, upper, levels)
    taken = "a Poisson or negative binomial distribution" if whole else "a normal distribution"
    curve = figure(
        charts.coverage_curve(levels, covered, len(lower)),
        f"Central intervals of every size, from {taken} with the row's mean and standard deviation: on the dashed line "
        "they hold what they claim; below it they are too narrow, above it too wide. With "
        f"{several(len(lower), 'row')}, perfect intervals would be inside the grey band 90 % of the time.",
    )
    histogram = figure(
        charts.residuals(rows),
        joined(
            key("blue", "held-out rows"),
            key("ink dashed", "standard normal"),
            " Errors in units of their predicted standard deviation: wider than the curve is overconfident.",
        ),
    )
    held = float(np.mean(rows.covered))
    half = percent(np.interp(0.5, levels, covered))
    words = (
        f" of the {several(len(rows.y), 'held-out value')} lie inside their 90 % intervals, {half} inside the central "
        "half of what was predicted."
    )
    return joined(tag("p", tag("b", percent(held)), words), beside(curve, histogram))
