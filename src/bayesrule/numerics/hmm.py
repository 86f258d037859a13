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

    Messages are probabilities, scaled at every step. Where underflow may have mattered (a state that was ruled out and
    becomes possible again, which needs zeros in the transitions), everything is computed again with logarithms, at
    several times the cost. If all paths are impossible, log Z = −∞ and the marginals are NaN.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.2], [0.9, 0.2]])
    >>> initial, transitions = jnp.array([0.5, 0.5]), jnp.array([[0.7, 0.3], [0.3, 0.7]])
    >>> found = smoothed(jnp.log(initial), jnp.log(transitions), jnp.log(likelihoods))
    >>> float(found.log_normalizer), found.marginals[:, 0].tolist()
    (-3.3725, [0.8673, 0.8204, 0.3075, 0.8204, 0.8673])
    """
    arguments, each = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    scaled, least = each(_smooth_scaled)(*arguments)
    limits = jnp.finfo(least.dtype)
    fine = jnp.all(least > limits.tiny / limits.eps**2)  # not so of NaN
    return _unflatten_batch(lax.cond(fine, lambda *_: scaled, each(_smooth_logs), *arguments), log_likelihoods)


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
    """log Z, and each state's log-probability given the weights up to each step."""

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
    arguments, each = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    return _unflatten_batch(each(_filter)(*arguments), log_likelihoods)


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
    arguments, each = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    return _unflatten_batch(each(_viterbi)(*arguments), log_likelihoods)


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
    (*rest, lengths), each = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    noise = jax.random.gumbel(key, (*shape, *log_likelihoods.shape), log_likelihoods.dtype)
    steps, states = log_likelihoods.shape[-2:]
    batch = rest[2].shape[:-2]
    draws = noise.reshape(-1, *batch, steps, states) if batch else noise.reshape(-1, steps, states)
    before = each(_filter)(*rest, lengths).log_probabilities
    one = lambda noise: each(_sample, 2)(noise, before, rest[1], lengths)
    return jax.vmap(one)(draws).reshape((*shape, *log_likelihoods.shape[:-1]))


# Sequences: none, one or many axes before (T, K), as one.


def _flatten_batch(initial: Any, transitions: Any, likelihoods: Any, lengths: Any) -> tuple[tuple, Callable]:
    """Flatten the batch axes to one; also return the transform that maps a function of one sequence over them."""
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
        # A single sequence runs without a batch axis, because an axis of length 1 makes XLA's loops slower.
        places = axes if not shared else [0, 0, axes[1], 0]

        def over(*arrays: Array) -> Any:
            if found[2].shape[0] > 1:
                return jax.vmap(function, places)(*arrays)
            alone = (x if place is None else x[0] for x, place in zip(arrays, places, strict=True))
            return jax.tree.map(lambda x: x[None], function(*alone))

        return over

    return found, each


def _unflatten_batch(tree: Any, likelihoods: Array) -> Any:
    batch = likelihoods.shape[:-2]
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), tree) if batch else tree


# One sequence.


def _scan_chain(body: Callable, start: Array, xs: Array, matrix: Array, length: Array | None = None) -> Array:
    """Scan `body(carry, x, M)` over the steps of a chain and return what it emits at each.

    M is the transition matrix to the next step or, backwards, to the step before. With `length` the scan runs backwards
    from that step, and the steps after it are padding.
    """
    steps, varying, backwards = xs.shape[0], matrix.ndim == 3, length is not None
    # The chain has one transition fewer than steps, so a matrix of zeros is added at its end.
    matrices = jnp.pad(matrix, ((1, 0) if backwards else (0, 1), (0, 0), (0, 0))) if varying else None
    if length is not None:  # the sequence is rolled so that it ends at the end of its array
        xs = jnp.roll(xs, steps - length, axis=0)
        matrices = None if matrices is None else jnp.roll(matrices, steps - length, axis=0)
    step = lambda carry, now: body(carry, now[0], now[1] if varying else matrix)
    found = lax.scan(step, start, (xs, matrices), reverse=backwards)[1]
    return found if length is None else jnp.roll(found, length - steps, axis=0)


