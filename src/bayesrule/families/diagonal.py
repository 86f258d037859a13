"""Gaussians with a precision for each entry of θ: fixed, or learnt as a diagonal."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ..steps import Step
from .base import ExponentialFamily
from .structure import DIAGONAL, NONE, GaussianFamily, Structure, floating, ravel, same_shape, unravel

_LOG_2PI = math.log(2 * math.pi)


class _Elementwise(GaussianFamily, ExponentialFamily):
    """What the fixed and the diagonal Gaussian share: a precision for each entry of θ."""

    mean: eqx.AbstractVar[PyTree]
    precision: eqx.AbstractVar[PyTree]
    batch_ndim: eqx.AbstractVar[int]
    reparameterized: ClassVar[bool] = True

    @property
    def batch_shape(self) -> tuple[int, ...]:
        leaves = jax.tree.leaves(self.mean)
        return leaves[0].shape[: self.batch_ndim] if leaves else ()

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return tuple(leaf.ndim - self.batch_ndim for leaf in leaves)

    def _sum(self, tree: PyTree) -> Float[Array, "..."]:
        """The sum over one event, leading axes kept."""
        leaves = jax.tree.leaves(tree)
        ranks = [m.ndim - self.batch_ndim for m in jax.tree.leaves(self.mean)]
        sums = [jnp.sum(x, axis=tuple(range(-r, 0))) for x, r in zip(leaves, ranks, strict=True)]
        return jnp.asarray(sum(sums, start=0.0))

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        deviation = unravel(noise, self.mean, self.batch_ndim)
        return jax.tree.map(lambda m, s, e: m + e / jnp.sqrt(s), self.mean, self.precision, deviation)

    def times(self, theta: PyTree) -> PyTree:
        return jax.tree.map(jnp.multiply, self.precision, theta)

    def solve(self, theta: PyTree) -> PyTree:
        return jax.tree.map(jnp.divide, theta, self.precision)

    def variance(self) -> PyTree:
        return jax.tree.map(lambda s: 1 / s, self.precision)

    def covariance(self) -> Float[Array, "... P P"]:
        variance = ravel(self.variance(), self.batch_ndim)
        return variance[..., None] * jnp.eye(variance.shape[-1], dtype=variance.dtype)

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
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


class FixedGaussian(_Elementwise):
    r"""A Gaussian $N(m, S^{-1})$ whose precision stays as it is: gradient descent's candidate.

    $λ = Sm$, $μ = m$, $2\log h(θ) = \log|S| − P\log 2π − θ^⊤Sθ$, so the decay of λ cancels in the
    rule and $m ← m − ρS^{-1}E_q∇\barℓ$ (`eq:blr_sgd1`, `eq:sgd_cov`).

    `precision` is one number or a pytree like `mean`: a number for each entry. With `batch_ndim=1`
    the leaves' first axes are a batch.

    >>> import jax.numpy as jnp
    >>> q = FixedGaussian(jnp.array([1.0, 2.0]), 4.0)
    >>> [float(x) for x in q.natural()], [float(x) for x in q.expectation()]
    ([4.0, 8.0], [1.0, 2.0])
    """

    mean: PyTree
    precision: PyTree
    batch_ndim: int = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian (fixed cov.)"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), S fixed, λ = Sm  (tab:EFsummary)"
    update: ClassVar[str] = "m ← m − ρ S⁻¹ E_q∇ℓ̄  (eq:blr_sgd1, eq:sgd_cov)"
    structure: ClassVar[Structure] = NONE

    def __init__(self, mean: PyTree, precision: PyTree = 1.0, *, batch_ndim: int = 0):
        self.mean = floating(mean)
        self.precision = same_shape(floating(precision), self.mean, "precision")
        self.batch_ndim = batch_ndim

    def natural(self) -> PyTree:
        return self.times(self.mean)

    def with_natural(self, natural: PyTree) -> Self:
        return self._at(self.solve(natural))

    @classmethod
    def from_natural(cls, natural: PyTree, precision: PyTree = 1.0) -> Self:
        """The member with λ = Sm and this precision S."""
        return cls(natural, precision).with_natural(floating(natural))

    def with_expectation(self, expectation: PyTree) -> Self:
        return self._at(expectation)

    @classmethod
    def from_expectation(cls, expectation: PyTree, precision: PyTree = 1.0) -> Self:
        """The member with μ = m and this precision S."""
        return cls(expectation, precision)

    def _at(self, mean: PyTree) -> Self:
        return eqx.tree_at(lambda q: q.mean, self, mean)

    def statistics(self, theta: PyTree) -> PyTree:
        return theta

    def log_partition(self, natural: PyTree) -> Float[Array, "..."]:
        return 0.5 * self._sum(jax.tree.map(lambda a, s: a**2 / s, natural, self.precision))

    def log_base(self, theta: PyTree) -> Float[Array, "..."]:
        return self._log_normalizer() - 0.5 * self._sum(jax.tree.map(lambda t, s: s * t**2, theta, self.precision))

    def expected_log_base(self) -> Float[Array, "..."]:
        squares = self._sum(jax.tree.map(lambda m, s: s * m**2, self.mean, self.precision))
        return self._log_normalizer() - 0.5 * (squares + self.noise_size)

    def _log_normalizer(self) -> Float[Array, "..."]:
        return 0.5 * (self._sum(jax.tree.map(jnp.log, self.precision)) - self.noise_size * _LOG_2PI)

    def expectation(self) -> PyTree:
        return self.mean

    def entropy(self) -> Float[Array, "..."]:
        return 0.5 * self.noise_size - self._log_normalizer()

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        leaves = self.mean if natural is None else natural
        return self._sum(jax.tree.map(lambda x: ~jnp.isfinite(x), leaves)) == 0

    def raised(self, covector: PyTree) -> PyTree:
        return self.times(covector)

    def lowered(self, vector: PyTree) -> PyTree:
        return self.solve(vector)

    def derivatives(self, natural_gradient: PyTree) -> tuple[PyTree, None]:
        return natural_gradient, None

    def trace(self, curvature: Any) -> Float[Array, ""]:
        return jnp.zeros(())

    def moved(self, step: Step) -> Self:
        """m ← m − ρS⁻¹g + γ(m − m_{t−1}), in λ and in μ alike."""

        def leaf(m: Array, s: Array, g: Array) -> Array:
            return m - jnp.asarray(step.rate, m.dtype) * g / s

        mean = jax.tree.map(leaf, self.mean, self.precision, step.gradient)
        return self._at(_pushed(mean, self.mean, step))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g."""
        terms = jax.tree.map(lambda g, s: g**2 / s, step.gradient, self.precision)
        return 0.5 * jnp.sum(self._sum(terms))


