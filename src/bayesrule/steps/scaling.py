"""Preconditioners for the mean's step other than q's precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..numerics.pytree import PyTree
from .schedule import Number, at, equals, format_number, number

ADAM_LENGTH = 80.0
"""By how many posterior standard deviations the noise of a batch moves a weight in a step, for a rate of 1."""
LONGEST_RATE = 2e-3
"""The largest of Adam's rates that makes steps longer: 0.16 posterior standard deviations."""


def adam_unit(share: Any) -> Any:
    r"""$80\sqrt{M/N}$, by which a rate in Adam's units is multiplied to be ρ of the natural gradient.

    Where data determine a weight, a batch of M examples has a gradient with the noise $N\sqrt{v/M}$ and q the width
    $σ = 1/\sqrt{Nv}$, so that a step moves the weight by $ρ\sqrt{N/M}$ of σ: by as many standard deviations for one
    number of examples as for another, if ρ is proportional to $\sqrt{M/N}$. Adam's usual rate, 1e-3, is 0.08 of them.

    Args:
        share: M/N, or None where all data are in one batch.
    """
    return ADAM_LENGTH * jnp.sqrt(1.0 if share is None else share)


def cosine(count: Any, horizon: Any) -> Any:
    """Half a cosine, from 1 at the first of `horizon` steps to almost 0 at the last; constant after it."""
    taken = jnp.minimum(jnp.asarray(count, float), horizon - 1.0) / horizon
    return 0.5 * (1 + jnp.cos(jnp.pi * taken))


