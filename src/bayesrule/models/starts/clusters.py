"""Where mixtures and hidden Markov models start: k-means clusters of the rows, the components' moments, and priors.

With an informative prior λ₀ a block starts at λ₀ plus the natural parameters that the clusters give it, as if each
row's cluster were its known component.
"""

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
from ...families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from ...families.wishart import NormalWishart
from ...numerics.checks import positive_int
from ...numerics.random import Key

Priors = Mapping[str, ExponentialFamily] | Literal["flat", "default"]

_KMEANS_ROWS = 10_000  # the rows that k-means is fitted to, at most


class Assignments(NamedTuple):
    """Which state each step starts in, and how often states come first and follow each other.

    Args:
        one_hot: 1 for the state of each step; 0 for all states where the step is missing.
        initial: how many sequences begin with each state, plus 1/K.
        transitions: how often the row's state is followed by the column's, plus 1/K.
    """

    one_hot: Float[ndarray, "N T K"]
    initial: Float[ndarray, " K"]
    transitions: Float[ndarray, "K K"]


def k_means(rows: Any, states: int, key: Key | None, start: int = 0) -> Assignments:
    """Cluster the steps by k-means, after scaling every column to unit variance.

    Args:
        rows: (N, T, D); NaN is missing. The missing entries of a step are set to their column's mean.
        states: the number of clusters.
        key: a random key; the same key gives the same clusters.
        start: the number of a start among several. 0 is the best of three clusterings by k-means, which is nearly the
            same for every key. The others have to differ, and are in turn the steps nearest to each of the seeds of
            k-means++, one clustering by k-means from random seeds, and the steps nearest to each of random seeds.
    """
    from sklearn.cluster import KMeans, kmeans_plusplus
    from sklearn.metrics import pairwise_distances_argmin

    rows = np.asarray(rows, float)
    present = ~np.isnan(rows).all(-1)
    _check_number_of_states(present, states)
    steps = rows[present]
    unobserved = np.isnan(steps).all(0)
    if unobserved.any():
        raise ValueError(f"The columns {np.flatnonzero(unobserved).tolist()} of y are all missing: leave them out.")
    steps = np.where(np.isnan(steps), np.nanmean(steps, axis=0), steps)
    std = steps.std(axis=0)
    steps = (steps - steps.mean(axis=0)) / np.where(std > 0, std, 1.0)
    random = numpy_random(key)
    subset = steps if len(steps) <= _KMEANS_ROWS else random.choice(steps, _KMEANS_ROWS, replace=False)
    distinct = np.unique(subset, axis=0)
    count, seed = min(states, len(distinct)), int(random.integers(2**31))
    if start == 0:
        centers = KMeans(count, random_state=seed).set_params(n_init=3).fit(subset).cluster_centers_
    elif start % 3 == 1:
        centers = kmeans_plusplus(subset, count, random_state=seed)[0]
    else:
        centers = random.permutation(distinct)[:count]
        if start % 3 == 2:
            centers = KMeans(count).set_params(init=centers, n_init=1).fit(subset).cluster_centers_
    labels = pairwise_distances_argmin(steps, centers)
    one_hot = np.zeros((*present.shape, states))
    one_hot[present] = np.eye(states)[labels]
    return Assignments(one_hot, *_chain_counts(one_hot))


def numpy_random(key: Key | None) -> np.random.Generator:
    """NumPy's generator seeded by a JAX key; by key 0 if there is none."""
    return np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))


def _check_number_of_states(present: ndarray, states: Any) -> None:
    positive_int("states", states, meaning="the number of states or components")
    steps = int(present.sum())
    if steps == 0:
        raise ValueError("All of y is missing (NaN), so there is nothing to fit: check how y was read.")
    if states > steps:
        raise ValueError(
            f"{states} states or components cannot be told apart by {steps} observed rows: some would have none. Use "
            "fewer."
        )


def _chain_counts(one_hot: ndarray) -> tuple[ndarray, ndarray]:
    """How often each state comes first, and follows each other one; 1/K is added to all, so that none is 0."""
    states = one_hot.shape[-1]
    return one_hot[:, 0].sum(0) + 1 / states, np.einsum("nti,ntj->ij", one_hot[:, :-1], one_hot[:, 1:]) + 1 / states


def pooled_moments(rows: Any) -> tuple[ndarray, ndarray]:
    """The mean and the variance of each column over all steps."""
    flat = np.asarray(rows, float).reshape(-1, rows.shape[-1])
    return np.nanmean(flat, axis=0), np.nanvar(flat, axis=0)


