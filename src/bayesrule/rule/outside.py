"""A step from a gradient that somebody else has taken: the rule says where, they differentiate, the rule moves.

`draw` and `measurement_from` are the two halves of a measurement (`update.measure`) with the loss between them left
out. What follows the measurement is the same function for both, `update.update`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..curvature.average import average_given
from ..curvature.measurement import Measurement
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import wide
from ..objectives.external import External
from ..points.base import Points, PointSet
from ..steps.schedule import Planned, Scheduled
from .half_precision import is_half, wide_member
from .state import State
from .update import at_temperature, drawn_around, guard_of

if TYPE_CHECKING:
    from .rule import Rule


def check_outside(rule: Rule, objective: External, state: State) -> None:
    """Raise where a step cannot be taken from gradients of a batch's mean loss alone."""
    if not rule.curvature.from_gradients or rule.points.exact:
        rule.curvature.of_gradient(state.q, None, None, objective.size)  # says which recipes can
        raise ValueError(f"{rule.points!r} has no points of θ to differentiate at: use rule.step(objective, …).")
    if state.q.is_mixture or rule.steps.sweep is not None:
        raise ValueError(
            f"{rule.name} moves the parts of its q one by one, each with a gradient of its own, and a gradient from "
            "outside is one for all of them: use rule.step(objective, …)."
        )
    if guard_of(rule, objective, None).evaluates:
        raise ValueError(
            f"{rule.guard!r} compares losses before and after a step, and here only the gradient is known: use "
            "rule.step(objective, …), or another guard, such as rule.replace(guard=blr.NoGuard())."
        )
    if state.averaged is not None and objective.batch_size is None:
        raise ValueError(
            "This state starts its precision from the curvature of the first batches, whose size must be known: pass "
            "batch_size=M, the number of examples that a gradient is averaged over. Or give the recipe a curvature to "
            "start from and a decay, as published: ivon(rate, curvature=1.0, decay=0.99999)."
        )


def points_of(
    points: Points, schedule: Scheduled | Planned | None, state: State, key: Key | None
) -> tuple[Any, PointSet]:
    """The q that this step's points are drawn from, and the points: those of `rule.step` with the same key.

    Args:
        points: The rule's points.
        schedule: The schedule of its temperature that q follows (`Steps.temperature_schedule`).
        state: The state before the step.
        key: The step's key.
    """
    own = wide_member(state.q) if is_half(state.q) else state.q
    q = drawn_around(state, at_temperature(schedule, own, state.count, state.horizon))
    if points.parts == 1:
        return q, points.at(q, key)
    if key is None:
        raise ValueError(f"{points} are random: pass key=jax.random.key(…).")
    parts = jax.vmap(lambda key: points.part(q, key))(jax.random.split(key, points.parts))
    merged = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), parts)
    return q, PointSet(merged.theta, merged.weights / points.parts, merged.factors)


def theta_of(point_set: PointSet) -> PyTree:
    """The points as a user sees them: a single one without the axis of samples."""
    single = point_set.weights.shape == (1,)
    return jax.tree.map(lambda t: t[0], point_set.theta) if single else point_set.theta


def measurement_from(
    rule: Rule, objective: External, state: State, gradient: PyTree, key: Key | None, value: Any, theta: PyTree
) -> Measurement:
    """E_q of the data's loss and its derivatives, from gradients of the mean loss at the points of `key`.

    Args:
        rule: The algorithm.
        objective: N, the prior and the batch's size.
        state: The state that the points were drawn from.
        gradient: The gradients, with the points' axis where there are several.
        key: The key that the points were drawn with.
        value: The mean loss at the points, or at each of them; None where it is not known.
        theta: The points, where the caller still has them; None to make them again from the key.
    """
    q, point_set = points_of(rule.points, rule.steps.temperature_schedule, state, key)
    single = point_set.weights.shape == (1,)
    if theta is not None:
        theta = jax.tree.map(lambda t, like: jnp.asarray(t).astype(like.dtype), theta, theta_of(point_set))
        point_set = point_set._replace(theta=jax.tree.map(lambda t: t[None], theta) if single else theta)
    _check_shapes(gradient, theta_of(point_set), point_set.weights.shape[0])
    sums = jax.tree.map(lambda g: _widened(g) * jnp.asarray(objective.size, _widened(g).dtype), gradient)
    sums = jax.tree.map(lambda g: g[None], sums) if single else sums
    losses = jnp.zeros(point_set.weights.shape)
    if value is not None:
        losses = jnp.broadcast_to(objective.size * jnp.asarray(value), point_set.weights.shape)

    def measure(theta: PyTree, given: tuple[PyTree, Array]) -> Measurement:
        gradient, loss = given
        return Measurement(loss, gradient, rule.curvature.of_gradient(q, theta, gradient, objective.size), state.aux)

    return average_given(measure, q, point_set, (sums, losses))


def _widened(gradient: Any) -> Array:
    array = jnp.asarray(gradient)
    return array.astype(wide(array.dtype))


def _check_shapes(gradient: PyTree, theta: PyTree, count: int) -> None:
    if jax.tree.structure(gradient) != jax.tree.structure(theta):
        raise ValueError(
            "The gradient has another structure than the θ that rule.draw gave: "
            f"{jax.tree.structure(gradient)}, not {jax.tree.structure(theta)}."
        )
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(gradient)]
    expected = [jnp.shape(leaf) for leaf in jax.tree.leaves(theta)]
    if shapes != expected:
        axis = f" (with a leading axis of {count} samples)" if count > 1 else ""
        raise ValueError(f"The gradient has leaves of shapes {shapes}, and rule.draw gave θ{axis} of {expected}.")
