"""The section on ranking two classes: the ROC curve, precision and recall."""

from __future__ import annotations

import numpy as np

from ...runs.run import Run
from .. import charts
from ..format_numbers import counted, mean_and_std, number, percent
from ..held_out_rows import class_predictions
from ..markup import Markup, join, tag, user_text
from ..ranking_math import area_with_error, average_precision, ranking_curves
from .layout import figure, side_by_side


def render_ranking(run: Run) -> Markup | None:
    """Two curves; None unless there are two classes, both among the held-out rows."""
    rows = class_predictions(run)
    if rows is None or rows.probabilities.shape[1] != 2 or len(np.unique(rows.y)) < 2:
        return None
    score, positive = rows.probabilities[:, 1], rows.y == 1
    curves, (area, error) = ranking_curves(score, positive), area_with_error(score, positive)
    name = tag("b", user_text(run.classes[1] if len(run.classes) == 2 else "the second class", 40))
    share = float(positive.mean())
    at_half = int(np.searchsorted(-curves.threshold, -0.5, side="right")) - 1
    text, error_text = mean_and_std(area, error) if np.isfinite(error) and error > 0 else (number(area), "")
    precision = average_precision(curves)
    words = join(
        "How well the predicted probability of ",
        name,
        " puts its rows before the others, whatever threshold is chosen. ",
        tag("b", f"AUROC {text}{' ± ' if error_text else ''}{error_text}"),
        ": the probability that a row of this class is ranked above one of the other (0.5 for guessing). ",
        tag("b", f"Average precision {number(precision)}"),
        f" ({number(share)} for guessing).",
    )
    recall, false_rate = float(curves.recall[at_half]), float(curves.false_positive_rate[at_half])
    called = counted(int(np.sum(score >= 0.5)), "row")
    roc = figure(
        charts.roc(curves, at_half),
        f"Each point is a threshold. At the threshold 50 % (the dot) {percent(recall)} of the class are found, and "
        f"{percent(false_rate)} of the other rows are taken for it.",
    )
    recall_curve = figure(
        charts.precision_recall(curves, at_half, share),
        f"Of the {called} with at least 50 %, {percent(float(curves.precision[at_half]))} are of the class; the dashed "
        "line is the share of the class, which guessing gives. To find more of them, lower the threshold and pay in "
        "precision.",
    )
    return join(tag("p", words), side_by_side(roc, recall_curve))
