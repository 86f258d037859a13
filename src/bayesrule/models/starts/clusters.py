"""Where mixtures and hidden Markov models start: clusters of the rows, what their components are, and priors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float
from numpy import ndarray

from ... import factors
from ...factor_graph.factor import Factor
from ...families.base import ExponentialFamily
from ...families.gamma import NormalGamma
from ...families.point_mass import Peak
from ...families.wishart import NormalWishart
from ...numerics.checks import positive_int

Priors = Mapping[str, ExponentialFamily] | Literal["flat", "default"]

_MOST = 10_000  # steps that k-means looks at


class Counted(NamedTuple):
    """Which state each step is in, 0 for all where it is missing, and how often states come first and in pairs."""

    chosen: Float[ndarray, "N T K"]
    initial: Float[ndarray, " K"]
    pairs: Float[ndarray, "K K"]


def counted(rows: Any, states: int, key: Any, *, whole: bool) -> Counted:
    """k-means on the steps: at most 10,000 of them, the same for the same key."""
    from sklearn.cluster import KMeans

    rows = np.asarray(rows, float)
    found = ~np.isnan(rows)
    present = found.all(-1) if whole else found.any(-1)
    _enough(present, states)
    steps = rows[present]
    steps = np.where(np.isnan(steps), np.nanmean(steps, axis=0), steps)
    scale = steps.std(axis=0)
    steps = (steps - steps.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))
    part = steps if len(steps) <= _MOST else random.choice(steps, _MOST, replace=False)
    means = KMeans(min(states, len(np.unique(part, axis=0))), random_state=int(random.integers(2**31)))
    means.set_params(n_init=3)
    chosen = np.zeros((*present.shape, states))
    chosen[present] = np.eye(states)[means.fit(part).predict(steps)]
    return Counted(chosen, *_chain(chosen))


def _enough(present: ndarray, states: Any) -> None:
    positive_int("states", states, meaning="how many states or components there are")
    steps = int(present.sum())
    if steps == 0:
        raise ValueError("All of y is missing: there is nothing to fit. NaN says missing, so look at how y was read.")
    if states > steps:
        raise ValueError(
            f"{states} states or components cannot be told apart by {steps} observed rows: some would have none. Take "
            "fewer."
        )


def _chain(chosen: ndarray) -> tuple[ndarray, ndarray]:
    """How often states come first and follow each other, with one more of each kind's share, so that none is 0."""
    states = chosen.shape[-1]
    return chosen[:, 0].sum(0) + 1 / states, np.einsum("nti,ntj->ij", chosen[:, :-1], chosen[:, 1:]) + 1 / states


def pooled(rows: Any) -> tuple[ndarray, ndarray]:
    """The mean and variance of each entry over all steps."""
    flat = np.asarray(rows, float).reshape(-1, rows.shape[-1])
    return np.nanmean(flat, axis=0), np.nanvar(flat, axis=0)


def moments(rows: Any, found: Counted, full: bool) -> tuple[ndarray, ndarray, ndarray]:
    """Each state's weight, mean (K, D) and (co)variance, to which all steps together add one: no state is empty."""
    rows = np.asarray(rows, float)
    there = ~np.isnan(rows)
    present = there.all(-1) if full else there.any(-1)
    flat, weights = rows[present], found.chosen[present]
    center, spread = pooled(rows)
    gaps = np.where(np.isnan(flat), 0.0, flat - center)
    count = weights.sum(0) + 1
    mean = weights.T @ gaps / count[:, None]
    if full:
        squares = np.stack([(weight[:, None] * gaps).T @ gaps for weight in weights.T]) + np.diag(spread)
        return count, center + mean, squares / count[:, None, None] - mean[:, :, None] * mean[:, None, :]
    return count, center + mean, (weights.T @ gaps**2 + spread) / count[:, None] - mean**2


def drawn_categories(rows: ndarray, states: int, categories: int | None, key: Any) -> tuple[Counted, ndarray]:
    """How often each category occurs, perturbed for every state; a chain that stays half of the time."""
    present = ~np.isnan(rows)
    _enough(present, states)
    labels = rows[present].astype(int)
    size = int(labels.max()) + 1 if categories is None else categories
    share = np.bincount(labels, minlength=size) + 1 / size
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))
    tables = share * random.uniform(0.5, 1.5, (states, size))
    moves = 0.5 * (np.eye(states) + 1 / states) * present.sum() / states
    first = np.full(states, len(rows) / states)
    return Counted(np.zeros((*rows.shape, states)), first, moves), tables / states


