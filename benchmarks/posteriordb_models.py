"""The posteriors of posteriordb and of the Inference Gym that have reference moments, as NumPyro models.

Each model follows its published description (Stan's programs of posteriordb, the targets of the Inference Gym): the
same priors, supports and likelihood, and Stan's names for the sites. `read_cases` pairs them with the data and moments
in a folder of JSON files; `tests/reference/posteriordb` has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from posterior_case import Array, Case, Draws, Expected, Moments, Space

FOLDER = Path(__file__).parent.parent / "tests" / "reference" / "posteriordb"


def flat(name: str, support: Any = constraints.real, size: int | None = None) -> Any:
    """A site with a flat prior on its support."""
    shape = () if size is None else (size,)
    batch, event = (shape, ()) if support.event_dim == 0 else ((), shape)
    return numpyro.sample(name, dist.ImproperUniform(support, batch, event))


def normal_vector(name: str, scale: float, size: int) -> Any:
    """A site of independent N(0, scale²) variables."""
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))


def flat_regression(X: Any, y: Any) -> None:
    """y ~ N(Xβ, σ²) with flat priors on β and on σ > 0."""
    beta = flat("beta", size=X.shape[1])
    sigma = flat("sigma", constraints.positive)
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def half_cauchy_regression(X: Any, y: Any) -> None:
    """y ~ N(Xβ, σ²) with a flat prior on β and σ ~ half-Cauchy(2.5)."""
    beta = flat("beta", size=X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def normal_prior_regression(X: Any, y: Any) -> None:
    """y ~ N(Xβ, σ²) with β ~ N(0, 10²) and σ ~ half-N(10)."""
    beta = normal_vector("beta", 10.0, X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(10.0))
    numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def autoregression(lags: Any, y: Any) -> None:
    """AR(K): y_t ~ N(α + Σ β_k y_{t−k}, σ²), with `lags` (T − K, K); α, β ~ N(0, 10²), σ ~ half-Cauchy(2.5)."""
    alpha = numpyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = normal_vector("beta", 10.0, lags.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.sample("y", dist.Normal(alpha + lags @ beta, sigma), obs=y)


def arma_errors(y: Any, mu: Any, phi: Any, theta: Any) -> Any:
    """The innovations of ARMA(1, 1) from the first prediction μ + φμ on."""

    def step(error: Any, pair: Any) -> Any:
        before, now = pair
        error = now - (mu + phi * before + theta * error)
        return error, error

    first = y[0] - (mu + phi * mu)
    _, later = jax.lax.scan(step, first, (y[:-1], y[1:]))
    return jnp.concatenate([first[None], later])


def arma(y: Any) -> None:
    """ARMA(1, 1) with innovations N(0, σ²); μ ~ N(0, 10²), φ, θ ~ N(0, 2²), σ ~ half-Cauchy(2.5)."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = numpyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    numpyro.factor("y", dist.Normal(0.0, sigma).log_prob(arma_errors(jnp.asarray(y), mu, phi, theta)).sum())


def dogs(avoided: Any, shocked: Any, y: Any) -> None:
    """Logistic regression on each dog's numbers of avoided and of suffered shocks so far; β ~ N(0, 100²)."""
    beta = normal_vector("beta", 100.0, 3)
    numpyro.sample("y", dist.Bernoulli(logits=beta[0] + beta[1] * avoided + beta[2] * shocked), obs=y)


def eight_schools_noncentered(sigma: Any, y: Any) -> None:
    """y_j ~ N(μ + τ t_j, σ_j²) with t_j ~ N(0, 1), μ ~ N(0, 5²), τ ~ half-Cauchy(5)."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        theta_trans = numpyro.sample("theta_trans", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + tau * theta_trans)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_centered(sigma: Any, y: Any) -> None:
    """The same posterior with the sites θ_j ~ N(μ, τ²), a funnel; `LocScaleReparam` applies to θ."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def gp_regression(x: Any, y: Any) -> None:
    """y ~ N(0, α² RBF(ρ) + σI), where σ is a variance; ρ ~ Gamma(25, 4), α ~ half-N(2), σ ~ half-N(1)."""
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    kernel = alpha**2 * jnp.exp(-0.5 * ((x[:, None] - x) / rho) ** 2)
    numpyro.sample("y", dist.MultivariateNormal(0.0, kernel + sigma * jnp.eye(len(x))), obs=y)


