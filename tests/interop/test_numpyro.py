"""NumPyro models as they are: every kind of site, errors that name it, eight schools both ways, and what comes next."""

import importlib.util
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.numerics import programs

numpyro = pytest.importorskip("numpyro")

import numpyro.distributions as dist  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro import handlers  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.diagnostics import effective_sample_size  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.infer import MCMC, NUTS  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.infer.reparam import LocScaleReparam  # noqa: E402  (skipped above where NumPyro is missing)

from bayesrule.interop import numpyro as bridge  # noqa: E402  (skipped above where NumPyro is missing)
from bayesrule.interop.numpyro.centring import decentred  # noqa: E402  (skipped above where NumPyro is missing)

KEY = jax.random.key(0)
DRAWS = 4000
STANDARD_ERROR = 1 / math.sqrt(DRAWS)

# Sites of all kinds.


def linear(y, keep):
    """A hierarchy with a reparametrised site in a scope, masked rows, a factor and a deterministic site."""
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    with handlers.scope(prefix="inner"):
        z = numpyro.sample("z", dist.Normal(x, 2.0))
    total = numpyro.deterministic("total", x + z)
    numpyro.factor("extra", -0.5 * (x - 1.0) ** 2)
    with numpyro.plate("rows", len(y)), handlers.mask(mask=keep):
        numpyro.sample("y", dist.Normal(total, 1.0), obs=y)


@pytest.mark.extended
def test_every_kind_of_site_against_linear_algebra():
    """All is Gaussian, so that the answer is exact: means, covariances and the evidence."""
    model = handlers.reparam(linear, config={"inner/z": LocScaleReparam(centered=0.0)})
    y, keep = jnp.array([1.0, 2.0, 50.0, 3.0]), jnp.array([True, True, False, True])
    posterior = bridge.fit(model, (y,), {"keep": keep}, key=KEY)
    assert posterior.trust == "trust"
    auxiliary = "inner/inner/z_decentered"  # NumPyro's name for what it has put in the place of inner/z
    assert sorted(posterior.density.like) == [auxiliary, "x"]
    # In (e, x) with z = x + 2e the outputs are 2x + 2e; the priors have the precisions 1 and 1, the factor 1 at x = 1.
    output = np.array([2.0, 2.0])
    precision = np.diag([1.0, 2.0]) + 3 * np.outer(output, output)
    linear_part = np.array([0.0, 1.0]) + 6.0 * output
    mean = np.linalg.solve(precision, linear_part)
    assert_allclose([posterior.mean[auxiliary], posterior.mean["x"]], mean, atol=1e-8)
    assert_allclose(posterior.covariance(), np.linalg.inv(precision), atol=1e-8)
    squares = 0.5 + 0.5 * (1 + 4 + 9)
    constants = -5 * 0.5 * math.log(2 * math.pi) - squares  # two priors and three rows
    evidence = constants + 0.5 * linear_part @ mean + math.log(2 * math.pi) - 0.5 * np.linalg.slogdet(precision)[1]
    assert_allclose(posterior.log_evidence, evidence, atol=1e-8)
    draws = posterior.samples(jax.random.key(1), 100)
    assert_allclose(draws["inner/z"], draws["x"] + 2.0 * draws[auxiliary], rtol=1e-12)
    assert_allclose(draws["total"], draws["x"] + draws["inner/z"], rtol=1e-12)


def priors():
    numpyro.sample("shares", dist.Dirichlet(jnp.array([8.0, 12.0, 20.0])))
    with numpyro.plate("rows", 2):
        numpyro.sample("rates", dist.Gamma(20.0, 4.0))
    numpyro.sample("angle", dist.Uniform(-1.0, 1.0))


@pytest.mark.extended
def test_constraints_and_plates_against_exact_moments():
    """A prior is a posterior without data: its moments are in every textbook."""
    posterior = bridge.fit(priors, key=KEY)
    assert posterior.trust == "trust"
    draws = posterior.samples(jax.random.key(1), DRAWS)
    shares, rates = draws["shares"], draws["rates"]
    assert_allclose(np.sum(shares, axis=1), 1.0, rtol=1e-12)
    alpha = np.array([8.0, 12.0, 20.0])
    check_moments(shares, alpha / 40, np.sqrt(alpha / 40 * (1 - alpha / 40) / 41))
    check_moments(rates, np.full(2, 5.0), np.full(2, math.sqrt(20.0) / 4))
    check_moments(draws["angle"], 0.0, math.sqrt(1 / 3))
    assert abs(posterior.log_evidence) < 4 * posterior.log_evidence_error + 1e-6


