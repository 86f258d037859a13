"""One draw from q for each part of the batch: as many samples as there are devices, at the price of one."""

from __future__ import annotations

from typing import ClassVar

import equinox as eqx

from ..families.base import Family
from ..numerics.checks import positive_int
from ..numerics.random import Key
from ..steps.needs import Need
from .base import Points, PointSet
from .sampling import MonteCarlo


class ShardSamples(Points[Family]):
    r"""Independent draws θ₁, …, θ_k from q, each for a part of the batch: $E_q ℓ ≈ \sum_j ℓ_j(θ_j)$.

    The loss is a sum over examples. The rows of the batch are divided into k equal parts, consecutive rows each, and
    what part j adds to the sum is measured at θ_j alone. Each part's expectation is estimated without bias, and so is
    the sum's; where the parts' noise is independent, it averages out as that of k draws does. Every example is
    evaluated once, as with `MonteCarlo(1)`. On k devices that hold a part each, every device draws, stores and
    evaluates its own θ, and no other.

    Results depend on the number of parts, and not on that of the devices: on one device they are the same.

    Args:
        parts: k, the number of devices that the rows are divided over (or a multiple of it). It divides the rows of a
            batch.
        antithetic: Whether θ_j and θ_{j+k/2} are mirror images m ± ε, for a symmetric q.

    >>> import bayesrule as blr
    >>> blr.ivon(0.1).replace(points=ShardSamples(8)).points
    ShardSamples(8)
    """

    count: int = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)
    approximation: ClassVar[str] = "Monte Carlo"
    meaning: ClassVar[str] = "E_q f(θ) ≈ Σⱼ fⱼ(θⱼ), a draw from q for each part j of the batch"
    random: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        *MonteCarlo.needs,
        (
            lambda p: p.curvature.additive and not p.curvature.in_lambda,
            lambda p: (
                f"ShardSamples() measure each part of a batch at a θ of its own and add up what they find, and what "
                f"{type(p.curvature).__name__}() measures is no such sum: use MonteCarlo(samples), or a curvature that "
                "is a sum over examples, such as GaussNewton(), Hessian() or Stein()."
            ),
        ),
    )

    def __init__(self, parts: int, *, antithetic: bool = False):
        self.count, self.antithetic = positive_int("parts", parts), antithetic
        if antithetic and self.count % 2:
            raise ValueError(f"Mirrored draws come in pairs, so parts= must be even, got {parts}.")

    @property
    def parts_of_batch(self) -> int:
        return self.count

    def at(self, q: Family, key: Key | None) -> PointSet:
        return MonteCarlo(self.count, antithetic=self.antithetic).at(q, key)

    def __repr__(self) -> str:
        return f"ShardSamples({self.count}{', antithetic=True' * self.antithetic})"
