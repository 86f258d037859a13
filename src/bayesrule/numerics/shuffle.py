r"""Rows in random order, without an array that holds the order.

Sorting four million random numbers takes longer than an epoch of small steps. Here the row at a place of the shuffled
order is a function of the key and the place alone, so that a batch costs what its own rows cost, whatever their number
in all, and nothing is kept between two batches.

The function is a Feistel network: a number is cut into two halves, and each round adds a hash of one half to the other.
That is a permutation of all numbers of so many bits, whatever the hash. Numbers that are no rows are mapped again until
they are (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): as the numbers are at most twice as many
as the rows, that takes two rounds on average.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from .random import Key

_ROUNDS = 6  # Four make the network as good as its hash (Luby and Rackoff); this hash is a quick one.


def shuffled(key: Key, places: Int[Array, " M"], rows: int) -> Int[Array, " M"]:
    """The rows at these places of a random order of `rows` rows.

    Args:
        key: names the order.
        places: numbers from 0 to rows − 1.
        rows: the number of rows, below 2³¹.

    >>> sorted(int(row) for row in shuffled(jax.random.key(0), jnp.arange(10), 10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    bits = max(2, (rows - 1).bit_length())
    words = jax.random.bits(key, (_ROUNDS,), jnp.uint32)
    once = lambda numbers: _permuted(numbers, words, bits)

    def again(numbers: Array) -> Array:
        return jnp.where(numbers < rows, numbers, once(numbers))

    numbers = once(places.astype(jnp.uint32))
    return jax.lax.while_loop(lambda numbers: jnp.any(numbers >= rows), again, numbers).astype(places.dtype)


def _permuted(numbers: UInt[Array, " M"], words: UInt[Array, " R"], bits: int) -> UInt[Array, " M"]:
    """A permutation of the numbers of `bits` bits; the halves change their widths with their roles if that is odd."""
    widths = bits - bits // 2, bits // 2
    left, right = numbers >> widths[1], numbers & jnp.uint32((1 << widths[1]) - 1)
    for turn in range(_ROUNDS):
        width = widths[turn % 2]
        left, right = right, (left + _hash(right, words[turn])) & jnp.uint32((1 << width) - 1)
    # After an even number of rounds the halves have their first widths again.
    return (left << widths[1]) | right


def _hash(numbers: UInt[Array, " M"], word: UInt[Array, ""]) -> UInt[Array, " M"]:
    """Well-mixed words of numbers and a random word: two rounds of xor-shift and multiply (Wellons' `lowbias32`)."""
    x = numbers * jnp.uint32(0x9E3779B1) + word
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
    return x ^ (x >> 15)
