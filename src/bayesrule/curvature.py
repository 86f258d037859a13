"""What is measured at the points: the gradient, and whatever stands for the Hessian."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .families.structure import Structure, ravel, slope_diagonal, unravel
from .objective import Objective
from .points import Enumeration, Exact, MonteCarlo, Points, PointSet


class Measured(eqx.Module):
    """E_q of the data's loss and of its derivatives, in the terms that `q.moved` takes."""

    value: Array
    gradient: PyTree
    curvature: Any
    aux: PyTree = None


class Curvature(eqx.Module):
    """What is measured at each point; the average over the points stands for E_q."""

    serves: ClassVar[frozenset[str]] = frozenset()
    """The structures of precision that it can fill."""
    approximation: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    slack: ClassVar[float] = 0.0
    """The nats by which a good step may seem to worsen the loss, because what is measured at a finite
    number of points is not quite the derivative of the loss at those points."""

    @abstractmethod
    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        """E_q ℓ and its derivatives, for the data's part of the objective."""


def _keys(points: Points, objective: Objective, key: Any) -> tuple[Any, Any]:
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

    @property
    def linear(self) -> bool:
        """Whether outputs that are linear in θ make it exact, and cheaper, in the outputs' space."""
        return False

    @abstractmethod
    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        """What is measured at one θ."""

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        point_key, loss_key = _keys(points, objective, key)
        if self.linear and objective.linear:
            line = objective.linearized(q.mean, batch)
            examples, scales = objective.examples(line)
            center = line.outputs(q.mean)
            outputs, weights = points.outputs(q, center, line.jacobian, point_key)
            seen = Outputs.at(objective, q.mean, examples, scales, outputs, weights, line.jacobian)
            return seen.measured(q.structure, self.middle(objective, q, seen, center), aux)
        spots = points.at(q, point_key)
        return _averaged(lambda t: self.at(objective, q, t, batch, aux, loss_key), spots, q.structure)

    def middle(self, objective: Objective, q: Any, seen: Outputs, center: Array) -> Array | None:
        """E_q∇²_f ℓ for each example's outputs; None for the loss's own Hessian."""
        return None


def _averaged(measure: Callable[[PyTree], Measured], spots: PointSet, structure: Structure) -> Measured:
    """Σ_s w_s measure(θ_s)."""
    if spots.weights.shape == (1,):  # no vmap over an axis of one: it would slow convolutions down
        one = measure(jax.tree.map(lambda t: t[0], spots.theta))
        if structure.name != "factored":
            return one
        stack = jax.tree.map(lambda x: x[None], one.curvature)
        return dataclasses.replace(one, curvature=structure.average(stack, spots.weights))
    every = jax.vmap(measure)(spots.theta)
    average = lambda tree: Structure().average(tree, spots.weights)
    curvature = structure.average(every.curvature, spots.weights)
    return Measured(average(every.value), average(every.gradient), curvature, average(every.aux))


class Outputs(eqx.Module):
    """Every example's outputs f at weighted points, (S, B, K), and the loss and its slope there."""

    examples: PyTree
    scales: Array
    outputs: Array
    weights: Array
    jacobian: PyTree
    losses: Array
    slopes: Array
    loss: Callable[[Array, Any], Array] = eqx.field(static=True)

    @staticmethod
    def at(
        objective: Objective,
        theta: PyTree,
        examples: PyTree,
        scales: Array,
        outputs: Array,
        weights: Array,
        jacobian: PyTree,
    ) -> Outputs:
        loss = objective.output_loss(theta, examples)
        every = jax.vmap(jax.vmap(jax.value_and_grad(loss)), in_axes=(0, None))(outputs, examples[1])
        return Outputs(examples, scales, outputs, weights, jacobian, every[0], every[1], loss)

    def expected(self, every: Array) -> Array:
        """The weighted mean over the points of something that every example has at each."""
        return jnp.tensordot(self.weights.astype(every.dtype), every, axes=1)

    def hessians(self) -> Array:
        """E∇²_f ℓ for each example."""
        hessian = jax.vmap(jax.vmap(jax.jacfwd(jax.grad(self.loss))), in_axes=(0, None))
        return self.expected(hessian(self.outputs, self.examples[1]))

    def scaled(self, rows: Array) -> Array:
        """Each example's row times its weight and N/M; a zero weight leaves it out even if it is not finite."""
        scales = _spread(self.scales, rows)
        return jnp.asarray(jnp.where(scales == 0, 0.0, scales * rows))

    def measured(self, structure: Structure, middle: Array | None, aux: PyTree) -> Measured:
        """Gradient Jᵀ E∇_f ℓ and curvature Jᵀ M J, with M = E∇²_f ℓ unless given."""
        slope = self.scaled(self.expected(self.slopes))
        middle = self.scaled(self.hessians() if middle is None else middle)
        gradient = jax.tree.map(lambda j: jnp.tensordot(slope, j, axes=((0, 1), (0, 1))), self.jacobian)
        value = jnp.sum(self.scaled(self.expected(self.losses)))
        return Measured(value, gradient, structure.of_sandwich(self.jacobian, middle), aux)


