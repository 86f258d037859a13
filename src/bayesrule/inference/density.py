"""The density to infer, on the unconstrained space, and the programs that evaluate it at many points.

A model is traced once and compiled twice: with its gradient and Hessian (`expand`, `average`), which serves the search
for modes and the variational steps alike, and alone (`log_densities`), for importance weights. Both programs go through
as many points as they are told, block by block, so that one of each serves eight starts as well as thousands of draws
in one call. What happens between two evaluations is the rule's own arithmetic, which does not know the model. So the
time to a first answer is the time to compile one Hessian, and a model with other data of the same shapes compiles
nothing: data are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel, unravel
from ..objectives.plain import Plain
from .climbing import LANES, Climbers, begin, climb_on
from .sparsity import Coloring, color

_IN_FLIGHT = 2**23
"""How many numbers the tangents of one call may take along with the data: about 64 MB in each intermediate result."""

_PRIOR_ROWS = 64  # How many draws from the prior one call makes.
_VALUES = 128  # At how many points the density is evaluated at once, at most.
_IN_CACHE = 2**17  # How many numbers of a block's intermediate results stay close to the processor.
_LEAST_BLOCK, _LARGEST_BLOCK = 8, 64  # points that are differentiated at once: eight starts are one block
_MOST_CLIMBING = 32  # With so few numbers a Hessian is computed before it is known that the step is taken.
_MOST_POINTS, _MOST_NUMBERS = 1024, 2**16  # points, and numbers in them, that one call goes through


@dataclasses.dataclass(frozen=True)
class Negative:
    """−log p as a function of θ and the density's arguments: equal, and hence compiled once, where log p is."""

    function: Callable[..., Any]

    def __call__(self, theta: PyTree, *arguments: PyTree) -> Any:
        return -jnp.asarray(self.function(theta, *arguments))


