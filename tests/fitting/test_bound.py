"""`result.bound` and `result.bound_error` against dense quadrature and closed forms, in float64 by NumPy alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import bayesrule as blr
from bayesrule.fitting.bound import ERROR_GOAL, judge_bound, with_error
from bayesrule.objectives.objective import as_objective

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 2))
COUNTS = RNG.poisson(np.exp(X @ [0.5, -0.3])).astype(float)
CLASSES = (RNG.random(20) < 1 / (1 + np.exp(-X @ [1.0, 2.0]))).astype(float)


def poisson(f, y):
    return jnp.exp(f) - y * f


def logistic(f, y):
    return jnp.logaddexp(0.0, f) - y * f


def student(f, y):
    return 2.0 * jnp.log1p((y - f) ** 2 / 3.0)


def regression(loss, y):
    return lambda theta: jnp.sum(loss(X @ theta, y)) + 0.5 * theta @ theta


def banana(theta):
    return 0.5 * theta[0] ** 2 + 0.3 * jnp.sum((theta[1:] - theta[0] ** 2) ** 2)


TWO = {
    "poisson": regression(poisson, COUNTS),
    "logistic": regression(logistic, CLASSES),
    "student": regression(student, COUNTS),
    "banana": banana,
}


def gaussian(size):
    return blr.Gaussian(jnp.full(size, 0.3), 4 * jnp.eye(size) + 1.0)


def by_quadrature(f, q, order=90):
    """−E_q f + H(q) by Gauss–Hermite quadrature, with NumPy's nodes and covariance."""
    size = q.mean.shape[0]
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack([x.ravel() for x in np.meshgrid(*[nodes] * size, indexing="ij")], -1)
    joint = np.prod(np.stack([x.ravel() for x in np.meshgrid(*[weights / weights.sum()] * size)], -1), axis=-1)
    covariance = np.linalg.inv(np.asarray(q.precision))
    theta = np.asarray(q.mean) + grid @ np.linalg.cholesky(covariance).T
    entropy = 0.5 * np.linalg.slogdet(2 * math.pi * math.e * covariance)[1]
    return entropy - joint @ np.asarray(jax.vmap(f)(jnp.asarray(theta)))


def judged(f, q, points, key=0):
    rule = blr.von(0.5).replace(points=points, family=type(q))
    return judge_bound(rule, as_objective(f), rule.init(q), None, jax.random.key(key))


@pytest.mark.extended
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("points", [blr.MonteCarlo(10), blr.Quadrature(4)], ids=repr)
def test_two_dimensions_are_integrated_by_grids_that_know_their_error(name, points):
    f, q = TWO[name], gaussian(2)
    bound, truth = judged(f, q, points), by_quadrature(f, q)
    assert abs(bound.value - truth) <= bound.error + 1e-10
    assert bound.error < 1e-2


@pytest.mark.extended
@pytest.mark.parametrize(
    "f", [lambda t: jnp.sum(jnp.cosh(t - 1.0)) + 0.5 * t @ t, lambda t: jnp.sum((1 - t**2) ** 2)], ids=["cosh", "wells"]
)
def test_one_dimension(f):
    q = gaussian(1)
    bound = judged(f, q, blr.MonteCarlo(10))
    assert abs(bound.value - by_quadrature(f, q)) <= bound.error + 1e-12
    assert bound.error < 1e-6


def test_a_loss_with_a_kink_has_an_integration_error_that_covers_it():
    """Grids converge slowly for |θ|, whose expectation is known: E|θ| of N(m, v)."""
    q = blr.Gaussian(jnp.array([0.3]), jnp.array([[4.0]]))
    sd = 0.5
    absolute = sd * math.sqrt(2 / math.pi) * math.exp(-0.5 * 0.36) + 0.3 * (1 - 2 * scipy.stats.norm.cdf(-0.6))
    bound = judged(lambda t: 10 * jnp.sum(jnp.abs(t)), q, blr.MonteCarlo(10))
    truth = 0.5 * math.log(2 * math.pi * math.e * 0.25) - 10 * absolute
    assert abs(bound.value - truth) <= 2 * bound.error
    assert bound.error > 1e-4


