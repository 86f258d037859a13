"""Sequences: learn from the first part, forecast the last one, and be judged by it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import metrics
from ..estimators.registry import build, estimator_name
from ..tables.tables import Column, InputError, Table
from ..tables.time_order import in_order
from . import score as judging
from .explain import facts
from .run import Run
from .watch import Watcher


def learnt(table: Table, target: Column, config: dict[str, Any], watcher: Watcher) -> Run:
    """A model of the target's series; the steps that are held out are the last ones."""
    order, times = in_order(table, config.get("time"))
    y = np.asarray(target.numbers, float)[order]
    held = round(len(y) * float(config["test_size"]))
    if not 1 <= held <= len(y) - 4:
        raise InputError(f"--test-size {config['test_size']} leaves {len(y) - held:,} steps to learn from.")
    seen, ahead = y[:-held], y[-held:]
    if np.isnan(ahead).all():
        raise InputError(f"The last {held:,} steps have no values, and a forecast is judged by them: use --test-size.")
    name = estimator_name("sequence", config["model"])
    estimator = build(name, config["recipe"], config["params"], config["seed"])
    estimator._watcher = watcher
    estimator.fit(seen)
    mean, std = (part[:, 0] for part in estimator.predict(seen, steps=held, return_std=True))
    there = ~np.isnan(ahead)
    low, high = metrics.interval(mean, std)
    fitted, spread = _fitted(estimator, seen)
    run = Run(
        config={**config, "estimator": name},
        summary={
            "rows": len(y),
            "train_rows": len(seen),
            "test_rows": held,
            "columns": [],
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
            "model": judging.normal(ahead[there], mean[there], std[there]),
            "baseline": _walk(seen, ahead, there),
            "baseline_name": "a random walk from the last value",
        },
        trace=watcher.trace(),
        fits=watcher.starts(),
        test={
            "row": order[-held:],
            "time": times[-held:],
            "y": ahead,
            "mean": mean,
            "std": std,
            "low": low,
            "high": high,
        },
        history={"time": times[:-held], "y": seen, "mean": fitted, "std": spread},
    )
    facts(run, watcher)
    if "bound" in run.trace and "bound" in run.facts:  # the estimator's is in the units of y, its fits' are not
        run.trace["bound"] = run.trace["bound"] + (run.facts["bound"] - run.trace["bound"][-1])
    return run


def _fitted(estimator: Any, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every step's mean and deviation, given all of them."""
    if hasattr(estimator, "loadings_"):
        states, covariances = estimator.smooth(y, return_cov=True)
        mean = estimator.mean_[0] + states @ estimator.loadings_[0]
        variance = np.einsum("d,tde,e->t", estimator.loadings_[0], covariances, estimator.loadings_[0])
        return mean, np.sqrt(variance + estimator.noise_variance_[0])
    shares = estimator.smooth(y)
    means = estimator.means_[:, 0]
    variances = np.asarray(estimator.covariances_).reshape(len(means), -1)[:, 0]
    mean = shares @ means
    return mean, np.sqrt(shares @ (variances + means**2) - mean**2)


def _walk(seen: np.ndarray, ahead: np.ndarray, there: np.ndarray) -> dict[str, float]:
    known = seen[~np.isnan(seen)]
    steps = np.diff(known)
    each = float(np.std(steps)) if len(steps) > 1 else float(np.std(known))
    std = max(each, 1e-12) * np.sqrt(np.arange(1, len(ahead) + 1))
    return judging.normal(ahead[there], known[-1], std[there])
