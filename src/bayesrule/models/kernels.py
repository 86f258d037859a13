"""Covariance functions (kernels): pytrees whose leaves are their hyper-parameters, closed under `+` and `*`."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float

from ..families.sites.state_space import StateSpace
from ..numerics.checks import above
from ..numerics.linalg import safe_sqrt
from ..numerics.trees import floating

__all__ = [
    "RBF",
    "Constant",
    "Kernel",
    "Linear",
    "Matern",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Stationary",
    "Sum",
    "Times",
]

Inputs = Float[Array, " N"] | Float[Array, "N D"] | np.ndarray


class Kernel(eqx.Module):
    """k(x, x′): a positive semi-definite function of inputs (N,) or (N, D).

    A kernel of your own has its hyper-parameters as fields (arrays, so that they can be differentiated and fitted), and
    implements `between` and `diagonal`; `state_space` too if it has one.

    >>> import jax.numpy as jnp
    >>> class White(Kernel):
    ...     def between(self, x, other):
    ...         return jnp.all(x[:, None] == other[None], -1).astype(float)
    ...     def diagonal(self, x):
    ...         return jnp.ones(len(x))
    >>> (RBF() + 0.1 * White())(jnp.array([0.0, 1.0])).tolist()
    [[1.1, 0.6065], [0.6065, 1.1]]
    """

    @abstractmethod
    def between(self, x: Float[Array, "N D"], other: Float[Array, "M D"]) -> Float[Array, "N M"]:
        """k(x_n, x′_m) of all pairs; the inputs have been checked, and have two axes."""

    @abstractmethod
    def diagonal(self, x: Inputs) -> Float[Array, " N"]:
        """k(x_n, x_n), without the other entries of the matrix."""

    def __call__(self, x: Inputs, other: Inputs | None = None) -> Float[Array, "N M"]:
        """The matrix of k(x_n, x′_m) for all pairs of inputs; by default x′ is x."""
        first = columns(x)
        second = first if other is None else columns(other)
        if first.shape[1] != second.shape[1]:
            raise ValueError(
                f"Both inputs need the same number of dimensions, got {first.shape[1]} and {second.shape[1]}."
            )
        return self.between(first, second)

    def state_space(self, times: Float[Array, " T"]) -> StateSpace:
        """The process over sorted times as a linear-Gaussian state space with one output, whose covariance is k.

        `gp.prior(…, through="chain")` calls it. A kernel without one raises.
        """
        raise ValueError(
            f"{type(self).__name__} has no state space: Constant, Matern12, Matern32, Matern52, their sums and their "
            "multiples by a constant have. Use the dense process."
        )

    def __add__(self, other: Any) -> Kernel:
        return Sum(self, _as_kernel(other))

    def __radd__(self, other: Any) -> Kernel:
        return Sum(_as_kernel(other), self)

    def __mul__(self, other: Any) -> Kernel:
        return Times(self, _as_kernel(other))

    def __rmul__(self, other: Any) -> Kernel:
        return Times(_as_kernel(other), self)


def columns(x: Any) -> Float[Array, "N D"]:
    """Inputs as rows (N, D): N numbers are N rows of one."""
    x = floating(jnp.asarray(x))
    if x.ndim not in (1, 2):
        raise ValueError(f"Inputs are N numbers, (N,), or N rows, (N, D), got the shape {x.shape}.")
    return x[:, None] if x.ndim == 1 else x


def _as_kernel(value: Any) -> Kernel:
    return value if isinstance(value, Kernel) else Constant(value)


def _positive(owner: Kernel, **values: Any) -> list[Array]:
    """The values as arrays, checked to be positive; the keywords name them in the error."""
    arrays = {name: floating(value) for name, value in values.items()}
    above(type(owner), 0, **arrays)
    return list(arrays.values())


class Sum(Kernel):
    """k₁ + k₂.

    >>> import jax.numpy as jnp
    >>> (Linear() + 1.0)(jnp.array([1.0, 2.0])).tolist()                        # lines with an intercept
    [[2.0, 3.0], [3.0, 5.0]]
    """

    first: Kernel
    second: Kernel

    def between(self, x: Array, other: Array) -> Array:
        return self.first.between(x, other) + self.second.between(x, other)

    def diagonal(self, x: Inputs) -> Array:
        return self.first.diagonal(x) + self.second.diagonal(x)

    def state_space(self, times: Array) -> StateSpace:
        one, two = self.first.state_space(times), self.second.state_space(times)
        per_step = jax.vmap(block_diag)
        return StateSpace(
            per_step(one.transition, two.transition),
            per_step(one.noise, two.noise),
            jnp.concatenate([one.emission, two.emission]),
            jnp.concatenate([one.mean, two.mean]),
            block_diag(one.covariance, two.covariance),
        )


class Times(Kernel):
    """k₁ · k₂.

    >>> import jax.numpy as jnp
    >>> (Linear() * Linear())(jnp.array([1.0, 2.0])).tolist()                   # parabolas, (xx′)²
    [[1.0, 4.0], [4.0, 16.0]]
    """

    first: Kernel
    second: Kernel

    def between(self, x: Array, other: Array) -> Array:
        return self.first.between(x, other) * self.second.between(x, other)

    def diagonal(self, x: Inputs) -> Array:
        return self.first.diagonal(x) * self.second.diagonal(x)

    def state_space(self, times: Array) -> StateSpace:
        scale, kernel = (self.first, self.second) if isinstance(self.first, Constant) else (self.second, self.first)
        if not isinstance(scale, Constant):
            return super().state_space(times)  # raises
        space = kernel.state_space(times)
        noise, covariance = scale.variance * space.noise, scale.variance * space.covariance
        return StateSpace(space.transition, noise, space.emission, space.mean, covariance)


class Constant(Kernel):
    """σ² for any two inputs: an unknown constant, or the scale of another kernel, `2.0 * RBF()`.

    Args:
        variance: σ².

    >>> import jax.numpy as jnp
    >>> Constant(2.0)(jnp.zeros(1), jnp.ones(2)).tolist()
    [[2.0, 2.0]]
    """

    variance: Array

    def __init__(self, variance: Any = 1.0):
        (self.variance,) = _positive(self, variance=variance)

    def between(self, x: Array, other: Array) -> Array:
        return jnp.broadcast_to(self.variance, (len(x), len(other)))

    def diagonal(self, x: Inputs) -> Array:
        return jnp.broadcast_to(self.variance, (len(x),))

    def state_space(self, times: Array) -> StateSpace:
        one = jnp.ones((max(len(times) - 1, 0), 1, 1), self.variance.dtype)
        return StateSpace(one, 0.0 * one, jnp.ones(1, one.dtype), covariance=self.variance[None, None])


class Linear(Kernel):
    """σ² x·x′: straight lines through the origin; add a `Constant` for lines with an intercept.

    Args:
        variance: σ².

    >>> import jax.numpy as jnp
    >>> Linear(0.5)(jnp.array([1.0, 2.0])).tolist()
    [[0.5, 1.0], [1.0, 2.0]]
    """

    variance: Array

    def __init__(self, variance: Any = 1.0):
        (self.variance,) = _positive(self, variance=variance)

    def between(self, x: Array, other: Array) -> Array:
        return self.variance * x @ other.T

    def diagonal(self, x: Inputs) -> Array:
        return self.variance * jnp.sum(columns(x) ** 2, axis=1)


class Stationary(Kernel):
    """σ² times a function of the distance r = |(x − x′)/ℓ|, with k(x, x) = σ².

    Args:
        variance: σ².
        lengthscale: ℓ, a number or one for each dimension.

    >>> import jax.numpy as jnp
    >>> kernel = RBF(2.0, lengthscale=jnp.array([1.0, 10.0]))                   # one lengthscale for each dimension
    >>> kernel(jnp.zeros((1, 2)), jnp.array([[1.0, 0.0], [0.0, 10.0]])).tolist()
    [[1.2131, 1.2131]]
    """

    # These are arrays. They are declared as what the constructor accepts, because type checkers read the signature of
    # subclasses, which share this __init__, off the fields.
    variance: Any = 1.0
    lengthscale: Any = 1.0

    def __init__(self, variance: Any = 1.0, lengthscale: Any = 1.0):
        self.variance, self.lengthscale = _positive(self, variance=variance, lengthscale=lengthscale)
        if self.lengthscale.ndim > 1:
            raise ValueError(
                f"lengthscale is a number or one for each dimension, (D,), got the shape {self.lengthscale.shape}."
            )

    def _squares(self, x: Array, other: Array) -> Float[Array, "N M"]:
        """r² of all pairs, from differences: |x|² − 2x·x′ + |x′|² would lose the distances of close inputs."""
        if self.lengthscale.shape not in ((), (1,), x.shape[1:]):
            raise ValueError(
                f"Inputs of {x.shape[1]} dimensions and {self.lengthscale.shape[0]} lengthscales do not match."
            )
        if self.lengthscale.size == 1:  # The derivative in ℓ then needs no array of all pairs and dimensions.
            return jnp.sum((x[:, None] - other[None]) ** 2, axis=-1) / self.lengthscale**2
        return jnp.sum(((x[:, None] - other[None]) / self.lengthscale) ** 2, axis=-1)

    def diagonal(self, x: Inputs) -> Array:
        return jnp.broadcast_to(self.variance, (len(x),))


class RBF(Stationary):
    r"""$σ^2\exp(−½r^2)$: the squared exponential, infinitely smooth.

    >>> import jax.numpy as jnp
    >>> round(float(RBF(2.0, lengthscale=0.5)(jnp.array([0.0, 1.0]))[0, 1]), 4)
    0.2707
    """

    def between(self, x: Array, other: Array) -> Array:
        return self.variance * jnp.exp(-0.5 * self._squares(x, other))


class Periodic(Stationary):
    r"""$σ^2\exp(−2\sum_d\sin^2(π|x_d − x'_d|/p)/ℓ^2)$, of period p; scikit-learn's ExpSineSquared in one dimension.

    Args:
        variance: σ².
        lengthscale: ℓ, a number or one for each dimension.
        period: p.

    >>> import jax.numpy as jnp
    >>> Periodic(period=2.0)(jnp.zeros(1), jnp.array([0.5, 1.0, 2.0])).tolist()
    [[0.3679, 0.1353, 1.0]]
    """

    period: Any = 1.0

    def __init__(self, variance: Any = 1.0, lengthscale: Any = 1.0, period: Any = 1.0):
        Stationary.__init__(self, variance, lengthscale)
        (self.period,) = _positive(self, period=period)

    def between(self, x: Array, other: Array) -> Array:
        waves = jnp.sin(math.pi * (x[:, None] - other[None]) / self.period) / self.lengthscale
        return self.variance * jnp.exp(-2 * jnp.sum(waves**2, axis=-1))


class Matern(Stationary):
    r"""$σ^2e^{−a}\sum_j c_ja^j$ with $a = \sqrt{2ν}\,r$ and ν a half-integer: paths with ν − ½ derivatives.

    In one dimension the process and its derivatives (in units of time a) solve $ds = Ns\,da + L\,dβ$ with a nilpotent
    N + I, so that $e^{Na}$ is $e^{−a}$ times a polynomial, and the noise of a step is a sum of incomplete gamma
    functions. Both are accurate to rounding for steps of any length.

    >>> issubclass(Matern12, Matern), [kernel.order for kernel in (Matern12, Matern32, Matern52)]
    (True, [0, 1, 2])
    """

    order: ClassVar[int]
    polynomial: ClassVar[tuple[float, ...]]

    def between(self, x: Array, other: Array) -> Array:
        squares = (2 * self.order + 1) * self._squares(x, other)
        # The distance has no derivative at 0, where the kernel's derivative is 0, as that of `safe_sqrt` is.
        distance = safe_sqrt(squares)
        total = sum(c * distance**j for j, c in enumerate(self.polynomial))
        return self.variance * jnp.exp(-distance) * total

    def state_space(self, times: Float[Array, " T"]) -> StateSpace:
        """The states are f and its derivatives. Times are sorted, and may repeat.

        >>> import jax.numpy as jnp
        >>> Matern32().state_space(jnp.array([0.0, 0.1, 0.1, 3.0]))
        StateSpace(2 states, one output, 4 steps)
        """
        times = columns(times)
        if times.shape[1] != 1 or self.lengthscale.size != 1:
            raise ValueError(f"A state space runs over one dimension, time, and the inputs have {times.shape[1]}.")
        intervals = jnp.diff(times[:, 0])
        if not isinstance(intervals, Tracer) and not bool(jnp.all(intervals >= 0)):
            raise ValueError("A state space runs over sorted times: sort the inputs, and the observations with them.")
        steps = math.sqrt(2 * self.order + 1) * intervals / self.lengthscale
        powers, noises, stationary = _solution(self.order)
        transition = lambda a: jnp.exp(-a) * sum(a**j * power.astype(a.dtype) for j, power in enumerate(powers))
        step_noise = lambda a: sum(
            _regularized_gamma(j + 1, 2 * a) * noise.astype(a.dtype) for j, noise in enumerate(noises)
        )
        size = self.order + 1
        return StateSpace(
            jax.vmap(transition)(steps),
            self.variance * jax.vmap(step_noise)(steps),
            jnp.eye(size, dtype=steps.dtype)[0],
            jnp.zeros(size, steps.dtype),
            self.variance * stationary.astype(steps.dtype),
        )


class Matern12(Matern):
    r"""$σ^2e^{−r}$: the Ornstein–Uhlenbeck process, continuous and nowhere smooth.

    >>> import jax.numpy as jnp
    >>> Matern12()(jnp.zeros(1), jnp.array([0.0, 1.0])).tolist()
    [[1.0, 0.3679]]
    """

    order: ClassVar[int] = 0
    polynomial: ClassVar[tuple[float, ...]] = (1.0,)


class Matern32(Matern):
    r"""$σ^2(1 + a)e^{−a}$, $a = \sqrt3\,r$: paths with one derivative.

    >>> import jax.numpy as jnp
    >>> Matern32()(jnp.zeros(1), jnp.array([0.0, 1.0])).tolist()
    [[1.0, 0.4834]]
    """

    order: ClassVar[int] = 1
    polynomial: ClassVar[tuple[float, ...]] = (1.0, 1.0)


class Matern52(Matern):
    r"""$σ^2(1 + a + a^2/3)e^{−a}$, $a = \sqrt5\,r$: paths with two derivatives.

    >>> import jax.numpy as jnp
    >>> Matern52()(jnp.zeros(1), jnp.array([0.0, 1.0])).tolist()
    [[1.0, 0.5240]]
    """

    order: ClassVar[int] = 2
    polynomial: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1 / 3)


def _solution(order: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """The coefficients of the solution, all matrices: of aʲ in e^{Na}e^{a}; of P(j + 1, 2a) in the noise of a step; and
    the stationary covariance."""
    size = order + 1
    shifted = np.eye(size, k=1) + np.eye(size)  # N + I, whose characteristic polynomial is (s + 1)^size
    shifted[-1] -= [math.comb(size, j) for j in range(size)]
    powers = [np.linalg.matrix_power(shifted, j) / math.factorial(j) for j in range(size)]
    # e^{Ns}L = e^{−s} Σ_j s^j v_j, so the noise is ∫₀ᵃ of products of polynomials times e^{−2s}.
    vectors = [power[:, -1] for power in powers]
    noises = [np.zeros((size, size)) for _ in range(2 * order + 1)]
    for i, one in enumerate(vectors):
        for j, two in enumerate(vectors):
            noises[i + j] += np.outer(one, two) * math.factorial(i + j) / 2 ** (i + j + 1)
    stationary = np.sum(noises, axis=0)
    scale = stationary[0, 0]
    return powers, [noise / scale for noise in noises], stationary / scale


def _regularized_gamma(count: int, b: Array) -> Array:
    """P(n, b) = 1 − e^{−b} Σ_{k<n} b^k/k!; by its power series for b < 1.5, where the difference would cancel."""
    terms = 24
    small = jnp.minimum(b, 1.5)
    series = jnp.zeros_like(b)
    for j in reversed(range(terms)):
        series = 1.0 + series * small / (count + j + 1)
    series = jnp.exp(-small) * small**count / math.factorial(count) * series
    direct = 1 - jnp.exp(-b) * sum(b**k / math.factorial(k) for k in range(count))
    return jnp.where(b < 1.5, series, direct)
