"""Maximise a score over positive hyper-parameters: L-BFGS-B in their logarithms.

The one numerical optimiser of the library. Empirical Bayes and the Gaussian processes' kernels use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..numerics.pytree import PyTree
from .progress import one_blas_thread


@dataclass(frozen=True)
class Maximum:
    """What `maximize` returns.

    Attributes:
        hyper: the hyper-parameters, of the structure of the start.
        value: the score at them.
        converged: whether the search ended because the score rises no further.
        evaluations: how often the score was evaluated.
    """

    hyper: PyTree
    value: float
    converged: bool
    evaluations: int


def maximize(
    score: Callable[[PyTree], tuple[Any, PyTree]],
    hyper: PyTree,
    *,
    evaluations: int = 100,
    within: float | None = None,
    limits: tuple[PyTree, PyTree] | None = None,
    held: Sequence[str] = (),
    relative_gain: float = 1e-14,
) -> Maximum:
    """Maximise a score over positive hyper-parameters with scipy's L-BFGS-B, in their logarithms.

    Args:
        score: score(log_hyper) returns the score and its gradient in the logarithms. Where either is not finite, the
            line search turns back.
        hyper: where to start, a pytree of positive numbers.
        evaluations: the largest number of evaluations of the score.
        within: keep every hyper-parameter within this factor of its start.
        limits: keep every hyper-parameter between these two, pytrees like `hyper`, instead; a start outside is moved
            to the nearer limit.
        held: the names of a dict's entries that are kept at their start.
        relative_gain: end the search when the score rises by less than this fraction of itself.

    >>> import jax, jax.numpy as jnp
    >>> best = maximize(jax.value_and_grad(lambda logs: -((logs - 1.0) ** 2)), 1.0)
    >>> round(float(best.hyper), 3)
    2.718
    """
    from scipy.optimize import minimize

    flat, shapes, structure = _ravel(hyper), list(map(np.shape, jax.tree.leaves(hyper))), jax.tree.structure(hyper)
    check_positive(flat, hyper)

    def unflatten(vector: np.ndarray) -> PyTree:
        parts = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        return structure.unflatten(jnp.asarray(part.reshape(s), float) for part, s in zip(parts, shapes, strict=True))

    def negative(log_hyper: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = score(unflatten(log_hyper))
        slope = _ravel(gradient)
        if not (np.isfinite(float(value)) and np.all(np.isfinite(slope))):
            return np.inf, np.zeros_like(log_hyper)
        return -float(value), -slope

    start = np.log(flat)
    reach = np.full(len(start), np.inf if within is None else np.log(within))
    if held:
        is_held = {name: np.full(np.shape(value), name in held) for name, value in hyper.items()}
        reach[_ravel(is_held) > 0] = 0.0
    down, up = -reach, reach  # How far each logarithm may move.
    if limits is not None:
        with np.errstate(divide="ignore"):
            # A lower limit that is not positive is none.
            lowest, highest = (np.log(np.maximum(_ravel(limit), 0.0)) for limit in limits)
        start = np.clip(start, lowest, highest)
        down, up = lowest - start, highest - start
    is_bounded = within is not None or limits is not None
    with one_blas_thread():
        first = negative(start)
        # Where every variable has bounds, L-BFGS-B takes the whole gradient for its first step, from where nothing is
        # known yet, to a corner of the bounds. In units in which that step has the length 1 at most, it is a step by a
        # factor e. (Without bounds L-BFGS-B shortens its first step by itself.)
        free = np.where(down < up, first[1], 0.0)
        unit = 1.0 if not is_bounded else 1 / np.sqrt(max(float(np.linalg.norm(free)), 1.0))
        known = {start.tobytes(): first}

        def in_units(place: np.ndarray) -> tuple[float, np.ndarray]:
            log_hyper = start + unit * place
            value, slope = known.pop(log_hyper.tobytes(), None) or negative(log_hyper)
            return value, unit * slope

        bounds = list(zip(down / unit, up / unit, strict=True))
        options = {"maxfun": evaluations, "ftol": relative_gain, "gtol": 1e-6 * unit}
        end = minimize(in_units, np.zeros_like(start), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    # L-BFGS-B may give up on a line search at the maximum itself, where rounding hides any gain. So a gradient of less
    # than 1e-3 nats, for a change of the hyper-parameters by a factor e, counts as converged too.
    small_gradient = bool(np.max(np.abs(end.jac)) < 1e-3 * unit)
    converged = (bool(end.success) or small_gradient) and bool(np.all(np.isfinite(end.x)))
    return Maximum(unflatten(np.exp(start + unit * end.x)), -float(end.fun), converged, int(end.nfev))


def _ravel(tree: PyTree) -> np.ndarray:
    """All leaves as one vector, on the host: single operations of JAX would each compile a program."""
    return np.concatenate([np.zeros(0), *(np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree))])


def check_positive(values: Array | np.ndarray, hyper: PyTree) -> None:
    """Raise unless there are hyper-parameters and all are positive."""
    if values.size == 0 or not bool(np.all(np.asarray(values) > 0)):
        raise ValueError(
            f"Hyper-parameters must be positive numbers, because they are searched in their logarithms; got {hyper}."
        )
