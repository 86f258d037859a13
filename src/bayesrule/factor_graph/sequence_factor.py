r"""Factors of sequences: the hidden states of a Markov chain summed out, for any factor of one step.

For fixed E log π, E log A and E log f(y_t | k), the bound at the best q(z) of a sequence is the log-normaliser of a
chain with these as its log-potentials, which the forward algorithm computes. Its derivatives in the potentials are the
marginals of forward–backward; so, through the block views, they are the messages to the blocks of π, A and f, and no
backward pass is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..numerics.hmm import log_normalizer
from ..numerics.random import Key
from .block_view import BlockView
from .factor import Factor

_HINT = "Sequences are (N, T, …): bayesrule.models.sequences.sequences(y) makes them so."


class SequenceFactor(Factor):
    r"""$\log \sum_z \exp[E\log π_{z_1} + \sum_t E\log A_{z_t z_{t+1}} + \sum_t E\log f(y_t \mid z_t)]$, row by row.

    A row is a sequence: data are (N, T, …). A step without observations has a likelihood of 1 under every state; the
    steps after a row's last observation do not exist, so that a row that ends in NaN is a shorter sequence.

    Args:
        initial: π, a Dirichlet block (K,) or known probabilities.
        transitions: A, a Dirichlet block with a plate for each state, (K, K), or known probabilities.
        components: a factor of one step whose blocks have a plate for each of the K states. If it has points, it gets
            the data of all steps as they are, (N·T, …), and returns (K, N·T, …).
    """

    components: Factor
    constants: dict[str, Array]
    chain_blocks: tuple[str | None, str | None] = eqx.field(static=True)
    handles_missing: ClassVar[bool] = True

    def __init__(self, initial: str | Array, transitions: str | Array, components: Factor):
        if not isinstance(components, Factor) or not components.data:
            raise ValueError("components= is a factor of one step's observations, such as normal('y', joint='states').")
        arguments = {"initial": initial, "transitions": transitions}
        self.constants = {role: jnp.asarray(x, float) for role, x in arguments.items() if not isinstance(x, str)}
        first, second = (x if isinstance(x, str) else None for x in arguments.values())
        names = tuple(name for name in (first, second, *components.blocks) if name is not None)
        Factor.__init__(
            self,
            _never_called,
            *dict.fromkeys(names),
            data=components.data,
            of="view",
            features=None if components.features is None else _FeaturesOfSteps(components.features),
            label=f"hidden_markov of {components.label}",
        )
        self.components, self.chain_blocks = components, (first, second)

    @property
    def random(self) -> bool:
        return self.components.random

    @property
    def second_order(self) -> bool:
        return self.components.second_order

    def for_missing_entries(self, patterns: Bool[Array, "P D"], data: tuple[str, str]) -> SequenceFactor | None:
        components = self.components.for_missing_entries(patterns, data)
        roles = zip(self.chain_blocks, ("initial", "transitions"), strict=True)
        initial, transitions = (self.constants[role] if block is None else block for block, role in roles)
        return components and SequenceFactor(initial, transitions, components)

    def log_chain(self, views: Mapping[str, BlockView]) -> tuple[Float[Array, " K"], Float[Array, "K K"]]:
        """E log π and E log A."""
        initial, transitions = (
            jnp.log(self.constants[role]) if name is None else views[name].expectation
            for name, role in zip(self.chain_blocks, ("initial", "transitions"), strict=True)
        )
        return initial, transitions

    def step_terms(
        self, views: Mapping[str, BlockView], data: Mapping[str, Array], key: Key | None = None
    ) -> Float[Array, "N T K ..."]:
        """E log f(y_t | k) of every step and state, and of every entry of a step that has a term of its own."""
        observations = data[self.data[-1]]
        if observations.ndim < 2:
            raise ValueError(
                f"sequences are (N, T, …), one for each row, got {observations.shape}: add an axis, y[None]."
            )
        lead = observations.shape[:2]
        arrays = {name: data[name].reshape((-1, *data[name].shape[2:])) for name in self.data}
        if self.components.points:
            terms = jnp.moveaxis(self.components.value(views, arrays, key), 0, 1)
        else:
            # (N·T, 1, …) broadcasts every step against the plates of all states.
            arrays[self.data[-1]] = arrays[self.data[-1]][:, None]
            terms = self.components.value(views, arrays, key)
        if terms.ndim < 2 or terms.shape[0] != lead[0] * lead[1]:
            raise ValueError(
                f"the components return {terms.shape} for {lead[0] * lead[1]} steps and their states. {_HINT}"
            )
        return terms.reshape((*lead, *terms.shape[1:]))

    def entries(
        self, value: Array, views: Mapping[str, BlockView], data: Mapping[str, Array], key: Key | None
    ) -> Array:
        return self.step_terms(views, data, key)[:, :, 0]

    def log_likelihoods(
        self, views: Mapping[str, BlockView], data: Mapping[str, Array], observed: Array | None, key: Key | None = None
    ) -> tuple[Float[Array, "N T K"], Int[Array, " N"] | None]:
        """E log f(y_t | k) of every step and state, 0 where nothing was observed, and every sequence's length.

        `observed` is a mask in the shape of the observations; without it all is observed, and the lengths are None.
        """
        terms = self.step_terms(views, data, key)
        if observed is not None:
            some, every = _term_masks(observed, terms.ndim)
            terms = jnp.where(every, terms, jnp.where(some, jnp.nan, 0.0).astype(terms.dtype))
        total = jnp.sum(terms, axis=tuple(range(3, terms.ndim)))
        if observed is None:
            return total, None
        present = jnp.any(observed.reshape((*observed.shape[:2], -1)), axis=-1)
        return total, jnp.max(jnp.where(present, jnp.arange(1, present.shape[1] + 1), 0), axis=1)

    def value(
        self,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Key | None = None,
        local: frozenset[str] = frozenset(),
        observed: Array | None = None,
    ) -> Float[Array, " N"]:
        log_likelihoods, lengths = self.log_likelihoods(views, data, observed, key)
        return log_normalizer(*self.log_chain(views), log_likelihoods, lengths)


@dataclasses.dataclass(frozen=True)
class _FeaturesOfSteps:
    """The components' `features`, of all steps of all sequences. A class, and not a closure, so that equal ones compare
    equal: it is a static field, and a new one would compile every fit again."""

    features: Callable[[Array], Array]

    def __call__(self, y: Array) -> Array:
        features = self.features(y.reshape((-1, *y.shape[2:])))
        if features.shape[0] != y.shape[0] * y.shape[1]:
            raise ValueError(f"{y.shape} are not sequences of such steps. {_HINT}")
        return features.reshape((*y.shape[:2], *features.shape[1:]))


def _term_masks(observed: Bool[Array, "N T ..."], ndim: int) -> tuple[Bool[Array, "N T 1 ..."], Bool[Array, "..."]]:
    """Of which terms (N, T, K, …) some entry was observed, and of which every one.

    A term of several entries needs all of them: `Model.for_data` sees to the others before a fit.
    """
    entries = ndim - 3
    some = every = observed
    if observed.ndim - 2 > entries:
        axes = tuple(range(2 + entries, observed.ndim))
        some, every = jnp.any(observed, axis=axes), jnp.all(observed, axis=axes)
    align = lambda mask: mask.reshape((*mask.shape[:2], 1, *mask.shape[2:], *(1,) * (ndim - 1 - mask.ndim)))
    return align(some), align(every)


def _never_called(*_: Any) -> None:
    """In the place of `Factor.function`: `value` computes the expectation itself."""
