"""`init` and `step`: pure functions of pytrees, under every transformation, with what `Info` promises."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import bayesrule as blr
from bayesrule import factors

# Optional: the dev extra installs it.
linen = pytest.importorskip("flax.linen")

X = jnp.array([[1.0, 0.3], [-0.5, 1.2], [0.8, -0.9], [0.1, 0.7]])
Y = jnp.array([1.0, 0.0, 1.0, 1.0])


def bowl(x):
    return jnp.sum(jnp.cosh(x - 1.0)) + 0.1 * x[0] * x[1]


def squared(theta, example):
    x, y = example
    return 0.5 * (y - x @ theta) ** 2


def close(first, second, tolerance=1e-12):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def compiled(rule, objective):
    return jax.jit(lambda *arguments: rule.step(objective, *arguments))


# Transformations.


@pytest.mark.extended
@pytest.mark.parametrize(
    "rule", [blr.newton(0.5), blr.gradient_descent(0.1, momentum=0.9), blr.von(0.2)], ids=lambda r: r.name
)
def test_step_under_jit_vmap_and_scan(rule):
    """The same numbers from a Python loop, a jitted loop, a scan, and a batch of starts."""
    starts = jnp.array([[0.0, 0.5], [2.0, -1.0], [1.0, 1.0]])
    keys = jax.random.split(jax.random.key(0), 3)

    def scanned(start):
        return jax.lax.scan(lambda s, k: rule.step(bowl, s, None, k), rule.init(start), keys)

    step = jax.jit(lambda s, k: rule.step(bowl, s, None, k))
    ends = []
    for start in starts:
        state = rule.init(start)
        for k in keys:
            state, info = step(state, jax.random.clone(k))
        ends.append(state)
        assert info.finite
        assert info.inside
    many, infos = jax.jit(jax.vmap(scanned))(starts)
    close(many, jax.tree.map(lambda *x: jnp.stack(x), *ends), 1e-10)
    assert infos.objective.shape == (3, 3)
    np.testing.assert_array_equal(many.count, 3)


@pytest.mark.extended
def test_a_sweep_over_rates_by_vmap():
    """Rates are leaves: a batch of rules is a rule with a batch of rates."""

    def run(rate):
        rule = blr.gradient_descent(rate)
        return rule.step(bowl, rule.init(jnp.zeros(2)))[0].q.mean

    rates = jnp.array([0.1, 0.2, 0.4])
    close(jax.jit(jax.vmap(run))(rates), -rates[:, None] * jax.jit(jax.grad(bowl))(jnp.zeros(2)))
    rules = jax.vmap(blr.newton)(rates)
    moved = lambda r: r.step(bowl, r.init(jnp.zeros(2)))[0].q.mean
    for rate, end in zip(rates, jax.jit(jax.vmap(moved))(rules), strict=True):
        close(end, jax.jit(moved)(blr.newton(float(rate))))


class Counted:
    """A loss that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, x):
        self.traces += 1
        return bowl(x)


def test_a_second_call_does_not_recompile():
    """Neither new states, nor new numbers in the rule (rate, temperature, momentum), nor new data."""
    loss = Counted()
    step = jax.jit(lambda rule, state: rule.step(loss, state))
    state, _ = step(blr.newton(0.1), blr.newton().init(jnp.zeros(2)))
    traces = loss.traces
    assert traces > 0
    for rate in (0.2, 0.3, 0.5):
        state, _ = step(blr.newton(rate), state)
        steps = blr.Steps(blr.Rates(rate, 0.2), temperature=rate)
        state, _ = step(blr.newton().replace(steps=steps, name="newton"), state)
    assert loss.traces == traces


def test_the_step_itself_can_be_jitted():
    """`jax.jit(rule.step)`: rules hash by their structure, and unequal rules are not confused."""
    objective = blr.Objective(lambda t, e: jnp.sum((t - e) ** 2), size=2)
    state, data = blr.gradient_descent(0.1).init(jnp.zeros(2)), jnp.ones((2, 2))
    for rate in (0.1, 0.25):
        rule = blr.gradient_descent(rate)
        new, _ = jax.jit(rule.step)(objective, state, data)
        np.testing.assert_allclose(new.q.mean, 4 * rate)
    assert hash(blr.newton()) == hash(blr.laplace())


def test_fitting_again_does_not_recompile():
    """A second fit with another rate, another start and another tolerance reuses the compiled loop."""
    loss = Counted()
    blr.fit(blr.newton(0.5), loss, jnp.zeros(2), steps=5)
    traces = loss.traces
    blr.fit(blr.newton(0.7), loss, jnp.ones(2), steps=5)
    assert loss.traces == traces


