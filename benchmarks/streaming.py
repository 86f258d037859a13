"""Streams at full size: memory, reading, throughput of mini-batches, and a long run.

    python benchmarks/streaming.py --data folder [--rows 10000000] [--steps 100000] [check …]

Writes a table of 20 columns and a label as Parquet into the folder (about 1.6 GB for 10⁷ rows), unless it is there, and
measures each of the following in a process of its own. The program exits with 1 if a limit is broken.

memory      Logistic regression by mini-batches for an epoch: the highest resident memory above what imports take, at
            most 600 MB.
reading     Rows per second in storage order against pyarrow's own `dataset.to_batches`, which makes no matrix of them,
            in turns: at least 0.8×. And of shuffled batches.
throughput  Mini-batch steps on the stream against the same steps on arrays in memory, where a step takes twice as long
            as reading its rows: at least 0.8×.
newton      Full-batch Newton steps in float64, each a pass over the stream, against the same steps in memory: at least
            0.5×, since decoding Parquet costs about as much as the pass; on all rows at most 600 MB above imports.
soak        Many small steps: resident memory grows by at most 5 % from the first third to the last, and no function is
            compiled after the first tenth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = 20
BATCH = 4096
GROUP_ROWS = 100_000


def write(folder: Path, rows: int) -> Path:
    """The table, written a row group at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / f"rows-{rows}.parquet"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    rng, partial = np.random.default_rng(0), path.with_suffix(".part")
    weights, writer = rng.normal(size=COLUMNS) / 4, None
    for begin in range(0, rows, GROUP_ROWS):
        x = rng.normal(size=(min(GROUP_ROWS, rows - begin), COLUMNS))
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ weights))).astype(float)
        table = pa.table({f"x{i}": x[:, i] for i in range(COLUMNS)} | {"y": y})
        writer = parquet.ParquetWriter(partial, table.schema, use_dictionary=False) if writer is None else writer
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return partial.rename(path)


