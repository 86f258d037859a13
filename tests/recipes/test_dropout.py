"""Dropout as a spike-and-slab mixture: keep probability 1 is the algorithm itself, and masks are unbiased."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from scipy.special import expit

import bayesrule as blr
from bayesrule.points.masks import apply_masks
from bayesrule.rule.update import measure
from bayesrule.steps.step import Step

KEYS = jax.random.split(jax.random.key(2), 4)
X = jax.random.normal(KEYS[0], (12, 3))
Y = jnp.sin(X[:, 0])
PARAMS = {
    "first": {"w": 0.7 * jax.random.normal(KEYS[1], (3, 2)), "b": jnp.array([0.1, -0.2])},
    "second": 0.8 * jax.random.normal(KEYS[2], (2, 1)),
}


def loss(params, example):
    x, y = example
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return 0.5 * (jnp.sum(hidden @ params["second"]) - y) ** 2


OBJECTIVE = blr.Objective(loss, size=24, regularizer=0.5)
DATA = (X, Y)
NEWTON = blr.newton(0.5).replace(guard=blr.NoGuard())
GAUSSIANS = {
    "sgd": blr.sgd(0.1),
    "rmsprop": blr.rmsprop(0.01),
    "adam": blr.adam(0.01),
    "ogn": blr.ogn(0.1),
    "newton": NEWTON,
}


def dropped(rule, keep, **options):
    return rule.replace(family=rule.family.dropped(keep), points=blr.Masks(**options))


def run(rule, steps=5):
    def body(state, key):
        state, info = rule.step(OBJECTIVE, state, DATA, key)
        return state, info.objective

    return jax.jit(
        lambda: jax.lax.scan(body, rule.init(PARAMS, OBJECTIVE), jax.random.split(jax.random.key(0), steps))
    )()


@pytest.mark.extended
@pytest.mark.parametrize("name", GAUSSIANS)
def test_keeping_everything_is_the_algorithm_itself(name):
    rule = GAUSSIANS[name]
    expected, observed = run(rule)
    actual, also = run(dropped(rule, 1.0))
    np.testing.assert_allclose(also, observed, rtol=1e-12)
    for mine, theirs in zip(jax.tree.leaves(actual.q.slab), jax.tree.leaves(expected.q), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-13)


def test_dropout_is_sgd_with_masks():
    assert dropped(blr.sgd(0.1), 0.8) == blr.dropout(0.1, 0.8)


KEEP = {"first": 0.8, "second": 0.6}


def every_mask(q):
    """All 2⁵ masks of the five units, and their probabilities."""
    rows = np.array(list(itertools.product([0.0, 1.0], repeat=5)))
    masks = {
        "first": {"w": jnp.asarray(rows[:, :3, None]), "b": jnp.ones((32, 1))},
        "second": jnp.asarray(rows[:, 3:, None]),
    }
    keep = np.array([0.8] * 3 + [0.6] * 2)
    return masks, jnp.asarray(np.prod(np.where(rows == 1, keep, 1 - keep), axis=1))


class EveryMask(blr.Masks):
    def __init__(self):
        super().__init__()

    def at(self, q, key):
        masks, weights = every_mask(q)
        return apply_masks(q, masks, weights=weights)


@pytest.mark.parametrize("name", ["sgd", "newton", "ogn"])
def test_weighted_by_z_over_keep_the_masks_are_unbiased(name):
    """Σ_z p(z) (z/π)∇ℓ(z∘m) = π⁻¹∇_m E_z ℓ(z∘m), and the Hessian's likewise, by enumeration and autodiff."""
    rule = dropped(GAUSSIANS[name], KEEP)
    q = rule.init(PARAMS, OBJECTIVE).q
    masks, weights = every_mask(q)
    actual = jax.jit(lambda q: rule.curvature.measure(OBJECTIVE, q, EveryMask(), DATA, None, None))(q)

    def expected_loss(mean):
        at = lambda z: OBJECTIVE.data(jax.tree.map(jnp.multiply, z, mean), DATA)[0]
        return jnp.sum(weights * jax.vmap(at)(masks))

    value, slope = jax.jit(jax.value_and_grad(expected_loss))(PARAMS)
    np.testing.assert_allclose(actual.value, value, rtol=1e-12)
    keep = {"first": {"w": 0.8, "b": 1.0}, "second": 0.6}
    slope = jax.tree.map(lambda g, k: np.asarray(g) / k, slope, keep)
    for mine, theirs in zip(jax.tree.leaves(actual.gradient), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-13)
    if name == "newton":
        flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
        hessian = np.asarray(jax.jit(jax.hessian(lambda v: expected_loss(unravel(v))))(flat))
        full = np.concatenate([np.full(m.size, k) for k, m in zip(*map(jax.tree.leaves, (keep, PARAMS)), strict=True)])
        units = np.array([0, 1, 2, 2, 3, 3, 4, 4, 5, 6])  # biases and weights, in the order of the ravelled tree
        same = units[:, None] == units[None, :]
        divided = hessian / np.where(same, full[:, None], full[:, None] * full[None, :])
        np.testing.assert_allclose(actual.curvature, divided, rtol=1e-9, atol=1e-12)


