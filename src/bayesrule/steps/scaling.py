"""Gradient averaging, and preconditioners for the mean's step other than q's precision."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .schedule import Number, _said, at, number


class GradientAverage(eqx.Module):
    r"""An exponential average of the gradient, $u ← βu + (1−β)g$, in place of g (`eq:adam_momentum`).

    `over="data"` leaves the regularizer outside the average (IVON), `"total"` takes it in (Adam).
    `debias` divides by $1 − β^t$.
    """

    decay: Any
    over: str = eqx.field(static=True)
    debias: bool = eqx.field(static=True)

    def __init__(self, decay: Number = 0.9, *, over: str = "total", debias: bool = True):
        if over not in ("data", "total"):
            raise ValueError(f'GradientAverage(over=…) is "data" or "total", got {over!r}.')
        self.decay = number(decay, "The average's decay", high=1.0)
        self.over = over
        self.debias = debias

    def updated(self, average: PyTree, gradient: PyTree, count: Any, go: Any = None) -> tuple[PyTree, PyTree]:
        """The new average, and what stands for the gradient in this step; the old average where `go` is 0."""
        decay = at(self.decay, count)
        share = 1 - decay if go is None else go * (1 - decay)
        kept = decay if go is None else 1 - share
        new = jax.tree.map(
            lambda u, g: jnp.asarray(kept, u.dtype) * u + jnp.asarray(share, u.dtype) * g, average, gradient
        )
        if not self.debias:
            return new, new
        correction = 1 / (1 - decay ** (count + 1.0))
        return new, jax.tree.map(lambda u: jnp.asarray(correction, u.dtype) * u, new)


class Scaling(eqx.Module):
    r"""What divides the gradient of the mean loss in the mean's step, where that is not q's precision.

    With $v = (τS − δ)/N$, the curvature of the mean loss that q's precision S stands for (δ is the prior's):
    $m ← m − ρ\hat g / (\sqrt{\hat v} + δ/N + c)$ with `root` (`eq:rmsprop_update`), else
    $m ← m − ρ\hat g / (\hat v + δ/N + c)$. q stays as it is: posterior and preconditioner are two things. Without
    δ/N a prior would throw a parameter that the data never see, and v never scales, back and forth past its mean.

    `damping` is c; `"prior"` leaves it to δ/N (Vadam). `debias` divides v by $1 − (1−ρ)^t$, as Adam does.
    `start` is a curvature h₀: the rate is then in units of the divisor at $v = h_0$, so that the first step
    from there is $−ρ\hat g$, as gradient descent's (IVON).
    """

    damping: Any
    start: Any
    root: bool = eqx.field(static=True)
    debias: bool = eqx.field(static=True)
    by_prior: bool = eqx.field(static=True)

    def __init__(
        self, damping: Number | str = 0.0, *, root: bool = False, debias: bool = False, start: Number | None = None
    ):
        if isinstance(damping, str) and damping != "prior":
            raise ValueError(f'damping= is a number or "prior", got {damping!r}.')
        self.by_prior = isinstance(damping, str)
        self.damping = 0.0 if isinstance(damping, str) else number(damping, "The damping")
        self.start = None if start is None else number(start, "The curvature to start from")
        self.root, self.debias = root, debias

    def first(self, precision: PyTree, size: Any, temperature: Any, prior: PyTree) -> PyTree:
        """v at the start, where it has to be kept beside q: in float32 a prior would hide a small Nv in S."""
        if not self.root or prior is None:
            return None
        return jax.tree.map(lambda s, p: jnp.maximum((temperature * s - p) / size, 0).astype(s.dtype), precision, prior)

    def updated(self, v: PyTree, curvature: PyTree, size: Any, fraction: Any) -> PyTree:
        """v ← (1 − ρτ)v + ρτ h/N with the data's curvature h: as q's precision moves, but for the prior."""
        if v is None:
            return None
        mixed = lambda v, h: v + jnp.asarray(fraction, v.dtype) * (h / jnp.asarray(size, v.dtype) - v)
        return jax.tree.map(mixed, v, curvature)

    def divisor(self, size: Any, temperature: Any, prior: PyTree, v: PyTree, fraction: Any, count: Any) -> Divisor:
        """What the mean's step divides by at this step count, where `fraction` of the precision is replaced."""
        correction = 1 - (1 - fraction) ** (count + 1.0) if self.debias else None
        damping, start = at(self.damping, count), None if self.start is None else at(self.start, count)
        return Divisor(size, temperature, prior, v, damping, correction, start, self.root)

    def __str__(self) -> str:
        v = "v̂" if self.debias else "v"
        said = [f"√{v}" if self.root else v, "δ/N"]
        if not (isinstance(self.damping, float | int) and self.damping == 0):
            said.append(_said(self.damping))
        relative = "" if self.start is None else f", relative to v = {_said(self.start)}"
        return f"ĝ over ({' + '.join(said)}){relative}"


class Divisor(eqx.Module):
    """A `Scaling` in one step, where N, τ and the prior are known."""

    size: Any
    temperature: Any
    prior: PyTree
    v: PyTree
    damping: Any
    correction: Any
    start: Any
    root: bool = eqx.field(static=True)

    def __call__(self, precision: PyTree) -> PyTree:
        """What divides the gradient of the sum over N examples, for every entry of the precision."""
        rest = [tree for tree in (self.prior, self.v) if tree is not None]
        return jax.tree.map(self._of, precision, *rest)

    def _of(self, s: Array, prior: Array | None = None, v: Array | None = None) -> Array:
        # Numbers are multiplied and divided among themselves first: a division for every entry costs as much as all
        # the rest of Adam's arithmetic.
        cast = lambda x: jnp.asarray(x, s.dtype)
        spare = None if prior is None else prior * cast(1 / self.size)
        share = self.temperature / self.size
        if self.root or self.correction is not None:
            unbias = 1.0 if self.correction is None else 1 / self.correction
            if v is not None:
                v = v * cast(unbias)
            elif spare is None:
                v = s * cast(share * unbias)
            else:
                v = jnp.maximum(s * cast(share) - spare, 0) * cast(unbias)
            whole = self._scaled(v, spare)
        else:
            whole = s * cast(share)
        whole = whole + cast(self.damping)
        if self.start is None:
            return whole * cast(self.size)
        return whole * (cast(self.size) / (self._scaled(cast(self.start), spare) + cast(self.damping)))

    def _scaled(self, v: Array, spare: Array | None) -> Array:
        scaled = jnp.sqrt(v) if self.root else v
        return scaled if spare is None else scaled + spare
