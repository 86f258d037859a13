"""The Gaussian with a precision for each entry of θ: the mean-field Gaussian."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key, normals
from ...numerics.trees import all_finite, floating, ravel, same_shape, unravel
from ...steps.step import Step
from ..base import ExponentialFamily
from .base import GaussianFamily
from .precision import DIAGONAL, SharedFeatures, Structure

_LOG_2PI = math.log(2 * math.pi)


class AbstractDiagonal(GaussianFamily):
    r"""A Gaussian $N(m, \mathrm{diag}(s)^{-1})$ over any pytree, however its precision s is stored or formed."""

    precision: eqx.AbstractVar[PyTree]
    batch_ndim: eqx.AbstractVar[int]
    structure: ClassVar[Structure] = DIAGONAL
    reparameterized: ClassVar[bool] = True
    keeps_half_precision: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    @property
    def params(self) -> PyTree:
        return self.mean

    @property
    def batch_shape(self) -> tuple[int, ...]:
        leaves = jax.tree.leaves(self.mean)
        return leaves[0].shape[: self.batch_ndim] if leaves else ()

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return tuple(leaf.ndim - self.batch_ndim for leaf in leaves)

    def _sum(self, tree: PyTree) -> Float[Array, "..."]:
        """Sum over the axes of one distribution, in all leaves; batch axes and axes before them remain."""
        leaves = jax.tree.leaves(tree)
        ranks = [m.ndim - self.batch_ndim for m in jax.tree.leaves(self.mean)]
        sums = [jnp.sum(x, axis=tuple(range(-r, 0))) for x, r in zip(leaves, ranks, strict=True)]
        return jnp.asarray(sum(sums, start=0.0))

    def _all(self, tree: PyTree, test: Callable[[Array, tuple[int, ...]], Array]) -> Bool[Array, "..."]:
        """Whether test(leaf, axes of one distribution) holds in all leaves."""
        ranks = [m.ndim - self.batch_ndim for m in jax.tree.leaves(self.mean)]
        answers = [test(x, tuple(range(-r, 0))) for x, r in zip(jax.tree.leaves(tree), ranks, strict=True)]
        return reduce(jnp.logical_and, answers, jnp.asarray(True))

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        deviation = unravel(noise, self.mean, self.batch_ndim)
        move = lambda m, s, e: (m + e / jnp.sqrt(s)).astype(m.dtype)
        return jax.tree.map(move, self.mean, self.precision, deviation)

    def drawn(self, key: Key, shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        if standard:
            return self.sample(key, shape)
        # The noise is generated leaf by leaf, so that XLA fuses it into the sum and never stores it.
        noise = normals(key, self.mean, shape)
        return jax.tree.map(lambda m, s, e: m + (e / jnp.sqrt(s)).astype(m.dtype), self.mean, self.precision, noise)

    def times(self, theta: PyTree) -> PyTree:
        return jax.tree.map(jnp.multiply, self.precision, theta)

    def solve(self, theta: PyTree) -> PyTree:
        return jax.tree.map(jnp.divide, theta, self.precision)

    def variance(self) -> PyTree:
        return jax.tree.map(lambda s: 1 / s, self.precision)

    def covariance(self) -> Float[Array, "... P P"]:
        variance = ravel(self.variance(), self.batch_ndim)
        return variance[..., None] * jnp.eye(variance.shape[-1], dtype=variance.dtype)

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K *K"]:
        """The covariance of every example's outputs; their variances, (B, K), for `SharedFeatures`."""
        if isinstance(jacobian, SharedFeatures):
            variances = ravel(self.variance()).reshape((jacobian.features.shape[1], -1))
            return jacobian.features**2 @ variances
        parts = [
            jnp.einsum("bkp,blp->bkl", flat / s.reshape(-1), flat)
            for j, s in zip(jax.tree.leaves(jacobian), jax.tree.leaves(self.precision), strict=True)
            for flat in [j.reshape((*j.shape[:2], -1))]
        ]
        return sum(parts[1:], start=parts[0])

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return structure.of_diagonal(self.precision)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        return self._sum(jax.tree.map(jnp.multiply, self.precision, other.variance()))

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        def leaf(t: Array, m: Array, s: Array) -> Array:
            return jnp.log(s) - s * (t - m) ** 2 - _LOG_2PI

        return 0.5 * self._sum(jax.tree.map(leaf, theta, self.mean, self.precision))

    def entropy(self) -> Float[Array, "..."]:
        return 0.5 * self._sum(jax.tree.map(lambda s: 1 + _LOG_2PI - jnp.log(s), self.precision))

    def proper(self) -> Bool[Array, "..."]:
        return self._all(self.precision, lambda s, axis: all_finite(s, axis) & (jnp.min(s, axis=axis, initial=1.0) > 0))

    def trace(self, curvature: PyTree) -> Float[Array, ""]:
        return jnp.sum(self._sum(jax.tree.map(jnp.divide, curvature, self.precision)))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ Σ g²/s + ¼ Σ ((h − τs)/s)², the mean's part and the precision's."""

        def leaf(g: Array, h: Array, s: Array) -> Array:
            return 0.5 * g**2 / s + 0.25 * (h / s - jnp.asarray(step.temperature, s.dtype)) ** 2

        return jnp.sum(self._sum(jax.tree.map(leaf, step.gradient, step.curvature, self.precision)))


class DiagonalGaussian(AbstractDiagonal, ExponentialFamily):
    r"""A Gaussian $N(m, \mathrm{diag}(s)^{-1})$ over any pytree: the candidate of `eq:don`.

    $λ = (s∘m, −½s)$, $T = (θ, θ∘θ)$, $μ = (m, m∘m + 1/s)$. A step with the gradient g and the Hessian's diagonal h
    first changes s and then m by the new s': $s' = (1−ρτ)s + ρh$, $m' = m − ρg/s'$.

    >>> import jax.numpy as jnp
    >>> q = DiagonalGaussian({"w": jnp.array([1.0, 2.0])}, 4.0)
    >>> [float(x) for x in q.expectation()[1]["w"]]
    [1.25, 4.25]

    Args:
        mean: m, a pytree of floating arrays.
        precision: s, a number for all entries, or a pytree like the mean.
        batch_ndim: how many of the first axes of every leaf are a batch of independent distributions.
    """

    mean: PyTree
    precision: PyTree
    batch_ndim: int = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian (diagonal cov.)"
    meaning: ClassVar[str] = "q(θ) = N(m, diag(s)⁻¹), λ = (s∘m, −½s)  (tab:EFsummary)"
    update: ClassVar[str] = "s ← (1 − ρτ)s + ρ E_q diag(∇²ℓ̄),  m ← m − ρ E_q∇ℓ̄ / s  (eq:don)"

    def __init__(self, mean: PyTree, precision: PyTree = 1.0, *, batch_ndim: int = 0):
        self.mean = floating(mean)
        self.precision = same_shape(floating(precision), self.mean, "precision")
        self.batch_ndim = batch_ndim

    def natural(self) -> tuple[PyTree, PyTree]:
        return self.times(self.mean), jax.tree.map(lambda s: -0.5 * s, self.precision)

    @classmethod
    def from_natural(cls, natural: tuple[PyTree, PyTree], *, batch_ndim: int = 0) -> Self:
        precision = jax.tree.map(lambda b: -2 * jnp.asarray(b), natural[1])
        return cls(jax.tree.map(jnp.divide, natural[0], precision), precision, batch_ndim=batch_ndim)

    def with_natural(self, natural: tuple[PyTree, PyTree]) -> Self:
        return self.from_natural(natural, batch_ndim=self.batch_ndim)

    @classmethod
    def from_expectation(cls, expectation: tuple[PyTree, PyTree], *, batch_ndim: int = 0) -> Self:
        mean, square = expectation
        precision = jax.tree.map(lambda m, v: 1 / (v - m**2), mean, square)
        return cls(mean, precision, batch_ndim=batch_ndim)

    def with_expectation(self, expectation: tuple[PyTree, PyTree]) -> Self:
        return self.from_expectation(expectation, batch_ndim=self.batch_ndim)

    def moments(self, shift: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """The mean and the variance v = 1/s with μ displaced by `shift`, to first order: dv = dμ₂ − 2m dμ₁."""
        mean = jax.tree.map(jnp.add, self.mean, shift[0])
        variance = jax.tree.map(lambda m, s, a, b: 1 / s + b - 2 * m * a, self.mean, self.precision, *shift)
        return mean, variance

    def shifted_in_mu(self, shift: tuple[PyTree, PyTree]) -> Self:
        mean = jax.tree.map(jnp.add, self.mean, shift[0])
        precision = jax.tree.map(lambda m, s, a, b: s - s**2 * (b - 2 * m * a), self.mean, self.precision, *shift)
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, (mean, precision))

    def mode(self) -> PyTree:
        return self.mean

    def statistics(self, theta: PyTree) -> tuple[PyTree, PyTree]:
        return theta, jax.tree.map(jnp.square, theta)

    def log_partition(self, natural: tuple[PyTree, PyTree]) -> Float[Array, "..."]:
        return self._sum(jax.tree.map(lambda a, b: -(a**2) / (4 * b) - 0.5 * jnp.log(-2 * b), natural[0], natural[1]))

    def log_base(self, theta: PyTree) -> float:
        return -0.5 * self.noise_size * _LOG_2PI

    def expectation(self) -> tuple[PyTree, PyTree]:
        return self.mean, jax.tree.map(lambda m, s: m**2 + 1 / s, self.mean, self.precision)

    def kl(self, other: Any) -> Float[Array, "..."]:
        return GaussianFamily.kl(self, other)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        q = self if natural is None else self.with_natural(natural)
        return q.proper() & self._all(q.mean, all_finite)

    def to_natural_gradient(self, covector: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        def second(m: Array, s: Array, c: Array, d: Array) -> Array:
            return 0.5 * s**2 * (d - 2 * m * c)

        half = jax.tree.map(second, self.mean, self.precision, *covector)
        first = jax.tree.map(lambda m, s, c, k: s * c - 2 * k * m, self.mean, self.precision, covector[0], half)
        return first, half

    def natural_step(self, step: Step) -> tuple[PyTree, PyTree]:
        """∇_μ E_q ℓ̄ = (g − h∘m, ½h)  (`eq:ngrad_1_gauss`, `eq:ngrad_2_gauss`)."""
        first = jax.tree.map(lambda g, h, m: g - h * m, step.gradient, step.curvature, self.mean)
        return first, jax.tree.map(lambda h: 0.5 * h, step.curvature)

    def derivatives(self, natural_gradient: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        curvature = jax.tree.map(lambda b: 2 * b, natural_gradient[1])
        gradient = jax.tree.map(lambda a, h, m: a + h * m, natural_gradient[0], curvature, self.mean)
        return gradient, curvature

    def moved(self, step: Step) -> Self:
        if step.reverse:
            return super().moved(step)

        def precision_leaf(s: Array, h: Array, before: Array) -> Array:
            change = jnp.asarray(step.precision_rate, s.dtype) * (h - jnp.asarray(step.temperature, s.dtype) * s)
            if step.momentum is not None:
                change = change + jnp.asarray(step.momentum, s.dtype) * (s - before)
            return s + change + step.curved(0.5 * change**2 / s) if step.retraction else s + change

        rate = step.rate if step.divisor is None else step.rate / step.divisor.common

        def mean_leaf(m: Array, divisor: Array, g: Array) -> Array:
            return (m - jnp.asarray(rate, divisor.dtype) * g / divisor).astype(m.dtype)

        before = self if step.momentum is None else step.previous
        precision = jax.tree.map(precision_leaf, self.precision, step.curvature, before.precision)
        divisor = precision if step.divisor is None else step.divisor(precision)
        mean = jax.tree.map(mean_leaf, self.mean, divisor, step.gradient)
        if step.momentum is not None:
            mean = jax.tree.map(
                lambda n, m, p, sp, new: n + jnp.asarray(step.momentum, n.dtype) * sp / new * (m - p),
                mean,
                self.mean,
                step.previous.mean,
                step.previous.precision,
                precision,
            )
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, (mean, precision))

    def chart(self) -> tuple[PyTree, PyTree]:
        """(m, s): differences of s∘m would lose the digits of a mean that is many standard deviations from 0."""
        return self.mean, self.precision

    def at_chart(self, coordinates: tuple[PyTree, PyTree]) -> Self:
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, coordinates)

    def chart_velocity(self, step: Step) -> tuple[PyTree, PyTree]:
        """(−g/s, h − τs)."""
        mean = jax.tree.map(lambda g, s: (-g / s).astype(s.dtype), step.gradient, self.precision)
        change = lambda h, s: h - jnp.asarray(step.temperature, s.dtype) * s
        return mean, jax.tree.map(change, step.curvature, self.precision)

    def chart_metric(self, vector: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """(s dm, ½ ds/s²)."""
        mean = jax.tree.map(jnp.multiply, self.precision, vector[0])
        return mean, jax.tree.map(lambda s, d: 0.5 * d / s**2, self.precision, vector[1])

    def with_scaled_precision(self, factor: Any) -> Self:
        precision = jax.tree.map(lambda s: jnp.asarray(factor, s.dtype) * s, self.precision)
        return eqx.tree_at(lambda q: q.precision, self, precision)
