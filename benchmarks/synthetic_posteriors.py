"""Posteriors of known shape: Gaussian, skewed, heavy-tailed, funnels, bananas, several modes, near bounds, and models
that people write.

The moments are closed forms, or sums over a fine grid of a density written with SciPy in unconstrained coordinates (so
independently of the model), or come from long runs of NUTS: `tests/reference/posterior_cases.json` has those with the
data that they belong to, and `tests/reference/make_posterior_cases.py` made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from posterior_case import Array, Case, Draws, Expected, Mode, Moments, Space, scalar_names
from posteriordb_models import arma_errors, first_mu, flat, hmm_log_likelihood, log, log_gap, normal_vector
from scipy import special, stats

REFERENCE = Path(__file__).parent.parent / "tests" / "reference" / "posterior_cases.json"


class Scalars:
    """Labelled sites, and functions of draws, side by side: called with draws it gives (n, k)."""

    def __init__(self, parts: Mapping[str, str | Callable[[Draws], Array]]) -> None:
        self.parts = parts

    def values(self, draws: Draws) -> dict[str, Array]:
        return {label: draws[part] if isinstance(part, str) else part(draws) for label, part in self.parts.items()}

    def __call__(self, draws: Draws) -> Array:
        return np.concatenate([np.reshape(x, (len(x), -1)) for x in self.values(draws).values()], axis=1)

    def names(self, draws: Draws) -> tuple[str, ...]:
        return tuple(name for label, x in self.values(draws).items() for name in scalar_names(label, x.shape[1:]))


def same(*sites: str) -> dict[str, str]:
    """Sites under their own names."""
    return {site: site for site in sites}


def logit(site: str, low: float = 0.0, high: float = 1.0) -> Callable[[Draws], Array]:
    """log((x − low) / (high − x)), kept finite where rounding has put x on the bound."""

    def build(draws: Draws) -> Array:
        p = np.clip((draws[site] - low) / (high - low), 1e-30, 1 - 1e-16)
        return np.log(p) - np.log1p(-p)

    return build


def log_ratios(site: str) -> Callable[[Draws], Array]:
    """log(p_i / p_last) of a simplex."""
    return lambda draws: np.log(draws[site][..., :-1]) - np.log(draws[site][..., -1:])


def grid_moments(
    quantities: Mapping[Space, Scalars],
    axes: list[Array],
    log_density: Callable[..., Array],
    sites: Callable[..., Draws],
) -> dict[Space, Moments]:
    """Moments by sums over the product of evenly spaced axes.

    Sums over even spacings converge faster than any power for smooth densities that vanish at both ends. The density
    is one of the coordinates on the axes, so unconstrained ones come with their Jacobian.

    Args:
        quantities: what is averaged.
        axes: the places on each coordinate.
        log_density: of the coordinates, up to a constant.
        sites: the sites' values from the coordinates.
    """
    mesh = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    logs = log_density(*mesh)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    draws = sites(*mesh)
    found: dict[Space, Moments] = {}
    for space, scalars in quantities.items():
        values = scalars(draws)
        mean = weights @ values
        found[space] = Moments.exact(scalars.names(draws), mean, np.sqrt(weights @ (values - mean) ** 2))
    return found


def axis(low: float, high: float, points: int = 4001) -> Array:
    return np.linspace(low, high, points)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


# ── Gaussians ────────────────────────────────────────────────────────────────────────────────────────────────────────


def gaussian(name: str, mean: Array, covariance: Array, precision: Any = "any") -> Case:
    """N(mean, covariance) of one vector, as a log density."""
    inverse = np.linalg.inv(covariance)
    inverse = (inverse + inverse.T) / 2

    def log_density(params: Any) -> Any:
        off = params["x"] - mean
        return -0.5 * off @ (inverse @ off)

    moments = Moments.exact(tuple(scalar_names("x", mean.shape)), mean, np.sqrt(np.diag(covariance)))
    return Case(
        name,
        {"unconstrained": moments},
        {"unconstrained": Scalars(same("x"))},
        len(mean),
        "gaussian",
        log_density=log_density,
        start={"x": np.zeros(len(mean))},
        precision=precision,
    )


def gaussians() -> list[Case]:
    rotation = np.linalg.qr(rng(0).normal(size=(10, 10)))[0]
    ill = rotation @ np.diag(np.logspace(-3, 3, 10)) @ rotation.T
    lags = np.abs(np.subtract.outer(np.arange(50), np.arange(50)))
    scales = np.logspace(-1, 1, 50)
    chain = scales[:, None] * 0.9**lags * scales
    close = np.full((5, 5), 1 - 1e-7) + 1e-7 * np.eye(5)
    return [
        gaussian("gaussian_ill_conditioned", rng(1).normal(size=10), ill),
        gaussian("gaussian_50", rng(2).normal(size=50), chain),
        gaussian("gaussian_near_singular", np.arange(5.0), close, "float64"),
    ]


def ridge(X: Any, y: Any) -> None:
    """y ~ N(Xw, 0.5²), w ~ N(0, I)."""
    w = normal_vector("w", 1.0, X.shape[1])
    numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def wide_regression() -> Case:
    """More columns (40) than rows (20): half of the directions are the prior's."""
    X = rng(3).normal(size=(20, 40))
    y = X @ rng(4).normal(size=40) + 0.5 * rng(5).normal(size=20)
    covariance = np.linalg.inv(np.eye(40) + X.T @ X / 0.25)
    moments = Moments.exact(tuple(scalar_names("w", (40,))), covariance @ X.T @ y / 0.25, np.sqrt(np.diag(covariance)))
    quantities = {"unconstrained": Scalars(same("w"))}
    return Case("wide_regression", {"unconstrained": moments}, quantities, 40, "gaussian", ridge, (X, y))


