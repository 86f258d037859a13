"""Predictions under q: the model's outputs averaged over θ ~ q, at the mean of q, or linearised about it.

Memory is bounded whatever the number of draws and of inputs: draws of θ are made one at a time, and inputs go through
the model in chunks of rows. Neither changes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..numerics.checks import positive_int
from ..numerics.frozen import Frozen, as_frozen
from ..numerics.linalg import symmetric_root
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import wide
from ..points.base import Points, PointSet

_METHODS = ("samples", "mean", "linearized")
# Unless `batch_size` says otherwise, a chunk has at most so many rows, so many numbers in its inputs and outputs
# together, and so many in its Jacobians.
_MAX_CHUNK_ROWS = 1024
_MAX_CHUNK_ENTRIES = 2**22
_MAX_JACOBIAN_ENTRIES = 2**24
Link: TypeAlias = str | Callable[..., Any] | None


def predict(
    q: Family | PyTree,
    apply: Callable[..., Any],
    x: PyTree,
    *,
    key: Key | None = None,
    samples: int = 32,
    method: str = "samples",
    link: Link = None,
    points: Points | None = None,
    batch_size: int | None = None,
    variance: bool = False,
    frozen: PyTree = None,
) -> Any:
    r"""The model's prediction at each row of `x`, for θ ~ q.

    - `"samples"`: $E_q[g(f_θ(x))] ≈ \sum_s w_s g(f_{θ_s}(x))$ for the link g. The θ_s are `samples` draws, one for each
      key of `jax.random.split(key, samples)` and the same for all inputs, or those of `points`. Draws are made one by
      one; `points` are made all at once, unless they have `scan=True`.
    - `"mean"`: $g(f_m(x))$ at the mean m of q, the delta method; q may be bare parameters.
    - `"linearized"`: $f ∼ N(f_m(x), J S^{-1} J^⊤)$ for a Gaussian q, where J is the Jacobian at m: the predictive
      distribution of the generalised linear model. Its mean through a link is MacKay's approximation,
      $\mathrm{softmax}(f_k/\sqrt{1 + πv_k/8})$ and likewise for the sigmoid; any other link is averaged over `samples`
      draws of the outputs, with the same noise for every input.

    Args:
        q: The posterior; with method "mean" also bare parameters.
        apply: apply(params, x), the model's output for one example. A program is compiled for each `apply`, `link` and
            shapes of the arrays: define these functions once, outside of loops.
        x: The inputs, a pytree of arrays with one row per example.
        key: A JAX key, for draws of θ.
        samples: The number of draws.
        method: "samples", "mean" or "linearized".
        link: None, "softmax" (over the last axis), "sigmoid", or a function of one example's output.
        points: Points to average over in place of independent draws, such as `blr.Quadrature(5)` or `blr.Masks(32)`.
        batch_size: The number of rows that go through the model at a time. It bounds the memory and changes no number.
        variance: Whether to return the variance too.
        frozen: Parameters that are not learned, from `freeze`, with which `apply` is called too.

    Returns:
        The mean of the linked output for each row. With `variance=True` the pair (mean, variance), where the variance
        is $\sum_s w_s (g_s − \bar g)^2$ over the draws (not divided by S − 1), or the diagonal of $J S^{-1} J^⊤$. It is
        the uncertainty about the model, without the noise of an observation.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> q = blr.DiagonalGaussian(jnp.array([1.0, 2.0]), jnp.array([4.0, 10.0]))
    >>> x = jnp.array([[1.0, 0.0], [2.0, 1.0]])
    >>> mean, variance = predict(q, jnp.dot, x, method="linearized", variance=True)
    >>> mean.tolist(), variance.tolist()                                        # xᵀm and xᵀS⁻¹x
    ([1.0, 4.0], [0.25, 1.1])
    >>> predict(q, jnp.dot, x, points=blr.Quadrature(3), link=jnp.square).tolist()      # E_q (xᵀθ)²
    [1.25, 17.1]
    """
    _check(q, apply, link, key, samples, method, points, batch_size, variance)
    _count_rows(x)
    if not isinstance(q, Family):
        _check_arrays(q)
    plan = _Plan(apply, link, method, samples, batch_size, variance)
    mean, output_variance = _predict(q, x, key, points, as_frozen(frozen), plan)
    return (mean, output_variance) if variance else mean


class _Plan(NamedTuple):
    """What the compiled program of a prediction depends on, besides the shapes of its arrays; see `predict`."""

    apply: Callable[..., Any]
    link: Link
    method: str
    samples: int
    batch_size: int | None
    variance: bool


@compiled(static="plan")
def _predict(
    q: PyTree, x: PyTree, key: Key | None, points: Points | None, frozen: Frozen | None, plan: _Plan
) -> tuple[Array, Array | None]:
    """The mean and the variance of the linked outputs; no variance for the method "mean"."""
    if frozen is not None:
        apply = plan.apply
        plan = plan._replace(apply=lambda theta, example: apply(frozen.joined(theta), example))
    if plan.method == "linearized":
        return _predict_linearized(q, x, key, plan)
    link = _link_function(plan.link)

    def linked_output(theta: PyTree, example: PyTree) -> Array:
        return link(jnp.asarray(plan.apply(theta, example)))

    if plan.method == "mean":
        theta = cast(Any, q).mean if isinstance(q, Family) else q
        output = _output_shape(plan.apply, theta, x, plan.link)
        chunk_rows = _chunk_rows(x, output, plan.batch_size)
        return _map_rows(lambda example: linked_output(theta, example), x, chunk_rows), None

    turns, points_of_turn = _turns(q, key, points, plan.samples)
    theta = jax.eval_shape(lambda turns: _first(points_of_turn(_first(turns)).theta), turns)
    chunk_rows = _chunk_rows(x, _output_shape(plan.apply, theta, x, plan.link), plan.batch_size)

    def outputs(theta: PyTree) -> Array:
        return _map_rows(lambda example: linked_output(theta, example), x, chunk_rows)

    return _mean_and_variance(outputs, turns, points_of_turn, jax.eval_shape(outputs, theta))


def _turns(q: Family, key: Key | None, points: Points | None, samples: int) -> tuple[PyTree, Callable[[Any], PointSet]]:
    """What to scan over, and a function from one item of it to points: one draw of θ, or a part of `points`."""
    if points is None:
        keys = jax.random.split(cast(Any, key), samples)
        weight = jnp.full(1, 1 / samples)
        return keys, lambda key: PointSet(jax.tree.map(lambda t: t[None], q.sample(key)), weight)
    if points.parts > 1:

        def part(key: Key) -> PointSet:
            point_set = points.part(q, key)
            return PointSet(point_set.theta, point_set.weights / points.parts)

        return jax.random.split(cast(Any, key), points.parts), part
    point_set = points.at(q, key)
    one_by_one = jax.tree.map(lambda t: t[:, None], (point_set.theta, point_set.weights))
    return one_by_one, lambda turn: PointSet(*turn)


def _mean_and_variance(
    outputs: Callable[[PyTree], Array], turns: PyTree, points_of_turn: Callable[[Any], PointSet], like: Any
) -> tuple[Array, Array]:
    """The weighted mean and variance of the outputs, one point at a time (West's updates)."""

    def add(carry: tuple[Array, Array, Array], point: tuple[PyTree, Array]) -> tuple[Any, None]:
        total, mean, squares = carry
        value, weight = outputs(point[0]).astype(mean.dtype), point[1].astype(mean.dtype)
        total = total + weight
        # A point of weight 0 changes nothing, even if it comes first or its output is NaN.
        change = jnp.where(weight == 0, 0.0, value - mean)
        mean = mean + weight / jnp.where(total == 0, 1.0, total) * change
        squares = squares + jnp.where(weight == 0, 0.0, weight * change * (value - mean))
        return (total, mean, squares), None

    def take_turn(carry: tuple[Array, Array, Array], turn: Any) -> tuple[Any, None]:
        point_set = points_of_turn(turn)
        return jax.lax.scan(add, carry, (point_set.theta, point_set.weights))

    dtype = wide(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else jnp.zeros(()).dtype
    zero = jnp.zeros(like.shape, dtype)
    (total, mean, squares), _ = jax.lax.scan(take_turn, (jnp.zeros((), dtype), zero, zero), turns)
    return mean, squares / total


def _predict_linearized(q: GaussianFamily, x: PyTree, key: Key | None, plan: _Plan) -> tuple[Array, Array]:
    """f ~ N(f_m(x), J S⁻¹ Jᵀ), through the link."""

    def flat_output(theta: PyTree, example: PyTree) -> Array:
        return jnp.ravel(jnp.asarray(plan.apply(theta, example)))

    output = _output_shape(plan.apply, q.mean, x, plan.link)
    jacobian_entries = output.size * sum(leaf.size for leaf in jax.tree.leaves(q.mean))
    max_rows = max(1, _MAX_JACOBIAN_ENTRIES // max(1, jacobian_entries))
    chunk_rows = _chunk_rows(x, output, plan.batch_size, max_rows)
    needs_draws = plan.link is not None and (callable(plan.link) or plan.variance)
    # The noise is the same for every input, so that the division into chunks does not matter.
    noise = jax.random.normal(cast(Any, key), (plan.samples, output.size), output.dtype) if needs_draws else None

    def chunk(examples: PyTree) -> tuple[Array, Array]:
        center = jax.vmap(flat_output, (None, 0))(q.mean, examples)
        jacobian = jax.vmap(jax.jacrev(flat_output), (None, 0))(q.mean, examples)
        covariance = q.output_covariance(jacobian)
        return jax.vmap(lambda f, c: _linked_moments(f, c, output.shape, noise, plan.link))(center, covariance)

    return _map_chunks(chunk, x, chunk_rows)


def _linked_moments(
    center: Float[Array, " K"],
    covariance: Float[Array, "K K"],
    shape: tuple[int, ...],
    noise: Float[Array, "S K"] | None,
    link: Link,
) -> tuple[Array, Array]:
    """The mean and variance of link(f) for one example's f ~ N(center, covariance)."""
    f, v = center.reshape(shape), jnp.diagonal(covariance).reshape(shape)
    if link is None:
        return f, v
    function = _link_function(link)
    if noise is None:
        mean = function(f / jnp.sqrt(1 + math.pi / 8 * v))
        return mean, jnp.zeros_like(mean)  # `predict` does not return this variance
    values = jax.vmap(lambda draw: function(draw.reshape(shape)))(center + noise @ symmetric_root(covariance))
    mean = jnp.mean(values, axis=0) if callable(link) else function(f / jnp.sqrt(1 + math.pi / 8 * v))
    return mean, jnp.var(values, axis=0)


def _link_function(link: Link) -> Callable[[Array], Array]:
    named: dict[Any, Any] = {None: lambda f: f, "softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
    return named.get(link, link)


# Rows and chunks.


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _count_rows(x: PyTree) -> int:
    """The number of rows of all arrays of x; an error where they differ or there are none."""
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


def _chunk_rows(x: PyTree, output: Any, batch_size: int | None, max_rows: int = _MAX_CHUNK_ROWS) -> int:
    """The number of rows of a chunk."""
    rows = _count_rows(x)
    if batch_size is None:
        row_entries = output.size + sum(leaf.size for leaf in jax.tree.leaves(x)) // rows
        batch_size = min(max_rows, _MAX_CHUNK_ROWS, max(1, _MAX_CHUNK_ENTRIES // max(1, row_entries)))
    return min(rows, batch_size)


def _map_rows(function: Callable[[PyTree], Array], x: PyTree, chunk_rows: int) -> Array:
    """function(example) for each row, `chunk_rows` rows at a time."""
    return _map_chunks(jax.vmap(function), x, chunk_rows)


def _map_chunks(function: Callable[[PyTree], Any], x: PyTree, chunk_rows: int) -> Any:
    """function(rows) for `chunk_rows` rows at a time; the last chunk is padded with copies of the last row."""
    rows = _count_rows(x)
    count = -(-rows // chunk_rows)
    if count == 1:
        return function(x)

    def split(leaf: Array) -> Array:
        padding = jnp.broadcast_to(leaf[-1:], (count * chunk_rows - rows, *leaf.shape[1:]))
        return jnp.concatenate([leaf, padding]).reshape((count, chunk_rows, *leaf.shape[1:]))

    chunks = jax.lax.map(function, jax.tree.map(split, x))
    return jax.tree.map(lambda leaf: leaf.reshape((count * chunk_rows, *leaf.shape[2:]))[:rows], chunks)


# Checks of the arguments.


def _check(
    q: PyTree,
    apply: Any,
    link: Any,
    key: Key | None,
    samples: Any,
    method: str,
    points: Any,
    batch_size: Any,
    variance: bool,
) -> None:
    """Raise a ValueError where the arguments of `predict` make no sense together."""
    if method not in _METHODS:
        raise ValueError(f"predict knows the methods {', '.join(map(repr, _METHODS))}; got {method!r}.")
    for name, function in (("apply", apply), ("link", link)):
        if name == "apply" and not callable(function):
            raise ValueError(f"predict(q, apply, x) takes a function apply(params, x), got {type(function).__name__}.")
        try:
            hash(function)
        except TypeError:
            raise ValueError(
                f"A program is compiled for each {name}, so it must be hashable, and this {type(function).__name__} is "
                "not (does it hold arrays?). Wrap it in a function: def apply(params, x): …"
            ) from None
    if not (link is None or link in ("softmax", "sigmoid") or callable(link)):
        raise ValueError(f'link is None, "softmax", "sigmoid" or a function of one example\'s output, got {link!r}.')
    for name, number in (("samples", samples), ("batch_size", 1 if batch_size is None else batch_size)):
        positive_int(name, number)
    if points is not None and not isinstance(points, Points):
        raise ValueError(f"points is one of blr.MonteCarlo, blr.Quadrature, …, got {type(points).__name__}.")
    if points is not None and method != "samples":
        raise ValueError(f'points= says where to average over θ, so it belongs to method="samples", not {method!r}.')
    if not isinstance(q, Family) and isinstance(getattr(q, "q", None), Family):
        raise ValueError(f"predict takes the posterior itself: pass .q of this {type(q).__name__}.")
    {"samples": _check_samples, "mean": _check_mean, "linearized": _check_linearized}[method](
        q, key, points, link, variance
    )


def _check_samples(q: PyTree, key: Key | None, points: Points | None, link: Link, variance: bool) -> None:
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


def _check_mean(q: PyTree, key: Key | None, points: Points | None, link: Link, variance: bool) -> None:
    if variance:
        raise ValueError(
            'method="mean" evaluates one θ, which has no variance: use method="samples", or "linearized" for a '
            "Gaussian q."
        )
    if isinstance(q, Family) and not hasattr(q, "mean"):
        raise ValueError(f'{type(q).__name__} has no mean in the shape of θ: use method="samples".')


def _check_linearized(q: PyTree, key: Key | None, points: Points | None, link: Link, variance: bool) -> None:
    if not isinstance(q, GaussianFamily):
        raise ValueError(
            f'method="linearized" propagates a Gaussian\'s covariance, and {type(q).__name__} is not a Gaussian: use '
            'method="samples" (or blr.laplace() for a Gaussian posterior).'
        )
    if q.batch_shape:
        raise ValueError(f"q is a batch of Gaussians, of shape {q.batch_shape}: jax.vmap predict over them.")
    if key is None and link is not None and (callable(link) or variance):
        quantity = "The variance of a linked output" if variance else "The mean of this link under a Gaussian"
        raise ValueError(f"{quantity} has no closed form and is estimated by draws: pass key=jax.random.key(…).")


def _check_arrays(params: PyTree) -> None:
    """Raise where bare parameters hold something else than arrays, such as a module's functions."""
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


def _output_shape(apply: Callable[..., Any], theta: PyTree, x: PyTree, link: Link) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one example's output."""
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
    try:
        output: Any = jax.eval_shape(apply, theta, example)
    except Exception as error:
        shapes = [leaf.shape for leaf in jax.tree.leaves(example)]
        error.add_note(f"predict calls apply(params, x) for one example at a time; its x had the shapes {shapes}.")
        raise
    if not hasattr(output, "shape"):
        raise ValueError(f"apply(params, x) returns one array for an example, got {jax.tree.structure(output)}.")
    if link == "softmax" and (output.shape == () or output.shape[-1] == 1):
        raise ValueError(
            f'link="softmax" needs a score for each class, and apply returns an array of shape {output.shape}: with '
            'one score for two classes use link="sigmoid".'
        )
    return output
