"""A fit that converges at points which are too coarse for its integrals says so, against optima found by SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bayesrule as blr
from bayesrule import factors

X, Y = np.array([1.0, 0.6, -0.8, 0.1]), np.array([1.0, 1.0, 0.0, 1.0])  # separable, so that a wide prior stays wide


def best_gaussian(prior_sd):
    """The mean and standard deviation of the best q for logistic regression with one weight, on a very fine grid."""
    z = np.linspace(-9, 9, 40001)
    density = np.exp(-0.5 * z**2)
    density = density / density.sum()

    def minus_bound(parameters):
        m, s = parameters[0], np.exp(parameters[1])
        f = (m + s * z)[:, None] * X
        loss = density @ np.sum(np.logaddexp(0, f) - Y * f, axis=1)
        return loss + 0.5 * (m**2 + s**2) / prior_sd**2 - parameters[1]

    best = minimize(minus_bound, [1.0, 0.5], method="BFGS")
    return best.x[0], np.exp(best.x[1])


def fitted(order, prior_sd, tolerance=1e-6, **options):
    loss = lambda f, y: jnp.logaddexp(0.0, f) - y * f
    objective = blr.Objective(loss, output=lambda w, x: w * x, linear=True, size=4, regularizer=prior_sd**-2)
    rule = blr.von(0.3).replace(points=blr.Quadrature(order), guard=blr.Backtracking(monotone=True))
    data = (jnp.array(X), jnp.array(Y))
    return blr.fit(rule, objective, jnp.zeros(()), data, steps=2000, tolerance=tolerance, **options)


@pytest.mark.extended
@pytest.mark.parametrize("prior_sd", [1.0, 10.0])
@pytest.mark.parametrize("order", [4, 8, 40])
def test_an_optimum_of_the_grid_alone_is_not_called_converged(order, prior_sd):
    mean, sd = best_gaussian(prior_sd)
    result = fitted(order, prior_sd)
    off = max(abs(float(result.q.mean) - mean) / sd, abs(float(result.q.precision.squeeze()) ** -0.5 / sd - 1))
    if order < 40 and prior_sd == 10.0:
        assert off > 0.05
        assert result.reason == "points too coarse"
        assert "more nodes" in result.explanation
    else:
        assert off < 0.05
        assert result.reason == "converged"
        assert result.explanation is None


@pytest.mark.extended
def test_checkpoints_progress_functions_and_starts_say_the_same(tmp_path):
    seen = []
    file = tmp_path / "fit.npz"
    result = fitted(8, 10.0, checkpoint=file, progress=lambda result: seen.append(result.reason))
    assert result.loop_reason == "converged"
    assert result.reason == blr.load(file).reason == seen[-1] == "points too coarse"
    several = fitted(8, 10.0, starts=2, key=jax.random.key(0))
    assert several.starts.reasons[several.starts.best] == several.reason == "points too coarse"


@pytest.mark.extended
def test_the_distance_is_what_a_fit_at_finer_points_finds():
    """The number in the explanation is, to its one digit, the KL divergence between the two optima."""
    coarse, fine = fitted(8, 10.0), fitted(32, 10.0)
    said = float(coarse.explanation.partition("about ")[2].split()[0])
    between = 0.5 * float(coarse.q.kl(fine.q) + fine.q.kl(coarse.q))
    assert said == pytest.approx(between, rel=0.3)


@pytest.mark.extended
def test_factors_of_a_model_are_judged_too():
    """A softmax under a wide q, whose default grid has 8 nodes for each output."""
    x = jnp.array([[1.0, 0.3], [-0.4, 1.0], [-0.7, -0.9]])
    data = {"x": x, "y": jnp.array([0.0, 1.0, 2.0])}

    def reason(prior_sd):
        prior = blr.Gaussian(jnp.zeros((3, 2)), jnp.eye(6) / prior_sd**2)
        terms = {"prior": factors.prior("w", prior), "y": factors.softmax("y", {"w": "x"})}
        return blr.fit(blr.cvi(), blr.Model({"w": prior}, terms, size=3), None, data, steps=400, tolerance=1e-6).reason

    assert reason(0.5) == "converged"
    assert reason(50.0) == "points too coarse"


@pytest.mark.extended
@pytest.mark.parametrize("name", ["student_t", "bernoulli_probit"])
def test_likelihoods_that_integrate_at_any_width_converge_to_the_optimum(name):
    """One weight and a prior sd of 300: the widest outputs are far wider than the likelihood's bend."""
    z = np.linspace(-9, 9, 40001)
    density = np.exp(-0.5 * z**2)
    density = density / density.sum()
    x, y = np.array([1.0, 0.05]), np.array([1.0, 1.0])
    if name == "student_t":
        from scipy.stats import t

        x, y = np.array([1.0, 0.01]), np.array([0.3, 9.0])
        log_p = lambda f: t.logpdf(y - f, 4)
    else:
        from scipy.special import log_ndtr

        log_p = log_ndtr

    def minus_bound(parameters):
        m, s = parameters[0], np.exp(parameters[1])
        loss = -density @ np.sum(log_p((m + s * z)[:, None] * x), axis=1)
        return loss + 0.5 * (m**2 + s**2) / 300.0**2 - parameters[1]

    prior = blr.Gaussian(jnp.zeros(1), jnp.eye(1) / 300.0**2)
    terms = {"prior": factors.prior("w", prior), "y": getattr(factors, name)("y", {"w": "x"})}
    model = blr.Model({"w": prior}, terms, size=2)
    rule = blr.cvi().replace(steps=blr.Steps(1.0, acceleration=blr.Anderson(5)))
    result = blr.fit(rule, model, None, {"x": jnp.array(x[:, None]), "y": jnp.array(y)}, steps=2000, tolerance=1e-8)
    assert result.reason == "converged"
    ours = float(result.q["w"].mean[0]), float(np.asarray(result.q["w"].precision).item()) ** -0.5
    best = minimize(
        minus_bound, [ours[0], np.log(ours[1])], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}
    )
    assert abs(best.x[0] - ours[0]) / ours[1] < 2e-3
    assert np.exp(best.x[1]) == pytest.approx(ours[1], rel=2e-3)
