"""Leave-one-out from sites: exact for conjugate models, close to refits otherwise, and honest where it cannot be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import multivariate_normal, poisson

import bayesrule as blr
from bayesrule import factors

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3))
PRIOR = blr.Gaussian(jnp.zeros(3), jnp.eye(3))


def regression(likelihood):
    return blr.Model({"w": PRIOR}, {"prior": factors.prior("w", PRIOR), "y": likelihood})


@pytest.mark.extended
def test_linear_regression_is_exact():
    """Against the predictive densities of a Gaussian process with the same covariance, all left out in closed form."""
    y = X @ [1.0, -1.0, 0.5] + 0.5 * RANDOM.normal(size=40)
    model = regression(factors.linear("y", {"w": "x"}, precision=4.0))
    result = blr.fit(blr.conjugate(), model, None, {"x": X, "y": y}, steps=1)
    inverse = np.linalg.inv(np.eye(40) / 4 + X @ X.T)
    variance = 1 / np.diag(inverse)
    gap = inverse @ y * variance
    exact = -0.5 * (np.log(2 * np.pi * variance) + gap**2 / variance)
    left = result.loo()
    assert_allclose(left.log_density, exact, atol=1e-10)
    assert_allclose(left.total, exact.sum(), atol=1e-9)
    assert np.all(left.proper)
    n = 7  # and the influence is KL(q ‖ q without the row)
    kept = np.arange(40) != n
    other = blr.fit(blr.conjugate(), model, None, {"x": X[kept], "y": y[kept]}, steps=1)
    assert_allclose(left.influence[n], result.q["w"].kl(other.q["w"]), rtol=1e-9)


def test_conjugate_counts_are_exact():
    """Gamma–Poisson: the predictive without a row is negative binomial; evidence ratios say the same."""
    y = RANDOM.poisson(3.0, size=8).astype(float)
    prior = blr.Gamma(2.0, 1.0)
    model = blr.Model({"r": prior}, {"prior": factors.prior("r", prior), "y": factors.poisson("y", rate="r")})
    fitted = lambda y: blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1)
    full = fitted(y)
    left = full.loo()
    ratios = [full.bound - fitted(np.where(np.arange(8) == n, np.nan, y)).bound for n in range(8)]
    assert_allclose(left.log_density, ratios, atol=1e-10)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["logit", "poisson"])
def test_other_likelihoods_are_close_to_refits(kind):
    """Forty refits: within 0.015 nats where a row has moved q by less than 0.1 nats, and 0.01 on average; where one
    row matters much, the others' sites would move too, and the gap is up to 0.4 of its influence."""
    f = X @ [1.0, -1.0, 0.5]
    if kind == "logit":
        y, likelihood = (
            (RANDOM.random(40) < 1 / (1 + np.exp(-f))).astype(float),
            factors.bernoulli_logit("y", {"w": "x"}),
        )
        density = lambda f, y: 1 / (1 + np.exp(-(2 * y - 1) * f))
    else:
        y, likelihood = RANDOM.poisson(np.exp(0.5 * f)).astype(float), factors.poisson_exp("y", {"w": "x"})
        density = lambda f, y: poisson(np.exp(f)).pmf(y)
    model, rule = regression(likelihood), blr.cvi(0.7)
    fitted = lambda y: blr.fit(rule, model, None, {"x": X, "y": y}, steps=100, tolerance=1e-14)
    left = fitted(y).loo()
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    brute = []
    for n in range(40):
        q = fitted(np.where(np.arange(40) == n, np.nan, y)).q["w"]
        spread = np.sqrt(X[n] @ np.linalg.solve(q.precision, X[n]))
        brute.append(np.log(weights @ density(X[n] @ q.mean + spread * nodes, y[n]) / weights.sum()))
    gaps = np.abs(left.log_density - np.array(brute))
    influence = np.asarray(left.influence)
    assert np.max(gaps[influence < 0.1]) < 0.015
    assert np.all(gaps < 0.4 * influence + 1e-3)
    assert np.mean(gaps) < 0.01


