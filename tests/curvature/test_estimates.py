"""Bonnet's and Price's theorems at work: every pairing of points and curvature estimates what it says.

Random estimates are compared with quadrature or enumeration: the mean of many independent small ones
must lie within four of its own standard errors, whatever the key.
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.families.gaussian.precision import Factored
from bayesrule.objectives.objective import as_objective
from bayesrule.rule.update import measure

X = jnp.array([[1.0, 0.3], [-0.5, 1.2], [0.8, -0.9], [0.1, 0.7], [-1.3, -0.2]])
Y = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0])
DATA = (X, Y)
SIZE = 8  # N is not the number of rows, so that N/M is seen


def logistic(output, y):
    return jnp.logaddexp(0.0, output) - y * output


def by_example(theta, example):
    x, y = example
    return logistic(x @ theta, y) + 0.1 * jnp.sin(theta[0] * theta[1])


EXAMPLES = blr.Objective(by_example, size=SIZE)
OUTPUTS = blr.Objective(logistic, output=lambda w, x: jnp.tanh(w[0]) * x @ w, size=SIZE)
LINEAR = blr.Objective(logistic, output=lambda w, x: x @ w + 0.2, size=SIZE, linear=True)
GENERIC = blr.Objective(logistic, output=lambda w, x: x @ w + 0.2, size=SIZE)


def plain(theta):
    return jnp.sum(jnp.cosh(theta - 0.3)) + jnp.cos(theta[0]) * theta[1] ** 2


PLAIN = as_objective(plain)

MEAN, MATRIX = jnp.array([0.4, -0.6]), jnp.array([[3.0, 0.7], [0.7, 2.0]])
FULL = blr.Gaussian(MEAN, MATRIX)
DIAGONAL = blr.DiagonalGaussian(MEAN, jnp.array([3.0, 2.0]))
FIXED = blr.FixedGaussian(MEAN, jnp.array([3.0, 2.0]))
LOW_RANK = blr.LowRankGaussian(MEAN, jnp.array([2.0, 1.5]), jnp.array([[0.8], [0.5]]))


@jax.jit
def measured(curvature, points, q, objective, key=None, data=DATA):
    batch = None if not objective.takes_data else data
    actual = curvature.measure(objective, q, points, batch, None, key)
    if isinstance(actual.curvature, Factored):  # as a matrix: its rows have no order of their own
        rows = actual.curvature.rows
        return actual.value, actual.gradient, jnp.diag(actual.curvature.diagonal) + rows.T @ rows
    return actual.value, actual.gradient, actual.curvature


def close(first, second, tolerance):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def within_standard_errors(estimate, reference, key, count=4000, limit=4.0):
    """`estimate(key)` has the reference as its mean, as far as `count` draws can tell."""
    draws = jax.jit(jax.vmap(estimate))(jax.random.split(key, count))
    for name, draw, value in zip(("value", "gradient", "curvature"), draws, reference, strict=True):
        for d, v in zip(jax.tree.leaves(draw), jax.tree.leaves(value), strict=True):
            error = np.std(d, axis=0) / math.sqrt(count)
            np.testing.assert_array_less(np.abs(np.mean(d, axis=0) - v), limit * error + 1e-9, err_msg=name)
    return draws


# What each curvature estimates, family by family: (curvature, q, objective, what quadrature measures).
PAIRS = {
    "Hessian, full": (blr.Hessian(), FULL, EXAMPLES, blr.Hessian()),
    "Hessian, plain function": (blr.Hessian(), FULL, PLAIN, blr.Hessian()),
    "Stein, full": (blr.Stein(), FULL, EXAMPLES, blr.Hessian()),
    "Stein, diagonal": (blr.Stein(), DIAGONAL, EXAMPLES, blr.HessianDiagonal()),
    "Stein, linear": (blr.Stein(), FULL, LINEAR, blr.Hessian()),
    "HessianDiagonal": (blr.HessianDiagonal(), DIAGONAL, EXAMPLES, blr.HessianDiagonal()),
    "absolute diagonal": (blr.HessianDiagonal(absolute=True), DIAGONAL, EXAMPLES, blr.HessianDiagonal(absolute=True)),
    "GaussNewton, full": (blr.GaussNewton(), FULL, EXAMPLES, blr.GaussNewton()),
    "GaussNewton, diagonal": (blr.GaussNewton(), DIAGONAL, EXAMPLES, blr.GaussNewton()),
    "GaussNewton, low rank": (blr.GaussNewton(), LOW_RANK, EXAMPLES, blr.GaussNewton()),
    "GeneralizedGaussNewton": (blr.GeneralizedGaussNewton(), FULL, OUTPUTS, blr.GeneralizedGaussNewton()),
    "SquaredGradient": (blr.SquaredGradient(), DIAGONAL, EXAMPLES, blr.SquaredGradient()),
    "Reparameterized, full": (blr.Reparameterized(), FULL, EXAMPLES, blr.Hessian()),
    "Reparameterized, diagonal": (blr.Reparameterized(), DIAGONAL, PLAIN, blr.HessianDiagonal()),
    "Reparameterized, fixed": (blr.Reparameterized(), FIXED, EXAMPLES, blr.Gradient()),
    "Score, full": (blr.Score(), FULL, EXAMPLES, blr.Hessian()),
    "Score, no baseline": (blr.Score(baseline=False), DIAGONAL, PLAIN, blr.HessianDiagonal()),
    "Gradient": (blr.Gradient(), FIXED, EXAMPLES, blr.Gradient()),
}


@cache
def quadrature(pair):
    _, q, objective, curvature = PAIRS[pair]
    return measured(curvature, blr.Quadrature(24), q, objective)


MIRRORED = ("Hessian, full", "Stein, full", "HessianDiagonal", "Reparameterized, full", "Score, full", "Gradient")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("pair", "antithetic"), [(pair, False) for pair in PAIRS] + [(pair, True) for pair in MIRRORED]
)
def test_monte_carlo_agrees_with_quadrature(pair, antithetic):
    curvature, q, objective, _ = PAIRS[pair]
    points = blr.MonteCarlo(4, antithetic=antithetic)
    key = jax.random.key(list(PAIRS).index(pair))
    within_standard_errors(lambda k: measured(curvature, points, q, objective, k), quadrature(pair), key)


def test_quadrature_is_the_integral():
    """Gauss–Hermite against NumPy's own grid, and converged in its order."""
    nodes, weights = np.polynomial.hermite.hermgauss(40)
    grid = math.sqrt(2) * np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    weight = np.outer(weights, weights).reshape(-1) / math.pi
    theta = jnp.asarray(MEAN + grid @ np.linalg.cholesky(np.linalg.inv(MATRIX)).T)
    losses, slopes = jax.jit(jax.vmap(jax.value_and_grad(lambda t: EXAMPLES.data(t, DATA)[0])))(theta)
    value, gradient, curvature = quadrature("Hessian, full")
    close((value, gradient), (weight @ losses, weight @ slopes), 1e-9)
    # Bonnet and Price: E∇²ℓ = S E[(θ − m)∇ℓᵀ] with every θ weighted by q.
    price = MATRIX @ jnp.einsum("s,si,sj->ij", weight, theta - MEAN, slopes)
    close(curvature, price, 1e-8)


