"""What a fitted estimator can say of itself: its algorithm, its weights, and the rows that moved it most."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..models import regression
from . import influence
from .run import Run
from .watch import Watcher

_ROWS = 20_000  # whose influence is looked at, at the most
_WEIGHTS = 4_000  # of a layer, likewise
_KINDS = {"RidgeRegression": "normal", "LogisticRegression": "logistic", "PoissonRegression": "poisson"}


def explained(run: Run, watcher: Watcher, x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> None:
    """Fill in the run's derivation, facts, weights and influence, as far as the estimator has them."""
    estimator = run.estimator
    facts(run, watcher)
    if hasattr(estimator, "coef_") and isinstance(estimator.posterior_, Gaussian | DiagonalGaussian):
        run.weights = _coefficients(estimator, run.summary["features"], run.classes)
    elif hasattr(estimator.posterior_, "mean") and isinstance(getattr(estimator.posterior_, "mean", None), dict):
        run.weights = _layers(estimator.posterior_)
    kind = _KINDS.get(type(estimator).__name__)
    if kind is not None and isinstance(estimator.posterior_, Gaussian) and estimator.coef_.ndim == 1:
        run.influence = _influence(estimator, kind, x, y, rows)


def facts(run: Run, watcher: Watcher) -> None:
    """The algorithm as it prints itself, and the numbers of the fit."""
    estimator = run.estimator
    run.derivation = str(watcher.rules[-1]) if watcher.rules else ""
    for name in ("bound_", "log_evidence_", "prior_precision_", "noise_"):
        value = getattr(estimator, name, None)
        if isinstance(value, float | int | np.floating):
            run.facts[name.rstrip("_")] = float(value)
    run.facts["steps"] = int(sum(len(trace["objective"]) for trace in watcher.traces))
    if watcher.reasons:
        run.facts["reason"] = watcher.reasons[-1]


def _coefficients(estimator: Any, features: list[str], classes: list[str]) -> dict[str, Any]:
    mean, spread = (
        jax.tree.map(np.asarray, part) for part in (estimator.posterior_.mean, _variance(estimator.posterior_))
    )
    names, w = list(features), np.asarray(mean["w"])
    if w.ndim == 1:
        return {"name": names, "mean": w, "std": np.sqrt(spread["w"])}
    columns = regression.contrasts(w.shape[1] + 1)
    mean, variance = w @ columns.T, _class_variances(estimator.posterior_, columns)
    every = [f"{name} → {label}" for name in names for label in classes]
    return {"name": every, "mean": mean.ravel(), "std": np.sqrt(variance).ravel()}


def _variance(q: Any) -> Any:
    with jax.enable_x64(True):
        return q.variance()


def _class_variances(q: Any, columns: np.ndarray) -> np.ndarray:
    """The variance of every feature's weight for every class, whose scores are contrasts of fewer numbers."""
    features, outputs = q.mean["w"].shape
    if isinstance(q, DiagonalGaussian):
        return (1 / np.asarray(q.precision["w"])) @ (columns**2).T
    with jax.enable_x64(True):
        covariance = np.asarray(q.covariance())
    first = len(covariance) - features * outputs
    blocks = covariance[first:, first:].reshape(features, outputs, features, outputs)
    own = np.einsum("ikil->ikl", blocks)
    return np.einsum("ck,ikl,cl->ic", columns, own, columns)


def _layers(q: Any) -> dict[str, Any]:
    """A sample of every layer's weights: their means and deviations."""
    spread = _variance(q) if hasattr(q, "variance") else None
    found: dict[str, list[Any]] = {"layer": [], "mean": [], "std": []}
    rng = np.random.default_rng(0)
    for place, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(q.mean)):
        values = np.asarray(leaf).ravel()
        if np.ndim(leaf) < 2 or spread is None:
            continue
        deviations = np.sqrt(np.asarray(jax.tree.leaves(spread)[place]).ravel())
        some = rng.permutation(len(values))[:_WEIGHTS]
        found["layer"] += [jax.tree_util.keystr(path).strip("[]'").replace("']['", ".")] * len(some)
        found["mean"].append(values[some])
        found["std"].append(deviations[some])
    if not found["mean"]:
        return {}
    return {"layer": found["layer"], "mean": np.concatenate(found["mean"]), "std": np.concatenate(found["std"])}


def _influence(estimator: Any, kind: str, x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    some = np.arange(len(x))
    if len(x) > _ROWS:
        some = np.sort(np.random.default_rng(0).permutation(len(x))[:_ROWS])
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that hold the posterior up alone come out as NaN, and last
        noise = getattr(estimator, "noise_", None)
        x_mean, y_mean = getattr(estimator, "x_mean_", 0.0), getattr(estimator, "y_mean_", 0.0)
        found = influence.left_out(kind, estimator.posterior_, x[some] - x_mean, y[some] - float(y_mean), noise)
    mean = estimator.predict_proba(x[some])[:, 1] if kind == "logistic" else estimator.predict(x[some])
    return {"row": rows[some], "influence": found[0], "log_density": found[1], "y": y[some], "mean": mean}