def clustered(rows: Any, count: int, covariance: str, key: Any) -> Counted:
    """Clusters of rows (N, T, D) for Gaussian components, full or diagonal."""
    if covariance not in ("full", "diag"):
        raise ValueError(f'covariance= is "full" or "diag", got {covariance!r}.')
    return counted(rows, count, key, whole=covariance == "full")


def gaussian_components(
    rows: Any, found: Counted, covariance: str, block: str
) -> tuple[Factor, ExponentialFamily, ExponentialFamily]:
    """E log N(y | component), a component for each cluster as the rows say, and the usual prior of one.

    With m and S the mean and the variances of all rows the prior is a normal–Wishart of mean m, count 0.1, D + 2
    degrees of freedom and E Λ = S⁻¹, or for each entry a normal–gamma of shape 3/2.
    """
    size, (center, spread) = rows.shape[-1], pooled(rows)
    if np.any(spread <= 0):
        raise ValueError(
            f"The columns {np.flatnonzero(spread <= 0).tolist()} of y do not vary, and a Gaussian without spread has "
            "no density: leave them out."
        )
    weight, mean, variance = (jnp.asarray(x, float) for x in moments(rows, found, covariance == "full"))
    center, spread, count = jnp.asarray(center, float), jnp.asarray(spread, float), jnp.asarray(0.1)
    if covariance == "full":
        flat = NormalWishart(mean, weight, weight + size, jnp.linalg.inv(variance) / weight[:, None, None])
        df = jnp.asarray(size + 2.0)
        usual = NormalWishart(center, count, df, jnp.diag(1 / spread) / df)
        return factors.multivariate_normal("y", joint=block), flat, usual
    weight, shape = weight[:, None], jnp.asarray(1.5)
    flat = NormalGamma(mean, weight, 0.5 * (weight + 1), 0.5 * weight * variance)
    return factors.normal("y", joint=block), flat, NormalGamma(center, count, shape, shape * spread)


def displaced(block: Any, by: Any) -> Any:
    """Gaussian components (at their peak or not) of rows that were centred, where the rows were."""
    if isinstance(block, Peak):
        return Peak(displaced(block.of, by))
    return eqx.tree_at(lambda family: family.mean, block, block.mean + jnp.asarray(by))


def not_singular(block: str, floor: float) -> dict[str, Factor]:
    r"""A penalty $−\tfrac12 c\,\mathrm{tr}Λ_k$ for each component, which adds c to the squares that EM's variances are
    the mean of: none can be 0. Nothing for c = 0."""
    return (
        {f"least {block}": Factor(Partial(_penalty, jnp.asarray(floor, float)), block, said="floor")} if floor else {}
    )


def _penalty(floor: Array, mu: tuple[Array, ...]) -> Array:
    full = mu[1].ndim > mu[0].ndim
    return -0.5 * floor * (jnp.trace(mu[1], axis1=-2, axis2=-1) if full else mu[1])


def with_priors(
    blocks: dict[str, ExponentialFamily], usual: dict[str, ExponentialFamily], priors: Priors
) -> tuple[dict[str, ExponentialFamily], dict[str, Factor]]:
    """Blocks that start from what was counted and from their priors, and the priors' factors."""
    if isinstance(priors, str) and priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat", "default" or members by block, got {priors!r}.')
    chosen = {} if priors == "flat" else usual if isinstance(priors, str) else {**usual, **priors}
    unknown = set(chosen) - set(blocks)
    if unknown:
        raise ValueError(f"priors= names {sorted(unknown)}, and the blocks are {list(blocks)}.")
    both = lambda flat, prior: flat.with_natural(jax.tree.map(jnp.add, flat.natural(), prior.natural()))
    joined = {name: both(flat, chosen[name]) if name in chosen else flat for name, flat in blocks.items()}
    return joined, {f"prior of {name}": factors.prior(name, prior) for name, prior in chosen.items()}
