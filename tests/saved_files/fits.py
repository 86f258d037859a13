"""Fits that were cut on their way, one for every way in which data come: what `make.py` saves and the tests resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr
from saved_files.kinds import (
    BATCH,
    BOX,
    LABELS,
    ROWS,
    TARGETS,
    clusters,
    logistic_loss,
    logistic_model,
    numbers,
    regression,
    two_minima,
)

KEY = 23


class Killed(BaseException):
    """In place of the signal that nothing can catch."""


class Fit(NamedTuple):
    """A fit from a start or from its checkpoint: `run(start, steps, **more)`; how long it is, and where it was cut."""

    run: Callable[..., blr.Result]
    start: Any
    steps: int
    cut: int


def key_of(start: Any) -> Any:
    """A fit that goes on has the key of its checkpoint."""
    return None if isinstance(start, blr.Result) else jax.random.key(KEY)


def data() -> Any:
    return jnp.asarray(ROWS), jnp.asarray(LABELS)


def all_rows(start: Any, steps: int, **more: Any) -> blr.Result:
    """Steps on all rows until they converge, which the test of convergence has begun to watch."""
    return blr.fit(blr.newton(0.4), regression().objective, start, data(), steps=steps, tolerance=1e-10, **more)


def mini_batches(start: Any, steps: int, **more: Any) -> blr.Result:
    """Steps of a plan, cut in the second of its epochs."""
    objective, batches = regression().objective, {"batch_size": BATCH, "key": key_of(start)}
    return blr.fit(blr.vogn(1e-3), objective, start, data(), steps=steps, **batches, **more)


def watched(start: Any, steps: int, **more: Any) -> blr.Result:
    """With all else that a checkpoint has: metrics, skipped batches and parameters that stay."""
    return _watched(start, steps, jnp.asarray(LABELS), **more)


def past_its_best(start: Any, steps: int, **more: Any) -> blr.Result:
    """Other labels, so that the best state comes early: the checkpoint has it beside the last one."""
    return _watched(start, steps, 1 - jnp.asarray(LABELS), **more)


def _watched(start: Any, steps: int, labels: Any, **more: Any) -> blr.Result:
    x, y = data()

    def output(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["w"][params["order"]]

    objective = blr.Objective(logistic_loss, output=output, size=len(ROWS), regularizer=1.0)
    broken = x.at[2, 0].set(jnp.nan)
    options = {"batch_size": BATCH, "key": key_of(start), "skip_nonfinite": 9, "every": 2}
    validation = {"validation": (x, labels), "patience": 4}
    return blr.fit(blr.adam(0.1), objective, start, (broken, y), steps=steps, **options, **validation, **more)


def stream(start: Any, steps: int, **more: Any) -> blr.Result:
    """Rows of a stream that can begin anywhere."""
    objective, batches = regression().objective, {"batch_size": BATCH, "key": key_of(start)}
    return blr.fit(
        blr.adam(0.1), objective, start, blr.stream((ROWS, LABELS), buffer=4), steps=steps, **batches, **more
    )


class Stateful:
    """Batches of somebody else's loader, which says where it is and goes on from there."""

    def __init__(self) -> None:
        self.epoch = self.taken = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(len(ROWS))
        begin, self.begin, self.taken = self.begin, 0, 0
        for first in range(begin, len(ROWS), 3):
            self.taken = first + 3
            yield ROWS[order[first : first + 3]], LABELS[order[first : first + 3]]
        self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken, "noise": [np.arange(3), {"seed": None}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.begin = state["epoch"], state["taken"]


def positioned_stream(start: Any, steps: int, **more: Any) -> blr.Result:
    """Rows of a stream whose place in its source is a part of the checkpoint."""
    objective, batches = regression().objective, {"batch_size": BATCH, "key": key_of(start)}
    rows = blr.stream(Stateful(), rows=len(ROWS), buffer=3)
    return blr.fit(blr.adam(0.1), objective, start, rows, steps=steps, **batches, **more)


def parts(start: Any, steps: int, **more: Any) -> blr.Result:
    """Every step a pass over data in parts."""
    rows = blr.stream((ROWS, LABELS), buffer=4)
    return blr.fit(blr.newton(0.4), regression().objective, start, rows, steps=steps, **more)


def parts_with_sites(start: Any, steps: int, **more: Any) -> blr.Result:
    """Messages of a model's rows, which stay with the parts."""
    rows = blr.stream({"x": ROWS, "y": LABELS}, buffer=4)
    return blr.fit(blr.cvi(0.5, sites=True), logistic_model().objective, start, rows, steps=steps, **more)


def local_blocks(start: Any, steps: int, **more: Any) -> blr.Result:
    """A model with a block for each row, on mini-batches."""
    rows, batches = {"y": jnp.asarray(TARGETS)}, {"batch_size": BATCH, "key": key_of(start)}
    return blr.fit(blr.svi(0.5), clusters()().objective, start, rows, steps=steps, **batches, **more)


def search(start: Any, steps: int, **more: Any) -> blr.Result:
    """A search for many minima, with those that are recorded so far."""
    rule = blr.multimodal(0.5, components=3, bounds=BOX, memory=4, patience=6)
    return blr.fit(rule, two_minima().objective, start, steps=steps, **more)


def slow(start: Any, steps: int, **more: Any) -> blr.Result:
    """Steps that `fit` accelerates of its own accord after fifty of them: four numbers with correlations of 0.99."""
    matrix = jnp.ones((4, 4)) + 0.01 * jnp.eye(4)
    loss = lambda x: 0.5 * (x - 1) @ matrix @ (x - 1) + 0.01 * jnp.sum(x**4)
    rule = blr.newton().replace(family=blr.DiagonalGaussian, curvature=blr.HessianDiagonal())
    return blr.fit(rule, loss, start, steps=steps, tolerance=1e-8, **more)


FITS: dict[str, Fit] = {
    "all rows": Fit(all_rows, jnp.array([0.3, -0.2]), 40, 4),
    "mini-batches": Fit(mini_batches, jnp.array([0.3, -0.2]), 10, 4),
    "watched": Fit(watched, {"w": jnp.array([0.3, -0.2]), "order": jnp.array([1, 0])}, 12, 6),
    "past its best": Fit(past_its_best, {"w": jnp.array([0.3, -0.2]), "order": jnp.array([1, 0])}, 12, 6),
    "stream": Fit(stream, jnp.array([0.3, -0.2]), 10, 4),
    "stream with a position": Fit(positioned_stream, jnp.array([0.3, -0.2]), 10, 4),
    "parts": Fit(parts, jnp.array([0.3, -0.2]), 4, 2),
    "parts with sites": Fit(parts_with_sites, None, 4, 2),
    "local blocks": Fit(local_blocks, None, 10, 4),
    "search": Fit(search, None, 20, 8),
    "slow": Fit(slow, jnp.arange(4.0), 400, 53),
}


def cut(fit: Fit, path: Path) -> None:
    """Leave what a killed process leaves: the last checkpoint, and the one before it."""

    def kill(result: blr.Result) -> None:
        if result.steps >= fit.cut:
            raise Killed

    every = {} if fit.run in (watched, past_its_best) else {"every": 1}
    try:
        fit.run(fit.start, fit.steps, checkpoint=blr.Checkpoint(path, every=0, keep=2), on_step=kill, **every)
    except Killed:
        return
    raise AssertionError("The fit ended before it was cut.")


def course(result: blr.Result) -> dict[str, Any]:
    """The steps of a fit and where they have led: numbers that no layout of its state has a part in."""
    return {
        "steps": result.steps,
        "ended": result.loop_reason.value,
        "objective": result.trace["objective"],
        "skipped": result.skipped,
        "validation": {} if result.validation is None else result.validation,
        "q": numbers(result.q),
    }


def verdict(result: blr.Result) -> dict[str, Any]:
    """What was found out about the end of a fit, which may take programs of its own."""
    bound = {} if result.bound is None else {"bound": result.bound, "error": result.bound_error}
    minima = [] if result.state.search is None else [minimum.position for minimum in result.minima()]
    return {"reason": result.reason.value, "explanation": str(result.explanation), "minima": minima, **bound}


def as_lists(tree: Any) -> Any:
    """A tree as JSON has it."""
    return jax.tree.map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | jax.Array) else leaf, tree)