def _pushed(mean: PyTree, here: PyTree, step: Step) -> PyTree:
    if step.momentum is None:
        return mean
    return jax.tree.map(
        lambda n, m, p: n + jnp.asarray(step.momentum, n.dtype) * (m - p), mean, here, step.previous.mean
    )


class DiagonalGaussian(_Elementwise):
    r"""A Gaussian $N(m, \mathrm{diag}(s)^{-1})$ over any pytree: the candidate of `eq:don`.

    $λ = (s∘m, −½s)$, $T = (θ, θ∘θ)$, $μ = (m, m∘m + 1/s)$. Moved in (m, s), s first:
    $s ← (1−ρτ)s + ρh$, $m ← m − ρg/s'$.

    >>> import jax.numpy as jnp
    >>> q = DiagonalGaussian({"w": jnp.array([1.0, 2.0])}, 4.0)
    >>> [float(x) for x in q.expectation()[1]["w"]]
    [1.25, 4.25]
    """

    mean: PyTree
    precision: PyTree
    batch_ndim: int = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian (diagonal cov.)"
    meaning: ClassVar[str] = "q(θ) = N(m, diag(s)⁻¹), λ = (s∘m, −½s)  (tab:EFsummary)"
    update: ClassVar[str] = "s ← (1 − ρτ)s + ρ E_q diag(∇²ℓ̄),  m ← m − ρ E_q∇ℓ̄ / s  (eq:don)"
    structure: ClassVar[Structure] = DIAGONAL

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

    def statistics(self, theta: PyTree) -> tuple[PyTree, PyTree]:
        return theta, jax.tree.map(jnp.square, theta)

    def log_partition(self, natural: tuple[PyTree, PyTree]) -> Float[Array, "..."]:
        return self._sum(jax.tree.map(lambda a, b: -(a**2) / (4 * b) - 0.5 * jnp.log(-2 * b), natural[0], natural[1]))

    def log_base(self, theta: PyTree) -> float:
        return -0.5 * self.noise_size * _LOG_2PI

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        def leaf(t: Array, m: Array, s: Array) -> Array:
            return jnp.log(s) - s * (t - m) ** 2 - _LOG_2PI

        return 0.5 * self._sum(jax.tree.map(leaf, theta, self.mean, self.precision))

    def expectation(self) -> tuple[PyTree, PyTree]:
        return self.mean, jax.tree.map(lambda m, s: m**2 + 1 / s, self.mean, self.precision)

    def entropy(self) -> Float[Array, "..."]:
        return 0.5 * self._sum(jax.tree.map(lambda s: 1 + _LOG_2PI - jnp.log(s), self.precision))

    def kl(self, other: Any) -> Float[Array, "..."]:
        return GaussianFamily.kl(self, other)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        q = self if natural is None else self.with_natural(natural)
        outside = jax.tree.map(lambda m, s: ~(jnp.isfinite(m) & jnp.isfinite(s) & (s > 0)), q.mean, q.precision)
        return self._sum(outside) == 0

    def raised(self, covector: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
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

    def trace(self, curvature: PyTree) -> Float[Array, ""]:
        return jnp.sum(self._sum(jax.tree.map(jnp.divide, curvature, self.precision)))

    def moved(self, step: Step) -> Self:
        if step.reverse:
            return super().moved(step)

        def precision_leaf(s: Array, h: Array, before: Array) -> Array:
            change = jnp.asarray(step.precision_rate, s.dtype) * (h - jnp.asarray(step.temperature, s.dtype) * s)
            if step.momentum is not None:
                change = change + jnp.asarray(step.momentum, s.dtype) * (s - before)
            return s + change + 0.5 * change**2 / s if step.retraction else s + change

        def mean_leaf(m: Array, new: Array, g: Array) -> Array:
            return m - jnp.asarray(step.rate, m.dtype) * g / new

        before = self if step.momentum is None else step.previous
        precision = jax.tree.map(precision_leaf, self.precision, step.curvature, before.precision)
        mean = jax.tree.map(mean_leaf, self.mean, precision, step.gradient)
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

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ Σ g²/s + ¼ Σ ((h − τs)/s)²."""

        def leaf(g: Array, h: Array, s: Array) -> Array:
            return 0.5 * g**2 / s + 0.25 * (h / s - jnp.asarray(step.temperature, s.dtype)) ** 2

        return jnp.sum(self._sum(jax.tree.map(leaf, step.gradient, step.curvature, self.precision)))
