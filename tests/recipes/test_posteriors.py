"""Posteriors for networks on problems whose answer is known: conventions, Vadam, and the order of the bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.points.base import Points, PointSet
from cases import regression


def test_variational_ogn_at_the_mean_is_ogn():
    assert blr.vogn(1e-2).replace(points=blr.Delta()) == blr.ogn(1e-2)
    assert blr.voggn(1e-2, samples=4).replace(points=blr.Delta()) == blr.oggn(1e-2)
    assert blr.vogn(1e-2).replace(curvature=blr.GeneralizedGaussNewton()) == blr.voggn(1e-2)


# Squared gradients, each by its convention.

SIZE = 1000
HALF = jax.random.normal(jax.random.key(0), (SIZE // 2, 3)) * jnp.array([1.0, 2.0, 0.3])
INPUTS = jnp.concatenate([HALF, HALF])  # each input with both residuals: orthogonal, exactly
TARGETS = jnp.repeat(jnp.array([1.0, -1.0]), SIZE // 2)
REGRESSION = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=SIZE)
TRUTH = jnp.sum(INPUTS**2, axis=0)
WEIGHTS = jnp.zeros(3)  # the least-squares solution: the residuals are the targets


def over_batches(curvature, points, size, repeats, q):
    """The curvature measured on each batch of `repeats` random partitions of the data."""

    @jax.jit
    def measure(index, key):
        batch = (INPUTS[index], TARGETS[index])
        return curvature.measure(REGRESSION, q, points, batch, None, key).curvature

    random = np.random.default_rng(0)
    orders = np.stack([random.permutation(SIZE) for _ in range(repeats)]).reshape(-1, size)
    keys = jax.random.split(jax.random.key(1), len(orders))
    return np.asarray(jax.lax.map(lambda pair: measure(*pair), (jnp.asarray(orders), keys)))


@pytest.mark.parametrize("size", [10, 100, 1000])
class TestSquaredGradients:
    def test_gauss_newton_is_the_true_diagonal(self, size):
        q = blr.DiagonalGaussian(WEIGHTS, 1.0)
        actual = over_batches(blr.GaussNewton(), blr.Delta(), size, 1, q)
        np.testing.assert_allclose(actual.mean(axis=0), TRUTH, rtol=1e-12)

    @pytest.mark.extended
    def test_stein_is_within_its_standard_error(self, size):
        q = blr.DiagonalGaussian(WEIGHTS, 50.0)
        actual = over_batches(blr.Stein(), blr.MonteCarlo(8, antithetic=True), size, max(1, 4 * size // 10), q)
        error = actual.std(axis=0) / np.sqrt(len(actual))
        assert np.all(np.abs(actual.mean(axis=0) - TRUTH) < 4 * error)

    def test_rmsprop_s_carries_its_factor(self, size):
        """N E[ĝ²] = N·mean(gᵢ²)·(N − B)/(B(N − 1)) over batches without replacement."""
        q = blr.DiagonalGaussian(WEIGHTS, 1.0)
        actual = over_batches(blr.SquaredGradient(), blr.Delta(), size, 40 if size == 10 else 400, q)
        expected = np.asarray(TRUTH) * (SIZE - size) / (size * (SIZE - 1))
        if size == SIZE:
            np.testing.assert_allclose(actual.mean(axis=0), 0.0, atol=1e-20)
        else:
            error = actual.std(axis=0) / np.sqrt(len(actual))
            assert np.all(np.abs(actual.mean(axis=0) - expected) < 4 * error)


# Vadam.


class Given(Points):
    """m + ε/√s for noise that is given."""

    noise: jax.Array

    def at(self, q, key):
        return PointSet((q.mean + self.noise / jnp.sqrt(q.precision))[None], jnp.ones(1))


@pytest.mark.extended
def test_vadam_comes_out_of_adam():
    """Khan et al. (2018), figure 1, re-derived: θ = m + ε/√(Nv + δ); u ← β₁u + (1−β₁)(ĝ + δm/N);
    v ← β₂v + (1−β₂)ĝ²; m ← m − α û/(√v̂ + δ/N)."""
    size, delta, rate, first, second = 60, 2.5, 0.02, 0.9, 0.99
    x = jax.random.normal(jax.random.key(2), (30, 3))
    y = jnp.sign(x[:, 0] + 0.3)
    loss = lambda w, e: jnp.logaddexp(0.0, -e[1] * (e[0] @ w))
    objective = blr.Objective(loss, size=size, regularizer=delta)
    rule = blr.adam(rate, averaging=first, decay=second, damping="prior", initial_precision=10.0)
    noise = jax.random.normal(jax.random.key(3), (100, 3))
    state = rule.init(jnp.array([0.1, -0.2, 0.3]), objective)
    step = jax.jit(lambda s, e: rule.replace(points=Given(e)).step(objective, s, (x, y))[0])
    slope = jax.jit(jax.grad(lambda w: jnp.mean(jax.vmap(lambda e: loss(w, e))((x, y)))))
    mean, u, v = np.array([0.1, -0.2, 0.3]), np.zeros(3), np.full(3, (10.0 - delta) / size)
    for t, epsilon in enumerate(np.asarray(noise), start=1):
        state = step(state, epsilon)
        g = np.asarray(slope(mean + epsilon / np.sqrt(size * v + delta)))
        u = first * u + (1 - first) * (g + delta / size * mean)
        v = second * v + (1 - second) * g**2
        mean = mean - rate * (u / (1 - first**t)) / (np.sqrt(v / (1 - second**t)) + delta / size)
        np.testing.assert_allclose(state.q.mean, mean, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(state.q.precision, size * v + delta, rtol=1e-11)


def test_vadam_of_infinite_width_is_refused():
    rule = blr.adam(1e-3).replace(points=blr.MonteCarlo(1))
    with pytest.raises(ValueError, match="precision of zero"):
        rule.init(WEIGHTS, REGRESSION)
    with pytest.raises(ValueError, match="precision of zero"):
        blr.adam(1e-3, damping="prior").replace(points=blr.MonteCarlo(1)).init(WEIGHTS, REGRESSION)
    with pytest.raises(ValueError, match="has no prior"):
        blr.adam(1e-3, damping="prior").init(WEIGHTS, REGRESSION)
    rule.init(WEIGHTS, blr.Objective(REGRESSION.loss, size=SIZE, regularizer=1.0))
    blr.adam(1e-3).init(WEIGHTS, REGRESSION)  # at the mean nothing is drawn


def test_a_small_curvature_is_not_lost_behind_a_large_prior():
    """Adam's v in float32 with δ = 1: Nv + δ would round to δ, and the step would be divided by the damping alone."""
    loss = lambda w, e: 1e-6 * jnp.sum(w * e)
    objective = blr.Objective(loss, size=60_000, regularizer=1.0)
    rule = blr.adam(1e-3)
    state = rule.init(jnp.zeros(3, jnp.float32), objective)
    step = jax.jit(lambda state, batch: rule.step(objective, state, batch)[0])
    for _ in range(3):
        state = step(state, jnp.ones((4, 3), jnp.float32))
    np.testing.assert_allclose(state.scale, 1e-12 * (1 - 0.999**3), rtol=1e-4)
    np.testing.assert_allclose(state.q.mean, -3e-3 * 1e-6 / (1e-6 + 1 / 60_000 + 1e-8), rtol=1e-3)


