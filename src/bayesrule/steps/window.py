"""How long a precision remembers, in passes over the data, and how it starts from what was measured."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .schedule import Number, PrecisionRate, at, format_number, number

WARM_UP = 20
"""The number of first steps whose curvatures are averaged with equal weights, and never below zero."""


class Window(PrecisionRate):
    r"""The decay of a precision as a number of epochs: a step on M of N examples forgets $1 − β_2 = M/(wN)$ of it.

    Then S stands for the examples of the last w passes over the data, whatever the batch size is. A decay in steps does
    not: 0.999 is two epochs of 60,000 examples in batches of 128, and 13 epochs of 10,000.

    Args:
        epochs: w.
        steps: The fewest steps that a window lasts: where an epoch has few batches, the noise of the points still has
            to be averaged.
        decay: β₂ where M is not known (an objective that is a plain function), or where there is no prior.

    >>> float(Window(2.0).forgotten(128 / 60_000))                    # 2 epochs have 937.5 batches
    0.00106...
    """

    epochs: Any
    steps: Any
    decay: Any

    def __init__(self, epochs: Number = 1.0, *, steps: Number = WARM_UP, decay: Number = 0.999):
        self.epochs = number(epochs, "The window in epochs")
        self.steps = number(steps, "The window in steps", low=1.0)
        self.decay = number(decay, "The decay", high=1.0)

    def forgotten(self, share: Any, count: Any = 0) -> Any:
        """1 − β₂, the part of the precision that one step replaces.

        Args:
            share: M/N, or None where it is not known.
            count: How many steps were taken before, for schedules.
        """
        if share is None:
            return 1 - at(self.decay, count)
        return 1 / jnp.maximum(at(self.epochs, count) / share, at(self.steps, count))

    def __repr__(self) -> str:
        return f"M/({format_number(self.epochs)}·N)"


def warming(averaged: Float[Array, ""]) -> Any:
    """Whether the precision is still an average of its first few measurements.

    Args:
        averaged: How many steps it has averaged so far (`State.averaged`).
    """
    return averaged < WARM_UP


def averaged_fraction(averaged: Float[Array, ""], forgotten: Any, *, nonnegative: bool) -> Any:
    """The part of the precision that this step replaces, if the precision starts from what is measured.

    At first it is the plain average of all measurements, 1/t, so that nothing is left of where it started; from the
    step on where the window is full it is the window's. Measurements that can be negative replace that much only in the
    first steps, for which they are made positive.

    Args:
        averaged: How many steps the precision has averaged so far, t − 1; infinite if it was given and not measured.
        forgotten: The window's or the decay's 1 − β₂.
        nonnegative: Whether every measurement is.
    """
    first = jnp.maximum(1 / (averaged + 1), forgotten)
    return first if nonnegative else jnp.where(warming(averaged), first, forgotten)