@pytest.mark.extended
def test_keys_are_never_reused():
    """JAX's own check of key reuse passes on sampled points, sampled losses and mini-batches."""
    noisy = blr.Objective.from_batch(
        lambda t, b, a, k: (jnp.sum((b - t + 0.1 * jax.random.normal(k, t.shape)) ** 2, 1), a), size=4
    )
    rule = blr.von(0.1, samples=2).replace(guard=blr.Backtracking(monotone=True))
    with jax.debug_key_reuse(True):
        _, info = compiled(rule, noisy)(rule.init(jnp.zeros(2)), X, jax.random.key(1))
        result = blr.fit(rule, noisy, jnp.zeros(2), X, steps=3, batch_size=2, key=jax.random.key(2))
    assert info.finite
    assert result.reason == "steps"


# Parameters.


class Module(eqx.Module):
    weight: jax.Array
    bias: jax.Array


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(3)(x)))[..., 0]


def linen_params():
    return Linen().init(jax.random.key(0), X[0])


def apply_sum(theta, x):
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(theta)])
    return jnp.tanh(flat[0]) * x[0] + jnp.sum(flat[1:]) * x[1]


PARAMS = {
    "dict": ({"a": jnp.array([0.1, 0.2]), "b": {"c": jnp.array(0.3)}}, apply_sum),
    "list": ([jnp.array([0.1, 0.2]), jnp.array(0.3)], apply_sum),
    "tuple": ((jnp.array([[0.1, 0.2]]), jnp.array(0.3)), apply_sum),
    "scalar": (jnp.array(0.4), lambda t, x: t * x[0]),
    "Python floats": ({"a": 0.4, "b": 1}, lambda t, x: t["a"] * x[0] + t["b"]),
    "an empty leaf": ({"a": jnp.array([0.4, 0.1]), "none": jnp.zeros((0,))}, lambda t, x: x @ t["a"]),
    "equinox": (Module(jnp.array([0.1, 0.5]), jnp.array(0.2)), lambda t, x: jnp.tanh(t.weight @ x) + t.bias),
    "flax": (linen_params(), lambda t, x: Linen().apply(t, x)),
}
ALGORITHMS = {
    "fixed": lambda: blr.gradient_descent(0.01, momentum=0.5),
    "diagonal": lambda: blr.Rule(
        blr.DiagonalGaussian,
        blr.MonteCarlo(2),
        blr.HessianDiagonal(absolute=True),
        blr.Steps(0.1, average=blr.GradientAverage(0.9)),
        blr.Retraction(),
    ),
    "full": lambda: blr.Rule(blr.Gaussian, blr.MonteCarlo(2), blr.GeneralizedGaussNewton(), blr.Steps(0.1)),
}


def stepped(rule, params, apply, dtype=None):
    objective = blr.Objective(lambda f, y: 0.5 * (y - f) ** 2, output=apply, size=4, regularizer=1.0)
    data = (X, Y) if dtype is None else (X.astype(dtype), Y.astype(dtype))
    state = rule.init(params, objective)
    new, info = jax.jit(lambda s, k: rule.step(objective, s, data, k))(state, jax.random.key(0))
    assert info.finite
    assert info.inside
    return state, new


@pytest.mark.extended
@pytest.mark.parametrize("kind", PARAMS)
def test_parameters_are_any_pytree(kind):
    """q's mean comes back in the same container and shapes, and has moved."""
    params, apply = PARAMS[kind]
    state, new = stepped(ALGORITHMS["diagonal"](), params, apply)
    assert jax.tree.structure(new.q.mean) == jax.tree.structure(params)
    for before, after, given in zip(*map(jax.tree.leaves, (state.q.mean, new.q.mean, params)), strict=True):
        assert after.shape == jnp.shape(given)
        assert after.size == 0 or np.any(before != after)


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["fixed", "full"])
@pytest.mark.parametrize("kind", ["dict", "an empty leaf"])
def test_other_families_take_pytrees_too(algorithm, kind):
    params, apply = PARAMS[kind]
    _, new = stepped(ALGORITHMS[algorithm](), params, apply)
    assert jax.tree.structure(new.q.mean) == jax.tree.structure(params)


