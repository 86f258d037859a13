"""infer: constraints by name, several modes, tails, verdicts and errors."""

import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import bayesrule as blr
from bayesrule.inference import density as density_module
from bayesrule.inference.gaussian import fit_gaussian
from bayesrule.inference.infer import infer_density
from bayesrule.inference.posterior import load_posterior
from bayesrule.numerics import programs

KEY = jax.random.key(0)
DRAWS = 4000


def gamma(p):
    """Gamma(20, 4)."""
    return 19.0 * jnp.log(p["x"]) - 4.0 * p["x"]


def beta(p):
    """Beta(12, 6), on a name inside of a nested tree."""
    x = p["inner"]["x"]
    return 11.0 * jnp.log(x) + 5.0 * jnp.log1p(-x)


def dirichlet(p):
    """Dirichlet(8, 12, 20)."""
    return jnp.array([7.0, 11.0, 19.0]) @ jnp.log(p["x"])


def ordered(p):
    """The order statistics of three numbers of N(1, 2²): a density 3! times their product, on ordered vectors."""
    return math.log(6.0) + jnp.sum(-0.5 * ((p["x"] - 1.0) / 2.0) ** 2 - math.log(2.0) - 0.5 * math.log(2 * math.pi))


# Their moments: the largest of three standard normal numbers has the mean 3/(2√π) and the second moment 1 + √3/(2π).
LARGEST = 1.5 / math.sqrt(math.pi)
OUTER, MIDDLE = 1 + math.sqrt(3) / (2 * math.pi) - LARGEST**2, 1 - math.sqrt(3) / math.pi
ORDERED_MEAN, ORDERED_STD = 1.0 + 2.0 * LARGEST * np.array([-1.0, 0.0, 1.0]), 2.0 * np.sqrt([OUTER, MIDDLE, OUTER])

DIRICHLET = stats.dirichlet([8.0, 12.0, 20.0])
# The density, the start, the constraint by path, the path to the draws, exact means and standard deviations, and the
# logarithm of the density's integral.
CONSTRAINED = {
    "positive": (
        gamma,
        {"x": 1.0},
        {"x": "positive"},
        lambda draws: draws["x"],
        stats.gamma(20.0, scale=0.25).mean(),
        stats.gamma(20.0, scale=0.25).std(),
        math.lgamma(20.0) - 20.0 * math.log(4.0),
    ),
    "unit_interval": (
        beta,
        {"inner": {"x": 0.5}},
        {"inner/x": "unit_interval"},
        lambda draws: draws["inner"]["x"],
        stats.beta(12.0, 6.0).mean(),
        stats.beta(12.0, 6.0).std(),
        math.lgamma(12.0) + math.lgamma(6.0) - math.lgamma(18.0),
    ),
    "simplex": (
        dirichlet,
        {"x": (3,)},
        {"x": "simplex"},
        lambda draws: draws["x"],
        DIRICHLET.mean(),
        np.sqrt(DIRICHLET.var()),
        math.lgamma(8.0) + math.lgamma(12.0) + math.lgamma(20.0) - math.lgamma(40.0),
    ),
    "ordered_vector": (
        ordered,
        {"x": jax.ShapeDtypeStruct((3,), float)},
        {"x": "ordered_vector"},
        lambda draws: draws["x"],
        ORDERED_MEAN,
        ORDERED_STD,
        0.0,
    ),
}


@pytest.mark.sampled("positive", "ordered_vector")
@pytest.mark.parametrize("name", CONSTRAINED)
def test_constraints_with_their_jacobians(name):
    """Moments of the constrained values within what "trust" promises, and the evidence within its error."""
    function, start, constraints, of, mean, deviation, evidence = CONSTRAINED[name]
    posterior = blr.infer(function, start, constraints=constraints, key=KEY)
    assert posterior.trust == "trust"
    draws = of(posterior.samples(jax.random.key(1), DRAWS))
    assert draws.shape == (DRAWS, *np.shape(mean))
    # The promise, and four standard errors of the draws themselves.
    error = 4 / math.sqrt(DRAWS)
    assert np.all(np.abs(np.mean(draws, axis=0) - mean) < (0.1 + error) * deviation)
    assert_allclose(np.std(draws, axis=0), deviation, rtol=0.1 + error)
    assert abs(posterior.log_evidence - evidence) < 4 * posterior.log_evidence_error + 1e-3
    # Importance-resampled draws have no error of the family, and the standard errors of a few hundred draws.
    refined = of(posterior.samples(jax.random.key(2), DRAWS, refined=True))
    assert np.all(np.abs(np.mean(refined, axis=0) - mean) < 0.08 * deviation)
    assert_allclose(np.std(refined, axis=0), deviation, rtol=0.08)


