"""Factors of rows with dependent entries, and of choices among them: what is left of a row that is missing in part.

A factor with one term for a whole row, such as a Gaussian with a full precision, has none for a row of which only some
entries were observed. Its missing entries are unknowns like any other. They are integrated out as a mixture's
assignment is: at their best q, given the other blocks, so that EM sees the density of the observed entries, and the
messages hold E[y_missing | y_observed] and its covariance.

Rows with the same entries missing share that computation. Which entries are missing, the patterns, is found on the host
(`Model.for_data`), so that complete data compile to the program that they always had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.tree_util import Partial
from jaxtyping import Array, Bool

from . import expected_log
from .factor import Factor


class GaussianRowFactor(Factor):
    """A row y ~ N(x, Λ⁻¹) with a joint normal–Wishart block over (x, Λ); `factors.multivariate_normal(joint=…)`."""

    def __init__(self, observed: str, joint: str, label: str):
        features = expected_log.row_products
        Factor.__init__(self, expected_log.multivariate_joint, joint, data=observed, features=features, label=label)

    def for_missing_entries(self, patterns: Bool[Array, "P D"], data: tuple[str, str]) -> Factor:
        function = Partial(expected_log.multivariate_joint_of_observed, patterns)
        return Factor(function, *self.blocks, data=data, features=self.features, label=self.label)


class ComponentFactor(Factor):
    """A factor that is made of another one's terms for each component; `factors.mixture` and `factors.choice`.

    Args:
        function: `function(components, first, *args)`, of the components, the view of the first block, and then the
            components' views and data.
        first: the block of the weights, or of the choice.
        components: a factor whose blocks have a plate for each component.
        label: the name of the kind.
    """

    kind: str = eqx.field(static=True)

    def __init__(self, function: Callable[..., Array], first: str, components: Factor, label: str):
        Factor.__init__(
            self,
            Partial(function, components),
            first,
            *components.blocks,
            data=components.data,
            of="view",
            features=components.features,
            label=f"{label} of {components.label}",
        )
        self.kind = label

    @property
    def components(self) -> Factor:
        """The factor of one component."""
        function: Any = self.function
        return function.args[0]

    @property
    def random(self) -> bool:
        return self.components.random

    @property
    def second_order(self) -> bool:
        return self.components.second_order

    def for_missing_entries(self, patterns: Bool[Array, "P D"], data: tuple[str, str]) -> Factor | None:
        components = self.components.for_missing_entries(patterns, data)
        function: Any = self.function
        return components and ComponentFactor(function.func, self.blocks[0], components, self.kind)