# ── Skewed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def gamma_moments(label: str, shape: Array, rate: Array) -> dict[Space, Moments]:
    """Of Gamma variables and of their logarithms."""
    names = tuple(scalar_names(label, shape.shape))
    logs = tuple(scalar_names(f"log {label}", shape.shape))
    return {
        "constrained": Moments.exact(names, (shape / rate).ravel(), (np.sqrt(shape) / rate).ravel()),
        "unconstrained": Moments.exact(
            logs, (special.digamma(shape) - np.log(rate)).ravel(), np.sqrt(special.polygamma(1, shape)).ravel()
        ),
    }


def positive(label: str) -> dict[Space, Scalars]:
    return {"constrained": Scalars(same(label)), "unconstrained": Scalars({f"log {label}": log(label)})}


def gamma_sites(shape: Any) -> None:
    numpyro.sample("x", dist.Gamma(shape, 1.0).to_event(1))


def log_gamma(name: str, shape: list[float], expected: Expected) -> Case:
    """Independent Gamma variables: their logarithms are skewed to the left by about −1/√shape."""
    concentrations = np.array(shape)
    moments = gamma_moments("x", concentrations, np.ones(len(shape)))
    return Case(name, moments, positive("x"), len(shape), expected, gamma_sites, (concentrations,))


def exponential_model(y: Any) -> None:
    """One waiting time; its rate has the prior Gamma(1, 1)."""
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    numpyro.sample("y", dist.Exponential(rate), obs=y)


def exponential_one_observation() -> Case:
    moments = gamma_moments("rate", np.array(2.0), np.array(1 + 0.4))
    return Case("exponential_one_observation", moments, positive("rate"), 1, "skew", exponential_model, (0.4,))


def lognormal_rates_model(exposure: Any, counts: Any) -> None:
    with numpyro.plate("groups", len(counts)):
        rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
        numpyro.sample("counts", dist.Poisson(rate * exposure), obs=counts)


def lognormal_rates() -> Case:
    """Eight independent rates with log-normal priors, and counts between 0 and 30."""
    exposure = np.array([0.5, 1.0, 1.0, 2.0, 2.0, 5.0, 5.0, 10.0])
    counts = np.array([0, 0, 3, 1, 6, 4, 12, 30])
    quantities = positive("rate")
    parts = [
        grid_moments(
            quantities,
            [axis(-9, 6)],
            lambda u, e=e, c=c: stats.norm.logpdf(u) + stats.poisson.logpmf(c, np.exp(u) * e),
            lambda u: {"rate": np.exp(u)},
        )
        for e, c in zip(exposure, counts, strict=True)
    ]
    moments: dict[Space, Moments] = {}
    for space, label in (("constrained", "rate"), ("unconstrained", "log rate")):
        mean, sd = (np.concatenate([getattr(part[space], what) for part in parts]) for what in ("mean", "sd"))
        moments[space] = Moments.exact(tuple(scalar_names(label, (8,))), mean, sd)
    return Case("lognormal_rates", moments, quantities, 8, "skew", lognormal_rates_model, (exposure, counts))


def few_counts_model(counts: Any) -> None:
    u = numpyro.sample("u", dist.Normal(0.0, 2.0))
    numpyro.sample("counts", dist.Poisson(jnp.exp(u)).expand([len(counts)]), obs=counts)


def poisson_few_counts() -> Case:
    """The logarithm of a rate after the counts 0, 0, 1."""
    counts = np.array([0, 0, 1])
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("u"))}
    moments = grid_moments(
        quantities,
        [axis(-16, 8)],
        lambda u: stats.norm.logpdf(u, 0, 2) + stats.poisson.logpmf(counts, np.exp(u)[:, None]).sum(1),
        lambda u: {"u": u},
    )
    return Case("poisson_few_counts", moments, quantities, 1, "skew", few_counts_model, (counts,))


def simplex_model(counts: Any) -> None:
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(len(counts))))
    numpyro.sample("counts", dist.Multinomial(probs=p, total_count=int(np.sum(SIMPLEX_COUNTS))), obs=counts)


SIMPLEX_COUNTS = np.array([12, 30, 5, 53])


