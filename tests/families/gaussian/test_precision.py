"""Structures form what they hold: every way to form a matrix gives the entries that the structure can hold of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bayesrule.families.gaussian.precision import DIAGONAL, FACTORED, FULL, NONE, SharedFeatures
from bayesrule.families.product import BlockStructure
from bayesrule.numerics.trees import ravel

THETA = {"a": jnp.array([0.3, -0.2]), "b": jnp.array([[0.5], [1.1]])}
SIZE = 4
MATRIX = jnp.array([[3.0, 0.5, 0.1, 0.0], [0.5, 2.0, 0.3, 0.2], [0.1, 0.3, 4.0, 0.6], [0.0, 0.2, 0.6, 1.0]])
BLOCKS = BlockStructure({"b": FULL, "a": DIAGONAL})


def dense(structure, held):
    """What a structure holds, as a matrix over the ravelled θ."""
    if structure is NONE:
        return jnp.zeros((SIZE, SIZE))
    if structure is DIAGONAL:
        return jnp.diag(ravel(held))
    if structure is FACTORED:
        return jnp.diag(held.diagonal) + held.rows.T @ held.rows
    if structure is BLOCKS:
        return jax.scipy.linalg.block_diag(jnp.diag(ravel(held["a"])), held["b"])
    return held


def kept(structure, matrix):
    """The entries of a symmetric matrix that the structure holds."""
    matrix = 0.5 * (matrix + matrix.T)
    if structure is NONE:
        return jnp.zeros_like(matrix)
    if structure is DIAGONAL:
        return jnp.diag(jnp.diag(matrix))
    if structure is BLOCKS:
        return jax.scipy.linalg.block_diag(jnp.diag(jnp.diag(matrix)[:2]), matrix[2:, 2:])
    return matrix


STRUCTURES = pytest.mark.parametrize(
    "structure", [NONE, DIAGONAL, FULL, FACTORED, BLOCKS], ids=["none", "diagonal", "full", "factored", "blocks"]
)


def random_tree(seed, *lead):
    keys = dict(zip(THETA, jax.random.split(jax.random.key(seed), len(THETA)), strict=True))
    return {name: jax.random.normal(keys[name], (*lead, *leaf.shape)) for name, leaf in THETA.items()}


@STRUCTURES
def test_matrices_and_diagonals(structure):
    np.testing.assert_allclose(
        dense(structure, structure.of_matrix(MATRIX, THETA)), kept(structure, MATRIX), atol=1e-12
    )
    diagonal = jax.tree.map(jnp.square, THETA)
    expected = kept(structure, jnp.diag(ravel(diagonal)))
    np.testing.assert_allclose(dense(structure, structure.of_diagonal(diagonal)), expected, atol=1e-12)


@STRUCTURES
def test_hessians(structure):
    gradient = lambda vector: MATRIX @ vector + 0.1 * jnp.sin(vector)
    expected = kept(structure, jax.jacfwd(gradient)(ravel(THETA)))
    np.testing.assert_allclose(dense(structure, structure.hessian(gradient, THETA)), expected, atol=1e-12)


@STRUCTURES
def test_sandwiches(structure):
    jacobian = random_tree(0, 6, 2)
    root = jax.random.normal(jax.random.key(1), (6, 2, 2))
    middle = root @ jnp.swapaxes(root, 1, 2)
    flat = ravel(jacobian, 2)
    expected = kept(structure, jnp.einsum("bkp,bkl,blq->pq", flat, middle, flat))
    np.testing.assert_allclose(dense(structure, structure.of_sandwich(jacobian, middle)), expected, atol=1e-12)


@pytest.mark.parametrize("structure", [NONE, DIAGONAL, FULL, BLOCKS], ids=["none", "diagonal", "full", "blocks"])
def test_outer_products(structure):
    """Also of vectors whose outer product is not positive, which rows cannot hold."""
    first, second = random_tree(2), random_tree(3)
    expected = kept(structure, jnp.outer(ravel(first), ravel(second)))
    np.testing.assert_allclose(dense(structure, structure.outer(first, second)), expected, atol=1e-12)
    vectors, weights = random_tree(4, 5), jnp.array([0.1, 0.2, 0.3, 0.25, 0.15])
    flat = ravel(vectors, 1)
    expected = kept(structure, jnp.einsum("j,jp,jq->pq", weights, flat, flat))
    np.testing.assert_allclose(dense(structure, structure.outer_sum(vectors, weights)), expected, atol=1e-12)


@STRUCTURES
def test_sums_and_averages(structure):
    one, other = (structure.of_matrix(scale * MATRIX, THETA) for scale in (1.0, 3.0))
    np.testing.assert_allclose(dense(structure, structure.add(one, other)), 4 * kept(structure, MATRIX), atol=1e-12)
    stack = jax.tree.map(lambda *x: jnp.stack(x), one, other)
    average = structure.average(stack, jnp.array([0.25, 0.75]))
    np.testing.assert_allclose(dense(structure, average), 2.5 * kept(structure, MATRIX), atol=1e-12)


@pytest.mark.parametrize(("structure", "form"), [(DIAGONAL, "diagonal"), (FULL, "sandwich"), (BLOCKS, "sandwich")])
def test_a_structure_picks_the_form_of_gauss_newton(structure, form):
    class Forms:
        def diagonal(self):
            return "diagonal"

        def kronecker(self, of_factors):
            return "kronecker"

        def sandwich(self):
            return "sandwich"

    assert structure.gauss_newton(Forms()) == form


def test_shared_features_are_the_jacobian_of_a_matrix_of_weights():
    """f = φᵀΘ: the same outputs, gradients, sandwiches and covariances as with the Jacobian written out."""
    features = jax.random.normal(jax.random.key(5), (6, 2))
    like = jnp.zeros((2, 2))
    shared = SharedFeatures(features, like)
    jacobian = jnp.einsum("bd,kl->bkdl", features, jnp.eye(2))
    flat = ravel(jacobian, 2)
    vector = jnp.array([0.3, -1.0, 0.2, 0.7])
    np.testing.assert_allclose(shared.outputs(vector), flat @ vector, atol=1e-12)
    slopes = jax.random.normal(jax.random.key(6), (6, 2))
    np.testing.assert_allclose(
        ravel(shared.transposed_product(slopes)), jnp.einsum("bkp,bk->p", flat, slopes), atol=1e-12
    )
    middle = jnp.broadcast_to(jnp.array([[2.0, 0.5], [0.5, 1.0]]), (6, 2, 2))
    np.testing.assert_allclose(FULL.of_sandwich(shared, middle), FULL.of_sandwich(jacobian, middle), atol=1e-12)
    expected = jnp.einsum("bkp,pq,blq->bkl", flat, MATRIX, flat)
    np.testing.assert_allclose(shared.covariance(MATRIX), expected, atol=1e-12)
