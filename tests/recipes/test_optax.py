"""SGD, RMSprop and Adam are optax's, step for step, on the mean loss (REFERENCE: optax 0.2)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

ROWS, STEPS, BATCH = 60, 200, 20
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (ROWS, 4))
Y = jnp.sin(X @ jnp.array([1.0, -2.0, 0.5, 0.3]))
PARAMS = {
    "hidden": {"w": 0.5 * jax.random.normal(KEYS[1], (4, 5)), "b": jnp.zeros(5)},
    "out": [0.5 * jax.random.normal(KEYS[2], (5,)), jnp.array(0.1)],
}
ORDER = np.random.default_rng(0).permuted(np.tile(np.arange(ROWS), (STEPS, 1)), axis=1)[:, :BATCH]


def apply(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"][0] + params["out"][1]


def example_loss(params, example, decay):
    x, y = example
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return 0.5 * (apply(params, x) - y) ** 2 + 0.5 * decay * squares


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def theirs(transformation, decay, dtype=jnp.float64):
    def mean_loss(params, batch):
        return jnp.mean(jax.vmap(lambda e: example_loss(params, e, decay))(batch))

    def body(carry, index):
        params, state = carry
        gradient = jax.grad(mean_loss)(params, (x[index], y[index]))
        updates, state = transformation.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    start, x, y = cast((PARAMS, X, Y), dtype)
    return jax.lax.scan(body, (start, transformation.init(start)), ORDER)[1]


def ours(rule, decay, dtype=jnp.float64):
    objective = blr.Objective(lambda p, e: example_loss(p, e, decay), size=10 * ROWS)

    def body(state, index):
        state, _ = rule.step(objective, state, (x[index], y[index]))
        return state, state.q.mean

    start, x, y = cast((PARAMS, X, Y), dtype)
    return jax.lax.scan(body, rule.init(start, objective), ORDER)[1]


def _shaped(rule, transformation):
    return rule.replace(steps=rule.steps.shaped(transformation))


CLIP = optax.clip_by_global_norm(0.1)
RAMP = optax.linear_schedule(0.01, 0.1, STEPS)
SCHEDULE = optax.cosine_decay_schedule(0.01, STEPS)
PAIRS = {
    "sgd": (blr.sgd(0.1), optax.sgd(0.1)),
    "sgd, schedule": (blr.sgd(SCHEDULE), optax.sgd(SCHEDULE)),
    "sgd, momentum": (blr.sgd(0.05, momentum=0.9), optax.sgd(0.05, momentum=0.9)),
    "sgd, momentum, schedule": (blr.sgd(RAMP, momentum=0.9), optax.sgd(RAMP, momentum=0.9)),
    "sgd, nesterov": (blr.sgd(0.05, momentum=0.9, nesterov=True), optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "sgd, nesterov, schedule": (
        blr.sgd(RAMP, momentum=0.9, nesterov=True),
        optax.sgd(RAMP, momentum=0.9, nesterov=True),
    ),
    "rmsprop, schedule": (blr.rmsprop(SCHEDULE), optax.rmsprop(SCHEDULE, decay=0.9, eps=1e-8, eps_in_sqrt=False)),
    "adamw": (blr.adamw(0.01, weight_decay=0.1), optax.adamw(0.01, weight_decay=0.1)),
    "adamw, schedule": (blr.adamw(SCHEDULE, weight_decay=0.3), optax.adamw(SCHEDULE, weight_decay=0.3)),
    "adamw, mask": (
        blr.adamw(0.01, weight_decay=0.3, mask={"hidden": {"w": True, "b": False}, "out": False}),
        optax.adamw(0.01, weight_decay=0.3, mask={"hidden": {"w": True, "b": False}, "out": False}),
    ),
    "adamw, mask by a function": (
        blr.adamw(0.01, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.adamw(0.01, weight_decay=0.3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    ),
    "adam, clipped": (_shaped(blr.adam(0.01), CLIP), optax.chain(CLIP, optax.adam(0.01))),
    "sgd, momentum, clipped": (
        _shaped(blr.sgd(0.1, momentum=0.9), CLIP),
        optax.chain(CLIP, optax.sgd(0.1, momentum=0.9)),
    ),
    "adamw, centred": (
        _shaped(blr.adamw(0.01, weight_decay=0.1), optax.centralize()),
        optax.chain(optax.centralize(), optax.adamw(0.01, weight_decay=0.1)),
    ),
    "rmsprop": (blr.rmsprop(0.01), optax.rmsprop(0.01, decay=0.9, eps=1e-8, eps_in_sqrt=False)),
    "rmsprop, decay": (
        blr.rmsprop(0.01, decay=0.99, damping=1e-4),
        optax.rmsprop(0.01, decay=0.99, eps=1e-4, eps_in_sqrt=False),
    ),
    "adam": (blr.adam(0.01), optax.adam(0.01)),
    "adam, betas": (blr.adam(0.01, averaging=0.8, decay=0.99, damping=1e-3), optax.adam(0.01, 0.8, 0.99, 1e-3)),
    "adam, schedule": (blr.adam(SCHEDULE), optax.adam(SCHEDULE)),
}


@pytest.mark.sampled("sgd, momentum", "rmsprop", "adam", "adamw, mask by a function", "adam, clipped")
@pytest.mark.as_users
@pytest.mark.parametrize("name", PAIRS)
def test_same_trajectory(name):
    """Without and with weight decay in the loss."""
    rule, transformation = PAIRS[name]
    both = jax.jit(lambda decay: (ours(rule, decay), theirs(transformation, decay)))
    for decay in (0.0, 0.01):
        actual, expected = both(decay)
        for ours_leaf, theirs_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert np.max(np.abs(np.asarray(ours_leaf) - theirs_leaf)) < 1e-12
        assert np.abs(expected["out"][0][-1] - np.asarray(PARAMS["out"][0])).max() > 0.05, "it moved at all"


@pytest.mark.extended
@pytest.mark.as_users
@pytest.mark.parametrize("name", ["sgd, momentum", "rmsprop", "adam"])
def test_same_trajectory_in_float32(name):
    """Rounding differs, and grows over 200 steps, but no more than that."""
    rule, transformation = PAIRS[name]
    actual, expected = jax.jit(lambda: (ours(rule, 0.01, jnp.float32), theirs(transformation, 0.01, jnp.float32)))()
    for ours_leaf, theirs_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours_leaf.dtype == theirs_leaf.dtype == jnp.float32
        np.testing.assert_allclose(ours_leaf, theirs_leaf, rtol=0, atol=2e-4)


def test_a_matrix_as_preconditioner():
    """θ ← θ − ρS⁻¹ĝ for a full S, against NumPy's solve."""
    matrix = jnp.array([[2.0, 0.5, 0.0], [0.5, 1.5, 0.2], [0.0, 0.2, 0.7]])
    start = {"a": jnp.array([0.4, -0.3]), "b": jnp.array(0.2)}
    loss = lambda w, x: 0.5 * (x @ jnp.append(w["a"], w["b"]) - 1.0) ** 2
    objective = blr.Objective(loss, size=50)
    rows = jax.random.normal(KEYS[3], (8, 3))
    rule = blr.sgd(0.3, precision=matrix)
    state, _ = jax.jit(lambda rows: rule.step(objective, rule.init(start, objective), rows))(rows)
    theta = np.array([0.4, -0.3, 0.2])
    gradient = np.mean(np.asarray(rows) * (np.asarray(rows) @ theta - 1.0)[:, None], axis=0)
    expected = theta - 0.3 * np.linalg.solve(np.asarray(matrix), gradient)
    np.testing.assert_allclose(np.append(state.q.mean["a"], state.q.mean["b"]), expected, atol=1e-14)


