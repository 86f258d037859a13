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
from jaxtyping import Array, Float

from ..curvature.average import add_terms, measure_latent_correction
from ..curvature.base import split_key
from ..curvature.measurement import Measurement
from ..families.base import Family, Q
from ..families.gaussian.base import GaussianFamily
from ..numerics.factors import shared_factors
from ..numerics.loops import computed_after
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import all_finite, coarsest_eps, zeros_like
from ..objectives.base import AbstractObjective
from ..steps.guards import Backtracking, Guard, GuardedStep
from ..steps.schedule import Planned, Scheduled, at
from ..steps.step import Step
from ..steps.window import Window, averaged_fraction, warming
from .half_precision import is_half, rounded, widened
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

    `judged` says that its value is no loss: it is 0, or NaN where the derivatives are not finite, because somebody else
    has evaluated the loss. Then the derivatives are not looked at again, and the prior's value is not added: on a CPU
    both would store arrays as large as the parameters.
    """

    diagnose: bool = False
    strict: bool = False
    checked: bool = True
    measured: Measurement | None = None
    judged: bool = False


StepResult = tuple[State, Info, Measurement | None]
"""The new state, how the step went, and the measurement at the new q where the guard made one."""

StepFunction = Callable[["Rule", Any, State, PyTree, "Key | None", Request], StepResult]
"""Who takes a step: `step_plain`, `step_components` or `step_blocks`."""


def step_plain(
    rule: Rule, objective: AbstractObjective, state: State, batch: PyTree, key: Key | None, request: Request
) -> StepResult:
    """One update of all of q at once."""
    if is_half(state.q):
        after, info, measured = step_plain(rule, *widened(objective, state), batch, key, request)
        return rounded(after, state), info, measured
    q = at_temperature(rule.steps.temperature_schedule, state.q, state.count, state.horizon)
    state = dataclasses.replace(state, q=q)
    return update(rule, objective, state, batch, key, request)


@shared_factors()
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
    if measured is not None and measured.factors is not None:
        q.recall_factors(measured.factors)
    if measured is None:
        measured = measure(rule, objective, drawn_around(state, q), batch, state.aux, key, correction)
    elif correction is not None:  # The other components have moved since, so −log r_k is measured again.
        measured = _with_correction(rule, objective, q, measured, key, correction)
    finite = jnp.isfinite(measured.value)
    if not request.judged:
        finite &= all_leaves_finite((measured.gradient, measured.curvature, measured.latent_correction))
    value = measured.value if request.judged else measured.value + _regularizer(rule, objective, q)
    gate, used = None, measured
    if request.checked and rejects_by_zero_rate(rule, q):
        gate = jnp.asarray(finite if request.strict else jnp.isfinite(measured.value), float)
        gate = computed_after(
            gate, jnp.isfinite(value)
        )  # The prior's term is read off the old q, which the step overwrites.
        used = _finite_measurement(rule, objective, q, measured)
    share = _share(rule, objective, state, batch)
    step, average, shaped = form_step(rule, objective, state, used, gate, temperature_scale, share)
    if q.counts_examples:
        of_all = objective.share(batch)
        step = dataclasses.replace(step, examples=None if of_all is None else of_all * objective.size)
    scale = None if step.divisor is None else step.divisor.v
    bound = _bound(rule, objective, q, measured, step) if request.diagnose else None
    decrement = q.decrement(step) if request.diagnose else None
    if steps.rates.groups:
        step = dataclasses.replace(step, gradient=steps.rates.for_groups(step.gradient, state.count))

    # The loss is compared at the same points. The key is cloned here and at each use, as JAX counts uses.
    same_key = None if key is None else jax.random.clone(key)

    def assess(candidate: Family) -> tuple[Array, Measurement]:
        again = None if same_key is None else jax.random.clone(same_key)
        there = measure(rule, objective, candidate, batch, state.aux, again, correction)
        loss = loss_of(rule, objective, candidate, there, step.temperature)
        if rule.points.exact:
            # No step could be formed from messages that are not finite. (Elsewhere derivatives overflow together with
            # the loss, and a step by itself need not compute the candidate's Hessian.)
            loss = jnp.where(all_leaves_finite((there.gradient, there.curvature)), loss, jnp.nan)
        return loss, there if correction is not None else with_factors(candidate, there)

    before = loss_of(rule, objective, q, measured, step.temperature)
    eps = coarsest_eps((before, q))
    rounding = 32 * eps * (1 + jnp.abs(before))
    limit = before + rounding + (0.0 if rule.points.delta else rule.curvature.slack)
    limit = jnp.where(jnp.isfinite(limit), limit, jnp.finfo(limit.dtype).max)  # Any finite loss is then better.
    origin = q
    if steps.lazy:  # The sum of all natural gradients so far is taken from the first q.
        origin, average = state.previous, jax.tree.map(jnp.add, average, q.natural_step(step))
        gradient, curvature = origin.derivatives(average)
        step = dataclasses.replace(step, gradient=gradient, curvature=curvature)
    if steps.acceleration is not None:
        step = dataclasses.replace(step, proposal=steps.acceleration.propose(state.history, q, step))
    guard, part = guard_of(rule, objective, batch), jnp.ones(())
    if guard.evaluates and rule.points.exact:
        slope = q.decrement(step) if decrement is None else decrement
        gain = 2 * step.rate * slope
        step = dataclasses.replace(step, gain=gain)
        if eps >= jnp.finfo(jnp.float32).eps:
            # Where the loss cannot judge the step, because its gain is of the size of the rounding errors, a quarter of
            # it is taken: a whole one may lead from one side of the minimum to the other, again and again. (In float64
            # such a gain is far below any tolerance.)
            part = jnp.where((gain > 0) & (gain < 4 * rounding), 0.25, 1.0)
            step = dataclasses.replace(step.shortened(part), gain=part * gain)
    guarded = guard.take(origin, step, assess, limit)
    if steps.weight_decay is not None:
        guarded = dataclasses.replace(guarded, q=_decayed(rule, q, guarded.q, state.count, gate))
    history = state.history
    if steps.acceleration is not None:
        history = steps.acceleration.updated(history, q, step, guarded)
    previous = q if steps.momentum is not None else state.previous
    aux = rule.curvature.updated_aux(objective, state.aux, measured.aux, step.rate * guarded.fraction)
    averaged, unit = _updated_start(rule, objective, state, step, guarded.q, gate, share)
    after = State(
        guarded.q,
        state.count + 1,
        previous,
        average,
        aux,
        scale,
        history=history,
        averaged=averaged,
        unit=unit,
        shaped=shaped,
        horizon=state.horizon,
    )
    if not request.checked:
        return after, None, guarded.measured  # pyright: ignore[reportReturnType]  # The caller asked for no Info.
    after = _kept(rule, state, after, finite & (guarded.fraction > 0) if gate is None else gate > 0)
    # A proposal does not depend on the plain step's length.
    taken = guarded.fraction * (part if guarded.proposed is None else jnp.where(guarded.proposed, 1.0, part))
    starts = starting(state)
    rate = jnp.asarray(at(steps.rates.mean, state.count), float) * taken
    if starts is not None:
        rate = jnp.asarray(jnp.where(starts, 0.0, rate * steps.rate_left(state.count, state.horizon)))
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
        None if decrement is None else _length(q, step, decrement, guarded),
    )
    return after, info, guarded.measured


def _decayed(rule: Rule, before: Family, after: Family, count: Array, gate: Array | None) -> Family:
    """The new q with its parameters shrunk, m' − ρwm: the decoupled weight decay, beside the rule's step."""
    decay: Any = rule.steps.weight_decay
    rate = at(rule.steps.rates.mean, count) * (1.0 if gate is None else gate)
    pull = rule.steps.rates.for_groups(decay.pull(before.params, count), count)
    return after.with_params(jax.tree.map(lambda m, p: m - jnp.asarray(rate, m.dtype) * p, after.params, pull))


def guard_of(rule: Rule, objective: AbstractObjective, batch: PyTree) -> Guard:
    """The rule's guard for a step on this batch: another one where the loss there is no judge of the step."""
    return rule.guard if objective.judges_steps(batch) else rule.guard.without_judge()


