"""A run: the fit of one table, with its settings, its estimator, its metrics, and what a report needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .preprocess import Preprocessing


@dataclass
class Run:
    """One fit of a table. `bayesrule.load("run/")` reads it from its directory, and `predict` predicts with it.

    `config` holds the settings: "data", "target", "task" ("regression", "binary", "classes", "counts" or "sequence"),
    "model", "estimator" (the class's name), "recipe", "seed", "test_size", "time" and "params" (of the estimator); and
    what was said about the file: "missing", "decimal", "date_format", "sheet" and "columns".

    `summary` describes the data: "source", "rows", "train_rows", "test_rows", "guesses" (sentences about settings that
    were not given), "columns" (a dict for each: "name", "kind" ("number" or "category"), "missing", "used", and "mean",
    "std", "min", "max" or "levels" and "top", a list of pairs of a level and its count, "guess", what its texts were
    taken for, and "note" where it was dropped or changed), "target" (the same for the target), "formats" (how the texts
    of columns were read, by name), "features" (the names of the estimator's inputs) and "missing" (sentences about what
    was done where values are missing).

    `estimator` is the fitted estimator. `encoding` is the preprocessing from a table to its inputs, None for a
    sequence.

    `metrics` has "model" and "baseline", dicts of the same metrics on the held-out rows ("nll", "accuracy", "ece",
    "rmse", "coverage90", …), "baseline_name", and optionally "train".

    `classes` are the labels of the classes in the order of their codes; empty where numbers are predicted.

    `trace` has one value for each step, "objective" and, with full batches, "bound"; and for evaluations on the
    held-out rows "heldout_step" and "heldout_nll". `fits` has the place in it where each fit of the estimator begins:
    there are several where hyper-parameters are chosen by fitting.

    `test` holds the held-out rows: "row" (their numbers in the file, from 0), "y" (numbers, or codes of classes), and
    "mean", "std" (of a new y), "low", "high" (a 90 % interval); for classes "probabilities" (n, K). A sequence also has
    "time", and `history` holds its training part ("time", "y", "mean", "std").

    `influence` has, for training rows, "row", "influence" (how far the posterior moves without the row, in nats),
    "log_density" (its predictive log density without it), "y" and "mean" (the prediction without it, for two classes
    the probability of the second), for a regression also "std" (of a new y without it); empty where the posterior has
    no sites.

    `weights` describes the coefficients where the model is linear: "name", "mean", "std"; for a network "layer",
    "mean", "std" of its weights.

    `facts` has the numbers of the fit: "bound" with its "bound_error" (None where it has none) and "bound_normalized"
    (False where a flat prior leaves a constant open), or "log_evidence", "prior_precision", "noise", "steps", and
    "reason", why it ended ("exact" where one step gives the posterior). `derivation` is the printed algorithm.
    `seconds` and `versions` document how the run was made.
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    estimator: Any
    encoding: Preprocessing | None
    metrics: dict[str, Any]
    classes: list[str] = field(default_factory=list)
    trace: dict[str, np.ndarray] = field(default_factory=dict)
    fits: list[int] = field(default_factory=list)
    test: dict[str, np.ndarray] = field(default_factory=dict)
    history: dict[str, np.ndarray] = field(default_factory=dict)
    influence: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    derivation: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def unseen(self, data: Any) -> dict[str, int]:
        """For each categorical column of new rows, how many of its values did not occur in training."""
        from .predict import read_like_training

        if self.encoding is None or data is None:
            return {}
        return self.encoding.unseen(read_like_training(self, data))

    def missing(self, data: Any) -> int:
        """How many values of new rows are missing, and drawn from their distribution given the rest of the row."""
        from .predict import read_like_training

        if self.encoding is None or data is None:
            return 0
        encoding = self.encoding.encoding
        return encoding.count_missing(encoding.matrix(read_like_training(self, data)))

    def export(self, kind: str = "numpy", folder: str | Path = "numpy_model") -> Path:
        """Write a linear model for predictions without JAX: `model.npz`, and `predict.py`, which needs NumPy alone.

        `from predict import load; load("model.npz").predict_columns({"age": [31], "city": ["Oslo"]})` then gives what
        `predict` gives for rows without missing values (except for the intervals of counts, which are drawn).

        Args:
            kind: "numpy", the only one.
            folder: where; it is made if it does not exist.

        Returns:
            The folder.
        """
        from ..estimators.export import ExportsNumpy, check_kind, export_numpy

        check_kind(kind)
        if self.encoding is None or not isinstance(self.estimator, ExportsNumpy):
            raise ValueError(
                f"Only linear models can be exported for NumPy, and this run has a {self.config['estimator']}: fit "
                "with --model linear."
            )
        return export_numpy(self.estimator, folder, self.encoding.encoding.columns, self.classes)

    def predict(self, data: Any = None, *, steps: int | None = None) -> dict[str, np.ndarray]:
        """Predict new rows, or the next steps of a sequence.

        Values may be missing in the rows: predictions are averaged over what they can be, given the rest of the row.

        Args:
            data: a file, a DataFrame or a dict of columns. For a sequence a new series, or None to continue the run's.
            steps: how many steps of a sequence to forecast, 12 by default.

        Returns:
            Columns. Numbers have "prediction", "std", "low" and "high" (a 90 % interval); classes have "prediction",
            its "probability", and a column "p(label)" for each class. A sequence also has "time".
        """
        from .predict import predict

        return predict(self, data, steps=steps)