def check_moments(draws, mean, deviation, *, means=0.1, widths=0.1):
    """Within what is promised, and four standard errors of the draws."""
    assert np.all(np.abs(np.mean(draws, axis=0) - mean) < (means + 4 * STANDARD_ERROR) * deviation)
    assert_allclose(np.std(draws, axis=0), deviation, rtol=widths + 4 * STANDARD_ERROR)


# Errors.


def simple(y, subsample=None):
    scale = numpyro.sample("scale", dist.HalfNormal(5.0))
    with numpyro.plate("rows", len(y), subsample_size=subsample):
        batch = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(0.0, scale), obs=batch)


def poisson_latent(y):
    count = numpyro.sample("count", dist.Poisson(3.0))
    numpyro.sample("y", dist.Normal(count, 1.0), obs=y)


def bernoulli_latent(y):
    rate = numpyro.sample("rate", dist.Beta(2.0, 2.0))
    which = numpyro.sample("which", dist.Bernoulli(rate))
    numpyro.sample("y", dist.Normal(which, 1.0), obs=y)


def wrong_shapes(y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("y", dist.Normal(jnp.ones((5, 4)) @ w, 1.0), obs=y)


def wrong_plate(y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", 5):
        numpyro.sample("y", dist.Normal(jnp.zeros(7) + w, 1.0), obs=y)


def wrong_data(y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(jnp.zeros(5) + w, 1.0), obs=y)


def inputs(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w * x, 1.0, validate_args=False), obs=y)


def positive_data(y):
    shape = numpyro.sample("shape", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Gamma(shape, 1.0), obs=y)


def branches(y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w if w > 0 else 0.0, 1.0), obs=y)


def free(y):
    numpyro.sample("free", dist.ImproperUniform(dist.constraints.positive, (), ()))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


def flat(y):
    numpyro.sample("free", dist.ImproperUniform(dist.constraints.real, (), ()))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


def nothing_latent(y):
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


Y = np.random.default_rng(0).normal(size=12)
HOLES = np.where(Y > 1, np.nan, Y)


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (simple, (jnp.asarray(Y), 4), "plate 'rows' takes 4 of its 12 rows.*without subsample_size"),
        (poisson_latent, (jnp.asarray(Y),), r"latent site 'count' is discrete \(Poisson\).*DiscreteHMCGibbs"),
        (wrong_shapes, (jnp.asarray(Y),), "after its site 'w'"),
        (nothing_latent, (jnp.asarray(Y),), "no continuous latent site"),
        (wrong_plate, (jnp.asarray(Y),), "at its site 'y'"),
        (wrong_data, (jnp.asarray(Y),), r"observed site 'y' has values of shape \(12,\).*Normal\) the shape \(5,\)"),
        (simple, (jnp.asarray(HOLES),), "observed site 'y' has [1-9][0-9]* NaN among its 12.*handlers.mask"),
        (simple, (jnp.asarray(np.where(Y > 1, np.inf, Y)),), "observed site 'y' has [1-9][0-9]* infinite among its 12"),
        (inputs, (jnp.asarray(HOLES), Y), r"site 'y' is not, in [1-9] of its 12.*NaN .*\([1-9] in args\[0\]\)"),
        (positive_data, (jnp.asarray(Y),), "site 'y' is not, in [1-9] of its 12 entries.*support of its distribution"),
        (branches, (jnp.asarray(Y),), "looks at the value of a latent site.*jnp.where"),
        (flat, (jnp.asarray(Y),), "posterior is improper.*along free.*proper prior"),
        (free, (jnp.asarray(Y),), "posterior is improper.*along free.*proper prior"),
    ],
    ids=[
        "subsample",
        "discrete",
        "shapes",
        "nothing",
        "shapes in a plate",
        "shapes of data",
        "NaN",
        "infinite",
        "NaN in inputs",
        "support",
        "branches",
        "flat",
        "rising",
    ],
)
def test_a_model_that_cannot_work_is_one_error_with_the_site_in_it(model, args, message):
    with pytest.raises(ValueError, match=message):
        bridge.fit(model, args, key=KEY)


def test_enumeration_needs_funsor_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro.contrib.funsor", None)  # as where it is not installed
    with pytest.raises(ImportError, match=r"\['which'\] are discrete.*funsor, which is not installed"):
        bridge.fit(bernoulli_latent, (jnp.asarray(Y),), key=KEY)


