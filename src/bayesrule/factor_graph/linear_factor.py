"""Factors through linear predictors: each row's output is Gaussian under q, so a grid over outputs is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from ..numerics.random import normals
from ..points.base import Points
from ..points.quadrature import Quadrature, grid
from .block_view import BlockView
from .factor import Factor


class LinearFactor(Factor):
    r"""$\log p(y_n \mid f_n)$ through linear predictors $f_n = \sum_b x_n^b · w_b$ of Gaussian blocks.

    Under q each $f_n$ is Gaussian, so its expectation needs points over $f_n$ only, however large the blocks are:
    `function(f, y, *others)` is the log-likelihood of one row, with f a number (or a vector, of several outputs) and
    the remaining blocks as μ. `closed(mean, variance, y, *others)` is its expectation, where there is a formula;
    `conjugate` says that it is quadratic in f. `predictors` names each block's inputs in the data, or None where the
    block's entries are themselves the outputs.
    A row's message lives in the outputs' space too: $\tildeλ_n = (ν_n, −½κ_n)$ in the terms of $f_n$.
    """

    spread: Points
    closed: Any
    predictors: tuple[tuple[str, str | None], ...] = eqx.field(static=True)
    conjugate: bool = eqx.field(static=True)

    def __init__(
        self,
        function: Callable[..., Any],
        predictors: Mapping[str, str | None],
        *others: str,
        data: str,
        points: Points,
        closed: Callable[..., Any] | None = None,
        conjugate: bool = False,
        said: str = "",
    ):
        inputs = [x for x in predictors.values() if x is not None]
        Factor.__init__(self, function, *predictors, *others, data=(*inputs, data), of="seen", said=said)
        self.predictors, self.spread, self.conjugate = tuple(predictors.items()), points, conjugate
        self.closed = closed if closed is None or isinstance(closed, Partial) else Partial(closed)

    @property
    def random(self) -> bool:
        return self.spread.random and self.closed is None

    def width(self, block: Any) -> int:
        """How many inputs a row has for a block."""
        shape = jnp.shape(block.mode())
        return shape[-1] if shape else 1

    def value(
        self,
        seen: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Any = None,
        local: frozenset[str] = frozenset(),
    ) -> Array:
        return self.given(*self.outputs(seen, data, local), seen, data, key)

    def outputs(
        self, seen: Mapping[str, BlockView], data: Mapping[str, Array], local: frozenset[str] = frozenset()
    ) -> tuple[Array, Array]:
        """Every row's mean and (co)variance of f."""
        parts = [_projected(seen[name], None if x is None else data[x], name in local) for name, x in self.predictors]
        mean = sum((part[0] for part in parts[1:]), start=parts[0][0])
        spreads = [part[1] for part in parts]
        if any(spread.ndim > mean.ndim for spread in spreads):  # outputs that depend on each other
            spreads = [s if s.ndim > mean.ndim else s[..., None] * jnp.eye(s.shape[-1], dtype=s.dtype) for s in spreads]
        return mean, sum(spreads[1:], start=spreads[0])

    def given(
        self, mean: Array, spread: Array, seen: Mapping[str, BlockView], data: Mapping[str, Array], key: Any
    ) -> Array:
        """E log p(y_n | f_n) for every row, from its outputs' moments."""
        row, y = self._row(seen), data[self.data[-1]]
        if len(mean) != len(y):
            raise ValueError(
                f"{len(mean)} outputs and {len(y)} rows of {self.data[-1]!r}: every output needs its row, NaN where it "
                "is missing. A block whose entries are the outputs takes no mini-batches; one with inputs does."
            )
        if self.closed is not None:
            others = self._others(seen)
            if spread.ndim > mean.ndim:  # a formula for each output by itself
                spread = jnp.diagonal(spread, axis1=-2, axis2=-1)
            if self.conjugate:  # entry by entry, so that a known precision may have an entry for each
                value = self.closed(mean, spread, y, *others)
                if value.shape != mean.shape:
                    raise ValueError(f"the precision's shape makes {value.shape} out of outputs {mean.shape}.")
                return value
            return jax.vmap(lambda m, v, y: self.closed(m, v, y, *others))(mean, spread, y)
        if self.spread.delta:
            return _at_mean(row, mean, spread, y)
        values, weights = _on_grid(row, mean, spread, y, self.spread, key)
        return jnp.tensordot(weights, values, axes=1)

    def density(self, mean: Array, spread: Array, seen: Mapping[str, BlockView], data: Mapping[str, Array]) -> Array:
        """log E p(y_n | f_n) for every row, by a fine grid over its outputs."""
        order = 64 if mean.ndim == 1 else max(4, int(4096 ** (1 / mean.shape[-1])))
        row = self._row(seen)
        summed = lambda f, y: jnp.sum(row(f, y))
        values, weights = _on_grid(summed, mean, spread, data[self.data[-1]], Quadrature(order), None)
        return jax.nn.logsumexp(values, axis=0, b=weights[:, None])

    def _others(self, seen: Mapping[str, BlockView]) -> list[Any]:
        return [seen[name].expectation for name in self.blocks[len(self.predictors) :]]

    def _row(self, seen: Mapping[str, BlockView]) -> Callable[[Array, Any], Array]:
        others = self._others(seen)
        return lambda f, y: self.function(f, y, *others)

    def __str__(self) -> str:
        terms = " + ".join(name if x is None else f"{x}·{name}" for name, x in self.predictors)
        more = "".join(f", {name}" for name in self.blocks[len(self.predictors) :])
        how = "in closed form" if self.closed is not None else f"by {self.spread!r} over the outputs"
        return f"{self.said}({terms}{more}; {self.data[-1]})  {how}"


