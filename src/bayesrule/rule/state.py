"""Where the rule is, and what one step saw."""

from __future__ import annotations

from typing import Any

import equinox as eqx
from jaxtyping import Array, PyTree


class State(eqx.Module):
    """Where the rule is: q, the step count, and what momentum, averaging, scaling, loss and search carry along."""

    q: Any
    count: Array
    previous: Any = None
    average: PyTree = None
    aux: PyTree = None
    scale: PyTree = None
    search: Any = None

    @property
    def found(self) -> Any:
        """The former name of `search`."""
        return self.search


class Info(eqx.Module):
    """What one step saw.

    `objective` is ℓ̄ at the points used, `rate` the rate taken, in the units it was given in. `guard` says that the
    plain step would have left Ω, `fraction` how much of it was taken. `finite` and `inside` say whether the loss and
    its derivatives were finite numbers and the new λ in Ω; what was not finite leaves q as it was. `bound` is
    the evidence lower bound and `decrement` the nats still to gain (½⟨∇, F∇⟩ of the natural gradient), where they
    were asked for. `loss` is what a component of a mixture lowers, its E_q ℓ̄ − τH(q), `evaluations` how often the guard
    measured it. `blocks` is the fraction of its step that each block of a sweep took; a sweep that is
    not followed by its bound (on mini-batches) has as `objective` the factors that touch the last block.
    """

    objective: Array
    rate: Array
    guard: Array
    fraction: Array
    finite: Array
    inside: Array
    bound: Any = None
    decrement: Any = None
    loss: Any = None
    evaluations: Any = None
    blocks: Any = None

    @property
    def looks(self) -> Any:
        """The former name of `evaluations`."""
        return self.evaluations
