r"""Hidden Markov chains as plain functions of arrays: log Z, marginals, pair counts, the filter, the best path, draws.

The prior of a path is $p(z) = π_{z_1} \prod_t A_{z_t z_{t+1}}$, its likelihood $\exp \sum_t ℓ_t(z_t)$, and q(z) ∝
$p(z) e^{ℓ(z)}$ its posterior. The functions share these arguments:

- `log_initial` is log π, (K,);
- `log_transitions` is log A, (K, K), from the row's state to the column's; (T−1, K, K) where it changes with time;
- `log_likelihoods` is ℓ, (T, K), or (…, T, K) for a batch of sequences;
- `lengths`, (…), says how many of the T steps a sequence has; the steps after them are padding, and are ignored.

In a batch, π and A may have the batch's axes in front, (…, K), (…, K, K) or (…, T−1, K, K), one for each sequence, or
none of them, and then all sequences share them. With a single batch axis (B, T, K), transitions of three axes are
always read as (B, K, K), one matrix for each sequence: transitions that change with time and are shared have to be
broadcast to (B, T−1, K, K).

Neither π nor the rows of A need to add up to 1, and either may have zeros (−∞).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .programs import compiled
from .random import Key


class Smoothed(NamedTuple):
    """log Z and its derivatives.

    Attributes:
        log_normalizer: log Z.
        marginals: each state's probability at each step; 0 for padding.
        pairs: the expected number of transitions from state i to state j, (…, K, K); or, where the transitions change
            with time, the probability of (i, j) at each of them, (…, T−1, K, K).
    """

    log_normalizer: Float[Array, "..."]
    marginals: Float[Array, "... T K"]
    pairs: Float[Array, "..."]


@compiled
def smooth(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Smoothed:
    r"""Forward–backward: $\log Z$, $q(z_t = k)$ and $\sum_t q(z_t = i, z_{t+1} = j)$, for $q(z) ∝ p(z) e^{ℓ(z)}$.

    Messages are probabilities, scaled at every step. Where underflow may have mattered (a state that was ruled out and
    becomes possible again, which needs zeros in the transitions), everything is computed again with logarithms, at
    several times the cost. If all paths are impossible, log Z = −∞ and the marginals are NaN.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.2], [0.9, 0.2]])
    >>> initial, transitions = jnp.array([0.5, 0.5]), jnp.array([[0.7, 0.3], [0.3, 0.7]])
    >>> result = smooth(jnp.log(initial), jnp.log(transitions), jnp.log(likelihoods))
    >>> float(result.log_normalizer), result.marginals[:, 0].tolist()
    (-3.3725, [0.8673, 0.8204, 0.3075, 0.8204, 0.8673])
    """
    arguments, over_sequences = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    scaled, smallest_divisor = over_sequences(_smooth_scaled)(*arguments)
    limits = jnp.finfo(smallest_divisor.dtype)
    # A divisor of NaN compares as False, so that its sequence too is computed again with logarithms.
    accurate = jnp.all(smallest_divisor > limits.tiny / limits.eps**2)
    result = lax.cond(accurate, lambda *_: scaled, over_sequences(_smooth_logs), *arguments)
    return _unflatten_batch(result, log_likelihoods)


@jax.custom_jvp
def log_normalizer(
    log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any
) -> Float[Array, "..."]:
    r"""$\log Z = \log \sum_z p(z) e^{ℓ(z)}$, whose derivatives are `smooth`'s marginals and pair counts."""
    return smooth(log_initial, log_transitions, log_likelihoods, lengths).log_normalizer


@log_normalizer.defjvp
def _log_normalizer_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    result = smooth(*primals)
    initial, transitions, likelihoods, _ = tangents
    slope = jnp.sum(result.marginals[..., 0, :] * initial, axis=-1)
    slope = slope + jnp.sum(result.marginals * likelihoods, axis=(-2, -1))
    pair_axes = tuple(range(-(result.pairs.ndim - result.log_normalizer.ndim), 0))
    return result.log_normalizer, slope + jnp.sum(result.pairs * transitions, axis=pair_axes)


