"""Sums over the examples of their own gradients, squared or factored, for little more than the sum's gradient.

The loss of one example is traced to a list of equations, and the equations in which each leaf of θ enters are
looked up (`per_example_program.py`). A leaf that enters matrix products, convolutions or lookups needs only these
operations' other operands and the slopes of their outputs, from the one backward pass that the gradient takes too:
never the B×P numbers of every example's gradient at once (`per_example_ops.py`). A bias or a scale has no more entries
than an activation, so its gradient for each example is taken as it is. A leaf that is mixed with others before it meets
the example has the gradients of what it is mixed into pulled back to it, a few examples at a time. Any other leaf (in a
branch, under a custom derivative, changed by a loop, …) is differentiated for each example, a few at a time if large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..numerics.pytree import PyTree
from . import per_example_ops as ops
from . import per_example_separable as separable
from .per_example_program import Path, Program

Columns = Callable[[Array, PyTree], Array]

COSTS = {
    "product": "One more matrix product of the gradient's size. Over more than four positions (sequences, loops) each "
    "example's gradient is formed, a few examples at a time in about 2 MB: the multiplications of the gradient, and "
    "B×P numbers squared.",
    "convolution": "As a product over as many positions as the output has, with the kernel's windows copied for a few "
    "examples at a time.",
    "lookup": "One more scatter of the looked-up rows; those that one example looked up several times are added first.",
    "bias": "Nothing: its gradient for every example is an activation's, summed over positions.",
    "scale": "Nothing: its gradient for every example is an activation's, summed over positions.",
    "shared": "Used n times at one position each, n(n+1)/2 more matrix products for n up to 4; else each example's "
    "gradient is formed, a few examples at a time: B×P numbers added and squared. Lookups alone cost what one does.",
    "several": "The sum of what its parts cost, each of which is used in a way of its own.",
    "rescaled": "k(k+1)/2 more matrix products, where each example's gradient is a sum of k outer products: k is 2 for "
    "weight normalisation and 1 for a product of two leaves. The weight is that of a dense layer at one position.",
    "mixed": "B×P numbers formed, pulled back and squared, a few examples at a time in about 2 MB or, if one gradient "
    "is larger, one by one: tens of times a dense layer's plain gradient, without another pass.",
    "examples": "B×P numbers formed by differentiating each example: in the same pass up to two million of them, "
    "otherwise in a second forward and backward pass over a few examples at a time. Ten to some hundred times the "
    "plain gradient for large leaves.",
    "unused": "Nothing.",
}
"""What the squares of a leaf cost beside the plain gradient, for each of the `ways`; B examples, P entries."""


class Moments(eqx.Module):
    """The losses ℓ_b, Σ_b w_b ∇ℓ_b, Σ_b w_b (∇ℓ_b)², and the way in which each leaf's squares were made."""

    values: Float[Array, " B"]
    gradient: PyTree
    squares: PyTree
    way_of_leaf: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def ways(self) -> dict[str, str]:
        """How each leaf enters, by its path, as `ways` says."""
        return dict(self.way_of_leaf)


class Kronecker(eqx.Module):
    """One leaf's block of Σ_b w_b ∇ℓ_b ∇ℓ_bᵀ as A ⊗ G, with the leaf laid out as a matrix of I×O entries."""

    inputs: Float[Array, "I I"]
    outputs: Float[Array, "O O"]
    layout: ops.Layout = eqx.field(static=True)

    def matrix(self, leaf: Array) -> Float[Array, "I O"]:
        """The leaf's entries in the order of the factors."""
        return self.layout.arranged(leaf)

    def leaf(self, matrix: Float[Array, "I O"]) -> Array:
        """The inverse of `matrix`."""
        return self.layout.restored(matrix)


class Factors(NamedTuple):
    """The losses ℓ_b, Σ_b w_b ∇ℓ_b, and a `Kronecker` in the place of each leaf of θ."""

    values: Float[Array, " B"]
    gradient: PyTree
    factors: PyTree


