"""A model: named blocks and the factors of their log-joint, which the rule takes as its objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..families.base import ExponentialFamily
from ..families.point_mass import Peak
from ..families.product import Product
from ..numerics.checks import bare
from ..objectives.base import AbstractObjective, not_separable
from ..objectives.batches import Weighted
from ..objectives.regularizers import Flat, Regularizer
from ..steps.schedule import number
from .block_view import BlockView
from .data import (
    Masked,
    Ragged,
    Rows,
    check_rows_are_complete,
    has_nonfinite,
    observed_data,
    values_of,
    zero_where_missing,
)
from .factor import Factor, prior

_FEATURES = "features of "


class InFactors(Flat):
    """No regularizer: priors are factors, and have their constants."""

    def normalized(self, q: Any) -> bool:
        return True


class Model(AbstractObjective):
    r"""$\log p(y, x) = \sum_i \log f_i(x_i)$: blocks of unknowns by name, and factors on them by name.

    `blocks` gives each block's family and where it starts; leading axes are plates. `local` blocks have a member for
    each row of the data (a mixture's assignments, a document's topics): give one row's, and the data say how many.
    The rule moves the product of all blocks; a message is a factor's derivative in a block's μ. `size` is the number
    of rows, for loops of one's own over mini-batches; `fit` reads it off the data.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> model = blr.Model(
    ...     {"mean": blr.DiagonalGaussian(0.0), "precision": blr.Gamma(1.0, 1.0)},
    ...     {
    ...         "prior mean": blr.factors.prior("mean", blr.DiagonalGaussian(0.0, 0.01)),
    ...         "prior precision": blr.factors.prior("precision", blr.Gamma(1.0, 1.0)),
    ...         "y": blr.factors.normal("y", mean="mean", precision="precision"),
    ...     },
    ... )
    >>> result = blr.fit(blr.vmp(), model, None, {"y": jnp.array([1.0, 2.0, 3.0])}, steps=30, tolerance=1e-6)
    >>> result.reason, round(float(result.q["mean"].mean), 1)
    ('converged', 2.0)
    """

    blocks: dict[str, ExponentialFamily]
    local: dict[str, ExponentialFamily]
    factors: dict[str, Factor]
    fixed: dict[str, BlockView]
    origin: PyTree
    size: int | None = eqx.field(static=True)  # rows have a shape
    regularizer: Regularizer
    aux: PyTree
    order: tuple[str, ...] = eqx.field(static=True)
    weighed: bool = eqx.field(static=True)
    part: bool = eqx.field(static=True)
    has_linear_outputs: ClassVar[bool] = False
    keeps_partial_batch: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = False

    def __init__(
        self,
        blocks: Mapping[str, ExponentialFamily],
        factors: Mapping[str, Factor],
        *,
        local: Mapping[str, ExponentialFamily] | None = None,
        size: int | None = None,
    ):
        local = {} if local is None else dict(local)
        both = set(blocks) & set(local)
        if both:
            raise ValueError(
                f"A block is either one for all rows or one for each (local=), and {sorted(both)} is both."
            )
        known = {**local, **blocks}
        wrong = {name: type(q).__name__ for name, q in known.items() if not isinstance(q, ExponentialFamily)}
        if wrong or not known:
            raise ValueError(f"A model's blocks are exponential families by name, got {wrong or 'none'}.")
        single = [name for name, q in local.items() if q.unbatchable]
        if single:
            raise ValueError(f"The block {single[0]!r} is one for all rows, not local: make a series' steps the rows.")
        if not factors:
            raise ValueError("A model needs factors: without any there is nothing to infer.")
        for name, factor in factors.items():
            if not isinstance(factor, Factor):
                raise ValueError(f"factors= are blr.Factor by name, and {name!r} is a {type(factor).__name__}.")
            unknown = [block for block in factor.blocks if block not in known]
            if unknown:
                raise ValueError(f"Factor {name!r} names the block {unknown[0]!r}, and the model has {list(known)}.")
        unused = [name for name in known if not any(name in factor.blocks for factor in factors.values())]
        if unused:
            raise ValueError(f"No factor touches the block {unused[0]!r}, so nothing is known of it: give it a prior.")
        self.blocks, self.local, self.factors = dict(blocks), local, dict(factors)
        self.fixed, self.order, self.weighed, self.part = {}, (*local, *blocks), True, False
        self.size, self.regularizer, self.aux, self.origin = size, InFactors(), None, None

    def _with(self, **changes: Any) -> Model:
        return bare(Model, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes)

    @property
    def names(self) -> tuple[str, ...]:
        """The data that the factors ask for."""
        return tuple(dict.fromkeys(name for factor in self.factors.values() for name in factor.data))

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the factors
        """Whether a factor is evaluated at random points."""
        return any(factor.random for factor in self.factors.values())

    @property
    def takes_data(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the factors
        """Whether the factors ask for data, or local blocks for rows."""
        return bool(self.names or self.local)

    # The start.

    def starting_point(self, params: Any) -> Product:
        """Every block where it starts; `params` may give other members for some of them, or all."""
        if params is not None and not isinstance(params, Product | dict):
            raise ValueError(f"A model starts from its blocks, or members by name, got {type(params).__name__}.")
        given = dict(params.blocks) if isinstance(params, Product) else dict(params or {})
        unknown = set(given) - set(self.order)
        if unknown:
            raise ValueError(f"The start names {sorted(unknown)}, and the model's blocks are {list(self.order)}.")
        if self.local and self.size is None:
            raise ValueError(
                f"The local blocks {list(self.local)} have a member for each row of the data: pass Model(…, size=N)."
            )
        for name in self.local:
            counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(given.get(name))}
            if counts - {(self.size,)}:
                raise ValueError(f"The start of the local block {name!r} needs {self.size} rows, got {sorted(counts)}.")
        own = {name: self.local_start(name, self.size) for name in self.local if self.size is not None}
        return Product({**own, **self.blocks, **given})

    def local_start(self, name: str, count: int) -> ExponentialFamily:
        """A local block where it starts, for so many rows."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), self.local[name])

    def with_size(self, rows: int) -> Model:
        """The model of so many rows, unless it was built for another number."""
        return self if self.size is not None else self._with(size=rows)

    # Rows of data.

    def rows(self, batch: PyTree) -> int:
        """How many rows the data have."""
        examples = self.taken(batch).examples
        bare = [name for name, array in examples.items() if not hasattr(array, "shape")]
        if bare:
            raise ValueError(f"The data of a model are arrays by name, and {bare[0]!r} is not an array.")
        missing = [name for name in self.names if name not in examples]
        if missing:
            raise ValueError(f"The factors ask for data {list(self.names)}, and there is no {missing[0]!r}.")
        shapes = {name: examples[name].shape for name in examples}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or () in counts:
            raise ValueError(f"The data need the same number of rows along their first axes, got {shapes}.")
        return counts.pop()[0]

    def count(self, batch: Rows) -> int | None:
        """How many rows a batch has; None without data."""
        for array in batch.examples.values():
            return array.shape[0]
        return None if batch.index is None else batch.index.shape[0]

    def taken(self, batch: PyTree) -> Rows:
        """A batch as rows: a dict of arrays, with weights, or rows already."""
        if isinstance(batch, Rows):
            return batch
        examples, weights, count = batch, None, None
        if isinstance(batch, Weighted):
            examples, weights, count = batch.examples, batch.weights, batch.count
        if examples is not None and not isinstance(examples, dict):
            raise ValueError(f"The data of a model are arrays by name, {{'y': y}}, got a {type(examples).__name__}.")
        return Rows({} if examples is None else examples, None, weights, count)

    def prepare(self, batch: PyTree) -> Rows:
        """The rows, with what the factors make of their observations."""
        rows = self.taken(batch)
        made = {
            _FEATURES + name: factor.features(observed_data(factor, rows)[0][factor.data[-1]])
            for name, factor in self.factors.items()
            if factor.features is not None
        }
        return Rows(rows.examples | made, rows.index, rows.weights, rows.count)

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> Rows:
        """Rows of the data by their numbers; padding has zero weight and a number past the last row."""
        weighted = isinstance(data, Weighted)
        examples = jax.tree.map(lambda x: x[index], data.examples if weighted else data)
        rows = self.rows(data)
        weights = is_row.astype(float) * (data.weights[index] if weighted else 1.0)
        per_row = 1.0 if not weighted or data.count is None else data.count / rows
        return Rows(examples, jnp.where(is_row, index, rows), weights, jnp.sum(is_row) * per_row)

    def scales(self, batch: Rows, rows: int) -> Float[Array, " M"]:
        """What each row's terms are multiplied by: its weight times N/M."""
        weights = jnp.ones(rows) if batch.weights is None else batch.weights
        count = rows if batch.count is None else batch.count
        return weights if self.size is None else weights * (self.size / count)

    # E log p.

    def per_row(self, factor: Factor) -> bool:
        """Whether the factor has a term for each row of the data."""
        return bool(factor.data) or any(name in self.local for name in factor.blocks)

    def given(self, names: tuple[str, ...], q: Product) -> Model:
        """The model of some blocks, the others fixed: the factors that touch them. A local block's rows stand alone."""
        factors = {name: factor for name, factor in self.factors.items() if set(names) & set(factor.blocks)}
        fixed = {name: BlockView(block) for name, block in q.blocks.items() if name not in names}
        weighed = not any(name in self.local for name in names)
        return self._with(factors=factors, fixed=fixed, weighed=weighed, part=True)

    def seen(self, q: Product, shift: dict[str, PyTree] | None = None) -> dict[str, BlockView]:
        """Every block as factors see it, those of q displaced."""
        return self.fixed | {n: BlockView(b, None if shift is None else shift[n]) for n, b in q.blocks.items()}

    def observations(self, name: str, batch: Rows) -> tuple[dict[str, Array], Array | None]:
        """A factor's data as it takes them, and which entries of what it observes there are (None: all)."""
        factor = self.factors[name]
        data, observed = observed_data(factor, batch)
        if factor.features is not None:
            made = batch.examples.get(_FEATURES + name)
            data[factor.data[-1]] = factor.features(data[factor.data[-1]]) if made is None else made
        return data, observed

    def term(self, name: str, seen: Mapping[str, BlockView], batch: Rows, key: Any) -> Array:
        """One factor's E log f, an entry for each row; 0 where the observation is missing."""
        factor = self.factors[name]
        data, observed = self.observations(name, batch)
        more = {"observed": observed} if factor.handles_missing else {}
        try:
            value = factor.value(seen, data, key, frozenset(self.local), **more)
        except (TypeError, ValueError) as error:
            blocks = {n: _shapes(seen[n].q) for n in factor.blocks}
            arrays = {n: jnp.shape(x) for n, x in data.items()}
            raise ValueError(f"Factor {name!r} on blocks {blocks} with data {arrays}: {error}") from error
        if observed is None or factor.handles_missing:
            return value
        if isinstance(batch.examples[factor.data[-1]], Ragged) and value.ndim < 2:
            return value  # a factor that adds a row's entries up sees to its filling itself
        return zero_where_missing(name, observed, value)

    def terms(self, seen: Mapping[str, BlockView], batch: PyTree, key: Any = None) -> dict[str, Array]:
        """Every factor's E log f, scaled to all of the data and summed."""
        batch = self.taken(batch)
        found = {}
        for name in self.factors:
            value = self.term(name, seen, batch, self.key_of(name, key))
            if self.weighed and self.per_row(self.factors[name]):
                value = self._weighted(name, value, batch)
            found[name] = jnp.sum(value)
        return found

    def key_of(self, name: str, key: Any) -> Any:
        """A factor's own key, if it is looked at in random places."""
        if key is None or not self.factors[name].random:
            return None
        return jax.random.fold_in(key, sorted(self.factors).index(name))

    def _weighted(self, name: str, value: Array, batch: Rows) -> Array:
        rows = self.count(batch)
        if batch.weights is None and self.size in (None, rows or self.size):
            return value
        if value.ndim == 0 or (rows is not None and value.shape[0] != rows):
            raise ValueError(
                f"Factor {name!r} returns shape {value.shape} for {rows} rows, which cannot be weighted: return an "
                "array with an entry for each row along its first axis."
            )
        scales = self.scales(batch, value.shape[0]).astype(value.dtype)
        scales = scales.reshape((-1,) + (1,) * (value.ndim - 1))
        return jnp.where(scales == 0, 0.0, scales * value)

    def expected(self, q: Product, shift: PyTree, batch: PyTree, aux: PyTree, key: Any) -> tuple[Array, PyTree]:
        """−E_q log p, its blocks displaced."""
        terms = self.terms(self.seen(q, shift), batch, key)
        return -sum(terms.values(), start=jnp.zeros(())), aux

    def entropies(self, q: Product, batch: PyTree = None) -> dict[str, Array]:
        """Every block's entropy, a local one's scaled to all of the data."""
        batch = self.taken(batch)
        found = {}
        for name, block in q.blocks.items():
            if name in self.local and self.weighed:
                value = jax.vmap(lambda row: jnp.sum(row.entropy()))(block)
                found[name] = jnp.sum(self._weighted(name, value, batch))
            else:
                found[name] = jnp.sum(block.entropy())
        return found

    def contributions(self, q: Product, data: PyTree = None, key: Any = None) -> dict[str, dict[str, Array]]:
        """What every factor (E log f) and every block (its entropy) adds to the evidence lower bound."""
        return {"factors": self.terms(self.seen(q), data, key), "blocks": self.entropies(q, data)}

    def bound(self, q: Product, data: PyTree = None, key: Any = None) -> Array:
        """The evidence lower bound, every constant included: the sum of all contributions."""
        found = self.contributions(q, data, key)
        return sum((*found["factors"].values(), *found["blocks"].values()), start=jnp.zeros(()))

    def closed_form_bound(self, q: Product, batch: PyTree, key: Any) -> Array:
        return self.bound(q, batch, key)

    def data(self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Any = None) -> tuple[Array, PyTree]:
        raise ValueError("A model is evaluated through its factors: use Exact() points with Gradient() or Sites().")

    def separable(self, needed_by: str) -> Any:
        raise not_separable(needed_by)

    # Streams.

    def after(self, q: Product, *, forgetting: float = 0.0) -> Model:
        r"""The model of what comes next: the posterior of all that rows share is the prior now, λ₀ ← λ.

        The factors that have no rows are replaced by it; new data may have any number of rows. `forgetting` mixes the
        first prior back in, $(1 − φ)λ + φλ_0$, so that what was seen t pieces ago weighs $(1−φ)^t$.
        """
        number(forgetting, "forgetting", high=1.0)
        shared = {name: factor for name, factor in self.factors.items() if not self.per_row(factor)}
        own = lambda block: block.of if isinstance(block, Peak) else block
        blocks = {name: own(q.blocks[name]) for name in self.order if name not in self.local}
        seen = {name: BlockView(block) for name, block in q.blocks.items()}

        def total(shift: PyTree) -> Array:
            moved = {name: BlockView(blocks[name], shift[name]) for name in blocks}
            values = [self.term(name, seen | moved, Rows({}, None, None), None) for name in shared]
            return sum((jnp.sum(value) for value in values), start=jnp.zeros(()))

        # The first prior of all is kept, for what is forgotten later returns to it and not to the last posterior.
        origin = jax.grad(total)({name: seen[name].shift for name in blocks}) if self.origin is None else self.origin
        mixed = lambda new, old: (1 - forgetting) * new + forgetting * old
        priors = {}
        for name, block in blocks.items():
            natural = jax.tree.map(mixed, block.natural(), block._symmetric(origin[name]))
            priors[f"{name} so far"] = prior(name, block.with_natural(natural))
        rows = {name: factor for name, factor in self.factors.items() if name not in shared}
        return self._with(blocks=blocks, factors={**priors, **rows}, size=None, origin=origin)

    # What only the data can show.

    def check_data(self, q: Product, data: PyTree) -> None:
        """Raise where the data do not go with the factors, naming the factor."""
        batch = self.taken(data)
        for name, factor in self.factors.items():
            arrays = [batch.examples[other] for other in factor.data]
            for other, array in zip(factor.data[:-1], arrays[:-1], strict=True):
                if has_nonfinite(array):
                    raise ValueError(
                        f"Factor {name!r} is given {other!r}, which has entries that are not finite: only what it "
                        f"observes, {factor.data[-1]!r}, may be missing."
                    )
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
                continue
            shape = _shaped.eval_shape(self, name, q, batch, jax.random.key(0)).shape
            if not arrays or isinstance(arrays[-1], Ragged):
                continue
            partial_rows = isinstance(arrays[-1], Masked) or np.issubdtype(values_of(arrays[-1]).dtype, np.floating)
            if partial_rows and len(shape) < len(arrays[-1].shape):
                check_rows_are_complete(name, factor.data[-1], arrays[-1], shape)

    def explain_not_finite(self, q: Product, data: PyTree) -> str:
        """Which factor's value or message is not finite, and for which block."""
        batch, zero = self.taken(data), {name: seen.shift for name, seen in self.seen(q).items()}
        for name, factor in self.factors.items():

            def total(shift: PyTree, name: str = name) -> Array:
                return jnp.sum(self.term(name, self.seen(q, shift), batch, jax.random.key(0)))

            value, slope = jax.value_and_grad(total)(zero)
            if not bool(jnp.isfinite(value)):
                return f"factor {name!r} on the blocks {list(factor.blocks)} has the value {float(value)}"
            for block in factor.blocks:
                if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(slope[block])):
                    return f"the message of factor {name!r} to the block {block!r} is not finite"
        return "every factor is finite at the last good q, and the step from there is not"

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.order, *self.factors))
        lines = [f"Model with {len(self.order)} blocks and {len(self.factors)} factors"]
        for name in self.order:
            q = (self.local | self.blocks)[name]
            lines.append(f"  {name:<{width}}  {_shapes(q)}{', one for each row' if name in self.local else ''}")
        lines.append("  log-joint, the sum of")
        lines += [f"  {name:<{width}}  E log {factor}" for name, factor in self.factors.items()]
        return "\n".join(lines)

    __repr__ = __str__


@partial(jax.jit, static_argnames="name")  # never run: traced once for all fits of the same shapes
def _shaped(model: Model, name: str, q: Product, batch: Rows, key: Any) -> Array:
    seen, data = model.seen(q), model.observations(name, batch)[0]
    return model.factors[name].entries(model.term(name, seen, batch, key), seen, data, key)


def _shapes(q: Any) -> str:
    leaves = jax.tree.leaves(q)
    return f"{type(q).__name__}{list(jnp.shape(leaves[0]))}" if leaves else type(q).__name__