def cluster_moments(rows: Any, assignments: Assignments, full: bool) -> tuple[ndarray, ndarray, ndarray]:
    """Each cluster's weight (K,), mean (K, D) and covariance (K, D, D), or variances (K, D) if not `full`.

    One pseudo-row with the mean and the variances of all steps is added to every cluster, so that none is empty. A
    missing entry counts as its column's mean.
    """
    rows = np.asarray(rows, float)
    present = ~np.isnan(rows).all(-1)
    flat, weights = rows[present], assignments.one_hot[present]
    center, variance = pooled_moments(rows)
    deviations = np.where(np.isnan(flat), 0.0, flat - center)
    count = weights.sum(0) + 1
    mean = weights.T @ deviations / count[:, None]
    if full:
        squares = np.stack([(weight[:, None] * deviations).T @ deviations for weight in weights.T]) + np.diag(variance)
        return count, center + mean, squares / count[:, None, None] - mean[:, :, None] * mean[:, None, :]
    return count, center + mean, (weights.T @ deviations**2 + variance) / count[:, None] - mean**2


def random_categories(
    rows: ndarray, states: int, categories: int | None, key: Key | None
) -> tuple[Assignments, Float[ndarray, "K V"]]:
    """A chain that stays half of the time, and each state's category counts: those of all rows, perturbed at random."""
    present = ~np.isnan(rows)
    _check_number_of_states(present, states)
    labels = rows[present].astype(int)
    size = int(labels.max()) + 1 if categories is None else categories
    counts = np.bincount(labels, minlength=size) + 1 / size
    perturbed = counts * numpy_random(key).uniform(0.5, 1.5, (states, size))
    transitions = 0.5 * (np.eye(states) + 1 / states) * present.sum() / states
    initial = np.full(states, len(rows) / states)
    return Assignments(np.zeros((*rows.shape, states)), initial, transitions), perturbed / states


def assign_to_clusters(
    rows: Any,
    count: int,
    covariance: str,
    key: Key | None,
    start: int = 0,
    kinds: tuple[str, ...] = ("full", "diag"),
) -> Assignments:
    """Clusters of rows (N, T, D) for Gaussian components, whose covariances are one of these kinds."""
    if covariance not in kinds:
        names = [f'"{kind}"' for kind in kinds]
        raise ValueError(f"covariance= is {', '.join(names[:-1])} or {names[-1]}, got {covariance!r}.")
    return k_means(rows, count, key, start)


def gaussian_components(
    rows: Any, assignments: Assignments, covariance: str, block: str
) -> tuple[Factor, ExponentialFamily, ExponentialFamily]:
    """The factor E log N(y | component), its block as the clusters give it, and the default prior of a component.

    With m and S the mean and the variances of all rows the prior is a normal–Wishart of mean m, count 0.1, D + 2
    degrees of freedom and E Λ = S⁻¹, or for each entry a normal–gamma of shape 3/2; and the same for a precision that
    all components ("tied") or all entries of a component ("spherical", with the mean of the variances) have in common.

    Args:
        rows: (N, T, D).
        assignments: the clusters.
        covariance: "full", "tied", "diag" or "spherical".
        block: the name of the components' block.
    """
    size, (center, variance) = rows.shape[-1], pooled_moments(rows)
    if np.any(variance <= 0):
        raise ValueError(
            f"The columns {np.flatnonzero(variance <= 0).tolist()} of y do not vary, and a Gaussian of variance 0 has "
            "no density: leave them out."
        )
    weight, mean, cluster_variance = cluster_moments(rows, assignments, covariance in ("full", "tied"))
    # All on the host: an operation of JAX would compile a program for every new number of columns.
    array = lambda x: jnp.asarray(np.asarray(x, float))
    count = array(0.1)
    if covariance == "tied":
        squares, total = np.tensordot(weight, cluster_variance, axes=1), weight.sum()
        df, plates = size + 2.0, len(weight)
        flat = TiedNormalWishart(array(mean), array(weight), array(total + size + 1 - plates), array(inverse(squares)))
        means, counts = np.broadcast_to(center, mean.shape), np.full(plates, 0.1)
        default = TiedNormalWishart(array(means), array(counts), array(df), array(np.diag(1 / variance) / df))
        return factors.multivariate_normal("y", joint=block), flat, default
    if covariance == "spherical":
        squares, counts = weight * cluster_variance.sum(1), np.repeat(weight[:, None], size, axis=1)
        shape = 0.5 * size * (weight - 1) + 1
        flat = SphericalNormalGamma(array(mean), array(counts), array(shape), array(0.5 * squares))
        rate = 1.5 * variance.mean()
        default = SphericalNormalGamma(array(center), array(np.full(size, 0.1)), array(1.5), array(rate))
        return factors.normal("y", joint=block), flat, default
    if covariance == "full":
        scale = np.linalg.inv(cluster_variance) / weight[:, None, None]
        flat = NormalWishart(array(mean), array(weight), array(weight + size), array(scale))
        df = size + 2.0
        default = NormalWishart(array(center), count, array(df), array(np.diag(1 / variance) / df))
        return factors.multivariate_normal("y", joint=block), flat, default
    weight = weight[:, None]
    rate = 0.5 * weight * cluster_variance
    flat = NormalGamma(array(mean), array(weight), array(0.5 * (weight + 1)), array(rate))
    default = NormalGamma(array(center), count, array(1.5), array(1.5 * variance))
    return factors.normal("y", joint=block), flat, default


