"""Adam's steps at draws of q: AdamW's path, a posterior counted from its second moment, and how wide it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bayesrule as blr
from bayesrule.interop import optax as bridge

ROWS, BATCH, STEPS, DECAY = 103, 10, 60, 0.01  # The last batch of an epoch has three rows.
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 3))
Y = (X @ [1.0, -1.0, 0.5] + random.normal(size=ROWS) > 0).astype(float)
START = {"b": jnp.zeros(()), "w": jnp.array([0.3, -0.2, 0.1])}
SCHEDULE = optax.cosine_decay_schedule(1e-2, STEPS)


def loss(params, example):
    x, y = example
    return jax.nn.softplus((1 - 2 * y) * (x @ params["w"] + params["b"]))


def mean_loss(params, x, y):
    return jnp.mean(jax.vmap(loss, (None, 0))(params, (x, y)))


gradient_of = jax.jit(jax.grad(mean_loss))
OBJECTIVE = blr.Objective(loss, size=ROWS)
RULE = blr.vadam(SCHEDULE, weight_decay=DECAY, temperature=0.1)


def batch(step):
    rows = slice(step * BATCH % 100, step * BATCH % 100 + (3 if step % 11 == 10 else BATCH))
    return X[rows], Y[rows]


def states(rule, count=12, start=START, objective=OBJECTIVE):
    """The states of a loop of one's own, and the θ of each step."""
    state, step = rule.init(start, objective), jax.jit(rule.step)
    for i in range(count):
        key = jax.random.key(i)
        theta = rule.draw(state, key if rule.points.random else None)[0]
        state, _ = step(objective, state, batch(i), jax.random.clone(key))
        yield state, theta


def by_optax(thetas):
    """The weights and Adam's debiased second moment after gradients at these θ."""
    tx = optax.adamw(SCHEDULE, weight_decay=DECAY)
    params, opt_state = START, tx.init(START)
    for i, theta in enumerate(thetas):
        update, opt_state = tx.update(gradient_of(theta, *batch(i)), opt_state, params)
        params = optax.apply_updates(params, update)
    correction = 1 - 0.999 ** len(thetas)
    return params, jax.tree.map(lambda v: v / correction, opt_state[0].nu)


def inverse_batch(count):
    """The average of 1/M with the weights of Adam's second moment."""
    average = 0.0
    for i in range(count):
        average = 0.999 * average + 0.001 / len(batch(i)[1])
    return average


def assert_near(tree, other, tolerance=1e-12):
    for leaf, same in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(same), rtol=tolerance, atol=1e-14)


def test_it_is_optax_s_adamw_on_gradients_at_draws_and_counts_its_second_moment():
    """m as AdamW takes it from the same gradients, S = (NM v̂ + δ)/τ with δ of the first weights."""
    *_, (state, _) = states(RULE)
    params, moment = by_optax([theta for _, theta in states(RULE)])
    assert_near(state.q.mean, params)
    prior = {"b": 1.0, "w": 3 / np.sum(np.square([0.3, -0.2, 0.1]))}
    weight = 1 - 0.999**12
    expected = jax.tree.map(lambda v, p: (ROWS * weight * v / inverse_batch(12) + p) / 0.1, moment, prior)
    assert_near(state.q.precision, expected, 1e-10)


def test_at_the_mean_it_is_adamw():
    at_mean = RULE.replace(points=blr.Delta())
    *_, (state, _) = states(at_mean)
    *_, (other, _) = states(blr.adamw(SCHEDULE, weight_decay=DECAY))
    assert_near(state.q.mean, other.q.mean)


def test_the_first_gradient_is_at_the_mean_and_later_ones_at_draws_of_q():
    (first, theta), (_, second), *_ = states(RULE)
    assert_near(theta, START)
    keys = jax.random.split(jax.random.key(3), 4000)
    draws = jax.vmap(lambda key: RULE.draw(first, key)[0]["w"])(keys)
    deviation = (np.asarray(draws) - np.asarray(first.q.mean["w"])) * np.sqrt(np.asarray(first.q.precision["w"]))
    assert np.all(np.abs(deviation.mean(0)) < 4 / np.sqrt(4000))
    assert np.all(np.abs(np.square(deviation).mean(0) - 1) < 4 * np.sqrt(2 / 4000))
    assert float(jnp.max(jnp.abs(second["w"] - first.q.mean["w"]))) > 0


def test_its_precision_is_that_of_the_data():
    """At a least-squares solution, where gradients are noise alone, NM v̂ is Σᵢ gᵢ² on average."""
    x = jax.random.normal(jax.random.key(0), (400, 3)) * jnp.array([1.0, 2.0, 0.5])
    y = x @ jnp.ones(3) + jax.random.normal(jax.random.key(1), (400,))
    solution = jnp.linalg.lstsq(x, y)[0]
    objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=400)
    rule = blr.vadam(0.0, temperature=1.0).replace(points=blr.Delta())
    q = blr.fit(rule, objective, solution, (x, y), steps=4000, batch_size=20, key=jax.random.key(2)).q
    squares = jnp.sum(((y - x @ solution)[:, None] * x) ** 2, axis=0)
    # Batches are drawn without replacement, which takes 20/400 of the noise away.
    ratio = (q.precision - q.prior) / (squares * (1 - 20 / 400))
    np.testing.assert_allclose(ratio, 1.0, atol=0.2)  # Four standard errors of an average over 2000 squares.


