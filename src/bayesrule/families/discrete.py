"""Families over discrete θ: signs, categories and counts."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float, Int

from ..numerics.checks import above, arrays, bare
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import ExponentialFamily

_MAX_STATES = 2**16  # A larger support is not enumerated: memory and time double with every sign.


class Bernoulli(ExponentialFamily):
    r"""Independent signs θ ∈ {−1, +1} in any pytree: the weights of a binary network.

    With p the probability of +1, $λ = \tfrac12 \log\frac{p}{1−p}$, $T(θ) = θ$, $A(λ) = \log 2\cosh λ$ summed over
    all entries, and $μ = 2p − 1 = \tanh λ$. All axes of all leaves belong to one distribution; for a batch of them use
    `jax.vmap`.

    >>> import jax.numpy as jnp
    >>> q = Bernoulli({"w": jnp.array([0.0, 1.0])})
    >>> q.expectation()["w"].tolist()
    [0.0, 0.76159]
    >>> q.support()["w"].shape
    (4, 2)

    Args:
        natural: λ, a pytree of floating arrays in the shape of θ.
    """

    parameter: PyTree
    label: ClassVar[str] = "Bernoulli"
    meaning: ClassVar[str] = "q(θ_j = 1) = p_j, θ ∈ {−1, 1}, λ = ½ log p/(1 − p), μ = 2p − 1  (section 4.5)"
    update: ClassVar[str] = "λ ← (1 − ρτ)λ − ρ ∇_μ E_q ℓ̄  (eq:bayes_learn_binn)"
    elementwise: ClassVar[bool] = True

    def __init__(self, natural: PyTree):
        self.parameter = jax.tree.map(lambda leaf: arrays(Bernoulli, (0,), natural=leaf)[0], natural)

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        """The member with the bare parameters as λ: they are the latent real weights of a binary network."""
        return cls(params)

    @property
    def params(self) -> PyTree:
        """λ, the latent real weights of a binary network."""
        return self.parameter

    @property
    def probabilities(self) -> PyTree:
        """p = P(θ = +1) of every sign."""
        return jax.tree.map(lambda x: jax.nn.sigmoid(2 * x), self.parameter)

    @property
    def mean(self) -> PyTree:
        return self.expectation()

    def natural(self) -> PyTree:
        return self.parameter

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        return cls(natural)

    @classmethod
    def from_expectation(cls, expectation: PyTree) -> Self:
        return cls(jax.tree.map(jnp.arctanh, expectation))

    def with_expectation(self, expectation: PyTree) -> Self:
        return self.from_expectation(expectation)

    def statistics(self, theta: PyTree) -> PyTree:
        return jax.tree.map(lambda x, own: jnp.asarray(x, own.dtype), theta, self.parameter)

    def log_partition(self, natural: PyTree) -> Float[Array, ""]:
        return jnp.asarray(sum((jnp.sum(jnp.logaddexp(x, -x)) for x in jax.tree.leaves(natural)), start=0.0))

    def expectation(self) -> PyTree:
        return jax.tree.map(jnp.tanh, self.parameter)

    def to_natural_gradient(self, covector: PyTree) -> PyTree:
        # The Fisher information is diagonal, 1 − tanh²λ. It is not formed as a matrix, since θ may have many entries.
        return jax.tree.map(lambda c, x: c * jnp.cosh(x) ** 2, covector, self.parameter)

    def enumerated_gradient(self, values: Float[Array, " S"], theta: PyTree) -> PyTree:
        """½(E[f | θ_j = 1] − E[f | θ_j = −1]), where nothing is divided by a probability, which may be tiny."""
        log_prob = self.log_prob(theta)

        def leaf(signs: Array) -> Array:
            weights = log_prob.reshape((-1,) + (1,) * (signs.ndim - 1))
            up, down = (jax.nn.softmax(jnp.where(signs == s, weights, -jnp.inf), axis=0) for s in (1, -1))
            return 0.5 * jnp.tensordot(values, up - down, axes=1)

        return jax.tree.map(leaf, theta)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, ""]:
        leaves = jax.tree.leaves(self.parameter if natural is None else natural)
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        leaves, treedef = jax.tree.flatten(self.probabilities)
        keys = jax.random.split(key, len(leaves))
        draws = [
            2 * jax.random.bernoulli(k, p, (*shape, *p.shape)).astype(p.dtype) - 1
            for k, p in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, draws)

    def support(self) -> PyTree:
        """All 2^P values of θ, along a leading axis."""
        leaves, treedef = jax.tree.flatten(self.parameter)
        total = sum(leaf.size for leaf in leaves)
        _check_enumerable(2**total, f"Bernoulli over {total} signs")
        rows = 2 * ((np.arange(2**total)[:, None] >> np.arange(total)) & 1) - 1
        parts = np.split(rows, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1)
        return jax.tree.unflatten(
            treedef,
            [jnp.asarray(p.reshape(-1, *x.shape), x.dtype) for p, x in zip(parts, leaves, strict=True)],
        )


class Categorical(ExponentialFamily):
    r"""One of K categories; θ is its index.

    $λ_k = \mathrm{logit}_k − \mathrm{logit}_K$ for k < K, $T(θ)$ the one-hot vector without its last
    entry, $A(λ) = \log(1 + \sum_k e^{λ_k})$, $μ_k = p_k$.

    >>> import jax.numpy as jnp
    >>> q = Categorical(jnp.log(jnp.array([0.2, 0.3, 0.5])))
    >>> q.expectation().tolist(), q.support().tolist()
    ([0.2000, 0.3000], [0, 1, 2])

    Args:
        logits: log-probabilities up to a constant, (…, K); leading axes are a batch.
    """

    logits: Float[Array, "... K"]
    label: ClassVar[str] = "Categorical"
    ranks: ClassVar[tuple[int, ...] | None] = (1,)

    def __init__(self, logits: Float[Array, "... K"]):
        (self.logits,) = arrays(Categorical, (1,), logits=logits)

    @property
    def probabilities(self) -> Float[Array, "... K"]:
        return jax.nn.softmax(self.logits, axis=-1)

    def natural(self) -> Float[Array, "... K-1"]:
        return self.logits[..., :-1] - self.logits[..., -1:]

    @classmethod
    def from_natural(cls, natural: Float[Array, "... K-1"]) -> Self:
        return cls(_with_last(jnp.asarray(natural)))

    @classmethod
    def from_expectation(cls, expectation: Float[Array, "... K-1"]) -> Self:
        expectation = jnp.asarray(expectation)
        return cls.from_natural(jnp.log(expectation) - jnp.log1p(-expectation.sum(-1, keepdims=True)))

    def with_expectation(self, expectation: Float[Array, "... K-1"]) -> Self:
        return self.from_expectation(expectation)

    def statistics(self, theta: Int[Array, "..."]) -> Float[Array, "... K-1"]:
        return jax.nn.one_hot(theta, self.logits.shape[-1], dtype=self.logits.dtype)[..., :-1]

    def log_partition(self, natural: Float[Array, "... K-1"]) -> Float[Array, "..."]:
        return jax.nn.logsumexp(_with_last(natural), axis=-1)

    def expectation(self) -> Float[Array, "... K-1"]:
        return self.probabilities[..., :-1]

    def to_natural_gradient(self, covector: Float[Array, "... K-1"]) -> Float[Array, "... K-1"]:
        # F = diag(p) − ppᵀ over k < K, so F⁻¹ = diag(1/p) + 11ᵀ/p_K.
        p = self.probabilities
        return covector / p[..., :-1] + covector.sum(-1, keepdims=True) / p[..., -1:]

    def enumerated_gradient(self, values: Float[Array, " K"], theta: PyTree) -> Float[Array, " K-1"]:
        """f_k − f_K: E_q f = Σ_k p_k f_k is linear in μ, so no probability is divided by."""
        return (values[:-1] - values[-1]).astype(self.logits.dtype)

    def inside(self, natural: Float[Array, "... K-1"] | None = None) -> Bool[Array, "..."]:
        return jnp.all(jnp.isfinite(self.natural() if natural is None else natural), axis=-1)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        return jax.random.categorical(key, self.logits, shape=(*shape, *self.logits.shape[:-1]))

    def support(self) -> Int[Array, "K ..."]:
        """All K values of θ, along a leading axis (the same in every batch element)."""
        *batch, size = self.logits.shape
        _check_enumerable(size, f"Categorical over {size} categories")
        return jnp.broadcast_to(jnp.arange(size).reshape(size, *(1 for _ in batch)), (size, *batch))


class Poisson(ExponentialFamily):
    r"""Counts θ = 0, 1, 2, ….

    $λ = \log \mathrm{rate}$, $T(θ) = θ$, $A(λ) = e^λ$, $\log h(θ) = −\log θ!$, $μ = \mathrm{rate}$.

    >>> q = Poisson(3.0)
    >>> float(q.log_prob(2)), float(q.entropy())
    (-1.4959, 1.9315)

    Args:
        rate: the mean count, above 0; its axes are a batch.
    """

    rate: Float[Array, "..."]
    label: ClassVar[str] = "Poisson"
    ranks: ClassVar[tuple[int, ...] | None] = (0,)

    def __init__(self, rate: Float[Array, "..."]):
        (self.rate,) = arrays(Poisson, (0,), rate=rate)
        above(Poisson, 0, rate=self.rate)

    @property
    def mean(self) -> Float[Array, "..."]:
        return self.rate

    def natural(self) -> Float[Array, "..."]:
        return jnp.log(self.rate)

    @classmethod
    def from_natural(cls, natural: Float[Array, "..."]) -> Self:
        (natural,) = arrays(cls, (0,), natural=natural)
        return bare(cls, rate=jnp.exp(natural))

    @classmethod
    def from_expectation(cls, expectation: Float[Array, "..."]) -> Self:
        (rate,) = arrays(cls, (0,), expectation=expectation)
        return bare(cls, rate=rate)

    def with_expectation(self, expectation: Float[Array, "..."]) -> Self:
        return self.from_expectation(expectation)

    def statistics(self, theta: Int[Array, "..."]) -> Float[Array, "..."]:
        return jnp.asarray(theta, self.rate.dtype)

    def log_partition(self, natural: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(natural)

    def log_base(self, theta: Int[Array, "..."]) -> Float[Array, "..."]:
        return -gammaln(self.statistics(theta) + 1)

    def expected_log_base(self) -> Float[Array, "..."]:
        r"""$−E\log θ! = −\int_0^1 [r − (1 − e^{−ru})/u] / (−\log(1−u))\,du$, r the rate.

        With $u = 1/(1+e^{−v})$ the integrand is analytic for |Im v| < π/2 and decays at both ends,
        so the trapezoidal rule converges geometrically, and equally for every rate.
        """
        v = np.linspace(-42.0, 38.0, 321)  # What is cut off on both sides is below rounding in float64.
        u = 1 / (1 + np.exp(-v))
        # The weights are du/u divided by −log(1 − u), with du = u(1 − u)dv.
        weight = (v[1] - v[0]) / (1 + np.exp(v)) / np.logaddexp(0, v)
        x = self.rate[..., None] * jnp.asarray(u, self.rate.dtype)
        return -jnp.sum(jnp.asarray(weight, self.rate.dtype) * (x + jnp.expm1(-x)), axis=-1)

    def expectation(self) -> Float[Array, "..."]:
        return self.rate

    def inside(self, natural: Float[Array, "..."] | None = None) -> Bool[Array, "..."]:
        return jnp.isfinite(self.natural() if natural is None else natural)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        return jax.random.poisson(key, self.rate, (*shape, *self.rate.shape))


def _with_last(natural: Float[Array, "... K-1"]) -> Float[Array, "... K"]:
    """λ as logits of all K categories, that of the last being 0."""
    return jnp.concatenate([natural, jnp.zeros((*natural.shape[:-1], 1), natural.dtype)], axis=-1)


def _check_enumerable(states: int, what: str) -> None:
    """Raise if there are too many states to list."""
    if states > _MAX_STATES:
        raise ValueError(
            f"{what} has {states} states, too many to enumerate (at most {_MAX_STATES}): "
            "evaluate the loss at samples (MonteCarlo()) or at the mean (Delta()) instead."
        )