def test_bonnet_and_price():
    """∇_m E_q ℓ = E_q∇ℓ and ∇_V E_q ℓ = ½E_q∇²ℓ (app:bp), by differentiating the integral."""

    def integral(mean, covariance):
        q = blr.Gaussian(mean, jnp.linalg.inv(covariance))
        point_set = blr.Quadrature(24).at(q, None)
        return point_set.weights @ jax.vmap(lambda t: EXAMPLES.data(t, DATA)[0])(point_set.theta)

    slope, half = jax.jit(jax.grad(integral, argnums=(0, 1)))(MEAN, jnp.linalg.inv(MATRIX))
    _, gradient, curvature = quadrature("Hessian, full")
    close((gradient, curvature), (slope, half + half.T), 1e-8)


@pytest.mark.extended
def test_antithetic_pairs_spread_less():
    """Odd parts cancel in pairs m ± ε, so an even Hessian is as good and the gradient far better."""
    spread = {}
    for antithetic in (False, True):
        points = blr.MonteCarlo(4, antithetic=antithetic)
        estimate = jax.vmap(lambda k, p=points: measured(blr.Hessian(), p, FULL, EXAMPLES, k))
        _, gradient, _ = jax.jit(estimate)(jax.random.split(jax.random.key(1), 2000))
        spread[antithetic] = np.var(gradient, axis=0).sum()
    assert spread[True] < 0.2 * spread[False]


