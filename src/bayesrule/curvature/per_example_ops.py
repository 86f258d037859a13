"""A weight inside an operation: its gradient for each example is a sum of outer products, Σ_t a_t d_tᵀ.

A matrix product and a convolution are the same case. With the operand that meets the weight unfolded to
rows a_bt ∈ Rᴵ, and the slopes of the operation's output d_bt ∈ Rᴼ, at the T positions t of example b,

    ∇ℓ_b = Σ_t a_bt d_btᵀ.

For T = 1 the square of an outer product is the outer product of the squares, so that Σ_b w_b (∇ℓ_b)² =
(A²)ᵀ(w∘D²) is one matrix product. For T > 1 the ∇ℓ_b are computed for a few examples at a time. A row that is looked
up in a table is a product with a one-hot a_bt, which is never formed: slopes are added to the rows that they belong to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BUDGET = 1 << 19
"""The entries that a chunk of examples may fill. They stay in a processor's cache, and memory is bounded."""

SORTED = 128
"""The looked-up rows of an example above which equal ones are found by sorting, rather than by comparing every pair."""

FEW = 4
"""The positions up to which the square of their sum is taken pair by pair, without any example's gradient."""

LIMIT = 1 << 21
"""The entries up to which gradients for all examples are computed at once, rather than in a pass of their own."""

Sums = TypeVar("Sums")


class Layout(NamedTuple):
    """A rearrangement of a leaf's entries: reshapes (the new shape) and transposes (the order) in turn.

    The first axes of the result that loops run over, of the lengths `scanned`, stay where they are: inside a loop,
    an equation sees what follows them.
    """

    shape: tuple[int, ...]
    moves: tuple[tuple[str, tuple[int, ...]], ...] = ()
    scanned: tuple[int, ...] = ()

    def reshaped(self, shape: Sequence[int]) -> Layout:
        return self._replace(moves=(*self.moves, ("reshape", (*self.scanned, *shape))))

    def transposed(self, order: Sequence[int]) -> Layout:
        lead = len(self.scanned)
        return self._replace(moves=(*self.moves, ("transpose", (*range(lead), *(lead + i for i in order)))))

    def inside_loop(self, length: int) -> Layout:
        """The layout of one iteration's slice, where the loop runs over the first axis."""
        return self._replace(scanned=(*self.scanned, length))

    def after(self, equation: Any) -> Layout | None:
        """The layout after an equation of a jaxpr, None if it does more than rearrange or cast."""
        name, result = equation.primitive.name, equation.outvars[0].aval
        if name == "copy" or (name == "convert_element_type" and jnp.issubdtype(result.dtype, jnp.floating)):
            return self
        if name == "transpose":
            return self.transposed(equation.params["permutation"])
        entries = math.prod(self.shape) // math.prod(self.scanned)
        if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim") and result.size == entries:
            return self.reshaped(result.shape)
        return None

    def in_matrices(self, sizes: tuple[int, int, int]) -> Layout:
        """The layout with every iteration's (K, I, O) joined to (S·K, I, O)."""
        return self._replace(scanned=()).reshaped((math.prod(self.scanned) * sizes[0], *sizes[1:]))

    def arranged(self, leaf: Array) -> Array:
        """The leaf's entries as the operation holds them."""
        for kind, move in self.moves:
            leaf = leaf.reshape(move) if kind == "reshape" else leaf.transpose(move)
        return leaf

    def restored(self, entries: Array) -> Array:
        """The inverse of `arranged`."""
        before = [self.shape]
        for kind, move in self.moves:
            before.append(move if kind == "reshape" else tuple(before[-1][i] for i in move))
        for (kind, move), shape in zip(reversed(self.moves), reversed(before[:-1]), strict=True):
            entries = entries.reshape(shape) if kind == "reshape" else entries.transpose(np.argsort(move))
        return entries

    @property
    def order(self) -> tuple[int, ...] | None:
        """The leaf's axes in the order in which they are joined by the last reshape, None if others came before it."""
        order = tuple(range(len(self.shape)))
        for kind, move in self.moves[:-1]:
            if kind == "reshape":
                return None
            order = tuple(order[i] for i in move)
        return order

    @property
    def flipped(self) -> bool:
        """Whether the leaf's last axis, which is contiguous in memory, is not the last of the arranged entries."""
        order = self.order
        return bool(order) and order[-1] != len(order) - 1


