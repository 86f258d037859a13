r"""Sparse Gaussian processes: the process given its values at a few inducing inputs, for data of any size.

Let u be the whitened values at M inputs Z, f(Z) = Lu with $LL^⊤ = k(Z, Z)$. Then $f(x) = a(x)·u + ε$ with
$a(x) = L^{-1}k(Z, x)$, and ε has the variance $k(x, x) − |a(x)|^2$ that remains given f(Z). u is an ordinary Gaussian
block with the prior N(0, I), so mini-batches, sites and natural gradients work as for any other block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ..factor_graph.block_view import BlockView
from ..factor_graph.factor import prior
from ..factor_graph.linear_factor import LinearFactor
from ..factor_graph.model import Model
from ..families.gaussian.full import Gaussian
from ..numerics.linalg import with_jitter
from ..numerics.programs import compiled
from ..numerics.random import Key
from .kernels import Inputs, Kernel, columns

__all__ = ["inducing_points", "log_evidence", "sparse"]

_PROJECTION = ("projection on u", "variance given u")


class SparseFactor(LinearFactor):
    """A likelihood of f(x_n) = a(x_n)·u + ε_n, integrated over u and over ε, the part that u does not determine.

    Args:
        likelihood: the likelihood of the process's own outputs, whose block becomes u.
        kernel: k.
        inducing: Z.
        inputs: the name of the inputs x in the data.
        center: the process's mean, a constant.
    """

    kernel: Kernel
    inducing: Float[Array, "M D"]
    center: Array
    quadratic: bool = eqx.field(static=True)

    def __init__(self, likelihood: LinearFactor, kernel: Kernel, inducing: Any, inputs: str, center: Any):
        ((block, x),) = likelihood.predictors
        if x is not None:
            raise ValueError(
                f"A process's likelihood takes its outputs, {{{block!r}: None}}, and this one inputs {x!r}."
            )
        LinearFactor.__init__(
            self,
            likelihood.function,
            {block: inputs},
            *likelihood.blocks[1:],
            data=likelihood.data[-1],
            points=likelihood.integration,
            closed=likelihood.closed,
            label=likelihood.label,
        )
        self.kernel, self.inducing, self.center = kernel, inducing, jnp.asarray(center, inducing.dtype)
        # Not `conjugate`: the variance of ε enters E log p by another term than log E p, so that log E p does not
        # follow from E log p alone. `log_predictive` below has the formula for a log p that is quadratic in f.
        self.quadratic = likelihood.conjugate

    def input_width(self, block: Any) -> int:
        return self.inducing.shape[1]

    def prepared(self, data: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(_PROJECTION, self._projection(data), strict=True))

    def _projection(self, data: Mapping[str, Array]) -> tuple[Array, Array]:
        """a(x_n), and Var ε_n = Var[f(x_n) | u] = k(x_n, x_n) − |a(x_n)|²."""
        if all(name in data for name in _PROJECTION):
            return data[_PROJECTION[0]], data[_PROJECTION[1]]
        x = data[self.data[0]]
        weights = project_on_inducing(self.kernel, self.inducing, x)
        return weights, jnp.maximum(self.kernel.diagonal(x) - jnp.sum(weights**2, axis=1), 0.0)

    def outputs(
        self, views: Mapping[str, BlockView], data: Mapping[str, Array], local: frozenset[str] = frozenset()
    ) -> tuple[Array, Array]:
        return super().outputs(views, {**data, self.data[0]: self._projection(data)[0]}, local)

    def expected_log_likelihood(
        self,
        mean: Array,
        covariance: Array,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Key | None,
        center: Array | None = None,
    ) -> Array:
        variance = covariance + self._projection(data)[1]
        center = None if center is None else center + self.center
        return super().expected_log_likelihood(mean + self.center, variance, views, data, key, center)

    def log_predictive(
        self,
        mean: Array,
        covariance: Array,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        observed: Array | None = None,
    ) -> tuple[Array, Array]:
        mean, variance = mean + self.center, covariance + self._projection(data)[1]
        if not self.quadratic:
            return super().log_predictive(mean, variance, views, data, observed)
        # log E exp(a + b(f − m) + ½c(f − m)²) over f ~ N(m, v) is a + ½[b²v/(1 − cv) − log(1 − cv)].
        row, y = self._row(views), data[self.data[-1]]
        value, slope = jax.vmap(jax.value_and_grad(row))(mean, y)
        scale = 1 - variance * jax.vmap(jax.grad(jax.grad(row)))(mean, y)
        return value + 0.5 * (slope**2 * variance / scale - jnp.log(scale)), jnp.zeros_like(value)


def single_output(likelihood: LinearFactor) -> str:
    """The name of the block whose entries are a likelihood's outputs; an error if it has other predictors."""
    if not isinstance(likelihood, LinearFactor) or [x for _, x in likelihood.predictors] != [None]:
        raise ValueError(
            "A process's likelihood is a factor of its outputs alone, factors.poisson_exp('y', {'f': None}). For more "
            "terms build a blr.Model with gp.prior(kernel, x) as a block."
        )
    return likelihood.predictors[0][0]


