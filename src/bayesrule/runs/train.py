"""From a table to a run: resolve the settings, hold rows out, fit the estimator, and score it on the held-out rows."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..estimators.registry import build_estimator, default_model, estimator_name, title
from ..tables import tasks
from ..tables.guess_columns import describe_columns
from ..tables.tables import Column, InputError, Table, number_label
from ..tables.time_order import irregularities, order_by_time
from . import average, score
from .data_checks import find_warnings
from .explain import add_explanations
from .folds import check_folds
from .partitioned import PartitionedTable, fit_partitions
from .preprocess import Inputs, Preprocessing, TrainingRows
from .redraw import redraw
from .references import (
    TREES,
    Scored,
    are_trees_quick,
    describe_baseline,
    predict_baseline,
    predict_trees,
    score_predictions,
)
from .run import Run
from .train_structure import is_without_target, resolve_structure_config, train_structure
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
    references: bool = False,
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
    partitions: PartitionedTable | None = None,
) -> Run:
    """Fit an estimator to a table.

    Args:
        table: the data.
        config: the settings (`Run.config`); what is missing is guessed from the table or has a default.
        folder: where fits are saved while they run, and resumed from; None saves nothing.
        on_progress: called with the progress of every fit.
        log: called with messages for the user, such as what was guessed.
        references: whether stronger baselines are fitted to the same rows, too: a linear model and boosted trees.
        signals: the signals at which a fit is saved in `folder`, and ended by `SystemExit(143)`.
        partitions: a table of which `table` is the sample: the estimator is fitted to all of its rows.
    """
    began = time.perf_counter()
    all_rows = table
    watcher = Watcher(folder, on_progress, signals=signals)
    if is_without_target(config):
        config, notes = resolve_structure_config(table, config)
        notes = [*table.notes, *notes]
        for line in [*notes, *describe_columns(all_rows.columns)]:
            log(line)
        return _complete(train_structure(table, config, watcher, log, split), all_rows, notes, began)
    table, target, config, notes = resolve_config(table, config)
    notes = [*table.notes, *notes]
    for line in [*notes, *describe_columns(all_rows.columns)]:
        log(line)
    for name in (target.name, config.get("time")):  # The notes of other columns follow when these are encoded.
        if name is not None and all_rows.columns[name].note:
            log(f"{name!r}: {all_rows.columns[name].note}")
    if config["task"] == "sequence":
        from .train_sequence import train_sequence

        run = train_sequence(table, target, config, watcher)
    else:
        if partitions is not None:
            kept = np.flatnonzero(~all_rows.columns[target.name].missing)
            partitions = replace(partitions, places=partitions.places[kept])
        run = _train_rows(table, target, config, watcher, log, references, partitions)
        # Rows without a target were dropped before; a run's row numbers are those of the file.
        row_in_file = np.flatnonzero(~all_rows.columns[target.name].missing)
        for part in (run.test, run.influence):
            if "row" in part:
                part["row"] = row_in_file[part["row"]]
    run.summary["target"] |= {"guess": target.guess, "note": target.note}
    return _complete(run, all_rows, notes, began)


def check_config(table: Table, config: dict[str, Any]) -> None:
    """Raise if the settings do not fit the table."""
    if is_without_target(config):
        resolve_structure_config(table, config)
    else:
        resolve_config(table, config)


def _complete(run: Run, table: Table, notes: list[str], began: float) -> Run:
    """A run with what was guessed, the source of its data, versions and time."""
    run.summary["guesses"] = notes
    run.summary["source"] = table.source
    # By these the columns of other files are read alike.
    run.summary["formats"] = {name: column.format for name, column in table.columns.items() if column.format}
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
        if config.get("cv") is not None:
            raise InputError(
                "--cv is for tables of independent rows; of a sequence the last part is forecast: leave it out."
            )
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
        rows = "1 row" if missing == 1 else f"{missing:,} rows"
        notes.append(f"{rows} without a value of {name!r} {'is' if missing == 1 else 'are'} left out")
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
    if config.get("cv") is not None:
        check_folds(config["cv"], table.rows)
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


@dataclass
class PreparedRows:
    """An estimator and the training rows, encoded, that it is to be fitted to.

    Args:
        estimator: not fitted yet.
        preprocessing: from a table to its inputs, fitted to the training rows.
        training: the rows as they are fitted, those with missing inputs several times.
        inputs: the inputs of the training rows.
        y: their targets, numbers or codes of classes.
    """

    estimator: Any
    preprocessing: Preprocessing
    training: TrainingRows
    inputs: Inputs
    y: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        """The inputs of the training rows, NaN where missing."""
        return self.inputs.encoded


def prepare_rows(table: Table, y: np.ndarray, config: dict[str, Any], classes: list[str]) -> PreparedRows:
    """Encode training rows for the estimator of these settings.

    Args:
        table: the training rows.
        y: their targets, numbers or codes of classes.
        config: complete settings, as `resolve_config` makes them.
        classes: the labels of the classes; none where numbers are predicted.
    """
    name = estimator_name(config["task"], config["model"])
    estimator = build_estimator(name, config["recipe"], config["params"], config["seed"])
    names = [name for name in table.columns if name != config["target"]]
    target_columns = _target_columns(y, config["task"], len(classes))
    preprocessing, training = Preprocessing.fit(
        table, names, target_columns, config["seed"], estimator.draws_of_missing_inputs
    )
    return PreparedRows(estimator, preprocessing, training, preprocessing.inputs(table), y)


def fit_rows(prepared: PreparedRows, config: dict[str, Any]) -> None:
    """Fit the estimator to the training rows; inputs that are missing are drawn again as often as it asks for."""
    estimator, training, y = prepared.estimator, prepared.training, prepared.y
    weights = {} if training.weight is None else {"sample_weight": training.weight}
    try:
        estimator.fit(training.x, y[training.row], **weights)
        for number in range(estimator.refits_with_missing_inputs if prepared.inputs.missing else 0):
            training = redraw(estimator, training, prepared.inputs, y, config["seed"] + number)
            estimator.fit(training.x, y[training.row], **weights)
    except TypeError as error:
        if not config["params"]:
            raise
        raise InputError(
            f"{type(estimator).__name__} could not be fitted, perhaps because one of the parameters "
            f"{config['params']} has the wrong type: {error}."
        ) from error
    prepared.training = training


def _train_rows(
    table: Table,
    target: Column,
    config: dict[str, Any],
    watcher: Watcher,
    log: Callable[[str], None],
    references: bool,
    partitions: PartitionedTable | None = None,
) -> Run:
    """Fit and score an estimator whose rows are independent."""
    task = config["task"]
    classes, y = encode_target(target, task)
    train_rows, test_rows = split(table.rows, config, y if classes else None)
    y_train, y_test = y[train_rows], y[test_rows]
    prepared = prepare_rows(table.take(train_rows), y_train, config, classes)
    estimator, preprocessing, inputs = prepared.estimator, prepared.preprocessing, prepared.inputs
    columns = preprocessing.encoding.columns
    for column in columns:
        if column.get("note"):
            log(f"{column['name']!r}: {column['note']}")
    test_inputs = preprocessing.inputs(table.take(test_rows))
    remarks = _describe_missing(columns, inputs, test_inputs)
    for remark in remarks:
        log(remark)
    warnings = find_warnings(table, target.name, columns, y, classes, train_rows, test_rows)
    for warning in warnings:
        log(f"warning: {warning['finding']}")
    # The watcher runs the estimator's fits, and has to know whether their bounds can be shown as log evidences.
    estimator._watcher = watcher
    watcher.bound_is_evidence = estimator._bound_is_evidence
    if hasattr(estimator, "with_posterior"):
        watcher.heldout = lambda q: float(
            predict_held_out(estimator.with_posterior(q), test_inputs, y_test, task, classes).losses.mean()
        )
    if partitions is None:
        fit_rows(prepared, config)
    else:
        fit_partitions(prepared, partitions, config, classes, test_rows)
    predicted = predict_held_out(estimator, test_inputs, y_test, task, classes)
    baseline = predict_baseline(y_train, y_test, task, len(classes))
    run = Run(
        config={**config, "estimator": type(estimator).__name__},
        summary={
            "rows": table.rows if partitions is None else partitions.rows,
            "train_rows": len(train_rows) if partitions is None else partitions.rows - len(test_rows),
            "test_rows": len(test_rows),
            "columns": columns,
            "target": _summarize_target(target, y, classes),
            "features": preprocessing.encoding.features,
            "missing": remarks,
            "warnings": warnings,
        },
        estimator=estimator,
        encoding=preprocessing,
        metrics={
            "model": score_predictions(y_test, predicted),
            "baseline": score_predictions(y_test, baseline),
            "baseline_name": describe_baseline(task),
        },
        classes=classes,
        trace=watcher.trace(),
        fits=watcher.first_steps(),
        test={"row": test_rows, "y": y_test, **predicted.values},
    )
    add_explanations(run, watcher, prepared.training, inputs, y_train, train_rows)
    if references:
        for name, model, other in _predict_references(prepared, test_inputs, y_test, config, classes):
            differences = predicted.losses - other.losses
            error = float(np.std(differences, ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else None
            scored = {"name": name, "model": model, "metrics": score_predictions(y_test, other)}
            scored["difference"] = [float(differences.mean()), error]
            run.metrics.setdefault("references", []).append(scored)
    return run


def _predict_references(
    prepared: PreparedRows, test_inputs: Inputs, y_test: np.ndarray, config: dict[str, Any], classes: list[str]
) -> Iterator[tuple[str, str, Scored]]:
    """Stronger baselines on the same rows: a linear model where the fitted one is not, and boosted trees if quick.

    Yields the name of each, the value of `--model` that fits it (empty for trees), and its predictions.
    """
    task = config["task"]
    if config["model"] != "linear":
        kind = estimator_name(task, "linear")
        linear = replace(prepared, estimator=build_estimator(kind, None, {}, config["seed"]))
        fit_rows(linear, {**config, "params": {}})
        yield title(kind), "linear", predict_held_out(linear.estimator, test_inputs, y_test, task, classes)
    if are_trees_quick(prepared.matrix, len(classes)):
        arrays = prepared.matrix, prepared.y, test_inputs.encoded, y_test
        yield TREES, "", predict_trees(*arrays, task, len(classes), config["seed"])


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


def encode_target(target: Column, task: str) -> tuple[list[str], np.ndarray]:
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


def predict_held_out(estimator: Any, inputs: Inputs, y: np.ndarray, task: str, classes: list[str]) -> Scored:
    """The predictions of held-out rows by a fitted estimator, and the loss of each, −log p(y | x)."""
    if classes:
        probabilities = average.predict_classes(estimator, inputs)
        return Scored({"probabilities": probabilities}, score.class_losses(probabilities, y))
    predictions = average.predict_numbers(estimator, inputs, task)
    if task == "counts":
        return Scored(predictions, -average.log_predictive(estimator, inputs, y))
    freedom = score.degrees_of_freedom(estimator)
    return Scored(predictions, score.gaussian_losses(y, predictions["mean"], predictions["std"], freedom))
