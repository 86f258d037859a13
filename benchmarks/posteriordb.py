"""Posteriors with known moments, each fitted by one line at default settings: is "trust" to be trusted, and how fast?

    python benchmarks/posteriordb.py [--data FOLDER] [--cases NAME …] [--speed] [--float32] [--reparam]

For every case: the family, the bound, Pareto k̂, the verdict, the largest errors of means (in reference standard
deviations) and of standard deviations (in per cent), in unconstrained and constrained variables, and the seconds of a
first and of a second call. Then the 2×2 table of trusted or not against good or not, where good means that all means
are within 0.1 sd and all sds within 10 %, up to chance. Cases are listed apart if a mode of theirs has no draw at all:
no diagnostic sees a mode that no start reached.

With --speed also, in turns in the same process: NumPyro's AutoMultivariateNormal (Adam, the best of three rates, as
many steps as its bound takes to come within 0.05 of our Gaussian's), AutoLaplaceApproximation and blackjax's
pathfinder. `--reparam` adds `reparam="auto"` to the calls for NumPyro's models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
from posterior_cases import FOLDER, Case, Errors, judge, load_cases

GOOD_MEAN, GOOD_SD = 0.1, 0.1
FAITHFUL_MEAN, FAITHFUL_SD = 0.03, 0.04  # where a Gaussian on the unconstrained space can


@dataclass(frozen=True)
class Row:
    """What one fit said, and how good it was."""

    case: Case
    family: str
    bound: float
    gaussian_bound: float  # of the Gaussian that another family may have replaced
    khat: float
    trust: str
    verdict: str
    errors: Errors  # in all variables
    unconstrained: Errors
    missed: list[str]
    first: float  # seconds, with compiling
    again: float  # without

    @property
    def good(self) -> bool:
        return self.errors.within(GOOD_MEAN, GOOD_SD)

    def __str__(self) -> str:
        both, bare = self.errors, self.unconstrained
        numbers = f"{self.bound:11.3f}{self.khat:6.2f}{bare.mean:8.3f}{100 * bare.sd:7.1f}{both.mean:8.3f}"
        numbers += f"{100 * both.sd:7.1f}{self.first:8.2f}{self.again:8.3f}"
        marks = "good" if self.good else "    "
        return f"{self.case.name:<28}{self.family[:14]:<15}{numbers}  {marks}  {self.trust}"


HEADER = (
    f"{'case':<28}{'family':<15}{'bound':>11}{'k̂':>6}{'mean':>8}{'sd %':>7}{'mean c':>8}{'sd c %':>7}"
    f"{'first s':>8}{'again s':>8}  {'':<4}  verdict"
)


def fit(case: Case, key: jax.Array, options: Mapping[str, Any]) -> Any:
    """The default call, one line; `options` are for NumPyro's models."""
    if case.model is not None:
        from bayesrule.interop import numpyro as bridge

        return bridge.fit(case.model, case.args, dict(case.kwargs), key=key, **options)
    import bayesrule as blr

    return blr.infer(case.log_density, case.start, constraints=dict(case.constraints), key=key)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds until it was computed."""
    began = time.perf_counter()
    result = run()
    jax.block_until_ready(jax.tree.leaves(result))
    return result, time.perf_counter() - began


def forget_programs() -> None:
    """Drop compiled programs, so that the next call is a first one."""
    from bayesrule.numerics.programs import release_programs

    release_programs()
    jax.clear_caches()


def key_of(case: Case, key: jax.Array) -> jax.Array:
    """A case's own key, whatever other cases run."""
    return jax.random.fold_in(key, zlib.crc32(case.name.encode()))


