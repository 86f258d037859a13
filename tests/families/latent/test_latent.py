"""The Student-t and the skew-Gaussian: their densities against scipy's, their step against F⁻¹∇ of q(θ, w)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate as integrate
import scipy.special as special
import scipy.stats as stats
from jax.scipy.stats import multivariate_normal, norm

import bayesrule as blr
from bayesrule.families.latent.skew_gaussian import half_normal_rule
from bayesrule.families.start import Start

# Optional: the dev extra installs it.
dist = pytest.importorskip("numpyro.distributions")

MATRIX = np.array([[2.0, 0.6], [0.6, 1.0]])
COVARIANCE = np.linalg.inv(MATRIX)
PLACE, SKEW, DOF = np.array([0.5, -1.0]), np.array([0.8, -0.5]), 7.0
STUDENT, LEANING = blr.StudentT(PLACE, MATRIX, DOF), blr.SkewGaussian(PLACE, MATRIX, SKEW)
BOTH = pytest.mark.parametrize("q", [STUDENT, LEANING], ids=["student", "skew"])


def close(actual, desired, tolerance=1e-12):
    np.testing.assert_allclose(actual, desired, rtol=tolerance, atol=tolerance)


def rule(family, points, rate=1.0, curvature=None, guard=None, **steps):
    return blr.Rule(family, points, curvature or blr.Hessian(), blr.Steps(rate, **steps), guard)


# The distributions.


def test_student_against_scipy():
    theta = np.array([[0.0, 0.0], [3.0, -40.0]])
    for dof in (2.1, 4.0, 1e6):
        q, p = blr.StudentT(PLACE, MATRIX, dof), stats.multivariate_t(PLACE, COVARIANCE, dof)
        close(q.log_prob(theta), p.logpdf(theta), 1e-9 if dof == 1e6 else 1e-12)  # scipy's Γs are large, and differ
        close(q.entropy(), p.entropy(), 1e-9 if dof == 1e6 else 1e-12)
    close(STUDENT.covariance(), DOF / (DOF - 2) * COVARIANCE)
    close(STUDENT.variance(), DOF / (DOF - 2) * np.diag(COVARIANCE))
    scale = stats.invgamma(DOF / 2, scale=DOF / 2)
    given = stats.multivariate_normal(PLACE, COVARIANCE).entropy()
    close(STUDENT.joint_entropy(), scale.entropy() + scale.expect(np.log) + given, 1e-8)


described = jax.jit(lambda q, theta: (q.log_prob(theta), q.mean, q.variance(), q.entropy()))


@pytest.mark.parametrize("skew", [0.0, 1e-3, -1.5, 30.0])
def test_skew_against_scipy_in_one_dimension(skew):
    q = blr.SkewGaussian(jnp.array([0.5]), 2.0, skew)
    p = stats.skewnorm(skew * np.sqrt(2.0), 0.5, np.sqrt(0.5 + skew**2))
    theta = np.array([[0.5], [3.0], [-4.0]])
    density, mean, variance, entropy = described(q, theta)
    close(density, p.logpdf(theta[:, 0]), 1e-11)
    close(mean, p.mean())
    close(variance, p.var())
    close(entropy, p.entropy(), 1e-8)


def test_skew_against_the_integral_over_u():
    def joint(u, theta):
        return 2 * stats.norm.pdf(u) * stats.multivariate_normal(PLACE + u * SKEW, COVARIANCE).pdf(theta)

    pulled = jax.jit(
        lambda t: (LEANING.log_prob(t), LEANING.to_step_terms(jnp.ones(2), jnp.eye(2), t, None)[0]["skew"])
    )
    for theta in ([0.0, 0.0], [1.0, -2.0], [-1.0, 1.0]):
        density, _ = integrate.quad(joint, 0, np.inf, (theta,), epsabs=1e-14, epsrel=1e-12)
        push, _ = integrate.quad(lambda u, t: u * joint(u, t), 0, np.inf, (theta,), epsabs=1e-14, epsrel=1e-12)
        mine, skew = pulled(jnp.array(theta))
        close(mine, np.log(density), 1e-10)
        close(skew, push / density, 1e-9)
    close(LEANING.covariance(), COVARIANCE + (1 - 2 / np.pi) * np.outer(SKEW, SKEW))
    given = stats.multivariate_normal(PLACE, COVARIANCE).entropy()
    close(LEANING.joint_entropy(), stats.halfnorm.entropy() + given)


def test_the_scale_that_a_point_tells_of():
    def joint(w, theta):
        scale = stats.invgamma(DOF / 2, scale=DOF / 2).pdf(w)
        return scale * stats.multivariate_normal(PLACE, w * COVARIANCE).pdf(theta)

    for theta in ([0.5, -1.0], [2.0, 3.0]):
        density, _ = integrate.quad(joint, 0, np.inf, (theta,))
        weighted, _ = integrate.quad(lambda w, t: w * joint(w, t), 0, np.inf, (theta,))
        _, curvature = STUDENT.to_step_terms(jnp.ones(2), jnp.ones((2, 2)), jnp.array(theta), None)
        close(curvature, weighted / density, 1e-7)


@BOTH
def test_derivatives_of_the_density(q):
    mine = jax.jit(lambda t: (q.score(t), q.hessian(t)))(theta := jnp.array([1.0, 0.3]))
    known = jax.jit(lambda t: (jax.grad(q.log_prob)(t), jax.hessian(q.log_prob)(t)))(theta)
    close(mine[0], known[0])
    close(mine[1], known[1])


@pytest.mark.extended
@BOTH
def test_samples(q):
    draws = 40_000

    @jax.jit
    def moments(key):
        theta = q.sample(key, (draws,))
        centred = theta - q.mean
        products = centred[:, :, None] * centred[:, None, :]
        observed = (theta, products, centred**3, q.log_prob(theta))
        return [(jnp.mean(x, axis=0), jnp.std(x, axis=0) / draws**0.5) for x in observed]

    # The third cumulant of |w| is c(4/π − 1).
    third = np.sqrt(2 / np.pi) * (4 / np.pi - 1) * SKEW**3 if q is LEANING else np.zeros(2)
    for (mean, error), known in zip(
        moments(jax.random.key(0)), (q.mean, q.covariance(), third, -q.entropy()), strict=True
    ):
        assert np.all(np.abs(mean - known) <= 5 * error)


@pytest.mark.sampled("student")
@BOTH
def test_grids(q):
    """Exact for quadratics from order 2 on; a finer one knows −log q(w | θ), and E_q of its derivatives."""
    for order in (2, 5):
        theta, weights = map(np.asarray, q.grid(order))
        close(weights.sum(), 1)
        close(weights @ theta, q.mean)
        close(np.einsum("s,si,sj->ij", weights, theta - q.mean, theta - q.mean), q.covariance())
    theta, weights = q.grid(24)
    value, gradient, curvature = jax.jit(jax.vmap(lambda t: q.latent_correction(t)))(theta)
    close(weights @ value, q.joint_entropy() - q.entropy(), 1e-7)
    close(weights @ (gradient if q is STUDENT else gradient["location"]), np.zeros(2), 1e-9)
    if q is STUDENT:  # an affine map of θ says nothing of w
        close(np.einsum("s,sij->ij", weights, curvature), np.zeros((2, 2)))


@pytest.mark.parametrize("order", [1, 4, 12])
def test_the_half_normal_s_rule(order):
    nodes, weights = half_normal_rule(order)
    powers = np.arange(2 * order)
    moments = 2 ** (powers / 2) * special.gamma((powers + 1) / 2) / np.sqrt(np.pi)
    np.testing.assert_allclose(weights @ nodes[:, None] ** powers, moments, rtol=1e-9)


# The step: the natural gradient of q(θ, w).

ROWS = jnp.array([[1.0, -0.5], [0.3, 1.2], [-0.8, 0.4]])


def loss(theta):
    return 3 * jnp.sum(jax.nn.softplus(ROWS @ theta)) + 0.5 * jnp.sum((theta - 1) ** 2)


def coordinates(q):
    """λ up to constants, in which a step of the rule is a straight line: (Sm, Sα, S)."""
    precision = np.asarray(q.precision)
    vectors = [q.core.mean] + ([q.skew] if isinstance(q, blr.SkewGaussian) else [])
    return np.concatenate([precision @ v for v in vectors] + [precision[np.tril_indices(2)]])


def log_joint(x, theta, w):
    """log q(θ | w) for the coordinates x: all that depends on them of log q(θ, w)."""
    precision = jnp.array([[x[-3], x[-2]], [x[-2], x[-1]]])
    covariance = jnp.linalg.inv(precision)
    if x.size == 5:
        return multivariate_normal.logpdf(theta, covariance @ x[:2], w * covariance)
    return multivariate_normal.logpdf(theta, covariance @ (x[:2] + w * x[2:4]), covariance)


def latent(q, count):
    """Points and weights for w (1/w is a Gamma) and for u, by scipy's and numpy's rules."""
    if q is STUDENT:
        nodes, weights = special.roots_genlaguerre(count, DOF / 2 - 1)
        return DOF / 2 / nodes, weights / weights.sum()
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return 4.5 * (nodes + 1), 4.5 * weights * stats.halfnorm.pdf(4.5 * (nodes + 1))


def fisher(q, x):
    """E[∇log q(θ, w) ∇log q(θ, w)ᵀ]: polynomials in θ and 1/w (or u), so a small grid is exact."""
    noise, weights = np.polynomial.hermite_e.hermegauss(6)
    w, masses = latent(q, 30)
    w, first, second = (a.ravel() for a in np.meshgrid(w, noise, noise, indexing="ij"))
    weights = np.einsum("a,b,c->abc", masses, weights, weights).ravel() / (2 * np.pi)
    spread = np.stack([first, second], -1) @ np.linalg.cholesky(COVARIANCE).T
    theta = PLACE + (np.sqrt(w)[:, None] * spread if q is STUDENT else w[:, None] * SKEW + spread)
    scores = jax.jit(jax.vmap(jax.grad(log_joint), (None, 0, 0)))(x, theta, w)
    return np.einsum("s,si,sj->ij", weights, scores, scores)


def slope(q, x, temperature):
    """∇E_q[ℓ̄ + τ log q] by the trapezoid rule over θ, with q(θ) from numpyro or from an integral over u."""
    s = np.linspace(-5, 5, 101)
    deviation = np.stack([a.ravel() for a in np.meshgrid(np.sinh(s), np.sinh(s), indexing="ij")], -1)
    volume = np.outer(np.cosh(s), np.cosh(s)).ravel() * (s[1] - s[0]) ** 2
    scale = 1.5 * np.linalg.cholesky(COVARIANCE)
    theta, volume = jnp.asarray(q.mean + deviation @ scale.T), volume * np.linalg.det(scale)
    w, masses = latent(q, 40)

    def log_density(x):
        if q is STUDENT:
            precision = jnp.array([[x[-3], x[-2]], [x[-2], x[-1]]])
            covariance = jnp.linalg.inv(precision)
            scale = jnp.linalg.cholesky(covariance)
            return dist.MultivariateStudentT(DOF, covariance @ x[:2], scale).log_prob(theta)
        each = jax.vmap(lambda u: log_joint(x, theta, u))(jnp.asarray(w))
        return jax.nn.logsumexp(each, axis=0, b=masses[:, None])

    losses = jax.vmap(loss)(theta)

    def expected(x):
        density = log_density(x)
        return jnp.sum(volume * jnp.exp(density) * (losses + temperature * density))

    return jax.jit(jax.grad(expected))(x)


@pytest.mark.extended
@BOTH
def test_a_step_is_the_natural_gradient_of_the_joint(q):
    temperature, rate = 0.7, 0.2
    x = coordinates(q)
    gradient = slope(q, x, temperature)
    natural = np.linalg.solve(fisher(q, x), gradient)
    how = rule(type(q), blr.Quadrature(40 if q is STUDENT else 18), rate, temperature=temperature)
    after, info, _ = jax.jit(lambda state: how.advance(loss, state, diagnose=True))(how.init(q))
    close(coordinates(after.q) - x, -rate * natural, 1e-6)
    close(info.decrement, 0.5 * gradient @ natural, 1e-6)


# What it fits.


@pytest.mark.extended
def test_a_student_is_found_by_any_points():
    """Where q is the posterior, ℓ̄ + log q does not vary: a coarse grid and four draws have no error."""
    covariance = jnp.asarray(COVARIANCE)
    target = dist.MultivariateStudentT(5.0, jnp.array([1.0, -2.0]), jnp.linalg.cholesky(covariance))

    def posterior(theta):
        return -target.log_prob(jnp.stack([theta["a"], theta["b"][0]]))

    start = blr.StudentT({"a": jnp.zeros(()), "b": jnp.zeros(1)}, 1.0, 5.0)
    for points, rate, steps in ((blr.Quadrature(3), 1.0, 40), (blr.MonteCarlo(4), 0.7, 60)):
        fitted = blr.fit(rule(blr.StudentT, points, rate), posterior, start, steps=steps, key=jax.random.key(0))
        assert fitted.reason == "steps"
        close(fitted.q.mean["a"], 1.0, 1e-9)
        close(fitted.q.mean["b"], [-2.0], 1e-9)
        close(fitted.q.precision, MATRIX, 1e-9)
        close(fitted.trace["bound"][-1], 0.0, 1e-9)


def test_a_skew_gaussian_is_found():
    skew, precision = -1.5, 2.0
    shape, scale = skew * precision**0.5, (1 / precision + skew**2) ** 0.5

    def posterior(theta):  # scipy's skewnorm
        z = (theta[0] - 1) / scale
        return -(jnp.log(2 / scale) + norm.logpdf(z) + norm.logcdf(shape * z))

    start = blr.SkewGaussian(jnp.zeros(1), 1.0, -0.5)
    fitted = blr.fit(rule(blr.SkewGaussian, blr.Quadrature(6)), posterior, start, steps=600)
    assert fitted.reason == "steps"
    close(fitted.q.location, [1.0], 1e-8)
    close(fitted.q.skew, [skew], 1e-8)
    close(fitted.q.precision, [[precision]], 1e-8)
    close(fitted.trace["bound"][-1], 0.0, 1e-12)


SHAPE, RATE = 3.0, 2.0
EVIDENCE = special.gammaln(SHAPE) - SHAPE * np.log(RATE)


def log_rate(theta):
    """−log of a Gamma's density for exp θ, unnormalised: the tail is longer to the left."""
    return jnp.sum(RATE * jnp.exp(theta) - SHAPE * theta)


