"""The Gaussian that is nearest to a density: the rule at fixed quasi-Monte Carlo points, until it has converged.

The points are the same in every step, so that the run is deterministic, the bound at the points rises from step to step
and a tolerance in nats has a meaning: the idea of DADVI (Giordano, Ingram and Broderick, 2024), with natural gradients
in place of a generic optimiser. The curvature is the average of the Hessians at the points (Price's theorem), which is
exact for a Gaussian density with any number of points.

The optimum at fixed points is not the optimum. How far apart they are is measured at fresh points: by the natural
gradient there, in standard deviations of every mean and as a fraction of every standard deviation. As long as that is
too much, there are more points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..points.sampling import even_noise
from .advance import advance
from .density import Density, Expansion, average, log_densities, ravelled
from .modes import Mode

_HALVINGS = 25
_SLACK = 0.1  # The bound at fixed points may fall by so many nats where the decrement shrinks: see `_fit_at`.
_MEAN_ERROR, _WIDTH_ERROR = 0.015, 0.015  # of means in standard deviations, of standard deviations as a fraction
_MOST_POINTS, _MOST_COLUMNS = 2**12, 2**15  # points, and columns of their Hessians, that a step averages
_VALUE_COST = 4  # What a value and a gradient cost, in products of a Hessian with a vector.


Follow = Callable[["Placed", float, int], bool | None]


def _go_on(at: Placed, bound: float, steps: int) -> None:
    """Nothing ends the steps."""


class GaussianFit(NamedTuple):
    """A Gaussian at the end of its steps.

    Attributes:
        q: the Gaussian, over the density's own pytree.
        bound: the evidence lower bound at the fixed points, with what constant the density has.
        samples: how many points these were.
        steps: how many steps were taken.
        converged: whether the optimum at these points is within the tolerance.
        mean_error: by how much, in standard deviations, a mean is off because of the points, at most.
        width_error: by which fraction a standard deviation is.
        products: how many products of a Hessian with a vector it took.
    """

    q: Gaussian | DiagonalGaussian
    bound: float
    samples: int
    steps: int
    converged: bool
    mean_error: float
    width_error: float
    products: int


class Placed(NamedTuple):
    """A Gaussian on the host, with what it takes to place points of it.

    Attributes:
        mean: its mean, ravelled.
        precision: its precision.
        root: A with θ = m + εA for standard normal ε, so that the covariance is AᵀA; not finite where the precision is
            not positive definite.
        entropy: its entropy.
    """

    mean: Float[np.ndarray, " P"]
    precision: Float[np.ndarray, "P P"]
    root: Float[np.ndarray, "P P"]
    entropy: float

    def points(self, noise: Float[np.ndarray, "S P"]) -> Float[np.ndarray, "S P"]:
        return self.mean + noise @ self.root

    def gaussian(self, density: Density) -> Gaussian:
        """The Gaussian over the density's own pytree."""
        return Gaussian(density.tree(self.mean), jnp.asarray(self.precision, density.dtype))


def place(q: Gaussian | DiagonalGaussian) -> Placed:
    """A Gaussian with what the host needs of it."""
    diagonal = isinstance(q, DiagonalGaussian)
    return _placed(ravelled(q.mean), np.diag(ravelled(q.precision)) if diagonal else np.asarray(q.precision, float))


def _placed(mean: np.ndarray, precision: np.ndarray) -> Placed:
    from scipy.linalg import solve_triangular  # imported late, so that importing bayesrule does not load SciPy

    try:
        factor = np.linalg.cholesky(precision)
    except np.linalg.LinAlgError:
        return Placed(mean, precision, np.full(precision.shape, np.nan), -np.inf)
    entropy = 0.5 * len(mean) * (1 + math.log(2 * math.pi)) - float(np.sum(np.log(np.diagonal(factor))))
    return Placed(mean, precision, solve_triangular(factor, np.eye(len(mean)), lower=True), entropy)


def _step(density: Density, rate: float, at: Placed, here: Expansion) -> tuple[float, bool, Placed]:
    measured = (leaf[None] for leaf in here)
    decrement, good, mean, precision = advance(density, rate, at.mean[None], at.precision[None], *measured)
    new = _placed(mean[0], precision[0])
    return float(decrement[0]), bool(good[0]) and np.isfinite(new.entropy), new


def natural_errors(at: Placed, there: Expansion) -> tuple[float, float]:
    """The natural gradient at a measurement, at most: in standard deviations of a mean, as a fraction of one."""
    deviations = np.sqrt(np.sum(at.root**2, axis=0))
    whitened = at.root @ there.hessian @ at.root.T - np.eye(len(at.mean))
    shift = at.root.T @ (at.root @ there.gradient) / deviations
    widths = 0.5 * np.sum(at.root * (whitened @ at.root), axis=0) / deviations**2
    errors = float(np.max(np.abs(shift))), float(np.max(np.abs(widths)))
    return errors if np.all(np.isfinite(errors)) and np.isfinite(there.value) else (np.inf, np.inf)


def start_of(density: Density, mode: Mode) -> Gaussian:
    """Laplace's approximation at a mode, over the density's own pytree."""
    return Gaussian(density.tree(mode.position), jnp.asarray(mode.precision, density.dtype))


