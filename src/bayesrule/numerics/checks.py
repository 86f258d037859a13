"""Parameters as they come in: floating arrays of one dtype, their leading axes broadcast, signs checked."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array


def arrays(owner: type, ranks: tuple[int, ...] | None, **values: Any) -> list[Array]:
    """The values as arrays; the last `rank` axes of each belong to one distribution, the rest broadcast.

    >>> [x.shape for x in arrays(object, (0, 1), rate=2, mean=[[1.0, 2.0]] * 5)]
    [(5,), (5, 2)]
    """
    found = [jnp.asarray(value) for value in values.values()]
    ranks = ranks or (0,) * len(found)
    dtype = jnp.result_type(*found)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(dtype, 1.0)
    for name, value, rank in zip(values, found, ranks, strict=True):
        if value.ndim < rank or (rank == 2 and value.shape[-1] != value.shape[-2]):
            kind = {1: "a vector", 2: "a square matrix"}[rank]
            raise ValueError(
                f"{owner.__name__}'s {name} must be {kind} (after any batch axes), got shape {value.shape}."
            )
    split = [value.ndim - rank for value, rank in zip(found, ranks, strict=True)]
    try:
        batch = jnp.broadcast_shapes(*(value.shape[:at] for value, at in zip(found, split, strict=True)))
    except ValueError:
        shapes = ", ".join(f"{name} {value.shape}" for name, value in zip(values, found, strict=True))
        raise ValueError(
            f"{owner.__name__}'s parameters do not broadcast against each other: {shapes}. "
            "Give each the same leading (batch) axes, or none."
        ) from None
    return [
        jnp.broadcast_to(value.astype(dtype), batch + value.shape[at:]) for value, at in zip(found, split, strict=True)
    ]


def above(owner: type, bound: float, **values: Array) -> None:
    """Raise where a concrete value is not above `bound`; traced values are judged by `inside`."""
    for name, value in values.items():
        if not isinstance(value, Tracer) and not bool(jnp.all(value > bound)):
            raise ValueError(f"{owner.__name__}'s {name} must be above {bound:g} everywhere, got {value}.")


def bare(cls: type, **fields: Any) -> Any:
    """A member whose fields are not checked, so that λ outside Ω can be carried to `inside`."""
    member = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(member, name, value)
    return member