def test_a_prior_of_the_objective_is_in_the_gradient_the_divisor_and_the_width():
    """The mean is that of `adam` with this prior, on gradients at draws."""
    objective = blr.Objective(loss, size=ROWS, regularizer=5.0)
    rule = blr.vadam(SCHEDULE, weight_decay=0, temperature=0.1)
    *_, (state, _) = states(rule, objective=objective)
    params, average, moment = START, *[jax.tree.map(jnp.zeros_like, START)] * 2
    for i, (_, theta) in enumerate(states(rule, objective=objective)):
        # The prior is in the average of the gradient, and not in that of its squares.
        gradient = gradient_of(theta, *batch(i))
        average = jax.tree.map(lambda u, g, m: 0.9 * u + 0.1 * (g + 5.0 / ROWS * m), average, gradient, params)
        moment = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moment, gradient)
        scales = SCHEDULE(i) / (1 - 0.9 ** (i + 1)), 1 / (1 - 0.999 ** (i + 1))
        step = lambda m, u, v, scales=scales: m - scales[0] * u / (jnp.sqrt(scales[1] * v) + 5.0 / ROWS + 1e-8)
        params = jax.tree.map(step, params, average, moment)
    assert_near(state.q.mean, params)
    expected = jax.tree.map(lambda v: (ROWS * v / inverse_batch(12) + 5.0) / 0.1, moment)
    assert_near(state.q.precision, expected, 1e-10)
    with pytest.raises(ValueError, match=r"vadam\(…, weight_decay=0\)"):
        RULE.init(START, objective)


def test_a_weight_that_no_example_depends_on_stays_where_the_prior_is():
    x = X * [1.0, 1.0, 0.0]
    objective = blr.Objective(loss, size=ROWS, regularizer=1.0)
    options = {"steps": 200, "batch_size": BATCH, "key": jax.random.key(0)}
    q = blr.fit(blr.vadam(1e-2, weight_decay=0), objective, START, (x, Y), **options).q
    assert abs(float(q.mean["w"][2])) < 0.1
    np.testing.assert_allclose(q.precision["w"][2], 1 / 0.03, rtol=1e-6)


def test_a_part_with_a_flat_prior_has_the_width_of_the_first_weights():
    objective = blr.Objective(loss, size=ROWS, regularizer={"w": 0.0, "b": 5.0})
    q = blr.vadam(SCHEDULE, weight_decay=0, temperature=0.1).init(START, objective).q
    assert_near(q.prior["b"], 50.0)
    assert_near(q.prior["w"], jnp.full(3, 3 / np.sum(np.square([0.3, -0.2, 0.1])) / 0.1))


