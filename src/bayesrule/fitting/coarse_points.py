r"""Has a fit converged to the optimum of its integrals, or to that of the grid which stands for them?

Gauss–Hermite nodes lie about half a standard deviation of q apart. Where a likelihood bends within a shorter distance,
as a softmax does under a wide q, they jump over the bend, and the fit converges to the optimum of another bound. So
once a fit has converged, the natural gradient is measured at finer points. Where its decrement is not far below what
matters, the linearized distance to the optimum at those points decides (`distance_to_fixed_point`). The same program
measures the bound at both kinds of points, whose difference is the error of the bound (`bound`).

Random points are not judged here: `result.bound_error` says what they leave open. Nor is the delta method, which is an
expansion and no integral.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from ..curvature.base import Pointwise
from ..factor_graph.model import Model
from ..families.gaussian.base import GaussianFamily
from ..families.product import Product
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..points.quadrature import Quadrature
from ..rule.rule import Rule
from ..rule.state import State
from .accelerate import has_linearization
from .bound import Bound, integrates_outputs, judging_points_of, refined_models
from .fixed_point import distance_to_fixed_point, without_guard
from .loop import with_shared_jacobians

# How far from the optimum at finer points q may be, in nats, times the root of the number of parameters, among which
# the distance is shared: of a single one the mean is then at most 0.04 standard deviations off. A tolerance that is
# larger than a tenth of it allows for ten times itself.
_NEGLIGIBLE = 1e-3
_SUSPICIOUS = 0.2  # From this part of it on the decrement says too little, and the distance is computed.


class AtFinerPoints(NamedTuple):
    """What was measured at a q at finer points than those of its fit.

    Attributes:
        rule, objective: the fit's, at finer points.
        decrement: of the natural gradient there, in nats.
        bound: the bound there, with its difference from the bound at the fit's own points as the error; None where the
            bound is not to be judged at these points.
    """

    rule: Rule
    objective: AbstractObjective
    decrement: float
    bound: Bound | None


def measure_at_finer_points(
    rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key
) -> AtFinerPoints | None:
    """Measure the state's q at finer points; None where no grid is in use, or none can be made finer.

    Args:
        rule: the rule.
        objective: the loss, with its number of examples.
        state: the last state.
        data: all data.
        key: the key of the fit.
    """
    finer = finer_pieces(rule, objective, state, data)
    if finer is None:
        return None
    if not _judges_bound(rule, objective, state):
        return AtFinerPoints(*finer, float(_decrement(*finer, state, data, key)), None)
    decrement, fine, own = jax.device_get(_decrement_and_bounds(finer[0], rule, objective, state, data, key))
    return AtFinerPoints(*finer, float(decrement), Bound(float(fine), abs(float(fine) - float(own))))


def explain_coarse_points(
    there: AtFinerPoints | None, state: State, data: PyTree, key: Key, tolerance: float, *, linearize: bool = True
) -> str | None:
    """What is wrong with the points of a fit that converged, and what to do; None if they are fine enough.

    Args:
        there: what was measured at finer points.
        state: the last state.
        data: all data.
        key: the key of the fit.
        tolerance: that of the fit.
        linearize: whether the distance may be computed, which takes many passes over the data; else the decrement
            stands for it.
    """
    if there is None:
        return None
    limit = max(_NEGLIGIBLE * math.sqrt(_parameters(state.q)), 10 * tolerance)
    distance, finer = there.decrement, (there.rule, there.objective)
    suspicious = linearize and distance > max(_SUSPICIOUS * limit, tolerance)
    if suspicious and has_linearization(*finer, state.q):
        distance = distance_to_fixed_point(*finer, state, data, key)
    if not distance > limit:
        return None
    return (
        f"The fit has converged at its own points, which are too coarse for the integrals: at finer points q is about "
        f"{distance:.1g} nats from the optimum. Give points=Quadrature(n) with more nodes, or random points "
        "(MonteCarlo, QuasiMonteCarlo) where there are many outputs, or a prior that is less wide."
    )


def finer_pieces(
    rule: Rule, objective: AbstractObjective, state: State, data: PyTree
) -> tuple[Rule, AbstractObjective] | None:
    """The rule and the objective at finer grids; None where no grid is in use, or none can be made finer."""
    if isinstance(objective, Model):
        fine, coarse, _ = refined_models(objective, state.q, data)
        return None if coarse is None or fine.random else (rule, fine)
    if not isinstance(rule.points, Quadrature):
        return None
    judges = judging_points_of(rule.points, objective, state.q, data)
    finer = judges.fine
    if not isinstance(finer, Quadrature) or finer.order <= rule.points.order:
        return None
    return rule.replace(points=finer), objective


def _judges_bound(rule: Rule, objective: AbstractObjective, state: State) -> bool:
    """Whether `judge_bound` would take the bound at the same finer points, and its error from the fit's own.

    So it is where the grids are over each example's outputs, and the curvature is measured there as well.
    """
    if isinstance(objective, Model) or not integrates_outputs(objective, state.q):
        return False
    over_outputs = isinstance(rule.curvature, Pointwise) and rule.curvature.integrates_outputs
    return over_outputs and rule.steps.temperature_schedule is None


def _parameters(q: Any) -> int:
    """The number of entries of all means; 1 where there are none."""
    members = q.blocks.values() if isinstance(q, Product) else [q.component_prototype]
    means = [member.mean for member in members if isinstance(member, GaussianFamily)]
    return max(1, sum(int(np.size(leaf)) for leaf in jax.tree.leaves(means)))


@compiled(rare=True)
def _decrement(rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key) -> Array:
    # A guard and an acceleration do not change the natural gradient at q, and take time to compile.
    return without_guard(rule).advance(objective, state, data, key, diagnose=True)[1].decrement


@compiled(rare=True)
def _decrement_and_bounds(
    finer: Rule, rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key
) -> tuple[Array, Array | None, Array]:
    """The decrement and the bound at finer points, and the bound at the rule's own."""
    data = with_shared_jacobians(objective, state.q, data)
    info = without_guard(finer).advance(objective, state, data, key, diagnose=True)[1]
    return info.decrement, info.bound, rule.bound(objective, state.q, data, aux=state.aux)
