r"""Any rule that works from gradients as an optax transformation, for loops that have one already.

    tx = transformation(blr.ivon(0.1), size=N, regularizer=1.0)
    opt_state = tx.init(params)
    theta = perturbed(opt_state, params)                        # where to differentiate
    grads = jax.grad(mean_loss)(theta, batch)
    updates, opt_state = tx.update(grads, opt_state, params)    # as always
    params = optax.apply_updates(params, updates)
    q = posterior(opt_state, params)

The parameters are q's mean (λ, for binary networks), and nobody keeps a copy of them: the transformation's state has
all of the rule's state but them. Its noise is a function of a key and of its own count, so that every call between two
of its updates sees one θ, also if `optax.MultiSteps` collects gradients in between.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..families.base import Family
from ..families.gaussian.diagonal import AbstractDiagonal, DiagonalGaussian
from ..families.gaussian.fixed import FixedGaussian
from ..numerics.frozen import path_of
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import wide
from ..points.base import Points
from ..rule.outside import points_of, theta_of
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.schedule import Planned, Scheduled

__all__ = ["RuleState", "perturbed", "posterior", "transformation"]


class RuleState(eqx.Module):
    """The state of a `transformation`: all of the rule's state but the parameters, and what a draw needs."""

    state: State
    """The rule's state, whose q has no mean (λ, for binary networks): the parameters are that."""
    key: Array
    """The words of the key that the noise is made from."""
    drawing: _Drawing
    """What of the rule a draw needs."""
    impl: str = eqx.field(static=True)
    """The kind of the key."""
    structure: Any = eqx.field(static=True)
    """The structure of the parameters, with `optax.MaskedNode` in place of those that another transformation moves."""


class _Drawing(eqx.Module):
    """The points of a rule and its schedule of the temperature, which say where to differentiate.

    Plain numbers are static: a state whose leaves are Python numbers would not pass through `lax.scan` unchanged.
    """

    arrays: Points
    rest: Points = eqx.field(static=True)
    schedule: Scheduled | Planned | None

    @staticmethod
    def of(rule: Rule) -> _Drawing:
        return _Drawing(*eqx.partition(rule.points, eqx.is_array), rule.steps.temperature_schedule)

    def __call__(self, state: State, key: Key) -> PyTree:
        """The θ of `rule.draw(state, key)`."""
        points = eqx.combine(self.arrays, self.rest)
        return theta_of(points_of(points, self.schedule, state, key if points.random else None)[1])