@pytest.mark.parametrize("size", [43, 30, 100])  # With last batches of 43, 1 and 1 examples.
def test_a_small_last_batch_counts_as_one(size):
    """At a least-squares solution, what batches without replacement show of Σᵢ gᵢ², whatever their sizes are."""
    x = jax.random.normal(jax.random.key(0), (301, 2)) * jnp.array([1.0, 2.0])
    y = x @ jnp.ones(2) + jax.random.normal(jax.random.key(1), (301,))
    solution = jnp.linalg.lstsq(x, y)[0]
    objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=301)
    rule = blr.vadam(0.0, temperature=1.0).replace(points=blr.Delta())
    q = blr.fit(rule, objective, solution, (x, y), steps=3000, batch_size=size, key=jax.random.key(2)).q
    squares = jnp.sum(((y - x @ solution)[:, None] * x) ** 2, axis=0)
    sizes = np.array([size] * (301 // size) + [301 % size] * (301 % size > 0))
    expected = np.sum((1 - sizes / 301) / sizes) / np.sum(1 / sizes)
    # Squares of single examples are averaged over some 500 steps, with a standard error of 0.13.
    np.testing.assert_allclose((q.precision - q.prior) / squares, expected, rtol=0.35)


def test_a_rejected_first_step_leaves_no_trace():
    state, bad = RULE.init(START, OBJECTIVE), (np.full((BATCH, 3), np.nan), np.zeros(BATCH))
    after, info = RULE.step(OBJECTIVE, state, bad, jax.random.key(0))
    assert not info.finite
    assert_near(after.q.mean, START)
    assert float(after.q.inverse_batch) == 0.0
    after, _ = RULE.step(OBJECTIVE, after, batch(0), jax.random.key(1))
    assert float(jnp.max(after.q.precision["w"])) < 1e5


def test_a_fit_goes_on_bit_for_bit(tmp_path):
    options = {"batch_size": BATCH, "key": jax.random.key(0)}
    uncut = blr.fit(RULE, OBJECTIVE, START, (X, Y), steps=STEPS, **options)
    blr.fit(RULE, OBJECTIVE, START, (X, Y), steps=25, **options).save(tmp_path / "half.npz")
    resumed = blr.fit(RULE, OBJECTIVE, blr.load(tmp_path / "half.npz"), (X, Y), steps=STEPS - 25, batch_size=BATCH)
    for leaf, same in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(uncut.state), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(same))


def test_the_bridge_takes_the_same_steps():
    tx, params = bridge.transformation(RULE, size=ROWS, batch_size=BATCH), START
    opt_state, state = tx.init(params), RULE.init(START, OBJECTIVE)
    for i in range(3):
        theta = bridge.perturbed(opt_state, params)
        key = jax.random.fold_in(jax.random.key(0), i)
        assert_near(theta, RULE.draw(state, key)[0])
        update, opt_state = tx.update(gradient_of(theta, *batch(i)), opt_state, params)
        params = optax.apply_updates(params, update)
        state, _ = RULE.step(OBJECTIVE, state, batch(i), jax.random.clone(key))
    assert_near(bridge.posterior(opt_state, params).precision, state.q.precision)


def test_a_gradient_from_elsewhere_needs_the_size_of_its_batch():
    with pytest.raises(ValueError, match=r"pass batch_size=M"):
        bridge.transformation(RULE, size=ROWS).init(START)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RULE.init(START), "rule.init\\(params, objective\\)"),
        (lambda: blr.vadam(1e-3, temperature=lambda t: 0.01 * t).init(START, OBJECTIVE), "begin above 0"),
        (lambda: RULE.replace(curvature=blr.GaussNewton()), "use SquaredGradient"),
    ],
    ids=["no objective", "a temperature of 0", "another curvature"],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TestChooseWidth:
    """A mean of Gaussian rows, for which the predictive loss of any width is known."""

    Z = np.asarray(jax.random.normal(jax.random.key(5), (2000,)))
    OBJECTIVE = blr.Objective(lambda m, z: 0.5 * (z - m) ** 2 + 0.5 * jnp.log(2 * jnp.pi), size=10)

    def choose(self, mean, precision, **options):
        q = blr.DiagonalGaussian(jnp.asarray(mean), jnp.asarray(precision))
        return blr.choose_width(q, self.OBJECTIVE, self.Z, key=jax.random.key(0), samples=4000, **options)

    def test_losses_are_those_of_the_predictive_distribution(self):
        chosen = self.choose(0.3, 2.0)
        for width, found in chosen.losses.items():
            variance = 1.0 if width is None else 1 + width[0] / 2.0
            expected = np.mean(0.5 * (self.Z - 0.3) ** 2 / variance) + 0.5 * np.log(2 * np.pi * variance)
            np.testing.assert_allclose(found, expected, atol=0.02)  # 4000 draws

    def test_the_mean_where_draws_never_help(self):
        chosen = self.choose(0.0, 1.0)
        assert chosen.method == "mean"
        assert str(chosen).startswith("predict with the mean")
        assert "draws are worse" in str(chosen)

    def test_draws_where_the_mean_is_off(self):
        chosen = self.choose(1.5, 1.0)
        assert (chosen.method, chosen.temperature_factor) == (
            "samples",
            3.0,
        )  # The best variance is 2.25, of 0.1, …, 10.
        assert_near(chosen.q.precision, 1 / 3)
        assert "3 times the temperature" in str(chosen)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature_factors": [0.0]}, "temperature_factors"),
            ({"prior_factors": []}, "no number to choose from"),
            ({"samples": 0}, "samples"),
        ],
        ids=["no temperature", "no prior", "no draws"],
    )
    def test_bad_input(self, options, message):
        q = blr.DiagonalGaussian(jnp.zeros(()))
        with pytest.raises(ValueError, match=message):
            blr.choose_width(q, self.OBJECTIVE, self.Z, key=jax.random.key(0), **options)

    @pytest.mark.parametrize("q", [blr.FixedGaussian(jnp.zeros(())), blr.Bernoulli(jnp.zeros(())), {"w": 1.0}])
    def test_a_width_that_was_not_learnt(self, q):
        with pytest.raises(ValueError, match="that a fit has learnt"):
            blr.choose_width(q, self.OBJECTIVE, self.Z, key=jax.random.key(0))

    def test_a_row_that_is_missing(self):
        rows = np.where(np.arange(2000) == 7, np.nan, self.Z)
        with pytest.raises(ValueError, match="held-out row 7"):
            blr.choose_width(blr.DiagonalGaussian(jnp.zeros(())), self.OBJECTIVE, rows, key=jax.random.key(0))

    def test_a_row_that_the_mean_calls_impossible(self):
        objective = blr.Objective(lambda m, z: jnp.where(m == 0, jnp.inf, 1.0 + 0 * z), size=10)
        q = blr.DiagonalGaussian(jnp.zeros(()), jnp.ones(()))
        assert blr.choose_width(q, objective, self.Z[:5], key=jax.random.key(0)).method == "samples"

    def test_one_row_says_nothing(self):
        with pytest.raises(ValueError, match="hold out some more"):
            blr.choose_width(blr.DiagonalGaussian(jnp.zeros(())), self.OBJECTIVE, self.Z[:1], key=jax.random.key(0))
