"""The Gaussian with a full precision, stored and moved as mean m and precision S."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from ...numerics.factors import cholesky, inverse, recall
from ...numerics.pytree import PyTree
from ...numerics.trees import floating, ravel, unravel
from ...steps.step import Step
from ..base import ExponentialFamily
from .base import GaussianFamily
from .precision import FULL, SharedFeatures, Structure

_LOG_2PI = math.log(2 * math.pi)
_MOST_KEPT = 2**20  # Of a precision of at most so many numbers a loop keeps factor and inverse from step to step.


class Gaussian(GaussianFamily, ExponentialFamily):
    r"""The Gaussian $N(m, S^{-1})$ with a full precision, the family of Newton's method.

    $λ = (Sm, −½S)$, $μ = (m, S^{-1} + mm^⊤)$ (`eq:full_gauss_params`). Moved in (m, S), S first:
    $S ← (1−ρτ)S + ρE_q∇^2\barℓ$, $m ← m − ρS_{t+1}^{-1}E_q∇\barℓ$ (`eq:von_1`).

    >>> import jax.numpy as jnp
    >>> q = Gaussian(jnp.array([1.0, 0.0]), 2 * jnp.eye(2))
    >>> [float(x) for x in q.natural()[0]], round(float(q.entropy()), 4)
    ([2.0, 0.0], 2.1447)

    Args:
        mean: m, any pytree.
        precision: S, a matrix over the ravelled mean, or one number for a multiple of the identity. Axes before the
            last two, and as many first axes of the mean, are a batch.
    """

    mean: PyTree
    precision: Float[Array, "... P P"]
    label: ClassVar[str] = "Gaussian"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), λ = (Sm, −½S)  (eq:full_gauss_params)"
    update: ClassVar[str] = "S ← (1 − ρτ)S + ρ E_q∇²ℓ̄,  m ← m − ρ S⁻¹ E_q∇ℓ̄  (eq:von_1)"
    ranks: ClassVar[tuple[int, ...] | None] = (1, 2)
    reparameterized: ClassVar[bool] = True
    structure: ClassVar[Structure] = FULL

    def __init__(self, mean: PyTree, precision: Any = 1.0):
        self.mean = floating(mean)
        precision = floating(precision)
        if precision.ndim == 0:
            size = sum(leaf.size for leaf in jax.tree.leaves(self.mean))
            dtype = jnp.result_type(*jax.tree.leaves(self.mean)) if size else precision.dtype
            identity = np.eye(size, dtype=jnp.result_type(precision, dtype))
            # A number is multiplied on the host, where a new size costs no program.
            number = precision if isinstance(precision, Tracer) else np.asarray(precision).astype(identity.dtype)
            precision = jnp.asarray(number * identity)
        if (
            jnp.finfo(precision.dtype).bits < 32
        ):  # half-precision parameters have a float32 precision: it is solved with
            precision = precision.astype(jnp.float32)
        self.precision = precision
        lead, size = precision.shape[:-2], precision.shape[-1]
        sizes = [math.prod(leaf.shape[len(lead) :]) for leaf in jax.tree.leaves(self.mean)]
        batched = all(leaf.shape[: len(lead)] == lead for leaf in jax.tree.leaves(self.mean))
        if precision.ndim < 2 or precision.shape[-2] != size or sum(sizes) != size or not batched:
            raise ValueError(
                f"A Gaussian over {sum(sizes)} numbers needs a precision of shape (…, {sum(sizes)}, "
                f"{sum(sizes)}) with the mean's batch axes in front, got {precision.shape}. For a number for "
                "each entry use DiagonalGaussian."
            )

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (precision, params)]
        if shapes[0] != shapes[1]:
            return cls(params, precision)
        leaves = jax.tree.leaves(precision)
        if not leaves or any(isinstance(leaf, Tracer) for leaf in leaves):
            return cls(params, jnp.diag(ravel(precision)))
        # Known numbers are put on the diagonal on the host, where a new size costs no program.
        diagonal = np.concatenate([np.ravel(leaf) for leaf in leaves])
        return cls(params, jnp.asarray(np.diag(diagonal), jnp.result_type(*map(jnp.asarray, leaves))))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.precision.shape[:-2]

    def _vector(self, theta: PyTree) -> Float[Array, "... P"]:
        """θ as one vector, over any leading axes."""
        theirs, mine = jax.tree.leaves(theta), jax.tree.leaves(self.mean)
        lead = theirs[0].ndim - mine[0].ndim + len(self.batch_shape) if theirs else 0
        return ravel(theta, lead)

    def _tree(self, vector: Float[Array, "... P"]) -> PyTree:
        return unravel(vector, self.mean, len(self.batch_shape))

    def natural(self) -> tuple[Array, Array]:
        return _matvec(self.precision, self._vector(self.mean)), -0.5 * self.precision

    @classmethod
    def from_natural(cls, natural: tuple[Array, Array]) -> Self:
        precision = -2 * natural[1]
        return cls(_solve(cholesky(precision), natural[0]), precision)

    def with_natural(self, natural: tuple[Array, Array]) -> Self:
        return self._like(Gaussian.from_natural(natural))

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, Array]) -> Self:
        mean, square = expectation
        covariance = square - mean[..., :, None] * mean[..., None, :]
        return cls(mean, inverse(covariance))

    def with_expectation(self, expectation: tuple[Array, Array]) -> Self:
        return self._like(Gaussian.from_expectation(expectation))

    def moments(self, shift: tuple[Array, Array]) -> tuple[Array, Array]:
        """m and S⁻¹ with μ displaced: dV = dμ₂ − dμ₁mᵀ − m dμ₁ᵀ."""
        mean = self._vector(self.mean)
        return mean + shift[0], self.covariance() + _covariance_change(shift, mean)

    def shifted_in_mu(self, shift: tuple[Array, Array]) -> Self:
        mean = self._vector(self.mean)
        change = self.precision @ _covariance_change(shift, mean) @ self.precision
        return self._like(Gaussian(mean + shift[0], self.precision - change))

    def mode(self) -> PyTree:
        return self.mean

    def _like(self, flat: Gaussian) -> Self:
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, (self._tree(flat.mean), flat.precision))

    def statistics(self, theta: PyTree) -> tuple[Array, Array]:
        vector = self._vector(theta)
        return vector, vector[..., :, None] * vector[..., None, :]

    def log_partition(self, natural: tuple[Array, Array]) -> Float[Array, "..."]:
        factor = jnp.linalg.cholesky(-2 * natural[1])
        whitened = linalg.solve_triangular(factor, natural[0][..., None], lower=True)[..., 0]
        return 0.5 * jnp.sum(whitened**2, axis=-1) - _half_log_det(factor)

    def log_base(self, theta: PyTree) -> float:
        return -0.5 * self.precision.shape[-1] * _LOG_2PI

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        factor = cholesky(self.precision)
        deviation = self._vector(theta) - self._vector(self.mean)
        whitened = jnp.einsum("...ji,...j->...i", factor, deviation)
        return self.log_base(theta) + _half_log_det(factor) - 0.5 * jnp.sum(whitened**2, axis=-1)

    def expectation(self) -> tuple[Array, Array]:
        vector = self._vector(self.mean)
        return vector, self.covariance() + vector[..., :, None] * vector[..., None, :]

    def entropy(self) -> Float[Array, "..."]:
        size = self.precision.shape[-1]
        return 0.5 * size * (1 + _LOG_2PI) - _half_log_det(cholesky(self.precision))

    def kl(self, other: Any) -> Float[Array, "..."]:
        return GaussianFamily.kl(self, other)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        vector, precision = (
            (self._vector(self.mean), self.precision) if natural is None else (natural[0], -2 * natural[1])
        )
        factor = cholesky(precision)
        # A pivot of the size of the rounding errors is a zero: S is singular, even if its factor is finite.
        pivots = jnp.diagonal(factor, axis1=-2, axis2=-1) ** 2
        rounding = factor.shape[-1] * jnp.finfo(factor.dtype).eps
        least = rounding * jnp.diagonal(precision, axis1=-2, axis2=-1)
        positive = jnp.all(pivots > least, axis=-1) & jnp.all(jnp.isfinite(factor), axis=(-2, -1))
        return positive & jnp.all(jnp.isfinite(vector), axis=-1)

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        factor = cholesky(self.precision)
        factor = jnp.broadcast_to(factor, (*noise.shape[:-1], *factor.shape[-2:])) if self.batch_shape else factor
        if self.batch_shape:
            deviation = linalg.solve_triangular(factor, noise[..., None], lower=True, trans=1)[..., 0]
        else:
            rows = noise.reshape((-1, noise.shape[-1]))
            deviation = linalg.solve_triangular(factor, rows.T, lower=True, trans=1).T.reshape(noise.shape)
        return self._tree(self._vector(self.mean) + deviation)

    def times(self, theta: PyTree) -> PyTree:
        return self._tree(_matvec(self.precision, self._vector(theta)))

    def solve(self, theta: PyTree) -> PyTree:
        return self._tree(_solve(cholesky(self.precision), self._vector(theta)))

    def trace(self, curvature: Float[Array, "... P P"]) -> Float[Array, ""]:
        return jnp.sum(self.covariance() * curvature)

    def variance(self) -> PyTree:
        return self._tree(jnp.diagonal(self.covariance(), axis1=-2, axis2=-1))

    def covariance(self) -> Float[Array, "... P P"]:
        return inverse(self.precision)

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        if isinstance(jacobian, SharedFeatures):
            return jacobian.covariance(self.covariance())
        flat = ravel(jacobian, 2)
        rows = flat.reshape((-1, flat.shape[-1]))
        product = (rows @ self.covariance()).reshape(flat.shape)
        if flat.shape[1] == 1:
            return jnp.sum(product * flat, axis=-1, keepdims=True)
        return jnp.einsum("bkp,blp->bkl", product, flat)

    def factors(self) -> tuple[Array, Array] | None:
        # They are two more matrices of the size of the precision in the loop, which matters if that is large.
        return (cholesky(self.precision), inverse(self.precision)) if self.precision.size <= _MOST_KEPT else None

    def recall_factors(self, factors: tuple[Array, Array]) -> None:
        recall(self.precision, cholesky=factors[0], inverse=factors[1])

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return structure.of_matrix(self.precision, like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        return jnp.sum(self.precision * other.covariance(), axis=(-2, -1))

    def to_natural_gradient(self, covector: tuple[Array, Array]) -> tuple[Array, Array]:
        mean = self._vector(self.mean)
        first, second = covector
        outer = first[..., :, None] * mean[..., None, :]
        centred = second - outer - jnp.swapaxes(outer, -1, -2)
        half = 0.5 * self.precision @ centred @ self.precision
        return _matvec(self.precision, first) - 2 * _matvec(half, mean), half

    def natural_step(self, step: Step) -> tuple[Array, Array]:
        """∇_μ E_q ℓ̄ = (g − Hm, ½H)  (`eq:ngrad_1_gauss`, `eq:ngrad_2_gauss`)."""
        first = self._vector(step.gradient) - _matvec(step.curvature, self._vector(self.mean))
        return first, 0.5 * step.curvature

    def derivatives(self, natural_gradient: tuple[Array, Array]) -> tuple[PyTree, Array]:
        first, second = natural_gradient
        curvature = second + jnp.swapaxes(second, -1, -2)
        return self._tree(first + _matvec(curvature, self._vector(self.mean))), curvature

    def moved(self, step: Step) -> Self:
        if step.reverse:
            return super().moved(step)
        dtype = self.precision.dtype
        rate, precision_rate = jnp.asarray(step.rate, dtype), jnp.asarray(step.precision_rate, dtype)
        change = precision_rate * (step.curvature - jnp.asarray(step.temperature, dtype) * self.precision)
        if step.momentum is not None:
            change = change + jnp.asarray(step.momentum, dtype) * (self.precision - step.previous.precision)
        precision = self.precision + change
        if step.retraction:
            half = linalg.solve_triangular(cholesky(self.precision), change, lower=True)
            precision = precision + step.curved(0.5 * jnp.swapaxes(half, -1, -2) @ half)
        natural_change = -rate * self._vector(step.gradient)
        if step.momentum is not None:
            momentum = jnp.asarray(step.momentum, dtype)
            previous = step.previous
            displacement = self._vector(self.mean) - self._vector(previous.mean)
            natural_change = natural_change + momentum * _matvec(previous.precision, displacement)
        mean = self._vector(self.mean) + _solve(cholesky(precision), natural_change)
        return eqx.tree_at(lambda q: (q.mean, q.precision), self, (self._tree(mean), precision))

    def with_scaled_precision(self, factor: Any) -> Self:
        precision = jnp.asarray(factor, self.precision.dtype) * self.precision
        return eqx.tree_at(lambda q: q.precision, self, precision)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g + ¼ tr[(S⁻¹(H − τS))²]."""
        # This uses the covariance, which a step computes anyway, and no further triangular solves. H − τS is formed
        # first: S⁻¹H − τI would have the rounding errors of S⁻¹ in it even where H and τS are equal.
        covariance, gradient = self.covariance(), self._vector(step.gradient)
        change = covariance @ (step.curvature - jnp.asarray(step.temperature, covariance.dtype) * self.precision)
        squares = jnp.sum(gradient * _matvec(covariance, gradient))
        return 0.5 * squares + 0.25 * jnp.sum(change * jnp.swapaxes(change, -1, -2))

    def precision_matrices(self) -> tuple[Float[Array, "... P P"], ...]:
        return (self.precision,)


def _covariance_change(shift: tuple[Array, Array], mean: Float[Array, "... P"]) -> Float[Array, "... P P"]:
    """The change of V that a displacement of μ = (m, V + mmᵀ) makes, to first order."""
    outer = shift[0][..., :, None] * mean[..., None, :]
    return 0.5 * (shift[1] + jnp.swapaxes(shift[1], -1, -2)) - outer - jnp.swapaxes(outer, -1, -2)


def _half_log_det(factor: Float[Array, "... P P"]) -> Float[Array, "..."]:
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), axis=-1)


def _matvec(matrix: Float[Array, "... P P"], vector: Float[Array, "... P"]) -> Float[Array, "... P"]:
    return jnp.einsum("...ij,...j->...i", matrix, vector)


def _solve(factor: Float[Array, "... P P"], vector: Float[Array, "... P"]) -> Float[Array, "... P"]:
    return linalg.cho_solve((factor, True), vector[..., None])[..., 0]
