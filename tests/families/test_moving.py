"""A family moves in the coordinates it stores, and that is the rule in λ (and mirror descent in μ)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import bayesrule as blr
from bayesrule.families.gaussian.precision import Factored
from bayesrule.steps.step import Step

MATRIX = jnp.array([[1.3, 0.2, -0.1], [0.2, 2.0, 0.4], [-0.1, 0.4, 0.9]])


def tree(vector):
    return {"bias": vector[0], "slope": vector[1:]}


def diagonal_members():
    here = blr.DiagonalGaussian(tree(jnp.array([0.3, -1.2, 2.0])), tree(jnp.array([0.7, 2.0, 1.4])))
    before = blr.DiagonalGaussian(tree(jnp.array([0.1, -1.0, 1.5])), tree(jnp.array([0.5, 2.2, 1.1])))
    return here, before, tree(jnp.array([0.4, -0.3, 1.1])), tree(jnp.array([1.2, 0.1, 3.0]))


def full_members():
    here, before, gradient, _ = diagonal_members()
    root = jnp.array([[1.0, 0.0, 0.0], [0.3, 1.1, 0.0], [-0.2, 0.5, 0.8]])
    here = blr.Gaussian(here.mean, root @ root.T)
    return here, blr.Gaussian(before.mean, root.T @ root + jnp.eye(3)), gradient, MATRIX


def fixed_members():
    here, before, gradient, _ = diagonal_members()
    fixed = blr.FixedGaussian(here.mean, here.precision)
    return fixed, blr.FixedGaussian(before.mean, here.precision), gradient, None


MEMBERS = {"Gaussian": full_members, "DiagonalGaussian": diagonal_members, "FixedGaussian": fixed_members}


def close(first, second, tolerance=1e-12):
    assert type(first) is type(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@jax.jit
def both_ways(q, step):
    return q.moved(step), blr.ExponentialFamily.moved(q, step)


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.6])
@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.parametrize("family", MEMBERS)
def test_moving_in_mean_and_precision_is_moving_in_natural_parameters(family, momentum, temperature):
    """(m, S) arithmetic equals λ ← λ − ρ∇_μ[E_q ℓ̄ − τH] + γ(λ − λ_{t−1}), the base class's."""
    here, before, gradient, curvature = MEMBERS[family]()
    previous = None if momentum is None else before
    step = Step(gradient, curvature, 0.2, 0.2, temperature, momentum, previous)
    close(*both_ways(here, step))


def test_momentum_of_a_diagonal_gaussian_by_its_formula():
    """m' = m − (ρ/s')g + γ(s_{t−1}/s')(m_t − m_{t−1}), s' = (1−ρ)s + ρh + γ(s − s_{t−1}) (DESIGN)."""
    here, before, gradient, curvature = diagonal_members()
    rate, momentum = 0.2, 0.3
    moved = here.moved(Step(gradient, curvature, rate, rate, 1.0, momentum, before))
    for name in ("bias", "slope"):
        m, s, p, r = here.mean[name], here.precision[name], before.mean[name], before.precision[name]
        new = (1 - rate) * s + rate * curvature[name] + momentum * (s - r)
        mean = m - rate / new * gradient[name] + momentum * r / new * (m - p)
        np.testing.assert_allclose(moved.precision[name], new, rtol=1e-14)
        np.testing.assert_allclose(moved.mean[name], mean, rtol=1e-14)


@pytest.mark.extended
def test_a_fixed_gaussian_does_not_decay():
    """λ is the mean's part only and h carries −½θᵀSθ: at any temperature the step is m − ρS⁻¹g."""
    here, _, gradient, _ = fixed_members()
    for temperature in (0.0, 0.5, 1.0):
        moved = blr.ExponentialFamily.moved(here, Step(gradient, None, 0.2, 0.2, temperature))
        for name in ("bias", "slope"):
            expected = here.mean[name] - 0.2 * gradient[name] / here.precision[name]
            np.testing.assert_allclose(moved.mean[name], expected, rtol=1e-12)


# Losses as functions of μ, so that every gradient below is exact.