@pytest.mark.extended
def test_values_outside_of_the_support_name_the_site():
    def zero_density(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0).mask(True), obs=y)
        numpyro.factor("never", jnp.where(x > jnp.inf, 0.0, -jnp.inf))

    with pytest.raises(ValueError, match="site 'never' is not"):
        bridge.fit(zero_density, (jnp.asarray(Y),), key=KEY)


def test_a_module_without_its_library_asks_for_it(monkeypatch):
    """Networks as sites: `random_flax_module` imports flax when the model is run."""
    from numpyro.contrib.module import random_flax_module

    def network(x, y):
        net = random_flax_module("net", None, prior=dist.Normal(0.0, 1.0), input_shape=(1,))
        numpyro.sample("y", dist.Normal(net(x[:, None])[:, 0], 1.0), obs=y)

    monkeypatch.setitem(sys.modules, "flax", None)  # as where it is not installed
    with pytest.raises(ImportError, match="flax"):
        bridge.fit(network, (jnp.asarray(Y), jnp.asarray(Y)), key=KEY)


@pytest.mark.extended
def test_a_network_as_a_site_against_linear_algebra():
    """A layer of flax with standard normal weights is a Gaussian linear model."""
    nn = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    def network(x, y):
        net = random_flax_module("net", nn.Dense(1, param_dtype=float), prior=dist.Normal(0.0, 1.0), input_shape=(1,))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(net(x[:, None])[:, 0], 0.5), obs=y)

    x = np.linspace(-1.0, 1.0, 12)
    posterior = bridge.fit(network, (jnp.asarray(x), jnp.asarray(Y)), key=KEY)
    design = np.stack([np.ones(12), x], axis=1)
    covariance = np.linalg.inv(np.eye(2) + 4.0 * design.T @ design)
    assert_allclose(posterior.covariance(), covariance, atol=1e-6)
    found = [posterior.mean["net/bias"].item(), posterior.mean["net/kernel"].item()]
    assert_allclose(found, covariance @ (4.0 * design.T @ Y), atol=1e-6)


def test_observations_that_broadcast_by_accident_are_warned_of():
    """A column of values and a row of distributions are all pairs of them."""

    def accident(y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(12), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y[:, None])

    with pytest.warns(UserWarning, match=r"'y' has values of shape \(12, 1\).*makes 144 observations"):
        bridge.Traced.of(accident, (jnp.asarray(Y),), None)


@pytest.mark.extended
def test_a_start_inside_of_a_support_that_another_site_decides():
    """Uniform(0, x) at x = 50 has a start at 40, and none at 60."""

    def bounded(y):
        x = numpyro.sample("x", dist.Gamma(2.0, 0.1))
        u = numpyro.sample("u", dist.Uniform(0.0, x))
        numpyro.sample("y", dist.Normal(u, 5.0), obs=y)

    posterior = bridge.fit(bounded, (jnp.asarray(40.0),), key=KEY, start={"x": 50.0, "u": 40.0})
    assert np.all(posterior.samples(KEY, 100)["u"] < posterior.samples(KEY, 100)["x"])
    with pytest.raises(ValueError, match=r"start of 'u', 60.0, is not inside"):
        bridge.fit(bounded, (jnp.asarray(40.0),), key=KEY, start={"x": 50.0, "u": 60.0})


def test_wrong_names_and_options():
    with pytest.raises(ValueError, match=r"start= names \['sclae'\].*these are \['scale'\]"):
        bridge.fit(simple, (jnp.asarray(Y),), key=KEY, start={"sclae": 1.0})
    with pytest.raises(ValueError, match='reparam= is "auto" or None'):
        bridge.fit(simple, (jnp.asarray(Y),), key=KEY, reparam="centred")


# Arguments.


