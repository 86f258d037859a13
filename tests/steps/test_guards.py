"""Guards keep λ in Ω, say when they had to, and do it inside jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.steps.step import Step

STEPPED = {
    "Gaussian": lambda m, s: blr.Gaussian(m, s),
    "DiagonalGaussian": lambda m, s: blr.DiagonalGaussian(m, jnp.diag(s)),
}
POSITIVE = jnp.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 0.7]])
assess = lambda q: (jnp.zeros(()), None)


def random_step(key, rate, temperature=1.0):
    first, second = jax.random.split(key)
    curvature = 10 * jax.random.normal(first, (3, 3))
    return Step(jax.random.normal(second, (3,)), 0.5 * (curvature + curvature.T), rate, rate, temperature)


@pytest.mark.extended
def test_retraction_by_its_formula():
    """S + ρ(H − τS) + ½ρ²(H − τS)S⁻¹(H − τS), then m − ρS'⁻¹g; its diagonal for a diagonal S."""
    q, rate, temperature = blr.Gaussian(jnp.arange(3.0), POSITIVE), 0.4, 0.8
    step = random_step(jax.random.key(0), rate, temperature)
    guarded = blr.Retraction().take(q, step, assess, 0.0)
    change = step.curvature - temperature * POSITIVE
    expected = POSITIVE + rate * change + 0.5 * rate**2 * change @ jnp.linalg.inv(POSITIVE) @ change
    np.testing.assert_allclose(guarded.q.precision, expected, rtol=1e-12)
    mean = q.mean - rate * jnp.linalg.solve(expected, step.gradient)
    np.testing.assert_allclose(guarded.q.mean, mean, rtol=1e-12)
    s, h = jnp.array([1.0, 2.0, 0.5]), jnp.array([-3.0, 0.1, 4.0])
    diagonal = blr.DiagonalGaussian(jnp.zeros(3), s)
    guarded = blr.Retraction().take(diagonal, Step(jnp.ones(3), h, rate, rate, temperature), assess, 0.0)
    change = h - temperature * s
    np.testing.assert_allclose(guarded.q.precision, s + rate * change + 0.5 * rate**2 * change**2 / s, rtol=1e-14)


@pytest.mark.extended
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("family", STEPPED)
def test_retraction_is_always_positive_definite(family, momentum):
    """For any symmetric H, any rate, and with momentum too; `acted` says where the plain step was not."""
    q = STEPPED[family](jnp.zeros(3), POSITIVE)
    before = None if momentum is None else STEPPED[family](jnp.ones(3), 20 * POSITIVE)

    def one(key, rate):
        step = random_step(key, rate)
        curvature = step.curvature if family == "Gaussian" else jnp.diag(step.curvature)
        step = Step(step.gradient, curvature, rate, rate, 1.0, momentum, before)
        guarded, plain = blr.Retraction().take(q, step, assess, 0.0), q.moved(step)
        least = jnp.min(jnp.linalg.eigvalsh(guarded.q.precision) if family == "Gaussian" else guarded.q.precision)
        return least, guarded.inside, guarded.acted, plain.inside()

    keys = jax.random.split(jax.random.key(1), 300)
    least, inside, acted, plain = jax.jit(jax.vmap(one))(keys, jnp.geomspace(1e-3, 1.0, 300))
    assert np.all(least > 0)
    assert np.all(inside)
    np.testing.assert_array_equal(acted, ~plain)
    assert np.any(acted)
    assert momentum is not None or not np.all(acted)


