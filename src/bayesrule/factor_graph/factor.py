r"""A factor: one term of a log-joint, as E log f in the blocks' expectation parameters or as log f of their values.

Everything that inference needs of a factor is its expected value E_q log f as a differentiable function of the blocks'
expectation parameters. The bound is the sum of these values over factors (plus entropies), and the message to a block
is the derivative with respect to the block's μ: `Model` gives every block to the factor as a `BlockView`, which stands
for q displaced by δ in μ, and differentiates in δ at 0. A factor therefore defines a value and never a message.

To write a factor of your own, pass a function to `Factor`. Subclass it (as `LinearFactor` and `SequenceFactor` do) only
where the expectation itself has to be computed differently; the contract is `Factor.value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool

from ..families.base import ExponentialFamily
from ..numerics.random import Key
from ..points.base import Points
from .block_expectation import expected
from .block_view import BlockView, batch_shape


class Factor(eqx.Module):
    r"""$\log f(x_a, x_b, …)$, a term of a model's log-joint on the blocks that it names.

    The function takes one argument for each block, in their order, and then the named arrays of the data. Its result
    has one entry for each row of the data (and of local blocks) along its first axis, so that rows can be weighted,
    left out and missing; further axes are summed. What a block's argument is depends on `points` and `of`:

    - by default its expectation parameters μ, and the function is the *expected* log value E_q log f;
    - for a block with `points`, a value θ, and the function is log f; the points stand for the expectation over θ;
    - with `of="view"`, a `BlockView`, whose mean and covariance are more accurate than differences of the moments in μ.

    The message to a block is the derivative of the result's sum with respect to the block's μ.

    Args:
        function: the function just described, of pure JAX operations.
        blocks: the names of the blocks that it touches.
        data: the names of the arrays that it takes. The last is what the factor observes: an entry of it that is NaN is
            missing and sends no message.
        points: `Delta()`, `MonteCarlo(4)`, `Quadrature(20)` or `Enumeration()`: one for all blocks, or a dict by block.
        of: "expectation" or "view" ("seen" is its former name): how a block without points is given to the function.
        features: a function of the observations whose result the factor's function takes in their place. It is computed
            once for all steps.
        label: the factor's name where a model is printed. (`said` is its former name.)

    >>> import jax.numpy as jnp, bayesrule as blr
    >>> toss = blr.Factor(lambda mu, y: y * mu[0] + (1 - y) * mu[1], "p", data="y")         # E log p^y (1 − p)^{1−y}
    >>> model = blr.Model({"p": blr.Beta(1.0, 1.0)}, {"prior": blr.factors.prior("p", blr.Beta(1.0, 1.0)), "y": toss})
    >>> result = blr.fit(blr.conjugate(), model, None, {"y": jnp.array([1.0, 1.0, jnp.nan, 0.0])}, steps=1)
    >>> float(result.q["p"].a), float(result.q["p"].b)
    (3.0, 2.0)
    """

    function: Any
    points: dict[str, Points]
    blocks: tuple[str, ...] = eqx.field(static=True)
    data: tuple[str, ...] = eqx.field(static=True)
    of: str = eqx.field(static=True)
    features: Callable[[Array], Array] | None = eqx.field(static=True)
    label: str = eqx.field(static=True)
    handles_missing: ClassVar[bool] = False
    """Whether `value` takes a further argument `observed`, a mask of the observations, and leaves the missing ones out
    itself. Otherwise the model puts an observed value in their place and sets the result's entries to 0."""

    def __init__(
        self,
        function: Callable[..., Any],
        *blocks: str,
        data: str | Sequence[str] = (),
        points: Points | Mapping[str, Points] | None = None,
        of: str = "expectation",
        features: Callable[[Array], Array] | None = None,
        label: str = "",
        said: str = "",
    ):
        if not callable(function):
            raise ValueError(f"A factor is a function of its blocks, got {type(function).__name__}.")
        if not blocks or not all(isinstance(name, str) for name in blocks):
            raise ValueError(f"A factor names the blocks that it touches, Factor(function, 'a', 'b'), got {blocks}.")
        if of not in ("expectation", "view", "seen"):
            raise ValueError(
                f'of= is "expectation" (a block comes as μ) or "view" (as a BlockView, with its moments), got {of!r}.'
            )
        self.function = function if isinstance(function, eqx.Module | Partial) else Partial(function)
        self.blocks, self.data = tuple(blocks), (data,) if isinstance(data, str) else tuple(data)
        self.points, self.features = _by_block(points, self.blocks), features
        self.of = "view" if of == "seen" else of
        self.label = label or said or getattr(function, "__name__", "function").replace("<lambda>", "function")

    @property
    def said(self) -> str:
        """The former name of `label`."""
        return self.label

    @property
    def random(self) -> bool:
        """Whether its points are random, so that `value` needs a key."""
        return any(points.random for points in self.points.values())

    @property
    def second_order(self) -> bool:
        """Whether it takes an expectation to second order at the mean (the delta method).

        The fixed point of its messages is then Newton's or Laplace's, and not the maximum of the bound. A factor of
        another factor's terms answers for that one, here as in `random`.
        """
        return any(points.delta for points in self.points.values())

    def value(
        self,
        views: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Key | None = None,
        local: frozenset[str] = frozenset(),
    ) -> Array:
        """E_q log f, as a differentiable function of the displacements of the views.

        The model calls it once for each evaluation of the objective, under `jit` and `grad`. A subclass that overrides
        it must keep it differentiable in the views, because the derivative is the message.

        Args:
            views: a view of every block that the factor names (and possibly of others).
            data: the arrays that the factor names, the missing entries of the last one replaced by an observed value,
                or by `features` of it.
            key: a random key, if `random`.
            local: the names of the blocks that have a member for each row.

        Returns:
            an entry for each row along the first axis if the factor has data or local blocks; any shape otherwise.
        """
        arrays = [data[name] for name in self.data]
        keys = [None] * len(self.blocks) if key is None else list(jax.random.split(key, len(self.blocks)))
        return jnp.asarray(self._integrated(0, (), (), views, arrays, keys, local))

    def prepared(self, data: Mapping[str, Array]) -> dict[str, Array]:
        """What `value` reads and no step changes, by the name under which `value` finds it in its data.

        The model calls it once for all steps of a full-batch fit, and otherwise before each call of `value`. Every
        array has an entry for each row along its first axis. By default it is the `features` of the observations.

        Args:
            data: the arrays that the factor names, as `value` gets them but for what is returned here.
        """
        return {} if self.features is None else {self.data[-1]: self.features(data[self.data[-1]])}

    def entries(
        self, value: Array, views: Mapping[str, BlockView], data: Mapping[str, Array], key: Key | None
    ) -> Array:
        """The value with an axis for every axis of the observations whose entries may be missing one by one.

        The model only traces it, once before a fit, to find out whether rows that are missing in part are an error. A
        factor that sums over such an axis overrides it; by default the value has them all.
        """
        return value

    def for_missing_entries(self, patterns: Bool[Array, "P D"], data: tuple[str, str]) -> Factor | None:
        """The same factor for observations of which some rows (their last axis) are missing in part.

        `Model.for_data` calls it outside of `jit`, and only where there are such rows. By default there is no such
        factor: each row has to be observed or missing as a whole.

        Args:
            patterns: which entries of a row are observed, all combinations that occur.
            data: the names of the two arrays that the new factor takes: the number of each row's pattern, and the rows,
                in which a missing entry has any finite value.
        """
        return None

    def check(self, name: str, blocks: Mapping[str, ExponentialFamily], arrays: Mapping[str, Any]) -> None:
        """Raise where the data cannot be this factor's. By default nothing is wrong.

        Called once before a fit, outside of `jit`, after the model has checked names, rows and shapes.

        Args:
            name: the factor's name in the model, for the message.
            blocks: q's members of the factor's blocks.
            arrays: the data that the factor names, as the user gave them.
        """

    def _integrated(
        self,
        place: int,
        arguments: tuple[Any, ...],
        held: tuple[Any, ...],
        views: Mapping[str, BlockView],
        arrays: list[Any],
        *how: Any,
    ) -> Array:
        """The expectation over the blocks from `place` on, for fixed arguments in the places before it.

        The Hessians of the delta method are no part of a message: what they are computed from does not move with the δ
        of a block under the delta method. `held` are the arguments to compute them from.
        """
        if place == len(self.blocks):
            return self.function(*arguments, *arrays)
        name, (keys, local) = self.blocks[place], how
        view, points = views[name], self.points.get(name)
        if points is None:
            argument = view.expectation if self.of == "expectation" else view
            return self._integrated(place + 1, (*arguments, argument), (*held, argument), views, arrays, *how)
        center = lambda argument: view.q.mean if points.delta else argument

        def rest(argument: Any, before: tuple[Any, ...], views: Mapping[str, BlockView]) -> Array:
            return self._integrated(place + 1, (*before, argument), (*held, center(argument)), views, arrays, *how)

        held_views = {n: v.held if n in self.points and self.points[n].delta else v for n, v in views.items()}
        function, held_function = (lambda x: rest(x, arguments, views)), (lambda x: rest(x, held, held_views))
        return expected(function, view, points, keys[place], name in local, held_function)

    def __str__(self) -> str:
        data = f"; {', '.join(self.data)}" if self.data else ""
        points = sorted({repr(points) for points in self.points.values()})
        return f"{self.label}({', '.join(self.blocks)}{data})" + (f"  by {', '.join(points)}" if points else "")


