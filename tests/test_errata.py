"""Where the printed paper slips (docs/errata.md): the derivation holds, and what is printed does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import bayesrule as blr

MEAN, PRECISION = np.array([0.7, -1.2]), np.array([[2.0, 0.6], [0.6, 1.5]])
RANDOM = np.random.default_rng(0)


def test_the_first_natural_parameter_of_a_gaussian_is_precision_times_mean():
    """log q(θ) − λ·T(θ) is the same for all θ, with SciPy's density; not so with m in place of Sm (`tab:EFsummary`)."""
    theta = RANDOM.normal(size=(6, 2))
    density = stats.multivariate_normal(MEAN, np.linalg.inv(PRECISION)).logpdf(theta)
    quadratic = -0.5 * np.einsum("ni,ij,nj->n", theta, PRECISION, theta)
    assert np.ptp(density - theta @ (PRECISION @ MEAN) - quadratic) < 1e-12
    assert np.ptp(density - theta @ MEAN - quadratic) > 0.1
    first = blr.Gaussian(jnp.asarray(MEAN), jnp.asarray(PRECISION)).natural()[0]
    np.testing.assert_allclose(first, PRECISION @ MEAN, rtol=1e-12)


def test_the_statistic_of_a_bernoulli_is_the_sign_itself():
    """P(θ) = exp(λθ − log 2cosh λ) for θ = ±1, and λ = ½ log p/(1 − p)."""
    p = 0.8
    natural, theta = 0.5 * np.log(p / (1 - p)), np.array([1.0, -1.0])
    np.testing.assert_allclose(np.exp(natural * theta - np.log(2 * np.cosh(natural))), [p, 1 - p], rtol=1e-12)
    q = blr.Bernoulli(jnp.asarray(natural))
    np.testing.assert_allclose(np.exp(q.log_prob(jnp.asarray(theta))), [p, 1 - p], rtol=1e-12)


def test_momentum_of_a_diagonal_gaussian():
    """The momentum in λ = (sm, −½s), written in m and s, is γ(s_{t−1}/s')(m_t − m_{t−1}) (`eq:don_momentum_1`)."""
    rate, momentum = 0.1, 0.3
    loss = lambda x: jnp.sum(jnp.cosh(x))
    steps = blr.Steps(rate, momentum=momentum)
    rule = blr.Rule(blr.DiagonalGaussian, blr.Delta(), blr.HessianDiagonal(), steps, blr.NoGuard())
    state = rule.init(blr.DiagonalGaussian(jnp.array([1.0, -0.5]), jnp.array([2.0, 3.0])))
    trail = [(state.q.mean, state.q.precision)]
    for _ in range(2):
        state, _ = rule.step(loss, state)
        trail.append((state.q.mean, state.q.precision))
    (m0, s0), (m1, s1), (m2, s2) = trail
    gradient, hessian = jnp.sinh(m1), jnp.cosh(m1)
    s = (1 - rate) * s1 + rate * hessian + momentum * (s1 - s0)
    np.testing.assert_allclose(s2, s, rtol=1e-12)
    np.testing.assert_allclose(m2, m1 - rate / s * gradient + momentum * s0 / s * (m1 - m0), rtol=1e-12)
    printed = m1 - rate / s * gradient + (s1 * m1 - s0 * m0) / s
    assert np.max(np.abs(printed - m2)) > 0.01


def test_the_hessian_of_a_mixture_at_a_mean():
    """`eq:mixexp_2nd_2` with A_jj, against derivatives of log q by JAX; with A_kk, which is zero there, it fails."""
    means = jnp.array([[0.0, 0.0], [1.5, 0.5], [-0.5, 2.0]])
    precisions = jnp.array([np.eye(2), PRECISION, [[1.0, -0.3], [-0.3, 0.8]]])
    weights, k = jnp.array([0.5, 0.3, 0.2]), 0

    def log_components(theta):
        apart = theta - means
        quadratic = jnp.einsum("ki,kij,kj->k", apart, precisions, apart)
        return jnp.log(weights) + 0.5 * jnp.linalg.slogdet(precisions)[1] - 0.5 * quadratic

    theta = means[k]
    share = jax.nn.softmax(log_components(theta))
    pulls = jnp.einsum("kij,kj->ki", precisions, means - theta)
    outer = lambda i, j: jnp.outer(pulls[i], pulls[j])
    others = [j for j in range(3) if j != k]
    crossed = lambda j: sum(share[i] * outer(i, j) for i in others)
    corrected, printed = (
        -share[k] * precisions[k] + sum(share[j] * (own(j) - precisions[j] - crossed(j)) for j in others)
        for own in (lambda j: outer(j, j), lambda j: outer(k, k))
    )
    exact = jax.hessian(lambda t: jax.nn.logsumexp(log_components(t)))(theta)
    np.testing.assert_allclose(corrected, exact, rtol=1e-10, atol=1e-12)
    assert np.max(np.abs(printed - exact)) > 0.1


