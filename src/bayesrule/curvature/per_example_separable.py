"""Gradients that are sums of outer products, followed through the functions that made a weight from leaves of θ.

A dense layer's gradient for one example is a dᵀ. What it is pulled back to by a factor, a normalisation or another
product is again such a sum, Σ_k u_k ∘ (a_k d_kᵀ), with u_k the same for every example. Its squares then are

    Σ_b w_b g_b² = Σ_kl u_k∘u_l ∘ (A_k∘A_l)ᵀ(w∘D_k∘D_l),

a few matrix products, and no example's gradient is formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, Float

MOST = 4
"""The most outer products in a sum: of k there are k(k+1)/2 pairs."""
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


class NotSeparable(Exception):
    """A function leads out of the sums of few outer products."""


class _Term(NamedTuple):
    """u ∘ (a_n d_nᵀ) for every example n; a u of None is one."""

    u: Float[Array, "I O"] | None
    a: Float[Array, "N I"]
    d: Float[Array, "N O"]

    def transposed(self) -> _Term:
        return _Term(None if self.u is None else self.u.T, self.d, self.a)

    def times(self, factor: Any) -> _Term:
        factor = jnp.asarray(factor, self.d.dtype)
        return self._replace(u=factor if self.u is None else self.u * factor)


class _Rows(NamedTuple):
    """An array for every example, which is small."""

    value: Float[Array, "N *S"]


_Terms = tuple[_Term, ...]


def pull_back(
    pull: Callable[[dict[int, Array]], tuple[Array]],
    like: dict[int, Array],
    outer: dict[int, Sequence[tuple[Array, Array]]],
) -> Any:
    """What `pull`, which is linear, makes of sums of outer products a dᵀ, one for each of its inputs: terms or rows.

    Raises:
        NotSeparable: If an equation of the function is of a kind that is not followed.
    """
    closed = jax.make_jaxpr(lambda slopes: pull(slopes)[0])(like)
    inputs = [tuple(_Term(None, a, d) for a, d in outer[place]) for place in sorted(like)]
    (result,) = _interpret(closed.jaxpr, closed.consts, inputs)
    return result


def totals(result: Any, weights: Float[Array, " N"], like: Array) -> tuple[Array, Array]:
    """Σ_n w_n g_n and Σ_n w_n g_n² of one of the results of `pull_back`, in the shape of a leaf."""
    if isinstance(result, _Rows):
        scale = weights.reshape((-1,) + (1,) * (result.value.ndim - 1))
        return jnp.sum(scale * result.value, axis=0), jnp.sum(scale * result.value**2, axis=0)
    if not _is_terms(result):
        return jnp.zeros(like.shape, weights.dtype), jnp.zeros(like.shape, weights.dtype)
    first, squares = [], []
    for k, (u, a, d) in enumerate(result):
        weighted = weights[:, None] * d
        first.append(_scaled(jnp.einsum("ni,no->io", a, weighted), u))
        for other in result[k:]:
            product = jnp.einsum("ni,no->io", a * other.a, weighted * other.d)
            squares.append((1 if other is result[k] else 2) * _scaled(_scaled(product, u), other.u))
    add = lambda parts: jnp.broadcast_to(sum(parts[1:], start=parts[0]), like.shape)
    return add(first), jnp.maximum(add(squares), 0)


def _scaled(product: Array, u: Any) -> Array:
    return product if u is None else product * u


def _is_terms(value: Any) -> bool:
    return isinstance(value, tuple) and not isinstance(value, _Rows)


def _interpret(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    for equation in jaxpr.eqns:
        arguments = [read(v) for v in equation.invars]
        inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        if inner is not None:
            results = _interpret(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments)
        elif not any(isinstance(x, tuple) for x in arguments):
            results = _bind(equation, arguments)
        elif len(_floating_types(equation, arguments)) > 1:
            raise NotSeparable("convert_element_type")  # half precision inside, where the sums are in single
        elif any(map(_is_terms, arguments)):
            results = [_of_terms(equation, arguments)]
        else:
            results = [_of_rows(equation, arguments)]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _floating_types(equation: Any, arguments: Sequence[Any]) -> set[Any]:
    """The floating-point types of an equation, and of the terms and rows among its inputs."""
    types = {v.aval.dtype for v in (*equation.invars, *equation.outvars)}
    types |= {leaf.dtype for x in arguments if isinstance(x, tuple) for leaf in jax.tree.leaves(x)}
    return {dtype for dtype in types if jnp.issubdtype(dtype, jnp.inexact)}


def _bind(equation: Any, arguments: Sequence[Any]) -> list[Any]:
    primitive = equation.primitive
    bound = primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a tuple before JAX 0.9
    results = primitive.bind(*functions, *arguments, **params)
    return list(results) if primitive.multiple_results else [results]


def _of_terms(equation: Any, arguments: Sequence[Any]) -> Any:
    """An equation's result where one of its inputs, or both, are terms."""
    name, params = equation.primitive.name, equation.params
    are_terms = [_is_terms(x) for x in arguments]
    if name in ("add", "add_any") and all(are_terms):
        return _few((*arguments[0], *arguments[1]))
    if sum(are_terms) != 1 or any(isinstance(x, _Rows) for x in arguments):
        raise NotSeparable(name)
    side = are_terms.index(True)
    terms: _Terms = arguments[side]
    if name == "neg":
        return tuple(term.times(-1.0) for term in terms)
    if name == "mul":
        return tuple(term.times(arguments[1 - side]) for term in terms)
    if name == "div" and side == 0:
        return tuple(term.times(1 / arguments[1]) for term in terms)
    if name == "reduce_sum":
        parts = [_summed(term, tuple(params["axes"])) for term in terms]
        return _Rows(sum(parts[1:], start=parts[0]))
    if name == "transpose" and tuple(params["permutation"]) == (1, 0):
        return tuple(term.transposed() for term in terms)
    if name in ("convert_element_type", "copy"):
        return terms
    if name == "dot_general":
        return _multiplied(params["dimension_numbers"], terms, side, arguments[1 - side])
    raise NotSeparable(name)