@pytest.mark.parametrize(
    ("start", "constraints", "message"),
    [
        ({"x": 1.0}, {"y": "positive"}, r"names \['y'\].*these are \['x'\]"),
        ({"x": 1.0}, {"x": "positve"}, "'positve'.*no constraint of that name, only .*positive"),
        ({"x": 1.0}, {"x": "boolean"}, "'x' is constrained to be discrete"),
        ({"x": -1.0}, {"x": "positive"}, "start of 'x', -1.0, is not inside of its constraint"),
        ({}, None, "needs a start"),
        ({"x": jnp.zeros(20_001)}, None, "20001 are too many .*blr.ivon"),
    ],
)
def test_errors_before_anything_is_computed(start, constraints, message):
    with pytest.raises(ValueError, match=message):
        blr.infer(gamma, start, constraints=constraints, key=KEY)


@pytest.mark.parametrize("value", [-jnp.inf, jnp.nan])
def test_a_density_of_no_value_is_an_error(value):
    with pytest.raises(ValueError, match="not a finite number at any start"):
        blr.infer(lambda x, value: value + 0.0 * jnp.sum(x), jnp.zeros(2), args=(jnp.asarray(value),), key=KEY)


def test_an_improper_density_is_an_error_with_the_name_of_the_number():
    """Nothing depends on the second number, so that it has no posterior."""
    with pytest.raises(ValueError, match=r"improper.*free"):
        blr.infer(lambda p: -0.5 * p["held"] ** 2 + 0.0 * p["free"], {"held": 0.0, "free": 0.0}, key=KEY)


def test_a_density_that_rises_for_ever_is_an_error():
    with pytest.raises(ValueError, match=r"improper|No Gaussian has a finite bound"):
        blr.infer(lambda x: jnp.sum(x), jnp.zeros(2), key=KEY)


def normal(p, y, scale):
    """A mean and a scale with weak priors: any data of ten numbers."""
    residuals = jnp.sum(-0.5 * ((y - p["mean"]) / p["scale"]) ** 2 - jnp.log(p["scale"]))
    return residuals - 0.5 * (p["mean"] / scale) ** 2 - p["scale"]


Y = np.random.default_rng(0).normal(3.0, 2.0, size=40)


@pytest.fixture(scope="module")
def fitted():
    start, constraints = {"mean": 0.0, "scale": 1.0}, {"scale": "positive"}
    return blr.infer(normal, start, constraints=constraints, args=(jnp.asarray(Y), jnp.asarray(10.0)), key=KEY)


@pytest.mark.extended
def test_other_data_compile_nothing(fitted):
    """Data are arguments: not one of the library's programs is new."""
    start, constraints = {"mean": 0.0, "scale": 1.0}, {"scale": "positive"}
    before = set(programs._programs)
    other = blr.infer(normal, start, constraints=constraints, args=(jnp.asarray(5.0 - Y), jnp.asarray(10.0)), key=KEY)
    assert set(programs._programs) <= before
    # The mirror image of the same data, but for the prior: other data gave another answer.
    assert_allclose(other.mean["mean"], 5.0 - fitted.mean["mean"], atol=0.1)


@pytest.mark.extended
def test_the_same_key_gives_the_same_posterior(fitted):
    start, constraints = {"mean": 0.0, "scale": 1.0}, {"scale": "positive"}
    again = blr.infer(normal, start, constraints=constraints, args=(jnp.asarray(Y), jnp.asarray(10.0)), key=KEY)
    assert again.verdict == fitted.verdict
    assert_allclose(again.covariance(), fitted.covariance(), rtol=0, atol=0)
    one, two = (posterior.samples(jax.random.key(3), 10)["scale"] for posterior in (again, fitted))
    assert_allclose(one, two, rtol=0, atol=0)