def test_several_outputs_and_missing_rows():
    prior = blr.Gaussian(jnp.zeros((3, 3)), jnp.eye(9))
    y = np.argmax(X + RANDOM.gumbel(size=(40, 3)), axis=1).astype(float)
    y[5] = np.nan
    terms = {"prior": factors.prior("w", prior), "y": factors.softmax("y", {"w": "x"})}
    result = blr.fit(blr.cvi(0.7), blr.Model({"w": prior}, terms), None, {"x": X, "y": y}, steps=60, tolerance=1e-12)
    left = result.loo()
    assert left.log_density.shape == (40,)
    assert left.log_density[5] == left.influence[5] == 0
    assert np.all(left.log_density <= 0)
    assert "40 rows" in repr(left)


OUTPUTS = np.array([[1.0], [0.5], [2.0]])
CHAIN = blr.StateSpace(jnp.array([[0.9]]), jnp.eye(1), jnp.asarray(OUTPUTS))


def log_density_of_observed(y, covariance):
    seen = ~np.isnan(y)
    return multivariate_normal(np.zeros(seen.sum()), covariance[np.ix_(seen, seen)]).logpdf(y[seen])


@pytest.mark.extended
def test_more_outputs_than_states_are_exact():
    """One state with three outputs: the outputs' covariance is singular. Against log p(y) − log p(y without a step) of
    the joint Gaussian of all observations, one of which is missing."""
    y = np.random.default_rng(1).normal(size=(6, 3))
    y[2, 1] = np.nan
    model = blr.Model({"x": blr.GaussianChain(CHAIN, 6)}, {"y": factors.linear("y", {"x": None}, precision=4.0)})
    left = blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1).loo()
    states, variance = np.zeros((6, 6)), 1.0
    for t in range(6):
        for s in range(t, 6):
            states[t, s] = states[s, t] = variance * 0.9 ** (s - t)
        variance = 0.81 * variance + 1.0
    joint = np.kron(states, OUTPUTS @ OUTPUTS.T) + np.eye(18) / 4
    without = [np.where(np.arange(6)[:, None] == n, np.nan, y).ravel() for n in range(6)]
    exact = log_density_of_observed(y.ravel(), joint) - [log_density_of_observed(rest, joint) for rest in without]
    assert np.all(left.proper)
    assert_allclose(left.log_density, exact, atol=1e-10)


def test_counts_with_more_outputs_than_states():
    """Against the cavity of the state itself, which has an inverse: its messages by hand, and its density by a grid.

    The states vary little, because three outputs are integrated over a grid of 16 points in each dimension.
    """
    y = np.random.default_rng(1).poisson(2.0, size=(6, 3)).astype(float)
    y[2, 1] = np.nan
    quiet = blr.StateSpace(jnp.array([[0.9]]), 0.05 * jnp.eye(1), jnp.asarray(OUTPUTS))
    model = blr.Model({"x": blr.GaussianChain(quiet, 6)}, {"y": factors.poisson_exp("y", {"x": None})})
    result = blr.fit(blr.cvi(0.7), model, None, {"y": y}, steps=100, tolerance=1e-10)
    left, (mean, covariance) = result.loo(), result.q["x"].states()
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    for n in range(6):
        seen, m, v = ~np.isnan(y[n]), float(mean[n, 0]), float(covariance[n, 0, 0])
        h, counts = OUTPUTS[seen, 0], y[n][seen]
        rate = np.exp(h * m + 0.5 * h**2 * v)  # E e^f, of which the message (y − rate + rate·f, rate) is made
        precision = 1 / v - h**2 @ rate
        center = (m / v - h @ (counts - rate + rate * h * m)) / precision
        states = center + nodes / np.sqrt(precision)
        terms = poisson(np.exp(np.outer(h, states))).logpmf(counts[:, None])
        expected = np.log(weights @ np.exp(terms.sum(0)) / weights.sum())
        assert_allclose(left.log_density[n], expected, atol=1e-4)


