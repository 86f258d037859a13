"""Which q: the family piece of an algorithm, and how a member is made from bare parameters."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .base import Family
from .lowrank import LowRankGaussian
from .product import Product
from .structure import GaussianFamily


class Candidate(eqx.Module):
    """A family, with the precision that a Gaussian member starts from."""

    kind: type[Family] = eqx.field(static=True)
    precision: Any = 1.0

    def start(self, given: PyTree) -> Family:
        """A member of the family: the given one if it is one, else one around bare parameters."""
        if isinstance(given, dict) and given and all(isinstance(block, Family) for block in given.values()):
            given = Product(given)
        if isinstance(given, Family):
            if not isinstance(given, self.kind):
                raise ValueError(
                    f"This algorithm moves a {self.kind.__name__}, and the start is a {type(given).__name__}. Start "
                    f"from a {self.kind.__name__}, or change the algorithm: rule.replace(family=…, curvature=…)."
                )
            return given
        if not issubclass(self.kind, GaussianFamily):
            raise ValueError(
                f"Bare parameters do not say which {self.kind.__name__} to start from: pass a member of the family."
            )
        if issubclass(self.kind, LowRankGaussian):
            raise ValueError(
                "Bare parameters do not say the rank: start from a LowRankGaussian(params, diagonal, factor)."
            )
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(given)):
            raise ValueError("Parameters must be real: split complex ones into real and imaginary parts.")
        return self.kind(given, self.precision)  # type: ignore[call-arg]  # the others take (mean, precision)

    def __repr__(self) -> str:
        return self.kind.__name__


def as_candidate(family: Any) -> Candidate:
    """A `Candidate` from a family's class (or from one already)."""
    if isinstance(family, Candidate):
        return family
    if isinstance(family, type) and issubclass(family, Family):
        return Candidate(family)
    raise ValueError(f"family= takes a family's class such as blr.Gaussian, got {family!r}.")
