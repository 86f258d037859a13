"""The networks' shapes, starts and losses, and the binary one's batch normalisation against torch's definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import bayesrule as blr
from bayesrule.fitting.predict import predict
from bayesrule.models import binary_mlp, cnn, gaussian_nll, mlp, softmax_cross_entropy

KEY = jax.random.key(0)


@pytest.mark.extended
def test_mlp_is_its_formula():
    network = mlp((6, 5, 4, 2), activation=jnp.tanh)
    params = network.init(KEY)
    x = jax.random.normal(jax.random.key(1), (2, 3))
    h = np.ravel(x)
    for i in range(3):
        layer = params[f"layer{i}"]
        h = (np.tanh(h) if i else h) @ layer["w"] + layer["b"]
    np.testing.assert_allclose(network.apply(params, x), h, rtol=1e-13)


@pytest.mark.extended
def test_starts_keep_the_scale():
    """Weights are N(0, 2/inputs), the last layer's N(0, 1/inputs), to four standard errors of a variance."""
    params = mlp((300, 200, 100)).init(KEY)
    for name, variance in (("layer0", 2 / 300), ("layer1", 1 / 200)):
        w = params[name]["w"]
        np.testing.assert_allclose(jnp.var(w), variance, rtol=4 * np.sqrt(2 / w.size))
        assert not params[name]["b"].any()
    params = cnn(channels=(32, 64)).init(KEY)
    for name, variance in (("conv1", 2 / (9 * 32)), ("linear", 1 / (49 * 64))):
        w = params[name]["w"]
        np.testing.assert_allclose(jnp.var(w), variance, rtol=4 * np.sqrt(2 / w.size))


def test_cnn_is_its_sums():
    network = cnn((5, 4, 2), channels=(3,), classes=2)
    params = jax.tree.map(lambda leaf: leaf + 0.1, network.init(KEY))
    x = np.asarray(jax.random.normal(jax.random.key(1), (5, 4, 2)))
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    h = np.zeros((5, 4, 3))
    for i, j in itertools.product(range(5), range(4)):
        h[i, j] = np.tensordot(padded[i : i + 3, j : j + 3], params["conv0"]["w"], axes=3) + params["conv0"]["b"]
    h = np.maximum(h, 0)[:4].reshape(2, 2, 2, 2, 3).max(axis=(1, 3))
    np.testing.assert_allclose(
        network.apply(params, x), h.ravel() @ params["linear"]["w"] + params["linear"]["b"], rtol=1e-12
    )


def test_vmapped_cnn_is_one_convolution_over_the_batch():
    network = cnn()
    params, x = network.init(KEY), jnp.zeros((32, 28, 28))  # grey images need no last axis
    jaxpr = str(jax.make_jaxpr(jax.vmap(network.apply, (None, 0)))(params, x))
    assert jaxpr.count("conv_general_dilated[") == 2
    assert "feature_group_count=1" in jaxpr
    assert "feature_group_count=32" not in jaxpr
    assert jax.vmap(network.apply, (None, 0))(params, x).shape == (32, 10)


def test_binary_start_is_of_one_size_with_random_signs():
    q = blr.Bernoulli(binary_mlp((50, 40, 3), spread=2.0).init(KEY))
    first = q.natural()["layer0"]["w"]
    np.testing.assert_array_equal(jnp.abs(first), 2.0)
    assert abs(first.mean()) < 4 * 2 / np.sqrt(first.size)
    assert set(q.natural()) == {"layer0", "layer1"}


def test_batch_normalization_and_its_running_averages():
    network = binary_mlp((3, 4, 2), momentum=0.8)
    weights = blr.Bernoulli(network.init(KEY)).sample(jax.random.key(1))
    x = np.asarray(jax.random.normal(jax.random.key(2), (9, 3)))

    def normalized(h, mean, variance):
        return (h - mean) / np.sqrt(variance + 1e-4)

    h, averages = x, []
    for i in range(2):
        h = (np.maximum(h, 0) if i else h) @ weights[f"layer{i}"]["w"]
        averages.append((h.mean(0), h.var(0)))
        h = normalized(h, *averages[-1])
    logits, statistics = network.apply(weights, x, network.statistics)
    np.testing.assert_allclose(logits, h, rtol=1e-11)
    for i, (mean, variance) in enumerate(averages):
        np.testing.assert_allclose(statistics[f"layer{i}"]["mean"], 0.2 * mean, rtol=1e-11)
        np.testing.assert_allclose(statistics[f"layer{i}"]["variance"], 0.8 + 0.2 * variance, rtol=1e-11)

    h = x  # by the running averages, row by row, and they stay as they are
    for i in range(2):
        kept = statistics[f"layer{i}"]
        h = normalized((np.maximum(h, 0) if i else h) @ weights[f"layer{i}"]["w"], kept["mean"], kept["variance"])
    evaluated, after = network.apply(weights, x, statistics, train=False)
    np.testing.assert_allclose(evaluated, h, rtol=1e-11)
    jax.tree.map(np.testing.assert_array_equal, after, statistics)
    one = predict(weights, lambda p, row: network.apply(p, row[None], statistics, train=False)[0][0], x, method="mean")
    np.testing.assert_allclose(one, h, rtol=1e-11)


