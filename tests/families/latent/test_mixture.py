"""Mixtures: the density and its derivatives, and the natural gradient of the joint q(θ, z)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import bayesrule as blr
from bayesrule.families.gaussian.precision import DIAGONAL, FULL

WEIGHTS = jnp.array([0.2, 0.5, 0.3])
MEANS = jnp.array([[0.5, -1.0], [1.5, 0.3], [-0.7, 0.9]])
PRECISIONS = jnp.stack([a * jnp.eye(2) + 0.3 for a in (1.0, 2.0, 0.6)])
POINT = jnp.array([0.3, -0.2])


def full():
    return blr.Mixture(WEIGHTS, blr.Gaussian(MEANS, PRECISIONS))


def diagonal():
    return blr.Mixture(WEIGHTS, blr.DiagonalGaussian(MEANS, jnp.abs(MEANS) + 0.5, batch_ndim=1))


def fixed():
    return blr.Mixture(WEIGHTS, [blr.FixedGaussian(mean, 1.7) for mean in MEANS])


def test_density_is_scipy_s():
    theta = np.random.default_rng(0).normal(size=(4, 3, 2))
    log_prob, responsibilities = jax.jit(lambda q, t: (q.log_prob(t), q.responsibilities(t)))(full(), theta)
    normals = [scipy.stats.multivariate_normal(m, np.linalg.inv(s)) for m, s in zip(MEANS, PRECISIONS, strict=True)]
    expected = np.log(sum(w * normal.pdf(theta) for w, normal in zip(WEIGHTS, normals, strict=True)))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-12)
    np.testing.assert_allclose(np.sum(responsibilities, axis=-1), np.ones((4, 3)), rtol=1e-14)


@pytest.mark.extended
def test_components_come_as_a_list_a_batch_or_a_stack():
    listed = blr.Mixture([2, 5, 3], [blr.Gaussian(m, s) for m, s in zip(MEANS, PRECISIONS, strict=True)])
    np.testing.assert_allclose(listed.log_prob(POINT), full().log_prob(POINT), rtol=1e-14)
    stacked = blr.Mixture(WEIGHTS, blr.DiagonalGaussian(MEANS, jnp.abs(MEANS) + 0.5))
    np.testing.assert_allclose(stacked.log_prob(POINT), diagonal().log_prob(POINT), rtol=1e-14)
    assert full().component(1).mean.tolist() == MEANS[1].tolist()


@pytest.mark.parametrize(
    ("weights", "components", "message"),
    [
        ([0.5, 0.5], [blr.Gaussian(jnp.zeros(1))], "2 components of one family"),
        ([1.0], [blr.Gamma(1.0, 1.0), blr.Gamma(2.0, 1.0)], "1 components"),
        ([1.0, 1.0], [blr.Gamma(1.0, 1.0), blr.Poisson(1.0)], "of one family"),
        ([1.0, 0.0], [blr.Gamma(1.0, 1.0)] * 2, "above 0"),
        ([1.0, float("nan")], [blr.Gamma(1.0, 1.0)] * 2, "above 0"),
        (jnp.ones((2, 2)), [blr.Gamma(1.0, 1.0)] * 2, "one weight for each"),
        ([1.0, 1.0], blr.Gaussian(jnp.zeros((3, 2)), jnp.ones((3, 1, 1)) * jnp.eye(2)), "leading axis of 2"),
        ([1.0], [full()], "exponential family"),
    ],
    ids=["too few", "too many", "kinds", "zero", "nan", "shape", "axis", "nested"],
)
def test_what_is_no_mixture(weights, components, message):
    with pytest.raises(ValueError, match=message):
        blr.Mixture(weights, components)


def test_samples_have_its_moments():
    q, count = full(), 40_000

    @jax.jit
    def drawn(q, key):
        theta = q.sample(key, (count,))
        return theta, q.mean, jnp.mean(q.responsibilities(theta), axis=0)

    theta, mean, share = map(np.asarray, drawn(q, jax.random.key(3)))
    deviation = (np.mean(theta, axis=0) - mean) / np.std(theta, axis=0) * np.sqrt(count)
    assert np.max(np.abs(deviation)) < 5
    assert np.max(np.abs(share - WEIGHTS)) < 5 * np.sqrt(0.25 / count)


@pytest.mark.parametrize("make", [full, diagonal, fixed])
def test_derivatives_of_the_density(make):
    """`eq:mixexp_1st` and `eq:mixexp_2nd` against automatic differentiation."""

    @jax.jit
    def derivatives(q, t):
        return (q.score(t), q.hessian(t)), (jax.grad(q.log_prob)(t), jax.hessian(q.log_prob)(t))

    for mine, theirs in zip(*derivatives(make(), POINT), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


@pytest.mark.extended
def test_derivatives_of_a_pytree_s_density():
    tree = {"a": MEANS[:, 0], "b": MEANS[:, 1:]}
    q, flat, theta = blr.Mixture(WEIGHTS, blr.Gaussian(tree, PRECISIONS)), full(), {"a": POINT[0], "b": POINT[1:]}
    np.testing.assert_allclose(q.score(theta)["b"], flat.score(POINT)[1:], atol=1e-14)
    np.testing.assert_allclose(q.hessian(theta), flat.hessian(POINT), atol=1e-14)


@pytest.mark.parametrize(("make", "structure"), [(full, FULL), (diagonal, DIAGONAL), (diagonal, FULL)])
@pytest.mark.parametrize("index", [0, 2])
def test_derivatives_of_a_responsibility(make, structure, index):
    repulsion = make().repulsion(jnp.asarray(index))
    value, gradient, curvature = jax.jit(lambda t: repulsion.at(t, structure))(POINT)
    known, slope, hessian = jax.jit(lambda t: (repulsion(t), jax.grad(repulsion)(t), jax.hessian(repulsion)(t)))(POINT)
    np.testing.assert_allclose(value, known, rtol=1e-14)
    np.testing.assert_allclose(gradient, slope, atol=1e-12)
    np.testing.assert_allclose(curvature, hessian if structure is FULL else np.diagonal(hessian), atol=1e-12)


def test_a_mixture_of_other_families_has_no_closed_derivatives():
    q = blr.Mixture([1, 1], [blr.Gamma(2.0, 1.0), blr.Gamma(5.0, 1.0)])
    with pytest.raises(ValueError, match="Gaussian components"):
        q.score(jnp.asarray(1.0))


def test_entropies():
    """H(q) and H(q(θ, z)) of a mixture in one dimension, against a fine grid."""
    q = blr.Mixture([1, 2], [blr.Gaussian(jnp.zeros(1)), blr.Gaussian(jnp.full(1, 2.5), 4.0)])
    grid = jnp.linspace(-12, 14, 20_001)[:, None]

    @jax.jit
    def on_the_grid(q):
        density, width, r = jnp.exp(q.log_prob(grid)), grid[1, 0] - grid[0, 0], q.responsibilities(grid)
        exact = -jnp.sum(density * q.log_prob(grid)) * width
        return exact, exact - jnp.sum(density[:, None] * jnp.where(r > 0, r * jnp.log(r), 0.0)) * width

    exact, joint = on_the_grid(q)
    entropies = jax.jit(lambda q: (q.entropy(), q.joint_entropy()))(q)
    assert abs(float(entropies[0] - exact)) < 0.03  # 2 × 4096 draws
    np.testing.assert_allclose(entropies[1], joint, atol=1e-9)


# The natural gradient of the joint: solved numerically, and taken by the rule.


def vector(q):
    """Log-odds of the weights, then each component's λ."""
    return jnp.concatenate([q.choice.natural(), jnp.ravel(q.each(lambda c: c.coordinates(c.natural())))])


