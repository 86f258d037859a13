"""Which q: the family piece of an algorithm, and how a member is made from bare parameters."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from ..numerics.trees import wide
from .base import Family
from .gaussian.precision import Structure
from .latent.mixture import Mixture
from .latent.spike_slab import SpikeSlab
from .point_mass import Peak
from .product import Product


class Start(eqx.Module):
    """A family, and the precision that its Gaussian starts from.

    `precision` is that number (or a pytree like the parameters), S₀. With `per_example` it is the curvature h₀ of
    the mean loss, so that S₀ = N h₀, and with `prior` the prior's precision is added and all of it divided by the
    temperature: S₀ = (N h₀ + δ)/τ. `numbers` and `choices` go to the family's `around`.
    """

    kind: type[Family] = eqx.field(static=True)
    precision: Any
    numbers: dict[str, Any]
    choices: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    per_example: bool = eqx.field(static=True)
    prior: bool = eqx.field(static=True)
    peaks: tuple[str, ...] | None = eqx.field(static=True)

    def __init__(
        self,
        kind: type[Family],
        precision: Any = 1.0,
        *,
        per_example: bool = False,
        prior: bool = False,
        numbers: dict[str, Any] | None = None,
        peaks: tuple[str, ...] | None = None,
        **choices: Any,
    ):
        self.peaks = peaks
        self.kind, self.precision = kind, precision
        self.per_example, self.prior = per_example, prior
        self.numbers = {} if numbers is None else numbers
        self.choices = tuple(sorted(choices.items()))

    @property
    def structure(self) -> str | None:
        """How a member holds its precision; None where there is none, or the member says."""
        structure = getattr(self.part, "structure", None)
        return structure.name if isinstance(structure, Structure) else None

    @property
    def label(self) -> str:
        """How Table 1 names it."""
        return self.kind.label if self.peaks is None else "Exponential family + point"

    @property
    def approximation(self) -> str:
        """How Table 1 names what the family piece does to the natural gradient, as phrases separated by commas.

        A precision that is stated per example is for rates of the mean loss, which mini-batches estimate.
        """
        phrases = ["Delta method for the parameters"] if self.peaks is not None else []
        return ", ".join([*phrases, *["stochastic approx."] * self.per_example])

    @property
    def part(self) -> type[Family]:
        """The family whose step it is: a mixture's components', a spike-and-slab's slab, else its own."""
        choices = dict(self.choices)
        return choices.get("slab", choices.get("component", self.kind))

    def start(self, given: PyTree, objective: Any = None, temperature: Any = 1.0) -> Family:
        """A member of the family: the given one if it is one, else one around bare parameters."""
        if given is None:
            raise ValueError("This algorithm starts from somewhere: give parameters, or a member of its family.")
        if isinstance(given, dict) and given and all(isinstance(block, Family) for block in given.values()):
            given = Product(given)
        if isinstance(given, Product) and self.peaks is not None:
            given = self._at_peaks(given, objective)
        if isinstance(given, Family):
            if not isinstance(given, self.kind):
                raise ValueError(
                    f"This algorithm moves a {self.kind.__name__}, and the start is a {type(given).__name__}. Start "
                    f"from a {self.kind.__name__}, or change the algorithm: rule.replace(family=…, curvature=…)."
                )
            return given
        if not all(
            isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") for leaf in jax.tree.leaves(given)
        ):
            raise ValueError(
                "Parameters must be arrays in containers, and some leaves here are not (activation functions of a "
                "module, say): split them off with eqx.partition(module, eqx.is_inexact_array) and combine in apply."
            )
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(given)):
            raise ValueError("Parameters must be real: split complex ones into real and imaginary parts.")
        # Half-precision parameters are kept, and moved, in float32: their updates would be lost in rounding.
        given = jax.tree.map(_widened, given)
        one = jax.tree.map(lambda x: x[0] if jnp.ndim(x) else x, given) if self.kind.is_mixture else given
        return self.kind.around(given, self._first(one, objective, temperature), **self.numbers, **dict(self.choices))

    def _first(self, params: PyTree, objective: Any, temperature: Any) -> Any:
        """S₀."""
        if not (self.per_example or self.prior):
            return self.precision
        if objective is None:
            raise ValueError(
                "This algorithm starts from a precision that depends on the number of examples N and on the prior: "
                "make the state with rule.init(params, objective)."
            )
        if self.prior and not isinstance(temperature, Tracer) and float(temperature) <= 0:
            raise ValueError(
                "At a temperature of 0 this q would start with an infinite precision: let the schedule begin above 0, "
                "at 0.01 say."
            )
        first = jax.tree.map(lambda h: h * (objective.size if self.per_example else 1), self.precision)
        if not self.prior:
            return first
        added = objective.regularizer.precision(params)
        spread = lambda tree: tree if jax.tree.structure(tree) == like else jax.tree.map(lambda _: tree, params)
        like = jax.tree.structure(params)
        if like in (jax.tree.structure(first), jax.tree.structure(added)):  # maybe one number beside a pytree
            first, added = spread(first), spread(added)
        return jax.tree.map(lambda a, b: (a + b) / temperature, first, added)

    def of(self, kind: type[Family]) -> Start:
        """Another family that starts from the same precision; a mixture of this one."""
        how: dict[str, Any] = {"per_example": self.per_example, "prior": self.prior}
        if issubclass(kind, Mixture):
            how["component"] = self.part
        return Start(kind, self.precision, **how)

    def peaked(self, *names: str) -> Start:
        """A product whose blocks of these names (by default all that are not local) are read at their peak."""
        return Start(self.kind, self.precision, peaks=names)

    def _at_peaks(self, q: Product, objective: Any) -> Product:
        local = getattr(objective, "local", {})
        names = self.peaks or tuple(
            n for n, block in q.blocks.items() if n not in local and not block.prior_is_base_measure
        )
        unknown = [name for name in names if name not in q.blocks]
        if unknown:
            raise ValueError(f"There is no block {unknown[0]!r} to read at its peak, only {list(q.blocks)}.")
        for name in names:
            leaves = jax.tree.leaves(q.blocks[name].mode())
            known = not any(isinstance(x, Tracer) for x in leaves)
            flat = known and bool(jnp.any(getattr(q.blocks[name], "flat", False)))
            if flat or (known and not all(bool(jnp.all(jnp.isfinite(x))) for x in leaves)):
                raise ValueError(
                    f"The block {name!r} has no peak where it starts (a flat Dirichlet or Beta has none): start it "
                    "from a member with one, such as Dirichlet(1 + weights)."
                )
        read = lambda name, block: Peak(block) if name in names and not isinstance(block, Peak) else block
        return Product({name: read(name, block) for name, block in q.blocks.items()})

    def dropped(self, keep: Any, **choices: Any) -> Start:
        """The spike-and-slab mixture whose slab is this family: dropout with this keep probability."""
        numbers, own = self.numbers | {"keep": keep}, dict(self.choices) | choices
        how = {"per_example": self.per_example, "prior": self.prior, "numbers": numbers}
        return Start(SpikeSlab, self.precision, slab=self.kind, **how, **own)

    def __repr__(self) -> str:
        part = self.part
        if self.peaks is not None:
            return f"{self.kind.__name__} with {', '.join(self.peaks) or 'what is not local'} at its peak"
        return self.kind.__name__ if part is self.kind else f"{self.kind.__name__} of {part.__name__}"


def _widened(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    return array.astype(wide(array.dtype)) if jnp.issubdtype(array.dtype, jnp.floating) else array


def as_start(family: Any) -> Start:
    """A `Start` from a family's class (or from one already)."""
    if isinstance(family, Start):
        return family
    if isinstance(family, type) and issubclass(family, Family):
        return Start(family)
    raise ValueError(f"family= takes a family's class such as blr.Gaussian, got {family!r}.")
