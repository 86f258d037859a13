"""Loops of unknown length that can be differentiated, and functions with their closed-over arrays as arguments.

A derivative rule of one's own (`jax.custom_jvp`) may be called long after the function was traced, so it must not close
over traced arrays: `hoist` makes them arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jaxtyping import Array

from .pytree import PyTree


def hoist(function: Callable[..., PyTree], *examples: PyTree) -> tuple[Callable[..., PyTree], list[Any]]:
    """The function with the arrays that it closes over as further arguments, and these arrays.

    `jax.closure_convert` is not enough: it leaves integers and keys where they are.

    Args:
        function: a function of pytrees of arrays.
        examples: arguments, for their shapes.

    >>> import jax.numpy as jnp
    >>> shift = jnp.array(2.0)
    >>> plus, arrays = hoist(lambda x: x + shift, 1.0)
    >>> float(plus(1.0, *arrays)), float(plus(1.0, jnp.array(5.0)))
    (3.0, 6.0)
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    structure = jax.tree.structure(shapes)

    def pure(*arguments: PyTree) -> PyTree:
        own, arrays = arguments[: len(examples)], arguments[len(examples) :]
        leaves = eval_jaxpr(closed.jaxpr, arrays, *jax.tree.leaves(own))
        return jax.tree.unflatten(structure, leaves)

    return pure, closed.consts


def bounded_while(
    unfinished: Callable[[PyTree], Array], body: Callable[[PyTree], PyTree], start: PyTree, limit: int
) -> PyTree:
    """`jax.lax.while_loop` for at most `limit` iterations, with a reverse mode.

    It is differentiated as a scan over all of them, in which those after the last one do nothing. That scan is only
    computed where there is a derivative to compute.

    Args:
        unfinished: whether to go on from a carry.
        body: one iteration.
        start: the first carry.
        limit: the largest number of iterations.

    >>> import jax
    >>> halve = lambda x: bounded_while(lambda y: y > 1, lambda y: y / 2, x, 10)
    >>> float(halve(6.0)), float(jax.grad(halve)(6.0))
    (0.75, 0.125)
    """
    (unfinished, more), (body, arrays) = hoist(unfinished, start), hoist(body, start)

    @jax.custom_jvp
    def loop(start: PyTree, more: list[Any], arrays: list[Any]) -> PyTree:
        within = lambda carry: (carry[1] < limit) & unfinished(carry[0], *more)
        return jax.lax.while_loop(within, lambda carry: (body(carry[0], *arrays), carry[1] + 1), (start, 0))[0]

    @loop.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[PyTree, PyTree]:
        def scanned(start: PyTree, more: list[Any], arrays: list[Any]) -> PyTree:
            turn = lambda carry: jax.lax.cond(unfinished(carry, *more), lambda c: body(c, *arrays), lambda c: c, carry)
            return jax.lax.scan(lambda carry, _: (turn(carry), None), start, None, length=limit)[0]

        return jax.jvp(scanned, primals, tangents)

    return loop(start, more, arrays)


def computed_after(value: Array, flag: Array) -> Array:
    """The value itself, which XLA cannot compute before the flag.

    A program that updates a state in place must have read the old state before: XLA copies what is still to be read by
    something that the update does not depend on, such as a diagnosis of the step. Where the update depends on the
    diagnosis, in form only, no copy is made. (The factor is 1 for both values of the flag, which XLA does not know.)
    """
    return value * (1 - 1e-30 * flag.astype(value.dtype))
