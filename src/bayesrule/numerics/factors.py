"""Factors and inverses of matrices that several parts of one program ask for, computed once.

The moments of a Gaussian, its entropy, the guard that checks its precision and the step all need the same factor. XLA
merges equal arithmetic but not equal triangular solves, and would solve as often as it is asked to. So while a function
is traced under `shared_factors`, what was computed of an array is remembered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg as linalg
from jax.core import Tracer, trace_ctx
from jaxtyping import Array, Float


class _Scope(threading.local):
    """What was computed of traced arrays, by their identity (they have no hash), and the arrays; None outside."""

    known: dict[int, tuple[Array, list[tuple[str, Any]]]] | None = None


_scope = _Scope()


@contextmanager
def shared_factors() -> Generator[None]:
    """A context in which a factor that was computed of a traced array is not computed again."""
    if _scope.known is not None:
        yield
        return
    _scope.known = {}
    try:
        yield
    finally:
        _scope.known = None  # Traced arrays must not outlive their trace.


def recall(matrix: Array, **results: Array) -> None:
    """Take results as known for a traced array, by the names of the functions that would compute them."""
    if _scope.known is not None and isinstance(matrix, Tracer):
        _scope.known.setdefault(id(matrix), (matrix, []))[1].extend(results.items())


def _once(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function of one array, which returns what it returned before for the same traced array."""

    @wraps(function)
    def remembered(matrix: Array) -> Array:
        if _scope.known is None or not isinstance(matrix, Tracer):
            return function(matrix)
        results = _scope.known.setdefault(id(matrix), (matrix, []))[1]
        traces = _traces_under_way()
        for name, value in results:
            # A value from a branch or a loop whose trace has ended must not be used outside of it.
            if name == function.__name__ and any(getattr(value, "_trace", None) is trace for trace in traces):
                return value
        value = function(matrix)
        if isinstance(value, Tracer):
            results.append((function.__name__, value))
        return value

    return remembered


def _traces_under_way() -> list[Any]:
    """The current trace and those around it."""
    traces, trace = [], trace_ctx.trace
    while trace is not None:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


@_once
def cholesky(matrix: Float[Array, "... P P"]) -> Float[Array, "... P P"]:
    """The lower Cholesky factor."""
    return jnp.linalg.cholesky(matrix)


@_once
def inverse(matrix: Float[Array, "... P P"]) -> Float[Array, "... P P"]:
    """The inverse of a symmetric positive-definite matrix, by its Cholesky factor."""
    factor = cholesky(matrix)
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return linalg.cho_solve((factor, True), identity)
