"""The Gaussian that Adam's second moment stands for: its precision is formed when it is asked for."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import all_finite, floating, same_shape, wide
from ...steps.needs import Need
from ...steps.step import Step
from .diagonal import AbstractDiagonal, DiagonalGaussian


class SecondMomentGaussian(AbstractDiagonal):
    r"""A Gaussian $N(m, \mathrm{diag}(s)^{-1})$ with $s = (NM\hat v + δ)/τ$ and Adam's second moment v̂.

    A gradient ĝ of the mean loss over M examples is mostly noise, whose variance is 1/M of that of one example's, so
    that $NM\hat g^2$ estimates $\sum_i g_i^2$, the data's Gauss–Newton diagonal (times 1 − M/N, where batches are drawn
    without replacement). Stored are m and the average c of Nĝ²/τ, as Adam stores them, and one number, the average r of
    1/M with the same weights: $s = c/r + δ/τ$. The prior's δ is a number for each leaf, or an array; it widens q, and
    is divided by only where it is the objective's.

    A step moves m and c as `DiagonalGaussian` moves m and s. Before the first one q is the prior around m, and points
    are drawn at m itself.

    >>> import jax.numpy as jnp
    >>> q = SecondMomentGaussian(jnp.zeros(2), jnp.array([3.0, 0.0]), inverse_batch=0.05, prior=2.0)
    >>> q.precision.tolist()                                                              # 3/0.05 + 2, and 2
    [62.0, 2.0]

    Args:
        mean: m, a pytree of floating arrays.
        moment: c, a number for all entries, or a pytree like the mean.
        inverse_batch: r; 0 before anything is measured.
        prior: δ/τ: a number, or a pytree like the mean of numbers or arrays.
    """

    mean: PyTree
    moment: PyTree
    inverse_batch: Array
    prior: PyTree
    batch_ndim: int = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian (diagonal cov.)"
    meaning: ClassVar[str] = "q(θ) = N(m, diag(s)⁻¹), s = (NM v̂ + δ)/τ for batches of M examples"
    update: ClassVar[str] = "s ← (1 − ρτ)s + ρ E_q diag(∇²ℓ̄),  m ← m − ρ E_q∇ℓ̄ / s  (eq:don)"
    precision_formula: ClassVar[str] = "s = (NM v̂ + δ)/τ"
    counts_examples: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.abstract or (p.curvature.squares_gradient and p.steps.scaling is not None),
            "A SecondMomentGaussian counts the squared gradients that Adam divides by: use SquaredGradient() and a "
            "Scaling with a root, as vadam does.",
        ),
    )

    def __init__(self, mean: PyTree, moment: PyTree = 0.0, *, inverse_batch: Any = 0.0, prior: PyTree = 1.0):
        self.mean = floating(mean)
        self.moment = same_shape(floating(moment), self.mean, "moment")
        self.inverse_batch = jnp.asarray(inverse_batch, float)
        like = lambda m, p: jnp.asarray(p, wide(m.dtype))
        if jax.tree.structure(prior) == jax.tree.structure(self.mean):
            self.prior = jax.tree.map(like, self.mean, prior)
        else:
            self.prior = jax.tree.map(lambda m: like(m, prior), self.mean)
        self.batch_ndim = 0

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        return cls(params, prior=precision, **choices)

    @property
    def precision(self) -> PyTree:
        """s, formed anew: the data's part and the prior's."""
        measured = self.inverse_batch > 0
        count = jnp.where(measured, 1 / jnp.where(measured, self.inverse_batch, 1.0), 0.0)
        form = lambda c, p: jnp.asarray(count, c.dtype) * c + p.astype(c.dtype)
        return jax.tree.map(form, self.moment, self.prior)

    def drawn(self, key: Key, shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        """Points for a step: draws, or the mean before anything has been measured."""
        measured = self.inverse_batch > 0
        draws = super().drawn(key, shape, standard=standard)
        return jax.tree.map(lambda m, theta: jnp.where(measured, theta, m), self.mean, draws)

    def begun(self, objective: Any, temperature: Any) -> Self:
        """With the objective's prior, or without one δ = 1/mean(θ₀²) for each leaf, that of the first weights."""
        if objective is None:
            raise ValueError(
                "This algorithm starts from a precision that depends on the prior: make the state with "
                "rule.init(params, objective)."
            )
        if not objective.knows_batch_size:
            raise ValueError(
                "The precision of this q is counted from squared gradients of batches, which are smaller the larger a "
                "batch is: pass batch_size=M, the number of examples that a gradient is averaged over."
            )
        if not isinstance(temperature, Tracer) and float(temperature) <= 0:
            raise ValueError(
                "At a temperature of 0 this q would have an infinite precision: let the temperature begin above 0, "
                "for example at 0.01."
            )
        prior = jax.tree.map(_of_first_weights, self.mean)
        if not objective.regularizer.flat:
            given = objective.regularizer.precision(self.mean)
            if jax.tree.structure(given) != jax.tree.structure(self.mean):
                given = jax.tree.map(lambda m: jnp.asarray(given), self.mean)
            # Where the objective's prior is flat, or no density, q must have a width all the same.
            prior = jax.tree.map(lambda p, own: jnp.where(p > 0, p, own), given, prior)
        return type(self)(self.mean, prior=jax.tree.map(lambda p: p / temperature, prior))

    def moved(self, step: Step) -> Self:
        def moment_leaf(c: Array, h: Array) -> Array:
            change = h - jnp.asarray(step.temperature, c.dtype) * c
            return c + jnp.asarray(step.precision_rate, c.dtype) * change

        def mean_leaf(m: Array, divisor: Array, g: Array) -> Array:
            return (m - jnp.asarray(rate, divisor.dtype) * g / divisor).astype(m.dtype)

        scaling: Any = step.divisor
        rate = step.rate / scaling.common
        if scaling.v is None:
            moment = jax.tree.map(moment_leaf, self.moment, step.curvature)
        else:  # The step's curvature has the prior's in it; v is the data's alone.
            unit = scaling.size / step.temperature
            moment = jax.tree.map(lambda v: jnp.asarray(unit, v.dtype) * v, scaling.v)
        mean = jax.tree.map(mean_leaf, self.mean, scaling(moment), step.gradient)
        share = 1.0 if step.examples is None else 1 / step.examples
        fraction = jnp.asarray(step.precision_rate * step.temperature, float)
        inverse_batch = self.inverse_batch + fraction * (share - self.inverse_batch)
        replaced = mean, moment, inverse_batch.astype(self.inverse_batch.dtype)
        return eqx.tree_at(lambda q: (q.mean, q.moment, q.inverse_batch), self, replaced)

    def _plain(self) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean, self.precision)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """Of the mean alone: what a step says about the precision is one batch's noise."""
        squares = jax.tree.map(lambda g, s: 0.5 * g**2 / s, step.gradient, self.precision)
        return jnp.sum(self._sum(squares))

    def distance(self, other: Any) -> Float[Array, ""]:
        return self._plain().distance(DiagonalGaussian(other.mean, other.precision))

    def inside(self) -> Bool[Array, "..."]:
        return self.proper() & self._all(self.mean, all_finite)

    def with_scaled_precision(self, factor: Any) -> Self:
        scaled = lambda tree: jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)
        return eqx.tree_at(lambda q: (q.moment, q.prior), self, (scaled(self.moment), scaled(self.prior)))

    def with_scaled_prior(self, factor: Any) -> Self:
        """The same q with the prior's part of its precision multiplied by a number."""
        prior = jax.tree.map(lambda p: jnp.asarray(factor, p.dtype) * p, self.prior)
        return eqx.tree_at(lambda q: q.prior, self, prior)


def _of_first_weights(leaf: Array) -> Array:
    """1/mean(θ₀²) of a leaf, 1 where it is all zeros."""
    square = jnp.mean(jnp.square(leaf.astype(wide(leaf.dtype)))) if leaf.size else jnp.zeros(())
    return jnp.where(square > 0, 1 / jnp.where(square > 0, square, 1.0), 1.0)
