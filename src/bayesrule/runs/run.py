"""A run: what was asked for, what was learnt, how well it does, and what is needed to do it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Run:
    """One fit of a table, whole. `bayesrule.load("run/")` gives it back, and its estimator predicts.

    `config` is what was asked for: "data", "target", "task" ("regression", "binary", "classes", "counts" or
    "sequence"), "model", "recipe", "seed", "test_size", "time" and "params" (of the estimator).

    `summary` describes the data: "source", "rows", "train_rows", "test_rows", "guesses" (sentences), "columns" (a dict
    for each: "name", "kind" ("number", "category"), "missing", "used", and "mean", "std", "min", "max" or "levels" and
    "top", a list of pairs of a level and its count, and "note" where it was dropped or changed), "target" (the same
    for the target) and "features" (the names of the estimator's inputs).

    `metrics` has "model" and "baseline", dicts of the same numbers ("nll", "accuracy", "ece", "rmse", "coverage90", …),
    "baseline_name", and "train" where it was worth having.

    `trace` has, a value for each step, "objective" and, with full batches, "bound"; and for looks at the held-out rows
    "heldout_step" and "heldout_nll". `fits` says where in it each fit of the prior's strength began.

    `test` holds the held-out rows: "row" (their numbers in the file, from 0), "y" (numbers, or places among the
    classes), and "mean", "std" (of a new y), "low", "high" (a 90 % interval); for classes "probabilities" (n, K).
    A sequence has "time" too, and `history` its training part ("time", "y", "mean", "std").

    `influence` has, for training rows, "row", "influence" (how far the posterior moves without it, in nats),
    "log_density" (its predictive log density without it), "y" and "mean" (of two classes the second's probability);
    empty where the model has no sites.

    `weights` describes the coefficients where the model is linear: "name", "mean", "std"; else, for a network,
    "layer", "mean", "std" of all weights.

    `derivation` is the algorithm as it prints itself; `seconds` and `versions` are for the record.
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    estimator: Any
    encoding: Any
    metrics: dict[str, Any]
    classes: list[str] = field(default_factory=list)
    trace: dict[str, np.ndarray] = field(default_factory=dict)
    fits: list[int] = field(default_factory=list)
    test: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    influence: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers of the fit: "bound" or "log_evidence", "prior_precision", "noise", "steps", "reason"."""
    derivation: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def unseen(self, data: Any) -> dict[str, int]:
        """How many values of each category in new rows were not there in training."""
        from .predict import rows_of

        return {} if self.encoding is None or data is None else self.encoding.unseen(rows_of(self, data))

    def predict(self, data: Any = None, *, steps: int | None = None) -> dict[str, np.ndarray]:
        """Columns of predictions for new rows: a file, a DataFrame or a dict of columns; or a sequence's next steps.

        Numbers have "prediction", "std", "low" and "high" (a 90 % interval); classes have "prediction", its
        "probability", and every class's.
        """
        from .predict import predicted

        return predicted(self, data, steps=steps)
