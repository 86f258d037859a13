r"""A Gaussian with a precision for each number, for densities of so many numbers that Hessians are out of reach.

The rule is the mean-field one (`eq:don`) at fixed quasi-Monte Carlo points, with the Hessian's diagonal by Stein's
identity: $s ← (1−ρ)s + ρE_q[s(θ−m)∇\barℓ]$, $m ← m − ρE_q∇\barℓ/s$, a gradient at each point and no Hessian. It is run
by `fit`, and ρ is halved until the bound at the points does not fall.

A diagonal q ignores correlations, so that its standard deviations are those of every number given all others. Draws
that Hamiltonian Monte Carlo has moved say by how much these are off (`moves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from ..curvature.stein import Stein
from ..families.gaussian.diagonal import DiagonalGaussian
from ..fitting.fit import fit
from ..fitting.reason import Reason
from ..fitting.result import Result
from ..points.sampling import QuasiMonteCarlo, even_noise
from ..rule.rule import Rule
from ..steps.guards import Backtracking
from ..steps.steps import Steps
from .density import Density, log_densities, ravelled
from .gaussian import GaussianFit

SAMPLES = 32
"""At how many points E_q is taken."""

_STEPS, _EVERY = 500, 10
_TOLERANCE = 1e-3  # nats: below it no mean is off by more than 0.05 standard deviations
_NARROWER, _NARROWINGS = 16.0, 12
_ALLOWED = 5.0  # nats for each number by which −log p may be higher at the points than at their center


def diagonal_rule(samples: int = SAMPLES) -> Rule:
    r"""The rule that `infer` follows with many numbers: mean-field variational inference at fixed points.

    >>> diagonal_rule().points, diagonal_rule().curvature
    (QuasiMonteCarlo(32), Stein())
    """
    points, guard = QuasiMonteCarlo(samples), Backtracking(monotone=True)
    return Rule(DiagonalGaussian, points, Stein(), Steps(1.0), guard, name="infer (diagonal)", section="3.1")


def start_around(density: Density, position: Float[np.ndarray, " P"]) -> DiagonalGaussian:
    """A Gaussian at a position, so narrow that the density at its points is not far below that at the position."""
    noise = even_noise(SAMPLES, density.size)[0]
    center, precision = float(log_densities(density, position[None])[0]), 1.0
    for _ in range(_NARROWINGS):
        values = log_densities(density, position + noise / math.sqrt(precision))
        if np.all(np.isfinite(values)) and np.mean(values) > center - _ALLOWED * density.size - 10:
            break
        precision *= _NARROWER
    return DiagonalGaussian(density.tree(position), density.tree(np.full(density.size, precision)))


def fit_diagonal(
    density: Density,
    start: DiagonalGaussian,
    *,
    tolerance: float,
    follow: Callable[[DiagonalGaussian, float, int], bool | None],
) -> tuple[GaussianFit, bool]:
    """Move a diagonal Gaussian to the optimum at fixed points.

    Args:
        density: the density.
        start: where to begin.
        tolerance: the nats that the optimum at the points may still be away; with many numbers at least a thousandth.
        follow: called now and then with the Gaussian, its bound and the number of steps so far; where it returns True,
            no other step follows.

    Returns:
        What `GaussianFit` has of it, without errors of the points, which moved draws show; and whether Ctrl-C came.
    """

    def look(result: Result) -> bool | None:
        losses = np.asarray(result.trace["objective"])
        return follow(result.q, -float(losses[-1]) if len(losses) else -math.inf, len(losses))

    result = fit(
        diagonal_rule(),
        density.objective,
        start,
        steps=_STEPS,
        tolerance=max(tolerance, _TOLERANCE),
        on_step=look,
        every=_EVERY,
    )
    steps = len(result.trace["objective"])
    found = GaussianFit(
        q=result.q,
        bound=bound_at_points(density, result.q),
        samples=SAMPLES,
        steps=steps,
        converged=result.reason == Reason.CONVERGED,
        mean_error=math.nan,
        width_error=math.nan,
        products=steps * SAMPLES,
    )
    return found, result.reason == Reason.INTERRUPTED


def bound_at_points(density: Density, q: DiagonalGaussian) -> float:
    """The evidence lower bound of q, at the fixed points."""
    mean, deviations = ravelled(q.mean), ravelled(q.precision) ** -0.5
    values = log_densities(density, mean + deviations * even_noise(SAMPLES, density.size)[0])
    return float(np.mean(values) + np.sum(np.log(deviations)) + 0.5 * density.size * (1 + math.log(2 * math.pi)))
