"""A fit from several starts side by side: how they are drawn, and the record of where they ended.

An algorithm that follows one optimum cannot know that there is a better one elsewhere. Several starts can: where all of
them end at the same bound, that says something; where few do, the posterior has several modes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..factor_graph.block_view import batch_shape
from ..families.base import ExponentialFamily, Family
from ..families.latent.mixture import Mixture
from ..families.point_mass import Peak
from ..families.product import Product
from ..families.sites.base import SitedGaussian
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .loop import Carry, take_steps
from .reason import Reason

AGREES_WITHIN = 0.1
"""Two starts agree if their bounds are so many nats apart: modes whose weights differ by a tenth, or the same one."""

SCALES = (1.0, 2.0, 4.0)
"""The scales of the starts after the first, in turn: q's own width is a guess, and wide starts find what is far."""

_MOST_EXCHANGED = 100  # Members along a plate; of more, as of a block with a member for each row, only draws are taken.
_MOST_NUMBERS = 2**26  # States and data of all starts together up to which they run side by side.


class Starts(NamedTuple):
    """Where every start of `fit(starts=k)` ended: `result.starts`. The first is the start that was given.

    Attributes:
        bounds: the bound at each end, by the rule's own points; with mini-batches minus the mean objective of the last
            epoch.
        reasons: why each ended, as in `Result.reason`.
        best: which one the result is: the highest bound among those that converged, or among all if none did.
        within: how many nats below the best bound still agree with it.

    >>> starts = Starts(np.array([-7.5, -3.2, -3.21]), ("converged",) * 3, best=1)
    >>> starts.agree, print(starts)
    2 of 3 starts ended within 0.1 nats of the best bound, -3.2; the start that was given ended at -7.5 (converged).
    (2, None)
    """

    bounds: np.ndarray
    reasons: tuple[str, ...]
    best: int
    within: float = AGREES_WITHIN

    @property
    def agreeing(self) -> np.ndarray:
        """Which starts ended as the best one did, and at its bound."""
        same_end = np.array([reason == self.reasons[self.best] for reason in self.reasons])
        return same_end & (np.abs(self.bounds - self.bounds[self.best]) <= self.within)

    @property
    def agree(self) -> int:
        """How many starts agree with the best, itself included."""
        return int(np.sum(self.agreeing))

    def with_verdict(self, reason: Reason) -> Starts:
        """The record in which the starts that agree have the reason of the result, which was judged once more."""
        reasons = zip(self.reasons, self.agreeing, strict=True)
        return self._replace(reasons=tuple(reason.value if agrees else own for own, agrees in reasons))

    def __str__(self) -> str:
        count, best = len(self.bounds), self.bounds[self.best]
        text = f"{self.agree} of {count} starts ended within {self.within:g} nats of the best bound, {best:.6g}"
        if not self.agreeing[0]:
            text += f"; the start that was given ended at {self.bounds[0]:.6g} ({self.reasons[0]})"
        failed = sum(Reason(reason).rejected_a_step for reason in self.reasons)
        if failed:
            text += f"; {failed} could not be followed to an end"
        if self.agree == 1:
            text += ". No other start confirms it: take more starts, or wider ones"
        return text + "."


def dispersed(q: Family, key: Key, scale: float = 1.0) -> Family:
    r"""Another start of the same shape, drawn around q.

    A Gaussian keeps its precision and is moved to a draw of itself, so that a wider q spreads its starts wider; a
    mixture's components are moved to draws of the whole mixture. Any other member gets $(1 − w)μ + wT(θ)$ as its
    expectation parameters, with one draw θ: a part $w = 1 − 2^{−\text{scale}}$ of what it knows is replaced by one
    observation of itself. Members along a plate, such as the components of a mixture model, exchange the same part of
    their μ by random weights instead, since what separates them is more than the width of each. The blocks of a product
    are drawn one by one. A process or a chain is conditioned on a draw of its outputs, each with q's own variance. A
    family without any of these stays as it is.

    Args:
        q: the start that was given.
        key: a random key.
        scale: by what a Gaussian's draw is moved away from its mean, in units of q's own standard deviations.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> other = dispersed(blr.Gaussian(jnp.zeros(2), jnp.eye(2) / 100), jax.random.key(0))
    >>> bool(jnp.all(jnp.abs(other.mean) > 1)), round(float(other.precision[0, 0]), 6)
    (True, 0.01)
    """
    if isinstance(q, Product):
        keys = jax.random.split(key, len(q.blocks))
        named: Any = {n: dispersed(block, k, scale) for k, (n, block) in zip(keys, q.blocks.items(), strict=True)}
        return type(q)(named)
    if isinstance(q, Peak):
        inner: Any = dispersed(q.of, key, scale)
        return type(q)(inner)
    if isinstance(q, Mixture):
        if not _has_mean(q.component_prototype):
            return q
        return q.with_parts(q.each(partial(_moved_to, scale=scale), q.sample(key, (q.count,))), q.choice)
    if isinstance(q, SitedGaussian):
        if q.vector_outputs:
            return q
        precision = 1 / jnp.maximum(q.variance, jnp.finfo(q.variance.dtype).tiny)
        outputs = q.mean + scale * (q.sample(key) - q.mean)
        return q.with_natural((precision * outputs, -0.5 * precision))
    if _has_mean(q):
        return _moved_to(q, q.sample(key), scale)
    if isinstance(q, ExponentialFamily):
        part, plates = 1 - 0.5**scale, batch_shape(q)
        try:
            if plates and 1 < plates[0] <= _MOST_EXCHANGED:
                weights = jax.random.dirichlet(key, jnp.full(plates[0], 0.5), (plates[0],))
                mix = (1 - part) * jnp.eye(plates[0]) + part * weights  # convex combinations of μ are valid ones
                expectation = jax.tree.map(lambda mu: jnp.tensordot(mix.astype(mu.dtype), mu, axes=1), q.expectation())
            else:
                observed = q.statistics(q.sample(key))
                expectation = jax.tree.map(lambda mu, t: mu + part * (t - mu), q.expectation(), observed)
            return q.with_expectation(expectation)
        except (ValueError, NotImplementedError):  # a family whose μ does not determine λ
            return q
    return q