# Three dimensions and more: randomized quasi-Monte Carlo, whose error is a standard error.

SIZE = 5
WIDE_X = RNG.normal(size=(30, SIZE)) / math.sqrt(SIZE)
WIDE_COUNTS = RNG.poisson(1.0, 30).astype(float)


def wide_poisson(theta):
    return jnp.sum(poisson(WIDE_X @ theta, WIDE_COUNTS)) + 0.5 * theta @ theta


def wide_poisson_bound(q):
    """E exp(x·θ) is the mean of a log-normal."""
    mean, covariance = np.asarray(q.mean), np.linalg.inv(np.asarray(q.precision))
    f, v = WIDE_X @ mean, np.einsum("ni,ij,nj->n", WIDE_X, covariance, WIDE_X)
    loss = np.sum(np.exp(f + v / 2) - WIDE_COUNTS * f) + 0.5 * (mean @ mean + np.trace(covariance))
    return 0.5 * np.linalg.slogdet(2 * math.pi * math.e * covariance)[1] - loss


def wide_banana_bound(q):
    mean, covariance = np.asarray(q.mean), np.linalg.inv(np.asarray(q.precision))
    m, v = mean[0], covariance[0, 0]
    second, fourth = m**2 + v, m**4 + 6 * m**2 * v + 3 * v**2
    cross = mean[1:] * second + 2 * covariance[0, 1:] * m  # E θ_j θ_0²
    loss = 0.5 * second + 0.3 * np.sum(mean[1:] ** 2 + np.diag(covariance)[1:] - 2 * cross + fourth)
    return 0.5 * np.linalg.slogdet(2 * math.pi * math.e * covariance)[1] - loss


@pytest.mark.extended
@pytest.mark.parametrize(
    ("f", "bound_of"), [(wide_poisson, wide_poisson_bound), (banana, wide_banana_bound)], ids=["poisson", "banana"]
)
def test_standard_errors_are_honest(f, bound_of):
    """60 keys: none off by more than 4.5 standard errors, and z-scores as wide as a standard normal's.

    The sd of 60 standard normal numbers lies within 1 ± 4/√120 but for one case in ten thousand.
    """
    q = gaussian(SIZE)
    bounds = [judged(f, q, blr.MonteCarlo(10), key) for key in range(60)]
    z = np.array([(bound.value - bound_of(q)) / bound.error for bound in bounds])
    assert np.max(np.abs(z)) < 4.5
    assert 1 - 4 / math.sqrt(120) < np.sqrt(np.mean(z**2)) < 1 + 4 / math.sqrt(120)
    assert np.median([bound.error for bound in bounds]) < 2 * ERROR_GOAL
    assert len({bound.value for bound in bounds}) == 60


@pytest.mark.extended
def test_the_bound_is_taken_where_no_step_looked():
    """A fit with two fixed draws a step ends well above its true bound, which the old estimate did not see."""
    q = gaussian(SIZE)
    result = blr.fit(blr.von(0.3).replace(points=blr.MonteCarlo(2)), wide_poisson, q, steps=40, key=jax.random.key(3))
    assert abs(result.bound - wide_poisson_bound(result.q)) < 5 * result.bound_error
    assert result.bound_error < 2 * ERROR_GOAL
    again = blr.fit(blr.von(0.3).replace(points=blr.MonteCarlo(2)), wide_poisson, q, steps=40, key=jax.random.key(3))
    assert again.bound == result.bound


def test_a_quadratic_has_no_error_and_the_bound_is_the_evidence():
    """ℓ̄ + log q is constant where q is the posterior; the evidence is that of a linear regression by SciPy."""
    y = RNG.normal(size=30)

    def loss(theta):
        prior = 0.5 * theta @ theta + 0.5 * SIZE * jnp.log(2 * jnp.pi)
        return 0.5 * jnp.sum((y - WIDE_X @ theta) ** 2) + 15 * jnp.log(2 * jnp.pi) + prior

    precision = np.eye(SIZE) + WIDE_X.T @ WIDE_X
    q = blr.Gaussian(jnp.asarray(np.linalg.solve(precision, WIDE_X.T @ y)), jnp.asarray(precision))
    evidence = scipy.stats.multivariate_normal(np.zeros(30), np.eye(30) + WIDE_X @ WIDE_X.T).logpdf(y)
    bound = judged(loss, q, blr.MonteCarlo(4))
    np.testing.assert_allclose(bound.value, evidence, rtol=1e-10)
    assert bound.error < 1e-10


