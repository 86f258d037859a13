"""A weight inside one operation: its gradient for each example is a sum of outer products, Σ_t a_t d_tᵀ.

A matrix product and a convolution are the same case. With the operand that meets the weight unfolded to
rows a_bt ∈ Rᴵ, and the slopes of the operation's output d_bt ∈ Rᴼ, at the T positions t of example b,

    ∇ℓ_b = Σ_t a_bt d_btᵀ.

For T = 1 the square of an outer product is the outer product of the squares, so that Σ_b w_b (∇ℓ_b)² =
(A²)ᵀ(w∘D²) is one matrix product. For T > 1 the ∇ℓ_b are computed for a few examples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BUDGET = 1 << 19
"""The entries that a chunk of examples may fill. They stay in a processor's cache, and memory is bounded."""

LIMIT = 1 << 21
"""The entries up to which gradients for all examples are computed at once, rather than in a pass of their own."""

Sums = TypeVar("Sums")


class Layout(NamedTuple):
    """A rearrangement of a leaf's entries: reshapes (the new shape) and transposes (the order) in turn."""

    shape: tuple[int, ...]
    moves: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def reshaped(self, shape: Sequence[int]) -> Layout:
        return self._replace(moves=(*self.moves, ("reshape", tuple(shape))))

    def transposed(self, order: Sequence[int]) -> Layout:
        return self._replace(moves=(*self.moves, ("transpose", tuple(order))))

    def after(self, equation: Any) -> Layout | None:
        """The layout after an equation of a jaxpr, None if it does more than rearrange or cast."""
        name, result = equation.primitive.name, equation.outvars[0].aval
        if name == "copy" or (name == "convert_element_type" and jnp.issubdtype(result.dtype, jnp.floating)):
            return self
        if name == "transpose":
            return self.transposed(equation.params["permutation"])
        if name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim") and result.size == math.prod(self.shape):
            return self.reshaped(result.shape)
        return None

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
    def flipped(self) -> bool:
        """Whether the leaf's last axis, which is contiguous in memory, is not the last of the arranged entries."""
        order = tuple(range(len(self.shape)))
        for kind, move in self.moves[:-1]:
            if kind == "reshape":
                return False
            order = tuple(order[i] for i in move)
        return bool(order) and order[-1] != len(order) - 1


class Product(NamedTuple):
    """A weight on one side of `dot_general`; K counts what the product treats as separate matrices."""

    side: int
    numbers: Any
    operand_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]

    @property
    def other(self) -> int:
        """Which input of the equation meets the weight."""
        return 1 - self.side

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
        return layout.transposed((*batch, *contracted, *free)).reshaped((separate, inputs, outputs))

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
    """A kernel in `conv_general_dilated`: a product with the patches that the kernel's window meets."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    numbers: Any
    operand_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    @property
    def other(self) -> int:
        """Which input of the equation meets the weight."""
        return 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of separate matrices K, positions T, inputs I and outputs O."""
        outputs = self.weight_shape[self.numbers.rhs_spec[0]]
        channels = self.output_shape[self.numbers.out_spec[1]]
        return 1, math.prod(self.output_shape) // channels, math.prod(self.weight_shape) // outputs, outputs

    def layout(self, layout: Layout) -> Layout:
        """From the leaf to (1, I, O), where I runs over the window and then over the channels."""
        out, channel, *window = self.numbers.rhs_spec
        _, _, inputs, outputs = self.sizes
        return layout.transposed((*window, channel, out)).reshaped((1, inputs, outputs))

    def rows(self, operand: Array, slopes: Array) -> tuple[Array, Array]:
        """The a's (B, 1, T, I), and the d's (B, 1, T, R, O)."""
        _, positions, inputs, outputs = self.sizes
        patches = self._patches(operand).reshape((-1, 1, inputs, positions))
        batch, channel, *space = (2 + i for i in self.numbers.out_spec)
        slopes = slopes.transpose((0, batch, *space, 1, channel))
        return jnp.swapaxes(patches, 2, 3), slopes.reshape((-1, 1, positions, slopes.shape[-2], outputs))

    def _patches(self, operand: Array) -> Array:
        """Every entry of the window at every position: (B, window, channel, batch, *space).

        Slices that are stacked with the positions last are twice as fast on a CPU as a convolution
        with one-hot kernels (`conv_general_dilated_patches`).
        """
        batch, channel, *space = (1 + i for i in self.numbers.lhs_spec)
        operand = operand.transpose((0, channel, batch, *space))
        edges = [(low, high, by - 1) for (low, high), by in zip(self.padding, self.input_dilation, strict=True)]
        operand = jax.lax.pad(operand, jnp.zeros((), operand.dtype), [(0, 0, 0)] * 3 + edges)
        counts = [self.output_shape[i] for i in self.numbers.out_spec[2:]]
        window = [self.weight_shape[i] for i in self.numbers.rhs_spec[2:]]
        slices = []
        for at in np.ndindex(*window):
            starts = [i * by for i, by in zip(at, self.kernel_dilation, strict=True)]
            stops = [i + (n - 1) * by + 1 for i, n, by in zip(starts, counts, self.strides, strict=True)]
            every = (slice(None),) * 3
            steps = tuple(slice(*s) for s in zip(starts, stops, self.strides, strict=True))
            slices.append(operand[(*every, *steps)])
        return jnp.stack(slices, axis=1)


