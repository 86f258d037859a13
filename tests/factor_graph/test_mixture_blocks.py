"""A mixture as a block of a model, moved by `cvi`: two modes where f² was observed, against integrals on a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import gamma, norm

import bayesrule as blr

Y = np.array([2.1, 1.7, 2.3])
GRID = np.linspace(-6, 6, 4001)
PRIOR = blr.Gaussian(jnp.array([0.2]), jnp.array([[0.5]]))


def square(f, y):
    """log N(y | f², 0.8²) for each row."""
    return jax.scipy.stats.norm.logpdf(y, f[0] ** 2, 0.8)


def model(start, points=None, prior=PRIOR, **more):
    points = blr.Quadrature(24) if points is None else points
    factors = {"prior": blr.factors.prior("f", prior), "y": blr.Factor(square, "f", data="y", points=points)}
    return blr.Model({"f": start}, factors | more)


def mixture(means=(-1.0, 1.2), precision=4.0, weights=(1, 1), **options):
    members = [blr.Gaussian(jnp.array([m]), jnp.array([[precision]])) for m in means]
    return blr.Mixture(list(weights), members, **options)


def exact():
    """The log-evidence and the posterior density on the grid."""
    log_joint = norm.logpdf(GRID, 0.2, np.sqrt(2)) + norm.logpdf(Y[:, None], GRID**2, 0.8).sum(0)
    top = log_joint.max()
    mass = np.trapezoid(np.exp(log_joint - top), GRID)
    return top + np.log(mass), np.exp(log_joint - top) / mass


def divergence(q, density):
    """KL(q ‖ posterior) on the grid."""
    log_q = np.asarray(q.log_prob(jnp.asarray(GRID)[:, None]))
    return np.trapezoid(np.exp(log_q) * (log_q - np.log(np.maximum(density, 1e-300))), GRID)


RULE = blr.cvi(0.3).replace(guard=blr.Backtracking(monotone=True))
DATA = {"y": jnp.asarray(Y)}


@pytest.fixture(scope="module")
def two_modes():
    return blr.fit(RULE, model(mixture()), None, DATA, steps=400, tolerance=1e-10)


@pytest.mark.extended
def test_two_modes(two_modes):
    """The bound is log p(y) − KL on the grid; the weights are those of the two modes, which the prior makes unequal."""
    result = two_modes
    assert result.reason == "converged"
    q, (evidence, density) = result.q["f"], exact()
    distance = divergence(q, density)
    np.testing.assert_allclose(result.bound, evidence - distance, atol=1e-6)
    left = np.trapezoid(np.where(GRID < 0, density, 0), GRID)
    assert abs(left - 0.5) > 0.05
    ours = np.trapezoid(np.where(GRID < 0, np.exp(np.asarray(q.log_prob(jnp.asarray(GRID)[:, None]))), 0), GRID)
    np.testing.assert_allclose(ours, left, atol=0.005)
    single = blr.fit(RULE, model(blr.Gaussian(jnp.ones(1), 4 * jnp.eye(1))), None, DATA, steps=400, tolerance=1e-8)
    alone = divergence(single.q["f"], density)
    assert distance < 0.03
    assert alone > 20 * distance


@pytest.mark.extended
def test_it_is_a_maximum_of_the_bound(two_modes):
    """Finite differences of the bound, integrated on the grid, in the weights, means and precisions of q."""
    q = two_modes.q["f"]
    density = exact()[1]

    def at(logit, means, logs):
        members = blr.Gaussian(jnp.asarray(means)[:, None], jnp.exp(jnp.asarray(logs))[:, None, None])
        return divergence(blr.Mixture(jnp.exp(jnp.array([logit, 0.0])), members), density)

    logit = float(q.choice.natural()[0])
    point = np.r_[logit, np.ravel(q.components.mean), np.log(np.ravel(q.components.precision))]
    value = lambda x: at(x[0], x[1:3], x[3:5])
    for i in range(5):
        step = 1e-3 * np.eye(5)[i]
        slope = (value(point + step) - value(point - step)) / 2e-3
        curvature = (value(point + step) + value(point - step) - 2 * value(point)) / 1e-6
        assert abs(slope) < 1e-4
        assert curvature > 0


@pytest.mark.extended
def test_a_step_is_that_of_a_mixture_by_itself():
    """The same loss as a plain function of θ, whose components move by `step_components`."""
    start = mixture(means=(-0.4, 0.5), precision=2.0, weights=(1, 2))
    rule = blr.newton(0.1).replace(
        family=blr.Mixture, points=blr.Quadrature(64), curvature=blr.Stein(), guard=blr.NoGuard()
    )

    def loss(f):
        return -jnp.sum(jax.vmap(lambda y: square(f, y))(DATA["y"])) - PRIOR.log_prob(f)

    theirs, _ = jax.jit(lambda state: rule.step(loss, state))(rule.init(start))
    cvi = blr.cvi(0.1)
    objective = model(start, blr.Quadrature(64))
    ours, _ = jax.jit(lambda state: cvi.step(objective, state, DATA))(cvi.init(None, objective))
    for a, b in zip(jax.tree.leaves(ours.q["f"]), jax.tree.leaves(theirs.q), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7)  # as far as 64 nodes integrate log r_k


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_one_component_is_the_plain_block(kind):
    if kind == "full":
        plain, prior = blr.Gaussian(jnp.array([1.0]), jnp.array([[4.0]])), PRIOR
    else:
        plain, prior = blr.DiagonalGaussian(jnp.array([1.0]), 4.0), blr.DiagonalGaussian(jnp.array([0.2]), 0.5)
    one = blr.fit(RULE, model(blr.Mixture([1.0], [plain]), prior=prior), None, DATA, steps=30)
    other = blr.fit(RULE, model(plain, prior=prior), None, DATA, steps=30)
    np.testing.assert_allclose(one.q["f"].component(0).mean, other.q["f"].mean, rtol=1e-10)
    np.testing.assert_allclose(one.q["f"].component(0).precision, other.q["f"].precision, rtol=1e-10)
    np.testing.assert_allclose(one.bound, other.bound, rtol=1e-10)


@pytest.mark.extended
def test_conjugate_factors_and_a_second_block():
    """y = f² + noise of unknown precision t, and a Gaussian observation of f itself; the joint is on a grid of both."""
    t_prior = blr.Gamma(3.0, 2.0)
    noisy = blr.Factor(
        lambda f, mu, y: 0.5 * (mu[0] - jnp.log(2 * jnp.pi) - mu[1] * (y - f[0] ** 2) ** 2),
        "f",
        "t",
        data="y",
        points={"f": blr.Quadrature(24)},
    )
    factors = {
        "prior": blr.factors.prior("f", PRIOR),
        "noise": blr.factors.prior("t", t_prior),
        "y": noisy,
        "x": blr.Factor(
            lambda view, x: -0.5 * ((x - view.mean[0]) ** 2 + view.variance[0]) * 0.1, "f", data="x", of="view"
        ),
    }
    two = blr.Model({"f": mixture(), "t": t_prior}, factors)
    data = {"y": jnp.asarray(Y), "x": jnp.array([0.5, -0.1, 0.3])}
    result = blr.fit(RULE, two, None, data, steps=500, tolerance=1e-9)
    assert result.reason == "converged"
    swept = blr.fit(blr.ncvmp(0.5), two, None, data, steps=500, tolerance=1e-9)
    np.testing.assert_allclose(swept.bound, result.bound, atol=1e-5)
    # The bound, term by term on grids of f and t.
    f, t = GRID, np.linspace(1e-4, 40, 20001)
    q_f = np.exp(np.asarray(result.q["f"].log_prob(jnp.asarray(f)[:, None])))
    q_t = gamma.pdf(t, float(result.q["t"].shape), scale=1 / float(result.q["t"].rate))
    over_f = lambda values: np.trapezoid(q_f * values, f)
    over_t = lambda values: np.trapezoid(q_t * values, t)
    squares = sum(over_f((y - f**2) ** 2) for y in Y)
    bound = over_f(norm.logpdf(f, 0.2, np.sqrt(2))) + over_t(gamma.logpdf(t, 3.0, scale=0.5))
    bound += 0.5 * (3 * over_t(np.log(t)) - 3 * np.log(2 * np.pi) - over_t(t) * squares)
    bound -= 0.05 * sum(over_f((x - f) ** 2) for x in data["x"])
    bound -= over_f(np.log(np.maximum(q_f, 1e-300))) + over_t(np.log(np.maximum(q_t, 1e-300)))
    np.testing.assert_allclose(result.bound, bound, atol=1e-5)
    # q(t) is Bayes' rule given q(f): shape 3 + 3/2, rate 2 + Σ E(y − f²)²/2.
    np.testing.assert_allclose(result.q["t"].shape, 4.5, rtol=1e-4)
    np.testing.assert_allclose(result.q["t"].rate, 2 + squares / 2, rtol=1e-3)


@pytest.mark.extended
def test_two_dimensions():
    """A ring in two dimensions, seen from two sides: KL of a mixture of three on a grid is far below one Gaussian's."""
    axis = np.linspace(-4, 4, 201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    prior = blr.Gaussian(jnp.zeros(2), 0.3 * jnp.eye(2))
    ring = blr.Factor(
        lambda f, y: jax.scipy.stats.norm.logpdf(y, jnp.sum(f**2), 0.7), "f", data="y", points=blr.Quadrature(12)
    )
    means = [[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]]
    start = blr.Mixture([1, 1, 1], [blr.Gaussian(jnp.array(m), 3 * jnp.eye(2)) for m in means])
    log_joint = norm.logpdf(4.0, np.sum(grid**2, 1), 0.7) + np.asarray(prior.log_prob(jnp.asarray(grid)))
    area = (axis[1] - axis[0]) ** 2
    evidence = np.log(np.exp(log_joint).sum() * area)
    bounds = []
    for q in (start, start.component(0)):
        ringed = blr.Model({"f": q}, {"prior": blr.factors.prior("f", prior), "y": ring})
        result = blr.fit(RULE, ringed, None, {"y": jnp.array([4.0])}, steps=300, tolerance=1e-7)
        log_q = np.asarray(result.q["f"].log_prob(jnp.asarray(grid)))
        distance = np.sum(np.exp(log_q) * (log_q - log_joint)) * area + evidence
        np.testing.assert_allclose(result.bound, evidence - distance, atol=2e-3)
        bounds.append(distance)
    assert bounds[0] < bounds[1] - 0.8


def test_weights_that_are_not_learnt_stay():
    result = blr.fit(RULE, model(mixture(learnt=False)), None, DATA, steps=50)
    np.testing.assert_allclose(result.q["f"].weights, 0.5, rtol=1e-12)


@pytest.mark.extended
def test_a_saved_result(tmp_path, two_modes):
    result = two_modes
    result.save(tmp_path / "file.npz")
    loaded = blr.load(tmp_path / "file.npz")
    np.testing.assert_array_equal(loaded.q["f"].weights, result.q["f"].weights)
    np.testing.assert_array_equal(loaded.q["f"].components.mean, result.q["f"].components.mean)


REFUSED = {
    "one block for all rows": lambda: blr.Model(
        {}, {"y": blr.Factor(square, "f", data="y", points=blr.Quadrature(5))}, local={"f": mixture()}
    ),
    "mixture of Gammas": lambda: model(blr.Mixture([1, 1], [blr.Gamma(1.0, 1.0), blr.Gamma(2.0, 1.0)])),
    "plain steps at temperature 1": lambda: blr.fit(blr.cvi(0.1, sites=True), model(mixture()), None, DATA, steps=1),
    "its message, which would": lambda: blr.leave_one_out(model(mixture()), blr.Product({"f": mixture()}), DATA, "y"),
    "no closed form for its mode": lambda: blr.fit(blr.em(), model(mixture()), None, DATA, steps=1),
    "next piece's prior": lambda: model(mixture()).after(blr.Product({"f": mixture()})),
}


@pytest.mark.parametrize("message", REFUSED)
def test_it_refuses(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
