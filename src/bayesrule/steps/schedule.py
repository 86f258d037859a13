"""Numbers that may change with the step count: rates, temperatures and other scheduled values.

A constant is a leaf of the rule's pytree, so that a sweep over rates does not recompile; a schedule is a static
function.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

from ..numerics.frozen import path_of
from ..numerics.pytree import PyTree

Scalar = float | Array
"""A number of a step: a Python number, or an array without axes."""

Number = float | int | Array | Callable[[Any], Any]

Rate = Number | Mapping[str, Number]
"""A rate, or rates for parts of the parameters by the beginning of their path (see `Rates`)."""


class Scheduled(eqx.Module):
    """A number that changes with the step count: `schedule(count)` is any optax schedule."""

    schedule: Callable[[Any], Any] = eqx.field(static=True)

    def __repr__(self) -> str:
        return f"schedule {getattr(self.schedule, '__qualname__', str(self.schedule)).split('.')[0]}"


class Planned(eqx.Module):
    """A number that changes with the part of the planned steps that is taken: `WarmUp`."""

    @abc.abstractmethod
    def at(self, count: Any, horizon: Any) -> Any:
        """The number after `count` steps, of `horizon` that are planned; None where nobody knows how many will be."""


def number(value: Number | Planned, name: str, *, low: float = 0.0, high: float = float("inf")) -> Any:
    """`value` as a field of a piece: a constant as it is, checked against its range; a callable as a `Scheduled`.

    Args:
        value: A number, an array, or a function of the step count.
        name: How an error names it, as the subject of a sentence.
        low: The smallest constant allowed.
        high: The largest constant allowed.
    """
    if isinstance(value, Scheduled | Planned):
        return value
    if callable(value):
        return Scheduled(value)
    if isinstance(value, Tracer):
        return value
    if jnp.ndim(value) == 0 and not low <= float(value) <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {bounds}, got {float(value):g}.")
    return value


def at(value: Any, count: Any, horizon: Any = None) -> Any:
    """The number at this step count: a schedule is evaluated, at an int32 as optax does; a constant is returned.

    Args:
        value: What `number` returned.
        count: How many steps were taken before.
        horizon: How many steps are planned in all (`State.horizon`), where that is known.
    """
    if isinstance(value, Planned):
        return value.at(count, horizon)
    return value.schedule(jnp.asarray(count, jnp.int32)) if isinstance(value, Scheduled) else value


class PrecisionRate(eqx.Module):
    """What a precision's rate may be besides a number and a schedule: `Window`, which says how it is computed."""


class Rates(eqx.Module):
    """Separate rates ρ for the mean and for the precision (section 4.2 of the paper).

    Args:
        mean: ρ₁, the rate of the mean: a number, or a schedule (a function of the step count). A dict has rates for
            parts of the parameters, by the beginning of their path, and under "" the rate of all others:
            `{"": 0.01, "head": 0.1, "layers/0": 0.001}`.
        precision: ρ₂, the rate of the precision, or a `Window` in epochs. In a `dropout` whose keep probability is
            learnt, the rate of that.

    >>> import bayesrule as blr, optax
    >>> print(blr.Steps(blr.Rates(optax.cosine_decay_schedule(1e-2, 100), precision=1e-3)))
    ρ₁ = schedule cosine_decay_schedule (mean), ρ₂ = 0.001 (precision)
    >>> blr.Rates({"": 1e-2, "head": 1e-1}, 1e-3).groups
    {'head': 0.1}
    """

    mean: Any
    precision: Any
    groups: dict[str, Any]

    def __init__(self, mean: Number | Mapping[str, Number], precision: Number | Mapping[str, Number] | PrecisionRate):
        groups = dict(mean) if isinstance(mean, Mapping) else {"": mean}
        if "" not in groups:
            raise ValueError('A dict of rates has the rate of all other parameters under the empty path, "".')
        self.mean = number(groups.pop(""), "The mean's rate")
        self.groups = {path: number(rate, f"The rate of {path!r}") for path, rate in groups.items()}
        precision = precision[""] if isinstance(precision, Mapping) else precision
        if isinstance(precision, PrecisionRate | Scheduled):
            self.precision = precision
        elif isinstance(precision, str | None) or (isinstance(precision, eqx.Module) and not callable(precision)):
            raise ValueError(
                "The precision's rate is a number, a schedule (a function of the step count) or a Window in epochs, "
                f"got a {type(precision).__name__}."
            )
        else:
            self.precision = number(precision, "The precision's rate")

    def for_groups(self, gradient: PyTree, count: Any) -> PyTree:
        """The gradient with each group's entries multiplied by its rate's ratio to that of all others."""
        if not self.groups:
            return gradient
        used: set[str] = set()

        def scaled(path: Any, leaf: Array) -> Array:
            place = path_of(path)
            # The longest path that a leaf's begins with is the one that is meant.
            fitting = [name for name in self.groups if f"{place}/".startswith(f"{name.rstrip('/')}/")]
            if not fitting:
                return leaf
            name = max(fitting, key=len)
            used.add(name)
            return leaf * jnp.asarray(at(self.groups[name], count) / at(self.mean, count), leaf.dtype)

        new = jax.tree_util.tree_map_with_path(scaled, gradient)
        unused = sorted(set(self.groups) - used)
        if unused:
            places = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradient)]
            raise ValueError(f"There is a rate for {unused[0]!r}, and no such parameters, only {places}.")
        return new

    @property
    def single(self) -> bool:
        """Whether mean and precision have one rate. Traced numbers cannot be compared, and count as one."""
        mean, precision = self.mean, self.precision
        if isinstance(precision, PrecisionRate):
            return False
        if isinstance(mean, Scheduled) or isinstance(precision, Scheduled):
            return getattr(mean, "schedule", mean) is getattr(precision, "schedule", precision)
        known = isinstance(mean, float | int) and isinstance(precision, float | int)
        return not known or mean == precision


def format_number(value: Any) -> str:
    """A number or a schedule, for printing."""
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def equals(value: Any, constant: float) -> bool:
    """Whether a value is a plain number equal to this constant; False for arrays, traced numbers and schedules."""
    return isinstance(value, float | int) and value == constant
