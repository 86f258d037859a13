"""From a table to a run: resolve the settings, hold rows out, fit the estimator, and score it on the held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..estimators.registry import build_estimator, default_model, estimator_name
from ..tables import tasks
from ..tables.guess_columns import describe_columns
from ..tables.tables import Column, InputError, Table, number_label
from ..tables.time_order import irregularities, order_by_time
from . import average, score
from .explain import add_explanations
from .preprocess import Inputs, Preprocessing
from .redraw import redraw
from .run import Run
from .versions import versions
from .watch import Progress, Watcher

_FEWEST_ROWS = 10


def train(
    table: Table,
    config: dict[str, Any],
    *,
    folder: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    log: Callable[[str], None] = lambda message: None,
) -> Run:
    """Fit an estimator to a table.

    Args:
        table: the data.
        config: the settings (`Run.config`); what is missing is guessed from the table or has a default.
        folder: where fits are saved while they run, and resumed from; None saves nothing.
        on_progress: called with the progress of every fit.
        log: called with messages for the user, such as what was guessed.
    """
    began = time.perf_counter()
    all_rows = table
    table, target, config, notes = resolve_config(table, config)
    notes = [*table.notes, *notes]
    for line in [*notes, *describe_columns(all_rows.columns)]:
        log(line)
    for name in (target.name, config.get("time")):  # The notes of other columns follow when these are encoded.
        if name is not None and all_rows.columns[name].note:
            log(f"{name!r}: {all_rows.columns[name].note}")
    if config["task"] == "sequence":
        from .train_sequence import train_sequence

        run = train_sequence(table, target, config, Watcher(folder, on_progress))
    else:
        run = _train_rows(table, target, config, Watcher(folder, on_progress), log)
        # Rows without a target were dropped before; a run's row numbers are those of the file.
        row_in_file = np.flatnonzero(~all_rows.columns[target.name].missing)
        for part in (run.test, run.influence):
            if "row" in part:
                part["row"] = row_in_file[part["row"]]
    run.summary["guesses"] = notes
    run.summary["source"] = table.source
    run.summary["target"] |= {"guess": target.guess, "note": target.note}
    # By these the columns of other files are read alike.
    run.summary["formats"] = {name: column.format for name, column in all_rows.columns.items() if column.format}
    run.versions = versions()
    run.seconds["fit"] = round(time.perf_counter() - began, 2)
    return run


def resolve_config(table: Table, config: dict[str, Any]) -> tuple[Table, Column, dict[str, Any], list[str]]:
    """Check the settings against the table, and fill in those that are missing.

    Returns:
        The rows that have a target, the target, the complete settings, and notes: sentences about settings that were
        guessed, and about rows and columns that are not used.
    """
    config, notes = dict(config), []
    name = config.get("target")
    if name is None:
        name = list(table.columns)[-1]
        notes.append(f"the target is the last column, {name!r} (--target chooses another)")
    target = table.column(name)
    observed = int((~target.missing).sum())
    if observed < _FEWEST_ROWS:
        rows = "1 row" if observed == 1 else f"{observed:,} rows"
        raise InputError(f"{table.source} has {rows} with a value of {name!r}: at least {_FEWEST_ROWS} are needed.")
    tasks.check_target(target, table.place)
    if config.get("time") is not None:
        table.column(config["time"])
        config["task"] = config.get("task") or "sequence"
    explicit = config.get("task") is not None
    if not explicit:
        config["task"], reason = tasks.guess_task(target)
        notes.append(f"{reason} (--task chooses another)")
    if config["task"] not in tasks.TASKS:
        raise InputError(f"There is no task {config['task']!r}: the tasks are {', '.join(tasks.TASKS)}.")
    tasks.check_task(config["task"], target, explicit=explicit)
    if config["task"] == "sequence":
        if config.get("time") is None:
            notes.append("the rows are in the order of time (--time names a column of times)")
        notes += irregularities(order_by_time(table, config.get("time"))[1])
        others = len(table.columns) - 1 - (config.get("time") is not None)
        if others:
            notes.append(f"the other columns ({others}) are not used")
    elif len(table.columns) == 1:
        raise InputError(
            f"{table.source} has one column, {name!r}, and nothing to predict it from. If its columns are separated by "
            "something else than commas, semicolons, tabs, | or spaces, save it as CSV; if it is a series, say --task "
            "sequence."
        )
    missing = int(target.missing.sum())
    if missing and config["task"] != "sequence":
        notes.append(f"{missing:,} rows without a value of {name!r} are left out")
        table = table.take(~target.missing)
        target = table.column(name)
    if config["task"] in ("binary", "classes"):
        single = int((np.unique(target.labels(), return_counts=True)[1] == 1).sum())
        if single:
            what = (
                "1 class of {!r} has one row, which is"
                if single == 1
                else "{1} classes of {0!r} have one row, which is"
            )
            notes.append(f"{what.format(name, single)} trained on: the held-out rows say nothing about it")
    config |= {"target": name, "model": config.get("model") or default_model(config["task"])}
    for setting, default in {"recipe": None, "params": {}, "seed": 0, "test_size": 0.2}.items():
        config.setdefault(setting, default)
    estimator_name(config["task"], config["model"])  # Raises if the model cannot do the task.
    return table, target, config, notes


def split(rows: int, config: dict[str, Any], labels: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Split rows at random into training rows and held-out rows, stratified by class if there are `labels`."""
    test_count = round(rows * float(config["test_size"]))
    if not 1 <= test_count <= rows - 2:
        raise InputError(
            f"--test-size {config['test_size']} leaves {rows - test_count:,} rows to train on, {test_count:,} to test: "
            "at least 2 and 1 are needed."
        )
    order = np.random.default_rng(config["seed"]).permutation(rows)
    if labels is not None:
        # Interleave the classes: the i-th of n rows of a class is placed at the quantile (i + ½)/n, so that the first
        # rows, which are held out, have every class in its proportion.
        _, codes, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
        quantiles = np.zeros(rows)
        for code, count in enumerate(counts):
            quantiles[codes == code] = (np.arange(count) + 0.5) / count
        order = order[np.argsort(quantiles, kind="stable")]
        # A class without training rows could not be predicted: return one of its held-out rows to the training rows.
        held_out = order[:test_count]
        untrained = np.setdiff1d(labels, labels[order[test_count:]])
        if len(untrained):
            returned = np.isin(held_out, [held_out[labels[held_out] == label][0] for label in untrained])
            order = np.concatenate([held_out[~returned], held_out[returned], order[test_count:]])
            test_count -= int(returned.sum())
        if not test_count:
            raise InputError(
                f"The target has {len(counts)} classes in {rows} rows, and every class needs a row to train on: none "
                "is left to test. Is it the right column (--target)? Otherwise hold out more rows with --test-size, or "
                "merge rare classes."
            )
    return np.sort(order[test_count:]), np.sort(order[:test_count])


