"""Anderson acceleration: the same fixed points in far fewer steps, and never a worse loss.

On a quadratic it is compared with GMRES; tests/reference/test_mean_field.py has optima by SciPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import gmres

import bayesrule as blr
from bayesrule.objectives.objective import as_objective
from bayesrule.rule.update import form_step, measure
from bayesrule.steps.acceleration import History
from bayesrule.steps.step import Step

HESSIAN = 0.3 * jnp.eye(5) + jnp.ones((5, 5)) + jnp.diag(jnp.arange(5.0))
CENTRE = jnp.array([1.0, -2.0, 0.5, 3.0, 0.0])


def quadratic(x):
    return 0.5 * (x - CENTRE) @ HESSIAN @ (x - CENTRE)


def quartic(x):
    return quadratic(x) + jnp.sum(x**4) / 10


def rule(window=10, rate=1.0, **pieces):
    steps = blr.Steps(rate, acceleration=None if window is None else blr.Anderson(window))
    start = {"family": blr.DiagonalGaussian, "curvature": blr.HessianDiagonal(), "steps": steps}
    return blr.newton().replace(**start | pieces)


START = blr.DiagonalGaussian(jnp.zeros(5), jnp.diag(HESSIAN))


def test_on_a_quadratic_it_is_gmres():
    """The residual after k steps is GMRES's, preconditioned by the diagonal, and zero after as many as θ has entries.

    In the norm of the Fisher information s, hence of D^(-1/2) H D^(-1/2).
    """
    scale = np.sqrt(np.diag(HESSIAN))
    matrix, right = np.asarray(HESSIAN) / scale / scale[:, None], np.asarray(HESSIAN @ CENTRE) / scale
    state = (accelerated := rule(rate=0.2)).init(START)
    step = jax.jit(lambda state: accelerated.step(quadratic, state)[0])
    places = []
    for _ in range(7):
        state = step(state)
        places.append(np.asarray(state.q.mean))
    for k in range(1, 5):
        theirs = gmres(matrix, right, restart=k, maxiter=1, rtol=0, atol=1e-12)[0]
        # The step after k differences takes GMRES's point and then a plain step of rate 0.2 from there.
        ours = theirs + 0.2 * (right - matrix @ theirs)
        np.testing.assert_allclose(places[k] * scale, ours, atol=1e-6)  # by the normal equations
    np.testing.assert_allclose(places[6], CENTRE, atol=1e-6)


@pytest.mark.extended
def test_the_fixed_point_is_that_of_the_plain_rule():
    fast = blr.fit(rule(points=blr.Quadrature(5)), quartic, START, steps=200, tolerance=1e-12)
    slow = blr.fit(rule(None, points=blr.Quadrature(5)), quartic, START, steps=5000)  # no tolerance, no acceleration
    assert fast.reason == "converged"
    assert fast.steps * 5 < np.argmax(slow.trace["decrement"] < 1e-12)
    np.testing.assert_allclose(fast.q.mean, slow.q.mean, atol=1e-5)
    np.testing.assert_allclose(fast.q.precision, slow.q.precision, rtol=1e-5)
    assert np.all(np.diff(fast.trace["bound"]) > -1e-10)


@pytest.mark.extended
def test_a_bad_proposal_gives_way_to_the_plain_step():
    """From a history that points uphill: the step is the plain one, and the history is that one step."""
    accelerated, plain = rule(), rule(None)
    state = accelerated.init(START)
    # Two places at which the velocity differs by almost nothing, so that the extrapolation goes far.
    places = jax.tree.map(lambda x: x.at[0].set(100.0), state.history.places)
    velocity = START.chart_velocity(_step(accelerated, state))
    velocities = jax.tree.map(lambda x, v: x.at[0].set(v + 1e-3), state.history.velocities, velocity)
    history = History(places, velocities, jnp.asarray(1), jnp.asarray(0.25))
    after, info = accelerated.step(quadratic, blr.State(START, state.count, history=history))
    expected, _ = plain.step(quadratic, plain.init(START))
    np.testing.assert_allclose(after.q.mean, expected.q.mean, rtol=1e-12)
    np.testing.assert_allclose(after.q.precision, expected.q.precision, rtol=1e-12)
    assert after.history.filled == 1
    assert after.history.damping == info.fraction == 1
    np.testing.assert_allclose(after.history.places[0][0], START.mean)


def _step(rule, state):
    objective = as_objective(quadratic)
    return form_step(rule, objective, state, measure(rule, objective, state.q, None, None, None))[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    "q",
    [
        START,
        blr.Gamma(jnp.array([2.0, 3.0]), jnp.array([1.0, 0.5])),
        blr.Product({"w": blr.DiagonalGaussian(CENTRE, 2.0), "n": blr.Gamma(2.0, 1.0)}),
    ],
    ids=lambda q: type(q).__name__,
)
def test_the_chart_has_the_fisher_metric(q):
    """½⟨d, metric d⟩ is the KL divergence to second order, and the velocity is minus the natural gradient."""
    place = q.chart()
    small = jax.tree.map(lambda x: 1e-4 * jnp.cos(jnp.arange(x.size) + 1.0).reshape(x.shape), place)
    other = q.at_chart(jax.tree.map(jnp.add, place, small))
    lowered = q.chart_metric(small)
    length = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(lowered), strict=True))
    np.testing.assert_allclose(jnp.sum(q.kl(other)), 0.5 * length, rtol=2e-3)
    pull = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size) + 2.0).reshape(x.shape), q.natural())
    gradient, curvature = q.derivatives(pull)
    step = Step(gradient, curvature, jnp.ones(()), jnp.ones(()), jnp.ones(()))
    displaced = jax.jvp(lambda n: q.with_natural(n).chart(), (q.natural(),), (q.direction(step),))[1]
    for ours, theirs in zip(jax.tree.leaves(q.chart_velocity(step)), jax.tree.leaves(displaced), strict=True):
        np.testing.assert_allclose(ours, -theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
def test_blocks_of_a_model():
    """`cvi` moves all blocks at once; here a weight and an intercept that the data hardly tell apart."""
    x = jnp.linspace(3.0, 4.0, 30)
    data = {"x": jnp.stack([jnp.ones(30), x], 1), "y": (x + jnp.sin(7 * x) > 3.4).astype(float)}
    prior = blr.DiagonalGaussian(jnp.zeros(2), 0.1 * jnp.ones(2))
    likelihood = blr.factors.bernoulli_logit("y", {"w": "x"}, points=blr.Quadrature(20))
    model = blr.Model({"w": prior}, {"prior": blr.factors.prior("w", prior), "y": likelihood})
    plain = blr.cvi(1.0).replace(guard=blr.Backtracking(monotone=True))
    fast = plain.replace(steps=blr.Steps(1.0, acceleration=blr.Anderson()))
    ours = blr.fit(fast, model, None, data, steps=100, tolerance=1e-10)
    theirs = blr.fit(plain, model, None, data, steps=5000, tolerance=1e-12)
    assert ours.reason == "converged"
    assert ours.steps < 40 < theirs.steps
    np.testing.assert_allclose(ours.bound, theirs.bound, atol=1e-7)


@pytest.mark.extended
def test_a_saved_fit_goes_on_as_if_uninterrupted(tmp_path):
    whole = blr.fit(rule(3), quartic, START, steps=9)
    half = blr.fit(rule(3), quartic, START, steps=5)
    half.save(tmp_path / "half.npz")
    resumed = blr.fit(rule(3), quartic, blr.load(tmp_path / "half.npz"), steps=4)
    np.testing.assert_array_equal(resumed.q.mean, whole.q.mean)
    np.testing.assert_array_equal(resumed.state.history.places[0], whole.state.history.places[0])


def test_it_says_what_it_does():
    assert "Anderson acceleration over 4 steps" in str(rule(4))
    assert rule(4) != rule(5)
    assert blr.difference(rule(4), rule(5)).pieces == ("steps",)


REFUSED = {
    "a guard that compares losses": lambda: rule(guard=blr.Backtracking()),
    "drawn anew": lambda: rule(points=blr.MonteCarlo(2)),
    "without momentum": lambda: blr.Steps(1.0, momentum=0.5, acceleration=blr.Anderson()),
    "positive number": lambda: blr.Anderson(0),
    "made by a rule without acceleration": lambda: rule().step(quadratic, rule(None).init(START)),
    "λ is to stay their sum": lambda: blr.cvi(1.0, sites=True).replace(
        guard=blr.Backtracking(monotone=True), steps=blr.Steps(1.0, acceleration=blr.Anderson())
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_it_refuses(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_it_refuses_batches():
    objective = blr.Objective(lambda w, x: jnp.sum((w - x) ** 2), size=4)
    with pytest.raises(ValueError, match="batch_size"):
        blr.fit(rule(), objective, START, jnp.zeros((4, 5)), steps=2, batch_size=2, key=jax.random.key(0))


@pytest.mark.extended
def test_a_proposal_is_as_long_as_the_guard_left_the_last_plain_step():
    """Steps in one direction leave nothing to extrapolate: the proposal is x + βρv, with β from the guard."""
    gradient, curvature = jnp.arange(1.0, 6.0), jnp.diag(HESSIAN)
    step = Step(gradient, curvature, jnp.array(0.8), jnp.array(0.8), 1.0)
    once = lambda x: jnp.stack([x])
    places, velocities = (jax.tree.map(once, x) for x in (START.chart(), START.chart_velocity(step)))
    history = History(places, velocities, jnp.array(1), jnp.array(0.25))
    proposal = blr.Anderson(1).propose(history, START, step)
    np.testing.assert_allclose(proposal.q.mean, START.mean - 0.25 * 0.8 * gradient / START.precision, rtol=1e-12)