class Scaling(eqx.Module):
    r"""What divides the gradient of the mean loss in the mean's step, where that is not q's precision.

    With $v = (τS − δ)/N$, the curvature of the mean loss that q's precision S stands for (δ is the prior's):
    $m ← m − ρ\hat g / (\sqrt{\hat v} + δ/N + c)$ with `root` (`eq:rmsprop_update`), else
    $m ← m − ρ\hat g / (\hat v + δ/N + c)$. q stays as it is: posterior and preconditioner are two things. Without
    δ/N a prior would throw a parameter that the data never see, and v never scales, back and forth past its mean.

    Args:
        damping: c; `"prior"` leaves the damping to δ/N (Vadam).
        root: Take the square root of v.
        debias: Divide v by $1 − (1−ρ)^t$, as Adam does.
        start: A curvature h₀: the rate is then in units of the divisor at $v = h_0$, so that the first step from there
            is $−ρ\hat g$, as gradient descent's (IVON). `"measured"`: in units of the mean of the first divisor
            that was measured (`Steps(measured=True)`), over the parameters that the data determine; h₀ = 1 where none
            is. `"adam"`: in units of Adam's rate where the divisor is measured (`adam_unit`), at most `LONGEST_RATE`;
            else as for `"measured"`.

    >>> import bayesrule as blr
    >>> print(blr.adam(1e-3).steps.scaling)
    gradient scaled by 1/(√v̂ + δ/N + 1e-08)
    >>> print(blr.Scaling(0.1))
    gradient scaled by 1/(v + δ/N + 0.1)
    """

    damping: Any
    start: Any
    root: bool = eqx.field(static=True)
    debias: bool = eqx.field(static=True)
    by_prior: bool = eqx.field(static=True)
    measured: bool = eqx.field(static=True)
    as_adam: bool = eqx.field(static=True)

    def __init__(
        self,
        damping: Number | str = 0.0,
        *,
        root: bool = False,
        debias: bool = False,
        start: Number | str | None = None,
    ):
        if isinstance(damping, str) and damping != "prior":
            raise ValueError(f'damping= is a number or "prior", got {damping!r}.')
        self.by_prior = isinstance(damping, str)
        self.damping = 0.0 if isinstance(damping, str) else number(damping, "The damping")
        if isinstance(start, str) and start not in ("measured", "adam"):
            raise ValueError(f'start= is a number, "measured" or "adam", got {start!r}.')
        self.measured, self.as_adam = isinstance(start, str), start == "adam"
        given = 1.0 if isinstance(start, str) else start
        self.start = None if given is None else number(given, "The curvature to start from")
        self.root, self.debias = root, debias

    def first(self, precision: PyTree, size: Any, temperature: Any, prior: PyTree) -> PyTree:
        """v at the start, where it is kept beside q, else None.

        v could be computed from S, but in float32 the difference τS − δ loses a small Nv beside a prior. That matters
        under a square root only, so only then is v kept.
        """
        if not self.root or prior is None:
            return None
        return jax.tree.map(lambda s, p: jnp.maximum((temperature * s - p) / size, 0).astype(s.dtype), precision, prior)

    def updated(self, v: PyTree, curvature: PyTree, size: Any, fraction: Any) -> PyTree:
        """v ← (1 − ρτ)v + ρτ h/N with the data's curvature h: v moves as q's precision does, without the prior."""
        if v is None:
            return None
        mixed = lambda v, h: v + jnp.asarray(fraction, v.dtype) * (h / jnp.asarray(size, v.dtype) - v)
        return jax.tree.map(mixed, v, curvature)

    def limited(self, rate: Any) -> Any:
        """The mean's rate, in Adam's units at most `LONGEST_RATE`. Called where the divisor is measured."""
        return jnp.minimum(rate, LONGEST_RATE) if self.as_adam else rate

    def unit(self, divisor: Divisor, precision: PyTree, share: Any) -> Array:
        """What the rate is multiplied by, from the first divisor that was measured. Called once, after that step.

        Args:
            divisor: The first step's.
            precision: q's after it.
            share: M/N of its batch, or None.
        """
        return jnp.asarray(adam_unit(share)) if self.as_adam else divisor.mean(precision)

    def divisor(
        self, size: Any, temperature: Any, prior: PyTree, v: PyTree, fraction: Any, count: Any, unit: Any = None
    ) -> Divisor:
        """What the mean's step divides by.

        Args:
            size: N.
            temperature: τ of this step.
            prior: δ, the regularizer's curvature, or None.
            v: What `updated` returned.
            fraction: ρτ, how much of the precision this step replaces.
            count: How many steps were taken before this one.
            unit: The measured divisor that the rate is in units of; None where that is the one at `start`.
        """
        correction = 1 - (1 - fraction) ** (count + 1.0) if self.debias else None
        damping, start = at(self.damping, count), None if self.start is None else at(self.start, count)
        return Divisor(size, temperature, prior, v, damping, correction, start, unit, self.root)

    # Printed.

    def _sum(self, v: str) -> str:
        terms = [f"√{v}" if self.root else v, "δ/N"]
        if not equals(self.damping, 0):
            terms.append(format_number(self.damping))
        return " + ".join(terms)

    @property
    def _first_divisor(self) -> str:
        if self.measured:
            return "c "
        return "" if self.start is None else f"({self._sum(format_number(self.start))}) "

    def formula(self, rate: str, gradient: str) -> str:
        """The mean's step as a formula, for a gradient of the mean loss."""
        return f"m ← m − {rate} {self._first_divisor}{gradient} / ({self._sum('v̂' if self.debias else 'v')})"

    def __str__(self) -> str:
        numerator = self._first_divisor.strip() or "1"
        return f"gradient scaled by {numerator}/({self._sum('v̂' if self.debias else 'v')})"


