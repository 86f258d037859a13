"""Fits from starts that are too wide to integrate over, against optima of the same bound by SciPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.special import expit, gammaln
from scipy.stats import norm, t

import bayesrule as blr
from bayesrule import factors
from bayesrule.factor_graph.narrow_start import narrowed

ROWS, WIDTH = 60, 3
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
LOWER = np.tril_indices(WIDTH)


def problem(kind, seed=0):
    """Inputs, responses, log p(y | f) and its derivative in f, all of them NumPy's."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, WIDTH))
    f = x @ np.array([1.0, -0.7, 0.4])
    if kind == "poisson_exp":
        y = random.poisson(np.exp(f))
        return x, y, lambda f: y * f - np.exp(f) - gammaln(y + 1), lambda f: y - np.exp(f)
    if kind == "student_t":
        y = f + random.standard_t(4, size=ROWS)
        return x, y, lambda f: t.logpdf(y - f, 4), lambda f: 5 * (y - f) / (4 + (y - f) ** 2)
    y = (random.random(ROWS) < expit(f)).astype(float)
    sign = 2 * y - 1
    if kind == "bernoulli_logit":
        return x, y, lambda f: -np.logaddexp(0, -sign * f), lambda f: y - expit(f)
    mills = lambda f: np.exp(norm.logpdf(f) - norm.logcdf(sign * f))
    return x, y, lambda f: norm.logcdf(sign * f), lambda f: sign * mills(f)


def optimum(kind, sd):
    """The mean, the covariance and the bound of the best Gaussian: L-BFGS over the mean and the covariance's factor."""
    x, _, log_p, slope = problem(kind)

    def loss(vector):
        mean, factor = vector[:WIDTH], np.zeros((WIDTH, WIDTH))
        factor[LOWER] = vector[WIDTH:]
        projected = x @ factor
        spread = np.sqrt(np.sum(projected**2, axis=1))
        f = (x @ mean) + NODES[:, None] * spread
        slopes = slope(f)
        by_spread = WEIGHTS @ (slopes * NODES[:, None]) / spread
        expected = np.sum(WEIGHTS @ log_p(f))
        prior = 0.5 * (mean @ mean + np.sum(factor**2)) / sd**2 + WIDTH * np.log(sd) - 0.5 * WIDTH
        diagonal = np.diag(factor)
        in_factor = -(projected * by_spread[:, None]).T @ x
        in_factor = in_factor.T + factor / sd**2 - np.diag(1 / diagonal)
        gradient = np.concatenate([mean / sd**2 - x.T @ (WEIGHTS @ slopes), in_factor[LOWER]])
        return prior - expected - np.sum(np.log(np.abs(diagonal))), gradient

    best = None
    start = np.concatenate([np.zeros(WIDTH), min(sd, 0.3) * np.eye(WIDTH)[LOWER]])
    for _ in range(4):  # each restart forgets the approximate Hessian
        best = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 0, "gtol": 1e-9})
        start = best.x
    factor = np.zeros((WIDTH, WIDTH))
    factor[LOWER] = best.x[WIDTH:]
    return best.x[:WIDTH], factor @ factor.T, -best.fun


def model_of(kind, sd, dtype):
    x, y, _, _ = problem(kind)
    prior = blr.Gaussian(jnp.zeros(WIDTH, dtype), jnp.asarray(np.eye(WIDTH) / sd**2, dtype))
    terms = {"prior": factors.prior("w", prior), "y": getattr(factors, kind)("y", {"w": "x"})}
    return blr.Model({"w": prior}, terms), {"x": jnp.asarray(x, dtype), "y": jnp.asarray(y, dtype)}


RULES = {"cvi": blr.cvi(1.0), "sites": blr.cvi(1.0, sites=True), "ncvmp": blr.ncvmp()}


@pytest.mark.extended
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("cvi", kind) for kind in ("poisson_exp", "bernoulli_logit", "bernoulli_probit", "student_t")]
    + [("sites", "poisson_exp"), ("ncvmp", "poisson_exp")],
)
def test_wide_and_narrow_priors_converge(name, kind, double):
    """Priors of sd 10⁻³ to 10³ (float32: to 100)."""
    dtype = jnp.float64 if double else jnp.float32
    for sd in (1e-3, 3.0, 1e3 if double else 100.0):
        mean, covariance, bound = optimum(kind, sd)
        with jax.enable_x64(double):
            model, data = model_of(kind, sd, dtype)
            result = blr.fit(RULES[name], model, None, data, steps=100, tolerance=1e-7 if double else 1e-5)
        assert result.reason == "converged", sd
        own = np.asarray(result.q["w"].mean, float)
        assert np.sqrt((own - mean) @ np.linalg.solve(covariance, own - mean)) < 0.01, sd
        own = np.linalg.inv(np.asarray(result.q["w"].precision, float))
        assert_allclose(own, covariance, rtol=0, atol=0.01 * np.max(covariance))
        assert_allclose(float(result.bound), bound, atol=1e-4 if double else 2e-3)


