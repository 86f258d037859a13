"""A run of the rule, looked at after every step: one compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..rule.rule import Rule


def walked(
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
    """What `read` sees of q after every step: on all of the data, or on one of the batches each; a key each."""

    def body(state: Any, turn: tuple) -> tuple:
        batch, key = turn
        state = rule.step(objective, state, data if batches is None else batch, key)[0]
        return state, read(state.q)

    run = jax.jit(lambda turns: jax.lax.scan(body, rule.init(start, objective), turns, length=steps)[1])
    return jax.tree.map(np.asarray, run((jax.tree.map(jnp.asarray, batches), keys)))
