"""Points for each block of a product by itself."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..families.base import Family
from ..families.discrete import Bernoulli
from ..families.gaussian.base import GaussianFamily
from ..families.product import Product
from ..numerics.random import Key
from ..steps.needs import Need
from .base import Points, PointSet


class Each(Points[Product]):
    """Points for each block of a `Product`: `Each({"w": Relaxed(1.0), "b": MonteCarlo(1)})`.

    Args:
        blocks: The points of every block, by its name.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> q = blr.Product({"w": blr.Bernoulli(jnp.array([0.5, -2.0])), "b": blr.FixedGaussian(jnp.ones(1))})
    >>> theta = blr.Each({"w": blr.Sign(), "b": blr.Delta()}).at(q, None).theta
    >>> theta["w"].tolist(), theta["b"].tolist()
    ([[1.0, -1.0]], [[1.0]])
    """

    blocks: dict[str, Points]
    approximation: ClassVar[str] = "block by block"
    meaning: ClassVar[str] = "each block at its own points"
    of_family: ClassVar[type[Family] | None] = Product
    chained: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (lambda p: not _mismatch(p.points, p.member), lambda p: _mismatch(p.points, p.member)),
    )

    def __init__(self, blocks: dict[str, Points]):
        if not blocks or not all(isinstance(points, Points) for points in blocks.values()):
            raise ValueError("Each takes a dict with points for every block of a Product.")
        self.blocks = {name: blocks[name] for name in sorted(blocks)}

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # if one of them is
        return any(points.random for points in self.blocks.values())

    def at(self, q: Product, key: Key | None) -> PointSet:
        keys = [None] * len(self.blocks) if key is None else jax.random.split(key, len(self.blocks))
        sets = {name: points.at(q.blocks[name], k) for k, (name, points) in zip(keys, self.blocks.items(), strict=True)}
        count = max(point_set.weights.shape[0] for point_set in sets.values())
        if any(point_set.weights.shape[0] not in (1, count) for point_set in sets.values()):
            raise ValueError(
                "The blocks need equally many points (or one), because the s-th points of all blocks make up one θ; "
                f"got {self}. Give the blocks the same number of samples."
            )
        repeat = lambda tree: jax.tree.map(lambda t: jnp.broadcast_to(t, (count, *t.shape[1:])), tree)
        theta = {name: repeat(point_set.theta) for name, point_set in sets.items()}
        factors = {name: repeat(point_set.factors) for name, point_set in sets.items()}
        return PointSet(theta, jnp.full(count, 1 / count), factors)

    def __repr__(self) -> str:
        return f"Each({{{', '.join(f'{name!r}: {points!r}' for name, points in self.blocks.items())}}})"


def _mismatch(points: Any, member: Any) -> str:
    """What is wrong with these points for the blocks of a product; empty if nothing is."""
    if not isinstance(member, Product):
        return ""
    if set(points.blocks) != set(member.blocks):
        return f"Each names points for {list(points.blocks)}, the blocks are {list(member.blocks)}."
    for name, block in member.blocks.items():
        own, binary = points.blocks[name], isinstance(block, Bernoulli)
        fits = own.of_family is Bernoulli if binary else not own.chained
        if not fits or not isinstance(block, Bernoulli | GaussianFamily):
            wanted = "Relaxed() or Sign()" if binary else "Delta() or MonteCarlo()"
            return f"A {type(block).__name__} block does not go with {own!r}: use {wanted}."
    return ""
