"""Discrete latent sites, summed out by NumPyro's enumeration: the same as summing them out by hand.

Every model is there twice, with its discrete sites and without. Densities agree to rounding, and so do the fits, since
they are deterministic functions of the density and the key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp
from numpy.testing import assert_allclose

numpyro = pytest.importorskip("numpyro")
pytest.importorskip("funsor")

import numpyro.distributions as dist  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro import handlers  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.contrib.control_flow import scan  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.infer import MCMC  # noqa: E402  (skipped above where NumPyro is missing)

from bayesrule.interop import numpyro as bridge  # noqa: E402  (skipped above where NumPyro is missing)
from bayesrule.interop.numpyro import enumeration  # noqa: E402  (skipped above where NumPyro is missing)

KEY = jax.random.key(0)
_RNG = np.random.default_rng(0)
Y = jnp.asarray(np.concatenate([_RNG.normal(-2.0, 0.7, 15), _RNG.normal(2.0, 1.0, 9)]))
COUNTS = jnp.asarray(_RNG.poisson(3.0, 30) * (_RNG.uniform(size=30) < 0.6))
SERIES = jnp.asarray(np.repeat([-1.0, 2.0, -1.0], 4) + _RNG.normal(size=12))

# Each model with its discrete sites, and by hand.


def components():
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([3.0, 4.0])))
    low = numpyro.sample("low", dist.Normal(-1.0, 1.0))
    gap = numpyro.sample("gap", dist.Gamma(6.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    return shares, jnp.stack([low, low + gap]), scale


def mixture(y):
    shares, locations, scale = components()
    numpyro.deterministic("spread", locations[1] - locations[0])
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Categorical(shares))
        numpyro.deterministic("own", locations[z])
        numpyro.sample("y", dist.Normal(locations[z], scale), obs=y)


def mixture_by_hand(y):
    shares, locations, scale = components()
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(locations, scale)), obs=y)


def one_for_all(y):
    """A Bernoulli site that all observations share."""
    rate = numpyro.sample("rate", dist.Beta(2.0, 3.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    which = numpyro.sample("which", dist.Bernoulli(rate))
    numpyro.deterministic("shift", 0.3 * which)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean + 0.3 * which, 2.0), obs=y)


def one_for_all_by_hand(y):
    rate = numpyro.sample("rate", dist.Beta(2.0, 3.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    terms = [jnp.sum(dist.Normal(mean + 0.3 * which, 2.0).log_prob(y)) for which in (0, 1)]
    numpyro.factor("y", jnp.logaddexp(terms[0] + jnp.log1p(-rate), terms[1] + jnp.log(rate)))


def zero_inflated(y):
    """A row's rate is zero where its site says so: there all counts but 0 have no probability at all."""
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("rows", len(y)):
        empty = numpyro.sample("empty", dist.Bernoulli(share))
        numpyro.sample("y", dist.Poisson(jnp.where(empty == 1, 0.0, rate), validate_args=False), obs=y)


def zero_inflated_by_hand(y):
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.ZeroInflatedPoisson(share, rate), obs=y)


def chain():
    transitions = numpyro.sample("transitions", dist.Dirichlet(2.0 * jnp.ones((2, 2)) + 3.0 * jnp.eye(2)).to_event(1))
    low = numpyro.sample("low", dist.Normal(-1.0, 1.0))
    gap = numpyro.sample("gap", dist.Gamma(6.0, 2.0))
    return transitions, jnp.stack([low, low + gap])


def hidden_markov(y):
    transitions, locations = chain()

    def step(z, value):
        z = numpyro.sample("z", dist.Categorical(transitions[z]))
        numpyro.sample("y", dist.Normal(locations[z], 1.0), obs=value)
        return z, None

    scan(step, 0, y)


def hidden_markov_by_hand(y):
    transitions, locations = chain()
    emissions = dist.Normal(locations, 1.0).log_prob(y[:, None])
    forward = jnp.log(transitions[0]) + emissions[0]
    for emission in emissions[1:]:
        forward = logsumexp(forward[:, None] + jnp.log(transitions), axis=0) + emission
    numpyro.factor("y", logsumexp(forward))


PAIRS = [
    (mixture, mixture_by_hand, Y),
    (one_for_all, one_for_all_by_hand, Y),
    (zero_inflated, zero_inflated_by_hand, COUNTS),
    (hidden_markov, hidden_markov_by_hand, SERIES),
]


