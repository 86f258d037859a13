"""Rules as optax transformations: the same trajectories, alone and inside everything that optax wraps around one."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import bayesrule as blr
from bayesrule.interop import optax as bridge

ROWS, STEPS, BATCH = 60, 200, 20
X = jax.random.normal(jax.random.key(0), (ROWS, 4))
Y = jnp.sin(X @ jnp.array([1.0, -2.0, 0.5, 0.3]))
PARAMS = {
    "hidden": {"w": 0.5 * jax.random.normal(jax.random.key(1), (4, 5)), "b": jnp.zeros(5)},
    "out": [0.5 * jax.random.normal(jax.random.key(2), (5,)), jnp.array(0.1)],
}
ORDER = np.random.default_rng(0).permuted(np.tile(np.arange(ROWS), (STEPS, 1)), axis=1)[:, :BATCH]
RAMP = optax.linear_schedule(0.01, 0.05, STEPS)
PAIRS = {
    "sgd": (lambda r: blr.sgd(r), lambda r: optax.sgd(r)),
    "momentum": (lambda r: blr.sgd(r, momentum=0.9), lambda r: optax.sgd(r, momentum=0.9)),
    "nesterov": (
        lambda r: blr.sgd(r, momentum=0.9, nesterov=True),
        lambda r: optax.sgd(r, momentum=0.9, nesterov=True),
    ),
    "rmsprop": (lambda r: blr.rmsprop(r), lambda r: optax.rmsprop(r, decay=0.9, eps=1e-8, eps_in_sqrt=False)),
    "adam": (lambda r: blr.adam(r), lambda r: optax.adam(r)),
    "adamw": (lambda r: blr.adamw(r, weight_decay=0.1), lambda r: optax.adamw(r, weight_decay=0.1)),
}
IVON = blr.ivon(0.1, decay=0.99)


def apply(params, x):
    return jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["out"][0] + params["out"][1]


def mean_loss(params, batch):
    return 0.5 * jnp.mean((apply(params, batch[0]) - batch[1]) ** 2)


def run(tx, params=PARAMS, *, draw=False, order=ORDER):
    """The parameters after every step, and the last state."""

    def body(carry, index):
        params, state = carry
        theta = bridge.perturbed(state, params) if draw else params
        gradient = jax.grad(mean_loss)(theta, (X[index], Y[index]))
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(body, (params, tx.init(params)), order))()


def close(actual, expected, tolerance):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


WRAPPERS = {
    "alone": lambda tx: tx,
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(0.1), tx),
    "in micro-steps": lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
}


@pytest.mark.sampled("nesterov-alone")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", PAIRS)
def test_same_trajectory_as_optax(name, wrapper):
    """200 steps in float64 under a schedule."""
    (ours, theirs), wrap = PAIRS[name], WRAPPERS[wrapper]
    (actual, _), path = run(wrap(bridge.transformation(ours(RAMP), size=10 * ROWS)))
    _, expected = run(wrap(theirs(RAMP)))
    close(path, expected, 1e-12)
    moved = jax.tree.map(lambda new, old: jnp.max(jnp.abs(new - old)), actual, PARAMS)
    assert max(float(leaf) for leaf in jax.tree.leaves(moved)) > 0.05


VARIATIONAL = {
    "ivon as published": blr.ivon(0.1),
    "ivon, antithetic pairs": blr.ivon(0.1, samples=4, antithetic=True, decay=0.99),
    "ivon, one sample after another": blr.ivon(0.1, decay=0.99).replace(points=blr.MonteCarlo(4, scan=True)),
    "ivon, annealed": blr.ivon(0.1, decay=0.99, temperature=lambda count: 0.1 + 0.9 * count / STEPS),
    "Vadam": blr.adam(0.01, damping="prior", initial_precision=100.0).replace(points=blr.MonteCarlo(1)),
    "dropout": blr.dropout(0.1, 0.8),
    "straight_through": blr.straight_through(0.1),
    "bayesbinn": blr.bayesbinn(1e-4),
}


@pytest.mark.sampled(
    *("ivon, one sample after another-None", "ivon, annealed-20", "Vadam-20", "dropout-20", "straight_through-20"),
    "bayesbinn-None",
)
@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize("name", VARIATIONAL)
def test_same_trajectory_as_step_with_the_same_noise(name, batch_size):
    """`rule.step` with the tickets of the transformation, 200 steps in float64."""
    rule = VARIATIONAL[name]
    strength = None if name in ("straight_through", "bayesbinn") else 2.0
    options = {"size": 10 * ROWS, "regularizer": strength, "batch_size": batch_size}
    tx = bridge.transformation(rule, key=jax.random.key(7), **options)
    objective = blr.Objective(
        lambda p, e: 0.5 * (apply(p, e[0]) - e[1]) ** 2, size=options["size"], regularizer=strength
    )
    several = getattr(rule.points, "samples", 1) > 1

    def body(carry, index):
        params, opt_state, state = carry
        batch = X[index], Y[index]
        gradient = jax.grad(mean_loss)
        theta = bridge.perturbed(opt_state, params)
        slopes = jax.vmap(lambda t: gradient(t, batch))(theta) if several else gradient(theta, batch)
        updates, opt_state = tx.update(slopes, opt_state, params)
        key = jax.random.fold_in(jax.random.key(7), state.count)
        state, _ = rule.step(objective, state, batch, key)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, state), jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), params, state.q.params)

    def both():
        # Without the batch's size the start is the published one, and `step` is given that state.
        state = rule.init(PARAMS, objective) if batch_size else rule.init(PARAMS, **options)
        return jax.lax.scan(body, (PARAMS, tx.init(PARAMS), state), ORDER)

    if batch_size is None and name.startswith("ivon"):
        rule = rule.replace(steps=_published(rule.steps))
    (params, opt_state, state), apart = jax.jit(both)()
    assert max(float(jnp.max(leaf)) for leaf in jax.tree.leaves(apart)) < 1e-12
    close(bridge.posterior(opt_state, params), state.q, 1e-9)
    assert (
        max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True)) > 1e-3
    )


def _published(steps):
    """The steps with a decay in place of a window in epochs, which needs to know the batch's size."""
    window = steps.rates.precision
    forgotten = 1 - window.decay if isinstance(window, blr.Window) else window
    pieces = {field.name: getattr(steps, field.name) for field in dataclasses.fields(steps)}
    pieces.pop("rates")
    return blr.Steps(blr.Rates(steps.rates.mean, forgotten), **pieces)


