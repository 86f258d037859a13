r"""A factor's view of a block: q displaced by δ in its expectation parameters. The message is the derivative in δ at 0.

The rule needs the message $∇_{μ_j}E_q\log f$ of a factor f to a block j. A factor computes E_q log f from what it reads
off the block: its expectation parameters, its mean and covariance, its probabilities, or points drawn from it. All of
these are functions of μ, and a `BlockView` is that dependence made explicit: it stands for the member of the family
with expectation parameters μ + δ. Hence

    message to block j = d/dδ_j  E_{q(μ + δ)} log f   at δ = 0,

one call of `jax.grad`, whatever the factor reads. Conjugate factors, non-conjugate factors with a closed form, and
factors evaluated at points differ only in which property of the view they use.

Why δ, and not μ itself? The derivatives are the same, but the moments are then those that q stores plus what δ adds: a
small variance is never computed as the difference E θ² − (E θ)² of two large numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.base import ExponentialFamily
from ..families.latent.mixture import Mixture, Parts
from ..numerics.pytree import PyTree


class BlockView(eqx.Module):
    """The block q with its expectation parameters displaced by δ; exact at δ = 0 and to first order around it.

    First order is enough, because only the value and the gradient at δ = 0 are ever used. A factor reads whichever of
    the properties it needs: `expectation` in any family; `mean`, `covariance` and `variance` of a Gaussian block;
    `probabilities` of a categorical one; `member` where it needs the distribution (for samples or a density).

    Args:
        q: the block: an `ExponentialFamily`, or a `Peak` of one, which stands for its mode.
        shift: δ, a pytree like `q.expectation()`. None means 0: only the value is wanted, or the block is held fixed.
    """

    q: Any  # an ExponentialFamily; what it offers beyond that (moments, probabilities) depends on which one
    shift: PyTree
    base_expectation: PyTree
    _moments: tuple[Array, Array] | None
    displaced: bool = eqx.field(static=True)

    def __init__(self, q: ExponentialFamily, shift: PyTree = None):
        self.q, self.base_expectation, self.displaced = q, q.expectation(), shift is not None
        self.shift = jax.tree.map(jnp.zeros_like, self.base_expectation) if shift is None else shift
        # The moments are computed once and shared by all factors, so that reverse differentiation adds up the factors'
        # derivatives in the moments before it carries them back to μ, once.
        has_moments = hasattr(getattr(q, "of", q), "moments")  # a Peak has those of the family that it is the mode of
        self._moments = self.q.moments(self.shift) if has_moments else None

    @property
    def held(self) -> BlockView:
        """This view with δ left out of derivatives in it: for parts of E log f that are not part of the message."""
        return BlockView(self.q, jax.lax.stop_gradient(self.shift)) if self.displaced else self

    @property
    def expectation(self) -> PyTree:
        """μ + δ."""
        return jax.tree.map(jnp.add, self.base_expectation, self.shift)

    @property
    def member(self) -> Any:  # of q's own class
        """The member of the family with expectation parameters μ + δ."""
        return self.q.shifted_in_mu(self.shift)

    @property
    def moments(self) -> tuple[Array, Array]:
        """The mean and the covariance of a Gaussian block."""
        if self._moments is None:
            raise ValueError(
                f"the factor reads the mean and covariance of a Gaussian block, and got a {type(self.q).__name__}: use "
                "a Gaussian family for this block, or another factor."
            )
        return self._moments

    @property
    def mean(self) -> Array:
        """E θ of a Gaussian block, as one vector after any plates."""
        return self.moments[0]

    @property
    def covariance(self) -> Array:
        """Cov θ of a Gaussian block: a matrix, or the variances if its family is diagonal."""
        return self.moments[1]

    @property
    def variance(self) -> Array:
        """The variance of every entry of a Gaussian block, in the shape of `mean`."""
        mean, covariance = self.moments
        variance = jnp.diagonal(covariance, axis1=-2, axis2=-1) if covariance.ndim > mean.ndim else covariance
        return jnp.broadcast_to(variance, mean.shape)  # the rows of a SharedGaussian have one covariance in common

    @property
    def probabilities(self) -> Array:
        """The probability of every category of a categorical block, which is linear in δ."""
        last = -jnp.sum(self.shift, axis=-1, keepdims=True)
        return self.q.probabilities + jnp.concatenate([self.shift, last], axis=-1)


class MixtureView(eqx.Module):
    r"""A block whose q is a mixture, with the joint's expectation parameters (μ_1, …, μ_K, π) displaced by δ.

    The blocks are independent under q, so that the expectation of a factor over a mixture is the average over the
    components, $E_q\log f = \sum_kπ_kE_{q_k}\log f$: `average` shows the factor one component at a time, as the
    `BlockView` that it reads in any other model.

    Args:
        q: the mixture.
        shift: δ, a pytree like `q.expectation()`; None means 0.
    """

    q: Mixture
    shift: Parts
    displaced: bool = eqx.field(static=True)

    def __init__(self, q: Mixture, shift: Parts | None = None):
        self.q, self.displaced = q, shift is not None
        self.shift = jax.tree.map(jnp.zeros_like, q.expectation()) if shift is None else shift

    @property
    def held(self) -> MixtureView:
        """This view with δ left out of derivatives in it."""
        return MixtureView(self.q, jax.lax.stop_gradient(self.shift)) if self.displaced else self

    def average(self, function: Callable[[BlockView, Array], Array]) -> Array:
        """Σ_k π_k function(the view of component k, k)."""
        one = lambda component, shift, index: function(BlockView(component, shift if self.displaced else None), index)
        values = jax.vmap(one)(self.q.components, self.shift.components, jnp.arange(self.q.count))
        weights = BlockView(self.q.choice, self.shift.choice).probabilities
        return jnp.tensordot(weights.astype(values.dtype), values, axes=1)


def view_of(q: Any, shift: PyTree = None) -> Any:
    """The view of a block: a `BlockView`, or a `MixtureView` of a mixture."""
    return MixtureView(q, shift) if q.is_mixture else BlockView(q, shift)


def batch_shape(q: ExponentialFamily) -> tuple[int, ...]:
    """The shape of q's plates: the leading axes over which q holds many independent distributions."""
    return jax.eval_shape(lambda: q.log_partition(q.natural())).shape
