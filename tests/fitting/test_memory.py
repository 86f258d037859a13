"""How much memory a step takes: the state is updated in place, and no second copy of it is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting import loop

LAYERS, WIDTH, ROWS = 8, 96, 4
PARAMETERS = LAYERS * WIDTH**2


def problem():
    params = [0.1 * jnp.ones((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return blr.Objective(loss, size=64, regularizer=1.0), params, jnp.ones((ROWS, WIDTH), jnp.float32)


@pytest.mark.extended
@pytest.mark.parametrize(("rule", "most"), [(blr.ivon(1e-3), 2.4), (blr.adam(1e-3), 1.4)], ids=["ivon", "adam"])
def test_a_step_keeps_no_copy_of_its_state(rule, most):
    """Beside the state: the gradient, and for IVON the noise or the curvature, one copy each."""
    objective, params, batch = problem()
    state = rule.init(params, objective, horizon=100)  # The warm-up rescales the precision in place.
    step = lambda state, batch, key: rule.advance(objective, state, batch, key, strict=True)[:2]
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    size = params[0].dtype.itemsize * PARAMETERS
    assert memory.alias_size_in_bytes >= 0.99 * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < most * size


@pytest.mark.extended
def test_large_states_take_the_same_steps(monkeypatch):
    """Each by a program of its own, as a loop would keep copies; the numbers are those of the loop."""
    objective, params, batch = problem()
    data = jnp.tile(batch, (16, 1)) + jnp.arange(64.0, dtype=jnp.float32)[:, None] / 64
    options = {"steps": 7, "batch_size": 8, "key": jax.random.key(1)}
    looped = blr.fit(blr.ivon(1e-3), objective, params, data, **options)
    monkeypatch.setattr(loop, "_LARGE", 1)
    single = blr.fit(blr.ivon(1e-3), objective, params, data, **options)
    assert single.steps == looped.steps == 7
    for ours, theirs in zip(jax.tree.leaves(single.q), jax.tree.leaves(looped.q), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(single.trace["objective"], looped.trace["objective"], rtol=1e-4)
    np.testing.assert_array_equal(
        params[0], 0.1 * jnp.ones((WIDTH, WIDTH), jnp.float32)
    )  # The user's own are not donated.