def from_vector(q, x):
    natural = x[q.count - 1 :].reshape(q.count, -1)
    components = q.each(lambda c, n: c.with_natural(c.uncoordinates(n)), natural)
    return q.with_parts(components, q.choice.with_natural(x[: q.count - 1]))


@jax.jit
def joint_fisher(q, theta, cell):
    """∫ Σ_z q(θ, z) ∇log q(θ, z) ∇log q(θ, z)ᵀ dθ, over points that stand for cells of this size."""

    def log_joint(x):
        made = from_vector(q, x)
        return jax.vmap(made._joint)(theta)  # (points, K)

    mass = jnp.exp(log_joint(vector(q))) * cell
    slopes = jax.jacfwd(log_joint)(vector(q))
    return jnp.einsum("tk,tki,tkj->ij", mass, slopes, slopes)


def loss(theta):
    return jnp.sum(jnp.cos(2 * theta) + 0.3 * theta**2 + 0.1 * theta)


THETA = np.linspace(-14, 14, 6001)[:, None]
CELL = THETA[1, 0] - THETA[0, 0]


@jax.jit
@partial(jax.value_and_grad, argnums=1)
def free_energy_at(q, x, temperature):
    """E_q ℓ̄ + τ E_q log q on the grid, and its slope in x."""
    log_q = jax.vmap(from_vector(q, x).log_prob)(THETA)
    return jnp.sum(jnp.exp(log_q) * (jax.vmap(loss)(THETA) + temperature * log_q)) * CELL


