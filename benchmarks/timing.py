"""How long calls take, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def fastest(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least time of each, interleaved, after one call to compile; what is 20 times slower than the fastest runs
    in every tenth round only."""
    for run in runs.values():
        jax.block_until_ready(run())
    best = dict.fromkeys(runs, np.inf)
    for turn in range(repeats):
        for name, run in runs.items():
            if turn % 10 and best[name] > 20 * min(best.values()):
                continue
            began = time.perf_counter()
            jax.block_until_ready(run())
            best[name] = min(best[name], time.perf_counter() - began)
    return best
