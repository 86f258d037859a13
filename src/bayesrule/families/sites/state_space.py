"""A linear-Gaussian state-space model: the prior of a Gaussian chain."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ...numerics.trees import floating

Matrix = Float[Array, "D D"]


class StateSpace(eqx.Module):
    r"""$x_0 ∼ N(m_0, P_0)$, $x_{t+1} = F_tx_t + o_t + w_t$ with $w_t ∼ N(0, Q_t)$, and outputs $f_t = H_tx_t$.

    There are T steps and D states. Q and P₀ may be singular, because they are never inverted.

    >>> import jax.numpy as jnp
    >>> trend = StateSpace(jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.diag(jnp.array([0.1, 0.01])), jnp.array([1.0, 0.0]))
    >>> trend
    StateSpace(2 states, one output)

    Args:
        transition: F, (D, D), or (T − 1, D, D) where it changes with time.
        noise: Q, the covariance of w, (D, D) or (T − 1, D, D).
        emission: H, (D,) for one output in each step, (m, D) for m of them, (T, m, D) where it changes with time.
        mean: m₀, (D,); zero by default.
        covariance: P₀, (D, D); the identity by default.
        offset: o, (D,) or (T − 1, D), zero by default. Controls u enter as $o_t = Bu_t$.
    """

    transition: Float[Array, "*T D D"]
    noise: Float[Array, "*T D D"]
    emission: Float[Array, "... D"]
    mean: Float[Array, " D"]
    covariance: Matrix
    offset: Float[Array, "*T D"]
    centered: bool = eqx.field(static=True)
    """Whether all states have mean zero, because neither `mean` nor `offset` was given."""

    def __init__(
        self,
        transition: Any,
        noise: Any,
        emission: Any,
        mean: Any = None,
        covariance: Any = None,
        offset: Any = None,
    ):
        array = lambda x: floating(jnp.asarray(x))
        transition, noise, emission = array(transition), array(noise), array(emission)
        size = transition.shape[-1] if transition.ndim else 0
        self.centered = mean is None and offset is None
        mean = jnp.zeros(size, transition.dtype) if mean is None else array(mean)
        covariance = jnp.eye(size, dtype=transition.dtype) if covariance is None else array(covariance)
        offset = jnp.zeros(size, transition.dtype) if offset is None else array(offset)
        self.transition, self.noise, self.emission = transition, noise, emission
        self.mean, self.covariance, self.offset = mean, covariance, offset
        self._check(size)

    def _check(self, size: int) -> None:
        shapes = {
            "transition": (self.transition, (size, size), (2, 3)),
            "noise": (self.noise, (size, size), (2, 3)),
            "emission": (self.emission, (size,), (1, 2, 3)),
            "mean": (self.mean, (size,), (1,)),
            "covariance": (self.covariance, (size, size), (2,)),
            "offset": (self.offset, (size,), (1, 2)),
        }
        for name, (array, last, ranks) in shapes.items():
            if array.ndim not in ranks or array.shape[-len(last) :] != last or size == 0:
                raise ValueError(
                    f"A state space of {size} states takes transition and noise (D, D) or (T − 1, D, D), emission "
                    f"(D,), (m, D) or (T, m, D), mean (D,), covariance (D, D) and offset (D,) or (T − 1, D), and "
                    f"{name} has the shape {array.shape}."
                )
        varying = {n: x.shape[0] for n, (x, last, _) in shapes.items() if x.ndim > len(last) and n != "emission"}
        if self.emission.ndim == 3:
            varying["emission"] = self.emission.shape[0] - 1
        if len(set(varying.values())) > 1:
            raise ValueError(
                "Arrays that change with time have T − 1 entries, one for each transition (an emission has T, one for "
                f"each step): give all for the same T; the numbers of transitions are {varying}."
            )
        for name in ("noise", "covariance"):
            _check_covariance(name, getattr(self, name))

    @property
    def size(self) -> int:
        """D, the number of states."""
        return self.mean.shape[-1]

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of one step's output: () or (m,)."""
        return () if self.emission.ndim == 1 else self.emission.shape[-2:-1]

    @property
    def length(self) -> int | None:
        """T, if an array changes with time; else None, and the model has no length of its own."""
        if self.emission.ndim == 3:
            return self.emission.shape[0]
        for array, rank in ((self.transition, 2), (self.noise, 2), (self.offset, 1)):
            if array.ndim > rank:
                return array.shape[0] + 1
        return None

    def each(self, name: str, count: int) -> Array:
        """An array for all T steps if it changes with time (zeros after the last step), else the array itself."""
        array = getattr(self, name)
        if array.ndim == (1 if name == "offset" else 2):
            return array
        return jnp.concatenate([array, jnp.zeros((1, *array.shape[1:]), array.dtype)])[:count]

    def __repr__(self) -> str:
        count = "one output" if not self.outputs else f"{self.outputs[0]} outputs"
        return f"StateSpace({self.size} states, {count}{'' if self.length is None else f', {self.length} steps'})"


def _check_covariance(name: str, matrices: Array) -> None:
    """Raise unless concrete matrices are symmetric and positive semi-definite, up to rounding."""
    if isinstance(matrices, Tracer):
        return
    values = np.asarray(matrices, float).reshape((-1, *matrices.shape[-2:]))
    scale = np.abs(values).max(axis=(1, 2)) + np.finfo(float).tiny
    rounding = 100 * jnp.finfo(matrices.dtype).eps
    if not np.all(np.isfinite(values)) or np.any(
        np.abs(values - values.swapaxes(1, 2)).max(axis=(1, 2)) > rounding * scale
    ):
        raise ValueError(f"{name} is a covariance: it must be finite and symmetric.")
    least = np.linalg.eigvalsh(values)[:, 0]
    if np.any(least < -rounding * scale):
        raise ValueError(
            f"{name} is a covariance, and has the eigenvalue {least.min():.3g}, a negative variance: give a positive "
            "semi-definite matrix."
        )
