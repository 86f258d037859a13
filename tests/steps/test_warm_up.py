"""A temperature, and a rate in Adam's units, that follow the number of steps which a fit plans."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr

ROWS, BATCH, STEPS = 60, 12, 40
X = jax.random.normal(jax.random.key(0), (ROWS, 3))
Y = (X @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(float)
OBJECTIVE = blr.Objective(lambda w, e: jax.nn.softplus((1 - 2 * e[1]) * (e[0] @ w)), size=ROWS, regularizer=1.0)
OPTIONS = {"batch_size": BATCH, "key": jax.random.key(1)}
RULES = {"vogn": blr.vogn, "ivon": blr.ivon}
recipes = pytest.mark.parametrize("recipe", RULES.values(), ids=RULES)


def fit(rule, start=None, steps=STEPS, **options):
    start = jnp.zeros(3) if start is None else start
    return blr.fit(rule, OBJECTIVE, start, (X, Y), steps=steps, **OPTIONS | options)


def assert_equal(q, other):
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), q, other))


@pytest.mark.extended
@recipes
def test_defaults_are_the_schedules_of_optax(recipe):
    """The default of a fit on mini-batches, written out with the number of steps."""
    by_hand = recipe(optax.cosine_decay_schedule(1e-3, STEPS), temperature=optax.linear_schedule(0.01, 1.0, STEPS // 2))
    ours, theirs = fit(recipe(1e-3)), fit(by_hand)
    np.testing.assert_allclose(ours.q.mean, theirs.q.mean, rtol=1e-6)
    np.testing.assert_allclose(ours.q.precision, theirs.q.precision, rtol=1e-6)
    np.testing.assert_allclose(ours.trace["rate"], theirs.trace["rate"], rtol=1e-6, atol=1e-12)
    assert float(jnp.max(jnp.abs(ours.q.mean))) > 0.01  # They have moved.


@recipes
def test_an_interrupted_fit_goes_on_bit_for_bit(recipe, tmp_path):
    rule = recipe(1e-3)
    whole = fit(rule)
    half = fit(rule, on_step=lambda result: result.steps == 15, every=15)
    half.save(tmp_path / "half.npz")
    again = fit(rule, blr.load(tmp_path / "half.npz"), steps=STEPS - 15)
    assert half.steps == 15
    assert_equal(again.q, whole.q)


def test_a_fit_that_ends_before_its_warm_up_says_so(tmp_path):
    cold = fit(blr.vogn(1e-3), on_step=lambda result: True, every=10)
    assert "After 10 of 40 planned steps the temperature has risen to 0.46" in cold.explanation
    cold.save(tmp_path / "cold.npz")
    assert blr.load(tmp_path / "cold.npz").explanation == cold.explanation
    assert fit(blr.vogn(1e-3), on_step=lambda result: result.steps == 30, every=10).explanation is None
    assert fit(blr.vogn(1e-3)).explanation is None


def test_the_best_state_of_a_fit_with_patience_may_be_cold():
    """The result is the first evaluation, which nothing after it improves on, and that is in the warm-up."""
    counts = iter(range(100))
    watch = {"validation": (X, Y), "metrics": {"count": lambda q, data: next(counts)}, "patience": 100}
    best = fit(blr.vogn(1e-3), **watch)
    assert best.steps == 5
    assert "After 5 of 40 planned steps" in best.explanation


@pytest.mark.extended
@recipes
def test_without_a_number_of_steps_nothing_changes(recipe):
    """On all data, until convergence, and in a loop of one's own: temperature 1 and a constant rate."""
    plain = recipe(optax.constant_schedule(1e-3), temperature=1.0)
    full = {"batch_size": None}
    assert_equal(fit(recipe(1e-3), **full).q, fit(plain, **full).q)
    assert_equal(fit(recipe(1e-3), tolerance=1e-9).q, fit(plain, tolerance=1e-9).q)
    state, other = (rule.init(jnp.zeros(3), OBJECTIVE) for rule in (recipe(1e-3), plain))
    for key in jax.random.split(jax.random.key(2), 3):
        state = recipe(1e-3).step(OBJECTIVE, state, (X[:BATCH], Y[:BATCH]), key)[0]
        other = plain.step(OBJECTIVE, other, (X[:BATCH], Y[:BATCH]), jax.random.clone(key))[0]
    assert_equal(state.q, other.q)


def test_without_a_prior_there_is_no_plan():
    """The published start and units hold then, at temperature 1."""
    flat = blr.Objective(OBJECTIVE.loss, size=ROWS)
    assert blr.vogn(0.1).init(jnp.zeros(3), flat, horizon=STEPS).horizon is None


