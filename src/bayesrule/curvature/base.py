"""The interface of a curvature: what is measured at the points, and how the measurement is averaged."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Float

from ..families.base import HasStructure, Served
from ..families.gaussian.precision import SharedFeatures
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from ..objectives.objective import Objective
from ..points.base import Points
from ..steps.needs import Need
from .average import average_over_points, measure_in_parts, measure_parts_at_points
from .linear_outputs import OutputPoints, sum_over_rows
from .measurement import Measurement

_MOST_NUMBERS = 2**20  # in an array of outputs at all points: eight megabytes in double precision, which a cache holds


class Curvature(eqx.Module, Generic[Served]):
    """What is measured of the loss: its gradient always, and an approximation of its Hessian for most Gaussians.

    To write your own, derive from `Pointwise` if it is measured at one θ at a time, else from this class and implement
    `measure`. Set `serves`, so that the rule can be checked when it is built, and `meaning`, which is printed.
    """

    serves: ClassVar[frozenset[str]] = frozenset()
    """The names of the structures of precision (`Structure.name`) that its curvature can fill; "none" where it measures
    the gradient alone. Empty for a measurement in μ, which takes an exponential family instead."""
    approximation: ClassVar[str] = ""
    """How Table 1 names what it does to the natural gradient; empty if it is exact."""
    meaning: ClassVar[str] = ""
    """The line beside it in a printed rule."""
    slack: ClassVar[float] = 0.0
    """The nats by which a good step may seem to worsen the loss, because the average over a finite number of points of
    what is measured is not quite the derivative of the average loss at those points. A guard allows that much."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it needs of the other pieces of a rule."""
    differentiates: ClassVar[bool] = True
    """Whether it needs derivatives of the loss in θ."""
    gaussian_identity: ClassVar[bool] = False
    """Whether it rests on an identity that holds for a Gaussian q only."""
    nonnegative: ClassVar[bool] = False
    """Whether the curvature of every batch is nonnegative, as sums of squares are. `Steps(measured=True)` starts a
    precision from it if so, else from the squared gradients of the first batches."""
    in_mu: ClassVar[bool] = False
    """Whether it can differentiate an objective that is a function of μ, with `Exact` points."""
    in_lambda: ClassVar[bool] = False
    """Whether it measures a derivative in λ and solves with the Fisher information, for any exponential family."""
    remembers: ClassVar[bool] = False
    """Whether a measurement on all of the data depends on earlier ones through `aux`. Then the guard's measurement at a
    new q cannot serve as the next step's."""

    @abstractmethod
    def measure(
        self, objective: AbstractObjective, q: Served, points: Points, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        """Measure E_q ℓ and its derivatives, for the data's part of the objective.

        Called once in every step (for a mixture, once for each component), and by guards at the q that they consider.
        The regularizer is not to be measured: the rule adds its exact derivatives.

        Args:
            objective: What is measured.
            q: The member at which to measure: a Gaussian with a structure that this `serves`, or an exponential family.
            points: Where the loss is evaluated; `points.at(q, key)` or `points.outputs(…)`.
            batch: The examples, or None for a plain function.
            aux: What the state carries along.
            key: A key if the points or the loss are random (see `split_key`), else None.

        Returns:
            The measurement, in the terms that `q.moved` takes.
        """

    from_gradients: ClassVar[bool] = False
    """Whether all that it measures can be computed from the gradient of the mean loss over a batch (`of_gradient`), so
    that the gradient may be taken elsewhere (`Rule.update`)."""

    additive: ClassVar[bool] = False
    """Whether the measurement at θ is a sum over examples, so that a batch may be measured in `Microbatches`, and each
    part of it at another θ (`ShardSamples`)."""

    squares_gradient: ClassVar[bool] = False
    """Whether it is the square of the batch's gradient, which is shaped with it (`Steps(shaping=…)`)."""

    def of_gradient(self, q: Served, theta: PyTree, gradient: PyTree, size: Any) -> Any:
        """The curvature at θ, as far as a gradient tells; called only if `from_gradients`.

        Args:
            q: The member that θ was drawn from.
            theta: One point.
            gradient: ∇ℓ there, of the sum over N examples.
            size: N.
        """
        raise ValueError(
            f"{type(self).__name__} measures more than the gradient of a batch, so it needs the loss itself: use "
            "rule.step(objective, …). Recipes that work from gradients alone are sgd, rmsprop, adam, adamw, ivon, "
            "Vadam (adam at MonteCarlo points), dropout, straight_through and bayesbinn."
        )

    def initial_aux(self, objective: AbstractObjective | None, q: Served) -> PyTree:
        """What the state carries before the first step: by default the objective's own aux. Called by `rule.init`."""
        return None if objective is None else objective.aux

    def updated_aux(self, objective: AbstractObjective, before: PyTree, measured: PyTree, rate: Any) -> PyTree:
        """What the state carries after a step.

        Args:
            objective: What was measured.
            before: What the state carried during the step.
            measured: The measurement's `aux`.
            rate: The part of the way that λ moved, ρ times what the guard left of it.

        Returns:
            By default the measurement's aux as it is.
        """
        return measured


def split_key(points: Points, objective: AbstractObjective, key: Key | None) -> tuple[Key | None, Key | None]:
    """Keys for the points and for the loss: a step's key is split where both are random, and goes to one where not."""
    if key is None:
        return None, None
    if points.random and objective.random:
        point_key, loss_key = jax.random.split(key)
        return point_key, loss_key
    return (key, None) if points.random else (None, key)


if TYPE_CHECKING:
    import typing_extensions

    StructuredQ = typing_extensions.TypeVar("StructuredQ", bound=HasStructure, contravariant=True, default=Any)
else:
    StructuredQ = TypeVar("StructuredQ", bound=HasStructure, contravariant=True)
"""The kind of q that a `Pointwise` curvature is written for."""


class Pointwise(Curvature[StructuredQ], Generic[StructuredQ]):
    """A curvature that is measured at one θ at a time, and averaged over the points."""

    slack: ClassVar[float] = 1e-3
    additive: ClassVar[bool] = True

    reads_output_covariance: ClassVar[bool] = False
    """Whether `output_hessian` reads the outputs' covariance, `OutputPoints.covariance`."""

    @property
    def integrates_outputs(self) -> bool:
        """Whether, for outputs that are linear in θ, it is measured in the outputs' space: exact there, and cheaper."""
        return False

    @abstractmethod
    def at(
        self, objective: AbstractObjective, q: StructuredQ, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        """Measure at one θ.

        Called under `jax.vmap` for every point, or once where there is a single point.

        Args:
            objective, q, batch, aux: As in `measure`; the batch may be a part of the step's.
            theta: The point.
            key: A key for a random loss; every point gets the same one.

        Returns:
            The loss, its gradient in the shape of θ and a curvature in `q.structure`; `q.to_step_terms` then makes of
            them what the family's step takes.
        """

    def measure(
        self, objective: AbstractObjective, q: StructuredQ, points: Points, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        point_key, loss_key = split_key(points, objective, key)
        at = lambda theta, part, aux, key: self.at(objective, q, theta, part, aux, key)
        if points.parts_of_batch > 1:
            return measure_parts_at_points(at, q, points, batch, aux, (point_key, loss_key))
        if self.integrates_outputs and objective.has_linear_outputs:
            return self._measure_outputs(objective.separable(type(self).__name__), q, points, batch, aux, point_key)
        if not self.additive:
            return average_over_points(lambda theta: at(theta, batch, aux, loss_key), q, points, point_key)
        in_parts = lambda theta: measure_in_parts(partial(at, theta), batch, aux, loss_key)
        return average_over_points(in_parts, q, points, point_key)

    def _measure_outputs(
        self, objective: Objective, q: StructuredQ, points: Points, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        """Measure at points of every example's outputs f, which are Gaussian under q, instead of points of θ."""
        linear = objective.linearized(q.mean, batch, shared=q.structure.shares_features)
        examples, scales = objective.examples(linear)

        def of_rows(examples: PyTree, scales: Array, center: Array, jacobian: PyTree) -> Measurement:
            # XLA computes a covariance that is asked for twice twice: in a loop it does not merge equal triangular
            # solves.
            covariance = q.output_covariance(jacobian) if self.reads_output_covariance else None  # pyright: ignore[reportAttributeAccessIssue]  # Linear outputs are of a Gaussian q.
            known = {} if covariance is None else {"covariance": covariance}
            own_key = None if key is None else jax.random.clone(key)
            outputs, weights = points.outputs(q, center, jacobian, own_key, **known)
            at_points = OutputPoints.of(objective, q.mean, examples, scales, outputs, weights, jacobian, covariance)
            return at_points.to_measurement(q.structure, self.output_hessian(q, at_points, center), None)

        center, jacobian = linear.outputs(q.mean), linear.jacobian
        if not isinstance(jacobian, SharedFeatures):
            return dataclasses.replace(of_rows(examples, scales, center, jacobian), aux=aux)
        # Outputs that share their features may be many, and their points are then measured a part of the rows at a
        # time; what is measured is a sum over rows.
        numbers = jax.eval_shape(lambda: points.outputs(q, center, jacobian, key)[0]).size + center.size * (
            center.shape[1] if q.structure.couples_outputs else 1
        )
        from_features = lambda examples, scales, center, features: of_rows(
            examples, scales, center, SharedFeatures(features, jacobian.like)
        )
        rows = (examples, scales, center, jacobian.features)
        return dataclasses.replace(sum_over_rows(from_features, rows, -(-numbers // _MOST_NUMBERS)), aux=aux)

    def output_hessian(
        self, q: StructuredQ, points: OutputPoints, center: Float[Array, "B K"]
    ) -> Float[Array, "B K K"] | None:
        """Estimate E_q∇²_f ℓ in every example's outputs f. Called only if `integrates_outputs`.

        Args:
            q: The Gaussian.
            points: The outputs' points, and the loss and its gradient in f there.
            center: The outputs at the mean of q.

        Returns:
            A symmetric matrix for each example; None for the average of the loss's own Hessian.
        """
        return None
