"""A Gaussian chain: a linear-Gaussian state space as the prior, and a Gaussian site on every step's output."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from ...numerics.linalg import matmul, matvec, root, symmetric, with_jitter
from ...numerics.random import Key
from ...steps.step import Step
from . import kalman
from .base import SitedGaussian, Sites, Solved, as_sites
from .kalman import Filtered
from .state_space import StateSpace


class GaussianChain(SitedGaussian):
    r"""$q(x) ∝ p(x)\exp\sum_t(ν_tf_t − ½κ_tf_t^2)$ with p a `StateSpace` over T steps and $f_t = H_tx_t$ its outputs.

    The prior chain is the base measure and λ the sites, so that A(λ) is a filter's log-likelihood, μ = ∇A(λ) a
    smoother's moments, and transitions without noise are as good as any. An observation $y_t ∼ N(f_t, R)$ is the site
    $(y_t/R, −½/R)$. Outputs are numbers, (T,), or vectors, (T, m), as the state space has them. `mean` and `spread` are
    the outputs', `states()` all of the state's. `parallel` says whether stretches of the chain run side by side; by
    default they do from 64 steps on. Densities and the entropy are relative to the prior (see `SitedGaussian`).

    >>> import jax.numpy as jnp
    >>> walk = StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))                 # steps of variance 1 from N(0, 1)
    >>> q = GaussianChain(walk, 2)
    >>> q.spread.tolist()
    [1.0, 2.0]
    >>> q = q.with_natural((jnp.array([0.0, 3.0]), jnp.array([0.0, -0.5])))            # f₁ seen: 3 with precision 1
    >>> [round(float(x), 4) for x in q.mean], [round(float(x), 4) for x in q.spread]
    ([1.0, 2.0], [0.6667, 0.6667])
    """

    system: StateSpace
    center: Array
    parallel: bool | None = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian chain"
    meaning: ClassVar[str] = "q(x) ∝ p(x) exp Σ_t(ν_t f_t − ½κ_t f_t²), f_t = H_t x_t, λ = (ν, −½κ), h the prior chain"

    def __init__(self, system: StateSpace, length: int | None = None, sites: Any = None, parallel: bool | None = None):
        if not isinstance(system, StateSpace):
            raise ValueError(f"A GaussianChain has a StateSpace as its prior, got a {type(system).__name__}.")
        known = system.length if sites is None else jnp.shape(sites[0])[0]
        length = known if length is None else length
        if not isinstance(length, int) or length < 1:
            raise ValueError("A GaussianChain needs its number of steps, GaussianChain(system, T).")
        if system.length not in (None, length):
            raise ValueError(f"The state space changes over {system.length} steps, and the chain has {length}.")
        self.system, self.parallel = system, parallel
        self.center = _prior_mean(system, length)
        self._settle(as_sites(sites, self.center, "GaussianChain"))

    @property
    def prior_mean(self) -> Array:
        return self.center

    @property
    def count(self) -> int:
        """T."""
        return self.center.shape[0]

    def solved(self, natural: Sites) -> Solved:
        return _solved(self.system, natural, self.parallel)

    def log_partition(self, natural: Sites) -> Float[Array, ""]:
        return _log_partition(self.system, natural, self.parallel)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½⟨d, μ(λ + d) − μ(λ)⟩, half the divergences both ways: ½⟨d, Fd⟩ to second order, for a smoother's price."""
        change = jax.tree.map(jnp.negative, self.direction(step))
        ahead = self.with_natural(jax.tree.map(jnp.add, self.sites, change))
        far = jax.tree.map(jnp.subtract, ahead.expectation(), self.expectation())
        value = 0.5 * self.inner(change, far)
        return jnp.where(jnp.isnan(value), jnp.inf, jnp.abs(value))

    def states(self) -> tuple[Float[Array, "T D"], Float[Array, "T D D"]]:
        """Every state's mean and covariance, given all sites: the smoother."""
        return self.kept

    def pairs(self) -> Any:
        """Cov(x_{t+1}, x_t), given all sites."""
        return _pairs(self.system, self.sites, self.parallel)

    def filtered(self) -> Filtered:
        """Every state's mean and covariance given the sites up to its step: the filter."""
        return _filtered(self.system, self.sites, self.parallel)

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        states = self.sample_states(key, shape)
        return _outputs(self.system, states)

    def sample_states(self, key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "... T D"]:
        """Draws of all states: the last one given everything, and then each given the one after it."""
        return _sampled(self.system, self.filtered(), key, shape)


# Compiled by themselves, so that they are fast outside of a jitted function too.


def _chain(
    system: StateSpace, natural: Sites, parallel: bool | None, ahead: bool = True
) -> tuple[StateSpace, kalman.Chain]:
    """The chain with its sites, and the state space whose outputs these are."""
    first, curve = natural[0], -2 * natural[1]
    if system.outputs:
        system, first, curve = _rotated(system, first, curve)
    else:
        first, curve = first[:, None], curve[:, None]
    return system, kalman.chain(system, kalman.Observations(first, curve, jnp.ones_like(curve)), parallel, ahead)


