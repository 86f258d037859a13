"""Does "converged" mean converged? Hundreds of random problems, each against a slow optimum of the same problem.

    python benchmarks/trust.py                     # all problems in float32 and float64, a process for each
    python benchmarks/trust.py --share 0.1         # the first tenth of the programs, the part that the test suite runs
    python benchmarks/trust.py --only 17           # one problem in both precisions, in detail
    python benchmarks/trust.py --recipe "cvi, sites"

A result is *false* if the fit says "converged" while the independent optimum (`trust_reference.py`) is more than 0.01
nats better, or a mean or a standard deviation lies more than 0.05 posterior standard deviations from it. None may be.
Of the problems that are log-concave and well conditioned at least 98 % must converge; where the arithmetic is not
enough, saying so is the right answer. The exit code is 1 if one of the two is broken.

Nats are those of the bound, or of the log-joint at the mean for Laplace's method. "Well conditioned" means that the
posterior precision, scaled to a unit diagonal, has a condition number of at most 10⁶ in float64 and 10³ in float32.
Monte Carlo (`von` as published) cannot reach a tolerance of 10⁻⁶ nats where its gradient has noise, and 32
Gauss–Hermite nodes miss the bend of a logistic loss where outputs vary by more than 5 units: there the share of
converged problems is reported and not demanded. False ones are not excused anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import trust_reference as reference
from trust_problems import PER_PROGRAM, PROGRAMS, Problem, problem

NATS, SDS = 0.01, 0.05
SHARE = 0.98
WELL_CONDITIONED = {"float64": 1e6, "float32": 1e3}
HERMITE_WIDTH = 5.0  # the standard deviation to which 32 nodes integrate a logistic loss to 10⁻³ nats


class Verdict(NamedTuple):
    """A problem, what the fit said, and what is left to gain.

    Attributes:
        gap: nats between the optimum and the answer; None where there is no verdict.
        off: the means' largest deviation in posterior standard deviations.
        spread: the standard deviations' largest relative error.
        bound_off: how far the reported bound lies from the optimum's.
        condition: of the scaled posterior precision.
        widest: the largest standard deviation of an output under the optimum.
        seconds: how long fit and reference took.
    """

    seed: int
    dtype: str
    recipe: str
    program: str
    story: str
    reason: str
    steps: int
    gap: float | None
    off: float
    spread: float
    bound_off: float
    condition: float
    widest: float
    log_concave: bool
    tolerance: float
    seconds: tuple[float, float]

    @property
    def converged(self) -> bool:
        return self.reason == "converged"

    @property
    def wrong(self) -> bool:
        """Whether the answer is not the optimum."""
        return not (self.gap is not None and self.gap <= NATS and self.off <= SDS and self.spread <= SDS)

    @property
    def false(self) -> bool:
        """Whether it says "converged" and is not."""
        return self.converged and self.gap is not None and self.wrong

    @property
    def promised(self) -> bool:
        """Whether it belongs to the problems of which nearly all must converge."""
        random = self.recipe == "von" and "ridge" not in self.program
        coarse = self.recipe == "von, quadrature" and "logistic" in self.program and self.widest > HERMITE_WIDTH
        well_conditioned = self.condition <= WELL_CONDITIONED[self.dtype]
        return self.log_concave and well_conditioned and not random and not coarse


def judge(task: Problem) -> Verdict:
    """Fit a problem and compare the answer with its optimum."""
    from trust_fits import run

    began = time.perf_counter()
    answer = run(task)
    fitted = time.perf_counter()
    with np.errstate(all="ignore"):
        if answer.q:
            gap, off, spread, best, (condition, widest) = compare(task, answer.q)
        else:
            gap, off, spread, best = None, np.nan, np.nan, None
            condition, widest = _difficulty(task, optimum_of(task)) if task.log_concave else UNKNOWN
    bound_off = np.nan if best is None or answer.bound is None else answer.bound - best
    return Verdict(
        task.seed, task.dtype, task.program.recipe, str(task.program), task.story, answer.reason, answer.steps,
        gap, off, spread, bound_off, condition, widest, task.log_concave, task.tolerance,
        (fitted - began, time.perf_counter() - fitted),
    )  # fmt: skip


def uses_delta(task: Problem) -> bool:
    """Whether the target is Laplace's posterior and not the best Gaussian."""
    return task.program.recipe in ("laplace", "newton") or "Laplace" in task.program.kind


def optimum_of(task: Problem, start: reference.Normal | None = None) -> reference.Optimum:
    """The optimum of a regression, a process or a chain, from a start where there may be several."""
    model = reference.latent_model(task)
    if uses_delta(task):
        return reference.laplace(model, None if start is None else start.mean)
    return reference.best_gaussian(model, start)


