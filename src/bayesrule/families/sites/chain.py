"""A Gaussian chain: a linear-Gaussian state space as the prior, and a Gaussian site on every step's output."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from ...numerics.linalg import matmul, matvec, root, symmetric, with_jitter
from ...numerics.programs import compiled
from ...numerics.random import Key
from ...steps.step import Step
from . import kalman
from .base import SitedGaussian, Sites, Solution, as_sites
from .kalman import FilteredStates
from .state_space import StateSpace


class GaussianChain(SitedGaussian):
    r"""$q(x) ∝ p(x)\exp\sum_t(ν_tf_t − ½κ_tf_t^2)$ with p a `StateSpace` over T steps and $f_t = H_tx_t$ its outputs.

    The prior chain is the base measure and λ = (ν, −½κ) the sites, so that A(λ) is the filter's log-likelihood of the
    sites, μ = ∇A(λ) = (m_t, V_t + m_t²) are the smoother's moments, and transitions without noise need no special
    treatment. An observation $y_t ∼ N(f_t, R)$ is the site $(y_t/R, −½/R)$. Outputs are numbers, (T,), or vectors, (T,
    m), as the state space has them. `mean` and `variance` are the outputs', `states()` the states'. Densities and the
    entropy are relative to the prior (see `SitedGaussian`).

    >>> import jax.numpy as jnp
    >>> walk = StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))                 # steps of variance 1 from N(0, 1)
    >>> q = GaussianChain(walk, 2)
    >>> q.variance.tolist()
    [1.0, 2.0]
    >>> q = q.with_natural((jnp.array([0.0, 3.0]), jnp.array([0.0, -0.5])))            # f₁ observed: 3, precision 1
    >>> [round(float(x), 4) for x in q.mean], [round(float(x), 4) for x in q.variance]
    ([1.0, 2.0], [0.6667, 0.6667])

    Args:
        system: the prior of the states and how they make outputs.
        length: T; not needed where the state space changes with time or sites are given.
        sites: λ, of shapes (T,) and (T,), or (T, m) and (T, m, m); by default none, which is the prior.
        parallel: whether segments of the chain run side by side; by default they do from 64 steps on.
    """

    system: StateSpace
    center: Array
    parallel: bool | None = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian chain"
    meaning: ClassVar[str] = "q(x) ∝ p(x) exp Σ_t(ν_t f_t − ½κ_t f_t²), f_t = H_t x_t, λ = (ν, −½κ), h the prior chain"

    def __init__(self, system: StateSpace, length: int | None = None, sites: Any = None, parallel: bool | None = None):
        if not isinstance(system, StateSpace):
            raise ValueError(f"A GaussianChain has a StateSpace as its prior, got a {type(system).__name__}.")
        implied_length = system.length if sites is None else jnp.shape(sites[0])[0]
        length = implied_length if length is None else length
        if not isinstance(length, int) or length < 1:
            raise ValueError("A GaussianChain needs its number of steps T: GaussianChain(system, T).")
        if system.length not in (None, length):
            raise ValueError(
                f"The state space changes over {system.length} steps, but length= is {length}: leave length= out."
            )
        self.system, self.parallel = system, parallel
        self.center = _prior_mean(system, length)
        self._set_sites(as_sites(sites, self.center, "GaussianChain"))

    @property
    def prior_mean(self) -> Array:
        return self.center

    @property
    def count(self) -> int:
        """T."""
        return self.center.shape[0]

    def solve_sites(self, natural: Sites) -> Solution:
        return _solve(self.system, natural, self.parallel)

    def log_partition(self, natural: Sites) -> Float[Array, ""]:
        return _log_partition(self.system, natural, self.parallel)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½⟨d, μ(λ + d) − μ(λ)⟩, half the sum of the divergences in both directions.

        To second order that is ½⟨d, Fd⟩, and it costs one smoother.
        """
        change = jax.tree.map(jnp.negative, self.direction(step))
        target = self.with_natural(jax.tree.map(jnp.add, self.sites, change))
        difference = jax.tree.map(jnp.subtract, target.expectation(), self.expectation())
        value = 0.5 * self.inner(change, difference)
        return jnp.where(jnp.isnan(value), jnp.inf, jnp.abs(value))

    def states(self) -> tuple[Float[Array, "T D"], Float[Array, "T D D"]]:
        """Each state's mean and covariance given all sites: the smoother."""
        return self.auxiliary

    def pairs(self) -> Any:
        """Cov(x_{t+1}, x_t), given all sites."""
        return _pairs(self.system, self.sites, self.parallel)

    def filtered(self) -> FilteredStates:
        """Each state's mean and covariance given the sites up to its step: the filter."""
        return _filter(self.system, self.sites, self.parallel)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        states = self.sample_states(key, shape)
        return _outputs(self.system, states)

    def sample_states(self, key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "... T D"]:
        """Draws of all states under q: the last one given all sites, and then each given the one after it."""
        return _sample(self.system, self.filtered(), key, shape)


# These functions are compiled, so that they are fast also where the caller is not.


def _filter_chain(
    system: StateSpace, natural: Sites, parallel: bool | None, with_following: bool = True
) -> tuple[StateSpace, kalman.FilteredSegments]:
    """Filter the chain with its sites; also the state space in whose outputs the sites are independent."""
    first, curve = natural[0], -2 * natural[1]
    if system.outputs:
        system, first, curve = _decorrelate(system, first, curve)
    else:
        first, curve = first[:, None], curve[:, None]
    sites = kalman.OutputSites(first, curve, jnp.ones_like(curve))
    return system, kalman.filter_segments(system, sites, parallel, with_following)


