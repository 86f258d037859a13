"""Posteriors with known moments, each fitted by one line at default settings: is "trust" to be trusted, and how fast?

    python benchmarks/posteriordb.py [--data FOLDER] [--cases NAME …] [--speed [--peers NAME …] [--pymc PYTHON] [--cpu]]
        [--float32] [--reparam]

For every case: the family, the bound, Pareto k̂, the verdict, the largest errors of means (in reference standard
deviations) and of standard deviations (in per cent), in unconstrained and constrained variables, and the seconds of a
first and of a second call. Then the 2×2 table of trusted or not against good or not, where good means that all means
are within 0.1 sd and all sds within 10 %, up to chance. Cases are listed apart if a mode of theirs has no draw at all:
no diagnostic sees a mode that no start reached.

With --speed also, on posteriordb's cases without the centred schools: NumPyro's AutoMultivariateNormal (Adam, the best
of three rates, as many steps as its bound takes to come within 0.05 of our Gaussian's), AutoLaplaceApproximation and
blackjax's pathfinder. First calls are made after all compiled programs have been dropped; then all take turns, and the
least time of each counts. Ours is given twice: until a Gaussian of its steps has reached the bound that
AutoMultivariateNormal is asked for (everything from the call on, with the search for modes), and until the verdict.
With --cpu all seconds are those of the processor, which a busy machine changes less. With --pymc PYTHON, an interpreter
that has pymc-extras, also its fit_dadvi, three calls in a process of its own. `--reparam` adds `reparam="auto"` to the
calls for NumPyro's models.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


clock: Callable[[], float] = time.perf_counter  # or the processor's time of this process, for a busy machine


def fit(case: Case, key: jax.Array, options: Mapping[str, Any]) -> Any:
    """The default call, one line; `options` are for NumPyro's models."""
    if case.model is not None:
        from bayesrule.interop import numpyro as bridge

        return bridge.fit(case.model, case.args, dict(case.kwargs), key=key, **options)
    import bayesrule as blr

    return blr.infer(case.log_density, case.start, constraints=dict(case.constraints), key=key)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds until it was computed."""
    began = clock()
    result = run()
    jax.block_until_ready(jax.tree.leaves(result))
    return result, clock() - began


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
CHUNK, MOST_STEPS, BOUND_DRAWS = 100, 50_000, 2000
OUR_DRAWS = 20_000  # for the bounds of our own Gaussians
BOUND_SLACK = 0.05
ROUNDS = 5  # in which all methods take turns; the least time of each counts
DADVI_LONGEST = 200.0  # seconds: PyTensor compiles C in a first run, and ARMA did not end in 300
LONGEST = 25.0  # seconds for one rate of AutoMultivariateNormal; a method as slow as that takes one turn only


class Racer(NamedTuple):
    """A method on a case, after its first call.

    Attributes:
        first: the seconds of the first call, with everything that it compiles.
        again: runs it once more, without compiling, and returns the seconds.
        note: what it took, or how good its answer is.
    """

    first: float
    again: Callable[[], float]
    note: str


class Watched(NamedTuple):
    """The whole default call, from the model to the verdict, with the Gaussians on its way.

    Attributes:
        posterior: what it returned.
        seconds: how long it took.
        marks: where each Gaussian was before its first step and after every step, and the seconds until then.
    """

    posterior: Any
    seconds: float
    marks: list[tuple[float, Any]]


def watch_ours(case: Case, key: jax.Array, options: Mapping[str, Any]) -> Watched:
    """The whole default call. To note where a Gaussian is takes no time: bounds are computed afterwards."""
    from bayesrule.inference import infer as module
    from bayesrule.inference.gaussian import place

    marks: list[tuple[float, Any]] = []
    bare = module.fit_gaussian

    def fit_gaussian(density: Any, start: Any, rng: Any, *, follow: Any, **how: Any) -> Any:
        marks.append((clock() - began, place(start)))

        def note(at: Any, bound: float, steps: int) -> Any:
            marks.append((clock() - began, at))
            return follow(at, bound, steps)

        return bare(density, start, rng, follow=note, **how)

    module.fit_gaussian = fit_gaussian
    try:
        began = clock()
        posterior = fit(case, key, options)
        seconds = clock() - began
    finally:
        module.fit_gaussian = bare
    return Watched(posterior, seconds, marks)


def first_within(watched: Watched, target: float) -> int | None:
    """The first of its Gaussians whose bound, at fresh draws, is at least the target."""
    from bayesrule.inference.density import log_densities

    half = np.random.default_rng(0).standard_normal((OUR_DRAWS // 2, watched.posterior.density.size))
    noise = np.concatenate([half, -half])
    for number, (_, at) in enumerate(watched.marks):
        if float(np.mean(log_densities(watched.posterior.density, at.points(noise)))) + at.entropy >= target:
            return number
    return None


def start_ours(case: Case, key: jax.Array, options: Mapping[str, Any], target: float) -> tuple[Watched, int | None]:
    """The first call, and which of its Gaussians has reached the target."""
    watched = watch_ours(case, key, options)
    return watched, first_within(watched, target)


def start_adam(case: Case, key: jax.Array, rate: float, target: float) -> Racer | float:
    """AutoMultivariateNormal by Adam, for as many steps as its bound, from many draws, takes to reach `target`.

    Its time is that of the steps alone: without those that look at the bound, and after the first call without the
    guide's start, which every fit of NumPyro's has to make.

    Returns:
        The racer, or the largest bound that it got to if that is not enough.
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

    begin, start = timed(lambda: svi.init(key_start, *args, **kwargs))
    program, compiling = timed(lambda: run.lower(begin, args).compile())
    state, best, seconds, chunks, look = begin, -np.inf, 0.0, 0, 1
    ends = clock() + LONGEST
    while best < target:
        if chunks * CHUNK >= MOST_STEPS or clock() > ends:
            return best
        state, taken = timed(lambda state=state: program(state, args))
        seconds, chunks = seconds + taken, chunks + 1
        if chunks >= look:  # at every chunk first, and then at every twentieth part of the way
            best, look = max(best, float(bound(state, args))), max(chunks + 1, int(1.05 * chunks))

    def again() -> Any:
        state = begin
        for _ in range(chunks):
            state = program(state, args)
        return state

    return Racer(start + compiling + seconds, lambda: timed(again)[1], f"rate {rate:g}, {chunks * CHUNK} steps")


