"""Parameters in bfloat16 or float16: a step is computed in float32, and its result rounded.

An entry of such parameters has eight or eleven binary digits. Of squares, averages and precisions that would leave
nothing, so that a step sees them in float32: q with its mean widened, and a loss that is called with the parameters in
their own precision, whose gradient is then in float32 as well. Only the new mean is rounded. What is smaller than half
of its last digit is lost there; parameters in float32 and `Objective(compute=jnp.bfloat16)` keep it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax

from ..families.base import Family
from ..numerics.frozen import Frozen
from ..numerics.trees import cast_like, wide
from ..objectives.base import AbstractObjective
from ..objectives.batched import Batched
from ..objectives.objective import Objective
from ..objectives.plain import Plain
from .state import State


def is_half(q: Any) -> bool:
    """Whether some parameters of q are in half precision."""
    return q.keeps_half_precision and any(leaf.dtype != wide(leaf.dtype) for leaf in jax.tree.leaves(q.mean))


def wide_member(q: Any) -> Any:
    """q with its mean in float32."""
    return eqx.tree_at(lambda q: q.mean, q, jax.tree.map(lambda m: m.astype(wide(m.dtype)), q.mean))


def widened(objective: AbstractObjective, state: State) -> tuple[AbstractObjective, State]:
    """The state with its means in float32, and the objective as a function of such parameters."""
    means = _means(state)
    state = _with_means(state, jax.tree.map(lambda m: m.astype(wide(m.dtype)), means))
    return _rounding(objective, means[0]), state


def rounded(state: State, like: State) -> State:
    """The state with its means in the precision of `like`."""
    return _with_means(state, cast_like(_means(state), _means(like)))


def _means(state: State) -> tuple[Any, ...]:
    return tuple(q.mean for q in _members(state))


def _with_means(state: State, means: tuple[Any, ...]) -> State:
    members = [eqx.tree_at(lambda q: q.mean, q, m) for q, m in zip(_members(state), means, strict=True)]
    return dataclasses.replace(state, q=members[0], previous=members[1] if len(members) > 1 else state.previous)


def _members(state: State) -> list[Any]:
    """q, and the q before the last step where there is momentum."""
    return [q for q in (state.q, state.previous) if isinstance(q, Family)]


def _rounding(objective: AbstractObjective, like: Any) -> AbstractObjective:
    """The objective whose loss is called with parameters in the precision of `like`."""
    if isinstance(objective, Plain):
        function = objective.function
        return dataclasses.replace(objective, function=lambda theta: function(cast_like(theta, like)))
    if not isinstance(objective, Objective | Batched):
        return objective
    frozen = objective.frozen
    return dataclasses.replace(objective, frozen=(Frozen.nothing(like) if frozen is None else frozen).rounding(like))