def simplex() -> Case:
    """Probabilities of four classes after 100 observations: Dirichlet(13, 31, 6, 54)."""
    a = SIMPLEX_COUNTS + 1.0
    total = a.sum()
    ratios = tuple(f"log p[{i}]/p[3]" for i in range(3))
    moments: dict[Space, Moments] = {
        "constrained": Moments.exact(
            tuple(scalar_names("p", (4,))), a / total, np.sqrt(a * (total - a) / (total**2 * (total + 1)))
        ),
        "unconstrained": Moments.exact(
            ratios,
            special.digamma(a[:3]) - special.digamma(a[3]),
            np.sqrt(special.polygamma(1, a[:3]) + special.polygamma(1, a[3])),
        ),
    }
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(same("p")),
        "unconstrained": Scalars({"ratio": log_ratios("p")}),
    }
    return Case("simplex", moments, quantities, 3, "gaussian", simplex_model, (SIMPLEX_COUNTS,))


def few_normal_model(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5.0))
    numpyro.sample("y", dist.Normal(mu, sigma).expand([len(y)]), obs=y)


def few_normal_observations() -> Case:
    """Mean and standard deviation of four observations: μ has heavy tails, σ is skewed."""
    y = np.array([1.2, 2.9, 2.1, 3.4])
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(same("mu", "sigma")),
        "unconstrained": Scalars({"mu": "mu", "log sigma": log("sigma")}),
    }

    # The coordinates are z = (μ − 2.4) / σ and u = log σ, in which the density has no narrow parts.
    def log_density(z: Array, u: Array) -> Array:
        mu, sigma = 2.4 + np.exp(u) * z, np.exp(u)
        prior = stats.norm.logpdf(mu, 0, 10) + stats.halfnorm.logpdf(sigma, scale=5)
        return prior + 2 * u + stats.norm.logpdf(y, mu[:, None], sigma[:, None]).sum(1)

    moments = grid_moments(
        quantities,
        [axis(-5, 5, 121), axis(-4, 4, 321)],
        log_density,
        lambda z, u: {"mu": 2.4 + np.exp(u) * z, "sigma": np.exp(u)},
    )
    return Case("few_normal_observations", moments, quantities, 2, "heavy", few_normal_model, (y,))


# ── Heavy tails ──────────────────────────────────────────────────────────────────────────────────────────────────────


def student(name: str, dof: float, size: int) -> Case:
    """A multivariate Student's t, correlated 0.5, with unit scales."""
    inverse = np.linalg.inv(np.full((size, size), 0.5) + 0.5 * np.eye(size))

    def log_density(params: Any) -> Any:
        x = params["x"]
        return -0.5 * (dof + size) * jnp.log1p(x @ (inverse @ x) / dof)

    moments = Moments.exact(tuple(scalar_names("x", (size,))), 0.0, np.sqrt(dof / (dof - 2)))
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("x"))}
    start = {"x": np.ones(size)}
    return Case(name, {"unconstrained": moments}, quantities, size, "heavy", log_density=log_density, start=start)


def cauchy_model(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Cauchy(mu, 1.0).expand([len(y)]), obs=y)


def cauchy_location() -> Case:
    """The place of a Cauchy distribution after five observations, one of them far away."""
    y = np.array([-1.2, 0.3, 0.7, 2.5, 9.0])
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("mu"))}
    moments = grid_moments(
        quantities,
        [axis(-60, 60, 20001)],
        lambda mu: stats.norm.logpdf(mu, 0, 10) + stats.cauchy.logpdf(y, mu[:, None]).sum(1),
        lambda mu: {"mu": mu},
    )
    return Case("cauchy_location", moments, quantities, 1, "heavy", cauchy_model, (y,))


# ── Funnels and bananas ──────────────────────────────────────────────────────────────────────────────────────────────


def funnel_moments(others: int) -> Moments:
    """v ~ N(0, 3²) and asinh x for x ~ N(0, e^v): x itself has the sd e^{9/4} and no useful estimate of it."""
    v, z = axis(-24, 24, 161)[:, None], axis(-9, 9, 2001)
    weights = np.exp(-(v**2) / 18 - z**2 / 2)
    sd = np.sqrt(np.sum(weights * np.arcsinh(np.exp(v / 2) * z) ** 2) / weights.sum())
    return Moments.exact(("v", *scalar_names("asinh x", (others,))), 0.0, np.array([3.0] + [sd] * others))


FUNNEL: dict[Space, Scalars] = {"unconstrained": Scalars({"v": "v", "asinh x": lambda draws: np.arcsinh(draws["x"])})}


def funnel_sites(size: int) -> Callable[[], None]:
    def model() -> None:
        v = numpyro.sample("v", dist.Normal(0.0, 3.0))
        with numpyro.plate("others", size - 1):
            numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)))

    return model


def funnel(size: int) -> Case:
    """Neal's funnel as location-scale sites, so that a change of the centring makes it Gaussian."""
    moments = {"unconstrained": funnel_moments(size - 1)}
    return Case(f"funnel_{size}", moments, FUNNEL, size, "centring", funnel_sites(size))


def funnel_density(size: int) -> Case:
    """Neal's funnel as a density, in which nobody sees location-scale sites."""

    def log_density(params: Any) -> Any:
        v, x = params["v"], params["x"]
        return -(v**2) / 18 - 0.5 * jnp.sum(x**2) * jnp.exp(-v) - 0.5 * (size - 1) * v

    moments = {"unconstrained": funnel_moments(size - 1)}
    start = {"v": np.zeros(()), "x": np.zeros(size - 1)}
    return Case(f"funnel_{size}_density", moments, FUNNEL, size, "hard", log_density=log_density, start=start)