def _by_block(points: Points | Mapping[str, Points] | None, blocks: tuple[str, ...]) -> dict[str, Points]:
    if points is None:
        return {}
    if isinstance(points, Points):
        return dict.fromkeys(blocks, points)
    unknown = set(points) - set(blocks)
    if unknown:
        raise ValueError(f"points= names {sorted(unknown)}, and this factor touches {list(blocks)}.")
    return dict(points)


def prior(block: str, family: ExponentialFamily) -> Factor:
    r"""A prior of the block's own family: $E_q \log p(θ) = ⟨λ_0, μ⟩ − A(λ_0) + E_q\log h(θ)$.

    Args:
        block: the block θ.
        family: the prior, with natural parameters λ_0; it may serve many plates.

    >>> import bayesrule as blr
    >>> print(prior("rate", blr.Gamma(2.0, 1.0)))
    Gamma prior(rate)
    """
    if not isinstance(family, ExponentialFamily):
        raise ValueError(f"prior({block!r}, …) takes a member of the block's family, got {type(family).__name__}.")
    return Factor(Partial(_prior, family), block, of="view", label=f"{type(family).__name__} prior")


def _prior(family: ExponentialFamily, view: BlockView) -> Array:
    q = view.q
    kind = type(q.of) if hasattr(q, "of") else type(q)
    if kind is not type(family):
        raise ValueError(f"the prior is a {type(family).__name__} and the block a {kind.__name__}.")
    natural = family.natural()
    base = family.expected_log_base() if family.constant_base() else view.member.expected_log_base()
    value = family.inner(natural, view.expectation) - family.log_partition(natural) + base
    # One prior may serve many plates, each of which counts.
    return jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, batch_shape(q)))