def second_moments(
    function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree, weights: Float[Array, " B"]
) -> Moments:
    """The losses, Σ_b w_b ∇ℓ_b and Σ_b w_b (∇ℓ_b)² of ℓ_b = function(θ, example b), a scalar.

    The squares of a dense layer are (A²)ᵀ(w∘D²) beside the gradient Aᵀ(w∘D), with its inputs A and the slopes D
    of its outputs. They have at least single precision, whatever the precision inside the function.

    >>> loss = lambda w, example: 0.5 * (example[0] @ w - example[1]) ** 2
    >>> x, y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([0.0, 1.0])
    >>> moments = second_moments(loss, jnp.array([1.0, 1.0]), (x, y), jnp.ones(2))
    >>> moments.gradient.tolist(), moments.squares.tolist(), moments.ways
    ([21.0, 30.0], [333.0, 612.0], {'': 'product'})
    """
    program = Program(function, theta, examples)
    if program.output.shape != ():
        raise ValueError(
            f"The loss of one example has the shape {program.output.shape}, and squares of gradients are defined for a "
            "number: sum its entries, or use pulled_squares for an output that is an array."
        )
    backward = _Pass(program, examples, _one, ops.LIMIT, program.whole)
    gradient, squares = backward.sums(weights)
    return Moments(backward.outputs, gradient, squares, tuple(program.ways.items()))