def test_summary_and_text(fitted):
    summary = fitted.summary()
    assert summary.names == ("mean", "scale")
    draws = fitted.samples(jax.random.key(0), DRAWS)
    assert_allclose(summary.mean, [np.mean(draws["mean"]), np.mean(draws["scale"])], rtol=1e-12)
    assert np.all(summary.low < summary.mean)
    assert np.all(summary.mean < summary.high)
    assert str(summary).endswith(fitted.verdict)
    assert "log evidence" in str(fitted)
    assert fitted.verdict.startswith("Trust the ")
    agreed, starts = fitted.verdict.split(" starts agree")[0].split("; ")[-1].split(" of ")
    assert int(agreed) == int(starts) >= 8  # eight, and those that looked elsewhere
    assert "QuasiMonteCarlo" in str(fitted.rule)


@pytest.mark.extended
def test_log_densities_are_normalised_and_those_of_the_model(fitted):
    points = fitted.unconstrained(jax.random.key(4), 5)
    log_p, log_q = fitted.log_densities(points)
    for x, p, q in zip(points, log_p, log_q, strict=True):
        values = {"mean": x[0], "scale": math.exp(x[1])}
        assert_allclose(p, normal(values, Y, 10.0) + x[1], rtol=1e-10)  # log s has the Jacobian s
        assert_allclose(q, log_mixture(fitted.q, x), rtol=1e-8)
        assert_allclose(fitted.log_density({"mean": x[0], "scale": x[1]}), q, rtol=1e-10)


def log_mixture(q, x):
    """log q by SciPy, of a Gaussian or of a mixture of them."""
    if isinstance(q, blr.Gaussian):
        parts, weights = [q], [1.0]
    else:
        parts = [jax.tree.map(lambda leaf, k=k: leaf[k], q.components) for k in range(len(q.weights))]
        weights = q.weights
    logs = [
        math.log(weight)
        + stats.multivariate_normal([q.mean["mean"], q.mean["scale"]], np.linalg.inv(q.precision)).logpdf(x)
        for q, weight in zip(parts, weights, strict=True)
    ]
    return np.logaddexp.reduce(logs)


def moments_of(posterior):
    return np.array([posterior.mean["mean"], posterior.mean["scale"]]), posterior.covariance()


def test_save_and_load(fitted, tmp_path):
    fitted.save(tmp_path / "posterior.npz")
    loaded = load_posterior(tmp_path / "posterior.npz", fitted.density)
    assert (loaded.trust, loaded.verdict) == (fitted.trust, fitted.verdict)
    assert loaded.log_evidence == fitted.log_evidence
    assert_allclose(loaded.covariance(), fitted.covariance(), rtol=1e-14)
    one, two = (posterior.samples(jax.random.key(3), 10)["scale"] for posterior in (loaded, fitted))
    assert_allclose(one, two, rtol=1e-12)
    assert loaded.record.modes[0].starts == fitted.record.modes[0].starts
    other = density_module.Density(lambda x: 0.0, (), jnp.zeros(3), lambda x: x)
    with pytest.raises(ValueError, match="2 numbers, and this model has 3"):
        load_posterior(tmp_path / "posterior.npz", other)


@pytest.mark.extended
def test_a_posterior_is_a_start(fitted):
    """An earlier q is taken as found: no search for modes, and the same optimum."""
    q = blr.Gaussian(fitted.mean, jnp.linalg.inv(fitted.covariance()))
    data = (jnp.asarray(Y), jnp.asarray(10.0))
    again = blr.infer(normal, q, constraints={"scale": "positive"}, args=data, key=KEY)
    assert again.record.modes == ()
    deviations = np.sqrt(np.diagonal(fitted.covariance()))
    assert np.all(np.abs(moments_of(again)[0] - moments_of(fitted)[0]) < 0.03 * deviations)
    assert_allclose(np.sqrt(np.diagonal(again.covariance())), deviations, rtol=0.03)


def test_nuts_start_is_of_this_posterior(fitted):
    start = fitted.nuts_start(jax.random.key(0), chains=3)
    assert start["init_params"]["scale"].shape == (3,)
    assert_allclose(start["inverse_mass_matrix"], fitted.covariance(), rtol=1e-12)
    assert fitted.nuts_start(jax.random.key(0))["init_params"]["mean"].shape == ()


