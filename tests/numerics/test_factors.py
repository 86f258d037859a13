"""Factors are computed once in a trace, and never carried out of the part of a program that they were computed in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.models import regression
from bayesrule.numerics.factors import cholesky, inverse, recall, shared_factors

MATRIX = jnp.array([[2.0, 0.5], [0.5, 1.0]])


def solves(function, *arguments):
    """How many triangular solves the compiled program has."""
    return str(jax.jit(function).lower(*arguments).compile().as_text()).count('custom_call_target="lapack_dtrsm')


def asked_twice(matrix):
    return inverse(matrix) + jnp.sum(inverse(matrix) @ cholesky(matrix))


def test_a_factor_that_is_asked_for_twice_is_computed_once():
    assert solves(shared_factors()(asked_twice), MATRIX) == 2  # by the factor and by its transpose
    np.testing.assert_array_equal(jax.jit(shared_factors()(asked_twice))(MATRIX), jax.jit(asked_twice)(MATRIX))


def test_a_factor_of_a_branch_stays_in_it():
    @jax.jit
    @shared_factors()
    def in_a_branch_and_after(matrix, flag):
        inside = jax.lax.cond(flag, lambda: inverse(matrix), lambda: jnp.zeros_like(matrix))
        return inside, inverse(matrix)

    inside, after = in_a_branch_and_after(MATRIX, True)
    np.testing.assert_allclose(inside, np.linalg.inv(MATRIX), rtol=1e-14)
    np.testing.assert_allclose(after, np.linalg.inv(MATRIX), rtol=1e-14)


@pytest.mark.parametrize("transform", [jax.jit, jax.jacfwd, jax.jacrev, jax.vmap])
def test_transformations(transform):
    argument = jnp.stack([MATRIX, 2 * MATRIX]) if transform is jax.vmap else MATRIX
    shared, plain = transform(shared_factors()(asked_twice)), transform(asked_twice)
    np.testing.assert_allclose(shared(argument), plain(argument), rtol=1e-14, atol=1e-14)


def test_what_is_recalled_is_not_computed():
    @shared_factors()
    def recalled(matrix, known):
        recall(matrix, inverse=known)
        return inverse(matrix)

    np.testing.assert_array_equal(jax.jit(recalled)(MATRIX, 7 * MATRIX), 7 * MATRIX)


def test_nothing_traced_is_kept():
    with jax.checking_leaks():
        jax.jit(shared_factors()(asked_twice))(MATRIX)


@pytest.mark.extended
def test_a_step_of_variational_inference_solves_once_at_each_place():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)))
    data = (x, jnp.asarray(x[:, 0] > 0, float))
    objective = regression.regression("logistic", 20, {"w": 1.0, "b": 1.0})
    rule = blr.von(0.7).replace(points=blr.Quadrature(8), guard=blr.Backtracking(monotone=True))
    state = rule.init(regression.zeros(3), objective)
    state, _, measured = rule.advance(objective, state, data, diagnose=True)
    assert measured is not None
    known = lambda state, measured: rule.advance(objective, state, data, diagnose=True, measured=measured)
    unknown = lambda state: rule.advance(objective, state, data, diagnose=True)
    # Two solves move the mean, and two invert the new precision. The inverse of the old one is known, or takes two.
    assert solves(known, state, measured) == 4
    assert solves(unknown, state) == 6
    for one, other in zip(
        jax.tree.leaves(known(state, measured)[:2]), jax.tree.leaves(unknown(state)[:2]), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