def gaussian_loss(expectation):
    mean, square = expectation
    target = jnp.array([[1.5, 0.3], [0.3, 0.8]])
    return 0.5 * jnp.sum(target * square) - jnp.array([0.7, -0.4]) @ mean + 0.1 * jnp.sum(jnp.cos(mean))


def gamma_loss(expectation):
    log, linear = expectation
    return 2.0 * linear - 1.5 * log + 0.3 * linear**2


def gaussian_of(x):
    root = jnp.array([[jnp.exp(x[2]), 0.0], [x[3], jnp.exp(x[4])]])
    return blr.Gaussian(x[:2], root @ root.T)


def gamma_of(x):
    return blr.Gamma.from_natural((jnp.exp(x[0]) - 1, -jnp.exp(x[1])))


MIRROR = {
    "Gaussian": (gaussian_of, jnp.array([0.4, -0.2, 0.1, 0.3, -0.2]), gaussian_loss),
    "Gamma": (gamma_of, jnp.array([0.8, 0.3]), gamma_loss),
}


def free(loss, q, temperature):
    return loss(q.expectation()) - temperature * q.entropy()


@pytest.mark.extended
@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("family", MIRROR)
def test_a_step_is_mirror_descent_in_expectation_parameters(family, temperature):
    """eq:md_mu, minimised numerically over the family: argmin ⟨∇_μL, μ⟩ + KL(q_μ ‖ q_t)/ρ."""
    member, start, loss = MIRROR[family]
    rate, here = 0.3, MIRROR[family][0](start)
    slope = here.natural_gradient(lambda q: free(loss, q, temperature))

    @jax.jit
    def objective(x):
        q = member(x)
        return here.inner(slope, q.expectation()) + q.kl(here) / rate

    actual = scipy.optimize.minimize(
        objective,
        start,
        jac=jax.jit(jax.grad(objective)),
        hess=jax.jit(jax.hessian(objective)),
        method="trust-exact",
        options={"gtol": 1e-11},
    )
    rule = blr.Rule(type(here), blr.Exact(), blr.Gradient(), blr.Steps(rate, temperature=temperature))
    state, info = rule.step(loss, rule.init(here))
    close(state.q.natural(), member(jnp.asarray(actual.x)).natural(), 1e-8)
    assert float(jnp.max(jnp.abs(jax.grad(objective)(actual.x)))) < 1e-8  # scipy did its part
    assert not info.guard


@pytest.mark.extended
@pytest.mark.parametrize("family", MIRROR)
def test_the_reverse_form_steps_in_expectation_parameters(family):
    """μ' = μ − ρ∇_λL: mirror descent in λ (end of section 2.2)."""
    member, start, loss = MIRROR[family]
    here, rate, temperature = member(start), 0.05, 0.7
    steps = blr.Steps(rate, temperature=temperature, reverse=True)
    rule = blr.Rule(type(here), blr.Exact(), blr.Gradient(), steps)
    state, _ = rule.step(loss, rule.init(here))
    slope = jax.grad(lambda natural: free(loss, here.with_natural(natural), temperature))(here.natural())
    expected = jax.tree.map(lambda m, g: m - rate * g, here.expectation(), here._symmetric(slope))
    close(state.q.expectation(), expected, 1e-11)


@pytest.mark.extended
@pytest.mark.parametrize("family", MIRROR)
def test_the_reverse_form_has_the_rules_fixed_point(family):
    """Both stop where ∇L = 0, in whichever coordinates they step."""
    member, start, loss = MIRROR[family]
    ends = []
    for reverse, rate in ((False, 0.3), (True, 0.1)):
        rule = blr.Rule(type(member(start)), blr.Exact(), blr.Gradient(), blr.Steps(rate, reverse=reverse))
        result = blr.fit(rule, loss, member(start), steps=3000, tolerance=1e-26)
        assert result.reason == "converged"
        ends.append(result.q)
    close(ends[0].natural(), ends[1].natural(), 1e-9)
    slope = ends[0].natural_gradient(lambda q: free(loss, q, 1.0))
    np.testing.assert_allclose(ends[0].coordinates(slope), 0.0, atol=1e-11)


