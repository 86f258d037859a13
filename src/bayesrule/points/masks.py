"""Points of a spike-and-slab q: dropout masks."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..families.base import Family
from ..families.latent.spike_slab import SpikeSlab
from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..steps.schedule import Number, number
from .base import Points, PointSet


class Masks(Points[SpikeSlab]):
    """Dropout: θ = z∘m with units z dropped at random, and z/π₁ on the derivatives (`eq:grad_loss`).

    Within the slab it is the delta method.

    Args:
        samples: How many masks.
        relaxation: Draw z from the Concrete relaxation with this temperature, in (0, 1), instead of {0, 1}. A
            `SpikeSlab` that learns its keep probabilities needs it, because 0 and 1 have no derivative in them.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> q = blr.SpikeSlab(blr.FixedGaussian(jnp.array([[1.0, 2.0], [3.0, 4.0]])), 0.5)      # weights (inputs, outputs)
    >>> drawn = blr.Masks(20).at(q, jax.random.key(0)).theta
    >>> sorted(set(map(tuple, drawn[:, 0].tolist())))                       # the first input's weights, kept or dropped
    [(0.0, 0.0), (1.0, 2.0)]
    """

    relaxation: Any
    samples: int = eqx.field(static=True)
    approximation: ClassVar[str] = "Delta method, stochastic approx., responsibility approx."
    meaning: ClassVar[str] = "θ = z∘m, units dropped where z = 0; derivatives weighted by z/π₁ (eq:grad_loss)"
    of_family: ClassVar[type[Family] | None] = SpikeSlab
    chained: ClassVar[bool] = True
    random: ClassVar[bool] = True
    delta: ClassVar[bool] = True

    def __init__(self, samples: int = 1, *, relaxation: Number | None = None):
        self.samples = positive_int("samples", samples)
        self.relaxation = None if relaxation is None else number(relaxation, "The relaxation")

    def at(self, q: SpikeSlab, key: Key | None) -> PointSet:
        if key is None:
            raise ValueError("Masks are random: pass key=jax.random.key(…).")
        if q.learnt and self.relaxation is None:
            raise ValueError(
                "A keep probability is learned through the Concrete relaxation: use Masks(relaxation=0.1) points."
            )
        z = q.masks(q.uniform(key, (self.samples,)), self.relaxation)
        return apply_masks(q, z, self.relaxation)

    def __repr__(self) -> str:
        return f"Masks({self.samples}{'' if self.relaxation is None else f', relaxation={self.relaxation}'})"


def apply_masks(q: SpikeSlab, z: PyTree, relaxation: Any = None, weights: Array | None = None) -> PointSet:
    """The points z∘m for masks with a leading axis, with the factors z/π₁ and (where relaxed) ∂z/∂π₁."""
    count = jax.tree.leaves(z)[0].shape[0]
    theta = jax.tree.map(lambda z, m: z * m, z, q.slab.mean)
    factors = jax.tree.map(lambda z, k: z / k, z, q.keep)
    slopes = None
    if relaxation is not None:
        slopes = jax.tree.map(lambda z, k: z * (1 - z) / (relaxation * jnp.where(k < 1, k * (1 - k), 1)), z, q.keep)
    return PointSet(theta, jnp.full(count, 1 / count) if weights is None else weights, (factors, slopes))
