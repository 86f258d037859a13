r"""A mixture of Gaussians fitted to a density by its own weighted draws, for densities that no Gaussian fits.

Draws of the mixture are weighted by $w = p/q$, and the mixture is fitted to the weighted draws by a step of EM: each
component gets the expectation parameters that its share of the draws has,
$μ_k = \sum_i w_i r_{ik} T(θ_i) / \sum_i w_i r_{ik}$. That lowers KL(p‖q), where a variational step lowers KL(q‖p): the
fitted mixture has the density's own means and variances, and covers its tails, so that its weights stay bounded
(Cappé, Douc, Guillin, Marin and Robert, "Adaptive importance sampling in general mixture classes", 2008). It takes
values of the density alone, for which there is a program already.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from .density import Density, log_densities, ravelled
from .gaussian import Placed, place
from .importance import Importance, importance
from .moves import Whitened

WIDE = 3.0
"""How much wider, as a factor of the covariance, the copy of each component is that begins as its tail."""

_SHRINK = 0.02  # The part of each covariance that is kept from before, so that few draws do not make it singular.
_LEAST_WEIGHT = 0.005
_LEAST_ROUNDS, _EVEN_ENOUGH = 4, 0.985  # Draws that are worth so large a part of their number leave nothing to improve.
_BIRTHS = (1, 3, 5, 7)  # After which rounds components are added, where the weights are still uneven.
_BORN = 2
_MOST_COMPONENTS = 12


class Components:
    """A mixture of Gaussians as arrays on the host, in float64: what draws and densities need.

    `as_family` is the same as a `Mixture`. Refitting changes the number of components from round to round, and every
    number of them would compile programs of its own; on the host it costs nothing.

    Args:
        weights: π_k.
        means: m_k, ravelled.
        covariances: their covariances, (K, P, P), or their variances, (K, P), where these are all that there is.
    """

    def __init__(self, weights: np.ndarray, means: np.ndarray, covariances: np.ndarray):
        self.weights, self.means, self.covariances = weights / np.sum(weights), means, covariances
        self.is_diagonal = covariances.ndim == 2
        self.roots = np.sqrt(covariances) if self.is_diagonal else np.linalg.cholesky(covariances)
        widths = self.roots if self.is_diagonal else np.diagonal(self.roots, axis1=1, axis2=2)
        self.log_dets = 2 * np.sum(np.log(widths), axis=1)

    def draw(self, rng: np.random.Generator, count: int) -> Float[np.ndarray, "M P"]:
        choice = rng.choice(len(self.weights), size=count, p=self.weights)
        points = rng.standard_normal((count, self.means.shape[1]))
        for k, (mean, root) in enumerate(zip(self.means, self.roots, strict=True)):
            own = points[choice == k]
            points[choice == k] = mean + (own * root if self.is_diagonal else own @ root.T)
        return points

    def log_joint(self, points: Float[np.ndarray, "M P"]) -> Float[np.ndarray, "M K"]:
        """log π_k + log q_k(θ)."""
        from scipy.linalg import solve_triangular  # imported late, so that importing bayesrule does not load SciPy

        columns = []
        for weight, mean, root, log_det in zip(self.weights, self.means, self.roots, self.log_dets, strict=True):
            deviations = (points - mean).T
            if self.is_diagonal:
                whitened = deviations / root[:, None]
            else:
                whitened = solve_triangular(root, deviations, lower=True, check_finite=False)
            log_q = -0.5 * (np.sum(whitened**2, axis=0) + log_det + len(mean) * math.log(2 * math.pi))
            columns.append(math.log(max(weight, 1e-300)) + log_q)
        return np.stack(columns, axis=1)

    def log_prob(self, points: Float[np.ndarray, "M P"]) -> Float[np.ndarray, " M"]:
        return np.logaddexp.reduce(self.log_joint(points), axis=1)

    def moments(self) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, "P *P"]]:
        """The mean and the covariance of the mixture, or its variances where these are all that there is."""
        mean = self.weights @ self.means
        deviations = self.means - mean
        if self.is_diagonal:
            return mean, self.weights @ (self.covariances + deviations**2)
        between = (deviations * self.weights[:, None]).T @ deviations
        return mean, np.einsum("k,kij->ij", self.weights, self.covariances) + between

    def frame(self) -> Whitened:
        """The coordinates in which a Gaussian with the mixture's mean and covariance is standard normal."""
        mean, covariance = self.moments()
        return Whitened(mean, np.sqrt(covariance) if self.is_diagonal else np.linalg.cholesky(covariance).T)

    def as_family(self, density: Density) -> Mixture | Gaussian | DiagonalGaussian:
        """The member of the library's family over the density's own pytree."""
        trees = [density.tree(mean) for mean in self.means]
        if self.is_diagonal:
            assert len(trees) == 1  # Mixtures are fitted where there are fewer numbers.
            return DiagonalGaussian(trees[0], density.tree(1 / self.covariances[0]))
        precisions = [jnp.asarray(np.linalg.inv(c), density.dtype) for c in self.covariances]
        members = [Gaussian(tree, precision) for tree, precision in zip(trees, precisions, strict=True)]
        return members[0] if len(members) == 1 else Mixture(jnp.asarray(self.weights, density.dtype), members)