@pytest.mark.extended
def test_a_skewed_posterior():
    points, guard = blr.Quadrature(16), blr.Backtracking(monotone=True)
    start = blr.SkewGaussian(jnp.zeros(1), 1.0, -0.5)
    leaning = blr.fit(rule(blr.SkewGaussian, points, guard=guard), log_rate, start, steps=300, tolerance=1e-10)
    plain = blr.fit(rule(blr.Gaussian, points), log_rate, jnp.zeros(1), steps=100, tolerance=1e-10)
    assert leaning.reason == plain.reason == "converged"
    # The bound by an integral over scipy's density.
    q = leaning.q
    alpha, precision = float(q.skew[0]), float(q.precision[0, 0])
    p = stats.skewnorm(alpha * precision**0.5, float(q.location[0]), (1 / precision + alpha**2) ** 0.5)
    value, _ = integrate.quad(
        lambda t: p.pdf(t) * (SHAPE * t - RATE * np.exp(t) - p.logpdf(t)), -12, 6, epsabs=1e-12, limit=200
    )
    bound = leaning.trace["bound"][-1]
    close(bound, value, 1e-9)
    assert EVIDENCE - 1e-3 < bound < EVIDENCE
    assert plain.trace["bound"][-1] < EVIDENCE - 0.02


