r"""Factors through linear predictors: each row's output is Gaussian under q, so an integral over outputs is enough.

A likelihood log p(y_n | f_n) that depends on Gaussian blocks w only through f_n = x_n·w has
$E_q\log p(y_n \mid f_n) = ∫ N(f \mid m_n, v_n)\log p(y_n \mid f)\,df$ with m_n = x_n·E w and v_n = x_nᵀ Cov(w) x_n: one
dimension (or as many as there are outputs), however large w is. m_n and v_n are read off the block views, so the
derivative in the views' displacement is the message to w, as for any other factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from ..numerics.random import Key
from ..points.base import Points
from ..points.gaussian_outputs import output_points
from ..points.quadrature import Quadrature
from .block_view import BlockView
from .factor import Factor


class LinearFactor(Factor):
    r"""$\log p(y_n \mid f_n)$ through linear predictors $f_n = \sum_b x_n^b · w_b$ of Gaussian blocks.

    A row's message is Gaussian in its output: $\tildeλ_n = (ν_n, −½κ_n)$, for the term $ν_nf_n − ½κ_nf_n^2$. `Sites`
    and `leave_one_out` keep and remove rows in these terms, which need no memory of the blocks' size.

    Args:
        function: `function(f, y, *others)`, the log-likelihood of one row: f is a number, or a vector where a row has
            several outputs; the other blocks come as their expectation parameters μ.
        predictors: the name of each Gaussian block's inputs in the data, {"w": "x"}, or None where the block's entries
            are the outputs themselves.
        others: the other blocks that the function takes.
        data: what the factor observes, y.
        points: how the integral over f is computed: `Quadrature(n)`, `MonteCarlo(n)`, or `Delta()` (second order at the
            mean).
        closed: `closed(mean, variance, y, *others)`, the expectation over f ~ N(mean, variance) in closed form, for one
            row and one output; it takes the place of `points`.
        conjugate: that log p is quadratic in f, so that leave-one-out densities have a closed form. `closed` is then
            called once with all rows, and must be elementwise.
        label: the factor's name where a model is printed.
    """

    integration: Points
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
        label: str = "",
    ):
        inputs = [x for x in predictors.values() if x is not None]
        Factor.__init__(self, function, *predictors, *others, data=(*inputs, data), of="view", label=label)
        self.predictors, self.integration, self.conjugate = tuple(predictors.items()), points, conjugate
        self.closed = closed if closed is None or isinstance(closed, Partial) else Partial(closed)

    @property
    def random(self) -> bool:
        return self.integration.random and self.closed is None

    @property
    def second_order(self) -> bool:
        return self.integration.delta and self.closed is None

    def input_width(self, block: Any) -> int:
        """How many inputs a row of the data has for a block of q."""
        shape = jnp.shape(block.mode())
        return shape[-1] if shape else 1

    def value(
        self,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Key | None = None,
        local: frozenset[str] = frozenset(),
    ) -> Array:
        center = None
        if self.second_order:
            center = self.outputs({name: view.held for name, view in views.items()}, data, local)[0]
        return self.expected_log_likelihood(*self.outputs(views, data, local), views, data, key, center)

    def outputs(
        self, views: Mapping[str, BlockView], data: Mapping[str, Array], local: frozenset[str] = frozenset()
    ) -> tuple[Array, Array]:
        """The mean of every row's f, (N,) or (N, K), and its variance, or covariance (N, K, K) of dependent outputs."""
        parts = [_projected(views[name], None if x is None else data[x], name in local) for name, x in self.predictors]
        mean = sum((part[0] for part in parts[1:]), start=parts[0][0])
        covariances = [part[1] for part in parts]
        if any(cov.ndim > mean.ndim for cov in covariances):
            # One block makes the outputs depend on each other: the variances of the others become matrices too.
            covariances = [
                cov if cov.ndim > mean.ndim else cov[..., None] * jnp.eye(cov.shape[-1], dtype=cov.dtype)
                for cov in covariances
            ]
        return mean, sum(covariances[1:], start=covariances[0])

    def expected_log_likelihood(
        self,
        mean: Array,
        covariance: Array,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Key | None,
        center: Array | None = None,
    ) -> Array:
        """E log p(y_n | f_n) of every row, for f_n ~ N(mean, covariance).

        `Sites` differentiates it in the two moments: the derivatives are the row's message in the terms of its output.

        Args:
            mean: the outputs' means, as `outputs` returns them.
            covariance: their variances or covariances.
            views: the blocks, of which only the `others` are read.
            data: the arrays that the factor names.
            key: a random key, if `random`.
            center: for `Delta()` points, where the Hessian is taken: the mean, without what is differentiated for the
                message. By default that is the mean, held fixed.
        """
        row, y = self._row(views), data[self.data[-1]]
        if len(mean) != len(y):
            raise ValueError(
                f"{len(mean)} outputs and {len(y)} rows of {self.data[-1]!r}: every output needs its row, NaN where it "
                "is missing. A block whose entries are the outputs takes no mini-batches; one with inputs does."
            )
        if self.closed is not None:
            others = self._others(views)
            variance = covariance
            if covariance.ndim > mean.ndim:  # the formula is one of each output by itself
                variance = jnp.diagonal(covariance, axis1=-2, axis2=-1)
            if self.conjugate:  # without vmap, so that a constant precision may have an entry for each row
                value = self.closed(mean, variance, y, *others)
                if value.shape != mean.shape:
                    raise ValueError(
                        f"the precision does not broadcast to the outputs: the result has the shape {value.shape}, and "
                        f"the outputs have {mean.shape}."
                    )
                return value
            return jax.vmap(lambda m, v, y: self.closed(m, v, y, *others))(mean, variance, y)
        if self.integration.delta:
            center = jax.lax.stop_gradient(mean) if center is None else center
            return _second_order_at_mean(row, mean, covariance, y, center)
        values, weights = _at_points(row, mean, covariance, y, self.integration, key)
        return jnp.tensordot(weights, values, axes=1)

    def second_derivatives(self, mean: Array, views: Mapping[str, BlockView], data: Mapping[str, Array]) -> Array:
        """∂² log p(y_n | f_n) at f_n = mean: (N,), or a matrix for each row with several outputs. For `narrowed`."""
        return _hessians(self._row(views), mean, data[self.data[-1]])

    def log_predictive(
        self,
        mean: Array,
        covariance: Array,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        observed: Array | None = None,
    ) -> tuple[Array, Array]:
        """log E p(y_n | f_n) of every row, for f_n ~ N(mean, covariance), by a fine grid. For `leave_one_out`.

        Arguments as for `expected_log_likelihood`; `observed` masks the entries of y that count, all by default.

        Returns:
            the logarithms, and their differences from those of a grid with three quarters of the nodes.
        """
        order = 64 if mean.ndim == 1 else max(4, int(4096 ** (1 / mean.shape[-1])))
        row, y = self._row(views), data[self.data[-1]]
        mask = jnp.ones(y.shape, bool) if observed is None else observed

        def observed_part(f: Array, example: tuple[Array, Array]) -> Array:
            value, seen = row(f, example[0]), example[1]
            # One term for several entries needs all of them (see `zero_where_missing`).
            return jnp.sum(jnp.where(seen if value.ndim else jnp.all(seen), value, 0.0))

        def at(order: int) -> Array:
            values, weights = _at_points(observed_part, mean, covariance, (y, mask), Quadrature(order), None)
            return jax.nn.logsumexp(values, axis=0, b=weights[:, None])

        fine = at(order)
        return fine, jnp.abs(fine - at(3 * order // 4))

    def _others(self, views: Mapping[str, BlockView]) -> list[Any]:
        return [views[name].expectation for name in self.blocks[len(self.predictors) :]]

    def _row(self, views: Mapping[str, BlockView]) -> Callable[[Array, Any], Array]:
        others = self._others(views)
        return lambda f, y: self.function(f, y, *others)

    def __str__(self) -> str:
        terms = " + ".join(name if x is None else f"{x}·{name}" for name, x in self.predictors)
        others = "".join(f", {name}" for name in self.blocks[len(self.predictors) :])
        how = "in closed form" if self.closed is not None else f"by {self.integration!r} over the outputs"
        return f"{self.label}({terms}{others}; {self.data[-1]})  {how}"


def _projected(view: BlockView, x: Array | None, local: bool) -> tuple[Array, Array]:
    """The mean and (co)variance of a Gaussian block's outputs: x_n·w, x_n·w_n of a local block, w_n without inputs."""
    mean, covariance = view.mean, view.covariance
    dense = covariance.ndim > mean.ndim
    if local and x is not None:
        variance = jnp.einsum("np,npq,nq->n", x, covariance, x) if dense else jnp.sum(x**2 * covariance, axis=-1)
        return jnp.sum(x * mean, axis=-1), variance
    if x is None:
        one_for_all_rows = mean.ndim == 1 and dense
        return mean, jnp.diagonal(covariance, axis1=-2, axis2=-1) if one_for_all_rows else covariance
    shape = jnp.shape(view.q.mode())
    if len(shape) == 1:
        return x @ mean, jnp.sum((x @ covariance) * x, axis=-1) if dense else x**2 @ covariance
    if not dense:  # w is (K, P), its entries independent
        return x @ mean.T, x**2 @ covariance.T
    if mean.ndim == 2:  # K plates of P weights
        return x @ mean.T, jnp.einsum("np,kpq,nq->nk", x, covariance, x)
    outputs, size = shape  # one Gaussian over all of (K, P)
    joint = covariance.reshape(outputs, size, outputs, size)
    return x @ mean.reshape(outputs, size).T, jnp.einsum("np,kplq,nq->nkl", x, joint, x)


def _second_order_at_mean(row: Callable[..., Any], mean: Array, covariance: Array, y: Any, center: Array) -> Array:
    """log p(y | m) + ½⟨∇²log p(y | c), V⟩ at c = m.

    The derivatives in m and V are those of log p at the mean (Newton's), because m is differentiated for the message
    and the center c is not. A derivative of the whole in q or in a hyper-parameter moves both, so that the third
    derivatives of log p are in the slope of the evidence (Rasmussen and Williams, 2006, eq. 5.23).
    """
    hessian = _hessians(row, center, y)
    letters = "n,n->n" if mean.ndim == 1 else "nkk,nk->n" if covariance.ndim == mean.ndim else "nkl,nkl->n"
    value = jax.vmap(row)(mean, y)
    correction = 0.5 * jnp.einsum(letters, hessian, covariance)
    return value + correction if value.ndim == 1 else jnp.sum(value, axis=tuple(range(1, value.ndim))) + correction


def _hessians(row: Callable[..., Any], mean: Array, y: Any) -> Array:
    return jax.vmap(jax.hessian(lambda f, y: jnp.sum(row(f, y))))(mean, y)


def _at_points(
    row: Callable[..., Any], mean: Array, covariance: Array, y: Any, points: Points, key: Key | None
) -> tuple[Array, Array]:
    """row(f_n, y_n) at points f_n = m_n + V_n^½ ε_s, (S, N), and the points' weights (S,)."""
    noise, weights = points.output_noise(mean, key)
    outputs = output_points(mean, covariance, noise)
    return jax.vmap(lambda f: jax.vmap(row)(f, y))(outputs), weights.astype(mean.dtype)