def test_the_fixed_point_of_bayesbinn_is_against_the_gradient():
    """λ* = −s*∘∇ℓ: where the noise-free step at relaxation 1 stands still (`eq:bayes_learn_binn_final`)."""
    target = jnp.array([0.3, -0.8])
    gradient = lambda theta: theta - target
    natural = jnp.zeros(2)
    for _ in range(200):
        natural = 0.9 * natural - 0.1 * gradient(jnp.tanh(natural))  # s = 1
    np.testing.assert_allclose(natural, -gradient(jnp.tanh(natural)), rtol=1e-8)
    assert np.all(np.sign(natural) == np.sign(target))  # with the printed sign it would point away from the minimum


def test_straight_through_is_not_the_noise_free_limit():
    """The scale (1 − θ²)/(τ(1 − tanh²λ)) vanishes with the relaxation τ, and so would every step."""
    natural, scales = 0.5, []
    for relaxation in (1.0, 0.3, 0.1, 0.03):
        theta = np.tanh(natural / relaxation)
        scales.append((1 - theta**2) / (relaxation * (1 - np.tanh(natural) ** 2)))
    assert scales[0] == pytest.approx(1)
    assert scales[-1] < 1e-12


def test_the_entropies_of_gaussians():
    """½ log|2πe S⁻¹| and ½ P log σ + constant, with SciPy's; the print has −½ log|2πe S| and P log σ."""
    entropy = stats.multivariate_normal(MEAN, np.linalg.inv(PRECISION)).entropy()
    determinant = lambda matrix: np.linalg.slogdet(matrix)[1]
    np.testing.assert_allclose(entropy, 0.5 * determinant(2 * np.pi * np.e * np.linalg.inv(PRECISION)), rtol=1e-12)
    assert abs(entropy + 0.5 * determinant(2 * np.pi * np.e * PRECISION)) > 1
    q = blr.Gaussian(jnp.asarray(MEAN), jnp.asarray(PRECISION))
    np.testing.assert_allclose(q.entropy(), entropy, rtol=1e-12)
    wide, narrow = (stats.multivariate_normal(np.zeros(3), sigma * np.eye(3)).entropy() for sigma in (1.0, 0.1))
    np.testing.assert_allclose(narrow - wide, 0.5 * 3 * np.log(0.1), rtol=1e-12)


def test_the_base_measure_of_a_gaussian_with_fixed_precision():
    """2 log h = log|S| − P log 2π − θᵀSθ: with A = ½mᵀSm the density is SciPy's (section 4.1)."""
    theta = RANDOM.normal(size=2)
    twice_log_base = np.linalg.slogdet(PRECISION)[1] - 2 * np.log(2 * np.pi) - theta @ PRECISION @ theta
    density = 0.5 * twice_log_base + theta @ PRECISION @ MEAN - 0.5 * MEAN @ PRECISION @ MEAN
    np.testing.assert_allclose(
        density, stats.multivariate_normal(MEAN, np.linalg.inv(PRECISION)).logpdf(theta), rtol=1e-12
    )


def test_the_objective_of_the_delta_method_has_half_the_log_determinant():
    """ℓ̄(m) − H(q) of q = N(m, H⁻¹) changes by ½ log|H| − ½ log|H'| between two Hessians, not P times that."""
    one, other = (blr.Gaussian(jnp.zeros(2), jnp.asarray(scale * PRECISION)).entropy() for scale in (1.0, 5.0))
    np.testing.assert_allclose(one - other, 0.5 * np.linalg.slogdet(5.0 * np.eye(2))[1], rtol=1e-12)