def test_without_skew_it_stays_without():
    """At α = 0, u says nothing of θ: E[u∇f] = cE[∇f]. Even where the posterior is skewed."""
    q = blr.SkewGaussian(jnp.zeros(1), 1.0, 0.0)
    how = rule(blr.SkewGaussian, blr.Quadrature(9), 0.5)
    with pytest.raises(ValueError, match="longer tail"):
        how.init(q)
    state, _ = jax.jit(lambda state: how.step(log_rate, state))(blr.State(q, jnp.zeros((), int)))
    close(state.q.skew, [0.0])
    assert abs(state.q.location[0]) > 0.01


@BOTH
def test_a_regularizer_is_a_term_of_the_loss(q):
    """Exactly known under q, and for a quadratic known on the grid too."""
    strength, dummy = 3.0, jnp.zeros(1)
    data = lambda theta, _: 3 * jnp.sum(jax.nn.softplus(ROWS @ theta))
    constant = 0.5 * 2 * np.log(2 * np.pi / strength)
    together = lambda theta, e: data(theta, e) + 0.5 * strength * jnp.sum(theta**2) + constant
    how = rule(type(q), blr.Quadrature(20), 0.5)
    step = jax.jit(lambda objective: how.advance(objective, how.init(q), dummy, diagnose=True)[:2])
    apart, observed = step(blr.Objective(data, size=1, regularizer=strength))
    whole, told = step(blr.Objective(together, size=1))
    tolerance = 1e-12 if q is STUDENT else 1e-6  # E[u | θ] is no polynomial
    close(coordinates(apart.q), coordinates(whole.q), tolerance)
    close(observed.bound, told.bound, tolerance)


