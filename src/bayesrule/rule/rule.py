"""The Bayesian learning rule: one update, made of four pieces (family, points, curvature, steps)."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..curvature.average import plus, repelled
from ..curvature.base import Curvature, keys
from ..curvature.measurement import Measurement
from ..families.base import Family
from ..families.start import Start, as_start
from ..objectives.base import AbstractObjective
from ..objectives.objective import as_objective
from ..points.base import Points
from ..steps.guards import Backtracking, Guard, NoGuard
from ..steps.schedule import Scheduled, at
from ..steps.step import Step
from ..steps.steps import Steps
from .by_block import step_blocks, sweeps
from .by_component import on_each, step_components
from .compatibility import check
from .state import Info, State


class Rule(eqx.Module):
    r"""An algorithm: a value made of four pieces.

    $$λ ← (1 − ρτ)λ − ρ∇_μ E_q[\barℓ(θ) + τ\log h(θ)]$$

    The family says which q; the points stand for E_q; the curvature is what is measured there; the
    steps say how far, and the guard keeps λ inside Ω. `init` and `step` run it, `replace` changes a
    piece, `print` shows the derivation. A `search`, which only a mixture may have, records what has converged between
    two steps and starts it anew.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule = blr.newton()
    >>> state = rule.init(jnp.array([3.0]))
    >>> state, info = rule.step(lambda x: jnp.sum(x**2), state)      # exact in one step
    >>> float(state.q.mean[0]), float(state.q.precision[0, 0])
    (0.0, 2.0)
    """

    family: Start
    points: Points
    curvature: Curvature
    steps: Steps
    guard: Guard
    search: Any
    name: str = eqx.field(static=True)
    section: str = eqx.field(static=True)

    def __init__(
        self,
        family: Any,
        points: Points,
        curvature: Curvature,
        steps: Steps,
        guard: Guard | None = None,
        search: Any = None,
        *,
        name: str = "rule",
        section: str = "",
    ):
        self.family = as_start(family)
        self.points, self.curvature, self.steps = points, curvature, steps
        self.guard, self.search = NoGuard() if guard is None else guard, search
        self.name, self.section = name, section
        check(self.family, points, curvature, steps, self.guard)
        if search is not None:
            search.check(self.family)

    def replace(self, **pieces: Any) -> Rule:
        """The same algorithm with other pieces: a new algorithm."""
        known = {field.name for field in dataclasses.fields(self)}
        unknown = set(pieces) - known
        if unknown:
            raise ValueError(f"A rule has no piece {sorted(unknown)}; its pieces are {sorted(known)}.")
        mine = {name: getattr(self, name) for name in known}
        if isinstance(pieces.get("family"), type) and issubclass(pieces["family"], Family):
            pieces["family"] = self.family.of(pieces["family"])  # a bare class starts where this algorithm does
        if "name" not in pieces:
            # The steps' numbers stay out of the name: it is static, and a sweep over them must not recompile.
            said = {name: "…" if name == "steps" else piece for name, piece in pieces.items() if name != "section"}
            changed = ", ".join(f"{name}={piece}" for name, piece in said.items())
            mine["name"] = f"{self.name}, {changed}" if " with " in self.name else f"{self.name} with {changed}"
        return Rule(**(mine | pieces))

    def init(self, params: PyTree, objective: Any = None, key: Any = None) -> State:
        """The state to start from: `params` is a member of the family, or bare parameters.

        An algorithm that spreads its own starts takes None, and a key to spread them by.
        """
        objective = None if objective is None else as_objective(objective)
        found = None
        if self.search is not None:
            params, found = self.search.first(params, self.family, key)
        params = params if objective is None else objective.starting_point(params)
        q: Any = self.family.start(params, objective, at(self.steps.temperature, 0))
        check(self.family, self.points, self.curvature, self.steps, self.guard, q)
        count, aux = jnp.zeros((), int), self.curvature.first(objective, q)
        if q.is_mixture:
            average, scale = q.each(lambda member: self.initial_accumulators(member, objective)[1:])
            return State(q, count, None, average, aux, scale, found)
        previous, average, scale = self.initial_accumulators(q, objective)
        return State(q, count, previous, average, aux, scale)

    def initial_accumulators(self, q: Any, objective: AbstractObjective | None) -> tuple[Any, PyTree, PyTree]:
        """What momentum, averaging and scaling begin with."""
        average = None
        if self.steps.average is not None:
            average = jax.tree.map(jnp.zeros_like, q.gradient_like())
        if self.steps.lazy:
            average = jax.tree.map(jnp.zeros_like, q.natural())
        previous = q if self.steps.lazy or self.steps.momentum is not None else None
        scale = None
        if self.steps.scaling is not None and objective is not None:
            prior = objective.regularizer.derivatives(q.gaussian)[1]
            temperature = at(self.steps.temperature, 0)
            scale = self.steps.scaling.first(q.gaussian.precision, objective.size, temperature, prior)
            if self.steps.scaling.by_prior and prior is None:
                raise ValueError(
                    'damping="prior" damps by the prior\'s precision, and this objective has no prior: give it '
                    "regularizer=δ, or the rule a number as damping."
                )
        return previous, average, scale

    def step(self, objective: Any, state: State, batch: PyTree = None, key: Any = None) -> tuple[State, Info]:
        """One update from a batch of examples (or none, for a plain function): pure, and jittable."""
        return self.advance(objective, state, batch, key)[:2]

    def measure(
        self, objective: AbstractObjective, q: Any, batch: PyTree, aux: PyTree, key: Any, latent_correction: Any = None
    ) -> Measurement:
        """E_q of the data's loss, of its derivatives and of `latent_correction` at q (a mixture's: per component)."""
        if q.is_mixture:
            return on_each(
                q, lambda c, k, latent_correction: self.measure(objective, c, batch, aux, k, latent_correction), key
            )
        measured = self.curvature.measure(objective, q, self.points, batch, aux, key)
        return measured if latent_correction is None else self._repelled(objective, q, measured, key, latent_correction)

    def _repelled(
        self, objective: AbstractObjective, q: Any, measured: Measurement, key: Any, latent_correction: Any
    ) -> Measurement:
        point_key = keys(self.points, objective, key)[0]
        return dataclasses.replace(
            measured, latent_correction=repelled(latent_correction, self.curvature, q, self.points, point_key)
        )

    def advance(
        self,
        objective: Any,
        state: State,
        batch: PyTree = None,
        key: Any = None,
        *,
        diagnose: bool = False,
        strict: bool = False,
        measured: Measurement | None = None,
        latent_correction: Any = None,
        heat: Any = None,
    ) -> tuple[State, Info, Measurement | None]:
        """`step`, and with `diagnose` also the bound and the decrement.

        A loss that is not finite leaves q as it was. With `strict` so does a gradient that is not finite in any entry;
        otherwise, in a family whose entries move by themselves, such an entry counts as zero. To know of it before
        anything moves takes one more pass over the gradient: at 10⁷ parameters a quarter of SGD's time.

        Where the guard had to measure the objective at the new q, that comes back too, and can be handed to the next
        step as `measured` if the batch and the points stay the same. A component of a mixture has `latent_correction`,
        a term of the entropy beside its own, and in a search `heat`, what the temperature is multiplied by.
        """
        objective = as_objective(objective)
        self._check_state(objective, state)
        if sweeps(self, objective, batch):
            return step_blocks(self, objective, state, batch, key, diagnose, strict)
        if state.q.is_mixture:
            return step_components(self, objective, state, batch, key, diagnose, strict, measured)
        if latent_correction is None:  # a mixture has seen to it for all of its components
            state = dataclasses.replace(state, q=self.at_temperature(state.q, state.count))
        q = state.q
        if measured is None:
            measured = self.measure(objective, q, batch, state.aux, key, latent_correction)
        elif latent_correction is not None:  # the other components have moved since
            measured = self._repelled(objective, q, measured, key, latent_correction)
        finite = jnp.isfinite(measured.value) & _all_finite(
            (measured.gradient, measured.curvature, measured.latent_correction)
        )
        go, seen = None, measured
        if self.rejects_by_zero_rate(q):
            go = jnp.asarray(finite if strict else jnp.isfinite(measured.value), float)
            seen = dataclasses.replace(
                measured, gradient=_finite_part(measured.gradient), curvature=_finite_part(measured.curvature)
            )
        step, average = self.formed(objective, state, seen, go, heat)
        scale = None if step.divisor is None else step.divisor.v
        bound = self._bound(objective, q, measured, step) if diagnose else None
        decrement = q.decrement(step) if diagnose else None

        def assess(candidate: Any) -> tuple[Array, Measurement]:
            again = None if key is None else jax.random.clone(key)  # the same points, on purpose
            there = self.measure(objective, candidate, batch, state.aux, again, latent_correction)
            return self._loss(objective, candidate, there, step.temperature), there

        before = self._loss(objective, q, measured, step.temperature)
        rounding = 32 * jnp.finfo(before.dtype).eps * (1 + jnp.abs(before))
        limit = before + rounding + (0.0 if self.points.delta else self.curvature.slack)
        origin = q
        if self.steps.lazy:  # the whole sum of natural gradients, from where it all began
            origin, average = state.previous, jax.tree.map(jnp.add, average, q.natural_step(step))
            gradient, curvature = origin.derivatives(average)
            step = dataclasses.replace(step, gradient=gradient, curvature=curvature)
        taken = self.guard.take(origin, step, assess, limit)
        value = measured.value + self._regularizer(objective, q)
        previous = q if self.steps.momentum is not None else state.previous
        aux = self.curvature.carried(objective, state.aux, measured.aux, step.rate * taken.fraction)
        after = State(taken.q, state.count + 1, previous, average, aux, scale)
        after = self._kept(state, after, finite & (taken.fraction > 0) if go is None else go > 0)
        rate = jnp.asarray(at(self.steps.rates.mean, state.count), float) * taken.fraction
        loss = None if latent_correction is None else self._energy(objective, q, measured, step, step.temperature)
        info = Info(
            value, rate, taken.acted, taken.fraction, finite, taken.inside, bound, decrement, loss, taken.evaluations
        )
        return after, info, taken.measured

    def at_temperature(self, q: Any, count: Array) -> Any:
        """Under a temperature schedule, q with the precision S = (Nv + δ)/τ at the temperature of this step."""
        if not self.follows_temperature_schedule:
            return q
        temperature = self.steps.temperature
        return q.with_scaled_precision(at(temperature, jnp.maximum(count - 1, 0)) / at(temperature, count))

    @property
    def follows_temperature_schedule(self) -> bool:
        """Whether q's precision follows a temperature schedule from step to step."""
        return self.steps.units == "fraction" and isinstance(self.steps.temperature, Scheduled)

    def rejects_by_zero_rate(self, q: Any) -> bool:
        """Whether a bad step is one with rates of zero: to choose between old and new would hold both at once.

        Not where a bad step has more to undo: a guard's halvings, the lazy sum, a precision at a new temperature.
        """
        simple = not (self.steps.lazy or self.follows_temperature_schedule or isinstance(self.guard, Backtracking))
        return simple and q.elementwise

    def _kept(self, state: State, after: State, good: Array) -> State:
        """The new state, or the old one where the step was not good."""
        select = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
        if self.rejects_by_zero_rate(state.q):
            return dataclasses.replace(
                after, previous=select(after.previous, state.previous), aux=select(after.aux, state.aux)
            )
        return select(after, dataclasses.replace(state, count=after.count))

    def bound(self, objective: Any, q: Any, batch: PyTree = None, key: Any = None, *, aux: PyTree = None) -> Array:
        """The evidence lower bound at q, as this rule's points and curvature see it."""
        objective = as_objective(objective)
        bound = objective.closed_form_bound(q, batch, key)
        if bound is not None:
            return bound
        aux = objective.aux if aux is None else aux

        def of(q: Any, key: Any, latent_correction: Any = None) -> Array:
            previous, average, scale = self.initial_accumulators(q, objective)
            state = State(q, jnp.zeros((), int), previous, average, aux, scale)
            measured = self.measure(objective, q, batch, aux, key, latent_correction)
            return self._bound(objective, q, measured, self.formed(objective, state, measured)[0])

        return q.average(on_each(q, of, key)) + q.choice.entropy() if q.is_mixture else of(q, key)

    def _check_state(self, objective: AbstractObjective, state: State) -> None:
        if (self.search is None) != (state.search is None) and state.q.is_mixture:
            made = "without a search" if state.search is None else "by a search"
            raise ValueError(f"This state was made {made}: start again with rule.init(state.q).")
        if (self.steps.momentum is not None or self.steps.lazy) and state.previous is None:
            raise ValueError("This state was made by a rule without momentum: start again with rule.init(state.q).")
        if self.steps.average is not None and state.average is None:
            raise ValueError("This state was made by a rule without averaging: start again with rule.init(state.q).")
        scaling = self.steps.scaling
        if scaling is not None and scaling.root and state.scale is None:
            prior = objective.regularizer.derivatives(state.q.gaussian)[1]
            if prior is not None:
                raise ValueError(
                    "This state was made without the objective's prior or by a rule without a square root: start again "
                    "with rule.init(state.q, objective)."
                )
        if objective.aux is not None and state.aux is None:
            raise ValueError("This objective carries aux along: make the state with rule.init(params, objective).")

    def formed(
        self,
        objective: AbstractObjective,
        state: State,
        measured: Measurement,
        go: Array | None = None,
        heat: Any = None,
    ) -> tuple[Step, PyTree]:
        """The step: the data's derivatives and the regularizer's, averaged, with their rates.

        All of the rates are multiplied by `go`: 1, or 0 for a step that must not be taken.
        """
        steps, count = self.steps, state.count
        added = state.q.from_gaussian_terms(*objective.regularizer.derivatives(state.q.gaussian))
        gradient, curvature, average = measured.gradient, measured.curvature, state.average
        if steps.average is not None and steps.average.over == "data":
            average, gradient = steps.average.updated(average, gradient, count, go)
        temperature = jnp.asarray(at(steps.temperature, count), float) * (1.0 if heat is None else heat)
        gradient, curvature = plus(state.q, (gradient, curvature), added)
        if measured.latent_correction is not None:
            pull = _times(temperature, (measured.latent_correction.gradient, measured.latent_correction.curvature))
            gradient, curvature = plus(state.q, (gradient, curvature), pull)
        if steps.average is not None and steps.average.over == "total":
            average, gradient = steps.average.updated(average, gradient, count, go)
        rate, precision_rate = steps.rates_at(count, objective.size, temperature)
        divisor = None
        if steps.scaling is not None:
            fraction = precision_rate * temperature
            mixed = fraction if go is None else go * fraction
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
        return step if go is None else step.shortened(go), average

    def _regularizer(self, objective: AbstractObjective, q: Any) -> Array:
        q = q.gaussian
        return objective.regularizer.at_mean(q) if self.points.delta else objective.regularizer.expected(q)

    def _loss(self, objective: AbstractObjective, q: Any, measured: Measurement, temperature: Any) -> Array:
        """What a step should lower: ℓ̄(m) under the delta method, else E_q ℓ̄ − τH(q)."""
        total = measured.value + self._regularizer(objective, q)
        if measured.latent_correction is not None:
            total = total + temperature * measured.latent_correction.value
        return total if self.points.delta else total - temperature * jnp.sum(q.joint_entropy())

    def _energy(
        self, objective: AbstractObjective, q: Any, measured: Measurement, step: Step, temperature: Any
    ) -> Array:
        """E_q ℓ̄ − τH(q); under the delta method to second order in θ − m."""
        loss = self._loss(objective, q, measured, temperature)
        if not self.points.delta:
            return loss
        curvature = step.curvature
        if (
            measured.latent_correction is not None and curvature is not None
        ):  # at this temperature, which may not be the step's
            curvature = q.added(curvature, _times(temperature - step.temperature, measured.latent_correction.curvature))
        second = 0.0 if curvature is None else 0.5 * q.trace(curvature)
        return loss + second - temperature * jnp.sum(q.joint_entropy())

    def _bound(self, objective: AbstractObjective, q: Any, measured: Measurement, step: Step) -> Array:
        """The evidence lower bound −E_q ℓ̄ + H(q); under the delta method to second order in θ − m."""
        return -self._energy(objective, q, measured, step, 1.0)

    def __eq__(self, other: object) -> bool:
        """Two rules are equal if their pieces are, whatever their names."""
        return isinstance(other, Rule) and bool(eqx.tree_equal(self._pieces(), other._pieces()))

    def __hash__(self) -> int:
        # By its structure only, since its numbers may be arrays: enough for `jax.jit(rule.step)`.
        return hash(jax.tree.structure(self._pieces()))

    def _pieces(self) -> tuple[Any, ...]:
        return self.family, self.points, self.curvature, self.steps, self.guard, self.search

    def __str__(self) -> str:
        kind: type[Family] = self.family.kind
        where = f" (Khan and Rue, section {self.section})" if self.section else ""
        rows = [
            ("family", repr(self.family), kind.meaning),
            ("points", repr(self.points), self.points.meaning),
            ("curvature", repr(self.curvature), self.curvature.meaning),
            ("steps", str(self.steps), ""),
            ("guard", repr(self.guard), self.guard.meaning),
        ]
        if self.search is not None:
            rows.append(("search", repr(self.search), self.search.meaning))
        width = max(len(value) for piece, value, _ in rows if piece != "steps")
        lines = [f"  {piece:<10} {value:<{width}}  {meaning}".rstrip() for piece, value, meaning in rows]
        update = kind.update
        if self.steps.scaling is not None:
            update = f"{update.split(',')[0]},  m ← m − ρ {self.steps.scaling}"
        return "\n".join([f"{self.name}{where}", *lines, f"  {'update':<10} {update}"])

    __repr__ = __str__


def _times(factor: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def _finite_part(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def _all_finite(tree: PyTree) -> Array:
    leaves = jax.tree.leaves(tree)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [True]))
