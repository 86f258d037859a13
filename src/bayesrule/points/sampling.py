"""Points drawn from q: independent draws, and quasi-Monte Carlo points."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from ..numerics.random import Key, normals, shifted_normals
from ..steps.needs import Need
from .base import Points, PointSet
from .gaussian_outputs import as_gaussian, output_points


class MonteCarlo(Points[Family]):
    """Independent draws from q, equally weighted.

    Args:
        samples: How many draws.
        antithetic: Whether they come in mirrored pairs m ± ε, which makes the average of an odd function exact; for a
            symmetric q.
        scan: Whether the loss is evaluated at one sample at a time (one pair at a time, if antithetic) instead of all
            at once, so that memory does not grow with their number.
        generator: "counter" takes a Gaussian's noise from the library's own counter-based stream, which XLA fuses into
            the step (`bayesrule.numerics.random`); "standard" takes it from `jax.random.normal`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> q = blr.DiagonalGaussian(jnp.array([1.0, 2.0]), jnp.ones(2))
    >>> points = blr.MonteCarlo(4, antithetic=True).at(q, jax.random.key(0))
    >>> points.theta.shape, points.theta.mean(0).tolist()                             # mirrored pairs average to m
    ((4, 2), [1.0, 2.0])
    """

    samples: int = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)
    scan: bool = eqx.field(static=True)
    generator: str = eqx.field(static=True)
    approximation: ClassVar[str] = "Monte Carlo"
    meaning: ClassVar[str] = "E_q f(θ) ≈ the mean of f over draws from q"
    random: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: _has_width(p.member),
            "This q would be sampled with a precision of zero, an infinite width: give a prior (regularizer=δ) or "
            "a starting precision (initial_precision=…, or curvature=…).",
        ),
    )

    def __init__(self, samples: int = 1, *, antithetic: bool = False, scan: bool = False, generator: str = "counter"):
        samples = positive_int("samples", samples)
        if antithetic and samples % 2:
            raise ValueError(f"Antithetic samples come in pairs, so samples= must be even, got {samples}.")
        if generator not in ("counter", "standard"):
            raise ValueError(f'generator= is "counter" or "standard", got {generator!r}.')
        self.samples, self.antithetic, self.scan, self.generator = samples, antithetic, scan, generator

    @property
    def parts(self) -> int:
        return self.samples // (2 if self.antithetic else 1) if self.scan else 1

    def part(self, q: Family, key: Key) -> PointSet:
        return self._draw(q, key, self.samples // self.parts)

    def at(self, q: Family, key: Key | None) -> PointSet:
        return self._draw(q, key, self.samples)

    def output_noise(self, mean: Float[Array, "B *K"], key: Key | None) -> tuple[Array, Array]:
        if key is None:
            raise ValueError("MonteCarlo points are random: pass key=jax.random.key(…).")
        half = normals(key, mean, (self.samples // (2 if self.antithetic else 1),))
        noise = jnp.concatenate([half, -half]) if self.antithetic else half
        return noise, jnp.full(self.samples, 1 / self.samples)

    def _draw(self, q: Any, key: Key | None, count: int) -> PointSet:  # a `Family`; with a mean if antithetic
        if key is None:
            raise ValueError("MonteCarlo points are random: pass key=jax.random.key(…).")
        weights = jnp.full(count, 1 / count)
        if self.antithetic and not q.symmetric:
            name = type(q).__name__
            raise ValueError(f"Antithetic pairs mirror a symmetric q, and a {name} is not: use MonteCarlo().")
        shape = (count // 2 if self.antithetic else count,)
        if isinstance(q, GaussianFamily):
            theta = q.drawn(key, shape, standard=self.generator == "standard")
        else:
            theta = q.sample(key, shape)
        if self.antithetic:
            theta = jax.tree.map(lambda t, m: jnp.concatenate([t, 2 * m - t]), theta, q.mean)
        return PointSet(theta, weights)

    def __repr__(self) -> str:
        extras = ["antithetic=True"] * self.antithetic + ["scan=True"] * self.scan
        extras += ['generator="standard"'] * (self.generator == "standard")
        return f"MonteCarlo({', '.join([str(self.samples), *extras])})"


def _has_width(member: Any) -> bool:
    """Whether no entry of a Gaussian's precision is 0, where it has entries; traced numbers are not checked."""
    if not (isinstance(member, GaussianFamily) and member.elementwise):
        return True
    precision: Any = member.precision  # pyright: ignore[reportAttributeAccessIssue]  # entry by entry
    return not any(np.any(np.asarray(s) <= 0) for s in jax.tree.leaves(precision) if not isinstance(s, Tracer))


