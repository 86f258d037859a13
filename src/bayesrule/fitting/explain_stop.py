"""What the arithmetic has cost: the condition number at the end of a fit, and the advice that follows from it.

The loop sees rounding errors only where they differ from step to step. A precision S that is formed by the same sums at
every step has the same errors each time, and the fit settles at a wrong S without a sign of it. How wrong is known
beforehand: errors of relative size eps in S, scaled to a unit diagonal, change its smallest eigenvalue by the fraction
eps·κ, where κ is the condition number of the scaled matrix. (The scale of the columns does not matter: the errors of a
Cholesky factorisation do not depend on it.) So κ is computed once, after the last step. Variances that are differences
of larger numbers, as a Gaussian process has them, lose as many digits as the numbers are larger.
"""

from __future__ import annotations

import numpy as np

from ..families.base import Family
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.warm_up import WarmUp
from .progress import one_blas_thread
from .reason import Reason

# The largest eps·κ. A variance is then off by one part in a thousand for each eps of error in S, and S, a sum over many
# rows, has errors of several eps. It is κ = 8e3 in float32 and 5e12 in float64.
_LARGEST_LOSS = 1e-3
_EXACT_SIZE = 300  # Up to this size κ comes from all eigenvalues, above from a few iterations.
_RECENT = 10  # How many steps are compared with as many before them.
_SLOW = 0.9  # The contraction of a step above which a fit is slow.
_SHORT = 1e-2  # The decrement in nats up to which rounding may be why a step changes nothing.
_MATRICES = 256  # Of a larger batch so many matrices are looked at.


def explain_stop(
    reason: Reason, q: Family, trace: dict[str, np.ndarray], tolerance: float | None
) -> tuple[Reason, str | None]:
    """The reason why a fit with a tolerance ended, judged again with the arithmetic in mind, and what to do about it.

    Args:
        reason: why the loop ended.
        q: the last q.
        trace: the recorded history.
        tolerance: the fit's; None for none.

    Returns:
        The reason, which is "precision lost" where rounding made the loop end as it did or kept it from ending, and an
        explanation where there is something to do.
    """
    if tolerance is None or reason in (Reason.NOT_FINITE, Reason.INTERRUPTED):
        return reason, None
    # A fit whose steps were used up while they shrank fast was only too short; one that got nowhere was not.
    contraction = _recent_contraction(trace)
    too_short = reason is Reason.STEPS and (contraction is None or contraction < _SLOW)
    unresolved = Reason.STEPS if too_short else Reason.PRECISION_LOST
    condition, eps = worst_condition(q)
    if eps * condition > _LARGEST_LOSS:
        return unresolved, _ill_conditioned(condition, eps)
    ratio, eps = worst_cancellation(q)
    if eps * ratio > _LARGEST_LOSS:
        return unresolved, _cancelled(ratio, eps)
    if reason is Reason.PRECISION_LOST or (reason is Reason.STEPS and _stands_still(trace)):
        return Reason.PRECISION_LOST, _noisy(trace, tolerance)
    return reason, None


def explain_slow(rule: Rule, trace: dict[str, np.ndarray], tolerance: float, full_batch: bool) -> str | None:
    """What helps a fit whose steps were used up while they shrank slowly; None if they did not, or nothing is known.

    Args:
        rule: the rule.
        trace: the recorded history.
        tolerance: the fit's.
        full_batch: whether each step saw all data.
    """
    contraction = _recent_contraction(trace)
    if rule.points.random or not full_batch or contraction is None or not _SLOW < contraction < 1:
        return None
    distance = _typical(trace["decrement"][-_RECENT:]) / (1 - contraction) ** 2
    more = max(1.0, np.log(tolerance / distance) / (2 * np.log(contraction)))
    advice = "raise steps="
    if not rule.guard.evaluates:
        advice += ", or give the rule guard=Backtracking(monotone=True), with which fit() accelerates plain steps"
    return f"The steps shrink by {1 - contraction:.1%} each, so that about {more:.0g} more are needed: {advice}."


def explain_cold(rule: Rule, state: State) -> str | None:
    """That a fit ended before its warm-up, so that q is narrower than a posterior; None if it did not.

    Args:
        rule: the rule.
        state: the state that the fit returns.
    """
    temperature = rule.steps.temperature
    if state.horizon is None or not isinstance(temperature, WarmUp) or int(state.count) == 0:
        return None
    reached = float(temperature.at(int(state.count) - 1, int(state.horizon)))
    if reached >= 1:
        return None
    return (
        f"After {int(state.count)} of {int(state.horizon)} planned steps the temperature has risen to {reached:.2g}, "
        "so that q is narrower than the posterior, whose temperature is 1: take the other steps (fit from this result, "
        "with as many as are left), plan fewer, or give the rule temperature=1.0."
    )


def explain_skipped(reason: Reason, skipped: int, limit: int) -> str | None:
    """How many batches were skipped because they were not finite, and what to do about it; None if none were.

    Args:
        reason: why the fit ended.
        skipped: how many were skipped.
        limit: how many may be.
    """
    if not skipped:
        return None
    batches = "1 batch was" if skipped == 1 else f"{skipped} batches were"
    said = f"{batches} skipped because the loss or one of its derivatives was not finite there"
    if reason is not Reason.NOT_FINITE:
        return f"{said}: look for NaN, infinities or extreme values in the data."
    return (
        f"{said}, and another is not finite, which is more than skip_nonfinite={limit} allows: if they are few rows of "
        "the data, mend or remove them, or allow more; if every batch is so by now, q has diverged: lower the rate."
    )