@pytest.mark.extended
def test_a_baseline_keeps_the_mean_and_narrows_the_spread():
    """Each draw against the mean of the others: unbiased (tested above), and less noisy."""
    spread = {}
    shifted = blr.Objective(lambda t, e: by_example(t, e) + 3.0, size=SIZE)
    for baseline in (False, True):
        score = blr.Score(baseline=baseline)
        estimate = jax.vmap(lambda k, s=score: measured(s, blr.MonteCarlo(6), FULL, shifted, k))
        _, gradient, _ = jax.jit(estimate)(jax.random.split(jax.random.key(2), 2000))
        spread[baseline] = np.var(gradient, axis=0).sum()
    assert spread[True] < 0.2 * spread[False]


@pytest.mark.extended
def test_everything_is_exact_on_a_quadratic():
    """Delta, quadrature of order 2 and any one sample give a quadratic's Hessian; delta its gradient."""
    matrix, vector = jnp.array([[2.0, 0.5], [0.5, 1.0]]), jnp.array([1.0, -2.0])
    quadratic = as_objective(lambda t: 0.5 * t @ matrix @ t - vector @ t + 3.0)
    gradient = matrix @ MEAN - vector
    for points in (blr.Delta(), blr.Quadrature(2), blr.MonteCarlo(2, antithetic=True)):
        actual = measured(blr.Hessian(), points, FULL, quadratic, jax.random.key(0))
        close(actual[1:], (gradient, matrix), 1e-13)
    close(measured(blr.HessianDiagonal(), blr.Delta(), DIAGONAL, quadratic)[1:], (gradient, jnp.diag(matrix)), 1e-14)
    close(measured(blr.Stein(), blr.Quadrature(2), FULL, quadratic)[1:], (gradient, matrix), 1e-12)


# Discrete and other families.


def discrete_loss(theta):
    values = jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(theta)])
    return jnp.sum(jnp.sin(values)) + jnp.prod(1.0 + 0.3 * values)


DISCRETE = {
    "Categorical": blr.Categorical(jnp.array([0.2, -0.4, 1.0, 0.3])),
    "Bernoulli": blr.Bernoulli({"a": jnp.array([0.3, -0.8]), "b": jnp.array(0.5)}),
}


def enumerated(q):
    support = q.support()
    return jnp.exp(q.log_prob(support)) @ jax.vmap(discrete_loss)(support)


@pytest.mark.parametrize("family", DISCRETE)
def test_score_with_enumeration_is_exact(family):
    """∇_μ E_q ℓ by differentiating the sum over every θ through μ ↦ q."""
    q = DISCRETE[family]
    summed = jax.jit(lambda q: jax.value_and_grad(lambda m: enumerated(q.with_expectation(m)))(q.expectation()))
    value, slope = summed(q)
    actual = measured(blr.Score(), blr.Enumeration(), q, as_objective(discrete_loss))
    close(actual, (value, slope, None), 1e-13)


