"""The recipes that `recipe=` names: for each kind of model, the rules with a schedule of rates that suits it.

A name stands for a recipe with all of its numbers chosen, for a given number of steps. There are three kinds of model:
linear models (`linear_rule`), networks with a Gaussian posterior (`network_rule`) and networks with binary weights
(`binary_network_rule`). Rules are cached, because a schedule is a function, and a new function would make `fit` compile
again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import optax

from ..curvature.gradient import Gradient, SquaredGradient
from ..curvature.hessian import HessianDiagonal
from ..families.gaussian.block_diagonal import BlockDiagonalGaussian
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.start import Start
from ..models.row_space import is_wide
from ..points.base import Delta
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
from ..steps.acceleration import Anderson
from ..steps.guards import Backtracking
from ..steps.steps import Steps
from .base import choose_rule


def _decaying(rate: float, steps: int) -> Callable[[Any], Any]:
    """A rate that falls to 0 over so many steps along a cosine."""
    return optax.cosine_decay_schedule(rate, steps)


def _decaying_or_constant(rate: float, steps: int | None) -> Any:
    """A decaying rate; for a stream of unknown length (None), a third of it throughout."""
    return rate / 3 if steps is None else _decaying(rate, steps)


# Linear models.

CONCENTRATED = 1000
"""Rows per feature beyond which the posterior is so concentrated that Laplace's method equals variational inference."""
_QUADRATURE_ORDER = 24
_QUASI_MONTE_CARLO_SAMPLES = 32
MANY_WEIGHTS = 300
"""With more weights of several outputs than this, a step of variational inference is expensive."""
MANY_STEPS = 12
"""How many steps are then taken from Laplace's posterior."""
_MANY_RATE, _MANY_SAMPLES = 0.5, 128
_MOST_IN_ROW_SPACE = 2000  # The most weights of all outputs in the space of the rows of a wide table.
_MOST_IN_BLOCKS = 2**23  # The most numbers in the classes' own precisions, 64 megabytes.
_BY_CLASS_RATE, _BY_CLASS_SAMPLES = 0.5, 32
_VARIATIONAL_RATE = 0.7  # Full steps of variational Newton can oscillate around the optimum.
_DECAYING: dict[str, tuple[Callable[..., Rule], float]] = {
    "ogn": (partial(ogn, relative=True), 0.3),
    "vogn": (partial(vogn, relative=True), 0.3),
    "ivon": (partial(ivon, relative=True), 0.3),
    "adam": (adam, 0.1),
    "rmsprop": (rmsprop, 0.1),
    "sgd": (sgd, 0.5),
}
LINEAR = ("auto", "von", "by_class", "mean_field", "laplace", "newton", *_DECAYING)


def linear_rule(
    recipe: Any,
    outputs: int,
    steps: int,
    estimator: Any,
    shape: tuple[int, ...] = (0, 1),
    bend: float | None = None,
) -> Rule:
    """The rule that `recipe=` of a linear model stands for.

    Args:
        recipe: a name in `LINEAR`, or a rule.
        outputs: how many outputs the model has; of K classes K − 1.
        steps: how many steps will be taken.
        estimator: whose parameter it is, named in errors.
        shape: rows and features of the data, by which "auto" chooses.
        bend: as for `Quadrature`.
    """
    in_row_space = is_wide(*shape) and shape[0] * outputs <= _MOST_IN_ROW_SPACE
    if isinstance(recipe, str) and recipe == "auto" and has_many_weights(shape[1], outputs) and not in_row_space:
        # Without covariances between classes steps are so cheap that the prior's strength can be chosen by the bound
        # itself, which matters more for predictions than those covariances.
        recipe = "by_class" if shape[1] ** 2 * outputs <= _MOST_IN_BLOCKS else "mean_field"
    facts = shape[0] > CONCENTRATED * shape[1], has_many_weights(shape[1], outputs), bend
    named = {name: partial(_named_linear_rule, name, outputs, max(1, steps), *facts) for name in LINEAR}
    return choose_rule(recipe, named, estimator)


def has_many_weights(features: int, outputs: int) -> bool:
    """Whether a model of several outputs has so many weights that a step of variational inference is expensive."""
    return outputs > 1 and features * outputs > MANY_WEIGHTS


