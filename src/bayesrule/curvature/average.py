"""Averages of measurements over the points θ_s, and over the parts of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.base import Family, HasStructure
from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.precision import FACTORED, Factored
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import average_leaves
from ..objectives.batches import Linearized, Microbatches, count_examples
from ..objectives.objective import as_objective
from ..points.base import Points, PointSet
from .measurement import Measurement

if TYPE_CHECKING:
    from .base import Curvature


def average_over_points(
    measure: Callable[[PyTree], Measurement], q: HasStructure, points: Points, key: Key | None
) -> Measurement:
    """Average measure(θ_s) over the points, Σ_s w_s measure(θ_s).

    The derivatives at each point are first converted to the parameters in which q is updated (`q.to_step_terms`).
    Points that come in several parts (`MonteCarlo(scan=True)`) are measured one part after another, so that only one
    part is in memory at a time.
    """
    if points.parts == 1:
        return _average(measure, q, points.at(q, key))
    if key is None:
        raise ValueError(f"{points} are random: pass key=jax.random.key(…).")
    keys = jax.random.split(key, points.parts)
    return _average_sequentially(lambda k, _: _average(measure, q, points.part(q, k)), keys, None, carries_aux=False)


def average_given(
    measure: Callable[..., Measurement], q: HasStructure, point_set: PointSet, given: PyTree
) -> Measurement:
    """Average measure(θ_s, given_s) over points that were chosen before, with what is known of each."""
    return _average(measure, q, point_set, given)


def _average(measure: Callable[..., Measurement], q: HasStructure, point_set: PointSet, *given: PyTree) -> Measurement:
    def measure_in_step_terms(theta: PyTree, factors: PyTree, *given: PyTree) -> Measurement:
        at_theta = measure(theta, *given)
        gradient, curvature = q.to_step_terms(at_theta.gradient, at_theta.curvature, theta, factors)
        # Families with a latent variable z, such as a Student-t's scale, add −log q(z | θ) to the loss.
        latent_correction = q.latent_correction(theta)
        return dataclasses.replace(
            at_theta,
            gradient=gradient,
            curvature=curvature,
            latent_correction=None if latent_correction is None else Measurement(*latent_correction),
        )

    if point_set.weights.shape == (1,):  # A vmap over an axis of length one would slow convolutions down.
        return measure_in_step_terms(*jax.tree.map(lambda t: t[0], (point_set.theta, point_set.factors, *given)))
    every = jax.vmap(measure_in_step_terms)(point_set.theta, point_set.factors, *given)
    curvature = None if every.curvature is None else q.structure.average(every.curvature, point_set.weights)
    rest = dataclasses.replace(every, curvature=None)
    return dataclasses.replace(average_leaves(rest, point_set.weights), curvature=curvature)


def add_terms(q: Family, first: tuple[PyTree, Any], second: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """Add two pairs of gradient and curvature, both converted to the parameters in which q is updated.

    A None in the second pair adds nothing. If the first curvature is None, q holds none, and the second is dropped.
    """
    (gradient, curvature), (more_gradient, more_curvature) = first, second
    gradient = gradient if more_gradient is None else jax.tree.map(jnp.add, gradient, more_gradient)
    if curvature is None or more_curvature is None:
        return gradient, curvature
    return gradient, q.added(curvature, more_curvature)


def measure_latent_correction(
    latent_correction: Any, curvature: Curvature, q: Family, points: Points, key: Key | None
) -> Measurement:
    """Measure E_q[−log r(θ)] and its first two derivatives, where r(θ) is the responsibility of component q.

    The points are the loss's own. Where the loss is integrated over its linear outputs instead of θ, points of θ are
    used here, because r depends on θ itself. For a Gaussian component the derivatives at a point have a closed form
    (`eq:mixexp_1st`, `eq:mixexp_2nd`); for others the rule's own curvature measures them.
    """
    same_key = None if key is None else jax.random.clone(key)  # The same points as the loss's, on purpose.
    if isinstance(q, GaussianFamily):
        in_closed_form = lambda theta: Measurement(*latent_correction.at(theta, q.structure))
        return average_over_points(in_closed_form, q, points, same_key)
    return curvature.measure(as_objective(lambda theta: latent_correction(theta)), q, points, None, None, same_key)


def measure_in_parts(
    measure: Callable[[PyTree, PyTree, Any], Measurement], batch: PyTree, aux: PyTree, key: Key | None
) -> Measurement:
    """Measure a batch. The parts of a `Microbatches` are measured one after another, and each passes its aux on."""
    if not isinstance(batch, Microbatches):
        return measure(batch, aux, key)
    keys = None if key is None else jax.random.split(key, batch.count)
    return _average_sequentially(
        lambda part, aux: measure(part[0], aux, part[1]), (batch.parts(), keys), aux, carries_aux=True
    )


def measure_parts_at_points(
    measure: Callable[[PyTree, PyTree, PyTree, Any], Measurement],
    q: HasStructure,
    points: Points,
    batch: PyTree,
    aux: PyTree,
    keys: tuple[Key | None, Key | None],
) -> Measurement:
    """Measure the j-th part of a batch at the j-th point, and add the parts up (`ShardSamples`).

    Args:
        measure: measure(θ, part, aux, key). A part stands for its share of M, so that it is scaled to all N examples,
            and the mean over the parts is their sum.
        q: The member that the points are of.
        points: As many points as parts, equally weighted.
        batch: The batch; `Microbatches` are divided one by one.
        aux: What the state carries along.
        keys: The key of the points, and of a random loss.
    """
    point_set, count = points.at(q, keys[0]), points.parts_of_batch
    batch = batch.batch if isinstance(batch, Linearized) else batch

    def measure_divided(batch: PyTree, aux: PyTree, key: Key | None) -> Measurement:
        check_divides(batch, count)
        own_keys = None if key is None else jax.random.split(key, count)
        one = lambda theta, own: measure(theta, own[0], aux, own[1])
        # The parts are an axis of their own in θ and in the examples: where each is on a device, all of it stays there.
        return average_given(one, q, point_set, (Microbatches(batch, count).parts(), own_keys))

    return measure_in_parts(measure_divided, batch, aux, keys[1])


def check_divides(batch: PyTree, count: int) -> None:
    """Raise where a batch cannot be divided into so many parts."""
    rows = 0 if batch is None else count_examples(batch)
    if not rows or rows % count:
        what = f"a batch of {rows} rows does" if rows else "a function without examples does"
        raise ValueError(
            f"ShardSamples({count}) measure each of {count} equal parts of a batch at a θ of its own, and {what} not "
            "divide into them: choose a batch_size that is a multiple, or MonteCarlo(samples)."
        )


def _average_sequentially(
    measure: Callable[[Any, PyTree], Measurement], parts: PyTree, aux: PyTree, *, carries_aux: bool
) -> Measurement:
    """Average measure(part, aux) over the leading axis of `parts` by a scan, so that one part is in memory at a time.

    With `carries_aux` each part's aux is passed to the next; otherwise aux is averaged too.
    """
    count = jax.tree.leaves(parts)[0].shape[0]

    def split(measured: Measurement) -> tuple[Measurement, Factored | None, PyTree]:
        """Separate what is summed, what is stacked (rows of outer products), and what is carried to the next part."""
        rows = measured.curvature if isinstance(measured.curvature, Factored) else None
        summed = dataclasses.replace(
            measured, curvature=measured.curvature if rows is None else None, aux=None if carries_aux else measured.aux
        )
        return summed, rows, measured.aux if carries_aux else None

    def add(total: Array, x: Array) -> Array:
        # Counters and other integers cannot be averaged; the last part's value is kept.
        return total + x / count if jnp.issubdtype(x.dtype, jnp.inexact) else x

    def body(carry: tuple[Any, ...], part: PyTree) -> tuple[Any, ...]:
        summed, rows, aux = split(measure(part, carry[1]))
        return (jax.tree.map(add, carry[0], summed), aux), rows

    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(lambda part, aux: split(measure(part, aux))[0], first, aux)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, aux), rows = jax.lax.scan(body, (zero, aux if carries_aux else None), parts)
    curvature = total.curvature if rows is None else FACTORED.average(rows, jnp.full(count, 1 / count))
    return dataclasses.replace(total, curvature=curvature, aux=aux if carries_aux else total.aux)
