"""Online learning (section 5.4): exponential weights, online gradient descent, the online Newton step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

ROUNDS, EXPERTS = 200, 7
EXPERT = blr.Objective(lambda expert, loss: loss[expert], size=1)


def run(rule, objective, start, losses):
    def body(state, loss):
        new, _ = rule.step(objective, state, jax.tree.map(lambda x: x[None], loss))
        return new, new.q

    return jax.jit(lambda: jax.lax.scan(body, rule.init(start), losses)[1])()


@pytest.mark.parametrize("lazy", [False, True])
def test_exponential_weights_in_closed_form(lazy):
    """w ∝ w₁ exp(−η Σ losses) after every round, greedy and lazy alike at a constant rate."""
    losses = jax.random.uniform(jax.random.key(0), (ROUNDS, EXPERTS))
    start, rate = jnp.linspace(0.0, 1.0, EXPERTS), 0.3
    q = run(blr.exponential_weights(rate, lazy=lazy), EXPERT, blr.Categorical(start), losses)
    expected = jax.nn.softmax(start - rate * jnp.cumsum(losses, axis=0), axis=-1)
    np.testing.assert_allclose(q.probabilities, expected, atol=1e-12)


def test_regret():
    """Under sqrt(T log K / 2) with η = sqrt(8 log K / T), for losses in [0, 1] chosen against the player."""
    rate = math.sqrt(8 * math.log(EXPERTS) / ROUNDS)
    rule = blr.exponential_weights(rate)
    noise = jax.random.uniform(jax.random.key(1), (ROUNDS, EXPERTS))

    def body(state, extra):  # the adversary puts a loss of 1 on whatever the player trusts most
        weights = state.q.probabilities
        loss = jnp.where(jnp.arange(EXPERTS) == jnp.argmax(weights), 1.0, 1.0 * (extra > 0.5))
        new, _ = rule.step(EXPERT, state, loss[None])
        return new, (weights @ loss, loss)

    start = rule.init(blr.Categorical(jnp.zeros(EXPERTS)))
    suffered, losses = jax.jit(lambda: jax.lax.scan(body, start, noise)[1])()
    regret = suffered.sum() - losses.sum(0).min()
    assert 0 < regret <= math.sqrt(ROUNDS * math.log(EXPERTS) / 2)


def test_greedy_and_lazy_part_with_a_decreasing_rate():
    """Greedy: −Σ_s η_s ℓ_s; lazy: −η_t Σ_s ℓ_s."""
    losses = jax.random.uniform(jax.random.key(2), (ROUNDS, EXPERTS))
    schedule = optax.polynomial_schedule(1.0, 0.1, 1.0, ROUNDS)
    # optax's schedules divide int32 counts in float32, and how they round depends on what XLA makes of the program.
    exact = lambda count: schedule(count.astype(float))
    rates = jax.vmap(exact)(jnp.arange(ROUNDS))[:, None]
    start = blr.Categorical(jnp.zeros(EXPERTS))
    greedy = run(blr.exponential_weights(exact), EXPERT, start, losses).probabilities
    lazy = run(blr.exponential_weights(exact, lazy=True), EXPERT, start, losses).probabilities
    np.testing.assert_allclose(greedy, jax.nn.softmax(-jnp.cumsum(rates * losses, 0), -1), atol=1e-12)
    np.testing.assert_allclose(lazy, jax.nn.softmax(-rates * jnp.cumsum(losses, 0), -1), atol=1e-12)
    assert np.max(np.abs(greedy - lazy)) > 0.1


def squared(theta, example):
    x, y = example
    return 0.5 * (y - x @ theta) ** 2


REGRESSION = blr.Objective(squared, size=1)


def stream():
    keys = jax.random.split(jax.random.key(3))
    x = jax.random.normal(keys[0], (ROUNDS, 3))
    return x, x @ jnp.array([1.0, -2.0, 0.5]) + 0.3 * jax.random.normal(keys[1], (ROUNDS,))


def test_online_gradient_descent():
    """A fixed Gaussian and the delta method: x ← x − η_t ∇ℓ_t(x)."""
    x, y = stream()
    schedule = lambda count: 0.3 / jnp.sqrt(count + 1.0)
    rule = blr.exponential_weights(schedule).replace(
        family=blr.FixedGaussian, points=blr.Delta(), curvature=blr.Gradient()
    )
    means = run(rule, REGRESSION, jnp.zeros(3), (x, y)).mean
    theta, x, y = np.zeros(3), np.asarray(x), np.asarray(y)
    for t in range(ROUNDS):
        theta = theta + 0.3 / math.sqrt(t + 1) * (y[t] - x[t] @ theta) * x[t]
        np.testing.assert_allclose(means[t], theta, rtol=1e-10, atol=1e-12)


def test_online_gradient_descent_greedy_and_lazy():
    """At a constant rate the same; lazily x_{t+1} = x₁ − η_t Σ ∇ℓ_s(x_s) with a decreasing one."""
    schedule = lambda count: 0.3 / jnp.sqrt(count + 1.0)
    x, y = stream()

    def rule(rate, lazy):
        steps = blr.Steps(rate, temperature=0.0, lazy=lazy)
        return blr.Rule(blr.FixedGaussian, blr.Delta(), blr.Gradient(), steps)

    start = jnp.array([0.5, 0.0, -0.5])
    constant = [run(rule(0.05, lazy), REGRESSION, start, (x, y)).mean for lazy in (False, True)]
    np.testing.assert_allclose(*constant, rtol=1e-10, atol=1e-12)
    means = run(rule(schedule, True), REGRESSION, start, (x, y)).mean
    theta, total, x, y = np.array(start), np.zeros(3), np.asarray(x), np.asarray(y)
    for t in range(ROUNDS):
        total = total - (y[t] - x[t] @ theta) * x[t]
        theta = np.array(start) - 0.3 / math.sqrt(t + 1) * total
        np.testing.assert_allclose(means[t], theta, rtol=1e-9, atol=1e-11)


def test_online_newton_step():
    """Hazan's recursion A ← A + ggᵀ, x ← x − A⁻¹g/γ, from a Gaussian with Gauss–Newton curvature."""
    x, y = stream()
    gamma, start = 0.5, 2.0
    rule = blr.exponential_weights(1.0).replace(
        family=blr.Gaussian,
        points=blr.Delta(),
        curvature=blr.GaussNewton(),
        steps=blr.Steps(blr.Rates(1 / gamma, 1.0), temperature=0.0),
    )
    q = run(rule, REGRESSION, blr.Gaussian(jnp.zeros(3), start), (x, y))
    theta, matrix, x, y = np.zeros(3), start * np.eye(3), np.asarray(x), np.asarray(y)
    for t in range(ROUNDS):
        slope = -(y[t] - x[t] @ theta) * x[t]
        matrix = matrix + np.outer(slope, slope)
        theta = theta - np.linalg.solve(matrix, slope) / gamma
        np.testing.assert_allclose(q.precision[t], matrix, rtol=1e-9)
        np.testing.assert_allclose(q.mean[t], theta, rtol=1e-9, atol=1e-11)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_weights_that_vanish_do_no_harm(dtype):
    """500 rounds, the last expert the worst by far: logits far past where its probability underflows."""
    losses = jax.random.uniform(jax.random.key(3), (500, 4), dtype) * jnp.array([0.2, 1.0, 1.0, 1.0], dtype)
    losses = losses.at[:, 3].set(1.0)
    q = run(blr.exponential_weights(1.0), EXPERT, blr.Categorical(jnp.zeros(4, dtype)), losses)
    sums = jnp.cumsum(losses.astype(float), axis=0)
    expected = sums[:, 3:] - sums[:, :3]
    assert q.natural().dtype == dtype
    np.testing.assert_allclose(q.natural(), expected, rtol=2e-5 if dtype == jnp.float32 else 1e-12)


@pytest.mark.extended
def test_signs_that_are_all_but_certain():
    """A Bernoulli at λ = 60 still takes its exact gradient by enumeration."""
    rule = blr.exponential_weights(0.5).replace(family=blr.Bernoulli)
    start = jnp.array([60.0, -60.0, 0.0], jnp.float32)
    state, info = rule.step(
        lambda theta: theta @ jnp.array([1.0, 2.0, 3.0], jnp.float32), rule.init(blr.Bernoulli(start))
    )
    assert info.finite
    np.testing.assert_allclose(state.q.natural(), start - 0.5 * np.array([1.0, 2.0, 3.0]), rtol=1e-6)


def test_a_batch_of_experts_is_for_vmap():
    rule = blr.exponential_weights(0.5)
    with pytest.raises(ValueError, match="vmap"):
        rule.step(EXPERT, rule.init(blr.Categorical(jnp.zeros((2, 3)))), jnp.ones((1, 3)))
