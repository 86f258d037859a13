"""Means with a precision in common: a matrix for all vectors (tied), or a number for all entries (spherical).

λ and μ have the form of the family in which every mean has a precision of its own, so that the same factors take both:
a factor reads (E log|Λ|, E Λ, E Λx_k, E x_kᵀΛx_k) for each k and sends a message to each. E log|Λ| and E Λ are the same
for all k, and only the sum over k of their messages matters. So these families are not minimal: A is constant along
directions of λ that move weight from one k to another, and the Fisher information is singular there. Steps in λ, all
densities and bounds are those of the distribution; `fisher` and `to_natural_gradient` are not to be used.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, multigammaln
from jaxtyping import Array, Bool, Float

from ..numerics.checks import above, arrays, bare
from ..numerics.random import Key
from .base import ExponentialFamily
from .gamma import Gamma, NormalGamma
from .wishart import NormalWishart, Wishart, log_det


class TiedNormalWishart(ExponentialFamily):
    r"""K means and one precision: $Λ ∼ \mathrm{Wishart}(n, V)$, $x_k \mid Λ ∼ N(m_k, (κ_kΛ)^{−1})$ independently.

    θ is `{"mean": x, "precision": Λ}`, Λ repeated for each k. $T(θ) = (\log|Λ|, Λ, Λx_k, x_k^⊤Λx_k)$ for each k, and
    with $λ = (a_k, B_k, c_k, d_k)$: $κ_k = −2d_k$, $m_k = c_k/κ_k$, $n = 2\sum_ka_k + D + 1 − K$,
    $V^{−1} = −2\sum_kB_k − \sum_kκ_km_km_k^⊤$,
    $A(λ) = \log Γ_D(n/2) − \tfrac n2 \log|\tfrac12 V^{−1}| − \tfrac D2\sum_k\log κ_k$, $\log h = −\tfrac{KD}2\log 2π$.

    >>> import jax.numpy as jnp
    >>> q = TiedNormalWishart(mean=jnp.array([[0.0], [5.0]]), count=jnp.array([1.0, 2.0]), df=3.0, scale=jnp.eye(1))
    >>> q.expectation()[1].ravel().tolist(), q.expectation()[3].tolist()
    ([3.0, 3.0], [1.0, 75.5])

    Args:
        mean: m, (K, D).
        count: κ, (K,), above 0.
        df: n, the degrees of freedom, above D − 1.
        scale: V, (D, D), positive definite.
    """

    mean: Float[Array, "K D"]
    count: Float[Array, " K"]
    df: Float[Array, ""]
    scale: Float[Array, "D D"]
    label: ClassVar[str] = "Tied normal–Wishart"
    unbatchable: ClassVar[bool] = True
    reparameterized: ClassVar[bool] = True

    def __init__(self, mean: Any, count: Any, df: Any, scale: Any):
        self.mean, self.count = arrays(TiedNormalWishart, (1, 0), mean=mean, count=count)
        self.df, self.scale = arrays(TiedNormalWishart, (0, 2), df=df, scale=scale)
        above(TiedNormalWishart, 0, count=self.count)
        above(TiedNormalWishart, self.scale.shape[-1] - 1, df=self.df)

    @property
    def precision(self) -> Wishart:
        """The marginal of Λ."""
        return bare(Wishart, df=self.df, scale=self.scale)

    def marginals(self) -> NormalWishart:
        """The marginals of (x_k, Λ), a plate for each k."""
        count = len(self.count)
        df, scale = jnp.broadcast_to(self.df, (count,)), jnp.broadcast_to(self.scale, (count, *self.scale.shape))
        return bare(NormalWishart, mean=self.mean, count=self.count, df=df, scale=scale)

    def natural(self) -> tuple[Array, ...]:
        log, linear = self.precision.natural()
        plates = len(self.count)
        cross = self.count[:, None] * self.mean
        repeated = lambda x: jnp.broadcast_to(x / plates, (plates, *x.shape))
        squares = cross[:, :, None] * self.mean[:, None, :]
        return repeated(log + 0.5 * plates), repeated(linear) - 0.5 * squares, cross, -0.5 * self.count

    @classmethod
    def from_natural(cls, natural: tuple[Array, ...]) -> Self:
        log, linear, cross, square = map(jnp.asarray, natural)
        mean = -0.5 * cross / square[:, None]
        total = jnp.sum(linear, axis=0) + 0.5 * cross.T @ mean
        precision = Wishart.from_natural((jnp.sum(log) - 0.5 * len(log), total))
        return bare(cls, mean=mean, count=-2 * square, df=precision.df, scale=precision.scale)

    def mode(self) -> dict[str, Array]:
        size, plates = self.mean.shape[-1], len(self.count)
        precision = (self.df - size - 1 + plates) * self.scale
        return {"mean": self.mean, "precision": jnp.broadcast_to(precision, (plates, size, size))}

    def statistics(self, theta: dict[str, Array]) -> tuple[Array, ...]:
        return self.marginals().statistics(theta)

    def log_partition(self, natural: tuple[Array, ...]) -> Float[Array, ""]:
        log, linear, cross, square = natural
        plates, size = cross.shape
        half = jnp.sum(log) + 0.5 * (size + 1 - plates)
        matrix = -jnp.sum(linear, axis=0) + 0.25 * (cross / square[:, None]).T @ cross  # ½V⁻¹
        counts = jnp.sum(jnp.log(-2 * square))
        return multigammaln(half, size) - half * log_det(matrix) - 0.5 * size * counts

    def log_base(self, theta: dict[str, Array]) -> float:
        return -0.5 * self.mean.size * math.log(2 * math.pi)

    def expectation(self) -> tuple[Array, ...]:
        return self.marginals().expectation()

    def inside(self, natural: tuple[Array, ...] | None = None) -> Bool[Array, ""]:
        natural = self.natural() if natural is None else natural
        return jnp.all(natural[3] < 0) & (jnp.sum(natural[0]) > 0) & jnp.isfinite(self.log_partition(natural))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> dict[str, Array]:
        first, second = jax.random.split(key)
        precision = self.precision.sample(first, shape)
        noise = jax.random.normal(second, (*shape, *self.mean.shape), self.mean.dtype)
        root = jnp.linalg.cholesky(precision)
        # x_k − m_k = L⁻ᵀε_k/√κ_k with Λ = LLᵀ.
        deviation = jax.lax.linalg.triangular_solve(root, noise, left_side=False, lower=True)
        mean = self.mean + deviation / jnp.sqrt(self.count)[:, None]
        repeated = jnp.broadcast_to(precision[..., None, :, :], (*mean.shape, mean.shape[-1]))
        return {"mean": mean, "precision": repeated}


class SphericalNormalGamma(ExponentialFamily):
    r"""A vector of means and one precision: $t ∼ \mathrm{Gamma}(a, b)$, $x_d \mid t ∼ N(m_d, 1/(κ_dt))$ independently.

    θ is `{"mean": x, "precision": t}`, t repeated for each d. $T(θ) = (\log t, t, tx_d, tx_d^2)$ for each d, and with
    $λ = (α_d, β_d, c_d, e_d)$: $κ_d = −2e_d$, $m_d = c_d/κ_d$, $a = \sum_dα_d + 1 − D/2$,
    $b = −\sum_dβ_d − \tfrac12\sum_dκ_dm_d^2$, $A(λ) = \log Γ(a) − a\log b − \tfrac12\sum_d\log κ_d$,
    $\log h = −\tfrac D2\log 2π$.

    >>> import jax.numpy as jnp
    >>> q = SphericalNormalGamma(mean=jnp.array([0.0, 2.0]), count=jnp.ones(2), shape=3.0, rate=1.5)
    >>> q.expectation()[1].tolist(), q.expectation()[3].tolist()
    ([2.0, 2.0], [1.0, 9.0])

    Args:
        mean: m, (D,); leading axes of all four are a batch and broadcast.
        count: κ, (D,), above 0.
        shape: a, above 0.
        rate: b, above 0.
    """

    mean: Float[Array, "... D"]
    count: Float[Array, "... D"]
    shape: Float[Array, "..."]
    rate: Float[Array, "..."]
    label: ClassVar[str] = "Spherical normal–gamma"
    ranks: ClassVar[tuple[int, ...] | None] = (1, 1, 1, 1)
    reparameterized: ClassVar[bool] = True

    def __init__(self, mean: Any, count: Any, shape: Any, rate: Any):
        self.mean, self.count, self.shape, self.rate = arrays(
            SphericalNormalGamma, (1, 1, 0, 0), mean=mean, count=count, shape=shape, rate=rate
        )
        above(SphericalNormalGamma, 0, count=self.count, shape=self.shape, rate=self.rate)

    @property
    def precision(self) -> Gamma:
        """The marginal of t."""
        return bare(Gamma, shape=self.shape, rate=self.rate)

    def marginals(self) -> NormalGamma:
        """The marginals of (x_d, t), a member for each d."""
        repeated = lambda x: jnp.broadcast_to(x[..., None], self.mean.shape)
        shape, rate = repeated(self.shape), repeated(self.rate)
        return bare(NormalGamma, mean=self.mean, count=self.count, shape=shape, rate=rate)

    def natural(self) -> tuple[Array, ...]:
        size = self.mean.shape[-1]
        repeated = lambda x: jnp.broadcast_to(x[..., None] / size, self.mean.shape)
        cross = self.count * self.mean
        log = repeated(self.shape - 1 + 0.5 * size)
        return log, -repeated(self.rate) - 0.5 * cross * self.mean, cross, -0.5 * self.count

    @classmethod
    def from_natural(cls, natural: tuple[Array, ...]) -> Self:
        log, linear, cross, square = map(jnp.asarray, natural)
        mean = -0.5 * cross / square
        shape = jnp.sum(log, axis=-1) + 1 - 0.5 * mean.shape[-1]
        rate = -jnp.sum(linear + 0.5 * cross * mean, axis=-1)
        return bare(cls, mean=mean, count=-2 * square, shape=shape, rate=rate)

    def mode(self) -> dict[str, Array]:
        precision = (self.shape - 1 + 0.5 * self.mean.shape[-1]) / self.rate
        return {"mean": self.mean, "precision": jnp.broadcast_to(precision[..., None], self.mean.shape)}

    def statistics(self, theta: dict[str, Array]) -> tuple[Array, ...]:
        return self.marginals().statistics(theta)

    def log_partition(self, natural: tuple[Array, ...]) -> Float[Array, "..."]:
        log, linear, cross, square = natural
        shape = jnp.sum(log, axis=-1) + 1 - 0.5 * cross.shape[-1]
        rate = jnp.sum(-linear + 0.25 * cross**2 / square, axis=-1)
        return gammaln(shape) - shape * jnp.log(rate) - 0.5 * jnp.sum(jnp.log(-2 * square), axis=-1)

    def log_base(self, theta: dict[str, Array]) -> float:
        return -0.5 * self.mean.shape[-1] * math.log(2 * math.pi)

    def expectation(self) -> tuple[Array, ...]:
        return self.marginals().expectation()

    def inside(self, natural: tuple[Array, ...] | None = None) -> Bool[Array, "..."]:
        natural = self.natural() if natural is None else natural
        positive = jnp.all(natural[3] < 0, axis=-1) & (jnp.sum(natural[0], axis=-1) > 0)
        return positive & jnp.isfinite(self.log_partition(natural))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> dict[str, Array]:
        first, second = jax.random.split(key)
        t = jnp.broadcast_to(self.precision.sample(first, shape)[..., None], (*shape, *self.mean.shape))
        noise = jax.random.normal(second, t.shape, t.dtype)
        return {"mean": self.mean + noise / jnp.sqrt(self.count * t), "precision": t}
