"""Bayesian inference compared with scikit-learn's mixtures and classifiers, and SciPy's integrals and roots."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from scipy import stats
from scipy.integrate import quad
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import DotProduct
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture

from .. import factors
from ..factor_graph.data import Rows
from ..factor_graph.model import Model
from ..families.dirichlet import Beta, Dirichlet
from ..families.discrete import Categorical
from ..families.gamma import Gamma
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.product import Product
from ..families.wishart import NormalWishart
from ..fitting.fit import fit
from ..gallery.trace import trace_steps
from ..models import gp
from ..models.kernels import RBF
from ..objectives.objective import Objective
from ..rule.rule import Rule
from .check import check, relative_error


def _build(family: Any, *numbers: float) -> Any:
    return family(*map(jnp.asarray, numbers))


def _joint(prior: Any, likelihood: Any, y: np.ndarray) -> Callable[[float], float]:
    return lambda theta: prior.pdf(theta) * np.prod(likelihood(theta, y))


@check("scipy.integrate.quad of prior times likelihood: density, evidence", 1e-12)
def conjugate(rule: Rule) -> float:
    """Tosses with a beta prior, counts with a gamma prior: one step from any start gives the posterior."""
    tosses, counts = np.array([1.0, 0, 1, 1, 0, 1, 1]), np.array([3.0, 5, 2, 6])
    coin = Objective(lambda mu, y: -(y * mu[0] + (1 - y) * mu[1]), size=7, prior=_build(Beta, 2.0, 3.0))
    rate = Objective(
        lambda mu, y: mu[1] - y * mu[0] + jax.scipy.special.gammaln(y + 1), size=4, prior=_build(Gamma, 2.0, 0.5)
    )
    cases = [
        (coin, _build(Beta, 5.0, 5.0), tosses, stats.beta(2, 3), lambda t, y: stats.bernoulli.pmf(y, t), 1.0),
        (rate, _build(Gamma, 9.0, 7.0), counts, stats.gamma(2, scale=2), lambda t, y: stats.poisson.pmf(y, t), 40.0),
    ]
    errors = []
    for objective, start, y, prior, likelihood, high in cases:
        joint = _joint(prior, likelihood, y)
        evidence = quad(joint, 0, high, epsabs=0, epsrel=1e-12, limit=200)[0]
        grid = high * np.linspace(0.02, 0.3, 9)
        read = lambda q, at=grid, y=y, objective=objective: (q.log_prob(jnp.asarray(at)), rule.bound(objective, q, y))
        density, bound = trace_steps(rule, objective, start, steps=1, data=y, read=read)
        errors += [
            relative_error(np.exp(density[0]), [joint(t) / evidence for t in grid]),
            relative_error(bound[0], np.log(evidence)),
        ]
    return max(errors)


@check("sklearn: LogisticRegression's weights, a GP classifier's evidence", 1e-10)
def laplace(rule: Rule) -> float:
    """Logistic regression with a standard normal prior, run to convergence: the mean is scikit-learn's mode, the
    precision the Hessian XᵀWX + I there, and the evidence that of a Gaussian process with an inner-product kernel."""
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3))
    y = np.where(random.random(40) < 1 / (1 + np.exp(-x @ [1.5, -1.0, 0.5])), 1.0, -1.0)
    prior = DiagonalGaussian(jnp.zeros(3), jnp.ones(3))
    objective = Objective(lambda w, e: jnp.logaddexp(0.0, -e[1] * (e[0] @ w)), size=40, prior=prior)
    result = fit(rule, objective, jnp.zeros(3), (x, y), steps=50, tolerance=1e-24)
    weights = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky", tol=1e-13).fit(x, y).coef_[0]
    how: dict[str, Any] = {"optimizer": None, "max_iter_predict": 1000}
    process = GaussianProcessClassifier(DotProduct(0.0, "fixed"), **how).fit(x, y)
    chance = 1 / (1 + np.exp(-x @ weights))
    hessian = (x.T * chance * (1 - chance)) @ x + np.eye(3)
    evidence = process.log_marginal_likelihood_value_
    return max(
        relative_error(result.q.mean, weights),
        relative_error(result.q.precision, hessian),
        relative_error(result.bound, evidence),
    )


# Mixtures of Gaussians in the plane.


def _cluster_data() -> np.ndarray:
    random = np.random.default_rng(1)
    centers = np.repeat([[0.0, 0.0], [4.0, 1.0], [1.0, 5.0]], [24, 18, 18], axis=0)
    return random.normal(size=(60, 2)) @ [[1.2, 0.3], [0.0, 0.7]] + centers


def _mixture(weights: np.ndarray, components: NormalWishart, priors: dict[str, Any] | None = None) -> Model:
    """A mixture with blocks for weights and components, a local choice z per row, and priors for the named blocks."""
    blocks = {"weights": Dirichlet(jnp.asarray(weights)), "components": components}
    terms: dict[str, Any] = {f"prior of {name}": factors.prior(name, member) for name, member in (priors or {}).items()}
    terms["z"] = factors.categorical("z", probabilities="weights")
    terms["y"] = factors.choice("z", factors.multivariate_normal("y", joint="components"))
    return Model(blocks, terms, local={"z": Categorical(jnp.zeros(3))}, size=60)


def _fit_without_warning(mixture: Any, rows: np.ndarray) -> Any:
    """Fit for the few iterations under test, without scikit-learn's warning that they did not converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return mixture.fit(rows)


