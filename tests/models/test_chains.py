"""Likelihoods that are not Gaussian on a chain, and state spaces that are learnt."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import kalman
from bayesrule.models.linear_gaussian import linear_gaussian, state_space
from bayesrule.models.sequences import sequences

# Optional: the dev extra installs it.
macrodata = pytest.importorskip("statsmodels.datasets").macrodata

DATA = Path(__file__).parents[1] / "reference" / "data"


def walk(level, variance, coefficient, length):
    """An AR(1) around a level, as a chain and as a dense process."""
    start = variance / (1 - coefficient**2)
    offset = level * (1 - coefficient)
    space = blr.StateSpace(
        [[coefficient]], [[variance]], [1.0], jnp.array([level]), jnp.array([[start]]), jnp.array([offset])
    )
    lags = jnp.abs(jnp.arange(length)[:, None] - jnp.arange(length))
    return blr.GaussianChain(space, length), blr.GaussianProcess(start * coefficient**lags, level)


def observations(kind):
    rng = np.random.default_rng(0)
    f = 0.3 * rng.normal(size=80).cumsum()
    y = {
        "bernoulli_logit": (rng.uniform(size=80) < 1 / (1 + np.exp(-f))).astype(float),
        "volatility": np.exp(0.5 * f) * rng.normal(size=80),
    }[kind]
    y[10:14] = np.nan
    return y


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["bernoulli_logit", "volatility"])  # counts and Student's t: tests/models/test_gp.py
def test_a_chain_is_the_dense_process_that_it_is(kind):
    """One model, two blocks for it: the same q, and the same bound, by the same rule."""
    actual = []
    for block in walk(0.2, 0.1, 0.9, 80):
        model = blr.Model({"f": block}, {"y": getattr(factors, kind)("y", {"f": None})})
        rule = blr.cvi(0.5).replace(guard=blr.Backtracking(monotone=True))
        actual.append(blr.fit(rule, model, None, {"y": observations(kind)}, steps=80, tolerance=1e-16))
    chain, dense = actual
    assert chain.reason == dense.reason == "converged"
    assert_allclose(chain.q["f"].mean, dense.q["f"].mean, atol=1e-7)
    assert_allclose(chain.q["f"].variance, dense.q["f"].variance, atol=1e-7)
    assert_allclose(chain.bound, dense.bound, atol=1e-9)


@pytest.mark.extended
@pytest.mark.parametrize("noise", [0.7, np.linspace(0.2, 2.0, 40)], ids=["constant", "changing"])
def test_the_smoother_is_one_step_of_the_rule(noise):
    """`kalman.smooth` calls the smoother directly; `conjugate()` reaches it by one step with ρ = 1, from any q."""
    trend = blr.StateSpace([[1.0, 1.0], [0.0, 0.9]], np.diag([0.1, 0.02]), [1.0, 0.0], None, 10 * np.eye(2))
    y = np.random.default_rng(1).normal(size=40).cumsum()
    y[7:11] = np.nan
    likelihood = factors.linear("y", {"x": None}, precision=1 / jnp.asarray(noise))
    model = blr.Model({"x": blr.GaussianChain(trend, 40)}, {"y": likelihood})
    result = blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1)
    mean, covariance = result.q["x"].states()
    smoothed = kalman.smooth(trend, y, noise, pairs=True)
    assert_allclose(smoothed.mean, mean, rtol=1e-12, atol=1e-12)
    assert_allclose(smoothed.covariance, covariance, rtol=1e-12, atol=1e-12)
    assert_allclose(smoothed.pairs, result.q["x"].pairs(), rtol=1e-12, atol=1e-12)
    filtered, q = kalman.filter(trend, y, noise), result.q["x"].filtered()
    assert_allclose(filtered.mean, q.mean, rtol=1e-12, atol=1e-12)
    assert_allclose(filtered.covariance, q.covariance, rtol=1e-12, atol=1e-12)
    assert_allclose(filtered.log_likelihood, result.bound, rtol=1e-12)  # A(λ) and the messages' constants


@pytest.mark.extended
def test_stochastic_volatility_is_what_a_long_nuts_run_says():
    """US growth, its log-variance an AR(1): within 0.1 posterior deviations of NumPyro's moments (`make_nuts.py`)."""
    growth = 100 * np.diff(np.log(macrodata.load_pandas().data["realgdp"].to_numpy()))
    growth = growth - growth.mean()
    block, _ = walk(np.log(growth.var()), 0.09, 0.95, len(growth))
    model = blr.Model({"f": block}, {"y": factors.volatility("y", {"f": None})})
    result = blr.fit(blr.cvi(0.7), model, None, {"y": growth}, steps=100, tolerance=1e-10)
    assert result.reason == "converged"
    nuts = json.loads((DATA / "nuts_volatility.json").read_text())
    places, sd = np.array(nuts["places"]), np.array(nuts["sd"])
    miss = np.abs(result.q["f"].mean[places] - np.array(nuts["mean"]))
    assert np.all(miss < 0.1 * sd + 4 * np.array(nuts["mean_error"]))
    ratio = np.abs(np.sqrt(result.q["f"].variance[places]) - sd)
    assert np.all(ratio < 0.05 * sd + 4 * np.array(nuts["sd_error"]))