# In the rule.


@pytest.mark.extended
def test_gauss_newton_weighs_by_the_expected_scale():
    """S ← S + ρE[E[w | θ](Σ_i ∇ℓ_i∇ℓ_iᵀ + ∇²log q)], by hand at the same points; GGN has xᵀx for the sum."""
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (30, 2))
    y = x @ jnp.array([1.0, -1.0]) + jax.random.normal(keys[1], (30,))
    objective = blr.Objective(lambda f, y: 0.5 * jnp.sum((f - y) ** 2), output=lambda t, x: x @ t, size=30)

    def precision(curvature):
        how = rule(blr.StudentT, blr.Quadrature(3), 0.01, curvature)
        state, info = jax.jit(how.step)(objective, how.init(STUDENT), (x, y))
        assert info.finite
        assert info.inside
        return state.q.precision

    @jax.jit
    @jax.vmap
    def by_hand(theta):
        slopes = jax.vmap(lambda x, y: (x @ theta - y) * x)(x, y)
        distance = (theta - PLACE) @ MATRIX @ (theta - PLACE)
        each = jnp.stack([slopes.T @ slopes, x.T @ x])
        return (DOF + distance) / DOF * (each + jax.hessian(STUDENT.log_prob)(theta))

    theta, weights = STUDENT.grid(3)
    squares, outputs = MATRIX + 0.01 * np.einsum("s,skij->kij", weights, by_hand(theta))
    close(precision(blr.GaussNewton()), squares)
    close(precision(blr.GeneralizedGaussNewton()), outputs)