@dataclasses.dataclass(frozen=True, eq=False)
class Density:
    """log p(θ), up to a constant, of an unconstrained θ, and what turns θ into the values that users know.

    Args:
        function: `function(θ, *arguments)`, the log density, with the Jacobian of the constraints in it.
        arguments: Pytrees of arrays, the data; they may change without compiling again.
        like: A θ of zeros: the structure, the shapes and the dtype.
        constrain: `constrain(θ, *arguments)`, the values in the users' space, a pytree of arrays.
        starts: `starts(key, *arguments)`, one θ to start from, drawn from the prior; None where there is none.
        coloring: How few products determine the Hessian, where many of its entries are zero; None to compute it whole.
    """

    function: Callable[..., Any]
    arguments: tuple[PyTree, ...]
    like: PyTree
    constrain: Callable[..., PyTree]
    starts: Callable[..., PyTree] | None = None
    coloring: Coloring | None = None

    @cached_property
    def size(self) -> int:
        """P, how many numbers θ has."""
        return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.like))

    @cached_property
    def dtype(self) -> Any:
        """The dtype in which θ is computed."""
        return np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(self.like)))

    @property
    def objective(self) -> Plain:
        """−log p as the objective of any rule: `blr.fit(posterior.rule, posterior.density.objective, q, …)`."""
        return Plain(function=Negative(self.function), arguments=self.arguments)

    @cached_property
    def cost(self) -> int:
        """How many numbers one evaluation goes through: those of the data, or of θ."""
        return max(1, self.size, sum(int(np.size(leaf)) for leaf in jax.tree.leaves(self.arguments)))

    @cached_property
    def width(self) -> int:
        """How many columns of Hessians are computed at once."""
        return int(np.clip(_IN_FLIGHT // self.cost, 1, 512))

    @cached_property
    def value_rows(self) -> int:
        """At how many points the density alone is evaluated at once, where many of them are."""
        return min(_VALUES, self.width)

    @cached_property
    def value_block(self) -> int:
        """At how many points the density alone is evaluated at once, where they may be few: as in a line search."""
        return min(self.value_rows, int(np.clip(_power_of_two(2 * _IN_CACHE // self.cost), _LEAST_BLOCK, _VALUES)))

    @cached_property
    def products(self) -> int:
        """How many products with a vector it takes to compute a Hessian."""
        return self.size if self.coloring is None else len(self.coloring.seeds)

    @cached_property
    def rows(self) -> int:
        """At how many points the density is differentiated at once."""
        products = max(1, self.products)
        near = _power_of_two(_IN_CACHE // (products * self.cost))
        return min(max(1, self.width // products), int(np.clip(near, _LEAST_BLOCK, _LARGEST_BLOCK)))

    @cached_property
    def climbs(self) -> bool:
        """Whether the program that differentiates also takes Newton's steps: where a Hessian costs little."""
        return self.coloring is None and self.size <= _MOST_CLIMBING and self.rows >= LANES

    def capacity(self, block: int) -> int:
        """How many points a program goes through in one call, at most: a number of whole blocks."""
        return block * max(1, min(_MOST_POINTS, _MOST_NUMBERS // max(1, self.size)) // block)

    def tree(self, vector: Float[np.ndarray, " P"]) -> PyTree:
        """A vector as a θ: cut on the host, where that compiles nothing."""
        leaves, structure = jax.tree.flatten(self.like)
        cuts = np.cumsum([int(np.size(leaf)) for leaf in leaves])[:-1]
        parts = zip(np.split(np.asarray(vector), cuts), leaves, strict=True)
        return jax.tree.unflatten(
            structure, [jnp.asarray(np.reshape(part, leaf.shape), leaf.dtype) for part, leaf in parts]
        )

    def with_sparse_hessian(self, points: Float[np.ndarray, "B P"]) -> Density:
        """This density, with the zeros of its Hessians at some points used to compute it by fewer products."""
        hessians = expand(self, points)
        usable = np.isfinite(hessians.value)
        coloring = color(np.any(hessians.hessian[usable] != 0, axis=0)) if np.any(usable) else None
        return dataclasses.replace(self, coloring=coloring)


def ravelled(tree: PyTree) -> Float[np.ndarray, " P"]:
    """A pytree such as θ as a vector on the host, in float64."""
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


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


def _power_of_two(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << (max(1, number).bit_length() - 1)


@lru_cache(maxsize=64)
def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The density as a function that JAX traces once for all programs that it is a part of.

    Tracing a model, with the distributions of NumPyro for instance, takes as long as compiling it.
    """
    return jax.jit(function, inline=True)


@compiled(static=("function", "width", "rows", "climbs"))
def _expand(
    function: Callable[..., Any],
    like: PyTree,
    points: Float[Array, "N P"],
    count: Any,
    rounds: Any,
    seeds: Any,
    arguments: tuple[Any, ...],
    *,
    width: int,
    rows: int,
    climbs: bool,
) -> tuple[Any, Any, Climbers | None]:
    """−log p, its gradient and its Hessian's products with the seeds: summed over all points, and in the last block.

    Where the program can climb, it goes on for so many rounds, or until all starts have arrived or are lost: the first
    few points are starts then. It is one program, because to compile the Hessian a second time would take as long as
    the rest of a first fit.
    """
    model = traced_once(function)
    negative = lambda x: -jnp.asarray(model(unravel(x, like), *arguments)).reshape(())

    def at(x: Array) -> tuple[Array, Array, Array]:
        def slope(x: Array) -> tuple[Array, tuple[Array, Array]]:
            value, gradient = jax.value_and_grad(negative)(x)
            return gradient, (value, gradient)

        # The model is differentiated once for the value, the gradient and all products with the Hessian.
        _, product, (value, gradient) = jax.linearize(slope, x, has_aux=True)
        few = seeds.shape[0] <= width
        return value, gradient, jax.vmap(product)(seeds) if few else jax.lax.map(product, seeds, batch_size=width)

    def block(points: Array, k: Array, carry: Any) -> Any:
        sums, lost, _ = carry
        part = jax.lax.dynamic_slice_in_dim(points, k * rows, rows)
        found = jax.vmap(at)(part) if rows > 1 else jax.tree.map(lambda leaf: leaf[None], at(part[0]))
        # A sum by a product with ones compiles in less time than one by a reduction.
        counted = (k * rows + jnp.arange(rows) < count).astype(points.dtype)
        own = jax.tree.map(lambda leaf: (counted @ leaf.reshape(rows, -1)).reshape(leaf.shape[1:]), found)
        if points.dtype == np.float64:
            return jax.tree.map(jnp.add, sums, own), lost, found
        # Kahan's sum: the rounding errors of many blocks would otherwise be seen in the bound.
        own = jax.tree.map(jnp.subtract, own, lost)
        new = jax.tree.map(jnp.add, sums, own)
        return new, jax.tree.map(lambda new, old, own: (new - old) - own, new, sums, own), found

    shapes = ((), seeds.shape[1:], seeds.shape)
    zeros = tuple(jnp.zeros(shape, points.dtype) for shape in shapes)
    none = tuple(jnp.zeros((rows, *shape), points.dtype) for shape in shapes)

    def evaluate(points: Array) -> tuple[Any, Any]:
        sums, _, last = jax.lax.fori_loop(0, (count + rows - 1) // rows, partial(block, points), (zeros, zeros, none))
        return sums, last

    if not climbs:
        return *evaluate(points), None

    def one_round(carry: Any) -> Any:
        k, points, climbers, _, _ = carry
        sums, last = evaluate(points)
        on = lambda: climb_on(climbers, points[:LANES], *(leaf[:LANES] for leaf in last))
        climbers, tried = jax.lax.cond(rounds > 1, on, lambda: (climbers, points[:LANES]))
        return k + 1, jax.lax.dynamic_update_slice_in_dim(points, tried, 0, 0), climbers, sums, last

    go_on = lambda carry: (carry[0] < rounds) & ((carry[0] == 0) | jnp.any(carry[2].active))
    start = (jnp.zeros_like(rounds), points, begin(points[:LANES], count), zeros, none)
    _, _, climbers, sums, last = jax.lax.while_loop(go_on, one_round, start)
    return sums, last, climbers


def _filled(density: Density, points: np.ndarray, rows: int) -> np.ndarray:
    """The points, and the last one again until there are so many."""
    filled = np.empty((rows, density.size), density.dtype)
    filled[: len(points)], filled[len(points) :] = points, points[-1]
    return filled


def _expand_at(density: Density, part: np.ndarray, rounds: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `_expand` for so many points as one call goes through, or fewer."""
    seeds = np.eye(density.size) if density.coloring is None else density.coloring.seeds
    filled = _filled(density, part, density.capacity(density.rows))
    fixed = (seeds.astype(density.dtype), density.arguments)
    how = {"width": density.width, "rows": density.rows, "climbs": density.climbs}
    return (density.function, density.like, filled, np.int32(len(part)), np.int32(rounds), *fixed), how


def _derivatives(density: Density, points: np.ndarray, most: int) -> Any:
    """For each part of at most so many points: sums, what the last block has, and the part."""
    most = min(most, density.capacity(density.rows))
    for first in range(0, len(points), most):
        part = points[first : first + most]
        args, how = _expand_at(density, part)
        sums, last, _ = _expand(*args, **how)
        yield sums, last, part


def climb_side_by_side(density: Density, starts: Float[np.ndarray, "K P"], rounds: int) -> Any:
    """Up to `LANES` starts after so many rounds of Newton's method, or fewer if these suffice.

    Returns:
        `Climbers`, of arrays on the host, in float64.
    """
    args, how = _expand_at(density, starts, max(2, rounds))
    climbers = _expand(*args, **how)[2]
    assert climbers is not None
    wide = lambda leaf: np.asarray(leaf, np.float64) if leaf.dtype.kind == "f" else np.asarray(leaf)
    return jax.tree.map(lambda leaf: wide(np.asarray(leaf))[: len(starts)], climbers)


def compile_ahead(density: Density) -> Callable[[], None] | None:
    """Compile the density's Hessian in the background, if it is not yet; see `Compiled.compile_ahead`."""
    args, how = _expand_at(density, np.zeros((1, density.size)))
    return _expand.compile_ahead(*args, **how)


def _hessians(density: Density, products: np.ndarray) -> tuple[np.ndarray, bool]:
    """Hessians from their products with the seeds, and whether the zeros that were assumed are zeros."""
    if density.coloring is None:
        return 0.5 * (products + np.swapaxes(products, -1, -2)), True
    return density.coloring.recover(products, 1e-6 if density.dtype == np.float64 else 3e-3)


def expand(density: Density, points: Float[np.ndarray, "B P"]) -> Expansion:
    """−log p and its derivatives at every point."""
    parts = []
    for _, last, part in _derivatives(density, points, density.rows):
        value, gradient, products = (np.asarray(leaf, np.float64)[: len(part)] for leaf in last)
        usable = np.isfinite(value) & np.all(np.isfinite(gradient), axis=1) & np.all(np.isfinite(products), axis=(1, 2))
        if not np.all(usable):
            value, gradient = np.where(usable, value, np.inf), np.where(usable[:, None], gradient, 0.0)
            products = np.where(usable[:, None, None], products, 0.0)
        hessian, right = _hessians(density, products)
        parts.append(Expansion(value, gradient, hessian) if right else expand(_without_coloring(density), part))
    return parts[0] if len(parts) == 1 else Expansion(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def average(density: Density, points: Float[np.ndarray, "S P"]) -> Expansion:
    """−log p and its derivatives, averaged over the points; no more than a few of them are held at a time."""
    sums = 0.0, np.zeros(density.size), np.zeros((density.products, density.size))
    for found, _, _ in _derivatives(density, points, len(points)):
        sums = tuple(total + np.asarray(own, np.float64) for total, own in zip(sums, found, strict=True))
    value, gradient, products = (np.asarray(total / len(points)) for total in sums)
    if not all(np.all(np.isfinite(total)) for total in (value, gradient, products)):
        size = density.size
        return Expansion(np.asarray(np.inf), np.zeros(size), np.zeros((size, size)))
    hessian, right = _hessians(density, products)
    return Expansion(value, gradient, hessian) if right else average(_without_coloring(density), points)


def _without_coloring(density: Density) -> Density:
    """The density with whole Hessians, for points where an entry that was taken for zero is not."""
    return dataclasses.replace(density, coloring=None)


@compiled(static=("function", "rows"))
def _log_densities(
    function: Callable[..., Any], like: PyTree, points: Any, count: Any, arguments: tuple[Any, ...], *, rows: int
) -> Array:
    model = traced_once(function)
    at = lambda x: jnp.asarray(model(unravel(x, like), *arguments)).reshape(())

    def block(k: Array, values: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(points, k * rows, rows)
        return jax.lax.dynamic_update_slice_in_dim(values, jax.vmap(at)(part).astype(values.dtype), k * rows, 0)

    return jax.lax.fori_loop(0, (count + rows - 1) // rows, block, jnp.zeros(points.shape[0], points.dtype))


def log_densities(density: Density, points: Float[np.ndarray, "B P"]) -> Float[np.ndarray, " B"]:
    """log p at every point; −∞ where it is zero or not a number."""
    rows = density.value_block
    capacity = density.capacity(rows)
    parts = [points[first : first + capacity] for first in range(0, len(points), capacity)]
    fixed = density.function, density.like
    # Nothing waits for a part before all are under way.
    found = [
        _log_densities(*fixed, _filled(density, part, capacity), np.int32(len(part)), density.arguments, rows=rows)
        for part in parts
    ]
    values = np.concatenate(
        [np.asarray(leaf, np.float64)[: len(part)] for leaf, part in zip(found, parts, strict=True)]
    )
    return np.where(np.isfinite(values), values, -np.inf)


@compiled(static="function")
def _constrained(function: Callable[..., Any], like: PyTree, points: Any, arguments: tuple[Any, ...]) -> PyTree:
    return jax.vmap(lambda x: function(unravel(x, like), *arguments))(points)


def constrained(density: Density, points: Float[np.ndarray, "B P"]) -> PyTree:
    """The values in the users' space at every point, along a leading axis."""
    # Where a value has no more numbers than θ, many draws of it are few numbers.
    light = getattr(density.constrain, "is_light", False)
    rows = density.capacity(density.value_block) if light else density.value_rows
    starts = range(0, len(points), rows)
    parts = [
        _constrained(
            density.constrain, density.like, _filled(density, points[first : first + rows], rows), density.arguments
        )
        for first in starts
    ]
    parts = [
        jax.tree.map(lambda leaf, first=first: np.asarray(leaf)[: len(points) - first], part)
        for part, first in zip(parts, starts, strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


@compiled(static="function", rare=True)
def _drawn_starts(function: Callable[..., Any], bits: Any, arguments: tuple[Any, ...]) -> Array:
    keys = jax.random.wrap_key_data(bits, impl="threefry2x32")
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
    bits = [rng.integers(0, 2**32, (_PRIOR_ROWS, 2), dtype=np.uint32) for _ in range(0, count, _PRIOR_ROWS)]
    # Nothing waits for a part before all are under way.
    parts = [_drawn_starts(density.starts, own, density.arguments) for own in bits]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])[:count]