def _recent_contraction(trace: dict[str, np.ndarray]) -> float | None:
    """By which factor the last steps have shrunk from one to the next; None where there are too few to tell."""
    recent = trace.get("decrement", np.zeros(0))[-2 * _RECENT :]
    if len(recent) < 2 * _RECENT or not np.all(np.isfinite(recent)):
        return None
    return (_typical(recent[_RECENT:]) / _typical(recent[:_RECENT])) ** (0.5 / _RECENT)


def _typical(decrements: np.ndarray) -> float:
    """The geometric mean of the absolute values."""
    return float(np.exp(np.mean(np.log(np.abs(decrements.astype(float)) + 1e-300))))


def worst_condition(q: Family) -> tuple[float, float]:
    """The largest condition number of q's precisions, scaled to unit diagonal, and the eps of its arithmetic."""
    worst, worst_eps = 1.0, 0.0
    for matrices in q.precision_matrices():
        eps = float(np.finfo(matrices.dtype).eps)
        with one_blas_thread():
            some = _some(np.asarray(matrices)).astype(float)
            condition = max(map(condition_number, some), default=1.0)
        if eps * condition > worst_eps * worst:
            worst, worst_eps = condition, eps
    return worst, worst_eps


def worst_cancellation(q: Family) -> tuple[float, float]:
    """The largest of q's `cancellations`, and the eps of its arithmetic."""
    worst, worst_eps = 1.0, 0.0
    for ratios in q.cancellations():
        # A variance that came out as 0 or negative has no correct digit.
        values = np.asarray(ratios, float)
        ratio = float(np.max(np.where(values >= 0, values, np.inf), initial=1.0))
        eps = float(np.finfo(ratios.dtype).eps)
        if eps * ratio > worst_eps * worst:
            worst, worst_eps = ratio, eps
    return worst, worst_eps


def _some(matrices: np.ndarray) -> np.ndarray:
    """A batch of matrices as one axis, with at most `_MATRICES` of them."""
    batch = matrices.reshape((-1, *matrices.shape[-2:]))
    return batch[:: -(-len(batch) // _MATRICES)] if len(batch) else batch


def condition_number(matrix: np.ndarray) -> float:
    """The condition number of a symmetric matrix that is scaled to unit diagonal; infinite where it is not definite.

    >>> round(condition_number(np.array([[1.0, 0.99e3], [0.99e3, 1e6]])))
    199
    """
    diagonal = np.diagonal(matrix)
    if not matrix.size:
        return 1.0
    if not (np.all(np.isfinite(matrix)) and np.all(diagonal > 0)):
        return np.inf
    scale = 1 / np.sqrt(diagonal)
    scaled = scale[:, None] * matrix * scale
    if len(scaled) > _EXACT_SIZE:
        return _estimated_condition(scaled)
    values = np.linalg.eigvalsh(scaled)
    return float(values[-1] / values[0]) if values[0] > 0 else np.inf


def _estimated_condition(matrix: np.ndarray) -> float:
    """λ_max/λ_min by power iterations with the matrix and its inverse, a lower bound that is close to it."""
    try:
        np.linalg.cholesky(matrix)
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        return np.inf
    product = 1.0
    for operator in (matrix, inverse):
        vector, length = np.random.default_rng(0).standard_normal(len(matrix)), 1.0
        for _ in range(20):
            vector = operator @ vector
            length = np.linalg.norm(vector)
            vector = vector / length
        product *= float(length)
    return product


def _stands_still(trace: dict[str, np.ndarray]) -> bool:
    """Whether nothing changed in the last steps although their rate was not 0, and they were short.

    (Long ones that change nothing lead to and fro between two places with the same loss.)
    """
    last = [trace.get(name, np.zeros(0))[-4:] for name in ("objective", "decrement", "rate")]
    whole = all(len(values) == 4 and np.all(values == values[0]) for values in last)
    return whole and bool(last[2][0] > 0) and bool(0 < np.abs(last[1][0]) < _SHORT)


def _ill_conditioned(condition: float, eps: float) -> str:
    size = f"condition number {condition:.0e}" if np.isfinite(condition) else "an infinite condition number"
    otherwise = "remove columns that are nearly combinations of others, or give the parameters a stronger prior"
    return _unresolved(f"The posterior's precision, scaled to unit diagonal, has {size}", eps, otherwise)


def _cancelled(ratio: float, eps: float) -> str:
    size = f"{ratio:.0e} times as large" if np.isfinite(ratio) else "larger without limit"
    otherwise = "give the outputs a prior that is less wide, or the observations more noise"
    return _unresolved(f"The outputs' variances are differences of numbers {size}", eps, otherwise)


def _unresolved(what: str, eps: float, otherwise: str) -> str:
    """That the arithmetic cannot resolve something, and what to do: use float64, or, if it is that, something else."""
    single = eps > 1e-10
    kind = f"float{32 if single else 64} (eps {eps:.0e})"
    float64 = "run in float64 with jax.config.update('jax_enable_x64', True) before the first array is made"
    return f"{what}, which {kind} cannot resolve: {float64 if single else otherwise}."


def _noisy(trace: dict[str, np.ndarray], tolerance: float) -> str:
    recent = np.abs(trace.get("decrement", np.zeros(0))[-10:])
    level = f" of up to {np.max(recent):.0e} nats" if len(recent) and np.all(np.isfinite(recent)) else ""
    single = trace["objective"].dtype == np.float32
    advice = "run in float64 with jax.config.update('jax_enable_x64', True), or raise" if single else "raise"
    return (
        f"Rounding errors of the loss's derivatives move q to and fro by steps{level}, which hides whether the "
        f"tolerance of {tolerance:.0e} nats is reached: {advice} the tolerance."
    )
