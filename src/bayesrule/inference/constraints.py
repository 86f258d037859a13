"""Constraints by name for the parameters of a plain log density: NumPyro's bijections, with their Jacobians."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics.pytree import PyTree
from ..numerics.trees import floating


def path_of(path: Any) -> str:
    """A leaf's place in its pytree, such as "scale" or "layers/0/w"."""
    return "/".join(str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))) for entry in path)


class Hashed:
    """A constraint of NumPyro's, which can be compared but not hashed, as a part of what a program is kept under."""

    def __init__(self, constraint: Any):
        self.constraint = constraint

    def __hash__(self) -> int:
        return hash(type(self.constraint))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and bool(self.constraint == other.constraint)


@dataclasses.dataclass(frozen=True)
class Constrained:
    """A log density of constrained values as one of unconstrained values.

    Two of them are equal, and share their programs, where the function and the constraints are.

    Args:
        function: the log density of the values as users know them, `function(values, *arguments)`.
        constraints: pairs of a path and NumPyro's constraint for the leaf there, made hashable.
    """

    function: Callable[..., Any]
    constraints: tuple[tuple[str, Hashed], ...] = ()

    def __call__(self, theta: PyTree, *arguments: PyTree) -> Any:
        values, jacobian = self.transformed(theta)
        return self.function(values, *arguments) + jacobian

    def unconstrain(self, values: PyTree) -> PyTree:
        """The θ of these values."""
        bijections = self.bijections()

        def leaf(path: Any, value: Any) -> Any:
            transform = bijections.get(path_of(path))
            return value if transform is None else transform.inv(value)

        return jax.tree_util.tree_map_with_path(leaf, values)

    def bijections(self) -> dict[str, Any]:
        """NumPyro's bijection for every constrained leaf, by its path."""
        if not self.constraints:
            return {}
        from numpyro.distributions import biject_to

        return {path: biject_to(hashed.constraint) for path, hashed in self.constraints}

    def transformed(self, theta: PyTree) -> tuple[PyTree, Any]:
        """The values that users know, and the logarithm of the Jacobian's determinant."""
        bijections, jacobians = self.bijections(), [jnp.zeros(())]

        def leaf(path: Any, x: Any) -> Any:
            transform = bijections.get(path_of(path))
            if transform is None:
                return x
            value = transform(x)
            jacobians.append(jnp.sum(transform.log_abs_det_jacobian(x, value)))
            return value

        values = jax.tree_util.tree_map_with_path(leaf, theta)
        return values, sum(jacobians)


@dataclasses.dataclass(frozen=True)
class Values:
    """The values that users know, of an unconstrained θ: equal where the density is."""

    density: Constrained
    is_light: ClassVar[bool] = True

    def __call__(self, theta: PyTree, *arguments: PyTree) -> PyTree:
        return self.density.transformed(theta)[0]


def resolve(constraints: Mapping[str, Any] | None, start: PyTree) -> tuple[tuple[str, Hashed], ...]:
    """The constraints as NumPyro's objects, checked against the paths of the start.

    Args:
        constraints: by path; NumPyro's constraint objects, or their names such as "positive", "unit_interval",
            "simplex", "ordered_vector", "corr_cholesky".
        start: the pytree of values.
    """
    if not constraints:
        return ()
    paths = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(start)[0]]
    unknown = sorted(set(constraints) - set(paths))
    if unknown:
        raise ValueError(f"constraints= names {unknown}, which are not among the parameters: these are {paths}.")
    try:
        from numpyro.distributions import constraints as known
    except ImportError as error:
        raise ImportError(
            "Constraints are NumPyro's bijections, and NumPyro is not installed: pip install 'bayesrule[numpyro]'."
        ) from error
    resolved = []
    for path, given in constraints.items():
        constraint = getattr(known, given, None) if isinstance(given, str) else given
        if constraint is None or (isinstance(given, str) and given.startswith("_")):
            names = ", ".join(name for name in sorted(known.__all__) if name.islower())
            raise ValueError(
                f"constraints={{{path!r}: {given!r}}}: NumPyro has no constraint of that name, only {names}."
            )
        if constraint is known.real or constraint is known.real_vector:
            continue
        if getattr(constraint, "is_discrete", False):
            raise ValueError(f"{path!r} is constrained to be discrete ({given}): infer moves real numbers; sum it out.")
        resolved.append((path, Hashed(constraint)))
    return tuple(resolved)


def start_values(start: PyTree) -> tuple[PyTree, bool]:
    """The start as arrays of real numbers, and whether it has values; of shapes alone it has zeros."""
    is_shape = lambda x: (
        isinstance(x, jax.ShapeDtypeStruct)
        or (isinstance(x, tuple) and all(isinstance(n, int | np.integer) for n in x))
    )
    leaves = jax.tree.leaves(start, is_leaf=is_shape)
    if not leaves:
        raise ValueError("infer needs a start: a pytree of values, or of shapes, of the parameters.")
    if all(is_shape(leaf) for leaf in leaves):
        zeros = lambda leaf: jnp.zeros(leaf if isinstance(leaf, tuple) else leaf.shape)
        return jax.tree.map(zeros, start, is_leaf=is_shape), False
    return floating(jax.tree.map(jnp.asarray, start)), True
