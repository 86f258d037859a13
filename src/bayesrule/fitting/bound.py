r"""The evidence lower bound of a result and its error, at points that no step of the fit has used.

The bound is $-E_q[\barℓ(θ) + \log q(θ)]$. Where the expectation has no closed form it is an estimate, and which error
it has depends on the points (`points/judging.py`):

- a grid (over one or two entries of θ, or over the outputs of each example where these are linear in θ): the bound at
  the finer of two grids, and the difference between the two;
- random points: evenly spaced ones under independent random shifts (or independent draws, where θ is not Gaussian or
  has very many entries). The mean over the shifts is the bound and its standard error the error. The number of shifts
  is doubled until the error is 0.01 nats, or the work is used up.

Under a q near the optimum ℓ̄(θ) + log q(θ) varies little, because the two cancel to second order. What is left of the
second order, where q has not converged or cannot take the posterior's shape, is taken out by regression on log q(θ),
whose expectation −H(q) is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..factor_graph.block_view import view_of
from ..factor_graph.factor import Factor
from ..factor_graph.linear_factor import LinearFactor
from ..factor_graph.model import Model, expected_log_responsibility
from ..factor_graph.sequence_factor import SequenceFactor
from ..families.base import ExponentialFamily, Family
from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.fixed import FixedGaussian
from ..families.latent.base import ConditionalFamily
from ..families.product import Product
from ..numerics.linalg import safe_sqrt
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..points.base import Points
from ..points.gaussian_outputs import bent_points, output_points
from ..points.judging import Judges, judging_points
from ..points.quadrature import Enumeration, Quadrature
from ..points.sampling import MonteCarlo, QuasiMonteCarlo
from ..rule.rule import Rule
from ..rule.state import State
from ..rule.update import is_mixture

ERROR_GOAL = 0.01
"""The standard error in nats at which no more points are taken."""

# Random shifts evaluated in one call. Averages under them are skewed where the loss grows fast in the tails, so that
# many shifts of fewer points have a more honest standard error than a few shifts of many.
_SHIFTS = 32
_POINTS = 128  # under one shift, at most
_MOST_POINTS = 2**17  # in all
_WORK = 2**31  # What all points together may cost at first, in rows times parameters; four times it in all.
_MEMORY = 2**22  # How many numbers may be in memory for points that are evaluated side by side.
_GRID_MEMORY = 2**24  # The same for the nodes of all outputs of a model, which are evaluated together.
# Folded into the fit's key. The keys of the loop are split from the same key, which is a fold of 0 and 1; a search or
# several starts fold a few more.
_OWN_KEY = 0x626F756E


class Bound(NamedTuple):
    """A bound and its error.

    `error` is a standard error or an integration error in nats: 0 for a bound in closed form (up to rounding), None
    where the bound is an expansion at the mean (the delta method), which is no integral at all.
    """

    value: float
    error: float | None


UP_TO_A_CONSTANT = "up to the prior's constant"
"""What is said of a bound under a flat prior, or one that is given as a function without its normalising constant."""


def with_error(value: float, error: float | None, normalized: bool = True) -> str:
    """A number and its error, to the digits that the error leaves: two of the error, and the number to the same place.

    An error below the fourth decimal is left out, and so is one that is not known. A bound whose prior has not all of
    its constants (not `normalized`) is said to be one up to a constant.

    >>> with_error(-123.4321, 0.0512), with_error(-123.4321, 2e-7), with_error(-123.4321, None)
    ('−123.432 ± 0.051', '−123.4321', '−123.4321')
    >>> with_error(-123.4321, 0.0512, normalized=False)
    "−123.432 ± 0.051 (up to the prior's constant)"
    """
    if error is None or not math.isfinite(value) or not math.isfinite(error) or error < 5e-5:
        text = f"{value:,.4f}" if math.isfinite(value) else f"{value}"
    else:
        places = int(np.clip(1 - math.floor(math.log10(error)), 0, 4))
        text = f"{value:,.{places}f} ± {error:,.{places}f}"
    return text.replace("-", "−") + ("" if normalized else f" ({UP_TO_A_CONSTANT})")


def judge_bound(rule: Rule, objective: AbstractObjective, state: State, data: PyTree, key: Key) -> Bound:
    """Estimate the evidence lower bound at the state's q on all data, and the error of the estimate.

    Args:
        rule: The algorithm, whose points say how an expectation may be taken.
        objective: The objective, with its number of examples.
        state: The state with q.
        data: All data.
        key: The key of the fit; the points' key is folded from it, and is one that no step used.
    """
    q, aux, key = state.q, state.aux, jax.random.fold_in(key, _OWN_KEY)
    if isinstance(objective, Model):
        return _judge_model(objective, q, data, key)
    points = rule.points
    as_measured = lambda keys: _measured_bounds(rule, objective, q, data, aux, keys)
    if points.delta or points.exact or isinstance(points, Enumeration):
        # Random masks (dropout) and random losses are averaged over many keys.
        if points.random or objective.random:
            bound = _average(as_measured, key, _shifts_affordable(q, objective, data))
        else:
            bound = Bound(float(np.asarray(as_measured(key[None]))[0, 0]), 0.0)
        return bound._replace(error=None) if points.delta else bound
    over_outputs = integrates_outputs(objective, q)
    samples, most = _budget(q, objective, data)
    judges = judging_points_of(points, objective, q, data)
    chunk = max(1, min(samples, _MEMORY // max(1, _numbers(data) + _numbers(q))))
    how = {"over_outputs": over_outputs, "chunk": chunk}
    if judges.coarse is None:
        at = lambda keys: _expectations_by_draws(objective, q, data, aux, (judges.fine,), keys, **how)[0]
        return _average(at, key, max(1, most // samples))
    grids = judges.fine, judges.coarse
    values = _expectations_on_grids(objective, q, data, aux, grids, key[None], **how)
    fine, coarse = (float(np.asarray(rows)[0, 0]) for rows in values)
    return Bound(fine, abs(fine - coarse))


def _numbers(tree: PyTree) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


def _budget(q: Family, objective: AbstractObjective, data: PyTree) -> tuple[int, int]:
    """How many points to take under one shift, an even number, and at most in all, by what one of them may cost."""
    member = q.component_prototype
    parameters = _numbers(member.mean if isinstance(member, GaussianFamily) else member)
    cost = max(1, parameters) * max(1, objective.rows(data)) * (q.count if is_mixture(q) else 1)
    samples = 2 ** int(np.clip(math.log2(_WORK / (_SHIFTS * cost)), 1, math.log2(_POINTS)))
    return samples, int(np.clip(4 * _WORK / cost, _SHIFTS * samples, _MOST_POINTS))


def _shifts_affordable(q: Family, objective: AbstractObjective, data: PyTree) -> int:
    return max(_SHIFTS, _budget(q, objective, data)[1] // _SHIFTS)


def integrates_outputs(objective: AbstractObjective, q: Family) -> bool:
    """Whether E_q ℓ is an integral over each example's outputs: those linear in a Gaussian θ are Gaussian."""
    gaussian = isinstance(q, GaussianFamily) and not q.batch_shape
    return gaussian and objective.has_linear_outputs and not objective.regularizer.expands_at_mean(q)


