"""A piece of a user's own takes part in the check: what it needs, what it offers, with its own message."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.curvature.base import Pointwise
from bayesrule.curvature.hessian import Hessian
from bayesrule.points.base import Points, PointSet
from bayesrule.steps.guards import Guard, GuardedStep


class TwoPoints(Points):
    """The unscented points of one dimension, m ± 1/√s: exact for quadratics."""

    meaning: ClassVar[str] = "m ± one standard deviation"
    approximation: ClassVar[str] = "unscented"
    needs: ClassVar = (
        (lambda p: p.structure == "full", lambda p: f"TwoPoints() needs a Gaussian, not a {p.name}."),
        (
            lambda p: p.member is None or p.member.noise_size == 1,
            "TwoPoints() are points of one dimension: use Quadrature() for more.",
        ),
    )

    def at(self, q, key):
        deviation = jnp.sqrt(q.covariance()[0])
        return PointSet(jnp.stack([q.mean - deviation, q.mean + deviation]), jnp.array([0.5, 0.5]))


class Doubled(Pointwise):
    """Twice the Hessian, which serves what the Hessian serves but wants a short step."""

    meaning: ClassVar[str] = "2∇²ℓ̄"
    serves: ClassVar[frozenset[str]] = frozenset({"full"})
    needs: ClassVar = ((lambda p: p.steps.temperature == 1, "Doubled() is for temperature 1: leave temperature= out."),)

    def at(self, objective, q, theta, batch, aux, key):
        measured = Hessian().at(objective, q, theta, batch, aux, key)
        return eqx.tree_at(lambda m: m.curvature, measured, 2 * measured.curvature)


class Half(Guard):
    """Takes half of every step."""

    needs: ClassVar = ((lambda p: p.points.delta, lambda p: f"Half() goes with Delta(), not with {p.points!r}."),)

    @property
    def meaning(self):
        return "half a step"

    def take(self, q, step, assess, limit):
        new = q.moved(step.shortened(0.5))
        return GuardedStep(new, jnp.asarray(0.5), jnp.zeros((), bool), jnp.all(new.inside()))


class Exponential(blr.ExponentialFamily):
    """q(θ) = r e^{−rθ}, with λ = −r."""

    parameter: jax.Array
    ranks = (0,)
    needs: ClassVar = (
        (lambda p: p.points.exact, lambda p: f"An {p.name} is moved in μ: use Exact() points, not {p.points!r}."),
    )

    def statistics(self, theta):
        return theta

    def log_partition(self, natural):
        return -jnp.log(-natural)

    def sample(self, key, shape=()):
        return jax.random.exponential(key, shape + self.parameter.shape) / -self.parameter


WRONG = {
    "points, of the family": lambda: blr.newton().replace(
        points=TwoPoints(), family=blr.DiagonalGaussian, curvature=blr.HessianDiagonal()
    ),
    "points, of the member": lambda: blr.newton().replace(points=TwoPoints()).init(jnp.zeros(2)),
    "curvature": lambda: blr.newton().replace(curvature=Doubled(), steps=blr.Steps(0.1, temperature=0.5)),
    "curvature, by what it serves": lambda: blr.newton().replace(curvature=Doubled(), family=blr.DiagonalGaussian),
    "guard": lambda: blr.von(0.1).replace(guard=Half()),
    "family": lambda: blr.Rule(Exponential, blr.MonteCarlo(4), blr.Score(), blr.Steps(0.1)),
}
MESSAGES = {
    "points, of the family": r"TwoPoints\(\) needs a Gaussian, not a DiagonalGaussian",
    "points, of the member": r"points of one dimension: use Quadrature\(\)",
    "curvature": r"Doubled\(\) is for temperature 1",
    "curvature, by what it serves": r"Doubled\(\) does not fill the precision of a DiagonalGaussian",
    "guard": r"Half\(\) goes with Delta\(\), not with MonteCarlo\(10, antithetic=True\)",
    "family": r"An Exponential is moved in μ: use Exact\(\) points, not MonteCarlo\(4\)",
}


@pytest.mark.parametrize("case", WRONG)
def test_an_own_piece_is_refused_with_its_own_message(case):
    with pytest.raises(ValueError, match=MESSAGES[case]):
        WRONG[case]()


@pytest.mark.extended
def test_own_points_and_curvature_run():
    """On a quadratic the two points see the exact expectation, so one step is the answer."""
    rule = blr.newton().replace(points=TwoPoints(), guard=blr.NoGuard())
    state, info = rule.step(lambda x: jnp.sum(2 * (x - 1) ** 2), rule.init(jnp.zeros(1)))
    np.testing.assert_allclose([state.q.mean[0], state.q.precision[0, 0]], [1, 4], rtol=1e-6)
    assert info.inside
    assert "TwoPoints()" in str(rule)
    doubled = blr.newton().replace(curvature=Doubled(), guard=blr.NoGuard())
    state, _ = doubled.step(lambda x: jnp.sum(2 * (x - 1) ** 2), doubled.init(jnp.zeros(1)))
    np.testing.assert_allclose([state.q.mean[0], state.q.precision[0, 0]], [0.5, 8], rtol=1e-6)
    assert blr.difference(rule, doubled).pieces == ("points", "curvature")


def test_an_own_guard_runs_in_a_fit():
    result = blr.fit(blr.newton().replace(guard=Half()), lambda x: jnp.sum((x - 1) ** 2), jnp.zeros(1), steps=3)
    np.testing.assert_allclose(result.q.mean, [14 / 15], rtol=1e-6)  # S = 3/2, 7/4, 15/8 and m = 2/3, 6/7, 14/15
    np.testing.assert_allclose(result.trace["fraction"], 0.5)


def test_an_own_family_runs():
    """Exponential waiting times: the sum of the sites is the posterior's rate."""
    objective = blr.Objective(lambda mu, y: y * mu, size=3)
    rule = blr.conjugate()
    result = blr.fit(rule, objective, Exponential(jnp.array(-1.0)), jnp.array([1.0, 2.0, 0.5]), steps=1)
    np.testing.assert_allclose(result.q.parameter, -3.5, rtol=1e-6)


def test_a_family_with_natural_alone_is_refused():
    """The default from_natural would fill its fields with λ, and steps would lead elsewhere."""
    with pytest.raises(TypeError, match=r"Rate has natural\(\).*no from_natural"):

        class Rate(Exponential):
            def natural(self):
                return -self.parameter


def test_ranks_for_another_number_of_leaves_are_named():
    class TwoRanks(Exponential):
        ranks = (0, 0)

    with pytest.raises(ValueError, match=r"TwoRanks.ranks = \(0, 0\) has 2 numbers, and λ has 1"):
        TwoRanks(jnp.array(-2.0)).log_prob(1.0)
