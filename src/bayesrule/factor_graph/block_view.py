"""A block as a factor sees it: its expectation parameters, or its moments, or itself, near where it is."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.base import ExponentialFamily


class BlockView(eqx.Module):
    """q displaced by δ in its expectation parameters, right at δ = 0 and to first order around it.

    The derivative of anything that is written in these terms with respect to δ, at δ = 0, is its gradient with respect
    to μ: the message. Moments are q's own plus what δ adds, so that a small variance is never the difference of two
    large numbers.
    """

    q: Any
    shift: PyTree
    still: PyTree
    _moments: Any
    moving: bool = eqx.field(static=True)

    def __init__(self, q: Any, shift: PyTree = None):
        self.q, self.still, self.moving = q, q.expectation(), shift is not None
        self.shift = jax.tree.map(jnp.zeros_like, self.still) if shift is None else shift
        # Once for all factors, so that what they say of the moments is added up before it is carried back to μ.
        self._moments = q.moments(self.shift) if hasattr(getattr(q, "of", q), "moments") else None

    @property
    def expectation(self) -> PyTree:
        """μ."""
        return jax.tree.map(jnp.add, self.still, self.shift)

    @property
    def member(self) -> Any:
        """The member of the family that has these expectation parameters."""
        return self.q.shifted_in_mu(self.shift)

    @property
    def moments(self) -> tuple[Array, Array]:
        """The mean and the covariance of a Gaussian."""
        if self._moments is None:
            raise ValueError(
                f"this takes the mean and covariance of a Gaussian block, and got a {type(self.q).__name__}."
            )
        return self._moments

    @property
    def mean(self) -> Array:
        """E θ of a Gaussian, as one vector after any plates."""
        return self.moments[0]

    @property
    def covariance(self) -> Array:
        """Cov θ of a Gaussian: a matrix, or a number for each entry of a diagonal one."""
        return self.moments[1]

    @property
    def variance(self) -> Array:
        """The variance of every entry of a Gaussian."""
        mean, spread = self.moments
        spread = jnp.diagonal(spread, axis1=-2, axis2=-1) if spread.ndim > mean.ndim else spread
        return jnp.broadcast_to(spread, mean.shape)  # rows may share theirs

    @property
    def probabilities(self) -> Array:
        """Every category's probability."""
        last = -jnp.sum(self.shift, axis=-1, keepdims=True)
        return self.q.probabilities + jnp.concatenate([self.shift, last], axis=-1)


def batch_shape(q: ExponentialFamily) -> tuple[int, ...]:
    """The axes over which q is many distributions: its plates."""
    return jax.eval_shape(lambda: q.log_partition(q.natural())).shape