def _length(q: Family, step: Step, decrement: Array, guarded: GuardedStep) -> Array:
    """½⟨Δ, FΔ⟩ of the displacement Δ: of ρ times the natural gradient, or as measured where the step is another one."""
    # A rejected step counts in full, and a much shortened one in part: it is short because of the guard (which rounding
    # errors of the loss can mislead) and not because the optimum is near.
    fraction = jnp.where(guarded.fraction > 0, jnp.maximum(guarded.fraction, 0.1), 1.0)
    plain = (jnp.maximum(step.rate, step.precision_rate) * fraction) ** 2 * decrement
    if step.momentum is None and step.proposal is None:
        return plain
    return jnp.where(guarded.fraction > 0, q.distance(guarded.q), plain)


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


def with_factors(q: Family, measured: Measurement) -> Measurement:
    """The measurement at q with the factors that the step from there needs as well."""
    return dataclasses.replace(measured, factors=q.factors())


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
    share: Any = None,
) -> tuple[Step, PyTree, PyTree]:
    """The step: the data's derivatives and the regularizer's, averaged, with their rates.

    Returned with it are the new gradient average and the new state of the gradient's shaping.

    All rates are multiplied by `gate`: 1, or 0 for a step that must not be taken. `share` is M/N, where a window in
    epochs may use it.
    """
    steps, count = rule.steps, state.count
    added = state.q.from_gaussian_terms(*objective.regularizer.derivatives(state.q.gaussian))
    measured = _made_positive(rule, state, measured, share)
    gradient, curvature, average, shaped = measured.gradient, measured.curvature, state.average, state.shaped
    if steps.shaping is not None:
        shaped, gradient = steps.shaping.updated(shaped, gradient, state.q.params, objective.size, gate)
        if rule.curvature.squares_gradient and not rule.points.chained:  # Masks weight a square by themselves.
            curvature = rule.curvature.of_gradient(state.q, None, gradient, objective.size)
            measured = dataclasses.replace(measured, curvature=curvature)
    if steps.average is not None and steps.average.over == "data":
        average, gradient = steps.average.updated(average, gradient, count, gate)
    temperature = jnp.asarray(at(steps.temperature, count, state.horizon), float) * (
        1.0 if temperature_scale is None else temperature_scale
    )
    gradient, curvature = add_terms(state.q, (gradient, curvature), added)
    if measured.latent_correction is not None:
        pull = _times(temperature, (measured.latent_correction.gradient, measured.latent_correction.curvature))
        gradient, curvature = add_terms(state.q, (gradient, curvature), pull)
    if steps.average is not None and steps.average.over == "total":
        average, gradient = steps.average.updated(average, gradient, count, gate)
    rate, precision_rate = steps.rates_at(count, objective.size, temperature, share)
    divisor, retraction_weight = None, None
    if state.averaged is not None:
        replaced = averaged_fraction(
            state.averaged, precision_rate * temperature, nonnegative=rule.curvature.nonnegative
        )
        if steps.scaling is not None:
            rate = steps.scaling.limited(rate) * steps.rate_left(count, state.horizon)
        rate, precision_rate = jnp.asarray(jnp.where(starting(state), 0.0, rate)), replaced / temperature
        retraction_weight = jnp.where(warming(state.averaged), 0.0, 1.0)
    if steps.scaling is not None:
        fraction = precision_rate * temperature
        mixed = fraction if gate is None else gate * fraction
        v = steps.scaling.updated(state.scale, measured.curvature, objective.size, mixed)
        divisor = steps.scaling.divisor(objective.size, temperature, added[1], v, fraction, count, state.unit)
    step = Step(
        gradient,
        curvature,
        rate,
        precision_rate,
        temperature,
        None if steps.momentum is None else jnp.asarray(at(steps.momentum, count), float),
        None if steps.momentum is None else state.previous,
        steps.reverse,
        retraction_weight=retraction_weight,
        divisor=divisor,
    )
    return step if gate is None else step.shortened(gate), average, shaped