def refit(q: Components, points: np.ndarray, log_weights: np.ndarray) -> Components:
    """The mixture after one step of EM on weighted draws; components without weight are dropped."""
    log_joint = q.log_joint(points)
    responsibilities = np.exp(log_joint - np.logaddexp.reduce(log_joint, axis=1)[:, None])
    shares = np.exp(log_weights)[:, None] * responsibilities
    totals = np.sum(shares, axis=0)
    # A component is moved only as far as its own draws carry it: with few of them its covariance stays.
    effective = totals**2 / np.maximum(np.sum(shares**2, axis=0), 1e-300)
    kept = (totals > _LEAST_WEIGHT) & (effective > 5)
    if not np.any(kept):
        return q
    shares, totals, effective = shares[:, kept] / totals[kept], totals[kept], effective[kept]
    means = shares.T @ points
    deviations = points - means[:, None]
    covariances = np.swapaxes(deviations * shares.T[:, :, None], 1, 2) @ deviations
    size = points.shape[1]
    part = np.maximum(_SHRINK, size / (size + effective))[:, None, None]
    return Components(totals, means, (1 - part) * covariances + part * q.covariances[kept])


def fit_mixture(
    density: Density,
    starts: list[Placed],
    bounds: np.ndarray,
    rng: np.random.Generator,
    *,
    draws: int,
    rounds: int,
    stop: Callable[[], bool] = lambda: False,
) -> Components:
    """Refit a mixture to its own weighted draws until its weights no longer become better.

    Args:
        density: the density.
        starts: Gaussians to begin with, at one mode or several.
        bounds: their evidence lower bounds, from which their weights come.
        rng: the source of draws.
        draws: how many draws each round takes.
        rounds: how many rounds at most.
        stop: asked between two rounds whether to go no further.

    Returns:
        The mixture whose draws were worth most.
    """
    q = _beginning(starts, bounds)
    best: tuple[Components, Importance] | None = None
    worse = 0
    for number in range(rounds):
        points = q.draw(rng, draws)
        weighted = importance(log_densities(density, points) - q.log_prob(points))
        if best is None or weighted.effective > 1.02 * best[1].effective:
            best, worse = (q, weighted), 0
        else:
            worse += 1
        enough = number >= _LEAST_ROUNDS and weighted.effective > _EVEN_ENOUGH * draws
        if worse >= 4 or enough or stop():
            break
        log_weights = _tempered(weighted.log_weights, q.means.shape[1])
        if number in _BIRTHS and weighted.effective < 0.7 * draws:
            q = _with_births(q, points, log_weights, rng)
        q = refit(q, points, log_weights)
    assert best is not None  # There is at least one round.
    return best[0]


def _with_births(q: Components, points: np.ndarray, log_weights: np.ndarray, rng: np.random.Generator) -> Components:
    """The mixture with components at places that the weights favour, each as wide as the one that is nearest."""
    if len(q.weights) >= _MOST_COMPONENTS:
        return q
    chosen = points[rng.choice(len(points), size=_BORN, p=np.exp(log_weights - np.logaddexp.reduce(log_weights)))]
    parents = np.argmax(q.log_joint(chosen), axis=1)
    weights = np.concatenate([0.7 * q.weights, np.full(_BORN, 0.3 / _BORN)])
    return Components(
        weights, np.concatenate([q.means, chosen]), np.concatenate([q.covariances, q.covariances[parents]])
    )


def _beginning(starts: list[Placed], bounds: np.ndarray) -> Components:
    """Every Gaussian, and wider copies of it that begin as its tails."""
    shares = np.exp(bounds - np.max(bounds))
    weights, means, covariances = [], [], []
    for start, share in zip(starts, shares / np.sum(shares), strict=True):
        covariance = start.root.T @ start.root
        for factor, part in ((1.0, 0.6), (WIDE, 0.3), (WIDE**2, 0.1)):
            weights.append(share * part)
            means.append(start.mean)
            covariances.append(factor * covariance)
    return Components(np.array(weights), np.stack(means), np.stack(covariances))


def _tempered(log_weights: np.ndarray, size: int) -> np.ndarray:
    """Weights w^t with the largest t at which enough draws count: with few of them a refit would collapse."""
    least = max(20 * size**0.5, 4.0 * size, 50.0)
    for power in (1.0, 0.8, 0.6, 0.4, 0.25, 0.15, 0.1):
        scaled = power * log_weights
        scaled = scaled - np.logaddexp.reduce(scaled)
        if np.exp(-np.logaddexp.reduce(2 * scaled)) >= least:
            break
    return scaled


def widened(q: Components) -> Components:
    """Half of q, and half of a copy of it that is twice as wide: draws that also see what lies beside q."""
    return Components(
        np.concatenate([q.weights, q.weights]),
        np.concatenate([q.means, q.means]),
        np.concatenate([q.covariances, 4 * q.covariances]),
    )


def match_moments(q: Components, points: np.ndarray, log_weights: np.ndarray) -> Components | None:
    """The Gaussian with the means and covariances that weighted draws of a Gaussian show; None where these are none.

    The moments are those of q and the difference that the weights make, so that with nearly equal weights there is
    hardly any noise in them.
    """
    weights = np.exp(log_weights) - 1 / len(points)
    deviations = points - q.means[0]
    shift = weights @ deviations
    if q.is_diagonal:
        variance = q.covariances[0] + weights @ deviations**2 - shift**2
        matched = (q.means[0] + shift)[None], variance[None]
        return Components(np.ones(1), *matched) if np.all(variance > 0) else None
    covariance = q.covariances[0] + (deviations * weights[:, None]).T @ deviations - np.outer(shift, shift)
    try:
        return Components(np.ones(1), (q.means[0] + shift)[None], covariance[None])
    except np.linalg.LinAlgError:
        return None


def components_of(q: Gaussian | DiagonalGaussian) -> Components:
    """A Gaussian as a mixture of one."""
    if isinstance(q, DiagonalGaussian):
        return Components(np.ones(1), ravelled(q.mean)[None], 1 / ravelled(q.precision)[None])
    placed = place(q)
    return Components(np.ones(1), placed.mean[None], (placed.root.T @ placed.root)[None])
