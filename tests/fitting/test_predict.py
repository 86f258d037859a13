"""Predictions against brute force, closed forms and quadrature, for our own and other people's networks."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import bayesrule as blr
from bayesrule.fitting.predict import _Plan, _predict, predict

# Optional: the dev extra installs it.
linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

ROWS = jax.random.normal(jax.random.key(0), (23, 3))
MEAN = {"b": jnp.array([0.3, -0.4]), "w": jnp.array([[0.5, -1.0], [0.2, 0.7], [-0.3, 0.1]])}
PRECISION = jax.tree.map(lambda m: 3.0 + jnp.abs(m), MEAN)


def network(params, x):
    """Two outputs, not linear in the parameters."""
    return jnp.tanh(x @ params["w"]) + params["b"] * jnp.sum(params["w"])


def linear(params, x):
    return x @ params["w"] + params["b"]


def gaussians():
    root = jax.random.normal(jax.random.key(1), (8, 8)) / 3
    return {
        "FixedGaussian": blr.FixedGaussian(MEAN, PRECISION),
        "DiagonalGaussian": blr.DiagonalGaussian(MEAN, PRECISION),
        "Gaussian": blr.Gaussian(MEAN, root @ root.T + 2 * jnp.eye(8)),
        "LowRankGaussian": blr.LowRankGaussian(MEAN, 2.0, root[:, :3]),
    }


# Averages over samples and points.


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "link"),
    [("Gaussian", None), ("Gaussian", "softmax"), ("Gaussian", jnp.square), ("Bernoulli", "softmax")],
    ids=["Gaussian", "Gaussian-softmax", "Gaussian-square", "Bernoulli-softmax"],
)
def test_samples_are_brute_force_over_the_split_keys(name, link):
    q = blr.Bernoulli(MEAN) if name == "Bernoulli" else gaussians()[name]
    g = {None: lambda f: f, "softmax": scipy.special.softmax, jnp.square: np.square}[link]
    sample, values = jax.jit(lambda key: q.sample(key)), []
    for key in jax.random.split(jax.random.key(3), 9):
        theta = jax.tree.map(np.asarray, sample(key))
        outputs = np.tanh(np.asarray(ROWS) @ theta["w"]) + theta["b"] * np.sum(theta["w"])  # `network`
        values.append([g(f) for f in outputs])
    mean, variance = predict(q, network, ROWS, key=jax.random.key(3), samples=9, link=link, variance=True)
    np.testing.assert_allclose(mean, np.mean(values, axis=0), rtol=1e-12)
    np.testing.assert_allclose(variance, np.var(values, axis=0), rtol=1e-10, atol=1e-15)


everywhere = jax.jit(jax.vmap(jax.vmap(network, (None, 0)), (0, None)))


def test_points_bring_their_weights():
    q = gaussians()["DiagonalGaussian"]
    points = blr.Quadrature(2)
    theta, weights, *_ = jax.jit(lambda q: points.at(q, None))(q)
    values = np.asarray(everywhere(theta, ROWS))
    mean, variance = predict(q, network, ROWS, points=points, variance=True)
    expected = np.tensordot(weights, values, axes=1)
    np.testing.assert_allclose(mean, expected, rtol=1e-11)
    np.testing.assert_allclose(variance, np.tensordot(weights, (values - expected) ** 2, axes=1), rtol=1e-10)


def test_antithetic_points_predict_a_linear_model_exactly():
    q = gaussians()["Gaussian"]
    mean = predict(q, linear, ROWS, points=blr.MonteCarlo(2, antithetic=True), key=jax.random.key(0))
    np.testing.assert_allclose(mean, ROWS @ MEAN["w"] + MEAN["b"], rtol=1e-12)


def test_points_in_turn_are_the_same_average():
    q, points = gaussians()["DiagonalGaussian"], blr.MonteCarlo(6, antithetic=True, scan=True)
    part = jax.jit(lambda key: points.part(q, key).theta)
    values = [everywhere(part(key), ROWS) for key in jax.random.split(jax.random.key(5), 3)]
    mean, variance = predict(q, network, ROWS, points=points, key=jax.random.key(5), variance=True)
    np.testing.assert_allclose(mean, np.concatenate(values).mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, np.concatenate(values).var(0), rtol=1e-10)


def test_enumerated_signs_of_no_weight_change_nothing():
    # λ = −400 leaves no weight to the first half of the support, where the output is not a number.
    q = blr.Bernoulli(jnp.array([400.0, 0.2]))
    mean, variance = predict(
        q, lambda s, x: x * s[1] + jnp.log(s[0]), jnp.ones(3), points=blr.Enumeration(), variance=True
    )
    np.testing.assert_allclose(mean, np.tanh(0.2), rtol=1e-12)
    np.testing.assert_allclose(variance, 1 - np.tanh(0.2) ** 2, rtol=1e-12)


def test_integer_outputs_average_to_shares():
    def label(params, x):
        return jnp.argmax(network(params, x))

    share = predict(gaussians()["Gaussian"], label, ROWS, key=jax.random.key(0), samples=16)
    assert share.dtype == jnp.float64
    np.testing.assert_allclose(share * 16, jnp.round(share * 16), rtol=1e-14)
    assert 0 < share.mean() < 1


def test_a_key_says_everything():
    q, key = gaussians()["DiagonalGaussian"], jax.random.key(7)
    first = predict(q, network, ROWS, key=key)
    np.testing.assert_array_equal(first, predict(q, network, ROWS, key=jax.random.clone(key)))
    assert jnp.max(jnp.abs(first - predict(q, network, ROWS, key=jax.random.key(8)))) > 1e-3


@pytest.mark.extended
def test_keys_are_used_once():
    with jax.debug_key_reuse(True):
        predict(gaussians()["Gaussian"], network, ROWS, key=jax.random.key(0), samples=3, batch_size=5)
        predict(gaussians()["Gaussian"], network, ROWS, key=jax.random.key(0), method="linearized", link=jnp.exp)


# Chunks.


@pytest.mark.sampled("link")
@pytest.mark.parametrize(
    ("choices", "sizes"),
    [
        ({"samples": 5}, (1, 4, 22, 23, 100)),
        ({"points": blr.MonteCarlo(4)}, (4, 100)),
        ({"method": "linearized"}, (1, 4, 22, 23, 100)),
        ({"method": "linearized", "link": "softmax", "samples": 6}, (4, 100)),
        ({"method": "linearized", "link": jnp.square, "samples": 6}, (4, 100)),
    ],
    ids=["samples", "points", "linearized", "softmax", "link"],
)
def test_chunks_do_not_matter(choices, sizes):
    q = gaussians()["Gaussian"]
    expected = predict(q, network, ROWS, key=jax.random.key(0), variance=True, **choices)
    for batch_size in sizes:
        chunked = predict(q, network, ROWS, key=jax.random.key(0), variance=True, batch_size=batch_size, **choices)
        for ours, theirs in zip(chunked, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_the_mean_in_chunks_of_a_tree():
    def apply(params, x):
        return params["b"][0] * x["scale"] + jnp.sum(x["row"] @ params["w"])

    x = {"row": ROWS, "scale": jnp.arange(23.0)}
    expected = [apply(MEAN, {"row": r, "scale": s}) for r, s in zip(ROWS, jnp.arange(23.0), strict=True)]
    for batch_size in (None, 5):
        mean = predict(gaussians()["Gaussian"], apply, x, method="mean", batch_size=batch_size)
        np.testing.assert_allclose(mean, np.array(expected), rtol=1e-12)


def wide(params, x):
    return jax.nn.relu(x @ params["a"]) @ params["b"]


@pytest.mark.extended
def test_memory_is_bounded():
    """Neither all samples of a network, nor all rows' activations, nor all Jacobians are held at once."""
    q, x = blr.DiagonalGaussian({"a": jnp.zeros((50, 2000)), "b": jnp.zeros((2000, 4))}, 1.0), jnp.zeros((20_000, 50))

    def temporary(rows, method, samples=4):
        plan = _Plan(wide, None, method, samples, None, False)
        lowered = _predict.lower(q, x[:rows], jax.random.key(0), None, None, plan)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    theta = 8 * 108_000
    assert temporary(2000, "samples", 64) < temporary(2000, "samples") + theta
    activations = 8 * 2000 * (20_000 - 2000)
    assert temporary(20_000, "samples") < temporary(2000, "samples") + activations / 4
    assert temporary(200, "linearized") < 4 * 8 * 2**24 < 4 * theta * 200


