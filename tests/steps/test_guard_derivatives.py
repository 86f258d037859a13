"""Derivatives through guarded steps, reverse and forward, beside differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

RANDOM = np.random.default_rng(0)
X, Y = jnp.asarray(RANDOM.normal(size=(30, 3))), jnp.asarray((RANDOM.random(30) < 0.5).astype(float))
PRIOR = -3.0
RULES = {
    "monotone halvings": blr.newton(),
    "halvings": blr.von(0.9).replace(points=blr.Quadrature(3), guard=blr.Backtracking()),
    "retraction": blr.newton(0.3).replace(guard=blr.Retraction()),
}


def logistic(output, y):
    return jnp.logaddexp(0.0, output) - y * output


@pytest.mark.extended
@pytest.mark.parametrize("name", RULES)
def test_validation_loss_after_guarded_steps(name):
    """d/dη of a held-out loss after 4 steps, the first of which the monotone guard shortens."""
    rule = RULES[name]

    def held_out(log_prior):
        objective = blr.Objective(logistic, output=lambda w, x: x @ w, size=20, regularizer=jnp.exp(log_prior))
        start = rule.init(blr.Gaussian(jnp.array([9.0, -9.0, 9.0]), 0.02), objective)
        step = lambda state, _: rule.step(objective, state, (X[:20], Y[:20]))
        state, info = jax.lax.scan(step, start, None, length=4)
        return jnp.sum(jax.vmap(logistic)(X[20:] @ state.q.mean, Y[20:])) + jnp.trace(state.q.covariance()), info

    both = jax.jit(lambda h: (*jax.value_and_grad(held_out, has_aux=True)(h), jax.jacfwd(held_out, has_aux=True)(h)[0]))
    (_, info), reverse, forward = both(PRIOR)
    differences = (both(PRIOR + 1e-5)[0][0] - both(PRIOR - 1e-5)[0][0]) / 2e-5
    assert (info.fraction[0] < 1) == (name == "monotone halvings")
    np.testing.assert_allclose([reverse, forward], differences, rtol=1e-6)
    assert abs(reverse) > 1e-3
