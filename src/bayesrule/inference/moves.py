r"""Draws of q moved by Hamiltonian Monte Carlo, which leaves the density as it is: what they say of q.

With many numbers importance weights say little: an error too small to matter in each of 500 of them adds up in the
weight of a draw. Moves do not have that: in the coordinates in which q is standard normal, trajectories of a quarter of
a period replace a draw by a nearly independent one, number by number, and steps need to shrink only with the fourth
root of how many there are (Beskos et al., 2013). So some hundred chains that begin as draws of q are moved a few tens
of times. If q is the density, nothing changes; if not, the moved draws show by how much every mean and standard
deviation is off, and are draws of the density themselves, provided that they have settled. Whether they have is asked
in three ways: half of the chains begin wider than q, and must end where the others do; the later half of the moves must
agree with the earlier one; and a chain must forget where it was within a few moves, which it does not in a funnel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..numerics.programs import compiled
from ..numerics.trees import unravel
from .density import Density
from .importance import Shift

CHAINS = 256
"""How many chains are moved side by side; a half of them begin wider than q."""

BURN = 10
"""How many moves chains take before they count."""

KEPT = (20, 80)
"""How many then, and how many where that is too few to tell what matters from chance."""

WIDER = 1.3
"""How much wider than q, as a factor of its standard deviations, half of the chains begin."""

ACCEPTANCE = 0.6
"""Below it the moves are no longer nearly independent draws, and nothing is concluded from them."""

_LARGEST_STEP = 0.8
_DISAGREEMENT = 4.5  # standard errors between two halves, of which there are as many as numbers
_BLOCK = 10
_MOST_APART = 6.0  # With chains that need more moves to forget where they were, a few tens of them say little.
_DESCENT = 500  # steps of L-BFGS towards a mode
_STATIONARY, _NEARLY_STATIONARY = 0.01, 0.1  # slopes there in nats for a standard deviation of q: asked for, accepted
_LARGEST_ERROR = 0.03  # The standard error of means, in standard deviations, and of these, as a fraction.


class Chains(NamedTuple):
    """Chains in the coordinates in which q is standard normal.

    Attributes:
        positions: where they are.
        values: −log p there.
        gradients: its gradients, in the same coordinates.
    """

    positions: Float[Array, "B P"]
    values: Float[Array, " B"]
    gradients: Float[Array, "B P"]


class Whitened(NamedTuple):
    """The Gaussian whose coordinates are used: θ = m + xA.

    Attributes:
        mean: m.
        root: A, of which AᵀA is the covariance, or its diagonal where there is nothing else in it.
    """

    mean: Float[np.ndarray, " P"]
    root: Float[np.ndarray, "P *P"]

    def points(self, positions: Any) -> Any:
        """θ of positions, (B, P)."""
        return self.mean + (positions * self.root if self.root.ndim == 1 else positions @ self.root)

    def pull_back(self, gradients: Any) -> Any:
        """Gradients in θ as gradients in x."""
        return gradients * self.root if self.root.ndim == 1 else gradients @ self.root.T


@compiled(static="function")
def _evaluate(
    function: Callable[..., Any], like: Any, frame: Whitened, positions: Any, arguments: tuple[Any, ...]
) -> Chains:
    return Chains(positions, *_slopes(function, like, frame, positions, arguments))


def _slopes(
    function: Callable[..., Any], like: Any, frame: Whitened, positions: Array, arguments: tuple[Any, ...]
) -> Any:
    negative = lambda x: -jnp.asarray(function(unravel(x, like), *arguments)).reshape(())
    values, gradients = jax.vmap(jax.value_and_grad(negative))(frame.points(positions))
    return values, frame.pull_back(gradients)


@compiled(static="function")
def _move(
    function: Callable[..., Any],
    like: Any,
    frame: Whitened,
    chains: Chains,
    momenta: Any,
    uniform: Any,
    step: Any,
    leaps: Any,
    arguments: tuple[Any, ...],
) -> tuple[Chains, Array]:
    """One trajectory of every chain, accepted or not, and the probability with which it was accepted."""

    def leap(_: Any, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        positions, momenta, _, gradients = carry
        momenta = momenta - 0.5 * step * gradients
        positions = positions + step * momenta
        values, gradients = _slopes(function, like, frame, positions, arguments)
        return positions, momenta - 0.5 * step * gradients, values, gradients

    start = (chains.positions, momenta, chains.values, chains.gradients)
    positions, after, values, gradients = jax.lax.fori_loop(0, leaps, leap, start)
    energy = lambda values, momenta: values + 0.5 * jnp.sum(momenta**2, axis=1)
    log_ratio = energy(chains.values, momenta) - energy(values, after)
    usable = jnp.isfinite(log_ratio) & jnp.all(jnp.isfinite(gradients), axis=1)
    probability = jnp.where(usable, jnp.exp(jnp.minimum(log_ratio, 0.0)), 0.0)
    accepted = uniform < probability
    choose = lambda new, old: jnp.where(accepted.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return jax.tree.map(choose, Chains(positions, values, gradients), chains), probability


def reaches_a_mode(density: Density, frame: Whitened) -> bool:
    """Whether descent of −log p from the middle of q, by L-BFGS in q's coordinates, ends at a stationary point.

    Where it does not, the density has no highest point that one could reach: it is infinite somewhere, as in the neck
    of a hierarchy, and draws from elsewhere do not see what mass there is.
    """
    from scipy.optimize import minimize  # imported late, so that importing bayesrule does not load SciPy

    frame = Whitened(np.asarray(frame.mean, density.dtype), np.asarray(frame.root, density.dtype))

    def value_and_gradient(position: np.ndarray) -> tuple[float, np.ndarray]:
        here = position[None].astype(density.dtype)
        found = _evaluate(density.function, density.like, frame, here, density.arguments)
        value, gradient = float(found.values[0]), np.asarray(found.gradients[0], np.float64)
        usable = np.isfinite(value) and bool(np.all(np.isfinite(gradient)))
        return (value, gradient) if usable else (1e300, np.zeros_like(gradient))

    options = {"maxiter": _DESCENT, "maxfun": 2 * _DESCENT, "gtol": _STATIONARY, "ftol": 0.0}
    end = minimize(value_and_gradient, np.zeros(density.size), jac=True, method="L-BFGS-B", options=options)
    return bool(end.fun < 1e299 and np.max(np.abs(end.jac)) <= _NEARLY_STATIONARY)


def first_step(size: int) -> float:
    """The length of a leap-frog step in so many dimensions, in standard deviations of q."""
    return min(_LARGEST_STEP, 1.8 * size**-0.25)


def moves(
    density: Density,
    frame: Whitened,
    positions: Float[np.ndarray, "B P"],
    rng: np.random.Generator,
    *,
    step: float,
    adapted: int,
) -> Iterator[tuple[Float[np.ndarray, "B P"], float, float]]:
    """Move chains for ever: after every move their positions, the acceptance, and the length of a step.

    Args:
        density: the density, which the moves leave as it is.
        frame: the coordinates of the positions.
        positions: where the chains begin.
        rng: the source of momenta.
        step: how long a leap-frog step is at first.
        adapted: during how many moves it is lengthened or shortened by how many trajectories are accepted.
    """
    rows, dtype = density.value_rows, density.dtype
    frame = Whitened(np.asarray(frame.mean, dtype), np.asarray(frame.root, dtype))
    fixed = (density.function, density.like, frame)
    count = len(positions)
    places = [slice(first, min(first + rows, count)) for first in range(0, count, rows)]
    filled = lambda x, place: np.resize(x[place], (rows, *x.shape[1:])).astype(dtype)
    parts = [_evaluate(*fixed, filled(positions, place), density.arguments) for place in places]
    number = 0
    while True:
        momenta, uniform = rng.standard_normal(positions.shape), rng.uniform(size=count)
        length = step * rng.uniform(0.8, 1.2)  # so that no direction of p returns to where it began every time
        leaps = max(1, math.ceil(0.5 * math.pi / length))
        probabilities = np.empty(count)
        new = np.empty((count, density.size))
        for k, place in enumerate(places):
            numbers = filled(momenta, place), filled(uniform, place), np.asarray(length, dtype), np.int32(leaps)
            parts[k], probability = _move(*fixed, parts[k], *numbers, density.arguments)
            here = slice(0, place.stop - place.start)
            new[place], probabilities[place] = np.asarray(parts[k].positions)[here], np.asarray(probability)[here]
        acceptance = float(np.mean(probabilities))
        yield new, acceptance, step
        number += 1
        if number < adapted:
            step = step * 0.7 if acceptance < 0.7 else min(_LARGEST_STEP, step * 1.15) if acceptance > 0.9 else step


class Moved(NamedTuple):
    """Chains after a move that counts.

    Attributes:
        points: θ of every chain; chains that began wider come last.
        acceptance: the part of the trajectories that was accepted.
        step: the length of their leap-frog steps.
    """

    points: Float[np.ndarray, "B P"]
    acceptance: float
    step: float


def moved_draws(
    density: Density,
    frame: Whitened,
    rng: np.random.Generator,
    *,
    chains: int = CHAINS,
    step: float | None = None,
) -> Iterator[Moved]:
    """Draws of a Gaussian after every one of their moves, for ever, but for the first moves, which do not count.

    Args:
        density: the density.
        frame: the Gaussian.
        rng: the source of draws and moves.
        chains: how many draws.
        step: the length of a leap-frog step, where it is known from before.
    """
    positions = rng.standard_normal((chains, density.size))
    positions[chains // 2 :] *= WIDER
    adapted = BURN if step is None else 0
    step = first_step(density.size) if step is None else step
    endless = moves(density, frame, positions, rng, step=step, adapted=adapted)
    for here, acceptance, length in itertools.islice(endless, BURN, None):
        yield Moved(frame.points(here), acceptance, length)


class MovedMoments:
    """Moments of every number over the moves of each chain, as moves come in, compared with those under q.

    Sums over blocks of moves are kept and not the draws themselves: with thousands of numbers these would fill the
    memory.

    Args:
        mean: the means under q.
        std: the standard deviations under q.
    """

    def __init__(self, mean: Float[np.ndarray, " D"], std: Float[np.ndarray, " D"]):
        self.constant = std <= 1e-12 * (1 + np.abs(mean))  # such as a weight on a simplex of one
        self.mean, self.std = mean, np.where(self.constant, 1.0, std)
        self.count = 0
        self._blocks: list[np.ndarray] = []  # sums of u and u² over a block of moves for every chain
        self._powers = np.zeros((2, len(mean)))  # sums of u³ and u⁴ over all moves and chains

    def add(self, numbers: Float[np.ndarray, "B D"]) -> None:
        """Take in the numbers of all chains after one more move."""
        u = np.where(self.constant, 0.0, (numbers - self.mean) / self.std)
        if self.count % _BLOCK == 0:
            self._blocks.append(np.zeros((2, *u.shape)))
        squares = u**2
        self._blocks[-1] += (u, squares)
        self._powers += (np.sum(u * squares, axis=0), np.sum(squares**2, axis=0))
        self.count += 1

    def shift(self) -> tuple[Shift, bool]:
        """By how much the moments of the moved draws differ from those of q, and whether they have settled."""
        blocks = np.stack(self._blocks)
        half, chains = len(blocks) // 2, blocks.shape[2]
        center, second = np.mean(np.sum(blocks, axis=0), axis=1) / self.count
        third, fourth = self._powers / (self.count * chains)
        variance = np.where(self.constant, 1.0, np.maximum(second - center**2, 1e-30))
        # Averages over a chain, or a part of it, of the standardised number and of its square.
        firsts = lambda sums, moves: (sums[0] / moves - center) / np.sqrt(variance)
        squares = lambda sums, moves: (sums[1] / moves - 2 * center * sums[0] / moves + center**2) / variance
        kurtosis = (fourth - 4 * center * third + 6 * center**2 * second - 3 * center**4) / variance**2
        settled, errors = True, []
        for average, own_variance in ((firsts, 1.0), (squares, kurtosis - 1)):
            drift = average(np.sum(blocks[half:], axis=0), self.count - half * _BLOCK)
            drift = drift - average(np.sum(blocks[:half], axis=0), half * _BLOCK)
            settled &= _agree(np.mean(drift, axis=0), np.std(drift, axis=0) / math.sqrt(chains))
            values = average(np.sum(blocks, axis=0), self.count)
            narrow, wide = values[: chains // 2], values[chains // 2 :]
            between = math.sqrt(2 / chains) * np.sqrt(np.var(narrow, axis=0) + np.var(wide, axis=0))
            settled &= _agree(np.mean(wide, axis=0) - np.mean(narrow, axis=0), between)
            # By how many moves two of them must be apart to be independent, were chains made of such pieces.
            apart = self.count * np.var(values, axis=0) / np.maximum(own_variance, 1e-300)
            settled &= bool(np.all(self.constant | (apart <= _MOST_APART)))
            errors.append(np.std(values, axis=0) / math.sqrt(chains))
        zero = lambda x: np.where(self.constant, 0.0, x)
        shifts = zero(center / np.sqrt(variance)), zero(1 / np.sqrt(variance) - 1)
        return Shift(*shifts, zero(errors[0]), zero(0.5 * errors[1])), settled


def precise(shift: Shift) -> bool:
    """Whether moved draws are enough to tell what matters from chance."""
    return bool(max(np.max(shift.mean_error), np.max(shift.width_error)) <= _LARGEST_ERROR)


def _agree(difference: np.ndarray, error: np.ndarray) -> bool:
    """Whether no number differs by more than chance explains."""
    return bool(np.all(np.abs(difference) <= np.maximum(_DISAGREEMENT * error, 1e-9)))
