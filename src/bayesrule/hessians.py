"""The Hessian and what stands for it: its diagonal, Gauss–Newton, generalised Gauss–Newton."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .curvature import Pointwise, sloped
from .families.structure import ravel, slope_diagonal, unravel
from .measured import Measured
from .objective import Objective
from .outputs import Outputs, spread
from .per_example import second_moments


class Hessian(Pointwise):
    """The exact Hessian ∇²ℓ, for a full precision (`eq:von_1`)."""

    serves: ClassVar[frozenset[str]] = frozenset({"full"})
    meaning: ClassVar[str] = "the Hessian ∇²ℓ̄ (Bonnet and Price, app:bp)"

    @property
    def linear(self) -> bool:
        return True

    def at(self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any) -> Measured:
        measured = sloped(objective, theta, batch, aux, key)
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
        measured = sloped(objective, theta, batch, aux, key)
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
        if q.structure.name == "diagonal":
            seen = second_moments(objective.example_loss, theta, examples, scales)
            return Measured(jnp.sum(seen.values * scales.astype(seen.values.dtype)), seen.gradient, seen.squares, aux)
        values, slopes = jax.vmap(lambda e: jax.value_and_grad(objective.example_loss)(theta, e))(examples)
        value, slopes = jax.tree.map(lambda x: jnp.where(spread(scales, x) == 0, 0.0, x), (values, slopes))
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
