"""Rows of data by name: which rows they are, how they are weighted, and which of their entries were observed.

The data of a model are a dict of arrays with one row for each example. What a factor observes, the last of its arrays,
may have missing entries: NaN in a float array, or a mask (`Masked`). `observed_data` separates such an array into
values that are all finite and a mask, so that a factor never computes with NaN, whose derivative would be NaN even
where the result is replaced by 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .factor import Factor


class Masked(eqx.Module):
    """Data of which only some entries were observed. For floats NaN has the same meaning; integers need this.

    Args:
        values: the data, anything where not observed.
        observed: a mask in the shape of the values.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> tosses = blr.Masked(jnp.array([1, 1, 0, 0]), jnp.array([True, True, True, False]))       # the last was not seen
    >>> p = blr.Beta(1.0, 1.0)
    >>> factors = {"prior": blr.factors.prior("p", p), "y": blr.factors.bernoulli("y", probability="p")}
    >>> q = blr.fit(blr.conjugate(), blr.Model({"p": p}, factors), None, {"y": tosses}, steps=1).q
    >>> float(q["p"].a), float(q["p"].b)
    (3.0, 2.0)
    """

    values: Array
    observed: Bool[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.values)


class Ragged(eqx.Module):
    """Rows of different lengths, padded to the longest.

    The padding is missing for a factor that returns a term for each entry. A factor that sums over a row's entries
    itself (`words`) must make the padding's terms 0. Where a sweep iterates local blocks in groups of rows, a group of
    short rows is cut to a smaller width.

    Args:
        values: (N, L, …), of which the first `lengths` entries of each row count.
        lengths: the number of entries of each row.

    >>> import jax.numpy as jnp
    >>> rows = Ragged(jnp.array([[4, 1, 7], [2, 0, 0]]), jnp.array([3, 1]))                       # of lengths 3 and 1
    >>> rows.shape, Ragged(rows.values[1:], rows.lengths[1:]).cut(1).values.tolist()
    ((2, 3), [[2]])
    """

    values: Array
    lengths: Int[Array, " N"]

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.shape(self.values)

    def cut(self, width: int) -> Ragged:
        """The same rows padded to `width` only; none may be longer."""
        return Ragged(self.values[:, :width], self.lengths)


class Rows(eqx.Module):
    """Some rows of the data, as a model takes them.

    Args:
        examples: the arrays by name, with M rows each.
        index: which rows of the full data these are; None if they are all of it, or if it does not matter.
        weights: a factor for each row's terms; 0 for padding.
        count: how many rows the weights stand for, M by default: the terms are scaled by N / count.
        padding: how many rows at the end are no rows of the data, as in `Weighted`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> r = blr.Gamma(2.0, 1.0)
    >>> factors = {"prior": blr.factors.prior("r", r), "y": blr.factors.poisson("y", rate="r")}
    >>> model, rule = blr.Model({"r": r}, factors, size=4), blr.conjugate()
    >>> batch = blr.Rows({"y": jnp.array([3.0, 5.0])}, weights=jnp.array([1.0, 0.5]))         # 2 of 4 rows, one by half
    >>> state, _ = rule.step(model, rule.init(None, model), batch, None)
    >>> float(state.q["r"].shape), float(state.q["r"].rate)                                   # 2 + 2·5.5 and 1 + 2·1.5
    (13.0, 4.0)
    """

    examples: dict[str, Any]
    index: Int[Array, " M"] | None = None
    weights: Float[Array, " M"] | np.ndarray | None = None
    count: Any = None
    padding: int = eqx.field(static=True, default=0)

    def rows_alone(self) -> Rows:
        """The rows without the padding."""
        if not self.padding:
            return self
        cut = lambda tree: jax.tree.map(lambda x: x[: -self.padding], tree)
        return Rows(cut(self.examples), cut(self.index), cut(self.weights), self.count)

    def shapes_of_rows(self) -> Rows:
        """The shapes and types of the rows without the padding; nothing is computed."""
        return jax.eval_shape(Rows.rows_alone, self) if self.padding else self


def observed_data(factor: Factor, batch: Rows) -> tuple[dict[str, Array], Array | None]:
    """A factor's arrays, every missing entry replaced by an observed value, and a mask of the observed entries.

    The mask has the shape of the last array (its first two axes for `Ragged` rows), and is None if nothing can be
    missing.
    """
    data = {name: batch.examples[name] for name in factor.data}
    observed = None
    if factor.data:
        data[factor.data[-1]], observed = _split(data[factor.data[-1]])
    to_array = lambda x: jnp.asarray(x.values if isinstance(x, Ragged) else x)
    return {name: to_array(x) for name, x in data.items()}, observed


def values_of(array: Any) -> Any:
    """The values of a plain, `Masked` or `Ragged` array, in NumPy; of one that several processes have, the own rows."""
    return _own_rows(array.values if isinstance(array, Masked | Ragged) else array)


def _own_rows(array: Any) -> np.ndarray:
    """The rows of an array that are in this process's memory: all of them, unless it is one of several processes."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def has_nonfinite(array: Any) -> bool:
    """Whether a float array has an entry that is not finite; False where that is not known yet, under `jit`."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(array)):
        return False
    values = values_of(array)
    return np.issubdtype(values.dtype, np.floating) and not np.all(np.isfinite(values))


def check_rows_are_complete(name: str, observed: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise if a row is missing in part where the factor has one term for all of it.

    Args:
        name: the factor's name.
        observed: the name of what it observes.
        array: the observations.
        shape: the shape of the factor's value: axes of the array beyond these are summed over within a term.
    """
    mask = _own_rows(array.observed) if isinstance(array, Masked) else ~np.isnan(values_of(array))
    if np.all(mask):  # Much faster than one answer for each row.
        return
    parts = mask.reshape((*mask.shape[: len(shape)], math.prod(mask.shape[len(shape) :])))
    if np.any(parts.any(-1) & ~parts.all(-1)):
        raise ValueError(
            f"Factor {name!r} takes each row of {observed!r} whole, and some rows are missing in part: drop those "
            "rows, or use a factor with a term for each entry."
        )


