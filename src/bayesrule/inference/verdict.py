"""How far to trust an approximation: one word, one sentence, and the numbers behind them.

Importance weights estimate the means and standard deviations of the density itself. "trust" promises that every mean is
within 0.1 standard deviations and every standard deviation within 10 %; so the shifts that the weights show must be
smaller than that by their own errors, and the weights must be such that they can be believed (Pareto k̂). Where they
cannot, as with many numbers, draws that Hamiltonian Monte Carlo has moved may say the same (`moves`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from .importance import Importance, Shift

Trust = Literal["trust", "means only", "do not trust"]
Source = Literal["approximation", "weights", "moves"]

MEAN_LIMIT, WIDTH_LIMIT = 0.1, 0.1
"""What "trust" promises: of means in standard deviations, of standard deviations as a fraction."""

KHAT_LIMIT = 0.7
"""Above it averages with importance weights have no use (Vehtari et al., 2024)."""

REFINED_KHAT = 0.6
"""Up to it weighted draws are trusted where the approximation itself is not."""

REFINED = 0.8
"""And which part of their number they must be worth."""

WORTH_REFINING = 0.03
"""Shifts of a mixture above this are corrected by its weights, where these can be relied on."""

WORTH_MOVING = 0.05
"""Shifts above this are corrected by moved draws: of many numbers chance alone shows one of nearly that size."""

LEAST_EFFECTIVE = 200.0
"""How many draws the weighted ones must be worth, so that the shifts can be told from noise."""


EVEN = 0.9
"""Weights that are worth so large a part of their number are nearly equal, and the shape of their tail says nothing."""


class Judgement(NamedTuple):
    """What the weights say of an approximation.

    Attributes:
        trust: "trust", "means only" or "do not trust".
        source: of which draws that holds: those of the approximation itself, importance-resampled ones ("weights"), or
            draws that Hamiltonian Monte Carlo has moved ("moves").
        mean_shift: the largest shift of a mean, in standard deviations.
        width_shift: the largest relative error of a standard deviation.
        mean_of: the number whose mean is shifted most.
        width_of: the number whose standard deviation is off most.
        by_moves: whether moved draws have judged it, and not importance weights.
    """

    trust: Trust
    source: Source
    mean_shift: float
    width_shift: float
    mean_of: str
    width_of: str
    by_moves: bool = False

    @property
    def refined(self) -> bool:
        """Whether the draws to rely on are others than those of the approximation."""
        return self.source != "approximation"

    @property
    def within_limits(self) -> bool:
        """Whether the shifts of the approximation itself are no larger than "trust" promises."""
        return self.mean_shift <= MEAN_LIMIT and self.width_shift <= WIDTH_LIMIT


def judge(weighted: Importance, shift: Shift, names: list[str], *, mixture: bool, margin: float = 1.0) -> Judgement:
    """Judge an approximation by its importance weights and the shifts that they show.

    Args:
        weighted: the weights of fresh draws.
        shift: what they say of every number's mean and standard deviation.
        names: of these numbers.
        mixture: whether the approximation is a mixture that was fitted to weighted draws. Only its weighted draws are
            trusted where itself is not: a Gaussian's tails may be too short for its weights to have seen what is
            missing, with a k̂ that does not show it.
        margin: by which factor the shifts are taken larger than they are shown.
    """
    means, widths = np.abs(shift.mean), np.abs(shift.width)
    worst_mean, worst_width = int(np.argmax(means)), int(np.argmax(widths))
    even = weighted.effective >= EVEN * len(weighted.log_weights)
    believed = (weighted.khat < KHAT_LIMIT or even) and weighted.effective >= LEAST_EFFECTIVE
    # With k̂ near its limit the weights have not seen all of the tails, and the widths are off by more than they show.
    margin = margin + float(np.clip(weighted.khat - 0.3, 0.0, 0.5))
    good_means = bool(np.all(margin * means + shift.mean_error <= MEAN_LIMIT))
    good_widths = bool(np.all(margin * widths + shift.width_error <= WIDTH_LIMIT))
    trust: Trust = "do not trust"
    source: Source = "approximation"
    refinable = mixture and weighted.khat < REFINED_KHAT and weighted.effective >= REFINED * len(weighted.log_weights)
    if believed and good_means and good_widths:
        trust = "trust"
        # Within what is promised, and still not as good as the weights can make it.
        source = "weights" if refinable and max(means[worst_mean], widths[worst_width]) > WORTH_REFINING else source
    elif refinable:
        trust, source = "trust", "weights"
    elif believed and good_means:
        trust = "means only"
    return Judgement(
        trust, source, float(means[worst_mean]), float(widths[worst_width]), names[worst_mean], names[worst_width]
    )


def judge_by_moves(shift: Shift, names: list[str]) -> Judgement:
    """Judge an approximation by draws of it that were moved, and have settled: these are draws of the density.

    Args:
        shift: what they say of every number's mean and standard deviation.
        names: of these numbers.
    """
    means, widths = np.abs(shift.mean), np.abs(shift.width)
    worst_mean, worst_width = int(np.argmax(means)), int(np.argmax(widths))
    good = max(means[worst_mean], widths[worst_width]) <= WORTH_MOVING
    return Judgement(
        "trust",
        "approximation" if good else "moves",
        float(means[worst_mean]),
        float(widths[worst_width]),
        names[worst_mean],
        names[worst_width],
        by_moves=True,
    )


def weakest(judgement: Judgement, other: Judgement | None) -> Judgement:
    """The weaker of two judgements of the same approximation."""
    if other is None or _ORDER[other.trust] >= _ORDER[judgement.trust]:
        return judgement
    return other._replace(source="approximation")


_ORDER = {"do not trust": 0, "means only": 1, "trust": 2}


def comfortable(judgement: Judgement) -> bool:
    """Whether an approximation is trusted, and so far within what that promises that no other need be tried."""
    shift = max(judgement.mean_shift / MEAN_LIMIT, judgement.width_shift / WIDTH_LIMIT)
    return judgement.trust == "trust" and not judgement.refined and shift < 0.5


def sentence(
    judgement: Judgement,
    weighted: Importance,
    *,
    family: str,
    tried: list[str],
    agreed: int,
    starts: int,
    modes: int,
    advice: Callable[[], str],
) -> str:
    """The verdict in one or two plain sentences."""
    even = weighted.effective >= EVEN * len(weighted.log_weights)
    # The tail of nearly equal weights has no shape that would mean anything.
    tail = "importance weights are nearly equal" if even else f"Pareto k̂ = {weighted.khat:.2f}"
    if judgement.by_moves:
        tail = "by draws that Hamiltonian Monte Carlo has moved, and that have settled"
    shown = (
        f"{tail}, means off by at most {judgement.mean_shift:.2f} sd "
        f"({judgement.mean_of}), sds by {100 * judgement.width_shift:.0f} % ({judgement.width_of})"
    )
    found = f"{agreed} of {starts} starts agree" + (f" on {modes} modes" if modes > 1 else "")
    also = f" A {tried[0]} alone was not good enough." if len(tried) > 1 else ""
    if judgement.trust == "trust" and judgement.source == "moves":
        return (
            "Trust the draws that Hamiltonian Monte Carlo has moved, which are the default of samples(), and have "
            f"settled: beside them the {family} has means off by at most {judgement.mean_shift:.2f} sd "
            f"({judgement.mean_of}), sds by {100 * judgement.width_shift:.0f} % ({judgement.width_of}); {found}."
        )
    if judgement.trust == "trust" and judgement.refined:
        return (
            f"Trust the importance-resampled draws, which are the default of samples(): {shown} before resampling; "
            f"{found}.{also}"
        )
    if judgement.trust == "trust":
        return f"Trust the {family}: {shown}; {found}.{also}"
    if judgement.trust == "means only":
        return f"Trust the means only: {shown}; {found}. {advice()}"
    if weighted.khat >= KHAT_LIMIT and not even:
        shown += "; these numbers cannot be relied on themselves"
    return f"Do not trust this approximation: {shown}; {found}. {advice()}"