def _smooth_scaled(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> tuple[Smoothed, Array]:
    """Forward–backward with probabilities that are scaled at every step.

    Also returns the smallest divisor: if it is not far above the smallest normal number, underflow may have mattered.
    """
    steps = likelihoods.shape[0]
    highest = jnp.max(likelihoods, axis=-1)
    highest = lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights, matrix = jnp.exp(likelihoods - highest[:, None]), jnp.exp(transitions)

    # The loop's body has few small operations, which XLA fuses into one kernel of about 30 ns a step. Everything that
    # does not depend on the previous step (the filter itself, totals) is computed after it, for all steps at once.
    def onward(message: Array, weight: Array, matrix: Array) -> tuple[Array, Array]:
        joint = message * weight
        return jnp.sum(joint[:, None] * matrix, axis=0) / jnp.sum(joint), message

    forward = _scan_chain(onward, jnp.exp(initial), weights, matrix)
    backward = _scan_chain(onward, jnp.ones_like(weights[0]), weights, matrix.mT, length)

    valid = jnp.arange(steps) < length
    joint = forward * weights
    total = jnp.sum(joint, axis=-1)
    joint = joint * backward
    overlap = jnp.where(valid, jnp.sum(joint, axis=-1), 1.0)
    marginals = _zero_padding(joint / overlap[:, None], valid)
    # ξ_t = α_t A (w β)_{t+1} / Σ, where α_t A = ahead_{t+1} and Σ = Σ (forward w β)_{t+1}.
    left = _zero_padding((forward * weights)[:-1] / total[:-1, None], valid[1:])
    right = _zero_padding((weights * backward)[1:] / overlap[1:, None], valid[1:])
    pairs = matrix * (left.T @ right if matrix.ndim == 2 else left[:, :, None] * right[:, None, :])
    log_z = jnp.sum(jnp.where(valid, jnp.log(total) + highest, 0.0))
    return Smoothed(log_z, marginals, pairs), jnp.min(jnp.where(valid, overlap, 1.0))


def _zero_padding(rows: Array, valid: Array) -> Array:
    return jnp.asarray(jnp.where(valid[:, None], rows, 0.0))


# The same with logarithms, in which nothing underflows. Log-probabilities of −∞ are replaced by a number so low that no
# sum of finite terms compensates for it, so that the loops need not treat ∞ − ∞.

_IMPOSSIBLE = -1e30


def _clip_impossible(*logs: Array) -> list[Array]:
    return [jnp.maximum(x, _IMPOSSIBLE) for x in logs]


def _log_matvec(matrix: Array, vector: Array) -> Array:
    """log Σ_i exp(v_i + M_ij)."""
    terms = vector[:, None] + matrix
    highest = lax.stop_gradient(jnp.max(terms, axis=0))
    return highest + jnp.log(jnp.sum(jnp.exp(terms - highest), axis=0))


def _max_matvec(matrix: Array, vector: Array) -> Array:
    return jnp.max(vector[:, None] + matrix, axis=0)


def _pass_messages(
    through: Callable, start: Array, matrix: Array, likelihoods: Array, length: Array | None = None
) -> Array:
    """The log-messages into each step from those before it (backwards from `length`: after it), up to a constant."""

    def onward(message: Array, likelihood: Array, matrix: Array) -> tuple[Array, Array]:
        joint = message + likelihood
        return through(matrix, joint - jnp.max(joint)), message

    return _scan_chain(onward, start, likelihoods, matrix, length)


def _smooth_logs(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Smoothed:
    initial, transitions, likelihoods = _clip_impossible(initial, transitions, likelihoods)
    forward = _pass_messages(_log_matvec, initial, transitions, likelihoods)
    backward = _pass_messages(_log_matvec, jnp.zeros_like(initial), transitions.mT, likelihoods, length)

    valid = jnp.arange(likelihoods.shape[0]) < length
    before = forward + likelihoods
    joint = before + backward
    overlap = jax.nn.logsumexp(joint, axis=-1)
    marginals = _zero_padding(jnp.exp(joint - overlap[:, None]), valid)
    after = likelihoods + backward

    def pair(inside: Array, left: Array, right: Array, matrix: Array) -> Array:
        terms = left[:, None] + matrix + right
        return jnp.asarray(jnp.where(inside, jnp.exp(terms - jax.nn.logsumexp(terms)), 0.0))

    def add(total: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + pair(*now, transitions), None

    each = valid[1:], before[:-1], after[1:]
    if transitions.ndim == 2:
        pairs, _ = lax.scan(add, jnp.zeros_like(transitions), each)
    else:
        pairs = jax.vmap(pair)(*each, transitions)
    log_z = _log_total(before, length)
    known = jnp.where(jnp.isneginf(log_z), jnp.nan, 1.0).astype(joint.dtype)
    return Smoothed(log_z, known * marginals, known * pairs)


def _log_total(joint: Array, length: Array) -> Array:
    """log Z: the sum of the maxima that the loop subtracts at each step, plus the log of the last step's total."""
    highest = jnp.max(joint, axis=-1)
    last = jax.nn.logsumexp(joint - highest[:, None], axis=-1)[length - 1]
    return jnp.where(length > 0, _restore_impossible(_sum_valid(highest, length) + last), 0.0)


def _sum_valid(values: Array, length: Array) -> Array:
    return jnp.sum(jnp.where(jnp.arange(values.shape[0]) < length, values, 0.0))


def _restore_impossible(log: Array) -> Array:
    return jnp.where(log < 0.5 * _IMPOSSIBLE, -jnp.inf, log)


def _filter(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Filtered:
    initial, transitions, likelihoods = _clip_impossible(initial, transitions, likelihoods)
    joint = _pass_messages(_log_matvec, initial, transitions, likelihoods) + likelihoods
    return Filtered(_log_total(joint, length), _restore_impossible(jax.nn.log_softmax(joint, axis=-1)))


def _viterbi(initial: Array, transitions: Array, likelihoods: Array, length: Array) -> Path:
    initial, transitions, likelihoods = _clip_impossible(initial, transitions, likelihoods)
    joint = _pass_messages(_max_matvec, initial, transitions, likelihoods) + likelihoods
    return Path(
        _trace_back(joint, transitions, length), _restore_impossible(_sum_valid(jnp.max(joint, axis=-1), length))
    )


def _sample(noise: Array, before: Array, transitions: Array, length: Array) -> Array:
    # The argmax of log p plus Gumbel noise is a draw from p.
    return _trace_back(before + noise, transitions, length)


def _trace_back(scores: Array, transitions: Array, length: Array) -> Int[Array, " T"]:
    """The states from the last to the first, each the argmax of its score plus the transition to the next state."""

    def back(bonus: Array, score: Array, matrix: Array) -> tuple[Array, Array]:
        state = jnp.argmax(score + bonus)
        return matrix[:, state], state

    path = _scan_chain(back, jnp.zeros_like(scores[0]), scores, transitions, length)
    return jnp.asarray(jnp.where(jnp.arange(scores.shape[0]) < length, path, -1))
