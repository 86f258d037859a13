"""Another start for a fit whose own start is too wide to integrate over.

From a wide q the expectations of a loss such as e^f overflow, and no step can be formed. The loss can be evaluated at
q's mean, though. So where the first steps of a fit were impossible, it begins again: a model from `narrowed`, with the
width of its likelihoods at the mean, and a Gaussian on an objective from a few of Newton's steps on all data.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..curvature.hessian import Hessian
from ..factor_graph.model import Model
from ..factor_graph.narrow_start import better_start, narrowable_blocks
from ..families.base import Family
from ..families.gaussian.full import Gaussian
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..points.base import Delta
from ..rule.rule import Rule
from ..steps.guards import Backtracking
from ..steps.steps import Steps
from .convergence import first_watch
from .loop import Carry, copy_for_donation, empty_trace, run_chunk
from .reason import Reason

_FAR = 100.0  # The bound at a start that is too wide is so many times larger, in absolute value, than after a chunk.
_SHORT = 1.0  # A step of fewer nats begins near the optimum of its kind, from a q of about the right width.
_NEWTON_STEPS, _NEWTON_TOLERANCE = 50, 1e-2


def may_restart(rule: Rule, objective: AbstractObjective, q: Family) -> bool:
    """Whether a fit may begin again from another q than its start.

    So it is for rules that integrate over q and whose guard looks at the bound of a model, and for Gaussians with a
    full precision on an objective.
    """
    if isinstance(objective, Model):
        blocks: Any = q  # The q of a model is a `Product`.
        return rule.guard.evaluates and bool(narrowable_blocks(objective, blocks))
    return type(q) is Gaussian and not q.batch_shape and not rule.points.delta and rule.search is None


def other_start(
    rule: Rule, objective: AbstractObjective, start: Any, carry: Carry, data: PyTree, key: Key, *, full_batch: bool
) -> Family | None:
    """Where to begin again, or None to go on: after the first chunk of a fit.

    Args:
        rule: the rule.
        objective: the loss.
        start: the q that the fit began from.
        carry: the carry after the first chunk.
        data: all data.
        key: the key of the fit.
        full_batch: whether each step sees all data.
    """
    reason = Reason.of(int(carry.code))
    if not isinstance(objective, Model):
        impossible = reason is Reason.NOT_FINITE or (reason.rejected_a_step and rule.guard.evaluates)
        return _near_mode(objective, start, data, key) if impossible and full_batch else None
    if not _starts_badly(carry, reason, full_batch):
        return None
    narrow, better, far_above = better_start(objective, carry.state.q, start, data, key)
    # The bound that was reached may itself be the rounding error of huge numbers, so the bound at the start counts too.
    return narrow if bool(better) or bool(far_above) else None


def _starts_badly(carry: Carry, reason: Reason, full_batch: bool) -> bool:
    """Whether the steps of the first chunk say that q was too wide at its start to integrate over.

    That is so if one of them was impossible. Where the bound judges them, also if the first was shortened, unless it
    was a short one by itself, or if the bound came from so far below that it is still on its way.
    """
    if reason.rejected_a_step:
        return True
    if not full_batch or len(carry.trace["fraction"]) == 0:
        return False
    bound = np.asarray(carry.trace["bound"])
    last = bound[max(int(carry.state.count) - 1, 0)]
    far = reason is Reason.STEPS and bound[0] < -_FAR * (1 + abs(last))
    shortened = float(carry.trace["fraction"][0]) < 1 and not float(carry.trace["decrement"][0]) < _SHORT
    return shortened or bool(far)


def _near_mode(objective: AbstractObjective, start: Gaussian, data: PyTree, key: Key) -> Gaussian | None:
    """q after a few of Newton's steps from the start, or None if the loss is not finite at the mean either."""
    newton = Rule(Gaussian, Delta(), Hessian(), Steps(1.0), Backtracking(monotone=True))
    state = copy_for_donation(newton.init(start, objective, key))
    carry = Carry(state, jnp.zeros(0, int), empty_trace(_NEWTON_STEPS, True), watch=copy_for_donation(first_watch()))
    carry = run_chunk(
        newton,
        objective,
        data,
        key,
        _NEWTON_TOLERANCE,
        0,
        _NEWTON_STEPS,
        carry,
        batch_size=None,
        diagnose=True,
    )
    return carry.state.q if int(carry.state.count) > 0 else None
