"""Generalised linear models: y given f = wᵀx + b, as objectives that are linear in their parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, PyTree

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.gaussian.precision import SharedFeatures
from ..numerics.padding import map_chunks, pad, power_of_two
from ..objectives.objective import Objective
from ..points.base import Points
from ..points.gaussian_outputs import output_points
from ..points.quadrature import Quadrature
from ..points.sampling import QuasiMonteCarlo

_ORDER = 32  # points of the quadrature over one output
_DRAWS = 256  # of several outputs
_ROWS = 1 << 14  # that are predicted at a time


def scores(params: PyTree, x: Float[Array, " D"]) -> Array:
    """f = wᵀx + b: one number, or one for each column of w. Without "b" there is no intercept."""
    return x @ params["w"] + params.get("b", 0.0)


def with_one(x: Float[Array, " D"]) -> Float[Array, " D+1"]:
    """The features that all scores share: 1 for the intercept, which comes first in the ravelled parameters, and x."""
    return jnp.concatenate([jnp.ones(1, x.dtype), x])


def as_it_is(x: Float[Array, " D"]) -> Float[Array, " D"]:
    """The features of scores without an intercept."""
    return x


def logistic(f: Array, y: Any) -> Array:
    """−log p(y | f) of a label 0 or 1."""
    return jnp.logaddexp(0.0, f) - y * f


def softmax(f: Float[Array, " K-1"], y: Any) -> Array:
    """−log p(y | f) of one of K classes, whose scores are the `contrasts` of K − 1 numbers."""
    return jax.nn.logsumexp(classes(f)) - classes(f)[y]


def poisson(f: Array, y: Any) -> Array:
    """−log p(y | f) of a count with the mean eᶠ."""
    return jnp.exp(f) - y * f + gammaln(y + 1)


def contrasts(classes: int) -> Float[np.ndarray, "K K-1"]:
    """Orthonormal columns that sum to zero: every direction of the scores has an effect, and none is preferred.

    >>> contrasts(3).T @ contrasts(3)
    array([[1., 0.], [0., 1.]])
    """
    # Helmert's, which SciPy has in rows.
    from scipy.linalg import helmert

    return helmert(classes).T


def classes(f: Float[Array, "... K-1"]) -> Float[Array, "... K"]:
    """Every class's score."""
    return f @ jnp.asarray(contrasts(f.shape[-1] + 1), f.dtype).T


LOSSES = {"logistic": logistic, "softmax": softmax, "poisson": poisson}


def regression(kind: str, size: Any, regularizer: Any = None, *, intercept: bool = True) -> Objective:
    """The objective of a generalised linear model: "logistic", "softmax" or "poisson", for examples (x, y).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = regression("logistic", 4, {"w": 1.0, "b": 0.0})                   # an intercept that is left alone
    >>> x, y = jnp.array([[-2.0], [-1.0], [1.0], [2.0]]), jnp.array([0.0, 1.0, 0.0, 1.0])
    >>> result = blr.fit(blr.laplace(), objective, zeros(1), (x, y), steps=20, tolerance=1e-6)
    >>> round(float(result.q.mean["w"][0]), 3)
    0.291
    """
    several = with_one if intercept else as_it_is
    linear = several if kind == "softmax" else True
    return Objective(LOSSES[kind], output=scores, linear=linear, size=size, regularizer=regularizer)


def strength(hyper: PyTree) -> PyTree:
    """The regularizer of these models: a precision for the weights, nothing for the intercept."""
    return {"w": hyper["w"], "b": 0.0}


def strength_alone(hyper: PyTree) -> PyTree:
    """The same without an intercept."""
    return {"w": hyper["w"]}


def wide(hyper: PyTree) -> Array:
    """A weak belief about the weights' deviation σ = α^{−½}: half a Student t, of three degrees of freedom.

    It is 2.5 units wide: a unit moves f by 1 where a feature moves by its own deviation (Gelman et al., 2008). Classes
    that can be separated are the more probable the larger the weights: without it nothing would stop α on its way to 0.
    """
    deviation = hyper["w"] ** -0.5
    return -2 * jnp.log1p(deviation**2 / (3 * (2.5 * hyper["unit"]) ** 2))


def zeros(features: int, outputs: int | None = None, *, intercept: bool = True) -> PyTree:
    """Parameters to start from."""
    shape = () if outputs is None else (outputs,)
    params = {"w": jnp.zeros((features, *shape))}
    return {**params, "b": jnp.zeros(shape)} if intercept else params


