"""Converged means converged: the distance to the optimum is judged, and no rounding error can fake it.

Optima are known in closed form or computed by SciPy in float64.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting.convergence import Watch, first_watch, judge
from bayesrule.fitting.explain_stop import condition_number, explain_stop, worst_cancellation
from bayesrule.fitting.progress import one_blas_thread


@dataclasses.dataclass
class Report:
    """What `judge` reads of a step's info."""

    decrement: float
    moved: float
    inside: bool = True
    objective: float = 1e8  # so large that rounding errors of it explain any of the decrements here


@partial(jax.jit, static_argnames=("window", "gain"))
def verdicts(decrements, tolerance=1e-6, window=1, inside=True, gain=False, objective=1e8):
    """The answers of `judge` to a sequence of decrements: at each step whether converged, whether precision is lost."""

    def step(watch, at):
        count, decrement = at
        report = Report(decrement, decrement, jnp.asarray(inside), objective)
        watch, *answers = judge(watch, report, count, tolerance, window, gain)
        return watch, answers

    steps = jnp.arange(len(decrements))
    return jax.lax.scan(step, jax.tree.map(jnp.asarray, first_watch()), (steps, decrements))[1]


def first_converged(decrements, **options):
    converged = np.asarray(verdicts(jnp.asarray(decrements), **options)[0])
    return int(np.argmax(converged)) if converged.any() else None


def test_negative_and_missing_decrements_are_no_success():
    """The decrements of a quadratic of condition 1e16, as they were once measured, and NaN."""
    assert first_converged([1e32, 7e10, -1e5, -1e5, -1e5, np.nan, np.nan, -np.inf]) is None


def test_newtons_decrement_is_the_distance():
    """With c ≈ 0 the distance is the decrement: two of them within the tolerance, or one far below it."""
    assert first_converged([1e-1, 1e-3, 1e-7, 1e-14]) == 3
    assert first_converged([1e1, 1e-28]) == 1
    assert first_converged([1e-28]) == 0  # a fit that starts at its optimum


@pytest.mark.parametrize("contraction", [0.5, 0.9, 0.99])
def test_slow_steps_are_far_from_the_end(contraction):
    """Steps that shrink by c per step: the rest of the way is Δ/(1 − c), and four estimates in a row agree on it."""
    decrements = contraction ** (2.0 * np.arange(3000))
    stop = first_converged(decrements)
    distances = decrements / (1 - contraction) ** 2
    assert distances[stop - 4] > 1e-6 >= distances[stop - 3]


def test_a_slow_direction_behind_a_fast_one():
    """The fast part of the steps hides the slow one for a while, and one small estimate is not trusted."""
    steps = np.arange(8000)
    fast, slow = 0.1**steps, 3e-4 * 0.99**steps
    stop = first_converged(fast**2 + slow**2)
    assert (slow[stop] / 0.01) ** 2 <= 1e-6


def test_rounding_errors_above_the_tolerance_are_named():
    """Decrements that wander above and below the tolerance: precision is lost. Far below it they are no matter."""
    noise = np.random.default_rng(0).standard_normal((500, 800)) ** 2
    converged, lost = jax.vmap(lambda sequence: verdicts(1e-3 * sequence))(jnp.asarray(noise))
    first = lambda answers: np.where(np.any(answers, axis=1), np.argmax(answers, axis=1), 800)
    assert np.mean(first(converged) < first(lost)) < 0.01
    assert np.mean(first(lost) < 800) > 0.9
    # A loss near 1 has no rounding errors of that size: another reason makes the steps rise and fall, and they go on.
    assert not np.any(verdicts(jnp.asarray(1e-3 * noise[0]), objective=1.0)[1])
    noise = noise[0, :50]
    assert first_converged(np.append([1.0, 1e-5], 1e-12 * noise)) == 2


def test_steps_that_shrink_slowly_and_unevenly_have_not_lost_their_precision():
    """Decrements that fall by 5 % a step, and every fourth is four times larger, as where the halvings vary."""
    decrements = 1e-3 * 0.95 ** np.arange(400) * np.where(np.arange(400) % 4 == 3, 4.0, 1.0)
    converged, lost = verdicts(jnp.asarray(decrements))
    assert np.any(converged)
    assert not np.any(lost[: int(np.argmax(converged))])