def initial_accumulators(rule: Rule, q: Any, objective: AbstractObjective | None) -> tuple[Any, PyTree, PyTree]:
    """The initial accumulators: previous q (momentum), gradient average, and curvature v (scaling).

    q is any `Family`; for lazy steps an `ExponentialFamily`, for scaled ones with a diagonal precision in its Gaussian.
    """
    steps, average = rule.steps, None
    if steps.average is not None:
        average = jax.tree.map(zeros_like, q.gradient_like())
    if steps.lazy:
        average = jax.tree.map(zeros_like, q.natural())
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


# Start from what is measured.

_NARROW = 1e16
"""What the prior's precision is multiplied by for the first measurement, so that it is one at the mean."""


def has_proper_prior(objective: AbstractObjective, q: Family) -> bool:
    """Whether the prior keeps S above zero where the data say nothing.

    If not, precisions start from a number and decay as published.
    """
    gaussian = q.gaussian
    if not isinstance(gaussian, GaussianFamily) or not objective.regularizer.normalized(gaussian):
        return False
    return jax.eval_shape(objective.regularizer.derivatives, gaussian)[1] is not None


def initial_measurements(rule: Rule, q: Family, objective: AbstractObjective | None, given: bool) -> tuple[Any, Any]:
    """`State.averaged` and `State.unit` before the first step; None where the precision starts from a number.

    Args:
        rule: The algorithm.
        q: The first member of its family.
        objective: The objective, or None.
        given: Whether the user gave a member of the family: its precision is then kept.
    """
    steps = rule.steps
    if not steps.measured or rule.search is not None or objective is None or not objective.knows_batch_size:
        return None, None
    if not has_proper_prior(objective, q):
        return None, None
    relative = steps.scaling is not None and steps.scaling.measured
    return jnp.asarray(jnp.inf if given else 0.0, float), jnp.zeros(()) if relative else None