class QuasiMonteCarlo(Points[GaussianFamily]):
    """Points that fill the space evenly (Sobol's, in mirrored pairs), by default the same ones at every step.

    Where the objective says `linear=True` they are points of each example's outputs, which are few: so a softmax of ten
    classes is averaged without noise. Else they are points of θ.

    Args:
        samples: How many points, an even number.
        randomized: Whether every key gives the points a random digital shift of their own. Each point is then exactly
            standard normal, so that averages are unbiased, and the spread of the averages under a few keys is their
            standard error. `result.bound` is taken at such points.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> points = blr.QuasiMonteCarlo(16).at(blr.DiagonalGaussian(jnp.array([1.0]), jnp.array([4.0])), None)
    >>> float(points.theta.mean()), float(points.theta.var())                         # E θ and Var θ, exactly
    (1.0, 0.25)
    """

    samples: int = eqx.field(static=True)
    randomized: bool = eqx.field(static=True)
    approximation: ClassVar[str] = "quasi-Monte Carlo"
    meaning: ClassVar[str] = "E_q f(θ) ≈ the mean of f over evenly spaced points"

    def __init__(self, samples: int = 64, *, randomized: bool = False):
        if samples < 2 or samples % 2:
            raise ValueError(f"QuasiMonteCarlo takes an even number of points, got {samples}.")
        self.samples, self.randomized = samples, randomized

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # only if randomized
        return self.randomized

    def at(self, q: GaussianFamily, key: Key | None) -> PointSet:
        noise, weights = self._noise(q.noise_size, jnp.result_type(*jax.tree.leaves(q.mean)), key)
        return PointSet(q.transformed(noise), weights)

    def outputs(
        self, q: GaussianFamily, center: Array, jacobian: PyTree, key: Key | None, covariance: Array | None = None
    ) -> tuple[Array, Array]:
        covariance = as_gaussian(q).output_covariance(jacobian) if covariance is None else covariance
        noise, weights = self.output_noise(center, key)
        return output_points(center, covariance, noise), weights

    def output_noise(self, mean: Float[Array, "B *K"], key: Key | None) -> tuple[Array, Array]:
        return self._noise(1 if mean.ndim == 1 else mean.shape[-1], mean.dtype, key)

    def _noise(self, dimensions: int, dtype: Any, key: Key | None) -> tuple[Array, Array]:
        if not self.randomized:
            noise, weights = even_noise(self.samples, dimensions)
            return jnp.asarray(noise, dtype), jnp.asarray(weights)
        if key is None:
            raise ValueError("Randomized points take a random shift: pass key=jax.random.key(…).")
        half = shifted_normals(key, jnp.asarray(sobol_bits(self.samples // 2, dimensions)), dtype)
        return jnp.concatenate([half, -half]), jnp.full(self.samples, 1 / self.samples)

    def __repr__(self) -> str:
        return f"QuasiMonteCarlo({self.samples}{', randomized=True' * self.randomized})"


@cache
def even_noise(samples: int, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard normal noise from Sobol's points, mirrored and scaled to unit variances, (S, D); and equal weights."""
    from scipy.stats import norm, qmc

    count = 1 << (samples // 2 - 1).bit_length()
    half = norm.ppf(qmc.Sobol(dimensions, scramble=True, rng=0).random(count))[: samples // 2]
    noise = np.concatenate([half, -half])
    return noise / np.sqrt(np.mean(noise**2, axis=0)), np.full(samples, 1 / samples)


@cache
def sobol_bits(count: int, dimensions: int) -> np.ndarray:
    """The leading 32 binary digits of Sobol's points, scrambled once, (count, dimensions), in the high bits first."""
    from scipy.stats import qmc

    points = qmc.Sobol(dimensions, scramble=True, bits=32, rng=0).random(1 << (count - 1).bit_length())[:count]
    return (points * 2.0**32).astype(np.uint32)
