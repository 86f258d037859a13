"""Rows in random order: every order is a permutation, and orders are as even as random ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from bayesrule.numerics.shuffle import shuffled


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 1000, 2**13 + 1, 2**14, 70_001])
def test_an_order_has_every_row_once(rows):
    order = np.asarray(jax.jit(shuffled, static_argnums=2)(jax.random.key(rows), jnp.arange(rows), rows))
    np.testing.assert_array_equal(np.sort(order), np.arange(rows))


@pytest.mark.extended
def test_a_batch_is_a_piece_of_the_order_and_keys_give_different_ones():
    rows, key = 20_000, jax.random.key(3)
    whole = shuffled(key, jnp.arange(rows), rows)
    np.testing.assert_array_equal(shuffled(key, jnp.arange(500, 600), rows), whole[500:600])
    other = shuffled(jax.random.key(4), jnp.arange(rows), rows)
    assert np.mean(np.asarray(whole) == np.asarray(other)) < 10 / rows


@pytest.mark.extended
def test_every_row_is_equally_likely_at_every_place():
    rows, orders = 100, 5000
    keys = jax.random.split(jax.random.key(0), orders)
    drawn = np.asarray(jax.vmap(lambda key: shuffled(key, jnp.arange(rows), rows))(keys))
    counts = np.stack([np.bincount(drawn[:, place], minlength=rows) for place in range(rows)])
    expected = orders / rows
    assert stats.chi2.sf(np.sum((counts - expected) ** 2) / expected, (rows - 1) ** 2) > 1e-3
    steps = np.bincount((drawn[:, 1] - drawn[:, 0]) % rows, minlength=rows)[1:]  # neighbours are not related
    assert stats.chisquare(steps).pvalue > 1e-3


def test_batches_of_sorted_rows_are_as_even_as_random_ones():
    rows, size = 40_000, 200
    order = np.asarray(shuffled(jax.random.key(1), jnp.arange(rows), rows))
    means = order.reshape(-1, size).mean(axis=1)
    ratio = means.std() / (rows / np.sqrt(12 * size))
    assert 0.8 < ratio < 1.2  # 200 batches: a standard error of 5 %
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(rows)