UNKNOWN = (np.nan, np.nan)


def _difficulty(task: Problem, best: reference.Optimum) -> tuple[float, float]:
    """The condition number and the widest output."""
    return best.condition, float(np.sqrt(np.max(best.q.output_covariance(reference.latent_model(task)))))


def compare(task: Problem, q: dict[str, Any]) -> tuple[float | None, float, float, float | None, tuple[float, float]]:
    """The nats to gain, the means' and the standard deviations' errors, the best value, and how hard it was."""
    kind = task.program.kind
    if kind == "ridge, noise unknown":
        noise = {name: q[name] for name in ("shape", "rate", "value") if name in q}
        return *reference.ridge_gain(task, q["mean"], q["root"], noise), None, UNKNOWN
    if kind == "ppca":
        return reference.ppca_gain(task.data["y"], q["loadings"], q["noise"]), 0.0, 0.0, None, UNKNOWN
    if kind == "mixture" and "weights" in q:
        return *reference.mixture_gain(task.data["y"], q["weights"], q["means"], q["variances"]), 0.0, None, UNKNOWN
    if kind == "mixture":
        return *reference.variational_mixture_gain(task.data["y"], _mixture_prior(task), q), None, UNKNOWN
    model = reference.latent_model(task)
    if model.dense:
        ours = _from_sites(model, q["first"], q["curve"])
        mean, sd = q["mean"], q["sd"]
    else:
        unit = np.sqrt(task.settings["precision"])
        ours = reference.Normal(unit * q["mean"], unit * q["root"])
        mean, sd = ours.mean, np.sqrt(np.sum(ours.root**2, axis=1))
    start = None if task.log_concave or not np.all(np.isfinite(ours.mean)) else ours
    best = optimum_of(task, start)
    if not best.residual < 1e-6:
        return None, np.nan, np.nan, best.value, _difficulty(task, best)
    value = reference.log_joint(model, ours.mean) if uses_delta(task) else reference.bound(model, ours)
    best_mean, best_sd = best.q.mean, np.sqrt(np.sum(best.q.root**2, axis=1))
    if model.dense:
        best_mean = model.outputs(best.q.mean)[:, 0]
        best_sd = np.sqrt(best.q.output_covariance(model)[:, 0, 0])
    off, spread = np.max(np.abs(mean - best_mean) / best_sd), np.max(np.abs(sd / best_sd - 1))
    evidence = best.value + 0.5 * best.q.log_det() if uses_delta(task) else best.value
    worst = lambda x: float(np.nan_to_num(x, nan=np.inf))
    return worst(best.value - value), worst(off), worst(spread), float(evidence), _difficulty(task, best)


def _from_sites(model: reference.LatentModel, first: Any, curve: Any) -> reference.Normal:
    """The posterior over u of a process with these sites."""
    root = reference._precision_root(model, -curve[:, None, None])
    if root is None:
        return reference.Normal(*[np.full(shape, np.nan) for shape in ((len(first),), (len(first),) * 2)])
    return reference.Normal(root @ (root.T @ (model.design[:, 0].T @ first)), root)


def _mixture_prior(task: Problem) -> dict[str, Any]:
    from trust_fits import mixture_priors

    members, double = mixture_priors(task), lambda x: np.asarray(x, float)
    components = {name: double(getattr(members["components"], name)) for name in ("mean", "count", "shape", "rate")}
    return {"concentration": double(members["weights"].concentration), **components}


# The sweep and its table.


def seeds_of_program(number: int, draw: int = 0) -> list[int]:
    """The seeds of all problems of one program, in one of many draws of all problems."""
    return [number + turn * len(PROGRAMS) for turn in range(draw * PER_PROGRAM, (draw + 1) * PER_PROGRAM)]


def seeds_of(share: float, recipe: str | None = None, draw: int = 0) -> list[int]:
    """The seeds of the first programs, program after program, so that each is compiled once and its problems follow."""
    programs = range(round(share * len(PROGRAMS)))
    chosen = [number for number in programs if recipe in (None, PROGRAMS[number].recipe)]
    return [seed for number in chosen for seed in seeds_of_program(number, draw)]


def sweep(seeds: Iterable[int], dtype: str) -> Iterable[Verdict]:
    """Judge the problems of these seeds in one precision."""
    import jax

    with jax.enable_x64(dtype == "float64"):
        for seed in seeds:
            yield judge(problem(seed, dtype))


