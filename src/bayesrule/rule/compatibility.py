"""Which pieces go together: a table of conditions and messages.

A need is a pair (condition, message): the condition is asked about all pieces (`steps.needs.Pieces`), and where it does
not hold the message is a ValueError that says what is wrong, why, and what to do. Most needs are declared by the pieces
themselves, next to what they offer (`Points.exact`, `Curvature.serves`, `Family.symmetric`, …), so that a piece of
yours is checked like the library's own:

    class Bracket(blr.Guard):                       # A guard that only makes sense for one parameter rate.
        needs = ((lambda p: p.steps.rates.single, "Bracket() needs one rate: use Steps(0.1)."),)

`_NEEDS` has those that belong to no single piece. The check runs when a rule is built, and again with q itself when its
state is made, since some facts are known of a member only (an abstract family's structure, a precision of zero).
"""

from __future__ import annotations

from typing import Any

from jax.core import Tracer

from ..curvature.base import Curvature
from ..curvature.gradient import Gradient
from ..families.base import ExponentialFamily, Family
from ..families.product import Product
from ..families.start import Start
from ..points.base import Points
from ..steps.guards import Guard
from ..steps.needs import Need, Pieces
from ..steps.schedule import equals
from ..steps.steps import Steps

# The curvatures that fill each structure of precision, for messages.
_FITTING = {
    "none": "Gradient()",
    "diagonal": "HessianDiagonal(), GaussNewton(), GeneralizedGaussNewton(), SquaredGradient() or Stein()",
    "full": "Hessian(), GaussNewton(), GeneralizedGaussNewton() or Stein()",
    "blocks": "Hessian()",
    "factored": "GaussNewton() or GeneralizedGaussNewton()",
    "kronecker": "GaussNewton() or GeneralizedGaussNewton()",
}


def check(family: Start, points: Points, curvature: Curvature, steps: Steps, guard: Guard, member: Any = None) -> None:
    """Raise unless these pieces make an algorithm for this family (and this member of it).

    Args:
        family: The family piece.
        points: The points.
        curvature: The curvature.
        steps: The steps.
        guard: The guard.
        member: The q that a state is made from; None while the rule is built.
    """
    kind = family.kind if member is None else type(member)
    mixture_needs = kind.needs if kind.is_mixture else ()
    if kind.is_mixture:  # A mixture is moved by steps of its components.
        member = None if member is None else member.component_prototype
        kind = family.part if member is None else type(member)
    structure = family.structure if member is None else _structure(member)
    pieces = Pieces(kind, structure, points, curvature, steps, guard, member)
    step_needs = () if steps.acceleration is None else steps.acceleration.needs
    needs = (*mixture_needs, *points.needs, *curvature.needs, *kind.needs, *_NEEDS, *step_needs, *guard.needs)
    for condition, message in needs:
        if not condition(pieces):
            raise ValueError(message if isinstance(message, str) else message(pieces))


def _structure(member: Family) -> str | None:
    structure = getattr(member, "structure", None)
    return None if structure is None else structure.name


def _measures_in_theta(p: Pieces) -> bool:
    """Whether the curvature's derivatives in θ move a Gaussian's mean and precision.

    They do not where the gradient is in μ: exact points, a derivative in λ, or points that carry the gradient to μ for
    a family without a precision.
    """
    return not (p.abstract or p.points.exact or p.curvature.in_lambda or (p.points.chained and p.structure is None))


def _gradient_suffices(p: Pieces) -> bool:
    without_precision = p.points.of_family is not None and not hasattr(p.points.of_family, "structure")
    return not p.curvature.in_lambda and (not without_precision or p.curvature.serves == {"none"})


def _plain_model_steps(p: Pieces) -> bool:
    steps = p.steps
    extras = (steps.momentum, steps.average, steps.scaling, steps.acceleration)
    plain = all(extra is None for extra in extras) and p.plain_coordinates
    unit = isinstance(steps.temperature, Tracer) or equals(steps.temperature, 1)
    return plain and unit and isinstance(p.curvature, Gradient) and p.points.exact


_NEEDS: tuple[Need, ...] = (
    # Points that say how they move with μ are those of one family, and bring its gradient along.
    (
        lambda p: p.abstract or p.points.of_family is None or issubclass(p.kind, p.points.of_family),
        lambda p: (
            f"{p.points!r} are points of a {getattr(p.points.of_family, '__name__', '')}, and this is a {p.name}: use "
            "Delta() or MonteCarlo()."
        ),
    ),
    (
        lambda p: p.abstract or not p.points.chained or _gradient_suffices(p),
        lambda p: f"{p.points!r} carry the gradient to μ by themselves: use Gradient().",
    ),
    # What is measured must be what the family moves by.
    (
        lambda p: (
            p.abstract
            or not (p.points.exact or p.curvature.in_lambda)
            or (p.points.chained and p.structure is None)
            or issubclass(p.kind, ExponentialFamily)
        ),
        lambda p: (
            f"{type(p.points).__name__}() with {type(p.curvature).__name__}() needs an exponential family, and "
            f"{p.name} is not one: use {_FITTING['factored']}."
        ),
    ),
    (
        lambda p: (
            not _measures_in_theta(p)
            or (p.structure is not None and (p.points.chained or not issubclass(p.kind, Product)))
        ),
        lambda p: (
            f"{type(p.curvature).__name__}() measures derivatives in θ, which move a Gaussian's mean and precision; "
            f"for a {p.name} use Exact() points with Gradient(), or MonteCarlo() with "
            f"{'Reparameterized()' if getattr(p.kind, 'reparameterized', False) else 'Score()'}."
        ),
    ),
    (
        lambda p: not _measures_in_theta(p) or p.structure in p.curvature.serves,
        lambda p: (
            f"{type(p.curvature).__name__}() does not fill the precision of a {p.name}: use "
            f"{_FITTING.get(p.structure or '', f'a curvature that serves {p.structure!r}')}."
        ),
    ),
    # The steps must be ones that the family can take.
    (
        lambda p: p.plain_coordinates or issubclass(p.kind, ExponentialFamily),
        lambda p: (
            f"Natural momentum, the reverse and the lazy form need an exponential family, and {p.name} is not one: use "
            "GradientAverage instead of momentum, and reverse=False."
        ),
    ),
    (
        lambda p: p.steps.rates.single or not p.steps.reverse,
        "The reverse form steps in μ, where mean and precision move as one: give a single rate.",
    ),
    (
        lambda p: p.steps.rates.single or p.abstract or p.kind.separate_rates,
        lambda p: f"Rates(mean, precision) are for a Gaussian's two parts; a {p.name} takes one rate.",
    ),
    # A mixture block's responsibilities are part of the model, whose terms have the weight 1.
    (
        lambda p: not (isinstance(p.member, Product) and p.member.has_mixtures) or _plain_model_steps(p),
        "A Mixture block of a model takes plain steps at temperature 1, whose messages are those of the joint q(θ, z): "
        "use cvi() or ncvmp() without sites, momentum, averaging, scaling, acceleration, reverse or lazy form.",
    ),
    (
        lambda p: p.steps.scaling is None or p.abstract or p.structure == "diagonal" or issubclass(p.kind, Product),
        lambda p: (
            f"A scaling divides entry by entry, so it goes with a diagonal precision, and {p.name}'s is not one: use a "
            "DiagonalGaussian, or leave the scaling out."
        ),
    ),
)