class Product(NamedTuple):
    """A weight on one side of `dot_general`; K counts what the product treats as separate matrices."""

    side: int
    numbers: Any
    operand_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """Which inputs of the equation meet the weight."""
        return (1 - self.side,)

    def _axes(self) -> tuple[tuple[int, ...], ...]:
        """The axes of the operand, then of the weight: separate, contracted, free."""
        contracted, batch = self.numbers
        other = 1 - self.side
        free = [
            tuple(i for i in range(len(shape)) if i not in (*contracted[at], *batch[at]))
            for at, shape in ((other, self.operand_shape), (self.side, self.weight_shape))
        ]
        mine, its = tuple(contracted[self.side]), tuple(batch[self.side])
        return tuple(batch[other]), tuple(contracted[other]), free[0], its, mine, free[1]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of separate matrices K, positions T, inputs I and outputs O."""
        batch, contracted, free, _, _, out = self._axes()
        size = lambda shape, axes: math.prod(shape[i] for i in axes)
        operand = self.operand_shape
        return size(operand, batch), size(operand, free), size(operand, contracted), size(self.weight_shape, out)

    def layout(self, layout: Layout) -> Layout:
        """From the leaf to (K, I, O), given the layout from the leaf to the weight."""
        _, _, _, batch, contracted, free = self._axes()
        separate, _, inputs, outputs = self.sizes
        return layout.transposed((*batch, *contracted, *free)).in_matrices((separate, inputs, outputs))

    def rows(self, operand: Array, slopes: Array) -> tuple[Array, Array]:
        """The a's (B, K, T, I), and the d's (B, K, T, R, O)."""
        batch, contracted, free, *_ = self._axes()
        separate, positions, inputs, outputs = self.sizes
        operand = operand.transpose((0, *(1 + i for i in (*batch, *free, *contracted))))
        slopes = slopes.reshape((*slopes.shape[:2], separate, *self._tail(positions, outputs)))
        slopes = slopes.transpose((0, 2, 3, 1, 4) if self.side == 1 else (0, 2, 4, 1, 3))
        return operand.reshape((-1, separate, positions, inputs)), slopes

    def _tail(self, positions: int, outputs: int) -> tuple[int, int]:
        return (positions, outputs) if self.side == 1 else (outputs, positions)


class Convolution(NamedTuple):
    """A kernel in `conv_general_dilated`: a product with the patches that the kernel's window meets.

    Every group of channels has a matrix of its own.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    numbers: Any
    groups: int
    operand_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """Which inputs of the equation meet the weight."""
        return (0,)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of separate matrices K, positions T, inputs I and outputs O."""
        outputs = self.weight_shape[self.numbers.rhs_spec[0]]
        channels = self.output_shape[self.numbers.out_spec[1]]
        positions, inputs = math.prod(self.output_shape) // channels, math.prod(self.weight_shape) // outputs
        return self.groups, positions, inputs, outputs // self.groups

    def layout(self, layout: Layout) -> Layout:
        """From the leaf to (K, I, O), where I runs over the window and then over the channels."""
        out, channel, *window = self.numbers.rhs_spec
        groups, _, inputs, outputs = self.sizes
        layout = layout.transposed((*window, channel, out))
        if groups > 1:
            layout = layout.reshaped((inputs, groups, outputs)).transposed((1, 0, 2))
        return layout.in_matrices((groups, inputs, outputs))

    def rows(self, operand: Array, slopes: Array) -> tuple[Array, Array]:
        """The a's (B, K, T, I), and the d's (B, K, T, R, O)."""
        groups, positions, inputs, outputs = self.sizes
        patches = self._patches(operand).reshape((-1, groups, inputs, positions))
        batch, channel, *space = (2 + i for i in self.numbers.out_spec)
        slopes = slopes.transpose((0, batch, *space, 1, channel))
        slopes = slopes.reshape((-1, positions, slopes.shape[-2], groups, outputs))
        return jnp.swapaxes(patches, 2, 3), slopes.transpose((0, 3, 1, 2, 4))

    def _patches(self, operand: Array) -> Array:
        """Every entry of the window at every position: (B, group, window, channel, batch, *space).

        Slices that are stacked with the positions last are twice as fast on a CPU as a convolution
        with one-hot kernels (`conv_general_dilated_patches`).
        """
        batch, channel, *space = (1 + i for i in self.numbers.lhs_spec)
        operand = operand.transpose((0, channel, batch, *space))
        operand = operand.reshape((operand.shape[0], self.groups, -1, *operand.shape[2:]))
        edges = [(low, high, by - 1) for (low, high), by in zip(self.padding, self.input_dilation, strict=True)]
        operand = jax.lax.pad(operand, jnp.zeros((), operand.dtype), [(0, 0, 0)] * 4 + edges)
        counts = [self.output_shape[i] for i in self.numbers.out_spec[2:]]
        window = [self.weight_shape[i] for i in self.numbers.rhs_spec[2:]]
        slices = []
        for at in np.ndindex(*window):
            starts = [i * by for i, by in zip(at, self.kernel_dilation, strict=True)]
            stops = [i + (n - 1) * by + 1 for i, n, by in zip(starts, counts, self.strides, strict=True)]
            every = (slice(None),) * 4
            steps = tuple(slice(*s) for s in zip(starts, stops, self.strides, strict=True))
            slices.append(operand[(*every, *steps)])
        return jnp.stack(slices, axis=2)


class Lookup(NamedTuple):
    """Rows of a table in `gather` or `dynamic_slice`, found by the indices of one or more of its axes."""

    name: str
    indexed: tuple[int, ...]
    """The axes of the table that are indexed, in the order of the index vector's entries at `entries`."""
    entries: tuple[int, ...]
    offset: tuple[int, ...]
    """The axes of the output that come from the table, and not from the indices."""
    drops: bool
    """Whether a row outside the table is left out, rather than the nearest one taken."""
    index_counts: int
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """Which inputs of the equation meet the weight."""
        return tuple(range(1, 1 + self.index_counts))

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of looked-up rows T and of a row's entries O."""
        size = math.prod(self.output_shape[i] for i in self.offset)
        return math.prod(self.output_shape) // max(size, 1), size

    def layout(self, layout: Layout) -> Layout:
        """From the leaf to (1, rows, O)."""
        kept = [i for i in range(len(self.weight_shape)) if i not in self.indexed]
        rows = math.prod(self.weight_shape[i] for i in self.indexed)
        return layout.transposed((*self.indexed, *kept)).in_matrices((1, rows, self.sizes[1]))

    def rows(self, operands: Sequence[Array], slopes: Array) -> tuple[Array, Array]:
        """The numbers of the rows (B, T), past the last one for those left out, and the d's (B, T, R, O)."""
        positions, size = self.sizes
        if self.name == "gather":
            index = operands[0].reshape((operands[0].shape[0], positions, operands[0].shape[-1]))
        else:
            index = jnp.stack([i.reshape((-1, 1)) for i in operands], axis=-1)
        lengths = [self.weight_shape[i] for i in self.indexed]
        # Signed, since a narrow type may not hold the number of a row.
        index = index[..., self.entries].astype(jnp.int32)
        inside = jnp.all((index >= 0) & (index < jnp.array(lengths)), axis=-1)
        index = jnp.clip(index, 0, jnp.array(lengths) - 1)
        number = jnp.sum(index * jnp.array([math.prod(lengths[i + 1 :]) for i in range(len(lengths))]), axis=-1)
        if self.drops:
            number = jnp.where(inside, number, math.prod(lengths))
        at = [i for i in range(len(self.output_shape)) if i not in self.offset]
        slopes = slopes.transpose((0, *(2 + i for i in at), 1, *(2 + i for i in self.offset)))
        return number, slopes.reshape((slopes.shape[0], positions, -1, size))