def test_drawn_masks_average_to_the_enumeration():
    rule = blr.dropout(0.1, KEEP, samples=4000)
    q = rule.init(PARAMS, OBJECTIVE).q
    point_set = jax.jit(lambda q, key: rule.points.at(q, key))(q, jax.random.key(0))
    for name, keep in (("first", 0.8), ("second", 0.6)):
        z = np.asarray(point_set.factors[0]["first"]["w"] if name == "first" else point_set.factors[0]["second"]) * keep
        assert set(np.unique(np.round(z, 12))) <= {0.0, 1.0}
        error = np.sqrt(keep * (1 - keep) / 4000)
        assert np.all(np.abs(z.mean(axis=0) - keep) < 4 * error)


def test_predictive_mean_is_keep_times_m():
    q = blr.dropout(0.1, KEEP).init(PARAMS, OBJECTIVE).q
    np.testing.assert_allclose(q.mean["first"]["w"], 0.8 * PARAMS["first"]["w"])
    np.testing.assert_allclose(q.mean["first"]["b"], PARAMS["first"]["b"])
    draws = np.asarray(jax.jit(lambda q, key: q.sample(key, (20_000,))["second"])(q, jax.random.key(0)))
    spread = draws.std(axis=0) / np.sqrt(20_000)
    assert np.all(np.abs(draws.mean(axis=0) - 0.6 * np.asarray(PARAMS["second"])) < 4.5 * spread)


def test_density_is_the_mixture_s():
    """log q of one unit with two weights, against scipy's normal densities."""
    q = blr.SpikeSlab(blr.DiagonalGaussian(jnp.array([[1.0, -0.5]]), 4.0), 0.7, spike=25.0)
    theta = jnp.array([[0.2, -0.1]])
    slab = stats.norm.pdf([0.2, -0.1], [1.0, -0.5], 0.5).prod()
    spike = stats.norm.pdf([0.2, -0.1], 0.0, 0.2).prod()
    assert float(q.log_prob(theta)) == pytest.approx(np.log(0.7 * slab + 0.3 * spike), abs=1e-12)
    wide = blr.SpikeSlab(blr.DiagonalGaussian(jnp.array([[30.0, -20.0]]), 4.0), 0.7, spike=25.0)
    log_prob, entropy = jax.jit(lambda q, key: (q.log_prob(q.sample(key, (20_000,))), q.entropy()))(
        wide, jax.random.key(1)
    )
    values = -np.asarray(log_prob)
    assert abs(values.mean() - float(entropy)) < 4.5 * values.std() / np.sqrt(values.size)


def test_keep_probability_is_learnt():
    """A layer whose units hurt when dropped is kept more, and the Concrete gradient points along the true one."""
    rule = blr.dropout(0.05, {"first": 0.5, "second": 1.0}, keep_rate=0.02, samples=8)
    state, _ = run(rule, steps=150)
    assert float(state.q.keep["first"]["w"]) != pytest.approx(0.5, abs=1e-3)
    assert float(state.q.keep["second"]) == 1.0
    assert 0 < float(state.q.keep["first"]["w"]) < 1


