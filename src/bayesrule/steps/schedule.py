"""Numbers that may change with the step count: rates, temperatures and other scheduled values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array

Number = float | int | Array | Callable[[Any], Any]


class Scheduled(eqx.Module):
    """A number that changes with the step count: any optax schedule."""

    schedule: Callable[[Any], Any] = eqx.field(static=True)

    def __repr__(self) -> str:
        return f"schedule {getattr(self.schedule, '__qualname__', str(self.schedule)).split('.')[0]}"


def number(value: Number, name: str, *, low: float = 0.0, high: float = float("inf")) -> Any:
    """A traced leaf for a constant (checked against its range), a `Scheduled` for a callable."""
    if isinstance(value, Scheduled):
        return value
    if callable(value):
        return Scheduled(value)
    if isinstance(value, Tracer):
        return value
    if jnp.ndim(value) == 0 and not low <= float(value) <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {bounds}, got {float(value):g}.")
    return value


def at(value: Any, count: Any) -> Any:
    """The number at this step count."""
    return value.schedule(count) if isinstance(value, Scheduled) else value


class Rates(eqx.Module):
    """Separate rates ρ for the mean and for the precision (section 4.2 of the paper)."""

    mean: Any
    precision: Any

    def __init__(self, mean: Number, precision: Number):
        self.mean = number(mean, "The mean's rate")
        self.precision = number(precision, "The precision's rate")


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _is_one(value: Any) -> bool:
    return isinstance(value, float | int) and value == 1