def banana(name: str, bend: float, width: float, expected: Expected) -> Case:
    """x ~ N(0, 1), y ~ N(bend·(x² − 1), width²)."""

    def log_density(params: Any) -> Any:
        x, y = params["x"], params["y"]
        return -0.5 * x**2 - 0.5 * ((y - bend * (x**2 - 1)) / width) ** 2

    moments = Moments.exact(("x", "y"), 0.0, np.array([1.0, np.sqrt(width**2 + 2 * bend**2)]))
    start = {"x": np.zeros(()), "y": np.zeros(())}
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("x", "y"))}
    return Case(name, {"unconstrained": moments}, quantities, 2, expected, log_density=log_density, start=start)


# ── Several modes ────────────────────────────────────────────────────────────────────────────────────────────────────


def gaussian_mixture(name: str, weights: list[float], means: Array, scales: Array) -> Case:
    """A mixture of spherical Gaussians as a log density; modes are told apart by the nearest mean along x[0]."""
    size = means.shape[1]
    middle = means[:, 0].mean()

    def log_density(params: Any) -> Any:
        squares = jnp.sum(((params["x"] - means) / scales) ** 2, axis=1)
        return jax.nn.logsumexp(jnp.log(jnp.array(weights)) - 0.5 * squares - jnp.sum(jnp.log(scales), axis=1))

    shares = np.array(weights)
    mean = shares @ means
    sd = np.sqrt(shares @ (scales**2 + means**2) - mean**2)
    modes = (
        Mode("low", weights[0], lambda draws: draws["x"][:, 0] < middle),
        Mode("high", weights[1], lambda draws: draws["x"][:, 0] > middle),
    )
    return Case(
        name,
        {"unconstrained": Moments.exact(tuple(scalar_names("x", (size,))), mean, sd)},
        {"unconstrained": Scalars(same("x"))},
        size,
        "mixture",
        log_density=log_density,
        start={"x": np.zeros(size)},
        modes=modes,
    )


def mixtures() -> list[Case]:
    ones = np.ones((2, 2))
    five = np.zeros((2, 5))
    five[:, 0] = [-3.0, 3.0]
    return [
        gaussian_mixture("two_modes_equal_far", [0.5, 0.5], np.array([[-4.0, -4.0], [4.0, 4.0]]), ones),
        gaussian_mixture(
            "two_modes_unequal_far", [0.8, 0.2], np.array([[-4.0, 0.0], [4.0, 2.0]]), ones * [[1.0], [0.6]]
        ),
        gaussian_mixture("two_modes_near", [0.5, 0.5], np.array([[-1.5, 0.0], [1.5, 0.0]]), ones),
        gaussian_mixture("two_modes_near_unequal", [0.7, 0.3], np.array([[-1.5, 0.0], [1.5, 1.0]]), ones * 0.8),
        gaussian_mixture("bimodal_in_one_of_five", [0.6, 0.4], five, np.ones((2, 5)) * np.array([1, 1, 2, 0.5, 3])),
    ]


def square_root_model(y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(w**2, 0.5).expand([len(y)]), obs=y)


def square_root() -> Case:
    """A sign that the data cannot tell: y ~ N(w², 0.5²)."""
    y = np.array([1.3, 2.1, 1.8, 1.2])
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("w"))}
    moments = grid_moments(
        quantities,
        [axis(-6, 6)],
        lambda w: stats.norm.logpdf(w) + stats.norm.logpdf(y, w[:, None] ** 2, 0.5).sum(1),
        lambda w: {"w": w},
    )
    modes = (
        Mode("negative", 0.5, lambda draws: draws["w"] < 0),
        Mode("positive", 0.5, lambda draws: draws["w"] > 0),
    )
    return Case("square_root", moments, quantities, 1, "mixture", square_root_model, (y,), modes=modes)


def unordered_model(y: Any) -> None:
    mu = normal_vector("mu", 5.0, 2)
    parts = dist.Normal(mu, 1.0).log_prob(jnp.asarray(y)[:, None])
    numpyro.factor("y", jax.nn.logsumexp(parts, axis=1).sum())


def unordered_mixture() -> Case:
    """Two components without an order: each posterior mode has a mirror image."""
    y = np.array([-2.3, -1.1, -1.9, -0.4, -2.8, -1.5, -1.2, 2.2, 1.1, 3.0, 1.7, 2.4])
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("mu"))}

    def log_density(a: Array, b: Array) -> Array:
        parts = np.logaddexp(stats.norm.logpdf(y, a[:, None]), stats.norm.logpdf(y, b[:, None]))
        return stats.norm.logpdf(a, 0, 5) + stats.norm.logpdf(b, 0, 5) + parts.sum(1)

    moments = grid_moments(
        quantities,
        [axis(-9, 9, 181)] * 2,
        log_density,
        lambda a, b: {"mu": np.stack([a, b], axis=1)},
    )
    modes = (
        Mode("ascending", 0.5, lambda draws: draws["mu"][:, 0] < draws["mu"][:, 1]),
        Mode("descending", 0.5, lambda draws: draws["mu"][:, 0] > draws["mu"][:, 1]),
    )
    return Case("unordered_mixture", moments, quantities, 2, "mixture", unordered_model, (y,), modes=modes)


