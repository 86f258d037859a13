"""Averages of measurements: over points, and over the parts of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.precision import FACTORED, Factored
from ..numerics.random import Key
from ..numerics.trees import average_leaves
from ..objectives.batches import Microbatches
from ..objectives.objective import as_objective
from ..points.base import Points, PointSet
from .measurement import Measurement

if TYPE_CHECKING:
    from .base import Curvature


def average_over_points(
    measure: Callable[[PyTree], Measurement], q: Any, points: Points, key: Key | None
) -> Measurement:
    """Σ_s w_s measure(θ_s), each first put into the terms of q's step.

    Points that come in several parts (`MonteCarlo(scan=True)`) are measured a part at a time, with the memory of one.
    """
    if points.parts == 1:
        return _average(measure, q, points.at(q, key))
    if key is None:
        raise ValueError(f"{points} are random: pass key=jax.random.key(…).")
    keys = jax.random.split(key, points.parts)
    return _average_sequentially(lambda k, _: _average(measure, q, points.part(q, k)), keys, None, carries_aux=False)


def _average(measure: Callable[[PyTree], Measurement], q: Any, point_set: PointSet) -> Measurement:
    def in_step_terms(theta: PyTree, factors: PyTree) -> Measurement:
        at_theta = measure(theta)
        gradient, curvature = q.to_step_terms(at_theta.gradient, at_theta.curvature, theta, factors)
        latent_correction = q.latent_correction(theta)
        return dataclasses.replace(
            at_theta,
            gradient=gradient,
            curvature=curvature,
            latent_correction=None if latent_correction is None else Measurement(*latent_correction),
        )

    if point_set.weights.shape == (1,):  # A vmap over an axis of length one would slow convolutions down.
        return in_step_terms(*jax.tree.map(lambda t: t[0], (point_set.theta, point_set.factors)))
    every = jax.vmap(in_step_terms)(point_set.theta, point_set.factors)
    curvature = None if every.curvature is None else q.structure.average(every.curvature, point_set.weights)
    rest = dataclasses.replace(every, curvature=None)
    return dataclasses.replace(average_leaves(rest, point_set.weights), curvature=curvature)


def add_terms(q: Any, first: tuple[PyTree, Any], second: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """Add two pairs of gradient and curvature, in the terms of q's step; a None in the second adds nothing."""
    (gradient, curvature), (more_gradient, more_curvature) = first, second
    gradient = gradient if more_gradient is None else jax.tree.map(jnp.add, gradient, more_gradient)
    if curvature is None or more_curvature is None:
        return gradient, curvature
    return gradient, q.added(curvature, more_curvature)


def measure_latent_correction(
    latent_correction: Any, curvature: Curvature, q: Any, points: Points, key: Key | None
) -> Measurement:
    """Measure E_q of −log r and of its derivatives, for one component q of a mixture with responsibility r.

    At the same points as the loss, but always points of θ, also where the loss is evaluated at points of its linear
    outputs. A Gaussian component has the derivatives in closed form (`eq:mixexp_1st`, `eq:mixexp_2nd`); another is
    measured by the rule's own curvature.
    """
    same_key = None if key is None else jax.random.clone(key)  # The same points as the loss's, on purpose.
    if isinstance(q, GaussianFamily):
        in_closed_form = lambda theta: Measurement(*latent_correction.at(theta, q.structure))
        return average_over_points(in_closed_form, q, points, same_key)
    return curvature.measure(as_objective(lambda theta: latent_correction(theta)), q, points, None, None, same_key)


def measure_in_parts(
    measure: Callable[[PyTree, PyTree, Any], Measurement], batch: PyTree, aux: PyTree, key: Key | None
) -> Measurement:
    """measure(batch, aux, key); the parts of `Microbatches` one after another, each handing its aux to the next."""
    if not isinstance(batch, Microbatches):
        return measure(batch, aux, key)
    keys = None if key is None else jax.random.split(key, batch.count)
    return _average_sequentially(
        lambda turn, aux: measure(turn[0], aux, turn[1]), (batch.parts(), keys), aux, carries_aux=True
    )


def _average_sequentially(
    measure: Callable[[Any, PyTree], Measurement], turns: PyTree, aux: PyTree, *, carries_aux: bool
) -> Measurement:
    """The mean of measure(turn, aux) over the leading axis of `turns`, by a scan with the memory of one turn.

    With `carries_aux` each turn's aux goes to the next; else aux is averaged too.
    """
    count = jax.tree.leaves(turns)[0].shape[0]

    def split(measured: Measurement) -> tuple[Measurement, Factored | None, PyTree]:
        """Separate what is summed, what is stacked (rows of outer products), and what is carried to the next turn."""
        rows = measured.curvature if isinstance(measured.curvature, Factored) else None
        summed = dataclasses.replace(
            measured, curvature=measured.curvature if rows is None else None, aux=None if carries_aux else measured.aux
        )
        return summed, rows, measured.aux if carries_aux else None

    def add(total: Array, x: Array) -> Array:
        return total + x / count if jnp.issubdtype(x.dtype, jnp.inexact) else x

    def body(carry: tuple, turn: PyTree) -> tuple:
        summed, rows, aux = split(measure(turn, carry[1]))
        return (jax.tree.map(add, carry[0], summed), aux), rows

    first = jax.tree.map(lambda x: x[0], turns)
    shapes = jax.eval_shape(lambda turn, aux: split(measure(turn, aux))[0], first, aux)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, aux), rows = jax.lax.scan(body, (zero, aux if carries_aux else None), turns)
    curvature = total.curvature if rows is None else FACTORED.average(rows, jnp.full(count, 1 / count))
    return dataclasses.replace(total, curvature=curvature, aux=aux if carries_aux else total.aux)
