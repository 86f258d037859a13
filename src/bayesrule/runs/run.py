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

    `config` holds the settings: "data", "target", "task" ("regression", "binary", "classes", "counts" or "sequence";
    "clusters", "topics" or "factors" where no column is predicted), "model", "estimator" (the class's name), "recipe",
    "seed", "test_size", "time", "cv" (how many folds, or None), "params" (of the estimator) and "out" (the directory);
    and what was said about the file: "missing", "decimal", "date_format", "sheet" and "columns".

    `summary` describes the data: "source", "rows", "train_rows", "test_rows", "guesses" (sentences about settings that
    were not given), "columns" (a dict for each: "name", "kind" ("number" or "category"), "missing", "used", and "mean",
    "std", "min", "max" or "levels" and "top", a list of pairs of a level and its count, "guess", what its texts were
    taken for, and "note" where it was dropped or changed), "target" (the same for the target), "formats" (how the texts
    of columns were read, by name), "features" (the names of the estimator's inputs), "missing" (sentences about what
    was done where values are missing) and "warnings" (dicts with the fields of `data_checks.DataWarning`).

    `estimator` is the fitted estimator. `encoding` is the preprocessing from a table to its inputs, None for a
    sequence.

    `metrics` has "model" and "baseline", dicts of the same metrics on the held-out rows ("nll", "accuracy", "ece",
    "rmse", "coverage90", …), "baseline_name", and optionally "train"; "references", a list of stronger baselines, each
    with its "name", "model" (for `--model`, empty where it is not one of ours), "metrics" and "difference" (the
    model's NLL minus its own, with the standard error of the difference, None for one row); and "cv", the
    cross-validated scores (`cross_validate.summarize`).

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

    `structure` is what a model without a target found. All three have "rows" (arrays for all rows of the table, with
    their numbers "row"), "sizes" and "criterion" (how many groups, topics or factors were tried, and how well each
    did, lower is better), and "compared", how the column "target" differs between groups. Groups: "weight", "mean",
    "std" (groups, columns; in the table's units), "deviation" (means in standard deviations of all rows), "plane" and
    "variance" (two principal components). Topics: "share", "words" and "probability" (topics, words). Factors:
    "loading", "loading_std" (factors, columns), "noise" (of each column) and "explained" (shares of the variance).

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
    structure: dict[str, Any] = field(default_factory=dict)
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
            its "probability", and a column "p(label)" for each class. A sequence also has "time". A model without a
            target has the "group" or "topic" of each row, its "probability" or "share" and those of the others, or the
            factors ("factor 1", "std 1", …).
        """
        from .predict import predict

        return predict(self, data, steps=steps)


@dataclass
class Candidate:
    """One model of a comparison, scored on every row by the fit that did not see it.

    Args:
        name: what the page and the command line call it: "linear", "mlp with vogn", "boosted trees".
        title: what it is, in words.
        command: the options of `bayesrule fit` that fit it; empty where it is not one of ours.
        losses: −log p(y | x) of every row.
        metrics: over all rows.
        errors: the standard errors of some of them.
        fold_nll: the mean loss of every fold.
        seconds: the time of all its fits and predictions.
        failure: why it could not be fitted; empty where it was.
    """

    name: str
    title: str
    command: str
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    fold_nll: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""


@dataclass
class Comparison:
    """Several models of one table, cross-validated on the same folds.

    `config` has "data", "target", "task", "folds" and "seed", `summary` what `Run.summary` has, `candidates` are in the
    order of their losses, the best first, those that failed last.
    """

    config: dict[str, Any]
    summary: dict[str, Any]
    candidates: list[Candidate]
    classes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
