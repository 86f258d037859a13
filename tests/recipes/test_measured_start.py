"""The posterior of a network is what its data say: v starts from the first batches, and a window forgets in epochs.

The curvature that S is compared with is computed here, from every example's gradient by `jax.vmap(jax.grad(…))`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import bayesrule as blr
from bayesrule import metrics
from bayesrule.models import networks

ROWS, BATCH, PRIOR = 600, 50, 2.0
NETWORK = networks.mlp((64, 12, 10))
X, Y = load_digits(return_X_y=True)
X, Y = jnp.asarray(X[:ROWS] / 16), jnp.asarray(Y[:ROWS])


def loss(params, example):
    return networks.softmax_cross_entropy(NETWORK.apply(params, example[0]), example[1])


OBJECTIVE = blr.Objective(loss, size=ROWS, regularizer=PRIOR)


@functools.cache
def params():
    return NETWORK.init(jax.random.key(3))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@jax.jit
def _squares(theta, x, y):
    gradients = jax.vmap(jax.grad(loss), (None, 0))(theta, (x, y))
    return jax.tree.map(lambda g: jnp.sum(g**2, axis=0), gradients)


def expected_precision(q, x=X, y=Y, draws=0):
    """Σᵢ gᵢ² + δ over all examples, at the mean or averaged over draws of q."""
    thetas = [q.mean] if draws == 0 else [q.sample(key) for key in jax.random.split(jax.random.key(99), draws)]
    return np.mean([flat(_squares(theta, x, y)) for theta in thetas], axis=0) + PRIOR


def fitted(rule, epochs=5, x=X, start=None):
    start = params() if start is None else start
    return blr.fit(
        rule, OBJECTIVE, start, (x, Y), steps=epochs * ROWS // BATCH, batch_size=BATCH, key=jax.random.key(1)
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("rule", "correlation"),
    [
        (blr.ogn(0.5, relative=True), 0.97),
        (blr.vogn(0.5, relative=True), 0.8),
        (blr.ogn(1e-3), 0.95),  # longer steps, behind which the average of the last epoch lags a little more
        (blr.vogn(1e-3), 0.75),
    ],
)
def test_the_precision_is_the_curvature_of_the_data(rule, correlation):
    """After five epochs, for every weight: with decay=0.999 and h₀ = 1 all of S lay within half a percent."""
    result = fitted(rule)
    actual, draws = flat(result.q.precision), 0 if rule.points.delta else 16
    expected = expected_precision(result.q, draws=draws)
    assert np.corrcoef(np.log(actual), np.log(expected))[0, 1] > correlation
    quantiles = np.quantile(actual, [0.5, 0.95]) / np.quantile(expected, [0.5, 0.95])
    assert np.all((quantiles > 0.5) & (quantiles < 2))
    assert np.quantile(actual, 0.95) > 4 * np.quantile(actual, 0.05)


@pytest.mark.extended
def test_ivon_s_precision_follows_the_data():
    """From gradients alone: noisier, and from a start that is too large rather than too small."""
    result = fitted(blr.ivon(0.5, relative=True), epochs=10)
    actual, expected = flat(result.q.precision), expected_precision(result.q, draws=16)
    assert np.corrcoef(np.log(actual), np.log(expected))[0, 1] > 0.6
    assert 0.5 < np.median(actual) / np.median(expected) < 5


@pytest.mark.extended
@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_inputs_in_other_units(name):
    """Ten times the inputs with a tenth of the weights is the same network: its S is a hundred times as large there."""
    priors = lambda strength: {"layer0": {"w": strength, "b": PRIOR}, "layer1": {"w": PRIOR, "b": PRIOR}}
    one, ten = (blr.Objective(loss, size=ROWS, regularizer=priors(strength)) for strength in (1.0, 100.0))
    rule, start = getattr(blr, name)(0.1, relative=False), params()
    smaller = start | {"layer0": start["layer0"] | {"w": start["layer0"]["w"] / 10}}
    step = jax.jit(rule.step)
    state, scaled = rule.init(start, one), rule.init(smaller, ten)
    for count in range(3):
        rows, key = slice(50 * count, 50 * count + 50), jax.random.key(count)
        state, _ = step(one, state, (X[rows], Y[rows]), key)
        scaled, _ = step(ten, scaled, (10 * X[rows], Y[rows]), key)
        expected = 100 * state.q.precision["layer0"]["w"]
        np.testing.assert_allclose(scaled.q.precision["layer0"]["w"], expected, rtol=1e-6)
        np.testing.assert_allclose(10 * scaled.q.mean["layer0"]["w"], state.q.mean["layer0"]["w"], rtol=1e-6, atol=1e-9)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ogn", "ivon"])
def test_the_first_steps_by_hand(name):
    """t = 1 measures at the mean and leaves it; then S is the average of what was measured, and the mean moves."""
    rule, state = getattr(blr, name)(0.3, averaging=0.0, relative=True), None
    state = rule.init(params(), OBJECTIVE)
    step, size, mean = jax.jit(rule.step), ROWS, flat(params())
    np.testing.assert_allclose(flat(state.q.precision), PRIOR)
    measured, unit = [], None
    for count in range(3):
        x, y = X[20 * count : 20 * count + 20], Y[20 * count : 20 * count + 20]
        gradients = jax.vmap(jax.grad(loss), (None, 0))(state.q.mean, (x, y))
        rows = np.concatenate([np.reshape(g, (20, -1)) for g in jax.tree.leaves(gradients)], axis=1)
        total = size / 20 * rows.sum(axis=0)
        before = state
        state, info = step(OBJECTIVE, state, (x, y), jax.random.key(count))
        if name == "ivon" and count > 0:
            break
        measured.append(size / 20 * np.sum(rows**2, axis=0) if name == "ogn" else 20 / size * total**2)
        curvature = np.mean(measured, axis=0)
        np.testing.assert_allclose(flat(state.q.precision), curvature + PRIOR, rtol=1e-5)
        if count == 0:
            v = curvature / size
            determined = v / (v + PRIOR / size)
            unit = determined.sum() / np.sum(determined / (v + PRIOR / size))
            np.testing.assert_allclose(state.unit, unit, rtol=1e-5)
            np.testing.assert_array_equal(flat(state.q.mean), flat(before.q.mean))
            assert float(info.rate) == 0
        else:
            slope = (total + PRIOR * mean) / size
            mean = mean - 0.3 * unit * slope / ((curvature + PRIOR) / size)
            np.testing.assert_allclose(flat(state.q.mean), mean, rtol=1e-5, atol=1e-8)


@pytest.mark.extended
@pytest.mark.parametrize(("rate", "used"), [(1e-3, 1e-3), (0.5, 2e-3)])
def test_rates_in_adam_s_units(rate, used):
    """By default the step is ρ of the natural gradient, ρ = 80·√(M/N)·rate, and no longer than at a rate of 2e-3."""
    rule = blr.ogn(rate, averaging=0.0)
    step, state, parts = jax.jit(rule.step), rule.init(params(), OBJECTIVE), []
    for count in range(2):
        x, y = X[24 * count : 24 * count + 24], Y[24 * count : 24 * count + 24]
        parts.append(25 * flat(_squares(state.q.mean, x, y)))
        slope = 25 * flat(jax.grad(lambda w, x=x, y=y: jnp.sum(jax.vmap(lambda *e: loss(w, e))(x, y)))(state.q.mean))
        state, info = step(OBJECTIVE, state, (x, y), jax.random.key(count))
    assert float(state.unit) == pytest.approx(80 * np.sqrt(24 / ROWS))
    assert float(info.rate) == pytest.approx(rate)
    mean, precision = flat(params()), np.mean(parts, axis=0) + PRIOR
    expected = mean - used * 80 * np.sqrt(24 / ROWS) * (slope + PRIOR * mean) / precision
    np.testing.assert_allclose(flat(state.q.mean), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["vogn", "ivon"])
def test_adam_s_rate_learns(name):
    """At Adam's usual rate and all defaults, 20 epochs. As a rate of gradient descent, 1e-3 learns next to nothing."""
    images, labels = load_digits(return_X_y=True)
    q = fitted(getattr(blr, name)(1e-3), epochs=20).q
    key = jax.random.key(9)
    predicted = blr.predict(q, NETWORK.apply, images[ROWS:] / 16, key=key, samples=16, link="softmax")
    assert metrics.accuracy(predicted, labels[ROWS:]) > 0.7
    assert metrics.nll(predicted, labels[ROWS:]) < 1.0


