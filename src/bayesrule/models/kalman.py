r"""Linear-Gaussian state spaces with known matrices: Kalman's filter and smoother, as functions of arrays.

An observation $y_t ∼ N(H_tx_t, R)$ is a conjugate factor, with the message $(y_t/R, −½/R)$ to the output
$f_t = H_tx_t$. On a `GaussianChain`, whose base measure is the prior of the states, λ is the sum of these messages;
A(λ) is the filter's log-likelihood and ∇A(λ) the smoother. So one step of `conjugate()` with ρ = 1 is the Kalman
smoother.

The functions of this file do not take that step: they call the same filter and smoother on the observations directly. A
step of the rule starts from a q, whose moments are a pass of the smoother over the prior, and computes the step's
diagnostics, which is another: for 10,000 steps of four states it takes 3.2 times as long (2.5 times in float32). And as
(y, 1, R) instead of (y/R, −½/R) an observation may be exact, R = 0. That both give the same numbers is a test
(tests/models/test_chains.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from ..families.sites import kalman
from ..families.sites.kalman import FilteredSegments, OutputSites, Smoothed
from ..families.sites.state_space import StateSpace
from ..numerics.checks import positive_int
from ..numerics.linalg import root
from ..numerics.programs import compiled
from ..numerics.random import Key
from ..numerics.trees import floating

__all__ = ["Filtered", "Forecast", "filter", "forecast", "log_likelihood", "simulate", "smooth"]


class Filtered(NamedTuple):
    """Every state's mean and covariance given the observations up to its step, and log p(y).

    Attributes:
        mean: E[x_t | y_{0:t}].
        covariance: Cov[x_t | y_{0:t}].
        log_likelihood: log p(y).

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> filtered = filter(walk, jnp.array([0.5, -0.2]), 1.0)
    >>> filtered.mean[:, 0].tolist(), float(filtered.log_likelihood)
    ([0.25, -0.02], -2.7456)
    """

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    log_likelihood: Float[Array, ""]


class Forecast(NamedTuple):
    """The mean and the variance of future observations, their noise included."""

    mean: Array
    variance: Array


def log_likelihood(system: StateSpace, y: Any, noise: Any, *, parallel: bool | None = None) -> Float[Array, ""]:
    r"""$\log p(y) = \sum_t\log N(y_t \mid H_tE[x_t \mid y_{0:t−1}], H_t\mathrm{Cov}[x_t \mid y_{0:t−1}]H_t^⊤ + R)$.

    Differentiable in the state space and the noise.

    Args:
        system: the prior of the states.
        y: the observations, (T,) where the state space has one output, (T, m) where it has m; NaN is missing. An
            infinite one is an error. Under `jit`, where nothing can be raised, log p(y) is then −∞, and the mean of
            every state that is given it is NaN.
        noise: R, a variance: a number, one for each output (m,), a covariance (m, m), or one for each step, (T,) or
            (T, m). R = 0 is an exact observation: it is replaced by 10⁻¹² of the variance that the states' noise adds
            to the output (10⁻⁶ in float32).
        parallel: whether segments of the chain run side by side; by default from 64 steps on.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> round(float(log_likelihood(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0)), 4)
    -2.9023
    """
    return _filter(*_checked(system, y, noise), parallel).log_likelihood


def filter(system: StateSpace, y: Any, noise: Any, *, parallel: bool | None = None) -> Filtered:
    r"""The filter: every state given the observations up to its step, $p(x_t \mid y_{0:t})$, and log p(y).

    Arguments as for `log_likelihood`.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in filter(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0).covariance[:, 0, 0]]
    [0.5, 1.5, 0.7143]
    """
    return _filter(*_checked(system, y, noise), parallel)


def smooth(system: StateSpace, y: Any, noise: Any, *, pairs: bool = False, parallel: bool | None = None) -> Smoothed:
    r"""The smoother: every state given all observations, $p(x_t \mid y)$.

    The numbers are those of one step of `conjugate()` on a `GaussianChain` with the factor `linear`; the smoother is
    called directly, because the step would cost two to three times as much (see the module's docstring).

    Args:
        system, y, noise, parallel: as for `log_likelihood`.
        pairs: whether to return Cov(x_{t+1}, x_t) too.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in smooth(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0).covariance[:, 0, 0]]
    [0.4286, 0.8571, 0.7143]
    """
    return _smooth(*_checked(system, y, noise), pairs, parallel)


def forecast(system: StateSpace, y: Any, noise: Any, steps: int, *, parallel: bool | None = None) -> Forecast:
    """The mean and the variance of the next observations, by filtering them as missing ones.

    Args:
        system: a state space that does not change with time.
        y: the observations so far, as for `log_likelihood`.
        noise: R, as for `log_likelihood` but constant in time.
        steps: how many steps to predict.
        parallel: as for `log_likelihood`.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in forecast(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0, 2).variance]
    [2.7143, 3.7143]
    """
    steps = positive_int("steps", steps, meaning="how far to look ahead")
    if system.length is not None:
        raise ValueError(
            "A state space that changes with time is not known beyond the last step: call filter() with one that "
            "covers the future steps, and NaN in y for them."
        )
    y = floating(jnp.asarray(y))
    noise = floating(jnp.asarray(noise))
    if noise.ndim and noise.shape == y.shape and not _is_covariance(system, noise):
        raise ValueError(
            "A noise that changes with time is not known beyond the last step: give one R for all steps, or call "
            "filter() with R for the future steps too and NaN in y for them."
        )
    longer = jnp.concatenate([y, jnp.full((steps, *y.shape[1:]), jnp.nan, y.dtype)])
    filtered = filter(system, longer, noise, parallel=parallel)
    state_mean, state_cov = filtered.mean[-steps:], filtered.covariance[-steps:]
    emission = system.emission if system.outputs else system.emission[None]
    mean, variance = state_mean @ emission.T, jnp.einsum("md,tde,me->tm", emission, state_cov, emission)
    variance = variance + (jnp.diagonal(noise) if noise.ndim == 2 else noise)
    return Forecast(mean.reshape(-1, *system.outputs), variance.reshape(-1, *system.outputs))


def simulate(
    key: Key, system: StateSpace, noise: Any, length: int, shape: tuple[int, ...] = ()
) -> tuple[Float[Array, "... T D"], Array]:
    """States (…, T, D) and observations (…, T) or (…, T, m) drawn from the model.

    Args:
        key: a random key.
        system: the prior of the states.
        noise: R, as for `log_likelihood`.
        length: T.
        shape: how many series to draw.

    >>> import jax, jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> states, observations = simulate(jax.random.key(0), walk, 0.1, length=5, shape=(2,))
    >>> states.shape, observations.shape
    ((2, 5, 1), (2, 5))
    """
    length = positive_int("length", length, meaning="the number of steps")
    system, _, noise = _checked(system, jnp.zeros((length, *system.outputs), system.mean.dtype), noise)
    first_key, state_key, observation_key = jax.random.split(key, 3)
    per_step = lambda x, rank: x if x.ndim > rank else jnp.broadcast_to(x, (length - 1, *x.shape))
    F, Q, offset = per_step(system.transition, 2), per_step(system.noise, 2), per_step(system.offset, 1)
    state_noise = jax.random.normal(state_key, (*shape, length - 1, system.size), system.mean.dtype)
    deviation = jax.random.normal(first_key, (*shape, system.size), system.mean.dtype) @ root(system.covariance)

    def step(x: Array, parts: tuple[Any, ...]) -> tuple[Array, Array]:
        F, U, offset, noise = parts
        following = x @ F.T + offset + noise @ U
        return following, following

    first = system.mean + deviation
    _, rest = jax.lax.scan(step, first, (F, root(Q), offset, jnp.moveaxis(state_noise, -2, 0)))
    states = jnp.concatenate([first[None], rest])
    emission = system.emission if system.outputs else system.emission[None]
    outputs = jnp.einsum("tmd,t...d->t...m" if emission.ndim == 3 else "md,t...d->t...m", emission, states)
    observation_noise = jax.random.normal(observation_key, outputs.shape, outputs.dtype)
    if _is_covariance(system, noise):
        observation_noise = observation_noise @ root(noise)
    elif noise.ndim == 1 + len(system.outputs):  # one variance for each step
        observation_noise = observation_noise * jnp.sqrt(noise).reshape((length, *(1,) * len(shape), -1))
    else:
        observation_noise = observation_noise * jnp.sqrt(noise)
    y = jnp.moveaxis(outputs + observation_noise, 0, len(shape))
    return jnp.moveaxis(states, 0, len(shape)), y if system.outputs else y[..., 0]


@compiled(static="parallel")
def _filter(system: StateSpace, y: Array, noise: Array, parallel: bool | None) -> Filtered:
    infinite, y = _split_infinite(y)
    _, chain = _chain(system, y, noise, parallel, with_following=False)
    filtered = kalman.filter_states(chain, y.shape[0])
    after = jnp.cumsum(infinite) > 0
    mean = jnp.where(after[:, None], jnp.nan, filtered.mean)
    log_likelihood = jnp.where(after[-1], -jnp.inf, kalman.log_likelihood(chain, filtered))
    return Filtered(mean, filtered.covariance, log_likelihood)


@compiled(static=("pairs", "parallel"))
def _smooth(system: StateSpace, y: Array, noise: Array, pairs: bool, parallel: bool | None) -> Smoothed:
    infinite, y = _split_infinite(y)
    system, chain = _chain(system, y, noise, parallel)
    smoothed = kalman.smooth_states(system, chain, y.shape[0], pairs)
    return smoothed._replace(mean=jnp.where(jnp.any(infinite), jnp.nan, smoothed.mean))


def _split_infinite(y: Array) -> tuple[Bool[Array, " T"], Array]:
    """Which steps have an infinite observation, and the observations without those.

    Such an observation has the density 0 under every state, so that log p(y) = −∞ and the states given it do not exist.
    `_checked` refuses it; under `jit`, where nothing can be raised, the results are −∞ and NaN.
    """
    infinite = jnp.isinf(y)
    return jnp.any(infinite.reshape(y.shape[0], -1), axis=1), jnp.where(infinite, jnp.nan, y)


def _chain(
    system: StateSpace, y: Array, noise: Array, parallel: bool | None, with_following: bool = True
) -> tuple[StateSpace, FilteredSegments]:
    """The filtered chain, and the state space whose outputs are observed independently.

    The filter takes one output at a time, so the observations of a step must have independent noise. A covariance R is
    diagonalised for that: with R = LDLᵀ and L unit lower triangular, L⁻¹y has independent noise D, the emissions
    L⁻¹H, and the same density as y, since |L| = 1. Missing outputs are left out of R before.
    """
    y = y if system.outputs else y[:, None]
    observed = ~jnp.isnan(y)
    values = jnp.where(observed, y, 0.0)
    if _is_covariance(system, noise):
        eye = jnp.eye(noise.shape[0], dtype=noise.dtype)
        both = observed[:, :, None] & observed[:, None, :]
        factor = jnp.linalg.cholesky(jnp.where(both, noise, eye))
        scale = jnp.diagonal(factor, axis1=1, axis2=2)
        decorrelated = lambda x: scale[..., None] * solve_triangular(factor, x, lower=True)
        emission = jnp.broadcast_to(system.emission, (*y.shape, system.size))
        system = eqx.tree_at(lambda s: s.emission, system, decorrelated(emission))
        values, noise = decorrelated(values[..., None])[..., 0], scale**2
    elif not system.outputs and noise.ndim == 1:
        noise = noise[:, None]
    variance = jnp.broadcast_to(noise + jnp.where(noise == 0, _least_noise(system), 0.0), y.shape)
    one = jnp.ones_like(y)
    sites = OutputSites(values, jnp.where(observed, one, 0.0), jnp.where(observed, variance, one))
    return system, kalman.filter_segments(system, sites, parallel, with_following)


def _is_covariance(system: StateSpace, noise: Array) -> bool:
    """Whether the noise is a covariance (m, m), which is also how it is read where T = m."""
    return bool(system.outputs) and noise.shape == system.outputs * 2


def _least_noise(system: StateSpace) -> Array:
    """The variance that stands for an exact observation: tiny beside the outputs' own.

    Those are the variances that the states' noise adds to each output or, for states without noise, the variance of the
    first state.
    """
    emission = system.emission if system.outputs else system.emission[None]
    total_noise = system.noise if system.noise.ndim == 2 else jnp.sum(system.noise, axis=0)
    output_variance = lambda matrix: jnp.einsum("...md,de,...me->...m", emission, matrix, emission)
    noise, first = output_variance(total_noise), output_variance(system.covariance)
    tiny = 1e-12 if system.mean.dtype == jnp.float64 else 1e-6
    return jax.lax.stop_gradient(tiny * jnp.where(noise > 0, noise, first))


def _checked(system: StateSpace, y: Any, noise: Any) -> tuple[StateSpace, Array, Array]:
    """Observations and noise as arrays of one type, checked against the state space."""
    if not isinstance(system, StateSpace):
        raise ValueError(f"The first argument is a StateSpace, got a {type(system).__name__}.")
    y, noise = floating(jnp.asarray(y)), floating(jnp.asarray(noise))
    dtype = jnp.result_type(y, noise, *jax.tree.leaves(system))
    system, y, noise = jax.tree.map(lambda x: x.astype(dtype), (system, y, noise))
    if y.ndim != 1 + len(system.outputs) or y.shape[1:] != system.outputs or y.shape[0] == 0:
        shape = "(T,)" if not system.outputs else f"(T, {system.outputs[0]})"
        raise ValueError(
            f"This state space has observations of shape {shape}, got {y.shape}. For many series at once use jax.vmap."
        )
    if system.length not in (None, y.shape[0]):
        raise ValueError(f"The state space changes over {system.length} steps, and y has {y.shape[0]}.")
    width = system.outputs or (1,)
    shapes = {(), y.shape, *([width, width * 2] if system.outputs else [])}
    if noise.ndim > 2 or noise.shape not in shapes:
        raise ValueError(
            f"The observations' noise is a variance R: one of the shapes {sorted(shapes)} for y of shape {y.shape}, "
            f"got {noise.shape}."
        )
    if not isinstance(noise, Tracer):
        full = _is_covariance(system, noise)
        least = np.linalg.eigvalsh(np.asarray(noise, float)).min() if full else np.min(np.asarray(noise))
        if not least >= 0 or (full and least == 0):
            raise ValueError(
                f"The observations' noise is a variance, positive (or 0 where it is no matrix), and the smallest "
                f"{'eigenvalue' if full else 'entry'} is {least:.3g}."
            )
    if not isinstance(y, Tracer) and np.any(np.isinf(np.asarray(y))):
        step = int(np.argwhere(np.isinf(np.asarray(y)))[0, 0])
        raise ValueError(f"y has infinite entries, the first one in step {step}: a missing observation is NaN.")
    return system, y, noise
