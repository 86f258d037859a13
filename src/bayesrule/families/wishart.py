"""Families over positive-definite matrices: Wishart, and the normal–Wishart of a mean and its precision."""

from __future__ import annotations

import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jax.scipy.special import multigammaln
from jaxtyping import Array, Bool, Float

from ..numerics.checks import above, arrays, bare
from ..numerics.random import Key
from ..numerics.special import digamma
from .base import ExponentialFamily

Matrix = Float[Array, "... D D"]


class Wishart(ExponentialFamily):
    r"""A positive-definite matrix Λ with $E Λ = n V$: the conjugate prior of a Gaussian's precision.

    $λ = (\tfrac12(n − D − 1), −\tfrac12 V^{−1})$, $T(Λ) = (\log|Λ|, Λ)$,
    $A(λ) = \log Γ_D(n/2) − \tfrac n2 \log|\tfrac12 V^{−1}|$,
    $μ = (ψ_D(n/2) + \log|2V|, nV)$.

    >>> import jax.numpy as jnp
    >>> q = Wishart(df=4.0, scale=0.5 * jnp.eye(2))
    >>> q.mean.tolist(), float(q.log_prob(jnp.eye(2)))
    ([[2.0, 0.0], [0.0, 2.0]], -2.4516)

    Args:
        df: n, the degrees of freedom, above D − 1 (scipy's `df`).
        scale: V, (D, D), positive definite (scipy's `scale`); axes in front are a batch, broadcast with those of `df`.
    """

    df: Float[Array, "..."]
    scale: Matrix
    label: ClassVar[str] = "Wishart"
    ranks: ClassVar[tuple[int, ...] | None] = (0, 2)
    reparameterized: ClassVar[bool] = True

    def __init__(self, df: Float[Array, "..."], scale: Matrix):
        self.df, self.scale = arrays(Wishart, (0, 2), df=df, scale=scale)
        above(Wishart, self.scale.shape[-1] - 1, df=self.df)

    @property
    def mean(self) -> Matrix:
        return self.df[..., None, None] * self.scale

    def natural(self) -> tuple[Array, Matrix]:
        return 0.5 * (self.df - self.scale.shape[-1] - 1), -0.5 * _inverse(self.scale)

    @classmethod
    def from_natural(cls, natural: tuple[Array, Matrix]) -> Self:
        log, linear = arrays(cls, cls.ranks, log=natural[0], linear=natural[1])
        return bare(cls, df=2 * log + linear.shape[-1] + 1, scale=_inverse(-2 * linear))

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, Matrix]) -> Self:
        """The member with this μ, by a convex solve."""
        log, linear = arrays(cls, cls.ranks, log=expectation[0], linear=expectation[1])
        size = linear.shape[-1]
        # The gap is D log(n/2) − ψ_D(n/2), which is about D(D+1)/2n for large n and has a pole at n = D − 1. The
        # solve starts from the n at which D(D+1)/2(n − D + 1), which has both properties, equals it.
        gap = log_det(linear) - log
        df = size - 1 + size * (size + 1) / (2 * gap)
        return bare(cls, df=df, scale=linear / df[..., None, None]).with_expectation((log, linear))

    def mode(self) -> Matrix:
        return (self.df - self.scale.shape[-1] - 1)[..., None, None] * self.scale

    def statistics(self, theta: Matrix) -> tuple[Array, Matrix]:
        theta = jnp.asarray(theta)
        return log_det(theta), theta

    def log_partition(self, natural: tuple[Array, Matrix]) -> Float[Array, "..."]:
        log, linear = natural
        size = linear.shape[-1]
        half = log + 0.5 * (size + 1)
        return multigammaln(half, size) - half * log_det(-linear)

    def expectation(self) -> tuple[Array, Matrix]:
        size = self.scale.shape[-1]
        halves = 0.5 * jnp.arange(size, dtype=self.df.dtype)
        log = digamma(0.5 * self.df[..., None] - halves).sum(-1) + size * math.log(2) + log_det(self.scale)
        return log, self.mean

    def inside(self, natural: tuple[Array, Matrix] | None = None) -> Bool[Array, "..."]:
        log, linear = self.natural() if natural is None else natural
        return (log > -1) & jnp.isfinite(self.log_partition((log, linear)))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Matrix:
        # Bartlett's decomposition: Λ = (LA)(LA)ᵀ with V = LLᵀ and A lower triangular, with independent χ variables on
        # the diagonal and standard normal ones below it.
        size, dtype = self.scale.shape[-1], self.df.dtype
        first, second = jax.random.split(key)
        half = 0.5 * (self.df[..., None] - jnp.arange(size, dtype=dtype))
        diagonal = jnp.sqrt(2 * jax.random.gamma(first, half, (*shape, *half.shape), dtype=dtype))
        normals = jax.random.normal(second, (*shape, *self.scale.shape), dtype)
        factor = jnp.tril(normals, -1) + diagonal[..., None] * jnp.eye(size, dtype=dtype)
        root = jnp.linalg.cholesky(self.scale) @ factor
        return root @ jnp.swapaxes(root, -1, -2)