def test_an_objective_is_needed_for_n():
    for rule in (blr.sgd(0.1), blr.adam(0.1), blr.vogn(0.1), blr.ivon(0.1), blr.slang(0.1)):
        with pytest.raises(ValueError, match=r"rule.init\(params, objective\)"):
            rule.init(PARAMS)


def test_posterior_and_preconditioner_are_two_things():
    """q's precision is N·v + δ whatever the square root does: here after one step of Adam, (1 − β₂)ĝ²."""
    objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=40, regularizer=3.0)
    rule = blr.adam(0.1)
    step = jax.jit(lambda rows: rule.step(objective, rule.init(jnp.zeros(()), objective), rows))
    state, _ = step(jnp.array([1.0, 3.0]))
    assert float(state.q.precision) == pytest.approx(40 * 0.001 * 2.0**2 + 3.0, abs=1e-12)


@pytest.mark.extended
def test_the_heavy_ball_is_the_trace_at_a_constant_rate_only():
    """θ ← θ − ρ_t ĝ + γ(θ_t − θ_{t−1}) against optax's trace: equal at a constant rate, another path on a ramp."""

    def largest(rate):
        heavy = blr.sgd(rate, momentum=0.9, heavy_ball=True)
        actual, expected = jax.jit(lambda: (ours(heavy, 0.0), theirs(optax.sgd(rate, momentum=0.9), 0.0)))()
        differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), actual, expected)
        return max(float(leaf) for leaf in jax.tree.leaves(differences))

    assert largest(0.05) < 1e-12
    assert largest(RAMP) > 1e-3