# The mean.


def test_mean_of_each_family():
    def first(params, x):
        return params["b"] * x

    x = jnp.arange(4.0)
    for q, mean in (
        (blr.Bernoulli(MEAN), jnp.tanh(MEAN["b"])),
        (blr.DiagonalGaussian(MEAN, 2.0), MEAN["b"]),
        (MEAN, MEAN["b"]),
    ):
        np.testing.assert_allclose(predict(q, first, x, method="mean"), x[:, None] * mean, rtol=1e-13)
    shares = predict(MEAN, first, x, method="mean", link="softmax")
    np.testing.assert_allclose(shares, jax.nn.softmax(x[:, None] * MEAN["b"]), rtol=1e-13)


# Linear-Gaussian models, where everything is known.


@pytest.mark.extended
@pytest.mark.parametrize("name", gaussians())
def test_linear_model_in_closed_form(name):
    q = gaussians()[name]
    # θ ravelled is (b, w): the output k is the row of zeros, eₖ and x at the k-th columns of w.
    jacobian = np.stack([np.r_[np.eye(2)[k], np.outer(x, np.eye(2)[k]).ravel()] for x in ROWS for k in (0, 1)])
    variance = np.einsum("np,pq,nq->n", jacobian, q.covariance(), jacobian).reshape(-1, 2)
    mean = np.asarray(ROWS @ MEAN["w"] + MEAN["b"])
    f, v = predict(q, linear, ROWS, method="linearized", variance=True)
    np.testing.assert_allclose(f, mean, rtol=1e-12)
    np.testing.assert_allclose(v, variance, rtol=1e-11)
    count = 20_000
    f, v = predict(q, linear, ROWS, key=jax.random.key(2), samples=count, variance=True)
    # 46 numbers each, correlated; five standard errors of a mean and of a variance.
    np.testing.assert_array_less(np.abs(f - mean), 5 * np.sqrt(variance / count))
    np.testing.assert_array_less(np.abs(v - variance), 5 * variance * np.sqrt(2 / count))


