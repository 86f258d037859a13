"""A Gaussian over the steps of a chain whose precision is block-tridiagonal, for a chain with unknown transitions."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Bool, Float

from ...numerics.linalg import matmul, matvec
from ...numerics.programs import compiled
from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import floating
from ..base import ExponentialFamily

Natural = tuple[Float[Array, "... T D"], Float[Array, "... T D D"], Float[Array, "... T-1 D D"]]


class BandedGaussian(ExponentialFamily):
    r"""$q(x) ∝ \exp\sum_t(h_t^⊤x_t − ½x_t^⊤J_tx_t − x_{t+1}^⊤C_tx_t)$ over states $x_t$ of a Markov chain, t = 1, …, T.

    $λ = (h, −½J, −C)$, $T = (x_t, x_tx_t^⊤, x_{t+1}x_t^⊤)$: neighbours have statistics of their own, so that a
    transition's message fits in, whether its matrix is known or a block itself (`factors.dynamics`). Where the
    transitions are known, `GaussianChain` has λ for the observations alone, and asks for no inverse of their noise.
    >>> import jax.numpy as jnp
    >>> q = BandedGaussian(jnp.zeros((3, 1)), 2 * jnp.ones((3, 1, 1)), -jnp.ones((2, 1, 1)))
    >>> [round(float(v), 4) for v in q.states[1][:, 0, 0]]
    [0.75, 1.0, 0.75]

    Args:
        linear: h, (…, T, D); axes before the last two are a batch of chains.
        diagonal: J, (…, T, D, D).
        crossed: C, (…, T − 1, D, D).
    """

    linear: Float[Array, "... T D"]
    diagonal: Float[Array, "... T D D"]
    crossed: Float[Array, "... T-1 D D"]
    states: tuple[Array, Array, Array]
    """E x_t, Cov x_t and Cov(x_{t+1}, x_t), stored because every factor reads them."""
    log_det: Float[Array, "..."]
    label: ClassVar[str] = "Gaussian (chain)"
    meaning: ClassVar[str] = "q(x) ∝ exp Σ_t(hᵀx_t − ½x_tᵀJ_t x_t − x_{t+1}ᵀC_t x_t), λ = (h, −½J, −C)"
    symmetric: ClassVar[bool] = True

    def __init__(self, linear: Any, diagonal: Any, crossed: Any):
        array = lambda x: floating(jnp.asarray(x))
        self.linear, self.diagonal, self.crossed = array(linear), array(diagonal), array(crossed)
        lead, (steps, size) = self.linear.shape[:-2], self.linear.shape[-2:]
        shapes = (*lead, steps, size, size), (*lead, steps - 1, size, size)
        if self.diagonal.shape != shapes[0] or self.crossed.shape != shapes[1]:
            raise ValueError(
                f"A BandedGaussian over (T, D) = {(steps, size)} states has the precision's blocks J {shapes[0]} and C "
                f"{shapes[1]}, got {self.diagonal.shape} and {self.crossed.shape}."
            )
        self.diagonal = 0.5 * (self.diagonal + self.diagonal.mT)
        self.states, self.log_det = _moments(self.natural())

    @classmethod
    def independent(cls, steps: int, size: int, precision: float = 1.0, dtype: Any = float) -> Self:
        """All states N(0, 1/precision), to start from."""
        eye = precision * jnp.eye(size, dtype=dtype)
        zeros = jnp.zeros((steps, size), dtype)
        return cls(zeros, jnp.broadcast_to(eye, (steps, size, size)), jnp.zeros((steps - 1, size, size), dtype))

    def natural(self) -> Natural:
        return self.linear, -0.5 * self.diagonal, -self.crossed

    @classmethod
    def from_natural(cls, natural: Natural) -> Self:
        first, second, third = natural
        return cls(first, -second - second.mT, -third)

    @classmethod
    def from_expectation(cls, expectation: Natural) -> Self:
        mean, square, pair = expectation
        times = lambda x, y: x[..., :, None] * y[..., None, :]
        cov, crossed = square - times(mean, mean), pair - times(mean[..., 1:, :], mean[..., :-1, :])
        # x_{t+1} = Gx_t + noise of covariance R
        gain = jnp.linalg.solve(cov[..., :-1, :, :], crossed.mT).mT
        noise = jnp.linalg.inv(cov[..., 1:, :, :] - gain @ crossed.mT)
        before = jnp.concatenate([jnp.linalg.inv(cov[..., :1, :, :]), noise], axis=-3)
        after = jnp.concatenate([gain.mT @ noise @ gain, jnp.zeros_like(cov[..., :1, :, :])], axis=-3)
        J, C = before + after, -noise @ gain
        linear = matvec(J, mean)
        linear = linear.at[..., 1:, :].add(matvec(C, mean[..., :-1, :]))
        return cls(linear.at[..., :-1, :].add(matvec(C.mT, mean[..., 1:, :])), 0.5 * (J + J.mT), C)

    def with_expectation(self, expectation: Natural) -> Self:
        return self.from_expectation(expectation)

    @property
    def mean(self) -> Float[Array, "... T D"]:
        """Every state's mean."""
        return self.states[0]

    def moments(self, shift: Natural) -> tuple[Array, Array]:
        """Every state's mean and covariance, with μ displaced."""
        mean, cov, _ = self.states
        outer = shift[0][..., :, None] * mean[..., None, :]
        return mean + shift[0], cov + 0.5 * (shift[1] + shift[1].mT) - outer - outer.mT

    def expectation(self) -> Natural:
        return _second(self.states)

    def _gradient(self, natural: Natural) -> Natural:
        return _second(_moments(natural)[0])

    def mode(self) -> Array:
        return self.mean

    # The distribution.

    def statistics(self, theta: Array) -> Natural:
        pair = lambda x, y: x[..., :, None] * y[..., None, :]
        return theta, pair(theta, theta), pair(theta[..., 1:, :], theta[..., :-1, :])

    def log_partition(self, natural: Natural) -> Float[Array, "..."]:
        factors, pushes, log_det = _eliminated(natural)
        whitened = solve_triangular(factors, pushes[..., None], lower=True)[..., 0]
        return 0.5 * (jnp.sum(whitened**2, axis=(0, -1)) - log_det)

    def log_base(self, theta: Array) -> float:
        return -0.5 * math.prod(self.linear.shape[-2:]) * math.log(2 * math.pi)

    def constant_base(self) -> bool:
        return True

    def expected_log_base(self) -> float:
        return self.log_base(self.linear)

    def entropy(self) -> Float[Array, "..."]:
        """½ TD (1 + log 2π) − ½ log|S|."""
        return 0.5 * (math.prod(self.linear.shape[-2:]) * (1 + math.log(2 * math.pi)) - self.log_det)

    def inside(self, natural: Natural | None = None) -> Bool[Array, "..."]:
        log_det = self.log_det if natural is None else _eliminated(natural)[2]
        natural = self.natural() if natural is None else natural
        return jnp.isfinite(log_det) & jnp.all(jnp.isfinite(natural[0]), axis=(-2, -1))

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> Array:
        factors, pushes, _ = _eliminated(self.natural())
        noise = jax.random.normal(key, (factors.shape[0], *shape, *factors.shape[1:-1]), factors.dtype)
        crossed = jnp.concatenate([jnp.zeros_like(self.diagonal[..., :1, :, :]), self.crossed], axis=-3)

        def step(before: Array, x: tuple[Any, ...]) -> tuple[Array, Array]:
            factor, push, C, noise = x
            factor = jnp.broadcast_to(factor, (*shape, *factor.shape))
            half = solve_triangular(factor, (push - matvec(C, before))[..., None], lower=True)
            state = solve_triangular(factor, half + noise[..., None], lower=True, trans=1)[..., 0]
            return state, state

        xs = factors, pushes, jnp.moveaxis(crossed, -3, 0), noise
        _, drawn = jax.lax.scan(step, jnp.zeros_like(noise[0]), xs)
        return jnp.moveaxis(drawn, 0, -2)

    # Minimal coordinates: of the three parts of λ only the second holds symmetric matrices.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return 2, 3, 3

    def _symmetric(self, tree: PyTree) -> PyTree:
        return tree[0], 0.5 * (tree[1] + tree[1].mT), tree[2]

    def coordinates(self, natural: Natural) -> Float[Array, "... M"]:
        first, second, third = natural
        size = first.shape[-1]
        rows, columns = jnp.tril_indices(size)
        scale = jnp.where(rows == columns, 1.0, math.sqrt(2.0)).astype(second.dtype)
        parts = first, second[..., rows, columns] * scale, third
        ranks = 2, 2, 3
        flat = [x.reshape((*x.shape[: x.ndim - r], -1)) for x, r in zip(parts, ranks, strict=True)]
        return jnp.concatenate(flat, axis=-1)

    def uncoordinates(self, vector: Float[Array, "... M"]) -> Natural:
        steps, size = self.linear.shape[-2:]
        lead, half = vector.shape[:-1], size * (size + 1) // 2
        first, second, third = jnp.split(vector, [steps * size, steps * (size + half)], axis=-1)
        rows, columns = jnp.tril_indices(size)
        lower = second.reshape((*lead, steps, half))
        lower = lower * jnp.where(rows == columns, 1.0, math.sqrt(0.5)).astype(vector.dtype)
        matrix = jnp.zeros((*lead, steps, size, size), vector.dtype)
        matrix = matrix.at[..., rows, columns].set(lower).at[..., columns, rows].set(lower)
        return first.reshape((*lead, steps, size)), matrix, third.reshape((*lead, steps - 1, size, size))


