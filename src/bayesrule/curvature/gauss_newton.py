"""Gauss–Newton approximations of the Hessian: sums of per-example squares, and the generalised form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..numerics.linalg import root_rows
from ..objectives.base import AbstractObjective
from ..objectives.objective import Objective
from .base import Pointwise
from .gradient import sloped
from .linear_outputs import Outputs, broadcast_rows
from .measurement import Measurement
from .per_example import Kronecker, kronecker_factors, pulled_squares, second_moments, ways


class GaussNewton(Pointwise):
    """Per-example squared gradients, N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (`eq:OGN_approx`).

    For a diagonal (and for Kronecker factors) the gradients of single examples are never made where a parameter
    enters through a matrix product or a convolution; `ways` says how each parameter's squares are found.
    """

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored", "kronecker"})
    approximation: ClassVar[str] = "Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (eq:OGN_approx)"

    @staticmethod
    def ways(objective: AbstractObjective, params: PyTree, batch: PyTree) -> dict[str, str]:
        """How each parameter's squares are found: "product", "convolution", "bias", "scale", or "examples", the slower
        way, where its gradient is made for every example (a few at a time)."""
        objective = objective.separable("GaussNewton")
        return ways(objective.example_loss, params, objective.examples(batch)[0])

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        objective = objective.separable("GaussNewton")
        examples, scales = objective.examples(batch)
        total = lambda values: jnp.sum(values * scales.astype(values.dtype))
        if q.structure.name == "diagonal":
            seen = second_moments(objective.example_loss, theta, examples, scales)
            return Measurement(total(seen.values), seen.gradient, seen.squares, aux)
        if q.structure.name == "kronecker":
            found = kronecker_factors(objective.example_loss, theta, examples, scales)
            curvature = _factors(q, theta, found.factors, jnp.sum(scales) / objective.size)
            return Measurement(total(found.values), found.gradient, curvature, aux)
        values, slopes = jax.vmap(lambda e: jax.value_and_grad(objective.example_loss)(theta, e))(examples)
        value, slopes = jax.tree.map(lambda x: jnp.where(broadcast_rows(scales, x) == 0, 0.0, x), (values, slopes))
        gradient = jax.tree.map(lambda g: jnp.tensordot(scales.astype(g.dtype), g, axes=1), slopes)
        rows = jax.tree.map(lambda g: g[:, None], slopes)
        curvature = q.structure.of_sandwich(rows, scales.astype(value.dtype)[:, None, None])
        return Measurement(jnp.sum(value * scales), gradient, curvature, aux)


class GeneralizedGaussNewton(Pointwise):
    """N/M Σᵢ JᵢᵀΛᵢJᵢ with the outputs' Jacobian Jᵢ and the loss's Hessian in the output Λᵢ.

    `fisher(output)` gives another Λ: the Fisher information of a likelihood p(y | output), which makes
    the rule Amari's natural gradient of maximum likelihood (section 2.1).
    """

    fisher: Callable[[Any], Any] | None = eqx.field(static=True, default=None)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored", "kronecker"})
    approximation: ClassVar[str] = "generalized Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ Jᵢᵀ ∇²_f ℓᵢ Jᵢ (section 4.4)"

    @property
    def linear(self) -> bool:
        return self.fisher is None

    def at(
        self, objective: AbstractObjective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, key: Any
    ) -> Measurement:
        objective = objective.separable("GeneralizedGaussNewton")
        examples, scales = objective.examples(batch)
        if q.structure.name in ("diagonal", "kronecker"):
            return self._by_columns(objective, q, theta, batch, aux, examples, scales)
        outputs, jacobian = objective.outputs(theta, examples)[None], objective.jacobians(theta, examples)
        seen = Outputs.at(objective, theta, examples, scales, outputs, jnp.ones(1), jacobian)
        middle = None
        if self.fisher is not None:
            fisher = self.fisher
            middle = jax.vmap(lambda f: jnp.reshape(fisher(f), (f.size, f.size)))(outputs[0])
        return seen.measured(q.structure, middle, aux)

    def _by_columns(
        self, objective: Objective, q: Any, theta: PyTree, batch: PyTree, aux: PyTree, examples: PyTree, scales: Array
    ) -> Measurement:
        """From Λ = Σ_r c_r c_rᵀ: the squares of Jᵀc_r, without a Jacobian for each example."""
        loss = objective.output_loss(theta, examples)

        def columns(output: Array, example: PyTree) -> Array:
            middle = jax.hessian(loss)(output, example[1]) if self.fisher is None else self.fisher(output)
            return root_rows(jnp.reshape(middle, (1, output.size, output.size)))[0]

        apply = lambda t, example: objective.outputs(t, jax.tree.map(lambda x: x[None], example))[0]
        measured = sloped(objective, theta, batch, aux, None)
        if q.structure.name == "diagonal":
            scaled = lambda f, pair: jnp.sqrt(pair[1]).astype(f.dtype) * columns(f, pair[0])
            curvature = pulled_squares(lambda t, pair: apply(t, pair[0]), theta, (examples, scales), scaled)[1]
        else:
            found = kronecker_factors(apply, theta, examples, scales, columns)
            curvature = _factors(q, theta, found.factors, jnp.sum(scales) / objective.size)
        return dataclasses.replace(measured, curvature=curvature)

    def __repr__(self) -> str:
        return f"GeneralizedGaussNewton({'' if self.fisher is None else 'fisher=…'})"


def _factors(q: Any, theta: PyTree, factors: PyTree, share: Array) -> Any:
    """The layers' factors as a KroneckerGaussian holds them: inputs by outputs.

    `share` is what the batch's weights add up to over N, so that a batch's factors are the sum of its parts'.
    """

    def sides(path: Any, leaf: Array, factor: Kronecker) -> tuple[Array, Array]:
        if leaf.ndim < 2:
            return jnp.ones((1, 1), factor.outputs.dtype), jnp.kron(factor.inputs, factor.outputs)
        places: Any = np.arange(leaf.size).reshape(leaf.shape)
        if not np.array_equal(np.asarray(factor.matrix(places)), places.reshape(-1, leaf.shape[-1])):
            raise ValueError(
                "A KroneckerGaussian takes a layer's weights as (…, inputs, outputs), and "
                f"{jax.tree_util.keystr(path)} is laid out another way: transpose it, or use a DiagonalGaussian."
            )
        return share.astype(factor.inputs.dtype) * factor.inputs, factor.outputs

    is_factor = lambda x: isinstance(x, Kronecker)
    treedef = jax.tree.structure(theta)
    paths = jax.tree_util.tree_leaves_with_path(theta)
    pairs = [sides(p, x, f) for (p, x), f in zip(paths, jax.tree.leaves(factors, is_leaf=is_factor), strict=True)]
    return q.structure.of_factors(*(jax.tree.unflatten(treedef, [pair[i] for pair in pairs]) for i in (0, 1)))