Operation = Product | Convolution | Lookup


def operation(equation: Any, side: int) -> Operation | None:
    """The operation whose weight is the given input of an equation, None if it is of no such kind."""
    name, params = equation.primitive.name, equation.params
    shapes = [v.aval.shape for v in equation.invars]
    if name == "dot_general":
        return Product(side, params["dimension_numbers"], shapes[1 - side], shapes[side])
    if name in ("gather", "dynamic_slice") and side == 0:
        return _lookup(equation)
    if name != "conv_general_dilated" or side == 0 or params["batch_group_count"] > 1:
        return None
    return Convolution(
        strides=params["window_strides"],
        padding=params["padding"],
        input_dilation=params["lhs_dilation"],
        kernel_dilation=params["rhs_dilation"],
        numbers=params["dimension_numbers"],
        groups=params["feature_group_count"],
        operand_shape=shapes[0],
        weight_shape=shapes[1],
        output_shape=equation.outvars[0].aval.shape,
    )


def _lookup(equation: Any) -> Lookup | None:
    """The lookup of whole rows, None if a slice has several entries of an indexed axis, but not all."""
    params, table = equation.params, equation.invars[0].aval.shape
    output = equation.outvars[0].aval.shape
    sizes = params["slice_sizes"]
    if equation.primitive.name == "dynamic_slice":
        mapped, batched, drops, collapsed = tuple(range(len(table))), (), False, ()
        offset = mapped
    else:
        numbers = params["dimension_numbers"]
        mapped, batched, collapsed = (
            numbers.start_index_map,
            numbers.operand_batching_dims,
            numbers.collapsed_slice_dims,
        )
        drops = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
        offset = tuple(numbers.offset_dims)
    # An axis that is taken whole has only one place to begin, unless a slice that begins elsewhere is left out.
    indexed = [(axis, entry) for entry, axis in enumerate(mapped) if drops or sizes[axis] != table[axis]]
    others = [i for i in range(len(table)) if i not in dict(indexed)]
    kept = [i for i in range(len(table)) if i not in collapsed]
    whole = all(sizes[i] == table[i] for i in others) and all(sizes[i] == 1 for i, _ in indexed)
    if not whole or batched or not indexed or len(offset) != len(kept):
        return None
    return Lookup(
        name=equation.primitive.name,
        indexed=tuple(axis for axis, _ in indexed),
        entries=tuple(entry for _, entry in indexed),
        offset=offset,
        drops=drops,
        index_counts=len(equation.invars) - 1,
        weight_shape=table,
        output_shape=output,
    )