def pulled_squares(
    function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree, columns: Columns
) -> tuple[Array, PyTree]:
    """The outputs f_b = function(θ, example b), (B, *O), and Σ_b Σ_r (J_bᵀ c_br)² for each entry of θ.

    `columns(output, example)` gives one example's c_b, (R, *O), from its own output. With the columns of a square
    root of Λ_b, so that Λ_b = Σ_r c_br c_brᵀ, the squares are the diagonal of Σ_b J_bᵀ Λ_b J_b. A weight w_b is
    a factor √w_b of the columns. All the columns share one forward pass.

    >>> outputs, squares = pulled_squares(lambda w, x: w @ x, jnp.eye(2), jnp.ones((3, 2)), lambda f, x: jnp.eye(2))
    >>> squares.tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    program = Program(function, theta, examples)
    backward = _Pass(program, examples, columns, ops.LIMIT, program.whole)
    return backward.outputs, backward.sums(jnp.ones(backward.outputs.shape[:1]))[1]


def kronecker_factors(
    function: Callable[[PyTree, PyTree], Array],
    theta: PyTree,
    examples: PyTree,
    weights: Float[Array, " B"],
    columns: Columns | None = None,
) -> Factors:
    """K-FAC's factors, A ⊗ G ≈ Σ_b w_b ∇ℓ_b ∇ℓ_bᵀ for each leaf, from the pass that gives the gradient.

    With a layer's inputs a_bt and the slopes d_bt of its outputs at the positions t = 1…T of example b,

        A = Σ_b w_b Σ_t a_bt a_btᵀ / Σ_b w_b,    G = Σ_b w_b Σ_t d_bt d_btᵀ / T:

    the inputs are averaged over the examples and summed over the positions, the slopes are summed with their
    weights over the examples and averaged over the positions (Grosse and Martens, 2016). A dense layer of one vector
    per example has T = 1, and that is K-FAC (Martens and Grosse, 2015); for a convolution a_bt is a patch, the
    window's entries and then the channels. A ⊗ G is over the matrix `factor.matrix(leaf)`, I×O, ravelled row by row.
    A bias, a scale, and any other leaf with one axis or none has A = [[1]] and G = Σ_b w_b ∇ℓ_b ∇ℓ_bᵀ, which is exact.

    With `columns` the function's output is an array, G sums over the columns as in `pulled_squares` (which makes
    the generalised Gauss–Newton matrix), and the gradient is that of the columns' sum.
    """
    program = Program(function, theta, examples)
    backward = _Pass(program, examples, columns or _one, math.inf, _check_factors(program))
    return Factors(backward.outputs, *backward.factors(weights))


def ways(function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree) -> dict[str, str]:
    """How each leaf enters, by its path; nothing is computed. `COSTS` has what each way costs.

    "product", "convolution" and "lookup": once, as the weight of one such operation. "bias" and "scale": once, added
    to or times something that depends on the example. "shared": as the weight of several operations. A function of each
    entry by itself (a factor, a mask, an exponential), a slice or a concatenation on the way there changes nothing, and
    slices without a common entry count as leaves of their own; "several" if these are used in different ways.
    "rescaled": a dense layer's weight is made from it by factors, sums and products, as in weight normalisation or a
    product of two leaves. "mixed": another function of leaves alone comes before its use. "examples": in any other
    way, so that it is differentiated for every example. "unused": not at all.
    """
    return Program(function, theta, examples).ways


def _one(value: Array, example: PyTree) -> Array:
    """The one column of a loss."""
    return jnp.ones((1, *value.shape), value.dtype)


class _Pass:
    """One forward and backward pass over all examples, from whose operands, slopes and rows the sums are computed.

    `rows` are the gradients of every example: of sources that are a bias or a scale, and of the leaves that are
    differentiated as they are. Such leaves whose gradients for all examples together would exceed `limit` entries are
    deferred to passes of their own.
    """

    def __init__(
        self, program: Program, examples: PyTree, columns: Columns, limit: float, whole: Iterable[int]
    ) -> None:
        self.program, self.examples, self.columns = program, examples, columns
        count = jax.tree.leaves(examples)[0].shape[0]
        self.count = jax.eval_shape(columns, program.output, program.example).shape[0]
        self.made = program.make(dict(enumerate(program.leaves)), {})
        size = lambda leaf: program.leaves[leaf].size
        at_once, self.deferred, entries = [], [], 0
        for leaf in sorted(whole, key=size):
            entries += count * self.count * size(leaf)
            (at_once if entries <= limit else self.deferred).append(leaf)
        self.whole = {*at_once, *self.deferred}
        used = {place for leaf, reached in enumerate(program.reach) if leaf not in self.whole for place in reached}
        self.sources = {place: program.sources[place] for place in program.sources if place in used}
        sites = [site for source in self.sources.values() for site in source.sites]
        self.others = {site.path: site.operation.others for site in sites}
        shifted = [place for place, source in self.sources.items() if not source.sites]

        def one(example: PyTree) -> tuple[Array, Any, Any]:
            nudges = {site.path: jnp.zeros(site.slope.shape, site.slope.dtype) for site in sites}
            return self._pull_back(at_once, shifted, nudges, example)

        self.outputs, (self.slopes, self.shifts, self.rows), self.operands = jax.vmap(one)(examples)

    def _pull_back(
        self, leaves: list[int], sources: list[int], nudges: dict[Path, Array], example: PyTree
    ) -> tuple[Array, Any, Any]:
        """One example's output, its columns pulled back to the nudges, sources and leaves, (R, …), and operands."""
        program = self.program

        def run(nudges: Any, shifts: Any, own: dict[int, Array]) -> tuple[Array, Any]:
            made = self.made | program.make(own, self.made, program.made) if own else self.made
            return program.run(made, shifts, nudges, self.others, example)

        own = {leaf: program.leaves[leaf] for leaf in leaves}
        shifts = {place: jnp.zeros_like(self.made[place]) for place in sources}
        output, pull, operands = jax.vjp(run, nudges, shifts, own, has_aux=True)
        columns = self.columns(output, example).astype(output.dtype)
        if self.count == 1:  # A vmap over an axis of length one would slow convolutions down.
            return output, jax.tree.map(lambda x: x[None], pull(columns[0])), operands
        return output, jax.vmap(pull)(columns), operands

    def sums(self, weights: Float[Array, " B"]) -> tuple[PyTree, PyTree]:
        """Σ_rb w_b J_bᵀc_br and Σ_rb w_b (J_bᵀc_br)²."""
        program = self.program
        ways = list(program.ways.values())
        mixed = [leaf for leaf, way in enumerate(ways) if way == "mixed" and leaf not in self.whole]
        both = {leaf: ops.totals(rows, weights.astype(ops.wide(rows))) for leaf, rows in self.rows.items()}
        of_source = {}
        for leaf, reached in enumerate(program.reach):
            if leaf in self.whole or leaf in mixed:
                continue
            if ways[leaf] == "rescaled":
                both[leaf] = self._rescaled_sums(leaf, weights)
                continue
            of_source |= {place: self._sums_of_source(place, weights) for place in reached if place not in of_source}
            if list(reached) == [leaf]:
                both[leaf] = of_source[leaf]
            elif reached:
                both[leaf] = self._pulled(leaf, {place: of_source[place] for place in reached})
        for leaves, places in _connected(mixed, program.reach):
            both |= self._mixed_sums(leaves, places, weights)
        both |= self._deferred_sums(weights)
        zero = [jnp.zeros(leaf.shape, ops.wide(leaf)) for leaf in program.leaves]
        first = [both.get(i, (z, z))[0].astype(program.leaves[i].dtype) for i, z in enumerate(zero)]
        squares = [both.get(i, (z, z))[1] for i, z in enumerate(zero)]
        return program.treedef.unflatten(first), program.treedef.unflatten(squares)

    def _parts(self, place: int, weights: Array) -> Any:
        """What the gradients of a source are computed from: parts of its sites, or rows; and the weights."""
        sites = self.sources[place].sites
        weights = weights.astype(ops.wide(self.made[place]))
        if not sites:
            return self.shifts[place], weights
        return [self.operands[site.path] for site in sites], [self.slopes[site.path] for site in sites], weights

    def _sums_of_source(self, place: int, weights: Array) -> tuple[Array, Array]:
        sites, parts = self.sources[place].sites, self._parts(place, weights)
        return ops.sums(sites, parts) if sites else ops.totals(*parts)

    def _pulled(self, leaf: int, sums: dict[int, tuple[Array, Array]]) -> tuple[Array, Array]:
        """The sums of a leaf from those of sources whose entries depend on one entry of the leaf each.

        With the derivative c_j of entry j of a source in its own entry i(j) of the leaf, the squares are those of the
        source times c_j².
        """
        value = self.program.leaves[leaf]
        make = lambda x: self.program.remake({leaf: x}, self.made, sums)
        made, pull = jax.vjp(make, value)
        slopes = jax.jvp(make, (value,), (jnp.ones_like(value),))[1]
        cast = lambda place, x: x.astype(made[place].dtype)
        (first,) = pull({place: cast(place, pair[0]) for place, pair in sums.items()})
        (squares,) = pull({place: cast(place, pair[1]) * slopes[place] for place, pair in sums.items()})
        return first, squares.astype(ops.wide(value))

    def _rescaled_sums(self, leaf: int, weights: Float[Array, " B"]) -> tuple[Array, Array]:
        """The sums for a leaf whose gradient for each example is a sum of few outer products."""
        value, outer = self.program.leaves[leaf], {}
        for place in self.program.reach[leaf]:
            sites, dtype = self.sources[place].sites, ops.wide(self.made[place])
            outer[place] = [
                pair for site in sites for pair in site.outer(self.operands[site.path], self.slopes[site.path], dtype)
            ]
        result = self.program.pull_back(leaf, value, self.made, outer)
        return separable.totals(result, jnp.repeat(weights, self.count).astype(ops.wide(value)), value)

    def _mixed_sums(
        self, leaves: list[int], places: list[int], weights: Float[Array, " B"]
    ) -> dict[int, tuple[Array, Array]]:
        """The sums for leaves that are mixed in sources: every example's gradient of these is pulled back to them."""
        sites = {place: self.sources[place].sites for place in places}
        make = lambda leaves: self.program.remake(leaves, self.made, places)

        def sums_of(chunk: dict[int, Any]) -> dict[int, tuple[Array, Array]]:
            made, pull = jax.vjp(make, {leaf: self.program.leaves[leaf] for leaf in leaves})
            slopes = {
                place: ops.gradients(sites[place], parts) if sites[place] else parts[0]
                for place, parts in chunk.items()
            }
            slopes = {place: x.astype(made[place].dtype) for place, x in slopes.items()}
            (rows,) = jax.vmap(jax.vmap(pull))(slopes)
            weights = next(iter(chunk.values()))[-1]
            return {leaf: ops.totals(x, weights.astype(ops.wide(x))) for leaf, x in rows.items()}

        parts = {place: self._parts(place, weights) for place in places}
        entries = self.count * sum(self.program.leaves[leaf].size for leaf in leaves)
        entries += sum(ops.entries_of(sites[place], parts[place][1]) for place in places if sites[place])
        return ops.in_chunks(sums_of, parts, entries)

    def _deferred_sums(self, weights: Float[Array, " B"]) -> dict[int, tuple[Array, Array]]:
        """The sums for the deferred leaves, by passes over a few examples at a time."""
        if not self.deferred:
            return {}

        def sums_of(chunk: tuple[PyTree, Array]) -> dict[int, tuple[Array, Array]]:
            rows = jax.vmap(lambda example: self._pull_back(self.deferred, [], {}, example)[1][2])(chunk[0])
            return {leaf: ops.totals(x, chunk[1].astype(ops.wide(x))) for leaf, x in rows.items()}

        entries = self.count * sum(self.program.leaves[leaf].size for leaf in self.deferred)
        return ops.in_chunks(sums_of, (self.examples, weights), entries)

    def factors(self, weights: Float[Array, " B"]) -> tuple[PyTree, PyTree]:
        """The gradient, and the Kronecker factors of every leaf."""
        gradient, factors = [], []
        for leaf, value in enumerate(self.program.leaves):
            scale = weights.astype(ops.wide(value))
            layout = ops.Layout(value.shape)
            if leaf in self.rows:
                rows = self.rows[leaf].astype(scale.dtype).reshape((scale.size, self.count, value.size))
                outer = jnp.einsum("bri,brj->ij", scale[:, None, None] * rows, rows)
                first, pair = (
                    jnp.einsum("b,bri->i", scale, rows).reshape(value.shape),
                    [jnp.ones_like(outer[:1, :1]), outer],
                )
                layout = layout.reshaped((1, value.size))
            elif leaf in self.sources:
                (site,) = self.sources[leaf].sites
                first, *pair = ops.factors(site, self.operands[site.path], self.slopes[site.path], scale)
                layout = site.layout.reshaped(site.sizes[2:])
            else:
                shape = (value.shape[0], value.size // value.shape[0]) if value.ndim > 1 else (1, value.size)
                first, pair = jnp.zeros_like(value), [jnp.zeros((n, n), scale.dtype) for n in shape]
                layout = layout.reshaped(shape)
            gradient.append(first.astype(value.dtype))
            factors.append(Kronecker(pair[0], pair[1], layout))
        return self.program.treedef.unflatten(gradient), self.program.treedef.unflatten(factors)


def _connected(leaves: list[int], reach: list[dict[int, Any]]) -> list[tuple[list[int], list[int]]]:
    """The leaves in groups that have no source in common, and the sources of each group."""
    groups: list[tuple[list[int], list[int]]] = []
    for leaf in leaves:
        own, places = [leaf], list(reach[leaf])
        for group in [g for g in groups if not set(g[1]).isdisjoint(places)]:
            groups.remove(group)
            own, places = [*group[0], *own], list(dict.fromkeys([*group[1], *places]))
        groups.append((own, places))
    return groups


def _check_factors(program: Program) -> list[int]:
    """The leaves whose factors come from every example's gradient. Leaves without factors are refused."""
    whole = []
    for leaf, (path, way) in enumerate(program.ways.items()):
        source = program.sources.get(leaf)
        if way == "unused":
            continue
        if way in ("product", "convolution") and list(program.reach[leaf]) == [leaf] and source is not None:
            (site,) = source.sites
            if site.sizes[0] == 1 and not site.loops:
                continue
            why = "is the weight of several products at once"
        else:
            why = "is not the weight of one operation"
        if program.leaves[leaf].ndim > 1 and way not in ("bias", "scale"):
            raise ValueError(
                f"theta{path}, of shape {program.leaves[leaf].shape}, {why}, so it has no Kronecker factors: use a "
                "Gaussian with a diagonal precision and GaussNewton(), which take any leaf, or let it enter once, in "
                "one matrix product or convolution."
            )
        whole.append(leaf)
    return whole