@check("sklearn GaussianMixture, 10 EM iterations", 1e-12)
def em(rule: Rule) -> float:
    """Weights, means and covariances after ten iterations from the same start. q is read at its mode in natural
    coordinates: weights λ/Σλ, means m and precisions (n − D)V."""
    rows, means = _cluster_data(), np.array([[-0.5, 1.0], [3.0, 3.0], [2.0, 4.0]])
    precisions, weights = np.stack([np.eye(2)] * 3), np.array([0.3, 0.3, 0.4])
    start = {"weights_init": weights, "means_init": means, "precisions_init": precisions}
    sklearn_model = _fit_without_warning(GaussianMixture(3, reg_covar=0, max_iter=10, tol=0, **start), rows)
    components = NormalWishart(jnp.asarray(means), jnp.ones(3), jnp.full(3, 3.0), jnp.asarray(precisions))
    read = lambda q: (q["weights"].mean, q["components"].mean)
    trace, peak = trace_steps(rule, _mixture(1 + weights, components), None, steps=10, data={"y": rows}, read=read)
    covariances = np.linalg.inv(peak["precision"][-1])
    pairs = (
        (trace[-1], sklearn_model.weights_),
        (peak["mean"][-1], sklearn_model.means_),
        (covariances, sklearn_model.covariances_),
    )
    return max(relative_error(*pair) for pair in pairs)


PRIORS = {
    "weight_concentration_prior": 2.0,
    "weight_concentration_prior_type": "dirichlet_distribution",
    "mean_prior": [0.5, 0.5],
    "mean_precision_prior": 0.1,
    "degrees_of_freedom_prior": 4.0,
    "covariance_prior": 2 * np.eye(2),
}


def _sklearn_variational(**options: Any) -> BayesianGaussianMixture:
    return BayesianGaussianMixture(n_components=3, reg_covar=0, tol=0, random_state=0, **PRIORS, **options)


def _sklearn_parameters(sklearn_model: Any) -> tuple[np.ndarray, ...]:
    """scikit-learn's concentrations and the normal–Wisharts' means, counts, degrees of freedom and inverse scales."""
    degrees = sklearn_model.degrees_of_freedom_
    return (
        sklearn_model.weight_concentration_,
        sklearn_model.means_,
        sklearn_model.mean_precision_,
        degrees,
        sklearn_model.covariances_ * degrees[:, None, None],
    )


def _variational_model(concentration: Any, means: Any, counts: Any, degrees: Any, inverse: Any) -> Model:
    """The model with scikit-learn's priors, its blocks starting from these parameters."""
    start = NormalWishart(*map(jnp.asarray, (means, counts, degrees, np.linalg.inv(inverse))))
    prior = NormalWishart(*map(jnp.asarray, ([0.5, 0.5], 0.1, 4.0, 0.5 * np.eye(2))))
    return _mixture(concentration, start, {"weights": Dirichlet(jnp.full(3, 2.0)), "components": prior})