def test_a_guard_that_finds_nothing_better_at_the_optimum_has_converged():
    assert first_converged([1e-2, 1e-7], inside=False) == 1
    assert first_converged([1e-2, 1e-5], inside=False) is None


def test_several_steps_are_judged_together_where_one_may_be_small_by_chance():
    """With a window of 10 one small decrement among large ones is no success, in whatever place."""
    for place in range(10):
        decrements = np.ones(200)
        decrements[place::10] = 1e-12
        assert first_converged(decrements, window=10) is None
    assert first_converged(0.5 ** np.arange(200.0), window=10) is not None


def quadratic(scales):
    return lambda x: 0.5 * jnp.sum(jnp.asarray(scales) * (x - 1.0) ** 2)


@pytest.mark.extended
@pytest.mark.parametrize("rate", [0.5, 0.05])
def test_gradient_descent_stops_at_its_optimum(rate):
    """Along a valley a hundred times flatter than its walls, ½|m − m*|² is within the tolerance."""
    result = blr.fit(blr.gradient_descent(rate), quadratic([1.0, 0.01]), jnp.zeros(2), steps=100_000, tolerance=1e-6)
    assert result.reason == "converged"
    assert 0.5 * np.sum((result.q.mean - 1.0) ** 2) <= 1.2e-6
    assert result.trace["decrement"][-1] < 1e-8  # which the test of the decrement alone would have passed long before


def correlated(size=4, correlation=0.98):
    covariance = (1 - correlation) * np.eye(size) + correlation
    return np.linalg.inv(covariance)


@pytest.mark.extended
@pytest.mark.parametrize("momentum", [None, 0.5, 0.9])
def test_a_diagonal_gaussian_on_a_correlated_posterior(momentum):
    """The optimum has the mean of the posterior and the diagonal of its precision, with momentum and without."""
    precision = jnp.asarray(correlated())
    loss = lambda x: 0.5 * (x - 1.0) @ precision @ (x - 1.0)
    steps = blr.Steps(0.1, momentum=momentum)
    rule = blr.Rule(blr.DiagonalGaussian, blr.Delta(), blr.HessianDiagonal(), steps)
    start = blr.DiagonalGaussian(jnp.array([3.0, -2.0, 0.5, 2.0]), 1.0)
    result = blr.fit(rule, loss, start, steps=50_000, tolerance=1e-6)
    assert result.reason == "converged"
    best = np.diag(precision)
    distance = 0.5 * np.sum(best * (result.q.mean - 1.0) ** 2) + 0.25 * np.sum((result.q.precision / best - 1) ** 2)
    assert distance <= 2e-6


def test_a_resumed_fit_stops_where_the_uninterrupted_one_does(tmp_path):
    """What the test of convergence remembers is saved with the result."""
    rule, loss, start = blr.gradient_descent(0.5), quadratic([1.0, 0.1]), jnp.zeros(2)
    whole = blr.fit(rule, loss, start, steps=500, tolerance=1e-6)
    for steps in (whole.steps - 2, 7):
        blr.fit(rule, loss, start, steps=steps, tolerance=1e-6).save(tmp_path / "half.npz")
        half = blr.load(tmp_path / "half.npz")
        assert isinstance(half.watch, Watch)
        rest = blr.fit(rule, loss, half, steps=500, tolerance=1e-6)
        assert (rest.steps, rest.reason) == (whole.steps, "converged")
        np.testing.assert_array_equal(rest.q.mean, whole.q.mean)


def test_the_gain_of_em_where_the_maximum_is_at_the_boundary():
    """Decrements that fall like 1/t²: the distance to the maximum is infinite, and the rest of the gain is c/t.

    So it is for a factor analysis whose noise variance goes to 0 in one column. The gain of the steps after t is
    Σ d_s ≈ c/t to first order, and is judged where parameters are points.
    """
    decrements = 10.0 / (1 + np.arange(4000.0)) ** 2
    assert first_converged(decrements, tolerance=0.1) is None
    stop = first_converged(decrements, tolerance=0.1, gain=True)
    assert 0.05 < np.sum(decrements[stop:]) <= 0.1


# Rounding.


def ill_conditioned(size, condition, seed=0):
    """A symmetric matrix with this condition number and its eigenvalues."""
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]
    values = np.sqrt(condition) * np.logspace(0, -np.log10(condition), size)
    matrix = (rotation * values) @ rotation.T
    return (matrix + matrix.T) / 2, values


