"""Acceleration of a fit that turns out to converge slowly.

Natural-gradient steps need only a few where the Fisher information is close to the bound's curvature, and thousands
where it is not: a mean-field q on a correlated posterior, or a count of 0 under a wide prior, whose e^f couples mean
and variance. A fit with a tolerance shows which of the two it is while it runs. So if it has not converged after
`PATIENCE` steps on all data, `fit` goes on with the same rule under Anderson acceleration: its fixed points and its
guard, which lets no step worsen the loss, stay the same.

Slow steps hide how far it still is: along a narrow curved valley they shrink across it and creep along it, and
accelerated ones do not shrink like a geometric series at all. So where many or accelerated steps seem to have
converged, the distance is computed (`distance_to_fixed_point`), and if it is too large they go on to a smaller
tolerance.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..families.base import Family
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..rule.compatibility import check
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.acceleration import Anderson
from .convergence import first_watch
from .fixed_point import distance_to_fixed_point
from .loop import Carry, copy_for_donation, has_point_mass
from .reason import Reason

PATIENCE = 50
"""After how many steps a fit that has not converged is slow."""

_WINDOW = 5
_CONFIRMED = 2.0  # A distance that was computed may be so many times the tolerance,
_STRICTER = 1e-3  # and if it is larger, the tolerance becomes smaller by at most this factor.
_MOST_NUMBERS = 2**20  # λ may have so many entries, of which the acceleration keeps ten copies.


def accelerated(rule: Rule, objective: AbstractObjective, q: Family, data: PyTree) -> Rule | None:
    """The rule with accelerated steps, or None where these cannot be taken or need too much memory.

    It takes plain steps that a loss on all data can judge, and a family in whose coordinates one can extrapolate.

    Args:
        rule: the rule.
        objective: what it lowers.
        q: where it starts.
        data: all data.
    """
    steps = rule.steps
    pieces = (steps.momentum, steps.average, steps.scaling, steps.sweep, steps.acceleration)
    plain = all(piece is None for piece in pieces) and not (steps.reverse or steps.lazy or steps.measured)
    judged = rule.guard.evaluates and objective.judges_steps(data)
    if not (plain and judged and has_linearization(rule, objective, q)):
        return None
    steps = eqx.tree_at(lambda s: s.acceleration, steps, Anderson(_WINDOW), is_leaf=lambda x: x is None)
    try:
        check(rule.family, rule.points, rule.curvature, steps, rule.guard, q)
        return rule.replace(steps=steps)
    except ValueError:  # The family or a piece of one's own does not go with it.
        return None


def has_linearization(rule: Rule, objective: AbstractObjective, q: Family) -> bool:
    """Whether the rule's steps on all data are a differentiable map of q, of moderate size, with a fixed point.

    Not those at random points or in search of many minima; nor, as `confirm` measures distances, those of families
    which cannot, or with blocks that are points.
    """
    random = rule.points.random or objective.random
    measures = type(q).distance is not Family.distance and not q.is_mixture and not has_point_mass(q)
    size = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(q))
    return measures and not random and rule.search is None and size <= _MOST_NUMBERS


def is_accelerated(rule: Rule, state: State) -> bool:
    """Whether a state has the history of this rule's accelerated steps: from its start, an earlier chunk, or the fit
    that is resumed."""
    acceleration = rule.steps.acceleration
    if acceleration is None or state.history is None:
        return False
    return len(jax.tree.leaves(state.history.places)[0]) == acceleration.window


def steps_to_patience(carry: Carry) -> int:
    """How many more steps a fit may take before it counts as slow; 0 or less if it does already."""
    return PATIENCE if carry.watch is None else PATIENCE - int(carry.watch.steps)


def accelerate_if_slow(rule: Rule, carry: Carry) -> Carry:
    """The carry, with a history for the accelerated rule if the plain one has not converged in time."""
    if steps_to_patience(carry) > 0 or Reason.of(int(carry.code)) is not Reason.STEPS:
        return carry
    acceleration = rule.steps.acceleration
    assert acceleration is not None  # only for the type checker: `accelerated` made the rule
    state = dataclasses.replace(carry.state, history=copy_for_donation(acceleration.first(carry.state.q)))
    return carry._replace(state=state, watch=copy_for_donation(first_watch()))


def confirm(rule: Rule, objective: AbstractObjective, carry: Carry, data: PyTree, key: Key, tolerance: float) -> Carry:
    """The carry after a chunk of steps, which goes on if these have not really converged.

    Args:
        rule: the rule, with a linearization.
        objective: what it lowers.
        carry: the carry after the chunk.
        data: all data.
        key: the key of the fit.
        tolerance: that of the fit.
    """
    if Reason.of(int(carry.code)) is not Reason.CONVERGED or carry.watch is None:
        return carry
    if steps_to_patience(carry) >= 0 and not is_accelerated(rule, carry.state):
        return carry
    distance = distance_to_fixed_point(rule, objective, carry.state, data, key)
    if not distance > _CONFIRMED * tolerance:  # It is NaN where the step has no derivative, and nothing can be said.
        return carry
    share = carry.watch.share * max(tolerance / distance, _STRICTER)
    watch = copy_for_donation(first_watch()._replace(share=share, steps=carry.watch.steps))
    return carry._replace(code=jnp.full_like(carry.code, Reason.STEPS.code), watch=watch)
