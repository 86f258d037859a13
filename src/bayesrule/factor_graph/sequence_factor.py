"""Factors of sequences: the hidden states of a Markov chain summed out, for any factor of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..numerics.hmm import log_normalizer
from .block_view import BlockView
from .factor import Factor

_HINT = "Sequences are (N, T, …): bayesrule.models.sequences.sequences(y) makes them so."


class SequenceFactor(Factor):
    r"""$\log \sum_z \exp[E\log π_{z_1} + \sum_t E\log A_{z_t z_{t+1}} + \sum_t E\log f(y_t \mid z_t)]$, row by row.

    A row is a sequence: data are (N, T, …). `components` is a factor of one step whose blocks have a plate for each of
    K states; one with points gets the steps' data as they are, (N·T, …), and returns (K, N·T, …). `initial` and
    `transitions` are Dirichlet blocks, (K,) and (K, K), or known probabilities.

    A step without observations says nothing of its state, and what follows the last observation is not there at all: a
    row that ends in NaN is a shorter sequence.
    """

    components: Factor
    known: dict[str, Array]
    chain: tuple[str | None, str | None] = eqx.field(static=True)
    sees_missing: ClassVar[bool] = True

    def __init__(self, initial: str | Array, transitions: str | Array, components: Factor):
        if not isinstance(components, Factor) or not components.data:
            raise ValueError("components= is a factor of one step's observations, such as normal('y', joint='states').")
        given = {"initial": initial, "transitions": transitions}
        self.known = {role: jnp.asarray(x, float) for role, x in given.items() if not isinstance(x, str)}
        first, second = (x if isinstance(x, str) else None for x in given.values())
        names = tuple(name for name in (first, second, *components.blocks) if name is not None)
        Factor.__init__(
            self,
            _unused,
            *dict.fromkeys(names),
            data=components.data,
            of="seen",
            features=None if components.features is None else _PerStep(components.features),
            said=f"hidden_markov of {components.said}",
        )
        self.components, self.chain = components, (first, second)

    @property
    def random(self) -> bool:
        return self.components.random

    def log_chain(self, seen: Mapping[str, BlockView]) -> tuple[Float[Array, " K"], Float[Array, "K K"]]:
        """E log π and E log A."""
        found = []
        for name, role in zip(self.chain, ("initial", "transitions"), strict=True):
            found.append(jnp.log(self.known[role]) if name is None else seen[name].expectation)
        return found[0], found[1]

    def terms(
        self, seen: Mapping[str, BlockView], data: Mapping[str, Array], key: Any = None
    ) -> Float[Array, "N T K ..."]:
        """E log f of every step of every sequence under every state, and of every entry that has a term of its own."""
        observed = data[self.data[-1]]
        if observed.ndim < 2:
            raise ValueError(f"sequences are (N, T, …), one for each row, got {observed.shape}: add an axis, y[None].")
        lead = observed.shape[:2]
        arrays = {name: data[name].reshape((-1, *data[name].shape[2:])) for name in self.data}
        if self.components.points:
            found = jnp.moveaxis(self.components.value(seen, arrays, key), 0, 1)
        else:
            arrays[self.data[-1]] = arrays[self.data[-1]][:, None]  # a step beside all plates
            found = self.components.value(seen, arrays, key)
        if found.ndim < 2 or found.shape[0] != lead[0] * lead[1]:
            raise ValueError(
                f"the components return {found.shape} for {lead[0] * lead[1]} steps and their states. {_HINT}"
            )
        return found.reshape((*lead, *found.shape[1:]))

    def entries(self, value: Array, seen: Mapping[str, BlockView], data: Mapping[str, Array], key: Any) -> Array:
        return self.terms(seen, data, key)[:, :, 0]

    def log_likelihoods(
        self, seen: Mapping[str, BlockView], data: Mapping[str, Array], observed: Array | None, key: Any = None
    ) -> tuple[Float[Array, "N T K"], Int[Array, " N"] | None]:
        """E log f of every step under every state, 0 where nothing was observed, and every sequence's length."""
        found = self.terms(seen, data, key)
        if observed is not None:
            found = jnp.where(_beside_states(observed, found.ndim), found, 0.0)
        total = jnp.sum(found, axis=tuple(range(3, found.ndim)))
        if observed is None:
            return total, None
        present = jnp.any(observed.reshape((*observed.shape[:2], -1)), axis=-1)
        return total, jnp.max(jnp.where(present, jnp.arange(1, present.shape[1] + 1), 0), axis=1)

    def value(
        self,
        seen: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Any = None,
        local: frozenset[str] = frozenset(),
        observed: Array | None = None,
    ) -> Float[Array, " N"]:
        likelihoods, lengths = self.log_likelihoods(seen, data, observed, key)
        return log_normalizer(*self.log_chain(seen), likelihoods, lengths)


@dataclasses.dataclass(frozen=True)
class _PerStep:
    """What a factor makes of its observations, for all steps of all sequences."""

    features: Callable[[Array], Array]

    def __call__(self, y: Array) -> Array:
        made = self.features(y.reshape((-1, *y.shape[2:])))
        if made.shape[0] != y.shape[0] * y.shape[1]:
            raise ValueError(f"{y.shape} are not sequences of such steps. {_HINT}")
        return made.reshape((*y.shape[:2], *made.shape[1:]))


def _beside_states(observed: Bool[Array, "N T ..."], ndim: int) -> Bool[Array, "N T 1 ..."]:
    """Which of the terms (N, T, K, …) were observed; a step that is taken whole needs all of its entries."""
    entries = ndim - 3
    if observed.ndim - 2 > entries:
        observed = jnp.all(observed, axis=tuple(range(2 + entries, observed.ndim)))
    return observed.reshape((*observed.shape[:2], 1, *observed.shape[2:], *(1,) * (ndim - 1 - observed.ndim)))


def _unused(*_: Any) -> None:
    return None
