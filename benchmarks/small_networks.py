"""Networks on small noisy tables, beside scikit-learn's: NLL, accuracy and ECE, or NLL and RMSE, over several splits.

    python benchmarks/small_networks.py [--data FOLDER] [--sets pima wine] [--splits 10] [--hidden 100] [--out table.md]

Sets by name come from scikit-learn and statsmodels (`anes96`: votes; `fair`: 800 of its rows), or are drawn here with a
fifth of the labels flipped. Further ones are FOLDER/NAME.npz with X and y; a y of whole numbers is of classes.

Ours are `MLPClassifier` and `MLPRegressor` at their default settings. Scikit-learn's have three settings: its defaults
(200 epochs), 2000 epochs at most, and early stopping on a tenth of the training rows. Inputs and targets are
standardised on the training rows, three quarters of all. The noise of scikit-learn's regressors is the mean squared
residual of the training rows, with early stopping of a tenth of them that is held out from another fit.

A difference is ours minus theirs, so that a negative one of NLL, ECE and RMSE is in our favour; ± is its standard error
over splits (which share rows, so that it is a guide). Nothing here chooses a setting: the script reads test rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from sklearn import datasets, neural_network
from sklearn.model_selection import train_test_split

from bayesrule import metrics
from bayesrule.estimators import MLPClassifier, MLPRegressor

THEIRS: dict[str, dict[str, Any]] = {
    "200 epochs": {},
    "2000 epochs": {"max_iter": 2000},
    "early stopping": {"early_stopping": True, "max_iter": 2000},
}


def flip_labels(rows: int, columns: int, score: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Normal columns and the sign of a score of the first few, a fifth of them flipped."""
    random = np.random.default_rng(0)
    X = random.normal(size=(rows, columns))
    return X, ((score(X) > 0) != (random.random(rows) < 0.2)).astype(int)


def votes() -> tuple[np.ndarray, np.ndarray]:
    from statsmodels.datasets import anes96

    table = anes96.load_pandas().data
    return table.drop(columns=["vote", "popul"]).to_numpy(float), table["vote"].to_numpy(int)


def affairs() -> tuple[np.ndarray, np.ndarray]:
    from statsmodels.datasets import fair

    table = fair.load_pandas().data.sample(800, random_state=0)
    return table.drop(columns="affairs").to_numpy(float), (table["affairs"] > 0).to_numpy(int)


SETS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "breast_cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "anes96": votes,
    "fair": affairs,
    "flipped linear": lambda: flip_labels(200, 30, lambda x: x[:, 0] - x[:, 1]),
    "flipped interaction": lambda: flip_labels(400, 5, lambda x: x[:, 0] * x[:, 1] + x[:, 2]),
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
}


def is_of_classes(y: np.ndarray) -> bool:
    return y.dtype.kind in "iub"


def standardize(train: np.ndarray, *others: np.ndarray) -> list[np.ndarray]:
    mean, scale = train.mean(0), train.std(0)
    return [(values - mean) / np.where(scale > 0, scale, 1.0) for values in (train, *others)]


def judge_classes(model: Any, x: np.ndarray, y: np.ndarray) -> list[float]:
    p = model.predict_proba(x)
    return [float(score(p, y)) for score in (metrics.nll, metrics.accuracy, metrics.ece)]


def judge_numbers(mean: np.ndarray, variance: Any, y: np.ndarray) -> list[float]:
    variance = np.broadcast_to(variance, y.shape)
    return [-float(metrics.gaussian_log_likelihood(mean, variance, y)), float(metrics.rmse(mean, y))]


def scikit_learn_noise(settings: dict[str, Any], x: np.ndarray, y: np.ndarray, model: Any, seed: int) -> float:
    if not settings.get("early_stopping"):
        return float(np.mean((model.predict(x) - y) ** 2))
    part, held, y_part, y_held = train_test_split(x, y, test_size=0.1, random_state=seed)
    other = neural_network.MLPRegressor(**model.get_params()).fit(part, y_part)
    return float(np.mean((other.predict(held) - y_held) ** 2))


Scores: TypeAlias = dict[str, list[float]]


def score_split(X: np.ndarray, y: np.ndarray, seed: int, hidden: int | None) -> tuple[Scores, float, float]:
    """The scores of each model on the held-out quarter of one split, and the seconds of our fit and of their first."""
    classes = is_of_classes(y)
    x, x_test, y, y_test = train_test_split(X, y, random_state=seed, stratify=y if classes else None)
    x, x_test = standardize(x, x_test)
    if not classes:
        y, y_test = standardize(y, y_test)
    size = {} if hidden is None else {"hidden_layer_sizes": (hidden,)}
    start = time.perf_counter()
    ours: Any = (MLPClassifier if classes else MLPRegressor)(random_state=seed, **size).fit(x, y)
    ours_seconds = time.perf_counter() - start
    if classes:
        scores = {"ours": judge_classes(ours, x_test, y_test)}
    else:
        mean, std = ours.predict(x_test, return_std=True)
        scores = {"ours": judge_numbers(mean, std**2, y_test)}
    theirs = neural_network.MLPClassifier if classes else neural_network.MLPRegressor
    seconds = []
    for name, settings in THEIRS.items():
        start = time.perf_counter()
        model = theirs(random_state=seed, **settings, **size).fit(x, y)
        seconds.append(time.perf_counter() - start)
        if classes:
            scores[name] = judge_classes(model, x_test, y_test)
        else:
            scores[name] = judge_numbers(model.predict(x_test), scikit_learn_noise(settings, x, y, model, seed), y_test)
    return scores, ours_seconds, seconds[0]


def format_row(name: str, splits: list[Scores]) -> str:
    ours = np.array([scores["ours"] for scores in splits])
    cells = [" ".join(f"{value:.3f}" for value in ours.mean(0))]
    for theirs in THEIRS:
        differences = ours - np.array([scores[theirs] for scores in splits])
        errors = differences.std(0, ddof=1) / np.sqrt(len(splits))
        cells.append(
            " ".join(f"{mean:+.3f}±{error:.3f}" for mean, error in zip(differences.mean(0), errors, strict=True))
        )
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Networks on small noisy tables, beside scikit-learn's.")
    parser.add_argument("--data", type=Path, help="folder with further sets, NAME.npz with X and y")
    parser.add_argument("--sets", nargs="+", help="which sets; all by default")
    parser.add_argument("--splits", type=int, default=10, help="how many splits, at least 2")
    parser.add_argument("--hidden", type=int, help="the width of the hidden layer; by default each library's own")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()

    sets = dict(SETS)
    for path in sorted(arguments.data.glob("*.npz")) if arguments.data else ():
        file = np.load(path)
        sets[path.stem] = lambda file=file: (file["X"].astype(float), file["y"])
    warnings.simplefilter("ignore")  # scikit-learn's, that 200 epochs are too few
    lines = [
        "| set | ours | " + " | ".join(f"against {name}" for name in THEIRS) + " |",
        "|---|---|" + "---|" * len(THEIRS),
    ]
    print("\n".join(lines), flush=True)
    for name in arguments.sets or sets:
        X, y = sets[name]()
        results = [score_split(X, y, seed, arguments.hidden) for seed in range(arguments.splits)]
        seconds = np.median([result[1:] for result in results], axis=0)
        label = f"{name} ({len(X)}×{X.shape[1]}, {seconds[0]:.1f} s and {seconds[1]:.1f} s)"
        lines.append(format_row(label, [result[0] for result in results]))
        print(lines[-1], flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