@pytest.mark.extended
def test_batch_loss_runs_through_an_objective():
    network = binary_mlp((3, 8, 2))
    x = jax.random.normal(jax.random.key(2), (30, 3))
    y = (x[:, 0] > 0).astype(int)
    losses, statistics = network.loss(network.init(KEY), (x, y), network.statistics, None)
    logits, expected = network.apply(network.init(KEY), x, network.statistics)
    np.testing.assert_allclose(losses, optax.softmax_cross_entropy_with_integer_labels(logits, y), rtol=1e-11)
    jax.tree.map(np.testing.assert_array_equal, statistics, expected)
    # Real weights by gradient descent: the loss falls and the state carries the averages along.
    objective = blr.Objective.from_batch(network.loss, size=30, aux=network.statistics)
    rule = blr.gradient_descent(1e-3)
    step = jax.jit(lambda state: rule.step(objective, state, (x, y)))
    state = rule.init(blr.Bernoulli(network.init(KEY)).sample(jax.random.key(3)), objective)
    values = []
    for _ in range(10):
        state, info = step(state)
        values.append(float(info.objective))
    assert values[-1] < values[0]
    assert jnp.any(state.aux["layer0"]["mean"] != 0)


def test_binary_network_for_one_example():
    network = binary_mlp((3, 4, 2), normalization="fan_in")
    q = blr.Bernoulli(network.init(KEY))
    weights, x = q.sample(jax.random.key(1)), jnp.array([0.2, -0.4, 1.0])
    expected = np.maximum(x @ weights["layer0"]["w"] / 3**0.5, 0) @ weights["layer1"]["w"] / 2
    np.testing.assert_allclose(network.apply(weights, x), expected, rtol=1e-13)
    assert predict(q, network.apply, x[None], key=KEY, link="softmax").shape == (1, 2)


def test_losses_are_optaxs_and_scipys():
    logits = jnp.array([0.3, -1.0, 2.0])
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, 1)
    np.testing.assert_allclose(softmax_cross_entropy(logits, 1), theirs, rtol=1e-13)
    output, target = jnp.array([0.3, -1.0]), jnp.array([1.0, 0.5])
    expected = -stats.norm.logpdf(target, output, 0.5).sum()
    np.testing.assert_allclose(gaussian_nll(output, target, 0.25), expected, rtol=1e-13)


@pytest.mark.extended
def test_cnn_learns_with_a_recipe():
    network = cnn((8, 8, 1), channels=(4,), classes=2)
    x = jax.random.normal(KEY, (20, 8, 8))
    y = (x.mean((1, 2)) > 0).astype(int)
    objective = blr.Objective(softmax_cross_entropy, output=network.apply, size=20, regularizer=1.0)
    rule, params = blr.gradient_descent(0.01), network.init(jax.random.key(1))
    state, step = rule.init(params, objective), jax.jit(lambda state: rule.step(objective, state, (x, y)))
    for _ in range(20):
        state, _ = step(state)
    assert objective.data(state.q.mean, (x, y))[0] < 0.8 * objective.data(params, (x, y))[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mlp((3,)), "at least two layers"),
        (lambda: mlp((3, 2)).apply(mlp((3, 2)).init(KEY), jnp.ones((5, 3))), "jax.vmap"),
        (lambda: cnn((4, 4, 1), channels=(2, 2, 2)), "fewer channels"),
        (lambda: binary_mlp((3, 2), normalization="layer"), '"batch" or "fan_in"'),
        (lambda: binary_mlp((3, 2), momentum=1.0), r"\[0, 1\)"),
        (lambda: gaussian_nll(jnp.ones(2), jnp.ones(3)), "the same number of entries"),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()