@pytest.mark.extended
def test_weight_decay_is_no_prior():
    """It is refused beside a regularizer, and neither the precision nor the printed derivation has a δ."""
    objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=40, regularizer=3.0)
    rule = blr.adamw(0.1)
    with pytest.raises(ValueError, match="leave one of them out"):
        rule.init(jnp.zeros(()), objective)
    flat = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=40)
    state = rule.init(jnp.zeros(()), flat)
    with pytest.raises(ValueError, match="leave one of them out"):
        rule.step(objective, state, jnp.array([1.0, 3.0]))
    state, _ = rule.step(flat, state, jnp.array([1.0, 3.0]))
    assert float(state.q.precision) == pytest.approx(40 * 0.001 * 2.0**2, abs=1e-12)
    assert "no prior" in str(rule)
    assert "δ/N" not in str(rule)


def test_schedules_are_called_with_an_int32_count():
    seen = []

    def schedule(count):
        seen.append(count)
        return 0.1

    objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    for rule in (blr.sgd(schedule), blr.adam(schedule), blr.adamw(0.1, weight_decay=schedule)):
        seen.clear()
        jax.jit(lambda rule=rule: rule.step(objective, rule.init(jnp.zeros(()), objective), jnp.ones(2)))()
        assert seen
        assert all(count.dtype == jnp.int32 for count in seen)


@pytest.mark.extended
def test_a_rejected_step_leaves_the_trace_and_the_shaping_as_they_were():
    objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    rule = _shaped(blr.sgd(0.1, momentum=0.9), optax.ema(0.5))
    state, _ = rule.step(objective, rule.init(jnp.zeros(()), objective), jnp.array([1.0, 3.0]))
    after, info = rule.step(objective, state, jnp.array([jnp.nan, 3.0]))
    assert not bool(info.finite)
    np.testing.assert_array_equal(after.average, state.average)
    for new, old in zip(jax.tree.leaves(after.shaped), jax.tree.leaves(state.shaped), strict=True):
        np.testing.assert_array_equal(new, old)
    assert float(after.q.mean) == float(state.q.mean)


def test_shaping_and_decay_are_refused_where_more_is_learned():
    rule = blr.dropout(0.1, 0.8, keep_rate=0.1)
    objective = blr.Objective(lambda w, x: jnp.sum((x @ w) ** 2), size=2)
    with pytest.raises(ValueError, match="nothing else to learn"):
        _shaped(rule, CLIP).init(jnp.ones((3, 1)), objective)
