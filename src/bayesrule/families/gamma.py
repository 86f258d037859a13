"""Families over positive numbers: gamma, and the normal–gamma of a mean and its precision."""

from __future__ import annotations

import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float

from ..numerics.checks import above, arrays, bare
from ..numerics.random import Key
from ..numerics.special import digamma
from .base import ExponentialFamily


class Gamma(ExponentialFamily):
    r"""A positive θ.

    $λ = (\mathrm{shape} − 1, −\mathrm{rate})$, $T(θ) = (\log θ, θ)$,
    $A(λ) = \log Γ(\mathrm{shape}) − \mathrm{shape} \log \mathrm{rate}$,
    $μ = (ψ(\mathrm{shape}) − \log \mathrm{rate}, \mathrm{shape}/\mathrm{rate})$.

    >>> q = Gamma(shape=2.0, rate=4.0)
    >>> float(q.mean), float(q.log_prob(0.5))
    (0.5, 0.0794)

    Args:
        shape: a, above 0; leading axes are a batch, broadcast with those of `rate`.
        rate: b, above 0.
    """

    shape: Float[Array, "..."]
    rate: Float[Array, "..."]
    label: ClassVar[str] = "Gamma"
    ranks: ClassVar[tuple[int, ...] | None] = (0, 0)
    reparameterized: ClassVar[bool] = True

    def __init__(self, shape: Float[Array, "..."], rate: Float[Array, "..."]):
        self.shape, self.rate = arrays(Gamma, (0, 0), shape=shape, rate=rate)
        above(Gamma, 0, shape=self.shape, rate=self.rate)

    @property
    def mean(self) -> Float[Array, "..."]:
        return self.shape / self.rate

    def natural(self) -> tuple[Array, Array]:
        return self.shape - 1, -self.rate

    @classmethod
    def from_natural(cls, natural: tuple[Array, Array]) -> Self:
        log, linear = arrays(cls, (0, 0), log=natural[0], linear=natural[1])
        return bare(cls, shape=log + 1, rate=-linear)

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, Array]) -> Self:
        """The member with this μ, by a convex solve."""
        log, linear = arrays(cls, (0, 0), log=expectation[0], linear=expectation[1])
        gap = jnp.log(linear) - log  # log(shape) − ψ(shape): the start is Minka's (2002)
        shape = (3 - gap + jnp.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
        return bare(cls, shape=shape, rate=shape / linear).with_expectation((log, linear))

    def mode(self) -> Float[Array, "..."]:
        log, linear = self.natural()
        return -log / linear

    def statistics(self, theta: Float[Array, "..."]) -> tuple[Array, Array]:
        theta = jnp.asarray(theta)
        # EM puts the rate of counts that are all 0 at 0, where the derivative is set to 0 so that it stays there.
        positive = theta > 0
        return jnp.where(positive, jnp.log(jnp.where(positive, theta, 1.0)), -jnp.inf), theta

    def log_partition(self, natural: tuple[Array, Array]) -> Float[Array, "..."]:
        shape = natural[0] + 1
        return gammaln(shape) - shape * jnp.log(-natural[1])

    def expectation(self) -> tuple[Array, Array]:
        return digamma(self.shape) - jnp.log(self.rate), self.mean

    def inside(self, natural: tuple[Array, Array] | None = None) -> Bool[Array, "..."]:
        log, linear = self.natural() if natural is None else natural
        return (log > -1) & (linear < 0) & jnp.isfinite(log + linear)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        full = (*shape, *self.shape.shape)
        return jax.random.gamma(key, self.shape, full, dtype=self.shape.dtype) / self.rate


class NormalGamma(ExponentialFamily):
    r"""A mean x and its precision t: $t ∼ \mathrm{Gamma}(a, b)$, $x \mid t ∼ N(m, 1/(κt))$.

    θ is `{"mean": x, "precision": t}`; m, κ, a, b are `mean`, `count`, `shape`, `rate`.
    $λ = (a − \tfrac12, −b − \tfrac12κm^2, κm, −\tfrac12κ)$, $T(θ) = (\log t, t, tx, tx^2)$,
    $A(λ) = \log Γ(a) − a \log b − \tfrac12 \log κ$, $\log h = −\tfrac12\log 2π$,
    $μ = (ψ(a) − \log b, a/b, ma/b, 1/κ + m^2a/b)$.

    >>> q = NormalGamma(mean=1.0, count=2.0, shape=3.0, rate=4.0)
    >>> [float(x) for x in q.expectation()]
    [-0.4635, 0.75, 0.75, 1.25]

    Args:
        mean: m; leading axes of all four are a batch and broadcast.
        count: κ, above 0: how many observations the knowledge of the mean is worth.
        shape: a, above 0.
        rate: b, above 0.
    """

    mean: Float[Array, "..."]
    count: Float[Array, "..."]
    shape: Float[Array, "..."]
    rate: Float[Array, "..."]
    label: ClassVar[str] = "Normal–gamma"
    ranks: ClassVar[tuple[int, ...] | None] = (0, 0, 0, 0)
    reparameterized: ClassVar[bool] = True

    def __init__(
        self,
        mean: Float[Array, "..."],
        count: Float[Array, "..."],
        shape: Float[Array, "..."],
        rate: Float[Array, "..."],
    ):
        self.mean, self.count, self.shape, self.rate = arrays(
            NormalGamma, (0, 0, 0, 0), mean=mean, count=count, shape=shape, rate=rate
        )
        above(NormalGamma, 0, count=self.count, shape=self.shape, rate=self.rate)

    @property
    def precision(self) -> Gamma:
        """The marginal of t."""
        return bare(Gamma, shape=self.shape, rate=self.rate)

    def natural(self) -> tuple[Array, ...]:
        linear = -self.rate - 0.5 * self.count * self.mean**2
        return self.shape - 0.5, linear, self.count * self.mean, -0.5 * self.count

    @classmethod
    def from_natural(cls, natural: tuple[Array, ...]) -> Self:
        names = ("log", "linear", "cross", "square")
        log, linear, cross, square = arrays(cls, cls.ranks, **dict(zip(names, natural, strict=True)))
        mean = -0.5 * cross / square
        return bare(cls, mean=mean, count=-2 * square, shape=log + 0.5, rate=-linear - 0.5 * cross * mean)

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, ...]) -> Self:
        """The member with this μ: the marginal of t by its own solve, the rest in closed form."""
        names = ("log", "linear", "cross", "square")
        log, linear, cross, square = arrays(cls, cls.ranks, **dict(zip(names, expectation, strict=True)))
        precision, mean = Gamma.from_expectation((log, linear)), cross / linear
        return bare(cls, mean=mean, count=1 / (square - mean * cross), shape=precision.shape, rate=precision.rate)

    def with_expectation(self, expectation: tuple[Array, ...]) -> Self:
        return self.from_expectation(expectation)

    def mode(self) -> dict[str, Array]:
        return {"mean": self.mean, "precision": (self.shape - 0.5) / self.rate}

    def statistics(self, theta: dict[str, Array]) -> tuple[Array, ...]:
        x, t = jnp.asarray(theta["mean"]), jnp.asarray(theta["precision"])
        return jnp.log(t), t, t * x, t * x**2

    def log_partition(self, natural: tuple[Array, ...]) -> Float[Array, "..."]:
        log, linear, cross, square = natural
        shape, rate = log + 0.5, -linear + 0.25 * cross**2 / square
        return gammaln(shape) - shape * jnp.log(rate) - 0.5 * jnp.log(-2 * square)

    def log_base(self, theta: dict[str, Array]) -> float:
        return -0.5 * math.log(2 * math.pi)

    def expectation(self) -> tuple[Array, ...]:
        log, linear = self.precision.expectation()
        return log, linear, self.mean * linear, 1 / self.count + self.mean**2 * linear

    def inside(self, natural: tuple[Array, ...] | None = None) -> Bool[Array, "..."]:
        natural = self.natural() if natural is None else natural
        return (natural[0] > -0.5) & (natural[3] < 0) & jnp.isfinite(self.log_partition(natural))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> dict[str, Array]:
        first, second = jax.random.split(key)
        t = self.precision.sample(first, shape)
        noise = jax.random.normal(second, t.shape, t.dtype)
        return {"mean": self.mean + noise / jnp.sqrt(self.count * t), "precision": t}
