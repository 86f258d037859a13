"""Cross-validation: every row is predicted by a fit that did not see it, and several models by the same folds.

Scores of two models differ by less than either varies, because rows are hard or easy for both. So the standard error of
a difference is that of the differences row by row. Fits of different folds share most of their rows, which this error
does not know; it is a little too small.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..estimators.registry import build_estimator, estimator_name, models, title
from ..tables.tables import InputError, Table
from .folds import assign_folds
from .references import TREES, Scored, describe_baseline, predict_baseline, predict_trees, score_predictions
from .run import Candidate, Comparison
from .train import encode_target, fit_rows, predict_held_out, prepare_rows, resolve_config
from .versions import versions

BASELINE = "baseline"
# Beyond so many rows, Gaussian processes are compared only where they are asked for. Classes take many more steps.
_MOST_ROWS_OF_A_PROCESS = {"regression": 1_000, "binary": 200, "classes": 200}


def predict_out_of_fold(
    table: Table,
    y: np.ndarray,
    fold: np.ndarray,
    config: dict[str, Any],
    classes: list[str],
    on_fold: Callable[[int], None] = lambda number: None,
) -> Scored:
    """The predictions of every row by the model that was fitted without its fold.

    Args:
        table: all rows that have a target.
        y: the targets, numbers or codes of classes.
        fold: the fold of every row.
        config: complete settings; the model "baseline" ignores the inputs, "boosted trees" are scikit-learn's.
        classes: the labels of the classes.
        on_fold: called with the number of folds that are done.
    """
    values: dict[str, np.ndarray] = {}
    losses = np.zeros(len(y))
    for number in range(int(fold.max()) + 1):
        test = fold == number
        missing = np.setdiff1d(np.arange(len(classes)), y[~test])
        if len(missing):
            raise InputError(
                f"The class {classes[int(missing[0])]!r} has too few rows: all of them are in one fold. Take fewer "
                "folds, or remove its rows."
            )
        part = _predict_fold(table, y, test, config, classes)
        for name, predicted in part.values.items():
            values.setdefault(name, np.zeros((len(y), *predicted.shape[1:])))[test] = predicted
        losses[test] = part.losses
        on_fold(number + 1)
    return Scored(values, losses)


def _predict_fold(table: Table, y: np.ndarray, test: np.ndarray, config: dict[str, Any], classes: list[str]) -> Scored:
    task = config["task"]
    if config["model"] == BASELINE:
        return predict_baseline(y[~test], y[test], task, len(classes))
    trees = config["model"] == TREES
    settings = {**config, "model": "linear", "recipe": None, "params": {}} if trees else config
    prepared = prepare_rows(table.take(~test), y[~test], settings, classes)
    inputs = prepared.preprocessing.inputs(table.take(test))
    if trees:
        arrays = prepared.matrix, prepared.y, inputs.encoded, y[test]
        return predict_trees(*arrays, task, len(classes), config["seed"])
    fit_rows(prepared, config)
    return predict_held_out(prepared.estimator, inputs, y[test], task, classes)


def standard_errors(y: np.ndarray, predicted: Scored) -> dict[str, float]:
    """The standard errors of scores that are means over rows: NLL, accuracy or RMSE, and coverage."""
    count = len(y)
    error_of = lambda values: float(np.std(values, ddof=1) / np.sqrt(count))
    errors = {"nll": error_of(predicted.losses)}
    if "probabilities" in predicted.values:
        probabilities = predicted.values["probabilities"]
        squares = np.sum((probabilities - np.eye(probabilities.shape[1])[y]) ** 2, axis=1)
        return errors | {"accuracy": error_of(probabilities.argmax(axis=1) == y), "brier": error_of(squares)}
    squares = (y - predicted.values["mean"]) ** 2
    rmse = float(np.sqrt(squares.mean()))
    covered = (y >= predicted.values["low"]) & (y <= predicted.values["high"])
    return errors | {"rmse": error_of(squares) / (2 * rmse) if rmse > 0 else 0.0, "coverage90": error_of(covered)}


def difference(losses: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """The mean difference of two models' losses, and its standard error, from the differences row by row.

    >>> difference(np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.5, 2.5]))
    (0.5, 0.0)
    """
    rows = losses - reference
    return float(rows.mean()), float(np.std(rows, ddof=1) / np.sqrt(len(rows)))


def summarize(
    table: Table, config: dict[str, Any], folds: int, on_fold: Callable[[int], None] = lambda number: None
) -> dict[str, Any]:
    """`Run.metrics["cv"]`: the scores of a model over all rows, with standard errors, and those of the baseline.

    Returns:
        "folds", "rows", "model" and "baseline" (metrics), "errors" (standard errors of the model's), "fold_nll", and
        "difference", the mean NLL minus the baseline's with its standard error.
    """
    table, target, config, _ = resolve_config(table, config)
    classes, y = encode_target(target, config["task"])
    fold = assign_folds(len(y), folds, config["seed"], y if classes else None)
    predicted = predict_out_of_fold(table, y, fold, config, classes, on_fold)
    baseline = predict_out_of_fold(table, y, fold, {**config, "model": BASELINE}, classes)
    return {
        "folds": folds,
        "rows": len(y),
        "model": score_predictions(y, predicted),
        "baseline": score_predictions(y, baseline),
        "errors": standard_errors(y, predicted),
        "fold_nll": [float(predicted.losses[fold == number].mean()) for number in range(folds)],
        "difference": list(difference(predicted.losses, baseline.losses)),
    }


def compare(
    table: Table,
    config: dict[str, Any],
    chosen: list[str],
    folds: int,
    *,
    log: Callable[[str], None] = lambda message: None,
    on_fold: Callable[[str, int], None] = lambda name, number: None,
) -> Comparison:
    """Score several models on one table, each on the same folds.

    Args:
        table: the data.
        config: "data", "target", "task" and "seed"; what is missing is guessed.
        chosen: names of models, each with a recipe after a colon where it is not the default ("mlp:vogn"); all that do
            the task where it is empty. A baseline without inputs, and scikit-learn's boosted trees, are always there.
        folds: how many.
        log: called with messages for the user.
        on_fold: called with the name of a model and the number of its folds that are done.
    """
    settings = {"data": None, "time": None, **config, "model": None, "recipe": None, "params": {}}
    table, target, settings, notes = resolve_config(table, settings)
    task = settings["task"]
    if task == "sequence":
        raise InputError("compare is for independent rows: fit each model of a sequence with `bayesrule fit`.")
    for note in notes:
        log(note)
    classes, y = encode_target(target, task)
    fold = assign_folds(len(y), folds, settings["seed"], y if classes else None)
    candidates = [_candidate(name, task) for name in chosen or _default_models(task, len(y), log)]
    candidates += [
        Candidate(TREES, "boosted trees, scikit-learn's HistGradientBoosting at its defaults", ""),
        Candidate(BASELINE, describe_baseline(task), ""),
    ]
    for each in candidates:
        model, _, recipe = (each.name, "", "") if not each.command else each.name.partition(":")
        one = {**settings, "model": model, "recipe": recipe or None}
        began = time.perf_counter()
        try:
            predicted = predict_out_of_fold(
                table, y, fold, one, classes, lambda number, name=each.name: on_fold(name, number)
            )
        except (ValueError, FloatingPointError) as error:
            if isinstance(error, InputError) and not each.command:
                raise
            each.failure = " ".join(str(error).split())
            log(f"{each.name} could not be fitted: {each.failure}")
            continue
        each.seconds = time.perf_counter() - began
        each.losses, each.metrics = predicted.losses, score_predictions(y, predicted)
        each.errors = standard_errors(y, predicted)
        each.fold_nll = [float(predicted.losses[fold == number].mean()) for number in range(folds)]
    candidates.sort(key=lambda each: each.metrics.get("nll", np.inf) if not each.failure else np.inf)
    summary = {"source": table.source, "rows": len(y), "guesses": notes, "columns": len(table.columns) - 1}
    kept = {name: settings[name] for name in ("data", "target", "task", "seed")}
    return Comparison({**kept, "folds": folds}, summary, candidates, classes, versions())


def _default_models(task: str, rows: int, log: Callable[[str], None]) -> list[str]:
    able = [name for name, by_task in models().items() if task in by_task and name != "binary-mlp"]
    if "gp" in able and rows > _MOST_ROWS_OF_A_PROCESS.get(task, 0):
        log(f"gp is left out: it would take long with {rows:,} rows (--model gp asks for it)")
        able.remove("gp")
    return able


def _candidate(name: str, task: str) -> Candidate:
    model, _, recipe = name.partition(":")
    kind = estimator_name(task, model)
    build_estimator(kind, recipe or None, {}, 0)  # Raises if the class has only one algorithm.
    words = title(kind) + (f" by {recipe}" if recipe else "")
    return Candidate(name, words, f"--model {model}" + (f" --recipe {recipe}" if recipe else ""))
