"""Two versions of the library against each other: the time of the new one divided by the time of the old one.

    python benchmarks/compare_commits.py OLD NEW [--rows adam kalman_filter] [--repeats 30]

OLD and NEW are source trees (working copies with `src/bayesrule`). Every row is set up in two processes, one with each
tree on its path, which then take turns: while one runs, the other waits. So both see the same machine, and neither
shares a compiler, a cache or memory with the other. The order within a pair alternates (old new, new old, …), so that a
steady drift of the machine's speed cancels.

Three numbers are printed: the ratio of the least times, the median of the ratios of the pairs, and their quartiles. A
ratio is evidence of a difference only if it lies outside the quartiles of a comparison of a tree with itself.

The set-up functions are those of the `bench_*.py` files here and use public names only, so the old tree may be of any
version that has these names. A row is called as often per turn as it takes to fill about `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], Any]


# The rows. Each function builds its arrays and programs and returns one call; it is run in the worker processes only.


def sgd() -> Run:
    """One step of SGD on 10⁷ parameters, the gradient given."""
    from bench_optimizers import ours

    import bayesrule as blr

    return ours(blr.sgd(0.1), 10_000_000)[0]


def adam() -> Run:
    """One step of Adam on 10⁷ parameters, the gradient given."""
    from bench_optimizers import ours

    import bayesrule as blr

    return ours(blr.adam(1e-3), 10_000_000)[0]


def ivon() -> Run:
    """One step of IVON on 10⁷ parameters, the gradient given."""
    from bench_optimizers import DECAY, SIZE, ours

    import bayesrule as blr

    return ours(blr.ivon(0.1), 10_000_000, SIZE * DECAY)[0]


def per_example_squares() -> Run:
    """One step of OGN on an MLP 784-512-256-10, batch 128: Σ gᵢ² without the per-example gradients."""
    import jax
    from bench_moments import BATCH, batch, mlp_loss, mlp_params

    import bayesrule as blr

    rule, objective = blr.ogn(1e-3), blr.Objective(mlp_loss, size=100 * BATCH, regularizer=1.0)
    step, examples = jax.jit(rule.step), batch()
    state = rule.init(mlp_params(), objective)
    for _ in range(2):  # The first step measures where to start, which no other step does.
        state, _ = step(objective, state, examples)
    return lambda: step(objective, state, examples)[0].q


def logistic_vi() -> Run:
    """Full-Gaussian variational logistic regression, breast_cancer 569×31, seven steps by quadrature."""
    from bench_logistic import breast_cancer, our_problem

    return our_problem(*breast_cancer()).fit(steps=7)


def logistic_vi_large() -> Run:
    """The same on synthetic data of 10,000×200."""
    from bench_logistic import our_problem, synthetic

    return our_problem(*synthetic()).fit(steps=7)


def mixture_em() -> Run:
    """Ten iterations of EM, 100,000×10, ten full covariances."""
    from bench_messages import our_mixture

    import bayesrule as blr

    fit = our_mixture(blr.em(order="parallel"), prior=False)
    return lambda: fit(10)


def mixture_vmp() -> Run:
    """Ten iterations of VMP, 100,000×10, ten full covariances."""
    from bench_messages import our_mixture

    import bayesrule as blr

    fit = our_mixture(blr.vmp(order="parallel"), prior=True)
    return lambda: fit(10)


def kalman_filter() -> Run:
    """The filter of 10,000 steps with four states."""
    from bench_kalman import observations, our_runs

    return our_runs(observations(10_000))["ours filter"]


def kalman_smoother() -> Run:
    """The smoother of 10,000 steps with four states."""
    from bench_kalman import observations, our_runs

    return our_runs(observations(10_000))["ours smoother"]


def hmm_em() -> Run:
    """Ten iterations of EM, 50,000 steps, eight states with full covariances."""
    from bench_hmm import initial_parameters, our_fit, series

    y = series(50_000, 8)
    fit, _ = our_fit(y, "full", initial_parameters(y, 8))
    return lambda: fit(10)


def hmm_step() -> Run:
    """One `rule.step` of EM, 50,000 steps, eight states with full covariances."""
    from bench_hmm import initial_parameters, our_fit, series

    y = series(50_000, 8)
    return our_fit(y, "full", initial_parameters(y, 8))[1]


ROWS = {
    row.__name__: row
    for row in (
        sgd,
        adam,
        ivon,
        per_example_squares,
        logistic_vi,
        logistic_vi_large,
        mixture_em,
        mixture_vmp,
        kalman_filter,
        kalman_smoother,
        hmm_em,
        hmm_step,
    )
}
FLOAT64 = {"logistic_vi", "logistic_vi_large", "kalman_filter", "kalman_smoother"}


def work(name: str) -> None:
    """The worker's loop: set the row up, then for each line with a number of calls answer with the seconds per call."""
    import jax

    jax.config.update("jax_enable_x64", name in FLOAT64)
    jax.config.update("jax_enable_compilation_cache", False)
    from timing import seconds_of

    # Other libraries may print; only the answers go to the pipe.
    answers, sys.stdout = sys.stdout, sys.stderr
    run = ROWS[name]()
    for _ in range(2):  # The first call compiles; the second finds out whether that was all.
        jax.block_until_ready(run())
    print(json.dumps(seconds_of(run)), file=answers, flush=True)
    for line in sys.stdin:
        calls = int(line)
        print(json.dumps([seconds_of(run) for _ in range(calls)]), file=answers, flush=True)


class Worker:
    """A process that has one row set up with one of the two trees."""

    def __init__(self, tree: Path, row: str):
        path = os.pathsep.join([str(tree / "src"), str(Path(__file__).parent)])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", row],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.once: float = self._answer()

    def seconds(self, calls: int) -> float:
        """The least seconds of a call in one turn of several calls."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        return min(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"The worker ended with exit code {self.process.wait()}: see its message above.")
        return json.loads(line)


def compare(row: str, old_tree: Path, new_tree: Path, repeats: int, seconds: float) -> str:
    """One line of the table: least times, the ratio new/old of these, and of the pairs the median and quartiles."""
    workers = {"old": Worker(old_tree, row), "new": Worker(new_tree, row)}
    calls = max(1, int(seconds / max(worker.once for worker in workers.values())))
    times: dict[str, list[float]] = {"old": [], "new": []}
    for turn in range(repeats):
        for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
            times[name].append(workers[name].seconds(calls))
    for worker in workers.values():
        worker.close()
    old, new = np.array(times["old"]), np.array(times["new"])
    low, median, high = np.quantile(new / old, [0.25, 0.5, 0.75])
    least = f"{1e3 * old.min():10.3f} {1e3 * new.min():10.3f} ms   {new.min() / old.min():6.3f}"
    return f"{row:<22}{least}   {median:6.3f}   {low:.3f} to {high:.3f}"


def source_tree(text: str) -> Path:
    tree = Path(text).resolve()
    if not (tree / "src" / "bayesrule").is_dir():
        raise argparse.ArgumentTypeError(f"{text} has no src/bayesrule: name the root of a working copy.")
    return tree


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=source_tree, help="root of the old source tree")
    parser.add_argument("new", type=source_tree, help="root of the new source tree")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=30, help="pairs of turns")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long one turn takes")
    arguments = parser.parse_args()
    print(f"{'':<22}{'old':>10} {'new':>10}      new/old   median   quartiles")
    for row in arguments.rows:
        print(compare(row, arguments.old, arguments.new, arguments.repeats, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
