r"""A rule's step as a map Φ of vectors, linearised at or near its fixed point.

$I − ∂Φ$ says how the fixed point moves when the step changes (`evidence_slope`), and how far away it is: to first
order the rest of the way e solves $(I − ∂Φ)e = Φ(λ) − λ$, whatever path the fit has taken (`distance_to_fixed_point`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import gmres
from jaxtyping import Array
from scipy.sparse.linalg import LinearOperator
from scipy.sparse.linalg import gmres as gmres_on_host

from ..families.base import ExponentialFamily
from ..numerics.checks import bare
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.guards import NoGuard
from ..steps.steps import Steps

# GMRES ends after a few products where the step is Newton's, whose ∂Φ is nilpotent; a diagonal q takes more.
_PRODUCTS = 20
_RESTARTS = 10


def without_guard(rule: Rule) -> Rule:
    """The rule without guard and acceleration, which do not change where its fixed points are."""
    fields_of = lambda module: {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    steps = bare(Steps, **fields_of(rule.steps) | {"acceleration": None})
    return bare(Rule, **fields_of(rule) | {"guard": NoGuard(), "steps": steps})


def as_vector(state: State) -> tuple[Array, Callable[[Array], State], Callable[[Array], PyTree]]:
    """All real numbers of a state as one vector, a member of an exponential family by its λ.

    Returns:
        the vector; the function that makes a state of such a vector; and the one that takes q's part out of it, in the
        form of λ, which is linear and also serves displacements that lead out of Ω.
    """
    members = {name: getattr(state, name) for name in ("q", "previous")}
    by_natural = {name: q for name, q in members.items() if isinstance(q, ExponentialFamily)}
    rest = dataclasses.replace(state, **dict.fromkeys(by_natural))
    numbers, others = eqx.partition(rest, eqx.is_inexact_array)
    vector, unflatten = ravel_pytree(({name: q.natural() for name, q in by_natural.items()}, numbers))

    def assemble(vector: Array) -> State:
        naturals, numbers = unflatten(vector)
        found = {name: by_natural[name].with_natural(natural) for name, natural in naturals.items()}
        return dataclasses.replace(eqx.combine(numbers, others), **found)

    return vector, assemble, lambda vector: unflatten(vector)[0].get("q")


def solve_linearized(step: Callable[[Array], Array], at: Array, change: Array, tolerance: float) -> Array:
    """The x with (I − ∂Φ)x = change, where Φ is `step` and ∂Φ its derivative at a vector, by GMRES."""

    def residual(x: Array) -> Array:
        return x - jax.jvp(step, (at,), (x,))[1]

    how = {"tol": tolerance, "restart": _PRODUCTS, "maxiter": _RESTARTS}
    return gmres(residual, change, change, solve_method="incremental", **how)[0]


def distance_to_fixed_point(rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key) -> float:
    """½⟨e, Fe⟩, how far q is from the rule's fixed point, in nats, to first order.

    It needs no history of steps, so that it judges accelerated ones, whose lengths say little. GMRES runs on the host,
    because a step and its derivative compile several times faster than GMRES with them inside. It may take as many
    products as steps were taken; where these are not enough, e is too short.

    Args:
        rule: the rule, of deterministic steps.
        objective: what it lowers.
        state: where it is, close to a fixed point.
        data: all data.
        key: the key of a step.

    Returns:
        the distance; NaN where the step has no derivative.
    """
    rule, state = without_guard(rule), dataclasses.replace(state, history=None)
    push = lambda x: _pushed(rule, objective, state, data, key, x)
    zero = jnp.zeros_like(_vector(state))
    change = np.asarray(push(zero)[0])
    if not np.all(np.isfinite(change)):
        return float("nan")
    identity_minus = lambda x: x - np.asarray(push(jnp.asarray(x, zero.dtype))[1])
    shape: Any = (change.size, change.size)
    # SciPy makes another class than this one, whose constructor takes these.
    operator: Any = LinearOperator(shape, matvec=identity_minus, dtype=change.dtype)  # pyright: ignore[reportCallIssue]
    restarts = int(np.clip(int(state.count) // _PRODUCTS, 1, _RESTARTS))
    rest = gmres_on_host(operator, change, x0=change, rtol=1e-3, restart=_PRODUCTS, maxiter=restarts)[0]
    return float(_length(state, jnp.asarray(rest, zero.dtype)))


@compiled
def _vector(state: State) -> Array:
    return as_vector(state)[0]


@compiled
def _pushed(
    rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key, tangent: Array
) -> tuple[Array, Array]:
    """Φ(λ) − λ, and ∂Φ times a vector."""
    start, assemble, _ = as_vector(state)
    step = lambda vector: as_vector(rule.advance(objective, assemble(vector), data, key)[0])[0]
    there, derivative = jax.jvp(step, (start,), (tangent,))
    return there - start, derivative


@compiled
def _length(state: State, rest: Array) -> Array:
    """½⟨e, Fe⟩ of q's part e of a displacement."""
    start, assemble, natural_part = as_vector(state)
    q: Any = state.q
    if not isinstance(q, ExponentialFamily):
        return q.distance(assemble(start + rest).q)
    # Not the distance to the member at λ + e, because a long e may lead out of Ω.
    displacement = natural_part(rest)
    image = jax.jvp(lambda n: q.with_natural(n).expectation(), (q.natural(),), (displacement,))[1]
    return 0.5 * jnp.sum(q.inner(displacement, image))
