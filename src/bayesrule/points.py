"""Where the loss is looked at, to stand for the expectation under q: points and their weights."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .families.base import Family
from .families.conditional import ConditionalFamily
from .families.structure import GaussianFamily, SharedFeatures, ravel, unravel


class PointSet(NamedTuple):
    """Values of θ with a leading axis, and their weights: E_q f ≈ Σ_s w_s f(θ_s).

    `factors` says how a point moves with μ, where it does not simply move with the mean: the family's `pulled`
    multiplies the derivatives by it.
    """

    theta: PyTree
    weights: Float[Array, " S"]
    factors: PyTree = None


class Points(eqx.Module):
    """Where the loss is looked at."""

    approximation: ClassVar[str] = ""
    """How Table 1 names what it does to the natural gradient."""
    meaning: ClassVar[str] = ""
    random: ClassVar[bool] = False
    delta: ClassVar[bool] = False
    """Whether a Gaussian's spread is ignored: the delta method."""
    chained: ClassVar[bool] = False
    """Whether the points say how they move with μ, for families whose gradient is not θ's own."""

    @property
    def parts(self) -> int:
        """In how many turns the points are taken, one after another."""
        return 1

    def part(self, q: Family, key: Any) -> PointSet:
        """The points of one turn."""
        return self.at(q, key)

    @abstractmethod
    def at(self, q: Family, key: Any) -> PointSet:
        """The points for this q."""

    def outputs(
        self, q: Any, center: Float[Array, "B K"], jacobian: PyTree, key: Any
    ) -> tuple[Float[Array, "S B K"], Float[Array, " S"]]:
        """Points for outputs that are linear in θ, f = center + J(θ − m), and their weights."""
        _check_linear(q)
        spots = self.at(q, key)
        deviation = ravel(jax.tree.map(jnp.subtract, spots.theta, q.mean), 1)
        if isinstance(jacobian, SharedFeatures):
            return center + jacobian.outputs(deviation), spots.weights
        return center + jnp.einsum("bkp,sp->sbk", ravel(jacobian, 2), deviation), spots.weights


class Delta(Points):
    """One point, the mean: E_q f(θ) ≈ f(m), the delta method (`app:delta`)."""

    approximation: ClassVar[str] = "Delta method"
    meaning: ClassVar[str] = "E_q f(θ) ≈ f(m), the delta method (app:delta)"
    delta: ClassVar[bool] = True

    def at(self, q: Any, key: Any) -> PointSet:
        return PointSet(jax.tree.map(lambda m: m[None], q.mean), jnp.ones(1))

    def outputs(self, q: Any, center: Array, jacobian: PyTree, key: Any) -> tuple[Array, Array]:
        return center[None], jnp.ones(1)


