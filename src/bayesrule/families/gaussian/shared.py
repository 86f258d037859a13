"""Rows that are Gaussian with one precision for all of them: the latent rows of PCA and factor analysis."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...numerics.coordinates import from_lower, to_vector
from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import floating
from ...steps.step import Step
from ..base import ExponentialFamily
from .full import Gaussian

Rows = Float[Array, "... N K"]
Matrix = Float[Array, "... K K"]
Pair = tuple[Rows, Matrix]


class SharedGaussian(ExponentialFamily):
    r"""Independent rows $θ_n ∼ N(m_n, S^{-1})$, n = 1, …, N, that share their precision S.

    $λ = (mS, −½S)$, $T = (θ, θ^⊤θ)$, $μ = (m, NS^{-1} + m^⊤m)$, $A(λ) = ½\sum_n m_n^⊤Sm_n − \tfrac N2 \log|S|$ with
    the θ_n and m_n as rows. Where all rows have the same posterior covariance, as in probabilistic PCA, this is exact,
    and one Cholesky factor serves all N.

    >>> import jax.numpy as jnp
    >>> q = SharedGaussian(jnp.array([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]]), 2.0)
    >>> q.expectation()[1].tolist(), round(float(q.entropy()), 4)
    ([[6.5, 2.0], [2.0, 11.5]], 6.4342)

    Args:
        mean: m, (N, K); axes before these are a batch.
        precision: S, (K, K) with the same batch axes in front, or a number for a multiple of the identity.
    """

    mean: Rows
    precision: Matrix
    label: ClassVar[str] = "Gaussian rows (one cov.)"
    meaning: ClassVar[str] = "q(θ) = Π_n N(θ_n | m_n, S⁻¹), λ = (mS, −½S)"
    update: ClassVar[str] = "S ← (1 − ρτ)S + ρH,  m ← m − ρ(G + mH)S⁻¹,  (G, ½H) = ∇_μ E_q ℓ̄"
    reparameterized: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    def __init__(self, mean: Rows, precision: Any = 1.0):
        mean, precision = floating(mean), floating(precision)
        if mean.ndim > 1 and precision.ndim == 0:
            size = mean.shape[-1]
            precision = jnp.broadcast_to(precision * jnp.eye(size, dtype=mean.dtype), (*mean.shape[:-2], size, size))
        if mean.ndim < 2 or precision.shape != (*mean.shape[:-2], mean.shape[-1], mean.shape[-1]):
            raise ValueError(
                f"A SharedGaussian has rows (…, N, K) and one precision (…, K, K) for all of them, got {mean.shape} "
                f"and {precision.shape}. Where every row has its own, use Gaussian."
            )
        self.mean, self.precision = mean, precision

    @property
    def count(self) -> int:
        """N, the number of rows."""
        return self.mean.shape[-2]

    @property
    def noise(self) -> Gaussian:
        """N(0, S⁻¹), the distribution of a row less its mean."""
        return _centred(self.precision)

    def covariance(self) -> Matrix:
        """S⁻¹, the covariance of one row."""
        return self.noise.covariance()

    def natural(self) -> Pair:
        return self.mean @ self.precision, -0.5 * self.precision

    @classmethod
    def from_natural(cls, natural: Pair) -> Self:
        precision = -natural[1] - natural[1].mT
        return cls(natural[0] @ _centred(precision).covariance(), precision)

    def expectation(self) -> Pair:
        return self.mean, self.count * self.covariance() + self.mean.mT @ self.mean

    @classmethod
    def from_expectation(cls, expectation: Pair) -> Self:
        mean, square = expectation
        return cls(mean, _centred((square - mean.mT @ mean) / mean.shape[-2]).covariance())  # C⁻¹, for precision C

    def with_expectation(self, expectation: Pair) -> Self:
        return self.from_expectation(expectation)

    def _covariance_shift(self, shift: Pair) -> Matrix:
        """The change of S⁻¹ when μ is displaced by `shift`, to first order."""
        half = 0.5 * shift[1] - shift[0].mT @ self.mean
        return (half + half.mT) / self.count

    def moments(self, shift: Pair) -> tuple[Rows, Float[Array, "... 1 K K"]]:
        """The mean and the rows' common covariance V with μ displaced by `shift`: N dV = dμ₂ − dμ₁ᵀm − mᵀdμ₁."""
        return self.mean + shift[0], (self.covariance() + self._covariance_shift(shift))[..., None, :, :]

    def shifted_in_mu(self, shift: Pair) -> Self:
        change = self.precision @ self._covariance_shift(shift) @ self.precision
        return type(self)(self.mean + shift[0], self.precision - change)

    def to_natural_gradient(self, covector: Pair) -> Pair:
        half = 0.5 * self.precision @ self._covariance_shift(covector) @ self.precision
        return covector[0] @ self.precision - 2 * self.mean @ half, half

    def mode(self) -> Rows:
        return self.mean

    # The distribution.

    def statistics(self, theta: Rows) -> Pair:
        return theta, theta.mT @ theta

    def log_partition(self, natural: Pair) -> Float[Array, "..."]:
        rows, noise = natural[0], _centred(-2 * natural[1])
        squares = jnp.sum(rows @ noise.covariance() * rows, axis=(-2, -1))
        return 0.5 * squares + rows.shape[-2] * noise.log_partition(noise.natural())

    def log_base(self, theta: Rows) -> float:
        return -0.5 * math.prod(self.mean.shape[-2:]) * math.log(2 * math.pi)

    def _squared(self, rows: Rows) -> Float[Array, "..."]:
        return jnp.sum(rows @ self.precision * rows, axis=(-2, -1))

    def log_prob(self, theta: Rows) -> Float[Array, "..."]:
        return self.count * self.noise.log_prob(self.noise.mean) - 0.5 * self._squared(theta - self.mean)

    def entropy(self) -> Float[Array, "..."]:
        return self.count * self.noise.entropy()

    def kl(self, other: Any) -> Float[Array, "..."]:
        if not isinstance(other, SharedGaussian):
            return super().kl(other)  # It raises the error for members of different families.
        return 0.5 * other._squared(self.mean - other.mean) + self.count * self.noise.kl(other.noise)

    def inside(self, natural: Pair | None = None) -> Bool[Array, "..."]:
        rows, precision = (self.mean, self.precision) if natural is None else (natural[0], -2 * natural[1])
        return _centred(precision).inside() & jnp.all(jnp.isfinite(rows), axis=(-2, -1))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Rows:
        noise = jax.random.normal(key, (*shape, *self.mean.shape), self.mean.dtype)
        return self.mean + noise @ jnp.linalg.cholesky(self.covariance()).mT

    # The rule.

    def _slopes(self, step: Step) -> Pair:
        """E_q∇ℓ̄ in every row, and E_q∇²ℓ̄ averaged over the rows."""
        first, second = step.gradient
        curvature = second + second.mT
        return first + _times(self.mean, curvature), curvature

    def moved(self, step: Step) -> Self:
        if step.reverse:
            return super().moved(step)
        slope, curvature = self._slopes(step)
        number = lambda x: jnp.asarray(x, slope.dtype)
        change = number(step.precision_rate) * (curvature - number(step.temperature) * self.precision)
        push = -number(step.rate) * slope
        if step.momentum is not None:
            momentum, before = number(step.momentum), step.previous
            change = change + momentum * (self.precision - before.precision)
            push = push + momentum * (self.mean - before.mean) @ before.precision
        precision = self.precision + change
        return type(self)(self.mean + _times(push, _centred(precision).covariance()), precision)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ Σ_n g_nᵀS⁻¹g_n + (N/4) tr[(S⁻¹(H − τS))²]."""
        (slope, curvature), covariance = self._slopes(step), self.covariance()
        # H − τS is formed first, so that the rounding errors of S⁻¹ do not count where H and τS are equal.
        change = covariance @ (curvature - jnp.asarray(step.temperature, covariance.dtype) * self.precision)
        return 0.5 * jnp.sum(_times(slope, covariance) * slope) + 0.25 * self.count * jnp.sum(change * change.mT)

    def precision_matrices(self) -> tuple[Matrix, ...]:
        return (self.precision,)

    # Coordinates: both parts of λ have two axes, and with `ranks` of (2, 2) both would be taken for symmetric matrices.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return 2, 2

    def _symmetric(self, tree: PyTree) -> PyTree:
        return tree[0], 0.5 * (tree[1] + tree[1].mT)

    def coordinates(self, natural: Pair) -> Float[Array, "... M"]:
        return jnp.concatenate([to_vector(natural[0], 2, False), to_vector(natural[1], 2, True)], axis=-1)

    def uncoordinates(self, vector: Float[Array, "... M"]) -> Pair:
        shape = self.mean.shape[-2:]
        rows, matrix = jnp.split(vector, [math.prod(shape)], axis=-1)
        return rows.reshape((*rows.shape[:-1], *shape)), from_lower(matrix, shape[-1])


def _centred(precision: Matrix) -> Gaussian:
    return Gaussian(jnp.zeros(precision.shape[:-1], precision.dtype), precision)


def _times(rows: Rows, matrix: Matrix) -> Rows:
    """rows @ matrix, for few columns as a sum of outer products: a tenth of the time of XLA's matrix product."""
    if matrix.shape[-1] > 8:
        return rows @ matrix
    parts = [rows[..., i : i + 1] * matrix[..., i : i + 1, :] for i in range(matrix.shape[-1])]
    return sum(parts[1:], start=parts[0])
