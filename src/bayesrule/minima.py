"""The minima that a search has found, polished and without duplicates."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .families.structure import ravel, unravel
from .objective import Objective
from .rule import Rule
from .running import run
from .state import State

_POLISHING = 30


class Minimum(NamedTuple):
    """A minimum of ℓ̄: where, how low, the Hessian there, and the share of the starts that led to it."""

    position: PyTree
    value: float
    hessian: np.ndarray
    weight: float


def minima(rule: Rule, objective: Objective, state: State, data: PyTree) -> list[Minimum]:
    """Every minimum that the search has recorded or is on its way to, the lowest first."""
    found, like = state.found, jax.tree.map(lambda x: x[0], state.q.each(lambda c: c.mean))
    # Empty places are polished too, and left out after: one shape, one compilation.
    starts = jnp.concatenate([found.position, ravel(state.q.each(lambda c: c.mean), 1)])
    hits = np.concatenate([np.asarray(found.hits), np.asarray(found.masses)])
    taken = np.concatenate([np.asarray(found.hits) > 0, np.ones(state.q.count, bool)])
    position, value, slope, hessian = map(np.asarray, _polished(rule.search.polish, objective, starts, like, data))
    span = np.asarray(found.high - found.low)
    place = (position - np.asarray(found.low)) / span
    true = taken & np.all((place >= 0) & (place <= 1), axis=1) & _minimal(slope, hessian, span)
    same = min(float(rule.search.radius), 10 * np.finfo(place.dtype).eps ** 0.5)  # polished, they agree to rounding
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


def _minimal(slope: np.ndarray, hessian: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Whether this is a minimum: the Hessian is positive definite, and Newton's step is a small part of the box."""
    scaled = hessian * span[:, None] * span
    good = np.all(np.isfinite(scaled), axis=(1, 2)) & np.all(np.isfinite(slope), axis=1)
    scaled[~good] = np.eye(span.size)
    good &= np.linalg.eigvalsh(scaled)[:, 0] > 0
    scaled[~good] = np.eye(span.size)
    step = np.linalg.solve(scaled, (slope * span)[..., None])[..., 0]
    return good & (np.max(np.abs(step), axis=1) < 1e-4)


@jax.jit
def _polished(polish: Any, objective: Objective, starts: Any, like: PyTree, data: PyTree) -> tuple:
    """Where Newton's method leads from these starts: position, value, gradient and Hessian."""
    key = jax.random.key(0)  # for a loss that is random itself

    def one(start: Any) -> tuple:
        state = polish.init(unravel(start, like), objective)
        state = run(polish, objective, state, data, key, _POLISHING, 1e-15)

        def flat(t: Any) -> Any:
            theta = unravel(t, like)
            there = eqx.tree_at(lambda q: q.mean, state.q, theta)
            return objective.data(theta, data, state.aux, key)[0] + objective.regularizer.at_mean(there)

        position = ravel(state.q.mean)
        return position, flat(position), jax.grad(flat)(position), jax.hessian(flat)(position)

    return jax.vmap(one)(starts)
