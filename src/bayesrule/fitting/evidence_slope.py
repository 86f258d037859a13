r"""The slope of the evidence in hyper-parameters η, at a fixed point of a rule.

Let Φ be one step of the rule and q(η) its fixed point, $q = Φ(q, η)$. The slope of $b(q(η), η)$, the bound, is

$$\frac{db}{dη} = ∂_η b + ∂_q b\,\frac{dq}{dη}, \qquad \Bigl(I − ∂_qΦ\Bigr)\frac{dq}{dη} = ∂_ηΦ.$$

Where q maximises the bound, $∂_q b = 0$ and the second term does not matter. Under the delta method it does: the mean
is a mode of the joint, and the bound, which is Laplace's evidence, has the term $−½\log|H(m)|$ that the mode does not
maximise. Its derivative has the third derivatives of the loss in it (Rasmussen and Williams, 2006, eq. 5.23).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from ..factor_graph.model import Model
from ..families.base import Q
from ..families.product import Product
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.window import Window
from .fixed_point import as_vector, solve_linearized, without_guard


def bound_and_slope(
    rule: Rule,
    build: Callable[[PyTree], AbstractObjective],
    hyper: PyTree,
    state: State,
    data: PyTree,
    key: Key,
    *,
    fixed_point: bool = True,
) -> tuple[Array, PyTree]:
    """The bound at a state that the rule leaves as it is, and its total derivative in the hyper-parameters.

    Args:
        rule: the rule.
        build: the objective at given hyper-parameters.
        hyper: where to differentiate, a pytree of arrays; usually logarithms.
        state: the fixed point of the rule's steps at `hyper`.
        data: all data, or a batch.
        key: the key of the differentiated step and of the bound.
        fixed_point: whether the state is a fixed point, or close to one. If not, only $∂_ηb$ at this q is returned.
    """

    def bound(hyper: PyTree, q: Any) -> Array:
        objective = build(hyper)
        return rule.bound(objective, with_bases_of(objective, q), data, key, aux=state.aux)

    if not fixed_point or not is_second_order(rule, build(hyper)):
        return jax.value_and_grad(bound)(hyper, state.q)

    plain = without_guard(rule)
    start, assemble, _ = as_vector(dataclasses.replace(state, history=None))

    def step(hyper: PyTree, vector: Array) -> Array:
        objective = build(hyper)
        before = assemble(vector)
        before = dataclasses.replace(before, q=with_bases_of(objective, before.q))
        return as_vector(plain.advance(objective, before, data, key)[0])[0]

    def slope(direction: PyTree) -> Array:
        forced = jax.jvp(lambda hyper: step(hyper, start), (hyper,), (direction,))[1]
        tolerance = 100 * float(jnp.finfo(start.dtype).eps)
        change = solve_linearized(lambda vector: step(hyper, vector), start, forced, tolerance)
        total = lambda hyper, vector: bound(hyper, assemble(vector).q)
        return jax.jvp(total, (hyper, start), (direction, change))[1]

    flat, unflatten = ravel_pytree(hyper)
    slopes = jax.lax.map(lambda row: slope(unflatten(row)), jnp.eye(flat.size, dtype=flat.dtype))
    return bound(hyper, state.q), unflatten(slopes)


def is_second_order(rule: Rule, objective: AbstractObjective) -> bool:
    """Whether an expectation is taken by the delta method, so that q is no maximum of the bound."""
    return rule.points.delta or (isinstance(objective, Model) and objective.second_order)


def has_plain_steps(rule: Rule) -> bool:
    """Whether a step depends on q and the data alone, so that q stays close to its fixed point as η moves slowly.

    Averages over earlier steps (momentum, a gradient's or a curvature's average) and random points make a step that
    says little about where the fixed point is.
    """
    steps = rule.steps
    averages = steps.momentum, steps.average, steps.scaling
    slow = steps.lazy or steps.measured or isinstance(steps.rates.precision, Window)
    return all(piece is None for piece in averages) and not slow and not rule.points.random


def with_bases_of(objective: AbstractObjective, q: Q) -> Q:
    """q with its own λ over the objective's base measures: a process keeps its sites while its kernel changes."""
    if not isinstance(objective, Model) or not isinstance(q, Product):
        return q
    own = objective.blocks
    return type(q)({name: block.with_base_of(own[name]) if name in own else block for name, block in q.blocks.items()})