def _share(rule: Rule, objective: AbstractObjective, state: State, batch: PyTree) -> Any:
    """M/N, for a window in epochs and a measured start; None where neither is used."""
    used = state.averaged is not None or isinstance(rule.steps.rates.precision, Window)
    return objective.share(batch) if used and has_proper_prior(objective, state.q) else None


def drawn_around(state: State, q: Any) -> Any:
    """The q to draw points from: before anything is measured all but its mean, as the prior would be too wide.

    Args:
        state: The state before the step.
        q: Its q, at the temperature of the step.
    """
    if state.averaged is None:
        return q
    return q.with_scaled_precision(jnp.where(state.averaged == 0, _NARROW, 1.0))


def starting(state: State) -> Any:
    """Whether this step only measures: the first of a state whose precision, or whose rate's unit, is measured."""
    if state.averaged is None:
        return None
    return state.averaged == 0 if state.unit is None else (state.averaged == 0) | (state.unit == 0)


def _made_positive(rule: Rule, state: State, measured: Measurement, share: Any) -> Measurement:
    r"""The measurement with a curvature to start a precision from.

    Squares are positive as they are. An estimate that can be negative (Stein's, from a single draw) is replaced in the
    first steps by $\tfrac MN g∘g$, with g the gradient of the sum over N examples that a batch of M estimates: at a
    stationary point its expectation is Σᵢ gᵢ², the Gauss–Newton diagonal, and away from one it is larger, so that q
    starts rather too narrow than too wide.
    """
    if state.averaged is None or rule.curvature.nonnegative:
        return measured
    scale = 1.0 if share is None else share
    squares = jax.tree.map(lambda g: jnp.asarray(scale, g.dtype) * g**2, measured.gradient)
    positive = state.q.gaussian.structure.of_diagonal(squares)
    select = lambda new, old: jnp.where(warming(state.averaged), new, old)
    return dataclasses.replace(measured, curvature=jax.tree.map(select, positive, measured.curvature))


def _updated_start(
    rule: Rule, objective: AbstractObjective, state: State, step: Step, q: Family, gate: Array | None, share: Any
) -> tuple[Any, Any]:
    """`State.averaged` and `State.unit` after a step to q.

    The unit is computed from the new precision, once, in a branch: so that it takes no pass over the parameters in any
    other step.
    """
    averaged, unit, divisor, scaling = state.averaged, state.unit, step.divisor, rule.steps.scaling
    if averaged is None:
        return None, None
    taken = 1.0 if gate is None else gate
    if unit is not None and divisor is not None and scaling is not None:
        first = jnp.asarray(unit == 0) & (jnp.asarray(taken) > 0)

        def measured_unit(gaussian: Any) -> Array:
            # What a branch takes from outside is stored, so that the prior's precision is computed in here.
            prior = state.q.from_gaussian_terms(*objective.regularizer.derivatives(gaussian))[1]
            with_prior = dataclasses.replace(divisor, prior=prior)
            return scaling.unit(with_prior, gaussian.precision, share).astype(unit.dtype)

        unit = jax.lax.cond(first, measured_unit, lambda _: unit, q.gaussian)
    return averaged + taken, unit