@pytest.mark.extended
def test_guards():
    """A step far too long: a loss that curves the other way."""
    bump = lambda theta: -50 * jnp.sum(jnp.exp(-0.1 * theta**2))

    def after(q, guard):
        how = rule(type(q), blr.Quadrature(5), 1.0, guard=guard)
        return jax.jit(lambda state: how.step(bump, state))(how.init(q))

    state, info = after(blr.StudentT(jnp.full(1, 3.0), 1.0, 5.0), blr.Backtracking(monotone=True))
    assert info.guard
    assert 0 < info.fraction < 1
    assert state.q.inside()
    state, info = after(blr.SkewGaussian(jnp.full(1, 3.0), 1.0, 0.5), blr.Retraction())
    assert info.guard
    assert state.q.inside()


@pytest.mark.extended
def test_averaged_gradients_and_two_rates_and_a_file(tmp_path):
    start = blr.SkewGaussian({"a": jnp.zeros(()), "b": jnp.zeros((1, 1))}, 1.0, {"a": -0.5, "b": 0.3})
    target = lambda theta: log_rate(theta["a"]) + jnp.sum((theta["b"] - 1) ** 2)
    steps = blr.Steps(blr.Rates(0.3, 0.2), average=blr.GradientAverage(0.5))
    how = blr.Rule(blr.SkewGaussian, blr.MonteCarlo(8), blr.Hessian(), steps)
    fitted = blr.fit(how, target, start, steps=40, key=jax.random.key(0))
    assert fitted.q.inside()
    close(fitted.q.mean["b"], [[1.0]], 0.3)
    blr.save(tmp_path / "q", fitted.q)
    assert jax.tree.all(jax.tree.map(np.array_equal, blr.load(tmp_path / "q"), fitted.q))
    predicted = blr.predict(fitted.q, lambda t, x: t["a"] + x, jnp.zeros(3), key=jax.random.key(1), samples=8)
    assert predicted.shape == (3,)