# Everything that optax wraps around a transformation.


def _rule(rate=0.1):
    return bridge.transformation(blr.ivon(rate, decay=0.99), size=600, regularizer=2.0)


LABELS = {"hidden": {"w": "q", "b": "other"}, "out": "q"}
MASK = {"hidden": {"w": True, "b": False}, "out": [True, False]}
AROUND = {
    "chain": lambda: optax.chain(optax.clip(1.0), _rule(), optax.scale(1.0)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(_rule)(rate=0.1),
    "inject_hyperparams, schedule": lambda: optax.inject_hyperparams(_rule)(rate=RAMP),
    "apply_if_finite": lambda: optax.apply_if_finite(_rule(), 3),
    "MultiSteps": lambda: optax.MultiSteps(_rule(), 4).gradient_transformation(),
    "masked": lambda: optax.chain(optax.masked(_rule(), MASK), optax.masked(optax.set_to_zero(), _negated(MASK))),
    "partition": lambda: optax.partition({"q": _rule(), "other": optax.adam(0.01)}, LABELS),
    "two rules": lambda: optax.partition({"q": _rule(), "other": _rule(0.05)}, LABELS),
    "all of it": lambda: optax.MultiSteps(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.partition({"q": optax.inject_hyperparams(_rule)(rate=RAMP), "other": optax.sgd(0.1)}, LABELS),
        ),
        2,
    ).gradient_transformation(),
}


def _negated(mask):
    return jax.tree.map(lambda keep: not keep, mask)


@pytest.mark.sampled("partition", "all of it")
@pytest.mark.parametrize("name", AROUND)
def test_inside_other_transformations(name):
    """θ is a sample where the rule moves and the parameters elsewhere; q has their shapes; training lowers the loss."""
    tx = AROUND[name]()
    (params, state), _ = run(tx, draw=True)
    assert float(mean_loss(params, (X, Y))) < 0.8 * float(mean_loss(PARAMS, (X, Y)))
    theta, q = bridge.perturbed(state, params), bridge.posterior(state, params)
    moved = {"masked": MASK, "partition": {"hidden": {"w": True, "b": False}, "out": [True, True]}}
    moved["all of it"] = moved["partition"]
    by_rule = moved.get(name, jax.tree.map(lambda _: True, PARAMS))
    for drawn, mean, precision, ours in zip(*map(jax.tree.leaves, (theta, params, q.precision, by_rule)), strict=True):
        assert drawn.shape == mean.shape == precision.shape
        assert bool(jnp.all(drawn != mean)) == ours
        assert bool(jnp.all(jnp.isfinite(precision))) == ours
    close(q.mean, params, 0)
    assert jax.tree.structure(q.sample(jax.random.key(0))) == jax.tree.structure(params)