@pytest.mark.parametrize("family", DISCRETE)
def test_score_with_samples_of_a_discrete_family(family):
    q = DISCRETE[family]
    objective = as_objective(discrete_loss)
    reference = measured(blr.Score(), blr.Enumeration(), q, objective)
    estimate = lambda key: measured(blr.Score(), blr.MonteCarlo(5), q, objective, key)
    within_standard_errors(estimate, reference, jax.random.key(3))


LINE = jnp.linspace(-30.0, 30.0, 1201)


def gamma_integral(q):
    """∫ over log θ: the trapezoidal rule is spectrally accurate on the whole line."""
    theta = jnp.exp(LINE)
    return jnp.sum(jnp.exp(q.log_prob(theta)) * theta * positive(theta)) * (LINE[1] - LINE[0])


def positive(theta):
    return jnp.log1p(theta) * jnp.cos(theta / 3)


def beta_integral(q):
    theta = jax.nn.sigmoid(LINE)
    return jnp.sum(jnp.exp(q.log_prob(theta)) * theta * (1 - theta) * positive(theta)) * (LINE[1] - LINE[0])


def on_simplex(theta):
    return jnp.sin(3 * theta[..., 0]) + theta[..., 1] ** 2 * theta[..., 2]


def dirichlet_integral(q):
    line = jnp.linspace(-25.0, 25.0, 251)
    first, second = jnp.meshgrid(line, line)
    theta = jax.nn.softmax(jnp.stack([first, second, jnp.zeros_like(first)], -1), axis=-1)
    mass = jnp.exp(q.log_prob(theta)) * jnp.prod(theta, axis=-1)
    return jnp.sum(mass * on_simplex(theta)) * (line[1] - line[0]) ** 2


IMPLICIT = {
    "Gamma": (blr.Gamma(2.5, 1.5), positive, gamma_integral),
    "Beta": (blr.Beta(2.0, 3.0), positive, beta_integral),
    "Dirichlet": (blr.Dirichlet(jnp.array([1.5, 2.0, 3.0])), on_simplex, dirichlet_integral),
}


@pytest.mark.extended
@pytest.mark.parametrize("curvature", [blr.Reparameterized(), blr.Score()], ids=["Reparameterized", "Score"])
@pytest.mark.parametrize("family", IMPLICIT)
def test_families_on_other_spaces_agree_with_numerical_integrals(family, curvature):
    """Implicit derivatives of samples, and the score, against ∇_μ of the integral."""
    q, function, integral = IMPLICIT[family]
    reference = jax.jit(lambda: (integral(q), q.natural_gradient(integral), None))()
    estimate = lambda key: measured(curvature, blr.MonteCarlo(4), q, as_objective(function), key)
    within_standard_errors(estimate, reference, jax.random.key(4))


# Outputs that are linear in θ.


@pytest.mark.extended
@pytest.mark.parametrize("points", [blr.Delta(), blr.Quadrature(20), blr.MonteCarlo(3)], ids=repr)
def test_the_linear_path_is_the_generic_one(points):
    """Integrating each example over its own output, or the same draws, gives the same as over θ."""
    key = jax.random.key(5)
    for curvature, q in (
        (blr.Hessian(), FULL),
        (blr.HessianDiagonal(), DIAGONAL),
        (blr.GeneralizedGaussNewton(), FULL),
    ):
        fast = measured(curvature, points, q, LINEAR, key)
        slow = measured(curvature, points, q, GENERIC, jax.random.clone(key))
        close(fast, slow, 1e-7 if isinstance(points, blr.Quadrature) else 1e-13)


