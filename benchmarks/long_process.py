"""A process that fits many models: memory maps and memory after every hundred fits.

    python benchmarks/long_process.py [--fits 2000] [--seconds 1500]

All estimators in turn, on tables whose numbers of rows and columns change from fit to fit. Compiled programs hold
memory maps, of which Linux allows a process 65,530; the library keeps a bounded number of programs, so that maps and
memory should level off. The program exits with 1 if there are more than 10,000 maps at the end, or if memory grew by
more than a fifth over the second half.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bayesrule import estimators

MOST_MAPS = 10_000


def maps() -> int:
    """The memory maps of this process."""
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def megabytes() -> float:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def one_round(rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """A fit and a prediction of every estimator, on tables of a new size."""
    rows, columns = int(rng.integers(20, 120)), int(rng.integers(2, 30))
    x = rng.normal(size=(rows, columns))
    score = x[:, 0] + 0.5 * x[:, 1] + rng.normal(size=rows)
    labels, classes = score > np.median(score), np.digitize(score, np.quantile(score, [0.3, 0.7]))
    counts = rng.poisson(np.exp(0.3 * score).clip(max=50)) + (np.arange(rows) == 0)
    words = rng.poisson(1.0, size=(rows, columns)) + (np.arange(columns) == 0)
    series = np.cumsum(rng.normal(size=rows))
    network = {"hidden_layer_sizes": (8,), "max_iter": 5, "random_state": 0, "prior_precision": 1.0}
    supervised = {
        "ridge": (estimators.RidgeRegression(), score),
        "logistic": (estimators.LogisticRegression(), labels),
        "three classes": (estimators.LogisticRegression(recipe="laplace"), classes),
        "Poisson": (estimators.PoissonRegression(), counts),
        "network, classes": (estimators.MLPClassifier(**network), labels),
        "network, numbers": (estimators.MLPRegressor(**network), score),
        "process, numbers": (estimators.GaussianProcessRegressor(), score),
        "process, classes": (estimators.GaussianProcessClassifier(optimizer=None), labels),
    }
    unsupervised = {
        "mixture": (estimators.GaussianMixture(2, max_iter=20), x),
        "factor analysis": (estimators.FactorAnalysis(1, max_iter=20), x),
        "PPCA": (estimators.PPCA(1, max_iter=20), x),
        "topics": (estimators.LatentDirichletAllocation(2, max_iter=5), words),
        "HMM": (estimators.GaussianHMM(2, max_iter=5), series),
        "state space": (estimators.LinearGaussianStateSpace(max_iter=3), series),
    }
    runs: dict[str, Callable[[], Any]] = {}
    for name, (model, y) in supervised.items():
        runs[name] = lambda model=model, y=y: model.fit(x, y).predict(x)
    for name, (model, data) in unsupervised.items():
        runs[name] = lambda model=model, data=data: model.fit(data).score(data)
    return runs


def fits(rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Fits of one estimator after another, without end."""
    while True:
        yield from one_round(rng).items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=1500.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Few iterations do not converge, and need not.
    began, recorded, done = time.perf_counter(), [], 0
    print(f"{'fits':>6}{'maps':>8}{'MB':>8}{'seconds':>9}")
    for done, (name, run) in enumerate(fits(np.random.default_rng(0)), start=1):
        try:
            run()
        except Exception as error:
            sys.exit(f"fit {done}, {name}: {error!r}")
        elapsed = time.perf_counter() - began
        if done % 100 == 0 or done == options.fits:
            recorded.append((maps(), megabytes()))
            print(f"{done:6}{recorded[-1][0]:8}{recorded[-1][1]:8.0f}{elapsed:9.0f}", flush=True)
        if done == options.fits or (elapsed > options.seconds and recorded):
            break
    last_maps, last_memory = recorded[-1]
    grown = last_memory / recorded[len(recorded) // 2][1] - 1
    verdict = "ok" if last_maps < MOST_MAPS and grown < 0.2 else "MISSED"
    print(f"{done} fits: {last_maps} maps (target < {MOST_MAPS}), memory {grown:+.0%} over the second half: {verdict}")
    sys.exit(verdict != "ok")


if __name__ == "__main__":
    main()