def judging_points_of(points: Points, objective: AbstractObjective, q: Family, data: PyTree) -> Judges:
    """The points that judge those of a fit on an objective which is not a model (`points/judging.py`)."""
    samples, over_outputs = _budget(q, objective, data)[0], integrates_outputs(objective, q)
    member = q.component_prototype
    if over_outputs:
        center = _outputs_at_mean.eval_shape(objective, q, data)
        return judging_points(points, center.shape[-1], samples)
    if isinstance(member, GaussianFamily) and not member.batch_shape:
        return judging_points(points, member.noise_size, samples)
    if isinstance(member, ConditionalFamily) and isinstance(points, Quadrature):
        finer = Quadrature(2 * points.order)
        if finer.fits(member.grid_axes):
            return Judges(finer, points)
    return Judges(MonteCarlo(samples), None)


@compiled  # for `eval_shape`, which then traces it once for all fits of the same shapes
def _outputs_at_mean(objective: AbstractObjective, q: Any, data: PyTree) -> Array:
    examples = objective.separable("linear=True")
    return examples.outputs(q.mean, examples.examples(data)[0])


# One estimate under each key.


@compiled(rare=True)
def _measured_bounds(
    rule: Rule, objective: AbstractObjective, q: Family, data: PyTree, aux: PyTree, keys: Array
) -> Float[Array, "R 2"]:
    """The bound as the rule measures it, under every key."""
    bound = lambda key: jnp.stack([value := rule.bound(objective, q, data, key, aux=aux), jnp.zeros_like(value)])
    return jax.lax.map(bound, keys)