# States are eliminated from the end of the chain; moments follow from its start.


def _second(states: tuple[Array, Array, Array]) -> Natural:
    """μ from means and covariances."""
    mean, cov, crossed = states
    pair = lambda x, y: x[..., :, None] * y[..., None, :]
    return mean, cov + pair(mean, mean), crossed + pair(mean[..., 1:, :], mean[..., :-1, :])


def _eliminated(natural: Natural) -> tuple[Array, Array, Array]:
    """Eliminate the states from the last to the first.

    Returns:
        Of each state given the one before it the Cholesky factor of its precision and the linear term, and log|S|.
    """
    first, second, third = natural
    ahead = lambda x: jnp.moveaxis(x, -3, 0)
    last = jnp.linalg.cholesky(-2 * second[..., -1, :, :]), first[..., -1, :]

    def step(carry: tuple[Array, Array], x: tuple[Array, Array, Array]) -> tuple[Any, ...]:
        (factor, push), (h, J, C) = carry, x
        half = solve_triangular(factor, C, lower=True)
        mid = solve_triangular(factor, push[..., None], lower=True)
        after = jnp.linalg.cholesky(J - half.mT @ half), h - (half.mT @ mid)[..., 0]
        return after, after

    xs = jnp.moveaxis(first, -2, 0)[:-1], -2 * ahead(second)[:-1], -ahead(third)
    _, earlier = jax.lax.scan(step, last, xs, reverse=True)
    factors, pushes = (jnp.concatenate([x, y[None]]) for x, y in zip(earlier, last, strict=True))
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factors, axis1=-2, axis2=-1)), axis=(0, -1))
    return factors, pushes, log_det


