"""The Kronecker-factored Gaussian against its own dense precision, and noisy K-FAC where it is exact."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bayesrule as blr
from bayesrule.families.gaussian.kronecker import KRONECKER

RANDOM = np.random.default_rng(0)


def spd(size):
    half = RANDOM.normal(size=(size, size))
    return jnp.asarray(half @ half.T + 0.5 * np.eye(size))


MEAN = {"w": jnp.asarray(RANDOM.normal(size=(3, 2))), "b": jnp.array([0.3, -0.1])}
INPUTS = {"w": spd(3), "b": jnp.ones((1, 1))}
OUTPUTS = {"w": spd(2), "b": spd(2)}
Q = blr.KroneckerGaussian(MEAN, 0.7, inputs=INPUTS, outputs=OUTPUTS)


@cache
def dense():
    return blr.Gaussian(MEAN, jax.jit(lambda q: q.precision)(Q))


JACOBIAN = {"w": RANDOM.normal(size=(5, 2, 3, 2)), "b": RANDOM.normal(size=(5, 2, 2))}


@jax.jit
def described(q, theta):
    """Everything that a Gaussian says of itself."""
    prior = blr.DiagonalGaussian(jax.tree.map(jnp.zeros_like, q.mean), 2.0)
    return {
        "entropy": q.entropy(),
        "covariance": q.covariance(),
        "times": q.times(theta),
        "solve": q.solve(theta),
        "log_prob": q.log_prob(theta),
        "variance": q.variance(),
        "outputs": q.output_covariance(JACOBIAN),
        "kl": q.kl(prior),
    }


@jax.jit
def traces(q, full):
    """Of A ⊗ G plus a multiple of the identity, from the factors and dense."""
    curvature = KRONECKER.add(KRONECKER.of_factors(INPUTS, OUTPUTS), {"w": 0.3, "b": 0.1})
    block = lambda name: jnp.kron(INPUTS[name], OUTPUTS[name])
    matrix = jax.scipy.linalg.block_diag(block("b") + 0.1 * jnp.eye(2), block("w") + 0.3 * jnp.eye(6))
    return q.trace(curvature), full.trace(matrix)


def test_it_is_the_gaussian_with_its_dense_precision():
    theta = {name: np.asarray(m) + 0.2 for name, m in MEAN.items()}
    mine, theirs = described(Q, theta), described(dense(), theta)
    tolerance = {"times": 1e-9, "solve": 1e-9, "outputs": 1e-9, "log_prob": 1e-11}
    for name in mine:
        for a, b in zip(jax.tree.leaves(mine[name]), jax.tree.leaves(theirs[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance.get(name, 1e-10), err_msg=name)
    flat = stats.multivariate_normal(np.zeros(8), np.linalg.inv(dense().precision)).logpdf(np.full(8, 0.2))
    assert float(mine["log_prob"]) == pytest.approx(flat, rel=1e-10)
    of_factors, of_matrix = traces(Q, dense())
    assert float(of_factors) == pytest.approx(float(of_matrix), rel=1e-10)


def test_samples_have_its_covariance():
    drawn = jax.jit(lambda q: (q.sample(jax.random.key(1), (40_000,)), q.drawn(jax.random.key(2), (40_000,))))
    covariance = np.linalg.inv(dense().precision)
    for draws in drawn(Q):
        flat = np.concatenate([np.asarray(draws["b"]), np.asarray(draws["w"]).reshape(40_000, -1)], axis=1)
        scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
        assert np.max(np.abs(np.cov(flat.T) - covariance) / scale) < 0.03
        mean = np.concatenate([MEAN["b"], MEAN["w"].ravel()])
        assert np.all(np.abs(flat.mean(axis=0) - mean) < 5 * np.sqrt(np.diag(covariance) / 40_000))


def test_a_prior_alone_is_isotropic():
    precision = jax.jit(lambda mean: blr.KroneckerGaussian(mean, 5.0).precision)(MEAN)
    np.testing.assert_allclose(precision, 5.0 * np.eye(8), rtol=1e-12)


@pytest.mark.parametrize("curvature", [blr.GaussNewton(), blr.GeneralizedGaussNewton()], ids=["ggn", "gn"])
def test_one_step_is_k_fac(curvature):
    """With ρτ = 1 the factors are the batch's: Σ aaᵀ/M and N/M Σ ddᵀ, and m moves by their damped inverse."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(20, 3)), random.normal(size=(20, 2))
    loss, apply = lambda f, y: 0.5 * jnp.sum((f - y) ** 2), lambda p, x: x @ p["w"] + p["b"]
    objective = blr.Objective(loss, output=apply, size=60, regularizer=0.5)
    rule = blr.ogn(0.3, decay=0.0, averaging=0, relative=False, curvature=0.0).replace(
        family=blr.KroneckerGaussian, curvature=curvature
    )
    state, info = jax.jit(lambda batch: rule.step(objective, rule.init(MEAN, objective), batch))((x, y))
    weight, bias = np.asarray(MEAN["w"]), np.asarray(MEAN["b"])
    slopes = x @ weight + bias - y
    second = (slopes.T @ slopes if isinstance(curvature, blr.GaussNewton) else 20 * np.eye(2)) * 3
    np.testing.assert_allclose(state.q.inputs["w"], x.T @ x / 20, rtol=1e-10)
    np.testing.assert_allclose(state.q.outputs["w"], second, rtol=1e-10)
    np.testing.assert_allclose(state.q.outputs["b"], second, rtol=1e-10)
    gradient = 3 * np.concatenate([slopes.sum(0), (x.T @ slopes).ravel()])
    gradient += 0.5 * np.concatenate([bias, weight.ravel()])
    push = 0.3 * np.linalg.solve(state.q.precision, gradient)
    np.testing.assert_allclose(state.q.mean["b"], bias - push[:2], rtol=1e-9)
    np.testing.assert_allclose(state.q.mean["w"].ravel(), weight.ravel() - push[2:], rtol=1e-9)
    assert bool(info.finite)


@pytest.mark.extended
def test_noisy_k_fac_trains_a_convolutional_network():
    from bayesrule.models import networks

    network = networks.cnn((8, 8, 1), channels=(3,), classes=2)
    keys = jax.random.split(jax.random.key(0), 3)
    x = np.random.default_rng(0).normal(size=(64, 8, 8, 1))
    y = (x[:, :, :4].mean((1, 2, 3)) > x[:, :, 4:].mean((1, 2, 3))).astype(int)
    objective = blr.Objective(networks.softmax_cross_entropy, output=network.apply, size=64, regularizer=1.0)
    rule = blr.vogn(0.1, decay=0.9, relative=False, curvature=0.01).replace(family=blr.KroneckerGaussian)
    result = blr.fit(rule, objective, network.init(keys[0]), (x, y), steps=60, batch_size=32, key=keys[1])
    probabilities = blr.predict(result.q, network.apply, x, key=keys[2], samples=8, link="softmax")
    assert blr.metrics.accuracy(probabilities, y) > 0.85
    before, after = result.trace["objective"][:5].mean(), result.trace["objective"][-5:].mean()
    assert after < 0.7 * before


def test_transposed_layers_are_refused_by_name():
    objective = blr.Objective(lambda p, x: jnp.sum((p["w"] @ x) ** 2), size=4, regularizer=1.0)
    rule = blr.ogn(0.1, relative=False).replace(family=blr.KroneckerGaussian)
    with pytest.raises(ValueError, match=r"'w'.* laid out another way"):
        jax.eval_shape(
            lambda w, x: rule.step(objective, rule.init({"w": w}, objective), x), np.ones((2, 3)), np.ones((4, 3))
        )