def _expectations(
    objective: AbstractObjective,
    q: Family,
    data: PyTree,
    aux: PyTree,
    kinds: tuple[Points, ...],
    keys: Array,
    *,
    over_outputs: bool,
    chunk: int,
) -> list[Float[Array, "R 2"]]:
    """Under every key the average of −ℓ̄(θ) − log q(θ) over points, and that of log q(θ) + H(q), for kinds of points."""
    average = _over_outputs if over_outputs else _over_theta
    at = lambda points: jax.lax.map(lambda key: average(objective, q, data, aux, points, key, chunk), keys)
    return [at(points) for points in kinds]


# Grids are called once. Draws are taken until they are precise enough, which is most of the time of a small fit of
# several classes, unless they are compiled as carefully as its steps are.
_expectations_on_grids = compiled(static=("over_outputs", "chunk"), rare=True)(_expectations)
_expectations_by_draws = compiled(static=("over_outputs", "chunk"))(_expectations)


def _over_theta(
    objective: AbstractObjective, q: Family, data: PyTree, aux: PyTree, points: Points, key: Key, chunk: int
) -> Float[Array, " 2"]:
    point_key, loss_key = jax.random.split(key)
    regularizer = objective.regularizer
    at_points = isinstance(q.component_prototype.gaussian, GaussianFamily)
    elsewhere = 0.0 if at_points else regularizer.expected(q.gaussian)
    entropy = jnp.sum(q.entropy()) if isinstance(q, ExponentialFamily | GaussianFamily) else None

    def at(theta: PyTree) -> Array:
        log_q = jnp.sum(q.log_prob(theta))
        penalty = regularizer.at_mean(FixedGaussian(theta)) if at_points else elsewhere
        value = objective.data(theta, data, aux, loss_key if objective.random else None)[0] + penalty + log_q
        return jnp.stack([-value, jnp.zeros_like(value) if entropy is None else log_q + entropy])

    def average(member: Any, key: Key) -> Array:
        theta, weights, _ = points.at(member, key if points.random else None)
        values = jax.lax.map(at, theta, batch_size=min(chunk, weights.shape[0]))
        return weights.astype(values.dtype) @ values

    if is_mixture(q):  # The components are averaged over one by one, which is stratified sampling.
        return q.average(jax.lax.map(lambda pair: average(*pair), (q.components, jax.random.split(point_key, q.count))))
    return average(q, point_key)


def _over_outputs(
    objective: AbstractObjective, q: Any, data: PyTree, aux: PyTree, points: Points, key: Key, chunk: int
) -> Float[Array, " 2"]:
    examples = objective.separable("linear=True")
    linear = examples.linearized(q.mean, data, shared=q.structure.shares_features)
    (inputs, scales), center = examples.examples(linear), linear.outputs(q.mean)
    covariance, loss = q.output_covariance(linear.jacobian), examples.output_loss(q.mean, inputs)

    def total(outputs: Any, weights: Any = 1.0) -> Any:
        losses = jax.vmap(loss)(outputs, inputs[1])
        return jnp.sum(jnp.asarray(jnp.where(scales == 0, 0.0, weights * scales.astype(losses.dtype) * losses)))

    if isinstance(points, Quadrature) and points.bend is not None and center.size == center.shape[0]:
        nodes: Any = points.bent_nodes(center.dtype)
        deviation = safe_sqrt(covariance.reshape(center.shape))
        at_node = lambda node: total(*bent_points(node, center, deviation, points.bend))
        expected = jnp.sum(jnp.asarray(jax.lax.map(at_node, nodes, batch_size=min(chunk, points.order))))
    else:
        noise, weights = points.output_noise(center, key if points.random else None)
        at_noise = lambda noise: total(output_points(center, covariance, noise[None])[0])
        values = jax.lax.map(at_noise, noise, batch_size=min(chunk, weights.shape[0]))
        expected = weights.astype(values.dtype) @ values
    value = expected + objective.regularizer.expected(q) - jnp.sum(q.entropy())
    return jnp.stack([-value, jnp.zeros_like(value)])


# The average over keys, and its standard error.