class Divisor(eqx.Module):
    """The divisor of one step: a `Scaling` with the size N, the temperature τ and the prior's precision δ."""

    size: Any
    temperature: Any
    prior: PyTree
    v: PyTree
    damping: Any
    correction: Any
    start: Any
    unit: Any
    root: bool = eqx.field(static=True)

    def mean(self, precision: PyTree) -> Array:
        """The harmonic mean of the divisors of the parameters that the data determine, to be the unit of the rate.

        The weight v/(v + δ/N) is how far the data determine a parameter (MacKay's effective number of parameters is
        their sum), so that one which no example depends on does not count. The mean is harmonic because the steps are
        inverse to the divisors: an arithmetic one is that of the few largest, by which all others would take steps that
        are too long. If all v are equal it is the divisor itself.
        """
        plain = dataclasses.replace(self, start=None, unit=None)
        trees = [precision, *(tree for tree in (self.prior, self.v) if tree is not None)]
        leaves = list(zip(*map(jax.tree.leaves, trees), strict=True))
        determined, inverse, total = sum((_sum_by_rows(plain._sums, parts) for parts in leaves), start=jnp.zeros(3))
        everywhere = total / sum(parts[0].size for parts in leaves)
        return jnp.where(inverse > 0, determined / jnp.where(inverse > 0, inverse, 1.0), everywhere)

    def _sums(self, s: Array, *rest: Array) -> Array:
        """Σ v/d, Σ v/d² and Σ d over entries, with the divisors d of the gradient of the mean loss."""
        prior = None if self.prior is None else rest[0]
        v = None if self.v is None else rest[-1]
        divisor = self._of(s, prior, v)
        if v is None:
            v = jnp.maximum(self.temperature * s - (0.0 if prior is None else prior), 0) / self.size
        return jnp.stack([jnp.sum(v / divisor), jnp.sum(v / divisor**2), jnp.sum(divisor)]).astype(float)

    @property
    def common(self) -> Any:
        """The factor N that all entries' divisors share, divided by the measured unit of the rate.

        It divides the rate, which is one number, and not every entry.
        """
        return self.size if self.unit is None else self.size / jnp.where(self.unit == 0, 1.0, self.unit)

    def __call__(self, precision: PyTree) -> PyTree:
        """What divides the gradient of the sum over N examples, for every entry of the new precision, without `common`.

        Called by `Family.moved` after the precision has moved.
        """
        rest = [tree for tree in (self.prior, self.v) if tree is not None]
        return jax.tree.map(self._of, precision, *rest)

    def _of(self, s: Array, prior: Array | None = None, v: Array | None = None) -> Array:
        # Scalars are multiplied and divided among themselves first: a division for every entry would cost as much as
        # all the rest of Adam's arithmetic.
        cast = lambda x: jnp.asarray(x, s.dtype)
        prior_share = None if prior is None else prior * cast(1 / self.size)
        per_example = self.temperature / self.size
        if self.root or self.correction is not None:
            unbias = 1.0 if self.correction is None else 1 / self.correction
            if v is not None:
                v = v * cast(unbias)
            elif prior_share is None:
                v = s * cast(per_example * unbias)
            else:
                v = jnp.maximum(s * cast(per_example) - prior_share, 0) * cast(unbias)
            divisor = self._scaled(v, prior_share)
        else:
            divisor = s * cast(per_example)
        divisor = divisor + cast(self.damping)
        if self.unit is not None or self.start is None:
            return divisor
        return divisor / (self._scaled(cast(self.start), prior_share) + cast(self.damping))

    def _scaled(self, v: Array, prior_share: Array | None) -> Array:
        scaled = jnp.sqrt(v) if self.root else v
        return scaled if prior_share is None else scaled + prior_share


_WHOLE = 2**16


def _sum_by_rows(sums: Callable[..., Array], parts: tuple[Array, ...]) -> Array:
    """sums(*parts), for large arrays one row after another: XLA would keep every summand in memory at once."""
    shape = jnp.shape(parts[0])
    if len(shape) < 2 or parts[0].size <= _WHOLE:
        return sums(*parts)
    row = lambda part, k: part[k] if jnp.shape(part)[:1] == shape[:1] else part
    add = lambda k, total: total + sums(*(row(part, k) for part in parts))
    return jax.lax.fori_loop(0, shape[0], add, jnp.zeros(3))
