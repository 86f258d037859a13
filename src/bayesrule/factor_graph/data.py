"""Rows of data by name: which they are, how they weigh, and which entries were observed."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .factor import Factor


class Masked(eqx.Module):
    """Data of which only some entries were observed; for floats, NaN says the same."""

    values: Array
    observed: Bool[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.values)


class Ragged(eqx.Module):
    """Rows of different lengths, filled up to the longest: (N, L, …) values, of which the first `lengths` count.

    The filling is missing to a factor with a term for each entry; one that adds a row's entries up itself (`words`)
    must have it count for nothing. Where a sweep settles local blocks in groups, a group of short rows is cut to a
    shorter width.
    """

    values: Array
    lengths: Int[Array, " N"]

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.values)

    def cut(self, width: int) -> Ragged:
        """The same rows, none of which is longer than that."""
        return Ragged(self.values[:, :width], self.lengths)


class Rows(eqx.Module):
    """Some rows of the data: the arrays, where the rows come from, their weights, and how many they stand for."""

    examples: dict[str, Any]
    index: Int[Array, " M"] | None = None
    weights: Float[Array, " M"] | None = None
    count: Any = None


def observed_part(factor: Factor, batch: Rows) -> tuple[dict[str, Array], Array | None]:
    """A factor's data, with something in the place of what is missing, and which entries were observed."""
    data = {name: batch.examples[name] for name in factor.data}
    observed = None
    if factor.data:
        data[factor.data[-1]], observed = _split(data[factor.data[-1]])
    bare = lambda x: jnp.asarray(x.values if isinstance(x, Ragged) else x)
    return {name: bare(x) for name, x in data.items()}, observed


def values_of(array: Any) -> Any:
    return np.asarray(array.values if isinstance(array, Masked | Ragged) else array)


def missing(array: Any) -> bool:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(array)):
        return False
    values = values_of(array)
    return np.issubdtype(values.dtype, np.floating) and not np.all(np.isfinite(values))


def whole_or_absent(name: str, observed: str, array: Any, shape: tuple[int, ...]) -> None:
    """A row that a factor takes whole is observed whole or not at all."""
    found = np.asarray(array.observed) if isinstance(array, Masked) else ~np.isnan(values_of(array))
    parts = found.reshape((*found.shape[: len(shape)], -1))
    if np.any(parts.any(-1) & ~parts.all(-1)):
        raise ValueError(
            f"Factor {name!r} takes each row of {observed!r} whole, and some rows are missing in part: drop those "
            "rows, or use a factor with a term for each entry."
        )


def _split(array: Any) -> tuple[Array, Array | None]:
    """The observations, with something observed in the place of what is missing, and which were observed."""
    if isinstance(array, Ragged):
        values = jnp.asarray(array.values)
        return values, jnp.arange(values.shape[1]) < jnp.asarray(array.lengths)[:, None]
    if isinstance(array, Masked):
        values, observed = jnp.asarray(array.values), jnp.asarray(array.observed)
    else:
        values = jnp.asarray(array)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            return values, None
        observed = ~jnp.isnan(values)
    first = values.reshape(-1)[jnp.argmax(observed.reshape(-1))]
    filler = jnp.where(jnp.any(observed), first, jnp.ones((), values.dtype))
    return jnp.where(observed, values, filler), observed


def where_observed(name: str, observed: Array, value: Array) -> Array:
    if value.ndim == 0:
        return jnp.where(jnp.all(observed), value, jnp.nan)
    if observed.ndim > value.ndim:
        observed = jnp.all(observed, axis=tuple(range(value.ndim, observed.ndim)))
    observed = observed.reshape(observed.shape + (1,) * (value.ndim - observed.ndim))
    if jnp.broadcast_shapes(observed.shape, value.shape) != value.shape:
        raise ValueError(f"Factor {name!r} returns shape {value.shape} for observations of shape {observed.shape}.")
    return jnp.where(observed, value, 0.0)
