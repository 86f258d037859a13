"""Estimators beside scikit-learn's: test scores over 20 splits, and a million rows.

Logistic regression: data as they are distributed (digits over 16), and standardised; a quarter held out, of each class
its share. Ridge regression: scikit-learn's diabetes, and the UCI sets with their published splits. `--data` is a folder
with `<name>/<name>.npz` for those that do not come with scikit-learn. Paired differences with their standard errors;
both sides at their defaults. A million rows are read from Parquet and fitted; scikit-learn gets the arrays.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import BayesianRidge
from sklearn.linear_model import LogisticRegression as Theirs
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from bayesrule.estimators import LogisticRegression, RidgeRegression
from bayesrule.runs.score import score_classes, score_gaussian
from bayesrule.tables.reading import read

SPLITS = 20
UCI = ("uci_yacht", "uci_boston", "uci_concrete", "uci_energy", "uci_power", "uci_wine_red")


def main(data: Path | None) -> None:
    classes(data)
    numbers(data)
    million()


def classes(data: Path | None) -> None:
    digits, labels = load_digits(return_X_y=True)
    sets = {"digits": (digits / 16, labels), "breast_cancer (569×30)": load_breast_cancer(return_X_y=True)}
    for name in ("breast_cancer_scale", "australian_scale", "a1a"):
        if data is not None and (data / name).is_dir():
            found = np.load(data / name / f"{name}.npz")
            x = found["X"]
            sets[name] = (np.unpackbits(x, axis=1)[:, :123].astype(float) if name == "a1a" else x, found["y"])
    print(f"{'':28}{'accuracy':>10}{'NLL':>9}{'ECE':>8}   scikit-learn's; ours less its, with standard errors")
    for name, (x, y) in sets.items():
        for scaled in (False, True):
            if "569" in name and not scaled:
                continue  # its columns differ by five orders of magnitude
            ours, theirs = compared(x, np.unique(y, return_inverse=True)[1], scaled)
            line(f"{name}{', standardised' if scaled else ''}", ours, theirs)


def compared(x: np.ndarray, y: np.ndarray, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
    found = ([], [])
    for seed in range(SPLITS):
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y)
        if scaled:
            scaler = StandardScaler().fit(x_train)
            x_train, x_test = scaler.transform(x_train), scaler.transform(x_test)
        for scores, model in zip(found, (LogisticRegression(), Theirs(max_iter=10_000)), strict=True):
            metrics = score_classes(model.fit(x_train, y_train).predict_proba(x_test), y_test)
            scores.append([metrics["accuracy"], metrics["nll"], metrics["ece"]])
    return np.array(found[0]), np.array(found[1])


def line(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    gaps = ours - theirs
    errors = gaps.std(axis=0, ddof=1) / np.sqrt(len(gaps))
    shown = "   ".join(f"{gap:+.4f} ± {error:.4f}" for gap, error in zip(gaps.mean(axis=0), errors, strict=True))
    means = theirs.mean(axis=0)
    print(f"{name:40}" + "".join(f"{mean:9.4f}" for mean in means) + f"   {shown}", flush=True)


def numbers(data: Path | None) -> None:
    x, y = load_diabetes(return_X_y=True)
    rng = np.random.default_rng(0)
    sets = {"diabetes": (x, y, [rng.permutation(len(y))[: len(y) // 10] for _ in range(SPLITS)])}
    for name in UCI:
        if data is not None and (data / name).is_dir():
            found = np.load(data / name / f"{name}.npz")
            sets[name] = (found["X"], found["y"], list(found["test_idx"]))
    print(f"\n{'test log-likelihood':40}{'sklearn':>9}   ours less its")
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
        found = np.array(scores)
        line(name, found[:, 0], found[:, 1])


def million(rows: int = 1_000_000, columns: int = 20) -> None:
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

        best = {"ours, with reading": np.inf, "newton-cholesky": np.inf}
        for turn in range(4):
            for name, run in (("ours, with reading", ours), ("newton-cholesky", lambda: newton_cholesky(x, y))):
                began = time.perf_counter()
                run()
                took = time.perf_counter() - began
                if turn == 0 and name.startswith("ours"):
                    print(f"\n10⁶×20: first call {took:.1f} s")
                best[name] = min(best[name], took)
    ratio = best["ours, with reading"] / best["newton-cholesky"]
    print(f"10⁶×20: {best} s, ratio {ratio:.2f} (at most 2)")


def newton_cholesky(x: np.ndarray, y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Theirs(solver="newton-cholesky").fit(x, y)


if __name__ == "__main__":
    main(None)