def _has_mean(q: Any) -> bool:
    """Whether a member stores its mean, in the shape of θ, so that it can be moved without changing its own shape."""
    if not any(field.name == "mean" for field in dataclasses.fields(q)):
        return False
    draw = jax.eval_shape(lambda: q.sample(jax.random.key(0)))
    same = jax.tree.structure(draw) == jax.tree.structure(q.mean)
    pairs = zip(jax.tree.leaves(draw), jax.tree.leaves(q.mean), strict=False)
    return same and all(np.size(a) == np.size(b) for a, b in pairs)


def _moved_to(q: Any, theta: PyTree, scale: float) -> Any:
    """q with its mean moved by `scale` times the way to θ."""
    move = lambda new, old: jnp.asarray(old + scale * (new.reshape(old.shape) - old), old.dtype)
    return eqx.tree_at(lambda q: q.mean, q, jax.tree.map(move, theta, q.mean))


class Lanes(eqx.Module):
    """The carries of all starts along a leading axis, which `run_in_chunks` sees as one carry."""

    carries: Carry

    @staticmethod
    def of(carries: Sequence[Carry]) -> Lanes:
        """The carries, stacked."""
        stack = lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves])
        return Lanes(jax.tree.map(stack, *carries))

    @property
    def state(self) -> Any:
        """Its `count` is that of the starts that have not ended, or the largest one."""
        ended, counts = np.asarray(self.carries.code) != Reason.STEPS.code, np.asarray(self.carries.state.count)
        return _Count(np.max(counts if np.all(ended) else counts[~ended]))

    @property
    def code(self) -> int:
        """0 while a start goes on, then the code of the first."""
        codes = np.asarray(self.carries.code)
        return 0 if np.any(codes == Reason.STEPS.code) else int(codes[0])

    def separate(self, reason: Reason) -> list[tuple[Carry, Reason]]:
        """Every start's own carry, and why it ended; those that nothing ended have this reason."""
        codes = np.asarray(self.carries.code)
        lanes = [jax.tree.map(lambda leaf, k=k: leaf[k], self.carries) for k in range(len(codes))]
        whole = Reason.INTERRUPTED if reason is Reason.INTERRUPTED else Reason.STEPS
        return [
            (lane, whole if code == Reason.STEPS.code else Reason.of(int(code)))
            for lane, code in zip(lanes, codes, strict=True)
        ]


class _Count(NamedTuple):
    count: Any


def fits_in_memory(states: PyTree, data: PyTree, count: int) -> bool:
    """Whether so many fits may run side by side. Each has the intermediate results of the loss on all data."""
    numbers = sum(np.size(leaf) for leaf in jax.tree.leaves((states, data)))
    return count * numbers <= _MOST_NUMBERS


def _take_steps_together(
    rule: Any, objective: Any, data: PyTree, key: Key, tolerance: Any, first: Any, until: Any, lanes: Lanes, **how: Any
) -> Lanes:
    # All starts see the same batches and points, so that the one that was given moves as it would by itself.
    one = lambda carry: take_steps(rule, objective, data, key, tolerance, first, until, carry, **how)
    return Lanes(jax.vmap(one)(lanes.carries))


run_chunk_together = compiled(static=("batch_size", "diagnose", "microbatches"), donate="lanes")(_take_steps_together)
"""`run_chunk` for all starts at once."""


@compiled
def bounds_of(rule: Any, objective: Any, states: Any, data: PyTree, key: Key) -> Array:
    """The bound of each state, which are stacked along a leading axis."""
    return jax.lax.map(lambda state: rule.bound(objective, state.q, data, key, aux=state.aux), states)


def choose(bounds: np.ndarray, reasons: Sequence[Reason]) -> Starts:
    """The record of these ends: the best is the highest finite bound among those that converged, if any did."""
    converged = np.array([reason is Reason.CONVERGED for reason in reasons])
    candidates = converged & np.isfinite(bounds)
    if not np.any(candidates):
        candidates = np.isfinite(bounds) & np.array([reason is not Reason.NOT_FINITE for reason in reasons])
    best = int(np.argmax(np.where(candidates, bounds, -np.inf))) if np.any(candidates) else 0
    return Starts(bounds, tuple(reason.value for reason in reasons), best)