class Filtered(NamedTuple):
    """log Z, and each state's log-probability given the likelihoods up to and including each step."""

    log_normalizer: Float[Array, "..."]
    log_probabilities: Float[Array, "... T K"]


@compiled
def filter_forward(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Filtered:
    r"""The forward algorithm, in logarithms: $\log p(z_t = k \mid y_{1:t})$, where $ℓ_t(k) = \log p(y_t \mid z_t = k)$.

    >>> import jax.numpy as jnp
    >>> result = filter_forward(jnp.log(jnp.array([0.5, 0.5])), jnp.zeros((2, 2)), jnp.log(jnp.array([[0.9, 0.1]])))
    >>> jnp.exp(result.log_probabilities).tolist()
    [[0.9, 0.1]]
    """
    arguments, over_sequences = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    return _unflatten_batch(over_sequences(_filter)(*arguments), log_likelihoods)


class Path(NamedTuple):
    """The most probable states (−1 for padding), and log p(z) + ℓ(z) of them."""

    states: Int[Array, "... T"]
    log_probability: Float[Array, "..."]


@compiled
def best_path(log_initial: Array, log_transitions: Array, log_likelihoods: Array, lengths: Any = None) -> Path:
    r"""Viterbi's algorithm: $\arg\max_z \log p(z) + ℓ(z)$, and that maximum.

    >>> import jax.numpy as jnp
    >>> transitions = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    >>> best_path(jnp.zeros(2), transitions, jnp.array([[0.0, 1.0], [0.1, 0.0]])).states.tolist()
    [1, 1]
    """
    arguments, over_sequences = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    return _unflatten_batch(over_sequences(_viterbi)(*arguments), log_likelihoods)


@compiled(static="shape")
def sample_paths(
    key: Key,
    log_initial: Array,
    log_transitions: Array,
    log_likelihoods: Array,
    lengths: Any = None,
    shape: tuple[int, ...] = (),
) -> Int[Array, "*S ... T"]:
    """Draw paths from q, backwards from the last filtered state; padding is −1."""
    (*rest, lengths), over_sequences = _flatten_batch(log_initial, log_transitions, log_likelihoods, lengths)
    noise = jax.random.gumbel(key, (*shape, *log_likelihoods.shape), log_likelihoods.dtype)
    steps, states = log_likelihoods.shape[-2:]
    batch = rest[2].shape[:-2]
    draws = noise.reshape(-1, *batch, steps, states) if batch else noise.reshape(-1, steps, states)
    filtered = over_sequences(_filter)(*rest, lengths).log_probabilities
    axes = (0, 0, over_sequences.transitions_axis, 0)
    draw_once = lambda noise: over_sequences(_sample, axes)(noise, filtered, rest[1], lengths)
    return jax.vmap(draw_once)(draws).reshape((*shape, *log_likelihoods.shape[:-1]))


# The batch axes in front of (T, K), of which there may be none, one or many, are flattened to one.


class _OverSequences(NamedTuple):
    """Maps a function of one sequence over the flattened batch axis.

    Attributes:
        sequences: how many there are; None if there is no batch axis.
        initial_axis: 0 if each sequence has its own π, None if they share it.
        transitions_axis: the same for A.
    """

    sequences: int | None
    initial_axis: int | None
    transitions_axis: int | None

    def __call__(self, function: Callable[..., Any], axes: tuple[Any, ...] | None = None) -> Callable[..., Any]:
        """The mapped function; `axes`, as in `jax.vmap`, are by default those of (π, A, ℓ, length)."""
        in_axes = (self.initial_axis, self.transitions_axis, 0, 0) if axes is None else axes

        def mapped(*arrays: Array) -> Any:
            if self.sequences is None:
                return function(*arrays)
            if self.sequences > 1:
                return jax.vmap(function, in_axes)(*arrays)
            # A single sequence runs without a batch axis, because an axis of length 1 makes XLA's loops slower.
            alone = (x if axis is None else x[0] for x, axis in zip(arrays, in_axes, strict=True))
            return jax.tree.map(lambda x: x[None], function(*alone))

        return mapped


def _flatten_batch(
    initial: Any, transitions: Any, likelihoods: Any, lengths: Any
) -> tuple[tuple[Any, ...], _OverSequences]:
    """Flatten the batch axes of all arguments; also return the transform that maps a function over the sequences."""
    if likelihoods.ndim < 2 or likelihoods.shape[-2] == 0:
        raise ValueError(f"Log-likelihoods are (…, T, K), for each step and state, got shape {likelihoods.shape}.")
    *batch, steps, states = likelihoods.shape
    own = transitions.ndim - len(batch) in (2, 3)  # Each sequence has transitions of its own.
    inner = transitions.shape[len(batch) if own else 0 :]
    if inner not in ((states, states), (steps - 1, states, states)) or initial.shape[-1:] != (states,):
        raise ValueError(
            f"A chain over {states} states and {steps} steps has initial ({states},) and transitions ({states}, "
            f"{states}) or ({steps - 1}, {states}, {states}), got {initial.shape} and {transitions.shape}."
        )
    if own and transitions.shape[: len(batch)] != tuple(batch):
        by_time = (*batch, steps - 1, states, states)
        raise ValueError(
            f"For a batch of shape {tuple(batch)}, log_transitions of shape {transitions.shape} are read as those of "
            f"each sequence, and need the batch's axes in front: {(*batch, states, states)}, or {by_time} if they "
            f"change with time. If all sequences share them, pass jnp.broadcast_to(log_transitions, {by_time})."
        )
    lengths = jnp.broadcast_to(steps if lengths is None else jnp.asarray(lengths), tuple(batch))
    if not batch:
        return (initial, transitions, likelihoods, lengths), _OverSequences(None, None, None)
    flat = lambda x, inside: x.reshape(-1, *x.shape[x.ndim - inside :])
    own_initial = initial.ndim > 1
    arguments = (
        flat(jnp.broadcast_to(initial, (*batch, states)), 1) if own_initial else initial,
        flat(transitions, len(inner)) if own else transitions,
        flat(likelihoods, 2),
        lengths.reshape(-1),
    )

    count = arguments[2].shape[0]
    return arguments, _OverSequences(count, 0 if own_initial else None, 0 if own else None)


def _unflatten_batch(tree: Any, likelihoods: Array) -> Any:
    batch = likelihoods.shape[:-2]
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), tree) if batch else tree


# One sequence.


def _scan_chain(body: Callable[..., Any], start: Array, xs: Array, matrix: Array, length: Array | None = None) -> Array:
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
    emitted = lax.scan(step, start, (xs, matrices), reverse=backwards)[1]
    return emitted if length is None else jnp.roll(emitted, length - steps, axis=0)


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
    # ξ_t(i, j) = α_t(i) A_ij w_{t+1}(j) β_{t+1}(j), divided by its sum over i and j.
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
    through: Callable[..., Any], start: Array, matrix: Array, likelihoods: Array, length: Array | None = None
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

    neighbours = valid[1:], before[:-1], after[1:]
    if transitions.ndim == 2:
        pairs, _ = lax.scan(add, jnp.zeros_like(transitions), neighbours)
    else:
        pairs = jax.vmap(pair)(*neighbours, transitions)
    log_z = _log_total(before, length)
    nan_if_impossible = jnp.where(jnp.isneginf(log_z), jnp.nan, 1.0).astype(joint.dtype)
    return Smoothed(log_z, nan_if_impossible * marginals, nan_if_impossible * pairs)


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