def _average(estimates: Callable[[Array], Array | np.ndarray], key: Key, most: int) -> Bound:
    """Average the estimates under 32 keys, and go on to twice as many until the standard error is small.

    Args:
        estimates: A function of R keys, with an estimate and a control variate of expectation 0 for each, (R, 2).
        key: What the keys are made of.
        most: The number of keys at most.
    """
    rows = np.zeros((0, 2))
    while True:
        for _ in range(max(1, len(rows) // _SHIFTS)):
            keys = jax.random.split(jax.random.fold_in(key, len(rows)), _SHIFTS)
            rows = np.concatenate([rows, np.asarray(estimates(keys), np.float64)])
        bound = _summarize(rows)
        assert bound.error is not None  # only for the type checker: `_summarize` always has one
        precision = 8 * float(jnp.finfo(jnp.result_type(float)).eps) * abs(bound.value)
        if not bound.error > max(ERROR_GOAL, precision) or 2 * len(rows) > most:
            return bound


def _summarize(rows: Float[np.ndarray, "R 2"]) -> Bound:
    """The intercept of the regression of the estimates on their control variates, and its standard error.

    The intercept is the estimate at the control variate's known expectation, 0.
    """
    estimates, controls = rows.T
    count = len(rows)
    if not np.all(np.isfinite(rows)):
        return Bound(float(np.mean(estimates)), math.nan)
    deviations = controls - controls.mean()
    total = float(deviations @ deviations)
    value, residuals, leverage, freedom = estimates.mean(), estimates - estimates.mean(), 1 / count, count - 1
    if total > 1e-20 * count * (1 + float(np.max(np.abs(controls))) ** 2):
        slope = float(deviations @ estimates) / total
        value = value - slope * controls.mean()
        residuals = residuals - slope * deviations
        leverage, freedom = 1 / count + controls.mean() ** 2 / total, count - 2
    return Bound(float(value), math.sqrt(float(residuals @ residuals) / freedom * leverage))


# Models: the bound is a sum over factors, of which some are integrated at points.


def _judge_model(model: Model, q: Product, data: PyTree, key: Key) -> Bound:
    fine, coarse, expanded = refined_models(model, q, data)
    models = (fine,) if coarse is None else (fine, coarse)
    differences = []

    def estimates(keys: Array) -> np.ndarray:
        values = np.asarray(_model_bounds(models, q, data, keys), np.float64)
        differences.append(float(np.mean(values[:, 0] - values[:, -1])))  # under the same keys
        return np.stack([values[:, 0], np.zeros(len(values))], axis=1)

    if fine.random:
        bound = _average(estimates, key, _MOST_POINTS // _POINTS)
    else:
        bound = Bound(float(estimates(key[None])[0, 0]), 0.0)
    parts = [_judge_entropy(q.blocks[name], key, i) for i, name in enumerate(sorted(q.blocks))]
    errors = [bound.error or 0.0, differences[0], *(part.error or 0.0 for part in parts)]
    value = bound.value + sum(part.value for part in parts)
    return Bound(value, None if expanded else math.hypot(*errors))


def _judge_entropy(block: Any, key: Key, number: int) -> Bound:
    """What the entropy of a block at fresh points adds to that at the points of the fit, and its error in nats.

    It is 0 for any block but a mixture, whose entropy is an integral: over its components one by one, on two grids in
    one or two dimensions, and at random points in more.

    Args:
        block: the block's q.
        key: the key of the bound.
        number: the block's number, folded into the key so that no two blocks have the same points.
    """
    if not block.is_mixture:
        return Bound(0.0, 0.0)
    judges = judging_points(QuasiMonteCarlo(_POINTS), block.component_prototype.noise_size, _POINTS)
    if judges.coarse is not None:
        fine, coarse = (float(value) for value in _entropy_differences(block, judges, key[None])[0])
        return Bound(fine, abs(fine - coarse))

    def estimates(keys: Array) -> np.ndarray:
        values = np.asarray(_entropy_differences(block, judges, keys), np.float64)
        return np.stack([values[:, 0], np.zeros(len(values))], axis=1)

    # At a point of each component the densities of all of them are evaluated.
    cost = block.count * _numbers(block.components)
    most = int(np.clip(4 * _WORK // (cost * _POINTS), _SHIFTS, _MOST_POINTS // _POINTS))
    return _average(estimates, jax.random.fold_in(jax.random.fold_in(key, _OWN_KEY), number), most)


@compiled
def _entropy_differences(block: Any, judges: Judges, keys: Array) -> Float[Array, "R 2"]:
    """The entropy of a mixture at fine and at coarse points, less that at the points of the fit, under every key."""
    view = view_of(block)
    own = expected_log_responsibility(view)
    at = lambda points: jax.lax.map(lambda key: expected_log_responsibility(view, points, key) - own, keys)
    fine = at(judges.fine)
    return jnp.stack([fine, fine if judges.coarse is None else at(judges.coarse)], axis=1)


@compiled(rare=True)
def _model_bounds(models: tuple[Model, ...], q: Product, data: PyTree, keys: Array) -> Float[Array, "R K"]:
    """The bound of every model, under every key."""
    return jax.lax.map(lambda key: jnp.stack([model.bound(q, data, key) for model in models]), keys)


def refined_models(model: Model, q: Product, data: PyTree) -> tuple[Model, Model | None, bool]:
    """The model with finer points in its factors, with coarser ones (None if there are none), and whether some factor
    is expanded at a mean."""
    finer, coarser, expanded, rows = {}, {}, False, model.batch_rows(data)
    for name, factor in model.factors.items():
        inner = factor.components if isinstance(factor, SequenceFactor) else factor
        fine, coarse = inner, inner
        if isinstance(inner, LinearFactor) and inner.closed is None:
            expanded |= inner.integration.delta
            shape = jax.eval_shape(partial(_output_means, model, name), q, rows).shape
            samples = 2 * int(np.clip(_MEMORY // (2 * math.prod(shape)), 4, _POINTS // 2))
            dimensions = 1 if len(shape) == 1 else shape[-1]
            nodes = int(np.clip(_GRID_MEMORY // math.prod(shape), 64, 128))
            judges = judging_points(inner.integration, dimensions, samples, nodes)
            with_points = lambda points, factor=inner: eqx.tree_at(lambda f: f.integration, factor, points)
            fine, coarse = with_points(judges.fine), with_points(judges.coarse or judges.fine)
        elif inner.points:
            expanded |= any(points.delta for points in inner.points.values())
            fine, coarse = _refined_blocks(inner, q, frozenset(model.local))
        if inner is not factor:
            fine, coarse = (eqx.tree_at(lambda f: f.components, factor, new) for new in (fine, coarse))
        finer[name], coarser[name] = fine, coarse
    with_factors = lambda factors: eqx.tree_at(lambda m: m.factors, model, factors)
    differs = any(jax.tree.structure(finer[name]) != jax.tree.structure(coarser[name]) for name in finer)
    return with_factors(finer), with_factors(coarser) if differs else None, expanded


def _output_means(model: Model, name: str, q: Product, rows: Any) -> Array:
    factor: Any = model.factors[name]
    one = Product({name: block.component_prototype for name, block in q.blocks.items()})  # of a mixture one component
    return factor.outputs(model.views(one), model.observations(name, rows)[0], frozenset(model.local))[0]


def _refined_blocks(factor: Factor, q: Product, local: frozenset[str]) -> tuple[Factor, Factor]:
    """A factor whose values are taken at points of its blocks: with finer grids or more draws, and with coarser grids.

    The points of several blocks are nested, so that only those of a single block become more.
    """
    fine, coarse = dict(factor.points), dict(factor.points)
    for name, points in factor.points.items():
        if isinstance(points, Quadrature):
            fine[name] = Quadrature(2 * points.order)
            if not fine[name].fits(_event_size(q.blocks[name], name in local)):
                fine[name] = coarse[name] = MonteCarlo(_POINTS)
        elif isinstance(points, MonteCarlo) and len(factor.points) == 1:
            fine[name] = coarse[name] = MonteCarlo(max(points.samples, _POINTS))
    with_points = lambda points: eqx.tree_at(lambda f: f.points, factor, points)
    return with_points(fine), with_points(coarse)


def _event_size(block: Any, local: bool) -> int:
    """How many numbers the factor is integrated over at once: those of one member, and of one row of a local block."""
    leaves = jax.tree.leaves(block.mean)
    size = sum(int(np.size(leaf)) for leaf in leaves)
    plates = math.prod(getattr(block, "batch_shape", ()) or (1,))
    rows = np.shape(leaves[0])[0] if local else 1
    return size // max(1, plates if local and plates >= rows else plates * rows)
