r"""Hidden Markov chains as plain functions of arrays: log Z, marginals, pair counts, the filter, the best path, draws.

A chain is $p(z) = π_{z_1} \prod_t A_{z_t z_{t+1}}$ and its weights are $\exp \sum_t ℓ_t(z_t)$. Everywhere

- `log_initial` is log π, (K,);
- `log_transitions` is log A, (K, K), from the row's state to the column's; (T−1, K, K) where it changes with time;
- `log_likelihoods` is ℓ, (T, K), or (…, T, K) for many sequences, each with its own or with the same π and A;
- `lengths`, (…), says how many of the T steps a sequence has; the rest of it is filling and counts for nothing.

Neither π nor the rows of A need to add up to 1, and either may have zeros (−∞).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .random import Key


class Smoothed(NamedTuple):
    """log Z and its derivatives: each state's probability at each step, and each pair's expected count."""

    log_normalizer: Float[Array, "..."]
    marginals: Float[Array, "... T K"]
    pairs: Float[Array, "... K K"]


@jax.jit
def smoothed(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Smoothed:
    r"""Forward–backward: $\log Z$, $q(z_t = k)$ and $\sum_t q(z_t = i, z_{t+1} = j)$, for $q(z) ∝ p(z) e^{ℓ(z)}$.

    Messages are probabilities, scaled at every step. Where so much underflowed that it may matter (a state that was
    ruled out and comes back, which takes zeros in A), all is done again with logarithms, at several times the cost.
    Weights that are all impossible have log Z = −∞, and marginals that are no numbers.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.2], [0.9, 0.2]])
    >>> initial, transitions = jnp.array([0.5, 0.5]), jnp.array([[0.7, 0.3], [0.3, 0.7]])
    >>> found = smoothed(jnp.log(initial), jnp.log(transitions), jnp.log(likelihoods))
    >>> float(found.log_normalizer), found.marginals[:, 0].tolist()
    (-3.3725, [0.8673, 0.8204, 0.3075, 0.8204, 0.8673])
    """
    arguments, each = _sequences(log_initial, log_transitions, log_likelihoods, lengths)
    scaled, least = each(_scaled)(*arguments)
    limits = jnp.finfo(least.dtype)
    fine = jnp.all(least > limits.tiny / limits.eps**2)  # not so of NaN
    return _unpacked(lax.cond(fine, lambda *_: scaled, each(_by_logarithms), *arguments), log_likelihoods)


@jax.custom_jvp
def log_normalizer(
    log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any
) -> Float[Array, "..."]:
    r"""$\log Z = \log \sum_z p(z) e^{ℓ(z)}$, whose derivatives are `smoothed`'s marginals and pair counts."""
    return smoothed(log_initial, log_transitions, log_likelihoods, lengths).log_normalizer


@log_normalizer.defjvp
def _log_normalizer_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    found = smoothed(*primals)
    initial, transitions, likelihoods, _ = tangents
    slope = jnp.sum(found.marginals[..., 0, :] * initial, axis=-1)
    slope = slope + jnp.sum(found.marginals * likelihoods, axis=(-2, -1))
    steps = tuple(range(-(found.pairs.ndim - found.log_normalizer.ndim), 0))
    return found.log_normalizer, slope + jnp.sum(found.pairs * transitions, axis=steps)


class Filtered(NamedTuple):
    """log Z, and each state's log probability given what came up to each step."""

    log_normalizer: Float[Array, "..."]
    log_probabilities: Float[Array, "... T K"]