def fit_gaussian(
    density: Density,
    start: Gaussian,
    rng: np.random.Generator,
    *,
    samples: int,
    tolerance: float,
    steps: int,
    products: int,
    follow: Follow = _go_on,
) -> GaussianFit:
    """Move a Gaussian to the optimum at fixed points, and take more points where they are too few.

    Args:
        density: the density.
        start: where to begin.
        rng: the source of the fresh points that judge the fixed ones.
        samples: how many points to begin with.
        tolerance: the nats that the optimum at the points may still be away.
        steps: how many steps to take at most, with each number of points.
        products: how many products of a Hessian and a vector may be spent, about; values and gradients count too.
        follow: called after every step with the Gaussian, its bound and the number of steps so far; where it returns
            True, no other step follows.
    """
    at, spent, taken, before = place(start), 0, 0, np.inf
    cost = density.products + _VALUE_COST
    while True:
        noise = even_noise(samples, density.size)[0]
        most = max(3, min(steps, int((products - spent) / (samples * cost))))
        watch = lambda at, bound, count, taken=taken: follow(at, bound, taken + count)
        at, bound, count, evaluations, converged, stopped = _fit_at(density, at, noise, tolerance, most, watch)
        taken += count
        there = average(density, at.points(_fresh_noise(samples, density.size, rng)))
        spent += (evaluations + 1) * samples * cost
        mean_error, width_error = natural_errors(at, there)
        error = max(mean_error / _MEAN_ERROR, width_error / _WIDTH_ERROR)
        # Four times as many points halve the error, or better. Where they do not, the density has tails that points of
        # a Gaussian do not integrate, and another family is needed.
        hopeless = error > 0.8 * before and error > 4
        next_cost = 4 * samples * cost * max(3, evaluations // 4)
        too_many = 4 * samples > _MOST_POINTS or 4 * samples * density.products > _MOST_COLUMNS
        if stopped or error <= 1 or hopeless or too_many or spent + next_cost > products:
            return GaussianFit(at.gaussian(density), bound, samples, taken, converged, mean_error, width_error, spent)
        samples, before = 4 * samples, error


def _fresh_noise(samples: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Standard normal noise from Sobol's points under a scrambling of its own, in mirrored pairs."""
    from scipy.special import ndtri
    from scipy.stats import qmc

    half = ndtri(np.clip(qmc.Sobol(size, rng=rng).random(samples // 2), 1e-12, 1 - 1e-12))
    return np.concatenate([half, -half])


def _energy(density: Density, at: Placed, noise: np.ndarray) -> float:
    """E_q ℓ̄ − H(q) at the points, which is minus the bound."""
    return -float(np.mean(log_densities(density, at.points(noise)))) - at.entropy


def _fit_at(
    density: Density, at: Placed, noise: np.ndarray, tolerance: float, steps: int, watch: Callable[..., bool | None]
) -> tuple[Placed, float, int, int, bool, bool]:
    """The Gaussian after the steps at these points.

    Returned are the Gaussian, its bound, the numbers of steps and evaluations, whether it has converged, and whether
    `watch` has ended the steps.

    The rule's guard keeps S positive definite where an average Hessian is not, which is where q is still too narrow.
    Beside it ρ is halved until the loss does not worsen, here and not in a guard, because the loss is measured by
    another program. By Price's theorem the average Hessian is the derivative of E_q ℓ̄ in S⁻¹, up to a half; at a
    finite number of points it is so only nearly, so that close to the end the bound at the points may fall a little
    while the steps still shrink.
    """
    here, evaluations = average(density, at.points(noise)), 1
    center = -float(log_densities(density, at.mean[None])[0])
    for _ in range(12):
        if here.value < center + 5 * density.size + 10:
            break
        # A Gaussian that reaches far out of the density's mass cannot be moved by what is measured there.
        at = _placed(at.mean, 4.0 * at.precision)
        here, evaluations = average(density, at.points(noise)), evaluations + 1
    if not np.isfinite(here.value):
        return at, -np.inf, 0, evaluations, False, False
    loss, rate, count = float(here.value) - at.entropy, 1.0, 0
    eps = float(jnp.finfo(density.dtype).eps)
    decrement, good, new = _step(density, rate, at, here)
    while count < steps:
        rounding = 32 * eps * (1 + abs(loss))
        # Losses are differences of large numbers, the decrement is not: it is known to a part of their rounding error.
        if decrement < max(tolerance, rounding / 16):
            return at, -loss, count, evaluations, True, False
        for _ in range(_HALVINGS):
            # Values are cheap beside Hessians: these are computed where the step may be taken.
            if good and _energy(density, new, noise) - loss <= rounding + _SLACK:
                there, evaluations = average(density, new.points(noise)), evaluations + 1
                risen = there.value - new.entropy - loss
                if np.isfinite(there.value) and risen <= rounding + _SLACK:
                    following = _step(density, min(1.0, 2 * rate), new, there)
                    if risen <= rounding or following[0] < decrement:
                        break
            rate *= 0.5
            _, good, new = _step(density, rate, at, here)
        else:
            break
        at, here, loss, count, rate = new, there, float(there.value) - new.entropy, count + 1, min(1.0, 2 * rate)
        decrement, good, new = following
        if watch(at, -loss, count):
            return at, -loss, count, evaluations, False, True
    return at, -loss, count, evaluations, False, False
