"""Modules of flax against their own training loops, and what a module may hold besides parameters."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

from flax.training.train_state import TrainState  # noqa: E402  (skipped above where flax is missing)

from bayesrule.interop.flax import from_linen, from_nnx  # noqa: E402  (skipped above where flax is missing)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
STEPS = 15


def loss(f, y):
    return optax.softmax_cross_entropy_with_integer_labels(f, y)


def mini_batches(dtype):
    rows = np.stack([RNG.permutation(24)[:8] for _ in range(STEPS)])
    return jnp.asarray(X[rows], dtype), jnp.asarray(Y[rows])


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@nnx.jit
def run(model, x):
    return model(x)


def take_steps(rule, objective, params, batches):
    """The state after one step on each batch."""
    state = rule.init(params, objective)

    def body(state, step):
        batch, key = step
        return rule.step(objective, state, batch, key)[0], None

    return jax.jit(lambda s, b, k: jax.lax.scan(body, s, (b, k))[0])(
        state, batches, jax.random.split(jax.random.key(0), STEPS)
    )


# linen.


class Linen(linen.Module):
    rate: float = 0.0
    dtype: type = jnp.float64

    @linen.compact
    def __call__(self, x, train):
        x = x.reshape((x.shape[0], -1))
        # A bias here would have no gradient, and Adam would divide rounding errors by rounding errors.
        x = linen.Dense(5, use_bias=False, param_dtype=self.dtype)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9, param_dtype=self.dtype)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))
        return linen.Dense(2, param_dtype=self.dtype)(x)


MODES = {"train": {"train": True}, "evaluate": {"train": False}}


@pytest.mark.extended
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float64, 1e-12), (jnp.float32, 1e-6)])
def test_linen_with_batch_norm_is_its_own_training_loop(dtype, tolerance):
    module, batches = Linen(dtype=dtype), mini_batches(dtype)
    # linen makes statistics in float32, and its own loop would widen them in the first step.
    variables = jax.tree.map(lambda x: x.astype(dtype), module.init(jax.random.key(0), batches[0][0], train=False))

    class State(TrainState):
        batch_stats: dict

    state = State.create(
        apply_fn=module.apply, params=variables["params"], tx=optax.adam(0.01), batch_stats=variables["batch_stats"]
    )

    @jax.jit
    def train_step(state, x, y):
        def mean_loss(params):
            both = {"params": params, "batch_stats": state.batch_stats}
            f, changed = state.apply_fn(both, x, train=True, mutable=["batch_stats"])
            return jnp.mean(loss(f, y)), changed

        gradient, changed = jax.grad(mean_loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradient, batch_stats=changed["batch_stats"])

    for x, y in zip(*batches, strict=True):
        state = train_step(state, x, y)

    network = from_linen(module, variables, **MODES)
    ours = take_steps(blr.adam(0.01), network.objective(loss, size=24), network.params, batches)
    assert_close(ours.q.mean["params"], state.params, tolerance)
    assert_close(ours.aux["batch_stats"], state.batch_stats, tolerance)
    assert np.max(np.abs(ours.aux["batch_stats"]["BatchNorm_0"]["mean"])) > 0.01
    # What is not learned has no place in q, and the state nothing besides the statistics.
    assert jax.tree.leaves(ours.q.mean["batch_stats"]) == jax.tree.leaves(ours.aux["params"]) == []


@pytest.mark.extended
def test_linen_predicts_with_the_statistics_of_the_fit_also_after_loading(tmp_path):
    module = Linen()
    network = from_linen(module, module.init(jax.random.key(0), X, train=False), **MODES)
    objective = network.objective(loss, size=24, regularizer=1.0)
    result = blr.fit(blr.adam(0.01), objective, network.params, (X, Y), steps=30, batch_size=8, key=jax.random.key(1))
    result.save(tmp_path / "result")
    again = blr.load(tmp_path / "result")
    run = jax.jit(lambda variables: module.apply(variables, X, train=False))
    for found in (result, again):
        fitted = network.fitted(found)
        expected = run(fitted.rebuild())
        actual = blr.predict(found.q, fitted.apply, X, method="mean", frozen=fitted.frozen)
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        assert not np.allclose(expected, run(network.rebuild(found.q.mean)), rtol=0.01)
    draws = [result.q.sample(key) for key in jax.random.split(jax.random.key(2), 4)]
    expected = np.mean([run(network.fitted(result).rebuild(draw)) for draw in draws], axis=0)
    actual = blr.predict(again.q, fitted.apply, X, key=jax.random.key(2), samples=4, frozen=fitted.frozen)
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_linen_dropout_draws_from_the_key_of_the_step():
    module = Linen(rate=0.5)
    variables = module.init(jax.random.key(0), X, train=False)
    network = from_linen(module, variables, rngs=["dropout"], **MODES)
    objective, key = network.objective(loss, size=24), jax.random.key(3)
    losses = jax.jit(lambda key: objective.losses(network.params, (X, Y), objective.aux, key))
    values, aux = losses(key)
    own = jax.jit(lambda key: module.apply(variables, X, train=True, mutable=["batch_stats"], rngs={"dropout": key}))
    f, changed = own(jax.random.split(key, 1)[0])
    np.testing.assert_allclose(values, loss(f, Y), rtol=1e-12)
    assert_close(aux["batch_stats"], changed["batch_stats"], 1e-7)  # kept in float32
    assert not np.allclose(values, losses(jax.random.key(4))[0])


@pytest.mark.extended
def test_linen_without_statistics_has_a_loss_for_each_example():
    class Plain(linen.Module):
        @linen.compact
        def __call__(self, x):
            layer = linen.Dense(3, param_dtype=jnp.float64)
            return linen.Dense(2, param_dtype=jnp.float64)(jnp.tanh(layer(layer(x))))

    module = Plain()
    variables = module.init(jax.random.key(0), X)
    network = from_linen(module, variables)
    objective = network.objective(loss, size=24, regularizer=1.0)
    assert isinstance(objective, blr.Objective)
    assert len(jax.tree.leaves(network.params)) == 4  # The layer that is called twice is one.
    by_hand = blr.Objective(loss, output=lambda p, x: module.apply({"params": p}, x), size=24, regularizer=1.0)
    batches = mini_batches(float)
    ours = take_steps(blr.vogn(0.001), objective, network.params, batches)
    plain = take_steps(blr.vogn(0.001), by_hand, variables["params"], batches)
    assert_close(ours.q.mean["params"], plain.q.mean, 1e-10)
    assert_close(ours.q.precision["params"], plain.q.precision, 1e-10)


def test_variables_without_parameters_are_refused():
    with pytest.raises(ValueError, match='collection "params", and these have'):
        from_linen(linen.Dense(1), {"kernel": jnp.ones((2, 1))})
    with pytest.raises(ValueError, match="nothing to learn"):
        from_linen(linen.Dense(1), {"params": {}})


# nnx.


class Block(nnx.Module):
    """Lists of layers, a tied one, an activation, buffers of integers and booleans, statistics and dropout."""

    def __init__(self, rngs, rate=0.0, dtype=jnp.float64):
        linear = lambda n, m, **options: nnx.Linear(n, m, param_dtype=dtype, rngs=rngs, **options)
        self.layers = nnx.List([linear(3, 4), linear(4, 4, use_bias=False)])
        self.again = self.layers[1]
        self.norm = nnx.BatchNorm(4, momentum=0.9, param_dtype=dtype, rngs=rngs)
        self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(4, dtype)), nnx.BatchStat(jnp.ones(4, dtype))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = linear(4, 2)
        self.activation, self.nothing = jnp.tanh, None
        self.calls = nnx.Variable(jnp.array(0))
        self.order = jnp.array([1, 0])
        self.used = jnp.array([True, True, False, True])

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        for layer in (*self.layers, self.again):
            x = self.activation(layer(x))
        x = jnp.where(self.used, self.dropout(self.norm(x)), 0.0)
        return self.head(x)[:, self.order]


@pytest.mark.extended
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float64, 1e-12), (jnp.float32, 1e-6)])
def test_nnx_is_its_own_training_loop(dtype, tolerance):
    model, batches = Block(nnx.Rngs(0), dtype=dtype), mini_batches(dtype)
    network = from_nnx(model)  # before the model trains itself below
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        gradient = nnx.grad(lambda model: jnp.mean(loss(model(x), y)))(model)
        optimizer.update(model, gradient)

    for x, y in zip(*batches, strict=True):
        train_step(model, optimizer, x, y)

    ours = take_steps(blr.adam(0.01), network.objective(loss, size=24), network.params, batches)
    expected = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected["layers"] = {"0": expected["layers"][0]}
    assert_close({name: ours.q.mean[name] for name in expected}, expected, tolerance)
    assert_close(ours.aux["norm"]["mean"], model.norm.mean[...], tolerance)
    assert_close(ours.aux["norm"]["var"], model.norm.var[...], tolerance)
    assert int(ours.aux["calls"]) == STEPS
    # A weight that occurs twice is one parameter, at the first of its paths.
    assert ("again" in network.params) + ("1" in network.params["layers"]) == 1
    assert len(jax.tree.leaves(network.params)) == 7
    assert network.frozen["order"].dtype == int
    assert network.frozen["used"].dtype == bool


@pytest.mark.extended
def test_nnx_module_comes_back_and_the_given_one_stays():
    model = Block(nnx.Rngs(0), rate=0.3)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    network = from_nnx(model)
    objective = network.objective(loss, size=24, regularizer=1.0)
    result = blr.fit(blr.adam(0.01), objective, network.params, (X, Y), steps=12, batch_size=8, key=jax.random.key(0))
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert not model.dropout.deterministic
    fitted = network.fitted(result)
    module = fitted.rebuild()
    assert type(module) is Block
    assert module.again is module.layers[1]
    assert int(module.calls[...]) == 12
    module.eval()
    actual = blr.predict(result.q, fitted.apply, X, method="mean", frozen=fitted.frozen)
    np.testing.assert_allclose(actual, run(module, X), rtol=1e-12)
    draw = fitted.rebuild(result.q.sample(jax.random.key(1)))
    assert not np.allclose(draw.head.kernel[...], module.head.kernel[...])


def test_nnx_dropout_draws_from_the_key_of_the_step():
    model = Block(nnx.Rngs(0), rate=0.5)
    network = from_nnx(model)
    objective, key = network.objective(loss, size=24), jax.random.key(3)
    losses = jax.jit(lambda key: objective.losses(network.params, (X, Y), objective.aux, key)[0])
    values = losses(key)
    nnx.reseed(model, default=jax.random.split(key, 1)[0])
    np.testing.assert_allclose(values, loss(run(model, X), Y), rtol=1e-12)
    assert not np.allclose(values, losses(jax.random.key(4)))


@pytest.mark.extended
def test_validation_evaluates_the_module_as_for_predictions():
    network = from_nnx(Block(nnx.Rngs(0), rate=0.5))
    objective = network.objective(loss, size=16, regularizer=1.0)
    result = blr.fit(
        blr.adam(0.01),
        objective,
        network.params,
        (X[:16], Y[:16]),
        steps=4,
        batch_size=8,
        key=jax.random.key(0),
        validation=(X[16:], Y[16:]),
    )
    module = network.fitted(result).rebuild()
    module.eval()
    expected = np.mean(loss(run(module, X[16:]), Y[16:]))
    np.testing.assert_allclose(result.validation["loss"][-1], expected, rtol=1e-12)


@pytest.mark.extended
def test_nnx_at_fixed_statistics_has_independent_examples():
    network = from_nnx(Block(nnx.Rngs(0), rate=0.5))
    objective = network.objective(loss, size=24, regularizer=1.0, train=False)
    options = {"steps": 5, "batch_size": 8, "key": jax.random.key(0)}
    result = blr.fit(blr.vogn(0.001), objective, network.params, (X, Y), **options)
    module = network.fitted(result).rebuild()
    assert int(module.calls[...]) == 0
    np.testing.assert_array_equal(module.norm.mean[...], jnp.zeros(4))
    with pytest.raises(ValueError, match="takes each example's loss by itself"):
        blr.fit(blr.vogn(0.001), network.objective(loss, size=24, regularizer=1.0), network.params, (X, Y), **options)


def test_nnx_freezes_by_filter_and_by_mask():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(3, 4, param_dtype=jnp.float64, rngs=rngs)
            self.adapter = nnx.LoRA(4, 2, 4, param_dtype=jnp.float64, rngs=rngs)
            self.head = nnx.Linear(4, 2, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            x = self.base(x)
            return self.head(x + self.adapter(x))

    model = Adapted(nnx.Rngs(0))
    adapted = from_nnx(model, wrt=nnx.LoRAParam)
    assert set(jax.tree.leaves(jax.tree.map(jnp.shape, adapted.params), is_leaf=lambda s: type(s) is tuple)) == {
        (4, 2),
        (2, 4),
    }
    head = from_nnx(model, mask=lambda path, leaf: not path.startswith("head"))
    assert jax.tree.leaves(head.params["base"]) == jax.tree.leaves(head.params["adapter"]) == []
    objective = head.objective(loss, size=24, regularizer=1.0)
    result = blr.fit(blr.adam(0.1), objective, head.params, (X, Y), steps=3)
    module = head.fitted(result).rebuild()
    np.testing.assert_array_equal(module.base.kernel[...], model.base.kernel[...])
    assert not np.allclose(module.head.kernel[...], model.head.kernel[...])
    with pytest.raises(ValueError, match="nothing to learn"):
        from_nnx(model, mask=True)
    with pytest.raises(ValueError, match="nothing to learn"):
        from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


@pytest.mark.extended
def test_parameters_behind_stop_gradient_are_named():
    class Stopped(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = (nnx.Linear(n, m, rngs=rngs) for n, m in ((3, 4), (4, 2)))

        def __call__(self, x):
            return self.head(jax.lax.stop_gradient(self.body(x)))

    network = from_nnx(Stopped(nnx.Rngs(0)))
    objective = network.objective(loss, size=24, regularizer=1.0)
    options = {"steps": 1, "batch_size": 8, "key": jax.random.key(0)}
    with pytest.warns(UserWarning, match="does not depend on the parameters body/bias, body/kernel, or only"):
        blr.fit(blr.adam(0.01), objective, network.params, (X, Y), **options)


@pytest.mark.extended
def test_two_inputs_and_a_wrong_output():
    class Both(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x, shift, *, scale=1.0):
            return scale * self.linear(x) + shift

    model = Both(nnx.Rngs(0))
    network = from_nnx(model, train={"scale": 2.0}, evaluate={"scale": 3.0})
    x = (jnp.asarray(X), jnp.ones((24, 1)))
    values = network.objective(loss, size=24).losses(network.params, (x, Y))
    np.testing.assert_allclose(values, loss(model(*x, scale=2.0), Y), rtol=1e-12)
    f = blr.predict(network.params, network.apply, x, method="mean", frozen=network.frozen)
    np.testing.assert_allclose(f, model(*x, scale=3.0), rtol=1e-12)

    class Summed(Block):
        def __call__(self, x):
            return jnp.sum(super().__call__(x), axis=0)

    network = from_nnx(Summed(nnx.Rngs(0)))
    objective = network.objective(loss, size=24)
    with pytest.raises(ValueError, match="a row for each of its 24 examples; the shapes of its outputs are"):
        objective.losses(network.params, (X, Y), objective.aux, jax.random.key(0))


@pytest.mark.extended
def test_without_flax_the_extra_is_named():
    program = (
        "import sys; sys.modules['flax'] = None\n"
        "import bayesrule as blr, bayesrule.interop.equinox; blr.adam(0.1)\n"
        "try:\n    import bayesrule.interop.flax\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'bayesrule[flax]'" in done.stdout