@pytest.mark.extended
def test_a_precision_block_beside_several_outputs():
    """A missing entry of a step sends no message to the precision of its output."""
    y = np.random.default_rng(1).normal(size=(6, 3))
    y[2, 1] = np.nan
    prior = blr.Gamma(jnp.full(3, 2.0), jnp.ones(3))
    terms = {"prior": factors.prior("t", prior), "y": factors.linear("y", {"x": None}, precision="t")}
    model = blr.Model({"x": blr.GaussianChain(CHAIN, 6), "t": prior}, terms, size=6)
    result = blr.fit(blr.vmp(), model, None, {"y": y}, steps=100, tolerance=1e-10)
    assert_allclose(result.q["t"].shape, 2.0 + np.array([6, 5, 6]) / 2)
    assert np.all(np.isfinite(result.loo().log_density))
    by_sites = blr.fit(blr.cvi(0.5, sites=True), model, None, {"y": y}, steps=200, tolerance=1e-10)
    assert_allclose(by_sites.q["t"].rate, result.q["t"].rate, rtol=1e-4)


def test_an_improper_cavity_is_said():
    """With a flat prior and as many rows as weights, q without a row is no distribution."""
    start = blr.Gaussian(jnp.zeros(3), jnp.eye(3))
    model = blr.Model({"w": start}, {"y": factors.linear("y", {"w": "x"}, precision=1.0)})
    result = blr.fit(blr.cvi(1.0), model, None, {"x": X[:3], "y": np.ones(3)}, steps=1)
    with pytest.warns(UserWarning, match="not a distribution for 3 of 3 rows"):
        left = result.loo()
    assert not np.any(left.proper)
    assert np.all(np.isnan(left.log_density))


def test_where_rows_cannot_be_left_out():
    plain = blr.fit(blr.newton(), lambda x: jnp.sum(x**2), jnp.ones(2), steps=1)
    with pytest.raises(ValueError, match=r"needs a blr\.Model"):
        plain.loo()
    two = blr.Model(
        {"w": PRIOR},
        {
            "a": factors.linear("y", {"w": "x"}),
            "b": factors.linear("y", {"w": "x"}),
            "prior": factors.prior("w", PRIOR),
        },
    )
    result = blr.fit(blr.conjugate(), two, None, {"x": X, "y": X[:, 0]}, steps=1)
    with pytest.raises(ValueError, match="Pass factor=…"):
        result.loo()
    with pytest.raises(ValueError, match="'prior' has no rows"):
        result.loo("prior")
    assert result.loo("a").proper.all()


@pytest.mark.extended
def test_sites_are_saved_with_the_result(tmp_path):
    y = (X[:, 0] > 0).astype(float)
    model = blr.Model(
        {"w": PRIOR},
        {"prior": factors.prior("w", PRIOR), "y": factors.bernoulli_logit("y", {"w": "x"})},
        size=40,
    )
    rule = blr.cvi(0.5, sites=True)
    result = blr.fit(rule, model, None, {"x": X, "y": y}, steps=10)
    result.save(tmp_path / "run.blr")
    loaded = blr.load(tmp_path / "run.blr")
    ahead = blr.fit(rule, model, loaded, {"x": X, "y": y}, steps=5)
    straight = blr.fit(rule, model, None, {"x": X, "y": y}, steps=15)
    for one, other in zip(jax.tree.leaves(ahead.state), jax.tree.leaves(straight.state), strict=True):
        assert_allclose(one, other, rtol=1e-12)


@pytest.mark.extended
def test_a_grid_that_is_too_coarse_is_said():
    """Two outputs a row under a wide prior: the grid of the cavity has 64 nodes in each, far apart."""
    x, y = np.eye(2)[[0, 1]], np.array([[4.0, 0.0], [0.0, 3.0]])
    prior = blr.Gaussian(jnp.zeros((2, 2)), jnp.eye(4) / 5.0**2)
    narrow = blr.Gaussian(jnp.zeros((2, 2)), jnp.eye(4))
    predict = lambda p: blr.Model(
        {"w": p}, {"prior": factors.prior("w", p), "y": factors.student_t("y", {"w": "x"}, scale=0.1)}, size=2
    )
    data = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    wide = blr.fit(blr.cvi(), predict(prior), None, data, steps=400, tolerance=1e-12)
    with pytest.warns(UserWarning, match="2 of 2 rows are known to about"):
        wide.loo()
    counts = blr.Model(
        {"w": narrow}, {"p": factors.prior("w", narrow), "y": factors.poisson_exp("y", {"w": "x"})}, size=2
    )
    blr.fit(blr.cvi(), counts, None, data, steps=400, tolerance=1e-6).loo()  # without a warning
