"""Explanations of a fitted estimator: its algorithm, its weights, and how much each training row moved it.

Which of them an estimator offers is declared by its class, in `Estimator.explain`.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.block_diagonal import BlockDiagonalGaussian
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..models import regression
from . import influence
from .average import log_mean_exp
from .preprocess import Inputs, TrainingRows
from .run import Run
from .watch import Watcher

_MOST_ROWS = 20_000  # Beyond these, the influence is computed for a random subset of the rows.
_MOST_WEIGHTS = 4_000  # Beyond these, a layer is described by a random subset of its weights.


def add_explanations(
    run: Run, watcher: Watcher, training: TrainingRows, inputs: Inputs, y: np.ndarray, rows: np.ndarray
) -> None:
    """Fill in `derivation`, `facts`, `weights` and `influence` of a run, as far as its estimator offers them.

    Args:
        run: the run, with its fitted estimator.
        watcher: what watched its fits.
        training: what its estimator was fitted to.
        inputs: the inputs of the training rows.
        y: their targets.
        rows: their places in the table.
    """
    estimator = run.estimator
    record_facts(run, watcher)
    posterior = estimator.posterior_
    if estimator.explain.weights == "coefficients" and isinstance(
        posterior, Gaussian | DiagonalGaussian | BlockDiagonalGaussian
    ):
        modelled = getattr(estimator, "modelled_classes_", range(len(run.classes)))
        run.weights = _coefficients(posterior, run.summary["features"], [run.classes[index] for index in modelled])
    elif estimator.explain.weights == "layers":
        run.weights = _layers(posterior)
    # Rows have sites in a full Gaussian over one output; another recipe's q, or several classes, have none.
    if estimator.explain.influence is not None and isinstance(posterior, Gaussian) and posterior.mean["w"].ndim == 1:
        run.influence = _influence(estimator, estimator.explain.influence, training, inputs, y, rows)


def record_facts(run: Run, watcher: Watcher) -> None:
    """Fill in `derivation`, the printed algorithm, and `facts`, the numbers of the fit."""
    run.derivation = str(watcher.rules[-1]) if watcher.rules else ""
    for name in ("bound_", "log_evidence_", "prior_precision_", "noise_", "degrees_of_freedom_"):
        value = getattr(run.estimator, name, None)
        if isinstance(value, float | int | np.floating) and not np.isposinf(value):
            run.facts[name.rstrip("_")] = float(value)
        if name == "bound_" and "bound" in run.facts:
            error = getattr(run.estimator, "bound_error_", None)  # None: an expansion at the mean has no error.
            run.facts["bound_error"] = None if error is None else float(error)
            run.facts["bound_normalized"] = bool(getattr(run.estimator, "bound_normalized_", True))
    run.facts["steps"] = int(sum(len(trace["objective"]) for trace in watcher.traces))
    if watcher.last is not None:
        # A conjugate model takes one step, which is not cut short by the number of steps: its evidence is exact.
        exact = hasattr(run.estimator, "log_evidence_") and len(watcher.traces[-1]["objective"]) == 1
        run.facts["reason"] = "exact" if exact else watcher.last.reason.value


def _coefficients(
    q: Gaussian | DiagonalGaussian | BlockDiagonalGaussian, features: list[str], classes: list[str]
) -> dict[str, Any]:
    """The mean and standard deviation of every feature's weight, for several classes one for each of them."""
    mean: Any = jax.tree.map(np.asarray, q.mean)
    weights = np.asarray(mean["w"])
    if weights.ndim == 1:
        return {"name": list(features), "mean": weights, "std": np.sqrt(np.asarray(_variance(q)["w"]))}
    # The outputs are contrasts of the classes' scores, or these scores themselves.
    has_scores = weights.shape[1] == len(classes)
    contrasts = np.eye(len(classes)) if has_scores else regression.contrasts(weights.shape[1] + 1)
    names = [f"{feature} → {label}" for feature in features for label in classes]
    std = np.sqrt(_class_variances(q, contrasts))
    return {"name": names, "mean": (weights @ contrasts.T).ravel(), "std": std.ravel()}


def _variance(q: GaussianFamily) -> Any:
    with jax.enable_x64(True):
        return q.variance()


def _class_variances(q: GaussianFamily, contrasts: np.ndarray) -> np.ndarray:
    """Var of every feature's weight for every class, (features, classes).

    The class scores are contrasts of K − 1 outputs, w_c = Σ_k C_ck w_k, so Var w_c = Σ_kl C_ck C_cl Cov(w_k, w_l).
    """
    features, outputs = q.mean["w"].shape
    if isinstance(q, BlockDiagonalGaussian):
        return np.asarray(_variance(q)["w"]) @ (contrasts**2).T
    if isinstance(q, DiagonalGaussian):
        return (1 / np.asarray(q.precision["w"])) @ (contrasts**2).T
    if isinstance(q, LowRankGaussian):
        return _low_rank_class_variances(q, contrasts)
    with jax.enable_x64(True):
        covariance = np.asarray(q.covariance())
    first = len(covariance) - features * outputs  # Intercepts come before the weights.
    by_feature = covariance[first:, first:].reshape(features, outputs, features, outputs)
    output_covariances = np.einsum("ikil->ikl", by_feature)
    return np.einsum("ck,ikl,cl->ic", contrasts, output_covariances, contrasts)


