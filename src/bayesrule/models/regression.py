"""Generalised linear models: y given f = wᵀx + b, as objectives that are linear in their parameters."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float

from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.block_diagonal import BlockDiagonalGaussian
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..families.gaussian.precision import SharedFeatures
from ..numerics.padding import map_chunks, pad, power_of_two
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import same_shape
from ..objectives.objective import Objective
from ..points.quadrature import Quadrature
from ..points.sampling import QuasiMonteCarlo

BEND = 1.0
"""The distance from 0 beyond which the logistic loss is all but straight, for `Quadrature`."""

DRAWS = 256
"""Quasi-random points over several outputs, for predictions."""

_ORDER = 32  # nodes of the quadrature over one output
_ROWS = 1 << 14  # rows that are predicted at a time, if
_NUMBERS = 1 << 22  # their outputs at all points are not more numbers than this


def scores(params: PyTree, x: Float[Array, " D"]) -> Array:
    """f = wᵀx + b: one score, or one for each column of w. Without "b" there is no intercept."""
    return x @ params["w"] + params.get("b", 0.0)


def with_one(x: Float[Array, " D"]) -> Float[Array, " D+1"]:
    """(1, x), the features that all scores share; 1 comes first, as "b" does in the ravelled parameters."""
    return jnp.concatenate([jnp.ones(1, x.dtype), x])


def without_one(x: Float[Array, " D"]) -> Float[Array, " D"]:
    """x itself: the features of scores without an intercept."""
    return x


@dataclasses.dataclass(frozen=True)
class Logistic:
    """−log p(y | f) of a label 0 or 1."""

    def __call__(self, f: Array, y: Any) -> Array:
        return _softplus(f) - y * f

    def averages(
        self, f: Float[Array, "S B 1"], y: Any, weights: Float[Array, "S *B"], whole: bool
    ) -> tuple[Float[Array, " B"], Float[Array, "B 1"], Float[Array, "B 1 *1"]]:
        """The averages over points of every row's loss, of σ(f) − y and of σ(f)(1 − σ(f))."""
        f = f[..., 0]
        # Weights of every row multiply a sum: a product of matrices for each row would be laid out anew for it.
        weights = weights.astype(f.dtype).reshape((len(f), -1))
        average = lambda values: jnp.sum(weights * values, axis=0)
        probability = _sigmoid(f)
        loss = average(_softplus(f)) - y * average(f)
        slope, curvature = average(probability) - y * jnp.sum(weights, axis=0), average(probability * (1 - probability))
        return loss, slope[:, None], curvature.reshape((-1, 1, 1) if whole else (-1, 1))


logistic = Logistic()
"""−log p(y | f) of a label 0 or 1."""


@jax.custom_jvp
def _softplus(f: Array) -> Array:
    """log(1 + eᶠ). Its derivatives are polynomials of σ(f), where those of `logaddexp` take several exponentials."""
    return jnp.maximum(f, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(f)))


@_softplus.defjvp
def _softplus_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _softplus(*primals), _sigmoid(*primals) * tangents[0]


@jax.custom_jvp
def _sigmoid(f: Array) -> Array:
    """σ(f), by the same exponential as log(1 + eᶠ), so that it is computed once for both."""
    small = jnp.exp(-jnp.abs(f))
    return jnp.where(f >= 0, 1.0, small) / (1 + small)


