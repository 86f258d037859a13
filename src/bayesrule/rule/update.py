r"""One update of the rule, written once: measure → form → guard → keep.

1. **Measure** $E_q\ell$, $E_q∇\ell$ and $E_q∇^2\ell$ of the data's loss: the points say where, the curvature says what.
2. **Form** a `Step`: add the regularizer's derivatives, average the gradient, look up the rates and the temperature.
3. **Guard** it: `Guard.take` hands the step to `Family.moved`, the only coordinate arithmetic, and keeps λ inside Ω.
4. **Keep** the new state, or the old one if the loss or its derivatives were not finite.

Every step of every algorithm is `update`. A mixture calls it for each component (`by_component.py`), a sweep over a
model's blocks for each group of blocks (`by_block.py`). The loss and the evidence lower bound of a measurement are in
this file too: a guard judges a step by the one, and `fit` follows the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..curvature.average import add_terms, measure_latent_correction
from ..curvature.base import split_key
from ..curvature.measurement import Measurement
from ..families.base import Family, Q
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..steps.guards import Backtracking
from ..steps.schedule import at
from ..steps.step import Step
from .state import Info, State

if TYPE_CHECKING:
    from ..families.latent.mixture import Mixture
    from .rule import Rule


class Request(NamedTuple):
    """What the caller of a step wants besides the new state.

    `diagnose` adds the bound and the decrement to the `Info`. `strict` rejects a step if any entry of the gradient is
    not finite; otherwise, in a family whose entries move independently, such an entry counts as zero. (To reject before
    anything moves takes one more pass over the gradient: at 10⁷ parameters a quarter of SGD's time.)

    `checked=False` leaves out the `Info` and the rejection of steps that are not finite, for a caller that repeats a
    small step many times and checks only the last state; the checks would double the time of such a step.

    `measured` is the measurement at the current q, where a guard has already made it on the same batch and points.
    """

    diagnose: bool = False
    strict: bool = False
    checked: bool = True
    measured: Measurement | None = None


StepResult = tuple[State, Info, Measurement | None]
"""The new state, how the step went, and the measurement at the new q where the guard made one."""

StepFunction = Callable[["Rule", Any, State, PyTree, "Key | None", Request], StepResult]
"""Who takes a step: `step_plain`, `step_components` or `step_blocks`."""


def step_plain(
    rule: Rule, objective: AbstractObjective, state: State, batch: PyTree, key: Key | None, request: Request
) -> StepResult:
    """One update of all of q at once."""
    state = dataclasses.replace(state, q=at_temperature(rule, state.q, state.count))
    return update(rule, objective, state, batch, key, request)


def update(
    rule: Rule,
    objective: AbstractObjective,
    state: State,
    batch: PyTree,
    key: Key | None,
    request: Request,
    correction: Any = None,
    temperature_scale: Float[Array, ""] | None = None,
) -> StepResult:
    """Measure, form, guard, keep.

    Args:
        rule: The algorithm.
        objective: The loss ℓ̄.
        state: The current state; q is already at the temperature of this step.
        batch: The examples of this step, or None for a plain function.
        key: The random key of this step, or None where nothing is random.
        request: What the caller wants besides the new state.
        correction: For a component of a mixture, its −log r_k(θ): a term of the loss, weighted by the temperature.
        temperature_scale: What the temperature is multiplied by, in a search for many minima.

    Returns:
        The new state, the `Info` (None if `request.checked` is false), and the measurement at the new q if the guard
        made one.
    """
    q, steps = state.q, rule.steps
    measured = request.measured
    if measured is None:
        measured = measure(rule, objective, q, batch, state.aux, key, correction)
    elif correction is not None:  # The other components have moved since, so −log r_k is measured again.
        measured = _with_correction(rule, objective, q, measured, key, correction)
    finite = jnp.isfinite(measured.value) & _all_finite(
        (measured.gradient, measured.curvature, measured.latent_correction)
    )
    gate, used = None, measured
    if request.checked and rejects_by_zero_rate(rule, q):
        gate = jnp.asarray(finite if request.strict else jnp.isfinite(measured.value), float)
        used = dataclasses.replace(
            measured, gradient=_finite_part(measured.gradient), curvature=_finite_part(measured.curvature)
        )
    step, average = form_step(rule, objective, state, used, gate, temperature_scale)
    scale = None if step.divisor is None else step.divisor.v
    bound = _bound(rule, objective, q, measured, step) if request.diagnose else None
    decrement = q.decrement(step) if request.diagnose else None

    def assess(candidate: Family) -> tuple[Array, Measurement]:
        again = None if key is None else jax.random.clone(key)  # The loss is compared at the same points.
        there = measure(rule, objective, candidate, batch, state.aux, again, correction)
        return loss_of(rule, objective, candidate, there, step.temperature), there

    before = loss_of(rule, objective, q, measured, step.temperature)
    rounding = 32 * jnp.finfo(before.dtype).eps * (1 + jnp.abs(before))
    limit = before + rounding + (0.0 if rule.points.delta else rule.curvature.slack)
    origin = q
    if steps.lazy:  # The sum of all natural gradients so far is taken from the first q.
        origin, average = state.previous, jax.tree.map(jnp.add, average, q.natural_step(step))
        gradient, curvature = origin.derivatives(average)
        step = dataclasses.replace(step, gradient=gradient, curvature=curvature)
    guarded = rule.guard.take(origin, step, assess, limit)
    value = measured.value + _regularizer(rule, objective, q)
    previous = q if steps.momentum is not None else state.previous
    aux = rule.curvature.updated_aux(objective, state.aux, measured.aux, step.rate * guarded.fraction)
    after = State(guarded.q, state.count + 1, previous, average, aux, scale)
    if not request.checked:
        return after, None, guarded.measured  # pyright: ignore[reportReturnType]  # The caller asked for no Info.
    after = _kept(rule, state, after, finite & (guarded.fraction > 0) if gate is None else gate > 0)
    rate = jnp.asarray(at(steps.rates.mean, state.count), float) * guarded.fraction
    loss = None if correction is None else _energy(rule, objective, q, measured, step, step.temperature)
    info = Info(
        value,
        rate,
        guarded.acted,
        guarded.fraction,
        finite,
        guarded.inside,
        bound,
        decrement,
        loss,
        guarded.evaluations,
    )
    return after, info, guarded.measured


# Measure.


def is_mixture(q: Family) -> TypeGuard[Mixture]:
    """Whether q is a mixture, whose components each take a step of their own."""
    return q.is_mixture


def for_each_component(q: Mixture, function: Callable[..., Any], key: Key | None, *trees: PyTree) -> Any:
    """function(component, key, −log r_k, its slice of the trees) for every component, along a leading axis."""
    indices = jnp.arange(q.count)
    if key is None:
        return jax.vmap(lambda c, k, *more: function(c, None, q.repulsion(k), *more))(q.components, indices, *trees)
    # A mixture of one component uses the key itself, so that it is the plain rule to the last digit.
    own = jnp.reshape(key, (1,)) if q.count == 1 else jax.random.split(key, q.count)
    return jax.vmap(lambda c, k, key, *more: function(c, key, q.repulsion(k), *more))(
        q.components, indices, own, *trees
    )


def measure(
    rule: Rule,
    objective: AbstractObjective,
    q: Family,
    batch: PyTree,
    aux: PyTree,
    key: Key | None,
    correction: Any = None,
) -> Measurement:
    """E_q of the data's loss, of its derivatives and of `correction` at q; for a mixture, of each component."""
    if is_mixture(q):
        one = lambda component, key, correction: measure(rule, objective, component, batch, aux, key, correction)
        return for_each_component(q, one, key)
    measured = rule.curvature.measure(objective, q, rule.points, batch, aux, key)
    return measured if correction is None else _with_correction(rule, objective, q, measured, key, correction)


def _with_correction(
    rule: Rule, objective: AbstractObjective, q: Family, measured: Measurement, key: Key | None, correction: Any
) -> Measurement:
    point_key = split_key(rule.points, objective, key)[0]
    return dataclasses.replace(
        measured, latent_correction=measure_latent_correction(correction, rule.curvature, q, rule.points, point_key)
    )


# Form.


def form_step(
    rule: Rule,
    objective: AbstractObjective,
    state: State,
    measured: Measurement,
    gate: Array | None = None,
    temperature_scale: Float[Array, ""] | None = None,
) -> tuple[Step, PyTree]:
    """The step, and the new gradient average: the data's derivatives and the regularizer's, averaged, with their rates.

    All rates are multiplied by `gate`: 1, or 0 for a step that must not be taken.
    """
    steps, count = rule.steps, state.count
    added = state.q.from_gaussian_terms(*objective.regularizer.derivatives(state.q.gaussian))
    gradient, curvature, average = measured.gradient, measured.curvature, state.average
    if steps.average is not None and steps.average.over == "data":
        average, gradient = steps.average.updated(average, gradient, count, gate)
    temperature = jnp.asarray(at(steps.temperature, count), float) * (
        1.0 if temperature_scale is None else temperature_scale
    )
    gradient, curvature = add_terms(state.q, (gradient, curvature), added)
    if measured.latent_correction is not None:
        pull = _times(temperature, (measured.latent_correction.gradient, measured.latent_correction.curvature))
        gradient, curvature = add_terms(state.q, (gradient, curvature), pull)
    if steps.average is not None and steps.average.over == "total":
        average, gradient = steps.average.updated(average, gradient, count, gate)
    rate, precision_rate = steps.rates_at(count, objective.size, temperature)
    divisor = None
    if steps.scaling is not None:
        fraction = precision_rate * temperature
        mixed = fraction if gate is None else gate * fraction
        v = steps.scaling.updated(state.scale, measured.curvature, objective.size, mixed)
        divisor = steps.scaling.divisor(objective.size, temperature, added[1], v, fraction, count)
    step = Step(
        gradient,
        curvature,
        rate,
        precision_rate,
        temperature,
        None if steps.momentum is None else jnp.asarray(at(steps.momentum, count), float),
        None if steps.momentum is None else state.previous,
        steps.reverse,
        divisor=divisor,
    )
    return step if gate is None else step.shortened(gate), average


def initial_accumulators(rule: Rule, q: Any, objective: AbstractObjective | None) -> tuple[Any, PyTree, PyTree]:
    """The initial accumulators: previous q (momentum), gradient average, and curvature v (scaling).

    q is any `Family`; for lazy steps an `ExponentialFamily`, for scaled ones with a diagonal precision in its Gaussian.
    """
    steps, average = rule.steps, None
    if steps.average is not None:
        average = jax.tree.map(jnp.zeros_like, q.gradient_like())
    if steps.lazy:
        average = jax.tree.map(jnp.zeros_like, q.natural())
    previous = q if steps.lazy or steps.momentum is not None else None
    scale = None
    if steps.scaling is not None and objective is not None:
        prior = objective.regularizer.derivatives(q.gaussian)[1]
        temperature = at(steps.temperature, 0)
        scale = steps.scaling.first(q.gaussian.precision, objective.size, temperature, prior)
        if steps.scaling.by_prior and prior is None:
            raise ValueError(
                'damping="prior" damps by the prior\'s precision, and this objective has no prior: give it '
                "regularizer=δ, or the rule a number as damping."
            )
    return previous, average, scale


def at_temperature(rule: Rule, q: Q, count: Array) -> Q:
    """Under a temperature schedule, q with the precision S = (Nv + δ)/τ at the temperature of this step."""
    if not rule.steps.follows_temperature_schedule:
        return q
    temperature = rule.steps.temperature
    return q.with_scaled_precision(at(temperature, jnp.maximum(count - 1, 0)) / at(temperature, count))


# Keep.


def rejects_by_zero_rate(rule: Rule, q: Family) -> bool:
    """Whether a rejected step is taken as a step with rate 0, so that the old state need not be kept beside the new.

    That is not enough where a step has more to undo: a guard's halvings, the lazy sum, a precision at a new
    temperature.
    """
    steps = rule.steps
    simple = not (steps.lazy or steps.follows_temperature_schedule or isinstance(rule.guard, Backtracking))
    return simple and q.elementwise


def _kept(rule: Rule, state: State, after: State, good: Array) -> State:
    """The new state, or the old one where the step was not good."""
    select = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
    if rejects_by_zero_rate(rule, state.q):
        return dataclasses.replace(
            after, previous=select(after.previous, state.previous), aux=select(after.aux, state.aux)
        )
    return select(after, dataclasses.replace(state, count=after.count))


# What a measurement is worth: the loss, the energy and the bound.


def _regularizer(rule: Rule, objective: AbstractObjective, q: Family) -> Array:
    regularizer = objective.regularizer
    return regularizer.at_mean(q.gaussian) if rule.points.delta else regularizer.expected(q.gaussian)


def loss_of(rule: Rule, objective: AbstractObjective, q: Family, measured: Measurement, temperature: Any) -> Array:
    """What a step should lower: ℓ̄(m) under the delta method, else E_q ℓ̄ − τH(q)."""
    total = measured.value + _regularizer(rule, objective, q)
    if measured.latent_correction is not None:
        total = total + temperature * measured.latent_correction.value
    return total if rule.points.delta else total - temperature * jnp.sum(q.joint_entropy())


def _energy(
    rule: Rule, objective: AbstractObjective, q: Family, measured: Measurement, step: Step, temperature: Any
) -> Array:
    """E_q ℓ̄ − τH(q); under the delta method to second order in θ − m."""
    loss = loss_of(rule, objective, q, measured, temperature)
    if not rule.points.delta:
        return loss
    curvature = step.curvature
    if measured.latent_correction is not None and curvature is not None:
        # The step's curvature has the correction at the step's temperature, which may be another.
        curvature = q.added(curvature, _times(temperature - step.temperature, measured.latent_correction.curvature))
    second = 0.0 if curvature is None else 0.5 * q.trace(curvature)
    return loss + second - temperature * jnp.sum(q.joint_entropy())


def _bound(rule: Rule, objective: AbstractObjective, q: Family, measured: Measurement, step: Step) -> Array:
    """The evidence lower bound −E_q ℓ̄ + H(q); under the delta method to second order in θ − m."""
    return -_energy(rule, objective, q, measured, step, 1.0)


def bound_at(rule: Rule, objective: AbstractObjective, q: Family, batch: PyTree, aux: PyTree, key: Key | None) -> Array:
    """The evidence lower bound at q, measured at the rule's points with its curvature."""

    def of(q: Family, key: Key | None, correction: Any = None) -> Array:
        previous, average, scale = initial_accumulators(rule, q, objective)
        state = State(q, jnp.zeros((), int), previous, average, aux, scale)
        measured = measure(rule, objective, q, batch, aux, key, correction)
        return _bound(rule, objective, q, measured, form_step(rule, objective, state, measured)[0])

    return q.average(for_each_component(q, of, key)) + q.choice.entropy() if is_mixture(q) else of(q, key)


def _times(factor: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def _finite_part(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def _all_finite(tree: PyTree) -> Array:
    leaves = jax.tree.leaves(tree)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [True]))
