"""Runs without a target: groups (a mixture of Gaussians), topics of counts or of text, and factors.

A part of the rows is held out here, too, and scored by how probable it is under the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..estimators.registry import (
    TASKS_WITHOUT_TARGET,
    build_estimator,
    default_model,
    estimator_name,
    task_without_target,
)
from ..tables.encoding import Encoding
from ..tables.tables import Column, InputError, Table
from . import structure
from .choose_size import Choice, choose_factors, choose_groups, choose_topics
from .explain import record_facts
from .preprocess import Preprocessing
from .run import Run
from .watch import Watcher
from .word_counts import count_words, fit_vocabulary, text_column

_FEWEST_ROWS = 10
_NOUNS = {"clusters": "groups", "topics": "topics", "factors": "factors"}
_FITTED = {
    "clusters": "a mixture of Gaussians has numbers only",
    "factors": "factor analysis has numbers only",
    "topics": "topics are made of counts (whole numbers from 0 on) or of one column of text",
}


def is_without_target(config: dict[str, Any]) -> bool:
    """Whether these settings ask for a model that predicts no column."""
    return config.get("task") in TASKS_WITHOUT_TARGET or task_without_target(config.get("model")) is not None


def resolve_structure_config(table: Table, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check the settings of a run without a target, and fill in those that are missing; also returns notes."""
    config, notes = dict(config), []
    task = config.get("task") or task_without_target(config.get("model"))
    config |= {"task": task, "model": config.get("model") or default_model(str(task))}
    estimator_name(str(task), config["model"])  # Raises if the model cannot do the task.
    if config.get("time") is not None:
        raise InputError(
            f"--time is for sequences, and --model {config['model']} takes rows in any order: leave it out."
        )
    if config.get("cv") is not None:
        raise InputError(
            f"--cv compares predictions of a column, and --model {config['model']} predicts none: leave it out."
        )
    if config.get("target") is not None:
        table.column(config["target"])
        notes.append(
            f"{config['target']!r} is not shown to the model; the report compares the {_NOUNS[str(task)]} with it"
        )
    if table.rows < _FEWEST_ROWS:
        raise InputError(f"{table.source} has {table.rows} rows: at least {_FEWEST_ROWS} are needed.")
    for setting, default in {"recipe": None, "params": {}, "seed": 0, "test_size": 0.2, "target": None}.items():
        config.setdefault(setting, default)
    if config["recipe"] is None and "method" not in config["params"]:
        config["recipe"] = "vmp"  # A posterior, where the estimators' own default may be maximum likelihood.
    return config, notes


def train_structure(
    table: Table, config: dict[str, Any], watcher: Watcher, log: Callable[[str], None], split: Callable[..., Any]
) -> Run:
    """Fit a model that predicts no column, and score it on held-out rows.

    Args:
        table: the data.
        config: complete settings, as `resolve_structure_config` makes them.
        watcher: runs the fits.
        log: called with messages for the user.
        split: the function that holds rows out (`train.split`).
    """
    task = config["task"]
    train_rows, test_rows = split(table.rows, config)
    prepared = _prepare_counts(table, train_rows, config) if task == "topics" else _prepare(table, train_rows, config)
    encoding, columns, x, x_train, vocabulary = prepared
    for column in columns:
        if column.get("note"):
            log(f"{column['name']!r}: {column['note']}")
    params = dict(config["params"])
    choice = None
    if params.get("n_components") is None:
        choice = _choose(task, x_train, config["seed"], params)
        params |= choice.params
        log(
            f"{params['n_components']} {_NOUNS[task]}, by the least {choice.name} (-p n_components=… chooses another "
            "number)"
        )
    name = estimator_name(task, config["model"])
    estimator = build_estimator(name, config["recipe"], params, config["seed"])
    estimator._watcher = watcher
    watcher.bound_is_evidence = estimator._bound_is_evidence
    estimator.fit(x_train)
    described = structure.describe(task, estimator, x, encoding)
    described |= (
        {"sizes": [], "criterion": []}
        if choice is None
        else {"sizes": np.array(choice.sizes), "criterion": np.array(choice.criterion)}
    )
    if vocabulary:
        described["vocabulary"] = vocabulary
    target = None if config["target"] is None else table.columns[config["target"]]
    if target is not None:
        described["compared"] = structure.compare(target, described["rows"])
    model, baseline, baseline_name = structure.score(task, estimator, x_train, x[test_rows])
    run = Run(
        config={**config, "params": params, "estimator": name, "text": columns[0]["name"] if vocabulary else None},
        summary={
            "rows": table.rows,
            "train_rows": len(train_rows),
            "test_rows": len(test_rows),
            "columns": columns,
            "features": vocabulary or ([] if encoding is None else encoding.encoding.features),
            "criterion": "" if choice is None else choice.name,
        },
        estimator=estimator,
        encoding=encoding,
        metrics={"model": model, "baseline": baseline, "baseline_name": baseline_name},
        trace=watcher.trace(),
        fits=watcher.first_steps(),
        test={"row": test_rows},
        structure=described,
    )
    record_facts(run, watcher)
    return run