def two_modes(x):
    """0.7 N(−4, 1) + 0.3 N(4, 0.5²)."""
    left = math.log(0.7) - 0.5 * (x[0] + 4.0) ** 2
    right = math.log(0.3) - 2.0 * (x[0] - 4.0) ** 2 + math.log(2.0)
    return jnp.logaddexp(left, right) - 0.5 * math.log(2 * math.pi)


@pytest.mark.extended
def test_two_modes_become_a_mixture_with_their_weights():
    posterior = blr.infer(two_modes, jnp.zeros(1), key=KEY)
    assert (posterior.trust, posterior.family) == ("trust", "Mixture")
    assert "on 2 modes" in posterior.verdict
    draws = posterior.samples(jax.random.key(1), DRAWS)[:, 0]
    # The share of one mode within four binomial standard errors, and 0.02 for q itself.
    assert abs(np.mean(draws < 0) - 0.7) < 0.02 + 4 * math.sqrt(0.21 / DRAWS)
    assert abs(posterior.log_evidence) < 4 * posterior.log_evidence_error
    mean, deviation = -1.6, math.sqrt(0.7 * (1 + 16) + 0.3 * (0.25 + 16) - 1.6**2)
    assert abs(np.mean(draws) - mean) < (0.1 + 4 / math.sqrt(DRAWS)) * deviation
    assert_allclose(np.std(draws), deviation, rtol=0.1)


def hidden_mode(x):
    """0.8 N((−4, 0), 1) + 0.2 N((4, 2), 0.6²): starts close to zero lead to the first."""
    left = math.log(0.8) - 0.5 * (x[0] + 4.0) ** 2 - 0.5 * x[1] ** 2
    right = math.log(0.2 / 0.36) - 0.5 * ((x[0] - 4.0) ** 2 + (x[1] - 2.0) ** 2) / 0.36
    return jnp.logaddexp(left, right)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mode_with_a_small_basin_is_found(seed):
    posterior = blr.infer(hidden_mode, jnp.zeros(2), key=jax.random.key(seed))
    assert posterior.trust == "trust"
    draws = posterior.samples(jax.random.key(9), DRAWS)
    assert abs(np.mean(draws[:, 0] > 0) - 0.2) < 0.02 + 4 * math.sqrt(0.16 / DRAWS)


def student(x):
    """Student's t with four degrees of freedom, standardised: the standard deviation is √2."""
    return -2.5 * jnp.sum(jnp.log1p(x**2 / 4.0))


def test_heavy_tails_are_not_taken_for_a_gaussian():
    """What is trusted has the density's own widths, and a Gaussian alone has not: it is 15 % too narrow."""
    posterior = blr.infer(student, jnp.zeros(2), key=KEY)
    assert posterior.record.tried[-1] == "Mixture"
    draws = posterior.samples(jax.random.key(1), 4 * DRAWS)
    if posterior.trust == "trust":
        assert_allclose(np.std(draws, axis=0), math.sqrt(2.0), rtol=0.1)
    assert_allclose(np.mean(draws, axis=0), 0.0, atol=(0.1 + 4 / math.sqrt(4 * DRAWS)) * math.sqrt(2.0))


def funnel(x):
    """Neal's funnel: no Gaussian is close, and a part of its mass is out of reach."""
    return -0.5 * (x[0] / 3.0) ** 2 + jnp.sum(-0.5 * x[1:] ** 2 * jnp.exp(-x[0]) - 0.5 * x[0])


@pytest.mark.extended
def test_a_funnel_is_not_trusted_and_the_verdict_says_what_to_do():
    posterior = blr.infer(funnel, jnp.zeros(6), key=KEY)
    if posterior.trust == "trust":  # Then it must be as good as it says.
        draws = posterior.samples(jax.random.key(1), DRAWS)
        assert_allclose(np.std(draws[:, 0]), 3.0, rtol=0.1)
        assert abs(np.mean(draws[:, 0])) < 0.4
    else:
        assert posterior.verdict.startswith(("Do not trust this approximation: ", "Trust the means only: "))
        assert "NUTS" in posterior.verdict
        assert "Reparametrise" in posterior.verdict


