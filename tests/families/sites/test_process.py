"""A Gaussian prior with sites on its outputs, against the dense Gaussian written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule import factors
from bayesrule.families.sites.process import GaussianProcess
from bayesrule.steps.step import Step

SIZE = 9
LARGE = 150  # more than one block


def setting(negative=False, singular=True, size=SIZE):
    random = np.random.default_rng(0)
    root = random.normal(size=(size, size)) / np.sqrt(size)
    if singular:
        root[3] = root[2]  # an input that comes twice
    prior, mean, first = root @ root.T, random.normal(size=size), random.normal(size=size)
    curve = random.uniform(0.1, 2.0, size)
    curve[4] = 0.0  # not observed
    if negative:
        curve[[1, 6]] = -0.2
    return prior, mean, first, curve


def written_out(prior, mean, first, curve):
    matrix = jnp.eye(len(prior)) + prior * curve
    inverse = jnp.linalg.inv(matrix)
    return jnp.linalg.slogdet(matrix)[1], inverse @ (mean + prior @ first), inverse @ prior


def member(prior, mean, first, curve):
    return GaussianProcess(prior, mean, (first, -0.5 * curve))


@pytest.mark.extended
@pytest.mark.parametrize(("negative", "size"), [(False, SIZE), (True, SIZE), (True, LARGE)])
def test_moments_are_the_dense_gaussians(negative, size):
    numbers = setting(negative, size=size)
    q = member(*numbers)
    log_det, mean, covariance = written_out(*numbers)
    assert bool(q.inside())
    assert_allclose(q.covariance(), covariance, atol=1e-12)
    assert_allclose(q.variance, np.diag(covariance), atol=1e-12)
    assert_allclose(q.mean, mean, atol=1e-12)
    assert_allclose(q.log_det, log_det, atol=1e-11)


@pytest.mark.extended
@pytest.mark.parametrize("negative", [False, True])
def test_derivatives_are_those_of_the_formulas(negative):
    """In the prior and in the sites, forward and backward; κ = 0 and a singular prior included."""
    numbers = [jnp.asarray(x) for x in setting(negative)]
    random = np.random.default_rng(1)

    def ours(*numbers):
        q = member(*numbers)
        return q.log_det, q.mean, q.variance, q.covariance()

    def theirs(*numbers):
        log_det, mean, covariance = written_out(*numbers)
        return log_det, mean, jnp.diagonal(covariance), covariance

    tangents = [jnp.asarray(random.normal(size=x.shape)) for x in numbers]
    tangents[0] = tangents[0] + tangents[0].T
    for actual, expected in zip(*(jax.jvp(f, numbers, tangents)[1] for f in (ours, theirs)), strict=True):
        assert_allclose(actual, expected, atol=1e-11)
    cotangents = tuple(jnp.asarray(random.normal(size=x.shape)) for x in theirs(*numbers))
    slopes = [list(jax.vjp(f, *numbers)[1](cotangents)) for f in (ours, theirs)]
    for slope in slopes:
        slope[0] = slope[0] + slope[0].T  # only symmetric changes are changes of a covariance
    for actual, expected in zip(*slopes, strict=True):
        assert_allclose(actual, expected, atol=1e-11)


@pytest.mark.extended
def test_the_decrement_of_many_outputs():
    """½⟨d, Fd⟩ by half of V in single precision, beside the derivative of the moments; a bound where it is large."""
    q = member(*setting(negative=True, size=LARGE))
    random = np.random.default_rng(1)
    gradient = jnp.asarray(random.normal(size=LARGE)), jnp.asarray(random.normal(size=LARGE))
    for size, exact in ((1e-2, True), (10.0, False)):
        step = Step(jax.tree.map(lambda g, size=size: size * g, gradient), None, 1.0, 1.0, 0.0)
        direction = q.direction(step)
        expected = 0.5 * q.inner(direction, q.fisher_product(direction))
        assert q.decrement(step) > (1 - 1e-5) * expected
        assert not exact or q.decrement(step) < (1 + 1e-5) * expected


@pytest.mark.extended
def test_density_and_entropy_are_relative_to_the_prior():
    numbers = setting(negative=True, singular=False)
    q, (_, mean, covariance) = member(*numbers), written_out(*numbers)
    prior, dense = blr.Gaussian(numbers[1], np.linalg.inv(numbers[0])), blr.Gaussian(mean, np.linalg.inv(covariance))
    theta = q.sample(jax.random.key(0), (5,))
    assert_allclose(q.log_prob(theta), dense.log_prob(theta) - prior.log_prob(theta), atol=1e-8)
    assert_allclose(q.entropy(), -dense.kl(prior), atol=1e-9)


@pytest.mark.extended
def test_order_does_not_matter_to_what_is_proper():
    """A negative site in the first block that only the last one's makes proper; and one that nothing does."""
    prior, first = np.ones((LARGE, LARGE)) + 1e-3 * np.eye(LARGE), np.zeros(LARGE)
    curve = np.zeros(LARGE)
    curve[0], curve[-1] = -1.5, 2.0
    numbers = prior, first, first, curve
    q = member(*numbers)
    assert bool(q.inside())
    assert_allclose(q.covariance(), written_out(*numbers)[2], rtol=1e-9)
    curve[-1] = 0.1
    assert not bool(member(*numbers).inside())


