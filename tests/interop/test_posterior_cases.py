"""The posteriors that inference is judged by: their densities against SciPy's, their moments against quadrature."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import constrain_fn, initialize_model, log_density
from posterior_cases import Moments, judge, load_cases
from scipy import special, stats
from scipy.integrate import solve_ivp
from synthetic_posteriors import LOTKA_END, volatilities

# These check the models of a benchmark and not the library, and compile one program for each of them.
pytestmark = pytest.mark.extended

CASES = {case.name: case for case in load_cases()}


def joint(case, params):
    """The model's log density of constrained values, with the data."""
    return float(log_density(case.model, case.args, case.kwargs, params)[0])


def check_differences(case, ours, points):
    """Log densities agree up to a constant: the normalisation of a truncated prior, say."""
    actual = np.array([joint(case, point) for point in points])
    expected = np.array([ours(**point) for point in points])
    np.testing.assert_allclose(actual - actual[0], expected - expected[0], rtol=1e-9, atol=1e-8)


def regression_points(case, size):
    """Three places around the posterior of β and σ."""
    moments = case.reference["constrained"]
    for shift in (0.0, 1.0, -0.7):
        at = moments.mean + shift * moments.sd
        yield {"beta": at[:size], "sigma": at[size]}


@pytest.mark.parametrize(
    ("name", "prior"),
    [
        ("earnings", lambda beta, sigma: 0.0),
        ("kidscore_interaction_c", lambda beta, sigma: 0.0),
        ("nes1972", lambda beta, sigma: 0.0),
        ("kidscore_momhsiq", lambda beta, sigma: stats.halfcauchy.logpdf(sigma, scale=2.5)),
        ("blr", lambda beta, sigma: stats.norm.logpdf(beta, 0, 10).sum() + stats.halfnorm.logpdf(sigma, scale=10)),
    ],
)
def test_linear_regressions(name, prior):
    case = CASES[name]
    X, y = case.args
    density = lambda beta, sigma: prior(beta, sigma) + stats.norm.logpdf(y, X @ beta, sigma).sum()
    check_differences(case, density, list(regression_points(case, X.shape[1])))


@pytest.mark.parametrize("name", ["earnings", "kidscore_interaction_c", "nes1972"])
def test_reference_of_flat_regressions_is_the_closed_form(name):
    """β has a Student's t with N − p − 1 degrees of freedom, because the prior of σ is flat."""
    case = CASES[name]
    X, y = case.args
    beta = np.linalg.lstsq(X, y, rcond=None)[0]
    rest = np.sum((y - X @ beta) ** 2)
    dof = len(y) - X.shape[1] - 1
    sd = np.sqrt(rest / (dof - 2) * np.diag(np.linalg.inv(X.T @ X)))
    true = case.reference["unconstrained"]
    size = X.shape[1]
    assert np.all(np.abs(true.mean[:size] - beta) < 4 * true.mean_error[:size])
    assert np.all(np.abs(true.sd[:size] - sd) < 4 * true.sd_error[:size])