@compiled(static="parallel")
def _solve(system: StateSpace, natural: Sites, parallel: bool | None) -> Solution:
    count = natural[0].shape[0]
    decorrelated, chain = _filter_chain(system, natural, parallel)
    states = kalman.smooth_states(decorrelated, chain, count)
    _, log_det = kalman.log_normalizer(chain)
    H = system.emission
    if not system.outputs:
        mean, variance = states.mean @ H, jnp.einsum("d,tde,e->t", H, states.covariance, H)
    else:
        H = jnp.broadcast_to(H, (count, *H.shape[-2:]))
        mean, variance = matvec(H, states.mean), symmetric(matmul(matmul(H, states.covariance), H.mT))
    return Solution(log_det, mean, variance, (states.mean, states.covariance))


@compiled(static="parallel")
def _log_partition(system: StateSpace, natural: Sites, parallel: bool | None) -> Array:
    return kalman.log_partition(_filter_chain(system, natural, parallel, False)[1])


@compiled(static="parallel")
def _pairs(system: StateSpace, natural: Sites, parallel: bool | None) -> Array | None:
    decorrelated, chain = _filter_chain(system, natural, parallel)
    return kalman.smooth_states(decorrelated, chain, natural[0].shape[0], with_pairs=True).pairs


@compiled(static="parallel")
def _filter(system: StateSpace, natural: Sites, parallel: bool | None) -> FilteredStates:
    return kalman.filter_states(_filter_chain(system, natural, parallel, False)[1], natural[0].shape[0])


@compiled(static="shape")
def _sample(system: StateSpace, filtered: FilteredStates, key: Key, shape: tuple[int, ...]) -> Float[Array, "... T D"]:
    mean, cov = filtered.mean, filtered.covariance
    predicted_mean, predicted_cov = kalman.predict_states(system, mean, cov)
    F = jnp.broadcast_to(system.each("transition", len(mean)), cov.shape)
    Q = jnp.broadcast_to(system.each("noise", len(mean)), cov.shape)
    # The predicted covariance may be singular (transitions without noise).
    factor = jnp.linalg.cholesky(with_jitter(predicted_cov))
    eye = jnp.eye(system.size, dtype=cov.dtype)
    gain = cho_solve((factor, True), matmul(F, cov)).mT
    rest = eye - matmul(gain, F)
    # The covariance of a state given the one after it, in Joseph's form, which stays positive semi-definite.
    conditional_cov = matmul(matmul(rest, cov), rest.mT) + matmul(matmul(gain, Q), gain.mT)
    roots = root(symmetric(conditional_cov)).mT.at[-1].set(root(cov[-1]).T)
    gain = gain.at[-1].set(0.0)
    noise = jax.random.normal(key, (*shape, *mean.shape), mean.dtype)

    def step(after: Array, x: tuple[Any, ...]) -> tuple[Array, Array]:
        mean, predicted_mean, gain, root, noise = x
        state = mean + (after - predicted_mean) @ gain.T + noise @ root.T
        return state, state

    xs = (mean, predicted_mean, gain, roots, jnp.moveaxis(noise, -2, 0))
    _, draws = jax.lax.scan(step, jnp.zeros((*shape, system.size), mean.dtype), xs, reverse=True)
    return jnp.moveaxis(draws, 0, -2)


def _outputs(system: StateSpace, states: Float[Array, "... T D"]) -> Array:
    """H_t x_t."""
    H = system.emission
    return states @ H if H.ndim == 1 else jnp.einsum("md,...d->...m" if H.ndim == 2 else "tmd,...td->...tm", H, states)


def _prior_mean(system: StateSpace, length: int) -> Array:
    """Each output's mean under the prior."""
    if system.centered:
        return jnp.zeros((length, *system.outputs), system.mean.dtype)

    def step(mean: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        return matvec(x[0], mean) + x[1], mean

    size = system.size
    F = jnp.broadcast_to(system.each("transition", length), (length, size, size))
    offset = jnp.broadcast_to(system.each("offset", length), (length, size))
    _, means = jax.lax.scan(step, system.mean, (F, offset))
    return _outputs(system, means)


def _decorrelate(
    system: StateSpace, first: Float[Array, "T m"], curve: Float[Array, "T m m"]
) -> tuple[StateSpace, Float[Array, "T m"], Float[Array, "T m"]]:
    """The outputs f' = Lᵀf in which the sites are independent, from κ = LDLᵀ, which exists for negative κ too."""
    size = curve.shape[-1]
    rows, pivots = [], []
    remainder, linear = curve, first
    emission = jnp.broadcast_to(system.emission, (curve.shape[0], *system.emission.shape[-2:]))
    for k in range(size):
        pivot = remainder[:, k, k]
        column = jnp.where(pivot[:, None] == 0, 0.0, remainder[:, :, k] / jnp.where(pivot == 0, 1.0, pivot)[:, None])
        column = column.at[:, k].set(1.0).at[:, :k].set(0.0)
        remainder = remainder - pivot[:, None, None] * column[:, :, None] * column[:, None, :]
        rows.append(jnp.einsum("tm,tmd->td", column, emission))
        pivots.append(pivot)
        # This forms L⁻¹ν, one column of L at a time.
        linear = linear - jnp.where(jnp.arange(size) > k, column, 0.0) * linear[:, k, None]
    decorrelated = eqx.tree_at(lambda s: s.emission, system, jnp.stack(rows, axis=1))
    return decorrelated, linear, jnp.stack(pivots, axis=1)