@compiled
def _moments(natural: Natural) -> tuple[tuple[Array, Array, Array], Array]:
    """E x_t, Cov x_t and Cov(x_{t+1}, x_t); log|S|."""
    factors, pushes, log_det = _eliminated(natural)
    eye = jnp.broadcast_to(jnp.eye(factors.shape[-1], dtype=factors.dtype), factors.shape)
    conditional_covs = cho_solve((factors, True), eye)
    means = matvec(conditional_covs, pushes)
    gains = matmul(conditional_covs[1:], jnp.moveaxis(natural[2], -3, 0))
    start = means[0], conditional_covs[0]

    def step(carry: tuple[Array, Array], x: tuple[Array, Array, Array]) -> tuple[Any, ...]:
        (mean, cov), (own, conditional_cov, gain) = carry, x
        crossed = matmul(gain, cov)
        after = own + matvec(gain, mean), conditional_cov + matmul(crossed, gain.mT)
        return after, (*after, crossed)

    _, (mean, cov, crossed) = jax.lax.scan(step, start, (means[1:], conditional_covs[1:], gains))
    mean, cov = (jnp.concatenate([x[None], y]) for x, y in zip(start, (mean, cov), strict=True))
    return (jnp.moveaxis(mean, 0, -2), jnp.moveaxis(cov, 0, -3), jnp.moveaxis(crossed, 0, -3)), log_det
