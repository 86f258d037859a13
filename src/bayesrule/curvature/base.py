"""The interface of a curvature: what is measured at the points, and how the measurement is averaged."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ..objectives.base import AbstractObjective
from ..points.base import Points
from .average import accumulated, averaged
from .linear_outputs import Outputs
from .measurement import Measurement


class Curvature(eqx.Module):
    """What is measured at each point; the average over the points stands for E_q."""

    serves: ClassVar[frozenset[str]] = frozenset()
    """The structures of precision that it can fill."""
    approximation: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    slack: ClassVar[float] = 0.0
    """The nats by which a good step may seem to worsen the loss, because what is measured at a finite
    number of points is not quite the derivative of the loss at those points."""

    remembers: ClassVar[bool] = False
    """Whether what it measured before is a part of what it measures now."""

    @abstractmethod
    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        """E_q ℓ and its derivatives, for the data's part of the objective."""

    def first(self, objective: Any, q: Any) -> PyTree:
        """What the state carries along before the first step: the objective's own."""
        return None if objective is None else objective.aux

    def carried(self, objective: Any, before: PyTree, seen: PyTree, rate: Any) -> PyTree:
        """What the state carries on after a step that moved λ by `rate` of the way."""
        return seen


def keys(points: Points, objective: AbstractObjective, key: Any) -> tuple[Any, Any]:
    """Keys for the points and for the loss, split only where both are random."""
    if key is None:
        return None, None
    if points.random and objective.random:
        first, second = jax.random.split(key)
        return first, second
    return (key, None) if points.random else (None, key)


class Pointwise(Curvature):
    """A curvature that is measured point by point."""

    slack: ClassVar[float] = 1e-3
    additive: ClassVar[bool] = True
    """Whether it is a sum over examples, so that a batch may be measured in parts."""

    @property
    def linear(self) -> bool:
        """Whether outputs that are linear in θ make it exact, and cheaper, in the outputs' space."""
        return False

    @abstractmethod
    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        """What is measured at one θ."""

    def measure(
        self, objective: AbstractObjective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        point_key, loss_key = keys(points, objective, key)
        if self.linear and objective.has_linear_outputs:
            objective = objective.separable(type(self).__name__)
            line = objective.linearized(q.mean, batch, shared=q.structure.shares_features)
            examples, scales = objective.examples(line)
            center = line.outputs(q.mean)
            outputs, weights = points.outputs(q, center, line.jacobian, point_key)
            seen = Outputs.at(objective, q.mean, examples, scales, outputs, weights, line.jacobian)
            return seen.measured(q.structure, self.middle(objective, q, seen, center), aux)
        at = lambda t, part, aux, k: self.at(objective, q, t, part, aux, k)
        if not self.additive:
            return averaged(lambda t: at(t, batch, aux, loss_key), q, points, point_key)
        return averaged(lambda t: accumulated(partial(at, t), batch, aux, loss_key), q, points, point_key)

    def middle(self, objective: AbstractObjective, q: Any, seen: Outputs, center: Array) -> Array | None:
        """E_q∇²_f ℓ for each example's outputs; None for the loss's own Hessian."""
        return None
