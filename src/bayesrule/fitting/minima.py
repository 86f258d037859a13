"""The distinct minima that a search has found, each polished by Newton's method.

A search (`rule.multistart`) records where its components have converged, roughly. When the list of minima is asked for,
Newton's method goes on from these positions and from the components that are still moving. Starts from which it reaches
the same point count as one minimum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.trees import ravel, unravel
from ..objectives.base import AbstractObjective
from ..rule.multistart import newton_step
from ..rule.rule import Rule
from ..rule.state import State
from .loop import run

_POLISH_STEPS = 30
_MAX_LAST_STEP = 1e-4  # a point is a minimum if the next Newton step would be shorter than this share of the box


class Minimum(NamedTuple):
    """A minimum of ℓ̄.

    Attributes:
        position: θ at the minimum.
        value: ℓ̄ there.
        hessian: its Hessian there, over θ as a vector.
        weight: the share of the starts that led to it.
    """

    position: PyTree
    value: float
    hessian: np.ndarray
    weight: float


def minima(rule: Rule, objective: AbstractObjective, state: State, data: PyTree) -> list[Minimum]:
    """Every minimum that the search has recorded or is about to reach, the lowest first.

    Args:
        rule: a rule with a search.
        objective: what was minimised.
        state: the state of the search.
        data: all data.
    """
    search: Any = rule.search
    record, means = state.search, state.q.each(lambda component: component.mean)
    like = jax.tree.map(lambda x: x[0], means)
    # The record has a fixed number of rows. Those not in use are polished too and dropped afterwards, so that there is
    # one shape and one compilation.
    starts = jnp.concatenate([record.position, ravel(means, 1)])
    hits = np.concatenate([np.asarray(record.hits), np.asarray(record.masses)])
    in_use = np.concatenate([np.asarray(record.hits) > 0, np.ones(state.q.count, bool)])
    span = record.high - record.low
    polished = _polish(search.polish, objective, starts, like, data, span)
    position, value, hessian, step_length, convex = map(np.asarray, polished)
    scaled = (position - np.asarray(record.low)) / np.asarray(span)
    inside_box = np.all((scaled >= 0) & (scaled <= 1), axis=1)
    is_minimum = in_use & convex & (step_length < _MAX_LAST_STEP) & inside_box
    # Polished points that are one minimum agree to rounding.
    same_within = min(float(search.radius), 10 * np.finfo(scaled.dtype).eps ** 0.5)
    distinct: list[int] = []
    for index in sorted(np.flatnonzero(is_minimum).tolist(), key=lambda i: (value[i], i)):
        duplicates = [k for k in distinct if np.max(np.abs(scaled[k] - scaled[index])) < same_within]
        if duplicates:
            hits[duplicates[0]] += hits[index]
        else:
            distinct.append(index)
    total = max(sum(hits[k] for k in distinct), 1.0)
    return [
        Minimum(
            jax.tree.map(np.asarray, unravel(jnp.asarray(position[k]), like)),
            float(value[k]),
            hessian[k],
            float(hits[k] / total),
        )
        for k in distinct
    ]


@compiled
def _polish(
    polish: Rule,
    objective: AbstractObjective,
    starts: Float[Array, "S P"],
    like: PyTree,
    data: PyTree,
    span: Float[Array, " P"],
) -> tuple[Array, ...]:
    """Run Newton's method from every start.

    Returns:
        For each start the position where it ended, ℓ̄ and its Hessian there, the length of the next Newton step as a
        share of the box, and whether the Hessian is positive definite.
    """
    key = jax.random.key(0)  # for a loss that is itself random

    def from_one(start: Float[Array, " P"]) -> tuple[Array, ...]:
        state = polish.init(unravel(start, like), objective)
        state = run(polish, objective, state, data, key, _POLISH_STEPS, 1e-15)

        def loss(vector: Float[Array, " P"]) -> Array:
            theta = unravel(vector, like)
            q = eqx.tree_at(lambda q: q.mean, state.q, theta)
            return objective.data(theta, data, state.aux, key)[0] + objective.regularizer.at_mean(q)

        position = ravel(state.q.mean)
        hessian = jax.hessian(loss)(position)
        return position, loss(position), hessian, *newton_step(jax.grad(loss)(position), hessian, span)[1:]

    return jax.vmap(from_one)(starts)