LOW_RANK = blr.LowRankGaussian(jnp.zeros(2, jnp.float32), 1.0, jnp.zeros((2, 1), jnp.float32))
SINGLE = ALGORITHMS | {
    "newton": lambda: blr.newton(0.5),
    "von": lambda: blr.von(0.1, samples=2),
    "stein": lambda: blr.von(0.1, samples=2).replace(curvature=blr.Stein()),
    "score": lambda: blr.von(0.01, samples=4).replace(curvature=blr.Score()),
    "reparameterized": lambda: blr.von(0.01, samples=4).replace(curvature=blr.Reparameterized()),
    "quadrature": lambda: blr.newton(0.5).replace(points=blr.Quadrature(3)),
    "low rank": lambda: blr.Rule(blr.LowRankGaussian, blr.MonteCarlo(2), blr.GaussNewton(), blr.Steps(0.1)),
}


@pytest.mark.sampled("stein")
@pytest.mark.parametrize("algorithm", SINGLE)
def test_float32_stays_float32(algorithm):
    """With x64 on, float32 parameters and data give a float32 q, the same as in float64 to its precision."""
    rule, apply = SINGLE[algorithm](), lambda w, x: x @ w
    start = jnp.array([0.1, -0.3], jnp.float32)
    single = stepped(rule, LOW_RANK if algorithm == "low rank" else start, apply, jnp.float32)[1]
    for leaf in jax.tree.leaves(single.q):
        assert leaf.dtype == jnp.float32
    if not rule.points.random:  # draws of another dtype are other draws
        double = stepped(rule, start.astype(float), apply)[1]
        close(single.q, double.q, 1e-5)


@pytest.mark.extended
def test_float32_fits():
    """The compiled loop carries float32 through, and converges to float32's precision."""
    result = blr.fit(blr.newton(), bowl, jnp.zeros(2, jnp.float32), steps=20, tolerance=1e-10)
    assert result.reason == "converged"
    assert result.q.mean.dtype == result.q.precision.dtype == jnp.float32
    exact = blr.fit(blr.newton(), bowl, jnp.zeros(2), steps=20, tolerance=1e-20)
    close(result.q.mean, exact.q.mean, 1e-5)


def test_a_guard_allows_for_the_rounding_errors_of_float32_arrays():
    """With x64 on too: a sum of a thousand float32 losses rises by rounding in half of these steps to its minimum."""
    parts = np.random.default_rng(0).uniform(0, 20, (30, 1000))
    rule = blr.newton().replace(guard=blr.Backtracking(monotone=True))

    def fraction_taken(parts, mean):
        start = blr.Gaussian(mean, 1000 * jnp.eye(1, dtype=jnp.float32))
        return rule.step(lambda x: 0.5 * jnp.sum((parts - x) ** 2), rule.init(start), None)[1].fraction

    near = jnp.asarray(parts.mean(axis=1, keepdims=True) + 1e-4, jnp.float32)
    fractions = jax.jit(jax.vmap(fraction_taken))(jnp.asarray(parts, jnp.float32), near)
    np.testing.assert_array_equal(fractions, np.ones(30))


# What a step sees.


def test_a_loss_that_is_not_a_number():
    """`finite` is False and q, the average and momentum's memory stay good; the next step is as if it had not been."""
    average = blr.Steps(0.1, average=blr.GradientAverage(0.9, debias=False))
    rule = blr.gradient_descent(0.1).replace(steps=average)
    objective = blr.Objective(lambda t, e: jnp.sum((t - e) ** 2), size=2)
    good, bad = jnp.ones((2, 3)), jnp.full((2, 3), jnp.nan)
    step = compiled(rule, objective)
    state, _ = step(rule.init(jnp.zeros(3)), good)
    after, info = step(state, bad)
    assert not info.finite
    close(after.q, state.q)
    close(after.average, state.average)
    again, info = step(after, good)
    assert info.finite
    close(again.q, step(state, good)[0].q)


def test_a_curvature_that_is_not_a_number():
    """|x|^1.5 has an infinite second derivative at 0: not finite, and q stays."""
    kink = lambda x: jnp.sum(jnp.abs(x - 1.0) ** 1.5 + x)
    state = blr.newton().init(jnp.ones(1))
    after, info = compiled(blr.newton(), kink)(state)
    assert not info.finite
    close(after.q, state.q)
    assert blr.fit(blr.newton(), kink, jnp.ones(1), steps=3).reason == "not finite"


