"""Steps from gradients that were taken elsewhere: `draw` and `update` are the two halves of `step`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

N, M, STEPS = 200, 20, 50
X = jax.random.normal(jax.random.key(1), (N, 4))
Y = jnp.sin(X @ jnp.array([1.0, -2.0, 0.5, 0.3]))
PARAMS = {
    "a": 0.3 * jax.random.normal(jax.random.key(2), (4, 5)),
    "b": 0.3 * jax.random.normal(jax.random.key(3), (5,)),
}
ORDER = jax.random.randint(jax.random.key(9), (STEPS, M), 0, N)
KEYS = jax.random.split(jax.random.key(5), STEPS)
RULES = {
    "sgd": blr.sgd(0.1, momentum=0.9),
    "rmsprop": blr.rmsprop(0.01),
    "adam": blr.adam(0.01),
    "ivon": blr.ivon(1e-3),
    "ivon, published": blr.ivon(0.1, curvature=1.0, decay=0.999),
    "ivon, pairs": blr.ivon(1e-3, samples=4, antithetic=True),
    "ivon, annealed": blr.ivon(1e-3, temperature=lambda count: 0.5 + 0.4 * jnp.cos(count / 10.0)),
    "Vadam": blr.adam(0.01, damping="prior", initial_precision=10.0).replace(points=blr.MonteCarlo(2)),
    "dropout": blr.dropout(0.1, 0.8, samples=2),
    "straight_through": blr.straight_through(0.1),
    "bayesbinn": blr.bayesbinn(1e-4),
}


def example_loss(params, example):
    return 0.5 * (jnp.tanh(example[0] @ params["a"]) @ params["b"] - example[1]) ** 2


def mean_loss(params, batch):
    return jnp.mean(jax.vmap(lambda example: example_loss(params, example))(batch))


@pytest.mark.sampled("rmsprop", "ivon", "straight_through")
@pytest.mark.parametrize("name", RULES)
def test_draw_and_update_are_step(name):
    """The same states, and the same losses in `Info`."""
    rule = RULES[name]
    strength = None if name in ("straight_through", "bayesbinn") else 1.0
    objective = blr.Objective(example_loss, size=N, regularizer=strength)
    options = {"size": N, "regularizer": strength, "batch_size": M}

    def by_step(state, item):
        state, info = rule.step(objective, state, (X[item[0]], Y[item[0]]), item[1])
        return state, info.objective

    def by_halves(state, item):
        theta, ticket = rule.draw(state, item[1])
        measure = jax.value_and_grad(lambda params: mean_loss(params, (X[item[0]], Y[item[0]])))
        several = theta["a"].ndim > 2
        value, gradient = (jax.vmap(measure) if several else measure)(theta)
        again = theta if name == "ivon" else None
        state, info = rule.update(state, gradient, ticket, value=value, theta=again, **options)
        return state, info.objective

    def both():
        expected = jax.lax.scan(by_step, rule.init(PARAMS, objective), (ORDER, KEYS))
        return expected, jax.lax.scan(by_halves, rule.init(PARAMS, **options), (ORDER, KEYS))

    expected, actual = jax.jit(both)()
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
def test_the_ticket_is_the_key():
    rule = blr.ivon(0.1)
    state = rule.init(PARAMS, size=N, regularizer=1.0)
    key = jax.random.key(3)
    theta, ticket = rule.draw(state, key)
    assert ticket is key
    np.testing.assert_array_equal(theta["a"], rule.draw(state, jax.random.key(3))[0]["a"])
    assert blr.adam(0.1).draw(blr.adam(0.1).init(PARAMS, size=N))[1] is None


@pytest.mark.extended
def test_a_gradient_that_is_not_finite_skips_the_step():
    """Without a value any entry does; with a finite value such an entry counts as zero, as in `step`."""
    rule = blr.adam(0.1)
    state = rule.init(PARAMS, size=N)
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    gradient["b"] = gradient["b"].at[1].set(jnp.nan)
    after, info = rule.update(state, gradient, size=N)
    assert not bool(info.finite)
    assert bool(jnp.isnan(info.objective))
    for new, old in zip(
        jax.tree.leaves((after.q, after.average)), jax.tree.leaves((state.q, state.average)), strict=True
    ):
        np.testing.assert_array_equal(new, old)
    after, info = rule.update(state, gradient, size=N, value=2.0)
    assert not bool(info.finite)
    assert float(info.objective) == 2.0 * N
    assert float(after.q.mean["b"][1]) == float(PARAMS["b"][1])
    assert float(after.q.mean["b"][0]) != float(PARAMS["b"][0])
    after, _ = rule.update(state, gradient, size=N, value=jnp.inf)
    np.testing.assert_array_equal(after.q.mean["b"], PARAMS["b"])


@pytest.mark.parametrize("rule", [blr.vogn(0.1), blr.ogn(0.1), blr.newton(), blr.slang(0.1)], ids=lambda r: r.name)
def test_more_than_a_gradient_is_refused(rule):
    state = rule.init(PARAMS if rule.name != "newton" else jnp.zeros(3), size=N, regularizer=1.0)
    with pytest.raises(ValueError, match="Recipes that work from gradients alone are sgd, rmsprop, adam"):
        rule.update(state, PARAMS, jax.random.key(0), size=N, regularizer=1.0)


def test_errors_say_what_to_do():
    rule = blr.ivon(0.1, samples=2)
    state = rule.init(PARAMS, size=N, regularizer=1.0)
    with pytest.raises(ValueError, match="leading axis of 2 samples"):
        rule.update(state, PARAMS, jax.random.key(0), size=N, regularizer=1.0)
    with pytest.raises(ValueError, match="another structure"):
        rule.update(state, PARAMS["a"], jax.random.key(0), size=N, regularizer=1.0)
    measured = rule.init(PARAMS, size=N, regularizer=1.0, batch_size=M)
    twice = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    with pytest.raises(ValueError, match="pass batch_size=M"):
        rule.update(measured, twice, jax.random.key(0), size=N, regularizer=1.0)
    with pytest.raises(ValueError, match="random: pass key"):
        rule.draw(state)
    with pytest.raises(ValueError, match="either an objective or the size"):
        rule.init(PARAMS, blr.Objective(example_loss, size=N), size=N)
    mixture = blr.ivon(0.1, relative=False, averaging=0).replace(family=blr.Mixture, guard=blr.Boundary())
    state = mixture.init({"a": jnp.stack([PARAMS["a"], -PARAMS["a"]])}, size=N, regularizer=1.0)
    with pytest.raises(ValueError, match="one by one"):
        mixture.update(state, PARAMS, jax.random.key(0), size=N, regularizer=1.0)


@pytest.mark.parametrize("rule", [blr.adam(0.05), blr.ivon(0.1, decay=0.99)], ids=lambda r: r.name)
def test_half_precision_parameters(rule):
    """θ and the mean are in bfloat16, all else in float32, and the loss falls as far as in float32."""
    ends = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        state = rule.init(jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), PARAMS), size=N, regularizer=1.0)

        @jax.jit
        def step(state, key):
            theta, ticket = rule.draw(state, key)
            assert theta["a"].dtype == state.q.mean["a"].dtype
            gradient = jax.grad(lambda p: mean_loss(p, (X, Y)))(theta)
            return rule.update(state, gradient, ticket, size=N, regularizer=1.0)[0]

        for key in jax.random.split(jax.random.key(0), 100):
            state = step(state, key)
        assert state.q.mean["a"].dtype == dtype
        assert state.q.precision["a"].dtype == state.average["a"].dtype == jnp.float32
        ends[dtype] = float(mean_loss(state.q.mean, (X, Y)))
    start = float(mean_loss(PARAMS, (X, Y)))
    assert start - ends[jnp.bfloat16] > 0.8 * (start - ends[jnp.float32]) > 0.01
