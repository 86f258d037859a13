r"""A model: named blocks and the factors of their log-joint, an objective that is a function of q's blocks.

For the rule a model is $\bar ℓ = −\log p(y, x)$ with $E_q\bar ℓ = −\sum_iE_q\log f_i$ written in the expectation
parameters of q's blocks, which are independent under q. Its gradient in μ is the sum of the factors' messages, one
`jax.grad` in the displacement δ of the blocks' views. So the update of section 5 is the ordinary one,

    λ_j ← (1 − ρ) λ_j + ρ Σ_i ∇_{μ_j} E_q log f_i,

taken for all blocks at once, or block by block on the model with the other blocks fixed (`conditional_on`).
"""

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
from jaxtyping import Array, Bool, Float, Int

from ..families.base import ExponentialFamily, Family
from ..families.dirichlet import Beta, Dirichlet
from ..families.gamma import Gamma, NormalGamma
from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from ..families.point_mass import Peak
from ..families.product import Product
from ..families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from ..families.wishart import NormalWishart, Wishart
from ..numerics.checks import bare
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import broadcast
from ..objectives.base import AbstractObjective, not_separable
from ..objectives.batches import Weighted
from ..objectives.regularizers import Flat, Regularizer
from ..points.base import Points
from ..points.quadrature import Quadrature
from ..points.sampling import QuasiMonteCarlo
from ..steps.schedule import number
from .block_expectation import expected
from .block_view import BlockView, MixtureView, view_of
from .data import (
    Masked,
    Ragged,
    Rows,
    check_rows_are_complete,
    find_patterns,
    has_nonfinite,
    observed_data,
    values_of,
    zero_where_missing,
)
from .factor import Factor, prior

_GRID_ORDERS = {1: 64, 2: 24, 3: 12}  # nodes of E log r_z in each dimension of a mixture block
_SCATTERED = 512  # and how many scattered points in more dimensions
_PREPARED = "prepared for "  # the prefix under which `prepare` adds to the data what a factor computes once


class PriorsInFactors(Flat):
    """No regularizer: the priors of a model are factors, whose constants are in the bound.

    Args:
        without: the names of the blocks that have no prior, whose bound is one up to a constant. A point mass, such as
            EM's, needs none: its bound is a likelihood.
    """

    without: tuple[str, ...] = eqx.field(static=True, default=())

    def normalized(self, q: Family) -> bool:
        blocks = getattr(q, "blocks", {})
        return all(isinstance(blocks.get(name), Peak) for name in self.without)


