"""A draw for each part of the batch: an unbiased estimate of the sum, and the sum of the parts as it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.objectives.batches import Weighted

REPETITIONS = 4000
random = np.random.default_rng(0)
X = random.normal(size=(8, 2))
Y = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
FULL = blr.Gaussian(jnp.array([0.4, -0.6]), jnp.array([[3.0, 0.5], [0.5, 2.0]]))
DIAGONAL = blr.DiagonalGaussian(jnp.array([0.4, -0.6]), jnp.array([3.0, 2.0]))
FIXED = blr.FixedGaussian(jnp.array([0.4, -0.6]), jnp.array([3.0, 2.0]))


def loss(w, example):
    return jnp.logaddexp(0.0, example[0] @ w) - example[1] * (example[0] @ w)


OBJECTIVE = blr.Objective(loss, size=20)
BATCH = Weighted((X, Y), jnp.array([1.0, 2.0, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0]), 6.5)
CASES = {
    "Gradient": (blr.Gradient(), FIXED),
    "Hessian": (blr.Hessian(), FULL),
    "Stein": (blr.Stein(), FULL),
    "GaussNewton": (blr.GaussNewton(), DIAGONAL),
    "HessianDiagonal": (blr.HessianDiagonal(), DIAGONAL),
}


def numbers(measured):
    return jnp.concatenate(
        [jnp.ravel(x) for x in jax.tree.leaves((measured.value, measured.gradient, measured.curvature))]
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("antithetic", [False, True])
def test_the_estimate_is_unbiased(name, antithetic):
    """Value, gradient and curvature are within four standard errors of Gauss–Hermite quadrature with 30² nodes."""
    curvature, q = CASES[name]
    points = blr.ShardSamples(4, antithetic=antithetic)
    measure = lambda key: numbers(curvature.measure(OBJECTIVE, q, points, BATCH, None, key))
    estimates = jax.jit(jax.vmap(measure))(jax.random.split(jax.random.key(1), REPETITIONS))
    exact = numbers(curvature.measure(OBJECTIVE, q, blr.Quadrature(30), BATCH, None, None))
    errors = np.std(estimates, axis=0) / np.sqrt(REPETITIONS)
    assert np.all(errors > 0)
    assert np.all(np.abs(np.mean(estimates, axis=0) - exact) < 4 * errors)


@pytest.mark.extended
def test_every_part_is_measured_at_its_own_draw():
    points, key = blr.ShardSamples(4), jax.random.key(2)
    measured = blr.Hessian().measure(OBJECTIVE, FULL, points, BATCH, None, key)
    theta = points.at(FULL, key).theta
    scale = BATCH.weights * 20 / 6.5
    total = lambda w: sum(scale[i] * loss(w[i // 2], (X[i], Y[i])) for i in range(8))
    assert_allclose(measured.value, total(theta), rtol=1e-12)
    assert_allclose(measured.gradient, jnp.sum(jax.grad(total)(theta), axis=0), rtol=1e-12)
    hessian = sum(scale[i] * jax.hessian(loss)(theta[i // 2], (X[i], Y[i])) for i in range(8))
    assert_allclose(measured.curvature, hessian, rtol=1e-12)


@pytest.mark.extended
def test_many_draws_at_the_price_of_one_have_less_noise():
    """The variance of the gradient is well below that of a single draw, whose rows all see the same θ."""
    keys = jax.random.split(jax.random.key(3), REPETITIONS)

    def variance(points):
        measure = lambda key: blr.Gradient().measure(OBJECTIVE, FIXED, points, (X, Y), None, key).gradient
        return np.var(jax.jit(jax.vmap(measure))(keys), axis=0)

    assert np.all(variance(blr.ShardSamples(8)) < 0.5 * variance(blr.MonteCarlo(1)))


@pytest.mark.extended
def test_it_works_where_outputs_are_linear_and_in_microbatches():
    apply = lambda w, x: x @ w
    linear = blr.Objective(lambda f, y: jnp.logaddexp(0.0, f) - y * f, size=20, output=apply, linear=True)
    key = jax.random.key(4)
    plain = blr.Hessian().measure(OBJECTIVE, FULL, blr.ShardSamples(2), (X, Y), None, key)
    other = blr.Hessian().measure(linear, FULL, blr.ShardSamples(2), linear.linearized(FULL.mean, (X, Y)), None, key)
    assert_allclose(numbers(plain), numbers(other), rtol=1e-12)
    halves = [(X[rows], Y[rows]) for rows in (slice(0, 4), slice(4, 8))]
    parts = [numbers(blr.Hessian().measure(OBJECTIVE, FULL, blr.ShardSamples(2), half, None, key)) for half in halves]
    whole = blr.Hessian().measure(OBJECTIVE, FULL, blr.ShardSamples(2), blr.Microbatches((X, Y), 2), None, key)
    assert_allclose(numbers(whole), sum(parts) / 2, rtol=1e-12)


def test_wrong_pairings_are_refused():
    points = blr.ShardSamples(4)
    with pytest.raises(ValueError, match=r"SquaredGradient.*no such sum"):
        blr.adam(0.1).replace(points=points)
    with pytest.raises(ValueError, match=r"Reparameterized.*no such sum"):
        blr.Rule(blr.Gaussian, points, blr.Reparameterized(), blr.Steps(0.1))
    with pytest.raises(ValueError, match="8 rows does not divide"):
        blr.Gradient().measure(OBJECTIVE, FIXED, blr.ShardSamples(3), (X, Y), None, jax.random.key(0))
    rule = blr.von(0.1).replace(points=points)
    with pytest.raises(ValueError, match="a function without examples"):
        rule.step(lambda w: jnp.sum(w**2), rule.init(jnp.zeros(2)), None, jax.random.key(0))
    with pytest.raises(ValueError, match="must be even, got 3"):
        blr.ShardSamples(3, antithetic=True)


def test_the_printed_rule_names_them():
    assert "a draw from q for each part j of the batch" in str(blr.vogn(0.1).replace(points=blr.ShardSamples(8)))