# Bounds and moments on logistic regression.


def breast_cancer():
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0))[:, :10]
    return jnp.asarray(np.column_stack([np.ones(len(y)), x])), jnp.asarray(2.0 * y - 1)


@pytest.mark.extended
def test_bounds_rise_with_the_family():
    """Diagonal ≤ low rank, rising with the rank ≤ full; at full rank slang meets the full Gaussian."""
    x, y = breast_cancer()
    objective = blr.Objective(
        lambda f, y: jnp.logaddexp(0.0, -y * f), output=lambda w, x: x @ w, size=len(y), regularizer=1.0, linear=True
    )
    pieces = {"points": blr.Quadrature(12), "curvature": blr.GeneralizedGaussNewton()}
    start = jnp.zeros(11)

    def bound(rule, steps):
        return blr.fit(rule, objective, start, (x, y), steps=steps).trace["bound"][-1]

    low = {}
    for rank in (1, 3, 11):
        rule = blr.slang(0.2, rank=rank, averaging=0, decay=0.8, curvature=0.1).replace(**pieces)
        low[rank] = bound(rule, 150)
    diagonal = bound(blr.vogn(0.05, averaging=0, decay=0.95, curvature=0.1, relative=False).replace(**pieces), 400)
    full = bound(blr.newton(0.5).replace(**pieces), 60)
    assert diagonal <= low[1] <= low[3] <= low[11] + 1e-6
    assert low[11] == pytest.approx(full, abs=1e-4)
    assert full - diagonal > 1.0, "the order is not a tie"


