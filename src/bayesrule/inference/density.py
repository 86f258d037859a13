"""The density to infer, on the unconstrained space, and the programs that evaluate it at many points.

A model is compiled twice: once with its gradient and Hessian (`expand`), which serves the search for modes and the
variational steps alike, and once alone (`log_densities`), for importance weights. What happens between two evaluations
is the rule's own arithmetic, which does not know the model. So the time to a first answer is the time to compile one
Hessian, and a model with other data of the same shapes compiles nothing: data are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..numerics.programs import compiled
from ..numerics.random import Key
from ..numerics.trees import ravel, unravel
from ..objectives.plain import Plain
from .sparsity import Coloring, color

ROWS = 32
"""At how many points one call differentiates the density, where each of them is cheap."""

_IN_FLIGHT = 2**23
"""How many numbers the tangents of one call may take along with the data: about 64 MB in each intermediate result."""

_PRIOR_ROWS = 64  # How many draws from the prior one call makes.
_VALUES = 128  # At how many points one call evaluates the density alone, at most: a line search has few of them.


@dataclasses.dataclass(frozen=True)
class Negative:
    """−log p as a function of θ and the density's arguments: equal, and hence compiled once, where log p is."""

    function: Callable[..., Any]

    def __call__(self, theta: PyTree, *arguments: PyTree) -> Any:
        return -jnp.asarray(self.function(theta, *arguments))