def test_a_learnt_keep_probability_is_pulled_to_its_first_value():
    """logit π ← logit π − ρ ∂/∂π[E ℓ̄ + τ KL(π ‖ π₀)], the KL and its slope by SciPy and finite differences."""
    slab = blr.DiagonalGaussian({"w": jnp.array([[1.0, -0.5], [0.3, 2.0]])}, 4.0)
    first = blr.SpikeSlab(slab, 0.7, learnt=True)
    now, rate, temperature, slope = 0.4, 0.3, 0.6, -0.8
    q = eqx.tree_at(lambda q: q.keep["w"], first, jnp.asarray(now))
    zero = {"slab": jax.tree.map(jnp.zeros_like, slab.mean), "keep": {"w": jnp.asarray(slope)}}
    moved = q.moved(Step(zero, jax.tree.map(jnp.zeros_like, slab.mean), 0.1, rate, temperature))
    divergence = lambda p: stats.entropy([p, 1 - p], [0.7, 0.3])
    pull = (divergence(now + 1e-6) - divergence(now - 1e-6)) / 2e-6
    assert abs(pull) > 1
    expected = expit(np.log(now / (1 - now)) - rate * (slope + temperature * pull))
    np.testing.assert_allclose(moved.keep["w"], expected, rtol=1e-8)


@pytest.mark.extended
def test_the_regularizer_of_a_learnt_keep_probability():
    """κ moves by the slope of E_z R(z∘m), R = ½δ‖θ‖², over the number of masks: enumerated, by finite differences."""
    m, strength, rate, keep = np.array([[1.0, -0.5], [0.3, 2.0], [-0.7, 0.4]]), 1.7, 0.2, 0.6
    objective = blr.Objective(lambda params, example: 0.0 * example, size=4, regularizer=strength)
    rule = blr.dropout(0.1, keep, keep_rate=rate)
    state, _ = rule.step(objective, rule.init({"w": jnp.asarray(m)}, objective), jnp.ones(4), jax.random.key(0))

    def expected(keep):
        masks = np.array(list(itertools.product([0, 1], repeat=3)))
        chances = np.prod(np.where(masks == 1, keep, 1 - keep), axis=1)
        return chances @ [0.5 * strength * np.sum((z[:, None] * m) ** 2) for z in masks]

    slope = (expected(keep + 1e-4) - expected(keep - 1e-4)) / 2e-4 / 3
    np.testing.assert_allclose(state.q.keep["w"], expit(np.log(keep / (1 - keep)) - rate * slope), rtol=1e-10)


def test_the_decrement_has_the_learnt_keep_probabilities():
    """Two masks share κ: KL(π' ‖ π) + KL(π ‖ π') of both, by SciPy, is ⟨Δκ, FΔκ⟩ for a small displacement."""
    slab = blr.DiagonalGaussian({"w": jnp.array([[1.0, -0.5], [0.3, 2.0]]), "b": jnp.ones(2)}, 4.0)
    q = eqx.tree_at(lambda q: q.keep["w"], blr.SpikeSlab(slab, 0.7, learnt=True), jnp.asarray(0.4))
    zero = jax.tree.map(jnp.zeros_like, slab.mean)
    slopes, rate = {"w": jnp.asarray(-0.8), "b": jnp.zeros(())}, 1e-4
    step = Step({"slab": zero, "keep": slopes}, slab.precision, rate, rate, 1.0)
    assert slab.decrement(q._slab_step(step)) == 0
    moved = q.moved(step)
    p, new = float(q.keep["w"]), float(moved.keep["w"])
    both = [stats.entropy([a, 1 - a], [b, 1 - b]) for a, b in ((p, new), (new, p))]
    expected = 2 * 0.5 * sum(both)
    np.testing.assert_allclose(rate**2 * q.decrement(step), expected, rtol=1e-3)
    np.testing.assert_allclose(q.distance(moved), expected, rtol=1e-3)
    by_hand = 0.5 * 2 * p * (1 - p) * (-0.8 + np.log(p / (1 - p)) - np.log(0.7 / 0.3)) ** 2
    np.testing.assert_allclose(q.decrement(step), by_hand, rtol=1e-12)


WEIGHTS = np.array([1.0, -0.6, 0.5])
LEAST_SQUARES = blr.Objective(lambda p, e: 0.5 * (jnp.sum(e @ p["w"]) - 1.0) ** 2, size=12)