@pytest.mark.extended
def test_backtracking_halves_until_inside():
    """The fraction is the first power of one half whose step is inside, and q is that step."""
    q = blr.Gaussian(jnp.zeros(3), POSITIVE)

    def one(key):
        step = random_step(key, 1.0)
        guarded = blr.Backtracking().take(q, step, assess, 0.0)
        halves = 0.5 ** jnp.arange(41.0)
        inside = jax.vmap(lambda f: q.moved(step.shortened(f)).inside())(halves)
        return guarded, halves[jnp.argmax(inside)], q.moved(step.shortened(guarded.fraction)), q.moved(step).inside()

    guarded, first, there, plain = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 100))
    np.testing.assert_array_equal(guarded.fraction, first)
    np.testing.assert_allclose(guarded.q.precision, there.precision, rtol=1e-12)
    np.testing.assert_allclose(guarded.q.mean, there.mean, rtol=1e-10, atol=1e-10)
    assert np.all(np.linalg.eigvalsh(guarded.q.precision) > 0)
    assert np.all(guarded.inside)
    np.testing.assert_array_equal(guarded.acted, ~plain)
    assert np.any(guarded.fraction < 1)
    assert np.any(guarded.fraction == 1)


def test_backtracking_shortens_momentum_too():
    """λ + f·(whole displacement): a short enough step is inside, however large the momentum's part."""
    q, before = blr.DiagonalGaussian(jnp.zeros(2), 1.0), blr.DiagonalGaussian(jnp.zeros(2), 50.0)
    step = Step(jnp.zeros(2), jnp.ones(2), 0.1, 0.1, 1.0, 0.9, before)
    guarded = blr.Backtracking().take(q, step, assess, 0.0)
    assert guarded.acted
    assert guarded.inside
    displacement = jax.tree.map(jnp.subtract, q.moved(step).natural()[1], q.natural()[1])
    np.testing.assert_allclose(guarded.q.natural()[1], q.natural()[1] + guarded.fraction * displacement, rtol=1e-12)


def test_backtracking_gives_up_where_it_stands():
    """No acceptable fraction: q stays, the fraction is 0 and `inside` is False."""
    q = blr.DiagonalGaussian(jnp.zeros(1), 1.0)
    step = Step(jnp.ones(1), jnp.ones(1), 1.0, 1.0, 1.0)
    guarded = blr.Backtracking(3, monotone=True).take(q, step, lambda q: (1.0, None), 0.0)
    assert (float(guarded.fraction), bool(guarded.inside), bool(guarded.acted)) == (0.0, False, False)
    np.testing.assert_array_equal(guarded.q.mean, q.mean)
    with pytest.raises(ValueError, match="at least one halving"):
        blr.Backtracking(0)


def test_backtracking_prints_what_differs_from_its_defaults():
    names = {
        blr.Backtracking(): ("Backtracking()", "ρ is halved until λ ∈ Ω"),
        blr.Backtracking(3, monotone=True): (
            "Backtracking(3, monotone=True)",
            "ρ is halved, at most 3 times, until λ ∈ Ω and the loss does not worsen",
        ),
        blr.Backtracking(length=0.5): ("Backtracking(length=0.5)", "ρ is halved until λ ∈ Ω and ½⟨Δ, FΔ⟩ ≤ 0.5 nats"),
    }
    for guard, (text, meaning) in names.items():
        assert repr(guard) == text
        assert guard.meaning == meaning
        assert eval(text, {"Backtracking": blr.Backtracking}) == guard
    assert "Backtracking(monotone=True, length=20)" in str(blr.cvi(0.5))
    assert "on mini-batches or random points until ½⟨Δ, FΔ⟩ ≤ 20 nats" in str(blr.cvi(0.5))


def wild(x):
    return jnp.sum(jnp.cos(3 * x)) + 0.1 * jnp.sum(x**4) + x[0] * x[1]