# Predictions, averaged over a Gaussian posterior.


@jax.jit
def outputs(q: Any, x: Float[Array, "N D"]) -> tuple[Array, Array]:
    """The mean of every row's f, and its variance (covariance where there are several)."""
    center = jax.vmap(partial(scores, q.mean))(x)
    if center.ndim == 2 and isinstance(q, Gaussian):
        features = jax.vmap(with_one if "b" in q.mean else as_it_is)(x)
        return center, q.output_covariance(SharedFeatures(features, q.mean))
    jacobian = jax.vmap(jax.jacrev(lambda params, row: jnp.atleast_1d(scores(params, row))), (None, 0))(q.mean, x)
    covariance = q.output_covariance(jacobian)
    return center, covariance if center.ndim == 2 else covariance[:, 0, 0]


@partial(jax.jit, static_argnames="kind")
def predictive(q: Any, x: Float[Array, "N D"], kind: str) -> tuple[Array, Array]:
    """E[y] (of a class: every class's probability) and the variance of y, f averaged over q.

    Exact for counts, by quadrature for one score, over draws of the scores (the same noise for every row) for several.
    """
    center, spread = outputs(q, x)
    if kind == "poisson":
        mean = jnp.exp(center + 0.5 * spread)
        return mean, mean + mean**2 * jnp.expm1(spread)
    if kind == "logistic":
        f, weights = _points(Quadrature(_ORDER), center, spread)
        mean = weights @ jax.nn.sigmoid(f)
        return mean, mean * (1 - mean)
    f, weights = _points(QuasiMonteCarlo(_DRAWS), center, spread)
    mean = jnp.tensordot(weights, jax.nn.softmax(classes(f)), axes=1)
    return mean, mean * (1 - mean)


@partial(jax.jit, static_argnames="kind")
def log_predictive(q: Any, x: Float[Array, "N D"], y: Float[Array, " N"], kind: str) -> Float[Array, " N"]:
    """log E_q p(y | f) for every row of a model with one score, by quadrature."""
    center, spread = outputs(q, x)
    f, weights = _points(Quadrature(_ORDER), center, spread)
    log_likelihoods = -jax.vmap(lambda row: jax.vmap(LOSSES[kind])(row, y))(f)
    return jax.nn.logsumexp(log_likelihoods, axis=0, b=weights[:, None])


def _points(points: Points, center: Array, covariance: Array) -> tuple[Array, Array]:
    """Points of every row's outputs, (S, N, …), and their weights."""
    noise, weights = points.output_noise(center, None)
    return output_points(center, covariance, noise), weights.astype(center.dtype)


def in_blocks(function: Any, q: Any, x: Float[np.ndarray, "N D"], *options: Any) -> tuple[np.ndarray, ...]:
    """function(q, rows, …) for all rows: in blocks of few sizes, so that memory is bounded and little is compiled."""

    def block(part: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = pad(part, min(_ROWS, power_of_two(len(part), 32)))
        return tuple(np.asarray(value)[: len(part)] for value in function(q, rows, *options))

    return map_chunks(block, x, _ROWS)


def drawn(q: Any, x: Float[Array, "N D"], count: int, key: Any) -> Array:
    """f for every row under draws from q, (count, N, …): a draw has the same weights for all rows."""
    params = q.sample(key, (count,))
    return jax.vmap(lambda params: scores(params, x))(params)


# A posterior over other features, or in other units.


def narrowed(q: Any, features: int) -> Any:
    """q without the weights of columns of zeros, which stay at the prior, independent of the others, and are last."""
    if not isinstance(q, Gaussian | DiagonalGaussian) or q.mean["w"].shape[0] == features:
        return q
    mean = {**q.mean, "w": q.mean["w"][:features]}
    if isinstance(q, Gaussian):
        size = sum(leaf.size for leaf in jax.tree.leaves(mean))
        return Gaussian(mean, q.precision[:size, :size])
    return DiagonalGaussian(mean, {**q.precision, "w": q.precision["w"][:features]})


def rescaled(q: Any, scale: float) -> Any:
    """q over the same parameters times a scale."""
    mean = jax.tree.map(lambda m: scale * m, q.mean)
    precision = jax.tree.map(lambda s: s / scale**2, q.precision)
    return eqx.tree_at(lambda q: (q.mean, q.precision), q, (mean, precision))
