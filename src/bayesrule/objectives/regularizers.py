"""R(θ): what is added to the data's loss, never sampled, differentiated exactly at the mean.

A regularizer is a negative log prior, up to a constant. Because its derivatives are known, sampling it would only add
noise: the rule adds them to what is measured of the data, outside the points and outside squared gradients.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from ..families.base import ExponentialFamily, Family
from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.product import Product
from ..numerics.pytree import PyTree
from ..numerics.trees import ravel, unravel, wide


class Regularizer(eqx.Module):
    """R(θ), its value and derivatives under q.

    To write your own, implement the three abstract methods and pass it to `Objective(…, regularizer=…)`. They are
    called with q, or, where q is a Gaussian with a latent variable or a spike and slab, with its Gaussian part.
    """

    flat: ClassVar[bool] = False
    """Whether R is 0 everywhere, so that it pulls at nothing."""

    def normalized(self, q: Family) -> bool:
        """Whether exp(−R) is a density and `expected` exact for this q, so that a bound is one on the log evidence.

        Called once, for the result of a fit. By default True.
        """
        return True

    def expands_at_mean(self, q: Family) -> bool:
        """Whether `expected` is an expansion to second order at the mean and not E_q R itself.

        Called where a bound is judged: it then evaluates R at the points, as `at_mean` of a Gaussian with its mean
        there. By default False.
        """
        return False

    @abstractmethod
    def at_mean(self, q: Family) -> Array:
        """R at the mean of q: its part of the loss under the delta method."""

    @abstractmethod
    def expected(self, q: Family) -> Array:
        """E_q R, with all constants if `normalized`: its part of the loss and of the bound for other points."""

    @abstractmethod
    def derivatives(self, q: Family) -> tuple[PyTree, Any]:
        """Differentiate R, in the terms that `q.moved` takes. Called in every step.

        Args:
            q: The member before the step.

        Returns:
            The gradient: ∇R at the mean for a Gaussian, ∇_μ E_q R for another exponential family. And the curvature as
            `q.structure` holds it, ∇²R at the mean; None for a family without one. None for either adds nothing.
        """

    def precision(self, params: PyTree) -> Any:
        """The diagonal of ∇²R at the parameters, for algorithms whose q starts with the prior's precision.

        One number, or a pytree like the parameters.
        """
        curvature = self.derivatives(DiagonalGaussian(params))[1]
        return 0.0 if curvature is None else curvature


class Flat(Regularizer):
    """R = 0: a flat, improper prior."""

    flat: ClassVar[bool] = True

    def normalized(self, q: Family) -> bool:
        return False

    def at_mean(self, q: Family) -> Array:
        return jnp.zeros(())

    def expected(self, q: Family) -> Array:
        return jnp.zeros(())

    def derivatives(self, q: Family) -> tuple[None, None]:
        return None, None


class Isotropic(Regularizer):
    """R(θ) = ½δ‖θ‖² with its constants: the prior N(0, 1/δ) on every entry."""

    strength: Any

    def _value(self, squares: Any, size: int) -> Array:
        return 0.5 * (self.strength * squares + size * (math.log(2 * math.pi) - jnp.log(self.strength)))

    def at_mean(self, q: Family) -> Array:
        if isinstance(q, Product):
            return sum((self.at_mean(block) for block in _gaussian_blocks(q)), start=jnp.zeros(()))
        mean = _gaussian(q).mean
        leaves = jax.tree.leaves(mean)
        squares = sum((jnp.vdot(leaf, leaf) for leaf in leaves), start=0.0)  # vdot needs no array of squares
        return self._value(squares, sum(leaf.size for leaf in leaves))

    def expected(self, q: Family) -> Array:
        if isinstance(q, Product):
            return sum((self.expected(block) for block in _gaussian_blocks(q)), start=jnp.zeros(()))
        total_variance = sum((jnp.sum(v) for v in jax.tree.leaves(_gaussian(q).variance())), start=0.0)
        return self.at_mean(q) + 0.5 * self.strength * total_variance

    def derivatives(self, q: Family) -> tuple[PyTree, Any]:
        if isinstance(q, Product):  # Only Gaussian blocks: the others have no mean that could be drawn to zero.
            return _by_block(q, self.derivatives)
        q = _gaussian(q)
        gradient = jax.tree.map(lambda m: jnp.asarray(self.strength, m.dtype) * m, q.mean)
        strength = jax.tree.map(lambda m: jnp.full(m.shape, self.strength, wide(m.dtype)), q.mean)
        return gradient, q.structure.of_diagonal(strength)

    def precision(self, params: PyTree) -> Any:
        return self.strength


class ByLeaf(Regularizer):
    """R(θ) = ½Σδ‖leaf‖² with its constants, a number δ for each leaf of θ; δ = 0 is a flat prior of density 1.

    With `regularizer={"w": 1.0, "b": 0.0}` an intercept is not regularized.
    """

    strengths: PyTree

    def normalized(self, q: Family) -> bool:
        return not any(_is_zero(strength) for strength in jax.tree.leaves(self.strengths))

    def _sum(self, squares: PyTree) -> Array:
        """½Σδ‖·‖² and the constants, from every entry's square."""

        def of_leaf(strength: Any, leaf: Array) -> Array:
            flat = jnp.asarray(strength) == 0
            constant = math.log(2 * math.pi) - jnp.log(jnp.asarray(jnp.where(flat, 2 * math.pi, strength)))
            return 0.5 * (strength * jnp.sum(leaf) + leaf.size * constant)

        return sum(jax.tree.leaves(jax.tree.map(of_leaf, self.strengths, squares)), start=jnp.zeros(()))

    def at_mean(self, q: Family) -> Array:
        return self._sum(jax.tree.map(jnp.square, _gaussian(q).mean))

    def expected(self, q: Family) -> Array:
        gaussian = _gaussian(q)
        return self._sum(jax.tree.map(lambda m, v: m**2 + v, gaussian.mean, gaussian.variance()))

    def derivatives(self, q: Family) -> tuple[PyTree, Any]:
        q = _gaussian(q)
        gradient = jax.tree.map(lambda s, m: jnp.asarray(s, m.dtype) * m, self.strengths, q.mean)
        diagonal = jax.tree.map(lambda s, m: jnp.full(m.shape, s, wide(m.dtype)), self.strengths, q.mean)
        return gradient, q.structure.of_diagonal(diagonal)

    def precision(self, params: PyTree) -> Any:
        return jax.tree.map(lambda s, m: jnp.full(jnp.shape(m), s), self.strengths, params)