def test_two_rules_have_different_noise():
    params = {"a": jnp.zeros(50), "b": jnp.zeros(50)}
    tx = optax.partition({"one": _rule(), "two": _rule()}, {"a": "one", "b": "two"})
    theta = bridge.perturbed(tx.init(params), params)
    assert abs(np.corrcoef(theta["a"], theta["b"])[0, 1]) < 0.5


@pytest.mark.extended
def test_one_sample_for_all_micro_steps():
    tx = optax.MultiSteps(_rule(), 3).gradient_transformation()
    state, draws, params = tx.init(PARAMS), [], PARAMS
    for step in range(6):
        theta = bridge.perturbed(state, params)
        draws.append(np.asarray(theta["out"][0]))
        updates, state = tx.update(jax.grad(mean_loss)(theta, (X[step::6], Y[step::6])), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(draws[0], draws[2])
    np.testing.assert_array_equal(draws[3], draws[5])
    assert np.all(draws[0] != draws[3])


@pytest.mark.extended
def test_micro_steps_equal_one_step_on_all_of_them():
    """Four micro-batches of five are one of twenty at the same θ, up to optax's averaging by 1/n in float32."""
    micro = optax.MultiSteps(_rule(), 4).gradient_transformation()
    (actual, _), _ = run(micro, draw=True, order=ORDER[:40].reshape(160, 5))
    (expected, _), _ = run(_rule(), draw=True, order=ORDER[:40])
    close(actual, expected, 1e-8)


@pytest.mark.extended
def test_apply_if_finite_leaves_a_step_out():
    tx = optax.apply_if_finite(_rule(), 3)
    state = tx.init(PARAMS)
    before = bridge.perturbed(state, PARAMS)
    updates, state = tx.update(jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS), state, PARAMS)
    close(updates, jax.tree.map(jnp.zeros_like, PARAMS), 0)
    close(bridge.perturbed(state, PARAMS), before, 0)


@pytest.mark.extended
def test_entries_that_are_not_finite_count_as_zero():
    tx = _rule()
    gradient = jax.tree.map(jnp.ones_like, PARAMS)
    gradient["hidden"]["b"] = jnp.array([1.0, jnp.nan, jnp.inf, 1.0, -jnp.inf])
    updates, state = tx.update(gradient, tx.init(PARAMS), PARAMS)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves((updates, state.state)))


def test_the_parameters_are_not_kept():
    """The state of Adam has two arrays for each of the parameters, and a change of the parameters is the mean's."""
    tx = bridge.transformation(blr.adam(0.1), size=10)
    params = {"w": jnp.zeros(1000)}
    state = tx.init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size >= 1000) == 2000
    moved = {"w": jnp.full(1000, 3.0)}
    close(bridge.posterior(state, moved).mean, moved, 0)


@pytest.mark.extended
def test_inside_jit_vmap_and_pmap():
    tx = _rule()
    starts = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)

    def train(params):
        def body(carry, index):
            params, state = carry
            gradient = jax.grad(mean_loss)(bridge.perturbed(state, params), (X[index], Y[index]))
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), ORDER[:20])[0][0]

    both = jax.jit(jax.vmap(train))(starts)
    for k in range(2):
        member = lambda p, k=k: p[k]
        close(jax.tree.map(member, both), train(jax.tree.map(member, starts)), 1e-12)
    single = jax.pmap(train)(jax.tree.map(lambda p: p[None], PARAMS))
    close(jax.tree.map(lambda p: p[0], single), train(PARAMS), 1e-12)