def inverse(matrix: ndarray) -> ndarray:
    """The inverse of a symmetric matrix, exactly symmetric."""
    inverted = np.linalg.inv(matrix)
    return 0.5 * (inverted + inverted.T)


def with_values(block: Any, means: ndarray | None, precisions: ndarray | None) -> Any:
    """Gaussian components with these means, and with these precisions at their mode; None leaves what they have.

    Args:
        block: the components under a flat prior, as `gaussian_components` makes them.
        means: (K, D).
        precisions: (K, D, D), (D, D), (K, D) or (K,), as the kind of covariances has them.
    """
    array = lambda x: jnp.asarray(np.asarray(x, float))
    if means is not None:
        block = eqx.tree_at(lambda family: family.mean, block, array(means))
    if precisions is None:
        return block
    size = block.mean.shape[-1]
    if isinstance(block, NormalWishart):
        return eqx.tree_at(lambda q: q.scale, block, array(precisions / np.asarray(block.df - size)[:, None, None]))
    if isinstance(block, TiedNormalWishart):
        weight = np.asarray(block.df) - size - 1 + len(block.count)
        return eqx.tree_at(lambda q: q.scale, block, array(precisions / weight))
    less = 0.5 if isinstance(block, NormalGamma) else 1 - 0.5 * size
    return eqx.tree_at(lambda q: q.rate, block, array((np.asarray(block.shape) - less) / precisions))


def with_shifted_mean(block: Any, by: Any) -> Any:
    """Gaussian components (or a `Peak` of them) that were fitted to centred rows, in the rows' own coordinates."""
    if isinstance(block, Peak):
        return Peak(with_shifted_mean(block.of, by))
    return eqx.tree_at(lambda family: family.mean, block, jnp.asarray(np.asarray(block.mean) + by))


def variance_floor(block: str, floor: float) -> dict[str, Factor]:
    r"""A penalty $−\tfrac12 c\,\mathrm{tr}Λ_k$ for each component, which keeps its variance above 0; none for c = 0.

    EM's covariance of a component is the weighted sum of squares over the weight. The penalty adds cI to the sum.
    """
    if not floor:
        return {}
    return {f"least {block}": Factor(Partial(_penalty, jnp.asarray(floor, float)), block, label="floor")}


def _penalty(floor: Array, mu: tuple[Array, ...]) -> Array:
    """−½ c tr E Λ; μ of a normal–Wishart or normal–gamma block begins with (E log|Λ|, E Λ)."""
    full = mu[1].ndim > mu[0].ndim
    return -0.5 * floor * (jnp.trace(mu[1], axis1=-2, axis2=-1) if full else mu[1])


def with_priors(
    blocks: dict[str, ExponentialFamily], defaults: dict[str, ExponentialFamily], priors: Priors
) -> tuple[dict[str, ExponentialFamily], dict[str, Factor]]:
    """The blocks with the natural parameters of their priors added, and the priors' factors.

    Args:
        blocks: each block's start under a flat prior.
        defaults: each block's default prior.
        priors: "flat", "default", or members for some blocks, the others having the default one.
    """
    if isinstance(priors, str) and priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat", "default" or members by block, got {priors!r}.')
    chosen = {} if priors == "flat" else defaults if isinstance(priors, str) else {**defaults, **priors}
    unknown = set(chosen) - set(blocks)
    if unknown:
        raise ValueError(f"priors= names {sorted(unknown)}, and the blocks are {list(blocks)}.")
    add = lambda flat, prior: flat.with_natural(jax.tree.map(jnp.add, flat.natural(), prior.natural()))
    starts = {name: add(flat, chosen[name]) if name in chosen else flat for name, flat in blocks.items()}
    return starts, {f"prior of {name}": factors.prior(name, prior) for name, prior in chosen.items()}