def test_bare_parameters():
    how = blr.Rule(Start(blr.StudentT, 2.0, dof=4.0), blr.MonteCarlo(1), blr.Hessian(), blr.Steps(0.1))
    q = how.init({"w": jnp.ones((2, 2))}).q
    assert q.dof == 4.0
    close(q.precision, 2 * np.eye(4))
    with pytest.raises(ValueError, match="pass a member, with its dof"):
        rule(blr.StudentT, blr.MonteCarlo(1)).init(jnp.zeros(2))
    q = Start(blr.SkewGaussian, hyperparameters={"skew": 0.5}).start(jnp.zeros(2))
    close(q.skew, [0.5, 0.5])
    with pytest.raises(ValueError, match="pass a member, with its skew"):
        rule(blr.SkewGaussian, blr.MonteCarlo(1)).init(jnp.zeros(2))


def test_bad_members():
    for dof in (2.0, np.inf, jnp.array(4.0)):
        with pytest.raises(ValueError, match="above 2, where a Student-t has a covariance"):
            blr.StudentT(jnp.zeros(2), 1.0, dof)
    with pytest.raises(ValueError, match=r"use jax\.vmap"):
        blr.StudentT(jnp.zeros((3, 2)), jnp.broadcast_to(jnp.eye(2), (3, 2, 2)), 4.0)
    with pytest.raises(ValueError, match="The skew has shapes"):
        blr.SkewGaussian(jnp.zeros(2), 1.0, jnp.zeros(3))


@pytest.mark.parametrize("kind", [blr.StudentT, blr.SkewGaussian])
@pytest.mark.parametrize(
    ("points", "curvature", "more", "right"),
    [
        (blr.Delta(), blr.Hessian(), {}, r"MonteCarlo\(\) or Quadrature\(\)"),
        (blr.MonteCarlo(2), blr.Stein(), {}, r"use Hessian\(\)"),
        (blr.MonteCarlo(2), blr.SquaredGradient(), {}, r"use Hessian\(\)"),
        (blr.Exact(), blr.Gradient(), {}, "exponential family"),
        (blr.MonteCarlo(2), blr.Score(), {}, "exponential family"),
        (blr.Masks(), blr.Hessian(), {}, r"MonteCarlo\(\)"),
        (blr.MonteCarlo(2), blr.Hessian(), {"momentum": 0.9}, "GradientAverage"),
        (blr.MonteCarlo(2), blr.Hessian(), {"scaling": blr.Scaling()}, "DiagonalGaussian"),
    ],
)
def test_wrong_pairings(kind, points, curvature, more, right):
    with pytest.raises(ValueError, match=right):
        rule(kind, points, 0.1, curvature, **more)


def test_mirrored_pairs():
    point_set = blr.MonteCarlo(2, antithetic=True).at(STUDENT, jax.random.key(0))
    np.testing.assert_allclose(jnp.mean(point_set.theta, axis=0), STUDENT.mean, atol=1e-12)
    with pytest.raises(ValueError, match="mirror a symmetric q"):
        blr.MonteCarlo(2, antithetic=True).at(LEANING, jax.random.key(0))


@pytest.mark.extended
def test_wrong_points():
    how = rule(blr.SkewGaussian, blr.Quadrature(20))
    with pytest.raises(ValueError, match=r"in 5 dimensions has 20\^5 points. Use MonteCarlo\.$"):
        how.step(lambda t: jnp.sum(t**2), how.init(blr.SkewGaussian(jnp.zeros(4), 1.0, 1.0)))
    how = rule(blr.StudentT, blr.MonteCarlo(2))
    linear = blr.Objective(lambda f, y: jnp.sum((f - y) ** 2), output=lambda t, x: x @ t, size=3, linear=True)
    with pytest.raises(ValueError, match=r"leave linear=True out"):
        how.step(linear, how.init(STUDENT), (jnp.ones((3, 2)), jnp.ones(3)), jax.random.key(2))
    with pytest.raises(ValueError, match="member"):
        blr.Mixture([1, 1], [STUDENT, STUDENT])