def wide(leaf: Array) -> Any:
    """The precision of the sums for a leaf: its own, and at least single."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def totals(rows: Float[Array, "B R *P"], weights: Float[Array, " B"]) -> tuple[Array, Array]:
    """Σ_rb w_b g_br and Σ_rb w_b g_br², from the gradient g_br of every example and column."""
    rows = rows.astype(weights.dtype)
    weighted = weights.reshape((-1,) + (1,) * (rows.ndim - 1)) * rows
    return jnp.sum(weighted, axis=(0, 1)), jnp.sum(weighted * rows, axis=(0, 1))


def in_chunks(function: Callable[[Any], Sums], examples: Any, entries: int) -> Sums:
    """Σ over chunks of function(chunk), a chunk being as many examples of `entries` numbers as fit the budget."""
    size = jax.tree.leaves(examples)[0].shape[0]
    count = max(1, math.ceil(size * entries / BUDGET))
    if count == 1 or size <= 1:
        return function(examples)
    chunk = math.ceil(size / min(count, size))
    in_full_chunks = size // chunk * chunk
    stacked = jax.tree.map(lambda x: x[:in_full_chunks].reshape((-1, chunk, *x.shape[1:])), examples)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], stacked))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(lambda t, x: (jax.tree.map(jnp.add, t, function(x)), None), zero, stacked)
    if in_full_chunks == size:
        return total
    return jax.tree.map(jnp.add, total, function(jax.tree.map(lambda x: x[in_full_chunks:], examples)))


class Site(NamedTuple):
    """One use of a weight: its equation, given by the places of the loops around it and its own, and its layout there.

    A loop that takes a slice of the weight in each iteration has separate matrices; one in which the weight stays the
    same has further positions.
    """

    path: tuple[int, ...]
    operation: Operation
    layout: Layout
    loops: tuple[tuple[int, bool], ...]
    """The length of each loop, and whether it takes slices of the weight."""
    slope: jax.ShapeDtypeStruct
    """The shape of the operation's output, with the loops' axes before it, and its type."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of separate matrices K, positions T, inputs I and outputs O, with the loops."""
        separate = math.prod(length for length, sliced in self.loops if sliced)
        repeated = math.prod(length for length, sliced in self.loops if not sliced)
        if isinstance(self.operation, Lookup):
            positions, outputs = self.operation.sizes
            return 1, positions * repeated, 1, outputs
        own, positions, inputs, outputs = self.operation.sizes
        return own * separate, positions * repeated, inputs, outputs

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is a matrix, or its transpose, as it is stored."""
        stored = len(self.layout.shape) == 2 and self.layout.order is not None
        return stored and not isinstance(self.operation, Lookup) and self.sizes[0] == 1

    def outer(self, operands: Sequence[Array], slopes: Array, dtype: Any) -> list[tuple[Array, Array]]:
        """Where `is_matrix`: for each position the pair (B·R, …) whose outer product is the weight's gradient."""
        a, d = (x[:, 0] for x in self.rows(operands, slopes, dtype))
        a = jnp.broadcast_to(a[:, :, None], (*d.shape[:3], a.shape[-1]))
        flat = lambda x, t: x[:, t].reshape((-1, x.shape[-1]))
        pairs = [(flat(a, t), flat(d, t)) for t in range(d.shape[1])]
        return pairs if self.layout.order == (0, 1) else [(d, a) for a, d in pairs]

    def rows(self, operands: Sequence[Array], slopes: Array, dtype: Any) -> tuple[Array, Array]:
        """The a's (B, K, T, I) and the d's (B, K, T, R, O); for a lookup the rows' numbers and the d's, without K."""
        lengths = [length for length, _ in self.loops]
        lead = 1 + len(lengths)
        operands = [x.reshape((-1, *x.shape[lead:])) for x in operands]
        slopes = jnp.moveaxis(slopes, 1, lead)
        count = slopes.shape[0]
        slopes = slopes.reshape((-1, *slopes.shape[lead:]))
        if isinstance(self.operation, Lookup):
            numbers, d = self.operation.rows(operands, slopes)
            return numbers.reshape((count, -1)), d.reshape((count, -1, *d.shape[2:])).astype(dtype)
        a, d = (x.astype(dtype) for x in self.operation.rows(operands[0], slopes))
        return self._joined(a, count, lengths), self._joined(d, count, lengths)

    def _joined(self, rows: Array, count: int, lengths: list[int]) -> Array:
        """From (B·loops, K, T, …) to (B, sliced loops and K, other loops and T, …)."""
        if not lengths:
            return rows
        tail = rows.shape[1:]
        rows = rows.reshape((count, *lengths, *tail))
        sliced, kept = ([1 + i for i, (_, by) in enumerate(self.loops) if by is over] for over in (True, False))
        lead = 1 + len(lengths)
        rows = rows.transpose((0, *sliced, lead, *kept, *range(lead + 1, lead + len(tail))))
        separate, positions, *_ = self.sizes
        return rows.reshape((count, separate, positions, *tail[2:]))


