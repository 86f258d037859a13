"""All global minima of the CEC-2013 niching landscapes: `multimodal` beside multi-start L-BFGS-B and basin hopping.

    python benchmarks/niching.py [--seeds 50] [--peer-seeds 10] [--first 0] [--only "Vincent 2-D"]

Ours has one rate and one number of components for all landscapes and a number of steps for each, chosen on the seeds
1000 to 1004, as were the peers' hops. A run that spends more than the benchmark's budget of function evaluations is an
error.

A gradient counts as 2 evaluations and a Hessian as D + 2, so a look at a component, with both, is D + 4. Counted are:

- `found.measures`: the first look at every component, those of the line search, and those at new starts;
- K looks for each call of the compiled loop, which begins with one: at most one call for every 16 steps;
- the Newton steps of `result.minima()`, by running them again: a first look, one for every length of the step that was
  tried (also where S was not positive definite and there was no look: an upper bound), and a last one for the answer.

Not counted is what is computed only because components move side by side and arrays keep their shape, and is thrown
away: the empty places of the memory, components that wait for another's line search, those not started anew.

The peers get, on the same seed, as many gradients as ours took looks; and then as many as there are pairs of
evaluations in all of ours, which is (D + 4)/2 times that. They stop when everything is found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize
from threadpoolctl import threadpool_limits

jax.config.update("jax_enable_x64", True)

import bayesrule as blr  # noqa: E402  (after the precision is set)
from bayesrule.fitting.loop import Carry, empty_trace, run_chunk  # noqa: E402  (the same)
from bayesrule.fitting.minima import _POLISH_STEPS  # noqa: E402  (the same)
from bayesrule.models.landscapes import Landscape, landscapes  # noqa: E402  (the same)
from bayesrule.objectives.objective import as_objective  # noqa: E402  (the same)

RATE, COMPONENTS = 0.8, 24
STEPS = dict.fromkeys(("equal maxima", "uneven decreasing maxima", "Himmelblau", "six-hump camel back"), 100)
STEPS |= {"Vincent 1-D": 100, "modified Rastrigin": 100, "Shubert 2-D": 720, "Vincent 2-D": 720}
ACCURACY, DISTANCE = 1e-4, 1e-4
HOPS, HOP = 3, 0.25  # from each start, and how far, in widths of the box


class Run(NamedTuple):
    """One search: the share of the global minima found, how far off the worst of these is, and what it took."""

    ratio: float
    distance: float
    looks: int
    evaluations: int
    seconds: float


@jax.jit
def polishing(polish: Any, objective: Any, starts: Any) -> Any:
    """How many looks `minima()` takes at most from each start: what its Newton steps were shortened by tells."""

    def one(start: Any) -> Any:
        carry = Carry(polish.init(start, objective), jnp.zeros(0, int), empty_trace(_POLISH_STEPS, True))
        how = {"batch_size": None, "diagnose": True}
        trace = run_chunk(polish, objective, None, jax.random.key(0), 1e-15, 0, _POLISH_STEPS, carry, **how).trace
        tried = jnp.where(trace["fraction"] > 0, 1 - jnp.log2(trace["fraction"]), 1 + polish.guard.halvings)
        return 2 + jnp.sum(jnp.where(jnp.isnan(trace["fraction"]), 0, tried))

    return jax.vmap(one)(starts)


def looks(rule: Any, landscape: Landscape, result: Any) -> int:
    """How often a run looked at the function and its two derivatives in one place, `minima()` included."""
    found = result.state.found
    starts = jnp.concatenate([found.position, result.q.each(lambda c: c.mean)])
    taken = np.append(np.asarray(found.hits) > 0, np.ones(COMPONENTS, bool))
    polished = np.asarray(polishing(rule.search.polish, as_objective(landscape.function), starts))[taken]
    chunks = -(-result.steps // 16)
    return int(found.measures) + (chunks - 1) * COMPONENTS + int(np.sum(polished))


def reached(landscape: Landscape, minima: list[Any]) -> tuple[float, float]:
    """The share of the global minima that were found, and the largest distance of one of these to the true one."""
    points = np.array([m.position for m in minima if m.value <= landscape.value + ACCURACY])
    if not len(points):
        return 0.0, 0.0
    points = np.pad(points, ((0, 64 - len(points)), (0, 0)), mode="edge")  # one shape, one compilation
    nearest = np.min(np.linalg.norm(landscape.minima[:, None] - points, axis=2), axis=1)
    return landscape.peak_ratio(points, ACCURACY), float(np.max(nearest[nearest <= landscape.radius], initial=0.0))


def recipe(landscape: Landscape) -> Any:
    return blr.multimodal(RATE, components=COMPONENTS, bounds=(landscape.low, landscape.high))


def ours(landscape: Landscape, seed: int) -> Run:
    rule, began = recipe(landscape), time.perf_counter()
    steps, key = STEPS[landscape.name], jax.random.key(seed)
    result = blr.fit(rule, landscape.function, None, steps=steps, key=key)
    minima = result.minima()
    seconds = time.perf_counter() - began
    assert result.reason == "steps", result.reason
    count = looks(rule, landscape, result)
    evaluations = count * (landscape.low.size + 4)
    if evaluations > landscape.budget:
        raise ValueError(f"{landscape.name}, seed {seed}: {evaluations} evaluations, and {landscape.budget} allowed.")
    return Run(*reached(landscape, minima), count, evaluations, seconds)


def until_complete(landscape: Landscape, seed: int) -> float:
    """The evaluations of ours after which `minima()` has all of them: the same run, looked into twenty times.

    The count is the uncut run's; each cut costs another K looks that it leaves out. What `minima()` has only because it
    polished a component under way may be gone again later.
    """
    rule, steps, result = recipe(landscape), STEPS[landscape.name] // 20, None
    for _ in range(20):
        result = blr.fit(rule, landscape.function, result, steps=steps, key=jax.random.key(seed))
        if reached(landscape, result.minima())[0] == 1:
            return looks(rule, landscape, result) * (landscape.low.size + 4)
    return np.inf


class Spent(Exception):
    """The gradients are used up, or everything is found."""


class Counted:
    """The function and its gradient for SciPy, counting, and after how many gradients each minimum was found."""

    def __init__(self, landscape: Landscape, limit: int):
        self.landscape, self.limit, self.count = landscape, limit, 0
        self.arrivals = np.full(len(landscape.minima), np.inf)
        self.distances = np.zeros(len(landscape.minima))

    def __call__(self, x: Any) -> tuple[float, np.ndarray]:
        if self.count == self.limit:
            raise Spent
        self.count += 1
        both = np.asarray(_both(self.landscape.function, x))
        return both[0], both[1:]

    def note(self, x: Any, value: float, *_: Any) -> None:
        """A local minimum that was arrived at."""
        away = np.linalg.norm(self.landscape.minima - x, axis=1)
        nearest = np.argmin(away)
        if abs(value - self.landscape.value) > ACCURACY or away[nearest] > self.landscape.radius:
            return
        new = np.isinf(self.arrivals[nearest])
        self.distances[nearest] = away[nearest] if new else min(away[nearest], self.distances[nearest])
        self.arrivals[nearest] = min(self.arrivals[nearest], self.count)
        if np.all(np.isfinite(self.arrivals)):
            raise Spent


@partial(jax.jit, static_argnums=0)
def _both(function: Callable, x: Any) -> Any:
    value, slope = jax.value_and_grad(function)(x)
    return jnp.append(value, slope)


def multi_start(counted: Counted, start: np.ndarray, how: dict[str, Any], rng: Any) -> None:
    """L-BFGS-B from one start."""
    end = optimize.minimize(counted, start, **how)
    counted.note(end.x, end.fun)


def basin_hopping(counted: Counted, start: np.ndarray, how: dict[str, Any], rng: Any) -> None:
    """A few hops from one start."""
    hop = HOP * float(np.max(counted.landscape.high - counted.landscape.low))
    optimize.basinhopping(
        counted, start, niter=HOPS, stepsize=hop, minimizer_kwargs=how, callback=counted.note, rng=rng
    )


PEERS = {"multi-start L-BFGS-B": multi_start, "basin hopping": basin_hopping}


def peer(search: Callable, landscape: Landscape, seed: int, limit: int) -> tuple[Counted, float]:
    """The search from one uniform start after another, until its gradients are used up or everything is found."""
    counted, rng, began = Counted(landscape, limit), np.random.default_rng(seed), time.perf_counter()
    bounds = optimize.Bounds(landscape.low, landscape.high)
    how = {"method": "L-BFGS-B", "jac": True, "bounds": bounds}
    # One thread: on few cores those of SciPy's BLAS and XLA's wait for each other, and it takes ten times as long.
    with threadpool_limits(1, "blas"), suppress(Spent):
        while True:
            search(counted, rng.uniform(landscape.low, landscape.high), how, rng)
    return counted, time.perf_counter() - began


def compare(landscape: Landscape, seeds: range, peer_seeds: range) -> None:
    steps, began = STEPS[landscape.name], time.perf_counter()
    ours(landscape, seeds[0])  # compiles
    compiling = time.perf_counter() - began
    runs = {seed: ours(landscape, seed) for seed in seeds}
    each = Run(*map(np.array, zip(*runs.values(), strict=True)))
    near = (each.ratio == 1) & (each.distance <= DISTANCE)
    print(f"{landscape.name}: {len(landscape.minima)} global minima, {steps} steps, budget {landscape.budget}")
    print(f"  ours, {len(seeds)} seeds: {_shares(each.ratio)}, all within {DISTANCE:g} {np.mean(near):.0%}")
    print(f"    worst distance {np.max(each.distance):.1e}, {np.mean(each.looks):.0f} looks", end=", ")
    print(f"{np.mean(each.evaluations):.0f} evaluations (most {np.max(each.evaluations)})", end=", ")
    print(f"{np.mean(each.seconds):.2f} s a seed after {compiling:.0f} s of compiling", flush=True)
    print(f"    {_needed([until_complete(landscape, seed) for seed in peer_seeds])}", flush=True)
    for name, search in PEERS.items():
        limits = np.array([(runs[seed].looks, runs[seed].evaluations // 2) for seed in peer_seeds])
        ends = [peer(search, landscape, seed, limit) for seed, limit in zip(peer_seeds, limits[:, 1], strict=True)]
        arrivals = np.array([end.arrivals for end, _ in ends])
        shares = np.mean(arrivals[:, None] <= limits[:, :, None], axis=2)
        print(f"  {name}, {len(peer_seeds)} seeds:")
        print(f"    as many gradients as our looks: {_shares(shares[:, 0])}")
        print(f"    as many evaluations: {_shares(shares[:, 1])}")
        worst, seconds = max(np.max(end.distances) for end, _ in ends), np.mean([seconds for _, seconds in ends])
        print(f"    worst distance {worst:.1e}, {seconds:.2f} s a seed")
        print(f"    {_needed(2 * np.max(arrivals, axis=1))}", flush=True)


def _shares(ratios: Any) -> str:
    return f"all found {np.mean(ratios == 1):.0%}, peak ratio {np.mean(ratios):.4f}"


def _needed(evaluations: Any) -> str:
    """After how many evaluations everything was found, where it was."""
    done = [count for count in evaluations if np.isfinite(count)]
    mean = f", after {np.mean(done):.0f} evaluations on average" if done else ""
    return f"complete on {len(done)} of {len(evaluations)}{mean}"


def main() -> None:
    names = [landscape.name for landscape in landscapes()]
    parser = argparse.ArgumentParser(description="All global minima, beside SciPy.")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--peer-seeds", type=int, default=10, help="how many of these seeds the peers run on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    for landscape in landscapes():
        if landscape.name in given.only:
            compare(landscape, seeds, seeds[: given.peer_seeds])


if __name__ == "__main__":
    main()