@_sigmoid.defjvp
def _sigmoid_slope(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value = _sigmoid(*primals)
    return value, value * (1 - value) * tangents[0]


@dataclasses.dataclass(frozen=True)
class Softmax:
    """−log p(y | f) of one of K classes, whose scores are K numbers, or K − 1 numbers times the `contrasts`.

    Args:
        contrasted: Whether f has contrasts of the scores, and not the scores themselves.
    """

    contrasted: bool

    def __call__(self, f: Float[Array, " F"], y: Any) -> Array:
        scores = self.scores(f)
        return jax.nn.logsumexp(scores) - scores[y]

    def scores(self, f: Float[Array, "... F"]) -> Float[Array, "... K"]:
        """Every class's score."""
        return classes(f) if self.contrasted else f

    def averages(
        self, f: Float[Array, "S B F"], y: Any, weights: Float[Array, "S *B"], whole: bool
    ) -> tuple[Float[Array, " B"], Float[Array, "B F"], Float[Array, "B F *F"]]:
        """The averages over points of every row's loss, its gradient and its Hessian (`whole`) or the diagonal of it.

        With the probabilities p at a point and C the contrasts, the gradient is Cᵀ(p − e_y) and the Hessian
        Cᵀ(diag p − ppᵀ)C: both are averaged in p, and multiplied by C once.
        """
        scores = self.scores(f)
        top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        powers = jnp.exp(scores - top)
        total = jnp.sum(powers, axis=-1, keepdims=True)
        p = powers / total
        weights = weights.astype(f.dtype).reshape((len(f), -1))
        # Sums of products: as a product of matrices for each row, the points would be laid out anew.
        average = lambda values: jnp.sum(weights.reshape(weights.shape + (1,) * (values.ndim - 2)) * values, axis=0)
        log_total, mean, middle = average((top + jnp.log(total))[..., 0]), average(p), average(f)
        own = jax.nn.one_hot(y, p.shape[-1], dtype=f.dtype)
        loss = log_total - jnp.sum(self.scores(middle) * own, axis=-1)
        contrast = jnp.asarray(contrasts(p.shape[-1]), f.dtype) if self.contrasted else None
        slope = mean - own if contrast is None else (mean - own) @ contrast
        if not whole:
            if contrast is None:
                return loss, slope, mean - average(p**2)
            return loss, slope, mean @ contrast**2 - average((p @ contrast) ** 2)
        squares = jnp.einsum("sbk,sbl->bkl", weights[..., None] * p, p)
        hessian = mean[:, :, None] * jnp.eye(p.shape[-1], dtype=f.dtype) - squares
        return loss, slope, hessian if contrast is None else contrast.T @ hessian @ contrast


softmax = Softmax(contrasted=True)
"""−log p(y | f) of one of K classes, whose scores are K − 1 numbers times the `contrasts`."""

categorical = Softmax(contrasted=False)
"""−log p(y | f) of one of K classes with a score for each."""


def poisson(f: Array, y: Any) -> Array:
    """−log p(y | f) of a count with the mean eᶠ."""
    return jnp.exp(f) - y * f + gammaln(y + 1)


def contrasts(classes: int) -> Float[np.ndarray, "K K-1"]:
    """Orthonormal columns that sum to zero, by which K − 1 numbers become the scores of K classes.

    A constant added to all scores has no effect on a softmax, so that K free scores would have a direction that the
    data do not determine. Without it all directions matter, and an isotropic prior treats the classes alike.

    >>> contrasts(3).T @ contrasts(3)
    array([[1., 0.], [0., 1.]])
    """
    # These are the rows of Helmert's matrix.
    from scipy.linalg import helmert

    return helmert(classes).T


def classes(f: Float[Array, "... K-1"]) -> Float[Array, "... K"]:
    """Every class's score."""
    return f @ jnp.asarray(contrasts(f.shape[-1] + 1), f.dtype).T


LOSSES = {"logistic": logistic, "softmax": softmax, "categorical": categorical, "poisson": poisson}


def regression(kind: str, size: Any, regularizer: Any = None, *, intercept: bool = True) -> Objective:
    """The objective of a generalised linear model, for examples (x, y).

    Args:
        kind: "logistic", "softmax" (K − 1 contrasts of K classes), "categorical" (K scores) or "poisson".
        size: N, the number of examples.
        regularizer: as for `Objective`.
        intercept: whether the parameters have an intercept "b".

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = regression("logistic", 4, {"w": 1.0, "b": 0.0})                   # no prior on the intercept
    >>> x, y = jnp.array([[-2.0], [-1.0], [1.0], [2.0]]), jnp.array([0.0, 1.0, 0.0, 1.0])
    >>> result = blr.fit(blr.laplace(), objective, zeros(1), (x, y), steps=20, tolerance=1e-6)
    >>> round(float(result.q.mean["w"][0]), 3)
    0.291
    """
    features = with_one if intercept else without_one
    linear = features if kind in ("softmax", "categorical") else True
    return Objective(LOSSES[kind], output=scores, linear=linear, size=size, regularizer=regularizer)


def weight_precision(hyper: PyTree) -> PyTree:
    """The regularizer of a model with hyper-parameters: a precision for the weights, none for the intercept."""
    return {"w": hyper["w"], "b": 0.0}


def weight_precision_only(hyper: PyTree) -> PyTree:
    """The same for a model without an intercept."""
    return {"w": hyper["w"]}


def weak_prior(hyper: PyTree) -> Array:
    """The log density, up to a constant, of a weak prior on the weights' standard deviation σ = α^{−½}.

    It is a half Student t with three degrees of freedom and scale 2.5 units, where a weight of one unit changes f by 1
    if its feature changes by one standard deviation (Gelman et al., 2008). For classes that can be separated the
    evidence grows with σ without bound, and empirical Bayes would let α go to 0 without it.
    """
    std = hyper["w"] ** -0.5
    return -2 * jnp.log1p(std**2 / (3 * (2.5 * hyper["unit"]) ** 2))


def zeros(features: int, outputs: int | None = None, *, intercept: bool = True) -> PyTree:
    """Parameters to start from."""
    shape = () if outputs is None else (outputs,)
    params = {"w": np.zeros((features, *shape), jnp.result_type(float))}
    return {**params, "b": np.zeros(shape, jnp.result_type(float))} if intercept else params


# Predictions, averaged over a Gaussian posterior.


@compiled
def outputs(q: GaussianFamily, x: Float[Array, "N D"]) -> tuple[Array, Array]:
    """The mean of every row's f under q, and its variance, or covariance where f has several dependent entries."""
    center = jax.vmap(partial(scores, q.mean))(x)
    if center.ndim == 2 and q.structure.shares_features:
        features = jax.vmap(with_one if "b" in q.mean else without_one)(x)
        return center, q.output_covariance(SharedFeatures(features, q.mean))
    jacobian = jax.vmap(jax.jacrev(lambda params, row: jnp.atleast_1d(scores(params, row))), (None, 0))(q.mean, x)
    covariance = q.output_covariance(jacobian)
    return center, covariance if center.ndim == 2 else covariance[:, 0, 0]


@compiled(static="kind")
def predictive(q: GaussianFamily, x: Float[Array, "N D"], kind: str) -> tuple[Array, Array]:
    """The predictive mean of y (for classes: every class's probability) and variance, averaged over f under q.

    Exact for counts, by quadrature for one score, and by quasi-random points for several.
    """
    center, covariance = outputs(q, x)
    if kind == "poisson":
        mean = jnp.exp(center + 0.5 * covariance)
        return mean, mean + mean**2 * jnp.expm1(covariance)
    if kind == "logistic":
        f, weights = Quadrature(_ORDER, bend=BEND).output_grid(center, covariance, None)
        mean = jnp.sum(weights * jax.nn.sigmoid(f), axis=0)
        # 1 − mean would lose all digits of a probability near 0, which log odds need.
        return mean, mean * jnp.sum(weights * jax.nn.sigmoid(-f), axis=0)
    f, weights = QuasiMonteCarlo(DRAWS).output_grid(center, covariance, None)
    loss = categorical if kind == "categorical" else softmax
    mean = jnp.tensordot(weights, jax.nn.softmax(loss.scores(f)), axes=1)
    return mean, mean * (1 - mean)


@compiled(static="kind")
def log_predictive(q: GaussianFamily, x: Any, y: Any, kind: str) -> Float[Array, " N"]:
    """log E_q p(y | f) for every row of a model with one score, by quadrature."""
    center, variance = outputs(q, x)
    f, weights = Quadrature(_ORDER).output_grid(center, variance, None)
    log_likelihoods = -jax.vmap(lambda row: jax.vmap(LOSSES[kind])(row, y))(f)
    return jax.nn.logsumexp(log_likelihoods, axis=0, b=weights[:, None])


def map_rows(function: Any, q: GaussianFamily, x: Float[np.ndarray, "N D"], *options: Any) -> tuple[np.ndarray, ...]:
    """function(q, rows, …) for all rows, in padded chunks of few sizes: bounded memory, and few programs to compile."""

    # The points of several outputs are in memory at the same time.
    outputs = 1 if q.mean["w"].ndim == 1 else q.mean["w"].shape[1]
    most = _ROWS if outputs == 1 else max(32, min(_ROWS, 1 << (_NUMBERS // (DRAWS * outputs)).bit_length() - 1))

    def chunk(part: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = pad(part, min(most, power_of_two(len(part), 32)))
        return tuple(np.asarray(value)[: len(part)] for value in function(q, rows, *options))

    return map_chunks(chunk, x, most)


def draw_scores(q: GaussianFamily, x: Float[Array, "N D"], count: int, key: Key) -> Array:
    """f for every row under draws of the parameters from q, (count, N, …); all rows have a draw in common."""
    params = q.sample(key, (count,))
    return jax.vmap(lambda params: scores(params, x))(params)


# A posterior over other features, or in other units: on the host, where another number of columns costs no program.


def without_padding(q: Any, features: int) -> Any:
    """q without the weights of padded columns, which come last.

    Their features are 0 in all rows, so that under q they have the prior and are independent of the others.
    """
    if not isinstance(q, Gaussian | DiagonalGaussian | BlockDiagonalGaussian) or q.mean["w"].shape[0] == features:
        return q
    q = jax.tree.map(np.asarray, q)
    mean = {**q.mean, "w": q.mean["w"][:features]}
    size = sum(leaf.size for leaf in jax.tree.leaves(mean))
    if isinstance(q, Gaussian):
        return Gaussian(mean, q.precision[:size, :size])
    if isinstance(q, BlockDiagonalGaussian):
        size //= len(q.precision)
        return BlockDiagonalGaussian(mean, q.precision[:, :size, :size])
    return DiagonalGaussian(mean, {**q.precision, "w": q.precision["w"][:features]})


def rescaled(q: Any, scale: float) -> Any:
    """The distribution of the parameters times `scale`."""
    mean = jax.tree.map(lambda m: scale * np.asarray(m), q.mean)
    if isinstance(q, LowRankGaussian):
        parts = (mean, np.asarray(q.diagonal) / scale**2, np.asarray(q.factor) / scale)
        return eqx.tree_at(lambda q: (q.mean, q.diagonal, q.factor), q, parts)
    precision = jax.tree.map(lambda s: np.asarray(s) / scale**2, q.precision)
    return eqx.tree_at(lambda q: (q.mean, q.precision), q, (mean, precision))


def in_units_of_columns(q: Any, scale: Float[np.ndarray, " D"]) -> Any:
    """The distribution of the weights of columns x, from that of the weights of x/scale.

    Args:
        q: a Gaussian over {"b", "w"} or {"w"} with a full or low-rank precision, one for each output, or one for each
            entry or for all.
        scale: a number above 0 for each column.
    """
    q = jax.tree.map(np.asarray, q)
    by_weight = np.broadcast_to(np.reshape(scale, (-1,) + (1,) * (q.mean["w"].ndim - 1)), q.mean["w"].shape)
    factors = {name: by_weight if name == "w" else np.ones_like(leaf) for name, leaf in q.mean.items()}
    mean = jax.tree.map(np.divide, q.mean, factors)
    vector = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(factors)])
    if isinstance(q, LowRankGaussian):
        parts = (mean, q.diagonal * vector**2, vector[:, None] * q.factor)
        return eqx.tree_at(lambda q: (q.mean, q.diagonal, q.factor), q, parts)
    if isinstance(q, Gaussian):
        return Gaussian(mean, vector[:, None] * q.precision * vector)
    if isinstance(q, BlockDiagonalGaussian):
        by_row = vector[:: len(q.precision)]  # Of every row of weights, all outputs have the same factor.
        return BlockDiagonalGaussian(mean, by_row[:, None] * q.precision * by_row)
    numbers = same_shape(q.precision, q.mean, "precision")
    return type(q)(mean, jax.tree.map(lambda s, factor: s * factor**2, numbers, factors))


def with_origin_at_zero(q: Gaussian, center: Float[np.ndarray, " D"]) -> Gaussian:
    """The distribution over {"b", "w"} for columns x, from that for x − center: b loses centerᵀw."""
    q = jax.tree.map(np.asarray, q)
    mean, count = q.mean, max(1, q.mean["b"].size)
    # b of the centred columns is b + Mw with M = centerᵀ ⊗ I, as the weights are ravelled column by column of x.
    mixing = np.kron(center[None], np.eye(count))
    corner, side, rest = q.precision[:count, :count], q.precision[:count, count:], q.precision[count:, count:]
    new_side = side + corner @ mixing
    new_rest = rest + mixing.T @ new_side + side.T @ mixing
    precision = np.block([[corner, new_side], [new_side.T, new_rest]])
    return Gaussian({**mean, "b": mean["b"] - center @ mean["w"]}, precision)