def turning(series=1, steps=60):
    rng = np.random.default_rng(1)
    A, C = np.array([[0.9, 0.3], [-0.3, 0.9]]), rng.normal(size=(3, 2))
    space = blr.StateSpace(A, np.eye(2), C)
    _, y = kalman.simulate(jax.random.key(0), space, 0.2, steps, (series,))
    y = np.array(y)
    y[rng.uniform(size=y.shape) < 0.1] = np.nan
    return y - np.nanmean(y, axis=(0, 1))


@pytest.mark.extended
def test_em_is_expectation_maximisation():
    """One sweep against the smoother's moments and the textbook's M-step, and the likelihood never falls."""
    y = turning()
    data = {"y": sequences(y)}
    model = linear_gaussian(y, 2)
    first = blr.fit(blr.em(), model, None, data, steps=1)
    A, C = 0.5 * jnp.eye(2), model.blocks["loadings"].mean
    noise = 1 / model.blocks["noise"].mode()
    start = blr.StateSpace(A, jnp.eye(2), C, None, 10 * jnp.eye(2))
    actual = kalman.smooth(start, y[0], noise, pairs=True)
    square = actual.covariance + actual.mean[:, :, None] * actual.mean[:, None, :]
    crossed = actual.pairs + actual.mean[1:, :, None] * actual.mean[:-1, None, :]
    assert_allclose(first.q["transition"].mean, crossed.sum(0) @ np.linalg.inv(square[:-1].sum(0)), atol=1e-9)
    for m in range(3):
        there = ~np.isnan(y[0, :, m])
        loadings = np.linalg.solve(square[there].sum(0), (y[0, there, m, None] * actual.mean[there]).sum(0))
        assert_allclose(first.q["loadings"].mean[m], loadings, atol=1e-9)
        posterior_variance = np.einsum("d,tde,e->t", loadings, actual.covariance[there], loadings)
        variance = np.mean((y[0, there, m] - actual.mean[there] @ loadings) ** 2 + posterior_variance)
        assert_allclose(1 / first.q["noise"].mean[m], variance, atol=1e-9)
    longer = blr.fit(blr.em(), model, None, data, steps=60)
    assert np.all(np.diff(longer.trace["bound"]) > 0)
    system, noise = state_space(longer.q)
    gap = kalman.log_likelihood(system, y[0], noise) - longer.bound  # q(x) is a sweep older than the parameters
    assert 0 <= gap < 0.2


@pytest.mark.extended
def test_learnt_from_several_series():
    """Batches of series come close to all of them; a state that is not needed fades."""
    y = turning(series=12, steps=30)
    data, model = {"y": sequences(y)}, linear_gaussian(y, 3, priors="default")
    whole = blr.fit(blr.vmp(), model, None, data, steps=60)
    assert np.all(np.diff(whole.trace["bound"]) > -1e-9)
    sizes = np.sort(1 / np.sqrt(whole.q["scales"].mean))
    assert sizes[0] < 0.1 * sizes[1]
    schedule = lambda t: (t + 2.0) ** -0.7
    part = blr.fit(blr.svi(schedule), model, None, data, steps=200, batch_size=4, key=jax.random.key(1))
    assert model.bound(part.q, data) > whole.trace["bound"][10]


@pytest.mark.parametrize(
    ("y", "states", "message"),
    [
        (np.ones((1, 3)), 2, "at least two steps"),
        (np.full((9, 2), np.nan), 2, "all but missing"),
        (np.ones((9, 2)), 2, "do not vary"),
        (np.eye(9), 0, "a whole number above 0"),
    ],
)
def test_bad_series(y, states, message):
    with pytest.raises(ValueError, match=message):
        linear_gaussian(y, states)