# ── Near bounds ──────────────────────────────────────────────────────────────────────────────────────────────────────


def beta_model(total: Any, successes: Any) -> None:
    p = numpyro.sample("p", dist.Beta(0.5, 0.5))
    numpyro.sample("successes", dist.Binomial(total, p), obs=successes)


def beta_near_bound(total: int, expected: Expected) -> Case:
    """A probability with the prior Beta(½, ½) after no success in `total` trials."""
    a, b = 0.5, 0.5 + total
    variance = a * b / ((a + b) ** 2 * (a + b + 1))
    moments: dict[Space, Moments] = {
        "constrained": Moments.exact(("p",), a / (a + b), np.sqrt(variance)),
        "unconstrained": Moments.exact(
            ("logit p",),
            special.digamma(a) - special.digamma(b),
            np.sqrt(special.polygamma(1, a) + special.polygamma(1, b)),
        ),
    }
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(same("p")),
        "unconstrained": Scalars({"logit p": logit("p")}),
    }
    return Case(f"beta_{total}_trials", moments, quantities, 1, expected, beta_model, (total, 0))


def small_scale_model(y: Any) -> None:
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0.0, jnp.sqrt(1 + s**2)).expand([len(y)]), obs=y)


def scale_near_zero() -> Case:
    """The scale of an effect that the noise of variance 1 already explains."""
    y = np.array([0.4, -0.9, 0.1, 1.2, -0.3, 0.7, -1.1, 0.2])
    quantities = positive("s")
    moments = grid_moments(
        quantities,
        [axis(-25, 3, 8001)],
        lambda u: (
            stats.halfnorm.logpdf(np.exp(u)) + u + stats.norm.logpdf(y, 0, np.sqrt(1 + np.exp(2 * u))[:, None]).sum(1)
        ),
        lambda u: {"s": np.exp(u)},
    )
    return Case("scale_near_zero", moments, quantities, 1, "skew", small_scale_model, (y,))


def interval_model(y: Any) -> None:
    theta = numpyro.sample("theta", dist.Uniform(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, 0.3).expand([len(y)]), obs=y)


def interval_near_bound() -> Case:
    """A parameter between 0 and 1 whose data lie around 1."""
    y = np.array([1.1, 0.8, 1.3])
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(same("theta")),
        "unconstrained": Scalars({"logit theta": logit("theta")}),
    }
    moments = grid_moments(
        quantities,
        [axis(-20, 30, 8001)],
        lambda u: (
            -np.logaddexp(0, u) - np.logaddexp(0, -u) + stats.norm.logpdf(y, special.expit(u)[:, None], 0.3).sum(1)
        ),
        lambda u: {"theta": special.expit(u)},
    )
    return Case("interval_near_bound", moments, quantities, 1, "skew", interval_model, (y,))


# ── Two parameters, on a grid ────────────────────────────────────────────────────────────────────────────────────────


def line_model(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 5.0))
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


def near_separable() -> Case:
    """Logistic regression on classes that one point keeps from being separable."""
    x = np.array([-2.1, -1.6, -1.2, -0.9, -0.5, -0.2, 0.1, 0.4, 0.8, 1.1, 1.7, 2.2])
    y = np.array([0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1])
    quantities: dict[Space, Scalars] = {"unconstrained": Scalars(same("a", "b"))}

    def log_density(a: Array, b: Array) -> Array:
        signed = np.where(y == 1, 1, -1) * (a[:, None] + b[:, None] * x)
        return stats.norm.logpdf(a, 0, 5) + stats.norm.logpdf(b, 0, 5) - np.logaddexp(0, -signed).sum(1)

    moments = grid_moments(
        quantities, [axis(-15, 15, 401), axis(-8, 28, 401)], log_density, lambda a, b: {"a": a, "b": b}
    )
    return Case("near_separable", moments, quantities, 2, "skew", line_model, (x, y))


def weibull_model(times: Any, censored: Any) -> None:
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(1.0, 1.0))
    survival = -((times / scale) ** shape)
    hazard = jnp.log(shape / scale) + (shape - 1) * jnp.log(times / scale)
    numpyro.factor("times", jnp.sum(survival + jnp.where(censored, 0.0, hazard)))


def weibull_survival() -> Case:
    """Times to failure, a third of them censored."""
    times = np.array([0.8, 1.1, 1.9, 2.2, 2.4, 3.0, 3.1, 3.3, 4.1, 5.0, 5.0, 5.0, 5.0, 2.0, 2.0])
    censored = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0], bool)
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(same("shape", "scale")),
        "unconstrained": Scalars({"log shape": log("shape"), "log scale": log("scale")}),
    }

    def log_density(u: Array, v: Array) -> Array:
        law = stats.weibull_min(np.exp(u)[:, None], scale=np.exp(v)[:, None])
        likelihood = np.where(censored, law.logsf(times), law.logpdf(times)).sum(1)
        return stats.norm.logpdf(u) + stats.norm.logpdf(v, 1, 1) + likelihood

    moments = grid_moments(
        quantities,
        [axis(-1.5, 2.5, 201), axis(-0.5, 4, 201)],
        log_density,
        lambda u, v: {"shape": np.exp(u), "scale": np.exp(v)},
    )
    return Case("weibull_survival", moments, quantities, 2, "gaussian", weibull_model, (times, censored))