def _few(terms: _Terms) -> _Terms:
    """The terms, with those joined that have the same outer product."""
    joined: dict[tuple[int, int], _Term] = {}
    for term in terms:
        key = id(term.a), id(term.d)
        if key in joined:
            one = jnp.ones((), term.d.dtype)
            mine, its = (one if t.u is None else t.u for t in (joined[key], term))
            term = term._replace(u=mine + its)
        joined[key] = term
    if len(joined) > MOST:
        raise NotSeparable("add")
    return tuple(joined.values())


def _summed(term: _Term, axes: tuple[int, ...]) -> Array:
    u, a, d = term
    u = None if u is None else jnp.broadcast_to(u, (a.shape[1], d.shape[1]))
    if axes == (1,):
        return a * (jnp.sum(d, axis=1, keepdims=True) if u is None else d @ u.T)
    columns = (jnp.sum(a, axis=1, keepdims=True) if u is None else a @ u) * d
    return columns if axes == (0,) else jnp.sum(columns, axis=1)


def _multiplied(numbers: Any, terms: _Terms, side: int, matrix: Array) -> _Terms:
    """The product of terms with a matrix, over one axis of each."""
    contracted, batch = numbers
    plain = matrix.ndim == 2 and all(term.u is None or term.u.ndim == 0 for term in terms)
    if any(batch) or any(len(axes) != 1 for axes in contracted) or not plain:
        raise NotSeparable("dot_general")
    (own,), (its,) = contracted[side], contracted[1 - side]
    results = []
    for term in terms:
        kept, lost = (term.a, term.d) if own == 1 else (term.d, term.a)
        result = _Term(term.u, kept, lost @ (matrix if its == 0 else matrix.T))
        results.append(result if side == 0 else result.transposed())
    return tuple(results)


def _of_rows(equation: Any, arguments: Sequence[Any]) -> Any:
    """An equation's result where inputs are rows: rows, or terms if it is broadcast to a matrix."""
    name, result = equation.primitive.name, equation.outvars[0].aval
    rows = [x.value for x in arguments if isinstance(x, _Rows)]
    if name == "broadcast_in_dim" and result.ndim == 2 and result.size > rows[0][0].size:
        shape, at = rows[0].shape[1:], equation.params["broadcast_dimensions"]
        long = [axis for n, axis in zip(shape, at, strict=True) if n > 1]
        flat = rows[0].reshape((len(rows[0]), -1))
        ones = [jnp.ones((len(flat), n), flat.dtype) for n in result.shape]
        if not long:
            return (_Term(None, ones[0] * flat, ones[1]),)
        return (_Term(None, flat, ones[1]) if long[0] == 0 else _Term(None, ones[0], flat),)
    if len(equation.outvars) != 1 or result.size > max(math.prod(x.shape[1:]) for x in rows):
        raise NotSeparable(name)
    is_row = [isinstance(x, _Rows) for x in arguments]

    def one(*own: Array) -> Array:
        given = iter(own)
        (value,) = _bind(equation, [next(given) if row else x for row, x in zip(is_row, arguments, strict=True)])
        return value

    return _Rows(jax.vmap(one)(*rows))