def fit_quadratic(matrix, dtype):
    hessian, size = jnp.asarray(matrix, dtype), len(matrix)
    loss = lambda x: 0.5 * (x - 1) @ (hessian @ (x - 1))
    return blr.fit(blr.laplace(), loss, jnp.zeros(size, dtype), steps=60, tolerance=1e-6)


@pytest.mark.sampled("1e+16")
@pytest.mark.parametrize("condition", [1e2, 1e6, 1e10, 1e16])
def test_quadratics_in_double_precision(condition):
    """The evidence ½ log|2πH⁻¹| of a quadratic, or "precision lost" with the condition number."""
    matrix, values = ill_conditioned(3, condition)
    result = fit_quadratic(matrix, jnp.float64)
    if condition < 1e13:
        assert (result.reason, result.explanation) == ("converged", None)
        evidence = 0.5 * np.sum(np.log(2 * np.pi / values))
        assert abs(result.bound - evidence) < 1e-15 * condition + 1e-12
    else:
        assert result.reason == "precision lost"
        assert "float64" in result.explanation
        assert "stronger prior" in result.explanation


@pytest.mark.extended
@pytest.mark.parametrize("condition", [1e2, 1e3, 1e6, 1e8, 1e10, 1e16])
def test_quadratics_in_single_precision(condition):
    matrix, values = ill_conditioned(3, condition, seed=1)
    result = fit_quadratic(matrix, jnp.float32)
    if condition <= 1e3:
        assert result.reason == "converged"
        assert abs(result.bound - 0.5 * np.sum(np.log(2 * np.pi / values))) < 1e-3
    else:
        assert result.reason == "precision lost"
        assert "jax_enable_x64" in result.explanation


@pytest.mark.extended
def test_the_scale_of_columns_does_not_matter():
    """A condition number of 1e24 that is 1 after scaling to unit diagonal costs nothing, in either precision."""
    scales = 10.0 ** np.array([-6.0, 0.0, 6.0])
    correlation = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, -0.3], [0.2, -0.3, 1.0]])
    matrix = correlation * scales[:, None] * scales
    evidence = 0.5 * (3 * np.log(2 * np.pi) - np.linalg.slogdet(matrix)[1])
    for dtype, error in ((jnp.float64, 1e-12), (jnp.float32, 1e-5)):
        result = fit_quadratic(matrix, dtype)
        assert result.reason == "converged"
        assert abs(result.bound - evidence) < error


def test_condition_numbers_against_numpy():
    with one_blas_thread():
        matrix = ill_conditioned(320, 1e5)[0]  # so large that it is estimated
        roots = np.sqrt(np.diag(matrix))
        expected = np.linalg.cond(matrix / np.outer(roots, roots))
        np.testing.assert_allclose(condition_number(matrix), expected, rtol=0.1)
    np.testing.assert_allclose(condition_number(matrix[:30, :30] * 1e30), condition_number(matrix[:30, :30]))
    assert condition_number(np.ones((2, 2))) > 1e15
    assert condition_number(np.diag([1.0, -1.0])) == np.inf
    assert condition_number(np.diag([1.0, np.nan])) == np.inf


def collinear(kind, rows):
    """Columns as users have them: a year and its square, or a column beside itself plus a little noise."""
    random = np.random.default_rng(3)
    first = random.integers(1950, 2020, rows) if kind == "years" else random.standard_normal(rows)
    second = first**2 if kind == "years" else first + 1e-4 * random.standard_normal(rows)
    x = np.stack([np.ones(rows), first, second], axis=1).astype(np.float32)
    return x, random.standard_normal(rows).astype(np.float32)


@pytest.mark.extended
@pytest.mark.as_users
@pytest.mark.parametrize("kind", ["years", "twins"])
@pytest.mark.parametrize("prior", [1e-2, 1.0])
def test_collinear_columns(kind, prior):
    """Ridge regression: "converged" only where q is that of NumPy in float64, else the condition number is named."""
    x, y = collinear(kind, 200)
    wide = x.astype(np.float64)
    precision = wide.T @ wide + prior * np.eye(3)
    mean = np.linalg.solve(precision, wide.T @ y)
    for dtype in (jnp.float32, jnp.float64):
        objective = blr.Objective(lambda w, e: 0.5 * (e[0] @ w - e[1]) ** 2, size=200, regularizer=prior)
        data = (jnp.asarray(x, dtype), jnp.asarray(y, dtype))
        result = blr.fit(blr.laplace(), objective, jnp.zeros(3, dtype), data, steps=60, tolerance=1e-6)
        off, found = np.asarray(result.q.mean, float) - mean, np.asarray(result.q.precision, float)
        change = np.linalg.solve(precision, found)
        divergence = 0.5 * (off @ precision @ off + np.trace(change) - 3 - np.linalg.slogdet(change)[1])
        assert (result.reason == "converged" and divergence < 1e-4) or (
            dtype == jnp.float32 and result.reason == "precision lost" and "condition number" in result.explanation
        )