def test_time_series():
    case = CASES["arK"]
    lags, later = case.args
    assert lags.shape == (195, 5)

    def autoregression(alpha, beta, sigma):
        prior = stats.norm.logpdf(np.append(beta, alpha), 0, 10).sum() + stats.halfcauchy.logpdf(sigma, scale=2.5)
        y = np.concatenate([lags[0, ::-1], later])
        means = [alpha + sum(beta[k] * y[t - 1 - k] for k in range(5)) for t in range(5, len(y))]
        return prior + stats.norm.logpdf(y[5:], means, sigma).sum()

    beta = np.array([0.7, 0.4, 0.1, 0.0, -0.3])
    points = [{"alpha": 0.1 * k, "beta": beta + 0.02 * k, "sigma": 0.15 + 0.01 * k} for k in range(3)]
    check_differences(case, autoregression, points)

    case = CASES["arma11"]
    (y,) = case.args

    def arma(mu, phi, theta, sigma):
        errors = [y[0] - (mu + phi * mu)]
        for before, now in itertools.pairwise(y):
            errors.append(now - (mu + phi * before + theta * errors[-1]))
        prior = stats.norm.logpdf(mu, 0, 10) + stats.norm.logpdf([phi, theta], 0, 2).sum()
        return prior + stats.halfcauchy.logpdf(sigma, scale=2.5) + stats.norm.logpdf(errors, 0, sigma).sum()

    check_differences(
        case, arma, [{"mu": 0.1 * k, "phi": 0.9, "theta": 0.1 * k, "sigma": 0.2 + 0.1 * k} for k in range(3)]
    )

    case = CASES["garch"]
    y, first = case.args

    def garch(mu, alpha0, alpha1, beta1):
        variances = [first**2]
        for before in y[:-1]:
            variances.append(alpha0 + alpha1 * (before - mu) ** 2 + beta1 * variances[-1])
        prior = stats.norm.logpdf(mu, 0, 10) + stats.halfnorm.logpdf(alpha0, scale=5) - np.log(1 - alpha1)
        return prior + stats.norm.logpdf(y, mu, np.sqrt(variances)).sum()

    points = [{"mu": 0.1 * k, "alpha0": 0.2, "alpha1": 0.1 + 0.2 * k, "beta1": 0.4} for k in range(3)]
    check_differences(case, garch, points)


def test_classifications():
    case = CASES["dogs"]
    y = case.args[2]

    def dogs(beta):
        total = stats.norm.logpdf(beta, 0, 100).sum()
        for row in y:
            avoided = shocked = 0
            for shock in row:
                u = beta[0] + beta[1] * avoided + beta[2] * shocked
                total -= np.logaddexp(0, -u if shock else u)
                avoided, shocked = avoided + (shock == 0), shocked + shock
        return total

    check_differences(case, dogs, [{"beta": np.array([1.5, -0.4, -0.2]) * scale} for scale in (1.0, 0.5, 1.2)])

    case = CASES["german_credit_logistic"]
    X, y = case.args
    np.testing.assert_allclose(X[:, :-1].std(0), 1)
    credit = lambda w: stats.norm.logpdf(w).sum() + stats.bernoulli.logpmf(y, special.expit(X @ w)).sum()
    mean = case.reference["unconstrained"].mean
    check_differences(case, credit, [{"w": mean * scale} for scale in (1.0, 0.5, 0.0)])


def test_gaussian_process_and_brownian_motion():
    case = CASES["gp_regr"]
    x, y = case.args

    def density(rho, alpha, sigma):
        covariance = alpha**2 * np.exp(-((x[:, None] - x) ** 2) / (2 * rho**2)) + sigma * np.eye(11)
        prior = stats.gamma.logpdf(rho, 25, scale=1 / 4) + stats.halfnorm.logpdf(alpha, scale=2)
        return prior + stats.halfnorm.logpdf(sigma) + stats.multivariate_normal.logpdf(y, cov=covariance)

    check_differences(case, density, [{"rho": 6.0 + k, "alpha": 2.0 - 0.5 * k, "sigma": 1.5} for k in range(3)])

    case = CASES["brownian_motion"]
    y, observed, innovation, noise = case.args
    times = np.arange(1, len(y) + 1)
    prior = innovation**2 * np.minimum(times[:, None], times)
    seen = prior[:, observed]
    gain = np.linalg.solve(prior[np.ix_(observed, observed)] + noise**2 * np.eye(observed.sum()), seen.T).T
    mean, sd = gain @ y[observed], np.sqrt(np.diag(prior - gain @ seen.T))
    assert judge(case, Moments.exact(case.reference["unconstrained"].names, mean, sd)).within(0.0, 0.01)
    walk = lambda x: (
        stats.norm.logpdf(np.diff(x, prepend=0), 0, innovation).sum()
        + stats.norm.logpdf(y[observed], x[observed], noise).sum()
    )
    check_differences(case, walk, [{"x": mean}, {"x": mean + 0.1}, {"x": 0 * mean}])


