"""Priors and regularizers: one R said in several ways is one R, whatever q is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr


def squared(w, example):
    return 0.5 * (example[1] - example[0] @ w) ** 2


DATA = jnp.eye(4, 3), jnp.array([1.0, -2.0, 0.5, 3.0])
POINTS = {"delta": blr.Delta(), "quadrature": blr.Quadrature(3)}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("points", "family"),
    [
        ("delta", blr.Gaussian),
        ("quadrature", blr.DiagonalGaussian),
        pytest.param("quadrature", blr.Gaussian, marks=pytest.mark.extended),
        pytest.param("delta", blr.DiagonalGaussian, marks=pytest.mark.extended),
    ],
)
def test_a_function_a_number_and_a_family_are_one_regularizer(points, family):
    """½·50·‖w‖² as a function, as δ = 50 and as a prior: the same posterior in the same steps."""
    curvature = blr.Hessian() if family is blr.Gaussian else blr.HessianDiagonal()
    rule = blr.newton().replace(family=family, points=POINTS[points], curvature=curvature)
    said = {
        "function": {"regularizer": lambda w: 25 * jnp.sum(w**2)},
        "number": {"regularizer": 50.0},
        "diagonal": {"prior": blr.DiagonalGaussian(jnp.zeros(3), 50.0)},
        "full": {"prior": blr.Gaussian(jnp.zeros(3), 50.0)},
        "low-rank": {"prior": blr.LowRankGaussian(jnp.zeros(3), 50.0, jnp.zeros((3, 1)))},
    }
    fitted = {
        name: blr.fit(rule, blr.Objective(squared, size=4, **way), jnp.zeros(3), DATA, steps=20, tolerance=1e-12)
        for name, way in said.items()
    }
    constants = 1.5 * np.log(50 / (2 * np.pi))
    for name, result in fitted.items():
        assert result.reason == "converged", name
        np.testing.assert_allclose(result.q.mean, fitted["number"].q.mean, rtol=1e-12)
        np.testing.assert_allclose(result.q.covariance(), fitted["number"].q.covariance(), atol=1e-13)
        normalized = 0.0 if name != "function" else constants
        np.testing.assert_allclose(result.bound + normalized, fitted["number"].bound, rtol=1e-12)
        assert result.normalized == (name != "function")


def test_a_prior_of_another_shape_is_an_error():
    objective = blr.Objective(squared, size=4, prior=blr.DiagonalGaussian(0.0, 1.0))
    with pytest.raises(ValueError, match=r"regularizer=δ for N\(0, 1/δ\)"):
        blr.fit(blr.newton(), objective, jnp.zeros(3), DATA, steps=1)


def test_a_penalty_on_a_diagonal_has_no_dense_hessian():
    """P = 3000: a P×P matrix would be 72 MB; the compiled step needs far less."""
    rule = blr.newton().replace(family=blr.DiagonalGaussian, curvature=blr.SquaredGradient(), guard=blr.NoGuard())
    objective = blr.Objective(lambda w, e: jnp.sum(w * e), size=1, regularizer=lambda w: jnp.sum(jnp.cosh(w)))
    state = rule.init(jnp.ones(3000), objective)
    compiled = jax.jit(lambda s: rule.step(objective, s, jnp.ones((1, 3000)))[0]).lower(state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20e6
    moved = compiled(state)
    np.testing.assert_allclose(moved.q.precision, 1 + np.cosh(1.0), rtol=1e-12)


@pytest.mark.extended
def test_products_take_their_prior_block_by_block():
    """Conjugate blocks of every kind, one step, each as it would move alone."""
    prior = {
        "coin": blr.Beta(1.0, 2.0),
        "full": blr.Gaussian(jnp.array([1.0, 2.0]), 3.0),
        "diagonal": blr.DiagonalGaussian(jnp.ones(2), 4.0),
        "fixed": blr.FixedGaussian(jnp.ones(2), 5.0),
    }
    start = {
        "coin": blr.Beta(4.0, 4.0),
        "full": blr.Gaussian(jnp.zeros(2), 1.0),
        "diagonal": blr.DiagonalGaussian(jnp.zeros(2), 1.0),
        "fixed": blr.FixedGaussian(jnp.zeros(2), 1.0),
    }

    def nothing(expectation):
        return 0.0 * jnp.sum(expectation["coin"][0])

    def alone(name):
        objective = blr.Objective(lambda mu, e: 0.0 * e, size=1, prior=prior[name])
        return blr.fit(blr.conjugate(), objective, start[name], jnp.ones(1), steps=1).q

    objective = blr.Objective(lambda mu, e: nothing(mu) * e, size=1, prior=prior)
    result = blr.fit(blr.conjugate(), objective, start, jnp.ones(1), steps=1)
    for name in prior:
        for ours, expected in zip(jax.tree.leaves(result.q.blocks[name]), jax.tree.leaves(alone(name)), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(result.q.blocks["coin"].b, 2.0, rtol=1e-12)
    np.testing.assert_allclose(result.q.blocks["full"].mean, prior["full"].mean, rtol=1e-12)
    # The fixed block's precision is 1 and its prior's 5, so one step of ρ = 1 goes 5 times as far as its mean.
    np.testing.assert_allclose(result.q.blocks["fixed"].mean, 5.0, rtol=1e-12)


def test_products_with_a_discrete_block_are_not_reparameterized():
    rule = blr.Rule(blr.Product, blr.MonteCarlo(4), blr.Reparameterized(), blr.Steps(0.1))
    with pytest.raises(ValueError, match=r"Score\(\)"):
        rule.init({"w": blr.Gaussian(jnp.zeros(1), 1.0), "b": blr.Bernoulli(jnp.zeros(2))})


def test_priors_of_another_family():
    rule = blr.Rule(blr.Gamma, blr.Exact(), blr.Gradient(), blr.Steps(0.1))
    loss = lambda m, e: m[0]
    with pytest.raises(ValueError, match="same family"):
        rule.step(blr.Objective(loss, size=1, prior=blr.Beta(1.0, 1.0)), rule.init(blr.Gamma(1.0, 1.0)), jnp.zeros(1))
    with pytest.raises(ValueError, match="prior="):
        rule.step(blr.Objective(loss, size=1, regularizer=1.0), rule.init(blr.Gamma(1.0, 1.0)), jnp.zeros(1))