def _prepare(table: Table, train_rows: np.ndarray, config: dict[str, Any]) -> tuple[Any, ...]:
    """The columns of numbers, standardised; missing ones are NaN for factors, and drawn once for a mixture."""
    task, train = config["task"], table.take(train_rows)
    names = [name for name, column in table.columns.items() if column.codes is None and name != config["target"]]
    if not names:
        raise InputError(f"{table.source} has no column of numbers, and {_FITTED[task]}.")
    encoding, training = Preprocessing.fit(train, names, np.zeros((train.rows, 0)), config["seed"])
    if task == "factors" and len(encoding.encoding.features) < 2:
        raise InputError(f"{table.source} has one column of numbers that vary, and factors need at least two.")
    inputs = encoding.inputs(table)
    x = inputs.encoded if task == "factors" else inputs.filled
    x_train = x[train_rows] if task == "factors" else training.x
    columns = [*encoding.encoding.columns, *_left_out(table, [*names, config["target"]], _FITTED[task])]
    return encoding, columns, x, x_train, []


def _prepare_counts(table: Table, train_rows: np.ndarray, config: dict[str, Any]) -> tuple[Any, ...]:
    """Counts as they are, missing ones as 0; or the counts of the words of a column of text."""
    names = [
        name
        for name, column in table.columns.items()
        if name != config["target"] and column.codes is None and _are_counts(np.asarray(column.numbers))
    ]
    text = text_column(table, config["target"]) if len(names) < 3 else None
    if text is not None:
        vocabulary = fit_vocabulary(text.take(train_rows))
        x = count_words(text, vocabulary)
        described = {"name": text.name, "kind": "text", "missing": int(text.missing.sum()), "used": True}
        described["note"] = f"its {len(vocabulary):,} most frequent words are counted"
        columns = [described, *_left_out(table, [text.name, config["target"]], "topics are made of the text")]
        return None, columns, x, x[train_rows], vocabulary
    if len(names) < 2:
        raise InputError(f"{table.source} has nothing to count: {_FITTED['topics']}.")
    columns = Encoding.fit(table.take(train_rows), names).columns
    used = [column for column in columns if column["used"]]
    # The encoding standardises numbers; with mean 0 and deviation 1 they stay counts.
    raw = Encoding([{**column, "mean": 0.0, "std": 1.0} for column in used], [column["name"] for column in used])
    encoding = Preprocessing.without_dependence(raw)
    x = np.nan_to_num(raw.matrix(table))
    columns = [*columns, *_left_out(table, [*names, config["target"]], _FITTED["topics"])]
    return encoding, columns, x, x[train_rows], []


def _are_counts(numbers: np.ndarray) -> bool:
    present = numbers[~np.isnan(numbers)]
    return bool(len(present) and np.all(present >= 0) and np.all(np.mod(present, 1) == 0) and present.max() > 0)


def _left_out(table: Table, used: list[str], reason: str) -> list[dict[str, Any]]:
    def describe(column: Column) -> dict[str, Any]:
        note = f"is left out: {reason}"
        return {
            "name": column.name,
            "kind": column.kind,
            "missing": int(column.missing.sum()),
            "used": False,
            "note": note,
        }

    return [describe(column) for name, column in table.columns.items() if name not in used]


def _choose(task: str, x_train: np.ndarray, seed: int, params: dict[str, Any]) -> Choice:
    if task == "clusters":
        return choose_groups(x_train, seed, params)
    if task == "factors":
        return choose_factors(np.nan_to_num(x_train), seed)  # The mean of a standardised column is 0.
    return choose_topics(x_train, seed)
