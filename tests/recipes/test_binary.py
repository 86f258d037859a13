"""Binary networks: the straight-through estimator is BinaryConnect's SGD, and BayesBiNN what its derivation says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

KEYS = jax.random.split(jax.random.key(1), 3)
X = jax.random.normal(KEYS[0], (40, 6))
Y = jnp.sign(X @ jnp.array([1.0, -1.0, 1.0, 1.0, -1.0, -1.0]))
LATENT = {"w": 0.3 * jax.random.normal(KEYS[1], (6, 5)), "v": 0.3 * jax.random.normal(KEYS[2], (5,))}
BATCHES = np.random.default_rng(0).integers(0, 40, (100, 8))


def loss(signs, example):
    x, y = example
    return jnp.logaddexp(0.0, -y * jnp.tanh(x @ signs["w"] / 2) @ signs["v"])


OBJECTIVE = blr.Objective(loss, size=400)


def test_straight_through_is_binary_connect():
    """Latent weights, gradients at their signs, optax's SGD on the mean loss (Courbariaux et al., 2015)."""
    sgd = optax.sgd(0.2)

    def theirs(carry, index):
        latent, state = carry
        signs = jax.tree.map(lambda w: jnp.where(w >= 0, 1.0, -1.0), latent)
        mean = lambda s: jnp.mean(jax.vmap(lambda e: loss(s, e))((X[index], Y[index])))
        updates, state = sgd.update(jax.grad(mean)(signs), state)
        latent = optax.apply_updates(latent, updates)
        return (latent, state), latent

    rule = blr.straight_through(0.2)

    def ours(state, index):
        state, _ = rule.step(OBJECTIVE, state, (X[index], Y[index]))
        return state, state.q.natural()

    expected = jax.lax.scan(theirs, (LATENT, sgd.init(LATENT)), BATCHES)[1]
    actual = jax.lax.scan(ours, rule.init(LATENT, OBJECTIVE), BATCHES)[1]
    for name in LATENT:
        np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=1e-12)
    assert np.any(np.sign(actual["w"][-1]) != np.sign(LATENT["w"])), "some signs flipped"


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_noise_free_relaxation_of_one_is_the_mean(dtype):
    """s ≡ 1 and the point is μ = tanh λ, also where 1 − tanh² has long since rounded to zero."""
    q = blr.Bernoulli({"w": jnp.array([-40.0, -8.0, -0.3, 0.0, 1e-4, 2.0, 15.0, 80.0], dtype)})
    point_set = blr.Relaxed(1.0, noise=False).at(q, None)
    np.testing.assert_array_equal(point_set.factors["w"][0], np.ones(8))
    np.testing.assert_allclose(
        point_set.theta["w"][0], q.expectation()["w"], rtol=1e-15 if dtype == jnp.float64 else 1e-6
    )


@pytest.mark.extended
@pytest.mark.parametrize("relaxation", [0.2, 1.0, 3.0])
def test_scale_is_the_derivative_in_mu(relaxation):
    """s = ∂θ/∂μ by autodiff, for given noise (`eq:bayes_learn_binn_final`)."""
    natural, key = jnp.array([-1.5, -0.2, 0.4, 2.0]), jax.random.key(3)
    points = blr.Relaxed(relaxation, samples=3)
    theta = lambda mu: points.at(blr.Bernoulli.from_expectation(mu), jax.random.clone(key)).theta
    jacobian = jax.jit(jax.jacobian(theta))(jnp.tanh(natural))
    actual = jax.jit(lambda natural: points.at(blr.Bernoulli(natural), jax.random.clone(key)).factors)(natural)
    np.testing.assert_allclose(actual, np.diagonal(jacobian, axis1=1, axis2=2), rtol=1e-9, atol=1e-13)