def _low_rank_class_variances(q: LowRankGaussian, contrasts: np.ndarray) -> np.ndarray:
    """The same from S⁻¹ = D⁻¹ − WᵀW, without a matrix over all weights: the contrasts of D⁻¹ and of W one by one."""
    features, outputs = q.mean["w"].shape
    with jax.enable_x64(True):
        root = np.asarray(q._woodbury_root())
    first = root.shape[1] - features * outputs
    own = 1 / np.asarray(q.diagonal)[first:].reshape(features, outputs)
    along = np.einsum("rik,ck->ric", root[:, first:].reshape(-1, features, outputs), contrasts)
    return own @ (contrasts**2).T - np.sum(along**2, axis=0)


def _layers(q: Any) -> dict[str, Any]:
    """The means and standard deviations of the weights of every layer, or of a random subset of them."""
    if not hasattr(q, "variance") or not isinstance(getattr(q, "mean", None), dict):
        return {}
    variances = jax.tree.leaves(_variance(q))
    layers: list[str] = []
    means, deviations = [], []
    rng = np.random.default_rng(0)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(q.mean)):
        if np.ndim(leaf) < 2:
            continue
        values = np.asarray(leaf).ravel()
        subset = rng.permutation(len(values))[:_MOST_WEIGHTS]
        layers += [jax.tree_util.keystr(path).strip("[]'").replace("']['", ".")] * len(subset)
        means.append(values[subset])
        deviations.append(np.sqrt(np.asarray(variances[index]).ravel())[subset])
    if not means:
        return {}
    return {"layer": layers, "mean": np.concatenate(means), "std": np.concatenate(deviations)}


def _influence(
    estimator: Any, likelihood: Any, training: TrainingRows, inputs: Inputs, y: np.ndarray, rows: np.ndarray
) -> dict[str, Any]:
    """Each training row's influence on the posterior, and its density and prediction when it is left out.

    Where inputs are missing, the influence is the mean over the draws that were fitted. These were drawn given the
    target, so that the density and the prediction are averages over other draws, which do not know it.
    """
    size = len(y)
    subset = np.arange(size)
    if size > _MOST_ROWS:
        subset = np.sort(np.random.default_rng(0).permutation(size)[:_MOST_ROWS])
    noise = getattr(estimator, "noise_", None)
    x_mean, y_mean = getattr(estimator, "x_mean_", 0.0), float(getattr(estimator, "y_mean_", 0.0))

    def leave_out(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        with jax.enable_x64(True), warnings.catch_warnings():
            # A row without which the posterior is improper comes out as NaN, with a warning, and is sorted last.
            warnings.simplefilter("ignore")
            nats, log_density, mean = influence.leave_rows_out(
                likelihood, estimator.posterior_, x - x_mean, y - y_mean, noise
            )
        return nats, log_density, mean + y_mean

    nats, log_density, mean = (np.full(size, np.nan) for _ in range(3))
    nats[subset], log_density[subset], mean[subset] = leave_out(inputs.filled[subset], y[subset])
    for part, draws in inputs.draws(subset):
        copies = np.isin(training.row, part)
        of_copies, row = leave_out(training.x[copies], y[training.row[copies]])[0], training.row[copies]
        nats[part] = (np.bincount(row, of_copies, size) / np.maximum(np.bincount(row, minlength=size), 1))[part]
        shape = draws.shape[:2]
        _, density_by_draw, mean_by_draw = leave_out(draws.reshape(-1, draws.shape[2]), np.repeat(y[part], shape[1]))
        log_density[part] = log_mean_exp(density_by_draw.reshape(shape))
        mean[part] = mean_by_draw.reshape(shape).mean(axis=1)
    results = {"influence": nats, "log_density": log_density, "y": y, "mean": mean}
    if likelihood == "normal" and noise is not None:
        # Without the row, whose share h of its own prediction is v/σ², the variance of a new y is σ²/(1 − h).
        std = np.full(size, np.nan)
        complete = np.setdiff1d(subset, inputs.incomplete)
        _, with_row = estimator.predict(inputs.filled[complete], return_std=True)
        std[complete] = np.sqrt(noise / np.maximum(2 - with_row**2 / noise, 1e-12))
        results["std"] = std
    return {"row": rows[subset]} | {name: values[subset] for name, values in results.items()}
