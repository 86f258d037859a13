r"""When has a fit converged? Its distance to the fixed point, estimated from how the steps shrink.

The decrement d = ½⟨n, Fn⟩ of the natural gradient n is the number of nats still to gain only where the Fisher
information F is the bound's curvature. It is not for a diagonal q on a correlated posterior, for coordinate ascent or
for EM, which creep along a valley with small steps; there a small d may be far from the end. So what is judged is the
distance to the fixed point. Near it the steps Δ shrink like a geometric series, Δ_{t+1} ≈ cΔ_t, the rest of the way is
Δ/(1 − c), and with the contraction c = √(d_t/d_{t−1}) that was observed

$$½⟨e, Fe⟩ ≈ ½⟨Δ, FΔ⟩ / (1 − c)^2, \quad e = λ_∗ − λ.$$

It is d again for Newton's method (Δ = n, c ≈ 0), and for any rate ρ where F is the curvature (Δ = ρn, c = 1 − ρ). It is
a KL divergence: at 10⁻⁶ nats no mean is more than 0.0014 standard deviations from its place.

Parameters that are points, as in EM, have no standard deviations, and the distance to a maximum at the boundary (a
noise variance of 0) is infinite. There the rest of the gain is judged, ½⟨e, F(1 − c)e⟩, as F(1 − c) is the bound's
curvature along e.

One small value is not trusted, because a slow direction may still hide behind a fast one and because rounding errors
may cancel by chance: the estimate has to pass several times in a row, or once by a wide margin. If it passes and fails
again and again, rounding errors are as large as the tolerance and the reason is "precision lost".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

_MARGIN = 1e-3  # An estimate below this part of the tolerance need not be confirmed by another.
_FAST = 0.3  # Up to this contraction per step, and if no decrement rose lately, an estimate has to pass twice in a row,
_FAST_PASSES = 2
_SLOW_PASSES = 4  # and otherwise so many times.
_FORGOTTEN = 0.3  # What is left in the next step of a decrement that rose.
_UNKNOWN = 0.999  # The contraction that is assumed before one was observed,
_SLOWEST = 0.9999  # and the largest that rounded decrements can tell from 1.
_FADING = 0.95  # What a decrement counts in the next step for the largest one lately.
_FAILURES = 6  # So many passes that were not confirmed mean that precision is lost,
# if the decrement is at most so many eps, relative to the loss. (Ill-conditioned problems are found in float64 too.)
_NOISE_SINGLE, _NOISE_DOUBLE = 1e3, 1e6


class Watch(NamedTuple):
    """What the test of convergence remembers from one step to the next.

    Attributes:
        before: the sum of the decrements over the last window that ended; infinite at first.
        total: the sum over the window that has begun.
        moved: the longest step of that window, ½⟨Δ, FΔ⟩ in nats.
        contraction: c as it was observed last.
        reach: the length of e in units of that of the natural gradient, as it was observed last.
        risen: a decrement that was larger than the one before, as on a sequence of rounding errors; it is forgotten
            little by little.
        passes: how many estimates in a row were within the tolerance.
        failures: how often an estimate within the tolerance was followed by one that was not, since `peak` last fell to
            half of `lowest`.
        peak: the largest decrement, where those of former steps count less and less.
        lowest: `peak` when it last fell so far.
        share: the part of the tolerance that an estimate has to be within, below 1 after the distance was once found to
            be larger than its estimate (see `accelerate`).
        steps: how many steps were judged.
    """

    before: Array | np.ndarray
    total: Array | np.ndarray
    moved: Array | np.ndarray
    contraction: Array | np.ndarray
    reach: Array | np.ndarray
    risen: Array | np.ndarray
    passes: Array | np.ndarray
    failures: Array | np.ndarray
    peak: Array | np.ndarray
    lowest: Array | np.ndarray
    share: Array | np.ndarray
    steps: Array | np.ndarray


def first_watch() -> Watch:
    """The memory before the first step."""
    real, whole = jnp.result_type(float), jnp.result_type(int)
    number = lambda x: np.asarray(x, real)
    zero, none = number(0.0), np.asarray(0, whole)
    unknown, infinite = number(_UNKNOWN), number(np.inf)
    reach, one = number(1 / (1 - _UNKNOWN)), number(1.0)
    return Watch(infinite, zero, zero, unknown, reach, zero, none, none, zero, infinite, one, none)


def judge(
    watch: Watch, info: Any, count: Array | int, tolerance: ArrayLike, window: int, gain: bool = False
) -> tuple[Watch, Array, Array]:
    """Whether the loop has converged with this step, and whether it never will because of rounding.

    Args:
        watch: the memory of former steps.
        info: what the step reports: `decrement`, `moved`, `inside`.
        count: the number of steps before it.
        tolerance: how large ½⟨e, Fe⟩ may be, in nats.
        window: the number of steps that are judged together, 1 where each decrement can be relied on.
        gain: whether to judge the nats still to gain, and not the distance.

    Returns:
        The new memory, and the two answers.
    """
    # A decrement is a sum of squares: a negative one is a rounding error of at least its own size, and no success.
    size = lambda x: jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).astype(watch.total.dtype)
    tolerance = tolerance * watch.share
    total, moved = watch.total + size(info.decrement), jnp.maximum(watch.moved, size(info.moved))
    # A guard that finds no better q may end the steps within a window, of which only so many are there.
    there = count % window + 1
    ratio = total * (window / there) / jnp.where(watch.before > 0, watch.before, 1.0)
    observed = jnp.minimum(ratio, 1.0) ** (0.5 / window)
    # A decrement that does not fall is rounding error, or random, or follows a step that was too short to tell, and
    # says nothing about the contraction: what was observed before still holds.
    falls = jnp.isfinite(watch.before) & (observed <= _SLOWEST)
    contraction = jnp.where(falls, observed, watch.contraction)
    reached = jnp.sqrt(there * moved / jnp.where(total > 0, total, 1.0)) / (1 - observed)
    reach = jnp.where(falls & (total > 0), reached, watch.reach)
    distance = (reach if gain else reach**2) * total / there
    passed = distance <= tolerance
    passes = jnp.where(passed, watch.passes + 1, 0)
    risen = jnp.maximum(_FORGOTTEN * watch.risen, jnp.where(total > watch.before, total, 0.0))
    erratic = risen > tolerance
    confirmed = passes >= jnp.where((contraction > _FAST) | erratic, _SLOW_PASSES, _FAST_PASSES)
    confirmed = confirmed | ((distance <= _MARGIN * tolerance) & ~erratic)
    ends = (count + 1) % window == 0
    # Where the guard finds no better q, there is no further step that could confirm the estimate.
    converged = jnp.where(info.inside, ends & confirmed, passed)
    # Steps that shrink slowly and unevenly fail now and then as well, but they do shrink.
    peak = jnp.maximum(total, _FADING * watch.peak)
    progress = peak < 0.5 * watch.lowest
    failures = jnp.where(progress, 0, watch.failures) + ((watch.passes > 0) & ~passed)
    lowest = jnp.where(progress, peak, watch.lowest)
    zero = jnp.zeros_like(total)
    restarted = jnp.zeros_like(moved)
    share, steps = jnp.asarray(watch.share), watch.steps + 1
    after = Watch(total, zero, restarted, contraction, reach, risen, passes, failures, peak, lowest, share, steps)
    if window > 1:
        within = watch._replace(total=total, moved=moved, steps=steps)
        after = Watch(*(jnp.where(ends, new, old) for new, old in zip(after, within, strict=True)))
    # Decrements far above the rounding errors of the loss rise and fall for another reason, and steps may still help.
    precision = jnp.finfo(total.dtype).eps * (_NOISE_SINGLE if total.dtype == jnp.float32 else _NOISE_DOUBLE)
    rounding = precision * (1 + jnp.abs(info.objective))
    by_rounding = ~(peak > rounding)
    lost = jnp.asarray((after.failures >= _FAILURES) & (window == 1) & by_rounding)
    return after, converged, lost