def test_a_diagonal_q_is_below_the_evidence_by_its_divergence():
    y = RNG.normal(size=30)

    def loss(theta):
        prior = 0.5 * theta @ theta + 0.5 * SIZE * jnp.log(2 * jnp.pi)
        return 0.5 * jnp.sum((y - WIDE_X @ theta) ** 2) + 15 * jnp.log(2 * jnp.pi) + prior

    precision = np.eye(SIZE) + WIDE_X.T @ WIDE_X
    mean, diagonal = np.linalg.solve(precision, WIDE_X.T @ y), np.diag(precision)
    divergence = 0.5 * (np.sum(np.log(diagonal)) - np.linalg.slogdet(precision)[1])
    evidence = scipy.stats.multivariate_normal(np.zeros(30), np.eye(30) + WIDE_X @ WIDE_X.T).logpdf(y)
    rule = blr.von(0.5).replace(family=blr.DiagonalGaussian, curvature=blr.HessianDiagonal())
    q = blr.DiagonalGaussian(jnp.asarray(mean), jnp.asarray(diagonal))
    bound = judge_bound(rule, as_objective(loss), rule.init(q), None, jax.random.key(1))
    assert abs(bound.value - (evidence - divergence)) < 4 * bound.error < 4 * ERROR_GOAL


# Other integrals.


def linear_objective(loss, outputs=1, **prior):
    if outputs == 1:
        return blr.Objective(lambda f, y: loss(f, y), output=lambda w, x: x @ w, size=20, linear=True, **prior)
    return blr.Objective(loss, output=lambda w, x: x @ w.reshape(2, outputs), size=20, linear=True, **prior)


@pytest.mark.sampled("Quadrature(6)-logistic-y1")
@pytest.mark.parametrize(("loss", "y"), [(poisson, COUNTS), (logistic, CLASSES), (student, COUNTS)])
@pytest.mark.parametrize("points", [blr.MonteCarlo(10), blr.Quadrature(6)], ids=repr)
def test_linear_outputs_are_integrated_in_their_own_dimension(loss, y, points):
    q, rule = gaussian(2), blr.von(0.5).replace(points=points)
    objective = linear_objective(loss, regularizer=2.0)
    bound = judge_bound(rule, objective, rule.init(q), (jnp.asarray(X), jnp.asarray(y)), jax.random.key(0))
    prior = lambda theta: theta @ theta + jnp.log(2 * jnp.pi) - jnp.log(2.0)
    truth = by_quadrature(lambda theta: jnp.sum(loss(X @ theta, y)) + prior(theta), q)
    assert abs(bound.value - truth) <= bound.error + 1e-9
    assert bound.error < 1e-3


@pytest.mark.extended
def test_several_linear_outputs_have_a_standard_error():
    """A softmax of four classes under 8 weights, against 10⁵ draws of the outputs."""
    labels = jnp.asarray(RNG.integers(0, 4, 20))
    objective = linear_objective(lambda f, y: jax.nn.logsumexp(f) - f[y], 4, regularizer=1.0)
    q, rule = gaussian(8), blr.von(0.5)
    theta = np.random.default_rng(5).multivariate_normal(q.mean, np.linalg.inv(q.precision), 100_000)
    f = np.einsum("nd,sdk->snk", X, theta.reshape(-1, 2, 4))
    losses = np.log(np.exp(f).sum(-1)).sum(1) - np.take_along_axis(f, np.asarray(labels)[None, :, None], 2)[..., 0].sum(
        1
    )
    prior = 0.5 * np.sum(theta**2, axis=1) + 4 * math.log(2 * math.pi)
    truth, error = -np.mean(losses + prior) + float(q.entropy()), np.std(losses + prior) / math.sqrt(100_000)
    bound = judge_bound(rule, objective, rule.init(q), (jnp.asarray(X), labels), jax.random.key(0))
    assert abs(bound.value - truth) < 4 * math.hypot(bound.error, error)
    assert bound.error < ERROR_GOAL