@pytest.mark.extended
def test_under_shard_map():
    """Gradients are averaged over the devices; all of them draw the same θ."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec, none = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    tx = _rule()

    def step(params, state, batch):
        gradient = jax.grad(mean_loss)(bridge.perturbed(state, params), batch)
        updates, state = tx.update(jax.lax.pmean(gradient, "data"), state, params)
        return optax.apply_updates(params, updates), state

    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(none, none, spec), out_specs=(none, none), check_vma=False)
    )
    actual, _ = sharded(PARAMS, tx.init(PARAMS), (X, Y))
    state = tx.init(PARAMS)
    gradient = jax.grad(mean_loss)(bridge.perturbed(state, PARAMS), (X, Y))
    close(actual, optax.apply_updates(PARAMS, tx.update(gradient, state, PARAMS)[0]), 1e-13)


@pytest.mark.extended
def test_a_flax_train_state():
    model = nn.Dense(1)
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), X)["params"], tx=_rule())
    loss = lambda params: jnp.mean((state.apply_fn({"params": params}, X)[:, 0] - Y) ** 2)
    first = float(loss(state.params))

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(loss)(bridge.perturbed(state.opt_state, state.params)))

    for _ in range(100):
        state = step(state)
    assert float(loss(state.params)) < 0.8 * first
    q = bridge.posterior(state.opt_state, state.params)
    assert jax.tree.structure(q.mean) == jax.tree.structure(state.params)


@pytest.mark.extended
def test_an_nnx_optimizer():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, _rule(), wrt=nnx.Param)
    loss = lambda model: jnp.mean((model(X)[:, 0] - Y) ** 2)
    first = float(loss(model))

    @nnx.jit
    def step(model, optimizer):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        theta = bridge.perturbed(optimizer.opt_state, params)
        gradient = jax.grad(lambda theta: loss(nnx.merge(graph, theta, rest)))(theta)
        optimizer.update(model, gradient)

    for _ in range(100):
        step(model, optimizer)
    assert float(loss(model)) < 0.8 * first
    params = nnx.state(model, nnx.Param)
    theta = bridge.perturbed(optimizer.opt_state, params)
    assert jax.tree.structure(theta) == jax.tree.structure(params)
    assert all(bool(jnp.all(a != b)) for a, b in zip(*map(jax.tree.leaves, (theta, params)), strict=True))
    assert float(loss(nnx.merge(nnx.graphdef(model), theta))) > 0


@pytest.mark.extended
def test_half_precision_parameters_have_statistics_in_float32():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = _rule()
    state = tx.init(params)
    theta = bridge.perturbed(state, params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(theta))
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(optax.apply_updates(params, updates)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.state.q.precision))


@pytest.mark.extended
def test_a_resumed_run_equals_the_uncut_one(tmp_path):
    """Cut in the middle, written to a file and read again, the noise included."""
    tx = _rule()
    (params, state), _ = run(tx, draw=True, order=ORDER[:100])
    words = jax.tree.leaves((params, state))
    np.savez(tmp_path / "cut.npz", *map(np.asarray, words))
    with np.load(tmp_path / "cut.npz") as file:
        restored = jax.tree.unflatten(
            jax.tree.structure((params, state)), [file[f"arr_{k}"] for k in range(len(words))]
        )

    def body(carry, index):
        params, state = carry
        gradient = jax.grad(mean_loss)(bridge.perturbed(state, params), (X[index], Y[index]))
        updates, state = tx.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    finish = jax.jit(lambda carry: jax.lax.scan(body, carry, ORDER[100:])[0])
    for one, other in zip(*map(jax.tree.leaves, (finish(restored), finish((params, state)))), strict=True):
        np.testing.assert_array_equal(one, other)
    (uncut, _), _ = run(tx, draw=True)
    close(finish(restored)[0], uncut, 1e-13)


def test_errors_say_what_to_do():
    tx = _rule()
    with pytest.raises(ValueError, match=r"tx.update\(gradient, state, params\)"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="no state of bayesrule"):
        bridge.perturbed(optax.adam(0.1).init(PARAMS), PARAMS)
    squares = bridge.transformation(blr.vogn(0.1), size=10, regularizer=1.0)
    with pytest.raises(ValueError, match="Recipes that work from gradients alone are sgd"):
        squares.update(PARAMS, squares.init(PARAMS), PARAMS)
    backtracking = bridge.transformation(
        blr.gradient_descent(0.1).replace(guard=blr.Backtracking(monotone=True)), size=1
    )
    with pytest.raises(ValueError, match="compares losses"):
        backtracking.update(PARAMS, backtracking.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="positive number of examples"):
        bridge.transformation(blr.adam(0.1), size=0).init(PARAMS)