def regression(x, y=None, *, degree):
    """A polynomial: `degree` decides shapes."""
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([degree + 1]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    mean = numpyro.deterministic("mean", jnp.stack([x**k for k in range(degree + 1)], axis=-1) @ w)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


X = np.linspace(-1.0, 1.0, 30)
TARGET = 1.0 + 2.0 * X + np.random.default_rng(1).normal(0.0, 0.5, size=30)


@pytest.fixture(scope="module")
def fitted():
    return bridge.fit(regression, (jnp.asarray(X), jnp.asarray(TARGET)), {"degree": 1}, key=KEY)


@pytest.mark.extended
def test_other_data_compile_nothing_and_other_shapes_work(fitted):
    before = set(programs._programs)
    other = bridge.fit(regression, (jnp.asarray(X), jnp.asarray(3.0 - TARGET)), {"degree": 1}, key=KEY)
    assert set(programs._programs) <= before
    assert_allclose(other.mean["w"], np.array([3.0, 0.0]) - fitted.mean["w"], atol=0.05)
    # A NumPy array is an array as well.
    again = bridge.fit(regression, (X, TARGET), {"degree": 1}, key=KEY)
    assert set(programs._programs) <= before
    assert again.verdict == fitted.verdict


def looks_at_data(counts):
    """A rate for every value that occurs: the largest value decides a shape."""
    rates = numpyro.sample("rates", dist.Normal(0.0, 1.0).expand([int(counts.max()) + 1]))
    numpyro.sample("y", dist.Normal(rates[counts], 1.0), obs=jnp.ones(len(counts)))


@pytest.mark.extended
def test_a_model_may_look_at_its_data():
    """Every group of n ones has the posterior N(n/(n + 1), 1/(n + 1))."""
    posterior = bridge.fit(looks_at_data, (np.array([0, 1, 1, 2, 2, 2]),), key=KEY)
    assert_allclose(posterior.mean["rates"], [1 / 2, 2 / 3, 3 / 4], atol=1e-8)
    assert_allclose(posterior.covariance(), np.diag([1 / 2, 1 / 3, 1 / 4]), atol=1e-8)


# Eight schools.

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
# eight_schools-eight_schools_noncentered of stan-dev/posteriordb (commit 28f8d3d6, BSD-3-Clause): means and standard
# deviations of 10,000 reference draws.
THETA_MEAN = [6.150502293, 4.939581141, 3.90590609, 4.796016751, 3.614436325, 4.051147579, 6.317169759, 4.883996944]
THETA_STD = [5.615863419, 4.645578114, 5.280711952, 4.770938024, 4.614720692, 4.796248401, 5.002855395, 5.317692056]
MU_TAU_MEAN, MU_TAU_STD = [4.410518337, 3.602059524], [3.309296477, 3.198477671]


def schools(errors, effects):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, errors), obs=effects)


SCHOOLS = (jnp.asarray(ERRORS), jnp.asarray(EFFECTS))


@pytest.fixture(scope="module")
def automatic():
    return bridge.fit(schools, SCHOOLS, key=KEY, reparam="auto")


@pytest.mark.extended
def test_the_centring_is_chosen_and_then_trusted(automatic):
    """Means within 0.1 and standard deviations within 10 % of posteriordb's: what "trust" promises."""
    assert automatic.decentred == ("theta",)
    assert automatic.trust == "trust"
    draws = automatic.samples(jax.random.key(1), DRAWS)
    check_moments(draws["theta"], np.array(THETA_MEAN), np.array(THETA_STD))
    check_moments(np.stack([draws["mu"], draws["tau"]], axis=1), np.array(MU_TAU_MEAN), np.array(MU_TAU_STD))


def test_centred_eight_schools_are_not_trusted():
    """The density is infinite where tau is zero, and no Gaussian is close to it."""
    posterior = bridge.fit(schools, SCHOOLS, key=KEY)
    assert posterior.trust != "trust"
    assert "'theta'" in posterior.verdict
    assert 'reparam="auto"' in posterior.verdict


# What comes next.


@pytest.mark.extended
def test_draws_and_summary_have_every_site(fitted):
    draws = fitted.samples(jax.random.key(1), 50)
    assert {name: leaf.shape for name, leaf in draws.items()} == {"w": (50, 2), "noise": (50,), "mean": (50, 30)}
    assert_allclose(draws["mean"], draws["w"][:, :1] + draws["w"][:, 1:] * X, rtol=1e-10)
    summary = fitted.summary()
    assert {"noise", "w[0]", "w[1]"} <= set(summary.names)
    # Least squares, with a prior that is wide beside the data.
    expected = np.linalg.lstsq(np.stack([np.ones(30), X], axis=1), TARGET, rcond=None)[0]
    found = [summary.mean[summary.names.index(name)] for name in ("w[0]", "w[1]")]
    assert_allclose(found, expected, atol=0.03)


