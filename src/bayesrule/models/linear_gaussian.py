"""Linear-Gaussian state spaces to be learnt: transitions, loadings and noise by EM or variational messages."""

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
from ..families.sites.state_space import StateSpace
from .sequences import sequences
from .starts.principal import principal

_FIRST = 0.1  # the first state's precision


def linear_gaussian(
    y: Any, states: int, *, priors: Literal["flat", "default"] = "flat", lengths: bool = False, key: Any = None
) -> Model:
    r"""$x_{t+1} ∼ N(Ax_t, I)$ and $y_{tm} ∼ N(c_m^⊤x_t, 1/τ_m)$ with A, C and τ unknown, and $x_0 ∼ N(0, 10I)$.

    States of unit noise are no loss: any other is a change of their coordinates. `y` is one series (T, M), many (N, T,
    M), or a list; NaN is missing, entry by entry. Subtract its mean first. Fit with `data={"y": sequences(y)}`: flat
    priors are maximum likelihood, for `em()`; the default ones, for `vmp()` and `svi()`, are BayesPy's: a precision for
    every column of A and of C (a state that is not needed fades), and Gamma(10⁻³, 10⁻³) for all precisions. The
    start has C from the principal components of y, drawn beyond those (`key`). With `lengths` the data also have
    "lengths" (N,), how many steps each series has: what follows is filling, and not states that nothing is known of.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jnp.sin(jnp.arange(60.0) / 4)[:, None] + 0.1 * jax.random.normal(jax.random.key(0), (60, 2))
    >>> result = blr.fit(blr.em(), linear_gaussian(y, 2), None, {"y": sequences(y)}, steps=20)
    >>> system, noise = state_space(result.q)
    >>> system, noise.shape
    (StateSpace(2 states, 2 outputs), (2,))
    """
    rows = sequences(y)
    if rows.shape[1] < 2:
        raise ValueError("A state space is learnt from series of at least two steps: one says nothing of transitions.")
    if priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat" (maximum likelihood) or "default", got {priors!r}.')
    loadings, noise = principal(np.asarray(rows, float).reshape(-1, rows.shape[2]), states, key)
    size, outputs = states, rows.shape[2]
    precise = lambda mean: Gaussian(mean, jnp.broadcast_to(10 * jnp.eye(size), (len(mean), size, size)))
    blocks: dict[str, Any] = {
        "loadings": precise(loadings),
        "transition": precise(0.5 * jnp.eye(size)),
        "noise": Gamma(jnp.full(outputs, 2.0), noise),
    }
    terms = {
        "beginning": factors.beginning("states", mean=jnp.zeros(size), precision=_FIRST * jnp.eye(size)),
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


def state_space(q: Any) -> tuple[StateSpace, Float[Array, " M"]]:
    """A fit's state space and observation noise, at the means of q: what the functions of `kalman` take."""
    system = StateSpace(
        q["transition"].mean,
        jnp.eye(q["transition"].mean.shape[-1]),
        q["loadings"].mean,
        None,
        jnp.eye(q["transition"].mean.shape[-1]) / _FIRST,
    )
    return system, 1 / q["noise"].mean