class Patterns(NamedTuple):
    """Rows of which some are missing in part: what `Factor.for_missing_entries` and the factor that it returns take.

    Attributes:
        observed: which entries of a row are observed, all combinations that occur, (P, D).
        numbers: the number of each row's combination.
        rows: the rows, 0 in the place of missing entries; a row counts as observed where any of its entries is.
    """

    observed: np.ndarray
    numbers: Array
    rows: Masked


def find_patterns(array: Any) -> Patterns | None:
    """The combinations of observed entries; None if each row (the last axis) is observed or missing as a whole.

    None too where that is not known yet, under `jit`.
    """
    is_tracer = any(isinstance(x, Tracer) for x in jax.tree.leaves(array))
    if is_tracer or isinstance(array, Ragged) or len(array.shape) < 2:
        return None
    values = values_of(array)
    if not isinstance(array, Masked) and not np.issubdtype(values.dtype, np.floating):
        return None
    mask = _own_rows(array.observed) if isinstance(array, Masked) else ~np.isnan(values)
    if np.all(mask):
        return None
    some, every = np.asarray(mask.any(-1)), np.asarray(mask.all(-1))
    if np.array_equal(some, every):
        return None
    if values.shape != array.shape:
        raise ValueError(
            "Some rows are missing in part, and every process sees its own rows alone, so that they cannot agree on "
            "the combinations of missing entries: fit in one process, or leave such rows out."
        )
    observed, numbers = np.unique(mask[some], axis=0, return_inverse=True)
    index = np.zeros(some.shape, np.int32)  # A row without any entry has the number of some pattern, and no term.
    index[some] = numbers.reshape(-1)
    rows = Masked(jnp.asarray(np.where(mask, values, 0)), jnp.asarray(np.repeat(some[..., None], mask.shape[-1], -1)))
    return Patterns(observed, jnp.asarray(index), rows)


def _split(array: Any) -> tuple[Array, Array | None]:
    """The observations, every missing entry replaced by one that was observed, and the mask of the observed ones."""
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
    if not values.size:  # A model without rows: the posterior is the prior.
        return values, observed
    # An observed value is inside the likelihood's support, which a constant (0 for a Poisson rate, say) may not be.
    first = values.reshape(-1)[jnp.argmax(observed.reshape(-1))]
    replacement = jnp.where(jnp.any(observed), first, jnp.ones((), values.dtype))
    return jnp.where(observed, values, replacement), observed


def zero_where_missing(name: str, observed: Array, value: Array) -> Array:
    """A factor's value with 0 in the terms whose observations are missing.

    A term of several entries needs all of them: it is NaN if some are missing (see `Model.for_data`). A value that is
    one number for all rows cannot be corrected: it is NaN if anything is missing.
    """
    if value.ndim == 0:
        return jnp.where(jnp.all(observed), value, jnp.nan)
    if observed.ndim > value.ndim:
        axes = tuple(range(value.ndim, observed.ndim))
        some, observed = jnp.any(observed, axis=axes), jnp.all(observed, axis=axes)
        in_part = (some & ~observed).reshape(some.shape + (1,) * (value.ndim - some.ndim))
        value = jnp.where(in_part, jnp.nan, value)
        observed = some
    observed = observed.reshape(observed.shape + (1,) * (value.ndim - observed.ndim))
    if jnp.broadcast_shapes(observed.shape, value.shape) != value.shape:
        raise ValueError(
            f"Factor {name!r} returns shape {value.shape} for observations of shape {observed.shape}, so that missing "
            "ones have no term of their own: return an entry for each row along the first axis."
        )
    return jnp.where(observed, value, 0.0)