@jax.jit
def filtered(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Filtered:
    r"""The forward algorithm, with logarithms: $\log p(z_t = k \mid y_{1:t})$.

    >>> import jax.numpy as jnp
    >>> found = filtered(jnp.log(jnp.array([0.5, 0.5])), jnp.zeros((2, 2)), jnp.log(jnp.array([[0.9, 0.1]])))
    >>> jnp.exp(found.log_probabilities).tolist()
    [[0.9, 0.1]]
    """
    arguments, each = _sequences(log_initial, log_transitions, log_likelihoods, lengths)
    return _unpacked(each(_filtered)(*arguments), log_likelihoods)


class Path(NamedTuple):
    """The most probable states, and the log of their weight; −1 past a sequence's length."""

    states: Int[Array, "... T"]
    log_probability: Float[Array, "..."]


@jax.jit
def best_path(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Path:
    r"""Viterbi's algorithm: $\arg\max_z \log p(z) + ℓ(z)$, and that maximum.

    >>> import jax.numpy as jnp
    >>> transitions = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    >>> best_path(jnp.zeros(2), transitions, jnp.array([[0.0, 1.0], [0.1, 0.0]])).states.tolist()
    [1, 1]
    """
    arguments, each = _sequences(log_initial, log_transitions, log_likelihoods, lengths)
    return _unpacked(each(_best)(*arguments), log_likelihoods)


@partial(jax.jit, static_argnames="shape")
def sampled(
    key: Key,
    log_initial: Array,
    log_transitions: Array,
    log_likelihoods: Array,
    lengths: Any = None,
    shape: tuple[int, ...] = (),
) -> Int[Array, "*S ... T"]:
    """Paths drawn from q, backwards after a filter; −1 past a sequence's length."""
    (*rest, lengths), each = _sequences(log_initial, log_transitions, log_likelihoods, lengths)
    noise = jax.random.gumbel(key, (*shape, *log_likelihoods.shape), log_likelihoods.dtype)
    steps, states = log_likelihoods.shape[-2:]
    batch = rest[2].shape[:-2]
    draws = noise.reshape(-1, *batch, steps, states) if batch else noise.reshape(-1, steps, states)
    before = each(_filtered)(*rest, lengths).log_probabilities
    one = lambda noise: each(_drawn, 2)(noise, before, rest[1], lengths)
    return jax.vmap(one)(draws).reshape((*shape, *log_likelihoods.shape[:-1]))


# Sequences: none, one or many axes before (T, K), as one.


def _sequences(initial: Any, transitions: Any, likelihoods: Any, lengths: Any) -> tuple[tuple, Callable]:
    """The arrays with one axis of sequences at most, and what takes a function of one sequence to all of them."""
    if likelihoods.ndim < 2 or likelihoods.shape[-2] == 0:
        raise ValueError(f"Log-likelihoods are (…, T, K), for each step and state, got shape {likelihoods.shape}.")
    *batch, steps, states = likelihoods.shape
    own = transitions.ndim - len(batch) in (2, 3)  # a chain for each sequence
    inner = transitions.shape[len(batch) if own else 0 :]
    if inner not in ((states, states), (steps - 1, states, states)) or initial.shape[-1:] != (states,):
        raise ValueError(
            f"A chain over {states} states and {steps} steps has initial ({states},) and transitions ({states}, "
            f"{states}) or ({steps - 1}, {states}, {states}), got {initial.shape} and {transitions.shape}."
        )
    lengths = jnp.broadcast_to(steps if lengths is None else jnp.asarray(lengths), tuple(batch))
    if not batch:
        return (initial, transitions, likelihoods, lengths), lambda function, shared=0: function
    flat = lambda x, inside: x.reshape(-1, *x.shape[x.ndim - inside :])
    axes = [0 if initial.ndim > 1 else None, 0 if own else None, 0, 0]
    found = (
        flat(jnp.broadcast_to(initial, (*batch, states)), 1) if axes[0] == 0 else initial,
        flat(transitions, len(inner)) if own else transitions,
        flat(likelihoods, 2),
        lengths.reshape(-1),
    )

    def each(function: Callable, shared: int = 0) -> Callable:
        # One sequence runs by itself: an axis of length 1 makes XLA's loops slower.
        places = axes if not shared else [0, 0, axes[1], 0]

        def over(*arrays: Array) -> Any:
            if found[2].shape[0] > 1:
                return jax.vmap(function, places)(*arrays)
            alone = (x if place is None else x[0] for x, place in zip(arrays, places, strict=True))
            return jax.tree.map(lambda x: x[None], function(*alone))

        return over

    return found, each


def _unpacked(tree: Any, likelihoods: Array) -> Any:
    batch = likelihoods.shape[:-2]
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), tree) if batch else tree


