"""All global minima of the CEC-2013 niching functions: `multimodal`, multi-start L-BFGS-B and basin hopping.

    python benchmarks/niching.py [--seeds 50] [--peer-seeds 10] [--first 0] [--only "Vincent 2-D"]

Ours has one rate and one number of components for all functions, and a number of steps for each; these and the peers'
hops were chosen on the seeds 1000 to 1004. A run that exceeds the benchmark's budget of function evaluations is an
error.

A *measurement* is the value, gradient and Hessian at one point. A gradient counts as 2 evaluations and a Hessian as
D + 2, with the value one measurement is D + 4 evaluations. Counted are:

- `search.measures`: the first measurement of every component, those of the line search, and those at restarts;
- K measurements for each call of the compiled loop, which starts with them: at most one call for every 16 steps;
- the Newton steps of `result.minima()`, found by running them again: a first measurement, one for every step length
  that was tried (an upper bound: none is made where S is not positive definite), and a last one for the result.

Not counted is what is computed and discarded only because all components move in one array program: empty slots of the
record, components that wait for another's line search, components that are not restarted.

The peers get, on the same seed, as many gradients as ours took measurements; and then half as many gradients as all our
evaluations, which is (D + 4)/2 times as many. They stop when all minima are found.
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

import bayesrule as blr  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.fitting.loop import Carry, empty_trace, run_chunk  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.fitting.minima import _POLISH_STEPS  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.models.landscapes import Landscape, landscapes  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.objectives.objective import as_objective  # noqa: E402  (JAX's precision must be set first.)

RATE, COMPONENTS = 0.8, 24
STEPS = dict.fromkeys(("equal maxima", "uneven decreasing maxima", "Himmelblau", "six-hump camel back"), 100)
STEPS |= {"Vincent 1-D": 100, "modified Rastrigin": 100, "Shubert 2-D": 720, "Vincent 2-D": 720}
ACCURACY, DISTANCE = 1e-4, 1e-4
HOPS, HOP = 3, 0.25  # Hops from each start, and their size as a share of the box.


class Run(NamedTuple):
    """One search: the share of the global minima found, the largest error of their positions, and the cost."""

    ratio: float
    distance: float
    measurements: int
    evaluations: int
    seconds: float


@jax.jit
def polishing_measurements(polish: Any, objective: Any, starts: Any) -> Any:
    """An upper bound on the measurements of `minima()` from each start, from the fractions of its Newton steps."""

    def one(start: Any) -> Any:
        carry = Carry(polish.init(start, objective), jnp.zeros(0, int), empty_trace(_POLISH_STEPS, True))
        options = {"batch_size": None, "diagnose": True}
        trace = run_chunk(polish, objective, None, jax.random.key(0), 1e-15, 0, _POLISH_STEPS, carry, **options).trace
        tried = jnp.where(trace["fraction"] > 0, 1 - jnp.log2(trace["fraction"]), 1 + polish.guard.halvings)
        return 2 + jnp.sum(jnp.where(jnp.isnan(trace["fraction"]), 0, tried))

    return jax.vmap(one)(starts)


def count_measurements(rule: Any, landscape: Landscape, result: Any) -> int:
    """The measurements of a run, those of `minima()` included."""
    search = result.state.search
    starts = jnp.concatenate([search.position, result.q.each(lambda c: c.mean)])
    used = np.append(np.asarray(search.hits) > 0, np.ones(COMPONENTS, bool))
    polished = np.asarray(polishing_measurements(rule.search.polish, as_objective(landscape.function), starts))[used]
    chunks = -(-result.steps // 16)
    return int(search.measures) + (chunks - 1) * COMPONENTS + int(np.sum(polished))


def reached(landscape: Landscape, minima: list[Any]) -> tuple[float, float]:
    """The share of the global minima that were found, and the largest distance of these to the true ones."""
    points = np.array([m.position for m in minima if m.value <= landscape.value + ACCURACY])
    if not len(points):
        return 0.0, 0.0
    points = np.pad(points, ((0, 64 - len(points)), (0, 0)), mode="edge")  # One shape needs one compilation.
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
    count = count_measurements(rule, landscape, result)
    evaluations = count * (landscape.low.size + 4)
    if evaluations > landscape.budget:
        raise ValueError(f"{landscape.name}, seed {seed}: {evaluations} evaluations, more than {landscape.budget}.")
    return Run(*reached(landscape, minima), count, evaluations, seconds)


def until_complete(landscape: Landscape, seed: int) -> float:
    """Our evaluations until `minima()` has all of them: the same run, interrupted twenty times to ask.

    The count is that of an uninterrupted run, without the K measurements of each interruption. A minimum that
    `minima()` has only because it polished an unconverged component may be lost again later.
    """
    rule, steps, result = recipe(landscape), STEPS[landscape.name] // 20, None
    for _ in range(20):
        result = blr.fit(rule, landscape.function, result, steps=steps, key=jax.random.key(seed))
        if reached(landscape, result.minima())[0] == 1:
            return count_measurements(rule, landscape, result) * (landscape.low.size + 4)
    return np.inf


class Finished(Exception):
    """The gradients are used up, or all minima are found."""


class CountedFunction:
    """The function and its gradient for SciPy; counts the gradients, and after how many each minimum was found."""

    def __init__(self, landscape: Landscape, limit: int):
        self.landscape, self.limit, self.count = landscape, limit, 0
        self.arrivals = np.full(len(landscape.minima), np.inf)
        self.distances = np.zeros(len(landscape.minima))

    def __call__(self, x: Any) -> tuple[float, np.ndarray]:
        if self.count == self.limit:
            raise Finished
        self.count += 1
        value_and_gradient = np.asarray(_value_and_gradient(self.landscape.function, x))
        return value_and_gradient[0], value_and_gradient[1:]

    def record(self, x: Any, value: float, *_: Any) -> None:
        """Record a local minimum that the search has reached."""
        distances = np.linalg.norm(self.landscape.minima - x, axis=1)
        nearest = np.argmin(distances)
        if abs(value - self.landscape.value) > ACCURACY or distances[nearest] > self.landscape.radius:
            return
        new = np.isinf(self.arrivals[nearest])
        self.distances[nearest] = distances[nearest] if new else min(distances[nearest], self.distances[nearest])
        self.arrivals[nearest] = min(self.arrivals[nearest], self.count)
        if np.all(np.isfinite(self.arrivals)):
            raise Finished


@partial(jax.jit, static_argnums=0)
def _value_and_gradient(function: Callable, x: Any) -> Any:
    value, gradient = jax.value_and_grad(function)(x)
    return jnp.append(value, gradient)


def multi_start(counted: CountedFunction, start: np.ndarray, options: dict[str, Any], rng: Any) -> None:
    """L-BFGS-B from one start."""
    end = optimize.minimize(counted, start, **options)
    counted.record(end.x, end.fun)


def basin_hopping(counted: CountedFunction, start: np.ndarray, options: dict[str, Any], rng: Any) -> None:
    """A few hops from one start."""
    hop = HOP * float(np.max(counted.landscape.high - counted.landscape.low))
    optimize.basinhopping(
        counted, start, niter=HOPS, stepsize=hop, minimizer_kwargs=options, callback=counted.record, rng=rng
    )


PEERS = {"multi-start L-BFGS-B": multi_start, "basin hopping": basin_hopping}


def run_peer(search: Callable, landscape: Landscape, seed: int, limit: int) -> tuple[CountedFunction, float]:
    """Search from uniform starts until the gradients are used up or all minima are found."""
    counted, rng, began = CountedFunction(landscape, limit), np.random.default_rng(seed), time.perf_counter()
    bounds = optimize.Bounds(landscape.low, landscape.high)
    options = {"method": "L-BFGS-B", "jac": True, "bounds": bounds}
    # On few cores the threads of SciPy's BLAS and of XLA wait for each other, which takes ten times as long.
    with threadpool_limits(1, "blas"), suppress(Finished):
        while True:
            search(counted, rng.uniform(landscape.low, landscape.high), options, rng)
    return counted, time.perf_counter() - began


def compare(landscape: Landscape, seeds: range, peer_seeds: range) -> None:
    steps, began = STEPS[landscape.name], time.perf_counter()
    ours(landscape, seeds[0])  # This run compiles.
    compiling = time.perf_counter() - began
    runs = {seed: ours(landscape, seed) for seed in seeds}
    each = Run(*map(np.array, zip(*runs.values(), strict=True)))
    near = (each.ratio == 1) & (each.distance <= DISTANCE)
    print(f"{landscape.name}: {len(landscape.minima)} global minima, {steps} steps, budget {landscape.budget}")
    print(f"  ours, {len(seeds)} seeds: {_shares(each.ratio)}, all within {DISTANCE:g} {np.mean(near):.0%}")
    print(f"    worst distance {np.max(each.distance):.1e}, {np.mean(each.measurements):.0f} measurements", end=", ")
    print(f"{np.mean(each.evaluations):.0f} evaluations (most {np.max(each.evaluations)})", end=", ")
    print(f"{np.mean(each.seconds):.2f} s a seed after {compiling:.0f} s of compiling", flush=True)
    print(f"    {_needed([until_complete(landscape, seed) for seed in peer_seeds])}", flush=True)
    for name, search in PEERS.items():
        limits = np.array([(runs[seed].measurements, runs[seed].evaluations // 2) for seed in peer_seeds])
        ends = [run_peer(search, landscape, seed, limit) for seed, limit in zip(peer_seeds, limits[:, 1], strict=True)]
        arrivals = np.array([end.arrivals for end, _ in ends])
        shares = np.mean(arrivals[:, None] <= limits[:, :, None], axis=2)
        print(f"  {name}, {len(peer_seeds)} seeds:")
        print(f"    as many gradients as our measurements: {_shares(shares[:, 0])}")
        print(f"    as many evaluations: {_shares(shares[:, 1])}")
        worst, seconds = max(np.max(end.distances) for end, _ in ends), np.mean([seconds for _, seconds in ends])
        print(f"    worst distance {worst:.1e}, {seconds:.2f} s a seed")
        print(f"    {_needed(2 * np.max(arrivals, axis=1))}", flush=True)


def _shares(ratios: Any) -> str:
    return f"all found {np.mean(ratios == 1):.0%}, peak ratio {np.mean(ratios):.4f}"


def _needed(evaluations: Any) -> str:
    """In how many runs all minima were found, and after how many evaluations on average."""
    done = [count for count in evaluations if np.isfinite(count)]
    mean = f", after {np.mean(done):.0f} evaluations on average" if done else ""
    return f"complete on {len(done)} of {len(evaluations)}{mean}"


def main() -> None:
    names = [landscape.name for landscape in landscapes()]
    parser = argparse.ArgumentParser(description="All global minima, compared with SciPy.")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--peer-seeds", type=int, default=10, help="how many of these seeds the peers run on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for landscape in landscapes():
        if landscape.name in arguments.only:
            compare(landscape, seeds, seeds[: arguments.peer_seeds])


if __name__ == "__main__":
    main()
