"""Training networks: parts of batches, samples in turn, half precision, state in the loss, mixed families, resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr
from bayesrule.rule.update import measure

KEYS = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(KEYS[0], (48, 4))
Y = jnp.sin(X[:, 0]) + 0.1 * jax.random.normal(KEYS[1], (48,))
PARAMS = {"w": 0.5 * jax.random.normal(KEYS[2], (4, 6)), "v": 0.5 * jax.random.normal(KEYS[3], (6,)), "b": jnp.zeros(6)}


def apply(params, x):
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def squared(output, y):
    return 0.5 * (output - y) ** 2


OBJECTIVE = blr.Objective(squared, output=apply, size=96, regularizer=0.5)
DATA = (X, Y)
RULES = {
    "sgd": blr.sgd(0.1),
    "adam": blr.adam(0.01),
    "dropout": blr.dropout(0.1, 0.8),
    "ogn": blr.ogn(0.1),
    "vogn": blr.vogn(0.1),
    "voggn": blr.voggn(0.1),
    "ivon": blr.ivon(0.1, samples=2),
    "slang": blr.slang(0.1, rank=2),
    "kronecker": blr.vogn(0.1, relative=False).replace(family=blr.KroneckerGaussian),
    "straight_through": blr.straight_through(0.1),
    "bayesbinn": blr.bayesbinn(0.001),
}


def objective_of(name):
    binary = name in ("straight_through", "bayesbinn")
    return blr.Objective(squared, output=apply, size=96) if binary else OBJECTIVE


def close(first, second, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled("straight_through")
@pytest.mark.parametrize("name", RULES)
def test_parts_of_a_batch_add_up_to_it(name):
    """Gradient accumulation: the same step as on the whole batch, for every curvature, weights included."""
    rule, objective = RULES[name], objective_of(name)
    state = rule.init(PARAMS, objective)
    step = jax.jit(rule.step)
    batch = blr.Weighted(DATA, jnp.linspace(0.0, 2.0, 48), 40.0)
    full_batch, _ = step(objective, state, batch, jax.random.key(1))
    parts, _ = step(objective, state, blr.Microbatches(batch, 4), jax.random.key(1))
    if name == "slang":  # its factor's columns have no sign of their own
        full_batch, parts = ((s.q.mean, s.q.precision) for s in (full_batch, parts))
    if name == "kronecker":  # a vector in a product holds A ⊗ G as one matrix, which is not the sum of the parts'
        rest = lambda s: [{k: tree[k] for k in ("w", "b")} for tree in (s.q.mean, s.q.inputs, s.q.outputs)]
        full_batch, parts = rest(full_batch), rest(parts)
    close(parts, full_batch, 1e-9)


def test_a_batch_must_divide():
    with pytest.raises(ValueError, match="does not divide into 5"):
        blr.Microbatches(DATA, 5)


@pytest.mark.extended
def test_fit_takes_microbatches():
    arguments = {"steps": 12, "batch_size": 20, "key": jax.random.key(2)}  # the last batch of an epoch is ragged
    full_batch = blr.fit(blr.vogn(0.1), OBJECTIVE, PARAMS, DATA, **arguments)
    parts = blr.fit(blr.vogn(0.1), OBJECTIVE, PARAMS, DATA, microbatches=2, **arguments)
    close(parts.q, full_batch.q, 1e-10)


@pytest.mark.extended
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("name", ["vogn", "slang"])
def test_samples_in_turn(name, antithetic):
    """`scan` averages what each turn's samples see, one turn after another."""
    rule = RULES[name].replace(points=blr.MonteCarlo(6, antithetic=antithetic, scan=True))
    q, key = rule.init(PARAMS, OBJECTIVE).q, jax.random.key(3)
    measured = lambda rule: jax.jit(lambda key: measure(rule, OBJECTIVE, q, DATA, None, key))
    in_turn = measured(rule)(key)
    single = measured(rule.replace(points=blr.MonteCarlo(2 if antithetic else 1, antithetic=antithetic)))
    turns = [single(k) for k in jax.random.split(jax.random.clone(key), 3 if antithetic else 6)]
    assert float(in_turn.value) == pytest.approx(np.mean([t.value for t in turns]), rel=1e-12)
    mean = jax.tree.map(lambda *x: sum(x) / len(x), *[t.gradient for t in turns])
    close(in_turn.gradient, mean, 1e-10)
    if name == "vogn":
        close(in_turn.curvature, jax.tree.map(lambda *x: sum(x) / len(x), *[t.curvature for t in turns]), 1e-10)
    else:
        square = lambda rows: np.asarray(rows).T @ np.asarray(rows)
        expected = sum(square(t.curvature.rows) for t in turns) / len(turns)
        np.testing.assert_allclose(square(in_turn.curvature.rows), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.extended
def test_memory_does_not_grow_with_samples_in_turn():
    size = 200_000
    objective = blr.Objective(lambda w, x: jnp.sum(jnp.tanh(w) * x), size=4, regularizer=1.0)
    batch, start = jnp.ones((4, 1), jnp.float32), jnp.ones(size, jnp.float32)

    def temporary(points):
        rule = blr.ivon(0.1).replace(points=points)
        state = rule.init(start, objective)
        compiled = jax.jit(rule.step).lower(objective, state, batch, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(blr.MonteCarlo(4, scan=True)), temporary(blr.MonteCarlo(32, scan=True))
    assert many < few + size
    assert many < temporary(blr.MonteCarlo(1)) + 5 * 4 * size
    assert temporary(blr.MonteCarlo(32)) > 8 * 4 * size


@pytest.mark.extended
def test_half_precision_inside_the_loss():
    """Parameters and examples are handed over in bfloat16; q, its statistics and the averages stay in float32."""
    single = jax.tree.map(lambda x: x.astype(jnp.float32), (PARAMS, DATA))
    dtypes = []

    def loss(params, example):
        dtypes.append(params["w"].dtype)
        return squared(apply(params, example[0]), example[1])

    for rule in (blr.vogn(0.2), blr.ivon(0.2), blr.adam(0.01)):
        dtypes.clear()
        objective = blr.Objective(loss, size=96, regularizer=0.5, compute=jnp.bfloat16)
        result = blr.fit(rule, objective, single[0], single[1], steps=80, batch_size=16, key=jax.random.key(0))
        assert set(dtypes) == {jnp.dtype(jnp.bfloat16)}
        assert {leaf.dtype for leaf in jax.tree.leaves(result.q)} == {jnp.dtype(jnp.float32)}
        full = blr.Objective(loss, size=96, regularizer=0.5)
        reference = blr.fit(rule, full, single[0], single[1], steps=80, batch_size=16, key=jax.random.key(0))
        assert result.trace["objective"][-6:].mean() == pytest.approx(reference.trace["objective"][-6:].mean(), rel=0.1)


@pytest.mark.extended
def test_mixed_and_half_precision_parameters():
    """Mixed dtypes are fine, each parameter keeps its own, and statistics are in float32 at least."""
    mixed = PARAMS | {"w": PARAMS["w"].astype(jnp.bfloat16), "b": PARAMS["b"].astype(jnp.float32)}
    for name in ("adam", "vogn", "ivon"):
        state, step = RULES[name].init(mixed, OBJECTIVE), jax.jit(RULES[name].step)
        for _ in range(2):
            state, info = step(OBJECTIVE, state, DATA, jax.random.key(0))
        assert state.q.mean["w"].dtype == jnp.bfloat16
        assert state.q.precision["w"].dtype == state.average["w"].dtype == jnp.float32
        assert state.q.mean["b"].dtype == jnp.float32
        assert state.q.mean["v"].dtype == jnp.float64
        assert bool(info.finite)


@pytest.mark.extended
def test_rates_and_temperature_follow_schedules():
    """A temperature that warms up: q's precision is N v/τ + δ/τ at the temperature of the day."""
    warm = optax.linear_schedule(0.1, 1.0, 10)
    rule = blr.vogn(optax.exponential_decay(0.1, 5, 0.5), temperature=warm, decay=0.5, curvature=1.0)
    state = rule.init(PARAMS, OBJECTIVE)
    np.testing.assert_allclose(state.q.precision["b"], (96 * 1.0 + 0.5) / 0.1, rtol=1e-6)
    rates, step = [], jax.jit(rule.step)
    for i in range(3):
        state, info = step(OBJECTIVE, state, DATA, jax.random.key(i))
        rates.append(float(info.rate))
    np.testing.assert_allclose(rates, 0.1 * 0.5 ** (np.arange(3) / 5), rtol=1e-6)


@pytest.mark.extended
def test_a_warm_start_from_ogn():
    """VOGN goes on where OGN stopped: same state, averages and all."""
    first = blr.fit(blr.ogn(0.1), OBJECTIVE, PARAMS, DATA, steps=20, batch_size=16, key=jax.random.key(0))
    second = blr.fit(blr.vogn(0.1), OBJECTIVE, first, DATA, steps=20, batch_size=16)
    assert second.steps == 40
    state, _ = jax.jit(blr.vogn(0.1).step)(OBJECTIVE, first.state, DATA, jax.random.key(1))
    assert int(state.count) == 21


def batch_loss(params, batch, aux, key):
    """Batch normalisation with running statistics, and noise on the inputs as augmentation."""
    x, y = batch
    x = x + 0.05 * jax.random.normal(key, x.shape)
    hidden = x @ params["w"]
    mean, variance = hidden.mean(0), hidden.var(0)
    aux = {"mean": 0.9 * aux["mean"] + 0.1 * mean, "variance": 0.9 * aux["variance"] + 0.1 * variance}
    hidden = jnp.tanh((hidden - mean) / jnp.sqrt(variance + 1e-5) + params["b"])
    return squared(hidden @ params["v"], y), aux


@pytest.mark.extended
@pytest.mark.parametrize("name", ["sgd", "adam", "ivon", "bayesbinn"])
def test_the_loss_may_carry_state_and_be_random(name):
    aux = {"mean": jnp.zeros(6), "variance": jnp.ones(6)}
    prior = {} if name == "bayesbinn" else {"regularizer": 0.5}
    objective = blr.Objective.from_batch(batch_loss, size=96, aux=aux, **prior)
    rule = RULES[name]
    result = blr.fit(rule, objective, PARAMS, DATA, steps=40, batch_size=16, key=jax.random.key(0))
    assert result.reason == "steps"
    assert float(jnp.abs(result.state.aux["mean"]).max()) > 0
    parts = blr.fit(rule, objective, PARAMS, DATA, steps=4, batch_size=16, microbatches=2, key=jax.random.key(0))
    assert parts.reason == "steps"


@pytest.mark.sampled("straight_through")
@pytest.mark.parametrize("name", RULES)
def test_unused_parameters_do_no_harm(name):
    """A parameter that the loss never sees stays finite, and the others go as if it were not there."""
    rule, objective = RULES[name], objective_of(name)
    start = PARAMS | {"z": jnp.ones((3, 2))}
    state = rule.init(start, objective)
    step = jax.jit(rule.step)
    for i in range(30):
        state, info = step(objective, state, DATA, jax.random.key(i))
    assert bool(info.finite & info.inside)
    for leaf in jax.tree.leaves(state):
        assert np.all(np.isfinite(np.asarray(leaf)))
    if objective is OBJECTIVE:  # the prior draws it towards zero, and not past it
        assert np.all((state.q.mean["z"] >= 0) & (state.q.mean["z"] <= 1))
    if name in ("sgd", "adam", "ogn"):
        alone = rule.init(PARAMS, objective)
        for i in range(30):
            alone, _ = step(objective, alone, DATA, jax.random.key(i))
        close({k: state.q.mean[k] for k in PARAMS}, alone.q.mean)


def test_families_leaf_by_leaf():
    """Signs, a diagonal Gaussian and a fixed one in a single q, each with its own points."""
    start = {
        "b": blr.FixedGaussian(jnp.zeros(6), 96.0),
        "v": blr.DiagonalGaussian(PARAMS["v"], 96.5),
        "w": blr.Bernoulli(PARAMS["w"]),
    }
    points = blr.Each({"w": blr.Relaxed(1.0), "v": blr.MonteCarlo(1), "b": blr.Delta()})
    rule = blr.vogn(0.05, relative=False).replace(family=blr.Product, points=points)
    result = blr.fit(rule, OBJECTIVE, start, DATA, steps=300, batch_size=16, key=jax.random.key(0))
    assert result.reason == "steps"
    assert result.trace["objective"][-30:].mean() < 0.8 * result.trace["objective"][:30].mean()
    blocks = result.q.blocks
    assert type(blocks["w"]) is blr.Bernoulli
    assert float(jnp.abs(blocks["b"].mean).max()) > 0
    np.testing.assert_array_equal(blocks["b"].precision, start["b"].precision)
    output = blr.predict(result.q, apply, X, key=jax.random.key(1), samples=4)
    assert output.shape == (48,)
    with pytest.raises(ValueError, match=r"Bernoulli block does not go with MonteCarlo\(1\)"):
        rule.replace(points=blr.Each(dict.fromkeys(start, blr.MonteCarlo(1)))).init(start, OBJECTIVE)
    with pytest.raises(ValueError, match="blocks are"):
        rule.replace(points=blr.Each({"w": blr.Sign()})).init(start, OBJECTIVE)


@pytest.mark.sampled("sgd")
@pytest.mark.parametrize("name", ["adam", "vogn", "ivon", "sgd"])
def test_a_bad_loss_or_gradient_never_enters_the_state(name):
    def loss(w, x):  # finite at w = 0, where its slope in the first entry is not
        return jnp.sqrt(jnp.abs(w[0])) * x[0] + 0.5 * (w[1] - x[1]) ** 2

    objective = blr.Objective(loss, size=8, regularizer=1.0)
    rule = RULES[name].replace(points=blr.Delta()) if name == "vogn" else RULES[name]
    if name == "ivon":
        rule = rule.replace(points=blr.MonteCarlo(1), curvature=blr.SquaredGradient())
    start = jnp.zeros(2)
    state = rule.init(start, objective)
    step = jax.jit(rule.step)
    batch = jnp.ones((4, 2)).at[:, 0].set(jnp.inf)  # an infinite loss
    after, info = step(objective, state, batch, jax.random.key(0))
    assert not bool(info.finite)
    close(dataclasses.replace(after, count=state.count), state)
    if name != "ivon":
        after, info = step(objective, state, jnp.ones((4, 2)), jax.random.key(0))  # a NaN in one entry's slope
        assert not bool(info.finite)
        if name == "vogn":  # its first step measures a curvature
            after, info = step(objective, after, jnp.ones((4, 2)), jax.random.key(1))
            assert not bool(info.finite)
        assert np.all(np.isfinite(after.q.mean))
        assert float(after.q.mean[1]) > 0
        result = blr.fit(rule, objective, start, jnp.ones((4, 2)), steps=5, key=jax.random.key(0))
        assert result.reason == "not finite"
        np.testing.assert_array_equal(result.q.mean, start)


@pytest.mark.sampled("adam", "ivon")
@pytest.mark.parametrize("name", ["sgd", "adam", "ivon", "slang", "dropout", "bayesbinn"])
def test_a_resumed_run_is_the_uncut_one_bit_for_bit(name, tmp_path):
    """Step count, momentum, keys and the place in the data: cut twice inside an epoch, saved, loaded and resumed."""
    rule, objective = RULES[name], objective_of(name)
    if name == "sgd":
        rule = blr.sgd(0.05, momentum=0.9)
    arguments = {"batch_size": 20}  # ragged, and epochs of three steps
    uncut = blr.fit(rule, objective, PARAMS, DATA, steps=30, key=jax.random.key(4), **arguments)
    # All steps that are left are planned each time, and ten of them taken.
    arguments |= {"on_step": lambda result: True, "every": 10}
    run, traces = blr.fit(rule, objective, PARAMS, DATA, steps=30, key=jax.random.key(4), **arguments), []
    for part in range(2):
        traces.append(run.trace["objective"])
        run.save(tmp_path / f"{part}.npz")
        left = 20 - 10 * part
        run = blr.fit(rule, objective, blr.load(tmp_path / f"{part}.npz"), DATA, steps=left, **arguments)
    for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(uncut.state), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.concatenate([*traces, run.trace["objective"]]), uncut.trace["objective"])


@pytest.mark.extended
@pytest.mark.parametrize("name", ["vogn", "ivon", "slang", "kronecker"])
def test_the_precision_goes_with_the_temperature(name):
    """S = (Nv + δ)/τ at every step of a schedule, and the mean's step does not jump with it."""
    cooling = lambda t: jnp.where(t < 1, 1.0, 0.1)
    recipe = {"vogn": blr.vogn, "ivon": blr.ivon, "slang": blr.slang, "kronecker": blr.vogn}[name]
    options = {"relative": False} if name == "kronecker" else {}
    rule = recipe(1e-3, curvature=1.0, decay=1 - 1e-9, averaging=0, temperature=cooling, **options)
    if name == "kronecker":
        rule = rule.replace(family=blr.KroneckerGaussian)
    state, step = rule.init(PARAMS, OBJECTIVE), jax.jit(rule.step)
    steps = []
    for i in range(3):
        before = state.q.mean
        state, _ = step(OBJECTIVE, state, DATA, jax.random.key(i))
        steps.append(np.linalg.norm(np.asarray(state.q.mean["w"]) - before["w"]))
    np.testing.assert_allclose(1 / state.q.variance()["w"], (96 + 0.5) / 0.1, rtol=1e-4)
    assert 0.3 < steps[1] / steps[0] < 3


def test_a_temperature_that_starts_at_zero_is_refused():
    with pytest.raises(ValueError, match="begin above 0"):
        blr.vogn(0.1, temperature=optax.linear_schedule(0.0, 1.0, 10)).init(PARAMS, OBJECTIVE)


@pytest.mark.extended
def test_replacing_the_family_keeps_its_start():
    rule = blr.vogn(0.1, relative=False, curvature=1.0)
    for family in (blr.KroneckerGaussian, blr.Gaussian):
        q = rule.replace(family=family).init(PARAMS, OBJECTIVE).q
        np.testing.assert_allclose(1 / q.variance()["w"], 96.5, rtol=1e-12)


@pytest.mark.extended
def test_sweeps_trace_the_numbers():
    """Rates, averaging, decay and temperature are leaves: a sweep is a vmap."""

    def first(rate, averaging, temperature):
        rule = blr.vogn(rate, averaging=averaging, temperature=temperature, decay=averaging)
        state = rule.init(PARAMS, OBJECTIVE)
        return rule.step(OBJECTIVE, state, DATA, jax.random.key(0))[0].q.mean["v"]

    grid = jnp.array([0.1, 0.2]), jnp.array([0.5, 0.9]), jnp.array([1.0, 0.5])
    swept = jax.jit(jax.vmap(first))(*grid)
    np.testing.assert_allclose(swept[1], jax.jit(lambda: first(0.2, 0.9, 0.5))(), rtol=1e-10)


def test_parameters_that_are_not_arrays_are_named():
    with pytest.raises(ValueError, match=r"eqx\.partition"):
        blr.adam(1e-3).init({"w": PARAMS["w"], "activation": jnp.tanh}, OBJECTIVE)
    with pytest.raises(ValueError, match="fewer than two axes"):
        blr.dropout(0.1, 0.5).init(jnp.ones(4), OBJECTIVE)


@pytest.mark.sampled("adam")
@pytest.mark.parametrize("name", ["adam", "ivon", "kronecker", "dropout"])
def test_a_state_of_ones_own_loop_is_saved_and_resumed(name, tmp_path):
    rule, step = RULES[name], jax.jit(RULES[name].step)
    state = rule.init(PARAMS, OBJECTIVE)
    for i in range(2):
        state, _ = step(OBJECTIVE, state, DATA, jax.random.key(i))
    blr.save(tmp_path / "state.npz", (state, jax.random.key(2), 2))
    loaded, key, place = blr.load(tmp_path / "state.npz")
    assert place == 2
    onward = step(OBJECTIVE, state, DATA, jax.random.key(2))[0]
    resumed = step(OBJECTIVE, loaded, DATA, key)[0]
    for a, b in zip(jax.tree.leaves(onward), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
