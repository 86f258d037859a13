"""Linear-Gaussian state spaces with known matrices: Kalman's filter and smoother, as functions of arrays."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Key

from ..families.sites import kalman
from ..families.sites.kalman import FilteredChain, Observations, Smoothed
from ..families.sites.state_space import StateSpace
from ..numerics.checks import positive_int
from ..numerics.linalg import root
from ..numerics.trees import floating


class Filtered(NamedTuple):
    """Every state's mean and covariance given what was seen up to then, and log p(y)."""

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    log_likelihood: Float[Array, ""]


class Forecast(NamedTuple):
    """The mean and the variance of observations to come, their noise included."""

    mean: Array
    variance: Array


def log_likelihood(system: StateSpace, y: Any, noise: Any, *, parallel: bool | None = None) -> Float[Array, ""]:
    r"""$\log p(y)$ with $y_t ∼ N(H_tx_t, R)$: what the filter's predictions say of the observations.

    `y` is (T,) where the state space has one output, (T, m) where it has m; NaN is missing. `noise` R is a number, an
    entry for each output, (m, m), or changes with time, (T,) or (T, m). R = 0 is an exact observation: it is taken as
    10⁻¹² of what the states' own noise adds to the output (10⁻⁶ in float32). Differentiable in the state space and the
    noise.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> round(float(log_likelihood(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0)), 4)
    -2.9023
    """
    return _filter(*_checked(system, y, noise), parallel).log_likelihood


def filter(system: StateSpace, y: Any, noise: Any, *, parallel: bool | None = None) -> Filtered:
    r"""Every state given the observations up to then, $p(x_t \mid y_{0:t})$, and log p(y).

    Arguments as in `log_likelihood`.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in filter(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0).covariance[:, 0, 0]]
    [0.5, 1.5, 0.7143]
    """
    return _filter(*_checked(system, y, noise), parallel)


def smooth(system: StateSpace, y: Any, noise: Any, *, pairs: bool = False, parallel: bool | None = None) -> Smoothed:
    r"""Every state given all observations, $p(x_t \mid y)$; with `pairs` also Cov(x_{t+1}, x_t).

    The answer of one step of `conjugate()` on a `GaussianChain`: the observations' sites, added up.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in smooth(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0).covariance[:, 0, 0]]
    [0.4286, 0.8571, 0.7143]
    """
    return _smooth(*_checked(system, y, noise), pairs, parallel)


def forecast(system: StateSpace, y: Any, noise: Any, steps: int, *, parallel: bool | None = None) -> Forecast:
    """The next observations: what is not there yet is missing. Not for a state space that changes with time.

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> walk = blr.StateSpace(jnp.eye(1), jnp.eye(1), jnp.ones(1))
    >>> [round(float(v), 4) for v in forecast(walk, jnp.array([0.5, jnp.nan, -0.2]), 1.0, 2).variance]
    [2.7143, 3.7143]
    """
    steps = positive_int("steps", steps, meaning="how far to look ahead")
    if system.length is not None:
        raise ValueError(
            "A state space that changes with time does not say how it goes on: give one for all steps, and NaN "
            "in y for the ones to come."
        )
    y = floating(jnp.asarray(y))
    noise = floating(jnp.asarray(noise))
    if noise.ndim and noise.shape == y.shape and not _full(system, noise):
        raise ValueError("A noise that changes with time does not say how it goes on: give R for all steps.")
    longer = jnp.concatenate([y, jnp.full((steps, *y.shape[1:]), jnp.nan, y.dtype)])
    found = filter(system, longer, noise, parallel=parallel)
    mean, spread = found.mean[-steps:], found.covariance[-steps:]
    rows = system.emission if system.outputs else system.emission[None]
    level, variance = mean @ rows.T, jnp.einsum("md,tde,me->tm", rows, spread, rows)
    variance = variance + (jnp.diagonal(noise) if noise.ndim == 2 else noise)
    return Forecast(level.reshape(-1, *system.outputs), variance.reshape(-1, *system.outputs))


def simulate(
    key: Key[Array, ""], system: StateSpace, noise: Any, length: int, shape: tuple[int, ...] = ()
) -> tuple[Float[Array, "... T D"], Array]:
    """States and observations drawn from the model."""
    length = positive_int("length", length, meaning="the number of steps")
    system, _, noise = _checked(system, jnp.zeros((length, *system.outputs), system.mean.dtype), noise)
    first, second, third = jax.random.split(key, 3)
    each = lambda x, rank: x if x.ndim > rank else jnp.broadcast_to(x, (length - 1, *x.shape))
    F, Q, offset = each(system.transition, 2), each(system.noise, 2), each(system.offset, 1)
    draws = jax.random.normal(second, (*shape, length - 1, system.size), system.mean.dtype)
    start = jax.random.normal(first, (*shape, system.size), system.mean.dtype) @ root(system.covariance)

    def step(x: Array, parts: tuple) -> tuple[Array, Array]:
        F, U, offset, draw = parts
        after = x @ F.T + offset + draw @ U
        return after, after

    start = system.mean + start
    _, rest = jax.lax.scan(step, start, (F, root(Q), offset, jnp.moveaxis(draws, -2, 0)))
    states = jnp.concatenate([start[None], rest])
    rows = system.emission if system.outputs else system.emission[None]
    outputs = jnp.einsum("tmd,t...d->t...m" if rows.ndim == 3 else "md,t...d->t...m", rows, states)
    spread = jax.random.normal(third, outputs.shape, outputs.dtype)
    if _full(system, noise):
        spread = spread @ root(noise)
    elif noise.ndim == 1 + len(system.outputs):  # changes with time
        spread = spread * jnp.sqrt(noise).reshape((length, *(1,) * len(shape), -1))
    else:
        spread = spread * jnp.sqrt(noise)
    y = jnp.moveaxis(outputs + spread, 0, len(shape))
    return jnp.moveaxis(states, 0, len(shape)), y if system.outputs else y[..., 0]