@partial(jax.jit, static_argnums=2)
def _solved(system: StateSpace, natural: Sites, parallel: bool | None) -> Solved:
    count = natural[0].shape[0]
    turned, found = _chain(system, natural, parallel)
    states = kalman.smoothed(turned, found, count)
    _, log_det = kalman.log_normalizer(found)
    H = system.emission
    if not system.outputs:
        mean, spread = states.mean @ H, jnp.einsum("d,tde,e->t", H, states.covariance, H)
    else:
        H = jnp.broadcast_to(H, (count, *H.shape[-2:]))
        mean, spread = matvec(H, states.mean), symmetric(matmul(matmul(H, states.covariance), H.mT))
    return Solved(log_det, mean, spread, (states.mean, states.covariance))


@partial(jax.jit, static_argnums=2)
def _log_partition(system: StateSpace, natural: Sites, parallel: bool | None) -> Array:
    return kalman.log_partition(_chain(system, natural, parallel, False)[1])


@partial(jax.jit, static_argnums=2)
def _pairs(system: StateSpace, natural: Sites, parallel: bool | None) -> Array | None:
    turned, found = _chain(system, natural, parallel)
    return kalman.smoothed(turned, found, natural[0].shape[0], pairs=True).pairs


@partial(jax.jit, static_argnums=2)
def _filtered(system: StateSpace, natural: Sites, parallel: bool | None) -> Filtered:
    return kalman.filtered(_chain(system, natural, parallel, False)[1], natural[0].shape[0])


@partial(jax.jit, static_argnums=3)
def _sampled(system: StateSpace, found: Filtered, key: Any, shape: tuple[int, ...]) -> Float[Array, "... T D"]:
    mean, cov = found.mean, found.covariance
    ahead, spread = kalman.predicted(system, mean, cov)
    F = jnp.broadcast_to(system.each("transition", len(mean)), cov.shape)
    Q = jnp.broadcast_to(system.each("noise", len(mean)), cov.shape)
    # The predicted covariance may be singular (transitions without noise).
    factor = jnp.linalg.cholesky(with_jitter(spread))
    eye = jnp.eye(system.size, dtype=cov.dtype)
    gain = cho_solve((factor, True), matmul(F, cov)).mT
    rest = eye - matmul(gain, F)
    left = matmul(matmul(rest, cov), rest.mT) + matmul(matmul(gain, Q), gain.mT)
    roots = root(symmetric(left)).mT.at[-1].set(root(cov[-1]).T)
    gain = gain.at[-1].set(0.0)
    noise = jax.random.normal(key, (*shape, *mean.shape), mean.dtype)

    def step(after: Array, x: tuple) -> tuple[Array, Array]:
        mean, ahead, gain, root, noise = x
        here = mean + (after - ahead) @ gain.T + noise @ root.T
        return here, here

    xs = (mean, ahead, gain, roots, jnp.moveaxis(noise, -2, 0))
    _, drawn = jax.lax.scan(step, jnp.zeros((*shape, system.size), mean.dtype), xs, reverse=True)
    return jnp.moveaxis(drawn, 0, -2)


def _outputs(system: StateSpace, states: Float[Array, "... T D"]) -> Array:
    """H_t x_t."""
    H = system.emission
    return states @ H if H.ndim == 1 else jnp.einsum("md,...d->...m" if H.ndim == 2 else "tmd,...td->...tm", H, states)


def _prior_mean(system: StateSpace, length: int) -> Array:
    """Every output's mean under the prior."""
    if system.centered:
        return jnp.zeros((length, *system.outputs), system.mean.dtype)

    def step(mean: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        return matvec(x[0], mean) + x[1], mean

    size = system.size
    F = jnp.broadcast_to(system.each("transition", length), (length, size, size))
    offset = jnp.broadcast_to(system.each("offset", length), (length, size))
    _, means = jax.lax.scan(step, system.mean, (F, offset))
    return _outputs(system, means)


def _rotated(
    system: StateSpace, first: Float[Array, "T m"], curve: Float[Array, "T m m"]
) -> tuple[StateSpace, Float[Array, "T m"], Float[Array, "T m"]]:
    """The outputs f' = Lᵀf in which the sites stand alone, with κ = LDLᵀ: also where κ is not positive."""
    size = curve.shape[-1]
    rows, pivots = [], []
    left, push = curve, first
    emission = jnp.broadcast_to(system.emission, (curve.shape[0], *system.emission.shape[-2:]))
    for k in range(size):
        pivot = left[:, k, k]
        column = jnp.where(pivot[:, None] == 0, 0.0, left[:, :, k] / jnp.where(pivot == 0, 1.0, pivot)[:, None])
        column = column.at[:, k].set(1.0).at[:, :k].set(0.0)
        left = left - pivot[:, None, None] * column[:, :, None] * column[:, None, :]
        rows.append(jnp.einsum("tm,tmd->td", column, emission))
        pivots.append(pivot)
        # L⁻¹ν, a column of L at a time
        push = push - jnp.where(jnp.arange(size) > k, column, 0.0) * push[:, k, None]
    turned = eqx.tree_at(lambda s: s.emission, system, jnp.stack(rows, axis=1))
    return turned, push, jnp.stack(pivots, axis=1)