@jax.jit
def taken(rule, q):
    """A step of the rule, what it tells if it is asked to diagnose, and the bound before."""
    state, info = rule.step(loss, rule.init(q))
    _, told, _ = rule.advance(loss, rule.init(q), diagnose=True)
    return vector(state.q), info, told, rule.bound(loss, q)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_a_step_is_the_natural_gradient_of_the_joint(kind):
    means = jnp.array([[-0.8], [0.9]])
    if kind == "full":
        q = blr.Mixture([0.4, 0.6], blr.Gaussian(means, jnp.array([[[2.0]], [[1.3]]])))
        curvature = blr.Hessian()
    else:
        q = blr.Mixture([0.4, 0.6], blr.DiagonalGaussian(means, jnp.array([[2.0], [1.3]]), batch_ndim=1))
        curvature = blr.HessianDiagonal()
    x = np.asarray(jax.jit(vector)(q))
    fisher = np.asarray(joint_fisher(q, THETA, CELL))
    # The Fisher of the joint is a block for the weights and one for each component.
    blocks = np.zeros_like(fisher)
    blocks[0, 0] = blocks[1:3, 1:3] = blocks[3:, 3:] = 1
    np.testing.assert_allclose(fisher * (1 - blocks), 0.0, atol=1e-10)
    for temperature in (1.0, 0.3):
        energy, slope = free_energy_at(q, x, temperature)
        natural = np.linalg.solve(fisher, slope)
        rule = blr.Rule(type(q.components), blr.Quadrature(90), curvature, blr.Steps(0.05, temperature=temperature))
        moved, info, told, bound = taken(rule.replace(family=blr.Mixture), q)
        np.testing.assert_allclose(moved, x - 0.05 * natural, atol=2e-8)
        assert bool(info.finite)
        assert bool(info.inside)
        # The decrement is ½⟨d, F d⟩, and the bound the free energy.
        np.testing.assert_allclose(told.decrement, 0.5 * natural @ fisher @ natural, rtol=1e-6)
        if temperature == 1:
            np.testing.assert_allclose(told.bound, -energy, atol=1e-8)
            np.testing.assert_allclose(bound, -energy, atol=1e-8)


@pytest.mark.extended
def test_fixed_weights_stay():
    q = blr.Mixture(WEIGHTS, full().components, learnt=False)
    rule = blr.newton().replace(family=blr.Mixture)
    state, _ = jax.jit(rule.step, static_argnums=0)(loss, rule.init(q))
    np.testing.assert_array_equal(state.q.weights, q.weights)
    assert jnp.max(jnp.abs(state.q.components.mean - q.components.mean)) > 1e-3


