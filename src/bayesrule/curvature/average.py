"""Averages of measurements over points, and over the parts of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.precision import FACTORED, Factored, Structure
from ..objectives.batches import Microbatches
from ..objectives.objective import as_objective
from ..points.base import Points, PointSet
from .measurement import Measurement


def averaged(measure: Callable[[PyTree], Measurement], q: Any, points: Points, key: Any) -> Measurement:
    """Σ_s w_s measure(θ_s), each in the family's terms; points that are taken in turn one after another."""
    if points.parts == 1:
        return _at_once(measure, q, points.at(q, key))
    keys = jax.random.split(key, points.parts)
    return _in_turn(lambda k, _: _at_once(measure, q, points.part(q, k)), keys, None, threaded=False)


def _at_once(measure: Callable[[PyTree], Measurement], q: Any, spots: PointSet) -> Measurement:
    def in_step_terms(theta: PyTree, factors: PyTree) -> Measurement:
        found = measure(theta)
        gradient, curvature = q.to_step_terms(found.gradient, found.curvature, theta, factors)
        latent_correction = q.latent_correction(theta)
        return dataclasses.replace(
            found,
            gradient=gradient,
            curvature=curvature,
            latent_correction=None if latent_correction is None else Measurement(*latent_correction),
        )

    if spots.weights.shape == (1,):  # no vmap over an axis of one: it would slow convolutions down
        one = in_step_terms(*jax.tree.map(lambda t: t[0], (spots.theta, spots.factors)))
        if not isinstance(one.curvature, Factored):
            return one
        stack = jax.tree.map(lambda x: x[None], one.curvature)
        return dataclasses.replace(one, curvature=q.structure.average(stack, spots.weights))
    every = jax.vmap(in_step_terms)(spots.theta, spots.factors)
    average = lambda tree: Structure().average(tree, spots.weights)
    curvature = None if every.curvature is None else q.structure.average(every.curvature, spots.weights)
    rest = dataclasses.replace(every, curvature=None)
    return dataclasses.replace(average(rest), curvature=curvature)


def plus(q: Any, first: tuple[PyTree, Any], second: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
    """The sum of two pairs of gradient and curvature, as q takes them; None adds nothing."""
    (gradient, curvature), (more, curved) = first, second
    gradient = gradient if more is None else jax.tree.map(jnp.add, gradient, more)
    return gradient, curvature if curvature is None or curved is None else q.added(curvature, curved)


def repelled(latent_correction: Any, curvature: Any, q: Any, points: Points, key: Any) -> Measurement:
    """E_q of −log r and of its derivatives, for a component of a mixture, at the points that the loss is looked at
    (over θ, also where the loss is looked at over linear outputs)."""
    again = None if key is None else jax.random.clone(key)  # the same points, on purpose
    if isinstance(q, GaussianFamily):
        return averaged(lambda theta: Measurement(*latent_correction.at(theta, q.structure)), q, points, again)
    return curvature.measure(as_objective(lambda theta: latent_correction(theta)), q, points, None, None, again)


def accumulated(
    measure: Callable[[PyTree, PyTree, Any], Measurement], batch: PyTree, aux: PyTree, key: Any
) -> Measurement:
    """measure(batch, aux, key), where the parts of `Microbatches` are measured one after another."""
    if not isinstance(batch, Microbatches):
        return measure(batch, aux, key)
    keys = None if key is None else jax.random.split(key, batch.count)
    return _in_turn(lambda turn, aux: measure(turn[0], aux, turn[1]), (batch.parts(), keys), aux, threaded=True)


def _in_turn(
    measure: Callable[[Any, PyTree], Measurement], turns: PyTree, aux: PyTree, *, threaded: bool
) -> Measurement:
    """The mean of what is measured in turn, with room for one at a time; `threaded` hands aux from each to the next."""
    count = jax.tree.leaves(turns)[0].shape[0]

    def split(found: Measurement) -> tuple[Measurement, Any, PyTree]:
        """What is added up, what is stacked (rows of outer products have no sum), and what is handed on."""
        rows = found.curvature if isinstance(found.curvature, Factored) else None
        summed = dataclasses.replace(
            found, curvature=found.curvature if rows is None else None, aux=None if threaded else found.aux
        )
        return summed, rows, found.aux if threaded else None

    def add(total: Array, x: Array) -> Array:
        return total + x / count if jnp.issubdtype(x.dtype, jnp.inexact) else x

    def body(carry: tuple, turn: PyTree) -> tuple:
        summed, rows, after = split(measure(turn, carry[1]))
        return (jax.tree.map(add, carry[0], summed), after), rows

    first = jax.tree.map(lambda x: x[0], turns)
    shapes = jax.eval_shape(lambda turn, aux: split(measure(turn, aux))[0], first, aux)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, aux), rows = jax.lax.scan(body, (zero, aux if threaded else None), turns)
    curvature = total.curvature if rows is None else FACTORED.average(rows, jnp.full(count, 1 / count))
    return dataclasses.replace(total, curvature=curvature, aux=aux if threaded else total.aux)
