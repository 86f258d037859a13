"""Checks of arguments, with one form of message for each kind: parameters of a family, whole and positive numbers."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .trees import broadcast


def arrays(owner: type, ranks: tuple[int, ...] | None, **values: Any) -> list[Array]:
    """Convert a family's parameters to floating arrays of one dtype, with their batch axes broadcast.

    >>> [x.shape for x in arrays(object, (0, 1), rate=2, mean=[[1.0, 2.0]] * 5)]
    [(5,), (5, 2)]

    Args:
        owner: the family's class, named in errors.
        ranks: how many of the last axes of each value belong to one distribution; None means 0 for all.
        values: the parameters by name.

    Raises:
        ValueError: if a value has fewer axes than its rank, or the batch axes do not broadcast.
    """
    converted = [jnp.asarray(value) for value in values.values()]
    ranks = ranks or (0,) * len(converted)
    dtype = jnp.result_type(*converted)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(dtype, 1.0)
    for name, value, rank in zip(values, converted, ranks, strict=True):
        if value.ndim < rank or (rank == 2 and value.shape[-1] != value.shape[-2]):
            kind = {1: "a vector", 2: "a square matrix"}[rank]
            raise ValueError(
                f"{owner.__name__}'s {name} must be {kind} (after any batch axes), got shape {value.shape}."
            )
    batch_ndims = [value.ndim - rank for value, rank in zip(converted, ranks, strict=True)]
    try:
        batch = jnp.broadcast_shapes(*(value.shape[:at] for value, at in zip(converted, batch_ndims, strict=True)))
    except ValueError:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(values, converted, strict=True))
        raise ValueError(
            f"{owner.__name__}'s parameters do not broadcast against each other: {shapes}. "
            "Give each the same leading (batch) axes, or none."
        ) from None
    return [
        broadcast(value.astype(dtype), batch + value.shape[at:])
        for value, at in zip(converted, batch_ndims, strict=True)
    ]


def above(owner: type, bound: float, **values: Array) -> None:
    """Raise unless every concrete value is above `bound`; traced values are left to the family's `inside`."""
    for name, value in values.items():
        if not isinstance(value, Tracer) and not np.all(np.asarray(value) > bound):
            raise ValueError(f"{owner.__name__}'s {name} must be above {bound:g} everywhere, got {value}.")


def bare(cls: type, **fields: Any) -> Any:
    """Make a member without the checks of `__init__`, so that a λ outside Ω can be carried until `inside` is asked."""
    member = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(member, name, value)
    return member


def is_positive_int(value: Any) -> bool:
    """Whether the value is an integer (Python's or NumPy's, not a bool) of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def positive_int(name: str, value: Any, *, meaning: str = "", alternatives: str = "") -> int:
    """Return the argument as an `int`, or raise unless it is an integer of at least 1.

    >>> positive_int("steps", 0, meaning="how far to look ahead")
    Traceback (most recent call last):
    ValueError: steps= (how far to look ahead) is a whole number above 0, got 0.

    Args:
        name: the argument's name, as the caller wrote it.
        value: the argument.
        meaning: what the argument counts, for the error.
        alternatives: other values that the caller accepts and has ruled out already, such as '"auto"'.
    """
    if not is_positive_int(value):
        raise ValueError(_demand(name, meaning, alternatives, "a whole number above 0", value))
    return int(value)


def nonnegative_int(name: str, value: Any, *, meaning: str = "") -> int:
    """Return the argument as an `int`, or raise unless it is an integer of at least 0."""
    if not (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0):
        raise ValueError(_demand(name, meaning, "", "a whole number of at least 0", value))
    return int(value)


def positive_number(name: str, value: Any, *, meaning: str = "", alternatives: str = "") -> float:
    """Return the argument as a `float`, or raise unless it is a finite real number above 0."""
    real = isinstance(value, Real) or getattr(value, "ndim", None) == 0
    if isinstance(value, bool) or not real or not 0 < float(value) < math.inf:
        raise ValueError(_demand(name, meaning, alternatives, "a positive number", value))
    return float(value)


def _demand(name: str, meaning: str, alternatives: str, kind: str, value: Any) -> str:
    """The one form of these messages: what the argument is, what it must be, and what it was."""
    explained = f" ({meaning})" if meaning else ""
    choices = f"{kind} or {alternatives}" if alternatives else kind
    return f"{name}={explained} is {choices}, got {value!r}."