def megabytes() -> float:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Peak:
    """The highest resident memory while it is entered, looked at every 5 ms."""

    def __enter__(self) -> Peak:
        self.highest, self._end = megabytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.highest = max(self.highest, megabytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def imported() -> tuple[Any, Any, Any]:
    """The libraries, with one compiled function, which is what any fit has."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    import pyarrow.dataset

    import bayesrule as blr

    assert pyarrow.dataset
    blr.fit(blr.newton(), lambda x: jnp.sum(x**2), jnp.zeros(2), steps=2)
    return jax, jnp, blr


def objective_of(jnp: Any, blr: Any, rows: int) -> Any:
    def loss(w: Any, example: Any) -> Any:
        x, y = example
        return jnp.logaddexp(0.0, x @ w) - y * (x @ w)

    return blr.Objective(loss, size=rows, regularizer=1.0)


def memory(path: Path, rows: int, steps: int) -> bool:
    jax, jnp, blr = imported()
    baseline = megabytes()
    stream = blr.stream(path, target="y")
    epoch = -(-rows // BATCH)
    began = time.perf_counter()
    with Peak() as peak:
        result = blr.fit(
            blr.vogn(0.01),
            objective_of(jnp, blr, rows),
            jnp.zeros(COLUMNS),
            stream,
            steps=epoch,
            batch_size=BATCH,
            key=jax.random.key(0),
        )
    seconds = time.perf_counter() - began
    above = peak.highest - baseline
    print(f"memory: {rows:,} rows in {result.steps} steps and {seconds:.1f} s, {rows / seconds:,.0f} rows/s; ", end="")
    print(f"{baseline:.0f} MB after imports, {above:.0f} MB above that at the highest (at most 600)")
    return above <= 600


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least seconds of each function over rounds in which all take turns."""
    best = dict.fromkeys(runs, np.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def reading(path: Path, rows: int, steps: int) -> bool:
    _, _, blr = imported()
    from pyarrow import dataset

    table, stream = dataset.dataset(path), blr.stream(path, target="y")
    exhaust = lambda items: [None for _ in items]
    runs = {
        "dataset.to_batches": lambda: exhaust(table.to_batches()),
        "blocks": lambda: exhaust(stream.blocks(2**17)),
        "shuffled batches": lambda: exhaust(stream.batches(BATCH)),
    }
    seconds = in_turns(runs, 5)
    for name, best in seconds.items():
        print(f"reading: {name:18} {rows / best:12,.0f} rows/s, {seconds['dataset.to_batches'] / best:.2f}×")
    return seconds["blocks"] <= seconds["dataset.to_batches"] / 0.8


def throughput(path: Path, rows: int, steps: int) -> bool:
    jax, jnp, blr = imported()
    rows = min(rows, 2_000_000)  # so that the arrays of the other side fit into any memory
    whole = blr.stream(path, target="y")
    arrays = whole.head(rows)
    part = path.with_name(f"rows-{rows}.parquet")
    if not part.exists():
        write(path.parent, rows)
    stream = blr.stream(part, target="y")
    objective, key, epoch = objective_of(jnp, blr, rows), jax.random.key(0), rows // BATCH
    read = in_turns({"read": lambda: [None for _ in stream.batches(BATCH)]}, 3)["read"]

    def fit(data: Any, samples: int) -> Any:
        rule = blr.vogn(0.01, samples=samples)
        return blr.fit(rule, objective, jnp.zeros(COLUMNS), data, steps=epoch, batch_size=BATCH, key=key)

    on_device, samples, taken = jax.tree.map(jnp.asarray, arrays), 1, 0.0
    while True:
        fit(on_device, samples)
        taken = in_turns({"fit": lambda samples=samples: fit(on_device, samples)}, 2)["fit"]
        if taken >= 2 * read:
            break
        samples = max(samples + 1, int(samples * 2 * read / taken))
    fit(stream, samples)
    runs = {"in memory": lambda: fit(on_device, samples), "stream": lambda: fit(stream, samples)}
    seconds = in_turns(runs, 5)
    ratio = seconds["in memory"] / seconds["stream"]
    print(
        f"throughput: reading {read:.2f} s, {epoch} steps with {samples} samples in memory "
        f"{seconds['in memory']:.2f} s, streamed {seconds['stream']:.2f} s: {ratio:.2f}× (at least 0.8)"
    )
    return ratio >= 0.8


def newton(path: Path, rows: int, steps: int) -> bool:
    _, jnp, blr = imported()
    baseline = megabytes()
    loss = lambda f, y: jnp.logaddexp(0.0, f) - y * f

    def fit(data: Any, rows: int, steps: int) -> Any:
        parts = {"output": lambda w, x: x @ w, "linear": lambda x: x}
        objective = objectives.setdefault(rows, blr.Objective(loss, size=rows, regularizer=1.0, **parts))
        return blr.fit(blr.newton(), objective, jnp.zeros(COLUMNS), data, steps=steps)

    objectives: dict[int, Any] = {}
    fit(blr.stream(path, target="y"), rows, 1)
    began = time.perf_counter()
    with Peak() as peak:
        fit(blr.stream(path, target="y"), rows, 3)
    seconds, above = time.perf_counter() - began, peak.highest - baseline
    # The first step measures where it starts, and every step where it leads.
    print(f"newton: {rows:,} rows, {4 * rows / seconds:,.0f} rows/s; {above:.0f} MB above imports (at most 600)")
    fewer = min(rows, 2_000_000)  # so that the arrays of the other side fit into any memory
    stream = blr.stream(write(path.parent, fewer), target="y")
    arrays = tuple(map(jnp.asarray, stream.head(fewer)))
    runs = {"in memory": lambda: fit(arrays, fewer, 3), "stream": lambda: fit(stream, fewer, 3)}
    for run in runs.values():
        run()
    least = in_turns(runs, 3)
    ratio = least["in memory"] / least["stream"]
    print(
        f"newton: {fewer:,} rows, 3 steps in memory {least['in memory']:.2f} s, streamed {least['stream']:.2f} s: ",
        end="",
    )
    print(f"{ratio:.2f}× (at least 0.5)")
    return above <= 600 and ratio >= 0.5


def soak(path: Path, rows: int, steps: int) -> bool:
    jax, jnp, blr = imported()
    from bayesrule.numerics import programs

    stream = blr.stream(path, target="y")
    seen: list[tuple[int, float, int]] = []

    def look(result: Any) -> None:
        seen.append((result.steps, megabytes(), len(programs._programs)))

    every, began = max(1, steps // 20), time.perf_counter()
    blr.fit(
        blr.vogn(0.01),
        objective_of(jnp, blr, rows),
        jnp.zeros(COLUMNS),
        stream,
        steps=steps,
        batch_size=256,
        key=jax.random.key(0),
        on_step=look,
        every=every,
    )
    seconds = time.perf_counter() - began
    for count, resident, compiled in seen:
        print(f"soak: {count:8} steps {resident:8.1f} MB {compiled:4} programs")
    early = [resident for count, resident, _ in seen if steps / 10 < count <= steps * 4 / 10]
    late = [resident for count, resident, _ in seen if count > steps * 7 / 10]
    growth = np.mean(late) / np.mean(early) - 1
    more = seen[-1][2] - seen[1][2]
    print(f"soak: {steps} steps in {seconds:.1f} s, memory {growth:+.1%} (at most 5 %), {more} more programs (none)")
    return bool(growth <= 0.05 and more == 0)


CHECKS = {"memory": memory, "reading": reading, "throughput": throughput, "newton": newton, "soak": soak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="check", help=", ".join(CHECKS))
    parser.add_argument("--data", type=Path, required=True, help="the folder for the table")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=100_000, help="of the soak")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    checks = chosen.checks or list(CHECKS)
    unknown = set(checks) - set(CHECKS)
    if unknown:
        parser.error(f"there is no check {sorted(unknown)[0]!r}, but {', '.join(CHECKS)}")
    if chosen.here:
        path = chosen.data / f"rows-{chosen.rows}.parquet"
        return 0 if all(CHECKS[name](path, chosen.rows, chosen.steps) for name in checks) else 1
    write(chosen.data, chosen.rows)
    own = [sys.executable, __file__, "--here", "--data", str(chosen.data)]
    numbers = ["--rows", str(chosen.rows), "--steps", str(chosen.steps)]
    return max(subprocess.run([*own, *numbers, name], check=False).returncode for name in checks)


if __name__ == "__main__":
    sys.exit(main())
