"""What every guard must satisfy: a good step is taken whole, a bad one is told, over the list in tests/cases.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.steps.guards import Guard
from bayesrule.steps.step import Step
from cases import GUARDS, public_subclasses

Q = blr.Gaussian(jnp.array([0.4, -0.6]), jnp.array([[3.0, 0.7], [0.7, 2.0]]))


def take(guard, curvature, rate):
    """A step on a loss that is 0 everywhere, so that only Ω is in the way."""
    step = Step(jnp.ones(2), curvature, rate, rate, 1.0)
    return jax.jit(lambda: guard.take(Q, step, lambda q: (jnp.zeros(()), None), jnp.zeros(())))()


def test_every_public_guard_is_listed():
    assert {type(guard).__name__ for guard in GUARDS.values()} == public_subclasses(Guard)


@pytest.mark.parametrize("name", GUARDS)
def test_a_step_inside_is_taken_whole(name):
    guarded = take(GUARDS[name], 4.0 * jnp.eye(2), 0.1)
    assert guarded.inside
    assert not guarded.acted
    assert guarded.fraction == 1
    precision = Q.precision + 0.1 * (4.0 * jnp.eye(2) - Q.precision)
    # To second order in the rate for a step on the manifold.
    np.testing.assert_allclose(guarded.q.precision, precision, atol=0.02 if name == "Retraction" else 1e-12)


@pytest.mark.parametrize("name", [name for name, guard in GUARDS.items() if guard.always_inside and name != "Boundary"])
def test_a_step_outside_is_told_and_ends_inside(name):
    guarded = take(GUARDS[name], -40.0 * jnp.eye(2), 0.5)
    assert guarded.acted
    assert guarded.inside
    assert np.all(np.linalg.eigvalsh(guarded.q.precision) > 0)


@pytest.mark.parametrize("name", GUARDS)
def test_it_says_what_it_means(name):
    assert GUARDS[name].meaning
    assert GUARDS[name] == GUARDS[name]