def project_on_inducing(kernel: Kernel, inducing: Inputs, x: Inputs) -> Float[Array, "N M"]:
    """a(x) = L⁻¹k(Z, x), a row for each input x, with L the Cholesky factor of k(Z, Z) (and a jitter)."""
    factor = jnp.linalg.cholesky(with_jitter(kernel(inducing)))
    return solve_triangular(factor, kernel(inducing, x), lower=True).T


def sparse(
    kernel: Kernel, inducing: Inputs, likelihood: LinearFactor, *, mean: float = 0.0, inputs: str = "x"
) -> Model:
    r"""The sparse process with inducing inputs Z, for data {"x": inputs, "y": observations}.

    Its bound is below the log evidence of the full process, and equal to it if Z are the data's inputs. For Gaussian
    noise one step with ρ = 1 gives Titsias' bound; with `fit(…, batch_size=)` it is stochastic variational inference by
    natural gradients (Hensman et al., 2013), and `cvi(rate, sites=True)` keeps every row's message.

    Args:
        kernel: k.
        inducing: Z, (M,) or (M, D).
        likelihood: a factor of the process's outputs, with the predictors {name: None}.
        mean: the prior mean.
        inputs: the name of x in the data.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x = jnp.linspace(0.0, 3.0, 50)
    >>> model = sparse(RBF(), jnp.array([0.0, 1.0, 2.0, 3.0]), blr.factors.linear("y", {"f": None}, precision=10.0))
    >>> result = blr.fit(blr.conjugate(), model, None, {"x": x, "y": jnp.sin(2 * x)}, steps=1)
    >>> result.q["f"].mean.shape
    (4,)
    """
    inducing = columns(inducing)
    start = Gaussian(jnp.zeros(len(inducing), inducing.dtype))
    name, factor = single_output(likelihood), SparseFactor(likelihood, kernel, inducing, inputs, mean)
    return Model({name: start}, {f"prior of {name}": prior(name, start), likelihood.data[-1]: factor})


def log_evidence(
    kernel: Kernel, inducing: Inputs, x: Inputs, y: Any, noise: Any, weights: Any = 1.0
) -> Float[Array, ""]:
    r"""Titsias' bound on the log evidence of a process with Gaussian noise, at the best q(u).

    $\log ∫ N(u \mid 0, I)\prod_n N(y_n \mid a_n·u, noise)^{w_n}du − ½\sum_n w_n(k_{nn} − |a_n|^2)/noise$.
    Differentiable in the hyper-parameters; arguments as for `gp.log_evidence`, with Z = `inducing`.

    >>> import jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x, y = jnp.array([0.0, 1.0]), jnp.array([0.0, 1.0])
    >>> [round(float(log_evidence(RBF(), few, x, y, 0.1)), 3) for few in (x, x[:1])]
    [-2.405, -7.786]
    """
    precision = jnp.broadcast_to(jnp.asarray(weights) / noise, jnp.shape(y))
    features = project_on_inducing(kernel, inducing, x)
    size = features.shape[1]
    factor = jnp.linalg.cholesky(jnp.eye(size, dtype=features.dtype) + (features.T * precision) @ features)
    whitened = solve_triangular(factor, features.T @ (precision * y), lower=True)
    remaining = jnp.maximum(kernel.diagonal(columns(x)) - jnp.sum(features**2, axis=1), 0.0)
    likelihood = jnp.sum(precision * (y**2 + remaining + noise * jnp.log(2 * math.pi * noise)))
    return 0.5 * (jnp.sum(whitened**2) - likelihood) - jnp.sum(jnp.log(jnp.diagonal(factor)))


def inducing_points(kernel: Kernel, x: Inputs, count: int) -> Float[Array, "M D"]:
    """Choose inducing inputs among x greedily: each has the largest prior variance given those chosen before it.

    These are the pivots of a Cholesky factor of k(x, x), of which M rows are computed (Burt et al., 2020).

    Args:
        kernel: k.
        x: the inputs to choose from.
        count: M, how many to choose.

    >>> import jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> inducing_points(RBF(), jnp.array([0.0, 0.1, 0.2, 3.0]), 2)[:, 0].tolist()
    [0.0, 3.0]
    """
    x = columns(x)
    if not 1 <= count <= len(x):
        raise ValueError(
            f"Inducing points are some of the {len(x)} inputs, so count= is between 1 and that, got {count}."
        )
    return x[_pivots(kernel, x, count)]


@compiled(static="count")
def _pivots(kernel: Kernel, x: Array, count: int) -> Array:
    def choose(place: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        remaining, rows, chosen = carry
        best = jnp.argmax(remaining)
        cross = kernel(x[best][None], x)[0] - rows[:, best] @ rows
        row = cross / jnp.sqrt(jnp.maximum(remaining[best], jnp.finfo(x.dtype).tiny))
        # A chosen input gets −1, so that it is not chosen again even if rounding leaves it a positive variance.
        updated = jnp.maximum(remaining - row**2, 0.0).at[best].set(-1.0)
        updated = jnp.where(remaining < 0, -1.0, updated)
        return updated, rows.at[place].set(row), chosen.at[place].set(best)

    start = kernel.diagonal(x), jnp.zeros((count, len(x)), x.dtype), jnp.zeros(count, int)
    return jax.lax.fori_loop(0, count, choose, start)[2]