Parts = tuple[Sequence[Sequence[Array]], Sequence[Array], Array]
"""For each site of a weight its operands, (B, …), and the slopes of its output, (B, R, …); and the weights w_b."""


def sums(sites: Sequence[Site], parts: Parts) -> tuple[Array, Array]:
    """Σ_rb w_b ∇ℓ_br and Σ_rb w_b (∇ℓ_br)² in the leaf's shape."""
    operands, slopes, weights = parts
    site = sites[0]
    if _are_alike(sites) and isinstance(site.operation, Lookup):
        pair = _of_lookups(sites, parts)
    elif len(sites) == 1 and site.sizes[1] == 1:
        pair = _of_rows(site, operands[0], slopes[0], weights)
    elif sum(site.sizes[1] for site in sites) <= FEW and _have_one_side(sites, slopes):
        pair = _of_pairs(sites, parts)
    elif _are_alike(sites):
        pair = in_chunks(lambda c: _totals_of_matrices(_in_matrices(sites, c), c[2]), parts, entries_of(sites, slopes))
    else:
        return in_chunks(lambda c: totals(gradients(sites, c), c[2]), parts, entries_of(sites, slopes))
    return site.layout.restored(pair[0]), site.layout.restored(pair[1])


def gradients(sites: Sequence[Site], parts: Parts) -> Float[Array, "B R *P"]:
    """Every example's gradient, in the leaf's shape."""
    if _are_alike(sites):
        return _restored(sites[0], _in_matrices(sites, parts))
    each = [
        _restored(site, _in_matrices([site], ([x], [d], parts[2])))
        for site, x, d in zip(sites, parts[0], parts[1], strict=True)
    ]
    return functools.reduce(jnp.add, each)