@pytest.mark.extended
def test_a_penalty_is_integrated_and_not_expanded():
    penalty = lambda theta: 3.0 * jnp.sum(jnp.cosh(theta))
    objective = blr.Objective(lambda w, e: poisson(e[0] @ w, e[1]), size=20, regularizer=penalty)
    q, rule = gaussian(2), blr.von(0.5)
    bound = judge_bound(rule, objective, rule.init(q), (jnp.asarray(X), jnp.asarray(COUNTS)), jax.random.key(0))
    truth = by_quadrature(lambda theta: jnp.sum(poisson(X @ theta, COUNTS)) + penalty(theta), q)
    assert abs(bound.value - truth) <= bound.error + 1e-9


@pytest.mark.extended
def test_mixtures_are_averaged_by_component():
    """Against a dense grid in one dimension, whose density is written out by SciPy."""
    q = blr.Mixture([1.0, 3.0], [blr.Gaussian(jnp.array([m]), jnp.array([[s]])) for m, s in [(-1.0, 4.0), (1.0, 9.0)]])
    f = lambda theta: jnp.sum((1 - theta**2) ** 2)
    rule = blr.multimodal(0.1, components=2).replace(search=None, points=blr.MonteCarlo(4))
    bound = judge_bound(rule, as_objective(f), rule.init(q), None, jax.random.key(0))
    at = np.linspace(-8, 8, 20001)
    density = 0.25 * scipy.stats.norm.pdf(at, -1, 0.5) + 0.75 * scipy.stats.norm.pdf(at, 1, 1 / 3)
    truth = -np.trapezoid(density * ((1 - at**2) ** 2 + np.log(density + 1e-300)), at)
    assert abs(bound.value - truth) <= bound.error + 1e-6
    assert bound.error < ERROR_GOAL


def test_binary_weights_are_judged_at_signs():
    """Relaxed points are not draws of q: the bound is the sum over all 2³ signs."""
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 3)).reshape(3, -1).T
    natural = np.array([0.3, -0.8, 0.1])
    probability = np.prod(1 / (1 + np.exp(-2 * signs * natural)), axis=1)
    f = lambda w: 2.0 * jnp.sum(w) ** 2 + jnp.exp(w[0] * w[1])
    truth = -probability @ (np.asarray(jax.vmap(f)(jnp.asarray(signs))) + np.log(probability))
    rule = blr.bayesbinn(0.1)
    objective = as_objective(f)
    bound = judge_bound(rule, objective, rule.init(blr.Bernoulli(jnp.asarray(natural))), None, jax.random.key(0))
    assert abs(bound.value - truth) < 4 * bound.error < 8 * ERROR_GOAL


def test_a_student_t_by_grid_and_by_draws():
    q = blr.StudentT(jnp.array([0.3]), jnp.array([[4.0]]), dof=8.0)
    f = lambda theta: jnp.sum(jnp.log1p((theta - 1) ** 2)) + 0.5 * theta @ theta
    at = np.linspace(-60, 60, 400_001)
    density = scipy.stats.t(8, 0.3, 0.5)
    truth = -np.trapezoid(density.pdf(at) * (np.log1p((at - 1) ** 2) + 0.5 * at**2 + density.logpdf(at)), at)
    for points in (blr.MonteCarlo(10), blr.Quadrature(10)):
        bound = judged(f, q, points)
        assert abs(bound.value - truth) < 4 * bound.error + 1e-8, points
        assert bound.error < 2 * ERROR_GOAL


# What has no error, and what is not a bound.


@pytest.mark.extended
def test_closed_forms_have_the_error_zero():
    model = blr.Model({"p": blr.Beta(1.0, 1.0)}, {"prior": blr.factors.prior("p", blr.Beta(1.0, 1.0)),
                      "y": blr.Factor(lambda mu, y: y * mu[0] + (1 - y) * mu[1], "p", data="y")})  # fmt: skip
    result = blr.fit(blr.conjugate(), model, None, {"y": jnp.array([1.0, 1.0, 0.0])}, steps=1)
    np.testing.assert_allclose(result.bound, math.log(1 / 12), rtol=1e-10)
    assert result.bound_error == 0.0