# ── Models whose moments are from NUTS ───────────────────────────────────────────────────────────────────────────────


def gp_poisson(x: Any, counts: Any) -> None:
    """Counts with the logarithm of their rate a Gaussian process of unknown scale and lengthscale, whitened."""
    rho = numpyro.sample("rho", dist.InverseGamma(5.0, 10.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(1.0, 1.0))
    white = normal_vector("white", 1.0, len(x))
    kernel = jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2) + 1e-6 * jnp.eye(len(x))
    f = numpyro.deterministic("f", level + alpha * (jnp.linalg.cholesky(kernel) @ white))
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


def arma_short(y: Any) -> None:
    """ARMA(1, 1) on a short series whose two coefficients nearly cancel."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    phi = numpyro.sample("phi", dist.Uniform(-1.0, 1.0))
    theta = numpyro.sample("theta", dist.Uniform(-1.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    numpyro.factor("y", dist.Normal(0.0, sigma).log_prob(arma_errors(jnp.asarray(y), mu, phi, theta)).sum())


def garch(y: Any, first: Any) -> None:
    """GARCH(1, 1): σ²_t = α₀ + α₁ (y_{t−1} − μ)² + β₁ σ²_{t−1}, with β₁ uniform between 0 and 1 − α₁."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    alpha0 = numpyro.sample("alpha0", dist.HalfNormal(5.0))
    alpha1 = numpyro.sample("alpha1", dist.Uniform(0.0, 1.0))
    beta1 = numpyro.sample("beta1", dist.Uniform(0.0, 1.0 - alpha1))

    def step(variance: Any, before: Any) -> Any:
        variance = alpha0 + alpha1 * (before - mu) ** 2 + beta1 * variance
        return variance, variance

    y = jnp.asarray(y)
    start = jnp.asarray(first, y.dtype) ** 2
    _, later = jax.lax.scan(step, start, y[:-1])
    numpyro.sample("y", dist.Normal(mu, jnp.sqrt(jnp.concatenate([start[None], later]))), obs=y)


def stochastic_volatility(y: Any) -> None:
    """y_t ~ N(0, e^{h_t}), h an AR(1) process around μ, through its innovations."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    persistence = numpyro.sample("persistence", dist.Beta(20.0, 3.0))
    phi = 2 * persistence - 1
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.5, 0.5))
    white = normal_vector("white", 1.0, len(y))

    def step(h: Any, z: Any) -> Any:
        h = mu + phi * (h - mu) + sigma * z
        return h, h

    start = mu + sigma / jnp.sqrt(1 - phi**2) * white[0]
    _, later = jax.lax.scan(step, start, white[1:])
    h = numpyro.deterministic("h", jnp.concatenate([start[None], later]))
    numpyro.sample("y", dist.Normal(0.0, jnp.exp(h / 2)), obs=y)


def hierarchical_poisson(counts: Any) -> None:
    """Rates of groups around a common one, as location-scale sites."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", len(counts)):
        u = numpyro.sample("u", dist.Normal(mu, tau))
        numpyro.sample("counts", dist.Poisson(jnp.exp(u)), obs=counts)


def random_slopes(group: Any, x: Any, y: Any, groups: int) -> None:
    """A line for every group, with intercepts and slopes around common ones, as location-scale sites."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 5.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    tau_a = numpyro.sample("tau_a", dist.HalfNormal(2.0))
    tau_b = numpyro.sample("tau_b", dist.HalfNormal(2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("groups", groups):
        a = numpyro.sample("a", dist.Normal(intercept, tau_a))
        b = numpyro.sample("b", dist.Normal(slope, tau_b))
    numpyro.sample("y", dist.Normal(a[group] + b[group] * x, sigma), obs=y)


LOTKA_STEPS_PER_UNIT = 10


def lotka_volterra(times: Any, y: Any) -> None:
    """Two populations at whole times 1, 2, …, n (of which `times` are observed, with log-normal errors), by Runge and
    Kutta's method of order four with ten steps a unit of time."""
    rates = numpyro.sample("rates", dist.LogNormal(jnp.log(jnp.array([0.6, 0.3, 0.8, 0.2])), 0.5).to_event(1))
    first = numpyro.sample("first", dist.LogNormal(jnp.log(jnp.array([4.0, 2.0])), 0.5).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(-1.5, 0.5))

    def slope(z: Any) -> Any:
        prey, predator = jnp.exp(z[0]), jnp.exp(z[1])
        return jnp.stack([rates[0] - rates[1] * predator, rates[3] * prey - rates[2]])

    def step(z: Any, _: Any) -> Any:
        h = 1 / LOTKA_STEPS_PER_UNIT
        a = slope(z)
        b = slope(z + h / 2 * a)
        c = slope(z + h / 2 * b)
        z = z + h / 6 * (a + 2 * b + 2 * c + slope(z + h * c))
        return z, z

    length = LOTKA_STEPS_PER_UNIT * LOTKA_END
    _, path = jax.lax.scan(step, jnp.log(first), None, length=length)
    located = path[LOTKA_STEPS_PER_UNIT * jnp.asarray(times) - 1]
    numpyro.sample("y", dist.Normal(located, sigma), obs=jnp.log(y))