@pytest.mark.extended
def test_predictive_shapes_and_moments(fitted):
    """At the fit's own inputs and at others; the spread is that of the noise and of the weights."""
    own = fitted.predictive(jax.random.key(2), count=DRAWS)
    assert own["y"].shape == (DRAWS, 30)
    assert np.std(own["y"][:, 0] - TARGET[0]) > 0.3  # The observations were taken out.
    new = fitted.predictive(jax.random.key(2), (jnp.array([0.0, 3.0]),), {"degree": 1}, count=DRAWS)
    draws = fitted.samples(jax.random.key(1), DRAWS)
    for column, x in enumerate([0.0, 3.0]):
        line = draws["w"][:, 0] + x * draws["w"][:, 1]
        spread = math.sqrt(np.var(line) + np.mean(draws["noise"] ** 2))
        assert abs(np.mean(new["y"][:, column]) - np.mean(line)) < 6 * STANDARD_ERROR * spread
        assert_allclose(np.std(new["y"][:, column]), spread, rtol=6 * STANDARD_ERROR)
    assert set(fitted.predictive(jax.random.key(2), count=3, sites=["y"])) == {"y"}


@pytest.mark.extended
def test_nuts_starts_from_here(fitted):
    """Fifteen steps find the step size: 200 after them are worth 100 independent draws, and none is divergent."""
    kernel, start = fitted.nuts(jax.random.key(3))
    sampler = MCMC(kernel, num_warmup=15, num_samples=200, progress_bar=False)
    sampler.run(jax.random.key(4), *fitted.traced.args, init_params=start, extra_fields=("diverging",), degree=1)
    assert int(np.sum(sampler.get_extra_fields()["diverging"])) == 0
    draws, own = sampler.get_samples(), fitted.samples(jax.random.key(1), DRAWS)
    for name in ("w", "noise"):
        assert np.min(effective_sample_size(np.asarray(draws[name])[None])) > 100
        difference = np.mean(draws[name], axis=0) - np.mean(own[name], axis=0)
        assert np.all(np.abs(difference) < 0.5 * np.std(own[name], axis=0))


