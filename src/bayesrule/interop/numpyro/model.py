"""The model as a density: log p of its continuous latent sites on their unconstrained space, for `infer_density`."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_sample
from numpyro.infer.util import constrain_fn, potential_energy

from ...inference.density import Density, traced_once
from ...numerics.pytree import PyTree
from ...numerics.random import Key
from .enumeration import Discrete, enumerated
from .sites import LOOKS_AT_VALUES, Model, Outline, Sites, check_sites, look, observed_sites, run
from .sites import unconstrained as unconstrained_value


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model with its arguments, and what tracing it has shown.

    Args:
        model: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outline: its sites, without their values.
        learned: the values of `numpyro.param` and of mutable states, which are not inferred, as under NUTS.
        discrete: the discrete latent sites, which are summed out, and what depends on them; None if there are none.
    """

    model: Model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outline: Outline
    learned: dict[str, Any]
    discrete: Discrete | None

    @staticmethod
    def of(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Traced:
        """Trace the model, or run it where that is not enough, and check that every latent site can be inferred."""
        args, kwargs = tuple(args), dict(kwargs or {})
        known = _outlines.get(_signature(model, args, kwargs))
        outline = look(model, args, kwargs) if known is None else known
        if outline is not None and not outline.needs_values:
            return Traced(model, args, kwargs, outline, {}, None)
        sites = run(model, args, kwargs)
        if outline is None:
            check_sites(sites)
        learned = {name: site["value"] for name, site in sites.items() if site["type"] in ("param", "mutable")}
        discrete = Discrete.of(model, args, kwargs, sites)
        return Traced(model, args, kwargs, Outline.of(sites), learned, discrete)

    @cached_property
    def sites(self) -> Sites:
        """The trace of one run at values inside of all constraints."""
        return run(self.model, self.args, self.kwargs)

    @property
    def observed(self) -> dict[str, np.ndarray]:
        """The observed sites and their values."""
        return {name: np.asarray(site["value"]) for name, site in observed_sites(self.sites).items()}

    @property
    def fixed_model(self) -> Model:
        """The model with its learned values in it."""
        return with_values(self.model, self.learned)

    def density(self, *, dynamic: bool = True) -> Density:
        """The joint density of the latent sites on their unconstrained space.

        Args:
            dynamic: whether arrays among the arguments are arguments of the compiled programs; else they are constants,
                for models that look at their values while they are traced.
        """
        arrays, structure, static = _parts_of(self.args, self.kwargs, dynamic=dynamic)
        call = Call(self.model, structure, static, None if self.discrete is None else self.discrete.nesting)
        # Zeros of the host: to make them on a device compiles a program for every shape.
        like = {name: jnp.asarray(np.zeros(x.shape, x.dtype)) for name, x in self.outline.latent.items()}
        if not like:
            raise ValueError("This model has no continuous latent site: there is nothing to infer.")
        names = tuple(sorted(like))
        supports = tuple((name, self.outline.supports[name]) for name in names if name in self.outline.supports)
        values = Bijections(supports) if len(supports) == len(names) else Values(call, names)
        return Density(LogJoint(call), ((arrays, self.learned),), like, values, PriorDraw(call, names))

    def usable_density(self) -> Density:
        """The density with its data as arguments, or as constants where the model looks at their values.

        An error where the model looks at the value of a latent site, or where it cannot be run on all values of its
        discrete sites at once.
        """
        density = self.density()
        try:
            density = self._tried(density)
        except LOOKS_AT_VALUES:
            density = self.density(dynamic=False)
        else:
            # The sites do not depend on the values of arrays: other data of these shapes need no look at the model.
            if not self.outline.needs_values:
                _remember(_signature(self.model, self.args, self.kwargs), self.outline)
            return density
        try:
            return self._tried(density)
        except LOOKS_AT_VALUES as error:
            raise ValueError(
                "The model looks at the value of a latent site while it is traced, by an `if`, a loop, `float()` or "
                "NumPy, and its density has no derivatives there: use jnp.where, jax.lax.cond or jax.lax.scan, and "
                f"jax.numpy. JAX says: {str(error).splitlines()[0]}"
            ) from error

    def _tried(self, density: Density) -> Density:
        try:
            jax.eval_shape(traced_once(density.function), density.like, *density.arguments)
        except LOOKS_AT_VALUES:
            raise
        except Exception as error:
            if self.discrete is None:
                raise
            raise self.discrete.error(self.sites, error) from error
        return density

    @property
    def values(self) -> tuple[str, ...]:
        """The sites that draws of the posterior have: latent and deterministic ones, without those that hang on z."""
        left_out = set() if self.discrete is None else {*self.discrete.sites, *self.discrete.dependent}
        latent = self.outline.latent
        kept = [name for name, kind in self.outline.types.items() if kind == "deterministic" or name in latent]
        return tuple(name for name in kept if name not in left_out)


def with_values(model: Model, values: Mapping[str, Any]) -> Model:
    """The model with some of its sites' values given."""
    return handlers.substitute(model, data=dict(values)) if values else model


_outlines: OrderedDict[Hashable, Outline] = OrderedDict()
_MOST_OUTLINES = 64


def _remember(signature: Hashable, outline: Outline) -> None:
    """Keep the outline of a model for its next fit; the oldest is forgotten."""
    _outlines[signature] = outline
    if len(_outlines) > _MOST_OUTLINES:
        _outlines.popitem(last=False)


def _signature(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What the outline of a model depends on, if that does not look at values: as JAX's programs do."""
    arrays, structure, static = _parts_of(args, kwargs, dynamic=True)
    return model, structure, static, tuple((leaf.shape, leaf.dtype) for leaf in arrays)


def _parts_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, dynamic: bool
) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """The arrays among the arguments, the structure of these, and the static leaves with a mark for every array."""
    leaves, structure = jax.tree.flatten((args, dict(kwargs)), is_leaf=lambda leaf: leaf is None)
    arrays = [leaf for leaf in leaves if dynamic and _is_array(leaf)]
    return arrays, structure, tuple(_PLACE if dynamic and _is_array(leaf) else _hashable(leaf) for leaf in leaves)


_PLACE = "an array"  # Stands for an array among the static parts of the arguments.


class _Constant:
    """A value that cannot be hashed, equal only to itself."""

    def __init__(self, value: Any):
        self.value = value


def _is_array(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or leaf.dtype == object:
        return False
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return _Constant(leaf)
    return leaf


Data = tuple[Sequence[Any], Mapping[str, Any]]
"""The arrays among a model's arguments, and the values of its `numpyro.param`s."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A model and its arguments without their arrays: equal, and hence compiled once, where all of these are.

    Python's numbers stay static, because they may decide shapes.

    Args:
        model: the model.
        structure: the pytree of positional and keyword arguments.
        static: its leaves, with a mark in the place of every array.
        nesting: with discrete sites that are summed out, how many plates are nested in each other; None without.
    """

    model: Model
    structure: Any
    static: tuple[Any, ...]
    nesting: int | None

    def bound(self, data: Data) -> tuple[Model, tuple[Any, ...], dict[str, Any]]:
        """The model with its learned values, and its arguments with these arrays in their places."""
        arrays, learned = data
        rest = iter(arrays)
        leaves = [
            next(rest) if leaf is _PLACE else leaf.value if isinstance(leaf, _Constant) else leaf
            for leaf in self.static
        ]
        return with_values(self.model, learned), *jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True)
class LogJoint:
    """log p(θ, data) of unconstrained values, with the Jacobians, and with the discrete sites summed out."""

    call: Call

    def __call__(self, theta: PyTree, data: Data) -> Any:
        model, args, kwargs = self.call.bound(data)
        seeded = handlers.seed(model, 0)  # for what has no value, such as dropout
        if self.call.nesting is None:
            return -potential_energy(seeded, args, kwargs, theta)
        return -potential_energy(enumerated(seeded, self.call.nesting), args, kwargs, theta, enum=True)


@dataclasses.dataclass(frozen=True)
class Values:
    """The sites' values from unconstrained ones.

    Args:
        call: the model.
        names: the sites to return, latent and deterministic ones.
    """

    call: Call
    names: tuple[str, ...]

    def __call__(self, theta: PyTree, data: Data) -> dict[str, Any]:
        model, args, kwargs = self.call.bound(data)
        found = constrain_fn(handlers.seed(model, 0), args, kwargs, theta, return_deterministic=True)
        return {name: found[name] for name in self.names}


@dataclasses.dataclass(frozen=True)
class Bijections:
    """The latent sites' values from unconstrained ones, where no support depends on a value: without the model.

    Args:
        supports: the name of every site, and its support as the structure of a pytree without leaves.
    """

    supports: tuple[tuple[str, Any], ...]
    is_light: ClassVar[bool] = True

    def __call__(self, theta: PyTree, data: Data) -> dict[str, Any]:
        return {name: biject_to(jax.tree.unflatten(support, []))(theta[name]) for name, support in self.supports}


@dataclasses.dataclass(frozen=True)
class PriorDraw:
    """A draw of the latent sites from the prior, unconstrained; where a site cannot be drawn, from around zero."""

    call: Call
    names: tuple[str, ...]

    def __call__(self, key: Key, data: Data) -> dict[str, Any]:
        sites = run(*self.call.bound(data), key, init_to_sample)
        return {name: unconstrained_value(sites[name]) for name in self.names}
