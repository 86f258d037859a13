"""What is measured at the points: the gradient, and whatever stands for the Hessian."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .families.structure import ravel
from .measured import Measured, accumulated, averaged
from .objective import Objective
from .outputs import Outputs
from .points import Exact, Points


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
    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        """E_q ℓ and its derivatives, for the data's part of the objective."""

    def first(self, objective: Any, q: Any) -> PyTree:
        """What the state carries along before the first step: the objective's own."""
        return None if objective is None else objective.aux

    def carried(self, objective: Any, before: PyTree, seen: PyTree, rate: Any) -> PyTree:
        """What the state carries on after a step that moved λ by `rate` of the way."""
        return seen


def keys(points: Points, objective: Objective, key: Any) -> tuple[Any, Any]:
    """Keys for the points and for the loss, split only where both are random."""
    if key is None:
        return None, None
    if points.random and objective.kind == "batch":
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
    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        """What is measured at one θ."""

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        point_key, loss_key = keys(points, objective, key)
        if self.linear and objective.linear:
            line = objective.linearized(q.mean, batch, full=q.structure.name == "full")
            examples, scales = objective.examples(line)
            center = line.outputs(q.mean)
            outputs, weights = points.outputs(q, center, line.jacobian, point_key)
            seen = Outputs.at(objective, q.mean, examples, scales, outputs, weights, line.jacobian)
            return seen.measured(q.structure, self.middle(objective, q, seen, center), aux)
        at = lambda t, part, aux, k: self.at(objective, q, t, part, aux, k)
        if not self.additive:
            return averaged(lambda t: at(t, batch, aux, loss_key), q, points, point_key)
        return averaged(lambda t: accumulated(partial(at, t), batch, aux, loss_key), q, points, point_key)

    def middle(self, objective: Objective, q: Any, seen: Outputs, center: Array) -> Array | None:
        """E_q∇²_f ℓ for each example's outputs; None for the loss's own Hessian."""
        return None


class Gradient(Curvature):
    """The gradient only: in θ for a Gaussian with fixed precision, in μ for `Exact` points."""

    serves: ClassVar[frozenset[str]] = frozenset({"none"})
    meaning: ClassVar[str] = "the gradient only"

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        if isinstance(points, Exact):
            here = jax.tree.map(jnp.zeros_like, q.expectation())
            at = lambda shift: objective.expected(q, shift, batch, aux, key)
            (value, aux), slope = jax.value_and_grad(at, has_aux=True)(here)
            gradient, curvature = q.derivatives(q._symmetric(slope))
            return Measured(value, gradient, curvature, aux)
        point_key, loss_key = keys(points, objective, key)
        return averaged(lambda t: sloped(objective, t, batch, aux, loss_key), q, points, point_key)


def sloped(objective: Objective, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
    """The data's loss at θ and its gradient."""

    def measure(part: PyTree, aux: PyTree, key: Any) -> Measured:
        (value, aux), gradient = jax.value_and_grad(objective.data, has_aux=True)(theta, part, aux, key)
        return Measured(value, gradient, None, aux)

    return accumulated(measure, batch, aux, key)


class SquaredGradient(Pointwise):
    """The mini-batch gradient squared, N·ĝ∘ĝ with ĝ the gradient of the mean loss (RMSprop, Adam)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    approximation: ClassVar[str] = "Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N ĝ∘ĝ, the mini-batch gradient squared (eq:rmsprop_update)"
    additive: ClassVar[bool] = False

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = sloped(objective, theta, batch, aux, key)
        squares = jax.tree.map(lambda g: jnp.asarray(1 / objective.size, g.dtype) * g**2, measured.gradient)
        return dataclasses.replace(measured, curvature=squares)


class Stein(Pointwise):
    """E_q∇²ℓ from gradients alone: S(θ − m)∇ℓᵀ, symmetrised (Stein's identity)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full"})
    approximation: ClassVar[str] = "Stein's identity for the Hessian"
    meaning: ClassVar[str] = "E_q∇²ℓ̄ = E_q[S(θ − m)∇ℓ̄ᵀ] (Stein's identity)"
    slack: ClassVar[float] = 0.0

    @property
    def linear(self) -> bool:
        return True

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = sloped(objective, theta, batch, aux, key)
        tilted = q.times(jax.tree.map(jnp.subtract, theta, q.mean))
        if q.structure.name == "diagonal":
            curvature = jax.tree.map(jnp.multiply, tilted, measured.gradient)
        else:
            outer = ravel(tilted)[:, None] * ravel(measured.gradient)[None, :]
            curvature = q.structure.of_matrix(outer, theta)
        return dataclasses.replace(measured, curvature=curvature)

    def middle(self, objective: Objective, q: Any, seen: Outputs, center: Array) -> Array | None:
        """Cov(f)⁻¹ E[(f − E f)∇_f ℓᵀ], symmetrised; the Hessian itself where an output does not vary."""
        covariance = q.output_covariance(seen.jacobian)
        size = center.shape[1]
        cross = seen.expected((seen.outputs - center)[..., :, None] * seen.slopes[..., None, :])
        epsilon, spread = jnp.finfo(center.dtype).eps, jnp.trace(covariance, axis1=1, axis2=2)
        still = spread <= epsilon * jnp.max(spread)
        identity = jnp.eye(size, dtype=center.dtype)
        ridge = 0.0 if size == 1 else 8 * size * epsilon * spread[:, None, None] * identity  # dependent outputs
        safe = jnp.asarray(jnp.where(still[:, None, None], identity, covariance + ridge))
        stein = cross / safe if size == 1 else jnp.linalg.solve(safe, cross)
        fixed = jax.vmap(jax.hessian(seen.loss))(center, seen.examples[1])
        return jnp.asarray(jnp.where(still[:, None, None], fixed, 0.5 * (stein + jnp.swapaxes(stein, 1, 2))))
