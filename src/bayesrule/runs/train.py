"""From a table to a run: what is asked for is settled, rows are held out, the estimator learns, and is judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..estimators.registry import build, default_model, estimator_name
from ..tables import tasks
from ..tables.tables import Column, InputError, Table, number_label
from ..tables.time_order import in_order, said_of
from . import score as judging
from .explain import explained
from .preprocess import Preparation
from .run import Run
from .versions import versions
from .watch import Look, Watcher

_LEAST = 10  # rows


def train(
    table: Table,
    config: dict[str, Any],
    *,
    folder: Path | None = None,
    show: Callable[[Look], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Run:
    """Learn what `config` asks for; `folder` keeps what is needed to go on after a crash."""
    began = time.perf_counter()
    whole = table
    table, target, config, guesses = settled(table, config)
    for guess in guesses:
        say(guess)
    if config["task"] == "sequence":
        from .train_sequence import learnt

        run = learnt(table, target, config, Watcher(folder, show))
    else:
        run = _learnt(table, target, config, Watcher(folder, show), say)
        origin = np.flatnonzero(~whole.columns[target.name].missing)  # where in the file each row is
        for part in (run.test, run.influence):
            if "row" in part:
                part["row"] = origin[part["row"]]
    run.summary["guesses"] = guesses
    run.summary["source"] = table.source
    run.versions = versions()
    run.seconds["fit"] = round(time.perf_counter() - began, 2)
    return run


def settled(table: Table, config: dict[str, Any]) -> tuple[Table, Column, dict[str, Any], list[str]]:
    """The rows that count, the target, and the configuration with everything that was left open filled in."""
    config, guesses = dict(config), []
    name = config.get("target")
    if name is None:
        name = list(table.columns)[-1]
        guesses.append(f"the target is the last column, {name!r} (--target chooses another)")
    target = table.column(name)
    known = int((~target.missing).sum())
    if known < _LEAST:
        raise InputError(f"{table.source} has {_rows(known)} with a value of {name!r}: at least {_LEAST} are needed.")
    tasks.readable(target)
    if config.get("time") is not None:
        table.column(config["time"])
        config["task"] = config.get("task") or "sequence"
    asked = config.get("task") is not None
    if not asked:
        config["task"], reason = tasks.guessed(target)
        guesses.append(f"{reason} (--task chooses another)")
    if config["task"] not in tasks.TASKS:
        raise InputError(f"There is no task {config['task']!r}: there are {', '.join(tasks.TASKS)}.")
    tasks.checked(config["task"], target, asked=asked)
    if config["task"] == "sequence" and config.get("time") is None:
        guesses.append("the rows are in the order of time (--time names a column of times)")
    if config["task"] == "sequence":
        guesses += said_of(in_order(table, config.get("time"))[1])
        others = len(table.columns) - 1 - (config.get("time") is not None)
        if others:
            guesses.append(f"the other columns ({others}) are not used")
    empty = int(target.missing.sum())
    if empty and config["task"] != "sequence":
        guesses.append(f"{empty:,} rows without a value of {name!r} are left out")
        table = table.taken(~target.missing)
        target = table.column(name)
    config |= {"target": name, "model": config.get("model") or default_model(config["task"])}
    config.setdefault("recipe", None)
    config.setdefault("params", {})
    config.setdefault("seed", 0)
    config.setdefault("test_size", 0.2)
    estimator_name(config["task"], config["model"])
    return table, target, config, guesses


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def split(rows: int, config: dict[str, Any], labels: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The training rows and the held-out ones, by the seed; of each class its share."""
    held = round(rows * float(config["test_size"]))
    if not 1 <= held <= rows - 2:
        raise InputError(
            f"--test-size {config['test_size']} leaves {rows - held:,} rows to train on and {held:,} to test."
        )
    order = np.random.default_rng(config["seed"]).permutation(rows)
    if labels is not None:
        # Class by class, each spread evenly over the whole order, whose first part is then the test set.
        _, codes, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
        within = np.zeros(rows)
        for code, count in enumerate(counts):
            within[codes == code] = (np.arange(count) + 0.5) / count
        order = order[np.argsort(within, kind="stable")]
        # A class that only the held-out rows have could not be learnt: one of them goes back.
        lost = [order[:held][labels[order[:held]] == label][:1] for label in np.setdiff1d(labels, labels[order[held:]])]
        if lost:
            back = np.isin(order[:held], np.concatenate(lost))
            order = np.concatenate([order[:held][~back], order[:held][back], order[held:]])
            held -= int(back.sum())
    return np.sort(order[held:]), np.sort(order[:held])