def _projected(seen: BlockView, x: Array | None, local: bool) -> tuple[Array, Array]:
    """The mean and (co)variance of a Gaussian block's outputs x_n·w, or x_n·w_n of a local one."""
    mean, spread = seen.mean, seen.covariance
    dense = spread.ndim > mean.ndim
    if local and x is not None:
        variance = jnp.einsum("np,npq,nq->n", x, spread, x) if dense else jnp.sum(x**2 * spread, axis=-1)
        return jnp.sum(x * mean, axis=-1), variance
    if x is None:
        own = mean.ndim == 1 and dense  # one Gaussian over all rows
        return mean, jnp.diagonal(spread, axis1=-2, axis2=-1) if own else spread
    shape = jnp.shape(seen.q.mode())
    if len(shape) == 1:
        return x @ mean, jnp.sum((x @ spread) * x, axis=-1) if dense else x**2 @ spread
    if not dense:  # w is (K, P), its entries independent
        return x @ mean.T, x**2 @ spread.T
    if mean.ndim == 2:  # K plates of P weights
        return x @ mean.T, jnp.einsum("np,kpq,nq->nk", x, spread, x)
    outputs, size = shape  # one Gaussian over (K, P)
    joint = spread.reshape(outputs, size, outputs, size)
    return x @ mean.reshape(outputs, size).T, jnp.einsum("np,kplq,nq->nkl", x, joint, x)


def _at_mean(row: Callable, mean: Array, spread: Array, y: Any) -> Array:
    """The delta method to second order: its derivatives are those of f ↦ log p(y | f) at the mean."""
    curved = jax.lax.stop_gradient(jax.vmap(jax.hessian(lambda f, y: jnp.sum(row(f, y))))(mean, y))
    letters = "n,n->n" if mean.ndim == 1 else "nkk,nk->n" if spread.ndim == mean.ndim else "nkl,nkl->n"
    value = jax.vmap(row)(mean, y)
    more = 0.5 * jnp.einsum(letters, curved, spread)
    return value + more if value.ndim == 1 else jnp.sum(value, axis=tuple(range(1, value.ndim))) + more


def _on_grid(row: Callable, mean: Array, spread: Array, y: Any, points: Any, key: Any) -> tuple[Array, Array]:
    """row(f_n, y_n) for points f_n around the mean, (S, N), and the points' weights."""
    if isinstance(points, Quadrature):
        nodes, weights = grid(points.order, 1 if mean.ndim == 1 else mean.shape[-1])
        noise = (nodes if mean.ndim == 1 else nodes[:, None, :]).astype(mean.dtype)
    else:
        if key is None:
            raise ValueError("MonteCarlo points are random: pass key=jax.random.key(…).")
        half = normals(key, mean, (points.samples // (2 if points.antithetic else 1),))
        noise = jnp.concatenate([half, -half]) if points.antithetic else half
        weights = jnp.full(points.samples, 1 / points.samples)
    if spread.ndim == mean.ndim:
        # An output that does not vary (x = 0) has no derivative of its spread, rather than an infinite one.
        varies = spread > 0
        spots = mean + jnp.where(varies, jnp.sqrt(jnp.where(varies, spread, 1.0)), 0.0) * noise
    else:
        root = jnp.linalg.cholesky(spread)
        spots = mean + jnp.einsum("nkl,snl->snk", root, jnp.broadcast_to(noise, (noise.shape[0], *mean.shape)))
    return jax.vmap(lambda f: jax.vmap(row)(f, y))(spots), weights.astype(mean.dtype)
