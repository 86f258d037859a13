"""The trajectory of a rule: q read after every step, in one compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..rule.rule import Rule
from ..rule.state import State


def trace_steps(
    rule: Rule,
    objective: Any,
    start: Any,
    *,
    steps: int,
    data: Any = None,
    batches: Any = None,
    keys: Any = None,
    read: Callable[[Any], Any] = lambda q: q.mean,
) -> Any:
    """Run the rule and return `read(q)` after every step, stacked along a leading axis of length `steps`.

    Args:
        rule: The algorithm.
        objective: What it minimises: an `Objective`, a `Model` or a function of θ.
        start: Where it begins, as `rule.init` takes it.
        steps: The number of steps.
        data: The data of every step; or
        batches: the data of each step, with a leading axis of length `steps`.
        keys: A random key for each step, if the rule draws random numbers.
        read: What to record of q.
    """

    def body(state: State, step_data: tuple[Any, ...]) -> tuple[Any, ...]:
        batch, key = step_data
        state = rule.step(objective, state, data if batches is None else batch, key)[0]
        return state, read(state.q)

    run = jax.jit(lambda step_data: jax.lax.scan(body, rule.init(start, objective), step_data, length=steps)[1])
    return jax.tree.map(np.asarray, run((jax.tree.map(jnp.asarray, batches), keys)))
