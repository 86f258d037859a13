"""Modes of a density: several starts are climbed side by side, the ends told apart and weighed by their evidence.

Every start takes steps of Newton's method as the rule has it (`advance`): a Gaussian, the delta method, the Hessian,
the precision replaced in each step (ρ = 1) and the mean's rate halved until the density rises. Where the Hessian is
indefinite, its eigenvalues are replaced by their absolute values, so that a step leads away from a saddle point and not
towards it (Dauphin et al., 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..points.sampling import even_noise
from .advance import advance
from .climbing import DECREMENT, ENOUGH, HALVINGS, LANES, LONGEST
from .density import Density, climb_side_by_side, expand, log_densities, prior_draws

CANDIDATES = 8
"""Among how many draws each start is the one of the highest density."""

RADII = (0.5, 2.0, 1.0, 4.0)
"""The half-widths of the boxes around zero from which starts are drawn, in turn."""

FAR_RADII = (2.0, 4.0, 8.0, 16.0)
"""Half-widths of the boxes in which places are looked at that the modes do not explain."""

_PLACES, _MOST_LOOKED, _MOST_ELSEWHERE = 512, 20, 8  # Of so many places, with so many numbers at most, the best few.
_UNEXPLAINED = 8.0  # Nats by which the density there is above that of the modes that are known.
_STEPS, _ROUNDS = 60, 80  # Newton's steps of a start, and evaluations with those of steps that were halved
_BOUND_POINTS = 32
_AT_ONCE = 5  # How many halvings of a step are tried in one evaluation.
_MOST_TRIED = 32  # Where a Hessian takes so few products, it is computed before it is known that the step is taken.
_FLAT = 1e-2  # Directions of so little curvature are tried for whether the density falls at all.
_ENDLESS = 1e12  # Nats that no posterior has, so that a density which has reached them rises for ever.
_SAME = 0.1  # Two ends are one mode if they are so close, as a squared distance in standard deviations.
_BEHIND = 7.0  # A mode so many nats of evidence behind the best has less than a thousandth of its weight.


class Mode(NamedTuple):
    """Where starts have ended.

    Attributes:
        position: θ, ravelled.
        precision: the Hessian of −log p there; where a start did not arrive, that of the point on its way with the
            largest evidence.
        evidence: the logarithm of Laplace's evidence.
        starts: how many of the starts ended here.
        converged: whether they have arrived: a stationary point with a positive-definite Hessian.
    """

    position: Float[np.ndarray, " P"]
    precision: Float[np.ndarray, "P P"]
    evidence: float
    starts: int
    converged: bool


def draw_starts(
    density: Density, rng: np.random.Generator, count: int, given: np.ndarray | None
) -> Float[np.ndarray, "K P"]:
    """So many starts of finite density: zero (or the given one), draws from the prior, and draws around zero.

    Every start but the first is the best of a few candidates, so that few are hopelessly far out in a tail.
    """
    size = density.size
    center = np.zeros(size) if given is None else given
    boxes = rng.uniform(-1.0, 1.0, (count, CANDIDATES, size))
    radii = np.array([RADII[k % len(RADII)] for k in range(count)])
    candidates = center + radii[:, None, None] * boxes
    prior = prior_draws(density, rng, count * CANDIDATES)
    if prior is not None:
        prior = np.clip(np.where(np.isfinite(prior), prior, 0.0), -1e3, 1e3).reshape(candidates.shape)
        candidates[1::2] = prior[1::2]
    candidates[0] = center
    values = log_densities(density, candidates.reshape(-1, size)).reshape(count, CANDIDATES)
    best = np.argmax(values, axis=1)
    starts, values = candidates[np.arange(count), best], np.max(values, axis=1)
    return starts[np.isfinite(values)]


def positive_definite(hessian: Float[np.ndarray, "P P"]) -> tuple[Float[np.ndarray, "P P"], bool]:
    """The matrix with the absolute values of its eigenvalues, and whether it was positive definite by itself."""
    try:
        pivots = np.diagonal(np.linalg.cholesky(hessian)) ** 2
        if np.all(pivots > 1e-12 * np.diagonal(hessian)):
            return hessian, True
    except np.linalg.LinAlgError:
        pass
    values, vectors = np.linalg.eigh(hessian)
    sizes = np.maximum(np.abs(values), 1e-8 * np.max(np.abs(values), initial=1e-20))
    return (vectors * sizes) @ vectors.T, False


def _evidence(value: float, hessian: np.ndarray) -> float:
    """The logarithm of Laplace's evidence, by a value of −log p and its Hessian."""
    return -value + 0.5 * len(hessian) * math.log(2 * math.pi) - 0.5 * float(np.linalg.slogdet(hessian)[1])