@pytest.mark.extended
def test_the_delta_method_is_an_expansion_and_says_so():
    result = blr.fit(blr.newton(), wide_poisson, gaussian(SIZE), steps=20, tolerance=1e-10)
    assert result.bound_error is None
    assert result.bound == pytest.approx(result.trace["bound"][-1], rel=1e-8)


@pytest.mark.extended
def test_mini_batches_have_neither():
    objective = blr.Objective(lambda w, e: poisson(e[0] @ w, e[1]), size=20, regularizer=1.0)
    data = (jnp.asarray(X), jnp.asarray(COUNTS))
    result = blr.fit(blr.vogn(0.1), objective, jnp.zeros(2), data, steps=2, batch_size=5, key=jax.random.key(0))
    assert result.bound is None
    assert result.bound_error is None


MODEL_DATA = {"x": jnp.asarray(X), "y": jnp.asarray(COUNTS)}


def count_model(points):
    prior = blr.Gaussian(jnp.zeros(2), 2 * jnp.eye(2))
    rows = blr.factors.likelihood(lambda f, y: -student(f, y), "y", {"w": "x"}, points=points)
    return blr.Model({"w": prior}, {"prior": blr.factors.prior("w", prior), "y": rows})


@pytest.mark.parametrize("points", [blr.MonteCarlo(10), blr.Quadrature(6)], ids=repr)
def test_a_models_factors_are_integrated_anew(points):
    rule = blr.cvi(0.5)
    state = rule.init({"w": gaussian(2)}, count_model(points).with_size(20))
    bound = judge_bound(rule, count_model(points), state, MODEL_DATA, jax.random.key(0))
    prior = lambda theta: theta @ theta + jnp.log(2 * jnp.pi) - jnp.log(2.0)
    truth = by_quadrature(lambda theta: jnp.sum(student(X @ theta, COUNTS)) + prior(theta), gaussian(2))
    assert abs(bound.value - truth) <= bound.error + 1e-9
    assert bound.error < 1e-3


@pytest.mark.extended
def test_a_model_expanded_at_the_mean_has_no_error():
    result = blr.fit(blr.cvi(1.0), count_model(blr.Delta()), None, MODEL_DATA, steps=5)
    assert result.bound_error is None
    assert result.bound is not None


def test_a_factor_at_draws_of_a_block_has_a_standard_error():
    prior = blr.Gaussian(jnp.zeros(2), 2 * jnp.eye(2))
    rows = blr.Factor(lambda w, x, y: -student(x @ w, y), "w", data=("x", "y"), points=blr.MonteCarlo(8))
    model = blr.Model({"w": prior}, {"prior": blr.factors.prior("w", prior), "y": rows}, size=20)
    rule = blr.cvi(0.5)
    state = rule.init({"w": gaussian(2)}, model)
    bound = judge_bound(rule, model, state, MODEL_DATA, jax.random.key(0))
    log_prior = lambda theta: theta @ theta + jnp.log(2 * jnp.pi) - jnp.log(2.0)
    truth = by_quadrature(lambda theta: jnp.sum(student(X @ theta, COUNTS)) + log_prior(theta), gaussian(2))
    assert abs(bound.value - truth) < 4 * bound.error < 8 * ERROR_GOAL


@pytest.mark.extended
def test_a_factor_on_a_grid_of_a_block_has_the_difference_of_two_grids():
    """The bound on a grid of twice the order, less that on the factor's own grid: both by NumPy's nodes."""
    prior, y = blr.Gaussian(jnp.zeros(1), 2 * jnp.eye(1)), jnp.asarray(COUNTS)
    rows = blr.Factor(lambda w, y: -student(w[0], y), "w", data="y", points=blr.Quadrature(2))
    model = blr.Model({"w": prior}, {"prior": blr.factors.prior("w", prior), "y": rows}, size=20)
    rule = blr.cvi(0.5)
    bound = judge_bound(rule, model, rule.init({"w": gaussian(1)}, model), {"y": y}, jax.random.key(0))
    loss = lambda theta: jnp.sum(student(theta[0], y)) + theta @ theta + 0.5 * (jnp.log(2 * jnp.pi) - jnp.log(2.0))
    fine, coarse = (by_quadrature(loss, gaussian(1), order) for order in (4, 2))
    assert bound.value == pytest.approx(fine, rel=1e-12)
    assert bound.error == pytest.approx(abs(fine - coarse), rel=1e-9)
    assert bound.error > 1e-3


