"""A temperature that rises to 1 along a fit, whose number of steps it need not know beforehand."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .schedule import Planned


class WarmUp(Planned):
    r"""A temperature that rises from τ₀ to 1 over a part of the steps: $τ_t = τ_0 + (1 − τ_0)\,t/(fT)$ until t = fT.

    T is the number of steps that are planned (`State.horizon`): `fit` and `run` know it, and `rule.init(…, horizon=T)`
    takes it for a loop of one's own. Where it is not known the temperature is 1.

    Draws from a posterior that is still far from its place only add noise to the gradients. So q is narrow at first,
    and its mean learns almost as by the delta method. After the rise the temperature is 1, and q ends as a posterior
    that is as wide as prior and data say.

    Args:
        start: τ₀, above 0 and at most 1.
        fraction: f, the part of the steps over which the temperature rises, above 0 and at most 1.

    >>> [round(float(WarmUp(0.01, 0.5).at(t, 100)), 3) for t in (0, 25, 50, 99)]
    [0.01, 0.505, 1.0, 1.0]
    >>> WarmUp().at(0, None)
    1.0
    """

    start: Any
    fraction: Any

    def __init__(self, start: float = 0.01, fraction: float = 0.5):
        for name, value in (("start", start), ("fraction", fraction)):
            if not 0 < value <= 1:
                raise ValueError(f"WarmUp: {name}= is above 0 and at most 1, got {value:g}.")
        self.start, self.fraction = start, fraction

    def at(self, count: Any, horizon: Any) -> Any:
        """τ after `count` of `horizon` steps."""
        if horizon is None:
            return 1.0
        steps = jnp.maximum(horizon, 1)  # A plan of no steps at all is at its start.
        taken = jnp.minimum(jnp.asarray(count, float) / (self.fraction * steps), 1.0)
        return self.start + (1 - self.start) * taken

    def __repr__(self) -> str:
        return f"WarmUp({self.start:g}, {self.fraction:g})"
