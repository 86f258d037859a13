r"""Is there a posterior at all? Under a flat prior the data may leave a direction free, and then there is none.

Two columns that are equal, or classes that a linear function separates, make $\int e^{-\bar ℓ(θ)}\,dθ$ infinite under a
flat prior: along some direction the loss does not rise, however far one goes. No fit converges there. The mean is
arbitrary or runs off, and the width is rounding error. `explain_improper` looks at the directions that the loss curves
least in, and at the one in which the mean has moved, a hundred standard deviations away on both sides: a loss that is
log-concave and proper has risen there by about a hundred nats or more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..objectives.base import AbstractObjective
from ..rule.state import State
from .reason import Reason

_MOST_PARAMETERS = 500  # With more, the Hessian would take longer than the fit.
_DIRECTIONS = 3  # So many of the least curved directions are looked at.
_FAR = 100.0  # How far, in standard deviations,
_FARTHEST = 1e18  # and as a number, where the curvature has vanished.
_RISE = 1.0  # A proper loss has risen by more than so many nats there.
_ADVICE = "give the parameters a prior (regularizer=1.0, say; prior_precision= of an estimator)"
_STILL_MOVING = 1e-3  # A fit whose last decrement is above this many nats has not come to rest.


def may_be_improper(objective: AbstractObjective, q: Any, reason: Reason, trace: dict[str, np.ndarray]) -> bool:
    """Whether `explain_improper` has a reason to look: no proper prior, and steps that have not come to rest."""
    if not objective.takes_data or not objective.splits_batches or not isinstance(q, Gaussian | DiagonalGaussian):
        return False
    moving = trace.get("decrement", np.zeros(0))
    # The decrement of a single step is that of the start, and says nothing about where it led.
    at_rest = len(moving) < 2 or bool(np.abs(moving[-1]) <= _STILL_MOVING)
    return (reason is Reason.PRECISION_LOST or not at_rest) and not objective.regularizer.normalized(q)


def explain_improper(objective: AbstractObjective, state: State, data: PyTree) -> str | None:
    """Say that the posterior is improper, in which direction and what to do; None where it is proper, or not known.

    Args:
        objective: the fit's.
        state: its last state, with a Gaussian q.
        data: all data.
    """
    vector, unravel = ravel_pytree(state.q.mean)
    if not 0 < vector.size <= _MOST_PARAMETERS:
        return None
    mean = np.asarray(vector, float)
    curvature = np.asarray(_hessian(objective, data, state.aux, state.q.mean), float)
    if not np.all(np.isfinite(curvature)) or not np.all(np.isfinite(mean)):
        return None
    eps = float(np.finfo(vector.dtype).eps)
    directions = [*_least_curved(curvature, eps), _along(mean, curvature)]
    ends = np.stack([mean + sign * step for step in directions for sign in (1.0, -1.0)])
    places = jax.vmap(unravel)(jnp.asarray(np.vstack([mean[None], ends]), vector.dtype))
    start, *values = np.asarray(_losses(objective, data, state.aux, places), float)
    rises = np.nan_to_num(np.asarray(values) - start, nan=np.inf).reshape(-1, 2)
    flat = np.flatnonzero(np.any(rises < _RISE, axis=1) & np.any(np.asarray(directions) != 0, axis=1))
    if not np.isfinite(start) or not len(flat):
        return None
    free = next((k for k in flat if np.all(rises[k] < _RISE)), None)
    if free is None:
        return (
            "The posterior is improper: no prior holds the parameters, and the loss falls for ever in the direction in "
            "which they have grown, as it does for classes that a linear function separates: "
            f"{_ADVICE}."
        )
    names = _largest_entries(directions[free] * np.sqrt(np.maximum(np.diagonal(curvature), 0.0)), state.q.mean)
    names = names or _largest_entries(directions[free], state.q.mean)
    return (
        f"The posterior is improper: neither data nor prior determine a combination of {names} (in {vector.dtype}), as "
        "they do not where a column is a combination of others, or constant beside an intercept. "
        f"Leave one of them out, or {_ADVICE}."
    )


def _loss(objective: AbstractObjective, data: PyTree, aux: PyTree, theta: PyTree) -> Array:
    """ℓ̄(θ) on all data; at a fixed key, for losses that are random."""
    return objective.data(theta, data, aux, jax.random.key(0))[0] + objective.regularizer.at_mean(
        DiagonalGaussian(theta)
    )


@compiled(rare=True)
def _losses(objective: AbstractObjective, data: PyTree, aux: PyTree, places: PyTree) -> Array:
    """ℓ̄ at places along a leading axis."""
    return jax.lax.map(lambda theta: _loss(objective, data, aux, theta), places)


@compiled(rare=True)
def _hessian(objective: AbstractObjective, data: PyTree, aux: PyTree, mean: PyTree) -> Array:
    """∇²ℓ̄ at one place, for the parameters as one vector."""
    vector, unravel = ravel_pytree(mean)
    return jax.hessian(lambda vector: _loss(objective, data, aux, unravel(vector)))(vector)


def _least_curved(hessian: np.ndarray, eps: float) -> list[np.ndarray]:
    """Steps of `_FAR` standard deviations along the least curved directions of the Hessian, scaled to unit diagonal."""
    diagonal = np.diagonal(hessian)
    empty = np.flatnonzero(diagonal <= 0)
    if len(empty):  # Entries that the loss does not depend on at all, or no longer.
        return [_FARTHEST * np.eye(len(hessian))[k] for k in empty[:_DIRECTIONS]]
    scale = 1 / np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(scale[:, None] * hessian * scale)
    least = np.maximum(values, len(values) * eps * values[-1])
    steps = [scale * vectors[:, k] * _FAR / np.sqrt(least[k]) for k in range(min(_DIRECTIONS, len(values)))]
    return [step * min(1.0, _FARTHEST / np.max(np.abs(step))) for step in steps]


def _along(mean: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """A step of `_FAR` standard deviations in the direction of the mean, or of the length `_FARTHEST`."""
    largest = np.max(np.abs(mean))
    if largest == 0:
        return mean
    square = mean / largest @ hessian @ mean / largest
    return mean / largest * (min(_FARTHEST, _FAR / np.sqrt(square)) if square > 0 else _FARTHEST)


def _largest_entries(direction: np.ndarray, mean: PyTree) -> str:
    """The names of the entries that have a part in a direction: "θ['w'][1], θ['w'][3]"."""
    names = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(mean)[0]:
        place = jax.tree_util.keystr(path)
        names += [f"θ{place}" + "".join(f"[{k}]" for k in index) for index in np.ndindex(np.shape(leaf))]
    sizes = np.abs(direction)
    chosen = [k for k in np.argsort(-sizes) if sizes[k] > 0.05 * sizes.max() > 0]
    return ", ".join(names[k] for k in sorted(chosen[:4])) + (", …" if len(chosen) > 4 else "")
