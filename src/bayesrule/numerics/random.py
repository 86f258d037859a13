"""Standard normals as a cheap pure function of a key and a counter, which XLA fuses into the step that uses them.

`jax.random.normal` costs ten Adam steps: XLA does not fuse its cipher, so it stores several arrays as large as the
result. Here the number at counter i is Q(h(i)), a hash and then the normal quantile, about ninety plain vector
instructions and no array besides the result. θ = m + ε/√s is then one loop that reads m and s and writes θ.

**The hash** is four rounds of xor-shift and multiply. One word of the key says where the counter starts; another is
added after the first round, ahead of the three of Wellons' `triple32`, the mixer of 32 bits with the least measured
bias: so two keys whose counters overlap share nothing. (With two rounds after that word, or three and no xor-shift
ahead of them, the tests see keys that differ in its high bits.) The counter is added to the result: without it the
stream is a permutation and never repeats a word, which random words do. All this is a fifth of the cost. It is no
cipher: whoever sees the numbers can find the key.

**The quantile** is x·R(−log₂(1−x²)) with R the ratio √2·erf⁻¹(x)/x, which is smooth out to the last of 2³² words
(6.3 sd), so one rational function serves the centre and the tails: no branch, and neither the logarithm nor the
error function of the library, which take longer than everything here. 1−x is taken from the integer, not from x, so
that the tails keep all bits. Both signs are exact mirror images and no word gives 0, an infinity or a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import ndtri
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .pytree import PyTree

Key = PRNGKeyArray
"""One JAX random key, as made by `jax.random.key`; functions that need no randomness take `Key | None`."""

# The first round's is of Wellons' `lowbias32`, the others of his `triple32`, with its shifts.
_MULTIPLIERS = (0x21F0AAAD, 0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
# log₂(1+f) = f·p(f) for √½ ≤ 1+f ≤ √2, minimax: absolute error 3e-7, a fifth of that in the normal.
_LOG = (1.44269973, -0.72137587, 0.48046502, -0.35896188, 0.29726277, -0.27269771, 0.17063356)
# √2·erf⁻¹(x)/x in t = −log₂(1−x²), 0 ≤ t ≤ 31.2, minimax: relative error 1.2e-7. All positive: nothing cancels.
_TOP = (1.25331428, 3.13996962e-01, 4.32505478e-02, 3.96559574e-03, 2.31549375e-04, 4.67107520e-06)
_BOTTOM = (1.0, 6.90698004e-02, 1.57085324e-02, 7.63868850e-04, 3.91804412e-05, 1.60442565e-07)
# One row of words names a stream: two for each hash that a number takes (float64 takes two), two for counters past 2³².
_WORDS = 6
# Leaves of at most so many numbers (128 kB) are drawn together and stored.
_SMALL = 2**15


def normal(key: Key, shape: Sequence[int] = (), dtype: Any = jnp.float32, *, offset: int | Array = 0) -> Array:
    """Independent N(0, 1) numbers: those at `offset`, `offset` + 1, … of the key's stream.

    A key names a stream of 2⁶⁴ numbers. The pieces of a stream equal the whole:

    >>> key = jax.random.key(0)
    >>> whole, piece = normal(key, (1000,)), normal(key, (10,), offset=990)
    >>> bool(jnp.all(whole[990:] == piece))
    True

    Args:
        key: a JAX key of any kind; consumed, as by `jax.random.normal`. To draw the same numbers again instead of
            keeping them, pass `jax.random.clone(key)`.
        shape: of the result, at most 2³² numbers.
        dtype: float32 (32 random bits a number, at most 6.3 sd), float64 (64 bits, 9.1 sd, eight times slower), or
            a narrower type, rounded from float32.
        offset: the first number's place in the stream, a Python integer below 2⁶⁴ or an integer scalar.
    """
    shape, dtype = tuple(shape), _checked(dtype)
    return _stream(jax.random.bits(key, (_WORDS,), jnp.uint32), *_split(offset, math.prod(shape)), shape, dtype)


def normals(key: Key, tree: PyTree, lead: Sequence[int] = ()) -> PyTree:
    """Independent N(0, 1) numbers like `tree`, each leaf from its own stream, with leading axes `lead` for samples.

    A leaf needs only a shape and a dtype. One draw from the key's own generator names all the streams. Small leaves
    share one and are stored, which spares XLA a third of its time on the hundreds of biases and scales of a network.

    >>> noise = normals(jax.random.key(0), {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}, lead=(4,))
    >>> {name: leaf.shape for name, leaf in noise.items()}
    {'b': (4, 2), 'w': (4, 3, 2)}
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [(*lead, *jnp.shape(leaf)) for leaf in leaves]
    kinds = [_checked(jnp.result_type(leaf)) for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    pools: dict[np.dtype, list[int]] = {}
    for place, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if size <= _SMALL:
            pools.setdefault(kind, []).append(place)
    words = jax.random.bits(key, (len(leaves) + len(pools), _WORDS), jnp.uint32)
    streams = {
        place: _stream(words[place], *_split(0, size), shapes[place], kinds[place])
        for place, size in enumerate(sizes)
        if size > _SMALL
    }
    for row, (kind, places) in enumerate(pools.items(), len(leaves)):
        total = sum(sizes[place] for place in places)
        pool = _stream(words[row], *_split(0, total), (total,), kind)
        # Or XLA copies the loop into each reader. (On a CPU it drops the barrier, but repeats no division anyway.)
        pieces = jnp.split(lax.optimization_barrier(pool), np.cumsum([sizes[place] for place in places])[:-1])
        streams |= {place: piece.reshape(shapes[place]) for place, piece in zip(places, pieces, strict=True)}
    return jax.tree.unflatten(structure, [streams[place] for place in range(len(leaves))])


def shifted_normals(key: Key, bits: Array, dtype: Any = jnp.float32) -> Array:
    """Normal quantiles of evenly spaced binary fractions under a random digital shift.

    Args:
        key: names the shift; consumed.
        bits: the leading 32 binary digits of the points, (S, D), such as Sobol's. Every column is combined by exclusive
            or with 32 random digits of its own, after which each entry is uniform, and the entries are as evenly spaced
            as before.
        dtype: of the result.
    """
    dtype = _checked(dtype)
    shift, below = jax.random.split(key)
    bits = bits ^ jax.random.bits(shift, bits.shape[1:], jnp.uint32)
    if dtype == jnp.float64:  # The digits after the first 32 are those of independent uniform numbers.
        return _wide_quantile(bits, jax.random.bits(below, bits.shape, jnp.uint32))
    return _quantile(bits).astype(dtype)


def _checked(dtype: Any) -> np.dtype:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"A normal number needs a real floating type, not {dtype}: convert the parameters first.")
    return dtype