@partial(jax.jit, static_argnums=3)
def _filter(system: StateSpace, y: Array, noise: Array, parallel: bool | None) -> Filtered:
    _, chain = _chain(system, y, noise, parallel, ahead=False)
    found = kalman.filter_states(chain, y.shape[0])
    return Filtered(found.mean, found.covariance, kalman.log_likelihood(chain, found))


@partial(jax.jit, static_argnums=(3, 4))
def _smooth(system: StateSpace, y: Array, noise: Array, pairs: bool, parallel: bool | None) -> Smoothed:
    system, found = _chain(system, y, noise, parallel)
    return kalman.smooth_states(system, found, y.shape[0], pairs)


def _chain(
    system: StateSpace, y: Array, noise: Array, parallel: bool | None, ahead: bool = True
) -> tuple[StateSpace, FilteredChain]:
    """The chain that has seen the observations, one output at a time."""
    y = y if system.outputs else y[:, None]
    observed = ~jnp.isnan(y)
    values = jnp.where(observed, y, 0.0)
    if _full(system, noise):
        # R = LDLᵀ of what is there, with ones on L's diagonal: L⁻¹y has independent entries, and y's density.
        eye = jnp.eye(noise.shape[0], dtype=noise.dtype)
        both = observed[:, :, None] & observed[:, None, :]
        factor = jnp.linalg.cholesky(jnp.where(both, noise, eye))
        scale = jnp.diagonal(factor, axis1=1, axis2=2)
        turned = lambda x: scale[..., None] * solve_triangular(factor, x, lower=True)
        rows = jnp.broadcast_to(system.emission, (*y.shape, system.size))
        system = eqx.tree_at(lambda s: s.emission, system, turned(rows))
        values, noise = turned(values[..., None])[..., 0], scale**2
    elif not system.outputs and noise.ndim == 1:
        noise = noise[:, None]
    spread = jnp.broadcast_to(noise + jnp.where(noise == 0, _least(system), 0.0), y.shape)
    one = jnp.ones_like(y)
    sites = Observations(values, jnp.where(observed, one, 0.0), jnp.where(observed, spread, one))
    return system, kalman.filter_chain(system, sites, parallel, ahead)


def _full(system: StateSpace, noise: Array) -> bool:
    """Whether the noise is a covariance (m, m), which it also is where T = m."""
    return bool(system.outputs) and noise.shape == system.outputs * 2


def _least(system: StateSpace) -> Array:
    """What stands for no noise at all: next to nothing beside that of the states, or beside their first doubt."""
    rows = system.emission if system.outputs else system.emission[None]
    shaken = system.noise if system.noise.ndim == 2 else jnp.sum(system.noise, axis=0)
    through = lambda matrix: jnp.einsum("...md,de,...me->...m", rows, matrix, rows)
    noise, first = through(shaken), through(system.covariance)
    tiny = 1e-12 if system.mean.dtype == jnp.float64 else 1e-6
    return jax.lax.stop_gradient(tiny * jnp.where(noise > 0, noise, first))


def _checked(system: StateSpace, y: Any, noise: Any) -> tuple[StateSpace, Array, Array]:
    """Observations and noise that go with the state space, or an error that says why not."""
    if not isinstance(system, StateSpace):
        raise ValueError(f"The first argument is a StateSpace, got a {type(system).__name__}.")
    y, noise = floating(jnp.asarray(y)), floating(jnp.asarray(noise))
    dtype = jnp.result_type(y, noise, *jax.tree.leaves(system))
    system, y, noise = jax.tree.map(lambda x: x.astype(dtype), (system, y, noise))
    if y.ndim != 1 + len(system.outputs) or y.shape[1:] != system.outputs or y.shape[0] == 0:
        shape = "(T,)" if not system.outputs else f"(T, {system.outputs[0]})"
        raise ValueError(
            f"This state space has observations of shape {shape}, got {y.shape}. Many series at once: jax.vmap."
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
        full = _full(system, noise)
        least = np.linalg.eigvalsh(np.asarray(noise, float)).min() if full else np.min(np.asarray(noise))
        if not least >= 0 or (full and least == 0):
            raise ValueError(f"The observations' noise is a variance, and its least is {least:.3g}.")
    if not isinstance(y, Tracer) and np.any(np.isinf(np.asarray(y))):
        raise ValueError("y has infinite entries: a missing observation is NaN.")
    return system, y, noise