def _learnt(table: Table, target: Column, config: dict[str, Any], watcher: Watcher, say: Callable[[str], None]) -> Run:
    classes, y = _answers(target, config["task"])
    train_rows, test_rows = split(table.rows, config, y if classes else None)
    names = [name for name in table.columns if name != target.name]
    training, testing = table.taken(train_rows), table.taken(test_rows)
    prepared, x = Preparation.learnt(training, names, config["seed"])
    for column in prepared.encoding.columns:
        if column.get("note"):
            say(f"{column['name']!r}: {column['note']}")
    gaps = int(sum(column["missing"] for column in prepared.encoding.columns if column["used"]))
    if gaps:
        say(f"{gaps:,} missing values are filled from the other columns")
    held, truth = prepared.matrix(testing), y[test_rows]
    name = estimator_name(config["task"], config["model"])
    estimator = build(name, config["recipe"], config["params"], config["seed"])
    estimator._watcher, watcher.bounded = watcher, estimator._bounded
    if hasattr(estimator, "seen"):
        watcher.heldout = lambda q: _judged(estimator.seen(q), held, truth, config["task"], classes)[0]["nll"]
    try:
        estimator.fit(x, y[train_rows])
    except TypeError as error:
        if not config["params"]:
            raise
        raise InputError(f"A setting among {config['params']} is of the wrong type: {error}.") from error
    ours, test = _judged(estimator, held, truth, config["task"], classes)
    theirs, baseline = _baseline(y[train_rows], truth, config["task"], classes)
    run = Run(
        config={**config, "estimator": name},
        summary={
            "rows": table.rows,
            "train_rows": len(train_rows),
            "test_rows": len(test_rows),
            "columns": prepared.encoding.columns,
            "target": _target_summary(target, y, classes),
            "features": prepared.encoding.features,
        },
        estimator=estimator,
        encoding=prepared,
        metrics={"model": ours, "baseline": theirs, "baseline_name": baseline},
        classes=classes,
        trace=watcher.trace(),
        fits=watcher.starts(),
        test={"row": test_rows, "y": truth, **test},
    )
    explained(run, watcher, x, y[train_rows], train_rows)
    return run


def _answers(target: Column, task: str) -> tuple[list[str], np.ndarray]:
    """The classes' names (none, where numbers are predicted) and the target as numbers."""
    if task not in ("binary", "classes"):
        return [], np.asarray(target.numbers, float)
    if target.codes is not None:
        found, y = np.unique(target.codes, return_inverse=True)
        return [target.levels[code] for code in found], y
    found, y = np.unique(np.asarray(target.numbers), return_inverse=True)
    return [number_label(value) for value in found], y


def _target_summary(target: Column, y: np.ndarray, classes: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = {"name": target.name, "missing": 0, "used": True}
    if classes:
        counts = np.bincount(y, minlength=len(classes))
        order = np.argsort(-counts, kind="stable")
        return said | {
            "kind": "category",
            "levels": classes,
            "top": [[classes[place], int(counts[place])] for place in order[:12]],
        }
    return said | {
        "kind": "number",
        "mean": float(y.mean()),
        "std": float(y.std()),
        "min": float(y.min()),
        "max": float(y.max()),
    }


def _judged(
    estimator: Any, x: np.ndarray, y: np.ndarray, task: str, classes: list[str]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics on held-out rows, and what was predicted for each."""
    if classes:
        probabilities = estimator.predict_proba(x)
        return judging.classified(probabilities, y), {"probabilities": probabilities}
    found = judging.numbers(estimator, x, task)
    if task == "counts":
        nll = -float(np.mean(estimator.log_predictive(x, y)))
        return judging.measured(y, found["mean"], found["low"], found["high"], nll), found
    return judging.normal(y, found["mean"], found["std"]), found


def _baseline(seen: np.ndarray, y: np.ndarray, task: str, classes: list[str]) -> tuple[dict[str, float], str]:
    if classes:
        guess = judging.class_baseline(seen, len(classes), len(y))
        return judging.classified(guess, y), "the classes' frequencies in training"
    if task == "counts":
        return judging.counts_baseline(y, float(seen.mean())), "a Poisson distribution with the training mean"
    return judging.normal(y, seen.mean(), seen.std()), "a Gaussian with the training mean and deviation"
