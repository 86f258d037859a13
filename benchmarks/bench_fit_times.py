"""How long estimators take: the first fit of a process, the same with compiled programs on disk, and later fits.

    python benchmarks/bench_fit_times.py [--only NAME …] [--repeats 5]

Each case runs in a process of its own, twice, with an empty folder for compiled programs that the second run finds
filled. Times are after imports. Later fits are compared with scikit-learn's estimator in the same process, and the
fastest of several counts. "Command line" is `bayesrule fit breast_cancer` from start to end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Targets: seconds of the first fit, with programs on disk, and the ratio (or, negative, the seconds) of later fits.
CASES = {
    "logistic, 569×30": (3.0, 1.5, -0.03),
    "logistic, ten classes (digits)": (3.0, 1.5, 2.0),
    "ridge, 442×10": (3.0, 1.5, None),
    "ridge, 100×5000": (3.0, 1.5, 2.0),
    "logistic, 100×5000": (3.0, 1.5, 2.0),
    "Poisson, 300×4": (3.0, 1.5, None),
    "Gaussian process, classes, 569×30": (3.0, 1.5, 1.0),
    "mixture, 150×4": (3.0, 1.5, None),
}


def build(case: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A fit of ours and one of scikit-learn's."""
    from sklearn import datasets, gaussian_process, linear_model, mixture

    from bayesrule.estimators import (
        GaussianMixture,
        GaussianProcessClassifier,
        LogisticRegression,
        PoissonRegression,
        RidgeRegression,
    )

    rng = np.random.default_rng(0)
    if case.endswith("5000"):
        x = rng.normal(size=(100, 5000))
        y = x[:, :40] @ np.full(40, 0.2) + 0.5 * rng.normal(size=100)
        if case.startswith("ridge"):
            return lambda: RidgeRegression().fit(x, y), lambda: linear_model.BayesianRidge().fit(x, y)
        return (
            lambda: LogisticRegression().fit(x, y > 0),
            lambda: linear_model.LogisticRegression().fit(x, y > 0),
        )
    if case.startswith("ridge"):
        x, y = datasets.load_diabetes(return_X_y=True)
        return lambda: RidgeRegression().fit(x, y), lambda: linear_model.BayesianRidge().fit(x, y)
    if case.startswith("Poisson"):
        x = rng.normal(size=(300, 4))
        y = rng.poisson(np.exp(x @ [0.3, 0.2, 0.0, 0.1]))
        return lambda: PoissonRegression().fit(x, y), lambda: linear_model.PoissonRegressor().fit(x, y)
    if case.startswith("mixture"):
        x = datasets.load_iris().data
        return (
            lambda: GaussianMixture(3, random_state=0).fit(x),
            lambda: mixture.GaussianMixture(3, random_state=0).fit(x),
        )
    x, y = datasets.load_digits(return_X_y=True) if "digits" in case else datasets.load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / np.where(x.std(axis=0) > 0, x.std(axis=0), 1.0)
    if case.startswith("logistic"):
        return (
            lambda: LogisticRegression().fit(x, y),
            lambda: linear_model.LogisticRegression(max_iter=5000).fit(x, y),
        )
    kernel = gaussian_process.kernels.ConstantKernel() * gaussian_process.kernels.RBF(5.0)
    return (
        lambda: GaussianProcessClassifier().fit(x, y),
        lambda: gaussian_process.GaussianProcessClassifier(kernel).fit(x, y),
    )


def measure(case: str, repeats: int) -> None:
    """Print the times of one case as JSON: called in a process of its own."""
    ours, theirs = build(case)
    import jax.numpy as jnp

    jnp.zeros(1)  # JAX looks for devices.
    seconds = {"first": _seconds(ours)}
    if repeats:
        seconds["ours"] = min(_seconds(ours) for _ in range(repeats))
        seconds["theirs"] = min(_seconds(theirs) for _ in range(repeats))
    print(json.dumps(seconds))


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _in_process(case: str, repeats: int, cache: str) -> dict[str, float]:
    settings = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--repeats", str(repeats)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _verdict(value: float, target: float | None) -> str:
    return "" if target is None else f" (≤ {target:g}{'' if value <= target else ' MISSED'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the cases' names")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        measure(options.case, options.repeats)
        return
    for case, (first, cached, later) in CASES.items():
        if options.only and not any(part in case for part in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            cold = _in_process(case, options.repeats, folder)
            warm = _in_process(case, 0, folder)
        ratio = cold["ours"] / cold["theirs"]
        line = f"{case:36} first {cold['first']:6.2f} s{_verdict(cold['first'], first)}"
        line += f", from disk {warm['first']:5.2f} s{_verdict(warm['first'], cached)}"
        line += f", later {cold['ours'] * 1e3:8.1f} ms, scikit-learn {cold['theirs'] * 1e3:8.1f} ms, ratio {ratio:7.2f}"
        goal = None if later is None else later if later > 0 else -later / cold["theirs"]
        print(line + _verdict(ratio, goal), flush=True)
    if not options.only:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(Path(sys.executable).parent / "bayesrule"), "fit", "breast_cancer", "--out"]
            quiet = {"capture_output": True, "check": True, "env": os.environ | {"XDG_CACHE_HOME": folder}}
            runs = [_seconds(lambda n=n: subprocess.run([*command, f"{folder}/run{n}"], **quiet)) for n in range(3)]
        print(f"command line, breast_cancer: first {runs[0]:.1f} s, warm {min(runs[1:]):.1f} s (≤ 3.5)")


if __name__ == "__main__":
    main()
