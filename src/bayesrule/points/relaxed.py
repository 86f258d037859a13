"""Points of binary weights: relaxed (Concrete) samples and signs, with their derivative in μ."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.base import Family
from ..families.discrete import Bernoulli
from ..numerics.checks import positive_int
from ..numerics.random import Key
from ..steps.schedule import Number, number
from .base import Points, PointSet


class Relaxed(Points[Bernoulli]):
    r"""Relaxed signs, $θ = \tanh((λ + δ)/τ_c)$ with $δ = ½\log(ε/(1−ε))$, ε uniform (`eq:param_b_tau`).

    The gradient is carried from θ to μ = tanh λ by the chain rule, with
    $s = (1 − θ^2 + η)/(τ_c(1 − \tanh^2 λ + η))$.

    Args:
        relaxation: The Concrete distribution's τ_c.
        smoothing: η. 0 is exact; the published code has 1e-10, which at its relaxation of 1e-10 makes s a constant
            1e10.
        samples: How many points.
        noise: False leaves δ out: with relaxation 1 the point is then the mean of q, and s = 1.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> q = blr.Bernoulli(jnp.array([0.5, -2.0]))
    >>> points = blr.Relaxed(0.1, noise=False).at(q, None)
    >>> points.theta[0].tolist(), blr.Relaxed(1.0, noise=False).at(q, None).theta[0].tolist()
    ([0.9999, -1.0], [0.4621, -0.9640])
    """

    relaxation: Any
    smoothing: Any
    samples: int = eqx.field(static=True)
    noise: bool = eqx.field(static=True)
    approximation: ClassVar[str] = "stochastic approx., Concrete relaxation"
    meaning: ClassVar[str] = "θ = tanh((λ + ½ log ε/(1 − ε))/relaxation), and s = ∂θ/∂μ  (eq:param_b_tau)"
    of_family: ClassVar[type[Family] | None] = Bernoulli
    surrogate: ClassVar[bool] = True
    chained: ClassVar[bool] = True

    def __init__(self, relaxation: Number = 1.0, smoothing: Number = 0.0, *, samples: int = 1, noise: bool = True):
        samples = positive_int("samples", samples)
        if samples > 1 and not noise:
            raise ValueError(f"Without noise all samples are equal: use samples=1, got {samples}.")
        self.relaxation = number(relaxation, "The relaxation")
        if isinstance(relaxation, float | int) and relaxation == 0:
            raise ValueError("The relaxation must be positive; for the sign itself use Sign().")
        self.smoothing = number(smoothing, "The smoothing")
        self.samples, self.noise = samples, noise

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # without noise it is not
        return self.noise

    def at(self, q: Bernoulli, key: Key | None) -> PointSet:
        leaves, treedef = jax.tree.flatten(q.natural())
        if self.noise and key is None:
            raise ValueError("Relaxed points are random: pass key=jax.random.key(…).")
        keys = jax.random.split(key, len(leaves)) if self.noise and key is not None else [None] * len(leaves)
        pairs = [self._relax(x, k) for x, k in zip(leaves, keys, strict=True)]
        theta, slope = (jax.tree.unflatten(treedef, [pair[i] for pair in pairs]) for i in (0, 1))
        return PointSet(theta, jnp.full(self.samples, 1 / self.samples), slope)

    def _relax(self, natural: Array, key: Key | None) -> tuple[Array, Array]:
        """One leaf's relaxed signs θ and slopes s = ∂θ/∂μ, with a leading axis of samples."""
        relaxation, smoothing = (jnp.asarray(x, natural.dtype) for x in (self.relaxation, self.smoothing))
        shape = (self.samples, *natural.shape)
        # δ, half the logit of a uniform number, is half a standard logistic number.
        noise = jnp.zeros(shape, natural.dtype)
        if key is not None:
            noise = 0.5 * jax.random.logistic(key, shape, natural.dtype)
        inner = (natural + noise) / relaxation
        theta = jnp.tanh(inner)
        # 1 − tanh² is computed as sech² from logarithms, which underflows only far out and keeps all digits of a ratio.
        exact = jnp.exp(2 * (_log_cosh(natural) - _log_cosh(inner))) / relaxation
        if isinstance(self.smoothing, float | int) and self.smoothing == 0:
            return theta, exact
        outer = jnp.exp(-2 * _log_cosh(inner)) + smoothing
        return theta, outer / (relaxation * (jnp.exp(-2 * _log_cosh(natural)) + smoothing))

    def __repr__(self) -> str:
        extras = [str(self.relaxation)]
        if not (isinstance(self.smoothing, float | int) and self.smoothing == 0):
            extras.append(f"smoothing={self.smoothing}")
        extras += [f"samples={self.samples}"] * (self.samples > 1) + ["noise=False"] * (not self.noise)
        return f"Relaxed({', '.join(extras)})"


def _log_cosh(x: Array) -> Array:
    """log cosh x, without overflow."""
    return jnp.abs(x) + jnp.log1p(jnp.exp(-2 * jnp.abs(x))) - jnp.log(jnp.asarray(2, x.dtype))


class Sign(Points[Bernoulli]):
    """One point, sign(λ), whose gradient is used in place of that in μ: the straight-through estimator (`eq:STE`).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> blr.Sign().at(blr.Bernoulli(jnp.array([0.5, -2.0])), None).theta.tolist()
    [[1.0, -1.0]]
    """

    approximation: ClassVar[str] = "Delta method"
    meaning: ClassVar[str] = "θ = sign(λ), with its gradient in place of that in μ (eq:STE)"
    of_family: ClassVar[type[Family] | None] = Bernoulli
    surrogate: ClassVar[bool] = True  # The most probable signs alone are no average over q.
    chained: ClassVar[bool] = True

    def at(self, q: Bernoulli, key: Key | None) -> PointSet:
        sign = lambda x: jnp.where(x >= 0, 1.0, -1.0).astype(x.dtype)[None]
        theta = jax.tree.map(sign, q.natural())
        return PointSet(theta, jnp.ones(1), jax.tree.map(jnp.ones_like, theta))
