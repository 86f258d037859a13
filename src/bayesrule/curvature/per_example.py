"""Sums over the examples of their own gradients, squared or factored, for little more than the sum's gradient.

The loss of one example is traced to a list of equations, and the equations in which each leaf of θ enters are
looked up. A leaf that enters in one matrix product or convolution needs only that operation's other operand and the
slopes of its output, from the one backward pass that the gradient takes too: never the B×P numbers of every
example's gradient. A bias or a scale has no more entries than an activation, so its gradient for each example is
taken as it is. Any other leaf (shared, in a loop, looked up by index, inside an exponential, …) has its gradient
made for each example too, a few examples at a time if it is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, Float, PyTree

from . import per_example_ops as ops

Columns = Callable[[Array, PyTree], Array]
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}
_REARRANGING = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "convert_element_type")


class Moments(eqx.Module):
    """The losses ℓ_b, Σ_b w_b ∇ℓ_b, Σ_b w_b (∇ℓ_b)², and the way in which each leaf's squares were made."""

    values: Float[Array, " B"]
    gradient: PyTree
    squares: PyTree
    way_of_leaf: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def ways(self) -> dict[str, str]:
        """From a leaf's path to "product", "convolution", "bias", "scale" or "examples", as `ways` says."""
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
    program = _Program(function, theta, examples)
    if program.output.shape != ():
        raise ValueError(
            f"The loss of one example has the shape {program.output.shape}, and squares of gradients are defined for a "
            "number: sum its entries, or use pulled_squares for an output that is an array."
        )
    backward = _Pass(program, examples, _one, ops.LIMIT)
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
    backward = _Pass(_Program(function, theta, examples), examples, columns, ops.LIMIT)
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
    program = _Program(function, theta, examples)
    program.check_factors()
    backward = _Pass(program, examples, columns or _one, math.inf)
    return Factors(backward.outputs, *backward.factors(weights))


def ways(function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree) -> dict[str, str]:
    """How each leaf enters, by its path; nothing is computed.

    "product" and "convolution": once, as the weight of one such operation. "bias" and "scale": once, added to or
    times something that depends on the example. "examples": in any other way, so that its gradient is made for
    every example. "unused": not at all.
    """
    return _Program(function, theta, examples).ways


class _Constant(NamedTuple):
    val: Any


class _Step(NamedTuple):
    """One equation; its inputs are places in the list of values, or constants with a `val`."""

    equation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]


class _Use(NamedTuple):
    """Where a leaf enters: the step, which of its inputs, and the layout there, None if it was broadcast."""

    step: int | None
    side: int
    layout: ops.Layout | None


