"""The recipes that estimators know by name, with the rates that each of them uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import optax

from ..curvature.gradient import Gradient, SquaredGradient
from ..points.quadrature import Quadrature
from ..points.relaxed import Sign
from ..points.sampling import QuasiMonteCarlo
from ..recipes import (
    adam,
    bayesbinn,
    dropout,
    ivon,
    laplace,
    newton,
    oggn,
    ogn,
    rmsprop,
    sgd,
    slang,
    straight_through,
    voggn,
    vogn,
    von,
)
from ..rule.rule import Rule
from ..steps.guards import Backtracking
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


# With relative=False the rate is the share of a Newton step, which needs no units; the curvature that the mean loss is
# first taken to have is forgotten over a hundred steps.
_ONLINE = {"relative": False, "decay": 0.99}


_GAUSSIAN: dict[str, tuple[float, Callable[..., Rule]]] = {
    "ivon": (0.1, partial(ivon, **_ONLINE)),
    "vogn": (0.1, partial(vogn, **_ONLINE)),
    "voggn": (0.1, partial(voggn, **_ONLINE)),
    "ogn": (0.1, partial(ogn, **_ONLINE)),
    "oggn": (0.1, partial(oggn, **_ONLINE)),
    "slang": (0.1, slang),
    "adam": (0.03, adam),
    "rmsprop": (0.01, rmsprop),
    "sgd": (0.05, partial(sgd, momentum=0.9)),
    "dropout": (0.2, dropout),
}


_POINT = ("adam", "rmsprop", "sgd", "dropout")  # these have no temperature
GAUSSIAN = tuple(_GAUSSIAN)


@lru_cache(maxsize=256)
def gaussian(name: str, steps: int | None, temperature: float, pace: float = 1.0, curvature: float = 1.0) -> Rule:
    """A recipe whose rate falls to nothing along a cosine, or for a stream (None) stays at a third of where it begins.

    `pace` multiplies the rates, and `curvature` the curvature to start from. One rule for each choice: a schedule is a
    function, and a new one would be compiled again.
    """
    rate, recipe = _GAUSSIAN[name]
    options = {} if name in _POINT else {"temperature": temperature, "curvature": 0.1 * curvature}
    return recipe(_falling(pace * rate, steps), **options)


@lru_cache(maxsize=256)
def binary(name: str, steps: int | None) -> Rule:
    """The same for recipes of ±1 weights."""
    if name == "bayesbinn":
        # Without smoothing the scale of the gradients has tails so heavy that wider networks end in numbers too large.
        return bayesbinn(_falling(_BINARY[name], steps), smoothing=0.1, averaging=0.9, temperature=0.1)
    return straight_through(_falling(_BINARY[name], steps), averaging=0.9)


_BINARY = {"bayesbinn": 0.1, "straight_through": 3.0}
BINARY = tuple(_BINARY)


def _falling(rate: float, steps: int | None) -> Any:
    return rate / 3 if steps is None else optax.cosine_decay_schedule(rate, steps)


def predicts(rule: Rule) -> str:
    """How to predict with its q: over draws, linearised where it was made at its mean, or at the mean (signs) alone."""
    if isinstance(rule.points, Sign):
        return "signs"
    if not rule.points.delta:
        return "samples"
    return "mean" if isinstance(rule.curvature, Gradient | SquaredGradient) else "linearized"