def schools_moments(y, sigma, names):
    """Moments of θ, μ, τ and log τ by a sum over log τ: given τ, everything else is Gaussian."""
    grid = np.linspace(-14, 6, 4001)
    logs, values, squares = [], [], []
    for u in grid:
        tau = np.exp(u)
        precision = 1 / (sigma**2 + tau**2)
        variance = 1 / (1 / 25 + precision.sum())
        centre = variance * (precision @ y)
        evidence = stats.norm.logpdf(y, 0, 1 / np.sqrt(precision)).sum() + centre**2 / (2 * variance)
        logs.append(evidence + 0.5 * np.log(variance) + stats.halfcauchy.logpdf(tau, scale=5) + u)
        share = tau**2 * precision
        theta = share * y + (1 - share) * centre
        spread = share * sigma**2 + (1 - share) ** 2 * variance
        values.append([*theta, centre, tau, u])
        squares.append([*(theta**2 + spread), centre**2 + variance, tau**2, u**2])
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(values)
    return Moments.exact(names, mean, np.sqrt(weights @ np.array(squares) - mean**2))


def test_eight_schools_both_ways():
    centred, noncentred = CASES["eight_schools_centered"], CASES["eight_schools_noncentered"]
    sigma, y = centred.args
    exact = schools_moments(y, sigma, (*centred.reference["constrained"].names, "log_tau"))
    true = centred.reference["constrained"]
    assert np.all(np.abs(exact.mean[:-1] - true.mean) < 4 * true.mean_error)
    assert np.all(np.abs(exact.sd[:-1] - true.sd) < 4 * true.sd_error)
    true = centred.reference["unconstrained"]
    assert abs(exact.mean[-1] - true.mean[-1]) < 4 * true.mean_error[-1]
    assert abs(exact.sd[-1] - true.sd[-1]) < 4 * true.sd_error[-1]

    def density(mu, tau, theta):
        prior = stats.norm.logpdf(mu, 0, 5) + stats.halfcauchy.logpdf(tau, scale=5)
        return prior + stats.norm.logpdf(theta, mu, tau).sum() + stats.norm.logpdf(y, theta, sigma).sum()

    points = [{"mu": 4.0 - k, "tau": 1.0 + k, "theta": 3.0 + k * np.arange(8.0)} for k in range(3)]
    check_differences(centred, density, points)
    for point in points:
        white = {"mu": point["mu"], "tau": point["tau"], "theta_trans": (point["theta"] - point["mu"]) / point["tau"]}
        expected = density(**point) + 8 * np.log(point["tau"])
        assert joint(noncentred, white) == pytest.approx(expected, rel=1e-10)


def sum_over_paths(log_emission, log_transition, log_first):
    """log p(y) of a hidden Markov model by enumeration of all paths."""
    length, states = log_emission.shape
    total = []
    for path in itertools.product(range(states), repeat=length):
        steps = sum(log_transition[a, b] for a, b in itertools.pairwise(path))
        total.append(log_first[path[0]] + steps + sum(log_emission[t, k] for t, k in enumerate(path)))
    return special.logsumexp(total)


def test_hidden_markov_models():
    case = CASES["hmm_example"]
    y = case.args[0][:8]

    def density(theta1, theta2, mu):
        emission = stats.norm.logpdf(y[:, None], mu)
        prior = stats.norm.logpdf(mu, [3, 10]).sum()
        return prior + sum_over_paths(emission, np.log(np.stack([theta1, theta2])), np.zeros(2))

    points = [
        {"theta1": np.array([p, 1 - p]), "theta2": np.array([0.2, 0.8]), "mu": np.array([2.0 + p, 9.0])}
        for p in (0.3, 0.6, 0.9)
    ]
    check_differences(replace(case, args=(y,)), density, points)

    case = CASES["hmm_poisson"]
    counts = case.args[0][:8]

    def poisson(rows, mu):
        prior = stats.gamma.logpdf(mu, 2, scale=1 / 0.3).sum() + 3 * np.log(rows[0, 0] * rows[1, 1])
        return prior + sum_over_paths(stats.poisson.logpmf(counts[:, None], mu), np.log(rows), np.log([0.5, 0.5]))

    points = [{"rows": np.array([[p, 1 - p], [0.2, 0.8]]), "mu": np.array([1.0 + p, 7.0])} for p in (0.3, 0.6, 0.9)]
    check_differences(replace(case, args=(counts,)), poisson, points)