class _Program:
    """One example's computation as a flat list of equations, and where each leaf of θ enters it."""

    def __init__(self, function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree) -> None:
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(theta)
        self.leaves = [jnp.asarray(leaf) for _, leaf in paths]
        shapes, stack = jax.eval_shape(lambda *x: x, theta, examples)
        self.example = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), stack)
        closed, self.output = jax.make_jaxpr(function, return_shape=True)(shapes, self.example)
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(self.output)):
            raise ValueError(
                f"The function returned {jax.tree.structure(self.output)}, and one array is wanted: leave out the rest."
            )
        self.steps: list[_Step] = []
        self.inputs = self.size = len(closed.jaxpr.invars)
        (self.result,) = self._inline(closed.jaxpr, [*map(_Constant, closed.consts), *range(self.inputs)])
        self._prune()
        self.operations: dict[int, tuple[int, ops.Operation, ops.Layout]] = {}
        self.varying = set(range(len(self.leaves), self.inputs))
        every = self._uses()
        self.ways = {jax.tree_util.keystr(path): self._way(i, every[i]) for i, (path, _) in enumerate(paths)}

    def _inline(self, jaxpr: Any, places: Sequence[Any]) -> list[Any]:
        """Append a jaxpr's equations, with those of the calls in it, and return the places of its results.

        A function with a custom derivative stays one equation: those inside it would be differentiated as they stand.
        """
        place = dict(zip((*jaxpr.constvars, *jaxpr.invars), places, strict=True))
        read = lambda v: v if isinstance(v, Literal) else place[v]
        for equation in jaxpr.eqns:
            inputs = tuple(read(v) for v in equation.invars)
            inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
            if inner is not None:
                known = [*map(_Constant, getattr(inner, "consts", ()))]
                results = self._inline(getattr(inner, "jaxpr", inner), [*known, *inputs])
                place.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = tuple(range(self.size, self.size + len(equation.outvars)))
            self.size += len(outputs)
            place.update(zip(equation.outvars, outputs, strict=True))
            self.steps.append(_Step(equation, inputs, outputs))
        return [read(v) for v in jaxpr.outvars]

    def _prune(self) -> None:
        """Drop the equations that the result does not depend on, so that they do not count as uses of a leaf."""
        needed, kept = set(_places([self.result])), []
        for step in reversed(self.steps):
            if step.equation.effects or not needed.isdisjoint(step.outputs):
                needed.update(_places(step.inputs))
                kept.append(step)
        self.steps = kept[::-1]

    def _uses(self) -> list[list[_Use]]:
        """Every use of each leaf, past the equations that only rearrange, cast or broadcast it."""
        uses: list[list[_Use]] = [[] for _ in self.leaves]
        routes: dict[int, tuple[int, ops.Layout | None]] = {
            i: (i, ops.Layout(leaf.shape)) for i, leaf in enumerate(self.leaves)
        }
        for number, step in enumerate(self.steps):
            if not self.varying.isdisjoint(_places(step.inputs)):
                self.varying.update(step.outputs)
            for side, place in enumerate(step.inputs):
                if not isinstance(place, int) or place not in routes:
                    continue
                leaf, layout = routes[place]
                after = layout and layout.after(step.equation)
                if after or step.equation.primitive.name in _REARRANGING:
                    routes[step.outputs[0]] = leaf, after
                else:
                    uses[leaf].append(_Use(number, side, layout))
        for place in _places([self.result]):
            if place in routes:
                uses[routes[place][0]].append(_Use(None, 0, None))
        return uses

    def _way(self, leaf: int, uses: list[_Use]) -> str:
        """How a leaf enters, as `ways` says; the operation of a product or convolution is noted in `operations`."""
        if not uses:
            return "unused"
        number, side, layout = uses[0]
        if len(uses) > 1 or number is None:
            return "examples"
        equation, inputs, _ = self.steps[number]
        name = equation.primitive.name
        # An operand that is the same for all examples would be copied for each of them, so its rows are not used.
        if len(inputs) != 2 or self.varying.isdisjoint(_places([inputs[1 - side]])):
            return "examples"
        if name in ("add", "sub", "add_any"):
            return "bias"
        if name == "mul":
            return "scale"
        operation = layout and ops.operation(equation, side)
        if not layout or not operation:
            return "examples"
        self.operations[leaf] = number, operation, operation.layout(layout)
        return "product" if isinstance(operation, ops.Product) else "convolution"

    def run(self, leaves: Sequence[Array], example: PyTree, nudges: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
        """The result with a nudge added to the output of each leaf's operation, and those operations' operands."""
        values: dict[int, Any] = dict(enumerate((*leaves, *jax.tree.leaves(example))))
        read = lambda i: values[i] if isinstance(i, int) else i.val
        at = {self.operations[leaf][0]: leaf for leaf in nudges}
        operands = {}
        for number, step in enumerate(self.steps):
            primitive, inputs = step.equation.primitive, [read(i) for i in step.inputs]
            bound = primitive.get_bind_params(step.equation.params)
            functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a tuple before JAX 0.9
            with step.equation.ctx.manager:
                results = primitive.bind(*functions, *inputs, **params)
            results = results if primitive.multiple_results else [results]
            if number in at:
                leaf = at[number]
                results = [results[0] + nudges[leaf]]
                operands[leaf] = inputs[self.operations[leaf][1].other]
            values.update(zip(step.outputs, results, strict=True))
        return read(self.result), operands

    def check_factors(self) -> None:
        """Refuse the leaves that have no Kronecker factors."""
        for number, (path, way) in enumerate(self.ways.items()):
            separate = number in self.operations and self.operations[number][1].sizes[0] > 1
            shape = self.leaves[number].shape
            if separate or (way == "examples" and len(shape) > 1):
                why = "is the weight of several products at once" if separate else "is not the weight of one operation"
                raise ValueError(
                    f"theta{path}, of shape {shape}, {why}, so it has no Kronecker factors: use a Gaussian with a "
                    "diagonal precision and GaussNewton(), which take any leaf, or let it enter once, in one matrix "
                    "product or convolution."
                )


def _places(inputs: Sequence[Any]) -> list[int]:
    """The places among an equation's inputs, without its constants."""
    return [i for i in inputs if isinstance(i, int)]


def _one(value: Array, example: PyTree) -> Array:
    """The one column of a loss."""
    return jnp.ones((1, *value.shape), value.dtype)


class _Pass:
    """One forward and backward pass over all examples, from whose operands, slopes and rows the sums are computed.

    Leaves whose gradients for all examples together would exceed `limit` entries are deferred to passes of their own.
    """

    def __init__(self, program: _Program, examples: PyTree, columns: Columns, limit: float) -> None:
        self.program, self.examples, self.columns = program, examples, columns
        count = jax.tree.leaves(examples)[0].shape[0]
        self.count = jax.eval_shape(columns, program.output, program.example).shape[0]
        sizes = [leaf.size for leaf in program.leaves]
        at_once, self.deferred, entries = [], [], 0
        for leaf, way in sorted(enumerate(program.ways.values()), key=lambda pair: sizes[pair[0]]):
            entries += count * self.count * sizes[leaf] if way == "examples" else 0
            if way in ("bias", "scale") or (way == "examples" and entries <= limit):
                at_once.append(leaf)
            elif way == "examples":
                self.deferred.append(leaf)

        def one(example: PyTree) -> tuple[Array, Any, Any]:
            outputs = {i: program.steps[number].equation.outvars[0] for i, (number, *_) in program.operations.items()}
            nudges = {leaf: jnp.zeros(v.aval.shape, v.aval.dtype) for leaf, v in outputs.items()}
            return self._pull_back(at_once, nudges, example)

        self.outputs, (self.slopes, self.rows), self.operands = jax.vmap(one)(examples)

    def _pull_back(self, chosen: list[int], nudges: dict[int, Array], example: PyTree) -> tuple[Array, Any, Any]:
        """One example's output, its columns pulled back to the nudges and the chosen leaves, (R, …), and operands."""

        def run(nudges: dict[int, Array], own: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
            leaves = [own.get(i, leaf) for i, leaf in enumerate(self.program.leaves)]
            return self.program.run(leaves, example, nudges)

        output, pull, operands = jax.vjp(run, nudges, {i: self.program.leaves[i] for i in chosen}, has_aux=True)
        columns = self.columns(output, example).astype(output.dtype)
        if self.count == 1:  # A vmap over an axis of length one would slow convolutions down.
            return output, jax.tree.map(lambda x: x[None], pull(columns[0])), operands
        return output, jax.vmap(pull)(columns), operands

    def sums(self, weights: Float[Array, " B"]) -> tuple[PyTree, PyTree]:
        """Σ_rb w_b J_bᵀc_br and Σ_rb w_b (J_bᵀc_br)²."""
        program = self.program
        both = {leaf: ops.totals(rows, weights.astype(ops.wide(rows))) for leaf, rows in self.rows.items()}
        for leaf, (_, operation, layout) in program.operations.items():
            scale = weights.astype(ops.wide(program.leaves[leaf]))
            both[leaf] = ops.sums(operation, layout, self.operands[leaf], self.slopes[leaf], scale)
        both |= self._deferred_sums(weights)
        zero = [jnp.zeros(leaf.shape, ops.wide(leaf)) for leaf in program.leaves]
        first = [both.get(i, (z, z))[0].astype(program.leaves[i].dtype) for i, z in enumerate(zero)]
        squares = [both.get(i, (z, z))[1] for i, z in enumerate(zero)]
        return program.treedef.unflatten(first), program.treedef.unflatten(squares)

    def _deferred_sums(self, weights: Float[Array, " B"]) -> dict[int, tuple[Array, Array]]:
        """The sums for the deferred leaves, by passes over a few examples at a time."""
        if not self.deferred:
            return {}

        def sums_of(chunk: tuple[PyTree, Array]) -> dict[int, tuple[Array, Array]]:
            rows = jax.vmap(lambda example: self._pull_back(self.deferred, {}, example)[1][1])(chunk[0])
            return {leaf: ops.totals(x, chunk[1].astype(ops.wide(x))) for leaf, x in rows.items()}

        entries = self.count * sum(self.program.leaves[leaf].size for leaf in self.deferred)
        return ops.in_chunks(sums_of, (self.examples, weights), entries)

    def factors(self, weights: Float[Array, " B"]) -> tuple[PyTree, PyTree]:
        """The gradient, and the Kronecker factors of every leaf."""
        gradient, factors = [], []
        for leaf, value in enumerate(self.program.leaves):
            scale = weights.astype(ops.wide(value))
            layout = ops.Layout(value.shape)
            if leaf in self.program.operations:
                _, operation, layout = self.program.operations[leaf]
                first, *pair = ops.factors(operation, layout, self.operands[leaf], self.slopes[leaf], scale)
                layout = layout.reshaped(operation.sizes[2:])
            elif leaf in self.rows:
                rows = self.rows[leaf].astype(scale.dtype).reshape((scale.size, self.count, value.size))
                outer = jnp.einsum("bri,brj->ij", scale[:, None, None] * rows, rows)
                first, pair = (
                    jnp.einsum("b,bri->i", scale, rows).reshape(value.shape),
                    [jnp.ones_like(outer[:1, :1]), outer],
                )
                layout = layout.reshaped((1, value.size))
            else:
                shape = (value.shape[0], value.size // value.shape[0]) if value.ndim > 1 else (1, value.size)
                first, pair = jnp.zeros_like(value), [jnp.zeros((n, n), scale.dtype) for n in shape]
                layout = layout.reshaped(shape)
            gradient.append(first.astype(value.dtype))
            factors.append(Kronecker(pair[0], pair[1], layout))
        return self.program.treedef.unflatten(gradient), self.program.treedef.unflatten(factors)
