"""Sparse Hessians by few products: exact for every pattern, and checked where the zeros are not zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from bayesrule.inference.density import Density, average, expand
from bayesrule.inference.sparsity import color

SIZE = 60


def arrow(shared):
    pattern = np.eye(SIZE, dtype=bool)
    pattern[:shared] = pattern[:, :shared] = True
    return pattern


def band(width):
    index = np.arange(SIZE)
    return np.abs(index[:, None] - index) <= width


def blocks(size):
    return np.kron(np.eye(SIZE // size, dtype=bool), np.ones((size, size), bool))


def crossed():
    """Two groupings of the same rows: every number of the first meets a few of the second."""
    pattern = np.eye(SIZE, dtype=bool)
    rng = np.random.default_rng(1)
    for one, two in zip(rng.integers(0, 30, 60), rng.integers(30, 60, 60), strict=True):
        pattern[one, two] = pattern[two, one] = True
    return pattern


# The most products, of which one is for checking, rounded up to a multiple of eight.
PATTERNS = {
    "diagonal": (np.eye(SIZE, dtype=bool), 8),
    "arrow": (arrow(5), 8),
    "wide arrow": (arrow(12), 16),
    "band": (band(3), 8),
    "arrow and band": (arrow(3) | band(1), 8),
    "blocks": (blocks(6), 8),
    "crossed": (crossed(), 24),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_recovery_is_exact(name):
    pattern, most = PATTERNS[name]
    found = color(pattern)
    assert found is not None
    assert len(found.seeds) <= most
    rng = np.random.default_rng(0)
    matrices = np.where(pattern, rng.normal(size=(3, SIZE, SIZE)), 0.0)
    matrices = matrices + np.swapaxes(matrices, 1, 2)
    recovered, right = found.recover(found.seeds @ matrices, 1e-12)
    assert right
    assert_allclose(recovered, matrices, rtol=0, atol=0)


def test_a_full_matrix_is_not_worth_coloring():
    assert color(np.ones((SIZE, SIZE), bool)) is None


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_an_entry_that_was_taken_for_zero_is_noticed(size):
    found = color(arrow(2))
    matrix = np.where(arrow(2), 1.0, 0.0)
    matrix[20, 40] = matrix[40, 20] = size
    assert not found.recover(found.seeds @ matrix, 1e-6)[1]


def switched(x, scale):
    """Independent numbers where the first is below 1; above, neighbours meet."""
    apart = -0.5 * jnp.sum(x**2) - jnp.sum(jnp.cosh(0.1 * x))
    return apart - jnp.where(x[0] > 1.0, scale * jnp.sum(x[1:] ** 2 * x[:-1] ** 2), 0.0)


@pytest.mark.extended
def test_hessians_are_right_where_the_zeros_are_others():
    """Looked at where numbers are independent, evaluated where they are not: the whole Hessian is computed there."""
    scale = jnp.asarray(0.3)
    density = Density(switched, (scale,), jnp.zeros(SIZE), lambda x, scale: x)
    points = np.random.default_rng(0).normal(size=(5, SIZE))
    points[:, 0] = [0.0, 0.5, -3.0, 2.0, 3.0]
    sparse = density.with_sparse_hessian(points[:3])
    assert sparse.products == 8
    exact = jax.vmap(jax.hessian(lambda x: -switched(x, scale)))(points)
    for part in (slice(0, 3), slice(0, 5)):
        assert_allclose(expand(sparse, points[part]).hessian, exact[part], rtol=1e-10, atol=1e-12)
        assert_allclose(average(sparse, points[part]).hessian, np.mean(exact[part], axis=0), rtol=1e-10, atol=1e-12)
    gradients = jax.vmap(jax.grad(lambda x: -switched(x, scale)))(points)
    assert_allclose(average(sparse, points).gradient, np.mean(gradients, axis=0), rtol=1e-10)