@pytest.mark.extended
def test_published_smoothing_makes_the_scale_a_constant():
    """At relaxation 1e-10 the exact scale underflows; with +1e-10 in both terms it is 1e10 where |λ| = 10."""
    q = blr.Bernoulli(jnp.array([10.0, -10.0]))
    exact = blr.Relaxed(1e-10).at(q, jax.random.key(0)).factors
    smooth = blr.Relaxed(1e-10, smoothing=1e-10).at(q, jax.random.key(0)).factors
    assert np.all(np.asarray(exact) == 0)
    np.testing.assert_allclose(smooth, 1e10 / (1 + 1e10 / np.cosh(10.0) ** 2), rtol=1e-12)


def test_bayesbinn_step_by_hand():
    """λ ← (1 − ρτ)λ − ρ s∘(N/M)Σ∇ℓ at the relaxed signs, with the points' own noise."""
    rule, key = blr.bayesbinn(1e-3, relaxation=0.5, temperature=0.7), jax.random.key(7)
    batch = (X[:8], Y[:8])
    step = jax.jit(lambda key: rule.step(OBJECTIVE, rule.init(LATENT, OBJECTIVE), batch, key)[0].q.natural())
    after = step(key)
    theta, _, slope = jax.jit(lambda key: rule.points.at(blr.Bernoulli(LATENT), key))(jax.random.clone(key))
    total = lambda s: jnp.sum(jax.vmap(lambda e: loss(s, e))(batch))
    gradient = jax.jit(jax.grad(total))(jax.tree.map(lambda t: t[0], theta))
    for name in LATENT:
        push = np.asarray(slope[name][0]) * 400 / 8 * np.asarray(gradient[name])
        expected = (1 - 1e-3 * 0.7) * np.asarray(LATENT[name]) - 1e-3 * push
        np.testing.assert_allclose(after[name], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.extended
def test_bayesbinn_finds_the_best_signs():
    """On a problem whose signs are known, with noise and entropy: probabilities point the right way."""
    rule = blr.bayesbinn(0.02, relaxation=1.0)
    linear = blr.Objective(lambda w, e: jnp.logaddexp(0.0, -e[1] * (e[0] @ w)), size=40)
    result = blr.fit(rule, linear, jnp.zeros(6), (X, Y), steps=400, key=jax.random.key(0))
    np.testing.assert_array_equal(jnp.sign(result.q.natural()), [1, -1, 1, 1, -1, -1])


@pytest.mark.extended
def test_several_draws_are_averaged():
    """λ ← (1 − ρτ)λ − ρ times the mean over three different draws of s∘(N/M)Σ∇ℓ; so is the loss."""
    rule, key, batch = blr.bayesbinn(1e-2, relaxation=0.5, samples=3), jax.random.key(0), (X[:8], Y[:8])
    state, info = jax.jit(rule.step)(OBJECTIVE, rule.init(LATENT), batch, key)
    theta, _, slope = rule.points.at(blr.Bernoulli(LATENT), jax.random.clone(key))
    assert np.ptp(np.asarray(theta["w"]), axis=0).min() > 1e-3  # three draws, not one three times
    total = lambda s: jnp.sum(jax.vmap(lambda e: loss(s, e))(batch))
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(total)))(theta)
    np.testing.assert_allclose(info.objective, 400 / 8 * np.mean(losses), rtol=1e-12)
    for name in LATENT:
        push = 400 / 8 * np.mean(np.asarray(slope[name]) * np.asarray(gradients[name]), axis=0)
        expected = (1 - 1e-2) * np.asarray(LATENT[name]) - 1e-2 * push
        np.testing.assert_allclose(state.q.natural()[name], expected, rtol=1e-12, atol=1e-15)


def test_wrong_pairings_name_a_right_one():
    with pytest.raises(ValueError, match="points of a Bernoulli"):
        blr.sgd(0.1).replace(points=blr.Relaxed(1.0))
    with pytest.raises(ValueError, match=r"use Gradient\(\)"):
        blr.bayesbinn(0.1).replace(curvature=blr.Score())
    with pytest.raises(ValueError, match="Sign"):
        blr.Relaxed(0.0)