def at_temperature(temperature: Scheduled | Planned | None, q: Q, count: Array, horizon: Any = None) -> Q:
    """Under a temperature schedule, q with the precision S = (Nv + δ)/τ at the temperature of this step."""
    if temperature is None or (isinstance(temperature, Planned) and horizon is None):
        return q
    before = at(temperature, jnp.maximum(count - 1, 0), horizon)
    return q.with_scaled_precision(before / at(temperature, count, horizon))


def planned(rule: Rule, state: State, horizon: Any) -> State:
    """The state with so many planned steps, those that it has taken included: q is then at the temperature of the plan.

    Args:
        rule: The algorithm.
        state: A first state, or one to go on from.
        horizon: How many steps are planned in all; None leaves the state as it is.
    """
    if horizon is None:
        return state
    temperature, last = rule.steps.temperature_schedule, jnp.maximum(state.count - 1, 0)
    q, horizon = state.q, jnp.asarray(horizon, int)
    if isinstance(temperature, Planned):
        before, after = at(temperature, last, state.horizon), at(temperature, last, horizon)
        # With the same plan the factor is exactly 1: an interrupted fit goes on with the very same numbers.
        q = q.with_scaled_precision(jnp.asarray(before / after))
    return dataclasses.replace(state, q=q, horizon=horizon)


# Keep.


def rejects_by_zero_rate(rule: Rule, q: Family) -> bool:
    """Whether a rejected step is taken as a step with rate 0, so that the old state need not be kept beside the new.

    That is not enough where a step has more to undo: a guard's halvings, the lazy sum, a precision at a new
    temperature of any schedule. (A `WarmUp` rises by little in a step, and q is at its temperature after a rejected
    step too: to keep another copy of a large network's precision for that would not be worth the memory.)
    """
    steps = rule.steps
    scheduled = isinstance(steps.temperature_schedule, Scheduled)
    simple = not (steps.lazy or scheduled or isinstance(rule.guard, Backtracking))
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
    """The evidence lower bound −E_q ℓ̄ + H(q); under the delta method to second order in θ − m.

    NaN at points that are no draws of q, where the loss would give a number that bounds nothing.
    """
    if rule.points.surrogate:
        return jnp.full_like(measured.value, jnp.nan)
    return -_energy(rule, objective, q, measured, step, 1.0)


def bound_at(rule: Rule, objective: AbstractObjective, q: Family, batch: PyTree, aux: PyTree, key: Key | None) -> Array:
    """The evidence lower bound at q, measured at the rule's points with its curvature."""

    def of(q: Family, key: Key | None, correction: Any = None) -> Array:
        previous, average, scale = initial_accumulators(rule, q, objective)
        shaped = None if rule.steps.shaping is None else rule.steps.shaping.first(q.params)
        state = State(q, jnp.zeros((), int), previous, average, aux, scale, shaped=shaped)
        measured = measure(rule, objective, q, batch, aux, key, correction)
        return _bound(rule, objective, q, measured, form_step(rule, objective, state, measured)[0])

    return q.average(for_each_component(q, of, key)) + q.choice.entropy() if is_mixture(q) else of(q, key)


def _times(factor: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def _finite_measurement(rule: Rule, objective: AbstractObjective, q: Family, measured: Measurement) -> Measurement:
    """The measurement with 0 in place of entries that are not finite, for a q whose entries move independently."""
    gradient = _finite_part(measured.gradient)
    if rule.curvature.squares_gradient and rule.points.at_mean:  # Squares of the finite part need no look of their own.
        curvature = rule.curvature.of_gradient(q, None, gradient, objective.size)
    else:
        curvature = _finite_part(measured.curvature)
    return dataclasses.replace(measured, gradient=gradient, curvature=curvature)


def _finite_part(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def all_leaves_finite(tree: PyTree) -> Array:
    """Whether all entries of all leaves are finite numbers."""
    return jnp.all(jnp.array([all_finite(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)] or [True]))