def test_mixtures():
    case = CASES["low_dim_gauss_mix"]
    (y,) = case.args

    def density(mu, sigma, theta):
        parts = np.log([theta, 1 - theta]) + stats.norm.logpdf(y[:, None], mu, sigma)
        prior = stats.norm.logpdf(mu, 0, 2).sum() + stats.halfnorm.logpdf(sigma, scale=2).sum()
        return prior + stats.beta.logpdf(theta, 5, 5) + special.logsumexp(parts, axis=1).sum()

    points = [{"mu": np.array([-2.0, 2.0 + k]), "sigma": np.array([1.0, 0.8]), "theta": 0.3} for k in range(3)]
    check_differences(case, density, points)


def test_lotka_volterra_against_an_adaptive_solver():
    case = CASES["lotka_volterra"]
    times, y = case.args

    def density(rates, first, sigma):
        slope = lambda t, z: [z[0] * (rates[0] - rates[1] * z[1]), z[1] * (rates[3] * z[0] - rates[2])]
        solved = solve_ivp(slope, (0, LOTKA_END), first, t_eval=times, method="LSODA", rtol=1e-10, atol=1e-10)
        prior = stats.norm.logpdf(np.log(rates), np.log([0.6, 0.3, 0.8, 0.2]), 0.5).sum() - np.log(rates).sum()
        prior += stats.norm.logpdf(np.log(first), np.log([4, 2]), 0.5).sum() - np.log(first).sum()
        prior += stats.norm.logpdf(np.log(sigma), -1.5, 0.5) - np.log(sigma)
        return prior + stats.norm.logpdf(np.log(y), np.log(solved.y.T), sigma).sum()

    truth = np.array([0.6, 0.3, 0.8, 0.2])
    points = [{"rates": truth * scale, "first": np.array([5.0, 1.5]), "sigma": 0.3} for scale in (1.0, 1.05, 0.95)]
    actual = np.array([joint(case, point) for point in points])
    np.testing.assert_allclose(actual, [density(**point) for point in points], atol=0.01)


def test_volatilities_from_the_latent_sites():
    case = CASES["stochastic_volatility"]
    rng = np.random.default_rng(0)
    point = {"mu": -0.5, "persistence": 0.95, "sigma": 0.3, "white": rng.normal(size=100)}
    (h,) = volatilities({name: np.asarray(value)[None] for name, value in point.items()})
    (y,) = case.args
    prior = stats.norm.logpdf(-0.5) + stats.beta.logpdf(0.95, 20, 3) + stats.norm.logpdf(point["white"]).sum()
    prior += stats.norm.logpdf(np.log(0.3), -1.5, 0.5) - np.log(0.3)
    expected = prior + stats.norm.logpdf(y, 0, np.exp(h / 2)).sum()
    assert joint(case, point) == pytest.approx(expected, rel=1e-10)


# Their tails reach beyond every grid, or their coordinates are not what is compared.
WITHOUT_GRID = {"student_3", "funnel_2", "funnel_2_density"}
FLAT = [case for case in CASES.values() if case.dimension <= 2 and case.name not in WITHOUT_GRID]