LOTKA_END = 14


def ordered_mixture(y: Any) -> None:
    """Two overlapping normals with a common width, μ₁ < μ₂."""
    mu = flat("mu", constraints.ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Normal(0.0, 5.0).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    parts = dist.Normal(mu, sigma).log_prob(jnp.asarray(y)[:, None]) + jnp.log(jnp.stack([weight, 1 - weight]))
    numpyro.factor("y", jax.nn.logsumexp(parts, axis=1).sum())


def hmm_poisson(counts: Any) -> None:
    """Counts with two hidden levels, states summed out."""
    rows = numpyro.sample("rows", dist.Dirichlet(jnp.array([[4.0, 1.0], [1.0, 4.0]])).to_event(1))
    mu = flat("mu", constraints.positive_ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Gamma(2.0, 0.3).log_prob(mu).sum())
    emission = dist.Poisson(mu).log_prob(jnp.asarray(counts)[:, None])
    numpyro.factor("counts", hmm_log_likelihood(emission, jnp.log(rows), jnp.full(2, jnp.log(0.5))))


def robust_regression(X: Any, y: Any) -> None:
    """Linear regression with Student's t errors of unknown degrees of freedom."""
    beta = normal_vector("beta", 5.0, X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    dof = numpyro.sample("dof", dist.Gamma(2.0, 0.1))
    numpyro.sample("y", dist.StudentT(dof, X @ beta, sigma), obs=y)


def negative_binomial(X: Any, counts: Any) -> None:
    """Overdispersed counts with a log link."""
    beta = normal_vector("beta", 2.0, X.shape[1])
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    numpyro.sample("counts", dist.NegativeBinomial2(jnp.exp(X @ beta), concentration), obs=counts)


def correlations(y: Any) -> None:
    """Scales and correlations of three variables, with an LKJ prior."""
    scales = numpyro.sample("scales", dist.HalfNormal(2.0).expand([y.shape[1]]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(y.shape[1], 2.0))
    law = dist.MultivariateNormal(0.0, scale_tril=scales[:, None] * root)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", law, obs=y)


def rasch(person: Any, item: Any, y: Any, persons: int, items: int) -> None:
    """Answers of persons to items: ability − difficulty on the logit scale."""
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 0.5))
    difficulty = normal_vector("difficulty", 2.0, items)
    with numpyro.plate("persons", persons):
        ability = numpyro.sample("ability", dist.Normal(0.0, spread))
    numpyro.sample("y", dist.Bernoulli(logits=ability[person] - difficulty[item]), obs=y)


def correlation_logits(draws: Draws) -> Array:
    """atanh of the three correlations."""
    root = draws["root"]
    matrix = root @ np.swapaxes(root, 1, 2)
    return np.arctanh(matrix[:, [1, 2, 2], [0, 0, 1]])


def volatilities(draws: Draws) -> Array:
    """h of the stochastic volatility model from its latent sites."""
    phi, sigma, mu = 2 * draws["persistence"] - 1, draws["sigma"], draws["mu"]
    off = sigma / np.sqrt(1 - phi**2) * draws["white"][:, 0]
    path = [off]
    for z in draws["white"].T[1:]:
        off = phi * off + sigma * z
        path.append(off)
    return mu[:, None] + np.stack(path, axis=1)


def _rows(draws: Draws) -> Array:
    p = np.clip(draws["rows"][:, [0, 1], [0, 1]], 1e-30, 1 - 1e-16)
    return np.log(p) - np.log1p(-p)


def _garch_share(draws: Draws) -> Array:
    """logit of β₁ / (1 − α₁)."""
    share = np.clip(draws["beta1"] / (1 - draws["alpha1"]), 1e-30, 1 - 1e-16)
    return np.log(share) - np.log1p(-share)


Parts = Mapping[str, str | Callable[[Draws], Array]]
# name → (model, the data's names in the order of its arguments, dimension, expected, constrained, unconstrained)
SAMPLED: dict[str, tuple[Callable[..., Any], tuple[str, ...], int, Expected, Parts, Parts]] = {
    "gp_poisson": (
        gp_poisson,
        ("x", "counts"),
        18,
        "skew",
        same("rho", "alpha", "level"),
        {"log rho": log("rho"), "log alpha": log("alpha"), "level": "level", "white": "white"},
    ),
    "arma_short": (
        arma_short,
        ("y",),
        4,
        "hard",
        same("mu", "phi", "theta", "sigma"),
        {"mu": "mu", "atanh phi": logit("phi", -1), "atanh theta": logit("theta", -1), "log sigma": log("sigma")},
    ),
    "garch": (
        garch,
        ("y", "first"),
        4,
        "skew",
        same("mu", "alpha0", "alpha1", "beta1"),
        {
            "mu": "mu",
            "log alpha0": log("alpha0"),
            "logit alpha1": logit("alpha1"),
            "logit beta1 share": _garch_share,
        },
    ),
    "stochastic_volatility": (
        stochastic_volatility,
        ("y",),
        103,
        "skew",
        same("mu", "persistence", "sigma"),
        {
            "mu": "mu",
            "logit persistence": logit("persistence"),
            "log sigma": log("sigma"),
            "h": volatilities,
        },
    ),
    "hierarchical_poisson_500": (
        hierarchical_poisson,
        ("counts",),
        502,
        "gaussian",
        same("mu", "tau"),
        {"mu": "mu", "log tau": log("tau"), "u": "u"},
    ),
    "hierarchical_poisson_100": (
        hierarchical_poisson,
        ("counts",),
        102,
        "centring",
        same("mu", "tau"),
        {"mu": "mu", "log tau": log("tau"), "u": "u"},
    ),
    "random_slopes": (
        random_slopes,
        ("group", "x", "y", "groups"),
        45,
        "centring",
        same("tau_a", "tau_b", "sigma"),
        {
            **same("intercept", "slope", "a", "b"),
            "log tau_a": log("tau_a"),
            "log tau_b": log("tau_b"),
            "log sigma": log("sigma"),
        },
    ),
    "lotka_volterra": (
        lotka_volterra,
        ("times", "y"),
        7,
        "skew",
        same("rates", "first", "sigma"),
        {"log rates": log("rates"), "log first": log("first"), "log sigma": log("sigma")},
    ),
    "ordered_mixture": (
        ordered_mixture,
        ("y",),
        4,
        "skew",
        same("mu", "sigma", "weight"),
        {"mu1": first_mu, "log gap": log_gap, "log sigma": log("sigma"), "logit weight": logit("weight")},
    ),
    "hmm_poisson": (
        hmm_poisson,
        ("counts",),
        4,
        "skew",
        {"mu": "mu", "rows": lambda draws: draws["rows"][:, [0, 1], [0, 1]]},
        {"log mu1": lambda draws: np.log(first_mu(draws)), "log gap": log_gap, "logit rows": _rows},
    ),
    "robust_regression": (
        robust_regression,
        ("X", "y"),
        6,
        "gaussian",
        same("sigma", "dof"),
        {"beta": "beta", "log sigma": log("sigma"), "log dof": log("dof")},
    ),
    "negative_binomial": (
        negative_binomial,
        ("X", "counts"),
        4,
        "gaussian",
        same("concentration"),
        {"beta": "beta", "log concentration": log("concentration")},
    ),
    "correlations": (
        correlations,
        ("y",),
        6,
        "gaussian",
        same("scales"),
        {"log scales": log("scales"), "atanh correlation": correlation_logits},
    ),
    "rasch": (
        rasch,
        ("person", "item", "y", "persons", "items"),
        49,
        "centring",
        same("spread"),
        {"log spread": log("spread"), **same("difficulty", "ability")},
    ),
}
# Sites that NUTS samples better as (x − location) / scale.
NONCENTRED = {"hierarchical_poisson_100": ("u",), "rasch": ("ability",), "random_slopes": ("b",)}


def sampled_case(name: str, record: Mapping[str, Any]) -> Case:
    """A case from its record in `posterior_cases.json`: the data, and the moments by space (or none yet)."""
    model, arguments, dimension, expected, constrained, unconstrained = SAMPLED[name]
    quantities: dict[Space, Scalars] = {
        "constrained": Scalars(constrained),
        "unconstrained": Scalars(unconstrained),
    }
    moments: dict[Space, Moments] = {}
    for space in quantities:
        given = record.get(space, {"names": (), "mean": (), "sd": (), "mean_error": (), "sd_error": ()})
        values = (np.asarray(given[what], float) for what in ("mean", "sd", "mean_error", "sd_error"))
        moments[space] = Moments(tuple(given["names"]), *values)
    data = record["data"]
    args = tuple(np.asarray(data[key]) if isinstance(data[key], list) else data[key] for key in arguments)
    return Case(name, moments, quantities, dimension, expected, model, args, source=record.get("made_by", ""))


def synthetic_cases(reference: Path = REFERENCE) -> list[Case]:
    """All synthetic cases, those with moments from NUTS last."""
    records = json.loads(reference.read_text()) if reference.exists() else {}
    return [
        *gaussians(),
        wide_regression(),
        log_gamma("log_gamma_mild", [20.0, 50.0, 200.0], "gaussian"),
        log_gamma("log_gamma", [0.5, 1.0, 3.0], "skew"),
        lognormal_rates(),
        poisson_few_counts(),
        exponential_one_observation(),
        simplex(),
        few_normal_observations(),
        student("student_5", 5.0, 4),
        student("student_3", 3.0, 2),
        cauchy_location(),
        funnel(2),
        funnel(10),
        funnel_density(2),
        funnel_density(10),
        banana("banana_mild", 0.1, 1.0, "gaussian"),
        banana("banana_strong", 1.0, 0.3, "hard"),
        *mixtures(),
        square_root(),
        unordered_mixture(),
        beta_near_bound(0, "heavy"),
        beta_near_bound(3, "skew"),
        scale_near_zero(),
        interval_near_bound(),
        near_separable(),
        weibull_survival(),
        *(sampled_case(name, records[name]) for name in SAMPLED if name in records),
    ]