@cache
def _named_linear_rule(name: str, outputs: int, steps: int, concentrated: bool, many: bool, bend: float | None) -> Rule:
    if name in _DECAYING:
        recipe, rate = _DECAYING[name]
        return recipe(_decaying(rate, steps))
    if name == "newton":
        return newton()
    if name == "laplace" or (name == "auto" and concentrated):
        return laplace()
    if name == "by_class" and outputs > 1:
        # The classes move at the same time, each as if the others stood still. As diag(p) − ppᵀ ≤ 2 diag(p(1 − p)),
        # half steps are not too long, and need no guard that compares losses.
        points = Delta() if concentrated else QuasiMonteCarlo(_BY_CLASS_SAMPLES)
        guard = Backtracking(monotone=concentrated)
        rule = von(_BY_CLASS_RATE).replace(family=BlockDiagonalGaussian, points=points, guard=guard)
        return rule.replace(name="by_class")
    # Deterministic points in the space of each example's outputs, the same at every step, let a fit converge.
    points = Quadrature(_QUADRATURE_ORDER, bend=bend) if outputs == 1 else QuasiMonteCarlo(_QUASI_MONTE_CARLO_SAMPLES)
    rule = von(_VARIATIONAL_RATE).replace(points=points, guard=Backtracking(monotone=True))
    if many and name != "mean_field":
        # At a few points of many outputs, gradient and Hessian are not those of one function: a guard that compares
        # losses would stop the steps, and more points and shorter steps bring them closer than it would.
        rule = von(_MANY_RATE).replace(points=QuasiMonteCarlo(_MANY_SAMPLES), guard=Backtracking())
    if name != "mean_field":
        return rule
    # A start with the precision that a curvature of 1 per example gives is narrow, so that no expectation overflows.
    start = Start(DiagonalGaussian, 1.0, per_example=True, prior=True)
    accelerated = Steps(1.0, acceleration=Anderson())
    return rule.replace(family=start, curvature=HessianDiagonal(), steps=accelerated, name="mean_field")


# Networks with a Gaussian posterior.

# With relative=False the rate is the fraction of a Newton step, which has no units. The initial curvature is a guess;
# with a decay of 0.99 the average forgets it within about a hundred steps.
_NEWTON_FRACTION = {"relative": False, "decay": 0.99}
_NETWORK: dict[str, tuple[float, Callable[..., Rule]]] = {
    "ivon": (0.1, partial(ivon, **_NEWTON_FRACTION)),
    "vogn": (0.1, partial(vogn, **_NEWTON_FRACTION)),
    "voggn": (0.1, partial(voggn, **_NEWTON_FRACTION)),
    "ogn": (0.1, partial(ogn, **_NEWTON_FRACTION)),
    "oggn": (0.1, partial(oggn, **_NEWTON_FRACTION)),
    "slang": (0.1, partial(slang, decay=0.99)),
    "adam": (0.03, adam),
    "rmsprop": (0.01, rmsprop),
    "sgd": (0.05, partial(sgd, momentum=0.9)),
    "dropout": (0.2, dropout),
}
_WITHOUT_TEMPERATURE = ("adam", "rmsprop", "sgd", "dropout")
NETWORK = tuple(_NETWORK)


@lru_cache(maxsize=256)
def network_rule(
    name: str, steps: int | None, temperature: float, rate_factor: float = 1.0, curvature_factor: float = 1.0
) -> Rule:
    """A named rule for a network with a Gaussian posterior.

    Args:
        name: a name in `NETWORK`.
        steps: how many steps will be taken, along which the rate decays; None for a stream, with a constant rate.
        temperature: τ, for recipes that have one.
        rate_factor: multiplies the rate.
        curvature_factor: multiplies the initial curvature.
    """
    rate, recipe = _NETWORK[name]
    options = {} if name in _WITHOUT_TEMPERATURE else {"temperature": temperature, "curvature": 0.1 * curvature_factor}
    return recipe(_decaying_or_constant(rate_factor * rate, steps), **options)


# Networks with binary weights.

_BINARY_RATES = {"bayesbinn": 0.1, "straight_through": 3.0}
BINARY_NETWORK = tuple(_BINARY_RATES)


@lru_cache(maxsize=256)
def binary_network_rule(name: str, steps: int | None) -> Rule:
    """A named rule for a network with binary weights.

    Args:
        name: a name in `BINARY_NETWORK`.
        steps: how many steps will be taken, along which the rate decays; None for a stream, with a constant rate.
    """
    rate = _decaying_or_constant(_BINARY_RATES[name], steps)
    if name == "bayesbinn":
        # Without smoothing, the scale of the relaxed gradients is so heavy-tailed that wide networks overflow.
        return bayesbinn(rate, smoothing=0.1, averaging=0.9, temperature=0.1)
    return straight_through(rate, averaging=0.9)


def prediction_method(rule: Rule) -> str:
    """How to predict with the posterior that a rule makes.

    Returns:
        "samples", averaging over draws, if the rule averages over q; "linearized", if its curvature was measured at
        the mean; "mean", if it has no curvature of the loss; "signs", if it used the signs of binary weights.
    """
    if isinstance(rule.points, Sign):
        return "signs"
    if not rule.points.delta:
        return "samples"
    return "mean" if isinstance(rule.curvature, Gradient | SquaredGradient) else "linearized"
