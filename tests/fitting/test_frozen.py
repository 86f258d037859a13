"""Parameters that are not learned: frozen ones, integers, those that the loss does not see; and rates for parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

ROWS = 32


def network(seed=0):
    """A small network with a table of integers and a flag among its parameters, and data for it."""
    rng = np.random.default_rng(seed)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params = {
        "body": {"w": array(3, 4), "b": array(4)},
        "head": array(2),
        "columns": jnp.array([0, 3]),
        "on": jnp.ones(1, bool),
    }
    x = array(ROWS, 3)
    return params, (x, jnp.sin(x[:, 0]))


def apply(params, x):
    hidden = jnp.tanh(x @ params["body"]["w"] + params["body"]["b"])[params["columns"]]
    assert jnp.issubdtype(params["columns"].dtype, jnp.integer)
    return jnp.where(params["on"][0], hidden @ params["head"], 0.0)


def loss(output, y):
    return 0.5 * (output - y) ** 2


OPTIONS = {"steps": 30, "batch_size": 8, "key": jax.random.key(0)}


@pytest.mark.extended
@pytest.mark.parametrize("rule", [blr.sgd(0.1), blr.adam(0.05), blr.ivon(0.05), blr.vogn(0.05), blr.ogn(0.05)])
def test_frozen_leaves_stay_and_the_others_move_as_if_they_were_alone(rule):
    params, data = network()
    learned, frozen = blr.freeze(params, lambda path, leaf: path.startswith("body"))
    assert len(jax.tree.leaves(learned)) == 1
    objective = blr.Objective(loss, output=apply, size=ROWS, regularizer=1.0, frozen=frozen)
    result = blr.fit(rule, objective, learned, data, **OPTIONS)
    for leaf in jax.tree.leaves(result.state.q):
        assert leaf.size in (1, 2)  # There is no state for what is frozen.
    alone = blr.Objective(
        lambda head, example: loss(apply({**params, "head": head}, example[0]), example[1]), size=ROWS, regularizer=1.0
    )
    if not isinstance(rule.curvature, blr.GaussNewton):
        reference = blr.fit(rule, alone, params["head"], data, **OPTIONS)
        np.testing.assert_allclose(result.q.mean["head"], reference.q.mean, rtol=1e-5)
    whole = blr.join(result.q.mean, frozen)
    np.testing.assert_array_equal(whole["body"]["w"], params["body"]["w"])
    predicted = blr.predict(result.q, apply, data[0], method="mean", frozen=frozen)
    np.testing.assert_allclose(predicted, jax.vmap(lambda x: apply(whole, x))(data[0]), rtol=1e-5)


@pytest.mark.extended
def test_integers_and_booleans_are_carried_untouched():
    params, data = network()
    objective = blr.Objective(loss, output=apply, size=ROWS, regularizer=1.0)
    result = blr.fit(blr.adam(0.05), objective, params, data, **OPTIONS)
    assert result.q.mean["columns"] is None
    np.testing.assert_array_equal(result.frozen["columns"], params["columns"])
    assert result.frozen["columns"].dtype == params["columns"].dtype
    assert result.frozen["on"].dtype == bool
    mean = blr.predict(result.q, apply, data[0], key=jax.random.key(1), samples=4, frozen=result.frozen)
    assert mean.shape == (ROWS,)


@pytest.mark.extended
def test_a_fit_with_integers_is_saved_and_resumed(tmp_path):
    params, data = network()
    objective = blr.Objective(loss, output=apply, size=ROWS, regularizer=1.0)
    whole = blr.fit(blr.adam(0.05), objective, params, data, **OPTIONS)
    blr.fit(blr.adam(0.05), objective, params, data, **(OPTIONS | {"steps": 12})).save(tmp_path / "half.blr")
    half = blr.load(tmp_path / "half.blr")
    np.testing.assert_array_equal(half.frozen["columns"], params["columns"])
    resumed = blr.fit(blr.adam(0.05), objective, half, data, steps=18, batch_size=8)
    np.testing.assert_array_equal(resumed.q.mean["head"], whole.q.mean["head"])


def test_init_says_how_to_split_off_integers():
    params, _ = network()
    with pytest.raises(ValueError, match=r"blr\.freeze"):
        blr.sgd(0.1).init(params)


def test_numbers_written_without_a_point_are_learned():
    result = blr.fit(blr.newton(), lambda x: jnp.sum((x - 0.5) ** 2), jnp.array([1, 2]), steps=3)
    np.testing.assert_allclose(result.q.mean, [0.5, 0.5])


def test_a_mask_of_booleans_may_be_a_prefix():
    params, _ = network()
    mask = {"body": True, "head": False, "columns": False, "on": False}
    learned, frozen = blr.freeze(params, mask)
    assert learned["body"] == {"w": None, "b": None}
    assert frozen["head"] is None
    assert frozen["columns"] is params["columns"]


@pytest.mark.extended
def test_functions_are_frozen_too():
    params = {"w": jnp.ones(3), "activation": jnp.tanh}
    learned, frozen = blr.freeze(params)
    objective = blr.Objective(lambda p, x: p["activation"](x @ p["w"]) ** 2, size=4, regularizer=1.0, frozen=frozen)
    result = blr.fit(blr.newton(), objective, learned, jnp.ones((4, 3)), steps=5)
    assert np.all(np.isfinite(result.q.mean["w"]))


@pytest.mark.extended
def test_from_batch_takes_frozen_parameters():
    params, data = network()
    learned, frozen = blr.freeze(params)

    def batch_loss(params, batch, aux, key):
        return jax.vmap(lambda x, y: loss(apply(params, x), y))(*batch), aux

    objective = blr.Objective.from_batch(batch_loss, size=ROWS, regularizer=1.0, frozen=frozen)
    result = blr.fit(blr.adam(0.05), objective, learned, data, **OPTIONS)
    single = blr.Objective(loss, output=apply, size=ROWS, regularizer=1.0, frozen=frozen)
    reference = blr.fit(blr.adam(0.05), single, learned, data, **OPTIONS)
    np.testing.assert_allclose(result.q.mean["head"], reference.q.mean["head"], rtol=1e-4)


def test_leaves_behind_stop_gradient_are_named():
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    stopped = lambda p, x: jnp.sum((p["a"] * jax.lax.stop_gradient(p["b"]) - x) ** 2)
    data = jnp.ones((8, 2))
    options = {"steps": 2, "batch_size": 4, "key": jax.random.key(0)}
    with pytest.warns(UserWarning, match="parameters b, c"):
        blr.fit(blr.adam(0.1), blr.Objective(stopped, size=8), params, data, **options)


def test_linear_losses_have_no_unused_parameters(recwarn):
    options = {"steps": 2, "batch_size": 4, "key": jax.random.key(0)}
    blr.fit(blr.sgd(0.1), blr.Objective(lambda w, x: jnp.sum(w), size=8), jnp.ones(2), jnp.ones((8, 2)), **options)
    assert not recwarn.list


def test_a_prior_that_q_has_no_place_for_is_refused_before_the_first_step():
    objective = blr.Objective(lambda w, x: jnp.sum((w - x) ** 2), size=4, regularizer=1.0)
    with pytest.raises(ValueError, match="Gaussian"):
        blr.bayesbinn(0.1).init(jnp.zeros(3), objective)


# Rates for parts of the parameters.


@pytest.mark.extended
def test_rates_by_path_are_those_of_optax():
    params, data = network()
    learned, frozen = blr.freeze(params)
    objective = blr.Objective(loss, output=apply, size=ROWS, frozen=frozen)
    rule = blr.adam({"": 0.01, "head": 0.1, "body/b": optax.linear_schedule(0.02, 0.0, 10)}, damping=1e-8)
    state = rule.init(learned, objective)
    labels = {"body": {"w": "", "b": "b"}, "head": "head", "columns": None, "on": None}
    transforms = {"": optax.adam(0.01), "b": optax.adam(optax.linear_schedule(0.02, 0.0, 10)), "head": optax.adam(0.1)}
    optimizer = optax.partition(transforms, labels)
    theta, memory = learned, optimizer.init(learned)
    mean_loss = lambda theta: objective.data(theta, data)[0] / ROWS
    for _ in range(8):
        state, _ = rule.step(objective, state, data)
        updates, memory = optimizer.update(jax.grad(mean_loss)(theta), memory, theta)
        theta = optax.apply_updates(theta, updates)
    for ours, theirs in zip(jax.tree.leaves(state.q.mean), jax.tree.leaves(theta), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rate", "says"), [({"head": 0.1}, '""'), ({"": 0.1, "tail": 0.1}, "tail"), ({"": 0.1, "head": -1.0}, "head")]
)
def test_wrong_rates_are_refused(rate, says):
    params, data = network()
    learned, frozen = blr.freeze(params)
    objective = blr.Objective(loss, output=apply, size=ROWS, frozen=frozen)
    with pytest.raises(ValueError, match=says):
        blr.fit(blr.sgd(rate), objective, learned, data, steps=1)


def test_rates_by_path_need_entries_that_move_independently():
    rule = blr.newton().replace(steps=blr.Steps({"": 1.0, "a": 0.5}))
    with pytest.raises(ValueError, match="independently"):
        rule.init({"a": jnp.zeros(2), "b": jnp.zeros(2)})