def climb(density: Density, starts: Float[np.ndarray, "K P"], stop: Callable[[], bool] = lambda: False) -> list[Mode]:
    """Where every start leads: a mode, or the best place on the way of one that has not arrived.

    Args:
        density: the density.
        starts: where to begin, ravelled.
        stop: asked between two steps whether to go no further.
    """
    arrived, rest = _climb_together(density, starts, stop) if density.climbs else ([], starts)
    return arrived + (_climb_from_host(density, rest, stop) if len(rest) else [])


def _climb_together(
    density: Density, starts: Float[np.ndarray, "K P"], stop: Callable[[], bool]
) -> tuple[list[Mode], Float[np.ndarray, "K P"]]:
    """The modes at which starts have arrived, and the starts that have not: what became of these is looked at apart."""
    modes: list[Mode] = []
    rest: list[np.ndarray] = []
    for first in range(0, len(starts), LANES):
        part = starts[first : first + LANES]
        if stop():
            rest.extend(part)
            continue
        ends = climb_side_by_side(density, part, _ROUNDS)
        for k, start in enumerate(part):
            if ends.arrived[k] and positive_definite(ends.precision[k])[1]:
                modes.append(_mode(ends.position[k], ends.value[k], ends.precision[k], converged=True))
            else:
                rest.append(start)
    return modes, np.array(rest)


def _climb_from_host(density: Density, starts: Float[np.ndarray, "K P"], stop: Callable[[], bool]) -> list[Mode]:
    """Where every start leads, evaluation by evaluation: for many numbers, and for starts that may not arrive."""
    count = len(starts)
    positions = np.array(starts, np.float64)
    here = expand(density, positions)
    ends: list[Mode | None] = [None] * count
    paths: list[list[np.ndarray]] = [[] for _ in range(count)]
    active = np.isfinite(here.value)
    for _ in range(_STEPS):
        matrices, definite = np.tile(np.eye(density.size), (count, 1, 1)), np.zeros(count, bool)
        for k in np.flatnonzero(active):
            matrices[k], definite[k] = positive_definite(here.hessian[k])
            paths[k].append(positions[k].copy())
        whole, decrements = _steps_of(density, positions, here.gradient, matrices)
        rounding = 32 * float(jnp.finfo(density.dtype).eps) * (1 + np.abs(here.value))
        for k in np.flatnonzero(active & definite & (decrements < np.maximum(DECREMENT, rounding))):
            ends[k], active[k] = _mode(positions[k].copy(), here.value[k], matrices[k].copy(), converged=True), False
        if not np.any(active) or stop():
            break
        positions, here, moved = _line_search(density, positions, here, whole - positions, decrements, active)
        active &= moved
    lost = [path for path, end in zip(paths, ends, strict=True) if end is None and path]
    return [end for end in ends if end is not None] + [_best_of_path(density, path) for path in lost]


def _mode(position: np.ndarray, value: float, precision: np.ndarray, *, converged: bool) -> Mode:
    return Mode(position, precision, _evidence(value, precision), 1, converged)