def test_a_fit_that_meets_nan_ends_with_the_last_good_state():
    loss = lambda x: jnp.where(jnp.sum(x) < 1.0, -jnp.sum(x), jnp.nan)
    result = blr.fit(blr.gradient_descent(0.3), loss, jnp.zeros(1), steps=50)
    assert result.reason == "not finite"
    assert (result.steps, len(result.trace["objective"])) == (4, 5)
    np.testing.assert_allclose(result.q.mean, 1.2)
    assert np.isnan(result.trace["objective"][-1])
    assert np.all(np.isfinite(result.trace["objective"][:-1]))


def test_info_has_the_value_and_the_rate():
    """ℓ̄ at the points, regularizer included, and the rate that was taken."""
    objective = blr.Objective(squared, size=8, regularizer=2.0)
    rule = blr.newton(0.3)
    theta = jnp.array([0.2, -0.4])
    _, info = compiled(rule, objective)(rule.init(theta), (X, Y))
    x, y = np.asarray(X), np.asarray(Y)
    data = 8 / 4 * np.sum(0.5 * (y - x @ np.asarray(theta)) ** 2)
    prior = -np.sum(stats.norm.logpdf(theta, scale=2.0**-0.5))
    np.testing.assert_allclose(info.objective, data + prior, rtol=1e-13)
    np.testing.assert_allclose(info.rate, 0.3)
    assert not info.guard


# Values.


def test_an_algorithm_is_a_value():
    assert blr.newton() == blr.laplace()
    assert blr.newton(0.5) != blr.newton()
    assert blr.newton() != blr.von()
    assert blr.newton().replace(guard=blr.NoGuard()) != blr.newton()
    assert blr.newton().replace(guard=blr.NoGuard()).replace(guard=blr.Backtracking(monotone=True)) == blr.newton()
    assert blr.newton() != "newton"
    with pytest.raises(dataclasses.FrozenInstanceError):
        blr.newton().points = blr.Quadrature(3)


@pytest.mark.parametrize("row", [row for row in blr.table() if row.available], ids=lambda row: row.name)
def test_a_rule_prints_its_derivation(row):
    """Its name, the section, and every piece."""
    text = str(row.rule)
    assert row.rule.name in text.splitlines()[0]
    assert f"section {row.section}" in text
    for piece in ("family", "points", "curvature", "steps", "guard", "update"):
        assert piece in text
    assert row.rule.family.kind.__name__ in text
    assert repr(row.rule.points) in text
    assert repr(row.rule.curvature) in text
    changed = str(row.rule.replace(guard=blr.Backtracking(3)))
    assert "with guard=" in changed.splitlines()[0]


# The regularizer.


@pytest.mark.extended
@pytest.mark.parametrize("points", [blr.MonteCarlo(1), blr.Quadrature(3), blr.Delta()], ids=repr)
def test_the_regularizer_is_never_sampled(points):
    """Its gradient and Hessian are exact at m, whatever the points; with no data nothing else moves q."""
    prior = blr.Gaussian(jnp.array([1.0, -1.0]), jnp.array([[2.0, 0.3], [0.3, 1.0]]))
    rate, q = 0.3, blr.Gaussian(jnp.array([0.5, 2.0]), jnp.array([[1.0, -0.2], [-0.2, 3.0]]))
    rule = blr.Rule(blr.Gaussian, points, blr.Hessian(), blr.Steps(rate))
    for given in ({"prior": prior}, {"regularizer": lambda t: -prior.log_prob(t)}):
        objective = blr.Objective(lambda t, e: jnp.sum(0.0 * t), size=3, **given)
        new, _ = compiled(rule, objective)(rule.init(q), jnp.zeros(3), jax.random.key(0))
        precision = (1 - rate) * np.asarray(q.precision) + rate * np.asarray(prior.precision)
        pull = np.asarray(prior.precision) @ (np.asarray(q.mean) - prior.mean)
        mean = np.asarray(q.mean) - rate * np.linalg.solve(precision, pull)
        close((new.q.mean, new.q.precision), (mean, precision), 1e-12)


def test_the_regularizer_is_outside_the_squared_gradient():
    """s = N ĝ² + δ, with ĝ the data's gradient alone."""
    rule = blr.Rule(blr.DiagonalGaussian, blr.Delta(), blr.SquaredGradient(), blr.Steps(1.0))
    objective = blr.Objective(squared, size=8, regularizer=2.0)
    theta = jnp.array([0.2, -0.4])
    state, _ = compiled(rule, objective)(rule.init(theta), (X, Y))
    x, theta = np.asarray(X), np.asarray(theta)
    mean = x.T @ (x @ theta - np.asarray(Y)) / 4
    precision = 8 * mean**2 + 2.0
    close((state.q.precision, state.q.mean), (precision, theta - (8 * mean + 2.0 * theta) / precision), 1e-12)


