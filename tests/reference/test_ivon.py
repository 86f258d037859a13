"""IVON comes out of the pieces: ivon-opt's trajectories, given its noise (`make_ivon.py` made the numbers)."""

from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.points.base import Points, PointSet

RECORDED = np.load(Path(__file__).parent / "data" / "ivon_opt.npz")
START = jnp.array([0.3, -0.4, 1.2, 0.0, -1.0, 2.0])


class Recorded(Points):
    """The points that ivon-opt drew."""

    deviations: jax.Array
    random: ClassVar[bool] = True

    def at(self, q, key):
        count = self.deviations.shape[0]
        return PointSet(q.mean + self.deviations, jnp.full(count, 1 / count))


def loss(theta, _):
    scale = jnp.array([0.5, 1.0, 2.0, 3.0, 0.1, 0.7])
    return jnp.sum(scale * jnp.cosh(theta - 0.5)) + 0.3 * jnp.sin(theta[0] * theta[1]) - 0.2 * theta[4] ** 2


# N, weight decay, and the recipe's own numbers; ess = N/temperature.
CASES = {
    "plain": (50, 0.02, blr.ivon(0.1, averaging=0.9, decay=0.99, curvature=0.7)),
    "cold": (100, 0.1, blr.ivon(0.05, averaging=0.8, decay=0.9, curvature=1.5, temperature=0.25)),
    "not rescaled": (50, 0.02, blr.ivon(0.05, averaging=0.9, decay=0.95, curvature=0.7, relative=False)),
    "two samples": (50, 0.02, blr.ivon(0.1, averaging=0.9, decay=0.95, curvature=0.7, samples=2)),
}


@pytest.mark.as_users
@pytest.mark.parametrize("name", CASES)
def test_same_trajectory(name):
    size, weight_decay, rule = CASES[name]
    objective = blr.Objective(loss, size=size, regularizer=size * weight_decay)

    def body(state, deviations):
        state, _ = rule.replace(points=Recorded(deviations)).step(objective, state, jnp.zeros((1, 1)))
        return state, state.q.mean

    start = rule.init(START, objective)
    state, means = jax.jit(lambda: jax.lax.scan(body, start, jnp.asarray(RECORDED[f"{name}/deviations"])))()
    np.testing.assert_allclose(means, RECORDED[f"{name}/means"], rtol=1e-10, atol=1e-10)
    temperature = rule.steps.temperature
    hessian = temperature * state.q.precision / size - weight_decay
    np.testing.assert_allclose(hessian, RECORDED[f"{name}/hessian"], rtol=1e-9)