@pytest.mark.extended
@pytest.mark.parametrize(("model", "by_hand", "data"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_density_is_the_sum_by_hand(model, by_hand, data):
    one, other = (bridge.Traced.of(each, (data,), None).usable_density() for each in (model, by_hand))
    assert jax.tree.map(jnp.shape, one.like) == jax.tree.map(jnp.shape, other.like)
    functions = [jax.jit(jax.value_and_grad(lambda theta, d=d: d.function(theta, *d.arguments))) for d in (one, other)]
    rng = np.random.default_rng(1)
    for _ in range(3):
        theta = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), one.like)
        (ours, slope), (reference, reference_slope) = (function(theta) for function in functions)
        assert_allclose(ours, reference, rtol=1e-10, atol=1e-8)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-8, atol=1e-8), slope, reference_slope)


@pytest.fixture(scope="module")
def fitted():
    return bridge.fit(mixture, (Y,), key=KEY)


@pytest.fixture(scope="module")
def fitted_by_hand():
    return bridge.fit(mixture_by_hand, (Y,), key=KEY)


@pytest.mark.extended
def test_the_posterior_and_leave_one_out_are_those_by_hand(fitted, fitted_by_hand):
    assert fitted.trust == fitted_by_hand.trust == "trust"
    assert_allclose(fitted.covariance(), fitted_by_hand.covariance(), rtol=1e-6, atol=1e-8)
    assert_allclose(fitted.log_evidence, fitted_by_hand.log_evidence, atol=1e-6)
    draws = fitted.samples(jax.random.key(1), 200)
    ours, reference = fitted.log_likelihood(draws), fitted_by_hand.log_likelihood(draws)
    assert_allclose(ours["y"], reference["y"], rtol=1e-10, atol=1e-10)
    assert_allclose(fitted.loo(count=1000).pointwise, fitted_by_hand.loo(count=1000).pointwise, atol=1e-5)
    assert {"posterior", "log_likelihood", "posterior_predictive"} <= set(fitted.to_arviz(count=100).groups())


def test_rows_of_no_probability_have_the_right_likelihood():
    """Counts that a row of zeros cannot have: p(y_i|z) is zero for one z, and p(y_i|θ) is not."""
    traced = bridge.Traced.of(zero_inflated, (COUNTS,), None)
    draws = {"share": jnp.array([0.3, 0.7]), "rate": jnp.array([2.0, 5.0])}
    nesting = traced.discrete.nesting
    ours = enumeration.log_likelihood_rows(zero_inflated, nesting, traced.sites, (COUNTS,), {}, draws)["y"]
    expected = dist.ZeroInflatedPoisson(draws["share"][:, None], draws["rate"][:, None]).log_prob(COUNTS)
    assert_allclose(ours, expected, rtol=1e-10)


@pytest.mark.extended
def test_discrete_sites_and_what_depends_on_them_are_drawn_given_the_data(fitted):
    """Assignments have the probabilities that Bayes' rule gives for each draw of the other sites."""
    draws = fitted.samples(jax.random.key(1), 500)
    assert "z" not in draws
    assert "own" not in draws  # It depends on z.
    assert_allclose(draws["spread"], draws["gap"], rtol=1e-10)
    found = fitted.discrete_samples(jax.random.key(2), draws)
    assert found["z"].shape == found["own"].shape == (500, len(Y))
    locations = np.stack([draws["low"], draws["low"] + draws["gap"]], axis=1)
    assert_allclose(found["own"], np.take_along_axis(locations, np.asarray(found["z"]), axis=1), rtol=1e-10)
    terms = np.log(draws["shares"])[:, None] + dist.Normal(locations[:, None], draws["scale"][:, None, None]).log_prob(
        Y[:, None]
    )
    second = np.exp(terms[..., 1] - logsumexp(terms, axis=-1))
    error = np.sqrt(np.mean(second * (1 - second), axis=0) / 500)
    assert np.all(np.abs(np.mean(np.asarray(found["z"]), axis=0) - np.mean(second, axis=0)) < 5 * error + 1e-3)
    given = fitted.log_likelihood(draws | found)["y"]
    chosen = np.where(np.asarray(found["z"]) == 1, locations[:, 1:], locations[:, :1])
    assert_allclose(given, dist.Normal(chosen, draws["scale"][:, None]).log_prob(Y), rtol=1e-10)


@pytest.mark.extended
def test_predictions_draw_new_assignments(fitted):
    predicted = fitted.predictive(jax.random.key(3), count=2000)
    assert predicted["z"].shape == predicted["y"].shape == (2000, len(Y))
    shares = np.mean(fitted.samples(jax.random.key(1), 2000)["shares"], axis=0)
    assert_allclose(np.mean(predicted["z"]), shares[1], atol=0.03)


@pytest.mark.extended
def test_nuts_of_a_model_with_discrete_sites_starts_from_here(fitted):
    kernel, start = fitted.nuts(jax.random.key(3))
    sampler = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    sampler.run(jax.random.key(4), Y, init_params=start, extra_fields=("diverging",))
    assert int(np.sum(sampler.get_extra_fields()["diverging"])) == 0
    assert abs(np.mean(sampler.get_samples()["low"]) + 2.0) < 0.6