def _train_rows(
    table: Table, target: Column, config: dict[str, Any], watcher: Watcher, log: Callable[[str], None]
) -> Run:
    """Fit and score an estimator whose rows are independent."""
    task = config["task"]
    classes, y = _encode_target(target, task)
    train_rows, test_rows = split(table.rows, config, y if classes else None)
    y_train, y_test = y[train_rows], y[test_rows]
    names = [name for name in table.columns if name != target.name]
    name = estimator_name(task, config["model"])
    estimator = build_estimator(name, config["recipe"], config["params"], config["seed"])
    train_table = table.take(train_rows)
    target_columns = _target_columns(y_train, task, len(classes))
    preprocessing, training = Preprocessing.fit(
        train_table, names, target_columns, config["seed"], estimator.draws_of_missing_inputs
    )
    columns = preprocessing.encoding.columns
    for column in columns:
        if column.get("note"):
            log(f"{column['name']!r}: {column['note']}")
    inputs, test_inputs = preprocessing.inputs(train_table), preprocessing.inputs(table.take(test_rows))
    remarks = _describe_missing(columns, inputs, test_inputs)
    for remark in remarks:
        log(remark)
    # The watcher runs the estimator's fits, and has to know whether their bounds can be shown as log evidences.
    estimator._watcher = watcher
    watcher.bound_is_evidence = estimator._bound_is_evidence
    if hasattr(estimator, "with_posterior"):
        watcher.heldout = lambda q: _score(estimator.with_posterior(q), test_inputs, y_test, task, classes)[0]["nll"]
    weights = {} if training.weight is None else {"sample_weight": training.weight}
    try:
        estimator.fit(training.x, y_train[training.row], **weights)
        for number in range(estimator.refits_with_missing_inputs if inputs.missing else 0):
            training = redraw(estimator, training, inputs, y_train, config["seed"] + number)
            estimator.fit(training.x, y_train[training.row], **weights)
    except TypeError as error:
        if not config["params"]:
            raise
        raise InputError(
            f"{name} could not be fitted, perhaps because one of the parameters {config['params']} has the wrong type: "
            f"{error}."
        ) from error
    model_metrics, predictions = _score(estimator, test_inputs, y_test, task, classes)
    baseline_metrics, baseline_name = _score_baseline(y_train, y_test, task, classes)
    run = Run(
        config={**config, "estimator": name},
        summary={
            "rows": table.rows,
            "train_rows": len(train_rows),
            "test_rows": len(test_rows),
            "columns": columns,
            "target": _summarize_target(target, y, classes),
            "features": preprocessing.encoding.features,
            "missing": remarks,
        },
        estimator=estimator,
        encoding=preprocessing,
        metrics={"model": model_metrics, "baseline": baseline_metrics, "baseline_name": baseline_name},
        classes=classes,
        trace=watcher.trace(),
        fits=watcher.first_steps(),
        test={"row": test_rows, "y": y_test, **predictions},
    )
    add_explanations(run, watcher, training, inputs, y_train, train_rows)
    return run