def hmm_log_likelihood(log_emission: Any, log_transition: Any, log_first: Any) -> Any:
    """log p(y) of a hidden Markov model, states summed out: log p(y_t | state) (T, K), transitions from rows to
    columns (K, K), and the first state's log weights (K,)."""

    def step(forward: Any, emission: Any) -> Any:
        return jax.nn.logsumexp(forward[:, None] + log_transition, axis=0) + emission, None

    forward, _ = jax.lax.scan(step, log_first + log_emission[0], log_emission[1:])
    return jax.nn.logsumexp(forward)


def hmm(y: Any) -> None:
    """Two states with emissions N(μ_k, 1), 0 < μ_1 < μ_2, μ_1 ~ N(3, 1), μ_2 ~ N(10, 1); the transitions' rows are
    uniform on the simplex; the first state has no distribution (both have weight 1)."""
    theta1 = numpyro.sample("theta1", dist.Dirichlet(jnp.ones(2)))
    theta2 = numpyro.sample("theta2", dist.Dirichlet(jnp.ones(2)))
    mu = flat("mu", constraints.positive_ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Normal(jnp.array([3.0, 10.0]), 1.0).log_prob(mu).sum())
    emission = dist.Normal(mu, 1.0).log_prob(jnp.asarray(y)[:, None])
    numpyro.factor("y", hmm_log_likelihood(emission, jnp.log(jnp.stack([theta1, theta2])), jnp.zeros(2)))


def gauss_mix(y: Any) -> None:
    """A mixture of two normals with μ_1 < μ_2, assignments summed out; μ_k ~ N(0, 2²), σ_k ~ half-N(2), θ ~ Beta(5, 5)
    is the first one's weight."""
    mu = flat("mu", constraints.ordered_vector, 2)
    numpyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5.0, 5.0))
    parts = dist.Normal(mu, sigma).log_prob(jnp.asarray(y)[:, None]) + jnp.log(jnp.stack([theta, 1 - theta]))
    numpyro.factor("y", jax.nn.logsumexp(parts, axis=1).sum())


def logistic_regression(X: Any, y: Any) -> None:
    """y ~ Bernoulli(sigmoid(Xw)), w ~ N(0, I)."""
    w = normal_vector("w", 1.0, X.shape[1])
    numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def brownian_motion(y: Any, observed: Any, innovation: float, noise: float) -> None:
    """x_0 ~ N(0, q²), x_t ~ N(x_{t−1}, q²), and y_t ~ N(x_t, r²) where it is observed. One vector site x."""
    x = numpyro.sample("x", dist.GaussianRandomWalk(innovation, num_steps=len(y)))
    with numpyro.handlers.mask(mask=observed):
        numpyro.sample("y", dist.Normal(x, noise), obs=y)


class Entry(NamedTuple):
    """How a JSON file becomes a case."""

    model: Callable[..., Any]
    data: Callable[[dict[str, Any]], tuple[Any, ...]]
    constrained: Callable[[Draws], Array]
    unconstrained: Callable[[Draws], Array]
    expected: Expected = "gaussian"


def columns(*parts: str | Callable[[Draws], Array]) -> Callable[[Draws], Array]:
    """Sites, and functions of draws, side by side: (n, k)."""

    def build(draws: Draws) -> Array:
        values = [draws[part] if isinstance(part, str) else part(draws) for part in parts]
        return np.concatenate([np.reshape(value, (len(value), -1)) for value in values], axis=1)

    return build


def log(site: str) -> Callable[[Draws], Array]:
    return lambda draws: np.log(draws[site])


def logit(site: str, index: int | None = None) -> Callable[[Draws], Array]:
    """log p − log(1 − p) of a probability, or of one entry of a pair of probabilities."""

    def build(draws: Draws) -> Array:
        p = draws[site] if index is None else draws[site][..., index]
        return np.log(p) - np.log1p(-p)

    return build


def log_gap(draws: Draws) -> Array:
    return np.log(draws["mu"][:, 1] - draws["mu"][:, 0])


def first_mu(draws: Draws) -> Array:
    return draws["mu"][:, 0]