def _best_of_path(density: Density, path: list[np.ndarray]) -> Mode:
    """Of some places on the way of a start, the one around which there is most mass.

    That is judged by the evidence lower bound of a Gaussian there: towards a place where the density is infinite,
    Laplace's evidence may be as large as one likes, and a bound cannot be.
    """
    some = np.stack([*path[:6], *path[6 :: max(1, len(path) // 6)]])
    # Hessians are computed again and not kept for every place: with many numbers they are large.
    there = expand(density, some)
    places = (
        _mode(position, value, positive_definite(hessian)[0], converged=False)
        for position, value, hessian in zip(some, there.value, there.hessian, strict=True)
    )
    return max((_with_bound(density, calibrate(density, place)) for place in places), key=lambda mode: mode.evidence)


def _with_bound(density: Density, place: Mode) -> Mode:
    """A place with the bound of the Gaussian there, at a few points, in place of its evidence."""
    root = np.linalg.inv(np.linalg.cholesky(place.precision))
    points = place.position + even_noise(_BOUND_POINTS, density.size)[0] @ root
    entropy = 0.5 * density.size * (1 + math.log(2 * math.pi)) + float(np.sum(np.log(np.diagonal(root))))
    return place._replace(evidence=float(np.mean(log_densities(density, points))) + entropy)


def calibrate(density: Density, mode: Mode) -> Mode:
    """The mode with a precision such that −log p rises by about a half at one standard deviation.

    Away from a stationary point a Hessian may be far too small in a direction along which the density soon falls. Along
    every eigenvector of the precision the rise on both sides is measured, and the eigenvalue corrected where it is far
    from a half.
    """
    values, vectors = np.linalg.eigh(mode.precision)
    values = np.maximum(values, 1e-12 * np.max(values))  # which rounding may have made negative
    center = -float(log_densities(density, mode.position[None])[0])
    for _ in range(8):
        steps = vectors / np.sqrt(values)
        sides = np.concatenate([mode.position + steps.T, mode.position - steps.T])
        rises = np.mean(-log_densities(density, sides).reshape(2, -1), axis=0) - center
        factors = np.where(np.isfinite(rises), np.clip(2 * rises, 0.1, 1e4), 1e4)
        factors = np.where((factors > 0.3) & (factors < 4), 1.0, factors)
        if np.all(factors == 1.0):
            break
        values = values * factors
    precision = (vectors * values) @ vectors.T
    return mode._replace(precision=precision, evidence=_evidence(center, precision))


def _steps_of(density: Density, positions: Any, gradients: Any, matrices: Any) -> tuple[np.ndarray, np.ndarray]:
    decrements, _, whole, _ = advance(density, 1.0, positions, matrices, np.zeros(len(positions)), gradients, matrices)
    # Along a slope without curvature a whole step overflows, and halving it does not come back in time.
    steps = whole - positions
    longest = LONGEST * (1 + np.max(np.abs(positions), axis=1))
    lengths = np.max(np.abs(steps), axis=1)
    capped = np.isfinite(lengths) & (lengths > longest)
    steps[capped] *= (longest[capped] / lengths[capped])[:, None]
    whole[capped] = positions[capped] + steps[capped]
    decrements[capped] = 0.5 * np.abs(np.sum(gradients[capped] * steps[capped], axis=1))
    return whole, decrements


def _line_search(
    density: Density, positions: np.ndarray, here: Any, steps: np.ndarray, decrements: np.ndarray, active: np.ndarray
) -> tuple[np.ndarray, Any, np.ndarray]:
    """The positions after as much of each step as raises the density enough, and which of them have moved.

    The precision does not depend on the mean's rate ρ, so that a rate of ρ is the fraction ρ of the way.
    """
    waiting, moved = active.copy(), np.zeros(len(positions), bool)
    leaves = [np.array(leaf) for leaf in here]
    positions = positions.copy()

    def differentiate(index: np.ndarray, there: Any) -> None:
        for leaf, new in zip(leaves, there, strict=True):
            leaf[index] = new
        moved[index], waiting[index] = np.isfinite(there.value), False

    first = 0
    if density.products <= _MOST_TRIED:  # Whole steps are mostly taken: these few Hessians are hardly ever in vain.
        index = np.flatnonzero(waiting & np.all(np.isfinite(positions + steps), axis=1))
        if len(index):
            there = expand(density, positions[index] + steps[index])
            good = there.value <= here.value[index] - ENOUGH * decrements[index]
            positions[index[good]] += steps[index[good]]
            differentiate(index[good], type(there)(*(leaf[good] for leaf in there)))
        first = 1
    arrived = np.zeros(len(positions), bool)
    for halvings in range(first, HALVINGS, _AT_ONCE):
        index = np.flatnonzero(waiting)
        if not len(index):
            break
        rates = 0.5 ** np.arange(halvings, halvings + _AT_ONCE)
        trials = positions[index, None] + rates[:, None] * steps[index, None]
        usable = np.all(np.isfinite(trials), axis=2)
        values = -log_densities(density, np.where(usable[..., None], trials, 0.0).reshape(-1, density.size))
        enough = here.value[index, None] - ENOUGH * rates * decrements[index, None]
        good = usable & (values.reshape(usable.shape) <= enough)
        some, chosen = np.any(good, axis=1), np.argmax(good, axis=1)
        positions[index[some]] = trials[some, chosen[some]]
        arrived[index[some]], waiting[index[some]] = True, False
    index = np.flatnonzero(arrived)
    if len(index):  # Only where a step was taken is the density differentiated.
        differentiate(index, expand(density, positions[index]))
    return positions, type(here)(*leaves), moved


def flat_direction(density: Density, mode: Mode) -> Float[np.ndarray, " P"] | None:
    """A direction along which the density does not fall, however far one goes: then it has no integral.

    It may do so on both sides, or on one of them alone, as where a linear predictor separates two classes.

    Returns:
        The direction, of length 1, or None if no eigenvector of the precision is one.
    """
    values, vectors = np.linalg.eigh(mode.precision)
    center = float(log_densities(density, mode.position[None])[0])
    for value, vector in zip(values, vectors.T, strict=True):
        if value >= _FLAT:
            break
        # The unit is a standard deviation where the curvature tells one: a number may be large in its own units.
        far = np.geomspace(1e4, 1e6, 7) * min(1e6, max(value, 1e-300) ** -0.5)
        for side in (vector, -vector):
            there = log_densities(density, mode.position + far[:, None] * side)
            # A density with an integral falls by 4.6 nats at least over this stretch, or it is next to nothing there.
            if np.all(np.isfinite(there)) and np.all(np.diff(there) > -1e-3) and there[0] > center - 30.0:
                return side
    return None


def endless_direction(mode: Mode) -> Float[np.ndarray, " P"] | None:
    """Where the density rises for ever: the way from zero to a place with more nats than any posterior has, or None."""
    return mode.position / np.linalg.norm(mode.position) if mode.evidence > _ENDLESS else None


def look_elsewhere(
    density: Density, rng: np.random.Generator, modes: list[Mode], center: Float[np.ndarray, " P"]
) -> Float[np.ndarray, "K P"]:
    """Places that the modes do not explain: of a density far above that of Laplace's approximations at all of them.

    Starts are few and close to zero, and most of them lead to the mode with the largest basin. Values cost little
    beside Hessians, so that many places are looked at, around the center and from the prior; heavier tails than a
    Gaussian's stand out there as well, and lead back to a mode that is known.

    Args:
        density: the density.
        rng: the source of places.
        modes: those that are known.
        center: the first start.

    Returns:
        A few places of high density, or none.
    """
    if density.size > _MOST_LOOKED or not any(mode.converged for mode in modes):
        return np.zeros((0, density.size))
    boxes = rng.uniform(-1.0, 1.0, (_PLACES, density.size))
    places = center + np.repeat(FAR_RADII, _PLACES // len(FAR_RADII))[:, None] * boxes
    prior = prior_draws(density, rng, _PLACES)
    if prior is not None:
        places = np.concatenate([places, np.clip(np.where(np.isfinite(prior), prior, 0.0), -1e3, 1e3)])
    logs = log_densities(density, places)
    explained = np.full(len(places), -np.inf)
    for mode in modes:
        deviations = places - mode.position
        peak = mode.evidence - 0.5 * density.size * math.log(2 * math.pi)
        peak = peak + 0.5 * float(np.linalg.slogdet(mode.precision)[1])
        explained = np.maximum(explained, peak - 0.5 * np.sum((deviations @ mode.precision) * deviations, axis=1))
    logs = np.where(logs > explained + _UNEXPLAINED, logs, -np.inf)
    chosen = np.argsort(-logs)[:_MOST_ELSEWHERE]
    return places[chosen[np.isfinite(logs[chosen])]]


def tell_apart(ends: list[Mode]) -> list[Mode]:
    """The distinct modes among the ends of all starts, the largest evidence first, without those of no weight.

    Ends that have not arrived count only where they have more evidence than every mode: on the way to where the density
    is infinite, and the posterior is not.
    """
    arrived = sorted((end for end in ends if end.converged), key=lambda mode: -mode.evidence)
    distinct: list[Mode] = []
    for end in arrived:
        same = next((k for k, mode in enumerate(distinct) if _is_same(mode, end)), None)
        if same is None:
            distinct.append(end)
        else:
            distinct[same] = distinct[same]._replace(starts=distinct[same].starts + 1)
    kept = [mode for mode in distinct if mode.evidence > distinct[0].evidence - _BEHIND]
    lost = max((end for end in ends if not end.converged), key=lambda mode: mode.evidence, default=None)
    if lost is not None and (not kept or lost.evidence > kept[0].evidence + 1.0):
        kept.append(lost)
    return kept


def _is_same(mode: Mode, other: Mode) -> bool:
    difference = other.position - mode.position
    return float(difference @ mode.precision @ difference) < _SAME * len(difference) ** 0.5
