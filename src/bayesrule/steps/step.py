"""One step of the rule, ready for a family to take."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from .scaling import Divisor


class Step(eqx.Module):
    r"""One step of the rule, ready for a family to take.

    $$λ ← λ − ρ ∇_μ[E_q \barℓ − τ H(q)] + γ (λ − λ_{t−1})$$

    `gradient` and `curvature` are $E_q∇\barℓ$ and $E_q∇^2\barℓ$ for a Gaussian; every other family
    takes $∇_μ E_q\barℓ$ as `gradient` and no curvature.
    """

    gradient: PyTree
    curvature: Any
    rate: Any
    precision_rate: Any
    temperature: Any
    momentum: Any = None
    previous: Any = None
    reverse: bool = eqx.field(static=True, default=False)
    retraction: bool = eqx.field(static=True, default=False)
    divisor: Divisor | None = None

    def shortened(self, factor: Any) -> Step:
        """The same step, `factor` as long: the whole displacement of λ shrinks, momentum included."""
        momentum = None if self.momentum is None else self.momentum * factor
        rate, precision_rate = self.rate * factor, self.precision_rate * factor
        return dataclasses.replace(self, rate=rate, precision_rate=precision_rate, momentum=momentum)
