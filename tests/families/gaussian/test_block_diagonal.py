"""`BlockDiagonalGaussian` against the full Gaussian with the same precision, and its steps against its columns'."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.families.gaussian.block_diagonal import BLOCKS, from_columns, to_columns
from bayesrule.families.gaussian.precision import SharedFeatures
from bayesrule.numerics.trees import ravel
from bayesrule.steps.step import Step

COLUMNS, SIZE = 3, 3  # three outputs, with an intercept and two weights each
MEAN = {"b": jnp.array([0.3, -0.1, 0.5]), "w": jnp.sin(jnp.arange(6.0)).reshape(2, COLUMNS)}
ROOTS = jnp.cos(jnp.arange(27.0)).reshape(COLUMNS, SIZE, SIZE)
Q = blr.BlockDiagonalGaussian(MEAN, ROOTS @ ROOTS.mT + jnp.eye(SIZE))
DENSE = blr.Gaussian(MEAN, jnp.linalg.inv(Q.covariance()))
THETA = jax.tree.map(lambda m: m + 0.2, MEAN)


def test_columns_are_along_the_last_axis():
    columns = to_columns(MEAN, MEAN)
    np.testing.assert_array_equal(columns[1], jnp.array([MEAN["b"][1], *MEAN["w"][:, 1]]))
    jax.tree.map(np.testing.assert_array_equal, from_columns(columns, MEAN), MEAN)


def test_it_is_the_full_gaussian_with_the_same_precision():
    for mine, full in (
        (Q.log_prob(THETA), DENSE.log_prob(THETA)),
        (Q.entropy(), DENSE.entropy()),
        (ravel(Q.variance()), ravel(DENSE.variance())),
        (ravel(Q.times(THETA)), ravel(DENSE.times(THETA))),
        (ravel(Q.solve(THETA)), ravel(DENSE.solve(THETA))),
        (BLOCKS.of_matrix(DENSE.precision, MEAN), Q.precision),
        (Q.prior_trace(DENSE), DENSE.prior_trace(DENSE)),
        (DENSE.kl(Q), 0.0),
        (Q.inner(Q.natural(), Q.statistics(THETA)), DENSE.inner(DENSE.natural(), DENSE.statistics(THETA))),
    ):
        np.testing.assert_allclose(mine, full, rtol=1e-10, atol=1e-10)


def test_parameters_go_both_ways():
    for other in (Q.with_natural(Q.natural()), Q.with_expectation(Q.expectation())):
        np.testing.assert_allclose(ravel(other.mean), ravel(MEAN), atol=1e-12)
        np.testing.assert_allclose(other.precision, Q.precision, rtol=1e-10)
    natural = Q.uncoordinates(Q.coordinates(Q.natural()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), natural, Q.natural())
    # The natural gradient is F⁻¹ times the gradient in λ.
    gradient = Q.natural_gradient(lambda q: q.entropy())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-8, atol=1e-10), gradient, Q.natural())


@pytest.mark.extended
def test_draws_have_the_mean_and_the_variance():
    draws = Q.sample(jax.random.key(0), (20_000,))
    for draw, m, v in zip(*(jax.tree.leaves(tree) for tree in (draws, Q.mean, Q.variance())), strict=True):
        assert jnp.all(jnp.abs(draw.mean(axis=0) - m) < 5 * jnp.sqrt(v / 20_000))
        np.testing.assert_allclose(draw.var(axis=0), v, rtol=0.06)


def test_shared_features_give_what_written_out_jacobians_give():
    x = jnp.cos(jnp.arange(10.0)).reshape(5, 2)
    features = jnp.concatenate([jnp.ones((5, 1)), x], axis=1)
    scores = lambda theta, row: row @ theta["w"] + theta["b"]
    jacobian = jax.vmap(jax.jacrev(scores), (None, 0))(MEAN, x)
    shared = SharedFeatures(features, MEAN)
    middle = 1 + jnp.sin(jnp.arange(15.0)).reshape(5, COLUMNS) ** 2
    matrices = middle[:, :, None] * jnp.eye(COLUMNS)
    covariance = Q.output_covariance(jacobian)
    np.testing.assert_allclose(Q.output_covariance(shared), jnp.diagonal(covariance, axis1=1, axis2=2), rtol=1e-12)
    np.testing.assert_allclose(covariance, DENSE.output_covariance(jacobian), atol=1e-10)
    np.testing.assert_allclose(BLOCKS.of_sandwich(shared, middle), BLOCKS.of_sandwich(jacobian, matrices), rtol=1e-12)
    diagonal = blr.DiagonalGaussian(MEAN, jax.tree.map(lambda m: 1 + m**2, MEAN))
    own = jnp.diagonal(diagonal.output_covariance(jacobian), axis1=1, axis2=2)
    np.testing.assert_allclose(diagonal.output_covariance(shared), own, rtol=1e-12)
    of_shared, of_written = (diagonal.structure.of_sandwich(*pair) for pair in ((shared, middle), (jacobian, matrices)))
    np.testing.assert_allclose(ravel(of_shared), ravel(of_written), rtol=1e-12)


def test_every_column_moves_as_a_gaussian():
    curvature = ROOTS.mT @ ROOTS + 0.5 * jnp.eye(SIZE)
    step = Step(jax.tree.map(jnp.cos, MEAN), curvature, 0.3, 0.3, 1.0)
    moved, gradient = Q.moved(step), to_columns(step.gradient, MEAN)
    for k in range(COLUMNS):
        one = blr.Gaussian(to_columns(MEAN, MEAN)[k], Q.precision[k])
        alone = one.moved(Step(gradient[k], curvature[k], 0.3, 0.3, 1.0))
        np.testing.assert_allclose(to_columns(moved.mean, MEAN)[k], alone.mean, rtol=1e-12)
        np.testing.assert_allclose(moved.precision[k], alone.precision, rtol=1e-12)
    dense = DENSE.decrement(Step(step.gradient, _dense(curvature), 0.3, 0.3, 1.0))
    np.testing.assert_allclose(Q.decrement(step), dense, rtol=1e-8)


def _dense(blocks: jax.Array) -> jax.Array:
    return jnp.linalg.inv(blr.BlockDiagonalGaussian(MEAN, blocks).covariance())


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="last axis"):
        blr.BlockDiagonalGaussian({"b": jnp.zeros(2), "w": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match="precisions of shape"):
        blr.BlockDiagonalGaussian(MEAN, jnp.eye(3))
