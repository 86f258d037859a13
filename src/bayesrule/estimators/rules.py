"""Recipes by name for linear models: Newton's steps where a pass over the data is a step, rates that fall elsewhere."""

from __future__ import annotations

from collections.abc import Callable
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


@cache
def _named(outputs: int, steps: int, narrow: bool) -> dict[str, Callable[[], Rule]]:
    falling = lambda rate: optax.cosine_decay_schedule(rate, steps)
    # Points of each example's outputs, the same at every step: so that a fit settles.
    points = Quadrature(_ORDER) if outputs == 1 else QuasiMonteCarlo(_SAMPLES)
    variational = von(0.7).replace(points=points, guard=Backtracking(monotone=True))
    rules = {
        "auto": laplace() if narrow else variational,
        "von": variational,
        "laplace": laplace(),
        "newton": newton(),
        "ogn": ogn(falling(0.3)),
        "vogn": vogn(falling(0.3)),
        "ivon": ivon(falling(0.3)),
        "adam": adam(falling(0.1)),
        "rmsprop": rmsprop(falling(0.1)),
        "sgd": sgd(falling(0.5)),
    }
    return {name: partial(_same, rule) for name, rule in rules.items()}


def _same(rule: Rule) -> Rule:
    return rule


def linear_rule(recipe: Any, outputs: int, steps: int, estimator: Any, shape: tuple[int, ...] = (0, 1)) -> Rule:
    """The rule that a linear model's `recipe=` stands for, over so many steps, for data of this shape."""
    return chosen(recipe, _named(outputs, max(1, steps), shape[0] > NARROW * shape[1]), estimator)