def table(verdicts: list[Verdict]) -> str:
    """A row for each recipe and precision."""
    head = ["recipe", "precision", "problems", "converged", "well conditioned", "of these converged", "false"]
    head += ["precision lost", "other reasons"]
    lines = []
    recipes = list(dict.fromkeys(v.recipe for v in verdicts))
    for recipe in [*recipes, "all"]:
        for dtype in ("float64", "float32"):
            rows = [v for v in verdicts if recipe in (v.recipe, "all") and v.dtype == dtype]
            if not rows:
                continue
            promised = [v for v in rows if v.promised]
            converged = sum(v.converged for v in promised)
            said = [v.reason.partition(":")[0] for v in rows]
            reasons = Counter(reason for reason in said if reason not in ("converged", "precision lost"))
            lines.append([
                recipe, dtype, str(len(rows)), _percent(sum(v.converged for v in rows), len(rows)), str(len(promised)),
                _percent(converged, len(promised)), str(sum(v.false for v in rows)),
                str(sum(v.reason == "precision lost" for v in rows)),
                ", ".join(f"{reason} {count}" for reason, count in reasons.most_common()) or "–",
            ])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def describe(v: Verdict) -> str:
    """One line for a problem."""
    gap = "no verdict" if v.gap is None else f"gap {v.gap:.2g} nats, mean off {v.off:.2g} sd, sd off {v.spread:.2g}"
    return (
        f"{v.seed:4d} {v.dtype} {v.program}: {v.reason} after {v.steps}, {gap}, condition {v.condition:.1g}, "
        f"tolerance {v.tolerance:.0e}; {v.story}"
    )


def promise_kept(verdicts: list[Verdict]) -> bool:
    """No false result, and nearly all of the log-concave, well-conditioned problems converged."""
    promised = [v for v in verdicts if v.promised]
    return not any(v.false for v in verdicts) and sum(v.converged for v in promised) >= SHARE * len(promised)


def offenders(verdicts: list[Verdict]) -> list[Verdict]:
    """The results that are false, did not converge though they should have, or have no verdict."""
    return [v for v in verdicts if v.false or (v.promised and not v.converged) or (v.converged and v.gap is None)]


def _collect(arguments: list[str], recipe: str | None, jobs: int) -> list[Verdict]:
    """Run this file once for each recipe and precision, at most `jobs` at a time, and read their verdicts.

    A process of its own for each, because one that compiles all programs runs out of memory maps.
    """
    recipes = [recipe] if recipe else list(dict.fromkeys(program.recipe for program in PROGRAMS))
    waiting = [(recipe, precision) for recipe in reversed(recipes) for precision in ("float32", "float64")]
    running: list[subprocess.Popen] = []
    lines: list[str] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            recipe, precision = waiting.pop()
            command = [sys.executable, __file__, *arguments, "--recipe", recipe, "--precision", precision, "--json"]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
        process = running.pop(0)
        output, _ = process.communicate()
        if process.returncode not in (0, 1):
            raise SystemExit(
                f"The sweep's process ended with code {process.returncode}: run it with --precision alone."
            )
        lines += output.splitlines()
    return [Verdict(**json.loads(line)) for line in lines if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="which part of the programs to run")
    parser.add_argument("--only", type=int, nargs="+", help="the seeds of single problems")
    parser.add_argument("--recipe", help="only this recipe's programs")
    parser.add_argument("--draw", type=int, default=0, help="other random problems of the same kinds")
    parser.add_argument("--precision", choices=["float32", "float64"], help="only this precision, in this process")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes at a time")
    parser.add_argument("--json", action="store_true", help="print every verdict as a line of JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    seeds = options.only or seeds_of(options.share, options.recipe, options.draw)
    if options.precision or options.only:
        verdicts = []
        for dtype in [options.precision] if options.precision else ["float64", "float32"]:
            for verdict in sweep(seeds, dtype):
                verdicts.append(verdict)
                if options.json:
                    print(json.dumps(verdict._asdict()), flush=True)
                elif options.only:
                    print(describe(verdict), flush=True)
        if options.json or options.only:
            return 0 if promise_kept(verdicts) else 1
    else:
        arguments = ["--share", str(options.share), "--draw", str(options.draw)]
        verdicts = _collect(arguments, options.recipe, options.jobs)
    print(table(verdicts))
    wrong = offenders(verdicts)
    print(f"\n{len(verdicts)} fits in {time.perf_counter() - began:.0f} s, {len(wrong)} to look at.")
    for verdict in wrong:
        print("  FALSE " if verdict.false else "  ", describe(verdict), sep="")
    if wrong:
        print(f"\npython benchmarks/{Path(__file__).name} --only {wrong[0].seed}   reproduces the first of them.")
    return 0 if promise_kept(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