@pytest.mark.parametrize("case", FLAT, ids=lambda case: case.name)
def test_moments_by_quadrature_of_the_model_itself(case):
    """The references were made without the model; a sum over NumPyro's unconstrained coordinates gives the same."""
    model, args, kwargs = case.as_numpyro()
    start = initialize_model(jax.random.key(0), model, model_args=args, model_kwargs=kwargs)
    flat, unravel = jax.flatten_util.ravel_pytree(start.param_info.z)
    true = case.reference["unconstrained"]
    assert len(flat) == len(true.names) == case.dimension
    points = 4001 if len(flat) == 1 else 321
    axes = [np.linspace(m - 13 * s, m + 13 * s, points) for m, s in zip(true.mean, true.sd, strict=True)]
    mesh = jnp.stack([part.ravel() for part in np.meshgrid(*axes, indexing="ij")], axis=1)
    logs = jax.jit(jax.vmap(lambda z: -start.potential_fn(unravel(z))))(mesh)
    weights = np.nan_to_num(np.exp(logs - jnp.nanmax(logs)))
    constrain = lambda z: constrain_fn(model, args, kwargs, unravel(z))
    draws = {name: np.asarray(value) for name, value in jax.jit(jax.vmap(constrain))(mesh).items()}
    found = {}
    for space, true in case.reference.items():
        values = np.asarray(case.quantities[space](draws))
        mean = np.average(values, axis=0, weights=weights)
        sd = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))
        found[space] = Moments.exact(true.names, mean, sd)
    assert judge(case, found).within(2e-3, 5e-3)


def test_conjugate_cases():
    case = CASES["log_gamma"]
    points = [{"x": np.array([0.5, 1.0, 2.0]) * scale} for scale in (1.0, 0.5, 3.0)]
    check_differences(case, lambda x: stats.gamma.logpdf(x, [0.5, 1, 3]).sum(), points)
    case = CASES["lognormal_rates"]
    exposure, counts = case.args
    rates = lambda rate: stats.lognorm.logpdf(rate, 1).sum() + stats.poisson.logpmf(counts, rate * exposure).sum()
    check_differences(case, rates, [{"rate": np.linspace(0.2, 3, 8) * scale} for scale in (1.0, 0.5, 2.0)])
    case = CASES["simplex"]
    points = [{"p": np.array(p)} for p in ((0.1, 0.3, 0.1, 0.5), (0.25, 0.25, 0.25, 0.25), (0.2, 0.2, 0.05, 0.55))]
    check_differences(case, lambda p: stats.dirichlet.logpdf(p, [13, 31, 6, 54]), points)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_is_complete(case):
    """Draws of the model's own sites can be compared, and the reference itself is without an error."""
    model, args, kwargs = case.as_numpyro()

    def start(key):
        z = initialize_model(key, model, model_args=args, model_kwargs=kwargs).param_info.z
        return z, constrain_fn(model, args, kwargs, z)

    # Shapes are enough, and need no compiling.
    latent, sites = jax.eval_shape(start, jax.random.key(1))
    assert sum(value.size for value in latent.values()) == case.dimension
    draws = {name: np.random.default_rng(0).uniform(size=(3, *value.shape)) for name, value in sites.items()}
    for space, moments in case.reference.items():
        with np.errstate(invalid="ignore"):
            assert case.quantities[space](draws).shape == (3, len(moments.names))
        assert np.all(moments.sd > 0)
        assert np.all(moments.mean_error <= 0.02 * moments.sd)
    assert judge(case, case.reference).within(0.0, 0.0)
    assert sum(mode.weight for mode in case.modes) == pytest.approx(1.0 if case.modes else 0.0)


def test_judge_and_missed_modes():
    case = CASES["two_modes_equal_far"]
    rng = np.random.default_rng(0)
    side = rng.choice([-4.0, 4.0], size=(200_000, 1))
    draws = {"x": side + rng.normal(size=(200_000, 2))}
    assert judge(case, draws).within(0.01, 0.01)
    assert case.missed_modes(draws) == []
    half = {"x": np.abs(draws["x"])}
    assert case.missed_modes(half) == ["low"]
    assert judge(case, half).mean == pytest.approx(4 / np.sqrt(17), abs=0.02)
    assert judge(case, half).sd > 0.7
    wrong = {"x": np.where(draws["x"] > 6, np.nan, draws["x"])}
    assert judge(case, wrong).mean_beyond == np.inf
    # Sixteen draws cannot show an error of 0.1 sd: chance is taken off, and the plain error is still reported.
    few = judge(case, {"x": draws["x"][:16]})
    assert few.mean_beyond < few.mean
    with pytest.raises(ValueError, match="no reference in the constrained space"):
        judge(case, draws, "constrained")
    with pytest.raises(ValueError, match="No such case: nothing"):
        load_cases(names=["nothing"])
