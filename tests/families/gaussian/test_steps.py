"""Steps of Gaussians against dense linear algebra: what a decrement is worth, and what a step keeps of a precision."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.families.gaussian.precision import Factored
from bayesrule.steps.step import Step

RANDOM = np.random.default_rng(3)
SIZE = 3


def divergence(q, other):
    """KL(q ‖ other) of two Gaussians, by NumPy."""
    means = [np.asarray(p.mean) for p in (q, other)]
    precisions = [np.linalg.inv(np.asarray(p.covariance())) for p in (q, other)]
    gap = means[0] - means[1]
    trace = np.trace(np.linalg.solve(precisions[0], precisions[1]))
    log_dets = [np.linalg.slogdet(s)[1] for s in precisions]
    return 0.5 * (trace - len(gap) + gap @ precisions[1] @ gap + log_dets[0] - log_dets[1])


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_the_decrement_is_the_divergence_of_a_short_step(family):
    """A step by a fraction ε moves q by ε² times the decrement, to leading order in ε."""
    gradient = jnp.asarray(RANDOM.normal(size=SIZE))
    if family == "full":
        root = RANDOM.normal(size=(2, SIZE, SIZE))
        matrices = root @ root.transpose(0, 2, 1) + np.eye(SIZE)
        q, curvature = blr.Gaussian(jnp.zeros(SIZE), jnp.asarray(matrices[0])), jnp.asarray(matrices[1])
    else:
        diagonals = RANDOM.uniform(0.5, 3, size=(2, SIZE))
        q, curvature = blr.DiagonalGaussian(jnp.zeros(SIZE), jnp.asarray(diagonals[0])), jnp.asarray(diagonals[1])
    step = lambda rate: Step(gradient, curvature, rate, rate, 1.0)
    short = 1e-4
    assert float(q.decrement(step(1.0))) == pytest.approx(divergence(q, q.moved(step(short))) / short**2, rel=2e-3)
    mean_only = Step(gradient, q.precision, 1.0, 1.0, 1.0)
    covariance = np.asarray(q.covariance())
    assert float(q.decrement(mean_only)) == pytest.approx(0.5 * gradient @ covariance @ gradient)


@pytest.mark.extended
def test_a_low_rank_step_keeps_the_diagonal_of_the_full_one():
    """What the leading directions leave out of (1 − ρ)S + ρH goes into the diagonal, as in SLANG."""
    q = blr.LowRankGaussian(
        jnp.zeros(SIZE), jnp.asarray(RANDOM.uniform(1, 2, SIZE)), jnp.asarray(RANDOM.normal(size=(SIZE, 1)))
    )
    rows, extra = RANDOM.normal(size=(4, SIZE)), RANDOM.uniform(0, 1, SIZE)
    step = Step(jnp.zeros(SIZE), Factored(jnp.asarray(extra), jnp.asarray(rows)), 0.3, 0.3, 1.0)
    full = 0.7 * np.asarray(q.precision) + 0.3 * (rows.T @ rows + np.diag(extra))
    assert_allclose(np.diag(np.asarray(q.moved(step).precision)), np.diag(full), rtol=1e-10)


def test_a_scaled_low_rank_precision_is_a_multiple():
    q = blr.LowRankGaussian(jnp.zeros(SIZE), jnp.ones(SIZE), jnp.asarray(RANDOM.normal(size=(SIZE, 2))))
    assert_allclose(q.with_scaled_precision(4.0).precision, 4 * np.asarray(q.precision), rtol=1e-12)


@pytest.mark.extended
def test_the_bound_of_newtons_steps_is_laplaces_evidence():
    """At the minimum log Z = −ℓ̄(m) + ½P log 2π − ½ log|H|, exact for a quadratic loss."""
    root = RANDOM.normal(size=(SIZE, SIZE))
    hessian = root @ root.T + np.eye(SIZE)
    loss = lambda x: 0.5 * (x - 1) @ jnp.asarray(hessian) @ (x - 1) + 2.0
    result = blr.fit(blr.newton(), loss, jnp.zeros(SIZE), steps=4, tolerance=1e-9)
    exact = -2 + 0.5 * SIZE * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(hessian)[1]
    assert float(result.trace["bound"][-1]) == pytest.approx(exact, abs=1e-8)
    assert result.bound == pytest.approx(exact, abs=1e-8)
