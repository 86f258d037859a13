"""The two halves of a step as compiled programs, where another program owns the parameters.

The parameters, q's mean, come in as a list of arrays with every call and go out again as the results. Everything else
that a rule carries from step to step is a `State` without them, which stays here. The arithmetic is `Rule.draw` and
`Rule.update`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.gaussian.base import GaussianFamily
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import wide
from ..objectives.external import External
from ..rule.outside import check_outside
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.schedule import Scheduled, at

Parameters = list[Any]
"""The arrays of the parameters, of JAX or NumPy; where something is known of some of them only, None for the others."""


class Settings(NamedTuple):
    """The numbers of a step that the user of an optimizer may change between steps, without compiling again.

    `rate` takes the place of the rule's own, unless that is a schedule. `seed` and `stream` name the noise: together
    with the step count they determine every draw.
    """

    rate: Any
    size: Any
    regularizer: Any
    prior: Any
    batch_size: Any
    seed: Any
    stream: Any

    @property
    def objective(self) -> dict[str, Any]:
        """What `Rule.init` and `Rule.update` are told of the objective."""
        names = ("size", "regularizer", "prior", "batch_size")
        return {name: getattr(self, name) for name in names}


def start(rule: Rule, params: Parameters, settings: Settings) -> State:
    """The state to start from, without the parameters, in arrays that it shares with nobody."""
    state = rule.init([jnp.asarray(p) for p in params], **settings.objective)
    check_outside(rule, External(**settings.objective), state)
    return jax.tree.map(lambda x: jnp.array(x, copy=True), _without_params(state))


def shape_of_start(rule: Rule, params: Parameters, settings: Settings) -> State:
    """The shapes and dtypes of `start`. Raises what it would raise."""
    shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params]
    return jax.eval_shape(lambda *params: start(rule, list(params), settings), *shapes)


@compiled(scratch="scratch")
def draw(rule: Rule, state: State, params: Parameters, settings: Settings, scratch: Parameters | None) -> Parameters:
    """The θ to differentiate at, in the parameters' dtypes; with a leading axis where the rule takes several samples.

    Args:
        rule: The algorithm.
        state: Without the parameters.
        params: The parameters.
        settings: The numbers of this step.
        scratch: Arrays like the parameters, for the result; None to allocate it.
    """
    theta, _ = rule.draw(_with_params(state, params), _step_key(settings, state))
    return _in_dtypes_of(params, theta)


@compiled(scratch="scratch")
def sample(state: State, params: Parameters, settings: Settings, index: Any, scratch: Parameters | None) -> Parameters:
    """One draw of q for predictions, in the parameters' dtypes: the one of this index in a sequence of them.

    Args:
        state: Without the parameters.
        params: The parameters.
        settings: For the seed and the stream.
        index: A whole number; the noise differs from that of every step.
        scratch: As for `draw`.
    """
    q = _with_params(state, params).q
    key = jax.random.fold_in(jax.random.fold_in(_stream_key(settings), 0xFFFFFFFF), index)
    return _in_dtypes_of(params, q.drawn(key) if isinstance(q, GaussianFamily) else q.sample(key))


class Moved(NamedTuple):
    """What a step gives.

    The new state, the parameters that moved (None for the others), whether the gradients were finite, so that anything
    moved at all, and the rate of the next step where the rule has a schedule.
    """

    state: State
    params: Parameters
    finite: Any
    next_rate: Any


@compiled(static=("one_rate", "scratch_is_theta"), donate="state", scratch="scratch")
def move(
    rule: Rule,
    state: State,
    params: Parameters,
    gradient: Parameters,
    theta: Parameters | None,
    settings: Settings,
    scratch: Parameters,
    one_rate: bool,
    scratch_is_theta: bool,
) -> Moved:
    """One update by gradients that were taken at θ.

    A parameter without a gradient keeps its value and everything that is known of it. (What would have been computed
    for it is dead code, which XLA drops.)

    Args:
        rule: The algorithm.
        state: Without the parameters; its memory is used for the new one.
        params: The parameters.
        gradient: The gradients of the mean loss, with θ's leading axis; None for parameters that have none.
        theta: Where they were taken, as `draw` gave it; None if that is the parameters themselves, or `scratch`.
        settings: The numbers of this step.
        scratch: Arrays like the parameters, for the results; None for those without a gradient.
        one_rate: Whether the precision has the mean's rate.
        scratch_is_theta: Whether `scratch` holds θ.
    """
    held = _with_params(state, params)
    where = scratch if scratch_is_theta else theta
    where = None if where is None else _filled(where, list(held.q.params))
    like = held.q.params if where is None else where
    complete = [jnp.zeros_like(t) if g is None else jnp.asarray(g) for g, t in zip(gradient, like, strict=True)]
    key = _step_key(settings, state)
    used = _at_rate(rule, settings.rate, one_rate)
    used = used.replace(guard=rule.guard.without_report(), name=rule.name)
    moved, info = used.update(held, complete, key, theta=where, **settings.objective)
    new = _in_dtypes_of(params, moved.q.params)
    is_moved = [g is not None for g in gradient]
    choose = lambda new, old: [n if there else o for n, o, there in zip(new, old, is_moved, strict=True)]
    kept = by_parameter(choose, len(params), _without_params(moved), state)
    rate = rule.steps.rates.mean
    next_rate = at(rate, kept.count) if isinstance(rate, Scheduled) else None
    return Moved(kept, choose(new, [None] * len(params)), info.finite, next_rate)


def posterior(state: State, params: Parameters) -> Any:
    """q with its parameters, which are copied."""
    return _with_params(state, [jnp.array(p, copy=True) for p in params]).q


def own_rate(rule: Rule) -> float:
    """The rate that a rule begins with."""
    return float(at(rule.steps.rates.mean, 0))


def differentiates_at_params(rule: Rule, state: State) -> bool:
    """Whether the gradients are taken at the parameters themselves: the delta method for a Gaussian's mean."""
    return rule.points.at_mean and isinstance(state.q, GaussianFamily)


