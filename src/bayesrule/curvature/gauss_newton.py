"""Gauss–Newton approximations of the Hessian: sums of per-example squares, and the generalised form.

Both are sums over examples, Σᵢ JᵢᵀMᵢJᵢ: for the squares Jᵢ = ∇ℓᵢᵀ and Mᵢ = 1; for the generalised form Jᵢ is the
outputs' Jacobian and Mᵢ the loss's Hessian in the outputs. The structure of q picks the form in which the sum is
computed (`Structure.gauss_newton`): its diagonal alone, two Kronecker factors for each layer, or from every example's
Jacobian.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..families.base import HasStructure
from ..families.gaussian.precision import Structure
from ..numerics.linalg import root_rows
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.base import AbstractObjective
from .base import Pointwise
from .gradient import value_and_gradient
from .linear_outputs import OutputPoints, broadcast_rows
from .measurement import Measurement
from .per_example import COSTS, Kronecker, kronecker_factors, pulled_squares, second_moments, ways


class GaussNewton(Pointwise[HasStructure]):
    """Per-example squared gradients, N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (`eq:OGN_approx`).

    For a diagonal (and for Kronecker factors) the gradients of all examples are never held at once. `ways` says how
    each parameter's squares are computed, and `costs` what each way costs beside the plain gradient.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, e: 0.5 * (e[1] - e[0] * w) ** 2, size=2)
    >>> q, data = blr.DiagonalGaussian(jnp.array(1.0), jnp.array(1.0)), (jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0]))
    >>> measured = blr.GaussNewton().measure(objective, q, blr.Delta(), data, None, None)
    >>> float(measured.gradient), float(measured.curvature)                     # −1 + 4, and 1 + 16; the Hessian is 5
    (3.0, 17.0)
    """

    costs: ClassVar[dict[str, str]] = COSTS

    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored", "kronecker"})
    nonnegative: ClassVar[bool] = True
    approximation: ClassVar[str] = "Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (eq:OGN_approx)"

    @staticmethod
    def ways(objective: AbstractObjective, params: PyTree, batch: PyTree) -> dict[str, str]:
        """How each parameter's squares are computed, by its path in the parameters.

        "product", "convolution", "lookup", "bias", "scale", "shared" and "rescaled" cost little more than the gradient.
        "mixed" and "examples" are slow for large parameters: a gradient is formed for every example, a few examples at
        a time. `costs` has the details.

        >>> import bayesrule as blr, jax.numpy as jnp
        >>> objective = blr.Objective(lambda p, e: jnp.sum((p["table"][e] @ p["w"]) ** 2), size=100)
        >>> params, batch = {"table": jnp.ones((9, 2)), "w": jnp.ones((2, 3))}, jnp.array([0, 7, 7])
        >>> blr.GaussNewton.ways(objective, params, batch)
        {"['table']": 'lookup', "['w']": 'product'}
        """
        objective = objective.separable("GaussNewton")
        return ways(objective.example_loss, params, objective.examples(batch)[0])

    def at(
        self, objective: AbstractObjective, q: HasStructure, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        return q.structure.gauss_newton(_SquaredGradients(objective, q.structure, theta, batch, aux))


class _SquaredGradients:
    """Σᵢ ∇ℓᵢ∇ℓᵢᵀ at one θ, in the form that a structure asks for."""

    def __init__(self, objective: AbstractObjective, structure: Structure, theta: PyTree, batch: PyTree, aux: PyTree):
        self.objective, self.structure = objective.separable("GaussNewton"), structure
        self.theta, self.aux = theta, aux
        self.examples, self.scales = self.objective.examples(batch)

    def diagonal(self) -> Measurement:
        moments = second_moments(self.objective.example_loss, self.theta, self.examples, self.scales)
        return Measurement(self._total(moments.values), moments.gradient, moments.squares, self.aux)

    def kronecker(self, of_factors: Callable[[PyTree, PyTree], Any]) -> Measurement:
        sums = kronecker_factors(self.objective.example_loss, self.theta, self.examples, self.scales)
        share = jnp.sum(self.scales) / self.objective.size
        curvature = of_factors(*_layer_factors(self.theta, sums.factors, share))
        return Measurement(self._total(sums.values), sums.gradient, curvature, self.aux)

    def sandwich(self) -> Measurement:
        scales, loss_and_gradient = self.scales, jax.value_and_grad(self.objective.example_loss)
        values, slopes = jax.vmap(lambda example: loss_and_gradient(self.theta, example))(self.examples)
        # An example of zero weight is left out even if its loss is not a number.
        values, slopes = jax.tree.map(lambda x: jnp.where(broadcast_rows(scales, x) == 0, 0.0, x), (values, slopes))
        gradient = jax.tree.map(lambda g: jnp.tensordot(scales.astype(g.dtype), g, axes=1), slopes)
        rows = jax.tree.map(lambda g: g[:, None], slopes)
        curvature = self.structure.of_sandwich(rows, scales.astype(values.dtype)[:, None, None])
        return Measurement(jnp.sum(values * scales), gradient, curvature, self.aux)

    def _total(self, values: Array) -> Array:
        return jnp.sum(values * self.scales.astype(values.dtype))


class GeneralizedGaussNewton(Pointwise[HasStructure]):
    """N/M Σᵢ JᵢᵀΛᵢJᵢ with the outputs' Jacobian Jᵢ and the loss's Hessian in the output Λᵢ.

    Args:
        fisher: `fisher(output)` gives another Λ: the Fisher information of a likelihood p(y | output), which makes
            the rule Amari's natural gradient of maximum likelihood (section 2.1).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda f, y: 0.5 * (y - f) ** 2, output=lambda w, x: w * x, size=2)
    >>> q, data = blr.DiagonalGaussian(jnp.array(1.0), jnp.array(1.0)), (jnp.array([1.0, 2.0]), jnp.array([2.0, 0.0]))
    >>> measured = blr.GeneralizedGaussNewton().measure(objective, q, blr.Delta(), data, None, None)
    >>> float(measured.curvature)                                               # Σ xᵢ², for a square loss the Hessian
    5.0
    """

    fisher: Callable[[Any], Any] | None = eqx.field(static=True, default=None)
    serves: ClassVar[frozenset[str]] = frozenset({"diagonal", "full", "factored", "kronecker"})
    nonnegative: ClassVar[bool] = True
    approximation: ClassVar[str] = "generalized Gauss-Newton Hessian approx."
    meaning: ClassVar[str] = "∇²ℓ̄ ≈ N/M Σᵢ Jᵢᵀ ∇²_f ℓᵢ Jᵢ (section 4.4)"

    @property
    def integrates_outputs(self) -> bool:
        return self.fisher is None

    def at(
        self, objective: AbstractObjective, q: HasStructure, theta: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> Measurement:
        return q.structure.gauss_newton(_OutputHessians(objective, q.structure, theta, batch, aux, self.fisher))

    def __repr__(self) -> str:
        return f"GeneralizedGaussNewton({'' if self.fisher is None else 'fisher=…'})"


class _OutputHessians:
    """Σᵢ JᵢᵀΛᵢJᵢ at one θ, in the form that a structure asks for."""

    def __init__(
        self,
        objective: AbstractObjective,
        structure: Structure,
        theta: PyTree,
        batch: PyTree,
        aux: PyTree,
        fisher: Callable[[Any], Any] | None,
    ):
        self.objective, self.structure = objective.separable("GeneralizedGaussNewton"), structure
        self.theta, self.batch, self.aux, self.fisher = theta, batch, aux, fisher
        self.examples, self.scales = self.objective.examples(batch)

    def diagonal(self) -> Measurement:
        columns = self._root_columns()
        measured = value_and_gradient(self.objective, self.theta, self.batch, self.aux, None)
        scaled = lambda output, pair: jnp.sqrt(pair[1]).astype(output.dtype) * columns(output, pair[0])
        output = lambda theta, pair: self._output(theta, pair[0])
        squares = pulled_squares(output, self.theta, (self.examples, self.scales), scaled)[1]
        return dataclasses.replace(measured, curvature=squares)

    def kronecker(self, of_factors: Callable[[PyTree, PyTree], Any]) -> Measurement:
        columns = self._root_columns()
        measured = value_and_gradient(self.objective, self.theta, self.batch, self.aux, None)
        sums = kronecker_factors(self._output, self.theta, self.examples, self.scales, columns)
        share = jnp.sum(self.scales) / self.objective.size
        return dataclasses.replace(measured, curvature=of_factors(*_layer_factors(self.theta, sums.factors, share)))

    def sandwich(self) -> Measurement:
        outputs = self.objective.outputs(self.theta, self.examples)[None]
        jacobian = self.objective.jacobians(self.theta, self.examples)
        points = OutputPoints.of(self.objective, self.theta, self.examples, self.scales, outputs, jnp.ones(1), jacobian)
        output_hessian, fisher = None, self.fisher
        if fisher is not None:
            output_hessian = jax.vmap(lambda f: jnp.reshape(fisher(f), (f.size, f.size)))(outputs[0])
        return points.to_measurement(self.structure, output_hessian, self.aux)

    def _root_columns(self) -> Callable[[Array, PyTree], Array]:
        """The columns c_r of a square root of one example's Λ = Σ_r c_r c_rᵀ, as a function of its output.

        With them JᵀΛJ = Σ_r (Jᵀc_r)(Jᵀc_r)ᵀ is a sum of squares, and takes no Jacobian for each example.
        """
        loss = self.objective.output_loss(self.theta, self.examples)

        def columns(output: Array, example: PyTree) -> Array:
            output_hessian = jax.hessian(loss)(output, example[1]) if self.fisher is None else self.fisher(output)
            return root_rows(jnp.reshape(output_hessian, (1, output.size, output.size)))[0]

        return columns

    def _output(self, theta: PyTree, example: PyTree) -> Array:
        return self.objective.outputs(theta, jax.tree.map(lambda x: x[None], example))[0]


def _layer_factors(theta: PyTree, factors: PyTree, share: Array) -> tuple[PyTree, PyTree]:
    """Every layer's two factors, of its inputs and of its outputs, as trees like θ.

    `share` is the sum of the batch's weights over N, so that a batch's factors are the sum of its parts'.
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
    inputs, outputs = (jax.tree.unflatten(treedef, [pair[i] for pair in pairs]) for i in (0, 1))
    return inputs, outputs