def _array(values: Any) -> Array:
    return np.asarray(values, float)


def _kid_columns(data: dict[str, Any]) -> tuple[Array, Array]:
    high_school, iq = _array(data["mom_hs"]), _array(data["mom_iq"])
    return np.stack([np.ones(len(iq)), high_school, iq], axis=1), _array(data["kid_score"])


def _kid_interaction(data: dict[str, Any]) -> tuple[Array, Array]:
    X, y = _kid_columns(data)
    h, q = (X[:, k] - X[:, k].mean() for k in (1, 2))
    return np.stack([np.ones(len(h)), h, q, h * q], axis=1), y


def _earnings(data: dict[str, Any]) -> tuple[Array, Array]:
    height, male = _array(data["height"]), _array(data["male"])
    z = (height - height.mean()) / height.std(ddof=1)
    return np.stack([np.ones(len(z)), z, male, z * male], axis=1), np.log(_array(data["earn"]))


def _elections(data: dict[str, Any]) -> tuple[Array, Array]:
    ages = [np.asarray(data["age_discrete"]) == k for k in (2, 3, 4)]
    names = ("educ1", "gender", "income")
    parts = [np.ones(data["N"]), data["real_ideo"], data["race_adj"], *ages, *(data[name] for name in names)]
    return np.stack([_array(part) for part in parts], axis=1), _array(data["partyid7"])


def _lags(data: dict[str, Any]) -> tuple[Array, Array]:
    y, K = _array(data["y"]), data["K"]
    return np.stack([y[K - k : len(y) - k] for k in range(1, K + 1)], axis=1), y[K:]


def _shocks(data: dict[str, Any]) -> tuple[Array, Array, Array]:
    y = np.asarray(data["y"])
    before = lambda events: np.cumsum(events, axis=1) - events
    return _array(before(1 - y)), _array(before(y)), y


def _german_credit(data: dict[str, Any]) -> tuple[Array, Array]:
    X = _array(data["X"])
    X = (X - X.mean(0)) / X.std(0)
    return np.concatenate([X, np.ones((len(X), 1))], axis=1), np.asarray(data["y"])


def _brownian(data: dict[str, Any]) -> tuple[Any, ...]:
    observed = np.array([value is not None for value in data["observed"]])
    y = np.array([0.0 if value is None else value for value in data["observed"]])
    return y, observed, data["innovation_noise_scale"], data["observation_noise_scale"]


