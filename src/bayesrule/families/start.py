"""The family piece of an algorithm: which q, and how a member is made from bare parameters."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..numerics.frozen import split_off_integers
from ..numerics.pytree import PyTree
from ..numerics.trees import wide
from .base import Family
from .gaussian.diagonal import DiagonalGaussian
from .gaussian.precision import Structure
from .latent.mixture import Mixture
from .latent.spike_slab import SpikeSlab
from .point_mass import Peak
from .product import Product


class Start(eqx.Module):
    """A family, and how its first member is made by `rule.init`.

    From bare parameters the member is `kind.around(params, S₀, **hyperparameters, **choices)`. The initial precision S₀
    is `precision`; with `per_example` and `prior` it is (N · precision + δ)/τ, with the number of examples N, the
    prior's precision δ and the temperature τ, because the posterior's precision is of that size. With `measured` it is
    the prior's, δ/τ, where the prior is a proper one: the first step measures the rest.

    Args:
        kind: the family's class.
        precision: S₀, one number or a pytree like the parameters.
        per_example: whether `precision` is the curvature of the mean loss, so that it is multiplied by N.
        prior: whether the prior's precision is added, and the sum divided by the temperature.
        measured: whether the first step replaces the initial precision by what it measures (`Steps(measured=True)`).
        hyperparameters: arguments of `around` that are traced (a change does not recompile), such as a skew.
        point_masses: names of blocks of a product that are read at their mode; () for all that are not local, None
            for none.
        choices: arguments of `around` that are compiled in, such as the class of a mixture's components.
    """

    kind: type[Family] = eqx.field(static=True)
    precision: Any
    hyperparameters: dict[str, Any]
    choices: tuple[tuple[str, Any], ...] = eqx.field(static=True)
    per_example: bool = eqx.field(static=True)
    prior: bool = eqx.field(static=True)
    measured: bool = eqx.field(static=True)
    point_masses: tuple[str, ...] | None = eqx.field(static=True)

    def __init__(
        self,
        kind: type[Family],
        precision: Any = 1.0,
        *,
        per_example: bool = False,
        prior: bool = False,
        measured: bool = False,
        hyperparameters: dict[str, Any] | None = None,
        point_masses: tuple[str, ...] | None = None,
        **choices: Any,
    ):
        self.kind, self.precision = kind, precision
        self.per_example, self.prior, self.measured, self.point_masses = per_example, prior, measured, point_masses
        self.hyperparameters = {} if hyperparameters is None else hyperparameters
        self.choices = tuple(sorted(choices.items()))

    @property
    def structure(self) -> str | None:
        """The name of the precision's structure; None where the family has no precision, or only a member knows."""
        structure = getattr(self.part, "structure", None)
        return structure.name if isinstance(structure, Structure) else None

    @property
    def label(self) -> str:
        """The family's name in Table 1."""
        return self.kind.label if self.point_masses is None else "Exponential family + point"

    @property
    def approximation(self) -> str:
        """The approximations that the family piece makes, in Table 1's words, separated by commas.

        A precision that is stated per example is for rates of the mean loss, which mini-batches estimate.
        """
        phrases = ["Delta method for the parameters"] if self.point_masses is not None else []
        return ", ".join([*phrases, *["stochastic approx."] * self.per_example])

    @property
    def part(self) -> type[Family]:
        """The family that takes the steps: the components of a mixture, the slab of a spike-and-slab, else `kind`."""
        choices = dict(self.choices)
        return choices.get("slab", choices.get("component", self.kind))

    def start(self, given: PyTree, objective: Any = None, temperature: Any = 1.0) -> Family:
        """Make the member that a state starts from; called by `rule.init`.

        Args:
            given: a member of the family, which is returned; a dict of members, which becomes a `Product`; or bare
                parameters.
            objective: for N and the prior, where S₀ depends on them.
            temperature: the temperature of the first step.
        """
        if given is None:
            raise ValueError("This algorithm needs a start: pass parameters, or a member of its family.")
        if isinstance(given, dict) and self.is_member(given):
            given = Product(given)
        if isinstance(given, Product) and self.point_masses is not None:
            given = self._with_blocks_at_mode(given, objective)
        if isinstance(given, Family):
            if not isinstance(given, self.kind):
                raise ValueError(
                    f"This algorithm moves a {self.kind.__name__}, and the start is a {type(given).__name__}. Start "
                    f"from a {self.kind.__name__}, or change the algorithm: rule.replace(family=…, curvature=…)."
                )
            return given
        leaves = jax.tree.leaves(given)
        if not all(isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") for leaf in leaves):
            raise ValueError(
                "Parameters must be arrays in containers, and some leaves of these are not (for example the activation "
                "functions of a module): split them off with eqx.partition(module, eqx.is_inexact_array) and combine "
                "them in apply."
            )
        if any(jnp.iscomplexobj(leaf) for leaf in leaves):
            raise ValueError("Parameters must be real: split complex ones into real and imaginary parts.")
        if split_off_integers(given)[1] is not None:
            raise ValueError(
                "Some parameters are arrays of integers or booleans, which have no gradient: split them off with "
                "params, frozen = blr.freeze(params), and give the objective frozen=frozen."
            )
        # A family that does not say otherwise keeps half-precision parameters in float32.
        params = jax.tree.map(jnp.asarray if self.kind.keeps_half_precision else _widen, given)
        one_member = jax.tree.map(lambda x: x[0] if jnp.ndim(x) else x, params) if self.kind.is_mixture else params
        precision = self._initial_precision(one_member, objective, temperature)
        member = self.kind.around(params, precision, **self.hyperparameters, **dict(self.choices))
        return member.begun(objective, temperature)

    @staticmethod
    def is_member(given: PyTree) -> bool:
        """Whether a start is a member of a family, or a dict of members, and not bare parameters."""
        is_family = lambda value: isinstance(value, Family)
        blocks = given.values() if isinstance(given, dict) else ()
        return is_family(given) or (len(blocks) > 0 and all(map(is_family, blocks)))

    def _initial_precision(self, params: PyTree, objective: Any, temperature: Any) -> Any:
        """S₀, for the parameters of one member."""
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
                "for example at 0.01."
            )
        # Of a number the first measurement replaces nothing is left but its rounding error, so that it should be small.
        is_measured = self.measured and objective.knows_batch_size
        is_prior = is_measured and objective.regularizer.normalized(DiagonalGaussian(params))
        factor = 0.0 if is_prior else objective.size if self.per_example else 1
        precision = jax.tree.map(lambda h: h * factor, self.precision)
        if not self.prior:
            return precision
        prior_precision = objective.regularizer.precision(params)
        like = jax.tree.structure(params)
        # One of the two may be a single number and the other a pytree; then the number holds for every leaf.
        if like in (jax.tree.structure(precision), jax.tree.structure(prior_precision)):
            expand = lambda tree: tree if jax.tree.structure(tree) == like else jax.tree.map(lambda _: tree, params)
            precision, prior_precision = expand(precision), expand(prior_precision)
        return jax.tree.map(lambda a, b: (a + b) / temperature, precision, prior_precision)

    def of(self, kind: type[Family]) -> Start:
        """Another family with the same initial precision; if it is `Mixture`, a mixture of this one."""
        options: dict[str, Any] = {"per_example": self.per_example, "prior": self.prior, "measured": self.measured}
        if issubclass(kind, Mixture):
            options["component"] = self.part
        return Start(kind, self.precision, **options)

    def with_point_masses(self, *names: str) -> Start:
        """A product whose blocks of these names (by default all that are not local) are read at their mode."""
        return Start(self.kind, self.precision, point_masses=names)

    def _with_blocks_at_mode(self, q: Product, objective: Any) -> Product:
        """The product with the chosen blocks wrapped in `Peak`, after a check that they have a mode."""
        local = getattr(objective, "local", {})
        names = self.point_masses or tuple(
            n for n, block in q.blocks.items() if n not in local and not block.prior_is_base_measure
        )
        unknown = [name for name in names if name not in q.blocks]
        if unknown:
            raise ValueError(f"There is no block {unknown[0]!r} to read at its mode, only {list(q.blocks)}.")
        for name in names:
            if not _has_mode(q.blocks[name]):
                raise ValueError(
                    f"The block {name!r} has no mode at its start (a flat Dirichlet or Beta has none): start it "
                    "from a member with one, such as Dirichlet(1 + weights)."
                )
        wrap = lambda name, block: Peak(block) if name in names and not isinstance(block, Peak) else block
        return Product({name: wrap(name, block) for name, block in q.blocks.items()})

    def dropped(self, keep: Any, **choices: Any) -> Start:
        """The spike-and-slab mixture whose slab is this family: dropout with this keep probability."""
        hyperparameters = self.hyperparameters | {"keep": keep}
        options = {"per_example": self.per_example, "prior": self.prior, "measured": self.measured}
        options |= {"hyperparameters": hyperparameters}
        return Start(SpikeSlab, self.precision, slab=self.kind, **options, **dict(self.choices) | choices)

    def __repr__(self) -> str:
        part = self.part
        if self.point_masses is not None:
            blocks = ", ".join(self.point_masses) or "all blocks that are not local"
            return f"{self.kind.__name__} with {blocks} at the mode"
        return self.kind.__name__ if part is self.kind else f"{self.kind.__name__} of {part.__name__}"


def _has_mode(block: Any) -> bool:
    """Whether a block has a single mode, which is finite; True where its parameters are traced, and not known."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(block)):
        return True
    # NumPy's arrays are computed with on the host, where a new shape costs no program.
    block = jax.tree.map(np.asarray, block)
    with np.errstate(all="ignore"):
        modes = [np.asarray(leaf) for leaf in jax.tree.leaves(block.mode())]
    return not np.any(getattr(block, "flat", False)) and all(np.all(np.isfinite(mode)) for mode in modes)


def _widen(leaf: Any) -> Any:
    """The leaf in float32 if it is of lower precision."""
    array = jnp.asarray(leaf)
    return array.astype(wide(array.dtype)) if jnp.issubdtype(array.dtype, jnp.floating) else array


def as_start(family: Any) -> Start:
    """A `Start` from a family's class (or from one already)."""
    if isinstance(family, Start):
        return family
    if isinstance(family, type) and issubclass(family, Family):
        return Start(family)
    raise ValueError(f"family= takes a family's class such as blr.Gaussian, got {family!r}.")