def best_adam(case: Case, keys: Iterable[jax.Array], target: float) -> Racer | float:
    """The quickest of three rates, each compiled by itself, or the largest bound of all if none is good enough."""
    reached: list[tuple[float, Racer]] = []
    best = -np.inf
    for rate, key in zip(RATES, keys, strict=True):
        forget_programs()
        racer = start_adam(case, key, rate, target)
        if isinstance(racer, Racer):
            reached.append((racer.again(), racer))
        else:
            best = max(best, racer)
    return min(reached, key=lambda pair: pair[0])[1] if reached else best


def start_laplace(case: Case, key: jax.Array) -> Racer:
    """AutoLaplaceApproximation with BFGS, and 10,000 draws of it."""
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
    draws, first = timed(run)
    return Racer(start + first, lambda: timed(run)[1], off_by(case, draws))


def start_pathfinder(case: Case, key: jax.Array) -> Racer:
    """blackjax's pathfinder on NumPyro's log density, and 10,000 draws of it."""
    import blackjax
    from numpyro.infer.util import initialize_model

    model, args, kwargs = case.as_numpyro()
    key_start, key_run = jax.random.split(key)
    begin = lambda: initialize_model(key_start, model, model_args=args, model_kwargs=kwargs, dynamic_args=True)
    start, starting = timed(begin)

    @jax.jit
    def approximate(key: Any, position: Any, data: Any) -> Any:
        potential = start.potential_fn(*data, **kwargs)
        key_path, key_draws = jax.random.split(key)
        state, _ = blackjax.vi.pathfinder.approximate(key_path, lambda z: -potential(z), position)
        draws, _ = blackjax.vi.pathfinder.sample(key_draws, state, 10_000)
        return jax.vmap(start.postprocess_fn(*data, **kwargs))(draws)

    run = lambda: approximate(key_run, start.param_info.z, args)
    draws, first = timed(run)
    return Racer(starting + first, lambda: timed(run)[1], off_by(case, draws))


def race_dadvi(case: Case, python: Path) -> tuple[float, float, str]:
    """pymc-extras' fit_dadvi in a process of its own, three calls: seconds of its optimiser alone, of a whole call.

    PyMC builds its functions in every call, so that its time without compiling is that of the optimiser; the least of
    each counts. What PyTensor has compiled in an earlier call or run it reads from disk, which is to its advantage.
    """
    assert case.model is not None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "data.npz", Path(folder) / "draws.npz"
        np.savez(source, *case.args)
        peer = Path(__file__).with_name("dadvi_peer.py")
        command = [str(python), str(peer), case.model.__name__, str(source), str(target), "3"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DADVI_LONGEST)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        found = dict(np.load(target))
    return float(min(found["optimizer"])), float(min(found["total"])), off_by(case, found)


def off_by(case: Case, draws: Any) -> str:
    """How far the draws of a peer are off, in words."""
    errors = judge(case, draws, "unconstrained")
    return f"off by {errors.mean:.2f} sd, {errors.sd:.0%}"


OURS, BOUND, ADAM, DADVI = "ours, verdict", "ours, bound", "AutoMultivariateNormal", "fit_dadvi"
PEERS = (ADAM, "AutoLaplace", "pathfinder", DADVI)
Times = dict[str, tuple[float, float]]  # by method: seconds without compiling, and of a first call