class NormalWishart(ExponentialFamily):
    r"""The mean x and the precision Λ of a Gaussian: $Λ ∼ \mathrm{Wishart}(n, V)$, $x \mid Λ ∼ N(m, (κΛ)^{−1})$.

    It is the conjugate prior of both together. θ is `{"mean": x, "precision": Λ}`.
    $λ = (\tfrac12(n − D), −\tfrac12(V^{−1} + κmm^⊤), κm, −\tfrac12κ)$,
    $T(θ) = (\log|Λ|, Λ, Λx, x^⊤Λx)$, $\log h = −\tfrac D2\log 2π$,
    $A(λ) = \log Γ_D(n/2) − \tfrac n2 \log|\tfrac12 V^{−1}| − \tfrac D2 \log κ$,
    $μ = (ψ_D(n/2) + \log|2V|, nV, nVm, D/κ + n m^⊤Vm)$.

    >>> import jax.numpy as jnp
    >>> q = NormalWishart(mean=jnp.ones(2), count=4.0, df=3.0, scale=jnp.eye(2))
    >>> q.expectation()[2].tolist(), float(q.expectation()[3])
    ([3.0, 3.0], 6.5)

    Args:
        mean: m, (D,); axes in front are a batch, and those of all four arguments are broadcast.
        count: κ, above 0: the prior on x counts as so many observations.
        df: n, the degrees of freedom, above D − 1.
        scale: V, (D, D), positive definite.
    """

    mean: Float[Array, "... D"]
    count: Float[Array, "..."]
    df: Float[Array, "..."]
    scale: Matrix
    label: ClassVar[str] = "Normal–Wishart"
    ranks: ClassVar[tuple[int, ...] | None] = (0, 2, 1, 0)
    reparameterized: ClassVar[bool] = True

    def __init__(self, mean: Float[Array, "... D"], count: Float[Array, "..."], df: Float[Array, "..."], scale: Matrix):
        self.mean, self.count, self.df, self.scale = arrays(
            NormalWishart, (1, 0, 0, 2), mean=mean, count=count, df=df, scale=scale
        )
        size = self.scale.shape[-1]
        if self.mean.shape[-1] != size:
            raise ValueError(
                f"NormalWishart's mean has {self.mean.shape[-1]} entries and its scale is {size}×{size}: "
                "give both for the same number of dimensions."
            )
        above(NormalWishart, 0, count=self.count)
        above(NormalWishart, size - 1, df=self.df)

    @property
    def precision(self) -> Wishart:
        """The marginal of Λ."""
        return bare(Wishart, df=self.df, scale=self.scale)

    def natural(self) -> tuple[Array, ...]:
        log, linear = self.precision.natural()
        cross = self.count[..., None] * self.mean
        return log + 0.5, linear - 0.5 * _outer(cross, self.mean), cross, -0.5 * self.count

    @classmethod
    def from_natural(cls, natural: tuple[Array, ...]) -> Self:
        names = ("log", "linear", "cross", "square")
        log, linear, cross, square = arrays(cls, cls.ranks, **dict(zip(names, natural, strict=True)))
        mean = -0.5 * cross / square[..., None]
        precision = Wishart.from_natural((log - 0.5, linear + 0.5 * _outer(cross, mean)))
        return bare(cls, mean=mean, count=-2 * square, df=precision.df, scale=precision.scale)

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, ...]) -> Self:
        """The member with this μ: the marginal of Λ by its own solve, the rest in closed form."""
        names = ("log", "linear", "cross", "square")
        log, linear, cross, square = arrays(cls, cls.ranks, **dict(zip(names, expectation, strict=True)))
        precision = Wishart.from_expectation((log, linear))
        mean = jnp.linalg.solve(linear, cross[..., None])[..., 0]
        count = mean.shape[-1] / (square - jnp.sum(mean * cross, axis=-1))
        return bare(cls, mean=mean, count=count, df=precision.df, scale=precision.scale)

    def with_expectation(self, expectation: tuple[Array, ...]) -> Self:
        return self.from_expectation(expectation)

    def mode(self) -> dict[str, Array]:
        size = self.mean.shape[-1]
        return {"mean": self.mean, "precision": (self.df - size)[..., None, None] * self.scale}

    def statistics(self, theta: dict[str, Array]) -> tuple[Array, ...]:
        x, precision = jnp.asarray(theta["mean"]), jnp.asarray(theta["precision"])
        cross = jnp.sum(precision * x[..., None, :], axis=-1)
        return log_det(precision), precision, cross, jnp.sum(x * cross, axis=-1)

    def log_partition(self, natural: tuple[Array, ...]) -> Float[Array, "..."]:
        log, linear, cross, square = natural
        size = cross.shape[-1]
        half = log + 0.5 * size
        matrix = -linear + 0.25 * _outer(cross, cross) / square[..., None, None]  # ½V⁻¹
        return multigammaln(half, size) - half * log_det(matrix) - 0.5 * size * jnp.log(-2 * square)

    def log_base(self, theta: dict[str, Array]) -> float:
        return -0.5 * self.mean.shape[-1] * math.log(2 * math.pi)

    def expectation(self) -> tuple[Array, ...]:
        log, linear = self.precision.expectation()
        cross = jnp.sum(linear * self.mean[..., None, :], axis=-1)
        square = self.mean.shape[-1] / self.count + jnp.sum(self.mean * cross, axis=-1)
        return log, linear, cross, square

    def inside(self, natural: tuple[Array, ...] | None = None) -> Bool[Array, "..."]:
        natural = self.natural() if natural is None else natural
        return (natural[0] > -0.5) & (natural[3] < 0) & jnp.isfinite(self.log_partition(natural))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> dict[str, Array]:
        first, second = jax.random.split(key)
        precision = self.precision.sample(first, shape)
        noise = jax.random.normal(second, precision.shape[:-1], precision.dtype)[..., None]
        upper = jnp.swapaxes(jnp.linalg.cholesky(precision), -1, -2)
        deviation = jax.scipy.linalg.solve_triangular(upper, noise)[..., 0]
        return {"mean": self.mean + deviation / jnp.sqrt(self.count)[..., None], "precision": precision}


def log_det(matrix: Matrix) -> Float[Array, "..."]:
    """log|M| of a positive-definite M, NaN otherwise."""
    diagonal = jnp.diagonal(jnp.linalg.cholesky(matrix), axis1=-2, axis2=-1)
    return 2 * jnp.sum(jnp.log(diagonal), axis=-1)


def _inverse(matrix: Matrix) -> Matrix:
    """M⁻¹ of a positive-definite M, exactly symmetric; NaN otherwise."""
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    inverse = cho_solve((jnp.linalg.cholesky(matrix), True), identity)
    return 0.5 * (inverse + jnp.swapaxes(inverse, -1, -2))


def _outer(left: Float[Array, "... D"], right: Float[Array, "... D"]) -> Matrix:
    return left[..., :, None] * right[..., None, :]