# One sequence.


def _run(body: Callable, start: Array, xs: Array, matrix: Array, length: Array | None = None) -> Array:
    """What `body` emits at every step: forwards, or backwards from the step `length`, what follows it being filling.

    `body(carry, x, M)` has the matrix that leads on: from a step to the next, or to the one before.
    """
    steps, varying, backwards = xs.shape[0], matrix.ndim == 3, length is not None
    # One more matrix where the chain ends, which leads nowhere.
    matrices = jnp.pad(matrix, ((1, 0) if backwards else (0, 1), (0, 0), (0, 0))) if varying else None
    if length is not None:  # rolled, so that the sequence ends where its array does
        xs = jnp.roll(xs, steps - length, axis=0)
        matrices = None if matrices is None else jnp.roll(matrices, steps - length, axis=0)
    step = lambda carry, now: body(carry, now[0], now[1] if varying else matrix)
    found = lax.scan(step, start, (xs, matrices), reverse=backwards)[1]
    return found if length is None else jnp.roll(found, length - steps, axis=0)


def _scaled(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> tuple[Smoothed, Array]:
    """Scaled messages; also the least probability that is divided by, next to which what underflowed is compared."""
    steps = likelihoods.shape[0]
    highest = jnp.max(likelihoods, axis=-1)
    highest = lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights, matrix = jnp.exp(likelihoods - highest[:, None]), jnp.exp(transitions)

    # A loop's body of few small operations: XLA then compiles all of it as one, at some 30 ns a step. What can wait
    # (the filter itself, totals) comes after it, for all steps at once.
    def onward(message: Array, weight: Array, matrix: Array) -> tuple[Array, Array]:
        joint = message * weight
        return jnp.sum(joint[:, None] * matrix, axis=0) / jnp.sum(joint), message

    ahead = _run(onward, jnp.exp(initial), weights, matrix)
    beyond = _run(onward, jnp.ones_like(weights[0]), weights, matrix.mT, length)

    within = jnp.arange(steps) < length
    joint = ahead * weights
    total = jnp.sum(joint, axis=-1)
    joint = joint * beyond
    overlap = jnp.where(within, jnp.sum(joint, axis=-1), 1.0)
    marginals = _kept(joint / overlap[:, None], within)
    # ξ_t = α_t A (w β)_{t+1} / Σ, where α_t A = ahead_{t+1} and Σ = Σ (ahead w β)_{t+1}.
    left = _kept((ahead * weights)[:-1] / total[:-1, None], within[1:])
    right = _kept((weights * beyond)[1:] / overlap[1:, None], within[1:])
    pairs = matrix * (left.T @ right if matrix.ndim == 2 else left[:, :, None] * right[:, None, :])
    log_z = jnp.sum(jnp.where(within, jnp.log(total) + highest, 0.0))
    return Smoothed(log_z, marginals, pairs), jnp.min(jnp.where(within, overlap, 1.0))


def _kept(rows: Array, within: Array) -> Array:
    return jnp.asarray(jnp.where(within[:, None], rows, 0.0))


# With logarithms, in which nothing underflows. What is impossible has a number too, which no sum brings back: that
# spares the loops the care of ∞ − ∞.

_IMPOSSIBLE = -1e30


def _numbers(*logs: Array) -> list[Array]:
    return [jnp.maximum(x, _IMPOSSIBLE) for x in logs]


def _summed(matrix: Array, vector: Array) -> Array:
    """log Σ_i exp(v_i + M_ij)."""
    terms = vector[:, None] + matrix
    highest = lax.stop_gradient(jnp.max(terms, axis=0))
    return highest + jnp.log(jnp.sum(jnp.exp(terms - highest), axis=0))


def _highest(matrix: Array, vector: Array) -> Array:
    return jnp.max(vector[:, None] + matrix, axis=0)


def _passed(through: Callable, start: Array, matrix: Array, likelihoods: Array, length: Array | None = None) -> Array:
    """What comes to each step from those before it (or after it, from the step `length`), up to a constant."""

    def onward(message: Array, likelihood: Array, matrix: Array) -> tuple[Array, Array]:
        joint = message + likelihood
        return through(matrix, joint - jnp.max(joint)), message

    return _run(onward, start, likelihoods, matrix, length)


def _by_logarithms(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Smoothed:
    initial, transitions, likelihoods = _numbers(initial, transitions, likelihoods)
    ahead = _passed(_summed, initial, transitions, likelihoods)
    beyond = _passed(_summed, jnp.zeros_like(initial), transitions.mT, likelihoods, length)

    within = jnp.arange(likelihoods.shape[0]) < length
    before = ahead + likelihoods
    joint = before + beyond
    overlap = jax.nn.logsumexp(joint, axis=-1)
    marginals = _kept(jnp.exp(joint - overlap[:, None]), within)
    after = likelihoods + beyond

    def pair(inside: Array, left: Array, right: Array, matrix: Array) -> Array:
        terms = left[:, None] + matrix + right
        return jnp.asarray(jnp.where(inside, jnp.exp(terms - jax.nn.logsumexp(terms)), 0.0))

    def add(total: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + pair(*now, transitions), None

    each = within[1:], before[:-1], after[1:]
    if transitions.ndim == 2:
        pairs, _ = lax.scan(add, jnp.zeros_like(transitions), each)
    else:
        pairs = jax.vmap(pair)(*each, transitions)
    log_z = _log_total(before, length)
    known = jnp.where(jnp.isneginf(log_z), jnp.nan, 1.0).astype(joint.dtype)
    return Smoothed(log_z, known * marginals, known * pairs)


def _log_total(joint: Array, length: Array) -> Array:
    """log Z: the highest of every step, which the loop takes out, and what the last step has beside it."""
    highest = jnp.max(joint, axis=-1)
    last = jax.nn.logsumexp(joint - highest[:, None], axis=-1)[length - 1]
    return jnp.where(length > 0, _possible(_within(highest, length) + last), 0.0)


def _within(values: Array, length: Array) -> Array:
    return jnp.sum(jnp.where(jnp.arange(values.shape[0]) < length, values, 0.0))


def _possible(log: Array) -> Array:
    return jnp.where(log < 0.5 * _IMPOSSIBLE, -jnp.inf, log)


def _filtered(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Filtered:
    initial, transitions, likelihoods = _numbers(initial, transitions, likelihoods)
    joint = _passed(_summed, initial, transitions, likelihoods) + likelihoods
    return Filtered(_log_total(joint, length), _possible(jax.nn.log_softmax(joint, axis=-1)))


def _best(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Path:
    initial, transitions, likelihoods = _numbers(initial, transitions, likelihoods)
    joint = _passed(_highest, initial, transitions, likelihoods) + likelihoods
    return Path(_traced(joint, transitions, length), _possible(_within(jnp.max(joint, axis=-1), length)))


def _drawn(noise: Array, before: Array, transitions: Array, length: Array) -> Array:
    return _traced(before + noise, transitions, length)  # the highest of log p plus Gumbel noise is a draw from p


def _traced(scores: Array, transitions: Array, length: Array) -> Int[Array, " T"]:
    """The states from the last backwards, each the highest of its scores and the transition to the next."""

    def back(bonus: Array, score: Array, matrix: Array) -> tuple[Array, Array]:
        state = jnp.argmax(score + bonus)
        return matrix[:, state], state

    path = _run(back, jnp.zeros_like(scores[0]), scores, transitions, length)
    return jnp.asarray(jnp.where(jnp.arange(scores.shape[0]) < length, path, -1))