Operation = Product | Convolution


def operation(equation: Any, side: int) -> Operation | None:
    """The operation whose weight is the given input of an equation, None if it is of neither kind."""
    name, params = equation.primitive.name, equation.params
    shapes = [v.aval.shape for v in equation.invars]
    if name == "dot_general":
        return Product(side, params["dimension_numbers"], shapes[1 - side], shapes[side])
    if name != "conv_general_dilated" or side == 0:
        return None
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return None
    return Convolution(
        strides=params["window_strides"],
        padding=params["padding"],
        input_dilation=params["lhs_dilation"],
        kernel_dilation=params["rhs_dilation"],
        numbers=params["dimension_numbers"],
        operand_shape=shapes[0],
        weight_shape=shapes[1],
        output_shape=equation.outvars[0].aval.shape,
    )


def wide(leaf: Array) -> Any:
    """The precision of the sums for a leaf: its own, and at least single."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def totals(rows: Float[Array, "B R *P"], weights: Float[Array, " B"]) -> tuple[Array, Array]:
    """Σ_rb w_b g_br and Σ_rb w_b g_br², from the gradient g_br of every example and column."""
    rows = rows.astype(weights.dtype)
    first = jnp.tensordot(weights, jnp.sum(rows, axis=1), axes=1)
    return first, jnp.tensordot(weights, jnp.sum(rows**2, axis=1), axes=1)


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


def sums(
    operation: Operation, layout: Layout, operand: Array, slopes: Array, weights: Float[Array, " B"]
) -> tuple[Array, Array]:
    """Σ_rb w_b ∇ℓ_br and Σ_rb w_b (∇ℓ_br)² in the leaf's shape, from operands (B, …) and slopes (B, R, …)."""
    separate, positions, inputs, outputs = operation.sizes
    chunk = operand, slopes, weights
    if positions == 1:
        pair = _of_rows(operation, layout.flipped, *chunk)
    else:
        columns = slopes.shape[1]
        entries = separate * max(positions * inputs, columns * inputs * outputs, columns * positions * outputs)
        pair = in_chunks(lambda c: _of_positions(operation, *c), chunk, entries)
    return layout.restored(pair[0]), layout.restored(pair[1])


def _of_rows(
    operation: Operation, flipped: bool, operand: Array, slopes: Array, weights: Array
) -> tuple[Float[Array, "K I O"], Float[Array, "K I O"]]:
    """Aᵀ(w∘D) and (A²)ᵀ(w∘D²) for T = 1."""
    a, d = (x.astype(weights.dtype)[:, :, 0] for x in operation.rows(operand, slopes))
    weighted = weights[:, None, None, None] * d

    def product(a: Array, d: Array) -> Array:
        if flipped:
            # In the order in which the leaf lies in memory: transposing P entries would cost as much as the product.
            return jnp.swapaxes(jnp.einsum("bko,bki->koi", d, a), 1, 2)
        return jnp.einsum("bki,bko->kio", a, d)

    return product(a, jnp.sum(weighted, axis=2)), product(a**2, jnp.sum(weighted * d, axis=2))


def _of_positions(
    operation: Operation, operand: Array, slopes: Array, weights: Array
) -> tuple[Float[Array, "K I O"], Float[Array, "K I O"]]:
    """The same sums for T > 1, from each example's gradient."""
    a, d = (x.astype(weights.dtype) for x in operation.rows(operand, slopes))
    slope = jnp.einsum("bkti,bktro->bkiro", a, d)
    weighted = weights[:, None, None, None, None] * slope
    return jnp.sum(weighted, axis=(0, 3)), jnp.sum(weighted * slope, axis=(0, 3))


def factors(
    operation: Operation, layout: Layout, operand: Array, slopes: Array, weights: Float[Array, " B"]
) -> tuple[Array, Float[Array, "I I"], Float[Array, "O O"]]:
    """Σ_rb w_b ∇ℓ_br in the leaf's shape, Σ_b w_b Σ_t a aᵀ / Σ_b w_b, and Σ_rb w_b Σ_t d dᵀ / T, for K = 1."""
    _, positions, inputs, outputs = operation.sizes

    def factors_of(chunk: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        operand, slopes, weights = chunk
        a, d = (x.astype(weights.dtype)[:, 0] for x in operation.rows(operand, slopes))
        scale = weights[:, None, None]
        weighted = scale[..., None] * d
        first = jnp.einsum("bti,bto->io", a, jnp.sum(weighted, axis=2))
        return first, jnp.einsum("bti,btj->ij", scale * a, a), jnp.einsum("btro,btrp->op", weighted, d)

    entries = positions * max(inputs, slopes.shape[1] * outputs)
    first, inner, outer = in_chunks(factors_of, (operand, slopes, weights), entries)
    total = jnp.sum(weights)
    return layout.restored(first[None]), inner / jnp.where(total == 0, 1, total), outer / positions