@pytest.mark.parametrize(
    ("y", "noise", "message"),
    [
        (np.ones((5, 2)), 1.0, "observations of shape"),
        (np.ones(0), 1.0, "observations of shape"),
        (np.ones(5), -1.0, "is a variance"),
        (np.ones(5), np.ones(3), "one of the shapes"),
        (np.array([1.0, np.inf]), 1.0, "infinite entries, the first one in step 1"),
    ],
)
def test_bad_observations(y, noise, message):
    space = blr.StateSpace(np.eye(1), np.eye(1), np.ones(1))
    with pytest.raises(ValueError, match=message):
        kalman.smooth(space, y, noise)


@pytest.mark.extended
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_infinite_observations_under_jit(infinity):
    """Nothing can be raised there: the density is 0, and no state that is given the observation exists."""
    space = blr.StateSpace(np.eye(1), np.eye(1), np.ones(1))
    y = jnp.array([0.5, -0.2, infinity, 0.3])
    value, slope = jax.jit(jax.value_and_grad(lambda noise, y: kalman.log_likelihood(space, y, noise)))(1.0, y)
    assert value == -np.inf
    assert np.isfinite(slope)
    filtered = jax.jit(lambda y: kalman.filter(space, y, 1.0))(y)
    assert filtered.log_likelihood == -np.inf
    assert_allclose(filtered.mean[:2], kalman.filter(space, y[:2], 1.0).mean)
    assert np.all(np.isnan(filtered.mean[2:]))
    assert np.all(np.isnan(jax.jit(lambda y: kalman.smooth(space, y, 1.0))(y).mean))


def dense_log_likelihood(system, y, noise):
    """log N(y | Hm, HPHᵀ + R) of a walk with one state, by its covariance."""
    steps = np.arange(len(y))
    variances = float(system.covariance[0, 0]) + float(system.noise[0, 0]) * steps
    cov = np.minimum.outer(variances, variances) + np.diag(np.broadcast_to(noise, len(y)))
    there = ~np.isnan(y)
    cov, observed = cov[np.ix_(there, there)], y[there]
    far = observed @ np.linalg.solve(cov, observed)
    return -0.5 * (far + np.linalg.slogdet(cov)[1] + there.sum() * np.log(2 * np.pi))