@pytest.mark.extended
def test_student_t_is_not_below_its_laplace_start():
    """Outliers, a scale of 0.3 and a prior of sd 10: from the prior the steps would wander."""
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, WIDTH))
    y = x @ np.array([2.0, -3.0, 1.0]) + 0.3 * random.standard_t(2, size=ROWS)
    loss = lambda w: -np.sum(t.logpdf((y - x @ w) / 0.3, 2)) + 0.005 * w @ w
    mode = minimize(loss, np.linalg.lstsq(x, y, rcond=None)[0], method="BFGS").x
    r2 = ((y - x @ mode) / 0.3) ** 2
    hessian = 0.01 * np.eye(WIDTH) + (x.T * (3 * (2 - r2) / (2 + r2) ** 2 / 0.09)) @ x
    prior = blr.Gaussian(jnp.zeros(WIDTH), jnp.eye(WIDTH) / 100)
    likelihood = factors.student_t("y", {"w": "x"}, dof=2.0, scale=0.3)
    model = blr.Model({"w": prior}, {"prior": factors.prior("w", prior), "y": likelihood})
    data = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    result = blr.fit(blr.cvi(1.0), model, None, data, steps=200, tolerance=1e-8)
    laplace = blr.Product({"w": blr.Gaussian(jnp.asarray(mode), jnp.asarray(hessian))})
    assert result.reason == "converged"
    assert float(result.bound) >= float(model.bound(laplace, data))


@pytest.mark.extended
@pytest.mark.as_users
def test_counts_on_a_trend_chain_in_float32():
    """The README's example. At the optimum m = K(y − r), V = (K⁻¹ + diag r)⁻¹ with r = e^{m + v/2}: NumPy's K."""
    with jax.enable_x64(False):
        trend = blr.StateSpace([[1.0, 1.0], [0.0, 1.0]], jnp.diag(jnp.array([0.1, 0.01])), [1.0, 0.0])
        counts = blr.Model({"f": blr.GaussianChain(trend, 100)}, {"y": factors.poisson_exp("y", {"f": None})})
        drawn = jax.random.poisson(jax.random.key(1), 2.0, (100,)).astype(float)
        result = blr.fit(blr.cvi(1.0), counts, None, {"y": drawn}, steps=20)
    first, noise = np.asarray(trend.covariance, float), np.diag([0.1, 0.01])
    states, covariance, step = [first], np.zeros((100, 100)), np.array([[1.0, 1.0], [0.0, 1.0]])
    for _ in range(99):
        states.append(step @ states[-1] @ step.T + noise)
    for i, state in enumerate(states):
        for j in range(i, 100):
            covariance[i, j] = covariance[j, i] = (np.linalg.matrix_power(step, j - i) @ state)[0, 0]
    y, m, v = np.asarray(drawn, float), np.zeros(100), np.zeros(100)
    for _ in range(200):
        r = np.exp(m + v / 2)
        gains = covariance @ np.linalg.inv(np.eye(100) + np.diag(r) @ covariance)
        m, v = gains @ (y - r + r * m), np.diag(gains)
    assert_allclose(result.q["f"].mean, m, atol=2e-3)
    assert_allclose(result.q["f"].variance, v, rtol=5e-3)


@pytest.mark.extended
def test_a_good_start_is_kept():
    """A start whose first step is accepted is where the steps begin, as is one above the narrowed start's bound."""
    model, data = model_of("poisson_exp", 100.0, jnp.float64)
    best = blr.fit(blr.cvi(1.0), model, None, data, steps=100, tolerance=1e-12)
    again = blr.fit(blr.cvi(1.0), model, best.q, data, steps=1)
    assert_allclose(again.trace["bound"][0], float(best.bound), rtol=1e-12)
    # Twice as wide as the optimum its first step is a long one, and still its bound is above the narrowed start's.
    wide = blr.Product({"w": blr.Gaussian(best.q["w"].mean, best.q["w"].precision / 4)})
    again = blr.fit(blr.cvi(1.0), model, wide, data, steps=1)
    assert_allclose(again.trace["bound"][0], float(model.bound(wide, data)), rtol=1e-12)


def test_narrowed_moves_what_it_has_to():
    """A gamma block beside the weights stays; missing rows and those of weight 0 count as if they were not there."""
    x, y, _, _ = problem("poisson_exp")
    prior = blr.Gaussian(jnp.zeros(WIDTH), jnp.eye(WIDTH) / 1e4)
    terms = {
        "prior": factors.prior("w", prior),
        "scale": factors.prior("noise", blr.Gamma(2.0, 3.0)),
        "y": factors.poisson_exp("y", {"w": "x"}),
        "z": factors.linear("z", {"w": "x"}, precision="noise"),
    }
    model = blr.Model({"w": prior, "noise": blr.Gamma(2.0, 3.0)}, terms)
    y = np.where(np.arange(ROWS) < 20, np.nan, y)
    weights = np.where(np.arange(ROWS) < 40, 1.0, 0.0)
    data = {"x": jnp.asarray(x), "y": jnp.asarray(y), "z": jnp.asarray(x[:, 0])}
    q = narrowed(model, model.starting_point(None), blr.Weighted(data, jnp.asarray(weights)))
    assert_allclose(q["noise"].rate, 3.0)
    # κ = 1 at f = 0 of the rows 20 to 39 that count, and E t = 2/3 of the rows 0 to 39.
    expected = np.eye(WIDTH) / 1e4 + x[20:40].T @ x[20:40] + 2 / 3 * x[:40].T @ x[:40]
    assert_allclose(q["w"].precision, expected, rtol=1e-10)
    assert_allclose(q["w"].mean, np.linalg.solve(expected, 2 / 3 * x[:40].T @ x[:40, 0]), atol=1e-12)


@pytest.mark.extended
def test_mini_batches_from_a_wide_prior():
    """E e^f is not finite there; from the narrower start the sites of mini-batches end at the optimum."""
    model, data = model_of("poisson_exp", 100.0, jnp.float64)
    mean, _, bound = optimum("poisson_exp", 100.0)
    rule = blr.cvi(0.5, sites=True)
    result = blr.fit(rule, model, None, data, steps=300, batch_size=20, key=jax.random.key(0))
    assert result.reason == "steps"
    assert_allclose(result.q["w"].mean, mean, atol=1e-3)
    assert_allclose(float(model.bound(result.q, data)), bound, atol=1e-3)