def scalar(params, x):
    return x @ params["w"][:, 0]


@pytest.mark.extended
def test_probit_approximation_of_the_sigmoid():
    q = blr.DiagonalGaussian(MEAN, 0.2)  # outputs with variances up to 40
    exact = []
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    f, v = predict(q, scalar, ROWS, method="linearized", variance=True)
    for center, variance in zip(f, v, strict=True):
        exact.append(weights / weights.sum() @ np.asarray(jax.nn.sigmoid(center + np.sqrt(variance) * nodes)))
    approximate = predict(q, scalar, ROWS, method="linearized", link="sigmoid")
    np.testing.assert_allclose(approximate, jax.nn.sigmoid(f / np.sqrt(1 + np.pi * v / 8)), rtol=1e-12)
    np.testing.assert_allclose(approximate, exact, atol=0.02)  # the approximation's error is below 0.019
    drawn = predict(q, scalar, ROWS, method="linearized", link=jax.nn.sigmoid, samples=40_000, key=jax.random.key(0))
    np.testing.assert_allclose(drawn, exact, atol=5 * 0.5 / np.sqrt(40_000))


@pytest.mark.extended
def test_softmax_approximation_and_its_variance():
    q, key = blr.DiagonalGaussian(MEAN, 2.0), jax.random.key(0)
    f, v = predict(q, linear, ROWS, method="linearized", variance=True)
    mean, variance = predict(
        q, linear, ROWS, method="linearized", link="softmax", variance=True, samples=20_000, key=key
    )
    np.testing.assert_allclose(mean, jax.nn.softmax(f / jnp.sqrt(1 + jnp.pi / 8 * v)), rtol=1e-12)
    np.testing.assert_array_equal(mean, predict(q, linear, ROWS, method="linearized", link="softmax"))
    # The outputs of a linear model are Gaussian, so draws of θ say the same.
    averaged, sampled = predict(q, linear, ROWS, link="softmax", variance=True, samples=20_000, key=jax.random.key(1))
    np.testing.assert_allclose(variance, sampled, atol=10 * 0.25 / np.sqrt(20_000))
    np.testing.assert_allclose(mean, averaged, atol=0.06)  # it knows nothing of the outputs' correlation
    assert jnp.all(variance <= 0.25)


