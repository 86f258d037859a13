"""The minima that a search has found, polished and without duplicates."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..numerics.trees import ravel, unravel
from ..objectives.base import AbstractObjective
from ..rule.multistart import newton_step
from ..rule.rule import Rule
from ..rule.state import State
from .loop import run

_POLISHING, _POLISHED = 30, 1e-4  # steps, and how long the last one may be, of the box


class Minimum(NamedTuple):
    """A minimum of ℓ̄: where, how low, the Hessian there, and the share of the starts that led to it."""

    position: PyTree
    value: float
    hessian: np.ndarray
    weight: float


def minima(rule: Rule, objective: AbstractObjective, state: State, data: PyTree) -> list[Minimum]:
    """Every minimum that the search has recorded or is on its way to, the lowest first."""
    search: Any = rule.search
    found, like = state.search, jax.tree.map(lambda x: x[0], state.q.each(lambda c: c.mean))
    # Empty places are polished too, and left out after: one shape, one compilation.
    starts = jnp.concatenate([found.position, ravel(state.q.each(lambda c: c.mean), 1)])
    hits = np.concatenate([np.asarray(found.hits), np.asarray(found.masses)])
    taken = np.concatenate([np.asarray(found.hits) > 0, np.ones(state.q.count, bool)])
    span = found.high - found.low
    polished = _polished(search.polish, objective, starts, like, data, span)
    position, value, hessian, length, convex = map(np.asarray, polished)
    place = (position - np.asarray(found.low)) / np.asarray(span)
    true = taken & convex & (length < _POLISHED) & np.all((place >= 0) & (place <= 1), axis=1)
    same = min(float(search.radius), 10 * np.finfo(place.dtype).eps ** 0.5)  # polished, they agree to rounding
    kept: list[int] = []
    for index in sorted(np.flatnonzero(true).tolist(), key=lambda i: (value[i], i)):
        twins = [k for k in kept if np.max(np.abs(place[k] - place[index])) < same]
        if twins:
            hits[twins[0]] += hits[index]
        else:
            kept.append(index)
    total = max(sum(hits[k] for k in kept), 1.0)
    return [
        Minimum(
            jax.tree.map(np.asarray, unravel(jnp.asarray(position[k]), like)),
            float(value[k]),
            hessian[k],
            float(hits[k] / total),
        )
        for k in kept
    ]


@jax.jit
def _polished(polish: Any, objective: AbstractObjective, starts: Any, like: PyTree, data: PyTree, span: Any) -> tuple:
    """Where Newton's method leads from these starts: position, value and Hessian, how long the next step would be, and
    whether the Hessian is positive definite."""
    key = jax.random.key(0)  # for a loss that is random itself

    def one(start: Any) -> tuple:
        state = polish.init(unravel(start, like), objective)
        state = run(polish, objective, state, data, key, _POLISHING, 1e-15)

        def flat(t: Any) -> Any:
            theta = unravel(t, like)
            there = eqx.tree_at(lambda q: q.mean, state.q, theta)
            return objective.data(theta, data, state.aux, key)[0] + objective.regularizer.at_mean(there)

        position = ravel(state.q.mean)
        hessian = jax.hessian(flat)(position)
        return position, flat(position), hessian, *newton_step(jax.grad(flat)(position), hessian, span)[1:]

    return jax.vmap(one)(starts)
