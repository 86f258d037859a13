"""Parameters in bfloat16 and float16: kept so, with everything that a step computes in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4))
Y = np.sin(X @ [1.0, -2.0, 0.5, 0.3])
WEIGHTS = {"w": 0.5 * RNG.normal(size=(4, 8)), "v": 0.5 * RNG.normal(size=(8, 1))}
HALF = [jnp.bfloat16, jnp.float16]


def in_dtype(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def apply(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])


def squared(f, y):
    return 0.5 * (f - y) ** 2


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


@pytest.mark.parametrize("dtype", HALF)
def test_adam_is_optax_on_widened_gradients(dtype):
    """The same rounded parameters in every step."""
    start, data = in_dtype(WEIGHTS, dtype), in_dtype((X, Y), dtype)
    objective, rule = blr.Objective(squared, output=apply, size=64), blr.adam(0.01)
    transformation = optax.adam(0.01, mu_dtype=jnp.float32)
    state, step = rule.init(start, objective), jax.jit(rule.step)
    params, optax_state = start, transformation.init(in_dtype(start, jnp.float32))

    @jax.jit
    def optax_step(params, optax_state, x, y):
        losses = lambda p: jax.vmap(lambda x, y: squared(apply(p, x), y))(x, y)
        # The sum over N examples, as the rule has it: small gradients of a mean would underflow in float16.
        gradient = jax.grad(lambda p: 64 / 16 * jnp.sum(losses(p).astype(jnp.float32)))(params)
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32) / 64, gradient)
        updates, optax_state = transformation.update(gradient, optax_state)
        return optax.apply_updates(params, updates), optax_state

    for _ in range(30):
        rows = RNG.permutation(64)[:16]
        batch = data[0][rows], data[1][rows]
        state, _ = step(objective, state, batch)
        params, optax_state = optax_step(params, optax_state, *batch)
        for name in WEIGHTS:
            assert state.q.mean[name].dtype == dtype
            np.testing.assert_array_equal(state.q.mean[name], params[name])
    for name in WEIGHTS:
        np.testing.assert_allclose(state.average[name] / 64, optax_state[0].mu[name], rtol=1e-6)
        np.testing.assert_allclose(state.q.precision[name] / 64, optax_state[0].nu[name], rtol=2e-6)
    assert dtypes((state.average, state.q.precision)) == {"float32"}


RULES = {
    "sgd": blr.sgd(0.05),
    "sgd, momentum": blr.sgd(0.05, momentum=0.9),
    "rmsprop": blr.rmsprop(0.005),
    "adam": blr.adam(0.01),
    "ogn": blr.ogn(1e-3),
    "vogn": blr.vogn(1e-3),
    "ivon": blr.ivon(1e-3),
}


@pytest.mark.sampled("sgd, momentum", "ivon")
@pytest.mark.parametrize("name", RULES)
def test_recipes_keep_parameters_and_widen_statistics(name):
    rule, rows = RULES[name], np.stack([RNG.permutation(64)[:16] for _ in range(60)])
    seen = set()

    def checked(params, x):
        seen.update(leaf.dtype.name for leaf in jax.tree.leaves(params))
        return apply(params, x)

    def trained(dtype):
        data, objective = in_dtype((X, Y), dtype), blr.Objective(squared, output=checked, size=64, regularizer=0.1)
        seen.clear()
        step = lambda state, part: rule.step(objective, state, (data[0][part[0]], data[1][part[0]]), part[1])
        run = jax.jit(lambda state, parts: jax.lax.scan(step, state, parts))
        parts = jnp.asarray(rows), jax.random.split(jax.random.key(0), 60)
        state, info = run(rule.init(in_dtype(WEIGHTS, dtype), objective), parts)
        assert seen == {jnp.dtype(dtype).name}
        return state, info.objective

    state, values = trained(jnp.bfloat16)
    assert dtypes(state.q.mean) == {"bfloat16"}
    assert dtypes((state.q.precision, state.average, state.scale)) == {"float32"}
    _, reference = trained(jnp.float32)
    gain, expected = values[:4].mean() - values[-8:].mean(), reference[:4].mean() - reference[-8:].mean()
    assert float(gain) == pytest.approx(float(expected), rel=0.2)  # Some updates are lost in rounding.


@pytest.mark.extended
def test_half_precision_through_fits_files_and_predictions(tmp_path):
    mixed = {"w": jnp.asarray(WEIGHTS["w"], jnp.bfloat16), "v": jnp.asarray(WEIGHTS["v"], jnp.float32)}
    objective = blr.Objective(squared, output=apply, size=64, regularizer=1.0)
    options = {"steps": 10, "batch_size": 16, "key": jax.random.key(0)}
    whole = blr.fit(blr.adam(0.01), objective, mixed, (X, Y), **{**options, "steps": 20})
    half = blr.fit(blr.adam(0.01), objective, mixed, (X, Y), **options)
    half.save(tmp_path / "half")
    resumed = blr.fit(blr.adam(0.01), objective, blr.load(tmp_path / "half"), (X, Y), steps=10, batch_size=16)
    assert {name: leaf.dtype.name for name, leaf in resumed.q.mean.items()} == {"v": "float32", "w": "bfloat16"}
    for name in mixed:
        np.testing.assert_array_equal(whole.q.mean[name], resumed.q.mean[name])
        np.testing.assert_array_equal(whole.q.precision[name], resumed.q.precision[name])
    assert dtypes(whole.q.sample(jax.random.key(1))) == {"float32", "bfloat16"}
    x = jnp.asarray(X, jnp.bfloat16)
    entire = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole.q.mean)
    q = blr.DiagonalGaussian(entire, whole.q.precision)
    mean = blr.predict(q, apply, x, key=jax.random.key(2), samples=50)
    outputs = jax.jit(jax.vmap(lambda key: jax.vmap(apply, (None, 0))(q.sample(key), x)))
    by_hand = np.asarray(outputs(jax.random.split(jax.random.key(2), 50)), float).mean(0)
    assert mean.dtype == jnp.float32  # An average in bfloat16 would have two digits.
    np.testing.assert_allclose(mean, by_hand, atol=1e-5)


@pytest.mark.extended
def test_frozen_parameters_and_plain_functions_keep_their_precision():
    start = in_dtype(WEIGHTS, jnp.bfloat16)
    learned, frozen = blr.freeze(start, {"w": True, "v": False})
    objective = blr.Objective(squared, output=apply, size=64, regularizer=1.0, frozen=frozen)
    data = in_dtype((X, Y), jnp.bfloat16)
    result = blr.fit(blr.adam(0.01), objective, learned, data, steps=5, batch_size=16, key=jax.random.key(0))
    assert result.q.mean["w"] is None
    assert result.q.mean["v"].dtype == jnp.bfloat16

    seen = []
    function = lambda x: seen.append(x.dtype) or jnp.sum(jnp.cosh(x - 1.0))
    result = blr.fit(blr.gradient_descent(0.2), function, jnp.zeros(2, jnp.bfloat16), steps=60)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(result.q.mean.astype(float), 1.0, atol=0.02)
    # A family that is not elementwise keeps float32.
    assert blr.newton().init(jnp.zeros(2, jnp.bfloat16)).q.mean.dtype == jnp.float32
