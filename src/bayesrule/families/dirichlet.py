"""Families over probabilities: Dirichlet on the simplex, beta on the unit interval."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betaln, gammaln, polygamma
from jaxtyping import Array, Bool, Float

from ..numerics.checks import above, arrays, bare
from ..numerics.random import Key
from ..numerics.special import digamma
from .base import ExponentialFamily


class Dirichlet(ExponentialFamily):
    r"""Probabilities θ of K categories: the conjugate prior of a categorical distribution.

    $λ = α − 1$, $T(θ) = \log θ$, $A(λ) = \sum_k \log Γ(α_k) − \log Γ(\sum_k α_k)$,
    $μ_k = ψ(α_k) − ψ(\sum_j α_j)$, with α the concentration.

    >>> import jax.numpy as jnp
    >>> q = Dirichlet([1.0, 2.0, 1.0])
    >>> q.mean.tolist()
    [0.25, 0.5, 0.25]
    >>> float(q.log_prob(jnp.array([0.2, 0.5, 0.3])))
    1.0986

    Args:
        concentration: α, (K,), all above 0; axes in front are a batch.
    """

    concentration: Float[Array, "... K"]
    label: ClassVar[str] = "Dirichlet"
    ranks: ClassVar[tuple[int, ...] | None] = (1,)
    reparameterized: ClassVar[bool] = True

    def __init__(self, concentration: Float[Array, "... K"]):
        (self.concentration,) = arrays(Dirichlet, (1,), concentration=concentration)
        above(Dirichlet, 0, concentration=self.concentration)

    @property
    def mean(self) -> Float[Array, "... K"]:
        return self.concentration / self.concentration.sum(-1, keepdims=True)

    def natural(self) -> Float[Array, "... K"]:
        return self.concentration - 1

    @classmethod
    def from_natural(cls, natural: Float[Array, "... K"]) -> Self:
        (natural,) = arrays(cls, (1,), natural=natural)
        return bare(cls, concentration=natural + 1)

    @classmethod
    def from_expectation(cls, expectation: Float[Array, "... K"]) -> Self:
        """The member with this μ, by a convex solve."""
        (expectation,) = arrays(cls, (1,), expectation=expectation)
        # The start of the solve: for large α, 1 − Σ exp μ_k ≈ (K − 1) / 2Σα gives Σα, and then α_k = ψ⁻¹(μ_k + ψ(Σα)).
        rest = -jnp.expm1(jax.nn.logsumexp(expectation, axis=-1, keepdims=True))
        total = (expectation.shape[-1] - 1) / (2 * rest)
        start = bare(cls, concentration=_inverse_digamma(expectation + digamma(total)))
        return start.with_expectation(expectation)

    def mode(self) -> Float[Array, "... K"]:
        """λ/Σλ. Where λ = 0, as before any observation, all θ have the same density, and the mode is 1/K by choice."""
        natural, flat = self.natural(), self.flat[..., None]
        where: Any = np.where if isinstance(natural, np.ndarray) else jnp.where  # NumPy compiles no program.
        total = where(flat, 1.0, natural.sum(-1, keepdims=True))
        return where(flat, 1 / natural.shape[-1], natural / total)

    @property
    def flat(self) -> Bool[Array, "..."]:
        """Whether λ = 0: every θ has the same density."""
        return (self.natural() == 0).all(-1)

    def inner(self, natural: Float[Array, "... K"], statistics: Float[Array, "... K"]) -> Float[Array, "..."]:
        return jnp.sum(jnp.where(natural == 0, 0.0, natural * statistics), axis=-1)  # so that 0 log 0 is 0

    def statistics(self, theta: Float[Array, "... K"]) -> Float[Array, "... K"]:
        theta = jnp.asarray(theta)
        # EM sets the probability of a category that never occurred to 0. The derivative there is defined as 0, so that
        # the probability stays at 0.
        positive = theta > 0
        return jnp.asarray(jnp.where(positive, jnp.log(jnp.where(positive, theta, 1.0)), -jnp.inf))

    def log_partition(self, natural: Float[Array, "... K"]) -> Float[Array, "..."]:
        concentration = natural + 1
        return gammaln(concentration).sum(-1) - gammaln(concentration.sum(-1))

    def expectation(self) -> Float[Array, "... K"]:
        return digamma(self.concentration) - digamma(self.concentration.sum(-1, keepdims=True))

    def to_natural_gradient(self, covector: Float[Array, "... K"]) -> Float[Array, "... K"]:
        # F = diag(ψ'(α)) − ψ'(Σα) 11ᵀ is inverted by the formula of Sherman and Morrison.
        inverse = 1 / polygamma(1, self.concentration)
        shared = polygamma(1, self.concentration.sum(-1, keepdims=True))
        common = (inverse * covector).sum(-1, keepdims=True) / (1 / shared - inverse.sum(-1, keepdims=True))
        return inverse * (covector + common)

    def inside(self, natural: Float[Array, "... K"] | None = None) -> Bool[Array, "..."]:
        natural = self.natural() if natural is None else natural
        return jnp.all((natural > -1) & jnp.isfinite(natural), axis=-1)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "... K"]:
        alpha = self.concentration
        return jax.random.dirichlet(key, alpha, (*shape, *alpha.shape[:-1]), dtype=alpha.dtype)


class Beta(ExponentialFamily):
    r"""A probability θ ∈ (0, 1): the conjugate prior of a Bernoulli distribution.

    $λ = (a − 1, b − 1)$, $T(θ) = (\log θ, \log(1−θ))$, $A(λ) = \log B(a, b)$,
    $μ = (ψ(a) − ψ(a+b), ψ(b) − ψ(a+b))$.

    >>> q = Beta(a=2.0, b=3.0)
    >>> float(q.mean), float(q.log_prob(0.5))
    (0.4, 0.4055)

    Args:
        a: above 0; axes are a batch, broadcast with those of `b`.
        b: above 0.
    """

    a: Float[Array, "..."]
    b: Float[Array, "..."]
    label: ClassVar[str] = "Beta"
    ranks: ClassVar[tuple[int, ...] | None] = (0, 0)
    reparameterized: ClassVar[bool] = True

    def __init__(self, a: Float[Array, "..."], b: Float[Array, "..."]):
        self.a, self.b = arrays(Beta, (0, 0), a=a, b=b)
        above(Beta, 0, a=self.a, b=self.b)

    @property
    def mean(self) -> Float[Array, "..."]:
        return self.a / (self.a + self.b)

    def natural(self) -> tuple[Array, Array]:
        return self.a - 1, self.b - 1

    @classmethod
    def from_natural(cls, natural: tuple[Array, Array]) -> Self:
        left, right = arrays(cls, (0, 0), left=natural[0], right=natural[1])
        return bare(cls, a=left + 1, b=right + 1)

    @classmethod
    def from_expectation(cls, expectation: tuple[Array, Array]) -> Self:
        """The member with this μ, by a convex solve."""
        pair = jnp.stack(jnp.broadcast_arrays(*expectation), axis=-1)
        concentration = Dirichlet.from_expectation(pair).concentration
        return bare(cls, a=concentration[..., 0], b=concentration[..., 1])

    def with_expectation(self, expectation: tuple[Array, Array]) -> Self:
        return self.from_expectation(expectation)

    def mode(self) -> Float[Array, "..."]:
        left, right = self.natural()
        return left / (left + right)

    def statistics(self, theta: Float[Array, "..."]) -> tuple[Array, Array]:
        return jnp.log(theta), jnp.log1p(-theta)

    def log_partition(self, natural: tuple[Array, Array]) -> Float[Array, "..."]:
        return betaln(natural[0] + 1, natural[1] + 1)

    def expectation(self) -> tuple[Array, Array]:
        both = digamma(self.a + self.b)
        return digamma(self.a) - both, digamma(self.b) - both

    def inside(self, natural: tuple[Array, Array] | None = None) -> Bool[Array, "..."]:
        left, right = self.natural() if natural is None else natural
        return (left > -1) & (right > -1) & jnp.isfinite(left + right)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        return jax.random.beta(key, self.a, self.b, (*shape, *self.a.shape), dtype=self.a.dtype)


def _inverse_digamma(value: Array) -> Array:
    """ψ⁻¹, with a relative error of a few per cent (Minka, 2000): where Newton's method starts."""
    small = jnp.minimum(value, -2.22)
    return jnp.where(value > -2.22, jnp.exp(value) + 0.5, -1 / (small - digamma(jnp.ones_like(value))))