def draws_for(case: Case) -> int:
    """Enough that chance moves a mean by less than 0.01 sd, within 200 MB."""
    return int(min(100_000, 20_000_000 // max(case.dimension, 1)))


def measure(case: Case, key: jax.Array, options: Mapping[str, Any]) -> Row:
    """Fit a case twice, and compare its draws with the reference."""
    key_fit, key_draws = jax.random.split(key)
    forget_programs()
    posterior, first = timed(lambda: fit(case, key_fit, options))
    posterior, again = timed(lambda: fit(case, key_fit, options))
    draws = {name: np.asarray(value) for name, value in posterior.samples(key_draws, draws_for(case)).items()}
    return Row(
        case,
        posterior.family,
        posterior.bound,
        posterior.gaussian_bound,
        posterior.khat,
        posterior.trust,
        str(posterior.verdict),
        judge(case, draws),
        judge(case, draws, "unconstrained"),
        case.missed_modes(draws),
        first,
        again,
    )


def table(rows: list[Row]) -> str:
    """The 2×2 table, what it should say, and the cases apart."""
    seen = [row for row in rows if not row.missed]
    apart = [row for row in rows if row.missed]
    count = lambda trusted, good: sum((row.trust == "trust") == trusted and row.good == good for row in seen)
    lines = [
        f"\n{'':<14}{'good':>8}{'not good':>10}",
        f"{'trusted':<14}{count(True, True):>8}{count(True, False):>10}",
        f"{'not trusted':<14}{count(False, True):>8}{count(False, False):>10}",
    ]
    good = count(True, True) + count(False, True)
    lines.append(f"trusted of the good: {count(True, True)} of {good} (target: at least 80 %)")
    lines.append(f"trusted and not good: {count(True, False)} (target: 0)")
    for row in seen:
        if row.trust == "trust" and not row.good:
            lines.append(f"  WRONGLY TRUSTED  {row.case.name}: {describe(row.errors)}")
        if row.trust != "trust" and row.good:
            lines.append(f"  good, but {row.trust!r}: {row.case.name}: {row.verdict}")
        if row.trust == "means only" and row.errors.mean_beyond > GOOD_MEAN:
            lines.append(f"  MEANS WRONG but 'means only': {row.case.name}: {describe(row.errors)}")
    for row in apart:
        lines.append(f"  apart, modes without a draw ({', '.join(row.missed)}): {row.case.name}, {row.trust!r}")
    published = [row for row in rows if row.case.group != "synthetic" and row.case.expected == "gaussian"]
    faithful = [row for row in published if row.unconstrained.within(FAITHFUL_MEAN, FAITHFUL_SD)]
    if published:
        lines.append(
            f"published cases where a Gaussian suffices, within {FAITHFUL_MEAN} sd and {FAITHFUL_SD:.0%}: "
            f"{len(faithful)} of {len(published)}"
        )
        missing = [row for row in published if row not in faithful]
        lines.extend(f"  not {row.case.name}: {describe(row.unconstrained)}" for row in missing)
    return "\n".join(lines)


def describe(errors: Errors) -> str:
    return f"mean off {errors.mean:.3f} sd ({errors.mean_of}), sd off {errors.sd:.1%} ({errors.sd_of})"


# ── Speed ────────────────────────────────────────────────────────────────────────────────────────────────────────────

RATES = (0.003, 0.01, 0.05)
CHUNK, MOST_STEPS, BOUND_DRAWS = 500, 50_000, 2000
BOUND_SLACK = 0.05


def adam_to_bound(case: Case, key: jax.Array, rate: float, target: float) -> tuple[float, float, float, int]:
    """AutoMultivariateNormal by Adam until its bound, from many draws, is at least `target`.

    Returns:
        The largest bound that it got to, the seconds of its steps alone, those with compiling, and the number of steps.
    """
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal

    model, args, kwargs = case.as_numpyro()
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(rate), Trace_ELBO())
    key_start, key_bound = jax.random.split(key)

    @jax.jit
    def run(state: Any, data: Any) -> Any:
        return jax.lax.scan(lambda s, _: svi.update(s, *data, **kwargs), state, None, length=CHUNK)[0]

    evaluator = Trace_ELBO(num_particles=BOUND_DRAWS)

    @jax.jit
    def bound(state: Any, data: Any) -> Any:
        return -evaluator.loss(key_bound, svi.get_params(state), model, guide, *data, **kwargs)

    state, start = timed(lambda: svi.init(key_start, *args, **kwargs))
    program, compiling = timed(lambda: run.lower(state, args).compile())
    best, seconds, steps = -np.inf, 0.0, 0
    while steps < MOST_STEPS and best < target:
        state, taken = timed(lambda state=state: program(state, args))
        seconds, steps = seconds + taken, steps + CHUNK
        best = max(best, float(bound(state, args)))
    return best, seconds, seconds + start + compiling, steps


def laplace(case: Case, key: jax.Array) -> tuple[Errors, float, float]:
    """AutoLaplaceApproximation with BFGS: its errors, and the seconds of a second and of a first call."""
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoLaplaceApproximation

    model, args, kwargs = case.as_numpyro()
    key_run, key_draws = jax.random.split(key)

    guide = AutoLaplaceApproximation(model)
    svi = SVI(model, guide, numpyro.optim.Minimize(), Trace_ELBO())
    state, start = timed(lambda: svi.init(key_run, *args, **kwargs))

    @jax.jit
    def program(state: Any, data: Any) -> Any:
        state, _ = svi.update(state, *data, **kwargs)
        return guide.sample_posterior(key_draws, svi.get_params(state), sample_shape=(10_000,))

    run = lambda: program(state, args)
    _, first = timed(run)
    draws, again = timed(run)
    return judge(case, draws, "unconstrained"), again, start + first


def pathfinder(case: Case, key: jax.Array) -> tuple[Errors, float, float]:
    """blackjax's pathfinder on NumPyro's log density: its errors, and the seconds of a second and a first call."""
    import blackjax
    from numpyro.infer.util import initialize_model

    model, args, kwargs = case.as_numpyro()
    key_start, key_run = jax.random.split(key)
    start = initialize_model(key_start, model, model_args=args, model_kwargs=kwargs, dynamic_args=True)

    @jax.jit
    def approximate(key: Any, position: Any, data: Any) -> Any:
        potential = start.potential_fn(*data, **kwargs)
        key_path, key_draws = jax.random.split(key)
        state, _ = blackjax.vi.pathfinder.approximate(key_path, lambda z: -potential(z), position)
        draws, _ = blackjax.vi.pathfinder.sample(key_draws, state, 10_000)
        return jax.vmap(start.postprocess_fn(*data, **kwargs))(draws)

    run = lambda: approximate(key_run, start.param_info.z, args)
    _, first = timed(run)
    draws, again = timed(run)
    return judge(case, draws, "unconstrained"), again, first


def race(case: Case, row: Row, key: jax.Array, options: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds without and with compiling by method; AutoMultivariateNormal's are infinite where it fails."""
    keys = jax.random.split(key, 6)
    found: dict[str, tuple[float, float]] = {}
    ours = [row.again]
    forget_programs()
    target = row.gaussian_bound - BOUND_SLACK
    reached, best = [], -np.inf
    for rate, part in zip(RATES, keys[:3], strict=True):
        bound, bare, total, steps = adam_to_bound(case, part, rate, target)
        best = max(best, bound)
        if bound >= target:
            reached.append((bare, total, rate, steps))
        ours.append(timed(lambda: fit(case, keys[3], options))[1])
    if reached:
        bare, total, rate, steps = min(reached)
        found["AutoMultivariateNormal"] = (bare, total)
        note = f"rate {rate:g}, {steps} steps"
    else:
        found["AutoMultivariateNormal"] = (np.inf, np.inf)
        note = f"still {target + BOUND_SLACK - best:.2f} below after {MOST_STEPS} steps"
    # The first of these compiled after programs had been dropped.
    ours_again = min(ours[0], *ours[2:])
    notes = [f"AutoMultivariateNormal {note}"]
    for name, peer, part in (("AutoLaplace", laplace, keys[4]), ("pathfinder", pathfinder, keys[5])):
        try:
            errors, bare, total = peer(case, part)
        except Exception as error:
            notes.append(f"{name} failed: {type(error).__name__}")
            continue
        found[name] = (bare, total)
        notes.append(f"{name} off by {errors.mean:.2f} sd, {errors.sd:.0%}")
    found["ours"] = (ours_again, row.first)
    times = "".join(
        f"{found[name][0]:10.3f}{found[name][1]:8.2f}" if name in found else f"{'–':>10}{'–':>8}" for name in METHODS
    )
    print(f"{case.name:<28}{times}  {'; '.join(notes)}", flush=True)
    return found


METHODS = ("ours", "AutoMultivariateNormal", "AutoLaplace", "pathfinder")


def speed(cases: list[Case], rows: dict[str, Row], key: jax.Array, options: Mapping[str, Any]) -> None:
    """All races, and a line of medians and counts per peer."""
    titles = "".join(f"{name[:16]:>18}" for name in METHODS)
    print(f"\nseconds without compiling, and with\n{'':<28}{titles}")
    races = {}
    for case in cases:
        if case.name in rows:
            try:
                races[case.name] = race(case, rows[case.name], key_of(case, key), options)
            except Exception:
                print(f"{case.name:<28}failed\n{traceback.format_exc()}", flush=True)
    for peer in METHODS[1:]:
        pairs = [(found["ours"], found[peer]) for found in races.values() if peer in found]
        if not pairs:
            continue
        for index, when in enumerate(("without compiling", "with compiling")):
            ratios = np.array([theirs[index] / ours[index] for ours, theirs in pairs])
            print(
                f"{peer}, {when}: ours faster on {np.sum(ratios >= 1)} of {len(ratios)}, "
                f"median ratio {np.median(ratios):.2f}"
            )
    try:
        import pymc_extras  # noqa: F401  (asks whether it is there)
    except ImportError:
        print("pymc-extras is not installed: fit_dadvi left out")
    else:
        print("fit_dadvi left out: it takes PyMC's models, and these are NumPyro's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder with the JSON files; our own copy by default")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="cases or groups; all by default")
    parser.add_argument("--speed", action="store_true", help="race against other libraries, on posteriordb's cases")
    parser.add_argument("--float32", action="store_true", help="single precision; double is the default")
    parser.add_argument("--reparam", action="store_true", help="let the bound choose the centring of sites")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", not arguments.float32)

    names = arguments.cases or (["posteriordb"] if arguments.speed else [])
    cases = load_cases(arguments.data, names)
    if arguments.float32:
        cases = [case for case in cases if case.precision == "any"]
    options = {"reparam": "auto"} if arguments.reparam else {}
    key_fits, key_races = jax.random.split(jax.random.key(arguments.seed))
    print(f"{len(cases)} cases, {'float32' if arguments.float32 else 'float64'}\n{HEADER}")
    rows, failed = [], []
    for case in cases:
        try:
            rows.append(measure(case, key_of(case, key_fits), options))
            print(rows[-1], flush=True)
        except Exception as error:
            failed.append(case.name)
            print(f"{case.name:<28}FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(table(rows))
    if failed:
        print(f"failed: {', '.join(failed)}")
    if arguments.speed:
        speed(cases, {row.case.name: row for row in rows}, key_races, options)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