def _target_columns(y: np.ndarray, task: str, classes: int) -> np.ndarray:
    """The target as columns that depend on inputs about linearly, from which missing inputs can be told."""
    if classes:
        return (y[:, None] == np.arange(1, classes)).astype(float)
    return (np.log1p(y) if task == "counts" else y)[:, None]


def _describe_missing(columns: list[dict[str, Any]], training: Inputs, held_out: Inputs) -> list[str]:
    """Sentences about missing inputs and what is done about them; none where nothing is missing."""
    remarks = []
    drawn = training.missing + held_out.missing
    if drawn:
        remarks.append(average.describe_draws(drawn))
    levels = sum(column["missing"] for column in columns if column["used"] and column["kind"] == "category")
    if levels:
        remarks.append(
            f"{levels:,} missing {'category counts' if levels == 1 else 'categories count'} as a level of "
            f"{'its' if levels == 1 else 'their'} own, with 0 in all indicator columns"
        )
    return remarks


def _encode_target(target: Column, task: str) -> tuple[list[str], np.ndarray]:
    """The labels of the classes (none where numbers are predicted), and the target as numbers or class codes."""
    if task not in ("binary", "classes"):
        return [], np.asarray(target.numbers, float)
    if target.codes is not None:
        values, y = np.unique(target.codes, return_inverse=True)
        return [target.levels[code] for code in values], y
    values, y = np.unique(np.asarray(target.numbers), return_inverse=True)
    return [number_label(value) for value in values], y


def _summarize_target(target: Column, y: np.ndarray, classes: list[str]) -> dict[str, Any]:
    summary: dict[str, Any] = {"name": target.name, "missing": 0, "used": True}
    if classes:
        counts = np.bincount(y, minlength=len(classes))
        by_frequency = np.argsort(-counts, kind="stable")
        top = [[classes[code], int(counts[code])] for code in by_frequency[:12]]
        return summary | {"kind": "category", "levels": classes, "top": top}
    return summary | {
        "kind": "number",
        "mean": float(y.mean()),
        "std": float(y.std()),
        "min": float(y.min()),
        "max": float(y.max()),
    }


def _score(
    estimator: Any, inputs: Inputs, y: np.ndarray, task: str, classes: list[str]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics on held-out rows, and the predictions for them."""
    if classes:
        probabilities = average.predict_classes(estimator, inputs)
        return score.score_classes(probabilities, y), {"probabilities": probabilities}
    predictions = average.predict_numbers(estimator, inputs, task)
    if task == "counts":
        nll = -float(np.mean(average.log_predictive(estimator, inputs, y)))
        return score.score_numbers(y, predictions["mean"], predictions["low"], predictions["high"], nll), predictions
    freedom = score.degrees_of_freedom(estimator)
    return score.score_gaussian(y, predictions["mean"], predictions["std"], freedom), predictions


def _score_baseline(
    y_train: np.ndarray, y_test: np.ndarray, task: str, classes: list[str]
) -> tuple[dict[str, float], str]:
    """Metrics of a prediction that ignores the features, and what it is called."""
    if classes:
        probabilities = score.class_frequencies(y_train, len(classes), len(y_test))
        return score.score_classes(probabilities, y_test), "the classes' frequencies in training"
    if task == "counts":
        metrics = score.score_poisson_baseline(y_test, float(y_train.mean()))
        return metrics, "a Poisson distribution with the training mean"
    metrics = score.score_gaussian(y_test, y_train.mean(), y_train.std())
    return metrics, "a Gaussian with the training mean and deviation"