@pytest.mark.extended
def test_the_linear_path_of_several_outputs():
    """Two outputs of four weights: a grid over the outputs equals a grid over the weights."""

    def cross_entropy(output, y):
        return jax.nn.logsumexp(output) - output[y]

    weights = {"w": jnp.array([[0.3, -0.2], [0.1, 0.5]])}
    precision = jnp.diag(jnp.array([9.0, 8.0, 7.0, 6.0])) + 0.5
    q, data = blr.Gaussian(weights, precision), (X, jnp.array([0, 1, 1, 0, 1]))
    apply = lambda p, x: p["w"] @ x
    fast = blr.Objective(cross_entropy, output=apply, size=5, linear=True)
    slow = blr.Objective(cross_entropy, output=apply, size=5)
    actual = measured(blr.Hessian(), blr.Quadrature(9), q, fast, data=data)
    close(actual, measured(blr.Hessian(), blr.Quadrature(9), q, slow, data=data), 1e-9)
    key = jax.random.key(0)
    actual = measured(blr.Hessian(), blr.MonteCarlo(2), q, fast, key, data=data)
    close(actual, measured(blr.Hessian(), blr.MonteCarlo(2), q, slow, jax.random.clone(key), data=data), 1e-13)


@pytest.mark.extended
def test_outputs_that_do_not_vary():
    """A row of zeros has outputs of zero variance: still finite, with one output and with two."""
    data = (jnp.zeros((1, 2)), jnp.ones(1))
    for points in (blr.Quadrature(3), blr.MonteCarlo(2), blr.Delta()):
        actual = measured(blr.Hessian(), points, FULL, LINEAR, jax.random.key(0), data=data)
        close(actual[1:], (jnp.zeros(2), jnp.zeros((2, 2))), 0.0)
    both = blr.Objective(
        lambda f, y: jax.nn.logsumexp(f) - y * f[0], output=lambda w, x: jnp.stack([x @ w, -x @ w]), size=1, linear=True
    )
    for row in (jnp.zeros((1, 2)), jnp.array([[1.0, 0.5]])):  # no variance at all; perfectly correlated
        actual = measured(blr.Hessian(), blr.Quadrature(30), FULL, both, data=(row, jnp.ones(1)))
        slow = blr.Objective(both.loss, output=both.output, size=1)
        close(actual, measured(blr.Hessian(), blr.Quadrature(30), FULL, slow, data=(row, jnp.ones(1))), 1e-6)


# What each curvature is, by hand.


@jax.jit
def _gradients(theta, data):
    return jax.vmap(lambda x, y: jax.grad(by_example)(theta, (x, y)))(*data)


def gradients(theta, data=DATA):
    return np.asarray(_gradients(theta, data))


def test_gauss_newton_scaling():
    """N/M Σᵢ gᵢgᵢᵀ (eq:OGN_approx) with the true M, and its diagonal N/M Σᵢ gᵢ²."""
    slopes = gradients(MEAN)
    _, gradient, curvature = measured(blr.GaussNewton(), blr.Delta(), FULL, EXAMPLES)
    close((gradient, curvature), (SIZE / 5 * slopes.sum(0), SIZE / 5 * slopes.T @ slopes), 1e-13)
    _, _, diagonal = measured(blr.GaussNewton(), blr.Delta(), DIAGONAL, EXAMPLES)
    close(diagonal, SIZE / 5 * (slopes**2).sum(0), 1e-13)
    _, _, matrix = measured(blr.GaussNewton(), blr.Delta(), LOW_RANK, EXAMPLES)
    close(matrix, SIZE / 5 * slopes.T @ slopes, 1e-13)


def test_squared_gradient_is_of_the_mean_loss():
    """N ĝ² with ĝ the gradient of the batch's mean loss."""
    mean = gradients(MEAN).mean(0)
    actual = measured(blr.SquaredGradient(), blr.Delta(), DIAGONAL, EXAMPLES)
    close(actual[1:], (SIZE * mean, SIZE * mean**2), 1e-13)


