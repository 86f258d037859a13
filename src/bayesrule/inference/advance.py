r"""The rule's step from what was measured elsewhere: one program for the search for modes and for the Gaussian's steps.

The program does not know the model, only how many numbers it has. Newton's method is the same step at ρ = 1 from a q
whose precision is the Hessian: $S ← S + (H − S) = H$, $m ← m − H^{-1}∇\barℓ$; the guard's term of second order in H − S
vanishes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Float

from ..curvature.hessian import Hessian
from ..curvature.measurement import Measurement
from ..families.gaussian.full import Gaussian
from ..numerics.programs import compiled
from ..objectives.external import External
from ..points.sampling import QuasiMonteCarlo
from ..rule.rule import Rule
from ..steps.guards import Retraction
from ..steps.steps import Steps

if TYPE_CHECKING:
    from .density import Density

LANES, MOST_IN_LANES = 8, 32
"""How many steps one call takes side by side, and up to how many numbers: with more of them one at a time."""


def variational_rule(samples: int) -> Rule:
    r"""The rule that `infer` follows: $S ← (1−ρ)S + ρE_q∇^2\barℓ$, $m ← m − ρS^{-1}E_q∇\barℓ$ at fixed points.

    >>> print(variational_rule(64).points)
    QuasiMonteCarlo(64)
    """
    points, guard = QuasiMonteCarlo(samples), Retraction()
    return Rule(Gaussian, points, Hessian(), Steps(1.0), guard, name="infer", section="3.1")


_RULE = variational_rule(64).replace(guard=Retraction().without_report(), name="infer")


def step_from(
    rate: Array, mean: Array, precision: Array, value: Array, gradient: Array, hessian: Array
) -> tuple[Array, ...]:
    """What a step of rate ρ from a measurement leads to: the decrement, whether it is inside of Ω, mean and precision.

    The points of the rule are not asked for, because the measurement is there: one program serves any number of them.
    """
    rule = _RULE.replace(steps=Steps(rate), name="infer")
    state, measurement = rule.init(Gaussian(mean, precision)), Measurement(value, gradient, hessian)
    after, info, _ = rule.advance(External(1.0), state, measured=measurement, diagnose=True, strict=True)
    return info.decrement, info.inside & info.finite, after.q.mean, after.q.precision


@compiled(rare=True)
def _advance(rates: Any, means: Any, precisions: Any, values: Any, gradients: Any, hessians: Any) -> tuple[Array, ...]:
    """What a step of rate ρ leads to in every lane, and how it went."""
    return jax.vmap(step_from)(rates, means, precisions, values, gradients, hessians)


def advance(
    density: Density,
    rate: float,
    means: Float[np.ndarray, "B P"],
    precisions: Float[np.ndarray, "B P P"],
    values: Float[np.ndarray, " B"],
    gradients: Float[np.ndarray, "B P"],
    hessians: Float[np.ndarray, "B P P"],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps of Gaussians, each from its own measurement.

    Args:
        density: the density, for its dtype.
        rate: ρ.
        means: m of each.
        precisions: S of each.
        values: E_q ℓ̄ of each.
        gradients: E_q∇ℓ̄.
        hessians: E_q∇²ℓ̄.

    Returns:
        The decrements before the steps, whether each leads to a positive-definite precision, the means and the
        precisions after them.
    """
    lanes = LANES if density.size <= MOST_IN_LANES else 1
    parts = []
    for first in range(0, len(means), lanes):
        numbers = (means, precisions, values, gradients, hessians)
        filled = [_filled(x[first : first + lanes], lanes, density.dtype) for x in numbers]
        found = _advance(np.full(lanes, rate, density.dtype), *filled)
        parts.append([np.asarray(leaf)[: len(means) - first] for leaf in found])
    decrements, good, means, precisions = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    wide = lambda x: np.asarray(x, np.float64)
    return wide(decrements), good, wide(means), wide(precisions)


def prepare(density: Density) -> None:
    """Compile the program for so many numbers, while there is something else to wait for."""
    size = density.size
    one, identity = np.zeros((1, size)), np.eye(size)[None]
    advance(density, 1.0, one, identity, np.zeros(1), one, identity)


def _filled(x: np.ndarray, lanes: int, dtype: Any) -> np.ndarray:
    """The arrays, and the last one again until there are so many."""
    filled = np.empty((lanes, *x.shape[1:]), dtype)
    filled[: len(x)], filled[len(x) :] = x, x[-1]
    return filled