def _additive_parameters(concentration: Any, means: Any, counts: Any, degrees: Any, inverse: Any) -> list[np.ndarray]:
    """The parameters that are sums over rows: concentrations, counts, degrees, sums and sums of squares."""
    squares = inverse + counts[:, None, None] * means[:, :, None] * means[:, None, :]
    return [concentration, counts, degrees, counts[:, None] * means, squares]


def _global_blocks(q: Product) -> dict[str, Any]:
    return {name: q[name] for name in ("weights", "components")}


def _last_parameters(trace: dict[str, Any]) -> list[np.ndarray]:
    """The natural parameters after the last step."""
    q = jax.tree.map(lambda leaf: leaf[-1], trace)
    member = q["components"]
    parts = (q["weights"].concentration, member.mean, member.count, member.df, np.linalg.inv(member.scale))
    return _additive_parameters(*map(np.asarray, parts))


@check("sklearn BayesianGaussianMixture, 5 variational iterations", 1e-12)
def vmp(rule: Rule) -> float:
    """Five iterations from scikit-learn's result after two, compared with its result after seven in every parameter of
    the Dirichlet and the normal–Wisharts."""
    rows = _cluster_data()
    start, end = (
        _sklearn_parameters(_fit_without_warning(_sklearn_variational(max_iter=steps), rows)) for steps in (2, 7)
    )
    trace = trace_steps(rule, _variational_model(*start), None, steps=5, data={"y": rows}, read=_global_blocks)
    return max(map(relative_error, _last_parameters(trace), _additive_parameters(*end)))


@check("sklearn BayesianGaussianMixture on 6 batches, averaged as published", 1e-12)
def svi(rule: Rule) -> float:
    """Six batches of ten rows: scikit-learn's variational step on six copies of the batch is the intermediate
    estimate λ̂, and λ ← ½λ + ½λ̂ in the natural parameters (Hoffman et al., 2013)."""
    rows = _cluster_data()
    sklearn_model = _fit_without_warning(_sklearn_variational(max_iter=1, warm_start=True), rows)
    start = _sklearn_parameters(sklearn_model)
    index = np.random.default_rng(2).permutation(60).reshape(6, 10)
    model = _variational_model(*start)
    trace = trace_steps(
        rule, model, None, steps=6, batches=Rows({"y": rows[index]}, jnp.asarray(index)), read=_global_blocks
    )
    natural = _additive_parameters(*start)
    for batch in index:
        estimate = _additive_parameters(
            *_sklearn_parameters(_fit_without_warning(sklearn_model, np.tile(rows[batch], (6, 1))))
        )
        natural = [0.5 * old + 0.5 * new for old, new in zip(natural, estimate, strict=True)]
        _set_sklearn_parameters(sklearn_model, natural)
    return max(map(relative_error, _last_parameters(trace), natural))


def _set_sklearn_parameters(sklearn_model: Any, natural: list[np.ndarray]) -> None:
    """Set scikit-learn's mixture to these sums, so that its next iteration starts from them."""
    concentration, counts, degrees, sums, squares = natural
    means = sums / counts[:, None]
    inverse = squares - counts[:, None, None] * means[:, :, None] * means[:, None, :]
    sklearn_model.weight_concentration_, sklearn_model.mean_precision_, sklearn_model.degrees_of_freedom_ = (
        concentration,
        counts,
        degrees,
    )
    sklearn_model.means_, sklearn_model.covariances_ = means, inverse / degrees[:, None, None]
    sklearn_model.precisions_cholesky_ = np.linalg.cholesky(np.linalg.inv(sklearn_model.covariances_))


# Poisson counts: E eᶠ has a closed form, but the likelihood is not conjugate to the Gaussian.