@pytest.mark.extended
def test_what_is_not_there_says_so():
    """One discrete site for all rows, or a chain of them: rows have no likelihood of their own."""
    shared = bridge.fit(one_for_all, (Y,), key=KEY)
    draws = shared.samples(jax.random.key(1), 50)
    with pytest.raises(ValueError, match=r"depend on each other.*discrete_samples\(key, draws\)"):
        shared.log_likelihood(draws)
    assert "log_likelihood" not in shared.to_arviz(count=50).groups()
    found = shared.discrete_samples(jax.random.key(2), draws)
    assert_allclose(found["shift"], 0.3 * np.asarray(found["which"]), rtol=1e-12)
    assert shared.log_likelihood(draws | found)["y"].shape == (50, len(Y))
    traced = bridge.Traced.of(hidden_markov, (SERIES,), None)
    with pytest.raises(ValueError, match=r"depend on each other.*no loo\(\)"):
        enumeration.log_likelihood_rows(hidden_markov, traced.discrete.nesting, traced.sites, (SERIES,), {}, {})
    with pytest.raises(NotImplementedError, match=r"\['z'\], which are inside of a scan"):
        enumeration.draw_discrete(KEY, traced.discrete, hidden_markov, (SERIES,), {}, {})


@pytest.mark.extended
def test_a_model_without_discrete_sites_has_no_discrete_samples(fitted_by_hand):
    with pytest.raises(ValueError, match="no discrete latent sites"):
        fitted_by_hand.discrete_samples(KEY, {})


# What enumeration asks of a model.


def without_plate(y):
    rate = numpyro.sample("rate", dist.Beta(2.0, 2.0))
    which = numpyro.sample("which", dist.Bernoulli(rate))
    numpyro.sample("y", dist.Normal(3.0 * which, 1.0), obs=y)


def of_a_group(y):
    rate = numpyro.sample("rate", dist.Beta(2.0, 2.0))
    with numpyro.plate("groups", 3):
        z = numpyro.sample("z", dist.Bernoulli(rate))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(z[jnp.arange(len(y)) % 3], 1.0), obs=y)


def support_of_z(y):
    z = numpyro.sample("z", dist.Bernoulli(0.4))
    x = numpyro.sample("x", dist.Uniform(0.0, 1.0 + z))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize("length", [2, 12])
def test_rows_outside_of_plates_are_an_error(length):
    """With as many rows as values NumPyro takes the one for the other, and the density would be wrong."""
    with pytest.raises(ValueError, match=r"\['which'\] are summed out.*\n.*rows of \['y'\] into numpyro.plate"):
        bridge.fit(without_plate, (Y[:length],), key=KEY)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (of_a_group, r"\['z'\] are summed out.*\n.*no z\[group\]"),
        (support_of_z, r"support of the site 'x' depends on the discrete latent sites \['z'\]"),
    ],
    ids=["groups", "support"],
)
def test_models_that_cannot_be_enumerated_name_the_site(model, message):
    with pytest.raises(ValueError, match=message):
        bridge.fit(model, (Y,), key=KEY)


@pytest.mark.extended
def test_a_masked_plate_inside_of_another():
    """Two plates and a mask: rows of subjects, each with a class, against the sum by hand."""
    y, keep = Y.reshape(8, 3), jnp.arange(24).reshape(8, 3) % 5 > 0

    def subjects(y, keep):
        share = numpyro.sample("share", dist.Beta(2.0, 2.0))
        gap = numpyro.sample("gap", dist.Normal(0.0, 2.0))
        with numpyro.plate("subjects", 8, dim=-2):
            z = numpyro.sample("z", dist.Bernoulli(share))
            with numpyro.plate("times", 3, dim=-1), handlers.mask(mask=keep):
                numpyro.sample("y", dist.Normal(gap * z, 1.0), obs=y)

    density = bridge.Traced.of(subjects, (y, keep), None).usable_density()
    theta = {"gap": jnp.asarray(0.7), "share": jnp.asarray(-0.4)}
    share = jax.nn.sigmoid(theta["share"])
    rows = [jnp.sum(jnp.where(keep, dist.Normal(z * 0.7, 1.0).log_prob(y), 0.0), axis=1) for z in (0, 1)]
    expected = jnp.sum(jnp.logaddexp(jnp.log1p(-share) + rows[0], jnp.log(share) + rows[1]))
    expected += dist.Beta(2.0, 2.0).log_prob(share) + jnp.log(share * (1 - share)) + dist.Normal(0.0, 2.0).log_prob(0.7)
    assert_allclose(density.function(theta, *density.arguments), expected, rtol=1e-10)