def _is_zero(strength: Any) -> bool:
    """Whether it is a concrete 0; a traced number counts as positive, because its value is not known."""
    return not isinstance(strength, Tracer) and float(strength) == 0


class Prior(Regularizer):
    """R(θ) = −log p(θ) for a prior that is itself a family."""

    family: Any

    def at_mean(self, q: Family) -> Array:
        return -jnp.sum(self.family.log_prob(_gaussian(q).mean))

    def normalized(self, q: Family) -> bool:
        return isinstance(self.family, GaussianFamily) or not isinstance(q, GaussianFamily)

    def expands_at_mean(self, q: Family) -> bool:
        return isinstance(q, GaussianFamily) and not isinstance(self.family, GaussianFamily)

    def _as_function(self) -> Penalty:
        prior = self.family
        return Penalty(lambda theta: -jnp.sum(prior.log_prob(theta)))

    def expected(self, q: Family) -> Array:
        if self.expands_at_mean(q):
            return self._as_function().expected(q)
        return jnp.sum(self._check_same(q).cross_entropy(self.family))

    def derivatives(self, q: Family) -> tuple[PyTree, Any]:
        prior: Any = self.family
        if self.expands_at_mean(q):
            return self._as_function().derivatives(q)
        same = self._check_same(q)
        if isinstance(q, GaussianFamily):
            gradient = prior.times(jax.tree.map(jnp.subtract, q.mean, prior.mean))
            return gradient, prior.prior_curvature(q.structure, q.mean)
        if isinstance(q, Product):  # Each block's derivatives are in its own terms.
            parts = {name: Prior(prior.blocks[name]).derivatives(block) for name, block in q.blocks.items()}
            return {name: part[0] for name, part in parts.items()}, {name: part[1] for name, part in parts.items()}
        # −log p = −⟨λ₀, T⟩ − log h + A(λ₀): the gradient in μ is −λ₀, less h's where h is not constant.
        gradient = jax.tree.map(jnp.negative, prior.natural())
        if not same.constant_base():
            base = same.natural_gradient(lambda r: r.expected_log_base())
            gradient = jax.tree.map(jnp.subtract, gradient, base)
        return gradient, None

    def _check_same(self, q: Family) -> Any:
        """q, where the prior is over the same θ and (for a q that is not Gaussian) of the same family; else raise."""
        if isinstance(q, GaussianFamily) and isinstance(self.family, GaussianFamily):
            shapes = [[leaf.shape for leaf in jax.tree.leaves(family.mean)] for family in (self.family, q)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"The prior is over shapes {shapes[0]} and q over {shapes[1]}: give a prior of the parameters' own "
                    "shape, or regularizer=δ for N(0, 1/δ) on every entry."
                )
            return q
        if type(q) is not type(self.family):
            raise ValueError(
                f"The prior is a {type(self.family).__name__} and q a {type(q).__name__}: with a q that is not "
                "Gaussian the prior must be of the same family. Put −log p(θ) into the loss instead."
            )
        return q


