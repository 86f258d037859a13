"""Estimators compared with scikit-learn's: test scores over 20 splits, and the time for a million rows.

Logistic regression: data as they are distributed (digits divided by 16), and standardised; a stratified quarter is held
out. Ridge regression: scikit-learn's diabetes, and the UCI sets with their published splits. `--data` of `run.py` is a
folder with `<name>/<name>.npz` for the sets that do not come with scikit-learn. Differences are paired and have
standard errors; both sides use their default settings. A million rows are read from Parquet and fitted; scikit-learn
gets arrays.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import BayesianRidge
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from timing import compare, fastest, seconds_of

from bayesrule.estimators import LogisticRegression, RidgeRegression
from bayesrule.runs.score import score_classes, score_gaussian
from bayesrule.tables.reading import read

SPLITS = 20
UCI = ("uci_yacht", "uci_boston", "uci_concrete", "uci_energy", "uci_power", "uci_wine_red")


def main(data: Path | None = None) -> None:
    compare_classifiers(data)
    compare_regressors(data)
    time_a_million_rows()


def compare_classifiers(data: Path | None) -> None:
    digits, labels = load_digits(return_X_y=True)
    sets = {"digits": (digits / 16, labels), "breast_cancer (569×30)": load_breast_cancer(return_X_y=True)}
    for name in ("breast_cancer_scale", "australian_scale", "a1a"):
        if data is not None and (data / name).is_dir():
            file = np.load(data / name / f"{name}.npz")
            x = file["X"]
            sets[name] = (np.unpackbits(x, axis=1)[:, :123].astype(float) if name == "a1a" else x, file["y"])
    print(f"{'':28}{'accuracy':>10}{'NLL':>9}{'ECE':>8}   scikit-learn's; ours minus its, with standard errors")
    for name, (x, y) in sets.items():
        for scaled in (False, True):
            if "569" in name and not scaled:
                continue  # The columns differ by five orders of magnitude.
            ours, sklearn = score_splits(x, np.unique(y, return_inverse=True)[1], scaled)
            print_difference(f"{name}{', standardised' if scaled else ''}", ours, sklearn)


def score_splits(x: np.ndarray, y: np.ndarray, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy, NLL and ECE of each split, ours and scikit-learn's."""
    results = ([], [])
    for seed in range(SPLITS):
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y)
        if scaled:
            scaler = StandardScaler().fit(x_train)
            x_train, x_test = scaler.transform(x_train), scaler.transform(x_test)
        models = LogisticRegression(), SklearnLogisticRegression(max_iter=10_000)
        for scores, model in zip(results, models, strict=True):
            metrics = score_classes(model.fit(x_train, y_train).predict_proba(x_test), y_test)
            scores.append([metrics["accuracy"], metrics["nll"], metrics["ece"]])
    return np.array(results[0]), np.array(results[1])


def print_difference(name: str, ours: np.ndarray, sklearn: np.ndarray) -> None:
    gaps = ours - sklearn
    errors = gaps.std(axis=0, ddof=1) / np.sqrt(len(gaps))
    shown = "   ".join(f"{gap:+.4f} ± {error:.4f}" for gap, error in zip(gaps.mean(axis=0), errors, strict=True))
    means = sklearn.mean(axis=0)
    print(f"{name:40}" + "".join(f"{mean:9.4f}" for mean in means) + f"   {shown}", flush=True)


def compare_regressors(data: Path | None) -> None:
    x, y = load_diabetes(return_X_y=True)
    rng = np.random.default_rng(0)
    sets = {"diabetes": (x, y, [rng.permutation(len(y))[: len(y) // 10] for _ in range(SPLITS)])}
    for name in UCI:
        if data is not None and (data / name).is_dir():
            file = np.load(data / name / f"{name}.npz")
            sets[name] = (file["X"], file["y"], list(file["test_idx"]))
    print(f"\n{'test log-likelihood':40}{'sklearn':>9}   ours minus its")
    for name, (x, y, splits) in sets.items():
        scores = []
        for test in splits:
            train = np.setdiff1d(np.arange(len(y)), test)
            scaler = StandardScaler().fit(x[train])
            pair = []
            for model in (RidgeRegression(), BayesianRidge()):
                fitted = model.fit(scaler.transform(x[train]), y[train])
                mean, std = fitted.predict(scaler.transform(x[test]), return_std=True)
                pair.append([-score_gaussian(y[test], mean, std)["nll"]])
            scores.append(pair)
        results = np.array(scores)
        print_difference(name, results[:, 0], results[:, 1])


def time_a_million_rows(rows: int = 1_000_000, columns: int = 20) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns))
    y = (rng.random(rows) < 1 / (1 + np.exp(0.3 - x @ (rng.normal(size=columns) / 2)))).astype(float)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        parquet.write_table(pa.table({**{f"x{i}": x[:, i] for i in range(columns)}, "y": y}), path)

        def ours() -> None:
            table = read(path)
            values = np.column_stack([table.columns[f"x{i}"].numbers for i in range(columns)])
            LogisticRegression().fit(values, table.columns["y"].numbers)

        print(f"\n10⁶×20: first call {seconds_of(ours):.1f} s")
        best = fastest({"ours, with reading": ours, "newton-cholesky": lambda: newton_cholesky(x, y)}, 3)
    for name, seconds in best.items():
        print(f"  {name:<42}{seconds:8.2f} s")
    print(compare("ours, with reading", best["ours, with reading"], "newton-cholesky", best["newton-cholesky"], 2.0))


def newton_cholesky(x: np.ndarray, y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SklearnLogisticRegression(solver="newton-cholesky").fit(x, y)


if __name__ == "__main__":
    main()
