"""Runs of sequences: fit the first part of a series, forecast the last part, and score the forecast."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import metrics
from ..estimators.registry import build_estimator, estimator_name
from ..tables.tables import Column, InputError, Table
from ..tables.time_order import order_by_time
from . import score
from .explain import record_facts
from .run import Run
from .watch import Watcher

_FEWEST_STEPS = 4


def train_sequence(table: Table, target: Column, config: dict[str, Any], watcher: Watcher) -> Run:
    """Fit a sequence model to the target in the order of time; the last steps are held out."""
    order, times = order_by_time(table, config.get("time"))
    y = np.asarray(target.numbers, float)[order]
    test_count = round(len(y) * float(config["test_size"]))
    if not 1 <= test_count <= len(y) - _FEWEST_STEPS:
        raise InputError(
            f"--test-size {config['test_size']} leaves {len(y) - test_count:,} steps to train on and {test_count:,} to "
            f"test: at least {_FEWEST_STEPS} and 1 are needed."
        )
    y_train, y_test = y[:-test_count], y[-test_count:]
    observed = ~np.isnan(y_test)
    if not observed.any():
        raise InputError(
            f"The last {test_count:,} steps, which are held out to score the forecast, have no values: hold out more "
            "steps with --test-size, or remove them."
        )
    name = estimator_name("sequence", config["model"])
    estimator = build_estimator(name, config["recipe"], config["params"], config["seed"])
    estimator._watcher = watcher
    estimator.fit(y_train)
    mean, std = (part[:, 0] for part in estimator.predict(y_train, steps=test_count, return_std=True))
    low, high = metrics.interval(mean, std)
    smoothed_mean, smoothed_std = (part[:, 0] for part in estimator.smooth_observations(y_train))
    run = Run(
        config={**config, "estimator": name},
        summary={
            "rows": len(y),
            "train_rows": len(y_train),
            "test_rows": test_count,
            "columns": [
                {
                    "name": name,
                    "kind": column.kind,
                    "missing": int(column.missing.sum()),
                    "used": name == config.get("time"),
                    "guess": column.guess,
                    "note": "the times" if name == config.get("time") else "the model sees the target's past alone",
                }
                for name, column in table.columns.items()
                if name != target.name
            ],
            "target": {
                "name": target.name,
                "kind": "number",
                "missing": int(np.isnan(y).sum()),
                "used": True,
                "mean": float(np.nanmean(y)),
                "std": float(np.nanstd(y)),
                "min": float(np.nanmin(y)),
                "max": float(np.nanmax(y)),
            },
            "features": [],
        },
        estimator=estimator,
        encoding=None,
        metrics={
            "model": score.score_gaussian(y_test[observed], mean[observed], std[observed]),
            "baseline": _score_random_walk(y_train, y_test, observed),
            "baseline_name": "a random walk from the last value",
        },
        trace=watcher.trace(),
        fits=watcher.first_steps(),
        test={
            "row": order[-test_count:],
            "time": times[-test_count:],
            "y": y_test,
            "mean": mean,
            "std": std,
            "low": low,
            "high": high,
        },
        history={"time": times[:-test_count], "y": y_train, "mean": smoothed_mean, "std": smoothed_std},
    )
    record_facts(run, watcher)
    if "bound" in run.trace and "bound" in run.facts:
        # The fits see standardised series. Shift their bounds so that the last one is the estimator's, in y's units.
        run.trace["bound"] = run.trace["bound"] + (run.facts["bound"] - run.trace["bound"][-1])
    return run


def _score_random_walk(y_train: np.ndarray, y_test: np.ndarray, observed: np.ndarray) -> dict[str, float]:
    """The baseline: a Gaussian random walk from the last observed value, with the training increments' deviation."""
    known = y_train[~np.isnan(y_train)]
    increments = np.diff(known)
    step_std = float(np.std(increments)) if len(increments) > 1 else float(np.std(known))
    std = max(step_std, 1e-12) * np.sqrt(np.arange(1, len(y_test) + 1))
    return score.score_gaussian(y_test[observed], known[-1], std[observed])