def relaxed_slope(keep, relaxation, count=400_000, width=1e-3):
    """∇_μ E ℓ over the Concrete distribution: E z and E z² of a unit by the midpoint rule, E ℓ from those."""
    scaled = np.asarray(X) * WEIGHTS
    square, cross = np.sum(scaled**2), np.sum(scaled.sum(axis=1) ** 2)
    uniform = (np.arange(count) + 0.5) / count
    noise = np.log(uniform) - np.log1p(-uniform)

    def value(logit):
        z = expit((logit + noise) / relaxation)
        return 0.5 * (square * np.mean(z**2) + (cross - square) * z.mean() ** 2) - scaled.sum() * z.mean()

    logit = np.log(keep / (1 - keep))
    return (value(logit + width) - value(logit - width)) / (2 * width) / (keep * (1 - keep)) / 3


@pytest.mark.parametrize("relaxation", [0.2, 0.5])
def test_gradient_in_keep_is_that_of_the_relaxation(relaxation):
    """The estimate's mean within four standard errors of quadrature over the Concrete distribution."""
    rule = blr.dropout(0.1, 0.6, keep_rate=0.1, samples=5000, relaxation=relaxation)
    q = rule.init({"w": jnp.asarray(WEIGHTS)[:, None]}, LEAST_SQUARES).q
    slope = jax.jit(lambda key: measure(rule, LEAST_SQUARES, q, X, None, key).gradient["keep"]["w"])
    actual = np.array([slope(key) for key in jax.random.split(jax.random.key(0), 40)])
    assert abs(actual.mean() - relaxed_slope(0.6, relaxation)) < 4 * actual.std(ddof=1) / np.sqrt(40)


def test_the_relaxation_s_bias_vanishes_with_it():
    """Towards the derivative of the enumerated expectation, in proportion to the relaxation."""

    def expected(keep):
        rows = jnp.array(list(itertools.product([0.0, 1.0], repeat=3)))
        chance = jnp.prod(jnp.where(rows == 1, keep, 1 - keep), axis=1)
        weights = jax.vmap(lambda z: LEAST_SQUARES.data({"w": (z * WEIGHTS)[:, None]}, X)[0])(rows)
        return jnp.sum(chance * weights)

    truth = float(jax.jit(jax.grad(expected))(0.6)) / 3
    biases = [relaxed_slope(0.6, relaxation) - truth for relaxation in (0.04, 0.02)]
    assert biases[0] / biases[1] == pytest.approx(2.0, rel=0.1)
    assert abs(biases[1]) < 0.01 * abs(truth)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"use Masks\(\)"):
        blr.dropout(0.1).replace(points=blr.Delta())
    with pytest.raises(ValueError, match="keep probability"):
        blr.dropout(0.1, 1.5).init(PARAMS, OBJECTIVE)
    with pytest.raises(ValueError, match="one for each layer"):
        blr.dropout(0.1, {"first": 0.5}).init(PARAMS, OBJECTIVE)
    learnt = blr.dropout(0.1, keep_rate=0.1).replace(points=blr.Masks())
    state = learnt.init(PARAMS, OBJECTIVE)
    with pytest.raises(ValueError, match=r"relaxation=0\.1"):
        jax.eval_shape(lambda: learnt.step(OBJECTIVE, state, DATA, jax.random.key(0)))


def test_the_trajectory_is_optax_s_sgd_on_the_masked_loss():
    """optax's SGD on the autodiff gradient of the mean loss at z∘θ, over π₁ in each layer, for the masks drawn."""
    rule = blr.dropout(0.1, KEEP)
    plain = blr.Objective(loss, size=24)
    state, params = rule.init(PARAMS, plain), PARAMS
    sgd = optax.sgd(0.1)
    memory = sgd.init(params)

    @jax.jit
    def both(state, params, memory, key):
        z = rule.points.at(state.q, jax.random.clone(key)).factors[0]  # z/π₁
        masks = jax.tree.map(lambda f, k: f[0] * k, z, state.q.keep)
        dropped = lambda p: jnp.mean(jax.vmap(lambda e: loss(jax.tree.map(jnp.multiply, masks, p), e))(DATA))
        slope = jax.tree.map(jnp.divide, jax.grad(dropped)(params), state.q.keep)
        updates, memory = sgd.update(slope, memory)
        return rule.step(plain, state, DATA, key)[0], optax.apply_updates(params, updates), memory

    for i in range(30):
        state, params, memory = both(state, params, memory, jax.random.key(i))
    for mine, theirs in zip(jax.tree.leaves(state.q.slab.mean), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)
