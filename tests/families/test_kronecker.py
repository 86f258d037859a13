"""The Kronecker-factored Gaussian against its own dense precision, and noisy K-FAC where it is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bayesrule as blr
from bayesrule.families.kronecker import KRONECKER

KEYS = jax.random.split(jax.random.key(0), 6)


def spd(key, size):
    half = jax.random.normal(key, (size, size))
    return half @ half.T + 0.5 * jnp.eye(size)


MEAN = {"w": jax.random.normal(KEYS[0], (3, 2)), "b": jnp.array([0.3, -0.1])}
INPUTS = {"w": spd(KEYS[1], 3), "b": jnp.ones((1, 1))}
OUTPUTS = {"w": spd(KEYS[2], 2), "b": spd(KEYS[3], 2)}
Q = blr.KroneckerGaussian(MEAN, 0.7, inputs=INPUTS, outputs=OUTPUTS)
DENSE = blr.Gaussian(MEAN, Q.precision)


def test_it_is_the_gaussian_with_its_dense_precision():
    theta = jax.tree.map(lambda m: m + 0.2, MEAN)
    for name in ("entropy", "covariance"):
        np.testing.assert_allclose(getattr(Q, name)(), getattr(DENSE, name)(), rtol=1e-10)
    for name in ("times", "solve"):
        for mine, theirs in zip(
            jax.tree.leaves(getattr(Q, name)(theta)), jax.tree.leaves(getattr(DENSE, name)(theta)), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)
    np.testing.assert_allclose(Q.log_prob(theta), DENSE.log_prob(theta), rtol=1e-11)
    flat = stats.multivariate_normal(np.zeros(8), np.linalg.inv(Q.precision)).logpdf(np.full(8, 0.2))
    assert float(Q.log_prob(theta)) == pytest.approx(flat, rel=1e-10)
    np.testing.assert_allclose(Q.variance()["w"], DENSE.variance()["w"], rtol=1e-10)
    jacobian = {"w": jax.random.normal(KEYS[4], (5, 2, 3, 2)), "b": jax.random.normal(KEYS[5], (5, 2, 2))}
    np.testing.assert_allclose(Q.output_covariance(jacobian), DENSE.output_covariance(jacobian), rtol=1e-9)
    curvature = KRONECKER.add(KRONECKER.of_factors(INPUTS, OUTPUTS), {"w": 0.3, "b": 0.1})
    block = lambda name: jnp.kron(INPUTS[name], OUTPUTS[name])
    dense = jax.scipy.linalg.block_diag(block("b") + 0.1 * jnp.eye(2), block("w") + 0.3 * jnp.eye(6))
    assert float(Q.trace(curvature)) == pytest.approx(float(DENSE.trace(dense)), rel=1e-10)
    prior = blr.DiagonalGaussian(jax.tree.map(jnp.zeros_like, MEAN), 2.0)
    assert float(Q.kl(prior)) == pytest.approx(float(DENSE.kl(prior)), rel=1e-10)


def test_samples_have_its_covariance():
    for draws in (Q.sample(jax.random.key(1), (40_000,)), Q.drawn(jax.random.key(2), (40_000,))):
        flat = np.concatenate([np.asarray(draws["b"]), np.asarray(draws["w"]).reshape(40_000, -1)], axis=1)
        covariance = np.asarray(DENSE.covariance())
        scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
        assert np.max(np.abs(np.cov(flat.T) - covariance) / scale) < 0.03
        mean = np.concatenate([MEAN["b"], MEAN["w"].ravel()])
        assert np.all(np.abs(flat.mean(axis=0) - mean) < 5 * np.sqrt(np.diag(covariance) / 40_000))


def test_a_prior_alone_is_isotropic():
    q = blr.KroneckerGaussian(MEAN, 5.0)
    np.testing.assert_allclose(q.precision, 5.0 * jnp.eye(8), rtol=1e-12)


@pytest.mark.parametrize("curvature", [blr.GaussNewton(), blr.GeneralizedGaussNewton()], ids=["ggn", "gn"])
def test_one_step_is_k_fac(curvature):
    """With ρτ = 1 the factors are the batch's: Σ aaᵀ/M and N/M Σ ddᵀ, and m moves by their damped inverse."""
    x, y = jax.random.normal(KEYS[0], (20, 3)), jax.random.normal(KEYS[1], (20, 2))
    loss, apply = lambda f, y: 0.5 * jnp.sum((f - y) ** 2), lambda p, x: x @ p["w"] + p["b"]
    objective = blr.Objective(loss, output=apply, size=60, regularizer=0.5)
    rule = blr.ogn(0.3, decay=0.0, averaging=0, relative=False, curvature=0.0).replace(
        family=blr.KroneckerGaussian, curvature=curvature
    )
    state, info = rule.step(objective, rule.init(MEAN, objective), (x, y))
    outputs = x @ MEAN["w"] + MEAN["b"]
    slopes = outputs - y
    second = (slopes.T @ slopes if isinstance(curvature, blr.GaussNewton) else 20 * jnp.eye(2)) * 3
    np.testing.assert_allclose(state.q.inputs["w"], x.T @ x / 20, rtol=1e-10)
    np.testing.assert_allclose(state.q.outputs["w"], second, rtol=1e-10)
    np.testing.assert_allclose(state.q.outputs["b"], second, rtol=1e-10)
    gradient = 3 * jnp.concatenate([slopes.sum(0), (x.T @ slopes).ravel()])
    gradient += 0.5 * jnp.concatenate([MEAN["b"], MEAN["w"].ravel()])
    push = 0.3 * jnp.linalg.solve(state.q.precision, gradient)
    np.testing.assert_allclose(state.q.mean["b"], MEAN["b"] - push[:2], rtol=1e-9)
    np.testing.assert_allclose(state.q.mean["w"].ravel(), MEAN["w"].ravel() - push[2:], rtol=1e-9)
    assert bool(info.finite)


def test_noisy_k_fac_trains_a_convolutional_network():
    from bayesrule.models import networks

    network = networks.cnn((8, 8, 1), channels=(3,), classes=2)
    x = jax.random.normal(KEYS[2], (64, 8, 8, 1))
    y = (x[:, :, :4].mean((1, 2, 3)) > x[:, :, 4:].mean((1, 2, 3))).astype(int)
    objective = blr.Objective(networks.softmax_cross_entropy, output=network.apply, size=64, regularizer=1.0)
    rule = blr.vogn(0.1, decay=0.9, relative=False, curvature=0.01).replace(family=blr.KroneckerGaussian)
    result = blr.fit(rule, objective, network.init(KEYS[3]), (x, y), steps=60, batch_size=32, key=KEYS[4])
    probabilities = blr.predict(result.q, network.apply, x, key=KEYS[5], samples=8, link="softmax")
    assert blr.metrics.accuracy(probabilities, y) > 0.85
    before, after = result.trace["objective"][:5].mean(), result.trace["objective"][-5:].mean()
    assert after < 0.7 * before


def test_transposed_layers_are_refused_by_name():
    objective = blr.Objective(lambda p, x: jnp.sum((p["w"] @ x) ** 2), size=4, regularizer=1.0)
    rule = blr.ogn(0.1, relative=False).replace(family=blr.KroneckerGaussian)
    state = rule.init({"w": jnp.ones((2, 3))}, objective)
    with pytest.raises(ValueError, match=r"'w'.* laid out another way"):
        rule.step(objective, state, jnp.ones((4, 3)))
