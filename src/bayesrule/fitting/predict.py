"""Predictions under q: the model's outputs averaged over θ, at its mean, or linearised about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..numerics.checks import positive_int
from ..numerics.linalg import symmetric_root
from ..points.base import Points, PointSet

_METHODS = ("samples", "mean", "linearized")
_MOST_ROWS = 1024
_ROW_NUMBERS = 2**22
"""How many numbers the inputs and outputs of one chunk hold, unless `batch_size` says otherwise."""
_JACOBIAN_NUMBERS = 2**24


def predict(
    q: Any,
    apply: Callable[..., Any],
    x: PyTree,
    *,
    key: Any = None,
    samples: int = 32,
    method: str = "samples",
    link: str | Callable[[Array], Array] | None = None,
    points: Points | None = None,
    batch_size: int | None = None,
    variance: bool = False,
) -> Any:
    r"""The model's prediction at each row of `x`, with θ ~ q.

    - `"samples"`: $E_q[g(f_θ(x))] ≈ \sum_s w_s g(f_{θ_s}(x))$ for the link g. The θ_s are `samples`
      draws, one for each key of `jax.random.split(key, samples)` and the same for all inputs, or what
      `points` gives. Draws are made and dropped one by one; `points` are made all at once, unless
      they say `scan=True`.
    - `"mean"`: $g(f_m(x))$ at the mean m of q, the delta method; q may be bare parameters.
    - `"linearized"`: $f ∼ N(f_m(x), J S^{-1} J^⊤)$ for a Gaussian q, J the Jacobian at m: the
      predictive of the generalised linear model. Its mean through a link is MacKay's approximation,
      $\mathrm{softmax}(f_k/\sqrt{1 + πv_k/8})$ and likewise for the sigmoid; any other link is
      averaged over `samples` draws of the outputs, with the same noise for every input.

    `apply(params, x)` and the link see one example. The rows of `x` (any pytree) are examples, taken
    `batch_size` at a time, which bounds the memory and leaves the answer as it is. `link` is None,
    "softmax" (over the last axis), "sigmoid" or a function. A program is compiled for each `apply`,
    `link` and shapes: define these functions once, outside of loops.

    With `variance=True` returns (mean, variance) of the linked output: over the draws,
    $\sum_s w_s (g_s − \bar g)^2$ (not divided by S − 1), or the diagonal of $J S^{-1} J^⊤$. It is the
    uncertainty about the model: the noise of an observation is not in it.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> q = blr.DiagonalGaussian(jnp.array([1.0, 2.0]), jnp.array([4.0, 10.0]))
    >>> x = jnp.array([[1.0, 0.0], [2.0, 1.0]])
    >>> mean, spread = predict(q, jnp.dot, x, method="linearized", variance=True)
    >>> mean.tolist(), spread.tolist()                                          # xᵀm and xᵀS⁻¹x
    ([1.0, 4.0], [0.25, 1.1])
    >>> predict(q, jnp.dot, x, points=blr.Quadrature(3), link=jnp.square).tolist()      # E_q (xᵀθ)²
    [1.25, 17.1]
    """
    _check(q, apply, link, key, samples, method, points, batch_size, variance)
    _rows(x)
    if not isinstance(q, Family):
        _check_arrays(q)
    plan = _Plan(apply, link, method, samples, batch_size, variance)
    mean, spread = _predicted(q, x, key, points, plan)
    return (mean, spread) if variance else mean


class _Plan(NamedTuple):
    """What a compiled prediction depends on, besides the shapes."""

    apply: Callable[..., Any]
    link: Any
    method: str
    samples: int
    batch_size: int | None
    variance: bool


@partial(jax.jit, static_argnames="plan")
def _predicted(q: Any, x: PyTree, key: Any, points: Points | None, plan: _Plan) -> tuple[Array, Array | None]:
    """The mean and the variance."""
    if plan.method == "linearized":
        return _linearized(q, x, key, plan)
    link = _as_function(plan.link)

    def one(theta: PyTree, example: PyTree) -> Array:
        return link(jnp.asarray(plan.apply(theta, example)))

    if plan.method == "mean":
        theta = cast(Any, q).mean if isinstance(q, Family) else q
        like = _output_like(plan.apply, theta, x, plan.link)
        return _in_chunks(lambda example: one(theta, example), x, _chunk(x, like, plan.batch_size)), None

    turns, spots = _turns(q, key, points, plan.samples)
    theta = jax.eval_shape(lambda turns: _first(spots(_first(turns)).theta), turns)
    rows = _chunk(x, _output_like(plan.apply, theta, x, plan.link), plan.batch_size)

    def outputs(theta: PyTree) -> Array:
        return _in_chunks(lambda example: one(theta, example), x, rows)

    return _moments(outputs, turns, spots, jax.eval_shape(outputs, theta))


def _turns(q: Any, key: Any, points: Points | None, samples: int) -> tuple[PyTree, Callable[[Any], PointSet]]:
    """What to loop over, and the points of one turn: a draw at a time, unless `points` gives several."""
    if points is None:
        weight = jnp.full(1, 1 / samples)
        return jax.random.split(key, samples), lambda k: PointSet(jax.tree.map(lambda t: t[None], q.sample(k)), weight)
    if points.parts > 1:

        def part(turn: Any) -> PointSet:
            spots = points.part(q, turn)
            return PointSet(spots.theta, spots.weights / points.parts)

        return jax.random.split(key, points.parts), part
    spots = points.at(q, key)
    return jax.tree.map(lambda t: t[:, None], (spots.theta, spots.weights)), lambda turn: PointSet(*turn)


def _moments(
    outputs: Callable[[PyTree], Array], turns: PyTree, spots: Callable[[Any], PointSet], like: Any
) -> tuple[Array, Array]:
    """The weighted mean and variance of the outputs, one point at a time (West's updates)."""

    def add(carry: tuple[Array, Array, Array], point: tuple[PyTree, Array]) -> tuple[Any, None]:
        total, mean, squares = carry
        value, weight = outputs(point[0]).astype(mean.dtype), point[1].astype(mean.dtype)
        total = total + weight
        # A point of no weight changes nothing, even if it comes first or its output is not a number.
        change = jnp.where(weight == 0, 0.0, value - mean)
        mean = mean + weight / jnp.where(total == 0, 1.0, total) * change
        squares = squares + jnp.where(weight == 0, 0.0, weight * change * (value - mean))
        return (total, mean, squares), None

    def turn(carry: tuple[Array, Array, Array], item: Any) -> tuple[Any, None]:
        points = spots(item)
        return jax.lax.scan(add, carry, (points.theta, points.weights))

    dtype = like.dtype if jnp.issubdtype(like.dtype, jnp.inexact) else jnp.zeros(()).dtype
    zero = jnp.zeros(like.shape, dtype)
    (total, mean, squares), _ = jax.lax.scan(turn, (jnp.zeros((), dtype), zero, zero), turns)
    return mean, squares / total


def _linearized(q: Any, x: PyTree, key: Any, plan: _Plan) -> tuple[Array, Array]:
    """f ~ N(f_m(x), J S⁻¹ Jᵀ), through the link."""

    def flat(theta: PyTree, example: PyTree) -> Array:
        return jnp.ravel(jnp.asarray(plan.apply(theta, example)))

    like = _output_like(plan.apply, q.mean, x, plan.link)
    numbers = like.size * sum(leaf.size for leaf in jax.tree.leaves(q.mean))
    rows = _chunk(x, like, plan.batch_size, max(1, _JACOBIAN_NUMBERS // max(1, numbers)))
    drawn = plan.link is not None and (callable(plan.link) or plan.variance)
    # The same noise for every input, so that the chunks cannot matter.
    noise = jax.random.normal(key, (plan.samples, like.size), like.dtype) if drawn else None

    def block(examples: PyTree) -> tuple[Array, Array]:
        center = jax.vmap(flat, (None, 0))(q.mean, examples)
        jacobian = jax.vmap(jax.jacrev(flat), (None, 0))(q.mean, examples)
        covariance = q.output_covariance(jacobian)
        return jax.vmap(lambda f, c: _linked(f, c, like.shape, noise, plan.link))(center, covariance)

    return _in_blocks(block, x, rows)


def _linked(
    center: Float[Array, " K"], covariance: Float[Array, "K K"], shape: tuple[int, ...], noise: Any, link: Any
) -> tuple[Array, Array]:
    """The mean and variance of link(f) for one example's f ~ N(center, covariance)."""
    f, v = center.reshape(shape), jnp.diagonal(covariance).reshape(shape)
    if link is None:
        return f, v
    function = _as_function(link)
    if noise is None:
        mean = function(f / jnp.sqrt(1 + math.pi / 8 * v))
        return mean, jnp.zeros_like(mean)  # not asked for
    values = jax.vmap(lambda draw: function(draw.reshape(shape)))(center + noise @ symmetric_root(covariance))
    mean = jnp.mean(values, axis=0) if callable(link) else function(f / jnp.sqrt(1 + math.pi / 8 * v))
    return mean, jnp.var(values, axis=0)


def _as_function(link: Any) -> Callable[[Array], Array]:
    named: dict[Any, Any] = {None: lambda f: f, "softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
    return named.get(link, link)


# Rows and chunks.


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _rows(x: PyTree) -> int:
    shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(x)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"The arrays of x need one row per example, and the same number of rows; got shapes {shapes}. For a single "
            "example pass x[None]."
        )
    (rows,) = sizes.pop()
    if rows == 0:
        raise ValueError(f"There is nothing to predict: x has no rows (shapes {shapes}).")
    return rows


def _chunk(x: PyTree, like: Any, batch_size: int | None, most: int = _MOST_ROWS) -> int:
    """How many rows to take at a time."""
    rows = _rows(x)
    if batch_size is None:
        numbers = like.size + sum(leaf.size for leaf in jax.tree.leaves(x)) // rows
        batch_size = min(most, _MOST_ROWS, max(1, _ROW_NUMBERS // max(1, numbers)))
    return min(rows, batch_size)


def _in_chunks(one: Callable[[PyTree], Array], x: PyTree, size: int) -> Array:
    """one(example) for each row, `size` rows at a time."""
    return _in_blocks(jax.vmap(one), x, size)


def _in_blocks(block: Callable[[PyTree], Any], x: PyTree, size: int) -> Any:
    """block(rows), for `size` rows at a time; the last block is filled up with copies of the last row."""
    rows = _rows(x)
    count = -(-rows // size)
    if count == 1:
        return block(x)

    def split(leaf: Array) -> Array:
        filler = jnp.broadcast_to(leaf[-1:], (count * size - rows, *leaf.shape[1:]))
        return jnp.concatenate([leaf, filler]).reshape((count, size, *leaf.shape[1:]))

    blocks = jax.lax.map(block, jax.tree.map(split, x))
    return jax.tree.map(lambda leaf: leaf.reshape((count * size, *leaf.shape[2:]))[:rows], blocks)


# What can go wrong.


def _check(
    q: Any,
    apply: Any,
    link: Any,
    key: Any,
    samples: Any,
    method: str,
    points: Any,
    batch_size: Any,
    variance: bool,
) -> None:
    if method not in _METHODS:
        raise ValueError(f"predict knows the methods {', '.join(map(repr, _METHODS))}; got {method!r}.")
    for name, function in (("apply", apply), ("link", link)):
        if name == "apply" and not callable(function):
            raise ValueError(f"predict(q, apply, x) takes a function apply(params, x), got {type(function).__name__}.")
        try:
            hash(function)
        except TypeError:
            raise ValueError(
                f"{name} is compiled in, so it must be hashable, and this {type(function).__name__} is not (it holds "
                "arrays?). Wrap it in a function: def apply(params, x): …"
            ) from None
    if not (link is None or link in ("softmax", "sigmoid") or callable(link)):
        raise ValueError(f'link is None, "softmax", "sigmoid" or a function of one example\'s output, got {link!r}.')
    for name, number in (("samples", samples), ("batch_size", 1 if batch_size is None else batch_size)):
        positive_int(name, number)
    if points is not None and not isinstance(points, Points):
        raise ValueError(f"points is one of blr.MonteCarlo, blr.Quadrature, …, got {type(points).__name__}.")
    if points is not None and method != "samples":
        raise ValueError(f'points say where to average, so they are for method="samples", not {method!r}.')
    if not isinstance(q, Family) and isinstance(getattr(q, "q", None), Family):
        raise ValueError(f"predict takes the posterior itself: pass .q of this {type(q).__name__}.")
    {"samples": _check_samples, "mean": _check_mean, "linearized": _check_linearized}[method](
        q, key, points, link, variance
    )


def _check_samples(q: Any, key: Any, points: Any, link: Any, variance: bool) -> None:
    if not isinstance(q, Family):
        raise ValueError(
            f"Averaging over θ needs a distribution q, got {type(q).__name__}. To predict from bare parameters pass "
            'method="mean", or put a family around them, such as blr.DiagonalGaussian(params, precision).'
        )
    if key is None and (points is None or points.random):
        raise ValueError(
            "Samples of θ are random: pass key=jax.random.key(…). Without a key there are points=blr.Quadrature(5) in "
            'few dimensions, method="mean", and method="linearized" for a Gaussian q.'
        )


def _check_mean(q: Any, key: Any, points: Any, link: Any, variance: bool) -> None:
    if variance:
        raise ValueError(
            'method="mean" looks at one θ, which has no variance: use method="samples", or "linearized" for a '
            "Gaussian q."
        )
    if isinstance(q, Family) and not hasattr(q, "mean"):
        raise ValueError(f'{type(q).__name__} has no mean in the shape of θ: use method="samples".')


def _check_linearized(q: Any, key: Any, points: Any, link: Any, variance: bool) -> None:
    if not isinstance(q, GaussianFamily):
        raise ValueError(
            f'method="linearized" propagates a Gaussian\'s covariance, and {type(q).__name__} is not a Gaussian: use '
            'method="samples" (or blr.laplace() for a Gaussian posterior).'
        )
    if q.batch_shape:
        raise ValueError(f"q is a batch of Gaussians, of shape {q.batch_shape}: jax.vmap predict over them.")
    if key is None and link is not None and (callable(link) or variance):
        what = "The variance of a linked output" if variance else "The mean of this link under a Gaussian"
        raise ValueError(f"{what} has no closed form and is taken over draws: pass key=jax.random.key(…).")


def _check_arrays(params: PyTree) -> None:
    leaves = jax.tree.leaves(params)
    wrong = sorted(
        {
            type(leaf).__name__
            for leaf in leaves
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
        }
    )
    if wrong:
        raise ValueError(
            f"The parameters hold leaves that are not arrays ({', '.join(wrong)}). Split them off, as "
            "params, static = equinox.partition(model, equinox.is_inexact_array), and join them inside apply."
        )


def _output_like(apply: Callable[..., Any], theta: PyTree, x: PyTree, link: Any) -> Any:
    """The shape and dtype of one example's output."""
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
    try:
        like = jax.eval_shape(apply, theta, example)
    except Exception as error:
        shapes = [leaf.shape for leaf in jax.tree.leaves(example)]
        error.add_note(f"predict calls apply(params, x) for one example at a time: here x has the shapes {shapes}.")
        raise
    if not hasattr(like, "shape"):
        raise ValueError(f"apply(params, x) returns one array for an example, got {jax.tree.structure(like)}.")
    if link == "softmax" and (like.shape == () or like.shape[-1] == 1):
        raise ValueError(
            f'link="softmax" needs a score for each class, and apply returns one of shape {like.shape}: with one score '
            'for two classes use link="sigmoid".'
        )
    return like