# OGN and VOGN, by their published equations.


@pytest.mark.parametrize("variational", [False, True], ids=["ogn", "vogn"])
def test_ogn_and_vogn_are_their_equations(variational):
    """θ = m + ε/√S; u ← β₁u + (1−β₁)ĝ(θ); v ← β₂v + (1−β₂)·mean ĝᵢ(θ)²; m ← m − α(û + δm/N)/(v + δ/N), S = Nv + δ
    (Khan et al., 2018; Osawa et al., 2019), in NumPy with every example's gradient written out."""
    size, delta, rate, first, second, start = 60, 2.5, 0.05, 0.9, 0.95, 0.4
    x = np.asarray(jax.random.normal(jax.random.key(2), (30, 3)))
    y = np.sign(x[:, 0] + 0.3)
    objective = blr.Objective(lambda w, e: jnp.logaddexp(0.0, -e[1] * (e[0] @ w)), size=size, regularizer=delta)
    recipe = blr.vogn if variational else blr.ogn
    rule = recipe(rate, averaging=first, decay=second, curvature=start, relative=False)
    noise = np.asarray(jax.random.normal(jax.random.key(3), (80, 3))) * variational
    mean, u, v = np.array([0.1, -0.2, 0.3]), np.zeros(3), np.full(3, start)
    state = rule.init(jnp.asarray(mean), objective)
    step = jax.jit(lambda s, e: (rule.replace(points=Given(e)) if variational else rule).step(objective, s, (x, y))[0])
    for t, epsilon in enumerate(noise, start=1):
        state = step(state, epsilon)
        theta = mean + epsilon / np.sqrt(size * v + delta)
        gradients = (-y / (1 + np.exp(y * (x @ theta))))[:, None] * x
        u = first * u + (1 - first) * gradients.mean(axis=0)
        v = second * v + (1 - second) * np.mean(gradients**2, axis=0)
        mean = mean - rate * (u / (1 - first**t) + delta / size * mean) / (v + delta / size)
        np.testing.assert_allclose(state.q.mean, mean, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(state.q.precision, size * v + delta, rtol=1e-11)


@pytest.mark.extended
def test_a_bad_step_of_a_schedule_leaves_the_precision():
    """Cut short by a loss that is not finite, under a temperature schedule: q is the last good one, untouched."""
    cooling = lambda t: jnp.where(t < 2, 1.0, 0.1)
    objective = blr.Objective(lambda w, x: jnp.sum((w - x) ** 2), size=4, regularizer=1.0)
    rule = blr.ogn(0.1, temperature=cooling)
    good = blr.fit(rule, objective, jnp.zeros(3), jnp.ones((4, 3)), steps=2)
    bad = blr.fit(rule, objective, good, jnp.full((4, 3), jnp.inf), steps=2)
    assert bad.reason == "not finite"
    np.testing.assert_array_equal(bad.q.precision, good.q.precision)
    assert bad.steps == 2


def test_a_curvature_for_each_entry():
    entries = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    objective = blr.Objective(lambda w, x: jnp.sum(w["a"]) * w["b"] * x, size=4, regularizer=1.0)
    start = jax.tree.map(jnp.ones_like, entries)
    q = blr.vogn(0.1, curvature=entries, relative=False).init(start, objective).q
    np.testing.assert_allclose(q.precision["a"], [5.0, 9.0])
    np.testing.assert_allclose(blr.slang(0.1, curvature=entries).init(start, objective).q.diagonal, [5.0, 9.0, 13.0])
    with pytest.raises(ValueError, match="relative=False"):
        blr.vogn(0.1, curvature=entries)


def test_a_decay_may_be_a_schedule():
    """A step forgets 1 − β of the precision, with β at its own count."""
    problem = regression()

    def stepped(decay, state):
        rule = blr.ogn(0.1, curvature=1.0, decay=decay)
        return jax.jit(lambda state: rule.step(problem.objective, state, problem.data)[0])(state)

    start = blr.ogn(0.1, curvature=1.0).init(problem.start, problem.objective)
    expected = stepped(0.5, stepped(0.9, start))
    schedule = lambda count: jnp.where(count == 0, 0.9, 0.5)
    actual = stepped(schedule, stepped(schedule, start))
    np.testing.assert_allclose(actual.q.precision, expected.q.precision, rtol=1e-12)
    np.testing.assert_allclose(actual.q.mean, expected.q.mean, rtol=1e-12)