def entries_of(sites: Sequence[Site], slopes: Sequence[Array]) -> int:
    """The entries that the gradient of one example, and what it is computed from, fill."""
    columns, entries = slopes[0].shape[1], 0
    for site in sites:
        separate, positions, inputs, outputs = site.sizes
        size = columns * math.prod(site.layout.shape)
        entries += max(separate * positions * inputs, size, columns * separate * positions * outputs)
    return entries


def _are_alike(sites: Sequence[Site]) -> bool:
    """Whether the weight is the same matrices, or table, at every site, so that the sites are further positions."""
    looks_up = isinstance(sites[0].operation, Lookup)
    return all(site.layout == sites[0].layout and isinstance(site.operation, Lookup) is looks_up for site in sites)


def _have_one_side(sites: Sequence[Site], slopes: Sequence[Array]) -> bool:
    """Whether the weight is the same matrices at every site, or one matrix and its transpose (for one column)."""
    if any(isinstance(site.operation, Lookup) for site in sites):
        return False
    return _are_alike(sites) or (
        slopes[0].shape[1] == 1 and all(_is_like(site, sites[0]) or _is_transposed(site, sites[0]) for site in sites)
    )


def _is_like(site: Site, other: Site) -> bool:
    return site.layout == other.layout


def _is_transposed(site: Site, other: Site) -> bool:
    """Whether a site holds one matrix, which is the transpose of another site's."""
    mine, its = site.layout.order, other.layout.order
    (separate, _, inputs, outputs), (its_separate, _, its_inputs, its_outputs) = site.sizes, other.sizes
    if (
        mine is None
        or its is None
        or (separate, its_separate) != (1, 1)
        or (inputs, outputs) != (its_outputs, its_inputs)
    ):
        return False
    lengths = [other.layout.shape[i] for i in its]
    splits = [i for i in range(len(its) + 1) if math.prod(lengths[:i]) == its_inputs]
    return any(mine == (*its[i:], *its[:i]) for i in splits)