@pytest.mark.extended
def test_momentum_in_the_reverse_form():
    """Natural momentum adds γ(μ − μ_{t−1}) when the step is in μ."""
    here, before, gradient, curvature = full_members()
    step = Step(gradient, curvature, 0.05, 0.05, 1.0, 0.2, before, reverse=True)
    plain = here.moved(dataclasses.replace(step, momentum=None, previous=None))
    push = jax.tree.map(lambda a, b: 0.2 * (a - b), here.expectation(), before.expectation())
    expected = jax.tree.map(jnp.add, plain.expectation(), push)
    close(here.moved(step).expectation(), expected, 1e-11)


# Low rank.


def low_rank_step(rank):
    keys = jax.random.split(jax.random.key(0), 3)
    size = 4
    rows = jax.random.normal(keys[0], (3, size))
    curvature = Factored(jnp.array([0.5, 0.1, 0.3, 0.2]), rows)
    q = blr.LowRankGaussian(jnp.arange(4.0), jnp.array([1.0, 2.0, 0.5, 1.5]), jax.random.normal(keys[1], (size, rank)))
    gradient = jax.random.normal(keys[2], (size,))
    dense = jnp.diag(curvature.diagonal) + rows.T @ rows
    here = blr.Gaussian(q.mean, q.precision)
    step = Step(gradient, curvature, 0.3, 0.2, 0.9)
    return q.moved(step), here.moved(dataclasses.replace(step, curvature=dense)), gradient


@pytest.mark.extended
def test_a_low_rank_gaussian_of_full_rank_moves_as_a_gaussian():
    """With as many columns as dimensions nothing is projected away."""
    moved, full, _ = low_rank_step(4)
    np.testing.assert_allclose(moved.precision, full.precision, atol=1e-12)
    np.testing.assert_allclose(moved.mean, full.mean, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_low_rank_gaussian_keeps_the_diagonal_of_the_precision(rank):
    """The projection drops correlations only, and the mean moves by the precision that was kept."""
    moved, full, gradient = low_rank_step(rank)
    np.testing.assert_allclose(jnp.diag(moved.precision), jnp.diag(full.precision), rtol=1e-13)
    assert moved.factor.shape == (4, rank)
    assert float(jnp.max(jnp.abs(moved.precision - full.precision))) > 1e-3
    push = jnp.linalg.solve(moved.precision, 0.3 * gradient)
    np.testing.assert_allclose(moved.mean, jnp.arange(4.0) - push, atol=1e-12)


def test_a_low_rank_gaussian_keeps_the_largest_directions():
    """The columns kept are the leading eigenvectors of the new S without its diagonal part."""
    rows = jnp.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    q = blr.LowRankGaussian(jnp.zeros(3), 1.0, jnp.zeros((3, 1)))
    moved = q.moved(Step(jnp.zeros(3), Factored(jnp.zeros(3), rows), 1.0, 1.0, 1.0))
    np.testing.assert_allclose(jnp.abs(moved.factor[:, 0]), [3.0, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(moved.diagonal, [0.0, 4.0, 1.0], atol=1e-12)


@pytest.mark.extended
def test_the_distance_of_a_product_keeps_its_digits():
    """In float32 λ·μ is 1e8 for means of 1e4, so that its differences say nothing of a step of 1e-2 deviations."""
    shift = 1 / 64  # exact in float32 beside 1e4

    def product(shift):
        single = lambda x: jnp.asarray(x, jnp.float32)
        block = lambda mean: blr.DiagonalGaussian(single(mean), single(jnp.full(np.shape(mean), 1 + shift)))
        mixture = blr.Mixture(jnp.ones(2), block([[1e4, shift], [1e4, shift]]), learnt=False)
        rate = blr.Gamma(single(2.0), single(3.0 + shift))
        return blr.Product({"a": block([1e4 + shift, -1e4]), "b": rate, "c": mixture})

    gaussian = 0.5 * shift**2 + 2 * 0.25 * shift**2  # ½ΔmᵀSΔm + ¼tr[(S⁻¹ΔS)²], in "a" and in each component of "c"
    gamma = 0.5 * shift * (2 / 3 - 2 / (3 + shift))  # ½ΔλΔμ
    np.testing.assert_allclose(product(0.0).distance(product(shift)), 2 * gaussian + gamma, rtol=1e-3)