class Model(AbstractObjective[Product]):
    r"""$\log p(y, x) = \sum_i \log f_i(x_i)$: blocks of unknowns by name, and factors on them by name.

    The rule moves the product of all blocks. A factor's message to a block is the derivative of E log f in the block's
    μ; a factor without local blocks or data has one, a factor with rows one for each row. Mini-batches are scaled by
    N/M, except for the messages to local blocks, each of which has only its own row's.

    Args:
        blocks: each block's family by name, and the member that it starts from; leading axes are plates. A `Mixture` of
            Gaussians is a block without plates: E log f is averaged over its components, and its entropy is integrated
            on a grid in up to three dimensions, at 512 evenly spaced points in more.
        factors: the terms of the log-joint by name: `blr.Factor`, or the ready-made ones of `bayesrule.factors`.
        local: blocks with a member for each row of the data (a mixture's assignments, a document's topics): give one
            row's member, from which all rows start.
        size: N, the number of rows, for mini-batch loops of your own; `fit` takes it from the data.

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
    fixed_views: dict[str, BlockView]
    """The blocks that `conditional_on` holds fixed; they are no part of q."""
    first_prior: PyTree
    """The natural parameters of the priors before the first `after`, to which forgetting returns; None before it."""
    size: int | None = eqx.field(static=True)  # static, because local blocks have it in their shapes
    regularizer: Regularizer
    aux: PyTree
    order: tuple[str, ...] = eqx.field(static=True)
    """The names of all blocks, local ones first: the order in which a sweep visits them."""
    scales_rows: bool = eqx.field(static=True)
    """Whether rows are weighted and scaled from a batch to all; not in the conditional model of local blocks."""
    is_conditional: bool = eqx.field(static=True)
    """Whether `conditional_on` made it, for the step of one group of blocks."""
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
        wrong = {name: type(q).__name__ for name, q in known.items() if not isinstance(q, ExponentialFamily | Mixture)}
        if wrong or not known:
            raise ValueError(
                f"A model's blocks are exponential families, or mixtures of Gaussians, by name, got {wrong or 'none'}."
            )
        _check_mixtures(blocks, local)
        single = [name for name, q in local.items() if q.unbatchable]
        if single:
            kind = type(local[single[0]]).__name__
            raise ValueError(
                f"Block {single[0]!r} ({kind}) cannot be local: it already spans all steps of a series. Pass it in "
                "`blocks`, and let each row of the data be one step."
            )
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
            raise ValueError(
                f"No factor touches the block {unused[0]!r}, so there is nothing to infer it from: give it a prior."
            )
        self.blocks, self.local, self.factors = dict(blocks), local, dict(factors)
        self.order, self.size, self.aux = (*local, *blocks), size, None
        self.regularizer = PriorsInFactors(_without_prior(known, self.factors))
        self.fixed_views, self.scales_rows, self.is_conditional, self.first_prior = {}, True, False, None

    def _with(self, **changes: Any) -> Model:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes
        if "factors" in changes and not fields["is_conditional"]:
            known = {**fields["local"], **fields["blocks"]}
            fields["regularizer"] = PriorsInFactors(_without_prior(known, fields["factors"]))
        return bare(Model, **fields)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays that the factors take."""
        return tuple(dict.fromkeys(name for factor in self.factors.values() for name in factor.data))

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the factors
        """Whether a factor is evaluated at random points."""
        return any(factor.random for factor in self.factors.values())

    def judges_steps(self, batch: PyTree) -> bool:
        """Whether the bound on this batch says if a step was good: on all rows, and at points that do not change.

        It does not if a factor is integrated by the delta method: the fixed point of its messages is Newton's or
        Laplace's, and not the maximum of the bound.
        """
        return not (self.random or self.second_order or self.batch_rows(batch).index is not None)

    @property
    def second_order(self) -> bool:
        """Whether a factor is integrated by the delta method."""
        return any(factor.second_order for factor in self.factors.values())

    @property
    def takes_data(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the factors
        """Whether the factors ask for data, or local blocks for rows."""
        return bool(self.names or self.local)

    # The start.

    def starting_point(self, params: Any) -> Product:
        """The product of all blocks where they start; `params` may give other members for some or all of them."""
        if params is not None and not isinstance(params, Product | dict):
            raise ValueError(f"A model starts from its blocks, or members by name, got {type(params).__name__}.")
        replaced = dict(params.blocks) if isinstance(params, Product) else dict(params or {})
        unknown = set(replaced) - set(self.order)
        if unknown:
            raise ValueError(f"The start names {sorted(unknown)}, and the model's blocks are {list(self.order)}.")
        if self.local and self.size is None:
            raise ValueError(
                f"The local blocks {list(self.local)} have a member for each row of the data: pass Model(…, size=N)."
            )
        for name in self.local:
            counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(replaced.get(name))}
            if counts - {(self.size,)}:
                raise ValueError(f"The start of the local block {name!r} needs {self.size} rows, got {sorted(counts)}.")
        local = {name: self.local_start(name, self.size) for name in self.local if self.size is not None}
        return Product({**local, **self.blocks, **replaced})

    def local_start(self, name: str, count: int) -> ExponentialFamily:
        """A local block with `count` rows, all where they start."""
        return jax.tree.map(lambda x: broadcast(x, (count, *jnp.shape(x))), self.local[name])

    def with_size(self, rows: int) -> Model:
        """The model with N = `rows`, unless it was built with a size."""
        return self if self.size is not None else self._with(size=rows)

    # Rows of data.

    def share(self, batch: PyTree) -> Any:
        return None if self.size is None or not self.takes_data else self.rows(batch) / self.size

    def rows(self, batch: PyTree) -> int:
        """How many rows the data have. Raises where arrays are missing or differ in their number of rows."""
        examples = self.batch_rows(batch).examples
        not_arrays = [name for name, array in examples.items() if not hasattr(array, "shape")]
        if not_arrays:
            raise ValueError(f"The data of a model are arrays by name, and {not_arrays[0]!r} is not an array.")
        missing = [name for name in self.names if name not in examples]
        if missing:
            raise ValueError(f"The factors ask for data {list(self.names)}, and there is no {missing[0]!r}.")
        shapes = {name: examples[name].shape for name in examples}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or () in counts:
            raise ValueError(f"The data need the same number of rows along their first axes, got {shapes}.")
        count = counts.pop()[0]
        if not count and self.local:
            raise ValueError(
                f"The data have no rows, and the local blocks {list(self.local)} have a member for each row: there is "
                "nothing to fit. The posterior of the other blocks is their prior."
            )
        return count

    def for_data(self, data: PyTree) -> tuple[Model, PyTree]:
        """The model and the data where some rows are missing in part; both as they are if none is.

        A factor with one term for several entries of a row, a Gaussian with a full precision, is replaced by one that
        integrates the missing entries out (`Factor.for_missing_entries`), and reads rows and their patterns. `fit` does
        this; call it, outside of `jit`, before a loop of your own over such data.
        """
        examples, changed, factors = self.batch_rows(data).examples, {}, {}
        for name, factor in self.factors.items():
            found = find_patterns(examples[factor.data[-1]]) if factor.data else None
            if found is None:
                continue
            names = f"pattern of {factor.data[-1]}", f"observed part of {factor.data[-1]}"
            adapted = factor.for_missing_entries(jnp.asarray(found.observed), names)
            if adapted is not None:
                factors[name] = adapted
                changed |= dict(zip(names, (found.numbers, found.rows), strict=True))
        if not factors:
            return self, data
        examples = examples | changed
        adapted_data = dataclasses.replace(data, examples=examples) if isinstance(data, Weighted) else examples
        return self._with(factors=self.factors | factors), adapted_data

    def row_count(self, batch: Rows) -> int | None:
        """How many rows a batch has; None without data. Unlike `rows` it checks nothing."""
        for array in batch.examples.values():
            return array.shape[0]
        return None if batch.index is None else batch.index.shape[0]

    def batch_rows(self, batch: PyTree) -> Rows:
        """A batch as `Rows`: from a dict of arrays, from `Weighted` ones, from None, or from `Rows`."""
        if isinstance(batch, Rows):
            return batch
        examples, weights, count, padding = batch, None, None, 0
        if isinstance(batch, Weighted):
            examples, weights, count, padding = batch.examples, batch.weights, batch.count, batch.padding
        if examples is not None and not isinstance(examples, dict):
            raise ValueError(f"The data of a model are arrays by name, {{'y': y}}, got a {type(examples).__name__}.")
        return Rows({} if examples is None else examples, None, weights, count, padding)

    def prepare(self, batch: PyTree) -> Rows:
        """The rows with what the factors compute of them once, so that a loop over steps does not compute it again."""
        rows = self.batch_rows(batch)
        prepared = {
            _prepared_name(name, array): value
            for name, factor in self.factors.items()
            for array, value in factor.prepared(observed_data(factor, rows)[0]).items()
        }
        return dataclasses.replace(rows, examples=rows.examples | prepared)

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> Rows:
        """Rows of the data by their numbers; padding has zero weight and a number past the last row."""
        weighted = isinstance(data, Weighted)
        examples = jax.tree.map(lambda x: x[index], data.examples if weighted else data)
        rows = self.rows(data)
        weights = is_row.astype(float) * (data.weights[index] if weighted else 1.0)
        per_row = 1.0 if not weighted or data.count is None else data.count / (rows - data.padding)
        return Rows(examples, jnp.where(is_row, index, rows), weights, jnp.sum(is_row) * per_row)

    def row_scales(self, batch: Rows, rows: int) -> Float[Array, " M"]:
        """By what each row's terms are multiplied: its weight times N/M."""
        weights: Any = jnp.ones(rows) if batch.weights is None else batch.weights
        count = rows - batch.padding if batch.count is None else batch.count
        return weights if self.size is None else weights * (self.size / count)

    # E log p.

    def per_row(self, factor: Factor) -> bool:
        """Whether the factor has a term for each row of the data."""
        return bool(factor.data) or any(name in self.local for name in factor.blocks)

    def conditional_on(self, names: tuple[str, ...], q: Product) -> Model:
        """The model of the blocks `names`, for fixed members of the others in q.

        It has the factors that touch these blocks, so that its gradient costs no more than their messages. The step of
        a sweep is a step on it. If a block is local, its rows are neither weighted nor scaled: each row's member gets
        its own row's messages, whatever the batch.
        """
        factors = {name: factor for name, factor in self.factors.items() if set(names) & set(factor.blocks)}
        fixed = {name: view_of(block) for name, block in q.blocks.items() if name not in names}
        shared = not any(name in self.local for name in names)
        return self._with(factors=factors, fixed_views=fixed, scales_rows=shared, is_conditional=True)

    def views(self, q: Product, shift: dict[str, PyTree] | None = None) -> dict[str, BlockView]:
        """A view of every block for the factors: those of q displaced by `shift` (None: not at all), and fixed ones."""
        return self.fixed_views | {n: view_of(b, None if shift is None else shift[n]) for n, b in q.blocks.items()}

    def observations(self, name: str, batch: Rows) -> tuple[dict[str, Array], Array | None]:
        """A factor's data as `Factor.value` takes them, and a mask of what was observed (None: all of it)."""
        factor = self.factors[name]
        data, observed = observed_data(factor, batch)
        prefix = _prepared_name(name, "")
        prepared = {k.removeprefix(prefix): array for k, array in batch.examples.items() if k.startswith(prefix)}
        return data | (prepared or factor.prepared(data)), observed

    def term(self, name: str, views: Mapping[str, BlockView], batch: Rows, key: Key | None) -> Array:
        """One factor's E log f, an entry for each row; 0 where the observation is missing."""
        factor = self.factors[name]
        data, observed = self.observations(name, batch)
        mask = {"observed": observed} if factor.handles_missing else {}
        try:
            value = _value(factor, views, data, key, frozenset(self.local), mask)
        except (TypeError, ValueError) as error:
            blocks = {n: _describe(views[n].q) for n in factor.blocks}
            arrays = {n: jnp.shape(x) for n, x in data.items()}
            raise ValueError(f"Factor {name!r} on blocks {blocks} with data {arrays}: {error}") from error
        if observed is None or factor.handles_missing:
            return value
        if isinstance(batch.examples[factor.data[-1]], Ragged) and value.ndim < 2:
            return value  # a factor that sums over a row's entries leaves the padding out itself (see `Ragged`)
        return zero_where_missing(name, observed, value)

    def terms(self, views: Mapping[str, BlockView], batch: PyTree, key: Key | None = None) -> dict[str, Array]:
        """Every factor's E log f, scaled to all of the data and summed."""
        batch = self.batch_rows(batch)
        terms = {}
        for name in self.factors:
            value = self.term(name, views, batch, self.factor_key(name, key))
            if self.scales_rows and self.per_row(self.factors[name]):
                value = self._weighted(name, value, batch)
            terms[name] = jnp.sum(value)
        return terms

    def factor_key(self, name: str, key: Key | None) -> Key | None:
        """A factor's own key, by its place among the model's factors; None if its points are not random."""
        if key is None or not self.factors[name].random:
            return None
        return jax.random.fold_in(key, sorted(self.factors).index(name))

    def _weighted(self, name: str, value: Array, batch: Rows) -> Array:
        """Terms (M, …) times each row's weight and N/M. A weight of 0 gives 0 also where the term is not finite."""
        rows = self.row_count(batch)
        if batch.weights is None and self.size in (None, rows or self.size):
            return value
        if value.ndim == 0 or (rows is not None and value.shape[0] != rows):
            raise ValueError(
                f"Factor {name!r} returns shape {value.shape} for {rows} rows, so these cannot be weighted: return "
                "an array with an entry for each row along its first axis."
            )
        scales = self.row_scales(batch, value.shape[0]).astype(value.dtype)
        scales = scales.reshape((-1,) + (1,) * (value.ndim - 1))
        return jnp.where(scales == 0, 0.0, scales * value)

    def expected(self, q: Product, shift: PyTree, batch: PyTree, aux: PyTree, key: Key | None) -> tuple[Array, PyTree]:
        """−E_q log p(y, x) as a function of the displacement of q's expectation parameters."""
        views = self.views(q, shift)
        terms = list(self.terms(views, batch, key).values())
        # The rule subtracts the entropy of the joint q(θ, z), in closed form; that of a mixture is larger by E log r_z.
        terms += [expected_log_responsibility(views[name]) for name, block in q.blocks.items() if block.is_mixture]
        return -sum(terms, start=jnp.zeros(())), aux

    def entropies(self, q: Product, batch: PyTree = None) -> dict[str, Array]:
        """Every block's entropy, a local one's scaled to all of the data."""
        batch = self.batch_rows(batch)
        entropies = {}
        for name, block in q.blocks.items():
            if name in self.local and self.scales_rows:
                value = jax.vmap(lambda row: jnp.sum(row.entropy()))(block)
                entropies[name] = jnp.sum(self._weighted(name, value, batch))
            elif block.is_mixture:
                entropies[name] = block.joint_entropy() + expected_log_responsibility(view_of(block))
            else:
                entropies[name] = jnp.sum(block.entropy())
        return entropies

    def contributions(self, q: Product, data: PyTree = None, key: Key | None = None) -> dict[str, dict[str, Array]]:
        """The terms of the evidence lower bound: E log f of every factor, and the entropy of every block."""
        return {"factors": self.terms(self.views(q), data, key), "blocks": self.entropies(q, data)}

    def bound(self, q: Product, data: PyTree = None, key: Key | None = None) -> Array:
        """The evidence lower bound, every constant included: the sum of all contributions."""
        terms = self.contributions(q, data, key)
        return sum((*terms["factors"].values(), *terms["blocks"].values()), start=jnp.zeros(()))

    def closed_form_bound(self, q: Product, batch: PyTree, key: Key | None) -> Array:
        return self.bound(q, batch, key)

    def data(
        self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        raise ValueError("A model is evaluated through its factors: use Exact() points with Gradient() or Sites().")

    def separable(self, needed_by: str) -> Any:
        raise not_separable(needed_by)

    # Streams.

    def after(self, q: Product, *, forgetting: float = 0.0) -> Model:
        r"""The model for the next piece of a stream of data: the posterior of the shared blocks is its prior, λ₀ ← λ.

        It replaces the factors without rows; new data may have any number of rows.

        Args:
            q: the posterior so far.
            forgetting: φ: the prior becomes $(1 − φ)λ + φλ_0$ with λ₀ the prior before the first piece, so that a piece
                t pieces ago has the weight $(1−φ)^t$.
        """
        number(forgetting, "forgetting", high=1.0)
        if q.has_mixtures:
            raise ValueError(
                "A mixture cannot be the next piece's prior in closed form: fit all rows together, or start from "
                "Gaussian blocks."
            )
        shared = {name: factor for name, factor in self.factors.items() if not self.per_row(factor)}
        family = lambda block: block.of if isinstance(block, Peak) else block
        blocks = {name: family(q.blocks[name]) for name in self.order if name not in self.local}
        views = {name: BlockView(block) for name, block in q.blocks.items()}

        def log_prior(shift: PyTree) -> Array:
            displaced = {name: BlockView(blocks[name], shift[name]) for name in blocks}
            values = [self.term(name, views | displaced, Rows({}, None, None), None) for name in shared]
            return sum((jnp.sum(value) for value in values), start=jnp.zeros(()))

        # λ₀ is the sum of the messages of the factors without rows, before the first piece. It is kept from then on,
        # because forgetting returns to it and not to the last posterior.
        zero = {name: views[name].shift for name in blocks}
        first_prior = jax.grad(log_prior)(zero) if self.first_prior is None else self.first_prior
        mix = lambda new, old: (1 - forgetting) * new + forgetting * old
        priors = {}
        for name, block in blocks.items():
            natural = jax.tree.map(mix, block.natural(), block._symmetric(first_prior[name]))
            priors[f"{name} so far"] = prior(name, block.with_natural(natural))
        with_rows = {name: factor for name, factor in self.factors.items() if name not in shared}
        return self._with(blocks=blocks, factors={**priors, **with_rows}, size=None, first_prior=first_prior)

    # Errors that only the data can show.

    def check_data(self, q: Product, data: PyTree) -> None:
        """Raise where the data do not match the factors, naming the factor. Nothing is computed."""
        batch = self.batch_rows(data)
        for name, factor in self.factors.items():
            arrays = [batch.examples[other] for other in factor.data]
            for other, array in zip(factor.data[:-1], arrays[:-1], strict=True):
                if has_nonfinite(array):
                    raise ValueError(
                        f"Factor {name!r} takes {other!r}, which has entries that are not finite: only what it "
                        f"observes, {factor.data[-1]!r}, may be missing. Fill them in, or drop those rows."
                    )
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays)):
                continue
            blocks = {block: q.blocks[block].component_prototype for block in factor.blocks}
            factor.check(name, blocks, batch.examples)
            shape = _entries.eval_shape(self, name, q, batch.shapes_of_rows(), jax.random.key(0)).shape
            if not arrays or isinstance(arrays[-1], Ragged):
                continue
            may_be_missing = isinstance(arrays[-1], Masked) or np.issubdtype(values_of(arrays[-1]).dtype, np.floating)
            if may_be_missing and len(shape) < len(arrays[-1].shape):
                check_rows_are_complete(name, factor.data[-1], arrays[-1], shape)

    def explain_not_finite(self, q: Product, data: PyTree) -> str:
        """Which factor's value or message is not finite, and for which block."""
        batch, zero = self.batch_rows(data).rows_alone(), {name: view.shift for name, view in self.views(q).items()}
        for name, factor in self.factors.items():

            def total(shift: PyTree, name: str = name) -> Array:
                return jnp.sum(self.term(name, self.views(q, shift), batch, jax.random.key(0)))

            value, messages = jax.value_and_grad(total)(zero)
            if not bool(jnp.isfinite(value)):
                return f"factor {name!r} on the blocks {list(factor.blocks)} has the value {float(value)}"
            for block in factor.blocks:
                if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(messages[block])):
                    return f"the message of factor {name!r} to the block {block!r} is not finite"
        return "every factor is finite at the last good q, and the step from there is not"

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.order, *self.factors))
        lines = [f"Model with {len(self.order)} blocks and {len(self.factors)} factors"]
        for name in self.order:
            q = (self.local | self.blocks)[name]
            lines.append(f"  {name:<{width}}  {_describe(q)}{', one for each row' if name in self.local else ''}")
        lines.append("  log-joint, the sum of")
        lines += [f"  {name:<{width}}  E log {factor}" for name, factor in self.factors.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _prepared_name(factor: str, array: str) -> str:
    return f"{_PREPARED}{factor!r}: {array}"


def _value(
    factor: Factor,
    views: Mapping[str, Any],
    data: Mapping[str, Array],
    key: Key | None,
    local: frozenset[str],
    mask: dict[str, Any],
) -> Array:
    """E log f, averaged over the components of those of its blocks that are mixtures."""
    mixed = next((name for name in factor.blocks if isinstance(views[name], MixtureView)), None)
    if mixed is None:
        return factor.value(views, data, key, local, **mask)
    own_key = lambda: None if key is None else jax.random.clone(key)  # Every component has the same noise.
    return views[mixed].average(lambda view, _: _value(factor, {**views, mixed: view}, data, own_key(), local, mask))


def expected_log_responsibility(view: Any, points: Points | None = None, key: Key | None = None) -> Array:
    r"""$E\log r_z(θ) = \sum_kπ_kE_{q_k}\log r_k(θ)$, by which H(q) differs from the entropy of the joint q(θ, z).

    r is held fixed, since the derivative in its own parameters is $\sum_zE[r_z∂\log r_z] = E[∂1] = 0$.

    Args:
        view: the view of a mixture.
        points: the points of each component; by default those of every step of a fit, a grid in up to three dimensions
            and else 512 fixed ones. The bound of a result is judged at others.
        key: a random key, for random points.
    """
    size = view.q.component_prototype.noise_size
    if points is None:
        points = Quadrature(_GRID_ORDERS[size]) if size in _GRID_ORDERS else QuasiMonteCarlo(_SCATTERED)

    def of(component: BlockView, index: Array) -> Array:
        return expected(partial(view.q.frozen_log_responsibility, index), component, points, key, False)

    return view.average(of)


@compiled(static="name")
def _entries(model: Model, name: str, q: Product, batch: Rows, key: Key | None) -> Array:
    """A factor's value, for its shape: never run; jitted, so that it is traced once for all fits of the same shapes."""
    views, data = model.views(q), model.observations(name, batch)[0]
    return model.factors[name].entries(model.term(name, views, batch, key), views, data, key)


def _without_prior(blocks: Mapping[str, ExponentialFamily], factors: Mapping[str, Factor]) -> tuple[str, ...]:
    """The blocks of continuous unknowns that only factors with data touch; a process or chain is its own prior."""
    continuous = Beta | Dirichlet | Gamma | GaussianFamily | Mixture | NormalGamma | NormalWishart | Wishart
    continuous |= TiedNormalWishart | SphericalNormalGamma
    with_prior = {name for factor in factors.values() if not factor.data for name in factor.blocks}
    return tuple(name for name, q in blocks.items() if isinstance(q, continuous) and name not in with_prior)


def _check_mixtures(blocks: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Raise for mixtures whose entropy the model cannot integrate."""
    for name, q in {**local, **blocks}.items():
        if not q.is_mixture:
            continue
        member = q.component_prototype
        if name in local:
            raise ValueError(
                f"The local block {name!r} is a Mixture, and a mixture is one block for all rows: pass it in `blocks`, "
                "or give each row a Gaussian."
            )
        if not isinstance(member, Gaussian | DiagonalGaussian) or member.batch_shape:
            raise ValueError(
                f"Block {name!r} is a mixture of {type(member).__name__}s, and the entropy of a mixture is integrated "
                "over Gaussian components without plates: mix blr.Gaussian or blr.DiagonalGaussian members."
            )


def _describe(q: ExponentialFamily | Product) -> str:
    """A block's family and the shape of its first array."""
    leaves = jax.tree.leaves(q)
    return f"{type(q).__name__}{list(jnp.shape(leaves[0]))}" if leaves else type(q).__name__