def _of_rows(
    site: Site, operands: Sequence[Array], slopes: Array, weights: Array
) -> tuple[Float[Array, "K I O"], Float[Array, "K I O"]]:
    """Aᵀ(w∘D) and (A²)ᵀ(w∘D²) for T = 1."""
    a, d = site.rows(operands, slopes, weights.dtype)
    weighted = weights[:, None, None, None, None] * d

    def product(a: Array, d: Array) -> Array:
        if site.layout.flipped:
            # In the order in which the leaf lies in memory: transposing P entries would cost as much as the product.
            return jnp.swapaxes(_product(d, a), 1, 2)
        return _product(a, d)

    return product(a, jnp.sum(weighted, axis=3)), product(a**2, jnp.sum(weighted * d, axis=3))


def _product(a: Float[Array, "B K T I"], d: Float[Array, "B K T O"]) -> Float[Array, "K I O"]:
    if a.shape[1] == 1:
        # With an axis of separate matrices, XLA would transpose the operands first.
        a, d = (x.reshape((-1, x.shape[-1])) for x in (a, d))
        return jnp.einsum("ni,no->io", a, d)[None]
    return jnp.einsum("bkti,bkto->kio", a, d)


def _of_pairs(sites: Sequence[Site], parts: Parts) -> tuple[Float[Array, "K I O"], Float[Array, "K I O"]]:
    """The same sums for few positions, as the square of a sum: Σ_st (a_s∘a_t)ᵀ(d_s∘d_t), one long matrix product.

    Where contributions cancel, the rounding errors are those of their squares, and the result is kept from being
    negative.
    """
    operands, slopes, weights = parts
    left, right = [], []
    for site, x, slope in zip(sites, operands, slopes, strict=True):
        a, d = site.rows(x, slope, weights.dtype)
        if _is_like(site, sites[0]):
            left.append(a)
            right.append(d)
        else:
            left.append(d[:, :, :, 0])
            right.append(a[:, :, :, None])
    a, d = jnp.concatenate(left, axis=2), jnp.concatenate(right, axis=2)
    weighted = weights[:, None, None, None, None] * d
    s, t = np.triu_indices(a.shape[2])
    twice = jnp.where(s == t, 1, 2).astype(d.dtype)[:, None]
    pairs = twice * jnp.sum(weighted[:, :, s] * d[:, :, t], axis=3)
    squares = _product(a[:, :, s] * a[:, :, t], pairs)
    return _product(a, jnp.sum(weighted, axis=3)), jnp.maximum(squares, 0)


