"""Where the loss is evaluated, to stand for the expectation under q: points and their weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..families.base import Family, HasMean, Served
from ..families.gaussian.precision import SharedFeatures
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel
from ..steps.needs import Need
from .gaussian_outputs import as_gaussian, output_points


class PointSet(NamedTuple):
    """Values of θ and their weights: E_q f ≈ Σ_s w_s f(θ_s).

    `theta` is a pytree like θ whose leaves have a leading axis for the S points. `factors` says how each point moves
    with the family's parameters, for points that do not simply move with the mean (`Points.chained`): the family's
    `to_step_terms(gradient, curvature, theta, factors)` multiplies the derivatives at a point by its entry, which is
    the chain rule. What it holds is agreed between the points and the family: ∂θ/∂μ for `Relaxed`, the weights z/π₁ and
    slopes ∂z/∂π₁ of `Masks`. Its leaves have the same leading axis; None where the points have none.
    """

    theta: PyTree
    weights: Float[Array, " S"]
    factors: PyTree = None


class Points(eqx.Module, Generic[Served]):
    """Where the loss is evaluated, to stand for E_q.

    To write your own, implement `at`, and set `meaning`, which is printed, and `random` if it takes a key.
    """

    approximation: ClassVar[str] = ""
    """How Table 1 names what it does to the natural gradient; empty if it is exact."""
    meaning: ClassVar[str] = ""
    """The line beside it in a printed rule."""
    random: ClassVar[bool] = False
    """Whether the points are drawn, so that every step takes a key."""
    delta: ClassVar[bool] = False
    """Whether a Gaussian's variance is ignored: the delta method. The bound is then one to second order in θ − m."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What they need of the other pieces of a rule."""
    of_family: ClassVar[type[Family] | None] = None
    """The only family whose points these are; None for points of any family."""
    at_mean: ClassVar[bool] = False
    """Whether the only point is the mean of q."""
    exact: ClassVar[bool] = False
    """Whether there are no points, because the objective is E_q ℓ̄ as a function of μ."""
    draws: ClassVar[bool] = False
    """Whether the points are independent draws from q, differentiable in λ where the family's are."""
    surrogate: ClassVar[bool] = False
    """Whether the loss at the points is no estimate of E_q ℓ, because they are not distributed as q. A step then
    reports no bound (NaN); `result.bound` is judged at draws of q."""
    chained: ClassVar[bool] = False
    """Whether the points come with `factors`, for families whose step is not in terms of θ's own gradient."""

    @property
    def parts_of_batch(self) -> int:
        """Into how many parts a batch is divided, each measured at one of the points alone (`ShardSamples`)."""
        return 1

    @property
    def parts(self) -> int:
        """In how many parts the points are evaluated, one after another, to save memory; 1 is all at once."""
        return 1

    def fits(self, size: int) -> bool:
        """Whether the points over so many dimensions are few enough to be evaluated; only grids may be too large."""
        return True

    def part(self, q: Served, key: Key) -> PointSet:
        """The points of one part, whose weights sum to 1. Called `parts` times, each with a key of its own."""
        return self.at(q, key)

    @abstractmethod
    def at(self, q: Served, key: Key | None) -> PointSet:
        """Choose the points for this q.

        Called in every step (and by a guard at the q that it considers, with the same key), inside the compiled
        program: shapes must not depend on values.

        Args:
            q: A member of the rule's family.
            key: A key if `random`, else None.

        Returns:
            The points, with weights that sum to 1.
        """

    def outputs(
        self,
        q: Served,
        center: Float[Array, "B K"],
        jacobian: PyTree,
        key: Key | None,
        covariance: Float[Array, "B K K"] | None = None,
    ) -> tuple[Float[Array, "S B K"], Float[Array, " S"]]:
        """Choose points for outputs that are linear in θ, f = center + J(θ − m).

        Called instead of `at` for an `Objective(…, linear=True)` whose curvature can be measured in the outputs. By
        default the outputs at the points of θ; points that know the outputs' distribution, N(center, J S⁻¹Jᵀ), choose
        them in its few dimensions.

        Args:
            q: A Gaussian with mean m.
            center: Every example's outputs at m.
            jacobian: ∂f_b/∂θ for every example: leaves (B, K, *leaf), or `SharedFeatures`.
            key: As in `at`.
            covariance: J S⁻¹Jᵀ for every example, where the caller has it already.

        Returns:
            The outputs at the points, and the points' weights.
        """
        mean = as_gaussian(q).mean
        point_set = self.at(q, key)
        deviation = ravel(jax.tree.map(jnp.subtract, point_set.theta, mean), 1)
        if isinstance(jacobian, SharedFeatures):
            return center + jacobian.outputs(deviation), point_set.weights
        return center + jnp.einsum("bkp,sp->sbk", ravel(jacobian, 2), deviation), point_set.weights

    def output_noise(
        self, mean: Float[Array, "B *K"], key: Key | None
    ) -> tuple[Float[Array, "S ..."], Float[Array, " S"]]:
        """Choose the noise ε of points m + C^½ε of Gaussian outputs whose covariance C is known.

        Called by the linear factors of a model, which integrate over their own outputs. Points of θ alone have none.

        Args:
            mean: The outputs' means, (B,) or (B, K), for their shape and dtype.
            key: As in `at`.

        Returns:
            Noise as `gaussian_outputs.output_points` takes it, and the points' weights.
        """
        raise ValueError(
            f"{self!r} are points of θ, and this integral is over Gaussian outputs: use Quadrature(n), "
            "QuasiMonteCarlo(n), MonteCarlo(n) or Delta()."
        )

    def output_grid(
        self, mean: Float[Array, "B *K"], covariance: Float[Array, "B *KK"], key: Key | None
    ) -> tuple[Float[Array, "S B *K"], Float[Array, "S *B"]]:
        """Place the points of Gaussian outputs.

        Args:
            mean: The outputs' means, (B,) or (B, K).
            covariance: Their covariances, as `gaussian_outputs.output_points` takes them.
            key: As in `at`.

        Returns:
            The points, and their weights: the same for all rows, (S,), or for each row, (S, B).
        """
        noise, weights = self.output_noise(mean, key)
        return output_points(mean, covariance, noise), weights