class Density(eqx.Module):
    """log p(θ), up to a constant, of an unconstrained θ, and what turns θ into the values that users know.

    Args:
        function: `function(θ, *arguments)`, the log density, with the Jacobian of the constraints in it.
        arguments: Pytrees of arrays, the data; they may change without compiling again.
        like: A θ of zeros: the structure, the shapes and the dtype.
        constrain: `constrain(θ, *arguments)`, the values in the users' space, a pytree of arrays.
        starts: `starts(key, *arguments)`, one θ to start from, drawn from the prior; None where there is none.
        coloring: How few products determine the Hessian, where many of its entries are zero; None to compute it whole.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    arguments: tuple[PyTree, ...]
    like: PyTree
    constrain: Callable[..., PyTree] = eqx.field(static=True)
    starts: Callable[..., PyTree] | None = eqx.field(static=True, default=None)
    coloring: Coloring | None = eqx.field(static=True, default=None)

    @property
    def size(self) -> int:
        """P, how many numbers θ has."""
        return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.like))

    @property
    def dtype(self) -> Any:
        """The dtype in which θ is computed."""
        # NumPy's rule is as good for floating-point numbers, and this is asked before every evaluation.
        return np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(self.like)))

    @property
    def objective(self) -> Plain:
        """−log p as the objective of any rule: `blr.fit(posterior.rule, posterior.density.objective, q, …)`."""
        return Plain(function=Negative(self.function), arguments=self.arguments)

    @property
    def width(self) -> int:
        """How many columns of Hessians are computed at once."""
        data = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.arguments))
        return int(np.clip(_IN_FLIGHT // max(1, data, self.size), 1, 512))

    @property
    def value_rows(self) -> int:
        """At how many points one call evaluates the density alone."""
        return min(_VALUES, self.width)

    @property
    def products(self) -> int:
        """How many products with a vector it takes to compute a Hessian."""
        return self.size if self.coloring is None else len(self.coloring.seeds)

    @property
    def rows(self) -> int:
        """At how many points one call differentiates."""
        return int(np.clip(self.width // max(1, self.products), 1, ROWS))

    def with_sparse_hessian(self, points: Float[np.ndarray, "B P"]) -> Density:
        """This density, with the zeros of its Hessians at some points used to compute it by fewer products."""
        hessians = expand(self, points)
        usable = np.isfinite(hessians.value)
        coloring = color(np.any(hessians.hessian[usable] != 0, axis=0)) if np.any(usable) else None
        return dataclasses.replace(self, coloring=coloring)


class Expansion(NamedTuple):
    """−log p to second order at points, or its average over them: in float64, on the host.

    Attributes:
        value: −log p; infinite where it, or a derivative, is not a finite number: there the derivatives are zero.
        gradient: its gradient.
        hessian: its Hessian.
    """

    value: Float[np.ndarray, " *B"]
    gradient: Float[np.ndarray, "*B P"]
    hessian: Float[np.ndarray, "*B P P"]


@compiled(static=("function", "width"))
def _expand(
    function: Callable[..., Any],
    like: PyTree,
    points: Float[Array, "B P"],
    seeds: Any,
    arguments: tuple,
    *,
    width: int,
) -> tuple[Array, Array, Array]:
    """−log p, its gradient and the products of its Hessian with the seeds, at every point."""
    negative = lambda x: -jnp.asarray(function(unravel(x, like), *arguments)).reshape(())

    def at(x: Array) -> tuple[Array, Array, Array]:
        def slope(x: Array) -> tuple[Array, tuple[Array, Array]]:
            value, gradient = jax.value_and_grad(negative)(x)
            return gradient, (value, gradient)

        # The model is traced once for the value, the gradient and all products with the Hessian.
        _, product, (value, gradient) = jax.linearize(slope, x, has_aux=True)
        few = seeds.shape[0] <= width
        return value, gradient, jax.vmap(product)(seeds) if few else jax.lax.map(product, seeds, batch_size=width)

    return jax.vmap(at)(points) if points.shape[0] > 1 else jax.tree.map(lambda leaf: leaf[None], at(points[0]))


def _chunks(density: Density, points: np.ndarray, rows: int) -> Any:
    """The points in parts of `rows`, the last one filled up, and how many of each part count."""
    for first in range(0, len(points), rows):
        part = points[first : first + rows]
        filled = np.concatenate([part, np.repeat(part[-1:], rows - len(part), axis=0)])
        yield filled.astype(density.dtype), len(part)


def _derivatives(density: Density, points: np.ndarray) -> Any:
    """Values, gradients and products of Hessians with the seeds for each part of the points, and the part."""
    seeds = np.eye(density.size) if density.coloring is None else density.coloring.seeds
    seeds = seeds.astype(density.dtype)
    for part, count in _chunks(density, points, density.rows):
        found = _expand(density.function, density.like, part, seeds, density.arguments, width=density.width)
        value, gradient, products = (np.asarray(leaf, np.float64)[:count] for leaf in found)
        usable = np.isfinite(value) & np.all(np.isfinite(gradient), axis=1) & np.all(np.isfinite(products), axis=(1, 2))
        gradient, products = np.where(usable[:, None], gradient, 0.0), np.where(usable[:, None, None], products, 0.0)
        yield np.where(usable, value, np.inf), gradient, products, part[:count]


def _hessians(density: Density, products: np.ndarray) -> tuple[np.ndarray, bool]:
    """Hessians from their products with the seeds, and whether the zeros that were assumed are zeros."""
    if density.coloring is None:
        return 0.5 * (products + np.swapaxes(products, -1, -2)), True
    return density.coloring.recover(products, 1e-6 if density.dtype == np.float64 else 3e-3)


def expand(density: Density, points: Float[np.ndarray, "B P"]) -> Expansion:
    """−log p and its derivatives at every point."""
    parts = []
    for value, gradient, products, part in _derivatives(density, points):
        hessian, right = _hessians(density, products)
        parts.append(Expansion(value, gradient, hessian) if right else expand(_without_coloring(density), part))
    return Expansion(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))


def average(density: Density, points: Float[np.ndarray, "S P"]) -> Expansion:
    """−log p and its derivatives, averaged over the points; no more than a few of them are held at a time."""
    value, gradient, products = 0.0, np.zeros(density.size), np.zeros((density.products, density.size))
    for values, gradients, part, _ in _derivatives(density, points):
        value, gradient, products = value + np.sum(values), gradient + np.sum(gradients, 0), products + np.sum(part, 0)
    hessian, right = _hessians(density, products / len(points))
    if not right:
        return average(_without_coloring(density), points)
    return Expansion(np.asarray(value / len(points)), gradient / len(points), hessian)


def _without_coloring(density: Density) -> Density:
    """The density with whole Hessians, for points where an entry that was taken for zero is not."""
    return dataclasses.replace(density, coloring=None)


@compiled(static="function")
def _log_densities(function: Callable[..., Any], like: PyTree, points: Float[Array, "B P"], arguments: tuple) -> Array:
    return jax.vmap(lambda x: jnp.asarray(function(unravel(x, like), *arguments)).reshape(()))(points)


def log_densities(density: Density, points: Float[np.ndarray, "B P"]) -> Float[np.ndarray, " B"]:
    """log p at every point; −∞ where it is zero or not a number."""
    found = [
        np.asarray(_log_densities(density.function, density.like, part, density.arguments), np.float64)[:count]
        for part, count in _chunks(density, points, density.value_rows)
    ]
    values = np.concatenate(found)
    return np.where(np.isfinite(values), values, -np.inf)


@compiled(static="function")
def _constrained(function: Callable[..., Any], like: PyTree, points: Float[Array, "B P"], arguments: tuple) -> PyTree:
    return jax.vmap(lambda x: function(unravel(x, like), *arguments))(points)


def constrained(density: Density, points: Float[np.ndarray, "B P"]) -> PyTree:
    """The values in the users' space at every point, along a leading axis."""
    parts = [
        jax.tree.map(
            lambda leaf, count=count: np.asarray(leaf)[:count],
            _constrained(density.constrain, density.like, part, density.arguments),
        )
        for part, count in _chunks(density, points, density.value_rows)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


@compiled(static="function", rare=True)
def _drawn_starts(function: Callable[..., Any], keys: Array, arguments: tuple) -> Array:
    return jax.vmap(lambda key: ravel(function(key, *arguments)))(keys)


def generator_of(key: Key) -> np.random.Generator:
    """NumPy's generator from a JAX key, for what is drawn on the host, where a new shape costs no program.

    Splitting a JAX key compiles a program for every number of parts; a generator's `spawn` does not.
    """
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())


def prior_draws(density: Density, rng: np.random.Generator, count: int) -> Float[np.ndarray, "B P"] | None:
    """So many θ drawn from the prior; None where the density has none."""
    if density.starts is None:
        return None
    parts = []
    for first in range(0, count, _PRIOR_ROWS):
        bits = rng.integers(0, 2**32, (_PRIOR_ROWS, 2), dtype=np.uint32)
        keys = jax.random.wrap_key_data(jnp.asarray(bits), impl="threefry2x32")
        drawn = np.asarray(_drawn_starts(density.starts, keys, density.arguments), np.float64)
        parts.append(drawn[: count - first])
    return np.concatenate(parts)