class MonteCarlo(Points):
    """`samples` draws from q, equally weighted; `antithetic` draws come in mirrored pairs m ± ε.

    `scan` looks at them one after another (one pair after another) instead of all at once, so that memory does not
    grow with their number. A Gaussian's noise comes from the library's own counter-based stream, which XLA fuses into
    the step (`bayesrule.noise`); `generator="standard"` takes it from `jax.random.normal`.
    """

    samples: int = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)
    scan: bool = eqx.field(static=True)
    generator: str = eqx.field(static=True)
    approximation: ClassVar[str] = "Monte Carlo"
    meaning: ClassVar[str] = "E_q f(θ) ≈ the mean of f over draws from q"
    random: ClassVar[bool] = True

    def __init__(self, samples: int = 1, *, antithetic: bool = False, scan: bool = False, generator: str = "counter"):
        if samples < 1 or (antithetic and samples % 2):
            raise ValueError(f"MonteCarlo takes a positive number of samples (even if antithetic), got {samples}.")
        if generator not in ("counter", "standard"):
            raise ValueError(f'generator= is "counter" or "standard", got {generator!r}.')
        self.samples, self.antithetic, self.scan, self.generator = samples, antithetic, scan, generator

    @property
    def parts(self) -> int:
        return self.samples // (2 if self.antithetic else 1) if self.scan else 1

    def part(self, q: Any, key: Any) -> PointSet:
        return self._drawn(q, key, self.samples // self.parts)

    def at(self, q: Any, key: Any) -> PointSet:
        return self._drawn(q, key, self.samples)

    def _drawn(self, q: Any, key: Any, count: int) -> PointSet:
        if key is None:
            raise ValueError("MonteCarlo points are random: pass key=jax.random.key(…).")
        weights = jnp.full(count, 1 / count)
        if self.antithetic and not q.symmetric:
            name = type(q).__name__
            raise ValueError(f"Antithetic pairs mirror a symmetric q, and a {name} is not: use MonteCarlo().")
        shape = (count // 2 if self.antithetic else count,)
        if isinstance(q, GaussianFamily):
            half = q.drawn(key, shape, standard=self.generator == "standard")
        else:
            half = q.sample(key, shape)
        if self.antithetic:
            half = jax.tree.map(lambda t, m: jnp.concatenate([t, 2 * m - t]), half, q.mean)
        return PointSet(half, weights)

    def __repr__(self) -> str:
        extras = ["antithetic=True"] * self.antithetic + ["scan=True"] * self.scan
        extras += ['generator="standard"'] * (self.generator == "standard")
        return f"MonteCarlo({', '.join([str(self.samples), *extras])})"


_GRID_LIMIT = 100_000


class Quadrature(Points):
    """Gauss–Hermite points of an order: a tensor grid over θ, exact to degree 2·order − 1.

    Where the objective says `linear=True` the grid is over each example's outputs instead: one
    dimension for each output, however many parameters there are. A `StudentT` and a `SkewGaussian` have grids of their
    own.
    """

    order: int = eqx.field(static=True)
    approximation: ClassVar[str] = "Gauss-Hermite quadrature"
    meaning: ClassVar[str] = "E_q f(θ) by Gauss–Hermite quadrature"

    def __init__(self, order: int = 5):
        if order < 1:
            raise ValueError(f"The order of a quadrature is at least 1, got {order}.")
        self.order = order

    def fits(self, size: int) -> bool:
        """Whether a grid in so many dimensions is small enough."""
        return self.order**size <= _GRID_LIMIT

    def at(self, q: Any, key: Any) -> PointSet:
        size = sum(leaf.size for leaf in jax.tree.leaves(q.mean))
        if isinstance(q, ConditionalFamily):
            _check_size(self.order, q.grid_axes)
            return PointSet(*q.grid(self.order))
        noise, weights = grid(self.order, size)
        if q.noise_size == size:
            return PointSet(q.transformed(noise), weights)
        spread = noise @ jnp.linalg.cholesky(q.covariance()).T
        return PointSet(unravel(ravel(q.mean) + spread, q.mean), weights)

    def outputs(self, q: Any, center: Array, jacobian: PyTree, key: Any) -> tuple[Array, Array]:
        _check_linear(q)
        covariance = q.output_covariance(jacobian)
        noise, weights = grid(self.order, center.shape[1])
        noise = noise.astype(center.dtype)
        if center.shape[1] == 1:
            # An output that does not vary (x = 0) has no derivative of its spread, rather than an infinite one.
            varies = covariance[:, 0] > 0
            spread = jnp.where(varies, jnp.sqrt(jnp.asarray(jnp.where(varies, covariance[:, 0], 1.0))), 0.0)
            return center + spread * noise[:, None, :], weights
        factor = _factor(covariance)
        return center + jnp.einsum("bkl,sl->sbk", factor, noise), weights

    def __repr__(self) -> str:
        return f"Quadrature({self.order})"


class QuasiMonteCarlo(Points):
    """`samples` points that fill the space evenly (Sobol's, in mirrored pairs), the same ones at every step.

    Where the objective says `linear=True` they are points of each example's outputs, which are few: so a softmax of ten
    classes is averaged without noise. Else they are points of θ.
    """

    samples: int = eqx.field(static=True)
    approximation: ClassVar[str] = "quasi-Monte Carlo"
    meaning: ClassVar[str] = "E_q f(θ) ≈ the mean of f over evenly spread points"

    def __init__(self, samples: int = 64):
        if samples < 2 or samples % 2:
            raise ValueError(f"QuasiMonteCarlo takes an even number of points, got {samples}.")
        self.samples = samples

    def at(self, q: Any, key: Any) -> PointSet:
        noise, weights = even_noise(self.samples, q.noise_size)
        noise = jnp.asarray(noise, jnp.result_type(*jax.tree.leaves(q.mean)))
        return PointSet(q.transformed(noise), jnp.asarray(weights))

    def outputs(self, q: Any, center: Array, jacobian: PyTree, key: Any) -> tuple[Array, Array]:
        _check_linear(q)
        noise, weights = even_noise(self.samples, center.shape[1])
        factor = _factor(q.output_covariance(jacobian))
        return center + jnp.einsum("bkl,sl->sbk", factor, jnp.asarray(noise, center.dtype)), jnp.asarray(weights)

    def __repr__(self) -> str:
        return f"QuasiMonteCarlo({self.samples})"


@cache
def even_noise(samples: int, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal noise from Sobol's points, mirrored, with unit variances; and equal weights."""
    from scipy.stats import norm, qmc

    count = 1 << (samples // 2 - 1).bit_length()
    half = norm.ppf(qmc.Sobol(dimensions, scramble=True, rng=0).random(count))[: samples // 2]
    noise = np.concatenate([half, -half])
    return noise / np.sqrt(np.mean(noise**2, axis=0)), np.full(samples, 1 / samples)


def _check_linear(q: Any) -> None:
    if isinstance(q, ConditionalFamily):
        raise ValueError(
            f"Objective(…, linear=True) integrates over outputs that are Gaussian, and under a {type(q).__name__} they "
            "are not: leave linear=True out, so that the points are values of θ."
        )


def _factor(covariance: Float[Array, "B K K"]) -> Float[Array, "B K K"]:
    """chol(C), and a little more than C where outputs depend on each other and C is singular."""
    plain = jnp.linalg.cholesky(covariance)
    fine = jnp.all(jnp.isfinite(plain), axis=(1, 2), keepdims=True)
    size, limits = covariance.shape[-1], jnp.finfo(covariance.dtype)
    more = 8 * size * limits.eps * jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] + limits.tiny
    safe = covariance + jnp.where(fine, 0.0, more) * jnp.eye(size, dtype=covariance.dtype)
    return jnp.linalg.cholesky(safe)


def _check_size(order: int, size: int, more: str = "") -> None:
    if order**size > _GRID_LIMIT:
        raise ValueError(
            f"A grid of order {order} in {size} dimensions has {order}^{size} points. Use MonteCarlo{more}."
        )


def grid(order: int, size: int) -> tuple[Float[Array, "S D"], Float[Array, " S"]]:
    linear = (
        ", or, where the model is linear in its parameters, Objective(loss, output=apply, linear=True): then each "
        "example is integrated over its own outputs"
    )
    _check_size(order, size, linear)
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    weights = weights / weights.sum()
    points = np.array(list(itertools.product(nodes, repeat=size))).reshape(-1, size)
    return jnp.asarray(points), jnp.asarray([np.prod(w) for w in itertools.product(weights, repeat=size)])


class Exact(Points):
    """No points at all: the objective is already a function of μ, linear or not."""

    meaning: ClassVar[str] = "none needed: the objective is E_q ℓ̄ as a function of μ"

    def at(self, q: Any, key: Any) -> PointSet:
        raise ValueError("Exact has no points: the objective is a function of μ.")


class Enumeration(Points):
    """Every value of a small discrete θ, weighted by q: the expectation itself."""

    meaning: ClassVar[str] = "E_q f(θ) as the sum over every θ"

    def at(self, q: Any, key: Any) -> PointSet:
        theta = q.support()
        weights = jnp.exp(q.log_prob(theta))
        if weights.ndim != 1:
            raise ValueError(
                f"Enumeration() lists one distribution's values, and this {type(q).__name__} is a batch: vmap."
            )
        return PointSet(theta, weights)
