"""Linear-Gaussian state spaces with unknown matrices: transitions, loadings and noise by EM or variational messages."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import factors
from ..factor_graph.model import Model
from ..families.gamma import Gamma
from ..families.gaussian.banded import BandedGaussian
from ..families.gaussian.full import Gaussian
from ..families.product import Product
from ..families.sites.state_space import StateSpace
from ..numerics.random import Key
from .sequences import sequences
from .starts.principal import principal_components

__all__ = ["linear_gaussian", "state_space"]

_FIRST_PRECISION = 0.1  # of the first state


def linear_gaussian(
    y: Any, states: int, *, priors: Literal["flat", "default"] = "flat", lengths: bool = False, key: Key | None = None
) -> Model:
    r"""$x_{t+1} ∼ N(Ax_t, I)$ and $y_{tm} ∼ N(c_m^⊤x_t, 1/τ_m)$ with A, C and τ unknown, and $x_0 ∼ N(0, 10I)$.

    The states' noise is I without loss of generality: any other is a change of their coordinates. Subtract the mean of
    y first, and fit with `data={"y": sequences(y)}`. Flat priors are maximum likelihood, for `em()`. The default ones,
    for `vmp()` and `svi()`, are BayesPy's: an unknown precision for every column of A and of C, so that the columns of
    a state that is not needed shrink to 0, and Gamma(10⁻³, 10⁻³) for all precisions.

    Args:
        y: one series (T, M), many (N, T, M), or a list; NaN is missing, entry by entry.
        states: the number of states.
        priors: "flat" or "default".
        lengths: that the data also have "lengths" (N,), how many steps each series has. The steps after these are
            padding; without it they would be states without observations, which count in the bound.
        key: a random key, for the loadings of states beyond the principal components of y, from which C starts.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jnp.sin(jnp.arange(60.0) / 4)[:, None] + 0.1 * jax.random.normal(jax.random.key(0), (60, 2))
    >>> result = blr.fit(blr.em(), linear_gaussian(y, 2), None, {"y": sequences(y)}, steps=20)
    >>> system, noise = state_space(result.q)
    >>> system, noise.shape
    (StateSpace(2 states, 2 outputs), (2,))
    """
    rows = sequences(y)
    if rows.shape[1] < 2:
        raise ValueError(
            "Series of one step have no transitions, from which a state space is estimated: give at least two steps."
        )
    if priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat" (maximum likelihood) or "default", got {priors!r}.')
    loadings, noise = principal_components(np.asarray(rows, float).reshape(-1, rows.shape[2]), states, key)
    size, outputs = states, rows.shape[2]
    around = lambda mean: Gaussian(mean, jnp.broadcast_to(10 * jnp.eye(size), (len(mean), size, size)))
    blocks: dict[str, Any] = {
        "loadings": around(loadings),
        "transition": around(0.5 * jnp.eye(size)),
        "noise": Gamma(jnp.asarray(np.full(outputs, 2.0)), noise),
    }
    terms = {
        "beginning": factors.beginning("states", mean=jnp.zeros(size), precision=_FIRST_PRECISION * jnp.eye(size)),
        "dynamics": factors.dynamics("states", transition="transition", lengths="lengths" if lengths else None),
        "y": factors.bilinear("y", "states", "loadings", precision="noise"),
    }
    if priors == "default":
        vague = Gamma(jnp.asarray(1e-3), jnp.asarray(1e-3))
        blocks |= {name: Gamma(jnp.ones(size), jnp.ones(size)) for name in ("scales", "rates")}
        terms |= {f"prior of {name}": factors.prior(name, vague) for name in ("scales", "rates", "noise")}
        terms["loadings"] = factors.gaussian("loadings", precision="scales")
        terms["transition"] = factors.gaussian("transition", precision="rates")
    return Model(blocks, terms, local={"states": BandedGaussian.independent(rows.shape[1], size)})


def state_space(q: Product) -> tuple[StateSpace, Float[Array, " M"]]:
    """The state space and the noise variances at the means of a fitted q, as the functions of `kalman` take them."""
    system = StateSpace(
        q["transition"].mean,
        jnp.eye(q["transition"].mean.shape[-1]),
        q["loadings"].mean,
        None,
        jnp.eye(q["transition"].mean.shape[-1]) / _FIRST_PRECISION,
    )
    return system, 1 / q["noise"].mean