def test_published_forms_have_temperature_1():
    for rule in (blr.vogn(0.1, curvature=1.0), blr.ivon(0.1, relative=True), blr.slang(0.1)):
        assert rule.steps.temperature == 1.0
        assert rule.init(jnp.zeros(3), OBJECTIVE, horizon=STEPS).horizon is None


@pytest.mark.extended
@recipes
def test_a_loop_of_ones_own_takes_the_horizon(recipe):
    """As the schedules of optax, without a recompilation for another number of steps."""
    step = jax.jit(recipe(1e-3).step)
    by_hand = recipe(optax.cosine_decay_schedule(1e-3, 4), temperature=optax.linear_schedule(0.01, 1.0, 2))
    for horizon in (4, 6):
        state = recipe(1e-3).init(jnp.zeros(3), OBJECTIVE, horizon=horizon)
        other = by_hand.init(jnp.zeros(3), OBJECTIVE)
        for key in jax.random.split(jax.random.key(2), 4):
            state = step(OBJECTIVE, state, (X[:BATCH], Y[:BATCH]), key)[0]
            other = by_hand.step(OBJECTIVE, other, (X[:BATCH], Y[:BATCH]), jax.random.clone(key))[0]
        differ = not np.allclose(state.q.precision, other.q.precision, rtol=1e-6)
        assert differ == (horizon == 6)
    assert step._cache_size() == 1


def test_a_plan_of_no_steps_is_at_its_start():
    """A fit of no steps, from which another goes on."""
    none, some = (blr.ivon(1e-3).init(jnp.zeros(3), OBJECTIVE, horizon=steps).q for steps in (0, 5))
    np.testing.assert_array_equal(none.precision, some.precision)


@pytest.mark.extended
def test_run_takes_the_steps_of_fit():
    rule = blr.vogn(1e-3)
    ran = blr.run(rule, OBJECTIVE, jnp.zeros(3), (X, Y), steps=STEPS, **OPTIONS)
    np.testing.assert_allclose(ran.q.precision, fit(rule).q.precision, rtol=1e-12)
    first = blr.run(rule, OBJECTIVE, jnp.zeros(3), (X, Y), steps=10, **OPTIONS)
    assert int(blr.run(rule, OBJECTIVE, first.state, (X, Y), steps=20, **OPTIONS).state.horizon) == 30


@pytest.mark.extended
def test_another_plan_leaves_the_curvature():
    """Further steps than planned: S is at the temperature of the longer plan, and τS = Nv + δ as it was."""
    from bayesrule.rule.update import planned

    rule, short = blr.vogn(1e-3), fit(blr.vogn(1e-3), steps=10)
    longer = planned(rule, short.state, 40)
    temperature = float(rule.steps.temperature.at(9, 40))
    assert temperature < 0.5
    np.testing.assert_allclose(temperature * longer.q.precision, short.q.precision, rtol=1e-12)
    gone_on = fit(rule, short, steps=30)
    assert int(gone_on.state.horizon) == 40
    assert gone_on.explanation is None


def test_a_given_posterior_is_one_at_temperature_1():
    """A start that is a member of the family has its precision at temperature 1, and is cooled for the warm-up."""
    q = blr.DiagonalGaussian(jnp.zeros(3), jnp.full(3, 5.0))
    state = blr.vogn(1e-3).init(q, OBJECTIVE, horizon=STEPS)
    np.testing.assert_allclose(state.q.precision, 500.0)


@pytest.mark.extended
def test_other_starts_follow_the_same_plan(monkeypatch):
    """They begin with the precision of the given start, at the plan's first temperature, and not with a colder one."""
    from bayesrule.fitting import fit as module

    seen = []
    monkeypatch.setattr(module, "fits_in_memory", lambda *_: False)
    monkeypatch.setattr(module.Driver, "at", lambda self, state: seen.append(state) or self)
    blr.fit(blr.vogn(1e-3), OBJECTIVE, jnp.zeros(3), (X, Y), steps=4, starts=2, **OPTIONS)
    assert [int(state.horizon) for state in seen] == [4, 4]
    np.testing.assert_allclose([state.q.precision for state in seen], 100.0)


@pytest.mark.parametrize("wrong", [{"start": 0.0}, {"start": 2.0}, {"fraction": 0.0}, {"fraction": 1.5}])
def test_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}= is above 0 and at most 1"):
        blr.WarmUp(**wrong)


def test_printed():
    assert "τ = WarmUp(0.01, 0.5)" in str(blr.vogn(1e-3))
    assert "falling to 0 in fit" in str(blr.vogn(1e-3))
    assert "falling to 0" not in str(blr.vogn(optax.constant_schedule(1e-3)))
    assert blr.difference(blr.vogn(1e-3), blr.vogn(1e-3, temperature=1.0)).rows == (
        ("steps", "temperature", "WarmUp(0.01, 0.5)", "1"),
    )