# Averages, momentum and schedules, against optax.


def penalised(theta):
    return jnp.sum(jnp.cosh(theta["a"] - 1.0)) + 0.3 * theta["b"] ** 2 + theta["a"][0] * theta["b"]


START = {"a": jnp.array([0.3, -0.8]), "b": jnp.array(0.5)}


def trajectory(rule, objective, steps, data=None, start=START):
    def body(state, _):
        new, _ = rule.step(objective, state, data)
        return new, new.q.mean

    return jax.jit(lambda: jax.lax.scan(body, rule.init(start), None, length=steps)[1])()


def optax_trajectory(optimizer, loss, steps):
    def body(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(body, (START, optimizer.init(START)), None, length=steps)[1])()


SCHEDULE = optax.exponential_decay(0.1, 50, 0.5)
SAME = {
    "sgd": (blr.gradient_descent(0.05), optax.sgd(0.05)),
    "heavy ball": (blr.gradient_descent(0.05, momentum=0.9), optax.sgd(0.05, momentum=0.9)),
    "schedule": (blr.gradient_descent(SCHEDULE), optax.sgd(SCHEDULE)),
    "average": (
        blr.gradient_descent(0.05).replace(steps=blr.Steps(0.05, average=blr.GradientAverage(0.8, debias=False))),
        optax.chain(optax.ema(0.8, debias=False), optax.scale(-0.05)),
    ),
    "debiased average": (
        blr.gradient_descent(0.05).replace(steps=blr.Steps(0.05, average=blr.GradientAverage(0.8))),
        optax.chain(optax.ema(0.8, debias=True), optax.scale(-0.05)),
    ),
}


@pytest.mark.extended
@pytest.mark.as_users
@pytest.mark.parametrize("case", SAME)
def test_the_same_trajectory_as_optax(case):
    """200 steps on a dict of parameters: plain, Polyak's heavy ball (eq:sgd_momentum), averaged, scheduled."""
    rule, optimizer = SAME[case]
    close(trajectory(rule, penalised, 200), optax_trajectory(optimizer, penalised, 200), 1e-12)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("over", ["data", "total"])
def test_what_is_averaged(over, debias):
    """u ← βu + (1−β)g of the data's gradient, or of data and regularizer together; u/(1 − βᵗ) if debiased."""
    decay, rate, strength = 0.7, 0.1, 2.0
    average = blr.GradientAverage(decay, over=over, debias=debias)
    rule = blr.gradient_descent(rate).replace(steps=blr.Steps(rate, average=average))
    objective = blr.Objective(squared, size=4, regularizer=strength)
    theta, u, expected = np.array([0.3, -0.8]), np.zeros(2), []
    x, y = np.asarray(X), np.asarray(Y)
    slope = lambda t: x.T @ (x @ t - y)
    for count in range(1, 8):
        inside = slope(theta) + (strength * theta if over == "total" else 0.0)
        u = decay * u + (1 - decay) * inside
        used = u / (1 - decay**count if debias else 1.0)
        theta = theta - rate * (used + (strength * theta if over == "data" else 0.0))
        expected.append(theta)
    actual = trajectory(rule, objective, 7, (X, Y), jnp.array([0.3, -0.8]))
    close(actual, np.stack(expected), 1e-13)


def test_schedules_reach_every_number():
    """Rates, temperature and momentum each take an optax schedule of the step count."""
    ramp = optax.linear_schedule(0.0, 0.5, 5)
    steps = blr.Steps(blr.Rates(ramp, 0.1), temperature=ramp, momentum=ramp)
    rule = blr.Rule(blr.DiagonalGaussian, blr.Delta(), blr.HessianDiagonal(), steps)
    state = rule.init(jnp.array([0.3, -0.8]))
    step = compiled(rule, lambda x: jnp.sum(jnp.cosh(x)))
    m, s = np.asarray(state.q.mean), np.asarray(state.q.precision)
    before = (m, s)
    for count in range(4):
        rate, here = float(ramp(jnp.int32(count))), (m, s)
        new = s + 0.1 * (np.cosh(m) - rate * s) + rate * (s - before[1])
        m = m - rate * np.sinh(m) / new + rate * before[1] / new * (m - before[0])
        s, before = new, here
        state, _ = step(state)
        close((state.q.mean, state.q.precision), (m, s), 1e-13)


# Losses over whole batches.