def _spread(scales: Array, like: Array) -> Array:
    return scales.astype(like.dtype).reshape((-1,) + (1,) * (like.ndim - 1))


class Gradient(Curvature):
    """The gradient only: in θ for a Gaussian with fixed precision, in μ for `Exact` points."""

    serves: ClassVar[frozenset[str]] = frozenset({"none"})
    meaning: ClassVar[str] = "the gradient only"

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        if isinstance(points, Exact):
            (value, aux), slope = jax.value_and_grad(objective.data, has_aux=True)(q.expectation(), batch, aux, key)
            gradient, curvature = q.derivatives(slope)
            return Measured(value, gradient, curvature, aux)
        point_key, loss_key = _keys(points, objective, key)
        spots = points.at(q, point_key)
        return _averaged(lambda t: _sloped(objective, t, batch, aux, loss_key), spots, q.structure)


def _sloped(objective: Objective, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
    (value, aux), gradient = jax.value_and_grad(objective.data, has_aux=True)(theta, batch, aux, key)
    return Measured(value, gradient, None, aux)


class Hessian(Pointwise):
    """The exact Hessian ∇²ℓ, for a full precision (`eq:von_1`)."""

    serves: ClassVar[frozenset[str]] = frozenset({"full"})
    meaning: ClassVar[str] = "the Hessian ∇²ℓ̄ (Bonnet and Price, app:bp)"

    @property
    def linear(self) -> bool:
        return True

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = _sloped(objective, theta, batch, aux, key)
        matrix = jax.jacfwd(lambda v: _flat_slope(objective, v, theta, batch, aux, key))(ravel(theta))
        return dataclasses.replace(measured, curvature=q.structure.of_matrix(matrix, theta))


def _flat_slope(objective: Objective, vector: Array, like: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Array:
    theta = unravel(vector, like)
    return ravel(jax.grad(lambda t: objective.data(t, batch, aux, key)[0])(theta))


class HessianDiagonal(Pointwise):
    """The exact diagonal of the Hessian; `absolute=True` sums |∇²_j ℓᵢ| instead (`eq:dhess_update`)."""

    absolute: bool = eqx.field(static=True, default=False)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    meaning: ClassVar[str] = "the Hessian's diagonal"

    @property
    def linear(self) -> bool:
        return not self.absolute

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = _sloped(objective, theta, batch, aux, key)
        if not self.absolute or objective.kind == "plain":
            diagonal = slope_diagonal(lambda v: _flat_slope(objective, v, theta, batch, aux, key), ravel(theta))
            diagonal = jnp.abs(diagonal) if self.absolute else diagonal
        else:
            examples, scales = _independent(objective, batch, "HessianDiagonal(absolute=True)")

            def of_one(example: PyTree) -> Array:
                slope = jax.grad(lambda v: objective.example_loss(unravel(v, theta), example))
                return jnp.abs(slope_diagonal(slope, ravel(theta)))

            diagonal = scales @ jax.vmap(of_one)(examples)
        return dataclasses.replace(measured, curvature=unravel(diagonal, theta))

    def __repr__(self) -> str:
        return f"HessianDiagonal({'absolute=True' if self.absolute else ''})"


def _independent(objective: Objective, batch: PyTree, name: str) -> tuple[PyTree, Array]:
    if not objective.per_example:
        raise ValueError(
            f"{name} takes each example's loss by itself, and this objective does not have one: build it as "
            "Objective(loss, size=N) with loss(params, example)."
        )
    return objective.examples(batch)


class GaussNewton(Pointwise):
    """Per-example squared gradients, N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (`eq:OGN_approx`)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored"})
    approximation: ClassVar[str] = "Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (eq:OGN_approx)"

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        examples, scales = _independent(objective, batch, "GaussNewton")
        values, slopes = jax.vmap(lambda e: jax.value_and_grad(objective.example_loss)(theta, e))(examples)
        value, slopes = jax.tree.map(lambda x: jnp.where(_spread(scales, x) == 0, 0.0, x), (values, slopes))
        gradient = jax.tree.map(lambda g: jnp.tensordot(scales.astype(g.dtype), g, axes=1), slopes)
        rows = jax.tree.map(lambda g: g[:, None], slopes)
        curvature = q.structure.of_sandwich(rows, scales.astype(value.dtype)[:, None, None])
        return Measured(jnp.sum(value * scales), gradient, curvature, aux)


class GeneralizedGaussNewton(Pointwise):
    """N/M Σᵢ JᵢᵀΛᵢJᵢ with the outputs' Jacobian Jᵢ and the loss's Hessian in the output Λᵢ.

    `fisher(output)` gives another Λ: the Fisher information of a likelihood p(y | output), which makes
    the rule Amari's natural gradient of maximum likelihood (section 2.1).
    """

    fisher: Callable[[Any], Any] | None = eqx.field(static=True, default=None)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored"})
    approximation: ClassVar[str] = "generalized Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ Jᵢᵀ ∇²_f ℓᵢ Jᵢ (section 4.4)"

    @property
    def linear(self) -> bool:
        return self.fisher is None

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        examples, scales = _independent(objective, batch, "GeneralizedGaussNewton")
        outputs, jacobian = objective.outputs(theta, examples)[None], objective.jacobians(theta, examples)
        seen = Outputs.at(objective, theta, examples, scales, outputs, jnp.ones(1), jacobian)
        middle = None
        if self.fisher is not None:
            fisher = self.fisher
            middle = jax.vmap(lambda f: jnp.reshape(fisher(f), (f.size, f.size)))(outputs[0])
        return seen.measured(q.structure, middle, aux)

    def __repr__(self) -> str:
        return f"GeneralizedGaussNewton({'' if self.fisher is None else 'fisher=…'})"


class SquaredGradient(Pointwise):
    """The mini-batch gradient squared, N·ĝ∘ĝ with ĝ the gradient of the mean loss (RMSprop, Adam)."""

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal"})
    approximation: ClassVar[str] = "Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N ĝ∘ĝ, the mini-batch gradient squared (eq:rmsprop_update)"

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = _sloped(objective, theta, batch, aux, key)
        squares = jax.tree.map(lambda g: g**2 / jnp.asarray(objective.size, g.dtype), measured.gradient)
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
        measured = _sloped(objective, theta, batch, aux, key)
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


class Reparameterized(Curvature):
    """∇_μ E_q ℓ through differentiable samples θ(λ), explicit or implicit, and the Fisher solve."""

    approximation: ClassVar[str] = "reparameterised samples"
    meaning: ClassVar[str] = "F(λ)⁻¹∇_λ of the loss at samples θ(λ)"

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        point_key, loss_key = _keys(points, objective, key)

        def expected(natural: PyTree) -> tuple[Array, PyTree]:
            spots = points.at(q.with_natural(natural), point_key)
            values, new = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(spots.theta)
            average = Structure().average((values, new), spots.weights)
            return average[0], average[1]

        (value, aux), slope = jax.value_and_grad(expected, has_aux=True)(q.natural())
        gradient, curvature = q.derivatives(q.raised(q._symmetric(slope)))
        return Measured(value, gradient, curvature, aux)


class Score(Curvature):
    r"""∇_μ E_q ℓ without derivatives of ℓ: $F^{-1}\mathrm{Cov}_q(T, ℓ)$, as natural evolution strategies.

    With `baseline` each draw is compared with the mean of the *other* draws, which keeps the estimate
    unbiased. With `Enumeration` points it is exact.
    """

    baseline: bool = eqx.field(static=True, default=True)
    meaning: ClassVar[str] = "F⁻¹Cov_q(T, ℓ̄), no derivatives of the loss"

    def measure(self, objective: Objective, q: Any, points: Points, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        point_key, loss_key = _keys(points, objective, key)
        spots = points.at(q, point_key)
        values, new = jax.vmap(lambda t: objective.data(t, batch, aux, loss_key))(spots.theta)
        weights = spots.weights.astype(values.dtype)
        if isinstance(points, Enumeration):
            gradient, curvature = q.derivatives(q.enumerated_gradient(values, spots.theta))
            return Measured(jnp.sum(weights * values), gradient, curvature, aux)
        advantage = self._compared(values, weights, points)
        excess = jax.tree.map(lambda t, m: t - m, q.statistics(spots.theta), q.expectation())
        covariance = jax.tree.map(lambda e: jnp.tensordot(weights * advantage, e, axes=1), excess)
        average = Structure().average((values, new), weights)
        gradient, curvature = q.derivatives(q.raised(covariance))
        return Measured(average[0], gradient, curvature, average[1])

    def _compared(self, values: Array, weights: Array, points: Points) -> Array:
        if not self.baseline:
            return values
        if not isinstance(points, MonteCarlo):
            return values - jnp.sum(weights * values)
        # The mean over the draws that are independent of this one: all others, or all other pairs.
        count = values.size
        own = values + jnp.roll(values, count // 2) if points.antithetic else values
        left = count - (2 if points.antithetic else 1)
        return values - (jnp.sum(values) - own) / left if left else values