@check("published messages in NumPy, 6 sweeps; scipy.optimize.root at the end", 1e-12)
def ncvmp(rule: Rule) -> float:
    """Counts with the rate e^{a + bx}, a and b blocks of their own with standard normal priors. With r = E e^{a + bx}
    the message to a is (Σ(y − r) + aΣr, Σr), and the message to b has the factors x and x² inside the sums (Knowles and
    Minka, 2011). The fixed point is compared with a root of the stationarity equations."""
    random = np.random.default_rng(3)
    x = np.stack([np.ones(20), random.uniform(-1, 1, 20)])
    y = random.poisson(np.exp(0.8 + 0.7 * x[1])).astype(float)

    def rates(mean: np.ndarray, precision: np.ndarray) -> np.ndarray:
        return np.exp(mean @ x + 0.5 * (1 / precision) @ x**2)

    mean, precision, expected = np.zeros(2), np.full(2, 4.0), []
    for _ in range(6):
        for block in (0, 1):
            r = rates(mean, precision)
            new = 1 + x[block] ** 2 @ r
            mean[block] = (x[block] @ (y - r) + (new - 1) * mean[block]) / new
            precision[block] = new
        expected.append([mean.copy(), precision.copy()])

    def stationarity(both: np.ndarray) -> np.ndarray:
        r = rates(both[:2], both[2:])
        return np.concatenate([x @ (y - r) - both[:2], 1 + x**2 @ r - both[2:]])

    prior = Gaussian(jnp.zeros(1), jnp.eye(1))
    start = Gaussian(jnp.zeros(1), 4 * jnp.eye(1))
    terms: dict[str, Any] = {f"prior of {name}": factors.prior(name, prior) for name in "ab"}
    terms["y"] = factors.poisson_exp("y", {"a": "one", "b": "x"})
    model = Model({"a": start, "b": start}, terms, size=20)
    data = {"one": x[0][:, None], "x": x[1][:, None], "y": y}
    read = lambda q: jnp.array([[q[n].mean[0] for n in "ab"], [q[n].precision[0, 0] for n in "ab"]])
    trace = trace_steps(rule, model, None, steps=40, data=data, read=read)
    root = scipy.optimize.root(stationarity, np.ravel(expected[-1]), tol=1e-14).x
    return max(relative_error(trace[:6], expected), relative_error(trace[-1].ravel(), root))


@check("eq. blr_global in NumPy, 8 steps; scipy.optimize.root at the end", 1e-12)
def cvi(rule: Rule) -> float:
    """Counts with a Gaussian process of covariance K. With r = E eᶠ, site i has precision r and mean f + (y − r)/r; at
    ρ = ½ a step averages old and new sites. At convergence K⁻¹m = y − r and V = (K⁻¹ + diag r)⁻¹."""
    x, y = np.linspace(0, 4, 9), np.array([1.0, 3, 2, 6, 9, 4, 3, 1, 0])
    kernel = np.exp(-0.5 * (x[:, None] - x) ** 2)

    def moments(linear: np.ndarray, diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        covariance = kernel - kernel @ np.linalg.solve(kernel + np.diag(1 / diagonal), kernel)
        return covariance @ linear, np.diag(covariance)

    linear, diagonal, expected = np.zeros(9), np.zeros(9), []
    mean, variance = np.zeros(9), np.diag(kernel)
    for _ in range(8):
        r = np.exp(mean + variance / 2)
        linear, diagonal = 0.5 * linear + 0.5 * (y - r + r * mean), 0.5 * diagonal + 0.5 * r
        mean, variance = moments(linear, diagonal)
        expected.append([mean, variance])

    def stationarity(both: np.ndarray) -> np.ndarray:
        r = np.exp(both[:9] + both[9:] / 2)
        mean, variance = moments(y - r + r * both[:9], r)
        return np.concatenate([mean - both[:9], variance - both[9:]])

    model = gp.process(RBF(), x, factors.poisson_exp("y", {"f": None}))
    read = lambda q: jnp.stack([q["f"].mean, q["f"].variance])
    trace = trace_steps(rule, model, None, steps=60, data={"y": y}, read=read)
    root = scipy.optimize.root(stationarity, np.ravel(expected[-1]), tol=1e-14).x
    return max(relative_error(trace[:8], expected), relative_error(trace[-1].ravel(), root))


@check("scipy.special.softmax of the summed losses, 100 rounds", 1e-12)
def exponential_weights(rule: Rule) -> float:
    """The weights of seven experts after every round."""
    losses = np.random.default_rng(4).random((100, 7))
    objective = Objective(lambda expert, loss: loss[expert], size=1)
    trace = trace_steps(
        rule, objective, Categorical(jnp.zeros(7)), steps=100, batches=losses[:, None], read=lambda q: q.probabilities
    )
    return relative_error(trace, softmax(-0.1 * np.cumsum(losses, axis=0), axis=1), 1 / 7)