def test_generalized_gauss_newton_of_a_linear_model():
    """It is the Hessian itself where the outputs are linear, for every structure."""
    _, _, hessian = measured(blr.Hessian(), blr.Delta(), FULL, GENERIC)
    for objective in (LINEAR, GENERIC):
        close(measured(blr.GeneralizedGaussNewton(), blr.Delta(), FULL, objective)[2], hessian, 1e-13)
        diagonal = measured(blr.GeneralizedGaussNewton(), blr.Delta(), DIAGONAL, objective)[2]
        close(diagonal, jnp.diag(hessian), 1e-13)
        close(measured(blr.GeneralizedGaussNewton(), blr.Delta(), LOW_RANK, objective)[2], hessian, 1e-13)


def test_fisher_in_place_of_the_losss_hessian():
    """`fisher` is Λ in JᵀΛJ; with a canonical link it is the loss's own Hessian."""
    fisher = lambda f: jax.nn.sigmoid(f) * jax.nn.sigmoid(-f)
    ours = measured(blr.GeneralizedGaussNewton(fisher=fisher), blr.Delta(), FULL, GENERIC)
    close(ours, measured(blr.GeneralizedGaussNewton(), blr.Delta(), FULL, GENERIC), 1e-13)


@pytest.mark.parametrize("points", [blr.MonteCarlo(3), blr.Quadrature(2)], ids=repr)
def test_stein_s_curvature_of_several_linear_outputs_is_symmetric(points):
    """The average of Cov(f)⁻¹(f − E f)∇ℓᵀ over few points is not, and a precision must be."""
    softmax = lambda f, y: jax.nn.logsumexp(f * jnp.array([1.0, 2.0, -1.5])) - f[0] * y
    outputs = lambda w, x: jnp.stack([x @ w, x[0] * w[1] - 0.3 * w[0], x[1] * w[0] + w[1]])
    several = blr.Objective(softmax, output=outputs, size=SIZE, linear=True)
    matrix = np.asarray(measured(blr.Stein(), points, FULL, several, jax.random.key(0) if points.random else None)[2])
    assert abs(matrix[0, 1]) > 1e-2
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-12)


def test_absolute_diagonal():
    """Σᵢ |∇²_jj ℓᵢ| over examples (eq:dhess_update); |∇²_jj f| of a plain function."""
    diagonals = np.asarray(jax.jit(jax.vmap(lambda x, y: jnp.diag(jax.hessian(by_example)(MEAN, (x, y)))))(*DATA))
    actual = measured(blr.HessianDiagonal(absolute=True), blr.Delta(), DIAGONAL, EXAMPLES)
    close(actual[2], SIZE / 5 * np.abs(diagonals).sum(0), 1e-13)
    # Examples whose curvatures have opposite signs, which cancel in the sum but not in the sum of absolute values.
    signed = lambda t, example: (2 * example[1] - 1) * jnp.sum(jnp.cosh(example[0] * t))
    x, y = np.asarray(X), np.asarray(Y)
    curvatures = (2 * y - 1)[:, None] * x**2 * np.cosh(x * np.asarray(MEAN))
    assert np.any(curvatures < 0)
    assert np.any(curvatures > 0)
    opposite = measured(blr.HessianDiagonal(absolute=True), blr.Delta(), DIAGONAL, blr.Objective(signed, size=SIZE))
    close(opposite[2], SIZE / 5 * np.abs(curvatures).sum(0), 1e-13)
    concave = as_objective(lambda t: -jnp.sum(t**4))
    actual = measured(blr.HessianDiagonal(absolute=True), blr.Delta(), DIAGONAL, concave)
    close(actual[2], 12 * MEAN**2, 1e-13)