@pytest.mark.extended
def test_a_short_warm_up_is_enough_for_both_libraries():
    """On a badly scaled polynomial, against the same number of steps without a start: the example's own functions."""
    pytest.importorskip("blackjax")
    path = Path(__file__).parents[2] / "examples" / "nuts_warm_start.py"
    spec = importlib.util.spec_from_file_location("nuts_warm_start", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    args = example.data()
    posterior = bridge.fit(example.model, args, key=KEY)
    kernel, start = posterior.nuts(jax.random.key(3))
    density = posterior.density
    log_density = lambda theta: density.function(theta, *density.arguments)
    here = posterior.nuts_start(jax.random.key(3))
    flat = {"init_params": here["init_params"], "inverse_mass_matrix": jnp.ones(density.size)}
    with_start = example.run_numpyro(kernel, 15, args, start)
    without = example.run_numpyro(NUTS(example.model, dense_mass=True), 15, args)
    assert example.smallest_effective(with_start[0]) > max(200, 4 * example.smallest_effective(without[0]))
    with_start, without = example.run_blackjax(log_density, here, 15), example.run_blackjax(log_density, flat, 15)
    assert example.smallest_effective(with_start[0]) > 200
    assert with_start[2] * 10 < without[2]  # leaps


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")  # k̂ of an observation, compared below
def test_arviz_has_every_group_and_the_same_loo(fitted):
    """`az.loo` of the same draws is `loo()`, and the groups hold the verdict, the data and the predictions."""
    arviz = pytest.importorskip("arviz")
    data = fitted.to_arviz(KEY, 1000)
    groups = {"posterior", "sample_stats", "posterior_predictive", "log_likelihood", "observed_data"}
    assert groups <= set(data.groups())
    assert data.posterior["w"].shape == (1, 1000, 2)
    assert data.posterior.attrs["verdict"] == fitted.verdict
    assert_allclose(data.observed_data["y"], TARGET, rtol=1e-12)
    theirs = arviz.loo(data, pointwise=True)
    ours = fitted.loo(jax.random.split(KEY)[0], 1000)
    assert_allclose(ours.pointwise, theirs.loo_i.values.ravel(), atol=1e-8)
    assert_allclose([ours.elpd, ours.error, ours.effective_parameters], [theirs.elpd_loo, theirs.se, theirs.p_loo])
    assert_allclose(ours.khat, theirs.pareto_k.values.ravel(), atol=1e-8)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")  # k̂ of an observation, compared below
def test_the_data_tree_of_arviz_1_has_the_same_groups(fitted, monkeypatch, tmp_path):
    """Where ArviZ 0.x is not installed, `arviz_base` makes xarray's DataTree, and `arviz_stats` has the same loo."""
    pytest.importorskip("arviz_base")
    loo = pytest.importorskip("arviz_stats").loo
    monkeypatch.setitem(sys.modules, "arviz", None)
    data = fitted.to_arviz(KEY, 1000)
    groups = {"posterior", "sample_stats", "posterior_predictive", "log_likelihood", "observed_data"}
    assert groups == set(data.children)
    assert data["posterior"]["w"].shape == (1, 1000, 2)
    assert data["sample_stats"].attrs["verdict"] == data["posterior"].attrs["verdict"] == fitted.verdict
    assert_allclose(data["observed_data"]["y"], TARGET, rtol=1e-12)
    # ArviZ 1 fits the tail of the weights a little differently than 0.23, with which ours agrees to rounding.
    theirs = loo(data, pointwise=True, reff=1.0)
    ours = fitted.loo(jax.random.split(KEY)[0], 1000)
    assert_allclose(ours.pointwise, np.ravel(theirs.elpd_i), atol=1e-3)
    assert_allclose(ours.khat, np.ravel(theirs.pareto_k), atol=0.1)
    assert_allclose([ours.elpd, ours.error, ours.effective_parameters], [theirs.elpd, theirs.se, theirs.p], rtol=1e-3)


def test_without_any_arviz_the_error_asks_for_it(fitted, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"pip install 'bayesrule\[numpyro\]'"):
        fitted.to_arviz(KEY, 10)


def test_a_decentred_posterior_is_loaded_as_such(automatic, tmp_path):
    automatic.save(tmp_path / "schools.npz")
    loaded = bridge.load(tmp_path / "schools.npz", schools, SCHOOLS)
    assert loaded.decentred == ("theta",)
    one, two = (posterior.samples(jax.random.key(1), 5)["theta"] for posterior in (loaded, automatic))
    assert_allclose(one, two, rtol=1e-12)
    with pytest.raises(ValueError, match=r"holds a posterior of the sites \['mu', 'tau', 'theta_decentered'\]"):
        bridge.load(tmp_path / "schools.npz", handlers.scope(schools, prefix="a"), SCHOOLS)


def test_models_that_are_made_on_the_way_are_the_same_in_a_second_fit():
    """Programs are kept under the density's function: equal for a decentred model, and for one with a `param`."""

    def learned(y):
        scale = numpyro.param("scale", 2.0)
        numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 1.0)), scale), obs=y)

    other = (SCHOOLS[0], 2.0 + SCHOOLS[1])
    cases = [(lambda: decentred(schools, frozenset({"theta"})), SCHOOLS, other), (lambda: learned, (Y,), (2.0 * Y,))]
    for make, data, new in cases:
        one, two = (bridge.Traced.of(make(), args, None).density() for args in (data, new))
        assert one.function == two.function
        assert one.starts == two.starts
        assert hash(one.function) == hash(two.function)


def test_save_and_load(fitted, tmp_path):
    fitted.save(tmp_path / "posterior.npz")
    loaded = bridge.load(tmp_path / "posterior.npz", regression, (X, TARGET), {"degree": 1})
    assert loaded.verdict == fitted.verdict
    one, two = (posterior.samples(jax.random.key(1), 5)["mean"] for posterior in (loaded, fitted))
    assert_allclose(one, two, rtol=1e-12)


@pytest.mark.extended
def test_a_start_by_name_and_an_earlier_posterior(fitted):
    q = (
        fitted.q
        if isinstance(fitted.q, blr.Gaussian)
        else blr.Gaussian(fitted.mean, jnp.linalg.inv(fitted.covariance()))
    )
    for start in ({"noise": 0.5}, q):
        again = bridge.fit(regression, (X, TARGET), {"degree": 1}, key=KEY, start=start, starts=2)
        assert_allclose(again.mean["w"], fitted.mean["w"], atol=0.01)


@pytest.mark.extended
def test_single_precision():
    with jax.enable_x64(False):
        posterior = bridge.fit(regression, (X.astype(np.float32), TARGET.astype(np.float32)), {"degree": 1}, key=KEY)
        draws = posterior.samples(jax.random.key(1), DRAWS)
    assert posterior.trust == "trust"
    assert draws["w"].dtype == np.float32
    expected = np.linalg.lstsq(np.stack([np.ones(30), X], axis=1), TARGET, rcond=None)[0]
    assert_allclose(np.mean(draws["w"], axis=0), expected, atol=0.05)