@pytest.mark.extended
@pytest.mark.parametrize("points", [blr.Delta(), blr.Quadrature(5)], ids=repr)
def test_monotone_never_worsens_the_loss(points):
    """ℓ̄(m) under the delta method, else E_q ℓ̄ − H(q) (up to the curvature's slack), from any start."""
    rule = blr.newton().replace(points=points)
    slack = 0.0 if isinstance(points, blr.Delta) else rule.curvature.slack

    @jax.jit
    @jax.vmap
    def run(start):
        def body(state, _):
            new, info = rule.step(wild, state)
            point_set = points.at(state.q, None)
            loss = point_set.weights @ jax.vmap(wild)(point_set.theta)
            return new, (loss - (0.0 if slack == 0 else state.q.entropy()), new.q.inside(), info.guard, info.fraction)

        return jax.lax.scan(body, rule.init(start), None, length=40)[1]

    losses, inside, guard, fraction = run(3 * jax.random.normal(jax.random.key(3), (16, 2)))
    assert np.all(np.diff(losses, axis=1) <= slack + 1e-12)
    assert np.all(inside)
    assert np.any(guard)
    assert np.any((fraction < 1) & ~guard)  # shortened for the loss's sake, though inside Ω


@pytest.mark.extended
def test_no_guard_leaves_the_domain_and_says_so():
    """The plain Newton step from a hilltop has S < 0: fit ends there with the last good state."""
    hill = lambda x: jnp.sum(jnp.cos(x))
    start = blr.Gaussian(jnp.array([2.9]), jnp.eye(1))
    rule = blr.newton().replace(guard=blr.NoGuard())
    result = blr.fit(rule, hill, start, steps=5)
    assert result.reason == "steps"  # −cos(2.9) > 0: convex here, so no harm done
    start = blr.Gaussian(jnp.array([0.3]), jnp.eye(1))
    state, info = jax.jit(rule.step, static_argnums=0)(hill, rule.init(start))
    assert info.guard
    assert not info.inside
    result = blr.fit(rule, hill, start, steps=5)
    assert result.reason == "left the domain"
    assert result.steps == 0
    np.testing.assert_array_equal(result.q.mean, start.mean)
    np.testing.assert_array_equal(result.q.precision, start.precision)
    assert len(result.trace["guard"]) == 1
    assert result.trace["guard"][0]
    for guard in (blr.Backtracking(), blr.Retraction()):
        state, info = rule.replace(guard=guard).step(hill, rule.init(start))
        assert info.guard
        assert info.inside
        assert state.q.inside()


def test_a_stalled_fit_says_so():
    """A loss that no step can lower (its gradient lies): the reason is "stalled", and q is the start."""

    @jax.custom_jvp
    def liar(x):
        return jnp.sum(x**2)

    liar.defjvp(lambda primals, tangents: (liar(primals[0]), -jnp.sum(2 * primals[0] * tangents[0])))
    rule = blr.gradient_descent(0.1).replace(guard=blr.Backtracking(5, monotone=True))
    result = blr.fit(rule, liar, jnp.ones(2), steps=5)
    assert result.reason == "stalled"
    np.testing.assert_array_equal(result.q.mean, jnp.ones(2))


@pytest.mark.extended
def test_steps_do_not_bounce_between_two_sides_of_the_minimum():
    """Three weights with correlations of ½ under a mean-field q: a whole step leads to the mirrored mean, at the same
    loss. A step has to reach a part of its first-order gain, so that it is halved, and 30 steps are enough."""
    gram = 0.5 * np.eye(3) + 0.5
    data = {"x": jnp.asarray(np.linalg.cholesky(gram).T), "y": jnp.zeros(3)}
    model = blr.Model({"w": blr.DiagonalGaussian(jnp.zeros(3))}, {"y": blr.factors.linear("y", {"w": "x"})}, size=3)
    start = {"w": blr.DiagonalGaussian(jnp.full(3, 0.5), jnp.ones(3))}
    mirrored = blr.cvi(1.0).replace(guard=blr.NoGuard())
    after, _ = mirrored.step(model, mirrored.init(start, model), data)
    np.testing.assert_allclose(after.q["w"].mean, -0.5, rtol=1e-10)
    result = blr.fit(blr.cvi(1.0), model, start, data, steps=30, tolerance=1e-8)
    assert result.reason == "converged"
    np.testing.assert_allclose(result.q["w"].mean, 0.0, atol=1e-3)
    np.testing.assert_allclose(result.q["w"].precision, np.diag(gram), rtol=1e-6)
