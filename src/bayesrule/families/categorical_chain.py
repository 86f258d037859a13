"""A Markov chain over K states with a weight for each state at each step: the hidden states of an HMM."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ..numerics import hmm as markov
from ..numerics.checks import arrays, bare
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import ExponentialFamily

Sites = Float[Array, "... T K-1"]


class CategoricalChain(ExponentialFamily):
    r"""Paths $θ = (z_1, …, z_T)$, $q(z) ∝ p(z) \exp \sum_t ℓ_t(z_t)$, for a Markov chain p that is known.

    p is the base measure: `log_prob` is $\log q(z)/p(z) = \sum_t ℓ_t(z_t) − A$ and the entropy is −KL(q ‖ p).
    $λ_{tk} = ℓ_{tk} − ℓ_{tK}$ for k < K, $T(z)$ the one-hot vectors without their last entries,
    $A(λ) = \log E_p \exp ⟨λ, T(z)⟩$ by the forward algorithm, $μ_{tk} = q(z_t = k)$ by forward–backward. With the sum
    of the messages of T observations as λ this is the smoother.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8]])
    >>> q = CategoricalChain([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], jnp.log(likelihoods))
    >>> q.probabilities[:, 0].tolist(), q.viterbi().tolist()
    ([0.8619, 0.7992, 0.1907], [0, 0, 1])

    Args:
        initial: p(z_1), (…, K).
        transitions: p(z_{t+1} | z_t), (…, K, K), with rows that add up to 1.
        logits: ℓ, (…, T, K), for example the observations' log-likelihoods.
    """

    initial: Float[Array, "... K"]
    transitions: Float[Array, "... K K"]
    logits: Float[Array, "... T K"]
    prior_is_base_measure: ClassVar[bool] = True
    label: ClassVar[str] = "Markov chain (categorical)"
    meaning: ClassVar[str] = "q(z) ∝ p(z) exp Σ_t ℓ_t(z_t), p a Markov chain, λ = ℓ, μ_tk = q(z_t = k)"

    def __init__(self, initial: Any, transitions: Any, logits: Any):
        initial, transitions, logits = (jnp.asarray(x) for x in (initial, transitions, logits))
        states = logits.shape[-1] if logits.ndim > 1 else 0
        fits = initial.shape[-1:] == (states,) and transitions.shape[-2:] == (states, states)
        if not fits or 0 in logits.shape:
            raise ValueError(
                "CategoricalChain has initial (…, K), transitions (…, K, K) and logits (…, T, K), got "
                f"{initial.shape}, {transitions.shape} and {logits.shape}."
            )
        flat = transitions.reshape(*transitions.shape[:-2], -1), logits.reshape(*logits.shape[:-2], -1)
        parts = arrays(CategoricalChain, (1, 1, 1), initial=initial, transitions=flat[0], logits=flat[1])
        batch = parts[0].shape[:-1]
        self.initial, self.transitions = parts[0], parts[1].reshape(*batch, states, states)
        self.logits = parts[2].reshape(*batch, *logits.shape[-2:])
        for name, value in {"initial": self.initial, "transitions": self.transitions}.items():
            _probabilities(name, value)

    @property
    def _chain(self) -> tuple[Array, Array]:
        return jnp.log(self.initial), jnp.log(self.transitions)

    @property
    def probabilities(self) -> Float[Array, "... T K"]:
        """q(z_t = k)."""
        return self.smoothed().marginals

    def smoothed(self) -> markov.Smoothed:
        """log E_p e^ℓ, the marginals, and the expected number of times that each state follows each other."""
        return markov.smooth(*self._chain, self.logits)

    def viterbi(self) -> Int[Array, "... T"]:
        """The most probable path."""
        return markov.best_path(*self._chain, self.logits).states

    def mode(self) -> Int[Array, "... T"]:
        """The most probable path, p counted in."""
        return self.viterbi()

    def natural(self) -> Sites:
        return self.logits[..., :-1] - self.logits[..., -1:]

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError("λ alone does not determine the Markov chain: use a member's with_natural.")

    @classmethod
    def from_expectation(cls, expectation: PyTree) -> Self:
        raise ValueError("μ alone does not determine the Markov chain: use a member's with_expectation.")

    def with_natural(self, natural: Sites) -> Self:
        return bare(type(self), initial=self.initial, transitions=self.transitions, logits=_with_last(natural))

    def statistics(self, theta: Int[Array, "... T"]) -> Sites:
        return jax.nn.one_hot(theta, self.logits.shape[-1], dtype=self.logits.dtype)[..., :-1]

    def log_partition(self, natural: Sites) -> Float[Array, "..."]:
        return markov.log_normalizer(*self._chain, _with_last(natural), None)

    def expectation(self) -> Sites:
        return self.probabilities[..., :-1]

    def kl(self, other: Any) -> Float[Array, "..."]:
        """KL(q ‖ other), whose p may be another."""
        if not isinstance(other, CategoricalChain):
            return super().kl(other)  # which says why not
        mine, theirs, found = self.natural(), other.natural(), self.smoothed()
        value = self.inner(mine - theirs, found.marginals[..., :-1])
        value = value - self.log_partition(mine) + other.log_partition(theirs)
        initial = _expected_log(found.marginals[..., 0, :], self.initial, other.initial)
        return (
            value
            + jnp.sum(initial, -1)
            + jnp.sum(_expected_log(found.pairs, self.transitions, other.transitions), (-2, -1))
        )

    def inside(self, natural: Sites | None = None) -> Bool[Array, "..."]:
        return jnp.all(jnp.isfinite(self.natural() if natural is None else natural), axis=(-2, -1))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Int[Array, "... T"]:
        return markov.sample_paths(key, *self._chain, self.logits, shape=shape)

    # Two axes are one event's.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return (2,)

    def coordinates(self, natural: Sites) -> Float[Array, "... M"]:
        return natural.reshape(*natural.shape[:-2], math.prod(natural.shape[-2:]))

    def uncoordinates(self, vector: Float[Array, "... M"]) -> Sites:
        return vector.reshape(*vector.shape[:-1], self.logits.shape[-2], self.logits.shape[-1] - 1)


def _probabilities(name: str, value: Array) -> None:
    if isinstance(value, Tracer):
        return
    if not bool(jnp.all(value >= 0) & jnp.allclose(jnp.sum(value, axis=-1), 1.0, atol=1e-4)):
        what = "the last axis" if name == "initial" else "each row, the state that is left,"
        raise ValueError(
            f"CategoricalChain's {name} must be probabilities that add up to 1 over {what} and do not: divide them by "
            "their sum."
        )


def _with_last(natural: Sites) -> Float[Array, "... T K"]:
    return jnp.concatenate([natural, jnp.zeros((*natural.shape[:-1], 1), natural.dtype)], axis=-1)


def _expected_log(counts: Array, mine: Array, theirs: Array) -> Array:
    """n log(p/p'), 0 where n is."""
    return jnp.where(counts > 0, counts * (jnp.log(mine) - jnp.log(theirs)), 0.0)
