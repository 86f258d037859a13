"""Modules of equinox against their own training loops, and what a module may hold besides parameters."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr
from bayesrule.interop.equinox import from_equinox

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
STEPS = 15
KEYS = jax.random.split(jax.random.key(0), 8)


def loss(f, y):
    return optax.softmax_cross_entropy_with_integer_labels(f, y)


def mini_batches(dtype):
    rows = np.stack([RNG.permutation(24)[:8] for _ in range(STEPS)])
    return jnp.asarray(X[rows], dtype), jnp.asarray(Y[rows])


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Block(eqx.Module):
    """Lists of layers, an activation, a number, buffers of integers, booleans and a key, None, a static field."""

    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: Callable
    scale: float
    order: jax.Array
    used: jax.Array
    seed: jax.Array
    nothing: None
    name: str = eqx.field(static=True)

    def __init__(self, rate=0.0, dtype=jnp.float64, mode="batch"):
        linear = lambda n, m, key, **options: eqx.nn.Linear(n, m, key=key, dtype=dtype, **options)
        self.layers = [linear(3, 4, KEYS[0]), linear(4, 4, KEYS[1], use_bias=False), linear(4, 2, KEYS[2])]
        self.norm = eqx.nn.BatchNorm(4, "batch", momentum=0.9, dtype=dtype, mode=mode)
        self.dropout, self.activation, self.scale = eqx.nn.Dropout(rate), jnp.tanh, 2.0
        self.order, self.used = jnp.array([1, 0]), jnp.array([True, True, False, True])
        self.seed, self.nothing, self.name = jax.random.key(7), None, "block"

    def __call__(self, x, state, *, key=None):
        for layer in self.layers[:2]:
            x = self.activation(self.scale * layer(x))
        x, state = self.norm(x, state)
        x = jnp.where(self.used, self.dropout(x, key=key), 0.0)
        return self.layers[2](x)[self.order], state


@pytest.mark.sampled("ema-float32-1e-06")
@pytest.mark.parametrize(("mode", "dtype", "tolerance"), [("batch", jnp.float64, 1e-12), ("ema", jnp.float32, 1e-6)])
def test_batch_norm_is_its_own_training_loop(mode, dtype, tolerance):
    batches = mini_batches(dtype)
    first, first_state = eqx.nn.make_with_state(Block)(dtype=dtype, mode=mode)
    network = from_equinox(first, first_state)

    def mean_loss(model, state, x, y):
        run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        f, state = run(x, state)
        return jnp.mean(loss(f, y)), state

    optimizer = optax.adam(0.01)

    @eqx.filter_jit
    def train_step(model, state, optimizer_state, x, y):
        gradient, state = eqx.filter_grad(mean_loss, has_aux=True)(model, state, x, y)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return eqx.apply_updates(model, updates), state, optimizer_state

    model, state, optimizer_state = first, first_state, optimizer.init(eqx.filter(first, eqx.is_inexact_array))
    for x, y in zip(*batches, strict=True):
        model, state, optimizer_state = train_step(model, state, optimizer_state, x, y)

    rule, objective = blr.adam(0.01), network.objective(loss, size=24)
    ours, step = rule.init(network.params, objective), jax.jit(rule.step)
    for x, y in zip(*batches, strict=True):
        ours, _ = step(objective, ours, (x, y), jax.random.key(0))
    for i in range(3):
        assert_close(ours.q.mean["layers"][str(i)]["weight"], model.layers[i].weight, tolerance)
    assert_close(ours.q.mean["norm"], {"bias": model.norm.bias, "weight": model.norm.weight}, tolerance)
    assert_close(ours.aux, state, tolerance)
    assert not np.allclose(jax.tree.leaves(ours.aux)[-1], jax.tree.leaves(first_state)[-1], atol=1e-3)


@pytest.mark.extended
def test_the_module_comes_back_also_from_a_file(tmp_path):
    network = from_equinox(*eqx.nn.make_with_state(Block)(rate=0.3), random=True)
    objective = network.objective(loss, size=24, regularizer=1.0)
    result = blr.fit(blr.adam(0.01), objective, network.params, (X, Y), steps=12, batch_size=8, key=jax.random.key(0))
    result.save(tmp_path / "result")
    again = blr.load(tmp_path / "result")
    fitted = network.fitted(again)
    model, state = fitted.rebuild()
    assert type(model) is Block
    assert (model.activation, model.scale, model.name, model.nothing) == (jnp.tanh, 2.0, "block", None)
    assert model.order.dtype == int
    assert model.used.dtype == bool
    assert jnp.array_equal(jax.random.key_data(model.seed), jax.random.key_data(jax.random.key(7)))
    inference = eqx.nn.inference_mode(model)
    expected = jax.jit(jax.vmap(lambda x: inference(x, state)[0]))(X)
    actual = blr.predict(result.q, fitted.apply, X, method="mean", frozen=fitted.frozen)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    draw, _ = fitted.rebuild(again.q.sample(jax.random.key(1)))
    assert not np.allclose(draw.layers[0].weight, model.layers[0].weight)


@pytest.mark.extended
def test_dropout_draws_from_the_key_of_the_step():
    model, state = eqx.nn.make_with_state(Block)(rate=0.5)
    network = from_equinox(model, state, random=True)
    objective, key = network.objective(loss, size=24), jax.random.key(3)
    losses = jax.jit(lambda key: objective.losses(network.params, (X, Y), objective.aux, key)[0])
    values = losses(key)
    run = jax.vmap(lambda x, key: model(x, state, key=key), out_axes=(0, None), axis_name="batch")
    f, _ = eqx.filter_jit(run)(X, jax.random.split(key, 24))
    np.testing.assert_allclose(values, loss(f, Y), rtol=1e-12)
    other = losses(jax.random.key(4))
    assert not np.allclose(values, other)
    # A module that draws and has no state is a loss of the batch too.
    mlp = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=KEYS[0], dtype=jnp.float64), eqx.nn.Dropout(0.5)])
    network = from_equinox(mlp, random=True)
    objective = network.objective(loss, size=24)
    values, aux = objective.losses(network.params, (X, Y), objective.aux, key)
    f = jax.vmap(lambda x, key: mlp(x, key=key))(X, jax.random.split(key, 24))
    np.testing.assert_allclose(values, loss(f, Y), rtol=1e-12)
    assert aux is None


@pytest.mark.extended
def test_without_a_state_there_is_a_loss_for_each_example():
    mlp = eqx.nn.MLP(3, 2, 4, 2, activation=jax.nn.softplus, key=KEYS[0], dtype=jnp.float64)
    network = from_equinox(mlp)
    objective = network.objective(loss, size=24, regularizer=1.0)
    learned, frozen = eqx.partition(mlp, eqx.is_inexact_array)
    apply = lambda params, x: eqx.combine(params, frozen)(x)
    by_hand = blr.Objective(loss, output=apply, size=24, regularizer=1.0)
    # (Of `vogn` the noise would be another, because a dict's leaves are in another order.)
    rule = blr.ogn(0.001)
    step = jax.jit(rule.step)
    ours, plain = rule.init(network.params, objective), rule.init(learned, by_hand)
    for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):
        ours, _ = step(objective, ours, (X[rows], Y[rows]))
        plain, _ = step(by_hand, plain, (X[rows], Y[rows]))
    means, precisions = (
        eqx.filter(network.rebuild(tree), eqx.is_inexact_array) for tree in (ours.q.mean, ours.q.precision)
    )
    assert_close(means, plain.q.mean, 1e-10)
    assert_close(precisions, plain.q.precision, 1e-10)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        pair = tuple(eqx.nn.Linear(3, 3, use_bias=False, key=key, dtype=jnp.float64) for key in KEYS[:2])
        self.shared = eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, x):
        first, second = self.shared()
        return second(jnp.tanh(first(x)))[:2]


def test_shared_weights_are_one_parameter():
    network = from_equinox(Tied())
    (weight,) = jax.tree.leaves(network.params)
    objective = network.objective(loss, size=24, regularizer=1.0)
    by_hand = blr.Objective(loss, output=lambda w, x: (w @ jnp.tanh(w @ x))[:2], size=24, regularizer=1.0)
    step = jax.jit(blr.sgd(0.1).step)
    ours, _ = step(objective, blr.sgd(0.1).init(network.params, objective), (X, Y))
    plain, _ = step(by_hand, blr.sgd(0.1).init(weight, by_hand), (X, Y))
    np.testing.assert_allclose(jax.tree.leaves(ours.q.mean)[0], plain.q.mean, rtol=1e-12)
    assert not np.allclose(plain.q.mean, weight)
    first, second = network.rebuild(ours.q.mean).shared()
    assert first.weight is second.weight


def test_a_layer_that_occurs_twice_is_two_and_says_so():
    layer = eqx.nn.Linear(3, 3, key=KEYS[0])
    with pytest.warns(UserWarning, match="layers/0 and layers/1 is the same object, and equinox learns it as 2"):
        network = from_equinox(eqx.nn.Sequential([layer, layer]))
    assert len(jax.tree.leaves(network.params)) == 4
    zeros = jnp.zeros(3)  # Layers may begin from the same array without being tied.
    layers = [eqx.tree_at(lambda x: x.bias, eqx.nn.Linear(3, 3, key=key), zeros) for key in KEYS[:2]]
    assert len(jax.tree.leaves(from_equinox(eqx.nn.Sequential(layers)).params)) == 4


@pytest.mark.extended
def test_masks_freeze_parameters():
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=KEYS[0], dtype=jnp.float64)
    mask = jax.tree.map(lambda _: True, mlp)
    mask = eqx.tree_at(lambda m: (m.layers[1].weight, m.layers[1].bias), mask, (False, False))
    by_path = lambda path, leaf: not path.startswith("layers/1")
    networks = [from_equinox(mlp, mask=mask), from_equinox(mlp, mask=by_path)]
    for network in networks:
        assert jax.tree.leaves(network.params["layers"]["0"]) == []
        assert len(jax.tree.leaves(network.params)) == 2
    objective = network.objective(loss, size=24, regularizer=1.0)
    result = blr.fit(blr.vogn(0.01), objective, network.params, (X, Y), steps=4, batch_size=8, key=jax.random.key(0))
    model = network.fitted(result).rebuild()
    np.testing.assert_array_equal(model.layers[0].weight, mlp.layers[0].weight)
    assert not np.allclose(model.layers[1].weight, mlp.layers[1].weight)


def test_modules_that_cannot_be_split():
    with pytest.raises(ValueError, match="nothing to learn"):
        from_equinox(eqx.nn.Lambda(jnp.tanh))
    with pytest.raises(ValueError, match="nothing to learn"):
        from_equinox(eqx.nn.Linear(3, 2, key=KEYS[0]), mask=lambda path, leaf: True)

    class Odd(eqx.Module):
        norm: eqx.nn.BatchNorm
        State: jax.Array

    model, state = eqx.nn.make_with_state(Odd)(eqx.nn.BatchNorm(2, "batch", mode="batch"), jnp.ones(2))
    with pytest.raises(ValueError, match="rename the field"):
        from_equinox(model, state)