def test_single_precision():
    """The same answer in float32, and draws of its dtype; "trust" is said of it as well."""
    with jax.enable_x64(False):
        posterior = blr.infer(gamma, {"x": 1.0}, constraints={"x": "positive"}, key=KEY)
        draws = posterior.samples(jax.random.key(1), DRAWS)["x"]
    assert posterior.trust == "trust"
    assert draws.dtype == np.float32
    assert abs(np.mean(draws) - 5.0) < (0.1 + 4 / math.sqrt(DRAWS)) * math.sqrt(1.25)
    assert abs(posterior.log_evidence - CONSTRAINED["positive"][-1]) < 4 * posterior.log_evidence_error + 2e-3


@pytest.mark.extended
def test_progress_says_what_is_done():
    lines = []
    blr.infer(gamma, {"x": 1.0}, constraints={"x": "positive"}, key=KEY, starts=2, progress=lines.append)
    assert "2 starts" in lines[0]
    assert any("step" in line and "bound" in line for line in lines)
    assert any("importance weights" in line for line in lines)


def test_starts_is_a_number():
    with pytest.raises(ValueError, match="starts"):
        infer_density(density_module.Density(two_modes, (), jnp.zeros(1), lambda x: x), KEY, starts=0)


# What users do on the way: interrupt, save, go on, and follow the printed rule themselves.


def skewed(x):
    """A log-gamma density in two dimensions: not a Gaussian, so that it takes a few steps."""
    return jnp.sum(3.0 * x - jnp.exp(x))


def test_an_interrupt_returns_the_best_so_far_and_says_so():
    def interrupt(text):
        if "step 1," in text:
            signal.raise_signal(signal.SIGINT)

    posterior = blr.infer(skewed, jnp.zeros(2), key=KEY, progress=interrupt)
    assert posterior.verdict.startswith("Interrupted")
    assert posterior.record.steps == 1
    assert np.all(np.isfinite(posterior.samples(KEY, 10)))


def test_a_checkpoint_holds_the_gaussian_and_a_fit_goes_on_from_it(tmp_path):
    path = tmp_path / "best.npz"
    whole = blr.infer(skewed, jnp.zeros(2), key=KEY, checkpoint=path)
    q = blr.load(path)
    again = blr.infer(skewed, q, key=KEY)
    assert again.record.modes == ()  # no search
    assert again.record.steps <= 1
    assert_allclose(again.gaussian_bound, whole.gaussian_bound, atol=1e-4)


@pytest.mark.extended
def test_a_fit_goes_on_from_a_mixture_at_its_heaviest_component():
    two = lambda x: jnp.logaddexp(jnp.log(0.3) - 0.5 * (x + 6.0) ** 2, jnp.log(0.7) - 0.5 * (x - 6.0) ** 2)
    posterior = blr.infer(two, jnp.zeros(()), key=KEY)
    assert posterior.family == "Mixture"
    again = blr.infer(two, posterior.q, key=KEY)
    assert_allclose(float(again.mean), 6.0, atol=0.1)


@pytest.mark.extended
def test_the_printed_rule_stays_where_infer_ends():
    posterior = blr.infer(skewed, jnp.zeros(2), key=KEY)
    start = fit_gaussian_of(posterior)
    result = blr.fit(posterior.rule, posterior.density.objective, start, steps=3)
    # A squared distance in standard deviations: the tolerance of infer is 1e-4 nats.
    moved = np.asarray(result.q.mean - start.mean)
    assert moved @ np.asarray(start.precision) @ moved < 1e-3
    assert_allclose(np.asarray(result.q.precision), np.asarray(start.precision), rtol=0.02, atol=0.01)


def fit_gaussian_of(posterior):
    """The Gaussian that the rule has ended at, with the points that the posterior was fitted with."""
    density = posterior.density
    start = blr.Gaussian(posterior.mean, jnp.asarray(np.linalg.inv(posterior.covariance())))
    how = {"samples": posterior.record.samples, "tolerance": 1e-6, "steps": 100, "products": 0}
    return fit_gaussian(density, start, np.random.default_rng(0), **how).q