def test_outputs_that_depend_on_each_other_can_be_drawn():
    def twice(params, x):
        return jnp.stack([scalar(params, x)] * 3)

    q = gaussians()["Gaussian"]
    mean, variance = predict(
        q, twice, ROWS, method="linearized", link=lambda f: f, key=jax.random.key(0), variance=True, samples=5000
    )
    _, expected = predict(q, twice, ROWS, method="linearized", variance=True)
    np.testing.assert_allclose(mean[:, 0], mean[:, 2], rtol=1e-6)
    np.testing.assert_allclose(variance, expected, rtol=5 * np.sqrt(2 / 5000))


# Compilation.


def test_a_second_call_does_not_trace_again():
    calls = []

    def counted(params, x):
        calls.append(1)
        return network(params, x)

    for method in ("samples", "mean", "linearized"):
        predict(gaussians()["Gaussian"], counted, ROWS, key=jax.random.key(0), method=method, batch_size=7)
        traced = len(calls)
        other = jax.tree.map(lambda leaf: 1.1 * leaf, gaussians()["Gaussian"])
        predict(other, counted, ROWS + 1, key=jax.random.key(1), method=method, batch_size=7)
        assert len(calls) == traced


@pytest.mark.extended
def test_inside_jit_and_vmap():
    q, x = blr.DiagonalGaussian(MEAN, PRECISION), ROWS[:5]
    expected = predict(q, network, x, key=jax.random.key(0))
    jitted = jax.jit(lambda q, x, key: predict(q, network, x, key=key))
    np.testing.assert_allclose(jitted(q, x, jax.random.key(0)), expected, rtol=1e-13)
    keys = jax.random.split(jax.random.key(0), 3)
    each = jax.vmap(lambda key: predict(q, network, x, key=key, batch_size=2))(keys)
    np.testing.assert_allclose(each[1], predict(q, network, x, key=keys[1]), rtol=1e-12)


# Errors.

