"""A Newton step of logistic regression on Dask's partitions, beside the same sums written by hand; workers' memory.

The table is written as Parquet if the folder has none. Both sides read every partition in every pass, sum the loss, the
gradient and the Hessian over a tree, and solve on the client; they take turns. "By hand" is NumPy in a `dask.delayed`
function, as one would write it with dask-ml's style of map and reduce.

    python benchmarks/dask_tables.py --data folder --rows 10000000 --columns 20 --workers 2
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

STEPS = 5  # of a fit, which takes one pass more: the guard looks at the loss after the last step, too
TARGET = 1.5  # the largest ratio of the times of a step
MEMORY = 600e6  # the most bytes of a worker above those after its imports


def write_table(folder: Path, rows: int, columns: int, files: int) -> None:
    """Rows of a logistic model, in so many Parquet files."""
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).normal(size=columns)
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        random = np.random.default_rng([1, number])
        x = random.normal(size=(len(part), columns))
        y = (random.uniform(size=len(part)) < 1 / (1 + np.exp(-0.3 * x @ weights))).astype(float)
        table = pa.table({**{f"x{i}": x[:, i] for i in range(columns)}, "y": y})
        parquet.write_table(table, folder / f"part{number:04d}.parquet")


def sums_by_hand(frame, weights):
    """The loss, its gradient and its Hessian on a partition."""
    import numpy as np

    table = frame.to_numpy()
    x, y = np.column_stack([np.ones(len(table)), table[:, :-1]]), table[:, -1]
    f = x @ weights
    p = 1 / (1 + np.exp(-f))
    return np.sum(np.logaddexp(0, f) - y * f), x.T @ (p - y), (x * (p * (1 - p))[:, None]).T @ x


def add(*parts):
    """The sum of several such triples."""
    return tuple(sum(values) for values in zip(*parts, strict=True))


def resident() -> int:
    """The bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes that this process has had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def imported() -> int:
    """The memory of a worker that has imported what a fit needs."""
    import dask.dataframe  # noqa: F401  (its memory is a part of the baseline)
    import pyarrow.parquet  # noqa: F401  (likewise)

    import bayesrule.interop.dask  # noqa: F401  (likewise)

    return resident()


def main() -> None:
    """Time steps in turn, and print their ratio and the workers' memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if not list(given.data.glob("*.parquet")):
        write_table(given.data, given.rows, given.columns, given.files)

    import dask
    import dask.dataframe as dd
    import jax
    from dask import delayed
    from distributed import Client, LocalCluster

    import bayesrule as blr
    from bayesrule.cli.cluster import WORKERS_MEMORY
    from bayesrule.interop.dask import DaskParts
    from bayesrule.models import regression

    jax.config.update("jax_enable_x64", True)
    dask.config.set(WORKERS_MEMORY)
    options = {"host": "127.0.0.1", "dashboard_address": None, "threads_per_worker": 1, "n_workers": given.workers}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        baseline = client.run(imported)
        frame = dd.read_parquet(sorted(map(str, given.data.glob("*.parquet"))))
        features = frame.shape[1] - 1
        parts = DaskParts.of_table(frame, "y")
        rows = parts.rows
        objective = regression.regression("logistic", rows, {"w": 1.0, "b": 1.0})
        result = blr.fit(blr.newton(), objective, regression.zeros(features), parts, steps=1)  # compiles
        # Before the other side has run in the same workers: two passes over all partitions.
        memory = max(after - baseline[worker] for worker, after in client.run(peak).items())
        partitions = frame.to_delayed()

        def by_hand(weights: np.ndarray) -> np.ndarray:
            sent = delayed(weights)
            results = [delayed(sums_by_hand)(part, sent) for part in partitions]
            while len(results) > 1:
                results = [delayed(add)(*results[i : i + 8]) for i in range(0, len(results), 8)]
            _, gradient, hessian = results[0].compute()
            return weights - np.linalg.solve(hessian + np.eye(len(weights)), gradient + weights)

        weights, ours, theirs = by_hand(np.zeros(features + 1)), [], []
        for _ in range(given.turns):
            began = time.perf_counter()
            result = blr.fit(blr.newton(), objective, regression.zeros(features), parts, steps=STEPS)
            ours.append((time.perf_counter() - began) / STEPS)
            began = time.perf_counter()
            weights = np.zeros(features + 1)
            for _ in range(STEPS):
                weights = by_hand(weights)
            theirs.append((time.perf_counter() - began) / STEPS)
        mean = np.append(np.asarray(result.q.mean["b"]), np.asarray(result.q.mean["w"]))
    ratio = min(ours) / min(theirs)
    print(f"{rows:,} rows × {features}, {len(partitions)} partitions, {given.workers} workers")
    print(f"a step {min(ours):.2f} s, by hand {min(theirs):.2f} s: ratio {ratio:.2f} (at most {TARGET})")
    print(f"largest difference of the weights {np.max(np.abs(mean - weights)):.1e}")
    print(f"a worker's peak above its imports {memory / 1e6:.0f} MB (at most {MEMORY / 1e6:.0f})")


if __name__ == "__main__":
    main()
