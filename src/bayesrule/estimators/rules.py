"""Recipes by name for linear models: Newton's steps where a pass over the data is a step, rates that fall elsewhere."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import optax

from ..guards import Backtracking
from ..points import Quadrature, QuasiMonteCarlo
from ..recipes import adam, ivon, laplace, newton, ogn, rmsprop, sgd, vogn, von
from ..rule import Rule
from .base import chosen

_ORDER = 24  # points for one output; a rate of 0.7 settles where 1 goes to and fro
NARROW = 1000  # rows for each feature, of which q is so narrow that an average over it is its middle
_SAMPLES = 32


_FALLING = {"ogn": (ogn, 0.3), "vogn": (vogn, 0.3), "ivon": (ivon, 0.3)}
_FALLING |= {"adam": (adam, 0.1), "rmsprop": (rmsprop, 0.1), "sgd": (sgd, 0.5)}
_NAMES = ("auto", "von", "laplace", "newton", *_FALLING)


@cache
def _named(name: str, outputs: int, steps: int, narrow: bool) -> Rule:
    """Made once: a schedule is a function, and another one would be compiled for again."""
    if name in _FALLING:
        recipe, rate = _FALLING[name]
        return recipe(optax.cosine_decay_schedule(rate, steps))
    if name == "newton":
        return newton()
    if name == "laplace" or (name == "auto" and narrow):
        return laplace()
    # Points of each example's outputs, the same at every step: so that a fit settles.
    points = Quadrature(_ORDER) if outputs == 1 else QuasiMonteCarlo(_SAMPLES)
    return von(0.7).replace(points=points, guard=Backtracking(monotone=True))


def linear_rule(recipe: Any, outputs: int, steps: int, estimator: Any, shape: tuple[int, ...] = (0, 1)) -> Rule:
    """The rule that a linear model's `recipe=` stands for, over so many steps, for data of this shape."""
    settings = outputs, max(1, steps), shape[0] > NARROW * shape[1]
    return chosen(recipe, {name: partial(_named, name, *settings) for name in _NAMES}, estimator)
