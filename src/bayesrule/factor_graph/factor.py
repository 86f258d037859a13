"""A factor: one term of a log-joint, in the blocks' expectation parameters or in their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from ..families.base import ExponentialFamily
from ..points.base import Points
from .block_expectation import expected
from .block_view import BlockView


class Factor(eqx.Module):
    r"""$\log f(x_a, x_b, …)$, a term of a model's log-joint on the blocks that it names.

    `function(a, b, …, *data)` takes one argument for each block and then the named arrays of the data. Without `points`
    it is the *expected* log value, and a block comes as its expectation parameters μ. Blocks that `points` names come
    as values instead, and the points stand for their expectation: `Delta()`, `MonteCarlo(4)`, `Quadrature(20)`,
    `Enumeration()`; one for all blocks, or a dict. The result has one entry for each row of the data (and of local
    blocks) along its first axis; further axes are summed. The message to a block is its derivative with respect to μ.

    `of="seen"` hands a block over as a `BlockView`, whose mean and covariance do not come as a difference of moments.
    `features(y)` is what the function takes in the place of its observations, made once for all steps.
    The last of `data` is what is observed: where it is NaN, the entry is missing and sends no message.

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
    said: str = eqx.field(static=True)
    sees_missing: ClassVar[bool] = False
    """Whether `value` also takes `observed`, which entries there are, and sees to the missing ones itself."""

    def __init__(
        self,
        function: Callable[..., Any],
        *blocks: str,
        data: str | Sequence[str] = (),
        points: Points | Mapping[str, Points] | None = None,
        of: str = "expectation",
        features: Callable[[Array], Array] | None = None,
        said: str = "",
    ):
        if not callable(function):
            raise ValueError(f"A factor is a function of its blocks, got {type(function).__name__}.")
        if not blocks or not all(isinstance(name, str) for name in blocks):
            raise ValueError(f"A factor names the blocks that it touches, Factor(function, 'a', 'b'), got {blocks}.")
        if of not in ("expectation", "seen"):
            raise ValueError(f'of= is "expectation" (a block comes as μ) or "seen" (as its moments too), got {of!r}.')
        self.function = function if isinstance(function, eqx.Module | Partial) else Partial(function)
        self.blocks, self.data = tuple(blocks), (data,) if isinstance(data, str) else tuple(data)
        self.points, self.features = _by_block(points, self.blocks), features
        self.of, self.said = of, said or getattr(function, "__name__", "function").replace("<lambda>", "function")

    @property
    def random(self) -> bool:
        """Whether it is looked at in random places."""
        return any(points.random for points in self.points.values())

    def value(
        self,
        seen: Mapping[str, BlockView],
        data: Mapping[str, Array],
        key: Any = None,
        local: frozenset[str] = frozenset(),
    ) -> Array:
        """E log f, an entry for each row. `local` names the blocks that have a member for each."""
        arrays = [data[name] for name in self.data]
        keys = [None] * len(self.blocks) if key is None else list(jax.random.split(key, len(self.blocks)))
        return jnp.asarray(self._over(0, (), seen, arrays, keys, local))

    def entries(self, value: Array, seen: Mapping[str, BlockView], data: Mapping[str, Array], key: Any) -> Array:
        """In the shape of the observations that may be missing by themselves: by default every entry of the value."""
        return value

    def _over(self, place: int, views: tuple, seen: Any, arrays: list[Array], keys: list, local: Any) -> Array:
        """The expectation over the blocks from this place on, given those before it."""
        if place == len(self.blocks):
            return self.function(*views, *arrays)
        name = self.blocks[place]
        rest = lambda view: self._over(place + 1, (*views, view), seen, arrays, keys, local)
        if name in self.points:
            return expected(rest, seen[name], self.points[name], keys[place], name in local)
        return rest(seen[name].expectation if self.of == "expectation" else seen[name])

    def __str__(self) -> str:
        given = f"; {', '.join(self.data)}" if self.data else ""
        how = sorted({repr(points) for points in self.points.values()})
        return f"{self.said}({', '.join(self.blocks)}{given})" + (f"  by {', '.join(how)}" if how else "")


def _by_block(points: Any, blocks: tuple[str, ...]) -> dict[str, Points]:
    if points is None:
        return {}
    if isinstance(points, Points):
        return dict.fromkeys(blocks, points)
    unknown = set(points) - set(blocks)
    if unknown:
        raise ValueError(f"points= names {sorted(unknown)}, and this factor touches {list(blocks)}.")
    return dict(points)


def prior(block: str, family: ExponentialFamily) -> Factor:
    r"""$E_q \log p(θ) = ⟨λ_0, μ⟩ − A(λ_0) + E_q\log h$ for a prior of the block's own family.

    >>> import bayesrule as blr
    >>> print(prior("rate", blr.Gamma(2.0, 1.0)))
    Gamma prior(rate)
    """
    if not isinstance(family, ExponentialFamily):
        raise ValueError(f"prior({block!r}, …) takes a member of the block's family, got {type(family).__name__}.")
    return Factor(Partial(_prior, family), block, of="seen", said=f"{type(family).__name__} prior")


def _prior(family: Any, seen: BlockView) -> Array:
    q = seen.q
    kind = type(q.of) if hasattr(q, "of") else type(q)
    if kind is not type(family):
        raise ValueError(f"the prior is a {type(family).__name__} and the block a {kind.__name__}.")
    natural = family.natural()
    base = family.expected_log_base() if family.constant_base() else seen.member.expected_log_base()
    value = family.inner(natural, seen.expectation) - family.log_partition(natural) + base
    plates = jax.eval_shape(lambda: q.log_partition(q.natural())).shape  # one prior may serve many plates
    return jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, plates))