@pytest.mark.extended
@pytest.mark.parametrize("noise", [1e-3, np.array([1e-3, 0.5, 1.0, 2.0, 0.1])])
def test_a_vague_prior_leaves_the_noise_as_it_is(noise):
    y = np.array([0.3, -0.2, np.nan, 0.8, 1.1])
    system = blr.StateSpace([[1.0]], [[0.1]], [1.0], covariance=[[1e6]])
    actual = kalman.log_likelihood(system, y, noise)
    assert_allclose(actual, dense_log_likelihood(system, y, noise), rtol=1e-8)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), system)
    assert_allclose(kalman.log_likelihood(single, y.astype(np.float32), np.float32(noise)), actual, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("parallel", [False, True])
def test_gradients_where_a_variance_is_zero(parallel):
    """Against differences from the side on which there are state spaces."""
    y = np.sin(np.arange(12.0))

    def value(p, q, r):
        system = blr.StateSpace([[1.0]], jnp.reshape(q, (1, 1)), [1.0], covariance=jnp.reshape(p, (1, 1)))
        return kalman.log_likelihood(system, y, r, parallel=parallel)

    slopes = jax.jit(jax.grad(value, argnums=(0, 1, 2)))
    for place, base in ((0, (0.0, 0.5, 1.0)), (1, (0.0, 0.0, 1.0)), (2, (1.0, 0.5, 0.0))):
        slope = slopes(*map(jnp.asarray, base))[place]
        ahead = [list(base), list(base)]
        ahead[0][place], ahead[1][place] = 1e-6, 2e-6
        one, two = (value(*map(jnp.asarray, b)) for b in ahead)
        first = value(*map(jnp.asarray, base))
        expected = (4 * (one - first) - (two - first)) / 2e-6  # to second order
        assert_allclose(slope, expected, rtol=1e-3)


def test_square_noise_is_a_covariance():
    """Where there are as many steps as outputs too: a step more that is missing says nothing."""
    space = blr.StateSpace(0.5 * np.eye(2), np.eye(2), np.eye(2))
    y, R = np.array([[0.5, -1.0], [1.0, 0.3]]), np.array([[1.0, -0.5], [-0.5, 1.0]])
    longer = np.concatenate([y, np.full((1, 2), np.nan)])
    assert_allclose(kalman.log_likelihood(space, y, R), kalman.log_likelihood(space, longer, R), rtol=1e-12)
    assert kalman.forecast(space, y, R, 2).mean.shape == (2, 2)


def test_drawn_series_have_the_noise_of_their_step():
    space = blr.StateSpace([[0.0]], [[1e-12]], [1.0], covariance=[[1e-12]])
    _, y = kalman.simulate(jax.random.key(0), space, np.array([1e-8, 1.0, 4.0]), 3, (4000,))
    assert_allclose(np.asarray(y).std(0), [1e-4, 1.0, 2.0], rtol=0.05)
    with pytest.raises(ValueError, match="is a variance"):
        kalman.simulate(jax.random.key(0), space, -1.0, 3)


@pytest.mark.extended
def test_one_step_of_a_system_that_changes():
    space = blr.StateSpace(np.zeros((0, 2, 2)), np.zeros((0, 2, 2)), np.ones(2))
    assert_allclose(kalman.smooth(space, np.array([3.0]), 1.0).mean[0], [1.0, 1.0])
    assert_allclose(blr.GaussianChain(space, 1).variance, [2.0])
    with pytest.raises(ValueError, match="T − 1 entries"):
        blr.StateSpace(np.zeros((9, 2, 2)), np.eye(2), np.ones((7, 1, 2)))


def test_what_is_certain():
    still = blr.StateSpace([[1.0]], [[0.0]], [1.0], jnp.array([2.0]), [[0.0]])
    assert float(kalman.log_likelihood(still, np.array([2.0, 2.0]), 0.0)) == 0.0
    assert float(kalman.log_likelihood(still, np.array([2.0, 3.0]), 0.0)) == -np.inf


@pytest.mark.extended
def test_a_prior_that_is_the_base_measure():
    """It is not left out of a bound, and members over different ones are not compared."""
    chain, _ = walk(0.0, 1.0, 0.9, 6)
    noise = blr.Gamma(2.0, 1.0)
    terms = {"prior": factors.prior("noise", noise), "y": factors.linear("y", {"f": None}, precision="noise")}
    model = blr.Model({"f": chain, "noise": noise}, terms)
    result = blr.fit(blr.em(), model, None, {"y": np.arange(6.0)}, steps=3, check=True)
    assert not isinstance(result.q["f"], blr.Peak)
    with pytest.raises(ValueError, match="leave out of the bound"):
        blr.fit(blr.em("f"), model, None, {"y": np.arange(6.0)}, steps=1)
    with pytest.raises(ValueError, match="different priors"):
        chain.kl(walk(0.0, 2.0, 0.9, 6)[0])
    with pytest.raises(ValueError, match=r"Block .* \(GaussianChain\) cannot be local"):
        blr.Model({}, {"y": factors.poisson_exp("y", {"f": None})}, local={"f": chain})


@pytest.mark.extended
def test_a_precision_for_each_row():
    chain, dense = walk(0.0, 1.0, 0.9, 6)
    y, precision = np.arange(6.0), np.linspace(0.5, 3.0, 6)
    bounds = []
    for block in (chain, dense):
        model = blr.Model({"f": block}, {"y": factors.linear("y", {"f": None}, precision=precision)})
        bounds.append(blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1).bound)
    exact = kalman.log_likelihood(chain.system, y, 1 / precision)
    assert_allclose(bounds, [exact, exact], rtol=1e-10)


@pytest.mark.extended
def test_nothing_observed_is_the_prior():
    space = blr.StateSpace([[1.0]], [[1.0]], [1.0])
    y = np.full(5, np.nan)
    assert float(kalman.log_likelihood(space, y, 1.0)) == 0.0
    assert_allclose(kalman.smooth(space, y, 1.0).covariance[:, 0, 0], np.arange(1.0, 6.0))
    one = kalman.smooth(space, np.array([2.0]), 1.0)
    assert_allclose([one.mean[0, 0], one.covariance[0, 0, 0]], [1.0, 0.5])


@pytest.mark.extended
def test_an_unstable_system_that_is_observed():
    """A state that doubles every step is smoothed as well as any other."""
    space = blr.StateSpace([[2.0]], [[1.0]], [1.0])
    _, y = kalman.simulate(jax.random.key(0), space, 1.0, 200)
    for parallel in (False, True):
        actual = kalman.smooth(space, y, 1.0, parallel=parallel)
        assert np.all(np.isfinite(actual.mean))
        assert np.all(actual.covariance > 0)
        assert_allclose(actual.covariance[100, 0, 0], actual.covariance[101, 0, 0], rtol=1e-9)
