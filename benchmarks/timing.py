"""How every ratio of these benchmarks is measured: calls in turns, in one process, and the least time of each.

Other work on the machine only ever makes a call slower, so the least time of many calls is the best estimate of what
the call itself costs. Calls take turns because the speed of a machine drifts (temperature, other work): if one program
ran after the other, the drift would look like a difference between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np

from bayesrule.numerics.programs import release_programs

Name = TypeVar("Name", bound=Hashable)


def seconds_of(run: Callable[[], Any]) -> float:
    """The time of one call, until its results are computed."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def fastest(runs: dict[Name, Callable[[], Any]], repeats: int) -> dict[Name, float]:
    """The least seconds of each call over `repeats` rounds in which all take turns, after one call to compile.

    A call that is 20 times slower than the fastest one takes part in every tenth round only.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(runs, np.inf)
    for turn in range(repeats):
        for name, run in runs.items():
            if turn % 10 and best[name] > 20 * min(best.values()):
                continue
            best[name] = min(best[name], seconds_of(run))
    return best


def seconds_per_iteration(fits: dict[Name, tuple[Callable[[int], Any], int]], repeats: int) -> dict[Name, float]:
    """The least seconds of one iteration of each fit: the difference of 1 + n iterations and one, divided by n.

    The difference leaves out what a call costs once: checks, transfers of the data, the result. `fits` has for each
    name a function of the number of iterations, and n.
    """
    one = fastest({name: lambda fit=fit: fit(1) for name, (fit, _) in fits.items()}, repeats)
    more = fastest({name: lambda fit=fit, n=n: fit(1 + n) for name, (fit, n) in fits.items()}, repeats)
    return {name: (more[name] - one[name]) / n for name, (_, n) in fits.items()}


def compare(name: str, seconds: float, peer: str, peer_seconds: float, target: float) -> str:
    """A line with the ratio of our time to a peer's, and whether it is within the target."""
    ratio = seconds / peer_seconds
    verdict = "ok" if ratio <= target else "MISSED"
    return f"  {f'{name} / {peer}':<54} ratio {ratio:7.4f}   target ≤ {target}   {verdict}"


def first_call(name: str, run: Callable[[], Any], target: float = 5.0) -> str:
    """A line with the seconds of the first call, tracing and compilation included, with nothing compiled before."""
    jax.clear_caches()
    release_programs()
    seconds = seconds_of(run)
    return f"  first call, {name:<42}{seconds:6.2f} s   target ≤ {target:g}   {'ok' if seconds <= target else 'MISSED'}"