def _named(*names: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda data: tuple(_array(data[name]) for name in names)


def _theta_of_schools(draws: Draws) -> Array:
    return draws["mu"][:, None] + draws["tau"][:, None] * draws["theta_trans"]


def _standardized_theta(draws: Draws) -> Array:
    return (draws["theta"] - draws["mu"][:, None]) / draws["tau"][:, None]


_coefficients = (columns("beta", "sigma"), columns("beta", log("sigma")))
# JSON file → the case or cases that it makes, by name.
ENTRIES: dict[str, dict[str, Entry]] = {
    "arK-arK": {
        "arK": Entry(autoregression, _lags, columns("alpha", "beta", "sigma"), columns("alpha", "beta", log("sigma")))
    },
    "arma-arma11": {
        "arma11": Entry(
            arma,
            _named("y"),
            columns("mu", "phi", "theta", "sigma"),
            columns("mu", "phi", "theta", log("sigma")),
        )
    },
    "dogs-dogs": {"dogs": Entry(dogs, _shocks, columns("beta"), columns("beta"))},
    "earnings-logearn_interaction_z": {"earnings": Entry(flat_regression, _earnings, *_coefficients)},
    "eight_schools-eight_schools_noncentered": {
        "eight_schools_noncentered": Entry(
            eight_schools_noncentered,
            _named("sigma", "y"),
            columns(_theta_of_schools, "mu", "tau"),
            columns("theta_trans", "mu", log("tau")),
            "skew",
        ),
        "eight_schools_centered": Entry(
            eight_schools_centered,
            _named("sigma", "y"),
            columns("theta", "mu", "tau"),
            columns(_standardized_theta, "mu", log("tau")),
            "centring",
        ),
    },
    "gp_pois_regr-gp_regr": {
        "gp_regr": Entry(
            gp_regression,
            _named("x", "y"),
            columns("rho", "alpha", "sigma"),
            columns(log("rho"), log("alpha"), log("sigma")),
        )
    },
    "hmm_example-hmm_example": {
        "hmm_example": Entry(
            hmm,
            _named("y"),
            columns("theta1", "theta2", "mu"),
            columns(logit("theta1", 0), logit("theta2", 0), lambda draws: np.log(first_mu(draws)), log_gap),
        )
    },
    "kidiq-kidscore_momhsiq": {"kidscore_momhsiq": Entry(half_cauchy_regression, _kid_columns, *_coefficients)},
    "kidiq_with_mom_work-kidscore_interaction_c": {
        "kidscore_interaction_c": Entry(flat_regression, _kid_interaction, *_coefficients)
    },
    "low_dim_gauss_mix-low_dim_gauss_mix": {
        "low_dim_gauss_mix": Entry(
            gauss_mix,
            _named("y"),
            columns("mu", "sigma", "theta"),
            columns(first_mu, log_gap, log("sigma"), logit("theta")),
        )
    },
    "nes1972-nes": {"nes1972": Entry(flat_regression, _elections, *_coefficients)},
    "sblri-blr": {"blr": Entry(normal_prior_regression, _named("X", "y"), *_coefficients)},
    "german_credit_logistic": {
        "german_credit_logistic": Entry(logistic_regression, _german_credit, columns("w"), columns("w"))
    },
    "brownian_motion_missing_middle": {
        "brownian_motion": Entry(brownian_motion, _brownian, columns("x"), columns("x"))
    },
}


def read_moments(record: dict[str, Any]) -> dict[Space, Moments]:
    """The reference moments of a JSON file.

    posteriordb has 10,000 nearly independent draws; the standard error of a sd follows from the excess kurtosis, which
    is stored for the unconstrained variables. The largest of them serves the constrained ones, and 6 where these are
    skewed by a transform. The Inference Gym gives the means' standard errors, from which the number of draws follows.
    """
    if "reference" in record:
        given = record["reference"]
        mean, sd, error = (_array(given[name]) for name in ("mean", "standard_deviation", "mean_standard_error"))
        names = tuple(f"[{k}]" for k in range(len(mean)))
        return {"unconstrained": Moments(names, mean, sd, error, error / np.sqrt(2))}
    found: dict[Space, Moments] = {}
    n = record["n_draws"]
    kurtosis = _array(record["unconstrained"]["excess_kurtosis"])
    for space in ("constrained", "unconstrained"):
        given = record[space]
        mean, sd = _array(given["mean"]), _array(given["sd"])
        excess = kurtosis if space == "unconstrained" else np.full(len(mean), max(kurtosis.max(), 0.0))
        if space == "constrained" and kurtosis.max() > 1:
            excess = np.full(len(mean), 6.0)
        error = _array(given.get("mcse_mean", sd / np.sqrt(n)))
        found[space] = Moments(tuple(given["names"]), mean, sd, error, sd * np.sqrt((2 + excess) / (4 * n)))
    if record["constrained"]["names"] == record["unconstrained"]["names"]:
        del found["constrained"]
    return found


def read_cases(folder: Path = FOLDER) -> list[Case]:
    """The cases of all JSON files in a folder, or in its folders `posteriordb` and `inference_gym`."""
    folders = [folder / inner for inner in (".", "posteriordb", "inference_gym")]
    paths = [path for inside in folders for path in sorted(inside.glob("*.json"))]
    cases = []
    for path in paths:
        if path.stem not in ENTRIES:
            continue
        record = json.loads(path.read_text())
        moments = read_moments(record)
        for name, entry in ENTRIES[path.stem].items():
            quantities = {"constrained": entry.constrained, "unconstrained": entry.unconstrained}
            dimension = record.get("dim_unconstrained", len(moments["unconstrained"].mean))
            cases.append(
                Case(
                    name,
                    moments,
                    {space: quantities[space] for space in moments},
                    dimension,
                    entry.expected,
                    entry.model,
                    entry.data(record["data"]),
                    group="inference_gym" if "reference" in record else "posteriordb",
                    source=record["source"],
                )
            )
    if not cases:
        raise FileNotFoundError(f"No JSON file of posteriordb or of the Inference Gym in {folder}.")
    return cases