class Penalty(Regularizer):
    """Any function R(θ): an unnormalised regularizer, so bounds hold up to a constant."""

    function: Callable[[PyTree], Any] = eqx.field(static=True)

    def normalized(self, q: Family) -> bool:
        return False

    def expands_at_mean(self, q: Family) -> bool:
        return True

    def at_mean(self, q: Family) -> Array:
        return jnp.asarray(self.function(_gaussian(q).mean))

    def expected(self, q: Family) -> Array:
        """R(m) + ½tr(∇²R(m) S⁻¹), of which the step's gradient and curvature are the derivatives."""
        curvature = self.derivatives(q)[1]
        return self.at_mean(q) + (0.0 if curvature is None else 0.5 * _gaussian(q).trace(curvature))

    def derivatives(self, q: Family) -> tuple[PyTree, Any]:
        q = _gaussian(q)
        gradient = jax.grad(self.function)(q.mean)

        def ravelled_gradient(vector: Array) -> Array:
            return ravel(jax.grad(self.function)(unravel(vector, q.mean)))

        return gradient, q.structure.hessian(ravelled_gradient, q.mean)


def _gaussian(q: Family) -> GaussianFamily:
    """q, if it is a Gaussian; else raise."""
    if not isinstance(q, GaussianFamily):
        raise ValueError(
            f"regularizer= is differentiated at a mean, so it needs a Gaussian q, not a {type(q).__name__}: "
            "give prior= a member of the same family, or put the term into the loss."
        )
    return q


def _gaussian_blocks(q: Product) -> list[Any]:
    """The blocks that a regularizer of means concerns."""
    return [block for block in q.blocks.values() if isinstance(block, GaussianFamily)]


def _by_block(q: Product, derivatives: Callable[[Any], tuple[PyTree, Any]]) -> tuple[PyTree, Any]:
    """Derivatives of the Gaussian blocks, and zeros for the others."""
    by_name = {
        name: derivatives(block)
        if isinstance(block, GaussianFamily)
        else (jax.tree.map(jnp.zeros_like, block.natural()), None)
        for name, block in q.blocks.items()
    }
    return {name: pair[0] for name, pair in by_name.items()}, {name: pair[1] for name, pair in by_name.items()}


def as_regularizer(regularizer: Any, prior: Any) -> Regularizer:
    """The regularizer that a user's `regularizer=` or `prior=` stands for."""
    if regularizer is not None and prior is not None:
        raise ValueError("Give either prior= (a family) or regularizer= (a number or a function), not both.")
    if prior is not None:
        if isinstance(prior, dict) and prior and all(isinstance(block, Family) for block in prior.values()):
            prior = Product(prior)
        if not isinstance(prior, Family):
            raise ValueError(
                f"prior= takes a family such as DiagonalGaussian(zeros, ones), got {type(prior).__name__}. A "
                "number or a function goes to regularizer=."
            )
        return Prior(prior)
    if regularizer is None:
        return Flat()
    if isinstance(regularizer, Regularizer):
        return regularizer
    if isinstance(regularizer, ExponentialFamily):
        raise ValueError("regularizer= takes a number or a function; give a family to prior=.")
    if callable(regularizer):
        return Penalty(regularizer)
    if isinstance(regularizer, dict):
        if any(not isinstance(s, Tracer) and float(s) < 0 for s in jax.tree.leaves(regularizer)):
            raise ValueError(
                f"regularizer= has a precision for each leaf of the parameters: none negative, got {regularizer}."
            )
        return ByLeaf(regularizer)
    if not isinstance(regularizer, Tracer) and float(regularizer) < 0:
        raise ValueError(f"regularizer=δ is the precision of the prior N(0, 1/δ): not negative, got {regularizer}.")
    if not isinstance(regularizer, Tracer) and float(regularizer) == 0:
        return Flat()
    return Isotropic(regularizer)