def _split(offset: int | Array, size: int) -> tuple[ArrayLike, ArrayLike, bool]:
    """The offset's low and high 32 bits, and whether a counter may carry from the one to the other."""
    if size > 2**32:
        raise ValueError(f"One array takes at most 2³² numbers of a stream, not {size}: draw parts with `offset`.")
    if isinstance(offset, int):
        if not 0 <= offset < 2**64:
            raise ValueError(f"offset is a place in a stream of 2⁶⁴ numbers, from 0: not {offset}.")
        low, high = offset % 2**32, offset // 2**32
        # Passed as NumPy scalars, which have no weak type: one compiled program serves all offsets.
        return np.uint32(low), np.uint32(high), low + size > 2**32
    offset = jnp.asarray(offset)
    wide = offset.dtype.itemsize == 8
    return offset.astype(jnp.uint32), (offset >> 32 if wide else jnp.zeros_like(offset)).astype(jnp.uint32), True


@partial(jax.jit, static_argnums=(3, 4, 5))
def _stream(
    words: Array, low: ArrayLike, high: ArrayLike, carries: bool, shape: tuple[int, ...], dtype: np.dtype
) -> Array:
    """The numbers at counters (high, low), (high, low + 1), … of the stream that `words` name.

    Compiled even when called from outside any `jit`, so that XLA contracts products and sums as it does inside one.
    """
    low, high = jnp.asarray(low), jnp.asarray(high)
    count = low + lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    # Where nothing can carry the high word is a scalar, and so are the products below: they leave the loop.
    high = high + (count < low).astype(jnp.uint32) if carries else high
    start, turn = high * (words[4] | 1), high * (words[5] | 1)
    first = _hash(count, words[0] + start, words[1] + turn)
    if dtype == jnp.float64:
        return _wide_quantile(first, _hash(count, words[2] + start, words[3] + turn))
    return _quantile(first).astype(dtype)


def _hash(count: Array, start: Array, turn: Array) -> Array:
    """32 random bits for each counter, keyed by the two words `start` and `turn`."""
    place = count + start
    x = (place ^ (place >> 16)) * np.uint32(_MULTIPLIERS[0]) + turn
    x = (x ^ (x >> 17)) * np.uint32(_MULTIPLIERS[1])
    x = (x ^ (x >> 11)) * np.uint32(_MULTIPLIERS[2])
    x = (x ^ (x >> 15)) * np.uint32(_MULTIPLIERS[3])
    return (x ^ (x >> 14)) + place


def _quantile(bits: Array) -> Array:
    """The float32 normal at x = (h + ½)/2³¹, h the bits as a signed integer."""
    h = lax.bitcast_convert_type(bits, jnp.int32)
    size = h ^ (h >> 31)  # |h + ½| − ½, a whole number from 0 to 2³¹ − 1
    x = size.astype(jnp.float32) * np.float32(2.0**-31) + np.float32(2.0**-32)
    rest = (size ^ 0x7FFFFFFF).astype(jnp.float32) * np.float32(2.0**-31) + np.float32(
        2.0**-32
    )  # 1 − x, to all its bits
    t = -_log2(rest * (2 - rest))
    signed = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) | (h & np.int32(-(2**31))), jnp.float32)
    return signed * _polynomial(_TOP, t) / _polynomial(_BOTTOM, t)


def _log2(y: Array) -> Array:
    """log₂ of positive normal float32 numbers: the exponent, and a polynomial in what is left."""
    bits = lax.bitcast_convert_type(y, jnp.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # counted from √½, so that what is left lies about 1
    f = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1
    return exponent.astype(jnp.float32) + f * _polynomial(_LOG, f)


def _polynomial(coefficients: tuple[float, ...], t: Array) -> Array:
    value = jnp.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * t + np.float32(coefficient)
    return value


def _wide_quantile(bits: Array, more: Array) -> Array:
    """The float64 normal from 64 bits: a sign and the tail's probability (k + ½)/2⁶⁴ to all its bits."""
    h = lax.bitcast_convert_type(bits, jnp.int32)
    rest = (h ^ (h >> 31)) ^ 0x7FFFFFFF
    tail = (rest.astype(jnp.float64) * 2.0**32 + more.astype(jnp.float64) + 0.5) * 2.0**-64
    return jnp.where(h < 0, 1.0, -1.0) * ndtri(tail)