def by_parameter(function: Any, count: int, *states: State) -> State:
    """function(list, …) in place of each list of `count` arrays, one for each parameter; other leaves as they are."""
    is_list = lambda x: isinstance(x, list) and len(x) == count
    each = lambda first, *rest: function(first, *rest) if is_list(first) else first
    return jax.tree.map(each, *states, is_leaf=is_list)


def entries(state: State, count: int) -> dict[str, Any]:
    """What a state without parameters holds, by name: a list with an array for each parameter, or one for all."""
    is_list = lambda x: isinstance(x, list) and len(x) == count
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_list)
    return {_name(path): leaf for path, leaf in leaves}


def with_entries(state: State, count: int, values: dict[str, Any]) -> State:
    """A state of this structure with what `entries` named."""
    is_list = lambda x: isinstance(x, list) and len(x) == count
    return jax.tree_util.tree_map_with_path(lambda path, _: values[_name(path)], state, is_leaf=is_list)


def _name(path: tuple[Any, ...]) -> str:
    """`precision` for q's precision, `previous_mean`, and `step` for the count, as PyTorch's optimizers name it."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
    parts = parts[1:] if parts[0] == "q" else parts
    return "step" if parts == ["count"] else "_".join(parts)


def _with_params(state: State, params: Parameters) -> State:
    """The whole state; half precision is moved, and drawn from, in float32, and rounded only when it is handed out."""
    widened = [jnp.asarray(p).astype(wide(p.dtype)) for p in params]
    return dataclasses.replace(state, q=state.q.with_params(widened))


def _without_params(state: State) -> State:
    return dataclasses.replace(state, q=state.q.with_params(None))


def _in_dtypes_of(params: Parameters, tree: PyTree) -> Parameters:
    return [leaf.astype(p.dtype) for leaf, p in zip(tree, params, strict=True)]


def _filled(some: Parameters, otherwise: Parameters) -> list[Array]:
    """Every array in the other's dtype, or the other where there is none."""
    return [o if s is None else jnp.asarray(s).astype(o.dtype) for s, o in zip(some, otherwise, strict=True)]


def _at_rate(rule: Rule, rate: Any, one_rate: bool) -> Rule:
    """The rule with another rate of the mean, and of the precision where there is one for both."""
    if isinstance(rule.steps.rates.mean, Scheduled):
        return rule
    place = lambda rule: (rule.steps.rates.mean, *[rule.steps.rates.precision] * one_rate)
    return eqx.tree_at(place, rule, (rate, *[rate] * one_rate))


def _stream_key(settings: Settings) -> Key:
    return jax.random.fold_in(jax.random.key(settings.seed), settings.stream)


def _step_key(settings: Settings, state: State) -> Key:
    return jax.random.fold_in(_stream_key(settings), state.count)