def _in_matrices(sites: Sequence[Site], parts: Parts) -> Float[Array, "B K I R O"]:
    """Every example's gradient as the operations hold the weight, from sites that are alike or from one."""
    operands, slopes, weights = parts
    rows = [site.rows(x, d, weights.dtype) for site, x, d in zip(sites, operands, slopes, strict=True)]
    if isinstance(sites[0].operation, Lookup):
        size = math.prod(sites[0].layout.shape)
        numbers, d = (jnp.concatenate(x, axis=1) for x in zip(*rows, strict=True))
        table = jnp.zeros((size // d.shape[-1], *d.shape[2:]), d.dtype)
        return jax.vmap(lambda n, d: table.at[n].add(d, mode="drop"))(numbers, d)[:, None]
    a, d = rows[0] if len(rows) == 1 else (jnp.concatenate(x, axis=2) for x in zip(*rows, strict=True))
    return jnp.einsum("bkti,bktro->bkiro", a, d)


def _totals_of_matrices(slope: Float[Array, "B K I R O"], weights: Array) -> tuple[Array, Array]:
    weighted = weights[:, None, None, None, None] * slope
    return jnp.sum(weighted, axis=(0, 3)), jnp.sum(weighted * slope, axis=(0, 3))


def _restored(site: Site, slope: Float[Array, "B K I R O"]) -> Float[Array, "B R *P"]:
    return jax.vmap(jax.vmap(site.layout.restored))(jnp.moveaxis(slope, 3, 1))


def _of_lookups(sites: Sequence[Site], parts: Parts) -> tuple[Float[Array, "1 rows O"], Float[Array, "1 rows O"]]:
    """Slopes, and squares of the sums of each example's slopes, added to the rows that were looked up."""
    operands, slopes, weights = parts
    rows = [site.rows(x, d, weights.dtype) for site, x, d in zip(sites, operands, slopes, strict=True)]
    numbers, d = (jnp.concatenate(x, axis=1) for x in zip(*rows, strict=True))
    shape = math.prod(sites[0].layout.shape) // d.shape[-1], d.shape[-1]

    def add(start: float, rows: Float[Array, "B T O"]) -> Float[Array, "1 rows O"]:
        rows = (weights[:, None, None] * rows).reshape((-1, shape[1]))
        return jnp.full((1, *shape), start, d.dtype).at[0, numbers.reshape(-1)].add(rows, mode="drop")

    # Two equal constants would be one buffer to XLA, which would copy it before it adds to it.
    return add(-0.0, jnp.sum(d, axis=2)), add(0.0, jnp.sum(_sum_equal_rows(numbers, d) ** 2, axis=2))


def _sum_equal_rows(numbers: Array, d: Float[Array, "B T R O"]) -> Float[Array, "B T R O"]:
    """The sum of each example's slopes of one row at the first position that looked it up, and zero at the others."""
    positions = d.shape[1]
    if positions == 1:
        return d
    if positions <= SORTED:
        earlier = np.tri(positions, k=-1, dtype=bool)
        equal = numbers[:, :, None] == numbers[:, None, :]
        first = ~jnp.any(equal & earlier, axis=2)
        return jnp.einsum("bst,btro->bsro", (equal & first[:, :, None]).astype(d.dtype), d)

    def of_one(numbers: Array, d: Array) -> Array:
        order = jnp.argsort(numbers)
        ordered = numbers[order]
        run = jnp.cumsum(jnp.append(False, ordered[1:] != ordered[:-1]))
        total = jnp.zeros_like(d).at[run].add(d[order])
        begins = jnp.full_like(order, positions).at[run].min(order)
        return jnp.zeros_like(d).at[begins].add(total, mode="drop")

    return jax.vmap(of_one)(numbers, d)


def factors(
    site: Site, operands: Sequence[Array], slopes: Array, weights: Float[Array, " B"]
) -> tuple[Array, Float[Array, "I I"], Float[Array, "O O"]]:
    """Σ_rb w_b ∇ℓ_br in the leaf's shape, Σ_b w_b Σ_t a aᵀ / Σ_b w_b, and Σ_rb w_b Σ_t d dᵀ / T, for K = 1."""
    _, positions, inputs, outputs = site.sizes

    def factors_of(chunk: tuple[Sequence[Array], Array, Array]) -> tuple[Array, Array, Array]:
        operands, slopes, weights = chunk
        a, d = (x[:, 0] for x in site.rows(operands, slopes, weights.dtype))
        scale = weights[:, None, None]
        weighted = scale[..., None] * d
        first = jnp.einsum("bti,bto->io", a, jnp.sum(weighted, axis=2))
        return first, jnp.einsum("bti,btj->ij", scale * a, a), jnp.einsum("btro,btrp->op", weighted, d)

    entries = positions * max(inputs, slopes.shape[1] * outputs)
    first, inner, outer = in_chunks(factors_of, (operands, slopes, weights), entries)
    total = jnp.sum(weights)
    return site.layout.restored(first[None]), inner / jnp.where(total == 0, 1, total), outer / positions
