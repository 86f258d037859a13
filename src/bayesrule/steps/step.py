"""The record of one step: derivatives, rates and temperature, as the rule hands them to a family."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ..numerics.pytree import PyTree
from .acceleration import Proposal
from .scaling import Divisor
from .schedule import Scalar


class Step(eqx.Module):
    r"""One step of the rule, with all its numbers: what `Family.moved` takes.

    $$λ ← λ − ρ ∇_μ[E_q \barℓ − τ H(q)] + γ (λ − λ_{t−1})$$
    """

    gradient: PyTree
    """E_q∇ℓ̄ in the shape of θ for a Gaussian; for every other family ∇_μ E_q ℓ̄ in the shape of λ."""
    curvature: Any
    """E_q∇²ℓ̄ in the structure of a Gaussian's precision; None for every other family."""
    rate: Scalar
    """ρ₁, in the rule's own units."""
    precision_rate: Scalar
    """ρ₂, the rate of a Gaussian's precision; equal to `rate` where there is one rate."""
    temperature: Scalar
    """τ."""
    momentum: Any = None
    """γ, or None."""
    previous: Any = None
    """The q before the last step, where there is momentum."""
    reverse: bool = eqx.field(static=True, default=False)
    """Whether to step in μ instead of λ."""
    retraction: bool = eqx.field(static=True, default=False)
    """Whether a Gaussian's precision moves to second order on the manifold of positive-definite matrices."""
    retraction_weight: Any = None
    """A factor of the retraction's second-order term; None for 1. It is 0 where the precision is replaced by a
    measurement instead of moved along the manifold."""
    gain: Any = None
    """How much the whole step lowers the loss to first order, ρ⟨d, Fd⟩ of the natural gradient d. None where the loss
    is not what the derivatives are those of (the delta method's ℓ̄(m)), or nobody asks."""
    divisor: Divisor | None = None
    """What divides the mean's gradient, where that is not the precision."""
    examples: Any = None
    """M, how many examples the batch of this step has; None where there are none, or nobody knows."""
    proposal: Proposal | None = None
    """A q to try before this step, where the steps are accelerated."""

    def curved(self, term: Any) -> Any:
        """The retraction's second-order term, times its weight."""
        return term if self.retraction_weight is None else jnp.asarray(self.retraction_weight, term.dtype) * term

    def shortened(self, factor: Any) -> Step:
        """The same step with rates and momentum times `factor`: the displacement of λ shrinks by it."""
        momentum = None if self.momentum is None else self.momentum * factor
        rate, precision_rate = self.rate * factor, self.precision_rate * factor
        return dataclasses.replace(self, rate=rate, precision_rate=precision_rate, momentum=momentum)