def race(
    case: Case, row: Row, key: jax.Array, options: Mapping[str, Any], peers: Sequence[str], pymc: Path | None
) -> Times:
    """All methods on one case: first calls, each after all programs have been dropped, then rounds in turns."""
    keys = jax.random.split(key, 6)
    target = row.gaussian_bound - BOUND_SLACK
    starts: dict[str, Callable[[], Racer | float]] = {
        ADAM: lambda: best_adam(case, keys[1:4], target),
        "AutoLaplace": lambda: start_laplace(case, keys[4]),
        "pathfinder": lambda: start_pathfinder(case, keys[5]),
    }
    starts = {name: start for name, start in starts.items() if name in peers}
    racers: dict[str, Racer] = {}
    forget_programs()
    ours, number = start_ours(case, keys[0], options, target)
    until = lambda watched: np.inf if number is None else watched.marks[number][0]
    times: Times = {}
    notes = [f"ours {ours.posterior.trust}"]
    for name, start in starts.items():
        forget_programs()
        try:
            racer = start()
        except Exception as error:
            notes.append(f"{name} failed: {type(error).__name__}")
            continue
        if isinstance(racer, Racer):
            racers[name] = racer
            notes.append(f"{name} {racer.note}")
        else:
            times[name] = (np.inf, np.inf)
            notes.append(f"{name} still {row.gaussian_bound - racer:.2f} below")
    least = dict.fromkeys((OURS, BOUND, *racers), np.inf)
    for turn in range(ROUNDS + 1):  # In the first turn programs that were dropped since are compiled again.
        watched = watch_ours(case, keys[0], options)
        least[OURS], least[BOUND] = min(least[OURS], watched.seconds), min(least[BOUND], until(watched))
        for name, racer in racers.items():
            if turn > 1 and least[name] * (ROUNDS - 1) > LONGEST:
                continue
            least[name] = min(least[name], racer.again())
    first = {OURS: ours.seconds, BOUND: until(ours)} | {name: racer.first for name, racer in racers.items()}
    times |= {name: (seconds, first[name]) for name, seconds in least.items()}
    if pymc is not None:
        try:
            bare, whole, note = race_dadvi(case, pymc)
            times[DADVI] = (bare, whole)
            notes.append(f"{DADVI} {note}")
        except Exception as error:
            notes.append(f"{DADVI} failed: {type(error).__name__}: {str(error)[:80]}")
    print(race_line(case.name, times) + "  " + "; ".join(notes), flush=True)
    return times


def race_line(name: str, times: Times) -> str:
    """All seconds without and with compiling."""
    line = f"{name:<28}"
    for method in (BOUND, OURS, *PEERS):
        line += "".join(f"{seconds:9.3f}" for seconds in times[method]) if method in times else f"{'–':>9}" * 2
    return line


def summarise(races: Mapping[str, Times]) -> list[str]:
    """Two lines per peer: on how many cases ours is faster, and the median ratio, without and with compiling."""
    lines = []
    for peer in PEERS:
        for own in (BOUND, OURS):
            pairs = [(times[own], times[peer]) for times in races.values() if peer in times]
            if not pairs:
                lines.append(f"{peer}: not run")
                break
            bare, whole = (np.array([theirs[k] / ours[k] for ours, theirs in pairs]) for k in (0, 1))
            lines.append(
                f"{peer} against {own}: without compiling ours is faster on {np.sum(bare > 1)} of {len(pairs)}, median "
                f"ratio {np.median(bare):.2f}; with it not slower on {np.sum(whole >= 1)} of {len(pairs)}, median "
                f"ratio {np.median(whole):.2f}"
            )
    return lines


def speed(
    cases: list[Case],
    rows: dict[str, Row],
    key: jax.Array,
    options: Mapping[str, Any],
    peers: Sequence[str],
    pymc: Path | None,
) -> None:
    """All races, and two lines per peer."""
    kind = "seconds" if clock is time.perf_counter else "the processor's seconds"
    print(f"\n{kind} without compiling, and of a first call")
    print(f"{'':<28}" + "".join(f"{name[:17]:>18}" for name in (BOUND, OURS, *PEERS)))
    races: dict[str, Times] = {}
    for case in cases:
        if case.name in rows and case.expected != "centring":  # whose bound no Gaussian is good for
            try:
                races[case.name] = race(case, rows[case.name], key_of(case, key), options, peers, pymc)
            except Exception:
                print(f"{case.name:<28}failed\n{traceback.format_exc()}", flush=True)
    print("\n".join(summarise(races)))
    if pymc is None:
        print(f"{DADVI} takes PyMC's models, in an environment of its own: --pymc PYTHON with pymc-extras installed")


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder with the JSON files; our own copy by default")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="cases or groups; all by default")
    parser.add_argument("--speed", action="store_true", help="race against other libraries, on posteriordb's cases")
    parser.add_argument("--pymc", type=Path, metavar="PYTHON", help="with --speed: an interpreter with pymc-extras")
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS[:3], help="with --speed: against whom")
    parser.add_argument("--cpu", action="store_true", help="with --speed: the processor's time, on a busy machine")
    parser.add_argument("--float32", action="store_true", help="single precision; double is the default")
    parser.add_argument("--reparam", action="store_true", help="let the bound choose the centring of sites")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", not arguments.float32)
    clock = time.process_time if arguments.cpu else time.perf_counter
    if arguments.speed:  # A first call compiles, whatever there is on disk.
        jax.config.update("jax_enable_compilation_cache", False)

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
        speed(cases, {row.case.name: row for row in rows}, key_races, options, arguments.peers, arguments.pymc)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