def transformation(
    rule: Rule,
    *,
    size: Any,
    regularizer: Any = None,
    prior: Any = None,
    batch_size: Any = None,
    key: Key | int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""The rule as an optax transformation of gradients of the mean loss.

    Give `tx.update` the gradient of the *mean* loss over a batch, without the regularizer, at the θ of `perturbed`
    (with its axis of samples, if it has one), and the parameters. For rules of the delta method, such as `adam`, θ is
    the parameters themselves and nothing need be drawn. An entry of the gradient that is not finite counts as zero;
    `optax.apply_if_finite` around the transformation leaves such a step out.

    Args:
        rule: An algorithm that works from gradients alone: `sgd`, `rmsprop`, `adam`, `adamw`, `vadam`, `ivon`,
            `dropout`, `straight_through`, `bayesbinn`.
        size: N, the number of training examples.
        regularizer: As for `Objective`: δ of the prior N(0, 1/δ), a dict, or a function.
        prior: A family as the prior, instead of `regularizer`.
        batch_size: M, over how many examples a gradient is averaged (of all micro-steps together). Where it is known
            and there is a prior, the defaults of `ivon` take Adam's rates and measure where the precision starts;
            without it they are the published ones, h₀ = 1 and a rate in units of SGD's.
        key: The key of the noise, or a seed.

    >>> import bayesrule as blr, jax, jax.numpy as jnp, optax
    >>> from bayesrule.interop import optax as bridge
    >>> tx = optax.chain(optax.clip_by_global_norm(1.0), bridge.transformation(blr.ivon(0.1), size=50, regularizer=1.0))
    >>> params = {"w": jnp.zeros(3)}
    >>> opt_state = tx.init(params)
    >>> theta = bridge.perturbed(opt_state, params)
    >>> grads = jax.grad(lambda p: jnp.mean((p["w"] - 1.0) ** 2))(theta)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> bridge.posterior(opt_state, optax.apply_updates(params, updates)).precision["w"].shape
    (3,)
    """
    options = {"size": size, "regularizer": regularizer, "prior": prior, "batch_size": batch_size}
    start_key = jax.random.key(key) if isinstance(key, int) else key
    if not jnp.issubdtype(start_key.dtype, jax.dtypes.prng_key):
        start_key = jax.random.wrap_key_data(start_key)

    def init(params: Any) -> Any:
        params, own = _unwrapped(params), start_key
        if _is_part(params):
            # Two transformations of two parts of the parameters are not to have the same noise.
            paths = "".join(path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
            own = jax.random.fold_in(own, zlib.crc32(paths.encode()))
        state = rule.init(params, **options)
        return _packed(rule, state, jax.random.key_data(own), str(jax.random.key_impl(own)), jax.tree.structure(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "The parameters are q's mean, and the step starts from them: call tx.update(gradient, state, params)."
            )
        gradient, before = _unwrapped(updates), _with_params(state, _unwrapped(params))
        after, _ = rule.update(before, gradient, _ticket(state), strict=False, **options)
        displacement = lambda new, old, g: (new - old).astype(jnp.result_type(g))
        moved = jax.tree.map(displacement, after.q.params, before.q.params, gradient)
        return moved, _packed(rule, after, state.key, state.impl, state.structure)

    return optax.GradientTransformationExtraArgs(init, update)


def perturbed(opt_state: PyTree, params: PyTree) -> PyTree:
    """Where to differentiate the loss: θ, in the shape of the parameters, the same until the next update.

    Args:
        opt_state: The state of a `transformation`, or of anything that has one inside: `optax.chain`, `masked`,
            `partition`, `MultiSteps`, `inject_hyperparams`, `apply_if_finite`, a flax `TrainState` or nnx `Optimizer`.
        params: The parameters. Those that no rule moves stay as they are.

    Returns:
        A sample of q, or the parameters themselves for rules of the delta method. With a leading axis where the rule
        has several samples: take the gradient at each, for instance by `jax.vmap`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> params = {"w": jnp.zeros(3)}
    >>> drawn = perturbed(transformation(blr.ivon(0.1), size=50, regularizer=1.0).init(params), params)
    >>> same = perturbed(transformation(blr.adam(1e-3), size=50).init(params), params)
    >>> bool(jnp.any(drawn["w"] != 0)), bool(jnp.any(same["w"] != 0))             # a draw of q, and its mean
    (True, False)
    """
    theta = _unwrapped(params)
    for found in _found(opt_state):
        part = _part(found, theta)
        drawn = found.drawing(_with_params(found, theta), _ticket(found))
        theta = _overlaid(theta, jax.tree.map(lambda t, p: t.astype(jnp.result_type(p)), drawn, part))
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(theta))


def posterior(opt_state: PyTree, params: PyTree) -> Family:
    """The q of a transformation's state, with the parameters as its mean.

    Args:
        opt_state: As for `perturbed`.
        params: The parameters.

    Returns:
        The rule's q. Where a rule moves a part of the parameters, or several rules a part each, a `DiagonalGaussian`
        over all of them, with an infinite precision where no rule does: samples are the parameters themselves there.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> params = {"w": jnp.zeros(3)}
    >>> q = posterior(transformation(blr.ivon(0.1), size=50, regularizer=1.0).init(params), params)
    >>> type(q).__name__, q.precision["w"].tolist()                               # N h₀ + δ, with h₀ = 1
    ('DiagonalGaussian', [51.0, 51.0, 51.0])
    """
    states, params = _found(opt_state), _unwrapped(params)
    complete = jax.tree.structure(params)
    if len(states) == 1 and states[0].structure == complete:
        return _with_params(states[0], params).q
    infinite = lambda p: jnp.full(jnp.shape(p), jnp.inf, wide(jnp.result_type(p)))
    precision = jax.tree.map(infinite, params)
    for found in states:
        q = _with_params(found, params).q
        if not (isinstance(q, AbstractDiagonal | FixedGaussian) and q.elementwise):
            raise ValueError(
                f"A {type(q).__name__} over a part of the parameters cannot be completed to a q over all of them: take "
                "the state of that part alone."
            )
        precision = _overlaid(precision, jax.tree.map(lambda v: 1 / v, q.variance()))
    return DiagonalGaussian(params, precision)


# The state without its parameters, and with them.


def _packed(rule: Rule, state: State, key: Array, impl: str, structure: Any) -> RuleState:
    bare = dataclasses.replace(state, q=state.q.with_params(None))
    return RuleState(bare, key, _Drawing.of(rule), impl, structure)


def _with_params(found: RuleState, params: PyTree) -> State:
    """The rule's state with its parameters, at least in float32 as its statistics are."""
    widened = jax.tree.map(lambda p: jnp.asarray(p).astype(wide(jnp.result_type(p))), _part(found, params))
    return dataclasses.replace(found.state, q=found.state.q.with_params(widened))


def _ticket(found: RuleState) -> Key:
    key = jax.random.wrap_key_data(found.key, impl=found.impl)
    return jax.random.fold_in(key, found.state.count)


# Parts of the parameters.


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _is_part(params: PyTree) -> bool:
    return any(map(_is_masked, jax.tree.leaves(params, is_leaf=_is_masked)))


def _part(found: RuleState, params: PyTree) -> PyTree:
    """The parameters with `MaskedNode` in place of those that this state's rule does not move."""
    if jax.tree.structure(params) == found.structure:
        return params
    pattern = jax.tree.unflatten(found.structure, [None] * found.structure.num_leaves)
    pick = lambda mark, subtree: mark if _is_masked(mark) else subtree
    return jax.tree.map(pick, pattern, params, is_leaf=lambda node: node is None or _is_masked(node))


def _overlaid(params: PyTree, part: PyTree) -> PyTree:
    """The parameters with those of the part in their places."""
    return jax.tree.map(lambda new, old: old if _is_masked(new) else new, part, params, is_leaf=_is_masked)


def _found(opt_state: PyTree) -> list[RuleState]:
    """The states of this module's transformations inside another state."""
    is_ours = lambda node: isinstance(node, RuleState)
    states = [node for node in jax.tree.leaves(opt_state, is_leaf=is_ours) if is_ours(node)]
    if not states:
        raise ValueError(
            "There is no state of bayesrule.interop.optax.transformation in this optimizer's state: give the opt_state "
            "that tx.init or tx.update returned."
        )
    return [_unwrapped(state) for state in states]


def _unwrapped(tree: PyTree) -> PyTree:
    """The tree with arrays in place of the variables in which nnx keeps parameters and an optimizer's state."""
    is_variable = lambda node: hasattr(node, "get_value")
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)
