"""Densities, entropies and divergences against scipy's and numpyro's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats as stats

from bayesrule.families import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    ExponentialFamily,
    FixedGaussian,
    Gamma,
    Gaussian,
    NormalGamma,
    NormalWishart,
    Poisson,
    Product,
    Wishart,
)

# Optional: the dev extra installs it.
dist = pytest.importorskip("numpyro.distributions")

MATRIX = np.array([[2.0, 0.3, -0.4], [0.3, 1.0, 0.2], [-0.4, 0.2, 0.7]])
MEAN = np.array([0.5, -1.0, 2.0])
SCALES = np.array([0.5, 2.0, 1.5])


def close(actual, desired, tolerance=1e-12):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def normal_gamma(theta):
    """log N(x | m, 1/κt) + log Gamma(t | a, b)."""
    x, t = theta["mean"], theta["precision"]
    return stats.norm(0.5, 1 / np.sqrt(2.0 * t)).logpdf(x) + stats.gamma(3.0, scale=1 / 1.5).logpdf(t)


def normal_wishart(theta):
    x, precision = theta["mean"], theta["precision"]
    normal = stats.multivariate_normal(MEAN, np.linalg.inv(2.0 * precision)).logpdf(x)
    return normal + stats.wishart(5.0, 0.3 * MATRIX).logpdf(precision)


DENSITIES = {
    "gamma": (Gamma(2.5, 1.5), 0.8, stats.gamma(2.5, scale=1 / 1.5).logpdf),
    "beta": (Beta(0.7, 3.0), 0.2, stats.beta(0.7, 3.0).logpdf),
    "dirichlet": (
        Dirichlet([0.7, 3.0, 2.0]),
        np.array([0.2, 0.5, 0.3]),
        stats.dirichlet([0.7, 3.0, 2.0]).logpdf,
    ),
    "poisson": (Poisson(4.2), 7, stats.poisson(4.2).logpmf),
    "categorical": (Categorical(np.log(MEAN**2)), 2, lambda k: np.log(MEAN[k] ** 2 / np.sum(MEAN**2))),
    "bernoulli": (
        Bernoulli(0.4),
        -1.0,
        lambda x: stats.bernoulli(1 / (1 + np.exp(-0.8))).logpmf((x + 1) / 2),
    ),
    "wishart": (Wishart(5.0, 0.3 * MATRIX), MATRIX + np.eye(3), stats.wishart(5.0, 0.3 * MATRIX).logpdf),
    "normal–gamma": (NormalGamma(0.5, 2.0, 3.0, 1.5), {"mean": -0.3, "precision": 1.7}, normal_gamma),
    "normal–Wishart": (
        NormalWishart(MEAN, 2.0, 5.0, 0.3 * MATRIX),
        {"mean": np.array([0.1, 0.2, 1.0]), "precision": MATRIX + np.eye(3)},
        normal_wishart,
    ),
    "fixed": (
        FixedGaussian(MEAN, SCALES),
        np.zeros(3),
        lambda x: stats.norm(MEAN, SCALES**-0.5).logpdf(x).sum(),
    ),
    "diagonal": (
        DiagonalGaussian(MEAN, SCALES),
        np.zeros(3),
        lambda x: stats.norm(MEAN, SCALES**-0.5).logpdf(x).sum(),
    ),
    "full": (
        Gaussian(MEAN, MATRIX),
        np.zeros(3),
        stats.multivariate_normal(MEAN, np.linalg.inv(MATRIX)).logpdf,
    ),
}


@pytest.mark.sampled("poisson", "bernoulli", "normal\\u2013gamma", "fixed", "diagonal", "full")
@pytest.mark.parametrize("name", DENSITIES)
def test_density(name):
    q, theta, expected = DENSITIES[name]
    close(q.log_prob(jax.tree.map(jnp.asarray, theta)), expected(theta))


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (Gamma(2.5, 1.5), stats.gamma(2.5, scale=1 / 1.5).entropy()),
        (Beta(0.7, 3.0), stats.beta(0.7, 3.0).entropy()),
        (Dirichlet([0.7, 3.0, 2.0]), stats.dirichlet([0.7, 3.0, 2.0]).entropy()),
        (Wishart(5.0, 0.3 * MATRIX), stats.wishart(5.0, 0.3 * MATRIX).entropy()),
        (Categorical(np.log(SCALES)), stats.entropy(SCALES)),
        (Bernoulli(0.4), stats.bernoulli(1 / (1 + np.exp(-0.8))).entropy()),
        (DiagonalGaussian(MEAN, SCALES), stats.norm(MEAN, SCALES**-0.5).entropy().sum()),
        (FixedGaussian(MEAN, SCALES), stats.norm(MEAN, SCALES**-0.5).entropy().sum()),
        (Gaussian(MEAN, MATRIX), stats.multivariate_normal(MEAN, np.linalg.inv(MATRIX)).entropy()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_entropy(q, expected):
    close(q.entropy(), expected)


@pytest.mark.extended
def test_poisson_entropy_and_its_derivative():
    rates = np.array([1e-3, 0.05, 0.7, 3.0, 20.0, 150.0, 1000.0])
    close(Poisson(rates).entropy(), stats.poisson(rates).entropy(), 1e-11)
    # d/dr E log k! = E log(k + 1).
    slope = jax.grad(lambda r: -jnp.sum(Poisson(r).expected_log_base()))(jnp.asarray(rates))
    counts = np.arange(3000)[:, None]
    close(slope, np.sum(stats.poisson(rates).pmf(counts) * np.log(counts + 1), axis=0), 1e-10)


@pytest.mark.parametrize(
    ("q", "other", "peer", "peer_other"),
    [
        (Gamma(2.5, 1.5), Gamma(1.2, 0.4), dist.Gamma(2.5, 1.5), dist.Gamma(1.2, 0.4)),
        (Beta(0.7, 3.0), Beta(2.0, 1.5), dist.Beta(0.7, 3.0), dist.Beta(2.0, 1.5)),
        (
            Dirichlet([0.7, 3.0, 2.0]),
            Dirichlet([1.0, 1.5, 4.0]),
            dist.Dirichlet(jnp.array([0.7, 3.0, 2.0])),
            dist.Dirichlet(jnp.array([1.0, 1.5, 4.0])),
        ),
        (
            Gaussian(MEAN, MATRIX),
            Gaussian(-MEAN, 2 * MATRIX + np.eye(3)),
            dist.MultivariateNormal(MEAN, precision_matrix=MATRIX),
            dist.MultivariateNormal(-MEAN, precision_matrix=2 * MATRIX + np.eye(3)),
        ),
        (
            DiagonalGaussian(MEAN, SCALES),
            DiagonalGaussian(-MEAN, 2 * SCALES),
            dist.Normal(MEAN, SCALES**-0.5).to_event(1),
            dist.Normal(-MEAN, (2 * SCALES) ** -0.5).to_event(1),
        ),
        (
            Categorical(np.log(SCALES)),
            Categorical(MEAN),
            dist.Categorical(logits=np.log(SCALES)),
            dist.Categorical(logits=MEAN),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_divergence(q, other, peer, peer_other):
    if isinstance(q, Categorical):  # numpyro has none registered
        expected = np.sum(peer.probs * (np.log(peer.probs) - np.log(peer_other.probs)))
    else:
        expected = dist.kl_divergence(peer, peer_other)
    close(q.kl(other), expected)


@pytest.mark.extended
def test_product_sums_batches_and_keeps_sample_axes():
    rates = jnp.array([1.5, 0.4, 2.0])
    q = Product({"rates": Gamma(2.5, rates), "chance": Beta(0.7, 3.0)})
    theta = q.sample(jax.random.key(0), (4,))
    expected = stats.gamma(2.5, scale=1 / rates).logpdf(theta["rates"]).sum(-1)
    close(q.log_prob(theta), expected + stats.beta(0.7, 3.0).logpdf(theta["chance"]))
    close(q.entropy(), stats.gamma(2.5, scale=1 / rates).entropy().sum() + stats.beta(0.7, 3.0).entropy())


class VonMises(ExponentialFamily):
    """An angle, T = (cos θ, sin θ): a family of a user who gives four methods and no more."""

    cosine: jax.Array
    sine: jax.Array
    ranks = (0, 0)

    def statistics(self, theta):
        return jnp.cos(theta), jnp.sin(theta)

    def log_partition(self, natural):
        length = jnp.hypot(*natural)
        return jnp.log(jax.scipy.special.i0e(length)) + length

    def log_base(self, theta):
        return -jnp.log(2 * jnp.pi)

    def sample(self, key, shape=()):
        return jax.random.uniform(key, shape + self.cosine.shape, maxval=2 * jnp.pi)  # for shapes only


@pytest.mark.extended
def test_a_family_of_four_methods_gets_the_rest():
    length, angle = np.array([0.5, 3.0]), np.array([0.3, -1.0])
    q = VonMises(jnp.asarray(length * np.cos(angle)), jnp.asarray(length * np.sin(angle)))
    peer = stats.vonmises(length, loc=angle)
    close(q.log_prob(jnp.array([1.0, 2.0])), peer.logpdf(np.array([1.0, 2.0])))
    close(q.entropy(), peer.entropy())
    shrink = scipy.special.i1(length) / scipy.special.i0(length)
    close(q.expectation(), (shrink * np.cos(angle), shrink * np.sin(angle)))
    start = VonMises(jnp.array([0.1, 0.2]), jnp.array([0.3, -0.1]))
    close(start.with_expectation(q.expectation()).natural(), q.natural(), 1e-10)
    close(q.to_natural_gradient(q.fisher_product(q.natural())), q.natural(), 1e-12)
    assert VonMises.from_natural(q.natural()).kl(q).shape == (2,)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Gamma(2.0, -1.0), "rate must be above 0"),
        (lambda: Gamma(-2.0, 1.0), "shape must be above 0"),
        (lambda: Gamma(jnp.ones(2), jnp.ones(3)), "do not broadcast"),
        (lambda: Dirichlet(1.0), "must be a vector"),
        (lambda: Wishart(5.0, jnp.ones((2, 3))), "must be a square matrix"),
        (lambda: Wishart(1.0, jnp.eye(3)), "df must be above 2"),
        (lambda: NormalWishart(jnp.ones(2), 1.0, 5.0, jnp.eye(3)), "same number of dimensions"),
        (lambda: Bernoulli(jnp.zeros(17)).support(), "too many to enumerate"),
        (lambda: Product({"a": 1.0}), "dict of exponential families"),
        (lambda: Product.from_natural({"a": 1.0}), "with_natural"),
        (lambda: Gamma(1.0, 1.0).kl(Beta(1.0, 1.0)), "two members of one family"),
    ],
)
def test_errors_say_what_is_wrong(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_integers_and_numbers_become_floating_arrays():
    assert Gamma(2, 3).rate.dtype == jnp.float64
    assert Gamma(2, jnp.float32(3)).shape.dtype == jnp.float32
    assert Dirichlet([1, 2]).concentration.dtype == jnp.float64