@pytest.mark.extended
def test_a_mixture_of_signs():
    """Any minimal exponential family: Bernoulli components, every expectation by enumeration."""
    q = blr.Mixture([0.3, 0.7], [blr.Bernoulli(jnp.array([0.2, -0.5])), blr.Bernoulli(jnp.array([-0.8, 0.4]))])
    values = jnp.array([0.3, -1.0, 0.7, 2.0])

    def energy(theta):
        return values[((theta[0] > 0) + 2 * (theta[1] > 0)).astype(int)]

    theta = q.component(0).support()

    def free_energy(x):
        made = from_vector(q, x)
        log_q = jax.vmap(made.log_prob)(theta)
        return jnp.sum(jnp.exp(log_q) * (jax.vmap(energy)(theta) + log_q))

    x = vector(q)
    natural = jnp.linalg.solve(joint_fisher(q, theta, 1.0), jax.jit(jax.grad(free_energy))(x))
    rule = blr.Rule(blr.Bernoulli, blr.Enumeration(), blr.Score(), blr.Steps(0.1)).replace(family=blr.Mixture)
    state, _ = jax.jit(rule.step, static_argnums=0)(energy, rule.init(q))
    np.testing.assert_allclose(vector(state.q), x - 0.1 * natural, atol=1e-12)
    # and it goes all the way down: four states, whose mixture of two products cannot be exact but must be close
    result = blr.fit(rule, energy, q, steps=300)
    exact = jax.nn.logsumexp(-values)
    assert exact - 0.02 < result.bound < exact + 1e-12


@pytest.mark.extended
def test_a_mixture_of_gammas():
    """Reparameterised draws: the mean of many steps against a grid, within its standard error."""
    q = blr.Mixture([0.5, 0.5], [blr.Gamma(3.0, 2.0), blr.Gamma(6.0, 1.5)])
    theta = jnp.linspace(1e-4, 30, 40_001)
    cell = theta[1] - theta[0]

    def energy(t):
        return (t - 2) ** 2 / 4

    def free_energy(x):
        log_q = jax.vmap(from_vector(q, x).log_prob)(theta)
        return jnp.sum(jnp.exp(log_q) * (jax.vmap(energy)(theta) + log_q)) * cell

    x = vector(q)
    natural = jnp.linalg.solve(joint_fisher(q, theta, cell), jax.jit(jax.grad(free_energy))(x))
    rule = blr.Rule(blr.Gamma, blr.MonteCarlo(200), blr.Reparameterized(), blr.Steps(0.01)).replace(family=blr.Mixture)
    state = rule.init(q)
    one = jax.jit(jax.vmap(lambda key: vector(rule.step(energy, state, key=key)[0].q)))
    moved = one(jax.random.split(jax.random.key(0), 60))
    steps = (x - moved) / 0.01
    error = jnp.std(steps, axis=0) / np.sqrt(60)
    assert jnp.max(jnp.abs(jnp.mean(steps, axis=0) - natural) / error) < 5


def test_pruning():
    q = blr.Mixture([0.6, 1e-5, 0.4], full().components)
    kept = q.pruned()
    np.testing.assert_allclose(kept.weights, [0.6, 0.4], rtol=1e-4)
    assert kept.components.mean.tolist() == MEANS[jnp.array([0, 2])].tolist()
    with pytest.raises(ValueError, match="No component"):
        q.pruned(0.9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": blr.Steps(0.1, momentum=0.5)}, "GradientAverage"),
        ({"points": blr.Exact(), "curvature": blr.Gradient()}, "no closed form"),
        ({"curvature": blr.HessianDiagonal()}, "Hessian"),
    ],
    ids=["momentum", "exact", "curvature"],
)
def test_what_does_not_go_with_a_mixture(change, message):
    with pytest.raises(ValueError, match=message):
        blr.newton().replace(family=blr.Mixture).replace(**change)


def test_factored_components_are_refused():
    with pytest.raises(ValueError, match="sum of squares"):
        blr.slang(0.1).replace(family=blr.Mixture)
