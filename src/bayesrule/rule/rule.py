r"""The Bayesian learning rule as a value: an algorithm is a product of pieces.

The rule (Khan and Rue, `eq:bayes_learn_rule`) is one update for the natural parameter λ of an exponential family q,
with expectation parameter μ, base measure h, rate ρ and temperature τ:

$$λ ← (1 − ρτ)λ − ρ∇_μ E_q[\barℓ(θ) + τ\log h(θ)]$$

A `Rule` answers four questions about it, and each answer is a piece of its own:

    rule = family × points × curvature × steps        (and a guard that keeps λ inside Ω)

    family      Which q?                              gives λ, μ, h
    points      Where is the loss evaluated?          stands for E_q
    curvature   What is measured there?               stands for ∇_μ
    steps       How far?                              gives ρ, τ, momentum, averages, scaling

Three algorithms from that product (the recipes are all of this kind):

**Gradient descent** = `FixedGaussian` × `Delta` × `Gradient` × `Steps(ρ)`.
For q = N(m, I), λ = μ = m and log h = −½θᵀθ + const, so ∇_μ E_q log h = −m cancels the decay. The delta method
replaces E_q by the value at the mean, ∇_m E_q ℓ̄ ≈ ∇ℓ̄(m). What is left is m ← m − ρ∇ℓ̄(m) (`eq:blr_sgd1`).

**Adam** = `DiagonalGaussian` × `Delta` × `SquaredGradient` × `Steps(Rates(ρ₁, 1 − β₂), GradientAverage(β₁), Scaling)`.
For q = N(m, diag(s)⁻¹), λ = (s∘m, −½s), and ∇_μ E_q ℓ̄ is (g − h∘m, ½h) with g = E_q∇ℓ̄ and h = E_q diag ∇²ℓ̄. The rule
is Newton's method with a running average for the curvature, s ← (1 − ρ)s + ρh, m ← m − ρg/s (`eq:don`). The delta
method evaluates both at m. `SquaredGradient` puts N·ĝ∘ĝ in place of h, ĝ being the gradient of the mean loss on a
mini-batch; with s = Nv that reads v ← β₂v + (1 − β₂)ĝ∘ĝ. `Steps` give mean and precision a rate each, average the
gradient, û, and `Scaling` takes the square root and adds a damping: m ← m − ρ₁û/(√v̂ + c) (`eq:rmsprop_update`,
`eq:adam_momentum`).

**The Kalman smoother** = `GaussianChain` × `Exact` × `Gradient` × `Steps(1)`.
The prior of the chain is the base measure h, so λ holds only the sites (ν, −½κ) of the observations, and μ = ∇A(λ) is
computed by filtering and smoothing. For y_t = f_t + noise of variance r the loss ℓ̄ = −Σ log N(y_t | f_t, r) is linear
in the statistics (f_t, f_t²): `Exact` needs no points, and −∇_μ E_q ℓ̄ = (y/r, −½/r) whatever q is. With ρ = 1 one step
is λ = (y/r, −½/r), the posterior itself (`eq:conj_blr_update`).

Who takes the step is decided in `Rule.advance`: all of q at once (`update.step_plain`), each component of a mixture
(`by_component.py`), or a model's blocks in turn (`by_block.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..curvature.base import Curvature
from ..curvature.measurement import Measurement
from ..factor_graph.data import Rows
from ..factor_graph.model import Model
from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..families.start import Start, as_start
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import cast_like
from ..objectives.base import AbstractObjective
from ..objectives.batches import Weighted
from ..objectives.external import External
from ..objectives.objective import as_objective
from ..points.base import Points
from ..steps.guards import Guard, NoGuard
from ..steps.schedule import at
from ..steps.steps import Steps
from .by_block import step_blocks
from .by_component import step_components
from .compatibility import check
from .describe import describe
from .half_precision import is_half
from .multistart import Search
from .outside import check_outside, measurement_from, points_of, theta_of
from .state import Info, State
from .update import (
    Request,
    StepFunction,
    all_leaves_finite,
    bound_at,
    initial_accumulators,
    initial_measurements,
    is_mixture,
    planned,
    rejects_by_zero_rate,
    step_plain,
)


class Rule(eqx.Module):
    r"""An algorithm: a value made of four pieces.

    $$λ ← (1 − ρτ)λ − ρ∇_μ E_q[\barℓ(θ) + τ\log h(θ)]$$

    The family says which q; the points stand for E_q; the curvature is what is measured there; the steps say how far,
    and the guard keeps λ inside Ω. `init` and `step` run it, `replace` changes a piece, `print` shows the derivation,
    `==` and `blr.difference` compare two of them.

    Args:
        family: A family's class such as `blr.Gaussian`, or a `Start` that also says from which precision.
        points: Where the loss is evaluated, such as `blr.Delta()`.
        curvature: What is measured there, such as `blr.Hessian()`.
        steps: Rates, temperature, momentum, averages: `blr.Steps(0.1)`.
        guard: What keeps λ inside Ω; by default nothing, `blr.NoGuard()`.
        search: For a mixture only: records components that have converged between two steps and restarts them.
        name: The algorithm's name, for printing.
        section: The section of the paper it comes from, for printing.

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
    search: Search | None
    name: str = eqx.field(static=True)
    section: str = eqx.field(static=True)

    def __init__(
        self,
        family: type[Family] | Start,
        points: Points,
        curvature: Curvature,
        steps: Steps,
        guard: Guard | None = None,
        search: Search | None = None,
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
        """The same algorithm with other pieces: a new algorithm.

        Args:
            **pieces: Any of `family`, `points`, `curvature`, `steps`, `guard`, `search`, `name`, `section`. A bare
                class as `family` starts from the precision that this algorithm starts from.

        >>> import bayesrule as blr
        >>> blr.vogn(1e-2).replace(points=blr.Delta()) == blr.ogn(1e-2)
        True
        """
        known = {field.name for field in dataclasses.fields(self)}
        unknown = set(pieces) - known
        if unknown:
            raise ValueError(f"A rule has no piece {sorted(unknown)}; its pieces are {sorted(known)}.")
        mine = {name: getattr(self, name) for name in known}
        if isinstance(pieces.get("family"), type) and issubclass(pieces["family"], Family):
            pieces["family"] = self.family.of(pieces["family"])
        if "name" not in pieces:
            # The steps' numbers stay out of the name: it is static, and a sweep over them must not recompile.
            shown = {name: "…" if name == "steps" else piece for name, piece in pieces.items() if name != "section"}
            changed = ", ".join(f"{name}={piece}" for name, piece in shown.items())
            mine["name"] = f"{self.name}, {changed}" if " with " in self.name else f"{self.name} with {changed}"
        return Rule(**(mine | pieces))

    def init(
        self,
        params: PyTree,
        objective: Any = None,
        key: Key | None = None,
        *,
        size: Any = None,
        regularizer: Any = None,
        prior: Any = None,
        batch_size: Any = None,
        horizon: Any = None,
    ) -> State:
        """The state to start from.

        Args:
            params: A member of the family, or bare parameters that it starts around. None for an algorithm that
                chooses its own starts (`multimodal` with bounds).
            objective: The objective, for algorithms whose start depends on the number of examples N or on the prior.
            key: A random key, for algorithms that choose their own starts.
            size: N, in place of an objective, for gradients that are taken elsewhere: as for `update`.
            regularizer: As for `update`.
            prior: As for `update`.
            batch_size: As for `update`; None if it is not known, and then the precision starts from a number, as
                published, and not from what the first batches measure.
            horizon: How many steps are planned in all, for a temperature that is a `WarmUp` and for a constant rate in
                Adam's units, which falls to 0 over them. None if it is not known: the temperature is then 1 throughout
                and the rate constant.

        Returns:
            A `State` for `step`, or for `draw` and `update`.
        """
        if size is not None:
            if objective is not None:
                raise ValueError("Give either an objective or the size= of one whose gradients are taken elsewhere.")
            objective = External(size, regularizer, prior, batch_size)
        objective = None if objective is None else as_objective(objective)
        record = None
        if self.search is not None:
            params, record = self.search.first(params, self.family, key)
        params = params if objective is None else objective.starting_point(params)
        q = self.family.start(params, objective, at(self.steps.temperature, 0))
        check(self.family, self.points, self.curvature, self.steps, self.guard, q)
        if self.steps.rates.groups and not (isinstance(q, GaussianFamily) and q.elementwise):
            raise ValueError(
                f"Rates for parts of the parameters need a Gaussian whose entries move independently, not a "
                f"{type(q).__name__}."
            )
        beside = self.steps.shaping is not None or self.steps.weight_decay is not None
        if beside and (q.is_mixture or not q.elementwise or not _moves_params_alone(q)):
            raise ValueError(
                "A shaped gradient and a decoupled weight decay need a q whose entries move independently, and which "
                f"has nothing else to learn, not this {type(q).__name__}."
            )
        self._check_weight_decay(objective)
        if objective is not None and not isinstance(q.component_prototype.gaussian, GaussianFamily):
            # A prior that q has no place for is refused here, and not at the first step.
            jax.eval_shape(objective.regularizer.derivatives, q.component_prototype.gaussian)
        count, aux = jnp.zeros((), int), self.curvature.initial_aux(objective, q)
        given = self.family.is_member(params)
        if is_mixture(q):
            average, scale = q.each(lambda member: initial_accumulators(self, member, objective)[1:])
            averaged, unit = q.each(lambda member: initial_measurements(self, member, objective, given))
            return State(q, count, None, average, aux, scale, record, averaged=averaged, unit=unit)
        previous, average, scale = initial_accumulators(self, q, objective)
        history = None if self.steps.acceleration is None else self.steps.acceleration.first(q)
        shaped = None if self.steps.shaping is None else self.steps.shaping.first(q.params)
        averaged, unit = initial_measurements(self, q, objective, given)
        started = {"averaged": averaged, "unit": unit, "history": history, "shaped": shaped}
        state = State(q, count, previous, average, aux, scale, **started)
        is_planned = self.steps.planned and not (self.steps.measured and averaged is None)
        return planned(self, state, horizon) if is_planned else state

    def step(self, objective: Any, state: State, batch: PyTree = None, key: Key | None = None) -> tuple[State, Info]:
        """One update: pure, so that it can be jitted, scanned, vmapped.

        Args:
            objective: An `Objective`, a `Model`, or a function of θ.
            state: From `init` or from the step before.
            batch: Examples along a leading axis; None for a function of θ.
            key: A random key, needed where the points or the loss are random; a new one for each step.

        Returns:
            The new state, and an `Info` about the step. If the loss is not a finite number, q stays as it was.
        """
        return self.advance(objective, state, batch, key)[:2]

    def draw(self, state: State, key: Key | None = None) -> tuple[PyTree, Key | None]:
        """Where to differentiate the loss in a loop of your own: the first half of a step.

        Args:
            state: From `init` or from the step before.
            key: A random key, a new one for each step, where the points are random; None for those at the mean.

        Returns:
            θ, in the shape of the parameters: q's mean for the delta method, a sample otherwise, several along a
            leading axis where the points are several. And the ticket, which `update` takes: the key itself, from which
            the same points are made again.

        >>> import bayesrule as blr, jax, jax.numpy as jnp
        >>> rule = blr.ivon(0.1, curvature=1.0)
        >>> state = rule.init(jnp.zeros(3), size=100, regularizer=1.0)
        >>> theta, ticket = rule.draw(state, jax.random.key(0))
        >>> gradient = jax.grad(lambda w: jnp.mean((w - 1.0) ** 2))(theta)    # of the mean loss, without the prior
        >>> state, info = rule.update(state, gradient, ticket, size=100, regularizer=1.0)
        >>> int(state.count), bool(info.finite)
        (1, True)
        """
        own = None if key is None else jax.random.clone(key)
        theta = theta_of(points_of(self.points, self.steps.temperature_schedule, state, own)[1])
        if is_half(state.q):
            theta = cast_like(theta, state.q.mean)
        return theta, key

    def update(
        self,
        state: State,
        gradient: PyTree,
        ticket: Key | None = None,
        *,
        size: Any,
        regularizer: Any = None,
        prior: Any = None,
        batch_size: Any = None,
        value: Any = None,
        theta: PyTree = None,
        strict: bool | None = None,
    ) -> tuple[State, Info]:
        """One update from a gradient that you have taken at the θ of `draw`: the second half of a step.

        Args:
            state: The state that `draw` was given.
            gradient: The gradient of the *mean* loss over a batch, without the regularizer, with the axis of samples
                that θ has.
            ticket: From `draw`.
            size: N, the number of training examples, as for `Objective`.
            regularizer: As for `Objective`: δ, a dict, or a function.
            prior: A family as the prior, instead of `regularizer`.
            batch_size: M, over how many examples the gradient is averaged, for a `Window` in epochs and rates in Adam's
                units (`vogn`, `ivon` with their defaults).
            value: The mean loss at θ (one number, or one for each sample), for `info.objective`.
            theta: θ itself, which saves making it again.
            strict: Whether a gradient with any entry that is not finite skips the step; if not, such an entry counts as
                zero. By default True without a value; with one, a value that is not finite skips the step.

        Returns:
            As `step` does. `info.objective` is NaN without a value.
        """
        objective = External(size, regularizer, prior, batch_size)
        check_outside(self, objective, state)
        self._check_state(objective, state)
        key = None if ticket is None else jax.random.clone(ticket)
        strict = value is None if strict is None else strict
        judged = value is None and strict and rejects_by_zero_rate(self, state.q)
        known = jnp.where(all_leaves_finite(gradient), 0.0, jnp.nan) if judged else value
        measured = measurement_from(self, objective, state, gradient, key, known, theta)
        request = Request(strict=strict, measured=measured, judged=judged)
        state, info, _ = step_plain(self, objective, state, None, key, request)
        return state, info if value is not None else dataclasses.replace(info, objective=jnp.full((), jnp.nan))

    def advance(
        self,
        objective: Any,
        state: State,
        batch: PyTree = None,
        key: Key | None = None,
        *,
        diagnose: bool = False,
        strict: bool = False,
        measured: Measurement | None = None,
    ) -> tuple[State, Info, Measurement | None]:
        """`step` for those who write a loop of their own, such as `fit`.

        Args:
            objective: As for `step`.
            state: As for `step`.
            batch: As for `step`.
            key: As for `step`.
            diagnose: Also compute the bound and the decrement.
            strict: Leave q as it was if any entry of the gradient is not finite. Otherwise, in a family whose entries
                move independently, such an entry counts as zero.
            measured: The third value that the step before returned, if batch and points have stayed the same: it saves
                this step's measurement.

        Returns:
            The new state, its `Info`, and the measurement at the new q if the guard had to make one.
        """
        objective = as_objective(objective)
        self._check_state(objective, state)
        request = Request(diagnose, strict, measured=measured)
        return self._step_function(objective, state, batch)(self, objective, state, batch, key, request)

    def _step_function(self, objective: AbstractObjective, state: State, batch: PyTree) -> StepFunction:
        """Who takes the step: a model's blocks in turn, each component of a mixture, or all of q at once.

        Blocks take turns if the steps have a `Sweep`, or if rows are weighted and the model has local blocks: a row's
        weight multiplies its messages to the blocks that all rows share, but not those to the row's own block.
        """
        if isinstance(objective, Model):
            selected = isinstance(batch, Rows) and not (batch.index is None and batch.weights is None)
            weighted = selected or isinstance(batch, Weighted)
            in_turn = self.steps.sweep is not None or (weighted and objective.local)
            if in_turn and not objective.is_conditional:
                return step_blocks
        elif self.steps.sweep is not None:
            raise ValueError(
                f"{self.name} takes a model's blocks in turn, and this objective does not say which factor touches "
                "which: give a blr.Model, or a rule for all of θ at once, such as conjugate()."
            )
        return step_components if state.q.is_mixture else step_plain

    def bound(
        self, objective: Any, q: Family, batch: PyTree = None, key: Key | None = None, *, aux: PyTree = None
    ) -> Array:
        """The evidence lower bound at q, measured at this rule's points with its curvature.

        Args:
            objective: As for `step`.
            q: A member of the rule's family.
            batch: As for `step`.
            key: As for `step`.
            aux: What the objective carries along (`State.aux`); by default its initial value.
        """
        objective = as_objective(objective)
        bound = objective.closed_form_bound(q, batch, key)
        if bound is not None:
            return bound
        return bound_at(self, objective, q, batch, objective.aux if aux is None else aux, key)

    def _check_weight_decay(self, objective: AbstractObjective | None) -> None:
        if self.steps.weight_decay is not None and objective is not None and not objective.regularizer.flat:
            raise ValueError(
                f"{self.name} decays the weights beside its step, and this objective has a regularizer that would pull "
                "at them as well: leave one of them out. With a regularizer, adam(…) and vadam(…, weight_decay=0) "
                "are the algorithms whose posterior has a prior."
            )

    def _check_state(self, objective: AbstractObjective, state: State) -> None:
        self._check_weight_decay(objective)
        if (self.search is None) != (state.search is None) and state.q.is_mixture:
            made = "without a search" if state.search is None else "by a search"
            raise ValueError(f"This state was made {made}: start again with rule.init(state.q).")
        if (self.steps.momentum is not None or self.steps.lazy) and state.previous is None:
            raise ValueError("This state was made by a rule without momentum: start again with rule.init(state.q).")
        if self.steps.average is not None and state.average is None:
            raise ValueError("This state was made by a rule without averaging: start again with rule.init(state.q).")
        if self.steps.acceleration is not None and state.history is None:
            raise ValueError("This state was made by a rule without acceleration: start again with rule.init(state.q).")
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

    # A value: compared by its pieces, printed as its derivation.

    def __eq__(self, other: object) -> bool:
        """Two rules are equal if their pieces are, whatever their names."""
        return isinstance(other, Rule) and bool(eqx.tree_equal(self._pieces(), other._pieces()))

    def __hash__(self) -> int:
        # The hash uses the structure only, since the numbers may be arrays: enough for `jax.jit(rule.step)`.
        return hash(jax.tree.structure(self._pieces()))

    def _pieces(self) -> tuple[Any, ...]:
        return self.family, self.points, self.curvature, self.steps, self.guard, self.search

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__


def _moves_params_alone(q: Family) -> bool:
    """Whether the gradient has the structure of the parameters; that of learned keep probabilities has more."""
    return jax.tree.structure(q.gradient_like()) == jax.tree.structure(q.params)