@pytest.mark.extended
def test_a_window_counts_epochs():
    """The same number of epochs whatever the batch: 1 − β is M/(wN), and never above one in so many steps."""
    assert float(blr.Window(2.0).forgotten(50 / 10_000)) == pytest.approx(1 / 400)
    assert float(blr.Window(2.0, steps=20).forgotten(1.0)) == pytest.approx(1 / 20)
    assert blr.Window(2.0, decay=0.95).forgotten(None) == pytest.approx(0.05)
    rule = blr.ogn(0.1, curvature=1.0, decay=blr.Window(0.5, steps=1))
    x, y = X[:60], Y[:60]
    state, _ = rule.step(OBJECTIVE, rule.init(params(), OBJECTIVE), (x, y))
    expected = 0.8 * (ROWS + PRIOR) + 0.2 * (ROWS / 60 * flat(_squares(params(), x, y)) + PRIOR)
    np.testing.assert_allclose(flat(state.q.precision), expected, rtol=1e-6)


@pytest.mark.extended
def test_what_is_given_stays():
    """A precision that the user gives, a number h₀, an objective without a prior: nothing is replaced."""
    q = blr.DiagonalGaussian(params(), jax.tree.map(lambda w: 50.0 + w**2, params()))
    rule = blr.ogn(0.1, decay=0.9)
    state, _ = jax.jit(rule.step)(OBJECTIVE, rule.init(q, OBJECTIVE), (X, Y))
    expected = 0.9 * flat(q.precision) + 0.1 * (flat(_squares(params(), X, Y)) + PRIOR)
    np.testing.assert_allclose(flat(state.q.precision), expected, rtol=1e-6)
    published, default = blr.vogn(0.1, decay=0.999, curvature=1.0), blr.vogn(0.1)
    without_prior = blr.Objective(loss, size=ROWS)
    states = [rule.init(params(), without_prior) for rule in (published, default)]
    results = [
        jax.jit(rule.step)(without_prior, state, (X, Y), jax.random.key(0))[0].q
        for rule, state in zip((published, default), states, strict=True)
    ]
    np.testing.assert_array_equal(flat(results[0].precision), flat(results[1].precision))
    np.testing.assert_allclose(flat(results[0].mean), flat(results[1].mean), rtol=1e-12)


@pytest.mark.extended
def test_a_rejected_first_batch_is_measured_again():
    rule = blr.vogn(0.1)
    step, state = jax.jit(rule.step), rule.init(params(), OBJECTIVE)
    bad, info = step(OBJECTIVE, state, (X[:50] * jnp.inf, Y[:50]), jax.random.key(0))
    assert not info.finite
    assert float(bad.averaged) == 0
    after, _ = step(OBJECTIVE, bad, (X[:50], Y[:50]), jax.random.key(0))
    expected, _ = step(OBJECTIVE, state, (X[:50], Y[:50]), jax.random.key(0))
    np.testing.assert_array_equal(flat(after.q.precision), flat(expected.q.precision))