@pytest.mark.extended
def test_elsewhere_is_conditioning():
    prior, mean, first, curve = setting(negative=True)
    kept = SIZE - 3
    q = GaussianProcess(prior[:kept, :kept], mean[:kept], (first[:kept], -0.5 * curve[:kept]))
    sites = [np.append(x[:kept], np.zeros(3)) for x in (first, curve)]
    _, expected, covariance = written_out(prior, mean, *sites)
    actual, full = q.predict(prior[:kept, kept:], prior[kept:, kept:], mean[kept:])
    assert_allclose(actual, expected[kept:], atol=1e-12)
    assert_allclose(full, covariance[kept:, kept:], atol=1e-12)
    _, variance = q.predict(prior[:kept, kept:], jnp.diagonal(prior)[kept:], mean[kept:])
    assert_allclose(variance, np.diag(covariance)[kept:], atol=1e-12)


@pytest.mark.extended
def test_almost_noiseless_in_float32():
    """κ = 10⁴: the posterior all but interpolates, and little is lost to differences of large numbers."""
    x = np.linspace(0, 1, 40, dtype=np.float32)
    prior = np.exp(-np.abs(x[:, None] - x)).astype(np.float32)
    y = np.sin(6 * x).astype(np.float32)
    curve = np.full(40, 1e4, np.float32)
    q = GaussianProcess(prior, 0.0, (curve * y, -0.5 * curve))
    assert q.mean.dtype == jnp.float32
    exact = GaussianProcess(prior.astype(float), 0.0, (curve * y.astype(float), -0.5 * curve.astype(float)))
    assert_allclose(q.mean, exact.mean, atol=1e-5)
    assert_allclose(q.entropy(), exact.entropy(), rtol=2e-4)
    assert_allclose(q.variance, exact.variance, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((2, 3)),), r"\(N, N\), got \(2, 3\)"),
        ((np.eye(3), np.zeros(2)), "prior mean of 3 outputs"),
        ((np.eye(3), 0.0, (np.zeros(2), np.zeros(3))), r"sites are λ = \(ν, −½κ\)"),
        ((np.array([[1.0, 0.0], [0.5, 1.0]]),), "not symmetric"),
        ((np.array([[1.0, 2.0], [2.0, 1.0]]),), "not positive semi-definite"),
        ((np.array([[1.0, np.nan], [np.nan, 1.0]]),), "not finite"),
    ],
)
def test_a_prior_that_is_none(arguments, words):
    with pytest.raises(ValueError, match=words):
        GaussianProcess(*arguments)


@pytest.mark.extended
def test_sites_form_and_rows_left_out():
    """The site form takes the same steps; without row n its density is the dense Gaussian's prediction of it."""
    prior, _, _, _ = setting()
    y = jnp.sin(jnp.arange(SIZE * 1.0)).at[5].set(jnp.nan)
    model = blr.Model({"f": GaussianProcess(prior)}, {"y": factors.linear("y", {"f": None}, precision=2.0)})
    result = blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1)
    sited = blr.fit(blr.cvi(1.0, sites=True), model, None, {"y": y}, steps=2, tolerance=1e-12)
    assert_allclose(sited.q["f"].mean, result.q["f"].mean, atol=1e-12)
    left = result.loo().log_density
    observed = [n for n in range(SIZE) if n not in (0, 5)]
    noisy = prior[np.ix_(observed, observed)] + 0.5 * np.eye(len(observed))
    weights = np.linalg.solve(noisy, prior[observed, 0])
    variance = prior[0, 0] + 0.5 - weights @ prior[observed, 0]
    miss = y[0] - weights @ y[np.array(observed)]
    assert_allclose(left[0], -0.5 * (np.log(2 * np.pi * variance) + miss**2 / variance), rtol=1e-9)
    assert left[5] == 0
