"""Fits that converge slowly: they are accelerated by themselves, and "converged" is confirmed at the end.

One count of 0 under N(0, v₀) is the hardest of small problems: e^f couples the mean and the variance of q so that the
bound has a narrow curved valley. Its optimum is the root of one equation, which SciPy solves: with a = v₀ E e^f it is
m = −a, 1/v = (1 + a)/v₀ and log(a/v₀) = m + v/2.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq, minimize

import bayesrule as blr
from bayesrule import factors
from bayesrule.fitting.accelerate import PATIENCE, accelerated
from bayesrule.fitting.fixed_point import as_vector, distance_to_fixed_point
from bayesrule.objectives.objective import as_objective


def optimum(prior_sd):
    v0 = prior_sd**2
    gap = lambda log_a: log_a - np.log(v0) + np.exp(log_a) - 0.5 * v0 / (1 + np.exp(log_a))
    a = np.exp(brentq(gap, -30, 30, xtol=1e-14))
    return -a, np.sqrt(v0 / (1 + a))


def count_of_zero(prior_sd, dtype=None):
    prior = blr.Gaussian(jnp.zeros(1, dtype), jnp.eye(1, dtype=dtype) / prior_sd**2)
    terms = {"prior": factors.prior("w", prior), "y": factors.poisson_exp("y", {"w": "x"})}
    return blr.Model({"w": prior}, terms, size=1), {"x": jnp.ones((1, 1), dtype), "y": jnp.zeros(1, dtype)}


def errors(result, prior_sd):
    """How far mean and standard deviation are off, in standard deviations."""
    mean, sd = optimum(prior_sd)
    q = result.q["w"]
    return abs(float(q.mean[0]) - mean) / sd, abs(float(q.precision[0, 0]) ** -0.5 / sd - 1)


@pytest.mark.sampled("0.1", "1.0", "30.0", "100.0", "1000.0")
@pytest.mark.parametrize("prior_sd", [1e-3, 0.1, 1.0, 10.0, 30.0, 100.0, 1000.0])
def test_a_count_of_zero_under_any_prior(prior_sd):
    model, data = count_of_zero(prior_sd)
    result = blr.fit(blr.cvi(), model, None, data, steps=400, tolerance=1e-6)
    assert result.reason == "converged"
    assert max(errors(result, prior_sd)) < 2e-3


@pytest.mark.extended
def test_a_start_so_wide_that_its_rounding_errors_would_stay():
    """A chain of one step, from its prior: E e^f is e^60, and so are the messages of the first step."""
    prior_sd = 11.0
    system = blr.StateSpace(jnp.eye(2), jnp.eye(2), jnp.array([1.0, 0.0]), covariance=prior_sd**2 * jnp.eye(2))
    model = blr.Model({"f": blr.GaussianChain(system, 1)}, {"y": factors.poisson_exp("y", {"f": None})}, size=1)
    result = blr.fit(blr.cvi(), model, None, {"y": jnp.zeros(1)}, steps=400, tolerance=1e-6)
    mean, sd = optimum(prior_sd)
    assert result.reason == "converged"
    assert float(result.q["f"].mean[0]) == pytest.approx(mean, abs=2e-3 * sd)
    assert float(result.q["f"].variance[0]) ** 0.5 == pytest.approx(sd, rel=2e-3)


@pytest.mark.extended
@pytest.mark.as_users
@pytest.mark.parametrize("prior_sd", [0.1, 10.0, 100.0])
def test_a_count_of_zero_in_single_precision(prior_sd):
    import jax

    with jax.enable_x64(False):
        model, data = count_of_zero(prior_sd, jnp.float32)
        result = blr.fit(blr.cvi(), model, None, data, steps=400, tolerance=1e-6)
        assert result.reason == "converged"
        assert max(errors(result, prior_sd)) < 5e-3


@pytest.mark.extended
@pytest.mark.parametrize("rule", [blr.ncvmp(), blr.cvi(sites=True)], ids=["ncvmp", "sites"])
def test_slow_steps_are_not_called_converged_far_from_the_optimum(rule):
    """These are not accelerated. Their decrement falls to the tolerance 0.2 standard deviations from the optimum."""
    model, data = count_of_zero(100.0)
    result = blr.fit(rule, model, None, data, steps=1200, tolerance=1e-6)
    assert result.reason == "steps"
    assert np.min(np.abs(result.trace["decrement"])) < 2e-6
    assert errors(result, 100.0)[0] > 0.05
    result = blr.fit(rule, model, None, data, steps=4000, tolerance=1e-6)
    assert result.reason == "converged"
    assert max(errors(result, 100.0)) < 0.02


@pytest.mark.extended
def test_an_accelerated_fit_that_is_resumed_takes_the_same_steps(tmp_path):
    """Also where it is resumed before the change to accelerated steps, and after it."""
    model, data = count_of_zero(100.0)
    whole = blr.fit(blr.cvi(), model, None, data, steps=400, tolerance=1e-6)
    assert whole.steps > PATIENCE + 10
    for first in (20, PATIENCE, PATIENCE + 8):
        part = blr.fit(blr.cvi(), model, None, data, steps=first, tolerance=1e-6)
        part.save(tmp_path / "part.npz")
        rest = blr.fit(blr.cvi(), model, blr.load(tmp_path / "part.npz"), data, steps=400, tolerance=1e-6)
        assert rest.steps == whole.steps
        assert np.array_equal(rest.q["w"].mean, whole.q["w"].mean)
        assert np.array_equal(rest.q["w"].precision, whole.q["w"].precision)


def test_what_is_not_accelerated():
    model, data = count_of_zero(1.0)
    q = blr.cvi().init(None, model).q
    assert accelerated(blr.cvi(0.5), model, q, data) == blr.cvi().replace(
        steps=blr.Steps(0.5, acceleration=blr.Anderson(5))
    )
    assert accelerated(blr.cvi(sites=True), model, q, data) is None
    assert accelerated(blr.ncvmp(), model, q, data) is None
    low_rank = blr.slang(0.1)
    loss = blr.Objective(lambda w, x: jnp.sum((w - x) ** 2), size=3, regularizer=1.0)
    state = low_rank.init(jnp.zeros(4), loss)
    assert accelerated(low_rank, loss, state.q, jnp.zeros((3, 4))) is None


@pytest.mark.extended
def test_steps_of_the_delta_method_are_not_accelerated():
    """Nothing judges an extrapolated step there: accelerated, this fit calls a saddle point of the joint converged.

    The steps themselves end at a mode, which SciPy finds from a start nearby.
    """
    log_f = lambda u, v: -1.3 * (u * v + 0.4) ** 2 - 0.7 * jnp.log1p((u + 2.9) ** 2)
    prior, start = blr.DiagonalGaussian(0.0, 0.05), (2.3, -0.6)
    terms = {name: factors.prior(name, prior) for name in "uv"} | {"f": blr.Factor(log_f, *"uv", points=blr.Delta())}
    model = blr.Model({"u": prior, "v": prior}, terms)
    q = blr.Product({name: blr.DiagonalGaussian(m, 1.0) for name, m in zip("uv", start, strict=True)})
    assert accelerated(blr.cvi(0.05), model, q, None) is None
    result = blr.fit(blr.cvi(0.05), model, q, steps=400, tolerance=1e-8)
    mode = minimize(lambda x: 0.025 * x @ x - float(log_f(*x)), [-2.9, 0.0], tol=1e-10).x
    assert result.reason == "converged"
    np.testing.assert_allclose([result.q["u"].mean, result.q["v"].mean], mode, atol=1e-3)


def test_a_slow_fit_says_how_many_steps_it_needs():
    model, data = count_of_zero(100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = blr.fit(blr.ncvmp(), model, None, data, steps=100, tolerance=1e-6)
    assert result.reason == "steps"
    assert "more are needed" in result.explanation


@pytest.mark.extended
def test_a_distance_that_leads_out_of_the_domain_is_a_number():
    """λ + e has a negative precision, and ½⟨e, Fe⟩ is that of a dense solve with F in the coordinates (Sm, −S/2).

    Once it was NaN, and counted as confirmed.
    """
    loss = as_objective(lambda x: jnp.sum(x**4 / 4))
    rule = blr.newton(0.5).replace(points=blr.Quadrature(9), guard=blr.NoGuard())
    mean, precision = 5.0, 30.0
    state = rule.init(blr.Gaussian(jnp.array([mean]), jnp.array([[precision]])), loss)
    vector, assemble, _ = as_vector(state)
    step = lambda vector: as_vector(rule.advance(loss, assemble(vector))[0])[0]
    e = np.linalg.solve(np.eye(2) - jax.jacfwd(step)(vector), step(vector) - vector)
    assert not bool(assemble(vector + e).q.inside())
    v = 1 / precision
    fisher = np.array([[v, 2 * mean * v], [2 * mean * v, 4 * mean**2 * v + 2 * v**2]])
    distance = distance_to_fixed_point(rule, loss, state, None, jax.random.key(0))
    assert distance == pytest.approx(0.5 * e @ fisher @ e, rel=1e-3)


def test_a_tolerance_that_comes_late_is_no_reason_to_stay_slow():
    """60 steps without a tolerance, and a resumed fit with one: it is accelerated after 50 more."""
    model, data = count_of_zero(300.0)
    first = blr.fit(blr.cvi(), model, None, data, steps=60)
    result = blr.fit(blr.cvi(), model, first, data, steps=400, tolerance=1e-6)
    assert result.reason == "converged"
    assert result.steps > 60 + PATIENCE
    assert max(errors(result, 300.0)) < 2e-3


def test_a_gaussian_that_is_too_wide_for_a_loss_begins_again_near_the_mode():
    """Counts from N(0, 300²): E e^f overflows at the start, and Newton's steps from its mean do not.

    The best Gaussian for one count y has 1/v = E e^f + 1/v₀ and y − E e^f = m/v₀, with E e^f = exp(m + v/2).
    """
    loss = lambda f, y: jnp.exp(f) - y * f
    prior = 300.0**-2
    objective = blr.Objective(loss, output=lambda w, x: x @ w, linear=True, size=1, regularizer=prior)
    rule = blr.von(0.5).replace(points=blr.Quadrature(20), guard=blr.Backtracking(monotone=True))
    start = blr.Gaussian(jnp.zeros(1), prior * jnp.eye(1))
    result = blr.fit(rule, objective, start, (jnp.ones((1, 1)), jnp.array([7.0])), steps=200, tolerance=1e-8)
    mean, variance = float(result.q.mean[0]), 1 / float(result.q.precision[0, 0])
    expected = np.exp(mean + 0.5 * variance)
    assert result.reason == "converged"
    assert 7 - expected == pytest.approx(prior * mean, abs=1e-3)
    assert 1 / variance == pytest.approx(expected + prior, rel=1e-3)