class Delta(Points[HasMean]):
    """One point, the mean: E_q f(θ) ≈ f(m), the delta method (`app:delta`).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> points = blr.Delta().at(blr.Gaussian(jnp.array([1.0, 2.0]), jnp.eye(2)), None)
    >>> points.theta.tolist(), points.weights.tolist()
    ([[1.0, 2.0]], [1.0])
    """

    approximation: ClassVar[str] = "Delta method"
    meaning: ClassVar[str] = "E_q f(θ) ≈ f(m), the delta method (app:delta)"
    delta: ClassVar[bool] = True
    at_mean: ClassVar[bool] = True

    def at(self, q: HasMean, key: Key | None) -> PointSet:
        return PointSet(jax.tree.map(lambda m: m[None], q.mean), jnp.ones(1))

    def outputs(
        self, q: HasMean, center: Array, jacobian: PyTree, key: Key | None, covariance: Array | None = None
    ) -> tuple[Array, Array]:
        return center[None], jnp.ones(1)


class Exact(Points[Family]):
    """No points at all: the objective is already a function of μ, linear or not.

    >>> import bayesrule as blr
    >>> blr.vmp().points, blr.newton().points
    (Exact(), Delta())
    """

    meaning: ClassVar[str] = "none needed: the objective is E_q ℓ̄ as a function of μ"
    exact: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.curvature.in_mu,
            lambda p: (
                f"Exact() differentiates the objective in μ and has no points for {type(p.curvature).__name__}: use "
                "Gradient()."
            ),
        ),
    )

    def at(self, q: Family, key: Key | None) -> PointSet:
        raise ValueError(
            "Exact() has no points of θ, because it takes an objective that is a function of μ. For a function of θ "
            "use Delta(), Quadrature() or MonteCarlo()."
        )