def test_explanations_are_saved(tmp_path):
    result = fit_quadratic(ill_conditioned(3, 1e16)[0], jnp.float64)
    result.save(tmp_path / "lost.npz")
    again = blr.load(tmp_path / "lost.npz")
    assert (again.reason, again.explanation) == (result.reason, result.explanation)


def test_a_fit_that_stands_still_has_lost_its_precision():
    """If nothing changes from step to step and the tolerance is not reached, more steps would not help."""
    q = blr.Gaussian(jnp.zeros(2), 1.0)
    still = {name: np.full(9, value) for name, value in (("objective", 3.0), ("decrement", 1e-5), ("rate", 1.0))}
    reason, explanation = explain_stop(blr.Reason.STEPS, q, still, 1e-6)
    assert reason == "precision lost"
    assert "tolerance of 1e-06" in explanation
    for name, values in (("objective", np.arange(9.0)), ("rate", np.zeros(9)), ("decrement", np.zeros(9))):
        assert explain_stop(blr.Reason.STEPS, q, {**still, name: values}, 1e-6) == ("steps", None)
    assert explain_stop(blr.Reason.STEPS, q, still, None) == ("steps", None)


@pytest.mark.extended
def test_a_stricter_share_of_the_tolerance():
    """After a distance was refuted, estimates have to be within a part of the tolerance."""
    report = Report(1e-7, 1e-7)
    answers = {}
    for share in (1.0, 1e-3):
        watch = first_watch()._replace(before=np.asarray(1e-3), share=np.asarray(share))
        for count in range(4):
            watch, converged, _ = judge(watch, report, count, 1e-6, 1)
        answers[share] = bool(converged)
    assert answers == {1.0: True, 1e-3: False}


def test_negative_variances_have_no_correct_digit():
    class Process:
        def __init__(self, ratio):
            self.ratio = ratio

        def cancellations(self):
            return (np.array([2.0, self.ratio]),)

    assert worst_cancellation(Process(7.0))[0] == 7
    assert worst_cancellation(Process(-7.0))[0] == np.inf


def test_padding_does_not_change_the_condition_number():
    """The weight of a column of zeros stays at its prior: 1 on the diagonal of the scaled precision, 0 elsewhere."""
    matrix = ill_conditioned(3, 1e4)[0]
    padded = np.zeros((5, 5))
    padded[:3, :3], padded[3, 3], padded[4, 4] = matrix, 1e-8, 1e8
    np.testing.assert_allclose(condition_number(padded), condition_number(matrix))


@pytest.mark.parametrize(("double", "expected"), [(False, "precision lost"), (True, "converged")])
def test_a_process_whose_variances_cancel(double, expected):
    """GP regression with a prior sd of 500 and a noise sd of 1: V = K − … has no digits left in float32.

    The posterior is that of the formulas of Rasmussen and Williams (2.23, 2.24), by NumPy.
    """
    x = np.linspace(0.0, 3.0, 12)
    K = 500.0**2 * np.exp(-0.5 * (x[:, None] - x) ** 2)
    y = 400 * np.sin(x)
    with jax.enable_x64(double):
        kind = jnp.float64 if double else jnp.float32
        q = blr.GaussianProcess(jnp.asarray(K + 1e-2 * np.eye(12), kind))
        model = blr.Model({"f": q}, {"y": blr.factors.normal("y", mean="f", precision=1.0)})
        result = blr.fit(blr.cvi(), model, None, {"y": jnp.asarray(y, kind)}, steps=20, tolerance=1e-6)
        assert result.reason == expected
        if not double:
            assert "float64" in result.explanation
            return
        gain = np.linalg.solve(K + 1e-2 * np.eye(12) + np.eye(12), K + 1e-2 * np.eye(12)).T
        np.testing.assert_allclose(result.q["f"].mean, gain @ y, rtol=1e-6)