@pytest.mark.parametrize("points", [blr.Delta(), blr.MonteCarlo(2)], ids=repr)
def test_from_batch_carries_its_aux(points):
    """aux begins as given, is seen by the loss, and comes back in the state: numbers and counters."""

    def loss(theta, batch, aux, key):
        mean = 0.9 * aux["mean"] + 0.1 * jnp.mean(batch)
        return jnp.sum((batch - theta + aux["mean"]) ** 2, 1), {"mean": mean, "seen": aux["seen"] + 1}

    aux = {"mean": jnp.zeros(()), "seen": jnp.zeros((), int)}
    objective = blr.Objective.from_batch(loss, size=4, aux=aux)
    rule = blr.gradient_descent(0.0).replace(points=points)
    state, expected = rule.init(jnp.ones(2), objective), 0.0
    step = compiled(rule, objective)
    for count in range(3):
        state, info = step(state, X, jax.random.key(count))
        expected = 0.9 * expected + 0.1 * float(jnp.mean(X))
    np.testing.assert_allclose(state.aux["mean"], expected, rtol=1e-12)
    assert int(state.aux["seen"]) == 3
    assert state.aux["seen"].dtype == aux["seen"].dtype
    assert info.finite


def test_a_random_loss_gets_its_own_key():
    """The loss's noise differs from step to step with the key, and not otherwise."""
    noisy = blr.Objective.from_batch(lambda t, b, a, k: (t[0] * jax.random.normal(k, (4,)), a), size=4)
    rule = blr.gradient_descent(1.0)
    state = rule.init(jnp.zeros(1), noisy)
    step = compiled(rule, noisy)
    first, second, again = (step(state, X, jax.random.key(seed))[0].q.mean for seed in (0, 1, 0))
    close(first, again)
    assert np.all(first != second)


def test_a_sweep_by_replace_does_not_recompile():
    traced = []

    def loss(x):
        traced.append(1)
        return jnp.sum(jnp.cosh(x))

    for rate in (0.3, 0.5, 0.9):
        blr.fit(blr.newton().replace(steps=blr.Steps(rate)), loss, jnp.ones(2), steps=2)
        count = len(traced) if rate == 0.3 else count
    assert len(traced) == count


def test_a_state_of_another_rule_is_an_error():
    state = blr.gradient_descent(0.1).init(jnp.zeros(2))
    with pytest.raises(ValueError, match="without momentum"):
        blr.gradient_descent(0.1, momentum=0.9).step(lambda x: jnp.sum(x), state)
    objective = blr.Objective.from_batch(lambda w, b, aux, key: (b * w, aux), size=1, aux={"seen": jnp.zeros(())})
    with pytest.raises(ValueError, match=r"rule\.init\(params, objective\)"):
        blr.gradient_descent(0.1).step(objective, blr.gradient_descent(0.1).init(jnp.zeros(())), jnp.ones(1))


def test_a_lazy_step_that_is_refused_stays_where_it_is():
    """Not at the start, from which lazy steps are taken."""
    rule = blr.exponential_weights(1.0, lazy=True).replace(
        family=blr.DiagonalGaussian, points=blr.Delta(), curvature=blr.HessianDiagonal(), guard=blr.Backtracking(1)
    )
    state = rule.init(blr.DiagonalGaussian(jnp.zeros(1), 1.0))
    state, _ = compiled(rule, lambda x: jnp.sum(0.5 * (x - 1.0) ** 2))(state)
    refused, info = compiled(rule, lambda x: -jnp.sum(50 * x**2))(state)
    assert info.fraction == 0
    np.testing.assert_array_equal(refused.q.mean, state.q.mean)


def test_the_reported_rate_is_that_of_the_step_taken():
    """In float32 a step whose gain the loss cannot resolve is taken in part, and `Info.rate` says so."""
    with jax.enable_x64(False):
        prior = blr.DiagonalGaussian(jnp.zeros(2), jnp.ones(2))
        model, rule = blr.Model({"w": prior}, {"prior": factors.prior("w", prior)}), blr.cvi(0.5)
        step = compiled(rule, model)
        for mean, part in ((1e-3, 0.25), (1.0, 1.0)):
            q = blr.Product({"w": blr.DiagonalGaussian(jnp.full(2, mean), jnp.ones(2))})
            state, info = step(rule.init(q, model))
            np.testing.assert_allclose(state.q["w"].mean, mean * (1 - 0.5 * part), rtol=1e-4)
            np.testing.assert_allclose(info.rate, 0.5 * part)
            assert info.fraction == 1