@pytest.mark.extended
@pytest.mark.parametrize("size", [1, 5])
def test_the_entropy_of_a_mixture_is_integrated_anew(size):
    """A narrow component within a wide one, against draws; the points of the fit alone said nothing about an error."""
    means, precisions = np.array([[0.0], [0.4], [1.5]]) * np.ones(size), [1.0, 30.0, 4.0]
    members = [blr.Gaussian(jnp.asarray(m), s * jnp.eye(size)) for m, s in zip(means, precisions, strict=True)]
    q = blr.Mixture([1, 2, 1], members)
    prior = blr.Gaussian(jnp.zeros(size), jnp.eye(size))
    model = blr.Model({"f": q}, {"prior": blr.factors.prior("f", prior)})
    rule = blr.cvi(0.5)
    bound = judge_bound(rule, model, rule.init(None, model), None, jax.random.key(0))
    entropy, variance, draws = float(q.joint_entropy()), 0.0, 100_000
    for k, (member, weight) in enumerate(zip(members, np.asarray(q.weights), strict=True)):
        logs = np.asarray(q.log_responsibilities(member.sample(jax.random.key(k), (draws,)))[:, k])
        entropy, variance = entropy + weight * logs.mean(), variance + weight**2 * logs.var() / draws
    truth = float(model.contributions(model.starting_point(None))["factors"]["prior"]) + entropy
    assert 0 < bound.error < 2 * ERROR_GOAL
    assert abs(bound.value - truth) < 4 * np.hypot(bound.error, np.sqrt(variance))


# How they are shown and kept.


def test_numbers_are_shown_to_the_digits_that_the_error_leaves():
    assert with_error(-123.4321, 0.0512) == "−123.432 ± 0.051"
    assert with_error(-123.4321, 2.5) == "−123.4 ± 2.5"
    assert with_error(-123456.7, 31.0) == "−123,457 ± 31"
    assert with_error(-123.4321, 0.0) == with_error(-123.4321, None) == with_error(-123.43212, 1e-6) == "−123.4321"
    assert with_error(-math.inf, math.nan) == "−inf"


@pytest.mark.extended
def test_the_result_shows_and_saves_both(tmp_path):
    rule = blr.von(0.3).replace(points=blr.MonteCarlo(2))
    result = blr.fit(rule, wide_poisson, gaussian(SIZE), steps=2, key=jax.random.key(0))
    assert "bound" not in repr(result)  # it is computed when it is asked for
    text = with_error(result.bound, result.bound_error)
    assert " ± " in text
    assert f"bound {text}" in repr(result)
    result.save(tmp_path / "result")
    loaded = blr.load(tmp_path / "result")
    assert (loaded.bound, loaded.bound_error) == (result.bound, result.bound_error)


def test_a_bound_that_is_not_finite_says_so():
    f = lambda theta: jnp.where(theta[0] > 0, 0.5 * theta @ theta, jnp.inf)
    bound = judged(f, gaussian(SIZE), blr.MonteCarlo(2))
    assert bound.value == -math.inf
    assert math.isnan(bound.error)


@pytest.mark.extended
@pytest.mark.as_users
def test_float32():
    """As users have it: single precision, default compiler flags; the truth is in double precision."""
    with jax.enable_x64(False):
        x, y = WIDE_X.astype(np.float32), WIDE_COUNTS.astype(np.float32)
        f = lambda theta: jnp.sum(poisson(x @ theta, y)) + 0.5 * theta @ theta
        bound = judged(f, gaussian(SIZE), blr.MonteCarlo(10))
    assert abs(bound.value - wide_poisson_bound(gaussian(SIZE))) < 4.5 * bound.error < 9 * ERROR_GOAL