Q = blr.DiagonalGaussian(MEAN, 1.0)
KEY = {"key": jax.random.key(0)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: predict(Q, network, ROWS), "pass key="),
        (lambda: predict(Q, network, ROWS, points=blr.MonteCarlo(2)), "pass key="),
        (lambda: predict(MEAN, network, ROWS, **KEY), 'method="mean"'),
        (lambda: predict(SimpleNamespace(q=Q), network, ROWS, **KEY), r"pass \.q of"),
        (lambda: predict(Q, network, ROWS, method="mean", variance=True), "has no variance"),
        (lambda: predict(Q, network, ROWS, method="laplace"), "'linearized'"),
        (lambda: predict(blr.Bernoulli(MEAN), network, ROWS, method="linearized"), 'method="samples"'),
        (lambda: predict(Q, network, ROWS, method="linearized", link=jnp.exp), "no closed form"),
        (lambda: predict(Q, network, ROWS, method="linearized", link="softmax", variance=True), "no closed form"),
        (lambda: predict(Q, network, ROWS, method="mean", points=blr.Delta()), "points= says where"),
        (lambda: predict(Q, network, ROWS, link="probit", **KEY), '"softmax", "sigmoid" or a function'),
        (lambda: predict(Q, scalar, ROWS, link="softmax", **KEY), 'link="sigmoid"'),
        (lambda: predict(Q, network, ROWS, samples=0, **KEY), "samples= is a whole number above 0"),
        (lambda: predict(Q, network, ROWS, batch_size=2.5, **KEY), "batch_size= is a whole number above 0"),
        (lambda: predict(Q, network, jnp.zeros((0, 3)), **KEY), "no rows"),
        (lambda: predict(Q, network, (ROWS, ROWS[:2]), **KEY), "same number of rows"),
        (lambda: predict(Q, network, 3.0, **KEY), r"x\[None\]"),
        (lambda: predict(Q, lambda p, x: (x, x), ROWS, **KEY), "returns one array"),
        (lambda: predict(Q, None, ROWS, **KEY), "takes a function apply"),
        (lambda: predict(Q, jax.tree_util.Partial(network), ROWS, link=[1], **KEY), "hashable"),
        (lambda: predict({"f": network}, network, ROWS, method="mean"), "equinox.partition"),
        (lambda: predict(blr.Gaussian(ROWS, jnp.ones((23, 3, 3))), network, ROWS, method="linearized"), "vmap"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_wrong_shape_inside_apply_says_what_apply_saw():
    with pytest.raises(TypeError) as caught:
        predict(Q, network, ROWS[:, :2], method="mean")
    assert "one example at a time; its x had the shapes [(2,)]" in caught.value.__notes__[0]


# Other people's networks: (params, apply for one example).


def linen_network():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2, param_dtype=float)(jnp.tanh(linen.Dense(8, param_dtype=float)(x)))

    net = Net()
    return net.init(jax.random.key(0), ROWS[0]), net.apply


def nnx_network():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 8, rngs=rngs, param_dtype=float)
            self.second = nnx.Linear(8, 2, rngs=rngs, param_dtype=float)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def equinox_network():
    net = eqx.nn.MLP(3, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)
    return params, lambda params, x: eqx.combine(params, static)(x)


def haiku_network():
    """A pair of functions over a dictionary of modules, as `haiku.transform` gives."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "net/~/linear": {"w": jax.random.normal(keys[0], (3, 8)) / 3**0.5, "b": jnp.zeros(8)},
        "net/~/linear_1": {"w": jax.random.normal(keys[1], (8, 2)) / 8**0.5, "b": jnp.zeros(2)},
    }

    def apply(params, x):
        for i, layer in enumerate(params.values()):
            x = (jnp.tanh(x) if i else x) @ layer["w"] + layer["b"]
        return x

    return params, apply


@pytest.mark.extended
@pytest.mark.parametrize("make", [linen_network, nnx_network, equinox_network, haiku_network])
def test_other_peoples_networks(make):
    params, apply = make()
    labels = (ROWS[:, 0] > 0).astype(int)

    def loss(logits, label):
        return jax.nn.logsumexp(logits) - logits[label]

    objective = blr.Objective(loss, output=apply, size=len(ROWS), regularizer=1.0)
    rule = blr.gradient_descent(0.02)
    state, step = rule.init(params, objective), jax.jit(lambda state: rule.step(objective, state, (ROWS, labels)))
    total_loss = jax.jit(lambda params: objective.data(params, (ROWS, labels))[0])
    for _ in range(20):
        state, _ = step(state)
    assert total_loss(state.q.mean) < 0.6 * total_loss(params)
    q = blr.DiagonalGaussian(state.q.mean, 50.0)
    key = jax.random.key(4)
    averaged = predict(q, apply, ROWS, key=key, samples=3, link="softmax")
    drawn = jax.jit(lambda k: jax.nn.softmax(jax.vmap(apply, (None, 0))(q.sample(k), ROWS)))
    expected = [drawn(k) for k in jax.random.split(jax.random.key(4), 3)]
    np.testing.assert_allclose(averaged, np.mean(expected, axis=0), rtol=1e-6)
    exact = predict(q, apply, ROWS, method="mean", link="softmax")
    linearized = predict(q, apply, ROWS, method="linearized", link="softmax")
    assert jnp.all(jnp.max(linearized, 1) < jnp.max(exact, 1))  # uncertainty about the weights lowers the confidence
    assert jnp.mean(jnp.argmax(exact, 1) == labels) > 0.8