WEIGHED = {
    "Hessian": (blr.Hessian(), FULL, EXAMPLES),
    "Hessian, linear": (blr.Hessian(), FULL, LINEAR),
    "HessianDiagonal": (blr.HessianDiagonal(), DIAGONAL, EXAMPLES),
    "absolute diagonal": (blr.HessianDiagonal(absolute=True), DIAGONAL, EXAMPLES),
    "GaussNewton": (blr.GaussNewton(), FULL, EXAMPLES),
    "GaussNewton, low rank": (blr.GaussNewton(), LOW_RANK, EXAMPLES),
    "GeneralizedGaussNewton": (blr.GeneralizedGaussNewton(), DIAGONAL, OUTPUTS),
    "SquaredGradient": (blr.SquaredGradient(), DIAGONAL, EXAMPLES),
    "Stein": (blr.Stein(), FULL, EXAMPLES),
    "Stein, linear": (blr.Stein(), FULL, LINEAR),
    "Gradient": (blr.Gradient(), FIXED, EXAMPLES),
    "Reparameterized": (blr.Reparameterized(), FULL, EXAMPLES),
    "Score": (blr.Score(), FULL, EXAMPLES),
}


@pytest.mark.sampled("absolute diagonal", "GeneralizedGaussNewton")
@pytest.mark.parametrize("case", WEIGHED)
def test_example_weights(case):
    """Weight 2 is a duplicated row; weight 0 an absent one, even if it holds no numbers."""
    curvature, q, objective = WEIGHED[case]
    points = blr.MonteCarlo(2)
    weights = jnp.array([1.0, 2.0, 0.0, 1.0, 1.0])
    spoilt = (X.at[2].set(jnp.nan), Y.at[2].set(jnp.nan))
    rows = jnp.array([0, 1, 1, 3, 4])
    estimate = lambda data: measured(curvature, points, q, objective, jax.random.key(6), data)
    expected = estimate((X[rows], Y[rows]))
    close(estimate(blr.Weighted(DATA, weights)), expected, 1e-12)
    close(estimate(blr.Weighted(spoilt, weights)), expected, 1e-12)


@pytest.mark.extended
def test_stein_with_outputs_that_depend_on_each_other():
    """Outputs (x·w, 2x·w) have a singular covariance: Stein's curvature is still the Hessian's."""
    x = jax.random.normal(jax.random.key(5), (6, 2))
    objective = blr.Objective(
        lambda f, y: jnp.sum(0.5 * (f - y) ** 2), output=lambda w, r: jnp.stack([r @ w, 2 * r @ w]), linear=True, size=6
    )
    q = blr.Gaussian(jnp.array([0.3, -0.2]), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    actual = {}
    for curvature in (blr.Stein(), blr.Hessian()):
        rule = blr.newton().replace(points=blr.Quadrature(5), curvature=curvature)
        measured = jax.jit(lambda q, data, rule=rule: measure(rule, objective, q, data, None, None))
        actual[type(curvature)] = measured(q, (x, jnp.ones((6, 2))))
    np.testing.assert_allclose(actual[blr.Stein].curvature, actual[blr.Hessian].curvature, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("curvature", [blr.GaussNewton(), blr.GeneralizedGaussNewton()], ids=repr)
@pytest.mark.parametrize("family", [blr.DiagonalGaussian, blr.Gaussian])
def test_a_mini_batch_counts_n_over_m_times(family, curvature):
    """The curvature of two rows of six is three times that of the two rows by themselves."""
    loss, output = lambda f, y: 0.5 * (f - y) ** 2 + 0.1 * f**4, lambda w, x: jnp.tanh(x @ w)
    batch = jnp.array([[1.0, -0.5], [0.3, 2.0]]), jnp.array([0.2, -1.0])
    mean = jnp.array([0.4, -0.3])
    q = family(mean, jnp.ones(2) if family is blr.DiagonalGaussian else jnp.eye(2))
    few, many = (
        curvature.measure(blr.Objective(loss, output=output, size=size), q, blr.Delta(), batch, None, None).curvature
        for size in (2, 6)
    )
    np.testing.assert_allclose(many, 3 * np.asarray(few), rtol=1e-10)
